"""Conflicts: of two changes of a namespace that are judged at once, the second is judged again.

Within a process changes run one after another. Between processes, in a store with versions, each
change counts up a note of the namespace, on condition that nobody has since it was judged.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Final

from perdure.errors import AlreadyLocked, StorageUnavailable, VersionConflict
from perdure.memory.effects import Effect, Effects, T
from perdure.memory.store_adapter import CHANGED, StoreAdapter, note_of, notes_of
from perdure.storage.locks import Locks
from perdure.stores.base import Namespace, PutItem

_KEY: Final = "memories"
_WAIT_S: Final = 10.0  # for a change that takes longer, others do not wait: its write tells
_TRIES: Final = 50  # each that fails is one in which another change succeeded
_SHORTEST_S, _LONGEST_S = 0.002, 0.2  # pauses between tries


def change_note(adapter: StoreAdapter, namespace: Namespace) -> Effects[list[PutItem]]:
    """The puts to write with a change that is judged after this call.

    They make the write a `VersionConflict` if another change was written in between.
    """
    if not adapter.versioned:
        return []
    place = notes_of(CHANGED, namespace)
    note = yield from adapter.got(place, _KEY)
    number, version = (0, 0) if note is None else (note.value["number"], note.version)
    return [note_of(place, _KEY, {"number": number + 1}, if_version=version)]


def one_by_one(
    adapter: StoreAdapter, namespace: Namespace, attempt: Callable[[], Effects[T]]
) -> Effects[T]:
    """Attempt a change, while this process attempts no other here, until it meets no conflict.

    Raises:
        VersionConflict: Other processes changed memories here, again and again.
    """
    # stores on one file share its database; a forked process has locks of its own
    name = f"{id(getattr(adapter.store, 'database', adapter.store))} {namespace!r}"
    locks, turn = _locks(os.getpid()), None
    with suppress(AlreadyLocked, StorageUnavailable):  # not free in time, or held by the caller
        turn = yield Effect(
            lambda: locks.acquire(name, 0.0 if _in_loop() else _WAIT_S),
            lambda: locks.aacquire(name, _WAIT_S),
        )
    try:
        for number in range(_TRIES):
            try:
                return (yield from attempt())
            except VersionConflict:
                pause = random.uniform(0, min(_LONGEST_S, _SHORTEST_S * 2**number))
                yield Effect(partial(time.sleep, pause), partial(asyncio.sleep, pause))
        return (yield from attempt())
    finally:
        if turn is not None:
            locks.release(turn)


@cache
def _locks(process: int) -> Locks:
    return Locks(None)


def _in_loop() -> bool:
    """Whether an event loop runs in this thread: who holds the lock may need it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
