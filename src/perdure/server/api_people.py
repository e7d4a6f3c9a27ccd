"""REST endpoints to list, export and erase everything that belongs to a person.

Users may list, export and erase only their own data. An admin may list, export and erase the data
of any person. Threads that the user cannot access are left out. A request is refused if the user
lacks access to any of the person's namespaces.
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
from perdure.effects import arun_operation
from perdure.errors import UnknownThread
from perdure.memory.person_namespaces import CHAT_LABEL, find_person_namespaces
from perdure.memory.records import RESERVED_LABEL, StoreAdapter
from perdure.server.access import Action, Forbidden, set_required_action
from perdure.server.call import Call, CurrentCall, PathId
from perdure.server.reply import JSONObject, build_json_reply, encode_json
from perdure.server.runs import Runs, ServerRuns
from perdure.stores.base import Namespace

routes = APIRouter(tags=["people"])
_READ_ACTION: Action = "store:search"
_ERASE_ACTION: Action = "store:delete"


class PermittedPerson(NamedTuple):
    """A person whose data the caller may export or erase.

    Attributes:
        user: The name of the person.
        thread_ids: The ids of the person's threads to which the caller has access.
        other_namespaces: The namespaces that contain the person's name, are kept by an erasure, and
            are visible to the caller.
        options: The keyword arguments for functions of `perdure.people`.
    """

    user: str
    thread_ids: list[str]
    other_namespaces: list[Namespace]
    options: dict[str, Any]


async def authorize_export_or_erasure_of_person(
    call: Call, user: str, store_action: Action = _READ_ACTION
) -> PermittedPerson:
    """Check that the caller may export or erase everything that belongs to a person.

    Access to perdure's internal namespaces and to those of conversations is not checked.

    Args:
        call: The request.
        user: The name of the person.
        store_action: The action that is performed on each namespace of the person.

    Raises:
        Forbidden: The caller is neither the person nor an admin, or has no access to one of the
            person's namespaces.
    """
    if user != call.identity.person and not call.identity.is_admin:
        raise Forbidden(
            f"the user {call.identity.user!r} is not allowed to access the data of another person; "
            "pass your own user name, or use the key of an admin"
        )
    await call.authorize_arguments({"metadata": {}})
    owners_are_people = getattr(call._access, "owners_are_people", True)
    rows = PersonRows(call.saver, user, owners_are_people=owners_are_people)
    threads = []
    for thread_id in await asyncio.to_thread(rows.list_thread_ids):
        # Skip threads that the caller cannot access.
        with suppress(UnknownThread):
            await call.threads.get(thread_id)
            threads.append(thread_id)
    # Users may choose any thread id, so a thread id does not prove that a conversation belongs to
    # the person. Therefore, only an admin may access conversations by thread id.
    conversations = threads if call.identity.is_admin else None
    person_namespaces = await arun_operation(
        find_person_namespaces(StoreAdapter(call.store), user, conversations=conversations)
    )
    for namespace in dict.fromkeys((("memories", user), *person_namespaces.own)):
        if namespace[0] not in (RESERVED_LABEL, CHAT_LABEL) and not await _may_reach_namespace(
            call, store_action, namespace
        ):
            raise Forbidden(
                f"the user {call.identity.user!r} is not allowed to access the namespace "
                f"{namespace!r} of the user {user!r}; ask an admin"
            )
    readable_namespaces = [
        namespace
        for namespace in person_namespaces.others
        if await _may_reach_namespace(call, _READ_ACTION, namespace)
    ]
    options = {
        "thread_ids": threads,
        "owners_are_people": owners_are_people,
        "looks_elsewhere": call.identity.is_admin,
        "conversations_by_id": call.identity.is_admin,
    }
    return PermittedPerson(user, threads, readable_namespaces, options)


async def _may_reach_namespace(call: Call, store_action: Action, namespace: Namespace) -> bool:
    """Return whether the caller is permitted to perform a store action on a namespace.

    Return False if an authorization handler denies the action or replaces the namespace.
    """
    store_call = call.with_action(store_action)
    try:
        permitted = await store_call.authorize_arguments({"namespace": namespace})
    except Forbidden:
        return False
    return tuple(permitted["namespace"]) == namespace


async def plan_person_erasure(call: Call, person: PermittedPerson) -> people.Report:
    """Return a report of the data that erasing the person would delete or keep."""
    report = await people.aplan(person.user, call.saver, call.store, **person.options)
    return _remove_hidden_namespaces(report, person)


async def erase_person(call: Call, runs: Runs, person: PermittedPerson) -> people.Report:
    """Stop all runs in a person's threads, and erase everything that belongs to the person.

    Args:
        call: The request. The hashes of the erased texts are added to the request's audit record.
        runs: The runs of the server.
        person: The person.
    """
    for thread_id in person.thread_ids:
        await runs.stop_runs_of_thread(call.identity.tenant, thread_id)
    report = await people.aforget(person.user, call.saver, call.store, **person.options)
    for thread_id in person.thread_ids:
        runs.drop_runs_and_events_of_thread(call.identity.tenant, thread_id)
    call.record_for_audit(hashes=report.hashes)
    return _remove_hidden_namespaces(report, person)


def _remove_hidden_namespaces(report: people.Report, person: PermittedPerson) -> people.Report:
    """Return a copy of a report, omitting kept namespaces that the caller is not permitted to see.

    The given report is not changed.
    """
    visible = {"/".join(namespace) for namespace in person.other_namespaces}
    return people.limit_report_to_namespaces(report, visible)


def build_report_json(report: people.Report) -> JSONObject:
    """Return the JSON of a report."""
    return {
        "user": report.user,
        "erased": [_build_part_json(part) for part in report.erased],
        "kept": [_build_part_json(part) for part in report.kept],
        "hashes": [*report.hashes],
        "scrubbed": report.scrubbed,
        "dry_run": report.dry_run,
        "by_owner": [*report.by_owner],
    }


def _build_part_json(part: people.Part) -> JSONObject:
    return {"what": part.what, "count": part.count, "ids": [*part.ids]}


@routes.get("/people/{user}")
@set_required_action("threads:read")
async def show_person(call: CurrentCall, user: PathId) -> Response:
    """Return a report of what `DELETE` would erase, without erasing anything."""
    return await build_json_reply(
        build_report_json(
            await plan_person_erasure(call, await authorize_export_or_erasure_of_person(call, user))
        )
    )


@routes.get("/people/{user}/export")
@set_required_action("threads:read")
async def export_person(call: CurrentCall, user: PathId) -> Response:
    """Export everything that belongs to a person as JSON Lines."""
    person = await authorize_export_or_erasure_of_person(call, user)
    options = {**person.options}
    options.pop("looks_elsewhere")
    lines = people.aexport(person.user, call.saver, call.store, **options)
    # Read the first line of the archive before starting the HTTP response. If the person is
    # unknown, this raises an error while the response can still have an error status.
    header = await anext(lines)

    async def iter_lines() -> AsyncIterator[bytes]:
        readable = [[*namespace] for namespace in person.other_namespaces]
        visible = [labels for labels in header["other_namespaces"] if labels in readable]
        yield encode_json(header | {"other_namespaces": visible}) + b"\n"
        async for line in lines:
            yield encode_json(line) + b"\n"

    headers = {"Content-Disposition": 'attachment; filename="person.jsonl"'}
    return StreamingResponse(iter_lines(), media_type="application/x-ndjson", headers=headers)


@routes.delete("/people/{user}")
@set_required_action("threads:delete")
async def delete_person(
    call: CurrentCall, runs: ServerRuns, user: PathId, hand_over: bool = False
) -> Response:
    """Erase everything that belongs to a person, and return the report.

    With `hand_over`, items that the person added to team memories are kept, but without the
    person's name.
    """
    person = await authorize_export_or_erasure_of_person(call, user, _ERASE_ACTION)
    person.options["hand_over"] = hand_over
    return await build_json_reply(build_report_json(await erase_person(call, runs, person)))
