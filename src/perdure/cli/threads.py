"""`perdure threads`, `fork`, `rewind`, `delete`: threads are listed, copied, set back, deleted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
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
    complete_thread_id,
    open_database,
    require_confirmation,
    resolve_checkpoint_id,
    resolve_thread_id,
    shorten_thread_id,
)
from perdure.cli.output import (
    format_age,
    format_count,
    format_date,
    format_line,
    print_json,
    print_note,
    print_result,
    print_rows,
    print_scrub_result,
    print_text,
    progress_bar,
    show_status,
)
from perdure.errors import ConfigurationError, PerdureError, UnknownThread
from perdure.settings import THREADS_LIMIT, check_user

if TYPE_CHECKING:
    from perdure.checkpointers import ThreadHead

_LONGEST: Final = 60  # characters of a title
State = Literal["idle", "waiting", "unfinished"]
"""Where a thread stands; see `ThreadStatus.state`."""


@app.command()
def threads(
    text: Annotated[
        str | None,
        typer.Argument(metavar="[TEXT]", help="Only threads with this in the title or id."),
    ] = None,
    search: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Those in which these words were said.")
    ] = None,
    user: Annotated[
        str | None, typer.Option("--user", metavar="NAME", help="Only threads of this user.")
    ] = None,
    waiting: Annotated[
        bool, typer.Option("--waiting", help="Only threads that wait for an answer.")
    ] = False,
    status: Annotated[
        State | None,
        typer.Option(metavar="STATUS", help="Only idle, waiting or unfinished threads."),
    ] = None,
    limit: LimitOption = THREADS_LIMIT,
    ids: IdsOption = False,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """List threads, the last written first, or by what was said in them.

    One without a title has the first words of what a human said in its place. The last activity of
    an imported thread is that of its conversation. Exit code 1 if TEXT, --user, --waiting or
    --status leave none.
    """
    if user is not None:
        check_user("--user", user, "leave it out for all users")
    if waiting and status is not None:
        raise ConfigurationError(f"there are --waiting and --status {status}; give one of them")
    status = "waiting" if waiting else status
    if search is not None:
        if status is not None:
            raise ConfigurationError("--search finds threads of any status: leave --status out")
        _said(search, text, user, limit, ids, db, json)
        return
    with open_database(db, allow_read_only=True) as database:
        heads = _find_heads(database, (text or "").casefold(), user, status, limit + 1)
        pairs = [pair for head in heads[:limit] for pair in _described(database, head)]
        cells: dict[str, list[Any]] = {
            "id": [
                shorten_thread_id(database, head.thread_id, is_whole=ids or json)
                for head, _ in pairs
            ],
            "title": [format_line(head.title, _LONGEST) for head, _ in pairs],
            "messages": [row["messages"] for _, row in pairs],
            "last activity": [format_age(row["active_at"]) for _, row in pairs],
            "status": [row["status"] for _, row in pairs],
            "user": [row["person"] or "" for _, row in pairs],
        }
        usual = {"status": {"idle"}, "user": {"", database.user}}
    columns = [name for name in cells if name not in usual or {*cells[name]} - usual[name]]
    rows = list(zip(*(cells[name] for name in columns), strict=True))
    nothing = _describe_nothing(text, user, status)
    print_rows([row for _, row in pairs], json, columns, rows, ids=("id",), empty_note=nothing)
    if len(heads) > limit:
        print_note(f"there are more than {limit}; --limit N shows them")
    if nothing and not pairs:
        raise typer.Exit(1)


def _describe_nothing(text: str | None, user: str | None, status: str | None) -> str:
    """Say that no thread meets the conditions of a list, or nothing if there are none."""
    conditions = [
        "" if user is None else f"is of {user!r}",
        "" if status is None else f"is {status}",
        "" if text is None else f"has {text!r} in its title or id",
    ]
    named = " and ".join(filter(None, conditions))
    return f"no thread {named}" if named else ""


def _said(
    search: str,
    text: str | None,
    user: str | None,
    limit: int,
    ids: bool,
    db: str | None,
    json: bool,
) -> None:
    """Show the threads in which words were said, the best answers first."""
    from perdure.memory import search_threads

    if text is not None:
        raise ConfigurationError(f"there are {text!r} and --search; give one of them")
    with open_database(db, allow_read_only=True) as database:
        if not database.settings.search_threads:
            source = database.settings.sources["search_threads"]
            raise ConfigurationError(
                f"search_threads is false, from {source}: what was said is not searched"
            )
        with progress_bar("reading threads", "thread") as progress:
            hits = search_threads(
                database.saver,
                database.store,
                search,
                user=user,
                limit=limit,
                progress=lambda done, total: progress(done / total, done),
            )
        shown = [shorten_thread_id(database, hit.thread_id, is_whole=ids) for hit in hits]
    if json:
        print_json([asdict(hit) for hit in hits])
    for hit, thread in () if json else zip(hits, shown, strict=True):
        print_text(f"{thread}  {format_date(hit.at)}  {format_line(hit.title, _LONGEST)}", "bold")
        print_text(f"  {hit.role}: {hit.marked}")
    if hits.unread:
        print_note(
            f"{format_count(hits.unread, 'thread')} cannot be read, as the database is read-only"
        )
    if not hits:
        print_note(f"nothing was said like {search!r}")
        raise typer.Exit(1)


def _find_heads(
    database: CommandDatabase, text: str, user: str | None, status: str | None, limit: int
) -> list[ThreadHead]:
    """Return the heads of the newest threads that meet all conditions.

    Args:
        database: The database.
        text: A text in the title or the id, in lower case; `""` means any.
        user: The person of the threads, or None for all.
        status: Where the threads stand, or None for anywhere.
        limit: The most heads.
    """
    if not text and user is None and status is None:
        return database.saver.heads(limit=limit)
    from perdure.checkpointers.thread_list import ListedThread, ThreadList, ThreadQuery

    def match(thread: ListedThread) -> str | None:
        client = thread.client
        began = thread.head_metadata is not None or client is None or not client.is_reserved
        is_theirs = user is None or user == read_person(thread.head_metadata or {}, thread.metadata)
        is_match = began and text in f"{thread.thread_id}\0{thread.title}".casefold()
        return thread.thread_id if is_match and is_theirs else None

    query = ThreadQuery(
        text=text,
        metadata=None if user is None or user.isdecimal() else {"owner": user},
        status="interrupted" if status == "waiting" else None,  # those that may wait
    )
    found: list[ThreadHead] = []
    threads, offset = ThreadList(database.saver), 0
    while len(found) < limit:
        ids = threads.search(query, match, limit, offset)
        heads = [head for head in map(database.saver.head, ids) if head is not None]  # else deleted
        found += [head for head in heads if status in (None, head.status.state)]
        offset += limit
        if len(ids) < limit:
            break
    return found[:limit]


def read_person(head_metadata: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    """Return whose a thread is: the `user_id` of its head, else its `owner`; `""` is nobody's."""
    person = head_metadata.get("user_id") or metadata.get("owner") or ""
    return str(person)  # a service may have numbers


