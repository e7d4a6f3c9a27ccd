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


def pieces(text: str, limit: int) -> list[str]:
    """Pieces of at most `limit` characters, in order, which leave out nothing but white space.

    >>> pieces("One thing. Another thing.", 12)
    ['One thing.', 'Another', 'thing.']
    """
    found, rest = [], text.strip()
    while len(rest) > limit:
        cut = _cut(rest[: limit + 1], limit)
        found.append(rest[:cut].rstrip())
        rest = rest[cut:].lstrip()
    return [*found, rest] if rest else found


def _cut(window: str, limit: int) -> int:
    """Where to cut a text that is longer than the limit: after a paragraph, sentence or word."""
    for end in _ENDS:
        ends = [match.end() for match in end.finditer(window)]
        # what is cut off is white space, which is not counted
        fitting = [place for place in ends if len(window[:place].rstrip()) <= limit]
        if fitting and fitting[-1] >= limit * _LEAST:
            return fitting[-1]
    return limit
