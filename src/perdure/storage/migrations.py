"""Versioned schemas: each component's numbered steps, each applied once, in one transaction.

The caller holds the lock between processes, so forty of them may start at once.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from perdure.errors import NotADatabase, SchemaMismatch

APPLICATION_ID = 0x70657264  # "perd"; https://sqlite.org/pragma.html#pragma_application_id


class Migration(NamedTuple):
    """The whole schema history of one component: `steps[i]` leads to version `i + 1`."""

    component: str
    steps: Sequence[str]


def check_identity(conn: sqlite3.Connection, path: str) -> bool:
    """Whether the database is perdure's; False when it is empty and may become so.

    Raises:
        NotADatabase: It belongs to another application.
    """
    (found,) = conn.execute("PRAGMA application_id").fetchone()
    if found == APPLICATION_ID:
        return True
    tables = {name for (name,) in conn.execute("SELECT name FROM sqlite_master")}
    if not tables and found == 0:
        return False
    hint = (
        "langgraph-checkpoint-sqlite wrote it: open a new file and call import_from() on it"
        if {"checkpoints", "writes"} <= tables
        else "give a new path, or one that perdure wrote"
    )
    raise NotADatabase(f"{path!r} is an SQLite database of another application; {hint}")


def version(conn: sqlite3.Connection, migration: Migration, path: str) -> int:
    """The version a component's schema has; 0 when it is not there.

    Raises:
        SchemaMismatch: The file is newer than this code.
    """
    try:
        rows = conn.execute(
            "SELECT max(version) FROM migrations WHERE component = ?", (migration.component,)
        ).fetchall()
    except sqlite3.OperationalError:
        return 0
    found = rows[0][0] or 0
    if found > len(migration.steps):
        raise SchemaMismatch(
            f"{path!r} has version {found} of the {migration.component} schema, this perdure knows "
            f"{len(migration.steps)}: upgrade perdure"
        )
    return int(found)


def migrate(conn: sqlite3.Connection, migration: Migration, path: str) -> None:
    """Bring a component's schema up to date."""
    current = version(conn, migration, path)
    if current == len(migration.steps):
        return
    conn.execute("BEGIN IMMEDIATE")
    try:
        conn.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        conn.execute(
            "CREATE TABLE IF NOT EXISTS migrations (component TEXT NOT NULL, version INTEGER NOT "
            "NULL, applied_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP, "
            "PRIMARY KEY (component, version)) STRICT, WITHOUT ROWID"
        )
        conn.execute(  # of the file, whichever components keep something in it
            "CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value BLOB NOT NULL) "
            "STRICT, WITHOUT ROWID"
        )
        for number, script in enumerate(migration.steps[current:], current + 1):
            for statement in filter(str.strip, script.split(";")):
                conn.execute(statement)
            conn.execute(
                "INSERT INTO migrations (component, version) VALUES (?, ?)",
                (migration.component, number),
            )
        conn.execute("COMMIT")
    except BaseException:
        conn.execute("ROLLBACK")
        raise
