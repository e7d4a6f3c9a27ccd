"""Moments that the config of a run gives: as of when it remembers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from langchain_core.runnables import RunnableConfig, ensure_config

from perdure.errors import InvalidConfig
from perdure.memory.options import instance

Clock = Callable[[RunnableConfig | None], datetime | None]
"""A function of a run's config that gives a moment, or None."""


def clock_of(name: str, given: Clock | str | None) -> Clock:
    """The clock for the option `name`: a function, or the name of a moment in `configurable`."""
    if given is None:
        return lambda config: None
    if not isinstance(given, str):
        expected = "a function of a run's config, or the name of a moment in it"
        return instance(name, given, Callable, expected)  # type: ignore[arg-type, no-any-return]

    def clock(config: RunnableConfig | None) -> datetime | None:
        value = ensure_config(config)["configurable"].get(given)
        try:
            return datetime.fromisoformat(value) if isinstance(value, str) else value
        except ValueError as exc:
            raise InvalidConfig(
                f"configurable[{given!r}] is {value!r:.80}; expected a moment in ISO 8601, like "
                "'2026-05-01T12:00:00+00:00'"
            ) from exc

    return clock
