"""Encrypt the bytes of rows with AES-GCM, or protect them with a checksum.

The associated data of each encrypted row names its database, its tenant and its place. A row does
not decrypt in another database, for another tenant, or at another place. All components of a
database are opened with the same key.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from perdure.errors import CorruptRecord, MissingDependency, StorageError, WrongKey
from perdure.storage.flow import Flow, Statement

if TYPE_CHECKING:
    from langgraph.checkpoint.serde.base import CipherProtocol

_CRC = 4  # bytes
_NONCE = 12  # bytes; NIST SP 800-38D §8.2.2: random nonces of 96 bits
AssociatedData = tuple[
    str | int | None, ...
]  # what a row is bound to: its kind, thread and position
_CHECK: Final = "key check"  # the name of the row in the table `settings`
_PROOF: Final = b"perdure"  # the decrypted key check is this text, then the id of the database
_ID_BYTES: Final = 16  # length of the random id of a database
_NO_KEY: Final = b""  # the key check of a database that was created without a key


class Seal(Protocol):
    """Seals bytes for the file and opens them. `place` names their row."""

    hash_key: bytes
    """Keys the content hashes, so that equal hashes tell nothing without the key."""

    def seal(self, data: bytes, associated_data: AssociatedData) -> bytes:
        """Encrypt."""

    def unseal(self, data: bytes, associated_data: AssociatedData) -> bytes:
        """Decrypt.

        Raises:
            CorruptRecord: The bytes are damaged, or were moved from another place.
        """

    def unseal_rows(self, bodies: Sequence[bytes], of: AssociatedData, start: int) -> list[bytes]:
        """Decrypt rows whose places are `(*of, start)`, `(*of, start + 1)` and so on."""
        return [self.unseal(body, (*of, position)) for position, body in enumerate(bodies, start)]


class ChecksumSeal(Seal):
    """No encryption; a checksum (CRC-32, IEEE 802.3) tells when a row was damaged, or is astray."""

    hash_key = b""

    def seal(self, data: bytes, associated_data: AssociatedData) -> bytes:
        """The bytes, then the checksum of their place and of them."""
        begun = zlib.crc32(
            b"%a" % associated_data[-1:], zlib.crc32(repr(associated_data[:-1]).encode())
        )
        return data + zlib.crc32(data, begun).to_bytes(_CRC, "little")

    def unseal(self, data: bytes, associated_data: AssociatedData) -> bytes:
        """See `Seal.unseal`."""
        checked = type(data) is bytes and _checksum(
            data[:-_CRC], _begun(associated_data[:-1]), associated_data[-1]
        )
        if checked and checked == data[-_CRC:]:
            return data[:-_CRC]
        raise CorruptRecord(f"the row {associated_data!r} is damaged; restore it from a backup")

    def unseal_rows(self, bodies: Sequence[bytes], of: AssociatedData, start: int) -> list[bytes]:
        """See `Seal.unseal_rows`."""
        begun = _begun(of)
        out = []
        for position, body in enumerate(bodies, start):
            if type(body) is not bytes or _checksum(body[:-_CRC], begun, position) != body[-_CRC:]:
                self.unseal(body, (*of, position))
            out.append(body[:-_CRC])
        return out


def _begun(of: AssociatedData) -> int:
    return zlib.crc32(repr(of).encode())


def _checksum(data: bytes, begun: int, last: str | int | None) -> bytes:
    return zlib.crc32(data, zlib.crc32(b"%a" % (last,), begun)).to_bytes(_CRC, "little")


class AESGCMSeal(Seal):
    """Authenticated encryption; a row moved or changed does not open (NIST SP 800-38D).

    `bind` must be called before rows are encrypted or decrypted; `agree_on_key` calls it.

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
        self._binding = b""
        self.hash_key = hashlib.blake2b(b"perdure content hash", key=key, digest_size=32).digest()

    def create_key_check(self, tenant: str | None) -> bytes:
        """Return an encrypted row that proves the key and contains a new random database id."""
        return self._encrypt(_PROOF + os.urandom(_ID_BYTES), _describe_key_check(tenant))

    def bind(self, key_check: bytes, tenant: str | None) -> None:
        """Bind all rows to the database and the tenant of a key check.

        Args:
            key_check: A row that `create_key_check` returned.
            tenant: The tenant of the rows, or None if the database has no tenants.

        Raises:
            CorruptRecord: The row was created with another key or for another tenant, or it was
                changed.
        """
        proof = self._decrypt(key_check, _describe_key_check(tenant), (_CHECK,))
        database_id = proof[len(_PROOF) :]
        self._binding = repr((database_id, tenant)).encode()

    def seal(self, data: bytes, associated_data: AssociatedData) -> bytes:
        """Return a random nonce, followed by the ciphertext and its tag."""
        return self._encrypt(data, self._binding + repr(associated_data).encode())

    def unseal(self, data: bytes, associated_data: AssociatedData) -> bytes:
        """See `Seal.unseal`."""
        return self._decrypt(data, self._binding + repr(associated_data).encode(), associated_data)

    def _encrypt(self, data: bytes, associated_data: bytes) -> bytes:
        nonce = os.urandom(_NONCE)
        return nonce + self._aead.encrypt(nonce, data, associated_data)

    def _decrypt(self, data: bytes, associated_data: bytes, place: AssociatedData) -> bytes:
        try:
            return self._aead.decrypt(data[:_NONCE], data[_NONCE:], associated_data)
        except (self._invalid, ValueError, TypeError) as exc:
            raise CorruptRecord(
                f"the row {place!r} does not decrypt: it was damaged, changed, or moved from "
                "another row, database or tenant; restore it from a backup"
            ) from exc


