"""Implement the `perdure memories` commands, which manage a user's memories."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial, reduce
from operator import add as add_receipts
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
    check_query_option_not_blank,
    confirm_and_erase_items,
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
    print_json_or_sentence,
    print_json_or_table,
    print_note,
    print_note_line,
    print_text,
    show_status,
)
from perdure.errors import ConfigurationError, InvalidMessages, UnknownThread
from perdure.settings import MIN_SCORE, SEARCH_LIMIT, SHOWN_LIMIT

if TYPE_CHECKING:
    from perdure.memory import Memory
    from perdure.memory.long_term.collection import QuarantineEntry
    from perdure.memory.long_term.extraction import ExtractionJob
    from perdure.stores import Receipt

    Namespace = tuple[str, ...]

memories = add_command_group("memories", "Search, change and review the memories of a user.")

_LABELS: Final = ("memories", "profiles", "examples")  # First labels of a user's namespaces.
# The namespace of the agent's instructions, which apply to all users.
_INSTRUCTIONS: Final = ("instructions",)
# If adding a memory has the outcome "refused" or "quarantined", `perdure memories add` exits with
# code 1.
_REJECTED: Final = ("refused", "quarantined")
# Maximum number of memories to print before asking for confirmation.
_PREVIEWED: Final = 10
_EARLIEST: Final = datetime.min.replace(tzinfo=UTC)


@memories.command("list")
def list_(
    kind: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="List only memories of this kind, such as fact or turn."),
    ] = None,
    limit: LimitOption = SHOWN_LIMIT,
    ids: IdsOption = False,
    as_of: AsOfOption = None,
    user: UserOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """List memories, most recently changed first."""
    from perdure.memory.long_term.records import convert_item_to_memory

    with open_database(db, user, allow_read_only=True) as database:
        options: dict[str, Any] = {"limit": sys.maxsize, "as_of": as_of, "refresh_ttl": False}
        stored = [
            convert_item_to_memory(item)
            for namespace in (*_user_namespaces(database), _INSTRUCTIONS)
            for item in database.store.search(namespace, **options)
        ]
    stored.sort(key=lambda memory: memory.valid_from or _EARLIEST, reverse=True)
    matches = [memory for memory in stored if kind in (None, memory.kind)]
    empty_note = f"{database.user!r} has no memories" + (
        f" of the kind {kind!r}" if stored else "; run 'perdure memories add' to add facts"
    )
    _print_memories(matches[:limit], json, empty_note, ids)
    if len(matches) > limit:
        print_note(f"{len(matches) - limit:,} more memories; pass --limit N to list more")


@memories.command()
def search(
    query: Annotated[
        str, typer.Argument(metavar="QUERY", help="A question or words to search for.")
    ],
    limit: LimitOption = SEARCH_LIMIT,
    min_score: Annotated[
        float,
        typer.Option(metavar="SCORE", help="Exclude memories with a score below SCORE."),
    ] = MIN_SCORE,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Explain all scores, including scores below --min-score."),
    ] = False,
    ids: IdsOption = False,
    as_of: AsOfOption = None,
    user: UserOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Find the memories that answer a question, best first.

    The exit code is 1 if the search finds no memory.
    """
    from perdure.memory import recall

    options: dict[str, Any] = {
        "limit": limit,
        "max_tokens": None,
        "as_of": as_of,
        "min_score": min_score,
        "explain": True,
    }
    with (
        open_database(db, user, allow_read_only=True) as database,
        show_status("reading the search index …"),
    ):
        recalled = recall(
            query, store=database.store.without_refresh(), config=database.config, **options
        )
        answers = recalled.memories
        origins = [(memory.provenance and memory.provenance.thread_id) or "" for memory in answers]
        threads = [shorten_thread_id(database, origin, is_whole=ids or json) for origin in origins]
    empty_note = f"{database.user!r} has no memory that answers the question"
    if recalled.below_min_score:
        empty_note += (
            f"; {recalled.describe_memories_below_min_score()}, and --min-score 0 shows all"
        )
    if explain:
        print_json(recalled) if json else print_text(recalled.explain(), wraps=False)
    else:
        _print_memories(answers, json, empty_note, ids, threads)
    if not answers:
        raise typer.Exit(1)


