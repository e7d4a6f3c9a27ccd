"""Find out which steps of a run were completed before its server died.

A checkpoint carries the id of the run that put it in its metadata. An answer to a question is
stored before the next checkpoint, as a pending write that does not name the run. A run with a
`Command` therefore first stores how many answers and updates the checkpoint has, and the next
server counts them again. Values are never compared, because the same answer may be given twice.

A run without an input writes to a checkpoint that another run has stored. Before it
writes there, such a run stores a copy of the checkpoint's pending writes. A rollback of the run
restores these writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import WRITES_IDX_MAP, CheckpointTuple
from langgraph.checkpoint.serde.types import ERROR, INTERRUPT, RESUME

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.status import ASIDE_SUFFIX, FORMER_WRITES_CHANNEL, NULL_TASK
from perdure.checkpointers.undo_writes import FormerCheckpoint, FormerWrites, undo_writes
from perdure.server.run import Run

Progress: TypeAlias = Literal["applied", "asks", "overtaken"]
"""How far a run came: its input was applied and the run can continue, it has asked a question, or
another run of the thread came after it."""
# Channel under which the counts are stored. No graph has a channel with this name.
_START_CHANNEL: Final = "__run_start"
_START_PATH: Final = f"run start{ASIDE_SUFFIX}"
_SPECIAL_CHANNELS: Final = frozenset(
    {ERROR, INTERRUPT, RESUME, _START_CHANNEL, FORMER_WRITES_CHANNEL}
)


class _Counts(NamedTuple):
    """Counts of the answers and updates among the pending writes of a checkpoint.

    Attributes:
        answers: The answers that tasks have received.
        updates: The updates of a `Command`.
    """

    answers: int
    updates: int

    @classmethod
    def from_writes(cls, writes: Iterable[tuple[str, str, Any]]) -> _Counts:
        """Count the answers and updates among pending writes."""
        answers = updates = 0
        for task_id, channel, value in writes:
            if task_id == NULL_TASK:
                updates += channel not in _SPECIAL_CHANNELS
            elif channel == RESUME:
                answers += len(value) if isinstance(value, list) else 1
        return cls(answers, updates)


async def store_start(saver: Checkpointer, run: Run, config: RunnableConfig) -> None:
    """Store the counts and the former writes of the checkpoint from which a run starts.

    Nothing is stored for a run with an input, because such a run first stores a checkpoint of its
    own.
    """
    if run.request.command is None and run.request.input is not None:
        return
    configurable = config["configurable"]
    names = ("thread_id", "checkpoint_ns", "checkpoint_id")
    start_at = {
        "checkpoint_ns": "",
        **{name: configurable[name] for name in names if configurable.get(name)},
    }
    start = await saver.aget_tuple({"configurable": start_at})
    if start is not None:
        counts = _Counts.from_writes(start.pending_writes or ())
        former = await _read_former_writes(saver, start)
        writes = [(_START_CHANNEL, [*counts]), (FORMER_WRITES_CHANNEL, former)]
        await saver.aput_writes(start.config, writes, run.run_id, _START_PATH)


async def restore_start(saver: Checkpointer, run: Run) -> None:
    """Undo what a run has written to checkpoints of other runs.

    The caller holds the lock of the thread, and has removed the checkpoints of the run.
    """
    config: RunnableConfig = {"configurable": {"thread_id": run.thread_id, "checkpoint_ns": ""}}
    start = await _find_start_checkpoint(saver, config, run)
    if start is None:
        return
    run_writes = [write for write in start[0].pending_writes or () if write[0] == run.run_id]
    stored = [value for _, channel, value in run_writes if channel == FORMER_WRITES_CHANNEL]
    # Restore the checkpoint from which the run started last.
    for ns, checkpoint_id, tasks in reversed(stored[0] if stored else ()):
        position = {"checkpoint_ns": ns, "checkpoint_id": checkpoint_id}
        checkpoint = await saver.aget_tuple(
            {"configurable": {"thread_id": run.thread_id, **position}}
        )
        if checkpoint is None:
            continue
        answers = {
            task: value
            for task, channel, value in checkpoint.pending_writes or ()
            if channel == RESUME and isinstance(value, list)
        }
        former = {}
        for task, (has_result, count, control) in tasks.items():
            former_answers = {RESUME: answers.get(task, [])[:count]} if count else {}
            former[task] = FormerWrites(has_result, {**control, **former_answers})
        await undo_writes(
            saver, run.thread_id, run.run_id, FormerCheckpoint(ns, checkpoint_id, former)
        )


async def find_progress(saver: Checkpointer, run: Run) -> Progress | None:
    """Return the progress of a run, or None if the graph must still receive the run's input."""
    config: RunnableConfig = {"configurable": {"thread_id": run.thread_id, "checkpoint_ns": ""}}
    head = await saver.aget_tuple(config)
    if head is None:
        return None
    waits = (await saver.astatus(run.thread_id)).state == "waiting"
    if head.metadata.get("run_id") == run.run_id:
        return "asks" if waits else "applied"
    async for _ in saver.alist(config, filter={"run_id": run.run_id}, limit=1):
        return "overtaken"
    if run.request.command is None:
        return None
    start = await _find_start_checkpoint(saver, config, run)
    if start is None:
        return None
    checkpoint, counts_before = start
    counts_after = _Counts.from_writes(checkpoint.pending_writes or ())
    is_answered, has_moved = (
        counts_after.answers > counts_before.answers,
        checkpoint.config != head.config,
    )
    if not is_answered and counts_after.updates == counts_before.updates:
        # The answer of the run belongs to the question at the checkpoint from which the run
        # started.
        return "overtaken" if has_moved and run.request.command.resume is not None else None
    if has_moved:
        return "overtaken"
    return "asks" if is_answered and waits else "applied"


