"""Limit the memory that run events use, for each user and for the whole process.

An `EventHolder` keeps events in memory. There are three kinds of event holders. An event log keeps
the events of a run or thread for current and future readers. A batch holds events that were loaded
from the database for a single reader. A websocket sender holds only the message that it is
currently sending.

When the events of one user exceed the per-user limit, events of that user are dropped. When the
events of all users together exceed the process-wide limit, events of the user with the highest
memory usage are dropped. Events are dropped first from the event holder (log, batch or sender)
whose oldest event is safest to drop (see `DropSafety`). If several event holders have the same
`DropSafety`, the holders are compared by a product of two factors: the total size of the events and
the age of the oldest event. Among event holders with the same `DropSafety`, the holder for which
size times age is largest drops its events first. The product is the total size of the holder's
events, multiplied by the age of the holder's oldest event. A reader that needs a dropped event
receives the error `StreamLost`, unless the event is stored in the database.

All methods in this module must be called from one event loop, except
`EventAccount.schedule_subtraction_of_garbage_collected_bytes`, which may be called from any OS
thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from enum import IntEnum
from typing import Final, Protocol
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from perdure.server.http.limits import Limits

MAX_ENDED_BYTES: Final = 16_000_000
"""The maximum size in bytes of the events in all logs that have no readers and writers.

