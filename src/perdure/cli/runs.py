"""`perdure runs` and `crons`: the runs and the schedules of `perdure serve`, in any database."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from perdure.cli.app import (
    CommandDatabase,
    DbOption,
    IdsOption,
    JsonOption,
    LimitOption,
    app,
    complete_thread_id,
    open_database,
    resolve_thread_id,
    shorten_thread_id,
)
from perdure.cli.output import format_age, format_line, format_time, print_note, print_rows
from perdure.settings import THREADS_LIMIT, check_user

if TYPE_CHECKING:
    from perdure.checkpointers.records import CronRow, RunRow

_LONGEST: Final = 60  # characters of an error
RunStatus = Literal["pending", "running", "success", "error", "interrupted"]
OfThread = Annotated[
    str | None,
    typer.Option(
        "--thread", metavar="ID", help="Only of this thread.", autocompletion=complete_thread_id
    ),
]
OfUser = Annotated[
    str | None, typer.Option("--user", metavar="NAME", help="Only of this user's threads.")
]


@app.command()
def runs(
    thread: OfThread = None,
    user: OfUser = None,
    status: Annotated[
        RunStatus | None, typer.Option(metavar="STATUS", help="Only runs that are so.")
    ] = None,
    limit: LimitOption = THREADS_LIMIT,
    ids: IdsOption = False,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """List runs of the server, newest first.

    The server keeps those under way and the last 100 of each thread. Exit code 1 if an option
    leaves none.
    """
    if user is not None:
        check_user("--user", user, "leave it out for all users")
    with open_database(db, allow_read_only=True) as database:
        named = None if thread is None else resolve_thread_id(database, thread)
        rows = asyncio.run(_find_runs(database, named, user, status, limit + 1))
        found = [_describe_run(row) for row in rows[:limit]]
        cells = [
            (
                run["run_id"],
                shorten_thread_id(database, run["thread_id"], is_whole=ids or json),
                run["graph"],
                run["status"],
                format_age(run["created_at"]),
                run["caller"],
                format_line(_describe_error(run["error"]), _LONGEST),
            )
            for run in found
        ]
    columns = ("id", "thread", "graph", "status", "created", "caller", "error")
    nothing = "the server has no run"
    print_rows(found, json, columns, cells, ids=("id", "thread"), empty_note=nothing)
    _end(len(rows) > limit, limit, is_empty=not found and (thread, user, status) != (None,) * 3)


@app.command()
def crons(
    thread: OfThread = None,
    user: OfUser = None,
    limit: LimitOption = THREADS_LIMIT,
    ids: IdsOption = False,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """List the schedules of the server, the one due next first.

    Exit code 1 if an option leaves none.
    """
    if user is not None:
        check_user("--user", user, "leave it out for all users")
    with open_database(db, allow_read_only=True) as database:
        named = None if thread is None else resolve_thread_id(database, thread)
        rows = asyncio.run(_find_crons(database, named, user))
        found = [_describe_cron(*row) for row in rows]
        cells = [
            (
                cron["cron_id"],
                shorten_thread_id(database, cron["thread_id"], is_whole=ids)
                if cron["thread_id"]
                else "new",
                cron["graph"],
                cron["schedule"],
                cron["timezone"] or "UTC",
                "off" if not cron["enabled"] else format_time(cron["next_at"]) or "never",
                cron["caller"],
            )
            for cron in found[:limit]
        ]
    columns = ("id", "thread", "graph", "schedule", "timezone", "next", "caller")
    print_rows(
        found[:limit], json, columns, cells, ids=("id", "thread"), empty_note="there is no schedule"
    )
    _end(len(found) > limit, limit, is_empty=not found and (thread, user) != (None, None))


def _end(has_more: bool, limit: int, *, is_empty: bool) -> None:
    if has_more:
        print_note(f"there are more than {limit}; --limit N shows them")
    if is_empty:
        raise typer.Exit(1)


# -- runs


async def _find_runs(
    database: CommandDatabase, thread: str | None, user: str | None, status: str | None, limit: int
) -> list[RunRow]:
    """Return runs, newest first, of one thread or all, and of one person or all."""
    from perdure.checkpointers.runs import RunTable
    from perdure.checkpointers.thread_list import ThreadQuery

    found: list[RunRow] = []
    table, offset = RunTable(database.saver), 0
    query = ThreadQuery(ids=None if thread is None else [thread])
    known: dict[str, str] = {}
    while len(found) < limit:
        page = await table.search_runs(query, status, limit, offset)
        for row, _ in page:
            of = row.live.thread_id
            if user is not None and of not in known:
                known[of] = await _find_person(database, of)
            if user is None or user == (row.details.get("person") or known[of]):
                found.append(row)
        offset += limit
        if len(page) < limit:
            break
    return found[:limit]


async def _find_person(database: CommandDatabase, thread: str) -> str:
    """Return whose a thread is, or "" if it is nobody's."""
    from perdure.checkpointers.thread_list import ThreadList
    from perdure.cli.threads import read_person

    listed = await ThreadList(database.saver).aget(thread)
    return "" if listed is None else read_person(listed.head_metadata or {}, listed.metadata)


