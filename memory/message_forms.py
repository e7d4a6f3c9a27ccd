"""Read messages in the forms of OpenAI, LangChain and LangGraph, and values of JSON beside them."""

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

from perdure.memory.thread_messages import time_of

Kind = TypeVar("Kind", str, int, dict[str, Any], list[Any])
_NUMBER: Final = re.compile(
    r"\d{9,19}(\.\d+)?"
)  # text that is a moment, and no date such as 20240501
_LATEST_S: Final = 1e11  # seconds since 1970, year 5138; a larger number has a smaller unit

CREATED: Final = "create_time"  # in a message's `response_metadata`: when it was said

EXACT: Final = "langchain"
"""The key of a message for the fields that OpenAI's form does not have."""
_ROLES: Final = ("user", "assistant", "system", "developer", "tool", "function")
_OTHER_ROLES: Final = {"human": "user", "ai": "assistant"}
_INSTEAD: Final = ("content", "tool_calls", "function_call", "refusal", "audio")
_TYPES: Final = ("human", "ai", "system", "tool", "function", "chat", "remove")
_CHUNK: Final = "MessageChunk"  # suffix of the types of streamed messages, such as AIMessageChunk
_TIMES: Final = ("at", "timestamp", "created_at")
"""The keys for the time of a message, beside `CREATED`, which is kept in the message itself."""
_TIMED_PARTS: Final = ("data", "response_metadata", "additional_kwargs")


class Odd(ValueError):
    """A part of a file that is not as expected: it is left out, counted and named."""


def is_message(value: Any) -> bool:
    """Return whether a value has one of the forms of a message."""
    return isinstance(value, dict) and ("role" in value or _langchain_type(value) is not None)


def time_of_message(line: Any) -> float | None:
    """Return the time of a message, in seconds since 1970, or None."""
    for part in (line, *(find(line, dict, name) for name in _TIMED_PARTS)):
        for name in (CREATED, *_TIMES) if isinstance(part, dict) else ():
            if (at := seconds(part.get(name))) is not None:
                return at
    return None


def read_message(line: Any, last: BaseMessage | None, *place: object) -> BaseMessage:
    """Read an object as a message.

    Args:
        line: The object.
        last: The message before it.
        place: If the message has no id, the id is made of these values, the role and the content.

    Raises:
        Odd: The object is not a message.
    """
    if isinstance(line, dict) and "role" not in line and (kind := _langchain_type(line)):
        return _read_langchain(kind, line, *place)
    form = _checked(line)
    key = whole(str(line.get("id") or made_up_id(*place, line["role"], line.get("content"))))
    form |= {"id": key, "content": form.get("content") or ""}
    _take_out_times(form)
    if isinstance(form.get("function_call"), dict) and not form.get("tool_calls"):
        call = form.pop("function_call")
        form["tool_calls"] = [{"id": f"call-{key}", "type": "function", "function": call}]
    if form["role"] == "function":  # it answers the single call of the message before it
        if not (isinstance(last, AIMessage) and last.tool_calls):
            raise Odd("the answer of a function that was not called")
        form |= {"role": "tool", "tool_call_id": last.tool_calls[0]["id"]}
    return _convert(form, form.pop(EXACT, None))


def _convert(form: dict[str, Any], fields: Any) -> BaseMessage:
    """Build a message from OpenAI's form; `fields` replace fields of its class."""
    try:
        (message,) = convert_to_messages([form])
        if fields is not None:
            kind = fields.get("type", message.type)
            plain = message.model_dump() if kind == message.type else {}
            data = {**plain, **fields, "id": form["id"]}
            (message,) = messages_from_dict([{"type": kind, "data": data}])
            if isinstance(message, RemoveMessage):
                raise ValueError("it is not a message")
    except json.JSONDecodeError as exc:
        raise Odd("the arguments of a call are not JSON") from exc
    except Exception as exc:  # of whatever kind: langchain-core raises many for a malformed message
        part = "tool_calls" if form.get("tool_calls") else form["role"]
        raise Odd(f"malformed message ({part})") from exc
    return message


def _take_out_times(form: dict[str, Any]) -> None:
    """Remove the times of a message from its fields; `CREATED` stays, in its metadata."""
    for name in _TIMES:
        if seconds(form.get(name)) is not None:
            del form[name]
    if (at := seconds(form.get(CREATED))) is not None:
        form.pop(CREATED)
        form["response_metadata"] = {**find(form, dict, "response_metadata"), CREATED: at}


