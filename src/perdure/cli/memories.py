"""`perdure memories`: what is remembered of a user is listed, found, added, reviewed, erased."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial, reduce
from operator import add as sum_of
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from perdure.cli.app import (
    AsOfOption,
    CommandDatabase,
    DbOption,
    IdsOption,
    JsonOption,
    KeyArgument,
    LimitOption,
    QueryOption,
    UserOption,
    YesOption,
    add_command_group,
    check_query,
    erase_items,
    open_database,
    require_confirmation,
    resolve_id_prefix,
    resolve_item_key,
    resolve_thread_id,
    shorten_thread_id,
)
from perdure.cli.output import (
    format_age,
    format_count,
    format_date,
    format_time,
    print_json,
    print_note,
    print_note_line,
    print_result,
    print_rows,
    print_text,
    show_status,
)
from perdure.errors import ConfigurationError, InvalidMessages, UnknownThread
from perdure.settings import MIN_SCORE, SEARCH_LIMIT, SHOWN_LIMIT

if TYPE_CHECKING:
    from perdure.memory import Memory
    from perdure.memory.collection import QuarantineEntry
    from perdure.memory.extraction import ExtractionJob
    from perdure.stores import Receipt

    Namespace = tuple[str, ...]

memories = add_command_group("memories", "Memories of a user, across threads.")

_LABELS: Final = ("memories", "profiles", "examples")  # of namespaces: each goes on with the user
_INSTRUCTIONS: Final = ("instructions",)  # the agent's own, for all users; also their kind
_HELD: Final = ("refused", "quarantined")
_SHOWN: Final = 10  # memories that are shown before it is asked
_EARLIEST: Final = datetime.min.replace(tzinfo=UTC)


@memories.command("list")
def list_(
    kind: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="Only fact, turn, episode, profile or another kind."),
    ] = None,
    limit: LimitOption = SHOWN_LIMIT,
    ids: IdsOption = False,
    as_of: AsOfOption = None,
    user: UserOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """List memories, latest change first."""
    from perdure.memory.records import memory_from_item

    with open_database(db, user, allow_read_only=True) as database:
        options: dict[str, Any] = {"limit": sys.maxsize, "as_of": as_of, "refresh_ttl": False}
        items = [
            database.store.search(place, **options) for place in (*_own(database), _INSTRUCTIONS)
        ]
        every = [memory_from_item(item) for some in items for item in some]
        whose = database.user
    every.sort(key=lambda memory: memory.valid_from or _EARLIEST, reverse=True)
    of_kind = [memory for memory in every if kind in (None, memory.kind)]
    nothing = f"nothing is remembered of {whose!r}; 'perdure memories add' adds facts"
    nothing = f"{whose!r} has no memories of the kind {kind!r}" if every else nothing
    _show(of_kind[:limit], json, nothing, ids)
    if len(of_kind) > limit:
        print_note(f"{len(of_kind) - limit:,} more; --limit N")


@memories.command()
def search(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="A question, or some words.")],
    limit: LimitOption = SEARCH_LIMIT,
    min_score: Annotated[
        float, typer.Option(metavar="SCORE", help="Leave out what scores less.")
    ] = MIN_SCORE,
    explain: Annotated[
        bool, typer.Option("--explain", help="Why each, and what scores less.")
    ] = False,
    ids: IdsOption = False,
    as_of: AsOfOption = None,
    user: UserOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Find the memories that answer a question.

    Exit code 1 if there is none.
    """
    from perdure.memory import recall

    options: dict[str, Any] = {"limit": limit, "max_tokens": None, "as_of": as_of}
    options |= {"min_score": min_score, "explain": True}
    with (
        open_database(db, user, allow_read_only=True) as database,
        show_status("reading the search index …"),
    ):
        store = database.store.without_refresh()
        recalled = recall(query, store=store, config=database.config, **options)
        whose = database.user
        answers = recalled.memories
        origins = [(memory.provenance and memory.provenance.thread_id) or "" for memory in answers]
        threads = [shorten_thread_id(database, origin, is_whole=ids or json) for origin in origins]
    nothing = f"{whose!r} has no memory that answers that"
    nothing += (
        f"; {recalled.describe_nearest()}, see --min-score 0" if recalled.below_min_score else ""
    )
    if explain:
        print_json(recalled) if json else print_text(recalled.explain(), wraps=False)
    else:
        _show(answers, json, nothing, ids, threads)
    if not answers:
        raise typer.Exit(1)


