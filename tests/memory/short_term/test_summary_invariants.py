"""Properties of summaries over random conversations."""

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
from perdure.memory.short_term.summary import Summarize, summarize
from tests.memory.conversations import comparison_keys, conversations, find_newest_question
from tests.memory.provider_rules import awaits_answer, find_refusals
from tests.memory.summaries import invoke_async

_KEEPS = st.sampled_from([("messages", 1), ("messages", 4), ("tokens", 40), ("messages", 6)])


@given(conversation=conversations(), keep=_KEEPS)
def test_summary_of_random_state_is_valid_idempotent_and_loses_nothing(
    conversation: Any, keep: Any
) -> None:
    """The newest human message is shown, and `ainvoke` gives the same result."""
    summary = _make_summarize_node(keep=keep)
    state: dict[str, Any] = {"messages": conversation}
    update = summary.invoke(state)
    after = _apply_update(state, update)
    shown = summary.select_messages(after["messages"], after)
    removed = {m.id for m in update.get("messages", [])}
    newest = find_newest_question(conversation)

    assert update == invoke_async(summary, state)
    assert find_refusals(shown, to_answer=awaits_answer(conversation)) == []
    if newest is not None:
        assert any(m.id == newest.id for m in shown)
    assert removed == set(update.get("summarized", []))
    assert not any(m.id in removed for m in conversation if isinstance(m, SystemMessage))
    assert comparison_keys(after["messages"]) == comparison_keys(
        [m for m in conversation if m.id not in removed]
    )
    again = summary.invoke(after)
    assert again == {}
    assert comparison_keys(summary.select_messages(after["messages"], after)) == comparison_keys(
        shown
    )


@given(conversation=conversations(ids=False), keep=_KEEPS)
def test_summary_of_random_list_without_ids_is_valid_and_idempotent(
    conversation: Any, keep: Any
) -> None:
    summary = _make_summarize_node(keep=keep)
    shown = summary(conversation)
    newest = find_newest_question(conversation)

    assert find_refusals(shown, to_answer=awaits_answer(conversation)) == []
    assert newest is None or newest in shown
    assert comparison_keys(asyncio.run(summary.ainvoke(conversation))) == comparison_keys(shown)
    assert comparison_keys(summary(shown)) == comparison_keys(shown)


@given(conversation=conversations())
def test_failed_summary_of_random_conversation_changes_nothing(conversation: Any) -> None:
    before = [m.model_copy(deep=True) for m in conversation]
    failing: Any = RunnableLambda(lambda messages: "")
    summary = _make_summarize_node(ModelCall(failing, retries=0))

    assert summary.invoke({"messages": conversation}) == {}
    assert conversation == before


@given(data=st.data(), keep=_KEEPS)
def test_every_message_is_shown_or_was_summarised_in_random_threads(
    data: st.DataObject, keep: Any
) -> None:
    """Messages are removed and reordered at random, and summarised ids come back with new texts."""
    thread = _RandomThread(data)
    options: dict[str, Any] = {"trigger": ("messages", 3), "keep": keep}
    summary = summarize(RunnableLambda(thread.answer_summary_request), **options)
    for _ in range(data.draw(st.integers(2, 6))):
        thread.add_messages()
        for happens in data.draw(st.lists(st.sampled_from(_RANDOM_CHANGES), max_size=2)):
            happens(thread)
        if data.draw(st.booleans()):
            thread.add_messages()
        update = summary.invoke(thread.state)
        removed = {m.id for m in update.get("messages", [])}
        gone = [m for m in thread.messages if m.id in removed]
        summarized_ids = update.get("summarized", [])
        assert removed == {*summarized_ids}
        assert all(
            m.text in thread.summarised_text for m in thread.messages if m.id in summarized_ids
        )
        assert all(m.text in thread.summarised_text for m in gone)
        thread.apply_update(update)
        shown = summary.select_messages(thread.messages, thread.state)
        expects_answer = awaits_answer(thread.messages)
        assert find_refusals(shown, to_answer=expects_answer) == []
        due = [
            m for m in ModelInput.from_messages(thread.messages).to_messages() if m.type != "system"
        ]
        assert [m for m in due if m not in shown] == []


class _RandomThread:
    """A thread that is changed at random. Each message has a word that no other message has."""

    def __init__(self, data: st.DataObject) -> None:
        self.messages: list[AnyMessage] = []
        self.summarized: list[str] = []
        self.summary: Any = None
        self.summarised_text = ""
        self._data, self._words = data, 0

    @property
    def state(self) -> dict[str, Any]:
        return {
            "messages": self.messages,
            "summary": self.summary,
            "summarized": self.summarized,
        }

    def answer_summary_request(self, request: Any) -> str:
        self.summarised_text += str(request[-1].content)
        return "text"

    def apply_update(self, update: dict[str, Any]) -> None:
        self._add(update.get("messages", []))
        self.summary = update.get("summary", self.summary)
        self.summarized = [*self.summarized, *update.get("summarized", [])]

    def add_messages(self) -> None:
        kinds = st.sampled_from([HumanMessage, AIMessage, HumanMessage, AIMessage, SystemMessage])
        kinds_drawn = self._data.draw(st.lists(kinds, min_size=2, max_size=6))
        self._add([kind(self._word()) for kind in kinds_drawn])

    def add_message_with_summarised_id(self) -> None:
        absent = {*self.summarized} - {m.id for m in self.messages}
        if absent:
            kind = self._data.draw(st.sampled_from([HumanMessage, AIMessage]))
            last = self.summarized[-1]
            often = [last] * 3 if last in absent else []
            chosen = self._data.draw(st.sampled_from([*often, *sorted(absent)]))
            self._add([kind(self._word(), id=chosen)])

    def remove_random_message(self) -> None:
        if self.messages:
            self._add([RemoveMessage(id=str(self._data.draw(st.sampled_from(self.messages)).id))])

    def reorder_messages(self) -> None:
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


_RANDOM_CHANGES = [
    _RandomThread.add_message_with_summarised_id,
    _RandomThread.add_message_with_summarised_id,
    _RandomThread.remove_random_message,
    _RandomThread.reorder_messages,
]


def _make_summarize_node(model: Any = None, **options: Any) -> Summarize:
    node_options = {"trigger": ("messages", 2), "keep": ("messages", 1), **options}
    return summarize(model or RunnableLambda(lambda messages: "text"), **node_options)


def _apply_update(state: dict[str, Any], update: dict[str, Any]) -> dict[str, Any]:
    gone = {m.id for m in update.get("messages", [])}
    return {
        "messages": [m for m in state["messages"] if m.id not in gone],
        "summary": update.get("summary"),
        "summarized": update.get("summarized", []),
    }
