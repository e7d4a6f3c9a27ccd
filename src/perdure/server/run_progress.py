"""Determine how far a run got before its server process died, and undo the run's pending writes.

The metadata of a checkpoint contains the id of the run that stored the checkpoint. However, the
answer to an interrupt is stored before the run stores its first checkpoint. The answer is stored as
a pending write of the checkpoint from which the run starts. A pending write does not contain the id
of its run. Before a run with a `Command` executes the graph, it therefore counts the interrupt
answers and the command updates among the pending writes of its starting checkpoint, and stores both
counts with the checkpoint. When a server resumes the run, it counts the pending writes again. If
one of the two counts has increased, the run has already stored an answer or an update. Answers are
counted instead of compared, because two different answers may have the same content.

A run that has no input, or that has a `Command`, adds its pending writes to a checkpoint that
another run created. Before such a run adds its own pending writes, it therefore saves a summary of
those that the checkpoint already has. If the run is rolled back, or if its `Command` cannot be
applied, the summary is used to restore the checkpoint's original pending writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import WRITES_IDX_MAP, CheckpointTuple
from langgraph.checkpoint.serde.types import ERROR, INTERRUPT, RESUME

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.status import ASIDE_SUFFIX, FORMER_WRITES_CHANNEL, NULL_TASK
from perdure.checkpointers.undo_writes import (
    FormerCheckpoint,
    FormerWrites,
    undo_writes_to_checkpoint,
)
from perdure.server.graphs import Graph
from perdure.server.run import Run

Progress: TypeAlias = Literal["applied", "asks", "overtaken"]
"""How far a run got. `"applied"` means that its input or command was applied, and that the run can
continue. `"asks"` means that the run has stopped at an interrupt that has not been answered.
`"overtaken"` means that another run or another program has changed the thread since, so that the
run must not continue."""
# Name of the channel under which a run stores its `_InterruptAnswerAndUpdateCounts`. No graph has a
# channel with this name.
_START_CHANNEL: Final = "__run_start"
# Task path under which this module stores pending writes. Because of the path's suffix, these
# writes are ignored when the thread's status is determined.
_START_PATH: Final = f"run start{ASIDE_SUFFIX}"
# Channels whose pending writes do not count as channel updates requested by a `Command`
_SPECIAL_CHANNELS: Final = frozenset(
    {ERROR, INTERRUPT, RESUME, _START_CHANNEL, FORMER_WRITES_CHANNEL}
)


class _InterruptAnswerAndUpdateCounts(NamedTuple):
    """The number of answers and the number of updates among a checkpoint's pending writes.

    Attributes:
        answers: The number of answers to interrupts that tasks have received.
        updates: The number of channel updates that `Command` objects have requested.
    """

    answers: int
    updates: int

    @classmethod
    def from_pending_writes(
        cls, pending_writes: Iterable[tuple[str, str, Any]]
    ) -> _InterruptAnswerAndUpdateCounts:
        """Count the interrupt answers and command updates among pending writes."""
        answers = updates = 0
        for task_id, channel, value in pending_writes:
            if task_id == NULL_TASK:
                updates += channel not in _SPECIAL_CHANNELS
            elif channel == RESUME:
                answers += len(value) if isinstance(value, list) else 1
        return cls(answers, updates)


async def store_start_checkpoint_data_for_rollback(
    saver: Checkpointer, run: Run, config: RunnableConfig
) -> None:
    """Store the data that is needed later to determine a run's progress or to roll the run back.

    Three things are stored with the run's starting checkpoint: a summary of its pending writes, and
    the numbers of interrupt answers and of command updates among them. For a run with input,
    nothing is stored, because such a run first creates a checkpoint of its own.
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
        counts = _InterruptAnswerAndUpdateCounts.from_pending_writes(start.pending_writes or ())
        former = await _summarize_pending_writes_of_graph_and_subgraphs(saver, start)
        writes = [(_START_CHANNEL, [*counts]), (FORMER_WRITES_CHANNEL, former)]
        await saver.aput_writes(start.config, writes, run.run_id, _START_PATH)


async def undo_writes_of_run(saver: Checkpointer, run: Run) -> None:
    """Undo the writes that a run added to checkpoints created by other runs.

    The caller must hold the thread's lock, and must delete the run's own checkpoints first.
    """
    config: RunnableConfig = {"configurable": {"thread_id": run.thread_id, "checkpoint_ns": ""}}
    start = await _find_run_start_checkpoint_and_counts(saver, config, run)
    if start is None:
        return
    update_count = start[1].updates
    run_writes = [write for write in start[0].pending_writes or () if write[0] == run.run_id]
    stored = [value for _, channel, value in run_writes if channel == FORMER_WRITES_CHANNEL]
    # Restore the checkpoints in reverse order, so that the run's starting checkpoint is restored
    # last.
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
            former[task] = FormerWrites(
                has_result,
                {**control, **former_answers},
                update_count
                if task == NULL_TASK and checkpoint.config == start[0].config
                else None,
            )
        await undo_writes_to_checkpoint(
            saver, run.thread_id, run.run_id, FormerCheckpoint(ns, checkpoint_id, former)
        )


