"""Parts of short-term memory upon each other: every composition shows a valid sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableLambda

from perdure import SQLiteStore
from perdure.errors import BudgetExceeded, ConfigurationError
from perdure.memory import (
    Instructions,
    clear_tool_outputs,
    summarize,
    trim,
    use_instructions,
    view,
)
from perdure.memory.nodes import SHOWN, MessagesNode
from tests.memory.conversations import Talk, conversations, keys, newest_human, total
from tests.memory.providers import refusals

BUDGET = 250


def count(messages: list[BaseMessage]) -> int:
    return total(messages, lambda message: 3 + len(str(message.content)) // 2)


def sums_up(_: Any) -> AIMessage:
    return AIMessage("They spoke of trains.")


def _instructed() -> MessagesNode:
    store = SQLiteStore.open(":memory:", index=None)
    return use_instructions(Instructions(store, default="Be kind."))


MAKERS: dict[str, Callable[[], MessagesNode]] = {
    "instructions": _instructed,
    "summary": lambda: summarize(RunnableLambda(sums_up), when={"messages": 4}, keep_turns=1),
    "summary for a human": lambda: summarize(
        RunnableLambda(sums_up), when={"messages": 2}, keep_turns=2, form="human", mode="view"
    ),
    "clearing": lambda: clear_tool_outputs(keep=1, at_least=50),
    "turns": lambda: trim(turns=2),
    "tokens": lambda: trim(tokens=BUDGET, counter=count),
    "first": lambda: trim(tokens=BUDGET, counter=count, strategy="first", truncate=True),
}
NODES = {name: make() for name, make in MAKERS.items()}
summaries = st.one_of(
    st.none(), st.just({"text": "Of planes.", "last": "m1", "count": 2}), st.just("Of ships.")
)


@given(conversations(), st.lists(st.sampled_from(list(NODES)), min_size=1, max_size=4), summaries)
def test_every_composition_shows_a_valid_sequence(
    talk: Talk, names: list[str], summary: Any
) -> None:
    """Sync and async alike; the question is in it; what cuts last keeps its budget."""
    shows = view(*(NODES[name] for name in names))
    state = {"messages": talk, "summary": summary, "summarized": []}
    try:
        update = shows.invoke(state)
    except BudgetExceeded:
        with pytest.raises(BudgetExceeded):
            asyncio.run(shows.ainvoke(state))
        return
    shown = update[SHOWN]
    assert list(update) == [SHOWN]
    assert keys(asyncio.run(shows.ainvoke(state))[SHOWN]) == keys(shown)
    assert refusals(shown) == []
    question = newest_human(talk)
    assert question is None or question.id in [message.id for message in shown]
    if names[-1] in ("tokens", "first"):
        assert count(shown) <= BUDGET
    assert keys(shows.invoke(state)[SHOWN]) == keys(shown)


def test_the_parts_of_a_view_in_order() -> None:
    """The summary after the instructions, in one system message; the rest cut to what fits."""
    talk: Talk = [SystemMessage("Old.")]
    for n in range(6):
        talk += [HumanMessage(f"q{n}", id=f"q{n}"), AIMessage(f"a{n}", id=f"a{n}")]
    talk.append(HumanMessage("now", id="now"))
    state = {"messages": talk, "summary": {"text": "Of planes.", "last": "a2", "count": 6}}
    shows = view(NODES["instructions"], NODES["summary"], trim(messages=6))
    shown = shows.invoke(state)[SHOWN]
    assert shown[0].text.startswith("Be kind.\n\nSummary")
    assert shown[0].text.endswith("Of planes.")
    assert [message.text for message in shown[1:]] == ["q4", "a4", "q5", "a5", "now"]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((), "no parts"),
        ((print,), "a part of the view is <built-in function print>"),
        ((trim(turns=1), trim(turns=1, messages_key="talk")), r"\['messages', 'talk'\]"),
    ],
)
def test_wrong_parts_are_refused(parts: Any, said: str) -> None:
    """Before anything runs."""
    with pytest.raises(ConfigurationError, match=said):
        view(*parts)
