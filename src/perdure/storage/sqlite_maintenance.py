"""Keeping the WAL short and the file small, between the commits of the writing connection.

SQLite before 3.51.3 can damage a WAL file when several connections write and checkpoint at once
(https://sqlite.org/wal.html#walresetbug), so checkpoints are made here only, under a lock between
processes.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress

from filelock import Timeout

from perdure.storage.database import SCRUB
from perdure.storage.sqlite_connection import Connector

WAL_LIMIT_BYTES = 1 << 20  # checkpoint when the WAL has grown by this much
WAL_LOOK_EVERY = 8  # commits between two looks at its size
SCRUB_WAIT_S = 5.0  # how long to wait for readers of the state before an erasure
VACUUM_PAGES = 512  # pages given back per step, so that a vacuum never holds up writers for long


class Maintenance:
    """What is done with the writing connection after a commit and before the next.

    Args:
        connector: Of the file.
    """

    def __init__(self, connector: Connector) -> None:
        self.vacuuming = False
        self._wal = connector.path + "-wal"
        self._connector = connector
        self._commits = 0
        self._wal_mark = 0

    def after_commit(self, conn: sqlite3.Connection) -> None:
        """Give some free pages back, if that is wanted; look at the WAL now and then.

        Never fails: what could not be done is tried again later.
        """
        self._commits += 1
        if not self.vacuuming and self._commits % WAL_LOOK_EVERY:
            return
        with suppress(sqlite3.Error, OSError):
            if self.vacuuming:
                more = False  # a vacuum that fails is not tried for ever
                try:
                    more = _vacuum_step(conn)
                finally:
                    self.vacuuming = more
            if not self._connector.on_disk:
                return
            if os.path.getsize(self._wal) - self._wal_mark > WAL_LIMIT_BYTES:
                self.checkpoint(conn, wait_s=0.05)

    def checkpoint(self, conn: sqlite3.Connection, wait_s: float) -> bool:
        """Move the WAL into the database file, unless another process is doing so.

        Returns:
            Whether nothing is left in the WAL.
        """
        if not self._connector.on_disk:
            return True
        emptied = False
        try:
            with self._connector.file_lock.acquire(timeout=wait_s):
                conn.execute(f"PRAGMA busy_timeout = {int(wait_s * 1000)}")
                ((busy, _, _),) = conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                emptied = not busy
        except Timeout:
            pass  # the next commit tries again
        finally:
            conn.execute(f"PRAGMA busy_timeout = {int(self._connector.timeout_s * 1000)}")
        self._wal_mark = os.path.getsize(self._wal) if os.path.exists(self._wal) else 0
        return emptied

    def scrub(self, conn: sqlite3.Connection) -> bool:
        """Leave no trace of what was deleted, if a `scrub_wanted` asks for it.

        `secure_delete` overwrites deleted rows, but not what SQLite left behind when it moved rows
        between pages; VACUUM writes every page anew (https://sqlite.org/lang_vacuum.html), beside
        readers. Only the checkpoint after it is made under the lock between processes.

        Returns:
            Whether it is done. It is not while another process reads the earlier state.
        """
        rows = conn.execute("SELECT value FROM settings WHERE name = ?", (SCRUB,)).fetchall()
        if not rows:
            return True
        conn.execute("VACUUM")
        emptied = self.checkpoint(conn, min(SCRUB_WAIT_S, self._connector.timeout_s))
        if emptied:  # unless another asked meanwhile
            conn.execute("DELETE FROM settings WHERE name = ? AND value = ?", (SCRUB, *rows[0]))
        return emptied


def _vacuum_step(conn: sqlite3.Connection) -> bool:
    """Give some free pages back. Returns whether it helped and there are more."""
    (before,) = conn.execute("PRAGMA freelist_count").fetchone()
    conn.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
    (free,) = conn.execute("PRAGMA freelist_count").fetchone()
    return bool(0 < free < before)
