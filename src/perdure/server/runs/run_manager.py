"""Start, cancel and read a server's runs, for all tenants."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextvars import Context
from functools import partial
from typing import Annotated, Any, Final
from uuid import uuid4

from fastapi import Depends
from starlette.requests import HTTPConnection

from perdure.errors import ConfigurationError, PerdureError, StorageUnavailable
from perdure.run_tables.records import DueCron, LiveRun, RunRow
from perdure.run_tables.runs import ALL_RUNS, LIVE_STATES, MAX_ENDED_RUNS
from perdure.server.http.access import Identity, Refused
from perdure.server.http.acting_for import require_valid_credentials_of_same_user
from perdure.server.http.reply import encode_json
from perdure.server.runs.event_log import NUMBERS_PER_RUN, EventDropped, EventLog, LoggedEvent
from perdure.server.runs.private_events import may_read_event_of_kind
from perdure.server.runs.run import CANCEL_ACTIONS, Run
from perdure.server.runs.run_execution import END_TIMEOUT_S
from perdure.server.runs.run_queue import RETRY_PAUSE_S, RunQueue
from perdure.server.runs.run_request import RunRequest
from perdure.server.runs.shared_run_state import SharedRunState
from perdure.server.thread_person import Sender
from perdure.server.threads import build_unknown_thread_error

ERASURE_CHECK_S: Final = 0.5
"""Seconds between two checks whether messages were erased from the thread of a stream."""
_LOGGER: Final = logging.getLogger("perdure.server.runs")


class RunManager:
    """Starts, cancels and reads the runs of a server, for all tenants.

    Attributes:
        shared_state: The databases, limits and event logs that the runs of all tenants share.
        graphs: The graphs that the runs execute.
    """

    def __init__(self, shared_state: SharedRunState) -> None:
        self.shared_state, self.graphs = shared_state, shared_state.graphs
        self._by_tenant: dict[str | None, RunQueue] = {}

    async def open_tenant_databases(self, tenants: Collection[str | None]) -> None:
        """Open the databases of the given tenants, and take over the runs of servers that died.

        If a database cannot be opened, the error is only logged.

        Raises:
            ConfigurationError: A database does not support locks, because it is behind a connection
                pooler.
        """
        for tenant in tenants:
            try:
                await (await self.shared_state.databases.get_or_open_database(tenant)).saver.setup()
            except ConfigurationError as exc:
                # The tenant's database cannot be used with its settings. Only log the error, so
                # that the server starts anyway. Each later request for this tenant will raise the
                # error again.
                _LOGGER.warning("the unfinished runs of earlier servers are not continued: %s", exc)
            except StorageUnavailable as exc:
                _LOGGER.warning(
                    "the unfinished runs of earlier servers are continued when the database is "
                    "available: %s",
                    exc,
                )
                await self.get_run_queue(tenant)
            else:
                queue = await self.get_run_queue(tenant)
                await queue.ready.wait()
                if queue.task.done():
                    queue.task.result()

    async def get_run_queue(self, tenant: str | None) -> RunQueue:
        """Return the object that manages the runs of a tenant in this process.

        The `RunQueue` object is created if the tenant has none yet. A new `RunQueue` object
        takes over the runs of processes that have died.
        """
        database = await self.shared_state.databases.get_or_open_database(tenant)
        queue = self._by_tenant.get(tenant)
        if queue is None or queue.database is not database or queue.task.done():
            queue = self._by_tenant[tenant] = RunQueue(self.shared_state, tenant, database)
        return queue

    async def get_thread_key(self, tenant: str | None, thread_id: str) -> int:
        """Return a thread's key in the database; see `RunTable.get_thread_key`."""
        return await (await self.get_run_queue(tenant)).table.get_thread_key(thread_id)

    async def open_event_log_for_reader(
        self, identity: Identity, thread_id: str, thread_key: int
    ) -> EventLog:
        """Prepare a thread's event log for a new reader, and return the log.

        A reader that has not received any events yet starts with the current run, or with the next
        event if no run is in progress.
        """
        tenant, user = identity.tenant, identity.user
        event_log = self.shared_state.get_or_create_event_log(tenant, thread_id, thread_key, user)
        queue = await self.get_run_queue(tenant)
        is_executing_here = any(
            run.feed is event_log and run.is_executing for run in self.shared_state.players_by_run
        )
        if not event_log.has_readers and not is_executing_here:
            newest = await queue.events.empty_outdated_log_and_find_newest_event(
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
        connection: HTTPConnection,
        thread_key: int,
        log: EventLog,
        number: int | None,
        seq_range: tuple[int, int] = ALL_RUNS,
        *,
        is_new: bool = False,
    ) -> AsyncIterator[list[LoggedEvent]]:
        """Yield the events in a log that the user of a request is permitted to read.

        See `StoredEvents.iter_events_after`. Events with another person's memories are skipped,
        unless the user may act on that person's behalf; see `may_read_event_of_kind`. The event
        stream ends if messages are erased from the thread, or if the user's credentials are no
        longer valid.

        Args:
            connection: The request or the websocket of the reader.
            thread_key: The key of the thread.
            log: The log of the run or of the thread.
            number: The number of the last event that the reader has received, or None.
            seq_range: The first and the last `seq` of the runs whose events are read.
            is_new: Whether the request has just started the run of the log. The number of erasures
                is then known from the start of the run, and is not read again at once.

        Raises:
            LookupError: See `StoredEvents.iter_events_after`; or messages were erased after the
                events were emitted.
            Unauthenticated: See `require_valid_credentials_of_same_user`.
        """
        identity: Identity = connection.state.call.identity
        check_access = partial(require_valid_credentials_of_same_user, connection)
        queue = await self.get_run_queue(identity.tenant)
        account = self.shared_state.memory.get_account(identity.tenant, identity.user)
        with queue.erasures.cache_erasure_count_during_block(thread_key):
            checked_at = time.monotonic()
            if is_new and not log.is_empty:
                checked_at = log.removals_read_at
            elif (
                log.last_dropped
                or not log.is_empty
                # A run that started before an erasure may still add its first events to the log.
                or any(run.events is log for run in self.shared_state.players_by_run)
            ):
                await self._drop_erased_events_and_get_erasure_check_time(
                    queue, log, thread_key, checked_at
                )
            async for events in queue.events.iter_events_after(
                log, number, check_access, thread_key, seq_range, account
            ):
                earliest = time.monotonic() - ERASURE_CHECK_S
                if checked_at <= earliest:
                    checked_at = await self._drop_erased_events_and_get_erasure_check_time(
                        queue, log, thread_key, earliest
                    )
                if readable := [
                    event for event in events if may_read_event_of_kind(event.kind, identity)
                ]:
                    yield readable

    async def _drop_erased_events_and_get_erasure_check_time(
        self, queue: RunQueue, log: EventLog, thread_key: int, min_check_time: float
    ) -> float:
        """Drop a thread's events from memory if messages were erased from the thread.

        Args:
            queue: The runs of the database.
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
        erasure_count = await queue.erasures.read_erasure_count(thread_key, min_check_time)
        read_at = queue.erasures.read_at
        if erasure_count is None or log.removals is None:
            log.note_removals(erasure_count, read_at)
        if erasure_count is None or erasure_count <= (log.removals or 0):
            # No messages were erased after the log's events were added, because the thread's
            # erasure count is not higher than `log.removals`. The cached `erasure_count` can be
            # outdated, and therefore even lower than `log.removals`.
            return read_at
        # The erasure has already deleted the thread's stored events. If the in-memory log is empty
        # as well, no events from before the erasure are left.
        was_empty = log.is_empty
        log.drop_events_through(log.last)
        stale = [
            run
            for run in self.shared_state.players_by_run
            if run.events is log and run.removals is not None and run.removals < erasure_count
        ]
        if log.thread_key and not stale:
            # All active runs of the thread started after the erasure, so the events of these runs
            # cannot contain the erased messages. The thread's log can therefore remain in use.
            log.note_removals(erasure_count, read_at)
            if was_empty:
                return read_at
        raise LookupError(
            "the events of the thread's runs are no longer available, because messages were erased "
            "from the thread"
        )

    async def list_runs(self, tenant: str | None, thread_id: str) -> list[RunRow]:
        """Return the stored runs of a thread, newest first."""
        return await (await self.get_run_queue(tenant)).table.list_runs(thread_id)

    async def get(self, tenant: str | None, thread_id: str, run_id: str) -> Run:
        """Return a run of a thread.

        Raises:
            Refused: The thread has no run with this id. The run may have been deleted to make room
                for newer runs of the thread.
        """
        run = await (await self.get_run_queue(tenant)).get_run(thread_id, run_id)
        if run is None:
            raise Refused(
                f"thread {thread_id!r} has no run {run_id!r}; only the last {MAX_ENDED_RUNS} ended "
                "runs of a thread are kept",
                404,
            )
        return run

    async def load_stored_events_that_process_lacks(self, run: Run) -> None:
        """Load a run's stored events that are not in memory, so that its readers receive them."""
        queue = await self.get_run_queue(run.tenant)
        await queue.events.load_stored_events_that_process_lacks(run)
        if run.may_be_executing_in_other_process:
            queue.wake()

    async def encode_output(self, run: Run) -> bytes:
        """Return the state values after the last step of a finished run, as JSON.

        Messages that were erased after the run are not included in the returned JSON. If the state
        values of the run are no longer in memory, they are read from the database. The values of a
        temporary run cannot be read from the database, so `null` is returned if they are no longer
        in memory.
        """
        is_in_memory = run.output is not None or run.output_event is not None
        if is_in_memory and not run.temporary:
            run_table = (await self.get_run_queue(run.tenant)).table
            removals = (
                await run_table.read_newest_removal_numbers_by_thread_key([run.thread_key])
            ).get(run.thread_key)
            if removals not in (None, run.removals):
                run.discard_output()
        if run.output_event is not None:
            with contextlib.suppress(EventDropped):
                return run.output_event.json_bytes
        if run.output is None and not run.temporary:
            return encode_json(await (await self.get_run_queue(run.tenant)).read_output(run))
        return encode_json(run.output)

    def drop_runs_and_events_of_thread(self, tenant: str | None, thread_id: str) -> None:
        """Remove the runs and events of a deleted thread from memory.

        If the runs and events of a deleted thread remained in memory, a new thread with the same id
        would appear to have them.
        """
        if queue := self._by_tenant.get(tenant):
            queue.drop_runs_and_events_of_thread(thread_id)
        else:
            self.shared_state.close_event_log(tenant, thread_id)

    async def start_run(
        self,
        identity: Identity,
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
            identity: The user who starts the run.
            request: The request, merged with its assistant; see `RunRequest.merge_with_assistant`.
            graph_name: The name of the assistant's graph, which this server serves.
            thread_id: The thread of the run.
            protocol: Whether the events go to readers of the run or of the thread; see
                `Run.protocol`.
            temporary: Whether the thread is deleted at the end of the run.
            recorded: Whether the events are stored, for readers on any server.
            due: The cron that starts the run, or None; see
                `RunTable.accept_run_and_list_live_run_ids`.
            sender: The sender of the run, or None for the user `identity`.
            person: The person whose memories the run will use, as far as known before the start.

        Raises:
            UnknownThread: The thread was deleted, or another server has started the run of the
                cron `due`.
            StorageUnavailable: This process has lost its liveness lock and has no new one yet.
            Refused: Another run is under way and the strategy is `reject`; or see
                `SharedRunState.check_capacity_for_new_runs`.
        """
        self.shared_state.check_capacity_for_new_runs(identity)
        queue = await self.get_run_queue(identity.tenant)
        await queue.ready.wait()
        if not queue.owner:
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
        stored_fields |= {"recorded": recorded, "request": request.build_fields_to_store()}
        now = time.time()
        not_before = now + request.after_seconds if request.after_seconds else None
        # A delayed run has no owner, so any process can start it.
        owner = "" if not_before else queue.owner
        live = LiveRun(thread_id, 0, 0, str(uuid4()), "pending", owner, graph_name, 1, None)
        row = RunRow(live, now, now, details, request=stored_fields, not_before=not_before)
        user_ref = identity.tenant, identity.user
        run = Run(
            row._replace(request=None),
            *user_ref,
            request,
            temporary,
            protocol,
            recorded,
            identity.raw_user,
        )
        # Register the run before storing its row, because otherwise a concurrent sweep could read
        # the row and load the run a second time.
        queue.runs_by_id[run.run_id] = run
        try:
            cancel_action = None if not_before else CANCEL_ACTIONS.get(strategy)
            accepted, live_ids = await queue.table.accept_run_and_list_live_run_ids(
                row,
                reject_if_busy=strategy == "reject",
                cancel_action=cancel_action,
                stores_events=recorded,
                due_cron=due,
            )
            if accepted is None:
                await self._raise_if_run_was_not_stored(queue, run, live_ids)
        except BaseException:
            queue.runs_by_id.pop(run.run_id, None)
            raise
        run.row = run.row._replace(live=accepted or run.row.live)
        if not_before:
            # Do not keep the delayed run in memory. A process loads it from the database when the
            # run is due or when a client requests it.
            del queue.runs_by_id[run.run_id]
            return run
        # Start a cron's run in an empty `contextvars.Context`, so that the run does not inherit the
        # locks that the scheduler holds in its own context.
        queue.start_run_task(run, Context() if due else None)
        # Read the database rows of the runs that this request has cancelled, so that this process
        # notices the cancellation and stops these runs immediately. Otherwise, they would keep
        # executing until the next periodic check of all runs.
        for other in [*queue.runs_by_id.values()] if cancel_action else ():
            if other.thread_id == thread_id and other is not run and not other.is_task_done:
                await queue.update_run_from_row(other)
        return run

    async def _raise_if_run_was_not_stored(
        self, queue: RunQueue, run: Run, live_ids: Collection[str]
    ) -> None:
        """Raise the appropriate error for a run that was rejected.

        No error is raised if the run was stored but the database's reply was lost.
        """
        stored = await queue.table.list_runs(run.thread_id, run.run_id)
        if stored:
            run.row = run.row._replace(live=stored[0].live)
            return
        if not live_ids:
            raise build_unknown_thread_error(run.thread_id)
        raise Refused(
            f"run {[*live_ids][-1]!r} is still active on thread {run.thread_id!r}; wait until the "
            "run has ended, or use another multitask_strategy",
            409,
        )

    async def delete_run(self, run: Run) -> None:
        """Delete a run that has ended."""
        queue = await self.get_run_queue(run.tenant)
        await queue.table.delete_ended_run(run.row.live)
        queue.runs_by_id.pop(run.run_id, None)

    async def cancel_run_unless_ended(
        self, tenant: str | None, live: LiveRun, action: str = "interrupt"
    ) -> bool:
        """Cancel a run, even if another process is executing it.

        Return False if the run had already ended before the call, otherwise True.
        """
        queue = await self.get_run_queue(tenant)
        stopped = await queue.table.cancel_runs_and_list_their_ids(
            live.thread_id, live.run_id, action
        )
        if run := queue.runs_by_id.get(live.run_id):
            await queue.update_run_from_row(run)
        return bool(stopped)

    async def stop_runs_of_thread(self, tenant: str | None, thread_id: str) -> None:
        """Cancel the runs of a thread, and wait until they have ended.

        Raises:
            Refused: A run did not end within `END_TIMEOUT_S` seconds, because one of its nodes
                continues after the cancellation.
        """
        queue, deadline = await self.get_run_queue(tenant), time.monotonic() + END_TIMEOUT_S
        await queue.table.cancel_runs_and_list_their_ids(thread_id, "", "interrupt")
        for run in [run for run in queue.runs_by_id.values() if run.thread_id == thread_id]:
            await queue.update_run_from_row(run)
        while ids := await queue.table.list_live_run_ids(thread_id):
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
        self.shared_state.is_draining, deadline = True, time.monotonic() + grace_s
        while (remaining_s := deadline - time.monotonic()) > 0 and not must_stop_now():
            tasks = [
                run.task
                for run in self.shared_state.players_by_run
                if run.task and run.status == "running"
            ]
            if not tasks:
                break
            await asyncio.wait(tasks, timeout=min(remaining_s, 0.2))
        # Stop the runs before disconnecting their readers, because disconnecting a reader may
        # cancel its run.
        await self._stop_all_runs()

    async def _stop_all_runs(self) -> None:
        """Stop all runs so that other servers can take them over, and close all event logs."""
        if self.shared_state.is_closed:
            return
        self.shared_state.is_draining = self.shared_state.is_closed = True
        for run in self.shared_state.players_by_run:
            run.lose_ownership()
            run.changed.set()
        if tasks := [run.task for run in self.shared_state.players_by_run if run.task is not None]:
            await asyncio.wait(tasks, timeout=END_TIMEOUT_S)
        self.shared_state.close_all_event_logs()

    async def aclose(self) -> None:
        """Stop all runs and background tasks, so that other servers can take over the runs."""
        await self._stop_all_runs()
        await self.shared_state.webhooks.aclose()
        for queue in self._by_tenant.values():
            # Ignore errors of `release_runs`, which only speeds up the takeover of this process's
            # runs. Other servers take over the runs anyway after this process has released its
            # liveness lock.
            with contextlib.suppress(PerdureError):
                if queue.owner and queue.is_database_open:
                    await queue.table.release_runs(queue.owner)
            for task in (queue.task, queue.due_work):
                task.cancel()
            await asyncio.wait([queue.task, queue.due_work])


def convert_raw_user_to_mapping(raw_user: Any) -> Mapping[str, Any] | None:
    """Convert the user object of an authentication handler into a mapping that can be stored.

    Return None if the user has no fields. The user object is stored in the row of each run, so that
    another process can continue the user's runs.
    """
    return raw_user if isinstance(raw_user, Mapping) else getattr(raw_user, "__dict__", None)


async def get_server_runs(connection: HTTPConnection) -> RunManager:
    """Return the runs of the process."""
    runs: RunManager = connection.app.state.runs
    return runs


ServerRuns = Annotated[RunManager, Depends(get_server_runs)]
"""The runs of the process, as an argument of an endpoint."""
