"""Clearing old results of tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langgraph.graph import END, START, StateGraph, add_messages

from perdure import SQLiteCheckpointer
from perdure.errors import ConfigurationError, InvalidMessages
from perdure.memory import ChatState, clear_tool_outputs
from perdure.memory.nodes import SHOWN
from tests.memory.conversations import Talk, conversations, keys, newest_human
from tests.memory.providers import refusals


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


@pytest.mark.parametrize("missing", [0, 1])
def test_what_the_model_has_not_read_yet_is_never_cleared(missing: int) -> None:
    """Of parallel calls all results, until it has answered; of those before them, none counts."""
    talk = [m.model_copy(update={"id": f"b{m.id}"}) for m in looked(1)]
    talk += parallel(5)[1 : 7 - missing]
    cleared = clear_tool_outputs(keep=3, mode="state")
    node = clear_tool_outputs(keep=3)
    if not missing:
        assert results(node(talk)) == ["[The res", *(f"{i} {i} {i} {i} " for i in range(5))]
    [only] = cleared.invoke({"messages": talk})["messages"]
    assert only.id == "br0"
    read = answered(talk)
    if not missing:
        assert results(node(read))[:3] == ["[The res"] * 3
    assert len(cleared.invoke({"messages": read})["messages"]) == 3 - missing


def test_a_state_without_ids_is_refused() -> None:
    """A result that cannot be replaced is not passed over in silence."""
    talk = answered(looked(2))
    for message in talk:
        message.id = None
    with pytest.raises(InvalidMessages, match="a tool message without an id"):
        clear_tool_outputs(keep=0, mode="state").invoke({"messages": talk})
    assert clear_tool_outputs(keep=2, mode="state").invoke({"messages": talk}) == {}
    assert results(clear_tool_outputs(keep=0)(talk)) == ["[The res"] * 2


def test_a_state_keeps_the_markers_and_history_the_originals(tmp_path: Path) -> None:
    """The message of the state is replaced under its id."""
    builder = StateGraph(ChatState)
    builder.add_node("clear", clear_tool_outputs(keep=1, mode="state"))
    builder.add_edge(START, "clear")
    builder.add_edge("clear", END)
    with SQLiteCheckpointer.open(tmp_path / "a.db") as saver:
        graph = builder.compile(checkpointer=saver)
        thread: Any = {"configurable": {"thread_id": "t"}}
        out = graph.invoke({"messages": looked(3)}, thread)
        assert results(out["messages"]) == ["[The res", "[The res", "2 2 2 2 "]
        said = [item.value for item in saver.history("t")]
    originals = {m.id: m.content for m in looked(3)}
    assert {m.id: m.content for m in said if m.content in originals.values()} == originals


@given(conversations(), st.integers(0, 2), st.integers(50, 90))
def test_a_view_is_valid_and_settles(talk: Talk, keep: int, min_tokens: int) -> None:
    """Clearing what was cleared changes nothing; the question stays."""
    node = clear_tool_outputs(keep=keep, min_tokens=min_tokens)
    shown = node(talk)
    assert refusals(shown) == []
    assert keys(node(shown)) == keys(shown)
    question = newest_human(talk)
    assert question is None or question in shown
    assert node.invoke({"messages": talk}) == {SHOWN: shown}
    cleared = clear_tool_outputs(keep=keep, min_tokens=min_tokens, mode="state")
    left: Any = add_messages(
        list[Any](talk), cleared.invoke({"messages": talk}).get("messages", [])
    )
    assert [m.id for m in left] == [m.id for m in talk]
    assert cleared.invoke({"messages": left}) == {}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep": -1}, "keep is -1"),
        ({"min_tokens": 1.5}, "min_tokens is 1.5"),
        ({"min_tokens": 20}, "min_tokens is 20"),
        ({"exclude_tools": "look"}, "exclude_tools is 'look'"),
        ({"mode": "both"}, "mode is 'both'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    """Before anything runs."""
    with pytest.raises(ConfigurationError) as caught:
        clear_tool_outputs(**options)
    assert said in str(caught.value)
