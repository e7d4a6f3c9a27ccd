"""Implement the thread commands `perdure threads`, `fork`, `rewind` and `delete`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from perdure.cli.app import (
    CommandDatabase,
    DbOption,
    IdsOption,
    JsonOption,
    LimitOption,
    ThreadArgument,
    YesOption,
    app,
    check_user_filter,
    complete_thread_id,
    open_database,
    print_note_if_has_more_and_exit_if_no_match,
    require_confirmation,
    resolve_checkpoint_id,
    resolve_thread_id,
    shorten_thread_id,
)
from perdure.cli.output import (
    format_age,
    format_as_single_line,
    format_count,
    format_date,
    print_json,
    print_json_or_sentence,
    print_json_or_table,
    print_note,
    print_text,
    print_whether_deleted_bytes_remain,
    progress_bar,
    show_status,
)
from perdure.errors import ConfigurationError, PerdureError, UnknownThread
from perdure.settings import THREADS_LIMIT

if TYPE_CHECKING:
    from perdure.checkpointers import ThreadHead

# Maximum length, in characters, of a printed title. Longer titles are truncated.
_MAX_TITLE: Final = 60
Status = Literal["idle", "waiting", "unfinished"]
"""The status of a thread; see `ThreadStatus.state`."""


@app.command()
def threads(
    text: Annotated[
        str | None,
        typer.Argument(
            metavar="[TEXT]", help="List only threads whose title or id contains this text."
        ),
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Find threads whose messages match these words."),
    ] = None,
    user: Annotated[
        str | None, typer.Option("--user", metavar="NAME", help="List only threads of this user.")
    ] = None,
    waiting: Annotated[
        bool, typer.Option("--waiting", help="List only threads with an unanswered interrupt.")
    ] = False,
    status: Annotated[
        Status | None,
        typer.Option(
            metavar="STATUS",
            help="Filter by status: idle, waiting or unfinished.",
        ),
    ] = None,
    limit: LimitOption = THREADS_LIMIT,
    ids: IdsOption = False,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """List threads, most recently changed first, or search their text.

    If a thread has no title, the first words of its first human message are shown. For an imported
    thread, the list shows the time of the last message as the time of the last activity. The exit
    code is 1 if no thread matches TEXT, --user, --waiting or --status.
    """
    check_user_filter(user, "threads")
    if waiting and status is not None:
        raise ConfigurationError(
            f"--waiting and --status {status} cannot be combined; remove one of them"
        )
    status = "waiting" if waiting else status
    if search is not None:
        if status is not None:
            raise ConfigurationError(
                "--search cannot be combined with --status or --waiting; remove one of them"
            )
        _print_search_results(search, text, user, limit, ids, db, json)
        return
    with open_database(db, allow_read_only=True) as database:
        heads = _find_matching_heads(database, (text or "").casefold(), user, status, limit + 1)
        pairs = [
            (head, thread_json)
            for head in heads[:limit]
            if (thread_json := _build_thread_json_or_none(database, head)) is not None
        ]
        cells: dict[str, list[Any]] = {
            "id": [
                shorten_thread_id(database, head.thread_id, is_whole=ids or json)
                for head, _ in pairs
            ],
            "title": [format_as_single_line(head.title, _MAX_TITLE) for head, _ in pairs],
            "messages": [row["messages"] for _, row in pairs],
            "last activity": [format_age(row["active_at"]) for _, row in pairs],
            "status": [row["status"] for _, row in pairs],
            "user": [row["person"] or "" for _, row in pairs],
        }
        # Omit the status column if all threads are idle, and the user column if all threads belong
        # to the configured user or to nobody.
        usual = {"status": {"idle"}, "user": {"", database.user}}
    columns = [name for name in cells if name not in usual or {*cells[name]} - usual[name]]
    rows = list(zip(*(cells[name] for name in columns), strict=True))
    empty_note = _describe_conditions(text, user, status)
    print_json_or_table(
        [row for _, row in pairs], json, columns, rows, ids=("id",), empty_note=empty_note
    )
    print_note_if_has_more_and_exit_if_no_match(
        len(heads) > limit, limit, "threads", no_match=bool(empty_note) and not pairs
    )


def _describe_conditions(text: str | None, user: str | None, status: str | None) -> str:
    """Return a message saying that no thread matches the filters, or "" if there are no filters."""
    conditions = [
        "" if user is None else f"belongs to {user!r}",
        "" if status is None else f"is {status}",
        "" if text is None else f"has {text!r} in its title or id",
    ]
    phrase = " and ".join(filter(None, conditions))
    return f"no thread {phrase}" if phrase else ""


def _print_search_results(
    query: str,
    text: str | None,
    user: str | None,
    limit: int,
    ids: bool,
    db: str | None,
    json: bool,
) -> None:
    """Print the threads whose messages match the query, best match first.

    Raises:
        ConfigurationError: The command has the argument `text` too, or the search is turned off.
        typer.Exit: No message matches.
    """
    from perdure.memory import search_threads

    if text is not None:
        raise ConfigurationError(
            f"the argument {text!r} and --search cannot be combined; remove one of them"
        )
    with open_database(db, allow_read_only=True) as database:
        if not database.settings.search_threads:
            source = database.settings.sources["search_threads"]
            raise ConfigurationError(
                f"message search is turned off by search_threads = false in {source}; set "
                "search_threads to true to use --search"
            )
        with progress_bar("reading threads", "thread") as update_progress:
            hits = search_threads(
                database.saver,
                database.store,
                query,
                user=user,
                limit=limit,
                progress=lambda count, total: update_progress(count / total, count),
            )
        thread_ids = [shorten_thread_id(database, hit.thread_id, is_whole=ids) for hit in hits]
    if json:
        print_json([asdict(hit) for hit in hits])
    for hit, thread_id in () if json else zip(hits, thread_ids, strict=True):
        print_text(
            f"{thread_id}  {format_date(hit.at)}  {format_as_single_line(hit.title, _MAX_TITLE)}",
            "bold",
        )
        print_text(f"  {hit.role}: {hit.marked}")
    if hits.unread:
        print_note(
            "not searched, because the database is read-only: "
            f"{format_count(hits.unread, 'thread')}"
        )
    if not hits:
        print_note(f"no message matches {query!r}")
        raise typer.Exit(1)


def _find_matching_heads(
    database: CommandDatabase, text: str, user: str | None, status: str | None, limit: int
) -> list[ThreadHead]:
    """Return the heads of the most recently changed threads that meet all conditions.

    Args:
        database: The database of the command.
        text: A casefolded text that the title or the id contains. "" means any title and id.
        user: The person of the threads, or None for all persons.
        status: The status of the threads, or None for any status.
        limit: The maximum number of heads.
    """
    if not text and user is None and status is None:
        return database.saver.heads(limit=limit)
    from perdure.checkpointers.owner_record import may_owners_be_organisations
    from perdure.run_tables.thread_list import ListedThread, ThreadList, ThreadQuery

    are_organisations = may_owners_be_organisations(database.saver.database)

    def match_thread(thread: ListedThread) -> str | None:
        client = thread.client
        # Omit thread ids that a client of the server has only reserved, because threads with these
        # ids do not exist yet.
        is_created = thread.head_metadata is not None or client is None or not client.is_reserved
        has_person = user is None or user == find_person_of_thread(
            thread.head_metadata or {}, {} if are_organisations else thread.metadata
        )
        has_text = text in f"{thread.thread_id}\0{thread.title}".casefold()
        return thread.thread_id if is_created and has_text and has_person else None

    # The status filter "interrupted" can also match threads without an unanswered interrupt, so the
    # status of each match is checked again below. If `user` is a number, the query does not filter
    # by the owner, because other programs may have stored the owner as a JSON number.
    query = ThreadQuery(
        text=text,
        metadata=None if user is None or user.isdecimal() else {"owner": user},
        status="interrupted" if status == "waiting" else None,
    )
    matches: list[ThreadHead] = []
    threads = ThreadList(database.saver)
    for offset in count(0, limit):
        ids = threads.search(query, match_thread, limit, offset)
        # Skip a thread whose head is None, because the thread was deleted after the search found
        # it.
        matches += [
            head
            for head in map(database.saver.head, ids)
            if head is not None and status in (None, head.status.state)
        ]
        if len(ids) < limit or len(matches) >= limit:
            break
    return matches[:limit]


def find_person_of_thread(
    head_metadata: Mapping[str, Any], thread_metadata: Mapping[str, Any]
) -> str:
    """Return the id of the person to whom a thread belongs, or "" if it belongs to nobody.

    Args:
        head_metadata: The metadata of the head, whose `user_id` is the person.
        thread_metadata: The metadata of the thread, whose `owner` is the person if there is no
            `user_id`.
    """
    # Convert the person's id to a string, because other programs may have stored a numeric
    # `user_id`.
    return str(head_metadata.get("user_id") or thread_metadata.get("owner") or "")


def _build_thread_json_or_none(
    database: CommandDatabase, head: ThreadHead
) -> dict[str, Any] | None:
    """Return the dict that `--json` prints for a thread.

    Return None if another process has deleted the thread.
    """
    from perdure.checkpointers.import_metadata import read_import_metadata
    from perdure.checkpointers.owner_record import may_owners_be_organisations

    try:
        info = asdict(database.saver.thread(head.thread_id))
        title = read_import_metadata(database.saver, head.thread_id, head.metadata).get("title")
        are_organisations = may_owners_be_organisations(database.saver.database)
    except UnknownThread:
        return None
    person = find_person_of_thread(head.metadata, {} if are_organisations else head.metadata)
    return {
        **info,
        "title": title,
        "user": head.owner,
        "person": person or None,
        "status": head.status.state,
        "next": head.status.next,
        "waits_for_answers_to": [question for _, question in head.status.questions],
    }


# -- branches


@app.command()
def fork(
    thread: ThreadArgument,
    new: Annotated[str, typer.Argument(metavar="NEW", help="The id of the copy.")],
    at: Annotated[
        str | None, typer.Option(metavar="ID", help="Copy the thread only up to this checkpoint.")
    ] = None,
    db: DbOption = None,
) -> None:
    """Copy a thread, either in full or up to a checkpoint."""
    with open_database(db) as database:
        source = resolve_thread_id(database, thread)
        if not new:
            raise ConfigurationError(
                "the argument NEW is empty; pass an id for the copy of the thread"
            )
        if database.saver.head(new) is not None:
            raise ConfigurationError(f"the thread {new!r} already exists; pass another id as NEW")
        database.saver.copy_thread(
            source,
            new,
            checkpoint_id=None if at is None else resolve_checkpoint_id(database, source, at),
        )
    print_text(f"copied {source!r} to {new!r}")


@app.command()
def rewind(
    thread: ThreadArgument,
    to: Annotated[str, typer.Option(metavar="ID", help="The checkpoint to continue from.")],
    db: DbOption = None,
) -> None:
    """Continue a thread from an older checkpoint.

    Nothing is deleted. Later checkpoints are kept as a branch.
    """
    with open_database(db) as database:
        source = resolve_thread_id(database, thread)
        checkpoint = resolve_checkpoint_id(database, source, to)
        database.saver.rewind(source, checkpoint)
    print_text(f"{source!r} continues from {checkpoint}")


# -- removal


@app.command()
def delete(
    thread: Annotated[
        list[str],
        typer.Argument(
            metavar="ID...",
            help="Thread ids or id prefixes.",
            autocompletion=complete_thread_id,
        ),
    ],
    keep_memories: Annotated[
        bool,
        typer.Option("--keep-memories", help="Keep the memories from the deleted threads."),
    ] = False,
    yes: YesOption = False,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Delete threads and their memories permanently.

    If you import an archive that contains a deleted conversation, the conversation is restored.
    """
    from perdure.memory.long_term.thread_memories import forget_thread_memories

    with open_database(db) as database:
        ids = list(dict.fromkeys(resolve_thread_id(database, typed) for typed in thread))
        message_count = sum(_count_messages(database, thread_id) for thread_id in ids)
        memory_count = (
            0 if keep_memories else forget_thread_memories(database.store, ids, dry_run=True).items
        )
        counts = f"{format_count(len(ids), 'thread')} with {format_count(message_count, 'message')}"
        if memory_count:
            counts += f" and {format_count(memory_count, 'memory', 'memories')}"
        names = ", ".join(_format_thread_name(database, thread_id) for thread_id in ids[:3])
        names += ", …" if len(ids) > 3 else ""
        require_confirmation(f"Delete {counts} permanently: {names}?", yes)
        with show_status("deleting …"):
            # Erase the memories before the threads. If the process crashed after deleting a thread,
            # the thread's memories could no longer be found.
            clean = keep_memories or forget_thread_memories(database.store, ids).clean
            # Delete the last thread with `erase`, and all other threads with `prune`. One call of
            # `erase` is enough, because it overwrites the bytes of all deleted threads in the
            # database file.
            *others, last = ids
            database.saver.prune(others, strategy="delete")
            clean = database.saver.erase(last).scrubbed and clean
    result = {"threads": ids, "messages": message_count, "memories": memory_count, "clean": clean}
    print_json_or_sentence(result, json, f"deleted {counts}: {names}")
    if not json:
        print_whether_deleted_bytes_remain(clean)
        print_note("quotations in other threads are kept")


def _count_messages(database: CommandDatabase, thread_id: str) -> int:
    """Return the number of messages in a thread's history.

    If the thread's history cannot be read, return the number of all items in the thread's logs
    instead.
    """
    with suppress(PerdureError):  # A thread with unreadable messages can still be deleted.
        return len(database.saver.history(thread_id))
    return database.saver.thread(thread_id).items


def _format_thread_name(database: CommandDatabase, thread_id: str) -> str:
    """Return the thread's id, followed by its title if it has one."""
    head = database.saver.head(thread_id)
    title = format_as_single_line(head.title, _MAX_TITLE) if head is not None else ""
    return f"{thread_id!r} ({title})" if title else repr(thread_id)
