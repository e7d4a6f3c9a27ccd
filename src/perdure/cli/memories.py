"""`perdure memories`: what is remembered of a user is listed, found, added, looked back at, erased.

The commands on what waits for somebody, and on quality, are in `memories_review.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import reduce
from operator import add as sum_of
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from perdure.cli.app import (
    DB,
    AsJson,
    AsOf,
    Database,
    User,
    Yes,
    confirm,
    group,
    opened,
    the_one,
    thread_id,
)
from perdure.cli.output import (
    as_json,
    counted,
    day,
    line,
    moment,
    note,
    room,
    say,
    say_clean,
    table,
)
from perdure.cli.progress import at_work
from perdure.errors import ConfigurationError, InvalidMessages, InvalidNamespace, UnknownThread
from perdure.settings import SEARCH_LIMIT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from perdure.memory import Memory
    from perdure.stores import Receipt

    Namespace = tuple[str, ...]
    Place = tuple[Namespace, str]  # a namespace and a key

memories = group("memories", "Memories of a user, across threads.")

_LABELS: Final = ("memories", "profiles", "examples")  # of namespaces: each goes on with the user
_INSTRUCTIONS: Final = ("instructions",)  # the agent's own, for all users; also their kind
_HELD: Final = ("refused", "quarantined")
_SHOWN: Final = 10  # memories that are shown before it is asked
_ALL: Final = 1 << 31
_EARLIEST: Final = datetime.min.replace(tzinfo=UTC)
Limit = Annotated[int, typer.Option(min=1, help="List at most N.")]
Key = Annotated[str, typer.Argument(metavar="KEY", help="The key, or the beginning of it.")]


@memories.command("list")
def list_(
    kind: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="Only fact, turn, episode, profile or another kind."),
    ] = None,
    limit: Limit = 20,
    as_of: AsOf = None,
    user: User = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """List memories, latest change first."""
    with opened(db, user, reads=True) as file:
        every = sorted(_every(file, as_of), key=lambda each: each.valid_from or _EARLIEST)
        whose = file.user
    found = [memory for memory in reversed(every) if kind in (None, memory.kind)][:limit]
    if json:
        as_json([_whole(memory) for memory in found])
    elif found:
        _list(found)
    elif every:
        note(f"{whose!r} has no memories of the kind {kind!r}")
    else:
        note(f"nothing is remembered of {whose!r}; 'perdure memories add' adds facts")


@memories.command()
def search(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="A question, or some words.")],
    limit: Limit = SEARCH_LIMIT,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="List no more than N tokens of them."),
    ] = None,
    as_of: AsOf = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the parts of the scores.")
    ] = False,
    user: User = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Find the memories that answer a question.

    Exit code 1 if there is none.
    """
    from perdure.memory import recall

    options: dict[str, Any] = {"limit": limit, "max_tokens": max_tokens, "as_of": as_of}
    with opened(db, user, reads=True) as file, at_work("reading the search index …"):
        found = recall(query, store=file.store, config=file.config, **options)
        whose = file.user
    if json:
        as_json([_whole(memory, "score", *["parts"] * explain) for memory in found.memories])
    elif found.memories:
        _list(found.memories)
        for memory in found.memories if explain else ():
            parts = ", ".join(f"{name} {part:.2f}" for name, part in (memory.parts or {}).items())
            say(f"{memory.key}: {memory.score or 0:.2f} of {parts}", "dim")
    if found.left_out:
        note(f"{found.left_out} more do not fit into --max-tokens", "dim")
    if not found.memories:
        note(f"{whose!r} has no memory that answers that")
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
    user: User = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Add facts, unless they are known.

    Exit code 1 if one was refused or put into quarantine.
    """
    facts = list(_facts(text))
    if key is not None and len(facts) != 1:
        raise ConfigurationError(f"--key is the key of one fact, and {len(facts)} are given")
    from perdure.memory import remember

    with opened(db, user, create=True) as file:
        outcomes = [remember(each, key=key, store=file.store, config=file.config) for each in facts]
    if json:
        as_json([asdict(outcome) for outcome in outcomes])
    else:
        for outcome in outcomes:
            say(str(outcome))
    if any(outcome.change in _HELD for outcome in outcomes):
        raise typer.Exit(1)


@memories.command()
def history(key: Key, user: User = None, db: DB = None, json: AsJson = False) -> None:
    """Show the versions of a memory, oldest first."""
    from perdure.memory.store_adapter import memory_of

    with opened(db, user, reads=True) as file:
        place, chosen = _place(file, key, [*_own(file), _INSTRUCTIONS])
        versions = [memory_of(item) for item in file.store.history(place, chosen)]
    if json:
        as_json([_whole(version) for version in versions])
        return
    times = [(moment(v.valid_from)[:16], moment(v.valid_to)[:16]) for v in versions]  # to a minute
    rows = [(v.version or 0, *time, v.text) for v, time in zip(versions, times, strict=True)]
    table(["version", "from", "to", "text"], rows, ids=("from", "to"))
    for thread in {v.provenance.thread_id for v in versions if v.provenance} - {None}:
        note(f"said on the thread {thread!r}", "dim")


@memories.command()
def forget(
    key: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY]...", help="Keys, or the beginnings of them."),
    ] = None,
    query: Annotated[str | None, typer.Option(help="All that contain these words.")] = None,
    thread: Annotated[
        str | None, typer.Option(metavar="ID", help="All that come from this thread.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All that is known of the user.")] = False,
    yes: Yes = False,
    user: User = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Erase memories for good, old versions too.

    The messages stay on their threads and are not extracted again. After --all they are: delete
    the threads first. Exit code 1 if there was nothing to forget.
    """
    if [bool(key), bool(query), bool(thread), every].count(True) != 1:
        raise ConfigurationError("give keys of memories, or one of --query, --thread and --all")
    with opened(db, user) as file:
        if every:
            confirm(f"Forget all that is known of {file.user!r} for good?", yes)
            receipt = _forget_all(file)
        else:
            with at_work("reading what no worker has read …"):
                extract_due(file, file.config["configurable"])  # else it would be, afterwards
            what: tuple[Any, ...] = (file, key or (), query, thread and _thread(file, thread))
            found = _forget(*what, dry_run=True).keys
            if found and not yes:
                _show(file, found)
                confirm(f"Forget {_counted(found)} for good?", yes)
            receipt = _forget(*what)
    if json:
        as_json(asdict(receipt))
    else:
        say(f"forgot {_counted(receipt.keys)}")
        if receipt.keys:
            say_clean(receipt.clean)
    if not receipt.keys:
        raise typer.Exit(1)


