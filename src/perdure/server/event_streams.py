"""Serve the command and event protocol that the SDK's `client.threads.stream(…)` uses.

Clients use either HTTP with server-sent events or a websocket. Each websocket message carries one
command or one event. Clients receive the events from `graph.astream_events(version="v3")`. Each
event of a thread has a sequence number. Sequence numbers are not reset when a new run starts in the
thread.
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

from perdure.errors import PerdureError
from perdure.run_tables.runs import LIVE_STATES
from perdure.server.assistants import UnknownAssistant, choose_thread_assistant
from perdure.server.graphs import Graph
from perdure.server.http.access import Refused, set_required_action
from perdure.server.http.acting_for import require_valid_credentials_of_same_user
from perdure.server.http.call import Call, CurrentCall, PathId
from perdure.server.http.logs import Audit, is_refused_while_acting
from perdure.server.http.reply import JSONReply, encode_json, http_status
from perdure.server.http.websocket_sending import WebSocketSender
from perdure.server.runs.event_log import (
    NUMBERS_PER_RUN,
    EventLog,
    LoggedEvent,
    build_event_stream,
    encode_event_data,
    iter_sse_chunks,
)
from perdure.server.runs.run import Run
from perdure.server.runs.run_manager import RunManager, ServerRuns
from perdure.server.runs.run_request import RunRequest
from perdure.server.runs.run_start import start_run
from perdure.server.runs.shared_run_state import SharedRunState

routes = APIRouter(
    prefix="/threads/{thread_id}", tags=["event streams"], default_response_class=JSONReply
)
QUESTION_DELAY_S: Final = 0.2
"""Number of seconds for which an `input.requested` event is delayed.

Clients read `input.requested` events on a separate connection. When a client has received an
`input.requested` event, the client stops reading the connection with the other events. The delay
gives the earlier events of a short run time to reach the client before the client stops.
"""
MAX_SUBSCRIPTIONS: Final = 32
"""The maximum number of subscriptions of a websocket."""
_INPUT_REQUESTED: Final = "input.requested"
_CANCELLED: Final = {"event": "failed", "error": "the run was cancelled"}
# LangGraph emits `updates`, `custom` and `checkpoints` events only if the graph has the
# corresponding stream transformers. `ThreadEvents` adds those that the graph lacks.
_TRANSFORMERS: Final = (UpdatesTransformer, CustomTransformer, CheckpointsTransformer)
# The websocket close code that means "try again later".
_TRY_AGAIN_LATER: Final = 1013


class CommandRequest(BaseModel):
    """A command of a client."""

    id: int
    method: str
    params: dict[str, Any] = {}


class Subscription(BaseModel):
    """Selects the events that a client receives.

    If `since` is set, the client receives only events with a sequence number above this value.
    """

    channels: list[str]
    namespaces: list[list[str]] | None = None
    depth: int | None = None
    since: int | None = Field(None, ge=0)


class InterruptAnswer(BaseModel):
    """The answer to an interrupt."""

    interrupt_id: str
    response: Any


@routes.post("/commands")
@set_required_action("threads:create_run")
async def execute_command(
    call: CurrentCall, runs: ServerRuns, thread_id: PathId, command: CommandRequest
) -> Response:
    """Start a run (`run.start`), or answer an interrupt (`input.respond`)."""
    return JSONReply(await _start_run_and_build_reply(call, runs, thread_id, command))


async def _start_run_and_build_reply(
    call: Call, runs: RunManager, thread_id: str, command: CommandRequest
) -> dict[str, Any]:
    """Execute a command, and return the reply."""
    params = command.params
    try:
        if command.method == "input.respond":
            params = {
                **params,
                **await _build_run_request_from_interrupt_answers(call, runs, thread_id, params),
            }
        elif command.method != "run.start":
            return _build_error_reply(
                command.id,
                "not_supported",
                f"{command.method!r} is not a command; expected 'run.start' or 'input.respond'",
            )
        body = RunRequest.model_validate({**params, "if_not_exists": "create"})
        run = await start_run(call, runs, body, thread_id, "thread")
    except (ValidationError, UnknownAssistant) as exc:
        return _build_error_reply(command.id, "invalid_argument", str(exc))
    return _build_success_reply(
        command, {"run_id": run.run_id}, run.event_number_before_first_event
    )


@routes.post("/stream/events")
@set_required_action("threads:read")
async def stream_events(
    call: CurrentCall,
    runs: ServerRuns,
    request: Request,
    thread_id: PathId,
    subscription: Subscription,
) -> Response:
    """Stream the events of a thread's current run and subsequent runs."""
    feed = await _authorize_and_open_feed(call, runs, thread_id)
    return build_event_stream(_iter_sse_frames_of_subscription(runs, feed, request, subscription))


