"""Fixtures that several test modules share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langgraph.store.memory import InMemoryStore

from perdure.memory.long_term.records import StoreAdapter
from perdure.stores import SQLiteStore


@pytest.fixture(params=["perdure", "langgraph"])
def store(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A store of perdure, and one of langgraph."""
    if request.param == "langgraph":
        yield InMemoryStore()
        return
    with SQLiteStore.open(":memory:", index=None) as opened:
        yield opened


@pytest.fixture
def perdure_store() -> Iterator[SQLiteStore]:
    """A store of perdure."""
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
def empty_adapter() -> StoreAdapter:
    """The adapter of a store that cannot rank results."""
    return StoreAdapter(InMemoryStore())


@pytest.fixture(params=["sync", "async"])
def call_mode(request: pytest.FixtureRequest) -> str:
    """Whether a test calls the synchronous or the asynchronous method."""
    return str(request.param)
