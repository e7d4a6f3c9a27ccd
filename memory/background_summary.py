"""Write summaries after a turn, so that the user does not have to wait for them.

A summary is stored at the thread's head checkpoint, as a pending write with the task id of
LangGraph's null task. LangGraph uses the null task's id for writes that come from outside the
graph's nodes, such as the update of a `Command`. The next run that starts from the head checkpoint
applies the summary. If a run read the head checkpoint before the summary was stored, it does not
apply the summary, so its checkpoints do not contain the summary. Storing a summary adds no
checkpoint, so it never creates a branch of the thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple

from perdure.effects import Effect, call_method, run_operation
from perdure.memory.conversation import Messages, get_role
from perdure.storage.threads import ThreadPool

_LOG: Final = logging.getLogger("perdure")
# maximum number of summaries that one node generates concurrently
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

    The result is None if no graph is running, if the running graph is a subgraph, or if the graph
    has no checkpointer.
    """
    from langgraph.config import get_config
    from langgraph.runtime import get_runtime

    try:
        config, runtime = get_config(), get_runtime()
    except (RuntimeError, KeyError):  # no graph is running
        return None
    info, configurable = runtime.execution_info, config.get("configurable", {})
    # In the root graph, a node's namespace has the form "node:task_id". In a subgraph, it is
    # prefixed with the calling node's namespace and "|".
    if info is None or info.thread_id is None or "|" in info.checkpoint_ns:
        return None
    # langgraph stores the checkpointer in `configurable`, under a private key.
    savers = (value for value in configurable.values() if isinstance(value, BaseCheckpointSaver))
    saver = next(savers, None)
    return None if saver is None else SavedThread(saver, info.thread_id)


def ends_with_answer(messages: Messages) -> bool:
    """Return whether the messages end with an answer, which means that the turn is complete.

    An answer is an AI message without tool calls. System messages after the answer are ignored.
    """
    last = next((message for message in reversed(messages) if get_role(message) != "system"), None)
    return last is not None and get_role(last) == "ai" and not getattr(last, "tool_calls", ())


class SavedHead(NamedTuple):
    """The head checkpoint of a thread, including its channel values.

    Attributes:
        tuple: The checkpoint with its pending writes, as the checkpointer returned it.
        values: The channel values of the checkpoint. They include the values of `DeltaChannel`s if
            `read_head_checkpoint` had to reconstruct the messages.
    """

    tuple: CheckpointTuple
    values: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The id of the head checkpoint."""
        return self.tuple.checkpoint["id"]


async def read_head_checkpoint(thread: SavedThread, messages_key: str) -> SavedHead | None:
    """Return the head checkpoint of a thread, or None if the thread has no checkpoint.

    If the channel `messages_key` is a `DeltaChannel`, the checkpoint might not contain the
    messages. If the messages are missing, a perdure checkpointer reconstructs the values of all
    `DeltaChannel`s.
    """
    from perdure.checkpointers.checkpointer import Checkpointer  # imported only if it is needed

    head: CheckpointTuple | None = await call_method(thread.saver, "get_tuple", thread.config)
    if head is None:
        return None
    values = head.checkpoint["channel_values"]
    if isinstance(thread.saver, Checkpointer) and not isinstance(values.get(messages_key), list):
        checkpoint_id = head.checkpoint["id"]
        deltas = await call_method(
            thread.saver, "delta_values", thread.thread_id, checkpoint_id=checkpoint_id
        )
        values = {**values, **deltas}
    return SavedHead(head, values)


def can_store_summary_at_head_checkpoint(head: CheckpointTuple) -> bool:
    """Return whether a summary can be stored at a head checkpoint.

    A summary can be stored if all tasks of the thread have finished, no interrupt is pending, and
    the checkpoint has no pending writes from LangGraph's null task. A task has not finished if its
    run is in progress, has failed or was stopped.
    """
    from perdure.checkpointers.status import (  # imported only if needed
        TaskWrite,
        build_thread_status,
    )

    pending = head.pending_writes or ()
    writes = [TaskWrite(task, "", channel, value) for task, channel, value in pending]
    if any(write.task_id == _NULL_TASK for write in writes):
        # A pending write with the task id `_NULL_TASK` comes from outside the graph's nodes: it is
        # an earlier summary or the answer to an interrupt.
        return False
    versions, seen = head.checkpoint["channel_versions"], head.checkpoint["versions_seen"]
    values = head.checkpoint["channel_values"]
    return build_thread_status(values, versions, seen, writes).state == "idle"


async def store_summary_if_head_unchanged(
    thread: SavedThread, head: SavedHead, messages_key: str, writes: dict[str, Any]
) -> bool:
    """Store a summary as pending writes of the head checkpoint.

    A perdure checkpointer locks the thread while the summary is stored.

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

    lock = None
    if isinstance(saver, Checkpointer):
        lock = saver.lock(thread.thread_id, timeout_s=_LOCK_TIMEOUT_S)
    if lock is not None:
        await Effect(lock.__enter__, lock.__aenter__)
    try:
        current = await read_head_checkpoint(thread, messages_key)
        if (
            current is None
            or not can_store_summary_at_head_checkpoint(current.tuple)
            or current.id != head.id
        ):
            return False
        if current.values.get(messages_key) != head.values.get(messages_key):
            return False
        await call_method(
            saver, "put_writes", current.tuple.config, list(writes.items()), _NULL_TASK
        )
        return True
    finally:
        if lock is not None:
            leave = None, None, None
            await Effect(partial(lock.__exit__, *leave), partial(lock.__aexit__, *leave))


