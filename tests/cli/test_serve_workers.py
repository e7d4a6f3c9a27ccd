"""`perdure serve --workers`: shared sessions, killed workers, and the end of all processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.commands import run_and_read_error
from tests.cli.test_serve import get_status, start_server
from tests.server.http.test_keys import ANN, render_key_entry
from tests.server.running import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it finds processes in /proc")
GRAPH = """
import asyncio
from langgraph.graph import START, MessagesState, StateGraph

async def answer(state):
    await asyncio.sleep(1)
    return {"messages": [("ai", "so")]}

graph = StateGraph(MessagesState).add_node(answer).add_edge(START, "answer").compile()
"""


@pytest.fixture
def graphs_file(tmp_path: Path) -> str:
    (tmp_path / "slow.py").write_text(GRAPH)
    file = tmp_path / "langgraph.json"
    file.write_text(json.dumps({"graphs": {"slow": "./slow.py:graph"}}))
    return str(file)


def read_child_ids(process: subprocess.Popen[str]) -> list[int]:
    """Return the ids of the child processes: the watcher, the session process, the workers."""
    child_ids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return sorted(map(int, child_ids))


def read_worker_ids(process: subprocess.Popen[str]) -> list[int]:
    """Return the ids of the processes that serve."""
    return read_child_ids(process)[2:]


def is_alive(process_id: int) -> bool:
    """Return whether the process exists and has not ended."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start_runs(url: str, count: int) -> list[str]:
    """Start a run on each of several threads, and return the URLs of the runs."""
    paths = []
    for number in range(count):
        request = {
            "assistant_id": "slow",
            "input": {"messages": [("human", str(number))]},
            "if_not_exists": "create",
        }
        reply = httpx.post(f"{url}/threads/t{number}/runs", json=request, timeout=30)
        paths.append(f"{url}/threads/t{number}/runs/{reply.raise_for_status().json()['run_id']}")
    return paths


def get_run_status(path: str) -> Any:
    with httpx.Client(transport=httpx.HTTPTransport(retries=20)) as client:
        try:
            return client.get(path, timeout=30).raise_for_status().json()["status"]
        except httpx.TransportError:
            return "the worker that had the connection was killed"


@pytest.mark.slow
def test_login_session_survives_death_of_its_worker(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(render_key_entry(ANN, "ann"))
    options = ("--workers", "2", "--keys", str(keys))
    with start_server(*options, db=tmp_path / "memory.db") as (url, _, process):
        assert get_status(url, "/ok") == 200
        wait_until(lambda: len(read_worker_ids(process)) == 2)
        login = httpx.post(f"{url}/ui/login", data={"key": ANN}, timeout=30)
        cookie = f"perdure_session={login.cookies['perdure_session']}"
        before = read_worker_ids(process)
        for worker in before:
            os.kill(worker, signal.SIGKILL)
        wait_until(
            lambda: (
                len(read_worker_ids(process)) == 2 and not {*read_worker_ids(process)} & {*before}
            )
        )

        assert get_status(url, "/ui/threads.json", cookie=cookie) == 200
        own_site = {"cookie": cookie, "sec-fetch-site": "same-origin"}
        httpx.post(f"{url}/ui/logout", headers=own_site, timeout=30)
        assert get_status(url, "/ui/threads.json", cookie=cookie) == 401


@pytest.mark.slow
def test_server_whose_session_process_died_ends_with_error(tmp_path: Path) -> None:
    with start_server("--workers", "2", db=tmp_path / "memory.db") as (url, _, process):
        assert get_status(url, "/ok") == 200
        wait_until(lambda: len(read_worker_ids(process)) == 2)
        served_by = read_worker_ids(process)
        os.kill(read_child_ids(process)[1], signal.SIGKILL)
        assert process.wait(60) == 1
        assert process.stderr is not None
        assert "has died; restart the server" in process.stderr.read()
        assert not any(map(is_alive, served_by))


@pytest.mark.slow
def test_killed_workers_lose_no_run(tmp_path: Path, graphs_file: str) -> None:
    options = ("--workers", "2", "--graphs", graphs_file)
    with start_server(*options, db=tmp_path / "memory.db") as (url, _, process):
        assert get_status(url, "/ok") == 200
        paths = start_runs(url, 6)
        for worker in read_worker_ids(process):
            os.kill(worker, signal.SIGKILL)
        wait_until(lambda: {get_run_status(path) for path in paths} == {"success"})

        messages = httpx.get(f"{url}/threads/t5/state").json()["values"]["messages"]
        assert [message["content"] for message in messages] == ["5", "so"]


@pytest.mark.slow
def test_sigterm_ends_workers_after_their_runs(tmp_path: Path, graphs_file: str) -> None:
    options = ("--workers", "2", "--graphs", graphs_file)
    with start_server(*options, db=tmp_path / "memory.db") as (url, _, process):
        assert get_status(url, "/ok") == 200
        paths = start_runs(url, 4)
        worker_ids = read_worker_ids(process)
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
        assert not any(map(is_alive, worker_ids))
    with start_server("--graphs", graphs_file, db=tmp_path / "memory.db") as (second_url, _, _):
        assert get_status(second_url, "/ok") == 200
        runs = [httpx.get(path.replace(url, second_url)).json() for path in paths]

    assert [run["status"] for run in runs] == ["success"] * 4


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    with start_server("--workers", "2", db=tmp_path / "memory.db") as (url, _, process):
        assert get_status(url, "/ok") == 200
        served_by = read_worker_ids(process)
        process.kill()
        wait_until(lambda: not any(map(is_alive, served_by)))


def test_workers_option_refuses_metrics_and_memory_database(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "serve", "--port", "0", "--workers", "2"

    message = run_and_read_error(
        *options, "--metrics", "--db", str(tmp_path / "m.db"), capsys=capsys
    )
    assert "--metrics can count requests in only one process" in message
    message = run_and_read_error(*options, "--db", ":memory:", capsys=capsys)
    assert "several processes cannot share an in-memory database" in message


def test_processes_that_cannot_be_started_are_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise EOFError

    monkeypatch.setattr("multiprocessing.managers.SyncManager.start", fail)

    error = run_and_read_error(
        "serve", "--port", "0", "--db", str(tmp_path / "x.db"), "--workers", "2", capsys=capsys
    )

    assert "cannot start further processes" in error
    assert sys.executable in error.replace("\n", "")
