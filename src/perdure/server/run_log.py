"""The events of a run, or of a thread, for any number of readers, while they are sent."""

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
from starlette.types import Message, Send

from perdure.server.event_memory import EventAccount
from perdure.server.reply import encode_json

RETAINED_BYTES: Final = 4_000_000
"""The bytes of events that a log keeps although all readers have received them, or a single larger
event. `EventMemory` may drop them earlier."""
BACKLOG_BYTES: Final = 32_000_000
"""The bytes of events that a log keeps for a reader that is behind. If the reader needs older
events, it receives the error `StreamLost`. `EventMemory` may drop the events earlier."""
CHUNK_BYTES: Final = 65_536
"""The most bytes of events that are passed to a connection at once. uvicorn keeps them until the
client reads, without a limit of its own."""
NUMBERS_PER_RUN: Final = 1 << 32
"""The numbers of the events of a thread begin with so many times the `seq` of their run."""
OWN_PAGES_BYTES: Final = 262_144
"""The size in bytes from which an event has memory pages of its own. These pages are returned to
the system when the event is dropped. Memory in the heap might not be."""
ACCESS_CHECK_S: Final = 15
"""How often it is seen whether a reader is still known."""
PING_S: Final = 15
"""How often a comment is sent, so that proxies keep a stream without events open."""
SEND_TIMEOUT_S: Final = 30
"""How long a reader may leave a stream unread, once its buffers are full."""
_PRIVATE_PAGES: Final[dict[str, Any]] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)  # private pages take half the time of shared ones
_TIMER_TOLERANCE_S: Final = 0.001  # a timer may be as much too early
_NUMBER: Final = attrgetter("number")


def build_frame(event: str, data: Any) -> bytes:
    """An event as it is sent."""
    return b"event: %b\ndata: %b\n\n" % (_encode_event_name(event), encode_event_data(data))


def _encode_event_name(event: str) -> bytes:
    return event.replace("\n", " ").replace("\r", " ").encode()


def encode_event_data(value: Any) -> bytes:
    """A value as JSON, whatever a graph has sent; a note, if it cannot be encoded."""
    try:
        return encode_json(value)
    except Exception as exc:  # of a cycle, of what is nested too deep, of a `__str__`
        why = f"a {type(value).__name__} that cannot be sent as JSON ({type(exc).__name__})"
        return encode_json({"error": "NotSerializable", "message": why})


class EventDropped(LookupError):
    """An event was dropped before a reader had received it, because there were too many."""

    def __init__(self, number: int) -> None:
        super().__init__(f"the events up to {number} are no longer kept")


class StreamCut(Exception):
    """A reader had received a part of an event when the event was dropped.

    The rest cannot be sent, and no other event can follow, so the connection is closed.
    """


class EventStream(StreamingResponse):
    """A reply that is a stream of events, with comments between them."""

    media_type = "text/event-stream"

    async def stream_response(self, send: Send) -> None:
        """Send it; who does not read it is not waited for."""
        is_within_event = False  # whether only a part of an event was sent

        async def sending(message: Message) -> None:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(message)

        async def sending_events(message: Message) -> None:
            nonlocal is_within_event
            ends = message.get("body", b"\n\n").endswith(b"\n\n")
            is_within_event = is_within_event or not ends
            await sending(message)
            is_within_event = not ends

        async def ping() -> None:
            while True:
                await asyncio.sleep(PING_S)
                if not is_within_event:
                    await sending(
                        {"type": "http.response.body", "body": b": ping\n\n", "more_body": True}
                    )

        pings = asyncio.create_task(ping())
        try:
            await super().stream_response(sending_events)
        finally:
            pings.cancel()
            await cast(AsyncGenerator[bytes, None], self.body_iterator).aclose()


def build_event_stream(
    frames: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None
) -> EventStream:
    """A reply that is a stream of events, which proxies pass on as they come."""
    return EventStream(frames, headers={"X-Accel-Buffering": "no", **(headers or {})})


