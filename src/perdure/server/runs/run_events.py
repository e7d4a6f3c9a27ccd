"""Persist run events, so that clients can read them from other servers or after a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import Context
from typing import Final

from perdure.errors import CorruptRecord, StorageError
from perdure.run_tables.records import LiveRun
from perdure.run_tables.runs import ALL_RUNS, EventBatch, NewestEvent, RunTable
from perdure.server.runs.event_log import (
    CHUNK_BYTES,
    NUMBERS_PER_RUN,
    EventDropped,
    EventLog,
    LoggedEvent,
)
from perdure.server.runs.event_memory import DropSafety, EventAccount
from perdure.server.runs.run import Run

STORE_INTERVAL_S: Final = 0.1
"""Seconds between two writes of events. One transaction stores the events of all runs."""
BATCH_BYTES: Final = 4_000_000
"""A transaction takes no more events once their total size has reached this number of bytes. The
number limits the memory for the transaction's copies of the events."""
METADATA_EVENT: Final = "metadata"
"""The kind of the first event of a run, and of the first event after a failover."""
_LOGGER: Final = logging.getLogger("perdure.server.runs")


class StoredEvents:
    """Stores run events in a database, and reads them back."""

    def __init__(self, table: RunTable) -> None:
        self._table = table
        # The runs whose new events are stored by this process. Each run is mapped to its database
        # row, in which this process is the run's owner.
        self._recorded: dict[Run, LiveRun] = {}
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    # -- runs of this process

    async def start_storing_events_of_run(self, run: Run, live_run: LiveRun) -> None:
        """Store the events of a run from now on.

        If the run may have been started before, new events get numbers greater than those of all
        its stored events.

        Args:
            run: The run.
            live_run: The row by which this process owns the run.
        """
        if not run.recorded:
            return
        log, number_before = run.events, run.event_number_before_first_event
        log.is_recorded = True
        # If other processes executed earlier runs of the thread, this process's log may lack the
        # events of these runs.
        is_behind = log.last // NUMBERS_PER_RUN < number_before // NUMBERS_PER_RUN - 1
        if run.may_have_started or is_behind:
            synchronize = (
                self.append_stored_events_of_other_processes
                if log.has_readers
                else self.empty_outdated_log_and_find_newest_event
            )
            await synchronize(log, run.thread_key, run.seq_range)
        reserved = None
        if run.may_have_started:
            reserved = await self._table.reserve_event_numbers_after_takeover(
                live_run, number_before
            )
        last, skip_until = reserved or (number_before, number_before)
        log.skip_to(skip_until)
        run.last_stored = log.last
        if last > number_before and run.feed is None:
            log.add(
                METADATA_EVENT, {"run_id": run.run_id, "attempt": live_run.attempt}, METADATA_EVENT
            )
        self._recorded[run] = live_run
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(
                self._store_new_events_periodically(), context=Context()
            )

    async def _store_new_events_periodically(self) -> None:
        """Store new events of the registered runs periodically until no runs are registered."""
        while self._recorded:
            await asyncio.sleep(STORE_INTERVAL_S)
            async with self._writing:
                try:
                    while await self._store_pending_events_and_check_if_more():
                        pass
                except StorageError as exc:
                    # Do not raise a storage error, because storing is retried after
                    # `STORE_INTERVAL_S` seconds. Log only the error's type, because its message may
                    # contain user content.
                    _LOGGER.warning(
                        "run events could not be stored yet, and will be stored later (%s)",
                        type(exc).__name__,
                    )

    async def _store_pending_events_and_check_if_more(self) -> bool:
        """Store the recorded runs' pending events in one transaction.

        Return True if the transaction reached its size limit, which means that more events may be
        waiting to be stored.
        """
        batches, remaining_bytes = dict[Run, EventBatch](), BATCH_BYTES
        for run in self._recorded:
            if remaining_bytes <= 0:
                break
            if batch := run.build_unstored_event_batch(max_bytes=remaining_bytes):
                batches[run] = batch
                remaining_bytes -= sum(len(frame) for _, frame in batch.events)
        if batches:
            await self._table.add_events([(self._recorded[run], batches[run]) for run in batches])
        for run, batch in batches.items():
            run.record_stored_batch(batch)
        return remaining_bytes <= 0

    async def store_events_except_returned_last_batch(
        self, run: Run, live: LiveRun, closing_events: Sequence[LoggedEvent] = ()
    ) -> EventBatch | None:
        """Store a finished run's remaining events except the last batch, and return that batch.

        The caller must store the last batch, for example together with the run's final status.

        Args:
            run: The run.
            live: The row by which this process owns the run.
            closing_events: Events that are added to the last batch.
        """
        self._recorded.pop(run, None)
        async with self._writing:
            while (
                batch := run.build_unstored_event_batch(max_bytes=BATCH_BYTES)
            ) and batch.last_number < run.events.last:
                await self._table.add_events([(live, batch)])
                run.record_stored_batch(batch)
            return run.build_unstored_event_batch(closing_events)

    async def store_remaining_events_for_next_process(self, run: Run, live: LiveRun) -> None:
        """Store the remaining events of a run that this process no longer executes.

        No events are stored if another process has already taken over the run.
        """
        with suppress(StorageError):
            if batch := await self.store_events_except_returned_last_batch(run, live):
                await self._table.add_events([(live, batch)])
                run.record_stored_batch(batch)

    # -- runs of other processes

    async def append_stored_events_of_other_processes(
        self, log: EventLog, thread_key: int, seq_range: tuple[int, int]
    ) -> None:
        """Read events stored by other processes from the database, and append them to a log.

        Args:
            log: The log.
            thread_key: The key of the thread.
            seq_range: The first and the last `seq` of the runs whose events are read.
        """
        try:
            while batches := await self._read_event_batches_after(thread_key, seq_range, log.last):
                for batch in batches:
                    log.extend(_convert_batch_to_logged_events(batch, log.last))
                    log.skip_to(batch.last_number)
                    log.last_stored = max(log.last_stored, batch.last_number)
        except LookupError:
            # The LookupError can be ignored here, because `iter_events_after` raises it again for
            # every reader of the log.
            await self.empty_outdated_log_and_find_newest_event(log, thread_key, seq_range)

    async def _read_event_batches_after(
        self, thread_key: int, seq_range: tuple[int, int], event_number: int
    ) -> list[EventBatch]:
        """Read a run's or a thread's events with numbers above `event_number` from the database.

        Raises:
            LookupError: The stored events are damaged.
        """
        try:
            return await self._table.read_events(
                thread_key,
                seq_range,
                _compute_event_number_to_read_after(event_number, seq_range),
            )
        except CorruptRecord as exc:
            _LOGGER.warning("the stored events of a run are damaged")
            raise LookupError("the stored events of the run are damaged") from exc

    async def empty_outdated_log_and_find_newest_event(
        self, log: EventLog, thread_key: int, seq_range: tuple[int, int]
    ) -> NewestEvent | None:
        """Find the newest stored event, and empty the in-memory log if its last event is older.

        Clients that were reading the in-memory log continue with the events stored in the database.

        Returns:
            The latest stored event; see `RunTable.find_newest_event`.
        """
        newest = await self._table.find_newest_event(
            thread_key, seq_range, _compute_event_number_to_read_after(log.last, seq_range)
        )
        if newest is not None and newest.event_number > log.last:
            log.drop_events_through(newest.event_number)
        return newest

    async def load_stored_events_that_process_lacks(self, run: Run) -> None:
        """Give readers in this process access to run events that exist only in the database."""
        if run.events_dropped or (
            run.may_be_executing_in_other_process and not run.log.has_readers
        ):
            log = EventLog() if run.events_dropped else run.log
            newest = await self.empty_outdated_log_and_find_newest_event(
                log, run.thread_key, run.seq_range
            )
            if run.events_dropped and newest is not None:
                log.close()
                run.log, run.events_dropped = log, False

    async def iter_events_after(
        self,
        log: EventLog,
        event_number: int | None,
        check_access: Callable[[], Awaitable[None]],
        thread_key: int,
        seq_range: tuple[int, int],
        account: EventAccount,
    ) -> AsyncIterator[list[LoggedEvent]]:
        """Yield a log's events with numbers above `event_number`, and new events as they arrive.

        If `event_number` is None, yield all kept events with numbers above `log.first`.

        Events that are no longer in the in-memory log are read from the database. The memory used
        by events read from the database is charged to `account`. See `EventLog.iter_events_after`.

        Args:
            log: The log of the run or of the thread.
            event_number: The number of the last event that the reader has received, or None.
            check_access: Called periodically. It raises an error if the reader is no longer
                permitted to read.
            thread_key: The key of the thread.
            seq_range: The first and the last `seq` of the runs whose events are read.
            account: The account of the reader.

        Raises:
            LookupError: Events after the number are no longer kept.
        """
        is_new_reader = event_number is None
        position = log.first if event_number is None else event_number
        while True:
            async for reached, events in self._iter_stored_events_with_last_number(
                log, position, is_new_reader, thread_key, seq_range, account
            ):
                is_new_reader, position = False, reached
                if events:
                    yield events
            try:
                async for events in log.iter_events_after(
                    max(position, log.last_dropped) if is_new_reader else position, check_access
                ):
                    yield events
                    is_new_reader, position = False, events[-1].number
                return
            except LookupError:
                # Events that the reader needs were dropped from memory. Read the database again,
                # because the dropped events may have been stored meanwhile.
                if not await self._read_event_batches_after(thread_key, seq_range, position):
                    raise

    async def _iter_stored_events_with_last_number(
        self,
        log: EventLog,
        position: int,
        is_new_reader: bool,
        thread_key: int,
        seq_range: tuple[int, int],
        account: EventAccount,
    ) -> AsyncIterator[tuple[int, list[LoggedEvent]]]:
        """Yield the stored events missing from a log, as `(last_event_number, events)` pairs.

        All events in later pairs have higher numbers than `last_event_number`. A reader that
        disconnects after a pair can therefore resume after `last_event_number` without missing a
        stored event.
        """
        while position < log.last_dropped:
            batches = StoredBatches(
                await self._read_event_batches_after(thread_key, seq_range, position),
                position,
                account,
            )
            if not batches.contents:
                return
            for reached, events in batches.iter_last_number_and_events_of_batches_after(
                position, is_new_reader
            ):
                is_new_reader, position = False, reached
                yield position, events
            batches.drop_all()


