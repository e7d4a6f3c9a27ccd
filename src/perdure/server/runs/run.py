"""Hold a run's state in memory. A run is one execution of a graph on a thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from langchain_core.runnables import RunnableConfig

from perdure.errors import PerdureError
from perdure.run_tables.records import LiveRun, RunRow
from perdure.run_tables.runs import ALL_RUNS, EventBatch, RunState
from perdure.run_tables.thread_list import RunStatus
from perdure.server.runs import event_log
from perdure.server.runs.event_log import NUMBERS_PER_RUN, EventLog, LoggedEvent
from perdure.server.runs.run_request import ClientConfig, RunRequest

_LOGGER: Final = logging.getLogger("perdure.server.runs")
CANCEL_ACTIONS: Final = {"interrupt": "interrupt", "rollback": "rollback"}
"""The multitask strategies that cancel earlier runs, each with the action of the cancellation."""


class RunOvertaken(PerdureError):
    """Error stored for a run that was not resumed because another program modified its thread."""


@dataclass(eq=False)
class Run:
    """The in-memory state of a run, which is one execution of a graph on a thread.

    Attributes:
        row: The row of the run, as this process last read or stored it.
        tenant: The tenant of the database, or None.
        user: The user who requested the run.
        request: The request of the client. Its input and config are dropped when the run has ended.
        temporary: Whether the thread is deleted when the run ends.
        protocol: `"run"` if the events go to readers of the run, `"thread"` if they go to readers
            of its thread.
        recorded: Whether the events are stored, so that a client can join the run on any server.
        login: The user as the authentication handler returned it, for the graph.
        may_have_started: Whether the run may have been started before, here or in another process.
        log: The events of the run, unless they go to the log of its thread.
        feed: The log of the thread, or None if the events go to `log`.
        last_stored: The number of the last event that is stored in the database.
        output: The values after the last step, with the interrupts. They are kept while the run is
            executed here, and after that while a request waits for them.
        output_event: The event of `log` whose data is the output, or None if there is none.
        waits_for_answer: Whether the graph has asked a question that is not answered.
        cancelled: The action of the cancellation, or None if the run was not cancelled.
        ownership_lost: Whether this process must not continue the run, because another process may
            own it now, or because this process is shutting down.
        events_dropped: Whether the events are no longer kept in memory.
        changed: Set when the row changes, to wake the task that follows the run.
        row_read_at: When this process last read the row, by `time.monotonic`.
        task: The task that follows the run to its end, or None if the run had ended before.
        failure: The first error of this execution, or None.
        outcome: How this execution ended; `"pending"` until then.
        rolled_back: Whether everything that the run has stored was removed.
        former_status: The stored status of the thread before the run changed it. None if the run
            has not changed it.
        removals: The sequence number of the newest removal from the thread when the run started
            here, or None if it is unknown.
    """

    row: RunRow
    tenant: str | None
    user: str
    request: RunRequest
    temporary: bool = False
    protocol: str = "run"
    recorded: bool = False
    login: Any = None
    may_have_started: bool = False
    log: EventLog = field(default_factory=EventLog)
    feed: EventLog | None = None
    last_stored: int = 0
    output: Any = None
    output_event: LoggedEvent | None = None
    waits_for_answer: bool = False
    cancelled: str | None = None
    ownership_lost: bool = False
    events_dropped: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    row_read_at: float = 0
    task: asyncio.Task[None] | None = None
    failure: Exception | None = None
    outcome: RunState = "pending"
    rolled_back: bool = False
    former_status: RunStatus | None = None
    removals: int | None = None
    _stored_batches: deque[tuple[int, int]] = field(default_factory=deque, init=False)
    """The batches of events that were stored. Each has the number of its last event and its size in
    bytes."""
    _is_task_cancellable: bool = field(default=False, init=False)
    """Whether `_cancel_task` may cancel the task."""
    is_executing: bool = field(default=False, init=False)
    _output_requests: int = field(default=0, init=False)
    """The number of requests that are waiting for the output."""

    @property
    def thread_id(self) -> str:
        """Return the id of the thread."""
        return self.row.live.thread_id

    @property
    def thread_key(self) -> int:
        """Return the database key of the thread."""
        return self.row.live.thread_key

    @property
    def thread_config(self) -> RunnableConfig:
        """Return the config that selects the newest checkpoint of the run's thread."""
        return {"configurable": {"thread_id": self.thread_id, "checkpoint_ns": ""}}

    @property
    def run_id(self) -> str:
        """Return the id of the run."""
        return self.row.live.run_id

    @property
    def graph_name(self) -> str:
        """Return the name of the graph."""
        return self.row.live.graph

    @property
    def status(self) -> str:
        """Return the run's stored status, one of the values of `RunState`."""
        return self.row.live.status

    @property
    def is_delayed(self) -> bool:
        """Return whether the run is scheduled to start in the future."""
        return self.status == "delayed"

    @property
    def error(self) -> Mapping[str, str] | None:
        """Return the stored error if the run failed, or None."""
        return self.row.error  # type: ignore[no-any-return]

    @property
    def is_task_done(self) -> bool:
        """Return True if the run has no asyncio task in this process, or if that task is done.

        When a server shuts down, the task of a run may end although the run itself is unfinished;
        see `status`.
        """
        return self.task is None or self.task.done()

    @property
    def may_be_executing_in_other_process(self) -> bool:
        """Return whether another process might be executing the run.

        The result is still True if another process has ended the run, but this process has not read
        the run's new status yet.
        """
        return self.may_have_started and not self.is_executing and not self.is_task_done

    @property
    def events(self) -> EventLog:
        """Return the event log to which the run's events are added."""
        return self.log if self.feed is None else self.feed

    @property
    def event_number_before_first_event(self) -> int:
        """Return the event number immediately before the run's first event.

        All event numbers above the returned number belong to this run or to later runs.
        """
        return 0 if self.feed is None else self.row.live.seq * NUMBERS_PER_RUN

    @property
    def seq_range(self) -> tuple[int, int]:
        """Return the lowest and highest `seq` among the runs whose events are in the event log."""
        return (self.row.live.seq,) * 2 if self.feed is None else ALL_RUNS

    def build_unstored_event_batch(
        self, closing_events: Sequence[LoggedEvent] = (), max_bytes: int | None = None
    ) -> EventBatch | None:
        """Return a batch of the events that have not been stored yet, or None if there are none.

        Args:
            closing_events: Events that follow those of the log.
            max_bytes: The maximum size of the batch, in bytes. None means no limit.
        """
        if not self.recorded:
            return None
        log = self.events
        events = [*log.list_events_after(self.last_stored, max_bytes), *closing_events]
        last_lost = (
            log.last_lost
            if log.last_lost > max(self.event_number_before_first_event, self.last_stored)
            else 0
        )
        if not events:
            # If events were dropped before they were stored, an empty batch records in the database
            # that events were lost.
            return EventBatch(last_lost, last_lost, [], last_lost) if last_lost else None
        entries = [(event.kind, event.sse_frame) for event in events]
        outdated_until = self._find_last_stored_event_number_to_delete(
            sum(event.size for event in events)
        )
        return EventBatch(
            events[0].number - 1, events[-1].number, entries, max(last_lost, outdated_until)
        )

    def _find_last_stored_event_number_to_delete(self, new_event_bytes: int) -> int:
        """Return the event number up to which stored events are deleted to make room for new ones.

        The run's oldest stored events are deleted until the total size of its stored and new events
        is at most `event_log.RETAINED_BYTES`.

        Return 0 if no stored event is deleted.

        Args:
            new_event_bytes: The size of the new events, in bytes.
        """
        total = new_event_bytes + sum(batch_size for _, batch_size in self._stored_batches)
        last_removable = 0
        for last_number, batch_size in self._stored_batches:
            if total <= event_log.RETAINED_BYTES:
                break
            total, last_removable = total - batch_size, last_number
        return last_removable

    def record_stored_batch(self, batch: EventBatch) -> None:
        """Record that a batch of events has been stored in the database."""
        self.last_stored = batch.last_number
        self.events.last_stored = max(self.events.last_stored, batch.last_number)
        self._stored_batches.append(
            (batch.last_number, sum(len(frame) for _, frame in batch.events))
        )
        while self._stored_batches and self._stored_batches[0][0] <= batch.delete_until:
            self._stored_batches.popleft()

    def cancel(self, cancel_action: str = "interrupt") -> None:
        """Stop the run. The action `rollback` also deletes everything that the run has stored."""
        # A run that has not started yet checks the `cancelled` attribute when it starts.
        if self.cancelled is None or cancel_action == "rollback":
            self.cancelled = cancel_action
        self.changed.set()
        self._cancel_task()

    def lose_ownership(self) -> None:
        """Stop executing the run in this process; see `ownership_lost`."""
        self.ownership_lost = True
        self._cancel_task()

    def _cancel_task(self) -> None:
        """Cancel the run's task if cancellation is currently allowed.

        See `allow_task_cancellation_and_record_run_outcome`.
        """
        if self._is_task_cancellable and self.task is not None:
            self._is_task_cancellable = False
            # Skip the cancellation if this code runs inside the run's own task. The run's task
            # later checks the attributes `cancelled` and `ownership_lost`.
            if self.task is not asyncio.current_task():
                self.task.cancel()

    def replace_cached_row(self, new_row: RunRow) -> None:
        """Replace the in-memory copy of the run's database row.

        If the new row shows that the run was cancelled or no longer belongs to this process, this
        process stops executing the run.
        """
        previous, self.row, self.row_read_at = self.row.live, new_row, time.monotonic()
        self.may_have_started = self.may_have_started or new_row.live.owner != previous.owner
        self.changed.set()
        if not self.is_executing:
            return
        if new_row.live.status != "running" or new_row.live.owner != previous.owner:
            self.lose_ownership()
        elif new_row.live.cancel_action:
            self.cancel(new_row.live.cancel_action)

    def record_stored_end(self, live: LiveRun, error: dict[str, str] | None) -> None:
        """Update the in-memory row, after the run's outcome was stored in the database.

        Args:
            live: The live part of the row that was stored when the execution started.
            error: The error that clients receive if the run failed, or None.
        """
        self.row = self.row._replace(
            live=live._replace(status=self.outcome),
            updated_at=time.time(),
            error=error,
            request=None,
        )

    async def wait_until_ended(self) -> None:
        """Wait until `is_task_done` is True.

        If the waiting caller is cancelled, the run continues.
        """
        if self.task is not None:
            await asyncio.wait([self.task])

    @contextlib.contextmanager
    def mark_executing_during_block(self) -> Iterator[None]:
        """Mark the run as executing in this process for the duration of the `with` block.

        If this process has executed the run before, the outcome of that execution is discarded.
        """
        self.ownership_lost, self.failure, self.outcome = False, None, "pending"
        self.cancelled = self.cancelled or self.row.live.cancel_action
        self.is_executing = True
        try:
            yield
        finally:
            self.is_executing, self.may_have_started = False, True

    @contextlib.contextmanager
    def allow_task_cancellation_and_record_run_outcome(self) -> Iterator[None]:
        """Allow the run's asyncio task to be cancelled while the `with` block is running.

        If the block raises an error or is cancelled, the run's outcome is recorded in the `Run`
        object. If the `with` block raises an error or is cancelled, the resulting exception is
        suppressed.
        """
        self._is_task_cancellable = True
        try:
            yield
        except asyncio.CancelledError:
            if self.task is not None:
                self.task.uncancel()
            self.outcome = "interrupted"
        except Exception as exc:
            # Log only the type of the error, because its text may contain the user's content.
            location = RuntimeError(type(exc).__name__).with_traceback(exc.__traceback__)
            _LOGGER.warning("run %s failed", self.run_id, exc_info=location)
            self.record_first_failure(exc)
        finally:
            self._is_task_cancellable = False

    def record_first_failure(self, exc: Exception) -> None:
        """Record that the execution of the run has failed.

        If the method is called again for the same execution, the first error is kept and the later
        one is ignored. The error's traceback is dropped, because its frames would keep the graph's
        state in memory.
        """
        self.outcome, self.failure = "error", self.failure or _remove_tracebacks(exc)

    def record_end_of_graph(self) -> None:
        """Record that the graph has stopped without an error, at its end or at an interrupt."""
        self.outcome = "interrupted" if self.waits_for_answer else "success"

    def mark_interrupted(self) -> None:
        """Mark the run as interrupted by a cancellation, even if its graph has ended or failed."""
        self.outcome, self.failure = "interrupted", None

    def mark_rolled_back(self) -> None:
        """Mark the run as rolled back, because everything that the run has stored was removed."""
        self.rolled_back = True
        self.mark_interrupted()

    def mark_interrupted_by_thread_change(self) -> None:
        """Mark the run as interrupted because another program modified its thread."""
        self.outcome = "interrupted"
        self.failure = RunOvertaken(
            f"thread {self.thread_id!r} was changed by another program after the server of this "
            "run had stopped; the run is not continued, so that its input is not applied twice"
        )

    def raise_if_stopped(self) -> None:
        """Raise `CancelledError` if the run was cancelled or `ownership_lost` is True."""
        if self.cancelled or self.ownership_lost:
            raise asyncio.CancelledError

    def drop_events_and_unused_output(self) -> None:
        """Drop the run's events, and also drop its output unless a request is waiting for it.

        Clients that have already started to read the run's event log can continue to read it.
        """
        self.events_dropped, self.output_event, self.log = True, None, EventLog()
        self.log.close()
        self.free_output()

    def discard_output(self) -> None:
        """Discard the run's output, because the database may contain a different output."""
        self.output = self.output_event = None

    def free_input(self) -> None:
        """Free the run's input and config, which are no longer needed after the run has ended."""
        self.request = self.request.model_copy(
            update={"input": None, "command": None, "context": None, "config": ClientConfig()}
        )

    def free_output(self) -> None:
        """Free the run's output, unless a request is waiting for it."""
        if not self._output_requests:
            self.output = None

    @contextlib.contextmanager
    def retain_output_during_block(self) -> Iterator[None]:
        """Keep the run's output in memory for the duration of the `with` block.

        If no request uses this context manager, the run's output is freed when the run ends.
        """
        self._output_requests += 1
        try:
            yield
        finally:
            self._output_requests -= 1
            if self.is_task_done:
                self.free_output()


