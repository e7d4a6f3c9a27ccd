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

_MAX_CLIENTS: Final = 10_000  # clients of which a rate is kept
_CONCURRENCY_RETRY_S: Final = 5


class TooManyRequests(Refused):
    """A client asks more often than it may."""

    status = 429

    def __init__(self, detail: str, retry_after_s: float) -> None:
        super().__init__(detail, headers={"Retry-After": str(math.ceil(retry_after_s))})


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
    requests_per_s: float = 200.0
    burst: int = 1000
    max_concurrent_requests: int = 256
    user_event_bytes: int = 64_000_000
    all_event_bytes: int = 256_000_000


class RequestLimiter:
    """The requests of each client, and whether it may send another.

    Source: the generic cell rate algorithm, ITU-T I.371.
    """

    def __init__(self, limits: Limits) -> None:
        self._interval_s, self._burst_s = (
            1 / limits.requests_per_s,
            (limits.burst - 1) / limits.requests_per_s,
        )
        self._max_concurrent, self._open_requests = (
            limits.max_concurrent_requests,
            Counter[Hashable](),
        )
        self._next_due: dict[Hashable, float] = {}

    def count_request(self, client: Hashable) -> None:
        """Count a request.

        Raises:
            TooManyRequests: There were more than there may be.
        """
        now = monotonic()
        due = max(self._next_due.get(client, 0.0), now)
        if (retry_after_s := due - now - self._burst_s) > 0:
            raise TooManyRequests(
                f"too many requests; ask again in {retry_after_s:.1f} s", retry_after_s
            )
        if len(self._next_due) >= _MAX_CLIENTS:
            self._next_due = {each: at for each, at in self._next_due.items() if at > now}
            if (
                len(self._next_due) >= _MAX_CLIENTS
            ):  # as many ask at once: forget who asked how often
                self._next_due.clear()
        self._next_due[client] = due + self._interval_s

    @contextmanager
    def track_request(self, client: Hashable) -> Iterator[None]:
        """Count a request, which is under way while this lasts.

        Raises:
            TooManyRequests: There were more than there may be, or as many as may be are under way.
        """
        self.count_request(client)
        if self._open_requests[client] >= self._max_concurrent:
            raise TooManyRequests(
                f"{self._max_concurrent} requests are under way; end some first",
                _CONCURRENCY_RETRY_S,
            )
        self._open_requests[client] += 1
        try:
            yield
        finally:
            self._open_requests[client] -= 1
            if not self._open_requests[client]:
                del self._open_requests[client]
