"""The writing connection of an SQLite file, and the thread that commits jobs on it in groups."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

from perdure.storage.flow import Flow, T, run
from perdure.storage.migrations import Migration
from perdure.storage.sqlite_connection import Connector, execute, mapped, perform, translated
from perdure.storage.sqlite_maintenance import Maintenance
from perdure.storage.threads import Promise, settle

_log = logging.getLogger("perdure")


class Job(Promise[T]):
    """A transaction to be made: see `Database.write`."""

    __slots__ = ("committed", "make", "undone")

    def __init__(
        self,
        make: Callable[[], Flow[T]],
        committed: Callable[[T], None] | None = None,
        undone: Callable[[], None] | None = None,
        *,
        awaited: bool,
    ) -> None:
        super().__init__(awaited=awaited)
        self.make = make
        self.committed = committed
        self.undone = undone

    def succeed(self) -> None:
        """Its transaction is committed."""
        if self.committed is not None:
            try:
                self.committed(self._result)
            except Exception:
                _log.exception("committed() failed; the write is stored, undone() is called")
                self._undo()

    def fail(self, error: BaseException) -> None:
        """Its flow, or the commit, failed."""
        self._error = error
        self._undo()

    def _undo(self) -> None:
        if self.undone is not None:
            try:
                self.undone()
            except Exception:
                _log.exception("undone() failed")


class Writer:
    """Commits jobs in the order in which they come; those that wait together share a transaction.

    Args:
        connector: Opens the connection.
        migration: The schema to bring up to date first.
    """

    def __init__(self, connector: Connector, migration: Migration) -> None:
        self.lock = threading.Lock()  # held while the connection is in use
        self._connector = connector
        self._conn = connector.first_writer(migration)
        self._broken = False  # the connection had to be given up
        self._maintenance = Maintenance(connector)
        self._queue: SimpleQueue[Job[Any] | None] = SimpleQueue()  # None: no more will come
        self.put = self._queue.put
        self._thread = threading.Thread(target=self._run, name="perdure-write", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        queue, lock, after_commit = self._queue, self.lock, self._maintenance.after_commit
        job = queue.get()
        while job is not None:
            jobs = [job] if job.claim() else []
            while not queue.empty() and (job := queue.get()) is not None:
                if job.claim():
                    jobs.append(job)
            if jobs:
                with lock:
                    self._commit(jobs)
                    after_commit(self._conn)
            del jobs  # else the last results live until the next job
            if job is not None:
                job = queue.get()

    def _commit(self, jobs: list[Job[Any]]) -> None:
        """Run jobs in one transaction; if one of them fails, each in a transaction of its own."""
        running: Job[Any] | None = None
        try:
            conn = self._sound()
            conn.execute("BEGIN IMMEDIATE")
            by = partial(execute, conn)
            for running in jobs:
                running.keep(run(running.make(), by))
            running = None
            conn.execute("COMMIT")
        except BaseException as exc:
            self._undo()
            if running is not None and len(jobs) > 1:
                for job in jobs:
                    self._commit([job])
                return
            error = translated(exc, self._connector.path)
            for job in jobs:
                job.fail(error)
        else:
            for job in jobs:
                job.succeed()
        settle(jobs)

    def _undo(self) -> None:
        """Roll back; a connection that cannot is given up, lest it commits half a job later."""
        try:
            if self._conn.in_transaction:
                self._conn.execute("ROLLBACK")
        except sqlite3.Error:
            self._conn.close()
            self._broken = True

    def _sound(self) -> sqlite3.Connection:
        if self._broken:
            self._conn = self._connector.another_writer()
            self._broken = False
        return self._conn

    def read(self, flow: Flow[T], *, snapshot: bool) -> T:
        """Run a flow that reads a database in memory, which has this connection only."""
        with self.lock, mapped(self._connector.path):
            try:
                return perform(self._sound(), flow, snapshot=snapshot)
            except BaseException:
                self._undo()
                raise

    def migrate(self, migration: Migration) -> None:
        """Bring one more component's schema up to date."""
        with self.lock, mapped(self._connector.path):
            self._connector.migrate(self._sound(), migration)

    def scrub(self) -> bool:
        """See `Database.scrub`."""
        with self.lock, mapped(self._connector.path):
            try:
                return self._maintenance.scrub(self._sound())
            except BaseException:
                self._undo()
                raise

    def shrink(self, commit: Callable[[], object]) -> None:
        """See `Database.shrink`; `commit` has an empty job run, and after it a step is made."""
        self._maintenance.vacuuming = True
        while self._maintenance.vacuuming:
            commit()
        with self.lock, mapped(self._connector.path):
            self._maintenance.checkpoint(self._sound(), wait_s=1.0)

    def end(self) -> None:
        """Finish what was handed in, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def close(self) -> None:
        """Close the connection; the last one of a file also moves the WAL into it."""
        with self._connector.between_processes():
            self._conn.close()
