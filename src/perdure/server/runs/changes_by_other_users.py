"""Record other users' changes to threads, and check whether a run's start state has such changes.

For each thread, the server records whether anyone except the thread's own user has changed the
thread; see `ChangesByOtherUsers`. If a run continues from a state that another user has changed,
the run uses nobody's memories. Another user could write a question into a thread's state to make
the model reveal the memories of the person to whom the thread belongs. After the person to whom the
thread belongs has sent a new message, runs in the thread use the person's memories again.

A thread's field `changes_by_other_users` does not tell whether a change came before or after a
given checkpoint. A run may start from a checkpoint that is older than the thread's head. If other
users have changed the thread, the server then checks this checkpoint and its ancestors, back to the
last input, for such changes. In a thread that belongs to a user, some checkpoints have the metadata
key `TURN_WITHOUT_MEMORY`. If a run does not use the memories of any user, the run adds the key
`TURN_WITHOUT_MEMORY` to its checkpoints. A state update adds the key to its checkpoint if the
sender is not the user to whom the thread belongs.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from contextlib import suppress
from typing import Any, Final

from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.serde.types import INTERRUPT
from langgraph.graph.state import CompiledStateGraph

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.labels import STATE_FROM_OTHERS, TURN_WITHOUT_MEMORY
from perdure.checkpointers.records import ChangesByOtherUsers
from perdure.checkpointers.status import ASIDE_SUFFIX
from perdure.effects import arun_operation
from perdure.errors import UnknownThread
from perdure.memory.thread_messages import read_channel_values
from perdure.run_tables.thread_list import ListedThread
from perdure.server.graphs import Graph
from perdure.server.runs.message_authors import (
    OtherAuthorMarker,
    iter_nested_messages,
    iter_nested_strings,
)
from perdure.server.runs.run import Run
from perdure.server.runs.run_request import StoredTexts
from perdure.server.threads import Threads

# Channel name and task path of the pending write that labels a checkpoint as changed by other
# users. perdure adds this pending write to a checkpoint if someone other than the thread's own user
# has changed the checkpoint. LangGraph ignores the pending write, because its task id belongs to no
# task.
_LABEL_CHANNEL: Final = "__changed_by_others"
_LABEL_PATH: Final = f"changed by others{ASIDE_SUFFIX}"
# The only channel of a graph whose state is a single value instead of a dict.
_ROOT_CHANNEL: Final = "__root__"


async def does_run_continue_changes_by_other_users(
    saver: Checkpointer, thread: ListedThread, checkpoint_ids_by_namespace: Mapping[str, str]
) -> bool:
    """Return whether a run without a new user message would use a state that another user changed.

    Args:
        saver: The checkpointer.
        thread: The thread of the run, whose lock the caller holds.
        checkpoint_ids_by_namespace: The checkpoint that the run names in each checkpoint namespace.
            Empty if the run starts from the head of the thread.
    """
    start_id = checkpoint_ids_by_namespace.get("")
    if thread.changes_by_other_users == "none":
        # In a thread that was imported from another database, only the checkpoint metadata shows
        # whether someone other than the thread's own user has changed the thread.
        for checkpoint_id in {None, start_id}:
            checkpoint = await load_checkpoint(saver, thread.thread_id, "", checkpoint_id)
            if checkpoint is not None and STATE_FROM_OTHERS in checkpoint.metadata:
                return True
        return False
    for namespace, checkpoint_id in checkpoint_ids_by_namespace.items():
        checkpoint = (
            await load_checkpoint(saver, thread.thread_id, namespace, checkpoint_id)
            if namespace
            else None
        )
        if checkpoint is not None and TURN_WITHOUT_MEMORY in checkpoint.metadata:
            return True
    head = await load_checkpoint(saver, thread.thread_id)
    if start_id is None or (
        head is not None and start_id == head.config["configurable"]["checkpoint_id"]
    ):
        return thread.changes_by_other_users == "since_last_message"
    return await have_other_users_changed_turn(saver, thread.thread_id, start_id)


async def have_other_users_changed_turn(
    saver: Checkpointer, thread_id: str, checkpoint_id: str
) -> bool:
    """Return whether other users may have changed the turn to which a checkpoint belongs.

    The result is True in these cases:

    - Another user's run or state update stored one of the turn's checkpoints, from the turn's input
      up to the given checkpoint.
    - One of these checkpoints has the label of `_mark_checkpoint_as_changed_by_other_users`.
    - The turn's input is not stored any more, so it is unknown who sent it.
    - The newest checkpoint of a subgraph that keeps its state between runs is another user's, or
      another user has updated the state of any subgraph.

    Args:
        saver: The checkpointer.
        thread_id: The thread.
        checkpoint_id: A checkpoint in the root namespace.
    """
    checkpoint = await load_checkpoint(saver, thread_id, "", checkpoint_id)
    while checkpoint is not None:
        metadata: Mapping[str, Any] = checkpoint.metadata
        pending_writes = checkpoint.pending_writes or ()
        # A checkpoint with an empty `user_id` was stored while the thread belonged to no user. The
        # metadata of such a checkpoint does not show whether another user changed the thread.
        is_of_nobody = metadata.get("user_id") == ""
        if (
            is_of_nobody
            or TURN_WITHOUT_MEMORY in metadata
            or any(channel == _LABEL_CHANNEL for _, channel, _ in pending_writes)
        ):
            return True
        if metadata.get("source") == "input":
            return await _have_other_users_changed_any_subgraph(saver, thread_id)
        parent = checkpoint.parent_config
        checkpoint = None if parent is None else await saver.aget_tuple(parent)
    return True


async def load_stored_texts(
    graph: Graph | None, saver: Checkpointer, thread_id: str, checkpoint_id: str | None
) -> StoredTexts:
    """Load the texts and message ids in a thread's state, and find the graph's input channels.

    Args:
        graph: The graph of the run, or None if it cannot be opened.
        saver: The checkpointer.
        thread_id: The thread.
        checkpoint_id: A checkpoint in the root namespace, or None for the head.
    """
    checkpoint = await load_checkpoint(saver, thread_id, "", checkpoint_id)
    values: list[Any] = []
    if checkpoint is not None:
        values += (await arun_operation(read_channel_values(saver, checkpoint))).values()
    messages = [*iter_nested_messages(values)]
    texts_by_other_users = [
        text.strip()
        for message in messages
        if message.is_excluded
        for text in iter_nested_strings(message.content)
    ]
    return StoredTexts(
        frozenset(message.message_id for message in messages if message.message_id is not None),
        frozenset(texts_by_other_users),
        frozenset(text.strip() for text in iter_nested_strings(values)),
        None if graph is None else find_input_channels(graph),
    )


def find_input_channels(graph: Graph) -> Set[str] | None:
    """Return the names of the channels that a graph's input can write to.

    LangGraph ignores input values for other names, for example for the managed value
    `remaining_steps`.

    Return None if the graph's input is not a dict of channels. This applies to graphs that were not
    built with a `StateGraph`, and to graphs whose state is a single value.
    """
    if not isinstance(graph, CompiledStateGraph):
        return None
    channels = (
        graph.builder.schemas[graph.builder.input_schema].keys() & graph.builder.channels.keys()
    )
    return None if channels == {_ROOT_CHANNEL} else channels


async def _mark_checkpoint_as_changed_by_other_users(
    saver: Checkpointer, thread_id: str, checkpoint_id: str | None
) -> None:
    """Add a label to a checkpoint to record that another user has changed its pending writes.

    For example, another user answers one of several interrupts, which adds a pending write to the
    checkpoint but stores no new checkpoint. A new checkpoint that contains another user's changes
    needs no label, because the metadata of such a checkpoint contains the key
    `TURN_WITHOUT_MEMORY`.

    Args:
        saver: The checkpointer.
        thread_id: The thread.
        checkpoint_id: A checkpoint in the root namespace, or None for the head.
    """
    checkpoint = await load_checkpoint(saver, thread_id, "", checkpoint_id)
    if checkpoint is not None:
        await saver.aput_writes(
            checkpoint.config, [(_LABEL_CHANNEL, True)], _LABEL_CHANNEL, _LABEL_PATH
        )


async def _have_other_users_changed_any_subgraph(saver: Checkpointer, thread_id: str) -> bool:
    """Return whether the state of a subgraph may contain changes by other users.

    A stateful subgraph continues from its newest checkpoint, even if the root graph starts from an
    older one. The namespace of a subgraph that keeps its state between runs contains no task id.
    """
    seen = {""}
    async for checkpoint in saver.alist({"configurable": {"thread_id": thread_id}}):
        namespace = checkpoint.config["configurable"]["checkpoint_ns"]
        metadata: Mapping[str, Any] = checkpoint.metadata
        is_update = metadata.get("source") == "update"
        is_continued = namespace not in seen and ":" not in namespace
        # While a thread belongs to no user, its checkpoints are stored without the metadata key
        # `TURN_WITHOUT_MEMORY`. The `user_id` in the metadata of these checkpoints is empty.
        is_without_memory = TURN_WITHOUT_MEMORY in metadata or metadata.get("user_id") == ""
        if namespace and is_without_memory and (is_update or is_continued):
            return True
        seen.add(namespace)
    return False


class ChangeRecord:
    """For one run, tracks whether anyone except the thread's own user changes the thread.

    The execution holds the thread's lock.

    Args:
        saver: The checkpointer.
        threads: The threads of the database.
        run: The run.

    Attributes:
        changes_at_start: The record before the run, or None until the execution has read it.
        begins_turn_of_person: Whether the run makes a turn that uses the person's memories the
            newest turn of the thread.
        marker: The marker of the run's messages, or None until the run's graph is executed.
    """

    def __init__(self, saver: Checkpointer, threads: Threads, run: Run) -> None:
        self._saver, self._threads, self._run = saver, threads, run
        self._has_recorded = False
        self.changes_at_start: ChangesByOtherUsers | None = None
        self.begins_turn_of_person = False
        self.marker: OtherAuthorMarker | None = None

    async def record(self, changes: ChangesByOtherUsers) -> None:
        """Store in the thread's row whether other users have changed the thread."""
        self._has_recorded = True
        await self._threads.record_changes_by_other_users(self._run.thread_id, changes)

    async def record_run_of_other_user(
        self, *, changes_state: bool, adds_pending_writes: bool
    ) -> None:
        """Record a run whose changes do not count as changes by the thread's own user.

        For example, the run was started by another user who is not permitted to act on behalf of
        the thread's own user.

        Args:
            changes_state: False if the user only approves or continues the person's newest turn.
            adds_pending_writes: Whether the run adds pending writes to the checkpoint from which it
                starts, such as the answer to an interrupt. If the run is rolled back, the label of
                this checkpoint is kept.
        """
        if changes_state:
            await self.record("since_last_message")
            if adds_pending_writes:
                await _mark_checkpoint_as_changed_by_other_users(
                    self._saver, self._run.thread_id, self._run.request.start_checkpoint_id
                )
        elif self.changes_at_start == "none":
            await self.record("earlier")

    async def record_new_turn_of_person(self) -> None:
        """Record that the person sent a message after the last change by another user.

        Record nothing if the run's input is not in the thread's state, for example after an early
        cancellation.
        """
        if not self.begins_turn_of_person:
            return
        has_label = self.marker is not None and self.marker.is_state_from_others
        if self.changes_at_start == "earlier" or (
            self.changes_at_start == "none" and not has_label
        ):
            return
        head = await self._saver.aget_tuple(self._run.thread_config)
        if head is None or head.metadata.get("run_id") != self._run.run_id:
            return
        # A checkpoint with the source "input" does not prove that the graph accepted the run's
        # input, because a reducer may reject the input. An interrupt among an input checkpoint's
        # pending writes proves that the graph accepted the input. An interrupted functional-API
        # graph stores no checkpoint after the input checkpoint.
        channels = {channel for _, channel, _ in head.pending_writes or ()}
        if head.metadata.get("source") != "input" or INTERRUPT in channels:
            await self.record("earlier")

    async def restore_record_from_before_run(self) -> None:
        """Restore the value that the thread's field `changes_by_other_users` had before the run.

        The field says whether other users have changed the thread.

        This method is called after the run's changes were removed from the thread.

        If an earlier execution of the run may have changed the record, the original value is
        unknown. If the record's original content is unknown and the record contains changes by
        other users, the method assumes that these changes were made after the last message from the
        thread's own user.
        """
        changes = self.changes_at_start
        if self._run.may_have_started:
            with suppress(UnknownThread):
                thread = await self._threads.get_row(self._run.thread_id)
                changes = (
                    "none" if thread.changes_by_other_users == "none" else "since_last_message"
                )
        elif not self._has_recorded:
            return
        if changes is not None:
            await self._threads.record_changes_by_other_users(self._run.thread_id, changes)


async def load_checkpoint(
    saver: Checkpointer, thread_id: str, namespace: str = "", checkpoint_id: str | None = None
) -> CheckpointTuple | None:
    """Return a checkpoint of a namespace, or the namespace's head if `checkpoint_id` is None."""
    position = {"thread_id": thread_id, "checkpoint_ns": namespace}
    if checkpoint_id is not None:
        position["checkpoint_id"] = checkpoint_id
    return await saver.aget_tuple({"configurable": position})
