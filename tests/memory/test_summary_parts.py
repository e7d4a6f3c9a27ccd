"""Conversations longer than the summariser's window, in parts."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AnyMessage, HumanMessage

from perdure.errors import SummaryFailed
from tests.memory.scripted import TOO_LONG, ScriptedServer, make_numbered_script
from tests.memory.summaries import (
    COUNTER,
    invoke_async,
    invoke_sync,
    make_summarize_node,
    make_turns,
)


def long_talk(count: int, size: int = 300) -> list[AnyMessage]:
    """Turns of which each has a word of its own and many others."""
    talk = make_turns(count)
    return [m.model_copy(update={"content": f"{m.content}. " + "word " * size}) for m in talk]


@pytest.mark.parametrize("run", [invoke_sync, invoke_async])
def test_a_long_conversation_is_summarised_in_parts(run: Any) -> None:
    """Every part is read once, with the summary so far; no request passes the limit."""
    with ScriptedServer(make_numbered_script()) as scribe:
        summary = make_summarize_node(scribe, window=2_000, token_counter=COUNTER)
        update = run(summary, {"messages": long_talk(12), "summary": "the previous"})
    asked = [scribe.read_last_message(n) for n in range(len(scribe.requests))]
    sizes = [COUNTER.count_text(m[1]) for n in range(len(asked)) for m in scribe.shown(n)]

    assert len(asked) > 4
    assert update["summary"]["text"] == f"summary {len(asked)}"
    assert update["summary"]["count"] == 22
    for n in range(1, 12):
        assert sum(f"q{n}. " in text for text in asked) == 1
    for n, text in enumerate(asked):
        assert f"<summary>\n{f'summary {n}' if n else 'the previous'}\n</summary>" in text
    assert max(map(sum, zip(sizes[::2], sizes[1::2], strict=True))) <= 1_500


def test_one_huge_message_is_read_in_slices() -> None:
    """All of it is read, in order."""
    numbers = " ".join(f"n{n:05}" for n in range(4_000))
    talk: list[AnyMessage] = [HumanMessage(numbers, id="1"), *make_turns(2)]
    with ScriptedServer(lambda body: "short") as scribe:
        summary = make_summarize_node(
            scribe, window=2_000, token_counter=COUNTER, trigger=("messages", 3)
        )
        summary.invoke({"messages": talk})
    read = "".join(
        scribe.read_last_message(n).partition("<conversation>\n")[2].split("\n</conversation>")[0]
        for n in range(len(scribe.requests))
    )

    assert len(scribe.requests) > 5
    assert numbers in read


def test_a_previous_summary_that_takes_too_much_is_summarised_itself() -> None:
    """A window may be smaller than the one that it was written for."""
    previous = " ".join(f"n{n:05}" for n in range(500))
    with ScriptedServer(make_numbered_script()) as scribe:
        summary = make_summarize_node(scribe, window=1_000, token_counter=COUNTER)
        update = summary.invoke({"messages": make_turns(4), "summary": previous})
    asked = [scribe.read_last_message(n) for n in range(len(scribe.requests))]

    assert update["summary"]["text"] == f"summary {len(asked)}"
    assert "<summary>" not in asked[0]
    assert all(sum(word in text for text in asked) == 1 for word in ("n00000", "n00250", "q3"))


@pytest.mark.parametrize("run", [invoke_sync, invoke_async])
def test_a_window_smaller_than_was_said_is_found_out(run: Any) -> None:
    """When the provider says that a request is too long, shorter ones are tried."""

    def script(body: Any) -> Any:
        asked = body["messages"][-1]["content"]
        return TOO_LONG if len(asked) > 4_000 else "fits"

    with ScriptedServer(script) as scribe:
        update = run(make_summarize_node(scribe), {"messages": long_talk(12)})

    assert update["summary"]["text"] == "fits"


def test_a_summariser_that_repeats_everything_does_not_go_on_for_ever() -> None:
    """Summaries that leave no room for the next part are an error."""
    with ScriptedServer(lambda body: "words " * 700) as scribe:
        summary = make_summarize_node(
            scribe, window=1_333, token_counter=COUNTER, on_failure="raise"
        )
        with pytest.raises(SummaryFailed, match="the answer has"):
            summary.invoke({"messages": long_talk(12)})
    assert len(scribe.requests) == 3
