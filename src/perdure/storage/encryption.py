"""Encrypt stored rows with AES-GCM, or add checksums to them.

The authentication tag or checksum of a row also covers the row's associated data. A row's
associated data are the names and numbers that identify the row. If the bytes of a row are copied to
another row, reading that row fails. The authentication tag of an encrypted row also covers the id
of the database and the name of the tenant. If an encrypted row is moved to another database or to
another tenant, decrypting it fails. A `LangGraphSeal`, which uses a cipher of LangGraph, does not
detect that the bytes of a row were moved to another row. All components of a database must be
opened with the same key.
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

_CRC_BYTES = 4  # Length of a checksum in bytes
_NONCE_BYTES = 12  # Length of a random nonce in bytes (96 bits, see NIST SP 800-38D §8.2.2)
AssociatedData = tuple[str | int | None, ...]
"""The names and numbers that identify a row: its kind, then for example its thread and position."""
# Name of the row in the `settings` table that holds the key check
_KEY_CHECK: Final = "key check"
# The key check is an encrypted row with which perdure verifies that the encryption key is correct.
# Its plaintext is "perdure" followed by the random id of the database.
_PROOF: Final = b"perdure"
# Length of the random database id in bytes
_ID_BYTES: Final = 16
# Value that is stored as the key check if a database is created without an encryption key
_NO_KEY: Final = b""


class Seal(Protocol):
    """Encrypts stored bytes, or adds a checksum to them.

    Attributes:
        hash_key: The key with which texts are hashed, or `b""` if the rows are not encrypted.
            Nobody can guess a text from its hash without this key.
    """

    hash_key: bytes

    def seal(self, data: bytes, associated_data: AssociatedData) -> bytes:
        """Encrypt `data`, or add a checksum to `data`.

        The result is valid only in the row for which it was created. The ciphertexts of a
        `LangGraphSeal` are an exception, because they are not bound to a row.

        `associated_data` identifies the row. If the sealed bytes are copied to another row,
        `unseal` fails.
        """

    def unseal(self, data: bytes, associated_data: AssociatedData) -> bytes:
        """Return the original bytes that were passed to `seal`.

        Raises:
            CorruptRecord: The row is damaged, or was moved from another row.
        """

    def unseal_rows(
        self, bodies: Sequence[bytes], shared_data: AssociatedData, first_position: int
    ) -> list[bytes]:
        """Verify or decrypt several sealed rows, and return the original bytes.

        The associated data of all rows must be equal, except for the last element, the row's
        position.

        Args:
            bodies: The sealed rows, by ascending position.
            shared_data: The associated data of all rows, without the position at the end.
            first_position: The position of the first row. Each next row has the next number.

        Returns:
            The bytes of the rows, in the same order.

        Raises:
            CorruptRecord: A row is damaged, or was moved from another row.
        """
        return [
            self.unseal(body, (*shared_data, position))
            for position, body in enumerate(bodies, first_position)
        ]


class ChecksumSeal(Seal):
    """Adds a checksum (CRC-32, IEEE 802.3) to stored bytes, without encrypting them.

    The checksum detects that the stored bytes of a row were damaged or moved to another row. A
    checksum does not protect against tampering, because anyone can compute it.
    """

    hash_key = b""

    def seal(self, data: bytes, associated_data: AssociatedData) -> bytes:
        """Return `data` with an appended checksum, which covers `data` and the associated data."""
        prefix_checksum = zlib.crc32(
            b"%a" % associated_data[-1:], zlib.crc32(repr(associated_data[:-1]).encode())
        )
        return data + zlib.crc32(data, prefix_checksum).to_bytes(_CRC_BYTES, "little")

    def unseal(self, data: bytes, associated_data: AssociatedData) -> bytes:
        """See `Seal.unseal`."""
        checksum = type(data) is bytes and _compute_row_checksum(
            data[:-_CRC_BYTES],
            _compute_checksum_of_associated_data(associated_data[:-1]),
            associated_data[-1],
        )
        if checksum and checksum == data[-_CRC_BYTES:]:
            return data[:-_CRC_BYTES]
        raise CorruptRecord(f"the row {associated_data!r} is damaged; restore it from a backup")

    def unseal_rows(
        self, bodies: Sequence[bytes], shared_data: AssociatedData, first_position: int
    ) -> list[bytes]:
        """See `Seal.unseal_rows`."""
        prefix_checksum = _compute_checksum_of_associated_data(shared_data)
        unsealed_bodies = []
        for position, body in enumerate(bodies, first_position):
            if (
                type(body) is not bytes
                or _compute_row_checksum(body[:-_CRC_BYTES], prefix_checksum, position)
                != body[-_CRC_BYTES:]
            ):
                # The checksum of this row is wrong. Call `unseal` for the row, which raises an
                # error that describes the problem.
                self.unseal(body, (*shared_data, position))
            unsealed_bodies.append(body[:-_CRC_BYTES])
        return unsealed_bodies


def _compute_checksum_of_associated_data(shared_data: AssociatedData) -> int:
    """Return a checksum of all but the last element of a row's associated data."""
    return zlib.crc32(repr(shared_data).encode())


