"""Parse the start and end dates or timestamps of the period that a question is about."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from typing import Final

from perdure.errors import InvalidValue

SINCE_DESCRIPTION: Final = "The first day or moment that the question is about, like 2026-11-02."
UNTIL_DESCRIPTION: Final = "The last day or moment that the question is about, like 2026-11-08."
"""Descriptions of the tool arguments `since` and `until`, which are sent to models."""
# Start of the period returned by `parse_period` if the argument `since` is omitted.
_START: Final = datetime(1970, 1, 1, tzinfo=UTC)
# End of the period returned by `parse_period` if the argument `until` is omitted.
_END: Final = datetime(9999, 12, 31, tzinfo=UTC)

Period = tuple[datetime, datetime]
"""The start of a period, inclusive, and its end, exclusive; both have a time zone."""


def parse_period(since: str | None, until: str | None) -> Period | None:
    """Parse start and end dates or timestamps into a period, for the `during` option of `recall`.

    >>> [moment.isoformat() for moment in parse_period("2026-11-02", "2026-11-02")]
    ['2026-11-02T00:00:00+00:00', '2026-11-03T00:00:00+00:00']

    Args:
        since: A day or a time in ISO 8601. A time without a time zone is in UTC. If the text is
            None or blank, the period has no start.
        until: The last day, which belongs to the period as a whole, or the time at which the period
            ends. The form is that of `since`. If the text is None or blank, the period has no end.

    Returns:
        The start and the end, or None if both texts are missing.

    Raises:
        InvalidValue: A text is neither a day nor a time, or the period does not end after its
            start.
    """
    start, end = (text.strip() if text else "" for text in (since, until))
    if not start and not end:
        return None
    period = (
        _parse_day_or_time("since", start, is_end=False) if start else _START,
        _parse_day_or_time("until", end, is_end=True) if end else _END,
    )
    if not period[0] < period[1]:
        raise InvalidValue(f"until={end!r} must be later than since={start!r}")
    return period


def _parse_day_or_time(option_name: str, text: str, *, is_end: bool) -> datetime:
    """Parse a date or timestamp. With `is_end=True`, a date becomes the start of the next day."""
    try:
        if len(text) == len("2026-11-02"):
            day = date.fromisoformat(text) + timedelta(days=is_end)
            return datetime.combine(day, time(), UTC)
        moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise InvalidValue(
            f"{option_name} is {text!r:.80}; expected a date or a time, like 2026-11-02 or "
            "2026-11-02T09:30Z"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
