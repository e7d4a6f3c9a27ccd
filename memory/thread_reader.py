"""Reading what was said on a thread from any checkpointer.

perdure's keep all that was ever said, removed since or not; of others it is what the newest
checkpoint holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, Protocol, runtime_checkable

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver

from perdure.checkpointers.address import check_thread_id
from perdure.checkpointers.reports import CheckpointInfo, HistoryItem, ThreadInfo
from perdure.errors import ConfigurationError, PerdureError, UnknownThread
from perdure.memory.effects import Effect, Effects
from perdure.memory.nodes import checked
from perdure.memory.thread_messages import ThreadHistory, ThreadMessage, latest, time_of, with_ids

_STEPS: Final = 4  # checkpoints for each message that are looked at first: a run puts a few
_HEAD: Final = 2  # messages at the beginning, where a system message is
Ends = tuple[int, int]


@runtime_checkable
class Historic(Protocol):
    """A checkpointer that keeps what was removed, as perdure's do."""

    def history(
        self, thread_id: str, *, channel: str, checkpoint_id: str | None, ends: Ends | None
    ) -> list[HistoryItem]:
        """Everything said on the way to a checkpoint."""

    async def ahistory(
        self, thread_id: str, *, channel: str, checkpoint_id: str | None, ends: Ends | None
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

    def thread(self, thread_id: str) -> ThreadInfo:
        """How many checkpoints and items a thread has, and when it was written to last."""


@dataclass(frozen=True, slots=True)
class Glimpse:
    """The newest of what was said on a thread.

    Attributes:
        said: It.
        shown: The system messages, as far as they are among the newest, or at the beginning.
        whole: Whether that is all that was said.
    """

    said: ThreadHistory
    shown: tuple[str, ...]
    whole: bool


def check_saver(saver: Any) -> BaseCheckpointSaver[Any]:
    """A checkpointer, if it is one.

    Raises:
        ConfigurationError: It is none.
    """
    if not isinstance(saver, BaseCheckpointSaver):
        raise ConfigurationError(
            f"the checkpointer is {saver!r:.80}; expected a BaseCheckpointSaver, like "
            "perdure.checkpointers.SQLiteCheckpointer.open(path)"
        )
    return saver


def reading(
    saver: Any, thread_id: str, channel: str = "messages", known: Collection[str] | None = ()
) -> Effects[ThreadHistory]:
    """Read what was said on a thread.

    Args:
        saver: Its checkpointer.
        thread_id: The thread.
        channel: The channel of the messages.
        known: Ids of messages whose times nobody needs any more; None: nobody needs any but those
            that messages have of their own.

    Raises:
        UnknownThread: There is no such thread.
        InvalidMessages: The channel holds something else.
    """
    thread_id = check_thread_id(thread_id)
    if isinstance(saver, Historic):
        return (yield from _Log(saver, thread_id, channel).reading(known))
    return (yield from _from_state(saver, thread_id, channel))


def glancing(saver: Any, thread_id: str, channel: str, newest: int) -> Effects[Glimpse]:
    """Read the newest of what was said on a thread; no times but those that messages have.

    Args:
        saver: Its checkpointer.
        thread_id: The thread.
        channel: The channel of the messages.
        newest: How many; all, where the checkpointer can read no part, or messages have no ids.

    Raises:
        UnknownThread: There is no such thread.
        InvalidMessages: The channel holds something else.
    """
    if isinstance(saver, Historic):
        return (yield from _Log(saver, thread_id, channel).glancing(newest))
    said = yield from _from_state(saver, thread_id, channel)
    return Glimpse(said, said.shown, True)


def states(saver: Any, thread_ids: Sequence[str]) -> Effects[list[ThreadInfo | None]]:
    """What changes whenever anything of a thread does, of each; None: that cannot be told."""
    if not thread_ids or not isinstance(saver, Historic):
        return [None] * len(thread_ids)

    def told() -> list[ThreadInfo | None]:
        return [_state(saver, each) for each in thread_ids]

    found: list[ThreadInfo | None] = yield Effect(told, lambda: asyncio.to_thread(told))
    return found


def _state(saver: Historic, thread_id: str) -> ThreadInfo | None:
    try:
        return saver.thread(thread_id)
    except PerdureError:  # who reads it will see
        return None


def _from_state(saver: Any, thread_id: str, channel: str) -> Effects[ThreadHistory]:
    config: RunnableConfig = {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}
    found = yield Effect(lambda: saver.get_tuple(config), lambda: saver.aget_tuple(config))
    if found is None:
        raise UnknownThread(f"there is no thread {thread_id!r} in the {type(saver).__name__}")
    checkpoint = found.checkpoint
    values = checkpoint["channel_values"].get(channel)
    messages = checked([] if values is None else values, f"the channel {channel!r}")
    said = latest([(_spoken(message, id), True) for message, id in with_ids(messages)])
    at = time_of(checkpoint.get("ts"))
    return ThreadHistory(thread_id, checkpoint["id"], [_at(each, at) for each in said])


@dataclass(frozen=True, slots=True)
class _Log:
    """A channel of a thread whose checkpointer keeps all that was said."""

    saver: Historic
    thread_id: str
    channel: str

    def reading(self, known: Collection[str] | None) -> Effects[ThreadHistory]:
        head = yield from self._head()
        uid = None if head is None else head.checkpoint_id
        said = _said_in((yield from self._items(uid, None)), self.channel)
        if head is not None and known is not None:
            said = yield from self._timed(said, head, known)
        return ThreadHistory(self.thread_id, uid, said)

    def glancing(self, newest: int) -> Effects[Glimpse]:
        """See `glancing`."""
        head = yield from self._head()
        uid = None if head is None else head.checkpoint_id
        items = yield from self._items(uid, (_HEAD, newest))
        whole = len(items) < _HEAD + newest
        if not whole and not all(getattr(item.value, "id", None) for item in items):
            # a message without an id is told by those before it that say the same
            items, whole = (yield from self._items(uid, None)), True
        said = ThreadHistory(self.thread_id, uid, _said_in(items, self.channel))
        if whole:
            return Glimpse(said, said.shown, True)
        return Glimpse(
            replace(said, messages=_said_in(items[_HEAD:], self.channel)), said.shown, False
        )

    def _timed(
        self, said: list[ThreadMessage], head: CheckpointInfo, known: Collection[str]
    ) -> Effects[list[ThreadMessage]]:
        """The messages with their times, as far as somebody needs them."""
        lacking = [i for i, each in enumerate(said) if each.at is None and each.id not in known]
        if not lacking:
            return said
        limit = _STEPS * (len(said) - lacking[0]) + _STEPS
        infos = yield from self._checkpoints(limit)
        timed, left = _with_times(said, infos, head, self.channel)
        if left > lacking[0] and len(infos) == limit:
            infos = yield from self._checkpoints(None)
            timed, _ = _with_times(said, infos, head, self.channel)
        return timed

    def _head(self) -> Effects[CheckpointInfo | None]:
        head = _head((yield from self._checkpoints(1)))
        if head is None:  # the thread went on from an old checkpoint, or has none
            head = _head((yield from self._checkpoints(None)))
        return head

    def _items(self, uid: str | None, ends: Ends | None) -> Effects[list[HistoryItem]]:
        saver, thread_id = self.saver, self.thread_id
        options: dict[str, Any] = {"channel": self.channel, "checkpoint_id": uid, "ends": ends}
        items: list[HistoryItem] = yield Effect(
            lambda: saver.history(thread_id, **options),
            lambda: saver.ahistory(thread_id, **options),
        )
        return items

    def _checkpoints(self, limit: int | None) -> Effects[list[CheckpointInfo]]:
        saver, thread_id = self.saver, self.thread_id
        found: list[CheckpointInfo] = yield Effect(
            lambda: saver.checkpoints(thread_id, checkpoint_ns="", limit=limit),
            lambda: saver.acheckpoints(thread_id, checkpoint_ns="", limit=limit),
        )
        return found


def _said_in(items: Sequence[HistoryItem], channel: str) -> list[ThreadMessage]:
    messages = checked([item.value for item in items], f"the channel {channel!r}")
    named = zip(with_ids(messages), items, strict=True)
    return latest((_spoken(message, id, it.position), it.seen) for (message, id), it in named)


def _head(infos: Sequence[CheckpointInfo]) -> CheckpointInfo | None:
    return next((info for info in infos if info.is_head), None)


def _with_times(
    said: Sequence[ThreadMessage],
    infos: Sequence[CheckpointInfo],
    head: CheckpointInfo,
    channel: str,
) -> tuple[list[ThreadMessage], int]:
    """The messages with the times of the checkpoints they came with; how many are older than these.

    A checkpoint that has more messages than its parent brought the difference. Where messages were
    removed in the same step, that is a step or so off.
    """
    timed, left = list(said), len(said)
    at = time_of(head.ts)
    for info, added in _additions(infos, head, channel):
        at = time_of(info.ts) or at
        start = max(0, left - added)
        timed[start:left] = [_at(each, at) for each in timed[start:left]]
        left = start
    timed[:left] = [_at(each, at) for each in timed[:left]]
    return timed, left


def _additions(
    infos: Sequence[CheckpointInfo], head: CheckpointInfo, channel: str
) -> Iterator[tuple[CheckpointInfo, int]]:
    """The checkpoints from the head back, and how many messages each brought, as far as known."""
    by_id = {info.checkpoint_id: info for info in infos}
    info: CheckpointInfo | None = head
    while info is not None:
        parent = by_id.get(info.parent_id) if info.parent_id else None
        if parent is None and info.parent_id is not None:
            return  # further than was read, or pruned
        before = parent.counts.get(channel, 0) if parent else 0
        yield info, max(0, info.counts.get(channel, 0) - before)
        info = parent


def _at(spoken: ThreadMessage, at: datetime | None) -> ThreadMessage:
    return spoken if spoken.at is not None else replace(spoken, at=at)


def _spoken(message: BaseMessage, id: str, position: int | None = None) -> ThreadMessage:
    return ThreadMessage(
        message, id, position, time_of(message.response_metadata.get("create_time"))
    )
