"""Fixtures for the tests of the stores: each backend with blocking and with awaited calls."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from perdure.stores import SQLiteStore
from tests.store_backends import (
    BACKENDS,
    CALL_MODES,
    AwaitedStore,
    Clock,
    open_langgraph_store,
    with_call_mode,
)
from tests.stores import filter_rows
from tests.stores.filter_rows import EvaluateFilter

# Without --all, each backend is tested with either blocking or awaited calls, and one backend of
# each kind of database with both.
SLOW = {"memory-awaited", "file-blocking", "sealed-awaited", "postgres-awaited"}
SLOW |= {"postgres-pool-blocking"}  # differs from "postgres" in how connections are lent
OURS = [
    pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
    for name in (f"{backend}-{door}" for backend in BACKENDS for door in CALL_MODES)
    # these differ from "sealed" only in the index, and from "postgres" only in the bytes of a row
    if name not in {"keyed-blocking", "postgres-sealed-blocking", "postgres-pool-awaited"}
]


@pytest.fixture
def clock() -> Clock:
    """Return the clock that the stores of a test use."""
    return Clock()


@pytest.fixture(params=[*OURS, *(f"langgraph-{door}" for door in CALL_MODES)])
def any_store(
    request: pytest.FixtureRequest, tmp_path: Path, clock: Clock
) -> Iterator[SQLiteStore]:
    """Yield a store of each backend, and langgraph's own, with blocking and awaited calls."""
    yield from _open_store(request.param, tmp_path, clock)


@pytest.fixture(params=OURS)
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[SQLiteStore]:
    """Yield a store of each of our backends, with blocking and with awaited calls."""
    yield from _open_store(request.param, tmp_path, clock)


@pytest.fixture(params=["sqlite", "postgres"])
def evaluate_filter(request: pytest.FixtureRequest) -> EvaluateFilter:
    """Return a function that evaluates a filter's SQL condition for a document."""
    return partial(filter_rows.evaluate_filter, request.param)


@pytest.fixture
def file_store(tmp_path: Path, clock: Clock) -> Iterator[SQLiteStore]:
    """Yield a store in an unencrypted file."""
    with BACKENDS["file"](tmp_path, clock=clock) as opened:
        yield opened


def _open_store(name: str, folder: Path, clock: Clock) -> Iterator[SQLiteStore]:
    backend, door = name.rsplit("-", 1)
    if backend == "langgraph":
        opened = open_langgraph_store(folder)
    else:
        opened = BACKENDS[backend](folder, clock=clock)
    store = with_call_mode(door, opened)
    try:
        yield store
    finally:
        if isinstance(store, AwaitedStore):
            store.end()
        if backend != "langgraph":
            opened.close()
