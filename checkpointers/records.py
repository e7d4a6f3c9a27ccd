"""Encrypt and decrypt the rows of checkpoints, items, pending writes, threads, runs and crons.

The `encrypt_…` functions build the bytes that are stored in a row, and the `decrypt_…` functions
decode them. Without an encryption key, rows are stored unencrypted, and each row is protected by a
checksum (`storage/encryption.py`). A row's ids are passed to the encryption or checksum as
associated data, so that the body can be decrypted only together with the same ids. If a body is
copied to another row, decrypting it there raises an error.
"""

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

VIEWS_NAMESPACE: Final = "perdure:views"
"""The checkpoint namespace for views, which record the messages that were shown to models."""
# Maximum length, in characters, of an indexed metadata value. A search for a longer value cannot
# use the index and must read the rows.
_TAG_LIMIT: Final = 256
# Names of metadata fields that are not indexed. An index on these fields would not narrow a search,
# because their values are unique, constant, or limited to a few possibilities.
UNTAGGED_NAMES: Final = frozenset({"step", "parents", "source", "ls_integration"})
UNLISTED_NAMES: Final = frozenset(
    ("source", "step", "parents", "writes", "thread_id", "run_id", "imported", "titled", "times")
)
"""Names of metadata fields, internal or specific to one run, that thread lists do not show."""
UNLISTED_PREFIXES: Final = (
    "langgraph_",
    "perdure_",
    "checkpoint_",
    "counters_since_",
    "__",
    "run_attempt",
)
"""Prefixes of the names of other metadata fields that thread lists do not show."""
# Maximum nesting depth of metadata values that are indexed for thread searches. Deeper values are
# not indexed.
_TAG_LEVELS: Final = 16
# Maximum number of tags in a thread's search keys. A thread with more tags gets no search keys, so
# a search must read its row.
_MAX_TAGS: Final = 1_000


@lru_cache(maxsize=1024)
def encode_id_for_storage(id_text: str | None) -> bytes | str | None:
    """Convert an id to its stored form: 16 bytes for a canonical UUID, otherwise the text.

    >>> encode_id_for_storage("t-1")
    't-1'
    >>> len(encode_id_for_storage("1f0c8b9e-0000-6000-8000-000000000000"))
    16
    """
    if (
        id_text is None
        or len(id_text) != 36
        or id_text[8:24:5] != "----"
        or id_text != id_text.lower()
    ):
        return None if id_text is None else TextOrBytes(id_text)
    try:
        packed = bytes.fromhex(id_text.replace("-", ""))
    except ValueError:
        return TextOrBytes(id_text)
    return packed if len(packed) == 16 else TextOrBytes(id_text)


@lru_cache(maxsize=1024)
def decode_stored_id(stored_id: bytes | str | None) -> str | None:
    """Convert a stored id to text. `encode_id_for_storage` does the reverse."""
    stored_id = decode_text_or_bytes(stored_id)
    if not isinstance(stored_id, bytes):
        return stored_id and str(stored_id)
    text = stored_id.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def build_row_key(namespace_or_log_key: int, seq_or_position: int) -> int:
    """Return the row key of a checkpoint or of an item.

    Args:
        namespace_or_log_key: The key of the checkpoint's namespace, or of the item's log.
        seq_or_position: The sequence number of the checkpoint, or the position of the item.
    """
    return namespace_or_log_key << 32 | seq_or_position


def build_row_key_range(
    namespace_or_log_key: int, start: int = 0, stop: int = 1 << 32
) -> tuple[int, int]:
    """Convert a range of sequence numbers or positions to the half-open range of their row keys.

    The numbers are sequence numbers of a namespace's checkpoints, or positions of a log's items.
    """
    first_key = namespace_or_log_key << 32
    return first_key + start, first_key + min(stop, 1 << 32)


