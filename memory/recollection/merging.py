"""Several rankings as one, in which nothing is said twice.

Scores of two searches cannot be compared, so what counts is the rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final, NamedTuple
from unicodedata import normalize

from perdure.memory.records import TURN, Memory
from perdure.memory.sameness import same

_K: Final = 60  # as in the paper: how little the first ranks stand out
_NO_SIGNS: Final = {code: None for code in range(128) if not chr(code).isalnum()}
_EARLIEST: Final = datetime.min.replace(tzinfo=UTC)


class Hit(NamedTuple):
    """A memory in one ranking.

    Attributes:
        rank: Its place, from 1.
        memory: The memory.
        waiting: Whether it is not yet formed.
    """

    rank: int
    memory: Memory
    waiting: bool = False


@dataclass(frozen=True, slots=True)
class Standing:
    """How a memory came to where it stands among the recalled.

    Attributes:
        memory: The memory; `parts` of it says what its score is the sum of.
        ranks: Its place in each search that found it, or one that says the same, from 1.
        merged: What these are worth together; by this the memories are sorted.
        waiting: Whether it is not yet formed, but still in its thread.
        stands_for: The keys of those that are left out because it says the same.
    """

    memory: Memory
    ranks: tuple[int, ...]
    merged: float
    waiting: bool = False
    stands_for: tuple[str, ...] = ()

    def __str__(self) -> str:
        ranks = " and ".join(map(str, self.ranks))
        parts = ", ".join(f"{name} {part:.2f}" for name, part in (self.memory.parts or {}).items())
        told = [
            f"{self.memory.key}: rank {ranks} of its search",
            f"its score the sum of {parts}" if parts else "",
            "not yet formed" if self.waiting else "",
            f"stands for {', '.join(self.stands_for)}" if self.stands_for else "",
        ]
        return "; ".join(part for part in told if part)


def merged(rankings: Sequence[Sequence[Hit]], limit: int) -> list[Standing]:
    """Rankings as one, best first; of those that say the same the best; ties by age, newest first.

    The order of a single ranking stays as it is. A text that several searches found is worth the
    sum of what it is worth in each.

    Source: reciprocal rank fusion, Cormack, Clarke and Buettcher, "Reciprocal Rank Fusion
    Outperforms Condorcet and Individual Rank Learning Methods" (SIGIR 2009).
    """
    if len(rankings) == 1:
        return _unrepeated((_Group({0: hit.rank}, [hit]).standing() for hit in rankings[0]), limit)
    groups: list[_Group] = []
    texts = _Texts()
    for number, ranking in enumerate(rankings):
        for hit in ranking:
            place = texts.place_of(hit.memory.text)
            if place is None:
                place = texts.add(hit.memory.text)
                groups.append(_Group())
            groups[place].add(number, hit)
    standings = [group.standing() for group in groups]
    standings.sort(key=lambda each: said_at(each.memory), reverse=True)
    standings.sort(key=lambda each: each.merged, reverse=True)
    return _unrepeated(standings, limit)


def _unrepeated(standings: Iterable[Standing], limit: int) -> list[Standing]:
    """The best so many that do not say what a better one says.

    Those that say the same go, and the turn from which, and from nothing else, a better memory was
    made: that says what the query asks for in fewer words, and its provenance names the message. A
    turn that is better than its facts says more than they do: then they stay too.
    """
    kept: list[Standing] = []
    texts = _Texts()
    made: dict[tuple[str | None, tuple[str, ...]], int] = {}
    for each in standings:
        source, number = _source(each.memory), texts.place_of(each.memory.text)
        if number is None and source is not None and each.memory.kind == TURN:
            number = made.get(source)
        if number is not None:
            stands_for = (*kept[number].stands_for, each.memory.key, *each.stands_for)
            kept[number] = replace(kept[number], stands_for=stands_for)
            continue
        if len(kept) == limit:
            break
        texts.add(each.memory.text)
        if source is not None and each.memory.kind != TURN:
            made.setdefault(source, len(kept))
        kept.append(each)
    return kept


def _source(memory: Memory) -> tuple[str | None, tuple[str, ...]] | None:
    """The messages that a memory rests on."""
    source = memory.provenance
    return (source.thread_id, source.message_ids) if source and source.message_ids else None


class _Texts:
    """Texts of which no two are the same, numbered from 0."""

    def __init__(self) -> None:
        self._known: dict[str, list[tuple[int, str]]] = {}
        self._count = 0

    def place_of(self, text: str) -> int | None:
        """The number of the one that is the same."""
        for number, other in self._known.get(_letters(text), ()):
            if same(text, other):
                return number
        return None

    def add(self, text: str) -> int:
        """Number a text."""
        self._known.setdefault(_letters(text), []).append((self._count, text))
        self._count += 1
        return self._count - 1


def _letters(text: str) -> str:
    """The letters and digits of a text: what those that are the same have in common.

    It takes 1 µs, where the form in which they are compared takes 40.
    """
    if text.isascii():
        return text.lower().translate(_NO_SIGNS)
    return "".join(filter(str.isalnum, normalize("NFKC", text).casefold()))


@dataclass(slots=True)
class _Group:
    """Memories that say the same."""

    ranks: dict[int, int] = field(default_factory=dict)  # by the number of the ranking
    hits: list[Hit] = field(default_factory=list)

    def add(self, number: int, hit: Hit) -> None:
        self.hits.append(hit)
        self.ranks.setdefault(number, hit.rank)  # the first is the best

    def standing(self) -> Standing:
        # of equal rank, that which is formed, for it has a key under which it can be got
        best = min(self.hits, key=lambda hit: (hit.rank, hit.waiting))
        others = dict.fromkeys(hit.memory.key for hit in self.hits if hit is not best)
        return Standing(
            best.memory,
            tuple(self.ranks.values()),
            sum(1 / (_K + rank) for rank in self.ranks.values()),
            best.waiting,
            tuple(key for key in others if key != best.memory.key),
        )


def said_at(memory: Memory) -> datetime:
    """When a memory was said, or put."""
    source = memory.provenance
    return (source.at if source is not None else None) or memory.valid_from or _EARLIEST