class StoredBatches:
    """An implementation of `EventHolder` for event batches that a reader fetched from the database.

    Attributes:
        contents: For each batch, the number of the event before it, the number of its last event,
            and its events.
        are_dropped: Whether the events were dropped from memory.
    """

    def __init__(
        self, batches: Sequence[EventBatch], last_received_number: int, account: EventAccount
    ) -> None:
        self.contents = [
            (
                batch.previous_number,
                batch.last_number,
                _convert_batch_to_logged_events(batch, last_received_number),
            )
            for batch in batches
        ]
        self.size, self._account, self.are_dropped = 0, account, False
        if size := sum(event.size for *_, events in self.contents for event in events):
            account.make_room_and_add_bytes(self, size)
        self.total_when_added, self.safety_of_dropping_oldest_event = (
            account.memory.total_added,
            DropSafety.READER_MAY_HAVE_TO_RECONNECT,
        )

    def __del__(self) -> None:
        if self.size:
            self._account.schedule_subtraction_of_garbage_collected_bytes(self.size)

    def iter_last_number_and_events_of_batches_after(
        self, last_received_number: int, is_new_reader: bool
    ) -> Iterator[tuple[int, list[LoggedEvent]]]:
        """Yield the events whose number is greater than `last_received_number`.

        If events are dropped from memory before the iterator has yielded them, the iterator stops
        early. Each yielded value is a pair of an event number and a list of events. A reader that
        disconnects can later resume after the last yielded event number without missing an event.

        Raises:
            EventDropped: Events of the same run are missing between the last event that the reader
                has received and the next batch.
        """
        for previous_number, last_number, events in self.contents:
            if (
                previous_number > last_received_number
                and previous_number % NUMBERS_PER_RUN
                and not is_new_reader
            ):
                raise EventDropped(previous_number)
            for events_part in _split_events_by_bytes(events):
                yield events_part[-1].number, events_part
                if self.are_dropped:
                    return
            last_received_number, is_new_reader = last_number, False
            yield last_received_number, []

    def drop_oldest_events(self) -> None:
        """Drop all events."""
        self.are_dropped = True
        for *_, events in self.contents:
            for event in events:
                event.free_content()
        if self.size:
            self._account.subtract_dropped_bytes(self, self.size)

    drop_all = drop_oldest_events