async def is_input_stored(saver: Checkpointer, run: Run) -> bool:
    """Return whether the input or the answer of a failed run is stored."""
    if await find_progress(saver, run) is not None:
        return True
    config: RunnableConfig = {"configurable": {"thread_id": run.thread_id, "checkpoint_ns": ""}}
    head = await saver.aget_tuple(config) if run.request.command is not None else None
    writes = (head.pending_writes or ()) if head is not None else ()
    return any(task == NULL_TASK and channel == RESUME for task, channel, _ in writes)


async def _find_start_checkpoint(
    saver: Checkpointer, config: RunnableConfig, run: Run
) -> tuple[CheckpointTuple, _Counts] | None:
    """Return the checkpoint from which a run started, and its counts at that time."""
    async for checkpoint in saver.alist(config):
        for task, channel, value in checkpoint.pending_writes or ():
            if (task, channel) == (run.run_id, _START_CHANNEL):
                return checkpoint, _Counts(*value)
    return None


async def _read_former_writes(saver: Checkpointer, start: CheckpointTuple) -> list[list[Any]]:
    """Return the writes of tasks to a checkpoint and to waiting checkpoints of its subgraphs.

    Each element consists of a checkpoint's namespace, a checkpoint's id, and a dict. The dict has
    an entry for each task, which says whether the task has a result, how many answers it has, and
    which questions and errors it has by channel. The answers themselves need not be stored, because
    a task's answers are only ever appended.
    """
    thread_id = start.config["configurable"]["thread_id"]
    former, checkpoints = list[list[Any]](), [start]
    while checkpoints:
        checkpoint = checkpoints.pop()
        configurable = checkpoint.config["configurable"]
        ns, tasks = configurable.get("checkpoint_ns", ""), dict[str, list[Any]]()
        for task, channel, value in checkpoint.pending_writes or ():
            entry = tasks.setdefault(task, [False, 0, {}])
            if channel not in WRITES_IDX_MAP:
                entry[0] = True
            elif channel == RESUME and isinstance(value, list):
                entry[1] = len(value)
            else:
                entry[2][channel] = value
        former.append([ns, configurable["checkpoint_id"], tasks])
        status = await saver.astatus(
            thread_id, checkpoint_ns=ns, checkpoint_id=configurable["checkpoint_id"]
        )
        for waiting in status.tasks:
            nested_ns = f"{ns}|{waiting.node}:{waiting.id}".removeprefix("|")
            nested_config: RunnableConfig = {
                "configurable": {"thread_id": thread_id, "checkpoint_ns": nested_ns}
            }
            nested = (
                await saver.aget_tuple(nested_config) if waiting.id and waiting.interrupts else None
            )
            checkpoints += [nested] if nested is not None else []
    return former
