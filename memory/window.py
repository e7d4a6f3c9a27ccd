"""How much of a conversation fits: the newest turns, or the oldest with the newest.

A turn is in or out as a whole. Of the newest, if it alone is too long, exchanges from its middle
are left out; its human message and its last unit may not be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from langchain_core.messages import BaseMessage

from perdure.memory.conversation import Turn, Unit
from perdure.memory.nodes import Shown

Strategy = Literal["last", "first"]
Measure = Callable[[BaseMessage], int]


def one(message: BaseMessage) -> int:
    """What a message takes, when messages are counted."""
    return 1


@dataclass(frozen=True, slots=True)
class Window:
    """A choice among the turns of a conversation.

    Attributes:
        turns: The turns that fit, newest first.
        needed: The units that may not be left out: the newest human message, and the last unit
            after it.
        over: By how much these and the messages before the turns pass the limit; 0: they fit.
    """

    turns: list[Turn]
    needed: list[Unit]
    over: int


def choose(shown: Shown, limit: int, measure: Measure, strategy: Strategy = "last") -> Window:
    """As much as fits of the newest turns (`"last"`), or of the oldest beside the newest.

    Args:
        shown: What there is.
        limit: What the messages may take together.
        measure: What one takes.
        strategy: Which turns go first.
    """
    left = limit - sum(map(measure, shown.fixed()))
    newest = next(shown.turns, None)
    if newest is None:
        return Window([], [], max(0, -left))
    first, *middle = newest.units
    needed = [first, middle.pop()] if middle else [first]
    left -= _cost(needed, measure)
    if left < 0:
        return Window([Turn(needed, newest.messages)], needed, -left)
    parts = [Turn([unit], ()) for unit in middle]
    if strategy == "last":
        kept, left = _taken(reversed(parts), left, measure)
        older, left = _taken(shown.turns, left, measure)
        kept.reverse()
    else:
        older, left = _taken(reversed([*shown.turns]), left, measure)
        kept, left = _taken(parts, left, measure)
        older.reverse()
    units = [first, *(part.units[0] for part in kept), *needed[1:]]
    return Window([Turn(units, newest.messages), *older], needed, 0)


def _taken(turns: Iterable[Turn], left: int, measure: Measure) -> tuple[list[Turn], int]:
    """The first turns that fit, and what is left then: less than nothing if one did not fit."""
    taken: list[Turn] = []
    for turn in turns if left >= 0 else ():
        left -= _cost(turn.units, measure)
        if left < 0:
            break
        taken.append(turn)
    return taken, left


def _cost(units: list[Unit], measure: Measure) -> int:
    total = 0
    for unit in units:
        if measure is one:
            total += len(unit.messages)
            continue
        for message in unit.messages:
            total += measure(message)
    return total
