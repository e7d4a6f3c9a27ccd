"""What a server keeps of a run in its memory is not read any more once a message was erased."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from perdure.checkpointers import open_checkpointer
from perdure.run_tables.runs import RunTable
from perdure.run_tables.thread_list import ThreadList
from perdure.server import api_runs, create_app
from perdure.server.graphs import Graphs
from perdure.server.runs import run_manager as runs
from perdure.server.runs.run import Run
from perdure.settings import Settings
from tests.server.running import erase_messages_with_text, run_server, wait_until
from tests.server.talking import Gate, build_input, build_talk_graph

SECRET = "the harbour safe opens at nine"
BODY = {"assistant_id": "talk", "input": build_input(SECRET), "stream_mode": ["values", "messages"]}


@pytest.fixture
def servers(settings: Settings, gate: Gate) -> Iterator[list[httpx.Client]]:
    """Clients of two servers on one database."""
    with ExitStack() as stack:
        clients = []
        for _ in range(2):
            app = create_app(settings, graphs=Graphs({"talk": build_talk_graph(gate)}))
            url = stack.enter_context(run_server(app))
            clients.append(stack.enter_context(httpx.Client(base_url=url, timeout=60)))
        clients[0].post("/threads", json={"thread_id": "t"})
        yield clients


def erase_secret(settings: Settings) -> None:
    with open_checkpointer(settings.db) as saver:
        erase_messages_with_text(saver, SECRET)


def run_turn(client: httpx.Client, mode: str) -> str:
    """Run a turn to its end in one of the ways in which clients do, and return its id."""
    if mode == "create":
        run = client.post("/threads/t/runs", json=BODY).json()
        client.get(f"/threads/t/runs/{run['run_id']}/join")
    else:
        resumable = {"stream_resumable": True} if mode == "resumable" else {}
        path = "wait" if mode == "wait" else "stream"
        assert SECRET in client.post(f"/threads/t/runs/{path}", json=BODY | resumable).text
    [run] = client.get("/threads/t/runs").json()
    return str(run["run_id"])


@pytest.mark.parametrize("mode", ["create", "wait", "stream", "resumable"])
def test_streams_of_ended_run_do_not_contain_erased_messages(
    servers: list[httpx.Client], settings: Settings, gate: Gate, mode: str
) -> None:
    """The rule holds on the server that ran the run and on the other server."""
    gate.open.set()
    run = run_turn(servers[0], mode)
    before = [each.get(f"/threads/t/runs/{run}/join").text for each in servers]
    erase_secret(settings)
    for client in servers:
        for path in ("join", "stream", "stream?stream_mode=values"):
            reply = client.get(f"/threads/t/runs/{run}/{path}")
            assert reply.status_code in (200, 410)  # 410: its events are not kept there
            assert SECRET not in reply.text
        assert "heard 1" in client.get(f"/threads/t/runs/{run}/join").text

    assert all(SECRET in text for text in before)


def test_erasure_during_run_ends_joined_streams_without_erased_message(
    servers: list[httpx.Client], settings: Settings, gate: Gate
) -> None:
    """The state in memory still has the message, but join returns the stored state at the end."""
    run = servers[0].post("/threads/t/runs", json=BODY).json()["run_id"]
    assert gate.reached.wait(60)
    erase_secret(settings)
    during = servers[0].get(f"/threads/t/runs/{run}/stream").text
    gate.open.set()
    joined = servers[0].get(f"/threads/t/runs/{run}/join").text
    after = servers[0].get(f"/threads/t/runs/{run}/stream").text

    assert "StreamLost" in during
    assert SECRET not in during + joined + after


def test_erasure_during_run_ends_stream_that_started_it(
    servers: list[httpx.Client], settings: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "ERASURE_CHECK_S", 0)
    with ThreadPoolExecutor() as threads:
        streaming = threads.submit(servers[0].post, "/threads/t/runs/stream", json=BODY)
        assert gate.reached.wait(60)
        erase_secret(settings)
        gate.open.set()
        streamed = streaming.result().text

    assert "StreamLost" in streamed
    assert "heard 1" not in streamed


def test_only_stream_that_started_run_skips_query_of_erasure_count(
    servers: list[httpx.Client], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has read the count at its start; a stream that joins later reads the count again."""
    queries: list[Any] = []
    frames, count_removals = (
        api_runs._iter_sse_frames_of_run,
        RunTable.read_newest_removal_numbers_by_thread_key,
    )

    async def iter_frames_after_end(run: Run, *args: Any, **options: Any) -> AsyncIterator[bytes]:
        await run.wait_until_ended()  # so that the log has events when the stream begins
        async for each in frames(run, *args, **options):
            yield each

    async def count_removals_and_record(table: RunTable, threads: Any) -> Any:
        queries.append(threads)
        return await count_removals(table, threads)

    monkeypatch.setattr(runs, "ERASURE_CHECK_S", 60)
    monkeypatch.setattr(api_runs, "_iter_sse_frames_of_run", iter_frames_after_end)
    monkeypatch.setattr(
        RunTable, "read_newest_removal_numbers_by_thread_key", count_removals_and_record
    )
    gate.open.set()
    run = run_turn(servers[0], "stream")
    queries_of_first_stream = len(queries)
    joined = servers[0].get(f"/threads/t/runs/{run}/stream").text

    assert SECRET in joined
    assert (queries_of_first_stream, len(queries)) == (0, 1)


