"""The analyzer: the tokens of texts and queries.

A token is a stem ("running" and "runs" are "run"), a number, a word of another script, or, where a
script sets no spaces between words, a pair of neighbouring characters. Stop words stay in documents
and are dropped from queries, so a query of stop words alone still finds them.
"""

from __future__ import annotations

import re
import threading
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from operator import add

import Stemmer  # type: ignore[import-not-found]  # a C module without types

ANALYZER = "en-1"  # stored beside the tokens; another name there means they must be made again

_MEMO_WORDS = 1 << 16  # 8 MB at most; a new word costs 1 µs, a known one 0.1 µs
_LONGEST_STEMMED = 32  # longer runs of letters are no English words

_STOP_WORDS = """
    i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his
    himself she her hers herself it its itself they them their theirs themselves one a an the
    this that these those some any each such same other own no none
    am is are was were be been being do does did doing done have has had having will would shall
    should can could may might must ought let
    what which who whom whose when where why how
    and or but nor so yet if then else than because as while until although though since unless
    of at by for with about against between into through during before after above below to from
    up down in out on off over under again further upon within without toward towards
    not only very too also just now here there once ever more most much many few both all
    ain don didn doesn isn aren wasn weren hasn haven hadn wouldn shouldn couldn mustn needn
    s t d ll m re ve y
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())

# scripts without spaces between words, and Hangul, whose words carry their particles
_UNSPACED = (
    "\u0e01-\u0e4e\u0e81-\u0edf"  # Thai, Lao
    "\u1000-\u103f\u1050-\u109f\u1780-\u17d3"  # Myanmar, Khmer
    "\u1100-\u11ff\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff"
    "\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
# vowel signs and the like, which the regular expressions take for ends of words
_SIGNS = "".join(
    chr(code) for code in range(0x0483, 0x1D00) if unicodedata.category(chr(code)) in ("Mn", "Mc")
)
_MARKED = rf"[^\W_](?:[^\W_]|[{_SIGNS}])*"
_GROUPED = r"(?<=\d),\d{3}(?![^\W_])"  # the digits of 1,000 are one number
_WORDS = re.compile(rf"{_MARKED}(?:'{_MARKED}|{_GROUPED})*")
_ASCII_WORDS = re.compile(rf"[a-z0-9]+(?:'[a-z0-9]+|{_GROUPED})*")
_RUNS = re.compile(rf"[{_UNSPACED}]+|[^{_UNSPACED}]+")
_UNSPACED_CHAR = re.compile(f"[{_UNSPACED}]")
_ACCENTS = re.compile("[\u0300-\u036f\u0591-\u05bd\u064b-\u065f\u0670]")
_ELISION = re.compile(r"(?:[cdjlmnst]|qu)'(?=[^\W\d_]{2})")
_ENDING = re.compile(r"(?:n't|'(?:s|d|m|t|ll|re|ve))$")
_NOT = {"wo": "will", "ca": "can", "sha": "shall"}  # won't, can't, shan't
_LETTERS = str.maketrans(
    dict.fromkeys("\u2018\u2019\u02bc\uff07\u00b4", "'")
    | {"ø": "o", "ł": "l", "đ": "d", "\u0131": "i", "æ": "ae", "œ": "oe", "ð": "d", "þ": "th"}
    | dict.fromkeys("\u0640\u00ad\u200c\u200d")  # tatweel, soft hyphen, joiners: nothing
    | {"\u200b": " "}
)
_ASKS = re.compile("[?\uff1f\u061f\u2047\u055e][\\s\"'\u201d\u2019)\\]]*$")

_local = threading.local()  # a stemmer object carries the word it works on


def tokens(text: str) -> list[str]:
    """Every token of a document, in order, with repetitions.

    Of a script without spaces come each pair of neighbouring characters and each single one, so
    that a query of one character finds it.

    >>> tokens("The runners' café isn't open: 1,000 visitors")
    ['the', 'runner', 'cafe', 'is', 'open', '1000', 'visitor']
    >>> tokens("聊天记忆")
    ['聊', '聊天', '天', '天记', '记', '记忆', '忆']
    """
    if text.isascii():
        return list(map(_token, _ASCII_WORDS.findall(text.lower())))
    found: list[str] = []
    for word in _words(text):
        if _is_unspaced(word):
            found += chain.from_iterable(zip(word, map(add, word, word[1:]), strict=False))
            found.append(word[-1])
        else:
            found.append(_token(word))
    return found


def query_tokens(text: str) -> list[str]:
    """The tokens that a search looks for: each once, without stop words unless they are all.

    Of a script without spaces only the pairs count, and the character of a run of one.

    >>> query_tokens("What did the runners run?")
    ['runner', 'run']
    >>> query_tokens("who are you")
    ['who', 'are', 'you']
    >>> query_tokens("聊天记忆")
    ['聊天', '天记', '记忆']
    """
    words = list(_words(text))
    kept = [word for word in words if word not in STOP_WORDS] or words
    found: dict[str, None] = {}
    for word in kept:
        if _is_unspaced(word):
            found.update(dict.fromkeys(word[i : i + 2] for i in range(max(len(word) - 1, 1))))
        else:
            found[_token(word)] = None
    return list(found)


def asks(text: str) -> bool:
    """Whether a text ends as a question does.

    >>> asks("How was Rome?"), asks("Rome was warm.")
    (True, False)
    """
    return _ASKS.search(text) is not None


def is_misspellable(token: str) -> bool:
    """Whether a token may be a slip of another: four letters or more of a spaced script."""
    return 4 <= len(token) <= _LONGEST_STEMMED and token.isalpha() and not _is_unspaced(token)


def _words(text: str) -> Iterator[str]:
    """The words of a text, folded: lower case, no accents, no endings that contractions leave."""
    if text.isascii():
        yield from map(_plain, _ASCII_WORDS.findall(text.lower()))
        return
    for word in _WORDS.findall(_fold(text)):
        plain = _plain(word)
        if plain.isascii():
            yield plain
        else:
            yield from _RUNS.findall(plain)


def _fold(text: str) -> str:
    """One form for all ways to write a letter; accents that only modify a letter go."""
    apart = unicodedata.normalize("NFKD", text).casefold().translate(_LETTERS)
    return unicodedata.normalize("NFC", _ACCENTS.sub("", apart))


def _plain(word: str) -> str:
    """A word without what is elided or contracted, a number without commas."""
    if word.isalnum():
        return word
    word = _ELISION.sub("", word, count=1) if _ELISION.match(word) else word
    stripped = _ENDING.sub("", word)
    if word.endswith("n't"):
        stripped = _NOT.get(stripped, stripped)
    return stripped.replace("'", "").replace(",", "")


def _is_unspaced(word: str) -> bool:
    """Whether a run of `_words` is of a script without spaces between words."""
    return not word.isascii() and _UNSPACED_CHAR.match(word) is not None


@lru_cache(_MEMO_WORDS)
def _token(word: str) -> str:
    """The stem of an English word; any other word as it is, but plain.

    Source: Porter's English stemmer ("Porter2"), https://snowballstem.org/algorithms/english
    """
    word = _plain(word)
    if len(word) > _LONGEST_STEMMED or not (word.isascii() and word.isalpha()):
        return word
    if not hasattr(_local, "stemmer"):
        _local.stemmer = Stemmer.Stemmer("english", 0)
    stem: str = _local.stemmer.stemWord(word)
    return stem
