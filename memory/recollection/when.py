"""Time cues: what "last week" or "since March" in a query means, at the moment it is asked.

English. What may be another word counts only where it can be no other: "may" and "march" with a
capital, a number or a preposition, a bare year or weekday with a preposition. Of what lies ahead
("next week"), and of all that was before something, there is no span.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from perdure.errors import ConfigurationError
from perdure.memory.recollection import spans
from perdure.memory.recollection.spans import Days
from perdure.memory.recollection.time_words import MONTH, Cue, cues_of

_NOT: Final = frozenset(
    {"before", "until", "till", "by", "next", "coming", "following", "every", "each", "prior"}
)
_LONGEST: Final = 2_000  # characters; what is longer is a document, and no question
_PARTS: Final = (
    "start|beginning|middle|end|rest|half|part|days?|weeks?|weekend|month|first|second|third"
)
_LEAD = re.compile(
    rf"(?:\b(?:{_PARTS}) (?P<of>of)|(?P<word>\w+)(?: to)?)(?: the| early| late| mid)*[ -]$",
    re.IGNORECASE,
)
_JOINT = re.compile(r" ?(?:and|to|until|till|through|[-\N{EN DASH}]) ?(?:the )?", re.IGNORECASE)
_SHARED_AFTER = re.compile(
    rf"\b(between|from) (\d{{1,2}})\w* (and|to|until) (\d{{1,2}})\w* (?:of )?{MONTH}", re.IGNORECASE
)
_SHARED_BEFORE = re.compile(
    rf"\b(between|from) {MONTH} (\d{{1,2}})\w* (and|to|until) (\d{{1,2}})\b(?! ?\d)", re.IGNORECASE
)


def named_span(query: str, now: datetime) -> tuple[datetime, datetime] | None:
    """The span of time that a query means; None if it names none, or several that do not nest.

    >>> now = datetime.fromisoformat("2024-05-15T12:00:00+00:00")
    >>> start, end = named_span("What did we do last week?", now)
    >>> str(start.date()), str(end.date())
    ('2024-05-06', '2024-05-13')

    Args:
        query: In the user's words.
        now: When it is asked. Days begin at midnight in its time zone.

    Returns:
        From a moment on, up to another, in the time zone of `now`. What has no end ends with today.

    Raises:
        ConfigurationError: `now` has no time zone.
    """
    if not isinstance(now, datetime) or now.tzinfo is None:
        raise ConfigurationError(
            f"now is {now!r}; expected a datetime with a time zone, like datetime.now(UTC)"
        )
    zone, there = now.tzinfo, now.replace(tzinfo=None, fold=0)
    text = " ".join(query[:_LONGEST].split())
    text = _SHARED_AFTER.sub(r"\1 \2 \5 \3 \4 \5", text)
    text = _SHARED_BEFORE.sub(r"\1 \2 \3 \4 \2 \5", text)
    try:
        found = _narrowest(_meant(text, cues_of(text), there))
    except (OverflowError, ValueError):  # before the year 1, or after the last
        return None
    return None if found is None else (found[0].replace(tzinfo=zone), found[1].replace(tzinfo=zone))


def _meant(text: str, cues: Sequence[Cue], now: datetime) -> list[Days]:
    """The spans that cues mean, each with what stands before it."""
    out: list[Days | None] = []
    rest = list(cues)
    while rest:
        cue = rest.pop(0)
        lead = _lead(text, cue)
        if lead in ("between", "from") and rest and _joined(text, cue, rest[0]):
            out.append(_from_to(cue, rest.pop(0), now))
        elif lead not in _NOT and (lead in cue.leads or not cue.leads):
            out.append(_opened(lead, cue.resolve(now), now))
    return [span for span in out if span is not None]


def _lead(text: str, cue: Cue) -> str:
    """The word that decides how a cue is meant, in lower case."""
    match = _LEAD.search(text, max(cue.start - 40, 0), cue.start)
    if match is None:
        return ""
    return "part of" if match["of"] else match["word"].lower()


def _joined(text: str, cue: Cue, other: Cue) -> bool:
    return _JOINT.fullmatch(text, cue.end, other.start) is not None


def _from_to(first: Cue, last: Cue, now: datetime) -> Days | None:
    """From one cue to another, which says the year of the first as well."""
    end = last.resolve(now)
    start = None if end is None else first.resolve(end[0])
    return None if start is None or end is None else _span(start[0], end[1])


def _opened(lead: str, span: Days | None, now: datetime) -> Days | None:
    """A span that goes on until today, behind "since" and "after"."""
    today = spans.day(now.date())[1]
    if span is None or lead not in ("since", "after"):
        return span
    return _span(span[0] if lead == "since" else span[1], today)


def _span(start: datetime, end: datetime) -> Days | None:
    return (start, end) if start < end else None


def _narrowest(found: Sequence[Days]) -> Days | None:
    """The span that all others contain."""
    if not found:
        return None
    best = min(found, key=lambda span: span[1] - span[0])
    return best if all(s <= best[0] and best[1] <= e for s, e in found) else None
