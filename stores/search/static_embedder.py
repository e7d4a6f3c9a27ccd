"""The default embedder: a static table of English word-piece vectors, included in the package.

The default embedder runs no neural network and needs no network access. The table was distilled
from the vocabulary of sentence-transformers/all-MiniLM-L6-v2 with model2vec's method.
`weights/NOTICE` states the origin of the table, and the script `benchmarks/static_embedder.py`
regenerates the table.
"""

from __future__ import annotations

import asyncio
import re
import threading
import unicodedata
from collections.abc import Sequence
from importlib.resources import files
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from perdure.errors import ConfigurationError
from perdure.stores.search.text import (
    ENGLISH,
    WordMemo,
    collect_non_english_stop_words,
    detect_language,
    split_words,
    tokenize,
)
from perdure.stores.search.vectors import Floats, scale_rows_to_unit_length

# name of the model; it ends with a hash of the files in `weights`
NAME = "perdure/static-en-256@d1a242f8a524"
DIMS = 256
# Id of the token [UNK], which stands for an unknown word. The table's row for [UNK] is zero, so
# unknown words do not affect a text's vector.
_UNKNOWN_ID = 1
# maximum length of a word in characters; a longer word counts as unknown, as in BERT's tokenizer
_MAX_WORD_LENGTH = 100
# A word that the tokenizer splits into n pieces counts as known if the word has at least
# `_MIN_PIECE_LENGTH * n - 1` letters.
_MIN_PIECE_LENGTH = 3
# If at most this fraction of a query's letters belong to words that the tokenizer knows, the
# query's vector is set to zero. In typical English queries, the fraction is at least 0.7; in "xyzzy
# plugh", it is 0.
_MIN_KNOWN_SHARE = 0.5
# maximum number of token vectors that are summed in one step, to limit memory use to 1 MB
_TOKENS_AT_ONCE = 4096

# Control characters that Python's str.split() treats as white space. BERT's tokenizer drops them,
# as it drops other control characters.
_CONTROL_SPACES = "\x0b\x0c\x1c\x1d\x1e\x1f\x85"
# matches the characters that BERT treats as Chinese
_CJK = re.compile(
    "[\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f"
    "\U0002b920-\U0002ceaf\uf900-\ufaff\U0002f800-\U0002fa1f]"
)


class _FoldedCharacters(dict[int, str]):
    """A `str.translate` table that maps each character of decomposed text to its replacement.

    Entries are added on demand.
    """

    def __missing__(self, code: int) -> str:
        folded = self[code] = _normalize_character_for_wordpiece(chr(code))
        return folded


def _normalize_character_for_wordpiece(char: str) -> str:
    """Normalize a character for the WordPiece tokenizer, and return the resulting string.

    The tokenizer replaces each character with its normalized form before a text is split into
    words.

    Letters become lower case. Punctuation and Chinese characters are surrounded with spaces, white
    space becomes a space, and combining accents and control characters are removed.
    """
    category = unicodedata.category(char)
    if category in ("Cc", "Cf", "Co", "Mn") or char == "\ufffd":
        return " " if char in "\t\n\r" else ""
    if char.isspace():
        return " "
    symbol = char.isascii() and not char.isalnum()
    if symbol or category[0] == "P" or _CJK.match(char):
        return f" {char} "
    return char.lower()


