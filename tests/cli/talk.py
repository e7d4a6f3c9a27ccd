"""Threads to run commands on."""

from __future__ import annotations

import os
from typing import Any

from perdure.checkpointers import SQLiteCheckpointer
from perdure.graphs import chat_graph
from tests.cli.commands import read


def say(thread: str, *texts: str, **metadata: Any) -> None:
    """Say something on a thread; the offline responder answers."""
    with SQLiteCheckpointer.open(os.environ["PERDURE_DB"]) as saver:
        graph = chat_graph(checkpointer=saver)
        config: Any = {"configurable": {"thread_id": thread}, "metadata": metadata}
        for text in texts:
            graph.invoke({"messages": [{"role": "user", "content": text}]}, config)


def put(thread: str, messages: Any, **metadata: Any) -> None:
    """Put messages, or updates of them, into a thread as they are."""
    with SQLiteCheckpointer.open(os.environ["PERDURE_DB"]) as saver:
        graph = chat_graph(checkpointer=saver)
        config: Any = {"configurable": {"thread_id": thread}, "metadata": metadata}
        graph.update_state(config, {"messages": messages}, as_node="respond")


def said(thread: str) -> list[str]:
    """What was said on a thread, branches apart."""
    return [item["content"] for item in read("history", thread) if not item["branch"]]


def ids(thread: str) -> list[str]:
    """Its checkpoints, the first put first."""
    return [info["checkpoint_id"] for info in reversed(read("show", thread))]
