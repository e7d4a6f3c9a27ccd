"""Serve the HTTP endpoints for runs, which langgraph's `RunsClient` calls.

If a request to create a run does not specify a thread, a new thread is created for the run.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
)
from contextlib import aclosing, suppress
from functools import partial
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import quote
from uuid import NAMESPACE_OID, uuid4, uuid5

from fastapi import APIRouter, Depends, Query, Request, Response
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.messages.utils import message_chunk_to_message
from langchain_core.runnables import RunnableConfig
from langgraph.pregel import Pregel
from langgraph_sdk.schema import RunStatus
from pydantic import BeforeValidator, model_validator
from starlette.requests import HTTPConnection

from perdure.checkpointers.records import DueCron
from perdure.checkpointers.runs import LIVE_STATES
from perdure.checkpointers.thread_list import ListedThread, ThreadQuery
from perdure.errors import UnknownThread
from perdure.server.access import Forbidden, Identity, Refused, Unauthenticated, set_required_action
from perdure.server.acting import build_identity_acting_for, identify_caller
from perdure.server.api_states import build_checkpoint_config, build_checkpoint_ref, get_checkpoint
from perdure.server.assistants import get_run_assistant
from perdure.server.call import Call, CurrentCall, PathId
from perdure.server.graphs import Graph
from perdure.server.input_checks import (
    find_possibly_malformed_channel_values,
    refuse_malformed_messages,
)
from perdure.server.person import Sender
from perdure.server.private_events import build_event_kind_with_mode_and_person, get_stream_mode
from perdure.server.reply import JSONReply, encode_json
from perdure.server.run import Run, add_interrupts_to_output, build_run_json
from perdure.server.run_events import METADATA_EVENT
from perdure.server.run_log import (
    LoggedEvent,
    build_event_stream,
    build_frame,
    iter_sse_chunks,
)
from perdure.server.run_request import (
    RunRequest,
    StreamMode,
    WithoutNulls,
    parse_repeated_or_json_array_parameter,
)
from perdure.server.runs import Runs, ServerRuns
from perdure.server.teams import check_requested_teams
from perdure.settings import SEARCH_LIMIT
from perdure.storage.flow import NO_LIMIT

routes = APIRouter(tags=["runs"])
SERVER_CLOSING: Final = "the server is shutting down, and the next server continues the run"
"""The message for a client that reads a run when the server shuts down."""
# A client that requests either of the stream modes `messages` and `messages-tuple` receives the
# events of both modes.
_MESSAGES: Final[set[StreamMode | Literal[""]]] = {"messages", "messages-tuple"}
_EVENT_NUMBER: Final = re.compile(r"[0-9]{1,18}")


RunField = Literal[
    "run_id", "thread_id", "assistant_id", "created_at", "updated_at", "status", "metadata",
    "multitask_strategy",
]  # fmt: skip


class BatchedRun(RunRequest):
    """One of the runs in the body of a `POST /runs/batch` request."""

    thread_id: str | None = None


class CancelRequest(WithoutNulls):
    """The body of `POST /runs/cancel`.

    The request contains either a thread id and the ids of runs in that thread, or the status of the
    runs to cancel.
    """

    thread_id: str | None = None
    run_ids: list[str] | None = None
    status: Literal["pending", "running", "all"] | None = None

    @model_validator(mode="after")
    def _check_either_run_ids_or_status_given(self) -> Self:
        """Check that the request selects runs either by thread id and run ids, or by status."""
        is_by_id = self.thread_id is not None and self.run_ids
        if bool(is_by_id) == (self.status is not None) or bool(is_by_id) != bool(
            self.thread_id or self.run_ids
        ):
            raise ValueError("pass either both 'thread_id' and 'run_ids', or only 'status'")
        return self


async def start_requested_run(
    call: CurrentCall, runs: ServerRuns, body: RunRequest, thread_id: PathId | None = None
) -> Run:
    """Start the run that a request describes, and return it.

    If the run's start is delayed, an asyncio task in this process waits for the run to start and
    end.
    """
    run = await start_run(call, runs, body, thread_id, recorded=body.stream_resumable)
    return await runs.get(run.tenant, run.thread_id, run.run_id) if run.is_delayed else run


async def get_requested_run(
    call: CurrentCall, runs: ServerRuns, thread_id: PathId, run_id: PathId
) -> Run:
    """Return the run that a request names."""
    return await get_permitted_run(call, runs, thread_id, run_id)


StartedRun = Annotated[Run, Depends(start_requested_run)]
RequestedRun = Annotated[Run, Depends(get_requested_run)]


async def get_replayable_run(run: RequestedRun, runs: ServerRuns) -> Run:
    """Return the requested run if its events are still available.

    If events of the run are stored only in the database, load them first, so that readers in this
    process can read them.

    Raises:
        Refused: The events are no longer kept.
    """
    await runs.load_stored_events_that_process_lacks(run)
    if run.events_dropped or (run.has_ended and run.log.is_newest_event_lost):
        why = f"the events of run {run.run_id!r} are no longer available; read the thread's state"
        raise Refused(why, 410)
    return run


ReplayableRun = Annotated[Run, Depends(get_replayable_run)]


@routes.post("/threads/{thread_id}/runs/stream")
@routes.post("/runs/stream")
@set_required_action("threads:create_run")
async def stream_run(run: StartedRun, runs: ServerRuns, request: Request) -> Response:
    """Run a graph, and stream its events."""
    cancels_on_disconnect = run.request.on_disconnect == "cancel"
    frames = _iter_sse_frames_of_run(run, runs, request, is_new=True)
    return _build_stream_response(run, frames, cancels_on_disconnect)


@routes.post("/threads/{thread_id}/runs/wait")
@routes.post("/runs/wait")
@set_required_action("threads:create_run")
async def wait_for_run(run: StartedRun, runs: ServerRuns, request: Request) -> Response:
    """Run a graph, and reply with its output."""
    return await _wait_and_reply_with_output(
        run, runs, request, cancels_on_disconnect=run.request.on_disconnect == "cancel"
    )


@routes.post("/threads/{thread_id}/runs")
@routes.post("/runs")
@set_required_action("threads:create_run")
async def create_run(
    call: CurrentCall, runs: ServerRuns, body: RunRequest, thread_id: PathId | None = None
) -> Response:
    """Run a graph in the background."""
    run = await start_run(call, runs, body, thread_id)
    return JSONReply(run.build_json(), headers={"Content-Location": _build_run_path(run)})


@routes.post("/runs/batch")
@set_required_action("threads:create_run")
async def create_runs(call: CurrentCall, runs: ServerRuns, body: list[BatchedRun]) -> Response:
    """Run graphs in the background. All requests are checked before the first run is started."""
    runs.check_capacity_for_new_runs(call.identity, len(body))
    starts = [
        await check_run_request_and_get_start_function(call, runs, request, request.thread_id)
        for request in body
    ]
    return JSONReply([(await start()).build_json() for start in starts])


@routes.post("/runs/cancel", status_code=204)
@set_required_action("threads:update")
async def cancel_runs(
    call: CurrentCall,
    runs: ServerRuns,
    body: CancelRequest,
    action: Literal["interrupt", "rollback"] = "interrupt",
) -> None:
    """Cancel the given runs of a thread, or all runs with a given status.

    When runs are selected by status, only runs in threads that the caller may access are cancelled.
    """
    await call.authorize_arguments({"thread_id": body.thread_id, "metadata": {}, "action": action})
    if body.status is not None:
        for status in ("pending", "running") if body.status == "all" else (body.status,):
            for row, *_ in await call.threads.search_runs(ThreadQuery(), status, NO_LIMIT, 0):
                await runs.cancel_run(call.identity.tenant, row.live, action)
        return
    thread_id = body.thread_id or ""
    await call.threads.get(thread_id)
    named_runs = [
        await runs.get(call.identity.tenant, thread_id, run_id) for run_id in body.run_ids or ()
    ]
    live = [run for run in named_runs if run.status in LIVE_STATES]
    if not live:
        raise Refused(
            f"the runs {body.run_ids!r:.200} have all ended already, so nothing was cancelled", 404
        )
    for run in live:
        await runs.cancel_run(run.tenant, run.row.live, action)


@routes.get("/threads/{thread_id}/runs")
@set_required_action("threads:read")
async def list_runs(
    call: CurrentCall,
    runs: ServerRuns,
    thread_id: PathId,
    limit: Annotated[int, Query(ge=0, le=1000)] = SEARCH_LIMIT,
    offset: Annotated[int, Query(ge=0)] = 0,
    status: RunStatus | None = None,
    select: Annotated[
        list[RunField] | None, Query(), BeforeValidator(parse_repeated_or_json_array_parameter)
    ] = None,
) -> Response:
    """List a thread's runs, newest first."""
    await call.permit_thread(thread_id)
    run_list = map(build_run_json, await runs.list_runs(call.identity.tenant, thread_id))
    page = [run for run in run_list if status in (None, run["status"])][offset : offset + limit]
    return JSONReply([{name: run[name] for name in select} for run in page] if select else page)