def _describe_run(row: RunRow) -> dict[str, Any]:
    """Return what programs are told of a run, without what it was asked."""
    live, about = row.live, row.details
    is_delayed = live.status == "delayed"
    return {
        "run_id": live.run_id,
        "thread_id": live.thread_id,
        "graph": live.graph,
        "assistant_id": about.get("assistant_id"),
        "status": "pending" if is_delayed else live.status,
        "caller": about.get("user"),
        "person": about.get("person"),
        "created_at": _moment(row.created_at),
        "updated_at": _moment(row.updated_at),
        "begins_at": _moment(row.not_before) if is_delayed else None,
        "error": row.error,
    }


def _describe_error(error: Any) -> str:
    """Return an error in a line, or "" if there is none."""
    if isinstance(error, Mapping):
        return f"{error.get('error')}: {error.get('message')}"
    return "" if error is None else str(error)


def _moment(at: float | None) -> datetime | None:
    return None if at is None else datetime.fromtimestamp(at, UTC)


# -- crons


async def _find_crons(
    database: CommandDatabase, thread: str | None, user: str | None
) -> list[tuple[CronRow, str]]:
    """Return crons with their persons, those that are due next first.

    They are those of one thread or all, and of one person or all. A cron that makes a new thread
    each time is its author's, or that of the person for whom the author acted.
    """
    from perdure.checkpointers.crons import CronTable

    found: list[tuple[CronRow, str]] = []
    for cron in await CronTable(database.saver).list_crons():
        person: str = cron.content.get("acting_for") or cron.content["user"]
        if cron.thread_id is not None:
            person = await _find_person(database, cron.thread_id) or person
        if thread in (None, cron.thread_id) and user in (None, person):
            found.append((cron, person))
    return sorted(found, key=lambda pair: (pair[0].next_at is None, pair[0].next_at or 0))


def _describe_cron(cron: CronRow, person: str) -> dict[str, Any]:
    """Return what programs are told of a cron, without what its runs are asked."""
    content, payload = cron.content, cron.content["payload"]
    return {
        "cron_id": cron.cron_id,
        "thread_id": cron.thread_id,
        "graph": content["graph"],
        "assistant_id": payload.get("assistant_id"),
        "schedule": payload.get("schedule"),
        "timezone": payload.get("timezone"),
        "end_time": payload.get("end_time"),
        "enabled": payload.get("enabled", True),
        "caller": content["user"],
        "person": person,
        "next_at": _moment(cron.next_at),
        "created_at": _moment(cron.created_at),
        "updated_at": _moment(cron.updated_at),
        "metadata": content["metadata"],
    }
