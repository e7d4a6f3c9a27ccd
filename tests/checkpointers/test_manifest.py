"""Ranges of a manifest behave like the lists and sets of positions that they represent."""

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
    compute_max_log_range_count,
    count_positions,
    decode_ranges,
    drop_repeated_positions,
    encode_ranges,
    group_short_log_ranges_for_merging,
    iter_positions,
    iter_referenced_log_keys_and_ranges,
    join_adjacent_ranges,
    merge_ranges,
    subtract_ranges,
)

position_numbers = st.integers(0, 40)
single_ranges = st.builds(
    lambda start, length: (start, start + length), position_numbers, st.integers(1, 8)
)
range_lists = st.lists(single_ranges, max_size=10)
# more ranges than a value with this number of items may have
scattered_ranges = st.lists(
    st.builds(
        lambda start, length: (start, start + length), st.integers(0, 2**32), st.integers(1, 2**10)
    ),
    min_size=50,
    max_size=200,
).map(join_adjacent_ranges)


def list_positions(ranges: Ranges) -> list[int]:
    return [position for start, stop in ranges for position in range(start, stop)]


@given(range_lists)
def test_iter_and_count_positions_include_repeated_positions(ranges: Ranges) -> None:
    """Positions are in order, and a repeated position is counted each time."""
    expected = list_positions(ranges)

    assert expected == list(iter_positions(ranges))
    assert len(expected) == count_positions(ranges)


@given(st.lists(single_ranges | position_numbers.map(lambda at: (at, at)), max_size=10))
def test_join_ranges_keeps_every_position_in_order(parts: list[Range]) -> None:
    """No range is empty, and no range begins where the one before ends."""
    actual = join_adjacent_ranges(parts)

    assert list_positions(parts) == list_positions(actual)
    assert all(start < stop for start, stop in actual)
    assert all(left[1] != right[0] for left, right in pairwise(actual))


@given(range_lists)
def test_merge_ranges_returns_sorted_set_of_positions(ranges: Ranges) -> None:
    """Each position is in one range, and ranges do not touch."""
    actual = merge_ranges(ranges)

    assert sorted(set(list_positions(ranges))) == list_positions(actual)
    assert all(left[1] < right[0] for left, right in pairwise(actual))


@given(range_lists)
def test_merge_and_join_do_not_change_merged_ranges(ranges: Ranges) -> None:
    actual = merge_ranges(ranges)

    assert actual == merge_ranges(actual)
    assert actual == join_adjacent_ranges(actual)


@given(range_lists, range_lists)
def test_subtract_ranges_keeps_order_and_repetitions(ranges: Ranges, others: Ranges) -> None:
    """The positions that remain are those which the other ranges do not contain."""
    subtracted_positions = set(list_positions(others))
    expected = [
        position for position in list_positions(ranges) if position not in subtracted_positions
    ]

    assert expected == list_positions(subtract_ranges(ranges, merge_ranges(others)))


@given(range_lists)
def test_drop_repeated_positions_keeps_first_occurrences_in_order(ranges: Ranges) -> None:
    """No range begins where the one before ends."""
    actual = drop_repeated_positions(join_adjacent_ranges(ranges))

    assert list(dict.fromkeys(list_positions(ranges))) == list_positions(actual)
    assert all(left[1] != right[0] for left, right in pairwise(actual))


@given(range_lists)
def test_unflatten_reverses_flatten(ranges: Ranges) -> None:
    assert ranges == decode_ranges(encode_ranges(ranges))


@given(range_lists | scattered_ranges)
def test_groups_contain_all_ranges_in_order(ranges: Ranges) -> None:
    """No group is empty."""
    groups = group_short_log_ranges_for_merging(ranges)

    assert ranges == [part for group in groups for part in group]
    assert all(groups)


@given(scattered_ranges)
def test_regrouping_leaves_about_half_of_allowed_range_count(ranges: Ranges) -> None:
    """If each group becomes one range, about half of the allowed number of ranges remains.

    The other half is the number of changes until the value is grouped again.
    """
    groups = group_short_log_ranges_for_merging(ranges)

    assert len(groups) <= compute_max_log_range_count(count_positions(ranges)) // 2 + 1


@given(scattered_ranges)
def test_regrouping_does_not_rewrite_longest_ranges(ranges: Ranges) -> None:
    """A range that is rewritten is shorter than those that stay."""
    groups = group_short_log_ranges_for_merging(ranges)
    kept_lengths = sorted(
        stop - start for group in groups if len(group) == 1 for start, stop in group
    )
    rewritten_lengths = [
        stop - start for group in groups if len(group) > 1 for start, stop in group
    ]

    assert (
        max(rewritten_lengths)
        <= kept_lengths[-(compute_max_log_range_count(count_positions(ranges)) // 4)]
    )


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_max_range_count_grows_with_logarithm_of_length(n: int, more: int) -> None:
    """The count never decreases. A value of twice the length may have one or two more ranges."""
    assert 8 <= compute_max_log_range_count(n) <= compute_max_log_range_count(n + more)
    if n:
        assert compute_max_log_range_count(2 * n) in (
            compute_max_log_range_count(n) + 2,
            compute_max_log_range_count(n) + 1,
        )


def test_log_references_are_found_within_nested_maps() -> None:
    """Values that are stored in place have no reference to a log."""
    inner = {"d": [LIST, 8, [0, 2]], "e": [DICT, 9, []], "f": [LIST_HERE, [b"x"]]}
    ref = [MAP, {"a": b"x", "b": [ITEM, 7, 3], "c": [MAP, inner]}]

    assert list(iter_referenced_log_keys_and_ranges(ref)) == [(7, [3, 1]), (8, [0, 2]), (9, [])]
    assert list(iter_referenced_log_keys_and_ranges(b"in place")) == []
    assert list(iter_referenced_log_keys_and_ranges([DICT_HERE, [b"x"]])) == []