@routes.get("/threads/{thread_id}/runs/{run_id}")
@set_required_action("threads:read")
async def get_run(run: RequestedRun) -> Response:
    """Return a run."""
    return JSONReply(run.build_json())


@routes.get("/threads/{thread_id}/runs/{run_id}/join")
@set_required_action("threads:read")
async def join_run(run: RequestedRun, runs: ServerRuns, request: Request) -> Response:
    """Wait until a run has ended, and reply with its output."""
    return await _wait_and_reply_with_output(run, runs, request)


@routes.get("/threads/{thread_id}/runs/{run_id}/stream")
@set_required_action("threads:read")
async def join_run_stream(
    run: ReplayableRun,
    runs: ServerRuns,
    request: Request,
    stream_mode: Annotated[
        list[StreamMode | Literal[""]],
        Query(),
        BeforeValidator(parse_repeated_or_json_array_parameter),
    ] = [],  # noqa: B006 - FastAPI copies it
    cancel_on_disconnect: bool = False,
) -> Response:
    """Stream the retained events of a run.

    If the request has a Last-Event-ID header, only later events are streamed.
    """
    header = request.headers.get("last-event-id", "")
    last = int(header) if _EVENT_NUMBER.fullmatch(header) else None
    # While the run is in progress, another process may have emitted events that this log does not
    # contain. Before the run starts and after it has ended, the log is complete, so `last` is then
    # capped at the sequence number of the log's last event.
    if last is not None and (run.has_ended or not run.may_have_started):
        last = min(last, run.log.last)
    modes = {*stream_mode} - {""}
    modes |= _MESSAGES if modes & _MESSAGES else set()
    return _build_stream_response(
        run,
        _iter_sse_frames_of_run(run, runs, request, last, modes and modes | {METADATA_EVENT}),
        cancels_on_disconnect=cancel_on_disconnect and not request.state.head,
    )


