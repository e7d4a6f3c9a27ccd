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
from perdure.memory.short_term.tokens import count_tokens, token_counter
from tests.memory.fake_models import make_tool_calling_model
from tests.memory.provider_rules import find_refusals

LINE = re.compile(r"\[(\d+) earlier steps? of your work on this message left out")


def build_turn(exchanges: int, question: Any = "Which file?") -> list[AnyMessage]:
    talk: list[AnyMessage] = [HumanMessage(question, id="q")]
    for n in range(exchanges):
        call = {"name": "look", "args": {"at": n}, "id": f"c{n}"}
        talk.append(AIMessage("", tool_calls=[call], id=f"a{n}"))
        talk.append(ToolMessage("found " * 60, tool_call_id=f"c{n}", id=f"t{n}"))
    return talk


def list_stated_numbers(messages: Sequence[BaseMessage]) -> list[int]:
    """Return the numbers that the lines in messages state."""
    return [int(number) for message in messages for number in LINE.findall(message.text)]


def count_exchanges(messages: Sequence[BaseMessage]) -> int:
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
def test_line_after_the_question_states_the_omitted_steps(form: str, question: Any) -> None:
    """The request is valid and within its budget, and the question before the line is unchanged."""
    talk = [HumanMessage("Hi", id="h"), AIMessage("Hello", id="b"), *build_turn(20, question)]
    request = PARTS[form](talk)
    question_message = next(message for message in request if message.id == "q")

    assert (
        list_stated_numbers(request)
        == list_stated_numbers([question_message])
        == [20 - count_exchanges(request)]
    )
    assert question_message.text.startswith("Which file?")
    assert "They were carried out." in question_message.text
    assert find_refusals(request, to_answer=True) == []
    assert talk[2].content == question
    if form not in ("messages", "view"):
        assert count_tokens(request, token_counter()) <= 300


@pytest.mark.parametrize("form", PARTS)
def test_no_line_if_everything_fits_or_only_whole_turns_are_omitted(form: str) -> None:
    several: list[AnyMessage] = [HumanMessage(f"Question {n}", id=f"h{n}") for n in range(80)]
    for talk in (build_turn(1), several):
        if form == "partial" and len(talk) < 5:
            continue
        assert list_stated_numbers(PARTS[form](talk)) == []


def test_second_trim_adds_to_the_number_of_the_line() -> None:
    """A second application with the same budget changes nothing."""
    trimmed_once = trim(600)(build_turn(30))
    trimmed_twice = trim(300)(trimmed_once)
    chained = view(trim(600), trim(300))(build_turn(30))

    assert list_stated_numbers(trimmed_once) == [30 - count_exchanges(trimmed_once)]
    assert list_stated_numbers(trimmed_twice) == [30 - count_exchanges(trimmed_twice)]
    assert list_stated_numbers(chained) == [30 - count_exchanges(chained)]
    assert trim(300)(trimmed_twice) == trimmed_twice
    trimmed_to_one_step = trim(250)(build_turn(3))
    assert "earlier step" in trimmed_to_one_step[0].text


def test_agent_requests_state_omitted_steps_and_its_thread_does_not(
    file_saver: SQLiteCheckpointer,
) -> None:
    """The thread has all messages."""

    @tool
    def look(what: str) -> str:
        """Look something up."""
        return "found " * 40

    model = make_tool_calling_model(12)
    memory = MemoryMiddleware(trim(max_tokens=500))
    agent: Any = create_agent(model, [look], middleware=[memory], checkpointer=file_saver)
    config: Any = {"configurable": {"thread_id": "t"}, "recursion_limit": 100}
    input: Any = {"messages": [HumanMessage("Which file?")]}
    output = asyncio.run(agent.ainvoke(input, config))

    for number, request in enumerate(model.requests):
        missing = number - count_exchanges(request)
        assert list_stated_numbers(request) == ([missing] if missing else [])
    assert list_stated_numbers(model.requests[-1]) != []
    assert len(output["messages"]) == 26
    assert list_stated_numbers(output["messages"]) == []
    assert list_stated_numbers([item.value for item in file_saver.history("t")]) == []


def test_trim_as_a_node_only_removes_messages() -> None:
    """`trim` removes exchanges from the state and does not change other messages."""
    talk = build_turn(20)
    update = trim(300).invoke({"messages": talk})

    assert {type(message).__name__ for message in update["messages"]} == {"RemoveMessage"}


@given(
    exchanges=st.integers(0, 12),
    size=st.integers(40, 600),
    older=st.integers(0, 3),
    strategy=st.sampled_from(["last", "first"]),
    has_question=st.booleans(),
)
def test_line_states_the_right_number_for_random_turns(
    exchanges: int, size: int, older: int, strategy: Any, has_question: bool
) -> None:
    """Each request is within its budget. The line is there unless it has no room."""
    older_messages: list[AnyMessage] = [HumanMessage("Hi " * 20) for _ in range(older)]
    talk = [*older_messages, *build_turn(exchanges)][0 if has_question or older_messages else 1 :]
    trimming = trim(size, strategy=strategy, allow_partial=True)
    try:
        request = trimming(talk)
    except BudgetExceeded:
        return
    missing = exchanges - count_exchanges(request)

    assert list_stated_numbers(request) in ([missing] if missing else [], [])
    assert count_tokens(request) <= size
    assert find_refusals(request, to_answer=True) == []
    if missing and size > 150:
        assert list_stated_numbers(request) == [missing]
