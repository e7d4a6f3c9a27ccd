"""Conversations that are stored like those of a graph's run, with times of their own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import CheckpointMetadata, empty_checkpoint
from langgraph.checkpoint.base.id import uuid6

from perdure.checkpointers.checkpointer import Checkpointer


def store_conversation(
    saver: Checkpointer,
    thread_id: str,
    days: float = 0.0,
    turns: int = 2,
    texts: Sequence[str] = (),
    **metadata: str,
) -> None:
    """Store a conversation that ended `days` days ago, with two checkpoints per turn.

    The state has the two newest messages. Older messages are in the history only.
    """
    messages: list[HumanMessage] = []
    config: RunnableConfig = {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}
    texts = texts or [f"{thread_id} {number}" for number in range(2 * turns)]
    for number, text in enumerate(texts):
        checkpoint = empty_checkpoint()
        at = datetime.now(UTC) - timedelta(days=days, seconds=len(texts) - number)
        messages.append(HumanMessage(text, id=f"{thread_id}-{number}"))
        checkpoint["id"], checkpoint["ts"] = str(uuid6(clock_seq=number)), at.isoformat()
        checkpoint["channel_values"] = {"messages": messages[-2:]}
        checkpoint["channel_versions"] = {"messages": number + 1}
        kind: CheckpointMetadata = {"source": "loop" if number % 2 else "input", "step": number}
        config = saver.put(config, checkpoint, {**kind, **metadata}, {"messages": number + 1})  # type: ignore[typeddict-item]
        saver.put_writes(config, [("messages", messages[-1])], f"task-{number}")
