"""What the checkpointers say of threads and checkpoints beyond langgraph's contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class HistoryItem:
    """One thing that was said on the way to a checkpoint.

    Attributes:
        value: The item as it was stored: a message, or an element of a list or `(key, value)`
            of a dict.
        seen: Whether it is still part of the channel's value at that checkpoint, that is, whether
            the model is shown it.
        position: Its place in the channel's log; grows with time, never reused.
        branch: Whether it was said only on a branch, which does not lead to the head.
    """

    value: Any
    seen: bool
    position: int
    branch: bool = False


@dataclass(frozen=True, slots=True)
class ThreadInfo:
    """What `threads()` says of one thread.

    Attributes:
        thread_id: As given in the config.
        checkpoints: How many checkpoints it has, over all its namespaces.
        items: How many items its log holds (messages and other elements), each counted once.
        size_bytes: Bytes of its checkpoints, items and pending writes, without index overhead.
        created_at: When its first checkpoint or write came (UTC).
        updated_at: When its last one came (UTC), to a tenth of a second.
        namespaces: Its checkpoint namespaces; `""` is the root graph.
        active_at: When its conversation was last active (UTC): the `ts` of its head, which an
            import of an old conversation gives the conversation's own time.
    """

    thread_id: str
    checkpoints: int
    items: int
    size_bytes: int
    created_at: datetime
    updated_at: datetime
    namespaces: tuple[str, ...]
    active_at: datetime


@dataclass(frozen=True, slots=True)
class ThreadHead:
    """Where a thread stands: the checkpoint that the next run of the root graph starts from.

    Attributes:
        thread_id: As given in the config.
        checkpoint_id: The head's; None: it has none, only writes or subgraphs.
        metadata: As put; langgraph copies what a run's `configurable` says to it.
        updated_at: When the thread was written to last (UTC), to a tenth of a second.
    """

    thread_id: str
    checkpoint_id: str | None
    metadata: Mapping[str, Any]
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint without its values: what it takes to draw the tree of a thread.

    Attributes:
        checkpoint_id: Its id.
        parent_id: The id of the checkpoint it was made from, if any. The parent may be pruned.
        checkpoint_ns: Its namespace.
        order: Its place in the order in which the thread's checkpoints were put.
        is_head: Whether a run that names no `checkpoint_id` starts from it.
        is_branch: Whether it does not lead to the head of its namespace.
        metadata: As put.
        ts: Its timestamp, as put (ISO 8601).
        counts: For each channel that holds a list or dict, how many items it has here.
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


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What a prune, retention run or delete removed, or would remove.

    Attributes:
        checkpoints: How many.
        items: How many items of logs (messages and other elements).
        threads: How many threads lost a checkpoint, or are gone.
        size_bytes: Bytes of all that and of pending writes, without index overhead.
    """

    checkpoints: int = 0
    items: int = 0
    threads: int = 0
    size_bytes: int = field(default=0, compare=False)

    def __add__(self, other: PruneReport) -> PruneReport:
        """Both together."""
        return PruneReport(
            self.checkpoints + other.checkpoints,
            self.items + other.items,
            self.threads + other.threads,
            self.size_bytes + other.size_bytes,
        )


@dataclass(frozen=True, slots=True)
class ErasureReport:
    """What `erase` took out of a thread.

    Attributes:
        checkpoints: How many checkpoints were rewritten, or deleted.
        items: How many items of the log went: messages in each of their versions, and values that
            held one.
        hashes: BLAKE2b-256 of each distinct message removed, in hexadecimal, sorted; keyed with
            the database's key if it has one, so that a receipt tells nothing of what was said.
        cancelled: The tasks under way that quoted one and will not run any more, sorted: the node's
            name, `:` and the task's id if it has stored something, before them the namespace of its
            subgraph and `|` if it is not the root's.
        scrubbed: Whether the bytes of the file and its WAL are free of them already. They are not
            while another process still reads the former state: `erase` once more finishes it, and
            so does whoever opens the file next.
    """

    checkpoints: int = 0
    items: int = 0
    hashes: tuple[str, ...] = ()
    cancelled: tuple[str, ...] = ()
    scrubbed: bool = True


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints of a thread to keep; the head of each namespace always stays.

    A checkpoint stays if any rule given keeps it. Without `history`, what was said and is no
    longer part of a kept checkpoint goes too.

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
    """What `import_from` took over; `skipped` checkpoints were here already, equal."""

    threads: int = 0
    checkpoints: int = 0
    writes: int = 0
    skipped: int = 0
