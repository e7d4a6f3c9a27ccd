"""Triggers of summaries, and how many messages are kept."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from perdure.errors import ConfigurationError, UnknownModel
from perdure.memory.model_call import ModelCall
from perdure.memory.short_term.summary import Summarize, summarize
from perdure.memory.short_term.tokens import token_counter
from tests.memory.summaries import make_turns

COUNTER = token_counter("approximate")
TOKENS_PER_MESSAGE = COUNTER.count_message_tokens(HumanMessage("hello"))


def make_summarize_node(**options: Any) -> Summarize:
    model = FakeListChatModel(responses=["text"], profile={"max_input_tokens": 4_000})
    return summarize(model, token_counter=COUNTER, **{"keep": ("messages", 1), **options})


def make_messages(count: int) -> list[BaseMessage]:
    return [HumanMessage("hello", id=f"{number}") for number in range(count)]


@pytest.mark.parametrize(
    ("trigger", "expected_count"),
    [
        (("messages", 4), 4),
        (("tokens", 4 * TOKENS_PER_MESSAGE), 4),
        (("fraction", 12 * TOKENS_PER_MESSAGE / 4_000), 12),
        ([("messages", 6), ("tokens", 3 * TOKENS_PER_MESSAGE)], 3),
        ([("messages", 3), ("tokens", 5 * TOKENS_PER_MESSAGE)], 3),
        ([("tokens", 20 * TOKENS_PER_MESSAGE), ("fraction", 12 * TOKENS_PER_MESSAGE / 4_000)], 12),
        ([("messages", 3)], 3),
    ],
)
def test_summary_is_due_when_trigger_is_reached(trigger: Any, expected_count: int) -> None:
    """With a list, the first trigger that is reached counts. A JSON round trip changes nothing."""
    for trigger_form in (trigger, json.loads(json.dumps(trigger))):
        read = make_summarize_node(trigger=trigger_form)
        due = [read.is_due({"messages": make_messages(n)}) for n in range(expected_count + 2)]
        assert due == [n >= expected_count for n in range(expected_count + 2)]


@pytest.mark.parametrize(
    ("keep", "expected_kept"),
    [
        (("messages", 1), 1),
        (("messages", 2), 1),
        (("messages", 3), 3),
        (("messages", 4), 3),
        (("messages", 99), 7),
        (("tokens", 1), 1),
        (
            (
                "tokens",
                COUNTER.count_message_tokens(HumanMessage("q4"))
                + 2 * COUNTER.count_message_tokens(AIMessage("a3")),
            ),
            3,
        ),
        (("fraction", 1.0), 7),
    ],
)
def test_keep_keeps_whole_turns(keep: Any, expected_kept: int) -> None:
    """The newest of the four turns stays whatever its size."""
    update = make_summarize_node(trigger=("messages", 1), keep=keep).invoke(
        {"messages": make_turns(4)}
    )

    assert 7 - len(update.get("summarized", ())) == expected_kept


@pytest.mark.parametrize(
    ("trigger", "expected_kept"),
    [
        (("messages", 7), 3),
        (("tokens", 2 * TOKENS_PER_MESSAGE), 1),
        ([("messages", 7), ("tokens", 8)], 1),
        ([("messages", 99), ("tokens", 6 * TOKENS_PER_MESSAGE)], 3),
    ],
)
def test_half_of_smallest_trigger_is_kept_by_default(trigger: Any, expected_kept: int) -> None:
    """Therefore each trigger leaves messages to summarise."""
    update = make_summarize_node(trigger=trigger, keep=None).invoke({"messages": make_turns(4)})

    assert 7 - len(update["summarized"]) == expected_kept


@pytest.mark.parametrize(
    ("trigger", "expected_message"),
    [
        ({}, "trigger is {}"),
        ([], "trigger is []"),
        (40, "trigger is 40"),
        ("messages", "trigger is 'messages'"),
        (["messages"], "trigger is ['messages']"),
        (("turns", 3), "trigger is ('turns', 3)"),
        ({"messages": 3}, "trigger is {'messages': 3}"),
        (("messages", 0), "trigger messages is 0"),
        (("messages", True), "trigger messages is True"),
        (("messages", 2.5), "trigger messages is 2.5"),
        (("tokens", -1), "trigger tokens is -1"),
        (("tokens", "many"), "trigger tokens is 'many'"),
        (("fraction", 0), "trigger fraction is 0"),
        (("fraction", 1.1), "trigger fraction is 1.1"),
        (("fraction", float("nan")), "trigger fraction is nan"),
        ([("messages", 3), ("tokens", 0)], "trigger tokens is 0"),
    ],
)
def test_invalid_trigger_is_refused_by_value(trigger: Any, expected_message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_summarize_node(trigger=trigger)

    assert expected_message in str(caught.value)


def test_only_fraction_trigger_needs_context_window() -> None:
    unknown = ModelCall(FakeListChatModel(responses=["text"]))
    summarize(unknown, trigger=("tokens", 5))
    with pytest.raises(UnknownModel):
        summarize(unknown, trigger=[("tokens", 5), ("fraction", 0.5)])
