"""Spans of the calendar: days, weeks, months, years, seasons, and how long ago something was.

Spans are half-open and without a time zone: they are of the calendar where somebody lives. Weeks
begin on Monday (ISO 8601), seasons are those of the northern hemisphere.
"""

from __future__ import annotations

from calendar import monthrange
from datetime import date, datetime, time, timedelta
from typing import Final

Days = tuple[datetime, datetime]
"""From a moment on, up to another; without a time zone."""

UNITS: Final = ("minute", "hour", "day", "week", "month", "year")
SEASONS: Final = {"spring": 3, "summer": 6, "autumn": 9, "fall": 9, "winter": 12}
PARTS: Final = {"morning": (0, 12), "afternoon": (12, 18), "evening": (18, 24), "night": (18, 30)}
_SHORT: Final = {"minute": timedelta(minutes=1), "hour": timedelta(hours=1)}


def between(start: date, end: date) -> Days:
    """From the beginning of a day up to the beginning of another."""
    return datetime.combine(start, time()), datetime.combine(end, time())


def day(that: date) -> Days:
    """A whole day."""
    return between(that, that + timedelta(days=1))


def part_of(that: date, part: str | None) -> Days:
    """A part of a day, like `"morning"`; a night ends at 6 in the morning. None: all of it."""
    if part is None:
        return day(that)
    midnight = datetime.combine(that, time())
    first, last = PARTS[part]
    return midnight + timedelta(hours=first), midnight + timedelta(hours=last)


def week(that: date) -> Days:
    """The week that a day is in."""
    monday = that - timedelta(days=that.weekday())
    return between(monday, monday + timedelta(days=7))


def weekend(that: date) -> Days:
    """Saturday and Sunday of the week that a day is in."""
    saturday = that + timedelta(days=5 - that.weekday())
    return between(saturday, saturday + timedelta(days=2))


def month(year: int, number: int) -> Days:
    """A month, 1 to 12."""
    start = date(year, number, 1)
    return between(start, months_later(start, 1))


def year(number: int) -> Days:
    """A year."""
    return between(date(number, 1, 1), date(number + 1, 1, 1))


def season(name: str, number: int) -> Days:
    """A season of a year; winter is that which begins in it."""
    start = date(number, SEASONS[name], 1)
    return between(start, months_later(start, 3))


def months_later(that: date, count: int) -> date:
    """The same day of another month, or its last day."""
    years, before = divmod(that.year * 12 + that.month - 1 + count, 12)
    return date(years, before + 1, min(that.day, monthrange(years, before + 1)[1]))


def earlier(now: datetime, unit: str, count: int) -> datetime:
    """The moment so many units before."""
    if unit in _SHORT:
        return now - count * _SHORT[unit]
    if unit in ("day", "week"):
        return now - timedelta(days=count * (7 if unit == "week" else 1))
    that = months_later(now.date(), -count * (12 if unit == "year" else 1))
    return datetime.combine(that, now.time())


def ago(now: datetime, unit: str, count: int, slack: int = 0) -> Days:
    """What was so many units ago: as long as a unit, around that moment; a day is a calendar day.

    >>> [str(when.date()) for when in ago(datetime(2024, 5, 15), "week", 2)]
    ['2024-04-28', '2024-05-05']

    Args:
        now: When it is said.
        unit: One of `UNITS`.
        count: How many.
        slack: How many units more on both sides, where the number was a vague one.
    """
    then = earlier(now, unit, count)
    if unit in _SHORT:
        reach = _SHORT[unit] / 2 + slack * _SHORT[unit]
        return then - reach, then + reach
    length = {"day": 1, "week": 7, "month": 31, "year": 365}[unit]
    reach = timedelta(days=length // 2 + slack * length)
    return between(then.date() - reach, then.date() + reach + timedelta(days=1))


def past(now: datetime, unit: str, count: int) -> Days:
    """The time since so many units ago: up to the end of today."""
    start = earlier(now, unit, count)
    end = day(now.date())[1]
    return (start if unit in _SHORT else between(start.date(), end.date())[0]), end
