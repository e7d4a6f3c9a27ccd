"""`perdure store`: items under namespaces, with their versions and search."""

from __future__ import annotations

import json as jsonlib
import re
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from typer import Argument, Option

from perdure.cli.app import DB, AsJson, AsOf, Yes, confirm, group, opened, the_one
from perdure.cli.output import ago, as_json, counted, moment, note, say, say_clean, table
from perdure.cli.progress import at_work, steady
from perdure.errors import ConfigurationError, InvalidNamespace
from perdure.settings import LIST_LIMIT, SEARCH_LIMIT

if TYPE_CHECKING:
    from perdure.stores import FoundItem, Receipt, SQLiteStore, StoredItem

    Place = tuple[tuple[str, ...], str]  # a namespace and a key

store = group("store", "Items under namespaces, with versions and search.")

ROOT: Final = "/"
NAMES: Final = "'perdure store namespaces' lists what holds something"
NS = Annotated[str, Argument(metavar="NS", help="The namespace, like users/alice.")]
Key = Annotated[str, Argument(metavar="KEY", help="The key, or the beginning of it.")]
Prefix = Annotated[
    str, Argument(metavar="[PREFIX]", help="Only namespaces below this; / is everything.")
]
Filter = Annotated[str | None, Option("--filter", metavar="JSON", help="What values must match.")]
FromWhere = Annotated[
    str | None, Option("--provenance", metavar="JSON", help="What their provenance must match.")
]
IfVersion = Annotated[
    int | None, Option("--if-version", metavar="N", help="Only if it is at version N; 0 is absent.")
]
Limit = Annotated[int, Option(min=0, help="List at most N.")]
Mode = Literal["hybrid", "text", "semantic"]
_PAGE: Final = 1_000  # items read at once


# -- what is typed


def namespace(text: str) -> tuple[str, ...]:
    r"""A namespace as it is typed: labels between slashes, or a JSON list of them.

    >>> namespace("users/alice"), namespace(r"a\/b/c"), namespace('["a/b", "c"]'), namespace("/")
    (('users', 'alice'), ('a/b', 'c'), ('a/b', 'c'), ())
    """
    if text in ("", ROOT):
        return ()
    if re.match(r'\[\s*"', text):
        try:
            return tuple(jsonlib.loads(text))
        except ValueError as exc:
            raise InvalidNamespace(
                f"the namespace {text!r} is no JSON list ({exc}); expected labels between "
                'slashes, like users/alice, or a list like ["users", "alice"]'
            ) from exc
    if text.startswith("/") or re.search(r"(?<!\\)(?:\\\\)*/\Z", text):
        raise InvalidNamespace(
            f"the namespace {text!r} begins or ends with a slash, which stands between labels; "
            f"expected {text.strip('/') or ROOT!r}"
        )
    labels = re.findall(r"(?:^|/)((?:\\[\\/]|[^/])*)", text)
    return tuple(re.sub(r"\\([\\/])", r"\1", label) for label in labels)


def shown(labels: tuple[str, ...]) -> str:
    r"""A namespace as `namespace` reads it.

    >>> shown(("users", "alice")), shown(("a/b", "c")), shown(())
    ('users/alice', 'a\\/b/c', '/')
    """
    text = "/".join(re.sub(r"([\\/])", r"\\\1", label) for label in labels) or ROOT
    return jsonlib.dumps(labels, ensure_ascii=False) if re.match(r'\[\s*"', text) else text


def _object(text: str | None, what: str) -> dict[str, Any] | None:
    """A JSON object that was typed; None if none was."""
    if text is None:
        return None
    try:
        found, why = jsonlib.loads(text), ""
    except (ValueError, RecursionError) as exc:
        found, why = None, f", which is no JSON ({exc})"
    if not isinstance(found, dict):
        cut = repr(text if len(text) <= 80 else f"{text[:79]}…")
        raise ConfigurationError(
            f'{what} is {cut}{why}; expected a JSON object, like \'{{"kind": "note"}}\''
        )
    return found


def _value(value: str | None, text: str | None) -> dict[str, Any]:
    """The value that a command was given, in one of its forms."""
    if (value is None) == (text is None):
        raise ConfigurationError("give the value as JSON, as - for stdin, or as --text")
    typed = sys.stdin.read() if value == "-" else value
    return _object(typed, "the value") or ({} if text is None else {"text": text})


