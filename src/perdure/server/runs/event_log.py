"""Keep the events of a run or a thread in memory, and stream them to any number of readers."""

from __future__ import annotations

import asyncio
import mmap
from bisect import bisect_right
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from operator import attrgetter
from typing import Any, Final, cast

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from perdure.server.http.reply import encode_json
from perdure.server.runs.event_memory import DropSafety, EventAccount

RETAINED_BYTES: Final = 4_000_000
"""The maximum size in bytes of the events that a log keeps after all readers have received them. A
single larger event is kept, too. `EventMemory` may drop events earlier."""
BACKLOG_BYTES: Final = 32_000_000
"""The maximum size in bytes of the events that a log keeps for a reader that is behind. A reader
that needs older events receives the error `StreamLost`, unless the events are stored in the
database. `EventMemory` may drop events earlier."""
CHUNK_BYTES: Final = 65_536
"""The maximum size in bytes of the events that are passed to a connection at once. uvicorn keeps
the passed events in memory until the client reads, and sets no limit itself."""
NUMBERS_PER_RUN: Final = 1 << 32
"""The size of the range of event numbers of one run in the log of a thread. The range begins at
this number times the `seq` of the run."""
OWN_PAGES_BYTES: Final = 262_144
"""The size in bytes from which an event has memory pages of its own. The memory pages of an event
are returned to the operating system when the event is dropped. Memory in the heap might not be
returned."""
ACCESS_CHECK_S: Final = 15
"""Seconds between two checks whether a reader may still read."""
PING_S: Final = 15
"""Seconds between two comments that are sent so that proxies keep a stream without events open."""
SEND_TIMEOUT_S: Final = 30
"""Seconds for which a reader may leave a stream unread after its buffers are full."""
# `mmap` flags for the anonymous memory maps that hold large events. The maps are private, because
# allocating pages is twice as fast for private maps as for shared maps.
_PRIVATE_PAGES: Final[dict[str, Any]] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)
# Tolerance, in seconds, for event loop timers, which can fire slightly early.
_TIMER_TOLERANCE_S: Final = 0.001
_NUMBER: Final = attrgetter("number")


def build_frame(event: str, data: Any) -> bytes:
    """Encode an event as bytes in the server-sent events format."""
    return b"event: %b\ndata: %b\n\n" % (_encode_event_name(event), encode_event_data(data))


def _encode_event_name(event: str) -> bytes:
    """Encode an event name as bytes, replacing line breaks with spaces."""
    return event.replace("\n", " ").replace("\r", " ").encode()


def encode_event_data(value: Any) -> bytes:
    """Encode any value of a graph as JSON.

    If the value cannot be encoded, return an error object as JSON.
    """
    try:
        return encode_json(value)
    except Exception as exc:
        # The value cannot be encoded as JSON. For example, it contains a reference cycle, is nested
        # too deeply, or raises an error in `__str__`.
        message = f"a {type(value).__name__} cannot be sent as JSON ({type(exc).__name__})"
        return encode_json({"error": "NotSerializable", "message": message})


