"""Fixtures of the stores' tests: each backend through each door."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from perdure.stores import SQLiteStore
from tests.store_backends import BACKENDS, DOORS, Awaited, Clock, like_langgraph, through
from tests.stores import filter_rows
from tests.stores.filter_rows import LetThrough

# each backend through one door, and both kinds of databases through both; the rest with --all
SLOW = {"memory-awaited", "file-blocking", "sealed-awaited", "postgres-awaited"}
SLOW |= {"postgres-pool-blocking"}  # differs from "postgres" in how connections are lent
OURS = [
    pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
    for name in (f"{backend}-{door}" for backend in BACKENDS for door in DOORS)
    # these differ from "sealed" in the index alone, and from "postgres" in the bytes of a row
    if name not in {"keyed-blocking", "postgres-sealed-blocking", "postgres-pool-awaited"}
]


@pytest.fixture
def clock() -> Clock:
    """What the stores of a test tell the time by."""
    return Clock()


@pytest.fixture(params=[*OURS, *(f"langgraph-{door}" for door in DOORS)])
def any_store(
    request: pytest.FixtureRequest, tmp_path: Path, clock: Clock
) -> Iterator[SQLiteStore]:
    """A store of each backend through each door, langgraph's own among them."""
    yield from _opened(request.param, tmp_path, clock)


@pytest.fixture(params=OURS)
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[SQLiteStore]:
    """A store of each of our backends through each door."""
    yield from _opened(request.param, tmp_path, clock)


@pytest.fixture(params=["sqlite", "postgres"])
def let_through(request: pytest.FixtureRequest) -> LetThrough:
    """Whether a filter's condition is true of a document, in each database."""
    return partial(filter_rows.let_through, request.param)


@pytest.fixture
def plain(tmp_path: Path, clock: Clock) -> Iterator[SQLiteStore]:
    """A store in a plain file."""
    with BACKENDS["file"](tmp_path, clock=clock) as opened:
        yield opened


def _opened(name: str, folder: Path, clock: Clock) -> Iterator[SQLiteStore]:
    backend, door = name.rsplit("-", 1)
    if backend == "langgraph":
        opened = like_langgraph(folder)
    else:
        opened = BACKENDS[backend](folder, clock=clock)
    seen = through(door, opened)
    try:
        yield seen
    finally:
        if isinstance(seen, Awaited):
            seen.end()
        if backend != "langgraph":
            opened.close()