@routes.websocket("/stream/events")
@set_required_action("threads:read")
async def serve_websocket(
    call: CurrentCall, runs: ServerRuns, websocket: WebSocket, thread_id: PathId
) -> None:
    """Execute a thread's commands and send its events over a websocket.

    The `subscription.subscribe` command selects the events to send.
    """
    await call.permit_thread(thread_id)
    await websocket.accept()
    await ThreadSocket(websocket, call, runs, thread_id).serve()


def _build_success_reply(
    command: CommandRequest, result: dict[str, Any], last_event_number: int
) -> dict[str, Any]:
    """Build the response to a command that succeeded."""
    return {
        "type": "success",
        "id": command.id,
        "result": result,
        "meta": {"applied_through_seq": last_event_number},
    }


def _build_error_reply(id: int | None, code: str, message: str) -> dict[str, Any]:
    """Build the response to a command that failed."""
    return {"type": "error", "id": id, "error": code, "message": message}


async def _build_run_request_from_interrupt_answers(
    call: Call, runs: RunManager, thread_id: str, answer_params: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the run request fields for resuming a thread with answers to its interrupts.

    The run that resumes the thread uses the same assistant as the thread's last run.
    """
    answers = [
        InterruptAnswer.model_validate(answer)
        for answer in answer_params.get("responses") or [answer_params]
    ]
    command = {name: answer_params[name] for name in ("update", "goto") if answer_params.get(name)}
    command["resume"] = {answer.interrupt_id: answer.response for answer in answers}
    thread_row = await call.with_action("threads:read").permit_thread(thread_id)
    return {
        "assistant_id": await choose_thread_assistant(call, runs.graphs, thread_row),
        "command": command,
    }


async def _authorize_and_open_feed(call: Call, runs: RunManager, thread_id: str) -> EventLog:
    """Check that the caller is permitted to read the thread, and return the thread's event log.

    The log is closed when the thread is deleted or the server shuts down. A thread that is created
    with the id of a deleted thread gets a new event log.
    """
    await call.authorize_action_arguments({"thread_id": thread_id})
    thread_key = await runs.get_thread_key(call.identity.tenant, thread_id)
    await call.threads.get(thread_id)
    return await runs.open_event_log_for_reader(call.identity, thread_id, thread_key)


async def _iter_sse_frames_of_subscription(
    runs: RunManager, feed: EventLog, request: Request, subscription: Subscription
) -> AsyncGenerator[bytes, None]:
    """Yield the events that a client has subscribed to, as server-sent event frames.

    If the client reads too slowly or loses access to the thread, the stream ends without an error
    event. The client may connect again.
    """
    with suppress(LookupError, Refused):
        async for entries in _iter_subscribed_events(runs, feed, request, subscription):
            for part in iter_sse_chunks(entries):
                yield part


async def _iter_subscribed_events(
    runs: RunManager, feed: EventLog, connection: HTTPConnection, subscription: Subscription
) -> AsyncIterator[list[LoggedEvent]]:
    """Yield the events that a client has subscribed to.

    If a subscription has `since`, only events with a sequence number greater than `since` are sent.
    A client can subscribe without setting `since`. After one such client has received a run's last
    event, later clients that do not set `since` do not receive the run's events.
    """
    # Cap `since` at the highest event number that the newest run can have. With a larger `since`,
    # the client would miss events of the next run.
    since = (
        subscription.since
        if subscription.since is None
        else min(subscription.since, feed.last | NUMBERS_PER_RUN - 1)
    )
    params = cast(Any, subscription.model_dump(exclude_none=True))
    async for entries in runs.read_events(connection, feed.thread_key, feed, since):
        first_question = next(
            (
                index
                for index, event in enumerate(entries)
                if event.kind["method"] == _INPUT_REQUESTED
            ),
            len(entries),
        )
        for part in (entries[:first_question], entries[first_question:]):
            if part and part[0].kind["method"] == _INPUT_REQUESTED:
                await asyncio.sleep(QUESTION_DELAY_S)
            if matching := [event for event in part if matches_subscription(event.kind, params)]:
                yield matching
        if since is None and _is_final_event(entries[-1]) and entries[-1].number == feed.last:
            feed.start_at_end()


class ThreadSocket:
    """An accepted websocket that receives commands one at a time and sends events."""

    def __init__(self, websocket: WebSocket, call: Call, runs: RunManager, thread_id: str) -> None:
        self._websocket, self._call, self._runs = websocket, call, runs
        self._thread_id = thread_id
        self._readers: dict[str, asyncio.Task[None]] = {}
        user_ref = call.identity.tenant, call.identity.user
        self._sender = WebSocketSender(websocket, runs.shared_state.memory.get_account(*user_ref))

    async def serve(self) -> None:
        """Serve the client until it disconnects, loses access or stops reading events."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await self._execute_command_and_send_reply(await self._receive_message(), group)
        except* (WebSocketDisconnect, TimeoutError):
            pass
        except* (Refused, LookupError) as errors:
            await self._close_with_error(errors.exceptions[0])

    async def _receive_message(self) -> str | bytes:
        """Receive a message, enforce size and rate limits, and check the client's credentials."""
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message["code"])
        content: str | bytes = message.get("text") or message.get("bytes") or b""
        max_bytes = self._websocket.app.state.limits.body_bytes
        if len(content) > max_bytes:
            raise Refused(
                f"the message is {len(content)} bytes long; at most {max_bytes} bytes are allowed",
                413,
            )
        identity = self._call.identity
        self._websocket.app.state.clients.count_request((identity.tenant, identity.user))
        await require_valid_credentials_of_same_user(self._websocket)
        return content

    async def _execute_command_and_send_reply(
        self, message: str | bytes, group: asyncio.TaskGroup
    ) -> None:
        """Execute the command in a websocket message, and send the reply."""
        command = None
        try:
            command = CommandRequest.model_validate_json(message)
            if command.method == "subscription.subscribe":
                await self._subscribe(command, group)
                return
            if command.method == "subscription.unsubscribe":
                if reader := self._readers.pop(str(command.params.get("subscription_id")), None):
                    reader.cancel()
                reply = _build_success_reply(
                    command, {}, (await self._authorize_and_open_feed()).last
                )
            else:
                reply = await self._start_run_and_audit_refusal(command)
        except (ValidationError, PerdureError) as exc:
            reply = _build_exception_reply(command.id if command else None, exc)
        await self._send_bytes(encode_json(reply))

    async def _start_run_and_audit_refusal(self, command: CommandRequest) -> dict[str, Any]:
        """Execute a command that starts a run, and return the reply.

        If the server refuses to act for the person whom the command names, the refusal is recorded
        in the audit log.
        """
        call, state = self._call.with_action("threads:create_run"), self._websocket.state
        try:
            return await _start_run_and_build_reply(call, self._runs, self._thread_id, command)
        except Refused as exc:
            if is_refused_while_acting(call.audited_identity, exc.status):
                audit: Audit = self._websocket.app.state.audit
                await audit.record(
                    call,
                    call.action,
                    exc.status,
                    state.request_id,
                    {"thread_id": self._thread_id},
                )
            raise

    async def _authorize_and_open_feed(self) -> EventLog:
        """Check the caller's access, and return the thread's event log."""
        return await _authorize_and_open_feed(
            self._call.with_action("threads:read"), self._runs, self._thread_id
        )

    async def _subscribe(self, command: CommandRequest, group: asyncio.TaskGroup) -> None:
        """Start a task that sends a new subscription's events to the client."""
        subscription, subscription_id = Subscription.model_validate(command.params), str(uuid4())
        if len(self._readers) >= MAX_SUBSCRIPTIONS:
            raise Refused(
                f"the websocket has {MAX_SUBSCRIPTIONS} subscriptions, which is the maximum; "
                "unsubscribe first",
                422,
            )
        feed = await self._authorize_and_open_feed()
        await self._send_bytes(
            encode_json(
                _build_success_reply(command, {"subscription_id": subscription_id}, feed.last)
            )
        )
        self._readers[subscription_id] = group.create_task(self._forward_events(feed, subscription))

    async def _forward_events(self, feed: EventLog, subscription: Subscription) -> None:
        """Send the events of a subscription. Close the websocket when the event log is closed."""
        async for entries in _iter_subscribed_events(
            self._runs, feed, self._websocket, subscription
        ):
            for event in entries:
                await self._sender.send(partial(getattr, event, "json_bytes"))
        # The loop over the thread's events ends only if the thread was deleted or the server is
        # shutting down, so close the websocket when the loop has ended.
        await self._websocket.close()

    async def _send_bytes(self, data: bytes) -> None:
        """Send a message that is already encoded."""
        await self._sender.send(lambda: data)

    async def _close_with_error(self, error: BaseException) -> None:
        """Send an error, and close the websocket with the code 4000 plus the HTTP status.

        For an error without an HTTP status, such as a lost event, the websocket close code is 1013.

        The close code includes the HTTP status, because the close code is the only status that a
        browser script can read from a websocket.
        """
        code = 4000 + error.status if isinstance(error, Refused) else _TRY_AGAIN_LATER
        with suppress(WebSocketDisconnect, TimeoutError, RuntimeError):
            await self._send_bytes(encode_json(_build_exception_reply(None, error)))
            await self._websocket.close(code)


