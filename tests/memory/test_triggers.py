"""When to summarise and what stays: sizes as JSON, any of a list."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from perdure.errors import ConfigurationError, UnknownModel
from perdure.memory.model_call import ModelCall
from perdure.memory.summary import Summarize, summarize
from perdure.memory.tokens import token_counter
from tests.memory.summaries import make_turns

COUNTER = token_counter("approximate")
EACH = COUNTER.count_message(HumanMessage("hello"))


def node(**options: Any) -> Summarize:
    model = FakeListChatModel(responses=["text"], profile={"max_input_tokens": 4_000})
    return summarize(model, token_counter=COUNTER, **{"keep": ("messages", 1), **options})


def hellos(count: int) -> list[BaseMessage]:
    return [HumanMessage("hello", id=f"{number}") for number in range(count)]


@pytest.mark.parametrize(
    ("trigger", "fires_at"),
    [
        (("messages", 4), 4),
        (("tokens", 4 * EACH), 4),
        (("fraction", 12 * EACH / 4_000), 12),
        ([("messages", 6), ("tokens", 3 * EACH)], 3),
        ([("messages", 3), ("tokens", 5 * EACH)], 3),
        ([("tokens", 20 * EACH), ("fraction", 12 * EACH / 4_000)], 12),
        ([("messages", 3)], 3),
    ],
)
def test_a_trigger_fires_when_it_is_reached(trigger: Any, fires_at: int) -> None:
    """A list asks for any of it; a JSON round trip changes nothing."""
    for given in (trigger, json.loads(json.dumps(trigger))):
        read = node(trigger=given)
        due = [read.is_due({"messages": hellos(n)}) for n in range(fires_at + 2)]
        assert due == [n >= fires_at for n in range(fires_at + 2)]


@pytest.mark.parametrize(
    ("keep", "kept"),
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
                COUNTER.count_message(HumanMessage("q4"))
                + 2 * COUNTER.count_message(AIMessage("a3")),
            ),
            3,
        ),
        (("fraction", 1.0), 7),
    ],
)
def test_whole_turns_stay_up_to_what_is_kept(keep: Any, kept: int) -> None:
    """Of four turns; the newest stays whatever its size."""
    update = node(trigger=("messages", 1), keep=keep).invoke({"messages": make_turns(4)})

    assert 7 - len(update.get("summarized", ())) == kept


@pytest.mark.parametrize(
    ("trigger", "kept"),
    [
        (("messages", 7), 3),
        (("tokens", 2 * EACH), 1),
        ([("messages", 7), ("tokens", 8)], 1),
        ([("messages", 99), ("tokens", 6 * EACH)], 3),
    ],
)
def test_half_of_what_triggers_stays_by_default(trigger: Any, kept: int) -> None:
    """Of several triggers the smallest, so whichever fires has something to summarise."""
    update = node(trigger=trigger, keep=None).invoke({"messages": make_turns(4)})

    assert 7 - len(update["summarized"]) == kept


@pytest.mark.parametrize(
    ("trigger", "named"),
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
def test_what_no_trigger_can_mean_is_refused(trigger: Any, named: str) -> None:
    """The error names what is wrong."""
    with pytest.raises(ConfigurationError) as caught:
        node(trigger=trigger)

    assert named in str(caught.value)


def test_a_window_is_asked_for_only_by_a_fraction() -> None:
    """Without a fraction the model's window need not be known."""
    unknown = ModelCall(FakeListChatModel(responses=["text"]))
    summarize(unknown, trigger=("tokens", 5))
    with pytest.raises(UnknownModel):
        summarize(unknown, trigger=[("tokens", 5), ("fraction", 0.5)])