@memories.command()
def add(
    text: Annotated[
        list[str],
        typer.Argument(metavar="TEXT...", help="Facts; - reads them from stdin, one a line."),
    ],
    key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="The key of the fact; replaces what is there."),
    ] = None,
    user: UserOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Add facts, unless they are known.

    Exit code 1 if one was refused or put into quarantine.
    """
    typed = [line for each in text for line in (sys.stdin if each == "-" else [each or " "])]
    facts = [fact for fact in map(str.strip, typed) if fact]
    if not all(map(str.strip, text)):
        raise ConfigurationError("one of the facts is empty; give each a text")
    if key is not None and len(facts) != 1:
        raise ConfigurationError(f"--key is the key of one fact, and {len(facts)} are given")
    from perdure.memory import remember

    with open_database(db, user, create=True) as database:
        outcomes = [
            remember(each, key=key, store=database.store, config=database.config) for each in facts
        ]
    print_result(outcomes, json, "\n".join(map(str, outcomes)))
    if any(outcome.change in _HELD for outcome in outcomes):
        raise typer.Exit(1)


@memories.command()
def history(
    key: KeyArgument, user: UserOption = None, db: DbOption = None, json: JsonOption = False
) -> None:
    """Show the versions of a memory, oldest first."""
    from perdure.memory.records import memory_from_item

    with open_database(db, user, allow_read_only=True) as database:
        place = _place(database, key, [*_own(database), _INSTRUCTIONS])
        versions = [memory_from_item(item) for item in database.store.history(*place)]
    rows = [
        (v.version or 0, format_time(v.valid_from), format_time(v.valid_to), v.text)
        for v in versions
    ]
    print_rows(versions, json, ["version", "from", "to", "text"], rows, ids=("from", "to"))
    for thread in {v.provenance.thread_id for v in versions if v.provenance} - {None}:
        print_note(f"said on the thread {thread!r}", "dim")


@memories.command()
def forget(
    key: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY]...", help="Keys, or the beginnings of them."),
    ] = None,
    query: QueryOption = None,
    thread: Annotated[
        str | None, typer.Option(metavar="ID", help="All that come from this thread.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All that is known of the user.")] = False,
    yes: YesOption = False,
    user: UserOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Erase memories for good, old versions too.

    The messages stay on their threads and are not extracted again. After --all they are: delete
    the threads first. Exit code 1 if there was nothing to forget.
    """
    check_query(query)
    if [bool(key), query is not None, thread is not None, every].count(True) != 1:
        raise ConfigurationError("give keys of memories, or one of --query, --thread and --all")
    with open_database(db, user) as database:
        if every:
            what = partial(_forget_all, database)
        elif key:
            what = partial(_forget_keys, database, key)
        else:
            of = None if thread is None else _thread(database, thread)
            what = partial(_forget_matching, database, query=query, thread_id=of)
        if not every:
            with show_status("reading what no worker has read …"):
                extract_due_threads(database)  # else it would be, afterwards
        receipt = erase_items(what, _counted, partial(_preview, database), yes=yes, json=json)
    if not receipt.keys:
        raise typer.Exit(1)


# -- finding them


def _own(database: CommandDatabase) -> list[Namespace]:
    """The namespaces of a user; more may be below."""
    return [(label, database.user) for label in _LABELS]


def _place(database: CommandDatabase, typed: str, own: list[Namespace]) -> tuple[Namespace, str]:
    return resolve_item_key(
        database.store, own, typed, "perdure memories list --ids", include_deleted=True
    )


def _thread(database: CommandDatabase, typed: str) -> str:
    """The thread that is meant; one that is deleted may have left memories."""
    if not typed:
        raise ConfigurationError("--thread is empty; give it the id of a thread")
    return (
        resolve_thread_id(database, typed) if database.saver.heads(prefix=typed, limit=1) else typed
    )


def extract_due_threads(database: CommandDatabase) -> None:
    """Extract what was said on the user's threads and no worker has read."""
    from perdure.memory.extraction import DueThreads, Pace

    extraction = database.build_extraction()
    for job in DueThreads(extraction, Pace()).list_jobs():
        if job.namespace == ("memories", database.user) and job.state != "dead":
            with suppress(UnknownThread, InvalidMessages):  # deleted; a program's own
                extraction.extract(job.thread_id, job.config)


# -- erasing them


def _forget_keys(database: CommandDatabase, keys: Iterable[str], *, dry_run: bool) -> Receipt:
    from perdure.memory import Collection

    receipts = []
    for place, key in dict.fromkeys(_place(database, each, _own(database)) for each in keys):
        if dry_run or place[0] == "profiles":
            receipts.append(database.store.forget(place, key=key, dry_run=dry_run))
        else:
            collection = Collection(database.store, (place[0], "{user_id}"))
            receipts.append(collection.forget(key, config=database.config))
    return reduce(sum_of, receipts)


def _forget_matching(database: CommandDatabase, **what: Any) -> Receipt:
    from perdure.memory import Collection

    of = [Collection(database.store, (label, "{user_id}")) for label in ("memories", "examples")]
    return reduce(sum_of, [each.forget_matching(config=database.config, **what) for each in of])


def _forget_all(database: CommandDatabase, *, dry_run: bool) -> Receipt:
    """Erase everything that the store keeps about a user."""
    from perdure.memory import forget

    return forget(everything=True, store=database.store, config=database.config, dry_run=dry_run)