def _described(
    database: CommandDatabase, head: ThreadHead
) -> Iterator[tuple[ThreadHead, dict[str, Any]]]:
    """What programs are told of a thread, unless another process deletes it."""
    from perdure.checkpointers.titles import about

    with suppress(UnknownThread):
        info = asdict(database.saver.thread(head.thread_id))
        yield (
            head,
            {
                **info,
                "title": about(database.saver, head.thread_id, head.metadata).get("title"),
                "user": head.owner,
                "person": read_person(head.metadata, head.metadata) or None,
                "status": head.status.state,
                "next": head.status.next,
                "waits_for_answers_to": [question for _, question in head.status.questions],
            },
        )


# -- other ways on


@app.command()
def fork(
    thread: ThreadArgument,
    new: Annotated[str, typer.Argument(metavar="NEW", help="The id of the copy.")],
    at: Annotated[
        str | None, typer.Option(metavar="ID", help="Copy only what led to this checkpoint.")
    ] = None,
    db: DbOption = None,
) -> None:
    """Copy a thread, all of it or up to a checkpoint."""
    with open_database(db) as database:
        source = resolve_thread_id(database, thread)
        if not new or any(info.thread_id == new for info in database.saver.threads(prefix=new)):
            wrong = f"there is a thread {new!r} already" if new else "the id of the copy is empty"
            raise ConfigurationError(f"{wrong}; give another id")
        chosen = None if at is None else resolve_checkpoint_id(database, source, at)
        database.saver.copy_thread(source, new, checkpoint_id=chosen)
    print_text(f"{source!r} is copied to {new!r}")


@app.command()
def rewind(
    thread: ThreadArgument,
    to: Annotated[str, typer.Option(metavar="ID", help="The checkpoint to go on from.")],
    db: DbOption = None,
) -> None:
    """Let a thread go on from an older checkpoint.

    Nothing is deleted: what came later stays as a branch.
    """
    with open_database(db) as database:
        source = resolve_thread_id(database, thread)
        chosen = resolve_checkpoint_id(database, source, to)
        database.saver.rewind(source, chosen)
    print_text(f"{source!r} goes on from {chosen}")


# -- the end


@app.command()
def delete(
    thread: Annotated[
        list[str],
        typer.Argument(
            metavar="ID...",
            help="Threads, or the beginnings of their ids.",
            autocompletion=complete_thread_id,
        ),
    ],
    keep_memories: Annotated[
        bool, typer.Option("--keep-memories", help="Do not erase memories of them.")
    ] = False,
    yes: YesOption = False,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Delete threads and their memories for good.

    A conversation comes back when its export is imported again.
    """
    from perdure.memory.thread_memories import forget_thread_memories

    with open_database(db) as database:
        ids = list(dict.fromkeys(resolve_thread_id(database, each) for each in thread))
        messages = sum(_messages(database, each) for each in ids)
        memories = (
            0 if keep_memories else forget_thread_memories(database.store, ids, dry_run=True).items
        )
        of_them = f" and {format_count(memories, 'memory', 'memories')}" if memories else ""
        what = (
            f"{format_count(len(ids), 'thread')} with {format_count(messages, 'message')}{of_them}"
        )
        names = ", ".join(_named(database, each) for each in ids[:3]) + (
            ", …" if len(ids) > 3 else ""
        )
        require_confirmation(f"Delete {what}, of {names}, for good?", yes)
        with show_status("deleting …"):
            # the memories first: of a thread that is gone none would be found after a crash
            clean = keep_memories or forget_thread_memories(database.store, ids).clean
            *others, last = ids  # the last one scrubs the file of all of them
            database.saver.prune(others, strategy="delete")
            clean = database.saver.erase(last).scrubbed and clean
    done = {"threads": ids, "messages": messages, "memories": memories, "clean": clean}
    print_result(done, json, f"deleted {what}, of {names}")
    if not json:
        print_scrub_result(clean)
        print_note("what other threads quote of it stays there")


def _messages(database: CommandDatabase, thread: str) -> int:
    with suppress(PerdureError):  # it goes all the same
        return len(database.saver.history(thread))
    return database.saver.thread(thread).items


def _named(database: CommandDatabase, thread: str) -> str:
    head = database.saver.head(thread)
    title = format_line(head.title, _LONGEST) if head is not None else ""
    return f"{thread!r} ({title})" if title else repr(thread)
