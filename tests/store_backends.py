"""The stores under contract, both doors into them, and what they are opened with."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from langgraph.store.memory import InMemoryStore

from perdure.stores import SQLiteStore
from perdure.stores.postgres import PostgresStore
from tests import postgres_server
from tests.backends import KEY, Place
from tests.user_pool import shared_pool

DIMS = 512
KINDRED = {"automobile": "car", "physician": "doctor", "journey": "trip"}


class Words:
    """An embedder with an axis for each word, kindred words on the same one.

    Texts near in it share words. `calls` holds what it was given, `failing` makes it raise.
    """

    name = "words"
    dims = DIMS
    in_process = True

    def __repr__(self) -> str:
        return "Words()"

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.failing = False

    def embed(self, texts: Sequence[str]) -> Any:
        if self.failing:
            raise OSError("the model is away")
        self.calls.append(list(texts))
        return np.array([self.vector(text) for text in texts])

    async def aembed(self, texts: Sequence[str]) -> Any:
        return self.embed(texts)

    @staticmethod
    def vector(text: str) -> np.ndarray[Any, Any]:
        out = np.zeros(DIMS)
        for word in re.findall(r"\w+", text.lower()):
            out[zlib.crc32(KINDRED.get(word, word).encode()) % DIMS] += 1
        return out


class Clock:
    """Tells what it is told."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def at(self, ago_s: float = 0) -> datetime:
        """The moment so many seconds ago."""
        return datetime.fromtimestamp(0, UTC) + timedelta(seconds=self.now - ago_s)

    def forward(self, seconds: float = 1.0) -> datetime:
        """Go on; returns the new moment."""
        self.now += seconds
        return self.at()


def of_words(**options: Any) -> dict[str, Any]:
    """The options of a store that embeds with `Words` and waits for no disk; others go before."""
    return {"index": {"embed": Words(), "dims": DIMS}, "synchronous": "normal", **options}


def open_store(
    path: Any,
    *,
    clock: Callable[[], float] = time.time,
    connections: type[sqlite3.Connection] = sqlite3.Connection,
    **options: Any,
) -> SQLiteStore:
    """A store that tells the time by a clock, over connections of a class."""

    class Store(SQLiteStore):
        _clock = staticmethod(clock)
        _connection_class = connections

    return Store.open(path, **options)


def store_at(
    place: Place, *, clock: Callable[[], float] = time.time, **options: Any
) -> SQLiteStore:
    """A store at a place that tells the time by a clock, and embeds with `Words`."""

    class Store(SQLiteStore):
        _clock = staticmethod(clock)

    class InPostgres(PostgresStore):
        _clock = staticmethod(clock)

    return cast(SQLiteStore, place.database(Store, InPostgres, **of_words(**options)))


def _user_pool(folder: Path, *, clock: Callable[[], float] = time.time, **options: Any) -> Any:
    class InPool(PostgresStore):
        _clock = staticmethod(clock)

    given = {key: value for key, value in of_words(**options).items() if key != "synchronous"}
    pool = shared_pool(postgres_server.dsn_of("an_owner"))
    return InPool.open(pool, schema=postgres_server.schema(folder), tenant="acme", **given)


def _postgres(folder: Path, **options: Any) -> SQLiteStore:
    dsn = postgres_server.dsn_of("an_owner") if "tenant" in options else postgres_server.dsn()
    return store_at(Place(folder, dsn), **options)


BACKENDS: dict[str, Callable[..., SQLiteStore]] = {
    "memory": lambda folder, **options: open_store(":memory:", **of_words(**options)),
    "file": lambda folder, **options: open_store(folder / "plain.db", **of_words(**options)),
    "sealed": lambda folder, **options: open_store(
        folder / "sealed.db", key=KEY, **of_words(**options)
    ),
    "keyed": lambda folder, **options: open_store(
        folder / "keyed.db", key=KEY, text_index="keyed", **of_words(**options)
    ),
    "postgres": _postgres,
    "postgres-sealed": lambda folder, **options: _postgres(
        folder, key=KEY, tenant="acme", **options
    ),
    "postgres-pool": _user_pool,
}


def like_langgraph(folder: Path) -> Any:
    """The store whose meaning ours has, where it claims a feature."""
    words = Words()
    return InMemoryStore(index={"embed": words.embed, "dims": DIMS})


class Awaited:
    """The door of coroutines: each method is answered by its `a` form, on one event loop."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._runner = asyncio.Runner()

    def __getattr__(self, name: str) -> Any:
        twin = getattr(self._store, f"a{name}", None)
        if twin is None or name == "close":
            return getattr(self._store, name)
        return lambda *args, **named: self._runner.run(twin(*args, **named))

    def end(self) -> None:
        """Let the event loop go."""
        self._runner.close()


DOORS = ("blocking", "awaited")


# for what every door checks in the same way: each backend through one of them
FEWER = pytest.mark.parametrize(
    "store",
    ["memory-blocking", "file-awaited", "sealed-blocking", "keyed-awaited"],
    indirect=True,
)


def through(door: str, store: Any) -> SQLiteStore:
    """The store as seen through a door."""
    return cast(SQLiteStore, Awaited(store) if door == "awaited" else store)


def keys(found: Sequence[Any]) -> list[str]:
    """The keys of items, in order."""
    return [item.key for item in found]


def write(store: SQLiteStore, namespace: tuple[str, ...], **texts: str) -> None:
    """Put texts under keys."""
    for key, text in texts.items():
        store.put(namespace, key, {"text": text})
