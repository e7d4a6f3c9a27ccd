"""Start, cancel and read a server's runs, for all tenants."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextvars import Context
from typing import Annotated, Any, Final, Protocol, TypeAlias
from uuid import uuid4
from weakref import WeakValueDictionary

from fastapi import Depends
from starlette.requests import HTTPConnection

from perdure.checkpointers.records import DueCron, LiveRun, RunRow
from perdure.checkpointers.runs import ALL_RUNS, LIVE_STATES, MAX_ENDED_RUNS
from perdure.errors import ConfigurationError, PerdureError, StorageUnavailable, UnknownThread
from perdure.server.access import Identity, Refused
from perdure.server.call import Call
from perdure.server.databases import Databases
from perdure.server.event_memory import EventMemory
from perdure.server.graphs import Graphs
from perdure.server.limits import Limits, TooManyRequests
from perdure.server.person import Sender
from perdure.server.private_events import may_read_event_of_kind
from perdure.server.reply import encode_json
from perdure.server.run import CANCEL_ACTIONS, Run
from perdure.server.run_execution import END_TIMEOUT_S, Player
from perdure.server.run_log import NUMBERS_PER_RUN, EventDropped, EventLog, LoggedEvent
from perdure.server.run_queue import RETRY_PAUSE_S, DatabaseRuns
from perdure.server.run_request import RunRequest
from perdure.server.teams import RunTeams
from perdure.server.telemetry import Telemetry
from perdure.server.webhooks import Webhooks

Players: TypeAlias = "Mapping[str, Callable[[Run, Runs], Player]]"
RETAINED_EVENT_LOGS: Final = 100
"""The number of threads whose event logs are kept in memory even if nobody reads them. The event
logs that were requested most recently are kept."""
ERASURE_CHECK_S: Final = 0.5
"""Seconds between two checks whether messages were erased from the thread of a stream."""
_LOGGER: Final = logging.getLogger(__name__)


class Scheduler(Protocol):
    """The interface of a scheduler that starts the runs of due crons."""

    async def start_due_runs(self, runs: DatabaseRuns) -> None:
        """Start the runs of all due crons of a tenant."""


class Runs:
    """Starts, cancels and reads the runs of a server, for all tenants.

    Attributes:
        schedule: Starts the runs of due crons. None means that no crons are started.
        webhooks: Sends the results of runs that have ended.
        memory: Limits the events that are kept in memory.
        is_closed: Whether the server has stopped its runs because it is shutting down.

    Args:
        graphs: The graphs that the runs execute.
        limits: How many unfinished runs a user may have, and how many bytes of events are kept in
            memory.
        databases: The databases in which runs are stored.
        players: The classes that run graphs, by protocol.
        telemetry: Measures the runs, or None.
        webhooks: Sends the results of runs, or None if the server sends none.
        owners_are_people: Whether the `owner` of a thread is the user of an API key. If so, the
            `owner` is the person of a thread whose head has no `user_id`.
        teams: Chooses the teams whose memory runs use. If it is None, the config of a run decides.
    """

    def __init__(
        self,
        graphs: Graphs,
        limits: Limits,
        databases: Databases,
        players: Players,
        telemetry: Telemetry | None = None,
        webhooks: Webhooks | None = None,
        *,
        owners_are_people: bool = True,
        teams: RunTeams | None = None,
    ) -> None:
        self.teams = teams
        self.owners_are_people = owners_are_people
        self.graphs, self._max_unfinished_runs_per_user, self._databases = (
            graphs,
            limits.max_concurrent_requests,
            databases,
        )
        self.keep_database_open, self._players = databases.keep_open, players
        self.measure_run = telemetry.measure_run if telemetry else contextlib.nullcontext
        self.is_closed = self._is_draining = False
        self.memory = EventMemory(limits)
        self._by_tenant: dict[str | None, DatabaseRuns] = {}
        self._event_logs: WeakValueDictionary[tuple[str | None, str], EventLog] = (
            WeakValueDictionary()
        )
        # Event logs that `get_or_create_event_log` returned recently, most recent first
        self._recent_event_logs: list[EventLog] = []
        # Maps each run that has a task in this process to the run's `Player`.
        self._under_way: dict[Run, Player] = {}
        self.schedule: Scheduler | None = None
        self.webhooks = webhooks or Webhooks()

    async def open_tenant_databases(self, tenants: Collection[str | None]) -> None:
        """Open the databases of the given tenants, and take over the runs of servers that died.

        If a database cannot be opened, the error is only logged.

        Raises:
            ConfigurationError: A database does not support locks, because it is behind a connection
                pooler.
        """
        for tenant in tenants:
            try:
                await (await self._databases.get_or_open_database(tenant)).saver.setup()
            except ConfigurationError as exc:
                # Log the error instead of raising it, because each later request for the tenant
                # will raise it again.
                _LOGGER.warning("the unfinished runs of earlier servers are not continued: %s", exc)
            except StorageUnavailable as exc:
                _LOGGER.warning(
                    "the unfinished runs of earlier servers are continued when the database is "
                    "available: %s",
                    exc,
                )
                await self.get_database_runs(tenant)
            else:
                runs = await self.get_database_runs(tenant)
                await runs.ready.wait()
                if runs.task.done():
                    runs.task.result()

    async def get_database_runs(self, tenant: str | None) -> DatabaseRuns:
        """Return the object that manages the runs of a tenant in this process.

        If no such object exists yet, a new one is created. The new object then takes over runs from
        processes that have died.
        """
        database = await self._databases.get_or_open_database(tenant)
        runs = self._by_tenant.get(tenant)
        if runs is None or runs.database is not database or runs.task.done():
            runs = self._by_tenant[tenant] = DatabaseRuns(self, tenant, database)
        return runs

    def is_open(self, tenant: str | None, runs: DatabaseRuns) -> bool:
        """Return whether the database that `runs` manages is still open for the tenant."""
        return self._databases.is_open(tenant, runs.database)

    async def start_due_crons_and_webhooks(self, runs: DatabaseRuns) -> None:
        """Start due crons, unless the server is shutting down, and send due webhooks."""
        if self.schedule is not None and not self._is_draining:
            await self.schedule.start_due_runs(runs)
        await self.webhooks.start_due_deliveries(runs)

    def register_run(self, run: Run) -> None:
        """Register a run whose task was started in this process, and create its `Player`."""
        run.log.charge_memory_to_account(self.memory.get_account(run.tenant, run.user))
        self._under_way[run] = self._players[run.protocol](run, self)

    def get_player(self, run: Run) -> Player:
        """Return the `Player` that executes the graph of a run."""
        return self._under_way[run]

    def unregister_run(self, run: Run) -> None:
        """Unregister a run whose task in this process is ending."""
        self._under_way.pop(run, None)

    def get_or_create_event_log(
        self, tenant: str | None, thread_id: str, thread_key: int, user: str = ""
    ) -> EventLog:
        """Return a thread's event log, creating it if it does not exist.

        If the event log of a deleted thread with the same id still exists, it is closed and
        replaced. If a new log is created, the size of its events counts towards the memory limit of
        `user`.
        """
        event_log, account = (
            self._event_logs.get((tenant, thread_id)),
            self.memory.get_account(tenant, user),
        )
        if event_log is not None and event_log.thread_key != thread_key:
            # The existing event log belongs to a deleted thread with the same id.
            event_log.close()
            event_log = None
        event_log = event_log or EventLog(thread_key, account)
        self._event_logs[tenant, thread_id] = event_log
        self._recent_event_logs = [
            event_log,
            *(recent for recent in self._recent_event_logs if recent is not event_log),
        ][:RETAINED_EVENT_LOGS]
        return event_log

    def get_event_logs_with_readers_by_thread_id(self, tenant: str | None) -> dict[str, EventLog]:
        """Return the event logs that currently have readers, keyed by thread id."""
        return {
            id: log
            for (log_tenant, id), log in self._event_logs.items()
            if log_tenant == tenant and log.has_readers
        }

    async def get_thread_key(self, tenant: str | None, thread_id: str) -> int:
        """Return a thread's key in the database; see `RunTable.get_thread_key`."""
        return await (await self.get_database_runs(tenant)).table.get_thread_key(thread_id)

    async def open_event_log_for_reader(
        self, identity: Identity, thread_id: str, thread_key: int
    ) -> EventLog:
        """Return a thread's event log, for a new reader.

        A reader that has not received any events yet starts with the current run, or with the next
        event if no run is in progress.
        """
        tenant, user = identity.tenant, identity.user
        event_log, runs = (
            self.get_or_create_event_log(tenant, thread_id, thread_key, user),
            await self.get_database_runs(tenant),
        )
        is_executing_here = any(
            run.feed is event_log and run.is_executing for run in self._under_way
        )
        if not event_log.has_readers and not is_executing_here:
            newest = await runs.events.empty_outdated_log_and_find_newest_event(
                event_log, event_log.thread_key, ALL_RUNS
            )
            if newest is not None and newest.event_number == event_log.last:
                run_seq, last_number, status = newest
                event_log.first = (
                    run_seq * NUMBERS_PER_RUN if status in LIVE_STATES else last_number
                )
        return event_log

    async def read_events(
        self,
        identity: Identity,
        thread_key: int,
        log: EventLog,
        number: int | None,
        check_access: Callable[[], Awaitable[None]],
        seq_range: tuple[int, int] = ALL_RUNS,
        *,
        is_new: bool = False,
    ) -> AsyncIterator[list[LoggedEvent]]:
        """Yield the events in a log that `identity` is permitted to read.

        See `StoredEvents.iter_events_after`. Events that may contain memories of another person are
        left out; see `may_read_event_of_kind`. The event stream ends if messages are erased from
        the thread.

        Args:
            identity: The reader.
            thread_key: The key of the thread.
            log: The log of the run or of the thread.
            number: The number of the last event that the reader has received, or None.
            check_access: Called periodically. It raises an error if the reader is no longer
                permitted to read.
            seq_range: The first and the last `seq` of the runs whose events are read.
            is_new: Whether the request has just started the run of the log. The number of erasures
                is then known from the start of the run, and is not read again at once.

        Raises:
            LookupError: See `StoredEvents.iter_events_after`; or messages were erased after the
                events were emitted.
        """
        runs = await self.get_database_runs(identity.tenant)
        account = self.memory.get_account(identity.tenant, identity.user)
        with runs.erasures.cache_erasure_count_during_block(thread_key):
            checked_at = time.monotonic()
            if is_new and not log.is_empty:
                checked_at = log.removals_read_at
            elif log.last_dropped or not log.is_empty:
                await self._drop_erased_events_and_get_erasure_check_time(
                    runs, log, thread_key, checked_at
                )
            async for events in runs.events.iter_events_after(
                log, number, check_access, thread_key, seq_range, account
            ):
                earliest = time.monotonic() - ERASURE_CHECK_S
                if checked_at <= earliest:
                    checked_at = await self._drop_erased_events_and_get_erasure_check_time(
                        runs, log, thread_key, earliest
                    )
                if readable := [
                    event for event in events if may_read_event_of_kind(event.kind, identity)
                ]:
                    yield readable

    async def _drop_erased_events_and_get_erasure_check_time(
        self, runs: DatabaseRuns, log: EventLog, thread_key: int, min_check_time: float
    ) -> float:
        """Drop a thread's events from memory if messages were erased from the thread.

        Args:
            runs: The runs of the database.
            log: The log of the run or of the thread.
            thread_key: The key of the thread.
            min_check_time: If the number of erasures was last read before this time, by
                `time.monotonic`, it is read again.

        Returns:
            The time at which the number of erasures was read, by `time.monotonic`.

        Raises:
            LookupError: Messages were erased after the events were emitted, or a run that started
                before the erasure is still in progress.
        """
        erasure_count, read_at = (
            await runs.erasures.read_erasure_count(thread_key, min_check_time),
            runs.erasures.read_at,
        )
        if erasure_count is None or log.removals is None:
            log.note_removals(erasure_count, read_at)
        if erasure_count is None or erasure_count <= (log.removals or 0):
            # `erasure_count` is a cached value that can be outdated, so it can be lower than
            # `log.removals`.
            return read_at
        # If the log is empty, no events from before the erasure are left, because the erasure also
        # deleted the events stored in the database.
        was_empty = log.is_empty
        log.drop_events_through(log.last)
        stale = [
            run
            for run in self._under_way
            if run.events is log and run.removals is not None and run.removals < erasure_count
        ]
        if log.thread_key and not stale:
            # This log contains the events of all runs of the thread. New events cannot contain the
            # erased messages, because all active runs started after the erasure.
            log.note_removals(erasure_count, read_at)
            if was_empty:
                return read_at
        raise LookupError(
            "the events of the thread's runs are no longer available, because messages were erased "
            "from the thread"
        )

    def is_thread_busy(self, tenant: str | None, thread_id: str) -> bool:
        """Return whether this process has an unfinished run of a thread.

        The thread itself may already have been deleted.
        """
        thread_ref = tenant, thread_id
        return any((run.tenant, run.thread_id) == thread_ref for run in self._under_way)

    async def list_runs(self, tenant: str | None, thread_id: str) -> list[RunRow]:
        """Return the stored runs of a thread, newest first."""
        return await (await self.get_database_runs(tenant)).table.list_runs(thread_id)

    async def get(self, tenant: str | None, thread_id: str, run_id: str) -> Run:
        """Return a run of a thread.

        Raises:
            Refused: The thread has no run with this id. The run may have been deleted to make room
                for newer runs of the thread.
        """
        run = await (await self.get_database_runs(tenant)).get_run(thread_id, run_id)
        if run is None:
            message = (
                f"thread {thread_id!r} has no run {run_id!r}; only the last {MAX_ENDED_RUNS} ended "
                "runs of a thread are kept"
            )
            raise Refused(message, 404)
        return run

    async def load_stored_events_that_process_lacks(self, run: Run) -> None:
        """Load a run's stored events that are not in memory, so that its readers receive them."""
        runs = await self.get_database_runs(run.tenant)
        await runs.events.load_stored_events_that_process_lacks(run)
        if run.may_be_executing_in_other_process:
            runs.wake()

    async def encode_output(self, run: Run) -> bytes:
        """Return the state values after the last step of a finished run, as JSON.

        Messages that were erased after the run are not included in the returned JSON. Values that
        are no longer in memory are read from the database. The result is `null` for a temporary run
        whose values are no longer in memory.
        """
        is_in_memory = run.output is not None or run.output_event is not None
        if is_in_memory and not run.temporary:
            run_table = (await self.get_database_runs(run.tenant)).table
            removals = (await run_table.count_removals_by_thread_key([run.thread_key])).get(
                run.thread_key
            )
            if removals not in (None, run.removals):
                run.output = run.output_event = None
        if run.output_event is not None:
            with contextlib.suppress(EventDropped):
                return run.output_event.json_bytes
        if run.output is None and not run.temporary:
            return encode_json(await (await self.get_database_runs(run.tenant)).read_output(run))
        return encode_json(run.output)

    def check_capacity_for_new_runs(self, identity: Identity, count: int = 1) -> None:
        """Raise an error if new runs would exceed the user's limit on unfinished runs.

        Args:
            identity: The user.
            count: The number of new runs.

        Raises:
            TooManyRequests: The user would have more unfinished runs than allowed.
            Refused: The server is shutting down.
        """
        user_ref = identity.tenant, identity.user
        if (
            sum((run.tenant, run.user) == user_ref for run in self._under_way) + count
            > self._max_unfinished_runs_per_user
        ):
            raise TooManyRequests(
                f"a user can have at most {self._max_unfinished_runs_per_user} unfinished runs; "
                "wait until some have ended, or cancel them",
                retry_after_s=5,
            )
        if self._is_draining:
            why = "the server is shutting down; retry, or use another server"
            raise Refused(why, 503, {"Retry-After": "1"})

    def drop_runs_and_events_of_thread(self, tenant: str | None, thread_id: str) -> None:
        """Remove the runs and events of a deleted thread from memory.

        Otherwise, a new thread with the same id would appear to have the runs and events of the
        deleted thread.
        """
        runs = self._by_tenant.get(tenant)
        runs_by_id = runs.runs_by_id if runs is not None else {}
        for run in [run for run in runs_by_id.values() if run.thread_id == thread_id]:
            del runs_by_id[run.run_id]
            run.cancel()
            if run.has_ended:
                run.drop_events_and_unused_output()
        if event_log := self._event_logs.pop((tenant, thread_id), None):
            event_log.close()

    async def start_run(
        self,
        call: Call,
        request: RunRequest,
        graph_name: str,
        thread_id: str,
        protocol: str = "run",
        *,
        temporary: bool,
        recorded: bool = False,
        due: DueCron | None = None,
        sender: Sender | None = None,
        person: str | None = None,
    ) -> Run:
        """Store a new run and start it.

        This method does not check permissions. Callers must first check that the user has access to
        the thread.

        A delayed run is only stored. A process loads the run when the run is due or when a client
        requests it.

        Args:
            call: The call of the user who starts the run.
            request: The request, merged with its assistant; see `RunRequest.merge_with_assistant`.
            graph_name: The name of the assistant's graph, which this server serves.
            thread_id: The thread of the run.
            protocol: Whether the events go to readers of the run or of the thread; see
                `Run.protocol`.
            temporary: Whether the thread is deleted at the end of the run.
            recorded: Whether the events are stored, for readers on any server.
            due: The cron that starts the run, or None; see
                `RunTable.accept_run_and_list_live_run_ids`.
            sender: The sender of the run, or None for the user of the call.
            person: The person whose memories the run will use, as far as known before the start.

        Raises:
            UnknownThread: The thread was deleted, or another server has started the run of the
                cron `due`.
            StorageUnavailable: This process has lost its liveness lock and has no new one yet.
            Refused: Another run is under way and the strategy is `reject`; or see
                `check_capacity_for_new_runs`.
        """
        identity = call.identity
        self.check_capacity_for_new_runs(identity)
        runs = await self.get_database_runs(identity.tenant)
        await runs.ready.wait()
        if not runs.owner:
            raise StorageUnavailable(
                "the connection to the database was lost, and is being restored; try again"
            )
        strategy, login = request.multitask_strategy, convert_raw_user_to_mapping(identity.raw_user)
        sender = sender or Sender(identity.user)
        details = {
            "assistant_id": request.assistant_id,
            "metadata": request.metadata,
            "multitask_strategy": strategy,
            "person": person or sender.acting_for or identity.user,
            **sender.build_run_row_fields(),
        }
        stored_fields = {"temporary": temporary, "protocol": protocol, "login": login}
        stored_fields |= {"recorded": recorded, "request": request.to_stored()}
        now = time.time()
        not_before = now + request.after_seconds if request.after_seconds else None
        # A delayed run has no owner, so any process can start it.
        owner = "" if not_before else runs.owner
        live = LiveRun(thread_id, 0, 0, str(uuid4()), "pending", owner, graph_name, 1, None)
        row = RunRow(live, now, now, details, request=stored_fields, not_before=not_before)
        user_ref = identity.tenant, identity.user
        run_options = temporary, protocol, recorded, identity.raw_user
        run = Run(row._replace(request=None), *user_ref, request, *run_options)
        # Register the run before storing its row, because otherwise a concurrent sweep could read
        # the row and load the run a second time.
        runs.runs_by_id[run.run_id] = run
        try:
            cancel_action = None if not_before else CANCEL_ACTIONS.get(strategy)
            is_rejecting = strategy == "reject"
            accepted, live_ids = await runs.table.accept_run_and_list_live_run_ids(
                row,
                reject_if_busy=is_rejecting,
                cancel_action=cancel_action,
                stores_events=recorded,
                due_cron=due,
            )
            if accepted is None:
                await self._raise_if_run_was_not_stored(runs, run, live_ids)
        except BaseException:
            runs.runs_by_id.pop(run.run_id, None)
            raise
        run.row = run.row._replace(live=accepted or run.row.live)
        if not_before:
            # The run will be loaded from the database when it is due or requested.
            del runs.runs_by_id[run.run_id]
            return run
        # Start a cron's run in an empty `contextvars.Context`, so that the run does not inherit the
        # locks that the scheduler holds in its own context.
        runs.start_run_task(run, Context() if due else None)
        # Read the rows of the cancelled runs now. Otherwise, the cancelled runs would keep
        # executing until the next sweep.
        for other in [*runs.runs_by_id.values()] if cancel_action else ():
            if other.thread_id == thread_id and other is not run and not other.has_ended:
                await runs.update_run_from_row(other)
        return run

    async def _raise_if_run_was_not_stored(
        self, runs: DatabaseRuns, run: Run, live_ids: Collection[str]
    ) -> None:
        """Raise the appropriate error for a run that was rejected.

        No error is raised if the run was stored and only the database's reply was lost.
        """
        stored = await runs.table.list_runs(run.thread_id, run.run_id)
        if stored:
            run.row = run.row._replace(live=stored[0].live)
            return
        if not live_ids:
            raise UnknownThread(f"there is no thread {run.thread_id!r}")
        raise Refused(
            f"run {[*live_ids][-1]!r} is under way on thread {run.thread_id!r}; wait until it has "
            "ended, or use another multitask_strategy",
            409,
        )

    async def delete_run(self, run: Run) -> None:
        """Delete a run that has ended."""
        runs = await self.get_database_runs(run.tenant)
        await runs.table.delete_ended_run(run.row.live)
        runs.runs_by_id.pop(run.run_id, None)

    async def cancel_run(
        self, tenant: str | None, live: LiveRun, action: str = "interrupt"
    ) -> bool:
        """Cancel a run, even if another process is executing it.

        Return False if the run has already ended.
        """
        runs = await self.get_database_runs(tenant)
        stopped = await runs.table.cancel_runs_and_list_their_ids(
            live.thread_id, live.run_id, action
        )
        if run := runs.runs_by_id.get(live.run_id):
            await runs.update_run_from_row(run)
        return bool(stopped)

    async def stop_runs_of_thread(self, tenant: str | None, thread_id: str) -> None:
        """Cancel the runs of a thread, and wait until they have ended.

        Raises:
            Refused: A run did not end within `END_TIMEOUT_S` seconds, because one of its nodes
                continues after the cancellation.
        """
        runs, deadline = await self.get_database_runs(tenant), time.monotonic() + END_TIMEOUT_S
        await runs.table.cancel_runs_and_list_their_ids(thread_id, "", "interrupt")
        for run in [run for run in runs.runs_by_id.values() if run.thread_id == thread_id]:
            await runs.update_run_from_row(run)
        while ids := await runs.table.list_live_run_ids(thread_id):
            if time.monotonic() > deadline:
                raise Refused(
                    f"run {ids[0]!r} was cancelled, but is still running after {END_TIMEOUT_S} s; "
                    "try again later",
                    409,
                )
            await asyncio.sleep(RETRY_PAUSE_S)

    async def stop_runs_after_grace_period(
        self, grace_s: float, must_stop_now: Callable[[], bool] = lambda: False
    ) -> None:
        """Refuse new runs, wait for active runs to end, and stop those that do not end in time.

        Args:
            grace_s: How long to wait, in seconds.
            must_stop_now: Returns whether to stop the runs at once.
        """
        self._is_draining, deadline = True, time.monotonic() + grace_s
        while (remaining_s := deadline - time.monotonic()) > 0 and not must_stop_now():
            tasks = [run.task for run in self._under_way if run.task and run.status == "running"]
            if not tasks:
                break
            await asyncio.wait(tasks, timeout=min(remaining_s, 0.2))
        # Stop the runs before disconnecting their readers, because disconnecting a reader may
        # cancel its run.
        await self._stop_all_runs()

    async def _stop_all_runs(self) -> None:
        """Stop all runs so that other servers can take them over, and close all event logs."""
        if self.is_closed:
            return
        self._is_draining = self.is_closed = True
        for run in self._under_way:
            run.lose_ownership()
            run.changed.set()
        if tasks := [run.task for run in self._under_way if run.task is not None]:
            await asyncio.wait(tasks, timeout=END_TIMEOUT_S)
        for event_log in self._event_logs.values():
            event_log.close()

    async def aclose(self) -> None:
        """Stop all runs and background tasks, so that other servers can take over the runs."""
        await self._stop_all_runs()
        await self.webhooks.aclose()
        for runs in self._by_tenant.values():
            # Ignore an error in `release_runs`, because other servers take over this process's runs
            # anyway as soon as this process has released its liveness lock.
            with contextlib.suppress(PerdureError):
                if runs.owner and self.is_open(runs.tenant, runs):
                    await runs.table.release_runs(runs.owner)
            for task in (runs.task, runs.due_work):
                task.cancel()
            await asyncio.wait([runs.task, runs.due_work])


def convert_raw_user_to_mapping(raw_user: Any) -> Mapping[str, Any] | None:
    """Convert the user that an authentication handler returned to a mapping, for storage.

    Return None if the user has no fields. The user is stored so that another process can continue
    the user's runs.
    """
    return raw_user if isinstance(raw_user, Mapping) else getattr(raw_user, "__dict__", None)


async def get_server_runs(connection: HTTPConnection) -> Runs:
    """Return the runs of the process."""
    runs: Runs = connection.app.state.runs
    return runs


ServerRuns = Annotated[Runs, Depends(get_server_runs)]
"""The runs of the process, as an argument of an endpoint."""
