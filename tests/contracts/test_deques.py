"""A deque comes back with its limit, which langgraph's serializer drops."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import START, StateGraph
from langgraph.types import Send

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ForbiddenType
from tests.contracts.plain_classes import CODEC, Fixed, Point
from tests.contracts.test_types import put


class Window(deque[Any]):
    pass


class LastTwo(deque[Any]):
    """Sets its limit itself."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        super().__init__(items, maxlen=2)


def limits(value: Any) -> Any:
    """The types, contents and limits of all deques in a value."""
    if isinstance(value, deque):
        return (type(value), value.maxlen, [limits(part) for part in value])
    if isinstance(value, dict):
        return {key: limits(part) for key, part in value.items()}
    return [limits(part) for part in value] if isinstance(value, list) else value


VALUES: dict[str, Any] = {
    "limited": deque([1, 2, 3], 3),
    "not full": deque(["a"], 5),
    "empty": deque(maxlen=2),
    "of no items": deque([1], 0),
    "without a limit": deque([1, 2]),
    "nested": deque([deque([1], 1), deque([2]), {"d": deque(maxlen=4)}], 3),
    "in a list": [deque([1], 2), deque([1])],
    "of messages": deque([HumanMessage("a", id="1"), AIMessage("b", id="2")], 2),
    "of objects": deque([Fixed(1), Point(2)], 2),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_deque_keeps_its_limit(name: str) -> None:
    """The limit comes back, and the same value stored again gives the same bytes."""
    stored = CODEC.encode(VALUES[name], lambda: "value")
    back = CODEC.decode(stored)

    assert VALUES[name] == back
    assert limits(VALUES[name]) == limits(back)
    assert stored == CODEC.encode(back, lambda: "value")


def test_a_deque_within_other_values_keeps_its_limit() -> None:
    """In a message, in an object and in the argument of a Send."""
    window = deque([1, 2], 2)
    human = CODEC.decode(
        CODEC.encode(HumanMessage("x", additional_kwargs={"w": window}), lambda: "value")
    )
    result = CODEC.decode(
        CODEC.encode(ToolMessage("x", tool_call_id="1", artifact=[window]), lambda: "value")
    )
    point, send = CODEC.decode(
        CODEC.encode([Point(1, {"w": window}), Send("n", window)], lambda: "value")
    )

    found = (human.additional_kwargs["w"], result.artifact[0], point.inner["w"], send.arg)
    assert [each.maxlen for each in found] == [2, 2, 2, 2]


def test_two_deques_that_differ_in_their_limit_differ() -> None:
    """A put that changes only the limit is stored."""
    with SQLiteCheckpointer.open(":memory:") as saver:
        first = put(saver, {"w": deque([1], 2)})
        put(saver, {"w": deque([1], 3)}, first)
        found = saver.get_tuple({"configurable": {"thread_id": "t"}})
        assert found is not None
        assert found.checkpoint["channel_values"]["w"].maxlen == 3


def test_deques_without_a_limit_have_langgraphs_bytes() -> None:
    """Rows of earlier files are read as before, and langgraph reads the limit of new ones."""
    serde = JsonPlusSerializer()
    value = deque([1, (2,)])

    assert serde.dumps_typed(value)[1] == CODEC.encode(value, lambda: "value")[1:]
    stored = CODEC.encode(deque([1, 2], 3), lambda: "value")[1:]
    assert serde.loads_typed(("msgpack", stored)).maxlen == 3


def test_a_subclass_keeps_its_limit_where_it_is_allowed() -> None:
    """Also a subclass whose constructor takes no limit; one that is not allowed is refused."""
    with SQLiteCheckpointer.open(":memory:", allow=[Window, LastTwo]) as saver:
        values = {"w": Window([1, 2, 3], 4), "u": Window([1]), "l": LastTwo([1, 2, 3])}
        found = saver.get_tuple(put(saver, values))
        assert found is not None
        assert limits(values) == limits(found.checkpoint["channel_values"])
    with SQLiteCheckpointer.open(":memory:") as saver, pytest.raises(ForbiddenType, match="Window"):
        put(saver, {"w": Window([1], 4)})


def test_a_window_of_a_graph_stays_one_after_a_restart(tmp_path: Path) -> None:
    """A node that appends to its deque has the newest three, however many turns there are."""

    class State(TypedDict, total=False):
        recent: Any
        question: str

    def add(state: State) -> dict[str, Any]:
        recent = state.get("recent") or deque(maxlen=3)
        recent.append(state["question"])
        return {"recent": recent}

    builder = StateGraph(State).add_node("add", add).add_edge(START, "add")
    config: Any = {"configurable": {"thread_id": "t"}}
    for n in range(5):
        with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
            out = builder.compile(checkpointer=saver).invoke({"question": str(n)}, config)
    assert deque(["2", "3", "4"], 3) == out["recent"]