def _describe_key_check(tenant: str | None) -> bytes:
    return repr((_CHECK, tenant)).encode()


class LangGraphSeal(Seal):
    """The cipher of a langgraph `EncryptedSerializer`, for those who have one already.

    It has no associated data, so unlike `AESGCM` it cannot tell a row that was moved.
    """

    def __init__(self, cipher: CipherProtocol) -> None:
        self._cipher = cipher
        # such a cipher offers no key to derive from: equal contents must not be told apart by
        # hash, so each process hashes with a key of its own and finds only what it stored itself
        self.hash_key = os.urandom(32)

    def seal(self, data: bytes, associated_data: AssociatedData) -> bytes:
        """The cipher's name, its length before it, then the ciphertext."""
        name, sealed = self._cipher.encrypt(data)
        text = name.encode()
        return bytes((len(text),)) + text + sealed

    def unseal(self, data: bytes, associated_data: AssociatedData) -> bytes:
        """See `Seal.unseal`."""
        try:
            end = 1 + data[0]
            return self._cipher.decrypt(data[1:end].decode(), data[end:])
        except Exception as exc:
            raise CorruptRecord(
                f"the row {associated_data!r} does not decrypt ({exc}): it was "
                "damaged, or written with another key"
            ) from exc


def build_seal(key: bytes | str | None) -> Seal:
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
    return ChecksumSeal() if secret is None else AESGCMSeal(secret)


def bind_seal(
    seal: Seal, path: str, tenant: str | None = None, *, read_only: bool = False
) -> Flow[None]:
    """Check the key of a database, and bind the seal to the database and its tenant.

    Encryption is fixed when the database is created. A seal that is not perdure's own counts as no
    key, and is not bound.

    Args:
        seal: The seal of one component. It must not be used for another database.
        path: The name of the database, for error messages.
        tenant: The tenant whose rows are read and written, or None.
        read_only: Whether it is forbidden to record anything.

    Raises:
        WrongKey: The database was created with another key, or only one of the two has a key.
        StorageError: The tenant has no key check yet, and none may be recorded.
    """
    rows = yield Statement("SELECT value FROM settings WHERE name = ?", (_CHECK,))
    key_check = rows[0][0] if rows else None
    if key_check is None and not read_only:
        key_check = seal.create_key_check(tenant) if isinstance(seal, AESGCMSeal) else _NO_KEY
        yield Statement("INSERT INTO settings (name, value) VALUES (?, ?)", (_CHECK, key_check))
    if key_check is None and tenant is not None and isinstance(seal, AESGCMSeal):
        raise StorageError(
            f"{path!r} has nothing of the tenant {tenant!r} yet; open it once without read_only"
        )
    if key_check is None:
        return
    if not isinstance(seal, AESGCMSeal):
        if key_check != _NO_KEY:
            raise WrongKey(f"{path!r} is encrypted; set PERDURE_KEY, or pass key=")
        return
    if key_check == _NO_KEY:
        raise WrongKey(
            f"{path!r} was made without a key: unset PERDURE_KEY and pass none, or make a new file "
            "with the key"
        )
    try:
        seal.bind(key_check, tenant)
    except CorruptRecord:
        raise WrongKey(f"the key does not open {path!r}") from None