def _preview(database: CommandDatabase, receipt: Receipt) -> None:
    """Show what is to go: the last that each said. What is in quarantine may hold secrets."""
    from perdure.memory.records import QUARANTINE, memory_from_item

    places = [each for each in receipt.keys if each[0][0] in _LABELS or each[0][1] == QUARANTINE]
    for place, key in places[:_SHOWN]:
        *_, last = database.store.history(place, key)
        text = memory_from_item(last).text if place[0] in _LABELS else "in quarantine"
        print_note_line(f"{key}: {text}", "dim")
    if len(places) > _SHOWN:
        print_note(f"… and {len(places) - _SHOWN} more", "dim")


def _counted(receipt: Receipt) -> str:
    """How many there are; notes on them are none."""
    count = sum(place[0] in _LABELS for place, _ in receipt.keys)
    return format_count(count, "memory", "memories")


# -- showing them


def _show(
    shown: list[Memory], json: bool, nothing: str, ids: bool, threads: Sequence[str] = ()
) -> None:
    cells: dict[str, Sequence[str]] = {
        "day": [_day(memory) for memory in shown],
        "kind": [memory.kind for memory in shown],
        "key": [memory.key for memory in shown] if ids else (),
        "thread": threads,
        "text": [memory.text for memory in shown],
    }
    columns = [name for name, column in cells.items() if column]
    rows = list(zip(*(cells[name] for name in columns), strict=True))
    print_rows(shown, json, columns, rows, ids=columns[:-1], empty_note=nothing)


def _day(memory: Memory) -> str:
    """The day on which it was said; if that is not known, since when it is kept."""
    return format_date(memory.provenance.at if memory.provenance else None) or format_date(
        memory.valid_from
    )


# -- what waits


@memories.command()
def quarantine(
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="An entry, or the beginning of its key.")
    ] = None,
    release: Annotated[bool, typer.Option("--release", help="Make it a memory.")] = False,
    discard: Annotated[bool, typer.Option("--discard", help="Erase it for good.")] = False,
    yes: YesOption = False,
    user: UserOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Review what was held back.

    Lists the entries, with secrets redacted. With a key it shows the entry as it was said.
    """
    changes = release or discard
    if (release and discard) or (changes and key is None):
        raise ConfigurationError("give a key, and --release or --discard or neither")
    from perdure.memory.collection import Quarantine

    with open_database(db, user, allow_read_only=not changes) as database:
        held, config = Quarantine(database.store), database.config
        entries = {entry.key: entry for entry in held.list(config)}
        if key is None:
            _list_entries(list(entries.values()), json)
            return
        keys = [each for each in entries if each.startswith(key)]
        entry = entries[resolve_id_prefix(key, keys, "entry", "perdure memories quarantine")]
        if discard and not yes:
            print_note(f"{entry.key}: {entry.shown}", "dim")
            require_confirmation("Discard it for good?", yes)
        if changes:
            outcome = (held.release if release else held.discard)(entry.key, config)
    if changes:
        print_result(outcome, json, str(outcome) if release else f"discarded {entry.key}")
    elif json:
        print_json(entry)
    else:
        thread = entry.provenance and entry.provenance.thread_id
        source = f"the thread {thread!r}" if thread else "no thread"
        print_note(
            f"{entry.kind} from {source}, held back on {format_date(entry.at)}: {entry.reason}",
            "dim",
        )
        print_text(entry.text)


def _list_entries(entries: list[QuarantineEntry], json: bool) -> None:
    rows = [(format_date(entry.at), entry.key, entry.shown, entry.reason) for entry in entries]
    columns, nothing = ("since", "key", "text", "why"), "nothing is in quarantine"
    plain = [entry.to_redacted_dict() for entry in entries]
    print_rows(plain, json, columns, rows, ids=columns[:2], empty_note=nothing)


@memories.command()
def jobs(
    retry: Annotated[
        bool, typer.Option("--retry", help="Try again now what was given up.")
    ] = False,
    facts: Annotated[
        bool, typer.Option("--facts", help="The jobs of 'perdure worker --facts'.")
    ] = False,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """List threads that wait to be extracted.

    Lists those of all users, and how often an extraction of them failed.
    """
    from perdure.memory.extraction import DueThreads, Pace

    with open_database(db, allow_read_only=not retry) as database:
        extraction = database.build_extraction(facts=facts)
        due = DueThreads(extraction, Pace())
        for job in due.list_jobs() if retry else ():
            if job.state == "dead":
                with show_status(f"reading {job.thread_id} …"):
                    extraction.extract(job.thread_id, job.config)
        waiting, unassigned = due.list_jobs(exclude_read=True), due.list_unassigned()
        rows = [
            (
                shorten_thread_id(database, job.thread_id, is_whole=json),
                job.namespace[-1],
                job.state,
                format_age(job.at) if job.at else "",
                _why(job),
            )
            for job in waiting
        ]
    columns, ids = ("thread", "user", "state", "at", "why"), ("thread", "state")
    print_rows(
        waiting, json, columns, rows, ids=ids, empty_note="no thread has anything to extract"
    )
    if unassigned:
        print_note(f"not extracted, as no user is named: {format_count(len(unassigned), 'thread')}")


def _why(job: ExtractionJob) -> str:
    return f"{format_count(job.attempts, 'attempt')}: {job.error}" if job.error else ""
