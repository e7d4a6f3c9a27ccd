"""The tokens of texts and queries, words that stand for a query's, and pieces of long texts.

A token is a stem ("running" and "runs" are "run"), a number, a word of another script, or, where a
script sets no spaces between words, a pair of neighbouring characters. Emoji, currency signs and
other symbols are tokens as well, and so is a word with its signs ("c#" beside "c"). Stop words stay
in documents and are dropped from queries, so a query of stop words alone still finds them.

Synonyms are a table inside the package, made from the static embedder's by `benchmarks/kinship.py`:
for each English stem its nearest, with the cosine. How common a word is in a language tells
another, made by `benchmarks/commonness.py`. Pieces overlap, so that an embedder gets all of a text.
"""

from __future__ import annotations

import io
import math
import re
import threading
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from importlib.resources import files
from itertools import chain, count
from operator import add
from typing import Final

import numpy as np
import Stemmer  # type: ignore[import-not-found]  # a C module without types
from numpy.typing import NDArray

from perdure.errors import ConfigurationError

SYNONYM_FILE: Final = "kin-en.npz"
STOP_WORD_FILE: Final = "stop-words.vocab"
ANALYZER = "en-3"  # stored with the tokens; if the stored name differs, they are made again

_MEMO_SIZE = 1 << 16  # 8 MB at most; a new word costs 1 µs, a known one 0.1 µs
_MAX_STEMMED_LENGTH = 32  # longer runs of letters are no English words

ENGLISH: Final = "english"  # languages have the names of their stemmers
NON_LATIN: Final = "other"  # all of other scripts than the Latin one

