"""Summaries that are written after a turn, so that the user does not wait for them.

A summary is stored as a pending write of its thread's head, for langgraph's null task, as the
update of a `Command` is. The next run that starts from this checkpoint applies it. A run that had
read the checkpoint before does not, and its first checkpoint is the new head: the summary is then
dropped. No checkpoint is put, so a summary never makes a branch.
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

from perdure.effects import Effect, calling, run
from perdure.memory.conversation import Messages, role
from perdure.storage.threads import ThreadPool

_LOG: Final = logging.getLogger("perdure")
_THREADS: Final = 16  # summaries of one node that are written at the same time
_RUN_ENDS_S: Final = 15.0  # seconds that a run may take from its summary node to its end
_POLL_S: Final = (0.01, 0.5)  # seconds between two looks at the head: the first, and at most
_LOCK_S: Final = 60.0  # seconds to wait for the thread's lock
_NULL_TASK: Final = (
    "00000000-0000-0000-0000-000000000000"  # langgraph's, whose writes any run applies
)
Saver = BaseCheckpointSaver[Any]


class Place(NamedTuple):
    """A thread of a checkpointer."""

    saver: Saver
    thread_id: str

    @property
    def config(self) -> RunnableConfig:
        """The config that names the head of the thread."""
        return {"configurable": {"thread_id": self.thread_id, "checkpoint_ns": ""}}


def find_place() -> Place | None:
    """Return the thread of the run in which this is called.

    It is None outside of a run, without a checkpointer, and in a subgraph, whose state is that of
    its parent.
    """
    from langgraph.config import get_config
    from langgraph.runtime import get_runtime

    try:
        config, runtime = get_config(), get_runtime()
    except (RuntimeError, KeyError):  # not within a run
        return None
    info, configurable = runtime.execution_info, config.get("configurable", {})
    if info is None or info.thread_id is None or "|" in info.checkpoint_ns:
        return None
    savers = (value for value in configurable.values() if isinstance(value, BaseCheckpointSaver))
    saver = next(savers, None)
    return None if saver is None else Place(saver, info.thread_id)


def is_answered(messages: Messages) -> bool:
    """Return whether the newest turn has ended, with an answer that calls no tool."""
    last = next((message for message in reversed(messages) if role(message) != "system"), None)
    return last is not None and role(last) == "ai" and not getattr(last, "tool_calls", ())


class Head(NamedTuple):
    """The head of a thread, with the values of its channels."""

    tuple: CheckpointTuple
    values: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The id of its checkpoint."""
        return self.tuple.checkpoint["id"]


async def read_head(place: Place, messages_key: str) -> Head | None:
    """Return the head of a thread, if it has one. The messages may be those of a `DeltaChannel`."""
    from perdure.checkpointers.checkpointer import Checkpointer  # see `is_ready`

    found: CheckpointTuple | None = await calling(place.saver, "get_tuple", place.config)
    if found is None:
        return None
    values = found.checkpoint["channel_values"]
    if isinstance(place.saver, Checkpointer) and not isinstance(values.get(messages_key), list):
        at = {"checkpoint_id": found.checkpoint["id"]}
        deltas = await calling(place.saver, "delta_values", place.thread_id, **at)
        values = {**values, **deltas}
    return Head(found, values)


def is_ready(head: CheckpointTuple) -> bool:
    """Return whether a summary may be stored at a head: no run is under way, nothing waits."""
    from perdure.checkpointers.status import TaskWrite, thread_status  # only if it is needed

    pending = head.pending_writes or ()
    writes = [TaskWrite(task, "", channel, value) for task, channel, value in pending]
    if any(write.task == _NULL_TASK for write in writes):
        return False  # a summary, or what a person gave a run
    versions, seen = head.checkpoint["channel_versions"], head.checkpoint["versions_seen"]
    values = head.checkpoint["channel_values"]
    return thread_status(values, versions, seen, writes).state == "idle"


