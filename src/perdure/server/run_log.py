"""The events of a run, or of a thread, for any number of readers, while they are sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple

from perdure.server.reply import encoded

LIMIT: Final = 4_000_000
"""How many bytes of events are kept; a reader that has fallen behind them is told so."""


def frame(event: str, data: Any) -> bytes:
    """An event as it is sent."""
    name = event.replace("\n", " ").replace("\r", " ").encode()
    return b"event: %b\ndata: %b\n\n" % (name, encoded(data))


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
    """Events in order. It belongs to one event loop."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._base = self._size = 0  # how many were dropped; bytes of the others
        self._more = asyncio.Event()
        self.closed, self.readers = False, 0

    @property
    def first(self) -> int:
        """The number before the oldest event that is kept."""
        return self._base

    @property
    def last(self) -> int:
        """The number of the newest event."""
        return self._base + len(self._entries)

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
        self.closed = True
        self._wake()

    async def after(self, number: int) -> AsyncIterator[list[Entry]]:
        """What follows an event, as it comes, until the log is closed.

        Raises:
            LookupError: Events that follow it are no longer kept.
        """
        self.readers += 1
        try:
            while True:
                if number < self._base:
                    raise LookupError(f"the events up to {self._base} are no longer kept")
                more, found = self._more, self._entries[number - self._base :]
                if found:
                    number = found[-1].number
                    yield found
                elif self.closed:
                    return
                else:
                    await more.wait()
        finally:
            self.readers -= 1

    def _drop(self, size: int) -> None:
        dropped = 0
        while dropped < len(self._entries) and self._size > size:
            self._size -= len(self._entries[dropped].frame)
            dropped += 1
        del self._entries[:dropped]
        self._base += dropped

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()


class Feed(Log):
    """The events of a thread, through its runs.

    Attributes:
        run: Whose events the newest are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.run: object = None
        self._begun, self._ended, self._told = 0, 0, True

    def begin(self, run: object) -> None:
        """The next event is the first of a run."""
        self.run, self._begun, self._ended, self._told = run, self.last, 0, False

    def end(self) -> None:
        """The last event was the last of its run."""
        self._ended = self.last

    @property
    def unread(self) -> int:
        """Where a reader starts that has no place: at the newest run, unless its end was told."""
        return self.last if self._told else self._begun

    def tell(self, number: int) -> None:
        """Such a reader was sent the events up to a number."""
        self._told |= 0 < self._ended <= number
