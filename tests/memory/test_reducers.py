"""Reducers: add_messages to the letter, and keep-slices that part no tool call from its result."""

from __future__ import annotations

import copy
from typing import Annotated, Any, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import END, START, StateGraph, add_messages
from langgraph.graph.message import REMOVE_ALL_MESSAGES

from perdure.errors import InvalidUpdate
from perdure.memory import ChatState, Keep, messages
from perdure.memory.reducers import keepable


def human(n: int) -> HumanMessage:
    return HumanMessage(f"h{n}", id=f"h{n}")


def calling(n: int, *ids: str) -> AIMessage:
    calls = [{"name": "f", "args": {}, "id": i, "type": "tool_call"} for i in ids]
    return AIMessage("", id=f"a{n}", tool_calls=calls)


def result(n: int, call_id: str) -> ToolMessage:
    return ToolMessage("r", id=f"t{n}", tool_call_id=call_id)


TALK: list[AnyMessage] = [
    human(0),
    calling(1, "x", "y"),
    result(2, "x"),
    result(3, "y"),
    AIMessage("done", id="a4"),
    human(5),
    calling(6, "x"),
    result(7, "x"),
    AIMessage("done", id="a8"),
]


def ids(value: list[Any]) -> list[str]:
    return [m.id for m in value]


updates = st.lists(
    st.one_of(
        st.integers(0, 9).map(human),
        st.integers(0, 9).map(lambda n: AIMessage(f"again {n}", id=f"h{n}")),
        st.tuples(st.just("user"), st.text(max_size=3)),
    ),
    max_size=6,
)


@given(st.lists(st.integers(0, 9).map(human), max_size=5, unique_by=lambda m: m.id), updates)
def test_without_keeps_it_is_add_messages(left: list[AnyMessage], right: list[Any]) -> None:
    """Any update without a keep gives what langgraph's own reducer gives."""
    expected = add_messages(copy.deepcopy(left), copy.deepcopy(right))  # type: ignore[arg-type]
    actual = messages(copy.deepcopy(left), copy.deepcopy(right))

    assert [(type(m), m.content) for m in expected] == [(type(m), m.content) for m in actual]  # type: ignore[union-attr]
    assert [m.id for m in left] == ids(actual)[: len(left)]


@given(
    st.lists(st.integers(), max_size=12),
    st.none() | st.integers(-15, 15),
    st.none() | st.integers(-15, 15),
)
def test_keep_is_a_python_slice(value: list[int], start: int | None, end: int | None) -> None:
    """A keep leaves what the slice of a list leaves, for any list channel and for messages."""
    talk = [human(n) for n in range(len(value))]
    before = list(value)

    assert value[start:end] == keepable()(value, Keep(start, end))
    assert ids(talk[start:end]) == ids(messages(talk, Keep(start, end)))
    assert before == value


@given(st.integers(-10, 10), st.none() | st.integers(-10, 10))
def test_a_keep_parts_no_pair(start: int, end: int | None) -> None:
    """It keeps what was asked for; where that would part a pair, it is refused."""
    asked = ids(TALK[start:end])
    pairs = ({"a1", "t2"}, {"a1", "t3"}, {"a6", "t7"})
    if any(len(pair & set(asked)) == 1 for pair in pairs):
        with pytest.raises(InvalidUpdate, match="would separate tool call"):
            messages(TALK, Keep(start, end))
    else:
        assert ids(messages(TALK, Keep(start, end))) == asked


def test_a_parting_keep_says_so() -> None:
    """A keep that would orphan a tool message names the call and both messages."""
    with pytest.raises(InvalidUpdate, match=r"tool call 'x' \(message 6\).*message 7"):
        messages(TALK, Keep(start=-2))


def test_golden_slices() -> None:
    """Chosen slices, worked out by hand."""
    assert ids(messages(TALK, Keep(4, 6))) == ["a4", "h5"]
    assert ids(messages(TALK, Keep(1, 5))) == ["a1", "t2", "t3", "a4"]
    assert ids(messages(TALK, Keep(start=-3))) == ["a6", "t7", "a8"]
    assert ids(messages(TALK, {"type": "keep", "from": -1, "to": None})) == ["a8"]
    assert messages(TALK, Keep(3, 3)) == []


def test_parts_of_an_update_apply_in_order() -> None:
    """Messages, removals and keeps in one list apply left to right."""
    value = [human(0), human(1), human(2)]

    assert ids(messages(value, [Keep(-2), human(3)])) == ["h1", "h2", "h3"]
    assert ids(messages(value, [human(3), Keep(-1)])) == ["h3"]
    assert ids(messages(value, [RemoveMessage(id="h1"), Keep(-2)])) == ["h0", "h2"]
    assert ids(messages(value, [Keep(-1), RemoveMessage(id=REMOVE_ALL_MESSAGES), human(9)])) == [
        "h9"
    ]
    assert keepable()([1, 2, 3], [Keep(-1), 4, 9]) == [3, 4, 9]


