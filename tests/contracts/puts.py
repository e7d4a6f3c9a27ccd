"""What the contract tests share: putting checkpoints by hand, and telling values apart."""

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
    """Put a checkpoint in which every channel is new; returns its config."""
    checkpoint = empty_checkpoint()
    # ids of one run of tests sort in the order in which they were made, as those of langgraph do
    checkpoint["id"] = uid or f"c{next(_numbers):08}"
    checkpoint["channel_values"] = values
    checkpoint["channel_versions"] = dict.fromkeys(values, next(_numbers))
    config: RunnableConfig = {"configurable": {"thread_id": thread, "checkpoint_ns": ns}}
    known: Any = {"source": "loop", **(metadata or {})}
    return saver.put(parent or config, checkpoint, known, checkpoint["channel_versions"])


def at(thread: str = "t", ns: str = "", uid: str | None = None) -> RunnableConfig:
    """The config of a thread's head, or of one checkpoint."""
    where = {"thread_id": thread, "checkpoint_ns": ns}
    return {"configurable": where if uid is None else {**where, "checkpoint_id": uid}}


def uid_of(config: RunnableConfig) -> str:
    """The checkpoint a config names."""
    return str(config["configurable"]["checkpoint_id"])


def values_at(saver: BaseCheckpointSaver[Any], config: RunnableConfig) -> dict[str, Any]:
    """The values at a checkpoint."""
    found = saver.get_tuple(config)
    assert found is not None
    return found.checkpoint["channel_values"]


def listed(saver: BaseCheckpointSaver[Any], *args: Any, **options: Any) -> list[str]:
    """The ids that `list` gives, in its order."""
    return [uid_of(found.config) for found in saver.list(*args, **options)]


def told(items: list[HistoryItem]) -> list[tuple[str, bool | None]]:
    """A history of messages as `(text, whether the model is shown it)`."""
    return [(item.value.content, item.seen) for item in items]


def texts(saver: SQLiteCheckpointer, thread: str = "t", **options: Any) -> list[str]:
    """The texts of a thread's history."""
    return [item.value.content for item in saver.history(thread, **options)]


def shape(value: Any) -> str:
    """A value as text that differs wherever its content, a type or an order differs."""
    if isinstance(value, BaseMessage):
        return f"{type(value).__name__}{shape(value.__dict__)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{shape(k)}: {shape(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}[" + ", ".join(map(shape, value)) + "]"
    return f"{type(value).__name__}({value!r})"
