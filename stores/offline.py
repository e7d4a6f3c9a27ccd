"""The default embedder: a static table of English word pieces inside the package, read with numpy.

No neural network runs and nothing is fetched. The table was made from the vocabulary of
sentence-transformers/all-MiniLM-L6-v2 by the method of model2vec; `weights/NOTICE` tells where it
comes from, and `benchmarks/static_embedder.py` makes it again.
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
from perdure.stores.text import ENGLISH, detect_language, foreign_stop_words, split_words, tokenize
from perdure.stores.vectors import Floats, normalize_rows

NAME = "perdure/static-en-256@d1a242f8a524"
DIMS = 256
_UNKNOWN_ID = 1  # [UNK]: its row is zero, so it moves no text
_MAX_WORD_LENGTH = 100  # characters; the original gives up on longer ones
_MEMO_SIZE = 1 << 16  # about 10 MB at most, for words and for their parts
_MAX_MEMO_LENGTH = 32  # longer runs are addresses and unsegmented scripts: they seldom come again
_MIN_PIECE_LENGTH = 3  # letters: words that are made of shorter pieces are not covered
# of a query: those of English data have 0.7 and more; "thx", "xyzzy plugh" and "Haha, stimmt" 0
_MIN_KNOWN_SHARE = 0.5
_TOKENS_AT_ONCE = 4096  # 1 MB of rows

# str.split() parts words at these; the original drops them, as it does all control characters
_CONTROL_SPACES = "\x0b\x0c\x1c\x1d\x1e\x1f\x85"
_CJK = re.compile(  # what BERT calls a Chinese character
    "[\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f"
    "\U0002b920-\U0002ceaf\uf900-\ufaff\U0002f800-\U0002fa1f]"
)


class _FoldedCharacters(dict[int, str]):
    """The replacement of each character of a decomposed text; filled on demand."""

    def __missing__(self, code: int) -> str:
        folded = self[code] = _fold_character(chr(code))
        return folded


def _fold_character(char: str) -> str:
    """Lower-cased and without accents; a character that is a token of its own is set apart."""
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
    """The ids of words; a new word is looked up, and remembered if it is likely to come again."""

    def __init__(self, look_up: Callable[[str], tuple[int, ...]]) -> None:
        self._tokenize_word = look_up

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = self._tokenize_word(word)
        if len(word) <= _MAX_MEMO_LENGTH:
            if len(self) >= _MEMO_SIZE:
                self.clear()
            self[word] = ids
        return ids


class WordPieceTokenizer:
    """Text to token ids, as BERT's uncased tokeniser has them (without [CLS], [SEP] or truncation).

    `[UNK]` and `[PAD]` written in a text are text. Character classes are those of Python's Unicode
    tables, which are newer than the original's: they part in scripts that no token covers.

    Source: https://arxiv.org/abs/1810.04805 and https://arxiv.org/abs/2012.15524 (greedy longest
    match first).
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        self._ids = dict(zip(tokens, range(len(tokens)), strict=True))
        self._longest = max(map(len, tokens), default=1)
        self._fold = _FoldedCharacters()
        self._memo = _TokenMemo(self._tokenize_word)
        self._parts_memo = _TokenMemo(
            self._match_pieces
        )  # `lake` once, for `lake`, `Lake,` and `"lake`

    def token_ids(self, text: str) -> list[int]:
        """The ids of a text's tokens, in order."""
        for control in _CONTROL_SPACES:  # seven scans: a quarter of the time that a pattern takes
            if control in text:
                text = text.replace(control, "")
        return list(chain.from_iterable(map(self._memo.__getitem__, text.split())))

    def known_share(self, text: str) -> float:
        """The share of a text's letters in words which, or whose stems, are of long pieces."""
        words = [word for word in split_words(text) if len(word) > 1]
        unknown = [word for word in words if not self._has_long_pieces(word)]
        missed = sum(
            len(word) for word in unknown if not any(map(self._has_long_pieces, tokenize(word)))
        )
        return 1 - missed / sum(map(len, words)) if words else 1.0

    def _has_long_pieces(self, word: str) -> bool:
        return len(word) >= _MIN_PIECE_LENGTH * len(self._parts_memo[word]) - 1

    def clear_memo(self) -> None:
        """Drop the words that are remembered."""
        self._memo.clear()
        self._parts_memo.clear()

    def _tokenize_word(self, word: str) -> tuple[int, ...]:
        """The ids of what stands between two spaces."""
        folded = unicodedata.normalize("NFD", word).translate(self._fold)
        return tuple(chain.from_iterable(map(self._parts_memo.__getitem__, folded.split())))

    def _match_pieces(self, part: str) -> tuple[int, ...]:
        """The longest token that begins the word, then the longest that goes on from there."""
        if len(part) > _MAX_WORD_LENGTH:
            return (_UNKNOWN_ID,)
        ids: list[int] = []
        start, prefix = 0, ""
        while start < len(part):
            for end in range(min(len(part), start + self._longest), start, -1):
                token_id = self._ids.get(prefix + part[start:end])
                if token_id is not None:
                    break
            else:
                return (_UNKNOWN_ID,)
            ids.append(token_id)
            start, prefix = end, "##"
        return tuple(ids)


