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
    """A stored thread, with a reference point for finding messages that were erased after loading.

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
        arguments = self.thread_id, messages
        erased: list[bool] = await call_method(self.saver, "removed", *arguments, since=self.since)
        return erased

    async def were_all_messages_added_after(
        self, message_ids: Sequence[str], moment: datetime
    ) -> bool:
        """Return whether all of the messages were added by runs that began after `moment`.

        Return False if `message_ids` is empty.

        A message counts as added after `moment` only if it was added by a run that used the
        checkpointer's database; see `Checkpointer.said_after`.
        """
        options = {
            "channel": self.channel,
            "config": None if isinstance(self.since, int) else self.since,
        }
        arguments = self.thread_id, message_ids, moment
        are_later: list[bool] = await call_method(self.saver, "said_after", *arguments, **options)
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


def find_run_thread(
    config: RunnableConfig | None, channel: str = "messages"
) -> LoadedThread | None:
    """Return the thread that a run belongs to, or None if no perdure checkpointer stores it."""
    config = ensure_config(config)
    configurable = config["configurable"]
    thread_id = configurable.get("thread_id")
    for part in configurable.values() if thread_id is not None else ():
        if isinstance(part, Checkpointer):
            return LoadedThread(part, str(thread_id), config, channel)
    return None


async def start_tracking_erasures_in_thread(
    saver: object, thread_id: str, channel: str = "messages"
) -> LoadedThread | None:
    """Return a `LoadedThread` that can detect messages erased after this call.

    Call this function just before reading the thread's messages. Return None if `saver` is not a
    perdure checkpointer.
    """
    if not isinstance(saver, Checkpointer):
        return None
    since = await call_method(saver, "removals", thread_id)
    return LoadedThread(saver, thread_id, since, channel)
