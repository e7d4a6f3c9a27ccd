"""Store the server's runs and their events in the checkpointer's database.

A server process starts an accepted run at once if the run's thread has no earlier unfinished run.
Otherwise, the run stays pending until the earlier runs have ended and the process claims the
pending run. A run ends by itself or is cancelled. If the database has an encryption key, the events
of a run and the columns `request`, `details` and `error` are encrypted. A run's stored request is
deleted once the run has ended and clients can no longer resend the request. The `runs` table does
not store a run's result, because the run's last checkpoint contains it.

The live runs of a thread are those that are running or pending. A delayed run becomes live only
when it is due and `queue_delayed_run_that_is_due` is called.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final, Literal, NamedTuple

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.errors import UnknownThread
from perdure.run_tables.records import (
    DueCron,
    LiveRun,
    RunRow,
    decrypt_batch_of_events,
    decrypt_run,
    encrypt_events,
    encrypt_run_details_error_and_request,
)
from perdure.run_tables.server_table import ServerTable
from perdure.run_tables.thread_list import ThreadList, ThreadQuery, append_conditions
from perdure.storage.flow import NO_LIMIT, Flow, LastRequest, Statement

RunState = Literal["delayed", "pending", "running", "success", "error", "interrupted"]
LIVE_STATES: Final[tuple[RunState, ...]] = ("delayed", "pending", "running")
"""The states of a run that has not ended, including `delayed`."""
MAX_ENDED_RUNS: Final = 100
"""The number of a thread's last runs that are kept after they have ended.

When a run ends, the ended runs of its thread whose numbers are lower by this number or more are
deleted with their events.
"""
ALL_RUNS: Final = (0, NO_LIMIT)
"""The range of run numbers that contains all runs of a thread."""
EVENT_RETENTION_S: Final = 3600
"""The number of seconds after the end of a run during which its events are stored."""
EVENT_NUMBER_BITS: Final = 22
"""The number of low bits of an event's number, which count the events of one attempt of a run.

The higher bits increase with each attempt, so that no event gets a number that was used before.
"""
# Maximum number of event batches that one call to `read_events` returns.
_BATCH_LIMIT: Final = 100
# Maximum total size in bytes of the event batches that one call to `read_events` returns. A single
# batch may be larger.
_READ_BYTES: Final = 1_000_000
# Maximum number of runs whose old events are deleted in one transaction.
_CLEANUP_RUNS: Final = 20


class RunSummary(NamedTuple):
    """A run's sequence number within its thread, its id, and its state."""

    seq: int
    run_id: str
    state: RunState


class NewestEvent(NamedTuple):
    """The newest stored event of a run.

    Attributes:
        run_seq: The sequence number of the run within its thread.
        event_number: The number of the event.
        run_state: The state of the run.
    """

    run_seq: int
    event_number: int
    run_state: RunState


class ReservedEventNumbers(NamedTuple):
    """The event sequence numbers that a process needs to continue a run that it has taken over.

    Attributes:
        last_stored: The number of the last stored event.
        before_new_events: The number after which the new events start.
    """

    last_stored: int
    before_new_events: int


class EventBatch(NamedTuple):
    """A batch of consecutive events of a run.

    Attributes:
        previous_number: The number of the event before the batch.
        last_number: The number of the last event in the batch.
        events: The kind and the encoded bytes of each event, in order.
        delete_until: The number of the last event that is to be deleted, because the stored events
            of the run exceed their limit. 0 deletes none.
    """

    previous_number: int
    last_number: int
    events: Sequence[tuple[Any, bytes]]
    delete_until: int = 0


