"""Puts of runs that loaded their state before an erasure, or before their thread was deleted.

Such a run holds what was removed, and its next checkpoint and the writes of its tasks contain it.
The erased messages, and what quotes them, are left out of these, by the hashes of the removal
records, and the rest is stored. If the thread was deleted, nothing is stored: see `ThreadDeleted`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from langchain_core.messages import AIMessage, BaseMessage
from langgraph.checkpoint.serde.types import INTERRUPT, RESUME, TASKS
from langgraph.types import Send

from perdure.checkpointers.cache import Write
from perdure.checkpointers.put import CheckpointPut, TaskWrites, here, value_here
from perdure.checkpointers.reader import CheckpointReader
from perdure.checkpointers.records import pack_id
from perdure.checkpointers.removal import (
    GONE,
    NEXT_NODE,
    NO_WRITES,
    TASK_CHANNELS,
    Remover,
    TextSet,
    Where,
    is_stopped,
    without_quoting_tasks,
)
from perdure.checkpointers.removal_records import (
    PART_START,
    PARTS,
    RemovalRecord,
    RemovalRecords,
    split_part,
)
from perdure.checkpointers.values import DeltaSnapshot
from perdure.errors import ThreadDeleted
from perdure.storage.flow import Flow

_NO_ROWS: Final = 0, -1  # the state of a thread to whose rows nothing may refer


class KeyedTexts(TextSet):
    """Texts of one kind of which some are known by their keyed hashes only.

    Args:
        kind: See `removal.Remover.known_texts`.
        hashes: The hashes of removal records.
        removals: Computes the hash of a text.
    """

    def __init__(self, kind: str, hashes: Iterable[bytes], removals: RemovalRecords) -> None:
        super().__init__()
        self._kind, self._removals = kind, removals
        self._spared: set[str] = set()  # texts that a message which stays has as well
        self._starts: dict[bytes, set[tuple[int, bytes]]] = {}
        self._hashes = {*hashes}
        for part in [*self._hashes] if kind in PARTS else ():
            start, whole, length = split_part(part)
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

    def has_part_of(self, text: str) -> bool:
        """See `TextSet.has_part_of`."""
        return super().has_part_of(text) or any(self._parts_of(text))

    def _parts_of(self, text: str) -> Iterator[bool]:
        """Look at each place of a text where one of these texts may begin."""
        hash_text = self._removals.hash_text
        for first in range(len(text) - PART_START + 1 if self._starts else 0):
            start = hash_text("start", text[first : first + PART_START])
            for length, whole in self._starts.get(start, ()):
                part = text[first : first + length]
                yield part not in self._spared and hash_text(self._kind, part) == whole

    def learned_texts(self) -> Mapping[str, Iterable[str]]:
        """Return the texts in clear, by their kind."""
        return {self._kind: [*self]}


class StalePut:
    """What is left of a put, or of a task's writes, that come from a state before some removals.

    Args:
        reader: Decodes values.
        records: The removal records that the state was loaded before.
        is_inner: Whether it is a put of a subgraph. A value there may be all that is left of a
            task's argument, so a text in it that contains an erased text is removed.
    """

    def __init__(
        self, reader: CheckpointReader, records: Iterable[RemovalRecord], is_inner: bool
    ) -> None:
        self._codec, self._removals, self._is_inner = reader.codec, reader.removals, is_inner
        self._known: list[KeyedTexts] = []
        self._records = [*records]
        self._remover = Remover.of_known(self._make_keyed_texts, reader.codec.types.texts_of)

    def _make_keyed_texts(self, kind: str) -> KeyedTexts:
        hashes = (each for record in self._records for each in record.texts.get(kind, ()))
        self._known.append(KeyedTexts(kind, hashes, self._removals))
        return self._known[-1]

    @classmethod
    def read_removals(
        cls, reader: CheckpointReader, request: CheckpointPut | TaskWrites
    ) -> Flow[StalePut | None]:
        """Read what a request that was loaded before some removals must leave out, if anything.

        Raises:
            ThreadDeleted: One of them deleted the thread with the checkpoint that the request
                continues.
        """
        thread_id, ns, _ = request.at
        number, is_run = reader.removals.loaded_number(request)
        records = yield from reader.removals.read_since(thread_id, number)
        deletions = [at for at, record in enumerate(records) if record.checkpoints is not None]
        if deletions:
            gone = frozenset[bytes]().union(*(records[at].checkpoints or () for at in deletions))
            yield from _check_not_deleted(reader, request, gone, is_run)
            records = records[deletions[-1] + 1 :]  # what came before is of another conversation
        return cls(reader, records, bool(ns)) if records else None

    def learned_texts(self) -> Mapping[str, Iterable[str]]:
        """Return the texts that were recognised by an id here and not when they were erased."""
        return {
            kind: texts for known in self._known for kind, texts in known.learned_texts().items()
        }

    def is_erased(self, message: BaseMessage) -> bool:
        """Return whether a message was erased."""
        return self._remover.is_gone(message, Where(inputs=True))

    # -- a checkpoint

    def filter_checkpoint(self, put: CheckpointPut) -> CheckpointPut:
        """Return a put without the erased messages and what quotes them."""
        values, other, metadata = put.decoded(self._codec)
        self._find_erased(values.items(), inputs=False)
        self._remover.without(other, Where())
        left: dict[str, Any] = {}
        is_answer_gone = False
        for channel, value in values.items():
            new = self._remove_erased(channel, value, inputs=channel.startswith("__"))
            if new is not GONE:
                left[channel] = new
            is_answer_gone = is_answer_gone or self._lost_last_call(value)
        if is_answer_gone:  # a tool node would repeat the call
            left = {name: value for name, value in left.items() if not name.startswith(NEXT_NODE)}
        other = self._remover.without(other, Where())
        metadata = self._remover.without(metadata, Where(tasks=True))
        fields = ({} if part is GONE else part for part in (other, metadata))
        return put.with_values(self._codec, left, *fields)

    def _find_erased(self, values: Iterable[tuple[str, Any]], *, inputs: bool) -> None:
        """Find the erased messages in values by their ids, and what they say."""
        values = [*values]
        for channel, value in values:
            new = self._remove_erased(channel, value, inputs=inputs or channel.startswith("__"))
            if new is not value and not channel.startswith("__"):
                self._remover.channels.add(channel)
        self._remover.settle()
        self._remover.spare(part for _, value in values for part in _iter_elements(value))

    def _remove_erased(self, channel: str, value: Any, *, inputs: bool) -> Any:
        if channel == TASKS and isinstance(value, list) and {*map(type, value)} == {Send}:
            left, gone = without_quoting_tasks(self._remover, value)
            return left if gone else value
        texts = inputs and channel in self._remover.channels
        tasks = channel in TASK_CHANNELS or self._is_inner
        return self._remover.without(value, Where(inputs, texts, tasks))

    def _lost_last_call(self, value: Any) -> bool:
        """Return whether a list ends with an erased message that calls tools."""
        value = value.value if type(value) is DeltaSnapshot else value
        last = value[-1] if isinstance(value, list) and value else None
        if not isinstance(last, AIMessage) or not last.tool_calls:
            return False
        return self._remover.is_gone(last, Where())

    # -- what a task wrote

    def filter_writes(self, request: TaskWrites) -> tuple[list[Write], bool]:
        """Return what is left of a task's writes, and whether the task still waits for an answer.

        A question or an answer that quotes an erased message is left out as a whole.
        """
        writes = request.for_state(*_NO_ROWS)
        values = [value_here(self._codec, ref) for _, _, ref in writes]
        self._find_erased(
            zip((channel for _, channel, _ in writes), values, strict=True), inputs=True
        )
        kept: list[Write] = []
        for (index, channel, ref), value in zip(writes, values, strict=True):
            new = self._remove_erased(channel, value, inputs=True)
            if new is value:
                kept.append([index, channel, ref])
            elif new is not GONE and channel not in (INTERRUPT, RESUME):
                path = f"the write to {channel!r}"
                kept.append([index, channel, here(self._codec, None, channel, new, path)])
        if len(kept) < len(writes) and is_stopped(kept):  # else the task would run again
            done = [0, NO_WRITES, self._codec.encode(None, lambda: NO_WRITES)]
            kept = [done] if is_stopped(writes) else [*kept, done]
        return kept, any(channel == INTERRUPT for _, channel, _ in kept)


def find_erased(
    reader: CheckpointReader,
    thread_id: str,
    messages: Sequence[BaseMessage],
    since: int,
) -> Flow[list[bool]]:
    """Return for each message whether it was erased by a removal with a higher number.

    If the thread was deleted, all of them were.
    """
    removals = reader.removals
    number = yield from removals.number_of(thread_id)
    records = (yield from removals.read_since(thread_id, since)) if number > since else []
    if any(record.checkpoints is not None for record in records):
        return [True] * len(messages)
    stale = StalePut(reader, records, is_inner=False)
    return [bool(records) and stale.is_erased(message) for message in messages]


def _iter_elements(value: Any) -> Iterable[Any]:
    value = value.value if type(value) is DeltaSnapshot else value
    if isinstance(value, dict):
        return [value, *value.values()]
    return value if isinstance(value, list | tuple) else [value]


def _check_not_deleted(
    reader: CheckpointReader,
    request: CheckpointPut | TaskWrites,
    gone: frozenset[bytes],
    is_run: bool,
) -> Flow[None]:
    """Raise ThreadDeleted if a request continues a checkpoint that was deleted with its thread.

    A run of this process may also name a checkpoint that it has not stored: with durability `exit`
    it has stored none, and after a refused put it still stores what its tasks write. As it has
    loaded the thread before the deletion, it is refused as well.
    """
    thread_id, ns, uid = request.at
    named = {ns: uid} if uid is not None else {}
    if not named and ns:
        configurable = (request.config or {}).get("configurable", {})
        named = dict(configurable.get("checkpoint_map") or {})
    is_gone = is_there = False
    for name, checkpoint_id in named.items():
        rows = yield reader.sql("checkpoint_of", pack_id(checkpoint_id), thread_id, name)
        is_there = is_there or bool(rows)
        hashed = reader.removals.hash_text("checkpoint", checkpoint_id)
        is_gone = is_gone or (not rows and hashed in gone)
    if is_gone or (named and is_run and not is_there):
        raise ThreadDeleted(
            f"thread {thread_id!r} was deleted after this run had loaded its state; nothing of the "
            "run is stored any more. Start a new run to begin a new conversation under this id"
        )
