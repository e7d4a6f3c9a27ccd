"""The line that says how many steps of the newest turn a request leaves out."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import BudgetExceeded
from perdure.memory import MemoryMiddleware, assemble, clear_tool_outputs, trim, view
from perdure.memory.tokens import count_tokens, token_counter
from tests.memory.fake_models import make_tool_calling_model
from tests.memory.providers import find_refusals

LINE = re.compile(r"\[(\d+) earlier steps? of your work on this message left out")


def a_turn(exchanges: int, question: Any = "Which file?") -> list[AnyMessage]:
    talk: list[AnyMessage] = [HumanMessage(question, id="q")]
    for n in range(exchanges):
        call = {"name": "look", "args": {"at": n}, "id": f"c{n}"}
        talk.append(AIMessage("", tool_calls=[call], id=f"a{n}"))
        talk.append(ToolMessage("found " * 60, tool_call_id=f"c{n}", id=f"t{n}"))
    return talk


def stated(messages: Sequence[BaseMessage]) -> list[int]:
    """Return the numbers that lines in messages say."""
    return [int(found) for message in messages for found in LINE.findall(message.text)]


def exchanges_of(messages: Sequence[BaseMessage]) -> int:
    return sum(isinstance(message, ToolMessage) for message in messages)


PARTS: dict[str, Any] = {
    "trim": trim(300),
    "first": trim(300, strategy="first"),
    "view": view(clear_tool_outputs(), trim(300)),
    "assemble": assemble(max_tokens=300),
    "messages": trim(9, token_counter=len),
    "partial": trim(120, allow_partial=True),
}


@pytest.mark.parametrize("form", PARTS)
@pytest.mark.parametrize("question", ["Which file?", [{"type": "text", "text": "Which file?"}]])
def test_a_line_after_the_question_says_what_is_left_out(form: str, question: Any) -> None:
    """The request is valid and within its budget; the question itself is unchanged before it."""
    talk = [HumanMessage("Hi", id="h"), AIMessage("Hello", id="b"), *a_turn(20, question)]
    shown = PARTS[form](talk)
    asked = next(message for message in shown if message.id == "q")

    assert stated(shown) == stated([asked]) == [20 - exchanges_of(shown)]
    assert asked.text.startswith("Which file?")
    assert "They were carried out." in asked.text
    assert find_refusals(shown, to_answer=True) == []
    assert talk[2].content == question
    if form not in ("messages", "view"):
        assert count_tokens(shown, token_counter()) <= 300


@pytest.mark.parametrize("form", PARTS)
def test_where_everything_fits_there_is_no_line(form: str) -> None:
    """Nor where whole turns are left out: that is what a window does."""
    several: list[AnyMessage] = [HumanMessage(f"Question {n}", id=f"h{n}") for n in range(80)]
    for talk in (a_turn(1), several):
        if form == "partial" and len(talk) < 5:
            continue
        assert stated(PARTS[form](talk)) == []


def test_a_part_that_cuts_again_adds_to_the_line() -> None:
    """Also over a list that was cut before; and twice the same changes nothing."""
    once = trim(600)(a_turn(30))
    again = trim(300)(once)
    chained = view(trim(600), trim(300))(a_turn(30))

    assert stated(once) == [30 - exchanges_of(once)]
    assert stated(again) == [30 - exchanges_of(again)]
    assert stated(chained) == [30 - exchanges_of(chained)]
    assert trim(300)(again) == again
    one = trim(250)(a_turn(3))
    assert "earlier step" in one[0].text


def test_an_agent_is_told_in_each_request(file_saver: SQLiteCheckpointer) -> None:
    """And its thread has neither the line nor fewer messages."""

    @tool
    def look(what: str) -> str:
        """Look something up."""
        return "found " * 40

    model = make_tool_calling_model(12)
    memory = MemoryMiddleware(trim(max_tokens=500))
    agent: Any = create_agent(model, [look], middleware=[memory], checkpointer=file_saver)
    config: Any = {"configurable": {"thread_id": "t"}, "recursion_limit": 100}
    asked: Any = {"messages": [HumanMessage("Which file?")]}
    out = asyncio.run(agent.ainvoke(asked, config))

    for number, request in enumerate(model.requests):
        missing = number - exchanges_of(request)
        assert stated(request) == ([missing] if missing else [])
    assert stated(model.requests[-1]) != []
    assert len(out["messages"]) == 26
    assert stated(out["messages"]) == []
    assert stated([item.value for item in file_saver.history("t")]) == []


def test_a_node_leaves_the_messages_as_they_were_said() -> None:
    """`trim` as a node removes exchanges from the state and does not change other messages."""
    talk = a_turn(20)
    update = trim(300).invoke({"messages": talk})

    assert {type(message).__name__ for message in update["messages"]} == {"RemoveMessage"}


@given(
    exchanges=st.integers(0, 12),
    size=st.integers(40, 600),
    older=st.integers(0, 3),
    strategy=st.sampled_from(["last", "first"]),
    asked=st.booleans(),
)
def test_the_line_is_right_over_random_turns(
    exchanges: int, size: int, older: int, strategy: Any, asked: bool
) -> None:
    """Each request is within its budget; where steps are missing it says how many, if it can."""
    before: list[AnyMessage] = [HumanMessage("Hi " * 20) for _ in range(older)]
    talk = [*before, *a_turn(exchanges)][0 if asked or before else 1 :]
    cut = trim(size, strategy=strategy, allow_partial=True)
    try:
        shown = cut(talk)
    except BudgetExceeded:
        return
    missing = exchanges - exchanges_of(shown)

    assert stated(shown) in ([missing] if missing else [], [])
    assert count_tokens(shown) <= size
    assert find_refusals(shown, to_answer=True) == []
    if missing and size > 150:
        assert stated(shown) == [missing]
