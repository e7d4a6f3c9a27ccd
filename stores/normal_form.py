"""Compute a text's normal form, which is used to recognise texts that say the same thing.

The normal form ignores case, white space, letter variants, and punctuation that carries no meaning.
Punctuation that changes the meaning is kept, as in `10.5`, `-5` or `A-`. The normal form also
records whether the text ends with a question.

A tombstone stores the hash of a text's normal form. The computation of normal forms must not change
between releases. If the computation changed, the hashes in existing tombstones would no longer
match any text.
"""

from __future__ import annotations

import re
import unicodedata
from hashlib import blake2b
from typing import Final

from perdure.stores.text import ends_with_question

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
# a fast test: text without such a character contains no match of `_MEANINGFUL_INSIDE`
_MAY_HAVE_MEANINGFUL: Final = re.compile(r"[\d']")
# matches punctuation that is significant at the start or end of a word, as in A-, 5* and .NET
_SIGNS_AT_WORD_ENDS: Final = re.compile(
    r"(?<=\d)[*\u2212-]++(?=[\s.,;:!?)\]}\"']|$)"
    r"|(?<=[^\W\d_])(?<![^\W_]{4})[*\u2212-]++(?=[\s.,;:!?)\]}\"']|$)"
    r"|(?<![\w.])\.(?=\w)"
)
# Significant signs are replaced with similar-looking mathematical operators, which `_IGNORED` does
# not match.
_SIGN_REPLACEMENTS: Final = str.maketrans({"-": "\u2212", "*": "\u2217", ".": "\u2219"})
# emphasis in Markdown, such as *word* or **word**, whose asterisks are removed
_EMPHASIS: Final = re.compile(r"(?<![\w*])\*{1,3}(?=[^\s*])([^*\n]++)(?<!\s)\*{1,3}")
# Superscript digits and signs. They are replaced with ^ and digits, as in x^2, except after a unit
# of length, where they become plain digits: m² becomes m2.
_SUPERSCRIPTS: Final = re.compile(
    "((?<![^\\W_])[cdkm]?m)?([\u00b2\u00b3\u00b9\u2070\u2074-\u207b]+)"
)
# Matches a run of 30 combining marks after one letter. Sorting a longer run would take quadratic
# time, so a joiner is inserted after every 30 marks (the Stream-Safe Text Format of Unicode
# Standard Annex 15). The joiners are removed after the sorting, by `_LETTER_VARIANTS`.
_MARK_RUN: Final = re.compile(r"([^\w\s\x00-\x7f]{30})(?=[^\w\s\x00-\x7f])")
# Maps significant punctuation to control characters, which `_IGNORED` does not match. The control
# characters remain in the normal form.
_PLACEHOLDERS: Final = {mark: chr(1 + i) for i, mark in enumerate(".,:/'-")}
_LETTER_VARIANTS: Final = str.maketrans(
    dict.fromkeys("\u2018\u2019\u02bc\uff07\u00b4", "'")
    # Invisible characters are removed: soft hyphens, joiners, text direction marks, and emoji
    # variation selectors.
    | dict.fromkeys("\u00ad\u034f\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\ufe0e\ufe0f")
)


def hash_normal_form(text: str) -> str:
    """Return the BLAKE2b-128 hash of a text's normal form, as a hexadecimal string."""
    plain = normalize_text_for_comparison(text).encode("utf-8", "surrogatepass")
    return blake2b(plain, digest_size=16).hexdigest()


def normalize_text_for_comparison(text: str) -> str:
    """Return the normal form of a text. Use the result to compare texts, not to display them."""
    plain = marked = unify_letter_variants(text).casefold()
    if _MAY_HAVE_MEANINGFUL.search(plain):
        marked = _MEANINGFUL_INSIDE.sub(
            lambda match: _PLACEHOLDERS.get(match[0], _PLACEHOLDERS["-"]), plain
        )
    words = " ".join(_IGNORED.sub(" ", marked).split())
    # If a text consists only of punctuation, the punctuation is kept.
    return f"{words} ?" if words and ends_with_question(text) else words or plain.strip()


def unify_letter_variants(text: str) -> str:
    """Convert the variants of each letter to a single form by Unicode normalisation.

    The returned text still contains punctuation, which the callers remove. The only punctuation
    that this function removes is the asterisks of Markdown emphasis. Punctuation that is
    significant at the start or end of a word, such as the asterisk in `5*`, is replaced with a
    special character, so that callers do not remove it.
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

    The replacement is a caret (^) followed by the superscripts. A match that begins with a unit of
    length is returned unchanged. The caller's NFKC normalisation later converts the superscript
    digits to plain digits.
    """
    return match[0] if match[1] else f"^{match[2]}"
