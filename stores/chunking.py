"""Chunks of long texts, which overlap, so that an embedder gets all of a text."""

from __future__ import annotations

import re

from perdure.errors import ConfigurationError

LIMIT_WORDS = 200
OVERLAP_WORDS = 20

# A unit is what counts as one word. Scripts without spaces count by characters, as do Hangul and
# kana, and a run without a space (an address, Thai) by 32.
_UNSEGMENTED = "\u1100-\u11ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_UNSEGMENTED += "\U00020000-\U0003ffff"
_LONGEST_UNIT = 32
_UNIT = re.compile(rf"[{_UNSEGMENTED}]|[^\s{_UNSEGMENTED}]{{1,{_LONGEST_UNIT}}}")
# between two units: the end of a sentence, or of a line
# (the wide marks are \u3002 \uff01 \uff1f, what may close after them \u300d \u300f \uff09)
_SENTENCE_END = re.compile(
    "[.!?\u2026][\"'\u201d\u2019)\\]]*\\s"
    "|[\u3002\uff01\uff1f][\u300d\u300f\u201d\u2019\uff09]*\\s*$|\\n"
)

_SENTENCE, _SPACE, _INSIDE = 2, 1, 0


def chunks(
    text: str, limit_words: int = LIMIT_WORDS, overlap_words: int = OVERLAP_WORDS
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
    if words and len(words) <= limit_words and max(map(len, words)) <= _LONGEST_UNIT:
        return [text]
    units = [found.span() for found in _UNIT.finditer(text)]
    if len(units) <= limit_words:
        return [text] if units else []
    return _cut(text, units, limit_words, min(overlap_words, limit_words // 4))


def _cut(text: str, units: list[tuple[int, int]], limit: int, overlap: int) -> list[str]:
    def grade(at: int) -> int:
        """The quality of a cut before a unit."""
        end, begin = units[at - 1][1], units[at][0]
        if _SENTENCE_END.search(text, max(end - 3, 0), begin):
            return _SENTENCE
        return _SPACE if begin > end else _INSIDE

    pieces = []
    start = 0
    while True:
        left = len(units) - start
        if left <= limit:
            pieces.append(text[units[start][0] : units[-1][1]])
            return pieces
        count = -(-(left - overlap) // (limit - overlap))
        size = -(-(left + (count - 1) * overlap) // count)  # alike, so that no last one is tiny
        last = start + size
        end = max(range(last - size // 4, last + 1), key=lambda at: (grade(at), at))
        pieces.append(text[units[start][0] : units[end - 1][1]])
        start = max(range(end - overlap, end), key=lambda at: (grade(at), -at), default=end)
