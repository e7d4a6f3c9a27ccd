"""Write summaries after a turn, so that the user does not have to wait for them.

A summary is stored at the thread's head checkpoint, as a pending write with the task id of
LangGraph's null task. LangGraph uses the null task's id for writes that come from outside the
graph's nodes, such as the update of a `Command`. The next run that starts from the head checkpoint
applies the summary. If a run loaded the head checkpoint before the summary was stored, the run
neither uses the summary nor saves it in new checkpoints. Storing a summary adds no checkpoint, so
it never creates a branch of the thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, NamedTuple

from langchain_core.runnables import RunnableConfig, ensure_config
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple

from perdure.effects import (
    Effect,
    build_effect_that_calls_function_in_thread,
    call_method,
    run_operation,
)
from perdure.memory.conversation import Messages, get_role
from perdure.memory.run_config import get_runtime_of_running_graph
from perdure.memory.thread_messages import read_channel_values
from perdure.storage.thread_pools import ThreadPool

_LOG: Final = logging.getLogger("perdure")
# Maximum number of OS threads per node, and therefore of jobs that run concurrently. A job that
# waits for its run to end also occupies an OS thread.
_MAX_OS_THREADS: Final = 16
# Maximum time, in seconds, to wait until the run that scheduled a summary has ended.
_RUN_TIMEOUT_S: Final = 15.0
# Initial and maximum interval, in seconds, for polling a thread's head (the checkpoint from which
# the thread's next run continues).
_POLL_S: Final = (0.01, 0.5)
# maximum time to wait for the thread's lock, in seconds
_LOCK_TIMEOUT_S: Final = 60.0
_NULL_TASK: Final = "00000000-0000-0000-0000-000000000000"  # the id of langgraph's null task
Saver = BaseCheckpointSaver[Any]


class SavedThread(NamedTuple):
    """A thread that a checkpointer stores."""

    saver: Saver
    thread_id: str

    @property
    def config(self) -> RunnableConfig:
        """The config of the thread's head."""
        return {"configurable": {"thread_id": self.thread_id, "checkpoint_ns": ""}}


def find_thread_of_current_run() -> SavedThread | None:
    """Return the thread of the current run.

    Return None if no graph is running, if the running graph is a subgraph, or if the graph has no
    checkpointer.
    """
    info = getattr(get_runtime_of_running_graph(), "execution_info", None)
    # In the root graph, a node's namespace has the form "node:task_id". In a subgraph, it is
    # prefixed with the calling node's namespace and "|".
    if info is None or info.thread_id is None or "|" in info.checkpoint_ns:
        return None
    # langgraph stores the checkpointer in `configurable`, under a private key.
    for value in ensure_config()["configurable"].values():
        if isinstance(value, BaseCheckpointSaver):
            return SavedThread(value, info.thread_id)
    return None


def ends_with_answer(messages: Messages) -> bool:
    """Return whether the messages end with an answer, which means that the turn is complete.

    An answer is an AI message without tool calls. The answer may be followed by system messages.
    """
    last = next((message for message in reversed(messages) if get_role(message) != "system"), None)
    return last is not None and get_role(last) == "ai" and not getattr(last, "tool_calls", ())