def compute_item_and_alias_position_ranges(
    last_item_row_key: int | None, last_alias_row_key: int | None
) -> list[tuple[int, int]]:
    """Return two position ranges of a log: the range of its items and the range of its aliases.

    Args:
        last_item_row_key: The row key of the last item, or None if the log has no items.
        last_alias_row_key: The row key of the last alias, or None if the log has no aliases.
    """
    next_item = 0 if last_item_row_key is None else (last_item_row_key & 0xFFFFFFFF) + 1
    next_alias = ALIASES if last_alias_row_key is None else (last_alias_row_key & 0xFFFFFFFF) + 1
    return [(0, next_item), (ALIASES, next_alias)]


def build_item_associated_data(thread_id: str, channel: str, position: int) -> AssociatedData:
    """Return the associated data that binds an encrypted item to its log position."""
    return ("item", thread_id, channel, position)


def compute_item_hash(seal: Seal, log_key: int, stored_item: bytes) -> int:
    """Return a hash of an item's content, for finding equal items in the same log.

    The upper bits are taken from the log key, so that hashes from the same log are adjacent in the
    index. The lower 40 bits are a BLAKE2b hash (RFC 7693) of the item, salted with the log key, so
    that equal contents in different threads have different hashes. Different contents can have the
    same hash, so callers must compare the contents as well.
    """
    digest = hashlib.blake2b(
        stored_item, digest_size=5, key=seal.hash_key, salt=log_key.to_bytes(8)
    ).digest()
    return (log_key & 0x7FFFFF) << 40 | int.from_bytes(digest, "big")


def compute_metadata_index_tag(seal: Seal, key: str, value: Any) -> int | None:
    """Return a metadata value's index tag (a keyed hash), or None if the value is not indexed.

    None is not indexed, because a LangGraph filter for None also matches metadata that lacks the
    key. Enum members are not indexed, because a process that cannot import the enum class decodes
    them to different values, which would have different tags.
    """
    if key in UNTAGGED_NAMES or isinstance(value, Enum) or not isinstance(value, str | int | float):
        return None
    if isinstance(seal, LangGraphSeal):
        # With a `LangGraphSeal`, each process has its own hash key, so no other process could find
        # a row by its tags. Searches read the rows instead.
        return None
    if isinstance(value, str) and len(value) > _TAG_LIMIT:
        return None
    if isinstance(value, int | float) and math.isfinite(value):
        # Numbers that compare equal, such as 1, 1.0 and True, or 0.0 and -0.0, must get the same
        # tag.
        value = float(value) + 0.0 if abs(value) < 1 << 53 else int(value)
    return _compute_tag_number(seal.hash_key, repr((key, value)))


@lru_cache(maxsize=1024)
def _compute_tag_number(hash_key: bytes, text: str) -> int:
    data = text.encode(errors="surrogatepass")
    digest = hashlib.blake2b(data, digest_size=8, key=hash_key).digest()
    return int.from_bytes(digest, "big", signed=True)


def compute_metadata_index_tags(seal: Seal, metadata: Mapping[str, Any]) -> list[int]:
    """Return the index tags of a checkpoint's metadata.

    Values that are not indexed get no tag.
    """
    tags = []
    for key, value in metadata.items():
        if (
            key not in UNTAGGED_NAMES
            and (tag_number := compute_metadata_index_tag(seal, key, value)) is not None
        ):
            tags.append(tag_number)
    return tags


def select_lineage(rows: Sequence[Row], checkpoint_key: int) -> list[Row]:
    """Return the rows of a checkpoint and of all its ancestors, starting with the checkpoint.

    Args:
        rows: Rows of one namespace that begin with `(row_key, checkpoint_id, parent_id)`.
        checkpoint_key: The row key of the checkpoint.
    """
    rows_by_id = {row[1]: row for row in rows}
    ancestor = next((row for row in rows if row[0] == checkpoint_key), None)
    lineage: dict[int, Row] = {}
    # A damaged database can contain a cycle of parents.
    while ancestor is not None and ancestor[0] not in lineage:
        lineage[ancestor[0]] = ancestor
        ancestor = rows_by_id.get(ancestor[2])
    return [*lineage.values()]


