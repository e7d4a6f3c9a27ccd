"""Search all threads for those whose heads have a property, at a low cost per thread.

`iter_head_pages` reads the ids and the metadata of heads. A thread's row contains a copy of the
metadata of the thread's head, except for some fields. The checkpoint itself is decoded only if the
row lacks the metadata, or if the caller needs one of the excepted fields. `Checkpointer.heads` also
returns the title and the status of each thread, and costs several times as much.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import chain
from math import inf
from typing import Any, Final, NamedTuple, TypeVar

from perdure.checkpointers.reader import CheckpointReader
from perdure.checkpointers.records import (
    decode_stored_id,
    decrypt_listed_metadata,
    select_metadata_shown_in_thread_lists,
)
from perdure.storage.database import Database
from perdure.storage.flow import Flow, Row

T = TypeVar("T")
# Maximum number of threads read by one SQL statement.
_PAGE: Final = 500
# Stored times are rounded when they are converted to datetimes. A search for active threads
# therefore starts this number of seconds earlier.
_ACTIVITY_TIME_MARGIN_S: Final = 1e-6


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
    are_fields_listed = len(select_metadata_shown_in_thread_lists(fields)) == len(fields)
    since = -inf if active_since is None else active_since.timestamp() - _ACTIVITY_TIME_MARGIN_S
    return _iter_pages(
        database, reader, since, lambda rows: _build_head_records(reader, rows, are_fields_listed)
    )


def find_ids_of_possibly_idle_threads(
    database: Database, reader: CheckpointReader, before: datetime
) -> list[str]:
    """Return the ids of all threads that may have been idle since a given time.

    These are the threads without activity since `before`, the threads whose head has an earlier
    `ts`, and the threads without a head. The caller checks each thread again in the transaction
    that uses it.

    Args:
        database: The checkpointer's database.
        reader: The checkpointer's reader.
        before: Threads without activity since this time count as possibly idle.

    Returns:
        The ids, in the order of the threads' row keys.
    """
    pages = _iter_pages(
        database,
        reader,
        -inf,
        lambda rows: _find_possibly_idle_threads(reader, rows, before.timestamp()),
    )
    return [thread_id for _, thread_id in sorted(chain.from_iterable(pages))]


def _iter_pages(
    database: Database,
    reader: CheckpointReader,
    since: float,
    build_page: Callable[[list[Row]], Flow[list[T]]],
) -> Iterator[list[T]]:
    """Yield the pages that `build_page` builds from rows of the statement `head_ids`.

    `since` is the time of the earliest activity, in seconds since 1970.
    """
    last_time, last_key = inf, 0

    def read_page() -> Flow[tuple[list[Row], list[T]]]:
        rows = yield reader.sql("head_ids", last_time, last_key, since, _PAGE)
        return rows, (yield from build_page(rows))

    while True:
        rows, page = database.read(read_page)
        yield page
        if len(rows) < _PAGE:
            return
        last_key, _, last_time, *_ = rows[-1]


def _find_possibly_idle_threads(
    reader: CheckpointReader, rows: list[Row], before: float
) -> Flow[list[tuple[int, str]]]:
    """Return the keys and ids of the threads in `rows` that may have been idle since `before`."""
    idle_keys = {
        key for key, _, updated_at, head_id, _ in rows if head_id is None or updated_at < before
    }
    other_threads = {key: (name, time) for key, name, time, *_ in rows if key not in idle_keys}
    if other_threads:
        for key, *row in (yield reader.sql("root_heads", json.dumps([*other_threads]))):
            thread_id, updated_at = other_threads[key]
            head = reader.decrypt_checkpoint_row(thread_id, "", tuple(row))
            if reader.decode_checkpoint_unix_time(head, updated_at) < before:
                idle_keys.add(key)
    return [(key, thread_id) for key, thread_id, *_ in rows if key in idle_keys]


def _build_head_records(
    reader: CheckpointReader, rows: list[Row], are_fields_listed: bool
) -> Flow[list[HeadRecord]]:
    """Build the heads of rows `(thread_key, thread_id, updated_at, checkpoint_id, list_entry)`.

    If `are_fields_listed` is False, the metadata is read from the checkpoints instead of the list
    entries.
    """
    metadata_by_key, decoded = dict[int, dict[str, Any]](), dict[bytes, dict[str, Any]]()
    thread_ids_without_metadata = dict[int, str]()
    for thread_key, thread_id, _, checkpoint_id, list_entry in rows:
        encoded = None
        if are_fields_listed and checkpoint_id is not None:
            encoded = decrypt_listed_metadata(reader.seal, thread_id, list_entry)
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
