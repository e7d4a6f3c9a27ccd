"""Determine how far a run got before its server process died, and undo the run's pending writes.

The metadata of a checkpoint contains the id of the run that stored the checkpoint. A run that
answers an interrupt stores the answer before it stores its first checkpoint. An interrupt's answer
is stored as a pending write of the run's starting checkpoint. A pending write does not contain the
id of its run. Before a run with a `Command`, the server counts the starting checkpoint's pending
writes, to detect new ones later. The server counts interrupt answers and command updates
separately, and stores both counts with the starting checkpoint. If a server continues the run after
a crash, the server counts the interrupt answers and command updates at the run's starting
checkpoint a second time, and compares these counts with the stored counts. If the starting
checkpoint now has more interrupt answers or command updates than before the run, the run has
already stored its `Command`. The server compares the number of interrupt answers, not their
content, because a new answer can have the same content as an earlier answer.

A run that is started without input or with a `Command` adds pending writes to the checkpoint from
which it starts. Another run has stored this checkpoint. Before a run adds pending writes to another
run's checkpoint, it saves a summary of the checkpoint's existing pending writes. If the run is
rolled back or its `Command` cannot be applied, the checkpoint's original pending writes are
restored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple, TypeAlias

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
from perdure.server.runs.changes_by_other_users import load_checkpoint
from perdure.server.runs.run import Run

Progress: TypeAlias = Literal["applied", "waiting", "overtaken"]
"""How far a run got. `"applied"` means that its input or command was applied, and that the run can
continue. `"waiting"` means that the run has stopped at an interrupt that has not been answered.
`"overtaken"` means that another run or another program has changed the thread since, so that the
run must not continue."""
# Name of the channel under which a run stores its `_InterruptAnswerAndUpdateCounts`. No graph has a
# channel with this name.
_START_CHANNEL: Final = "__run_start"
# Task path of the pending writes that this module stores. Pending writes with the path suffix
# `ASIDE_SUFFIX` do not affect the thread's status.
_START_PATH: Final = f"run start{ASIDE_SUFFIX}"
# Channels whose pending writes do not count as updates requested by a `Command`
_SPECIAL_CHANNELS: Final = frozenset(
    {ERROR, INTERRUPT, RESUME, _START_CHANNEL, FORMER_WRITES_CHANNEL}
)


class _InterruptAnswerAndUpdateCounts(NamedTuple):
    """Counts of the interrupt answers and of the command updates in a checkpoint's pending writes.

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
        """Count the resume values and the `Command` updates in a checkpoint's pending writes."""
        answers = updates = 0
        for task_id, channel, value in pending_writes:
            if task_id == NULL_TASK:
                updates += channel not in _SPECIAL_CHANNELS
            elif channel == RESUME:
                answers += len(value) if isinstance(value, list) else 1
        return cls(answers, updates)


async def store_start_checkpoint_data_for_rollback(saver: Checkpointer, run: Run) -> None:
    """Store the data that is needed later to determine a run's progress or to roll the run back.

    A summary of the starting checkpoint's pending writes is stored with that checkpoint. The number
    of interrupt answers and the number of command updates are stored with the checkpoint from which
    the run starts. A run with input adds no pending writes to other runs' checkpoints. If a run was
    started with input, a rollback of the run does not change other runs' checkpoints. Therefore, no
    rollback data is stored for a run that was started with input.
    """
    if run.request.command is None and run.request.input is not None:
        return
    start = await load_checkpoint(saver, run.thread_id, "", run.request.start_checkpoint_id)
    if start is not None:
        counts = _InterruptAnswerAndUpdateCounts.from_pending_writes(start.pending_writes or ())
        former = await _summarize_pending_writes_of_graph_and_subgraphs(saver, start)
        await saver.aput_writes(
            start.config,
            [(_START_CHANNEL, [*counts]), (FORMER_WRITES_CHANNEL, former)],
            run.run_id,
            _START_PATH,
        )


