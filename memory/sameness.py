"""Compare two texts: decide whether they state the same fact.

Two texts state the same fact if their normal forms are equal, if they have the same words in the
same order except for pairs of words with similar vectors, or if one is a rotation of the other. The
vectors of opposites, such as "hot" and "cold", are similar, too, so the threshold is high. It was
measured by `benchmarks/paraphrases.py`, see docs/decisions/0017-what-is-the-same.md.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from perdure.stores.normal_form import normalize_text, unify_letters
from perdure.stores.text import tokenize

# Minimum cosine similarity of the vectors of two words that count as equal.
_MIN_COSINE: Final = 0.8
_TOKENS: Final = re.compile(r"\w+|[^\w\s.,;:!\"()]")
# Texts with at least this many words are also compared with rotated word order.
_MIN_WORDS_TO_ROTATE: Final = 4


def is_same_text(left_text: str, right_text: str) -> bool:
    """Return whether two texts have the same normal form.

    The normal form ignores capitals, punctuation, spaces and variant forms of letters.
    """
    return _normalize(left_text) == _normalize(right_text)


_normalize: Final = lru_cache(1 << 8)(normalize_text)


def is_equivalent_text(left_text: str, right_text: str) -> bool:
    """Return whether two texts state the same fact.

    The documentation of this module says how that is decided.
    """
    if is_same_text(left_text, right_text):
        return True
    first, second = _split_words(left_text), _split_words(right_text)
    return len(first) == len(second) and (
        _differ_by_similar_words(first, second) or _is_rotation(first, second)
    )


def _differ_by_similar_words(left_words: tuple[str, ...], right_words: tuple[str, ...]) -> bool:
    """Return whether two lists of words differ only in words with similar vectors.

    The result is False if a differing word contains a capital or a digit, because names and numbers
    must not be confused. It is also False if two differing words have the same stem.
    """
    differ = [pair for pair in zip(left_words, right_words, strict=True) if pair[0] != pair[1]]
    if not all(word.isalpha() and word.islower() for pair in differ for word in pair):
        return False
    # Words with the same stem may differ in tense or number, which can change the fact.
    return bool(differ) and all(
        tokenize(x) != tokenize(y) and _compute_word_similarity(x, y) >= _MIN_COSINE
        for x, y in differ
    )


def _is_rotation(left_words: tuple[str, ...], right_words: tuple[str, ...]) -> bool:
    """Return whether words can be moved from the start of one text to its end to get the other."""
    first, second = ([word.lower() for word in words] for words in (left_words, right_words))
    if len(first) < _MIN_WORDS_TO_ROTATE or sorted(first) != sorted(second):
        return False
    return any(first[i:] + first[:i] == second for i in range(1, len(first)))


@lru_cache(1 << 8)
def _split_words(text: str) -> tuple[str, ...]:
    """Split a text into words and symbols. The first word is in lower case."""
    parts = _TOKENS.findall(unify_letters(text))
    # The first word of a sentence has a capital even if the word is not a name.
    return (parts[0].lower(), *parts[1:]) if parts else ()


@lru_cache(1 << 12)
def _compute_word_similarity(left_word: str, right_word: str) -> float:
    """Return the cosine similarity of the vectors of two words."""
    # This module is imported here because it loads numpy, which most comparisons do not need.
    from perdure.stores.offline import StaticEmbedder

    first, second = StaticEmbedder().embed([left_word, right_word])
    return float(first @ second)
