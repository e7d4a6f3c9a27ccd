"""The jobs' database: attempts to form threads as workflows of DBOS, and its schedules.

DBOS keeps them in SQLite or Postgres, hands each to one worker, and remembers how it ended. What is
written there is JSON. Importing this takes a second: it imports DBOS.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from dbos import (
    DBOS,
    DBOSClient,
    DBOSPortableJSONSerializer,
    PortableWorkflowError,
    WorkflowStatus,
)
from dbos import error as dbos_errors
from sqlalchemy.exc import SQLAlchemyError

from perdure.errors import ConfigurationError, StorageUnavailable
from perdure.memory.background.jobs import LOST, Attempt, AttemptId, Status, key_of, stamp_of
from perdure.memory.forming.waiting import Waiting

FORM: Final = "perdure.form"
FORM_ALL: Final = "perdure.form_all"
QUEUE: Final = "perdure"
VERSION: Final = "1"
"""Of what workflows take and return; DBOS gives a job to workers of its own version only."""
SCHEMA: Final = "perdure"
"""Where in a Postgres database the tables are, apart from those of an application's own DBOS."""
KEPT: Final = timedelta(days=1)
"""For how long what is done, or has been overtaken, is remembered."""
_CONNECTIONS: Final = 3
_PAGE: Final = 1000
_LIVE: Final = ["ENQUEUED", "DELAYED", "PENDING"]
_FAILED: Final = ["ERROR", "CANCELLED", "MAX_RECOVERY_ATTEMPTS_EXCEEDED"]
_STATUS: Final[dict[str, Status]] = {
    "ENQUEUED": "queued",
    "DELAYED": "queued",
    "PENDING": "running",
    "SUCCESS": "done",
    "ERROR": "failed",
}


class Ledger:
    """The jobs' database, for one application.

    Args:
        url: Of the database, as SQLAlchemy takes it.
        name: The application's.

    Raises:
        StorageUnavailable: The database cannot be reached.
    """

    def __init__(self, url: str, name: str) -> None:
        self._name = name
        self._quiet = ExitStack()
        self._quiet.enter_context(quiet())
        with mapped("opened"):
            DBOS.migrate(url, schema=SCHEMA)
            self._client = DBOSClient(
                system_database_url=url,
                dbos_system_schema=SCHEMA,
                serializer=DBOSPortableJSONSerializer(),
                system_database_pool_size=_CONNECTIONS,
                application_name=name,
                retry_connection_errors=False,
            )

    def close(self) -> None:
        """Let go of the database."""
        self._client.destroy()
        self._quiet.close()

    def put(self, note: Waiting, number: int) -> None:
        """Put an attempt to form a thread into the queue, unless that very one is there."""
        key, stamp = key_of(note.namespace, note.thread_id), stamp_of(note)
        with mapped("written"):
            self._client.enqueue(
                {
                    "workflow_name": FORM,
                    "queue_name": QUEUE,
                    "workflow_id": str(AttemptId(key, stamp, number, f"{time.time_ns():x}")),
                    "deduplication_id": f"{key}-{stamp}",
                    "duplication_policy": "return-existing",
                    "app_version": VERSION,
                },
                note.thread_id,
                list(note.namespace),
                dict(note.configurable),
                note.since.isoformat(),
                number,
            )

    def unfinished(self) -> list[Attempt]:
        """The attempts that are not done: live ones, failed ones, lost ones."""
        found = self._listed(status=[*_LIVE, *_FAILED], name=FORM)
        return [_attempt(each) for each in found]

    def done(self, limit: int) -> list[Attempt]:
        """Attempts that are done, the newest first."""
        found = self._listed(status="SUCCESS", name=FORM, sort_desc=True, limit=limit)
        return [_attempt(each) for each in found]

    def held_by(self, executor: str) -> int:
        """How many attempts a worker has begun and not ended."""
        return len(
            self._listed(status="PENDING", name=FORM, executor_id=executor, load_input=False)
        )

    def lose(self, attempts: Sequence[Attempt]) -> None:
        """End attempts whose workers are gone."""
        if attempts:
            with mapped("written"):
                self._client.cancel_workflows([str(each.id) for each in attempts])

    def lost_sweeps(self) -> list[tuple[str, str]]:
        """Id and worker of each cron trigger that has begun and not ended."""
        found = self._listed(status="PENDING", name=FORM_ALL, load_input=False)
        return [(each.workflow_id, each.executor_id or "") for each in found]

    def repeat(self, ids: Sequence[str]) -> None:
        """Have cron triggers run once more."""
        with mapped("written"):
            self._client.resume_workflows(list(ids))

    def forget(self, kept: Sequence[Attempt]) -> None:
        """Delete what ended long ago, but for some attempts."""
        spared = {str(each.id) for each in kept}
        before = (datetime.now(UTC) - KEPT).isoformat()
        found = self._listed(
            status=["SUCCESS", *_FAILED],
            completed_before=before,
            limit=_PAGE + len(spared),
            load_input=False,
            load_output=False,
        )
        old = [each.workflow_id for each in found if each.workflow_id not in spared]
        if old:
            with mapped("written"):
                self._client.delete_workflows(old)

    def limit(self, workers: int, poll_s: float) -> None:
        """Say how many attempts a worker makes at once, and how often it looks for some."""
        with mapped("written"):
            self._client.register_queue(
                QUEUE, worker_concurrency=workers, polling_interval_sec=poll_s
            )

    def every(self, cron: str | None, timezone: str | None) -> None:
        """Form all that waits by the clock; None: not any more.

        Raises:
            ConfigurationError: The expression, or the time zone, is malformed.
        """
        name = f"{self._name}.form_all"
        with mapped("written"):
            if cron is None:
                self._client.delete_schedule(name)
                return
            try:
                self._client.apply_schedules(
                    [
                        {
                            "schedule_name": name,
                            "workflow_name": FORM_ALL,
                            "schedule": cron,
                            "cron_timezone": timezone,
                            "application_name": self._name,
                        }
                    ]
                )
            except dbos_errors.DBOSException as exc:
                raise ConfigurationError(
                    f"cron={cron!r} with timezone={timezone!r} is no schedule: {exc.message}; "
                    "expected five fields, like '0 3 * * *', and a zone like 'Europe/Berlin'"
                ) from exc

    def _listed(self, **options: Any) -> list[WorkflowStatus]:
        with mapped("read"):
            return self._client.list_workflows(application_name=self._name, **options)


