"""Versioned schemas: each component's numbered steps, each applied once, in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from perdure.errors import NotADatabase, SchemaMismatch
from perdure.storage.flow import Flow, Statement

APPLICATION_ID = 0x70657264  # "perd"; https://sqlite.org/pragma.html#pragma_application_id
_TABLES = """
CREATE TABLE IF NOT EXISTS migrations (
    component TEXT NOT NULL, version INTEGER NOT NULL,
    applied_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP,
    PRIMARY KEY (component, version)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value BLOB NOT NULL)
STRICT, WITHOUT ROWID
"""


class Migration(NamedTuple):
    """The whole schema history of one component: `steps[i]` leads to version `i + 1`."""

    component: str
    steps: Sequence[str]


def is_perdures(path: str) -> Flow[bool]:
    """Whether the database is perdure's; False when it is empty and may become so.

    Raises:
        NotADatabase: It belongs to another application.
    """
    ((found,),) = yield Statement("PRAGMA application_id")
    if found == APPLICATION_ID:
        return True
    tables = {name for (name,) in (yield Statement("SELECT name FROM sqlite_master"))}
    if not tables and found == 0:
        return False
    hint = (
        "langgraph-checkpoint-sqlite wrote it: open a new file and call import_from() on it"
        if {"checkpoints", "writes"} <= tables
        else "give a new path, or one that perdure wrote"
    )
    raise NotADatabase(f"{path!r} is an SQLite database of another application; {hint}")


def version(migration: Migration, path: str) -> Flow[int]:
    """The version a component's schema has; 0 when it is not there.

    Raises:
        SchemaMismatch: The file is newer than this code.
    """
    if not (yield Statement("SELECT 1 FROM sqlite_master WHERE name = 'migrations'")):
        return 0
    sql = "SELECT coalesce(max(version), 0) FROM migrations WHERE component = ?"
    ((found,),) = yield Statement(sql, (migration.component,))
    if found > len(migration.steps):
        raise SchemaMismatch(
            f"{path!r} has version {found} of the {migration.component} schema, this perdure knows "
            f"{len(migration.steps)}: upgrade perdure"
        )
    return int(found)


def migrate(migration: Migration, path: str) -> Flow[None]:
    """Bring a component's schema up to date, within the caller's transaction.

    The caller holds the lock between processes, so that forty of them may start at once.
    """
    current = yield from version(migration, path)
    yield Statement(f"PRAGMA application_id = {APPLICATION_ID}")
    yield _statements(_TABLES)
    for number, script in enumerate(migration.steps[current:], current + 1):
        yield _statements(script)
        yield Statement(
            "INSERT INTO migrations (component, version) VALUES (?, ?)",
            (migration.component, number),
        )


def _statements(script: str) -> list[Statement]:
    return [Statement(sql) for sql in script.split(";") if sql.strip()]
