"""Execute a database's runs in this process, and coordinate with servers that share the database.

Even if several servers share the database, only one run per thread is executed at a time. Each
server process holds a liveness lock that is named after the process. If a process's liveness lock
is free, the other processes assume that the process has died. When a process has died, one of the
other processes takes over its runs and resumes them from their last checkpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Collection
from contextvars import Context
from itertools import groupby
from operator import attrgetter
from typing import Any, Final
from uuid import uuid4

from pydantic import ValidationError

from perdure.errors import (
    ConfigurationError,
    CorruptRecord,
    PerdureError,
    StorageUnavailable,
)
from perdure.run_tables.person_rows import SERVER_LOCK_PREFIX
from perdure.run_tables.records import LiveRun
from perdure.run_tables.runs import ALL_RUNS, LIVE_STATES, RunTable
from perdure.server.databases import OpenDatabase
from perdure.server.http.auth_file import HandlerUser
from perdure.server.runs.erasure_counts import ErasureCounts
from perdure.server.runs.run import (
    CANCEL_ACTIONS,
    Run,
    add_interrupts_to_output,
    describe_error,
    restore_run_request_from_row,
)
from perdure.server.runs.run_events import StoredEvents
from perdure.server.runs.run_execution import RunExecution
from perdure.server.runs.shared_run_state import SharedRunState
from perdure.server.threads import Threads

RETAINED_ENDED_RUNS: Final = 50
"""The number of ended runs of each database whose events this process keeps for readers."""
SWEEP_S: Final = 0.5
"""Seconds between two reads of the rows of runs. A read finds runs to take over, cancellations, and
runs that have ended in other processes."""
FAST_SWEEP_S: Final = 0.1
"""Seconds between two reads of the rows of runs while a request to this process waits for a run of
another process."""
CLEANUP_INTERVAL_S: Final = 60
"""Seconds between two removals of old events and of expired threads."""
EXPIRED_PER_SWEEP: Final = 20
"""The maximum number of expired threads that one sweep deletes, so that the sweep does not take
long."""
RETRY_PAUSE_S: Final = 0.05
"""Seconds before this process tries again to get a liveness lock, or checks again whether cancelled
runs have ended."""
DUE_PER_SWEEP: Final = 100
"""The maximum number of due delayed runs that one sweep queues before it looks at other runs."""
_LOGGER: Final = logging.getLogger("perdure.server.runs")


class RunQueue:
    """Manages this process's runs in one database.

    While a client of this process reads the events of a run that another process executes, this
    object also tracks that run.

    Attributes:
        owner: The name of this process in the rows of runs. It is `""` while the process does not
            hold a liveness lock, and therefore owns no runs.
        runs_by_id: The live runs and the runs that ended most recently, keyed by run id.
        erasures: The number of erasures in each thread whose events are read.
        ready: Set when the process has its liveness lock, or cannot get one from this database.
        task: The task that holds the liveness lock and periodically reads the rows of runs.
        due_work: The newest task that starts crons and webhooks. It may have ended.
    """

    def __init__(
        self, shared_state: SharedRunState, tenant: str | None, database: OpenDatabase
    ) -> None:
        self.shared_state, self.tenant, self.database = shared_state, tenant, database
        self.saver, self.table = database.saver, RunTable(database.saver)
        self.events, self.erasures = StoredEvents(self.table), ErasureCounts(self.table)
        self.owner, self.runs_by_id = "", dict[str, Run]()
        # Former names of this process. When the process loses its liveness lock, it acquires a new
        # lock under a new name.
        self._former_owners = set[str]()
        self.ready, self._wake = asyncio.Event(), asyncio.Event()
        self._lock: Any = None
        self._ended_runs: deque[Run] = deque()
        self._pause_s, self._cleaned_up_at = SWEEP_S, 0.0
        self.task = asyncio.create_task(
            self._hold_liveness_lock_and_reconcile_runs(), context=Context()
        )
        self.due_work = asyncio.create_task(asyncio.sleep(0), context=Context())

    @property
    def is_database_open(self) -> bool:
        """Return whether the database is still open for the tenant."""
        return self.shared_state.databases.is_open(self.tenant, self.database)

    # -- liveness

    async def _hold_liveness_lock_and_reconcile_runs(self) -> None:
        """Hold this process's liveness lock, and periodically process the runs in the database.

        At regular intervals, runs are started, taken over, cancelled or finished according to their
        rows in the database. While a process holds its liveness lock, other processes know that the
        process is alive.
        """
        while True:
            owner = str(uuid4())
            try:
                async with self.saver.lock(
                    f"{SERVER_LOCK_PREFIX}{owner}", timeout_s=0
                ) as self._lock:
                    self.owner = owner
                    self.ready.set()
                    while True:
                        await self._reconcile_runs_with_stored_rows()
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(self._pause_s):
                                await self._wake.wait()
                        self._wake.clear()
                        self._lock.raise_if_lost()
            except ConfigurationError:
                self.ready.set()
                raise
            except Exception as exc:
                if not self.is_database_open:
                    # The error was caused by closing the idle database, so end the task.
                    return
                # Log only the type of the error, because its message may contain user content.
                _LOGGER.warning(
                    "an error occurred (%s); this process stops its runs and loads them again",
                    type(exc).__name__,
                )
                self._stop_runs_after_lost_lock()
            await asyncio.sleep(RETRY_PAUSE_S)

    def _stop_runs_after_lost_lock(self) -> None:
        """Stop all runs of this process, because its liveness lock was lost.

        Without the liveness lock, other processes assume that this process is dead, and may already
        be executing its runs.
        """
        self._former_owners |= {self.owner} - {""}
        self.owner = ""
        for run in self.runs_by_id.values():
            run.lose_ownership()

    def stop_runs_if_lock_is_lost(self) -> bool:
        """Return whether this process still holds its liveness lock.

        If the lock is lost, stop all runs.
        """
        try:
            self._lock.raise_if_lost()
        except StorageUnavailable:
            self._stop_runs_after_lost_lock()
            self._wake.set()
        return bool(self.owner)

    async def _reconcile_runs_with_stored_rows(self) -> None:
        """Start, take over, cancel and finish runs according to their rows in the database."""
        self._start_task_for_due_crons_and_webhooks()
        read_at = time.monotonic()
        live_runs, served = await self.table.list_live_runs(), {*self.shared_state.graphs}
        # `list_live_runs` does not include a delayed run until the run is due.
        due_delayed_runs = [
            run for run in live_runs if run.status == "delayed" and run.graph in served
        ]
        has_changed = any(
            [
                await self._queue_delayed_run_and_report_change(run)
                for run in due_delayed_runs[:DUE_PER_SWEEP]
            ]
        )
        live_runs = [run for run in live_runs if run.status != "delayed"]
        # Any server can end a cancelled run, even if it does not serve the run's graph.
        executable = [run for run in live_runs if run.graph in served or run.cancel_action]
        of_others = [run for run in executable if run.owner != self.owner]
        for owner, runs in groupby(sorted(of_others, key=attrgetter("owner")), attrgetter("owner")):
            has_changed |= await self._take_over_runs_if_owner_died(owner, [*runs])
        # Only the oldest live run of each thread may be executed now. The other live runs of the
        # thread have to wait until it has ended.
        next_runs = {run.thread_key: run for run in reversed(live_runs)}.values()
        if any((run.status, run.owner) == ("pending", self.owner) for run in next_runs):
            await self.table.claim_runs(self.owner)
            has_changed = True
        if has_changed:
            read_at = time.monotonic()
            live_runs = await self.table.list_live_runs()
        for live_run in live_runs:
            if live_run.owner == self.owner and live_run.run_id not in self.runs_by_id:
                await self._load_run_or_end_with_error(live_run)
        live_by_id = {live_run.run_id: live_run for live_run in live_runs}
        for run in [*self.runs_by_id.values()]:
            if not run.is_task_done:
                await self.update_run_from_row(run, live_by_id.get(run.run_id), read_at)
        # Clients of this process may be reading runs that other processes execute. Copy the stored
        # events of other processes' runs from the database to the in-memory event logs.
        event_logs = self.shared_state.get_event_logs_with_readers_by_thread_id(self.tenant)
        executing_here = {run.thread_id for run in self.runs_by_id.values() if run.is_executing}
        for thread_id in event_logs.keys() - executing_here:
            await self.events.append_stored_events_of_other_processes(
                event_logs[thread_id], event_logs[thread_id].thread_key, ALL_RUNS
            )
        awaited = {
            run.thread_id for run in self.runs_by_id.values() if not run.is_task_done
        } | event_logs.keys()
        has_waiting_readers = any(
            run.owner != self.owner and run.thread_id in awaited for run in live_runs
        )
        self._pause_s = (
            FAST_SWEEP_S
            if has_waiting_readers or len(due_delayed_runs) > DUE_PER_SWEEP
            else SWEEP_S
        )
        if time.monotonic() - self._cleaned_up_at > CLEANUP_INTERVAL_S:
            has_more = False
            with contextlib.suppress(PerdureError):
                # Ignore errors while expired threads and old events are deleted, so that a failed
                # deletion does not delay any runs.
                has_more = await self.threads.delete_expired(EXPIRED_PER_SWEEP) == EXPIRED_PER_SWEEP
                await self.table.delete_old_events()
            self._cleaned_up_at = self._cleaned_up_at if has_more else time.monotonic()

    def _start_task_for_due_crons_and_webhooks(self) -> None:
        """Start crons and webhooks in their own task, so that slow auth handlers do not delay runs.

        No new task is started if the previous task for crons and webhooks has not ended yet.
        """
        if self.due_work.done():
            if exc := self.due_work.exception():
                _LOGGER.warning("crons and webhooks could not be started (%s)", type(exc).__name__)
            self.due_work = asyncio.create_task(self._start_due_crons_and_webhooks())

    async def _start_due_crons_and_webhooks(self) -> None:
        """Send due webhooks, and start due crons unless the server is shutting down."""
        start_due_crons = self.shared_state.start_due_crons
        if start_due_crons is not None and not self.shared_state.is_draining:
            await start_due_crons(self.tenant, self.saver)
        await self.shared_state.webhooks.start_due_deliveries(self.saver)

    def wake(self) -> None:
        """Start the next sweep immediately."""
        self._wake.set()

    async def _queue_delayed_run_and_report_change(self, live: LiveRun) -> bool:
        """Queue a delayed run that is due, and return True so that the caller rereads the runs.

        If the row of the run cannot be read, cancel the run.
        """
        try:
            for row in await self.table.list_runs(live.thread_id, live.run_id):
                await self.table.queue_delayed_run_that_is_due(
                    live, self.owner, CANCEL_ACTIONS.get(row.details["multitask_strategy"])
                )
        except CorruptRecord as exc:
            _LOGGER.warning("run %s cannot be read (%s)", live.run_id, type(exc).__name__)
            await self.table.cancel_runs_and_list_their_ids(
                live.thread_id, live.run_id, "interrupt"
            )
        return True

    async def _load_run_or_end_with_error(self, live: LiveRun) -> None:
        """Load a run that this process owns but has not loaded yet.

        If the row of the run cannot be read, end the run with an error.
        """
        try:
            await self.get_run(live.thread_id, live.run_id)
        except (CorruptRecord, ValidationError) as exc:
            # If a run cannot be loaded, this process must still execute the other runs in the
            # database.
            _LOGGER.warning("run %s cannot be read (%s)", live.run_id, type(exc).__name__)
            await self.table.end_run(live, "error", describe_error(exc), known_cancel="rollback")

    async def _take_over_runs_if_owner_died(self, owner: str, runs: Collection[LiveRun]) -> bool:
        """Take over the runs of the process `owner` if that process has died.

        Return True if this process has taken over the runs, or False if `owner` is still alive.

        A process is considered dead if its liveness lock is free. If `owner` is `""`, no process
        owns the runs. If `owner` is a name that this process used earlier, no other process owns
        the runs. In both cases, no liveness lock is checked.
        """
        if owner in self._former_owners:
            # This process was registered under the name `owner` until the process lost its liveness
            # lock.
            await self.table.release_runs(owner)
            runs, owner = [run._replace(owner="") for run in runs], ""
        if not owner:
            await self.table.claim_runs(self.owner, [*runs])
            return True
        try:
            async with self.saver.lock(f"{SERVER_LOCK_PREFIX}{owner}", timeout_s=0):
                await self.table.claim_runs(self.owner, [*runs])
        except StorageUnavailable as exc:
            if not isinstance(exc.__cause__, TimeoutError):
                raise
            return False
        return True

    # -- single runs

    async def update_run_from_row(
        self, run: Run, stored: LiveRun | None = None, read_at: float | None = None
    ) -> None:
        """Update a run from its row.

        If the run's row no longer exists, for example because the run was rolled back or its thread
        was deleted, the run's status becomes `"interrupted"`.

        Args:
            run: A run that this process has loaded.
            stored: The live part of the row, or None to read the row now.
            read_at: A time before `stored` was read, by `time.monotonic`. None means now.
        """
        read_at = read_at or time.monotonic()
        if stored is not None:
            row = run.row._replace(live=stored)
        else:
            rows = await self.table.list_runs(run.thread_id, run.run_id)
            ended_row = run.row._replace(live=run.row.live._replace(status="interrupted"))
            row = rows[0] if rows else ended_row
            if not rows and self.runs_by_id.get(run.run_id) is run:
                del self.runs_by_id[run.run_id]
        if run.log.has_readers and run.may_be_executing_in_other_process:
            await self.events.append_stored_events_of_other_processes(
                run.log, run.thread_key, run.seq_range
            )
        # If the run ended while its row was being read, the row in memory is already final, so keep
        # it.
        if run.row.live.status not in LIVE_STATES:
            return
        # If the in-memory row was replaced after `read_at`, `row` may be outdated, so read the
        # database again.
        if run.row_read_at >= read_at:
            await self.update_run_from_row(run)
        else:
            run.replace_cached_row(row)

    async def get_run(self, thread_id: str, run_id: str) -> Run | None:
        """Return a run of a thread, or None if the thread has no run with this id.

        If the run is live and this process has not loaded it yet, start a task for it.
        """
        run = self.runs_by_id.get(run_id)
        if run is not None and run.thread_id == thread_id:
            await self.update_run_from_row(run)
            return self.runs_by_id.get(run_id)
        rows = await self.table.list_runs(thread_id, run_id)
        if not rows:
            return None
        row, request, stored = rows[0], restore_run_request_from_row(rows[0]), rows[0].request or {}
        options = {
            name: stored[name] for name in ("temporary", "protocol", "recorded") if name in stored
        }
        login = HandlerUser(stored["login"]) if stored.get("login") is not None else None
        run = Run(
            row,
            self.tenant,
            row.details["user"],
            request,
            login=login,
            may_have_started=True,
            **options,
        )
        if row.live.status in LIVE_STATES:
            return self.runs_by_id.get(run_id) or self.start_run_task(run, Context())
        run.drop_events_and_unused_output()
        return run

    def start_run_task(self, run: Run, context: Context | None = None) -> Run:
        """Start a task that executes a run, or that waits while another process executes it."""
        self.runs_by_id[run.run_id] = run
        run.task = asyncio.create_task(self._execute_or_wait_until_run_ends(run), context=context)
        self.shared_state.register_run(run)
        if (run.row.live.status, run.row.live.owner) != ("running", self.owner):
            self.wake()
        return run

    async def _execute_or_wait_until_run_ends(self, run: Run) -> None:
        """Execute the run while this process owns it, and wait while another process owns it."""
        ended_here = False
        with self.shared_state.databases.keep_open(self.tenant):
            try:
                while (
                    live := run.row.live
                ).status in LIVE_STATES and not self.shared_state.is_closed:
                    if (live.status, live.owner) == ("running", self.owner):
                        await RunExecution(self, run).execute()
                        ended_here = run.status not in LIVE_STATES
                    elif run.cancelled and live.cancel_action is None:
                        # Store the cancellation in the run's row, where the process that owns the
                        # run will find it.
                        await self.table.cancel_runs_and_list_their_ids(
                            run.thread_id, run.run_id, run.cancelled
                        )
                        await self.update_run_from_row(run)
                    else:
                        run.changed.clear()
                        await run.changed.wait()
            except Exception:
                # Forget the run. The next periodic check of all stored runs will load it again
                # from its database row.
                _LOGGER.exception("the final status of run %s could not be stored", run.run_id)
                self.runs_by_id.pop(run.run_id, None)
            finally:
                run.log.close()
                run.free_input()
                if run.may_have_started and not ended_here:
                    # Another process may have continued the run, so the output in this process may
                    # be outdated.
                    run.discard_output()
                    run.drop_events_and_unused_output()
                run.free_output()
                self.shared_state.players_by_run.pop(run, None)
                self._ended_runs.append(run)
                if len(self._ended_runs) > RETAINED_ENDED_RUNS:
                    oldest = self._ended_runs.popleft()
                    oldest.drop_events_and_unused_output()
                    if self.runs_by_id.get(oldest.run_id) is oldest:
                        del self.runs_by_id[oldest.run_id]

    def drop_runs_and_events_of_thread(self, thread_id: str) -> None:
        """Remove the runs and events of a deleted thread from memory.

        If the runs and events of a deleted thread remained in memory, a new thread with the same id
        would appear to have them.
        """
        for run in [run for run in self.runs_by_id.values() if run.thread_id == thread_id]:
            del self.runs_by_id[run.run_id]
            run.cancel()
            if run.is_task_done:
                run.drop_events_and_unused_output()
        self.shared_state.close_event_log(self.tenant, thread_id)

    # -- data that runs need

    @property
    def threads(self) -> Threads:
        """Return an object that gives access to all threads of the database."""
        return Threads(
            self.saver,
            {},
            drop_runs_and_events_of_thread=self.drop_runs_and_events_of_thread,
        )

    async def read_output(self, run: Run) -> Any:
        """Return a run's output from its last checkpoint, or None if the run has no checkpoint."""
        run_filter = {"run_id": run.run_id}
        async for checkpoint in self.saver.alist(run.thread_config, filter=run_filter, limit=1):
            async with self.shared_state.graphs.open_graph(
                run.graph_name, self.saver, self.database.store, run.thread_config
            ) as graph:
                state, channels = await graph.aget_state(checkpoint.config), graph.output_channels
            values = state.values
            output = (
                values.get(channels)
                if isinstance(channels, str)
                else {channel: values[channel] for channel in channels if channel in values}
            )
            return add_interrupts_to_output(output, state.interrupts)
        return None
