"""Helpers of the tests that erase messages while a run is inside a node."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, MessagesState, StateGraph

from tests.contracts.erased import SECRET, Saver

WAIT_S = 30
CONFIG: RunnableConfig = {"configurable": {"thread_id": "t"}}
DURABILITIES = ["sync", "async", "exit"]


@dataclass
class Gate:
    """A barrier that blocks a node until the test has erased something."""

    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Block the node until the test opens the gate."""
        self.reached.set()
        assert self.opened.wait(WAIT_S)


@dataclass
class Run:
    """The output of a run in a thread of its own, or the error that ended the run."""

    output: Any = None
    error: Exception | None = None


@contextmanager
def run_until_gate(gate: Gate, call: Callable[[], Any]) -> Iterator[Run]:
    """Run a call in a thread until it waits at the gate. Open the gate at the end of the block."""
    run = Run()

    def run_call() -> None:
        try:
            run.output = call()
        except Exception as exc:
            run.error = exc
        finally:
            gate.reached.set()

    thread = threading.Thread(target=run_call)
    thread.start()
    try:
        assert gate.reached.wait(WAIT_S)
        yield run
    finally:
        gate.opened.set()
        thread.join(WAIT_S)
        assert not thread.is_alive()


def build_graph(saver: Saver, gate: Gate | None = None) -> Any:
    """Build a graph of two nodes, of which the first one waits at the gate before it answers."""

    def wait_and_answer(_: MessagesState) -> Any:
        if gate is not None:
            gate.wait()
        return {"messages": [AIMessage("answer one", id="one")]}

    builder: Any = StateGraph(MessagesState)
    builder.add_node("first", wait_and_answer)
    builder.add_node("second", lambda _: {"messages": [AIMessage("answer two", id="two")]})
    builder.add_edge(START, "first").add_edge("first", "second")
    return builder.compile(checkpointer=saver)


def start_thread(saver: Saver, *, thread: str = "t") -> None:
    """Start a thread with a message that the test will erase, and an answer."""
    messages = [HumanMessage(SECRET, id="m0"), AIMessage("noted", id="m1")]
    build_graph(saver).update_state(thread_config(thread), {"messages": messages}, as_node="second")


def thread_config(thread: str) -> RunnableConfig:
    """Return the config of a thread."""
    return {"configurable": {"thread_id": thread}}


def make_invocation(
    graph: Any, mode: str, durability: str, input: Any, config: Any = CONFIG
) -> Any:
    """Return a function that runs the graph with `invoke` ("sync") or `ainvoke` ("async")."""
    options = {"durability": durability}
    if mode == "sync":
        return lambda: graph.invoke(input, config, **options)
    return lambda: asyncio.run(graph.ainvoke(input, config, **options))


def read_message_ids(saver: Saver, thread: str = "t") -> list[str]:
    """Return the ids of the messages in a thread's current state."""
    record = saver.get_tuple(thread_config(thread))
    assert record is not None
    return [message.id for message in record.checkpoint["channel_values"]["messages"]]