def _item(file: SQLiteStore, where: tuple[str, ...], key: str, *, below: bool = False) -> Place:
    """The place of the item whose key equals, or alone begins with, what was typed.

    Args:
        file: The store.
        where: The namespace.
        key: What was typed.
        below: Whether it may be in a namespace below.
    """
    if where and key and file.get(where, key, refresh_ttl=False) is not None:
        return where, key
    found: list[Place] = []
    for start in range(0, sys.maxsize, _PAGE):
        page = file.search(where, limit=_PAGE, offset=start, refresh_ttl=False)
        found += [(item.namespace, item.key) for item in page if item.key.startswith(key)]
        if len(page) < _PAGE:
            break
    places = [place for place in found if below or place[0] == where]
    keys = sorted({found for _, found in places})
    chosen = the_one(key, keys, "key", f"perdure store search {shown(where)}")
    meant = [place for place in places if place[1] == chosen]
    if len(meant) > 1:
        some = ", ".join(shown(labels) for labels, _ in meant[:3])
        raise ConfigurationError(f"there are several {chosen!r} ({some}); name the namespace")
    return meant[0]


# -- items


@store.command()
def put(
    ns: NS,
    key: Annotated[str, Argument(metavar="KEY", help="The key.")],
    value: Annotated[str | None, Argument(metavar="[JSON]", help="An object; - is stdin.")] = None,
    text: Annotated[str | None, Option(help='Short for {"text": ...}.')] = None,
    ttl: Annotated[float | None, Option(metavar="MINUTES", help="When it expires.")] = None,
    if_version: IfVersion = None,
    no_index: Annotated[bool, Option("--no-index", help="Do not index it for search.")] = False,
    thread: Annotated[str | None, Option(metavar="ID", help="The thread it comes from.")] = None,
    message: Annotated[
        list[str] | None, Option(metavar="ID", help="A message it comes from; may be repeated.")
    ] = None,
    actor: Annotated[str | None, Option(metavar="NAME", help="Who said it.")] = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Store an item; the old version stays."""
    from perdure.stores import Provenance

    if ttl is not None and not ttl > 0:
        raise ConfigurationError(f"--ttl is {ttl} minutes; expected more than zero")
    where, given = namespace(ns), _value(value, text)
    whence = Provenance(thread_id=thread, message_ids=tuple(message or ()), actor=actor)
    known = None if whence == Provenance() else whence
    searched: Literal[False] | None = False if no_index else None
    with opened(db, create=True) as file:
        file.store.put(
            where, key, given, searched, ttl=ttl, if_version=if_version, provenance=known
        )
        item = file.store.get(where, key, refresh_ttl=False)
    assert item is not None  # it was put just now
    if json:
        as_json(_whole(item))
    else:
        say(f"{key!r} of {shown(where)} is at version {item.version}")


@store.command()
def get(ns: NS, key: Key, as_of: AsOf = None, db: DB = None, json: AsJson = False) -> None:
    """Show the value of an item."""
    where = namespace(ns)
    with opened(db, reads=True) as file:
        item = file.store.get(where, key, refresh_ttl=False, as_of=as_of)
        if item is None:
            key = _item(file.store, where, key)[1]
            item = file.store.get(where, key, refresh_ttl=False, as_of=as_of)
    if item is None:
        raise ConfigurationError(f"there was no {key!r} in {shown(where)} at {moment(as_of)}")
    if json:
        as_json(_whole(item))
        return
    until = f", until {moment(item.valid_to)}" if item.valid_to else ""
    expires = f", expires {moment(item.expires_at)}" if item.expires_at else ""
    by = item.provenance and item.provenance.actor
    thread = item.provenance and item.provenance.thread_id
    said = (f", said by {by}" if by else "") + (f", from thread {thread!r}" if thread else "")
    note(f"version {item.version}, put {ago(item.valid_from)}{until}{expires}{said}", "dim")
    as_json(item.value)


@store.command()
def history(ns: NS, key: Key, db: DB = None, json: AsJson = False) -> None:
    """Show every version of an item.

    Also of a deleted one, which needs its whole key.
    """
    where = namespace(ns)
    with opened(db, reads=True) as file:
        found = file.store.history(where, key)
        found = found or file.store.history(where, _item(file.store, where, key)[1])
    if json:
        as_json([_whole(item) for item in found])
        return
    rows = [(i.version, moment(i.valid_from), moment(i.valid_to), _brief(i.value)) for i in found]
    table(["version", "from", "to", "value"], rows, ids=("from", "to"))


@store.command()
def search(
    prefix: Annotated[str, Argument(metavar="PREFIX", help="Where to look; / is everywhere.")],
    query: Annotated[str | None, Argument(metavar="[QUERY]", help="Words to look for.")] = None,
    filter: Filter = None,
    provenance: FromWhere = None,
    limit: Limit = SEARCH_LIMIT,
    offset: Annotated[int, Option(min=0, help="Leave out the first N.")] = 0,
    mode: Annotated[Mode, Option(metavar="MODE", help="hybrid, text or semantic.")] = "hybrid",
    as_of: AsOf = None,
    explain: Annotated[
        bool, Option("--explain", help="Show the parts of scores and the indexes.")
    ] = False,
    why_not: Annotated[
        str | None, Option(metavar="KEY", help="Tell why this item is not among the first.")
    ] = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """List items under a prefix, or search them."""
    where, wanted = namespace(prefix), _object(filter, "--filter")
    asked: dict[str, Any] = {
        "query": query,
        "filter": wanted,
        "mode": mode,
        "provenance": _object(provenance, "--provenance"),
        "as_of": as_of,
    }
    if why_not is not None and not query:
        raise ConfigurationError("--why-not needs the query that the item should answer")
    with opened(db, reads=True) as file, at_work("reading the search index …"):
        if why_not is not None:
            place = _item(file.store, where, why_not, below=True)
            stands = file.store.why_not(*place, prefix=where, **asked)
        else:
            asked |= {"limit": limit, "offset": offset, "explain": explain, "refresh_ttl": False}
            found = file.store.search(where, **asked)
            used = file.store.explain_query(where, filter=wanted or {}).indexes
    if why_not is not None:
        _stands(stands, json)
    elif json:
        as_json([{**_whole(item), "score": item.score, "parts": item.parts} for item in found])
    elif found:
        _list(found, scored=bool(query), explain=explain)
    else:
        note(f"found nothing under {shown(where)}; {NAMES}")
    if explain and wanted and why_not is None:
        note(f"index used: {', '.join(used) or 'none'}", "dim")


def _stands(found: Any, json: bool) -> None:
    if json:
        as_json(asdict(found))
        return
    say(found.reason)
    if found.parts:
        rows = [(name, f"{part + 0:.3f}") for name, part in found.parts.items()]  # -0.0 + 0 is 0.0
        table(["part", "score"], rows)


def _list(found: list[FoundItem], *, scored: bool, explain: bool) -> None:
    rows = []
    for item in found:
        parts = ", ".join(f"{name} {part:.3f}" for name, part in (item.parts or {}).items())
        row = [f"{item.score or 0:.3f}", shown(item.namespace), item.key, _brief(item.value), parts]
        rows.append(row[not scored : 4 + (scored and explain)])
    columns = ["score", "namespace", "key", "value", "parts"]
    table(columns[not scored : 4 + (scored and explain)], rows, ids=("namespace", "key"))


@store.command()
def namespaces(
    prefix: Prefix = ROOT,
    max_depth: Annotated[int | None, Option(min=1, help="Cut them to N labels.")] = None,
    limit: Limit = LIST_LIMIT,
    as_of: AsOf = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """List the namespaces that hold items."""
    where = namespace(prefix)
    with opened(db, reads=True) as file:
        found = file.store.list_namespaces(
            prefix=where, max_depth=max_depth, limit=limit, as_of=as_of
        )
    if json:
        as_json([list(labels) for labels in found])
    else:
        table(["namespace"], [(shown(labels),) for labels in found], ids=("namespace",))


def _brief(value: dict[str, Any]) -> str:
    """A value as text; its `text` alone, if it holds nothing else."""
    only = value.get("text") if len(value) == 1 else None
    return only if isinstance(only, str) else jsonlib.dumps(value, ensure_ascii=False)


def _whole(item: StoredItem | FoundItem) -> dict[str, Any]:
    """An item for programs."""
    names = ("key", "value", "version", "created_at", "valid_from", "valid_to", "expires_at")
    found = {"namespace": list(item.namespace), **{name: getattr(item, name) for name in names}}
    return {**found, "provenance": None if item.provenance is None else asdict(item.provenance)}


# -- what is to be there no more


@store.command()
def delete(ns: NS, key: Key, if_version: IfVersion = None, db: DB = None) -> None:
    """Delete an item; its versions stay."""
    where = namespace(ns)
    with opened(db) as file:
        key = _item(file.store, where, key)[1]
        file.store.delete(where, key, if_version=if_version)
    say(f"{key!r} of {shown(where)} is deleted")


@store.command()
def forget(
    prefix: Annotated[
        str | None,
        Argument(metavar="[PREFIX]", help="Only namespaces below this; / is everything."),
    ] = None,
    filter: Filter = None,
    provenance: FromWhere = None,
    query: Annotated[str | None, Option(help="All that contain these words.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Show what would go.")] = False,
    yes: Yes = False,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Erase items and their messages for good.

    All versions go, and the messages that their provenance names in the same database.
    """
    what: dict[str, Any] = {
        "prefix": None if prefix is None else namespace(prefix),
        "filter": _object(filter, "--filter"),
        "provenance": _object(provenance, "--provenance"),
        "query": query,
    }
    if prefix is None and not any(what.values()):
        raise ConfigurationError(
            "nothing says what to forget; give a prefix (/ is all), --filter, --provenance or "
            "--query"
        )
    with opened(db) as file:
        what["checkpointer"] = file.saver
        receipt = file.store.forget(**what, dry_run=True)
        if receipt.keys and not dry_run:
            confirm(f"Forget {_gone(receipt)} for good?", yes)
            receipt = file.store.forget(**what)
    if json:
        as_json({**asdict(receipt), "dry_run": dry_run})
        return
    say(f"{'would forget' if dry_run else 'forgot'} {_gone(receipt)}")
    if receipt.keys and not dry_run:
        say_clean(receipt.clean)


def _gone(receipt: Receipt) -> str:
    return (
        f"{counted(receipt.items, 'item')}, {counted(receipt.versions, 'old version')} and "
        f"{counted(receipt.messages, 'message')} of {counted(len(receipt.threads), 'thread')}"
    )


# -- search


@store.command()
def index(
    path: Annotated[
        str | None, Argument(metavar="[PATH]", help="A path of the values, like user.age.")
    ] = None,
    drop: Annotated[bool, Option("--drop", help="Remove the index.")] = False,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Index a path of the values for filters.

    Without a path it lists the indexes.
    """
    if drop and path is None:
        raise ConfigurationError("--drop needs the path; 'perdure store index' lists them")
    with opened(db, reads=path is None) as file:
        if drop and path not in file.store.indexes():
            raise ConfigurationError(
                f"there is no index on {path!r}; 'perdure store index' lists them"
            )
        if path is not None:
            (file.store.drop_index if drop else file.store.create_index)(path)
        found = file.store.indexes()
    if json:
        as_json(found)
    else:
        table(["path"], [(name,) for name in found])


@store.command()
def reembed(
    list_: Annotated[bool, Option("--list", help="List the items without vectors.")] = False,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Replace the vectors of another model.

    The offline model makes them. After an interruption it continues where it was.
    """
    if list_:
        _list_pending(db, json)
        return
    with opened(db) as file, steady("embedding", "item", "got new vectors") as advance:
        done = file.store.reembed(lambda done, of: advance(done, done / of if of else None))
    if json:
        as_json({"items": done})
    else:
        say(f"{counted(done, 'item')} got new vectors")


def _list_pending(db: str | None, json: bool) -> None:
    with opened(db, reads=True) as file:
        found = file.store.pending_embeddings()
        more = file.store.stats().pending - len(found)
    if json:
        as_json([asdict(item) for item in found])
        return
    rows = [(shown(item.namespace), item.key, item.attempts, item.error) for item in found]
    table(["namespace", "key", "attempts", "error"], rows, ids=("namespace", "key"))
    if more:
        note(
            f"{counted(more, 'item')} more {'has' if more == 1 else 'have'} vectors of another "
            "model; 'perdure store reembed' makes them anew"
        )
