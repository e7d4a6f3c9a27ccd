"""Checks of the messages in the input or the command of a run, before anything is stored.

langgraph stores an input, and the update of a command, before the reducer of the channel is called.
If the reducer fails then, it fails again whenever the state of the thread is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any, Final

from langchain_core.messages import BaseMessage, convert_to_messages

from perdure.errors import InvalidUpdate
from perdure.server.graphs import Graph
from perdure.server.run_request import RunRequest

_MESSAGE_KEYS: Final = {"role", "type", "content", "lc"}
"""Keys of which a message in JSON has at least one."""
_KEEP: Final = {"type": "keep", "from": 0, "to": None}
_EXAMPLE: Final = {"role": "user", "content": ""}


def find_suspect_values(request: RunRequest) -> list[tuple[str, Any]]:
    """Return the channels and values of a request that may be malformed messages.

    Without one, `check_messages` has nothing to refuse, so that the graph need not be opened. Of an
    input, a channel of another name than `messages` counts only if its value resembles messages.
    """
    has_command = request.command is not None
    return [
        (name, value)
        for name, value in _iter_values(request)
        if (has_command or name == "messages" or _resembles_messages(value))
        and _find_problem(value) is not None
    ]


def check_messages(graph: Graph, suspects: list[tuple[str, Any]]) -> None:
    """Refuse malformed messages for channels of messages.

    Raises:
        InvalidUpdate: The reducer of a channel cannot apply one of the values, whatever the state.
    """
    for name, value in suspects:
        channel: Any = graph.channels.get(name)
        if channel is None or not _is_of_messages(channel):
            continue
        try:
            channel.copy().update([deepcopy(value)])
        except Exception as exc:  # reducers of users may raise any
            # removals and keeps, which are well-formed, may fail because the state is empty here
            keeps = _apply(channel, [dict(_KEEP)]) is not None
            problem = exc if isinstance(exc, InvalidUpdate) else _find_problem(value, keeps=keeps)
            if problem is not None:
                why = f"{type(problem).__name__}: {problem!s:.300}"
                raise InvalidUpdate(
                    f"the value of {name!r} is {value!r:.80}; expected messages, such as "
                    f'[{{"role": "user", "content": "hello"}}] ({why})'
                ) from exc


def _iter_values(request: RunRequest) -> Iterator[tuple[str, Any]]:
    """Yield the channels that an input or the update of a command names, with their values."""
    given = request.input if request.command is None else request.command.update
    if isinstance(given, Mapping):
        yield from given.items()
    elif request.command is not None:
        yield from given or ()


def _resembles_messages(value: Any) -> bool:
    """Return whether a value is a list with an object that may be a message."""
    return isinstance(value, list) and any(
        isinstance(each, Mapping) and _MESSAGE_KEYS & each.keys() for each in value
    )


def _find_problem(value: Any, *, keeps: bool = False) -> Exception | None:
    """Return the error with which a value cannot be converted to messages, or None.

    With `keeps`, the JSON of a `Keep` is left out, since the reducer of the channel takes it.
    """
    values = value if isinstance(value, list) else [value]
    if keeps:
        values = [v for v in values if not isinstance(v, Mapping) or v.get("type") != "keep"]
    try:
        convert_to_messages(values)
    except Exception as exc:  # langchain raises errors of many classes
        return exc
    return None


def _is_of_messages(channel: Any) -> bool:
    """Return whether a channel converts JSON to messages, as `add_messages` does."""
    value = _apply(channel, [dict(_EXAMPLE)])
    return isinstance(value, list) and all(isinstance(each, BaseMessage) for each in value)


def _apply(channel: Any, update: Any) -> Any:
    """Return the value of an empty channel after an update, or None if the update fails."""
    with suppress(Exception):  # reducers of users may raise any
        trial = channel.copy()
        trial.update([update])
        return trial.get()
    return None
