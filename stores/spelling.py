"""The nearest words of a vocabulary, for a query's word that no document has.

Candidates share trigrams with the word; the edit distance decides. Both are needed: trigrams find
quickly but hold a transposition for a different word, and edit distance alone reads everything.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from itertools import islice

import numpy as np

_LOOKED_AT = 1_000  # candidates of which it is asked whether they may be returned
_CANDIDATES = 24  # whose edit distance is computed: 20 µs each
_SHARED = 0.3  # least share of trigrams (Dice); two transposed letters of six keep 0.4
_LONG = 6  # letters; from here two slips are forgiven, and one in the first letter


class Trigrams:
    """An index of words by their trigrams; words are added, never removed.

    A word that no document has any more stays until the index is rebuilt; who searches looks up
    the postings of what is found anyway. Not for several threads at once.

    Args:
        words: The first words.
    """

    def __init__(self, words: Iterable[str] = ()) -> None:
        self._words: list[str] = []
        self._known: set[str] = set()
        self._sizes = array("H")  # trigrams of each word
        self._postings: dict[str, array[int]] = {}
        self.extend(words)

    def __len__(self) -> int:
        return len(self._words)

    def extend(self, words: Iterable[str]) -> None:
        """Add words; those already known are passed over."""
        for word in words:
            if word in self._known:
                continue
            grams = trigrams(word)
            number = len(self._words)
            self._known.add(word)
            self._words.append(word)
            self._sizes.append(min(len(grams), 0xFFFF))
            for gram in grams:
                self._postings.setdefault(gram, array("I")).append(number)

    def similar(
        self,
        word: str,
        *,
        limit: int = 3,
        threshold: float = 0.7,
        among: Callable[[str], bool] | None = None,
    ) -> list[tuple[str, float]]:
        """The words nearest to `word`, nearest first, with their similarity.

        Args:
            word: A token that is not in the vocabulary; itself it is never returned.
            limit: How many at most.
            threshold: Least similarity: 1 less slips per letter of the longer word, 0 to 1. One
                slip is forgiven, from six letters on two; the first letter counts in short words.
            among: Which words may be returned; None: all.
        """
        grams = trigrams(word)
        postings = [self._postings[gram] for gram in grams if gram in self._postings]
        if not postings:
            return []
        shared = np.bincount(np.concatenate([np.array(each) for each in postings]))
        numbers = np.flatnonzero(shared)
        sizes = np.array(self._sizes, np.float32)[numbers]
        dice = 2 * shared[numbers] / (sizes + len(grams))
        best = np.argsort(-dice, kind="stable")[:_LOOKED_AT]
        others = (self._words[number] for number in numbers[best][dice[best] >= _SHARED])
        wanted = others if among is None else filter(among, others)
        found = [(other, _similarity(word, other)) for other in islice(wanted, _CANDIDATES)]
        near = [(other, score) for other, score in found if threshold <= score < 1]
        return sorted(near, key=lambda pair: (-pair[1], pair[0]))[:limit]


def trigrams(word: str) -> frozenset[str]:
    """The trigrams of a word with its start and end marked.

    >>> sorted(trigrams("cat"))
    ['  c', ' ca', 'at ', 'cat']
    """
    padded = f"  {word} "
    return frozenset(padded[i : i + 3] for i in range(len(padded) - 2))


def slips(one: str, other: str, most: int = 2) -> int:
    """Letters inserted, dropped, changed or swapped with the next; `most` + 1 if more.

    Source: optimal string alignment distance, Boytsov (2011), "Indexing methods for approximate
    dictionary searching", section 2.2.

    >>> slips("receive", "recieve"), slips("cat", "dog")
    (1, 3)
    """
    if abs(len(one) - len(other)) > most:
        return most + 1
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and b == one[i - 2]:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        if min(row) > most:
            return most + 1
        before, last = last, row
    return min(last[-1], most + 1)


def _similarity(word: str, other: str) -> float:
    """1 less slips per letter; 0 where the slips are more than a word of this length forgives."""
    longest = max(len(word), len(other))
    forgiven = 2 if min(len(word), len(other)) >= _LONG else 1
    counted = slips(word, other, forgiven)
    if counted > forgiven or (longest < _LONG and word[:1] != other[:1]):
        return 0.0
    return 1.0 - counted / longest
