"""The store backends of the tests, their options, and their sync and async use."""

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
SYNONYMS = {"automobile": "car", "physician": "doctor", "journey": "trip"}


class WordEmbedder:
    """An embedder with one dimension for each word. Synonyms have the same dimension.

    Texts with common words are near. `calls` records the texts, and `failing` makes each call
    raise.
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
            out[zlib.crc32(SYNONYMS.get(word, word).encode()) % DIMS] += 1
        return out


class Clock:
    """A clock that shows the time that it was set to."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def at(self, ago_s: float = 0) -> datetime:
        """Return the moment `ago_s` seconds ago."""
        return datetime.fromtimestamp(0, UTC) + timedelta(seconds=self.now - ago_s)

    def forward(self, seconds: float = 1.0) -> datetime:
        """Advance the clock, and return the new moment."""
        self.now += seconds
        return self.at()


def make_options(**options: Any) -> dict[str, Any]:
    """Return options of a store with a `WordEmbedder` that does not wait for the disk.

    `options` take precedence.
    """
    return {"index": {"embed": WordEmbedder(), "dims": DIMS}, "synchronous": "normal", **options}


def open_store(
    path: Any,
    *,
    clock: Callable[[], float] = time.time,
    connections: type[sqlite3.Connection] = sqlite3.Connection,
    **options: Any,
) -> SQLiteStore:
    """Return a store with this clock and this class of connections."""

    class Store(SQLiteStore):
        _clock = staticmethod(clock)
        _connection_class = connections

    return Store.open(path, **options)


def open_store_at(
    place: Place, *, clock: Callable[[], float] = time.time, **options: Any
) -> SQLiteStore:
    """Return a store in a test's database, with this clock and a `WordEmbedder`."""

    class Store(SQLiteStore):
        _clock = staticmethod(clock)

    class PostgresStoreWithClock(PostgresStore):
        _clock = staticmethod(clock)

    return cast(
        SQLiteStore, place.database(Store, PostgresStoreWithClock, **make_options(**options))
    )


def _open_in_user_pool(
    folder: Path, *, clock: Callable[[], float] = time.time, **options: Any
) -> Any:
    class InPool(PostgresStore):
        _clock = staticmethod(clock)

    pool_options = {
        key: value for key, value in make_options(**options).items() if key != "synchronous"
    }
    pool = shared_pool(postgres_server.dsn_of_role("an_owner"))
    return InPool.open(
        pool, schema=postgres_server.schema_name(folder), tenant="acme", **pool_options
    )


def _open_in_postgres(folder: Path, **options: Any) -> SQLiteStore:
    dsn = postgres_server.dsn_of_role("an_owner") if "tenant" in options else postgres_server.dsn()
    return open_store_at(Place(folder, dsn), **options)


BACKENDS: dict[str, Callable[..., SQLiteStore]] = {
    "memory": lambda folder, **options: open_store(":memory:", **make_options(**options)),
    "file": lambda folder, **options: open_store(folder / "plain.db", **make_options(**options)),
    "sealed": lambda folder, **options: open_store(
        folder / "sealed.db", key=KEY, **make_options(**options)
    ),
    "keyed": lambda folder, **options: open_store(
        folder / "keyed.db", key=KEY, text_index="keyed", **make_options(**options)
    ),
    "postgres": _open_in_postgres,
    "postgres-sealed": lambda folder, **options: _open_in_postgres(
        folder, key=KEY, tenant="acme", **options
    ),
    "postgres-pool": _open_in_user_pool,
}


def open_langgraph_store(folder: Path) -> Any:
    """Return a langgraph store, whose behaviour perdure's stores must have."""
    words = WordEmbedder()
    return InMemoryStore(index={"embed": words.embed, "dims": DIMS})


class AwaitedStore:
    """A store whose methods are called in their async form, on one event loop."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._runner = asyncio.Runner()

    def __getattr__(self, name: str) -> Any:
        twin = getattr(self._store, f"a{name}", None)
        if twin is None or name == "close":
            return getattr(self._store, name)
        return lambda *args, **named: self._runner.run(twin(*args, **named))

    def end(self) -> None:
        """Close the event loop."""
        self._runner.close()


CALL_MODES = ("blocking", "awaited")


# for tests that need not run in both call modes: each backend in one of them
ONE_CALL_MODE_PER_BACKEND = pytest.mark.parametrize(
    "store",
    ["memory-blocking", "file-awaited", "sealed-blocking", "keyed-awaited"],
    indirect=True,
)


def with_call_mode(call_mode: str, store: Any) -> SQLiteStore:
    """Return the store, or a wrapper that calls its async methods."""
    return cast(SQLiteStore, AwaitedStore(store) if call_mode == "awaited" else store)


def list_item_keys(items: Sequence[Any]) -> list[str]:
    """Return the keys of items, in order."""
    return [item.key for item in items]


def put_texts(store: SQLiteStore, namespace: tuple[str, ...], **texts: str) -> None:
    """Put each text under its key."""
    for key, text in texts.items():
        store.put(namespace, key, {"text": text})
