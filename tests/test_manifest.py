"""Manifests: ranges behave as the lists and sets of positions they stand for."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.checkpointers.manifest import (
    DICT,
    INLINE,
    ITEM,
    LIST,
    MAP,
    Range,
    Ranges,
    contains,
    count,
    covered,
    cut_blocks,
    ends,
    flat,
    joined,
    missing,
    positions,
    references,
    said,
    unflat,
)

places = st.integers(0, 40)
ranges_ = st.builds(lambda start, length: (start, start + length), places, st.integers(1, 8))
many = st.lists(ranges_, max_size=10)
# in order and apart from each other, as a list that only ever grew and was cut has them
rising = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), max_size=10).map(
    lambda steps: compress(_rising(steps))
)
# more than fit in place: what blocks are cut from
long = st.lists(
    st.builds(
        lambda start, length: (start, start + length), st.integers(0, 2**32), st.integers(1, 2**20)
    ),
    min_size=INLINE + 1,
    max_size=3 * INLINE,
)


def compress(values: list[int]) -> Ranges:
    return joined((value, value + 1) for value in values)


def _rising(steps: list[tuple[int, int]]) -> list[int]:
    out: list[int] = []
    at = 0
    for gap, length in steps:
        out += range(at + gap, at + gap + length)
        at += gap + length
    return out


def listed(ranges: Ranges) -> list[int]:
    return [position for start, stop in ranges for position in range(start, stop)]


def first_of_each(values: list[int]) -> list[int]:
    return list(dict.fromkeys(values))


@given(many)
def test_positions_and_count(ranges: Ranges) -> None:
    """Each position comes in order, repeated as often as it is named, and is counted so."""
    expected = listed(ranges)

    assert expected == list(positions(ranges))
    assert len(expected) == count(ranges)


@given(st.lists(ranges_ | places.map(lambda at: (at, at)), max_size=10))
def test_joined_keeps_every_position_in_order(parts: list[Range]) -> None:
    """Positions are the same; no range is empty and no two neighbours touch."""
    actual = joined(parts)

    assert listed(parts) == listed(actual)
    assert all(start < stop for start, stop in actual)
    assert all(left[1] != right[0] for left, right in pairwise(actual))


@given(many)
def test_covered_is_the_set(ranges: Ranges) -> None:
    """The set's positions are sorted, each once, in ranges that do not touch."""
    actual = covered(ranges)

    assert sorted(set(listed(ranges))) == listed(actual)
    assert all(left[1] < right[0] for left, right in pairwise(actual))


@given(many)
def test_covered_and_joined_change_nothing_twice(ranges: Ranges) -> None:
    """A set stays as it is when it is made a set, or joined, once more."""
    actual = covered(ranges)

    assert actual == covered(actual)
    assert actual == joined(actual)


@given(many, many)
def test_missing_is_the_difference(ranges: Ranges, others: Ranges) -> None:
    """What the set lacks comes in the order, and as often, as it was asked for."""
    have = set(listed(others))
    expected = [position for position in listed(ranges) if position not in have]

    assert expected == listed(missing(ranges, covered(others)))


@given(many, st.integers(-1, 50))
def test_contains_is_membership(ranges: Ranges, position: int) -> None:
    """A position is in the set just when a range of it is around it."""
    assert (position in set(listed(ranges))) == contains(covered(ranges), position)


@given(rising, rising)
def test_said_adds_what_is_new(before: Ranges, now: Ranges) -> None:
    """What was said before leads; what is new follows in order, each position once."""
    expected = first_of_each(listed(before) + listed(now))

    assert expected == listed(said(before, now))


@given(st.lists(st.lists(places, max_size=12).map(compress), max_size=6))
def test_said_is_the_order_of_first_appearance(values: list[Ranges]) -> None:
    """Over any course of values, with any repetition, each position is said once."""
    actual: Ranges = []
    for value in values:
        actual = said(actual, value)

    assert first_of_each([p for value in values for p in listed(value)]) == listed(actual)


@given(many)
def test_flat_and_back(ranges: Ranges) -> None:
    """Ranges are read as they were written."""
    assert ranges == unflat(flat(ranges))


@given(many)
def test_few_ranges_stand_in_place(ranges: Ranges) -> None:
    """Up to the limit nothing is cut."""
    assert ([], ranges) == cut_blocks(ranges)


@given(long)
def test_blocks_and_rest_are_all_of_it(ranges: Ranges) -> None:
    """Blocks and rest, one after the other, are the ranges; no block is empty."""
    blocks, rest = cut_blocks(ranges)

    assert ranges == [part for block in [*blocks, rest] for part in block]
    assert all(blocks)


@given(long, many)
def test_appending_leaves_blocks_as_they_are(ranges: Ranges, more: Ranges) -> None:
    """What is cut once is cut the same when the value grows, so it is stored once."""
    blocks, _ = cut_blocks(ranges)
    longer, _ = cut_blocks([*ranges, *more])

    assert blocks == longer[: len(blocks)]


@pytest.mark.parametrize("new", range(12))
def test_a_change_at_the_front_leaves_later_blocks(new: int) -> None:
    """Where a block ends depends on content, so the cuts fall into step again after a change."""
    # lengths that differ, so that what decides a cut differs from place to place
    ranges = [(i * 7919, i * 7919 + 1 + i % 5) for i in range(20 * INLINE)]
    before, _ = cut_blocks(ranges)
    after, _ = cut_blocks([*((-i, 1 - i) for i in range(2 * new, 0, -2)), *ranges])
    ends = [block[-1] for block in before if block[-1] in {late[-1] for late in after}]
    in_step = [block[-1] for block in before].index(ends[0]) + 1

    assert before[in_step:] == after[len(after) - len(before) + in_step :]
    assert in_step < len(before) // 2


def test_references_within_maps() -> None:
    """Every range a reference points to is found, however deep; values in place point nowhere."""
    ref = [
        MAP,
        {"a": b"x", "b": [ITEM, 7, 3], "c": [MAP, {"d": [LIST, 8, [0, 2]], "e": [DICT, 9, []]}]},
    ]

    assert list(references(ref)) == [(7, [3, 1]), (8, [0, 2]), (9, [])]
    assert list(references(b"in place")) == []


@given(ranges=many, first=st.integers(0, 30), last=st.integers(0, 30))
def test_ends_are_those_of_the_list_of_positions(ranges: Ranges, first: int, last: int) -> None:
    """The first so many and the last so many, none of them twice."""
    every = list(positions(ranges))
    expected = every if first + last >= len(every) else every[:first] + every[len(every) - last :]

    assert expected == list(positions(ends(ranges, first, last)))
