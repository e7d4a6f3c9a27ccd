"""Read messages in the JSON formats of OpenAI, LangChain and LangGraph."""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    BaseMessageChunk,
    RemoveMessage,
    convert_to_messages,
    message_chunk_to_message,
    messages_from_dict,
)

from perdure.memory.thread_messages import parse_time

Kind = TypeVar("Kind", str, int, dict[str, Any], list[Any])
# matches strings that are Unix timestamps in seconds or a smaller unit, but not dates such as
# 20240501
_NUMBER: Final = re.compile(r"\d{9,19}(\.\d+)?")
# Smallest number that is interpreted as a Unix timestamp in milliseconds or a smaller unit rather
# than in seconds. In seconds, it would represent a date in the year 5138.
_MIN_MILLISECONDS: Final = 1e11

CREATED: Final = "create_time"
"""The key in a message's `response_metadata` for the creation time, in seconds since 1970."""

EXACT: Final = "langchain"
"""The key in a message in OpenAI's format for those LangChain fields that OpenAI's format lacks."""
_ROLES: Final = ("user", "assistant", "system", "developer", "tool", "function")
_OTHER_ROLES: Final = {"human": "user", "ai": "assistant"}
# Keys of an assistant message in OpenAI's format. Each assistant message must have at least one of
# these keys.
_ANSWER_KEYS: Final = ("content", "tool_calls", "function_call", "refusal", "audio")
_TYPES: Final = ("human", "ai", "system", "tool", "function", "chat", "remove")
# suffix of the class names of streamed messages, such as AIMessageChunk
_CHUNK: Final = "MessageChunk"
_TIMES: Final = ("at", "timestamp", "created_at")
"""Other keys under which a message may have its time.

When a message is read, the value under `CREATED` is moved to its `response_metadata`. The values
under the keys in `_TIMES` are removed.
"""
# keys of nested objects in a message that may contain the message's timestamp
_TIMED_PARTS: Final = ("data", "response_metadata", "additional_kwargs")


class MalformedPart(ValueError):
    """Raised if a message, or another value in a message file, is malformed.

    When a message file is read, malformed messages and values are skipped and reported.
    """


def is_message(value: Any) -> bool:
    """Return whether a value has a format that `convert_object_to_message` accepts."""
    return isinstance(value, dict) and ("role" in value or _find_langchain_type(value) is not None)


def find_message_time(value: Any) -> float | None:
    """Return a message's time as a Unix timestamp in seconds, or None if it has no time."""
    for part in (value, *(get_by_path(value, dict, name) for name in _TIMED_PARTS)):
        for name in (CREATED, *_TIMES) if isinstance(part, dict) else ():
            if (timestamp := parse_timestamp(part.get(name))) is not None:
                return timestamp
    return None


def convert_object_to_message(
    value: Any, previous_message: BaseMessage | None, *derived_id_parts: object
) -> BaseMessage:
    """Read an object as a message.

    Args:
        value: The object, in a form of OpenAI, LangChain or LangGraph.
        previous_message: The message before the object in the conversation, or None.
        *derived_id_parts: If the message has no id, its id is derived from these values, the
            role (or LangChain's message type) and the content.

    Raises:
        MalformedPart: The object is not a message.
    """
    if isinstance(value, dict) and "role" not in value and (kind := _find_langchain_type(value)):
        return _parse_langchain_message(kind, value, *derived_id_parts)
    form = _check_openai_message(value)
    key = replace_surrogates(
        str(value.get("id") or derive_id(*derived_id_parts, value["role"], value.get("content")))
    )
    form |= {"id": key, "content": form.get("content") or ""}
    _remove_message_times(form)
    if isinstance(form.get("function_call"), dict) and not form.get("tool_calls"):
        call = form.pop("function_call")
        form["tool_calls"] = [{"id": f"call-{key}", "type": "function", "function": call}]
    # Treat a function message as the result of the function call in the previous message.
    if form["role"] == "function":
        if not (isinstance(previous_message, AIMessage) and previous_message.tool_calls):
            raise MalformedPart(
                "the message is a function result, but the previous message has no function call"
            )
        form |= {"role": "tool", "tool_call_id": previous_message.tool_calls[0]["id"]}
    return _convert_openai_message_to_langchain(form, form.pop(EXACT, None))


