"""Define the dataclasses that checkpointers return, and the retention rule `Retention`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from datetime import datetime
from operator import add
from typing import Any, Literal

ThreadState = Literal["waiting", "unfinished", "idle"]
# The name of the node that is waiting for an answer, and the value that it passed to `interrupt()`.
NodeAndInterruptValue = tuple[str, Any]


@dataclass(frozen=True, slots=True)
class HistoryItem:
    """An item, such as a message, in the history of a channel.

    The history ends at a checkpoint that the caller chooses.

    Attributes:
        value: The message, the element of a list, or the `(key, value)` pair of a dict.
        seen: Whether the item is still part of the channel's value at the checkpoint at which the
            history ends. False for an item that is only on a branch. None if the items of the
            channel's value are unknown. Only a langgraph `DeltaChannel` that does not hold messages
            can have unknown items. The items of such a channel are unknown if the channel has no
            snapshot at that checkpoint, or if the snapshot is neither a list nor a dict.
        position: The position of the item in the channel's log. Later items have higher positions,
            and a position is never reused.
        branch: Whether the item is only on a branch that does not lead to the head.
        stored_at: The time (UTC) of the checkpoint that first stored the item. The time is the `ts`
            of that checkpoint, or the time at which the checkpoint was stored if that is earlier.
            The time stays the same when the thread is copied, merged, pruned or imported from one
            of langgraph's databases, and when other messages are erased.
    """

    value: Any
    seen: bool | None
    position: int
    branch: bool
    stored_at: datetime


@dataclass(frozen=True, slots=True)
class ThreadInfo:
    """The size, timestamps and namespaces of a thread, as returned by `threads()`.

    Attributes:
        checkpoints: The number of checkpoints in all namespaces.
        items: The number of items in the logs (messages and other elements), each counted once.
        size_bytes: The bytes of the checkpoints, items and pending writes, without index overhead.
        created_at: The time (UTC) at which the first checkpoint or write was stored.
        updated_at: The time (UTC) at which the last checkpoint or write was stored, to a tenth of a
            second.
        namespaces: The checkpoint namespaces; `""` is the root graph.
        active_at: The time (UTC) of the last activity in the conversation. This is the `ts` of the
            head, or `updated_at` if that is earlier or the thread has no head. For an imported
            thread, this is the time at which the conversation took place, and not the time of the
            import.
        messages: The number of messages in the transcript up to the head; see `history`.
    """

    thread_id: str
    checkpoints: int
    items: int
    size_bytes: int
    created_at: datetime
    updated_at: datetime
    namespaces: tuple[str, ...]
    active_at: datetime
    messages: int


@dataclass(frozen=True, slots=True)
class ThreadTask:
    """A task in the superstep that follows a checkpoint.

    Attributes:
        id: The id of the task, or None if the task has stored nothing yet.
        node: The node that the task runs. `""` if another program stored the writes of the task
            without naming the node.
        path: The path of the task in langgraph's form: `("__pregel_pull", node)`, or
            `("__pregel_push", index, False)` for a task that was started by a `Send`, where `index`
            is the position of the `Send` in the list of pending `Send`s.
        done: Whether the task has completed and stored its writes. A task that raised an exception
            or waits for an answer is not done. Other tasks of the same superstep may still be
            unfinished.
        error: The text of the exception that the task raised, or None.
        interrupts: The langgraph `Interrupt`s that the task raised when it ran last.
    """

    id: str | None
    node: str
    path: tuple[Any, ...]
    done: bool
    error: str | None
    interrupts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ThreadStatus:
    """The status of a thread, derived from a checkpoint and its pending writes.

    Attributes:
        tasks: The tasks of the superstep that follows the checkpoint, or `()` if the run has ended.
    """

    tasks: tuple[ThreadTask, ...] = ()

    def __repr__(self) -> str:
        return f"ThreadStatus(state={self.state!r}, tasks={self.tasks!r})"

    @property
    def state(self) -> ThreadState:
        """The state of the thread: `"waiting"`, `"unfinished"` or `"idle"`.

        A thread is waiting if one of its interrupts is unanswered. A thread without unanswered
        interrupts is unfinished if its run is in progress, has failed or was stopped.
        """
        if self.interrupts:
            return "waiting"
        return "unfinished" if self.tasks else "idle"

    @property
    def next(self) -> tuple[str, ...]:
        """The node names of all unfinished tasks.

        If a node has several unfinished tasks, its name appears once for each of them.
        """
        return tuple(task.node for task in self.tasks if not task.done)

    @property
    def interrupts(self) -> tuple[Any, ...]:
        """The LangGraph `Interrupt`s of all tasks that are waiting to be resumed."""
        return tuple(one for task in self.tasks if not task.done for one in task.interrupts)

    @property
    def questions(self) -> tuple[NodeAndInterruptValue, ...]:
        """The thread's unanswered questions, as `(node name, interrupt value)` pairs."""
        return tuple(
            (task.node, _get_interrupt_value(one))
            for task in self.tasks
            if not task.done
            for one in task.interrupts
        )