The events are kept for clients that start to read the log later.
"""
# Once a memory limit is exceeded, events are dropped until memory use is at most this fraction of
# the limit.
_LOW_SHARE: Final = 7 / 8


class DropSafety(IntEnum):
    """Consequences for readers if an event is dropped from RAM, ordered from worst to best.

    Attributes:
        READERS_MAY_MISS_EVENT: Readers may miss the event.
        READER_MAY_HAVE_TO_RECONNECT: A reader that is receiving the event may have to connect
            again.
        NOTHING_IS_LOST: All readers have received the event or can read it from the database.
    """

    READERS_MAY_MISS_EVENT = 0
    READER_MAY_HAVE_TO_RECONNECT = 1
    NOTHING_IS_LOST = 2


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
    def safety_of_dropping_oldest_event(self) -> DropSafety:
        """Return a `DropSafety` level that tells how dropping the oldest event affects readers."""

    def drop_oldest_events(self) -> None:
        """Drop one or more of the oldest events that this object keeps."""

    def drop_all(self) -> None:
        """Drop all events that this object keeps."""


class EventAccount:
    """Tracks the total size, in bytes, of the events that are held in memory for one user.

    Attributes:
        memory: The memory of the process.
        size: The size of the events in bytes.
        holders: The holders that have events.
    """

    def __init__(self, memory: EventMemory) -> None:
        self.memory = memory
        self.size = 0
        self.holders: WeakSet[EventHolder] = WeakSet()

    def make_room_and_add_bytes(self, holder: EventHolder, new_event_bytes: int) -> None:
        """Make room for a new event, and add its size to the memory totals.

        A memory total is the size of the events that are kept in memory, in bytes. Separate totals
        are tracked for each event holder (an object that keeps events in memory), for each user and
        for the whole process.
        """
        self.memory.drop_events_to_make_room(self, new_event_bytes)
        if not holder.size:
            self.holders.add(holder)
        holder.size += new_event_bytes
        self.size += new_event_bytes
        self.memory.size += new_event_bytes
        self.memory.total_added += new_event_bytes

    def subtract_dropped_bytes(self, holder: EventHolder, byte_count: int) -> None:
        """Subtract dropped bytes from the totals of the event holder, the user and the process."""
        holder.size -= byte_count
        self.size -= byte_count
        self.memory.size -= byte_count
        if not holder.size:
            self.holders.discard(holder)

    def schedule_subtraction_of_garbage_collected_bytes(self, byte_count: int) -> None:
        """Record that an event holder and its events have been garbage-collected.

        The garbage collector may call this method from any OS thread. To be thread-safe, the method
        only queues the change in `EventMemory.garbage`. The event loop later processes
        `EventMemory.garbage`, and subtracts the size of the garbage-collected events from the
        totals for the user and for the process.
        """
        self.memory.garbage.append((self, byte_count))


class EventMemory:
    """Tracks the total size of all events in a process's memory, and enforces the memory limits.

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
        self._unused: WeakKeyDictionary[EventHolder, None] = WeakKeyDictionary()

    def get_account(self, tenant: str | None, user: str) -> EventAccount:
        """Return the account of a user. If the user has no account, an account is created."""
        return self._accounts.setdefault((tenant, user), EventAccount(self))

    def drop_events_to_make_room(self, account: EventAccount, new_event_bytes: int) -> None:
        """Drop events until a new event fits within the memory limits.

        There is one limit for the events of each user, and another for all events in the process. A
        new event that alone exceeds the user's limit is kept, and the user's other events are
        dropped. A new event that alone exceeds the process's limit is kept, and all other events in
        the process are dropped.
        """
        while self.garbage:
            charged_account, collected_bytes = self.garbage.popleft()
            charged_account.size -= collected_bytes
            self.size -= collected_bytes
        if account.size + new_event_bytes > self._user_bytes:
            self._drop_events_until_new_event_fits(
                lambda: account if account.size else None,
                account,
                self._user_bytes,
                new_event_bytes,
            )
        if self.size + new_event_bytes > self._all_bytes:
            self._drop_events_until_new_event_fits(
                self._find_largest_account, self, self._all_bytes, new_event_bytes
            )

    def _drop_events_until_new_event_fits(
        self,
        choose_account: Callable[[], EventAccount | None],
        limited_object: EventAccount | EventMemory,
        max_bytes: int,
        new_event_bytes: int,
    ) -> None:
        """Drop old events until a new event fits within the memory limit.

        Events are dropped until the remaining events and the new event together use at most
        `_LOW_SHARE * max_bytes` bytes.

        Args:
            choose_account: Returns the account whose events are dropped next, or None if no account
                has events.
            limited_object: The account or the memory whose size is limited.
            max_bytes: The limit in bytes.
            new_event_bytes: The size of the new event in bytes.
        """
        while limited_object.size + new_event_bytes > max_bytes * _LOW_SHARE and (
            account := choose_account()
        ):
            holder = max(account.holders, key=self._build_drop_order_key, default=None)
            if holder is None:
                # The account has no event holders left, so there are no events to drop. The
                # remaining bytes belong to garbage-collected holders, and are subtracted from the
                # account later.
                return
            holder.drop_oldest_events()

    def _find_largest_account(self) -> EventAccount | None:
        """Return the account whose events use the most memory, or None if no account has events."""
        account = max(self._accounts.values(), key=lambda candidate: candidate.size, default=None)
        return account if account is not None and account.size else None

    def _build_drop_order_key(self, holder: EventHolder) -> tuple[DropSafety, int]:
        """Return a sort key. The `EventHolder` with the largest key drops its events first."""
        return holder.safety_of_dropping_oldest_event, holder.size * (
            self.total_added - holder.total_when_added + 1
        )

    def mark_unused(self, holder: EventHolder) -> None:
        """Mark an event log as unused, because it no longer has any readers or writers.

        An event log is unused if it currently has no readers and no writers. While an event log has
        no readers and no writers, the log's events stay in memory for readers that connect later.
        If the total size of the events in unused event logs exceeds `MAX_ENDED_BYTES`, events are
        dropped until the limit is met, starting with the event log that has been unused longest.
        """
        self._unused.pop(holder, None)
        self._unused[holder] = None
        if self.size <= MAX_ENDED_BYTES:
            return
        size = sum(log.size for log in self._unused)
        for log in list(self._unused) if size > MAX_ENDED_BYTES else ():
            size -= log.size
            self.mark_in_use(log)
            log.drop_all()
            if size <= MAX_ENDED_BYTES:
                return

    def mark_in_use(self, holder: EventHolder) -> None:
        """Mark an event log as in use, because it has a new reader or writer."""
        self._unused.pop(holder, None)