# -- finding them


def _own(file: Database) -> list[Namespace]:
    """The namespaces of a user; more may be below."""
    return [(label, file.user) for label in _LABELS]


def _every(file: Database, as_of: datetime | None = None) -> Iterator[Memory]:
    """All memories of the user, and the instructions of the agent."""
    from perdure.memory.store_adapter import memory_of

    for place in [*_own(file), _INSTRUCTIONS]:
        items = file.store.search(place, limit=_ALL, as_of=as_of, refresh_ttl=False)
        yield from map(memory_of, items)


def _place(file: Database, given: str, own: Sequence[Namespace]) -> Place:
    """Where the memory of a key is, or the only one whose key begins so."""
    for place in own:
        with suppress(InvalidNamespace):  # nothing that can be a key
            if file.store.history(place, given):  # deleted ones have a history, too
                return place, given
    found = {each.key: each.namespace for each in _every(file) if each.namespace in own}
    keys = [key for key in found if key.startswith(given)]
    chosen = the_one(given, keys, "key", "perdure memories list")
    return found[chosen], chosen


def _thread(file: Database, given: str) -> str:
    """The thread that is meant; one that is deleted may have left memories."""
    return thread_id(file, given) if file.saver.threads(prefix=given, limit=1) else given


def extract_due(file: Database, defaults: Mapping[str, str] | None = None) -> None:
    """Extract what was said on the user's threads and no worker has read.

    Args:
        file: The database.
        defaults: Values for threads whose runs did not say whose they are.
    """
    from perdure.memory.due import DueThreads, Pace

    extraction = file.extraction()
    for job in DueThreads(extraction, Pace(), defaults).jobs():
        if job.namespace == ("memories", file.user) and job.state != "dead":
            with suppress(UnknownThread, InvalidMessages):  # deleted; a program's own
                extraction.extract(job.thread_id, job.config)


