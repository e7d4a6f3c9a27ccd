"""What tests of erasing share that erase while a run is inside a node."""

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
    """Holds a node until the test has erased something."""

    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Wait in a node."""
        self.reached.set()
        assert self.opened.wait(WAIT_S)


@dataclass
class Run:
    """A run in a thread of its own, with the error that ends it."""

    output: Any = None
    error: Exception | None = None


@contextmanager
def running(gate: Gate, call: Callable[[], Any]) -> Iterator[Run]:
    """Run a call until it waits at the gate; at the end of the block, let it end."""
    run = Run()

    def target() -> None:
        try:
            run.output = call()
        except Exception as exc:
            run.error = exc
        finally:
            gate.reached.set()

    thread = threading.Thread(target=target)
    thread.start()
    try:
        assert gate.reached.wait(WAIT_S)
        yield run
    finally:
        gate.opened.set()
        thread.join(WAIT_S)
        assert not thread.is_alive()


def talking(saver: Saver, gate: Gate | None = None) -> Any:
    """A graph of two nodes; the first waits at the gate before it answers."""

    def first(_: MessagesState) -> Any:
        if gate is not None:
            gate.wait()
        return {"messages": [AIMessage("answer one", id="one")]}

    builder: Any = StateGraph(MessagesState)
    builder.add_node("first", first)
    builder.add_node("second", lambda _: {"messages": [AIMessage("answer two", id="two")]})
    builder.add_edge(START, "first").add_edge("first", "second")
    return builder.compile(checkpointer=saver)


def begin(saver: Saver, *, thread: str = "t") -> None:
    """Begin a thread with a message that is to be erased, and an answer."""
    said = [HumanMessage(SECRET, id="m0"), AIMessage("noted", id="m1")]
    talking(saver).update_state(at(thread), {"messages": said}, as_node="second")


def at(thread: str) -> RunnableConfig:
    """The config of a thread."""
    return {"configurable": {"thread_id": thread}}


def invoking(graph: Any, door: str, durability: str, input: Any, config: Any = CONFIG) -> Any:
    """Return the call that runs a graph, through one of both doors."""
    options = {"durability": durability}
    if door == "sync":
        return lambda: graph.invoke(input, config, **options)
    return lambda: asyncio.run(graph.ainvoke(input, config, **options))


def said(saver: Saver, thread: str = "t") -> list[str]:
    """The ids of the messages of a thread's state."""
    found = saver.get_tuple(at(thread))
    assert found is not None
    return [message.id for message in found.checkpoint["channel_values"]["messages"]]