def _remove_tracebacks(exc: Exception) -> Exception:
    """Remove the tracebacks of an error, of its causes, and of the errors in an exception group."""
    visited, pending = set[int](), list[BaseException | None]([exc])
    while pending:
        error = pending.pop()
        if error is not None and id(error) not in visited:
            visited.add(id(error))
            error.__traceback__ = None
            pending += [error.__cause__, error.__context__, *getattr(error, "exceptions", ())]
    return exc


def describe_error(exc: Exception) -> dict[str, str]:
    """Return an error's type and message in the format that is sent to clients."""
    return {"error": type(exc).__name__, "message": str(exc)[:2000]}


def restore_run_request_from_row(row: RunRow) -> RunRequest:
    """Return the request of a stored run.

    Once a run has ended, its row contains the run's input only if the run failed before the input
    was stored in the thread. The returned request contains the input only if the run is active, or
    failed before storing the input.
    """
    request_fields = (row.request or {}).get("request", {})
    return RunRequest.model_validate({**row.details, **request_fields})


def build_run_json(row: RunRow) -> dict[str, Any]:
    """Convert a stored run to the format of LangGraph's API."""
    live = row.live
    return {
        "run_id": live.run_id,
        "thread_id": live.thread_id,
        "assistant_id": row.details["assistant_id"],
        "created_at": datetime.fromtimestamp(row.created_at, UTC),
        "updated_at": datetime.fromtimestamp(row.updated_at, UTC),
        "status": "pending" if live.status == "delayed" else live.status,
        "metadata": {**row.details["metadata"], "graph_id": live.graph},
        "multitask_strategy": row.details["multitask_strategy"],
    }


def add_interrupts_to_output(output: Any, interrupts: Sequence[Any]) -> Any:
    """Add a graph's pending interrupts to its output under the key `__interrupt__`.

    Args:
        output: The output of the graph: a mapping or an object with attributes.
        interrupts: The interrupts of the graph. If there are none, the output is returned
            unchanged.
    """
    fields = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    return {**fields, "__interrupt__": [*interrupts]} if interrupts else output
