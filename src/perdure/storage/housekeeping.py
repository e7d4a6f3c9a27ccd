"""Keeping the WAL short and the file small, between the commits of the writing connection.

SQLite before 3.51.3 can damage a WAL file when several connections write and checkpoint at once
(https://sqlite.org/wal.html#walresetbug), so checkpoints are made here only, under a lock between
processes.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress

from filelock import FileLock, Timeout

from perdure.storage.scrubbing import done, rewrite, wanted

WAL_LIMIT_BYTES = 4 << 20  # checkpoint when the WAL has grown by this much
WAL_LOOK_EVERY = 32  # commits between two looks at its size
SCRUB_WAIT_S = 5.0  # how long to wait for readers that hold on to what was erased
VACUUM_PAGES = 512  # pages given back per step, so that a vacuum never holds up writers for long


class Housekeeper:
    """What is done after a commit and before the next.

    Args:
        path: The database file.
        lock: The lock between processes; None: the database is in memory.
        timeout_s: How long the connection otherwise waits for another process.
    """

    def __init__(self, path: str, lock: FileLock | None, timeout_s: float) -> None:
        self.vacuuming = False
        self._path = path
        self._lock = lock
        self._timeout_ms = int(timeout_s * 1000)
        self._commits = 0
        self._wal_mark = 0

    def after_commit(self, conn: sqlite3.Connection) -> None:
        """Give some free pages back, if that is wanted; look at the WAL now and then.

        Never fails: what could not be done is asked for again later.
        """
        with suppress(sqlite3.Error, OSError):
            if self.vacuuming:
                more = False  # a vacuum that fails is not tried for ever
                try:
                    more = _vacuum_step(conn)
                finally:
                    self.vacuuming = more
            self._commits += 1
            if self._lock is not None and self._commits % WAL_LOOK_EVERY == 0:
                grown = os.path.getsize(self._path + "-wal") - self._wal_mark
                if grown > WAL_LIMIT_BYTES:
                    self.checkpoint(conn, wait_s=0.05)

    def checkpoint(self, conn: sqlite3.Connection, wait_s: float) -> bool:
        """Move the WAL into the database file, unless another process is at it.

        Returns:
            Whether nothing is left in the WAL.
        """
        if self._lock is None:
            return True
        emptied = False
        try:
            with self._lock.acquire(timeout=wait_s):
                conn.execute(f"PRAGMA busy_timeout = {int(wait_s * 1000)}")
                ((busy, _, _),) = conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                emptied = not busy
        except Timeout:
            pass  # the next commit asks again
        finally:
            conn.execute(f"PRAGMA busy_timeout = {self._timeout_ms}")
        wal = self._path + "-wal"
        self._wal_mark = os.path.getsize(wal) if os.path.exists(wal) else 0
        return emptied

    def scrub(self, conn: sqlite3.Connection) -> bool:
        """Leave no trace of what was deleted, if anyone asked for it (see `scrubbing`).

        It writes as any transaction does, beside readers and with the other processes' writers
        waiting; only the checkpoint after it is made under the lock between processes.

        Returns:
            Whether it is done. It is not while another process still reads the former state.
        """
        mark = wanted(conn)
        if mark is None:
            return True
        rewrite(conn)
        emptied = self.checkpoint(conn, min(SCRUB_WAIT_S, self._timeout_ms / 1000))
        if emptied:
            done(conn, mark)
        return emptied


def _vacuum_step(conn: sqlite3.Connection) -> bool:
    """Give some free pages back. Returns whether it helped and there are more."""
    (before,) = conn.execute("PRAGMA freelist_count").fetchone()
    conn.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
    (free,) = conn.execute("PRAGMA freelist_count").fetchone()
    return bool(0 < free < before)
