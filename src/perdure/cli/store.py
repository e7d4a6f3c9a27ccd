"""`perdure store`: items under namespaces, with their versions and search."""

from __future__ import annotations

import json as jsonlib
import re
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from typer import Argument, Option

from perdure.cli.app import (
    AsOfOption,
    DbOption,
    DryRunOption,
    GraphsOption,
    JsonOption,
    KeyArgument,
    LimitOption,
    QueryOption,
    YesOption,
    add_command_group,
    check_query,
    erase_items,
    open_database,
    resolve_item_key,
)
from perdure.cli.output import (
    format_age,
    format_count,
    format_time,
    get_console,
    print_json,
    print_note,
    print_result,
    print_rows,
    print_text,
    progress_bar,
    show_status,
)
from perdure.errors import ConfigurationError, InvalidNamespace
from perdure.settings import LIST_LIMIT, SEARCH_LIMIT

if TYPE_CHECKING:
    from perdure.stores import FoundItem, Receipt, StoredItem
    from perdure.stores.whole_store import WholeStore

store = add_command_group("store", "Items under namespaces, with versions and search.")

_ROOT: Final = "/"
NS = Annotated[str, Argument(metavar="NS", help="The namespace, like users/alice.")]
Filter = Annotated[str | None, Option("--filter", metavar="JSON", help="What values must match.")]


# -- what is typed


def parse_namespace(text: str) -> tuple[str, ...]:
    r"""A namespace as it is typed: labels between slashes; a slash in a label is escaped.

    >>> namespace("users/alice"), namespace(r"a\/b/c"), namespace("/")
    (('users', 'alice'), ('a/b', 'c'), ())
    """
    if not text:
        raise InvalidNamespace(
            f"the namespace is empty; expected labels, or {_ROOT} for everything"
        )
    if text == _ROOT:
        return ()
    if text.startswith("/") or re.search(r"(?<!\\)(?:\\\\)*/\Z", text):
        raise InvalidNamespace(
            f"the namespace {text!r} begins or ends with a slash, which stands between labels; "
            f"expected {text.strip('/') or _ROOT!r}"
        )
    labels = re.findall(r"(?:^|/)((?:\\[\\/]|[^/])*)", text)
    return tuple(re.sub(r"\\([\\/])", r"\1", label) for label in labels)


def format_namespace(labels: tuple[str, ...]) -> str:
    r"""A namespace as `namespace` reads it.

    >>> shown(("users", "alice")), shown(("a/b", "c")), shown(())
    ('users/alice', 'a\\/b/c', '/')
    """
    return "/".join(re.sub(r"([\\/])", r"\\\1", label) for label in labels) or _ROOT


def _conditions(filter: str | None) -> dict[str, Any] | None:
    """What `--filter` says; None: it is not given."""
    from perdure.stores.values import parse_json_object

    return None if filter is None else parse_json_object(filter, "--filter")


def _place(
    store: WholeStore, where: tuple[str, ...], key: str, *, deleted: bool = False
) -> tuple[tuple[str, ...], str]:
    listing = f"perdure store search {format_namespace(where)}"
    return resolve_item_key(store, [where], key, listing, include_deleted=deleted)


# -- items


