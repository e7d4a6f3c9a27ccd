"""Define the interface for marking messages that must be excluded from memory extraction.

The server marks human messages that the thread's user did not write. A run may use no user's
memories. In this case, the server also marks the non-human messages that the run adds, such as
model responses, so that memory extraction skips these messages. See the server's module
`message_authors`. A message that memory extraction must skip is marked before the run stores the
message. langgraph stores all messages of a run through the checkpointer, including messages in
subgraphs and in channels of any type. To mark all messages, the checkpointer calls the run's
`MessageMarker` with all data that the run loads or stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from langgraph.checkpoint.base import Checkpoint, CheckpointTuple

from perdure.checkpointers.address import Address


class MessageMarker(Protocol):
    """Marks a run's messages without modifying the original message objects."""

    def record_messages_in_loaded_checkpoint(self, checkpoint: CheckpointTuple) -> None:
        """Record the messages of a checkpoint that the run has loaded."""

    def record_messages_in_loaded_values(self, address: Address, values: Iterable[Any]) -> None:
        """Record the messages that the run has loaded from a channel of a namespace."""

    def mark_messages_in_checkpoint(self, address: Address, checkpoint: Checkpoint) -> Checkpoint:
        """Return a copy of the checkpoint in which some messages are marked.

        A marked message is excluded from memory extraction.
        """

    def build_metadata(self, address: Address) -> dict[str, Any]:
        """Return entries to add to the metadata of a checkpoint that the run stores."""

    def mark_messages_in_writes(
        self, address: Address, writes: Sequence[tuple[str, Any]]
    ) -> Sequence[tuple[str, Any]]:
        """Return a copy of a task's writes in which some messages are marked.

        Memory extraction skips the marked messages.
        """

    def mark_messages(self, messages: Sequence[Any]) -> Sequence[Any]:
        """Return the messages, and mark those that memory extraction must skip.

        The returned messages are marked in the same way as the run's stored messages.
        """


MESSAGE_MARKER: ContextVar[MessageMarker | None] = ContextVar("MESSAGE_MARKER", default=None)
"""The marker of the run in whose context the code is executed, or None to mark no messages."""
