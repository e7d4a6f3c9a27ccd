"""Implement `perdure runs` and `perdure crons`, which list a server's runs and crons.

The commands read the database directly, so they work without a running server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from perdure.cli.app import (
    CommandDatabase,
    DbOption,
    IdsOption,
    JsonOption,
    LimitOption,
    app,
    check_user_filter,
    complete_thread_id,
    open_database,
    print_note_if_has_more_and_exit_if_no_match,
    resolve_thread_id,
    shorten_thread_id,
)
from perdure.cli.output import (
    format_age,
    format_as_single_line,
    format_time,
    print_json_or_table,
)
from perdure.settings import THREADS_LIMIT

if TYPE_CHECKING:
    from perdure.run_tables.records import CronRow, RunRow

# Maximum length, in characters, of an error message in the list of runs. Longer messages are
# truncated.
_MAX_ERROR: Final = 60
RunStatus = Literal["pending", "running", "success", "error", "interrupted"]
ThreadOption = Annotated[
    str | None,
    typer.Option(
        "--thread",
        metavar="ID",
        help="List only entries of this thread.",
        autocompletion=complete_thread_id,
    ),
]
ThreadUserOption = Annotated[
    str | None,
    typer.Option("--user", metavar="NAME", help="List only entries that belong to this user."),
]


@app.command()
def runs(
    thread: ThreadOption = None,
    user: ThreadUserOption = None,
    status: Annotated[
        RunStatus | None, typer.Option(metavar="STATUS", help="List only runs with this status.")
    ] = None,
    limit: LimitOption = THREADS_LIMIT,
    ids: IdsOption = False,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """List runs of the server, newest first.

    The server keeps active runs and the last 100 runs of each thread. The exit code is 1 if filters
    were passed and no run matches them.
    """
    check_user_filter(user, "runs")
    with open_database(db, allow_read_only=True) as database:
        thread_id = None if thread is None else resolve_thread_id(database, thread)
        rows = asyncio.run(_find_runs(database, thread_id, user, status, limit + 1))
        listed_runs = [_build_run_json(row) for row in rows[:limit]]
        cells = [
            (
                run["run_id"],
                shorten_thread_id(database, run["thread_id"], is_whole=ids or json),
                run["graph"],
                run["status"],
                format_age(run["created_at"]),
                run["caller"],
                format_as_single_line(_format_run_error(run["error"]), _MAX_ERROR),
            )
            for run in listed_runs
        ]
    print_json_or_table(
        listed_runs,
        json,
        ("id", "thread", "graph", "status", "created", "caller", "error"),
        cells,
        ids=("id", "thread"),
        empty_note="there are no runs",
    )
    has_conditions = (thread, user, status) != (None, None, None)
    print_note_if_has_more_and_exit_if_no_match(
        len(rows) > limit, limit, "runs", no_match=has_conditions and not rows
    )


@app.command()
def crons(
    thread: ThreadOption = None,
    user: ThreadUserOption = None,
    limit: LimitOption = THREADS_LIMIT,
    ids: IdsOption = False,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """List the crons of the server, ordered by next run time.

    The exit code is 1 if filters were passed and no cron matches them.
    """
    check_user_filter(user, "crons")
    with open_database(db, allow_read_only=True) as database:
        thread_id = None if thread is None else resolve_thread_id(database, thread)
        rows = asyncio.run(_find_crons_with_persons(database, thread_id, user))
        listed_crons = [_build_cron_json(*row) for row in rows[:limit]]
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
            for cron in listed_crons
        ]
    print_json_or_table(
        listed_crons,
        json,
        ("id", "thread", "graph", "schedule", "timezone", "next", "caller"),
        cells,
        ids=("id", "thread"),
        empty_note="there are no crons",
    )
    has_conditions = (thread, user) != (None, None)
    print_note_if_has_more_and_exit_if_no_match(
        len(rows) > limit, limit, "crons", no_match=has_conditions and not rows
    )


# -- runs


async def _find_runs(
    database: CommandDatabase,
    thread_id: str | None,
    user: str | None,
    status: str | None,
    limit: int,
) -> list[RunRow]:
    """Return runs, newest first.

    A run belongs to the person whose memories it uses. If the database does not record whose
    memories a run uses, the run belongs to the same person as its thread.

    Args:
        database: The database of the command.
        thread_id: The thread of the runs, or None for all threads.
        user: The person of the runs, or None for all persons.
        status: The status of the runs, or None for any status.
        limit: The maximum number of runs.
    """
    from perdure.run_tables.runs import RunTable
    from perdure.run_tables.thread_list import ThreadQuery

    matches: list[RunRow] = []
    run_table = RunTable(database.saver)
    query = ThreadQuery(ids=None if thread_id is None else [thread_id])
    # Maps each thread id to the person the thread belongs to.
    persons: dict[str, str] = {}
    for offset in count(0, limit):
        page = await run_table.search_runs_and_whether_last_of_thread(query, status, limit, offset)
        for row, _ in page:
            row_thread_id = row.live.thread_id
            if user is not None and row_thread_id not in persons:
                persons[row_thread_id] = await _find_person_of_thread(database, row_thread_id)
            if user is None or user == (row.details.get("person") or persons[row_thread_id]):
                matches.append(row)
        if len(page) < limit or len(matches) >= limit:
            break
    return matches[:limit]


async def _find_person_of_thread(database: CommandDatabase, thread_id: str) -> str:
    """Return the id of the person to whom a thread belongs, or "" if it belongs to nobody."""
    from perdure.cli.threads import find_person_of_thread
    from perdure.run_tables.thread_list import ThreadList

    thread = await ThreadList(database.saver).aget(thread_id)
    return (
        "" if thread is None else find_person_of_thread(thread.head_metadata or {}, thread.metadata)
    )


def _build_run_json(row: RunRow) -> dict[str, Any]:
    """Build the JSON object that `--json` prints for a run. The input of the run is left out."""
    live, details = row.live, row.details
    is_delayed = live.status == "delayed"
    return {
        "run_id": live.run_id,
        "thread_id": live.thread_id,
        "graph": live.graph,
        "assistant_id": details.get("assistant_id"),
        "status": "pending" if is_delayed else live.status,
        "caller": details.get("user"),
        "person": details.get("person"),
        "created_at": _as_datetime(row.created_at),
        "updated_at": _as_datetime(row.updated_at),
        "begins_at": _as_datetime(row.not_before) if is_delayed else None,
        "error": row.error,
    }


def _format_run_error(error: Any) -> str:
    """Return the type and message of the error that a run ended with, or "" if there was none."""
    if isinstance(error, Mapping):
        return f"{error.get('error')}: {error.get('message')}"
    return "" if error is None else str(error)


def _as_datetime(seconds: float | None) -> datetime | None:
    """Convert a Unix timestamp to a UTC datetime; None stays None."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


