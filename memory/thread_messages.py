"""The messages of a thread, each once, with ids and times, and how far they were read.

Of perdure's checkpointers also removed messages. Watermarks are notes in the store: up to which
message an extractor has read a thread. They name the newest messages by id, so they hold for
trimmed, edited and forked threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from langchain_core.messages import BaseMessage, ChatMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.store.base import GetOp, Item
from pydantic import TypeAdapter

from perdure.checkpointers.delta import COUNTERS
from perdure.checkpointers.reports import CheckpointInfo, HistoryItem
from perdure.checkpointers.values import DeltaSnapshot
from perdure.effects import call_method
from perdure.errors import PerdureError, UnknownThread
from perdure.memory import conversation
from perdure.memory.conversation import SHORTENED
from perdure.memory.nodes import check_messages
from perdure.memory.options import is_number
from perdure.memory.quotation import read_message_text
from perdure.memory.records import (
    HASHED_ID_PREFIX,
    WATERMARKS,
    Role,
    StoreAdapter,
    build_note_put,
    build_notes_namespace,
)
from perdure.stores.base import Namespace, PutItem

_ROLES: Final[Mapping[str, Role]] = {
    **{"human": "user", "user": "user", "ai": "assistant", "assistant": "assistant"},
    **{"tool": "tool", "function": "tool", "system": "system", "developer": "system"},
}
_CHECKPOINTS_PER_MESSAGE: Final = (
    4  # checkpoints that are read for each message: a run writes a few
)
REMEMBER: Final = "remember"
"""In a message's `response_metadata`, with the value False: no memory is made of it."""
REMEMBER_TURN: Final = "remember_turn"
"""In the `response_metadata` of a human message, with the value False: no memory is made of the
message, nor of what follows it until the next human message. The server sets it for a message that
somebody else than the person of the thread sent."""
SEARCHED: Final = "searched"
"""The key in a message's `response_metadata` that, with the value True, lets the search of threads
find a message of which no memory is made, such as a document that a model wrote."""
TURN_EXTRACTOR: Final = "turns"
"""The extractor whose watermarks have the id of their thread as key; see `_key`."""
_TAIL_MESSAGES: Final = 8  # messages at the end of a thread that mostly tell whether all were read
_MAX_READ_MESSAGES: Final = 50  # messages that a watermark names


@dataclass(frozen=True, slots=True)
class ThreadMessage:
    """A message of a thread."""

    message: BaseMessage
    id: str  # the message's own, else a hash of its text
    position: int | None = None  # in the thread, given by a watermark
    at: datetime | None = None  # when it was said; None: not known
    turn_is_remembered: bool = True  # whether memories may be made of its turn

    @property
    def text(self) -> str:
        """Its text, and what its attachments tell; "" for a message off the record."""
        off_record = self.message.response_metadata.get(REMEMBER) is False
        is_remembered = self.turn_is_remembered and not off_record
        return make_storable(read_message_text(self.message)) if is_remembered else ""

    @property
    def searched_text(self) -> str:
        """The text that the search of threads indexes; "" for a message that is not remembered."""
        is_searched = self.message.response_metadata.get(SEARCHED) is True
        return make_storable(read_message_text(self.message)) if is_searched else self.text

    @property
    def role(self) -> Role:
        """The role of its author; an unknown role is trusted no more than an assistant's."""
        message = self.message
        name = message.role if isinstance(message, ChatMessage) else conversation.role(message)
        return _ROLES.get(name, "assistant")

    @property
    def actor(self) -> str:
        """The message's name, else its role."""
        return self.message.name or self.role

    @property
    def digest(self) -> str:
        """A hash that changes if the message is edited."""
        return blake2b(_encode_identity(self.message), digest_size=4).hexdigest()

    @property
    def is_shortened(self) -> bool:
        """Whether a node cut it to save room."""
        return SHORTENED in self.message.additional_kwargs


@dataclass(frozen=True, slots=True)
class ThreadHistory:
    """The messages of a thread as of a checkpoint: each once, in order, in its last version."""

    thread_id: str
    checkpoint_id: str | None
    messages: Sequence[ThreadMessage]

    def with_times(self, times: Sequence[datetime | None]) -> ThreadHistory:
        """The history with these times for its last messages, newest first, if they have none."""
        timed = list(self.messages)
        for i, time in zip(range(len(timed) - 1, -1, -1), times, strict=False):
            timed[i] = timed[i] if timed[i].at else replace(timed[i], at=time)
        return replace(self, messages=timed)


