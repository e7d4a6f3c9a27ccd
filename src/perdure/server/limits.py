"""How much is taken from a client: a rate, requests at once, the size and the time of a body."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Final

from perdure.server.access import Refused

_MOST: Final = 10_000  # clients of which a rate is kept
_AGAIN_S: Final = 5


class TooMany(Refused):
    """A client asks more often than it may."""

    status = 429

    def __init__(self, detail: str, again_s: float) -> None:
        super().__init__(detail, headers={"Retry-After": str(math.ceil(again_s))})


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a server.

    Attributes:
        body_bytes: The size of a request's body.
        body_wait_s: How long the next part of a body may take.
        per_s, burst: Requests of an address, and of an identity: so many a second in the long
            run, so many at a time.
        at_once: Requests of an identity that are under way, streams among them.
        user_event_bytes: The most bytes of events that a process keeps in memory for one user.
        all_event_bytes: The most bytes of events that a process keeps in memory for all users.
    """

    body_bytes: int = 10_000_000
    body_wait_s: float = 30.0
    per_s: float = 200.0
    burst: int = 1000
    at_once: int = 256
    user_event_bytes: int = 64_000_000
    all_event_bytes: int = 256_000_000


class Clients:
    """The requests of each client, and whether it may send another.

    Source: the generic cell rate algorithm, ITU-T I.371.
    """

    def __init__(self, limits: Limits) -> None:
        self._each_s, self._ahead_s = 1 / limits.per_s, (limits.burst - 1) / limits.per_s
        self._at_once, self._open = limits.at_once, Counter[Hashable]()
        self._next: dict[Hashable, float] = {}

    def take(self, client: Hashable) -> None:
        """Count a request.

        Raises:
            TooMany: There were more than there may be.
        """
        now = monotonic()
        due = max(self._next.get(client, 0.0), now)
        if (again_s := due - now - self._ahead_s) > 0:
            raise TooMany(f"too many requests; ask again in {again_s:.1f} s", again_s)
        if len(self._next) >= _MOST:
            self._next = {each: at for each, at in self._next.items() if at > now}
            if len(self._next) >= _MOST:  # as many ask at once: forget who asked how often
                self._next.clear()
        self._next[client] = due + self._each_s

    @contextmanager
    def one(self, client: Hashable) -> Iterator[None]:
        """Count a request, which is under way while this lasts.

        Raises:
            TooMany: There were more than there may be, or as many as may be are under way.
        """
        self.take(client)
        if self._open[client] >= self._at_once:
            raise TooMany(f"{self._at_once} requests are under way; end some first", _AGAIN_S)
        self._open[client] += 1
        try:
            yield
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]