class StaticEmbedder:
    """The default embedder: English, offline, 12,000 texts of 50 words a second on one core.

    A text's vector is the mean of its tokens' rows, of length 1. A text in another language (by
    `perdure.stores.text.detect_language`; the table has pieces of its words, which mean nothing) or
    with no token of the vocabulary (only commonest punctuation, whose rows are zero) is a zero
    vector: it is like nothing. It does not depend on the texts beside it. The order of words
    does not count and no text is cut, so a long one says little: embed it by chunks
    (`perdure.stores.text`).

    The table is read at the first use, once a process, 15 ms. Threads may share an object.
    """

    name = NAME
    dims = DIMS
    quick = True  # a store has its vectors made by the search, and stores none
    in_process = True  # it computes here: nothing to wait for, so no watch is kept over it

    def embed(self, texts: Sequence[str]) -> Floats:
        """The vectors of texts, each of length 1, or zero."""
        table, pieces, foreign = _load_weights()
        sums = np.zeros((len(texts), DIMS), np.float64)
        for row, text in enumerate(texts):
            numbers = pieces.token_ids(text)
            if not foreign.isdisjoint(numbers) and detect_language(text) != ENGLISH:
                continue
            ids = np.array(numbers, np.intp)
            for start in range(0, len(ids), _TOKENS_AT_ONCE):
                tokens = table.take(ids[start : start + _TOKENS_AT_ONCE], axis=0)
                sums[row] += np.add.reduce(tokens, axis=0, dtype=np.int32)
        return normalize_rows(sums)

    def embed_query(self, text: str) -> Floats:
        """The vector of a query; zero as well if most of its words are only pieces to the table."""
        is_known = (
            detect_language(text) == ENGLISH
            and _load_weights()[1].known_share(text) > _MIN_KNOWN_SHARE
        )
        vector: Floats = self.embed([text if is_known else ""])[0]
        return vector

    async def aembed(self, texts: Sequence[str]) -> Floats:
        """The same as `embed`, in a thread."""
        return await asyncio.to_thread(self.embed, texts)

    def clear_cache(self) -> None:
        """Forget the words that were met; the next texts take a little longer."""
        if _cached_weights is not None:
            _cached_weights[1].clear_memo()


_cached_weights: tuple[NDArray[np.int8], WordPieceTokenizer, frozenset[int]] | None = None
_weights_lock = threading.Lock()


def _load_weights() -> tuple[NDArray[np.int8], WordPieceTokenizer, frozenset[int]]:
    """The table, int8[tokens, DIMS], the tokeniser over its vocabulary, and foreign tokens' ids.

    Foreign are stop words of other languages and letters of other scripts: a text with none of them
    is taken for English without a closer look. Read once a process.
    """
    global _cached_weights
    with _weights_lock:
        if _cached_weights is None:
            _cached_weights = _read_weights()
        return _cached_weights


def _read_weights() -> tuple[NDArray[np.int8], WordPieceTokenizer, frozenset[int]]:
    folder = files("perdure.stores") / "weights"
    try:
        with (folder / "static-en-256.npy").open("rb") as file:
            table = np.load(file, allow_pickle=False)
        tokens = (folder / "static-en-256.vocab").read_text("utf-8").split("\n")
        if table.dtype != np.int8 or table.shape != (len(tokens), DIMS):
            raise ValueError(f"a table of {table.dtype}{table.shape} for {len(tokens)} tokens")
    except (OSError, ValueError, EOFError) as exc:
        raise ConfigurationError(
            f"the offline embedder's weights in {str(folder)!r} are missing or damaged ({exc}); "
            "install perdure again, or give the store another embedder"
        ) from exc
    foreign = (
        number
        for number, token in enumerate(tokens)
        if token in foreign_stop_words() or (not token.isascii() and token.strip("#").isalpha())
    )
    return table, WordPieceTokenizer(tokens), frozenset(foreign)
