"""Prevent runs from storing erased messages again.

A run that loaded its state before an erasure still has the erased messages in memory, so its next
checkpoint and the writes of its tasks contain them. Erased messages and quotations of them are
recognised by the hashes in the removal records, and are not stored again. All other data of the run
is stored. If the thread was deleted after the run had loaded it, none of the run's data is stored,
and `ThreadDeleted` is raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from langchain_core.messages import AIMessage, BaseMessage
from langgraph.checkpoint.serde.types import INTERRUPT, TASKS
from langgraph.types import Send

from perdure.checkpointers.cache import Write
from perdure.checkpointers.message_remover import (
    NEXT_NODE,
    NO_WRITES,
    REMOVED,
    TASK_CHANNELS,
    UNALTERED,
    Remover,
    TextSet,
    ValueContext,
    is_task_without_result,
    split_remaining_and_removed_tasks_by_index,
)
from perdure.checkpointers.put import (
    CheckpointPut,
    TaskWrites,
    decode_value_of_inline_reference,
    encode_value_as_inline_reference,
)
from perdure.checkpointers.reader import CheckpointReader
from perdure.checkpointers.records import encode_id_for_storage
from perdure.checkpointers.removal_records import (
    PREFIX_CHARS,
    SUBSTRING_KINDS,
    RemovalRecord,
    RemovalRecords,
    split_into_prefix_hash_text_hash_and_length,
)
from perdure.checkpointers.values import DeltaSnapshot
from perdure.errors import ThreadDeleted
from perdure.storage.flow import Flow

# A (thread key, generation) pair that no thread has. If this pair is passed as the current thread
# key and generation, all references to log items in a request count as outdated and are replaced
# with the items.
_NO_ROWS: Final = 0, -1


class KeyedTexts(TextSet):
    """A set of texts of the same kind, some of which are known only as keyed hashes.

    Args:
        kind: The kind of the texts; see `message_remover.Remover.texts_by_kind`.
        hashes: The hashes from removal records.
        removals: The removal records, which compute the hash of a text.
    """

    def __init__(self, kind: str, hashes: Iterable[bytes], removals: RemovalRecords) -> None:
        super().__init__()
        self._kind, self._removals = kind, removals
        # Texts that must not be removed, because they occur both in erased messages and in messages
        # that are kept.
        self._spared: set[str] = set()
        # Used to find texts inside longer texts. Maps the hash of a text's first `PREFIX_CHARS`
        # characters to the (length, text hash) pairs of all texts with this prefix.
        self._starts: dict[bytes, set[tuple[int, bytes]]] = {}
        # Hashes of complete texts. If `kind` is in `SUBSTRING_KINDS`, the set also contains longer
        # byte strings from the removal records. Each longer byte string consists of the hash of a
        # prefix, the hash of the complete text, and the length of the text. The loop below splits
        # each longer byte string into these three parts.
        self._hashes = {*hashes}
        for element in [*self._hashes] if kind in SUBSTRING_KINDS else ():
            start, whole, length = split_into_prefix_hash_text_hash_and_length(element)
            self._starts.setdefault(start, set()).add((length, whole))
            self._hashes.add(whole)

    def __bool__(self) -> bool:
        return bool(self._hashes) or len(self) > 0

    def __contains__(self, text: object) -> bool:
        if super().__contains__(text):
            return True
        if type(text) is not str or text in self._spared or not self._hashes:
            return False
        return self._removals.hash_text(self._kind, text) in self._hashes

    def __isub__(self, others: Any) -> KeyedTexts:  # type: ignore[misc]
        self._spared |= others
        self.difference_update(others)
        return self

    def has_substring_of(self, text: str) -> bool:
        """See `TextSet.has_substring_of`."""
        return super().has_substring_of(text) or any(
            self._iter_whether_candidate_substring_is_in_set(text)
        )

    def _iter_whether_candidate_substring_is_in_set(self, text: str) -> Iterator[bool]:
        """Yield, for each candidate substring of a text, whether it is in this set.

        A substring is a candidate if it has the same first `PREFIX_CHARS` characters and the same
        length as a text in the set.
        """
        hash_text = self._removals.hash_text
        for first in range(len(text) - PREFIX_CHARS + 1 if self._starts else 0):
            start = hash_text("start", text[first : first + PREFIX_CHARS])
            for length, whole in self._starts.get(start, ()):
                part = text[first : first + length]
                yield part not in self._spared and hash_text(self._kind, part) == whole

    def collect_unhashed_erased_texts_by_kind(self) -> Mapping[str, Iterable[str]]:
        """Return the texts of erased messages, except those of which only a hash is known.

        The returned dict has a single key. The key is a string that identifies the kind of text in
        this set, such as `"ids"` or `"calls"` (see `Remover.texts_by_kind`). The key maps to a list
        of the texts.
        """
        return {self._kind: [*self]}


class StalePut:
    """Removes erased messages from data that a run stores after the messages were erased.

    The run loaded its state before the erasure, so its checkpoints and pending writes may contain
    the erased messages.

    Args:
        reader: The reader that decodes values.
        records: The removal records that were added after the state was loaded.
        is_inner: Whether the data comes from a subgraph. The values of a subgraph may come from the
            argument of a task, so a text is removed even if it only contains an erased text.
    """

    def __init__(
        self, reader: CheckpointReader, records: Iterable[RemovalRecord], is_inner: bool
    ) -> None:
        self._codec, self._removals, self._is_inner = reader.codec, reader.removals, is_inner
        self._text_sets: list[KeyedTexts] = []
        self._records = [*records]
        self._remover = Remover.from_erased_text_sets(
            self._make_keyed_texts, reader.codec.types.list_texts_of_registered_value
        )

    def _make_keyed_texts(self, kind: str) -> KeyedTexts:
        hashes = (text_hash for record in self._records for text_hash in record.texts.get(kind, ()))
        self._text_sets.append(KeyedTexts(kind, hashes, self._removals))
        return self._text_sets[-1]

    @classmethod
    def build_from_newer_removals(
        cls, reader: CheckpointReader, request: CheckpointPut | TaskWrites
    ) -> Flow[StalePut | None]:
        """Build a filter that removes messages that were erased after a request's state was loaded.

        Returns:
            The filter for the request, or None if nothing has to be removed from it.

        Raises:
            ThreadDeleted: The thread was deleted, with the checkpoint that the request continues.
        """
        thread_id, checkpoint_ns, _ = request.address
        number, is_from_local_run = (
            reader.removals.find_newest_removal_number_when_state_was_loaded(request)
        )
        records = yield from reader.removals.read_records_since(thread_id, number)
        deletions = [
            index for index, record in enumerate(records) if record.checkpoints is not None
        ]
        if deletions:
            deleted_hashes = frozenset[bytes]().union(
                *(records[index].checkpoints or () for index in deletions)
            )
            yield from _check_checkpoints_not_deleted(
                reader, request, deleted_hashes, is_from_local_run
            )
            # Ignore removal records from before the thread's last deletion, because they belong to
            # a conversation that no longer exists.
            records = records[deletions[-1] + 1 :]
        return cls(reader, records, bool(checkpoint_ns)) if records else None

    def collect_unhashed_erased_texts_by_kind(self) -> Mapping[str, Iterable[str]]:
        """Return the texts of the erased messages found in the request, grouped by kind."""
        return {
            kind: texts
            for text_set in self._text_sets
            for kind, texts in text_set.collect_unhashed_erased_texts_by_kind().items()
        }

    def is_erased(self, message: BaseMessage) -> bool:
        """Return whether a message was erased."""
        return self._remover.is_erased(message, ValueContext(is_input=True))

    # -- a checkpoint

    def copy_checkpoint_put_without_erased_messages(self, put: CheckpointPut) -> CheckpointPut:
        """Return a copy of `put` without erased messages and without text quoted from them."""
        values, other_fields, metadata = put.decode_values_other_fields_and_metadata(self._codec)
        self._remember_texts_of_erased_messages(values.items(), are_inputs=False)
        self._remover.remove_messages_from(other_fields, ValueContext())
        remaining: dict[str, Any] = {}
        ends_with_erased_call = False
        for channel, value in values.items():
            filtered = self._remove_erased_messages(
                channel, value, are_inputs=channel.startswith("__")
            )
            if filtered is not REMOVED:
                remaining[channel] = filtered
            ends_with_erased_call = ends_with_erased_call or self._ends_with_erased_tool_call(value)
        # Remove the channels that trigger the next nodes. Otherwise, a tool node would execute the
        # erased tool call again.
        if ends_with_erased_call:
            remaining = {
                name: value for name, value in remaining.items() if not name.startswith(NEXT_NODE)
            }
        other_fields = self._remover.remove_messages_from(other_fields, ValueContext())
        metadata = self._remover.remove_messages_from(metadata, ValueContext(describes_task=True))
        fields = ({} if part is REMOVED else part for part in (other_fields, metadata))
        return put.copy_with_values(self._codec, remaining, *fields)

    def _remember_texts_of_erased_messages(
        self, values: Iterable[tuple[str, Any]], *, are_inputs: bool
    ) -> None:
        """Find erased messages by id in the given values, and collect the messages' texts."""
        values = [*values]
        for channel, value in values:
            new = self._remove_erased_messages(
                channel, value, are_inputs=are_inputs or channel.startswith("__")
            )
            if new is not value and not channel.startswith("__"):
                self._remover.channels.add(channel)
        self._remover.remember_texts_of_removed_messages()
        self._remover.exclude_texts_that_kept_messages_contain(
            part for _, value in values for part in _list_values_that_may_be_messages(value)
        )

    def _remove_erased_messages(self, channel: str, value: Any, *, are_inputs: bool) -> Any:
        """Remove erased messages from a channel's value.

        If the value consists only of erased messages, return `REMOVED`.
        """
        if channel == TASKS and isinstance(value, list) and {*map(type, value)} == {Send}:
            remaining, is_changed = split_remaining_and_removed_tasks_by_index(self._remover, value)
            return remaining if is_changed else value
        texts = are_inputs and channel in self._remover.channels
        return self._remover.remove_messages_from(
            value, ValueContext(are_inputs, texts, channel in TASK_CHANNELS or self._is_inner)
        )

    def _ends_with_erased_tool_call(self, value: Any) -> bool:
        """Return whether a value is a list whose last item is an erased message with tool calls."""
        value = value.value if type(value) is DeltaSnapshot else value
        last = value[-1] if isinstance(value, list) and value else None
        if not isinstance(last, AIMessage) or not last.tool_calls:
            return False
        return self._remover.is_erased(last, ValueContext())

    # -- the writes of a task

    def remove_erased_messages_from_writes_and_check_if_task_waits(
        self, request: TaskWrites
    ) -> tuple[list[Write], bool]:
        """Remove erased messages from a task's writes.

        If an interrupt's question quotes an erased message, the entire question is removed. If the
        answer to an interrupt quotes an erased message, the entire answer is removed.

        Returns:
            The remaining writes, and whether the task still waits for an answer.
        """
        writes = request.get_writes_without_outdated_references(*_NO_ROWS)
        values = [decode_value_of_inline_reference(self._codec, ref) for _, _, ref in writes]
        self._remember_texts_of_erased_messages(
            zip((channel for _, channel, _ in writes), values, strict=True), are_inputs=True
        )
        remaining: list[Write] = []
        for (index, channel, ref), value in zip(writes, values, strict=True):
            filtered = self._remove_erased_messages(channel, value, are_inputs=True)
            if filtered is value:
                remaining.append([index, channel, ref])
            elif filtered is not REMOVED and channel not in UNALTERED:
                path = f"the write to {channel!r}"
                remaining.append(
                    [
                        index,
                        channel,
                        encode_value_as_inline_reference(
                            self._codec, None, channel, filtered, path
                        ),
                    ]
                )
        # langgraph reruns a task that has no stored result, so store an empty result for the task.
        if len(remaining) < len(writes) and is_task_without_result(remaining):
            no_writes = [0, NO_WRITES, self._codec.encode(None, lambda: NO_WRITES)]
            remaining = [no_writes] if is_task_without_result(writes) else [*remaining, no_writes]
        return remaining, any(channel == INTERRUPT for _, channel, _ in remaining)


