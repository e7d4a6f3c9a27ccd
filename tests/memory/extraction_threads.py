"""Threads for the tests of extraction: a graph that answers, its messages, and stores that fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from perdure.memory.short_term.reducers import ChatState
from perdure.stores import SQLiteStore

ANN = ("memories", "ann")
Graph = CompiledStateGraph[Any, None, Any, Any]


def user_config(name: str = "ann", **configurable: Any) -> Any:
    """Return the config of a run for a user."""
    return {"configurable": {"user_id": name, **configurable}}


def thread_config(thread_id: str) -> Any:
    """Return the config of a run on a thread."""
    return {"configurable": {"thread_id": thread_id}}


def build_graph(saver: Any, answers: bool = True) -> Graph:
    """Return a graph that answers each user message, or only stores it."""

    def respond(state: ChatState) -> dict[str, Any]:
        newest = state["messages"][-1] if state["messages"] else None
        if not answers or not isinstance(newest, HumanMessage):
            return {}
        return {"messages": [AIMessage(f"You said {newest.text}", id=f"{newest.id}-answer")]}

    builder: StateGraph[Any, None, Any, Any] = StateGraph(ChatState)
    builder.add_node("respond", respond)
    builder.add_edge(START, "respond")
    builder.add_edge("respond", END)
    return builder.compile(checkpointer=saver)


def send_messages(graph: Graph, thread_id: str, *messages: BaseMessage | str) -> None:
    """Run a graph once for each message. A text becomes a user message whose ID is the text."""
    for message in messages:
        message_input = HumanMessage(message, id=message) if isinstance(message, str) else message
        graph.invoke({"messages": [message_input]}, thread_config(thread_id))


def read_memory_texts(store: Any, namespace: tuple[str, ...] = ANN) -> list[str]:
    """Return the texts of the memories of a namespace, in the order of their keys."""
    return [memory.value["text"] for memory in read_memories(store, namespace)]


def read_memories(store: Any, namespace: tuple[str, ...] = ANN) -> Sequence[Any]:
    """Return the memories of a namespace, in the order of their keys."""
    items = store.search(namespace, limit=10_000)
    return sorted((item for item in items if "text" in item.value), key=lambda item: item.key)


class FailingStore(SQLiteStore):
    """A store whose disk fails: the writes whose numbers, from 1, are in `failing_writes`, raise.

    Half of them fail before anything is written, half after all of it was: a caller that is killed
    knows as little.
    """

    failing_writes: frozenset[int] = frozenset()
    writes = 0

    def batch(self, ops: Any) -> Any:
        operations = list(ops)
        if not any(hasattr(op, "value") for op in operations):
            return super().batch(operations)
        self.writes += 1
        if self.writes not in self.failing_writes:
            return super().batch(operations)
        if self.writes % 2:
            raise OSError("the disk is gone")
        super().batch(operations)
        raise OSError("the disk is gone, after it was written")