def build_history_from_state(
    thread_id: str, checkpoint_id: str | None, messages: Sequence[BaseMessage]
) -> ThreadHistory:
    """The messages of a thread as a state has them."""
    latest = _select_latest_versions((message, True) for message in _iter_thread_messages(messages))
    return ThreadHistory(thread_id, checkpoint_id, latest)


async def read_channel_values(saver: Any, head: CheckpointTuple) -> dict[str, Any]:
    """Return the values of a checkpoint's channels, also of `DeltaChannel`s, if they are known.

    See `Checkpointer.delta_values`. Of another checkpointer the values are returned as they are.
    """
    values = dict(head.checkpoint["channel_values"])
    has_deltas = head.metadata.get(COUNTERS) or any(
        isinstance(value, DeltaSnapshot) for value in values.values()
    )
    if has_deltas and hasattr(saver, "delta_values"):
        configurable = head.config["configurable"]
        names = ("checkpoint_id", "checkpoint_ns")
        position = {name: configurable[name] for name in names if name in configurable}
        delta_values = await call_method(
            saver, "delta_values", configurable["thread_id"], **position
        )
        values |= {name: value for name, value in delta_values.items() if value is not None}
    return values


async def read_history(
    saver: Any, thread_id: str, channel: str = "messages", timed_ids: Collection[str] = ()
) -> ThreadHistory:
    """Read the messages of a thread; the times of known ones, by id, are not needed."""
    if hasattr(saver, "history") and hasattr(saver, "checkpoints"):
        return await _read_perdure_history(saver, thread_id, channel, timed_ids)
    config: RunnableConfig = {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}
    head = await call_method(saver, "get_tuple", config)
    if head is None:
        raise UnknownThread(f"there is no thread {thread_id!r} in the {type(saver).__name__}")
    values = head.checkpoint["channel_values"].get(channel)
    messages = check_messages([] if values is None else values, f"the channel {channel!r}")
    history = build_history_from_state(thread_id, head.checkpoint["id"], messages)
    return history.with_times([parse_time(head.checkpoint.get("ts"))] * len(history.messages))


async def is_read_in_full(
    saver: Any, thread_id: str, head: str | None, channel: str, mark: Watermark
) -> bool:
    """Return whether a watermark covers all messages of a thread up to its head.

    The newest messages of one of perdure's threads mostly tell. Otherwise all are read. A thread
    that cannot be read has unread messages.
    """
    try:
        options = {"channel": channel, "checkpoint_id": head, "ends": (0, _TAIL_MESSAGES)}
        tail: list[HistoryItem] = await call_method(saver, "history", thread_id, **options)
        newest = _iter_thread_messages(
            check_messages([item.value for item in tail], f"the channel {channel!r}")
        )
        if not tail or not mark.count:
            return not tail
        read_messages = {message.id: message for message in mark.known}
        messages = [message for message in newest if message.message.id]
        if messages[-1:] and messages[-1].id not in read_messages:
            return False
        are_read = not any(
            _is_unread(message, read_messages.get(message.id)) for message in messages
        )
        if are_read and len(messages) == len(tail) and tail[-1].position + 1 == mark.count:
            return True
        return not mark.find_unread(await read_history(saver, thread_id, channel, mark.ids))
    except PerdureError:
        return False


async def _read_perdure_history(
    saver: Any, thread_id: str, channel: str, timed_ids: Collection[str]
) -> ThreadHistory:
    """All messages that perdure's checkpointer has, with the times of their first checkpoints."""
    infos = await _list_checkpoints(saver, thread_id, 1)
    if not any(info.is_head for info in infos):  # the thread went on from an old checkpoint
        infos = await _list_checkpoints(saver, thread_id, None)
    info = next((info for info in infos if info.is_head), None)
    checkpoint_id = None if info is None else info.checkpoint_id
    options = {"channel": channel, "checkpoint_id": checkpoint_id}
    items: list[HistoryItem] = await call_method(saver, "history", thread_id, **options)
    thread_messages = _iter_thread_messages(
        check_messages([item.value for item in items], f"the channel {channel!r}")
    )
    messages = _select_latest_versions(
        zip(thread_messages, (item.seen is not False for item in items), strict=True)
    )
    untimed = [i for i, m in enumerate(messages) if m.at is None and m.id not in timed_ids]
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
    history = ThreadHistory(thread_id, checkpoint_id, messages)
    return history.with_times(times + times[-1:] * (count - len(times)))


