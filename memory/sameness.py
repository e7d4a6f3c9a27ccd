"""Decide whether two texts state the same fact.

Two texts state the same fact if their normal forms are equal. Two texts also state the same fact if
the words at each position are equal or have similar embeddings. Finally, two texts state the same
fact if one is a rotation of the other, that is, if moving words from the start of one text to its
end produces the other text. The similarity threshold is high, because opposites such as "hot" and
"cold" have similar embeddings although they state different facts. The threshold was determined
with `benchmarks/paraphrases.py`; see docs/decisions/0017-what-is-the-same.md.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from perdure.stores.normal_form import normalize_text_for_comparison, unify_letter_variants
from perdure.stores.text import tokenize

# Minimum cosine similarity of two words' embeddings for the words to count as equal.
_MIN_COSINE: Final = 0.8
_TOKENS: Final = re.compile(r"\w+|[^\w\s.,;:!\"()]")
# Minimum number of words that two texts must have to be compared as rotations of each other.
_MIN_WORDS_TO_ROTATE: Final = 4


def is_same_normalized_text(left_text: str, right_text: str) -> bool:
    """Return whether two texts are equal after normalization.

    Normalization ignores case, punctuation, whitespace and variant forms of letters.
    """
    return _normalize(left_text) == _normalize(right_text)


_normalize: Final = lru_cache(1 << 8)(normalize_text_for_comparison)


def is_text_stating_same_fact(left_text: str, right_text: str) -> bool:
    """Return whether two texts state the same fact.

    The rules are described in the docstring of the module `perdure.memory.sameness`.
    """
    if is_same_normalized_text(left_text, right_text):
        return True
    first, second = _split_words(left_text), _split_words(right_text)
    return len(first) == len(second) and (
        _differ_by_similar_words(first, second) or _is_rotation(first, second)
    )


def _differ_by_similar_words(left_words: tuple[str, ...], right_words: tuple[str, ...]) -> bool:
    """Return whether two lists of words are equal except for words with similar embeddings.

    Return False if a differing word contains a capital letter or a digit, because different names
    or numbers are different facts. Also return False if two differing words have the same stem,
    because a change of tense or number can change the fact.
    """
    word_pairs = zip(left_words, right_words, strict=True)
    differing_pairs = [pair for pair in word_pairs if pair[0] != pair[1]]
    if not all(word.isalpha() and word.islower() for pair in differing_pairs for word in pair):
        return False
    return bool(differing_pairs) and all(
        tokenize(x) != tokenize(y) and _compute_word_similarity(x, y) >= _MIN_COSINE
        for x, y in differing_pairs
    )


def _is_rotation(left_words: tuple[str, ...], right_words: tuple[str, ...]) -> bool:
    """Return whether one list of words is a rotation of the other.

    The lists are rotations of each other if moving words from the start of one list to its end
    produces the other list.
    """
    first, second = ([word.lower() for word in words] for words in (left_words, right_words))
    if len(first) < _MIN_WORDS_TO_ROTATE or sorted(first) != sorted(second):
        return False
    return any(first[i:] + first[:i] == second for i in range(1, len(first)))


@lru_cache(1 << 8)
def _split_words(text: str) -> tuple[str, ...]:
    """Split a text into words and symbols. The first word is in lower case."""
    parts = _TOKENS.findall(unify_letter_variants(text))
    # Lowercase the first word, because a capital letter at the start of a sentence does not
    # indicate a name.
    return (parts[0].lower(), *parts[1:]) if parts else ()


@lru_cache(1 << 12)
def _compute_word_similarity(left_word: str, right_word: str) -> float:
    """Return the cosine similarity of two words' embeddings."""
    # Import `perdure.stores.offline` lazily, because it loads numpy, which most text comparisons do
    # not need.
    from perdure.stores.offline import StaticEmbedder

    first, second = StaticEmbedder().embed([left_word, right_word])
    return float(first @ second)