class LoggedEvent:
    """An event whose memory is freed when it is dropped, even if there are references to it.

    Attributes:
        number: Its place in the log, from 1.
        kind: The kind of the event, for readers that want only some kinds.
        size: The bytes of its frame.
        since: The value of `EventMemory.added` when the event was added.
    """

    __slots__ = ("_content", "kind", "number", "size", "total_when_added")

    def __init__(self, number: int, kind: Any, frame: bytes) -> None:
        self.number, self.kind, self.size, self.total_when_added = number, kind, len(frame), 0
        self._content: bytes | mmap.mmap | None = frame
        if self.size >= OWN_PAGES_BYTES:
            self._content = mmap.mmap(-1, self.size, **_PRIVATE_PAGES)
            self._content.write(frame)

    @property
    def frame(self) -> bytes:
        """The event as it is sent.

        Source: https://html.spec.whatwg.org/multipage/server-sent-events.html

        Raises:
            EventDropped: It was dropped.
        """
        return self.read_range(0, self.size)

    @property
    def data(self) -> bytes:
        """The JSON in its frame.

        Raises:
            EventDropped: It was dropped.
        """
        return self.read_range(self.find(b"\ndata: ") + 7, self.size - 2)

    def read_range(self, start: int, stop: int) -> bytes:
        """Return a range of the bytes of its frame.

        Raises:
            EventDropped: It was dropped.
        """
        if self._content is None:
            raise EventDropped(self.number)
        return self._content[start:stop]

    def find(self, text: bytes) -> int:
        """Return the index of the first occurrence of a text in its frame, or -1.

        Raises:
            EventDropped: It was dropped.
        """
        if self._content is None:
            raise EventDropped(self.number)
        return self._content.find(text, 0)  # without 0, mmap searches after the end

    def drop(self) -> None:
        """Free its memory."""
        if isinstance(self._content, mmap.mmap):
            self._content.close()
        self._content = None


def split_frames(
    events: Iterable[LoggedEvent], rename: Callable[[LoggedEvent], bytes] | None = None
) -> Iterator[bytes]:
    """Yield the frames of events in parts of at most `PART` bytes. Small frames are joined.

    No other copy of a frame is kept while it is sent, so that `drop` frees its memory.

    Args:
        events: What is sent.
        rename: Returns a line that replaces the first line of the frame, the `id`, of an event.

    Raises:
        EventDropped: An event was dropped before a part of it was sent.
        StreamCut: An event was dropped after a part of it was sent.
    """
    joined, size = list[bytes](), 0
    for event in events:
        head, start = b"", 0
        if rename is not None:
            head, start = rename(event), event.find(b"\n") + 1
        length = len(head) + event.size - start
        if joined and size + length > CHUNK_BYTES:
            yield b"".join(joined)
            joined, size = [], 0
        if length <= CHUNK_BYTES:
            joined.append(head + event.read_range(start, event.size))
            size += length
            continue
        while start < event.size:
            stop = start + CHUNK_BYTES - len(head)
            if event.size - stop < 2:  # keep both line feeds at its end in one part
                stop = event.size
            try:
                part = head + event.read_range(start, stop)
            except EventDropped as exc:
                if head or start == 0:
                    raise
                raise StreamCut(str(exc)) from None
            yield part
            head, start = b"", stop
    if joined:
        yield b"".join(joined)


