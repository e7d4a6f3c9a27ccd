"""Checks of options when something is built: each raises one clear ConfigurationError."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from math import inf
from typing import Any

from perdure.errors import ConfigurationError


def check_whole_number(name: str, value: Any, minimum: int) -> int:
    """A whole number from `minimum` on."""
    valid = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
    return _require(valid, name, value, f"a whole number from {minimum} on")  # type: ignore[no-any-return]


def check_number(name: str, value: Any, minimum: float, maximum: float = inf) -> float:
    """A number from `minimum` to `maximum`, whole or not."""
    bounds = f"from {minimum} on" if maximum == inf else f"from {minimum} to {maximum}"
    valid = is_number(value) and minimum <= value <= maximum
    return _require(valid, name, value, f"a number {bounds}")  # type: ignore[no-any-return]


def check_min_score(value: Any) -> float | None:
    """The option `min_score`: a number, or None for the default floor."""
    valid = value is None or (is_number(value) and abs(value) <= sys.float_info.max)
    return _require(valid, "min_score", value, "a number, or None")  # type: ignore[no-any-return]


def check_seconds(name: str, value: Any, *, above_zero: bool = False) -> float:
    """Seconds, 0 or more; with `above_zero`, more."""
    valid = is_number(value) and 0 <= value < inf and not (above_zero and not value)
    expected = "seconds, above 0" if above_zero else "seconds, 0 or more"
    return _require(valid, name, value, expected)  # type: ignore[no-any-return]


def check_choice(name: str, value: Any, choices: Sequence[str | None]) -> str:
    """A value that is one of the choices."""
    expected = f"one of {', '.join(map(repr, choices))}"
    return _require(value in choices, name, value, expected)  # type: ignore[no-any-return]


def is_number(value: Any) -> bool:
    """Whether a value is a number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_instance(name: str, value: Any, kinds: type | tuple[type, ...], expected: str) -> Any:
    """A value that is an instance of a class; `expected` names it in the error."""
    return _require(isinstance(value, kinds), name, value, expected)


def check_text(name: str, value: Any, expected: str = "text that is not blank") -> str:
    """Text that is not blank."""
    valid = isinstance(value, str) and bool(value.strip())
    return _require(valid, name, value, expected)  # type: ignore[no-any-return]


def check_datetime(name: str, value: Any) -> datetime:
    """A datetime with a time zone."""
    valid = isinstance(value, datetime) and value.tzinfo is not None
    return _require(valid, name, value, "a datetime with a time zone")  # type: ignore[no-any-return]


def _require(valid: bool, name: str, value: Any, expected: str) -> Any:
    if not valid:
        raise ConfigurationError(f"{name} is {value!r:.80}; expected {expected}")
    return value
