"""`perdure memories`: all that is kept of a user, newest first, and the past of one memory."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

import typer

from perdure.cli.app import DB, AsJson, app
from perdure.cli.longterm import (
    INSTRUCTIONS,
    Mind,
    User,
    actor_of,
    day_of,
    opened_mind,
    text_of,
    thread_of,
    whole,
)
from perdure.cli.output import as_json, notes, table
from perdure.cli.store import AsOf, as_moment, moment
from perdure.errors import ConfigurationError, UnknownMemory

if TYPE_CHECKING:
    from perdure.memory.records import Memory

_EARLIEST: Final = datetime.min.replace(tzinfo=UTC)
_OTHERS: Final = "instructions"  # a kind that no value names: those of the agent, for all users


@app.command()
def memories(
    kind: Annotated[
        str | None,
        typer.Option(help="Only fact, turn, episode, profile, instructions, or one of your own."),
    ] = None,
    limit: Annotated[int, typer.Option(help="At most so many.")] = 20,
    history: Annotated[
        str | None, typer.Option(metavar="KEY", help="The versions of this one, the oldest first.")
    ] = None,
    as_of: AsOf = None,
    user: User = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """List memories of every kind, those that changed last first."""
    when = as_moment(as_of, "--as-of")
    if limit < 1:
        raise ConfigurationError(f"--limit is {limit}; expected 1 or more")
    if history is not None and (kind is not None or when is not None):
        raise ConfigurationError("--history shows all versions; leave --kind and --as-of out")
    with opened_mind(db, user, reads=True) as mind:
        if history is not None:
            _show_past(_versions(mind, history), json)
            return
        found = _listed(mind, kind, limit, when)
        anything = bool(found or _listed(mind, None, 1, when))
    if json:
        as_json([whole(memory) for memory in found])
    elif found:
        _list(found)
    else:
        notes.print(_nothing(mind.user, anything), markup=False)


def _listed(mind: Mind, kind: str | None, limit: int, when: datetime | None) -> list[Memory]:
    """Memories of all places, those that changed last first."""
    from perdure.memory.effects import run
    from perdure.memory.store_adapter import adapter_of

    adapter = adapter_of(mind.store)
    found: list[Memory] = []
    for place in _places(mind, kind, when):
        asked = None if kind in (None, _OTHERS) else {"kind": kind}
        every = run(adapter.every(place, filter=asked, as_of=when))
        found += [memory for memory in every if memory.namespace == place]
    found.sort(key=lambda memory: memory.valid_from or _EARLIEST)  # of one moment: as created
    return found[: -limit - 1 : -1]


def _places(mind: Mind, kind: str | None, when: datetime | None) -> list[tuple[str, ...]]:
    """The namespaces that hold memories: the user's, those within them, and the agent's own."""
    places = []
    if kind != _OTHERS:
        for own in (mind.namespace, *mind.others):
            places += mind.store.list_namespaces(prefix=own, limit=sys.maxsize, as_of=when)
    return places + ([INSTRUCTIONS] if kind in (None, _OTHERS) else [])


def _versions(mind: Mind, key: str) -> list[Memory]:
    """The versions of a memory, wherever it is.

    Raises:
        UnknownMemory: There never was one, or it is forgotten.
    """
    from perdure.memory.effects import run
    from perdure.memory.store_adapter import adapter_of
    from perdure.stores.namespaces import check_key

    adapter, wanted = adapter_of(mind.store), check_key(key)
    for place in (mind.namespace, *mind.others, INSTRUCTIONS):
        if found := run(adapter.versions(place, wanted)):
            return found
    raise UnknownMemory(
        f"{mind.user!r} never had a memory {key!r}, or it is forgotten; 'perdure memories' lists "
        "those that there are"
    )


def _list(found: list[Memory]) -> None:
    rows = [(day_of(m), m.kind, actor_of(m), text_of(m), thread_of(m), m.key) for m in found]
    table(["when", "kind", "by", "text", "thread", "key"], rows)


def _show_past(found: list[Memory], json: bool) -> None:
    if json:
        as_json([whole(memory) for memory in found])
        return
    rows = [
        (m.version or 0, moment(m.valid_from), moment(m.valid_to), text_of(m), thread_of(m))
        for m in found
    ]
    table(["version", "from", "to", "text", "thread"], rows)


def _nothing(user: str, anything: bool) -> str:
    if anything:
        return f"{user!r} has no memories of that kind"
    return (
        f"nothing is remembered of {user!r}; --user names another, 'perdure remember' keeps facts"
    )