class Log:
    """A log of events in order, for use in one event loop.

    Args:
        thread: The key of the thread, or 0 if the events are those of one run.
        account: The account that counts the memory of the events, or None.

    Attributes:
        first: The number after which a reader begins that has read nothing.
        last: The number of the newest event.
        dropped: The number of the newest event that is no longer kept in memory, or 0.
        stored: The number of the newest event that is stored in the database, or 0.
        lost: The number of the newest event that was dropped before it was stored, or 0.
        is_recorded: Whether the events are stored in the database.
        removals: The number of erasures from the thread before the events, or None if unknown.
        removals_read_at: When that number was read, by `time.monotonic`.
        newest: The newest event, if this process added it; its frame may be dropped.
        size: The bytes of the events that are kept.
    """

    def __init__(self, thread: int = 0, account: EventAccount | None = None) -> None:
        self.thread = thread
        self.removals: int | None = None
        self.removals_read_at = 0.0
        self.newest: LoggedEvent | None = None
        self._entries: list[LoggedEvent] = []
        self.first = self.last = self.last_dropped = self.last_stored = self.last_lost = (
            self.size
        ) = 0
        self._closed = self.is_recorded = False
        self._account = account
        self._writers = 0
        self._received_numbers: dict[
            asyncio.Event, int
        ] = {}  # the last event that a reader has received
        self._handed_numbers: dict[
            asyncio.Event, int
        ] = {}  # the last event that was given to a reader

    def __del__(self) -> None:
        if self.size and self._account is not None:
            self._account.uncount_later(self.size)

    @property
    def is_empty(self) -> bool:
        """Whether it keeps no event."""
        return not self._entries

    @property
    def has_readers(self) -> bool:
        """Whether anybody reads it."""
        return bool(self._received_numbers)

    @property
    def is_lost(self) -> bool:
        """Whether its newest event, and so every event, was dropped before it was stored."""
        return 0 < self.last == self.last_lost

    @property
    def total_when_added(self) -> int:
        """See `EventHolder.total_when_added`."""
        return self._entries[0].total_when_added

    @property
    def drop_priority(self) -> int:
        """See `EventHolder.drop_priority`."""
        oldest = self._entries[0].number
        if self.is_recorded and oldest > self.last_stored:  # even if nobody reads it at present
            return 0
        if oldest <= self._last_received():
            return 2
        if oldest > self.last_stored:
            return 0
        handed = self._handed_numbers.items()
        return (
            1
            if any(self._received_numbers[reader] < oldest <= number for reader, number in handed)
            else 2
        )

    def _last_received(self) -> int:
        return min(self._received_numbers.values(), default=self.last)

    def set_account(self, account: EventAccount) -> None:
        """Let another account count the memory of the events."""
        if self._account is account:
            return
        size = self.size
        if self._account is not None:
            self._account.remove(self, size)
        self._account, self.size = account, 0
        if size:
            account.add(self, size)

    def note_removals(self, number: int | None, read_at: float) -> None:
        """Note the number of erasures from the thread, and when it was read."""
        self.removals, self.removals_read_at = number, read_at

    def start_at_end(self) -> None:
        """Readers that have read none begin with the next event."""
        self.first = self.last

    def skip_to(self, number: int) -> None:
        """The next event has the number after this one."""
        self.last = max(self.last, number)

    def clear_until(self, number: int) -> None:
        """Keep none up to an event: they are read from the database."""
        lost = self.last_lost
        self._remove_oldest(len(self._entries))
        self.last_lost, self.newest = lost, None
        self.last = self.last_dropped = max(self.last, number)

    def make_event(self, number: int, event: str, data: Any, kind: Any = None) -> LoggedEvent:
        """An event, as it is kept."""
        content = number, _encode_event_name(event), encode_event_data(data)
        return LoggedEvent(number, kind, b"id: %d\nevent: %b\ndata: %b\n\n" % content)

    def add(self, event: str, data: Any, kind: Any = None) -> None:
        """Append an event; readers get it."""
        self.extend([self.make_event(self.last + 1, event, data, kind)])

    def extend(self, events: Iterable[LoggedEvent]) -> None:
        """Append events, but for those that are here; readers get them."""
        for event in events:
            if event.number > self.last:
                self._count_event(event)
                self._entries.append(event)
                self.last, self.newest = event.number, event
        self._drop_beyond_limits()
        self._wake_readers()

    def events_after(self, number: int, limit: int | None = None) -> list[LoggedEvent]:
        """Return the kept events after a number: at most `limit` bytes, but at least one event."""
        start = stop = bisect_right(self._entries, number, key=_NUMBER)
        if limit is None:
            return self._entries[start:]
        size = 0
        while stop < len(self._entries) and size < limit:
            size += self._entries[stop].size
            stop += 1
        return self._entries[start:stop]

    def close(self) -> None:
        """There will be no more; readers come to an end."""
        self._closed = True
        self._wake_readers()
        self._end_if_unused()

    def add_writer(self) -> None:
        """Note a writer of events. `end_writing` must be called once for each writer."""
        self._writers += 1
        self._resume()

    def remove_writer(self) -> None:
        """See `begin_writing`."""
        self._writers -= 1
        self._end_if_unused()

    async def read_after(
        self, number: int, look: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[list[LoggedEvent]]:
        """Yield the events after a number as they come, until the log is closed or `look` raises.

        The events count as received when the reader asks for the next ones.

        Raises:
            LookupError: Events that follow it are no longer kept.
        """
        loop, reader = asyncio.get_running_loop(), asyncio.Event()
        timer = loop.call_later(
            ACCESS_CHECK_S, reader.set
        )  # a timer for each event would take longer
        try:
            self._received_numbers[reader] = self._handed_numbers[reader] = number
            self._resume()
            while True:
                reader.clear()
                if loop.time() >= timer.when() - _TIMER_TOLERANCE_S:
                    await look()
                    timer = loop.call_later(ACCESS_CHECK_S, reader.set)
                if number < self.last_dropped:
                    raise EventDropped(self.last_dropped)
                found = self.events_after(number, CHUNK_BYTES)
                if found:
                    number = self._handed_numbers[reader] = found[-1].number
                    yield found
                    self._received_numbers[reader] = number
                elif self._closed:
                    return
                else:
                    await reader.wait()
        finally:
            timer.cancel()
            del self._received_numbers[reader], self._handed_numbers[reader]
            self._drop_beyond_limits()
            self._end_if_unused()

    def drop_some(self) -> None:
        """Drop the oldest events, about half of all.

        If the oldest event is stored, only stored events are dropped. If the events are not
        recorded, the same holds for events that all readers have received.
        """
        spare = (
            self.last_stored if self.is_recorded else max(self._last_received(), self.last_stored)
        )
        count, size = 0, 0
        has_spare = self._entries[0].number <= spare
        for entry in self._entries:
            if count and (size >= self.size // 2 or (entry.number > spare and has_spare)):
                break
            size += entry.size
            count += 1
        self._remove_oldest(count)

    def drop_all(self) -> None:
        """Drop all events."""
        self._remove_oldest(len(self._entries))

    def _drop_beyond_limits(self) -> None:
        """Drop the oldest beyond the limit, but not the newest, nor what is about to be read."""
        size = self.size
        if size <= RETAINED_BYTES and size <= BACKLOG_BYTES:
            return
        received, count = self._last_received(), 0
        for entry in self._entries[:-1]:
            if size <= (RETAINED_BYTES if entry.number <= received else BACKLOG_BYTES):
                break
            size -= entry.size
            count += 1
        self._remove_oldest(count)

    def _count_event(self, event: LoggedEvent) -> None:
        if self._account is None:
            self.size += event.size
        else:
            self._account.add(self, event.size)
            event.total_when_added = self._account.memory.total_added

    def _remove_oldest(self, count: int) -> None:
        """Drop the oldest events."""
        if not count:
            return
        size = 0
        for entry in self._entries[:count]:
            entry.drop()
            size += entry.size
            self.last_dropped = entry.number
        if self.last_dropped > self.last_stored:
            self.last_lost = self.last_dropped
        del self._entries[:count]
        if self._account is None:
            self.size -= size
        else:
            self._account.remove(self, size)

    def _end_if_unused(self) -> None:
        """Keep the events of a log without readers and writers only as far as there is room."""
        is_written = self._writers > 0 if self.thread else not self._closed
        if (
            self.size
            and self._account is not None
            and not is_written
            and not self._received_numbers
        ):
            self._account.memory.mark_ended(self)

    def _resume(self) -> None:
        if self._account is not None:
            self._account.memory.mark_in_use(self)

    def _wake_readers(self) -> None:
        for reader in self._received_numbers:
            reader.set()
