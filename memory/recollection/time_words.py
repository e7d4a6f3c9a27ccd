"""The words that name a time in English, and what each of them means at a moment."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import date, datetime, timedelta
from typing import Final, NamedTuple

from perdure.memory.recollection import spans
from perdure.memory.recollection.spans import Days

Resolve = Callable[[datetime], Days | None]
"""From the moment at which something is said, to the span that it means."""
_Found = re.Match[str]
_Make = Callable[[_Found], Resolve | None]

MONTHS: Final = (
    *("january", "february", "march", "april", "may", "june"),
    *("july", "august", "september", "october", "november", "december"),
)
_WEEKDAYS: Final = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_WORDS_TOO: Final = frozenset({"may", "march", "mar"})
_NUMBERS: Final = {
    **{"a": 1, "an": 1, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6},
    **{"seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11, "twelve": 12},
}
_VAGUE: Final = {"couple": 2, "few": 3, "several": 4}

MONTH: Final = rf"(?P<month>{'|'.join(MONTHS)}|sept|{'|'.join(m[:3] for m in MONTHS)})\b\.?"
_WEEKDAY = rf"(?P<weekday>{'|'.join(_WEEKDAYS)})"
_SEASON = rf"(?P<season>{'|'.join(spans.SEASONS)})"
_PART = rf"(?: (?P<part>{'|'.join(spans.PARTS)}))?\b"
_YEAR = r"(?P<year>(?:19|20)\d\d)\b"
_DAY = r"(?P<day>0?[1-9]|[12]\d|3[01])(?:st|nd|rd|th)?"
_COUNT = rf"(?P<count>\d{{1,3}}|(?:a )?couple(?: of)?|(?:a )?few|several|{'|'.join(_NUMBERS)})"
_UNIT = rf"(?P<unit>{'|'.join(spans.UNITS)})s?\b"
_WHICH = r"\b(?P<which>this past|last|past|previous|this)"
_ALONE = r"(?![-\w])(?! of\b)"

_HINT = re.compile(
    rf"\d|{_WEEKDAY}|{_SEASON}|{MONTH}|{_UNIT}|weekend|today|yesterday|night|morning|afternoon|evening",
    re.IGNORECASE,
)
"""Without any of these there is no cue: most queries have none, and end here."""

ANYWHERE: Final[frozenset[str]] = frozenset()
_IN: Final = frozenset({"in", "during", "throughout", "since", "after", "part of"})
_ON: Final = frozenset({"on", "since", "after"})


class Cue(NamedTuple):
    """A part of a text that names a time.

    Attributes:
        start, end: Where it stands.
        resolve: What it means at a moment.
        leads: The words one of which it must stand behind to mean that; none: it always does.
    """

    start: int
    end: int
    resolve: Resolve
    leads: frozenset[str]


def cues_of(text: str) -> list[Cue]:
    """The cues of a text, in order; of those that overlap the longest."""
    if _HINT.search(text) is None:
        return []
    found = [
        Cue(match.start(), match.end(), resolve, leads)
        for pattern, make, leads in _PATTERNS
        for match in pattern.finditer(text)
        if (resolve := make(match)) is not None
    ]
    kept: list[Cue] = []
    taken = bytearray(len(text))
    for cue in sorted(found, key=lambda cue: (cue.start - cue.end, cue.start)):
        if not any(taken[cue.start : cue.end]):
            taken[cue.start : cue.end] = bytes([1]) * (cue.end - cue.start)
            kept.append(cue)
    return sorted(kept, key=lambda cue: cue.start)


def _ago(match: _Found) -> Resolve:
    count, slack = _count(match["count"])
    return lambda now: spans.ago(now, match["unit"].lower(), count, slack)


def _past(match: _Found) -> Resolve:
    count, slack = _count(match.groupdict().get("count") or "one")
    return lambda now: spans.past(now, match["unit"].lower(), count + slack)


def _count(said: str) -> tuple[int, int]:
    """A number, and how far off it may be."""
    words = said.lower().split()
    for word in words:
        if word in _VAGUE:
            return _VAGUE[word], 1
    return (int(said) if said.isdigit() else _NUMBERS[words[0]]), 0


def _unit(match: _Found) -> Resolve:
    """Last week, this month: those of the calendar."""
    unit, is_this = match["unit"].lower(), match["which"].lower() == "this"
    earlier = match.groupdict().get("earlier")

    def resolve(now: datetime) -> Days | None:
        this = {
            "week": lambda: spans.week(now.date()),
            "month": lambda: spans.month(now.year, now.month),
            "year": lambda: spans.year(now.year),
            "weekend": lambda: spans.weekend(now.date()),
        }[unit]()
        if earlier:
            today = spans.day(now.date())
            return (this[0], today[0]) if this[0] < today[0] else today
        if is_this:
            return this
        if unit == "weekend":
            return spans.weekend(now.date() - timedelta(days=7))
        return _unit_before(unit, this[0])

    return resolve


def _unit_before(unit: str, start: datetime) -> Days:
    return spans.earlier(start, unit, 1), start


def _day_before(days: int) -> Callable[[_Found], Resolve]:
    def make(match: _Found) -> Resolve:
        part = (match.groupdict().get("part") or "").lower() or None
        return lambda now: spans.part_of(now.date() - timedelta(days=days), part)

    return make


def _other_day(match: _Found) -> Resolve:
    return lambda now: spans.between(now.date() - timedelta(days=7), now.date())


def _over_the_weekend(match: _Found) -> Resolve:
    """The last weekend that has begun."""
    return lambda now: spans.weekend(now.date() - timedelta(days=0 if now.weekday() >= 5 else 7))


def _weekday(match: _Found) -> Resolve:
    """The last Monday before today; this Monday: that of this week."""
    number = _WEEKDAYS.index(match["weekday"].lower())
    is_this = (match.groupdict().get("which") or "").lower() == "this"
    part = (match["part"] or "").lower() or None

    def resolve(now: datetime) -> Days:
        back = now.weekday() - number if is_this else (now.weekday() - number - 1) % 7 + 1
        return spans.part_of(now.date() - timedelta(days=back), part)

    return resolve


def _weekday_of_week(match: _Found) -> Resolve:
    number, is_last = _WEEKDAYS.index(match["weekday"].lower()), match["which"].lower() != "this"
    part = (match["part"] or "").lower() or None

    def resolve(now: datetime) -> Days:
        back = now.weekday() - number + 7 * is_last
        return spans.part_of(now.date() - timedelta(days=back), part)

    return resolve


def _month(match: _Found) -> Resolve | None:
    """In March: the last one that has begun; last March: before this month."""
    which, number = match.groupdict().get("which"), _number(match["month"])
    if which and not _is_month(match["month"]):
        return None  # "this may be", "the last march"
    which = (which or "").lower()

    def resolve(now: datetime) -> Days:
        begun = number <= now.month if not which else number < now.month
        return spans.month(now.year - (not begun and which != "this"), number)

    return resolve


def _month_of_year(match: _Found) -> Resolve | None:
    if not _is_month(match["month"]):
        return None
    number, year = _number(match["month"]), match.groupdict().get("year")
    is_last = (match.groupdict().get("which") or "").lower() == "last"
    return lambda now: spans.month(int(year) if year else now.year - is_last, number)


def _date(match: _Found) -> Resolve | None:
    """A day; without a year, the last one that was."""
    named = match["month"]
    if not _is_month(named) and match.start("month") < match.start("day"):
        return None  # "who may 3 of us ask"
    number = int(named) if named.isdigit() else _number(named)
    year, that = match["year"], int(match["day"])

    def resolve(now: datetime) -> Days:
        if year:
            return spans.day(date(int(year), number, that))
        past = (_day_of(now.year - back, number, that) for back in range(9))
        return spans.day(next(day for day in past if day is not None and day <= now.date()))

    return resolve if that <= 29 or _day_of(2024, number, that) else _no_day


def _day_of(year: int, month: int, day: int) -> date | None:
    try:
        return date(year, month, day)
    except ValueError:  # 29 February in most years
        return None


def _no_day(now: datetime) -> None:
    return None


def _year(match: _Found) -> Resolve:
    return lambda now: spans.year(int(match["year"]))


def _season(match: _Found) -> Resolve:
    """Last summer: before today; the summer: the last one that has begun; this: this year's."""
    said = match.groupdict()
    name, year, which = match["season"].lower(), said.get("year"), (said.get("which") or "").lower()

    def resolve(now: datetime) -> Days:
        if year:
            return spans.season(name, int(year))
        every = [spans.season(name, now.year - back) for back in range(3)]
        if which and which != "this":
            return next(span for span in every if span[1] <= now)
        begun = next(span for span in every if span[0] <= now)
        return begun if not which or begun[1].year == now.year else every[0]

    return resolve


