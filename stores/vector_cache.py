"""Vectors kept by the content of their text, the least recently used dropped first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]

_OVERHEAD_BYTES = 250  # of an entry beside its numbers: key, array object, links (measured)


def digest(text: str) -> bytes:
    """What stands for a text: 16 bytes of BLAKE2b. Lone surrogates, which JSON can hold, count."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class VectorCache:
    """Vectors by digest; threads may share it.

    Args:
        most_bytes: How much is kept; 0: nothing.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._vectors: OrderedDict[bytes, Vector] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """How much is kept, overhead included."""
        return self._bytes

    def found(self, keys: Iterable[bytes]) -> dict[bytes, Vector]:
        """Those of some keys that are known; they count as used just now."""
        known = {}
        with self._lock:
            for key in keys:
                vector = self._vectors.get(key)
                if vector is not None:
                    self._vectors.move_to_end(key)
                    known[key] = vector
        return known

    def keep(self, vectors: Iterable[tuple[bytes, Vector]]) -> None:
        """Keep copies, so that no row holds the array it is a part of."""
        with self._lock:
            for key, vector in vectors:
                size = vector.nbytes + _OVERHEAD_BYTES
                if key in self._vectors or size > self._most:
                    continue
                self._vectors[key] = vector.copy()
                self._bytes += size
                while self._bytes > self._most:
                    _, oldest = self._vectors.popitem(last=False)
                    self._bytes -= oldest.nbytes + _OVERHEAD_BYTES

    def clear(self) -> None:
        """Drop all."""
        with self._lock:
            self._vectors.clear()
            self._bytes = 0
