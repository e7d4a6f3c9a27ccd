"""Threads by REST: the paths and shapes of langgraph's server, for its SDK's `ThreadsClient`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query
from langchain_core.runnables import RunnableConfig
from langgraph.types import StateUpdate
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from perdure.errors import (
    ConfigurationError,
    InvalidUpdate,
    PerdureError,
    UnknownThread,
    VersionConflict,
)
from perdure.server import states
from perdure.server.access import action
from perdure.server.call import Call, Caller
from perdure.server.paths import Id
from perdure.server.reply import encoded, reply
from perdure.server.threads import SortBy, Status, Thread, values_of

routes = APIRouter(tags=["threads"])
Json = dict[str, Any]
Select = Annotated[list[str] | None, Query()]
_STEP: Final = re.compile(r"\[(-?\d{1,9})\]|\.?([^.\[\]]+)")
_UNTIMED: Final = "threads have no time to live of their own; the settings' retention removes them"


class Update(BaseModel):
    """What a node did."""

    values: Json | None = None
    as_node: str | None = None
    command: None = None


class Superstep(BaseModel):
    """What nodes did at once."""

    updates: list[Update]


class NewThread(BaseModel):
    """The body of `POST /threads`."""

    thread_id: str | None = None
    metadata: Json | None = None
    if_exists: Literal["raise", "do_nothing"] = "raise"
    supersteps: list[Superstep] | None = None
    ttl: Any = None


class ThreadChange(BaseModel):
    """The body of `PATCH /threads/{thread_id}`."""

    metadata: Json | None = None
    ttl: Any = None


class Wanted(BaseModel):
    """The body of `POST /threads/count`."""

    metadata: Json | None = None
    values: Json | None = None
    ids: list[str] | None = None
    status: Status | None = None


class Search(Wanted):
    """The body of `POST /threads/search`."""

    limit: int = Field(10, ge=1, le=1000)
    offset: int = Field(0, ge=0)
    sort_by: SortBy | None = None
    sort_order: Literal["asc", "desc"] | None = None
    select: list[str] | None = None
    extract: dict[str, str] | None = Field(None, max_length=10)


class Prune(BaseModel):
    """The body of `POST /threads/prune`."""

    thread_ids: list[str]
    strategy: Literal["delete", "keep_latest"] = "delete"


class AtCheckpoint(BaseModel):
    """The body of `POST /threads/{thread_id}/state/checkpoint`."""

    checkpoint: Json
    subgraphs: bool = False
    select: list[str] | None = None


class StateChange(BaseModel):
    """The body of `POST /threads/{thread_id}/state`."""

    values: Json | list[Json] | None = None
    as_node: str | None = None
    checkpoint: Json | None = None
    checkpoint_id: str | None = None


class History(BaseModel):
    """The body of `POST /threads/{thread_id}/history`."""

    limit: int = Field(10, ge=1, le=1000)
    before: str | Json | None = None
    metadata: Json | None = None
    checkpoint: Json | None = None
    select: list[str] | None = None


# -- threads


@routes.post("/threads")
@action("threads:create")
async def create(call: Caller, request: Request, body: NewThread) -> Response:
    """Create a thread, with the given states if there are any."""
    _check_untimed(body.ttl)
    asked = body.model_dump(include={"thread_id", "if_exists"}) | {"metadata": body.metadata or {}}
    given = await call.permit(asked)
    try:
        made = await call.threads.create(body.thread_id, given["metadata"])
    except VersionConflict:
        if body.if_exists == "raise" or body.thread_id is None:
            raise
        found = await _reading(call, body.thread_id)
        return await _shown(found, await found.threads.get(body.thread_id))
    if body.supersteps:
        async with states.graph_of(request, call, made) as graph:
            config = _carrying(call, made, states.config_of(made["thread_id"]))
            steps = [
                [StateUpdate(each.values, each.as_node) for each in step.updates]
                for step in body.supersteps
            ]
            changing = states.served(graph, made)
            with _refusing():
                await changing.abulk_update_state(config, steps)
    return await _shown(call, made)


@routes.post("/threads/search")
@action("threads:search")
async def search(call: Caller, body: Search) -> Response:
    """Threads that match, the latest activity first unless another order is given."""
    given = await call.permit(body.model_dump(exclude={"select", "extract"}))
    found = await call.threads.search(**given)
    fields = {*body.select} if body.select else None
    shows = fields is None or fields & {"values", "interrupts"} or body.extract
    threads = [await _whole(call, each) if shows else each for each in found]
    rows = [
        {name: value for name, value in thread.items() if fields is None or name in fields}
        | ({"extracted": _extracted(thread, body.extract)} if body.extract else {})
        for thread in threads
    ]
    return await reply(rows)


@routes.post("/threads/count")
@action("threads:search")
async def count(call: Caller, body: Wanted) -> int:
    """How many threads match."""
    given = await call.permit(body.model_dump())
    return await call.threads.count(**given)


@routes.post("/threads/prune")
@action("threads:delete")
async def prune(call: Caller, body: Prune) -> dict[str, int]:
    """Delete threads, or all their checkpoints but the newest; unknown ids are passed over."""
    pruned = 0
    for thread_id in dict.fromkeys(body.thread_ids):
        await call.permit({"thread_id": thread_id})
        with suppress(UnknownThread):
            threads = call.threads
            await (threads.delete if body.strategy == "delete" else threads.prune)(thread_id)
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
    _check_untimed(body.ttl)
    given = await call.permit({"thread_id": thread_id, "metadata": body.metadata or {}})
    changed = await call.threads.update(thread_id, given["metadata"])
    if request.headers.get("prefer") == "return=minimal":
        return Response(status_code=204)
    return await _shown(call, changed)


@routes.delete("/threads/{thread_id}", status_code=204)
@action("threads:delete")
async def delete(call: Caller, thread_id: Id) -> None:
    """Delete a thread with its checkpoints; memories that rest on it stay."""
    await call.permit({"thread_id": thread_id})
    await call.threads.delete(thread_id)


@routes.post("/threads/{thread_id}/copy")
@action("threads:create")
async def copy(call: Caller, thread_id: Id) -> Response:
    """Copy a thread under a new id."""
    reading = await _reading(call, thread_id)
    source = await reading.threads.get(thread_id)
    given = await call.permit({"metadata": {}})
    made = await call.threads.copy(source["thread_id"], metadata=given["metadata"])
    return await _shown(call, made)


# -- states


@routes.get("/threads/{thread_id}/state")
@action("threads:read")
async def state(
    call: Caller, request: Request, thread_id: Id, subgraphs: bool = False, select: Select = None
) -> Response:
    """The newest state of a thread."""
    return await _state(call, request, thread_id, None, subgraphs, select)


@routes.get("/threads/{thread_id}/state/{checkpoint_id}")
@action("threads:read")
async def state_of(
    call: Caller,
    request: Request,
    thread_id: Id,
    checkpoint_id: Id,
    subgraphs: bool = False,
    select: Select = None,
) -> Response:
    """The state at a checkpoint."""
    at = {"checkpoint_id": checkpoint_id}
    return await _state(call, request, thread_id, at, subgraphs, select)


@routes.post("/threads/{thread_id}/state/checkpoint")
@action("threads:read")
async def state_at(call: Caller, request: Request, thread_id: Id, body: AtCheckpoint) -> Response:
    """The state at a checkpoint, also of a subgraph."""
    return await _state(call, request, thread_id, body.checkpoint, body.subgraphs, body.select)


@routes.post("/threads/{thread_id}/state")
@action("threads:update")
async def update_state(call: Caller, request: Request, thread_id: Id, body: StateChange) -> Json:
    """Update the state as if a node had returned the values.

    From an older checkpoint the thread goes on as a branch, which becomes the newest state.
    """
    await call.permit({"thread_id": thread_id})
    thread = await call.threads.get(thread_id)
    at = body.checkpoint or {"checkpoint_id": body.checkpoint_id}
    config = states.config_of(thread_id, at)
    async with states.graph_of(request, call, thread) as graph, call.threads.turn(thread_id):
        await states.state(None, call, config, subgraphs=False)  # whether there is the checkpoint
        changing, config = states.served(graph, thread), _carrying(call, thread, config)
        with _refusing():
            new = await changing.aupdate_state(config, body.values, as_node=body.as_node)
    made = states.checkpoint_of(new)
    return {
        "checkpoint": made,
        "configurable": made,
        "checkpoint_id": made and made["checkpoint_id"],
    }


@routes.get("/threads/{thread_id}/history")
@action("threads:read")
async def history(
    call: Caller,
    request: Request,
    thread_id: Id,
    limit: Annotated[int, Query(ge=1, le=1000)] = 10,
    before: str | None = None,
) -> Response:
    """The states of a thread, the newest first."""
    return await _history(call, request, thread_id, History(limit=limit, before=before))


@routes.post("/threads/{thread_id}/history")
@action("threads:read")
async def search_history(call: Caller, request: Request, thread_id: Id, body: History) -> Response:
    """The states of a thread, the newest first."""
    return await _history(call, request, thread_id, body)


# -- parts of them


async def _reading(call: Call, thread_id: str) -> Call:
    """The call, permitted to read a thread."""
    reading = call.another("threads:read")
    await reading.permit({"thread_id": thread_id})
    return reading


async def _shown(call: Call, thread: Thread) -> Response:
    return await reply(await _whole(call, thread))


async def _whole(call: Call, thread: Thread) -> Thread:
    """A thread with its values and interrupts."""
    where: Any = {"configurable": {"thread_id": thread["thread_id"]}}
    found = await call.saver.aget_tuple(where)
    values = values_of(found.checkpoint["channel_values"]) if found else None
    return {**thread, "config": {}, "values": values, "interrupts": states.interrupts_of(found)}


async def _state(
    call: Call,
    request: Request,
    thread_id: str,
    checkpoint: Json | None,
    subgraphs: bool,
    select: list[str] | None,
) -> Response:
    await call.permit({"thread_id": thread_id})
    thread = await call.threads.get(thread_id)
    config = states.config_of(thread_id, checkpoint)
    async with states.graph_of(request, call, thread) as graph:
        found = await states.state(graph, call, config, subgraphs=subgraphs)
    return await reply(states.selected(found, select))


async def _history(call: Call, request: Request, thread_id: str, body: History) -> Response:
    await call.permit({"thread_id": thread_id})
    thread = await call.threads.get(thread_id)
    before = {"checkpoint_id": body.before} if isinstance(body.before, str) else body.before
    page = {
        "limit": body.limit,
        "before": states.config_of(thread_id, before) if before else None,
        "filter": body.metadata,
    }
    config = states.config_of(thread_id, body.checkpoint)
    async with states.graph_of(request, call, thread) as graph:
        found = await states.history(graph, call, config, **page)
    return await reply([states.selected(each, body.select) for each in found])


@contextmanager
def _refusing() -> Iterator[None]:
    """Make an error of the graph that of the update: its channels take other values."""
    try:
        yield
    except PerdureError:
        raise
    except Exception as exc:
        why = f"{type(exc).__name__}: {exc!s:.300}"
        raise InvalidUpdate(f"the update cannot be applied: {why}") from exc


def _carrying(call: Call, thread: Thread, config: RunnableConfig) -> RunnableConfig:
    """The config for a new checkpoint, which also says whose the thread is, and its metadata."""
    known = dict(thread["metadata"])
    owner = known.pop("owner", call.identity.user)
    user = known.pop("user_id", owner)
    return {"configurable": {**config["configurable"], "user_id": user}, "metadata": known}


def _check_untimed(ttl: Any) -> None:
    if ttl is not None:
        raise ConfigurationError(f"ttl is {ttl!r:.80}; {_UNTIMED}")


def _extracted(thread: Thread, paths: Mapping[str, str]) -> Json:
    """The values at paths such as `values.messages[-1].content`; None: there is none."""
    plain = json.loads(encoded(thread))
    return {alias: _at(plain, path) for alias, path in paths.items()}


def _at(value: Any, path: str) -> Any:
    for match in _STEP.finditer(path):
        index, name = match.groups()
        if isinstance(value, list) and index is not None:
            value = value[int(index)] if -len(value) <= int(index) < len(value) else None
        else:
            value = value.get(name) if isinstance(value, dict) else None
    return value
