"""The queue of background extraction: workflows of DBOS, which gives each job to one worker.

Importing this module takes a second: it imports DBOS.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from perdure.errors import ConfigurationError, MissingDependency, StorageUnavailable
from perdure.memory.due import ExtractionJob
from perdure.settings import is_dsn
from perdure.storage.locks import file_lock

try:
    from dbos import DBOS, DBOSClient, DBOSPortableJSONSerializer, WorkflowStatus
    from dbos import error as dbos_errors
    from sqlalchemy import create_engine, make_url, text
    from sqlalchemy.exc import SQLAlchemyError
except ImportError as exc:
    raise MissingDependency(
        'background extraction needs DBOS: pip install ".[background]" in a checkout'
    ) from exc

_EXTRACT: Final = "perdure.extract"
_EXTRACT_ALL: Final = "perdure.extract_all"
_QUEUE: Final = "perdure.extraction"
logging.getLogger("dbos").addHandler(logging.NullHandler())  # else DBOS adds one that prints
_VERSION: Final = "2"  # of the workflows; DBOS gives a job to workers of its version only
_NAME: Final = "perdure"  # of the application
_SCHEMA: Final = "perdure_jobs"  # of the tables in a database that is not the store's
_POSTGRES: Final = "postgresql://"
_POLL_S: Final = 0.25
_CONNECTIONS: Final = 6  # of DBOS's own threads
_working: list[
    tuple[Callable[[ExtractionJob], dict[str, Any]], Callable[[], object]]
] = []  # at most one


class JobQueue:
    """The queue in a file or at `"postgresql://…"`; None: in a temporary file."""

    def __init__(self, database: str | None, schema: str) -> None:
        self._schema = schema
        with ExitStack() as stack:
            self._url, self._locks = _places(database, stack)
            with _mapped("opened"):
                _check_sessions(self._url)
                DBOS.migrate(self._url, schema=schema)
                self._client = DBOSClient(
                    system_database_url=self._url,
                    dbos_system_schema=schema,
                    serializer=DBOSPortableJSONSerializer(),
                    system_database_pool_size=3,
                    application_name=_NAME,
                    retry_connection_errors=False,
                )
            stack.callback(self._client.destroy)
            self.close = stack.pop_all().close

    def put(self, job: ExtractionJob) -> None:
        """Put a job on the queue, unless it is there."""
        options: Any = {"workflow_name": _EXTRACT, "queue_name": _QUEUE, "app_version": _VERSION}
        options |= {"deduplication_id": job.key, "duplication_policy": "return-existing"}
        given = (job.thread_id, list(job.namespace), dict(job.configurable))
        with _mapped("written"):
            self._client.enqueue(options, *given)

    def live(self) -> dict[str, bool]:
        """The keys of the jobs on the queue, each with whether a worker has it."""
        found = self._listed(["ENQUEUED", "PENDING"], load_input=False)
        return {str(each.deduplication_id): each.status == "PENDING" for each in found}

    def done(self) -> list[ExtractionJob]:
        """The jobs that were done within a day, oldest first."""
        jobs = []
        for each in self._listed("SUCCESS", sort_desc=True, limit=1_000, load_input=False):
            if isinstance(each.output, dict) and "report" in each.output and each.completed_at:
                result = {**each.output, "namespace": tuple(each.output["namespace"])}
                at = datetime.fromtimestamp(each.completed_at / 1e3, UTC)
                jobs.append(ExtractionJob(**result, state="done", at=at))
        return jobs[::-1]

    def take_lost(self, limit_s: float) -> list[ExtractionJob]:
        """Take the jobs from the queue that a worker has had for longer than the limit."""
        before = (time.time() - limit_s) * 1e3
        taken = self._listed("PENDING")
        return self._taken([each for each in taken if (each.dequeued_at or before) < before])

    def forget(self) -> None:
        """Delete jobs that ended more than a day ago."""
        before = (datetime.now(UTC) - timedelta(days=1)).isoformat()
        ended = ["SUCCESS", "ERROR", "CANCELLED"]
        old = self._listed(ended, completed_before=before, load_input=False, load_output=False)
        with _mapped("written"):
            self._client.delete_workflows([each.workflow_id for each in old])

    def every(self, cron: str | None, timezone: str | None) -> None:
        """Call `extract_all` on a schedule; None: end the schedule."""
        schedule: Any = {"schedule_name": _EXTRACT_ALL, "workflow_name": _EXTRACT_ALL}
        schedule |= {"schedule": cron, "cron_timezone": timezone, "application_name": _NAME}
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
    def working(
        self,
        workers: int,
        extract: Callable[[ExtractionJob], dict[str, Any]],
        extract_all: Callable[[], Any],
    ) -> Iterator[list[ExtractionJob]]:
        """Work in this process until the context ends; the jobs that an ended worker left."""
        with ExitStack() as stack:
            name = self._slot(stack)
            config: Any = {
                "name": _NAME,
                "system_database_url": self._url,
                "dbos_system_schema": self._schema,
                "sys_db_pool_size": workers + _CONNECTIONS,
                "serializer": DBOSPortableJSONSerializer(),
                "application_version": _VERSION,
                "executor_id": name,
                "log_level": "ERROR",
                "notification_listener_polling_interval_sec": _POLL_S,
                "enable_otlp": False,
            }
            logger = logging.getLogger("dbos")
            stack.callback(logger.setLevel, logger.level)  # DBOS sets it, and leaves it so
            with _mapped("opened"):
                if not _working:
                    DBOS(config=config)
                if _working or DBOS.executor_id != name:  # DBOS(…) returns one that exists
                    raise ConfigurationError(
                        "this process runs DBOS already, and it can be run once only; stop the "
                        "other, or make this Background with work=False and run `perdure worker`"
                    )
                stack.callback(DBOS.destroy)
                _working.append((extract, extract_all))
                stack.callback(_working.clear)
                self._client.register_queue(
                    _QUEUE, worker_concurrency=workers, polling_interval_sec=_POLL_S
                )
                for workflow, function in ((_EXTRACT, _extract), (_EXTRACT_ALL, _extract_all)):
                    DBOS.workflow(name=workflow)(function)
                DBOS.listen_queues([_QUEUE])
                lost = self._taken(self._listed("PENDING", executor_id=name))
                DBOS.launch()
            yield lost

    def _slot(self, stack: ExitStack) -> str:
        for number in count():
            with suppress(TimeoutError):
                stack.enter_context(file_lock(f"{self._locks}.worker-{number}", 0))
                break
        if not self._url.startswith(_POSTGRES):
            return f"{socket.gethostname()}/{number}"
        # containers may share a host's name and not its temporary files
        known = Path(f"{self._locks}.worker-{number}.id")
        if not known.exists():
            known.write_text(secrets.token_hex(8), encoding="ascii")
        return f"{socket.gethostname()}/{known.read_text(encoding='ascii')}"

    def _listed(self, status: str | list[str], **options: Any) -> list[WorkflowStatus]:
        options |= {"status": status, "name": _EXTRACT, "application_name": _NAME}
        with _mapped("read"):
            return self._client.list_workflows(**options)

    def _taken(self, found: list[WorkflowStatus]) -> list[ExtractionJob]:
        with _mapped("written"):
            self._client.cancel_workflows([each.workflow_id for each in found])
        return [_job(*(each.input or {"args": ()})["args"]) for each in found]


def _extract(thread_id: str, namespace: list[str], configurable: dict[str, str]) -> dict[str, Any]:
    return _working[0][0](_job(thread_id, namespace, configurable))


def _extract_all(scheduled_at: datetime, context: Any) -> None:
    _working[0][1]()


def _job(thread_id: str, namespace: list[str], configurable: dict[str, str]) -> ExtractionJob:
    return ExtractionJob(thread_id, tuple(namespace), "running", configurable=configurable)


def place_of(given: Any, store: Any) -> tuple[str | None, str]:
    """The given file or URL, else the place that the store's database has for it; and a schema."""
    place, schema = getattr(getattr(store, "database", None), "queue_place", None) or (None, "")
    schema = schema or _SCHEMA
    if given is None:
        return place, schema
    found = os.fsdecode(given) if isinstance(given, str | os.PathLike) else ""
    if found.startswith(("postgresql://", "postgres://")):
        return _POSTGRES + found.split("://", 1)[1], schema
    if found and "://" not in found and is_dsn(found):
        from perdure.storage.postgres_connection import checked_dsn, uri

        return uri(checked_dsn(found)), schema
    if not found or "://" in found or "?" in found:  # the last is no part of a path in a URL
        raise ConfigurationError(
            f"database is {given!r:.80}; expected a file, or 'postgresql://user@host/name'"
        )
    return os.path.abspath(found), schema


