"""Read the items to import from JSON Lines, a LangGraph-compatible store, or LangGraph's tables.

This module has one public function for each kind of import source. Each function yields pairs of a
description and an item. The description of an item identifies the item in error messages. The item
is a JSON object in the format that `WholeStore.export` writes. For an invalid row of a LangGraph
table, the yielded pair contains an error instead of an item.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, cast

from langgraph.store.base import BaseStore, SearchItem, SearchOp

from perdure.errors import ConfigurationError, ImportFailed, NotADatabase, StorageError
from perdure.settings import is_dsn
from perdure.storage.flow import Row, fetch_rows
from perdure.storage.sqlite import SQLiteDatabase
from perdure.storage.untrusted_sqlite import IMPORT_VALUE_BYTES
from perdure.stores.base import PROVENANCE, Namespace
from perdure.stores.tombstones import ROOT
from perdure.stores.values import build_unknown_name_hint, decode_json_object

# number of items or namespaces read per page
PAGE = 500
TIMES: Final = ("created_at", "valid_from", "valid_to", "expires_at")
"""The fields of an item's JSON object that contain times."""
STORE_TABLES: Final = ("store",)
"""The tables of langgraph's store that are read."""
_FIELDS: Final = ("namespace", "key", "value", "version", *TIMES, "ttl", "index", "provenance")

Line = tuple[str, Mapping[str, Any] | ImportFailed]
"""The name of an item for error messages, and the item or the error of reading it."""
Lines = Generator[Line, None, None]


def iter_items_of_json_lines(lines: Iterable[str], namespace: Namespace | None) -> Lines:
    """Parse lines of JSON, and yield one item per line. Empty lines are skipped.

    Args:
        lines: The lines, with one JSON object each.
        namespace: The namespace of items that name none, or None.

    Raises:
        ImportFailed: A line is not a JSON object with known fields, or names no namespace although
            `namespace` is None.
    """
    for number, text in enumerate(lines, 1):
        line_name = f"line {number}"
        if not isinstance(text, str):
            raise ImportFailed(
                f"{line_name}: expected a string, but got a value of type {type(text).__name__!r}"
            )
        if not text.strip():
            continue
        try:
            line = decode_json_object(text)
        except (ValueError, RecursionError) as exc:
            raise ImportFailed(
                f"{line_name}: the line is not valid JSON ({exc}); expected one object per line"
            ) from exc
        if not isinstance(line, dict):
            raise ImportFailed(
                f"{line_name}: {str(line)[:60]!r} is not a JSON object; expected one object per "
                "line"
            )
        yield line_name, _add_missing_namespace_and_key(line_name, line, namespace)


def _add_missing_namespace_and_key(
    line_name: str, line: dict[str, Any], default_namespace: Namespace | None
) -> Mapping[str, Any]:
    """Add the namespace and key to an item read from a JSON Lines file, if they are missing.

    If a JSON object has neither a `value` nor a `namespace` field, the whole object becomes the
    item's value. If the object has a `key` field, the value of this field also becomes the item's
    key. An item without a key gets the hash of its value as its key.
    """
    if "value" not in line and "namespace" not in line:
        line = {"value": line, "key": line.get("key")}
    _check_item_line_fields(line_name, line)
    if "namespace" not in line:
        if default_namespace is None:
            raise ImportFailed(
                f"{line_name}: the line has no field 'namespace'; add this field, or pass "
                "namespace="
            )
        line["namespace"] = default_namespace
    if line.get("key") is None:
        text = json.dumps(line["value"], sort_keys=True)
        line["key"] = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return line


def _check_item_line_fields(line_name: str, line: dict[str, Any]) -> None:
    """Raise an error for unknown fields, a missing value, and a key that is not text."""
    provenance = line.get("provenance")
    provenance_fields = provenance if isinstance(provenance, dict) else {}
    for subject, names, fields in (
        ("the line", line, _FIELDS),
        ("the provenance", provenance_fields, PROVENANCE),
    ):
        for name in names:
            if name not in fields:
                raise ImportFailed(
                    f"{line_name}: {subject} has the unknown field {name[:60]!r}; "
                    f"{build_unknown_name_hint(name, fields)}"
                )
    if "value" not in line:
        raise ImportFailed(
            f"{line_name}: the line has no field 'value'; add the field with a JSON object"
        )
    if not isinstance(line.get("key"), str | None):
        raise ImportFailed(f"{line_name}: the key is {line['key']!r}; expected a JSON string")


