"""Manifests: which ranges of which log make up each channel's value at a checkpoint.

A reference is what a checkpoint stores in a value's place:

    bytes                     a small value, in place
    [1, lane, position]       one item of a log
    [2, lane, ranges]         a list: its elements, in order
    [3, lane, ranges]         a dict: its `[key, value]` pairs, in order
    [4, {key: reference}]     a dict whose few values are references themselves

Ranges are half open and written flat as `[start, length, start, length, ...]`. Past `INLINE` of
them, runs of ranges are cut into blocks at places that depend only on their content, and each block
is stored once, as an item; so a value in a thousand pieces still costs a checkpoint a few bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

Range = tuple[int, int]
Ranges = list[Range]

ITEM, LIST, DICT, MAP = 1, 2, 3, 4
INLINE: Final = 64  # ranges
_BLOCK_MIN, _BLOCK_MAX, _BLOCK_MASK = 16, 256, 63


def joined(parts: Iterable[Range]) -> Ranges:
    """Ranges in order, with neighbours that touch made one.

    >>> joined([(0, 2), (2, 5), (7, 8)])
    [(0, 5), (7, 8)]
    """
    out: Ranges = []
    for start, stop in parts:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        elif start < stop:
            out.append((start, stop))
    return out


def positions(ranges: Ranges) -> Iterator[int]:
    """Each position, in order."""
    for start, stop in ranges:
        yield from range(start, stop)


def count(ranges: Ranges) -> int:
    """How many positions."""
    return sum(stop - start for start, stop in ranges)


def covered(ranges: Iterable[Range]) -> Ranges:
    """The same positions as a set: sorted, without overlap.

    >>> covered([(5, 7), (0, 2), (1, 4)])
    [(0, 4), (5, 7)]
    """
    out: Ranges = []
    for start, stop in sorted(ranges):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out


def missing(ranges: Ranges, have: Ranges) -> Ranges:
    """Those of `ranges` that the set `have` (sorted, without overlap) lacks, in order.

    >>> missing([(0, 10)], [(2, 4), (6, 7)])
    [(0, 2), (4, 6), (7, 10)]
    """
    starts = [start for start, _ in have]
    out: Ranges = []
    for start, stop in ranges:
        at = start
        for i in range(max(0, bisect_right(starts, start) - 1), len(have)):
            lo, hi = have[i]
            if lo >= stop:
                break
            if hi <= at:
                continue
            if lo > at:
                out.append((at, lo))
            at = max(at, hi)
        if at < stop:
            out.append((at, stop))
    return out


def contains(have: Ranges, position: int) -> bool:
    """Whether the set `have` (sorted, without overlap) holds a position."""
    i = bisect_right(have, (position, 1 << 62)) - 1
    return i >= 0 and have[i][0] <= position < have[i][1]


def ends(ranges: Ranges, first: int, last: int) -> Ranges:
    """The first so many positions, and the last so many.

    >>> ends([(0, 4), (9, 12)], 1, 5)
    [(0, 1), (2, 4), (9, 12)]
    >>> ends([(0, 4), (9, 12)], 3, 4)
    [(0, 4), (9, 12)]
    """
    total, passed = count(ranges), 0
    if first + last >= total:
        return ranges
    out: Ranges = []
    for start, stop in ranges:
        out.append((start, min(stop, start + first - passed)))
        out.append((max(start, start + total - last - passed), stop))
        passed += stop - start
    return joined(each for each in out if each[0] < each[1])


def once(ranges: Ranges) -> Ranges:
    """The same positions in order of first appearance, none of them twice.

    >>> once([(0, 3), (1, 5), (0, 1)])
    [(0, 5)]
    """
    have = covered(ranges)
    if count(have) == count(ranges):
        return ranges
    seen: set[int] = set()
    out: Ranges = []
    for start, stop in ranges:
        for position in range(start, stop):
            if position not in seen:
                seen.add(position)
                out.append((position, position + 1))
    return joined(out)


def said(before: Ranges, now: Ranges) -> Ranges:
    """What was said up to here: what was said before, then what is new, in order.

    >>> said([(0, 4)], [(2, 6)])
    [(0, 6)]
    """
    if before == now:
        return now
    if len(before) == len(now) == 1 and before[0][0] <= now[0][0] <= before[0][1] <= now[0][1]:
        return [(before[0][0], now[0][1])]
    return joined([*before, *once(missing(now, covered(before)))])


def cut_blocks(ranges: Ranges) -> tuple[list[Ranges], Ranges]:
    """Ranges as full blocks and the rest. Where a block ends depends on its content alone."""
    if len(ranges) <= INLINE:
        return [], ranges
    blocks: list[Ranges] = []
    first = 0
    for i, (start, stop) in enumerate(ranges):
        size = i - first + 1
        mixed = ((start * 0x9E3779B1) ^ (stop * 0x85EBCA6B)) >> 7
        if (size >= _BLOCK_MIN and mixed & _BLOCK_MASK == 0) or size == _BLOCK_MAX:
            blocks.append(ranges[first : i + 1])
            first = i + 1
    return blocks, ranges[first:]


def flat(ranges: Ranges) -> list[int]:
    """Ranges as they are written."""
    out: list[int] = []
    for start, stop in ranges:
        out += (start, stop - start)
    return out


def unflat(numbers: Sequence[int]) -> Ranges:
    """Ranges as they were written."""
    it = iter(numbers)
    return [(start, start + length) for start, length in zip(it, it, strict=True)]


def references(ref: Any) -> Iterator[tuple[int, Any]]:
    """Each `(lane, written ranges)` a reference points to."""
    if isinstance(ref, bytes):
        return
    kind = ref[0]
    if kind == ITEM:
        yield ref[1], [ref[2], 1]
    elif kind == MAP:
        for inner in ref[1].values():
            yield from references(inner)
    else:
        yield ref[1], ref[2]
