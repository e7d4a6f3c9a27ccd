"""What runs tell, as it is stored: for readers on other servers, and after a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import Context
from typing import Final

from perdure.checkpointers.records import LiveRun
from perdure.checkpointers.runs import ALL_RUNS, EventBatch, RunState, RunTable
from perdure.errors import CorruptRecord, StorageError
from perdure.server.event_memory import EventAccount
from perdure.server.run import Run
from perdure.server.run_log import PART, THREADS, EventDropped, Log, LoggedEvent

BATCH_S: Final = 0.1
"""How often what runs have told is stored, in one transaction for all."""
BATCH_BYTES: Final = 4_000_000
"""The bytes of events that one transaction stores, limited because it copies them all. A larger
event is stored alone."""
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
        log.is_recorded = True
        if run.begun or log.last // THREADS < first // THREADS - 1:  # others told what is before
            before = self.fetch if log.is_read else self.leave
            await before(log, run.thread, run.seqs)
        begun = (await self._table.reserve_event_numbers(live, first)) if run.begun else None
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
                try:
                    while await self._store_some():
                        pass
                except StorageError as exc:  # they are tried again, with what is told meanwhile
                    kind = type(exc).__name__  # its text may be content
                    _LOGGER.warning("events of runs are not stored yet (%s)", kind)

    async def _store_some(self) -> bool:
        """Store events in one transaction. Return whether there were more than fit into it."""
        batches, left = dict[Run, EventBatch](), BATCH_BYTES
        for run in self._recorded:
            if left <= 0:
                break
            if batch := run.batch(limit=left):
                batches[run] = batch
                left -= sum(len(frame) for _, frame in batch.events)
        if batches:
            await self._table.add_events([(self._recorded[run], batches[run]) for run in batches])
        for run, batch in batches.items():
            run.note_stored(batch)
        return left <= 0

    async def last(
        self, run: Run, live: LiveRun, closing: Sequence[LoggedEvent] = ()
    ) -> EventBatch | None:
        """Store all but the last events of a run that ends, and return these for the caller."""
        self._recorded.pop(run, None)
        async with self._writing:
            while (batch := run.batch(limit=BATCH_BYTES)) and batch.last_number < run.events.last:
                await self._table.add_events([(live, batch)])
                run.note_stored(batch)
            return run.batch(closing)

    async def hand_over(self, run: Run, live: LiveRun) -> None:
        """Store the rest of what a run told that goes on elsewhere, unless it does so already."""
        with suppress(StorageError):
            if batch := await self.last(run, live):
                await self._table.add_events([(live, batch)])
                run.note_stored(batch)

    # -- of others

    async def fetch(self, log: Log, thread: int, seqs: tuple[int, int]) -> None:
        """Add to a log what was told elsewhere."""
        try:
            while batches := await self._read(thread, seqs, log.last):
                for batch in batches:
                    log.extend(_logged(batch, log.last))
                    log.skip(batch.last_number)
                    log.stored = max(log.stored, batch.last_number)
        except LookupError:  # its readers are told so
            await self.leave(log, thread, seqs)

    async def _read(self, thread: int, seqs: tuple[int, int], number: int) -> list[EventBatch]:
        try:
            return await self._table.read_events(thread, seqs, _at(number, seqs))
        except CorruptRecord as exc:
            _LOGGER.warning("events of a run are damaged")
            raise LookupError("they are damaged") from exc

    async def leave(
        self, log: Log, thread: int, seqs: tuple[int, int]
    ) -> tuple[int, int, RunState] | None:
        """Keep none in a log, if others told what follows it; see `RunTable.find_newest_event`."""
        newest = await self._table.find_newest_event(thread, seqs, _at(log.last, seqs))
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
        account: EventAccount,
    ) -> AsyncIterator[list[LoggedEvent]]:
        """Yield the events after a number, or all events, as they come. See `Log.after`.

        Events that the log does not have are read from the database, and an account counts them.
        """
        begins = number is None
        at = log.first if number is None else number
        while True:
            async for place, events in self._stored_after(log, at, begins, thread, seqs, account):
                begins, at = False, place
                if events:
                    yield events
            try:
                async for events in log.after(max(at, log.dropped) if begins else at, look):
                    yield events
                    begins, at = False, events[-1].number
                return
            except LookupError:  # the log may have been left to the database meanwhile
                if not await self._read(thread, seqs, at):
                    raise

    async def _stored_after(
        self,
        log: Log,
        at: int,
        begins: bool,
        thread: int,
        seqs: tuple[int, int],
        account: EventAccount,
    ) -> AsyncIterator[tuple[int, list[LoggedEvent]]]:
        """Yield stored events that a log does not have, with the number that is reached by them."""
        while at < log.dropped:
            batches = StoredBatches(await self._read(thread, seqs, at), at, account)
            if not batches.read:
                return
            for place, events in batches.events_after(at, begins):
                begins, at = False, place
                yield at, events
            batches.drop_all()


class StoredBatches:
    """Batches of events that a reader has read from the database, as an `EventHolder`.

    Attributes:
        read: For each batch, the number of the event before it, the number of its last event, and
            its events.
        are_dropped: Whether the events were dropped.
    """

    def __init__(self, batches: Sequence[EventBatch], number: int, account: EventAccount) -> None:
        self.read = [
            (each.previous_number, each.last_number, _logged(each, number)) for each in batches
        ]
        self.size, self._account, self.are_dropped = 0, account, False
        if size := sum(event.size for *_, events in self.read for event in events):
            account.add(self, size)
        self.since, self.rank = account.memory.added, 1

    def __del__(self) -> None:
        if self.size:
            self._account.forget(self.size)

    def events_after(self, at: int, begins: bool) -> Iterator[tuple[int, list[LoggedEvent]]]:
        """Yield events, with the number that is reached by them, until they are dropped.

        Raises:
            EventDropped: Events are missing between the reader's last event and the first one here.
        """
        for since, until, events in self.read:
            if since > at and since % THREADS and not begins:
                raise EventDropped(since)
            for some in _split_events(events):
                yield some[-1].number, some
                if self.are_dropped:
                    return
            at, begins = until, False
            yield at, []

    def drop_some(self) -> None:
        """Drop all events."""
        self.are_dropped = True
        for *_, events in self.read:
            for event in events:
                event.drop()
        if self.size:
            self._account.remove(self, self.size)

    drop_all = drop_some


def _at(number: int, seqs: tuple[int, int]) -> int:
    """Of a thread, only the events that are told to its readers."""
    return max(number, THREADS - 1) if seqs == ALL_RUNS else number


def _split_events(events: Sequence[LoggedEvent]) -> Iterator[list[LoggedEvent]]:
    """Split events into lists of at most `PART` bytes, but of at least one event."""
    some, size = list[LoggedEvent](), 0
    for event in events:
        if some and size + event.size > PART:
            yield some
            some, size = [], 0
        some.append(event)
        size += event.size
    if some:
        yield some


def _logged(batch: EventBatch, after: int) -> list[LoggedEvent]:
    first = batch.last_number - len(batch.events) + 1
    events = (LoggedEvent(number, *event) for number, event in enumerate(batch.events, first))
    return [event for event in events if event.number > after]
