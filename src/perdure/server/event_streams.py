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
from perdure.server.api_runs import begin, look
from perdure.server.assistants import UnknownAssistant, assistant_of_thread
from perdure.server.call import Call, Caller, Id
from perdure.server.graphs import Graph
from perdure.server.reply import JSON, encoded, status_of
from perdure.server.run import Run
from perdure.server.run_log import THREADS, Log, LoggedEvent, split_frames, streamed, told
from perdure.server.run_request import RunRequest
from perdure.server.runs import All, Runs
from perdure.server.websocket_sending import WebSocketSender

routes = APIRouter(prefix="/threads/{thread_id}", tags=["event streams"])
ASKS_AFTER_S: Final = 0.2
"""Clients read requests for input on a connection of their own, and stop reading the other then:
the events of a short run must have reached them."""
SUBSCRIPTIONS: Final = 32
"""How many a websocket has at once."""
_ASKS: Final = "input.requested"
_CANCELLED: Final = {"event": "failed", "error": "the run was cancelled"}
_CHANNELS: Final = (UpdatesTransformer, CustomTransformer, CheckpointsTransformer)
_SLOW: Final = 1013  # the code with which a websocket is closed whose client is to try again later


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
async def command(call: Caller, runs: All, thread_id: Id, sent: CommandRequest) -> Response:
    """Begin a run (`run.start`), or answer an interrupt (`input.respond`)."""
    return JSON(await _commanded(call, runs, thread_id, sent))


async def _commanded(
    call: Call, runs: Runs, thread_id: str, sent: CommandRequest
) -> dict[str, Any]:
    """The reply to a command."""
    params = sent.params
    try:
        if sent.method == "input.respond":
            params = {**params, **await _answer(call, runs, thread_id, params)}
        elif sent.method != "run.start":
            why = f"{sent.method!r} is no command of this server"
            return _refused(sent.id, "not_supported", why)
        body = RunRequest.model_validate({**params, "if_not_exists": "create"})
        run = await begin(call, runs, body, thread_id, "thread")
    except (ValidationError, UnknownAssistant) as exc:
        return _refused(sent.id, "invalid_argument", str(exc))
    return _done(sent, {"run_id": run.run_id}, run.first)


@routes.post("/stream/events")
@action("threads:read")
async def stream(
    call: Caller, runs: All, request: Request, thread_id: Id, wanted: Subscription
) -> Response:
    """The events of a thread, of this run and the next ones."""
    feed = await _feed(call, runs, thread_id)
    return streamed(_frames(call, runs, feed, request, wanted))


@routes.websocket("/stream/events")
@action("threads:read")
async def socket(call: Caller, runs: All, websocket: WebSocket, thread_id: Id) -> None:
    """Commands and events of a thread; events are those of `subscription.subscribe`."""
    await call.permit_thread(thread_id)
    await websocket.accept()
    await ThreadSocket(websocket, call, runs, thread_id).serve()


def _done(sent: CommandRequest, result: dict[str, Any], last: int) -> dict[str, Any]:
    meta = {"applied_through_seq": last}
    return {"type": "success", "id": sent.id, "result": result, "meta": meta}


def _refused(id: int | None, code: str, why: str) -> dict[str, Any]:
    return {"type": "error", "id": id, "error": code, "message": why}


async def _answer(
    call: Call, runs: Runs, thread_id: str, params: Mapping[str, Any]
) -> dict[str, Any]:
    """The request that answers interrupts, to the assistant of the thread."""
    given = [InterruptAnswer.model_validate(each) for each in params.get("responses") or [params]]
    order = {name: params[name] for name in ("update", "goto") if params.get(name)}
    order["resume"] = {each.interrupt_id: each.response for each in given}
    thread = await call.another("threads:read").permit_thread(thread_id)
    answers = await assistant_of_thread(call, runs.graphs, thread)
    return {"assistant_id": answers, "command": order}


async def _feed(call: Call, runs: Runs, thread_id: str) -> Log:
    """The events of a thread that may be read, and of no other that has its id later."""
    await call.permit({"thread_id": thread_id})
    thread = await runs.key_of(call.identity.tenant, thread_id)
    await call.threads.get(thread_id)
    return await runs.recalled(call.identity, thread_id, thread)


