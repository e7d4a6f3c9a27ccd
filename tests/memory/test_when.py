"""Time cues: what a query means by "last week" at the moment when it is asked."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import ConfigurationError
from perdure.memory.recollection.when import named_span

ZONE = timezone(timedelta(hours=2))
NOW = datetime(2024, 5, 15, 10, 30, tzinfo=ZONE)  # a Wednesday


def told(query: str, now: datetime = NOW) -> str | None:
    """A span as text: days, and hours where there are any."""
    span = named_span(query, now)
    if span is None:
        return None
    return " ".join(each.isoformat(" ", "minutes")[:16].removesuffix(" 00:00") for each in span)


MEANT = {
    # days
    "What did I say yesterday?": "2024-05-14 2024-05-15",
    "yesterday's lunch": "2024-05-14 2024-05-15",
    "the day before yesterday": "2024-05-13 2024-05-14",
    "What happened today?": "2024-05-15 2024-05-16",
    "this morning": "2024-05-15 2024-05-15 12:00",
    "yesterday evening": "2024-05-14 18:00 2024-05-15",
    "last night": "2024-05-14 18:00 2024-05-15 06:00",
    "the other day": "2024-05-08 2024-05-15",
    # weeks, months, years of the calendar
    "What did we talk about last week?": "2024-05-06 2024-05-13",
    "this week": "2024-05-13 2024-05-20",
    "last month's plans": "2024-04-01 2024-05-01",
    "this year": "2024-01-01 2025-01-01",
    "Last year": "2023-01-01 2024-01-01",
    "last weekend": "2024-05-11 2024-05-13",
    "this past weekend": "2024-05-11 2024-05-13",
    "this weekend": "2024-05-18 2024-05-20",
    "over the weekend": "2024-05-11 2024-05-13",
    "last summer": "2023-06-01 2023-09-01",
    "last winter": "2023-12-01 2024-03-01",
    "summer of 2022": "2022-06-01 2022-09-01",
    "earlier this year": "2024-01-01 2024-05-15",
    "earlier this week": "2024-05-13 2024-05-15",
    # so long ago
    "3 days ago": "2024-05-12 2024-05-13",
    "a couple of days ago": "2024-05-12 2024-05-15",
    "two weeks ago": "2024-04-28 2024-05-05",
    "a few weeks ago": "2024-04-14 2024-05-05",
    "a month ago": "2024-03-31 2024-05-01",
    "Where did she move from 4 years ago?": "2019-11-15 2020-11-14",
    "an hour ago": "2024-05-15 09:00 2024-05-15 10:00",
    "in the last month": "2024-04-15 2024-05-16",
    "over the past 10 days": "2024-05-05 2024-05-16",
    # weekdays
    "on Monday": "2024-05-13 2024-05-14",
    "last Tuesday": "2024-05-14 2024-05-15",
    "on Wednesday": "2024-05-08 2024-05-09",
    "this Friday": "2024-05-17 2024-05-18",
    "on Monday last week": "2024-05-06 2024-05-07",
    "last Friday night": "2024-05-10 18:00 2024-05-11 06:00",
    # months and years
    "in March": "2024-03-01 2024-04-01",
    "in May": "2024-05-01 2024-06-01",
    "in June": "2023-06-01 2023-07-01",
    "last May": "2023-05-01 2023-06-01",
    "the second week of March": "2024-03-01 2024-04-01",
    "in mid-March": "2024-03-01 2024-04-01",
    "March last year": "2023-03-01 2023-04-01",
    "What did Dave open in May 2023?": "2023-05-01 2023-06-01",
    "in 2022": "2022-01-01 2023-01-01",
    # days with a date
    "on 3 October 2023": "2023-10-03 2023-10-04",
    "on October 13, 2023": "2023-10-13 2023-10-14",
    "on the 1st of September": "2023-09-01 2023-09-02",
    "on May 5": "2024-05-05 2024-05-06",
    "on 29 February": "2024-02-29 2024-03-01",
    "since 2024-05-07": "2024-05-07 2024-05-16",
    # from, since, between
    "since March": "2024-03-01 2024-05-16",
    "since last week": "2024-05-06 2024-05-16",
    "since Monday": "2024-05-13 2024-05-16",
    "after last week": "2024-05-13 2024-05-16",
    "between March and May": "2024-03-01 2024-06-01",
    "between August and November 2023": "2023-08-01 2023-12-01",
    "between 3 and 7 March": "2024-03-03 2024-03-08",
    "between March 3 and 7": "2024-03-03 2024-03-08",
    "from 28 December to 2 January": "2023-12-28 2024-01-03",
    "from 2021 to 2023": "2021-01-01 2024-01-01",
    # the narrowest
    "this morning, today": "2024-05-15 2024-05-15 12:00",
}


@pytest.mark.parametrize(("query", "span"), MEANT.items(), ids=MEANT)
def test_a_cue_means_a_span(query: str, span: str) -> None:
    """Asked on Wednesday, 15 May 2024, half past ten, somewhere two hours east of Greenwich."""
    found = named_span(query, NOW)

    assert span == told(query)
    assert found is not None
    assert {ZONE} == {each.tzinfo for each in found}


NOTHING = (
    *("", "What is her cat called?", "May I come in?", "this may be the reason", "march on"),
    *("the last march", "What do you know of April?", "in April's house", "who may 3 of us ask"),
    *("How long did it last?", "a second ago", "the second time", "next Monday", "next week"),
    *("on Mondays", "every Monday", "before last week", "until March", "by 2023", "since then"),
    *("a 3-day trip", "the last week of school", "a last week-long trip", "1.5 years ago"),
    *("on 30 February 2023", "on 31 April", "plans for the summer", "room 2023", "sunday best"),
    *("last week or today", "the meeting on Monday and the one in 2019"),
)


@pytest.mark.parametrize("query", NOTHING)
def test_what_is_no_cue_means_nothing(query: str) -> None:
    """Words that may be others, what lies ahead, and cues that contradict each other."""
    assert told(query) is None


def test_days_begin_where_the_user_is() -> None:
    """It is yesterday in one place while it is still today in another, and clocks are moved."""
    late = datetime(2024, 3, 31, 23, 30, tzinfo=UTC)
    there = late.astimezone(ZoneInfo("Europe/Brussels"))  # the day before had 23 hours
    spans = [named_span("yesterday", moment) for moment in (late, there)]
    hours = [(end.astimezone(UTC) - start.astimezone(UTC)) for start, end in filter(None, spans)]

    assert [
        told("yesterday", late), told("yesterday", there),
    ] == ["2024-03-30 2024-03-31", "2024-03-31 2024-04-01"]  # fmt: skip
    assert [each.total_seconds() / 3600 for each in hours] == [24, 23]


def test_a_moment_without_a_time_zone_is_refused() -> None:
    """Nobody could tell when its days begin."""
    wrong: Any
    for wrong in (datetime(2024, 5, 15), None, "2024-05-15"):
        with pytest.raises(ConfigurationError, match="with a time zone"):
            named_span("yesterday", wrong)


def test_the_ends_of_the_calendar_are_no_error() -> None:
    """Before the year 1 and after the last there is no span."""
    assert told("999 years ago", datetime(900, 1, 1, tzinfo=UTC)) is None
    assert told("yesterday", datetime(1, 1, 1, tzinfo=UTC)) is None
    assert told("this year", datetime(9999, 12, 31, tzinfo=UTC)) is None


moments = st.datetimes(
    datetime(1950, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC) | st.just(ZONE)
)
numbers = st.integers(1, 60)
PAST = [query for query in MEANT if not re.search(r"\bthis\b|20\d\d", query)]  # no year is named


@given(st.sampled_from(PAST), moments)
def test_a_span_of_the_past_has_begun_and_ends_with_today(query: str, now: datetime) -> None:
    """Whenever it is asked: it starts before it ends, has begun, and reaches today at most."""
    found = named_span(query, now)
    tomorrow = datetime.combine(now.date() + timedelta(days=1), now.min.time(), now.tzinfo)

    assert found is not None
    start, end = found
    assert start < end <= max(tomorrow, start + timedelta(days=92))
    assert start <= tomorrow


@given(numbers, st.sampled_from(["day", "week", "month", "year"]), moments)
def test_so_long_ago_was_then(count: int, unit: str, now: datetime) -> None:
    """The moment that many units before is in the span, which is about as long as one."""
    days = {"day": 1, "week": 7, "month": 30.4, "year": 365.25}[unit]
    found = named_span(f"{count} {unit}s ago", now)

    assert found is not None
    start, end = found
    assert start - timedelta(days=2) < now - timedelta(days=count * days) < end + timedelta(days=2)
    assert timedelta(days=days - 1) < end - start < timedelta(days=days + 1)


@given(st.sampled_from(list(MEANT)), st.sampled_from(["What is new {}?", "{}", "Tell me: {}, and"]))
def test_the_words_around_a_cue_do_not_matter(query: str, around: str) -> None:
    """Nor does the case of the sentence's first letter, or white space."""
    spaced = around.format(query.replace(" ", " \n "))

    assert MEANT[query] == told(spaced)


@given(st.text(max_size=60), moments)
def test_any_text_is_taken(query: str, now: datetime) -> None:
    """It means a span or nothing."""
    found = named_span(query, now)

    assert found is None or found[0] < found[1]
