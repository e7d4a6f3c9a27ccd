"""Validate the options of nodes, tools and stores. An invalid value raises a ConfigurationError."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from math import inf
from typing import Any

from perdure.errors import ConfigurationError


def check_whole_number(option_name: str, value: Any, minimum: int) -> int:
    """Check that the option `option_name` is an int of at least `minimum`, and return its value."""
    valid = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
    return _require_valid_option(valid, option_name, value, f"an integer of at least {minimum}")  # type: ignore[no-any-return]


def check_number(option_name: str, value: Any, minimum: float, maximum: float = inf) -> float:
    """Check that an option is a number from `minimum` to `maximum`, and return its value."""
    bounds = f"of at least {minimum}" if maximum == inf else f"from {minimum} to {maximum}"
    valid = is_number(value) and minimum <= value <= maximum
    return _require_valid_option(valid, option_name, value, f"a number {bounds}")  # type: ignore[no-any-return]


def check_min_score(value: Any) -> float | None:
    """Check that the option `min_score` is a number or None, and return its value.

    None means the default.
    """
    valid = value is None or (is_number(value) and abs(value) <= sys.float_info.max)
    return _require_valid_option(valid, "min_score", value, "a number, or None")  # type: ignore[no-any-return]


def check_seconds(option_name: str, value: Any, *, above_zero: bool = False) -> float:
    """Check that the option `option_name` is a duration in seconds, and return its value.

    The number of seconds must be at least 0, or greater than 0 if `above_zero` is True.
    """
    valid = is_number(value) and 0 <= value < inf and not (above_zero and not value)
    expected = f"a number of seconds {'above 0' if above_zero else 'of at least 0'}"
    return _require_valid_option(valid, option_name, value, expected)  # type: ignore[no-any-return]


def check_choice(option_name: str, value: Any, choices: Sequence[str | None]) -> str:
    """Check that the option `option_name` is one of the choices, and return its value."""
    expected = f"one of {', '.join(map(repr, choices))}"
    return _require_valid_option(value in choices, option_name, value, expected)  # type: ignore[no-any-return]


def is_number(value: Any) -> bool:
    """Return whether a value is an int or a float. A bool does not count as a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_instance(
    option_name: str, value: Any, types: type | tuple[type, ...], expected: str
) -> Any:
    """Check that the option `option_name` is an instance of one of the types, and return its value.

    `expected` describes the allowed values in the error message.
    """
    return _require_valid_option(isinstance(value, types), option_name, value, expected)


def check_text(option_name: str, value: Any, expected: str = "text that is not blank") -> str:
    """Check that the option `option_name` is a non-blank string, and return its value.

    `expected` describes the allowed values in the error message.
    """
    valid = isinstance(value, str) and bool(value.strip())
    return _require_valid_option(valid, option_name, value, expected)  # type: ignore[no-any-return]


def check_datetime(option_name: str, value: Any) -> datetime:
    """Check that the option `option_name` is a timezone-aware datetime, and return its value."""
    valid = isinstance(value, datetime) and value.tzinfo is not None
    return _require_valid_option(valid, option_name, value, "a datetime with a time zone")  # type: ignore[no-any-return]


def _require_valid_option(is_valid: bool, option_name: str, value: Any, expected: str) -> Any:
    """Return an option's value if `is_valid` is True, and raise ConfigurationError otherwise."""
    if not is_valid:
        raise ConfigurationError(f"{option_name} is {value!r:.80}; expected {expected}")
    return value