# scripts without spaces between words, and Hangul, whose words carry their particles
_UNSPACED_RANGES = (
    "\u0e01-\u0e4e\u0e81-\u0edf"  # Thai, Lao
    "\u1000-\u103f\u1050-\u109f\u1780-\u17d3"  # Myanmar, Khmer
    "\u1100-\u11ff\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff"
    "\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
# vowel signs and the like, which the regular expressions take for ends of words
_COMBINING_SIGNS = "".join(
    chr(code) for code in range(0x0483, 0x1D00) if unicodedata.category(chr(code)) in ("Mn", "Mc")
)
_WORD_PATTERN = rf"[^\W_](?:[^\W_]|[{_COMBINING_SIGNS}])*"
_THOUSANDS_PATTERN = r"(?<=\d),\d{3}(?![^\W_])"  # the digits of 1,000 are one number
_WORDS = re.compile(rf"{_WORD_PATTERN}(?:'{_WORD_PATTERN}|{_THOUSANDS_PATTERN})*")
_ASCII_WORDS = re.compile(rf"[a-z0-9]++(?:(?=[',])(?:'[a-z0-9]++|{_THOUSANDS_PATTERN}))*+")
# words with signs that are a part of them: c#, c++, .net, @ann, #tea, a*; and $ and %
_SIGNED_WORDS = re.compile(
    r"(?<![\w#+])[a-z0-9]+(?:#|\+{1,2})(?![\w#+])|(?<![\w.])\.[a-z][a-z0-9]*"
    r"|(?<![\w@#])[@#][a-z]\w*|(?<![\w*])[a-z0-9]\*(?![\w*])|[$%]"
)
_SIGN_HINTS = ("#", "+", "@", "$", "%", "*", " .", "(.")  # one is in a text with such words
_SYMBOLS = re.compile("[\U0001f1e6-\U0001f1ff]{2}|[^\\w\\s\x00-\x7f]")  # a flag has two characters
_SYMBOL_CATEGORIES = (
    "So",
    "Sc",
    "Sm",
)  # categories of Unicode: other, currency, mathematical symbols
_LETTERS_ONLY = re.compile(r"[^\W\d_]+")
_SCRIPT_RUNS = re.compile(rf"[{_UNSPACED_RANGES}]+|[^{_UNSPACED_RANGES}]+")
_UNSPACED_CHAR = re.compile(f"[{_UNSPACED_RANGES}]")
# й stays a letter of its own, by which Russian endings are known
_ACCENTS = re.compile("(?!(?<=\u0438)\u0306)[\u0300-\u036f\u0591-\u05bd\u064b-\u065f\u0670]")
_ELISION = re.compile(r"(?:[cdjlmnst]|qu)'(?=[^\W\d_]{2})")
_CONTRACTED_ENDING = re.compile(r"(?:n't|'(?:s|d|m|t|ll|re|ve))$")
_NEGATED_VERBS = {"wo": "will", "ca": "can", "sha": "shall"}  # won't, can't, shan't
_LETTER_VARIANTS = str.maketrans(
    dict.fromkeys("\u2018\u2019\u02bc\uff07\u00b4", "'")
    | {"ø": "o", "ł": "l", "đ": "d", "\u0131": "i", "æ": "ae", "œ": "oe", "ð": "d", "þ": "th"}
    | dict.fromkeys("\u0640\u00ad\u200c\u200d")  # tatweel, soft hyphen, joiners: nothing
    | {"\u200b": " "}
)
_STEMMER_BY_SCRIPT = {0x04: "russian", 0x06: "arabic"}  # by the first byte of their letters
# what tells in Japanese: katakana, long runs of hiragana, and anything else without its endings
_CONTENT_RUNS = re.compile(r"[\u30a1-\u30ff]+|[\u3041-\u309f]{3,}|[^\s\u3041-\u30ff]+")
_QUESTION_END = re.compile("[?\uff1f\u061f\u2047\u055e][\\s\"'\u201d\u2019)\\]]*$")

_local = threading.local()  # a stemmer object carries the word it works on


def tokenize(text: str) -> list[str]:
    """Every token of a document, in order, with repetitions.

    Of a script without spaces come each pair of neighbouring characters and each single one, so
    that a query of one character finds it.

    >>> tokenize("The runners' café isn't open: 1,000 visitors")
    ['the', 'runner', 'cafe', 'is', 'open', '1000', 'visitor']
    >>> tokenize("聊天记忆")
    ['聊', '聊天', '天', '天记', '记', '记忆', '忆']
    >>> tokenize("C# for 5 €")
    ['c', 'for', '5', 'c#', '€']
    """
    if text.isascii():
        words = _ASCII_WORDS.findall(text.lower())
        found_tokens = list(map(_TOKEN_OF_WORD.__getitem__, words))
    else:
        words, found_tokens = list(_iter_words(text)), []
        for word in words:
            if _is_unspaced(word):
                found_tokens += chain.from_iterable(
                    zip(word, map(add, word, word[1:]), strict=False)
                )
                found_tokens.append(word[-1])
            else:
                found_tokens.append(_TOKEN_OF_WORD[word])
    found_tokens += _find_signs(text)
    if foreign_stop_words().isdisjoint(words):
        return found_tokens
    unique = set(found_tokens)
    return found_tokens + [
        stem for _, stem in iter_stems(text, detect_language(text)) if stem not in unique
    ]


def tokenize_query(text: str) -> list[str]:
    """The tokens that a search looks for: each once, without stop words unless they are all.

    Of a script without spaces only the pairs count, and the character of a run of one.

    >>> tokenize_query("What did the runners run?")
    ['runner', 'run']
    >>> tokenize_query("who are you")
    ['who', 'are', 'you']
    >>> tokenize_query("聊天记忆")
    ['聊天', '天记', '记忆']
    """
    words = list(_iter_words(text))
    chosen = [word for word in words if word not in STOP_WORDS] or words
    query_tokens: dict[str, None] = {}
    for word in chosen:
        if _is_unspaced(word):
            query_tokens.update(
                dict.fromkeys(word[i : i + 2] for i in range(max(len(word) - 1, 1)))
            )
        else:
            query_tokens[_TOKEN_OF_WORD[word]] = None
    query_tokens.update(dict.fromkeys(_find_signs(text)))
    return list(query_tokens)


def extract_query_words(text: str) -> dict[str, str]:
    """The words that rank the answers to a query, each with its stem in the query's language.

    They are `query_tokens` without stop words of that language; of Chinese and Japanese what stands
    between function words, of Japanese without endings.

    >>> extract_query_words("Wo sind die Häuser?"), extract_query_words("我的狗叫什么名字")
    ({'hauser': 'haus'}, {'狗叫': '狗叫', '名字': '名字'})
    """
    language = detect_language(text)
    stem_in_language = dict(iter_stems(text, language))
    stop_list = stop_words(language)
    stem_of: dict[str, str] = {}
    for word in _iter_words(text):
        if _is_unspaced(word):
            for part in _CONTENT_RUNS.findall(_function_word_pattern().sub(" ", word)):
                pairs = [part[i : i + 2] for i in range(max(len(part) - 1, 1))]
                stem_of.update(zip(pairs, pairs, strict=True))
        elif word not in stop_list:
            stem_of[_TOKEN_OF_WORD[word]] = stem_in_language.get(word, _TOKEN_OF_WORD[word])
    stem_of.update((sign, sign) for sign in _find_signs(text))
    return stem_of or {token: token for token in tokenize_query(text)}


def ends_with_question(text: str) -> bool:
    """Whether a text ends as a question does.

    >>> ends_with_question("How was Rome?"), ends_with_question("Rome was warm.")
    (True, False)
    """
    return _QUESTION_END.search(text) is not None


def detect_language(text: str) -> str:
    """The language whose stop words a text has most of, by its stemmer's name; without any English.

    >>> texts = ["Wie heißt mein Hund?", "The man died in the war", "犬"]
    >>> [detect_language(text) for text in texts]
    ['german', 'english', 'other']
    """
    words = split_words(text)
    if not text.isascii() and sum(len(w) if w.isascii() else -len(w) for w in words) < 0:
        return NON_LATIN
    if foreign_stop_words().isdisjoint(words):
        return ENGLISH

    def count_stop_words(stops: frozenset[str]) -> int:
        return sum(map(stops.__contains__, words))

    lists = _load_stop_words()
    best = max(lists, key=lambda name: tuple(map(count_stop_words, lists[name])))
    foreign_only, stops = lists[best]
    min_count = max(2 - (not text.isascii()), count_stop_words(STOP_WORDS - stops) + 1)
    return best if count_stop_words(foreign_only) >= min_count else ENGLISH


def split_words(text: str) -> list[str]:
    """The runs of letters of a text, folded: `isn't` is two."""
    return _LETTERS_ONLY.findall(text.lower() if text.isascii() else _fold_letters(text))


def stop_words(language: str) -> frozenset[str]:
    """The stop words of a language, folded as words of texts are."""
    return _load_stop_words()[language][1]


@cache
def foreign_stop_words() -> frozenset[str]:
    """The stop words that tell other languages of Latin script from English."""
    return frozenset().union(*(telling for telling, _ in _load_stop_words().values()))


@cache
def _load_stop_words() -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    """For each language the stop words that tell it from English, and all: 1 ms."""
    lines = (files("perdure.stores") / "weights" / STOP_WORD_FILE).read_text("utf-8").splitlines()
    parts = [[part.split() for part in line.split("|")] for line in lines]
    return {name: (frozenset(some), frozenset(some + rest)) for (name,), some, rest in parts}


STOP_WORDS: Final = stop_words(ENGLISH)


@cache
def _function_word_pattern() -> re.Pattern[str]:
    """The function words of Chinese and Japanese, the longest first."""
    words = filter(_is_unspaced, stop_words(NON_LATIN))
    return re.compile("|".join(sorted(words, key=len, reverse=True)))


def is_misspellable(token: str) -> bool:
    """Whether a token may be a slip of another: four letters or more of a spaced script."""
    return 4 <= len(token) <= _MAX_STEMMED_LENGTH and token.isalpha() and not _is_unspaced(token)


def _iter_words(text: str) -> Iterator[str]:
    """The words of a text, folded: lower case, no accents, no endings that contractions leave."""
    if text.isascii():
        yield from map(_strip_contraction, _ASCII_WORDS.findall(text.lower()))
        return
    for word in _WORDS.findall(_fold_letters(text)):
        plain = _strip_contraction(word)
        if plain.isascii():
            yield plain
        else:
            yield from _SCRIPT_RUNS.findall(plain)


def _find_signs(text: str) -> list[str]:
    """Return the symbols of a text, and its words that have signs, in this order of kinds.

    >>> _find_signs("C++ and .NET, $5"), _find_signs("👩🏽‍💻 ate 🍕 in 🇳🇴, 20 °C → 5 €")
    (['c++', '.net', '$'], ['👩', '💻', '🍕', '🇳🇴', '°', '→', '€'])
    """
    signs: list[str] = []
    if text.startswith(".") or any(sign in text for sign in _SIGN_HINTS):
        signs += _SIGNED_WORDS.findall(text.lower())
    if not text.isascii():
        symbols = _SYMBOLS.findall(text)
        signs += [
            symbol for symbol in symbols if unicodedata.category(symbol[0]) in _SYMBOL_CATEGORIES
        ]
    return signs


def _fold_letters(text: str) -> str:
    """One form for all ways to write a letter; accents that only modify a letter go."""
    return unicodedata.normalize("NFC", _ACCENTS.sub("", _decompose(text)))


def _decompose(text: str) -> str:
    """The same with accents, each behind its letter."""
    return unicodedata.normalize("NFKD", text).casefold().translate(_LETTER_VARIANTS)


def _strip_contraction(word: str) -> str:
    """A word without what is elided or contracted, a number without commas."""
    if word.isalnum():
        return word
    word = _ELISION.sub("", word, count=1) if _ELISION.match(word) else word
    stripped = _CONTRACTED_ENDING.sub("", word)
    if word.endswith("n't"):
        stripped = _NEGATED_VERBS.get(stripped, stripped)
    return stripped.replace("'", "").replace(",", "")


def iter_stems(text: str, language: str) -> Iterator[tuple[str, str]]:
    """The telling words of a text with their stems, if its language is another of Latin script."""
    if language in (ENGLISH, NON_LATIN):
        return
    for word in map(
        _strip_contraction, _WORDS.findall(unicodedata.normalize("NFC", _decompose(text)))
    ):
        folded = _fold_letters(word)
        if folded.isascii() and folded not in stop_words(language):
            yield folded, _fold_letters(_stem_word(word, language))


def _is_unspaced(word: str) -> bool:
    """Whether a run of `_words` is of a script without spaces between words."""
    return not word.isascii() and _UNSPACED_CHAR.match(word) is not None


class _TokenMemo(dict[str, str]):
    """The tokens of words: stems of English, Russian and Arabic ones, any other as it is, plain."""

    def __missing__(self, word: str) -> str:
        plain = _strip_contraction(word)
        script = ENGLISH if plain.isascii() else _STEMMER_BY_SCRIPT.get(ord(plain[0]) >> 8, "")
        token = _stem_word(plain, script) if script and plain.isalpha() else plain
        if len(self) >= _MEMO_SIZE:
            self.clear()
        self[word] = token
        return token


_TOKEN_OF_WORD = _TokenMemo()


def _stem_word(word: str, language: str) -> str:
    """The stem of a word in a language.

    Source: https://snowballstem.org/algorithms; of English Porter's second ("Porter2")
    """
    if len(word) > _MAX_STEMMED_LENGTH:
        return word
    if not hasattr(_local, language):
        setattr(_local, language, Stemmer.Stemmer(language, 0))
    stem: str = getattr(_local, language).stemWord(word)
    return stem


# -- words near a word

_MIN_TWO_EDIT_LENGTH: Final = (
    6  # letters; from here two slips are forgiven, and one in the first letter
)
_MIN_EDIT_SIMILARITY: Final = 0.7  # 1 less slips per letter of the longer word


def find_synonyms(token: str) -> list[tuple[str, float]]:
    """The stems nearest in meaning to a token, nearest first, with similarity 0 to 1.

    >>> [stem for stem, _ in find_synonyms("buy")[:2]]
    ['purchas', 'bought']
    >>> find_synonyms("聊天")
    []
    """
    stems, numbers, starts, related, similarity = _load_synonyms()
    number = numbers.get(token)
    if number is None:
        return []
    section = slice(int(starts[number]), int(starts[number + 1]))
    pairs = zip(related[section].tolist(), similarity[section].tolist(), strict=True)
    return [(stems[other], share / 255) for other, share in pairs]


@cache
def _load_synonyms() -> tuple[
    list[str], dict[str, int], NDArray[np.uint32], NDArray[np.uint16], NDArray[np.uint8]
]:
    """Stems, their numbers, and for each a run of others with their nearness in 255ths: 10 ms."""
    raw = (files("perdure.stores") / "weights" / SYNONYM_FILE).read_bytes()
    with np.load(io.BytesIO(raw)) as arrays:
        stems = arrays["stems"].tobytes().decode("ascii").split("\n")
        numbers = {stem: number for number, stem in enumerate(stems)}
        return stems, numbers, arrays["starts"], arrays["kin"], arrays["near"]


# -- how common a word is

FREQUENCY_FILE: Final = "common.npz"
STEPS_PER_NAT: Final = 16  # of the table's numbers, to one of a logarithm to base e
_WORDS_PER_MESSAGE: Final = 15  # words of a message


@lru_cache(_MEMO_SIZE >> 2)
def message_frequency(token: str, language: str = ENGLISH) -> float:
    """The share of ordinary messages, of 15 words, in a language that have a token; 0: hardly any.

    Source: Speer, wordfreq (2022), https://doi.org/10.5281/zenodo.7199437, its small lists.

    >>> round(message_frequency("thank"), 3), message_frequency("xyzzy")
    (0.009, 0.0)
    """
    words, rarity = _load_frequencies(language)
    word = ("0" * len(token) if token.isdigit() and len(token) > 1 else token).encode()
    if len(word) > words.itemsize:  # numpy would make all words as long
        return 0.0
    position = int(np.searchsorted(words, word))
    if position == len(words) or words[position] != word:
        return 0.0
    return 1 - (1 - math.exp(int(rarity[position]) / -STEPS_PER_NAT)) ** _WORDS_PER_MESSAGE


@cache
def _load_frequencies(language: str) -> tuple[NDArray[np.bytes_], NDArray[np.uint8]]:
    """The tokens in order, and the logarithms of their shares in all words, times -16: 2 ms."""
    raw = (files("perdure.stores") / "weights" / FREQUENCY_FILE).read_bytes()
    with np.load(io.BytesIO(raw)) as arrays:
        words = arrays[f"{language} tokens"].tobytes().split(b"\n")
        return np.array(words), arrays[f"{language} rare"]


class Vocabulary(dict[str, int]):
    """Words with their numbers; a word that is looked up and not there gets the next number."""

    def __init__(self, words: Iterable[str] = ()) -> None:
        super().__init__(zip(words, count()))
        self._by_letters: dict[str, list[str]] = defaultdict(list)  # first one, last two
        self._indexed_count = 0  # how many words are in there
        self._lock_index = threading.Lock()

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        return number

    def similar_words(self, word: str) -> list[str]:
        """All words that `nearest` may answer: they begin or end like a word."""
        with self._lock_index:
            for other in (
                list(self)[self._indexed_count :] if self._indexed_count < len(self) else ()
            ):
                self._by_letters[other[:1]].append(other)
                self._by_letters[f"-{other[-2:]}"].append(other)
                self._indexed_count += 1
            return self._by_letters[word[:1]] + self._by_letters[f"-{word[-2:]}"]


def find_nearest_words(word: str, vocabulary: Iterable[str], limit: int = 1) -> list[str]:
    """The words that one may have been meant to be, nearest first, ties by the alphabet.

    One slip is forgiven, from six letters on two; the first letter must be right, or from six
    letters on the last two. Of two words of ordinary English neither is a slip of the other, but
    for an ending.

    >>> find_nearest_words("mountian", ["paint", "mountain", "fountain"])
    ['mountain']
    """
    size, first, last = len(word), word[:1], word[-2:]
    max_edits = 2 if size >= _MIN_TWO_EDIT_LENGTH else 1
    others = [
        other
        for other in dict.fromkeys(vocabulary)
        if (other[:1] == first or other[-2:] == last)
        and -max_edits <= len(other) - size <= max_edits
    ]
    candidates, is_english = [], message_frequency(word) > 0
    for other, edits in zip(others, edit_distances(word, others).tolist(), strict=True):
        shorter, longer = sorted((len(other), size))
        is_close = (
            0 < edits <= (2 if shorter >= _MIN_TWO_EDIT_LENGTH else 1)
            and 1 - edits / longer >= _MIN_EDIT_SIMILARITY
        )
        if is_english and is_close and not (other.startswith(word) or word.startswith(other)):
            is_close = not message_frequency(other)
        if is_close and (longer >= _MIN_TWO_EDIT_LENGTH or other[:1] == first):
            candidates.append((edits / longer, other))
    return [other for _, other in sorted(candidates)[:limit]]


def edit_distances(word: str, others: list[str]) -> NDArray[np.int64]:
    """For each of some words: letters inserted, dropped, changed or swapped with the next.

    Source: optimal string alignment distance, Boytsov (2011), "Indexing methods for approximate
    dictionary searching", section 2.2; computed for all words at once.

    >>> edit_distances("receive", ["recieve", "receiver"]).tolist()
    [1, 1]
    """
    sizes = np.array([len(other) for other in others], np.int64)
    width = int(sizes.max(initial=0))
    text = "".join(other.ljust(width, "\0") for other in others)
    letters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    letters = np.ascontiguousarray(letters.reshape(len(others), width).T)  # `[width, words]`
    last_row = np.repeat(np.arange(width + 1, dtype=np.int8)[:, None], len(others), axis=1)
    row_before_last, equal_before = last_row, np.zeros(letters.shape, bool)
    for i, letter in enumerate(word, 1):
        equal = letters == ord(letter)
        row = np.full_like(last_row, i)
        row[1:] = np.minimum(last_row[1:] + 1, last_row[:-1] + ~equal)
        if i > 1:
            swapped = equal[:-1] & equal_before[1:]
            row[2:] = np.where(swapped, np.minimum(row[2:], row_before_last[:-2] + 1), row[2:])
        for j in range(1, width + 1):
            np.minimum(row[j], row[j - 1] + 1, out=row[j])
        row_before_last, last_row, equal_before = last_row, row, equal
    return last_row[sizes, np.arange(len(others))].astype(np.int64)


# -- pieces

MAX_CHUNK_WORDS = 200
OVERLAP_WORDS = 20

# A unit is what counts as one word. Scripts without spaces count by characters, as do Hangul and
# kana, and a run without a space (an address, Thai) by 32.
_UNSEGMENTED_RANGES = (
    "\u1100-\u11ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
)
_UNSEGMENTED_RANGES += "\U00020000-\U0003ffff"
_MAX_UNIT_LENGTH = 32
_UNIT = re.compile(rf"[{_UNSEGMENTED_RANGES}]|[^\s{_UNSEGMENTED_RANGES}]{{1,{_MAX_UNIT_LENGTH}}}")
# between two units: the end of a sentence, or of a line
# (the wide marks are \u3002 \uff01 \uff1f, what may close after them \u300d \u300f \uff09)
_SENTENCE_END = re.compile(
    "[.!?\u2026][\"'\u201d\u2019)\\]]*\\s"
    "|[\u3002\uff01\uff1f][\u300d\u300f\u201d\u2019\uff09]*\\s*$|\\n"
)

_AT_SENTENCE_END, _AT_SPACE, _INSIDE_RUN = 2, 1, 0


def split_into_chunks(
    text: str, limit_words: int = MAX_CHUNK_WORDS, overlap_words: int = OVERLAP_WORDS
) -> list[str]:
    """Pieces of a text, in order; every character but white space is in one of them.

    They end where a sentence does, else at a space, else (no space near) anywhere, and begin in the
    end of the one before, so that what stands across a border is in one piece too.

    Args:
        text: A text that fits into one chunk comes back as it is; one without words as none.
        limit_words: The most words of a chunk. A Chinese, Japanese or Korean character counts as a
            word, and so do 32 characters without a space.
        overlap_words: How many words two neighbours share, about; at most a quarter of the limit.
    """
    if limit_words < 1 or overlap_words < 0:
        raise ConfigurationError(
            f"chunks of {limit_words!r} words with {overlap_words!r} shared: expected at least 1 "
            "and at least 0"
        )
    if len(text) <= limit_words:  # no need to count
        return [text] if text.strip() else []
    words = text.split() if text.isascii() else ()
    if words and len(words) <= limit_words and max(map(len, words)) <= _MAX_UNIT_LENGTH:
        return [text]
    units = [match.span() for match in _UNIT.finditer(text)]
    if len(units) <= limit_words:
        return [text] if units else []
    return _cut_at_units(text, units, limit_words, min(overlap_words, limit_words // 4))


def _cut_at_units(text: str, units: list[tuple[int, int]], limit: int, overlap: int) -> list[str]:
    def grade_cut(at: int) -> int:
        """The quality of a cut before a unit."""
        end, begin = units[at - 1][1], units[at][0]
        if _SENTENCE_END.search(text, max(end - 3, 0), begin):
            return _AT_SENTENCE_END
        return _AT_SPACE if begin > end else _INSIDE_RUN

    chunks = []
    start = 0
    while True:
        remaining = len(units) - start
        if remaining <= limit:
            chunks.append(text[units[start][0] : units[-1][1]])
            return chunks
        count = -(-(remaining - overlap) // (limit - overlap))
        size = -(
            -(remaining + (count - 1) * overlap) // count
        )  # alike, so that no last one is tiny
        last = start + size
        end = max(range(last - size // 4, last + 1), key=lambda at: (grade_cut(at), at))
        chunks.append(text[units[start][0] : units[end - 1][1]])
        start = max(range(end - overlap, end), key=lambda at: (grade_cut(at), -at), default=end)
