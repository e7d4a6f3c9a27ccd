"""Fixtures shared by the tests of commands."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.cli.terminal import run_on_terminal


@pytest.fixture(autouse=True)
def db(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the path of the database that commands use, in a folder without a settings file."""
    path = tmp_path / "x.db"
    for name in ("PERDURE_MODEL", "PERDURE_USER", "PERDURE_KEY", "PERDURE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PERDURE_DB", str(path))
    monkeypatch.chdir(tmp_path)
    return path


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that runs the program on a terminal of 80 columns."""
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return partial(run_on_terminal, monkeypatch)
