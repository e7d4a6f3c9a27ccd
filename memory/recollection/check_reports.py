"""What a check of recall found: measures, and a table of what was missed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from perdure.errors import NotRecalled
from perdure.memory.options import number

_WIDTH: Final = 48  # characters of a question, or of what it is to recall


@dataclass(frozen=True, slots=True)
class Missing:
    """What a question did not recall, and why."""

    expected: str
    reason: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, and what came of it.

    Attributes:
        question: The question.
        expected: What it is to recall: keys or texts.
        ranks: The rank of each, from 1; None: it is not among the recalled.
        any_is_enough: Whether one of them is enough.
        missing: Those that are lacking, with the reasons; none if it recalled what it should.
    """

    question: str
    expected: tuple[str, ...]
    ranks: tuple[int | None, ...]
    any_is_enough: bool = False
    missing: tuple[Missing, ...] = ()

    @property
    def recall(self) -> float:
        """The share of what it is to recall that it did recall, 0 to 1."""
        found = sum(rank is not None for rank in self.ranks)
        return float(found > 0) if self.any_is_enough else found / len(self.ranks)

    @property
    def recalled(self) -> bool:
        """Whether it recalled what it should."""
        return self.recall == 1.0

    @property
    def rank(self) -> int | None:
        """The rank of the first that it recalled."""
        return min((rank for rank in self.ranks if rank is not None), default=None)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What was asked, and what was recalled. As text it is a table.

    Attributes:
        asked: The questions, in order.
        limit: How many memories counted as recalled.
    """

    asked: tuple[Asked, ...]
    limit: int

    @property
    def recall(self) -> float:
        """The mean share of what questions are to recall that is among the first `limit`."""
        return sum(each.recall for each in self.asked) / len(self.asked)

    @property
    def mrr(self) -> float:
        """The mean reciprocal rank of the first that each question is to recall."""
        return sum(1 / each.rank for each in self.asked if each.rank) / len(self.asked)

    @property
    def missed(self) -> list[Asked]:
        """The questions that did not recall all that they should."""
        return [each for each in self.asked if not each.recalled]

    def recall_at(self, k: int) -> float:
        """`recall` if only so many memories counted, `limit` at most."""
        return sum(_cut(each, k).recall for each in self.asked) / len(self.asked)

    def passed(self, minimum: float = 0.9) -> bool:
        """Whether `recall` is at least so much, 0 to 1.

        Raises:
            ConfigurationError: It is no such number.
        """
        return self.recall >= number("minimum", minimum, 0, 1)

    def assert_recalled(self, minimum: float = 0.9) -> None:
        """Fail unless `recall` is at least so much.

        Raises:
            NotRecalled: It is less; the message has the table.
            ConfigurationError: It is no number from 0 to 1.
        """
        if not self.passed(minimum):
            raise NotRecalled(
                f"recall@{self.limit} is {self.recall:.3f}, where {minimum} is asked for; see "
                f"what was missed, and why:\n{self}"
            )

    def __str__(self) -> str:
        rows = [_row(_ranks(each), each.question, _wanted(each)) for each in self.asked]
        reasons = [
            f"  {_short(each.question)} → {_short(missing.expected)}: {missing.reason}"
            for each in self.missed
            for missing in each.missing
        ]
        right = len(self.asked) - len(self.missed)
        total = (
            f"recall@{self.limit} {self.recall:.3f}, MRR {self.mrr:.3f}: "
            f"{right} of {len(self.asked)} questions recall what they should"
        )
        told = ["missed:", *reasons] if reasons else []
        return "\n".join([_row("rank", "question", "expected"), *rows, total, *told])


def _cut(asked: Asked, k: int) -> Asked:
    ranks = tuple(rank if rank is not None and rank <= k else None for rank in asked.ranks)
    return Asked(asked.question, asked.expected, ranks, asked.any_is_enough)


def _ranks(asked: Asked) -> str:
    return ", ".join("-" if rank is None else str(rank) for rank in asked.ranks)


def _wanted(asked: Asked) -> str:
    joint = " or " if asked.any_is_enough else " and "
    return joint.join(asked.expected)


def _row(ranks: str, question: str, expected: str) -> str:
    return f"{ranks:<6}  {_short(question):<{_WIDTH}}  {_short(expected)}".rstrip()


def _short(text: str) -> str:
    """A text on one line, not too long for a table."""
    line = " ".join(text.split())
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…"
