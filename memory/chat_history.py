"""LangChain's chat message history, for `RunnableWithMessageHistory`, over threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final
from uuid import uuid4

from langchain_core.chat_history import BaseChatMessageHistory
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, RemoveMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    empty_checkpoint,
)

from perdure.checkpointers.address import check_thread_id
from perdure.checkpointers.delta import COUNTERS
from perdure.effects import run
from perdure.errors import AlreadyLocked, InvalidMessages
from perdure.memory.conversation import Messages, role, says_something
from perdure.memory.exchanges import iter_turns
from perdure.memory.nodes import check_messages
from perdure.memory.options import check_instance
from perdure.memory.thread_messages import read_channel_values
from perdure.memory.tool_calls import REQUEST_ONLY, call_ids

Change = Callable[[list[BaseMessage]], Sequence[BaseMessage]]
_EVICTED: Final = HumanMessage("evicted")


class ThreadMessageHistory(BaseChatMessageHistory):
    """The messages of one thread, in the channel `messages` of its root graph.

    Any chat graph with the same checkpointer continues the thread. perdure's checkpointers lock the
    thread for each write; with langgraph's own the last write wins. A `thread_id` of None is a new
    thread. With `keep_history`, `clear` leaves the messages in perdure's `history(thread_id)` and
    in the file.
    """

    def __init__(
        self,
        checkpointer: BaseCheckpointSaver[Any],
        thread_id: Any = None,
        *,
        keep_history: bool = False,
    ) -> None:
        expected = "a langgraph checkpointer, say SQLiteCheckpointer.open('agent.db')"
        self.checkpointer = check_instance(
            "checkpointer", checkpointer, BaseCheckpointSaver, expected
        )
        self.thread_id = check_thread_id(uuid4() if thread_id is None else thread_id)
        self.keep_history = keep_history
        address = {"thread_id": self.thread_id, "checkpoint_ns": ""}
        self._config: RunnableConfig = {"configurable": address}

    @property
    def messages(self) -> list[BaseMessage]:
        """The messages that providers take, oldest first; assigning replaces all."""
        return select_for_provider(self._stored(self.checkpointer.get_tuple(self._config)))

    @messages.setter
    def messages(self, messages: list[BaseMessage]) -> None:
        self.change(lambda _: messages)

    def add_messages(self, messages: Sequence[BaseMessage]) -> None:
        """Add messages at the end, in one write; a second message of one id gets a new id."""
        self.change(lambda stored: [*stored, *messages])

    def change(self, change: Change) -> None:
        """Replace the messages by what a function makes of them, in one step."""
        with self._locked():
            head = self.checkpointer.get_tuple(self._config)
            stored = self._stored(head)
            now = _with_ids(check_stored_messages(change(list(stored))))
            if now == stored:
                return
            fresh = empty_checkpoint()
            before = head.checkpoint if head else fresh
            versions = before["channel_versions"]
            version = self.checkpointer.get_next_version(max(versions.values(), default=None), None)
            after: Checkpoint = {
                **before,  # its other channels, too, and which nodes are next
                "id": fresh["id"],
                "ts": fresh["ts"],
                "channel_values": {**before["channel_values"], "messages": now},
                "channel_versions": {**versions, "messages": version},
                "updated_channels": None,  # or langgraph looks for the next nodes among these alone
            }
            step = head.metadata.get("step", -1) + 1 if head else 0
            metadata: CheckpointMetadata = {"source": "update", "step": step, "parents": {}}
            counters = {**(head.metadata.get(COUNTERS) or {})} if head else {}
            counters.pop("messages", None)
            if counters:  # of other `DeltaChannel`s, whose ancestors a prune leaves
                metadata["counters_since_delta_snapshot"] = counters
            config = head.config if head else self._config
            self.checkpointer.put(config, after, metadata, {"messages": version})

    def clear(self) -> None:
        """Delete the thread, out of history and file; with `keep_history`, empty its state."""
        if self.keep_history:
            self.change(lambda _: [])
            return
        with self._locked():
            erase = getattr(self.checkpointer, "erase", self.checkpointer.delete_thread)
            erase(self.thread_id)

    def _stored(self, head: CheckpointTuple | None) -> list[BaseMessage]:
        stored = run(read_channel_values(self.checkpointer, head)).get("messages") if head else None
        return check_stored_messages(
            stored or [], f"channel 'messages' of thread {self.thread_id!r}"
        )

    def _locked(self) -> ExitStack:
        held = ExitStack()
        lock = getattr(self.checkpointer, "lock", None)  # langgraph's, if any, is a lock itself
        if callable(lock):
            with suppress(AlreadyLocked):  # by this run, which may write
                held.enter_context(lock(self.thread_id))
        return held


def _with_ids(messages: list[BaseMessage]) -> list[BaseMessage]:
    by_id: dict[str | None, BaseMessage] = {}
    for message in messages:
        if not message.id or message.id in by_id:
            message = message.model_copy(update={"id": str(uuid4())})
        by_id[message.id] = message
    return list(by_id.values())


def check_stored_messages(messages: Messages, what: str = "the messages") -> list[BaseMessage]:
    """Return the messages, without those that perdure has added to a request.

    Raises:
        InvalidMessages: A value is not a message, or is a `RemoveMessage`.
    """
    if any(isinstance(message, RemoveMessage) for message in check_messages(messages, what)):
        raise InvalidMessages(f"{what}: one is a RemoveMessage; expected messages to keep")
    return [message for message in messages if REQUEST_ONLY not in message.additional_kwargs]


def select_for_provider(messages: Messages) -> list[BaseMessage]:
    """Return the messages of a window in a form that providers accept.

    Blank messages and results without their call are removed. For each call without a result, a
    message is added that says so. Calls at the end are kept, because their results may follow. A
    system message between a call and its results is moved before the call.
    """
    # a window may begin in the middle of a turn
    turns = reversed([*iter_turns([_EVICTED, *messages], purpose="window")])
    places = {id(message): place for place, message in enumerate(messages)}
    systems = [m for m in messages if role(m) == "system" and says_something(m)]
    kept: list[BaseMessage] = []
    for unit in [unit for turn in turns for unit in turn.units][1:]:
        waits = isinstance(unit[0], AIMessage) and len(call_ids(unit[0])) >= len(unit)
        end = max((places[id(message)] for message in unit if id(message) in places), default=-1)
        while systems and (waits or places[id(systems[0])] < end):
            kept.append(systems.pop(0))
        kept += unit
    return [*kept, *systems]
