"""Serve the cron endpoints of LangGraph's API, with which clients schedule runs.

A cron's runs have the permissions of the user who last changed the cron. A user may change a cron
only if the cron's metadata matches the user's authorization filter. The person to whom a thread
belongs may see and delete any cron on that thread, because the cron's runs write to the person's
thread. Seeing the cron does not permit the person to change it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple
from uuid import uuid4

from fastapi import APIRouter, Response
from fastapi.exceptions import RequestValidationError
from langgraph_sdk.schema import CronSelectField, CronSortBy
from pydantic import Field, ValidationError

from perdure.errors import ConfigurationError, UnknownThread
from perdure.run_tables.crons import CronTable
from perdure.run_tables.records import CronRow
from perdure.run_tables.thread_list import ThreadQuery
from perdure.server.assistants import find_default_assistant, get_run_assistant
from perdure.server.http.access import (
    Action,
    Forbidden,
    Refused,
    build_json_containment_predicate,
    matches_filter,
    require_filter_match,
    set_required_action,
)
from perdure.server.http.call import Call, CurrentCall, PathId, SortedPage
from perdure.server.http.reply import JSONReply
from perdure.server.runs.run_manager import RunManager, ServerRuns, convert_raw_user_to_mapping
from perdure.server.runs.run_request import WithoutNulls
from perdure.server.runs.run_start import (
    act_for_user_named_in_context,
    check_run_request,
)
from perdure.server.runs.schedule import CronOptions, CronRequest
from perdure.server.threads import validate_metadata

routes = APIRouter(tags=["crons"], default_response_class=JSONReply)
_SCHEDULE_FIELDS: Final = {"schedule", "timezone", "end_time", "enabled"}
# Maximum number of thread ids per query.
_THREADS_PER_QUERY: Final = 500
_PRIVATE_FIELDS: Final = {"config", "context", "webhook"}
"""Fields of a cron's payload that are shown only if `FoundCron.is_reachable` is True.

