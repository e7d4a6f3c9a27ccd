"""The protocol of `client.threads.stream(…)`: commands, and events of a thread by channels.

Both by HTTP, with events as SSE, or by a websocket, where each message is a command or an event.
The events are those of `graph.astream_events(version="v3")`, numbered through the runs of a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, cast
from uuid import uuid4

import orjson
from fastapi import APIRouter, Request, Response, WebSocket, WebSocketDisconnect
from langchain_core.runnables import RunnableConfig
from langgraph.stream import CheckpointsTransformer, CustomTransformer, UpdatesTransformer
from langgraph.types import Command
from langgraph_sdk.stream.subscription import matches_subscription
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import HTTPConnection

from perdure.checkpointers.runs import LIVE_STATES
from perdure.errors import PerdureError
from perdure.server.access import Refused, action
from perdure.server.api_runs import check_identity, start_run
from perdure.server.assistants import UnknownAssistant, choose_thread_assistant
from perdure.server.call import Call, CurrentCall, PathId
from perdure.server.graphs import Graph
from perdure.server.reply import JSONReply, encode_json, http_status
from perdure.server.run import Run
from perdure.server.run_log import (
    NUMBERS_PER_RUN,
    Log,
    LoggedEvent,
    build_event_stream,
    encode_event_data,
    split_frames,
)
from perdure.server.run_request import RunRequest
from perdure.server.runs import Runs, ServerRuns
from perdure.server.websocket_sending import WebSocketSender

routes = APIRouter(prefix="/threads/{thread_id}", tags=["event streams"])
QUESTION_DELAY_S: Final = 0.2
"""Clients read requests for input on a connection of their own, and stop reading the other then:
the events of a short run must have reached them."""
MAX_SUBSCRIPTIONS: Final = 32
"""How many a websocket has at once."""
_INPUT_REQUESTED: Final = "input.requested"
_CANCELLED: Final = {"event": "failed", "error": "the run was cancelled"}
_TRANSFORMERS: Final = (UpdatesTransformer, CustomTransformer, CheckpointsTransformer)
_TRY_AGAIN_LATER: Final = (
    1013  # the code with which a websocket is closed whose client is to try again later
)


class CommandRequest(BaseModel):
    """A command of a client."""

    id: int
    method: str
    params: dict[str, Any] = {}


class Subscription(BaseModel):
    """Which events a client reads; `since`: those after this number."""

    channels: list[str]
    namespaces: list[list[str]] | None = None
    depth: int | None = None
    since: int | None = Field(None, ge=0)


class InterruptAnswer(BaseModel):
    """Of an interrupt."""

    interrupt_id: str
    response: Any


@routes.post("/commands")
@action("threads:create_run")
async def execute_command(
    call: CurrentCall, runs: ServerRuns, thread_id: PathId, sent: CommandRequest
) -> Response:
    """Begin a run (`run.start`), or answer an interrupt (`input.respond`)."""
    return JSONReply(await _execute_command(call, runs, thread_id, sent))


async def _execute_command(
    call: Call, runs: Runs, thread_id: str, sent: CommandRequest
) -> dict[str, Any]:
    """The reply to a command."""
    params = sent.params
    try:
        if sent.method == "input.respond":
            params = {**params, **await _build_answer_request(call, runs, thread_id, params)}
        elif sent.method != "run.start":
            why = f"{sent.method!r} is no command of this server"
            return _build_error(sent.id, "not_supported", why)
        body = RunRequest.model_validate({**params, "if_not_exists": "create"})
        run = await start_run(call, runs, body, thread_id, "thread")
    except (ValidationError, UnknownAssistant) as exc:
        return _build_error(sent.id, "invalid_argument", str(exc))
    return _build_success(sent, {"run_id": run.run_id}, run.number_before_events)


@routes.post("/stream/events")
@action("threads:read")
async def stream_events(
    call: CurrentCall, runs: ServerRuns, request: Request, thread_id: PathId, wanted: Subscription
) -> Response:
    """The events of a thread, of this run and the next ones."""
    feed = await _open_feed(call, runs, thread_id)
    return build_event_stream(_iter_frames(call, runs, feed, request, wanted))


@routes.websocket("/stream/events")
@action("threads:read")
async def serve_websocket(
    call: CurrentCall, runs: ServerRuns, websocket: WebSocket, thread_id: PathId
) -> None:
    """Commands and events of a thread; events are those of `subscription.subscribe`."""
    await call.permit_thread(thread_id)
    await websocket.accept()
    await ThreadSocket(websocket, call, runs, thread_id).serve()


def _build_success(sent: CommandRequest, result: dict[str, Any], last: int) -> dict[str, Any]:
    meta = {"applied_through_seq": last}
    return {"type": "success", "id": sent.id, "result": result, "meta": meta}


def _build_error(id: int | None, code: str, why: str) -> dict[str, Any]:
    return {"type": "error", "id": id, "error": code, "message": why}


async def _build_answer_request(
    call: Call, runs: Runs, thread_id: str, params: Mapping[str, Any]
) -> dict[str, Any]:
    """The request that answers interrupts, to the assistant of the thread."""
    given = [InterruptAnswer.model_validate(each) for each in params.get("responses") or [params]]
    order = {name: params[name] for name in ("update", "goto") if params.get(name)}
    order["resume"] = {each.interrupt_id: each.response for each in given}
    thread = await call.with_action("threads:read").permit_thread(thread_id)
    answers = await choose_thread_assistant(call, runs.graphs, thread)
    return {"assistant_id": answers, "command": order}


async def _open_feed(call: Call, runs: Runs, thread_id: str) -> Log:
    """The events of a thread that may be read, and of no other that has its id later."""
    await call.permit({"thread_id": thread_id})
    thread = await runs.get_thread_key(call.identity.tenant, thread_id)
    await call.threads.get(thread_id)
    return await runs.open_feed(call.identity, thread_id, thread)


async def _iter_frames(
    call: Call, runs: Runs, feed: Log, request: Request, wanted: Subscription
) -> AsyncGenerator[bytes, None]:
    # it reads too slowly: it connects again, and misses some; or it is known no more
    with suppress(LookupError, Refused):
        async for entries in _iter_events(call, runs, feed, request, wanted):
            for part in split_frames(entries):
                yield part


async def _iter_events(
    call: Call,
    runs: Runs,
    feed: Log,
    connection: HTTPConnection,
    wanted: Subscription,
) -> AsyncIterator[list[LoggedEvent]]:
    """What a client reads; if it has no place in the feed, the newest run that was not read."""
    since = (
        wanted.since if wanted.since is None else min(wanted.since, feed.last | NUMBERS_PER_RUN - 1)
    )
    params = cast(Any, wanted.model_dump(exclude_none=True))
    reading = feed, since, partial(check_identity, connection)
    async for entries in runs.read_events(call.identity, feed.thread, *reading):
        asking = [
            number for number, each in enumerate(entries) if each.kind["method"] == _INPUT_REQUESTED
        ]
        parts = [entries[: asking[0]], entries[asking[0] :]] if asking else [entries]
        for part in parts:
            if asking and part is parts[1]:
                await asyncio.sleep(QUESTION_DELAY_S)
            if found := [each for each in part if matches_subscription(each.kind, params)]:
                yield found
        if since is None and _is_final_event(entries[-1]) and entries[-1].number == feed.last:
            feed.start_at_end()


class ThreadSocket:
    """A websocket that was accepted: commands that come, one at a time, and events that go."""

    def __init__(self, websocket: WebSocket, call: Call, runs: Runs, thread_id: str) -> None:
        self._websocket, self._call, self._runs = websocket, call, runs
        self._thread_id = thread_id
        self._readers: dict[str, asyncio.Task[None]] = {}
        whose = call.identity.tenant, call.identity.user
        self._sender = WebSocketSender(websocket, runs.memory.get_account(*whose))

    async def serve(self) -> None:
        """Do what the client asks for, until it is gone, or is refused, or does not read."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await self._handle_message(await self._receive_message(), group)
        except* (WebSocketDisconnect, TimeoutError):
            pass
        except* (Refused, LookupError) as failed:
            await self._close_with_error(failed.exceptions[0])

    async def _receive_message(self) -> str | bytes:
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message["code"])
        sent: str | bytes = message.get("text") or message.get("bytes") or b""
        longest = self._websocket.app.state.limits.body_bytes
        if len(sent) > longest:
            raise Refused(f"a message has {len(sent)} bytes; expected at most {longest}", 413)
        identity = self._call.identity
        self._websocket.app.state.clients.take((identity.tenant, identity.user))
        await check_identity(self._websocket)
        return sent

    async def _handle_message(self, message: str | bytes, group: asyncio.TaskGroup) -> None:
        """Do a command, and reply."""
        sent = None
        try:
            sent = CommandRequest.model_validate_json(message)
            if sent.method == "subscription.subscribe":
                await self._subscribe(sent, group)
                return
            if sent.method == "subscription.unsubscribe":
                if reader := self._readers.pop(str(sent.params.get("subscription_id")), None):
                    reader.cancel()
                reply = _build_success(sent, {}, (await self._open_feed()).last)
            else:
                call = self._call.with_action("threads:create_run")
                reply = await _execute_command(call, self._runs, self._thread_id, sent)
        except (ValidationError, PerdureError) as exc:
            reply = _build_failure(sent.id if sent else None, exc)
        await self._send_bytes(encode_json(reply))

    async def _open_feed(self) -> Log:
        return await _open_feed(self._call.with_action("threads:read"), self._runs, self._thread_id)

    async def _subscribe(self, sent: CommandRequest, group: asyncio.TaskGroup) -> None:
        wanted, name = Subscription.model_validate(sent.params), str(uuid4())
        if len(self._readers) >= MAX_SUBSCRIPTIONS:
            raise Refused(f"there are {MAX_SUBSCRIPTIONS} subscriptions; end some first", 422)
        feed = await self._open_feed()
        await self._send_bytes(
            encode_json(_build_success(sent, {"subscription_id": name}, feed.last))
        )
        self._readers[name] = group.create_task(self._forward_events(feed, wanted))

    async def _forward_events(self, feed: Log, wanted: Subscription) -> None:
        about = self._call, self._runs, feed, self._websocket
        async for entries in _iter_events(*about, wanted):
            for each in entries:
                await self._sender.send(partial(getattr, each, "data"))
        await self._websocket.close()  # the thread was deleted

    async def _send_bytes(self, data: bytes) -> None:
        await self._sender.send(lambda: data)

    async def _close_with_error(self, error: BaseException) -> None:
        """Say why, and close: with 4000 and the status of HTTP, as a browser sees no other."""
        code = 4000 + error.status if isinstance(error, Refused) else _TRY_AGAIN_LATER
        with suppress(WebSocketDisconnect, TimeoutError, RuntimeError):
            await self._send_bytes(encode_json(_build_failure(None, error)))
            await self._websocket.close(code)


