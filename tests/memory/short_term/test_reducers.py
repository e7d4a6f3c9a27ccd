"""Reducers: `messages` behaves like `add_messages`, and `Keep` never separates call and result."""

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
from perdure.memory.short_term.reducers import keepable


def make_human(n: int) -> HumanMessage:
    return HumanMessage(f"h{n}", id=f"h{n}")


def make_tool_calls(n: int, *ids: str) -> AIMessage:
    calls = [{"name": "f", "args": {}, "id": i, "type": "tool_call"} for i in ids]
    return AIMessage("", id=f"a{n}", tool_calls=calls)


def make_tool_result(n: int, call_id: str) -> ToolMessage:
    return ToolMessage("r", id=f"t{n}", tool_call_id=call_id)


CONVERSATION: list[AnyMessage] = [
    make_human(0),
    make_tool_calls(1, "x", "y"),
    make_tool_result(2, "x"),
    make_tool_result(3, "y"),
    AIMessage("done", id="a4"),
    make_human(5),
    make_tool_calls(6, "x"),
    make_tool_result(7, "x"),
    AIMessage("done", id="a8"),
]


def message_ids(value: list[Any]) -> list[str]:
    return [m.id for m in value]


UPDATES = st.lists(
    st.one_of(
        st.integers(0, 9).map(make_human),
        st.integers(0, 9).map(lambda n: AIMessage(f"again {n}", id=f"h{n}")),
        st.tuples(st.just("user"), st.text(max_size=3)),
    ),
    max_size=6,
)


@given(st.lists(st.integers(0, 9).map(make_human), max_size=5, unique_by=lambda m: m.id), UPDATES)
def test_updates_without_keep_behave_like_add_messages(
    left: list[AnyMessage], right: list[Any]
) -> None:
    expected = add_messages(copy.deepcopy(left), copy.deepcopy(right))  # type: ignore[arg-type]
    actual = messages(copy.deepcopy(left), copy.deepcopy(right))

    assert [(type(m), m.content) for m in expected] == [(type(m), m.content) for m in actual]  # type: ignore[union-attr]
    assert [m.id for m in left] == message_ids(actual)[: len(left)]


@given(
    st.lists(st.integers(), max_size=12),
    st.none() | st.integers(-15, 15),
    st.none() | st.integers(-15, 15),
)
def test_keep_leaves_same_items_as_python_slice(
    value: list[int], start: int | None, end: int | None
) -> None:
    """The rule holds for list channels and for messages."""
    conversation = [make_human(n) for n in range(len(value))]
    before = list(value)

    assert value[start:end] == keepable()(value, Keep(start, end))
    assert message_ids(conversation[start:end]) == message_ids(
        messages(conversation, Keep(start, end))
    )
    assert before == value


@given(st.integers(-10, 10), st.none() | st.integers(-10, 10))
def test_keep_that_separates_call_and_result_is_refused(start: int, end: int | None) -> None:
    """Any other keep leaves the requested slice."""
    requested_ids = message_ids(CONVERSATION[start:end])
    pairs = ({"a1", "t2"}, {"a1", "t3"}, {"a6", "t7"})
    if any(len(pair & set(requested_ids)) == 1 for pair in pairs):
        with pytest.raises(InvalidUpdate, match="would separate tool call"):
            messages(CONVERSATION, Keep(start, end))
    else:
        assert message_ids(messages(CONVERSATION, Keep(start, end))) == requested_ids


def test_refused_keep_names_tool_call_and_both_messages() -> None:
    with pytest.raises(InvalidUpdate, match=r"tool call 'x' \(message 6\).*message 7"):
        messages(CONVERSATION, Keep(start=-2))


def test_keep_leaves_expected_messages_of_example_slices() -> None:
    """The expected values were worked out by hand."""
    assert message_ids(messages(CONVERSATION, Keep(4, 6))) == ["a4", "h5"]
    assert message_ids(messages(CONVERSATION, Keep(1, 5))) == ["a1", "t2", "t3", "a4"]
    assert message_ids(messages(CONVERSATION, Keep(start=-3))) == ["a6", "t7", "a8"]
    assert message_ids(messages(CONVERSATION, {"type": "keep", "from": -1, "to": None})) == ["a8"]
    assert messages(CONVERSATION, Keep(3, 3)) == []


