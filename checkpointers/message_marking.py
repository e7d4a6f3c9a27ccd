"""Define the interface through which the server marks messages before a run stores them.

The server marks messages that the person to whom the thread belongs did not write; see the server's
module `message_authors`. langgraph stores the messages of a run through the checkpointer, whichever
channel type or subgraph contains them. The checkpointer therefore passes what it loads and stores
to the `MessageMarker` of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from langgraph.checkpoint.base import Checkpoint, CheckpointTuple

from perdure.checkpointers.address import Address


class MessageMarker(Protocol):
    """Marks messages of a run, by changing copies of them."""

    def record_messages_in_loaded_checkpoint(self, checkpoint: CheckpointTuple) -> None:
        """Record the messages of a checkpoint that the run has loaded."""

    def record_messages_in_loaded_values(self, address: Address, values: Iterable[Any]) -> None:
        """Record messages that the run has loaded from a channel of the given namespace."""

    def mark_messages_in_checkpoint(self, address: Address, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint with marked messages. The given checkpoint is not changed."""

    def build_metadata(self, address: Address) -> dict[str, Any]:
        """Return additional metadata entries for a checkpoint that the run stores."""

    def mark_messages_in_writes(
        self, address: Address, writes: Sequence[tuple[str, Any]]
    ) -> Sequence[tuple[str, Any]]:
        """Return the writes of a task with marked messages. The given writes are not changed."""

    def mark_messages(self, messages: Sequence[Any]) -> Sequence[Any]:
        """Return messages from the run's state, marked as they are when the run stores them."""


MESSAGE_MARKER: ContextVar[MessageMarker | None] = ContextVar("MESSAGE_MARKER", default=None)
"""The marker of the run in whose context the code is executed, or None to mark no messages."""
