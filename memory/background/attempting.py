"""Attempts to form a thread: each is made or refused, and tells what came of it.

What was not caught by trying again is told as an error, to the logger `perdure.forming`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from langchain_core.runnables import RunnableConfig

from perdure.errors import (
    ConfigurationError,
    CorruptRecord,
    InvalidMessages,
    InvalidNamespace,
    NotADatabase,
    PerdureError,
    SchemaMismatch,
    SerializationError,
    UnknownThread,
)
from perdure.memory import model_call as asking
from perdure.memory.background.jobs import Job, Pace
from perdure.memory.extraction import Extraction

logger = logging.getLogger("perdure.forming")
_FINAL: Final = (
    ConfigurationError,
    CorruptRecord,
    InvalidMessages,
    InvalidNamespace,
    NotADatabase,
    SchemaMismatch,
    SerializationError,
)


class AttemptFailed(PerdureError):
    """An attempt failed; `data` is what the jobs' database keeps of it beside the message."""

    def __init__(self, message: str, *, final: bool = False, begun: bool = True) -> None:
        super().__init__(message)
        self.data = {"final": final, "begun": begun}


class Attempts:
    """Makes attempts, in whichever threads, until it is closed.

    Args:
        extraction: Forms.
        pace: How often it is tried.
        told: Is given each job when its attempt has ended.
    """

    def __init__(
        self, extraction: Extraction, pace: Pace, told: Callable[[Job], None] | None = None
    ) -> None:
        self._formation, self._pace, self._told = extraction, pace, told
        self._changed = threading.Condition()
        self._running = 0
        self._open = True

    def attempt(
        self,
        thread_id: str,
        namespace: list[str],
        configurable: dict[str, str],
        since: str,
        number: int,
    ) -> dict[str, Any]:
        """Form a thread.

        Returns:
            The report.

        Raises:
            AttemptFailed: It was not formed.
        """
        moment = datetime.fromisoformat(since)
        job = Job(thread_id, tuple(namespace), "running", number, None, moment)
        config: RunnableConfig = {"configurable": {**configurable, "thread_id": thread_id}}
        with self._counted():
            try:
                report = self._formation.extract(thread_id, config).noted()
            except BaseException as exc:  # a former that ends its thread must not do so unseen
                raise self._failed(job, exc, config) from exc
            self._tell(replace(job, state="done", report=report))
        return report

    def close(self, timeout_s: float) -> None:
        """Begin no more, and wait for those that were begun, but not for ever."""
        with self._changed:
            self._open = False
            self._changed.wait_for(lambda: not self._running, timeout_s)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._changed:
            if not self._open:
                raise AttemptFailed("the worker is being stopped", begun=False)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _failed(self, job: Job, exc: BaseException, config: RunnableConfig) -> AttemptFailed:
        error = f"{type(exc).__name__}: {_said(exc)}"
        final = is_final(exc)
        if final or job.attempts > self._pace.retries:
            if isinstance(exc, UnknownThread) and self._dropped(job, config):
                error += "; it was deleted, or never was, and waits no longer"
            self._tell(replace(job, state="dead", error=error), exc)
        else:
            wait = timedelta(seconds=self._pace.backoff_after(job.attempts))
            due_at = datetime.now(UTC) + wait
            self._tell(replace(job, state="retrying", error=error, due_at=due_at))
        return AttemptFailed(error, final=final)

    def _dropped(self, job: Job, config: RunnableConfig) -> bool:
        """Whether a thread is gone, so that nobody is to wait for it."""
        try:
            return self._formation.drop(job.thread_id, config)
        except PerdureError as exc:  # the job stays in the list of the dead
            logger.warning("%s waits on: %s", job.thread_id, exc)
            return False

    def _tell(self, job: Job, exc: BaseException | None = None) -> None:
        tell(job, exc)
        if self._told is not None:
            try:
                self._told(job)
            except Exception:
                logger.exception("%r failed, which was told of %s", self._told, job)


def tell(job: Job, exc: BaseException | None = None) -> None:
    """Log how an attempt has ended: as an error, if it was the last."""
    level = {"done": logging.INFO, "dead": logging.ERROR}.get(job.state, logging.WARNING)
    known = exc is None or isinstance(exc, PerdureError)  # its message says it all
    logger.log(level, "%s", job, exc_info=None if known else exc)


def _said(exc: BaseException) -> str:
    try:
        return f"{exc!s:.500}"
    except Exception as inner:
        return f"(its message cannot be had: {type(inner).__name__})"


def is_final(exc: BaseException) -> bool:
    """Whether an attempt failed in a way that another cannot mend."""
    return (
        isinstance(exc, _FINAL)
        or asking.is_final(exc)
        or (exc.__cause__ is not None and is_final(exc.__cause__))
    )