@dataclass(frozen=True, slots=True)
class ThreadHead:
    """The head of a thread: the checkpoint from which the next run of the root graph starts.

    Attributes:
        checkpoint_id: The id of the head, or None if the thread has only pending writes or
            checkpoints of subgraphs.
        metadata: The stored metadata of the checkpoint. langgraph provides the metadata, and copies
            values such as `user_id` and `owner` from the `configurable` of the run's config to it.
            perdure adds the values that the checkpoint inherits from its parent, such as the
            `user_id` of an earlier run.
        updated_at: The time (UTC) at which the thread was last written to, to a tenth of a second.
        created_at: The time (UTC) at which the first checkpoint or write was stored.
        status: Whether the thread waits for an answer, is unfinished, or is idle.
        title: The `title` in the metadata, or else the first 80 characters of the first human
            message.
    """

    thread_id: str
    checkpoint_id: str | None
    metadata: Mapping[str, Any]
    updated_at: datetime
    created_at: datetime
    status: ThreadStatus
    title: str = ""

    @property
    def owner(self) -> str | None:
        """The user of the thread.

        The user is the value of `owner` in the metadata or, if there is no `owner`, the value of
        `user_id`. If both are missing, the user is None.
        """
        owner: str | None = self.metadata.get("owner", self.metadata.get("user_id"))
        return owner


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint without its values.

    Attributes:
        parent_id: The id of the checkpoint from which this one was made, or None. The parent may
            have been deleted by a prune.
        order: The sequence number of the checkpoint. Checkpoints of the thread that were stored
            later have higher numbers.
        is_head: Whether a run that names no `checkpoint_id` starts from this checkpoint.
        is_branch: Whether the checkpoint is on a branch, which means that it is neither the head of
            its namespace nor an ancestor of this head.
        ts: The value of the checkpoint's own field `ts`, which is its timestamp in ISO 8601, or
            `""` if the checkpoint has no `ts`.
        counts: The number of items at this checkpoint for each channel with a list or dict. A
            `DeltaChannel` is left out if its value at this checkpoint is unknown; see
            `HistoryItem.seen`.
        next: The nodes that were to run when the checkpoint was put. A node occurs once for each of
            its tasks.
    """

    checkpoint_id: str
    parent_id: str | None
    checkpoint_ns: str
    order: int
    is_head: bool
    is_branch: bool
    metadata: Mapping[str, Any]
    ts: str
    counts: Mapping[str, int]
    next: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChannelDifference:
    """The difference between a channel's values at two checkpoints.

    Attributes:
        added: The elements that only the later value has. The key of each element is its position
            in the channel's log, as in `HistoryItem.position`. An element of a dict is
            `[key, value]`. If there are more elements than the limit that the caller gave, only the
            last ones are included. If `whole` is True, the only entry is the later value, under the
            key -1. In this case, the mapping is empty if there is no later value.
        removed: The elements that only the earlier value has, in the same form.
        added_count: The number of all added elements.
        removed_count: The number of all removed elements. If both counts are 0, only the order
            changed.
        whole: Whether the channel is stored as one value, and not split into elements.
    """

    added: Mapping[int, Any]
    removed: Mapping[int, Any]
    added_count: int
    removed_count: int
    whole: bool


@dataclass(frozen=True, slots=True)
class StateDifference:
    """The difference between the states at two checkpoints.

    Attributes:
        ran: The nodes that ran between the checkpoints. Each node is listed once. The nodes are in
            the order in which they first ran, if this order is known. It is unknown if the later
            checkpoint does not descend from the earlier one, or if a checkpoint between them is
            missing. Empty if the earlier checkpoint does not exist any more.
        channels: The difference of each channel whose value changed, by the channel's name.
    """

    ran: tuple[str, ...]
    channels: Mapping[str, ChannelDifference]


@dataclass(frozen=True, slots=True)
class ThreadUsage:
    """Statistics on threads: the largest threads, and the number created in each month.

    Attributes:
        largest: The largest threads by stored bytes, in descending order.
        by_month: The number of existing threads by month of creation, with keys such as
            `"2026-11"`.
    """

    largest: tuple[ThreadInfo, ...]
    by_month: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PruneReport:
    """Statistics on the objects removed by a prune, a retention rule or a deletion.

    The report of a dry run counts the objects that would be removed.

    Attributes:
        items: The number of log items (messages and other elements).
        threads: The number of threads that lost a checkpoint or were deleted.
        size_bytes: The bytes of the removed checkpoints, items and pending writes, without index
            overhead.
        runs: The number of the server's runs that were removed. A run is removed together with its
            request.
        events: The number of batches of run events.
        crons: The number of crons of the server.
    """

    checkpoints: int = 0
    items: int = 0
    threads: int = 0
    size_bytes: int = field(default=0, compare=False)
    runs: int = 0
    events: int = 0
    crons: int = 0

    def __add__(self, other: PruneReport) -> PruneReport:
        """Return the sum of two reports."""
        return PruneReport(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class ErasureReport:
    """The result of `erase`.

    Attributes:
        checkpoints: The number of checkpoints that were rewritten or deleted.
        items: The number of log items that were removed. Each version of a message counts as an
            item, and so does each value that contained an erased message.
        hashes: The hashes of the removed messages, sorted and without duplicates. Each hash is the
            BLAKE2b-256 hash of a message's type, id and content, in hexadecimal. If the rows of the
            database are encrypted, the hashes are keyed with a secret key.
        cancelled: The names of the tasks that will not run because they quoted an erased message,
            sorted. A name has the form `namespace|node:task_id`. For a task of the root graph, the
            name has no `namespace|`. For a task that has stored nothing, the name has no
            `:task_id`.
        scrubbed: Whether the bytes of the file and its WAL contain no erased data. False if another
            process was still reading the previous state, or if the disk had no room for a second
            copy of the file. In both cases, call `erase` again later, or reopen the file. On
            Postgres, False after every erasure that removed data, because Postgres does not
            overwrite the bytes of a page.
        runs: The number of runs of the server whose request, metadata or error quoted an erased
            message. The quotation was removed, and runs that had not ended were cancelled. If the
            thread was deleted, the number of its deleted runs.
        events: The number of deleted batches of run events. All stored events of the thread are
            deleted.
        crons: The number of deleted crons: those that quoted an erased message, or all crons of a
            deleted thread.
    """

    checkpoints: int = 0
    items: int = 0
    hashes: tuple[str, ...] = ()
    cancelled: tuple[str, ...] = ()
    scrubbed: bool = True
    runs: int = 0
    events: int = 0
    crons: int = 0


@dataclass(frozen=True, slots=True)
class Retention:
    """A retention rule for the checkpoints of a thread.

    A checkpoint is kept if at least one of `last`, `days` and `turns` applies to it. A retention
    rule never deletes the head of a namespace. If the head was stored by a state update less than a
    day ago, the checkpoint to which the update was applied is also kept, because a run that was in
    progress during the update can still continue from it. If the head was stored by the last
    of several consecutive state updates, the checkpoint to which the first of these updates was
    applied is kept instead.

    Attributes:
        last: The number of newest checkpoints of each namespace that are kept.
        days: Checkpoints that are at most this number of days old are kept. The age is counted from
            the checkpoint's `ts`, or from the time at which it was stored if that is earlier. The
            `ts` of an imported checkpoint is the time of the conversation, not of the import.
        turns: Whether to keep the checkpoints at which a turn ended, which are those from which no
            later superstep of a run continues. Examples are the last checkpoint before each new
            input, and the last checkpoint of each branch.
        history: Whether the whole transcript up to each kept checkpoint stays readable through
            `history()`. If False, items that are part of no kept checkpoint are deleted. Items of
            branches without a kept checkpoint are always deleted.
    """

    last: int | None = None
    days: float | None = None
    turns: bool = False
    history: bool = True


@dataclass(frozen=True, slots=True)
class ImportReport:
    """Statistics on the objects that `import_from` read, added and skipped.

    Attributes:
        threads: The number of threads that were read.
        unchanged: The number of these threads that the target database already contained, with all
            their content.
        checkpoints: The number of checkpoints that were added.
        writes: The number of pending writes that were added.
        skipped: The number of checkpoints that the target database already contained, with equal
            values.
    """

    threads: int = 0
    unchanged: int = 0
    checkpoints: int = 0
    writes: int = 0
    skipped: int = 0

    def __add__(self, other: ImportReport) -> ImportReport:
        """Return the sum of two reports."""
        return ImportReport(*map(add, astuple(self), astuple(other)))


def _get_interrupt_value(interrupt: Any) -> Any:
    """Return the value of an interrupt."""
    # An interrupt that was not stored by langgraph may be a plain dict.
    if isinstance(interrupt, Mapping):
        return interrupt.get("value", interrupt)
    return getattr(interrupt, "value", interrupt)
