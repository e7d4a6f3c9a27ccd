"""Floods: how much may be kept in a namespace, by the minute and in all."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from perdure.memory.effects import Effects
from perdure.memory.store_adapter import StoreAdapter
from perdure.stores.base import Namespace

_MINUTE: Final = 60.0
_NAMESPACES: Final = 10_000  # of which rates and room are remembered
_SLACK: Final = 1_000  # items that may be added before the store is asked again how many there are


class Rates:
    """Counts what is written within a minute, by namespace, in this process.

    Args:
        per_minute: How many different texts there may be.
        clock: Tells seconds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute, self._clock = per_minute, clock
        self._written: OrderedDict[Namespace, OrderedDict[int, float]] = OrderedDict()
        self._lock = threading.Lock()

    def allows(self, namespace: Namespace, text: str) -> bool:
        """Count a text, unless it is tried again, and tell whether that is not too much."""
        now, mark = self._clock(), hash(text)
        with self._lock:
            written = self._written.setdefault(namespace, OrderedDict())
            self._written.move_to_end(namespace)
            if len(self._written) > _NAMESPACES:
                self._written.popitem(last=False)
            while written and next(iter(written.values())) <= now - _MINUTE:
                written.popitem(last=False)
            if mark not in written:
                if len(written) >= self.per_minute:
                    return False
                written[mark] = now
            return True


class Room:
    """How many items there is room for in each namespace.

    The store is asked how many there are, and asked again once so many were added as it had room
    for; what is added elsewhere meanwhile is not seen before that.

    Args:
        max_items: Items under a namespace at most.
    """

    def __init__(self, max_items: int) -> None:
        self.most = max_items
        self._left: OrderedDict[Namespace, int] = OrderedDict()
        self._lock = threading.Lock()

    def taking(
        self, adapter: StoreAdapter, namespace: Namespace, keys: Sequence[str | None]
    ) -> Effects[set[int]]:
        """Take room for memories, given by their keys; None: a new one.

        Returns:
            The places, among the keys, of those that there is no room for.
        """
        with self._lock:
            left = self._left.get(namespace, 0)
        if left < len(keys):
            left = yield from self._counted(adapter, namespace, len(keys))
        refused: set[int] = set()
        if left < len(keys):
            refused = yield from self._refused(adapter, namespace, keys, left)
        with self._lock:
            self._left[namespace] = max(0, left - (len(keys) - len(refused)))
            self._left.move_to_end(namespace)
            if len(self._left) > _NAMESPACES:
                self._left.popitem(last=False)
        return refused

    def _counted(self, adapter: StoreAdapter, namespace: Namespace, wanted: int) -> Effects[int]:
        """How many more there may be: `_SLACK` stands for as many or more."""
        slack = min(self.most, max(wanted, _SLACK))
        low, high = self.most - slack, max(0, self.most - wanted)
        if not (yield from _exceeds(adapter, namespace, low)):
            return slack
        if (yield from _exceeds(adapter, namespace, high)):
            low, high = high, self.most
        low += 1
        while low < high:
            middle = (low + high) // 2
            if (yield from _exceeds(adapter, namespace, middle)):
                low = middle + 1
            else:
                high = middle
        return self.most - high

    def _refused(
        self, adapter: StoreAdapter, namespace: Namespace, keys: Sequence[str | None], left: int
    ) -> Effects[set[int]]:
        """Which would be too many: what is there already takes no more room."""
        new = []
        for place, key in enumerate(keys):
            if key is None or (yield from adapter.got(namespace, key)) is None:
                new.append(place)
        return set(new[max(0, left) :])


def _exceeds(adapter: StoreAdapter, namespace: Namespace, count: int) -> Effects[bool]:
    """Whether there are more items than so many."""
    page = yield from adapter.found(namespace, limit=1, offset=count)
    return bool(page)
