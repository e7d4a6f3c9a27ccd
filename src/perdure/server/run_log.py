"""The events of a run, or of a thread, for any number of readers, while they are sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, NamedTuple

from sse_starlette import EventSourceResponse

from perdure.server.reply import encoded

LIMIT: Final = 4_000_000
"""How many bytes of events are kept; a reader that has fallen behind them is told so."""
PING_S: Final = 15
"""How often a comment is sent, so that proxies keep a stream without events open."""
SEND_S: Final = 30
"""How long a reader may leave a stream unread, once its buffers are full."""


def frame(event: str, data: Any) -> bytes:
    """An event as it is sent."""
    name = event.replace("\n", " ").replace("\r", " ").encode()
    return b"event: %b\ndata: %b\n\n" % (name, encoded(data))


def streamed(
    frames: AsyncIterator[bytes], headers: Mapping[str, str] | None = None
) -> EventSourceResponse:
    """A reply that is a stream of events."""
    return EventSourceResponse(frames, headers=headers, ping=PING_S, send_timeout=SEND_S)


class Entry(NamedTuple):
    """An event.

    Attributes:
        number: Its place in the log, from 1.
        kind: For readers that want some events only.
        frame: As it is sent: https://html.spec.whatwg.org/multipage/server-sent-events.html
    """

    number: int
    kind: Any
    frame: bytes


class Log:
    """Events in order. It belongs to one event loop.

    Attributes:
        dropped: How many are no longer kept.
    """

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self.dropped = self._begun = self._size = 0
        self._more, self._closed = asyncio.Event(), False

    @property
    def first(self) -> int:
        """The number before the event where a reader begins that has read none."""
        return max(self.dropped, self._begun)

    @property
    def last(self) -> int:
        """The number of the newest event."""
        return self.dropped + len(self._entries)

    def begin(self) -> None:
        """Readers that have read none begin with the next event."""
        self._begun = self.last

    def add(self, event: str, data: Any, kind: Any = None) -> None:
        """Append an event; readers get it."""
        number = self.last + 1
        made = b"id: %d\n%b" % (number, frame(event, data))
        self._entries.append(Entry(number, kind, made))
        self._size += len(made)
        if self._size > LIMIT:
            self._drop(LIMIT // 2)
        self._wake()

    def close(self) -> None:
        """There will be no more; readers come to an end."""
        self._closed = True
        self._wake()

    async def after(self, number: int) -> AsyncIterator[list[Entry]]:
        """What follows an event, as it comes, until the log is closed.

        Raises:
            LookupError: Events that follow it are no longer kept.
        """
        while True:
            if number < self.dropped:
                raise LookupError(f"the events up to {self.dropped} are no longer kept")
            more, found = self._more, self._entries[number - self.dropped :]
            if found:
                number = found[-1].number
                yield found
            elif self._closed:
                return
            else:
                await more.wait()

    def _drop(self, size: int) -> None:
        dropped = 0
        while self._size > size:
            self._size -= len(self._entries[dropped].frame)
            dropped += 1
        del self._entries[:dropped]
        self.dropped += dropped

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()


class Feed(Log):
    """The events of a thread, through its runs.

    Attributes:
        of: Whose events the newest are, until that has ended.
    """

    of: object = None
