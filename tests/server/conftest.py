"""Fixtures: a new database for each test, a server over it, and a gate for its graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from benchmarks.server_faults import database
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncLangGraphClient

from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.settings import Settings
from tests import postgres_server
from tests.server.browser import browser, tab  # noqa: F401 - fixtures
from tests.server.running import run_server
from tests.server.talking import Gate


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a new file, without a model."""
    return Settings(db=str(tmp_path / "memory.db"), user="ann")


@pytest.fixture(params=["file", "postgres"])
def db(request: pytest.FixtureRequest, settings: Settings) -> Iterator[Settings]:
    """The settings of a server, on a file or on Postgres."""
    if request.param == "file":
        yield settings
        return
    with database(postgres_server.dsn()) as dsn:
        yield replace(settings, db=dsn)


@pytest.fixture
def gate() -> Gate:
    """The gate at which nodes of graphs wait."""
    return Gate()


@pytest.fixture
def graphs() -> Graphs | None:
    """The graphs that the server runs; None means perdure's own."""
    return None


@pytest.fixture
def url(settings: Settings, graphs: Graphs | None) -> Iterator[str]:
    """The address of a server that is open to everybody on this machine."""
    with run_server(create_app(settings, graphs=graphs)) as address:
        yield address


@pytest.fixture
def sdk(url: str) -> Iterator[SyncLangGraphClient]:
    """The langgraph client of the server, which has the thread `t`."""
    with get_sync_client(url=url) as client:
        client.threads.create(thread_id="t")
        yield client


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    """An HTTP client of the server."""
    with httpx.Client(base_url=url, timeout=30) as client:
        yield client
