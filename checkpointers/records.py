"""Encrypt and decrypt the rows of checkpoints, items, pending writes and threads.

The `encrypt_…` functions build the bytes that are stored in a row, and the `decrypt_…` functions
decode them. Without an encryption key, rows are stored unencrypted, and each row contains a
checksum by which damage is detected (`storage/encryption.py`). The encryption or the checksum of a
row's body also covers the row's ids, as associated data. The body can therefore be decrypted, or
verified by its checksum, only if the same ids are supplied as associated data. Decrypting a body
that was copied to another row raises an error.
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
from typing import Any, Final, Literal, NamedTuple

from perdure.checkpointers.cache import Snapshot, Title, Write
from perdure.checkpointers.manifest import ALIASES, encode_ranges
from perdure.checkpointers.values import pack, unpack
from perdure.errors import CorruptRecord
from perdure.storage.encryption import AssociatedData, ChecksumSeal, LangGraphSeal, Seal
from perdure.storage.flow import NamedSQL, Row, Statement, TextOrBytes, decode_text_or_bytes

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
# Maximum number of tags in a thread's search keys. A tag represents one metadata value of the
# thread. A thread with more tags gets no search keys, so each search must read the thread's row.
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
    """Convert a stored id, as returned by `encode_id_for_storage`, back to text."""
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

    `start` and `stop` are checkpoint sequence numbers for a namespace, or item positions for a log.
    """
    first_key = namespace_or_log_key << 32
    return first_key + start, first_key + min(stop, 1 << 32)


def compute_item_and_alias_position_ranges(
    last_item_row_key: int | None, last_alias_row_key: int | None
) -> list[tuple[int, int]]:
    """Return the range of a log's item positions and the range of its alias positions.

    An alias is a log entry that refers to an earlier item of the same log.

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
    """Return a hash of an item's content, used to find equal items in the same log.

    The upper bits of the hash come from the log key, so that hashes from one log are adjacent in
    the index. The lower 40 bits are a BLAKE2b hash (RFC 7693) of the item, salted with the log key,
    so that equal contents in different threads have different hashes. Different contents can have
    the same hash, so callers must compare the contents as well.
    """
    digest = hashlib.blake2b(
        stored_item, digest_size=5, key=seal.hash_key, salt=log_key.to_bytes(8)
    ).digest()
    return (log_key & 0x7FFFFF) << 40 | int.from_bytes(digest, "big")


def build_item_row(
    seal: Seal,
    thread_id: str,
    log_key: int,
    channel: str,
    position: int,
    content: bytes,
    stored_at: float,
) -> Row:
    """Encrypt an item or an alias, and return its row `(row_key, content_hash, stored_at, body)`.

    The content hash of an alias is 0.

    Args:
        seal: Encrypts the body.
        thread_id: The thread.
        log_key: The key of the log.
        channel: The channel of the log.
        position: The position in the log.
        content: The encoded item, or the encoded position of the item to which the alias refers.
        stored_at: The time of the first storage, in seconds since 1970.
    """
    content_hash = compute_item_hash(seal, log_key, content) if position < ALIASES else 0
    body = seal.seal(content, ("item", thread_id, channel, position))
    return log_key << 32 | position, content_hash, stored_at, body


def compute_metadata_index_tag(seal: Seal, key: str, value: Any) -> int | None:
    """Return a metadata value's index tag (a keyed hash), or None if the value is not indexed.

    None is not indexed, because a LangGraph filter for None also matches metadata that lacks the
    key. Enum members are not indexed. A process that cannot import the enum class decodes an enum
    member to a different value. The index tag of this value would not match the tag of the enum
    member.
    """
    if key in UNTAGGED_NAMES or isinstance(value, Enum) or not isinstance(value, str | int | float):
        return None
    if isinstance(seal, LangGraphSeal):
        # With a `LangGraphSeal`, each process has its own hash key. The tags that one process
        # stores therefore never match the tags that another process computes. Searches scan the
        # rows instead of looking up tags.
        return None
    if isinstance(value, str) and len(value) > _TAG_LIMIT:
        return None
    if isinstance(value, int | float) and math.isfinite(value):
        # Numbers that compare as equal, such as 1, 1.0 and True, or 0.0 and -0.0, must get the same
        # tag.
        value = float(value) + 0.0 if abs(value) < 1 << 53 else int(value)
    return _compute_tag_number(seal.hash_key, repr((key, value)))


@lru_cache(maxsize=1024)
def _compute_tag_number(hash_key: bytes, text: str) -> int:
    data = text.encode(errors="surrogatepass")
    digest = hashlib.blake2b(data, digest_size=8, key=hash_key).digest()
    return int.from_bytes(digest, "big", signed=True)


def compute_metadata_index_tags(seal: Seal, metadata: Mapping[str, Any]) -> list[int]:
    """Return the tags under which a checkpoint is indexed, computed from its metadata.

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