async def undo_writes_of_run(saver: Checkpointer, run: Run) -> None:
    """Undo the writes that a run added to checkpoints created by other runs.

    The caller must hold the thread's lock, and must delete the run's own checkpoints first.
    """
    start = await _find_run_start_checkpoint_and_counts(saver, run)
    if start is None:
        return
    update_count = start[1].updates
    run_writes = [write for write in start[0].pending_writes or () if write[0] == run.run_id]
    stored = [value for _, channel, value in run_writes if channel == FORMER_WRITES_CHANNEL]
    # Restore the subgraphs' checkpoints first, and restore the starting checkpoint last. Restoring
    # the starting checkpoint deletes the stored summary of pending writes. A repeated rollback
    # still needs the summary to restore the subgraphs' checkpoints.
    for ns, checkpoint_id, tasks in reversed(stored[0] if stored else ()):
        checkpoint = await load_checkpoint(saver, run.thread_id, ns, checkpoint_id)
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
    """Undo a failed run's writes if the state update in the run's `Command` cannot be applied.

    LangGraph stores the update of a `Command` before it applies the update to the state. If a
    reducer raises an error for a stored update, it raises the same error in every later run and
    whenever the state is read, until the update is removed.

    The caller must hold the thread's lock.
    """
    if run.request.command is None:
        return
    start = await _find_run_start_checkpoint_and_counts(saver, run)
    if start is None:
        return
    try:
        # Read the state to check whether LangGraph can apply the update in the run's `Command`.
        # Because the config contains a checkpoint id, `aget_state` applies pending `Command`
        # updates. `aget_state` ignores pending node results, which this check does not need.
        await graph.aget_state(start[0].config)
    # A user-defined reducer can raise any exception.
    except Exception:
        await undo_writes_of_run(saver, run)


async def find_run_progress(saver: Checkpointer, run: Run) -> Progress | None:
    """Return a run's progress, or None if the run's input or command has not been applied yet."""
    head = await saver.aget_tuple(run.thread_config)
    if head is None:
        return None
    waits = (await saver.astatus(run.thread_id)).state == "waiting"
    if head.metadata.get("run_id") == run.run_id:
        return "waiting" if waits else "applied"
    async for _ in saver.alist(run.thread_config, filter={"run_id": run.run_id}, limit=1):
        # The run has stored checkpoints, but another run or another program has stored a newer
        # head.
        return "overtaken"
    if run.request.command is None:
        return None
    start = await _find_run_start_checkpoint_and_counts(saver, run)
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
        # The run stopped before it stored its `Command`. If the thread's head is no longer the
        # checkpoint from which the run started, the `resume` value in the `Command` can no longer
        # be applied.
        return "overtaken" if has_moved and run.request.command.resume is not None else None
    if has_moved:
        return "overtaken"
    return "waiting" if is_answered and waits else "applied"


async def is_input_stored(saver: Checkpointer, run: Run) -> bool:
    """Return whether a failed run's input or `Command` was stored in the thread."""
    if await find_run_progress(saver, run) is not None:
        return True
    head = await saver.aget_tuple(run.thread_config) if run.request.command is not None else None
    # Also check the writes of the null task. LangGraph first stores a resume value (an interrupt
    # answer) as a write of the null task. `find_run_progress` counts the resume value only after a
    # node's task has received it.
    writes = (head.pending_writes or ()) if head is not None else ()
    return any(task == NULL_TASK and channel == RESUME for task, channel, _ in writes)


async def _find_run_start_checkpoint_and_counts(
    saver: Checkpointer, run: Run
) -> tuple[CheckpointTuple, _InterruptAnswerAndUpdateCounts] | None:
    """Return a run's starting checkpoint, and its stored counts of resume values and updates.

    The first count is the number of resume values (interrupt answers) that tasks had received
    before the run. The second count is the number of `Command` updates before the run. Return None
    if no checkpoint stores the run's counts of resume values and command updates.
    """
    async for checkpoint in saver.alist(run.thread_config):
        for task, channel, value in checkpoint.pending_writes or ():
            if (task, channel) == (run.run_id, _START_CHANNEL):
                return checkpoint, _InterruptAnswerAndUpdateCounts(*value)
    return None


async def _summarize_pending_writes_of_graph_and_subgraphs(
    saver: Checkpointer, start_checkpoint: CheckpointTuple
) -> list[list[Any]]:
    """Summarize the pending writes of a checkpoint and of its interrupted subgraphs' checkpoints.

    Each element of the returned list describes one checkpoint as a list `[namespace, checkpoint_id,
    tasks]`. In a checkpoint's summary, `tasks` maps task ids to lists `[has_result, answer_count,
    questions_and_errors]`. `questions_and_errors` maps special channels, such as `__interrupt__`
    and `__error__`, to the values that the task wrote. For each task, the summary contains only the
    number of resume values (interrupt answers), and not the resume values themselves. The
    checkpoint's summary contains this number as `answer_count`. A rollback truncates the task's
    stored list of resume values to `answer_count` elements.
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
            nested = (
                await load_checkpoint(saver, thread_id, nested_ns)
                if waiting.id and waiting.interrupts
                else None
            )
            checkpoints += [nested] if nested is not None else []
    return former
