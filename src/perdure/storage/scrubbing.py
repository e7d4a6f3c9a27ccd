"""Scrubbing: no trace of what was deleted stays in the bytes of a file or its WAL.

`secure_delete` overwrites deleted rows, but not what SQLite left behind when it moved rows between
pages; VACUUM writes every page anew (https://sqlite.org/lang_vacuum.html). Whoever deletes what has
to be gone yields from `scrub_wanted` in the same transaction and calls `Database.scrub` after it:
so a process that is killed in between leaves word, and the next to open the file finishes it.
"""

from __future__ import annotations

import secrets
import sqlite3
from typing import Final

from perdure.storage.flow import Flow, Statement

_NAME: Final = "scrub"


def scrub_wanted() -> Flow[None]:
    """Note, in the transaction that deletes, that the file is to be scrubbed."""
    yield Statement(
        "INSERT INTO settings (name, value) VALUES (?, ?) "
        "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
        (_NAME, secrets.token_bytes(8)),  # tells whether another asked since
    )


def wanted(conn: sqlite3.Connection) -> bytes | None:
    """What was noted by who asked for a scrub last; None: nobody did since the last."""
    rows = conn.execute("SELECT value FROM settings WHERE name = ?", (_NAME,)).fetchall()
    return rows[0][0] if rows else None


def rewrite(conn: sqlite3.Connection) -> None:
    """Write every page anew, without what was deleted.

    `auto_vacuum` stays as the file has it, and so do the keys of tables that declare one.
    """
    conn.execute("VACUUM")


def done(conn: sqlite3.Connection, mark: bytes) -> None:
    """Forget a wish, unless there is a newer one."""
    conn.execute("DELETE FROM settings WHERE name = ? AND value = ?", (_NAME, mark))
