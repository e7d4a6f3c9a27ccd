"""The queue of background extraction: jobs as workflows of DBOS, in SQLite or Postgres.

DBOS gives each job to one worker, and recovers the jobs of a killed worker when it starts again
under the same name. Importing this module takes a second: it imports DBOS.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from filelock import FileLock, Timeout

from perdure.errors import ConfigurationError, MissingDependency, StorageUnavailable
from perdure.memory.due import Job

try:
    from dbos import DBOS, DBOSClient, DBOSPortableJSONSerializer, WorkflowStatus
    from dbos import error as dbos_errors
    from sqlalchemy.exc import SQLAlchemyError
except ImportError as exc:
    raise MissingDependency(
        'background extraction needs DBOS: pip install "perdure[background]"'
    ) from exc

_EXTRACT: Final = "perdure.extract"
_EXTRACT_ALL: Final = "perdure.extract_all"
_QUEUE: Final = "perdure.extraction"
_VERSION: Final = "2"  # of the workflows; DBOS gives a job to workers of its version only
_SCHEMA: Final = "perdure"  # of the tables in a Postgres database
_POSTGRES: Final = ("postgresql://", "postgres://")
_POLL_S: Final = 0.25
_CONNECTIONS: Final = 6  # of DBOS's own threads
_DONE: Final = 1_000  # jobs that are listed as done
_KEPT: Final = timedelta(days=1)  # how long ended jobs are kept


class StoppedEarly(Exception):
    """The worker was stopped before the extraction ended; the thread is due again."""


class Work(NamedTuple):
    """The functions of a worker: one extracts a thread, the other puts all threads on the queue.

    A job that was cut off is recovered `tries` times.
    """

    extract: Callable[[Job], dict[str, Any]]
    extract_all: Callable[[], int]
    tries: int


_working: list[Work] = []  # at most one in a process


class JobQueue:
    """The queue in a file or at `"postgresql://…"`; None: in a temporary file."""

    def __init__(self, database: str | None) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(_quiet())
        try:
            self._url, self._locks = _places(database, self._stack)
            with _mapped("opened"):
                DBOS.migrate(self._url, schema=_SCHEMA)
                self._client = DBOSClient(
                    system_database_url=self._url,
                    dbos_system_schema=_SCHEMA,
                    serializer=DBOSPortableJSONSerializer(),
                    system_database_pool_size=3,
                    application_name=_SCHEMA,
                    retry_connection_errors=False,
                )
            self._stack.callback(self._client.destroy)
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        """Close the database."""
        self._stack.close()

    def put(self, job: Job) -> None:
        """Put a job on the queue, unless it is there."""
        options: Any = {
            "workflow_name": _EXTRACT,
            "queue_name": _QUEUE,
            "deduplication_id": job.key,
            "duplication_policy": "return-existing",
            "app_version": _VERSION,
        }
        given = job.thread_id, list(job.namespace), dict(job.configurable)
        with _mapped("written"):
            self._client.enqueue(options, *given)

    def live(self) -> dict[str, bool]:
        """The keys of the jobs on the queue, each with whether a worker has it."""
        found = self._listed(["ENQUEUED", "DELAYED", "PENDING"], load_input=False)
        return {str(each.deduplication_id): each.status == "PENDING" for each in found}

    def done(self) -> list[Job]:
        """The jobs that were done within a day, oldest first."""
        jobs = []
        for each in self._listed("SUCCESS", sort_desc=True, limit=_DONE, load_input=False):
            if isinstance(each.output, dict) and "report" in each.output and each.completed_at:
                result = {**each.output, "namespace": tuple(each.output["namespace"])}
                at = datetime.fromtimestamp(each.completed_at / 1e3, UTC)
                jobs.append(Job(**result, state="done", at=at))
        return jobs[::-1]

    def take_lost(self, limit_s: float) -> list[Job]:
        """Take jobs of ended workers from the queue; on other machines, jobs over the limit."""
        before = time.time() - limit_s
        lost = [
            each
            for each in self._listed("PENDING")
            if (each.dequeued_at or time.time() * 1e3) / 1e3 < before
            or not self._is_alive(each.executor_id or "")
        ]
        with _mapped("written"):
            self._client.cancel_workflows([each.workflow_id for each in lost])
        return _jobs(lost)

    def take_fatal(self) -> list[Job]:
        """Take the jobs from the queue that were recovered too often."""
        found = self._listed("MAX_RECOVERY_ATTEMPTS_EXCEEDED")
        if found:
            self._delete(found)
        return _jobs(found)

    def forget(self) -> None:
        """Delete jobs that ended long ago."""
        before = (datetime.now(UTC) - _KEPT).isoformat()
        ended = ["SUCCESS", "ERROR", "CANCELLED"]
        old = self._listed(ended, completed_before=before, load_input=False, load_output=False)
        if old:
            self._delete(old)

    def every(self, cron: str | None, timezone: str | None) -> None:
        """Call `extract_all` on a schedule; None: end the schedule."""
        schedule: Any = {
            "schedule_name": _EXTRACT_ALL,
            "workflow_name": _EXTRACT_ALL,
            "schedule": cron,
            "cron_timezone": timezone,
            "application_name": _SCHEMA,
        }
        with _mapped("written"):
            if cron is None:
                self._client.delete_schedule(_EXTRACT_ALL)
                return
            try:
                self._client.apply_schedules([schedule])
            except dbos_errors.DBOSException as exc:
                raise ConfigurationError(
                    f"cron={cron!r} with timezone={timezone!r} is no schedule: {exc.message}; "
                    "expected five fields, like '0 3 * * *', and a zone like 'Europe/Berlin'"
                ) from exc

    @contextmanager
    def working(self, workers: int, work: Work) -> Iterator[None]:
        """Work in this process until the context ends."""
        with ExitStack() as stack:
            name = self._slot(stack)
            with _mapped("opened"):
                if not _working:
                    DBOS(config=self._config(name, workers))
                if _working or DBOS.executor_id != name:  # DBOS(…) returns one that exists
                    raise ConfigurationError(
                        "this process runs DBOS already, and it can be run once only; stop the "
                        "other, or make this Background with work=False and run `perdure worker`"
                    )
                stack.callback(DBOS.destroy)
                _working.append(work)
                stack.callback(_working.clear)
                self._client.register_queue(
                    _QUEUE, worker_concurrency=workers, polling_interval_sec=_POLL_S
                )
                DBOS.workflow(name=_EXTRACT, max_recovery_attempts=work.tries)(_extract)
                DBOS.workflow(name=_EXTRACT_ALL, max_recovery_attempts=work.tries)(_extract_all)
                DBOS.listen_queues([_QUEUE])
                DBOS.launch()
            yield

    def _config(self, name: str, workers: int) -> Any:
        return {
            "name": _SCHEMA,
            "system_database_url": self._url,
            "dbos_system_schema": _SCHEMA,
            "sys_db_pool_size": workers + _CONNECTIONS,
            "serializer": DBOSPortableJSONSerializer(),
            "application_version": _VERSION,
            "executor_id": name,
            "log_level": "ERROR",
            "notification_listener_polling_interval_sec": _POLL_S,
            "enable_otlp": False,
        }

    def _slot(self, stack: ExitStack) -> str:
        """The first worker's name of this machine that no process has locked."""
        number = 0
        while True:
            lock = FileLock(f"{self._locks}.worker-{number}", thread_local=False)
            try:
                stack.enter_context(lock.acquire(timeout=0))
            except Timeout:
                number += 1
            else:
                return f"{socket.gethostname()}/{number}"

    def _is_alive(self, worker: str) -> bool:
        """Whether a process has a worker's name; on another machine it is taken to have it."""
        host, _, number = worker.rpartition("/")
        if host != socket.gethostname():
            return True
        try:
            with FileLock(f"{self._locks}.worker-{number}", thread_local=False).acquire(timeout=0):
                return False
        except Timeout:
            return True

    def _listed(self, status: str | list[str], **options: Any) -> list[WorkflowStatus]:
        with _mapped("read"):
            return self._client.list_workflows(
                status=status, name=_EXTRACT, application_name=_SCHEMA, **options
            )

    def _delete(self, found: list[WorkflowStatus]) -> None:
        with _mapped("written"):
            self._client.delete_workflows([each.workflow_id for each in found])


