"""The normal form of a text: equal for texts that differ in capitals, punctuation and spaces only.

What carries meaning stays in it: the signs of C++ and of 5 %, the point of 10.5, the minus of -5
and of an A-, the raised 2 of 5², the end of a question.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

from perdure.stores.text import asks

NUMBER: Final = r"(?:(?<![\w.,])[-\u2212])?\d+(?:[.,:/-]\d+)*"
PUNCTUATION: Final = (
    "!\"'()*,-./:;?@[\\]`{}\u00a1\u00a7\u00ab\u00b6\u00b7\u00bb\u00bf\u30fb"
    "\u0964\u060c\u061b\u061f\u06d4"
    + "".join(map(chr, (*range(0x2010, 0x205F), *range(0x3001, 0x3004), *range(0x3008, 0x3012))))
    + "".join(map(chr, range(0x3014, 0x3020)))
)
_BLANKS: Final = str.maketrans(dict.fromkeys(PUNCTUATION, " "))
# what of it means something: in 10.5, in 2024-03-01, in "it's", before -5
_WITHIN: Final = re.compile(
    r"[.,:/'\u2212-](?=\w)(?:(?<=\d[.,:/-])(?=\d)|(?<=[^\W\d]')(?=[^\W\d])"
    r"|(?<=[-\u2212])(?<![\w.,].)(?=\d))"
)
_MAY_HOLD: Final = re.compile(r"[\d']")
# what means something at an end of a word: A-, 5*, .NET; and how it is kept
_AT_ENDS: Final = re.compile(
    r"(?<=\d)[*\u2212-]++(?=[\s.,;:!?)\]}\"']|$)"
    r"|(?<=[^\W\d_])(?<![^\W_]{4})[*\u2212-]++(?=[\s.,;:!?)\]}\"']|$)"
    r"|(?<![\w.])\.(?=\w)"
)
_SIGNS: Final = str.maketrans({"-": "\u2212", "*": "\u2217", ".": "\u2219"})
_EMPHASIS: Final = re.compile(r"(?<![\w*])\*{1,3}(?=[^\s*])([^*\n]++)(?<!\s)\*{1,3}")
_RAISED: Final = re.compile(
    "((?<![^\\W_])[cdkm]?m)?([\u00b2\u00b3\u00b9\u2070\u2074-\u207b]+)"  # but m² is m2
)
# marks on one letter; to put more of them in order takes long (the stream-safe format of tr15)
_MARKS: Final = re.compile(r"([^\w\s\x00-\x7f]{30})(?=[^\w\s\x00-\x7f])")
_KEPT: Final = {mark: chr(1 + i) for i, mark in enumerate(".,:/'-")}
_LETTERS: Final = str.maketrans(
    dict.fromkeys("\u2018\u2019\u02bc\uff07\u00b4", "'")
    # marks that are not seen: soft hyphen, joiners, direction, the form of an emoji
    | dict.fromkeys("\u00ad\u034f\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\ufe0e\ufe0f")
)


def normal(text: str) -> str:
    """A text in the one form that texts which are the `same` have; not meant to be shown."""
    plain = unified(text).casefold()
    marked = _WITHIN.sub(_kept, plain) if _MAY_HOLD.search(plain) else plain
    words = " ".join(marked.translate(_BLANKS).split())
    return f"{words} ?" if words and asks(text) else words or plain.strip()


def _kept(match: re.Match[str]) -> str:
    return _KEPT.get(match[0], _KEPT["-"])


def unified(text: str) -> str:
    """A text with letters and signs in one form each, and those that mean something marked."""
    if not text.isascii():
        plain = _MARKS.sub("\\1\u034f", _RAISED.sub(_lowered, text.translate(_LETTERS)))
        text = unicodedata.normalize("NFKC", plain).translate(_LETTERS)
    if "*" in text:
        text = _EMPHASIS.sub(r"\1", text)
    return _AT_ENDS.sub(_as_sign, text)


def _lowered(match: re.Match[str]) -> str:
    return match[0] if match[1] else f"^{match[2]}"


def _as_sign(match: re.Match[str]) -> str:
    return match[0].translate(_SIGNS)