@contextmanager
def mapped(done: str) -> Iterator[None]:
    """Turn what DBOS and its driver raise into what perdure raises."""
    try:
        yield
    except (SQLAlchemyError, dbos_errors.DBOSException) as exc:
        raise StorageUnavailable(f"the jobs' database cannot be {done}: {exc!s:.300}") from exc


@contextmanager
def quiet() -> Iterator[None]:
    """DBOS says what is wrong to whoever listens to the logger `dbos`, and nothing to stderr."""
    logger, silent = logging.getLogger("dbos"), logging.NullHandler()
    logger.addHandler(silent)  # without any, it would bring its own
    logger.addFilter(_is_wrong)
    try:
        yield
    finally:
        logger.removeFilter(_is_wrong)
        logger.removeHandler(silent)


def _is_wrong(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


def _attempt(found: WorkflowStatus) -> Attempt:
    status = _STATUS.get(found.status, "lost")
    error = found.error
    told = error.data if isinstance(error, PortableWorkflowError) else None
    data = told if isinstance(told, dict) else {}
    ended = found.completed_at
    return Attempt(
        AttemptId.read(found.workflow_id),
        status,
        (found.created_at or 0) / 1000,
        found.executor_id,
        LOST if status == "lost" else None if error is None else str(error),
        data.get("final") is True,
        data.get("begun") is not False,
        None if ended is None else datetime.fromtimestamp(ended / 1000, UTC),
        _thread_of(found),
        found.output if isinstance(found.output, dict) else None,
    )


def _thread_of(found: WorkflowStatus) -> Waiting | None:
    if found.input is None:
        return None
    thread_id, namespace, configurable, since, _ = found.input["args"]
    moment = datetime.fromisoformat(since)
    return Waiting(tuple(namespace), thread_id, configurable, moment, moment)
