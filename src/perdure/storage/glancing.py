"""Reads that take next to no time, done where they are asked for instead of in a thread.

Handing a read of 20 microseconds to a thread and back costs an event loop ten times that. So small
reads are tried at once, within bounds: so many steps of SQLite's machine, values of so many bytes,
no waiting for a lock. What passes a bound is given up, and done in a thread after all; and where a
read took long all the same, because the disk is slow, none is tried for a while (decision 0008).
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Final

from perdure.storage.connecting import execute
from perdure.storage.flow import Flow, T, run

STEPS: Final = 20_000
"""Instructions of SQLite's virtual machine; they take about half a millisecond."""

LENGTH: Final = 1 << 15
"""Bytes of a value."""

_SLOW_S: Final = 0.005
_PATIENCE_S: Final = 1.0


class Declined(Exception):
    """The read was not done: it is to be done in a thread."""


class Glancer:
    """Reads in the calling thread, or declines to.

    Args:
        connect: Opens a connection that only reads.
    """

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._conn: sqlite3.Connection | None = None
        self._lock = threading.Lock()
        self._not_before = 0.0
        self._closed = False

    def run(self, flow: Flow[T], *, snapshot: bool) -> T:
        """Run a flow that reads.

        Raises:
            Declined: It would take too long, or did; nothing came of it.
        """
        start = time.monotonic()
        if start < self._not_before or not self._lock.acquire(blocking=False):
            raise Declined
        try:
            return self._run(flow, snapshot)
        except (sqlite3.Error, MemoryError) as exc:
            raise Declined from exc
        finally:
            if time.monotonic() - start > _SLOW_S:
                self._not_before = time.monotonic() + _PATIENCE_S
            self._lock.release()

    def _run(self, flow: Flow[T], snapshot: bool) -> T:
        if self._closed:
            raise Declined
        conn = self._conn or self._opened()
        if not snapshot:
            return run(flow, lambda statement: execute(conn, statement))
        conn.execute("BEGIN")
        try:
            return run(flow, lambda statement: execute(conn, statement))
        finally:
            conn.execute("ROLLBACK")

    def _opened(self) -> sqlite3.Connection:
        conn = self._conn = self._connect()
        conn.execute("PRAGMA busy_timeout = 0")
        conn.set_progress_handler(lambda: 1, STEPS)
        conn.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LENGTH)
        return conn

    def close(self) -> None:
        """Close the connection; later reads are declined."""
        with self._lock:
            self._closed = True
            if self._conn is not None:
                self._conn.close()
                self._conn = None
