"""Messages with the same id: the reducer merges them, and nodes repair lists that have them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    BaseMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langgraph.channels import DeltaChannel
from langgraph.graph import START, StateGraph, add_messages
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.types import Overwrite

from perdure import SQLiteCheckpointer
from perdure.errors import InvalidMessages
from perdure.memory import Keep, clear_tool_outputs, messages, summarize, trim, view
from perdure.memory.short_term.reducers import keepable
from tests.memory.conversations import comparison_keys

CONFIG: Any = {"configurable": {"thread_id": "t"}}


def build_human(uid: str, text: str) -> HumanMessage:
    return HumanMessage(text, id=uid)


def list_ids(value: Sequence[BaseMessage]) -> list[str | None]:
    return [message.id for message in value]


def list_texts(value: Sequence[BaseMessage]) -> list[str]:
    return [message.text for message in value]


# -- the reducer

SOME_IDS = st.sampled_from("abc")
UPDATES = st.lists(
    st.builds(build_human, SOME_IDS, st.text("xyz", min_size=1, max_size=2))
    | st.builds(lambda uid: RemoveMessage(id=uid), SOME_IDS)
    | st.builds(lambda text: ("user", text), st.text("xyz", max_size=2)),
    max_size=6,
)


def reduce_updates(*updates: Any) -> list[tuple[str, str]] | str:
    """Return the types and texts that the reducer leaves after these updates, or its error."""
    try:
        merged: Any = functools.reduce(messages, updates)
    except ValueError as exc:
        return str(exc)
    assert len(set(list_ids(merged))) == len(merged)
    return [(message.type, message.text) for message in merged]


@given(UPDATES)
def test_updates_after_remove_all_merge_as_on_an_empty_list(update: list[Any]) -> None:
    old = [build_human("a", "old"), build_human("z", "old")]
    replacing = [build_human("a", "gone"), RemoveMessage(id=REMOVE_ALL_MESSAGES), *update]

    assert reduce_updates([], update) == reduce_updates(old, replacing)
    assert reduce_updates([], update) == reduce_updates(old, [Keep(0, 0), *replacing])


@given(st.lists(st.builds(build_human, SOME_IDS, st.text("xyz", max_size=2)), max_size=6), UPDATES)
def test_reducer_merges_duplicates_of_the_stored_list(stored: Any, update: Any) -> None:
    """An `Overwrite` can leave a list with duplicates."""
    assert reduce_updates([], stored, update) == reduce_updates(stored, update)


def test_later_message_replaces_an_earlier_one_with_its_id_in_place() -> None:
    """The order is that of the first occurrence, and a `Keep` counts messages after the merge."""
    remove_all = RemoveMessage(id=REMOVE_ALL_MESSAGES)
    update = [remove_all, build_human("a", "1"), build_human("b", "2"), build_human("a", "3")]

    assert list_texts(messages([build_human("c", "0")], update)) == ["3", "2"]
    assert list_texts(messages([], [*update, Keep(-1)])) == ["2"]
    assert list_texts(messages(update[1:], Keep(0, 1))) == ["3"]
    as_json = {"type": "remove", "content": "", "id": REMOVE_ALL_MESSAGES}
    assert list_texts(messages([build_human("c", "0")], [as_json, *update[1:]])) == ["3", "2"]


def test_reducer_drops_a_stored_remove_message() -> None:
    """`add_messages` leaves one in the list after the sentinel."""
    remove_all = RemoveMessage(id=REMOVE_ALL_MESSAGES)
    update: Any = [remove_all, build_human("a", "1"), RemoveMessage(id="b")]
    stored: Any = add_messages([], update)

    assert [RemoveMessage] == [type(message) for message in stored[1:]]
    assert list_texts(messages(stored, [build_human("c", "2")])) == ["1", "2"]


# -- nodes in graphs


def merge_writes(state: list[Any], writes: Sequence[list[Any]]) -> Any:
    return functools.reduce(add_messages, writes, state)  # type: ignore[arg-type]


class MergingState(TypedDict):
    messages: Annotated[list[AnyMessage], messages]
    summary: Any
    summarized: list[str]


class LanggraphState(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    summary: Any
    summarized: list[str]


class KeepableState(TypedDict):
    messages: Annotated[list[AnyMessage], keepable(add_messages)]
    summary: Any
    summarized: list[str]


class DeltaState(TypedDict):
    messages: Annotated[list[AnyMessage], DeltaChannel(merge_writes, snapshot_frequency=50)]
    summary: Any
    summarized: list[str]


STATES: list[Any] = [MergingState, LanggraphState, KeepableState, DeltaState]


def build_conversation_with_duplicates() -> list[BaseMessage]:
    """Return three turns. The first one calls a tool, and IDs occur twice in each turn."""
    call: Any = {"name": "look", "args": {}, "id": "call"}
    return [
        build_human("h1", "first"),
        AIMessage("", id="a1", tool_calls=[call]),
        ToolMessage("word " * 400, id="r1", tool_call_id="call", name="look"),
        AIMessage("looking", id="a2"),
        AIMessage("looked", id="a2"),
        build_human("h1", "first, edited"),
        build_human("h2", "second"),
        build_human("h3", "third"),
        build_human("h2", "second, edited"),
    ]


def build_graph_with_duplicates(state: Any, node: Any, saver: Any) -> Any:
    """Return a graph whose node runs after a list of messages has replaced the channel's."""
    builder = StateGraph(state)
    replaced = {"messages": Overwrite(build_conversation_with_duplicates()), "summarized": []}
    builder.add_node("replace", lambda state: replaced if not state["messages"] else {})
    builder.add_node("node", node)
    builder.add_edge(START, "replace").add_edge("replace", "node")
    return builder.compile(checkpointer=saver)