@routes.post("/threads/{thread_id}/runs/{run_id}/cancel")
@set_required_action("threads:update")
async def cancel_run(
    call: CurrentCall,
    runs: ServerRuns,
    thread_id: PathId,
    run_id: PathId,
    wait: bool = False,
    action: Literal["interrupt", "rollback"] = "interrupt",
) -> Response:
    """Cancel a run.

    The action `interrupt` keeps the checkpoints that the run has stored, and the action `rollback`
    removes them.
    """
    run = await get_permitted_run(call, runs, thread_id, run_id, action=action)
    if run.status not in LIVE_STATES:
        raise Refused(f"run {run_id!r} has ended already; its status is {run.status!r}", 404)
    if not await runs.cancel_run(run.tenant, run.row.live, action):
        raise Refused(f"run {run_id!r} ended before it could be cancelled", 404)
    if wait:
        await run.wait_until_ended()
    return Response(status_code=204 if wait else 202)


@routes.delete("/threads/{thread_id}/runs/{run_id}", status_code=204)
@set_required_action("threads:delete")
async def delete_run(
    call: CurrentCall, runs: ServerRuns, thread_id: PathId, run_id: PathId
) -> None:
    """Delete a run that has ended. The run's messages and checkpoints remain in its thread."""
    run = await get_permitted_run(call, runs, thread_id, run_id)
    if run.status in LIVE_STATES:
        raise Refused(f"run {run_id!r} has not ended; cancel it first", 409)
    await runs.delete_run(run)


