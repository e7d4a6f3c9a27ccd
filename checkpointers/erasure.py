"""Erase messages from all checkpoints, transcripts and pending writes of a thread.

An erasure runs in a single transaction and makes two passes over the thread's values. The first
pass searches the thread for messages that have one of the given message ids. In the second pass,
the erasure rewrites each value that contains or quotes an erased message. Log items are never
changed in place. A changed item is appended to the log as a new item, and items that are no longer
referenced are deleted at the end of the erasure. docs/erasure.md explains what counts as a
quotation, and which tasks an erasure cancels.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any, Final

from langchain_core.messages import AIMessage, BaseMessage
from langgraph.checkpoint.serde.types import INTERRUPT, TASKS
from langgraph.types import Send

from perdure.checkpointers.additions import Additions
from perdure.checkpointers.cache import NO_TITLE, Snapshot, Thread, Title, Write
from perdure.checkpointers.collector import collector_paused
from perdure.checkpointers.extensions import ExtensionCounts, ThreadExtension
from perdure.checkpointers.maintenance import Maintenance
from perdure.checkpointers.manifest import (
    ALIASES,
    DELTA,
    DICT,
    ITEM,
    LIST,
    SNAPSHOT,
    Range,
    Ranges,
    ValueReference,
    count_positions,
    decode_ranges,
    drop_repeated_positions,
    encode_ranges,
    extract_value_reference_from_delta_channel_reference,
    iter_positions,
    iter_referenced_log_keys_and_ranges,
)
from perdure.checkpointers.message_remover import (
    NEXT_NODE,
    NO_WRITES,
    REMOVED,
    TASK_CHANNELS,
    UNALTERED,
    Remover,
    TextSet,
    ValueContext,
    hash_message_type_id_and_content,
    is_task_without_result,
    split_remaining_and_removed_tasks_by_index,
)
from perdure.checkpointers.put import MAX_TITLE_CHARS
from perdure.checkpointers.reader import CheckpointReader
from perdure.checkpointers.records import (
    VIEWS_NAMESPACE,
    build_client_metadata_update,
    build_list_entry_update,
    build_row_key,
    build_row_key_range,
    compute_item_and_alias_position_ranges,
    compute_metadata_index_tags,
    decode_ids_of_writes_row,
    decrypt_client_metadata,
    decrypt_listed_title_and_encoded_metadata,
    decrypt_position_and_item,
    decrypt_writes,
    encrypt_checkpoint,
    encrypt_writes,
)
from perdure.checkpointers.reports import ErasureReport
from perdure.checkpointers.transcript_index import drop_transcript_index_of_thread
from perdure.checkpointers.values import DeltaSnapshot, pack, unpack
from perdure.errors import CorruptRecord, ForbiddenType
from perdure.storage.flow import Flow, Row, Statement

# Maximum number of entries in a dict that can be recognised as an erased message. Larger dicts are
# never treated as messages.
_MAX_MESSAGE_FIELDS: Final = 64
_SEND_PATH: Final = "~__pregel_push, {:010d}"
"""The start of the path of the task that langgraph creates for a `Send`, with the `Send`'s index
as ten digits."""


def erase_messages_or_thread(
    reader: CheckpointReader,
    maintenance: Maintenance,
    thread_id: str,
    message_ids: Collection[str] | None,
) -> Flow[ErasureReport]:
    """Erase messages from a thread, or delete the thread if `message_ids` is None.

    No error is raised for ids in `message_ids` that match no stored message. The removal record
    contains all ids, including ids that match no stored message. Python's garbage collector is
    paused during the erasure, because the many new objects would trigger garbage collections of the
    whole heap. While a garbage collection runs, all OS threads of the process are blocked.
    """
    with collector_paused():
        if message_ids is None:
            return (yield from _erase_thread(reader, maintenance, thread_id))
        remover = Remover(frozenset(message_ids), reader.codec.types.list_texts_of_registered_value)
        report = yield from _erase_messages(reader, maintenance, thread_id, remover)
        if message_ids:
            number = yield from reader.removals.add_removal_record_and_get_number(
                thread_id, remover.texts_by_kind(), None
            )
            for thread_key, *_ in (yield reader.sql("find_thread", thread_id)):
                yield reader.sql("note_removal", number, thread_key)
        return report


def _erase_messages(
    reader: CheckpointReader, maintenance: Maintenance, thread_id: str, remover: Remover
) -> Flow[ErasureReport]:
    """Erase the messages matched by `remover` from a thread.

    The messages are removed from the thread's checkpoints and pending writes. They are also removed
    from the rows that other components, such as the server, store for the thread.
    """
    rows = yield reader.sql("find_thread", thread_id)
    if not rows:
        return ErasureReport()
    extensions = yield from maintenance.extensions.load()
    counts_before = ExtensionCounts()
    for extension in extensions:
        deleted = yield from extension.begin_erasure(thread_id, rows[0][0])
        counts_before = counts_before.add(deleted)
    eraser = _Eraser(reader, thread_id, rows[0], remover, extensions)
    yield from eraser.load_all_items_of_thread()
    yield from eraser.find_or_erase_messages_in_thread(finds_only=True)
    if not eraser.remover.has_match:
        yield from eraser.remove_quotations_from_thread_list_entry()
        if counts_before.events:
            yield from maintenance.database.request_scrub_of_deleted_rows()
        return ErasureReport(events=counts_before.events)
    view_count = yield from _delete_and_count_recorded_model_inputs(
        reader, maintenance, thread_id, rows[0][0]
    )
    eraser.remember_erased_texts()
    # If the thread contains dicts, run the first pass again, because a transcript item can be
    # recognised as part of a dict only after the dict has been read. `remover.channels` must list
    # the channels that contain an erased message. Quotations are known now, so the repeated pass
    # also adds channels that only quote a message. Therefore, restore the channels afterwards.
    if eraser.dicts:
        channels = TextSet(eraser.remover.channels)
        yield from eraser.find_or_erase_messages_in_thread(finds_only=True)
        eraser.remover.channels = channels
    yield from eraser.find_or_erase_messages_in_thread(finds_only=False)
    if eraser.additions.rows:
        yield Statement(reader.sql["add_item"], eraser.additions.rows, execute_many=True)
    items, _ = yield from maintenance.delete_unreferenced_items(thread_id, rows[0][0])
    yield reader.sql("mark_rows_removed", rows[0][0])
    yield from drop_transcript_index_of_thread(reader.sql, rows[0][0])
    yield from eraser.remove_quotations_from_thread_list_entry()
    yield from maintenance.database.request_scrub_of_deleted_rows()
    hashes = sorted(
        {
            hash_message_type_id_and_content(reader.seal.hash_key, message)
            for message in eraser.remover.removed_messages.values()
        }
    )
    cancelled = tuple(sorted(eraser.cancelled))
    report = ErasureReport(
        eraser.changed_checkpoint_count + view_count, items, tuple(hashes), cancelled
    )
    return replace(report, **counts_before.add(eraser.extension_counts)._asdict())


def _delete_and_count_recorded_model_inputs(
    reader: CheckpointReader, maintenance: Maintenance, thread_id: str, thread_key: int
) -> Flow[int]:
    """Delete the recorded model inputs of a thread, because they may quote erased messages.

    A model input is recorded as a checkpoint in the namespace `VIEWS_NAMESPACE`.

    Returns:
        The number of deleted checkpoints.
    """
    view_count = 0
    for namespace, ns, _ in (yield reader.sql("thread_namespaces", thread_key)):
        if ns == VIEWS_NAMESPACE:
            view_count = yield from maintenance.delete_checkpoints_of_namespace(
                thread_id, ns, namespace
            )
            yield reader.sql("set_explicit_head", 0, namespace)
    return view_count


def _erase_thread(
    reader: CheckpointReader, maintenance: Maintenance, thread_id: str
) -> Flow[ErasureReport]:
    """Delete a thread, and return a report with the hashes of the messages in the thread's logs."""
    rows = yield reader.sql("find_thread", thread_id)
    if not rows:
        return ErasureReport()
    hashes: set[str] = set()
    for log, name, *_ in (yield reader.sql("thread_logs", rows[0][0])):
        for row in (yield reader.sql("items_between", *build_row_key_range(log, 0, ALIASES))):
            # A log item that cannot be decrypted or decoded is deleted like any other item, but its
            # hash is missing from the report.
            with suppress(CorruptRecord, ForbiddenType):
                _, stored = decrypt_position_and_item(reader.seal, thread_id, name, *row)
                value = reader.codec.decode(stored)
                if isinstance(value, BaseMessage):
                    hashes.add(hash_message_type_id_and_content(reader.seal.hash_key, value))
    report = yield from maintenance.delete_thread(thread_id)
    yield from maintenance.database.request_scrub_of_deleted_rows()
    erased = ErasureReport(report.checkpoints, report.items, tuple(sorted(hashes)))
    return replace(erased, runs=report.runs, events=report.events, crons=report.crons)


