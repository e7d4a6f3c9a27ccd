"""A run of a graph on a thread, as a process knows it."""

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

from perdure.checkpointers.records import RunRow
from perdure.checkpointers.runs import ALL_RUNS, EventBatch, RunState
from perdure.checkpointers.thread_list import RunStatus
from perdure.errors import PerdureError
from perdure.server import run_log
from perdure.server.run_log import NUMBERS_PER_RUN, Log, LoggedEvent
from perdure.server.run_request import ClientConfig, RunRequest

_LOGGER: Final = logging.getLogger("perdure.server.runs")
CANCEL_ACTIONS: Final = {each: each for each in ("interrupt", "rollback")}
"""How the runs before one are cancelled, by its strategy."""


class RunOvertaken(PerdureError):
    """Another program changed a thread before a run of it could be continued."""


@dataclass(eq=False)
class Run:
    """A run of a graph on a thread, as this process knows it.

    Attributes:
        row: The row of the run as it was last stored.
        temporary: Whether the thread is deleted when the run ends.
        protocol: Whether its events go to readers of the run or to readers of its thread.
        recorded: Whether its events are stored, so that it can be joined again on any server.
        login: The user, for the graph.
        begun: Whether it may have started before, in this process or in another.
        log: Its events, unless they go to the log of its thread.
        feed: The log of the thread, or None if the events go to `log`.
        stored: The number of the last stored event.
        output: The values after its last step, with its interrupts. They are kept while the run is
            executed here, and after that while a request waits for them.
        output_event: The event of `log` whose data is the output, or None if there is none.
        waits: Whether it waits for an answer.
        unheard: Whether it failed before its input was stored. The input is kept to be sent again.
        carried_out: The action of the cancellation that the clean-up of the thread has carried out,
            or None.
        rolled_back: Whether everything that the run has stored was removed.
        former_status: The stored status of the thread before the run changed it. None if the run
            has not changed it.
        removals: The number of erasures from the thread when the run started here, or None.
        tidied: Whether the thread was cleaned up after the run.
        cancelled: The action of its cancellation, if it was cancelled.
        lost: Whether the run no longer belongs to this process.
        forgotten: Whether its events are no longer kept.
        told_at: When this process last read the stored row, by `time.monotonic`.
        task: The task that follows it to its end, or None if it had already ended.
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
    log: Log = field(default_factory=Log)
    feed: Log | None = None
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
    has_unstored_input: bool = False
    carried_out: str | None = None
    rolled_back: bool = False
    former_status: RunStatus | None = None
    removals: int | None = None
    thread_is_clean: bool = False
    _stored_batches: deque[tuple[int, int]] = field(default_factory=deque, init=False)
    """The stored batches: the number of the last event of each, and its bytes."""
    _is_playing: bool = field(default=False, init=False)
    _is_executing: bool = field(default=False, init=False)
    _output_requests: int = field(default=0, init=False)

    @property
    def thread_id(self) -> str:
        """Whose run it is."""
        return self.row.live.thread_id

    @property
    def thread_key(self) -> int:
        """The key of its thread."""
        return self.row.live.thread_key

    @property
    def run_id(self) -> str:
        """Its id."""
        return self.row.live.run_id

    @property
    def graph_name(self) -> str:
        """The name of its graph."""
        return self.row.live.graph

    @property
    def status(self) -> str:
        """`RunState`."""
        return self.row.live.status

    @property
    def is_delayed(self) -> bool:
        """Whether its time has not come."""
        return self.status == "delayed"

    @property
    def error(self) -> Mapping[str, str] | None:
        """Why it failed."""
        return self.row.error  # type: ignore[no-any-return]

    @property
    def has_ended(self) -> bool:
        """Whether all of it is done, its thread free for the next."""
        return self.task is None or self.task.done()

    @property
    def is_executing(self) -> bool:
        """Whether it is under way here."""
        return self._is_executing

    @property
    def is_elsewhere(self) -> bool:
        """Whether it may be under way in another process, or may have been until now."""
        return self.may_have_started and not self._is_executing and not self.has_ended

    @property
    def events(self) -> Log:
        """Where its events go."""
        return self.log if self.feed is None else self.feed

    @property
    def number_before_events(self) -> int:
        """The number before that of its first event."""
        return 0 if self.feed is None else self.row.live.seq * NUMBERS_PER_RUN

    @property
    def seq_range(self) -> tuple[int, int]:
        """The runs that its events are read with, from a `seq` to one."""
        return (self.row.live.seq,) * 2 if self.feed is None else ALL_RUNS

    def build_batch(
        self, closing: Sequence[LoggedEvent] = (), limit: int | None = None
    ) -> EventBatch | None:
        """Return the events that are not stored yet, or None if there are none.

        Args:
            closing: Events that follow those of the log.
            limit: The most bytes of events in the batch; None means no limit.
        """
        if not self.recorded:
            return None
        log = self.events
        told = [*log.events_after(self.last_stored, limit), *closing]
        lost = (
            log.last_lost if log.last_lost > max(self.number_before_events, self.last_stored) else 0
        )
        if not told:  # events that were dropped before they were stored are missing from now on
            return EventBatch(lost, lost, [], lost) if lost else None
        entries = [(event.kind, event.frame) for event in told]
        outdated = self._find_last_outdated(sum(event.size for event in told))
        return EventBatch(told[0].number - 1, told[-1].number, entries, max(lost, outdated))

    def _find_last_outdated(self, size: int) -> int:
        """Return the number up to which stored events are removed if more of a size are stored."""
        total, number = size + sum(each for _, each in self._stored_batches), 0
        for until, each in self._stored_batches:
            if total <= run_log.RETAINED_BYTES:
                break
            total, number = total - each, until
        return number

    def note_stored(self, batch: EventBatch) -> None:
        """Note that a batch is stored."""
        self.last_stored = batch.last_number
        self.events.last_stored = max(self.events.last_stored, batch.last_number)
        self._stored_batches.append(
            (batch.last_number, sum(len(frame) for _, frame in batch.events))
        )
        while self._stored_batches and self._stored_batches[0][0] <= batch.delete_until:
            self._stored_batches.popleft()

    def cancel(self, action: str = "interrupt") -> None:
        """Stop it; `rollback` also removes what it has stored."""
        if self.cancelled is None or action == "rollback":  # seen as it begins, if it has not
            self.cancelled = action
        self.changed.set()
        self._cancel_task()

    def lose_ownership(self) -> None:
        """Stop it here; who has it now goes on with it."""
        self.ownership_lost = True
        self._cancel_task()

    def _cancel_task(self) -> None:
        if self._is_playing and self.task is not None:
            self._is_playing = False
            if self.task is not asyncio.current_task():  # else it goes on, and looks at it
                self.task.cancel()

    def update_row(self, row: RunRow) -> None:
        """Learn how it is stored."""
        before, self.row, self.row_read_at = self.row.live, row, time.monotonic()
        self.may_have_started = self.may_have_started or row.live.owner != before.owner
        self.changed.set()
        if not self._is_executing:
            return
        if row.live.status != "running" or row.live.owner != before.owner:
            self.lose_ownership()
        elif row.live.cancel_action:
            self.cancel(row.live.cancel_action)

    async def wait_until_ended(self) -> None:
        """Wait for its end; if the waiting is cancelled, it goes on."""
        if self.task is not None:
            await asyncio.wait([self.task])

    @contextlib.contextmanager
    def mark_executing(self) -> Iterator[None]:
        """While it lasts, the run is under way here."""
        self.ownership_lost = self.has_unstored_input = self.thread_is_clean = False
        self.failure, self.outcome, self.carried_out = None, "pending", None
        self.cancelled = self.cancelled or self.row.live.cancel_action
        self._is_executing = True
        try:
            yield
        finally:
            self._is_executing, self.may_have_started = False, True

    @contextlib.contextmanager
    def mark_playing(self) -> Iterator[None]:
        """While it lasts, the run can be cancelled; what ends it is its outcome."""
        self._is_playing = True
        try:
            yield
        except asyncio.CancelledError:
            if self.task is not None:
                self.task.uncancel()
            self.outcome = "interrupted"
        except Exception as exc:
            where = RuntimeError(type(exc).__name__).with_traceback(exc.__traceback__)
            _LOGGER.warning("run %s failed", self.run_id, exc_info=where)  # its text is content
            self.set_failure(exc)
        finally:
            self._is_playing = False

    def set_failure(self, exc: Exception) -> None:
        """It ends by an error, the first one if there are several.

        The traceback is dropped, because its frames hold the state of the graph.
        """
        self.outcome, self.failure = "error", self.failure or _without_frames(exc)

    def set_overtaken(self) -> None:
        """End it as interrupted, because another program has changed the thread meanwhile."""
        self.outcome = "interrupted"
        self.failure = RunOvertaken(
            f"thread {self.thread_id!r} was changed by another program after the server of this "
            "run had stopped; the run is not continued, so that its input is not applied twice"
        )

    def raise_if_stopped(self) -> None:
        """Go no further if it was stopped before it played."""
        if self.cancelled or self.ownership_lost:
            raise asyncio.CancelledError

    def drop_events(self) -> None:
        """Drop the events, and the output unless a request waits for it.

        Present readers of the events keep them.
        """
        self.events_dropped, self.output_event, self.log = True, None, Log()
        self.log.close()
        self.free_output()

    def free_input(self) -> None:
        """Drop the input and the config of the graph after the graph has ended."""
        dropped = {"input": None, "command": None, "context": None, "config": ClientConfig()}
        self.request = self.request.model_copy(update=dropped)

    def free_output(self) -> None:
        """Drop the output after the end of the run, unless a request waits for it."""
        if not self._output_requests:
            self.output = None

    @contextlib.contextmanager
    def awaiting_output(self) -> Iterator[None]:
        """Keep the output for a request until the block ends, even if the run ends before."""
        self._output_requests += 1
        try:
            yield
        finally:
            self._output_requests -= 1
            if self.has_ended:
                self.free_output()

    def build_json(self) -> dict[str, Any]:
        """As langgraph's clients know it."""
        return build_run_json(self.row)


def _without_frames(exc: Exception) -> Exception:
    """Remove the tracebacks of an error, and of those that it was raised from."""
    seen, left = set[int](), list[BaseException | None]([exc])
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            left += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]
    return exc


def describe_error(exc: Exception) -> dict[str, str]:
    """What clients are told of a failure."""
    return {"error": type(exc).__name__, "message": str(exc)[:2000]}


def restore_request(row: RunRow) -> RunRequest:
    """What it was asked, if that is kept."""
    asked = (row.request or {}).get("request", {})
    return RunRequest.model_validate({**row.details, **asked})


def build_run_json(row: RunRow) -> dict[str, Any]:
    """A run as langgraph's clients know it."""
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


def add_interrupts(values: Any, questions: Sequence[Any]) -> Any:
    """Values with what interrupted their graph; its state may be an object."""
    fields = values if isinstance(values, Mapping) else getattr(values, "__dict__", {})
    return {**fields, "__interrupt__": [*questions]} if questions else values