async def store_summary(
    place: Place, head: Head, messages_key: str, writes: dict[str, Any]
) -> bool:
    """Store what a summary writes at a head, under the thread's lock, if that is still the head.

    Returns whether it was stored. It is dropped if the thread went on or was deleted, or if
    messages were erased or changed.
    """
    saver = place.saver
    from perdure.checkpointers.checkpointer import Checkpointer  # see `is_ready`

    lock = None
    if isinstance(saver, Checkpointer):
        lock = saver.lock(place.thread_id, timeout_s=_LOCK_S)
    if lock is not None:
        await Effect(lock.__enter__, lock.__aenter__)
    try:
        now = await read_head(place, messages_key)
        if now is None or not is_ready(now.tuple) or now.id != head.id:
            return False
        if now.values.get(messages_key) != head.values.get(messages_key):
            return False
        await calling(saver, "put_writes", now.tuple.config, list(writes.items()), _NULL_TASK)
        return True
    finally:
        if lock is not None:
            leave = None, None, None
            await Effect(partial(lock.__exit__, *leave), partial(lock.__aexit__, *leave))


class BackgroundSummaries:
    """The summaries that a node writes after turns, in daemon threads of this process."""

    def __init__(self) -> None:
        self._newest: dict[tuple[int, str], object] = {}  # the newest job of each thread
        self._jobs = set[object]()  # all of them
        self._changed = threading.Condition()
        self._pool, self._pid = ThreadPool(_THREADS, "perdure-summary", lasting=False), os.getpid()

    def schedule(
        self,
        place: Place,
        messages_key: str,
        last_id: str | None,
        summarize_thread: Callable[[Place], object],
    ) -> None:
        """Summarise a thread once the run that stores the message `last_id` has ended.

        A job that an earlier turn scheduled for the thread, and that has not begun, is dropped.
        """
        if self._pid != os.getpid():  # forked: the threads of the parent are not here
            self.__init__()  # type: ignore[misc]
        key, job = (id(place.saver), place.thread_id), object()
        with self._changed:
            self._newest[key] = job
            self._jobs.add(job)

        def is_newest() -> bool:
            return self._newest.get(key) is job

        def summarize_after_run() -> None:
            if _wait_for_end(place, messages_key, last_id, is_newest):
                summarize_thread(place)

        self._pool.submit(partial(self._run_job, key, job, summarize_after_run), awaited=None)

    def _run_job(self, key: tuple[int, str], job: object, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as exc:
            _LOG.warning(
                "no summary of the thread %r was written after its turn: %s; it is tried again "
                "the next time",
                key[1],
                exc,
                exc_info=exc,
            )
        finally:
            with self._changed:
                if self._newest.get(key) is job:
                    del self._newest[key]
                self._jobs.discard(job)
                self._changed.notify_all()

    async def flush(self, timeout_s: float | None) -> bool:
        """Wait until no job is left. Return False if that takes longer."""

        def wait_for_jobs() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: not self._jobs, timeout_s)

        return await Effect(wait_for_jobs, lambda: asyncio.to_thread(wait_for_jobs))


def _wait_for_end(
    place: Place, messages_key: str, last_id: str | None, is_newest: Callable[[], bool]
) -> bool:
    """Wait for the end of a run. Return False if a later turn has a job of its own."""
    until, pause = time.monotonic() + _RUN_ENDS_S, _POLL_S[0]
    while is_newest():
        head = run(read_head(place, messages_key))
        if head is not None and is_ready(head.tuple):
            messages = head.values.get(messages_key)
            if any(getattr(message, "id", None) == last_id for message in messages or ()):
                return True
        if time.monotonic() > until:
            fault = f"the run did not store its last message within {_RUN_ENDS_S:.0f} s"
            raise TimeoutError(fault)
        time.sleep(pause)
        pause = min(2 * pause, _POLL_S[1])
    return False
