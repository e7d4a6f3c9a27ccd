"""Conversations as they come in life: parallel calls, lost results, system messages anywhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

Talk = list[AnyMessage]

_WORDS = [
    "",
    " ",
    "hello",
    "日本語の文",
    "naïve café",
    "a\nb",
    "🙂🙂",
    "x " * 40,
    "The train. " * 30,
]
texts = st.one_of(st.sampled_from(_WORDS), st.text(max_size=30))
contents: st.SearchStrategy[Any] = st.one_of(
    texts,
    st.just([]),
    st.lists(
        st.one_of(
            texts.map(lambda text: {"type": "text", "text": text}),
            st.just({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}),
        ),
        min_size=1,
        max_size=3,
    ),
)


@st.composite
def exchanges(draw: st.DrawFn) -> Talk:
    """A call with its results: mostly whole, sometimes not, in any order."""
    count = draw(st.integers(1, 3))
    ids = [f"call{draw(st.integers(0, 10**6))}" for _ in range(count)]
    names = ["" if draw(st.integers(0, 9)) == 0 else each for each in ids]
    calls = [{"name": "look", "args": {"q": draw(texts)}, "id": each or None} for each in names]
    bad = draw(st.integers(0, 9)) == 0
    said = AIMessage(
        draw(contents),
        tool_calls=[] if bad else calls,
        invalid_tool_calls=[
            {
                "name": "look",
                "args": "{",
                "id": call["id"],
                "error": "cut",
                "type": "invalid_tool_call",
            }
            for call in calls
        ]
        if bad
        else [],
    )
    results: Talk = [ToolMessage(draw(contents), tool_call_id=each, name="look") for each in ids]
    if draw(st.integers(0, 4)) == 0:
        results.pop()
    if draw(st.integers(0, 9)) == 0:
        results.append(ToolMessage("again", tool_call_id=ids[0]))
    if draw(st.integers(0, 9)) == 0:
        results.insert(0, SystemMessage("in between"))
    return [said, *draw(st.permutations(results))]


pieces: st.SearchStrategy[Talk] = st.one_of(
    contents.map(lambda content: [HumanMessage(content)]),
    contents.map(lambda content: [HumanMessage(content)]),
    contents.map(lambda content: [AIMessage(content)]),
    exchanges(),
    exchanges(),
    texts.map(lambda text: [SystemMessage(text)]),
    texts.map(lambda text: [ToolMessage(text, tool_call_id="nobody called")]),
)


@st.composite
def conversations(draw: st.DrawFn, *, ids: bool = True, max_pieces: int = 12) -> Talk:
    """A conversation from which some messages were removed."""
    talk = list(itertools.chain.from_iterable(draw(st.lists(pieces, max_size=max_pieces))))
    for _ in range(draw(st.integers(0, 2))):
        if talk:
            talk.pop(draw(st.integers(0, len(talk) - 1)))
    for number, message in enumerate(talk):
        message.id = f"m{number}" if ids else None
    return talk


def newest_human(messages: list[BaseMessage] | Talk) -> BaseMessage | None:
    return next((m for m in reversed(messages) if isinstance(m, HumanMessage)), None)


def keys(messages: list[BaseMessage] | Talk) -> list[object]:
    """What to compare messages by."""
    return [(m.type, m.id, m.content) for m in messages]


def total(messages: list[BaseMessage], cost: Callable[[BaseMessage], int]) -> int:
    return sum(map(cost, messages))