def test_run_request_reads_its_thread_twice(
    servers: list[httpx.Client], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read is for the request and one under the lock; both serve to find the person."""
    reads: list[str] = []
    get = ThreadList.aget

    async def get_and_record(threads: ThreadList, thread_id: str) -> Any:
        reads.append(thread_id)
        return await get(threads, thread_id)

    gate.open.set()
    run_turn(servers[0], "wait")
    servers[0].patch("/threads/t", json={"metadata": {"owner": "somebody"}})
    monkeypatch.setattr(ThreadList, "aget", get_and_record)
    assert "heard 2" in servers[0].post("/threads/t/runs/wait", json=BODY).text
    assert reads == ["t", "t"]


def test_pruning_does_not_end_streams(
    servers: list[httpx.Client], settings: Settings, gate: Gate
) -> None:
    gate.open.set()
    run = run_turn(servers[0], "stream")
    with open_checkpointer(settings.db) as saver:
        saver.prune(["t"], strategy="keep_latest")
    assert SECRET in servers[0].get(f"/threads/t/runs/{run}/stream").text


def test_stream_of_later_run_is_complete_after_erasure(
    servers: list[httpx.Client], settings: Settings, gate: Gate
) -> None:
    gate.open.set()
    run_turn(servers[0], "stream")
    erase_secret(settings)
    body: Any = {**BODY, "input": build_input("a question about ships")}
    streamed = servers[0].post("/threads/t/runs/stream", json=body)
    run = servers[0].get("/threads/t/runs").json()[0]["run_id"]
    again = servers[0].get(f"/threads/t/runs/{run}/stream").text

    assert "ships" in streamed.text
    assert "ships" in again
    assert SECRET not in streamed.text + again


@pytest.mark.filterwarnings("ignore:The v3 streaming protocol")
def test_erasure_drops_stored_events_of_thread(
    servers: list[httpx.Client], settings: Settings, gate: Gate
) -> None:
    """Streams of the thread's events start again without the erased message."""
    gate.open.set()
    command = {
        "id": 1,
        "method": "run.start",
        "params": {"assistant_id": "talk", "input": build_input(SECRET)},
    }
    subscription = {"channels": ["values", "messages", "lifecycle"], "since": 0}
    servers[0].post("/threads/t/commands", json=command)
    wait_until(
        lambda: [r["status"] for r in servers[0].get("/threads/t/runs").json()] == ["success"]
    )

    def read_thread_events() -> str:
        with servers[0].stream("POST", "/threads/t/stream/events", json=subscription) as stream:
            text = ""
            for line in stream.iter_lines():
                text += line
                if '"completed"' in line or '"idle"' in line or line.startswith(":"):
                    break
        return text

    before = read_thread_events()
    erase_secret(settings)
    after = read_thread_events()

    assert SECRET in before
    assert SECRET not in after
