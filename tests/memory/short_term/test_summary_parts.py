"""Conversations that exceed the window of the summariser are summarised in parts."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AnyMessage, HumanMessage

from perdure.errors import SummaryFailed
from tests.memory.scripted_models import TOO_LONG, ScriptedServer, make_numbered_script
from tests.memory.summaries import (
    COUNTER,
    invoke_async,
    invoke_sync,
    make_summarize_node,
    make_turns,
)


def make_long_turns(count: int, size: int = 300) -> list[AnyMessage]:
    """Return turns of which each has a word of its own and many other words."""
    conversation = make_turns(count)
    return [
        m.model_copy(update={"content": f"{m.content}. " + "word " * size}) for m in conversation
    ]


@pytest.mark.parametrize("invoke", [invoke_sync, invoke_async])
def test_long_conversation_is_summarised_in_parts_within_window(invoke: Any) -> None:
    """Each part is sent once, with the summary so far."""
    with ScriptedServer(make_numbered_script()) as summariser:
        summary = make_summarize_node(summariser, window=2_000, token_counter=COUNTER)
        update = invoke(summary, {"messages": make_long_turns(12), "summary": "the previous"})
    request_texts = [summariser.read_last_message(n) for n in range(len(summariser.requests))]
    sizes = [
        COUNTER.count_text(m[1]) for n in range(len(request_texts)) for m in summariser.shown(n)
    ]

    assert len(request_texts) > 4
    assert update["summary"]["text"] == f"summary {len(request_texts)}"
    assert update["summary"]["count"] == 22
    for n in range(1, 12):
        assert sum(f"q{n}. " in text for text in request_texts) == 1
    for n, text in enumerate(request_texts):
        assert f"<summary>\n{f'summary {n}' if n else 'the previous'}\n</summary>" in text
    assert max(map(sum, zip(sizes[::2], sizes[1::2], strict=True))) <= 1_500


def test_huge_message_is_summarised_in_consecutive_slices() -> None:
    numbers = " ".join(f"n{n:05}" for n in range(4_000))
    conversation: list[AnyMessage] = [HumanMessage(numbers, id="1"), *make_turns(2)]
    with ScriptedServer(lambda body: "short") as summariser:
        summary = make_summarize_node(
            summariser, window=2_000, token_counter=COUNTER, trigger=("messages", 3)
        )
        summary.invoke({"messages": conversation})
    read = "".join(
        summariser.read_last_message(n)
        .partition("<conversation>\n")[2]
        .split("\n</conversation>")[0]
        for n in range(len(summariser.requests))
    )

    assert len(summariser.requests) > 5
    assert numbers in read


def test_previous_summary_that_exceeds_window_is_summarised_too() -> None:
    """The window may be smaller than the one for which the summary was written."""
    previous = " ".join(f"n{n:05}" for n in range(500))
    with ScriptedServer(make_numbered_script()) as summariser:
        summary = make_summarize_node(summariser, window=1_000, token_counter=COUNTER)
        update = summary.invoke({"messages": make_turns(4), "summary": previous})
    request_texts = [summariser.read_last_message(n) for n in range(len(summariser.requests))]

    assert update["summary"]["text"] == f"summary {len(request_texts)}"
    assert "<summary>" not in request_texts[0]
    assert all(
        sum(word in text for text in request_texts) == 1 for word in ("n00000", "n00250", "q3")
    )


@pytest.mark.parametrize("invoke", [invoke_sync, invoke_async])
def test_summariser_retries_with_shorter_parts_if_request_is_too_long(invoke: Any) -> None:
    def script(body: Any) -> Any:
        request_text = body["messages"][-1]["content"]
        return TOO_LONG if len(request_text) > 4_000 else "fits"

    with ScriptedServer(script) as summariser:
        update = invoke(make_summarize_node(summariser), {"messages": make_long_turns(12)})

    assert update["summary"]["text"] == "fits"


def test_summaries_that_leave_no_room_for_next_part_fail() -> None:
    with ScriptedServer(lambda body: "words " * 700) as summariser:
        summary = make_summarize_node(
            summariser, window=1_333, token_counter=COUNTER, on_failure="raise"
        )
        with pytest.raises(SummaryFailed, match="the answer has"):
            summary.invoke({"messages": make_long_turns(12)})
    assert len(summariser.requests) == 3
