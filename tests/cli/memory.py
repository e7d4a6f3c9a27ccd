"""Memories to run commands on."""

from __future__ import annotations

import os
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage

from perdure.checkpointers import SQLiteCheckpointer
from perdure.graphs import chat_graph
from perdure.memory import Extraction
from perdure.stores import SQLiteStore
from tests.cli.commands import read

CARD = "My card is 4111 1111 1111 1111"
ME: Any = {"configurable": {"user_id": "me"}}


def talk(thread: str, *texts: str, extract: bool = True) -> None:
    """A thread on which the user and the assistant speak in turn, and its memories."""
    config: Any = {"configurable": {"thread_id": thread, "user_id": "me"}}
    said = [
        (HumanMessage, AIMessage)[n % 2](text, response_metadata={"create_time": 1.7e9 + n})
        for n, text in enumerate(texts)
    ]
    path = os.environ["PERDURE_DB"]
    with SQLiteCheckpointer.open(path) as saver, SQLiteStore.open(path) as store:
        chat_graph(checkpointer=saver).update_state(config, {"messages": said}, as_node="respond")
        if extract:
            Extraction(saver, store).extract(thread, config)


def keys(*options: str) -> dict[str, str]:
    """The key of each memory that is listed, by its text."""
    return {memory["text"]: memory["key"] for memory in read("memories", "list", *options)}


def texts(*options: str) -> list[str]:
    return list(keys(*options))


def found(query: str, *options: str) -> list[str]:
    return [memory["text"] for memory in read("memories", "search", query, *options)]
