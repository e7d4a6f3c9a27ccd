"""When to summarise: conditions as JSON, all of a dict, any of a list."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.messages import BaseMessage, HumanMessage

from perdure.errors import ConfigurationError, UnknownModel
from perdure.memory.tokens import token_counter
from perdure.memory.triggers import trigger

COUNTER = token_counter("approximate")


def window() -> int:
    return 1_000


def no_window() -> int:
    raise UnknownModel("nobody named the window")


def said(count: int, text: str = "hello") -> list[BaseMessage]:
    return [HumanMessage(text) for _ in range(count)]


EACH = COUNTER.message(HumanMessage("hello"))


@pytest.mark.parametrize(
    ("when", "fires_at"),
    [
        ({"messages": 4}, 4),
        ({"tokens": 4 * EACH}, 4),
        ({"fraction": 4 * EACH / 1_000}, 4),
        ({"messages": 2, "tokens": 6 * EACH}, 6),
        ({"messages": 6, "tokens": 2 * EACH}, 6),
        ({"tokens": 2 * EACH, "fraction": 6 * EACH / 1_000}, 6),
        ([{"messages": 6}, {"tokens": 2 * EACH}], 2),
        ([{"messages": 6}, {"messages": 3, "tokens": 5 * EACH}], 5),
        ([{"messages": 3}], 3),
    ],
)
def test_a_trigger_fires_when_it_is_reached(when: Any, fires_at: int) -> None:
    """A dict asks for all that is in it, a list for any; a JSON round trip changes nothing."""
    read = trigger(json.loads(json.dumps(when)), window)

    assert [read.fires(said(n), COUNTER) for n in range(fires_at + 2)] == [
        n >= fires_at for n in range(fires_at + 2)
    ]


@pytest.mark.parametrize(
    ("when", "named"),
    [
        ({}, "when is {}"),
        ([], "when is []"),
        ([{}], "with {} in it"),
        (40, "when is 40"),
        ("messages", "when is 'messages'"),
        (["messages"], "'messages' in it"),
        ({"turns": 3}, "'turns'"),
        ({"messages": 0}, "messages: 0"),
        ({"messages": True}, "messages: True"),
        ({"messages": 2.5}, "messages: 2.5"),
        ({"tokens": -1}, "tokens: -1"),
        ({"tokens": "many"}, "tokens: 'many'"),
        ({"fraction": 0}, "fraction: 0"),
        ({"fraction": 1.1}, "fraction: 1.1"),
        ({"fraction": float("nan")}, "fraction: nan"),
        ([{"messages": 3}, {"tokens": 0}], "tokens: 0"),
    ],
)
def test_what_no_trigger_can_mean_is_refused(when: Any, named: str) -> None:
    """The error names what is wrong."""
    with pytest.raises(ConfigurationError) as caught:
        trigger(when, window)

    assert named in str(caught.value)


def test_a_window_is_asked_for_only_by_a_fraction() -> None:
    """Without a fraction the model's window need not be known."""
    assert trigger({"tokens": 5}, no_window).limits == ((0, 5),)
    with pytest.raises(UnknownModel):
        trigger([{"tokens": 5}, {"fraction": 0.5}], no_window)