def _build_exception_reply(id: int | None, error: BaseException) -> dict[str, Any]:
    """Build the response to a command that raised an exception."""
    status = http_status(error) if isinstance(error, PerdureError) else 422
    code = "permission_denied" if status in (401, 403) else "invalid_argument"
    return _build_error_reply(id, code if status < 500 else "unknown_error", str(error))


def _is_final_event(event: LoggedEvent) -> bool:
    """Return whether an event reports that a run has completed or failed.

    The event that reports an interrupted run is not final, because the client can still answer the
    interrupt.
    """
    params = event.kind["params"]
    return not params["namespace"] and params["data"].get("event") in ("completed", "failed")


class ThreadEvents:
    """Executes a run's graph and writes its events to the feed, which is the thread's event log."""

    def __init__(self, run: Run, shared_state: SharedRunState) -> None:
        self._run = run
        self._feed = shared_state.get_or_create_event_log(
            run.tenant, run.thread_id, run.thread_key, run.user
        )
        self._feed.charge_memory_to_account(shared_state.memory.get_account(run.tenant, run.user))
        self._feed.increment_writer_count()
        # Maps the id of each interrupt of the run to its namespace and value.
        self._interrupts: dict[str, tuple[list[str], Any]] = {}
        # Maps LangChain's run id of each chat model call to the id of the message that the call
        # generates.
        self._messages: dict[str, str] = {}
        run.feed = self._feed
        assert run.task is not None
        run.task.add_done_callback(lambda _: self._add_cancelled_event_and_leave_feed())

    async def run_graph(self, graph: Graph, config: RunnableConfig, graph_input: Any) -> None:
        """Run the graph; see `Player.run_graph`.

        If the thread is waiting for an answer to an interrupt, the run's input is used as the
        answer. Clients that subscribe to the feed without `since` receive events from the start of
        this run.
        """
        run = self._run
        self._feed.start_at_end()
        self._append_event("lifecycle", [], {"event": "running"})
        if graph_input is not None and not isinstance(graph_input, Command):
            waiting = (await graph.aget_state(config)).interrupts
            graph_input = Command(resume=graph_input) if waiting else graph_input
        graph_transformers = set(graph.stream_transformers)
        async with await graph.astream_events(
            graph_input,
            config,
            version="v3",
            **run.request.call_options,
            transformers=[
                transformer
                for transformer in _TRANSFORMERS
                if transformer not in graph_transformers
            ],
        ) as events:
            async for event in events:
                self._add_graph_event(run, event["method"], event["params"])

    def _add_graph_event(self, run: Run, method: str, params: Mapping[str, Any]) -> None:
        """Convert a graph event to the client format, and append it to the feed.

        If the event contains new state values, they become the run's output. If a graph event lists
        interrupts, the method records them.
        """
        namespace, data = list(params["namespace"]), params["data"]
        match method:
            case "values":
                interrupts = params.get("interrupts", ())
                self._interrupts |= {
                    interrupt.id: (namespace, interrupt.value) for interrupt in interrupts
                }
                run.waits_for_answer |= bool(interrupts)
                run.output = data if not namespace else run.output
            case "updates":
                run.waits_for_answer |= not namespace and "__interrupt__" in data
            case "lifecycle":
                data = dict(data)
                namespace = data.pop("namespace")
            case "messages":
                part, metadata = data
                if not isinstance(part, Mapping):
                    # Add no event for a complete message that a node has returned, because the
                    # `values` events in the feed already contain such messages.
                    return
                model_run_id = str(metadata.get("run_id"))
                if part["event"] == "message-start":
                    self._messages[model_run_id] = part["id"]
                    data = {
                        **part,
                        "metadata": {"langgraph_node": metadata.get("langgraph_node")},
                    }
                else:
                    data = {**part, "message_id": self._messages.get(model_run_id)}
            case "checkpoints":
                data = _extract_ids_step_and_source_of_checkpoint(data)
            case _ if method.startswith("custom:"):
                data = {"name": method.removeprefix("custom:"), "payload": data}
                method = "custom"
        self._append_event(method, namespace, data)

    def build_run_end_events(self, error: Mapping[str, str] | None) -> list[LoggedEvent]:
        """Return the events for the run's open interrupts, followed by an event for its outcome.

        This method implements `Player.build_run_end_events`.
        """
        ending = {"event": "completed"}
        events: list[tuple[str, list[str], dict[str, Any]]] = []
        if error:
            ending = {"event": "failed", "error": f"{error['error']}: {error['message']}"}
        elif self._run.cancelled:
            ending = _CANCELLED
        elif self._run.outcome == "interrupted":
            ending = {"event": "interrupted"}
            events = [
                (
                    _INPUT_REQUESTED,
                    namespace,
                    {"interrupt_id": interrupt_id, "value": value, "payload": value},
                )
                for interrupt_id, (namespace, value) in self._interrupts.items()
            ]
        events.append(("lifecycle", [], ending))
        return [self._build_feed_event(number, *event) for number, event in enumerate(events, 1)]

    def _add_cancelled_event_and_leave_feed(self) -> None:
        """Append a `failed` event to the feed if the run was cancelled before it started.

        The `failed` event is not appended while another run of the thread is in progress. The
        feed's writer count is always decremented, even if no event is appended.
        """
        newest = self._feed.newest
        is_idle = newest is None or _is_final_event(newest)
        if is_idle and not self._run.may_have_started and self._run.status not in LIVE_STATES:
            self._feed.extend([self._build_feed_event(1, "lifecycle", [], _CANCELLED)])
        self._feed.decrement_writer_count()

    def _append_event(self, method: str, namespace: list[str], data: Any) -> None:
        """Append an event to the feed."""
        self._feed.extend([self._build_feed_event(1, method, namespace, data)])

    def _build_feed_event(
        self, offset_from_newest: int, method: str, namespace: list[str], data: Any
    ) -> LoggedEvent:
        """Build an event for the thread's feed in the format that the LangGraph SDK expects.

        Args:
            offset_from_newest: The number of the new event minus the number of the feed's newest
                event; at least 1.
            method: The channel of the event.
            namespace: The namespace of the graph or subgraph.
            data: The data of the event.
        """
        number = self._feed.last + offset_from_newest
        sent_at, encoded = int(time.time() * 1000), orjson.Fragment(encode_event_data(data))
        params = {"namespace": namespace, "timestamp": sent_at, "data": encoded}
        event = {
            "type": "event",
            "event_id": f"{self._run.run_id}-{number}",
            "seq": number,
            "method": method,
            "params": params,
        }
        labels = ("name", "event") if method in ("custom", "lifecycle") else ()
        labels_of_kind = {name: data.get(name) for name in labels if isinstance(data, Mapping)}
        kind = {"method": method, "params": {"namespace": namespace, "data": labels_of_kind}}
        return self._feed.make_event(number, method, event, kind)


def _extract_ids_step_and_source_of_checkpoint(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's id, parent id, step and source.

    Clients receive only selected fields, because the checkpoint's config contains the authenticated
    user object.
    """
    parent = data.get("parent_config") or {"configurable": {}}
    return {
        "id": data["config"]["configurable"].get("checkpoint_id"),
        "parent_id": parent["configurable"].get("checkpoint_id"),
        "step": data["metadata"].get("step"),
        "source": data["metadata"].get("source"),
    }
