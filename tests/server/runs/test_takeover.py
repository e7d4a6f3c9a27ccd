"""A run is continued, ended or undone once, whatever its server, clients and programs do."""

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
from perdure.server.runs.run_execution import RunExecution
from perdure.settings import Settings
from perdure.storage.flow import Statement
from perdure.storage.postgres import PostgresDatabase
from perdure.storage.sqlite import SQLiteDatabase
from tests.server.running import run_server, wait_until
from tests.server.runs.test_runs import read_message_texts
from tests.server.talking import Gate, State, build_input, build_talk_graph
from tests.server.test_several_servers import execute_statement, list_run_statuses

YES: Any = {"resume": "yes"}


def build_asking_graph(gate: Gate, questions: int = 3) -> StateGraph[State]:
    """Return a graph that asks several times in one node, with a gate before the last question."""

    async def hear(state: State) -> dict[str, Any]:
        heard = [interrupt(number) for number in range(questions - 1)]
        await gate.pass_through()
        return {"heard": [*heard, interrupt(questions - 1)]}

    return StateGraph(State).add_node(hear).add_edge(START, "hear")


def build_step_graph(count: int = 4) -> StateGraph[State]:
    """Return a graph of fast nodes that run one after the other."""
    builder: Any = StateGraph(State)
    before = START
    for number in range(count):
        builder.add_node(f"n{number}", lambda _, number=number: {"heard": [str(number)]})
        builder.add_edge(before, f"n{number}")
        before = f"n{number}"
    return builder  # type: ignore[no-any-return]


@contextmanager
def serve_graphs(settings: Settings, gate: Gate, *names: str) -> Iterator[SyncLangGraphClient]:
    graphs: dict[str, Any] = {
        "talk": build_talk_graph(gate),
        "asks": build_asking_graph(gate),
        "steps": build_step_graph(),
    }
    chosen = {name: graphs[name] for name in names or graphs}
    app = create_app(settings, graphs=Graphs(chosen))
    with run_server(app) as url, get_sync_client(url=url) as client:
        yield client


def has_no_runs(client: SyncLangGraphClient, thread: str) -> bool:
    return client.runs.list(thread) == []


@pytest.mark.parametrize("run_state", ["under way", "waiting"])
def test_answer_equal_to_earlier_one_is_not_lost_in_takeover(
    db: Settings, gate: Gate, run_state: str
) -> None:
    """All three questions are answered with the same word, and the server stops in between."""
    with serve_graphs(db, gate) as client:
        client.threads.create(thread_id="t")
        client.runs.wait("t", "asks", input={"heard": []})
        client.runs.wait("t", "asks", command=YES)
        runs = [client.runs.create("t", "asks", command=YES)["run_id"]]
        assert gate.reached.wait(60)
        if run_state == "waiting":
            runs += [client.runs.create("t", "asks", command=YES)["run_id"]]
    gate.open.set()
    with serve_graphs(db, gate) as client:
        values: Any = client.runs.join("t", runs[-1])
        if run_state == "under way":
            assert [each["value"] for each in values["__interrupt__"]] == [2]
            values = client.runs.wait("t", "asks", command=YES)

    assert values["heard"] == ["yes", "yes", "yes"]


@pytest.mark.parametrize("died", [True, False])
def test_accepted_run_with_reject_strategy_waits_for_thread_lock(
    db: Settings, gate: Gate, died: bool
) -> None:
    """The run was accepted before a program took the lock for a moment."""
    body: Any = {"input": build_input("one"), "multitask_strategy": "reject"}
    with serve_graphs(db, gate) as client:
        client.threads.create(thread_id="t")
        if died:
            run = client.runs.create("t", "talk", **body)["run_id"]
            assert gate.reached.wait(60)
    gate.open.set()
    with open_checkpointer(db.db) as saver, ExitStack() as held, ExitStack() as serving:
        held.enter_context(saver.lock("t"))
        client = serving.enter_context(serve_graphs(db, gate))
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
@pytest.mark.parametrize("change", ["update", "turn"])
def test_input_is_not_applied_twice_if_program_changed_thread(
    db: Settings, gate: Gate, change: str, prunes: bool
) -> None:
    """A program changes the thread between two servers, and the run ends with an error."""
    with serve_graphs(db, gate) as client:
        client.threads.create(thread_id="t")
        run = client.runs.create("t", "talk", input=build_input("one"))["run_id"]
        assert gate.reached.wait(60)
    gate.open.set()
    with open_checkpointer(db.db) as saver:
        graph = build_talk_graph(gate).compile(checkpointer=saver)
        config: Any = {"configurable": {"thread_id": "t"}}
        if change == "update":
            graph.update_state(config, {"heard": ["told"]})
        else:
            other: Any = build_input("other")
            asyncio.run(graph.ainvoke(other, config))
        if prunes:
            saver.prune(["t"], strategy="keep_latest")
    with serve_graphs(db, gate) as client:
        values: Any = client.runs.join("t", run)
        said, stands = read_message_texts(client), client.runs.get("t", run)["status"]

    assert said.count("one") == 1
    assert stands == "interrupted"
    assert values["__error__"]["error"] == "RunOvertaken"