def _build_failure(id: int | None, error: BaseException) -> dict[str, Any]:
    """The reply to a command that failed."""
    status = http_status(error) if isinstance(error, PerdureError) else 422
    code = "permission_denied" if status in (401, 403) else "invalid_argument"
    return _build_error(id, code if status < 500 else "unknown_error", str(error))


def _is_final_event(event: LoggedEvent) -> bool:
    """Whether it is the last one of a run that asks nothing."""
    of = event.kind["params"]
    return not of["namespace"] and of["data"].get("event") in ("completed", "failed")


class ThreadEvents:
    """Plays runs to the feed of a thread."""

    def __init__(self, run: Run, runs: Runs) -> None:
        self._run = run
        self._feed = runs.get_feed(run.tenant, run.thread_id, run.thread_key, run.user)
        self._feed.set_account(runs.memory.get_account(run.tenant, run.user))
        self._feed.add_writer()
        self._interrupts: dict[str, tuple[list[str], Any]] = {}
        self._messages: dict[str, str] = {}  # ids of messages, by the model's runs
        run.feed = self._feed
        assert run.task is not None
        run.task.add_done_callback(lambda _: self._finish_feed())

    async def play(self, graph: Graph, config: RunnableConfig, given: Any) -> None:
        """See `Player.play`; an input answers the interrupt that waits, if one does."""
        run = self._run
        self._feed.start_at_end()
        self._append_event("lifecycle", [], {"event": "running"})
        if given is not None and not isinstance(given, Command):
            waiting = (await graph.aget_state(config)).interrupts
            given = Command(resume=given) if waiting else given
        made = set(graph.stream_transformers)
        async with await graph.astream_events(
            given,
            config,
            version="v3",
            **run.request.call_options,
            transformers=[each for each in _TRANSFORMERS if each not in made],
        ) as events:
            async for event in events:
                self._add_graph_event(run, event["method"], event["params"])

    def _add_graph_event(self, run: Run, method: str, params: Mapping[str, Any]) -> None:
        ns, data = list(params["namespace"]), params["data"]
        match method:
            case "values":
                waiting = params.get("interrupts", ())
                self._interrupts |= {each.id: (ns, each.value) for each in waiting}
                run.waits_for_answer |= bool(waiting)
                run.output = data if not ns else run.output
            case "updates":
                run.waits_for_answer |= not ns and "__interrupt__" in data
            case "lifecycle":
                data = dict(data)
                ns = data.pop("namespace")
            case "messages":
                part, metadata = data
                if not isinstance(part, Mapping):
                    return  # a message that a node returns is part of the values
                model_run = str(metadata.get("run_id"))
                if part["event"] == "message-start":
                    self._messages[model_run] = part["id"]
                    node = {"langgraph_node": metadata.get("langgraph_node")}
                    data = {**part, "metadata": node}
                else:
                    data = {**part, "message_id": self._messages.get(model_run)}
            case "checkpoints":
                data = _summarize_checkpoint(data)
            case _ if method.startswith("custom:"):
                data = {"name": method.removeprefix("custom:"), "payload": data}
                method = "custom"
        self._append_event(method, ns, data)

    def build_closing_events(self, error: Mapping[str, str] | None) -> list[LoggedEvent]:
        """See `Player.closing`."""
        how = {"event": "completed"}
        asked: list[tuple[list[str], dict[str, Any]]] = []
        if error:
            how = {"event": "failed", "error": f"{error['error']}: {error['message']}"}
        elif self._run.cancelled:
            how = _CANCELLED
        elif self._run.outcome == "interrupted":
            how = {"event": "interrupted"}
            for key, (ns, value) in self._interrupts.items():
                asked.append((ns, {"interrupt_id": key, "value": value, "payload": value}))
        events = [*((_INPUT_REQUESTED, *each) for each in asked), ("lifecycle", [], how)]
        return [self._make_event(number, *each) for number, each in enumerate(events, 1)]

    def _finish_feed(self) -> None:
        """Tell that the run was cancelled before it began, unless another one is under way."""
        newest = self._feed.newest
        at_rest = newest is None or _is_final_event(newest)
        if at_rest and not self._run.may_have_started and self._run.status not in LIVE_STATES:
            self._feed.extend([self._make_event(1, "lifecycle", [], _CANCELLED)])
        self._feed.remove_writer()

    def _append_event(self, method: str, namespace: list[str], data: Any) -> None:
        self._feed.extend([self._make_event(1, method, namespace, data)])

    def _make_event(self, offset: int, method: str, namespace: list[str], data: Any) -> LoggedEvent:
        """The event that will be the nth from now."""
        number = self._feed.last + offset
        at, sent = int(time.time() * 1000), orjson.Fragment(encode_event_data(data))
        params = {"namespace": namespace, "timestamp": at, "data": sent}
        event = {
            "type": "event",
            "event_id": f"{self._run.run_id}-{number}",
            "seq": number,
            "method": method,
            "params": params,
        }
        labels = ("name", "event") if method in ("custom", "lifecycle") else ()
        about = {name: data.get(name) for name in labels if isinstance(data, Mapping)}
        kind = {"method": method, "params": {"namespace": namespace, "data": about}}
        return self._feed.make_event(number, method, event, kind)


def _summarize_checkpoint(data: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint in short; the whole has the config, with the login of the user."""
    parent = data.get("parent_config") or {"configurable": {}}
    return {
        "id": data["config"]["configurable"].get("checkpoint_id"),
        "parent_id": parent["configurable"].get("checkpoint_id"),
        "step": data["metadata"].get("step"),
        "source": data["metadata"].get("source"),
    }
