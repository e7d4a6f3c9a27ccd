"""The writing connection of a database: jobs in transactions, and what to do when one fails."""

from __future__ import annotations

import sqlite3
from typing import Any, TypeVar

from perdure.storage.connecting import Connector, execute
from perdure.storage.flow import run
from perdure.storage.sqlite_errors import mapped
from perdure.storage.workers import Job, settle

T = TypeVar("T")


class Committer:
    """Commits groups of jobs. Not for several threads at once.

    Args:
        connector: Opens another connection when this one is broken.
        path: The database, for messages.
        connection: The connection.
    """

    def __init__(self, connector: Connector, path: str, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self._connector = connector
        self._path = path
        self._broken = False  # it had to be given up

    def commit(self, batch: list[Job[Any]]) -> None:
        """Run jobs in one transaction, each undone by itself if it fails, and tell the outcomes."""
        done: list[Job[Any]] = []
        failed: dict[Job[Any], BaseException] = {}
        try:
            with mapped(self._path):
                conn = self.sound()
                conn.execute("BEGIN IMMEDIATE")
                for job in batch:
                    try:
                        job.result = self._step(conn, job, alone=len(batch) == 1)
                        done.append(job)
                    except BaseException as exc:
                        failed[job] = exc
                        if len(batch) == 1 or not conn.in_transaction:
                            raise  # a full disk, say, undoes all of it at once
                conn.execute("COMMIT")
        except BaseException as exc:
            self.undo()
            failed = {job: failed.get(job, exc) for job in batch}
            done = []
        try:
            for job, error in failed.items():
                job.fail(error)
            for job in done:
                job.succeed()
        finally:
            settle(job.promise for job in batch)

    def _step(self, conn: sqlite3.Connection, job: Job[T], *, alone: bool) -> T:
        """Run a job; one of several within a savepoint, so that it can be undone by itself."""
        if not alone:
            conn.execute("SAVEPOINT job")
        try:
            with mapped(self._path):
                result = run(job.flow, lambda statement: execute(conn, statement))
        except BaseException:
            if not alone and conn.in_transaction:
                conn.execute("ROLLBACK TO job")
                conn.execute("RELEASE job")
            raise
        if not alone:
            conn.execute("RELEASE job")
        return result

    def undo(self) -> None:
        """Roll back; a connection that cannot is given up, lest it commits half a job later."""
        conn = self.connection
        try:
            if conn.in_transaction:
                conn.execute("ROLLBACK")
        except sqlite3.Error:
            conn.close()
            self._broken = True

    def sound(self) -> sqlite3.Connection:
        """The connection, or another if it had to be given up."""
        if self._broken:
            self.connection = self._connector.another_writer()
            self._broken = False
        return self.connection
