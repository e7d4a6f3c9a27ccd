"""Reducers of a state's lists, which take one more kind of update: a *keep* names what stays."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Annotated, Any, NotRequired

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, ToolMessage
from langgraph.channels import UntrackedValue
from langgraph.graph import add_messages
from typing_extensions import TypedDict  # with typing's, Python 3.11 gives no JSON schema

from perdure.errors import InvalidUpdate
from perdure.memory.message_updates import merge_duplicates
from perdure.memory.tool_calls import call_ids

Reducer = Callable[[Any, Any], Any]


class Keep(dict[str, Any]):
    """An update that keeps the slice `start:end` of a list and drops the rest.

    It is a plain JSON object, `{"type": "keep", "from": -5, "to": null}`, and is read back as one.

    >>> Keep(start=-5)
    Keep(start=-5, end=None)
    """

    def __init__(self, start: int | None = None, end: int | None = None) -> None:
        super().__init__({"type": "keep", "from": start, "to": end})
        _check(self)

    def __repr__(self) -> str:
        return f"Keep(start={self['from']!r}, end={self['to']!r})"


def messages(left: Any, right: Any) -> Any:
    """Reducer for a list of messages: `Annotated[list[AnyMessage], messages]`.

    The update may be everything that `add_messages` accepts (messages in any form,
    `RemoveMessage`, `REMOVE_ALL_MESSAGES`), and `Keep(...)` or its JSON form, alone or in a list.
    The returned messages have unique ids, because a later message replaces an earlier message with
    the same id. This also holds after `REMOVE_ALL_MESSAGES`, and for duplicates within `left`.

    Raises:
        InvalidUpdate: A `Keep` would separate a tool call from its result.
    """
    value: Any = [] if left is None else left
    if not _has_keep(right):
        return _merge_messages(value, right)
    value = _merge_messages(value, [])
    for part in _parts(right):
        if isinstance(part, Mapping):
            value = _cut_messages(list(value), part)
        else:
            value = _merge_messages(value, part)
    return value


def _merge_messages(left: Any, right: Any) -> Any:
    """Return the result of `add_messages`, with unique ids.

    `add_messages` itself returns the messages that follow `REMOVE_ALL_MESSAGES` unchanged. It
    neither merges these messages nor applies removals among them.
    """
    merged: Any = add_messages(left, right)
    if merge_duplicates(merged) is merged:
        return merged
    left = merge_duplicates(add_messages(left, []))  # type: ignore[arg-type]
    merged = add_messages(left, right)
    return add_messages([], merged)


def keepable(reducer: Reducer = operator.add) -> Reducer:
    """Add keeps to the reducer of any list channel.

    >>> keepable()(["a", "b", "c"], [Keep(start=-1), "d"])
    ['c', 'd']
    """

    def reduce(left: Any, right: Any) -> Any:
        value = [] if left is None else left
        if not _has_keep(right):
            return reducer(value, right)
        for part in _parts(right):
            value = list(value)[_slice(part)] if isinstance(part, Mapping) else reducer(value, part)
        return value

    return reduce


def append_new(left: Any, right: Any) -> list[Any]:
    """Append the elements that are not in the list yet. This is a reducer for lists of ids.

    With `operator.add`, a list that a subgraph shares with its parent doubles at each call of the
    subgraph, because the subgraph returns the whole list and not only its new elements.

    >>> append_new(["a", "b"], ["a", "b", "c"])
    ['a', 'b', 'c']
    """
    for name, ids in (("list", left), ("update", right)):
        if isinstance(ids, str | bytes) or not isinstance(ids, Iterable | None):
            raise InvalidUpdate(f"the {name} is {ids!r:.80}; expected a list of ids")
    try:
        return list(dict.fromkeys(chain(left or (), right or ())))
    except TypeError as exc:
        raise InvalidUpdate(
            f"the update {right!r:.80} of a channel, or the channel's list, contains an element "
            f"that is not hashable ({exc}); expected a list of ids"
        ) from exc


class ChatState(TypedDict):
    """The smallest state of a chat; what only the model is shown is in no checkpoint."""

    messages: Annotated[list[AnyMessage], messages]
    llm_input_messages: NotRequired[Annotated[list[AnyMessage], UntrackedValue]]


def _is_keep(update: Any) -> bool:
    return isinstance(update, Mapping) and update.get("type") == "keep"


def _has_keep(update: Any) -> bool:
    return _is_keep(update) or (isinstance(update, list) and any(map(_is_keep, update)))


def _parts(update: Any) -> list[Any]:
    """An update as runs of ordinary elements and single keeps, in order; keeps checked first."""
    parts: list[Any] = []
    for element in update if isinstance(update, list) else [update]:
        if _is_keep(element):
            parts.append(_check(element))
        elif parts and isinstance(parts[-1], list):
            parts[-1].append(element)
        else:
            parts.append([element])
    return parts


def _check(keep: Mapping[str, Any]) -> Mapping[str, Any]:
    whole = all(keep.get(key) is None or type(keep[key]) is int for key in ("from", "to"))
    if set(keep) - {"type", "from", "to"} or not whole:
        raise InvalidUpdate(
            f"{dict(keep)!r} is no keep; expected "
            '{"type": "keep", "from": int or null, "to": int or null}'
        )
    return keep


def _slice(keep: Mapping[str, Any]) -> slice:
    return slice(keep.get("from"), keep.get("to"))


def _cut_messages(value: list[BaseMessage], keep: Mapping[str, Any]) -> list[BaseMessage]:
    start, stop, _ = _slice(keep).indices(len(value))
    called: dict[str | None, int] = {}
    for index, message in enumerate(value):
        if isinstance(message, AIMessage):
            called |= dict.fromkeys(filter(None, call_ids(message)), index)
        elif isinstance(message, ToolMessage) and message.tool_call_id in called:
            call = called[message.tool_call_id]
            if (start <= call < stop) != (start <= index < stop):
                raise InvalidUpdate(
                    f"keeping messages {start} to {stop} would part tool call "
                    f"{message.tool_call_id!r} (message {call}) from its result (message {index}); "
                    "keep both or neither"
                )
    return value[start:stop]
