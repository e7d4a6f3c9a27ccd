"""Conflicts: changes of one namespace that were judged at the same time are not both written.

Two texts that say the same, each judged before the other was written, would both be new. Within a
process such changes run one after another. Between processes each change counts on a note of the
namespace, under the condition that nobody has counted since it was judged; else it is judged again.
A store without versions has no such note.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Final

from perdure.errors import AlreadyLocked, StorageUnavailable, VersionConflict
from perdure.memory.effects import Effect, Effects, T
from perdure.memory.store_adapter import CHANGED, StoreAdapter, note_of, notes_of
from perdure.storage.locks import Locks, Turn
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
    """Attempt a change when no other of this process is under way, until it meets no conflict.

    Args:
        adapter: The store.
        namespace: The namespace of the changed memories.
        attempt: Reads, judges and writes.

    Raises:
        VersionConflict: Other processes changed memories here, again and again.
    """
    # stores on one file share its database
    name = f"{id(getattr(adapter.store, 'database', adapter.store))} {namespace!r}"
    turn: Turn | None = yield Effect(lambda: _acquired(name), lambda: _aacquired(name))
    try:
        for number in range(_TRIES):
            try:
                return (yield from attempt())
            except VersionConflict:
                yield _pause(random.uniform(0, min(_LONGEST_S, _SHORTEST_S * 2**number)))
        return (yield from attempt())
    finally:
        if turn is not None:
            _locks(os.getpid()).release(turn)


@cache
def _locks(process: int) -> Locks:
    """The locks of a process; a forked one has its own."""
    return Locks(None)


def _acquired(name: str) -> Turn | None:
    """The lock; None: it is not free in time, or a check of the holder asks for it.

    An event loop is not blocked: the holder may need it.
    """
    try:
        asyncio.get_running_loop()
        wait_s = 0.0
    except RuntimeError:
        wait_s = _WAIT_S
    with suppress(AlreadyLocked, StorageUnavailable):
        return _locks(os.getpid()).acquire(name, wait_s)
    return None


async def _aacquired(name: str) -> Turn | None:
    with suppress(AlreadyLocked, StorageUnavailable):
        return await _locks(os.getpid()).aacquire(name, _WAIT_S)
    return None


def _pause(seconds: float) -> Effect:
    return Effect(lambda: time.sleep(seconds), lambda: asyncio.sleep(seconds))
