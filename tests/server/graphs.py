"""Graphs that are served in tests, and what was said in them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from perdure.checkpointers import SQLiteCheckpointer
from perdure.graphs import chat_graph
from perdure.settings import Settings


class Chats:
    """One graph, `chat`, as the application has graphs."""

    def __iter__(self) -> Iterator[str]:
        return iter(["chat"])

    @asynccontextmanager
    async def opened(
        self, name: str, saver: Any, store: Any, *_: Any, **__: Any
    ) -> AsyncIterator[Any]:
        """The graph."""
        assert name == "chat"
        yield chat_graph(checkpointer=saver, store=store)


def say(settings: Settings, thread_id: str, *texts: str, **about: Any) -> None:
    """Say something in a chat that is no server's, a turn each."""
    with SQLiteCheckpointer.open(settings.db) as saver:
        graph = chat_graph(checkpointer=saver)
        configurable = {"thread_id": thread_id, "user_id": settings.user}
        for text in texts:
            graph.invoke(
                {"messages": [{"role": "user", "content": text}]},
                {"configurable": configurable, "metadata": about},
            )
