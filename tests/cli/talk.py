"""Threads for the tests of commands."""

from __future__ import annotations

import os
from typing import Any

from perdure.checkpointers import SQLiteCheckpointer
from perdure.graphs import chat_graph
from tests.cli.commands import run_json


def say_on_thread(thread: str, *texts: str, **metadata: Any) -> None:
    """Send messages on a thread; the offline responder answers each."""
    with SQLiteCheckpointer.open(os.environ["PERDURE_DB"]) as saver:
        graph = chat_graph(checkpointer=saver)
        config: Any = {"configurable": {"thread_id": thread}, "metadata": metadata}
        for text in texts:
            graph.invoke({"messages": [{"role": "user", "content": text}]}, config)


def put_messages(thread: str, messages: Any, **metadata: Any) -> None:
    """Put messages, or updates of messages, into a thread as they are."""
    with SQLiteCheckpointer.open(os.environ["PERDURE_DB"]) as saver:
        graph = chat_graph(checkpointer=saver)
        config: Any = {"configurable": {"thread_id": thread}, "metadata": metadata}
        graph.update_state(config, {"messages": messages}, as_node="respond")


def read_thread_texts(thread: str) -> list[str]:
    """Return the texts of a thread, without those of branches."""
    return [item["content"] for item in run_json("history", thread) if not item["branch"]]


def read_checkpoint_ids(thread: str) -> list[str]:
    """Return the ids of a thread's checkpoints, oldest first."""
    return [info["checkpoint_id"] for info in reversed(run_json("show", thread))]