def iter_store_items(store: BaseStore) -> Lines:
    """Yield the current version of each item in a store, one namespace at a time.

    Namespaces are listed in pages. A page may be shorter than requested, so pages are read until an
    empty page is returned. All namespaces are listed in two passes. The first pass calls
    `list_namespaces` without a prefix. The second pass uses the prefix `ROOT`, to find internal
    namespaces that the first pass may omit. `perdure.memory` stores internal records, such as
    tombstones of deleted memories, in namespaces whose first label is `ROOT`. If `list_namespaces`
    is called without a prefix, perdure's own stores omit these namespaces from the result.
    `BaseStore` classes from other libraries do not treat the label `ROOT` specially. If
    `list_namespaces` of such a class is called without a prefix, the result also contains the
    namespaces that begin with `ROOT`. In the second listing, a `ROOT` namespace that has already
    been read is skipped, so that its items are yielded only once.
    """
    note_namespaces = set[tuple[str, ...]]()
    for prefix in (None, (ROOT,)):
        offset = 0
        while page := store.list_namespaces(prefix=prefix, limit=PAGE, offset=offset):
            for namespace in map(tuple, page):
                if namespace[:1] == (ROOT,) and namespace in note_namespaces:
                    continue
                if namespace[:1] == (ROOT,):
                    note_namespaces.add(namespace)
                yield from _iter_namespace_items(store, namespace)
            offset += len(page)


def _iter_namespace_items(store: BaseStore, namespace: tuple[str, ...]) -> Lines:
    """Yield the current version of each item in one namespace."""
    # Build a `SearchOp` instead of calling `search`, which rejects some namespace labels that a
    # store may contain.
    op = SearchOp(namespace, limit=PAGE, refresh_ttl=False)
    while page := cast(list[SearchItem], store.batch([op])[0]):
        for item in page:
            # Skip items in nested namespaces, which a search of `namespace` also returns.
            if tuple(item.namespace) == namespace:
                times = item.created_at, item.updated_at
                yield (
                    f"item {item.key!r} in {namespace!r}",
                    _build_item_line(namespace, item.key, item.value, *times),
                )
        op = op._replace(offset=op.offset + len(page))


def iter_langgraph_items(
    path: str | os.PathLike[str], max_value_bytes: int = IMPORT_VALUE_BYTES
) -> Lines:
    """Yield the items in LangGraph's own store, read from an SQLite file or a Postgres database.

    Raises:
        ConfigurationError: The path is not a file.
        NotADatabase: The database does not contain langgraph's store.
        ImportFailed: The SQLite file cannot be read. For a row that was read but is not a valid
            item, an `ImportFailed` is yielded instead of the item.
    """
    if isinstance(path, str) and is_dsn(path):
        from perdure.storage.foreign_postgres import ForeignPostgres

        with closing(ForeignPostgres(path)) as tables:
            if tables.is_any_table_missing("store"):
                raise NotADatabase(
                    f"{tables.path} does not contain the table of langgraph's PostgresStore; "
                    "expected a database written by PostgresStore"
                )
            sql = _LANGGRAPH_POSTGRES_ITEMS.format(
                _build_ttl_columns_sql(tables.list_columns("store"))
            )
            last_key: Row = ("", "")
            while rows := tables.fetch_rows(sql, *last_key, PAGE):
                last_key = rows[-1][:2]
                yield from (_convert_table_row_to_import_line(tables.path, row) for row in rows)
        return
    if not isinstance(path, str | os.PathLike):
        raise ConfigurationError(f"cannot import from {path!r}; expected a path, a DSN or a store")
    if not os.path.isfile(path):
        raise ConfigurationError(f"cannot import from {os.fspath(path)!r}: there is no such file")
    yield from _iter_file_items(path, max_value_bytes)


