"""The messages of a thread, each once, with ids and times, read from any checkpointer or a state.

perdure's checkpointers keep all messages, removed since or not; of others it is those that the
newest checkpoint holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Final, Protocol, runtime_checkable

from langchain_core.messages import BaseMessage, ChatMessage, SystemMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver

from perdure.checkpointers.reports import CheckpointInfo, HistoryItem
from perdure.errors import UnknownThread
from perdure.memory import conversation
from perdure.memory.effects import Effect, Effects
from perdure.memory.nodes import checked
from perdure.memory.options import instance, is_number
from perdure.memory.records import Role
from perdure.memory.shortening import SHORTENED

_ROLES: Final[Mapping[str, Role]] = {
    **{"human": "user", "user": "user", "ai": "assistant", "assistant": "assistant"},
    **{"tool": "tool", "function": "tool", "system": "system", "developer": "system"},
}
_STEPS: Final = 4  # checkpoints for each message that are read first: a run puts a few
REMEMBER: Final = "remember"
"""In a message's `response_metadata`, with the value False: no memory is made of it."""


@dataclass(frozen=True, slots=True)
class ThreadMessage:
    """A message of a thread.

    Attributes:
        message: The message.
        id: Its id; of one without, made of its text.
        position: Its place in the thread, which a watermark gives it.
        at: Its time (UTC); None: not known.
    """

    message: BaseMessage
    id: str
    position: int | None = None
    at: datetime | None = None

    @property
    def text(self) -> str:
        """Its text, half characters as question marks; of a message off the record, nothing."""
        off_record = self.message.response_metadata.get(REMEMBER) is False
        return "" if off_record else storable(str(self.message.text))

    @property
    def role(self) -> Role:
        """Whose words they are; a role that nobody knows is not trusted as a user's."""
        message = self.message
        if isinstance(message, ChatMessage):
            return _ROLES.get(message.role, "assistant")
        return _ROLES.get(conversation.role(message), "assistant")

    @property
    def actor(self) -> str:
        """The message's name, else its role."""
        return self.message.name or self.role

    @property
    def digest(self) -> str:
        """What tells the message from a later version of it."""
        return blake2b(_identity(self.message), digest_size=4).hexdigest()

    @property
    def shortened(self) -> bool:
        """Whether a node cut it to save room."""
        return SHORTENED in self.message.additional_kwargs


@dataclass(frozen=True, slots=True)
class ThreadHistory:
    """The messages of a thread, in order.

    Attributes:
        thread_id: The thread.
        checkpoint_id: The checkpoint at which it was read.
        messages: Each once, in its last version.
    """

    thread_id: str
    checkpoint_id: str | None
    messages: Sequence[ThreadMessage]

    @property
    def shown(self) -> tuple[str, ...]:
        """The texts of its system messages, which the model was shown."""
        systems = (m for m in self.messages if isinstance(m.message, SystemMessage) and m.text)
        return tuple(dict.fromkeys(each.text for each in systems))


@runtime_checkable
class Historic(Protocol):
    """A checkpointer that keeps what was removed, as perdure's do."""

    def history(
        self, thread_id: str, *, channel: str, checkpoint_id: str | None
    ) -> list[HistoryItem]:
        """All items on the way to a checkpoint."""

    async def ahistory(
        self, thread_id: str, *, channel: str, checkpoint_id: str | None
    ) -> list[HistoryItem]:
        """See `history`."""

    def checkpoints(
        self, thread_id: str, *, checkpoint_ns: str | None, limit: int | None
    ) -> list[CheckpointInfo]:
        """The checkpoints of a thread without their values."""

    async def acheckpoints(
        self, thread_id: str, *, checkpoint_ns: str | None, limit: int | None
    ) -> list[CheckpointInfo]:
        """See `checkpoints`."""


def check_saver(saver: Any) -> BaseCheckpointSaver[Any]:
    """A checkpointer.

    Raises:
        ConfigurationError: It is none.
    """
    expected = "a BaseCheckpointSaver, like perdure.checkpointers.SQLiteCheckpointer.open(path)"
    return instance("saver", saver, BaseCheckpointSaver, expected)  # type: ignore[no-any-return]


def history_of_state(
    thread_id: str,
    checkpoint_id: str | None,
    messages: Sequence[BaseMessage],
    at: datetime | None,
) -> ThreadHistory:
    """A thread as the messages of a state show it; those without a time of their own get one."""
    named = [(_message(each, id), True) for each, id in with_ids(messages)]
    return ThreadHistory(thread_id, checkpoint_id, [_timed(each, at) for each in _latest(named)])


def read_history(
    saver: Any, thread_id: str, channel: str = "messages", known: Collection[str] = ()
) -> Effects[ThreadHistory]:
    """Read the messages of a thread.

    Args:
        saver: Its checkpointer.
        thread_id: The thread.
        channel: The channel of the messages.
        known: Ids of messages whose times nobody needs.

    Raises:
        UnknownThread: There is no such thread.
        InvalidMessages: The channel holds something else.
    """
    if isinstance(saver, Historic):
        return (yield from _Log(saver, thread_id, channel).read(known))
    config: RunnableConfig = {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}
    found = yield Effect(lambda: saver.get_tuple(config), lambda: saver.aget_tuple(config))
    if found is None:
        raise UnknownThread(f"there is no thread {thread_id!r} in the {type(saver).__name__}")
    values = found.checkpoint["channel_values"].get(channel)
    messages = checked([] if values is None else values, f"the channel {channel!r}")
    at = time_of(found.checkpoint.get("ts"))
    return history_of_state(thread_id, found.checkpoint["id"], messages, at)


