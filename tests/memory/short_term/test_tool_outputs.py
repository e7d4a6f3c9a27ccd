"""Clearing old tool results."""

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
from tests.memory.provider_rules import awaits_answer, find_refusals


def make_sequential_calls(results: int, size: int = 2_000) -> Talk:
    conversation: Talk = [HumanMessage("look", id="h")]
    for i in range(results):
        conversation.append(
            AIMessage("", id=f"c{i}", tool_calls=[{"name": "look", "args": {}, "id": f"{i}"}])
        )
        text = f"{i} " * size
        conversation.append(
            ToolMessage(text, id=f"r{i}", tool_call_id=f"{i}", name="look", artifact=[i])
        )
    return conversation


def make_parallel_calls(results: int, size: int = 2_000) -> Talk:
    calls: Any = [{"name": "look", "args": {}, "id": f"{i}"} for i in range(results)]
    talk: Talk = [HumanMessage("look", id="h"), AIMessage("", id="c", tool_calls=calls)]
    for i in range(results):
        talk.append(ToolMessage(f"{i} " * size, id=f"r{i}", tool_call_id=f"{i}", name="look"))
    return talk


def add_answer_and_question(conversation: Talk) -> Talk:
    return [*conversation, AIMessage("Seen.", id="a"), HumanMessage("And now?", id="h2")]


def list_result_starts(messages: list[BaseMessage]) -> list[str]:
    return [m.text[:8] for m in messages if isinstance(m, ToolMessage)]


def test_old_results_are_replaced_by_marker_and_new_ones_stay() -> None:
    """The marker names the tool and the number of tokens."""
    shown = clear_tool_outputs(keep=2)(make_sequential_calls(4))
    assert list_result_starts(shown) == ["[The res", "[The res", "2 2 2 2 ", "3 3 3 3 "]
    assert shown[2].text.startswith("[The result of look was cleared (")
    assert isinstance(shown[2], ToolMessage)
    assert shown[2].artifact is None


def test_small_results_and_excluded_tools_are_not_cleared() -> None:
    one = add_answer_and_question(make_sequential_calls(1))
    assert list_result_starts(
        clear_tool_outputs(keep=0)(add_answer_and_question(make_sequential_calls(1, size=3)))
    ) == ["0 0 0 "]
    assert list_result_starts(clear_tool_outputs(keep=0, exclude_tools=["look"])(one)) == [
        "0 0 0 0 "
    ]
    assert list_result_starts(clear_tool_outputs(keep=0)(one)) == ["[The res"]


def test_results_that_model_has_not_answered_are_never_cleared() -> None:
    """All results of parallel calls stay until the model has answered.

    They do not count for `keep`.
    """
    talk = [m.model_copy(update={"id": f"b{m.id}"}) for m in make_sequential_calls(1)]
    talk += make_parallel_calls(5)[1:]
    node = clear_tool_outputs(keep=3)
    assert list_result_starts(node(talk)) == ["[The res", *(f"{i} {i} {i} {i} " for i in range(5))]
    assert list_result_starts(node(add_answer_and_question(talk)))[:3] == ["[The res"] * 3


@pytest.mark.parametrize("calls", ["tool_calls", "invalid_tool_calls"])
def test_incomplete_call_does_not_count_for_kept_results(calls: str) -> None:
    """A view leaves out a call with a missing result, so the results before it are the newest."""
    two: Any = [{"name": "look", "args": "{", "id": f"{i}", "error": ""} for i in range(2)]
    for call in two if calls == "tool_calls" else []:
        call["args"] = {}
        del call["error"]
    pending: Any = AIMessage("", id="c9", **{calls: two})
    talk: Talk = [
        *make_sequential_calls(2),
        pending,
        ToolMessage("0 " * 2_000, id="r9", tool_call_id="0"),
    ]
    node = clear_tool_outputs(keep=0)
    cleared: Any = add_messages(list[Any](talk), node.invoke({"messages": talk})["messages"])
    assert list_result_starts(cleared) == ["[The res", "1 1 1 1 ", "0 0 0 0 "]
    assert node(cleared) == node(talk)


@given(conversations(), st.integers(0, 2), st.integers(50, 90))
def test_cleared_random_conversation_is_valid_and_clearing_is_idempotent(
    conversation: Talk, keep: int, min_tokens: int
) -> None:
    """The newest question stays."""
    node = clear_tool_outputs(keep=keep, min_tokens=min_tokens)
    shown = node(conversation)
    assert find_refusals(shown, to_answer=awaits_answer(conversation)) == []
    assert comparison_keys(node(shown)) == comparison_keys(shown)
    question = find_newest_question(conversation)
    assert question is None or question in shown
    assert view(node).invoke({"messages": conversation}) == {MODEL_INPUT_KEY: shown}


@given(conversations(), st.integers(0, 2))
def test_clearing_random_state_replaces_only_results_under_same_ids(
    conversation: Talk, keep: int
) -> None:
    """A second run of the node clears nothing."""
    node = clear_tool_outputs(keep=keep, min_tokens=50)
    update = node.invoke({"messages": conversation})
    lines = {message.id: message for message in update.get("messages", [])}
    cleared: Any = add_messages(list[Any](conversation), list(lines.values()))
    assert asyncio.run(node.ainvoke({"messages": conversation})) == update
    assert cleared == [lines.get(message.id, message) for message in conversation]
    assert all(m.text.startswith("[The result of ") for m in lines.values())
    assert comparison_keys(node(cleared)) == comparison_keys(node(conversation))
    assert node.invoke({"messages": cleared}) == {}


def test_graph_clears_state_and_history_keeps_originals(tmp_path: Path) -> None:
    builder = StateGraph(ChatState).add_node("clear", clear_tool_outputs(keep=1))
    builder.add_edge(START, "clear")
    with SQLiteCheckpointer.open(tmp_path / "a.db") as saver:
        graph = builder.compile(checkpointer=saver)
        thread: Any = {"configurable": {"thread_id": "t"}}
        out = graph.invoke({"messages": add_answer_and_question(make_sequential_calls(2))}, thread)
        history = [item.value for item in saver.history("t")]
    assert list_result_starts(out["messages"]) == ["[The res", "1 1 1 1 "]
    assert "0 0 0 0 " in list_result_starts(history)
    assert list_result_starts(view(clear_tool_outputs(keep=0))(out)) == ["[The res", "[The res"]


def test_clearing_state_refuses_results_without_ids() -> None:
    """A replacement without an id would be appended."""
    talk = [message.model_copy(update={"id": None}) for message in make_sequential_calls(2)]
    with pytest.raises(InvalidMessages, match="without ids"):
        clear_tool_outputs(keep=1).invoke({"messages": talk})


@pytest.mark.parametrize(
    ("options", "expected_message"),
    [
        ({"keep": -1}, "keep is -1"),
        ({"min_tokens": 1.5}, "min_tokens is 1.5"),
        ({"min_tokens": 20}, "min_tokens is 20"),
        ({"exclude_tools": "look"}, "exclude_tools is 'look'"),
    ],
)
def test_invalid_options_are_refused_by_name(
    options: dict[str, Any], expected_message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        clear_tool_outputs(**options)
    assert expected_message in str(caught.value)