async def undo_update_that_cannot_be_applied(graph: Graph, saver: Checkpointer, run: Run) -> None:
    """Undo a failed run's writes if the update of its command cannot be applied to the state.

    LangGraph stores the update of a `Command` before applying it. If a reducer raises an error for
    a stored update, it raises the same error in every later run and whenever the state is read,
    until the update is removed.

    The caller must hold the thread's lock.
    """
    if run.request.command is None:
        return
    config: RunnableConfig = {"configurable": {"thread_id": run.thread_id, "checkpoint_ns": ""}}
    start = await _find_run_start_checkpoint_and_counts(saver, config, run)
    if start is None:
        return
    try:
        # Because the config specifies a checkpoint id, LangGraph applies only the pending updates
        # of commands, and ignores the pending results of nodes.
        await graph.aget_state(start[0].config)
    # A user-defined reducer can raise any exception.
    except Exception:
        await undo_writes_of_run(saver, run)


async def find_run_progress(saver: Checkpointer, run: Run) -> Progress | None:
    """Return a run's progress, or None if the run's input or command has not been applied yet."""
    config: RunnableConfig = {"configurable": {"thread_id": run.thread_id, "checkpoint_ns": ""}}
    head = await saver.aget_tuple(config)
    if head is None:
        return None
    waits = (await saver.astatus(run.thread_id)).state == "waiting"
    if head.metadata.get("run_id") == run.run_id:
        return "asks" if waits else "applied"
    async for _ in saver.alist(config, filter={"run_id": run.run_id}, limit=1):
        # The run has stored checkpoints, but the thread's head was stored by another run or
        # program.
        return "overtaken"
    if run.request.command is None:
        return None
    start = await _find_run_start_checkpoint_and_counts(saver, config, run)
    if start is None:
        return None
    checkpoint, counts_before = start
    counts_after = _InterruptAnswerAndUpdateCounts.from_pending_writes(
        checkpoint.pending_writes or ()
    )
    is_answered, has_moved = (
        counts_after.answers > counts_before.answers,
        checkpoint.config != head.config,
    )
    if not is_answered and counts_after.updates == counts_before.updates:
        # The run's command was not stored. If the command answers an interrupt and the thread has a
        # newer head, do not apply the command, because it answers an interrupt of the checkpoint
        # from which the run started.
        return "overtaken" if has_moved and run.request.command.resume is not None else None
    if has_moved:
        return "overtaken"
    return "asks" if is_answered and waits else "applied"


async def is_input_stored(saver: Checkpointer, run: Run) -> bool:
    """Return whether a failed run's input or answer to an interrupt was stored."""
    if await find_run_progress(saver, run) is not None:
        return True
    config: RunnableConfig = {"configurable": {"thread_id": run.thread_id, "checkpoint_ns": ""}}
    head = await saver.aget_tuple(config) if run.request.command is not None else None
    # LangGraph first stores an interrupt answer under the id of the null task. Look for such
    # answers here, because `find_run_progress` counts an answer only after a task has received it.
    writes = (head.pending_writes or ()) if head is not None else ()
    return any(task == NULL_TASK and channel == RESUME for task, channel, _ in writes)


async def _find_run_start_checkpoint_and_counts(
    saver: Checkpointer, config: RunnableConfig, run: Run
) -> tuple[CheckpointTuple, _InterruptAnswerAndUpdateCounts] | None:
    """Return a run's starting checkpoint, and the answer and update counts stored with it."""
    async for checkpoint in saver.alist(config):
        for task, channel, value in checkpoint.pending_writes or ():
            if (task, channel) == (run.run_id, _START_CHANNEL):
                return checkpoint, _InterruptAnswerAndUpdateCounts(*value)
    return None


async def _summarize_pending_writes_of_graph_and_subgraphs(
    saver: Checkpointer, start_checkpoint: CheckpointTuple
) -> list[list[Any]]:
    """Summarize the pending writes of a checkpoint and of its interrupted subgraphs' checkpoints.

    Each element of the returned list is a list `[namespace, checkpoint_id, tasks]`. The dict
    `tasks` maps the id of each task to a list `[has_result, answer_count, questions_and_errors]`,
    whose last value is a dict keyed by channel. The number of a task's answers is enough to restore
    the earlier answers, because new answers are only ever appended to the list of answers.
    """
    thread_id = start_checkpoint.config["configurable"]["thread_id"]
    former, checkpoints = list[list[Any]](), [start_checkpoint]
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
