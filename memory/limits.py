"""Limits of a namespace: texts that a model may keep in a minute, and memories in all."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from perdure.memory.effects import Effects
from perdure.memory.store_adapter import StoreAdapter
from perdure.stores.base import Namespace

_MINUTE: Final = 60.0
_NAMESPACES: Final = 10_000  # of which counts are kept
_SLACK: Final = 1_000  # memories that may be added before the store is asked again


class Rates:
    """Counts the texts of the last minute by namespace, in this process.

    Args:
        per_minute: How many different texts there may be.
    """

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._written: OrderedDict[Namespace, OrderedDict[int, float]] = OrderedDict()
        self._lock = threading.Lock()

    def allows(self, namespace: Namespace, text: str) -> bool:
        """Count a text, unless it is repeated, and tell whether it is within the limit."""
        now, mark = time.monotonic(), hash(text)
        with self._lock:
            written = self._written.setdefault(namespace, OrderedDict())
            _touch(self._written, namespace)
            while written and next(iter(written.values())) <= now - _MINUTE:
                written.popitem(last=False)
            if mark not in written:
                if len(written) >= self.per_minute:
                    return False
                written[mark] = now
            return True


class Room:
    """Counts the memories that may still be added to each namespace.

    The store is asked how many there are, and again when as many were added as it had room for.
    Memories that others add meanwhile are not seen before that.

    Args:
        max_items: How many memories there may be under a namespace.
    """

    def __init__(self, max_items: int) -> None:
        self.max_items = max_items
        self._left: OrderedDict[Namespace, int] = OrderedDict()
        self._lock = threading.Lock()

    def taking(
        self, adapter: StoreAdapter, namespace: Namespace, keys: Sequence[str | None]
    ) -> Effects[set[int]]:
        """Take room for memories, given by their keys; None is a new one.

        Returns:
            The places, among the keys, of those that there is no room for.
        """
        with self._lock:
            left = self._left.get(namespace, 0)
        refused: set[int] = set()
        if left < len(keys):
            left = yield from self._counted(adapter, namespace, len(keys))
        if left < len(keys):
            new = []
            for place, key in enumerate(keys):  # a memory that is there takes no more room
                if key is None or (yield from adapter.got(namespace, key)) is None:
                    new.append(place)
            refused = set(new[left:])
        with self._lock:
            self._left[namespace] = max(0, left - (len(keys) - len(refused)))
            _touch(self._left, namespace)
        return refused

    def _counted(self, adapter: StoreAdapter, namespace: Namespace, wanted: int) -> Effects[int]:
        """How many more there may be; `slack` stands for as many or more."""
        slack = min(self.max_items, max(wanted, _SLACK))
        if not slack:
            return 0
        page = yield from adapter.found(namespace, limit=slack, offset=self.max_items - slack)
        return slack - len(page)


def _touch(counts: OrderedDict[Namespace, object], namespace: Namespace) -> None:
    """Make a namespace the newest, and drop the oldest of too many."""
    counts.move_to_end(namespace)
    if len(counts) > _NAMESPACES:
        counts.popitem(last=False)