def compute_user_tags(seal: Seal, metadata: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the index tags of the values `user_id` and `owner` in the metadata of a thread.

    A tag is None if the metadata has no such value, or if the value is not indexed. See
    `compute_metadata_index_tag`.
    """
    user_tag = owner_tag = None
    if "user_id" in metadata:
        user_tag = compute_metadata_index_tag(seal, "user_id", metadata["user_id"])
    if "owner" in metadata:
        owner_tag = compute_metadata_index_tag(seal, "owner", metadata["owner"])
    return user_tag, owner_tag


def select_lineage(rows: Sequence[Row], checkpoint_key: int) -> list[Row]:
    """Return the rows of a checkpoint and of all its ancestors, starting with the checkpoint.

    Args:
        rows: Rows of one namespace that begin with `(row_key, checkpoint_id, parent_id)`.
        checkpoint_key: The row key of the checkpoint.
    """
    rows_by_id = {row[1]: row for row in rows}
    ancestor = next((row for row in rows if row[0] == checkpoint_key), None)
    lineage: dict[int, Row] = {}
    # In a damaged database, the parent ids of the checkpoints can form a cycle.
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
    transcript: Mapping[str, Any] | None = None,
) -> bytes:
    """Encode and encrypt a checkpoint, and return the body of its row.

    Args:
        seal: Encrypts the body.
        thread_id: The thread.
        checkpoint_ns: The namespace.
        row: The columns `(row_key, checkpoint_id, parent_id, run_start, put_at)`.
        snapshot: The checkpoint.
        transcript: The part of the transcript to store: the log key and the flattened ranges of
            each channel, by channel. None means the transcripts of `snapshot` that differ from the
            value of their channel.
    """
    if transcript is None:
        transcript = {}
        for channel, (log, ranges) in snapshot.transcript.items():
            if snapshot.ranges.get(channel) != (log, ranges):
                transcript[channel] = [log, encode_ranges(ranges)]
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
    snapshot, `ranges` is empty, and the log ranges in `transcript` still have their stored form,
    which is a flat list of numbers. Pass the returned snapshot to
    `CheckpointReader.unflatten_ranges_in_snapshot`, which sets `ranges` and converts the log ranges
    in `transcript` to `(start, stop)` pairs.

    Raises:
        CorruptRecord: The row is damaged or was tampered with.
    """
    key, packed_id, packed_parent, run_start, put_at, body = row
    checkpoint_id, parent_id = decode_stored_id(packed_id) or "", decode_stored_id(packed_parent)
    associated_data = build_checkpoint_associated_data(
        thread_id, checkpoint_ns, (key, checkpoint_id, parent_id, run_start, put_at)
    )
    fields, versions, versions_seen, references, transcript, *rest = decrypt_and_unpack(
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


def encrypt_writes(seal: Seal, row_ids: AssociatedData, writes: list[Write]) -> bytes:
    """Encode and encrypt the pending writes of one task.

    The returned bytes are stored in the column `body` of the table `writes`.

    Args:
        seal: Encrypts the body.
        row_ids: The thread, namespace, checkpoint id, task id and task path, to which the body is
            bound.
        writes: The writes of the task.
    """
    return seal.seal(pack(writes), ("writes", *row_ids))


def build_put_writes_statement(
    sql: NamedSQL, seal: Seal, namespace_key: int, row_ids: AssociatedData, writes: list[Write]
) -> Statement:
    """Build the statement that stores the pending writes of one task, and replaces earlier ones.

    See `encrypt_writes` for the arguments.
    """
    _, _, checkpoint_id, task_id, task_path = row_ids
    return sql(
        "put_writes",
        namespace_key,
        encode_id_for_storage(checkpoint_id),
        encode_id_for_storage(task_id),
        task_path,
        encrypt_writes(seal, row_ids, writes),
    )


def decrypt_writes(seal: Seal, thread_id: str, checkpoint_ns: str, row: Row) -> list[Write]:
    """Decrypt one task's pending writes.

    The row is `(checkpoint_id, task_id, task_path, body)`.

    Raises:
        CorruptRecord: The row is damaged or was tampered with.
    """
    associated_data = ("writes", thread_id, checkpoint_ns, *decode_ids_of_writes_row(row))
    return decrypt_and_unpack(seal, row[3], associated_data)  # type: ignore[no-any-return]


def decode_ids_of_writes_row(row: Row) -> tuple[str, str, str]:
    """Return the checkpoint id, the task id and the path of one task's pending writes.

    The row begins with `(checkpoint_id, task_id, task_path)`.
    """
    return decode_stored_id(row[0]) or "", decode_stored_id(row[1]) or "", row[2]


def decrypt_position_and_item(
    seal: Seal, thread_id: str, channel: str, item_key: int, body: bytes
) -> tuple[int, bytes]:
    """Decrypt an item from the columns of its row, and return its position and its content."""
    position = item_key & 0xFFFFFFFF
    return position, seal.unseal(body, build_item_associated_data(thread_id, channel, position))


# -- the list entry of a thread: its title and the metadata that lists show


class ThreadRow(NamedTuple):
    """A row of the table `threads`, with the columns that all queries for thread lists select.

    Attributes:
        key: The key of the thread.
        thread_id: The id of the thread.
        created_at: The time at which the thread was created, in seconds since 1970.
        updated_at: The time of the last activity, in seconds since 1970.
        indexed_key: The key that the index of thread ids has for the id. If this key is not `key`,
            the index is damaged.
        list_entry: The encrypted title and metadata of the head, or None if they are not stored.
    """

    key: int
    thread_id: str
    created_at: float
    updated_at: float
    indexed_key: int
    list_entry: bytes | None


def build_list_entry_update(
    sql: NamedSQL,
    seal: Seal,
    thread_key: int,
    thread_id: str,
    title: Title | None,
    decoded_and_encoded_metadata: tuple[Any, bytes] | None,
) -> Statement:
    """Build the statement that stores a thread's entry in thread lists.

    The statement also stores the thread's search keys, with which a search can match the thread
    without decrypting its row, and the index tags of the thread's user. If the metadata is unknown,
    the stored tags are not changed.

    Args:
        sql: The statements of the checkpointer.
        seal: Encrypts the entry.
        thread_key: The key of the thread.
        thread_id: The thread.
        title: Its title, or None if the title is unknown.
        decoded_and_encoded_metadata: The metadata shown in lists, decoded and encoded; None if it
            is unknown.
    """
    entry = [
        *(title or (None, None)),
        decoded_and_encoded_metadata and decoded_and_encoded_metadata[1],
    ]
    sealed = seal.seal(pack(entry), ("title", thread_id))
    if decoded_and_encoded_metadata is None:
        return sql("set_list_entry_without_user", sealed, None, thread_key)
    metadata = decoded_and_encoded_metadata[0]
    search_keys = None
    if title is not None:
        search_keys = build_thread_search_keys(seal, thread_id, title.text, metadata)
    user_tags = compute_user_tags(seal, metadata)
    return sql("set_list_entry", sealed, search_keys, *user_tags, thread_key)


def decrypt_listed_title_and_encoded_metadata(
    seal: Seal, thread_id: str, stored: bytes | None
) -> tuple[Title | None, bytes | None]:
    """Decrypt a thread-list entry, and return the thread's title and its encoded metadata (bytes).

    The returned title is None if the entry contains no title. The returned metadata is None if the
    entry contains no metadata. If the thread's entry is damaged, `(None, None)` is returned and no
    error is raised, because the entry can be rebuilt from the thread's head.
    """
    with suppress(CorruptRecord, TypeError, ValueError):
        if stored is not None:
            text, message_id, encoded_metadata = decrypt_and_unpack(
                seal, stored, ("title", thread_id)
            )
            return None if text is None else Title(text, message_id), encoded_metadata
    return None, None


def decrypt_listed_metadata(seal: Seal, thread_id: str, stored: bytes | None) -> bytes | None:
    """Decrypt a thread-list entry, and return only the thread's encoded metadata.

    See `decrypt_listed_title_and_encoded_metadata`, which takes twice as long.
    """
    if stored is None:
        return None
    try:
        _, _, encoded_metadata = unpack(seal.unseal(stored, ("title", thread_id)))
    except (CorruptRecord, TypeError, ValueError):
        return None
    return encoded_metadata  # type: ignore[no-any-return]


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
    is not encrypted, the search keys also contain the case-folded thread id and title. A search by
    search keys can return false positives, so the caller must check each match against the
    decrypted row.

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
    """Yield the index tag (a keyed hash) of each indexed string and number in nested metadata.

    No tags are yielded for values that are nested deeper than `_TAG_LEVELS` levels. The tag of a
    list element does not depend on the element's position in the list.

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


ChangesByOtherUsers = Literal["none", "earlier", "since_last_message"]
"""Whether users other than a thread's person have changed the thread.

`"earlier"` means that they have changed the thread only before the person's last message.
`"since_last_message"` means that they have changed it after that message.
"""


class ClientMetadata(NamedTuple):
    """Metadata that clients of the server have set for a thread, and data used for access control.

    Attributes:
        metadata: The metadata set by clients.
        source_user: The user of the original thread if this thread is a copy, otherwise None.
        is_reserved: Whether a client has only reserved the id, so that another program may start a
            thread with this id.
        changes_by_other_users: Whether other users have changed the thread of a user, and whether
            they did so after the last message from the thread's own user. Users who may act for the
            person do not count.
    """

    metadata: dict[str, Any]
    source_user: str | None = None
    is_reserved: bool = False
    changes_by_other_users: ChangesByOtherUsers = "none"

    def treat_changes_by_other_users_as_recent(self) -> ClientMetadata:
        """Return the updated metadata of a thread that was rewound or overwritten by an import.

        If other users have ever changed the thread, assume that they did so after the last message
        of the thread's user.
        """
        if self.changes_by_other_users == "none":
            return self
        return self._replace(changes_by_other_users="since_last_message")


def build_client_metadata_update(
    sql: NamedSQL, seal: Seal, thread_key: int, thread_id: str, client: ClientMetadata
) -> Statement:
    """Build the statement that stores a thread's client metadata.

    The statement also stores search keys and the index tags of the user, which are computed from
    the client metadata.
    """
    sealed = seal.seal(json.dumps(client, default=str).encode(), ("client", thread_id))
    search_keys = build_client_search_keys(seal, thread_id, client)
    user_tags = compute_user_tags(seal, client.metadata)
    return sql("set_client_metadata", sealed, search_keys, *user_tags, thread_key)


def build_client_search_keys(seal: Seal, thread_id: str, client: ClientMetadata) -> bytes | None:
    """Build a thread's search keys from its client metadata; see `build_thread_search_keys`."""
    return build_thread_search_keys(
        seal, thread_id, str(client.metadata.get("title") or ""), client.metadata
    )


def decrypt_client_metadata(
    seal: Seal, thread_id: str, stored: bytes | None
) -> ClientMetadata | None:
    """Decrypt the client metadata of a thread. Return None if the thread has no client metadata."""
    if stored is None:
        return None
    return ClientMetadata(*json.loads(seal.unseal(stored, ("client", thread_id))))


def decrypt_and_unpack(seal: Seal, body: bytes, associated_data: AssociatedData) -> Any:
    """Decrypt a row's body and decode it from msgpack.

    Raises:
        CorruptRecord: The row is damaged or was tampered with.
    """
    try:
        return unpack(seal.unseal(body, associated_data))
    except ValueError as exc:
        raise CorruptRecord(
            f"the row {associated_data!r} is damaged and cannot be decoded ({exc}); restore the "
            "database from a backup"
        ) from exc
