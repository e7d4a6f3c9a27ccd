"""Graphs that tests serve, and functions that run them outside a server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypedDict

from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

from perdure.checkpointers import open_checkpointer
from perdure.graphs import chat_graph
from perdure.settings import Settings


class Chats:
    """The graphs `chat` and `asks`, as the application has graphs."""

    def __iter__(self) -> Iterator[str]:
        return iter(["chat", "asks"])

    @asynccontextmanager
    async def open_graph(
        self, name: str, saver: Any, store: Any, *_: Any, **__: Any
    ) -> AsyncIterator[Any]:
        """Yield the graph of that name."""
        made = chat_graph if name == "chat" else asking_graph
        yield made(checkpointer=saver, store=store)


class _State(TypedDict, total=False):
    said: str


def asking_graph(**parts: Any) -> Any:
    """Build a graph whose subgraph interrupts with a question."""
    inner: Any = StateGraph(_State)
    inner.add_node("ask", lambda state: {"said": interrupt("Sure?")})
    inner.add_edge(START, "ask")
    outer: Any = StateGraph(_State)
    outer.add_node("part", inner.compile())
    outer.add_edge(START, "part")
    return outer.compile(**parts)


def run_asking_graph(
    settings: Settings, thread_id: str, answer: str | None = None, **metadata: Any
) -> None:
    """Run the asking graph outside a server, up to its question, or answer the question."""
    with open_checkpointer(settings.db) as saver:
        graph_input: Any = {"said": "hello"} if answer is None else Command(resume=answer)
        configurable = {"thread_id": thread_id, "user_id": settings.user}
        config: Any = {"configurable": configurable, "metadata": metadata}
        asking_graph(checkpointer=saver).invoke(graph_input, config)


def run_chat_turns(settings: Settings, thread_id: str, *texts: str, **metadata: Any) -> None:
    """Run a chat graph outside a server, one turn for each text."""
    with open_checkpointer(settings.db) as saver:
        graph = chat_graph(checkpointer=saver)
        configurable = {"thread_id": thread_id, "user_id": settings.user}
        for text in texts:
            graph.invoke(
                {"messages": [{"role": "user", "content": text}]},
                {"configurable": configurable, "metadata": metadata},
            )
