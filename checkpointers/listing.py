"""List checkpoints, filtered by thread, namespace, metadata and age.

The checkpoints are read page by page, and each page is read on demand. After a page has been read,
no connection or transaction stays open until the next page is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from heapq import merge
from operator import itemgetter
from typing import Any, Final

from langchain_core.runnables import RunnableConfig

from perdure.checkpointers.address import Address, check_optional_text, parse_checkpoint_address
from perdure.checkpointers.reader import CheckpointReader, build_damaged_index_error
from perdure.checkpointers.records import (
    build_row_key,
    build_row_key_range,
    compute_metadata_index_tag,
    compute_metadata_index_tags,
    decode_stored_id,
    encode_id_for_storage,
)
from perdure.storage.database import Database
from perdure.storage.encryption import Seal
from perdure.storage.flow import Flow, Row, fetch_rows

# Maximum number of rows read by one SQL statement.
_PAGE: Final = 256
# Bit mask that extracts a checkpoint's sequence number from its row key.
_SEQ_MASK: Final = 0xFFFFFFFF
# Highest possible row key of a checkpoint.
_MAX_KEY: Final = (1 << 63) - 1
MetadataFilter = Mapping[str, Any]
"""Values that the metadata of a checkpoint must have, by key or dotted path."""


def metadata_matches(metadata: Mapping[str, Any], where: MetadataFilter) -> bool:
    """Return whether a checkpoint's metadata matches all key-value pairs of a filter.

    A key of the filter, such as `a.b`, can also be a dotted path to a value in a nested dict of the
    metadata.
    """
    return all(_get_metadata_by_path(metadata, name) == value for name, value in where.items())


def compute_tag_of_first_indexed_filter_value(seal: Seal, where: MetadataFilter) -> int | None:
    """Return the index tag of the first filter value that has one, or None if no value has a tag.

    A tag is a number that represents a value in the metadata index.
    """
    tags = (
        compute_metadata_index_tag(seal, name, where[name]) for name in where if "." not in name
    )
    return next((tag for tag in tags if tag is not None), None)


def _get_metadata_by_path(metadata: Mapping[str, Any], path: str) -> Any:
    """Return the value of a key or dotted path in nested dicts, or None if it is missing."""
    if path in metadata or "." not in path:
        return metadata.get(path)
    value: Any = metadata
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


class Listing:
    """Lists a database's checkpoints and thread ids."""

    def __init__(self, reader: CheckpointReader, database: Database) -> None:
        self.reader, self.sql, self.seal = reader, reader.sql, reader.seal
        self.read = database.read

    def iter_addresses_and_row_keys(
        self,
        config: RunnableConfig | None,
        where: MetadataFilter | None,
        before: RunnableConfig | None,
    ) -> Iterator[tuple[Address, int]]:
        """Yield the address and row key of each checkpoint that `Checkpointer.list` returns."""
        where = where or {}
        # Do not call `parse_checkpoint_address` with the config `before`, because `before` may lack
        # a `thread_id`.
        before_fields = before.get("configurable") if before else None
        before_id = (
            check_optional_text("checkpoint_id", before_fields.get("checkpoint_id"))
            if before_fields
            else None
        )
        if config is not None:
            address = parse_checkpoint_address(config)
            ns = config.get("configurable", {}).get("checkpoint_ns")
            yield from self._iter_addresses_and_row_keys_of_thread(
                address.thread_id, ns, where, before_id, address.checkpoint_id
            )
            return
        tagged_checkpoints = self.read(
            lambda: self.find_thread_ids_and_checkpoint_keys_by_metadata_index(where)
        )
        thread_ids: Iterable[str] = self.iter_thread_ids()
        if tagged_checkpoints is not None:
            thread_ids = dict.fromkeys(thread_id for thread_id, _ in tagged_checkpoints)
        for thread_id in thread_ids:
            yield from self._iter_addresses_and_row_keys_of_thread(
                thread_id, None, where, before_id, None
            )

    def iter_thread_ids(self) -> Iterator[str]:
        """Yield the ids of all threads, in the order of their keys.

        The threads are ordered by their row keys in the database. Each process reserves blocks of
        row keys, so the order of the keys is not always the order in which the threads were
        created.
        """
        last_key = 0
        while rows := self.read(partial(fetch_rows, self.sql["thread_ids"], last_key, _PAGE)):
            for thread_key, thread_id, indexed_key in rows:
                if indexed_key != thread_key:
                    raise build_damaged_index_error(
                        "an index of the table 'threads' does not match the row with "
                        f"thread_key = {thread_key}"
                    )
                yield thread_id
            last_key = rows[-1][0]

    # -- by the index of metadata

    def find_thread_ids_and_checkpoint_keys_by_metadata_index(
        self, where: MetadataFilter
    ) -> Flow[list[tuple[str, int]] | None]:
        """Find the checkpoints that match a metadata filter, using the metadata index.

        Returns:
            The thread id and the key of each checkpoint, or None if no value of the filter is
            indexed.

        Raises:
            CorruptRecord: The index is damaged.
        """
        tag, last_key = compute_tag_of_first_indexed_filter_value(self.seal, where), -1
        if tag is None:
            return None
        yield from self._check_neighbours_of_index_range_for_damage(tag, 0, _MAX_KEY)
        matching = []
        while rows := (yield self.sql("tagged_checkpoints", tag, last_key, _PAGE)):
            for thread_id, ns, *row in rows:
                if row[0] <= last_key:
                    raise build_damaged_index_error(
                        "the metadata index does not match the row of the table 'checkpoints' with "
                        f"row_key = {row[0]}"
                    )
                last_key = row[0]
                if metadata_matches(
                    self._check_metadata_index_and_decode_metadata(thread_id, ns, row, tag, True),
                    where,
                ):
                    matching.append((thread_id, last_key))
        return matching

    def _check_neighbours_of_index_range_for_damage(
        self, index_tag: int, start_key: int, stop_key: int
    ) -> Flow[None]:
        """Check the metadata index entries adjacent to a searched range for corruption.

        A corrupt entry of the metadata index can end a search too early only if the entry is
        directly before or after the searched range.
        """
        # The statement `neighbouring_tags` reads the index entries that are checked for corruption.
        # On Postgres, this statement is empty, because Postgres has its own checks for index
        # corruption.
        if self.sql["neighbouring_tags"]:
            neighbours = yield self.sql("neighbouring_tags", index_tag, start_key, stop_key)
            for indexed, thread_id, ns, *row in neighbours:
                self._check_metadata_index_and_decode_metadata(
                    thread_id, ns, row, index_tag, bool(indexed)
                )

    def _check_metadata_index_and_decode_metadata(
        self, thread_id: str | None, ns: str, row: list[Any], index_tag: int, has_index_entry: bool
    ) -> dict[str, Any]:
        """Check that the metadata index matches a checkpoint's metadata, and return the metadata.

        Args:
            thread_id: The thread, or None if the checkpoint has none.
            ns: The namespace.
            row: The row of the checkpoint.
            index_tag: The tag that was searched.
            has_index_entry: Whether the index has an entry of the tag for the checkpoint.

        Raises:
            CorruptRecord: The index is damaged.
        """
        if thread_id is not None and row[1] is not None:
            metadata = self.reader.decode_metadata(
                self.reader.decrypt_checkpoint_row(thread_id, ns, tuple(row))
            )
            if has_index_entry == (index_tag in compute_metadata_index_tags(self.seal, metadata)):
                return metadata
        raise build_damaged_index_error(
            f"the metadata index does not match row {row[0]} of the table 'checkpoints'"
        )

    # -- within a thread

    def _iter_addresses_and_row_keys_of_thread(
        self,
        thread_id: str,
        ns: str | None,
        where: MetadataFilter,
        before_id: str | None,
        only_id: str | None,
    ) -> Iterator[tuple[Address, int]]:
        """Yield the address and row key of each checkpoint of a thread that matches the filters.

        The checkpoints are sorted by storage time, newest first, except that the head of each
        namespace comes before all other checkpoints of its namespace.

        Args:
            thread_id: The thread.
            ns: The namespace, or None for all.
            where: The filter.
            before_id: Only checkpoints that are older than the one with this id are listed. None
                means no limit.
            only_id: The id of the only checkpoint to list, or None for all checkpoints.
        """
        seq, namespaces = self.read(lambda: self._read_last_seq_and_namespace_rows(thread_id))
        row_iterators = [
            self._iter_rows_with_sort_seqs_and_addresses(
                Address(thread_id, name, only_id), key, head, where, before_id, seq + 1
            )
            for key, name, head in namespaces
            if ns is None or name == ns
        ]
        for _, address, row in merge(*row_iterators, key=itemgetter(0), reverse=True):
            yield address._replace(checkpoint_id=decode_stored_id(row[1])), row[0]

    def _read_last_seq_and_namespace_rows(self, thread_id: str) -> Flow[tuple[int, list[Row]]]:
        """Read a thread's last sequence number, and the thread's rows in the table `namespaces`.

        The last sequence number of a thread is that of its most recently stored checkpoint, even if
        that checkpoint has since been deleted.
        """
        rows = yield self.sql("find_thread", thread_id)
        if not rows:
            yield from self.reader.verify_checkpoint_missing(Address(thread_id, "", None))
            return 0, []
        thread_key, seq, *_ = rows[0]
        namespaces = yield self.sql("thread_namespaces", thread_key)
        if any(head > seq for _, _, head in namespaces):
            raise build_damaged_index_error(
                f"two indexes return different newest checkpoints for the thread {thread_id!r}"
            )
        return seq, namespaces

    def _iter_rows_with_sort_seqs_and_addresses(
        self,
        address: Address,
        namespace: int,
        head: int,
        where: MetadataFilter,
        before_id: str | None,
        stop_seq: int,
    ) -> Iterator[tuple[int, Address, Row]]:
        """Yield a namespace's rows that match `where` and have sequence numbers below `stop_seq`.

        The head of the namespace is yielded first, even if it is not the newest checkpoint. The
        head is yielded with the sequence number of the newest matching row, so that the head stays
        first when the caller sorts by sequence number. The other rows follow, newest first.

        Yields:
            The sequence number to sort by, the address of the namespace, and the row.
        """
        if before_id is not None:
            stop_seq, before_id = self.read(
                partial(
                    self._find_upper_bound_seq_and_id,
                    address._replace(checkpoint_id=before_id),
                    namespace,
                    stop_seq,
                )
            )

        def is_match(row: Row) -> bool:
            if before_id is not None and not str(decode_stored_id(row[1])) < before_id:
                return False
            return not where or metadata_matches(
                self.reader.decode_metadata(
                    self.reader.decrypt_checkpoint_row(
                        address.thread_id, address.checkpoint_ns, row
                    )
                ),
                where,
            )

        if address.checkpoint_id is not None:
            sql_and_params = (
                self.sql["find_checkpoint"],
                namespace,
                encode_id_for_storage(address.checkpoint_id),
            )
            rows = [
                row
                for row in self.read(lambda: fetch_rows(*sql_and_params))
                if row[0] & _SEQ_MASK < stop_seq
            ]
            yield from ((row[0] & _SEQ_MASK, address, row) for row in rows if is_match(row))
            return
        head_key = build_row_key(namespace, head) if 0 < head < stop_seq else None
        for number, row in enumerate(
            self._iter_matching_rows(namespace, stop_seq, where, is_match)
        ):
            seq = row[0] & _SEQ_MASK
            if number == 0 and head_key not in (None, row[0]):
                heads = self.read(lambda: fetch_rows(self.sql["checkpoint_row"], head_key))
                yield from ((seq, address, head_row) for head_row in heads if is_match(head_row))
            if number == 0 or row[0] != head_key:
                yield seq, address, row

    def _iter_matching_rows(
        self, namespace: int, stop: int, where: MetadataFilter, is_match: Callable[[Row], bool]
    ) -> Iterator[Row]:
        """Yield the rows of a namespace that match a filter, newest first, one page at a time."""
        while stop > 0:
            rows = self.read(
                partial(self._read_page_of_rows, *build_row_key_range(namespace, 0, stop), where)
            )
            keys = [row[0] for row in rows]
            if keys != sorted(set(keys), reverse=True) or any(row[1] is None for row in rows):
                raise build_damaged_index_error(
                    "an index of the table 'checkpoints' does not match the rows with "
                    f"namespace_key = {namespace}"
                )
            stop = rows[-1][0] & _SEQ_MASK if len(rows) == _PAGE else 0
            yield from filter(is_match, rows)

    def _find_upper_bound_seq_and_id(
        self, before: Address, namespace: int, stop_seq: int
    ) -> Flow[tuple[int, str | None]]:
        """Find the sequence number or id that bounds a list of checkpoints older than `before`.

        The bound is exclusive. The bound is a sequence number or a checkpoint id.

        Returns:
            The sequence number of the checkpoint and None, if the checkpoint is in the namespace.
            Otherwise `stop_seq` and the id of the checkpoint. The caller then lists the checkpoints
            whose ids are lower, as langgraph's savers do. langgraph passes the id of a checkpoint
            of the parent graph to find the state that a subgraph had at that checkpoint.
        """
        checkpoint_id = before.checkpoint_id
        rows = yield self.sql("find_checkpoint", namespace, encode_id_for_storage(checkpoint_id))
        if rows and decode_stored_id(rows[0][1]) != checkpoint_id:
            raise build_damaged_index_error(
                f"a database index does not match the row of the checkpoint {checkpoint_id!r}"
            )
        if rows:
            return rows[0][0] & _SEQ_MASK, None
        yield from self.reader.verify_checkpoint_missing(before)
        return stop_seq, checkpoint_id

    def _read_page_of_rows(self, start: int, stop: int, where: MetadataFilter) -> Flow[list[Row]]:
        """Read one page of checkpoint rows that may match a filter, newest first.

        Only rows whose keys are at least `start` and less than `stop` are read.
        """
        tag = compute_tag_of_first_indexed_filter_value(self.seal, where)
        if tag is not None:
            yield from self._check_neighbours_of_index_range_for_damage(tag, start, stop)
            return (yield self.sql("tagged_checkpoints_page", tag, start, stop, _PAGE))  # type: ignore[no-any-return]
        rows: list[Row] = yield self.sql("checkpoints_page", start, stop, _PAGE)
        if len(rows) < _PAGE:
            yield from self.reader.check_id_index_matches_table_row_count(len(rows), start, stop)
        return rows
