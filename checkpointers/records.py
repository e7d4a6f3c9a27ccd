"""Rows of checkpoints and pending writes, and the way back to snapshots."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import lru_cache
from itertools import islice
from typing import Any, Final, NamedTuple

from perdure.checkpointers.cache import Snapshot, Title, Write
from perdure.checkpointers.manifest import ALIASES, flatten_ranges
from perdure.checkpointers.values import pack, unpack
from perdure.errors import CorruptRecord
from perdure.storage.encryption import AssociatedData, ChecksumSeal, LangGraphSeal, Seal
from perdure.storage.flow import Row, TextOrBytes, decode_text_or_bytes

VIEWS_NAMESPACE: Final = (
    "perdure:views"  # the namespace of what models were shown, which is no graph's
)
_TAG_LIMIT: Final = 256  # characters; a longer metadata value is found by reading, not by index
# not worth an index: different at every checkpoint, or one of three values, or the same at each
UNTAGGED_NAMES: Final = frozenset({"step", "parents", "source", "ls_integration"})
UNLISTED_NAMES: Final = frozenset(
    ("source", "step", "parents", "writes", "thread_id", "run_id", "imported", "titled", "times")
)
"""Metadata that lists of threads do not tell: langgraph's, perdure's, and that of a run."""
UNLISTED_PREFIXES: Final = (
    "langgraph_",
    "perdure_",
    "checkpoint_",
    "counters_since_",
    "__",
    "run_attempt",
)
"""Nor do they tell metadata whose name begins with this."""
_TAG_LEVELS: Final = 16  # of what a list finds by its metadata
_MOST_TAGS: Final = 1_000  # of a thread in a list


@lru_cache(maxsize=1024)
def pack_id(text: str | None) -> bytes | str | None:
    """An id as it is stored: a UUID in canonical form takes 16 bytes, anything else its text.

    >>> pack_id("t-1"), len(pack_id("1f0c8b9e-0000-6000-8000-000000000000"))
    ('t-1', 16)
    """
    if text is None or len(text) != 36 or text[8:24:5] != "----" or text != text.lower():
        return None if text is None else TextOrBytes(text)
    try:
        packed = bytes.fromhex(text.replace("-", ""))
    except ValueError:
        return TextOrBytes(text)
    return packed if len(packed) == 16 else TextOrBytes(text)


@lru_cache(maxsize=1024)
def unpack_id(stored: bytes | str | None) -> str | None:
    """The id that `pack_id` was given."""
    stored = decode_text_or_bytes(stored)
    if not isinstance(stored, bytes):
        return stored and str(stored)
    text = stored.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def row_key(table: int, within: int) -> int:
    """The key of a row: a namespace and a place in put order, or a log and a position."""
    return table << 32 | within


def key_range(table: int, start: int = 0, stop: int = 1 << 32) -> tuple[int, int]:
    """The half-open range of keys of places `start` to `stop`, which may be beyond the last."""
    return (table << 32) + start, (table << 32) + min(stop, 1 << 32)


def next_log_positions(last: int | None, last_alias: int | None) -> list[tuple[int, int]]:
    """The positions of a log, given the keys of its last item and alias: of items, of aliases."""
    items = 0 if last is None else (last & 0xFFFFFFFF) + 1
    aliases = ALIASES if last_alias is None else (last_alias & 0xFFFFFFFF) + 1
    return [(0, items), (ALIASES, aliases)]


def item_associated_data(thread_id: str, channel: str, position: int) -> AssociatedData:
    """The data that binds an item to its row."""
    return ("item", thread_id, channel, position)


def content_hash(seal: Seal, log: int, stored: bytes) -> int:
    """A hash by which the same content is found within a log.

    The log leads, so that a thread's hashes lie together in the index; 40 bits of BLAKE2b follow,
    salted with the log (RFC 7693): equal contents of two threads have nothing in common.
    A match is confirmed by comparing the content itself.
    """
    digest = hashlib.blake2b(
        stored, digest_size=5, key=seal.hash_key, salt=log.to_bytes(8)
    ).digest()
    return (log & 0x7FFFFF) << 40 | int.from_bytes(digest, "big")


def metadata_tag(seal: Seal, key: str, value: Any) -> int | None:
    """The number under which checkpoints with a metadata value are indexed; None: it is not.

    Nothing is indexed under None: to langgraph a filter for it also means metadata without the key.
    Nor under a member of an enum: where its class is not known it is read as something else.
    """
    if key in UNTAGGED_NAMES or isinstance(value, Enum) or not isinstance(value, str | int | float):
        return None
    if isinstance(value, str) and len(value) > _TAG_LIMIT:
        return None
    if isinstance(value, int | float) and math.isfinite(value):
        # 1, 1.0 and True are equal, and so are 0.0 and -0.0
        value = float(value) + 0.0 if abs(value) < 1 << 53 else int(value)
    return _tag_number(seal.hash_key, repr((key, value)))


@lru_cache(maxsize=1024)
def _tag_number(hash_key: bytes, text: str) -> int:
    data = text.encode(errors="surrogatepass")
    digest = hashlib.blake2b(data, digest_size=8, key=hash_key).digest()
    return int.from_bytes(digest, "big", signed=True)


def metadata_tags(seal: Seal, metadata: Mapping[str, Any]) -> list[int]:
    """Every tag of a checkpoint."""
    tags = []
    for key, value in metadata.items():
        if key not in UNTAGGED_NAMES and (number := metadata_tag(seal, key, value)) is not None:
            tags.append(number)
    return tags


def select_lineage(rows: Sequence[Row], key: int) -> list[Row]:
    """Those of the rows `(id, uid, parent, ...)` that lead to a checkpoint, itself first."""
    by_uid = {row[1]: row for row in rows}
    at = next((row for row in rows if row[0] == key), None)
    out: dict[int, Row] = {}
    while at is not None and at[0] not in out:
        out[at[0]] = at
        at = by_uid.get(at[2])
    return [*out.values()]


# -- rows as they are sealed


def checkpoint_associated_data(thread_id: str, ns: str, row: Row) -> AssociatedData:
    """The data that binds a checkpoint to its row, all of it, with the ids as texts."""
    key, uid, parent, began, put_at = row[:5]
    return ("checkpoint", thread_id, ns, uid, parent, key, began, repr(put_at))


def encrypt_checkpoint(
    seal: Seal, thread_id: str, ns: str, row: Row, snapshot: Snapshot, said: Mapping[str, Any]
) -> bytes:
    """The body of a row `(id, uid, parent, began, put_at, ...)`, with `said` as it is written."""
    parts: list[Any] = [
        snapshot.encoded_fields,
        snapshot.channel_versions,
        snapshot.versions_seen,
        snapshot.references,
        said,
    ]
    if snapshot.run_started_at is not None:
        parts.append(snapshot.run_started_at)
    texts = row[0], snapshot.checkpoint_id, snapshot.parent_id, *row[3:5]
    return seal.seal(pack(parts), checkpoint_associated_data(thread_id, ns, texts))


def decrypt_checkpoint(seal: Seal, thread_id: str, ns: str, row: Row) -> Snapshot:
    """A row `(id, uid, parent, began, put_at, body)`: `said` as written, and `ranges` empty.

    Raises:
        CorruptRecord: It was damaged or tampered with.
    """
    key, packed, packed_parent, began, put_at, body = row
    uid, parent = unpack_id(packed) or "", unpack_id(packed_parent)
    at = checkpoint_associated_data(thread_id, ns, (key, uid, parent, began, put_at))
    fields, versions, seen, refs, said, *rest = _decrypt_and_unpack(seal, body, at)
    snapshot = Snapshot(uid, key, parent, began, fields, versions, seen, refs, transcript=said)
    snapshot.run_started_at = rest[0] if rest and type(rest[0]) is float else None
    return snapshot


def transcript_to_store(snapshot: Snapshot) -> dict[str, Any]:
    """The history as it is written: only if a channel does not hold all of it."""
    return {
        channel: [log, flatten_ranges(ranges)]
        for channel, (log, ranges) in snapshot.transcript.items()
        if snapshot.ranges.get(channel) != (log, ranges)
    }


def encrypt_writes(seal: Seal, at: AssociatedData, writes: list[Write]) -> bytes:
    """The body of the row that has what one task wrote.

    It is bound to `at`: thread, namespace, checkpoint, task, and the path that orders tasks.
    """
    return seal.seal(pack(writes), ("writes", *at))


def decrypt_writes(seal: Seal, thread_id: str, ns: str, row: Row) -> list[Write]:
    """The writes of one task, from its row `(uid, task, path, body)`.

    Raises:
        CorruptRecord: It was damaged or tampered with.
    """
    at = "writes", thread_id, ns, unpack_id(row[0]) or "", unpack_id(row[1]) or "", row[2]
    return _decrypt_and_unpack(seal, row[3], at)  # type: ignore[no-any-return]


def decrypt_item(
    seal: Seal, thread_id: str, channel: str, key: int, body: bytes
) -> tuple[int, bytes]:
    """The position and the content of an item, from its row."""
    position = key & 0xFFFFFFFF
    return position, seal.unseal(body, item_associated_data(thread_id, channel, position))


# -- what lists tell of a thread, which stands in its row


def encrypt_list_entry(
    seal: Seal, thread_id: str, title: Title | None, told: tuple[Any, bytes] | None
) -> tuple[bytes, bytes | None]:
    """What a thread is called and what is told of its head's metadata; what finds it by these.

    None: that is read from its head.
    """
    parts = [*(title or (None, None)), told and told[1]]
    found = None
    if title is not None and told is not None:
        found = build_search_keys(seal, thread_id, title.text, told[0])
    return seal.seal(pack(parts), ("title", thread_id)), found


def decrypt_list_entry(
    seal: Seal, thread_id: str, stored: bytes | None
) -> tuple[Title | None, bytes | None]:
    """The title, and the listed metadata as it is stored; None: it is unknown or damaged."""
    with suppress(CorruptRecord, TypeError, ValueError):
        if stored is not None:
            text, message, told = _decrypt_and_unpack(seal, stored, ("title", thread_id))
            return None if text is None else Title(text, message), told
    return None, None


def select_listed_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What lists tell of a checkpoint's metadata: not what langgraph and perdure keep there."""
    return {
        name: value
        for name, value in metadata.items()
        if name not in UNLISTED_NAMES
        and not (type(name) is str and name.startswith(UNLISTED_PREFIXES))
    }


