"""Extract memories from threads in the background, as soon as their conversations pause.

A worker determines which threads are due, and queues one job for each of them. The queue consists
of DBOS workflows, and DBOS gives each job to one worker. If the queue is lost, no extractions are
lost, because the workers search for due threads again. Importing this module takes about a second,
because the module imports DBOS.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, Final, Self, get_args
from urllib.parse import quote

from langchain_core.runnables import RunnableConfig

from perdure import errors
from perdure.effects import run_operation
from perdure.errors import ConfigurationError, MissingDependency, StorageUnavailable
from perdure.memory import model_call
from perdure.memory.long_term.extraction import (
    DueThreads,
    Extraction,
    ExtractionJob,
    ExtractionReport,
    Pace,
    State,
)
from perdure.memory.options import check_choice, check_instance, check_seconds, check_whole_number
from perdure.memory.thread_messages import make_storable, read_watermark
from perdure.settings import is_dsn
from perdure.storage.locks import file_lock
from perdure.storage.private_files import create_private_file
from perdure.storage.thread_pools import ThreadPool

try:
    from dbos import DBOS, DBOSClient, DBOSPortableJSONSerializer, WorkflowStatus
    from dbos import error as dbos_errors
    from sqlalchemy import create_engine, make_url, text
    from sqlalchemy.exc import SQLAlchemyError
except ImportError as exc:
    raise MissingDependency(
        'background extraction needs DBOS; run pip install "perdure[background]"'
    ) from exc

ThreadId = str

logger = logging.getLogger("perdure.background")
_WORKER_LOST_ERROR: Final = "the worker ended before the extraction was done"
# Maximum number of queued jobs. While the queue is full, no more due threads are queued.
_MAX_QUEUED_JOBS: Final = 100
# minimum and maximum interval in seconds between two searches for due threads
_TICK_BOUNDS_S: Final = (0.05, 5.0)
_CLEANUP_INTERVAL_S: Final = 3600.0  # interval in seconds at which old jobs are deleted
# Grace period in seconds for a job that exceeds its time limit `Pace.limit_s`. After the grace
# period, the job's worker counts as dead.
_LOST_AFTER_S: Final = 60.0
_EXTRACT_WORKFLOW_NAME: Final = "perdure.extract"
_EXTRACT_ALL_WORKFLOW_NAME: Final = "perdure.extract_all"
_QUEUE_NAME: Final = "perdure.extraction"
# Give the DBOS logger a handler that does nothing. Otherwise, DBOS adds a handler that prints log
# messages.
logging.getLogger("dbos").addHandler(logging.NullHandler())
# DBOS dispatches a job only to workers with the same application version
_WORKFLOW_VERSION: Final = "2"
_APPLICATION_NAME: Final = "perdure"
# Default Postgres schema for the tables of the job queue. The default is used if the memory store
# does not specify a schema for the job queue, for example because the memory store is a SQLite
# store.
_DEFAULT_SCHEMA: Final = "perdure_jobs"
_POSTGRES: Final = "postgresql://"
# interval in seconds at which DBOS polls the queue for new jobs
_POLL_INTERVAL_S: Final = 0.25
# number of additional connections in the pool, reserved for DBOS's own OS threads
_DBOS_CONNECTIONS: Final = 6
_active_worker: list[tuple[Callable[[ExtractionJob], dict[str, Any]], Callable[[], object]]] = []
"""The functions of this process's worker: one extracts a thread, the other queues all threads.

