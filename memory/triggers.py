"""When a conversation is long enough for something to be done: conditions that are plain JSON.

A dict holds if all of its conditions do, a list of dicts if any of them does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict

from langchain_core.messages import BaseMessage

from perdure.errors import ConfigurationError
from perdure.memory.tokens import TokenCounter


class Condition(TypedDict, total=False):
    """What has to be reached, all of it.

    Attributes:
        messages: So many messages.
        tokens: So many tokens.
        fraction: So much of the model's window, above 0 and up to 1.
    """

    messages: int
    tokens: int
    fraction: float


When = Condition | Sequence[Condition]

_KEYS: Final = ("messages", "tokens", "fraction")
_FORM: Final = (
    'a dict such as {"messages": 40} or {"tokens": 4000, "messages": 10}, all of which has to be '
    "reached, or a list of such dicts, one of which has to be"
)


@dataclass(frozen=True, slots=True)
class Trigger:
    """Says when; `trigger` makes it.

    Attributes:
        limits: `(messages, tokens)` for each dict: both have to be reached. 0: it asks for none.
    """

    limits: tuple[tuple[int, int], ...]

    def fires(self, messages: Sequence[BaseMessage], counter: TokenCounter) -> bool:
        """Whether any dict is fulfilled by messages. Tokens are counted only if they decide."""
        asked = [tokens for count, tokens in self.limits if len(messages) >= count]
        if not asked or 0 in asked:
            return bool(asked)
        return _reaches(messages, min(asked), counter.fitted(messages).message)


def trigger(when: When, window: Callable[[], int]) -> Trigger:
    """Read conditions.

    Args:
        when: A dict or a list of them, as of JSON.
        window: The model's window in tokens; asked only if there is a fraction.

    Raises:
        ConfigurationError: They are empty, unknown or out of range.
        UnknownModel: There is a fraction, and the window is not known.
    """
    choices: Sequence[Any] = [when] if isinstance(when, Mapping) else when
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
        raise ConfigurationError(f"when is {when!r}; expected {_FORM}")
    return Trigger(tuple(_limits(condition, when, window) for condition in choices))


def _limits(condition: Any, when: Any, window: Callable[[], int]) -> tuple[int, int]:
    if not isinstance(condition, Mapping) or not condition:
        raise ConfigurationError(f"when is {when!r}, with {condition!r} in it; expected {_FORM}")
    unknown = [key for key in condition if key not in _KEYS]
    if unknown:
        listed = ", ".join(map(repr, _KEYS))
        raise ConfigurationError(
            f"when has the condition {unknown[0]!r}; expected some of {listed}"
        )
    for key, value in condition.items():
        _check(key, value)
    tokens = condition.get("tokens", 0)
    if "fraction" in condition:
        tokens = max(tokens, 1, int(condition["fraction"] * window()))
    return condition.get("messages", 0), tokens


def _check(key: str, value: Any) -> None:
    if key == "fraction":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise ConfigurationError(f"when has fraction: {value!r}; expected above 0 and up to 1")
    elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"when has {key}: {value!r}; expected a whole number from 1 on")


def _reaches(
    messages: Sequence[BaseMessage], limit: int, measure: Callable[[BaseMessage], int]
) -> bool:
    left = limit
    for message in messages:
        left -= measure(message)
        if left <= 0:
            return True
    return False