@dataclass(frozen=True, slots=True)
class _Log:
    """A channel of a thread whose checkpointer keeps all of it."""

    saver: Historic
    thread_id: str
    channel: str

    def read(self, known: Collection[str]) -> Effects[ThreadHistory]:
        head = _head((yield from self._checkpoints(1)))
        if head is None:  # the thread went on from an old checkpoint, or has none
            head = _head((yield from self._checkpoints(None)))
        uid = None if head is None else head.checkpoint_id
        saver, options = self.saver, {"channel": self.channel, "checkpoint_id": uid}
        items: list[HistoryItem] = yield Effect(
            lambda: saver.history(self.thread_id, **options),  # type: ignore[arg-type]
            lambda: saver.ahistory(self.thread_id, **options),  # type: ignore[arg-type]
        )
        values = checked([item.value for item in items], f"the channel {self.channel!r}")
        named = zip(with_ids(values), items, strict=True)
        messages = _latest((_message(each, id), item.seen) for (each, id), item in named)
        if head is not None:
            messages = yield from self._with_times(messages, head, known)
        return ThreadHistory(self.thread_id, uid, messages)

    def _with_times(
        self, messages: list[ThreadMessage], head: CheckpointInfo, known: Collection[str]
    ) -> Effects[list[ThreadMessage]]:
        """The messages with the times of the checkpoints that brought them, where one is needed."""
        without = [i for i, each in enumerate(messages) if each.at is None and each.id not in known]
        if not without:
            return messages
        limit = _STEPS * (len(messages) - without[0]) + _STEPS
        infos = yield from self._checkpoints(limit)
        timed, left = _timed_by(messages, infos, head, self.channel)
        if left > without[0] and len(infos) == limit:
            infos = yield from self._checkpoints(None)
            timed, _ = _timed_by(messages, infos, head, self.channel)
        return timed

    def _checkpoints(self, limit: int | None) -> Effects[list[CheckpointInfo]]:
        saver, thread_id = self.saver, self.thread_id
        found: list[CheckpointInfo] = yield Effect(
            lambda: saver.checkpoints(thread_id, checkpoint_ns="", limit=limit),
            lambda: saver.acheckpoints(thread_id, checkpoint_ns="", limit=limit),
        )
        return found


def _head(infos: Sequence[CheckpointInfo]) -> CheckpointInfo | None:
    return next((info for info in infos if info.is_head), None)


def _timed_by(
    messages: Sequence[ThreadMessage],
    infos: Sequence[CheckpointInfo],
    head: CheckpointInfo,
    channel: str,
) -> tuple[list[ThreadMessage], int]:
    """The messages with times; and how many are older than the checkpoints that were read.

    A checkpoint that has more messages than its parent brought the difference. Where messages were
    removed in the same step, that is a step or so off.
    """
    timed, left = list(messages), len(messages)
    by_id = {info.checkpoint_id: info for info in infos}
    at, info = time_of(head.ts), by_id.get(head.checkpoint_id, head)
    while info is not None:
        parent = by_id.get(info.parent_id) if info.parent_id else None
        if parent is None and info.parent_id is not None:
            break  # further than was read, or pruned
        before = parent.counts.get(channel, 0) if parent else 0
        at = time_of(info.ts) or at
        start = max(0, left - max(0, info.counts.get(channel, 0) - before))
        timed[start:left] = [_timed(each, at) for each in timed[start:left]]
        left, info = start, parent
    timed[:left] = [_timed(each, at) for each in timed[:left]]
    return timed, left


def _latest(versions: Iterable[tuple[ThreadMessage, bool]]) -> list[ThreadMessage]:
    """Each message once, at its first place, in its present version.

    Args:
        versions: All of them in order, each with whether the state has it. Of a message whose
            version there is a shortened one, or that is gone, it is the last that is not.
    """
    found: dict[str, ThreadMessage] = {}
    settled: set[str] = set()
    for each, seen in versions:
        if each.id not in found or not (each.shortened or each.id in settled):
            found[each.id] = each
        if seen and not each.shortened:
            settled.add(each.id)
    return list(found.values())


def with_ids(messages: Sequence[BaseMessage]) -> Iterator[tuple[BaseMessage, str]]:
    """Messages with their ids; one without gets one of its text, and how often that came before."""
    times: Counter[bytes] = Counter()
    for message in messages:
        if message.id:
            yield message, message.id
            continue
        identity = _identity(message)
        times[identity] += 1
        made = blake2b(identity + str(times[identity]).encode(), digest_size=10)
        yield message, f"unnamed-{made.hexdigest()}"


def _identity(message: BaseMessage) -> bytes:
    parts = (message.type, message.name or "", str(message.text))
    return "\0".join(parts).encode("utf-8", "surrogatepass")


def _message(message: BaseMessage, id: str) -> ThreadMessage:
    return ThreadMessage(message, id, at=time_of(message.response_metadata.get("create_time")))


def _timed(message: ThreadMessage, at: datetime | None) -> ThreadMessage:
    return message if message.at is not None else replace(message, at=at)


def storable(text: str) -> str:
    """A text without white space around it, half characters in it as question marks."""
    return text.strip().encode("utf-8", "replace").decode()


def time_of(value: Any) -> datetime | None:
    """A moment (UTC) given in seconds since 1970 or in ISO 8601; None: it is neither.

    >>> time_of(0).isoformat(), time_of("2024-05-01T10:00:00+02:00").isoformat()
    ('1970-01-01T00:00:00+00:00', '2024-05-01T08:00:00+00:00')
    """
    try:
        if is_number(value):
            return datetime.fromtimestamp(value, UTC)
        found = datetime.fromisoformat(value) if isinstance(value, str) else value
        if not isinstance(found, datetime):
            return None
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        return None
