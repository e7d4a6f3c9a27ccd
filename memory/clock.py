"""Moments of a run: when it asks, and as of when it is to remember."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from langchain_core.runnables import RunnableConfig, ensure_config

from perdure.errors import ConfigurationError, InvalidConfig

Clock = Callable[[RunnableConfig | None], datetime | None]
"""A moment, of the config of a run."""


def clock_of(name: str, given: Clock | str | None) -> Clock:
    """What tells a moment of a run's config.

    >>> told = {"configurable": {"as_of": "2026-05-01T12:00:00+00:00"}}
    >>> clock_of("as_of", "as_of")(told).isoformat()
    '2026-05-01T12:00:00+00:00'

    Args:
        name: The option's, for messages.
        given: A function; or the name under which the config's `configurable` has a moment, as a
            datetime or ISO 8601, or nothing; None: there is never one.

    Raises:
        ConfigurationError: It is neither.
    """
    if given is None:
        return lambda config: None
    if isinstance(given, str):
        return lambda config: _told(given, ensure_config(config)["configurable"].get(given))
    if not callable(given):
        raise ConfigurationError(
            f"{name} is {given!r:.80}; expected a function that takes a run's config and returns a "
            "moment, or the name that a moment has in it"
        )
    return given


def _told(name: str, value: Any) -> datetime | None:
    if value is None or isinstance(value, datetime):
        return value
    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError) as exc:
        raise InvalidConfig(
            f"configurable[{name!r}] is {value!r:.80}; expected a moment in ISO 8601, like "
            "'2026-05-01T12:00:00+00:00'"
        ) from exc