class WordPieceTokenizer:
    """Splits text into token ids as BERT's uncased tokenizer does.

    The tokenizer does not add [CLS] or [SEP] tokens, and does not truncate texts. The strings
    `[UNK]` and `[PAD]` have no special meaning in a text. Character classes come from Python's
    Unicode tables. Python's Unicode tables are newer than those of BERT's tokenizer. The tables
    differ only for writing systems that have no tokens in BERT's vocabulary.

    Source: https://arxiv.org/abs/1810.04805 and https://arxiv.org/abs/2012.15524 (greedy longest
    match first).
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        self._ids = dict(zip(tokens, range(len(tokens)), strict=True))
        self._longest = max(map(len, tokens), default=1)
        self._fold = _FoldedCharacters()
        # The two caches of token ids together take at most 10 MB.
        self._memo = WordMemo(self._tokenize_word)
        # The strings `lake`, `Lake,` and `"lake` share one cache entry, for the word `lake`.
        self._parts_memo = WordMemo(self._split_into_pieces)

    def token_ids(self, text: str) -> list[int]:
        """Return the token ids of a text, in order."""
        # Seven scans, each for one control character, are four times as fast as one regular
        # expression.
        for control in _CONTROL_SPACES:
            if control in text:
                text = text.replace(control, "")
        return list(chain.from_iterable(map(self._memo.__getitem__, text.split())))

    def compute_share_of_letters_in_known_words(self, text: str) -> float:
        """Return the fraction of a text's letters that belong to words known to this tokenizer.

        A word is known if the word itself or its stem splits into word pieces that are long enough.
        Words of one letter are not counted. If the text has no words of two or more letters, the
        returned fraction is 1.
        """
        letter_count = unknown_letter_count = 0
        for word in split_words(text):
            if len(word) > 1:
                letter_count += len(word)
                if not self._has_long_pieces(word) and not any(
                    map(self._has_long_pieces, tokenize(word))
                ):
                    unknown_letter_count += len(word)
        return 1 - unknown_letter_count / letter_count if letter_count else 1.0

    def _has_long_pieces(self, word: str) -> bool:
        """Return whether a word counts as known to the tokenizer.

        A word counts as known if it is split into tokens that are long enough on average.
        """
        return len(word) >= _MIN_PIECE_LENGTH * len(self._parts_memo[word]) - 1

    def clear_memo(self) -> None:
        """Drop the cached token ids of all words."""
        self._memo.clear()
        self._parts_memo.clear()

    def _tokenize_word(self, word: str) -> tuple[int, ...]:
        """Return the token ids of a run of non-space characters."""
        folded = unicodedata.normalize("NFD", word).translate(self._fold)
        return tuple(chain.from_iterable(map(self._parts_memo.__getitem__, folded.split())))

    def _split_into_pieces(self, word: str) -> tuple[int, ...]:
        """Return the token ids of a word.

        The word is split from left to right. At each position, the longest token in the vocabulary
        that matches the following characters is chosen. If no token matches at some position, the
        whole word is unknown, and only the id of the token for unknown words is returned. Tokens
        that do not begin a word have the prefix "##".
        """
        if len(word) > _MAX_WORD_LENGTH:
            return (_UNKNOWN_ID,)
        ids: list[int] = []
        start, prefix = 0, ""
        while start < len(word):
            for end in range(min(len(word), start + self._longest), start, -1):
                token_id = self._ids.get(prefix + word[start:end])
                if token_id is not None:
                    break
            else:
                return (_UNKNOWN_ID,)
            ids.append(token_id)
            start, prefix = end, "##"
        return tuple(ids)


class StaticEmbedder:
    """The default embedder, which runs offline and only supports English.

    On one CPU core, the embedder processes 12,000 texts per second if each text has 50 words.

    A text's vector is the normalised mean of the vectors of its tokens. The vector of a token is a
    row of the embedding table. A text has a zero vector if it is in a language other than English
    (see `perdure.stores.search.text.detect_language`), or if the embeddings of all its tokens are
    zero vectors. A zero vector is not similar to any other vector. The table also has rows for word
    pieces from other languages, but the vectors in these rows carry no meaning. The embeddings of
    the most frequent punctuation marks are zero vectors, so these marks do not affect a text's
    vector. A text's vector is independent of all other texts and of word order. Long texts are not
    truncated, but their vectors are averages over so many words that they carry little meaning. To
    get vectors that carry meaning, split long texts into chunks (see `perdure.stores.search.text`),
    and embed each chunk.

    The table is loaded once per process, on first use, in about 15 ms. An embedder can be shared
    between OS threads.
    """

    name = NAME
    dims = DIMS
    # This embedder is fast enough to compute vectors during searches, so stores do not save them.
    quick = True
    # calls need no timeout, because this embedder runs in the current process
    in_process = True

    def embed(self, texts: Sequence[str]) -> Floats:
        """Embed texts, and return a float32 array of shape `[len(texts), DIMS]`.

        Each row of the array is a unit vector or a zero vector. A text has a zero vector if it is
        in a language other than English, or if the embedding table contains only zero vectors for
        its tokens.
        """
        table, tokenizer, non_english_ids = _load_vector_table_tokenizer_and_non_english_ids()
        sums = np.zeros((len(texts), DIMS), np.float64)
        for row, text in enumerate(texts):
            token_ids = tokenizer.token_ids(text)
            if not non_english_ids.isdisjoint(token_ids) and detect_language(text) != ENGLISH:
                continue
            ids = np.array(token_ids, np.intp)
            for start in range(0, len(ids), _TOKENS_AT_ONCE):
                tokens = table.take(ids[start : start + _TOKENS_AT_ONCE], axis=0)
                sums[row] += np.add.reduce(tokens, axis=0, dtype=np.int32)
        return scale_rows_to_unit_length(sums)

    def embed_query(self, text: str) -> Floats:
        """Return the vector of a query.

        The vector is zero if `embed` would return a zero vector for the same text, if the query is
        not in English, or if at least half of the query's letters belong to unknown words.
        """
        is_known = (
            detect_language(text) == ENGLISH
            and _load_vector_table_tokenizer_and_non_english_ids()[
                1
            ].compute_share_of_letters_in_known_words(text)
            > _MIN_KNOWN_SHARE
        )
        vector: Floats = self.embed([text if is_known else ""])[0]
        return vector

    async def aembed(self, texts: Sequence[str]) -> Floats:
        """Embed texts in another OS thread; see `embed`."""
        return await asyncio.to_thread(self.embed, texts)

    def clear_cache(self) -> None:
        """Drop the cached token ids of words. The next texts take a little longer."""
        if _cached_weights is not None:
            _cached_weights[1].clear_memo()


_cached_weights: tuple[NDArray[np.int8], WordPieceTokenizer, frozenset[int]] | None = None
_weights_lock = threading.Lock()


def _load_vector_table_tokenizer_and_non_english_ids() -> tuple[
    NDArray[np.int8], WordPieceTokenizer, frozenset[int]
]:
    """Return the embedding table, the tokenizer, and the ids of non-English tokens.

    The table and vocabulary files are read once per process. A token counts as non-English if it is
    a stop word of another language or if it consists of letters that are not all ASCII. If a text
    contains no non-English tokens, `embed` treats it as English without detecting its language.

    Returns:
        The table, int8[tokens, DIMS]; the tokenizer; and the ids of non-English tokens.
    """
    global _cached_weights
    with _weights_lock:
        if _cached_weights is None:
            _cached_weights = _read_vector_table_tokenizer_and_non_english_ids()
        return _cached_weights


def _read_vector_table_tokenizer_and_non_english_ids() -> tuple[
    NDArray[np.int8], WordPieceTokenizer, frozenset[int]
]:
    """Read and validate the embedding table and the list of its tokens.

    Returns the same values as `_load_vector_table_tokenizer_and_non_english_ids`, without caching
    them.
    """
    folder = files("perdure.stores") / "weights"
    try:
        with (folder / "static-en-256.npy").open("rb") as file:
            table = np.load(file, allow_pickle=False)
        tokens = (folder / "static-en-256.vocab").read_text("utf-8").split("\n")
        if table.dtype != np.int8 or table.shape != (len(tokens), DIMS):
            raise ValueError(
                f"the embedding table has the dtype {table.dtype} and the shape {table.shape}; "
                f"expected int8 and {(len(tokens), DIMS)}"
            )
    except (OSError, ValueError, EOFError) as exc:
        raise ConfigurationError(
            f"the offline embedder's weights in {str(folder)!r} are missing or damaged ({exc}); "
            "reinstall perdure, or open the store with another embedder"
        ) from exc
    non_english_ids = (
        number
        for number, token in enumerate(tokens)
        if token in collect_non_english_stop_words()
        or (not token.isascii() and token.strip("#").isalpha())
    )
    return table, WordPieceTokenizer(tokens), frozenset(non_english_ids)