class SavedHead(NamedTuple):
    """The head checkpoint of a thread, including its channel values.

    Attributes:
        tuple: The checkpoint with its pending writes, as the checkpointer returned it.
        values: The channel values of the checkpoint, including those of `DeltaChannel`s.
    """

    tuple: CheckpointTuple
    values: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The id of the head checkpoint."""
        return self.tuple.checkpoint["id"]


async def read_head_checkpoint(thread: SavedThread) -> SavedHead | None:
    """Return the head checkpoint of a thread, or None if the thread has no checkpoint."""
    head: CheckpointTuple | None = await call_method(thread.saver, "get_tuple", thread.config)
    if head is None:
        return None
    return SavedHead(head, await read_channel_values(thread.saver, head))


def can_store_summary_at_head_checkpoint(head: CheckpointTuple) -> bool:
    """Return whether a summary can be added to the pending writes of a head checkpoint.

    A summary can be stored if the checkpoint triggers no tasks and has no pending writes from
    LangGraph's null task. A checkpoint triggers tasks if its run is in progress, has failed, was
    stopped, or waits for the answer to an interrupt.
    """
    from perdure.checkpointers.status import (  # imported only if needed
        TaskWrite,
        build_thread_status,
    )

    writes = [
        TaskWrite(task, "", channel, value) for task, channel, value in head.pending_writes or ()
    ]
    if any(write.task_id == _NULL_TASK for write in writes):
        # A pending write with the task id `_NULL_TASK` comes from outside the graph's nodes. It can
        # be an earlier summary, the answer to an interrupt, or the state update of a `Command`.
        return False
    status = build_thread_status(
        head.checkpoint["channel_values"],
        head.checkpoint["channel_versions"],
        head.checkpoint["versions_seen"],
        writes,
    )
    return status.state == "idle"


async def store_summary_if_head_unchanged(
    thread: SavedThread, head: SavedHead, messages_key: str, writes: dict[str, Any]
) -> bool:
    """Store a summary as pending writes of the head checkpoint.

    If the checkpointer is perdure's, this function locks the thread while it checks the head and
    stores the summary. With any other checkpointer, the thread is not locked.

    Args:
        thread: The thread.
        head: The head checkpoint from which the summary was made.
        messages_key: The channel of the messages.
        writes: The value to write to each channel.

    Returns:
        Whether the pending writes were stored. They are discarded if the thread has a different
        head or was deleted, if messages were erased or changed, or if the head no longer accepts a
        summary (see `can_store_summary_at_head_checkpoint`).
    """
    saver = thread.saver
    from perdure.checkpointers.checkpointer import Checkpointer  # imported only if it is needed

    lock: Any = (
        saver.lock(thread.thread_id, timeout_s=_LOCK_TIMEOUT_S)
        if isinstance(saver, Checkpointer)
        else nullcontext()
    )
    await Effect(lock.__enter__, lock.__aenter__)
    try:
        current = await read_head_checkpoint(thread)
        if (
            current is None
            or not can_store_summary_at_head_checkpoint(current.tuple)
            or current.id != head.id
            or current.values.get(messages_key) != head.values.get(messages_key)
        ):
            return False
        await call_method(
            saver, "put_writes", current.tuple.config, list(writes.items()), _NULL_TASK
        )
        return True
    finally:
        leave = None, None, None
        await Effect(partial(lock.__exit__, *leave), partial(lock.__aexit__, *leave))


class BackgroundSummaries:
    """Runs the jobs that write a `Summarize` node's summaries, in daemon OS threads."""

    def __init__(self) -> None:
        # maps (id() of the checkpointer, thread id) to the newest job of the thread
        self._newest: dict[tuple[int, str], object] = {}
        self._jobs = set[object]()  # all jobs that have not ended
        self._changed = threading.Condition()  # notified when a job ends
        self._pool, self._pid = (
            ThreadPool(_MAX_OS_THREADS, "perdure-summary", is_permanent=False),
            os.getpid(),
        )

    def schedule_summary(
        self,
        thread: SavedThread,
        messages_key: str,
        last_message_id: str | None,
        summarize_thread: Callable[[SavedThread], object],
    ) -> None:
        """Schedule a summary, which starts when the current run of the thread has ended.

        The run is treated as ended once the thread's head checkpoint contains the message
        `last_message_id`, and `can_store_summary_at_head_checkpoint` returns True for this
        checkpoint. A summary that an earlier turn scheduled for the same thread is dropped if it
        has not started yet.
        """
        # A forked child process does not have the OS threads of its parent.
        if self._pid != os.getpid():
            self.__init__()  # type: ignore[misc]
        key, job = (id(thread.saver), thread.thread_id), object()
        with self._changed:
            self._newest[key] = job
            self._jobs.add(job)

        def summarize_after_run() -> None:
            if _wait_for_run_end_unless_rescheduled(
                thread, messages_key, last_message_id, lambda: self._newest.get(key) is job
            ):
                summarize_thread(thread)

        self._pool.submit_without_result(
            partial(self._run_summary_job, key, job, summarize_after_run)
        )

    def _run_summary_job(
        self, thread_key: tuple[int, str], job: object, work: Callable[[], None]
    ) -> None:
        """Call `work`, log any error that it raises, and remove the job from `_jobs`."""
        try:
            work()
        except Exception as exc:
            _LOG.warning(
                "no summary of the thread %r was written after its turn: %s; the next turn tries "
                "again",
                thread_key[1],
                exc,
                exc_info=exc,
            )
        finally:
            with self._changed:
                if self._newest.get(thread_key) is job:
                    del self._newest[thread_key]
                self._jobs.discard(job)
                self._changed.notify_all()

    async def flush(self, timeout_s: float | None) -> bool:
        """Wait until all jobs have ended.

        Return False if a job is still running after `timeout_s` seconds. If `timeout_s` is None,
        wait for the jobs without a time limit.
        """

        def wait_for_jobs() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: not self._jobs, timeout_s)

        return await build_effect_that_calls_function_in_thread(wait_for_jobs)


def _wait_for_run_end_unless_rescheduled(
    thread: SavedThread,
    messages_key: str,
    last_message_id: str | None,
    is_newest_schedule: Callable[[], bool],
) -> bool:
    """Wait until a run ends or a later turn schedules another summary.

    Return True if the run has ended. Return False if a later turn of the same thread schedules
    another summary before the awaited run has ended.

    Raises:
        TimeoutError: The run did not end within `_RUN_TIMEOUT_S` seconds.
    """
    until, pause = time.monotonic() + _RUN_TIMEOUT_S, _POLL_S[0]
    while is_newest_schedule():
        head = run_operation(read_head_checkpoint(thread))
        if head is not None and can_store_summary_at_head_checkpoint(head.tuple):
            messages = head.values.get(messages_key) or ()
            if any(getattr(message, "id", None) == last_message_id for message in messages):
                return True
        if time.monotonic() > until:
            raise TimeoutError(
                f"the run did not store its last message within {_RUN_TIMEOUT_S:.0f} s"
            )
        time.sleep(pause)
        pause = min(2 * pause, _POLL_S[1])
    return False
