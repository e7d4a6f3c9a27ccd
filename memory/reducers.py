"""Reducers for thread-scoped state: langgraph's messages, and any list, that can be cut to a slice.

`messages` is langgraph's `add_messages` to the letter, with one more kind of update: a *keep*,
which says what stays. Updates of one super-step apply in order, and so do the parts of one list.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NotRequired

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, ToolMessage
from langgraph.channels import UntrackedValue
from langgraph.graph import add_messages
from typing_extensions import TypedDict  # with typing's, Python 3.11 gives no JSON schema

from perdure.errors import InvalidUpdate

OnSplit = Literal["error", "widen"]
Reducer = Callable[[Any, Any], Any]

_KEYS: Final = {"type", "from", "to", "on_split"}


class Keep(dict[str, Any]):
    """An update that keeps a slice of a list and drops the rest.

    It is a plain JSON object, `{"type": "keep", "from": -5, "to": null}`, and is read back as one,
    so it can be stored under any allowlist and sent over any wire.

    Args:
        start: First index to keep, as in a Python slice; negative counts from the end.
        end: Index after the last to keep; None: to the end.
        on_split: What to do if the slice parts a tool call from its result; None: what the
            reducer does by default. `"error"` raises, `"widen"` keeps as much more as it takes.

    Raises:
        InvalidUpdate: An argument is of another kind.

    >>> Keep(start=-5)
    Keep(start=-5, end=None)
    """

    def __init__(
        self, start: int | None = None, end: int | None = None, *, on_split: OnSplit | None = None
    ) -> None:
        super().__init__({"type": "keep", "from": start, "to": end})
        if on_split is not None:
            self["on_split"] = on_split
        _check(self)

    def __repr__(self) -> str:
        more = f", on_split={self['on_split']!r}" if "on_split" in self else ""
        return f"Keep(start={self['from']!r}, end={self['to']!r}{more})"


def message_reducer(*, on_split: OnSplit = "error") -> Reducer:
    """A reducer like `messages` with another rule for keeps that part a tool call from its result.

    Args:
        on_split: `"error"` raises `InvalidUpdate`, `"widen"` keeps as much more as it takes.

    Raises:
        InvalidUpdate: `on_split` is something else.
    """
    _check_on_split(on_split)

    def reduce(left: Any, right: Any) -> Any:
        if not _has_keep(right):
            return add_messages([] if left is None else left, right)
        value: Any = add_messages([] if left is None else left, [])
        for part in _parts(right):
            if isinstance(part, Mapping):
                value = _cut_messages(list(value), part, on_split)
            else:
                value = add_messages(value, part)
        return value

    return reduce


def keepable(reducer: Reducer = operator.add) -> Reducer:
    """Add keeps to the reducer of any list channel.

    >>> keepable()(["a", "b", "c"], [Keep(start=-1), "d"])
    ['c', 'd']

    A dict `{"type": "keep", "from": …, "to": …}` is therefore not an element such a list can hold.

    Args:
        reducer: Joins the value and a list of new elements.
    """

    def reduce(left: Any, right: Any) -> Any:
        value = [] if left is None else left
        if not _has_keep(right):
            return reducer(value, right)
        for part in _parts(right):
            if isinstance(part, Mapping):
                value = list(value)[_slice(_check(part))]
            else:
                value = reducer(value, part)
        return value

    return reduce


# -- telling keeps from other updates


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
    unknown = set(keep) - _KEYS
    if unknown:
        raise InvalidUpdate(
            f"the keep {dict(keep)!r} has unknown keys {sorted(unknown)}; expected "
            '{"type": "keep", "from": int or null, "to": int or null}'
        )
    for key in ("from", "to"):
        bound = keep.get(key)
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int)):
            raise InvalidUpdate(
                f"the keep {dict(keep)!r} has {key!r}: {bound!r}; expected a whole number or null"
            )
    if keep.get("on_split") is not None:
        _check_on_split(keep["on_split"])
    return keep


def _check_on_split(on_split: Any) -> None:
    if on_split not in ("error", "widen"):
        raise InvalidUpdate(f"on_split is {on_split!r}; expected 'error' or 'widen'")


def _slice(keep: Mapping[str, Any]) -> slice:
    return slice(keep.get("from"), keep.get("to"))


# -- cutting messages without parting a tool call from its result


def _cut_messages(
    value: list[BaseMessage], keep: Mapping[str, Any], default: OnSplit
) -> list[BaseMessage]:
    start, stop, _ = _slice(keep).indices(len(value))
    if start >= stop:
        return []
    pairs = _pairs(value)
    split = _first_split(pairs, start, stop)
    if split is None:
        return value[start:stop]
    if (keep.get("on_split") or default) == "error":
        call, result, call_id = split
        raise InvalidUpdate(
            f"keeping messages {start} to {stop} would part tool call {call_id!r} (message {call}) "
            f"from its result (message {result}); keep both, or let the slice grow with "
            "on_split='widen'"
        )
    while split is not None:
        start, stop = min(start, split[0]), max(stop, split[1] + 1)
        split = _first_split(pairs, start, stop)
    return value[start:stop]


def _pairs(value: Sequence[BaseMessage]) -> list[tuple[int, int, str]]:
    """`(index of the call, index of the result, tool_call_id)` of each answered tool call."""
    called: dict[str, int] = {}
    pairs = []
    for i, message in enumerate(value):
        if isinstance(message, AIMessage):
            calls = [*message.tool_calls, *message.invalid_tool_calls]
            called |= {call["id"]: i for call in calls if call["id"]}
        elif isinstance(message, ToolMessage) and message.tool_call_id in called:
            pairs.append((called[message.tool_call_id], i, message.tool_call_id))
    return pairs


def _first_split(
    pairs: list[tuple[int, int, str]], start: int, stop: int
) -> tuple[int, int, str] | None:
    for call, result, call_id in pairs:
        if (start <= call < stop) != (start <= result < stop):
            return call, result, call_id
    return None


# -- ready to use

messages: Final = message_reducer()
"""Reducer for a list of messages: `Annotated[list[AnyMessage], messages]`.

Takes what `add_messages` takes (messages in any form, `RemoveMessage`, `REMOVE_ALL_MESSAGES`), and
`Keep(...)` or its JSON form, alone or within a list. A keep that would part a tool call from its
result raises `InvalidUpdate`; `message_reducer(on_split="widen")` keeps both instead.
"""


class ChatState(TypedDict):
    """The smallest state of a chat.

    Attributes:
        messages: What was said.
        llm_input_messages: What the model is to be shown of it, if a node of perdure's that is a
            view runs before the model's. It is of one run only, and never in a checkpoint.
    """

    messages: Annotated[list[AnyMessage], messages]
    llm_input_messages: NotRequired[Annotated[list[AnyMessage], UntrackedValue]]