class EventDropped(LookupError):
    """Raised if an event was dropped to free memory before a reader received it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"the events up to {number} are no longer available")


class StreamCut(Exception):
    """Raised if an event was dropped while it was being sent to a client.

    The client received only part of an event that was then dropped, so the connection is closed.
    """


class EventStream(StreamingResponse):
    """A streaming response that sends keep-alive comments between events.

    Args:
        frames: The encoded events.
        headers: The headers of the response.
        on_disconnect: Called if the client disconnects or stops reading before the last event. It
            is also called if the client disconnects before the first event was sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        on_disconnect: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(frames, headers=headers)
        self._on_disconnect = on_disconnect
        self._ended_by_server = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._on_disconnect is not None and not self._ended_by_server:
                self._on_disconnect()

    async def stream_response(self, send: Send) -> None:
        """Send the events, and raise `TimeoutError` if the client stops reading."""
        loop = asyncio.get_running_loop()
        is_within_event = False  # Whether an event was sent only in part
        send_started_at: float | None = None  # None while no event is being sent
        # Check the send timeout with a single timer for the whole stream, because one timer per
        # event would take 2 % of a turn's CPU time.
        timer = loop.call_later(SEND_TIMEOUT_S, lambda: check_send_time())

        def check_send_time() -> None:
            """End the event stream if the client does not accept an event within the timeout."""
            nonlocal timer
            now = loop.time()
            started_at = now if send_started_at is None else send_started_at
            if now - started_at >= SEND_TIMEOUT_S - _TIMER_TOLERANCE_S:
                limit.reschedule(now)
            else:
                timer = loop.call_at(started_at + SEND_TIMEOUT_S, check_send_time)

        async def send_events(message: Message) -> None:
            """Send a chunk of the stream, and record whether it ends in the middle of an event."""
            nonlocal is_within_event, send_started_at
            ends = message.get("body", b"\n\n").endswith(b"\n\n")
            is_within_event = is_within_event or not ends
            send_started_at = loop.time()
            await send(message)
            send_started_at = None
            is_within_event = not ends

        async def ping() -> None:
            """Send a keep-alive comment at regular intervals, except in the middle of an event."""
            while True:
                await asyncio.sleep(PING_S)
                if not is_within_event:
                    async with asyncio.timeout(SEND_TIMEOUT_S):
                        await send(
                            {"type": "http.response.body", "body": b": ping\n\n", "more_body": True}
                        )

        pings = asyncio.create_task(ping())
        try:
            async with asyncio.timeout(None) as limit:
                await super().stream_response(send_events)
            self._ended_by_server = True
        except StreamCut:
            self._ended_by_server = True
            raise
        finally:
            timer.cancel()
            pings.cancel()
            await cast(AsyncGenerator[bytes, None], self.body_iterator).aclose()


def build_event_stream(
    frames: AsyncGenerator[bytes, None],
    headers: Mapping[str, str] | None = None,
    on_disconnect: Callable[[], None] | None = None,
) -> EventStream:
    """Return a response that streams events; see `EventStream`.

    The response has a header that tells proxies not to buffer it.
    """
    return EventStream(frames, {"X-Accel-Buffering": "no", **(headers or {})}, on_disconnect)


class LoggedEvent:
    """An event whose content can be freed while readers still hold references to the event.

    Attributes:
        number: The number of the event in its log. The numbers of a run's log begin at 1. For those
            of a thread's log, see `NUMBERS_PER_RUN`.
        kind: The kind of the event, by which readers select events.
        size: The size of its frame in bytes.
        total_when_added: The value of `EventMemory.total_added` when the event was added.
    """

    __slots__ = ("_content", "kind", "number", "size", "total_when_added")

    def __init__(self, number: int, kind: Any, content: bytes) -> None:
        self.number, self.kind, self.size, self.total_when_added = number, kind, len(content), 0
        self._content: bytes | mmap.mmap | None = content
        if self.size >= OWN_PAGES_BYTES:
            self._content = mmap.mmap(-1, self.size, **_PRIVATE_PAGES)
            self._content.write(content)

    @property
    def sse_frame(self) -> bytes:
        """Return the event, encoded in the server-sent events format.

        Source: https://html.spec.whatwg.org/multipage/server-sent-events.html

        Raises:
            EventDropped: The event was dropped.
        """
        return self.read_range(0, self.size)

    @property
    def json_bytes(self) -> bytes:
        """Return the JSON in the frame.

        Raises:
            EventDropped: The event was dropped.
        """
        return self.read_range(self.find_byte_offset_in_frame(b"\ndata: ") + 7, self.size - 2)

    def read_range(self, start: int, stop: int) -> bytes:
        """Return the frame's bytes from offset `start` up to but not including `stop`.

        Raises:
            EventDropped: The event was dropped.
        """
        if self._content is None:
            raise EventDropped(self.number)
        return self._content[start:stop]

    def find_byte_offset_in_frame(self, searched_bytes: bytes) -> int:
        """Return the index of `searched_bytes` in the event's SSE frame, or -1 if not found.

        If the frame contains `searched_bytes` more than once, return the index of the first
        occurrence.

        Raises:
            EventDropped: The event was dropped.
        """
        if self._content is None:
            raise EventDropped(self.number)
        # Pass 0 as the start index, because `mmap.find` otherwise starts at the current file
        # position.
        return self._content.find(searched_bytes, 0)

    def free_content(self) -> None:
        """Free the memory of the event."""
        if isinstance(self._content, mmap.mmap):
            self._content.close()
        self._content = None


