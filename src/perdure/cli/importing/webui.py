"""Read conversations, which are trees of messages, from Open WebUI and LibreChat exports."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from langchain_core.messages import BaseMessage

from perdure.cli.importing.conversation import (
    Conversation,
    MalformedPart,
    build_conversation_without_messages,
    build_imported_message,
    format_placeholder,
    get_by_path,
    parse_timestamp,
    replace_surrogates,
    shorten_line,
)

_ROLES: Final = ("user", "assistant", "system")
_DETAILS_ELEMENT: Final = re.compile(r'<details type="(\w+)"[^>]*>.*?</details>\s*', re.DOTALL)
"""Matches the HTML elements, within the text of an answer, in which Open WebUI stores the thinking
and the code of a model."""
_LIBRECHAT_ROOT: Final = (
    # Parent id of a conversation's first message in a LibreChat export.
    "00000000-0000-0000-0000-000000000000"
)


def is_open_webui_chat_export(value: Mapping[str, Any]) -> bool:
    """Return whether an object is a chat that Open WebUI exported.

    Open WebUI may export a chat directly, or as the value of the key `chat` in an outer object.
    """
    return "history" in get_by_path(value, dict, "chat") or "messages" in get_by_path(
        value, dict, "history"
    )


def build_open_webui_conversation(export: Mapping[str, Any]) -> Conversation:
    """Convert a chat exported by Open WebUI to a `Conversation`, including all branches."""
    chat = get_by_path(export, dict, "chat") or export
    history = get_by_path(chat, dict, "history")
    tree = get_by_path(history, dict, "messages")
    fields = {**chat, **{k: v for k, v in export.items() if k not in ("chat", "history")}}
    fields["created_at"] = fields.get("created_at") or fields.get("timestamp")
    models = [model for model in get_by_path(chat, list, "models") if isinstance(model, str)]
    fields["model"] = models[0] if models else None
    names = {
        "title": "title",
        "model": "model",
        "create_time": "created_at",
        "update_time": "updated_at",
    }
    conversation = build_conversation_without_messages(
        export.get("id") or chat.get("id"), fields, names, sorted(tree)
    )
    if not isinstance(history.get("messages"), dict):
        conversation.add_problem("'history.messages' is not a JSON object")
    conversation.convert_and_add_messages(
        (
            (replace_surrogates(key), get_by_path(message, str, "parentId") or None, message)
            for key, message in tree.items()
        ),
        _convert_open_webui_message,
        get_by_path(history, str, "currentId"),
    )
    return conversation


def _convert_open_webui_message(
    message_id: str, message: Any, conversation: Conversation
) -> list[BaseMessage]:
    """Convert an Open WebUI message, or return an empty list if it contains nothing to import.

    Parts of the message that are not imported are counted in the conversation's `left_out`.

    Raises:
        MalformedPart: The role is unknown, or the content is not text.
    """
    role = get_by_path(message, dict).get("role")
    if role not in _ROLES:
        raise MalformedPart(f"unknown role {shorten_line(str(role), 40)!r}")
    text = message.get("content")
    if not isinstance(text, str):
        raise MalformedPart("no content" if text is None else "content is not text")
    for kind in _DETAILS_ELEMENT.findall(text):
        conversation.left_out[kind] += 1
    names = [get_by_path(file, str, "name") or get_by_path(file, str, "file", "filename")
             for file in get_by_path(message, list, "files")]  # fmt: skip
    error = message.get("error")
    error_text = get_by_path(error, str, "content") if isinstance(error, dict) else ""
    lines = [
        *(format_placeholder("file", name) for name in names if name),
        _DETAILS_ELEMENT.sub("", text).strip(),
    ]
    lines += [format_placeholder("error", error_text)] if error_text else []
    return _build_list_of_message_unless_empty(
        role, lines, message_id, message, message.get("timestamp")
    )


def is_librechat(value: Mapping[str, Any]) -> bool:
    """Return whether a JSON object is a LibreChat conversation with at least one message."""
    return "conversationId" in value and any(
        "messageId" in get_by_path(message, dict)
        for message in get_by_path(value, list, "messages")
    )


def build_librechat_conversation(export: Mapping[str, Any]) -> Conversation:
    """Convert a LibreChat conversation to a `Conversation`, including all branches.

    In the exported conversation, messages may be nested in other messages.
    """
    flat = [*_iter_nested_messages_with_parent_ids(export["messages"], None)]
    names = {
        "title": "title",
        "model": "model",
        "create_time": "createdAt",
        "update_time": "updatedAt",
    }
    fields = {**export, **get_by_path(export, dict, "options")} if "title" not in export else export
    conversation = build_conversation_without_messages(
        export.get("conversationId"), fields, names, str(flat)[:10_000]
    )
    exported_messages: list[tuple[str, Any, Any]] = []
    times: dict[str, float] = {}
    for number, (message, outer_id) in enumerate(flat):
        key = get_by_path(message, str, "messageId") or f"{conversation.id}-{number}"
        times[key] = parse_timestamp(get_by_path(message, dict).get("createdAt")) or 0.0
        parent_id = get_by_path(message, dict).get("parentMessageId", outer_id)
        exported_messages.append((key, parent_id, message))
    # The main branch ends at the message with the latest timestamp or, if no message has a
    # timestamp, at the last message in the export.
    newest = max(times, key=lambda key: times[key], default="") if any(times.values()) else ""
    conversation.convert_and_add_messages(
        exported_messages, _convert_librechat_message, newest, root_id=_LIBRECHAT_ROOT
    )
    return conversation


def _iter_nested_messages_with_parent_ids(
    messages: Any, top_parent_id: str | None
) -> Iterator[tuple[Any, str | None]]:
    """Yield the messages in a list, including those nested at any depth under `children`.

    Yields:
        A message, and the id of the message in which it is nested. For a message that is not
        nested, the id is `top_parent_id`.
    """
    pending = [
        (message, top_parent_id) for message in reversed(get_by_path({"m": messages}, list, "m"))
    ]
    while pending:
        message, above = pending.pop()
        yield message, above
        key = get_by_path(message, str, "messageId")
        pending += [(child, key) for child in reversed(get_by_path(message, list, "children"))]


def _convert_librechat_message(
    message_id: str, message: Any, conversation: Conversation
) -> list[BaseMessage]:
    """Convert a LibreChat message, or return an empty list if it contains nothing to import.

    Parts of the message that are skipped are counted in the conversation's `left_out`, and
    malformed parts are added to the conversation's `problems`.

    Raises:
        MalformedPart: The message is not an object, or its sender is missing.
    """
    if not isinstance(message, dict):
        raise MalformedPart("the message is not a JSON object")
    is_user = message.get("isCreatedByUser")
    role = "user" if is_user is True or message.get("sender") == "User" else "assistant"
    if not isinstance(is_user, bool) and not isinstance(message.get("sender"), str):
        raise MalformedPart("no sender")
    lines = [
        format_placeholder("file", get_by_path(f, str, "filename"))
        for f in get_by_path(message, list, "files")
    ]
    parts = get_by_path(message, list, "content") or [{"type": "text", "text": message.get("text")}]
    for part in parts:
        kind, text = get_by_path(part, str, "type"), get_by_path(part, dict).get("text")
        text = get_by_path(text, str, "value") if isinstance(text, dict) else text
        if kind == "text" and isinstance(text, str):
            lines.append(text)
        elif kind in ("think", "tool_call", "agent_update"):
            conversation.left_out[kind] += 1
        elif kind in ("image_file", "image_url", "error"):
            lines.append(
                format_placeholder(kind.partition("_")[0], get_by_path(part, str, "error"))
            )
        else:
            problem = (
                "no content" if kind == "text" else f"unknown content {shorten_line(kind, 40)!r}"
            )
            conversation.add_problem(problem, message_id)
    return _build_list_of_message_unless_empty(
        role, lines, message_id, message, message.get("createdAt")
    )


def _build_list_of_message_unless_empty(
    role: str,
    lines: Sequence[str],
    message_id: str,
    exported_message: Mapping[str, Any],
    created_at: Any,
) -> list[BaseMessage]:
    """Return a list with one message, or an empty list if all lines of the text are blank.

    A message of the model gets the name of the model from the exported message.
    """
    text = "\n".join(line for line in lines if line.strip())
    if not text:
        return []
    is_answer = role == "assistant"
    return [
        build_imported_message(
            role,
            text,
            message_id,
            create_time=parse_timestamp(created_at),
            model_name=get_by_path(exported_message, str, "model") if is_answer else "",
        )
    ]