def _convert_openai_message_to_langchain(
    openai_message: dict[str, Any], langchain_overrides: Any
) -> BaseMessage:
    """Build a LangChain message from a message in OpenAI's format.

    If `langchain_overrides` is not None, it contains LangChain fields that replace the message's
    own fields.
    """
    try:
        (message,) = convert_to_messages([openai_message])
        if langchain_overrides is not None:
            kind = langchain_overrides.get("type", message.type)
            defaults = message.model_dump() if kind == message.type else {}
            data = {**defaults, **langchain_overrides, "id": openai_message["id"]}
            (message,) = messages_from_dict([{"type": kind, "data": data}])
            if isinstance(message, RemoveMessage):
                raise ValueError("a RemoveMessage cannot be part of an imported conversation")
    except json.JSONDecodeError as exc:
        raise MalformedPart("the arguments of a tool call are not valid JSON") from exc
    except Exception as exc:  # langchain-core may raise any exception for a malformed message.
        part = "tool_calls" if openai_message.get("tool_calls") else openai_message["role"]
        raise MalformedPart(f"malformed message ({part})") from exc
    return message


def _remove_message_times(message_fields: dict[str, Any]) -> None:
    """Remove timestamps from a message's top-level fields, and store the creation time as metadata.

    If the top-level fields contain the creation time under the key `CREATED`, the time is moved to
    the same key of the message's `response_metadata`. Timestamps that the message contains under
    the keys in `_TIMES` are removed without being stored elsewhere.
    """
    for name in _TIMES:
        if parse_timestamp(message_fields.get(name)) is not None:
            del message_fields[name]
    if (timestamp := parse_timestamp(message_fields.get(CREATED))) is not None:
        message_fields.pop(CREATED)
        metadata = get_by_path(message_fields, dict, "response_metadata")
        message_fields["response_metadata"] = {**metadata, CREATED: timestamp}


def _find_langchain_type(value: Mapping[str, Any]) -> str | None:
    """Return the message type of an object in a LangChain format, or None for other objects.

    The formats are `{"type": "human", "content": …}` (from LangGraph's server and SDK), `{"type":
    "human", "data": {…}}` (from `messages_to_dict`), and the constructor objects of `dumpd`.
    """
    kind = value.get("type")
    if kind == "constructor" and "lc" in value:
        kind = get_by_path(value, str, "kwargs", "type")
        names = get_by_path(value, list, "id")
        name = str(names[-1] if names else "").removesuffix("Chunk").removesuffix("Message")
        kind = kind or name.lower()
    elif "content" not in value and not isinstance(value.get("data"), dict):
        return None
    is_known = kind in _TYPES or (isinstance(kind, str) and kind.endswith(_CHUNK))
    return kind if is_known else None


def _parse_langchain_message(
    message_type: str, message_dict: Mapping[str, Any], *derived_id_parts: object
) -> BaseMessage:
    """Parse a message in one of LangChain's own formats, keeping all its fields."""
    name = "kwargs" if "lc" in message_dict else "data"
    fields = dict(message_dict[name] if isinstance(message_dict.get(name), dict) else message_dict)
    content = fields.get("content")
    if content is None and message_type.lower().startswith("ai") and fields.get("tool_calls"):
        content = fields["content"] = ""
    if message_type == "remove":
        raise MalformedPart("the removal of a message")
    if not isinstance(content, str | list):
        raise MalformedPart(
            "no content" if content is None else "content is neither text nor a list of parts"
        )
    key = fields.get("id") or message_dict.get("id") if name == "data" else fields.get("id")
    fields["id"] = replace_surrogates(
        str(key or derive_id(*derived_id_parts, message_type, content))
    )
    _remove_message_times(fields)
    for part in ("response_metadata", "additional_kwargs"):
        fields[part] = get_by_path(fields, dict, part)
    try:
        (message,) = messages_from_dict(
            [{"type": message_type, "data": {**fields, "type": message_type}}]
        )
        if isinstance(message, BaseMessageChunk):
            message = message_chunk_to_message(message)
    except Exception as exc:  # langchain-core may raise any exception for a malformed message.
        raise MalformedPart(f"malformed message ({shorten_line(message_type, 40)})") from exc
    return message