# -- crons


async def _find_crons_with_persons(
    database: CommandDatabase, thread_id: str | None, user: str | None
) -> list[tuple[CronRow, str]]:
    """Return crons, each with the person to whom it belongs, ordered by next run time.

    A cron that runs on an existing thread belongs to the same person as the thread. A cron belongs
    to the user who created the cron in two cases: the cron creates a new thread for each run, or
    the cron's thread has no owner. If the cron's creator acted for another person, the cron belongs
    to that person.

    Args:
        database: The database of the command.
        thread_id: The thread of the crons, or None for all crons.
        user: The person of the crons, or None for all persons.
    """
    from perdure.run_tables.crons import CronTable

    matches: list[tuple[CronRow, str]] = []
    for cron in await CronTable(database.saver).list_crons():
        person: str = cron.content.get("acting_for") or cron.content["user"]
        if cron.thread_id is not None:
            person = await _find_person_of_thread(database, cron.thread_id) or person
        if thread_id in (None, cron.thread_id) and user in (None, person):
            matches.append((cron, person))
    return sorted(matches, key=lambda pair: (pair[0].next_at is None, pair[0].next_at or 0))


def _build_cron_json(cron: CronRow, person: str) -> dict[str, Any]:
    """Build the JSON object that `--json` prints for a cron. The input of the runs is left out."""
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
        "next_at": _as_datetime(cron.next_at),
        "created_at": _as_datetime(cron.created_at),
        "updated_at": _as_datetime(cron.updated_at),
        "metadata": content["metadata"],
    }
