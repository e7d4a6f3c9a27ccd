"""Connections that only read: as many as there are threads that read at the same moment."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from perdure.errors import StorageUnavailable
from perdure.storage.connecting import execute
from perdure.storage.flow import Flow, T, run


class Readers:
    """A pool of reading connections.

    Args:
        connect: Opens one.
        path: The database, for messages.
    """

    def __init__(self, connect: Callable[[], sqlite3.Connection], path: str) -> None:
        self._connect = connect
        self._path = path
        self._idle: list[sqlite3.Connection] = []
        self._lent = 0
        self._closed = False
        self._changed = threading.Condition()

    def run(self, flow: Flow[T], *, snapshot: bool = True) -> T:
        """Run a flow on one snapshot of the database; one of a single statement needs none."""
        with self._lend() as conn:
            if not snapshot:
                return run(flow, lambda statement: execute(conn, statement))
            conn.execute("BEGIN")
            result = run(flow, lambda statement: execute(conn, statement))
            conn.execute("COMMIT")
            return result

    @contextmanager
    def _lend(self) -> Iterator[sqlite3.Connection]:
        with self._changed:
            if self._closed:
                raise StorageUnavailable(f"the database {self._path!r} is closed")
            conn = self._idle.pop() if self._idle else None
            self._lent += 1
        try:
            if conn is None:
                conn = self._connect()
            yield conn
        finally:
            with self._changed:
                if conn is not None and _usable(conn):
                    self._idle.append(conn)
                self._lent -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Close them all, once those who read have finished; later readers are refused."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._lent == 0)
            while self._idle:
                self._idle.pop().close()


def _usable(conn: sqlite3.Connection) -> bool:
    """Whether a connection is out of its transaction; if it cannot be brought out, it is closed."""
    with suppress(sqlite3.Error):
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        return True
    conn.close()
    return False