def _compute_row_checksum(
    data: bytes, prefix_checksum: int, last_associated_part: str | int | None
) -> bytes:
    """Return a checksum that covers the bytes of a row and the row's associated data.

    `prefix_checksum` is the checksum of all associated data except the last element,
    `last_associated_part`.
    """
    return zlib.crc32(data, zlib.crc32(b"%a" % (last_associated_part,), prefix_checksum)).to_bytes(
        _CRC_BYTES, "little"
    )


class AESGCMSeal(Seal):
    """Encrypts stored bytes with AES-GCM authenticated encryption (NIST SP 800-38D).

    Decryption fails if the stored bytes of a row were modified or moved to another row.

    Before an `AESGCMSeal` encrypts or decrypts rows, it must be bound to a database with
    `check_key_and_bind_seal` or `bind_to_database`.

    Args:
        key: The key, of 16, 24 or 32 bytes.

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
                "encryption requires the package 'cryptography'; run pip install "
                '"perdure[encryption]"'
            ) from exc
        if len(key) not in (16, 24, 32):
            raise WrongKey(f"the key has {len(key)} bytes; expected 16, 24 or 32 bytes for AES-GCM")
        self._aead = aead.AESGCM(key)
        self._invalid_tag_error = InvalidTag
        self._binding = b""
        self.hash_key = hashlib.blake2b(b"perdure content hash", key=key, digest_size=32).digest()

    def create_key_check(self, tenant: str | None) -> bytes:
        """Create a key check, which is an encrypted record for verifying the key later.

        The encrypted key-check record contains a new random id for the database.
        """
        return self._encrypt_with_nonce(
            _PROOF + os.urandom(_ID_BYTES), _build_key_check_data(tenant)
        )

    def bind_to_database(self, key_check: bytes, tenant: str | None) -> None:
        """Add a database id and a tenant to the associated data that the cipher authenticates.

        Rows that are encrypted after this call can be decrypted only with the same database id and
        the same tenant.

        Args:
            key_check: A row that `create_key_check` returned.
            tenant: The tenant of the rows, or None if the database has no tenants.

        Raises:
            CorruptRecord: The row was created with another key or for another tenant, or it was
                changed.
        """
        proof = self._decrypt_and_verify(key_check, _build_key_check_data(tenant), (_KEY_CHECK,))
        database_id = proof[len(_PROOF) :]
        self._binding = repr((database_id, tenant)).encode()

    def seal(self, data: bytes, associated_data: AssociatedData) -> bytes:
        """Return a random nonce, followed by the ciphertext and its tag."""
        return self._encrypt_with_nonce(data, self._binding + repr(associated_data).encode())

    def unseal(self, data: bytes, associated_data: AssociatedData) -> bytes:
        """See `Seal.unseal`."""
        return self._decrypt_and_verify(
            data, self._binding + repr(associated_data).encode(), associated_data
        )

    def _encrypt_with_nonce(self, data: bytes, bound_data: bytes) -> bytes:
        """Encrypt `data`, and return the random nonce followed by the ciphertext.

        `bound_data` is the associated data.
        """
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._aead.encrypt(nonce, data, bound_data)

    def _decrypt_and_verify(
        self, data: bytes, bound_data: bytes, row_for_error: AssociatedData
    ) -> bytes:
        """Decrypt a row, and verify that `bound_data` is its associated data.

        If decryption fails, `row_for_error` identifies the row in the error message.
        """
        try:
            return self._aead.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], bound_data)
        except (self._invalid_tag_error, ValueError, TypeError) as exc:
            raise CorruptRecord(
                f"the row {row_for_error!r} cannot be decrypted: it was damaged, changed, or moved "
                "from another row, database or tenant; restore it from a backup"
            ) from exc


def _build_key_check_data(tenant: str | None) -> bytes:
    """Build the AEAD associated data for the record that verifies a tenant's encryption key.

    A key check is an encrypted record that is used to verify the encryption key.
    """
    return repr((_KEY_CHECK, tenant)).encode()


class LangGraphSeal(Seal):
    """Encrypts stored bytes with the cipher of the user's `EncryptedSerializer`.

    LangGraph's ciphers do not accept associated data, so a ciphertext is not bound to its row. A
    `LangGraphSeal` cannot detect that a ciphertext was moved to another row. An `AESGCMSeal`
    detects that a ciphertext was moved to another row.

    Args:
        cipher: The cipher.
    """

    def __init__(self, cipher: CipherProtocol) -> None:
        self._cipher = cipher
        # The hash key cannot be derived from the encryption key, because the cipher object that the
        # user passed does not reveal its key. Each process generates a random hash key, so that
        # nobody can guess texts from their hashes. As a consequence, a process recognises a
        # duplicate of a text only if the same process has stored the text.
        self.hash_key = os.urandom(32)

    def seal(self, data: bytes, associated_data: AssociatedData) -> bytes:
        """Return the cipher's name with a one-byte length prefix, followed by the ciphertext."""
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
                f"the row {associated_data!r} cannot be decrypted ({exc}): it was damaged, or "
                "written with another key; restore it from a backup, or use the right key"
            ) from exc