def invoke_graph(graph: Any, update: Any, is_async: bool) -> Any:
    if is_async:
        return asyncio.run(graph.ainvoke(update, CONFIG))
    return graph.invoke(update, CONFIG)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("state", STATES)
def test_trim_merges_duplicates_and_history_keeps_every_message(
    state: Any, is_async: bool, tmp_path: Path
) -> None:
    """The messages that fit stay, each ID once, and the next turns work."""
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        graph = build_graph_with_duplicates(state, trim(max_tokens=2, token_counter=len), saver)
        result = invoke_graph(graph, {"messages": []}, is_async)["messages"]
        assert list_texts(result) == ["second, edited", "third"]
        result = invoke_graph(graph, {"messages": [build_human("h4", "fourth")]}, is_async)[
            "messages"
        ]
        assert list_texts(result) == ["third", "fourth"]
        if state is not DeltaState:
            history = [item.value.text for item in saver.history("t")]
            assert [
                m.text for m in [*build_conversation_with_duplicates(), build_human("h4", "fourth")]
            ] == history


@pytest.mark.parametrize("state", STATES)
def test_trim_merges_duplicates_even_if_all_messages_fit(state: Any, tmp_path: Path) -> None:
    """Running the node again changes nothing."""
    node = trim(max_tokens=100, token_counter=len)
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        result = build_graph_with_duplicates(state, node, saver).invoke({"messages": []}, CONFIG)[
            "messages"
        ]

    assert list_ids(result) == ["h1", "a1", "r1", "a2", "h2", "h3"]
    assert list_texts(result)[0] == "first, edited"
    assert list_texts(result)[-2:] == ["second, edited", "third"]
    assert node.invoke({"messages": result}) == {}


@pytest.mark.parametrize("state", STATES)
def test_clear_tool_outputs_merges_duplicates(state: Any, tmp_path: Path) -> None:
    node = clear_tool_outputs(keep=0)
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        result = build_graph_with_duplicates(state, node, saver).invoke({"messages": []}, CONFIG)[
            "messages"
        ]

    assert list_ids(result) == ["h1", "a1", "r1", "a2", "h2", "h3"]
    assert result[2].text.startswith("[The result of look was cleared")
    assert list_texts(result)[3:] == ["looked", "second, edited", "third"]


@pytest.mark.parametrize("state", STATES)
def test_summarize_merges_duplicates_and_summarizes_each_message_once(
    state: Any, tmp_path: Path
) -> None:
    """The last text of each message is summarized."""
    model = FakeListChatModel(responses=["They looked."])
    node = summarize(model, trigger=("messages", 4), keep=("messages", 1))
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        result = build_graph_with_duplicates(state, node, saver).invoke({"messages": []}, CONFIG)

    assert list_texts(result["messages"]) == ["third"]
    assert result["summarized"] == ["h1", "a1", "r1", "a2", "h2"]
    assert result["summary"]["count"] == 5


def test_view_shows_a_message_with_duplicate_id_once() -> None:
    """It shows the last text at the first position, for a state and for a list."""
    trimming_view = view(trim(max_tokens=100, token_counter=len))
    expected = ["first, edited", "", "word " * 400, "looked", "second, edited", "third"]

    assert (
        list_texts(trimming_view(build_conversation_with_duplicates()))
        == expected
        == list_texts(trimming_view({"messages": build_conversation_with_duplicates()}))
    )
    assert comparison_keys(
        trimming_view(trimming_view(build_conversation_with_duplicates()))
    ) == comparison_keys(trimming_view(build_conversation_with_duplicates()))


def test_messages_without_ids_are_shown_but_refused_by_a_node() -> None:
    """The error of the node names the channel's reducer and `Overwrite`."""
    same: list[BaseMessage] = [HumanMessage("a"), AIMessage("b"), HumanMessage("a")]
    node = trim(max_tokens=1, token_counter=len)

    assert list_texts(view(trim(max_tokens=9, token_counter=len))(same)) == ["a", "b", "a"]
    for unnamed in (same, [*same, *build_conversation_with_duplicates()]):
        with pytest.raises(InvalidMessages, match=r"without ids; .*Overwrite"):
            node.invoke({"messages": unnamed})


def test_node_refuses_a_reducer_that_stores_removals() -> None:
    """The list does not grow forever."""
    node = trim(max_tokens=100, token_counter=len)
    stored = (
        build_conversation_with_duplicates()
        + node.invoke({"messages": build_conversation_with_duplicates()})["messages"]
    )  # the result of operator.add

    with pytest.raises(InvalidMessages, match="stored a RemoveMessage instead of applying it"):
        node.invoke({"messages": stored})


def test_trim_keeps_system_messages_when_it_merges_duplicates() -> None:
    stored = [SystemMessage("Rules", id="s"), *build_conversation_with_duplicates()]
    update = trim(max_tokens=3, token_counter=len).invoke({"messages": stored})["messages"]

    assert list_texts(messages(stored, update)) == ["Rules", "second, edited", "third"]