# -- checkpoints, pending writes and items


def build_checkpoint_associated_data(
    thread_id: str, checkpoint_ns: str, row: Row
) -> AssociatedData:
    """Return the associated data that binds a checkpoint's body to the other columns of the row.

    Args:
        thread_id: The thread.
        checkpoint_ns: The namespace.
        row: The columns `(row_key, checkpoint_id, parent_id, run_start, put_at)`, with ids as text.
    """
    key, checkpoint_id, parent_id, run_start, put_at = row[:5]
    return (
        "checkpoint",
        thread_id,
        checkpoint_ns,
        checkpoint_id,
        parent_id,
        key,
        run_start,
        repr(put_at),
    )


def encrypt_checkpoint(
    seal: Seal,
    thread_id: str,
    checkpoint_ns: str,
    row: Row,
    snapshot: Snapshot,
    transcript: Mapping[str, Any],
) -> bytes:
    """Encode and encrypt a checkpoint, and return the body of its row.

    Args:
        seal: Encrypts the body.
        thread_id: The thread.
        checkpoint_ns: The namespace.
        row: The columns `(row_key, checkpoint_id, parent_id, run_start, put_at)`.
        snapshot: The checkpoint.
        transcript: The part of the transcript to store; see `collect_transcript_ranges_to_store`.
    """
    parts: list[Any] = [
        snapshot.encoded_fields,
        snapshot.channel_versions,
        snapshot.versions_seen,
        snapshot.references,
        transcript,
    ]
    if snapshot.run_started_at is not None:
        parts.append(snapshot.run_started_at)
    row_with_ids = row[0], snapshot.checkpoint_id, snapshot.parent_id, *row[3:5]
    return seal.seal(
        pack(parts), build_checkpoint_associated_data(thread_id, checkpoint_ns, row_with_ids)
    )


def decrypt_checkpoint(seal: Seal, thread_id: str, checkpoint_ns: str, row: Row) -> Snapshot:
    """Decrypt a row of the `checkpoints` table, and return the checkpoint as a `Snapshot`.

    The row is `(row_key, checkpoint_id, parent_id, run_start, put_at, body)`. In the returned
    snapshot, the log ranges in `transcript` still have their stored form, a flat list of numbers,
    and `ranges` is empty. `CheckpointReader.unflatten_ranges_in_snapshot` must be called to convert
    the log ranges to pairs and to set `ranges`.

    Raises:
        CorruptRecord: The row is damaged or was tampered with.
    """
    key, packed_id, packed_parent, run_start, put_at, body = row
    checkpoint_id, parent_id = decode_stored_id(packed_id) or "", decode_stored_id(packed_parent)
    associated_data = build_checkpoint_associated_data(
        thread_id, checkpoint_ns, (key, checkpoint_id, parent_id, run_start, put_at)
    )
    fields, versions, versions_seen, references, transcript, *rest = _decrypt_and_unpack(
        seal, body, associated_data
    )
    snapshot = Snapshot(
        checkpoint_id,
        key,
        parent_id,
        run_start,
        fields,
        versions,
        versions_seen,
        references,
        transcript=transcript,
    )
    snapshot.run_started_at = rest[0] if rest and type(rest[0]) is float else None
    return snapshot


def collect_transcript_ranges_to_store(snapshot: Snapshot) -> dict[str, Any]:
    """Return the transcripts that must be stored in a checkpoint's row.

    A channel's transcript is not stored if it equals the channel's value.

    Returns:
        The log key and the flattened ranges of each channel, by channel.
    """
    return {
        channel: [log, flatten_ranges(ranges)]
        for channel, (log, ranges) in snapshot.transcript.items()
        if snapshot.ranges.get(channel) != (log, ranges)
    }


def encrypt_writes(seal: Seal, row_ids: AssociatedData, writes: list[Write]) -> bytes:
    """Encode and encrypt the pending writes of one task, and return the body of their row.

    Args:
        seal: Encrypts the body.
        row_ids: The thread, namespace, checkpoint id, task id and task path, to which the body is
            bound.
        writes: The writes of the task.
    """
    return seal.seal(pack(writes), ("writes", *row_ids))


