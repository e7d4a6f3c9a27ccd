"""Rows to snapshots and back: how a checkpoint, its ids and its pending writes are written."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from perdure.checkpointers.manifest import DICT, LIST, Ranges
from perdure.checkpointers.memo import Snapshot
from perdure.checkpointers.packing import pack, unpack
from perdure.errors import CorruptRecord
from perdure.storage.encryption import Place, Seal

_TAG_LIMIT: Final = 256  # characters; a longer metadata value is found by reading, not by index
# not worth an index: different at every checkpoint, or one of three values
UNTAGGED: Final = frozenset({"step", "parents", "source"})


def pack_id(text: str | None) -> bytes | str | None:
    """An id as it is stored: a UUID in canonical form takes 16 bytes, anything else its text.

    >>> pack_id("t-1"), len(pack_id("1f0c8b9e-0000-6000-8000-000000000000"))
    ('t-1', 16)
    """
    if text is None or len(text) != 36:
        return text
    try:
        packed = bytes.fromhex(text.replace("-", ""))
    except ValueError:
        return text
    return packed if len(packed) == 16 and _hyphened(packed) == text else text


def unpack_id(stored: bytes | str | None) -> str | None:
    """The id that `pack_id` was given."""
    return _hyphened(stored) if isinstance(stored, bytes) else stored


def _hyphened(packed: bytes) -> str:
    text = packed.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def item_place(thread_id: str, lane: str, position: int) -> Place:
    """What binds an item to its row."""
    return ("item", thread_id, lane, position)


def checkpoint_place(thread_id: str, ns: str, uid: str, parent: str | None, key: int) -> Place:
    """What binds a checkpoint to its row."""
    return ("checkpoint", thread_id, ns, uid, parent, key)


def writes_place(thread_id: str, ns: str, uid: str, task: str, path: str) -> Place:
    """What binds pending writes to their row, and to the path that orders them."""
    return ("writes", thread_id, ns, uid, task, path)


def content_hash(seal: Seal, lane: int, stored: bytes) -> int:
    """A hash by which the same content is found within a lane.

    The lane leads, so that a thread's hashes lie together in the index; 40 bits of BLAKE2b follow,
    salted with the lane (RFC 7693): equal contents of two threads have nothing in common.
    A match is confirmed by comparing the content itself.
    """
    digest = hashlib.blake2b(
        stored, digest_size=5, key=seal.hash_key, salt=lane.to_bytes(8)
    ).digest()
    return (lane & 0x7FFFFF) << 40 | int.from_bytes(digest, "big")


def tag(seal: Seal, key: str, value: Any) -> int | None:
    """The number under which checkpoints with a metadata value are indexed; None: it is not.

    Nothing is indexed under None: to langgraph a filter for it also means metadata without the key.
    """
    if key in UNTAGGED or not isinstance(value, str | int | float):
        return None
    if isinstance(value, str) and len(value) > _TAG_LIMIT:
        return None
    if isinstance(value, int | float) and math.isfinite(value):
        value = float(value) if abs(value) < 1 << 53 else int(value)  # 1, 1.0 and True are equal
    text = repr((key, value)).encode(errors="surrogatepass")
    digest = hashlib.blake2b(text, digest_size=8, key=seal.hash_key).digest()
    return int.from_bytes(digest, "big", signed=True)


def tags_of(seal: Seal, metadata: Mapping[str, Any]) -> Iterator[int]:
    """Every tag of a checkpoint."""
    for key, value in metadata.items():
        number = tag(seal, key, value)
        if number is not None:
            yield number


def pack_snapshot(snapshot: Snapshot, said: dict[str, Any]) -> bytes:
    """A checkpoint's row body."""
    return pack([snapshot.fields, snapshot.versions, snapshot.seen, snapshot.refs, said])


def unpack_snapshot(uid: str, key: int, parent: str | None, body: bytes) -> Snapshot:
    """A checkpoint from its row; `ranges` and `said` are still as written.

    Raises:
        CorruptRecord: The body is damaged.
    """
    try:
        fields, versions, seen, refs, said = unpack(body)
    except ValueError as exc:
        raise CorruptRecord(
            f"checkpoint {uid!r} cannot be read back ({exc}): its row is damaged"
        ) from exc
    return Snapshot(uid, key, parent, fields, versions, seen, refs, {}, said)


def split_channels(refs: Mapping[str, Any]) -> Iterator[tuple[str, int, Any]]:
    """Channels whose value is a range of a log: name, lane, written ranges."""
    for channel, ref in refs.items():
        if not isinstance(ref, bytes) and ref[0] in (LIST, DICT):
            yield channel, ref[1], ref[2]


def pack_writes(writes: list[list[Any]]) -> bytes:
    """The writes of one task: `[index, channel, reference]` each."""
    return pack(writes)


def unpack_writes(body: bytes) -> list[list[Any]]:
    """The writes of one task.

    Raises:
        CorruptRecord: The body is damaged.
    """
    try:
        return unpack(body)  # type: ignore[no-any-return]
    except ValueError as exc:
        raise CorruptRecord(f"pending writes cannot be read back ({exc})") from exc


def written(ranges: Ranges, blocks: list[int]) -> list[Any]:
    """Ranges as written; before them, if there are any, the lane of their blocks and where."""
    flat: list[Any] = [n for start, stop in ranges for n in (start, stop - start)]
    return [blocks, *flat] if blocks else flat