async def _list_checkpoints(saver: Any, thread_id: str, limit: int | None) -> list[CheckpointInfo]:
    infos: list[CheckpointInfo] = await call_method(
        saver, "checkpoints", thread_id, checkpoint_ns="", limit=limit
    )
    return infos


def _select_latest_versions(versions: Iterable[tuple[ThreadMessage, bool]]) -> list[ThreadMessage]:
    """Return each message once, in the order of first occurrence.

    Each version has a flag that says whether the state may contain the version. If the state has
    only a shortened version of a message, or none, the last complete version is returned.
    """
    latest: dict[str, ThreadMessage] = {}
    settled_ids: set[str] = set()
    for message, is_in_state in versions:
        if message.id not in latest or not (message.is_shortened or message.id in settled_ids):
            latest[message.id] = message
        if is_in_state and not message.is_shortened:
            settled_ids.add(message.id)
    return list(latest.values())


def _iter_thread_messages(messages: Sequence[BaseMessage]) -> Iterator[ThreadMessage]:
    """Messages with ids and times; a missing id is a hash of the text and its count so far."""
    counts: Counter[bytes] = Counter()
    is_remembered = True
    for message in messages:
        if conversation.role(message) == "human":
            is_remembered = message.response_metadata.get(REMEMBER_TURN) is not False
        id, identity = message.id, _encode_identity(message)
        if not id:
            counts[identity] += 1
            digest = blake2b(identity + str(counts[identity]).encode(), digest_size=10)
            id = f"{HASHED_ID_PREFIX}{digest.hexdigest()}"
        created_at = parse_time(message.response_metadata.get("create_time"))
        yield ThreadMessage(message, id, at=created_at, turn_is_remembered=is_remembered)


def _encode_identity(message: BaseMessage) -> bytes:
    parts = (message.type, message.name or "", read_message_text(message))
    return "\0".join(parts).encode("utf-8", "surrogatepass")


def make_storable(text: str) -> str:
    """A text without white space around it, and lone surrogates as question marks."""
    return text.strip().encode("utf-8", "replace").decode()


def parse_time(value: Any) -> datetime | None:
    """A moment (UTC) given in seconds since 1970 or in ISO 8601; None: it is neither."""
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
    """A message that was read: its id, its place in the thread, and a digest of its text."""

    id: str
    position: int
    digest: str


