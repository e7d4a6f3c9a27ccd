"""Sameness: whether two texts say the same.

They do if their normal forms are equal, or if they have the same words in the same order except for
words whose vectors are near. The vectors of opposites are near as well, so the threshold is high:
`benchmarks/paraphrases.py`, docs/decisions/0017-what-is-the-same.md.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from perdure.stores.normal_form import normalize_text, unify_letters
from perdure.stores.text import tokenize

_MIN_COSINE: Final = 0.8  # the least cosine of two words that may stand for each other
_TOKENS: Final = re.compile(r"\w+|[^\w\s.,;:!\"()]")
_MIN_WORDS_TO_ROTATE: Final = 4  # words of a text of which some may be moved


def is_same_text(a: str, b: str) -> bool:
    """Whether two texts are equal but for capitals, punctuation, spaces and forms of letters."""
    return _normalize(a) == _normalize(b)


_normalize: Final = lru_cache(1 << 8)(normalize_text)


def is_equivalent_text(a: str, b: str) -> bool:
    """Whether two texts are the same, or have the same words but for near ones, or moved ones."""
    if is_same_text(a, b):
        return True
    first, second = _split_words(a), _split_words(b)
    return len(first) == len(second) and (
        _differ_by_similar_words(first, second) or _is_rotation(first, second)
    )


def _differ_by_similar_words(a: tuple[str, ...], b: tuple[str, ...]) -> bool:
    differ = [pair for pair in zip(a, b, strict=True) if pair[0] != pair[1]]
    if not all(word.isalpha() and word.islower() for pair in differ for word in pair):
        return False
    # words of one stem differ in tense or number
    return bool(differ) and all(
        tokenize(x) != tokenize(y) and _word_similarity(x, y) >= _MIN_COSINE for x, y in differ
    )


def _is_rotation(a: tuple[str, ...], b: tuple[str, ...]) -> bool:
    first, second = ([word.lower() for word in words] for words in (a, b))
    if len(first) < _MIN_WORDS_TO_ROTATE or sorted(first) != sorted(second):
        return False
    return any(first[i:] + first[:i] == second for i in range(1, len(first)))


@lru_cache(1 << 8)
def _split_words(text: str) -> tuple[str, ...]:
    parts = _TOKENS.findall(unify_letters(text))
    # the first word is no name because of its capital
    return (parts[0].lower(), *parts[1:]) if parts else ()


@lru_cache(1 << 12)
def _word_similarity(a: str, b: str) -> float:
    # here, since it loads numpy, which most comparisons can do without
    from perdure.stores.offline import StaticEmbedder

    first, second = StaticEmbedder().embed([a, b])
    return float(first @ second)
