"""Runs at the paths of langgraph's, for its `RunsClient`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote
from uuid import uuid4

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from sse_starlette import EventSourceResponse

from perdure.server.access import action
from perdure.server.call import Call, Caller
from perdure.server.paths import Id
from perdure.server.reply import JSON
from perdure.server.run_events import RunEvents
from perdure.server.run_log import frame
from perdure.server.run_request import RunRequest
from perdure.server.runs import Events, Run, Runs

routes = APIRouter(tags=["runs"])
PING_S: Final = 15
"""How often a comment is sent, so that proxies keep a stream without events open."""
SEND_S: Final = 30
"""How long a reader may leave a stream unread, once its buffers are full."""


async def runs_of(request: Request) -> Runs:
    """The runs of the process."""
    runs: Runs = request.app.state.runs
    return runs


All = Annotated[Runs, Depends(runs_of)]


@routes.post("/threads/{thread_id}/runs/stream")
@action("threads:create_run")
async def stream(call: Caller, runs: All, thread_id: Id, body: RunRequest) -> Response:
    """Run a graph, and stream its events."""
    return _streamed(await begin(call, runs, body, thread_id, RunEvents(body)))


@routes.post("/runs/stream")
@action("threads:create_run")
async def stream_alone(call: Caller, runs: All, body: RunRequest) -> Response:
    """Run a graph on a thread of its own, and stream its events."""
    return _streamed(await begin(call, runs, body, None, RunEvents(body)))


@routes.post("/threads/{thread_id}/runs/wait")
@action("threads:create_run")
async def wait(
    call: Caller, runs: All, thread_id: Id, body: RunRequest, request: Request
) -> Response:
    """Run a graph, and reply with its values."""
    return await _waited(await begin(call, runs, body, thread_id, RunEvents(body)), request)


@routes.post("/runs/wait")
@action("threads:create_run")
async def wait_alone(call: Caller, runs: All, body: RunRequest, request: Request) -> Response:
    """Run a graph on a thread of its own, and reply with its values."""
    return await _waited(await begin(call, runs, body, None, RunEvents(body)), request)


@routes.post("/threads/{thread_id}/runs")
@action("threads:create_run")
async def create(call: Caller, runs: All, thread_id: Id, body: RunRequest) -> Response:
    """Run a graph in the background."""
    run = await begin(call, runs, body, thread_id, RunEvents(body))
    return JSON(run.shown(), headers={"Content-Location": _path(run)})


@routes.post("/runs")
@action("threads:create_run")
async def create_alone(call: Caller, runs: All, body: RunRequest) -> Response:
    """Run a graph in the background, on a thread of its own."""
    run = await begin(call, runs, body, None, RunEvents(body))
    return JSON(run.shown(), headers={"Content-Location": _path(run)})


@routes.get("/threads/{thread_id}/runs")
@action("threads:read")
async def listed(
    call: Caller,
    runs: All,
    thread_id: Id,
    limit: Annotated[int, Query(ge=0, le=1000)] = 10,
    offset: Annotated[int, Query(ge=0)] = 0,
    status: str | None = None,
) -> Response:
    """The runs of a thread, newest first."""
    await _reach(call, thread_id)
    known = runs.of(call.identity.tenant, thread_id)
    found = [run.shown() for run in known if status in (None, run.status)]
    return JSON(found[offset : offset + limit])


@routes.get("/threads/{thread_id}/runs/{run_id}")
@action("threads:read")
async def get(call: Caller, runs: All, thread_id: Id, run_id: Id) -> Response:
    """A run."""
    return JSON((await _run(call, runs, thread_id, run_id)).shown())


@routes.get("/threads/{thread_id}/runs/{run_id}/join")
@action("threads:read")
async def join(call: Caller, runs: All, thread_id: Id, run_id: Id, request: Request) -> Response:
    """The values of a run, at its end."""
    run = await _run(call, runs, thread_id, run_id)
    return await _waited(run, request, joins=True)


@routes.get("/threads/{thread_id}/runs/{run_id}/stream")
@action("threads:read")
async def join_stream(
    call: Caller,
    runs: All,
    thread_id: Id,
    run_id: Id,
    request: Request,
    stream_mode: Annotated[list[str], Query()] = [],  # noqa: B006 - FastAPI copies it
    cancel_on_disconnect: bool = False,
) -> Response:
    """The events of a run: all that are kept, or those after the header Last-Event-ID."""
    run = await _run(call, runs, thread_id, run_id)
    given = request.headers.get("last-event-id", "")
    last = min(int(given), run.events.log.last) if given.isdecimal() else None
    return _streamed(run, last, {*stream_mode} - {""}, cancel_on_disconnect)


@routes.post("/threads/{thread_id}/runs/{run_id}/cancel")
@action("threads:update")
async def cancel(
    call: Caller,
    runs: All,
    thread_id: Id,
    run_id: Id,
    wait: bool = False,
    action: Literal["interrupt", "rollback"] = "interrupt",
) -> Response:
    """Stop a run; what it has stored stays, but with `rollback`."""
    run = await _run(call, runs, thread_id, run_id, action=action)
    run.cancel(action)
    if wait:
        await run.wait()
    return Response(status_code=204 if wait else 202)


async def begin(
    call: Call, runs: Runs, body: RunRequest, thread_id: str | None, events: Events
) -> Run:
    """Begin a run that a client asks for; without a thread, on one of its own.

    Raises:
        RequestValidationError: It asks for what it may not.
        UnknownThread: There is no such thread, and none is to be created.
    """
    temporary = thread_id is None
    thread_id = thread_id or str(uuid4())
    try:
        body.check(thread_id, call.identity.user)
    except ValueError as exc:
        wrong = {"loc": ("body",), "msg": str(exc), "type": "value_error"}
        raise RequestValidationError([wrong]) from exc
    permitted = await call.permit(
        {
            "thread_id": thread_id,
            "assistant_id": body.assistant_id,
            "metadata": dict(body.metadata),
            "if_not_exists": "create" if temporary else body.if_not_exists,
            "multitask_strategy": body.multitask_strategy,
            "kwargs": body.model_dump(exclude={"metadata"}, exclude_unset=True),
        }
    )
    body.metadata = dict(permitted.get("metadata") or {})
    if temporary or body.if_not_exists == "create":
        await call.threads.create(thread_id, body.metadata, if_exists="do_nothing")
    else:
        await call.threads.get(thread_id)
    temporary = temporary and body.on_completion == "delete"
    return runs.start(call, body, thread_id, events, temporary=temporary)


async def _reach(call: Call, thread_id: str, **about: Any) -> None:
    await call.permit({"thread_id": thread_id, **about})
    await call.threads.get(thread_id)


async def _run(call: Call, runs: Runs, thread_id: str, run_id: str, **about: Any) -> Run:
    await _reach(call, thread_id, run_id=run_id, **about)
    return runs.get(call.identity.tenant, thread_id, run_id)


def _path(run: Run) -> str:
    return f"/threads/{quote(run.thread_id, safe='')}/runs/{run.run_id}"


def _streamed(
    run: Run, last: int | None = None, modes: Collection[str] = (), cancels: bool | None = None
) -> Response:
    if cancels is None:
        cancels = run.request.on_disconnect == "cancel"
    path = _path(run)
    return EventSourceResponse(
        _frames(run, last, modes, cancels),
        headers={"Content-Location": path, "Location": f"{path}/stream"},
        ping=PING_S,
        send_timeout=SEND_S,
    )


async def _frames(
    run: Run, last: int | None, modes: Collection[str], cancels: bool
) -> AsyncIterator[bytes]:
    if last is None:
        yield frame("metadata", {"run_id": run.run_id, "attempt": 1})
        last = run.events.log.first
    try:
        async for entries in run.events.log.after(last):
            if found := [each.frame for each in entries if not modes or each.kind in modes]:
                yield b"".join(found)
        await run.wait()
    except LookupError as exc:
        yield frame("error", {"error": "StreamLost", "message": f"{exc}; read the thread's state"})
        return
    finally:
        if cancels:
            run.cancel()
    if run.error:
        yield frame("error", run.error)
    yield frame("end", {"run_id": run.run_id, "status": run.status})


async def _waited(run: Run, request: Request, *, joins: bool = False) -> Response:
    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    assert run.task is not None
    events = run.events
    leaving = asyncio.create_task(left())
    try:
        await asyncio.wait([run.task, leaving], return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not run.ended and not joins and run.request.on_disconnect == "cancel":
            run.cancel()
    output: Mapping[str, Any] | None = events.output
    if run.error:
        output = {"__error__": run.error}
    path = _path(run)
    return JSON(output, headers={"Content-Location": path, "Location": f"{path}/join"})
