"""What would change silently is refused at put, with the path to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.types import Send
from pydantic import BaseModel, PrivateAttr

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.codec import Codec
from perdure.errors import CorruptRecord, ForbiddenType, Unstorable
from tests.contracts.plain_classes import (
    CODEC,
    Fixed,
    Inner,
    Outer,
    Place,
    Point,
)
from tests.contracts.test_types import put


class Loud(Exception):
    pass


@dataclasses.dataclass
class LoudRecord(Exception):
    n: int = 1


class OldSet(set[int]):
    pass


class Holder:
    def __init__(self) -> None:
        self.x = 1


def nested(levels: int, wrap: Callable[[Any], Any]) -> Any:
    value = None
    for _ in range(levels):
        value = wrap(value)
    return value


class WithPrivate(BaseModel):
    _lock: Any = PrivateAttr(default_factory=object)


REFUSED = {
    "no data class": ({"a": [Holder()]}, r"\['a'\]\[0\] is a Holder"),
    "exception": ({"a": ValueError("x")}, r"\['a'\] is a ValueError.*text"),
    "exception at the top": (Loud("x"), r"\['x'\] is a Loud"),
    "exception dataclass": (LoudRecord(), r"\['x'\] is a LoudRecord"),
    "surrogate key": ({"\ud800": 1}, r"surrogates"),
    "surrogate in an id": (HumanMessage("what?", id="\ud83d"), r"\.id.*surrogates"),
    "surrogate as an id": ({"m": [RemoveMessage("\ud83d")]}, r"\.id.*surrogates"),
    "surrogate key of many": ({"k": "x" * 200, "\ud800": ["y"]}, r"surrogates"),
    "surrogate key in a message": (
        HumanMessage("x", additional_kwargs={"\ud800": 1}),
        r"\.additional_kwargs.*surrogates",
    ),
    "surrogate in a model": (Outer(inner=Inner(n=1), raw="\ud800"), r"\.raw.*surrogates"),
    "object array": (np.array([object()]), r"\['x'\] is a ndarray.*object"),
    "structured array": (Point(1, np.zeros(1, dtype=[("a", "i4")])), r"\.inner is a ndarray"),
    "masked array": (np.ma.array([1], mask=[True]), r"MaskedArray"),
    "too deep": (
        nested(300, lambda v: [v]),
        r"\['x'\]\[0\] cannot be stored, because .*254 levels",
    ),
    "too deep in dicts": (nested(2000, lambda v: {"k": v}), r"254 levels"),
    "too deep in a message": (
        HumanMessage("x", additional_kwargs=nested(300, lambda v: {"k": v})),
        r"\.additional_kwargs\['k'\].*nested deeper",
    ),
    "far too deep in a message": (
        HumanMessage("x", additional_kwargs=nested(5000, lambda v: {"k": v})),
        r"nested deeper",
    ),
    "too many objects": (nested(300, lambda v: Point(1, v)), r"\.inner.*nested deeper"),
    "too deep in an object": (Point(1, nested(3000, lambda v: [v])), r"\.inner.*254 levels"),
    "far too many objects": (nested(3000, lambda v: Fixed(v)), r"\.x.*nested deeper"),
    "in a dataclass": (Point(1, {"f": [Holder()]}), r"\['x'\]\.inner\['f'\]\[0\] is a Holder"),
    "in slots": (Fixed(1, (Holder(),)), r"\['x'\]\.tags\[0\] is a Holder"),  # type: ignore[arg-type]
    "in a model": (Outer(inner=Inner(n=1), raw=print), r"\['x'\]\.raw is a builtin"),
    "private": (WithPrivate(), r"\['x'\]\._lock is a object"),
    "in a send": (Send("n", {"f": Holder()}), r"\['x'\]\.arg\['f'\] is a Holder"),
    "in a named tuple": (Place(1, Holder()), r"\['x'\]\.name is a Holder"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_silently_is_refused_at_put(name: str) -> None:
    """The error names the path, and nothing is written."""
    value, told = REFUSED[name]
    with SQLiteCheckpointer.open(":memory:") as saver:
        with pytest.raises(Unstorable, match=told) as caught:
            put(saver, {"fine": 1, "x": value})

        assert "channel_values['x']" in str(caught.value)
        assert saver.threads() == []


def test_a_lone_surrogate_in_text_becomes_a_question_mark(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in langgraph's savers; it is logged once, with the place and the thread."""
    half = "half \ud83d"
    values = {
        "texts": ["ok", half],
        "x": half,
        "facts": {"k": half},
        "messages": [
            HumanMessage(half, id="h"),
            AIMessage("", id="a", tool_calls=[{"name": "f", "args": {"q": half}, "id": "c"}]),
        ],
    }
    memory = InMemorySaver()
    expected = memory.get_tuple(put(memory, values))
    with SQLiteCheckpointer.open(":memory:") as saver:
        saver.put_writes(put(saver, values), [("x", half), ("texts", [half])], "task")
        actual = saver.get_tuple({"configurable": {"thread_id": "t"}})

    assert expected is not None
    assert actual is not None
    assert expected.checkpoint["channel_values"] == actual.checkpoint["channel_values"]
    assert actual.pending_writes == [("task", "x", "half ?"), ("task", "texts", ["half ?"])]
    assert actual.checkpoint["channel_values"]["messages"][0].content == "half ?"
    (logged,) = [record.getMessage() for record in caplog.records if "surrogate" in record.msg]
    assert logged.startswith("channel_values['texts'][1] of thread 't' contains a lone surrogate")


def test_a_lone_surrogate_in_metadata_is_refused() -> None:
    """Metadata holds the ids of users, of which two must not become one."""
    config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": "", "user_id": "\ud83d"}}
    with SQLiteCheckpointer.open(":memory:") as saver:
        with pytest.raises(Unstorable, match=r"metadata.*surrogates"):
            put(saver, {"x": 1}, config)

        assert saver.threads() == []


def test_a_builtin_set_of_another_class_needs_the_allowlist() -> None:
    """What only its constructor can rebuild is refused, until it is named."""
    with pytest.raises(ForbiddenType, match="OldSet"):
        CODEC.encode(OldSet([1]), lambda: "value")
    with SQLiteCheckpointer.open(":memory:", allow=[OldSet]) as saver:
        found = saver.get_tuple(put(saver, {"x": OldSet([1])}))

    assert found is not None
    assert type(found.checkpoint["channel_values"]["x"]) is OldSet


def test_a_value_in_itself_is_refused() -> None:
    """A list or an object that holds itself has no end."""
    endless: list[Any] = []
    endless.append(endless)
    point = Point(1)
    point.inner = point
    for value in (endless, point):
        with pytest.raises(Unstorable, match="nested deeper"):
            CODEC.encode(value, lambda: "value")


def test_what_a_task_raised_is_stored_as_text() -> None:
    """langgraph writes it as an exception, and its savers keep how it looks."""
    with SQLiteCheckpointer.open(":memory:") as saver:
        config = put(saver, {"x": 1})
        saver.put_writes(config, [("__error__", ValueError("no"))], "task")
        found = saver.get_tuple(config)

    assert found is not None
    assert found.pending_writes == [("task", "__error__", "ValueError('no')")]


def test_a_serializer_told_to_pickle_does() -> None:
    """`pickle_fallback` is the user's own choice; what was pickled is read by that serializer."""
    serde = JsonPlusSerializer(pickle_fallback=True, allowed_msgpack_modules=None)
    stored = Codec(serde).encode([1j], lambda: "value")

    assert Codec(serde).decode(stored) == [1j]
    with pytest.raises(CorruptRecord):
        CODEC.decode(stored)