@memories.command()
def add(
    text: Annotated[
        list[str],
        typer.Argument(
            metavar="TEXT...", help="Facts to store. Use - to read them from stdin, one per line."
        ),
    ],
    key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Store the fact under this key, and keep old versions."),
    ] = None,
    user: UserOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Add facts that are not stored yet.

    The exit code is 1 if a fact was refused or quarantined.
    """
    lines = [
        line for argument in text for line in (sys.stdin if argument == "-" else [argument or " "])
    ]
    facts = [fact for fact in map(str.strip, lines) if fact]
    if not all(map(str.strip, text)):
        raise ConfigurationError("one of the facts is empty; pass text for every fact")
    if key is not None and len(facts) != 1:
        raise ConfigurationError(
            f"--key can only be used with one fact, but {len(facts)} facts were passed; remove "
            "--key, or pass one fact"
        )
    from perdure.memory import remember

    with open_database(db, user, create=True) as database:
        outcomes = [
            remember(fact, key=key, store=database.store, config=database.config) for fact in facts
        ]
    print_json_or_sentence(outcomes, json, "\n".join(map(str, outcomes)))
    if any(outcome.change in _REJECTED for outcome in outcomes):
        raise typer.Exit(1)


@memories.command()
def history(
    key: KeyArgument, user: UserOption = None, db: DbOption = None, json: JsonOption = False
) -> None:
    """Show the versions of a memory, oldest first."""
    from perdure.memory.long_term.records import convert_item_to_memory

    with open_database(db, user, allow_read_only=True) as database:
        found_key = _resolve_memory_namespace_and_key(
            database, key, [*_user_namespaces(database), _INSTRUCTIONS]
        )
        versions = [convert_item_to_memory(item) for item in database.store.history(*found_key)]
    rows = [
        (
            memory.version or 0,
            format_time(memory.valid_from),
            format_time(memory.valid_to),
            memory.text,
        )
        for memory in versions
    ]
    print_json_or_table(versions, json, ["version", "from", "to", "text"], rows, ids=("from", "to"))
    origins = {memory.provenance.thread_id for memory in versions if memory.provenance}
    for thread in origins - {None}:
        print_note(f"from the thread {thread!r}", "dim")


@memories.command()
def forget(
    key: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY]...", help="The keys of the memories, or key prefixes."),
    ] = None,
    query: QueryOption = None,
    thread: Annotated[
        str | None, typer.Option(metavar="ID", help="Select memories that come from this thread.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Select all memories about the user.")
    ] = False,
    yes: YesOption = False,
    user: UserOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Permanently erase memories, including their old versions.

    The messages from which the memories were extracted are kept. If memories are erased without
    --all, later extractions do not store the same memories again. After an erasure with --all, the
    next extraction reads all messages again, from the beginning, and stores new memories. If no new
    memories should be extracted from a thread's messages, delete the thread before the next
    extraction. The exit code is 1 if there was nothing to erase.
    """
    check_query_option_not_blank(query)
    if [bool(key), query is not None, thread is not None, every].count(True) != 1:
        raise ConfigurationError(
            "select the memories in exactly one way: pass memory keys, --query, --thread or --all"
        )
    with open_database(db, user) as database:
        if every:
            erase = partial(_erase_all_memories, database)
        elif key:
            erase = partial(_erase_memories_by_key, database, key)
        else:
            thread_id = None if thread is None else _resolve_thread_id_of_memories(database, thread)
            erase = partial(_erase_matching_memories, database, query=query, thread_id=thread_id)
        if not every:
            # Before the erasure, extract memories from messages that no extraction has read yet.
            # The erasure then also erases these new memories, and stores a tombstone for each
            # memory. A tombstone prevents later extractions from storing an erased memory again.
            with show_status("extracting unread messages …"):
                extract_memories_of_due_threads(database)
        receipt = confirm_and_erase_items(
            erase,
            _format_memory_count,
            partial(_print_erasure_preview, database),
            yes=yes,
            json=json,
        )
    if not receipt.keys:
        raise typer.Exit(1)


# -- lookup


def _user_namespaces(database: CommandDatabase) -> list[Namespace]:
    """Return the namespaces that contain the user's memories."""
    return [(label, database.user) for label in _LABELS]


def _resolve_memory_namespace_and_key(
    database: CommandDatabase, key_or_prefix: str, namespaces: list[Namespace]
) -> tuple[Namespace, str]:
    """Return the namespace and the full key of a memory.

    Args:
        database: The database of the command.
        key_or_prefix: The key of the memory, or a prefix of the key, as the user typed it.
        namespaces: The namespaces that are searched.
    """
    return resolve_item_key(
        database.store,
        namespaces,
        key_or_prefix,
        "perdure memories list --ids",
        include_deleted=True,
    )


def _resolve_thread_id_of_memories(database: CommandDatabase, id_or_prefix: str) -> str:
    """Return the full id of a thread from which memories were extracted, given an id or id prefix.

    If no thread id starts with `id_or_prefix`, return `id_or_prefix` unchanged. `id_or_prefix` may
    be the full id of a deleted thread, because memories that were extracted from a deleted thread
    can still exist.
    """
    if not id_or_prefix:
        raise ConfigurationError("--thread is empty; pass the id of a thread")
    exists = database.saver.heads(prefix=id_or_prefix, limit=1)
    return resolve_thread_id(database, id_or_prefix) if exists else id_or_prefix


