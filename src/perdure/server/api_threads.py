"""Serve the HTTP endpoints for threads, which langgraph's `ThreadsClient` calls."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated, Any, Final, Literal, cast

import orjson
from fastapi import APIRouter
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from perdure.checkpointers import Retention
from perdure.checkpointers.address import check_thread_id
from perdure.effects import arun_operation
from perdure.errors import ConfigurationError, UnknownThread, VersionConflict
from perdure.graphs.langgraph_json import MAX_TTL_MINUTES
from perdure.memory.long_term.thread_memories import PLACES, aforget_thread_memories
from perdure.memory.thread_messages import read_channel_values
from perdure.run_tables.thread_list import RunStatus, SortBy, ThreadQuery, TimeToLive
from perdure.server.api_states import (
    Superstep,
    build_checkpoint_config,
    exclude_internal_channels,
    update_thread_state,
    validate_change_of_thread_metadata,
)
from perdure.server.http.access import build_json_containment_predicate, set_required_action
from perdure.server.http.call import Call, CurrentCall, PathId
from perdure.server.http.reply import JSONObject, JSONReply, build_json_reply, encode_json
from perdure.server.runs.run_manager import ServerRuns
from perdure.server.threads import Thread, validate_metadata, validate_user_names_in_metadata
from perdure.settings import SEARCH_LIMIT
from perdure.stores.base import Namespace
from perdure.stores.filters import parse_filter_path

routes = APIRouter(tags=["threads"], default_response_class=JSONReply)
Metadata = Annotated[JSONObject, AfterValidator(validate_metadata)]
NewMetadata = Annotated[Metadata, AfterValidator(validate_user_names_in_metadata)]
"""Metadata that is stored with a thread.

