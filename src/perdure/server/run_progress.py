"""How far a run came before its server died: whether its input or its answer was stored.

A checkpoint carries the id of the run that put it, in its metadata. The answer to a question is
stored before the next checkpoint, as a pending write that does not name the run. So a run with a
`Command` first stores how many answers and updates the checkpoint has. The next server compares.
Values are never compared, because the same answer may be given twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.serde.types import ERROR, INTERRUPT, RESUME

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.status import ASIDE, NULL_TASK
from perdure.server.run import Run

Progress: TypeAlias = Literal["applied", "asks", "overtaken"]
"""The input was applied, and the run goes on; it asked a question; or the thread went on without
it."""
_START: Final = "__run_start"  # the channel of the counts; no graph has it
_PATH: Final = f"run start{ASIDE}"
_MAX_CHECKPOINTS: Final = (
    64  # of a thread, from the newest, in which the start of a run is looked up
)
_SPECIAL: Final = frozenset({ERROR, INTERRUPT, RESUME, _START})


class _Counts(NamedTuple):
    """The pending writes of a checkpoint: answers that tasks have received, and updates."""

    answers: int
    updates: int

    @classmethod
    def of(cls, writes: Iterable[tuple[str, str, Any]]) -> _Counts:
        answers = updates = 0
        for task, channel, value in writes:
            if task == NULL_TASK:
                updates += channel not in _SPECIAL
            elif channel == RESUME:
                answers += len(value) if isinstance(value, list) else 1
        return cls(answers, updates)


async def store_start(saver: Checkpointer, run: Run, config: RunnableConfig) -> None:
    """Store the counts of the checkpoint from which a run with a `Command` starts."""
    if run.request.command is None:
        return
    given = config["configurable"]
    names = ("thread_id", "checkpoint_ns", "checkpoint_id")
    at = {"checkpoint_ns": "", **{name: given[name] for name in names if given.get(name)}}
    start = await saver.aget_tuple({"configurable": at})
    if start is not None:
        counts = _Counts.of(start.pending_writes or ())
        await saver.aput_writes(start.config, [(_START, [*counts])], run.run_id, _PATH)


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
    after = _Counts.of(checkpoint.pending_writes or ())
    is_answered = after.answers > before.answers
    if not is_answered and after.updates == before.updates:
        return None
    if checkpoint.config != head.config:
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
    saver: Checkpointer, at: RunnableConfig, run: Run
) -> tuple[CheckpointTuple, _Counts] | None:
    """Return the checkpoint from which a run started, and its counts at that time."""
    async for checkpoint in saver.alist(at, limit=_MAX_CHECKPOINTS):
        for task, channel, value in checkpoint.pending_writes or ():
            if (task, channel) == (run.run_id, _START):
                return checkpoint, _Counts(*value)
    return None
