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
from collections.abc import Callable, Sequence
from importlib.resources import files
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from perdure.errors import ConfigurationError
from perdure.stores.text import (
    ENGLISH,
    collect_non_english_stop_words,
    detect_language,
    split_words,
    tokenize,
)
from perdure.stores.vectors import Floats, scale_rows_to_unit_length

# name of the model; it ends with a hash of the files in `weights`
NAME = "perdure/static-en-256@d1a242f8a524"
DIMS = 256
# Id of the token [UNK], which stands for an unknown word. The table's row for [UNK] is zero, so
# unknown words do not affect a text's vector.
_UNKNOWN_ID = 1
# maximum length of a word in characters; a longer word counts as unknown, as in BERT's tokenizer
_MAX_WORD_LENGTH = 100
# maximum number of words in each of the two token id caches, which together take at most 10 MB
_MEMO_SIZE = 1 << 16
# maximum length of a character sequence whose token ids are cached; longer sequences seldom recur,
# because they are usually URLs, or text in scripts that use no spaces
_MAX_MEMO_LENGTH = 32
# Minimum average length of a known word's pieces, in letters. A word may be one letter short of
# this minimum: a word of n pieces is known if it has at least 3 * n - 1 letters.
_MIN_PIECE_LENGTH = 3
# If at most this fraction of a query's letters belong to known words, the query's vector is zero.
# For English queries, the fraction is 0.7 or more; for "xyzzy plugh", it is 0.
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
    """Return the text that replaces a character before a text is split into words.

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


class _TokenMemo(dict[str, tuple[int, ...]]):
    """A cache of the token ids of words.

    If a word is not cached, looking it up computes its token ids. Token ids of long words are not
    cached, because long words seldom recur. When the cache is full, it is cleared.
    """

    def __init__(self, compute_ids: Callable[[str], tuple[int, ...]]) -> None:
        self._compute_ids = compute_ids

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = self._compute_ids(word)
        if len(word) <= _MAX_MEMO_LENGTH:
            if len(self) >= _MEMO_SIZE:
                self.clear()
            self[word] = ids
        return ids


class WordPieceTokenizer:
    """Splits text into token ids as BERT's uncased tokenizer does.

    The tokenizer does not add [CLS] or [SEP] tokens, and does not truncate texts. The strings
    `[UNK]` and `[PAD]` have no special meaning in a text. Character classes come from Python's
    Unicode tables, which are newer than those of BERT's own tokenizer. The difference between the
    two versions of the Unicode tables affects only writing systems that have no tokens in BERT's
    vocabulary.

    Source: https://arxiv.org/abs/1810.04805 and https://arxiv.org/abs/2012.15524 (greedy longest
    match first).
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        self._ids = dict(zip(tokens, range(len(tokens)), strict=True))
        self._longest = max(map(len, tokens), default=1)
        self._fold = _FoldedCharacters()
        self._memo = _TokenMemo(self._tokenize_word)
        # The strings `lake`, `Lake,` and `"lake` share one cache entry, for the word `lake`.
        self._parts_memo = _TokenMemo(self._split_into_pieces)

    def token_ids(self, text: str) -> list[int]:
        """Return the token ids of a text, in order."""
        # Scanning the text once for each of the seven control characters is four times as fast as
        # using one regular expression.
        for control in _CONTROL_SPACES:
            if control in text:
                text = text.replace(control, "")
        return list(chain.from_iterable(map(self._memo.__getitem__, text.split())))

    def compute_share_of_letters_in_known_words(self, text: str) -> float:
        """Return the fraction of a text's letters that belong to known words.

        A word is known if the word itself or its stem splits into word pieces that are long enough.
        Words of one letter are not counted. If the text contains no longer words, the result is 1.
        """
        words = [word for word in split_words(text) if len(word) > 1]
        unknown_words = [word for word in words if not self._has_long_pieces(word)]
        unknown_letters = sum(
            len(word)
            for word in unknown_words
            if not any(map(self._has_long_pieces, tokenize(word)))
        )
        return 1 - unknown_letters / sum(map(len, words)) if words else 1.0

    def _has_long_pieces(self, word: str) -> bool:
        """Return whether the word pieces of a word are long enough for it to count as known."""
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
        that matches the following characters is chosen. If no token matches at some position, only
        the id of the token for unknown words is returned. Tokens that do not begin a word have the
        prefix "##".
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

    On one core, it embeds 12,000 texts of 50 words per second.

    A text's vector is the normalised mean of the table rows of its tokens. A text has a zero vector
    if it is in a language other than English (see `perdure.stores.text.detect_language`), or if the
    table rows of all its tokens are zero vectors. A zero vector is not similar to any other vector.
    The table also has rows for word pieces from other languages, but the vectors in these rows
    carry no meaning. The table rows of the most frequent punctuation marks are zero vectors, so
    these marks do not affect a text's vector. A text's vector is independent of all other texts and
    of word order. Long texts are not truncated, but their vectors are averages over so many words
    that they carry little meaning. Therefore, split long texts into chunks (see
    `perdure.stores.text`), and embed each chunk.

    The table is loaded once per process, on first use, in about 15 ms. An embedder can be shared
    between OS threads.
    """

    name = NAME
    dims = DIMS
    # the embedder is fast enough that stores compute vectors during searches instead of saving them
    quick = True
    # calls need no timeout, because the embedder runs in this process
    in_process = True

    def embed(self, texts: Sequence[str]) -> Floats:
        """Embed texts as unit vectors or zero vectors; float32[len(texts), DIMS]."""
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

        The vector is zero if `embed` would return a zero vector for the text, if the query is not
        in English, or if at least half of its letters belong to unknown words.
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

    The table and vocabulary files are read once per process. Non-English tokens are stop words of
    other languages and tokens with letters outside ASCII. For a text that contains none of these
    tokens, `embed` skips language detection and treats the text as English.

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
            "install perdure again, or open the store with another embedder"
        ) from exc
    non_english_ids = (
        number
        for number, token in enumerate(tokens)
        if token in collect_non_english_stop_words()
        or (not token.isascii() and token.strip("#").isalpha())
    )
    return table, WordPieceTokenizer(tokens), frozenset(non_english_ids)