async def _frames(
    call: Call, runs: Runs, feed: Log, request: Request, wanted: Subscription
) -> AsyncGenerator[bytes, None]:
    # it reads too slowly: it connects again, and misses some; or it is known no more
    with suppress(LookupError, Refused):
        async for entries in _events(call, runs, feed, request, wanted):
            for part in split_frames(entries):
                yield part


async def _events(
    call: Call,
    runs: Runs,
    feed: Log,
    connection: HTTPConnection,
    wanted: Subscription,
) -> AsyncIterator[list[LoggedEvent]]:
    """What a client reads; if it has no place in the feed, the newest run that was not read."""
    since = wanted.since if wanted.since is None else min(wanted.since, feed.last | THREADS - 1)
    params = cast(Any, wanted.model_dump(exclude_none=True))
    reading = feed, since, partial(look, connection)
    async for entries in runs.told(call.identity, feed.thread, *reading):
        asking = [number for number, each in enumerate(entries) if each.kind["method"] == _ASKS]
        parts = [entries[: asking[0]], entries[asking[0] :]] if asking else [entries]
        for part in parts:
            if asking and part is parts[1]:
                await asyncio.sleep(ASKS_AFTER_S)
            if found := [each for each in part if matches_subscription(each.kind, params)]:
                yield found
        if since is None and _rests(entries[-1]) and entries[-1].number == feed.last:
            feed.begin()


