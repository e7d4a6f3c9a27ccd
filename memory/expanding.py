"""Expanding a summary: the messages it stands for, from what a checkpointer keeps of a thread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple

from perdure.errors import ConfigurationError, UnknownCheckpoint, UnknownThread
from perdure.memory.shortening import SHORTENED
from perdure.memory.summary import Summary

_AT: Final[tuple[str, ...]] = ("thread_id", "checkpoint_ns", "checkpoint_id")


def expand(
    checkpointer: BaseCheckpointSaver[Any],
    config: RunnableConfig,
    summary: Summary | None = None,
    *,
    messages_key: str = "messages",
    summarized_key: str = "summarized",
) -> list[BaseMessage]:
    """The messages that a thread's summary stands for, in the order in which they were said.

    Of a message that was changed, the last form that `trim` and `clear_tool_outputs` have not
    shortened. What was erased since is left out.

    Args:
        checkpointer: A perdure checkpointer; it has the history.
        config: Names the thread, and the checkpoint if it is not the newest.
        summary: An earlier summary of the thread; None: the one at the checkpoint.
        messages_key: The channel of the messages.
        summarized_key: The channel of the ids of what the summary stands for.

    Raises:
        ConfigurationError: The checkpointer keeps no history.
        InvalidConfig: The config names no thread.
        UnknownThread: There is no such thread.
        UnknownCheckpoint: It has no such checkpoint.
    """
    history = _history(checkpointer, "history")
    at, ids = _stands_for(checkpointer.get_tuple(config), config, summary, summarized_key)
    return _originals(history(**at, channel=messages_key), ids) if ids else []


async def aexpand(
    checkpointer: BaseCheckpointSaver[Any],
    config: RunnableConfig,
    summary: Summary | None = None,
    *,
    messages_key: str = "messages",
    summarized_key: str = "summarized",
) -> list[BaseMessage]:
    """See `expand`."""
    history = _history(checkpointer, "ahistory")
    found = await checkpointer.aget_tuple(config)
    at, ids = _stands_for(found, config, summary, summarized_key)
    return _originals(await history(**at, channel=messages_key), ids) if ids else []


def _history(checkpointer: Any, name: str) -> Any:
    found = getattr(checkpointer, name, None)
    if not callable(found):
        raise ConfigurationError(
            f"checkpointer is a {type(checkpointer).__name__}, which keeps no history of what was "
            "removed from the state; expand() reads a perdure checkpointer, such as "
            "SQLiteCheckpointer"
        )
    return found


def _stands_for(
    found: CheckpointTuple | None, config: RunnableConfig, summary: Summary | None, key: str
) -> tuple[dict[str, Any], list[str]]:
    """Which checkpoint that is, and the ids of what the summary stands for there."""
    if found is None:
        wanted = config.get("configurable", {})
        if wanted.get("checkpoint_id"):
            raise UnknownCheckpoint(
                f"thread {wanted['thread_id']!r} has no checkpoint {wanted['checkpoint_id']!r}"
            )
        raise UnknownThread(f"there is no thread {wanted['thread_id']!r}; threads() lists them")
    ids: Sequence[str] = found.checkpoint["channel_values"].get(key) or []
    configurable: dict[str, Any] = dict(found.config["configurable"])
    at = {name: configurable[name] for name in _AT if name in configurable}
    return at, list(ids if summary is None else ids[: summary["count"]])


def _originals(history: Iterable[Any], ids: Sequence[str]) -> list[BaseMessage]:
    wanted = set(ids)
    said: dict[str, BaseMessage] = {}
    for item in history:
        message = item.value
        if not isinstance(message, BaseMessage) or message.id not in wanted:
            continue
        shortened = SHORTENED in message.additional_kwargs
        if message.id not in said or not shortened:
            said[message.id] = message
    return [said[id_] for id_ in dict.fromkeys(ids) if id_ in said]
