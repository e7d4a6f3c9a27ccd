"""English synonyms: "buy" is near "purchase" and "bought".

A table inside the package, made from the static embedder's by `benchmarks/kinship.py`: for each
stem its nearest, with the cosine. It lets the half of a hybrid search that reads words find an item
that says the same in other words; where an item has the very word, that counts more.
"""

from __future__ import annotations

import io
from functools import cache
from importlib.resources import files

import numpy as np
import numpy.typing as npt

FILE = "kin-en.npz"


class _Table:
    """Stems, and for each a run of numbers of others with their nearness in 255ths."""

    def __init__(self, raw: bytes) -> None:
        with np.load(io.BytesIO(raw)) as arrays:
            self.stems: list[str] = arrays["stems"].tobytes().decode("ascii").split("\n")
            self.starts: npt.NDArray[np.uint32] = arrays["starts"]
            self.kin: npt.NDArray[np.uint16] = arrays["kin"]
            self.near: npt.NDArray[np.uint8] = arrays["near"]
        self.numbers = dict(zip(self.stems, range(len(self.stems)), strict=True))


def kin_of(token: str) -> list[tuple[str, float]]:
    """The stems nearest in meaning to a token, nearest first, with similarity 0 to 1.

    >>> [stem for stem, _ in kin_of("buy")[:2]]
    ['purchas', 'bought']
    >>> kin_of("聊天")
    []
    """
    table = _table()
    number = table.numbers.get(token)
    if number is None:
        return []
    run = slice(int(table.starts[number]), int(table.starts[number + 1]))
    return [
        (table.stems[kin], near / 255)
        for kin, near in zip(table.kin[run].tolist(), table.near[run].tolist(), strict=True)
    ]


@cache
def _table() -> _Table:
    """The table, read at the first search that wants it: 10 ms."""
    return _Table((files("perdure.stores") / "weights" / FILE).read_bytes())
