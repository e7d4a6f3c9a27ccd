"""Read JSON and JSON Lines files whose objects are messages or contain lists of messages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from perdure.checkpointers.import_metadata import IMPORTED_KEYS
from perdure.checkpointers.labels import USER_LABELS
from perdure.cli.importing.conversation import (
    Conversation,
    MalformedPart,
    UnnamedSource,
    build_conversation_without_messages,
    get_by_path,
    parse_timestamp,
    shorten_line,
)
from perdure.memory.message_forms import convert_object_to_message, find_message_time

# Ids of the messages from the root of the message tree to the parent of the next message. The dict
# serves as an ordered set of message ids, so all of its values are None.
_MessageIdsFromRoot = dict[str, None]

_THREAD_ID_PATHS: Final = (
    *(("thread_id",), ("id",), ("checkpoint", "thread_id")),
    *(("config", "configurable", "thread_id"), ("metadata", "thread_id")),
)
"""The paths at which an object may have its thread id."""
_ALTERNATIVE_NAMES: Final = {
    "create_time": ("created_at", "timestamp"),
    "update_time": ("updated_at",),
}
"""Other names of the fields in `IMPORTED_KEYS`."""


_IMPORTED_FIELDS: Final = frozenset(
    (
        *("messages", "branches", *IMPORTED_KEYS, *USER_LABELS, "values", "metadata"),
        *(name for names in _ALTERNATIVE_NAMES.values() for name in names),
        *("next", "tasks", "interrupts", "parent_checkpoint", "status", "config", "checkpoint"),
    )
)
"""The fields that are imported, or that LangGraph's server adds and that need no import."""


def has_messages(value: Mapping[str, Any]) -> bool:
    """Return whether an object is a conversation or a LangGraph state that contains messages."""
    return "messages" in value or "messages" in get_by_path(value, dict, "values")


class JsonLinesReader:
    """Collects the conversations in a JSON or JSON Lines file.

    Each JSON object in the file is a message or contains a list of messages. Objects with the same
    thread id are combined into one conversation. If objects with the same thread id contain
    different messages, the differing messages become branches of the conversation. An object that
    contains a list of messages but no thread id becomes a separate conversation. Messages without a
    thread id are grouped into one conversation per user. `ThreadNames` later assigns a thread to
    each conversation that has no thread id.

    Args:
        file: The path of the file.
    """

    def __init__(self, file: str) -> None:
        self._stem = Path(file).stem
        self._conversations: dict[str, tuple[Conversation, _MessageIdsFromRoot]] = {}
        # The LangGraph states in the file. Each tuple contains a state's timestamp, the exported
        # object and the thread id.
        self._states: list[tuple[float, Mapping[str, Any], object]] = []
        self._unnamed: list[Conversation] = []
        # Collects messages that have no thread id and were exported as separate lines of a file.
        # Each key identifies a user. Each value is a dict in the format of an exported
        # conversation, with all such messages of the user.
        self._messages_by_user: dict[str, dict[str, Any]] = {}
        # The user named in the most recent message line that has a user but no thread id. If a
        # later message line has neither a user nor a thread id, its message is assigned to this
        # user.
        self._user = ""

    def build_conversations(self) -> list[Conversation]:
        """Build the conversations of all objects."""
        states, self._states = sorted(self._states, key=lambda state: state[0]), []
        for created_at, state, thread_id in states:
            self._add_messages_to_thread(
                thread_id, state, None if created_at == math.inf else created_at
            )
        unnamed_messages = (
            self._build_conversation_with_provisional_id(self._stem, group)
            for group in self._messages_by_user.values()
        )
        return [
            *(conversation for conversation, _ in self._conversations.values()),
            *self._unnamed,
            *unnamed_messages,
        ]

    def add_conversation(self, line_number: str, exported: Mapping[str, Any]) -> None:
        """Add a conversation from an object that contains a list of messages.

        The messages of a LangGraph state are added later, by `build_conversations`.
        `build_conversations` first sorts all states by time, because a LangGraph state history
        lists the newest state first.

        Args:
            line_number: The position of the object in the file, such as "3" or "3.1".
            exported: The object.

        Raises:
            MalformedPart: `messages` is not a list.
        """
        if "messages" not in exported:
            exported = {**exported, "messages": exported["values"]["messages"]}
        if not isinstance(exported["messages"], list):
            raise MalformedPart("'messages' is not a list")
        names = (find_value_at_path(exported, *path) for path in _THREAD_ID_PATHS)
        name = next(filter(None, names), None)
        if name is None:
            self._unnamed.append(
                self._build_conversation_with_provisional_id(
                    f"{self._stem}-{line_number}", exported
                )
            )
        elif "values" in exported and ("checkpoint" in exported or "next" in exported):
            created_at = parse_timestamp(exported.get("created_at"))
            self._states.append((math.inf if created_at is None else created_at, exported, name))
        else:
            self._add_messages_to_thread(name, exported)

    def add_message(self, line: Mapping[str, Any]) -> None:
        """Append a single message to the conversation it belongs to."""
        labels = {name: line[name] for name in USER_LABELS if name in line}
        message = {k: v for k, v in line.items() if k != "thread_id" and k not in labels}
        if line.get("thread_id"):
            _append_message_and_return_id_of_last_message(
                *self._get_or_create_conversation_and_path(line["thread_id"], labels), message
            )
        else:
            user = str([*labels.items()]) if any(labels.values()) else ""
            self._user = user or self._user
            unnamed_messages = self._messages_by_user.setdefault(
                self._user, {"messages": [], **labels}
            )
            unnamed_messages["messages"].append(message)

    def _build_conversation_with_provisional_id(
        self, provisional_name: str, exported: Mapping[str, Any]
    ) -> Conversation:
        """Build a conversation from an exported object that has no thread id.

        The conversation has a provisional id that is derived from `provisional_name`, until
        `ThreadNames` assigns a thread id to it.
        """

        def build(id: str, is_timed: bool) -> Conversation:
            conversation_with_id = Conversation(
                id, _build_empty_conversation(provisional_name, exported).metadata
            )
            _add_messages_and_branches(
                conversation_with_id, {}, exported, derive_ids_from_times=is_timed
            )
            conversation_with_id.left_out.update(
                name for name, value in exported.items() if name not in _IMPORTED_FIELDS and value
            )
            return conversation_with_id

        draft = build(_build_empty_conversation(provisional_name, exported).id, False)
        draft.unnamed = UnnamedSource(self, self._stem, build)
        return draft

    def _add_messages_to_thread(
        self, thread_id: object, exported: Mapping[str, Any], created_at: float | None = None
    ) -> None:
        """Add the messages in an exported object to the conversation of the thread `thread_id`.

        Messages that have no timestamp are assigned the timestamp `created_at`.
        """
        conversation, path = self._get_or_create_conversation_and_path(thread_id, exported)
        path.clear()
        _add_messages_and_branches(conversation, path, exported, created_at)

    def _get_or_create_conversation_and_path(
        self, thread_id: object, metadata: Mapping[str, Any]
    ) -> tuple[Conversation, _MessageIdsFromRoot]:
        """Return a thread's conversation, and the path from its root to the last added message.

        If there is no conversation with this thread id, create it. Add `metadata` to the
        conversation.
        """
        new_conversation = _build_empty_conversation(thread_id, metadata)
        conversation, path = self._conversations.setdefault(
            new_conversation.id, (new_conversation, {})
        )
        conversation.metadata |= new_conversation.metadata
        return conversation, path


