"""Limit the memory of events of runs, for each user and for the process.

An `EventHolder` keeps events in memory. There are three kinds of holders. A log keeps events for
present and later readers. A batch contains events that a reader has read from the database. A
sender contains the message that is being sent to a websocket. If a holder needs more memory than is
left, holders first drop events that all readers have received or that are stored. Then the holder
with the largest and oldest backlog drops events. A reader that needs a dropped event receives the
error `StreamLost`, unless the event is stored.

All methods must be called in one event loop, except `EventAccount.uncount_later`, which any thread
may call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Final, Protocol
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from perdure.server.limits import Limits

MAX_ENDED_BYTES: Final = 16_000_000
"""The maximum size in bytes of the events in logs without readers and writers. They are kept for
later readers."""
# When a memory limit is reached, events are dropped until they use this share of the limit.
_LOW_SHARE: Final = 7 / 8


class EventHolder(Protocol):
    """An object that keeps events in memory.

    Attributes:
        size: The size of its events in bytes.
    """

    size: int

    @property
    def total_when_added(self) -> int:
        """Return the value that `EventMemory.total_added` had when the oldest event was added."""

    @property
    def drop_priority(self) -> int:
        """Return how little readers lose if the oldest event is dropped, as a number from 0 to 2.

        Returns:
            2 if nothing is lost, because all readers have received the event or can read it from
            the database; 1 if a reader that is receiving the event may have to connect again; 0 if
            readers may miss the event.
        """

    def drop_oldest_events(self) -> None:
        """Drop some of the oldest events, at least one."""

    def drop_all(self) -> None:
        """Drop all events."""


class EventAccount:
    """Counts the bytes of the events that are kept in memory for one user.

    Attributes:
        memory: The memory of the process.
        size: The size of the events in bytes.
        holders: The holders that have events.
    """

    def __init__(self, memory: EventMemory) -> None:
        self.memory = memory
        self.size = 0
        self.holders: WeakSet[EventHolder] = WeakSet()

    def add(self, holder: EventHolder, size: int) -> None:
        """Make room for an event that a holder adds, and count it."""
        self.memory.make_room(self, size)
        if not holder.size:
            self.holders.add(holder)
        holder.size += size
        self.size += size
        self.memory.size += size
        self.memory.total_added += size

    def remove(self, holder: EventHolder, size: int) -> None:
        """Stop counting events that a holder has dropped."""
        holder.size -= size
        self.size -= size
        self.memory.size -= size
        if not holder.size:
            self.holders.discard(holder)

    def uncount_later(self, size: int) -> None:
        """Let the event loop stop counting the events of a holder that was garbage-collected.

        The garbage collector may call this in any thread.
        """
        self.memory.garbage.append((self, size))


class EventMemory:
    """Counts the bytes of the events that a process keeps in memory, and drops events at a limit.

    Attributes:
        size: The size of the events in bytes.
        total_added: The bytes of all events that were ever added, by which the age of events is
            measured.
        garbage: Accounts and sizes of holders that were garbage-collected and are still counted.
    """

    def __init__(self, limits: Limits) -> None:
        self._user_bytes, self._all_bytes = limits.user_event_bytes, limits.all_event_bytes
        self.size = self.total_added = 0
        self.garbage: deque[tuple[EventAccount, int]] = deque()
        self._accounts: WeakValueDictionary[Hashable, EventAccount] = WeakValueDictionary()
        self._ended: WeakKeyDictionary[EventHolder, None] = WeakKeyDictionary()

    def get_account(self, tenant: str | None, user: str) -> EventAccount:
        """Return the account of a user. It is created if the user has none."""
        account = self._accounts.get((tenant, user))
        if account is None:
            account = self._accounts[tenant, user] = EventAccount(self)
        return account

    def make_room(self, account: EventAccount, size: int) -> None:
        """Drop events until a new event is within both limits, or until no events are left.

        An event that is larger than a limit is kept after all other events were dropped.
        """
        while self.garbage:
            owner, collected = self.garbage.popleft()
            owner.size -= collected
            self.size -= collected
        if account.size + size > self._user_bytes:
            self._drop_until_within(
                lambda: account if account.size else None, account, self._user_bytes, size
            )
        if self.size + size > self._all_bytes:
            self._drop_until_within(self._find_largest_account, self, self._all_bytes, size)

    def _drop_until_within(
        self,
        choose: Callable[[], EventAccount | None],
        counted: EventAccount | EventMemory,
        limit: int,
        size: int,
    ) -> None:
        """Drop events of the chosen account until a new event fits.

        Args:
            choose: Returns the account whose events are dropped next, or None if there is none.
            counted: The account or the memory whose size is limited.
            limit: The limit in bytes.
            size: The size of the new event in bytes.
        """
        while counted.size + size > limit * _LOW_SHARE and (account := choose()):
            holder = max(account.holders, key=self._sort_key, default=None)
            if holder is None:
                # All events that are still counted belong to holders that were garbage-collected.
                return
            holder.drop_oldest_events()

    def _find_largest_account(self) -> EventAccount | None:
        """Return the account with the most bytes, or None if no account has events."""
        account = max(self._accounts.values(), key=lambda candidate: candidate.size, default=None)
        return account if account is not None and account.size else None

    def _sort_key(self, holder: EventHolder) -> tuple[int, int]:
        """Return a sort key for a holder.

        The holder with the largest key must drop events first.
        """
        return holder.drop_priority, holder.size * (self.total_added - holder.total_when_added + 1)

    def mark_ended(self, holder: EventHolder) -> None:
        """Keep the events of a log without readers and writers until `MAX_ENDED_BYTES` is exceeded.

        The events of the logs that have been unused for the longest time are dropped first.
        """
        self._ended.pop(holder, None)
        self._ended[holder] = None
        if self.size <= MAX_ENDED_BYTES:
            return
        size = sum(log.size for log in self._ended)
        for log in list(self._ended) if size > MAX_ENDED_BYTES else ():
            size -= log.size
            self.mark_in_use(log)
            log.drop_all()
            if size <= MAX_ENDED_BYTES:
                return

    def mark_in_use(self, holder: EventHolder) -> None:
        """Undo `mark_ended` for a log that has a reader or a writer again."""
        self._ended.pop(holder, None)
