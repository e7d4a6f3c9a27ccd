"""How much of a conversation fits: the newest turns, or the oldest with the newest.

A turn is in or out as a whole; only of the newest, if it alone is too long, are there parts: its
human message, and what the model goes on from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
        turns: What is chosen, newest first.
        needed: What of it may not be left out: the newest human message, and the exchange that the
            model is about to go on from.
        over: By how much what stands before the turns and that pass the limit; zero or less: it
            fits.
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
        return Window([], [], -left)
    units = newest.units
    needed = units[:1] if len(units) == 1 else [units[0], units[-1]]
    left -= _cost(needed, measure)
    if left < 0:
        return Window([Turn(needed, newest.messages)], needed, -left)
    if strategy == "first":
        return Window(_first(newest, list(shown.turns), needed, left, measure), needed, -left)
    return Window(_last(newest, shown.turns, needed, left, measure), needed, -left)


def _last(
    newest: Turn, older: Iterator[Turn], needed: list[Unit], left: int, measure: Measure
) -> list[Turn]:
    kept: list[Unit] = []
    for unit in reversed(newest.units[1:-1]):
        left -= _cost([unit], measure)
        if left < 0:
            return [Turn([needed[0], *reversed(kept), *needed[1:]], newest.messages)]
        kept.append(unit)
    taken = [newest]
    for turn in older:
        left -= _cost(turn.units, measure)
        if left < 0:
            break
        taken.append(turn)
    return taken


def _first(
    newest: Turn, older: list[Turn], needed: list[Unit], left: int, measure: Measure
) -> list[Turn]:
    taken: list[Turn] = []
    for turn in reversed(older):
        left -= _cost(turn.units, measure)
        if left < 0:
            return [Turn(needed, newest.messages), *reversed(taken)]
        taken.append(turn)
    units = [needed[0]]
    for unit in newest.units[1:-1]:
        left -= _cost([unit], measure)
        if left < 0:
            break
        units.append(unit)
    return [Turn([*units, *needed[1:]], newest.messages), *reversed(taken)]


def _cost(units: list[Unit], measure: Measure) -> int:
    total = 0
    if measure is one:
        for unit in units:
            total += len(unit.messages)
        return total
    for unit in units:
        for message in unit.messages:
            total += measure(message)
    return total
