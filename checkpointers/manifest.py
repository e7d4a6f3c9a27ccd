"""Build, combine and read manifests.

A manifest is the list of log position ranges that make up the value of a channel. A checkpoint or a
pending write stores a reference in place of each value:

    bytes                     the encoded value itself
    [1, log, position]        one item of a log
    [2, log, ranges]          a list; the ranges contain its elements in order
    [3, log, ranges]          a dict; the ranges contain its `[key, value]` pairs in order
    [4, {key: reference}]     a dict whose values are references
    [5, [element, ...]]       a list with inline elements, each as bytes or as [log, start, length]
    [6, [element, ...]]       a dict with inline `[key, value]` pairs, in the same forms
    [7, reference]            a snapshot of a `DeltaChannel`, with a reference to its value
    [-1, reference]           the value of a `DeltaChannel` of messages, without a snapshot
    [-1, kind]                a `DeltaChannel` with an unknown value, which is a LIST or a DICT

Ranges are half open, and are stored as a flat list `[start, length, start, length, ...]`. A value
of n items is stored with at most `compute_max_log_range_count(n)` ranges. An alias is a log entry
that refers to an earlier item of the same log by its position. If a value has more ranges than this
maximum, perdure appends new aliases for the items in several consecutive short ranges. The new
aliases have consecutive log positions. The reference to the value then contains one range of new
aliases instead of several short ranges (see `group_short_log_ranges_for_merging`). In each log, the
positions of aliases start at `ALIASES`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import log2
from typing import Any, Final

# Encoded form of a value or of part of a value; see the module docstring for all forms.
ValueReference = Any
# A half-open range of log positions: the first position, and the position after the last one.
Range = tuple[int, int]
Ranges = list[Range]

ITEM, LIST, DICT, MAP, LIST_HERE, DICT_HERE, SNAPSHOT = 1, 2, 3, 4, 5, 6, 7
# `DELTA` is negative, so `ref[0] == DELTA` is always False if `ref` is a bytes object. The elements
# of a bytes object are never negative.
DELTA: Final = -1
ALIASES: Final = 1 << 31  # The lowest log position of aliases.
# Maximum number of log ranges for a value with at most one item. The maximum grows with the number
# of items in the value; see `compute_max_log_range_count`.
MIN_RANGE_LIMIT: Final = 8


def compute_max_log_range_count(item_count: int) -> int:
    """Return the maximum number of log ranges allowed for a value with n items: 8 + 2 log2(n).

    >>> [compute_max_log_range_count(item_count) for item_count in (1, 40, 1000)]
    [8, 18, 27]
    """
    return MIN_RANGE_LIMIT + int(2 * log2(item_count)) if item_count > 1 else MIN_RANGE_LIMIT


def group_short_log_ranges_for_merging(ranges: Ranges) -> list[Ranges]:
    """Divide log ranges into groups, and put each of the longest ranges into its own group.

    The caller reduces the number of ranges by appending aliases to the log. An alias is a log entry
    that refers to an earlier item of the same log. If a group contains at least two ranges, the
    caller appends one alias for each log position in these ranges. Each alias refers to the item at
    the corresponding log position. The aliases have consecutive log positions, so a single range of
    aliases can replace all ranges of the group. The longest ranges are not replaced, because the
    caller would have to write a new alias for every item in a long range. The function leaves the N
    longest ranges unchanged. N is a quarter of the maximum number of log ranges that a value may
    have. For example, if a value may have at most 8 log ranges, its 2 longest ranges (a quarter of
    8) are not replaced with aliases. The N longest ranges, which are left unchanged, are called
    long log ranges. All other ranges count as short log ranges. Consecutive short log ranges form
    one group. Two short log ranges are placed in different groups if a long log range lies between
    them. Log-structured merge trees also rarely rewrite their largest components, to limit write
    amplification (O'Neil et al., 1996).

    >>> group_short_log_ranges_for_merging([(0, 3), (4, 5), (6, 7), (12, 13), (8, 11)])
    [[(0, 3)], [(4, 5)], [(6, 7), (12, 13)], [(8, 11)]]
    """
    kept_count = compute_max_log_range_count(count_positions(ranges)) // 4
    longest = set(
        sorted(range(len(ranges)), key=lambda i: ranges[i][0] - ranges[i][1])[:kept_count]
    )
    groups: list[Ranges] = []
    for i, part in enumerate(ranges):
        if i in longest or i - 1 in longest or not groups:
            groups.append([part])
        else:
            groups[-1].append(part)
    return groups


def join_adjacent_ranges(ranges: Iterable[Range]) -> Ranges:
    """Join consecutive ranges that have no gap between them, and drop empty ranges. Keep the order.

    >>> join_adjacent_ranges([(0, 2), (2, 5), (7, 8)])
    [(0, 5), (7, 8)]
    """
    result: Ranges = []
    for start, stop in ranges:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        elif start < stop:
            result.append((start, stop))
    return result


def iter_positions(ranges: Ranges) -> Iterator[int]:
    """Yield the log positions in the ranges, in order."""
    for start, stop in ranges:
        yield from range(start, stop)


def count_positions(ranges: Ranges) -> int:
    """Return the total number of positions that the ranges cover."""
    return sum(stop - start for start, stop in ranges)


def merge_ranges(ranges: Iterable[Range]) -> Ranges:
    """Return sorted, non-overlapping ranges that cover the same positions as `ranges`.

    >>> merge_ranges([(5, 7), (0, 2), (1, 4)])
    [(0, 4), (5, 7)]
    """
    merged: Ranges = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def subtract_ranges(ranges: Ranges, excluded: Ranges) -> Ranges:
    """Return the parts of `ranges` that `excluded` does not cover, in order.

    The ranges in `excluded` must be sorted and must not overlap, like those returned by
    `merge_ranges`.

    >>> subtract_ranges([(0, 10)], [(2, 4), (6, 7)])
    [(0, 2), (4, 6), (7, 10)]
    """
    starts = [start for start, _ in excluded]
    remaining: Ranges = []
    for start, stop in ranges:
        position = start
        for i in range(max(0, bisect_right(starts, start) - 1), len(excluded)):
            excluded_start, excluded_stop = excluded[i]
            if excluded_start >= stop:
                break
            if excluded_stop <= position:
                continue
            if excluded_start > position:
                remaining.append((position, excluded_start))
            position = max(position, excluded_stop)
        if position < stop:
            remaining.append((position, stop))
    return remaining


def drop_repeated_positions(
    ranges: Ranges, find_original_position: Callable[[int], int] | None = None
) -> Ranges:
    """Drop repeated items from log ranges, keeping the first occurrence of each item.

    Args:
        ranges: The ranges, which may contain an item several times.
        find_original_position: Returns the original position of an alias, and any other position
            unchanged. None means that the ranges contain no aliases.

    >>> drop_repeated_positions([(0, 3), (1, 5), (0, 1)])
    [(0, 5)]
    >>> drop_repeated_positions([(0, 3), (7, 9)], lambda position: position % 7)
    [(0, 3)]
    """
    if find_original_position is None and (
        len(ranges) < 2 or count_positions(merge_ranges(ranges)) == count_positions(ranges)
    ):
        return ranges
    seen: set[int] = set()
    unique: Ranges = []
    for position in iter_positions(ranges):
        original = position if find_original_position is None else find_original_position(position)
        if original not in seen:
            seen.add(original)
            unique.append((position, position + 1))
    return join_adjacent_ranges(unique)


def encode_ranges(ranges: Ranges) -> list[int]:
    """Flatten ranges to their stored form, `[start, length, start, length, ...]`."""
    numbers: list[int] = []
    for start, stop in ranges:
        numbers += (start, stop - start)
    return numbers


def decode_ranges(numbers: Sequence[int]) -> Ranges:
    """Convert a flat list `[start, length, ...]` to a list of `(start, stop)` ranges."""
    iterator = iter(numbers)
    return [(start, start + length) for start, length in zip(iterator, iterator, strict=True)]


def extract_value_reference_from_delta_channel_reference(ref: ValueReference) -> ValueReference:
    """Return the reference to a channel's value, without the wrapper that a `DeltaChannel` adds.

    For a `DeltaChannel` snapshot, the reference that is stored in the snapshot is returned. For a
    `DeltaChannel` with an unknown value, the result is None. A reference that does not belong to a
    `DeltaChannel` is returned unchanged.
    """
    if isinstance(ref, list) and ref[0] in (SNAPSHOT, DELTA):
        return None if isinstance(ref[1], int) else ref[1]
    return ref


def iter_referenced_log_keys_and_ranges(value_ref: Any) -> Iterator[tuple[int, list[int]]]:
    """Yield `(log_key, flat_ranges)` for each part of a value reference that points to a log.

    `flat_ranges` contains log ranges as one flat list of numbers, `[start, length, start, length,
    ...]`.
    """
    value_ref = extract_value_reference_from_delta_channel_reference(value_ref)
    if value_ref is None or isinstance(value_ref, bytes):
        return
    kind = value_ref[0]
    if kind == ITEM:
        yield value_ref[1], [value_ref[2], 1]
    elif kind == MAP:
        for inner_ref in value_ref[1].values():
            yield from iter_referenced_log_keys_and_ranges(inner_ref)
    elif kind in (LIST, DICT):
        yield value_ref[1], value_ref[2]
    else:
        for element in value_ref[1]:
            if not isinstance(element, bytes):
                yield element[0], element[1:]
