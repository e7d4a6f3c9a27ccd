"""Echoes: what an assistant says after what it was shown is nothing that was learnt."""

from __future__ import annotations

from typing import Final

from perdure.memory.likeness import normal
from perdure.stores.text import tokens

_LENGTH: Final = 4  # words of a shingle
_SHARE: Final = 0.8  # of the shingles of a text
Shingles = frozenset[tuple[str, ...]]


class Echoes:
    """Knows again what texts repeat; each text that was shown is taken apart once."""

    def __init__(self) -> None:
        self._shown: dict[tuple[str, int, bool], Shingles] = {}

    def repeats(self, text: str, shown: tuple[str, ...]) -> bool:
        """Whether most of a text is, word by word, in what was shown.

        Shingles and containment: Broder, On the resemblance and containment of documents, 1997. A
        text that is shorter than a shingle has to be there as it stands.
        """
        if not shown:
            return False
        spaced = text.isascii()
        words = _words(text, spaced)
        size = min(_LENGTH, len(words))
        if not size:
            return False
        known = [self._shingles(each, size, spaced) for each in shown]
        count = len(words) - size + 1
        missing, most = 0, (1 - _SHARE) * count
        for start in range(count):
            shingle = tuple(words[start : start + size])
            if not any(shingle in each for each in known):
                missing += 1
                if missing > most:
                    return False
        return True

    def _shingles(self, text: str, size: int, spaced: bool) -> Shingles:
        key = text, size, spaced
        if key not in self._shown:
            words = _words(text, spaced)
            ends = range(size, len(words) + 1)
            self._shown[key] = frozenset(tuple(words[end - size : end]) for end in ends)
        return self._shown[key]


def _words(text: str, spaced: bool) -> list[str]:
    return normal(text).split() if spaced else tokens(text)
