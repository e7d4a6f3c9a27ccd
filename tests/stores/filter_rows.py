"""Documents as rows of each database, and which of them a filter's condition lets through."""

from __future__ import annotations

import atexit
import json
import sqlite3
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import psycopg

from perdure.storage.flow import TextOrBytes
from perdure.stores.filter_sql import JSONLocation, build_condition, build_index_expression
from perdure.stores.filters import Filter
from perdure.stores.postgres import JSONBLocation
from tests import postgres_server


def table(pool: list[dict[str, Any]], *, ascii_only: bool = False) -> sqlite3.Connection:
    """A table `items` of `id` and `value`; ASCII as well if UTF-8 cannot hold a text."""
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE items (id INTEGER PRIMARY KEY, value TEXT NOT NULL)")
    for number, document in enumerate(pool):
        text = json.dumps(document, ensure_ascii=ascii_only or not _whole(document))
        connection.execute("INSERT INTO items VALUES (?, ?)", (number, text))
    return connection


def ids(connection: sqlite3.Connection, filter: Filter, indexed: Collection[str] = ()) -> set[int]:
    """The rows for which the filter's condition is true."""
    condition = build_condition(filter, JSONLocation("i.value"), indexed)
    query = f"SELECT id FROM items AS i WHERE {condition.text}"
    return {row[0] for row in connection.execute(query, condition.params)}


def sqlite_ids(
    pool: list[dict[str, Any]],
    filter: Filter,
    *,
    ascii_only: bool,
    indexed: Collection[str] = (),
) -> set[int]:
    """The rows of documents for which the filter's condition is true, with indexes on paths."""
    connection = table(pool, ascii_only=ascii_only)
    for number, path in enumerate(sorted(indexed)):
        expression = build_index_expression(path, "value")
        connection.execute(f"CREATE INDEX i{number} ON items ({expression})")
    passed = ids(connection, filter, indexed)
    connection.close()
    return passed


@cache
def _connection() -> psycopg.Connection[tuple[Any, ...]]:
    connection = psycopg.connect(postgres_server.dsn(), autocommit=True)
    atexit.register(connection.close)
    return connection


def postgres_ids(pool: list[dict[str, Any]], filter: Filter, *, ascii_only: bool) -> set[int]:
    """The same on Postgres, where rows are as a store keeps them, in UTF-8."""
    texts = {
        number: json.dumps(document, ensure_ascii=ascii_only, separators=(",", ":"))
        for number, document in enumerate(pool)
        if _whole(document)
    }
    condition = build_condition(filter, JSONBLocation("i.value", ((),)))
    query = (
        "SELECT i.id FROM unnest(?1::bigint[], ?2::bytea[]) AS i (id, value) "
        f"WHERE {condition.with_numbered_parameters(3)}"
    )
    bodies = [TextOrBytes(text).to_column_bytes() for text in texts.values()]
    with psycopg.RawCursor(_connection()) as cursor:
        bound = ([*texts], bodies, *condition.params)
        cursor.execute(query.replace("?", "$").encode(), bound, binary=True)
        return {row[0] for row in cursor} | (set(range(len(pool))) - set(texts))


LetThrough = Callable[[Filter, dict[str, Any]], set[bool]]


def let_through(database: str, filter: Filter, document: dict[str, Any]) -> set[bool]:
    """Whether the condition is true of a document in a database, however JSON is written."""
    rows = postgres_ids if database == "postgres" else sqlite_ids
    return {bool(rows([document], filter, ascii_only=ascii_only)) for ascii_only in (False, True)}


def _whole(document: dict[str, Any]) -> bool:
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
