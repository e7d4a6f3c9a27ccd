"""Sameness: whether two texts say the same.

They do if their normal forms are equal, or if they have the same words in the same order except for
words whose vectors are near. The vectors of opposites are near as well, so the threshold is high:
`benchmarks/paraphrases.py`, docs/decisions/0017-what-is-the-same.md.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from perdure.stores.text import asks, tokens

_NEAR: Final = 0.8  # the least cosine of two words that may stand for each other
_PARTS: Final = re.compile(r"\w+|[^\w\s.,;:!\"()]")
_FEWEST_MOVED: Final = 4  # words of a text of which some may be moved
_BLANKS: Final = re.compile(
    r"[!\"'()*,./:;?@\[\\\]`{}\u00a1\u00a7\u00ab\u00b6\u00b7\u00bb\u00bf\u30fb\u0964\u060c\u061b"
    r"\u061f\u06d4\u2010-\u205e\u3001-\u3003\u3008-\u3011\u3014-\u301f-]"
)
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


def same(a: str, b: str) -> bool:
    """Whether two texts are equal but for capitals, punctuation, spaces and forms of letters."""
    return _normal(a) == _normal(b)


def digest(text: str) -> str:
    """BLAKE2b-128, in hexadecimal, of a text in its normal form."""
    plain = normal(text).encode("utf-8", "surrogatepass")
    return blake2b(plain, digest_size=16).hexdigest()


def normal(text: str) -> str:
    """The form that a text has in common with all texts that are the `same`; not to be shown."""
    plain = marked = _unified(text).casefold()
    if _MAY_HOLD.search(plain):
        marked = _WITHIN.sub(lambda match: _KEPT.get(match[0], _KEPT["-"]), plain)
    words = " ".join(_BLANKS.sub(" ", marked).split())
    return f"{words} ?" if words and asks(text) else words or plain.strip()


_normal: Final = lru_cache(1 << 8)(normal)


def _unified(text: str) -> str:
    """The text with one form of each letter and sign, and with signs that mean something marked."""
    if not text.isascii():
        plain = _MARKS.sub("\\1\u034f", _RAISED.sub(_lowered, text.translate(_LETTERS)))
        text = unicodedata.normalize("NFKC", plain).translate(_LETTERS)
    if "*" in text:
        text = _EMPHASIS.sub(r"\1", text)
    return _AT_ENDS.sub(lambda match: match[0].translate(_SIGNS), text)


def _lowered(match: re.Match[str]) -> str:
    return match[0] if match[1] else f"^{match[2]}"


def equivalent(a: str, b: str) -> bool:
    """Whether two texts are the same, or have the same words but for near ones, or moved ones."""
    if same(a, b):
        return True
    first, second = _words(a), _words(b)
    return len(first) == len(second) and (_are_near(first, second) or _is_moved(first, second))


def _are_near(a: tuple[str, ...], b: tuple[str, ...]) -> bool:
    differ = [pair for pair in zip(a, b, strict=True) if pair[0] != pair[1]]
    if not all(word.isalpha() and word.islower() for pair in differ for word in pair):
        return False
    # words of one stem differ in tense or number
    return bool(differ) and all(
        tokens(x) != tokens(y) and _cosine(x, y) >= _NEAR for x, y in differ
    )


def _is_moved(a: tuple[str, ...], b: tuple[str, ...]) -> bool:
    first, second = ([word.lower() for word in words] for words in (a, b))
    if len(first) < _FEWEST_MOVED or sorted(first) != sorted(second):
        return False
    return any(first[i:] + first[:i] == second for i in range(1, len(first)))


@lru_cache(1 << 8)
def _words(text: str) -> tuple[str, ...]:
    parts = _PARTS.findall(_unified(text))
    # the first word is no name because of its capital
    return (parts[0].lower(), *parts[1:]) if parts else ()


@lru_cache(1 << 12)
def _cosine(a: str, b: str) -> float:
    # here, since it loads numpy, which most comparisons can do without
    from perdure.stores.offline import StaticEmbedder

    first, second = StaticEmbedder().embed([a, b])
    return float(first @ second)
