"""Define the server's limits, and limit each client's request rate and concurrent requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Final

from perdure.server.http.access import Refused

# Maximum number of clients whose request rates are tracked.
_MAX_CLIENTS: Final = 10_000
# Retry-After value, in seconds, sent when a client has too many requests in progress.
_CONCURRENCY_RETRY_S: Final = 5


class TooManyRequests(Refused):
    """Raised when a client exceeds its request limits.

    Args:
        detail: The error message.
        retry_after_s: Seconds after which the client may try again.
    """

    status = 429

    def __init__(self, detail: str, retry_after_s: float) -> None:
        super().__init__(detail, headers={"Retry-After": str(math.ceil(retry_after_s))})


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a server.

    The request rate is limited both per network address and per user. The number of concurrent
    requests is limited only per user.

    Attributes:
        body_bytes: Maximum bytes of a request's body.
        body_wait_s: Maximum seconds until the next part of a body arrives.
        requests_per_s: Maximum average number of requests per second.
        burst: Number of requests that may be sent at once before the average applies.
        max_concurrent_requests: Maximum requests of a user that are in progress. Open streams are
            counted, too.
        user_event_bytes: Maximum bytes of events that a process keeps in memory for one user.
        all_event_bytes: Maximum bytes of events that a process keeps in memory for all users.
    """

    body_bytes: int = 10_000_000
    body_wait_s: float = 30.0
    requests_per_s: float = 200.0
    burst: int = 1000
    max_concurrent_requests: int = 256
    user_event_bytes: int = 64_000_000
    all_event_bytes: int = 256_000_000


class RequestLimiter:
    """Counts each client's requests, and rejects requests that exceed the limits.

    Clients are identified by hashable keys, such as a network address or a user's tenant and id.

    Source: the generic cell rate algorithm, ITU-T I.371.

    Args:
        limits: The limits of the server.
    """

    def __init__(self, limits: Limits) -> None:
        self._interval_s = 1 / limits.requests_per_s
        self._burst_s = (limits.burst - 1) / limits.requests_per_s
        self._max_concurrent = limits.max_concurrent_requests
        self._open_requests = Counter[Hashable]()
        # Maps each client to the `time.monotonic` time after which the client's next request is not
        # part of a burst
        self._next_due: dict[Hashable, float] = {}

    def count_request(self, client: Hashable) -> None:
        """Count a request against the rate limit of a client.

        Raises:
            TooManyRequests: The client sends requests faster than allowed.
        """
        now = monotonic()
        due = max(self._next_due.get(client, 0.0), now)
        if (retry_after_s := due - now - self._burst_s) > 0:
            raise TooManyRequests(
                f"too many requests; try again in {retry_after_s:.1f} s", retry_after_s
            )
        if len(self._next_due) >= _MAX_CLIENTS:
            self._next_due = {
                other: due_time for other, due_time in self._next_due.items() if due_time > now
            }
            # If too many clients remain after the idle clients were removed, forget all clients, so
            # that the memory used does not grow without limit.
            if len(self._next_due) >= _MAX_CLIENTS:
                self._next_due.clear()
        self._next_due[client] = due + self._interval_s

    @contextmanager
    def track_request(self, client: Hashable) -> Iterator[None]:
        """Count a request against the rate limit of a client.

        The request counts towards the client's concurrent requests until the `with` block ends.

        Raises:
            TooManyRequests: The client sends requests faster than allowed, or has the maximum
                number of requests in progress.
        """
        self.count_request(client)
        if self._open_requests[client] >= self._max_concurrent:
            raise TooManyRequests(
                f"{self._max_concurrent} requests are in progress, which is the maximum; wait "
                "until one of them has ended",
                _CONCURRENCY_RETRY_S,
            )
        self._open_requests[client] += 1
        try:
            yield
        finally:
            self._open_requests[client] -= 1
            if not self._open_requests[client]:
                del self._open_requests[client]