The list contains one pair of functions, or is empty if the process has no worker.
"""


class Background:
    """Extracts memories from threads in the background.

    The extraction runs in this process, or in a separate `perdure worker` process.

    When used as a context manager, a `Background` object starts extraction on entry and stops it on
    exit. A process can run only one DBOS application.

    Args:
        extraction: The extraction, with a checkpointer of perdure's and a store.
        pace: When threads are extracted, and how often a failed extraction is repeated.
        database: The database of the queue: a file, or `"postgresql://…"` for workers on several
            machines. None means a file beside the store's file, or the store's Postgres database.
            The queue is never encrypted. The queue contains thread ids, namespaces and reports.
        workers: How many threads this process extracts at the same time.
        work: Whether this process extracts memories. If False, the object only lists and adds jobs.
        on_job: A function that is called with each job that this process has finished, or that
            failed. The function is not called for a job without unread messages.
    """

    def __init__(
        self,
        extraction: Extraction,
        *,
        pace: Pace | None = None,
        database: str | os.PathLike[str] | None = None,
        workers: int = 8,
        work: bool = True,
        on_job: Callable[[ExtractionJob], None] | None = None,
    ) -> None:
        self.extraction = check_instance(
            "extraction", extraction, Extraction, "Extraction(saver, store)"
        )
        self.pace, self.work = pace or Pace(), bool(work)
        self.workers, self._on_job = check_whole_number("workers", workers, 1), on_job
        self._due = DueThreads(extraction, self.pace)
        # number of unassigned threads reported by the last warning
        self._warned_count = 0
        self._queue_location = resolve_queue_location_and_schema(
            database, extraction.get_adapter().store
        )
        # `_stop` prevents the start of further jobs. `_abandon` is set when `stop` no longer waits
        # for running extractions.
        self._lock, self._stop = threading.RLock(), threading.Event()
        self._abandon = threading.Event()
        self._running: set[str] = set()  # keys of the jobs that this process is running
        self._stack = ExitStack()  # ends the worker and the queueing loop
        self._queue: JobQueue | None = None
        self._is_working = False

    def start(self) -> Self:
        """Start the extraction.

        Do nothing if the object was created with `work=False`, or was started already.

        Raises:
            ConfigurationError: This process runs a DBOS application already.
        """
        with self._lock:
            if not self.work or self._is_working:
                return self
            try:
                worker = self._get_queue().run_worker_and_yield_lost_jobs(
                    self.workers,
                    self._run_job_and_get_result,
                    self._queue_all_threads_and_get_job_keys,
                )
                for job in self._stack.enter_context(worker):
                    self._record_failure(job, _WORKER_LOST_ERROR)
            except BaseException:
                self.stop()
                raise
            self._is_working = True
            queueing_thread = threading.Thread(
                target=self._run_queueing_loop, name="perdure-background", daemon=True
            )
            queueing_thread.start()
            self._stack.callback(queueing_thread.join)
        return self

    def stop(self, timeout_s: float = 30.0) -> None:
        """Stop the extraction.

        Threads whose extraction is still running after `timeout_s` seconds remain due.

        Args:
            timeout_s: Seconds to wait for running extractions.
        """
        end = time.monotonic() + check_seconds("timeout_s", timeout_s)
        with self._lock:
            self._stop.set()
            while self._running and time.monotonic() < end:
                time.sleep(0.01)
            self._abandon.set()
            self._stack.close()
            if self._queue is not None:
                self._queue.close()
            self._queue, self._is_working = None, False
            self._stop, self._abandon = threading.Event(), threading.Event()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.stop)

    def extract_now(self, thread_id: str, config: RunnableConfig | None = None) -> None:
        """Queue a thread for extraction by the next free worker.

        Args:
            thread_id: The thread.
            config: The config whose values fill in the namespace, or None for the values of the
                thread's head.
        """
        self._get_queue().put(self._due.build_job(thread_id, config))

    def every(self, cron: str | None, timezone: str | None = None) -> None:
        """Schedule a recurring extraction of memories from all threads.

        The schedule includes threads whose extraction has failed and is no longer retried
        automatically. The schedule is stored in the queue's database. If no worker is running at a
        scheduled time, the extraction for that time is skipped.

        Args:
            cron: Five fields like `"0 3 * * *"`, or None to remove the schedule.
            timezone: A time zone like `"Europe/Berlin"`. None means UTC.
        """
        self._get_queue().set_extraction_schedule(cron, timezone)

    def flush(self, timeout_s: float = 60.0) -> list[ExtractionJob]:
        """Queue all threads with unread messages, and wait for their extraction.

        Threads whose extraction has failed and will not be retried are skipped.

        Args:
            timeout_s: The maximum number of seconds to wait.

        Returns:
            The jobs that are not done, also those of the skipped threads.
        """
        end = time.monotonic() + check_seconds("timeout_s", timeout_s)
        keys = (
            self._queue_all_threads_and_get_job_keys(includes_dead_jobs=False)
            | self._get_queue().read_unfinished_jobs().keys()
        )
        while keys & self._get_queue().read_unfinished_jobs().keys() and time.monotonic() < end:
            time.sleep(_TICK_BOUNDS_S[0])
        return self._due.list_jobs()

    def jobs(self, state: State | None = None) -> list[ExtractionJob]:
        """Return jobs for threads with unread messages, and jobs completed in the last 24 hours.

        Args:
            state: Return only jobs in the given state, or all jobs if `state` is None.
        """
        if state is not None:
            check_choice("state", state, get_args(State))
        queue = self._get_queue()
        running_by_key = queue.read_unfinished_jobs()
        due = {
            job.key: replace(job, state="running") if running_by_key.get(job.key) else job
            for job in self._due.list_jobs(exclude_read=True)
        }
        # List due jobs before completed jobs, so that a job that completes meanwhile is not missed.
        jobs = {job.key: job for job in queue.list_done_jobs()} | due
        return [job for job in jobs.values() if state in (None, job.state)]

    def unassigned(self) -> list[ThreadId]:
        """Return the ids of threads that extraction skips because their user is unknown.

        A thread is unassigned if its latest checkpoint lacks a value that the namespace template
        needs, such as `user_id`. A worker logs a warning when it first finds unassigned threads,
        and again whenever their number has doubled since the last warning.
        """
        # Use a new `DueThreads` object, because the cache of an older object may still contain
        # deleted threads.
        threads = DueThreads(self.extraction, self.pace)
        threads.list_jobs(exclude_deleted=False)
        return threads.list_threads_without_user()

    def _get_queue(self) -> JobQueue:
        """Return the job queue. The first call opens the queue."""
        # Read `_queue` without acquiring `_lock`, because `stop` holds `_lock` while it waits for
        # running extractions.
        if (queue := self._queue) is not None:
            return queue
        with self._lock:
            if self._queue is None:
                self._queue = JobQueue(*self._queue_location)
            return self._queue

    def _queue_all_threads_and_get_job_keys(self, *, includes_dead_jobs: bool = True) -> set[str]:
        """Enqueue all threads with unread messages, and return the keys of their jobs.

        With `includes_dead_jobs=False`, threads whose extraction has failed and is no longer
        retried are left out.
        """
        jobs = [job for job in self._due.list_jobs() if includes_dead_jobs or job.state != "dead"]
        for job in jobs:
            self._get_queue().put(job)
        self._warn_when_threads_without_user_double(self._due.list_threads_without_user())
        return {job.key for job in jobs}

    def _run_queueing_loop(self) -> None:
        """Queue due threads at regular intervals until `stop` is called."""
        shortest, longest = _TICK_BOUNDS_S
        delay_s = min(self.pace.backoff_s, self.pace.delay_s or longest)
        pause, deleted_at = min(longest, max(shortest, delay_s / 4)), 0.0
        while not self._stop.wait(pause):
            try:
                self._queue_due_threads()
                self._warn_when_threads_without_user_double(
                    self._due.list_threads_without_user(self.pace.delay_s or 0)
                )
                if time.monotonic() - deleted_at > _CLEANUP_INTERVAL_S:
                    self._get_queue().delete_old_jobs()
                    deleted_at = time.monotonic()
            # Log the error and continue the loop. Threads that were not queued remain due, so the
            # next iteration queues them.
            except Exception as exc:
                logger.error(
                    "background extraction failed and will be retried: %s: %s",
                    type(exc).__name__,
                    exc,
                )

    def _queue_due_threads(self) -> None:
        """Queue the due threads for extraction. Record a failure for each job whose worker died."""
        queue = self._get_queue()
        running_by_key = queue.read_unfinished_jobs()
        # Read the queue first, and then determine which threads are due. In the opposite order, a
        # thread that another worker extracts between the two reads could be queued a second time.
        due = [job for job in self._due.list_jobs(exclude_deleted=False) if job.state == "due"]
        if any(running_by_key.get(job.key) for job in due):
            for job in queue.cancel_lost_jobs(self.pace.limit_s + _LOST_AFTER_S):
                self._record_failure(job, _WORKER_LOST_ERROR)
        for job in [job for job in due if job.key not in running_by_key][
            : max(0, _MAX_QUEUED_JOBS - len(running_by_key))
        ]:
            queue.put(job)

    def _warn_when_threads_without_user_double(self, thread_ids: list[str]) -> None:
        """Log a warning if the number of unassigned threads has doubled since the last warning.

        A thread is unassigned if its user cannot be determined. No memories are extracted from
        unassigned threads.
        """
        count = len(thread_ids)
        if count and count >= 2 * self._warned_count:
            self._warned_count = count
            logger.warning(
                "no memories are extracted from threads without %s (number of threads: %d); pass "
                "this value to the runs of these threads in context= or in configurable",
                " or ".join(self.extraction.namespace.placeholder_names),
                count,
            )

    def _run_job_and_get_result(self, job: ExtractionJob) -> dict[str, Any]:
        """Extract the memories of a thread.

        Return the job's result as a dict, which DBOS stores. An error of the extraction is recorded
        as a failure of the job and is not raised.
        """
        result: dict[str, Any] = {"thread_id": job.thread_id, "namespace": list(job.namespace)}
        if self._stop.is_set():
            return result
        self._running.add(job.key)
        try:
            if (report := self._extract_and_get_report_within_time_limit(job)) is not None:
                result["report"] = report
                # If another worker has already extracted memories from the thread, the report's
                # message count is 0.
                if report["messages"]:
                    self._log_job_and_call_on_job(replace(job, state="done", report=report))
        except BaseException as exc:
            self._record_failure(
                job,
                make_storable(f"{type(exc).__name__}: {exc!s:.500}"),
                is_final=_would_fail_on_retry(exc),
                exc=exc,
            )
        finally:
            self._running.discard(job.key)
        return result

    def _extract_and_get_report_within_time_limit(
        self, job: ExtractionJob
    ) -> dict[str, Any] | None:
        """Extract memories in a separate OS thread, with a time limit of `Pace.limit_s` seconds.

        Returns:
            The report as a dict, or None if the extraction was abandoned because of `stop`.

        Raises:
            TimeoutError: The extraction took longer than `Pace.limit_s`.
        """
        extract = partial(self.extraction.extract, job.thread_id, job.config)
        # Use daemon threads, so that an extraction that hangs does not keep the process alive.
        threads = ThreadPool(1, "perdure-extraction", is_permanent=False)
        future: Future[ExtractionReport] = threads.submit(extract, is_async=False)
        end = time.monotonic() + self.pace.limit_s
        while not wait([future], min(_TICK_BOUNDS_S[0], max(0.0, end - time.monotonic()))).done:
            if self._abandon.is_set():
                return None
            if time.monotonic() >= end:
                raise TimeoutError(f"the extraction took more than {self.pace.limit_s:g} s")
        return asdict(future.result())

    def _record_failure(
        self,
        job: ExtractionJob,
        error: str,
        *,
        is_final: bool = False,
        exc: BaseException | None = None,
    ) -> None:
        """Record a failed extraction in the thread's watermark, log it, and call `on_job`.

        Record no failure if the thread was deleted or the worker stored its result before it died.

        Args:
            job: The job.
            error: The error message.
            is_final: Whether the extraction would fail again if it were retried.
            exc: The error, or None if the job's worker was lost.
        """
        adapter, name = self.extraction.get_adapter(), self.extraction.extractor.name
        for _ in range(3):
            try:
                heads = self.extraction.saver.checkpoints(job.thread_id, checkpoint_ns="", limit=1)
            # Ignore a thread that was deleted after the job was queued.
            except errors.UnknownThread:
                self._due.remove_thread_from_cache(job.thread_id)
                return
            head = heads[0].checkpoint_id if heads else None
            watermark = run_operation(read_watermark(adapter, job.namespace, job.thread_id, name))
            # The watermark stores the last checkpoint from which memories were extracted. If this
            # checkpoint is the head of the thread, the worker stored its result before the worker
            # died.
            if exc is None and watermark.checkpoint_id == head:
                return
            watermark = watermark.with_failure(error, datetime.now(UTC), head, final=is_final)
            # On a version conflict, read the watermark again and retry, because another extraction
            # has changed it.
            with suppress(errors.VersionConflict):
                run_operation(adapter.write([watermark.build_put(job.namespace, job.thread_id)]))
                state: State = (
                    "dead" if is_final or watermark.attempts > self.pace.retries else "retrying"
                )
                self._log_job_and_call_on_job(
                    replace(job, state=state, attempts=watermark.attempts, error=error), exc
                )
                return

    def _log_job_and_call_on_job(
        self, job: ExtractionJob, exc: BaseException | None = None
    ) -> None:
        """Log a job with its current state, and call `on_job`."""
        level = {"done": logging.INFO, "dead": logging.ERROR}.get(job.state, logging.WARNING)
        logger.log(level, "%s", job, exc_info=None if isinstance(exc, errors.PerdureError) else exc)
        try:
            if self._on_job is not None:
                self._on_job(job)
        except Exception:
            logger.exception("on_job=%r failed with %s", self._on_job, job)


def run_worker(background: Background) -> None:
    """Run a worker in the main thread until SIGINT or SIGTERM, then wait for its extractions."""
    check_instance(
        "background", background.work and background, Background, "a Background with work=True"
    )
    stop_requested, signals = threading.Event(), (signal.SIGINT, signal.SIGTERM)
    previous_handlers = {
        number: signal.signal(number, lambda *_: stop_requested.set()) for number in signals
    }
    with ExitStack() as stack:
        for number, handler in previous_handlers.items():
            stack.callback(signal.signal, number, handler)
        with background:
            # Pass a timeout to `wait`, because on some platforms signals cannot interrupt a wait
            # without a timeout.
            while not stop_requested.wait(1.0):
                pass
            # Restore the previous signal handlers, so that a second signal ends the process at
            # once.
            stack.close()
            background.stop()


def _would_fail_on_retry(exc: BaseException) -> bool:
    """Return whether an extraction that failed with `exc` would fail again if retried."""
    final = isinstance(exc, errors.ConfigurationError | errors.SerializationError)
    cause = exc.__cause__
    return (
        final
        or model_call.is_permanent_failure(exc)
        or (cause is not None and _would_fail_on_retry(cause))
    )


class JobQueue:
    """A queue of extraction jobs that is stored in a DBOS database.

    Args:
        database: A file, or `"postgresql://…"`. None means a temporary file.
        schema: The Postgres schema of the queue.
    """

    def __init__(self, database: str | None, schema: str) -> None:
        self._schema = schema
        with ExitStack() as stack:
            self._url, self._lock_path_prefix = _build_queue_url_and_lock_path_prefix(
                database, stack
            )
            with _translate_database_errors("open"):
                _refuse_transaction_pooler(self._url)
                DBOS.migrate(self._url, schema=schema)
                self._client = DBOSClient(
                    system_database_url=self._url,
                    dbos_system_schema=schema,
                    serializer=DBOSPortableJSONSerializer(),
                    system_database_pool_size=3,
                    application_name=_APPLICATION_NAME,
                    retry_connection_errors=False,
                )
            stack.callback(self._client.destroy)
            self.close = stack.pop_all().close

    def put(self, job: ExtractionJob) -> None:
        """Enqueue a job, unless a job with the same key is already in the queue."""
        options: Any = {
            "workflow_name": _EXTRACT_WORKFLOW_NAME,
            "queue_name": _QUEUE_NAME,
            "app_version": _WORKFLOW_VERSION,
            "deduplication_id": job.key,
            "duplication_policy": "return-existing",
        }
        with _translate_database_errors("write to"):
            self._client.enqueue(
                options, job.thread_id, list(job.namespace), dict(job.configurable)
            )

    def read_unfinished_jobs(self) -> dict[str, bool]:
        """Return the keys of unfinished jobs in a dict; the value is True if the job is running."""
        rows = self._list_workflows(["ENQUEUED", "PENDING"], load_input=False)
        return {str(row.deduplication_id): row.status == "PENDING" for row in rows}

    def list_done_jobs(self) -> list[ExtractionJob]:
        """Return the jobs that were completed in the last 24 hours, oldest first.

        If more than 1,000 jobs were completed in the last 24 hours, only the latest 1,000 are
        returned.
        """
        rows = self._list_workflows("SUCCESS", sort_desc=True, limit=1_000, load_input=False)
        return [
            ExtractionJob(
                **{**row.output, "namespace": tuple(row.output["namespace"])},
                state="done",
                at=datetime.fromtimestamp(row.completed_at / 1e3, UTC),
            )
            for row in reversed(rows)
            if isinstance(row.output, dict) and "report" in row.output and row.completed_at
        ]

    def cancel_lost_jobs(self, max_run_s: float) -> list[ExtractionJob]:
        """Cancel jobs that have been running for more than `max_run_s` seconds, and return them."""
        oldest_ms = (time.time() - max_run_s) * 1e3
        return self._cancel_workflows(
            [
                row
                for row in self._list_workflows("PENDING")
                if (row.dequeued_at or oldest_ms) < oldest_ms
            ]
        )

    def delete_old_jobs(self) -> None:
        """Delete jobs that ended more than 24 hours ago."""
        day_ago = (datetime.now(UTC) - timedelta(days=1)).isoformat()
        old_workflows = self._list_workflows(
            ["SUCCESS", "ERROR", "CANCELLED"],
            completed_before=day_ago,
            load_input=False,
            load_output=False,
        )
        with _translate_database_errors("write to"):
            self._client.delete_workflows([row.workflow_id for row in old_workflows])

    def set_extraction_schedule(self, cron: str | None, timezone: str | None) -> None:
        """Schedule memory extraction from all threads, or remove the schedule if `cron` is None.

        Raises:
            ConfigurationError: The cron or the time zone is invalid.
        """
        schedule: Any = {
            "schedule_name": _EXTRACT_ALL_WORKFLOW_NAME,
            "workflow_name": _EXTRACT_ALL_WORKFLOW_NAME,
            "schedule": cron,
            "cron_timezone": timezone,
            "application_name": _APPLICATION_NAME,
        }
        with _translate_database_errors("write to"):
            if cron is None:
                self._client.delete_schedule(_EXTRACT_ALL_WORKFLOW_NAME)
                return
            try:
                self._client.apply_schedules([schedule])
            except dbos_errors.DBOSException as exc:
                raise ConfigurationError(
                    f"cron={cron!r} with timezone={timezone!r} is not a valid schedule: "
                    f"{exc.message}; expected five fields, like '0 3 * * *', and a zone like "
                    "'Europe/Berlin'"
                ) from exc

    @contextmanager
    def run_worker_and_yield_lost_jobs(
        self,
        max_parallel_jobs: int,
        extract: Callable[[ExtractionJob], dict[str, Any]],
        extract_all: Callable[[], Any],
    ) -> Iterator[list[ExtractionJob]]:
        """Run a worker for queued jobs in this process until the context manager exits.

        Args:
            max_parallel_jobs: How many jobs run at the same time.
            extract: Runs a job.
            extract_all: A function that queues all threads. The function is called at each time of
                the schedule.

        Yields:
            The unfinished jobs of a worker that had the same id and died. They have been cancelled.
        """
        with ExitStack() as stack:
            name = self._acquire_worker_id(stack)
            config: Any = {
                "name": _APPLICATION_NAME,
                "system_database_url": self._url,
                "dbos_system_schema": self._schema,
                "sys_db_pool_size": max_parallel_jobs + _DBOS_CONNECTIONS,
                "serializer": DBOSPortableJSONSerializer(),
                "application_version": _WORKFLOW_VERSION,
                "executor_id": name,
                "log_level": "ERROR",
                "notification_listener_polling_interval_sec": _POLL_INTERVAL_S,
                "enable_otlp": False,
            }
            logger = logging.getLogger("dbos")
            # DBOS changes the level of its logger and does not restore it. Restore the level when
            # the exit stack is closed.
            stack.callback(logger.setLevel, logger.level)
            with _translate_database_errors("open"):
                if not _active_worker:
                    DBOS(config=config)
                if (
                    _active_worker or DBOS.executor_id != name
                ):  # DBOS(…) returns the existing instance, if there is one.
                    raise ConfigurationError(
                        "DBOS is already running in this process, and a process can run only one "
                        "instance of DBOS; stop the other instance, or create this Background "
                        "with work=False and run `perdure worker` as a separate process"
                    )
                stack.callback(DBOS.destroy)
                _active_worker.append((extract, extract_all))
                stack.callback(_active_worker.clear)
                self._client.register_queue(
                    _QUEUE_NAME,
                    worker_concurrency=max_parallel_jobs,
                    polling_interval_sec=_POLL_INTERVAL_S,
                )
                for workflow, function in (
                    (_EXTRACT_WORKFLOW_NAME, _run_extraction_job),
                    (_EXTRACT_ALL_WORKFLOW_NAME, _extract_all_workflow),
                ):
                    DBOS.workflow(name=workflow)(function)
                DBOS.listen_queues([_QUEUE_NAME])
                lost = self._cancel_workflows(self._list_workflows("PENDING", executor_id=name))
                DBOS.launch()
            yield lost

    def _acquire_worker_id(self, stack: ExitStack) -> str:
        """Reserve an unused worker number on this machine, and return the worker id."""
        for number in count():
            with suppress(TimeoutError):
                path = f"{self._lock_path_prefix}.worker-{number}"
                stack.enter_context(file_lock(path, 0, self._lock_path_prefix))
                break
        if not self._url.startswith(_POSTGRES):
            return f"{socket.gethostname()}/{number}"
        # Several containers may have the same host name, so the host name does not identify a
        # worker.
        id_file = Path(f"{self._lock_path_prefix}.worker-{number}.id")
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(8), encoding="ascii")
        return f"{socket.gethostname()}/{id_file.read_text(encoding='ascii')}"

    def _list_workflows(self, status: str | list[str], **options: Any) -> list[WorkflowStatus]:
        """List the workflows of extraction jobs that have one of the given statuses."""
        options |= {
            "status": status,
            "name": _EXTRACT_WORKFLOW_NAME,
            "application_name": _APPLICATION_NAME,
        }
        with _translate_database_errors("read"):
            return self._client.list_workflows(**options)

    def _cancel_workflows(self, workflows: list[WorkflowStatus]) -> list[ExtractionJob]:
        """Cancel DBOS workflows, and return the extraction jobs that they belong to."""
        with _translate_database_errors("write to"):
            self._client.cancel_workflows([row.workflow_id for row in workflows])
        return [_build_job(*(row.input or {"args": ()})["args"]) for row in workflows]


def _run_extraction_job(
    thread_id: str, namespace: list[str], configurable: dict[str, str]
) -> dict[str, Any]:
    """Run an extraction job in this process's worker. DBOS calls this function for each job."""
    return _active_worker[0][0](_build_job(thread_id, namespace, configurable))


