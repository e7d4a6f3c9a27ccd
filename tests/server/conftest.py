"""A file of its own for each test, and a server over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from perdure.server import create_app
from perdure.settings import Settings
from tests.server.browser import browser, tab  # noqa: F401 - fixtures
from tests.server.running import running


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a new file, without a model."""
    return Settings(db=str(tmp_path / "memory.db"), user="ann")


@pytest.fixture
def url(settings: Settings) -> Iterator[str]:
    """The address of a server, open to all on this machine."""
    with running(create_app(settings)) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    """A client of it."""
    with httpx.Client(base_url=url, timeout=30) as made:
        yield made
