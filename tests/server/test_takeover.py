"""A run is continued, ended or undone once, whatever its server, its clients and others do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import httpx
import pytest
from langchain_core.messages import HumanMessage
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncLangGraphClient

from perdure.checkpointers import open_checkpointer
from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.server.run_execution import RunExecution
from perdure.settings import Settings
from perdure.storage.flow import Statement
from perdure.storage.postgres import PostgresDatabase
from perdure.storage.sqlite import SQLiteDatabase
from tests.server.running import run_server, wait_until
from tests.server.talking import Gate, State, build_input, build_talk_graph
from tests.server.test_runs import texts
from tests.server.test_several_servers import changed, statuses

YES: Any = {"resume": "yes"}


def asks(gate: Gate, questions: int = 3) -> StateGraph[State]:
    """Asks several times in one node, and stops at the gate before the last question."""

    async def hear(state: State) -> dict[str, Any]:
        heard = [interrupt(number) for number in range(questions - 1)]
        await gate.pass_through()
        return {"heard": [*heard, interrupt(questions - 1)]}

    return StateGraph(State).add_node(hear).add_edge(START, "hear")


def steps(count: int = 4) -> StateGraph[State]:
    """Runs some fast nodes, one after the other."""
    builder: Any = StateGraph(State)
    before = START
    for number in range(count):
        builder.add_node(f"n{number}", lambda _, number=number: {"heard": [str(number)]})
        builder.add_edge(before, f"n{number}")
        before = f"n{number}"
    return builder  # type: ignore[no-any-return]


@contextmanager
def served(settings: Settings, gate: Gate, *names: str) -> Iterator[SyncLangGraphClient]:
    graphs: dict[str, Any] = {"talk": build_talk_graph(gate), "asks": asks(gate), "steps": steps()}
    chosen = {name: graphs[name] for name in names or graphs}
    app = create_app(settings, graphs=Graphs(chosen))
    with run_server(app) as url, get_sync_client(url=url) as client:
        yield client


def is_without_runs(client: SyncLangGraphClient, thread: str) -> bool:
    return client.runs.list(thread) == []


@pytest.mark.parametrize("how", ["under way", "waiting"])
def test_an_equal_answer_is_not_lost_with_its_server(db: Settings, gate: Gate, how: str) -> None:
    """All three questions are answered with the same word, and the server stops in between."""
    with served(db, gate) as client:
        client.threads.create(thread_id="t")
        client.runs.wait("t", "asks", input={"heard": []})
        client.runs.wait("t", "asks", command=YES)
        runs = [client.runs.create("t", "asks", command=YES)["run_id"]]
        assert gate.reached.wait(60)
        if how == "waiting":
            runs += [client.runs.create("t", "asks", command=YES)["run_id"]]
    gate.open.set()
    with served(db, gate) as client:
        values: Any = client.runs.join("t", runs[-1])
        if how == "under way":
            assert [each["value"] for each in values["__interrupt__"]] == [2]
            values = client.runs.wait("t", "asks", command=YES)

    assert values["heard"] == ["yes", "yes", "yes"]


@pytest.mark.parametrize("died", [True, False])
def test_a_run_that_rejects_waits_for_the_lock_of_its_thread(
    db: Settings, gate: Gate, died: bool
) -> None:
    """Its client was told that it is accepted, before a program took the lock for a moment."""
    body: Any = {"input": build_input("one"), "multitask_strategy": "reject"}
    with served(db, gate) as client:
        client.threads.create(thread_id="t")
        if died:
            run = client.runs.create("t", "talk", **body)["run_id"]
            assert gate.reached.wait(60)
    gate.open.set()
    with open_checkpointer(db.db) as saver, ExitStack() as held, ExitStack() as serving:
        held.enter_context(saver.lock("t"))
        client = serving.enter_context(served(db, gate))
        if not died:
            run = client.runs.create("t", "talk", **body)["run_id"]
        time.sleep(0.3)
        before = client.runs.get("t", run)["status"]
        held.close()
        values: Any = client.runs.join("t", run)
        stands = client.runs.get("t", run)["status"]

    assert (before, stands) == ("running", "success")
    assert [message["content"] for message in values["messages"]] == ["one", "heard 1"]


@pytest.mark.parametrize("prunes", [False, True])
@pytest.mark.parametrize("what", ["update", "turn"])
def test_an_input_is_not_applied_twice_if_others_wrote(
    db: Settings, gate: Gate, what: str, prunes: bool
) -> None:
    """A program changes the thread between two servers; the run ends, and says why."""
    with served(db, gate) as client:
        client.threads.create(thread_id="t")
        run = client.runs.create("t", "talk", input=build_input("one"))["run_id"]
        assert gate.reached.wait(60)
    gate.open.set()
    with open_checkpointer(db.db) as saver:
        graph = build_talk_graph(gate).compile(checkpointer=saver)
        config: Any = {"configurable": {"thread_id": "t"}}
        if what == "update":
            graph.update_state(config, {"heard": ["told"]})
        else:
            other: Any = build_input("other")
            asyncio.run(graph.ainvoke(other, config))
        if prunes:
            saver.prune(["t"], strategy="keep_latest")
    with served(db, gate) as client:
        values: Any = client.runs.join("t", run)
        said, stands = texts(client), client.runs.get("t", run)["status"]

    assert said.count("one") == 1
    assert stands == "interrupted"
    assert values["__error__"]["error"] == "RunOvertaken"


@pytest.mark.parametrize("prunes", [False, True])
def test_an_answer_does_not_go_to_another_question(db: Settings, gate: Gate, prunes: bool) -> None:
    """A program begins anew between two servers, and is asked the same questions."""
    with served(db, gate) as client:
        client.threads.create(thread_id="t")
        client.runs.wait("t", "asks", input={"heard": []})
        client.runs.wait("t", "asks", command=YES)
        run = client.runs.create("t", "asks", command=YES)["run_id"]
        assert gate.reached.wait(60)
    gate.open.set()
    with open_checkpointer(db.db) as saver:
        graph = asks(gate).compile(checkpointer=saver)
        config: Any = {"configurable": {"thread_id": "t"}, "metadata": {"graph_id": "asks"}}
        anew: Any = {"heard": ["anew"]}
        asyncio.run(graph.ainvoke(anew, config))
        if prunes:
            saver.prune(["t"], strategy="keep_latest")
    with served(db, gate) as client:
        values: Any = client.runs.join("t", run)
        state: Any = client.threads.get_state("t")
        status = client.runs.get("t", run)["status"]

    assert status == "interrupted"
    assert values["__error__"]["error"] == "RunOvertaken"
    assert [each["value"] for each in state["interrupts"]] == [0]


def test_the_start_of_a_run_is_found_however_long_the_thread_went_on(
    db: Settings, gate: Gate
) -> None:
    """A program changes the thread a hundred times, and is asked the same question then."""
    with served(db, gate) as client:
        client.threads.create(thread_id="t")
        client.runs.wait("t", "asks", input={"heard": []})
        client.runs.wait("t", "asks", command=YES)
        run = client.runs.create("t", "asks", command=YES)["run_id"]
        assert gate.reached.wait(60)
    gate.open.set()
    with open_checkpointer(db.db) as saver:
        graph = asks(gate).compile(checkpointer=saver)
        config: Any = {"configurable": {"thread_id": "t"}, "metadata": {"graph_id": "asks"}}
        for number in range(100):
            graph.update_state(config, {"heard": [f"told {number}"]})
        anew: Any = {"heard": ["anew"]}
        asyncio.run(graph.ainvoke(anew, config))
    with served(db, gate) as client:
        values: Any = client.runs.join("t", run)
        state: Any = client.threads.get_state("t")

    assert values["__error__"]["error"] == "RunOvertaken"
    assert [each["value"] for each in state["interrupts"]] == [0]


@pytest.mark.parametrize("to", ["before the run", "its input"])
def test_a_run_whose_thread_was_rewound_is_not_begun_again(
    db: Settings, gate: Gate, to: str
) -> None:
    """A program rewinds the thread between two servers.

    The run goes on if the thread stands at a checkpoint of the run.
    """
    gate.open.set()
    with served(db, gate) as client:
        client.threads.create(thread_id="t")
        client.runs.wait("t", "talk", input=build_input("zero"))
        gate.open.clear()
        gate.reached.clear()
        run = client.runs.create("t", "talk", input=build_input("one"))["run_id"]
        assert gate.reached.wait(60)
    gate.open.set()
    with open_checkpointer(db.db) as saver:
        stored = [*saver.list({"configurable": {"thread_id": "t"}})]
        is_of_run = [each.metadata.get("run_id") == run for each in stored]
        begun = len(stored) - 1 - is_of_run[::-1].index(True)  # the first of the run
        target = stored[begun if to == "its input" else begun + 1]
        saver.rewind("t", target.config["configurable"]["checkpoint_id"])
    with served(db, gate) as client:
        values: Any = client.runs.join("t", run)
        said, status = texts(client), client.runs.get("t", run)["status"]

    if to == "its input":
        assert (said, status) == (["zero", "heard 1", "one", "heard 2"], "success")
    else:
        assert (said, status) == (["zero", "heard 1"], "interrupted")
        assert values["__error__"]["error"] == "RunOvertaken"


def test_an_input_that_was_not_stored_is_applied_after_a_change(db: Settings, gate: Gate) -> None:
    """A run that waited for its turn has not begun, so it begins with what others have written."""
    with served(db, gate) as client:
        client.threads.create(thread_id="t")
        runs = [client.runs.create("t", "talk", input=build_input(text)) for text in ("one", "two")]
        assert gate.reached.wait(60)
    gate.open.set()
    with open_checkpointer(db.db) as saver:
        graph = build_talk_graph(gate).compile(checkpointer=saver)
        config: Any = {"configurable": {"thread_id": "t"}}
        graph.update_state(config, {"messages": [HumanMessage("told")]})
    with served(db, gate) as client:
        client.runs.join("t", runs[1]["run_id"])
        said = texts(client)

    assert [said.count(text) for text in ("one", "told", "two")] == [1, 1, 1]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/threads/t/state", {"values": {"heard": ["told"]}}),
        ("POST", "/threads/prune", {"thread_ids": ["t"], "strategy": "keep_latest"}),
    ],
)
def test_a_thread_whose_run_lost_its_server_is_not_changed(
    db: Settings, gate: Gate, method: str, path: str, body: Any
) -> None:
    """Its lock is free, but the run is accepted and will go on."""
    with served(db, gate) as client:
        client.threads.create(thread_id="t")
        client.runs.create("t", "talk", input=build_input("one"))
        assert gate.reached.wait(60)
    with open_checkpointer(db.db) as saver:
        changed(saver, Statement("UPDATE runs SET status = 'running', owner = 'dead'"))
        before = saver.checkpoints("t")
    app = create_app(db, graphs=Graphs({"asks": asks(gate)}))
    with run_server(app) as url, httpx.Client(base_url=url) as client:
        reply = client.request(method, path, json=body)
    with open_checkpointer(db.db) as saver:
        after = saver.checkpoints("t")

    assert reply.status_code == 409
    assert after == before


@pytest.mark.parametrize("asked_of", ["another server", "its server"])
def test_a_rollback_that_comes_between_the_last_step_and_the_end_is_done(
    db: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch, asked_of: str
) -> None:
    """Once the cancellation is accepted, the run and its checkpoints go."""
    gate.open.set()
    tidy, asked = RunExecution._carry_out_cancellation_and_clean_up_thread, list[str]()

    async def cancel_first(self: RunExecution) -> None:
        run = self._run
        await tidy(self)
        if not asked and run.request.input == build_input("two"):
            asked.append(run.run_id)
            await self._runs.table.cancel_runs_and_list_their_ids("t", run.run_id, "rollback")
            if asked_of == "its server":
                await self._runs.update_run_from_row(run)

    monkeypatch.setattr(RunExecution, "_carry_out_cancellation_and_clean_up_thread", cancel_first)
    with served(db, gate) as client:
        client.threads.create(thread_id="t")
        client.runs.wait("t", "talk", input=build_input("one"))
        before, checkpoints = texts(client), len(client.threads.get_history("t", limit=100))
        run = client.runs.create("t", "talk", input=build_input("two"))["run_id"]
        wait_until(lambda: [each["run_id"] for each in client.runs.list("t")] != [run] and asked)
        wait_until(lambda: statuses(client) == ["success"])

        assert texts(client) == before
        assert len(client.threads.get_history("t", limit=100)) == checkpoints


def test_a_rollback_leaves_copies_of_the_thread(db: Settings, gate: Gate) -> None:
    with served(db, gate) as client:
        client.threads.create(thread_id="t")
        run = client.runs.create("t", "talk", input=build_input("one"))["run_id"]
        assert gate.reached.wait(60)
        client.threads.copy("t")
        with open_checkpointer(db.db) as saver:
            [other] = [each.thread_id for each in saver.threads() if each.thread_id != "t"]
            before = saver.checkpoints(other)
        client.runs.cancel("t", run, action="rollback", wait=True)
        wait_until(lambda: statuses(client) == [])
        with open_checkpointer(db.db) as saver:
            after, gone = saver.checkpoints(other), saver.checkpoints("t")

    assert before == after != []
    assert gone == []


def slowly(awrite: Any) -> Any:
    """The method of a database that writes, which takes its time."""

    def slow(self: Any, *args: Any, **options: Any) -> Any:
        async def write() -> Any:
            await asyncio.sleep(0.03)
            return await awrite(self, *args, **options)

        return write()

    return slow


@pytest.mark.repeats
@pytest.mark.parametrize("how", ["rollback", "delete"])
def test_puts_of_a_cancelled_run_do_not_come_back(
    db: Settings, gate: Gate, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LangGraph stops waiting for its puts when a run is cancelled; here each put is slow."""
    cancelled = list[str]()
    for database in (SQLiteDatabase, PostgresDatabase):
        monkeypatch.setattr(database, "awrite", slowly(database.awrite))
    with served(db, gate, "steps") as client:
        for number in range(12):
            thread = f"t{number}"
            cancelled.append(thread)
            client.threads.create(thread_id=thread)
            run = client.runs.create(thread, "steps", input={"heard": []})["run_id"]
            time.sleep(0.03 * number)
            if how == "delete":
                client.threads.delete(thread)
                continue
            try:
                client.runs.cancel(thread, run, action="rollback", wait=True)
            except httpx.HTTPStatusError as exc:  # the run had ended before
                if exc.response.status_code != 404:
                    raise
                cancelled.remove(thread)
            else:
                wait_until(partial(is_without_runs, client, thread))
        time.sleep(0.3)  # puts that nobody waits for would be stored by now
        with open_checkpointer(db.db) as saver:
            left = {each.thread_id: each.checkpoints for each in saver.threads()}

    assert len(cancelled) > 5
    assert [thread for thread in cancelled if left.get(thread)] == []
