"""The messages of a thread from outside a graph: read, append, replace, change, clear.

What is written is an `update_state` of a graph that has nothing but messages, so any chat graph
compiled with the same checkpointer goes on with the thread, and this goes on with any graph's. What
the update takes out of the state stays in perdure's `history()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack, nullcontext, suppress
from typing import Any, Final
from uuid import uuid4

from langchain_core.messages import BaseMessage, RemoveMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.graph.state import CompiledStateGraph

from perdure.checkpointers.address import check_thread_id
from perdure.errors import AlreadyLocked, ConfigurationError, InvalidMessages
from perdure.memory.adapters.pinned import Pinned
from perdure.memory.nodes import checked
from perdure.memory.reducers import ChatState

Change = Callable[[list[BaseMessage]], Sequence[BaseMessage]]

_WRITER: Final = "messages_from_outside"


class ThreadMessages:
    """The messages of one thread, in the channel `messages` of its root graph.

    Writes that come at the same moment, in this process or another, are made one after the other
    if the checkpointer is perdure's: each takes the lock of the thread. With langgraph's own
    checkpointers the last write wins. A run of a graph that is at work meanwhile, and has not taken
    the lock, goes on as a branch.

    Args:
        checkpointer: Any langgraph checkpointer.
        thread_id: The thread; it need not exist.

    Raises:
        ConfigurationError: `checkpointer` is something else.
        InvalidConfig: `thread_id` is empty or no text.
    """

    def __init__(self, checkpointer: BaseCheckpointSaver[Any], thread_id: str) -> None:
        if not isinstance(checkpointer, BaseCheckpointSaver):
            raise ConfigurationError(
                f"checkpointer is {checkpointer!r:.80}; expected a langgraph checkpointer, say "
                "SQLiteCheckpointer.open('agent.db')"
            )
        self.checkpointer = checkpointer
        self.thread_id = check_thread_id(thread_id)
        self._config: RunnableConfig = {"configurable": {"thread_id": self.thread_id}}

    def read(self) -> list[BaseMessage]:
        """The messages of the state, oldest first; none of a thread that does not exist."""
        return self._at(Pinned.read(self.checkpointer, self._config))[1]

    async def aread(self) -> list[BaseMessage]:
        """See `read`."""
        return (await self._aat(await Pinned.aread(self.checkpointer, self._config)))[1]

    def append(self, messages: Sequence[BaseMessage]) -> None:
        """Add messages at the end. One whose id the thread has already gets an id of its own.

        Raises:
            InvalidMessages: They are not messages; nothing was written.
        """
        new = checked_new(messages)
        self.change(lambda found: [*found, *new])

    async def aappend(self, messages: Sequence[BaseMessage]) -> None:
        """See `append`."""
        new = checked_new(messages)
        await self.achange(lambda found: [*found, *new])

    def replace(self, messages: Sequence[BaseMessage]) -> None:
        """Put messages in the place of all; see `append` for what it raises."""
        new = checked_new(messages)
        self.change(lambda _: new)

    async def areplace(self, messages: Sequence[BaseMessage]) -> None:
        """See `replace`."""
        new = checked_new(messages)
        await self.achange(lambda _: new)

    def clear(self) -> None:
        """Take all messages out of the state; perdure's history keeps them."""
        self.change(lambda _: [])

    async def aclear(self) -> None:
        """See `clear`."""
        await self.achange(lambda _: [])

    def change(self, change: Change) -> list[BaseMessage]:
        """Write what a function makes of the messages, in one piece with the reading of them.

        Args:
            change: Gives the new messages; others that write to the thread wait for it. If it
                raises, nothing is written.

        Returns:
            The messages as they are now.

        Raises:
            InvalidMessages: It gives no messages; nothing was written.
        """
        with ExitStack() as held:
            with suppress(AlreadyLocked):  # by this run, which may write
                held.enter_context(self._lock())
            graph, found = self._at(Pinned.read(self.checkpointer, self._config))
            now = _told_apart(checked_new(change(list(found))))
            update = _update(found, now)
            if update:
                graph.update_state(self._config, {"messages": update}, as_node=_WRITER)
            return now

    async def achange(self, change: Change) -> list[BaseMessage]:
        """See `change`."""
        async with AsyncExitStack() as held:
            with suppress(AlreadyLocked):  # by this run, which may write
                await held.enter_async_context(self._lock())
            graph, found = await self._aat(await Pinned.aread(self.checkpointer, self._config))
            now = _told_apart(checked_new(change(list(found))))
            update = _update(found, now)
            if update:
                await graph.aupdate_state(self._config, {"messages": update}, as_node=_WRITER)
            return now

    def _lock(self) -> Any:
        """The lock of the thread, for `with` and `async with`; of langgraph's savers there is none."""
        lock = getattr(self.checkpointer, "lock", None)  # theirs, if any, is a lock itself
        return lock(self.thread_id) if callable(lock) else nullcontext()

    def _at(self, head: Pinned) -> tuple[CompiledStateGraph[Any, Any, Any, Any], list[BaseMessage]]:
        graph = _BUILDER.compile(checkpointer=head)
        return graph, self._found(graph.get_state(self._config).values)

    async def _aat(
        self, head: Pinned
    ) -> tuple[CompiledStateGraph[Any, Any, Any, Any], list[BaseMessage]]:
        graph = _BUILDER.compile(checkpointer=head)
        return graph, self._found((await graph.aget_state(self._config)).values)

    def _found(self, values: Any) -> list[BaseMessage]:
        what = f"the channel 'messages' of thread {self.thread_id!r}"
        return list(checked(values.get("messages") or [], what))


def checked_new(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Messages that can be said, if they are.

    Raises:
        InvalidMessages: They are not messages, or are updates, as `RemoveMessage` is.
    """
    for number, message in enumerate(checked(messages, "what to write")):
        if isinstance(message, RemoveMessage):
            raise InvalidMessages(
                f"what to write: number {number} is a RemoveMessage; expected what somebody said: "
                "`replace` and `clear` take messages out"
            )
    return list(messages)


def _told_apart(messages: Iterable[BaseMessage]) -> list[BaseMessage]:
    """The messages, each with an id of its own; the caller's are not touched."""
    taken: set[str] = set()
    apart = []
    for message in messages:
        if not message.id or message.id in taken:
            message = message.model_copy(update={"id": str(uuid4())})
        assert message.id
        taken.add(message.id)
        apart.append(message)
    return apart


def _update(found: list[BaseMessage], now: list[BaseMessage]) -> list[BaseMessage]:
    if now[: len(found)] == found:
        return now[len(found) :]
    return [RemoveMessage(REMOVE_ALL_MESSAGES), *now]


def _builder() -> StateGraph[ChatState, None, ChatState, ChatState]:
    builder = StateGraph(ChatState)
    builder.add_node(_WRITER, lambda state: {})
    builder.add_edge(START, _WRITER)
    builder.add_edge(_WRITER, END)
    return builder


_BUILDER: Final = _builder()
