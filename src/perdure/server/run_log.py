"""The events of a run, or of a thread, for any number of readers, while they are sent."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from itertools import islice
from operator import attrgetter
from typing import Any, Final, NamedTuple, cast

from starlette.responses import StreamingResponse
from starlette.types import Message, Send

from perdure.server.reply import encoded

LIMIT: Final = 4_000_000
"""How many bytes of events are kept, and of a larger one that alone."""
BEHIND: Final = 32_000_000
"""How many are kept for a reader that is behind; one that falls behind them is told so."""
THREADS: Final = 1 << 32
"""The numbers of the events of a thread begin with so many times the `seq` of their run."""
LOOK_S: Final = 15
"""How often it is seen whether a reader is still known."""
PING_S: Final = 15
"""How often a comment is sent, so that proxies keep a stream without events open."""
SEND_S: Final = 30
"""How long a reader may leave a stream unread, once its buffers are full."""
_EARLY_S: Final = 0.001  # a timer may be as much too early
_NUMBER: Final = attrgetter("number")


def frame(event: str, data: Any) -> bytes:
    """An event as it is sent."""
    name = event.replace("\n", " ").replace("\r", " ").encode()
    return b"event: %b\ndata: %b\n\n" % (name, told(data))


def told(value: Any) -> bytes:
    """A value as JSON, whatever a graph has sent; a note, if it cannot be encoded."""
    try:
        return encoded(value)
    except Exception as exc:  # of a cycle, of what is nested too deep, of a `__str__`
        why = f"a {type(value).__name__} that cannot be sent as JSON ({type(exc).__name__})"
        return encoded({"error": "NotSerializable", "message": why})


class EventStream(StreamingResponse):
    """A reply that is a stream of events, with comments between them."""

    media_type = "text/event-stream"

    async def stream_response(self, send: Send) -> None:
        """Send it; who does not read it is not waited for."""

        async def sending(message: Message) -> None:
            async with asyncio.timeout(SEND_S):
                await send(message)

        async def ping() -> None:
            while True:
                await asyncio.sleep(PING_S)
                await sending(
                    {"type": "http.response.body", "body": b": ping\n\n", "more_body": True}
                )

        pings = asyncio.create_task(ping())
        try:
            await super().stream_response(sending)
        finally:
            pings.cancel()
            await cast(AsyncGenerator[bytes, None], self.body_iterator).aclose()


def streamed(
    frames: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None
) -> EventStream:
    """A reply that is a stream of events, which proxies pass on as they come."""
    return EventStream(frames, headers={"X-Accel-Buffering": "no", **(headers or {})})


class LoggedEvent(NamedTuple):
    """An event.

    Attributes:
        number: Its place in the log, from 1.
        kind: For readers that want some events only.
        frame: As it is sent: https://html.spec.whatwg.org/multipage/server-sent-events.html
    """

    number: int
    kind: Any
    frame: bytes

    @property
    def data(self) -> bytes:
        """The JSON in its frame."""
        return self.frame.partition(b"\ndata: ")[2].rstrip()


class Log:
    """Events in order. It belongs to one event loop.

    Args:
        thread: The key of the thread whose events these are; 0: of one run.

    Attributes:
        first: The number before the event where a reader begins that has read none.
        last: The number of the newest event.
        dropped: That of the newest one that is not kept, or 0.
        lost: That of the newest one that was dropped, as there were too many, or 0.
        removals: The number of erasures from the thread before the events; None: it is not known.
    """

    def __init__(self, thread: int = 0) -> None:
        self.thread = thread
        self.removals: int | None = None
        self._entries: list[LoggedEvent] = []
        self.first = self.last = self.dropped = self.lost = self._size = 0
        self._closed = False
        self._read: dict[asyncio.Event, int] = {}  # how far each reader is, which waits for it

    @property
    def is_empty(self) -> bool:
        """Whether it keeps no event."""
        return not self._entries

    @property
    def is_read(self) -> bool:
        """Whether anybody reads it."""
        return bool(self._read)

    def begin(self) -> None:
        """Readers that have read none begin with the next event."""
        self.first = self.last

    def skip(self, number: int) -> None:
        """The next event has the number after this one."""
        self.last = max(self.last, number)

    def leave(self, number: int) -> None:
        """Keep none up to an event: they are read from the database."""
        self._entries.clear()
        self._size, self.last = 0, max(self.last, number)
        self.dropped = self.last

    def made(self, number: int, event: str, data: Any, kind: Any = None) -> LoggedEvent:
        """An event, as it is kept."""
        return LoggedEvent(number, kind, b"id: %d\n%b" % (number, frame(event, data)))

    def add(self, event: str, data: Any, kind: Any = None) -> None:
        """Append an event; readers get it."""
        self.extend([self.made(self.last + 1, event, data, kind)])

    def extend(self, events: Iterable[LoggedEvent]) -> None:
        """Append events, but for those that are here; readers get them."""
        for event in events:
            if event.number > self.last:
                self._entries.append(event)
                self._size += len(event.frame)
                self.last = event.number
        self._drop()
        self._wake()

    def since(self, number: int) -> list[LoggedEvent]:
        """Those that are kept after an event."""
        return self._entries[bisect_right(self._entries, number, key=_NUMBER) :]

    def close(self) -> None:
        """There will be no more; readers come to an end."""
        self._closed = True
        self._wake()

    async def after(
        self, number: int, look: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[list[LoggedEvent]]:
        """What follows an event, as it comes, until the log is closed, or `look` raises.

        Raises:
            LookupError: Events that follow it are no longer kept.
        """
        loop, reader = asyncio.get_running_loop(), asyncio.Event()
        timer = loop.call_later(LOOK_S, reader.set)  # a timer for each event would take longer
        try:
            self._read[reader] = number
            while True:
                reader.clear()
                if loop.time() >= timer.when() - _EARLY_S:
                    await look()
                    timer = loop.call_later(LOOK_S, reader.set)
                if number < self.dropped:
                    raise LookupError(f"the events up to {self.dropped} are no longer kept")
                found = self.since(number)
                if found:
                    number = self._read[reader] = found[-1].number
                    yield found
                elif self._closed:
                    return
                else:
                    await reader.wait()
        finally:
            timer.cancel()
            self._read.pop(reader, None)
            self._drop()

    def _drop(self) -> None:
        """Drop the oldest beyond the limit, but not the newest, nor what is about to be read."""
        read, dropped = min(self._read.values(), default=self.last), 0
        for entry in islice(self._entries, max(len(self._entries) - 1, 0)):
            if self._size <= (LIMIT if entry.number <= read else BEHIND):
                break
            self._size -= len(entry.frame)
            self.dropped = self.lost = entry.number
            dropped += 1
        del self._entries[:dropped]

    def _wake(self) -> None:
        for reader in self._read:
            reader.set()