def _check_openai_message(message: Any) -> dict[str, Any]:
    """Validate a message in OpenAI's format, and return it with its role mapped to one of `_ROLES`.

    Raises:
        MalformedPart: The value is not an object, its role is unknown, or it has no content.
    """
    if not isinstance(message, dict):
        raise MalformedPart("the message is not a JSON object")
    role, content = message.get("role"), message.get("content")
    role = _OTHER_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in _ROLES:
        raise MalformedPart(f"unknown role {shorten_line(str(role), 40)!r}")
    if content is None and not (
        role == "assistant" and any(key in message for key in _ANSWER_KEYS)
    ):
        raise MalformedPart("no content")
    has_parts = all(isinstance(part, str | dict) for part in get_by_path(content, list))
    if not (has_parts and isinstance(content, str | list | None)):
        raise MalformedPart("content is neither text nor a list of parts")
    if isinstance(content, list):
        content = [_convert_responses_api_part_to_chat_part(part) for part in content]
    return {**message, "role": role, **({"content": content} if "content" in message else {})}


def _convert_responses_api_part_to_chat_part(part: Any) -> Any:
    """Convert a content part from OpenAI's Responses API to the Chat Completions format."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_text", "output_text"):
        return {"type": "text", "text": get_by_path(part, str, "text")}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    return part


# -- values of any JSON


def get_by_path(value: Any, kind: type[Kind], *path: str) -> Kind:
    """Return the value at a path of nested keys, or an empty value of the type `kind`.

    If the path does not exist, or if its value is not of the type `kind`, return an empty value of
    this type, such as `""` or `{}`. Lone surrogates in text are replaced.
    """
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    part = value if isinstance(value, kind) else kind()
    return replace_surrogates(part) if isinstance(part, str) else part


def replace_surrogates(text: str) -> str:
    """Replace each lone surrogate in a text with "?", because UTF-8 cannot encode it."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def parse_timestamp(value: Any) -> float | None:
    """Return a value as a Unix timestamp in seconds, or None if the value is not a timestamp.

    The value can be an ISO 8601 string, or a Unix timestamp in seconds, milliseconds, microseconds
    or nanoseconds. The unit of a numeric timestamp is inferred from its magnitude. A number can
    also be given as a string.
    """
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, int | float) and math.isfinite(value):
        while abs(value) >= _MIN_MILLISECONDS:
            value /= 1000
    time = parse_time(value) if isinstance(value, str | int | float) else None
    return None if time is None else time.timestamp()


def get_creation_time(message: BaseMessage) -> float | None:
    """Return the creation time in a message's metadata as a Unix timestamp in seconds, or None."""
    return parse_timestamp(message.response_metadata.get(CREATED))


def derive_id(*parts: object) -> str:
    """Derive a UUID from `parts`, for a message or conversation without an id.

    Equal parts give equal ids.
    """
    return str(uuid.uuid5(uuid.NAMESPACE_URL, "perdure:" + json.dumps(parts, default=str)))


def shorten_line(text: Any, limit: int = 200) -> str:
    """Return the text on one line.

    If the line is longer than `limit` characters, the end is cut off and replaced by an ellipsis.
    """
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
