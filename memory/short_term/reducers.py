"""Reducers for the list channels of a graph's state.

The reducer `messages` and the reducers built by `keepable` accept ordinary updates and `Keep`
updates. A `Keep` update keeps only a slice of the list.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Annotated, Any, NotRequired

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, ToolMessage
from langgraph.channels import UntrackedValue
from langgraph.graph import add_messages

# Import `TypedDict` from `typing_extensions`, because pydantic on Python 3.11 creates no JSON
# schema for `typing.TypedDict`.
from typing_extensions import TypedDict

from perdure.errors import InvalidUpdate
from perdure.memory.short_term.message_updates import merge_duplicate_messages
from perdure.memory.tool_calls import list_call_ids

Reducer = Callable[[Any, Any], Any]
# A reducer for a list channel that also accepts `Keep` in updates.
ReducerAcceptingKeep = Reducer


class Keep(dict[str, Any]):
    """An update that keeps the slice `start:end` of a list and removes everything else.

    The JSON form of a `Keep` is, for example, `{"type": "keep", "from": -5, "to": null}`. Instead
    of a `Keep`, the reducers of `perdure.memory` also accept a plain dict with the keys `type`,
    `from` and `to`.

    >>> Keep(start=-5)
    Keep(start=-5, end=None)
    """

    def __init__(self, start: int | None = None, end: int | None = None) -> None:
        super().__init__({"type": "keep", "from": start, "to": end})
        _validate_keep_update(self)

    def __repr__(self) -> str:
        return f"Keep(start={self['from']!r}, end={self['to']!r})"


def messages(current_messages: Any, update: Any) -> Any:
    """Apply an update to a list of messages, and return the new list.

    Use this reducer in a state's schema: `Annotated[list[AnyMessage], messages]`.

    `update` can be anything that langgraph's `add_messages` accepts: messages in any form,
    `RemoveMessage` and `REMOVE_ALL_MESSAGES`. `update` can also be a `Keep`, as an object or as a
    dict, or a list that contains a `Keep`. If several messages have the same id, the last one
    replaces the others, so message ids are unique in the returned list. Message ids in the returned
    list are unique even if the update contains `REMOVE_ALL_MESSAGES` or `current_messages` contains
    duplicates.

    Raises:
        InvalidUpdate: A `Keep` is not valid, or would separate a tool call from its result.
    """
    value: Any = [] if current_messages is None else current_messages
    if not _has_keep(update):
        return _merge_messages(value, update)
    value = _merge_messages(value, [])
    return _apply_parts_of_update(value, update, _merge_messages, _select_messages_in_kept_range)


def _merge_messages(current_messages: Any, update: Any) -> Any:
    """Merge the update with `add_messages`, and return the messages without duplicate ids.

    If an update contains `REMOVE_ALL_MESSAGES`, langgraph's `add_messages` returns only the
    messages after the marker, without changing them. If an update contains `REMOVE_ALL_MESSAGES`,
    `add_messages` neither merges messages with the same id nor applies removals. If the result of
    `add_messages` contains duplicate ids, the messages are merged again.
    """
    merged: Any = add_messages(current_messages, update)
    if merge_duplicate_messages(merged) is merged:
        return merged
    current_messages = merge_duplicate_messages(add_messages(current_messages, []))  # type: ignore[arg-type]
    merged = add_messages(current_messages, update)
    return add_messages([], merged)


def keepable(reducer: Reducer = operator.add) -> ReducerAcceptingKeep:
    """Extend a list channel's reducer to also accept `Keep` in updates.

    >>> keepable()(["a", "b", "c"], [Keep(start=-1), "d"])
    ['c', 'd']
    """

    def reduce_with_keeps(current_list: Any, update: Any) -> Any:
        value = [] if current_list is None else current_list
        if not _has_keep(update):
            return reducer(value, update)
        return _apply_parts_of_update(
            value, update, reducer, lambda elements, keep: elements[_to_slice(keep)]
        )

    return reduce_with_keeps


def _apply_parts_of_update(
    value: Any,
    update: Any,
    reducer: Reducer,
    select_kept_range: Callable[[list[Any], Mapping[str, Any]], list[Any]],
) -> Any:
    """Apply an update that contains `Keep` elements to a list, and return the new list.

    The update is split at its `Keep` elements, and the resulting parts are applied in order.

    Args:
        value: The current list.
        update: The update.
        reducer: Applies the elements between two `Keep` elements.
        select_kept_range: Applies a `Keep` element to a copy of the list.
    """
    for part in _split_update_into_lists_and_keep_updates(update):
        value = (
            select_kept_range(list(value), part)
            if isinstance(part, Mapping)
            else reducer(value, part)
        )
    return value


def append_new(current_ids: Any, new_ids: Any) -> list[Any]:
    """Append the elements of `new_ids` that are not yet in `current_ids`.

    Use this function as the reducer of a channel that holds a list of ids. Do not use
    `operator.add` as the reducer of a list that a subgraph shares with its parent graph. A subgraph
    returns the whole list, so `operator.add` would append the existing elements again after each
    call.

    >>> append_new(["a", "b"], ["a", "b", "c"])
    ['a', 'b', 'c']
    """
    for name, ids in (("current list", current_ids), ("update", new_ids)):
        if isinstance(ids, str | bytes) or not isinstance(ids, Iterable | None):
            raise InvalidUpdate(f"the {name} is {ids!r:.80}; expected a list of ids")
    try:
        return list(dict.fromkeys(chain(current_ids or (), new_ids or ())))
    except TypeError as exc:
        raise InvalidUpdate(
            f"the update {new_ids!r:.80} or the channel's current list contains an unhashable "
            f"element ({exc}); expected a list of ids"
        ) from exc


class ChatState(TypedDict):
    """The state of a chat.

    The `llm_input_messages` channel contains the messages to send to the model, if they differ from
    the `messages` channel. It is not stored in checkpoints.
    """

    messages: Annotated[list[AnyMessage], messages]
    llm_input_messages: NotRequired[Annotated[list[AnyMessage], UntrackedValue]]


def _is_keep(update: Any) -> bool:
    return isinstance(update, Mapping) and update.get("type") == "keep"


def _has_keep(update: Any) -> bool:
    return _is_keep(update) or (isinstance(update, list) and any(map(_is_keep, update)))


def _split_update_into_lists_and_keep_updates(
    update: Any,
) -> list[list[Any] | Mapping[str, Any]]:
    """Split a channel update into its `Keep` elements and the lists of elements between them.

    The parts are returned in their original order.

    Each part is either one `Keep` update, or a list of consecutive elements that are not `Keep`
    updates. All `Keep` elements in a channel update are validated before the first part of the
    update is applied to the channel.
    """
    parts: list[list[Any] | Mapping[str, Any]] = []
    for element in update if isinstance(update, list) else [update]:
        if _is_keep(element):
            parts.append(_validate_keep_update(element))
        elif parts and isinstance(parts[-1], list):
            parts[-1].append(element)
        else:
            parts.append([element])
    return parts


def _validate_keep_update(keep_update: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a `Keep` update. Raise InvalidUpdate if the update is not a valid `Keep`."""
    has_ints = all(
        keep_update.get(key) is None or type(keep_update[key]) is int for key in ("from", "to")
    )
    if set(keep_update) - {"type", "from", "to"} or not has_ints:
        raise InvalidUpdate(
            f"the update {dict(keep_update)!r} is not a valid Keep; expected "
            '{"type": "keep", "from": int or null, "to": int or null}'
        )
    return keep_update


def _to_slice(keep: Mapping[str, Any]) -> slice:
    return slice(keep.get("from"), keep.get("to"))


def _select_messages_in_kept_range(
    messages_in_state: list[BaseMessage], keep_update: Mapping[str, Any]
) -> list[BaseMessage]:
    """Return the messages selected by a `Keep` update.

    Raises:
        InvalidUpdate: A tool call would be separated from its result.
    """
    start, stop, _ = _to_slice(keep_update).indices(len(messages_in_state))
    call_positions: dict[str | None, int] = {}
    for index, message in enumerate(messages_in_state):
        if isinstance(message, AIMessage):
            call_positions |= dict.fromkeys(filter(None, list_call_ids(message)), index)
        elif isinstance(message, ToolMessage) and message.tool_call_id in call_positions:
            call = call_positions[message.tool_call_id]
            if (start <= call < stop) != (start <= index < stop):
                raise InvalidUpdate(
                    f"keeping messages {start} to {stop - 1} would separate tool call "
                    f"{message.tool_call_id!r} (message {call}) from its result (message {index}); "
                    "keep both or neither"
                )
    return messages_in_state[start:stop]
