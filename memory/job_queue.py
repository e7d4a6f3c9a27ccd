"""The queue of background extraction: jobs as workflows of DBOS, in SQLite or Postgres.

DBOS hands each job to one worker, and recovers what a killed worker had when that is started again
under its name. Importing this takes a second: it imports DBOS.
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

EXTRACT: Final = "perdure.extract"
EXTRACT_ALL: Final = "perdure.extract_all"
QUEUE: Final = "perdure.extraction"
VERSION: Final = "2"  # of what workflows take; DBOS gives a job to workers of its own version only
SCHEMA: Final = "perdure"  # where in a Postgres database the tables are
_POSTGRES: Final = ("postgresql://", "postgres://")
_POLL_S: Final = 0.25
_CONNECTIONS: Final = 6  # of DBOS's own threads
_DONE: Final = 1_000  # jobs that are done, of those that are listed
_KEPT: Final = timedelta(days=1)  # for how long they are


class StoppedEarly(Exception):
    """The worker was stopped before the extraction ended; the thread is due again."""


class Work(NamedTuple):
    """What a worker does.

    Attributes:
        extract: Extracts a thread, of all of it with `True`; returns what came of it.
        extract_all: Puts all that is not extracted on the queue; returns how much that is.
        tries: How often what was cut off is recovered.
    """

    extract: Callable[[Job, bool], dict[str, Any]]
    extract_all: Callable[[], int]
    tries: int


_working: list[Work] = []  # of this process, at most one


class JobQueue:
    """The jobs on the queue, for whoever puts some there, looks, or works.

    Args:
        database: A file, or `"postgresql://…"`; None: a temporary file.

    Raises:
        StorageUnavailable: The database cannot be reached.
    """

    def __init__(self, database: str | None) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(_quiet())
        try:
            self._url, self._locks = _places(database, self._stack)
            with _mapped("opened"):
                DBOS.migrate(self._url, schema=SCHEMA)
                self._client = DBOSClient(
                    system_database_url=self._url,
                    dbos_system_schema=SCHEMA,
                    serializer=DBOSPortableJSONSerializer(),
                    system_database_pool_size=3,
                    application_name=SCHEMA,
                    retry_connection_errors=False,
                )
            self._stack.callback(self._client.destroy)
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        """Let go of the database."""
        self._stack.close()

    def put(self, job: Job, *, anew: bool = False) -> None:
        """Put a job on the queue, unless it is there."""
        options: Any = {
            "workflow_name": EXTRACT,
            "queue_name": QUEUE,
            "deduplication_id": job.key + anew * "-anew",
            "duplication_policy": "return-existing",
            "app_version": VERSION,
        }
        given = job.thread_id, list(job.namespace), dict(job.configurable), anew
        with _mapped("written"):
            self._client.enqueue(options, *given)

    def live(self) -> dict[str, bool]:
        """The keys of the jobs on the queue, each with whether a worker has it."""
        found = self._listed(["ENQUEUED", "DELAYED", "PENDING"], load_input=False)
        return {str(each.deduplication_id): each.status == "PENDING" for each in found}

    def done(self) -> list[Job]:
        """The jobs that were done lately, oldest first."""
        jobs = []
        for each in self._listed("SUCCESS", sort_desc=True, limit=_DONE, load_input=False):
            if isinstance(each.output, dict) and "report" in each.output and each.completed_at:
                told = {**each.output, "namespace": tuple(each.output["namespace"])}
                at = datetime.fromtimestamp(each.completed_at / 1e3, UTC)
                jobs.append(Job(**told, state="done", at=at))
        return jobs[::-1]

    def take_back(self, limit_s: float) -> list[Job]:
        """Take from the queue what workers had that are gone, and what ended every worker.

        Args:
            limit_s: After how long a worker of another machine is taken to be gone.
        """
        before = time.time() - limit_s
        lost = [
            each
            for each in self._listed("PENDING")
            if (each.dequeued_at or time.time() * 1e3) / 1e3 < before
            or not self._is_alive(each.executor_id or "")
        ]
        with _mapped("written"):
            self._client.cancel_workflows([each.workflow_id for each in lost])
        return [_job(each) for each in lost]

    def fatal(self) -> list[Job]:
        """Take from the queue what was recovered too often."""
        found = self._listed("MAX_RECOVERY_ATTEMPTS_EXCEEDED")
        if found:
            self._delete(found)
        return [_job(each) for each in found]

    def forget(self) -> None:
        """Delete what ended long ago."""
        before = (datetime.now(UTC) - _KEPT).isoformat()
        ended = ["SUCCESS", "ERROR", "CANCELLED"]
        old = self._listed(ended, completed_before=before, load_input=False, load_output=False)
        if old:
            self._delete(old)

    def every(self, cron: str | None, timezone: str | None) -> None:
        """Put all that is not extracted on the queue by the clock; None: not any more.

        Raises:
            ConfigurationError: The expression, or the time zone, is malformed.
        """
        schedule: Any = {
            "schedule_name": EXTRACT_ALL,
            "workflow_name": EXTRACT_ALL,
            "schedule": cron,
            "cron_timezone": timezone,
            "application_name": SCHEMA,
        }
        with _mapped("written"):
            if cron is None:
                self._client.delete_schedule(EXTRACT_ALL)
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
        """Work in this process, until the context ends.

        Raises:
            ConfigurationError: This process runs DBOS already.
            StorageUnavailable: DBOS refuses the database.
        """
        with ExitStack() as stack:
            name = self._slot(stack)
            with _mapped("opened"):
                if not _working:
                    DBOS(config=self._config(name, workers))
                if _working or DBOS.executor_id != name:  # DBOS(…) gives the one that is there
                    raise ConfigurationError(
                        "this process runs DBOS already, and it can be run once only; stop the "
                        "other, or make this Background with work=False and run `perdure worker`"
                    )
                stack.callback(DBOS.destroy)
                _working.append(work)
                stack.callback(_working.clear)
                self._client.register_queue(
                    QUEUE, worker_concurrency=workers, polling_interval_sec=_POLL_S
                )
                DBOS.workflow(name=EXTRACT, max_recovery_attempts=work.tries)(_extract)
                DBOS.workflow(name=EXTRACT_ALL, max_recovery_attempts=work.tries)(_extract_all)
                DBOS.listen_queues([QUEUE])
                DBOS.launch()
            yield

    def _config(self, name: str, workers: int) -> Any:
        return {
            "name": SCHEMA,
            "system_database_url": self._url,
            "dbos_system_schema": SCHEMA,
            "sys_db_pool_size": workers + _CONNECTIONS,
            "serializer": DBOSPortableJSONSerializer(),
            "application_version": VERSION,
            "executor_id": name,
            "log_level": "ERROR",
            "notification_listener_polling_interval_sec": _POLL_S,
            "enable_otlp": False,
        }

    def _slot(self, stack: ExitStack) -> str:
        """The first name of a worker of this machine that no process has."""
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
        """Whether a process of this machine has a worker's name; of another machine it may."""
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
                status=status, name=EXTRACT, application_name=SCHEMA, **options
            )

    def _delete(self, found: list[WorkflowStatus]) -> None:
        with _mapped("written"):
            self._client.delete_workflows([each.workflow_id for each in found])


