"""Words that stand for a word of a query: its synonyms, and the nearest words for a misspelt one.

The synonyms are a table inside the package, made from the static embedder's by
`benchmarks/kinship.py`: for each English stem its nearest, with the cosine.
"""

from __future__ import annotations

import io
import threading
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from itertools import count
from typing import Final

import numpy as np
from numpy.typing import NDArray

FILE: Final = "kin-en.npz"
_LONG: Final = 6  # letters; from here two slips are forgiven, and one in the first letter
_LEAST: Final = 0.7  # 1 less slips per letter of the longer word


def synonyms(token: str) -> list[tuple[str, float]]:
    """The stems nearest in meaning to a token, nearest first, with similarity 0 to 1.

    >>> [stem for stem, _ in synonyms("buy")[:2]]
    ['purchas', 'bought']
    >>> synonyms("聊天")
    []
    """
    stems, numbers, starts, kin, near = _table()
    number = numbers.get(token)
    if number is None:
        return []
    run = slice(int(starts[number]), int(starts[number + 1]))
    pairs = zip(kin[run].tolist(), near[run].tolist(), strict=True)
    return [(stems[other], share / 255) for other, share in pairs]


@cache
def _table() -> tuple[
    list[str], dict[str, int], NDArray[np.uint32], NDArray[np.uint16], NDArray[np.uint8]
]:
    """Stems, their numbers, and for each a run of others with their nearness in 255ths: 10 ms."""
    raw = (files("perdure.stores") / "weights" / FILE).read_bytes()
    with np.load(io.BytesIO(raw)) as arrays:
        stems = arrays["stems"].tobytes().decode("ascii").split("\n")
        numbers = {stem: number for number, stem in enumerate(stems)}
        return stems, numbers, arrays["starts"], arrays["kin"], arrays["near"]


class Vocabulary(dict[str, int]):
    """Words with their numbers; a word that is looked up and not there gets the next number."""

    def __init__(self, words: Iterable[str] = ()) -> None:
        super().__init__(zip(words, count()))
        self._by_letters: dict[str, list[str]] = defaultdict(list)  # first one, last two
        self._sorted = 0  # how many words are in there
        self._sorting = threading.Lock()

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        return number

    def near(self, word: str) -> list[str]:
        """All words that `nearest` may answer: they begin or end like a word."""
        with self._sorting:
            for other in list(self)[self._sorted :] if self._sorted < len(self) else ():
                self._by_letters[other[:1]].append(other)
                self._by_letters[f"-{other[-2:]}"].append(other)
                self._sorted += 1
            return self._by_letters[word[:1]] + self._by_letters[f"-{word[-2:]}"]


def nearest(word: str, vocabulary: Iterable[str], limit: int = 1) -> list[str]:
    """The words that one may have been meant to be, nearest first, ties by the alphabet.

    One slip is forgiven, from six letters on two; the first letter must be right, or from six
    letters on the last two.

    >>> nearest("mountian", ["paint", "mountain", "fountain"])
    ['mountain']
    """
    size, first, last = len(word), word[:1], word[-2:]
    most = 2 if size >= _LONG else 1
    others = [
        other
        for other in dict.fromkeys(vocabulary)
        if (other[:1] == first or other[-2:] == last) and -most <= len(other) - size <= most
    ]
    found = []
    for other, wrong in zip(others, slips(word, others).tolist(), strict=True):
        shorter, longer = sorted((len(other), size))
        right = 0 < wrong <= (2 if shorter >= _LONG else 1) and 1 - wrong / longer >= _LEAST
        if right and (longer >= _LONG or other[:1] == first):
            found.append((wrong / longer, other))
    return [other for _, other in sorted(found)[:limit]]


def slips(word: str, others: list[str]) -> NDArray[np.int64]:
    """For each of some words: letters inserted, dropped, changed or swapped with the next.

    Source: optimal string alignment distance, Boytsov (2011), "Indexing methods for approximate
    dictionary searching", section 2.2; computed for all words at once.

    >>> slips("receive", ["recieve", "receiver"]).tolist()
    [1, 1]
    """
    sizes = np.array([len(other) for other in others], np.int64)
    width = int(sizes.max(initial=0))
    text = "".join(other.ljust(width, "\0") for other in others)
    letters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    letters = np.ascontiguousarray(letters.reshape(len(others), width).T)  # `[width, words]`
    last = np.repeat(np.arange(width + 1, dtype=np.int8)[:, None], len(others), axis=1)
    before, equal_before = last, np.zeros(letters.shape, bool)
    for i, letter in enumerate(word, 1):
        equal = letters == ord(letter)
        row = np.full_like(last, i)
        row[1:] = np.minimum(last[1:] + 1, last[:-1] + ~equal)
        if i > 1:
            swapped = equal[:-1] & equal_before[1:]
            row[2:] = np.where(swapped, np.minimum(row[2:], before[:-2] + 1), row[2:])
        for j in range(1, width + 1):
            np.minimum(row[j], row[j - 1] + 1, out=row[j])
        before, last, equal_before = last, row, equal
    return last[sizes, np.arange(len(others))].astype(np.int64)
