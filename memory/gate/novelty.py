"""Novelty: whether a memory says already what a candidate would, or said it before it changed."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from perdure.memory.effects import Effects
from perdure.memory.likeness import Wording
from perdure.memory.records import EPISODE, TURN, Memory, Previous
from perdure.memory.store_adapter import StoreAdapter
from perdure.stores.base import Namespace

SAID: Final = (TURN, EPISODE)
"""Kinds that record what was said and done: saying the same again is another event."""
_NEAREST: Final = (
    16  # an equal one is the best answer; what was said in the same words takes places
)
_MOST_LISTED: Final = 10_000


class Facts:
    """The facts of a namespace, as a candidate is compared with them.

    A store that ranks is asked for the nearest ones. One that does not is read, up to 10,000 items
    and once for all candidates.

    Args:
        adapter: The store.
        namespace: Of the memories.
        near: From what likeness on two say the same.
    """

    def __init__(self, adapter: StoreAdapter, namespace: Namespace, near: float) -> None:
        self._adapter, self._namespace, self._near = adapter, namespace, near
        self._ranks: bool | None = None
        self._listed: list[tuple[Memory, Wording]] = []
        self._asked: tuple[str, list[tuple[Memory, Wording]]] | None = None

    def outdone(self, wording: Wording, text: str, at: datetime | None) -> Effects[Previous | None]:
        """What a memory said until it was superseded or corrected, if it was that; else None.

        Who learns late of what was said before then learns nothing.

        Args:
            wording: The text, taken apart.
            text: The text.
            at: When it was said; None: nobody knows.
        """
        for memory, _ in (yield from self._nearest(text)):
            for former in memory.previous:
                late = at is None or at < former.until
                if late and wording.alike(Wording(former.text)) >= self._near:
                    return former
        return None

    def like(self, wording: Wording, text: str, key: str | None) -> Effects[Memory | None]:
        """The memory most like a text, if one is like it; None: it is new.

        Args:
            wording: The text, taken apart.
            text: The text.
            key: Of the memory that it is to take the place of: that may be put otherwise.
        """
        best: tuple[float, Memory] | None = None
        for memory, known in (yield from self._nearest(text)):
            if wording.bound(known) < self._near:
                continue
            likeness = wording.alike(known)
            if memory.key == key and likeness < 1:
                continue
            if likeness >= self._near and (best is None or likeness > best[0]):
                best = likeness, memory
        return best and best[1]

    def _nearest(self, text: str) -> Effects[list[tuple[Memory, Wording]]]:
        if self._ranks is False:
            return self._listed
        if self._asked is not None and self._asked[0] == text:
            return self._asked[1]
        found = yield from self._adapter.found(
            self._namespace, query=text, limit=_NEAREST, context=False
        )
        if self._ranks is None:
            self._ranks = not found or found[0].score is not None
        if not self._ranks:
            self._listed = yield from self._all()
            return self._listed
        self._asked = text, self._facts(found)
        return self._asked[1]

    def _all(self) -> Effects[list[tuple[Memory, Wording]]]:
        return self._facts((yield from self._adapter.every(self._namespace, most=_MOST_LISTED)))

    def _facts(self, memories: list[Memory]) -> list[tuple[Memory, Wording]]:
        return [
            (memory, Wording(memory.text))
            for memory in memories
            if memory.namespace == self._namespace and memory.kind not in SAID
        ]
