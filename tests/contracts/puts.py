"""Helpers of the contract tests: put checkpoints without a graph, and compare values exactly."""

from __future__ import annotations

from itertools import count
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, empty_checkpoint

from perdure.checkpointers import HistoryItem, SQLiteCheckpointer

_numbers = count(1)


def put(
    saver: BaseCheckpointSaver[Any],
    values: dict[str, Any],
    parent: RunnableConfig | None = None,
    *,
    thread: str = "t",
    ns: str = "",
    uid: str | None = None,
    metadata: dict[str, Any] | None = None,
) -> RunnableConfig:
    """Put a checkpoint in which every channel has a new version, and return its config."""
    checkpoint = empty_checkpoint()
    # ids of one run of tests sort in the order in which they were made, as those of langgraph do
    checkpoint["id"] = uid or f"c{next(_numbers):08}"
    checkpoint["channel_values"] = values
    checkpoint["channel_versions"] = dict.fromkeys(values, next(_numbers))
    config: RunnableConfig = {"configurable": {"thread_id": thread, "checkpoint_ns": ns}}
    put_metadata: Any = {"source": "loop", **(metadata or {})}
    return saver.put(parent or config, checkpoint, put_metadata, checkpoint["channel_versions"])


def config_at(thread: str = "t", ns: str = "", uid: str | None = None) -> RunnableConfig:
    """Return the config of a thread's head, or of the checkpoint with the id `uid`."""
    configurable = {"thread_id": thread, "checkpoint_ns": ns}
    return {"configurable": configurable if uid is None else {**configurable, "checkpoint_id": uid}}


def checkpoint_id_of(config: RunnableConfig) -> str:
    """Return the checkpoint id in a config."""
    return str(config["configurable"]["checkpoint_id"])


def read_channel_values(saver: BaseCheckpointSaver[Any], config: RunnableConfig) -> dict[str, Any]:
    """Read the channel values of a checkpoint."""
    record = saver.get_tuple(config)
    assert record is not None
    return record.checkpoint["channel_values"]


def list_checkpoint_ids(saver: BaseCheckpointSaver[Any], *args: Any, **options: Any) -> list[str]:
    """Return the ids of the checkpoints that `list` returns, in the same order."""
    return [checkpoint_id_of(record.config) for record in saver.list(*args, **options)]


def texts_and_seen(items: list[HistoryItem]) -> list[tuple[str, bool | None]]:
    """Return the pair `(text, seen)` of each message of a history."""
    return [(item.value.content, item.seen) for item in items]


def read_history_texts(saver: SQLiteCheckpointer, thread: str = "t", **options: Any) -> list[str]:
    """Return the texts of the messages of a thread's history."""
    return [item.value.content for item in saver.history(thread, **options)]


def render_with_types(value: Any) -> str:
    """Render a value as text that differs if any content, type or order differs."""
    if isinstance(value, BaseMessage):
        return f"{type(value).__name__}{render_with_types(value.__dict__)}"
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{render_with_types(k)}: {render_with_types(v)}" for k, v in value.items())
            + "}"
        )
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}[" + ", ".join(map(render_with_types, value)) + "]"
    return f"{type(value).__name__}({value!r})"
