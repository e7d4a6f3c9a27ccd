"""Detect messages that were erased after a run or an extraction had loaded them.

Summarisation and extraction load messages and then wait for a model response, which can take
several minutes. Before the resulting summary or memories are stored, the functions in this module
check whether any of the source messages was erased after it had been loaded. The module can also
check whether messages were added to a thread after a given time.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.effects import call_method


class LoadedThread(NamedTuple):
    """Identifies a loaded thread, so that messages erased after loading can be detected.

    Attributes:
        saver: The checkpointer that stores the thread.
        thread_id: The id of the thread.
        since: The config of the run that loaded the thread, or the number that
            `Checkpointer.removals` returned before the messages were read.
        channel: The channel of the messages.
    """

    saver: Checkpointer
    thread_id: str
    since: int | RunnableConfig
    channel: str = "messages"

    async def were_erased_since_load(self, messages: Sequence[BaseMessage]) -> list[bool]:
        """Return, for each message, whether it was erased after the thread was loaded."""
        erased: list[bool] = await call_method(
            self.saver, "removed", self.thread_id, messages, since=self.since
        )
        return erased

    async def were_all_messages_added_after(
        self, message_ids: Sequence[str], moment: datetime
    ) -> bool:
        """Return whether all of the messages were added by runs that began after `moment`.

        Return False if `message_ids` is empty.

        The method also returns False if a message was added by other means, such as an import, or
        by a run that did not use the checkpointer's database. See `Checkpointer.said_after`.
        """
        are_later: list[bool] = await call_method(
            self.saver,
            "said_after",
            self.thread_id,
            message_ids,
            moment,
            channel=self.channel,
            config=None if isinstance(self.since, int) else self.since,
        )
        return bool(are_later) and all(are_later)


async def remove_erased_messages(
    loaded: LoadedThread | None, messages: Sequence[BaseMessage]
) -> Sequence[BaseMessage]:
    """Return the messages that have not been erased since they were loaded."""
    if loaded is None or not messages:
        return messages
    erased = await loaded.were_erased_since_load(messages)
    if not any(erased):
        return messages
    return [message for message, is_erased in zip(messages, erased, strict=True) if not is_erased]


async def has_erased_message(loaded: LoadedThread | None, messages: Sequence[BaseMessage]) -> bool:
    """Return whether any of the messages has been erased since it was loaded."""
    return (
        loaded is not None and bool(messages) and any(await loaded.were_erased_since_load(messages))
    )


def find_perdure_checkpointer_of_run(config: RunnableConfig) -> Checkpointer | None:
    """Return the checkpointer of the running graph, or None if it is not a perdure checkpointer."""
    return next((v for v in config["configurable"].values() if isinstance(v, Checkpointer)), None)


def find_run_thread(
    config: RunnableConfig | None, channel: str = "messages"
) -> LoadedThread | None:
    """Return the thread that a run belongs to, or None if no perdure checkpointer stores it."""
    config = ensure_config(config)
    saver, thread_id = (
        find_perdure_checkpointer_of_run(config),
        config["configurable"].get("thread_id"),
    )
    if saver is None or thread_id is None:
        return None
    return LoadedThread(saver, str(thread_id), config, channel)


async def start_tracking_erasures_in_thread(
    saver: object, thread_id: str, channel: str = "messages"
) -> LoadedThread | None:
    """Return a `LoadedThread` that can detect messages erased after this call.

    Call this function just before reading the thread's messages, so that later erasures are
    detected. Return None if `saver` is not a perdure checkpointer.
    """
    if not isinstance(saver, Checkpointer):
        return None
    return LoadedThread(saver, thread_id, await call_method(saver, "removals", thread_id), channel)
