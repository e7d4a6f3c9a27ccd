"""Memories for the tests of commands."""

from __future__ import annotations

import os
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage

from perdure.checkpointers import SQLiteCheckpointer
from perdure.graphs import chat_graph
from perdure.memory import Extraction
from perdure.stores import SQLiteStore
from tests.cli.commands import run_json

CARD = "My card is 4111 1111 1111 1111"
ME: Any = {"configurable": {"user_id": "me"}}


def store_conversation(thread: str, *texts: str, extract: bool = True) -> None:
    """Store a thread in which the user and the assistant alternate, and extract its memories."""
    config: Any = {"configurable": {"thread_id": thread, "user_id": "me"}}
    messages = [
        (HumanMessage, AIMessage)[n % 2](text, response_metadata={"create_time": 1.7e9 + n})
        for n, text in enumerate(texts)
    ]
    path = os.environ["PERDURE_DB"]
    with SQLiteCheckpointer.open(path) as saver, SQLiteStore.open(path) as store:
        chat_graph(checkpointer=saver).update_state(
            config, {"messages": messages}, as_node="respond"
        )
        if extract:
            Extraction(saver, store).extract(thread, config)


def list_memory_keys(*options: str) -> dict[str, str]:
    """Return the key of each memory that is listed, by its text."""
    return {memory["text"]: memory["key"] for memory in run_json("memories", "list", *options)}


def list_memory_texts(*options: str) -> list[str]:
    """Return the texts of the memories that are listed."""
    return list(list_memory_keys(*options))


def search_memory_texts(query: str, *options: str) -> list[str]:
    """Return the texts of the memories that a search finds, best first."""
    return [memory["text"] for memory in run_json("memories", "search", query, *options)]