def extract_memories_of_due_threads(database: CommandDatabase) -> None:
    """Extract memories now from all unprocessed messages in the user's threads.

    A message is unprocessed if no memory extraction has read the message yet.

    Threads whose extraction is not yet due are included.

    A thread is skipped if the extraction of memories from it has failed too often.
    """
    from perdure.memory.long_term.extraction import DueThreads, Pace

    extraction = database.build_memory_extraction()
    for job in DueThreads(extraction, Pace()).list_jobs():
        if job.namespace == ("memories", database.user) and job.state != "dead":
            # Skip threads that were deleted after the extraction jobs were listed. Also skip a
            # thread if perdure cannot read its messages, which can happen if another program stored
            # the messages.
            with suppress(UnknownThread, InvalidMessages):
                extraction.extract(job.thread_id, job.config)


# -- removal


def _erase_memories_by_key(
    database: CommandDatabase, keys: Iterable[str], *, dry_run: bool
) -> Receipt:
    """Erase the memories with the given keys. A unique prefix of a key is enough."""
    from perdure.memory import Collection

    receipts = []
    namespaces = _user_namespaces(database)
    found_keys = [_resolve_memory_namespace_and_key(database, typed, namespaces) for typed in keys]
    for namespace, key in dict.fromkeys(found_keys):
        if dry_run or namespace[0] == "profiles":
            receipts.append(database.store.forget(namespace, key=key, dry_run=dry_run))
        else:
            collection = Collection(database.store, (namespace[0], "{user_id}"))
            receipts.append(collection.forget(key, config=database.config))
    return reduce(add_receipts, receipts)


def _erase_matching_memories(database: CommandDatabase, **conditions: Any) -> Receipt:
    """Erase the memories and examples that match a query or were extracted from a thread.

    The keyword arguments `conditions` are passed on to `Collection.forget_matching`.
    """
    from perdure.memory import Collection

    collections = [
        Collection(database.store, (label, "{user_id}")) for label in ("memories", "examples")
    ]
    return reduce(
        add_receipts,
        [
            collection.forget_matching(config=database.config, **conditions)
            for collection in collections
        ],
    )


def _erase_all_memories(database: CommandDatabase, *, dry_run: bool) -> Receipt:
    """Erase everything that the store holds about the user."""
    from perdure.memory import forget

    return forget(everything=True, store=database.store, config=database.config, dry_run=dry_run)


def _print_erasure_preview(database: CommandDatabase, receipt: Receipt) -> None:
    """Print the current text of each memory to be erased.

    Quarantined texts are not printed, because they may contain secrets.
    """
    from perdure.memory.long_term.records import QUARANTINE, convert_item_to_memory

    entries = [
        (namespace, key)
        for namespace, key in receipt.keys
        if namespace[0] in _LABELS or namespace[1] == QUARANTINE
    ]
    for namespace, key in entries[:_PREVIEWED]:
        *_, last = database.store.history(namespace, key)
        text = convert_item_to_memory(last).text if namespace[0] in _LABELS else "in quarantine"
        print_note_line(f"{key}: {text}", "dim")
    if len(entries) > _PREVIEWED:
        print_note(f"… and {len(entries) - _PREVIEWED} more", "dim")


def _format_memory_count(receipt: Receipt) -> str:
    """Return the number of memories listed in an erasure receipt.

    Only items whose namespace starts with one of `_LABELS` are counted. Items in internal
    namespaces, such as quarantined texts, are not counted.
    """
    return format_count(
        sum(namespace[0] in _LABELS for namespace, _ in receipt.keys), "memory", "memories"
    )


# -- output


def _print_memories(
    memories: list[Memory],
    json: bool,
    empty_note: str,
    ids: bool,
    threads: Sequence[str] = (),
) -> None:
    """Print memories as a table or as JSON.

    Args:
        memories: The memories, in the order of the rows.
        json: Whether to print JSON.
        empty_note: The note that is printed if there are no memories.
        ids: Whether the table has a column with the keys.
        threads: The thread of each memory for a column, or nothing for no column.
    """
    cells: dict[str, Sequence[str]] = {
        "day": [_format_memory_day(memory) for memory in memories],
        "kind": [memory.kind for memory in memories],
        "key": [memory.key for memory in memories] if ids else (),
        "thread": threads,
        "text": [memory.text for memory in memories],
    }
    columns = [name for name, column in cells.items() if column]
    rows = list(zip(*(cells[name] for name in columns), strict=True))
    print_json_or_table(memories, json, columns, rows, ids=columns[:-1], empty_note=empty_note)