class _Eraser:
    """Visits a thread's values, and rewrites those that contain or quote erased messages.

    Attributes:
        changed_checkpoint_count: The number of changed checkpoints.
        cancelled: The names of the tasks that the heads of namespaces would have run next, and that
            are cancelled by the erasure; see `_build_task_name`.
        dicts: The keys of the logs whose items are key-value pairs.
        deltas: The keys of the logs of `DeltaChannel`s, whose items may come from writes of tasks.
        extension_counts: The numbers of changed and deleted rows of other components.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        thread_id: str,
        row: Row,
        remover: Remover,
        extensions: Sequence[ThreadExtension],
    ) -> None:
        key, _, generation, removals = row
        self.reader, self.sql, self.seal = reader, reader.sql, reader.seal
        self.codec, self.thread_id, self.remover = reader.codec, thread_id, remover
        # The eraser uses a new `Thread` object and leaves the `Thread` object in the cache
        # unchanged.
        self.thread = Thread(key, generation, removals)
        self.additions = Additions(reader.seal, thread_id, self.thread, time.time())
        self._extensions = extensions
        self.changed_checkpoint_count, self.extension_counts = 0, ExtensionCounts()
        self.cancelled: set[str] = set()
        self.dicts: set[int] = set()
        self.deltas: set[int] = set()
        self._needles = remover.build_byte_strings_of_erased_messages()
        self._types_with_texts = reader.codec.types.encoded_names_of_searchable_types
        # `_collect_only` is True during passes that only collect messages and write nothing to the
        # database.
        self._collect_only = True
        # `_items_by_log` contains all items of the thread, keyed by log key and then by position.
        # `_stored_at` has the same keys as `_items_by_log`, and contains the time at which each
        # item was first stored.
        self._items_by_log: dict[int, dict[int, bytes]] = {}
        self._stored_at: dict[int, dict[int, float]] = {}
        # `_suspect_positions` maps each log key to the sorted positions of items whose bytes may
        # contain an erased message. `_hit_positions` maps each log key to the sorted positions of
        # items that, when decoded, do contain or quote an erased message. Both also contain the
        # positions of the aliases that refer to these items.
        self._suspect_positions: dict[int, list[int]] = {}
        self._hit_positions: dict[int, list[int]] = {}
        # `_replacements` is a cache that maps the arguments of
        # `_build_item_without_erased_messages` to its results.
        self._replacements: dict[tuple[int, int, bool, ValueContext], Any] = {}
        # `_items_with_calls` contains a `(log key, position)` tuple for each removed message that
        # has tool calls. `_items_of_removed_dicts` contains a `(log key, position)` tuple for each
        # item of a removed dict.
        self._items_with_calls: set[tuple[int, int]] = set()
        self._items_of_removed_dicts: set[tuple[int, int]] = set()
        # `_removed_sends` identifies the `Send`s removed from the current namespace. For each
        # checkpoint id, it maps the indexes of the removed `Send`s to the names of their nodes.
        self._removed_sends: dict[str, dict[int, str]] = {}
        # The erasure removes each `Send` that contains text from an erased message. A removed
        # `Send` may already have started a subgraph. `_subgraph_prefixes` contains the namespace
        # prefixes of such subgraphs.
        self._subgraph_prefixes: tuple[str, ...] = ()
        # True while the current namespace starts with a prefix in `_subgraph_prefixes`.
        self._in_removed_subgraph = False
        # `_ends_with_removed_call` is True if the erasure has removed the last message of a list in
        # the current checkpoint, and if this message had unanswered tool calls.
        self._ends_with_removed_call = False

    def load_all_items_of_thread(self) -> Flow[None]:
        """Read all items of the thread and the time at which each item was first stored."""
        for key, name, *ends in (yield self.sql("thread_logs", self.thread.key)):
            log = self.thread.get_or_add_log(key, name)
            ranges = compute_item_and_alias_position_ranges(*ends)
            log.next_position, log.next_alias = (stop for _, stop in ranges)
            items, self._stored_at[key] = yield from self.reader.read_items_and_storage_times(
                self.thread_id, name, key, ranges
            )
            log.origins = {p: unpack(items.pop(p)) for p in [*items] if p >= ALIASES}
            self._items_by_log[key] = items
            # Register the existing log items in `positions_by_item`, so that they can be reused.
            # After a message is removed from an item, the rest of the item may be equal to an
            # existing item. The existing item is then reused instead of storing a duplicate.
            for position, stored in items.items():
                self.additions.positions_by_item.setdefault((name, stored), position)

    def remove_quotations_from_thread_list_entry(self) -> Flow[None]:
        """Remove quotations of erased messages from a thread's entry in thread lists."""
        row = yield from self.reader.find_thread_row(self.thread_id)
        if row is not None:
            title, listed_metadata = decrypt_listed_title_and_encoded_metadata(
                self.seal, self.thread_id, row.list_entry
            )
            remaining = listed_metadata
            if listed_metadata is not None:
                remaining = self._remove_erased_messages_from_encoded_value(
                    listed_metadata, ValueContext(describes_task=True)
                )
                remaining = self._encode({}) if remaining is REMOVED else remaining
            is_title_removed = self._may_title_quote_message(title)
            if is_title_removed or remaining is not listed_metadata:
                yield build_list_entry_update(
                    self.sql,
                    self.seal,
                    row.key,
                    self.thread_id,
                    None if is_title_removed else title,
                    None if remaining is None else (self.codec.decode(remaining), remaining),
                )
        for thread_key, *_, stored in (yield self.sql("lock_client_metadata", self.thread_id)):
            client = decrypt_client_metadata(self.seal, self.thread_id, stored)
            if client is None:
                continue
            client_metadata = self.remover.remove_messages_from(
                client.metadata, ValueContext(describes_task=True)
            )
            if client_metadata is not client.metadata:
                client = client._replace(
                    metadata={} if client_metadata is REMOVED else client_metadata
                )
                yield build_client_metadata_update(
                    self.sql, self.seal, thread_key, self.thread_id, client
                )

    def _may_title_quote_message(self, title: Title | None) -> bool:
        """Return whether a title may contain part of an erased message."""
        if title is None or title == NO_TITLE:
            return False
        content = {"title": title.text}
        if (
            self.remover.remove_messages_from(content, ValueContext(describes_task=True))
            is not content
        ):
            return True
        # A title without a message id was taken from metadata. If the title has the maximum length,
        # it was probably truncated. A truncated title may end with only the first part of an erased
        # text, so a search for the whole text does not find this part.
        if title.message_id is None:
            return bool(self.remover.has_match) and len(title.text) >= MAX_TITLE_CHARS
        # If the title was taken from a message without an id, that message may be an erased one.
        return title.message_id in {"", *self.remover.ids}

    def remember_erased_texts(self) -> None:
        """Collect the texts of erased messages that do not occur in the remaining messages."""
        self.remover.remember_texts_of_removed_messages()
        self._needles = self.remover.build_byte_strings_of_erased_messages()
        stored = (stored for items in self._items_by_log.values() for stored in items.values())
        self.remover.exclude_texts_that_kept_messages_contain(
            map(self.codec.decode, filter(self._may_contain_erased_message, stored))
        )

    def _may_contain_erased_message(self, stored: bytes) -> bool:
        """Return whether encoded bytes may contain an erased message or text copied from one.

        To avoid decoding values that cannot contain an erased message, the method searches the
        encoded bytes for parts of the erased messages.
        """
        if not self.codec.packs_messages or any(needle in stored for needle in self._needles):
            return True
        return any(name in stored for name in self._types_with_texts)

    def find_or_erase_messages_in_thread(self, *, finds_only: bool) -> Flow[None]:
        """Find or erase messages in the checkpoints and pending writes of the thread.

        The method also covers the rows that other components, such as the server, store for the
        thread.

        Args:
            finds_only: Whether only to find messages and their channels, and to write nothing.
        """
        self._collect_only, self._subgraph_prefixes = finds_only, ()
        self._replacements.clear()
        self.cancelled.clear()
        for key, items in self._items_by_log.items():
            suspects = {
                p for p, stored in items.items() if self._may_contain_erased_message(stored)
            }
            hits = {
                p for p in suspects if self._contains_or_quotes_message(self.codec.decode(items[p]))
            }
            origins = self.thread.logs[key].origins.items()
            for positions_by_log, selected in (
                (self._suspect_positions, suspects),
                (self._hit_positions, hits),
            ):
                positions_by_log[key] = sorted(
                    [*selected, *(p for p, origin in origins if origin in selected)]
                )
        for namespace, ns, newest in (yield self.sql("thread_namespaces", self.thread.key)):
            self._in_removed_subgraph = f"{ns}|".startswith(self._subgraph_prefixes)
            self._removed_sends, head = {}, None
            for row, snapshot in (
                yield from self.reader.read_namespace_checkpoints(self.thread_id, ns, namespace)
            ):
                is_head = row[0] == build_row_key(namespace, newest)
                head = snapshot.checkpoint_id if is_head else head
                yield from self._erase_messages_from_checkpoint(ns, row, snapshot, is_head=is_head)
            for row in (yield self.sql("namespace_writes", namespace)):
                yield from self._remove_erased_messages_from_pending_writes(
                    namespace, ns, row, head
                )
            self.cancelled |= {
                _build_task_name(ns, node)
                for node in self._removed_sends.get(head or "", {}).values()
            }
        for extension in self._extensions:
            erased = yield from extension.erase_messages(
                self.thread_id, self.remover, finds_only=finds_only
            )
            self.extension_counts = self.extension_counts.add(erased)

    def _contains_or_quotes_message(self, value: Any) -> bool:
        """Return whether a decoded log item contains an erased message or text copied from one.

        A log item can be a list element or a dict's key-value pair. The method treats the item as a
        list element, and searches the list element for erased messages and for text copied from
        them. If the item has the form of a key-value pair, the method also converts the item to a
        dict, and searches the dict for erased messages. The rules for removing a message depend on
        where the message occurs (see `ValueContext`). Several values can share one log item, and
        different removal rules can apply to these values. The method therefore applies the
        strictest removal rules to the item. The strictest rules remove the most messages.
        """
        context, entry = ValueContext(True, True, True), _convert_key_value_pair_to_dict(value)
        if entry is not None and self.remover.remove_messages_from(entry, context) is not entry:
            return True
        return self.remover.remove_messages_from(value, context) is not value

    # -- checkpoints and pending writes

    def _erase_messages_from_checkpoint(
        self, ns: str, row: Row, snapshot: Snapshot, *, is_head: bool
    ) -> Flow[None]:
        """Remove erased messages, and text copied from them, from a checkpoint."""
        self._ends_with_removed_call = False
        other, metadata = snapshot.encoded_fields
        fields = [
            self._remove_erased_messages_from_encoded_value(other, ValueContext()),
            self._remove_erased_messages_from_encoded_value(
                metadata, ValueContext(describes_task=True)
            ),
        ]
        fields = [self._encode({}) if stored is REMOVED else stored for stored in fields]
        refs, transcripts = {}, {}
        for channel, ref in snapshot.references.items():
            if channel == TASKS:
                refs[channel] = yield from self._remove_sends_that_quote_erased_messages(
                    snapshot.checkpoint_id, ref
                )
            else:
                refs[channel] = yield from self._remove_erased_messages_from_referenced_value(
                    channel, ref, channel.startswith("__")
                )
        for channel, stored_transcript in snapshot.transcript.items():
            value_ref = None if refs.get(channel) is REMOVED else snapshot.references.get(channel)
            transcripts[channel] = self._erase_messages_from_transcript(
                value_ref, *stored_transcript
            )
        # The removed message was the last in a list and had unanswered tool calls. Do not start the
        # nodes that would have run after the removed message.
        for channel in refs if self._ends_with_removed_call else ():
            if channel.startswith(NEXT_NODE):
                refs[channel] = REMOVED
                if is_head:
                    self.cancelled.add(_build_task_name(ns, channel.removeprefix(NEXT_NODE)))
        if self._collect_only or (fields, refs, transcripts) == (
            snapshot.encoded_fields,
            snapshot.references,
            snapshot.transcript,
        ):
            return
        # Delete the index tags of removed metadata values, so that no trace of the values remains
        # in the metadata index.
        if fields[1] is not metadata:
            old_tags, new_tags = (
                {*compute_metadata_index_tags(self.seal, self.codec.decode(stored))}
                for stored in (metadata, fields[1])
            )
            for tag in old_tags - new_tags:
                yield self.sql("drop_tag", tag, row[0])
        snapshot.encoded_fields = fields
        snapshot.references = {channel: ref for channel, ref in refs.items() if ref is not REMOVED}
        yield self.sql(
            "rewrite_checkpoint",
            encrypt_checkpoint(self.seal, self.thread_id, ns, row, snapshot, transcripts),
            row[0],
        )
        self.changed_checkpoint_count += 1

    def _remove_sends_that_quote_erased_messages(
        self, checkpoint_id: str, sends_ref: Any
    ) -> Flow[Any]:
        """Remove `Send`s from a checkpoint if they contain text from an erased message.

        Return a reference to the list of `Send`s that were not removed.
        """
        value = (
            (yield from self._read_value(sends_ref))
            if self._may_reference_erased_message(sends_ref)
            else None
        )
        if not (isinstance(value, list) and all(isinstance(task, Send) for task in value)):
            return (
                yield from self._remove_erased_messages_from_referenced_value(
                    TASKS, sends_ref, is_input=True
                )
            )
        remaining, removed = split_remaining_and_removed_tasks_by_index(self.remover, value)
        self._removed_sends[checkpoint_id] = {index: task.node for index, task in removed.items()}
        return self._encode(remaining) if removed else sends_ref

    def _remove_erased_messages_from_pending_writes(
        self, namespace: int, ns: str, row: Row, head_checkpoint_id: str | None
    ) -> Flow[None]:
        """Rewrite the pending writes of one task without the erased messages.

        A task that has a result must not run again. If the erasure removes the whole result of a
        finished task, an empty write is stored as the result. If the erasure removes a write of a
        failed or interrupted task, an empty write replaces all the task's writes. The empty write
        prevents langgraph from running the task again. If a `Send` was removed from the head, the
        task that it would start is cancelled and all of the task's writes are removed.
        """
        checkpoint_id, task, path = decode_ids_of_writes_row(row)
        writes = decrypt_writes(self.seal, self.thread_id, ns, row)
        is_pending, removed_sends = (
            checkpoint_id == head_checkpoint_id,
            self._removed_sends.get(checkpoint_id, {}),
        )
        send_index = next(
            (index for index in removed_sends if path.startswith(_SEND_PATH.format(index))), None
        )
        name = _build_task_name(
            ns, removed_sends[send_index] if send_index is not None else "", task
        )
        if send_index is not None:
            self._subgraph_prefixes += (f"{name}|",)
        remaining: list[Write] = []
        if send_index is not None and is_pending:
            del removed_sends[send_index]
            self.cancelled.add(name)
        else:
            remaining = yield from self._remove_messages_from_writes(ns, writes, is_pending)
            if is_task_without_result(writes) and len(remaining) < len(writes):
                remaining = [[0, NO_WRITES, self._encode(None)]]
                if is_pending and any(channel == INTERRUPT for _, channel, _ in writes):
                    node = path.rpartition(", ")[2]
                    self.cancelled.discard(_build_task_name(ns, node))
                    self.cancelled.add(_build_task_name(ns, node, task))
            # Keep a result for the task, because langgraph reruns tasks that have no stored result.
            elif not is_task_without_result(writes) and is_task_without_result(remaining):
                remaining.append([0, NO_WRITES, self._encode(None)])
        if not self._collect_only and remaining != writes:
            yield self.sql(
                "put_writes",
                namespace,
                *row[:3],
                encrypt_writes(
                    self.seal, (self.thread_id, ns, checkpoint_id, task, path), remaining
                ),
            )

    def _remove_messages_from_writes(
        self, ns: str, writes: list[Write], is_pending: bool
    ) -> Flow[list[Write]]:
        """Return a copy of a task's writes from which the erased messages have been removed.

        Writes to the channels in `UNALTERED`, such as the interrupt channel, are never edited. If
        such a write contains or quotes an erased message, the whole write is deleted.

        Args:
            ns: The namespace.
            writes: The writes of the task.
            is_pending: Whether the writes belong to the head, so that a removed `Send` is
                cancelled.
        """
        remaining = []
        for index, channel, ref in writes:
            new = yield from self._remove_erased_messages_from_referenced_value(channel, ref, True)
            if new is ref or (new is not REMOVED and channel not in UNALTERED):
                remaining.append([index, channel, new])
            elif is_pending and channel == TASKS:
                send = yield from self._read_value(ref)
                self.cancelled.add(_build_task_name(ns, getattr(send, "node", TASKS)))
        return remaining

    # -- references

    def _remove_erased_messages_from_referenced_value(
        self, channel: str, ref: Any, is_input: bool
    ) -> Flow[Any]:
        """Remove the erased messages from a referenced value, and return the new reference.

        Returns:
            The same reference if the value does not change, or `REMOVED` if nothing of it remains.
        """
        allows_bare_text, describes_task = (
            is_input and channel in self.remover.channels,
            channel in TASK_CHANNELS,
        )
        context, new_ref = (
            ValueContext(is_input, allows_bare_text, describes_task or self._in_removed_subgraph),
            ref,
        )
        if not isinstance(ref, bytes) and ref[0] in (SNAPSHOT, DELTA):
            return (yield from self._remove_erased_messages_from_delta_reference(channel, ref))
        if not isinstance(ref, bytes) and ref[0] in (ITEM, LIST, DICT):
            new_ref = yield from self._remove_erased_messages_from_split_value(ref, context)
        elif self._may_reference_erased_message(ref):
            new_ref = self._encode_without_erased_messages(
                (yield from self._read_value(ref)), context, ref
            )
        if new_ref is not ref and self._collect_only and not channel.startswith("__"):
            self.remover.channels.add(channel)
        return new_ref

    def _remove_erased_messages_from_delta_reference(self, channel: str, ref: Any) -> Flow[Any]:
        """Remove erased messages from a `DeltaChannel`'s value.

        Return a reference to a copy of the value from which the erased messages have been removed.
        If the value contains no erased message, `ref` itself is returned.
        """
        kind, inner = ref
        if isinstance(inner, int):
            return ref
        # If the value of a `DeltaChannel` was computed from pending writes, it can contain messages
        # without ids. Erase these messages too, because they are also erased from the pending
        # writes.
        remaining = yield from self._remove_erased_messages_from_referenced_value(
            channel, inner, kind == DELTA
        )
        # Store an empty snapshot. Without a snapshot, langgraph would fall back to the snapshot of
        # an earlier checkpoint, which may contain the erased messages.
        if remaining is REMOVED:
            empty = self._encode(DeltaSnapshot(None))
            return empty if inner[0] == ITEM else [kind, [*inner[:2], []]]
        return ref if remaining is inner else [kind, remaining]

    def _may_reference_erased_message(self, ref: Any) -> bool:
        """Return whether a referenced value may contain text from an erased message."""
        return self._may_contain_erased_message(
            ref if isinstance(ref, bytes) else pack(ref)
        ) or any(
            _find_positions_in_range(self._suspect_positions, log, *part)
            for log, numbers in iter_referenced_log_keys_and_ranges(ref)
            for part in decode_ranges(numbers)
        )

    def _read_value(self, ref: Any) -> Flow[Any]:
        return (yield from self.reader.read_value(self.thread_id, self.thread, ref))

    def _remove_erased_messages_from_encoded_value(
        self, stored: bytes, context: ValueContext
    ) -> Any:
        """Remove the erased messages from an encoded value. Return `REMOVED` if nothing remains."""
        if not self._may_contain_erased_message(stored):
            return stored
        return self._encode_without_erased_messages(self.codec.decode(stored), context, stored)

    def _encode_without_erased_messages(self, value: Any, context: ValueContext, ref: Any) -> Any:
        """Remove erased messages from a value, and encode the result.

        Returns:
            `ref` if the value does not change, `REMOVED` if nothing remains, otherwise the bytes.
        """
        remaining = self.remover.remove_messages_from(value, context)
        return (
            ref
            if remaining is value
            else REMOVED
            if remaining is REMOVED
            else self._encode(remaining)
        )

    def _encode(self, value: Any) -> bytes:
        return self.codec.encode(value, lambda: "a value that contained an erased message")

    def _remove_erased_messages_from_split_value(
        self, ref: Any, context: ValueContext
    ) -> Flow[Any]:
        """Remove erased messages from a value stored as log items, and return the new reference."""
        kind, log, numbers = ref
        ranges = decode_ranges([numbers, 1] if kind == ITEM else numbers)
        if kind == DICT:
            self.dicts.add(log)
            if (yield from self._is_split_dict_an_erased_message(log, ranges, context)):
                self._items_of_removed_dicts |= {
                    (log, position) for position in iter_positions(ranges)
                }
                return REMOVED
        parts = self._rewrite_items_that_contain_erased_messages(
            log, ranges, context, are_pairs=kind == DICT
        )
        if parts is None:
            return ref
        if kind == ITEM:
            return [ITEM, log, self._append_items(log, parts)[0][0]] if parts else REMOVED
        last_position = self.thread.logs[log].resolve_alias_to_item_position(ranges[-1][1] - 1)
        self._ends_with_removed_call = (
            self._ends_with_removed_call or (log, last_position) in self._items_with_calls
        )
        return [kind, log, encode_ranges(self._append_items(log, parts))]

    def _is_split_dict_an_erased_message(
        self, log_key: int, log_ranges: Ranges, context: ValueContext
    ) -> Flow[bool]:
        """Return whether a channel's value is a dict that represents an erased message.

        A channel can contain messages in the form of dicts. Each key-value pair of such a dict is a
        separate log item.
        """
        suspects = (
            _find_positions_in_range(self._suspect_positions, log_key, *part) for part in log_ranges
        )
        if count_positions(log_ranges) > _MAX_MESSAGE_FIELDS or not any(suspects):
            return False
        return self.remover.is_erased(
            (yield from self._read_value([DICT, log_key, encode_ranges(log_ranges)])), context
        )

    def _erase_messages_from_transcript(
        self, value_ref: ValueReference, log_key: int, stored_ranges: Any
    ) -> Any:
        """Return a channel's stored transcript with the erased messages removed.

        Args:
            value_ref: The reference to the value of the channel at the same checkpoint, or None.
            log_key: The key of the log.
            stored_ranges: The ranges of the transcript, as they are stored.
        """
        ranges = decode_ranges(stored_ranges)
        ref, are_pairs = extract_value_reference_from_delta_channel_reference(value_ref), False
        if ref is not value_ref:
            self.deltas.add(log_key)
            are_pairs = value_ref[1] == DICT
        is_split = isinstance(ref, list) and ref[0] in (LIST, DICT)
        pairs = ref[0] == DICT if is_split else are_pairs or log_key in self.dicts
        context = ValueContext(
            is_input=log_key in self.deltas, describes_task=self._in_removed_subgraph
        )
        parts = self._rewrite_items_that_contain_erased_messages(
            log_key, ranges, context, are_pairs=pairs
        )
        removed = self._items_of_removed_dicts and self._items_of_removed_dicts.intersection(
            (log_key, position) for position in iter_positions(ranges)
        )
        # If an erased message is a dict, each key-value pair of the dict can be a separate log
        # item. The transcript keeps such a pair if the channel's remaining value at the same
        # checkpoint also contains the pair.
        if removed and is_split:
            removed -= {(log_key, p) for p in iter_positions(decode_ranges(ref[2]))}
        if parts is None and not removed:
            return [log_key, stored_ranges]
        remaining: list[bytes | Range] = []
        for part in ranges if parts is None else parts:
            if isinstance(part, bytes):
                remaining.append(part)
            else:
                remaining += ((p, p + 1) for p in range(*part) if (log_key, p) not in removed)
        return [
            log_key,
            encode_ranges(drop_repeated_positions(self._append_items(log_key, remaining))),
        ]

    def _append_items(self, log_key: int, parts: list[bytes | Range]) -> Ranges:
        """Append the new items in `parts` to a log.

        Return the ranges of log positions at which the items in `parts` are stored. The ranges
        cover both the newly appended items and the items that were already in the log.

        Each element of `parts` is either the bytes of an item to append or a range of existing log
        positions.
        """
        if self._collect_only:
            # If `_collect_only` is True, nothing is written to the log, and callers ignore the
            # returned range.
            return [(0, 1)]
        return self.additions.append_new_items_to_log(self.thread.logs[log_key].name, parts)

    # -- items

    def _rewrite_items_that_contain_erased_messages(
        self, log_key: int, ranges: Ranges, context: ValueContext, *, are_pairs: bool
    ) -> list[bytes | Range] | None:
        """Remove erased messages from a list or dict, and return its remaining parts.

        The result is None if the list or dict contains no erased message and no text copied from
        one. Each element of the returned list is either a range of existing log positions or the
        bytes of a new item.
        """
        parts: list[bytes | Range] = []
        is_unchanged = True
        for start, stop in ranges:
            for position in _find_positions_in_range(self._hit_positions, log_key, start, stop):
                replacement = self._get_or_build_item_without_erased_messages(
                    log_key,
                    self.thread.logs[log_key].resolve_alias_to_item_position(position),
                    are_pairs,
                    context,
                )
                if replacement is None:
                    continue
                is_unchanged = False
                parts += [(start, position)] if start < position else []
                parts += [] if replacement is REMOVED else [replacement]
                start = position + 1
            parts += [(start, stop)] if start < stop else []
        return None if is_unchanged else parts

    def _get_or_build_item_without_erased_messages(
        self, log_key: int, position: int, is_dict_pair: bool, context: ValueContext
    ) -> Any:
        """Return an item without the erased messages, from the cache if the result is cached.

        `functools.cache` is not used, because it would keep this object alive in a reference cycle.
        """
        arguments = log_key, position, is_dict_pair, context
        if arguments not in self._replacements:
            self._replacements[arguments] = self._build_item_without_erased_messages(*arguments)
        return self._replacements[arguments]

    def _build_item_without_erased_messages(
        self, log_key: int, position: int, is_dict_pair: bool, context: ValueContext
    ) -> Any:
        """Return the bytes that replace an item.

        Returns:
            The encoded item without the messages, `REMOVED` if nothing remains, or None if the item
            does not change.
        """
        value = self.codec.decode(self._items_by_log[log_key][position])
        entry = _convert_key_value_pair_to_dict(value) if is_dict_pair else None
        old = value if entry is None else entry
        new = self.remover.remove_messages_from(old, context)
        if new is old:
            return None
        if new is REMOVED and isinstance(value, AIMessage) and value.tool_calls:
            self._items_with_calls.add((log_key, position))
        if entry is not None and new is not REMOVED:
            new = [*new.popitem()] if new else REMOVED
        if new is REMOVED:
            return REMOVED
        stored = self._encode(new)
        # The rewritten item keeps the storage time of the original item.
        times, key = self.additions.item_times, (self.thread.logs[log_key].name, stored)
        times[key] = min(times.get(key, inf), self._stored_at[log_key].get(position, inf))
        return stored


def _find_positions_in_range(
    positions_by_log: dict[int, list[int]], log_key: int, start: int, stop: int
) -> list[int]:
    """Return each position p in `positions_by_log[log_key]` for which `start <= p < stop`."""
    sorted_positions = positions_by_log.get(log_key, [])
    return sorted_positions[
        bisect_left(sorted_positions, start) : bisect_left(sorted_positions, stop)
    ]


def _convert_key_value_pair_to_dict(value: Any) -> dict[Any, Any] | None:
    """Convert a `[key, value]` pair to a dict with one entry. Return None for any other value."""
    if type(value) is list and len(value) == 2:
        # `dict()` raises a TypeError if the first element of the pair is unhashable. A list whose
        # first element is unhashable cannot be a stored dict entry, because dict keys are always
        # hashable.
        with suppress(TypeError):
            return dict([value])
    return None


def _build_task_name(ns: str, node: str, task_id: str = "") -> str:
    """Build the name of a task, including its namespace, in langgraph's format."""
    name = f"{node}:{task_id}" if task_id else node
    return f"{ns}|{name}" if ns else name