def test_messages_removals_and_keeps_apply_left_to_right() -> None:
    value = [make_human(0), make_human(1), make_human(2)]

    assert message_ids(messages(value, [Keep(-2), make_human(3)])) == ["h1", "h2", "h3"]
    assert message_ids(messages(value, [make_human(3), Keep(-1)])) == ["h3"]
    assert message_ids(messages(value, [RemoveMessage(id="h1"), Keep(-2)])) == ["h0", "h2"]
    assert message_ids(
        messages(value, [Keep(-1), RemoveMessage(id=REMOVE_ALL_MESSAGES), make_human(9)])
    ) == ["h9"]
    assert keepable()([1, 2, 3], [Keep(-1), 4, 9]) == [3, 4, 9]


def test_first_update_of_empty_channel_is_accepted() -> None:
    """A keep on an empty channel leaves an empty list, and None counts as an empty list."""
    assert messages(None, Keep(-5)) == []
    assert keepable()(None, [1]) == [1]


@pytest.mark.parametrize(
    "malformed_keep",
    [
        {"type": "keep", "from": "x"},
        {"type": "keep", "from": 1.0},
        {"type": "keep", "to": True},
        {"type": "keep", "form": 1},
        {"type": "keep", "on_split": "widen"},
    ],
)
def test_malformed_keep_is_refused_and_changes_nothing(malformed_keep: dict[str, Any]) -> None:
    value = [make_human(0)]

    with pytest.raises(InvalidUpdate, match="is not a valid Keep"):
        messages(value, [make_human(1), malformed_keep])
    with pytest.raises(InvalidUpdate):
        keepable()([1], [2, malformed_keep])
    assert [make_human(0)] == value


def test_keep_survives_strict_serializer() -> None:
    """A keep in a pending write is read back as the JSON form that reducers accept."""
    serde = JsonPlusSerializer(allowed_msgpack_modules=None)

    assert Keep(-5) == serde.loads_typed(serde.dumps_typed(Keep(-5)))
    assert repr(Keep(2, 8)) == "Keep(start=2, end=8)"


class _StateWithLog(TypedDict):
    messages: Annotated[list[AnyMessage], messages]
    log: Annotated[list[str], keepable()]


def test_updates_of_one_superstep_apply_in_task_order() -> None:
    """Keeps and appends of parallel nodes apply in the order in which langgraph applies tasks."""

    def keep_last(state: _StateWithLog) -> dict[str, Any]:
        return {"messages": Keep(-1), "log": {"type": "keep", "from": -1, "to": None}}

    def append_new(state: _StateWithLog) -> dict[str, Any]:
        return {"messages": [AIMessage("new", id="new")], "log": ["new"]}

    builder = StateGraph(_StateWithLog)
    builder.add_node("a_keeps", keep_last)
    builder.add_node("b_says", append_new)
    builder.add_edge(START, "a_keeps")
    builder.add_edge(START, "b_says")
    builder.add_edge("a_keeps", END)
    builder.add_edge("b_says", END)
    graph = builder.compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    out = graph.invoke({"messages": [make_human(0), make_human(1)], "log": ["x", "y"]}, config)

    assert message_ids(out["messages"]) == ["h1", "new"]
    assert out["log"] == ["y", "new"]
    graph.update_state(config, {"messages": {"type": "keep", "from": 0, "to": 1}}, as_node="b_says")
    assert message_ids(graph.get_state(config).values["messages"]) == ["h1"]


def test_chat_state_compiles_and_collects_messages() -> None:
    builder = StateGraph(ChatState)
    builder.add_node("n", lambda state: {"messages": [AIMessage("hi", id="r")]})
    builder.add_edge(START, "n")

    assert message_ids(builder.compile().invoke({"messages": [make_human(0)]})["messages"]) == [
        "h0",
        "r",
    ]


def test_keep_example_of_langgraph_docs_works() -> None:
    """A node keeps the last five elements of a list."""

    class State(TypedDict):
        my_list: Annotated[list[str], keepable()]

    builder = StateGraph(State)
    builder.add_node("my_node", lambda state: {"my_list": {"type": "keep", "from": -5}})
    graph = builder.add_edge(START, "my_node").compile()

    assert graph.invoke({"my_list": list("abcdefg")}) == {"my_list": list("cdefg")}


def test_remove_example_of_langgraph_docs_works() -> None:
    """One node adds a message, and the next removes all but the last two."""

    def my_node_2(state: ChatState) -> dict[str, Any]:
        return {"messages": [RemoveMessage(id=str(m.id)) for m in state["messages"][:-2]]}

    builder = StateGraph(ChatState)
    builder.add_node("my_node_1", lambda state: {"messages": [AIMessage("Hi")]})
    builder.add_node("my_node_2", my_node_2)
    builder.add_edge(START, "my_node_1").add_edge("my_node_1", "my_node_2")
    out = builder.compile().invoke({"messages": [make_human(0), make_human(1), make_human(2)]})

    assert [message.text for message in out["messages"]] == ["h2", "Hi"]
