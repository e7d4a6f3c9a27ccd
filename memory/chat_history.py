"""`ThreadMessageHistory` is a LangChain chat message history that is stored in a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final
from uuid import uuid4

from langchain_core.chat_history import BaseChatMessageHistory
from langchain_core.messages import BaseMessage, HumanMessage, RemoveMessage
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
from perdure.effects import run_operation
from perdure.errors import AlreadyLocked, InvalidMessages
from perdure.memory.conversation import Messages, get_role, has_visible_content
from perdure.memory.nodes import check_messages
from perdure.memory.options import check_instance
from perdure.memory.thread_messages import read_channel_values
from perdure.memory.tool_call_matching import has_results_of_all_tool_calls, iter_turns
from perdure.memory.tool_calls import REQUEST_ONLY

MessagesChange = Callable[[list[BaseMessage]], Sequence[BaseMessage]]
# Human message that stands for the messages before a window. A window is a list of a conversation's
# newest messages, or of all its messages. A window can begin in the middle of a turn, without the
# human message that began the turn. Therefore `convert_messages_to_form_providers_accept` inserts
# this placeholder before the window, and removes it from the result.
_EVICTED: Final = HumanMessage("evicted")


class ThreadMessageHistory(BaseChatMessageHistory):
    """The chat message history of one thread, stored in the channel `messages` of the root graph.

    Any chat graph with the same checkpointer can continue the thread. With a perdure checkpointer,
    each write locks the thread. LangGraph's own checkpointers cannot lock threads, so if two writes
    happen at the same time, the last write wins.

    Args:
        checkpointer: The checkpointer that stores the thread.
        thread_id: The id of the thread, or None for a new thread.
        keep_history: Whether `clear` keeps the messages in the history of the thread. If False,
            `clear` deletes the thread.
    """

    def __init__(
        self,
        checkpointer: BaseCheckpointSaver[Any],
        thread_id: Any = None,
        *,
        keep_history: bool = False,
    ) -> None:
        self.checkpointer = check_instance(
            "checkpointer",
            checkpointer,
            BaseCheckpointSaver,
            "a langgraph checkpointer, such as SQLiteCheckpointer.open('agent.db')",
        )
        self.thread_id = check_thread_id(uuid4() if thread_id is None else thread_id)
        self.keep_history = keep_history
        self._config: RunnableConfig = {
            "configurable": {"thread_id": self.thread_id, "checkpoint_ns": ""}
        }

    @property
    def messages(self) -> list[BaseMessage]:
        """The thread's messages in a form that model providers accept, oldest first.

        Assigning a list to the property `messages` replaces all messages of the thread.
        """
        return convert_messages_to_form_providers_accept(
            self._read_messages(self.checkpointer.get_tuple(self._config))
        )

    @messages.setter
    def messages(self, messages: list[BaseMessage]) -> None:
        self.replace_messages(lambda _: messages)

    def add_messages(self, messages: Sequence[BaseMessage]) -> None:
        """Append messages in one write.

        An added message gets a new id if it has no id, or if the thread already has a message with
        its id.
        """
        self.replace_messages(lambda stored: [*stored, *messages])

    def replace_messages(self, change: MessagesChange) -> None:
        """Replace the messages with the result of `change(messages)`.

        The thread is locked meanwhile if the checkpointer can lock threads.
        """
        with self._lock_thread_if_supported():
            head = self.checkpointer.get_tuple(self._config)
            stored = self._read_messages(head)
            changed = _add_missing_ids(check_and_select_messages_to_store(change(list(stored))))
            if changed == stored:
                return
            fresh = empty_checkpoint()
            previous = head.checkpoint if head else fresh
            versions = previous["channel_versions"]
            version = self.checkpointer.get_next_version(max(versions.values(), default=None), None)
            checkpoint: Checkpoint = {
                # Copy the previous checkpoint with all channels except `messages`. The copy
                # includes `versions_seen`, which LangGraph uses to determine the next nodes.
                **previous,
                "id": fresh["id"],
                "ts": fresh["ts"],
                "channel_values": {**previous["channel_values"], "messages": changed},
                "channel_versions": {**versions, "messages": version},
                # If `updated_channels` is None, LangGraph checks all channels when it determines
                # the next nodes. If it is a list of channels, LangGraph checks only those.
                "updated_channels": None,
            }
            metadata: CheckpointMetadata = {
                "source": "update",
                "step": head.metadata.get("step", -1) + 1 if head else 0,
                "parents": {},
            }
            counters = {**(head.metadata.get(COUNTERS) or {})} if head else {}
            counters.pop("messages", None)
            # Keep the counter of every `DeltaChannel` except `messages`. A counter shows that this
            # checkpoint has no snapshot of the channel. Without the counters, `prune` would delete
            # earlier checkpoints that are needed to reconstruct the channel's value.
            if counters:
                metadata["counters_since_delta_snapshot"] = counters
            self.checkpointer.put(
                head.config if head else self._config, checkpoint, metadata, {"messages": version}
            )

    def clear(self) -> None:
        """Remove all messages from the thread.

        If `keep_history` is False, the thread is deleted with its history.

        If `keep_history` is True, the messages are removed from the current state, but stay in the
        history of the thread.
        """
        if self.keep_history:
            self.replace_messages(lambda _: [])
            return
        with self._lock_thread_if_supported():
            erase = getattr(self.checkpointer, "erase", self.checkpointer.delete_thread)
            erase(self.thread_id)

    def _read_messages(self, head: CheckpointTuple | None) -> list[BaseMessage]:
        """Return the messages in a head checkpoint, or an empty list if `head` is None."""
        stored = (
            run_operation(read_channel_values(self.checkpointer, head)).get("messages")
            if head
            else None
        )
        return check_and_select_messages_to_store(
            stored or [], f"channel 'messages' of thread {self.thread_id!r}"
        )

    def _lock_thread_if_supported(self) -> ExitStack:
        """Lock the thread until the returned context manager exits.

        Do nothing if the checkpointer cannot lock threads.
        """
        context = ExitStack()
        # In perdure's checkpointers, `lock` is a method that locks a thread. In LangGraph's own
        # checkpointers, which cannot lock threads, `lock` is an object that is not callable.
        lock = getattr(self.checkpointer, "lock", None)
        if callable(lock):
            with suppress(AlreadyLocked):  # The current run already holds the lock.
                context.enter_context(lock(self.thread_id))
        return context


def _add_missing_ids(messages: list[BaseMessage]) -> list[BaseMessage]:
    """Return the messages, assigning new ids where needed so that each id is unique.

    A message gets a new id if it has no id, or if an earlier message has the same id.
    """
    by_id: dict[str | None, BaseMessage] = {}
    for message in messages:
        if not message.id or message.id in by_id:
            message = message.model_copy(update={"id": str(uuid4())})
        by_id[message.id] = message
    return list(by_id.values())


def check_and_select_messages_to_store(
    messages: Messages, subject: str = "the messages"
) -> list[BaseMessage]:
    """Validate messages, and return those that should be stored.

    The returned list omits messages that perdure added for a single model request, because such
    messages are not stored. In error messages, the text of `subject` (for example "the messages")
    names the messages that were validated.

    Raises:
        InvalidMessages: A value is not a message, or is a `RemoveMessage`.
    """
    if any(isinstance(message, RemoveMessage) for message in check_messages(messages, subject)):
        raise InvalidMessages(
            f"{subject}: a RemoveMessage cannot be stored; pass only messages of the conversation"
        )
    return [message for message in messages if REQUEST_ONLY not in message.additional_kwargs]


def convert_messages_to_form_providers_accept(messages: Messages) -> list[BaseMessage]:
    """Return messages in a form that model providers accept.

    The messages are a window: the newest messages of a conversation, or all of them.

    Blank messages are removed from the window, except the newest human message. Tool results are
    removed if the window does not contain the matching tool call. A tool call without a result gets
    a placeholder result. The call is removed instead if its arguments are invalid, if it repeats an
    earlier call, or if calls of its kind are not answered by a message. Tool calls at the end of
    the window are left unchanged, because their results may follow later. A system message between
    a tool call and its results, or after a call that has no results yet, is moved before the call.
    """
    turns = reversed([*iter_turns([_EVICTED, *messages], purpose="window")])
    positions = {id(message): position for position, message in enumerate(messages)}
    systems = [m for m in messages if get_role(m) == "system" and has_visible_content(m)]
    accepted: list[BaseMessage] = []
    for unit in [unit for turn in turns for unit in turn.units][1:]:
        # True if this unit of messages contains a tool call whose result may still follow.
        waits = not has_results_of_all_tool_calls(unit)
        end = max((positions[id(m)] for m in unit if id(m) in positions), default=-1)
        while systems and (waits or positions[id(systems[0])] < end):
            accepted.append(systems.pop(0))
        accepted += unit
    return [*accepted, *systems]
