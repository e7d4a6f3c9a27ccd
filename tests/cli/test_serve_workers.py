"""`perdure serve --workers`: what is shared, what a killed worker leaves, how all of them end."""

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
from tests.cli.test_serve import answers, served
from tests.server.running import until
from tests.server.test_keys import ANN, entry

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
def graphs(tmp_path: Path) -> str:
    (tmp_path / "slow.py").write_text(GRAPH)
    file = tmp_path / "langgraph.json"
    file.write_text(json.dumps({"graphs": {"slow": "./slow.py:graph"}}))
    return str(file)


def children(process: subprocess.Popen[str]) -> list[int]:
    """One that watches what the others share, the one that has the sessions, those that serve."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return sorted(map(int, found))


def workers(process: subprocess.Popen[str]) -> list[int]:
    """The processes that serve."""
    return children(process)[2:]


def lives(process: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def begin(url: str, threads: int) -> list[str]:
    """Begin a run on each of some threads; returns the paths of the runs."""
    paths = []
    for number in range(threads):
        asked = {
            "assistant_id": "slow",
            "input": {"messages": [("human", str(number))]},
            "if_not_exists": "create",
        }
        reply = httpx.post(f"{url}/threads/t{number}/runs", json=asked, timeout=30)
        paths.append(f"{url}/threads/t{number}/runs/{reply.raise_for_status().json()['run_id']}")
    return paths


def status(path: str) -> Any:
    with httpx.Client(transport=httpx.HTTPTransport(retries=20)) as client:
        try:
            return client.get(path, timeout=30).raise_for_status().json()["status"]
        except httpx.TransportError:
            return "the worker that had the connection was killed"


def test_a_session_outlives_the_worker_that_began_it(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(entry(ANN, "ann"))
    given = ("--workers", "2", "--keys", str(keys))
    with served(*given, db=tmp_path / "memory.db") as (url, _, process):
        assert answers(url, "/ok") == 200
        until(lambda: len(workers(process)) == 2)
        done = httpx.post(f"{url}/ui/login", data={"key": ANN}, timeout=30)
        cookie = f"perdure_session={done.cookies['perdure_session']}"
        before = workers(process)
        for each in before:
            os.kill(each, signal.SIGKILL)
        until(lambda: len(workers(process)) == 2 and not {*workers(process)} & {*before})

        assert answers(url, "/ui/threads.json", cookie=cookie) == 200
        own_site = {"cookie": cookie, "sec-fetch-site": "same-origin"}
        httpx.post(f"{url}/ui/logout", headers=own_site, timeout=30)
        assert answers(url, "/ui/threads.json", cookie=cookie) == 401


def test_a_server_without_its_sessions_ends_and_says_why(tmp_path: Path) -> None:
    with served("--workers", "2", db=tmp_path / "memory.db") as (url, _, process):
        assert answers(url, "/ok") == 200
        until(lambda: len(workers(process)) == 2)
        served_by = workers(process)
        os.kill(children(process)[1], signal.SIGKILL)
        assert process.wait(60) == 1
        assert process.stderr is not None
        assert "has died; start the server again" in process.stderr.read()
        assert not any(map(lives, served_by))


def test_a_killed_worker_loses_no_run(tmp_path: Path, graphs: str) -> None:
    given = ("--workers", "2", "--graphs", graphs)
    with served(*given, db=tmp_path / "memory.db") as (url, _, process):
        assert answers(url, "/ok") == 200
        paths = begin(url, 6)
        for each in workers(process):
            os.kill(each, signal.SIGKILL)
        until(lambda: {status(path) for path in paths} == {"success"})

        said = httpx.get(f"{url}/threads/t5/state").json()["values"]["messages"]
        assert [message["content"] for message in said] == ["5", "so"]


def test_sigterm_ends_all_when_their_runs_have_ended(tmp_path: Path, graphs: str) -> None:
    given = ("--workers", "2", "--graphs", graphs)
    with served(*given, db=tmp_path / "memory.db") as (url, _, process):
        assert answers(url, "/ok") == 200
        paths = begin(url, 4)
        ended = workers(process)
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
        assert not any(map(lives, ended))
    with served("--graphs", graphs, db=tmp_path / "memory.db") as (again, _, _):
        assert answers(again, "/ok") == 200
        found = [httpx.get(path.replace(url, again)).json() for path in paths]

    assert [run["status"] for run in found] == ["success"] * 4


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    with served("--workers", "2", db=tmp_path / "memory.db") as (url, _, process):
        assert answers(url, "/ok") == 200
        served_by = workers(process)
        process.kill()
        until(lambda: not any(map(lives, served_by)))


def test_what_workers_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = "serve", "--port", "0", "--workers", "2"

    said = run_and_read_error(*given, "--metrics", "--db", str(tmp_path / "m.db"), capsys=capsys)
    assert "--metrics counts in one process" in said
    said = run_and_read_error(*given, "--db", ":memory:", capsys=capsys)
    assert "a database in memory belongs to one process" in said
