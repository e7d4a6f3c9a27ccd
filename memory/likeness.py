"""Likeness of texts: whether two say the same, letter for letter or but for how they put it.

Two facts may share nearly all words and be opposites, so what is counted is not how much they have
in common but whether anything that carries meaning differs. Only words that carry none, and the
endings of words, may.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from hashlib import blake2b
from typing import Final, NamedTuple

from perdure.memory.normal_form import NUMBER, PUNCTUATION, unified
from perdure.memory.normal_form import normal as normal
from perdure.memory.word_reading import LIGHT, reading
from perdure.stores.text import STOP_WORDS, asks, tokens

_PARTS: Final = re.compile(
    rf"(?P<word>[^\W\d]\w*(?:'\w+)*)|(?P<number>{NUMBER}(?!\w))|(?P<mixed>\w+)"
    # signs stay: C++ is not C#, 5 % not 5, and a raised thumb not a lowered one
    rf"|[^\w\s{re.escape(PUNCTUATION)}]"
)
# light words that link others, and may not stand for each other
_LINKS: Final = {
    **dict.fromkeys(("am", "is", "are", "be", "being"), "be"),
    **dict.fromkeys(("has", "have"), "have"),
    **dict.fromkeys(("do", "does"), "do"),
    **{word: word for word in ("been", "of", "to", "'s")},
    **dict.fromkeys(("a", "an"), "a"),
}
_VERBS: Final = frozenset({"be", "been", "have", "do", "'s"})
_TOWARDS: Final = frozenset({"of", "to"})
_AGAINST: Final = frozenset("\U0001f44e\u274c\U0001f6ab\u26d4\u274e\u2716\u2717\u2718\U0001f645")
# after which "to swim" is "swimming", and after which there may be an "of"
_BEGUN: Final = frozenset({"like", "love", "hate", "prefer", "start", "begin", "continu"})
_WHOLES: Final = frozenset({"all", "both", "half", "outsid", "insid"})
_HEAVY_WORDS: Final = """
    never nobody nothing nowhere neither without hardly barely scarcely cannot less least fewer
    yesterday today tomorrow tonight last next first second third former
    two three four five six seven eight nine ten eleven twelve twenty hundred thousand million
    half twice monday tuesday wednesday thursday friday saturday sunday january february march
    april june july august september october november december
    nicht kein keine keinen nie niemals ohne ne pas jamais non sans nunca jamás sin não sem
    не нет ни никогда без
"""
_HEAVY: Final = (STOP_WORDS - LIGHT) | frozenset(_HEAVY_WORDS.split())
_OWNERS: Final = frozenset({"my", "your", "his", "her", "our", "their"})
_GROUPED: Final = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_MOST_UNALIKE: Final = 0.89  # of texts of which a word that carries meaning differs
_CONTRARY: Final = 0.5


def same(a: str, b: str) -> bool:
    """Whether two texts are equal but for capitals, punctuation, spaces and forms of letters.

    A question is not what it asks, nor an A- an A.

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


def digest(text: str) -> str:
    """BLAKE2b-128, in hexadecimal, of a text in its normal form."""
    plain = normal(text).encode("utf-8", "surrogatepass")
    return blake2b(plain, digest_size=16).hexdigest()


class _Word(NamedTuple):
    stem: str
    surface: str
    named: bool
    leading: bool
    links: frozenset[str]  # light words before it that tell how it goes with what is before them

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

    def linked_as(self, other: _Word, after: str) -> bool:
        """Whether light words before two words of one stem link them alike to the stem before."""
        ing = self.surface.endswith("ing") or other.surface.endswith("ing")
        towards = (self.links ^ other.links) & _TOWARDS
        begun = ing and after in _BEGUN and towards == {"to"}
        if towards and not begun and not (after in _WHOLES and towards == {"of"}):
            return False
        mine, theirs = self.links & _VERBS, other.links & _VERBS
        if mine == theirs or ing:  # has been moving, is moving, moves
            return True
        if mine and theirs:
            return mine | theirs == {"'s", "be"}
        only = mine | theirs
        return only in ({"do"}, {"'s"}) or (only == {"be"} and self.surface == other.surface)

    def numbered_as(self, other: _Word) -> int:
        """0: of two words of one stem neither is the other with an s; 1: this one is; -1: that."""
        least, most = sorted((self.surface, other.surface), key=len)
        if most not in (f"{least}s", f"{least}es", f"{least[:-1]}ies"):
            return 0
        return 1 if most == self.surface else -1


