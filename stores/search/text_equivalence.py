"""Decide whether two texts state the same fact, and compute the normal form of a text.

The normal form ignores case, white space, letter variants, and punctuation that carries no meaning.
Punctuation that changes the meaning is kept, as in `10.5`, `-5` or `A-`. If a text ends with a
question, its normal form ends with a space and a question mark.

A tombstone stores the hash of a text's normal form. The algorithm that computes the normal form of
a text must not change between releases. If a release computed normal forms in a different way,
deleted texts would no longer match the hashes in existing tombstones.

Two texts state the same fact if they have the same normal form. Two texts state the same fact if
the words at each position are equal or have similar embeddings. Two texts state the same fact if
moving some words from the start of one text to its end produces the other text. Two different words
count as similar only if the similarity of their embeddings is very high. A lower threshold would
also accept opposites such as "hot" and "cold", which have similar embeddings although they state
different facts. The similarity threshold was determined with `benchmarks/paraphrases.py`; see
docs/decisions/0017-what-is-the-same.md.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from typing import Final

from perdure.stores.search.text import ends_with_question, tokenize

# punctuation that the normal form replaces with a space
_IGNORED: Final = re.compile(
    r"[!\"'()*,./:;?@\[\\\]`{}\u00a1\u00a7\u00ab\u00b6\u00b7\u00bb\u00bf\u30fb\u0964\u060c\u061b"
    r"\u061f\u06d4\u2010-\u205e\u3001-\u3003\u3008-\u3011\u3014-\u301f-]"
)
# punctuation that is significant inside a word or number, as in 10.5, 2024-03-01, "it's" or -5
_MEANINGFUL_INSIDE: Final = re.compile(
    r"[.,:/'\u2212-](?=\w)(?:(?<=\d[.,:/-])(?=\d)|(?<=[^\W\d]')(?=[^\W\d])"
    r"|(?<=[-\u2212])(?<![\w.,].)(?=\d))"
)
# matches a digit or an apostrophe; text without these characters contains no match of
# `_MEANINGFUL_INSIDE`, so the slower search for such matches is skipped
_MAY_HAVE_MEANINGFUL: Final = re.compile(r"[\d']")
# matches punctuation that is significant at the start or end of a word, as in A-, 5* and .NET
_SIGNS_AT_WORD_ENDS: Final = re.compile(
    r"(?<=\d)[*\u2212-]++(?=[\s.,;:!?)\]}\"']|$)"
    r"|(?<=[^\W\d_])(?<![^\W_]{4})[*\u2212-]++(?=[\s.,;:!?)\]}\"']|$)"
    r"|(?<![\w.])\.(?=\w)"
)
# Hyphens, asterisks and dots that are significant at the start or end of a word are replaced with
# similar-looking mathematical operators. `_IGNORED` does not match these operators, so they are
# kept.
_SIGN_REPLACEMENTS: Final = str.maketrans({"-": "\u2212", "*": "\u2217", ".": "\u2219"})
# emphasis in Markdown, such as *word* or **word**, whose asterisks are removed
_EMPHASIS: Final = re.compile(r"(?<![\w*])\*{1,3}(?=[^\s*])([^*\n]++)(?<!\s)\*{1,3}")
# Superscript digits and signs. They are replaced with ^ and digits, as in x^2, except after a unit
# of length, where they become plain digits: m² becomes m2.
_SUPERSCRIPTS: Final = re.compile(
    "((?<![^\\W_])[cdkm]?m)?([\u00b2\u00b3\u00b9\u2070\u2074-\u207b]+)"
)
# Matches a run of 30 combining marks after one letter. NFKC normalisation sorts the marks after a
# letter, in quadratic time. To limit this time, a joiner is inserted after every 30 marks (the
# Stream-Safe Text Format of Unicode Standard Annex 15). The joiners are removed after the
# normalisation, by `_LETTER_VARIANTS`.
_MARK_RUN: Final = re.compile(r"([^\w\s\x00-\x7f]{30})(?=[^\w\s\x00-\x7f])")
# Maps each punctuation mark that can be significant inside a word or number to a control character.
# The regular expression `_IGNORED` does not match control characters, so they remain in the
# normalised text.
_PLACEHOLDERS: Final = {mark: chr(1 + i) for i, mark in enumerate(".,:/'-")}
_LETTER_VARIANTS: Final = str.maketrans(
    dict.fromkeys("\u2018\u2019\u02bc\uff07\u00b4", "'")
    # Invisible characters are removed: soft hyphens, joiners, text direction marks, and emoji
    # variation selectors.
    | dict.fromkeys("\u00ad\u034f\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\ufe0e\ufe0f")
)
# Minimum cosine similarity of two words' embeddings for the words to count as equal.
_MIN_COSINE: Final = 0.8
_TOKENS: Final = re.compile(r"\w+|[^\w\s.,;:!\"()]")
# Minimum number of words that two texts must have before they are checked for a rotated word order.
# A rotation moves words from the start of a text to its end (see `_is_rotation`).
_MIN_WORDS_TO_ROTATE: Final = 4


def hash_normal_form(text: str) -> str:
    """Return the BLAKE2b-128 hash of a text's normal form, as a hexadecimal string."""
    plain = normalize_text_for_comparison(text).encode("utf-8", "surrogatepass")
    return blake2b(plain, digest_size=16).hexdigest()


