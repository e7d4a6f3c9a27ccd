"""What checkpointers report, and the rule of retention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from datetime import datetime
from operator import add
from typing import Any, Literal

ThreadState = Literal["waiting", "unfinished", "idle"]


@dataclass(frozen=True, slots=True)
class HistoryItem:
    """An item that was stored on the way to a checkpoint.

    Attributes:
        value: The message, the element of a list or `(key, value)` of a dict.
        seen: Whether the item is still part of the channel's value at that checkpoint. None means
            that this is unknown, because the channel is a `DeltaChannel` of langgraph that does not
            hold messages and has no snapshot at that checkpoint.
        position: The position of the item in the channel's log. Later items have higher positions,
            and a position is never reused.
        branch: Whether the item is only on a branch that does not lead to the head.
        stored_at: The time (UTC) of the checkpoint that first stored the item. It is the `ts` of
            that checkpoint, or the time of the put if that is earlier. Copies, merges, imports of
            langgraph's databases, prunes and erasures of other messages do not change it.
    """

    value: Any
    seen: bool | None
    position: int
    branch: bool
    stored_at: datetime


@dataclass(frozen=True, slots=True)
class ThreadInfo:
    """One thread, as `threads()` returns it.

    Attributes:
        checkpoints: How many checkpoints it has, over all its namespaces.
        items: How many items its log holds (messages and other elements), each counted once.
        size_bytes: Bytes of its checkpoints, items and pending writes, without index overhead.
        created_at: When its first checkpoint or write came (UTC).
        updated_at: When its last one came (UTC), to a tenth of a second.
        namespaces: Its checkpoint namespaces; `""` is the root graph.
        active_at: When its conversation was last active (UTC): the `ts` of its head, which for an
            imported thread is the conversation's own time.
        messages: How many messages were said on the way to its head; `history` has them.
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
    """A task of the superstep that follows a checkpoint.

    Attributes:
        id: None: it has stored nothing yet.
        node: The node that it runs; `""`: another program stored what it wrote without saying that.
        path: As langgraph has it: `("__pregel_pull", node)`, or `("__pregel_push", place, False)`
            of the `Send` at a place.
        done: Whether it has ended; the superstep has not.
        error: What it raised, as text.
        interrupts: What it asked last: langgraph's `Interrupt`s.
    """

    id: str | None
    node: str
    path: tuple[Any, ...]
    done: bool
    error: str | None
    interrupts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ThreadStatus:
    """Where a thread stands, told by a checkpoint and its pending writes.

    Attributes:
        tasks: Those of the superstep that follows; none: the run has ended.
    """

    tasks: tuple[ThreadTask, ...] = ()

    def __repr__(self) -> str:
        return f"ThreadStatus(state={self.state!r}, tasks={self.tasks!r})"

    @property
    def state(self) -> ThreadState:
        """`"waiting"` for an answer, `"unfinished"` (under way, cut off, stopped), or `"idle"`."""
        if self.interrupts:
            return "waiting"
        return "unfinished" if self.tasks else "idle"

    @property
    def next(self) -> tuple[str, ...]:
        """The nodes that are still to run, each once a task."""
        return tuple(task.node for task in self.tasks if not task.done)

    @property
    def interrupts(self) -> tuple[Any, ...]:
        """The questions that wait for an answer: langgraph's `Interrupt`s."""
        return tuple(one for task in self.tasks if not task.done for one in task.interrupts)

    @property
    def questions(self) -> tuple[tuple[str, Any], ...]:
        """What `interrupts` ask, each with the node that asks."""
        open_tasks = [task for task in self.tasks if not task.done]
        return tuple((task.node, _question(one)) for task in open_tasks for one in task.interrupts)


@dataclass(frozen=True, slots=True)
class ThreadHead:
    """The head of a thread: the checkpoint from which the next run of the root graph starts.

    Attributes:
        checkpoint_id: The head's; None: it has none, only writes or subgraphs.
        metadata: The metadata as put, with the `user_id` and `owner` that the checkpoint inherited
            from its parent. langgraph copies the values of a run's `configurable` to the metadata.
        updated_at: When the thread was written to last (UTC), to a tenth of a second.
        created_at: When its first checkpoint or write came (UTC).
        status: Whether it waits for an answer, was cut off, or is idle.
        title: What the metadata says, else the first message of a human: 80 characters of it.
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
        """Whose the thread is: the `owner` in its metadata, else the `user_id`; None: nobody's."""
        owner: str | None = self.metadata.get("owner", self.metadata.get("user_id"))
        return owner


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint without its values.

    Attributes:
        parent_id: The id of the checkpoint it was made from, if any. The parent may be pruned.
        order: Its place in the order in which the thread's checkpoints were put.
        is_head: Whether a run that names no `checkpoint_id` starts from it.
        is_branch: Whether it does not lead to the head of its namespace.
        ts: Its timestamp, as put (ISO 8601).
        counts: The number of items at this checkpoint for each channel with a list or dict. A
            `DeltaChannel` with an unknown value is left out; see `HistoryItem.seen`.
        next: The nodes that were to run when it was put, each once a task.
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
    """What changed in the value of a channel.

    Attributes:
        added: The elements that only the later value has, by their position in `history`; those of
            a dict are `[key, value]`. At most the last ones. Of a channel stored whole, its value.
        removed: Likewise, the elements that only the earlier value has.
        added_count: How many elements were added in all.
        removed_count: How many elements were removed in all. If both are 0, the order changed.
        whole: Whether the channel is stored whole.
    """

    added: Mapping[int, Any]
    removed: Mapping[int, Any]
    added_count: int
    removed_count: int
    whole: bool


