"""Measure which results searches return for messages that no memory answers.

    python -m benchmarks.quiet locomo10.json [--nameless]

The file has conversations of two people each (LoCoMo: data/locomo10.json of
github.com/snap-research/locomo); each turn is an item. Three kinds of messages have no answer:
small talk, tasks that need no memory, and questions about another conversation, with the names of
its speakers replaced by those of this conversation. The minimum score that keeps 97 % of recall@10
is chosen on all other conversations. The table shows the share of each kind's messages that find
anything above this score, the number of items, and how often the best score of an answered question
is higher than that of a message (AUC). `--nameless` removes the names from all questions, because
people say I and you.

perdure's default minimum score, `perdure.settings.MIN_SCORE`, has its own line. InMemoryStore uses
perdure's default embedder. FTS5 uses porter stems and bm25, and its queries contain no stop words.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.recall import NAMESPACE, Conversation, FullText, InMemory, Ours, locomo

from perdure.settings import MIN_SCORE

ITEMS, KEEP, FOREIGN = 10, 0.97, 100
TALK = """
    Thanks!|thank you so much|ok|okay great|Hello|Hi there|Good morning|How are you?|yes please|no
    lol|Sounds good|What?|continue|and then?|why?|Sure, go on|Cool|Perfect|hmm|really?|one more
    sorry|bye|never mind|Can you make that shorter?|try again|wrong|wow|See you tomorrow
"""
TASKS = """
    What is 17 times 23?|Write a Python function that reverses a string
    Translate 'where is the station' into German|How does photosynthesis work?
    What is the capital of Australia?|Convert 30 degrees Celsius to Fahrenheit
    Fix this: TypeError: 'NoneType' object is not iterable|What does HTTP 418 mean?
    Explain quicksort|Write a haiku about autumn|List the planets|What is a mutex?
    How do I delete a branch in git?|Who wrote Hamlet?|What is the boiling point of ethanol?
    Put this into passive voice: the cat ate the fish|Give me names for a startup
    When did the French revolution begin?|How do I boil an egg?|Differentiate x squared
    How do I center a div?|What is the tallest mountain in Africa?|xyzzy plugh
    How does a diesel engine work?|Write a regular expression for an IPv4 address
    What is the plural of octopus?|Explain the rules of chess|Sort 5, 3, 9, 1
    What is the difference between TCP and UDP?|Summarise the plot of Macbeth
"""


@dataclass(frozen=True)
class Asked:
    """A message, the scores of its search results, and which of the results answer it."""

    kind: str
    scores: np.ndarray
    answers: np.ndarray  # the share of the evidence that each is


def messages(text: str) -> list[str]:
    return re.split(r"\s*[|\n]\s*", text.strip())


class Scored:
    """Runs the searches of `recall.py` and also returns the scores."""

    def __init__(self, subject: Any) -> None:
        self.add, self._subject = subject.add, subject

    def search(self, query: str) -> list[tuple[int, float]]:
        subject = self._subject
        if isinstance(subject, FullText):
            return subject.scored(query, ITEMS)
        found = subject._store.search(NAMESPACE, query=query, limit=ITEMS)
        return [(int(item.key), item.score) for item in found]


SUBJECTS: dict[str, Callable[[Path], Any]] = {
    "perdure": Ours,
    "InMemoryStore": InMemory,
    "FTS5": FullText,
}


def names(conversation: Conversation) -> list[str]:
    return sorted({str(turn.provenance.actor) for turn in conversation.turns})


def asked(
    make: Callable[[Path], Any], data: Sequence[Conversation], number: int, nameless: bool
) -> Iterator[Asked]:
    """Yield all messages of a conversation, each with its search results."""
    own = names(data[number])
    name = re.compile(rf"\b({'|'.join(own)})('s)?\b")

    def shown(text: str) -> str:
        return " ".join(name.sub(" ", text).split()) if nameless else text

    foreign = []
    for other in data[:number] + data[number + 1 :]:
        for question in other.questions:
            text = question.text
            for theirs, ours in zip(names(other), own, strict=False):
                text = re.sub(rf"\b{theirs}\b", ours, text)
            foreign.append(text)
    kinds = {
        "talk": messages(TALK),
        "tasks": messages(TASKS),
        "foreign": random.Random(number).sample(foreign, min(FOREIGN, len(foreign))),
    }
    turns = data[number].turns
    with tempfile.TemporaryDirectory() as folder:
        subject = Scored(make(Path(folder) / "quiet.db"))
        for row, turn in enumerate(turns):
            subject.add(row, turn)
        for question in data[number].questions:
            found = subject.search(shown(question.text))
            right = [turns[row].unit in question.evidence for row, _ in found]
            share = np.array(right, float) / len(question.evidence)
            yield Asked("own", np.array([score for _, score in found]), share)
        for kind, texts in kinds.items():
            for text in texts:
                found = subject.search(shown(text))
                yield Asked(kind, np.array([s for _, s in found]), np.zeros(len(found)))


def recall(questions: Sequence[Asked], floor: float) -> float:
    return float(np.mean([asked.answers[asked.scores >= floor].sum() for asked in questions]))


def floor_of(questions: Sequence[Asked]) -> float:
    """Return the highest minimum score that keeps the fraction `KEEP` of the recall."""
    floors = np.unique(np.concatenate([asked.scores for asked in questions]))
    least = KEEP * recall(questions, -np.inf)
    low, high = 0, len(floors) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if recall(questions, floors[middle]) >= least else (low, middle - 1)
        )
    return float(floors[low])


def show(name: str, every: Sequence[Sequence[Asked]], floors: Sequence[float]) -> None:
    """Print a line of the table."""
    own = [[asked for asked in some if asked.kind == "own"] for some in every]
    full = np.mean([recall(some, -np.inf) for some in own])
    kept = np.mean([recall(some, floor) for some, floor in zip(own, floors, strict=True)])
    cells = [f"{100 * full:9.1f}", f"{100 * kept / full:7.1f}"]
    best = [a.scores.max() for some in own for a in some if a.answers.any()]
    for kind in ("talk", "tasks", "foreign"):
        pairs = [
            (a, f) for some, f in zip(every, floors, strict=True) for a in some if a.kind == kind
        ]
        counts = [int((asked.scores >= floor).sum()) for asked, floor in pairs]
        tops = np.array([asked.scores.max(initial=0) for asked, _ in pairs])
        auc = np.mean([(top > tops).mean() + (top == tops).mean() / 2 for top in best])
        cells.append(
            f"{100 * np.mean([c > 0 for c in counts]):6.0f} ({np.mean(counts):.1f}) {auc:.3f}"
        )
    print(f"{name:26}" + " ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--nameless", action="store_true")
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    args = parser.parse_args()
    data = list(locomo(args.data, ()))
    print(f"{'':26}recall@10  kept %  small talk, % (items) AUC  tasks  questions about others")
    for name in args.only:
        every = [list(asked(SUBJECTS[name], data, n, args.nameless)) for n in range(len(data))]
        floors = [
            floor_of([a for some in every[:n] + every[n + 1 :] for a in some if a.kind == "own"])
            for n in range(len(data))
        ]
        show(name, every, floors)
        if name == "perdure":
            show(f"perdure at {MIN_SCORE}", every, [MIN_SCORE] * len(data))


if __name__ == "__main__":
    main()