async def start_run(
    call: Call,
    runs: Runs,
    body: RunRequest,
    thread_id: str | None,
    protocol: str = "run",
    *,
    recorded: bool = True,
    author: str | None = None,
) -> Run:
    """Start a run for a client.

    If `thread_id` is None, a new thread is created for the run. See
    `check_run_request_and_get_start_function` for the arguments and the exceptions.
    """
    options: Any = {"recorded": recorded, "author": author}
    return await (
        await check_run_request_and_get_start_function(
            call, runs, body, thread_id, protocol, **options
        )
    )()


async def check_run_request_and_get_start_function(
    call: Call,
    runs: Runs,
    body: RunRequest,
    thread_id: str | None,
    protocol: str = "run",
    *,
    recorded: bool = True,
    due: DueCron | None = None,
    author: str | None = None,
) -> Callable[[], Awaitable[Run]]:
    """Validate a request for a run, and return a function that starts the run.

    Nothing is written to the database until the returned function is called.

    Args:
        call: The call of the client.
        runs: The runs of the server.
        body: The request. The metadata in the request is replaced by the permitted metadata.
        thread_id: The thread, or None for a new thread.
        protocol: Whether the events go to readers of the run or of the thread; see `Run.protocol`.
        recorded: Whether the events are stored, so that clients can join the run on any server.
        due: The cron that starts the run, or None. If a cron starts the run, the new thread of the
            run has the same id at each attempt.
        author: The user who wrote the input, if the request sends the input of an earlier run
            again. None means that the caller wrote it.

    Raises:
        ConfigurationError: The request sets values that only the server may set.
        UnknownThread: The thread does not exist, and `if_not_exists` is `reject`.
        UnknownCheckpoint: The thread has no checkpoint with the requested id.
        UnknownAssistant: The assistant does not exist, or its graph is not served.
        InvalidUpdate: The input or the command has malformed messages.
        Forbidden: The context names a person for whom the caller may not act, or the thread is
            another person's.
    """
    uses_new_thread = not thread_id
    new_thread_id = str(
        uuid5(NAMESPACE_OID, f"{due.cron.cron_id} {due.cron.next_at}") if due else uuid4()
    )
    thread_id = thread_id or new_thread_id
    call = act_for_user_named_in_context(call, body)
    body.refuse_reserved_config_values(thread_id, call.identity.person)
    if body.webhook:
        runs.webhooks.check_url(body.webhook)
    runs.check_capacity_for_new_runs(call.identity)
    arguments = {
        "thread_id": thread_id,
        "assistant_id": body.assistant_id,
        "metadata": dict(body.metadata),
        "if_not_exists": "create" if uses_new_thread else body.if_not_exists,
        "multitask_strategy": body.multitask_strategy,
        "kwargs": body.model_dump(exclude={"metadata"}, exclude_unset=True),
    }
    permitted = await call.authorize_arguments({**arguments, "metadata": dict(body.metadata)})
    body.metadata = dict(permitted.get("metadata") or {})
    assistant = await get_run_assistant(call.without_acting_for(), runs.graphs, body.assistant_id)
    body = body.merge_with_assistant(assistant)
    if runs.teams is not None and runs.teams.identities_list_teams:
        check_requested_teams(call.identity, body.team_names())
    await _refuse_malformed_input_messages(call, runs, body, assistant["graph_id"], thread_id)
    threads, may_create = call.threads, uses_new_thread or body.if_not_exists == "create"
    permitted_thread: ListedThread | None = None
    if call.identity.acting_for is not None and not uses_new_thread:
        permitted_thread = await _find_thread_permitted_to_represented_person(call, arguments)
        may_create = may_create and permitted_thread is None
    if permitted_thread is None and (body.checkpoint_ids_by_namespace or not may_create):
        permitted_thread = await threads.get_permitted_row(thread_id)
    for namespace, checkpoint_id in body.checkpoint_ids_by_namespace.items():
        await call.require_model_view_access(thread_id, namespace)
        checkpoint = {"checkpoint_ns": namespace, "checkpoint_id": checkpoint_id}
        await get_checkpoint(call, build_checkpoint_config(thread_id, checkpoint))

    async def start() -> Run:
        """Create the thread if it does not exist, and start the run."""
        thread = permitted_thread
        if may_create:
            thread = await threads.get_or_create_row(thread_id, body.metadata)
        deletes_thread = uses_new_thread and body.on_completion == "delete"
        graph, options = assistant["graph_id"], dict[str, Any](temporary=deletes_thread)
        options["recorded"] = recorded and not deletes_thread
        sender = _build_run_sender(call.identity, body, due, author)
        sender = sender._replace(teams=sorted(call.identity.teams))
        known_person = None if thread is None else threads.find_person_of_thread(thread)
        person = call.identity.acting_for or known_person
        options |= {"due": due, "sender": sender, "person": person}
        return await runs.start_run(call, body, graph, thread_id, protocol, **options)

    return start