def _check_sessions(url: str) -> None:
    """Refuse a pooler that gives each transaction another session: DBOS listens, and locks."""
    if not url.startswith(_POSTGRES):
        return
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"))
    asked = text("SELECT pg_backend_pid()")
    try:
        with engine.connect() as one, engine.connect() as other:
            before = one.scalar(asked)
            one.commit()
            taken, after = other.scalar(asked), one.scalar(asked)
    finally:
        engine.dispose()
    if before != after or taken == before:
        raise ConfigurationError(
            f"{engine.url!r} leads to a pooler that gives each transaction another session, and "
            "the queue needs sessions: give the DSN of the server itself, as Background(database=…)"
            " or perdure worker --database"
        )


def _places(database: str | None, stack: ExitStack) -> tuple[str, str]:
    if database is not None and database.startswith(_POSTGRES):
        name = sha256(database.encode()).hexdigest()[:16]
        return database, os.path.join(tempfile.gettempdir(), f"perdure-{name}")
    if database is None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="perdure-"))
        database = os.path.join(folder, "jobs")
    return f"sqlite:///{quote(database, safe='/:' + os.sep)}", database


@contextmanager
def _mapped(done: str) -> Iterator[None]:
    try:
        yield
    except (SQLAlchemyError, dbos_errors.DBOSException) as exc:
        raise StorageUnavailable(f"the queue's database cannot be {done}: {exc!s:.300}") from exc
