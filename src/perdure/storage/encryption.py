"""Encryption of stored bytes: AES-GCM bound to the place of each row, or a checksum of it.

All components that keep something in a file are opened with the same key.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from perdure.errors import CorruptRecord, MissingDependency, WrongKey
from perdure.storage.flow import Flow, Statement

if TYPE_CHECKING:
    from langgraph.checkpoint.serde.base import CipherProtocol

_CRC = 4  # bytes
_NONCE = 12  # bytes; NIST SP 800-38D §8.2.2: random nonces of 96 bits
Place = tuple[str | int | None, ...]  # what a row is bound to: its kind, thread and position
_CHECK: Final = "key check"
_PROOF: Final = b"perdure"
_NO_KEY: Final = b""  # stands where the proof would, in a file made without a key


class Seal(Protocol):
    """Seals bytes for the file and opens them. `place` names their row."""

    hash_key: bytes
    """Keys the content hashes, so that equal hashes tell nothing without the key."""

    def seal(self, data: bytes, place: Place) -> bytes:
        """Encrypt."""

    def open(self, data: bytes, place: Place) -> bytes:
        """Decrypt.

        Raises:
            CorruptRecord: The bytes are damaged, or were moved from another place.
        """

    def open_run(self, bodies: Sequence[bytes], of: Place, start: int) -> list[bytes]:
        """Decrypt rows whose places are `(*of, start)`, `(*of, start + 1)` and so on."""
        return [self.open(body, (*of, position)) for position, body in enumerate(bodies, start)]


class Clear(Seal):
    """No encryption; a checksum (CRC-32, IEEE 802.3) tells when a row was damaged, or is astray."""

    hash_key = b""

    def seal(self, data: bytes, place: Place) -> bytes:
        """The bytes, then the checksum of their place and of them."""
        begun = zlib.crc32(b"%a" % place[-1:], zlib.crc32(repr(place[:-1]).encode()))
        return data + zlib.crc32(data, begun).to_bytes(_CRC, "little")

    def open(self, data: bytes, place: Place) -> bytes:
        """See `Seal.open`."""
        checked = type(data) is bytes and _checksum(data[:-_CRC], _begun(place[:-1]), place[-1])
        if checked and checked == data[-_CRC:]:
            return data[:-_CRC]
        raise CorruptRecord(f"the row {place!r} is damaged; restore it from a backup")

    def open_run(self, bodies: Sequence[bytes], of: Place, start: int) -> list[bytes]:
        """See `Seal.open_run`."""
        begun = _begun(of)
        out = []
        for position, body in enumerate(bodies, start):
            if type(body) is not bytes or _checksum(body[:-_CRC], begun, position) != body[-_CRC:]:
                self.open(body, (*of, position))
            out.append(body[:-_CRC])
        return out


def _begun(of: Place) -> int:
    return zlib.crc32(repr(of).encode())


def _checksum(data: bytes, begun: int, last: str | int | None) -> bytes:
    return zlib.crc32(data, zlib.crc32(b"%a" % (last,), begun)).to_bytes(_CRC, "little")


class AESGCM(Seal):
    """Authenticated encryption; a row moved or changed does not open (NIST SP 800-38D).

    Args:
        key: 16, 24 or 32 bytes.

    Raises:
        WrongKey: The key has another length.
        MissingDependency: The package `cryptography` is not installed.
    """

    def __init__(self, key: bytes) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import aead
        except ImportError as exc:
            raise MissingDependency(
                "encryption needs the package 'cryptography', which perdure's extra [encryption] "
                "installs: pip install cryptography"
            ) from exc
        if len(key) not in (16, 24, 32):
            raise WrongKey(f"the key has {len(key)} bytes; AES-GCM takes 16, 24 or 32")
        self._aead = aead.AESGCM(key)
        self._invalid = InvalidTag
        self.hash_key = hashlib.blake2b(b"perdure content hash", key=key, digest_size=32).digest()

    def seal(self, data: bytes, place: Place) -> bytes:
        """A random nonce, then the ciphertext with its tag."""
        nonce = os.urandom(_NONCE)
        return nonce + self._aead.encrypt(nonce, data, repr(place).encode())

    def open(self, data: bytes, place: Place) -> bytes:
        """See `Seal.open`."""
        try:
            return self._aead.decrypt(data[:_NONCE], data[_NONCE:], repr(place).encode())
        except (self._invalid, ValueError, TypeError) as exc:
            raise CorruptRecord(
                f"the row {place!r} does not decrypt: it was damaged, "
                "changed or moved; restore it from a backup"
            ) from exc


class LangGraphCipher(Seal):
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


def seal_for(key: bytes | str | None) -> Seal:
    """The seal of a file that is opened with a key; without one, with that of `PERDURE_KEY`.

    Raises:
        WrongKey: It is no key: 16, 24 or 32 bytes, or as many in hexadecimal.
        MissingDependency: The package `cryptography` is not installed.
    """
    key = key if key is not None else os.environ.get("PERDURE_KEY") or None
    try:
        secret = bytes.fromhex(key) if isinstance(key, str) else key
    except ValueError as exc:
        raise WrongKey(
            "the key is not hexadecimal; make one with: "
            'python -c "import secrets; print(secrets.token_hex(32))"'
        ) from exc
    return Clear() if secret is None else AESGCM(secret)


def agree_on_key(seal: Seal, path: str, *, read_only: bool = False) -> Flow[None]:
    """Check the key against the file at `path`. Encryption is fixed when the file is created.

    A seal that is not perdure's own counts as no key. With `read_only` nothing is recorded.

    Raises:
        WrongKey: The file was made with another key, or without one, or with one.
    """
    rows = yield Statement("SELECT value FROM settings WHERE name = ?", (_CHECK,))
    sealed = isinstance(seal, AESGCM)
    if not rows and not read_only:
        proof = seal.seal(_PROOF, (_CHECK,)) if sealed else _NO_KEY
        yield Statement("INSERT INTO settings (name, value) VALUES (?, ?)", (_CHECK, proof))
    if not rows:
        return
    proof = rows[0][0]
    if sealed and proof == _NO_KEY:
        raise WrongKey(
            f"{path!r} was made without a key: unset PERDURE_KEY and pass none, or make a new file "
            "with the key"
        )
    if not sealed and proof != _NO_KEY:
        raise WrongKey(f"{path!r} is encrypted; set PERDURE_KEY, or pass key=")
    try:
        if sealed:
            seal.open(proof, (_CHECK,))
    except CorruptRecord:
        raise WrongKey(f"the key does not open {path!r}") from None
