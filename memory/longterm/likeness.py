"""Likeness of texts: whether two say the same, letter for letter or but for how they put it.

Two facts may share nearly all words and be opposites, so what is counted is not how much they have
in common but whether anything that carries meaning differs. Only words that carry none, and the
endings of words, may.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple

from perdure.stores.text import STOP_WORDS, asks, tokens

_NUMBER: Final = r"(?:(?<![\w.,])[-\u2212])?\d+(?:[.,:/-]\d+)*"
_PUNCTUATION: Final = (
    "!\"'()*,-./:;?@[\\]`{}\u00a1\u00a7\u00ab\u00b6\u00b7\u00bb\u00bf\u30fb"
    "\u0964\u060c\u061b\u061f\u06d4"
    + "".join(map(chr, (*range(0x2010, 0x205F), *range(0x3001, 0x3004), *range(0x3008, 0x3012))))
    + "".join(map(chr, range(0x3014, 0x3020)))
)
_BLANKS: Final = str.maketrans(dict.fromkeys(_PUNCTUATION, " "))
# what of it means something: in 10.5, in 2024-03-01, in "it's", before -5
_WITHIN: Final = re.compile(
    r"[.,:/'\u2212-](?=\w)(?:(?<=\d[.,:/-])(?=\d)|(?<=[^\W\d]')(?=[^\W\d])"
    r"|(?<=[-\u2212])(?<![\w.,].)(?=\d))"
)
_MAY_HOLD: Final = re.compile(r"[\d']")
_PARTS: Final = re.compile(
    rf"(?P<word>[^\W\d]\w*(?:'\w+)*)|(?P<number>{_NUMBER}(?!\w))|(?P<mixed>\w+)"
    # signs stay: C++ is not C#, 5 % not 5, and a raised thumb not a lowered one
    rf"|[^\w\s{re.escape(_PUNCTUATION)}]"
)
_KEPT: Final = {mark: chr(1 + i) for i, mark in enumerate(".,:/'-")}
_LETTERS: Final = str.maketrans(
    dict.fromkeys("\u2018\u2019\u02bc\uff07\u00b4", "'")
    # marks that are not seen: soft hyphen, joiners, direction, the form of an emoji
    | dict.fromkeys("\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\ufe0e\ufe0f")
)
_LIGHT_WORDS: Final = """
    a an the this that these those am is are be been being do does has have of to
    very just really also too so quite now currently please
"""
_LIGHT: Final = frozenset(_LIGHT_WORDS.split())
_LIGHT_CHARS: Final = re.compile("[\u7684\u306e]|\u3067\u3059$")  # 的, の, です at an end
_HEAVY_WORDS: Final = """
    never nobody nothing nowhere neither without hardly barely scarcely cannot less least fewer
    yesterday today tomorrow tonight last next first second third former
    two three four five six seven eight nine ten eleven twelve twenty hundred thousand million
    half twice monday tuesday wednesday thursday friday saturday sunday january february march
    april june july august september october november december
    nicht kein keine keinen nie niemals ohne ne pas jamais non sans nunca jamás sin não sem
    не нет ни никогда без