def build_encryption_or_checksum_seal(key: bytes | str | None) -> Seal:
    """Build the seal of a database.

    Args:
        key: The encryption key, of 16, 24 or 32 bytes, as bytes or in hexadecimal. None means the
            key in the environment variable `PERDURE_KEY`, or no encryption if that is not set.

    Returns:
        A seal that encrypts with the key, or one with checksums only.

    Raises:
        WrongKey: The key is not hexadecimal or has another length.
        MissingDependency: The package `cryptography` is not installed.
    """
    key = key if key is not None else os.environ.get("PERDURE_KEY") or None
    try:
        key_bytes = bytes.fromhex(key) if isinstance(key, str) else key
    except ValueError as exc:
        raise WrongKey(
            "the key is not a hexadecimal string; create a key with: "
            'python -c "import secrets; print(secrets.token_hex(32))"'
        ) from exc
    return ChecksumSeal() if key_bytes is None else AESGCMSeal(key_bytes)


def check_key_and_bind_seal(
    seal: Seal, path: str, tenant: str | None = None, *, read_only: bool = False
) -> Flow[None]:
    """Verify a database's key, and associate the seal (encryption or checksum) with the database.

    A seal encrypts stored bytes or protects them with a checksum. After an `AESGCMSeal` has been
    bound, it includes the database id in the associated data of every row.

    Whether a database is encrypted is decided when the database is created. A `LangGraphSeal`
    encrypts stored bytes with the user's cipher, which does not reveal its key. Therefore, this
    function treats a `LangGraphSeal` like a seal without an encryption key. With a `LangGraphSeal`,
    this function does not verify the key, and the encrypted bytes are not bound to a particular
    database. The key is verified with the key check, a row of the table `settings` that was
    encrypted with the right key. If `read_only` is False and the database contains no row for
    verifying the encryption key, a new row is encrypted with the key of `seal` and inserted. If the
    seal has no encryption key, an empty key-check row is inserted instead. If `read_only` is True
    and the database contains no row for verifying the encryption key, the key is not verified.

    Args:
        seal: The seal of one component. It must not be used for another database.
        path: The name of the database, for error messages.
        tenant: The tenant whose rows are read and written, or None.
        read_only: Whether nothing may be written to the database.

    Raises:
        WrongKey: The database was created with another key, or only one of the seal and the
            database has a key.
        StorageError: The tenant has no key check yet, and `read_only` is True.
    """
    rows = yield Statement("SELECT value FROM settings WHERE name = ?", (_KEY_CHECK,))
    key_check = rows[0][0] if rows else None
    if key_check is None and not read_only:
        key_check = seal.create_key_check(tenant) if isinstance(seal, AESGCMSeal) else _NO_KEY
        yield Statement("INSERT INTO settings (name, value) VALUES (?, ?)", (_KEY_CHECK, key_check))
    if key_check is None and tenant is not None and isinstance(seal, AESGCMSeal):
        raise StorageError(
            f"the database {path!r} is not set up for the tenant {tenant!r} yet; open it once "
            "without read_only to set it up"
        )
    if key_check is None:
        return
    if not isinstance(seal, AESGCMSeal):
        if key_check != _NO_KEY:
            raise WrongKey(f"{path!r} is encrypted; set PERDURE_KEY, or pass the key as key=")
        return
    if key_check == _NO_KEY:
        raise WrongKey(
            f"{path!r} was created without a key, so it is not encrypted; unset PERDURE_KEY and "
            "pass no key, or create a new database with the key"
        )
    try:
        seal.bind_to_database(key_check, tenant)
    except CorruptRecord:
        raise WrongKey(
            f"the key cannot decrypt {path!r}; pass the key with which the database was created"
        ) from None
