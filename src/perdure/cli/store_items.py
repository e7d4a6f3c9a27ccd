"""`perdure store put`, `get`, `history`, `search` and `namespaces`: items."""

from __future__ import annotations

import json as jsonlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli.app import DB, AsJson
from perdure.cli.output import ago, as_json, console, line, notes, table
from perdure.cli.progress import at_work
from perdure.cli.store import (
    NS,
    AsOf,
    Filter,
    FromWhere,
    IfVersion,
    Key,
    as_moment,
    as_object,
    moment,
    namespace,
    open_store,
    shown,
    store_app,
)
from perdure.errors import ConfigurationError

if TYPE_CHECKING:
    from perdure.stores import FoundItem, Provenance, SQLiteStore, StoredItem

Limit = Annotated[int, typer.Option(help="At most so many.")]
Offset = Annotated[int, typer.Option(help="Leave out so many of the first.")]
Mode = Annotated[str, typer.Option(help="How: hybrid, text or semantic.")]
NoContext = Annotated[
    bool, typer.Option("--no-context", help="Neighbours in a thread lend no score.")
]


@store_app.command()
def put(
    ns: NS,
    key: Key,
    value: Annotated[
        str | None, typer.Argument(metavar="[JSON]", help="An object, @FILE, or - for stdin.")
    ] = None,
    text: Annotated[str | None, typer.Option(help='Short for {"text": ...}.')] = None,
    ttl: Annotated[float | None, typer.Option(help="Minutes after which it expires.")] = None,
    if_version: IfVersion = None,
    no_index: Annotated[bool, typer.Option("--no-index", help="No query is to find it.")] = False,
    thread: Annotated[str | None, typer.Option(help="The thread it comes from.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="The checkpoint it comes from.")] = None,
    message: Annotated[list[str] | None, typer.Option(help="A message it rests on.")] = None,
    actor: Annotated[str | None, typer.Option(help="Who said it.")] = None,
    trust: Annotated[str | None, typer.Option(help="A class of your own, like user.")] = None,
    position: Annotated[int | None, typer.Option(help="Its place in the thread.")] = None,
    said_at: Annotated[str | None, typer.Option(help="When it was said, in ISO 8601.")] = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Store an item; the version that it replaces stays in its history."""
    from perdure.stores import Provenance

    at = as_moment(said_at, "--said-at")
    whence = Provenance(thread, checkpoint, tuple(message or ()), actor, trust, position, at)
    where, given = namespace(ns), _value(value, text)
    with open_store(db, create=True) as store:
        store.put(
            where,
            key,
            given,
            False if no_index else None,
            ttl=ttl,
            if_version=if_version,
            provenance=None if whence == Provenance() else whence,
        )
        item = there(store.get(where, key, refresh_ttl=False), ns, key)
    if json:
        as_json(whole(item))
    else:
        console.print(f"{key!r} of {shown(where)} is at version {item.version}", markup=False)


def _value(value: str | None, text: str | None) -> dict[str, Any]:
    """The value that a command was given, in one of its forms."""
    if (value is None) == (text is None):
        raise ConfigurationError("give the value as JSON, as @FILE, as - for stdin, or as --text")
    if text is not None:
        return {"text": text}
    try:
        if value == "-":
            value = sys.stdin.read()
        elif value is not None and value.startswith("@"):
            value = Path(value[1:]).read_text(encoding="utf-8-sig")
    except OSError as exc:
        raise ConfigurationError(f"{str(value)[1:]!r} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigurationError(f"the value is no UTF-8 text: {exc.reason}") from exc
    found = as_object(value, "the value")
    assert found is not None
    return found


@store_app.command()
def get(ns: NS, key: Key, as_of: AsOf = None, db: DB = None, json: AsJson = False) -> None:
    """Show the value of an item; looking does not prolong its life."""
    when = as_moment(as_of, "--as-of")
    with open_store(db, reads=True) as store:
        found = store.get(namespace(ns), key, refresh_ttl=False, as_of=when)
    item = there(found, ns, key)
    if json:
        as_json(whole(item))
        return
    until = f", until {moment(item.valid_to)}" if item.valid_to else ""
    expires = f", expires {moment(item.expires_at)}" if item.expires_at else ""
    notes.print(
        f"version {item.version}, put {ago(item.valid_from)}{until}{expires}{_said(item)}",
        style="dim",
        markup=False,
    )
    as_json(item.value)


def there(item: StoredItem | None, ns: str, key: str) -> StoredItem:
    """An item that a command needs.

    Raises:
        ConfigurationError: There is none.
    """
    if item is None:
        raise ConfigurationError(
            f"there is no {key!r} in {ns!r}; 'perdure store search {ns}' shows what is there, "
            "and 'perdure store history' what was"
        )
    return item


def _said(item: StoredItem) -> str:
    whence = item.provenance
    if whence is None:
        return ""
    by = f", said by {whence.actor}" if whence.actor else ""
    return by + (f", from thread {whence.thread_id!r}" if whence.thread_id else "")


@store_app.command()
def history(ns: NS, key: Key, db: DB = None, json: AsJson = False) -> None:
    """Show every version of an item, the oldest first."""
    with open_store(db, reads=True) as store:
        found = store.history(namespace(ns), key)
    if not found:
        raise ConfigurationError(
            f"there never was a {key!r} in {ns!r}, or it is forgotten; 'perdure store search {ns}' "
            "shows what is there"
        )
    if json:
        as_json([whole(item) for item in found])
        return
    rows = [(i.version, moment(i.valid_from), moment(i.valid_to), brief(i.value)) for i in found]
    table(["version", "from", "to", "value"], rows)


@store_app.command()
def search(
    prefix: Annotated[
        str, typer.Argument(metavar="PREFIX", help="Where to look; / is everywhere.")
    ],
    query: Annotated[
        str | None, typer.Argument(metavar="[QUERY]", help="Words to look for, in any form.")
    ] = None,
    filter: Filter = None,
    provenance: FromWhere = None,
    limit: Limit = 10,
    offset: Offset = 0,
    mode: Mode = "hybrid",
    as_of: AsOf = None,
    no_context: NoContext = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Tell the parts of scores, and the indexes used.")
    ] = False,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """List items under a prefix: with a query the best answers first, else the last put."""
    where, wanted = namespace(prefix), as_object(filter, "--filter")
    with open_store(db, reads=True) as store, at_work("reading the search index …"):
        found = store.search(
            where,
            query=query,
            filter=wanted,
            limit=limit,
            offset=offset,
            refresh_ttl=False,
            mode=mode,  # type: ignore[arg-type]  # the store says which there are
            provenance=as_object(provenance, "--provenance"),
            as_of=as_moment(as_of, "--as-of"),
            context=not no_context,
            explain=explain,
        )
        if not found and not json:
            notes.print(_nothing(store, where), markup=False)
        if explain and wanted:
            used = store.explain_query(where, filter=wanted).indexes
            notes.print(f"index used: {', '.join(used) or 'none'}", style="dim", markup=False)
    if json:
        as_json([{**whole(item), "score": item.score, "parts": item.parts} for item in found])
    elif found:
        _list(found, scored=bool(query), explain=explain)


def _nothing(store: SQLiteStore, where: tuple[str, ...]) -> str:
    """Why a search may have found nothing."""
    if store.search(where, limit=1, refresh_ttl=False):
        return f"nothing under {shown(where)} meets all that was asked"
    return nothing_under(where)


def _list(found: list[FoundItem], *, scored: bool, explain: bool) -> None:
    parted = scored and explain
    rows = [
        (
            *[_score(item.score)] * scored,
            *(shown(item.namespace), item.key, brief(item.value)),
            *[", ".join(f"{n} {_score(p)}" for n, p in (item.parts or {}).items())] * parted,
        )
        for item in found
    ]
    table([*["score"] * scored, "namespace", "key", "value", *["parts"] * parted], rows)


def _score(score: float | None) -> str:
    return "" if score is None else f"{score:.3f}"


@store_app.command()
def namespaces(
    prefix: Annotated[
        str | None, typer.Option(help="Only those that begin so; the label * is any.")
    ] = None,
    suffix: Annotated[
        str | None, typer.Option(help="Only those that end so; the label * is any.")
    ] = None,
    max_depth: Annotated[int | None, typer.Option(help="Cut them to so many labels.")] = None,
    limit: Limit = 100,
    offset: Offset = 0,
    as_of: AsOf = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """List the namespaces that hold something, in order."""
    with open_store(db, reads=True) as store:
        found = store.list_namespaces(
            prefix=None if prefix is None else namespace(prefix),
            suffix=None if suffix is None else namespace(suffix),
            max_depth=max_depth,
            limit=limit,
            offset=offset,
            as_of=as_moment(as_of, "--as-of"),
        )
    if json:
        as_json([list(labels) for labels in found])
    else:
        table(["namespace"], [(shown(labels),) for labels in found])


def nothing_under(where: tuple[str, ...]) -> str:
    """What is said of a prefix without items."""
    return f"nothing is under {shown(where)}; 'perdure store namespaces' lists what holds something"


def brief(value: dict[str, Any]) -> str:
    """A value on one line; its text alone, if it holds nothing else."""
    only = value.get("text") if len(value) == 1 else None
    text = only if isinstance(only, str) else jsonlib.dumps(value, ensure_ascii=False)
    return line(text, 100 if console.is_terminal else 10_000)


def whole(item: StoredItem | FoundItem) -> dict[str, Any]:
    """An item for programs."""
    whence: Provenance | None = item.provenance
    return {
        "namespace": list(item.namespace),
        "key": item.key,
        "value": item.value,
        "version": item.version,
        "created_at": item.created_at,
        "valid_from": item.valid_from,
        "valid_to": item.valid_to,
        "expires_at": item.expires_at,
        "provenance": None if whence is None else asdict(whence),
    }