def iter_sse_chunks(
    events: Iterable[LoggedEvent], build_id_line: Callable[[LoggedEvent], bytes] | None = None
) -> Iterator[bytes]:
    """Yield event frames as chunks of at most `CHUNK_BYTES` + 1 bytes. Small frames are joined.

    A large frame is split into chunks. The chunks are read one at a time, so that the frame's
    memory can be freed before all of its chunks have been sent (see `LoggedEvent.free_content`).

    Args:
        events: The events to send.
        build_id_line: Returns the line that replaces the first line of an event's frame, the `id`.

    Raises:
        EventDropped: An event was dropped before a part of it was sent.
        StreamCut: An event was dropped after a part of it was sent.
    """
    joined_frames, size = list[bytes](), 0
    for event in events:
        prefix, start = b"", 0
        if build_id_line is not None:
            prefix, start = build_id_line(event), event.find_byte_offset_in_frame(b"\n") + 1
        length = len(prefix) + event.size - start
        if joined_frames and size + length > CHUNK_BYTES:
            yield b"".join(joined_frames)
            joined_frames, size = [], 0
        if length <= CHUNK_BYTES:
            joined_frames.append(prefix + event.read_range(start, event.size))
            size += length
            continue
        while start < event.size:
            stop = start + CHUNK_BYTES - len(prefix)
            if event.size - stop < 2:
                # Keep an event's two final line feeds in one chunk. A chunk that ends with two line
                # feeds ends with a complete event.
                stop = event.size
            try:
                part = prefix + event.read_range(start, stop)
            except EventDropped as exc:
                if prefix or start == 0:
                    raise
                raise StreamCut(str(exc)) from None
            yield part
            prefix, start = b"", stop
    if joined_frames:
        yield b"".join(joined_frames)


