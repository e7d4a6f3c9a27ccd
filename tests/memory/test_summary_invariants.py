"""Summarising over random conversations."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import (
    SystemMessage,
)
from langchain_core.runnables import RunnableLambda

from perdure.memory.summarize import summarize
from perdure.memory.summary_node import Summarize
from tests.memory.conversations import conversations, keys, newest_human
from tests.memory.providers import refusals
from tests.memory.summaries import awaited


@given(talk=conversations(), keep=st.integers(1, 3), mode=st.sampled_from(["state", "view"]))
def test_invariants_over_random_conversations(talk: Any, keep: int, mode: Any) -> None:
    """Valid, nothing lost, newest human message present, idempotent, the same awaited."""
    summary = _quick(keep_turns=keep, mode=mode)
    state: dict[str, Any] = {"messages": talk}
    update = summary.invoke(state)
    after = _applied(state, update)
    shown = summary.shown(after["messages"], after)
    removed = {m.id for m in update.get("messages", [])}
    newest = newest_human(talk)

    assert update == awaited(summary, state)
    assert refusals(shown) == []
    if newest is not None:
        assert any(m.id == newest.id for m in shown)
    assert removed <= set(update.get("summarized", []))
    assert not any(m.id in removed for m in talk if isinstance(m, SystemMessage))
    assert keys(after["messages"]) == keys([m for m in talk if m.id not in removed])
    again = summary.invoke(after)
    assert "summary" not in again
    assert keys(summary.shown(after["messages"], after)) == keys(shown)


@given(talk=conversations(ids=False), form=st.sampled_from(["system", "human"]))
def test_invariants_over_lists(talk: Any, form: Any) -> None:
    """A list without ids gives a valid sequence, the same awaited, and the same again."""
    summary = _quick(keep_turns=1, form=form)
    shown = summary(talk)
    newest = newest_human(talk)

    assert refusals(shown) == []
    assert newest is None or newest in shown
    assert keys(asyncio.run(summary.ainvoke(talk))) == keys(shown)
    assert keys(summary(shown)) == keys(shown)


@given(talk=conversations())
def test_a_failure_changes_nothing_over_random_conversations(talk: Any) -> None:
    """Whatever was said, no summary means no removal."""
    before = [m.model_copy(deep=True) for m in talk]
    failing: Any = RunnableLambda(lambda messages: "")
    summary = summarize(failing, when={"messages": 1}, keep_turns=1, retries=0, on_failure="keep")

    assert summary.invoke({"messages": talk}) == {}
    assert talk == before


def _quick(**options: Any) -> Summarize:
    return summarize(RunnableLambda(lambda messages: "text"), when={"messages": 2}, **options)


def _applied(state: dict[str, Any], update: dict[str, Any]) -> dict[str, Any]:
    gone = {m.id for m in update.get("messages", [])}
    return {
        "messages": [m for m in state["messages"] if m.id not in gone],
        "summary": update.get("summary"),
        "summarized": update.get("summarized", []),
    }