class ThreadSocket:
    """A websocket that was accepted: commands that come, one at a time, and events that go."""

    def __init__(self, websocket: WebSocket, call: Call, runs: Runs, thread_id: str) -> None:
        self._websocket, self._call, self._runs = websocket, call, runs
        self._thread_id = thread_id
        self._readers: dict[str, asyncio.Task[None]] = {}
        whose = call.identity.tenant, call.identity.user
        self._sender = WebSocketSender(websocket, runs.memory.account_of(*whose))

    async def serve(self) -> None:
        """Do what the client asks for, until it is gone, or is refused, or does not read."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await self._take(await self._received(), group)
        except* (WebSocketDisconnect, TimeoutError):
            pass
        except* (Refused, LookupError) as failed:
            await self._close(failed.exceptions[0])

    async def _received(self) -> str | bytes:
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message["code"])
        sent: str | bytes = message.get("text") or message.get("bytes") or b""
        longest = self._websocket.app.state.limits.body_bytes
        if len(sent) > longest:
            raise Refused(f"a message has {len(sent)} bytes; expected at most {longest}", 413)
        identity = self._call.identity
        self._websocket.app.state.clients.take((identity.tenant, identity.user))
        await look(self._websocket)
        return sent

    async def _take(self, message: str | bytes, group: asyncio.TaskGroup) -> None:
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
                reply = _done(sent, {}, (await self._feed()).last)
            else:
                call = self._call.another("threads:create_run")
                reply = await _commanded(call, self._runs, self._thread_id, sent)
        except (ValidationError, PerdureError) as exc:
            reply = _failed(sent.id if sent else None, exc)
        await self._send(encoded(reply))

    async def _feed(self) -> Log:
        return await _feed(self._call.another("threads:read"), self._runs, self._thread_id)

    async def _subscribe(self, sent: CommandRequest, group: asyncio.TaskGroup) -> None:
        wanted, name = Subscription.model_validate(sent.params), str(uuid4())
        if len(self._readers) >= SUBSCRIPTIONS:
            raise Refused(f"there are {SUBSCRIPTIONS} subscriptions; end some first", 422)
        feed = await self._feed()
        await self._send(encoded(_done(sent, {"subscription_id": name}, feed.last)))
        self._readers[name] = group.create_task(self._read(feed, wanted))

    async def _read(self, feed: Log, wanted: Subscription) -> None:
        about = self._call, self._runs, feed, self._websocket
        async for entries in _events(*about, wanted):
            for each in entries:
                await self._sender.send(partial(getattr, each, "data"))
        await self._websocket.close()  # the thread was deleted

    async def _send(self, data: bytes) -> None:
        await self._sender.send(lambda: data)

    async def _close(self, error: BaseException) -> None:
        """Say why, and close: with 4000 and the status of HTTP, as a browser sees no other."""
        code = 4000 + error.status if isinstance(error, Refused) else _SLOW
        with suppress(WebSocketDisconnect, TimeoutError, RuntimeError):
            await self._send(encoded(_failed(None, error)))
            await self._websocket.close(code)


def _failed(id: int | None, error: BaseException) -> dict[str, Any]:
    """The reply to a command that failed."""
    status = status_of(error) if isinstance(error, PerdureError) else 422
    code = "permission_denied" if status in (401, 403) else "invalid_argument"
    return _refused(id, code if status < 500 else "unknown_error", str(error))


def _rests(event: LoggedEvent) -> bool:
    """Whether it is the last one of a run that asks nothing."""
    of = event.kind["params"]
    return not of["namespace"] and of["data"].get("event") in ("completed", "failed")


class ThreadEvents:
    """Plays runs to the feed of a thread."""

    def __init__(self, run: Run, runs: Runs) -> None:
        self._run = run
        self._feed = runs.feed(run.tenant, run.thread_id, run.thread, run.user)
        self._feed.charge(runs.memory.account_of(run.tenant, run.user))
        self._feed.begin_writing()
        self._interrupts: dict[str, tuple[list[str], Any]] = {}
        self._messages: dict[str, str] = {}  # ids of messages, by the model's runs
        run.feed = self._feed
        assert run.task is not None
        run.task.add_done_callback(lambda _: self._finish())

    async def play(self, graph: Graph, config: RunnableConfig, given: Any) -> None:
        """See `Player.play`; an input answers the interrupt that waits, if one does."""
        run = self._run
        self._feed.begin()
        self._add("lifecycle", [], {"event": "running"})
        if given is not None and not isinstance(given, Command):
            waiting = (await graph.aget_state(config)).interrupts
            given = Command(resume=given) if waiting else given
        made = set(graph.stream_transformers)
        async with await graph.astream_events(
            given,
            config,
            version="v3",
            **run.request.options,
            transformers=[each for each in _CHANNELS if each not in made],
        ) as events:
            async for event in events:
                self._take(run, event["method"], event["params"])

    def _take(self, run: Run, method: str, params: Mapping[str, Any]) -> None:
        ns, data = list(params["namespace"]), params["data"]
        match method:
            case "values":
                waiting = params.get("interrupts", ())
                self._interrupts |= {each.id: (ns, each.value) for each in waiting}
                run.waits |= bool(waiting)
                run.output = data if not ns else run.output
            case "updates":
                run.waits |= not ns and "__interrupt__" in data
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
                data = _checkpoint(data)
            case _ if method.startswith("custom:"):
                data = {"name": method.removeprefix("custom:"), "payload": data}
                method = "custom"
        self._add(method, ns, data)

    def closing(self, error: Mapping[str, str] | None) -> list[LoggedEvent]:
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
        events = [*((_ASKS, *each) for each in asked), ("lifecycle", [], how)]
        return [self._made(number, *each) for number, each in enumerate(events, 1)]

    def _finish(self) -> None:
        """Tell that the run was cancelled before it began, unless another one is under way."""
        newest = self._feed.newest
        at_rest = newest is None or _rests(newest)
        if at_rest and not self._run.begun and self._run.status not in LIVE_STATES:
            self._feed.extend([self._made(1, "lifecycle", [], _CANCELLED)])
        self._feed.end_writing()

    def _add(self, method: str, namespace: list[str], data: Any) -> None:
        self._feed.extend([self._made(1, method, namespace, data)])

    def _made(self, nth: int, method: str, namespace: list[str], data: Any) -> LoggedEvent:
        """The event that will be the nth from now."""
        number = self._feed.last + nth
        at, sent = int(time.time() * 1000), orjson.Fragment(told(data))
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
        return self._feed.made(number, method, event, kind)


def _checkpoint(data: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint in short; the whole has the config, with the login of the user."""
    parent = data.get("parent_config") or {"configurable": {}}
    return {
        "id": data["config"]["configurable"].get("checkpoint_id"),
        "parent_id": parent["configurable"].get("checkpoint_id"),
        "step": data["metadata"].get("step"),
        "source": data["metadata"].get("source"),
    }
