"""The messages of a thread, each once, with ids and times; of perdure's also removed ones."""

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
from perdure.effects import Effect
from perdure.errors import UnknownThread
from perdure.memory import conversation
from perdure.memory.conversation import SHORTENED
from perdure.memory.nodes import checked
from perdure.memory.options import is_number
from perdure.memory.records import Role

_ROLES: Final[Mapping[str, Role]] = {
    **{"human": "user", "user": "user", "ai": "assistant", "assistant": "assistant"},
    **{"tool": "tool", "function": "tool", "system": "system", "developer": "system"},
}
_STEPS: Final = 4  # checkpoints that are read for each message: a run writes a few
REMEMBER: Final = "remember"
"""In a message's `response_metadata`, with the value False: no memory is made of it."""


@dataclass(frozen=True, slots=True)
class ThreadMessage:
    """A message of a thread."""

    message: BaseMessage
    id: str  # the message's own, else a hash of its text
    position: int | None = None  # in the thread, given by a watermark
    at: datetime | None = None  # when it was said; None: not known

    @property
    def text(self) -> str:
        """Its text; "" for a message off the record."""
        off_record = self.message.response_metadata.get(REMEMBER) is False
        return "" if off_record else storable(str(self.message.text))

    @property
    def role(self) -> Role:
        """The role of its author; an unknown role is trusted no more than an assistant's."""
        message = self.message
        given = message.role if isinstance(message, ChatMessage) else conversation.role(message)
        return _ROLES.get(given, "assistant")

    @property
    def actor(self) -> str:
        """The message's name, else its role."""
        return self.message.name or self.role

    @property
    def digest(self) -> str:
        """A hash that changes if the message is edited."""
        return blake2b(_identity(self.message), digest_size=4).hexdigest()

    @property
    def shortened(self) -> bool:
        """Whether a node cut it to save room."""
        return SHORTENED in self.message.additional_kwargs


@dataclass(frozen=True, slots=True)
class ThreadHistory:
    """The messages of a thread as of a checkpoint: each once, in order, in its last version."""

    thread_id: str
    checkpoint_id: str | None
    messages: Sequence[ThreadMessage]

    def timed(self, times: Sequence[datetime | None]) -> ThreadHistory:
        """The history with these times for its last messages, newest first, if they have none."""
        timed = list(self.messages)
        for i, at in zip(range(len(timed) - 1, -1, -1), times, strict=False):
            timed[i] = timed[i] if timed[i].at else replace(timed[i], at=at)
        return replace(self, messages=timed)


def history_of_state(
    thread_id: str, checkpoint_id: str | None, messages: Sequence[BaseMessage]
) -> ThreadHistory:
    """The messages of a thread as a state has them."""
    read = _latest((each, True) for each in _read(messages))
    return ThreadHistory(thread_id, checkpoint_id, read)


async def read_history(
    saver: Any, thread_id: str, channel: str = "messages", known: Collection[str] = ()
) -> ThreadHistory:
    """Read the messages of a thread; the times of known ones, by id, are not needed."""
    if hasattr(saver, "history") and hasattr(saver, "checkpoints"):
        return await _history(saver, thread_id, channel, known)
    config: RunnableConfig = {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}
    found = await Effect(lambda: saver.get_tuple(config), lambda: saver.aget_tuple(config))
    if found is None:
        raise UnknownThread(f"there is no thread {thread_id!r} in the {type(saver).__name__}")
    values = found.checkpoint["channel_values"].get(channel)
    messages = checked([] if values is None else values, f"the channel {channel!r}")
    history = history_of_state(thread_id, found.checkpoint["id"], messages)
    return history.timed([time_of(found.checkpoint.get("ts"))] * len(history.messages))


async def _history(
    saver: Any, thread_id: str, channel: str, known: Collection[str]
) -> ThreadHistory:
    """All messages that perdure's checkpointer has, with the times of their first checkpoints."""
    infos = await _checkpoints(saver, thread_id, 1)
    if not any(info.is_head for info in infos):  # the thread went on from an old checkpoint
        infos = await _checkpoints(saver, thread_id, None)
    info = next((info for info in infos if info.is_head), None)
    uid = None if info is None else info.checkpoint_id
    at = {"channel": channel, "checkpoint_id": uid}
    items: list[HistoryItem] = await Effect(
        lambda: saver.history(thread_id, **at), lambda: saver.ahistory(thread_id, **at)
    )
    read = _read(checked([item.value for item in items], f"the channel {channel!r}"))
    messages = _latest(zip(read, (item.seen for item in items), strict=True))
    untimed = [i for i, each in enumerate(messages) if each.at is None and each.id not in known]
    wanted = len(messages) - min(untimed, default=len(messages))
    infos = (await _checkpoints(saver, thread_id, _STEPS * (wanted + 1))) if wanted else infos
    by_id = {each.checkpoint_id: each for each in infos}
    times: list[datetime | None] = []
    while info is not None and len(times) < wanted:
        parent = by_id.get(info.parent_id or "")
        before = parent.counts.get(channel, 0) if parent else 0
        times += [time_of(info.ts)] * (info.counts.get(channel, 0) - before)
        info = parent
    history = ThreadHistory(thread_id, uid, messages)
    return history.timed(times + times[-1:] * (wanted - len(times)))


async def _checkpoints(saver: Any, thread_id: str, limit: int | None) -> list[CheckpointInfo]:
    options: dict[str, Any] = {"checkpoint_ns": "", "limit": limit}
    found: list[CheckpointInfo] = await Effect(
        lambda: saver.checkpoints(thread_id, **options),
        lambda: saver.acheckpoints(thread_id, **options),
    )
    return found


def _latest(versions: Iterable[tuple[ThreadMessage, bool]]) -> list[ThreadMessage]:
    """Each message once, at its first place; `versions` tell whether the state has them.

    If the state has a shortened version of a message, or none, the last whole version is taken.
    """
    found: dict[str, ThreadMessage] = {}
    settled: set[str] = set()
    for each, seen in versions:
        if each.id not in found or not (each.shortened or each.id in settled):
            found[each.id] = each
        if seen and not each.shortened:
            settled.add(each.id)
    return list(found.values())


def _read(messages: Sequence[BaseMessage]) -> Iterator[ThreadMessage]:
    """Messages with ids and times; a missing id is a hash of the text and its count so far."""
    counts: Counter[bytes] = Counter()
    for message in messages:
        id, identity = message.id, _identity(message)
        if not id:
            counts[identity] += 1
            made = blake2b(identity + str(counts[identity]).encode(), digest_size=10)
            id = f"unnamed-{made.hexdigest()}"
        yield ThreadMessage(message, id, at=time_of(message.response_metadata.get("create_time")))


def _identity(message: BaseMessage) -> bytes:
    parts = (message.type, message.name or "", str(message.text))
    return "\0".join(parts).encode("utf-8", "surrogatepass")


def storable(text: str) -> str:
    """A text without white space around it, and lone surrogates as question marks."""
    return text.strip().encode("utf-8", "replace").decode()


def time_of(value: Any) -> datetime | None:
    """A moment (UTC) given in seconds since 1970 or in ISO 8601; None: it is neither."""
    try:
        if is_number(value):
            return datetime.fromtimestamp(value, UTC)
        found = datetime.fromisoformat(value) if isinstance(value, str) else value
        if not isinstance(found, datetime):
            return None
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        return None
