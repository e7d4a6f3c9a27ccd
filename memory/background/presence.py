"""Which workers are alive: each holds a lock, which the system takes from a process that ends.

No clock is asked, so a worker that is slow is not taken for dead, and one that was killed is found
out at once: on one machine by a lock on a file, with Postgres by an advisory lock of a session.
"""

from __future__ import annotations

import os
from contextlib import suppress
from glob import escape, glob
from hashlib import sha256
from typing import Any, Protocol

from filelock import FileLock, Timeout


class Presence(Protocol):
    """Tells who is alive."""

    def enter(self, worker: str) -> None:
        """Be alive under this name; again and again, for the lock may have been lost."""

    def leave(self) -> None:
        """Be alive no longer."""

    def is_alive(self, worker: str) -> bool:
        """Whether a worker, here or elsewhere, is."""


class FilePresence:
    """Presence among the processes of a machine: a locked file each.

    Args:
        path: What the files' names begin with.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._worker: str | None = None
        self._lock: FileLock | None = None

    def enter(self, worker: str) -> None:
        """See `Presence`."""
        if self._lock is None:
            for left in glob(self._file("*", escape(self._path))):
                self.is_alive(left.split(".")[-2])
            self._worker, self._lock = worker, FileLock(self._file(worker), thread_local=False)
            self._lock.acquire(timeout=0)

    def leave(self) -> None:
        """See `Presence`."""
        if self._lock is not None and self._worker is not None:
            self._lock.release()
            self._tidy(self._worker)
            self._worker = self._lock = None

    def is_alive(self, worker: str) -> bool:
        """See `Presence`; the file that a dead one left behind is removed."""
        if worker == self._worker:
            return True
        if not worker or not os.path.exists(self._file(worker)):
            return False
        lock = FileLock(self._file(worker), thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return True
        lock.release()
        self._tidy(worker)
        return False

    def _file(self, worker: str, path: str | None = None) -> str:
        return f"{path or self._path}.{worker}.lock"

    def _tidy(self, worker: str) -> None:
        with suppress(OSError):  # names are used once, so nobody waits for it
            os.unlink(self._file(worker))


class SessionPresence:
    """Presence among all that use a Postgres database: an advisory lock each.

    It lasts as long as the session, so there must be no pooler between that changes sessions.

    Args:
        url: Of the database.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._worker: str | None = None
        self._session: Any = None
        self._held = False

    def enter(self, worker: str) -> None:
        """See `Presence`."""
        import psycopg  # comes with DBOS

        self._worker = worker
        try:
            self._hold(worker)
        except psycopg.Error:  # the server was away: a session once more
            self._close()
            self._hold(worker)

    def leave(self) -> None:
        """See `Presence`."""
        self._close()
        self._worker = None

    def _hold(self, worker: str) -> None:
        import psycopg

        if self._session is None:
            self._session = psycopg.connect(self._url, autocommit=True)
        # not had while the server believes in our former session; then it counts as alive as well
        ask = "SELECT true" if self._held else "SELECT pg_try_advisory_lock(%s)"
        found = self._session.execute(ask, [] if self._held else [_number(worker)])
        self._held = found.fetchone() == (True,)

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session, self._held = None, False

    def is_alive(self, worker: str) -> bool:
        """See `Presence`."""
        import psycopg

        if worker == self._worker:
            return True
        with psycopg.connect(self._url) as session:
            found = session.execute("SELECT pg_try_advisory_xact_lock(%s)", [_number(worker)])
            return found.fetchone() != (True,)


def _number(worker: str) -> int:
    """The 64 bits that Postgres knows an advisory lock by."""
    return int.from_bytes(sha256(f"perdure {worker}".encode()).digest()[:8], signed=True)
