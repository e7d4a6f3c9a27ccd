"""DBOS in this process, while it forms in the background: one at a time, for it is a singleton.

Importing this takes a second: it imports DBOS.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime
from typing import Any, Final, NamedTuple

from dbos import DBOS, DBOSPortableJSONSerializer

from perdure.errors import ConfigurationError
from perdure.memory.background.attempting import AttemptFailed
from perdure.memory.background.ledger import FORM, FORM_ALL, QUEUE, SCHEMA, VERSION, mapped

_CONNECTIONS_BESIDE: Final = 6  # of DBOS's own threads, beside a connection for each attempt
_THREADS: Final = "dbos-executor-"
_JOIN_S: Final = 5.0
_LISTEN_S: Final = 0.25  # of a thread that we have no use for, and that sleeps so long at the end


class Works(NamedTuple):
    """What workflows do.

    Attributes:
        attempt: Forms a thread, given its id, its namespace, what filled that in, since when it
            waits, and the number of the attempt, from 1; returns what came of it.
        form_all: Puts all that waits into the queue; returns how much that is.
    """

    attempt: Callable[[str, list[str], dict[str, str], str, int], dict[str, Any]]
    form_all: Callable[[], int]


_taken = threading.Lock()
_works: list[Works] = []  # those of the Runtime that there is


class Runtime:
    """DBOS of this process: first it is made sure of, and nothing is done; then it is launched.

    Args:
        url: Of the jobs' database.
        name: The application's.
        worker: A name of this process that no other has, or had.
        workers: How many attempts it makes at once.

    Raises:
        ConfigurationError: This process runs DBOS already.
        StorageUnavailable: DBOS refuses the jobs' database.
    """

    def __init__(self, url: str, name: str, worker: str, workers: int) -> None:
        if not _taken.acquire(blocking=False):
            raise ConfigurationError(
                "another Background works in this process, and DBOS can be run once only; stop it "
                "first, or make this one with work=False"
            )
        self._stack = ExitStack()
        self._stack.callback(_taken.release)
        try:
            self._make(url, name, worker, workers)
        except BaseException:
            self._stack.close()
            raise

    def _make(self, url: str, name: str, worker: str, workers: int) -> None:
        logger = logging.getLogger("dbos")
        self._stack.callback(logger.setLevel, logger.level)
        with mapped("opened"):
            DBOS(
                config={
                    "name": name,
                    "system_database_url": url,
                    "dbos_system_schema": SCHEMA,
                    "sys_db_pool_size": workers + _CONNECTIONS_BESIDE,
                    "serializer": DBOSPortableJSONSerializer(),
                    "application_version": VERSION,
                    "executor_id": worker,
                    "log_level": "ERROR",
                    "notification_listener_polling_interval_sec": _LISTEN_S,
                    "enable_otlp": False,
                }
            )
        if DBOS.executor_id != worker:  # DBOS(…) gives the one that is there
            raise ConfigurationError(
                "this process runs DBOS for something else, and it can be run once only; make the "
                "Background with work=False here, and run `perdure worker` beside"
            )
        self._stack.callback(_join)
        self._stack.callback(DBOS.destroy)

    def launch(self, works: Works) -> None:
        """Begin to work.

        Raises:
            StorageUnavailable: The jobs' database cannot be reached.
        """
        logger = logging.getLogger("dbos")
        logger.addFilter(_is_news)
        self._stack.callback(logger.removeFilter, _is_news)
        _works[:] = [works]
        with mapped("opened"):
            DBOS.workflow(name=FORM, max_recovery_attempts=None)(form)
            DBOS.workflow(name=FORM_ALL, max_recovery_attempts=None)(form_all)
            DBOS.listen_queues([QUEUE])
            DBOS.launch()

    def close(self) -> None:
        """End it, and leave nothing behind."""
        self._stack.close()


def form(
    thread_id: str, namespace: list[str], configurable: dict[str, str], since: str, number: int
) -> dict[str, Any]:
    """The workflow that forms a thread. It has no steps: done twice, it is done once."""
    return _works[0].attempt(thread_id, namespace, configurable, since, number)


def form_all(scheduled_at: datetime, context: Any) -> int:
    """The workflow that a cron trigger starts."""
    return _works[0].form_all()


def _is_news(record: logging.LogRecord) -> bool:
    # a failed attempt was told of already, see `attempting`
    return not (record.exc_info and isinstance(record.exc_info[1], AttemptFailed))


def _join() -> None:
    """Wait for the threads that DBOS leaves to end by themselves."""
    end = time.monotonic() + _JOIN_S
    for thread in threading.enumerate():
        if thread.name.startswith(_THREADS) and thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))