The names of users in the metadata, `owner` and `user_id`, must not be blank.
"""
ThreadIds = Annotated[list[Annotated[str, AfterValidator(check_thread_id)]], Field(max_length=1000)]
MAX_THREADS_READ: Final = 1_000
"""The maximum number of threads whose values are read by a search for values."""
ValuePath = Annotated[
    str, Field(pattern=r"^[^.\[\]]+(\.[^.\[\]]+|\[-?[0-9]{1,9}\])*$", max_length=1000)
]
"""The path of a value in a thread, such as `values.messages[-1].content`."""


class Lifetime(BaseModel):
    """A thread's TTL, and the action to take when it has expired.

    The TTL is given in minutes. The countdown starts when the TTL is set, and restarts with each
    activity in the thread.
    """

    ttl: float = Field(gt=0, le=MAX_TTL_MINUTES)
    strategy: Literal["delete", "keep_latest"] = "delete"

    def time_to_live(self) -> TimeToLive:
        """Convert this request field to the `TimeToLive` that is stored with a thread."""
        return TimeToLive(self.ttl, self.strategy == "keep_latest")


def _wrap_ttl_minutes_in_dict(value: Any) -> Any:
    """Return a time to live (TTL) as a dict.

    If the given time to live is not a dict, it is interpreted as a number of minutes.
    """
    return value if isinstance(value, dict) else {"ttl": value}


Ttl = Annotated[Lifetime, BeforeValidator(_wrap_ttl_minutes_in_dict)]


class NewThread(BaseModel):
    """The body of `POST /threads`."""

    thread_id: str | None = None
    metadata: NewMetadata | None = None
    if_exists: Literal["raise", "do_nothing"] = "raise"
    supersteps: list[Superstep] = Field([], max_length=1000)
    ttl: Ttl | None = None


class ThreadChange(BaseModel):
    """The body of `PATCH /threads/{thread_id}`."""

    metadata: NewMetadata | None = None
    ttl: Ttl | None = None


ThreadField = Literal[
    "thread_id", "created_at", "updated_at", "metadata", "config", "context", "status", "values",
    "interrupts", "title", "ttl",
]  # fmt: skip


class ThreadFilters(BaseModel):
    """The body of `POST /threads/count`."""

    metadata: Metadata | None = None
    values: JSONObject | None = None
    ids: ThreadIds | None = None
    status: RunStatus | None = None


class ThreadSearch(ThreadFilters):
    """The body of `POST /threads/search`."""

    limit: int = Field(SEARCH_LIMIT, ge=1, le=1000)
    offset: int = Field(0, ge=0)
    sort_by: SortBy | None = None
    sort_order: Literal["asc", "desc"] | None = None
    select: list[ThreadField] | None = None
    extract: dict[str, ValuePath] = Field({}, max_length=10)


class Prune(BaseModel):
    """The body of `POST /threads/prune`."""

    thread_ids: ThreadIds
    strategy: Literal["delete", "keep_latest"] = "delete"


@routes.post("/threads")
@set_required_action("threads:create")
async def create_thread(call: CurrentCall, runs: ServerRuns, body: NewThread) -> Response:
    """Create a thread, and apply the state updates in `supersteps` to it.

    If the thread exists and `if_exists` is `do_nothing`, return the existing thread unchanged.
    """
    arguments = body.model_dump(include={"thread_id", "if_exists", "ttl"}, exclude_none=True)
    permitted = await call.authorize_action_arguments(arguments | {"metadata": body.metadata or {}})
    ttl = body.ttl.time_to_live() if body.ttl else None
    try:
        thread_json = await call.threads.create(
            body.thread_id, call.remove_assistant_before_first_run(permitted["metadata"]), ttl=ttl
        )
    except VersionConflict:
        if body.if_exists == "raise" or body.thread_id is None:
            raise
        return await get_thread(call.with_action("threads:read"), body.thread_id)
    call.record_for_audit(thread_id=thread_json["thread_id"])
    if body.supersteps:
        try:
            thread = await call.threads.get_permitted_row(thread_json["thread_id"])
            await update_thread_state(
                call, runs, thread, build_checkpoint_config(thread.thread_id), body.supersteps
            )
            thread_json = await call.threads.get(thread.thread_id)
        except BaseException:
            await call.threads.delete(thread_json["thread_id"])
            raise
    return await _reply_with_values(call, thread_json)


@routes.post("/threads/search")
@set_required_action("threads:search")
async def search_threads(call: CurrentCall, body: ThreadSearch) -> Response:
    """List the threads that match the filters.

    Threads are sorted by last activity, most recent first, unless the request specifies another
    order.
    """
    filters = await _authorize_and_build_thread_filters(call, body)
    page = filters.pop("limit"), filters.pop("offset")
    fields: set[str] = {*(body.select or ())}
    if body.values:
        threads = await _search_threads_by_state_values(
            call, ThreadQuery(**filters), body.values, *page
        )
    else:
        threads = await call.threads.search(ThreadQuery(**filters), *page)
        if not fields or "values" in fields or body.extract:
            threads = [await _add_state_values(call, thread) for thread in threads]

    def select_fields(thread: Thread) -> Thread:
        row = {name: value for name, value in thread.items() if not fields or name in fields}
        if body.extract:
            decoded = orjson.loads(encode_json(thread))
            row["extracted"] = {
                name: _get_by_path(decoded, path) for name, path in body.extract.items()
            }
        return row

    return await asyncio.to_thread(lambda: JSONReply([select_fields(thread) for thread in threads]))


@routes.post("/threads/count")
@set_required_action("threads:search")
async def count_threads(call: CurrentCall, body: ThreadFilters) -> int:
    """Count the threads that match the filters."""
    query = ThreadQuery(**await _authorize_and_build_thread_filters(call, body))
    if body.values:
        return len(
            await _search_threads_by_state_values(call, query, body.values, MAX_THREADS_READ, 0)
        )
    return await call.threads.count(query)


@routes.post("/threads/prune")
@set_required_action("threads:delete")
async def prune_threads(call: CurrentCall, runs: ServerRuns, body: Prune) -> dict[str, int]:
    """Delete threads, or only their older checkpoints. Unknown ids are skipped."""
    pruned = 0
    for thread_id in dict.fromkeys(body.thread_ids):
        with suppress(UnknownThread):
            if body.strategy == "delete":
                await delete_thread(call, runs, thread_id)
            else:
                await call.authorize_action_arguments({"thread_id": thread_id})
                await call.threads.prune(thread_id, Retention(last=0))
            pruned += 1
    return {"pruned_count": pruned}


@routes.get("/threads/{thread_id}")
@set_required_action("threads:read")
async def get_thread(
    call: CurrentCall, thread_id: PathId, include: Literal["ttl"] | None = None
) -> Response:
    """Return a thread.

    If the thread has a TTL, the response includes it, even if `include` is not given.
    """
    return await _reply_with_values(call, await call.permit_thread(thread_id))


@routes.patch("/threads/{thread_id}")
@set_required_action("threads:update")
async def update_thread(
    call: CurrentCall, runs: ServerRuns, request: Request, thread_id: PathId, body: ThreadChange
) -> Response:
    """Add metadata to a thread, and set its TTL if the request contains one."""
    changes = body.model_dump(include={"ttl"}, exclude_none=True)
    permitted = await call.authorize_action_arguments(
        {"thread_id": thread_id, "metadata": body.metadata or {}, **changes}
    )
    ttl = body.ttl.time_to_live() if body.ttl else None
    updated = await call.threads.update(
        thread_id,
        await validate_change_of_thread_metadata(runs, call, thread_id, permitted["metadata"]),
        ttl,
    )
    if request.headers.get("prefer") == "return=minimal":
        return Response(status_code=204)
    return await _reply_with_values(call, updated)


@routes.delete("/threads/{thread_id}", status_code=204)
@set_required_action("threads:delete")
async def delete_thread(
    call: CurrentCall,
    runs: ServerRuns,
    thread_id: PathId,
    memories: Literal["keep", "erase"] = "keep",
) -> None:
    """Delete a thread with its checkpoints, and keep or erase the memories extracted from it.

    The thread's runs are stopped first.

    With `memories=erase`, an admin erases the memories of all users. With `memories=erase`, a
    caller who is not an admin erases only their own memories of the thread.
    """
    await call.permit_thread(thread_id)
    places = await find_erasable_memory_namespaces(call) if memories == "erase" else []
    await runs.stop_runs_of_thread(call.identity.tenant, thread_id)
    if places:
        # Erase the memories before deleting the thread. If the thread were deleted first and the
        # server then crashed, the thread's memories could no longer be found.
        receipt = await aforget_thread_memories(call.store, [thread_id], places=places)
        call.record_for_audit(hashes=receipt.hashes)
    await call.threads.delete(thread_id)


async def find_erasable_memory_namespaces(call: Call) -> list[Namespace]:
    """Return the namespaces from which the caller is permitted to erase a thread's memories.

    Raises:
        Forbidden: The caller may not erase memories.
    """
    if call.identity.is_admin:
        return [*PLACES]
    erase_call, user = call.with_action("store:delete"), call.memories[1:]
    return [
        tuple(
            (await erase_call.authorize_action_arguments({"namespace": (*place, *user)}))[
                "namespace"
            ]
        )
        for place in PLACES
    ]


@routes.post("/threads/{thread_id}/copy")
@set_required_action("threads:create")
async def copy_thread(call: CurrentCall, thread_id: PathId) -> Response:
    """Copy a thread under a new id."""
    await call.with_action("threads:read").permit_thread(thread_id)
    permitted = await call.authorize_action_arguments({"metadata": {}})
    copied = await call.threads.copy(thread_id, permitted["metadata"])
    call.record_for_audit(thread_id=copied["thread_id"])
    return await _reply_with_values(call, copied)


async def _authorize_and_build_thread_filters(call: Call, body: ThreadFilters) -> JSONObject:
    """Check that a search for threads is permitted, and return the filters to apply.

    An authorization handler may add conditions to the `metadata` filter, so the returned filters
    can be stricter than those in the request.
    """
    filters = body.model_dump(exclude={"select", "extract"})
    filters |= {"metadata": body.metadata or {}, "values": body.values or {}}
    permitted = await call.authorize_action_arguments(filters)
    return {name: permitted[name] for name in filters if name != "values"}


async def _search_threads_by_state_values(
    call: Call, query: ThreadQuery, state_values: JSONObject, limit: int, offset: int
) -> list[Thread]:
    """Return one page of threads whose state contains the requested values.

    Each thread on the page is returned together with the values of its state.

    Raises:
        ConfigurationError: More than `MAX_THREADS_READ` threads match the other conditions, and the
            first `MAX_THREADS_READ` of them do not fill the page.
    """
    contains_values, matching = build_json_containment_predicate(state_values), list[Thread]()
    threads = await call.threads.search(query, MAX_THREADS_READ + 1)
    for thread in threads[:MAX_THREADS_READ]:
        thread_with_values = await _add_state_values(call, thread)
        if await asyncio.to_thread(
            lambda thread_values: contains_values(orjson.loads(encode_json(thread_values))),
            thread_with_values["values"],
        ):
            matching.append(thread_with_values)
        if len(matching) == limit + offset:
            return matching[offset:]
    if len(threads) > MAX_THREADS_READ:
        raise ConfigurationError(
            f"a search by 'values' can scan at most {MAX_THREADS_READ} threads; narrow the search "
            "by metadata, ids or status"
        )
    return matching[offset:]


def _get_by_path(value: Any, path: str) -> Any:
    """Return the value at the given path in a JSON value, or None if the path does not exist."""
    for step in cast(Any, parse_filter_path(path)):
        try:
            value = value[step] if isinstance(value, dict | list) else None
        except (KeyError, IndexError, TypeError):
            return None
    return value


async def _reply_with_values(call: Call, thread: Thread) -> Response:
    """Reply with a thread and its values."""
    return await build_json_reply(await _add_state_values(call, thread))


async def _add_state_values(call: Call, thread: Thread) -> Thread:
    """Return a copy of the thread with the values of its latest state."""
    checkpoint = await call.saver.aget_tuple(build_checkpoint_config(thread["thread_id"]))
    values = (
        exclude_internal_channels(await arun_operation(read_channel_values(call.saver, checkpoint)))
        if checkpoint
        else None
    )
    return {**thread, "config": {}, "values": values}
