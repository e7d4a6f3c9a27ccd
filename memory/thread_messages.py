"""Read a thread's messages, and record how far each extractor has read the thread.

If the thread is stored in a perdure checkpointer, messages that were removed from the state are
read as well. A watermark, which is an internal item in the store, records how far an extractor has
read a thread. Because the watermark contains the ids of the newest messages that the extractor has
read, the watermark stays valid if the thread is trimmed, edited or forked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import orjson
from langchain_core.messages import BaseMessage, ChatMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.store.base import GetOp, Item
from pydantic import TypeAdapter

from perdure.checkpointers.delta import COUNTERS
from perdure.checkpointers.message_marking import MESSAGE_MARKER
from perdure.checkpointers.reports import CheckpointInfo, HistoryItem
from perdure.checkpointers.values import DeltaSnapshot
from perdure.effects import call_method
from perdure.errors import PerdureError, UnknownThread
from perdure.memory import conversation
from perdure.memory.conversation import SHORTENED
from perdure.memory.long_term.records import (
    HASHED_ID_PREFIX,
    WATERMARKS,
    Role,
    StoreAdapter,
    build_namespace_of_notes_about_memories,
    build_unsearched_permanent_note_put,
)
from perdure.memory.nodes import check_messages
from perdure.memory.options import is_number
from perdure.memory.quotation import read_message_text
from perdure.stores.base import Namespace, PutItem
from perdure.stores.store import Store

_ROLES: Final[Mapping[str, Role]] = {
    **{"human": "user", "user": "user", "ai": "assistant", "assistant": "assistant"},
    **{"tool": "tool", "function": "tool", "system": "system", "developer": "system"},
}
# Number of checkpoints to list per message when looking for the checkpoints that added messages
# without a timestamp. More than one is needed because a run writes several checkpoints per message.
# All messages from the oldest one without a timestamp to the newest are counted.
_CHECKPOINTS_PER_MESSAGE: Final = 4
REMEMBER: Final = "remember"
"""A key in a message's `response_metadata`.

With the value False, the message does not become a memory.
"""
REMEMBER_TURN: Final = "remember_turn"
"""A key in the `response_metadata` of a human message.

With the value False, no message of the turn that the human message begins becomes a memory. The
server sets this key for a message that the run's person did not write.
"""
SEARCHED: Final = "searched"
"""A key in a message's `response_metadata`.

With the value True, the search of threads finds the message although it does not become a memory.
An example is a document that a model wrote.
"""
TURN_EXTRACTOR: Final = "turns"
"""The name of the extractor that stores turns as memories.

Only the watermarks of this extractor have the thread's id as their key.
"""
# Number of most recent messages that `is_thread_read_in_full` checks before it falls back to
# reading all messages of a thread.
_TAIL_MESSAGES: Final = 8
# Maximum number of messages that a watermark lists. A watermark, which stores how far an extractor
# has read a thread, lists only the newest of the messages that the extractor has read.
_MAX_READ_MESSAGES: Final = 50


@dataclass(frozen=True, slots=True)
class ThreadMessage:
    """A message of a thread.

    Attributes:
        message: The message.
        id: The id of the message, or a hash of its text if the message has no id.
        position: The position of the message in the thread, or None until a watermark assigns it.
        at: When the message was written, if that is known.
        turn_is_remembered: Whether memories may be made from the turn that contains the message.
    """

    message: BaseMessage
    id: str
    position: int | None = None
    at: datetime | None = None
    turn_is_remembered: bool = True

    @property
    def text(self) -> str:
        """The message's text, followed by the text of its attachments, such as file names.

        If the metadata of the message or of its turn excludes the message from memories, an empty
        string is returned.
        """
        return make_storable(read_message_text(self.message)) if self.is_remembered else ""

    @property
    def is_remembered(self) -> bool:
        """Whether memories may be extracted from the message.

        Return False if the message is excluded from memory extraction by its own metadata, or by
        the metadata of the human message that begins its turn.
        """
        is_excluded = self.message.response_metadata.get(REMEMBER) is False
        return self.turn_is_remembered and not is_excluded

    @property
    def searched_text(self) -> str:
        """The text to index for thread search, or "" if the message is not searchable."""
        is_searched = self.message.response_metadata.get(SEARCHED) is True
        return make_storable(read_message_text(self.message)) if is_searched else self.text

    @property
    def role(self) -> Role:
        """The role of the author. An unknown role counts as an assistant."""
        message = self.message
        name = message.role if isinstance(message, ChatMessage) else conversation.get_role(message)
        return _ROLES.get(name, "assistant")

    @property
    def actor(self) -> str:
        """The author's name if the message contains one, otherwise the role."""
        return self.message.name or self.role

    @property
    def digest(self) -> str:
        """A hash of the message's type, name and text, which changes when the message is edited."""
        return blake2b(_encode_message_identity(self.message), digest_size=4).hexdigest()

    @property
    def is_shortened(self) -> bool:
        """Whether a node has truncated or cleared the message to save tokens."""
        return SHORTENED in self.message.additional_kwargs