async def _refuse_malformed_input_messages(
    call: Call, runs: Runs, body: RunRequest, graph_name: str, thread_id: str
) -> None:
    """Raise an error if the input or the command of a run contains malformed messages.

    The run's graph is needed to validate the messages. To save time, the graph is loaded only if a
    quick check finds messages that may be malformed.

    Raises:
        InvalidUpdate: See `refuse_malformed_messages`.
    """
    if not (suspects := find_possibly_malformed_channel_values(body)):
        return
    ids = {"thread_id": thread_id, "user_id": call.identity.person}
    config = body.build_config(ids, is_continued=False)
    graph_context = runs.graphs.open_graph(
        *(graph_name, call.saver, call.store, config), user=call.identity.raw_user
    )
    async with graph_context as graph:
        refuse_malformed_messages(graph, suspects)


def act_for_user_named_in_context(call: Call, body: RunRequest) -> Call:
    """Return a copy of a call that acts on behalf of the person named in a run's context.

    If the context does not name another person, return the given call itself.

    Raises:
        Forbidden: See `build_identity_acting_for`.
    """
    person = (body.context or {}).get("user_id")
    if person is None:
        return call
    identity = build_identity_acting_for(call.access, call.identity, person)
    return call if identity is call.identity else call.with_identity(identity)


async def _find_thread_permitted_to_represented_person(
    call: Call, run_arguments: dict[str, Any]
) -> ListedThread | None:
    """Return the existing thread in which a caller starts a run on behalf of another person.

    Return the thread if the person has access to it. A thread that only the caller has access to is
    returned if it has no checkpoints yet and is not owned by another user. Starting the run then
    makes this thread belong to the person. In all other cases, return None.

    Raises:
        Forbidden: The thread belongs to another person.
    """
    thread_id, person = run_arguments["thread_id"], call.identity.acting_for
    try:
        thread = await call.threads.get_permitted_row(thread_id)
    except UnknownThread:
        own_call = call.without_acting_for()
        with suppress(Refused, UnknownThread):
            await own_call.authorize_arguments(run_arguments)
            thread = await own_call.threads.get_permitted_row(thread_id)
            is_own = thread.metadata.get("owner") in (None, own_call.identity.user)
            if thread.head_metadata is None and is_own:
                return thread
        return None
    thread_person = call.threads.find_person_of_thread(thread)
    if thread_person not in (None, "", person):
        raise Forbidden(
            f"you are acting for the user {person!r}, but the thread {thread_id!r} belongs to "
            "another user; use a thread of the user for whom you are acting"
        )
    return thread