class RunTable(ServerTable):
    """Stores runs and their events in a checkpointer's database."""

    def __init__(self, saver: Checkpointer) -> None:
        super().__init__(saver)
        self._threads = ThreadList(saver)

    async def accept_run_and_list_live_run_ids(
        self,
        run: RunRow,
        *,
        reject_if_busy: bool,
        cancel_action: str | None,
        stores_events: bool = False,
        due_cron: DueCron | None = None,
    ) -> tuple[LiveRun | None, list[str]]:
        """Store a new run.

        If the thread has no other live run, the new run starts at once. If the thread already has a
        live run, the new run is queued. A delayed run (with `not_before`) is not queued until
        `queue_delayed_run_that_is_due` is called.

        Args:
            run: The ids, the owner, the graph and the request of the run.
            reject_if_busy: Whether to reject the run if it would have to wait. A run is also
                rejected if its thread does not exist.
            cancel_action: How to cancel the live runs of the thread, `"interrupt"` or `"rollback"`,
                or None to let them continue.
            stores_events: Whether the events of the run are stored.
            due_cron: The cron that starts the run, with the time of its next run. If another
                process has already advanced the cron, the run is rejected.

        Returns:
            The run as it was stored, or None if it was rejected. The second element contains the
            ids of the thread's live runs after the call, including the new run unless it is
            delayed. It is empty if another process has already advanced the cron.
        """
        live = run.live
        details, _, request = encrypt_run_details_error_and_request(self._seal, live, run[3:6])
        columns = run.created_at, details, request, live.thread_id
        options = int(reject_if_busy), run.not_before, int(stores_events)
        cancel = (
            self._build_cancel_statements(live.thread_id, "", cancel_action)
            if cancel_action
            else []
        )
        accept = self._sql("accept_run", live.run_id, live.owner, live.graph, *columns, *options)
        list_live = self._sql("live_runs_of_thread", live.thread_id)

        def flow() -> Flow[Any]:
            if due_cron is not None:
                # The transaction that stores a cron's run also sets the time of the cron's next
                # run.
                cron, next_at = due_cron
                if not (yield self._sql("advance_cron", next_at, cron.cron_id, cron.next_at)):
                    return [], []
            return (yield LastRequest([*cancel, accept, list_live]))

        *_, inserted, ids = await self._database.awrite(flow, exclusive_names=(live.thread_id,))
        if inserted:
            thread_key, seq, status = inserted[0]
            live = live._replace(thread_key=thread_key, seq=seq, status=status)
        return live if inserted else None, [run_id for (run_id,) in ids]

    async def end_run(
        self,
        run: LiveRun,
        status: RunState | Literal["rolled back"],
        error: Any = None,
        request: Any = None,
        unstored_events: EventBatch | None = None,
        *,
        known_cancel: str | None = None,
        webhook: Statement | None = None,
    ) -> list[str] | None:
        """End a run, and claim the next run of its thread for the same process.

        A run that was rolled back is deleted. The run is left unchanged if another process has
        taken it over, or if the thread was deleted. If a cancellation of the run was requested,
        this method ends the run only if `known_cancel` is `rollback` or equals the cancel action in
        the run's row.

        Args:
            run: The run to end.
            status: How the run ended.
            error: The error with which the run failed, or None. Like `request`, it is not stored if
                the run was cancelled, or if messages were erased from the thread during the run.
            request: The request of the run, if a client may send it again.
            unstored_events: The events of the run that are not stored yet.
            known_cancel: The cancel action that the caller has carried out, or None. After a
                `rollback`, the run ends whichever cancel action its row contains.
            webhook: The statement that stores the webhook of the run, from
                `WebhookTable.build_webhook_insert`.

        Returns:
            A list with the id of the claimed run, or an empty list if no run was claimed. None if
            the run was not ended.
        """
        now, key = time.time(), (run.thread_key, run.seq)
        _, *sealed = encrypt_run_details_error_and_request(self._seal, run, (None, error, request))
        if status == "rolled back":
            end = [self._sql("drop_run", *key, run.owner), *self._build_deleted_run_cleanup(run)]
        else:
            end = [
                *self._build_statements_that_store_events(run, unstored_events, known_cancel),
                *([] if webhook is None else [webhook]),
                self._sql("end_run", status, *sealed, now, *key, run.owner, known_cancel or ""),
            ]
        follow_up = [
            self._sql("claim_next_run", now, run.owner, run.thread_key),
            self._sql("drop_old_runs", run.thread_key, run.seq - MAX_ENDED_RUNS),
            self._sql("drop_events", run.thread_key, 0, run.seq - MAX_ENDED_RUNS, NO_LIMIT),
        ]
        results = await self._execute_statements_in_transaction(
            [*end, *follow_up], (run.thread_id,)
        )
        ended_rows = results[0 if status == "rolled back" else len(end) - 1]
        return [run_id for (run_id,) in results[len(end)]] if ended_rows else None

    async def update_run_details(self, run: LiveRun, changes: Mapping[str, Any]) -> None:
        """Update the stored details of a run, such as the person to whom its thread belongs.

        Some details of a run become known only after the run has started. The transaction reads the
        stored details again, because an erasure may have changed them after `run` was loaded.

        Args:
            run: The run.
            changes: The new values of entries in `RunRow.details`, by name.
        """

        def flow() -> Flow[None]:
            for row in (yield self._sql("runs_of_thread", run.thread_id, run.run_id)):
                stored = decrypt_run(self._seal, row)
                about, *_ = encrypt_run_details_error_and_request(
                    self._seal, run, ({**stored.details, **changes}, None, None)
                )
                yield LastRequest(
                    [self._sql("set_run_details", about, run.thread_key, run.seq, run.owner)]
                )

        await self._database.awrite(flow, exclusive_names=(run.thread_id,))

    async def queue_delayed_run_that_is_due(
        self, run: LiveRun, owner_process: str, action_to_cancel_live_runs: str | None
    ) -> None:
        """Queue a delayed run that has become due, unless another process has already queued it.

        The queued run starts once all earlier runs of its thread have ended. If
        `action_to_cancel_live_runs` is given, the live runs of the thread are cancelled.

        Args:
            run: The delayed run.
            owner_process: The process that is to execute the run.
            action_to_cancel_live_runs: How to cancel the live runs of the thread, or None to let
                them continue.
        """
        key = run.thread_key, run.run_id
        cancel = (
            self._build_cancel_statements(run.thread_id, "", action_to_cancel_live_runs)
            if action_to_cancel_live_runs
            else []
        )

        def flow() -> Flow[None]:
            for (status,) in (yield self._sql("run_status", *key)):
                if status == "delayed":
                    yield [
                        *cancel,
                        self._sql("start_delayed_run", owner_process, time.time(), *key),
                    ]

        await self._database.awrite(flow, exclusive_names=(run.thread_id,))

    async def delete_ended_run(self, run: LiveRun) -> None:
        """Delete a run and its events, if the run has ended."""
        await self._execute_statements_in_transaction(
            [
                self._sql("drop_ended_run", run.thread_id, run.run_id),
                *self._build_deleted_run_cleanup(run),
            ],
            (run.thread_id,),
        )

    def _build_deleted_run_cleanup(self, run: LiveRun) -> list[Statement]:
        """Build the SQL statements that clean up after a run's row has been deleted.

        The SQL statements delete the events of the deleted run, and reserve its sequence number so
        that no other run can get the same number.
        """
        return [
            self._sql(name, run.thread_key, run.seq)
            for name in ("drop_events_of_missing_run", "keep_run_seq")
        ]

    async def claim_runs(self, owner: str, orphaned_runs: Sequence[LiveRun] = ()) -> None:
        """Take over orphaned runs of dead processes, and claim all runs that `owner` can start now.

        Args:
            owner: The process that claims the runs.
            orphaned_runs: The runs of dead processes to take over.
        """
        take_over = [
            self._sql("adopt_run", owner, run.thread_key, run.seq, run.owner)
            for run in orphaned_runs
        ]
        await self._execute_statements_in_transaction(
            [*take_over, self._sql("claim_runs", time.time(), owner)], None
        )

    async def release_runs(self, owner: str) -> None:
        """Release all runs of a process, so that other processes can execute them."""
        await self._execute_statements_in_transaction([self._sql("release_runs", owner)], None)

    async def cancel_runs_and_list_their_ids(
        self, thread_id: str, run_id_or_all: str, cancel_action: str
    ) -> list[str]:
        """Cancel one run of a thread, or all its runs if `run_id_or_all` is `""`.

        A run in progress is stopped by the process that is executing it. A pending or delayed run
        ends at once. With the action `rollback`, a pending or delayed run is deleted.

        Returns:
            The ids of the cancelled runs. Runs that had ended before are left out.
        """
        cancel = self._build_cancel_statements(
            thread_id, run_id_or_all, cancel_action, includes_delayed=True
        )
        results = await self._execute_statements_in_transaction(cancel, (thread_id,))
        return [cancelled_id for (cancelled_id,) in chain.from_iterable(results)]

    def _build_cancel_statements(
        self, thread_id: str, run_id: str, action: str, *, includes_delayed: bool = False
    ) -> list[Statement]:
        """Build the statements that cancel runs; see `cancel_runs_and_list_their_ids`."""
        params = thread_id, run_id, int(includes_delayed)
        delete_waiting = [self._sql(name, *params) for name in ("keep_waiting_seq", "drop_waiting")]
        return [
            *(delete_waiting if action == "rollback" else []),
            self._sql("cancel_runs", *params, action, time.time()),
        ]

    # -- events

    async def add_events(self, batches: Sequence[tuple[LiveRun, EventBatch]]) -> None:
        """Store batches of events.

        A batch is skipped if the run has ended or another process has taken it over, or if messages
        were erased from the run's thread while the run was in progress.
        """
        inserts = chain.from_iterable(
            self._build_statements_that_store_events(*pair) for pair in batches
        )
        await self._execute_statements_in_transaction(
            [self._sql("allow_delayed_commit"), *inserts], ()
        )

    async def reserve_event_numbers_after_takeover(
        self, run: LiveRun, number_before_all_events: int
    ) -> ReservedEventNumbers | None:
        """Reserve a new range of event sequence numbers for a run that this process has taken over.

        Args:
            run: The run.
            number_before_all_events: The number before all events of the run, used if none is
                stored.

        Returns:
            The number of the last stored event, and the number after which the new events start.
            None if another process executes the run.
        """
        numbers = number_before_all_events, EVENT_NUMBER_BITS
        rows = await self._execute_statement(
            run.thread_id, "restart_events", run.thread_key, run.seq, *numbers, run.owner
        )
        return ReservedEventNumbers(*rows[0]) if rows else None

    async def get_thread_key(self, thread_id: str) -> int:
        """Return the key of a thread.

        If a thread is deleted and created again, the new thread gets a different key.

        Raises:
            UnknownThread: The thread does not exist.
        """
        for thread_key, *_ in await self._read_rows("find_thread", thread_id):
            return thread_key  # type: ignore[no-any-return]
        raise UnknownThread(f"there is no thread {thread_id!r}")

    async def read_newest_removal_numbers_by_thread_key(
        self, thread_keys: Sequence[int]
    ) -> dict[int, int]:
        """Return the sequence number of the latest removal in each thread, keyed by thread key.

        A thread's sequence number increases with each erasure of messages from the thread. Deleted
        threads are left out.
        """
        return dict(await self._read_rows("newest_removals_of_threads", json.dumps(thread_keys)))

    async def read_events(
        self, thread_key: int, seq_range: tuple[int, int], after_event: int
    ) -> list[EventBatch]:
        """Return a page of stored events with numbers above `after_event`, in ascending order.

        Args:
            thread_key: The key of the thread.
            seq_range: The numbers of the first and the last run whose events are read.
            after_event: The number of the event before the first one to read.

        Returns:
            At most 100 batches and about one megabyte. The list is empty if no event follows.
        """
        return [
            EventBatch(
                since, until, decrypt_batch_of_events(self._seal, thread_id, run_id, since, body)
            )
            for thread_id, run_id, since, until, body in await self._read_rows(
                "events_after", thread_key, *seq_range, after_event, _BATCH_LIMIT, _READ_BYTES
            )
        ]

    async def find_newest_event(
        self, thread_key: int, seq_range: tuple[int, int], after_event: int
    ) -> NewestEvent | None:
        """Return the newest event that any run in `seq_range` emitted, and the state of that run.

        The arguments are the same as in `read_events`.

        Returns:
            The newest event, or None if no event follows `after_event`.
        """
        rows = await self._read_rows("newest_event", thread_key, *seq_range, after_event)
        return NewestEvent(*rows[0]) if rows else None

    async def delete_old_events(self) -> None:
        """Delete the events of all runs that ended more than `EVENT_RETENTION_S` seconds ago."""
        has_more = True
        while has_more:
            old_runs = await self._read_rows(
                "aged_events", time.time() - EVENT_RETENTION_S, _CLEANUP_RUNS
            )
            has_more = len(old_runs) == _CLEANUP_RUNS
            deletes = [
                statement
                for thread_key, seq in old_runs
                for statement in (
                    self._sql("drop_events", thread_key, seq, seq, NO_LIMIT),
                    self._sql("stop_storing_events", thread_key, seq, seq),
                )
            ]
            if deletes:
                await self._execute_statements_in_transaction(deletes, (), deletes_rows=True)

    def _build_statements_that_store_events(
        self,
        run: LiveRun,
        batch: EventBatch | None,
        expected_cancel_action: str | None = "rollback",
    ) -> list[Statement]:
        """Build the statements that store a batch of events. No batch requires no statements.

        The events of a cancelled run are stored only if `expected_cancel_action` equals the run's
        cancel action, or is `"rollback"`.
        """
        if batch is None:
            return []
        key, previous = (run.thread_key, run.seq), batch.previous_number
        statements = [
            self._sql(
                "add_events",
                previous,
                batch.last_number,
                encrypt_events(self._seal, run, previous, batch.events),
                *key,
                run.owner,
                expected_cancel_action or "",
            )
        ]
        if batch.delete_until:
            statements.append(self._sql("drop_events", *key, run.seq, batch.delete_until))
        return statements

    # -- reading

    async def list_live_runs(self) -> list[LiveRun]:
        """Return all running and pending runs, and all delayed runs that are now due.

        The runs of each thread are sorted in execution order.
        """
        return [LiveRun(*row) for row in await self._read_rows("live_runs", time.time())]

    async def list_live_run_ids(self, thread_id: str) -> list[str]:
        """Return the ids of a thread's running and pending runs, in execution order."""
        return [run_id for (run_id,) in await self._read_rows("live_runs_of_thread", thread_id)]

    async def list_summaries_of_runs_after(self, thread_id: str, seq: int) -> list[RunSummary]:
        """List a thread's runs with a sequence number greater than `seq`.

        The runs are sorted by sequence number in ascending order. Delayed runs are left out.
        """
        return [RunSummary(*row[:3]) for row in await self._read_rows("runs_since", seq, thread_id)]

    async def list_runs(self, thread_id: str, run_id: str = "") -> list[RunRow]:
        """Return the stored runs of a thread, newest first. A `run_id` selects only this run."""
        return await self._read_and_decrypt_rows(decrypt_run, "runs_of_thread", thread_id, run_id)

    async def search_runs_and_whether_last_of_thread(
        self, query: ThreadQuery, status: str | None, limit: int, offset: int
    ) -> list[tuple[RunRow, bool]]:
        """Return one page of runs from the threads that might match a query, newest runs first.

        Only the conditions that can be expressed in SQL are applied, so the result may include runs
        whose threads do not match the query. The sort order of the query is ignored.

        Returns:
            Each run, with whether it is the last run of its thread.
        """
        conditions = [*self._threads.iter_query_conditions(query)]
        # The server reports delayed runs to its clients as pending.
        if status:
            is_status = "r.status IN (?, 'delayed')" if status == "pending" else "r.status = ?"
            conditions.append((is_status, [status]))
        sql, params = append_conditions(self._sql["newest_runs"], conditions)
        sql = sql.replace("{is_busy}", self._sql["is_busy"])
        sql += " ORDER BY r.created_at DESC, r.thread_key, r.seq DESC LIMIT ? OFFSET ?"
        rows = await self._fetch_rows(sql, *params, limit, offset)
        return [(decrypt_run(self._seal, row[:-1]), bool(row[-1])) for row in rows]