@pytest.mark.parametrize("prunes", [False, True])
def test_answer_is_not_used_for_other_question_after_takeover(
    db: Settings, gate: Gate, prunes: bool
) -> None:
    """A program starts the graph anew between two servers and is asked the same questions."""
    with serve_graphs(db, gate) as client:
        client.threads.create(thread_id="t")
        client.runs.wait("t", "asks", input={"heard": []})
        client.runs.wait("t", "asks", command=YES)
        run = client.runs.create("t", "asks", command=YES)["run_id"]
        assert gate.reached.wait(60)
    gate.open.set()
    with open_checkpointer(db.db) as saver:
        graph = build_asking_graph(gate).compile(checkpointer=saver)
        config: Any = {"configurable": {"thread_id": "t"}, "metadata": {"graph_id": "asks"}}
        anew: Any = {"heard": ["anew"]}
        asyncio.run(graph.ainvoke(anew, config))
        if prunes:
            saver.prune(["t"], strategy="keep_latest")
    with serve_graphs(db, gate) as client:
        values: Any = client.runs.join("t", run)
        state: Any = client.threads.get_state("t")
        status = client.runs.get("t", run)["status"]

    assert status == "interrupted"
    assert values["__error__"]["error"] == "RunOvertaken"
    assert [each["value"] for each in state["interrupts"]] == [0]


def test_start_of_run_is_found_after_many_later_checkpoints(db: Settings, gate: Gate) -> None:
    """A program changes the thread a hundred times and is then asked the same question."""
    with serve_graphs(db, gate) as client:
        client.threads.create(thread_id="t")
        client.runs.wait("t", "asks", input={"heard": []})
        client.runs.wait("t", "asks", command=YES)
        run = client.runs.create("t", "asks", command=YES)["run_id"]
        assert gate.reached.wait(60)
    gate.open.set()
    with open_checkpointer(db.db) as saver:
        graph = build_asking_graph(gate).compile(checkpointer=saver)
        config: Any = {"configurable": {"thread_id": "t"}, "metadata": {"graph_id": "asks"}}
        for number in range(100):
            graph.update_state(config, {"heard": [f"told {number}"]})
        anew: Any = {"heard": ["anew"]}
        asyncio.run(graph.ainvoke(anew, config))
    with serve_graphs(db, gate) as client:
        values: Any = client.runs.join("t", run)
        state: Any = client.threads.get_state("t")

    assert values["__error__"]["error"] == "RunOvertaken"
    assert [each["value"] for each in state["interrupts"]] == [0]


@pytest.mark.parametrize("rewound_to", ["before the run", "its input"])
def test_run_is_not_restarted_if_thread_was_rewound_before_it(
    db: Settings, gate: Gate, rewound_to: str
) -> None:
    """A program rewinds the thread between two servers.

    The run continues if the head of the thread is a checkpoint of the run.
    """
    gate.open.set()
    with serve_graphs(db, gate) as client:
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
        target = stored[begun if rewound_to == "its input" else begun + 1]
        saver.rewind("t", target.config["configurable"]["checkpoint_id"])
    with serve_graphs(db, gate) as client:
        values: Any = client.runs.join("t", run)
        said, status = read_message_texts(client), client.runs.get("t", run)["status"]

    if rewound_to == "its input":
        assert (said, status) == (["zero", "heard 1", "one", "heard 2"], "success")
    else:
        assert (said, status) == (["zero", "heard 1"], "interrupted")
        assert values["__error__"]["error"] == "RunOvertaken"


def test_input_of_waiting_run_is_applied_after_change_by_program(db: Settings, gate: Gate) -> None:
    """A queued run has not started, so it starts from what other programs have written."""
    with serve_graphs(db, gate) as client:
        client.threads.create(thread_id="t")
        runs = [client.runs.create("t", "talk", input=build_input(text)) for text in ("one", "two")]
        assert gate.reached.wait(60)
    gate.open.set()
    with open_checkpointer(db.db) as saver:
        graph = build_talk_graph(gate).compile(checkpointer=saver)
        config: Any = {"configurable": {"thread_id": "t"}}
        graph.update_state(config, {"messages": [HumanMessage("told")]})
    with serve_graphs(db, gate) as client:
        client.runs.join("t", runs[1]["run_id"])
        said = read_message_texts(client)

    assert [said.count(text) for text in ("one", "told", "two")] == [1, 1, 1]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/threads/t/state", {"values": {"heard": ["told"]}}),
        ("POST", "/threads/prune", {"thread_ids": ["t"], "strategy": "keep_latest"}),
    ],
)
def test_thread_whose_run_lost_its_server_cannot_be_changed(
    db: Settings, gate: Gate, method: str, path: str, body: Any
) -> None:
    """The lock is free, but the run is accepted and will continue."""
    with serve_graphs(db, gate) as client:
        client.threads.create(thread_id="t")
        client.runs.create("t", "talk", input=build_input("one"))
        assert gate.reached.wait(60)
    with open_checkpointer(db.db) as saver:
        execute_statement(saver, Statement("UPDATE runs SET status = 'running', owner = 'dead'"))
        before = saver.checkpoints("t")
    app = create_app(db, graphs=Graphs({"asks": build_asking_graph(gate)}))
    with run_server(app) as url, httpx.Client(base_url=url) as client:
        reply = client.request(method, path, json=body)
    with open_checkpointer(db.db) as saver:
        after = saver.checkpoints("t")

    assert reply.status_code == 409
    assert after == before


