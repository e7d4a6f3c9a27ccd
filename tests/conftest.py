"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from perdure.checkpointers import SQLiteCheckpointer
from tests.backends import BACKENDS, Place, places

# Files of tests lie in memory where there is room (a container may have 64 MB): half of the time
# went into waiting for the disk. Processes are killed, never the machine, so no test gets weaker.
MEMORY = Path("/dev/shm")
if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 << 30:
    tempfile.tempdir = os.environ["TMPDIR"] = str(MEMORY)

settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60
)
settings.register_profile("deep", deadline=None, max_examples=2000)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the developer's own settings out of the tests."""
    for name in [name for name in os.environ if name.startswith("PERDURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


@pytest.fixture(params=sorted(BACKENDS))
def saver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SQLiteCheckpointer]:
    """A checkpointer on each backend."""
    with BACKENDS[request.param](tmp_path) as opened:
        yield opened


@pytest.fixture(params=["file", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Where a database may be that other processes open too."""
    return places(tmp_path)[request.param]()


@pytest.fixture
def file_saver(tmp_path: Path) -> Iterator[SQLiteCheckpointer]:
    """A checkpointer on a plain file."""
    with SQLiteCheckpointer.open(tmp_path / "plain.db") as opened:
        yield opened
