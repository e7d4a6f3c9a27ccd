"""Background extraction: threads are extracted once their conversation pauses.

What is due is a query (`due.py`). A worker asks it now and then and puts the answer on a queue of
DBOS (`job_queue.py`), with the thread as deduplication id. Nothing is written on the turn's path,
and losing the queue loses no thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, Self

from langchain_core.runnables import RunnableConfig

from perdure.errors import (
    ConfigurationError,
    PerdureError,
    SerializationError,
    UnknownThread,
    VersionConflict,
)
from perdure.memory import model_call
from perdure.memory.due import STATES, DueThreads, Job, Pace, State
from perdure.memory.effects import run
from perdure.memory.extraction import Extraction
from perdure.memory.job_queue import JobQueue, StoppedEarly, Work, place_of
from perdure.memory.options import choice, instance, seconds, whole
from perdure.memory.watermarks import watermark

logger = logging.getLogger("perdure.background")
LOST: Final = "the worker ended before the extraction did"
_AHEAD: Final = 100  # jobs on the queue at most
_TICK_S: Final = (0.05, 5.0)
_FORGET_S: Final = 3600.0
_LATE_S: Final = 60.0  # after its limit the job of another machine's worker is taken for lost
_FINAL: Final = (ConfigurationError, SerializationError)


class Background:
    """Extracts threads in the background, in this process or by `perdure worker` in another.

    `with` and `async with` start it and stop it. One process can run one application of DBOS.

    Args:
        extraction: What to extract, with a perdure checkpointer and a store.
        pace: When, and how often it is tried.
        database: Where the queue is kept: a file, or `"postgresql://…"` for workers on several
            machines. None: a file beside the store's. It is not encrypted, whatever the store is:
            it has thread ids, namespaces and reports in clear.
        workers: How many threads this process extracts at the same time.
        work: Whether this process works, or only looks and asks.
        defaults: What a run's `configurable` says where it says nothing, as `{"user_id": "me"}`.
        on_job: Called with each job that this process has done or failed.

    Raises:
        ConfigurationError: An argument is wrong.
        MissingDependency: DBOS is not installed.
    """

    def __init__(
        self,
        extraction: Extraction,
        *,
        pace: Pace | None = None,
        database: str | os.PathLike[str] | None = None,
        workers: int = 8,
        work: bool = True,
        defaults: Mapping[str, str] | None = None,
        on_job: Callable[[Job], None] | None = None,
    ) -> None:
        self.extraction = instance("extraction", extraction, Extraction, "Extraction(saver, store)")
        self.pace, self.work = pace or Pace(), bool(work)
        self.workers, self._on_job = whole("workers", workers, 1), on_job
        self._due = DueThreads(extraction, self.pace, defaults)
        self._database = place_of(database, extraction.adapter().store)
        self._lock, self._stop = threading.RLock(), threading.Event()
        self._abandon = threading.Event()
        self._running: set[str] = set()
        self._stack = ExitStack()
        self._queue: JobQueue | None = None
        self._works = False

    # -- beginning and end

    def start(self) -> Self:
        """Begin to work, unless `work` is False.

        Raises:
            ConfigurationError: This process runs DBOS already.
            StorageUnavailable: The queue's database cannot be reached.
        """
        with self._lock:
            if self.work and not self._works:
                work = Work(self._attempt, self._extract_all, self.pace.retries + 1)
                try:
                    self._stack.enter_context(self._opened().working(self.workers, work))
                except BaseException:
                    self.stop()
                    raise
                self._works = True
                looks = threading.Thread(target=self._look, name="perdure-background", daemon=True)
                looks.start()
                self._stack.callback(looks.join)
        return self

    def stop(self, timeout_s: float = 30.0) -> None:
        """End. What is due stays due, for the next start or another worker.

        Args:
            timeout_s: How long to wait for what is being extracted; what takes longer is left, and
                extracted again.
        """
        end = time.monotonic() + seconds("timeout_s", timeout_s)
        with self._lock:
            self._stop.set()
            while self._running and time.monotonic() < end:
                time.sleep(0.01)
            self._abandon.set()
            self._stack.close()
            if self._queue is not None:
                self._queue.close()
            self._queue, self._works = None, False
            self._stop, self._abandon = threading.Event(), threading.Event()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.stop)

    # -- by hand and by the clock

    def extract_now(
        self, thread_id: str, config: RunnableConfig | None = None, *, anew: bool = False
    ) -> None:
        """Have a thread extracted as soon as a worker is free.

        Args:
            thread_id: The thread.
            config: Of a run on it; None: what its last run was given.
            anew: All of it once more; see `Extraction.extract`.

        Raises:
            InvalidConfig: The config does not fill in the namespace.
            UnknownThread: There is no such thread, and no config.
            StorageError: The checkpointer, or the queue's database, refuses.
        """
        self._opened().put(self._due.job(thread_id, config), anew=anew)

    def every(self, cron: str | None, timezone: str | None = None) -> None:
        """Have all that is not extracted extracted by the clock, also what was given up.

        The queue's database keeps the schedule; a time that passes without a worker is skipped.

        Args:
            cron: Five fields, `"0 3 * * *"`; None: not any more.
            timezone: Like `"Europe/Berlin"`; None: UTC.

        Raises:
            ConfigurationError: It is malformed.
            StorageUnavailable: The queue's database cannot be reached.
        """
        self._opened().every(cron, timezone)

    def flush(self, timeout_s: float = 60.0) -> list[Job]:
        """Have all extracted now that was not given up, and wait for it.

        Args:
            timeout_s: How long to wait.

        Returns:
            What could not be extracted, or not in time. Empty: all is.

        Raises:
            StorageError: The store, or the queue's database, refuses.
        """
        end = time.monotonic() + seconds("timeout_s", timeout_s)
        wanted = self._put_all(dead=False) | self._opened().live().keys()
        while wanted & self._opened().live().keys() and time.monotonic() < end:
            time.sleep(_TICK_S[0])
        return self._due.jobs()

    def jobs(self, state: State | None = None) -> list[Job]:
        """The threads that are not extracted yet, and those that were within a day.

        Args:
            state: Those in that state; `"dead"`: those that were given up.

        Raises:
            ConfigurationError: There is no such state.
            StorageError: The store, or the queue's database, refuses.
        """
        if state is not None:
            choice("state", state, STATES)
        queue = self._opened()
        live, found = queue.live(), self._due.jobs()
        found = [replace(job, state="running") if live.get(job.key) else job for job in found]
        known = {job.key for job in found}
        done = {job.key: job for job in queue.done() if job.key not in known}
        found += done.values()
        return [job for job in found if state in (None, job.state)]

    def _opened(self) -> JobQueue:
        if (queue := self._queue) is not None:  # without the lock: `stop` has it, and waits
            return queue
        with self._lock:
            if self._queue is None:
                self._queue = JobQueue(self._database)
            return self._queue

    def _put_all(self, *, dead: bool) -> set[str]:
        jobs = [job for job in self._due.jobs() if dead or job.state != "dead"]
        for job in jobs:
            self._opened().put(job)
        return {job.key for job in jobs}

    # -- work

    def _look(self) -> None:
        """Now and then, put what is due on the queue."""
        pace = self.pace
        shortest, longest = _TICK_S
        pause = min(longest, max(shortest, min(pace.backoff_s, pace.delay_s or longest) / 4))
        forgotten = 0.0
        while not self._stop.wait(pause):
            try:
                self._tick()
                if time.monotonic() - forgotten > _FORGET_S:
                    self._opened().forget()
                    forgotten = time.monotonic()
            except Exception as exc:  # what is due stays due: the next look finds it
                logger.error("background extraction is held up: %s: %s", type(exc).__name__, exc)

    def _tick(self) -> None:
        due = [job for job in self._due.jobs() if job.state == "due"]
        if not due:
            return
        queue = self._opened()
        live = queue.live()
        if any(live.get(job.key) for job in due):
            for job in queue.take_back(self.pace.limit_s + _LATE_S):
                self._record(job, LOST)
        for job in queue.fatal():
            self._record(job, LOST, final=True)
        for job in [job for job in due if job.key not in live][: max(0, _AHEAD - len(live))]:
            queue.put(job)

    def _extract_all(self) -> int:
        return len(self._put_all(dead=True))

    def _attempt(self, job: Job, anew: bool) -> dict[str, Any]:
        """Extract a thread for the queue. A failure is noted on its watermark."""
        if self._stop.is_set():
            raise StoppedEarly
        told = {"thread_id": job.thread_id, "namespace": list(job.namespace)}
        self._running.add(job.key)
        try:
            found = self._within_limit(job, anew)
            if isinstance(found, BaseException):
                self._failed(job, found)
                return told
            self._tell(replace(job, state="done", report=found))
            return {**told, "report": found}
        finally:
            self._running.discard(job.key)

    def _within_limit(self, job: Job, anew: bool) -> Any:
        """The report, or the exception, of an extraction in a thread that can be left behind."""
        box: list[Any] = []
        done = threading.Event()

        def extract() -> None:
            try:
                box.append(self.extraction.extract(job.thread_id, job.config, anew=anew).noted())
            except BaseException as exc:
                box.append(exc)
            done.set()

        # a daemon: what hangs must not keep the process from ending
        threading.Thread(target=extract, daemon=True).start()
        end = time.monotonic() + self.pace.limit_s
        while not done.wait(min(_TICK_S[0], max(0.0, end - time.monotonic()))):
            if self._abandon.is_set():
                raise StoppedEarly
            if time.monotonic() >= end:
                return TimeoutError(f"the extraction took more than {self.pace.limit_s:g} s")
        return box[0]

    def _failed(self, job: Job, exc: BaseException) -> None:
        if isinstance(exc, UnknownThread):
            logger.info("%s: %s", job.thread_id, exc)  # it was deleted meanwhile
            return
        self._record(job, f"{type(exc).__name__}: {_said(exc)}", final=_is_final(exc), exc=exc)

    def _record(
        self, job: Job, error: str, *, final: bool = False, exc: BaseException | None = None
    ) -> None:
        """Count a failure on the thread's watermark, and tell of it."""
        adapter, name = self.extraction.adapter(), self.extraction.extractor.name
        for _ in range(3):
            head = self.extraction.saver.checkpoints(job.thread_id, checkpoint_ns="", limit=1)
            uid = head[0].checkpoint_id if head else None
            mark = run(watermark(adapter, job.namespace, job.thread_id, name))
            count = mark.attempts if mark.failed_head == uid else 0
            count = max(count, self.pace.retries) if final else count
            mark = replace(mark, attempts=count).with_failure(error, datetime.now(UTC), uid)
            try:
                run(adapter.written([mark.put(job.namespace, job.thread_id)]))
            except VersionConflict:  # another extracted meanwhile
                continue
            dead = mark.attempts > self.pace.retries
            state: State = "dead" if dead else "retrying"
            self._tell(replace(job, state=state, attempts=mark.attempts, error=error), exc)
            return

    def _tell(self, job: Job, exc: BaseException | None = None) -> None:
        level = {"done": logging.INFO, "dead": logging.ERROR}.get(job.state, logging.WARNING)
        known = exc is None or isinstance(exc, PerdureError)
        logger.log(level, "%s", job, exc_info=None if known else exc)
        if self._on_job is not None:
            try:
                self._on_job(job)
            except Exception:
                logger.exception("on_job=%r failed with %s", self._on_job, job)


def run_worker(background: Background, *, timeout_s: float = 30.0) -> None:
    """Work until the process is told to end by SIGINT or SIGTERM; call it in the main thread.

    Args:
        background: Works.
        timeout_s: How long to wait, at the end, for what is being extracted.
    """
    if not background.work:
        raise ConfigurationError("the Background has work=False; a worker needs one that works")
    ended, signals = threading.Event(), (signal.SIGINT, signal.SIGTERM)
    before = {each: signal.signal(each, lambda *_: ended.set()) for each in signals}
    try:
        with background:
            while not ended.wait(1.0):  # a wait without an end would not be interrupted everywhere
                pass
            for each, handler in before.items():  # a second signal ends the process at once
                signal.signal(each, handler)
            background.stop(timeout_s)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _said(exc: BaseException) -> str:
    try:
        return f"{exc!s:.500}"
    except Exception as inner:
        return f"(its message cannot be had: {type(inner).__name__})"


def _is_final(exc: BaseException) -> bool:
    """Whether an extraction failed in a way that another cannot mend."""
    cause = exc.__cause__
    return (
        isinstance(exc, _FINAL)
        or model_call.is_final(exc)
        or (cause is not None and _is_final(cause))
    )
