"""Long texts cut into pieces that each can stand as a memory, where paragraphs or sentences end."""

from __future__ import annotations

import re
from typing import Final

_ENDS: Final = (
    re.compile(r"\n\s*\n"),
    re.compile(r"\n|[.!?\u2026][\"'\u201d\u2019)\]]*\s|[\u3002\uff01\uff1f][\u300d\u300f\u201d]*"),
    re.compile(r"\s"),
)
_LEAST: Final = 0.5  # of the room: an end before that makes pieces of a few words


def pieces(text: str, limit: int, most: int) -> tuple[list[str], int]:
    """Pieces of at most `limit` characters, in order, which leave out nothing but white space.

    Args:
        text: What is cut.
        limit: Characters of a piece.
        most: How many pieces at most; what comes after them is not looked at.

    Returns:
        The pieces, and how many characters of the text are left over.

    >>> pieces("One thing. Another thing.", 12, 9)
    (['One thing.', 'Another', 'thing.'], 0)
    >>> pieces("One thing. Another thing.", 12, 1)
    (['One thing.'], 14)
    """
    found: list[str] = []
    text = text.strip()
    begin = 0
    while begin < len(text) and len(found) < most:
        window = text[begin : begin + limit + 1]
        cut = _cut(window, limit) if len(window) > limit else len(window)
        found.append(window[:cut].rstrip())
        begin += cut
        while begin < len(text) and text[begin].isspace():
            begin += 1
    return found, len(text) - begin


def _cut(window: str, limit: int) -> int:
    """Where to cut a text that is longer than the limit: after a paragraph, sentence or word."""
    for end in _ENDS:
        ends = [match.end() for match in end.finditer(window)]
        # what is cut off is white space, which is not counted
        fitting = [place for place in ends if len(window[:place].rstrip()) <= limit]
        if fitting and fitting[-1] >= limit * _LEAST:
            return fitting[-1]
    return limit
