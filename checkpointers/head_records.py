"""Read the ids and the metadata of the heads of many threads, without decoding the checkpoints.

A thread's row contains a copy of the metadata of the thread's head, except for some fields. The
checkpoint itself is decoded only if the row lacks the metadata, or if the caller needs one of the
excepted fields. `Checkpointer.heads` also returns the title and the status of each thread, and
costs several times as much.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from math import inf
from typing import Any, Final, NamedTuple

from perdure.checkpointers.reader import CheckpointReader
from perdure.checkpointers.records import (
    decode_stored_id,
    decrypt_listed_title_and_encoded_metadata,
    select_metadata_shown_in_thread_lists,
)
from perdure.storage.database import Database
from perdure.storage.flow import Flow, Row

# Maximum number of threads read by one SQL statement.
_PAGE: Final = 500
# Stored times are rounded when they are converted to datetimes. A search for active threads
# therefore starts this number of seconds earlier.
_ROUNDING_S: Final = 1e-6


class HeadRecord(NamedTuple):
    """The head of a thread: the checkpoint from which the next run of the root graph starts.

    Attributes:
        thread_id: The id of the thread.
        checkpoint_id: The id of the head, or None if the thread has no head.
        updated_at: The time (UTC) at which the thread was last written to.
        metadata: The metadata of the head. It contains at least the fields that the caller of
            `iter_head_pages` named, if the head has these fields.
    """

    thread_id: str
    checkpoint_id: str | None
    updated_at: datetime
    metadata: Mapping[str, Any]


def iter_head_pages(
    database: Database,
    reader: CheckpointReader,
    active_since: datetime | None,
    field_names: Iterable[str],
) -> Iterator[list[HeadRecord]]:
    """Yield the heads of all threads page by page, most recently active first.

    Each page is read in a transaction of its own. A thread that becomes active while the pages are
    read can be missing from them.

    Args:
        database: The checkpointer's database.
        reader: The checkpointer's reader.
        active_since: Only threads with activity at this time or later. None means all threads.
        field_names: The metadata fields that the caller needs.
    """
    fields = dict.fromkeys(field_names)
    is_listed = len(select_metadata_shown_in_thread_lists(fields)) == len(fields)
    since = -inf if active_since is None else active_since.timestamp() - _ROUNDING_S
    last_time, last_key = inf, 0

    def read_page() -> Flow[tuple[list[Row], list[HeadRecord]]]:
        rows = yield reader.sql("head_ids", last_time, last_key, since, _PAGE)
        return rows, (yield from _build_head_records(reader, rows, is_listed))

    while True:
        rows, heads = database.read(read_page)
        if heads:
            yield heads
        if len(rows) < _PAGE:
            return
        last_key, _, last_time, *_ = rows[-1]


def _build_head_records(
    reader: CheckpointReader, rows: list[Row], is_listed: bool
) -> Flow[list[HeadRecord]]:
    """Build the heads of rows `(thread_key, thread_id, updated_at, checkpoint_id, list_entry)`.

    If `is_listed` is False, the metadata is read from the checkpoints instead of the list entries.
    """
    metadata_by_key, decoded = dict[int, dict[str, Any]](), dict[bytes, dict[str, Any]]()
    thread_ids_without_metadata = dict[int, str]()
    for thread_key, thread_id, _, checkpoint_id, list_entry in rows:
        encoded = None
        if is_listed and checkpoint_id is not None:
            _, encoded = decrypt_listed_title_and_encoded_metadata(
                reader.seal, thread_id, list_entry
            )
        if encoded is not None:
            # Many threads have the same metadata, for example those of one user.
            if encoded not in decoded:
                decoded[encoded] = reader.codec.decode(encoded)
            metadata_by_key[thread_key] = decoded[encoded]
        elif checkpoint_id is not None:
            thread_ids_without_metadata[thread_key] = thread_id
    if thread_ids_without_metadata:
        keys = json.dumps([*thread_ids_without_metadata])
        for thread_key, *row in (yield reader.sql("root_heads", keys)):
            head = reader.decrypt_checkpoint_row(
                thread_ids_without_metadata[thread_key], "", tuple(row)
            )
            metadata_by_key[thread_key] = reader.decode_metadata(head)
    return [
        HeadRecord(
            thread_id,
            None if checkpoint_id is None else decode_stored_id(checkpoint_id),
            datetime.fromtimestamp(updated_at, UTC),
            metadata_by_key.get(thread_key, {}),
        )
        for thread_key, thread_id, updated_at, checkpoint_id, _ in rows
    ]