class Wording:
    """A text taken apart, to be compared with others.

    Args:
        text: The text.
    """

    __slots__ = ("_asks", "_counted", "_light", "_links", "_signs", "_stems", "_words", "normal")

    def __init__(self, text: str) -> None:
        self.normal = normal(text)
        self._asks = asks(text)
        self._light: Counter[str] = Counter()
        self._signs: Counter[str] = Counter()
        self._words: list[_Word] = []
        self._links: set[str] = set()  # of the word that comes next
        self._take_apart(unified(text))
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
        pairs = list(zip(self._words, other._words, strict=True))
        stems = ["", *self._stems]
        return (
            self._means_as(other)
            and all(mine.agrees(theirs) for mine, theirs in pairs)
            and all(mine.linked_as(theirs, stems[i]) for i, (mine, theirs) in enumerate(pairs))
            and _end_alike(self._links, other._links)
            and _counts_alike(pairs)
        )

    def _means_as(self, other: Wording) -> bool:
        """Whether both ask, or neither; and signs are equal, but for emoji that only one has."""
        if self._asks != other._asks:
            return False
        signs = self._signs | other._signs
        return self._signs == other._signs or (
            not (self._signs and other._signs)
            and _AGAINST.isdisjoint(signs)
            and all(unicodedata.category(sign) == "So" for sign in signs)
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
                    self._add(number, number)
                case _:
                    self._signs.update(part)

    def _take(self, word: str) -> None:
        low = word.casefold()
        if word == "A" and self._words:  # vitamin A is not vitamins
            self._add("a", "a", named=True)
            return
        for base, stems in reading(low):
            if not stems:
                self._light[base] += 1
                self._link(base)
            for stem in stems:
                self._add(stem, base, named=word[0].isupper(), leading=not self._words)

    def _link(self, word: str) -> None:
        if word in _LINKS:
            self._links.add(_LINKS[word])
            if self._links >= {"'s", "been"}:  # Ann's been to Rome
                self._links = self._links - {"'s"} | {"have"}

    def _add(self, stem: str, surface: str, *, named: bool = False, leading: bool = False) -> None:
        self._words.append(_Word(stem, surface, named, leading, frozenset(self._links)))
        self._links.clear()


def _end_alike(mine: set[str], theirs: set[str]) -> bool:
    """Whether light words at the ends of two texts, after all else, say the same."""
    return mine - {"a", "'s"} == theirs - {"a", "'s"}


def _counts_alike(pairs: list[tuple[_Word, _Word]]) -> bool:
    """Whether two texts of the same stems speak of as many: a glass is not glasses."""
    article, before, seen = False, "", set()
    for mine, theirs in pairs:
        article = article or ("a" in mine.links) != ("a" in theirs.links)
        if more := mine.numbered_as(theirs):
            owned = before in _OWNERS or "'s" in mine.links & theirs.links
            # in "brothers live" and "brother lives" an s goes from one word to the other
            if article or owned or -more in seen:
                return False
            seen.add(more)
        before = mine.surface
    return True


def _dice(a: Counter[str], b: Counter[str]) -> float:
    total = a.total() + b.total()
    return 2 * (a & b).total() / total if total else 1.0


_HEAVY_STEMS: Final = _HEAVY | {stem for word in _HEAVY for stem in tokens(word)}