def build_search_keys(
    seal: Seal, thread_id: str, title: str, metadata: Mapping[str, Any]
) -> bytes | None:
    """What a thread is found by, so that few rows are opened; None: by opening its row.

    These are the tags of all texts and numbers in the metadata and, without a key, the id and the
    title with their case folded. Rows that are found are compared with what was asked for.
    """
    if isinstance(seal, LangGraphSeal):
        return None
    numbers = [*islice(iter_nested_tags(seal, metadata), _MOST_TAGS + 1)]
    if len(numbers) > _MOST_TAGS:
        return None
    tags = b"".join(number.to_bytes(8, "big", signed=True) for number in numbers)
    return tags + (
        fold_search_text(f"{thread_id}\0{title}") if isinstance(seal, ChecksumSeal) else b""
    )


def fold_search_text(text: str) -> bytes:
    """A text as `build_search_keys` has it."""
    return text.casefold().encode(errors="surrogatepass")


def iter_nested_tags(seal: Seal, value: Any, *path: str) -> Iterator[int]:
    """The tags of all texts and numbers in a value, to a depth; those of lists are not in order."""
    if len(path) > _TAG_LEVELS:
        return
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from iter_nested_tags(seal, inner, *path, str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from iter_nested_tags(seal, inner, *path, "")
    elif (number := metadata_tag(seal, "\0".join(path), value)) is not None:
        yield number


class ClientMetadata(NamedTuple):
    """What the server keeps of a thread for langgraph's clients.

    Attributes:
        metadata: What clients gave it.
        source_user: The user of the thread it is a copy of.
        reserved: Whether it only has its id: another program may begin a thread of this id.
    """

    metadata: dict[str, Any]
    source_user: str | None = None
    is_reserved: bool = False


def encrypt_client_metadata(
    seal: Seal, thread_id: str, client: ClientMetadata
) -> tuple[bytes, bytes | None]:
    """The sealed form of it in the row of its thread, and what finds the thread by it."""
    found = build_client_search_keys(seal, thread_id, client)
    return seal.seal(json.dumps(client, default=str).encode(), ("client", thread_id)), found


def build_client_search_keys(seal: Seal, thread_id: str, client: ClientMetadata) -> bytes | None:
    """See `build_search_keys`."""
    title = str(client.metadata.get("title") or "")
    return build_search_keys(seal, thread_id, title, client.metadata)


def decrypt_client_metadata(
    seal: Seal, thread_id: str, stored: bytes | None
) -> ClientMetadata | None:
    """What `encrypt_client_metadata` was given; None: the server knows nothing of the thread."""
    if stored is None:
        return None
    return ClientMetadata(*json.loads(seal.unseal(stored, ("client", thread_id))))


# -- runs of the server


class LiveRun(NamedTuple):
    """A run that is under way or waits.

    Attributes:
        thread, seq: Its key; runs of a thread are in the order of `seq`.
        owner: The process that runs it, or will; `""`: none does.
        attempt: 1, and 1 more for each process that died while it ran it.
        cancel: How it is to be stopped; None: it is not.
    """

    thread_id: str
    thread_key: int
    seq: int
    run_id: str
    status: str
    owner: str
    graph: str
    attempt: int
    cancel_action: str | None


class RunRow(NamedTuple):
    """A run.

    Attributes:
        about: What is told of it.
        error: Why it failed.
        request: What it is asked to do; None: it has ended, and need not be asked again.
        not_before: When it may begin; None: at once.
    """

    live: LiveRun
    created_at: float
    updated_at: float
    details: Any
    error: Any = None
    request: Any = None
    not_before: float | None = None


def decrypt_run(seal: Seal, row: Row) -> RunRow:
    """A run, from its row.

    Raises:
        CorruptRecord: It was damaged or tampered with.
    """
    live, (created_at, updated_at, *sealed, not_before) = LiveRun(*row[:9]), row[9:]
    about, error, request = [
        None if data is None else json.loads(seal.unseal(data, place))
        for data, place in zip(sealed, _run_associated_data(live), strict=True)
    ]
    return RunRow(live, created_at, updated_at, about, error, request, not_before)


def encrypt_run(seal: Seal, live: LiveRun, parts: Sequence[Any]) -> list[bytes | None]:
    """What is told of a run, its error and its request, as they are stored."""
    return [
        None if part is None else seal.seal(json.dumps(part, default=str).encode(), place)
        for part, place in zip(parts, _run_associated_data(live), strict=True)
    ]


def encrypt_events(
    seal: Seal, run: LiveRun, since: int, events: Sequence[tuple[Any, bytes]]
) -> bytes:
    """What a run told after an event, as it is stored."""
    return seal.seal(pack([*events]), ("events", run.thread_id, run.run_id, since))


def decrypt_events(
    seal: Seal, thread_id: str, run_id: str, since: int, body: bytes | None
) -> list[tuple[Any, bytes]]:
    """What `encrypt_events` was given.

    Raises:
        CorruptRecord: It was damaged or tampered with.
    """
    place = "events", thread_id, run_id, since
    return (
        [] if body is None else [(of, data) for of, data in _decrypt_and_unpack(seal, body, place)]
    )


def _run_associated_data(live: LiveRun) -> list[AssociatedData]:
    return [(name, live.thread_id, live.run_id) for name in ("about", "error", "request")]


# -- crons of the server


class CronRow(NamedTuple):
    """What is run on a schedule.

    Attributes:
        thread_id: On which thread; None: on a new one each time.
        next_at: When it is due; None: never again.
        content: What clients gave it, and whose it is.
    """

    cron_id: str
    thread_id: str | None
    next_at: float | None
    created_at: float
    updated_at: float
    content: Any


class DueCron(NamedTuple):
    """A cron whose time has come, and when it is due next."""

    cron: CronRow
    next_at: float | None


def decrypt_cron(seal: Seal, row: Row) -> CronRow:
    """A cron, from its row.

    Raises:
        CorruptRecord: It was damaged or tampered with.
    """
    return CronRow(*row)._replace(content=json.loads(seal.unseal(row[5], ("cron", row[0]))))


def encrypt_cron(seal: Seal, cron: CronRow) -> bytes:
    """The content of a cron, as it is stored."""
    return seal.seal(json.dumps(cron.content, default=str).encode(), ("cron", cron.cron_id))


def _decrypt_and_unpack(seal: Seal, body: bytes, place: AssociatedData) -> Any:
    try:
        return unpack(seal.unseal(body, place))
    except ValueError as exc:
        raise CorruptRecord(
            f"the row {place!r} cannot be read back ({exc}): it is damaged"
        ) from exc