def _langchain_type(value: Mapping[str, Any]) -> str | None:
    """Return the type of a message in a form of LangChain, or None for any other object.

    The forms are `{"type": "human", "content": …}` (LangGraph's server and SDK), `{"type": "human",
    "data": {…}}` (`messages_to_dict`), and the constructor of `dumpd`.
    """
    kind = value.get("type")
    if kind == "constructor" and "lc" in value:
        kind = find(value, str, "kwargs", "type")
        names = find(value, list, "id")
        name = str(names[-1] if names else "").removesuffix("Chunk").removesuffix("Message")
        kind = kind or name.lower()
    elif "content" not in value and not isinstance(value.get("data"), dict):
        return None
    is_known = kind in _TYPES or (isinstance(kind, str) and kind.endswith(_CHUNK))
    return kind if is_known else None


def _read_langchain(kind: str, line: Mapping[str, Any], *place: object) -> BaseMessage:
    """Read a message in one of LangChain's own forms, with all its fields."""
    name = "kwargs" if "lc" in line else "data"
    fields = dict(line[name] if isinstance(line.get(name), dict) else line)
    content = fields.get("content")
    if content is None and kind.lower().startswith("ai") and fields.get("tool_calls"):
        content = fields["content"] = ""
    if kind == "remove":
        raise Odd("the removal of a message")
    if not isinstance(content, str | list):
        raise Odd(
            "no content" if content is None else "content is neither text nor a list of parts"
        )
    key = fields.get("id") or line.get("id") if name == "data" else fields.get("id")
    fields["id"] = whole(str(key or made_up_id(*place, kind, content)))
    _take_out_times(fields)
    for part in ("response_metadata", "additional_kwargs"):
        fields[part] = find(fields, dict, part)
    try:
        (message,) = messages_from_dict([{"type": kind, "data": {**fields, "type": kind}}])
        if isinstance(message, BaseMessageChunk):
            message = message_chunk_to_message(message)
    except Exception as exc:  # of whatever kind: langchain-core raises many for a malformed message
        raise Odd(f"malformed message ({short(kind, 40)})") from exc
    return message


def _checked(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise Odd("the message is not an object")
    role, content = message.get("role"), message.get("content")
    role = _OTHER_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in _ROLES:
        raise Odd(f"unknown role {short(str(role), 40)!r}")
    if content is None and not (role == "assistant" and any(n in message for n in _INSTEAD)):
        raise Odd("no content")
    parts = all(isinstance(part, str | dict) for part in find(content, list))
    if not (parts and isinstance(content, str | list | None)):
        raise Odd("content is neither text nor a list of parts")
    if isinstance(content, list):
        content = [_read_part(part) for part in content]
    return {**message, "role": role, **({"content": content} if "content" in message else {})}


def _read_part(part: Any) -> Any:
    """Return a part of the Responses API in the form that chat completions have."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_text", "output_text"):
        return {"type": "text", "text": find(part, str, "text")}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    return part


# -- values of JSON that may be anything


def find(value: Any, kind: type[Kind], *path: str) -> Kind:
    """The value at a path of keys, if it is of this kind, else an empty one."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    part = value if isinstance(value, kind) else kind()
    return whole(part) if isinstance(part, str) else part


def whole(text: str) -> str:
    """Text without halves of characters, which no file can hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def seconds(value: Any) -> float | None:
    """Return a moment as seconds since 1970, or None if the value is no moment.

    The value is text in ISO 8601, or a number of seconds, milliseconds, microseconds or nanoseconds
    since 1970, which its size tells apart. A number may be written as text.
    """
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, int | float) and math.isfinite(value):
        while abs(value) >= _LATEST_S:
            value /= 1000
    at = time_of(value) if isinstance(value, str | int | float) else None
    return None if at is None else at.timestamp()


def created(message: BaseMessage) -> float | None:
    """When a message says that it was said: s since 1970."""
    return seconds(message.response_metadata.get(CREATED))


def made_up_id(*parts: object) -> str:
    """An id for what has none: the same for the same parts."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, "perdure:" + json.dumps(parts, default=str)))


def short(text: Any, limit: int = 200) -> str:
    """Text on one line, cut if it is long."""
    flat = " ".join(str(text).split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
