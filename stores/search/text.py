"""Text analysis for search: tokens, language detection, synonyms, spelling correction and chunks.

A token is a stem ("running" and "runs" become "run"), a number, or a word in a script without a
stemmer. In Chinese, Japanese, Korean and similar scripts, each pair of neighbouring characters is a
token. In documents, each single character of such a script, for example each Chinese character, is
also a token of its own. Emoji, currency signs and other symbols are also tokens. A word that
contains a symbol yields two tokens, one with the symbol and one without it ("c#" and "c"). Stop
words are kept in documents and dropped from queries. If a query consists only of stop words, the
search treats the stop words as ordinary words.

The package contains two tables. For each English stem, the synonym table lists the stems with the
most similar embeddings and their cosine similarities. The synonym table was computed by
`benchmarks/kinship.py` with the static embedder. The word frequency table lists the frequencies of
words in each language, and was computed by `benchmarks/commonness.py`. Long texts are split into
overlapping chunks, so that an embedder receives all of the text.
"""

from __future__ import annotations

import io
import math
import re
import threading
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from importlib.resources import files
from itertools import chain, count
from operator import add
from typing import Final, NamedTuple, TypeVar

import numpy as np
import Stemmer  # type: ignore[import-not-found]  # a C module without types
from numpy.typing import NDArray

from perdure.errors import ConfigurationError

T = TypeVar("T")
SYNONYM_FILE: Final = "kin-en.npz"
STOP_WORD_FILE: Final = "stop-words.vocab"
# version of the analyzer, which is recorded with each search index; an index with another analyzer
# version is rebuilt
ANALYZER = "en-3"

# maximum number of words in a word cache; the tokens in a full cache take at most 8 MB. Stemming a
# new word takes 1 µs, and a cache hit takes 0.1 µs.
_MEMO_SIZE = 1 << 16
# maximum length of a character sequence that is cached as a word; longer sequences seldom recur,
# because they are usually URLs, or text in scripts that use no spaces
_MAX_MEMO_LENGTH = 32
# maximum length, in letters, of a word that is stemmed; a longer sequence of letters is unlikely to
# be a word and is kept unchanged
_MAX_STEMMED_LENGTH = 32

# Each language is identified by the name of its Snowball stemmer, such as `english`.
ENGLISH: Final = "english"
# pseudo-language that stands for all languages with a non-Latin script
NON_LATIN: Final = "other"