@store.command()
def put(
    ns: NS,
    key: Annotated[str, Argument(metavar="KEY", help="The key.")],
    value: Annotated[str | None, Argument(metavar="[JSON]", help="An object; - is stdin.")] = None,
    text: Annotated[str | None, Option(metavar="TEXT", help='Short for {"text": ...}.')] = None,
    ttl: Annotated[float | None, Option(metavar="MINUTES", help="When it expires.")] = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Store an item; the old version stays."""
    where = parse_namespace(ns)
    if (value is None) == (text is None):
        raise ConfigurationError("give the value as JSON, as - for stdin, or as --text")
    if ttl is not None and not ttl > 0:
        raise ConfigurationError(f"--ttl is {ttl} minutes; expected more than zero")
    from perdure.stores.values import parse_json_object

    new = {"text": text}
    if value is not None:
        new = parse_json_object(sys.stdin.read() if value == "-" else value, "the value")
    with open_database(db, create=True) as file:
        file.store.put(where, key, new, ttl=ttl)
        item = file.store.get(where, key, refresh_ttl=False)
    assert item is not None  # it was put just now
    print_result(
        _whole(item), json, f"{key!r} of {format_namespace(where)} is at version {item.version}"
    )


@store.command()
def get(
    ns: NS,
    key: KeyArgument,
    as_of: AsOfOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Show the value of an item."""
    where = parse_namespace(ns)
    with open_database(db, allow_read_only=True) as file:
        chosen = _place(file.store, where, key, deleted=as_of is not None)
        item = file.store.get(*chosen, as_of=as_of, refresh_ttl=False)
    if item is None:
        raise ConfigurationError(
            f"there was no {key!r} in {format_namespace(where)} at {format_time(as_of, exact=True)}"
        )
    if json:
        print_json(_whole(item))
        return
    until = f", until {format_time(item.valid_to)}" if item.valid_to else ""
    expires = f", expires {format_time(item.expires_at)}" if item.expires_at else ""
    print_note(f"version {item.version}, put {format_age(item.valid_from)}{until}{expires}", "dim")
    print_json(item.value)


@store.command()
def history(ns: NS, key: KeyArgument, db: DbOption = None, json: JsonOption = False) -> None:
    """Show every version of an item.

    Also of a deleted one, which needs its whole key.
    """
    where = parse_namespace(ns)
    with open_database(db, allow_read_only=True) as file:
        versions = file.store.history(*_place(file.store, where, key, deleted=True))
    exact = not get_console().is_terminal
    rows = [
        (
            item.version,
            format_time(item.valid_from, exact=exact),
            format_time(item.valid_to, exact=exact),
            _brief(item.value),
        )
        for item in versions
    ]
    columns = ("version", "from", "to", "value")
    print_rows([_whole(item) for item in versions], json, columns, rows, ids=("from", "to"))


@store.command()
def search(
    prefix: Annotated[str, Argument(metavar="PREFIX", help="Where to look; / is everywhere.")],
    query: Annotated[str | None, Argument(metavar="[QUERY]", help="Words to look for.")] = None,
    filter: Filter = None,
    limit: LimitOption = SEARCH_LIMIT,
    mode: Annotated[
        Literal["hybrid", "text", "semantic"],
        Option(metavar="MODE", help="hybrid, text or semantic."),
    ] = "hybrid",
    as_of: AsOfOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """List items under a prefix, or search them."""
    where, conditions = parse_namespace(prefix), _conditions(filter)
    options: dict[str, Any] = {"query": query, "filter": conditions, "mode": mode, "as_of": as_of}
    with open_database(db, allow_read_only=True) as file, show_status("reading the search index …"):
        items = file.store.search(where, **options, limit=limit, explain=json, refresh_ttl=False)
    rows: list[tuple[str, ...]] = [
        (format_namespace(item.namespace), item.key, _brief(item.value)) for item in items
    ]
    columns: tuple[str, ...] = ("namespace", "key", "value")
    if query:
        columns = ("score", *columns)
        rows = [(f"{item.score or 0:.3f}", *row) for item, row in zip(items, rows, strict=True)]
    whole = [{**_whole(item), "score": item.score, "parts": item.parts} for item in items]
    others = "'perdure store namespaces' lists what holds something"
    print_rows(
        whole,
        json,
        columns,
        rows,
        ids=("namespace", "key"),
        empty_note=f"found nothing under {format_namespace(where)}; {others}",
    )


@store.command()
def namespaces(
    prefix: Annotated[
        str, Argument(metavar="[PREFIX]", help="Only namespaces below this; / is everything.")
    ] = _ROOT,
    limit: LimitOption = LIST_LIMIT,
    as_of: AsOfOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """List the namespaces that hold items."""
    with open_database(db, allow_read_only=True) as file:
        below = file.store.list_namespaces(prefix=parse_namespace(prefix), limit=limit, as_of=as_of)
    print_rows(
        below,
        json,
        ["namespace"],
        [(format_namespace(labels),) for labels in below],
        ids=("namespace",),
    )


def _brief(value: dict[str, Any]) -> str:
    """A value as text; its `text` alone, if it holds nothing else."""
    only = value.get("text") if len(value) == 1 else None
    return only if isinstance(only, str) else jsonlib.dumps(value, ensure_ascii=False)


def _whole(item: StoredItem | FoundItem) -> dict[str, Any]:
    """An item for programs."""
    names = ("namespace", "key", "value", "version", "created_at", "valid_from", "valid_to")
    return {name: getattr(item, name) for name in (*names, "expires_at", "provenance")}


# -- what is to be there no more


@store.command()
def delete(ns: NS, key: KeyArgument, db: DbOption = None) -> None:
    """Delete an item; its versions stay."""
    with open_database(db) as file:
        where, chosen = _place(file.store, parse_namespace(ns), key)
        file.store.delete(where, chosen)
    print_text(f"{chosen!r} of {format_namespace(where)} is deleted")


@store.command()
def forget(
    prefix: Annotated[
        str | None,
        Argument(metavar="[PREFIX]", help="Only namespaces below this; / is everything."),
    ] = None,
    filter: Filter = None,
    query: QueryOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Erase items and their messages for good.

    All versions go, and the messages that their provenance names in the same database.
    """
    where, conditions = None if prefix is None else parse_namespace(prefix), _conditions(filter)
    check_query(query)
    if where is None and not conditions and not query:
        raise ConfigurationError(
            "nothing says what to forget; give a prefix (/ is all), --filter or --query"
        )
    with open_database(db) as file:
        forget = file.store.forget
        what = partial(forget, where, filter=conditions, query=query, checkpointer=file.saver)
        erase_items(what, _counted, dry_run=dry_run, yes=yes, json=json)


def _counted(receipt: Receipt) -> str:
    return (
        f"{format_count(receipt.items, 'item')}, "
        f"{format_count(receipt.versions, 'old version')} and "
        f"{format_count(receipt.messages, 'message')} of "
        f"{format_count(len(receipt.threads), 'thread')}"
    )


@store.command()
def reembed(graphs: GraphsOption = None, db: DbOption = None, json: JsonOption = False) -> None:
    """Replace the vectors of another model.

    The embedder of the langgraph.json makes them, or the offline model if there is none. After an
    interruption, the command continues where it was.
    """
    with open_database(db, graphs=graphs) as file, progress_bar("embedding", "item") as bar:
        done = file.store.reembed(lambda done, of: bar(done / of if of else None, done))
    print_result({"items": done}, json, f"{format_count(done, 'item')} got new vectors")
