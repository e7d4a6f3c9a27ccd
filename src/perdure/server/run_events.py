"""What runs tell, as it is stored: for readers on other servers, and after a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import Context
from typing import Final

from perdure.checkpointers.records import LiveRun
from perdure.checkpointers.runs import ALL_RUNS, EventBatch, RunState, RunTable
from perdure.errors import CorruptRecord, StorageError
from perdure.server.run import Run
from perdure.server.run_log import THREADS, Log, LoggedEvent

BATCH_S: Final = 0.1
"""How often what runs have told is stored, in one transaction for all."""
ANEW: Final = "metadata"
"""Begins the events of a run, and those that it tells in another process."""
_LOGGER: Final = logging.getLogger("perdure.server.runs")


class StoredEvents:
    """The events of the runs of a database that can be joined again."""

    def __init__(self, table: RunTable) -> None:
        self._table = table
        self._recorded: dict[Run, LiveRun] = {}
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    # -- of runs that are under way here

    async def begin(self, run: Run, live: LiveRun) -> None:
        """Store what a run tells from now on; if it began before, that goes on with it."""
        if not run.recorded:
            return
        log, first = run.events, run.first
        if run.begun or log.last // THREADS < first // THREADS - 1:  # others told what is before
            before = self.fetch if log.is_read else self.leave
            await before(log, run.thread, run.seqs)
        begun = (await self._table.begin_events(live, first)) if run.begun else None
        last, at = begun or (first, first)
        log.skip(at)
        run.stored = log.last
        if last > first and run.feed is None:
            log.add(ANEW, {"run_id": run.run_id, "attempt": live.attempt}, ANEW)
        self._recorded[run] = live
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._record(), context=Context())

    async def _record(self) -> None:
        while self._recorded:
            await asyncio.sleep(BATCH_S)
            async with self._writing:
                batches = {run: batch for run in self._recorded if (batch := run.batch())}
                try:
                    if batches:
                        made = [(self._recorded[run], batch) for run, batch in batches.items()]
                        await self._table.add_events(made)
                except StorageError as exc:  # they are tried again, with what is told meanwhile
                    kind = type(exc).__name__  # its text may be content
                    _LOGGER.warning("events of runs are not stored yet (%s)", kind)
                else:
                    for run, batch in batches.items():
                        run.stored = batch.until

    async def last(self, run: Run, closing: Sequence[LoggedEvent] = ()) -> EventBatch | None:
        """What a run that ends has told that is not stored; it is stored by who asks."""
        self._recorded.pop(run, None)
        async with self._writing:
            return run.batch(closing)

    async def hand_over(self, run: Run, live: LiveRun) -> None:
        """Store the rest of what a run told that goes on elsewhere, unless it does so already."""
        if batch := await self.last(run):
            with suppress(StorageError):
                await self._table.add_events([(live, batch)])

    # -- of others

    async def fetch(self, log: Log, thread: int, seqs: tuple[int, int]) -> None:
        """Add to a log what was told elsewhere."""
        try:
            while batches := await self._read(thread, seqs, log.last):
                for batch in batches:
                    log.extend(_logged(batch, log.last))
                    log.skip(batch.until)
        except LookupError:  # its readers are told so
            await self.leave(log, thread, seqs)

    async def _read(self, thread: int, seqs: tuple[int, int], number: int) -> list[EventBatch]:
        try:
            return await self._table.events(thread, seqs, _at(number, seqs))
        except CorruptRecord as exc:
            _LOGGER.warning("events of a run are damaged")
            raise LookupError("they are damaged") from exc

    async def leave(
        self, log: Log, thread: int, seqs: tuple[int, int]
    ) -> tuple[int, int, RunState] | None:
        """Keep none in a log, if others told what follows it; see `RunTable.newest_event`."""
        newest = await self._table.newest_event(thread, seqs, _at(log.last, seqs))
        if newest is not None and newest[1] > log.last:  # as before
            log.leave(newest[1])
        return newest

    async def recall(self, run: Run) -> None:
        """Have the events of a run read from the database that this process does not have."""
        if run.forgotten or (run.is_elsewhere and not run.log.is_read):
            log = Log() if run.forgotten else run.log
            found = await self.leave(log, run.thread, run.seqs)
            if run.forgotten and found is not None:
                log.close()
                run.log, run.forgotten = log, False

    async def after(
        self,
        log: Log,
        number: int | None,
        look: Callable[[], Awaitable[None]],
        thread: int,
        seqs: tuple[int, int],
    ) -> AsyncIterator[list[LoggedEvent]]:
        """What follows an event, as it comes; None: all that is kept. See `Log.after`.

        What the log does not have is read from the database.
        """
        begins = number is None
        at = log.first if number is None else number
        while True:
            while at < log.dropped:
                batches = await self._read(thread, seqs, at)
                if not batches:
                    break
                for batch in batches:
                    if batch.since > at and batch.since % THREADS and not begins:
                        raise LookupError(f"the events up to {batch.since} are no longer kept")
                    if events := _logged(batch, at):
                        yield events
                    begins, at = False, batch.until
            try:
                async for events in log.after(max(at, log.dropped) if begins else at, look):
                    yield events
                    begins, at = False, events[-1].number
                return
            except LookupError:  # the log may have been left to the database meanwhile
                if not await self._read(thread, seqs, at):
                    raise


def _at(number: int, seqs: tuple[int, int]) -> int:
    """Of a thread, only the events that are told to its readers."""
    return max(number, THREADS - 1) if seqs == ALL_RUNS else number


def _logged(batch: EventBatch, after: int) -> list[LoggedEvent]:
    first = batch.until - len(batch.events) + 1
    events = (LoggedEvent(number, *event) for number, event in enumerate(batch.events, first))
    return [event for event in events if event.number > after]
