"""Measure searches of short facts in seven languages, against BM25 with language analyzers.

    python -m benchmarks.languages [--misses]

`data/languages.json` was written for this. It has of each language twenty facts, each with a
question that it alone answers, and ten messages that nothing answers: small talk, tasks, questions
about the world. recall@1 and @3 are the shares of questions whose fact is the first hit, or among
the first three. AUC compares the best scores of questions with those of messages. It is 1 if every
question has a better result than any message, and 0.5 if the scores carry no information. "quiet"
is the share of messages that find nothing. The minimum score is the default of a recall,
`MIN_SCORE`.

BM25 (k1=1.2, b=0.75) uses either Snowball stems without the language's stop words, or pairs of
characters.
"""

from __future__ import annotations

import argparse
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from math import log1p
from pathlib import Path
from typing import Any

import Stemmer  # type: ignore[import-not-found]
from benchmarks.common import table

from perdure.settings import MIN_SCORE
from perdure.stores import SQLiteStore
from perdure.stores.search.text import stop_words

DATA = Path(__file__).parent / "data" / "languages.json"
FACTS = ("facts",)
Found = list[tuple[int, float]]  # facts and their scores, best first


def plain(word: str) -> str:
    """Return a word without accents, as in the list of stop words."""
    apart = unicodedata.normalize("NFKD", word)
    return "".join(letter for letter in apart if not unicodedata.combining(letter))


class BM25:
    """Okapi BM25 over the stems of a language, or over pairs of characters.

    Source: Robertson and Zaragoza (2009), with Lucene's idf.
    """

    def __init__(self, facts: Sequence[str], language: str) -> None:
        own_script = language in ("russian", "arabic", "chinese", "japanese")
        self._stops = stop_words("other" if own_script else language)
        spaced = language not in ("chinese", "japanese")
        self._stem = Stemmer.Stemmer(language).stemWord if spaced else None
        self._counts = [Counter(self._words(fact)) for fact in facts]
        self._found = Counter(word for counts in self._counts for word in counts)
        self._mean = sum(counts.total() for counts in self._counts) / len(facts)

    def _words(self, text: str) -> list[str]:
        words = re.findall(r"\w+", text.lower())
        if self._stem is not None:
            return [self._stem(word) for word in words if plain(word) not in self._stops]
        return [word[i : i + 2] for word in words for i in range(max(len(word) - 1, 1))]

    def search(self, query: str) -> Found:
        scores = [self._score(counts, set(self._words(query))) for counts in self._counts]
        return sorted(
            ((number, score) for number, score in enumerate(scores) if score > 0),
            key=lambda pair: (-pair[1], pair[0]),
        )

    def _score(self, counts: Counter[str], words: set[str]) -> float:
        length = 1.2 * (0.25 + 0.75 * counts.total() / self._mean)
        return sum(
            log1p((len(self._counts) - self._found[word] + 0.5) / (self._found[word] + 0.5))
            * counts[word]
            / (counts[word] + length)
            for word in words
        )


class Ours:
    """perdure's SQLiteStore with its default options."""

    def __init__(self, facts: Sequence[str], **options: Any) -> None:
        self._store = SQLiteStore.open(":memory:")
        for number, fact in enumerate(facts):
            self._store.put(FACTS, str(number), {"text": fact})
        self._options = options

    def search(self, query: str) -> Found:
        hits = self._store.search(FACTS, query=query, limit=20, **self._options)
        return [(int(hit.key), hit.score) for hit in hits]


SUBJECTS: dict[str, Callable[[Sequence[str], str], Any]] = {
    "BM25": BM25,
    "text": lambda facts, _: Ours(facts, mode="text"),
    "perdure": lambda facts, _: Ours(facts),
    "perdure, with the floor": lambda facts, _: Ours(facts, min_score=MIN_SCORE),
}


def measured(subject: Any, data: dict[str, Any], misses: bool) -> list[float]:
    """Return recall@1, recall@3, AUC, and the share of messages that find nothing."""
    answers: list[Found] = [subject.search(question) for _, question in data["facts"]]
    strays: list[Found] = [subject.search(message) for message in data["messages"]]
    places = [
        next((place for place, (fact, _) in enumerate(answer) if fact == number), None)
        for number, answer in enumerate(answers)
    ]
    if misses:
        for (fact, question), place in zip(data["facts"], places, strict=True):
            if place != 0:
                print(f"  {place}: {question} | {fact}")
        for message, stray in zip(data["messages"], strays, strict=True):
            for fact, score in stray[:1]:
                print(f"  {score:.2f}: {message} | {data['facts'][fact][0]}")
    asked, said = ([found[0][1] if found else 0.0 for found in some] for some in (answers, strays))
    shares = (
        [place is not None and place < 1 for place in places],
        [place is not None and place < 3 for place in places],
        [(a > b) + (a == b) / 2 for a, b in product(asked, said)],
        [not stray for stray in strays],
    )
    return [100 * sum(share) / len(share) for share in shares]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--misses", action="store_true", help="print what went wrong")
    args = parser.parse_args()
    languages = json.loads(DATA.read_text("utf-8"))
    rows = []
    for language, data in languages.items():
        facts = [fact for fact, _ in data["facts"]]
        cells = [language]
        for name, make in SUBJECTS.items():
            if args.misses:
                print(language, name)
            figures = measured(make(facts, language.lower()), data, args.misses)
            cells.append(" / ".join(f"{figure:.0f}" for figure in figures))
        rows.append(cells)
    table("recall@1 / recall@3 / AUC / quiet, in percent", ["language", *SUBJECTS], rows)


if __name__ == "__main__":
    main()
