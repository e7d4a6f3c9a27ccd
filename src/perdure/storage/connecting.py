"""Connections to one SQLite file: how each is set up, and the lock between processes."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from perdure.errors import StorageError, StorageUnavailable
from perdure.storage.flow import Request
from perdure.storage.migrations import Migration, check_identity, migrate, version

Synchronous = Literal["full", "normal"]
MEMORY = ":memory:"
INCREMENTAL = 2  # https://sqlite.org/pragma.html#pragma_auto_vacuum


class Connector:
    """Opens connections.

    Args:
        path: A file, or `":memory:"`.
        synchronous: How a commit waits for the disk.
        read_only: Whether all connections only read.
        timeout_s: How long to wait for another process.
        factory: The connection class.
    """

    def __init__(
        self,
        path: str,
        synchronous: Synchronous,
        read_only: bool,
        timeout_s: float,
        factory: type[sqlite3.Connection],
    ) -> None:
        self.path = path
        self.on_disk = path != MEMORY
        self.file_lock = FileLock(path + ".lock", thread_local=False) if self.on_disk else None
        self._synchronous = synchronous
        self._read_only = read_only
        self._timeout_s = timeout_s
        self._factory = factory

    def _connect(self, uri_mode: str | None = None) -> sqlite3.Connection:
        target = f"{Path(self.path).absolute().as_uri()}?{uri_mode}" if uri_mode else self.path
        conn = sqlite3.connect(
            target,
            timeout=self._timeout_s,
            isolation_level=None,
            check_same_thread=False,
            factory=self._factory,
            cached_statements=256,
            uri=bool(uri_mode),
        )
        try:
            conn.execute("PRAGMA mmap_size = 0")
            if self.on_disk:
                conn.execute("PRAGMA wal_autocheckpoint = 0")
        except BaseException:
            conn.close()
            raise
        return conn

    def first_writer(self, migration: Migration) -> sqlite3.Connection:
        """The connection that writes, its schema up to date."""
        with self.between_processes():
            conn = self._connect()
            try:
                if not check_identity(conn, self.path):
                    # must come before the first page is written
                    conn.execute("PRAGMA auto_vacuum = INCREMENTAL")
                    if conn.execute("PRAGMA auto_vacuum").fetchone() != (INCREMENTAL,):
                        conn.execute("VACUUM")  # an empty file that another tool began
                if self.on_disk:
                    conn.execute("PRAGMA journal_mode = WAL")
                migrate(self._configured(conn), migration, self.path)
            except BaseException:
                conn.close()
                raise
        return conn

    def _configured(self, conn: sqlite3.Connection) -> sqlite3.Connection:
        conn.execute(f"PRAGMA synchronous = {self._synchronous}")
        conn.execute("PRAGMA secure_delete = ON")
        return conn

    def another_writer(self) -> sqlite3.Connection:
        """One in the place of a connection that had to be given up."""
        return self._configured(self._connect())

    def migrate(self, conn: sqlite3.Connection, migration: Migration) -> None:
        """Bring one more component's schema up to date."""
        with self.between_processes():
            migrate(conn, migration, self.path)

    def check_readable(self, migration: Migration) -> None:
        """Make sure that there is something to read.

        Raises:
            StorageError: The database holds nothing of the component yet.
        """
        with contextlib.closing(self.reader()) as conn:
            if check_identity(conn, self.path) and version(conn, migration, self.path):
                return
        raise StorageError(
            f"{self.path!r} holds no {migration.component} data yet; open it once for writing"
        )

    @contextlib.contextmanager
    def between_processes(self) -> Iterator[None]:
        """Alone among the processes that have the file open.

        Raises:
            StorageUnavailable: Another was at it for too long.
        """
        if self.file_lock is None:
            yield
            return
        try:
            with self.file_lock.acquire(timeout=self._timeout_s):
                yield
        except Timeout as exc:
            raise StorageUnavailable(
                f"another process has held {self.path + '.lock'!r} for {self._timeout_s} s; "
                "try again"
            ) from exc

    def reader(self) -> sqlite3.Connection:
        """A connection that only reads."""
        try:
            conn = self._connect("mode=ro")
            conn.execute("SELECT 1 FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            if not self._read_only or os.path.exists(self.path + "-wal"):
                raise
            conn = self._connect("immutable=1")  # a folder without write permission and no WAL
        return conn


def execute(conn: sqlite3.Connection, request: Request) -> Any:
    """Run what a flow yielded on a connection; see `flow.Request`."""
    if isinstance(request, list):
        return [execute(conn, statement) for statement in request]
    if request.many:
        conn.executemany(request.sql, request.params)
        return []
    return conn.execute(request.sql, request.params).fetchall()
