"""Documents as rows of each database, and the rows for which a filter's SQL condition is true."""

from __future__ import annotations

import atexit
import json
import sqlite3
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import psycopg

from perdure.storage.flow import TextOrBytes
from perdure.stores.filter_sql import JSONLocation, build_filter_condition, build_index_expression
from perdure.stores.filters import Filter
from perdure.stores.postgres import JSONBLocation
from tests import postgres_server


def make_items_table(pool: list[dict[str, Any]], *, ascii_only: bool = False) -> sqlite3.Connection:
    """Create a table `items` (`id`, `value`). A text that UTF-8 cannot hold is escaped as ASCII."""
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE items (id INTEGER PRIMARY KEY, value TEXT NOT NULL)")
    for number, document in enumerate(pool):
        text = json.dumps(document, ensure_ascii=ascii_only or not _is_utf8_encodable(document))
        connection.execute("INSERT INTO items VALUES (?, ?)", (number, text))
    return connection


def matching_ids(
    connection: sqlite3.Connection, filter: Filter, indexed: Collection[str] = ()
) -> set[int]:
    """Return the ids of the rows for which the filter's condition is true."""
    condition = build_filter_condition(filter, JSONLocation("i.value"), indexed)
    query = f"SELECT id FROM items AS i WHERE {condition.text}"
    return {row[0] for row in connection.execute(query, condition.params)}


def sqlite_matching_ids(
    pool: list[dict[str, Any]],
    filter: Filter,
    *,
    ascii_only: bool,
    indexed: Collection[str] = (),
) -> set[int]:
    """Return the ids of matching documents in SQLite, with indexes on the given paths."""
    connection = make_items_table(pool, ascii_only=ascii_only)
    for number, path in enumerate(sorted(indexed)):
        expression = build_index_expression(path, "value")
        connection.execute(f"CREATE INDEX i{number} ON items ({expression})")
    passed = matching_ids(connection, filter, indexed)
    connection.close()
    return passed


@cache
def _postgres_connection() -> psycopg.Connection[tuple[Any, ...]]:
    connection = psycopg.connect(postgres_server.dsn(), autocommit=True)
    atexit.register(connection.close)
    return connection


def postgres_matching_ids(
    pool: list[dict[str, Any]], filter: Filter, *, ascii_only: bool
) -> set[int]:
    """Return the ids of matching documents in Postgres, with rows as a store writes them."""
    texts = {
        number: json.dumps(document, ensure_ascii=ascii_only, separators=(",", ":"))
        for number, document in enumerate(pool)
        if _is_utf8_encodable(document)
    }
    condition = build_filter_condition(filter, JSONBLocation("i.value", ((),)))
    query = (
        "SELECT i.id FROM unnest(?1::bigint[], ?2::bytea[]) AS i (id, value) "
        f"WHERE {condition.build_sql_with_numbered_parameters(3)}"
    )
    bodies = [TextOrBytes(text).to_column_bytes() for text in texts.values()]
    with psycopg.RawCursor(_postgres_connection()) as cursor:
        bound = ([*texts], bodies, *condition.params)
        cursor.execute(query.replace("?", "$").encode(), bound, binary=True)
        return {row[0] for row in cursor} | (set(range(len(pool))) - set(texts))


EvaluateFilter = Callable[[Filter, dict[str, Any]], set[bool]]


def evaluate_filter(database: str, filter: Filter, document: dict[str, Any]) -> set[bool]:
    """Return the results of the condition for a document, with and without ASCII escapes."""
    rows = postgres_matching_ids if database == "postgres" else sqlite_matching_ids
    return {bool(rows([document], filter, ascii_only=ascii_only)) for ascii_only in (False, True)}


def _is_utf8_encodable(document: dict[str, Any]) -> bool:
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
