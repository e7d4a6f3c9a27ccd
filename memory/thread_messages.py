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
from typing import Any, Final

from langchain_core.messages import BaseMessage, ChatMessage
from langchain_core.runnables import RunnableConfig

from perdure.checkpointers.reports import CheckpointInfo, HistoryItem
from perdure.errors import UnknownThread
from perdure.memory import conversation
from perdure.memory.effects import Effect, Effects
from perdure.memory.nodes import checked
from perdure.memory.options import is_number
from perdure.memory.records import Role
from perdure.memory.shortening import SHORTENED

_ROLES: Final[Mapping[str, Role]] = {
    **{"human": "user", "user": "user", "ai": "assistant", "assistant": "assistant"},
    **{"tool": "tool", "function": "tool", "system": "system", "developer": "system"},
}
_STEPS: Final = 4  # checkpoints that are read for each message: a run puts a few
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

    def timed(self, at: datetime | None) -> ThreadMessage:
        """The message with this time, if it has none."""
        return self if self.at is not None else replace(self, at=at)


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

    def timed(self, at: datetime | None, start: int = 0) -> ThreadHistory:
        """The history with this time for messages from an index on that have none."""
        timed = [each.timed(at) if i >= start else each for i, each in enumerate(self.messages)]
        return replace(self, messages=timed)


def history_of_state(
    thread_id: str, checkpoint_id: str | None, messages: Sequence[BaseMessage]
) -> ThreadHistory:
    """The messages of a thread as a state has them."""
    found = _latest((_message(each, id), True) for each, id in with_ids(messages))
    return ThreadHistory(thread_id, checkpoint_id, found)


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
    if hasattr(saver, "history") and hasattr(saver, "checkpoints"):
        return (yield from _history(saver, thread_id, channel, known))
    config: RunnableConfig = {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}
    found = yield Effect(lambda: saver.get_tuple(config), lambda: saver.aget_tuple(config))
    if found is None:
        raise UnknownThread(f"there is no thread {thread_id!r} in the {type(saver).__name__}")
    values = found.checkpoint["channel_values"].get(channel)
    messages = checked([] if values is None else values, f"the channel {channel!r}")
    history = history_of_state(thread_id, found.checkpoint["id"], messages)
    return history.timed(time_of(found.checkpoint.get("ts")))


def _history(
    saver: Any, thread_id: str, channel: str, known: Collection[str]
) -> Effects[ThreadHistory]:
    """All messages that perdure's checkpointer has, with the times of the checkpoints they came by.

    A checkpoint that has more messages than its parent brought the difference. Where messages were
    removed in the same step, that is a step or so off.
    """
    infos = yield from _checkpoints(saver, thread_id, 1)
    if not any(info.is_head for info in infos):  # the thread went on from an old checkpoint
        infos = yield from _checkpoints(saver, thread_id, None)
    head = next((info for info in infos if info.is_head), None)
    uid = None if head is None else head.checkpoint_id
    at = {"channel": channel, "checkpoint_id": uid}
    items: list[HistoryItem] = yield Effect(
        lambda: saver.history(thread_id, **at), lambda: saver.ahistory(thread_id, **at)
    )
    named = with_ids(checked([item.value for item in items], f"the channel {channel!r}"))
    found = ((_message(*each), item.seen) for each, item in zip(named, items, strict=True))
    messages = _latest(found)
    untimed = [i for i, each in enumerate(messages) if each.at is None and each.id not in known]
    if head is not None and untimed:
        left = len(messages)
        limit = _STEPS * (left - untimed[0] + 1)
        infos = yield from _checkpoints(saver, thread_id, limit)
        by_id = {info.checkpoint_id: info for info in infos}
        info, time = by_id.get(head.checkpoint_id), time_of(head.ts)
        while info is not None and left > untimed[0]:
            parent = by_id.get(info.parent_id or "")
            before = parent.counts.get(channel, 0) if parent else 0
            time = time_of(info.ts) or time
            brought = range(max(0, left - max(0, info.counts.get(channel, 0) - before)), left)
            for i in brought:
                messages[i] = messages[i].timed(time)
            left, info = left - len(brought), parent
        messages[:left] = [each.timed(time) for each in messages[:left]]
    return ThreadHistory(thread_id, uid, messages)


def _checkpoints(saver: Any, thread_id: str, limit: int | None) -> Effects[list[CheckpointInfo]]:
    options: dict[str, Any] = {"checkpoint_ns": "", "limit": limit}
    found: list[CheckpointInfo] = yield Effect(
        lambda: saver.checkpoints(thread_id, **options),
        lambda: saver.acheckpoints(thread_id, **options),
    )
    return found


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
