"""Crons by REST: runs on a schedule, for langgraph's SDK. They run as whoever wrote them last."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any, Final
from uuid import uuid4

from fastapi import APIRouter, Response
from fastapi.exceptions import RequestValidationError
from langgraph_sdk.schema import CronSelectField, CronSortBy
from pydantic import Field, ValidationError

from perdure.checkpointers.crons import CronTable
from perdure.checkpointers.records import CronRow
from perdure.errors import ConfigurationError, UnknownThread
from perdure.server.access import Refused, action, check_reach, containing, meets
from perdure.server.api_runs import act_by_context, check
from perdure.server.assistants import assistant_of_run, own
from perdure.server.call import Call, Caller, Id, SortedPage
from perdure.server.reply import JSON
from perdure.server.run_request import Given
from perdure.server.runs import All, Runs, plain
from perdure.server.schedule import CronOptions, CronRequest
from perdure.server.threads import checked_metadata

routes = APIRouter(tags=["crons"])
_TIMES: Final = {"schedule", "timezone", "end_time", "enabled"}


class CronFilters(Given):
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
@action("crons:create")
async def create(
    call: Caller, runs: All, body: CronRequest, thread_id: Id | None = None
) -> Response:
    """Run a graph on a schedule, on a thread, or on a new one each time."""
    now, cron_id = time.time(), str(uuid4())
    about = {"cron_id": cron_id, "thread_id": thread_id, "user_id": call.identity.person}
    times = {"schedule": body.schedule, "end_time": body.end_time}
    metadata = dict(body.metadata)
    asked = await call.permit({**about, **times, "payload": body.kept(), "metadata": metadata})
    empty = CronRow(cron_id, thread_id, None, now, now, {})
    cron = await _checked(call, runs, body, empty, asked["metadata"] or {})
    if not await CronTable(call.saver).create(cron):
        raise UnknownThread(f"there is no thread {thread_id!r}")
    return JSON(_shown(cron))


@routes.patch("/runs/crons/{cron_id}")
@action("crons:update")
async def update(call: Caller, runs: All, cron_id: Id, body: dict[str, Any]) -> Response:
    """Change what is given of a cron; metadata is added. It runs as whoever changes it then."""
    metadata = body.get("metadata") or {}
    asked = await call.permit(
        {
            "cron_id": cron_id,
            "payload": body,
            "schedule": body.get("schedule"),
            "metadata": metadata if isinstance(metadata, dict) else {},
        }
    )
    cron = await _reached(call, cron_id)
    if unknown := body.keys() - CronRequest.model_fields.keys():
        raise ConfigurationError(f"a cron has no {', '.join(sorted(unknown))}")
    try:
        merged = {**cron.content["payload"], **body, "metadata": metadata}
        changed = CronRequest.model_validate(merged)
    except ValidationError as exc:
        raise RequestValidationError(exc.errors()) from exc
    changed.metadata = {**cron.content["metadata"], **changed.metadata}
    allowed = {**changed.metadata, **(asked["metadata"] or {})}
    cron = await _checked(call, runs, changed, cron, allowed)
    stored = await CronTable(call.saver).change(cron, timed=bool(_TIMES & body.keys()))
    if stored is None:
        raise _unknown(cron_id)
    return JSON(_shown(stored))


@routes.delete("/runs/crons/{cron_id}", status_code=204)
@action("crons:delete")
async def delete(call: Caller, cron_id: Id) -> None:
    """Delete a cron; a run of it that has begun goes on."""
    await call.permit({"cron_id": cron_id})
    await CronTable(call.saver).delete(await _reached(call, cron_id))


@routes.post("/runs/crons/search")
@action("crons:search")
async def search(call: Caller, runs: All, body: CronSearch) -> Response:
    """Crons that match, the newest first unless another order is given."""
    crons = map(_shown, await _found(call, runs, body))
    rows = [row for row in crons if body.enabled in (None, row["enabled"])]
    return JSON(body.shown(rows, now=datetime.now(UTC)))


@routes.post("/runs/crons/count")
@action("crons:search")
async def count(call: Caller, runs: All, body: CronFilters) -> int:
    """How many crons match."""
    return len(await _found(call, runs, body))


async def _checked(
    call: Call, runs: Runs, body: CronRequest, cron: CronRow, metadata: dict[str, Any]
) -> CronRow:
    """A cron as it is asked for, whose run its caller may begin now."""
    if cron.thread_id is not None and "on_run_completed" in body.model_fields_set:
        raise ConfigurationError("on_run_completed is of crons that have no thread: leave it out")
    check_reach("a cron", checked_metadata(metadata), call.filter)
    next_at = await asyncio.to_thread(body.next_time, time.time())
    running, identity = call.another("threads:create_run"), act_by_context(call, body).identity
    await check(running, runs, body.model_copy(), cron.thread_id)
    assistant = await assistant_of_run(running.as_caller(), runs.graphs, body.assistant_id)
    content = {
        "payload": {**body.kept(), "assistant_id": assistant["assistant_id"]},
        "graph": assistant["graph_id"],
        "metadata": metadata,
        "user": identity.user,
        "acting_for": identity.acting_for,
        "permissions": sorted(identity.permissions),
        "login": plain(identity.raw),
    }
    return cron._replace(next_at=next_at, content=content)


async def _reached(call: Call, cron_id: str) -> CronRow:
    cron = await CronTable(call.saver).get(cron_id)
    if cron is None or not meets(cron.content["metadata"], call.filter):
        raise _unknown(cron_id)
    return cron


async def _found(call: Call, runs: Runs, wanted: CronFilters) -> list[CronRow]:
    asked = await call.permit(wanted.model_dump())
    has_wanted = containing(asked["metadata"] or {})
    named = own(runs.graphs, wanted.assistant_id or "")
    assistant_id = named["assistant_id"] if named else wanted.assistant_id
    return [
        cron
        for cron in await CronTable(call.saver).all()
        if meets(cron.content["metadata"], call.filter)
        and has_wanted(cron.content["metadata"])
        and assistant_id in (None, cron.content["payload"]["assistant_id"])
        and wanted.thread_id in (None, cron.thread_id)
    ]


def _unknown(cron_id: str) -> Refused:
    return Refused(f"there is no cron {cron_id!r}", 404)


def _shown(cron: CronRow) -> dict[str, Any]:
    """A cron as langgraph's clients know it."""
    content, payload = cron.content, cron.content["payload"]
    options = CronOptions.model_validate(payload)
    return {
        "cron_id": cron.cron_id,
        "thread_id": cron.thread_id,
        "assistant_id": payload["assistant_id"],
        **options.model_dump(include=_TIMES),
        "on_run_completed": options.on_run_completed if cron.thread_id is None else None,
        "created_at": _time(cron.created_at),
        "updated_at": _time(cron.updated_at),
        "payload": payload,
        "user_id": content.get("acting_for") or content["user"],
        "next_run_date": _time(cron.next_at),
        "metadata": content["metadata"],
    }


def _time(at: float | None) -> datetime | None:
    return None if at is None else datetime.fromtimestamp(at, UTC)
