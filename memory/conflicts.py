"""Taking turns: changes of one namespace that were judged at the same time are not both written.

Two that say the same, each judged while the other was not there yet, would both be new. Those of
one process go one after another. Between processes each change counts on a note of the namespace,
under the condition that nobody else has counted since it was judged; who comes too late judges
again. A store without versions cannot tell, and nothing is noted in it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Final

from perdure.errors import VersionConflict
from perdure.memory.effects import Effect, Effects, T
from perdure.memory.queueing import in_turn
from perdure.memory.store_adapter import CHANGED, StoreAdapter, note_of, notes_of
from perdure.stores.base import Namespace, PutItem

_KEY: Final = "memories"
_TRIES: Final = 50  # each that fails is one in which somebody else succeeded
_SHORTEST, _LONGEST = 0.002, 0.2  # seconds until it is tried again


def taking_turns(adapter: StoreAdapter, namespace: Namespace) -> Effects[list[PutItem]]:
    """What is to be written with a change that is judged after this.

    It makes the write a `VersionConflict` if another change came between: judge again then.
    """
    if not adapter.versioned:
        return []
    place = notes_of(CHANGED, namespace)
    note = yield from adapter.got(place, _KEY)
    number = 0 if note is None else note.value["number"]
    version = 0 if note is None else note.version
    return [note_of(place, _KEY, {"number": number + 1}, if_version=version)]


def persevering(
    adapter: StoreAdapter, namespace: Namespace, attempt: Callable[[], Effects[T]]
) -> Effects[T]:
    """Attempt a change in its turn, until no other comes between its reading and its writing.

    Args:
        adapter: The store.
        namespace: Of the memories that are changed.
        attempt: Reads, judges and writes.

    Raises:
        VersionConflict: Others came between, again and again.
    """
    # stores of one file have one database, and what they do to it is done to one thing
    thing = id(getattr(adapter.store, "database", adapter.store)), namespace
    return in_turn(thing, lambda: _attempted(attempt))


def _attempted(attempt: Callable[[], Effects[T]]) -> Effects[T]:
    for number in range(_TRIES):
        try:
            return (yield from attempt())
        except VersionConflict:
            # another process: at a moment drawn by lot, the two do not meet again
            yield _pause(random.uniform(0, min(_LONGEST, _SHORTEST * 2**number)))
    return (yield from attempt())


def _pause(seconds: float) -> Effect:
    return Effect(lambda: time.sleep(seconds), lambda: asyncio.sleep(seconds))
