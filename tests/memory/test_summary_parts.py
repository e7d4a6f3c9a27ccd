"""Conversations longer than the summariser's window, in parts."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from langchain_core.messages import (
    AnyMessage,
    HumanMessage,
)
from langchain_core.runnables import RunnableLambda

from perdure.errors import SummaryFailed
from perdure.memory.summary import summarize
from tests.memory.scripted import (
    TOO_LONG,
    ScriptedServer,
)
from tests.memory.summaries import COUNTER, awaited, invoked, node, turns


def long_talk(count: int, size: int = 300) -> list[AnyMessage]:
    """Turns of which each has a word of its own and many others."""
    talk = turns(count)
    return [m.model_copy(update={"content": f"{m.content}. " + "word " * size}) for m in talk]


@pytest.mark.parametrize("run", [invoked, awaited])
def test_a_long_conversation_is_summarised_in_parts(run: Any) -> None:
    """Every part is told once, no request passes the limit, and the former summary is extended."""
    with ScriptedServer(lambda body: _part_or_all(body)) as scribe:
        summary = node(scribe, max_input_tokens=1_500, counter=COUNTER)
        update = run(summary, {"messages": long_talk(12), "summary": "the former"})
    asked = [scribe.asked_for(n) for n in range(len(scribe.requests))]
    parts = [text for text in asked if "<conversation>" in text]
    sizes = [COUNTER.text(m[1]) for n in range(len(asked)) for m in [scribe.shown(n)[1]]]

    assert update["summary"]["text"] == "of all"
    assert update["summary"]["count"] == 22
    assert len(parts) > 4
    for n in range(1, 12):
        assert sum(f"q{n}. " in text for text in parts) == 1
    assert "<summary>\nthe former\n</summary>" in asked[-1]
    assert max(sizes) <= 1_500
    assert all("the former" not in text for text in asked[:-1])


def _part_or_all(body: Any) -> str:
    asked = body["messages"][-1]["content"]
    return "of all" if "the former" in asked else "of a part " + "and so on " * 20


def test_parts_of_parts() -> None:
    """Where the summaries of parts are too many for one request they are put together in groups."""
    with ScriptedServer(lambda body: "words " * 60) as scribe:
        summary = node(scribe, max_input_tokens=800, counter=COUNTER)
        summary.invoke({"messages": long_talk(40, size=100)})
    asked = [scribe.asked_for(n) for n in range(len(scribe.requests))]

    assert sum("<part" in text for text in asked) > 1
    assert asked[-1].count("<part number=") > 1


def test_one_huge_message_is_told_in_slices() -> None:
    """All of it is told, in order."""
    numbers = " ".join(f"n{n:05}" for n in range(3_000))
    talk: list[AnyMessage] = [HumanMessage(numbers, id="1"), *turns(2)]
    with ScriptedServer(lambda body: "short") as scribe:
        node(scribe, max_input_tokens=2_000, counter=COUNTER, when={"messages": 3}).invoke(
            {"messages": talk}
        )
    told = "".join(
        scribe.asked_for(n).removeprefix("<conversation>\n").split("\n</conversation>")[0]
        for n in range(len(scribe.requests) - 1)
    )

    assert len(scribe.requests) > 5
    assert numbers in told


@pytest.mark.parametrize("run", [invoked, awaited])
def test_a_window_smaller_than_was_said_is_found_out(run: Any) -> None:
    """When the provider says that a request is too long, shorter ones are tried."""

    def script(body: Any) -> Any:
        asked = body["messages"][-1]["content"]
        return TOO_LONG if len(asked) > 4_000 else "fits"

    with ScriptedServer(script) as scribe:
        update = run(node(scribe), {"messages": long_talk(12)})

    assert update["summary"]["text"] == "fits"


def test_a_summariser_that_repeats_everything_does_not_go_on_for_ever() -> None:
    """Summaries of parts that are as long as the parts are an error."""
    with ScriptedServer(lambda body: "words " * 700) as scribe:
        summary = node(scribe, max_input_tokens=1_000, counter=COUNTER)
        with pytest.raises(SummaryFailed, match="too long to be put together"):
            summary.invoke({"messages": long_talk(12)})


def test_awaited_parts_are_asked_for_together_but_not_too_many_at_once() -> None:
    """Four at most."""
    now, most, lock = 0, 0, threading.Lock()

    def answer(messages: Any) -> Any:
        raise NotImplementedError

    async def aanswer(messages: Any) -> Any:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with lock:
            now -= 1
        return "short"

    model = RunnableLambda(answer, aanswer)
    summary = summarize(
        model, when={"messages": 5}, keep_turns=1, max_input_tokens=1_500, counter=COUNTER
    )
    update = awaited(summary, {"messages": long_talk(30)})

    assert update["summary"]["text"] == "short"
    assert most == 4