def _extract(thread_id: str, namespace: list[str], configurable: dict[str, str]) -> dict[str, Any]:
    return _working[0].extract(_job(thread_id, namespace, configurable))


def _extract_all(scheduled_at: datetime, context: Any) -> int:
    return _working[0].extract_all()


def _job(thread_id: str, namespace: list[str], configurable: dict[str, str]) -> Job:
    return Job(thread_id, tuple(namespace), "running", configurable=configurable)


def _jobs(found: list[WorkflowStatus]) -> list[Job]:
    return [_job(*(each.input or {"args": ()})["args"]) for each in found]


def place_of(given: Any, store: Any) -> str | None:
    """The given file or URL, else a file beside the store's; None: there is none."""
    if given is None:
        path = getattr(getattr(store, "database", None), "path", None)
        return f"{path}.jobs" if isinstance(path, str) and path != ":memory:" else None
    found = os.fsdecode(given) if isinstance(given, str | os.PathLike) else ""
    if found.startswith(_POSTGRES):
        return "postgresql://" + found.split("://", 1)[1]
    if not found or "://" in found or "?" in found:  # the last is no part of a path in a URL
        raise ConfigurationError(
            f"database is {given!r:.80}; expected a file, or 'postgresql://user@host/name'"
        )
    return os.path.abspath(found)


def _places(database: str | None, stack: ExitStack) -> tuple[str, str]:
    """The URL of the database, and the prefix of its workers' lock files."""
    if database is not None and database.startswith(_POSTGRES):
        name = sha256(database.encode()).hexdigest()[:16]
        return database, os.path.join(tempfile.gettempdir(), f"perdure-{name}")
    if database is None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="perdure-"))
        database = os.path.join(folder, "jobs")
    return f"sqlite:///{quote(database, safe='/:' + os.sep)}", database


@contextmanager
def _mapped(done: str) -> Iterator[None]:
    """Raise errors of DBOS and its driver as perdure's."""
    try:
        yield
    except (SQLAlchemyError, dbos_errors.DBOSException) as exc:
        raise StorageUnavailable(f"the queue's database cannot be {done}: {exc!s:.300}") from exc


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep DBOS from adding a log handler, and from logging what is no fault."""
    dbos, silent = logging.getLogger("dbos"), logging.NullHandler()
    level = dbos.level

    def is_fault(record: logging.LogRecord) -> bool:
        stopped = record.exc_info and isinstance(record.exc_info[1], StoppedEarly)
        return record.levelno >= logging.WARNING and not stopped

    dbos.addHandler(silent)
    dbos.addFilter(is_fault)
    try:
        yield
    finally:
        dbos.removeFilter(is_fault)
        dbos.removeHandler(silent)
        dbos.setLevel(level)