def normalize_text_for_comparison(text: str) -> str:
    """Return the normal form of a text, which serves to compare texts and is not for display."""
    plain = marked = unify_letter_variants(text).casefold()
    if _MAY_HAVE_MEANINGFUL.search(plain):
        marked = _MEANINGFUL_INSIDE.sub(
            lambda match: _PLACEHOLDERS.get(match[0], _PLACEHOLDERS["-"]), plain
        )
    words = " ".join(_IGNORED.sub(" ", marked).split())
    # If a text consists only of punctuation, the normal form contains this punctuation.
    return f"{words} ?" if words and ends_with_question(text) else words or plain.strip()


def unify_letter_variants(text: str) -> str:
    """Normalize letters, apostrophes and superscripts, and preserve punctuation as in `5*` or `A-`.

    The variants of a letter are unified by Unicode normalisation (NFKC). Invisible characters are
    removed. The function removes no punctuation except the asterisks of Markdown emphasis; callers
    remove the rest. Some punctuation at the start or end of a word is significant, such as the
    asterisk in `5*`. Significant punctuation is replaced with a similar-looking mathematical
    operator. Callers remove punctuation from the returned text, but keep mathematical operators.
    """
    if not text.isascii():
        plain = _MARK_RUN.sub(
            "\\1\u034f", _SUPERSCRIPTS.sub(_lower_superscript, text.translate(_LETTER_VARIANTS))
        )
        text = unicodedata.normalize("NFKC", plain).translate(_LETTER_VARIANTS)
    if "*" in text:
        text = _EMPHASIS.sub(r"\1", text)
    return _SIGNS_AT_WORD_ENDS.sub(lambda match: match[0].translate(_SIGN_REPLACEMENTS), text)


def _lower_superscript(match: re.Match[str]) -> str:
    """Return the replacement for a match of `_SUPERSCRIPTS`.

    For example, in the text `x²`, the match `²` is replaced with `^²`, which NFKC normalisation
    later converts to `^2`. If a match begins with a unit of length, as in `m²` (square metres), the
    match is returned unchanged. The caller of `_lower_superscript` converts superscript digits to
    plain digits by NFKC normalisation.
    """
    return match[0] if match[1] else f"^{match[2]}"


# -- same facts


def is_same_normalized_text(left_text: str, right_text: str) -> bool:
    """Return whether two texts are equal after normalization.

    Normalization removes differences in case, punctuation, whitespace and variant forms of letters.
    """
    return _normalize(left_text) == _normalize(right_text)


_normalize: Final = lru_cache(1 << 8)(normalize_text_for_comparison)


def is_text_stating_same_fact(left_text: str, right_text: str) -> bool:
    """Return whether two texts state the same fact.

    The module docstring of `perdure.stores.search.text_equivalence` describes when two texts state
    the same fact.
    """
    if is_same_normalized_text(left_text, right_text):
        return True
    first, second = _split_words(left_text), _split_words(right_text)
    return len(first) == len(second) and (
        _differ_by_similar_words(first, second) or _is_rotation(first, second)
    )


def _differ_by_similar_words(left_words: tuple[str, ...], right_words: tuple[str, ...]) -> bool:
    """Return whether two lists of words are equal except for words with similar embeddings.

    Return False if the lists differ in a word that contains a capital letter or a digit. Texts that
    mention different names or different numbers are treated as statements of different facts.
    Return False if two differing words have the same stem, because a change of tense or a plural
    can change the meaning.
    """
    word_pairs = zip(left_words, right_words, strict=True)
    differing_pairs = [pair for pair in word_pairs if pair[0] != pair[1]]
    words = list(chain.from_iterable(differing_pairs))
    if not words or not all(map(str.isalpha, words)) or not all(map(str.islower, words)):
        return False
    return all(
        tokenize(x) != tokenize(y) and _compute_word_similarity(x, y) >= _MIN_COSINE
        for x, y in differing_pairs
    )


def _is_rotation(left_words: tuple[str, ...], right_words: tuple[str, ...]) -> bool:
    """Return whether one list of words is a rotation of the other.

    A list is rotated by moving words from its start to its end.
    """
    first, second = list(map(str.lower, left_words)), list(map(str.lower, right_words))
    if len(first) < _MIN_WORDS_TO_ROTATE or sorted(first) != sorted(second):
        return False
    return any(first[i:] + first[:i] == second for i in range(1, len(first)))


@lru_cache(1 << 8)
def _split_words(text: str) -> tuple[str, ...]:
    """Split a text into words and symbols. The first word is in lower case."""
    parts = _TOKENS.findall(unify_letter_variants(text))
    # Convert the first word to lower case. Words with a capital letter are treated as names, but at
    # the start of a sentence, a capital letter does not indicate a name.
    return (parts[0].lower(), *parts[1:]) if parts else ()


@lru_cache(1 << 12)
def _compute_word_similarity(left_word: str, right_word: str) -> float:
    """Return the cosine similarity of two words' embeddings."""
    # Import `perdure.stores.search.static_embedder` lazily, because it loads numpy, which most text
    # comparisons do not need.
    from perdure.stores.search.static_embedder import StaticEmbedder

    first, second = StaticEmbedder().embed([left_word, right_word])
    return float(first @ second)