@dataclass(frozen=True, slots=True)
class ThreadHistory:
    """The messages of a thread up to a checkpoint.

    The messages are ordered by their first occurrence in the thread. If the thread contains several
    versions of a message, the history contains only the version that
    `_select_one_version_of_each_message` selects.
    """

    thread_id: str
    checkpoint_id: str | None
    messages: Sequence[ThreadMessage]

    def with_times(self, times: Sequence[datetime | None]) -> ThreadHistory:
        """Return a copy of the history with unknown message times filled in from `times`.

        Args:
            times: The times of the last messages, the newest first.
        """
        timed = list(self.messages)
        for i, time in zip(range(len(timed) - 1, -1, -1), times, strict=False):
            timed[i] = timed[i] if timed[i].at else replace(timed[i], at=time)
        return replace(self, messages=timed)


def build_history_from_state(
    thread_id: str, checkpoint_id: str | None, messages: Sequence[BaseMessage]
) -> ThreadHistory:
    """Build a thread's history from the messages in its state.

    The returned history does not include messages that were removed from the state.

    Args:
        thread_id: The thread.
        checkpoint_id: The checkpoint of the state.
        messages: The messages.
    """
    return ThreadHistory(
        thread_id,
        checkpoint_id,
        _select_one_version_of_each_message(
            (message, True) for message in _iter_thread_messages(messages)
        ),
    )


def mark_messages_not_written_by_person_of_run(
    messages: Sequence[BaseMessage],
) -> Sequence[BaseMessage]:
    """Return the messages in a run's state, marking those not written by the run's user.

    On the server, a metadata field marks messages that were not written by the run's user. When a
    run stores a message, the run marks only the stored copy of the message (see `MESSAGE_MARKER`).
    A message object in the running graph's state may therefore lack the mark in its metadata. If a
    message was not written by the run's user and its object lacks the mark, the function returns a
    copy of the message that has the mark.
    """
    marker = MESSAGE_MARKER.get()
    return messages if marker is None else marker.mark_messages(messages)


