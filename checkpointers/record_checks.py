"""Validate the records of a thread that were read from another database.

A correct checksum does not prove that perdure wrote a row, because anyone who can write to an
unencrypted database file can add rows with correct checksums. Rows that perdure did not write can
refer to rows that do not exist. When a thread is imported from another database, this module checks
the references between the thread's rows before the rows are stored. Each reference must point to a
row that exists. Without the check, later reads of the thread could fail because of missing log
items. The checks also reject a forged reference that repeats the same log items a million times and
expands to a huge value.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

from perdure.checkpointers.manifest import (
    ALIASES,
    DELTA,
    DICT,
    DICT_HERE,
    ITEM,
    LIST,
    LIST_HERE,
    MAP,
    SNAPSHOT,
    ValueReference,
    compute_max_log_range_count,
)
from perdure.checkpointers.reader import CheckpointReader
from perdure.checkpointers.records import ChangesByOtherUsers
from perdure.checkpointers.thread_records import NamespaceRecords, ThreadRecords
from perdure.checkpointers.values import unpack

MALFORMED: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions that are raised for a record in a form that perdure never writes."""
# Latest valid Unix timestamp, in seconds: the last second of the year 9999.
_MAX_TIME: Final = 253_402_300_799
# Maximum nesting depth of value references. LangGraph's channels need only a depth of two.
_MAX_DEPTH: Final = 100
# Upper bound (exclusive) for the sequence numbers of imported checkpoints. It leaves half of the
# 32-bit range for checkpoints that are stored after the import.
_MAX_SEQ: Final = 1 << 31


def check_thread_records_well_formed(reader: CheckpointReader, records: ThreadRecords) -> None:
    """Check the records of a thread.

    The thread's log items must already have been read into `records`.

    Raises:
        One of `MALFORMED`: A record has a form that perdure never writes.
    """
    logs = records.sorted_positions
    _require(len({name for _, name, *_ in records.logs}) == len(logs), "two logs of one channel")
    for log_items in (records.items or {}).values():
        for position, body in log_items.items():
            if position >= ALIASES:
                _require(unpack(body) in log_items and unpack(body) < ALIASES, f"alias {position}")
    _require(type(records.seq) is int and 0 <= records.seq < _MAX_SEQ, "the number of puts")
    _check_times(records.created_at, records.updated_at)
    for times in records.times.values():
        _check_times(*times.values())
    if records.ttl is not None:
        minutes, since, keeps = records.ttl
        _require(0 < minutes < _MAX_TIME and keeps in (0, 1, 2), "the time to live")
        _check_times(since)
    if records.title is not None:
        _require(isinstance(records.title.text, str), "the title")
        _require(isinstance(records.title.message_id, str | None), "the message of the title")
    if records.listed_metadata is not None:
        _require(
            isinstance(reader.codec.decode(records.listed_metadata), dict), "the metadata for lists"
        )
    if records.client is not None:
        metadata, user, reserved, changes = records.client
        is_known = isinstance(metadata, dict) and isinstance(user, str | None)
        _require(is_known, "the metadata of clients")
        _require(isinstance(reserved, bool), "the mark of a reserved thread")
        _require(changes in get_args(ChangesByOtherUsers), "the record of changes by other users")
    for namespace in records.namespaces:
        _check_namespace_records_well_formed(reader, logs, namespace)


def _check_namespace_records_well_formed(
    reader: CheckpointReader, logs: Mapping[int, Sequence[int]], namespace: NamespaceRecords
) -> None:
    """Validate the checkpoints and pending writes of a namespace."""
    seqs = {seq for seq, _, _ in namespace.checkpoints}
    _require(namespace.head in seqs or not seqs, "the head")
    for _, put_at, snapshot in namespace.checkpoints:
        _check_times(put_at)
        stored, _ = snapshot.encoded_fields
        _require(isinstance(reader.codec.decode(stored), dict), "a checkpoint")
        _require(isinstance(reader.decode_metadata(snapshot), dict), "the metadata of a checkpoint")
        _require(isinstance(snapshot.channel_versions, dict), "the versions of channels")
        _require(
            all(isinstance(seen, dict) for seen in snapshot.versions_seen.values()), "versions seen"
        )
        for ref in snapshot.references.values():
            _check_reference_well_formed(logs, ref)
        # Each channel's transcript is stored as a log key and a flat list of ranges, `[start,
        # length, start, length, ...]`.
        transcripts: Mapping[str, Any] = snapshot.transcript
        for log, numbers in transcripts.values():
            _check_items_of_ranges_exist(logs[log], numbers)
    for _, _, _, writes in namespace.writes:
        for number, channel, ref in writes:
            _require(type(number) is int and isinstance(channel, str), "a write")
            _check_reference_well_formed(logs, ref)


def _check_reference_well_formed(
    logs: Mapping[int, Sequence[int]], ref: ValueReference, depth: int = 0
) -> None:
    """Check that a value reference is well formed and that the log items it points to exist.

    All kinds of value references are described in the module `manifest`.
    """
    _require(depth < _MAX_DEPTH, "the depth of references")
    if isinstance(ref, bytes):
        return
    kind, rest = ref[0], ref[1:]
    if kind == ITEM:
        log, position = rest
        _check_items_of_ranges_exist(logs[log], [position, 1])
    elif kind in (LIST, DICT):
        log, numbers = rest
        _check_items_of_ranges_exist(logs[log], numbers)
    elif kind == MAP:
        for inner in rest[0].values():
            _check_reference_well_formed(logs, inner, depth + 1)
    elif kind in (LIST_HERE, DICT_HERE):
        for element in rest[0]:
            if not isinstance(element, bytes):
                _check_items_of_ranges_exist(logs[element[0]], element[1:])
    else:
        _require(kind in (SNAPSHOT, DELTA), f"a reference of kind {kind!r}")
        if isinstance(rest[0], int):
            _require(kind == DELTA and rest[0] in (LIST, DICT), "an unknown value")
        else:
            _check_reference_well_formed(logs, rest[0], depth + 1)


def _check_items_of_ranges_exist(
    sorted_positions: Sequence[int], flat_ranges: Sequence[int]
) -> None:
    """Check that a log contains every item to which the log ranges of a value refer.

    A value with too many items is also rejected. A valid value has at most as many log ranges as
    `compute_max_log_range_count` returns. A single range cannot refer to more items than the log
    contains. The function allows one range more than `compute_max_log_range_count` returns.

    Args:
        sorted_positions: The positions of all items and aliases in the log.
        flat_ranges: The log ranges, as a flat list `[start, length, start, length, ...]`.
    """
    total = 0
    for start, length in zip(flat_ranges[::2], flat_ranges[1::2], strict=True):
        _require(type(start) is int and type(length) is int and start >= 0 < length, "a range")
        stop = start + length
        item_count = bisect_left(sorted_positions, stop) - bisect_left(sorted_positions, start)
        _require(item_count == length, f"items {start} to {stop}")
        total += length
    _require(
        total <= (compute_max_log_range_count(total) + 1) * len(sorted_positions),
        "the number of items of a value",
    )


def _check_times(*times: float) -> None:
    """Check that each time is a non-negative Unix timestamp in seconds before the year 10000."""
    _require(all(0 <= time <= _MAX_TIME for time in times), "a time")


def _require(is_valid: bool, part: str) -> None:
    """Raise a `ValueError` that names the invalid `part` of a record, unless `is_valid` is True."""
    if not is_valid:
        raise ValueError(f"{part} is not valid")
