"""Options that are checked when something is built: each helper raises one clear error."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from math import inf
from typing import Any

from perdure.errors import ConfigurationError


def whole(name: str, value: Any, least: int) -> int:
    """A whole number from `least` on.

    >>> whole("max_size", 20, 1)
    20

    Raises:
        ConfigurationError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(
            f"{name} is {value!r:.80}; expected a whole number from {least} on"
        )
    return value


def number(name: str, value: Any, least: float, most: float = inf) -> float:
    """A number from `least` to `most`, whole or not.

    >>> number("threshold", 0.5, -1, 1)
    0.5

    Raises:
        ConfigurationError: It is none.
    """
    if not is_number(value) or not least <= value <= most:
        bounds = f"from {least} on" if most == inf else f"from {least} to {most}"
        raise ConfigurationError(f"{name} is {value!r:.80}; expected a number {bounds}")
    return value  # type: ignore[no-any-return]


def seconds(name: str, value: Any, *, above_zero: bool = False) -> float:
    """Seconds, 0 or more; with `above_zero`, more.

    >>> seconds("backoff_s", 0)
    0

    Raises:
        ConfigurationError: It is something else.
    """
    if not is_number(value) or not 0 <= value < inf or (above_zero and not value):
        expected = "above 0" if above_zero else "0 or more"
        raise ConfigurationError(f"{name} is {value!r:.80}; expected seconds, {expected}")
    return value  # type: ignore[no-any-return]


def choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """A value that is one of the choices.

    >>> choice("mode", "view", ("view", "state"))
    'view'

    Raises:
        ConfigurationError: It is none.
    """
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ConfigurationError(f"{name} is {value!r:.80}; expected one of {listed}")
    return value  # type: ignore[no-any-return]


def is_number(value: Any) -> bool:
    """Whether a value is a number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def instance(name: str, value: Any, kinds: type | tuple[type, ...], expected: str) -> Any:
    """A value that is an instance of a class; `expected` names it in the error.

    >>> instance("schema", 7, int, "a number")
    7

    Raises:
        ConfigurationError: It is none.
    """
    if not isinstance(value, kinds):
        raise ConfigurationError(f"{name} is {value!r:.80}; expected {expected}")
    return value


def text(name: str, value: Any, expected: str = "text that is not blank") -> str:
    """Text that is not blank.

    >>> text("kind", "fact")
    'fact'

    Raises:
        ConfigurationError: It is none.
    """
    if not isinstance(value, str) or not value.strip():
        raise ConfigurationError(f"{name} is {value!r:.80}; expected {expected}")
    return value


def moment(name: str, value: Any) -> datetime:
    """A datetime with a time zone.

    Raises:
        ConfigurationError: It is none.
    """
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise ConfigurationError(f"{name} is {value!r}; expected a datetime with a time zone")
    return value
