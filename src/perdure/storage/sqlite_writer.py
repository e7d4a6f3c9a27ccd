"""The writing connection of an SQLite file, and the thread that commits jobs on it in groups.

Between commits the WAL is kept short and the file small. SQLite before 3.51.3 can damage a WAL file
when several connections write and checkpoint at once (https://sqlite.org/wal.html#walresetbug), so
checkpoints are made here only, under a lock between processes; from then on SQLite makes them.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final

from perdure.errors import StorageError, StorageFull, StorageUnavailable
from perdure.storage import sqlite_connection
from perdure.storage.database import GROUP_WAIT_S, Job, Schema, Watch
from perdure.storage.flow import GuardedRequest, GuardFailed, run_flow
from perdure.storage.sqlite_connection import (
    WAL_LIMIT_BYTES,
    Connector,
    execute,
    is_full,
    map_errors,
    translate_error,
)
from perdure.storage.threads import Promise, deliver_promises

_log = logging.getLogger("perdure")

SCRUB_WANTED: Final = """
INSERT INTO settings (name, value) VALUES ('scrub', randomblob(8))
ON CONFLICT (name) DO UPDATE SET value = excluded.value
"""  # the value tells whether another asked since
FILE_SEEN_S: Final = 1.0  # how long a file is taken to be the one that was opened
_LOOK_S: Final = 0.001  # how long to wait while somebody else looks at the connection
SOON_S: Final = 0.02  # how long to wait to be told the epoch
_SCRUB_WAIT_S: Final = 5.0  # how long to wait for readers of the state before an erasure
_FEW_PAGES: Final = 64  # given back per step on a full disk, whose WAL must fit into the reserve
_VACUUM_PAGES: Final = 512  # given back per step, so that writers are never held up for long


class _Asked(Promise[object | None]):
    """Somebody waits to be told the epoch of a component."""

    __slots__ = ("component", "watch")

    def __init__(self, component: str, watch: Watch) -> None:
        super().__init__(is_async=True)
        self.component, self.watch = component, watch
        self.result = None


class SQLiteWriter:
    """Commits jobs in the order in which they come; those that wait together share a transaction.

    The tables of a component are made first.
    """

    def __init__(self, connector: Connector, schema: Schema) -> None:
        self.lock = threading.Lock()  # held while the connection is in use
        self._busy = False  # whether it is for more than a look
        self._connector = connector
        self._conn = connector.first_writer(schema)
        self._file, self._file_seen = connector.identity(), time.monotonic()
        self._broken = False  # the connection had to be given up
        self._closed = False
        self._version = -1  # what SQLite says changes when another connection commits
        self._foreign = 0  # how often it was another
        self._commits: Counter[str] = Counter()  # by component
        self._asked: deque[_Asked] = deque()  # who waits to be told the epoch
        self._vacuuming = False
        self._wal_mark = 0  # bytes that the WAL had when it was last looked after
        self._queue: SimpleQueue[Job[Any] | None] = SimpleQueue()  # None: no more will come
        self.put = self._queue.put
        self._thread = threading.Thread(target=self._run, name="perdure-write", daemon=True)
        self._thread.start()

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection. A forked process closes the connections that it has inherited."""
        return self._conn

    def _run(self) -> None:
        more = True
        while more:
            jobs, more = self._group()
            if jobs:
                with self._in_use():
                    self._commit(jobs)
                    self._after_commit()
                while self._asked:
                    with self._in_use():
                        deliver_promises(self._answered())
            del jobs  # else the last results live until the next job

    def commit_in_calling_thread(self, job: Job[Any]) -> bool:
        """Commit a job in the calling thread, unless the connection is in use or jobs are queued.

        Returns:
            Whether the job was committed. If not, the caller must hand it to the writing thread.
        """
        if not self._queue.empty() or not self.lock.acquire(blocking=False):
            return False
        self._busy = True
        try:
            if self._closed or not job.try_start():
                return False
            if not self._commit_single_statement(job):
                self._commit([job])
            self._after_commit()
            return True
        finally:
            self._busy = False
            self.lock.release()

    def _commit_single_statement(self, job: Job[Any]) -> bool:
        """Run a job that consists of one guarded statement, and let SQLite commit the statement.

        Each call of SQLite releases the interpreter lock. Another thread may then hold the lock for
        up to 5 ms (`sys.getswitchinterval`). A transaction with BEGIN and COMMIT makes four calls.
        This method makes one call, and the statement is durable before the lock is needed again.

        Returns:
            True if the job was committed. False if nothing was written, because the job needs more
            statements, the guard found no row, the file was replaced, or the statement failed.
        """
        if self._broken:
            return False
        flow = job.make_flow()
        try:
            if time.monotonic() - self._file_seen >= FILE_SEEN_S:
                self._check_file()
            request = flow.send(None)
            if not isinstance(request, GuardedRequest) or len(request) > 1:
                flow.close()
                return False
            rows = execute(self._conn, request)
        except (GuardFailed, sqlite3.Error, StorageUnavailable):
            return False
        try:
            flow.send(rows)
        except StopIteration as stop:
            job.result = stop.value
        self._count([job])
        job.succeed()
        deliver_promises([job, *self._answered()])
        return True

    def _group(self) -> tuple[list[Job[Any]], bool]:
        """The jobs of the next transaction, which are all that wait, and whether more will come."""
        jobs, queue, until = list[Job[Any]](), self._queue, 0.0
        job = queue.get()
        while job is not None:
            if job.try_start():
                jobs.append(job)
            if not queue.empty():
                job = queue.get()
            elif jobs and all(job.may_wait for job in jobs):
                now = time.monotonic()
                until = until or now + GROUP_WAIT_S
                try:
                    job = queue.get(timeout=max(0.0, until - now))
                except Empty:
                    return jobs, True
            else:
                return jobs, True
        return jobs, False

    def _commit(self, jobs: list[Job[Any]], *, in_reserve: bool = False) -> None:
        """Run jobs in one transaction; if one of them fails, each in a transaction of its own.

        What removes rows and finds the disk full is run again with the reserve's room.
        """
        running: Job[Any] | None = None
        try:
            conn = self._conn if not self._broken else self._sound()
            if time.monotonic() - self._file_seen >= FILE_SEEN_S:
                self._check_file()
            conn.execute("BEGIN IMMEDIATE")
            self._look()
            by = partial(execute, conn)
            for running in jobs:
                running.result = run_flow(running.make_flow(), by)
            running = None
            if in_reserve:
                conn.execute(SCRUB_WANTED)
            conn.execute("COMMIT")
        except BaseException as exc:
            self._undo()
            error = translate_error(exc, self._connector.path)
            full = isinstance(error, StorageFull)
            if len(jobs) > 1 and (full or running is not None):
                for job in jobs:
                    self._commit([job])
            elif full and jobs[0].deletes_rows and not in_reserve:
                with self._in_reserve():
                    self._commit(jobs, in_reserve=True)
            else:
                self._fail(jobs, error)
        else:
            self._count(jobs)
            for job in jobs:
                job.succeed()
            deliver_promises([*jobs, *self._answered()])

    def _fail(self, jobs: list[Job[Any]], error: BaseException) -> None:
        for job in jobs:
            job.fail(error)
        deliver_promises([*jobs, *self._answered()])

    def _count(self, jobs: list[Job[Any]]) -> None:
        """Count commits, for those who watch what others commit."""
        for job in jobs:
            commits = self._commits[job.component] = self._commits[job.component] + 1
            if job.watch is not None:
                job.watch.own_commits += 1
                job.watch.epoch = self._foreign, commits - job.watch.own_commits

    def _answered(self) -> list[_Asked]:
        """Those who asked for the epoch, which is told by the connection as it is now. Never fails.

        They are taken first: an event loop may give up at any moment.
        """
        answered: list[_Asked] = []
        with suppress(IndexError):
            while True:
                answered.append(self._asked.popleft())
        with suppress(Exception):  # they are told nothing
            if answered:
                self._look()
            for asked in answered:
                asked.result = self._epoch(asked.component, asked.watch)
        return answered

    def _check_file(self) -> None:
        """Make sure that what is written goes where others read it.

        Raises:
            StorageUnavailable: The file at the path is another, or there is none.
        """
        if self._connector.identity() != self._file:
            raise StorageUnavailable(
                f"the file at {self._connector.path!r} was moved, deleted or replaced while the "
                "database was open: close it and open it again; replace a file only while no "
                "process has it open"
            )
        self._file_seen = time.monotonic()
        self._connector.reserve.look()

    def _look(self) -> None:
        """Notice what other processes have committed since the last look.

        https://www.sqlite.org/pragma.html#pragma_data_version: of a connection, own commits apart.
        """
        (version,) = self._conn.execute("PRAGMA data_version").fetchone()
        if version != self._version:
            self._version = version
            self._foreign += 1

    def _epoch(self, component: str, watch: Watch) -> object:
        return self._foreign, self._commits[component] - watch.own_commits

    def epoch(self, component: str, watch: Watch) -> object | None:
        """See `Database.epoch`; while the connection is in use, it cannot be told."""
        if not self.lock.acquire(blocking=False) and (
            self._busy or not self.lock.acquire(timeout=_LOOK_S)
        ):
            return None
        try:
            self._look()
            return self._epoch(component, watch)
        except Exception:  # a broken connection; or a tool that forbids SQL in an event loop
            return None
        finally:
            self.lock.release()

    async def wait_for_epoch(self, component: str, watch: Watch) -> object | None:
        """See `Database.epoch_soon`: told by who uses the connection."""
        asked = _Asked(component, watch)
        self._asked.append(asked)
        try:
            epoch = self.epoch(component, watch)  # it may have become free just before
            if epoch is not None:
                return epoch
            limit = asyncio.get_running_loop().call_later(SOON_S, deliver_promises, [asked])
            try:
                return await asked.future  # type: ignore[misc,no-any-return]
            finally:
                limit.cancel()
        finally:
            with suppress(ValueError, IndexError):  # it was answered, or others are right now
                self._asked.remove(asked)

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
            self._broken, self._version = False, -1
        return self._conn

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Have the connection for a while."""
        with self.lock:
            self._busy = True
            try:
                yield
            finally:
                self._busy = False

    @contextmanager
    def between_commits(self) -> Iterator[sqlite3.Connection]:
        """The connection, for other work than jobs."""
        with self._in_use(), map_errors(self._connector.path):
            try:
                yield self._sound()
            except BaseException:
                self._undo()
                raise

    def add(self, schema: Schema) -> None:
        """Make the tables of one more component."""
        with self.between_commits() as conn:
            self._connector.add(conn, schema)

    # -- the WAL and the size of the file

    def _after_commit(self) -> None:
        """Give some free pages back, if that is wanted, and empty the WAL when it has grown.

        Never fails: what could not be done is tried again later.
        """
        with suppress(sqlite3.Error, StorageError, OSError):
            if self._vacuuming:
                more = False  # a vacuum that fails is not tried for ever
                try:
                    more = self._vacuum_step()
                finally:
                    self._vacuuming = more
            if sqlite_connection.REUSES_WAL:  # SQLite itself sees to it
                return
            if self._connector.wal_bytes() - self._wal_mark > WAL_LIMIT_BYTES:
                self._checkpoint(self._conn)

    def _vacuum_step(self) -> bool:
        """See `_vacuum_step`; on a full disk all steps are made, each with the reserve's room."""
        try:
            return _vacuum_step(self._conn, _VACUUM_PAGES)
        except sqlite3.OperationalError as exc:
            if not is_full(exc):
                raise
            with self._in_reserve():
                return False

    @contextmanager
    def _in_reserve(self) -> Iterator[None]:
        """Have the reserve's room for a removal, and give back what it frees.

        Deleted rows are not overwritten, which writes each of their pages, so who removes them must
        see to that. https://sqlite.org/pragma.html#pragma_secure_delete
        """
        with self._connector.reserve.used():
            with suppress(sqlite3.Error, StorageError, OSError):
                self._checkpoint(self._sound())
            with suppress(sqlite3.Error):
                self._sound().execute("PRAGMA secure_delete = FAST")
            try:
                yield
            finally:
                with suppress(sqlite3.Error, StorageError, OSError):
                    conn = self._sound()
                    conn.execute("PRAGMA secure_delete = ON")
                    more = self._checkpoint(conn)
                    while more:
                        more = _vacuum_step(conn, _FEW_PAGES) and self._checkpoint(conn)

    def _checkpoint(self, conn: sqlite3.Connection, wait_s: float = 0.05) -> bool:
        """Move the WAL into the file, unless another process does. Returns whether all is moved.

        If the file cannot grow, the reserve's room is used; an empty WAL leaves as much of it.
        """
        if not self._connector.on_disk:
            return True
        return self._connector.reserve.lent(partial(self._moved, conn, wait_s))

    def _moved(self, conn: sqlite3.Connection, wait_s: float) -> bool:
        emptied = False
        try:
            with self._connector.between_processes(wait_s):
                conn.execute(f"PRAGMA busy_timeout = {int(wait_s * 1000)}")
                ((busy, _, _),) = conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                emptied = not busy
        except StorageUnavailable:
            pass  # the next commit tries again
        finally:
            conn.execute(f"PRAGMA busy_timeout = {int(self._connector.timeout_s * 1000)}")
        self._wal_mark = self._connector.wal_bytes()
        return emptied

    def scrub(self) -> bool:
        """Leave no trace of what was deleted, if a `scrub_wanted` asks for it.

        `secure_delete` overwrites deleted rows, but not what SQLite left behind when it moved rows
        between pages; VACUUM writes every page anew (https://sqlite.org/lang_vacuum.html), beside
        readers. Only the checkpoint after it is made under the lock between processes.

        Returns:
            Whether it is done. It is not while another process reads the earlier state, or while
            the disk has no room for another copy of the file.
        """
        with self.between_commits() as conn:
            asked = conn.execute("SELECT name, value FROM settings WHERE name = 'scrub'").fetchone()
            if asked is None:
                return True
            try:
                conn.execute("VACUUM")
            except sqlite3.OperationalError as exc:
                if not is_full(exc):
                    raise
                with self._in_reserve():  # the pages of what was deleted go, other traces do not
                    return False
            emptied = self._checkpoint(conn, min(_SCRUB_WAIT_S, self._connector.timeout_s))
            if emptied:  # unless another asked meanwhile
                conn.execute("DELETE FROM settings WHERE name = ? AND value = ?", asked)
            return emptied

    def shrink(self, commit: Callable[[], object]) -> None:
        """See `Database.shrink`; `commit` has an empty job run, and after it a step is made.

        So it takes turns with those who write (a thread of its own waited six times as long).
        """
        self._vacuuming = True
        while self._vacuuming:
            commit()
        with self.between_commits() as conn:
            self._checkpoint(conn, wait_s=1.0)

    def shut_down(self) -> None:
        """Finish what was handed in, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def close(self) -> None:
        """Close the connection; the last one of a file also moves the WAL into it."""
        with self.lock, self._connector.between_processes():
            self._closed = True
            self._conn.close()


def _vacuum_step(conn: sqlite3.Connection, pages: int) -> bool:
    """Give some free pages back. Returns whether it helped and there are more."""
    (before,) = conn.execute("PRAGMA freelist_count").fetchone()
    # not `execute`: each step of it gives back one page, and without columns it takes one step
    conn.executescript(f"PRAGMA incremental_vacuum({pages})")
    (free,) = conn.execute("PRAGMA freelist_count").fetchone()
    return bool(0 < free < before)
