"""Messages that were erased from a thread while something that had loaded them was under way.

What learns from messages, such as a summary or an extraction, may ask a model for minutes. It asks
here before it writes, and writes nothing that rests on an erased message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.effects import calling


class LoadedThread(NamedTuple):
    """A thread as it was at the time when its messages were loaded.

    Attributes:
        saver: The checkpointer of the thread.
        thread_id: The thread.
        since: The config of the run that loaded the thread, or what `Checkpointer.removals` told
            before the messages were read.
    """

    saver: Checkpointer
    thread_id: str
    since: int | RunnableConfig

    async def erased(self, messages: Sequence[BaseMessage]) -> list[bool]:
        """Return for each message whether it was erased since."""
        given = self.thread_id, messages
        erased: list[bool] = await calling(self.saver, "removed", *given, since=self.since)
        return erased


async def without_erased(
    loaded: LoadedThread | None, messages: Sequence[BaseMessage]
) -> Sequence[BaseMessage]:
    """Return the messages that were not erased since they were loaded."""
    if loaded is None or not messages:
        return messages
    erased = await loaded.erased(messages)
    if not any(erased):
        return messages
    return [message for message, gone in zip(messages, erased, strict=True) if not gone]


async def is_any_erased(loaded: LoadedThread | None, messages: Sequence[BaseMessage]) -> bool:
    """Return whether one of the messages was erased since they were loaded."""
    return loaded is not None and bool(messages) and any(await loaded.erased(messages))


def thread_of_run(config: RunnableConfig | None) -> LoadedThread | None:
    """Return the thread of a run, or None if no checkpointer of perdure stores it."""
    config = ensure_config(config)
    configurable = config["configurable"]
    thread_id = configurable.get("thread_id")
    for part in configurable.values() if thread_id is not None else ():
        if isinstance(part, Checkpointer):
            return LoadedThread(part, str(thread_id), config)
    return None


async def thread_as_stored(saver: object, thread_id: str) -> LoadedThread | None:
    """Return a thread whose messages are read next, or None if perdure does not store it."""
    if not isinstance(saver, Checkpointer):
        return None
    return LoadedThread(saver, thread_id, await calling(saver, "removals", thread_id))