def _build_run_sender(
    identity: Identity, body: RunRequest, due_cron: DueCron | None, author: str | None
) -> Sender:
    """Return the sender of a run.

    A cron's message is attributed to the user who last changed the cron, or to the person on whose
    behalf that user acted. An answer that edits a tool call counts as a message of the caller,
    because the edited call could read or write the person's memories.
    """
    is_answer = body.command is not None and body.command.resume is not None
    edits_call = is_answer and body.answers_interrupt_with_edited_tool_call
    is_author = body.has_new_graph_input or edits_call
    message_author = author or identity.person if is_author else None
    deed = "answered" if is_answer else "continued"
    if body.has_new_graph_input:
        deed = "said" if identity.acting_for is None else "sent"
    if due_cron is not None:
        deed = "scheduled"
    return Sender(
        identity.user, identity.acting_for, identity.may_act_for_others, message_author, deed
    )


async def get_permitted_run(
    call: Call, runs: Runs, thread_id: str, run_id: str, **arguments: Any
) -> Run:
    """Return a run after checking that the caller may access the run's thread."""
    await call.permit_thread(thread_id, run_id=run_id, **arguments)
    return await runs.get(call.identity.tenant, thread_id, run_id)


def _build_run_path(run: Run) -> str:
    """Return the URL path of a run."""
    return f"/threads/{quote(run.thread_id, safe='')}/runs/{run.run_id}"


async def require_valid_credentials_of_same_user(connection: HTTPConnection) -> None:
    """Check that a streaming client's credentials are still valid and identify the same user.

    Raises:
        Unauthenticated: The key was revoked, belongs to another user now, or has other permissions
            or teams than when the stream began.
    """
    try:
        identity = await identify_caller(connection)
    # A custom authentication handler may raise any exception.
    except Exception as exc:
        raise Unauthenticated(
            f"the key or token is no longer valid ({type(exc).__name__}); log in again"
        ) from exc
    if identity != connection.state.call.identity:
        raise Unauthenticated(
            "the user or the permissions of the key or token have changed; log in again"
        )


def _build_stream_response(
    run: Run, frames: AsyncGenerator[bytes, None], cancels_on_disconnect: bool
) -> Response:
    """Return a response that streams a run's events, with headers that identify the run.

    If `cancels_on_disconnect` is true, the run is cancelled if the client disconnects or stops
    reading before the last event.
    """
    path = _build_run_path(run)
    return build_event_stream(
        frames,
        {"Content-Location": path, "Location": f"{path}/stream"},
        run.cancel if cancels_on_disconnect else None,
    )


async def _iter_sse_frames_of_run(
    run: Run,
    runs: Runs,
    request: Request,
    last_received_event: int | None = None,
    stream_modes: Collection[str] = (),
    *,
    is_new: bool = False,
) -> AsyncGenerator[bytes, None]:
    """Yield a run's events as server-sent event frames, followed by an error if the run failed.

    Args:
        run: The run.
        runs: The runs of the server.
        request: The request of the reader.
        last_received_event: The number of the last event that the reader has received, or None.
        stream_modes: The stream modes whose events are sent. If no stream mode is given, all events
            are sent.
        is_new: Whether the request has just started the run.
    """
    if last_received_event is None:
        yield build_frame(METADATA_EVENT, {"run_id": run.run_id, "attempt": 1})
    reading_args = (
        0 if is_new else last_received_event,
        partial(require_valid_credentials_of_same_user, request),
        run.seq_range,
    )
    try:
        identity = request.state.call.identity
        async for entries in runs.read_events(
            identity, run.thread_key, run.log, *reading_args, is_new=is_new
        ):
            for part in iter_sse_chunks(
                event
                for event in entries
                if not stream_modes or get_stream_mode(event.kind) in stream_modes
            ):
                yield part
        await run.wait_until_ended()
        if run.status in LIVE_STATES:
            raise LookupError(SERVER_CLOSING)
    except (LookupError, Refused) as exc:
        error_name = "StreamLost" if isinstance(exc, LookupError) else type(exc).__name__
        yield build_frame(
            "error", {"error": error_name, "message": f"{exc}; read the thread's state"}
        )
        return
    if run.error:
        yield build_frame("error", run.error)


