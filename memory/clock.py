"""Moments that the config of a run gives: as of when it remembers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from langchain_core.runnables import RunnableConfig, ensure_config

from perdure.errors import InvalidConfig
from perdure.memory.options import instance

Clock = Callable[[RunnableConfig | None], datetime | None]
"""A function of a run's config that gives a moment, or None."""


def clock_of(name: str, given: Clock | str | None) -> Clock:
    """The clock for an option: a function, or the name of a moment in `configurable`.

    >>> config = {"configurable": {"as_of": "2026-05-01T12:00:00+00:00"}}
    >>> clock_of("as_of", "as_of")(config).isoformat()
    '2026-05-01T12:00:00+00:00'

    Args:
        name: The option's name, for errors.
        given: The option; the moment is a datetime, text in ISO 8601, or missing; None: no moment.

    Raises:
        ConfigurationError: It is something else.
    """
    if given is None:
        return lambda config: None
    if isinstance(given, str):
        return lambda config: _moment(given, ensure_config(config)["configurable"].get(given))
    expected = "a function of a run's config, or the name of a moment in it"
    return instance(name, given, Callable, expected)  # type: ignore[arg-type, no-any-return]


def _moment(name: str, value: Any) -> datetime | None:
    if value is None or isinstance(value, datetime):
        return value
    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError) as exc:
        raise InvalidConfig(
            f"configurable[{name!r}] is {value!r:.80}; expected a moment in ISO 8601, like "
            "'2026-05-01T12:00:00+00:00'"
        ) from exc