def _build_empty_conversation(name: object, line: Mapping[str, Any]) -> Conversation:
    """Build a conversation that has an object's metadata but no messages."""
    metadata = {**line}
    for own_name, alternative_names in _ALTERNATIVE_NAMES.items():
        times = (
            line[name] for name in alternative_names if parse_timestamp(line.get(name)) is not None
        )
        metadata[own_name] = line.get(own_name, next(times, None))
    for key in ("title", *USER_LABELS):
        value = line.get(key, get_by_path(line, dict, "metadata").get(key))
        metadata[key] = str(value) if key in USER_LABELS and type(value) is int else value
    return build_conversation_without_messages(
        str(name), metadata, {key: key for key in (*IMPORTED_KEYS, *USER_LABELS)}
    )


def _add_messages_and_branches(
    conversation: Conversation,
    earlier_message_ids: _MessageIdsFromRoot,
    exported: Mapping[str, Any],
    created_at: float | None = None,
    *,
    derive_ids_from_times: bool = False,
) -> None:
    """Add all messages of an exported JSON object, including those on branches, to a conversation.

    Args:
        conversation: The conversation to which the messages are added.
        earlier_message_ids: The ids of the messages that precede the object's messages. The ids of
            added messages are appended.
        exported: The exported JSON object.
        created_at: The timestamp for messages that have no timestamp.
        derive_ids_from_times: Whether the ids that are derived for messages without an id depend on
            the times of the messages.
    """
    keys = [
        _append_message_and_return_id_of_last_message(
            conversation,
            earlier_message_ids,
            message,
            created_at,
            derive_id_from_time=derive_ids_from_times,
        )
        for message in exported["messages"]
    ]
    leaf = conversation.leaf
    for branch in get_by_path(exported, list, "branches"):
        after, messages = get_by_path(branch, int, "after"), get_by_path(branch, list, "messages")
        if not 0 <= after <= len(keys):
            conversation.add_problem("a branch follows no message")
            continue
        begin = conversation.list_message_ids_from_root(keys[after - 1]) if after else []
        earlier_message_ids = dict.fromkeys(begin)
        keys += [
            _append_message_and_return_id_of_last_message(
                conversation,
                earlier_message_ids,
                message,
                is_variant=True,
                derive_id_from_time=derive_ids_from_times,
            )
            for message in messages
        ]
    conversation.leaf = conversation.leaf if leaf is None else leaf


def find_value_at_path(value: Any, *keys: str) -> Any:
    """Return the value at a path of nested keys, or None if there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _append_message_and_return_id_of_last_message(
    conversation: Conversation,
    earlier_message_ids: _MessageIdsFromRoot,
    message_json: Any,
    created_at: float | None = None,
    *,
    is_variant: bool = False,
    derive_id_from_time: bool = False,
) -> str | None:
    """Append a message to a branch of a conversation, and return the branch's last message id.

    A malformed message is skipped, and the reason is added to the conversation's `problems`.
    """
    conversation.source_count += 1
    parent_id = next(reversed(earlier_message_ids), None)
    last = conversation.nodes[parent_id].message if parent_id else None
    try:
        time = [find_message_time(message_json)] if derive_id_from_time else []
        message = convert_object_to_message(
            message_json, last, conversation.id, len(earlier_message_ids), *time
        )
    except MalformedPart as exc:
        conversation.add_problem(
            str(exc),
            shorten_line(message_json["id"]) if get_by_path(message_json, dict).get("id") else None,
        )
        return parent_id
    own_time = find_message_time(message_json)
    earlier_message_ids[
        conversation.add_message(
            message, parent_id, created_at if own_time is None else own_time, is_variant=is_variant
        )
    ] = None
    conversation.leaf = next(reversed(earlier_message_ids))
    return conversation.leaf