async def _wait_and_reply_with_output(
    run: Run, runs: Runs, request: Request, *, cancels_on_disconnect: bool = False
) -> Response:
    """Wait until the run has ended, and respond with its output.

    If `cancels_on_disconnect` is true, the run is cancelled if the client disconnects before the
    run has ended.
    """

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    path, content = _build_run_path(run), b"null"
    with run.retain_output_during_block():
        disconnect, run_end = (
            asyncio.create_task(wait_for_disconnect()),
            asyncio.create_task(run.wait_until_ended()),
        )
        try:
            await asyncio.wait([run_end, disconnect], return_when=asyncio.FIRST_COMPLETED)
        finally:
            disconnect.cancel()
            run_end.cancel()
            if cancels_on_disconnect:
                run.cancel()
        if run.has_ended and run.status in LIVE_STATES:
            raise Refused(
                f"{SERVER_CLOSING}; join the run",
                503,
                {"Content-Location": path, "Retry-After": "1"},
            )
        if run.error:
            content = encode_json({"__error__": run.error})
        elif run.has_ended:
            content = await runs.encode_output(run)
    headers = {"Content-Location": path, "Location": f"{path}/join"}
    return Response(content, headers=headers, media_type=JSONReply.media_type)


class RunEvents:
    """Executes the graph that a run requested, and writes the resulting events to the run's log."""

    def __init__(self, run: Run, runs: Runs) -> None:
        self._run = run
        self._messages: dict[str | None, AIMessageChunk] = {}
        # All interrupts of the run so far, keyed by id. They are accumulated here because each
        # chunk of the graph's stream contains only the new interrupts.
        self._interrupts: dict[str, Any] = {}

    async def run_graph(self, graph: Graph, config: RunnableConfig, graph_input: Any) -> None:
        """Run the graph, and log its events; see `Player.run_graph`."""
        run, request = self._run, self._run.request
        modes = {mode.removesuffix("-tuple") for mode in request.stream_mode}
        options: dict[str, Any] = {
            **request.call_options,
            "stream_mode": sorted(modes - {"events"} | {"values", "updates"}),
            "subgraphs": request.stream_subgraphs,
            "version": "v2",
        }
        # Events of the stream mode `events` contain the model's prompt, which can include memories
        # of this person.
        person = config["configurable"].get("user_id") or ""
        stream_parts = (
            partial(self._stream_graph_and_log_events, person)
            if "events" in modes
            else Pregel.astream
        )
        # Close the graph's stream explicitly. Without `aclosing`, the stream's cleanup code would
        # run only when the stream is garbage-collected.
        async with aclosing(stream_parts(graph, graph_input, config, **options)) as parts:  # type: ignore[type-var]
            async for part in parts:
                self._log_stream_part(run, part)

    async def _stream_graph_and_log_events(
        self, person: str, graph: Graph, *args: Any, **options: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """Call `graph.astream_events`, and yield the same chunks as `graph.astream` would.

        All other events from `graph.astream_events` are logged under the stream mode `events`.
        These events may contain memories of the person, so they are not shown to other users.
        """
        kind_of_event = build_event_kind_with_mode_and_person("events", person)
        async with aclosing(graph.astream_events(*args, **options)) as events:
            async for event in events:
                if event["event"] != "on_chain_stream" or event["parent_ids"]:
                    self._run.log.add("events", event, kind_of_event)
                    continue
                *namespace, kind, data = event["data"]["chunk"]
                part = {"type": kind, "ns": namespace[0] if namespace else (), "data": data}
                if kind == "values" and isinstance(data, dict):
                    part["data"] = data = dict(data)
                    part["interrupts"] = data.pop("__interrupt__", ())
                yield part

    def build_run_end_events(self, error: Mapping[str, str] | None) -> list[LoggedEvent]:
        """Return an empty list, because this protocol has no event for the end of a run.

        Instead, the response stream ends when the run's database row shows that the run has ended.
        This method implements `Player.build_run_end_events`.
        """
        return []

    def _log_stream_part(self, run: Run, part: Mapping[str, Any]) -> None:
        """Log the events of one chunk of the graph's stream.

        Also update the run's output, and remember the chunk's interrupts.
        """
        kind, namespace, data, new_interrupts = (
            part["type"],
            part["ns"],
            part["data"],
            dict[str, Any](),
        )
        if kind == "values":
            new_interrupts = {interrupt.id: interrupt for interrupt in part.get("interrupts", ())}
            data = add_interrupts_to_output(data, [*new_interrupts.values()])
            if not namespace:
                self._interrupts |= new_interrupts
                run.output = add_interrupts_to_output(data, [*self._interrupts.values()])
                run.output_event = None
        if not namespace and kind in ("values", "updates"):
            run.waits_for_answer |= isinstance(data, Mapping) and "__interrupt__" in data
        for mode in run.request.stream_mode:
            if mode.removesuffix("-tuple") == kind:
                for event, event_data in self._iter_events_of_stream_part(mode, data):
                    run.log.add("|".join((event, *namespace)), event_data, mode)
                    if (
                        mode == "values"
                        and not namespace
                        and len(new_interrupts) == len(self._interrupts)
                    ):
                        run.output_event = run.log.newest

    def _iter_events_of_stream_part(self, stream_mode: str, data: Any) -> Iterator[tuple[str, Any]]:
        """Yield the name and data of each event to send for one chunk of the graph's stream."""
        match stream_mode:
            case "messages-tuple":
                yield "messages", data
            case "messages":
                yield from self._iter_message_events(*data)
            case _:
                yield stream_mode, _reduce_configs_in_stream_data(stream_mode, data)

    def _iter_message_events(
        self, message: BaseMessage, metadata: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        """Yield the events to send in the stream mode `messages` for a message or a message chunk.

        The event for a message chunk contains the message accumulated so far, not just the new
        chunk.
        """
        previous = self._messages.get(message.id)
        if previous is None:
            yield "messages/metadata", {message.id: {"metadata": metadata}}
        if not isinstance(message, AIMessageChunk):
            yield "messages/complete", [message]
            return
        self._messages[message.id] = accumulated = (
            message if previous is None else previous + message
        )
        yield "messages/partial", [message_chunk_to_message(accumulated)]


def _reduce_configs_in_stream_data(stream_mode: str, data: Any) -> Any:
    """Reduce each config in the data of a `checkpoints` or `debug` event to its checkpoint ids.

    See `replace_configs_of_streamed_checkpoint_by_ids` for the reason and the resulting format.
    """
    match stream_mode:
        case "checkpoints":
            return replace_configs_of_streamed_checkpoint_by_ids(data)
        case "debug":
            return {
                **data,
                "payload": replace_configs_of_streamed_checkpoint_by_ids(data["payload"]),
            }
    return data


def replace_configs_of_streamed_checkpoint_by_ids(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return a streamed checkpoint's payload with each config reduced to its checkpoint ids.

    A full config must not be sent to clients, because it also contains the authenticated user
    object and all of the graph's `configurable` values.
    """
    reduced = dict(payload)
    for name in {"config", "parent_config"} & reduced.keys():
        reduced[name] = _keep_only_checkpoint_ids(reduced[name])
    if "tasks" in reduced:
        reduced["tasks"] = [
            {**task, "state": _keep_only_checkpoint_ids(task.get("state"))}
            for task in reduced["tasks"]
        ]
    return reduced


def _keep_only_checkpoint_ids(config: Any) -> Any:
    """Return a copy of a config that contains only the fields that identify its checkpoint."""
    if not isinstance(config, Mapping) or "configurable" not in config:
        return config
    return {"configurable": build_checkpoint_ref(config)}
