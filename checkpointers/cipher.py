"""The cipher of a langgraph `EncryptedSerializer`, as a seal of rows."""

from __future__ import annotations

import os
from collections.abc import Sequence

from langgraph.checkpoint.serde.base import CipherProtocol

from perdure.errors import CorruptRecord
from perdure.storage.encryption import Place, open_each


class LangGraphCipher:
    """The cipher of a langgraph `EncryptedSerializer`, for those who have one already.

    It has no associated data, so unlike `AESGCM` it cannot tell a row that was moved.
    """

    def __init__(self, cipher: CipherProtocol) -> None:
        self._cipher = cipher
        # such a cipher offers no key to derive from: equal contents must not be told apart by
        # hash, so each process hashes with a key of its own and finds only what it stored itself
        self.hash_key = os.urandom(32)

    def seal(self, data: bytes, place: Place) -> bytes:
        """The cipher's name, its length before it, then the ciphertext."""
        name, sealed = self._cipher.encrypt(data)
        text = name.encode()
        return bytes((len(text),)) + text + sealed

    def open(self, data: bytes, place: Place) -> bytes:
        """See `Seal.open`."""
        try:
            end = 1 + data[0]
            return self._cipher.decrypt(data[1:end].decode(), data[end:])
        except Exception as exc:
            raise CorruptRecord(
                f"the row {place!r} does not decrypt ({exc}): it was "
                "damaged, or written with another key"
            ) from exc

    def open_run(self, bodies: Sequence[bytes], of: Place, start: int) -> list[bytes]:
        """See `Seal.open_run`."""
        return open_each(self, bodies, of, start)
