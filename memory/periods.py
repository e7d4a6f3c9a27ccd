"""Parse the period of a question, which models and clients give as two days or moments."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from typing import Final

from perdure.errors import InvalidValue

SINCE_DESCRIPTION: Final = "The first day or moment that the question is about, like 2026-11-02."
UNTIL_DESCRIPTION: Final = "The last day or moment that the question is about, like 2026-11-08."
"""Descriptions of the arguments for models."""
_START: Final = datetime(1970, 1, 1, tzinfo=UTC)
_END: Final = datetime(9999, 12, 31, tzinfo=UTC)

Period = tuple[datetime, datetime]


def parse_period(since: str | None, until: str | None) -> Period | None:
    """Return the start and the end of a period, for the option `during` of a recall.

    >>> [moment.isoformat() for moment in parse_period("2026-11-02", "2026-11-02")]
    ['2026-11-02T00:00:00+00:00', '2026-11-03T00:00:00+00:00']

    Args:
        since: A day or a moment in ISO 8601; without a timezone it is in UTC. None or blank: the
            period has no start.
        until: The same. A day belongs to the period as a whole. None or blank: the period has no
            end.

    Returns:
        The period, or None if neither is given.

    Raises:
        InvalidValue: A text is neither a day nor a moment, or the period ends before it starts.
    """
    start, end = (text.strip() if text else "" for text in (since, until))
    if not start and not end:
        return None
    period = (
        _parse_moment("since", start, is_end=False) if start else _START,
        _parse_moment("until", end, is_end=True) if end else _END,
    )
    if not period[0] < period[1]:
        raise InvalidValue(f"until is {end!r}, which is not after since, {start!r}")
    return period


def _parse_moment(name: str, text: str, *, is_end: bool) -> datetime:
    try:
        if len(text) == len("2026-11-02"):
            day = date.fromisoformat(text) + timedelta(days=is_end)
            return datetime.combine(day, time(), UTC)
        moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise InvalidValue(
            f"{name} is {text!r:.80}; expected a day or a moment, like 2026-11-02 or "
            "2026-11-02T09:30Z"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
