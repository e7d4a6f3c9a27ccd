"""Implement the `perdure store` commands, which read, write, search and remove store items."""

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
    check_query_option_not_blank,
    confirm_and_erase_items,
    open_database,
    resolve_item_key,
)
from perdure.cli.output import (
    format_age,
    format_count,
    format_time,
    get_console,
    print_json,
    print_json_or_sentence,
    print_json_or_table,
    print_note,
    print_text,
    progress_bar,
    show_status,
)
from perdure.errors import ConfigurationError, InvalidNamespace
from perdure.settings import LIST_LIMIT, SEARCH_LIMIT

if TYPE_CHECKING:
    from perdure.stores import FoundItem, Receipt, StoredItem
    from perdure.stores.whole_store import WholeStore

    Namespace = tuple[str, ...]

store = add_command_group("store", "Read, write, search and remove items of the store.")

# On the command line, a slash stands for the empty namespace, which is a prefix of every other
# namespace.
_ROOT: Final = "/"
NamespaceArgument = Annotated[
    str, Argument(metavar="NS", help="The namespace, such as users/alice.")
]
FilterOption = Annotated[
    str | None,
    Option("--filter", metavar="JSON", help="Select items whose values match this filter."),
]


# -- input


def parse_namespace(text: str) -> tuple[str, ...]:
    r"""Parse a namespace given as slash-separated labels.

    A slash or backslash within a label is escaped with a backslash.

    >>> parse_namespace("users/alice"), parse_namespace(r"a\/b/c"), parse_namespace("/")
    (('users', 'alice'), ('a/b', 'c'), ())
    """
    if not text:
        raise InvalidNamespace(
            f"the namespace is empty; pass labels such as users/alice, or {_ROOT} for everything"
        )
    if text == _ROOT:
        return ()
    if text.startswith("/") or re.search(r"(?<!\\)(?:\\\\)*/\Z", text):
        raise InvalidNamespace(
            f"the namespace {text!r} begins or ends with a slash, but slashes separate labels; "
            f"expected {text.strip('/') or _ROOT!r}"
        )
    labels = re.findall(r"(?:^|/)((?:\\[\\/]|[^/])*)", text)
    return tuple(re.sub(r"\\([\\/])", r"\1", label) for label in labels)


def format_namespace(labels: tuple[str, ...]) -> str:
    r"""Format a namespace so that `parse_namespace` can parse it.

    >>> format_namespace(("users", "alice")), format_namespace(("a/b", "c")), format_namespace(())
    ('users/alice', 'a\\/b/c', '/')
    """
    return "/".join(re.sub(r"([\\/])", r"\\\1", label) for label in labels) or _ROOT


def _parse_filter(filter: str | None) -> dict[str, Any] | None:
    """Parse the JSON filter given on the command line, or return None if there is none."""
    from perdure.stores.values import parse_json_object

    return None if filter is None else parse_json_object(filter, "--filter")


def _resolve_namespace_and_key(
    store: WholeStore, namespace: Namespace, key_or_prefix: str, *, include_deleted: bool = False
) -> tuple[Namespace, str]:
    """Resolve a full or abbreviated key to an item, and return its namespace and full key."""
    return resolve_item_key(
        store,
        [namespace],
        key_or_prefix,
        f"perdure store search {format_namespace(namespace)}",
        include_deleted=include_deleted,
    )


# -- items


