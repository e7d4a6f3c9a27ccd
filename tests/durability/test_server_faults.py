"""Runs of `perdure serve` that is killed, stopped, or loses its database, with real servers."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest
from benchmarks.server_faults import database, measured, served, survive, until

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


@pytest.mark.parametrize(("grace_s", "told"), [(30, "to one"), (0.3, "StreamLost")])
def test_a_server_that_stops_does_not_cancel_for_a_reader(
    grace_s: float, told: str, tmp_path: Path
) -> None:
    """The run would end if its reader left; it is the server that leaves, after a time."""
    asked = {"heard": ["one"], "pause_s": 3}
    body = {"assistant_id": "slow", "input": asked, "on_disconnect": "cancel"}
    db = str(tmp_path / "m.db")
    with (
        served(db, tmp_path, grace_s) as (process, url),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        client.post("/threads", json={"thread_id": "t"})
        with client.stream("POST", "/threads/t/runs/stream", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.terminate()
            text = "".join(lines)
        process.wait(60)
    with served(db, tmp_path) as (_, url), httpx.Client(base_url=url) as client:
        until(lambda: client.get("/threads/t").json()["status"] != "busy")
        status = client.get("/threads/t/runs").json()[0]["status"]

    assert status == "success"
    assert told in text


@pytest.mark.slow
def test_no_run_is_lost_when_postgres_is_killed() -> None:
    wrong = measured("postmaster", "postgres", 4)
    wrong.pop("takeover_ms")

    assert wrong == RIGHT