# -- erasing them


def _forget(
    file: Database,
    given: Iterable[str],
    query: str | None,
    thread: str | None,
    *,
    dry_run: bool = False,
) -> Receipt:
    """Erase the memories that are meant, or only list them."""
    from perdure.memory import Collection

    of = {label: Collection(file.store, (label, "{user_id}")) for label in _LABELS}
    what: Any = {"query": query, "thread_id": thread, "config": file.config, "dry_run": dry_run}
    receipts = []
    for place, key in dict.fromkeys(_place(file, each, _own(file)) for each in given):
        if place[0] == "profiles":  # it may have sections, which are below it
            receipts.append(file.store.forget((*place, key), dry_run=dry_run))
        if dry_run or place[0] == "profiles":
            receipts.append(file.store.forget(place, key=key, dry_run=dry_run))
        else:
            receipts.append(of[place[0]].forget(key, config=file.config))
    if query or thread:
        receipts = [of[label].forget_matching(**what) for label in ("memories", "examples")]
    return reduce(sum_of, receipts)


def _forget_all(file: Database) -> Receipt:
    """Erase all of a user: the notes first, so that it can be called again if it is cut off."""
    from perdure.memory.store_adapter import NOTES, notes_of

    own = _own(file)
    notes = [notes_of(kind, place) for kind in NOTES for place in own]
    return reduce(sum_of, [file.store.forget(place) for place in (*notes, *own)])


def _show(file: Database, found: Sequence[Place]) -> None:
    """Show what is to go: the last that each said. What is in quarantine may hold secrets."""
    from perdure.memory.store_adapter import memory_of

    for place, key in found[:_SHOWN]:
        *_, last = file.store.history(place, key)
        text = memory_of(last).text if place[0] in _LABELS else "in quarantine"
        note(f"{key}: {line(text, room(f'{key}: '))}", "dim")
    if len(found) > _SHOWN:
        note(f"… and {len(found) - _SHOWN} more", "dim")


# -- showing them


def _list(found: Sequence[Memory]) -> None:
    rows = [(_day(memory), memory.kind, memory.key, memory.text) for memory in found]
    table(["day", "kind", "key", "text"], rows, ids=("day", "kind", "key"))


def _whole(memory: Memory, *scores: str) -> dict[str, Any]:
    """A memory for programs."""
    left_out = {"score", "parts"}.difference(scores)
    return {name: part for name, part in asdict(memory).items() if name not in left_out}


def _day(memory: Memory) -> str:
    """The day on which it was said; if that is not known, since when it is kept."""
    return day(memory.provenance.at if memory.provenance else None) or day(memory.valid_from)


def _counted(places: Sequence[Place]) -> str:
    """How many there are; notes on them are none."""
    return counted(sum(place[0] in _LABELS for place, _ in places), "memory", "memories")


def _facts(given: list[str]) -> Iterator[str]:
    """The facts that were given, all of them before one is kept."""
    for text in given:
        if text == "-":
            yield from filter(None, map(str.strip, sys.stdin))
        elif text.strip():
            yield text
        else:
            raise ConfigurationError("one of the facts is empty; give each a text")
