"""An answer to an interrupt is durable before the code that acts on it has done much."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.status import NULL_TASK
from perdure.storage import postgres, sqlite_writer
from tests.backends import Place
from tests.contracts.puts import config_at, put
from tests.durability.processes import forkserver_context
from tests.durability.test_left_runs import ScriptedModel
from tests.rounds import rounds

needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
THREAD: Any = {"configurable": {"thread_id": "t"}}
COMMIT_TIMEOUT_S = 1.0  # time for the commit of an answer, on a busy machine
ENDLESS_S = 600.0  # a wait for other writes that is longer than any test
APPROVED: Any = Command(resume={"decisions": [{"type": "approve"}, {"type": "approve"}]})
_dies_after_s: float | None = (
    None  # seconds after which a step kills its process, or None if it does not
)


def kill_process_if_due() -> None:
    if _dies_after_s is not None:
        time.sleep(_dies_after_s)
        os.kill(os.getpid(), signal.SIGKILL)


@tool
def look_up(word: str) -> str:
    """Look a word up."""
    kill_process_if_due()
    return "found"


def build_payment_graph(saver: SQLiteCheckpointer) -> Any:
    """Build a graph whose only node asks a question and acts on the answer."""

    def pay(state: Any) -> Any:
        answer = interrupt("Pay?")
        kill_process_if_due()
        return {"messages": [AIMessage(answer)]}

    builder = StateGraph(MessagesState).add_sequence([("pay", pay)])
    return builder.add_edge(START, "pay").compile(checkpointer=saver)


def build_agent(saver: SQLiteCheckpointer) -> Any:
    """Build an agent that asks before it calls its tool."""
    asks = HumanInTheLoopMiddleware(interrupt_on={"look_up": True})
    return create_agent(ScriptedModel(), [look_up], middleware=[asks], checkpointer=saver)


def answer_and_die(
    place: Place, build: Any, how: str, answer: Any, dies_after_s: float, patience_s: float
) -> None:
    """Answer the question of a thread. The step that acts on the answer kills the process."""
    global _dies_after_s
    _dies_after_s = dies_after_s
    for module in (sqlite_writer, postgres):
        vars(module)["GROUP_WAIT_S"] = patience_s
    durability: Any = "async" if build is build_payment_graph else "sync"
    with place.saver() as saver:
        graph = build(saver)
        if how == "sync":
            graph.invoke(answer, THREAD, durability=durability)
        else:
            asyncio.run(graph.ainvoke(answer, THREAD, durability=durability))


def is_asked_again(
    place: Place, build: Any, how: str, answer: Any, dies_after_s: float, patience_s: float
) -> bool:
    """Return whether the question is asked again by a process that resumes after the killed one."""
    with place.saver() as saver:
        build(saver).invoke({"messages": [HumanMessage("pay")]}, THREAD)
    args = place, build, how, answer, dies_after_s, patience_s
    process = forkserver_context().Process(target=answer_and_die, args=args)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with place.saver() as saver:
        result = build(saver).invoke(None, THREAD)
        saver.delete_thread("t")
    return "__interrupt__" in result


@needs_fork
@pytest.mark.parametrize("how", ["sync", "async"])
def test_answer_is_committed_without_waiting_for_other_writes(how: str, place: Place) -> None:
    """The node kills its process while a write that waits for others would still wait."""
    assert not is_asked_again(
        place, build_payment_graph, how, Command(resume="yes"), COMMIT_TIMEOUT_S, ENDLESS_S
    )


@needs_fork
@pytest.mark.repeats
@pytest.mark.parametrize("how", ["sync", "async"])
def test_approval_is_not_requested_again_after_tool_was_killed(how: str, place: Place) -> None:
    """With durability `sync` the approval is stored before the first line of the tool is run."""
    for _ in range(rounds(20)):
        assert not is_asked_again(place, build_agent, how, APPROVED, 0.0, 0.002)


def test_answer_is_committed_by_one_statement(tmp_path: Path) -> None:
    """Between two statements another thread could run and act on an answer that is not stored."""
    statements: list[str] = []
    with SQLiteCheckpointer.open(tmp_path / "memory.db") as saver:
        parent = put(saver, {"n": 1})
        database: Any = saver.database
        with (
            database._connect_once().writer.lend_connection() as connection
        ):  # the connection is free only after the put
            connection.set_trace_callback(statements.append)
        saver.put_writes(parent, [("__resume__", "yes")], NULL_TASK)
        during = [*statements]
        stored = saver.get_tuple(config_at())

    assert [statement.split()[0] for statement in during] == ["INSERT"]
    assert stored is not None
    assert stored.pending_writes == [(NULL_TASK, "__resume__", "yes")]


def test_only_writes_of_null_task_are_committed_without_a_put(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers, and updates of a `Command`, are writes of the null task.

    Writes of other tasks wait for a put.
    """
    monkeypatch.setattr(sqlite_writer, "GROUP_WAIT_S", ENDLESS_S)
    monkeypatch.setattr(postgres, "GROUP_WAIT_S", ENDLESS_S)

    async def run(saver: SQLiteCheckpointer) -> list[str]:
        parent = await asyncio.to_thread(put, saver, {"n": 1})
        stored = []
        for name, writes, task in (
            ("resume", [("__resume__", "yes")], NULL_TASK),
            ("update", [("n", 2), ("__resume__", "yes")], NULL_TASK),
            ("task", [("n", 3)], "a task"),
        ):
            written = asyncio.ensure_future(saver.aput_writes(parent, writes, task))
            done, _ = await asyncio.wait([written], timeout=COMMIT_TIMEOUT_S)
            stored += [name] if done else []
        await asyncio.gather(asyncio.to_thread(put, saver, {"n": 4}, parent), written)
        return stored

    with place.saver() as saver:
        assert asyncio.run(run(saver)) == ["resume", "update"]
        pending = [
            checkpoint_tuple.pending_writes or [] for checkpoint_tuple in saver.list(config_at())
        ]
    values = sorted(str(value) for writes in pending for _, _, value in writes)
    assert values == ["2", "3", "yes"]
