"""A person by REST: what belongs to the person, its archive, and its erasure.

A user may ask for their own name; an admin for any. What the access does not let a user reach is
left out, or refused if a namespace may not be reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, NamedTuple

from fastapi import APIRouter
from starlette.responses import Response, StreamingResponse

from perdure import people
from perdure.checkpointers.person_rows import PersonRows
from perdure.effects import arun
from perdure.errors import UnknownThread
from perdure.memory.person_namespaces import CHAT_LABEL, find_person_namespaces
from perdure.memory.records import RESERVED_LABEL, StoreAdapter
from perdure.server.access import Action, Forbidden, action
from perdure.server.call import Call, CurrentCall, PathId
from perdure.server.reply import JSONObject, build_json_reply, encode_json
from perdure.server.runs import Runs, ServerRuns
from perdure.stores.base import Namespace

routes = APIRouter(tags=["people"])
_READS: Action = "store:search"
_ERASES: Action = "store:delete"


class PermittedPerson(NamedTuple):
    """A person whom the caller may ask about.

    Attributes:
        user: The name of the person.
        threads: The person's threads that the caller may reach.
        others: The namespaces with the name that the caller may reach, and that are kept.
        options: The options of the functions of `perdure.people`.
    """

    user: str
    threads: list[str]
    others: list[Namespace]
    options: dict[str, Any]


async def permit_person(call: Call, user: str, of_store: Action = _READS) -> PermittedPerson:
    """Check that the caller may export or erase everything that belongs to a person.

    Raises:
        Forbidden: It is another person, or one of the namespaces may not be reached.
    """
    if user != call.identity.person and not call.identity.is_admin:
        raise Forbidden(f"{call.identity.user!r} may not ask about another person")
    await call.permit({"metadata": {}})
    people_own = getattr(call._access, "owners_are_people", True)
    rows = PersonRows(call.saver, user, owners_are_people=people_own)
    threads = []
    for thread_id in await asyncio.to_thread(rows.list_threads):
        with suppress(UnknownThread):  # the caller may not reach it
            await call.threads.get(thread_id)
            threads.append(thread_id)
    # users choose the ids of their threads, so these give no right to a conversation
    conversations = threads if call.identity.is_admin else None
    found = await arun(
        find_person_namespaces(StoreAdapter(call.store), user, conversations=conversations)
    )
    for namespace in dict.fromkeys((("memories", user), *found.own)):
        if namespace[0] not in (RESERVED_LABEL, CHAT_LABEL) and not await _may(
            call, of_store, namespace
        ):
            raise Forbidden(f"{call.identity.user!r} may not reach the namespace {namespace!r}")
    others = [each for each in found.others if await _may(call, _READS, each)]
    options = {
        "thread_ids": threads,
        "owners_are_people": people_own,
        "looks_elsewhere": call.identity.is_admin,
        "conversations_by_id": call.identity.is_admin,
    }
    return PermittedPerson(user, threads, others, options)


async def _may(call: Call, of_store: Action, namespace: Namespace) -> bool:
    """Return whether the caller may reach a namespace as it is."""
    asking = call.with_action(of_store)
    try:
        allowed = await asking.permit({"namespace": namespace})
    except Forbidden:
        return False
    return tuple(allowed["namespace"]) == namespace


async def plan_person(call: Call, person: PermittedPerson) -> people.Report:
    """Return what would be erased of a person."""
    report = await people.aplan(person.user, call.saver, call.store, **person.options)
    return _without_unreachable(report, person)


async def forget_person(call: Call, runs: Runs, person: PermittedPerson) -> people.Report:
    """Erase everything that belongs to a person, once the runs have ended."""
    for thread_id in person.threads:
        await runs.stop_thread(call.identity.tenant, thread_id)
    report = await people.aforget(person.user, call.saver, call.store, **person.options)
    for thread_id in person.threads:
        runs.forget_thread(call.identity.tenant, thread_id)
    call.record_for_audit(hashes=report.hashes)
    return _without_unreachable(report, person)


def _without_unreachable(report: people.Report, person: PermittedPerson) -> people.Report:
    """Return the report without namespaces that the caller may not see."""
    seen = {"/".join(namespace) for namespace in person.others}
    return people.limit_to_namespaces(report, seen)


def form_of(report: people.Report) -> JSONObject:
    """Return a report as its JSON."""
    return {
        "user": report.user,
        "erased": [_part(part) for part in report.erased],
        "kept": [_part(part) for part in report.kept],
        "hashes": [*report.hashes],
        "scrubbed": report.scrubbed,
        "dry_run": report.dry_run,
        "by_owner": [*report.by_owner],
    }


def _part(part: people.Part) -> JSONObject:
    return {"what": part.what, "count": part.count, "ids": [*part.ids]}


@routes.get("/people/{user}")
@action("threads:read")
async def plan(call: CurrentCall, user: PathId) -> Response:
    """Return what belongs to a person, as `DELETE` would erase it."""
    return await build_json_reply(form_of(await plan_person(call, await permit_person(call, user))))


@routes.get("/people/{user}/export")
@action("threads:read")
async def export(call: CurrentCall, user: PathId) -> Response:
    """Return the archive of a person as JSON Lines."""
    person = await permit_person(call, user)
    options = {**person.options}
    options.pop("looks_elsewhere")
    lines = people.aexport(person.user, call.saver, call.store, **options)
    first = await anext(lines)  # an unknown person is an error before the reply begins

    async def chunks() -> AsyncIterator[bytes]:
        reached = [[*namespace] for namespace in person.others]
        seen = [each for each in first["other_namespaces"] if each in reached]
        yield encode_json(first | {"other_namespaces": seen}) + b"\n"
        async for line in lines:
            yield encode_json(line) + b"\n"

    headers = {"Content-Disposition": 'attachment; filename="person.jsonl"'}
    return StreamingResponse(chunks(), media_type="application/x-ndjson", headers=headers)


@routes.delete("/people/{user}")
@action("threads:delete")
async def forget(
    call: CurrentCall, runs: ServerRuns, user: PathId, hand_over: bool = False
) -> Response:
    """Erase everything that belongs to a person; returns the report.

    With `hand_over`, what the person wrote into the memories of teams is kept without the name.
    """
    person = await permit_person(call, user, _ERASES)
    person.options["hand_over"] = hand_over
    return await build_json_reply(form_of(await forget_person(call, runs, person)))
