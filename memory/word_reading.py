"""What a word of a text stands for: a contraction for several, and each for its stem."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from perdure.stores.text import tokens

_LIGHT_WORDS: Final = """
    a an the this that these those am is are be been being do does has have of to 's
    very just really also too so quite now currently please
"""
LIGHT: Final = frozenset(_LIGHT_WORDS.split())
_LIGHT_CHARS: Final = re.compile("[\u7684\u306e]|\u3067\u3059$")  # 的, の, です at an end
_NEGATED: Final = re.compile(
    r"(?:(is|are|was|were|do|does|did|has|have|had|wo|would|ca|could|should|must|need|ai|sha)n'?t"
    r"|can(not))"
)
_WHOLE: Final = {"wo": "will", "ca": "can", "sha": "shall", "ai": "is"}
_ENDINGS: Final = {"ll": "will", "d": "would", "s": "'s", "re": "are", "m": "am", "ve": "have"}
_LONGEST: Final = 32  # letters of a word that is remembered; what is longer is none


def reading(low: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The words that a word in small letters stands for, with their stems; of light ones, none."""
    known = low.isascii() and low.isalpha() and len(low) <= _LONGEST
    return _known_reading(low) if known else _reading(low)


def _uncontracted(word: str) -> Iterator[str]:
    """The words that a contraction stands for: "doesn't" is "does" and "not"."""
    if negated := _NEGATED.fullmatch(word):
        yield "can" if negated[2] else _WHOLE.get(negated[1], negated[1])
        yield "not"
        return
    base, mark, ending = word.rpartition("'")
    if mark and base and ending in _ENDINGS:
        yield base
        if _ENDINGS[ending]:
            yield _ENDINGS[ending]
        return
    yield word


def _reading(word: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple(
        (base, () if base in LIGHT else tuple(_units(tokens(_LIGHT_CHARS.sub("", base)))))
        for base in _uncontracted(word)
    )


_known_reading: Final = lru_cache(1 << 14)(_reading)


def _units(found: list[str]) -> Iterator[str]:
    """The tokens of a word without pairs: of a script without spaces, each character is one."""
    before = ""
    for token in found:
        if not (len(token) == 2 and len(before) == 1 and token[0] == before):
            yield token
        before = token