def find_which_messages_were_erased(
    reader: CheckpointReader,
    thread_id: str,
    messages: Sequence[BaseMessage],
    after_removal_number: int,
) -> Flow[list[bool]]:
    """Return, for each message, whether a removal later than `after_removal_number` erased it.

    A removal is either the erasure of messages from the thread or the deletion of the thread. Each
    removal has a sequence number. If a removal with a higher number than `after_removal_number`
    deleted the thread, all its messages count as erased.
    """
    removals = reader.removals
    number = yield from removals.read_newest_removal_number(thread_id)
    records = (
        (yield from removals.read_records_since(thread_id, after_removal_number))
        if number > after_removal_number
        else []
    )
    if any(record.checkpoints is not None for record in records):
        return [True] * len(messages)
    stale = StalePut(reader, records, is_inner=False)
    return [bool(records) and stale.is_erased(message) for message in messages]


def _list_values_that_may_be_messages(value: Any) -> Iterable[Any]:
    value = value.value if type(value) is DeltaSnapshot else value
    if isinstance(value, dict):
        return [value, *value.values()]
    return value if isinstance(value, list | tuple) else [value]


def _check_checkpoints_not_deleted(
    reader: CheckpointReader,
    request: CheckpointPut | TaskWrites,
    deleted_hashes: frozenset[bytes],
    is_from_local_run: bool,
) -> Flow[None]:
    """Raise ThreadDeleted if a request refers to a checkpoint that was deleted with its thread.

    A stricter rule applies if the request comes from a run that this process executes.
    ThreadDeleted is raised if the request refers to one or more checkpoints and the database
    contains none of them. A request that refers only to missing checkpoints comes from a run that
    loaded the thread before the thread was deleted. A run with durability `exit` has no stored
    checkpoint until it ends. A run whose checkpoint was rejected has no stored checkpoint, but may
    still try to store pending writes.
    """
    thread_id, checkpoint_ns, uid = request.address
    ids_by_namespace = {checkpoint_ns: uid} if uid is not None else {}
    if not ids_by_namespace and checkpoint_ns:
        configurable = (request.config or {}).get("configurable", {})
        ids_by_namespace = dict(configurable.get("checkpoint_map") or {})
    is_any_deleted = is_any_stored = False
    for namespace, checkpoint_id in ids_by_namespace.items():
        rows = yield reader.sql(
            "checkpoint_with_keys", encode_id_for_storage(checkpoint_id), thread_id, namespace
        )
        is_any_stored = is_any_stored or bool(rows)
        id_hash = reader.removals.hash_text("checkpoint", checkpoint_id)
        is_any_deleted = is_any_deleted or (not rows and id_hash in deleted_hashes)
    if is_any_deleted or (ids_by_namespace and is_from_local_run and not is_any_stored):
        raise ThreadDeleted(
            f"thread {thread_id!r} was deleted after this run had loaded its state, so the run can "
            "no longer store anything. Start a new run to begin a new conversation under this id"
        )
