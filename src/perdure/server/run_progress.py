"""Find out how far a run came before its server died: whether its input or answer was stored.

A checkpoint carries the id of the run that put it, in its metadata. The answer to a question is
stored before the next checkpoint, as a pending write that does not name the run. So a run with a
`Command` first stores how many answers and updates the checkpoint has. The next server counts
again. Values are never compared, because the same answer may be given twice.

A run without an input writes to a checkpoint that another run has put. So the run first stores what
the tasks had written there, and a rollback of the run restores these writes.
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
"""The input was applied, and the run goes on; it asked a question; or the thread went on without
it."""
_START_CHANNEL: Final = "__run_start"  # the channel of the counts; no graph has it
_START_PATH: Final = f"run start{ASIDE_SUFFIX}"
_SPECIAL_CHANNELS: Final = frozenset(
    {ERROR, INTERRUPT, RESUME, _START_CHANNEL, FORMER_WRITES_CHANNEL}
)


class _Counts(NamedTuple):
    """The pending writes of a checkpoint: answers that tasks have received, and updates."""

    answers: int
    updates: int

    @classmethod
    def from_writes(cls, writes: Iterable[tuple[str, str, Any]]) -> _Counts:
        answers = updates = 0
        for task, channel, value in writes:
            if task == NULL_TASK:
                updates += channel not in _SPECIAL_CHANNELS
            elif channel == RESUME:
                answers += len(value) if isinstance(value, list) else 1
        return cls(answers, updates)


async def store_start(saver: Checkpointer, run: Run, config: RunnableConfig) -> None:
    """Store the counts and the former writes of the checkpoint from which a run starts.

    A run with an input puts a checkpoint of its own first, so nothing is stored for it.
    """
    if run.request.command is None and run.request.input is not None:
        return
    given = config["configurable"]
    names = ("thread_id", "checkpoint_ns", "checkpoint_id")
    at = {"checkpoint_ns": "", **{name: given[name] for name in names if given.get(name)}}
    start = await saver.aget_tuple({"configurable": at})
    if start is not None:
        counts = _Counts.from_writes(start.pending_writes or ())
        former = await _read_former_writes(saver, start)
        writes = [(_START_CHANNEL, [*counts]), (FORMER_WRITES_CHANNEL, former)]
        await saver.aput_writes(start.config, writes, run.run_id, _START_PATH)


async def restore_start(saver: Checkpointer, run: Run) -> None:
    """Undo what a run has written to checkpoints of other runs.

    The caller holds the lock of the thread, and has removed the checkpoints of the run.
    """
    at: RunnableConfig = {"configurable": {"thread_id": run.thread_id, "checkpoint_ns": ""}}
    start = await _find_start(saver, at, run)
    if start is None:
        return
    of_run = [each for each in start[0].pending_writes or () if each[0] == run.run_id]
    stored = [value for _, channel, value in of_run if channel == FORMER_WRITES_CHANNEL]
    for ns, checkpoint_id, tasks in reversed(stored[0] if stored else ()):  # the start comes last
        place = {"checkpoint_ns": ns, "checkpoint_id": checkpoint_id}
        now = await saver.aget_tuple({"configurable": {"thread_id": run.thread_id, **place}})
        if now is None:
            continue
        answers = {
            task: value
            for task, channel, value in now.pending_writes or ()
            if channel == RESUME and isinstance(value, list)
        }
        former = {}
        for task, (has_result, count, control) in tasks.items():
            given = {RESUME: answers.get(task, [])[:count]} if count else {}
            former[task] = FormerWrites(has_result, {**control, **given})
        await undo_writes(
            saver, run.thread_id, run.run_id, FormerCheckpoint(ns, checkpoint_id, former)
        )


async def find_progress(saver: Checkpointer, run: Run) -> Progress | None:
    """Return how far a run came, or None if its input is to be given to the graph."""
    at: RunnableConfig = {"configurable": {"thread_id": run.thread_id, "checkpoint_ns": ""}}
    head = await saver.aget_tuple(at)
    if head is None:
        return None
    waits = (await saver.astatus(run.thread_id)).state == "waiting"
    if head.metadata.get("run_id") == run.run_id:
        return "asks" if waits else "applied"
    async for _ in saver.alist(at, filter={"run_id": run.run_id}, limit=1):
        return "overtaken"
    if run.request.command is None:
        return None
    start = await _find_start(saver, at, run)
    if start is None:
        return None
    checkpoint, before = start
    after = _Counts.from_writes(checkpoint.pending_writes or ())
    is_answered, has_moved = after.answers > before.answers, checkpoint.config != head.config
    if not is_answered and after.updates == before.updates:
        # an answer is for the question that was asked where the run starts
        return "overtaken" if has_moved and run.request.command.resume is not None else None
    if has_moved:
        return "overtaken"
    return "asks" if is_answered and waits else "applied"


async def is_input_stored(saver: Checkpointer, run: Run) -> bool:
    """Return whether the input, or the answer, of a run that failed is stored."""
    if await find_progress(saver, run) is not None:
        return True
    at: RunnableConfig = {"configurable": {"thread_id": run.thread_id, "checkpoint_ns": ""}}
    head = await saver.aget_tuple(at) if run.request.command is not None else None
    writes = (head.pending_writes or ()) if head is not None else ()
    return any(task == NULL_TASK and channel == RESUME for task, channel, _ in writes)


async def _find_start(
    saver: Checkpointer, config: RunnableConfig, run: Run
) -> tuple[CheckpointTuple, _Counts] | None:
    """Return the checkpoint from which a run started, and its counts at that time."""
    async for checkpoint in saver.alist(config):
        for task, channel, value in checkpoint.pending_writes or ():
            if (task, channel) == (run.run_id, _START_CHANNEL):
                return checkpoint, _Counts(*value)
    return None


async def _read_former_writes(saver: Checkpointer, start: CheckpointTuple) -> list[list[Any]]:
    """Return what tasks have written to a checkpoint and to waiting checkpoints of its subgraphs.

    Each element has the namespace and the id of a checkpoint, and for each task whether it has a
    result, the number of its answers, and its questions and errors by their channels. The number of
    answers is enough, because answers are only appended.
    """
    thread_id = start.config["configurable"]["thread_id"]
    former, checkpoints = list[list[Any]](), [start]
    while checkpoints:
        checkpoint = checkpoints.pop()
        place = checkpoint.config["configurable"]
        ns, tasks = place.get("checkpoint_ns", ""), dict[str, list[Any]]()
        for task, channel, value in checkpoint.pending_writes or ():
            entry = tasks.setdefault(task, [False, 0, {}])
            if channel not in WRITES_IDX_MAP:
                entry[0] = True
            elif channel == RESUME and isinstance(value, list):
                entry[1] = len(value)
            else:
                entry[2][channel] = value
        former.append([ns, place["checkpoint_id"], tasks])
        status = await saver.astatus(
            thread_id, checkpoint_ns=ns, checkpoint_id=place["checkpoint_id"]
        )
        for waiting in status.tasks:
            inner = f"{ns}|{waiting.node}:{waiting.id}".removeprefix("|")
            at: RunnableConfig = {"configurable": {"thread_id": thread_id, "checkpoint_ns": inner}}
            nested = await saver.aget_tuple(at) if waiting.id and waiting.interrupts else None
            checkpoints += [nested] if nested is not None else []
    return former
