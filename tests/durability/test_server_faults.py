"""Runs of `perdure serve` that is killed, stopped, or loses its database, with real servers."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.server_faults import database, measured, served, survive, until
from langgraph_sdk import get_sync_client

from tests import postgres_server

pytestmark = [
    pytest.mark.repeats,
    pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL"),
]
RIGHT = {"lost": 0, "twice": 0, "order": 0, "status": 0, "crons": 0, "untold": 0}


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
    """On each thread one is under way and one waits: both end, in order, each input once.

    A cron whose time comes runs once, and all ends are told.
    """
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


@pytest.mark.parametrize(
    ("again", "on"), [("another", "file"), ("another", "postgres"), ("restarted", "file")]
)
def test_a_reader_goes_on_after_its_server_was_killed(again: str, on: str, tmp_path: Path) -> None:
    """With what was stored after its last event, once, and all that the run tells then."""
    asked: Any = {"heard": ["one"], "counts_to": 40}
    with ExitStack() as stack:
        db = str(tmp_path / "m.db")
        if on == "postgres":
            db = stack.enter_context(database(postgres_server.dsn()))
        process, url = stack.enter_context(served(db, tmp_path))
        if again == "another":
            _, other = stack.enter_context(served(db, tmp_path))
        # not the SDK's reader, which asks a server that is dead again for many seconds
        client = stack.enter_context(httpx.Client(base_url=url, timeout=60))
        client.post("/threads", json={"thread_id": "t"})
        body = {"assistant_id": "slow", "input": asked, "stream_mode": "custom"}
        run = client.post("/threads/t/runs", json=body).json()["run_id"]
        read: list[Any] = []

        def kill_at_20() -> None:
            event: dict[str, str] = {}
            with client.stream("GET", f"/threads/t/runs/{run}/stream") as stream:
                for line in stream.iter_lines():
                    name, _, text = line.partition(": ")
                    event[name] = text
                    if not line and "data" in event:
                        read.append((event.get("id"), json.loads(event["data"])))
                        event = {}
                        if read[-1][1] == 20:
                            process.kill()

        with pytest.raises(httpx.TransportError):
            kill_at_20()
        process.wait()
        if again == "restarted":
            _, other = stack.enter_context(served(db, tmp_path))
        late = stack.enter_context(get_sync_client(url=other))
        last = read[len(read) // 2][0]
        heard: list[Any] = [
            (part.id, part.data) for part in late.runs.join_stream("t", run, last_event_id=last)
        ]
        whole: list[Any] = [(part.id, part.data) for part in late.runs.join_stream("t", run)]
        status = late.runs.get("t", run)["status"]

    assert None not in dict(heard), heard
    numbers = [int(number) for number, _ in heard]
    anew = [data for _, data in heard].index({"run_id": run, "attempt": 2})
    assert status == "success"
    assert numbers == sorted({*numbers})
    assert [data for _, data in heard[anew + 1 :]] == [*range(40)]
    stored = [part for part in whole[1:] if int(part[0]) < numbers[anew]]
    assert stored == read[1 : len(stored) + 1]
    assert heard[:anew] == [part for part in stored if int(part[0]) > int(last)]
