"""Cues in a query: speakers and dates, and the rows that fit them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

import numpy as np
import numpy.typing as npt

from perdure.stores.text import STOP_WORDS, tokens

# actors that are parts in a conversation: a query with such a word seldom means the speaker
_ROLES = frozenset(
    {"user", "assistant", "human", "ai", "bot", "agent", "system", "tool", "model", "function"}
)
_MONTHS = (
    *("january", "february", "march", "april", "may", "june"),
    *("july", "august", "september", "october", "november", "december"),
)
_SHORT_MONTHS = ("sept", *(name[:3] for name in _MONTHS if name != "may"))
_LONGEST = 2_000  # characters that are read; what is longer is a document, and no question
_BESIDE = 40  # characters in which the word beside a month is looked for
_TOLD_LATER = timedelta(days=7)  # of a day one also tells in the week after it
_EARLIEST, _LATEST = -30_000_000_000, 30_000_000_000  # seconds: the years 1019 to 2920

_ISO = re.compile(r"\b((?:19|20)\d\d)-(0?[1-9]|1[0-2])(?:-(\d{1,2}))?\b")
_YEAR = re.compile(r"\b(?:19|20)\d\d\b")
_MONTH = "|".join((*_MONTHS, *_SHORT_MONTHS))
_DAY = r"(\d{1,2})(?:st|nd|rd|th)?"
_DAY_MONTH = re.compile(rf"\b{_DAY}\s+(?:of\s+)?({_MONTH})\b", re.IGNORECASE)
_MONTH_DAY = re.compile(rf"\b({_MONTH})\.?\s+{_DAY}\b(?!\d)", re.IGNORECASE)
_MONTH_ALONE = re.compile(rf"\b({_MONTH})\b", re.IGNORECASE)
_WORDS_TOO = frozenset({"may", "march", "mar", "jan", "jun", "dec", "sept", "sep"})


@dataclass(frozen=True)
class NamedTime:
    """A time that a query names: any of its parts may be missing."""

    years: frozenset[int] = frozenset()
    months: frozenset[int] = frozenset()
    days: frozenset[int] = frozenset()


def names_of(actor: str) -> frozenset[str]:
    """The tokens by which a query names an actor; none for a mere role.

    >>> sorted(names_of("Caroline Smith")), sorted(names_of("user"))
    (['carolin', 'smith'], [])
    """
    if actor.casefold() in _ROLES:
        return frozenset()
    return frozenset(token for token in tokens(actor) if token not in STOP_WORDS)


def named_actors(query: Sequence[str], actors: Sequence[str]) -> list[bool]:
    """The actors that a query's tokens name.

    >>> named_actors(["carolin", "paint"], ["Caroline", "Melanie"])
    [True, False]
    """
    said = frozenset(query)
    return [bool(names_of(actor) & said) for actor in actors]


def named_time(query: str) -> NamedTime | None:
    """The year, month or day that a query names; None if it names none.

    Reads the first 2,000 characters: ISO dates and English ones, in either order of day and month.
    A month that is also a word or a name counts only with a capital or beside a number.

    >>> named_time("What did we do on 3 October 2023?")
    NamedTime(years=frozenset({2023}), months=frozenset({10}), days=frozenset({3}))
    >>> named_time("May I come in?")
    """
    query = query[:_LONGEST]
    years, months, days = set[int](), set[int](), set[int]()
    for year, month, day in _ISO.findall(query):
        years.add(int(year))
        months.add(int(month))
        days.update({int(day)} if day else ())
    query = _ISO.sub(" ", query)
    for pattern, at_day in ((_DAY_MONTH, 1), (_MONTH_DAY, 2)):
        for match in pattern.finditer(query):
            months.add(_number(match[3 - at_day]))
            days.add(int(match[at_day]))
    years.update(int(year) for year in _YEAR.findall(query))
    months.update(_number(m[1]) for m in _MONTH_ALONE.finditer(query) if _is_month(m, query))
    days = {day for day in days if 1 <= day <= 31}
    if not years and not months:
        return None
    return NamedTime(frozenset(years), frozenset(months), frozenset(days if months else ()))


def said_at(time: NamedTime, at: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """The rows of that time; for a day, also those of the week after it."""
    fits = np.isfinite(at)
    if not fits.any():
        return fits
    first, last = (
        datetime.fromtimestamp(float(np.clip(edge, _EARLIEST, _LATEST)), UTC).date()
        for edge in (at[fits].min(), at[fits].max())
    )
    inside = np.zeros(len(at), bool)
    for start, end in _spans(time, first, last):
        inside |= (at >= _seconds(start)) & (at < _seconds(end))
    return inside & fits


def said_when(
    query: str, during: tuple[float, float] | None, at: npt.NDArray[np.float64]
) -> npt.NDArray[np.bool_] | None:
    """The rows of a time that the query names, or of the span that it is about.

    Times are UTC seconds since 1970, NaN for unknown; None if there is neither.
    """
    named = named_time(query)
    fits = None if named is None else said_at(named, at)
    if during is None:
        return fits
    inside = (at >= during[0]) & (at < during[1])
    return inside if fits is None else fits | inside


def _spans(time: NamedTime, first: date, last: date) -> list[tuple[date, date]]:
    """The half-open spans of days that a named time covers between two days."""
    spans = []
    for year in sorted(time.years) or range((first - _TOLD_LATER).year, last.year + 1):
        if not time.months:
            spans.append((date(year, 1, 1), date(year + 1, 1, 1)))
        for month in sorted(time.months):
            start = date(year, month, 1)
            if not time.days:
                spans.append((start, date(year + month // 12, month % 12 + 1, 1)))
            for day in sorted(time.days):
                that = start + timedelta(days=day - 1)
                spans.append((that, that + timedelta(days=1) + _TOLD_LATER))
    return spans


def _seconds(day: date) -> float:
    return datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()


def _number(month: str) -> int:
    """1 to 12 of a month's name, short or long."""
    return next(i for i, name in enumerate(_MONTHS, 1) if name.startswith(month.lower()[:3]))


def _is_month(match: re.Match[str], query: str) -> bool:
    """Whether a month's name means the month."""
    if match[1].lower() not in _WORDS_TOO:
        return True
    start, end = match.span()
    before = query[max(start - _BESIDE, 0) : start].split()
    beside = (*before[-1:], *query[end : end + _BESIDE].split()[:1])
    capital = bool(before) and match[1][0].isupper()
    return capital or any(char.isdigit() for word in beside for char in word)
