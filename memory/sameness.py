"""Sameness: whether two texts say the same, and whether a memory says what a candidate says.

Texts say the same if their normal forms are equal, or if they have the same words in the same
order except for words whose vectors are near. The vectors of opposites are near as well, so the
threshold is high. It is measured on pairs of texts: `benchmarks/paraphrases.py`,
docs/decisions/0017-what-is-the-same.md.
"""

from __future__ import annotations

import re
from datetime import datetime
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from perdure.memory.effects import Effects
from perdure.memory.normal_form import normal, unified
from perdure.memory.records import EPISODE, TURN, Memory, Previous
from perdure.memory.store_adapter import StoreAdapter
from perdure.stores.base import Namespace
from perdure.stores.text import tokens

EVENTS: Final = (TURN, EPISODE)
"""Kinds that record what happened: the same text again is another event."""
NEAR: Final = 0.8
"""The least cosine of two words that may stand for each other."""

_PARTS: Final = re.compile(r"\w+|[^\w\s.,;:!\"()]")
_FEWEST_MOVED: Final = 4  # words of a text of which some may be moved
_NEAREST: Final = 16  # memories that a candidate is compared with


def same(a: str, b: str) -> bool:
    """Whether two texts are equal but for capitals, punctuation, spaces and forms of letters.

    A question is not the same as its statement, nor is an A- an A.

    >>> same("Ann likes tea.", "  ann LIKES tea"), same("Ann has 2 cats", "Ann has 3 cats")
    (True, False)
    """
    return _normal(a) == _normal(b)


def digest(text: str) -> str:
    """BLAKE2b-128, in hexadecimal, of a text in its normal form."""
    plain = normal(text).encode("utf-8", "surrogatepass")
    return blake2b(plain, digest_size=16).hexdigest()


def equivalent(a: str, b: str) -> bool:
    """Whether two texts are the same, or have the same words but for near ones, or moved ones.

    Numbers, names and signs have to be equal. Words at the start of one may stand at the end of
    the other.

    >>> equivalent("Tom bought a house", "Tom purchased a house"), equivalent("at 9", "at 10")
    (True, False)
    """
    if same(a, b):
        return True
    first, second = _words(a), _words(b)
    return len(first) == len(second) and (_are_near(first, second) or _is_moved(first, second))


def _are_near(a: tuple[str, ...], b: tuple[str, ...]) -> bool:
    differ = [pair for pair in zip(a, b, strict=True) if pair[0] != pair[1]]
    if not all(word.isalpha() and word.islower() for pair in differ for word in pair):
        return False
    # words of one stem differ in tense or number
    return bool(differ) and all(tokens(x) != tokens(y) and _cosine(x, y) >= NEAR for x, y in differ)


def _is_moved(a: tuple[str, ...], b: tuple[str, ...]) -> bool:
    first, second = ([word.lower() for word in words] for words in (a, b))
    if len(first) < _FEWEST_MOVED or sorted(first) != sorted(second):
        return False
    return any(first[i:] + first[:i] == second for i in range(1, len(first)))


@lru_cache(1 << 8)
def _words(text: str) -> tuple[str, ...]:
    """The words and signs of a text; the first word is no name because of its capital."""
    found = _PARTS.findall(unified(text))
    return (found[0].lower(), *found[1:]) if found else ()


_normal: Final = lru_cache(1 << 8)(normal)


@lru_cache(1 << 12)
def _cosine(a: str, b: str) -> float:
    # here, since it loads numpy, which most comparisons can do without
    from perdure.stores.offline import StaticEmbedder

    first, second = StaticEmbedder().embed([a, b])
    return float(first @ second)


class Known:
    """The memories of a namespace that candidates are compared with, events left out.

    A store that ranks is asked for the nearest ones. Another is listed, once for all candidates.
    """

    def __init__(self, adapter: StoreAdapter, namespace: Namespace) -> None:
        self._adapter, self._namespace = adapter, namespace
        self._listed: list[Memory] | None = None
        self._asked: tuple[str, list[Memory]] = "", []

    def stating(self, text: str, key: str | None) -> Effects[Memory | None]:
        """The memory that says the same as a candidate; that of its key may be put otherwise."""
        found = yield from self._nearest(text)
        for memory in found:
            if same(memory.text, text):
                return memory
        for memory in found:
            if memory.key != key and equivalent(memory.text, text):
                return memory
        return None

    def outdated(self, text: str, at: datetime | None) -> Effects[Previous | None]:
        """The previous text of a memory that says the same, and held when this was said."""
        for memory in (yield from self._nearest(text)):
            for previous in memory.previous:
                if (at is None or at < previous.until) and equivalent(previous.text, text):
                    return previous
        return None

    def _nearest(self, text: str) -> Effects[list[Memory]]:
        if self._listed is not None:
            return self._listed
        if self._asked[0] == text:
            return self._asked[1]
        found = yield from self._adapter.found(
            self._namespace, query=text, limit=_NEAREST, context=False
        )
        if found and found[0].score is None:
            found = yield from self._adapter.every(self._namespace)
            self._listed = self._facts(found)
            return self._listed
        self._asked = text, self._facts(found)
        return self._asked[1]

    def _facts(self, found: list[Memory]) -> list[Memory]:
        own = [memory for memory in found if memory.namespace == self._namespace]
        return [memory for memory in own if memory.kind not in EVENTS]
