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
from perdure.memory.reducers import keepable
from tests.memory.conversations import comparison_keys

CONFIG: Any = {"configurable": {"thread_id": "t"}}


def human(uid: str, text: str) -> HumanMessage:
    return HumanMessage(text, id=uid)


def ids(value: Sequence[BaseMessage]) -> list[str | None]:
    return [message.id for message in value]


def texts(value: Sequence[BaseMessage]) -> list[str]:
    return [message.text for message in value]


# -- the reducer

SOME_IDS = st.sampled_from("abc")
UPDATES = st.lists(
    st.builds(human, SOME_IDS, st.text("xyz", min_size=1, max_size=2))
    | st.builds(lambda uid: RemoveMessage(id=uid), SOME_IDS)
    | st.builds(lambda text: ("user", text), st.text("xyz", max_size=2)),
    max_size=6,
)


def outcome(*updates: Any) -> list[tuple[str, str]] | str:
    """The types and contents that the reducer gives for these updates, or its refusal."""
    try:
        merged: Any = functools.reduce(messages, updates)
    except ValueError as exc:
        return str(exc)
    assert len(set(ids(merged))) == len(merged)
    return [(message.type, message.text) for message in merged]


@given(UPDATES)
def test_the_reducer_merges_after_the_sentinel_as_before_it(update: list[Any]) -> None:
    """An update that follows REMOVE_ALL_MESSAGES has the result that it has on an empty list."""
    old = [human("a", "old"), human("z", "old")]
    replacing = [human("a", "gone"), RemoveMessage(id=REMOVE_ALL_MESSAGES), *update]

    assert outcome([], update) == outcome(old, replacing)
    assert outcome([], update) == outcome(old, [Keep(0, 0), *replacing])


@given(st.lists(st.builds(human, SOME_IDS, st.text("xyz", max_size=2)), max_size=6), UPDATES)
def test_the_reducer_returns_unique_ids_whatever_it_is_given(left: Any, update: Any) -> None:
    """A list with duplicates, as an Overwrite leaves it, has the result of the list merged."""
    assert outcome([], left, update) == outcome(left, update)


def test_a_later_message_takes_the_place_of_an_earlier_one() -> None:
    """The order is that of the first occurrence, and a keep counts messages after the merge."""
    remove_all = RemoveMessage(id=REMOVE_ALL_MESSAGES)
    update = [remove_all, human("a", "1"), human("b", "2"), human("a", "3")]

    assert texts(messages([human("c", "0")], update)) == ["3", "2"]
    assert texts(messages([], [*update, Keep(-1)])) == ["2"]
    assert texts(messages(update[1:], Keep(0, 1))) == ["3"]
    as_json = {"type": "remove", "content": "", "id": REMOVE_ALL_MESSAGES}
    assert texts(messages([human("c", "0")], [as_json, *update[1:]])) == ["3", "2"]


def test_a_removal_that_was_stored_does_not_stay() -> None:
    """A list with a RemoveMessage, as `add_messages` leaves it after the sentinel, is repaired."""
    remove_all = RemoveMessage(id=REMOVE_ALL_MESSAGES)
    update: Any = [remove_all, human("a", "1"), RemoveMessage(id="b")]
    stored: Any = add_messages([], update)

    assert [RemoveMessage] == [type(message) for message in stored[1:]]
    assert texts(messages(stored, [human("c", "2")])) == ["1", "2"]


# -- nodes in graphs


def merge_writes(state: list[Any], writes: Sequence[list[Any]]) -> Any:
    return functools.reduce(add_messages, writes, state)  # type: ignore[arg-type]


class Merging(TypedDict):
    messages: Annotated[list[AnyMessage], messages]
    summary: Any
    summarized: list[str]