def _number(month: str) -> int:
    return next(n for n, name in enumerate(MONTHS, 1) if name.startswith(month.lower()[:3]))


def _is_month(name: str) -> bool:
    return name[0].isupper() or name.lower() not in _WORDS_TOO


_PATTERNS: Final[Sequence[tuple[re.Pattern[str], _Make, frozenset[str]]]] = [
    (re.compile(pattern, re.IGNORECASE), make, leads)
    for pattern, make, leads in (
        (rf"(?<![\w.,-]){_COUNT}[ -]{_UNIT} ago\b(?: today\b)?", _ago, ANYWHERE),
        (rf"{_WHICH} {_COUNT} {_UNIT}{_ALONE}", _past, ANYWHERE),
        (rf"\b(?:(?:in|over|within|during) the last|past) {_UNIT}{_ALONE}", _past, ANYWHERE),
        (
            rf"(?P<earlier>\bearlier )?{_WHICH} (?P<unit>week|month|year|weekend){_ALONE}",
            _unit,
            ANYWHERE,
        ),
        (r"\bover the weekend\b", _over_the_weekend, ANYWHERE),
        (r"\b(?:the )?day before yesterday\b", _day_before(2), ANYWHERE),
        (rf"\byesterday{_PART}", _day_before(1), ANYWHERE),
        (r"\blast (?P<part>night)\b", _day_before(1), ANYWHERE),
        (r"\b(?:earlier )?today\b", _day_before(0), ANYWHERE),
        (r"\bthis (?P<part>morning|afternoon|evening)\b", _day_before(0), ANYWHERE),
        (r"\bto(?P<part>night)\b", _day_before(0), ANYWHERE),
        (r"\bthe other day\b", _other_day, ANYWHERE),
        (rf"{_WHICH} {_WEEKDAY}{_PART}", _weekday, ANYWHERE),
        (rf"\b{_WEEKDAY}{_PART}", _weekday, _ON),
        (rf"\b{_WEEKDAY}{_PART} (?:of )?(?P<which>last|this) week\b", _weekday_of_week, ANYWHERE),
        (rf"{_WHICH} {MONTH}(?! ?\d)", _month, ANYWHERE),
        (rf"\b{MONTH}(?!['\u2019])", _month, _IN),
        (rf"\b{MONTH},? {_YEAR}", _month_of_year, ANYWHERE),
        (rf"\b{MONTH} (?:of )?(?P<which>last|this) year\b", _month_of_year, ANYWHERE),
        (rf"\b{_DAY} (?:of )?{MONTH}(?:,? {_YEAR})?", _date, ANYWHERE),
        (rf"\b{MONTH} {_DAY}\b(?:,? {_YEAR})?", _date, ANYWHERE),
        (
            r"\b(?P<year>(?:19|20)\d\d)-(?P<month>0?[1-9]|1[0-2])-(?P<day>0?[1-9]|[12]\d|3[01])\b",
            _date,
            ANYWHERE,
        ),
        (rf"\b{_YEAR}", _year, _IN),
        (rf"{_WHICH} {_SEASON}\b", _season, ANYWHERE),
        (rf"\b(?:over|during|throughout|since) the {_SEASON}\b", _season, ANYWHERE),
        (rf"\b{_SEASON} (?:of )?{_YEAR}", _season, ANYWHERE),
    )
]