def _format_memory_day(memory: Memory) -> str:
    """Return the date of the messages from which a memory was extracted.

    If the date of the messages is unknown, return the date from which the memory has been valid.
    """
    provenance = memory.provenance
    return format_date(provenance.at if provenance else None) or format_date(memory.valid_from)


# -- quarantine and extraction jobs


@memories.command()
def quarantine(
    key: Annotated[
        str | None,
        typer.Argument(metavar="[KEY]", help="The key of an entry, or a key prefix."),
    ] = None,
    release: Annotated[
        bool, typer.Option("--release", help="Save the quarantined entry as a memory.")
    ] = False,
    discard: Annotated[
        bool, typer.Option("--discard", help="Erase the entry permanently.")
    ] = False,
    yes: YesOption = False,
    user: UserOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Review texts in quarantine, which become memories if released.

    Without KEY, all quarantined entries are listed, with secrets redacted. With KEY, one entry is
    shown in full.
    """
    has_action = release or discard
    if (release and discard) or (has_action and key is None):
        raise ConfigurationError(
            "--release and --discard each require a KEY and cannot be combined; pass a KEY and "
            "one of the two options"
        )
    from perdure.memory.long_term.collection import Quarantine

    with open_database(db, user, allow_read_only=not has_action) as database:
        waiting, config = Quarantine(database.store), database.config
        entries = {entry.key: entry for entry in waiting.list(config)}
        if key is None:
            _print_quarantine_entries(list(entries.values()), json)
            return
        matches = [entry_key for entry_key in entries if entry_key.startswith(key)]
        entry = entries[resolve_id_prefix(key, matches, "entry", "perdure memories quarantine")]
        if discard and not yes:
            print_note(f"{entry.key}: {entry.shown}", "dim")
            require_confirmation("Discard the entry permanently?", yes)
        if has_action:
            outcome = (waiting.release if release else waiting.discard)(entry.key, config)
    if has_action:
        print_json_or_sentence(outcome, json, str(outcome) if release else f"discarded {entry.key}")
    elif json:
        print_json(entry)
    else:
        thread = entry.provenance and entry.provenance.thread_id
        source = f"the thread {thread!r}" if thread else "no thread"
        print_note(
            f"{entry.kind} from {source}, quarantined on {format_date(entry.at)}: {entry.reason}",
            "dim",
        )
        print_text(entry.text)


def _print_quarantine_entries(entries: list[QuarantineEntry], json: bool) -> None:
    """Print quarantined entries as a table or as JSON, with secrets redacted."""
    rows = [(format_date(entry.at), entry.key, entry.shown, entry.reason) for entry in entries]
    columns = ("since", "key", "text", "reason")
    print_json_or_table(
        [entry.to_redacted_dict() for entry in entries],
        json,
        columns,
        rows,
        ids=columns[:2],
        empty_note="the quarantine is empty",
    )


@memories.command()
def jobs(
    retry: Annotated[bool, typer.Option("--retry", help="Retry failed extractions now.")] = False,
    facts: Annotated[
        bool,
        typer.Option("--facts", help="List the threads whose facts have not been extracted yet."),
    ] = False,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """List all users' threads that are waiting for memory extraction.

    For each thread, the list shows how often memory extraction has failed, and the last error.
    """
    from perdure.memory.long_term.extraction import DueThreads, Pace

    with open_database(db, allow_read_only=not retry) as database:
        extraction = database.build_memory_extraction(extracts_facts=facts)
        due = DueThreads(extraction, Pace())
        for job in due.list_jobs() if retry else ():
            if job.state == "dead":
                with show_status(f"extracting {job.thread_id} …"):
                    extraction.extract(job.thread_id, job.config)
        waiting, unassigned = due.list_jobs(exclude_read=True), due.list_threads_without_user()
        rows = [
            (
                shorten_thread_id(database, job.thread_id, is_whole=json),
                job.namespace[-1],
                job.state,
                format_age(job.at) if job.at else "",
                _describe_failures(job),
            )
            for job in waiting
        ]
    print_json_or_table(
        waiting,
        json,
        ("thread", "user", "state", "due", "error"),
        rows,
        ids=("thread", "state"),
        empty_note="no thread is waiting for memory extraction",
    )
    if unassigned:
        count = format_count(len(unassigned), "thread")
        print_note(f"no memories are extracted from {count} without a user")


def _describe_failures(job: ExtractionJob) -> str:
    """Return a message that says how often a thread's extraction failed, and quotes the last error.

    Return an empty text if no extraction has failed.
    """
    return f"{format_count(job.attempts, 'attempt')}: {job.error}" if job.error else ""