@store.command()
def put(
    ns: NamespaceArgument,
    key: Annotated[str, Argument(metavar="KEY", help="The key of the item.")],
    value: Annotated[
        str | None,
        Argument(metavar="[JSON]", help="The value as a JSON object. Use - to read it from stdin."),
    ] = None,
    text: Annotated[
        str | None, Option(metavar="TEXT", help='Store {"text": TEXT} as the value.')
    ] = None,
    ttl: Annotated[
        float | None, Option(metavar="MINUTES", help="Expire the item after this many minutes.")
    ] = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Store an item. Earlier versions of the item are kept."""
    namespace = parse_namespace(ns)
    if (value is None) == (text is None):
        raise ConfigurationError(
            "pass the value in exactly one way: as a JSON argument, as - to read JSON from stdin, "
            "or with --text"
        )
    if ttl is not None and not ttl > 0:
        raise ConfigurationError(f"--ttl is {ttl}; expected a number of minutes greater than 0")
    from perdure.stores.values import parse_json_object

    new_value = {"text": text}
    if value is not None:
        new_value = parse_json_object(sys.stdin.read() if value == "-" else value, "the value")
    with open_database(db, create=True) as database:
        database.store.put(namespace, key, new_value, ttl=ttl)
        item = database.store.get(namespace, key, refresh_ttl=False)
    assert item is not None  # The method `put` has stored the item.
    print_json_or_sentence(
        _build_item_json(item),
        json,
        f"{key!r} in {format_namespace(namespace)} is at version {item.version}",
    )


@store.command()
def get(
    ns: NamespaceArgument,
    key: KeyArgument,
    as_of: AsOfOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Show the value of an item."""
    namespace = parse_namespace(ns)
    with open_database(db, allow_read_only=True) as database:
        namespace_and_key = _resolve_namespace_and_key(
            database.store, namespace, key, include_deleted=as_of is not None
        )
        item = database.store.get(*namespace_and_key, as_of=as_of, refresh_ttl=False)
    if item is None:
        raise ConfigurationError(
            f"the item {key!r} did not exist in the namespace {format_namespace(namespace)} at "
            f"{format_time(as_of, exact=True)}; run 'perdure store history' to see the item's "
            "versions"
        )
    if json:
        print_json(_build_item_json(item))
        return
    until = f", until {format_time(item.valid_to)}" if item.valid_to else ""
    expires = f", expires {format_time(item.expires_at)}" if item.expires_at else ""
    print_note(
        f"version {item.version}, stored {format_age(item.valid_from)}{until}{expires}", "dim"
    )
    print_json(item.value)


@store.command()
def history(
    ns: NamespaceArgument, key: KeyArgument, db: DbOption = None, json: JsonOption = False
) -> None:
    """Show all versions of an item.

    To see the versions of a deleted item, pass its full key.
    """
    namespace = parse_namespace(ns)
    with open_database(db, allow_read_only=True) as database:
        namespace_and_key = _resolve_namespace_and_key(
            database.store, namespace, key, include_deleted=True
        )
        versions = database.store.history(*namespace_and_key)
    exact = not get_console().is_terminal
    rows = [
        (
            item.version,
            format_time(item.valid_from, exact=exact),
            format_time(item.valid_to, exact=exact),
            _format_value(item.value),
        )
        for item in versions
    ]
    print_json_or_table(
        [_build_item_json(item) for item in versions],
        json,
        ("version", "from", "to", "value"),
        rows,
        ids=("from", "to"),
    )


@store.command()
def search(
    prefix: Annotated[
        str, Argument(metavar="PREFIX", help="The namespace prefix; / means everything.")
    ],
    query: Annotated[
        str | None, Argument(metavar="[QUERY]", help="The words to search for.")
    ] = None,
    filter: FilterOption = None,
    limit: LimitOption = SEARCH_LIMIT,
    mode: Annotated[
        Literal["hybrid", "text", "semantic"],
        Option(metavar="MODE", help="The search mode: hybrid, text or semantic."),
    ] = "hybrid",
    as_of: AsOfOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """List or search the items under a namespace prefix."""
    namespace, conditions = parse_namespace(prefix), _parse_filter(filter)
    options: dict[str, Any] = {
        "query": query,
        "filter": conditions,
        "mode": mode,
        "as_of": as_of,
        "limit": limit,
        "explain": json,
        "refresh_ttl": False,
    }
    with (
        open_database(db, allow_read_only=True) as database,
        show_status("reading the search index …"),
    ):
        items = database.store.search(namespace, **options)
    rows: list[tuple[str, ...]] = [
        (format_namespace(item.namespace), item.key, _format_value(item.value)) for item in items
    ]
    columns: tuple[str, ...] = ("namespace", "key", "value")
    if query:
        columns = ("score", *columns)
        rows = [(f"{item.score or 0:.3f}", *row) for item, row in zip(items, rows, strict=True)]
    values = [
        {**_build_item_json(item), "score": item.score, "parts": item.parts} for item in items
    ]
    print_json_or_table(
        values,
        json,
        columns,
        rows,
        ids=("namespace", "key"),
        empty_note=f"no item under {format_namespace(namespace)} matches; "
        "'perdure store namespaces' lists the namespaces that hold items",
    )


@store.command()
def namespaces(
    prefix: Annotated[
        str,
        Argument(metavar="[PREFIX]", help="List only namespaces with this prefix; / means all."),
    ] = _ROOT,
    limit: LimitOption = LIST_LIMIT,
    as_of: AsOfOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """List the namespaces that hold items."""
    with open_database(db, allow_read_only=True) as database:
        namespaces_found = database.store.list_namespaces(
            prefix=parse_namespace(prefix), limit=limit, as_of=as_of
        )
    print_json_or_table(
        namespaces_found,
        json,
        ["namespace"],
        [(format_namespace(labels),) for labels in namespaces_found],
        ids=("namespace",),
    )


def _format_value(value: dict[str, Any]) -> str:
    """Return the text if the value's only field is `text`; otherwise, return the value as JSON."""
    text = value.get("text") if len(value) == 1 else None
    return text if isinstance(text, str) else jsonlib.dumps(value, ensure_ascii=False)


def _build_item_json(item: StoredItem | FoundItem) -> dict[str, Any]:
    """Build the JSON object that `--json` prints for an item."""
    names = ("namespace", "key", "value", "version", "created_at", "valid_from", "valid_to")
    return {name: getattr(item, name) for name in (*names, "expires_at", "provenance")}


# -- removal


@store.command()
def delete(ns: NamespaceArgument, key: KeyArgument, db: DbOption = None) -> None:
    """Delete an item, but keep its old versions."""
    with open_database(db) as database:
        namespace, full_key = _resolve_namespace_and_key(database.store, parse_namespace(ns), key)
        database.store.delete(namespace, full_key)
    print_text(f"{full_key!r} in {format_namespace(namespace)} is deleted")


@store.command()
def forget(
    prefix: Annotated[
        str | None,
        Argument(metavar="[PREFIX]", help="Erase only items under this prefix; / means all items."),
    ] = None,
    filter: FilterOption = None,
    query: QueryOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Permanently erase items, and the messages they came from.

    All versions of the items are erased. The messages listed in an item's provenance are also
    erased if they are stored in the same database as the item.
    """
    namespace = None if prefix is None else parse_namespace(prefix)
    conditions = _parse_filter(filter)
    check_query_option_not_blank(query)
    if namespace is None and not conditions and not query:
        raise ConfigurationError(
            "pass a prefix (/ for everything), --filter or --query to select the items to erase"
        )
    with open_database(db) as database:
        erase = partial(
            database.store.forget,
            namespace,
            filter=conditions,
            query=query,
            checkpointer=database.saver,
        )
        confirm_and_erase_items(erase, _describe_receipt, dry_run=dry_run, yes=yes, json=json)


def _describe_receipt(receipt: Receipt) -> str:
    """Summarize an erasure: the number of erased items, old versions and messages."""
    return (
        f"{format_count(receipt.items, 'item')}, "
        f"{format_count(receipt.versions, 'old version')} and "
        f"{format_count(receipt.messages, 'message')} of "
        f"{format_count(len(receipt.threads), 'thread')}"
    )


@store.command()
def reembed(graphs: GraphsOption = None, db: DbOption = None, json: JsonOption = False) -> None:
    """Recompute vectors that another embedding model has computed.

    Vectors are computed by the embedder configured in langgraph.json or, if there is none, by
    perdure's offline model. If the command is interrupted, run the command again to continue.
    """
    with (
        open_database(db, graphs=graphs) as database,
        progress_bar("embedding", "item") as update_progress,
    ):
        count = database.store.reembed(
            lambda count, total: update_progress(count / total if total else None, count)
        )
    print_json_or_sentence({"items": count}, json, f"{format_count(count, 'item')} got new vectors")
