"""Rollbacks, deletions and erasures that a server learns of late."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest
from langgraph.checkpoint.base import empty_checkpoint

from perdure.checkpointers import open_checkpointer
from perdure.checkpointers.run_writes import RUN_WRITES, RunWrites
from perdure.errors import RunEnded
from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.settings import Settings
from tests.server.running import erase_messages_with_text, run_server, wait_until
from tests.server.talking import Gate, build_input, build_talk_graph

SECRET = "the harbour safe opens at nine"


def test_rollback_accepted_by_another_server_removes_run_from_state(db: Settings) -> None:
    """A program that waits for the lock of the thread does not continue from the run's state."""
    gate, open_gate = Gate(), Gate()
    open_gate.open.set()
    apps = [create_app(db, graphs=Graphs({"talk": build_talk_graph(gate)})) for _ in range(2)]
    texts: list[str] = []

    def take_turn() -> None:
        async def turn() -> None:
            with open_checkpointer(db.db) as saver:
                graph = build_talk_graph(open_gate).compile(checkpointer=saver)
                async with saver.lock("t", timeout_s=30):
                    config: Any = {"configurable": {"thread_id": "t"}}
                    graph_input: Any = build_input("program")
                    values = await graph.ainvoke(graph_input, config)
                    texts.extend(message.text for message in values["messages"])

        asyncio.run(turn())

    with (
        run_server(apps[0]) as one,
        run_server(apps[1]) as other,
        httpx.Client(base_url=one, timeout=30) as first,
        httpx.Client(base_url=other, timeout=30) as second,
    ):
        first.post("/threads", json={"thread_id": "t"})
        body = {"assistant_id": "talk", "input": build_input(SECRET)}
        run = first.post("/threads/t/runs", json=body).json()["run_id"]
        assert gate.reached.wait(30)
        program = threading.Thread(target=take_turn)
        program.start()
        cancelled = second.post(f"/threads/t/runs/{run}/cancel", params={"action": "rollback"})
        gate.open.set()
        program.join(60)
        wait_until(lambda: first.get("/threads/t/runs").json() == [])
        values = first.get("/threads/t/state").json()["values"]

    assert cancelled.status_code == 202
    assert texts[:1] == ["program"]
    assert SECRET not in str(values)


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
@pytest.mark.parametrize("under_way", [False, True])
def test_first_reader_of_thread_gets_no_events_from_before_erasure(
    settings: Settings, under_way: bool
) -> None:
    """The first reader of a thread does not get events from before an erasure."""
    gate = Gate()
    if not under_way:
        gate.open.set()
    app = create_app(settings, graphs=Graphs({"talk": build_talk_graph(gate)}))
    with run_server(app) as url, httpx.Client(base_url=url, timeout=30) as client:
        client.post("/threads", json={"thread_id": "t"})
        params = {"assistant_id": "talk", "input": build_input(SECRET)}
        command = {"id": 1, "method": "run.start", "params": params}
        client.post("/threads/t/commands", json=command).raise_for_status()
        if under_way:
            assert gate.reached.wait(30)
        else:
            wait_until(lambda: client.get("/threads/t/runs").json()[0]["status"] == "success")
        with open_checkpointer(settings.db) as saver:
            erase_messages_with_text(saver, SECRET)
        threading.Timer(1, gate.open.set).start()
        received = ""
        try:
            body = {"channels": ["values", "messages", "lifecycle"], "since": 0}
            with client.stream("POST", "/threads/t/stream/events", json=body, timeout=3) as reply:
                for part in reply.iter_text():
                    received += part
        except httpx.ReadTimeout:
            pass  # the feed stays open for the next run

    assert SECRET not in received


def test_delayed_write_is_refused_after_its_run_ended(
    db: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write was submitted before the run ended, and is refused when the database takes it."""
    config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}

    async def put_late() -> None:
        writes = RunWrites()
        RUN_WRITES.set(writes)
        async with open_checkpointer(db.db) as saver:
            awrite, begun, go = saver.database.awrite, asyncio.Event(), asyncio.Event()

            async def awrite_after_signal(*args: Any, **options: Any) -> Any:
                begun.set()
                await go.wait()
                return await awrite(*args, **options)

            monkeypatch.setattr(saver.database, "awrite", awrite_after_signal)
            put = asyncio.create_task(saver.aput(config, empty_checkpoint(), {}, {}))
            await begun.wait()
            await writes.close(timeout_s=0.05)
            go.set()
            with pytest.raises(RunEnded):
                await put
            assert await saver.aget_tuple(config) is None

    asyncio.run(put_late())