def _extract_all_workflow(scheduled_at: datetime, context: Any) -> None:
    """Queue all threads. DBOS calls this function at each scheduled time."""
    _active_worker[0][1]()


def _build_job(thread_id: str, namespace: list[str], configurable: dict[str, str]) -> ExtractionJob:
    return ExtractionJob(thread_id, tuple(namespace), "running", configurable=configurable)


def resolve_queue_location_and_schema(database: Any, store: Any) -> tuple[str | None, str]:
    """Return the location of the queue's database (a path or URL), and its Postgres schema.

    Args:
        database: The file or URL that the application chose, or None for the location that belongs
            to the store's database.
        store: The store.

    Returns:
        A path, a URL, or None for a temporary file; and the schema.

    Raises:
        ConfigurationError: `database` is neither a file nor a URL, or it is None and the store was
            opened without a fixed DSN.
    """
    store_location, schema = getattr(
        getattr(store, "database", None), "job_queue_location", None
    ) or (
        None,
        "",
    )
    schema = schema or _DEFAULT_SCHEMA
    if database is None and store_location == "":
        raise ConfigurationError(
            "Background cannot find a database for its queue, because the store's dsn= is a "
            "function or a pool; pass Background(database=…) with a file path or a DSN such as "
            "'postgresql://user@host/name'"
        )
    if database is None:
        return store_location, schema
    path = os.fsdecode(database) if isinstance(database, str | os.PathLike) else ""
    if path.startswith(("postgresql://", "postgres://")):
        return _POSTGRES + path.split("://", 1)[1], schema
    if path and "://" not in path and is_dsn(path):
        from perdure.storage.postgres_dsn import format_uri, normalize_dsn

        return format_uri(normalize_dsn(path)), schema
    if not path or "://" in path or "?" in path:  # "?" cannot be part of a path in a URL
        raise ConfigurationError(
            f"the argument 'database' is {database!r:.80}; expected the path of a file, or a DSN "
            "such as 'postgresql://user@host/name'"
        )
    return os.path.abspath(path), schema