# code point ranges of scripts without spaces between words, and of Hangul, in which particles are
# attached to words
_UNSPACED_RANGES = (
    "\u0e01-\u0e4e\u0e81-\u0edf"  # Thai, Lao
    "\u1000-\u103f\u1050-\u109f\u1780-\u17d3"  # Myanmar, Khmer
    "\u1100-\u11ff\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff"
    "\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
# combining vowel signs and similar characters, which the regular expression `\w` does not match
_COMBINING_SIGNS = "".join(
    chr(code) for code in range(0x0483, 0x1D00) if unicodedata.category(chr(code)) in ("Mn", "Mc")
)
_WORD_PATTERN = rf"[^\W_](?:[^\W_]|[{_COMBINING_SIGNS}])*"
_THOUSANDS_PATTERN = r"(?<=\d),\d{3}(?![^\W_])"  # "1,000" is one number
_WORDS = re.compile(rf"{_WORD_PATTERN}(?:'{_WORD_PATTERN}|{_THOUSANDS_PATTERN})*")
_ASCII_WORDS = re.compile(rf"[a-z0-9]++(?:(?=[',])(?:'[a-z0-9]++|{_THOUSANDS_PATTERN}))*+")
# matches words that contain a symbol (such as c#, c++, .net, @ann, #tea and a*), and the symbols $
# and %
_SIGNED_WORDS = re.compile(
    r"(?<![\w#+])[a-z0-9]+(?:#|\+{1,2})(?![\w#+])|(?<![\w.])\.[a-z][a-z0-9]*"
    r"|(?<![\w@#])[@#][a-z]\w*|(?<![\w*])[a-z0-9]\*(?![\w*])|[$%]"
)
# For speed, texts are first checked for `_SIGN_HINTS` and a leading dot. Only texts that pass the
# check are searched for words with symbols, such as "c#".
_SIGN_HINTS = ("#", "+", "@", "$", "%", "*", " .", "(.")
# matches a single symbol, such as an emoji; a flag emoji is a single symbol that consists of two
# code points
_SYMBOLS = re.compile("[\U0001f1e6-\U0001f1ff]{2}|[^\\w\\s\x00-\x7f]")
# the Unicode categories of symbols: currency (Sc), mathematical (Sm) and all other symbols (So)
_SYMBOL_CATEGORIES = (
    "So",
    "Sc",
    "Sm",
)
_LETTERS_ONLY = re.compile(r"[^\W\d_]+")
_SCRIPT_RUNS = re.compile(rf"[{_UNSPACED_RANGES}]+|[^{_UNSPACED_RANGES}]+")
_UNSPACED_CHAR = re.compile(f"[{_UNSPACED_RANGES}]")
# Matches the accents that are removed from letters. The Russian letter й keeps its accent, because
# the Russian stemmer distinguishes й from и.
_ACCENTS = re.compile("(?!(?<=\u0438)\u0306)[\u0300-\u036f\u0591-\u05bd\u064b-\u065f\u0670]")
_ELISION = re.compile(r"(?:[cdjlmnst]|qu)'(?=[^\W\d_]{2})")
_CONTRACTED_ENDING = re.compile(r"(?:n't|'(?:s|d|m|t|ll|re|ve))$")
# For irregular negative contractions, maps the part before "n't" to the verb, such as "wo" (from
# "won't") to "will".
_NEGATED_VERBS = {"wo": "will", "ca": "can", "sha": "shall"}
_LETTER_VARIANTS = str.maketrans(
    dict.fromkeys("\u2018\u2019\u02bc\uff07\u00b4", "'")
    | {"ø": "o", "ł": "l", "đ": "d", "\u0131": "i", "æ": "ae", "œ": "oe", "ð": "d", "þ": "th"}
    # Tatweels, soft hyphens, and zero-width joiners and non-joiners are removed from words.
    | dict.fromkeys("\u0640\u00ad\u200c\u200d")
    | {"\u200b": " "}
)
_STEMMER_BY_SCRIPT = {0x04: "russian", 0x06: "arabic"}  # by the upper byte of their code points
# content words in Japanese: katakana, long runs of hiragana, and kanji without inflectional endings
_CONTENT_RUNS = re.compile(r"[\u30a1-\u30ff]+|[\u3041-\u309f]{3,}|[^\s\u3041-\u30ff]+")
_QUESTION_END = re.compile("[?\uff1f\u061f\u2047\u055e][\\s\"'\u201d\u2019)\\]]*$")

_local = threading.local()  # A stemmer has state, so each OS thread has its own stemmers.


def tokenize(text: str) -> list[str]:
    """Return all tokens of a document, including repeated ones.

    In the returned list, the tokens that were made from words come first, in the order of the text.
    The list ends with words that contain symbols, such as `c#`, and with standalone symbols.

    In a script without spaces between words, each pair of neighbouring characters is a token. In
    scripts without spaces, each character is also a token, so that one-character queries find the
    document. For a non-English document, the returned list also contains the stems in the
    document's language.

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
    found_tokens += _find_words_with_symbols_and_lone_symbols(text)
    if collect_non_english_stop_words().isdisjoint(words):
        return found_tokens
    unique = set(found_tokens)
    return found_tokens + [
        stem for _, stem in iter_stems(text, detect_language(text)) if stem not in unique
    ]


def tokenize_query(text: str) -> list[str]:
    """Return the tokens to search for, without duplicates.

    Stop words are dropped unless the query consists only of stop words. In a script without spaces
    between words, each pair of neighbouring characters is a token. An isolated character is also a
    token.

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
    query_tokens.update(dict.fromkeys(_find_words_with_symbols_and_lone_symbols(text)))
    return list(query_tokens)


def extract_query_words_with_stems(text: str) -> dict[str, str]:
    """Return a dict from each query token used in ranking to its stem in the query's language.

    The dict contains a token for each symbol in the query, such as an emoji, and for each word with
    a symbol, such as `c#`. It also contains the tokens of all words that are not stop words of the
    query's language. Function words are removed from Chinese and Japanese text, and the text
    between them is treated as separate words. In Japanese, the grammatical endings of words are
    removed. If the query consists only of stop words or function words, the dict contains every
    token that `tokenize_query` returns.

    >>> extract_query_words_with_stems("Wo sind die Häuser?")
    {'hauser': 'haus'}
    >>> extract_query_words_with_stems("我的狗叫什么名字")
    {'狗叫': '狗叫', '名字': '名字'}
    """
    language = detect_language(text)
    stem_in_language = dict(iter_stems(text, language))
    stop_list = stop_words(language)
    stem_of: dict[str, str] = {}
    for word in _iter_words(text):
        if _is_unspaced(word):
            for part in _CONTENT_RUNS.findall(_build_function_word_pattern().sub(" ", word)):
                pairs = [part[i : i + 2] for i in range(max(len(part) - 1, 1))]
                stem_of.update(zip(pairs, pairs, strict=True))
        elif word not in stop_list:
            stem_of[_TOKEN_OF_WORD[word]] = stem_in_language.get(word, _TOKEN_OF_WORD[word])
    signs = _find_words_with_symbols_and_lone_symbols(text)
    stem_of.update(zip(signs, signs, strict=True))
    return stem_of or {token: token for token in tokenize_query(text)}


def ends_with_question(text: str) -> bool:
    """Return whether a text ends with a question mark, ignoring closing quotes and brackets.

    >>> ends_with_question("How was Rome?"), ends_with_question("Rome was warm.")
    (True, False)
    """
    return _QUESTION_END.search(text) is not None


def detect_language(text: str) -> str:
    """Detect the language of a text by counting the stop words of each language.

    Returns:
        The name of the language's Snowball stemmer, `ENGLISH` if the text has too few stop
        words of another language, or `NON_LATIN` if most letters are of another script.

    >>> texts = ["Wie heißt mein Hund?", "The man died in the war", "犬"]
    >>> [detect_language(text) for text in texts]
    ['german', 'english', 'other']
    """
    words = split_words(text)
    if (
        not text.isascii()
        and sum(len(word) if word.isascii() else -len(word) for word in words) < 0
    ):
        return NON_LATIN
    if collect_non_english_stop_words().isdisjoint(words):
        return ENGLISH

    def count_stop_words(stops: frozenset[str]) -> int:
        return sum(map(stops.__contains__, words))

    lists_by_language = _load_non_english_and_all_stop_words()
    best_language = max(
        lists_by_language, key=lambda name: tuple(map(count_stop_words, lists_by_language[name]))
    )
    foreign_only, stops = lists_by_language[best_language]
    # Stop words that the language shares with English are not counted. The text must contain at
    # least one other stop word of the language if it has characters outside ASCII, and at least two
    # otherwise. These stop words must also outnumber the English-only stop words in the text.
    min_count = max(2 - (not text.isascii()), count_stop_words(STOP_WORDS - stops) + 1)
    return best_language if count_stop_words(foreign_only) >= min_count else ENGLISH


def split_words(text: str) -> list[str]:
    """Split a text into runs of letters, after converting it to lower case and removing accents.

    For example, the text `isn't` is split into `isn` and `t`.
    """
    return _LETTERS_ONLY.findall(
        text.lower() if text.isascii() else _lowercase_and_strip_accents(text)
    )


def stop_words(language: str) -> frozenset[str]:
    """Return the stop words of a language.

    The stop words are normalized: variants of a letter are replaced with one form.
    """
    return _load_non_english_and_all_stop_words()[language][1]


@cache
def collect_non_english_stop_words() -> frozenset[str]:
    """Return the stop words of all Latin-script languages except English.

    A stop word of another language that is also an English stop word is not returned.
    """
    return frozenset().union(
        *(foreign_words for foreign_words, _ in _load_non_english_and_all_stop_words().values())
    )


@cache
def _load_non_english_and_all_stop_words() -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    """Load two sets of stop words for each language.

    Each language's name is mapped to a tuple of two sets: the stop words that are not also English
    stop words, and all stop words.

    Loading takes 1 ms.
    """
    lines = (files("perdure.stores") / "weights" / STOP_WORD_FILE).read_text("utf-8").splitlines()
    parts = [[part.split() for part in line.split("|")] for line in lines]
    return {
        name: (frozenset(foreign_words), frozenset(foreign_words + other_words))
        for (name,), foreign_words, other_words in parts
    }


STOP_WORDS: Final = stop_words(ENGLISH)


@cache
def _build_function_word_pattern() -> re.Pattern[str]:
    """Return a regular expression that matches Chinese and Japanese function words.

    Longer words are tried first.
    """
    return re.compile(
        "|".join(sorted(filter(_is_unspaced, stop_words(NON_LATIN)), key=len, reverse=True))
    )


def is_eligible_for_spelling_correction(token: str) -> bool:
    """Return whether spelling correction applies to a token.

    Spelling correction applies to tokens of 4 to 32 letters in scripts that separate words with
    spaces.
    """
    return 4 <= len(token) <= _MAX_STEMMED_LENGTH and token.isalpha() and not _is_unspaced(token)


def _iter_words(text: str) -> Iterator[str]:
    """Yield the words of a text in lower case.

    Accents and contracted endings such as "n't" are removed. A word is split where a script that
    separates words with spaces (such as Latin) meets a script that does not (such as Chinese).
    """
    if text.isascii():
        yield from map(_strip_contraction, _ASCII_WORDS.findall(text.lower()))
        return
    for word in _WORDS.findall(_lowercase_and_strip_accents(text)):
        plain = _strip_contraction(word)
        if plain.isascii():
            yield plain
        else:
            yield from _SCRIPT_RUNS.findall(plain)


def _find_words_with_symbols_and_lone_symbols(text: str) -> list[str]:
    """Return the words that contain a symbol, such as "c#", and the symbols outside words.

    >>> _find_words_with_symbols_and_lone_symbols("C++ and .NET, $5")
    ['c++', '.net', '$']
    >>> _find_words_with_symbols_and_lone_symbols("👩🏽‍💻 ate 🍕 in 🇳🇴, 20 °C → 5 €")
    ['👩', '💻', '🍕', '🇳🇴', '°', '→', '€']
    """
    signs: list[str] = []
    if text.startswith(".") or any(map(text.__contains__, _SIGN_HINTS)):
        signs += _SIGNED_WORDS.findall(text.lower())
    if not text.isascii():
        symbols = _SYMBOLS.findall(text)
        signs += [
            symbol for symbol in symbols if unicodedata.category(symbol[0]) in _SYMBOL_CATEGORIES
        ]
    return signs


def _lowercase_and_strip_accents(text: str) -> str:
    """Convert text to lower case, and replace variants of letters with base letters.

    For example, `ø` is replaced with `o`, and `æ` is replaced with `ae`.

    Accents are removed from all letters except the Russian letter й.
    """
    return unicodedata.normalize("NFC", _ACCENTS.sub("", _decompose(text)))


def _decompose(text: str) -> str:
    """Convert text to lower case, and split each accented letter into the letter and its accent."""
    return unicodedata.normalize("NFKD", text).casefold().translate(_LETTER_VARIANTS)


def _strip_contraction(word: str) -> str:
    """Strip elisions (l') and contracted endings (n't) from a word, and commas from a number."""
    if word.isalnum():
        return word
    word = _ELISION.sub("", word, count=1) if _ELISION.match(word) else word
    stripped = _CONTRACTED_ENDING.sub("", word)
    if word.endswith("n't"):
        stripped = _NEGATED_VERBS.get(stripped, stripped)
    return stripped.replace("'", "").replace(",", "")


def iter_stems(text: str, language: str) -> Iterator[tuple[str, str]]:
    """Yield each word of a text that is not a stop word, with its stem in the given language.

    Words that contain non-Latin letters are skipped. If `language` is English or `NON_LATIN`, no
    words are yielded.
    """
    if language in (ENGLISH, NON_LATIN):
        return
    for word in map(
        _strip_contraction, _WORDS.findall(unicodedata.normalize("NFC", _decompose(text)))
    ):
        folded = _lowercase_and_strip_accents(word)
        if folded.isascii() and folded not in stop_words(language):
            yield folded, _lowercase_and_strip_accents(_stem_word(word, language))


def _is_unspaced(word: str) -> bool:
    """Return whether a word is in a script without spaces between words."""
    return not word.isascii() and _UNSPACED_CHAR.match(word) is not None


class WordMemo(dict[str, T]):
    """A cache of a value for each word. If a word is not cached, looking it up computes its value.

    The values of long words are not cached, because long words seldom recur. When the cache is
    full, it is cleared.
    """

    def __init__(self, compute_value: Callable[[str], T]) -> None:
        self._compute_value = compute_value

    def __missing__(self, word: str) -> T:
        value = self._compute_value(word)
        if len(word) <= _MAX_MEMO_LENGTH:
            if len(self) >= _MEMO_SIZE:
                self.clear()
            self[word] = value
        return value


def _find_token_of_word(word: str) -> str:
    """Return the token of a word.

    The token is the English stem for a word in ASCII letters, the Russian stem for a Cyrillic word,
    and the Arabic stem for a word in Arabic script. Any other word is its own token.
    """
    plain = _strip_contraction(word)
    script = ENGLISH if plain.isascii() else _STEMMER_BY_SCRIPT.get(ord(plain[0]) >> 8, "")
    return _stem_word(plain, script) if script and plain.isalpha() else plain


_TOKEN_OF_WORD = WordMemo(_find_token_of_word)


def _stem_word(word: str, language: str) -> str:
    """Return a word's stem in the given language.

    Source: https://snowballstem.org/algorithms; for English, Porter's second algorithm ("Porter2")
    """
    if len(word) > _MAX_STEMMED_LENGTH:
        return word
    if not hasattr(_local, language):
        setattr(_local, language, Stemmer.Stemmer(language, 0))
    stem: str = getattr(_local, language).stemWord(word)
    return stem


# -- synonyms and corrections

# Minimum number of letters in a long word, for spelling correction. A misspelt word and its
# correction may differ by two edits only if both words are long. Their first letters may differ
# only if at least one of the two words is long.
_MIN_TWO_EDIT_LENGTH: Final = 6
# Minimum similarity between a misspelt word and its correction, defined as 1 - (number of edits /
# length of the longer word).
_MIN_EDIT_SIMILARITY: Final = 0.7


def find_synonyms(token: str) -> list[tuple[str, float]]:
    """Return the stems closest in meaning to a token, with similarities from 0 to 1.

    >>> [stem for stem, _ in find_synonyms("buy")[:2]]
    ['purchas', 'bought']
    >>> find_synonyms("聊天")
    []
    """
    table = _load_synonym_table()
    number = table.number_of_stem.get(token)
    if number is None:
        return []
    section = slice(int(table.section_starts[number]), int(table.section_starts[number + 1]))
    synonyms = map(table.stems.__getitem__, table.synonym_numbers[section].tolist())
    return list(zip(synonyms, (table.similarities[section] / 255).tolist(), strict=True))


class _SynonymTable(NamedTuple):
    """The synonyms of each stem.

    The arrays `synonym_numbers` and `similarities` have one section of consecutive elements for
    each stem.

    Attributes:
        stems: The stems.
        number_of_stem: The index of each stem in `stems`.
        section_starts: The start of each stem's section.
        synonym_numbers: The numbers of the stems that are synonyms.
        similarities: The similarity of each synonym, in units of 1/255.
    """

    stems: list[str]
    number_of_stem: dict[str, int]
    section_starts: NDArray[np.uint32]
    synonym_numbers: NDArray[np.uint16]
    similarities: NDArray[np.uint8]


@cache
def _load_synonym_table() -> _SynonymTable:
    """Load the table of synonyms. Takes 10 ms."""
    raw = (files("perdure.stores") / "weights" / SYNONYM_FILE).read_bytes()
    with np.load(io.BytesIO(raw)) as arrays:
        stems = arrays["stems"].tobytes().decode("ascii").split("\n")
        return _SynonymTable(
            stems,
            {stem: number for number, stem in enumerate(stems)},
            arrays["starts"],
            arrays["kin"],
            arrays["near"],
        )


# -- frequency of words

FREQUENCY_FILE: Final = "common.npz"
# Scale factor for stored word frequencies. A relative frequency f is stored as -ln(f) times this
# factor, rounded to an integer.
STEPS_PER_NAT: Final = 16
# assumed average number of words per message
_WORDS_PER_MESSAGE: Final = 15


@lru_cache(_MEMO_SIZE >> 2)
def estimate_share_of_messages_with_word(token: str, language: str = ENGLISH) -> float:
    """Estimate what fraction of the messages written in a given language contain a given token.

    The estimate uses the token's frequency in the language, and assumes that a message has 15
    words.

    If the token is not in the language's frequency list, the returned fraction is 0.

    Source: the small word lists of Speer, wordfreq (2022), https://doi.org/10.5281/zenodo.7199437.

    >>> [round(estimate_share_of_messages_with_word(word), 3) for word in ("thank", "xyzzy")]
    [0.009, 0.0]
    """
    words, rarity = _load_word_frequencies(language)
    # In the frequency list, the digits of numbers with two or more digits are replaced with zeros,
    # so 000 stands for every three-digit number.
    word = ("0" * len(token) if token.isdigit() and len(token) > 1 else token).encode()
    # A token that is longer than every token in the frequency list is not looked up, because numpy
    # would first copy the entire list to an array of longer strings.
    if len(word) > words.itemsize:
        return 0.0
    position = int(np.searchsorted(words, word))
    if position == len(words) or words[position] != word:
        return 0.0
    return 1 - (1 - math.exp(int(rarity[position]) / -STEPS_PER_NAT)) ** _WORDS_PER_MESSAGE


@cache
def _load_word_frequencies(language: str) -> tuple[NDArray[np.bytes_], NDArray[np.uint8]]:
    """Load the sorted tokens of a language and their frequencies.

    A relative frequency f is stored as `-STEPS_PER_NAT * ln(f)`, rounded to an integer.

    Takes 2 ms.
    """
    raw = (files("perdure.stores") / "weights" / FREQUENCY_FILE).read_bytes()
    with np.load(io.BytesIO(raw)) as arrays:
        words = arrays[f"{language} tokens"].tobytes().split(b"\n")
        return np.array(words), arrays[f"{language} rare"]


class Vocabulary(defaultdict[str, int]):
    """Words with their numbers.

    Looking up a new word adds it to the dict and assigns the next number to it.
    """

    def __init__(self, words: Iterable[str] = ()) -> None:
        number_by_word = dict(zip(words, count()))
        super().__init__(count(len(number_by_word)).__next__, number_by_word)
        # Maps an initial letter ("a") or a two-letter ending ("-ed") to the words that have it.
        self._by_letters: dict[str, list[str]] = defaultdict(list)
        self._indexed_count = 0  # number of words in `_by_letters`
        self._lock_index = threading.Lock()

    def similar_words(self, word: str) -> list[str]:
        """Return the words that share their first letter or last two letters with the given word.

        Spelling correction considers only the words that this method returns (see
        `find_nearest_words`).
        """
        with self._lock_index:
            for other in (
                list(self)[self._indexed_count :] if self._indexed_count < len(self) else ()
            ):
                self._by_letters[other[:1]].append(other)
                self._by_letters[f"-{other[-2:]}"].append(other)
                self._indexed_count += 1
            return self._by_letters[word[:1]] + self._by_letters[f"-{word[-2:]}"]


def find_nearest_words(word: str, vocabulary: Iterable[str], limit: int = 1) -> list[str]:
    """Return likely corrections of a misspelt word, closest first.

    Equally similar words are returned in alphabetical order. The edit distance between a misspelt
    word and its correction is at most 1, or at most 2 if both have at least six letters, and never
    exceeds 30% of the longer word's length. Usually, a correction begins with the same letter as
    the misspelt word. If a correction and the misspelt word begin with different letters, two
    conditions apply. The two words must have the same last two letters. At least one of the two
    words must have six or more letters. A word in the English frequency list is corrected to
    another word in that list only if one of the two words is a prefix of the other.

    >>> find_nearest_words("mountian", ["paint", "mountain", "fountain"])
    ['mountain']
    """
    length, first_letter, last_letters = len(word), word[:1], word[-2:]
    max_edits = 2 if length >= _MIN_TWO_EDIT_LENGTH else 1
    others = [
        other
        for other in dict.fromkeys(vocabulary)
        if (other[:1] == first_letter or other[-2:] == last_letters)
        and -max_edits <= len(other) - length <= max_edits
    ]
    candidates, is_english = [], estimate_share_of_messages_with_word(word) > 0
    for other, edits in zip(others, compute_edit_distances(word, others).tolist(), strict=True):
        shorter, longer = sorted((len(other), length))
        is_close = (
            0 < edits <= (2 if shorter >= _MIN_TWO_EDIT_LENGTH else 1)
            and 1 - edits / longer >= _MIN_EDIT_SIMILARITY
        )
        if is_english and is_close and not (other.startswith(word) or word.startswith(other)):
            is_close = not estimate_share_of_messages_with_word(other)
        if is_close and (longer >= _MIN_TWO_EDIT_LENGTH or other[:1] == first_letter):
            candidates.append((edits / longer, other))
    return [other for _, other in sorted(candidates)[:limit]]


def compute_edit_distances(word: str, others: list[str]) -> NDArray[np.int64]:
    """Return the edit distance between a word and each of the other words.

    An edit inserts, deletes or substitutes a letter, or transposes two adjacent letters.

    Source: optimal string alignment distance, Boytsov (2011), "Indexing methods for approximate
    dictionary searching", section 2.2. The distances to all words in `others` are computed at once,
    with numpy operations.

    >>> compute_edit_distances("receive", ["recieve", "receiver"]).tolist()
    [1, 1]
    """
    sizes = np.array(list(map(len, others)), np.int64)
    width = int(sizes.max(initial=1))
    # numpy pads shorter words with NUL characters.
    letters = np.array(others, f"=U{width}").view(np.uint32).reshape(len(others), width)
    letters = np.ascontiguousarray(letters.T)  # `[width, words]`
    last_row = np.repeat(np.arange(width + 1, dtype=np.int8)[:, None], len(others), axis=1)
    row_before_last, equal_before = last_row, np.zeros(letters.shape, bool)
    for i, letter in enumerate(word, 1):
        equal = letters == ord(letter)
        row = np.full_like(last_row, i)
        row[1:] = np.minimum(last_row[1:] + 1, last_row[:-1] + ~equal)
        if i > 1:
            swapped = equal[:-1] & equal_before[1:]
            row[2:] = np.where(swapped, np.minimum(row[2:], row_before_last[:-2] + 1), row[2:])
        for column in range(1, width + 1):
            np.minimum(row[column], row[column - 1] + 1, out=row[column])
        row_before_last, last_row, equal_before = last_row, row, equal
    return last_row[sizes, np.arange(len(others))].astype(np.int64)


# -- chunks

MAX_CHUNK_WORDS = 200
OVERLAP_WORDS = 20

# The length of a chunk is measured in units. A unit is usually a word. In Chinese, Japanese and
# Korean, each character is a unit. A long string without spaces, such as a URL, is divided into
# units of 32 characters.
_UNSEGMENTED_RANGES = (
    "\u1100-\u11ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
)
_UNSEGMENTED_RANGES += "\U00020000-\U0003ffff"
_MAX_UNIT_LENGTH = 32
_UNIT = re.compile(rf"[{_UNSEGMENTED_RANGES}]|[^\s{_UNSEGMENTED_RANGES}]{{1,{_MAX_UNIT_LENGTH}}}")
# Matches the end of a sentence or of a line. The pattern is applied to the last characters of a
# word and the white space before the next word. Its three alternatives match Latin punctuation,
# Chinese and Japanese punctuation (written as code points), and line breaks.
_SENTENCE_END = re.compile(
    "[.!?\u2026][\"'\u201d\u2019)\\]]*\\s"
    "|[\u3002\uff01\uff1f][\u300d\u300f\u201d\u2019\uff09]*\\s*$|\\n"
)

_AT_SENTENCE_END, _AT_SPACE, _INSIDE_RUN = 2, 1, 0


def split_into_chunks(
    text: str, limit_words: int = MAX_CHUNK_WORDS, overlap_words: int = OVERLAP_WORDS
) -> list[str]:
    """Split a text into overlapping chunks, in order. Only white space can be lost.

    A chunk ends at a sentence boundary if possible, otherwise at a space, and otherwise at any
    position. Neighbouring chunks overlap, because each chunk except the first begins by repeating
    the last few words of the preceding chunk. Because neighbouring chunks overlap, a short passage
    at a chunk boundary is complete in at least one chunk.

    Args:
        text: The text. A short text is returned unchanged as the only chunk. A text without words
            has no chunks.
        limit_words: The maximum number of words in a chunk. A Chinese, Japanese or Korean character
            counts as a word, and so do 32 characters without a space.
        overlap_words: The approximate number of words that two neighbouring chunks share; at most a
            quarter of the limit.

    Raises:
        ConfigurationError: A limit is out of range.
    """
    if limit_words < 1 or overlap_words < 0:
        raise ConfigurationError(
            f"the chunk limit is {limit_words!r} words and the overlap is {overlap_words!r} words; "
            "expected a limit of at least 1 and an overlap of at least 0"
        )
    # A text never has more words than characters. A text with at most `limit_words` characters is
    # therefore returned without counting its words.
    if len(text) <= limit_words:
        return [text] if text.strip() else []
    words = text.split() if text.isascii() else ()
    if words and len(words) <= limit_words and max(map(len, words)) <= _MAX_UNIT_LENGTH:
        return [text]
    unit_spans = [match.span() for match in _UNIT.finditer(text)]
    if len(unit_spans) <= limit_words:
        return [text] if unit_spans else []
    return _split_into_even_chunks(
        text, unit_spans, limit_words, min(overlap_words, limit_words // 4)
    )


def _split_into_even_chunks(
    text: str, unit_spans: list[tuple[int, int]], max_units: int, overlap_units: int
) -> list[str]:
    """Split a text into chunks of about equal size.

    A unit is a word, or a Chinese, Japanese or Korean character. The text must be too long for a
    single chunk, that is, it must contain more than `max_units` units.

    Args:
        text: The text.
        unit_spans: The start and end of each unit in the text.
        max_units: The maximum number of units in a chunk.
        overlap_units: The maximum number of units that two neighbouring chunks share.
    """

    def grade_cut(at: int) -> int:
        """Return a score (a grade) for how suitable a chunk boundary before unit `at` is.

        A higher grade is better.
        """
        end, begin = unit_spans[at - 1][1], unit_spans[at][0]
        if _SENTENCE_END.search(text, max(end - 3, 0), begin):
            return _AT_SENTENCE_END
        return _AT_SPACE if begin > end else _INSIDE_RUN

    chunks = []
    start = 0
    while True:
        remaining = len(unit_spans) - start
        if remaining <= max_units:
            chunks.append(text[unit_spans[start][0] : unit_spans[-1][1]])
            return chunks
        count = -(-(remaining - overlap_units) // (max_units - overlap_units))
        # Divide the remaining text into chunks of about equal size, so that the last chunk is not
        # tiny.
        size = -(-(remaining + (count - 1) * overlap_units) // count)
        last = start + size
        end = max(range(last - size // 4, last + 1), key=lambda at: (grade_cut(at), at))
        chunks.append(text[unit_spans[start][0] : unit_spans[end - 1][1]])
        start = max(
            range(end - overlap_units, end), key=lambda at: (grade_cut(at), -at), default=end
        )
