"""Storage logic without a driver: a flow yields statements and is sent their rows.

The pattern is httpx's `Auth.auth_flow` and psycopg's generators: one implementation, any driver.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Row = tuple[Any, ...]


class Statement(NamedTuple):
    """One SQL statement. With `many`, `params` is a sequence of parameter rows."""

    sql: str
    params: Sequence[Any] = ()
    many: bool = False


Flow = Generator[Statement, list[Row], T]


def run(flow: Flow[T], execute: Callable[[Statement], list[Row]]) -> T:
    """Drive a flow to its end: errors of `execute` are thrown into it, its result is returned."""
    try:
        statement = next(flow)
        while True:
            try:
                rows = execute(statement)
            except BaseException as exc:
                statement = flow.throw(exc)
            else:
                statement = flow.send(rows)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


def execute(conn: sqlite3.Connection, statement: Statement) -> list[Row]:
    """Run a statement on a connection."""
    if statement.many:
        conn.executemany(statement.sql, statement.params)
        return []
    return conn.execute(statement.sql, statement.params).fetchall()


def rows_of(sql: str, *params: Any) -> Flow[list[Row]]:
    """The flow of a single statement."""
    return (yield Statement(sql, params))