def test_first_update_of_an_empty_channel() -> None:
    """A keep on nothing is nothing, and None counts as an empty list."""
    assert messages(None, Keep(-5)) == []
    assert keepable()(None, [1]) == [1]


@pytest.mark.parametrize(
    "bad",
    [
        {"type": "keep", "from": "x"},
        {"type": "keep", "from": 1.0},
        {"type": "keep", "to": True},
        {"type": "keep", "form": 1},
        {"type": "keep", "on_split": "widen"},
    ],
)
def test_malformed_keeps_change_nothing(bad: dict[str, Any]) -> None:
    """A keep of another form names the value and what was expected, before anything changes."""
    value = [human(0)]

    with pytest.raises(InvalidUpdate, match="is not a valid Keep"):
        messages(value, [human(1), bad])
    with pytest.raises(InvalidUpdate):
        keepable()([1], [2, bad])
    assert [human(0)] == value


def test_keep_survives_the_strict_serializer() -> None:
    """A keep in a pending write comes back as the JSON form that reducers take as well."""
    serde = JsonPlusSerializer(allowed_msgpack_modules=None)

    assert Keep(-5) == serde.loads_typed(serde.dumps_typed(Keep(-5)))
    assert repr(Keep(2, 8)) == "Keep(start=2, end=8)"


class _Wide(TypedDict):
    messages: Annotated[list[AnyMessage], messages]
    log: Annotated[list[str], keepable()]


def test_updates_of_one_superstep_apply_in_order_in_a_graph() -> None:
    """Parallel nodes' keeps and appends apply in the order in which langgraph applies tasks."""

    def keeps(state: _Wide) -> dict[str, Any]:
        return {"messages": Keep(-1), "log": {"type": "keep", "from": -1, "to": None}}

    def says(state: _Wide) -> dict[str, Any]:
        return {"messages": [AIMessage("new", id="new")], "log": ["new"]}

    builder = StateGraph(_Wide)
    builder.add_node("a_keeps", keeps)
    builder.add_node("b_says", says)
    builder.add_edge(START, "a_keeps")
    builder.add_edge(START, "b_says")
    builder.add_edge("a_keeps", END)
    builder.add_edge("b_says", END)
    graph = builder.compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    out = graph.invoke({"messages": [human(0), human(1)], "log": ["x", "y"]}, config)

    assert ids(out["messages"]) == ["h1", "new"]
    assert out["log"] == ["y", "new"]
    graph.update_state(config, {"messages": {"type": "keep", "from": 0, "to": 1}}, as_node="b_says")
    assert ids(graph.get_state(config).values["messages"]) == ["h1"]


def test_chat_state_is_a_state() -> None:
    """The ready-made state compiles and keeps messages."""
    builder = StateGraph(ChatState)
    builder.add_node("n", lambda state: {"messages": [AIMessage("hi", id="r")]})
    builder.add_edge(START, "n")

    assert ids(builder.compile().invoke({"messages": [human(0)]})["messages"]) == ["h0", "r"]


def test_the_keep_example_of_the_concept_page() -> None:
    """LangGraph's concepts: a node keeps the last five elements of a list."""

    class State(TypedDict):
        my_list: Annotated[list[str], keepable()]

    builder = StateGraph(State)
    builder.add_node("my_node", lambda state: {"my_list": {"type": "keep", "from": -5}})
    graph = builder.add_edge(START, "my_node").compile()

    assert graph.invoke({"my_list": list("abcdefg")}) == {"my_list": list("cdefg")}


def test_the_remove_example_of_the_concept_page() -> None:
    """LangGraph's concepts: one node says hi, the next deletes all but the last two messages."""

    def my_node_2(state: ChatState) -> dict[str, Any]:
        return {"messages": [RemoveMessage(id=str(m.id)) for m in state["messages"][:-2]]}

    builder = StateGraph(ChatState)
    builder.add_node("my_node_1", lambda state: {"messages": [AIMessage("Hi")]})
    builder.add_node("my_node_2", my_node_2)
    builder.add_edge(START, "my_node_1").add_edge("my_node_1", "my_node_2")
    out = builder.compile().invoke({"messages": [human(0), human(1), human(2)]})

    assert [message.text for message in out["messages"]] == ["h2", "Hi"]