def decrypt_writes(seal: Seal, thread_id: str, checkpoint_ns: str, row: Row) -> list[Write]:
    """Decrypt one task's pending writes.

    The row is `(checkpoint_id, task_id, task_path, body)`.

    Raises:
        CorruptRecord: The row is damaged or was tampered with.
    """
    associated_data = (
        "writes",
        thread_id,
        checkpoint_ns,
        decode_stored_id(row[0]) or "",
        decode_stored_id(row[1]) or "",
        row[2],
    )
    return _decrypt_and_unpack(seal, row[3], associated_data)  # type: ignore[no-any-return]


def decrypt_position_and_item(
    seal: Seal, thread_id: str, channel: str, item_key: int, body: bytes
) -> tuple[int, bytes]:
    """Decrypt an item from the columns of its row, and return its position and its content."""
    position = item_key & 0xFFFFFFFF
    return position, seal.unseal(body, build_item_associated_data(thread_id, channel, position))


# -- the list entry of a thread: its title and the metadata that lists show


def encrypt_thread_list_entry_and_build_search_keys(
    seal: Seal,
    thread_id: str,
    title: Title | None,
    decoded_and_encoded_metadata: tuple[Any, bytes] | None,
) -> tuple[bytes, bytes | None]:
    """Encrypt the title and the metadata that thread lists show for a thread.

    Also build the thread's search keys, so that a search can match the thread without decrypting
    its row.

    Args:
        seal: Encrypts the entry.
        thread_id: The thread.
        title: Its title, or None if the title is unknown.
        decoded_and_encoded_metadata: The metadata shown in lists, decoded and encoded; None if it
            is unknown.

    Returns:
        The entry and the search keys. The keys are None if a search must decrypt the thread's row.
    """
    entry = [
        *(title or (None, None)),
        decoded_and_encoded_metadata and decoded_and_encoded_metadata[1],
    ]
    search_keys = None
    if title is not None and decoded_and_encoded_metadata is not None:
        search_keys = build_thread_search_keys(
            seal, thread_id, title.text, decoded_and_encoded_metadata[0]
        )
    return seal.seal(pack(entry), ("title", thread_id)), search_keys


def decrypt_listed_title_and_encoded_metadata(
    seal: Seal, thread_id: str, stored: bytes | None
) -> tuple[Title | None, bytes | None]:
    """Decrypt a thread's entry in thread lists, and return its title and encoded metadata.

    A missing title or missing metadata is returned as None. If the list entry is damaged, the
    result is `(None, None)` instead of an error, because the entry can be rebuilt from the thread's
    head.
    """
    with suppress(CorruptRecord, TypeError, ValueError):
        if stored is not None:
            text, message_id, encoded_metadata = _decrypt_and_unpack(
                seal, stored, ("title", thread_id)
            )
            return None if text is None else Title(text, message_id), encoded_metadata
    return None, None


