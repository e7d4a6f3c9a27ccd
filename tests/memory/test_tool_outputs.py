"""Clearing old results of tools."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langgraph.graph import START, StateGraph, add_messages

from perdure import SQLiteCheckpointer
from perdure.errors import ConfigurationError, InvalidMessages
from perdure.memory import ChatState, clear_tool_outputs, view
from perdure.memory.nodes import MODEL_INPUT_KEY
from tests.memory.conversations import Talk, comparison_keys, conversations, find_newest_question
from tests.memory.providers import awaits_answer, find_refusals


def looked(results: int, size: int = 2_000) -> Talk:
    talk: Talk = [HumanMessage("look", id="h")]
    for i in range(results):
        talk.append(
            AIMessage("", id=f"c{i}", tool_calls=[{"name": "look", "args": {}, "id": f"{i}"}])
        )
        text = f"{i} " * size
        talk.append(ToolMessage(text, id=f"r{i}", tool_call_id=f"{i}", name="look", artifact=[i]))
    return talk


def parallel(results: int, size: int = 2_000) -> Talk:
    calls: Any = [{"name": "look", "args": {}, "id": f"{i}"} for i in range(results)]
    talk: Talk = [HumanMessage("look", id="h"), AIMessage("", id="c", tool_calls=calls)]
    for i in range(results):
        talk.append(ToolMessage(f"{i} " * size, id=f"r{i}", tool_call_id=f"{i}", name="look"))
    return talk


def answered(talk: Talk) -> Talk:
    return [*talk, AIMessage("Seen.", id="a"), HumanMessage("And now?", id="h2")]


def results(messages: list[BaseMessage]) -> list[str]:
    return [m.text[:8] for m in messages if isinstance(m, ToolMessage)]


def test_old_results_become_a_marker_and_new_ones_stay() -> None:
    """The marker names the tool and says what it took."""
    shown = clear_tool_outputs(keep=2)(looked(4))
    assert results(shown) == ["[The res", "[The res", "2 2 2 2 ", "3 3 3 3 "]
    assert shown[2].text.startswith("[The result of look was cleared (")
    assert isinstance(shown[2], ToolMessage)
    assert shown[2].artifact is None


def test_small_results_and_excluded_tools_stay() -> None:
    """Clearing is for bulky results."""
    one = answered(looked(1))
    assert results(clear_tool_outputs(keep=0)(answered(looked(1, size=3)))) == ["0 0 0 "]
    assert results(clear_tool_outputs(keep=0, exclude_tools=["look"])(one)) == ["0 0 0 0 "]
    assert results(clear_tool_outputs(keep=0)(one)) == ["[The res"]


def test_what_the_model_has_not_read_yet_is_never_cleared() -> None:
    """Of parallel calls all results, until it has answered; of those before them, none counts."""
    talk = [m.model_copy(update={"id": f"b{m.id}"}) for m in looked(1)]
    talk += parallel(5)[1:]
    node = clear_tool_outputs(keep=3)
    assert results(node(talk)) == ["[The res", *(f"{i} {i} {i} {i} " for i in range(5))]
    assert results(node(answered(talk)))[:3] == ["[The res"] * 3


@pytest.mark.parametrize("calls", ["tool_calls", "invalid_tool_calls"])
def test_a_state_keeps_what_a_view_shows_while_results_are_missing(calls: str) -> None:
    """A view leaves out a call without all its results: those before it are the newest then."""
    two: Any = [{"name": "look", "args": "{", "id": f"{i}", "error": ""} for i in range(2)]
    for each in two if calls == "tool_calls" else []:
        each["args"] = {}
        del each["error"]
    pending: Any = AIMessage("", id="c9", **{calls: two})
    talk: Talk = [*looked(2), pending, ToolMessage("0 " * 2_000, id="r9", tool_call_id="0")]
    node = clear_tool_outputs(keep=0)
    left: Any = add_messages(list[Any](talk), node.invoke({"messages": talk})["messages"])
    assert results(left) == ["[The res", "1 1 1 1 ", "0 0 0 0 "]
    assert node(left) == node(talk)


@given(conversations(), st.integers(0, 2), st.integers(50, 90))
def test_a_view_is_valid_and_settles(talk: Talk, keep: int, min_tokens: int) -> None:
    """Clearing what was cleared changes nothing; the question stays."""
    node = clear_tool_outputs(keep=keep, min_tokens=min_tokens)
    shown = node(talk)
    assert find_refusals(shown, to_answer=awaits_answer(talk)) == []
    assert comparison_keys(node(shown)) == comparison_keys(shown)
    question = find_newest_question(talk)
    assert question is None or question in shown
    assert view(node).invoke({"messages": talk}) == {MODEL_INPUT_KEY: shown}


@given(conversations(), st.integers(0, 2))
def test_a_state_has_lines_in_place_of_results_and_nothing_else_changes(
    talk: Talk, keep: int
) -> None:
    """Under the same ids; a second time there is nothing to clear."""
    node = clear_tool_outputs(keep=keep, min_tokens=50)
    update = node.invoke({"messages": talk})
    lines = {message.id: message for message in update.get("messages", [])}
    left: Any = add_messages(list[Any](talk), list(lines.values()))
    assert asyncio.run(node.ainvoke({"messages": talk})) == update
    assert left == [lines.get(message.id, message) for message in talk]
    assert all(m.text.startswith("[The result of ") for m in lines.values())
    assert comparison_keys(node(left)) == comparison_keys(node(talk))
    assert node.invoke({"messages": left}) == {}


def test_a_graph_clears_its_state_and_history_has_the_originals(tmp_path: Path) -> None:
    """What is shown inside a view leaves the state."""
    builder = StateGraph(ChatState).add_node("clear", clear_tool_outputs(keep=1))
    builder.add_edge(START, "clear")
    with SQLiteCheckpointer.open(tmp_path / "a.db") as saver:
        graph = builder.compile(checkpointer=saver)
        thread: Any = {"configurable": {"thread_id": "t"}}
        out = graph.invoke({"messages": answered(looked(2))}, thread)
        said = [item.value for item in saver.history("t")]
    assert results(out["messages"]) == ["[The res", "1 1 1 1 "]
    assert "0 0 0 0 " in results(said)
    assert results(view(clear_tool_outputs(keep=0))(out)) == ["[The res", "[The res"]


def test_results_without_ids_are_not_cleared_in_a_state() -> None:
    """A line would be added to them instead."""
    talk = [message.model_copy(update={"id": None}) for message in looked(2)]
    with pytest.raises(InvalidMessages, match="without ids"):
        clear_tool_outputs(keep=1).invoke({"messages": talk})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep": -1}, "keep is -1"),
        ({"min_tokens": 1.5}, "min_tokens is 1.5"),
        ({"min_tokens": 20}, "min_tokens is 20"),
        ({"exclude_tools": "look"}, "exclude_tools is 'look'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    """Before anything runs."""
    with pytest.raises(ConfigurationError) as caught:
        clear_tool_outputs(**options)
    assert said in str(caught.value)