If a caller sees another user's cron only because the cron runs on the caller's own thread, these
fields are left out.
"""


class FoundCron(NamedTuple):
    """A cron that a search has found.

    Attributes:
        cron: The row of the cron.
        is_reachable: Whether the metadata of the cron matches the caller's authorization filter and
            the conditions that an authorization handler added to the search. If False, the caller
            may see the cron only if the cron runs on one of the caller's own threads.
    """

    cron: CronRow
    is_reachable: bool


class CronFilters(WithoutNulls):
    """The body of `POST /runs/crons/count`."""

    assistant_id: str | None = None
    thread_id: str | None = None
    metadata: dict[str, Any] = Field({})


class CronSearch(CronFilters, SortedPage):
    """The body of `POST /runs/crons/search`."""

    enabled: bool | None = None
    sort_by: CronSortBy = "created_at"
    select: list[CronSelectField] = Field([])


@routes.post("/runs/crons")
@routes.post("/threads/{thread_id}/runs/crons")
@set_required_action("crons:create")
async def create_cron(
    call: CurrentCall, runs: ServerRuns, body: CronRequest, thread_id: PathId | None = None
) -> Response:
    """Create a cron that runs a graph on a schedule.

    If the request URL contains a thread id, all runs of the cron use this thread. Otherwise, each
    run gets a new thread.
    """
    call = act_for_user_named_in_context(call, body)
    now, cron_id = time.time(), str(uuid4())
    new_cron = CronRow(cron_id, thread_id, None, now, now, {})
    metadata = await _authorize_creation_and_get_metadata(call, body, new_cron)
    cron = await _check_cron_request_and_build_row(call, runs, body, new_cron, metadata)
    if not await CronTable(call.saver).create(cron):
        raise UnknownThread(f"there is no thread {thread_id!r}")
    return JSONReply(_build_cron_json(cron))


@routes.patch("/runs/crons/{cron_id}")
@set_required_action("crons:update")
async def update_cron(
    call: CurrentCall, runs: ServerRuns, cron_id: PathId, body: dict[str, Any]
) -> Response:
    """Update fields of a cron, and merge new metadata into the existing metadata.

    Later runs of the cron have the permissions of the user who sends this request. If the updated
    context contains a `user_id`, later runs of the cron act on behalf of that user. The caller may
    then also need the permission to create a cron on behalf of that user. This permission is not
    needed if the user is the caller, or if the cron's runs acted on behalf of the same user before
    the update.
    """
    metadata = body.get("metadata") or {}
    permitted = await call.authorize_action_arguments(
        {
            "cron_id": cron_id,
            "payload": body,
            "schedule": body.get("schedule"),
            "metadata": metadata if isinstance(metadata, dict) else {},
        }
    )
    cron = await _get_changeable_cron(call, cron_id)
    if unknown := body.keys() - CronRequest.model_fields.keys():
        raise ConfigurationError(
            f"crons have no field {', '.join(sorted(unknown))}; remove the field from the request"
        )
    try:
        changed = CronRequest.model_validate(
            {**cron.content["payload"], **body, "metadata": metadata}
        )
    except ValidationError as exc:
        raise RequestValidationError(exc.errors()) from exc
    changed.metadata = {**cron.content["metadata"], **changed.metadata}
    merged_metadata = {**changed.metadata, **(permitted["metadata"] or {})}
    person_call = act_for_user_named_in_context(call, changed)
    if person_call is not call and (
        person_call.identity.acting_for != cron.content.get("acting_for")
    ):
        call, changed.metadata = person_call.with_action("crons:create"), merged_metadata
        merged_metadata = await _authorize_creation_and_get_metadata(call, changed, cron)
    cron = await _check_cron_request_and_build_row(call, runs, changed, cron, merged_metadata)
    stored = await CronTable(call.saver).update(
        cron, sets_next_time=bool(_SCHEDULE_FIELDS & body.keys())
    )
    if stored is None:
        raise _build_unknown_cron_error(cron_id)
    return JSONReply(_build_cron_json(stored))


@routes.delete("/runs/crons/{cron_id}", status_code=204)
@set_required_action("crons:delete")
async def delete_cron(call: CurrentCall, cron_id: PathId) -> None:
    """Delete a cron. Runs that the cron has already started are not cancelled."""
    await call.authorize_action_arguments({"cron_id": cron_id})
    cron = await CronTable(call.saver).get(cron_id)
    if cron is None or not (
        matches_filter(cron.content["metadata"], call.filter)
        or await _is_cron_on_permitted_own_thread(call, cron, "threads:update")
    ):
        raise _build_unknown_cron_error(cron_id)
    await CronTable(call.saver).delete(cron)


@routes.post("/runs/crons/search")
@set_required_action("crons:search")
async def search_crons(call: CurrentCall, runs: ServerRuns, body: CronSearch) -> Response:
    """List the crons that match the filters, newest first unless the request sets another order."""
    cron_list = [
        _build_cron_json(*found_cron) for found_cron in await _find_crons(call, runs, body)
    ]
    rows = [row for row in cron_list if body.enabled in (None, row["enabled"])]
    return JSONReply(body.sort_and_select_page_rows(rows, now=datetime.now(UTC)))


@routes.post("/runs/crons/count")
@set_required_action("crons:search")
async def count_crons(call: CurrentCall, runs: ServerRuns, body: CronFilters) -> int:
    """Count the crons that match the filters."""
    return len(await _find_crons(call, runs, body))


async def _authorize_creation_and_get_metadata(
    call: Call, body: CronRequest, new_cron: CronRow
) -> dict[str, Any]:
    """Check that the caller may create a cron, and return the metadata to store with the cron.

    An authorization handler may change the requested metadata.

    Raises:
        Forbidden: The caller may not create the cron.
    """
    permitted = await call.authorize_action_arguments(
        {
            "cron_id": new_cron.cron_id,
            "thread_id": new_cron.thread_id,
            "user_id": call.identity.person,
            "schedule": body.schedule,
            "end_time": body.end_time,
            "payload": body.build_fields_to_store(),
            "metadata": dict(body.metadata),
        }
    )
    return permitted["metadata"] or {}


async def _check_cron_request_and_build_row(
    call: Call, runs: RunManager, body: CronRequest, previous_row: CronRow, metadata: dict[str, Any]
) -> CronRow:
    """Validate a request that creates or changes a cron, and build the cron's row.

    A request to create or change a cron is refused if the caller is not permitted to start the
    cron's runs.

    Args:
        call: The call of the client.
        runs: The run manager of the server.
        body: The fields of the cron.
        previous_row: The cron before the change. A new cron has a row without content.
        metadata: The metadata after the change.

    Raises:
        ConfigurationError: A field is invalid.
        Forbidden: The caller would have no access to the changed cron, or may not start its runs.
    """
    if previous_row.thread_id is not None and "on_run_completed" in body.model_fields_set:
        raise ConfigurationError(
            "on_run_completed applies only to crons without a thread_id; remove on_run_completed"
        )
    require_filter_match("a cron", validate_metadata(metadata), call.filter)
    next_at = await asyncio.to_thread(body.next_time, time.time())
    run_call, identity = (
        call.with_action("threads:create_run"),
        act_for_user_named_in_context(call, body).identity,
    )
    await check_run_request(run_call, runs, body.model_copy(), previous_row.thread_id)
    assistant = await get_run_assistant(
        run_call.without_acting_for(), runs.graphs, body.assistant_id
    )
    content = {
        "payload": {**body.build_fields_to_store(), "assistant_id": assistant["assistant_id"]},
        "graph": assistant["graph_id"],
        "metadata": metadata,
        "user": identity.user,
        "acting_for": identity.acting_for,
        "permissions": sorted(identity.permissions),
        "login": convert_raw_user_to_mapping(identity.raw_user),
    }
    return previous_row._replace(next_at=next_at, content=content)


async def _get_changeable_cron(call: Call, cron_id: str) -> CronRow:
    """Return a cron after checking that the caller is permitted to change it.

    Raises:
        Refused: The cron does not exist, or the caller has no access to the cron.
        Forbidden: The cron belongs to somebody else, although it runs on the caller's thread.
    """
    cron = await CronTable(call.saver).get(cron_id)
    if cron is not None and matches_filter(cron.content["metadata"], call.filter):
        return cron
    if cron is not None and await _is_cron_on_permitted_own_thread(call, cron, "threads:read"):
        raise Forbidden(
            f"the cron {cron_id!r} runs on your thread, but belongs to another user; you can "
            "delete the cron, but only its owner can change it"
        )
    raise _build_unknown_cron_error(cron_id)


async def _is_cron_on_permitted_own_thread(
    call: Call, cron: CronRow, thread_action: Action
) -> bool:
    """Return whether a cron runs on a thread that belongs to the caller.

    A thread belongs to the caller if the thread's runs use the caller's memories.

    Return False if the caller is not permitted to perform the action on the thread.
    """
    if cron.thread_id is None:
        return False
    other_call = call.with_action(thread_action)
    try:
        thread = await other_call.permit_thread_row(cron.thread_id)
    except (Refused, UnknownThread):
        return False
    return other_call.threads.find_person_of_thread(thread) == call.identity.person


async def _select_own_thread_ids(call: Call, thread_ids: Collection[str | None]) -> set[str]:
    """Select the ids of the caller's own threads from the given thread ids.

    A thread is the caller's own if its runs use the caller's memories and the caller is permitted
    to list the thread.
    """
    search_call, own_ids = call.with_action("threads:search"), set[str]()
    ids = [thread_id for thread_id in thread_ids if thread_id is not None]
    try:
        permitted = await search_call.authorize_action_arguments({"metadata": {}})
    except Refused:
        return own_ids
    for start in range(0, len(ids), _THREADS_PER_QUERY):
        query = ThreadQuery(
            ids=ids[start : start + _THREADS_PER_QUERY],
            metadata=permitted["metadata"],
            person=call.identity.person,
        )
        own_ids |= await search_call.threads.find_thread_ids_of_person(query)
    return own_ids


async def _find_crons(call: Call, runs: RunManager, filters: CronFilters) -> list[FoundCron]:
    """Return the crons that match the filters and that the caller may see.

    The caller may see a cron if the cron's metadata matches the caller's authorization filter and
    the conditions that an authorization handler added to the search. The caller may also see a cron
    that runs on one of the caller's own threads; see `_select_own_thread_ids`.
    """
    permitted = await call.authorize_action_arguments(filters.model_dump())
    # `permitted["metadata"]` is the metadata filter of the request, to which an authorization
    # handler may have added conditions, such as the owner. A cron that does not match the added
    # conditions is found only if it runs on the caller's own thread.
    is_permitted = build_json_containment_predicate(permitted["metadata"] or {})
    matches_metadata = build_json_containment_predicate(filters.metadata)
    default = find_default_assistant(runs.graphs, filters.assistant_id or "")
    assistant_id = default["assistant_id"] if default else filters.assistant_id
    crons = [
        FoundCron(cron, matches_filter(metadata, call.filter) and is_permitted(metadata))
        for cron in await CronTable(call.saver).list_crons()
        if matches_metadata(metadata := cron.content["metadata"])
        and assistant_id in (None, cron.content["payload"]["assistant_id"])
        and filters.thread_id in (None, cron.thread_id)
    ]
    unreachable_thread_ids = {
        found_cron.cron.thread_id for found_cron in crons if not found_cron.is_reachable
    }
    own_thread_ids = await _select_own_thread_ids(call, unreachable_thread_ids)
    return [
        found_cron
        for found_cron in crons
        if found_cron.is_reachable or found_cron.cron.thread_id in own_thread_ids
    ]


def _build_unknown_cron_error(cron_id: str) -> Refused:
    """Return the error for a cron that does not exist or that the caller cannot access."""
    return Refused(f"there is no cron {cron_id!r}", 404)


def _build_cron_json(cron: CronRow, is_reachable: bool = True) -> dict[str, Any]:
    """Convert a cron to the format of LangGraph's API.

    Args:
        cron: The row of the cron.
        is_reachable: See `FoundCron`. If it is False, the fields in `_PRIVATE_FIELDS` are left out.
    """
    content, payload = cron.content, cron.content["payload"]
    if not is_reachable:
        payload = {name: value for name, value in payload.items() if name not in _PRIVATE_FIELDS}
    options = CronOptions.model_validate(payload)
    return {
        "cron_id": cron.cron_id,
        "thread_id": cron.thread_id,
        "assistant_id": payload["assistant_id"],
        **options.model_dump(include=_SCHEDULE_FIELDS),
        "on_run_completed": options.on_run_completed if cron.thread_id is None else None,
        "created_at": _to_datetime(cron.created_at),
        "updated_at": _to_datetime(cron.updated_at),
        "payload": payload,
        "user_id": content.get("acting_for") or content["user"],
        "next_run_date": _to_datetime(cron.next_at),
        "metadata": content["metadata"],
    }


def _to_datetime(timestamp: float | None) -> datetime | None:
    """Convert a Unix timestamp to a UTC datetime; None stays None."""
    return None if timestamp is None else datetime.fromtimestamp(timestamp, UTC)
