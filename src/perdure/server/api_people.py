"""REST endpoints to list, export and erase everything that belongs to a person.

Users may list, export and erase only their own data. An admin may list, export and erase the data
of any person. If the calling user cannot access one of the person's threads, this thread is not
listed, exported or erased. A request is refused if the user lacks access to any of the person's
namespaces.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from perdure import people
from perdure.effects import arun_operation
from perdure.errors import ConfigurationError, UnknownThread
from perdure.keys_and_audit_log import count_keys_and_audit_records
from perdure.memory.long_term.person_namespaces import CHAT_LABEL, find_person_namespaces
from perdure.memory.long_term.records import RESERVED_LABEL, StoreAdapter
from perdure.run_tables.person_rows import PersonRows
from perdure.server.http.access import Action, Forbidden, set_required_action
from perdure.server.http.call import Call, CurrentCall, PathId
from perdure.server.http.reply import JSONObject, JSONReply, build_json_reply, encode_json
from perdure.server.runs.run_manager import RunManager, ServerRuns
from perdure.stores.base import Namespace

_LOG: Final = logging.getLogger("perdure.server")
routes = APIRouter(tags=["people"], default_response_class=JSONReply)
_READ_ACTION: Action = "store:search"
_ERASE_ACTION: Action = "store:delete"
_ERASURES: Final = ThreadPoolExecutor(4, "perdure-erasures")
"""Thread pool for erasing the data of people.

A separate pool is used so that erasures that wait for the end of runs cannot block the OS threads
that other requests use."""


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


class _Files(NamedTuple):
    """The server's files that may contain a person's name but are not changed by an erasure.

    Attributes:
        keys_file: The keys file, or None.
        audit_log: The audit log, or None.
    """

    keys_file: Path | None
    audit_log: Path | None


def _get_server_files(request: Request) -> _Files:
    """Return the paths of the keys file and the audit log that the server was started with."""
    state = request.app.state
    return _Files(getattr(state.access, "keys_file", None), state.audit.readable_path)


ServerFiles = Annotated[_Files, Depends(_get_server_files)]
"""The keys file and the audit log of the server, as an argument of an endpoint."""


async def authorize_export_or_erasure_of_person(
    call: Call, user: str, store_action: Action = _READ_ACTION
) -> PermittedPerson:
    """Check that the caller may export or erase everything that belongs to a person.

    Access is not checked for perdure's internal namespaces and for conversation namespaces.

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
    await call.authorize_action_arguments({"metadata": {}})
    owners_are_people = getattr(call.access, "owners_are_people", True)
    rows = PersonRows(call.saver, user, owners_are_people=owners_are_people)
    threads = []
    for thread_id in await asyncio.to_thread(rows.list_thread_ids):
        # Skip threads that the caller cannot access.
        with suppress(UnknownThread):
            await call.threads.get(thread_id)
            threads.append(thread_id)
    # Users may choose any thread id, so a thread id does not prove that a conversation belongs to
    # the person. Therefore, only an admin may access conversations by thread id.
    person_namespaces = await arun_operation(
        find_person_namespaces(
            StoreAdapter(call.store),
            user,
            conversations=threads if call.identity.is_admin else None,
        )
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

    Return False if an authorization handler denies the store action or replaces the namespace by
    another one, or if the namespace contains a user name that is not valid.
    """
    try:
        permitted = await call.with_action(store_action).authorize_action_arguments(
            {"namespace": namespace}
        )
    except (Forbidden, ConfigurationError):
        return False
    return bool(permitted["namespace"] == namespace)


async def plan_person_erasure(call: Call, files: _Files, person: PermittedPerson) -> people.Report:
    """Preview which of a person's data an erasure would delete, and which it would keep."""
    report = await people.aplan(person.user, call.saver, call.store, **person.options)
    return await _limit_and_complete_report(call, files, person, report)


async def erase_person(
    call: Call, runs: RunManager, files: _Files, person: PermittedPerson
) -> people.Report:
    """Cancel a person's runs, wait for their end, and erase everything that belongs to the person.

    `people.forget` cancels the runs, after it has found the person's threads. If the runs were
    cancelled earlier, the threads of stateless runs would already be deleted, and a person who has
    no other data would be unknown.

    Args:
        call: The request. The hashes of the erased texts are added to the request's audit record.
        runs: The run manager of the server.
        files: The files in which entries of the person are counted.
        person: The person.
    """
    forget = partial(people.forget, person.user, call.saver, call.store, **person.options)
    report = await asyncio.get_running_loop().run_in_executor(_ERASURES, forget)
    for thread_id in person.thread_ids:
        runs.drop_runs_and_events_of_thread(call.identity.tenant, thread_id)
    call.record_for_audit(hashes=report.hashes)
    return await _limit_and_complete_report(call, files, person, report)


async def _count_entries_in_files(call: Call, files: _Files, user: str) -> tuple[people.Part, ...]:
    """Count a person's API keys and audit records in the files of the server.

    If a file cannot be read, the server logs the reason, and the returned tuple contains only a
    part with the name "files that cannot be read". The path of the file is not shown to the user
    who sends the request.
    """
    try:
        # An audit log can be large, so read the files in another thread.
        return await asyncio.to_thread(
            count_keys_and_audit_records, user, tenant=call.identity.tenant, **files._asdict()
        )
    except ConfigurationError as exc:
        _LOG.error("the API keys and audit records of a person could not be counted: %s", exc)
        return (people.Part("files that cannot be read", ("keys file or audit log",)),)


async def _limit_and_complete_report(
    call: Call, files: _Files, person: PermittedPerson, report: people.Report
) -> people.Report:
    """Return a copy of an erasure report, limited to the namespaces that the caller may see.

    A report lists the namespaces that contain the person's name and are not erased. The returned
    copy omits such a namespace if the caller may not see the namespace. It also lists the person's
    API keys and audit records, which are kept in files.
    """
    limited = people.limit_report_to_namespaces(
        report, {"/".join(namespace) for namespace in person.other_namespaces}
    )
    return replace(
        limited, kept=(*limited.kept, *await _count_entries_in_files(call, files, person.user))
    )


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
async def show_person(call: CurrentCall, files: ServerFiles, user: PathId) -> Response:
    """Return a report of what `DELETE` would erase, without erasing anything."""
    person = await authorize_export_or_erasure_of_person(call, user)
    return await build_json_reply(build_report_json(await plan_person_erasure(call, files, person)))


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

    return StreamingResponse(
        iter_lines(),
        media_type="application/x-ndjson",
        headers={"Content-Disposition": 'attachment; filename="person.jsonl"'},
    )


@routes.delete("/people/{user}")
@set_required_action("threads:delete")
async def delete_person(
    call: CurrentCall,
    runs: ServerRuns,
    files: ServerFiles,
    user: PathId,
    hand_over: bool = False,
) -> Response:
    """Erase everything that belongs to a person, and return the report.

    With `hand_over`, items that the person added to team memories are kept, but the person's name
    is removed from them.
    """
    person = await authorize_export_or_erasure_of_person(call, user, _ERASE_ACTION)
    person.options["hand_over"] = hand_over
    return await build_json_reply(build_report_json(await erase_person(call, runs, files, person)))