class Langgraphs(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    summary: Any
    summarized: list[str]


class Keepable(TypedDict):
    messages: Annotated[list[AnyMessage], keepable(add_messages)]
    summary: Any
    summarized: list[str]


class Delta(TypedDict):
    messages: Annotated[list[AnyMessage], DeltaChannel(merge_writes, snapshot_frequency=50)]
    summary: Any
    summarized: list[str]


STATES: list[Any] = [Merging, Langgraphs, Keepable, Delta]


def talk() -> list[BaseMessage]:
    """Three turns, the first with a call of a tool; ids occur twice in each turn."""
    call: Any = {"name": "look", "args": {}, "id": "call"}
    return [
        human("h1", "first"),
        AIMessage("", id="a1", tool_calls=[call]),
        ToolMessage("word " * 400, id="r1", tool_call_id="call", name="look"),
        AIMessage("looking", id="a2"),
        AIMessage("looked", id="a2"),
        human("h1", "first, edited"),
        human("h2", "second"),
        human("h3", "third"),
        human("h2", "second, edited"),
    ]


def started(state: Any, node: Any, saver: Any) -> Any:
    """A graph whose node runs upon a list of messages that replaced the channel's."""
    builder = StateGraph(state)
    replaced = {"messages": Overwrite(talk()), "summarized": []}
    builder.add_node("replace", lambda state: replaced if not state["messages"] else {})
    builder.add_node("node", node)
    builder.add_edge(START, "replace").add_edge("replace", "node")
    return builder.compile(checkpointer=saver)


def invoke(graph: Any, update: Any, awaited: bool) -> Any:
    if awaited:
        return asyncio.run(graph.ainvoke(update, CONFIG))
    return graph.invoke(update, CONFIG)


@pytest.mark.parametrize("awaited", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("state", STATES)
def test_trim_repairs_a_list_with_duplicates(state: Any, awaited: bool, tmp_path: Path) -> None:
    """What fits stays, each id once, and the next turns go on; the history has every message."""
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        graph = started(state, trim(max_tokens=2, token_counter=len), saver)
        out = invoke(graph, {"messages": []}, awaited)["messages"]
        assert texts(out) == ["second, edited", "third"]
        out = invoke(graph, {"messages": [human("h4", "fourth")]}, awaited)["messages"]
        assert texts(out) == ["third", "fourth"]
        if state is not Delta:
            told = [item.value.text for item in saver.history("t")]
            assert [m.text for m in [*talk(), human("h4", "fourth")]] == told


@pytest.mark.parametrize("state", STATES)
def test_trim_repairs_a_list_from_which_nothing_has_to_go(state: Any, tmp_path: Path) -> None:
    """The duplicates are merged although all messages fit; running it again changes nothing."""
    node = trim(max_tokens=100, token_counter=len)
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        out = started(state, node, saver).invoke({"messages": []}, CONFIG)["messages"]

    assert ids(out) == ["h1", "a1", "r1", "a2", "h2", "h3"]
    assert texts(out)[0] == "first, edited"
    assert texts(out)[-2:] == ["second, edited", "third"]
    assert node.invoke({"messages": out}) == {}


@pytest.mark.parametrize("state", STATES)
def test_clear_tool_outputs_repairs_a_list_with_duplicates(state: Any, tmp_path: Path) -> None:
    """Old results are cleared, and each id is there once."""
    node = clear_tool_outputs(keep=0)
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        out = started(state, node, saver).invoke({"messages": []}, CONFIG)["messages"]

    assert ids(out) == ["h1", "a1", "r1", "a2", "h2", "h3"]
    assert out[2].text.startswith("[The result of look was cleared")
    assert texts(out)[3:] == ["looked", "second, edited", "third"]


@pytest.mark.parametrize("state", STATES)
def test_summarize_repairs_a_list_with_duplicates(state: Any, tmp_path: Path) -> None:
    """Each message is summarised once, with its last text; the newest turn stays, once."""
    model = FakeListChatModel(responses=["They looked."])
    node = summarize(model, trigger=("messages", 4), keep=("messages", 1))
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        out = started(state, node, saver).invoke({"messages": []}, CONFIG)

    assert texts(out["messages"]) == ["third"]
    assert out["summarized"] == ["h1", "a1", "r1", "a2", "h2"]
    assert out["summary"]["count"] == 5


def test_a_view_shows_a_message_once() -> None:
    """With its last text, in the place of the first, for a state and for a list alike."""
    shown = view(trim(max_tokens=100, token_counter=len))
    expected = ["first, edited", "", "word " * 400, "looked", "second, edited", "third"]

    assert texts(shown(talk())) == expected == texts(shown({"messages": talk()}))
    assert comparison_keys(shown(shown(talk()))) == comparison_keys(shown(talk()))


def test_messages_without_ids_are_never_merged() -> None:
    """They are shown as they are; a node names the channel's reducer, and Overwrite, as before."""
    same: list[BaseMessage] = [HumanMessage("a"), AIMessage("b"), HumanMessage("a")]
    node = trim(max_tokens=1, token_counter=len)

    assert texts(view(trim(max_tokens=9, token_counter=len))(same)) == ["a", "b", "a"]
    for unnamed in (same, [*same, *talk()]):
        with pytest.raises(InvalidMessages, match=r"without ids; .*Overwrite"):
            node.invoke({"messages": unnamed})


def test_a_reducer_that_stores_the_replacement_is_named() -> None:
    """Where a reducer applies no removals, the node says so; the list does not grow for ever."""
    node = trim(max_tokens=100, token_counter=len)
    stored = talk() + node.invoke({"messages": talk()})["messages"]  # what operator.add gives

    with pytest.raises(InvalidMessages, match="stored a RemoveMessage instead of applying it"):
        node.invoke({"messages": stored})


def test_system_messages_are_not_lost_in_a_repair() -> None:
    """The first message of the thread stays where it is."""
    given = [SystemMessage("Rules", id="s"), *talk()]
    update = trim(max_tokens=3, token_counter=len).invoke({"messages": given})["messages"]

    assert texts(messages(given, update)) == ["Rules", "second, edited", "third"]