@dataclass(frozen=True, slots=True)
class StateDifference:
    """What changed from one checkpoint to another.

    Attributes:
        ran: The nodes that ran between them, in order; none if the earlier one is not there.
        channels: The channels whose values differ.
    """

    ran: tuple[str, ...]
    channels: Mapping[str, ChannelDifference]


@dataclass(frozen=True, slots=True)
class ThreadUsage:
    """The largest threads, and in which months threads were begun."""

    largest: tuple[ThreadInfo, ...]  # the threads with the most bytes
    by_month: Mapping[str, int]  # how many of the present threads were begun in each: `"2026-11"`


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What a prune, retention run or delete removed, or would remove.

    Attributes:
        items: How many items of logs (messages and other elements).
        threads: How many threads lost a checkpoint, or are gone.
        size_bytes: Bytes of all that and of pending writes, without index overhead.
        runs: How many runs of the server, with what they were asked.
        events: How many batches of what they told.
        crons: How many crons of the server.
    """

    checkpoints: int = 0
    items: int = 0
    threads: int = 0
    size_bytes: int = field(default=0, compare=False)
    runs: int = 0
    events: int = 0
    crons: int = 0

    def __add__(self, other: PruneReport) -> PruneReport:
        """Both together."""
        return PruneReport(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class ErasureReport:
    """The result of `erase`.

    Attributes:
        checkpoints: How many checkpoints were rewritten, or deleted.
        items: How many items of the log were removed: messages in each version, and values that
            held one.
        hashes: BLAKE2b-256 of each distinct message removed, in hexadecimal, sorted; keyed with the
            database's key if it has one.
        cancelled: The tasks that quoted a message and will not run, sorted, as
            `namespace|node:task_id`; the root's have no namespace, those that stored nothing no id.
        scrubbed: Whether the bytes of the file and its WAL hold none of them. False while another
            process still reads the previous state, or the disk has no room for another copy of the
            file; then call `erase` again, or reopen the file.
            False on Postgres, which overwrites no bytes of a page.
        runs: How many runs of the server were asked, or told, what quoted one: they have it no
            longer, and those that had not ended are cancelled; or were deleted with their thread.
        events: How many batches of what runs of the thread told: all that were stored are removed.
        crons: How many crons of the thread quoted one, and were deleted; or went with their thread.
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
    """Which checkpoints of a thread to keep; the head of each namespace always stays.

    If the head is an update of the state that is less than a day old, the checkpoint that was
    updated stays too, because a run may still continue from it. A checkpoint stays if any rule
    given keeps it.
    Without `history`, items that are part of no kept checkpoint are removed too.

    Attributes:
        last: The newest so many of each namespace.
        days: Those whose `ts` is within so many days: of an import, the conversation's own time.
        turns: Those at which a turn ended (the last before the next input, and each branch's tip).
        history: Whether everything said on the way to a kept checkpoint stays readable through
            `history()`. What was said only on branches of which nothing is kept goes either way.
    """

    last: int | None = None
    days: float | None = None
    turns: bool = False
    history: bool = True


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The counts of `import_from`; `skipped` checkpoints were already there, with equal values.

    Of a thread that is `unchanged` all checkpoints and writes were there.
    """

    threads: int = 0
    unchanged: int = 0
    checkpoints: int = 0
    writes: int = 0
    skipped: int = 0

    def __add__(self, other: ImportReport) -> ImportReport:
        """The counts of both."""
        return ImportReport(*map(add, astuple(self), astuple(other)))


def _question(interrupt: Any) -> Any:
    if isinstance(interrupt, Mapping):  # as another program may have stored it
        return interrupt.get("value", interrupt)
    return getattr(interrupt, "value", interrupt)
