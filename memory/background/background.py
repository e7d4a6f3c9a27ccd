"""Background extraction: memories are formed when a conversation pauses, and nobody waits for it.

A thread that was scheduled is noted in the store, durably, and that is all: workers, in this
process or in others, look for notes that are due, form the threads as workflows of DBOS, and try
again what failed. The note goes in the transaction that writes the memories.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from langchain_core.runnables import RunnableConfig

from perdure.errors import ConfigurationError, MissingDependency, UnknownThread
from perdure.memory.background.desk import Desk, Place, Shift
from perdure.memory.background.jobs import STATES, Job, Pace, State
from perdure.memory.extraction import Extraction
from perdure.memory.forming.waiting import Waiting
from perdure.memory.options import choice, seconds, whole

_FLUSH_POLL_S: Final = 0.05
_NAME: Final = re.compile(r"[a-z0-9_-]{3,256}")


class Background:
    """Forms memories in the background.

    Once started, it works in this process, beside any number of others that do, or that only
    schedule (`work=False`). `with` and `async with` start it and stop it.

    Args:
        extraction: What forms.
        database: Where attempts are kept: a file, or `"postgresql://…"` for workers on several
            machines. None: a file beside the store's; if that has none, a temporary one, with which
            only the list of failures is lost. It is not encrypted, whatever the store is: it has
            ids of threads, namespaces, what fills them in, and the texts of errors in clear.
        delay_s: For how long nothing must have been said on a thread; None: threads are formed when
            `cron`, `flush` or `form_now` says so.
        max_wait_s: How long a thread waits at most, whatever is said on it.
        retries: How often a failed attempt is repeated.
        backoff_s: How long after the first failure; twice as long after each.
        workers: How many threads are formed at the same time in this process.
        cron: When all that waits is formed, also what was given up; `"0 3 * * *"`: at 3 each night.
        timezone: Of `cron`, like `"Europe/Berlin"`; None: UTC.
        name: The application; those that share a database need different ones.
        work: Whether this process forms, or only schedules.
        told: Is given each job when an attempt of this process has ended.

    Raises:
        ConfigurationError: An argument is wrong.
        MissingDependency: DBOS is not installed.
    """

    def __init__(
        self,
        extraction: Extraction,
        *,
        database: str | os.PathLike[str] | None = None,
        delay_s: float | None = 30.0,
        max_wait_s: float = 600.0,
        retries: int = 5,
        backoff_s: float = 2.0,
        workers: int = 8,
        cron: str | None = None,
        timezone: str | None = None,
        name: str = "perdure",
        work: bool = True,
        told: Callable[[Job], None] | None = None,
    ) -> None:
        if not isinstance(extraction, Extraction) or extraction.store is None:
            raise ConfigurationError(
                f"extraction is {extraction!r:.80}; expected Extraction(saver, store), with a store"
            )
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"name is {name!r:.80}; expected 3 letters or more, of a-z, 0-9, '-' and '_'"
            )
        if importlib.util.find_spec("dbos") is None:
            raise MissingDependency(
                'background extraction needs DBOS: pip install "perdure[background]"'
            )
        self.extraction, self.name, self.work = extraction, name, bool(work)
        self.workers = whole("workers", workers, 1)
        self.pace = Pace(
            None if delay_s is None else seconds("delay_s", delay_s),
            seconds("max_wait_s", max_wait_s),
            whole("retries", retries, 0),
            seconds("backoff_s", backoff_s),
        )
        self._cron, self._timezone, self._told = cron, timezone, told
        self._place = Place.of(database, extraction.store)
        self._lock = threading.RLock()
        self._desk: Desk | None = None
        self._shift: Shift | None = None

    # -- beginning and end

    def start(self) -> Self:
        """Begin to work, unless `work` is False.

        Raises:
            ConfigurationError: This process runs DBOS already, or `cron` is malformed.
            StorageUnavailable: The jobs' database cannot be reached.
        """
        with self._lock:
            if self.work and self._shift is None:
                desk = self._opened()
                try:
                    self._shift = Shift(desk, self.workers, self._told)
                    self._shift.begin(self._cron, self._timezone)
                except BaseException:
                    self.stop()
                    raise
        return self

    def stop(self, timeout_s: float = 30.0) -> None:
        """End: what is being formed is finished, what waits will be formed after the next start.

        Args:
            timeout_s: How long to wait for what is being formed; what takes longer is left behind,
                and formed again.
        """
        seconds("timeout_s", timeout_s)
        with self._lock:
            if self._shift is not None:
                self._shift.end(timeout_s)
                self._shift = None
            if self._desk is not None:
                self._desk.close()
                self._desk = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.stop)

    # -- triggers

    def schedule(self, thread_id: str, config: RunnableConfig | None = None) -> None:
        """Have a thread formed once nothing has been said on it for `delay_s`.

        It is noted durably, and returns. Call it after each turn: that begins the delay anew.

        Args:
            thread_id: The thread.
            config: Of the run; what fills in the extraction's namespace is taken from it.

        Raises:
            InvalidConfig: The config does not fill in the namespace.
            StorageError: The store refuses.
        """
        self.extraction.note(thread_id, config)

    async def aschedule(self, thread_id: str, config: RunnableConfig | None = None) -> None:
        """See `schedule`."""
        await self.extraction.anote(thread_id, config)

    def form_now(
        self, thread_id: str, config: RunnableConfig | None = None, *, anew: bool = False
    ) -> None:
        """Have a thread formed as soon as a worker is free.

        Args:
            thread_id: The thread. One that does not exist is tried as often as any other, in case
                it is about to begin; then the log has an error, and it waits no longer.
            config: Of a run; None: a thread that waits is formed wherever it does.
            anew: All of it, once more; see `Extraction.extract`.

        Raises:
            UnknownThread: There is no such thread, and it is to be formed anew.
            InvalidConfig: The config does not fill in the namespace.
            StorageError: The store, or the jobs' database, refuses.
        """
        configs = [config]
        if config is None:
            notes = [note for note in self.extraction.pending() if note.thread_id == thread_id]
            configs = [{"configurable": dict(note.configurable)} for note in notes] or configs
        noted = [self.extraction.note(thread_id, each, anew=anew) for each in configs]
        desk = self._opened()
        for note in noted:
            desk.ledger.put(note, 1)

    def every(self, cron: str | None, timezone: str | None = None) -> None:
        """Have all that waits formed by the clock, by whichever workers there are then.

        What was given up is tried again too. It is kept in the jobs' database; no worker, no cron:
        a time that passes without one is skipped.

        Args:
            cron: Five fields, `"0 3 * * *"`; None: not any more.
            timezone: Like `"Europe/Berlin"`; None: UTC.

        Raises:
            ConfigurationError: It is malformed.
            StorageUnavailable: The jobs' database cannot be reached.
        """
        desk = self._opened()
        desk.ledger.every(cron, timezone)

    def flush(self, timeout_s: float = 60.0) -> list[Job]:
        """Have all that waits formed now, and wait for it: before the end of a test, or of a day.

        Workers do it, this process or others. What was given up stays so; what failed lately is
        tried once more.

        Args:
            timeout_s: How long to wait.

        Returns:
            What could not be formed, or not in time. Empty: all is.

        Raises:
            StorageError: The store, or the jobs' database, refuses.
        """
        end = time.monotonic() + seconds("timeout_s", timeout_s)
        desk = self._opened()
        desk.dispatcher.all(dead=False)
        wanted = desk.dispatcher.live()
        while wanted & desk.dispatcher.live() and time.monotonic() < end:
            time.sleep(_FLUSH_POLL_S)
        left = {"due", "running", "retrying", "dead"}
        return [job for job in desk.dispatcher.jobs() if job.state in left]

    # -- what there is to see

    def jobs(self, state: State | None = None) -> list[Job]:
        """The jobs: of each thread that waits one, and of those formed within a day.

        Any process may ask, whether or not it works.

        Args:
            state: Those in that state; `"dead"`: those that were given up.

        Raises:
            ConfigurationError: There is no such state.
            StorageError: The store, or the jobs' database, refuses.
        """
        if state is not None:
            choice("state", state, STATES)
        desk = self._opened()
        return [job for job in desk.dispatcher.jobs() if state in (None, job.state)]

    def retry(self, job: Job) -> None:
        """Try what was given up again, from the beginning.

        Raises:
            UnknownThread: The thread does not wait any more.
            StorageError: The store, or the jobs' database, refuses.
        """
        desk = self._opened()
        notes = [note for note in desk.dispatcher.notes() if _is_of(note, job)]
        if not notes:
            raise UnknownThread(
                f"the thread {job.thread_id!r} does not wait in {job.namespace!r}: it was "
                "formed meanwhile; schedule it if more was said"
            )
        desk.ledger.put(notes[0], 1)

    def _opened(self) -> Desk:
        with self._lock:
            if self._desk is None:
                self._desk = Desk(self.extraction, self._place, self.name, self.pace)
            return self._desk


def _is_of(note: Waiting, job: Job) -> bool:
    return (note.namespace, note.thread_id) == (job.namespace, job.thread_id)
