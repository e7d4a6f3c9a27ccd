"""Check the messages in a run's input or command before anything is stored.

LangGraph stores an input or a command's update before it passes the values to the channels'
reducers. If a reducer rejects a stored update, it raises the same error again whenever the thread's
state is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any, Final

from langchain_core.messages import BaseMessage, convert_to_messages

from perdure.errors import InvalidUpdate
from perdure.server.graphs import Graph
from perdure.server.runs.run_request import RunRequest

_MESSAGE_KEYS: Final = {"role", "type", "content", "lc"}
"""The keys by which a JSON object is recognised as a message.

A message has at least one of these keys.
"""
# The JSON form of a `perdure.memory.Keep` object that keeps all messages. Only the reducers in
# `perdure.memory` accept this JSON form.
_KEEP_JSON: Final = {"type": "keep", "from": 0, "to": None}
_EXAMPLE_MESSAGE: Final = {"role": "user", "content": ""}


def find_possibly_malformed_channel_values(request: RunRequest) -> list[tuple[str, Any]]:
    """Find the channel values in a run request that could contain malformed messages.

    The returned list contains a `(channel, value)` pair for each value that could contain malformed
    messages.

    If the returned list is empty, the caller can skip loading the graph and calling
    `refuse_malformed_messages`. The returned list omits values that LangChain can convert to
    messages. Input for a channel other than `messages` is checked only if it looks like a list of
    messages.
    """
    has_command = request.command is not None
    return [
        (name, value)
        for name, value in _iter_channel_values_of_request(request)
        if (has_command or name == "messages" or _resembles_message_list(value))
        and _find_message_conversion_error(value) is not None
    ]


def refuse_malformed_messages(graph: Graph, channel_values: list[tuple[str, Any]]) -> None:
    """Raise InvalidUpdate if a message channel would receive a malformed value.

    Raises:
        InvalidUpdate: A part of a value is not a message, or a channel's reducer raised
            `InvalidUpdate` when the value was applied to an empty copy of the channel.
    """
    for name, value in channel_values:
        channel: Any = graph.channels.get(name)
        if channel is None or not _converts_messages(channel):
            continue
        try:
            channel.copy().update([deepcopy(value)])
        except Exception as exc:  # A user-defined reducer can raise any exception.
            # A failure does not prove that the value is malformed. For example, a valid removal of
            # an existing message fails, because the copy of the channel is empty. Therefore, refuse
            # the value only if the reducer raised `InvalidUpdate`, or if a part of the value is not
            # a message.
            accepts_keep = _apply_update_to_empty_channel(channel, [dict(_KEEP_JSON)]) is not None
            problem = (
                exc
                if isinstance(exc, InvalidUpdate)
                else _find_message_conversion_error(value, skips_keep_messages=accepts_keep)
            )
            if problem is not None:
                reason = f"{type(problem).__name__}: {problem!s:.300}"
                raise InvalidUpdate(
                    f"the value of the channel {name!r} is {value!r:.80}; expected messages, "
                    f'such as [{{"role": "user", "content": "hello"}}] ({reason})'
                ) from exc


def _iter_channel_values_of_request(request: RunRequest) -> Iterator[tuple[str, Any]]:
    """Yield a `(channel, value)` pair for each channel that a run request updates.

    If the request has a command, the channel updates are in the command's field `update`, as a
    mapping or a list of `(channel, value)` pairs. Without a command, the run's input maps each
    channel to its update.
    """
    values = request.input if request.command is None else request.command.update
    if isinstance(values, Mapping):
        yield from values.items()
    elif request.command is not None:
        yield from values or ()


def _resembles_message_list(value: Any) -> bool:
    """Return whether a value is a list with at least one mapping that looks like a message."""
    return isinstance(value, list) and any(
        isinstance(element, Mapping) and _MESSAGE_KEYS & element.keys() for element in value
    )


def _find_message_conversion_error(
    value: Any, *, skips_keep_messages: bool = False
) -> Exception | None:
    """Return the exception raised by converting a value to messages, or None on success.

    Args:
        value: A message or a list of messages, as JSON or as objects.
        skips_keep_messages: Whether to skip the JSON of a `Keep`, because the reducer of the
            channel accepts it.
    """
    values = value if isinstance(value, list) else [value]
    if skips_keep_messages:
        values = [
            element
            for element in values
            if not isinstance(element, Mapping) or element.get("type") != "keep"
        ]
    try:
        convert_to_messages(values)
    except Exception as exc:  # Malformed messages cause many types of exceptions in LangChain.
        return exc
    return None


def _converts_messages(channel: Any) -> bool:
    """Return whether a channel's reducer converts JSON to messages, as `add_messages` does."""
    value = _apply_update_to_empty_channel(channel, [dict(_EXAMPLE_MESSAGE)])
    return isinstance(value, list) and all(isinstance(message, BaseMessage) for message in value)


def _apply_update_to_empty_channel(channel: Any, update: Any) -> Any:
    """Apply an update to a copy of an empty channel, and return the channel's new value.

    Return None if the channel's reducer raises an exception.
    """
    with suppress(Exception):  # A user-defined reducer can raise any exception.
        channel_copy = channel.copy()
        channel_copy.update([update])
        return channel_copy.get()
    return None
