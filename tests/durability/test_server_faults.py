"""Runs of `perdure serve` that is killed, stopped, or loses its database, with real servers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from benchmarks.server_faults import database, measured, survive

from tests import postgres_server

pytestmark = [
    pytest.mark.repeats,
    pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL"),
]
RIGHT = {"lost": 0, "twice": 0, "order": 0, "status": 0}


@pytest.mark.parametrize(
    ("fault", "on"),
    [
        ("kill", "file"),
        ("kill-other", "postgres"),
        ("stop-other", "file"),
        ("sessions", "postgres"),
        pytest.param("kill-other", "file", marks=pytest.mark.slow),
        pytest.param("kill", "postgres", marks=pytest.mark.slow),
        pytest.param("stop", "postgres", marks=pytest.mark.slow),
    ],
)
def test_no_run_is_lost_or_runs_twice(fault: str, on: str, tmp_path: Path) -> None:
    """On each thread one is under way and one waits: both end, in order, each input once."""
    if on == "file":
        wrong = survive(fault, str(tmp_path / "m.db"), tmp_path, 4)
    else:
        with database(postgres_server.dsn()) as db:
            wrong = survive(fault, db, tmp_path, 4)
    wrong.pop("takeover_ms")

    assert wrong == RIGHT


@pytest.mark.slow
def test_no_run_is_lost_when_postgres_is_killed() -> None:
    wrong = measured("postmaster", "postgres", 4)
    wrong.pop("takeover_ms")

    assert wrong == RIGHT
