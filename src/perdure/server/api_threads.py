"""Threads by REST: the paths and shapes of langgraph's server, for its SDK's `ThreadsClient`."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import AfterValidator, BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from perdure.checkpointers import Retention
from perdure.checkpointers.address import check_thread_id
from perdure.checkpointers.thread_list import RunStatus, SortBy
from perdure.errors import UnknownThread, VersionConflict
from perdure.server import api_states
from perdure.server.access import action
from perdure.server.call import Call, Caller, Id
from perdure.server.reply import reply
from perdure.server.threads import Thread, ThreadConditions, checked_metadata
from perdure.settings import SEARCH_LIMIT

routes = APIRouter(tags=["threads"])
Json = dict[str, Any]
Metadata = Annotated[Json, AfterValidator(checked_metadata)]
Nothing = Annotated[None, Field(description="Not supported; anything given is refused.")]
Ids = Annotated[list[Annotated[str, AfterValidator(check_thread_id)]], Field(max_length=1000)]
Empty = Annotated[Json | None, Field(max_length=0, description="Not supported but empty.")]


class NewThread(BaseModel):
    """The body of `POST /threads`."""

    thread_id: str | None = None
    metadata: Metadata | None = None
    if_exists: Literal["raise", "do_nothing"] = "raise"
    supersteps: Nothing = None
    ttl: Nothing = None


class ThreadChange(BaseModel):
    """The body of `PATCH /threads/{thread_id}`."""

    metadata: Metadata | None = None
    ttl: Nothing = None


class ThreadFilters(BaseModel):
    """The body of `POST /threads/count`."""

    metadata: Metadata | None = None
    values: Empty = None
    ids: Ids | None = None
    status: RunStatus | None = None


class ThreadSearch(ThreadFilters):
    """The body of `POST /threads/search`."""

    limit: int = Field(SEARCH_LIMIT, ge=1, le=1000)
    offset: int = Field(0, ge=0)
    sort_by: SortBy | Literal["state_updated_at", "status"] | None = None
    sort_order: Literal["asc", "desc"] | None = None
    select: list[str] | None = None
    extract: Nothing = None


class Prune(BaseModel):
    """The body of `POST /threads/prune`."""

    thread_ids: Ids
    strategy: Literal["delete", "keep_latest"] = "delete"


@routes.post("/threads")
@action("threads:create")
async def create(call: Caller, body: NewThread) -> Response:
    """Create a thread."""
    asked = body.model_dump(include={"thread_id", "if_exists"}) | {"metadata": body.metadata or {}}
    given = await call.permit(asked)
    try:
        made = await call.threads.create(body.thread_id, given["metadata"])
    except VersionConflict:
        if body.if_exists == "raise" or body.thread_id is None:
            raise
        return await get(call.another("threads:read"), body.thread_id)
    call.record(thread_id=made["thread_id"])
    return await _shown(call, made)


@routes.post("/threads/search")
@action("threads:search")
async def search(call: Caller, body: ThreadSearch) -> Response:
    """Threads that match, the latest activity first unless another order is given."""
    wanted = await _permitted(call, body)
    page = wanted.pop("limit"), wanted.pop("offset")
    found = await call.threads.search(ThreadConditions(**wanted), *page)
    fields = {*(body.select or ())}
    if not fields or "values" in fields:
        found = [await _whole(call, thread) for thread in found]
    rows = [
        {name: value for name, value in thread.items() if not fields or name in fields}
        for thread in found
    ]
    return await reply(rows)


@routes.post("/threads/count")
@action("threads:search")
async def count(call: Caller, body: ThreadFilters) -> int:
    """How many threads match."""
    wanted = await _permitted(call, body)
    return await call.threads.count(ThreadConditions(**wanted))


@routes.post("/threads/prune")
@action("threads:delete")
async def prune(call: Caller, request: Request, body: Prune) -> dict[str, int]:
    """Delete threads, or all their checkpoints but the newest; unknown ids are passed over."""
    pruned = 0
    for thread_id in dict.fromkeys(body.thread_ids):
        with suppress(UnknownThread):
            if body.strategy == "delete":
                await delete(call, request, thread_id)
            else:
                await call.permit({"thread_id": thread_id})
                await call.threads.prune(thread_id, Retention(last=0))
            pruned += 1
    return {"pruned_count": pruned}


@routes.get("/threads/{thread_id}")
@action("threads:read")
async def get(call: Caller, thread_id: Id) -> Response:
    """A thread."""
    await call.permit({"thread_id": thread_id})
    return await _shown(call, await call.threads.get(thread_id))


@routes.patch("/threads/{thread_id}")
@action("threads:update")
async def update(call: Caller, request: Request, thread_id: Id, body: ThreadChange) -> Response:
    """Add metadata to a thread."""
    given = await call.permit({"thread_id": thread_id, "metadata": body.metadata or {}})
    changed = await call.threads.update(thread_id, given["metadata"])
    if request.headers.get("prefer") == "return=minimal":
        return Response(status_code=204)
    return await _shown(call, changed)


@routes.delete("/threads/{thread_id}", status_code=204)
@action("threads:delete")
async def delete(call: Caller, request: Request, thread_id: Id) -> None:
    """Delete a thread with its checkpoints; memories that rest on it stay."""
    await call.permit({"thread_id": thread_id})
    await call.threads.get(thread_id)
    await request.app.state.runs.stop(call.identity.tenant, thread_id)
    await call.threads.delete(thread_id)


@routes.post("/threads/{thread_id}/copy")
@action("threads:create")
async def copy(call: Caller, thread_id: Id) -> Response:
    """Copy a thread under a new id."""
    reading = call.another("threads:read")
    await reading.permit({"thread_id": thread_id})
    await reading.threads.get(thread_id)
    given = await call.permit({"metadata": {}})
    made = await call.threads.copy(thread_id, given["metadata"])
    call.record(thread_id=made["thread_id"])
    return await _shown(call, made)


routes.include_router(api_states.routes)


async def _permitted(call: Call, body: ThreadFilters) -> Json:
    """What is asked for, as handlers leave it: they may add to the metadata."""
    asked = body.model_dump(exclude={"select", "extract"})
    asked |= {"metadata": body.metadata or {}, "values": {}}
    given = await call.permit(asked)
    return {name: given[name] for name in asked if name != "values"}


async def _shown(call: Call, thread: Thread) -> Response:
    return await reply(await _whole(call, thread))


async def _whole(call: Call, thread: Thread) -> Thread:
    """A thread with its values."""
    found = await call.saver.aget_tuple(api_states.config_of(thread["thread_id"]))
    values = api_states.values_of(found.checkpoint["channel_values"]) if found else None
    return {**thread, "config": {}, "values": values}
