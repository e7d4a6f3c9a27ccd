"""Graphs that are served in tests, and what was said in them."""

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
        """The graph."""
        made = chat_graph if name == "chat" else asking_graph
        yield made(checkpointer=saver, store=store)


class _State(TypedDict, total=False):
    said: str


def asking_graph(**parts: Any) -> Any:
    """A graph whose subgraph asks and waits for an answer."""
    inner: Any = StateGraph(_State)
    inner.add_node("ask", lambda state: {"said": interrupt("Sure?")})
    inner.add_edge(START, "ask")
    outer: Any = StateGraph(_State)
    outer.add_node("part", inner.compile())
    outer.add_edge(START, "part")
    return outer.compile(**parts)


def ask(settings: Settings, thread_id: str, answer: str | None = None, **about: Any) -> None:
    """Run the graph that asks, which is no server's, up to its question, or answer it."""
    with open_checkpointer(settings.db) as saver:
        given: Any = {"said": "hello"} if answer is None else Command(resume=answer)
        configurable = {"thread_id": thread_id, "user_id": settings.user}
        config: Any = {"configurable": configurable, "metadata": about}
        asking_graph(checkpointer=saver).invoke(given, config)


def say(settings: Settings, thread_id: str, *texts: str, **about: Any) -> None:
    """Say something in a chat that is no server's, a turn each."""
    with open_checkpointer(settings.db) as saver:
        graph = chat_graph(checkpointer=saver)
        configurable = {"thread_id": thread_id, "user_id": settings.user}
        for text in texts:
            graph.invoke(
                {"messages": [{"role": "user", "content": text}]},
                {"configurable": configurable, "metadata": about},
            )
