"""As many entries of a section as a budget of tokens takes, best first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from perdure.memory.quotation import section
from perdure.memory.tokens import TokenCounter


class Fitting(NamedTuple):
    """What fits: the numbers of the entries, and the tokens of the section with them."""

    taken: list[int]
    tokens: int


def fitting(
    name: str, entries: Sequence[str], budget: int | None, counter: TokenCounter
) -> Fitting:
    """Which entries fit into a budget; one that is too long leaves room for those after it.

    Args:
        name: Of the section, which counts too.
        entries: Best first.
        budget: Tokens; None: as many as it takes.
        counter: Counts them.
    """
    taken: list[int] = []
    tokens = counter.text(section(name, []))
    for number, entry in enumerate(entries):
        more = counter.text("\n" + entry)
        if budget is None or tokens + more <= budget:
            taken.append(number)
            tokens += more
    whole = 0
    while taken:
        whole = counter.text(section(name, [entries[number] for number in taken]))
        if budget is None or whole <= budget:
            break
        taken.pop()  # the parts of a text may count less than the whole
    return Fitting(taken, whole if taken else 0)
