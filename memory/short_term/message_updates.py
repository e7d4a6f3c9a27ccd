"""Merge messages that have the same id, and build updates for message channels."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.messages import BaseMessage, RemoveMessage
from langgraph.graph.message import REMOVE_ALL_MESSAGES

from perdure.errors import InvalidMessages
from perdure.memory.conversation import Messages


def merge_duplicate_messages(messages: Messages) -> Messages:
    """Return one message per id (the last one), in the order in which the ids first occur.

    If several messages have the same id, the last one is kept, as `add_messages` does. Messages
    without an id are all kept. `RemoveMessage`s are dropped. If there are no messages to merge or
    drop, the list `messages` itself is returned, not a copy.
    """
    if _has_unique_ids(messages):
        return messages
    merged: dict[str | int, BaseMessage] = {}
    for position, message in enumerate(messages):
        if not isinstance(message, RemoveMessage):
            merged[position if message.id is None else message.id] = message
    return list(merged.values())


def build_update_from_current_to_target_messages(
    target: Sequence[BaseMessage], current: Messages, messages_key: str
) -> list[BaseMessage]:
    """Return the update that changes the channel `messages_key` from `current` to `target`.

    The update contains a `RemoveMessage` for each message that is only in `current`, followed by
    the messages in `target` that are new or changed. A message counts as unchanged only if
    `current` contains the same Python object. If `current` and `target` already contain the same
    messages, the returned update is empty. If two messages in `current` have the same id, the
    update replaces the whole list, because a `RemoveMessage` cannot remove only one of them.

    Raises:
        InvalidMessages: The channel has to change, but its messages cannot be removed by id; see
            `check_messages_removable_by_id`.
    """
    present = set(map(id, current))
    changed = [message for message in target if id(message) not in present]
    if not changed and len(target) == len(current):
        return []
    check_messages_removable_by_id(current, messages_key)
    if not _has_unique_ids(current):
        return [RemoveMessage(id=REMOVE_ALL_MESSAGES), *target]
    target_ids = {message.id for message in target}
    return [*(RemoveMessage(id=str(m.id)) for m in current if m.id not in target_ids), *changed]


def check_messages_removable_by_id(messages: Messages, channel: str) -> None:
    """Check that the messages in the channel `channel` can be removed by id.

    Raise InvalidMessages if a message has no id. Also raise InvalidMessages if the channel contains
    a `RemoveMessage` for all messages, which the reducer should have applied.
    """
    ids = {message.id for message in messages}
    if None in ids:
        raise InvalidMessages(
            f"the channel {channel!r} has messages without ids; use a reducer that assigns ids "
            "(perdure.memory.messages or add_messages), and if you write messages with Overwrite, "
            "set their ids yourself"
        )
    if REMOVE_ALL_MESSAGES in ids:
        raise InvalidMessages(
            f"the reducer of the channel {channel!r} stored a RemoveMessage instead of applying "
            "it; use a reducer that removes messages: perdure.memory.messages or add_messages"
        )


def _has_unique_ids(messages: Messages) -> bool:
    """Return whether all message ids are unique and none of the messages is a `RemoveMessage`.

    Messages without an id are ignored when the ids are checked for duplicates.
    """
    ids = {message.id for message in messages}
    if None in ids:
        known_ids = [message.id for message in messages if message.id is not None]
        return len(known_ids) == len(set(known_ids)) and not _has_removal(messages)
    return len(ids) == len(messages) and not _has_removal(messages)


def _has_removal(messages: Messages) -> bool:
    return RemoveMessage in set(map(type, messages))