def _iter_file_items(path: str | os.PathLike[str], max_value_bytes: int) -> Lines:
    """Yield the items that langgraph's `SqliteStore` has stored in a file.

    Each value is read by a separate query, because values may be large.
    """
    database = SQLiteDatabase(
        path, None, read_only=True, tables=STORE_TABLES, max_value_bytes=max_value_bytes
    )
    try:
        with closing(database) as file:
            columns = {row[0] for row in file.read(lambda: fetch_rows(_COLUMNS))}
            if not {"prefix", "key", "value"} <= columns:
                raise _build_not_langgraph_error(file)
            sql = _LANGGRAPH_ITEM.format(_build_ttl_columns_sql(columns))
            last_key: Row = ("", "")
            while page := file.read(partial(fetch_rows, _LANGGRAPH_KEYS, *last_key, PAGE)):
                for row_key in page:
                    for row in file.read(partial(fetch_rows, sql, *row_key)):
                        yield _convert_table_row_to_import_line(file.path, row)
                last_key = page[-1]
    except NotADatabase:
        raise
    except StorageError as exc:
        raise ImportFailed(f"an item cannot be read: {exc}") from exc


def _build_not_langgraph_error(file: SQLiteDatabase) -> NotADatabase:
    """Build the error for a file that does not contain the table of LangGraph's `SqliteStore`."""
    if file.read(lambda: fetch_rows("SELECT 1 FROM sqlite_master WHERE name = 'store_items'")):
        return NotADatabase(
            f"{file.path!r} is a perdure database; export its items to JSON Lines and import that "
            "file, or open the database as a store and pass the store as the source"
        )
    return NotADatabase(
        f"{file.path!r} does not contain the table of langgraph's SqliteStore; expected a "
        "database file written by SqliteStore"
    )


def _build_ttl_columns_sql(columns: set[str]) -> str:
    """Return the SQL expressions for an item's expiry time and TTL.

    Tables created by older langgraph versions do not have the columns `expires_at` and
    `ttl_minutes`. For a table without the columns for expiry, both returned SQL expressions are
    NULL.
    """
    has_ttl = {"expires_at", "ttl_minutes"} <= columns
    return "expires_at, ttl_minutes" if has_ttl else "NULL, NULL"


_COLUMNS: Final = "SELECT name FROM pragma_table_info('store')"
_LANGGRAPH_KEYS: Final = """
SELECT prefix, key FROM store WHERE (prefix, key) > (?, ?) ORDER BY prefix, key LIMIT ?
"""
_LANGGRAPH_ITEM: Final = """
SELECT prefix, key, CAST(value AS BLOB), created_at, updated_at, {} FROM store
WHERE prefix = ? AND key = ? LIMIT 1
"""
_LANGGRAPH_POSTGRES_ITEMS: Final = """
SELECT prefix, key, value::text, created_at, updated_at, {} FROM store
WHERE (prefix, key) > (%s, %s) ORDER BY prefix, key LIMIT %s
"""


def _convert_table_row_to_import_line(path: str, row: tuple[Any, ...]) -> Line:
    """Convert a row of LangGraph's table to the fields of an item to import.

    If the table row is invalid, an `ImportFailed` error is returned instead of the item's fields.
    """
    prefix, key, value, created, updated, expires, ttl = row
    item_name = f"{path!r}, item {key!r} in {prefix!r}"
    try:
        namespace = tuple(prefix.split("."))
        line = _build_item_line(
            namespace, key, json.loads(value), _parse_time(created), _parse_time(updated)
        )
        if expires is not None:
            line["expires_at"] = _parse_time(expires).isoformat()
        if ttl is not None:
            line["ttl"] = ttl
    except (AttributeError, OverflowError, RecursionError, TypeError, ValueError) as exc:
        return item_name, ImportFailed(f"{item_name}: {exc}")
    return item_name, line


def _parse_time(stored: str | datetime) -> datetime:
    """Return a stored time as a datetime. SQLite timestamps have no time zone and are in UTC."""
    stored = datetime.fromisoformat(stored) if isinstance(stored, str) else stored
    return stored if stored.tzinfo is not None else stored.replace(tzinfo=UTC)


def _build_item_line(
    namespace: tuple[str, ...],
    key: str,
    value: Mapping[str, Any],
    created: datetime,
    updated: datetime,
) -> dict[str, Any]:
    """Build the JSON object of an item, in the format that `WholeStore.export` writes."""
    return {
        "namespace": list(namespace),
        "key": key,
        "value": value,
        "created_at": created.astimezone(UTC).isoformat(),
        "valid_from": updated.astimezone(UTC).isoformat(),
    }
