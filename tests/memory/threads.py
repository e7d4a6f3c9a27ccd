"""Threads for the tests of forming: a graph that answers, what was said, stores that fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from perdure.memory.reducers import ChatState
from perdure.stores import SQLiteStore

ANN = ("memories", "ann")
Graph = CompiledStateGraph[Any, None, Any, Any]


def user(name: str = "ann", **configurable: Any) -> Any:
    """The config of a run for a user."""
    return {"configurable": {"user_id": name, **configurable}}


def on(thread_id: str) -> Any:
    """The config of a run on a thread."""
    return {"configurable": {"thread_id": thread_id}}


def graph_of(saver: Any, answers: bool = True) -> Graph:
    """A graph that answers each message of a user, or only listens."""

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


def say(graph: Graph, thread_id: str, *messages: BaseMessage | str) -> None:
    """Runs of a graph, one for each message; a text is a user's, its id the text itself."""
    for message in messages:
        given = HumanMessage(message, id=message) if isinstance(message, str) else message
        graph.invoke({"messages": [given]}, on(thread_id))


def texts(store: Any, namespace: tuple[str, ...] = ANN) -> list[str]:
    """What the memories of a namespace say, in the order of their keys."""
    return [memory.value["text"] for memory in kept(store, namespace)]


def kept(store: Any, namespace: tuple[str, ...] = ANN) -> Sequence[Any]:
    """The memories of a namespace, in the order of their keys."""
    items = store.search(namespace, limit=10_000)
    return sorted((item for item in items if "text" in item.value), key=lambda item: item.key)


class FailingStore(SQLiteStore):
    """A store whose disk fails: the writes whose numbers, from 1, are in `fails`, raise.

    Half of them fail before anything is written, half after all of it was: a caller that is killed
    knows as little.
    """

    fails: frozenset[int] = frozenset()
    writes = 0

    def batch(self, ops: Any) -> Any:
        given = list(ops)
        if not any(hasattr(op, "value") for op in given):
            return super().batch(given)
        self.writes += 1
        if self.writes not in self.fails:
            return super().batch(given)
        if self.writes % 2:
            raise OSError("the disk is gone")
        super().batch(given)
        raise OSError("the disk is gone, after it was written")
