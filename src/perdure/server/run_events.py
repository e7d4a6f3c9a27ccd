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
from perdure.server.run_log import CHUNK_BYTES, NUMBERS_PER_RUN, EventDropped, Log, LoggedEvent

STORE_INTERVAL_S: Final = 0.1
"""How often what runs have told is stored, in one transaction for all."""
BATCH_BYTES: Final = 4_000_000
"""The bytes of events that one transaction stores, limited because it copies them all. A larger
event is stored alone."""
METADATA_EVENT: Final = "metadata"
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

    async def start_recording(self, run: Run, live: LiveRun) -> None:
        """Store what a run tells from now on; if it began before, that goes on with it."""
        if not run.recorded:
            return
        log, first = run.events, run.number_before_events
        log.is_recorded = True
        if (
            run.may_have_started or log.last // NUMBERS_PER_RUN < first // NUMBERS_PER_RUN - 1
        ):  # others told what is before
            before = self.fetch_events if log.has_readers else self.leave_to_database
            await before(log, run.thread_key, run.seq_range)
        begun = (
            (await self._table.reserve_event_numbers(live, first)) if run.may_have_started else None
        )
        last, at = begun or (first, first)
        log.skip_to(at)
        run.last_stored = log.last
        if last > first and run.feed is None:
            log.add(METADATA_EVENT, {"run_id": run.run_id, "attempt": live.attempt}, METADATA_EVENT)
        self._recorded[run] = live
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._store_periodically(), context=Context())

    async def _store_periodically(self) -> None:
        while self._recorded:
            await asyncio.sleep(STORE_INTERVAL_S)
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
            if batch := run.build_batch(limit=left):
                batches[run] = batch
                left -= sum(len(frame) for _, frame in batch.events)
        if batches:
            await self._table.add_events([(self._recorded[run], batches[run]) for run in batches])
        for run, batch in batches.items():
            run.note_stored(batch)
        return left <= 0

    async def store_all_but_last(
        self, run: Run, live: LiveRun, closing: Sequence[LoggedEvent] = ()
    ) -> EventBatch | None:
        """Store all but the last events of a run that ends, and return these for the caller."""
        self._recorded.pop(run, None)
        async with self._writing:
            while (
                batch := run.build_batch(limit=BATCH_BYTES)
            ) and batch.last_number < run.events.last:
                await self._table.add_events([(live, batch)])
                run.note_stored(batch)
            return run.build_batch(closing)

    async def hand_over(self, run: Run, live: LiveRun) -> None:
        """Store the rest of what a run told that goes on elsewhere, unless it does so already."""
        with suppress(StorageError):
            if batch := await self.store_all_but_last(run, live):
                await self._table.add_events([(live, batch)])
                run.note_stored(batch)

    # -- of others

    async def fetch_events(self, log: Log, thread: int, seqs: tuple[int, int]) -> None:
        """Add to a log what was told elsewhere."""
        try:
            while batches := await self._read_batches(thread, seqs, log.last):
                for batch in batches:
                    log.extend(_to_logged_events(batch, log.last))
                    log.skip_to(batch.last_number)
                    log.last_stored = max(log.last_stored, batch.last_number)
        except LookupError:  # its readers are told so
            await self.leave_to_database(log, thread, seqs)

    async def _read_batches(
        self, thread: int, seqs: tuple[int, int], number: int
    ) -> list[EventBatch]:
        try:
            return await self._table.read_events(thread, seqs, _skip_run_events(number, seqs))
        except CorruptRecord as exc:
            _LOGGER.warning("events of a run are damaged")
            raise LookupError("they are damaged") from exc

    async def leave_to_database(
        self, log: Log, thread: int, seqs: tuple[int, int]
    ) -> tuple[int, int, RunState] | None:
        """Keep none in a log, if others told what follows it; see `RunTable.find_newest_event`."""
        newest = await self._table.find_newest_event(thread, seqs, _skip_run_events(log.last, seqs))
        if newest is not None and newest[1] > log.last:  # as before
            log.clear_until(newest[1])
        return newest

    async def load_events(self, run: Run) -> None:
        """Have the events of a run read from the database that this process does not have."""
        if run.events_dropped or (run.is_elsewhere and not run.log.has_readers):
            log = Log() if run.events_dropped else run.log
            found = await self.leave_to_database(log, run.thread_key, run.seq_range)
            if run.events_dropped and found is not None:
                log.close()
                run.log, run.events_dropped = log, False

    async def read_after(
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
            async for place, events in self._read_stored_after(
                log, at, begins, thread, seqs, account
            ):
                begins, at = False, place
                if events:
                    yield events
            try:
                async for events in log.read_after(
                    max(at, log.last_dropped) if begins else at, look
                ):
                    yield events
                    begins, at = False, events[-1].number
                return
            except LookupError:  # the log may have been left to the database meanwhile
                if not await self._read_batches(thread, seqs, at):
                    raise

    async def _read_stored_after(
        self,
        log: Log,
        at: int,
        begins: bool,
        thread: int,
        seqs: tuple[int, int],
        account: EventAccount,
    ) -> AsyncIterator[tuple[int, list[LoggedEvent]]]:
        """Yield stored events that a log does not have, with the number that is reached by them."""
        while at < log.last_dropped:
            batches = StoredBatches(await self._read_batches(thread, seqs, at), at, account)
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
            (each.previous_number, each.last_number, _to_logged_events(each, number))
            for each in batches
        ]
        self.size, self._account, self.are_dropped = 0, account, False
        if size := sum(event.size for *_, events in self.read for event in events):
            account.add(self, size)
        self.total_when_added, self.drop_priority = account.memory.total_added, 1

    def __del__(self) -> None:
        if self.size:
            self._account.uncount_later(self.size)

    def events_after(self, at: int, begins: bool) -> Iterator[tuple[int, list[LoggedEvent]]]:
        """Yield events, with the number that is reached by them, until they are dropped.

        Raises:
            EventDropped: Events are missing between the reader's last event and the first one here.
        """
        for since, until, events in self.read:
            if since > at and since % NUMBERS_PER_RUN and not begins:
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


def _skip_run_events(number: int, seqs: tuple[int, int]) -> int:
    """Of a thread, only the events that are told to its readers."""
    return max(number, NUMBERS_PER_RUN - 1) if seqs == ALL_RUNS else number


def _split_events(events: Sequence[LoggedEvent]) -> Iterator[list[LoggedEvent]]:
    """Split events into lists of at most `PART` bytes, but of at least one event."""
    some, size = list[LoggedEvent](), 0
    for event in events:
        if some and size + event.size > CHUNK_BYTES:
            yield some
            some, size = [], 0
        some.append(event)
        size += event.size
    if some:
        yield some


def _to_logged_events(batch: EventBatch, after: int) -> list[LoggedEvent]:
    first = batch.last_number - len(batch.events) + 1
    events = (LoggedEvent(number, *event) for number, event in enumerate(batch.events, first))
    return [event for event in events if event.number > after]