def select_metadata_shown_in_thread_lists(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a checkpoint's metadata that is shown in thread lists."""
    return {
        name: value
        for name, value in metadata.items()
        if name not in UNLISTED_NAMES
        and not (type(name) is str and name.startswith(UNLISTED_PREFIXES))
    }


def build_thread_search_keys(
    seal: Seal, thread_id: str, title: str, metadata: Mapping[str, Any]
) -> bytes | None:
    """Build a thread's search keys, so that a search can match it without decrypting its row.

    The search keys contain an index tag for each string and number in the metadata. If the database
    is not encrypted, the search keys also contain the case-folded thread id and title. The search
    keys can match a search that the thread itself does not match, so the caller must check each
    match against the decrypted row.

    Returns:
        The keys as one byte string, or None if the thread can only be found by reading its row.
    """
    if isinstance(seal, LangGraphSeal):
        # With a `LangGraphSeal`, each process has its own hash key, so the stored tags would not
        # match the tags that another process computes.
        return None
    tag_numbers = [*islice(iter_search_tags_of_nested_metadata(seal, metadata), _MAX_TAGS + 1)]
    if len(tag_numbers) > _MAX_TAGS:
        return None
    tags = b"".join(number.to_bytes(8, "big", signed=True) for number in tag_numbers)
    return tags + (
        fold_search_text(f"{thread_id}\0{title}") if isinstance(seal, ChecksumSeal) else b""
    )


def fold_search_text(text: str) -> bytes:
    """Case-fold and encode a string for comparison with a thread's search keys."""
    return text.casefold().encode(errors="surrogatepass")


def iter_search_tags_of_nested_metadata(seal: Seal, value: Any, *path: str) -> Iterator[int]:
    """Yield the tags of all strings and numbers in metadata.

    Values nested deeper than `_TAG_LEVELS` are skipped. A list element's tag does not depend on its
    index.

    Args:
        seal: Has the key of the hashes.
        value: The metadata, or a value in it.
        path: The keys under which the value is nested in the metadata.
    """
    if len(path) > _TAG_LEVELS:
        return
    if isinstance(value, Mapping):
        for name, nested_value in value.items():
            yield from iter_search_tags_of_nested_metadata(seal, nested_value, *path, str(name))
    elif isinstance(value, list | tuple):
        for nested_value in value:
            yield from iter_search_tags_of_nested_metadata(seal, nested_value, *path, "")
    elif (number := compute_metadata_index_tag(seal, "\0".join(path), value)) is not None:
        yield number


class ClientMetadata(NamedTuple):
    """Metadata that clients of the server have set for a thread, and data used for access control.

    Attributes:
        metadata: The metadata set by clients.
        source_user: The user of the original thread if this thread is a copy, otherwise None.
        is_reserved: Whether a client has only reserved the id, so that another program may start a
            thread with this id.
    """

    metadata: dict[str, Any]
    source_user: str | None = None
    is_reserved: bool = False


def encrypt_client_metadata_and_search_keys(
    seal: Seal, thread_id: str, client: ClientMetadata
) -> tuple[bytes, bytes | None]:
    """Encrypt the client metadata of a thread; return the encrypted data and the search keys."""
    search_keys = build_client_search_keys(seal, thread_id, client)
    return seal.seal(json.dumps(client, default=str).encode(), ("client", thread_id)), search_keys


def build_client_search_keys(seal: Seal, thread_id: str, client: ClientMetadata) -> bytes | None:
    """Build a thread's search keys from its client metadata; see `build_thread_search_keys`."""
    title = str(client.metadata.get("title") or "")
    return build_thread_search_keys(seal, thread_id, title, client.metadata)


def decrypt_client_metadata(
    seal: Seal, thread_id: str, stored: bytes | None
) -> ClientMetadata | None:
    """Decrypt the client metadata of a thread. Return None if the thread has no client metadata."""
    if stored is None:
        return None
    return ClientMetadata(*json.loads(seal.unseal(stored, ("client", thread_id))))


# -- runs of the server


class LiveRun(NamedTuple):
    """The ids, the owner and the state of a run, which are stored unencrypted.

    A list of live runs contains one `LiveRun` per run. A `RunRow` also contains a `LiveRun`, even
    if the run has already ended.

    Attributes:
        thread_id: The thread.
        thread_key, seq: The key of its row. Runs of a thread are executed in the order of `seq`.
        run_id: The id of the run.
        status: The status of the run.
        owner: The process that executes it or will execute it, or `""` for no process.
        graph: The id of its graph.
        attempt: The number of the attempt, starting at 1. It increases by 1 each time a process
            dies while executing the run.
        cancel_action: `"interrupt"` or `"rollback"` if the run is to be stopped, otherwise None.
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
    """A server run, decrypted from its database row.

    Attributes:
        live: Its ids, owner and status.
        created_at, updated_at: When it was created and when it was last changed, in seconds since
            1970.
        details: Its assistant, metadata, sender and other properties that do not change.
        error: The error with which it failed, or None.
        request: The request that it executes. None if it has ended and cannot be started again.
        not_before: The time before which it may not start, in seconds since 1970, or None.
    """

    live: LiveRun
    created_at: float
    updated_at: float
    details: Any
    error: Any = None
    request: Any = None
    not_before: float | None = None


def decrypt_run(seal: Seal, row: Row) -> RunRow:
    """Return a run from its row.

    Raises:
        CorruptRecord: The row is damaged or was tampered with.
    """
    live, (created_at, updated_at, *sealed, not_before) = LiveRun(*row[:9]), row[9:]
    details, error, request = [
        None if data is None else json.loads(seal.unseal(data, associated_data))
        for data, associated_data in zip(sealed, _build_run_associated_data(live), strict=True)
    ]
    return RunRow(live, created_at, updated_at, details, error, request, not_before)


def encrypt_run_details_error_and_request(
    seal: Seal, run: LiveRun, details_error_and_request: Sequence[Any]
) -> list[bytes | None]:
    """Encrypt a run's details, error and request, and return the results in this order."""
    return [
        None if part is None else seal.seal(json.dumps(part, default=str).encode(), associated_data)
        for part, associated_data in zip(
            details_error_and_request, _build_run_associated_data(run), strict=True
        )
    ]


def encrypt_events(
    seal: Seal, run: LiveRun, after_event: int, events: Sequence[tuple[Any, bytes]]
) -> bytes:
    """Encrypt a batch of a run's events, beginning after event number `after_event`."""
    return seal.seal(pack([*events]), ("events", run.thread_id, run.run_id, after_event))


def decrypt_batch_of_events(
    seal: Seal, thread_id: str, run_id: str, after_event: int, body: bytes | None
) -> list[tuple[Any, bytes]]:
    """Decrypt a batch of events. Each event is returned as a pair of its kind and encoded bytes.

    Raises:
        CorruptRecord: The row is damaged or was tampered with.
    """
    associated_data = "events", thread_id, run_id, after_event
    return (
        []
        if body is None
        else [(event, data) for event, data in _decrypt_and_unpack(seal, body, associated_data)]
    )


def _build_run_associated_data(live: LiveRun) -> list[AssociatedData]:
    return [(name, live.thread_id, live.run_id) for name in ("about", "error", "request")]


# -- crons of the server


class CronRow(NamedTuple):
    """A cron: a run that the server starts on a schedule.

    Attributes:
        cron_id: The id of the cron.
        thread_id: The thread of its runs. None means a new thread for each run.
        next_at: The time at which it is due next, in seconds since 1970; None means never.
        created_at, updated_at: When it was created and when it was last changed, in seconds since
            1970.
        content: The schedule and the request from the client, and the user of the cron.
    """

    cron_id: str
    thread_id: str | None
    next_at: float | None
    created_at: float
    updated_at: float
    content: Any


class DueCron(NamedTuple):
    """A cron that is due now, with its next due time, if any."""

    cron: CronRow
    next_at: float | None


def decrypt_cron(seal: Seal, row: Row) -> CronRow:
    """Decrypt a cron from its row.

    Raises:
        CorruptRecord: The row is damaged or was tampered with.
    """
    return CronRow(*row)._replace(content=json.loads(seal.unseal(row[5], ("cron", row[0]))))


def encrypt_cron(seal: Seal, cron: CronRow) -> bytes:
    """Encrypt the content of a cron."""
    return seal.seal(json.dumps(cron.content, default=str).encode(), ("cron", cron.cron_id))


def _decrypt_and_unpack(seal: Seal, body: bytes, associated_data: AssociatedData) -> Any:
    """Decrypt a row's body and decode it from msgpack."""
    try:
        return unpack(seal.unseal(body, associated_data))
    except ValueError as exc:
        raise CorruptRecord(
            f"the row {associated_data!r} is damaged and cannot be decoded ({exc}); restore the "
            "database from a backup"
        ) from exc
