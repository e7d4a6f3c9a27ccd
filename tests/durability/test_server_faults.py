"""Runs of real `perdure serve` processes that are killed, stopped, or lose their database."""

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
NO_PROBLEMS = {"lost": 0, "twice": 0, "order": 0, "status": 0, "crons": 0, "untold": 0}


@pytest.mark.parametrize(
    ("fault", "database_kind"),
    [
        ("kill", "file"),
        pytest.param("kill-other", "postgres", marks=pytest.mark.slow),
        pytest.param("stop-other", "file", marks=pytest.mark.slow),
        pytest.param("sessions", "postgres", marks=pytest.mark.slow),
        pytest.param("kill-other", "file", marks=pytest.mark.slow),
        pytest.param("kill", "postgres", marks=pytest.mark.slow),
        pytest.param("stop", "postgres", marks=pytest.mark.slow),
    ],
)
def test_server_fault_loses_no_run_and_runs_none_twice(
    fault: str, database_kind: str, tmp_path: Path
) -> None:
    """On each thread one run is active and one waits; both end, and each input counts once.

    The runs end in order, a cron that becomes due runs once, and all ends of runs are reported.
    """
    if database_kind == "file":
        problems = survive(fault, str(tmp_path / "m.db"), tmp_path, 4)
    else:
        with database(postgres_server.dsn()) as db:
            problems = survive(fault, db, tmp_path, 4)
    problems.pop("takeover_ms")

    assert problems == NO_PROBLEMS


@pytest.mark.parametrize(("grace_s", "expected_text"), [(30, "to one"), (0.3, "StreamLost")])
@pytest.mark.slow
def test_stopping_server_does_not_cancel_run_with_on_disconnect_cancel(
    grace_s: float, expected_text: str, tmp_path: Path
) -> None:
    """The run would be cancelled if its reader left, but here the server ends the connection."""
    run_input = {"heard": ["one"], "pause_s": 3}
    body = {"assistant_id": "slow", "input": run_input, "on_disconnect": "cancel"}
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
    assert expected_text in text


@pytest.mark.slow
def test_kill_of_postgres_loses_no_run() -> None:
    problems = measured("postmaster", "postgres", 4)
    problems.pop("takeover_ms")

    assert problems == NO_PROBLEMS


@pytest.mark.parametrize(
    ("replacement", "database_kind"),
    [("another", "file"), ("another", "postgres"), ("restarted", "file")],
)
@pytest.mark.slow
def test_reader_can_resume_stream_after_its_server_was_killed(
    replacement: str, database_kind: str, tmp_path: Path
) -> None:
    """The stream contains each stored event after the last one once, and then all new events."""
    run_input: Any = {"heard": ["one"], "counts_to": 40}
    with ExitStack() as stack:
        db = str(tmp_path / "m.db")
        if database_kind == "postgres":
            db = stack.enter_context(database(postgres_server.dsn()))
        process, url = stack.enter_context(served(db, tmp_path))
        if replacement == "another":
            _, other_url = stack.enter_context(served(db, tmp_path))
        # not the SDK's reader, which retries a dead server for many seconds
        client = stack.enter_context(httpx.Client(base_url=url, timeout=60))
        client.post("/threads", json={"thread_id": "t"})
        body = {"assistant_id": "slow", "input": run_input, "stream_mode": "custom"}
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
        if replacement == "restarted":
            _, other_url = stack.enter_context(served(db, tmp_path))
        late = stack.enter_context(get_sync_client(url=other_url))
        last = read[len(read) // 2][0]
        resumed_events: list[Any] = [
            (part.id, part.data) for part in late.runs.join_stream("t", run, last_event_id=last)
        ]
        all_events: list[Any] = [(part.id, part.data) for part in late.runs.join_stream("t", run)]
        status = late.runs.get("t", run)["status"]

    assert None not in dict(resumed_events), resumed_events
    numbers = [int(number) for number, _ in resumed_events]
    restart_position = [data for _, data in resumed_events].index({"run_id": run, "attempt": 2})
    assert status == "success"
    assert numbers == sorted({*numbers})
    assert [data for _, data in resumed_events[restart_position + 1 :]] == [*range(40)]
    stored = [part for part in all_events[1:] if int(part[0]) < numbers[restart_position]]
    assert stored == read[1 : len(stored) + 1]
    assert resumed_events[:restart_position] == [
        part for part in stored if int(part[0]) > int(last)
    ]
