"""Fixtures of several test modules: stores of both kinds, and both forms of a method."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langgraph.store.memory import InMemoryStore

from perdure.memory.records import StoreAdapter
from perdure.stores import SQLiteStore


@pytest.fixture(params=["perdure", "langgraph"])
def store(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A store of perdure's, and one of langgraph's."""
    if request.param == "langgraph":
        yield InMemoryStore()
        return
    with SQLiteStore.open(":memory:", index=None) as opened:
        yield opened


@pytest.fixture
def ours() -> Iterator[SQLiteStore]:
    """A store of perdure's."""
    with SQLiteStore.open(":memory:", index=None) as opened:
        yield opened


@pytest.fixture(params=["in memory", "sqlite", "sqlite file", "no index"])
def adapter(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreAdapter]:
    """The adapter of a store of each kind."""
    if request.param == "in memory":
        yield StoreAdapter(InMemoryStore())
        return
    path = tmp_path / "memory.db" if request.param == "sqlite file" else ":memory:"
    options: dict[str, Any] = {"index": None} if request.param == "no index" else {}
    with SQLiteStore.open(path, **options) as opened:
        yield StoreAdapter(opened)


@pytest.fixture
def empty() -> StoreAdapter:
    """The adapter of a store that ranks nothing."""
    return StoreAdapter(InMemoryStore())


@pytest.fixture(params=["sync", "async"])
def colour(request: pytest.FixtureRequest) -> str:
    """Which form of a method is called."""
    return str(request.param)