@pytest.mark.parametrize("asked_of", ["another server", "its server"])
def test_rollback_between_last_step_and_end_is_carried_out(
    db: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch, asked_of: str
) -> None:
    """Once the cancellation is accepted, the run and its checkpoints are removed."""
    gate.open.set()
    tidy, asked = RunExecution._carry_out_cancellation_and_clean_up_thread, list[str]()

    async def cancel_first(self: RunExecution) -> None:
        run = self._run
        await tidy(self)
        if not asked and run.request.input == build_input("two"):
            asked.append(run.run_id)
            await self._queue.table.cancel_runs_and_list_their_ids("t", run.run_id, "rollback")
            if asked_of == "its server":
                await self._queue.update_run_from_row(run)

    monkeypatch.setattr(RunExecution, "_carry_out_cancellation_and_clean_up_thread", cancel_first)
    with serve_graphs(db, gate) as client:
        client.threads.create(thread_id="t")
        client.runs.wait("t", "talk", input=build_input("one"))
        before, checkpoints = (
            read_message_texts(client),
            len(client.threads.get_history("t", limit=100)),
        )
        run = client.runs.create("t", "talk", input=build_input("two"))["run_id"]
        wait_until(lambda: [each["run_id"] for each in client.runs.list("t")] != [run] and asked)
        wait_until(lambda: list_run_statuses(client) == ["success"])

        assert read_message_texts(client) == before
        assert len(client.threads.get_history("t", limit=100)) == checkpoints


def test_rollback_does_not_change_copies_of_thread(db: Settings, gate: Gate) -> None:
    with serve_graphs(db, gate) as client:
        client.threads.create(thread_id="t")
        run = client.runs.create("t", "talk", input=build_input("one"))["run_id"]
        assert gate.reached.wait(60)
        with open_checkpointer(db.db) as saver:
            # langgraph stores the checkpoint with the input while the first nodes are running.
            wait_until(lambda: saver.history("t", missing_ok=True))
            client.threads.copy("t")
            [other] = [each.thread_id for each in saver.threads() if each.thread_id != "t"]
            before = saver.checkpoints(other)
        client.runs.cancel("t", run, action="rollback", wait=True)
        wait_until(lambda: list_run_statuses(client) == [])
        with open_checkpointer(db.db) as saver:
            after, gone = saver.checkpoints(other), saver.checkpoints("t")

    assert before == after != []
    assert gone == []


def delay_write_method(awrite: Any) -> Any:
    """Return a delayed version of a database's method that writes."""

    def slow(self: Any, *args: Any, **options: Any) -> Any:
        async def write() -> Any:
            await asyncio.sleep(0.03)
            return await awrite(self, *args, **options)

        return write()

    return slow


@pytest.mark.repeats
@pytest.mark.parametrize("cancel_method", ["rollback", "delete"])
def test_puts_of_cancelled_run_are_not_stored_afterwards(
    db: Settings, gate: Gate, cancel_method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LangGraph stops waiting for its puts when a run is cancelled; here each put is slow."""
    cancelled = list[str]()
    for database in (SQLiteDatabase, PostgresDatabase):
        monkeypatch.setattr(database, "awrite", delay_write_method(database.awrite))
    with serve_graphs(db, gate, "steps") as client:
        for number in range(12):
            thread = f"t{number}"
            cancelled.append(thread)
            client.threads.create(thread_id=thread)
            run = client.runs.create(thread, "steps", input={"heard": []})["run_id"]
            time.sleep(0.03 * number)
            if cancel_method == "delete":
                client.threads.delete(thread)
                continue
            try:
                client.runs.cancel(thread, run, action="rollback", wait=True)
            except httpx.HTTPStatusError as exc:  # the run had ended before
                if exc.response.status_code != 404:
                    raise
                cancelled.remove(thread)
            else:
                wait_until(partial(has_no_runs, client, thread))
        time.sleep(0.3)  # puts that nobody waits for would be stored by now
        with open_checkpointer(db.db) as saver:
            left = {each.thread_id: each.checkpoints for each in saver.threads()}

    assert len(cancelled) > 5
    assert [thread for thread in cancelled if left.get(thread)] == []
