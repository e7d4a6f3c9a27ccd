"""What tests of commands share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def db(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The database that commands work on, in a folder of its own without settings."""
    path = tmp_path / "x.db"
    for name in ("PERDURE_MODEL", "PERDURE_USER", "PERDURE_KEY", "PERDURE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PERDURE_DB", str(path))
    monkeypatch.chdir(tmp_path)
    return path