def _refuse_transaction_pooler(url: str) -> None:
    """Raise an error if the URL points to a connection pooler in transaction mode.

    In transaction mode, a pooler may run two transactions of one client connection in different
    server sessions. DBOS uses LISTEN and session-level locks, so each of its client connections
    must keep the same server session.

    Raises:
        ConfigurationError: The URL points to a pooler in transaction mode.
    """
    if not url.startswith(_POSTGRES):
        return
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"))
    session = text("SELECT pg_backend_pid()")
    try:
        with engine.connect() as first_session, engine.connect() as second_session:
            first_pid = first_session.scalar(session)
            first_session.commit()
            other_pid, last_pid = second_session.scalar(session), first_session.scalar(session)
    finally:
        engine.dispose()
    if first_pid != last_pid or other_pid == first_pid:
        raise ConfigurationError(
            f"{engine.url!r} is a connection pooler in transaction mode, which the queue cannot "
            "use; pass the DSN of the database server itself, as Background(database=…) or perdure "
            "worker --database"
        )


def _build_queue_url_and_lock_path_prefix(
    database: str | None, stack: ExitStack
) -> tuple[str, str]:
    """Return the queue's SQLAlchemy URL, and the path prefix of its workers' lock files."""
    if database is not None and database.startswith(_POSTGRES):
        name = sha256(database.encode()).hexdigest()[:16]
        return database, os.path.join(tempfile.gettempdir(), f"perdure-{name}")
    if database is None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="perdure-"))
        database = os.path.join(folder, "jobs")
    with suppress(OSError):  # DBOS reports a path that cannot be created
        create_private_file(database)
    return f"sqlite:///{quote(database, safe='/:' + os.sep)}", database


@contextmanager
def _translate_database_errors(action: str) -> Iterator[None]:
    """Convert SQLAlchemy and DBOS errors to `StorageUnavailable`.

    `action` is the verb to use in the error message: `"open"`, `"read"` or `"write to"`.
    """
    try:
        yield
    except (SQLAlchemyError, dbos_errors.DBOSException) as exc:
        raise StorageUnavailable(f"cannot {action} the queue's database: {exc!s:.300}") from exc