def _extract(
    thread_id: str, namespace: list[str], configurable: dict[str, str], anew: bool
) -> dict[str, Any]:
    job = Job(thread_id, tuple(namespace), "running", configurable=configurable)
    return _working[0].extract(job, anew)


def _extract_all(scheduled_at: datetime, context: Any) -> int:
    return _working[0].extract_all()


def _job(status: WorkflowStatus) -> Job:
    thread_id, namespace, configurable, _ = (status.input or {"args": ()})["args"]
    return Job(thread_id, tuple(namespace), "running", configurable=configurable)


def place_of(given: Any, store: Any) -> str | None:
    """The database of a queue: a path or a URL of Postgres; None: nowhere that lasts.

    Args:
        given: A file or a URL; None: a file beside the store's.
        store: The store of the memories.

    Raises:
        ConfigurationError: It is something else.
    """
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
    """The URL of the database, and what the names of its workers' lock files begin with."""
    if database is not None and database.startswith(_POSTGRES):
        name = sha256(database.encode()).hexdigest()[:16]
        return database, os.path.join(tempfile.gettempdir(), f"perdure-{name}")
    if database is None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="perdure-"))
        database = os.path.join(folder, "jobs")
    return f"sqlite:///{quote(database, safe='/:' + os.sep)}", database


@contextmanager
def _mapped(done: str) -> Iterator[None]:
    """Turn what DBOS and its driver raise into what perdure raises."""
    try:
        yield
    except (SQLAlchemyError, dbos_errors.DBOSException) as exc:
        raise StorageUnavailable(f"the queue's database cannot be {done}: {exc!s:.300}") from exc


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep DBOS from adding a log handler of its own, and from logging what is no fault."""
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
