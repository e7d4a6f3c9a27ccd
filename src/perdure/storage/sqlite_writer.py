"""The writing connection of an SQLite file, and the OS thread that commits most writes.

A write is submitted as a job. All jobs that are waiting in the queue are committed in one
transaction. The OS thread of a blocking caller commits an urgent job itself, if the connection is
free and no jobs are queued. In addition to committing writes, the writer limits the size of the WAL
and returns free pages to the file system. SQLite before 3.51.3 can damage a database if several
connections write and checkpoint the WAL at the same time (https://sqlite.org/wal.html#walresetbug).
With SQLite versions before 3.51.3, only the writing connection checkpoints the WAL, while holding
an inter-process lock. With SQLite 3.51.3 or later, perdure relies on SQLite's automatic WAL
checkpoints.
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
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from perdure.errors import StorageError, StorageFull, StorageUnavailable
from perdure.storage import sqlite_connection
from perdure.storage.database import GROUP_WAIT_S, Schema
from perdure.storage.flow import (
    GuardedRequest,
    GuardFailed,
    Job,
    OwnWrites,
    Promise,
    WriteCounts,
    resolve_futures_in_their_threads,
    run_flow,
)
from perdure.storage.job_queue import JobQueue
from perdure.storage.sqlite_connection import WAL_LIMIT_BYTES, Connector, execute_flow_request
from perdure.storage.sqlite_errors import convert_sqlite_errors, is_disk_full, translate_error

_log = logging.getLogger("perdure")

# Each scrub request stores a new random value, so that a process that has scrubbed the file can
# detect a newer request.
REQUEST_SCRUB_SQL: Final = """
INSERT INTO settings (name, value) VALUES ('scrub', randomblob(8))
ON CONFLICT (name) DO UPDATE SET value = excluded.value
"""
# Minimum number of seconds between two checks that the path still refers to the open file
FILE_CHECK_INTERVAL_S: Final = 1.0
# Maximum number of seconds that `count_writes_except_own` waits while another thread counts
# the writes
_COUNT_LOCK_WAIT_S: Final = 0.001
# Maximum number of seconds that `wait_and_count_writes_except_own` waits for a transaction to end
# before it returns None
WRITE_COUNT_WAIT_S: Final = 0.02
# Maximum number of seconds that a scrub waits for connections that still read an older snapshot of
# the database
_SCRUB_WAIT_S: Final = 5.0
# Number of pages that one step of an incremental vacuum frees when the disk is full. The pages that
# a step writes to the WAL must fit into the space freed by deleting the reserve file.
_FULL_DISK_VACUUM_PAGES: Final = 64
# Number of pages that one step of an incremental vacuum frees. Writers wait while a step runs, so a
# small number keeps their delay short.
_VACUUM_PAGES: Final = 512


@dataclass(slots=True, eq=False)
class _WriteCountRequest(Promise[WriteCounts | None]):
    """A coroutine's queued request to count the writes that other writers have made.

    See `SQLiteWriter.count_writes_except_own`.
    """

    component: str
    own_writes: OwnWrites
    result: WriteCounts | None = field(default=None, init=False)


class SQLiteWriter:
    """Commits jobs in submission order.

    All jobs that are waiting in the queue are committed in one transaction.

    Args:
        connector: Opens the writing connection.
        schema: The tables of the component that opens the file first. They are created if they do
            not exist.

    Attributes:
        lock: A lock that is held while the connection is in use.
        submit: A method that submits a job.
    """

    def __init__(self, connector: Connector, schema: Schema) -> None:
        self.lock = threading.Lock()
        # True while an OS thread uses the connection. The brief use by `count_writes_except_own`
        # does not set this flag
        self._is_connection_in_use = False
        self._connector = connector
        self._conn = connector.open_first_writer(schema)
        self._file_identity, self._file_checked_at = (
            connector.read_file_identity(),
            time.monotonic(),
        )
        # Whether the writing connection was closed after an error and must be reopened
        self._is_broken = False
        self._closed = False
        self._data_version = -1  # The last value of `PRAGMA data_version`
        # Number of times that `PRAGMA data_version` was found to have changed. SQLite changes the
        # value when another connection modifies the database.
        self._foreign_changes = 0
        self._commit_counts: Counter[str] = Counter()  # Number of commits of each component
        self._write_count_requests: deque[_WriteCountRequest] = deque()
        self._is_vacuuming = False
        # Size of the WAL in bytes, measured after the last attempt to checkpoint the WAL
        self._last_wal_bytes = 0
        # Queue of submitted jobs. The value None tells the writing thread to stop.
        self._queue = JobQueue()
        self.submit = self._queue.put
        self._thread = threading.Thread(
            target=self._commit_jobs_until_stop_signal, name="perdure-write", daemon=True
        )
        self._thread.start()

    @property
    def connection(self) -> sqlite3.Connection:
        """The writing connection.

        A forked child process must close the writing connection that it inherits.
        """
        return self._conn

    def _commit_jobs_until_stop_signal(self) -> None:
        """Commit queued jobs until the stop signal (None) is taken from the queue."""
        more = True
        while more:
            jobs, more = self._collect_jobs_and_whether_more_may_follow()
            if jobs:
                with self.lock:
                    self._is_connection_in_use = True
                    try:
                        self._commit_jobs(jobs)
                        self._free_pages_and_empty_wal()
                    finally:
                        self._is_connection_in_use = False
                # A coroutine may have queued a request for the number of writes after
                # `_commit_jobs` had answered the earlier requests. Answer such late requests now.
                while self._write_count_requests:
                    with self._hold_connection_lock():
                        resolve_futures_in_their_threads(
                            self._take_and_answer_write_count_requests()
                        )
            # Drop the references to the finished jobs, so that their results are not kept in memory
            # until the next job arrives.
            del jobs

    def try_to_commit_in_calling_thread(self, job: Job[Any]) -> bool:
        """Try to run a job in the calling OS thread, and commit its transaction.

        The job is run only if the connection is free and no jobs are queued.

        Returns:
            Whether the job was executed, with success or not. If it was not executed, the caller
            must hand it to the writing thread.
        """
        if not self._queue.is_empty() or not self.lock.acquire(blocking=False):
            return False
        self._is_connection_in_use = True
        try:
            if self._closed or job.future.cancelled():
                return False
            if not self._try_to_commit_single_statement(job):
                self._commit_jobs([job])
            self._free_pages_and_empty_wal()
            return True
        finally:
            self._is_connection_in_use = False
            self.lock.release()

    def _try_to_commit_single_statement(self, job: Job[Any]) -> bool:
        """Commit a job in autocommit mode if it consists of a single guard statement.

        Python releases the global interpreter lock (GIL) during each call to SQLite. After each
        call to SQLite, the calling thread may have to wait up to 5 ms (`sys.getswitchinterval`)
        until another thread releases the GIL. A transaction with BEGIN and COMMIT needs four SQLite
        calls. In autocommit mode, a single statement needs only one SQLite call, because SQLite
        commits it by itself. After the SQLite call, the calling OS thread might have to wait until
        the GIL is free. When the calling thread starts to wait for the GIL, SQLite has already
        committed the statement.

        Returns:
            True if the job was committed. False if nothing was written, because the job needs more
            statements, the guard found no row, the file was replaced, or the statement failed.
        """
        if self._is_broken:
            return False
        flow = job.make_flow()
        try:
            if time.monotonic() - self._file_checked_at >= FILE_CHECK_INTERVAL_S:
                self._check_file_was_not_replaced()
            request = flow.send(None)
            if not isinstance(request, GuardedRequest) or len(request) > 1:
                flow.close()
                return False
            rows = execute_flow_request(self._conn, request)
        except (GuardFailed, sqlite3.Error, StorageUnavailable):
            return False
        try:
            flow.send(rows)
        except StopIteration as stop:
            job.result = stop.value
        self._finish_committed_jobs([job])
        return True

    def _collect_jobs_and_whether_more_may_follow(self) -> tuple[list[Job[Any]], bool]:
        """Wait for queued jobs. Return the jobs, and whether more jobs may be queued later.

        If every collected job has `may_wait` set, also wait up to `GROUP_WAIT_S` seconds for
        further jobs. The returned bool is False after the stop signal has been received.
        """
        jobs, queue, deadline = list[Job[Any]](), self._queue, 0.0
        may_all_wait = True
        job = queue.get()
        while job is not None:
            if not job.future.cancelled():
                jobs.append(job)
                may_all_wait = may_all_wait and job.may_wait
            if not queue.is_empty():
                job = queue.get()
            elif jobs and may_all_wait:
                now = time.monotonic()
                deadline = deadline or now + GROUP_WAIT_S
                if not queue.wait_for_job(deadline - now):
                    return jobs, True
                job = queue.get()
            else:
                return jobs, True
        return jobs, False

    def _commit_jobs(self, jobs: list[Job[Any]], *, uses_reserve: bool = False) -> None:
        """Run jobs in one transaction.

        If several jobs share a transaction, and one of the jobs fails or the disk is full, the
        transaction is rolled back. Each job is then run again in a transaction of its own. If a
        transaction consists of a single job that deletes rows, and the transaction fails because
        the disk is full, the reserved disk space is released. The job is then run once more. All
        jobs fail if an error other than a full disk prevents the transaction from beginning or from
        being committed.
        """
        running: Job[Any] | None = None
        try:
            conn = self._conn if not self._is_broken else self._get_connection()
            if time.monotonic() - self._file_checked_at >= FILE_CHECK_INTERVAL_S:
                self._check_file_was_not_replaced()
            conn.execute("BEGIN IMMEDIATE")
            self._count_change_by_other_connection_if_any()
            run_request = partial(execute_flow_request, conn)
            for running in jobs:
                running.result = run_flow(running.make_flow(), run_request)
            running = None
            if uses_reserve:
                conn.execute(REQUEST_SCRUB_SQL)
            conn.execute("COMMIT")
        except BaseException as exc:
            self._roll_back()
            error = translate_error(exc, self._connector.path)
            is_full = isinstance(error, StorageFull)
            if len(jobs) > 1 and (is_full or running is not None):
                for job in jobs:
                    self._commit_jobs([job])
            elif is_full and jobs[0].deletes_rows and not uses_reserve:
                with self._release_disk_reserve_during_block():
                    self._commit_jobs(jobs, uses_reserve=True)
            else:
                self._fail_jobs(jobs, error)
        else:
            self._finish_committed_jobs(jobs)

    def _fail_jobs(self, jobs: list[Job[Any]], error: BaseException) -> None:
        """Deliver an error to jobs."""
        for job in jobs:
            job.finish_with_error(error)
        resolve_futures_in_their_threads([*jobs, *self._take_and_answer_write_count_requests()])

    def _finish_committed_jobs(self, jobs: list[Job[Any]]) -> None:
        """Count the commits of jobs, call the jobs' commit callbacks, and resolve their futures.

        The commit count of each job's component is incremented, and the job's `own_writes` is
        updated, before the first callback is called. Queued requests for write counts are answered
        as well.
        """
        for job in jobs:
            commits = self._commit_counts[job.component] = self._commit_counts[job.component] + 1
            if job.own_writes is not None:
                job.own_writes.commit_count += 1
                job.own_writes.write_counts_except_own = (
                    self._foreign_changes,
                    commits - job.own_writes.commit_count,
                )
        for job in jobs:
            job.call_commit_callback()
        has_requests = bool(self._write_count_requests)
        requests = self._take_and_answer_write_count_requests() if has_requests else []
        resolve_futures_in_their_threads([*jobs, *requests])

    def _take_and_answer_write_count_requests(self) -> list[_WriteCountRequest]:
        """Set the results of all queued write-count requests, and return the requests.

        A write-count request asks how many writes other writers have made.

        Each request is removed from the queue before its result is set, because a coroutine that
        stops waiting may concurrently remove its own request. If counting the writes fails, no
        error is raised. The result of each request whose writes could not be counted is None.
        """
        requests: list[_WriteCountRequest] = []
        with suppress(IndexError):
            while True:
                requests.append(self._write_count_requests.popleft())
        # If counting the writes fails, the result of each remaining request is None.
        with suppress(Exception):
            if requests:
                self._count_change_by_other_connection_if_any()
            for request in requests:
                request.result = self._build_counts_of_writes_except_own(
                    request.component, request.own_writes
                )
        return requests

    def _check_file_was_not_replaced(self) -> None:
        """Check that the path still refers to the file that was opened.

        Create or remove the reserve file here, because this method is called regularly and the free
        disk space must be checked regularly.

        Raises:
            StorageUnavailable: The file was moved, deleted or replaced.
        """
        if self._connector.read_file_identity() != self._file_identity:
            raise StorageUnavailable(
                f"the file at {self._connector.path!r} was moved, deleted or replaced while the "
                "database was open. Close the database and open it again. Replace a database file "
                "only while no process has it open"
            )
        self._file_checked_at = time.monotonic()
        self._connector.reserve.create_or_remove_as_needed()

    def _count_change_by_other_connection_if_any(self) -> None:
        """Increment `_foreign_changes` if another connection has committed since the last call.

        See https://www.sqlite.org/pragma.html#pragma_data_version
        """
        (version,) = self._conn.execute("PRAGMA data_version").fetchone()
        if version != self._data_version:
            self._data_version = version
            self._foreign_changes += 1

    def _build_counts_of_writes_except_own(
        self, component: str, own_writes: OwnWrites
    ) -> WriteCounts:
        """Return two counts of writes, one for other connections and one for this connection.

        The writes that the caller counts in `own_writes` are excluded.

        The first number says how often a change by another connection was detected. The second
        number counts the transactions that this process has committed for `component`. Transactions
        that `own_writes` counts are not included.
        """
        return self._foreign_changes, self._commit_counts[component] - own_writes.commit_count

    def count_writes_except_own(self, component: str, own_writes: OwnWrites) -> WriteCounts | None:
        """See `Database.count_writes_except_own`.

        If the writing connection is in use, `count_writes_except_own` returns None instead of
        waiting.
        """
        if not self.lock.acquire(blocking=False) and (
            self._is_connection_in_use or not self.lock.acquire(timeout=_COUNT_LOCK_WAIT_S)
        ):
            return None
        try:
            self._count_change_by_other_connection_if_any()
            return self._build_counts_of_writes_except_own(component, own_writes)
        # Return None if counting the writes fails. It can fail because the connection is broken, or
        # because a test tool blocks SQL that runs on the event loop.
        except Exception:
            return None
        finally:
            self.lock.release()

    async def wait_and_count_writes_except_own(
        self, component: str, own_writes: OwnWrites
    ) -> WriteCounts | None:
        """See `Database.wait_and_count_writes_except_own`.

        If the writing connection is in use, the coroutine waits until the OS thread that uses the
        connection has counted the writes.
        """
        future = asyncio.get_running_loop().create_future()
        request = _WriteCountRequest(future, component, own_writes)
        self._write_count_requests.append(request)
        try:
            # First, try to count the writes in this coroutine. If the writing connection became
            # free before the request was queued, no OS thread will answer the request.
            write_counts_except_own = self.count_writes_except_own(component, own_writes)
            if write_counts_except_own is not None:
                return write_counts_except_own
            timeout = asyncio.get_running_loop().call_later(
                WRITE_COUNT_WAIT_S, resolve_futures_in_their_threads, [request]
            )
            try:
                return await future  # type: ignore[no-any-return]
            finally:
                timeout.cancel()
        finally:
            # `remove` raises ValueError if the answering thread has already removed the request
            # from the queue. `remove` raises IndexError if the answering thread changes the queue
            # at the same time.
            with suppress(ValueError, IndexError):
                self._write_count_requests.remove(request)

    def _roll_back(self) -> None:
        """Roll back the current transaction, or close the connection if the rollback fails.

        After a failed job, an open transaction must not remain, because a later commit would
        include its changes.
        """
        try:
            if self._conn.in_transaction:
                self._conn.execute("ROLLBACK")
        except sqlite3.Error:
            self._conn.close()
            self._is_broken = True

    def _get_connection(self) -> sqlite3.Connection:
        """Return the writing connection, reopening it if it was closed after an error."""
        if self._is_broken:
            self._conn = self._connector.reopen_writer()
            self._is_broken, self._data_version = False, -1
        return self._conn

    @contextmanager
    def _hold_connection_lock(self) -> Iterator[None]:
        """Hold the connection's lock and mark the connection as in use during the `with` block."""
        with self.lock:
            self._is_connection_in_use = True
            try:
                yield
            finally:
                self._is_connection_in_use = False

    @contextmanager
    def lend_connection(self) -> Iterator[sqlite3.Connection]:
        """Give the `with` block exclusive use of the writing connection.

        `lend_connection` is meant for work that is not submitted to the job queue.
        """
        with self._hold_connection_lock(), convert_sqlite_errors(self._connector.path):
            try:
                yield self._get_connection()
            except BaseException:
                self._roll_back()
                raise

    def add_component(self, schema: Schema) -> None:
        """Create the tables of `schema` in the open database file, if they do not exist yet."""
        with self.lend_connection() as conn:
            self._connector.add_component(conn, schema)

    # -- the WAL and the size of the file

    def _free_pages_and_empty_wal(self) -> None:
        """Perform one step of a vacuum in progress, and truncate the WAL if it has grown too large.

        Errors are ignored. A vacuum whose step fails ends. If truncating the WAL fails, for example
        because it is being read, truncation is retried after a later commit.
        """
        with suppress(sqlite3.Error, StorageError, OSError):
            if self._is_vacuuming:
                # If the vacuum step raises an error, the variable `more` stays False. A failing
                # vacuum therefore stops instead of being retried forever.
                more = False
                try:
                    more = self._free_some_pages_and_check_if_more_remain()
                finally:
                    self._is_vacuuming = more
            if sqlite_connection.REUSES_WAL:  # SQLite empties the WAL by itself
                return
            if self._connector.measure_wal_bytes() - self._last_wal_bytes > WAL_LIMIT_BYTES:
                self._empty_wal_if_possible(self._conn)

    def _free_some_pages_and_check_if_more_remain(self) -> bool:
        """Free some unused pages of the file, and return whether unused pages remain.

        If the disk is full, release the reserved disk space. Then try to free all unused pages
        during this call, in several small steps.
        """
        try:
            return _free_pages_and_check_if_more_remain(self._conn, _VACUUM_PAGES)
        except sqlite3.OperationalError as exc:
            if not is_disk_full(exc):
                raise
            with self._release_disk_reserve_during_block():
                return False

    @contextmanager
    def _release_disk_reserve_during_block(self) -> Iterator[None]:
        """Delete the reserve file to free disk space for the `with` block.

        At the end of the `with` block, shrink the database file. If the disk is still nearly full
        after that, create the reserve file again, so that its disk space can be released again
        later.

        During the `with` block, SQLite overwrites deleted rows only where this requires no
        additional page writes, so that deletions need less disk space. The caller must request a
        scrub. See https://sqlite.org/pragma.html#pragma_secure_delete
        """
        with self._connector.reserve.release_during_block():
            with suppress(sqlite3.Error, StorageError, OSError):
                self._empty_wal_if_possible(self._get_connection())
            with suppress(sqlite3.Error):
                self._get_connection().execute("PRAGMA secure_delete = FAST")
            try:
                yield
            finally:
                with suppress(sqlite3.Error, StorageError, OSError):
                    conn = self._get_connection()
                    conn.execute("PRAGMA secure_delete = ON")
                    more = self._empty_wal_if_possible(conn)
                    while more:
                        more = _free_pages_and_check_if_more_remain(
                            conn, _FULL_DISK_VACUUM_PAGES
                        ) and self._empty_wal_if_possible(conn)

    def _empty_wal_if_possible(self, conn: sqlite3.Connection, wait_s: float = 0.05) -> bool:
        """Checkpoint the WAL into the database file, and return whether the WAL is now empty.

        If the database file cannot grow because the disk is full, the reserve file is deleted to
        free disk space. After the checkpoint, truncating the WAL frees enough disk space to
        recreate the reserve file.
        """
        if not self._connector.is_on_disk:
            return True
        return self._connector.reserve.retry_with_reserve_if_disk_is_full(
            partial(self._move_wal_into_file_if_possible, conn, wait_s)
        )

    def _move_wal_into_file_if_possible(self, conn: sqlite3.Connection, wait_s: float) -> bool:
        """Checkpoint the WAL while other processes are locked out.

        The result is True if the WAL is empty after the checkpoint. The WAL is not truncated if
        another connection is still reading it, or if another process holds the inter-process lock
        for longer than `wait_s` seconds.
        """
        is_moved = False
        try:
            with self._connector.hold_lock_between_processes(wait_s):
                conn.execute(f"PRAGMA busy_timeout = {int(wait_s * 1000)}")
                ((busy, _, _),) = conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                is_moved = not busy
        except StorageUnavailable:
            # Another process holds the inter-process lock, so the WAL cannot be checkpointed now. A
            # later commit will retry the checkpoint.
            pass
        finally:
            conn.execute(f"PRAGMA busy_timeout = {int(self._connector.timeout_s * 1000)}")
        self._last_wal_bytes = self._connector.measure_wal_bytes()
        return is_moved

    def scrub_deleted_rows(self) -> bool:
        """Erase all traces of deleted rows if `request_scrub_of_deleted_rows` recorded a request.

        `secure_delete` overwrites deleted rows, but not the old copies that remain when SQLite
        moves rows between pages. VACUUM rewrites every page (https://sqlite.org/lang_vacuum.html)
        while other connections can still read. The inter-process lock is held only during the WAL
        checkpoint after the VACUUM.

        Returns:
            Whether no trace is left. The result is False while another process reads the earlier
            state, or while there is not enough disk space for a copy of the file.
        """
        with self.lend_connection() as conn:
            scrub_request = conn.execute(
                "SELECT name, value FROM settings WHERE name = 'scrub'"
            ).fetchone()
            if scrub_request is None:
                return True
            try:
                conn.execute("VACUUM")
            except sqlite3.OperationalError as exc:
                if not is_disk_full(exc):
                    raise
                # VACUUM needs enough disk space for a copy of the file. If there is not enough,
                # only free the pages of deleted rows.
                with self._release_disk_reserve_during_block():
                    return False
            is_moved = self._empty_wal_if_possible(
                conn, min(_SCRUB_WAIT_S, self._connector.timeout_s)
            )
            if is_moved:
                # Delete only the scrub request that was read before the VACUUM. A newer scrub
                # request has a different value and must stay in the table, because its rows may
                # have been deleted after the VACUUM.
                conn.execute("DELETE FROM settings WHERE name = ? AND value = ?", scrub_request)
            return is_moved

    def release_unused_disk_space(self, commit_empty_job: Callable[[], object]) -> None:
        """See `Database.release_unused_disk_space`.

        One step of an incremental vacuum runs after each commit, so that writers wait for at most
        one step. Vacuum steps run in the writing thread. In a measurement, a vacuum in a separate
        thread took six times as long as a vacuum in the writing thread.

        Args:
            commit_empty_job: Commits an empty job, which triggers the next vacuum step.
        """
        self._is_vacuuming = True
        while self._is_vacuuming:
            commit_empty_job()
        with self.lend_connection() as conn:
            self._empty_wal_if_possible(conn, wait_s=1.0)

    def shut_down(self) -> None:
        """Commit all submitted jobs, then stop the writing thread."""
        self._queue.put(None)
        self._thread.join()

    def close(self) -> None:
        """Close the connection.

        If this is the last open connection to the file, SQLite checkpoints the WAL when the
        connection is closed.
        """
        with self.lock, self._connector.hold_lock_between_processes():
            self._closed = True
            self._conn.close()


def _free_pages_and_check_if_more_remain(conn: sqlite3.Connection, max_pages: int) -> bool:
    """Run one step of an incremental vacuum, which returns free pages to the file system.

    The result is True if this call freed pages and the file still has free pages.
    """
    (free_before,) = conn.execute("PRAGMA freelist_count").fetchone()
    # Run the pragma `incremental_vacuum` with `executescript`, which frees up to `max_pages` pages.
    # `Connection.execute` would stop after one page.
    conn.executescript(f"PRAGMA incremental_vacuum({max_pages})")
    (free_after,) = conn.execute("PRAGMA freelist_count").fetchone()
    return bool(0 < free_after < free_before)