class EventLog:
    """A log of events, in ascending order of event number.

    All methods of a log must be called from the same event loop.

    Args:
        thread_key: The key of the thread, or 0 if the events are those of one run.
        account: The account that counts the memory of the events, or None.

    Attributes:
        first: A reader that has not received any event starts with the event after this number.
        last: The number of the newest event.
        last_dropped: The number of the newest event that is no longer kept in memory, or 0.
        last_stored: The number of the newest event that is stored in the database, or 0.
        last_lost: The number of the newest event that was dropped before it was stored, or 0.
        is_recorded: Whether the events are stored in the database.
        removals: The sequence number of a removal from the thread. All events of the log are from
            runs that started after this removal. None if the number is unknown.
        removals_read_at: When that number was read, by `time.monotonic`.
        newest: The newest event, if this process added it. Its frame may be dropped.
        size: The size in bytes of the events that are kept.
    """

    def __init__(self, thread_key: int = 0, account: EventAccount | None = None) -> None:
        self.thread_key = thread_key
        self.removals: int | None = None
        self.removals_read_at = 0.0
        self.newest: LoggedEvent | None = None
        self._entries: list[LoggedEvent] = []
        self.first = self.last = self.size = 0
        self.last_dropped = self.last_stored = self.last_lost = 0
        self._closed = self.is_recorded = False
        self._account = account
        self._writers = 0
        # For each reader, `_received_numbers` has the number of the last event that the reader
        # received, and `_handed_numbers` has the number of the last event that was yielded to the
        # reader. When a reader asks for more events, all events that were yielded to the reader
        # earlier are considered received.
        self._received_numbers: dict[asyncio.Event, int] = {}
        self._handed_numbers: dict[asyncio.Event, int] = {}

    def __del__(self) -> None:
        if self.size and self._account is not None:
            self._account.schedule_subtraction_of_garbage_collected_bytes(self.size)

    @property
    def is_empty(self) -> bool:
        """Return whether the log keeps no events."""
        return not self._entries

    @property
    def has_readers(self) -> bool:
        """Return whether somebody reads the log."""
        return bool(self._received_numbers)

    @property
    def is_newest_event_lost(self) -> bool:
        """Return whether the newest event was dropped before it could be stored in the database.

        If the newest event was dropped, all older events have been dropped from memory, too.
        """
        return 0 < self.last == self.last_lost

    @property
    def total_when_added(self) -> int:
        """Return the value that `EventMemory.total_added` had when the oldest event was added."""
        return self._entries[0].total_when_added

    @property
    def safety_of_dropping_oldest_event(self) -> DropSafety:
        """Return the `DropSafety` level that applies to dropping the log's oldest event."""
        oldest = self._entries[0].number
        if self.is_recorded and oldest > self.last_stored:
            # The oldest event in memory has not been stored in the database yet. If it were dropped
            # now, new readers would miss it.
            return DropSafety.READERS_MAY_MISS_EVENT
        if oldest <= self._find_last_received_number():
            return DropSafety.NOTHING_IS_LOST
        if oldest > self.last_stored:
            return DropSafety.READERS_MAY_MISS_EVENT
        handed = self._handed_numbers.items()
        if any(self._received_numbers[reader] < oldest <= number for reader, number in handed):
            return DropSafety.READER_MAY_HAVE_TO_RECONNECT
        return DropSafety.NOTHING_IS_LOST

    def _find_last_received_number(self) -> int:
        """Return the number of the latest event that all readers have received."""
        return min(self._received_numbers.values(), default=self.last)

    def charge_memory_to_account(self, account: EventAccount) -> None:
        """Charge the memory used by the log's events to `account` from now on."""
        if self._account is account:
            return
        size = self.size
        if self._account is not None:
            self._account.subtract_dropped_bytes(self, size)
        self._account, self.size = account, 0
        if size:
            account.make_room_and_add_bytes(self, size)

    def note_removals(self, number: int | None, read_at: float) -> None:
        """Set `removals` and `removals_read_at`."""
        self.removals, self.removals_read_at = number, read_at

    def start_at_end(self) -> None:
        """Make new readers of the log start with the next event that is added."""
        self.first = self.last

    def skip_to(self, last: int) -> None:
        """Ensure that the next event's number is greater than `last`."""
        self.last = max(self.last, last)

    def drop_events_through(self, last_number: int) -> None:
        """Drop all events from memory.

        After the call, readers load events with numbers up to `last_number` from the database.
        """
        lost = self.last_lost
        self._remove_oldest_events(len(self._entries))
        self.last_lost, self.newest = lost, None
        self.last = self.last_dropped = max(self.last, last_number)

    def make_event(self, number: int, event: str, data: Any, kind: Any = None) -> LoggedEvent:
        """Build a `LoggedEvent` by encoding an event's name and data as a server-sent event."""
        content = number, _encode_event_name(event), encode_event_data(data)
        return LoggedEvent(number, kind, b"id: %d\nevent: %b\ndata: %b\n\n" % content)

    def add(self, event: str, data: Any, kind: Any = None) -> None:
        """Append an event, and wake the readers."""
        self.extend([self.make_event(self.last + 1, event, data, kind)])

    def extend(self, events: Iterable[LoggedEvent]) -> None:
        """Append the events that are newer than the log's last event, and wake the readers."""
        for event in events:
            if event.number > self.last:
                self._add_event_size_to_log_and_account(event)
                self._entries.append(event)
                self.last, self.newest = event.number, event
        self._drop_events_beyond_limits()
        self._wake_readers()

    def list_events_after(
        self, event_number: int, max_bytes: int | None = None
    ) -> list[LoggedEvent]:
        """Return the in-memory events whose number is greater than `event_number`.

        Events are returned oldest first. No more events are added to the returned list once their
        total size reaches `max_bytes` bytes. The list is empty only if there are no events after
        `event_number`.
        """
        start = stop = bisect_right(self._entries, event_number, key=_NUMBER)
        if max_bytes is None or self.size <= max_bytes:
            return self._entries[start:]
        size = 0
        while stop < len(self._entries) and size < max_bytes:
            size += self._entries[stop].size
            stop += 1
        return self._entries[start:stop]

    def close(self) -> None:
        """Declare that no more events follow.

        Clients that read the log stop reading once they have received all events in it.
        """
        self._closed = True
        self._wake_readers()
        self._allow_dropping_events_if_unused()

    def increment_writer_count(self) -> None:
        """Register a writer of events.

        The caller must call `decrement_writer_count` when the writer has finished.
        """
        self._writers += 1
        self._mark_in_use()

    def decrement_writer_count(self) -> None:
        """Unregister a writer; see `increment_writer_count`."""
        self._writers -= 1
        self._allow_dropping_events_if_unused()

    async def iter_events_after(
        self, event_number: int, check_access: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[list[LoggedEvent]]:
        """Yield the log's events with numbers above `event_number`, and new events as they arrive.

        The iteration ends when the log is closed and all its events have been yielded. If the
        reader has lost access, `check_access` raises an error, which ends the iteration.

        When the reader asks for more events, all events that were yielded to the reader earlier are
        considered received.

        Raises:
            LookupError: Events after the number are no longer kept.
        """
        loop, reader = asyncio.get_running_loop(), asyncio.Event()
        # A timer triggers the regular checks of the reader's access. One timer serves many
        # events, because one timer per event would be slower.
        timer = loop.call_later(ACCESS_CHECK_S, reader.set)
        try:
            self._received_numbers[reader] = self._handed_numbers[reader] = event_number
            self._mark_in_use()
            while True:
                reader.clear()
                if loop.time() >= timer.when() - _TIMER_TOLERANCE_S:
                    await check_access()
                    timer = loop.call_later(ACCESS_CHECK_S, reader.set)
                if event_number < self.last_dropped:
                    raise EventDropped(self.last_dropped)
                events = self.list_events_after(event_number, CHUNK_BYTES)
                if events:
                    event_number = self._handed_numbers[reader] = events[-1].number
                    yield events
                    self._received_numbers[reader] = event_number
                elif self._closed:
                    return
                else:
                    await reader.wait()
        finally:
            timer.cancel()
            del self._received_numbers[reader], self._handed_numbers[reader]
            self._drop_events_beyond_limits()
            self._allow_dropping_events_if_unused()

    def drop_oldest_events(self) -> None:
        """Drop the oldest events until about half of the log's memory is freed.

        An event can be dropped from memory safely if the event is stored in the database. If the
        log's events are never stored, an event can be dropped safely once all readers have received
        the event. If the log has events that can be dropped safely, drop only such events, even if
        they make up less than half of the log's memory. If the log has no event that can be dropped
        safely, drop events anyway until about half of the log's memory is freed, because the memory
        is needed.
        """
        expendable = (
            self.last_stored
            if self.is_recorded
            else max(self._find_last_received_number(), self.last_stored)
        )
        count, size = 0, 0
        has_expendable = self._entries[0].number <= expendable
        for entry in self._entries:
            if count and (size >= self.size // 2 or (entry.number > expendable and has_expendable)):
                break
            size += entry.size
            count += 1
        self._remove_oldest_events(count)

    def drop_all(self) -> None:
        """Drop all events."""
        self._remove_oldest_events(len(self._entries))

    def _drop_events_beyond_limits(self) -> None:
        """Drop the oldest events that exceed the log's limits, but always keep the latest event."""
        size = self.size
        if size <= RETAINED_BYTES and size <= BACKLOG_BYTES:
            return
        received, count = self._find_last_received_number(), 0
        for entry in self._entries[:-1]:
            if size <= (RETAINED_BYTES if entry.number <= received else BACKLOG_BYTES):
                break
            size -= entry.size
            count += 1
        self._remove_oldest_events(count)

    def _add_event_size_to_log_and_account(self, event: LoggedEvent) -> None:
        """Add an event's size to the total sizes of the log and of the log's `EventAccount`.

        The event's attribute `total_when_added` is set to the current value of
        `EventMemory.total_added`, so that the age of the event can be determined later.
        """
        if self._account is None:
            self.size += event.size
        else:
            self._account.make_room_and_add_bytes(self, event.size)
            event.total_when_added = self._account.memory.total_added

    def _remove_oldest_events(self, count: int) -> None:
        """Drop a number of the oldest events."""
        if not count:
            return
        size = 0
        for entry in self._entries[:count]:
            entry.free_content()
            size += entry.size
            self.last_dropped = entry.number
        if self.last_dropped > self.last_stored:
            self.last_lost = self.last_dropped
        del self._entries[:count]
        if self._account is None:
            self.size -= size
        else:
            self._account.subtract_dropped_bytes(self, size)

    def _allow_dropping_events_if_unused(self) -> None:
        """Mark the log as unused if it has no readers or writers, so its events can be dropped."""
        has_writer = self._writers > 0 if self.thread_key else not self._closed
        if (
            self.size
            and self._account is not None
            and not has_writer
            and not self._received_numbers
        ):
            self._account.memory.mark_unused(self)

    def _mark_in_use(self) -> None:
        """Mark the log as in use, so that its events are not dropped like those of unused logs."""
        if self._account is not None:
            self._account.memory.mark_in_use(self)

    def _wake_readers(self) -> None:
        """Wake all readers that are waiting for the next event."""
        for reader in self._received_numbers:
            reader.set()
