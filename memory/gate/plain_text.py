"""The plain form of a text, on which detectors go, and where each part of it is in the text itself.

A password is one with a soft hyphen in it too, and a card's number with digits of full width. So
detectors see a text in which letters, digits, spaces, dashes and quotes of whatever form are those
of ASCII where there is one (NFKC, https://www.unicode.org/reports/tr15/), without what nobody sees.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, update_wrapper
from itertools import chain
from typing import Final

Found = tuple[str, int, int]
"""What it is, where it begins, where it ends."""

_UNSEEN_RANGES: Final = (
    (0x00, 0x08), (0x0E, 0x1B), (0x7F, 0x84), (0x86, 0x9F), (0xAD, 0xAD), (0x34F, 0x34F),
    (0x61C, 0x61C), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F), (0x200B, 0x200F),
    (0x202A, 0x202E), (0x2060, 0x206F), (0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0), (0xFFF9, 0xFFFB), (0xE0000, 0xE0FFF),
)  # fmt: skip
_UNSEEN: Final = frozenset(
    map(chr, chain.from_iterable(range(first, last + 1) for first, last in _UNSEEN_RANGES))
)
# what one character is another form of
_FORMS: Final = (
    dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\u2043\ufe58\ufe63", "-")
    | dict.fromkeys("\u00b4\u2018\u2019\u201a\u201b\u02bc\u2032", "'")
    | dict.fromkeys("\u00ab\u00bb\u201c\u201d\u201e\u201f\u2033\u300c\u300d", '"')
    | dict.fromkeys("\u00a0\u1680\u202f\u205f\u2800\u3000", " ")
    | {chr(code): " " for code in range(0x2000, 0x200B)}
    | {"\u0130": "I"}  # the one letter whose small form has two characters
    | dict.fromkeys("\u0085\u2028\u2029", "\n")
    | {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # full width
)
# what may stay as it is, if nothing odd is beside it: letters of most languages, ideographs,
# their punctuation, emoji
_USUAL: Final = (
    "\t-\r\x1c-~\u00a1-\u00a7\u00a9\u00ac\u00ae\u00b0\u00b1\u00b6\u00b7\u00bf-\u012f\u0131\u0134-\u013e"
    "\u0141-\u0148\u014a-\u017e\u0180-\u01c3\u01cd-\u01f0\u01f4-\u02af\u0391-\u03a1\u03a3-\u03cf"
    "\u0400-\u0482\u048a-\u052f\u05d0-\u05ea\u0620-\u064a\u0904-\u0939\u0e01-\u0e32\u2022\u2026\u20a0-\u20a7"
    "\u20a9-\u20bf\u2190-\u21ff\u2300-\u2328\u2600-\u27bf\u3001-\u300b\u300e-\u3020\u3041-\u3096"
    "\u30a1-\u30fe\u4e00-\u9fff\uac00-\ud7a3\U0001f300-\U0001faff"
)
_ODD: Final = re.compile(f"[^{_USUAL}]")
_ODD_RUN: Final = re.compile(f".?[^{_USUAL}]+", re.DOTALL)
_MOST_MARKS: Final = 30  # on a letter: the stream-safe format of tr15; to sort more takes long
_MOST_CHARS: Final = 4  # that one character is taken apart into; some stand for whole sentences


class PlainText:
    """A text in its plain form.

    Args:
        text: The text.

    Attributes:
        text: The plain form.
    """

    __slots__ = ("_at", "_froms", "_tos", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        # of each part: where it begins here, and in the text; where it ends there, if it is no copy
        self._at: list[int] = []
        self._froms: list[int] = []
        self._tos: list[int | None] = []
        if _ODD.search(text):
            # most of what is odd is one character in another form, and moves nothing
            text = _ODD.sub(_formed, text)
            self.text = "".join(self._parts(text)) if _ODD.search(text) else text

    def found(self, find: Callable[[str], Iterable[Found]]) -> Iterable[Found]:
        """What `find` tells of the plain form, as spans of the text itself."""
        spans = find(self.text)
        if not self._at:
            return spans
        return [(kind, self._start(start), self._end(end)) for kind, start, end in spans]

    def _start(self, start: int) -> int:
        part = bisect_right(self._at, start) - 1
        copied = self._tos[part] is None
        return self._froms[part] + (start - self._at[part] if copied else 0)

    def _end(self, end: int) -> int:
        part = bisect_right(self._at, end - 1) - 1
        to = self._tos[part]
        return self._froms[part] + end - self._at[part] if to is None else to

    def _parts(self, text: str) -> Iterator[str]:
        at = done = 0
        for run in chain(_ODD_RUN.finditer(text), [None]):
            start = run.start() if run else len(text)
            if start > done:
                self._note(at, done, None)
                at += start - done
                yield text[done:start]
            for first, last, plain in _clusters(text, start, run.end()) if run else ():
                if plain:
                    copied = len(plain) == 1 == last - first
                    self._note(at, first, None if copied else last)
                    at += len(plain)
                    yield plain
            done = run.end() if run else start

    def _note(self, at: int, start: int, to: int | None) -> None:
        goes_on = to is None and bool(self._tos) and self._tos[-1] is None
        if goes_on and start - self._froms[-1] == at - self._at[-1]:
            return
        self._at.append(at)
        self._froms.append(start)
        self._tos.append(to)


class OnPlain:
    """A detector that goes over the plain form of texts.

    Args:
        find: Tells spans of a text in its plain form.
    """

    def __init__(self, find: Callable[[str], Iterable[Found]]) -> None:
        self.find = find
        update_wrapper(self, find)

    def __call__(self, text: str, /) -> Iterable[Found]:
        """Where it is in a text, whatever its form."""
        return PlainText(text).found(self.find)


def _formed(match: re.Match[str]) -> str:
    return _FORMS.get(match[0], match[0])


def _clusters(text: str, start: int, end: int) -> Iterator[tuple[int, int, str]]:
    """Characters with the marks on them: from where to where, and the plain form."""
    signs = ""
    first = last = start
    for at in range(start, end):
        char = text[at]
        if char in _UNSEEN:
            continue
        if signs and _joins(char) and len(signs) <= _MOST_MARKS:
            signs += char
        else:
            if signs:
                yield first, last, _plain(signs)
            signs, first = char, at
        last = at + 1
    if signs:
        yield first, last, _plain(signs)


def _joins(char: str) -> bool:
    """Whether a character is a mark on the one before, or the rest of its syllable."""
    if char < "\u0300":
        return False
    return unicodedata.combining(char) > 0 or "\u1160" <= char <= "\u11ff" or char in "\uff9e\uff9f"


@lru_cache(1 << 12)
def _plain(signs: str) -> str:
    if len(signs) == 1 and signs.isdigit():
        # a small raised 1 is a note beside a number, and no digit of it
        return str(unicodedata.decimal(signs)) if signs.isdecimal() else signs
    plain = unicodedata.normalize("NFKC", signs)
    if len(plain) > max(_MOST_CHARS, len(signs)):
        return signs
    return plain
