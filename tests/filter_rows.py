"""Documents as rows of SQLite, and which of them a filter's condition lets through."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection
from typing import Any

from perdure.stores.filter_sql import condition_of
from perdure.stores.filters import Filter


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
    condition = condition_of(filter, "i.value", indexed)
    query = f"SELECT id FROM items AS i WHERE {condition.text}"
    return {row[0] for row in connection.execute(query, condition.params)}


def let_through(filter: Filter, document: dict[str, Any]) -> set[bool]:
    """Whether the condition is true of a document, in both ways of writing JSON."""
    found = set()
    for ascii_only in (False, True):
        connection = table([document], ascii_only=ascii_only)
        found.add(bool(ids(connection, filter)))
        connection.close()
    return found


def _whole(document: dict[str, Any]) -> bool:
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