def _compute_event_number_to_read_after(event_number: int, seq_range: tuple[int, int]) -> int:
    """Return the event number after which to start reading events from the database.

    If `seq_range` is `ALL_RUNS`, the result is at least `NUMBERS_PER_RUN - 1`, because the events
    in a thread's log have numbers from `NUMBERS_PER_RUN` upwards.
    """
    return max(event_number, NUMBERS_PER_RUN - 1) if seq_range == ALL_RUNS else event_number


def _split_events_by_bytes(events: Sequence[LoggedEvent]) -> Iterator[list[LoggedEvent]]:
    """Split events into lists of at most `CHUNK_BYTES` bytes. Each list has at least one event."""
    part, size = list[LoggedEvent](), 0
    for event in events:
        if part and size + event.size > CHUNK_BYTES:
            yield part
            part, size = [], 0
        part.append(event)
        size += event.size
    if part:
        yield part


def _convert_batch_to_logged_events(batch: EventBatch, number_before: int) -> list[LoggedEvent]:
    """Return the events of a batch whose numbers are greater than `number_before`."""
    first = batch.last_number - len(batch.events) + 1
    events = (
        LoggedEvent(event_number, *event) for event_number, event in enumerate(batch.events, first)
    )
    return [event for event in events if event.number > number_before]