@dataclass(frozen=True, slots=True)
class Watermark:
    """Up to which message an extractor has read a thread, and how often it failed since."""

    extractor: str = TURN_EXTRACTOR
    known: tuple[ReadMessage, ...] = ()  # the newest messages that were read, by position
    count: int = 0  # messages that were read in all
    next: int = 0  # the position of the next message
    checkpoint_id: str | None = None  # the head when all was read; with another, the thread is due
    version: int | None = None  # of the note; 0: there is none; None: the store has no versions
    attempts: int = 0  # extractions that failed in a row
    failed_at: datetime | None = None  # when the last of them failed (UTC)
    failed_head: str | None = None  # the head of the thread then
    error: str = ""
    final: bool = False  # whether trying again cannot help

    @property
    def ids(self) -> frozenset[str]:
        """The ids of the known messages."""
        return frozenset(message.id for message in self.known)

    def find_unread(self, history: ThreadHistory) -> list[ThreadMessage]:
        """The messages that are not yet read, or were edited since, with their positions.

        If more were read than are known, only messages after the oldest known one count as unread;
        if no known message is left, as after a fork far back, all do.
        """
        read_messages = {message.id: message for message in self.known}
        messages = self.assign_positions(history.messages)
        first = next((i for i, message in enumerate(messages) if message.id in read_messages), None)
        if first is None or self.count == len(self.known):
            first = 0
        return [
            message
            for message in messages[first:]
            if _is_unread(message, read_messages.get(message.id))
        ]

    def assign_positions(self, messages: Sequence[ThreadMessage]) -> list[ThreadMessage]:
        """Messages with positions, which go up after the known messages, and down before them.

        One between two known ones has the position of the one before: the store orders by age then.
        """
        positions = {message.id: message.position for message in self.known}
        read_indices = [i for i, message in enumerate(messages) if message.id in positions]
        first, last = (read_indices[0], read_indices[-1]) if read_indices else (0, -1)
        positioned: list[ThreadMessage] = []
        position, next_position = (
            positions[messages[first].id] - first - 1 if read_indices else 0,
            self.next,
        )
        for number, message in enumerate(messages):
            if message.id in positions:
                position = positions[message.id]
            elif number < first:
                position += 1
            elif number > last:
                position, next_position = next_position, next_position + 1
            positioned.append(replace(message, position=position))
        return positioned

    def advance(self, messages: Sequence[ThreadMessage], checkpoint_id: str | None) -> Watermark:
        """The watermark after these messages, which have positions, were read."""
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
        progress = (tuple(newest), count, next_position, checkpoint_id)
        return Watermark(self.extractor, *progress, self.version)

    def with_failure(
        self, error: str, failed_at: datetime, head: str | None, *, final: bool = False
    ) -> Watermark:
        """The watermark after an extraction failed, with the head of the thread at that moment."""
        attempts = self.attempts + 1 if self.failed_head == head else 1
        failed = replace(self, attempts=attempts, failed_at=failed_at, failed_head=head)
        return replace(failed, error=error, final=final)

    def reset(self) -> Watermark:
        """The watermark of a thread that is to be read again; positions continue."""
        return replace(self, known=(), count=0, checkpoint_id=None)

    def has_same_progress(self, other: Watermark) -> bool:
        """Whether the same messages were read, whatever the version of the note."""
        return (self.count, self.known) == (other.count, other.known)

    def build_put(self, namespace: Namespace, thread_id: str) -> PutItem:
        """The operation that writes it, if the note is as it was read."""
        value: dict[str, Any] = {"extractor": self.extractor, "thread_id": thread_id, "known": []}
        value |= _NOTE_ADAPTER.dump_python(
            self, mode="json", exclude={"version"}, exclude_defaults=True
        )
        place, key = (
            build_notes_namespace(WATERMARKS, namespace),
            _build_key(self.extractor, thread_id),
        )
        return build_note_put(place, key, value, if_version=self.version)


_NOTE_ADAPTER: Final = TypeAdapter(Watermark)  # of the note


async def read_watermark(
    adapter: StoreAdapter, namespace: Namespace, thread_id: str, extractor: str = TURN_EXTRACTOR
) -> Watermark:
    """Read the watermark of a thread; an empty one if the extractor has read nothing of it."""
    [mark] = await read_watermarks(adapter, [(namespace, thread_id)], extractor)
    return mark


async def read_watermarks(
    adapter: StoreAdapter,
    watermark_keys: Sequence[tuple[Namespace, str]],
    extractor: str = TURN_EXTRACTOR,
) -> list[Watermark]:
    """Read the watermarks of threads, given with the namespaces of their memories."""
    if not watermark_keys:
        return []
    ops = [
        GetOp(build_notes_namespace(WATERMARKS, namespace), _build_key(extractor, thread))
        for namespace, thread in watermark_keys
    ]
    empty = Watermark(extractor, version=0 if adapter.versioned else None)
    notes = await adapter.call("batch", ops)
    return [empty if note is None else _decode_watermark(note) for note in notes]


def build_failure_reset(note: Item) -> PutItem:
    """The operation that takes a failure off a note: nothing is due until the thread goes on.

    The messages that were not read are read then.
    """
    mark, (_, _, *namespace) = _decode_watermark(note), note.namespace
    reset_mark = mark.advance((), mark.failed_head)
    return reset_mark.build_put(tuple(namespace), note.value["thread_id"])


def _decode_watermark(note: Item) -> Watermark:
    return _NOTE_ADAPTER.validate_python({**note.value, "version": getattr(note, "version", None)})


def _build_key(extractor: str, thread_id: str) -> str:
    if extractor == TURN_EXTRACTOR:
        return thread_id
    identity = f"{extractor}\0{thread_id}".encode("utf-8", "surrogatepass")
    return f"extractor-{blake2b(identity, digest_size=16).hexdigest()}"


def _is_unread(message: ThreadMessage, read_message: ReadMessage | None) -> bool:
    # a message that a node shortened to save room is not new
    return read_message is None or (
        read_message.digest != message.digest and not message.is_shortened
    )
