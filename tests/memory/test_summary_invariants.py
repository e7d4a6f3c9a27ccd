"""Summarising over random conversations."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
)
from langchain_core.runnables import RunnableLambda
from langgraph.graph import add_messages
from langgraph.graph.message import REMOVE_ALL_MESSAGES

from perdure.memory.model_call import ModelCall
from perdure.memory.nodes import ModelInput
from perdure.memory.summary import Summarize, summarize
from tests.memory.conversations import comparison_keys, conversations, find_newest_question
from tests.memory.providers import awaits_answer, find_refusals
from tests.memory.summaries import invoke_async

_KEEPS = st.sampled_from([("messages", 1), ("messages", 4), ("tokens", 40), ("messages", 6)])


@given(talk=conversations(), keep=_KEEPS)
def test_invariants_over_random_conversations(talk: Any, keep: Any) -> None:
    """Valid, nothing lost, newest human message present, idempotent, the same awaited."""
    summary = _quick(keep=keep)
    state: dict[str, Any] = {"messages": talk}
    update = summary.invoke(state)
    after = _applied(state, update)
    shown = summary.select_messages(after["messages"], after)
    removed = {m.id for m in update.get("messages", [])}
    newest = find_newest_question(talk)

    assert update == invoke_async(summary, state)
    assert find_refusals(shown, to_answer=awaits_answer(talk)) == []
    if newest is not None:
        assert any(m.id == newest.id for m in shown)
    assert removed == set(update.get("summarized", []))
    assert not any(m.id in removed for m in talk if isinstance(m, SystemMessage))
    assert comparison_keys(after["messages"]) == comparison_keys(
        [m for m in talk if m.id not in removed]
    )
    again = summary.invoke(after)
    assert again == {}
    assert comparison_keys(summary.select_messages(after["messages"], after)) == comparison_keys(
        shown
    )


@given(talk=conversations(ids=False), keep=_KEEPS)
def test_invariants_over_lists(talk: Any, keep: Any) -> None:
    """A list without ids gives a valid sequence, the same awaited, and the same again."""
    summary = _quick(keep=keep)
    shown = summary(talk)
    newest = find_newest_question(talk)

    assert find_refusals(shown, to_answer=awaits_answer(talk)) == []
    assert newest is None or newest in shown
    assert comparison_keys(asyncio.run(summary.ainvoke(talk))) == comparison_keys(shown)
    assert comparison_keys(summary(shown)) == comparison_keys(shown)


@given(talk=conversations())
def test_a_failure_changes_nothing_over_random_conversations(talk: Any) -> None:
    """Whatever was said, no summary means no removal."""
    before = [m.model_copy(deep=True) for m in talk]
    failing: Any = RunnableLambda(lambda messages: "")
    summary = _quick(ModelCall(failing, retries=0))

    assert summary.invoke({"messages": talk}) == {}
    assert talk == before


@given(data=st.data(), keep=_KEEPS)
def test_what_is_neither_shown_nor_told_is_not_there(data: st.DataObject, keep: Any) -> None:
    """Whatever becomes of a thread: summarised ids said anew, messages removed, put in order."""
    thread = _Thread(data)
    options: dict[str, Any] = {"trigger": ("messages", 3), "keep": keep}
    summary = summarize(RunnableLambda(thread.told), **options)
    for _ in range(data.draw(st.integers(2, 6))):
        thread.go_on()
        for happens in data.draw(st.lists(st.sampled_from(_HAPPENS), max_size=2)):
            happens(thread)
        if data.draw(st.booleans()):
            thread.go_on()
        update = summary.invoke(thread.state)
        removed = {m.id for m in update.get("messages", [])}
        gone = [m for m in thread.messages if m.id in removed]
        named = update.get("summarized", [])
        assert removed == {*named}
        assert all(m.text in thread.heard for m in thread.messages if m.id in named)
        assert all(m.text in thread.heard for m in gone)
        thread.take(update)
        shown = summary.select_messages(thread.messages, thread.state)
        asked = awaits_answer(thread.messages)
        assert find_refusals(shown, to_answer=asked) == []
        due = [
            m for m in ModelInput.from_messages(thread.messages).to_messages() if m.type != "system"
        ]
        assert [m for m in due if m not in shown] == []


class _Thread:
    """A thread to which things happen; each message says a word that no other says."""

    def __init__(self, data: st.DataObject) -> None:
        self.messages: list[AnyMessage] = []
        self.summarized: list[str] = []
        self.summary: Any = None
        self.heard = ""
        self._data, self._words = data, 0

    @property
    def state(self) -> dict[str, Any]:
        return {
            "messages": self.messages,
            "summary": self.summary,
            "summarized": self.summarized,
        }

    def told(self, request: Any) -> str:
        self.heard += str(request[-1].content)
        return "text"

    def take(self, update: dict[str, Any]) -> None:
        self._add(update.get("messages", []))
        self.summary = update.get("summary", self.summary)
        self.summarized = [*self.summarized, *update.get("summarized", [])]

    def go_on(self) -> None:
        kinds = st.sampled_from([HumanMessage, AIMessage, HumanMessage, AIMessage, SystemMessage])
        said = self._data.draw(st.lists(kinds, min_size=2, max_size=6))
        self._add([kind(self._word()) for kind in said])

    def say_anew(self) -> None:
        absent = {*self.summarized} - {m.id for m in self.messages}
        if absent:
            kind = self._data.draw(st.sampled_from([HumanMessage, AIMessage]))
            last = self.summarized[-1]
            often = [last] * 3 if last in absent else []
            chosen = self._data.draw(st.sampled_from([*often, *sorted(absent)]))
            self._add([kind(self._word(), id=chosen)])

    def lose(self) -> None:
        if self.messages:
            self._add([RemoveMessage(id=str(self._data.draw(st.sampled_from(self.messages)).id))])

    def shuffle(self) -> None:
        mixed = self._data.draw(st.permutations(self.messages))
        self._add([RemoveMessage(id=REMOVE_ALL_MESSAGES), *mixed])

    def _word(self) -> str:
        self._words += 1
        return f"word{self._words}."

    def _add(self, messages: list[Any]) -> None:
        for message in messages:
            message.id = message.id or message.text
        left: Any = list(self.messages)
        self.messages = list[Any](add_messages(left, messages))


_HAPPENS = [_Thread.say_anew, _Thread.say_anew, _Thread.lose, _Thread.shuffle]


def _quick(model: Any = None, **options: Any) -> Summarize:
    given = {"trigger": ("messages", 2), "keep": ("messages", 1), **options}
    return summarize(model or RunnableLambda(lambda messages: "text"), **given)


def _applied(state: dict[str, Any], update: dict[str, Any]) -> dict[str, Any]:
    gone = {m.id for m in update.get("messages", [])}
    return {
        "messages": [m for m in state["messages"] if m.id not in gone],
        "summary": update.get("summary"),
        "summarized": update.get("summarized", []),
    }
