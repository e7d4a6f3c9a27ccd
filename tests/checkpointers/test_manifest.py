"""Manifests: ranges behave as the lists and sets of positions they stand for."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from perdure.checkpointers.manifest import (
    DICT,
    DICT_HERE,
    ITEM,
    LIST,
    LIST_HERE,
    MAP,
    Range,
    Ranges,
    compute_max_range_count,
    count_positions,
    drop_repeated_positions,
    flatten_ranges,
    group_ranges_between_longest,
    iter_log_references,
    iter_positions,
    join_ranges,
    merge_ranges,
    subtract_ranges,
    unflatten_ranges,
)

places = st.integers(0, 40)
ranges_ = st.builds(lambda start, length: (start, start + length), places, st.integers(1, 8))
many = st.lists(ranges_, max_size=10)
# more than a value of so many items may have
scattered = st.lists(
    st.builds(
        lambda start, length: (start, start + length), st.integers(0, 2**32), st.integers(1, 2**10)
    ),
    min_size=50,
    max_size=200,
).map(join_ranges)


def listed(ranges: Ranges) -> list[int]:
    return [position for start, stop in ranges for position in range(start, stop)]


@given(many)
def test_positions_and_count(ranges: Ranges) -> None:
    """Each position comes in order, repeated as often as it is named, and is counted so."""
    expected = listed(ranges)

    assert expected == list(iter_positions(ranges))
    assert len(expected) == count_positions(ranges)


@given(st.lists(ranges_ | places.map(lambda at: (at, at)), max_size=10))
def test_joined_keeps_every_position_in_order(parts: list[Range]) -> None:
    """Positions are the same; no range is empty and no two neighbours touch."""
    actual = join_ranges(parts)

    assert listed(parts) == listed(actual)
    assert all(start < stop for start, stop in actual)
    assert all(left[1] != right[0] for left, right in pairwise(actual))


@given(many)
def test_covered_is_the_set(ranges: Ranges) -> None:
    """The set's positions are sorted, each once, in ranges that do not touch."""
    actual = merge_ranges(ranges)

    assert sorted(set(listed(ranges))) == listed(actual)
    assert all(left[1] < right[0] for left, right in pairwise(actual))


@given(many)
def test_covered_and_joined_change_nothing_twice(ranges: Ranges) -> None:
    """A set stays as it is when it is made a set, or joined, once more."""
    actual = merge_ranges(ranges)

    assert actual == merge_ranges(actual)
    assert actual == join_ranges(actual)


@given(many, many)
def test_missing_is_the_difference(ranges: Ranges, others: Ranges) -> None:
    """What the set lacks comes in the order, and as often, as it was asked for."""
    have = set(listed(others))
    expected = [position for position in listed(ranges) if position not in have]

    assert expected == listed(subtract_ranges(ranges, merge_ranges(others)))


@given(many)
def test_once_is_the_order_of_first_appearance(ranges: Ranges) -> None:
    """Each position is said once, where it first came, in ranges that do not touch."""
    actual = drop_repeated_positions(join_ranges(ranges))

    assert list(dict.fromkeys(listed(ranges))) == listed(actual)
    assert all(left[1] != right[0] for left, right in pairwise(actual))


@given(many)
def test_flat_and_back(ranges: Ranges) -> None:
    """Ranges are read as they were written."""
    assert ranges == unflatten_ranges(flatten_ranges(ranges))


@given(many | scattered)
def test_groups_are_all_of_it(ranges: Ranges) -> None:
    """The groups, one after the other, are the ranges; none is empty."""
    groups = group_ranges_between_longest(ranges)

    assert ranges == [part for group in groups for part in group]
    assert all(groups)


@given(scattered)
def test_regrouping_halves_what_is_too_many(ranges: Ranges) -> None:
    """Once each group is one range, no more than about half of what is allowed are left.

    So it takes as many changes again until the value is grouped anew.
    """
    groups = group_ranges_between_longest(ranges)

    assert len(groups) <= compute_max_range_count(count_positions(ranges)) // 2 + 1


@given(scattered)
def test_regrouping_leaves_the_longest_alone(ranges: Ranges) -> None:
    """What is written anew is shorter than what stays: long runs are not copied for a few items."""
    groups = group_ranges_between_longest(ranges)
    stay = sorted(stop - start for group in groups if len(group) == 1 for start, stop in group)
    anew = [stop - start for group in groups if len(group) > 1 for start, stop in group]

    assert max(anew) <= stay[-(compute_max_range_count(count_positions(ranges)) // 4)]


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_the_limit_grows_with_the_logarithm(n: int, more: int) -> None:
    """Never less for a longer value, and two more for one of twice the length."""
    assert 8 <= compute_max_range_count(n) <= compute_max_range_count(n + more)
    if n:
        assert compute_max_range_count(2 * n) in (
            compute_max_range_count(n) + 2,
            compute_max_range_count(n) + 1,
        )


def test_references_within_maps() -> None:
    """Every range a reference points to is found, however deep; values in place point nowhere."""
    inner = {"d": [LIST, 8, [0, 2]], "e": [DICT, 9, []], "f": [LIST_HERE, [b"x"]]}
    ref = [MAP, {"a": b"x", "b": [ITEM, 7, 3], "c": [MAP, inner]}]

    assert list(iter_log_references(ref)) == [(7, [3, 1]), (8, [0, 2]), (9, [])]
    assert list(iter_log_references(b"in place")) == []
    assert list(iter_log_references([DICT_HERE, [b"x"]])) == []
