"""A deque is decoded with its `maxlen`, which langgraph's serializer drops."""

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
    """A deque whose constructor sets the limit."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        super().__init__(items, maxlen=2)


def describe_deques(value: Any) -> Any:
    """Return the value with each deque replaced by its type, limit and contents."""
    if isinstance(value, deque):
        return (type(value), value.maxlen, [describe_deques(part) for part in value])
    if isinstance(value, dict):
        return {key: describe_deques(part) for key, part in value.items()}
    return [describe_deques(part) for part in value] if isinstance(value, list) else value


VALUES: dict[str, Any] = {
    "limited": deque([1, 2, 3], 3),
    "not full": deque(["a"], 5),
    "empty": deque(maxlen=2),
    "limit of zero": deque([1], 0),
    "without a limit": deque([1, 2]),
    "nested": deque([deque([1], 1), deque([2]), {"d": deque(maxlen=4)}], 3),
    "in a list": [deque([1], 2), deque([1])],
    "of messages": deque([HumanMessage("a", id="1"), AIMessage("b", id="2")], 2),
    "of objects": deque([Fixed(1), Point(2)], 2),
}


@pytest.mark.parametrize("name", VALUES)
def test_decoded_deque_keeps_its_limit(name: str) -> None:
    """A decoded deque that is encoded again gives the same bytes."""
    stored = CODEC.encode(VALUES[name], lambda: "value")
    decoded = CODEC.decode(stored)

    assert VALUES[name] == decoded
    assert describe_deques(VALUES[name]) == describe_deques(decoded)
    assert stored == CODEC.encode(decoded, lambda: "value")


def test_deque_within_messages_objects_and_sends_keeps_its_limit() -> None:
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

    deques = (human.additional_kwargs["w"], result.artifact[0], point.inner["w"], send.arg)
    assert [decoded.maxlen for decoded in deques] == [2, 2, 2, 2]


def test_put_stores_deque_whose_limit_alone_changed() -> None:
    with SQLiteCheckpointer.open(":memory:") as saver:
        first = put(saver, {"w": deque([1], 2)})
        put(saver, {"w": deque([1], 3)}, first)
        stored = saver.get_tuple({"configurable": {"thread_id": "t"}})
        assert stored is not None
        assert stored.checkpoint["channel_values"]["w"].maxlen == 3


def test_deque_without_limit_is_encoded_as_by_langgraph() -> None:
    """Rows of earlier files are read as before, and langgraph reads the limit of new rows."""
    serde = JsonPlusSerializer()
    value = deque([1, (2,)])

    assert serde.dumps_typed(value)[1] == CODEC.encode(value, lambda: "value")[1:]
    stored = CODEC.encode(deque([1, 2], 3), lambda: "value")[1:]
    assert serde.loads_typed(("msgpack", stored)).maxlen == 3


def test_allowed_deque_subclass_keeps_its_limit() -> None:
    """The constructor need not take a limit. A subclass that is not allowed is refused."""
    with SQLiteCheckpointer.open(":memory:", allow=[Window, LastTwo]) as saver:
        values = {"w": Window([1, 2, 3], 4), "u": Window([1]), "l": LastTwo([1, 2, 3])}
        stored = saver.get_tuple(put(saver, values))
        assert stored is not None
        assert describe_deques(values) == describe_deques(stored.checkpoint["channel_values"])
    with SQLiteCheckpointer.open(":memory:") as saver, pytest.raises(ForbiddenType, match="Window"):
        put(saver, {"w": Window([1], 4)})


def test_deque_in_graph_state_keeps_its_limit_after_restarts(tmp_path: Path) -> None:
    """A node that appends to the deque keeps only the three newest values."""

    class State(TypedDict, total=False):
        recent: Any
        question: str

    def append_question(state: State) -> dict[str, Any]:
        recent = state.get("recent") or deque(maxlen=3)
        recent.append(state["question"])
        return {"recent": recent}

    builder = StateGraph(State).add_node("add", append_question).add_edge(START, "add")
    config: Any = {"configurable": {"thread_id": "t"}}
    for n in range(5):
        with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
            result = builder.compile(checkpointer=saver).invoke({"question": str(n)}, config)
    assert deque(["2", "3", "4"], 3) == result["recent"]