def select_messages_of_turns_to_remember(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Return the messages that can become memories; see `REMEMBER` and `REMEMBER_TURN`."""
    return [part.message for part in _iter_thread_messages(messages) if part.is_remembered]


async def read_channel_values(saver: Any, head: CheckpointTuple) -> dict[str, Any]:
    """Return the channel values of a checkpoint, including those of `DeltaChannel`s.

    See `Checkpointer.delta_values`. Other libraries' checkpointers return only values stored in the
    checkpoint itself, without the values of `DeltaChannel`s.
    """
    values = dict(head.checkpoint["channel_values"])
    has_deltas = head.metadata.get(COUNTERS) or any(
        isinstance(value, DeltaSnapshot) for value in values.values()
    )
    if has_deltas and hasattr(saver, "delta_values"):
        configurable = head.config["configurable"]
        options = {
            name: configurable[name]
            for name in ("checkpoint_id", "checkpoint_ns")
            if name in configurable
        }
        delta_values = await call_method(
            saver, "delta_values", configurable["thread_id"], **options
        )
        values |= {name: value for name, value in delta_values.items() if value is not None}
    return values


async def read_history(
    saver: Any,
    thread_id: str,
    channel: str = "messages",
    ids_with_known_times: Collection[str] = (),
) -> ThreadHistory:
    """Read the messages of a thread.

    Args:
        saver: The checkpointer.
        thread_id: The thread.
        channel: The channel of the messages.
        ids_with_known_times: Ids of messages whose times need not be read.

    Raises:
        UnknownThread: There is no such thread.
    """
    if hasattr(saver, "history") and hasattr(saver, "checkpoints"):
        return await _read_history_from_perdure_checkpointer(
            saver, thread_id, channel, ids_with_known_times
        )
    config: RunnableConfig = {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}
    head = await call_method(saver, "get_tuple", config)
    if head is None:
        raise UnknownThread(f"there is no thread {thread_id!r} in the {type(saver).__name__}")
    values = head.checkpoint["channel_values"].get(channel)
    messages = check_messages([] if values is None else values, f"the channel {channel!r}")
    history = build_history_from_state(thread_id, head.checkpoint["id"], messages)
    return history.with_times([parse_time(head.checkpoint.get("ts"))] * len(history.messages))


async def is_thread_read_in_full(
    saver: Any, thread_id: str, head_id: str | None, channel: str, watermark: Watermark
) -> bool:
    """Return whether a watermark covers every message in a thread, up to the thread's head.

    The thread's newest messages are checked first. If the newest messages are not enough to decide
    whether the watermark covers the whole thread, all messages of the thread are read. If the
    thread cannot be read, return False, because the thread might contain messages that the
    watermark does not cover.

    Args:
        saver: The checkpointer.
        thread_id: The thread.
        head_id: The checkpoint id of the head.
        channel: The channel of the messages.
        watermark: The watermark.
    """
    try:
        tail: list[HistoryItem] = await call_method(
            saver,
            "history",
            thread_id,
            channel=channel,
            checkpoint_id=head_id,
            ends=(0, _TAIL_MESSAGES),
        )
        newest = _iter_thread_messages(
            check_messages([item.value for item in tail], f"the channel {channel!r}")
        )
        if not tail or not watermark.count:
            return not tail
        read_messages = {message.id: message for message in watermark.known}
        messages = [message for message in newest if message.message.id]
        if messages[-1:] and messages[-1].id not in read_messages:
            return False
        are_read = not any(
            _is_unread(message, read_messages.get(message.id)) for message in messages
        )
        if are_read and len(messages) == len(tail) and tail[-1].position + 1 == watermark.count:
            return True
        return not watermark.find_unread(
            await read_history(saver, thread_id, channel, watermark.recently_read_message_ids)
        )
    except PerdureError:
        return False


async def _read_history_from_perdure_checkpointer(
    saver: Any, thread_id: str, channel: str, ids_with_known_times: Collection[str]
) -> ThreadHistory:
    """Read all messages of a thread.

    If a message contains no creation time, its time is the time of the checkpoint that added the
    message.
    """
    infos = await _list_checkpoints(saver, thread_id, 1)
    # The newest checkpoint is not always the thread's head, so search all checkpoints if necessary.
    if not any(info.is_head for info in infos):
        infos = await _list_checkpoints(saver, thread_id, None)
    info = next((info for info in infos if info.is_head), None)
    checkpoint_id = None if info is None else info.checkpoint_id
    items: list[HistoryItem] = await call_method(
        saver, "history", thread_id, channel=channel, checkpoint_id=checkpoint_id
    )
    thread_messages = _iter_thread_messages(
        check_messages([item.value for item in items], f"the channel {channel!r}")
    )
    messages = _select_one_version_of_each_message(
        zip(thread_messages, (item.seen is not False for item in items), strict=True)
    )
    untimed = [
        i for i, m in enumerate(messages) if m.at is None and m.id not in ids_with_known_times
    ]
    count = len(messages) - min(untimed, default=len(messages))
    infos = (
        (await _list_checkpoints(saver, thread_id, _CHECKPOINTS_PER_MESSAGE * (count + 1)))
        if count
        else infos
    )
    by_id = {info.checkpoint_id: info for info in infos}
    times: list[datetime | None] = []
    while info is not None and len(times) < count:
        parent = by_id.get(info.parent_id or "")
        parent_count = parent.counts.get(channel, 0) if parent else 0
        times += [parse_time(info.ts)] * (info.counts.get(channel, 0) - parent_count)
        info = parent
    return ThreadHistory(thread_id, checkpoint_id, messages).with_times(
        times + times[-1:] * (count - len(times))
    )


async def _list_checkpoints(saver: Any, thread_id: str, limit: int | None) -> list[CheckpointInfo]:
    """List a thread's newest `limit` checkpoints, or all of them if `limit` is None."""
    infos: list[CheckpointInfo] = await call_method(
        saver, "checkpoints", thread_id, checkpoint_ns="", limit=limit
    )
    return infos


def _select_one_version_of_each_message(
    versions_with_is_in_state: Iterable[tuple[ThreadMessage, bool]],
) -> list[ThreadMessage]:
    """Select one version of each message, and order the messages by first occurrence.

    `versions_with_is_in_state` contains pairs of a message version and a bool. The bool is True if
    the current state may contain the message version. If the state contains unshortened versions of
    a message, the first of these versions is selected. If the current state contains no complete
    version of a message, the last complete version in the thread's history is selected. A message
    version is complete if no node has shortened the version to save tokens. If all versions of a
    message are shortened, the first version is selected.
    """
    selected: dict[str, ThreadMessage] = {}
    settled_ids: set[str] = set()
    for message, is_in_state in versions_with_is_in_state:
        if message.id not in selected or not (message.is_shortened or message.id in settled_ids):
            selected[message.id] = message
        if is_in_state and not message.is_shortened:
            settled_ids.add(message.id)
    return list(selected.values())


def _iter_thread_messages(messages: Sequence[BaseMessage]) -> Iterator[ThreadMessage]:
    """Yield messages with their ids and timestamps.

    If a message has no id, a hash is used as its id. The hash is computed from the message's type,
    name and text, and the number of identical earlier messages.
    """
    counts: Counter[bytes] = Counter()
    is_remembered = True
    for message in messages:
        if conversation.get_role(message) == "human":
            is_remembered = message.response_metadata.get(REMEMBER_TURN) is not False
        id, identity = message.id, _encode_message_identity(message)
        if not id:
            counts[identity] += 1
            digest = blake2b(identity + str(counts[identity]).encode(), digest_size=10)
            id = f"{HASHED_ID_PREFIX}{digest.hexdigest()}"
        yield ThreadMessage(
            message,
            id,
            at=parse_time(message.response_metadata.get("create_time")),
            turn_is_remembered=is_remembered,
        )


def _encode_message_identity(message: BaseMessage) -> bytes:
    """Encode a message's type, name and text as input for a hash function."""
    parts = (message.type, message.name or "", read_message_text(message))
    return "\0".join(parts).encode("utf-8", "surrogatepass")


def make_storable(text: str) -> str:
    """Strip whitespace at both ends of a text, and replace lone surrogates with question marks."""
    return text.strip().encode("utf-8", "replace").decode()


def build_hashed_key(prefix: str, *parts: str, digest_size: int = 10) -> str:
    """Build a key that consists of a prefix and a hash of the parts, such as `turn-6b1f…`.

    The same arguments always produce the same key. `digest_size` is the number of bytes of the
    hash.
    """
    identity = "\0".join(parts).encode("utf-8", "surrogatepass")
    return f"{prefix}-{blake2b(identity, digest_size=digest_size).hexdigest()}"


def parse_time(value: Any) -> datetime | None:
    """Convert a Unix timestamp in seconds, an ISO 8601 timestamp or a datetime to a UTC datetime.

    Return None for anything else.
    """
    try:
        if is_number(value):
            return datetime.fromtimestamp(value, UTC)
        moment = datetime.fromisoformat(value) if isinstance(value, str) else value
        if not isinstance(moment, datetime):
            return None
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        return None


class ReadMessage(NamedTuple):
    """A record of a message that an extractor has read: id, thread position and digest."""

    id: str
    position: int
    digest: str


@dataclass(frozen=True, slots=True)
class Watermark:
    """An extractor's progress in a thread: the messages that it has read, and its last failures.

    Attributes:
        extractor: The name of the extractor.
        known: The most recent messages that the extractor has read, by position.
        count: The number of all messages that were read.
        next: The position that the next new message of the thread gets.
        checkpoint_id: The head of the thread when all messages had been read, or None if messages
            remain to be read. A thread with a different head is due.
        version: The version of the note, 0 if there is no note yet, or None if the store keeps no
            versions.
        attempts: The number of consecutive failures while the thread had the head `failed_head`.
        failed_at: The time of the last failure (UTC).
        failed_head: The head of the thread at the time of the last failure.
        error: The error of the last failure.
        final: Whether a retry would fail again.
    """

    extractor: str = TURN_EXTRACTOR
    known: tuple[ReadMessage, ...] = ()
    count: int = 0
    next: int = 0
    checkpoint_id: str | None = None
    version: int | None = None
    attempts: int = 0
    failed_at: datetime | None = None
    failed_head: str | None = None
    error: str = ""
    final: bool = False

    @property
    def recently_read_message_ids(self) -> frozenset[str]:
        """The ids of the most recent messages that the extractor has read.

        A watermark stores at most `_MAX_READ_MESSAGES` message ids, and drops the ids of older
        messages.
        """
        return frozenset(message.id for message in self.known)

    def find_unread(self, history: ThreadHistory) -> list[ThreadMessage]:
        """Return the messages whose current version the extractor has not read yet.

        The returned messages have positions. A watermark's `known` list contains only the most
        recent messages that the extractor has read. If `known` does not contain all messages that
        the extractor has read, all messages before the first message in `known` are treated as
        read. If none of the messages in `known` are in the thread, for example after a fork from an
        old checkpoint, all messages in the thread are treated as unread.
        """
        read_messages = {message.id: message for message in self.known}
        messages = self.assign_thread_positions(history.messages)
        first = next((i for i, message in enumerate(messages) if message.id in read_messages), None)
        if first is None or self.count == len(self.known):
            first = 0
        return [
            message
            for message in messages[first:]
            if _is_unread(message, read_messages.get(message.id))
        ]

    def assign_thread_positions(self, messages: Sequence[ThreadMessage]) -> list[ThreadMessage]:
        """Return the messages with their positions in the thread.

        If the watermark's list `known` contains a message, the message gets the position that is
        recorded in `known`. A message that comes before all messages of the list `known` in the
        thread gets a lower position than the earliest of these known messages. Messages that come
        after the last message in the list `known` are numbered in ascending order, starting with
        the number in the watermark's attribute `next`. A message between two messages of the list
        `known` is assigned the position of the nearest preceding message in `known`. If two
        messages have the same position, their memories are sorted by age.
        """
        positions = {message.id: message.position for message in self.known}
        read_indices = [i for i, message in enumerate(messages) if message.id in positions]
        first_read, last_read = (read_indices[0], read_indices[-1]) if read_indices else (0, -1)
        positioned: list[ThreadMessage] = []
        position, next_position = (
            positions[messages[first_read].id] - first_read - 1 if read_indices else 0,
            self.next,
        )
        for number, message in enumerate(messages):
            if message.id in positions:
                position = positions[message.id]
            elif number < first_read:
                position += 1
            elif number > last_read:
                position, next_position = next_position, next_position + 1
            positioned.append(replace(message, position=position))
        return positioned

    def advance(self, messages: Sequence[ThreadMessage], checkpoint_id: str | None) -> Watermark:
        """Return a copy of the watermark that records `messages` as read and contains no failures.

        Args:
            messages: The messages, which must have positions.
            checkpoint_id: The head of the thread if all messages are read now, else None.
        """
        read_before = {message.id: message for message in self.known}
        read_now = {
            message.id: ReadMessage(message.id, message.position or 0, message.digest)
            for message in messages
        }
        newest = sorted({**read_before, **read_now}.values(), key=lambda message: message.position)[
            -_MAX_READ_MESSAGES:
        ]
        count = self.count + len(read_now.keys() - read_before.keys())
        next_position = max([self.next, *(message.position + 1 for message in read_now.values())])
        return Watermark(
            self.extractor, tuple(newest), count, next_position, checkpoint_id, self.version
        )

    def with_failure(
        self, error: str, failed_at: datetime, head_id: str | None, *, final: bool = False
    ) -> Watermark:
        """Return an updated watermark that records a failed extraction.

        Args:
            error: The error.
            failed_at: The time of the failure.
            head_id: The head of the thread at that time.
            final: Whether a retry would fail again.
        """
        return replace(
            self,
            attempts=self.attempts + 1 if self.failed_head == head_id else 1,
            failed_at=failed_at,
            failed_head=head_id,
            error=error,
            final=final,
        )

    def reset_to_unread(self) -> Watermark:
        """Return a copy with no messages recorded as read, so that the whole thread is read again.

        Positions are not reused.
        """
        return replace(self, known=(), count=0, checkpoint_id=None)

    def has_same_progress(self, other: Watermark) -> bool:
        """Return whether two watermarks record that exactly the same messages have been read.

        Versions of the note are ignored.
        """
        return (self.count, self.known) == (other.count, other.known)

    def build_put(self, namespace: Namespace, thread_id: str) -> PutItem:
        """Build the store operation that writes the watermark.

        The watermark is stored as a note, which is an item in a namespace that perdure reserves for
        internal use. If the store keeps versions, it rejects the write if the stored watermark has
        been modified since it was read.
        """
        value: dict[str, Any] = {"extractor": self.extractor, "thread_id": thread_id, "known": []}
        value |= _NOTE_ADAPTER.dump_python(
            self, mode="json", exclude={"version"}, exclude_defaults=True
        )
        return build_unsearched_permanent_note_put(
            build_namespace_of_notes_about_memories(WATERMARKS, namespace),
            _build_watermark_key(self.extractor, thread_id),
            value,
            if_version=self.version,
        )


# Converts a watermark to and from the value of the store item that holds it.
_NOTE_ADAPTER: Final = TypeAdapter(Watermark)


async def read_watermark(
    adapter: StoreAdapter, namespace: Namespace, thread_id: str, extractor: str = TURN_EXTRACTOR
) -> Watermark:
    """Read the watermark of a thread.

    The watermark is empty if the extractor has not read the thread yet.

    Args:
        adapter: The adapter of the store that contains the item.
        namespace: The namespace of the thread's memories.
        thread_id: The thread.
        extractor: The name of the extractor.
    """
    [watermark] = await read_watermarks(adapter, [(namespace, thread_id)], extractor)
    return watermark


async def read_watermarks(
    adapter: StoreAdapter,
    watermark_keys: Sequence[tuple[Namespace, str]],
    extractor: str = TURN_EXTRACTOR,
) -> list[Watermark]:
    """Read the watermarks of threads, and return them in the same order as `watermark_keys`.

    Args:
        adapter: The adapter of the store that contains the item.
        watermark_keys: For each thread, the namespace of its memories, and its id.
        extractor: The name of the extractor.
    """
    if not watermark_keys:
        return []
    ops = [
        GetOp(
            build_namespace_of_notes_about_memories(WATERMARKS, namespace),
            _build_watermark_key(extractor, thread),
        )
        for namespace, thread in watermark_keys
    ]
    empty = Watermark(extractor, version=0 if adapter.versioned else None)
    return [
        empty if note is None else _decode_watermark(note)
        for note in await adapter.call("batch", ops)
    ]


async def find_read_heads(
    adapter: StoreAdapter,
    heads: Sequence[tuple[Namespace, str, str]],
    extractor: str = TURN_EXTRACTOR,
) -> list[bool]:
    """Return for each head whether the watermark of its thread records that the head was read.

    A store of perdure reads all watermarks in one request, and decodes only their values.

    Args:
        adapter: The adapter of the store that contains the watermarks.
        heads: For each thread, the namespace of its memories, its id, and the id of its head.
        extractor: The name of the extractor.
    """
    if not isinstance(adapter.store, Store):
        watermark_keys = [(namespace, thread_id) for namespace, thread_id, _ in heads]
        watermarks = await read_watermarks(adapter, watermark_keys, extractor)
        return [
            watermark.checkpoint_id == checkpoint_id
            for watermark, (_, _, checkpoint_id) in zip(watermarks, heads, strict=True)
        ]
    parts = adapter.store.parts
    paths = {
        namespace: parts.resolve_prefix(
            build_namespace_of_notes_about_memories(WATERMARKS, namespace)
        )
        for namespace in {namespace for namespace, _, _ in heads}
    }
    keys = [
        (paths[namespace], _build_watermark_key(extractor, thread_id))
        for namespace, thread_id, _ in heads
    ]
    texts = await parts.runner.run_read_flow(
        lambda: parts.reader.read_value_texts(keys, parts.now())
    )
    return [
        _is_watermark_at_head(texts.get(key), checkpoint_id)
        for key, (_, _, checkpoint_id) in zip(keys, heads, strict=True)
    ]


def _is_watermark_at_head(text: str | None, checkpoint_id: str) -> bool:
    """Return whether the JSON text of a watermark names a checkpoint as the head that was read.

    The result is False if the watermark is missing or damaged. `read_watermarks` then reads it
    again, and raises the error that describes the damage.
    """
    try:
        return text is not None and orjson.loads(text)["checkpoint_id"] == checkpoint_id
    except (ValueError, KeyError, TypeError):
        return False


def build_put_clearing_extraction_failure(watermark_note: Item) -> PutItem:
    """Build a put operation that removes the recorded extraction failure from a watermark.

    A watermark records how far an extractor has read a thread, and whether the last extraction
    failed.

    The messages of a failed extraction are read again by the next extraction, which starts only
    when the thread has a new head checkpoint.
    """
    watermark, (_, _, *namespace) = _decode_watermark(watermark_note), watermark_note.namespace
    return watermark.advance((), watermark.failed_head).build_put(
        tuple(namespace), watermark_note.value["thread_id"]
    )


def _decode_watermark(note: Item) -> Watermark:
    """Restore a watermark from the store item that holds it."""
    return _NOTE_ADAPTER.validate_python({**note.value, "version": getattr(note, "version", None)})


def _build_watermark_key(extractor: str, thread_id: str) -> str:
    """Build the key of a watermark's note."""
    if extractor == TURN_EXTRACTOR:
        return thread_id
    return build_hashed_key("extractor", extractor, thread_id, digest_size=16)


def _is_unread(message: ThreadMessage, read_message: ReadMessage | None) -> bool:
    """Return whether a message is new, or was edited since an extractor last read the message."""
    # Do not count a message as edited if a node has shortened it to save tokens.
    return read_message is None or (
        read_message.digest != message.digest and not message.is_shortened
    )
