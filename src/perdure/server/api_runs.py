"""Serve the HTTP endpoints for runs, which langgraph's `RunsClient` calls.

If a request to create a run does not specify a thread, a new thread is created for the run.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import (
    AsyncGenerator,
    Collection,
)
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import quote

from fastapi import APIRouter, Depends, Query, Request, Response
from langgraph_sdk.schema import RunStatus
from pydantic import BeforeValidator, model_validator

from perdure.run_tables.runs import LIVE_STATES
from perdure.run_tables.thread_list import ThreadQuery
from perdure.server.http.access import (
    Refused,
    set_required_action,
)
from perdure.server.http.call import Call, CurrentCall, PathId
from perdure.server.http.reply import JSONReply, encode_json
from perdure.server.runs.event_log import (
    build_event_stream,
    build_frame,
    iter_sse_chunks,
)
from perdure.server.runs.private_events import (
    get_stream_mode,
)
from perdure.server.runs.run import Run, build_run_json
from perdure.server.runs.run_events import METADATA_EVENT
from perdure.server.runs.run_manager import RunManager, ServerRuns
from perdure.server.runs.run_request import (
    RunRequest,
    StreamMode,
    WithoutNulls,
    parse_repeated_or_json_array_parameter,
)
from perdure.server.runs.run_start import (
    check_run_request,
    start_checked_run,
    start_run,
)
from perdure.settings import SEARCH_LIMIT
from perdure.storage.flow import NO_LIMIT

routes = APIRouter(tags=["runs"], default_response_class=JSONReply)
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
    """The request for a single run in the body of a `POST /runs/batch` request."""

    thread_id: str | None = None


class CancelRequest(WithoutNulls):
    """The body of `POST /runs/cancel`.

    A request to cancel runs contains either a thread id and the ids of runs in that thread, or the
    status of the runs to cancel.
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
            raise ValueError("pass 'thread_id' together with 'run_ids', or pass 'status' alone")
        return self


async def start_requested_run(
    call: CurrentCall, runs: ServerRuns, body: RunRequest, thread_id: PathId | None = None
) -> Run:
    """Start the run that a request describes, and return it.

    If the run is delayed, a background asyncio task in this process waits until the run has ended.
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
    if run.events_dropped or (run.is_task_done and run.log.is_newest_event_lost):
        raise Refused(
            f"the events of run {run.run_id!r} are no longer available; read the thread's state",
            410,
        )
    return run


ReplayableRun = Annotated[Run, Depends(get_replayable_run)]


@routes.post("/threads/{thread_id}/runs/stream")
@routes.post("/runs/stream")
@set_required_action("threads:create_run")
async def stream_run(run: StartedRun, runs: ServerRuns, request: Request) -> Response:
    """Run a graph, and stream its events."""
    return _build_stream_response(
        run,
        _iter_sse_frames_of_run(run, runs, request, is_new=True),
        cancels_on_disconnect=run.request.on_disconnect == "cancel",
    )


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
    return JSONReply(build_run_json(run.row), headers={"Content-Location": _build_run_path(run)})


@routes.post("/runs/batch")
@set_required_action("threads:create_run")
async def create_runs(call: CurrentCall, runs: ServerRuns, body: list[BatchedRun]) -> Response:
    """Run graphs in the background. All requests are checked before the first run is started."""
    runs.shared_state.check_capacity_for_new_runs(call.identity, len(body))
    checked_runs = [
        await check_run_request(call, runs, request, request.thread_id) for request in body
    ]
    return JSONReply(
        [
            build_run_json((await start_checked_run(runs, checked_run)).row)
            for checked_run in checked_runs
        ]
    )


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
    await call.authorize_action_arguments(
        {"thread_id": body.thread_id, "metadata": {}, "action": action}
    )
    if body.status is not None:
        for status in ("pending", "running") if body.status == "all" else (body.status,):
            for row, *_ in await call.threads.search_permitted_runs_and_whether_last(
                ThreadQuery(), status, NO_LIMIT, 0
            ):
                await runs.cancel_run_unless_ended(call.identity.tenant, row.live, action)
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
        await runs.cancel_run_unless_ended(run.tenant, run.row.live, action)


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
    return JSONReply(build_run_json(run.row))


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

    If the request has a Last-Event-ID header, only events after the event with that id are
    streamed.
    """
    header = request.headers.get("last-event-id", "")
    last = int(header) if _EVENT_NUMBER.fullmatch(header) else None
    # While a run is in progress, another process may have emitted events that are missing from this
    # process's log. `last` is therefore capped at the sequence number of the log's last event only
    # if the run has not started or has ended, because only then is the log complete.
    if last is not None and (run.is_task_done or not run.may_have_started):
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

    When a run is cancelled with the action `interrupt`, the checkpoints that the run has stored are
    kept. The action `rollback` deletes the checkpoints that the cancelled run has stored.
    """
    run = await get_permitted_run(call, runs, thread_id, run_id, action=action)
    if run.status not in LIVE_STATES:
        raise Refused(f"run {run_id!r} has ended already; its status is {run.status!r}", 404)
    if not await runs.cancel_run_unless_ended(run.tenant, run.row.live, action):
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


async def get_permitted_run(
    call: Call, runs: RunManager, thread_id: str, run_id: str, **arguments: Any
) -> Run:
    """Return a run after checking that the caller may access the run's thread."""
    await call.permit_thread(thread_id, run_id=run_id, **arguments)
    return await runs.get(call.identity.tenant, thread_id, run_id)


def _build_run_path(run: Run) -> str:
    """Return the URL path of a run."""
    return f"/threads/{quote(run.thread_id, safe='')}/runs/{run.run_id}"


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
    runs: RunManager,
    request: Request,
    last_received_event: int | None = None,
    stream_modes: Collection[str] = (),
    *,
    is_new: bool = False,
) -> AsyncGenerator[bytes, None]:
    """Yield a run's events as server-sent event frames, followed by an error if the run failed.

    Args:
        run: The run.
        runs: The run manager of the server.
        request: The request of the reader.
        last_received_event: The number of the last event that the reader has received, or None.
        stream_modes: The stream modes whose events are sent. If no stream mode is given, all events
            are sent.
        is_new: Whether the request has just started the run.
    """
    if last_received_event is None:
        yield build_frame(METADATA_EVENT, {"run_id": run.run_id, "attempt": 1})
    try:
        async for entries in runs.read_events(
            request,
            run.thread_key,
            run.log,
            0 if is_new else last_received_event,
            run.seq_range,
            is_new=is_new,
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
        yield build_frame(
            "error",
            {
                "error": "StreamLost" if isinstance(exc, LookupError) else type(exc).__name__,
                "message": f"{exc}; read the thread's state",
            },
        )
        return
    if run.error:
        yield build_frame("error", run.error)


async def _wait_and_reply_with_output(
    run: Run, runs: RunManager, request: Request, *, cancels_on_disconnect: bool = False
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
        if run.is_task_done and run.status in LIVE_STATES:  # the server is shutting down
            raise Refused(
                f"{SERVER_CLOSING}; to wait for the run, connect to that server",
                503,
                {"Content-Location": path, "Retry-After": "1"},
            )
        if run.error:
            content = encode_json({"__error__": run.error})
        elif run.is_task_done:
            content = await runs.encode_output(run)
    return Response(
        content,
        headers={"Content-Location": path, "Location": f"{path}/join"},
        media_type=JSONReply.media_type,
    )