"""
_HEAVY: Final = (STOP_WORDS - _LIGHT) | frozenset(_HEAVY_WORDS.split())
_NEGATED: Final = re.compile(
    r"(?:(is|are|was|were|do|does|did|has|have|had|wo|would|ca|could|should|must|need|ai|sha)n'?t"
    r"|can(not))"
)
_WHOLE: Final = {"wo": "will", "ca": "can", "sha": "shall", "ai": "is"}
_ENDINGS: Final = {"ll": "will", "d": "would", "s": "", "re": "", "m": "", "ve": ""}
_GROUPED: Final = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_LONGEST: Final = 32  # letters of a word that is remembered; what is longer is none
_MOST_UNALIKE: Final = 0.89  # of texts of which a word that carries meaning differs
_CONTRARY: Final = 0.5


def same(a: str, b: str) -> bool:
    """Whether two texts are equal but for capitals, punctuation, spaces and forms of letters.

    >>> same("Ann likes tea.", "  ann LIKES tea"), same("Ann has 2 cats", "Ann has 3 cats")
    (True, False)
    """
    return normal(a) == normal(b)


def alike(a: str, b: str) -> float:
    """How nearly two texts say the same, from 0 to 1.

    0.9 and more: only words that carry no meaning of their own, and endings of words, differ.
    Below 0.9: something does differ. 0.5 and less: a negation, a number, a date, a name, a tense,
    a word of relation, or the order, so who does what to whom.

    >>> alike("Ann likes green tea.", "ann likes the green teas") >= 0.9
    True
    >>> alike("Ann loves Bo", "Bo loves Ann"), alike("likes tea", "does not like tea") < 0.5
    (0.5, True)
    """
    return Wording(a).alike(Wording(b))


def normal(text: str) -> str:
    """A text in the one form that texts which are the `same` have; not meant to be shown."""
    plain = _unified(text).casefold()
    marked = _WITHIN.sub(_kept, plain) if _MAY_HOLD.search(plain) else plain
    return " ".join(marked.translate(_BLANKS).split()) or plain.strip()


def digest(text: str) -> str:
    """BLAKE2b-128, in hexadecimal, of a text in its normal form."""
    plain = normal(text).encode("utf-8", "surrogatepass")
    return blake2b(plain, digest_size=16).hexdigest()


class _Word(NamedTuple):
    stem: str
    surface: str
    named: bool
    leading: bool

    def weighs(self) -> bool:
        """Whether to say another word, or none, in its place would be to say something else."""
        if self.stem in _HEAVY_STEMS or (self.named and not self.leading):
            return True
        # one character stands for a word where a script sets no spaces, and is a name elsewhere
        return len(self.stem) == 1 or any(map(str.isdigit, self.stem))

    def agrees(self, other: _Word) -> bool:
        """Whether two words of one stem say the same: names have no endings, and a past is past."""
        if self.surface == other.surface:
            return True
        within = (self.named and not self.leading) or (other.named and not other.leading)
        if within or (self.named and other.named):
            return False
        return self.surface.endswith("ed") == other.surface.endswith("ed")


class Wording:
    """A text taken apart, to be compared with others.

    Args:
        text: The text.
    """

    __slots__ = ("_asks", "_counted", "_light", "_signs", "_stems", "_words", "normal")

    def __init__(self, text: str) -> None:
        self.normal = normal(text)
        self._asks = asks(text)
        self._light: Counter[str] = Counter()
        self._signs: Counter[str] = Counter()
        self._words: list[_Word] = []
        self._take_apart(_unified(text))
        self._stems = [word.stem for word in self._words]
        self._counted = Counter(self._stems)

    def bound(self, other: Wording) -> float:
        """What `alike` cannot exceed, at a glance."""
        least, most = sorted((len(self._stems), len(other._stems)))
        return 2 * least / (least + most) if most else 1.0

    def alike(self, other: Wording) -> float:
        """See `likeness.alike`."""
        if self.normal == other.normal:
            return 1.0
        if not self._stems or not other._stems:
            return 0.0
        if self._stems == other._stems and self._agrees(other):
            return 0.9 + 0.1 * _dice(self._light, other._light)
        shared = _dice(self._counted, other._counted)
        return _CONTRARY * shared if self._contradicts(other) else min(_MOST_UNALIKE, shared)

    def _agrees(self, other: Wording) -> bool:
        pairs = zip(self._words, other._words, strict=True)
        return self._means_as(other) and all(mine.agrees(theirs) for mine, theirs in pairs)

    def _means_as(self, other: Wording) -> bool:
        """Whether both ask, or neither; and signs are equal, but for emoji that only one has."""
        if self._asks != other._asks:
            return False
        return self._signs == other._signs or (
            not (self._signs and other._signs)
            and all(unicodedata.category(sign) == "So" for sign in self._signs | other._signs)
        )

    def _contradicts(self, other: Wording) -> bool:
        if self._stems == other._stems or not self._means_as(other):
            return True
        shared = self._counted.keys() & other._counted.keys()
        ordered = [[stem for stem in each._stems if stem in shared] for each in (self, other)]
        if ordered[0] != ordered[1]:
            return True
        return any(
            word.weighs()
            for mine, theirs in ((self, other), (other, self))
            for word in mine._words
            if word.stem not in theirs._counted
        )

    def _take_apart(self, text: str) -> None:
        text = text.casefold() if text.isupper() else text
        for match in _PARTS.finditer(text):
            part = match[0]
            match match.lastgroup:
                case "word" | "mixed":
                    self._take(part)
                case "number":
                    number = part.replace("\u2212", "-")
                    number = number.replace(",", "") if _GROUPED.fullmatch(number) else number
                    self._words.append(_Word(number, number, False, False))
                case _:
                    self._signs.update(part)

    def _take(self, word: str) -> None:
        low = word.casefold()
        if word == "A" and self._words:  # vitamin A is not vitamins
            self._words.append(_Word("a", "a", True, False))
            return
        known = low.isascii() and low.isalpha() and len(low) <= _LONGEST
        for base, stems in _known_reading(low) if known else _reading(low):
            if not stems:
                self._light[base] += 1
            for stem in stems:
                leading = not self._words
                self._words.append(_Word(stem, base, word[0].isupper(), leading))


def _kept(match: re.Match[str]) -> str:
    return _KEPT.get(match[0], _KEPT["-"])


def _unified(text: str) -> str:
    if text.isascii():
        return text
    return unicodedata.normalize("NFKC", text.translate(_LETTERS)).translate(_LETTERS)


def _uncontracted(word: str) -> Iterator[str]:
    """The words that a contraction stands for: "doesn't" is "does" and "not"."""
    if negated := _NEGATED.fullmatch(word):
        yield "can" if negated[2] else _WHOLE.get(negated[1], negated[1])
        yield "not"
        return
    base, mark, ending = word.rpartition("'")
    if mark and base and ending in _ENDINGS:
        yield base
        if _ENDINGS[ending]:
            yield _ENDINGS[ending]
        return
    yield word


def _reading(word: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The words that a word stands for, with their stems; of one without weight, none."""
    return tuple(
        (base, () if base in _LIGHT else tuple(_units(tokens(_LIGHT_CHARS.sub("", base)))))
        for base in _uncontracted(word)
    )


_known_reading: Final = lru_cache(1 << 14)(_reading)


def _units(found: list[str]) -> Iterator[str]:
    """The tokens of a word without pairs: of a script without spaces, each character is one."""
    before = ""
    for token in found:
        if not (len(token) == 2 and len(before) == 1 and token[0] == before):
            yield token
        before = token


def _dice(a: Counter[str], b: Counter[str]) -> float:
    total = a.total() + b.total()
    return 2 * (a & b).total() / total if total else 1.0


_HEAVY_STEMS: Final = _HEAVY | {stem for word in _HEAVY for stem in tokens(word)}
