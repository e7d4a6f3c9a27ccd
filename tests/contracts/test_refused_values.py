"""A put refuses values that would change silently, and its error names the path of the value."""

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


def nest(levels: int, wrap: Callable[[Any], Any]) -> Any:
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
        nest(300, lambda v: [v]),
        r"\['x'\]\[0\] cannot be stored, because .*254 levels",
    ),
    "too deep in dicts": (nest(2000, lambda v: {"k": v}), r"254 levels"),
    "too deep in a message": (
        HumanMessage("x", additional_kwargs=nest(300, lambda v: {"k": v})),
        r"\.additional_kwargs\['k'\].*nested deeper",
    ),
    "far too deep in a message": (
        HumanMessage("x", additional_kwargs=nest(5000, lambda v: {"k": v})),
        r"nested deeper",
    ),
    "too many objects": (nest(300, lambda v: Point(1, v)), r"\.inner.*nested deeper"),
    "too deep in an object": (Point(1, nest(3000, lambda v: [v])), r"\.inner.*254 levels"),
    "far too many objects": (nest(3000, lambda v: Fixed(v)), r"\.x.*nested deeper"),
    "in a dataclass": (Point(1, {"f": [Holder()]}), r"\['x'\]\.inner\['f'\]\[0\] is a Holder"),
    "in slots": (Fixed(1, (Holder(),)), r"\['x'\]\.tags\[0\] is a Holder"),  # type: ignore[arg-type]
    "in a model": (Outer(inner=Inner(n=1), raw=print), r"\['x'\]\.raw is a builtin"),
    "private": (WithPrivate(), r"\['x'\]\._lock is a object"),
    "in a send": (Send("n", {"f": Holder()}), r"\['x'\]\.arg\['f'\] is a Holder"),
    "in a named tuple": (Place(1, Holder()), r"\['x'\]\.name is a Holder"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", REFUSED)
def test_put_refuses_value_that_would_change_silently(name: str) -> None:
    """The error names the path of the value, and nothing is written."""
    value, expected_error = REFUSED[name]
    with SQLiteCheckpointer.open(":memory:") as saver:
        with pytest.raises(Unstorable, match=expected_error) as caught:
            put(saver, {"fine": 1, "x": value})

        assert "channel_values['x']" in str(caught.value)
        assert saver.threads() == []


def test_lone_surrogate_in_text_is_stored_as_question_mark(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Savers of langgraph do the same. One warning names the place and the thread."""
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


def test_put_refuses_lone_surrogate_in_metadata() -> None:
    """Metadata contains ids of users, and two different ids must not become equal."""
    config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": "", "user_id": "\ud83d"}}
    with SQLiteCheckpointer.open(":memory:") as saver:
        with pytest.raises(Unstorable, match=r"metadata.*surrogates"):
            put(saver, {"x": 1}, config)

        assert saver.threads() == []


def test_subclass_of_set_is_refused_unless_allow_names_it() -> None:
    """A value that only its constructor can rebuild is refused unless its class is named."""
    with pytest.raises(ForbiddenType, match="OldSet"):
        CODEC.encode(OldSet([1]), lambda: "value")
    with SQLiteCheckpointer.open(":memory:", allow=[OldSet]) as saver:
        record = saver.get_tuple(put(saver, {"x": OldSet([1])}))

    assert record is not None
    assert type(record.checkpoint["channel_values"]["x"]) is OldSet


def test_put_refuses_value_that_contains_itself() -> None:
    """A list or an object that contains itself has infinite depth."""
    endless: list[Any] = []
    endless.append(endless)
    point = Point(1)
    point.inner = point
    for value in (endless, point):
        with pytest.raises(Unstorable, match="nested deeper"):
            CODEC.encode(value, lambda: "value")


def test_exception_of_a_task_is_stored_as_text() -> None:
    """langgraph passes an exception to `put_writes`, and its savers store the `repr`."""
    with SQLiteCheckpointer.open(":memory:") as saver:
        config = put(saver, {"x": 1})
        saver.put_writes(config, [("__error__", ValueError("no"))], "task")
        record = saver.get_tuple(config)

    assert record is not None
    assert record.pending_writes == [("task", "__error__", "ValueError('no')")]


def test_serializer_with_pickle_fallback_stores_pickles() -> None:
    """Only a serializer with `pickle_fallback` reads the value again."""
    serde = JsonPlusSerializer(pickle_fallback=True, allowed_msgpack_modules=None)
    stored = Codec(serde).encode([1j], lambda: "value")

    assert Codec(serde).decode(stored) == [1j]
    with pytest.raises(CorruptRecord):
        CODEC.decode(stored)
