"""Correction of typing errors: the nearest words of a vocabulary.

Candidates share trigrams with the word; the edit distance decides. Both are needed: trigrams find
quickly but hold a transposition for a different word, and edit distance alone reads everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

_LOOKED_AT = 1_000  # candidates of which it is asked whether they may be returned
_CANDIDATES = 24  # whose edit distance is computed: 20 µs each
_SHARED = 0.3  # least share of trigrams (Dice); two transposed letters of six keep 0.4
_LONG = 6  # letters; from here two slips are forgiven, and one in the first letter


class Trigrams:
    """An index of words by their trigrams; words are added, never removed.

    A word that no document has any more stays until the index is rebuilt; who searches looks up
    the postings of what is found anyway. Not for several threads at once.
    """

    def __init__(self, words: Iterable[str] = ()) -> None:
        self._words: list[str] = []
        self._known: set[str] = set()
        self._sizes = np.empty(0, np.int64)  # trigrams of each word
        self._grams = np.empty(0, np.int64)  # all trigrams, in order, and the word that each is of
        self._owners = np.empty(0, np.int64)
        self.extend(words)

    def __len__(self) -> int:
        return len(self._words)

    def extend(self, words: Iterable[str]) -> None:
        """Add words; those already known are passed over."""
        new = [word for word in dict.fromkeys(words) if word not in self._known]
        grams, owners = _trigrams(new)
        sizes = np.bincount(owners, minlength=len(new))
        owners += len(self._words)
        self._words += new
        self._known.update(new)
        self._sizes = np.concatenate([self._sizes, sizes])
        every = np.concatenate([self._grams, grams])
        order = np.argsort(every, kind="stable")
        self._grams, self._owners = every[order], np.concatenate([self._owners, owners])[order]

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
        grams, _ = _trigrams([word])
        begins = np.searchsorted(self._grams, grams)
        ends = np.searchsorted(self._grams, grams, side="right")
        spans = zip(begins.tolist(), ends.tolist(), strict=True)
        shared = np.bincount(np.concatenate([self._owners[begin:end] for begin, end in spans]))
        numbers = np.flatnonzero(shared)
        dice = 2 * shared[numbers] / (self._sizes[numbers] + len(grams))
        best = np.argsort(-dice, kind="stable")[:_LOOKED_AT]
        others = (self._words[number] for number in numbers[best][dice[best] >= _SHARED])
        wanted = others if among is None else filter(among, others)
        found = [(other, _similarity(word, other)) for other in islice(wanted, _CANDIDATES)]
        near = [(other, score) for other, score in found if threshold <= score < 1]
        return sorted(near, key=lambda pair: (-pair[1], pair[0]))[:limit]


def _trigrams(words: Sequence[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The distinct trigrams of words whose start and end are marked, and the number of the word.

    >>> len(_trigrams(["cat"])[0]), len(_trigrams(["aaaaaa"])[0])
    (4, 4)
    """
    text = "".join(f"  {word} " for word in words)
    chars = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.int64)
    sizes = np.array([len(word) + 1 for word in words], np.int64)
    owners = np.repeat(np.arange(len(words)), sizes)
    places = np.arange(len(owners)) + 2 * owners  # each word has two characters more than trigrams
    grams = chars[places] << 42 | chars[places + 1] << 21 | chars[places + 2]
    order = np.lexsort((grams, owners))
    grams, owners = grams[order], owners[order]
    again = np.zeros(len(grams), bool)
    again[1:] = (grams[1:] == grams[:-1]) & (owners[1:] == owners[:-1])
    return grams[~again], owners[~again]


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
