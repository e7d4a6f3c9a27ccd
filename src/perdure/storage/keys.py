"""The key of a file: every component that keeps something in it is opened with the same one."""

from __future__ import annotations

import os
from typing import Final

from perdure.errors import CorruptRecord, WrongKey
from perdure.storage.cipher import AESGCM, Clear, Seal, key_bytes
from perdure.storage.flow import Flow, Statement

_CHECK: Final = "key check"
_PROOF: Final = b"perdure"
_NO_KEY: Final = b""  # stands where the proof would, in a file that was made without a key


def seal_for(key: bytes | str | None) -> Seal:
    """The seal of a file that is opened with a key; without one, with that of `PERDURE_KEY`.

    Raises:
        WrongKey: It is no key.
        MissingDependency: The package `cryptography` is not installed.
    """
    secret = key_bytes(key if key is not None else os.environ.get("PERDURE_KEY") or None)
    return Clear() if secret is None else AESGCM(secret)


def agree_on_key(seal: Seal, path: str, *, read_only: bool = False) -> Flow[None]:
    """Make sure that the key is the one the file was made with; the first to open it decides.

    Args:
        seal: What its rows are sealed with. A seal that is not perdure's own counts as no key.
        path: The file, for messages.
        read_only: Whether a file of which nothing is recorded is left as it is.

    Raises:
        WrongKey: The file was made with another key, or without one, or with one.
    """
    rows = yield Statement("SELECT value FROM settings WHERE name = ?", (_CHECK,))
    sealed = isinstance(seal, AESGCM)
    if not rows:
        if not read_only:
            proof = seal.seal(_PROOF, (_CHECK,)) if sealed else _NO_KEY
            yield Statement("INSERT INTO settings (name, value) VALUES (?, ?)", (_CHECK, proof))
        return
    proof = rows[0][0]
    if sealed and proof == _NO_KEY:
        raise WrongKey(
            f"{path!r} was made without a key: open it without one, or make a new file with the key"
        )
    if not sealed and proof != _NO_KEY:
        raise WrongKey(f"{path!r} is encrypted; pass key= or set PERDURE_KEY")
    if sealed and not _opens(seal, proof):
        raise WrongKey(f"the key does not open {path!r}")


def _opens(seal: Seal, proof: bytes) -> bool:
    try:
        return seal.open(proof, (_CHECK,)) == _PROOF
    except CorruptRecord:
        return False