class BackgroundSummaries:
    """Writes the summaries of a `Summarize` node after each turn, in daemon OS threads."""

    def __init__(self) -> None:
        # the newest job of each thread, by the id() of the checkpointer and the thread id
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

        The run is considered ended once a checkpoint contains the message `last_message_id` and has
        no unfinished tasks. A summary that an earlier turn scheduled for the same thread is dropped
        if it has not started yet.
        """
        # A forked child process does not have the OS threads of its parent.
        if self._pid != os.getpid():
            self.__init__()  # type: ignore[misc]
        key, job = (id(thread.saver), thread.thread_id), object()
        with self._changed:
            self._newest[key] = job
            self._jobs.add(job)

        def is_newest() -> bool:
            return self._newest.get(key) is job

        def summarize_after_run() -> None:
            if _wait_for_run_end_unless_rescheduled(
                thread, messages_key, last_message_id, is_newest
            ):
                summarize_thread(thread)

        self._pool.submit_without_result(
            partial(self._run_summary_job, key, job, summarize_after_run)
        )

    def _run_summary_job(
        self, thread_key: tuple[int, str], job: object, work: Callable[[], None]
    ) -> None:
        """Call `work`, log any error that it raises, and remove the job."""
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
        there is no time limit.
        """

        def wait_for_jobs() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: not self._jobs, timeout_s)

        return await Effect(wait_for_jobs, lambda: asyncio.to_thread(wait_for_jobs))


def _wait_for_run_end_unless_rescheduled(
    thread: SavedThread,
    messages_key: str,
    last_message_id: str | None,
    is_newest_schedule: Callable[[], bool],
) -> bool:
    """Wait for the end of a run, unless a later turn schedules another summary first.

    Return True if the run has ended. Return False if a later turn has scheduled another summary
    before the end of the run.

    Raises:
        TimeoutError: The run did not end within `_RUN_TIMEOUT_S` seconds.
    """
    until, pause = time.monotonic() + _RUN_TIMEOUT_S, _POLL_S[0]
    while is_newest_schedule():
        head = run_operation(read_head_checkpoint(thread, messages_key))
        if head is not None and can_store_summary_at_head_checkpoint(head.tuple):
            messages = head.values.get(messages_key)
            if any(getattr(message, "id", None) == last_message_id for message in messages or ()):
                return True
        if time.monotonic() > until:
            fault = f"the run did not store its last message within {_RUN_TIMEOUT_S:.0f} s"
            raise TimeoutError(fault)
        time.sleep(pause)
        pause = min(2 * pause, _POLL_S[1])
    return False
