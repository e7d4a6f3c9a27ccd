"""Execute a run while holding its thread's lock, and store the run's outcome.

The thread is cleaned up and the run's final status is stored before the lock is released. If the
lock were released earlier, another program waiting for the lock could continue the thread from a
state that is about to be rolled back. A run can be cancelled until its final status has been
stored. Every cancellation that the server has accepted is carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Any, Final, NamedTuple, Protocol, cast

from langchain_core.runnables import RunnableConfig

from perdure.checkpointers.address import TEAMS_KEY
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.run_writes import RUN_WRITES, RunWrites
from perdure.checkpointers.runs import LIVE_STATES, RunTable
from perdure.checkpointers.thread_list import ListedThread, RunStatus
from perdure.checkpointers.webhooks import WebhookTable
from perdure.errors import (
    AlreadyLocked,
    PerdureError,
    StorageFull,
    StorageUnavailable,
    UnknownThread,
)
from perdure.memory.views import AwaitedViews
from perdure.server.databases import OpenDatabase
from perdure.server.graphs import Graph, Graphs
from perdure.server.message_authors import (
    load_metadata_of_continued_checkpoints,
    mark_checkpoint_as_changed_by_other_users,
)
from perdure.server.person import Person, Sender, choose_checkpoint_owner, choose_person_of_run
from perdure.server.reply import encode_json
from perdure.server.run import Run, build_run_json, describe_error
from perdure.server.run_events import StoredEvents
from perdure.server.run_log import LoggedEvent
from perdure.server.run_progress import (
    find_run_progress,
    is_input_stored,
    store_start_checkpoint_data_for_rollback,
    undo_update_that_cannot_be_applied,
    undo_writes_of_run,
)
from perdure.server.teams import RunTeams
from perdure.server.threads import Threads
from perdure.storage.flow import Statement

MAX_ATTEMPTS: Final = 3
"""How many times a run is started if the process dies each time. After that the run fails."""
END_TIMEOUT_S: Final = 5
"""How many seconds the server waits for a cancelled run, for its last writes, or for the lock of
its thread."""
RETRY_S: Final = 0.5
"""The pause in seconds before the server tries again to store the end of a run."""
_LOGGER: Final = logging.getLogger("perdure.server.runs")


class RunAbandoned(PerdureError):
    """Raised if a run is abandoned because the server repeatedly died while executing it."""


class Player(Protocol):
    """Runs a graph to completion, and produces the run's events and output."""

    async def run_graph(self, graph: Graph, config: RunnableConfig, graph_input: Any) -> None:
        """Run the graph with the given input, or resume it if `graph_input` is None."""

    def build_run_end_events(self, error: Mapping[str, str] | None) -> list[LoggedEvent]:
        """Return the run's last events, which are stored together with its final status."""


class GraphServer(Protocol):
    """The server attributes and methods that are required to execute a run.

    Attributes:
        graphs: The graphs that the server serves.
        owners_are_people: Whether the `owner` of threads is the user of an API key.
        teams: Chooses the teams whose memory runs use. If it is None, the config of a run decides.
    """

    graphs: Graphs
    owners_are_people: bool
    teams: RunTeams | None

    def measure_run(self) -> AbstractContextManager[None]:
        """Measure the execution time of a graph that runs in the `with` block."""

    def get_player(self, run: Run) -> Player:
        """Return the `Player` that executes a run's graph."""


class ServedDatabase(Protocol):
    """The attributes and methods that `RunExecution` needs from `DatabaseRuns`.

    Attributes:
        saver: The checkpointer of the database.
        database: The checkpointer and the store of the database.
        table: The rows of runs.
        events: The stored events of runs.
        runs_by_id: The unfinished runs that this process follows, and the runs that ended most
            recently, by run id.
    """

    saver: Checkpointer
    database: OpenDatabase
    table: RunTable
    events: StoredEvents
    runs_by_id: dict[str, Run]

    @property
    def server(self) -> GraphServer:
        """Return the server of the process."""

    @property
    def threads(self) -> Threads:
        """Return the threads of the database."""

    def stop_runs_if_lock_is_lost(self) -> bool:
        """Return whether this process still holds its lock. If the lock is lost, stop all runs."""

    def wake(self) -> None:
        """Read the database rows of all runs immediately instead of waiting for the next sweep."""

    async def update_run_from_row(self, run: Run) -> None:
        """Update a run object from its database row."""

    async def read_output(self, run: Run) -> Any:
        """Read a run's output from its last checkpoint."""


class _StoredEnd(NamedTuple):
    """The end of a run as it was stored.

    Attributes:
        claimed_run_ids: The ids of the runs of the thread that start now. None if the run belonged
            to another process or its thread was deleted.
        closing_events: The last events of the run.
        error: The error that clients receive if the run failed, or None.
    """

    claimed_run_ids: list[str] | None
    closing_events: Sequence[LoggedEvent]
    error: dict[str, str] | None


class RunExecution:
    """One execution of a run in this process.

    Args:
        runs: The runs of the database.
        run: The run. Its row says that it is running in this process.
    """

    def __init__(self, runs: ServedDatabase, run: Run) -> None:
        self._runs, self._run, self._live = runs, run, run.row.live
        self._saver, self._threads = runs.saver, runs.threads
        self._lock, self._has_lock = AsyncExitStack(), False
        self._writes = RunWrites()
        self._webhook: Statement | None = None

    async def execute(self) -> None:
        """Execute the run, and store its outcome unless this process loses ownership of the run.

        See `Run.ownership_lost`.
        """
        run, live = self._run, self._live
        with run.mark_executing_during_block():
            async with self._lock:
                with run.allow_task_cancellation_and_record_run_outcome():
                    run.raise_if_stopped()
                    if live.attempt > MAX_ATTEMPTS:
                        raise RunAbandoned(
                            f"the server crashed {MAX_ATTEMPTS} times while it executed this run, "
                            "so the run is not started again"
                        )
                    # With the multitask strategy `reject`, the server accepts a run only if no
                    # other run of the thread is in progress. A short timeout is therefore enough:
                    # only another request can still hold the thread's lock, and it does so only
                    # briefly.
                    has_short_timeout = (
                        run.request.multitask_strategy == "reject" and not run.may_have_started
                    )
                    await self._take_lock(END_TIMEOUT_S if has_short_timeout else None)
                    if self._runs.stop_runs_if_lock_is_lost():
                        await self._runs.events.start_storing_events_of_run(run, live)
                        await self._run_graph_and_track_writes()
                if isinstance(run.failure, StorageUnavailable):
                    self._runs.stop_runs_if_lock_is_lost()
                if run.cancelled or run.ownership_lost or run.failure is not None:
                    await self._writes.close(END_TIMEOUT_S)
                end = await self._clean_up_and_store_run_end()
            if end is not None:
                self._publish_run_end_and_start_next_run(end)
            if run.ownership_lost:
                await self._runs.events.store_remaining_events_for_next_process(run, live)

    async def _take_lock(self, timeout_s: float | None) -> None:
        """Acquire the thread's lock, which is held until the execution ends."""
        if not self._has_lock:
            lock = self._saver.lock(self._run.thread_id, timeout_s=timeout_s)
            await self._lock.enter_async_context(lock)
            self._has_lock = True

    # -- the graph of the run

    async def _run_graph_and_track_writes(self) -> None:
        """Run the graph, and keep track of its database writes that are in progress."""
        token = RUN_WRITES.set(self._writes)
        try:
            await self._run_graph()
        finally:
            RUN_WRITES.reset(token)

    async def _run_graph(self) -> None:
        """Run the graph, and record in the thread how the run ended."""
        run, saver, threads = self._run, self._saver, self._threads
        read_at = time.monotonic()
        # `get_row` raises UnknownThread if the thread was deleted.
        thread = await threads.get_row(run.thread_id)
        run.removals = thread.removals if thread.key == run.thread_key else None
        if run.feed is None or run.events.removals is None:
            run.events.note_removals(run.removals, read_at)
        progress = await find_run_progress(saver, run) if run.may_have_started else None
        if progress == "overtaken":
            run.mark_interrupted_by_thread_change()
            return
        sender, person = await self._load_sender_and_store_person(thread)
        server_values = {
            "thread_id": run.thread_id,
            "run_id": run.run_id,
            **person.build_user_configurable(),
        }
        if (run_teams := self._runs.server.teams) is not None:
            teams = run_teams.find_teams_whose_memory_run_uses(run.tenant, sender, person)
            server_values |= {} if teams is None else {TEAMS_KEY: teams}
        graph_ids = {"graph_id": run.graph_name, "assistant_id": run.row.details["assistant_id"]}
        login = {"langgraph_auth_user": run.login} if run.login is not None else {}
        config = run.request.build_config(
            {**graph_ids, **login, **server_values}, is_continued=progress is not None
        )
        owner = choose_checkpoint_owner(thread, sender, person)
        config["metadata"] |= {} if owner is None else {"owner": owner}
        config["metadata"] |= person.build_checkpoint_metadata(sender)
        config["callbacks"] = [AwaitedViews(saver)]
        context = person.replace_user_in_context(run.request.context)
        run.request = run.request.model_copy(update={"context": context})
        graph_input = (
            None
            if progress
            else person.exclude_input_from_extraction_if_memory_is_off(run.request.graph_input())
        )
        run.waits_for_answer = progress == "asks"
        if progress is None:
            await store_start_checkpoint_data_for_rollback(saver, run, config)
            if not person.is_sender_trusted:
                # A run that answers only some of several open interrupts stores no checkpoint of
                # its own, so mark the checkpoint that contains the interrupts.
                await mark_checkpoint_as_changed_by_other_users(
                    saver,
                    run.thread_id,
                    run.request.start_checkpoint_id,
                    is_turn_without_memory=self._continues_turn(sender) and not person.uses_memory,
                )
        with run.allow_task_cancellation_and_record_run_outcome(), self._runs.server.measure_run():
            run.raise_if_stopped()
            if progress != "asks":
                graph_context = self._runs.server.graphs.open_graph(
                    *(run.graph_name, saver, self._runs.database.store, config),
                    access="threads.create_run",
                    user=run.login,
                    context=run.request.context,
                )
                marker = person.build_other_author_marker(
                    sender,
                    run.thread_id,
                    run.request.client_input_values,
                    continues_turn=self._continues_turn(sender),
                    start_checkpoint_id=None if progress else run.request.start_checkpoint_id,
                )
                async with graph_context as graph:
                    try:
                        player = self._runs.server.get_player(run)
                        with marker.mark_messages_during_block():
                            await player.run_graph(graph, config, graph_input)
                    except Exception:
                        # Wait until the command's update has been stored. Before that, it cannot be
                        # removed.
                        await self._writes.close(END_TIMEOUT_S)
                        await undo_update_that_cannot_be_applied(graph, saver, run)
                        raise
            run.outcome = "interrupted" if run.waits_for_answer else "success"
        if run.ownership_lost or run.cancelled == "rollback" or run.temporary:
            return
        thread_status = "idle" if run.outcome == "success" else run.outcome
        run.former_status = thread.last_run_status
        await threads.set_run_status(run.thread_id, cast(RunStatus, thread_status), thread)

    async def _load_sender_and_store_person(self, thread: ListedThread) -> tuple[Sender, Person]:
        """Return the user who requested the run and the person whose memories the run uses.

        This method stores both the person and whether the run uses the person's memories in the
        run's database row. The caller holds the thread's lock, so the thread's head cannot change.
        """
        run, owners_are_people = self._run, self._runs.server.owners_are_people
        sender = Sender.from_row(run.row.details)
        start_id = run.request.start_checkpoint_id
        has_input = run.protocol == "thread" and run.request.input is not None
        status = (
            thread.status
            if start_id is None or not has_input
            else await self._saver.astatus(run.thread_id, checkpoint_id=start_id)
        )
        if has_input and status.state == "waiting":
            # The thread is waiting for an answer to an interrupt, so the run's input is used as the
            # answer. An answer that edits a tool call counts as a message of the sender.
            author = sender.author if run.request.answers_interrupt_with_edited_tool_call else None
            sender = sender._replace(author=author, deed="answered")
        continued_metadata = (
            await load_metadata_of_continued_checkpoints(
                self._saver, run.thread_id, run.request.checkpoint_ids_by_namespace
            )
            if self._continues_turn(sender)
            else []
        )
        person = choose_person_of_run(
            thread,
            sender,
            owners_are_people=owners_are_people,
            continued_metadata=continued_metadata,
            names_older_checkpoint=await self._names_older_checkpoint(),
        )
        earlier_decision = run.row.details.get("uses_memory") if run.may_have_started else None
        if earlier_decision is not None:
            # An earlier execution of this run has already decided whether the run uses memories.
            # Keep that decision, because it was based on the state that the thread had when the run
            # was requested.
            person = person._replace(uses_memory=earlier_decision)
        learned: dict[str, Any] = {"person": person.user}
        if run.request.checkpoint_ids_by_namespace or not person.uses_memory:
            learned["uses_memory"] = person.uses_memory
        changes = {
            name: value for name, value in learned.items() if run.row.details.get(name) != value
        }
        if changes:
            run.row = run.row._replace(details={**run.row.details, **changes})
            await self._runs.table.update_run_details(self._live, changes)
        return sender, person

    async def _names_older_checkpoint(self) -> bool:
        """Return whether the request specifies a checkpoint other than the thread's head."""
        named_ids = self._run.request.checkpoint_ids_by_namespace
        if not named_ids:
            return False
        config = {"thread_id": self._run.thread_id, "checkpoint_ns": ""}
        head = await self._saver.aget_tuple({"configurable": config})
        return head is None or named_ids != {"": head.config["configurable"]["checkpoint_id"]}

    def _continues_turn(self, sender: Sender) -> bool:
        """Return whether the run continues the thread's last turn instead of starting a new one.

        Clients that use the thread stream protocol send the answer to an interrupt as a run's
        input.
        """
        return self._run.request.continues_turn or sender.deed == "answered"

    # -- the end of the run

    async def _clean_up_and_store_run_end(self) -> _StoredEnd | None:
        """Clean up the thread and store the run's final status.

        Return None if this process has lost ownership of the run; see `Run.ownership_lost`.

        If the final status cannot be stored, for example because the disk is full, the server
        retries until it succeeds. The graph is not executed again.
        """
        run = self._run
        while not run.ownership_lost:
            try:
                if not run.thread_is_clean:
                    await self._carry_out_cancellation_and_clean_up_thread()
                    run.thread_is_clean = True
                if (end := await self._store_run_end_unless_cancelled_again()) is not None:
                    return end
                # The run was cancelled again after the cleanup, so clean up the thread again.
                run.thread_is_clean = False
            except Exception as exc:
                self._runs.stop_runs_if_lock_is_lost()
                # Log only the type of the error, because its message may contain user content.
                error_type = type(exc).__name__
                _LOGGER.warning(
                    "the final status of run %s could not be stored (%s)", run.run_id, error_type
                )
                if not isinstance(exc, StorageUnavailable | StorageFull | AlreadyLocked):
                    # An error that retrying cannot fix, such as a damaged thread, ends the run.
                    run.record_first_failure(exc)
                    run.thread_is_clean = True
                await asyncio.sleep(RETRY_S)
        return None

    async def _carry_out_cancellation_and_clean_up_thread(self) -> None:
        """Roll back or interrupt a cancelled run, and clean up before the run's end is stored.

        The cleanup prepares the run's webhook, and deletes the thread of a temporary run.
        """
        run = self._run
        run.carried_out = run.cancelled
        if run.carried_out == "rollback" or run.temporary:
            await self._take_lock(END_TIMEOUT_S)
        if run.carried_out == "rollback":
            await self._remove_everything_stored_by_run()
        elif run.carried_out is not None:
            await self._mark_interrupted()
        self._webhook = None
        if run.request.webhook and not run.rolled_back:
            await self._store_webhook_now_or_with_run_end(run.request.webhook)
        if run.temporary:
            with contextlib.suppress(UnknownThread):
                await self._threads.delete_while_holding_lock(
                    run.thread_id, adds_removal_record=False
                )
        elif run.outcome == "error":
            run.has_unstored_input = not await is_input_stored(self._saver, run)

    async def _remove_everything_stored_by_run(self) -> None:
        """Delete everything that the run stored. The caller must hold the thread's lock."""
        run = self._run
        await self._writes.close(END_TIMEOUT_S)
        await self._saver.adelete_for_runs([run.run_id], thread_id=run.thread_id)
        await undo_writes_of_run(self._saver, run)
        if run.former_status is not None:
            # The rollback was requested after the graph had finished, so restore the thread's
            # previous status.
            await self._threads.set_run_status(run.thread_id, run.former_status)
        if run.request.webhook:
            await WebhookTable(self._saver).delete(run.run_id)
        run.rolled_back, run.outcome, run.failure = True, "interrupted", None

    async def _mark_interrupted(self) -> None:
        """Mark the run as interrupted, even if it was cancelled after its last step."""
        run, is_late = self._run, self._run.outcome != "interrupted"
        run.outcome, run.failure = "interrupted", None
        if is_late and run.former_status is not None:
            # The run was cancelled after its last step, so the thread still has the status of a
            # successful run.
            await self._threads.set_run_status(run.thread_id, "interrupted")

    async def _store_webhook_now_or_with_run_end(self, url: str) -> None:
        """Store the run's webhook, or prepare the SQL statement that stores it at the run's end.

        The prepared SQL statement is executed together with the statements that store the run's
        final status. The webhook of a temporary run is stored immediately, because the run's thread
        is deleted before the final status is stored.
        """
        run = self._run
        ended_row = run.row._replace(
            live=run.row.live._replace(status=run.outcome), updated_at=time.time()
        )
        output = run.output
        if output is None and run.outcome != "error":
            # If the graph's code was changed during the run, reading the run's output from the
            # database can fail.
            with contextlib.suppress(PerdureError, LookupError, TypeError, ValueError):
                output = await self._runs.read_output(run)
        run_json = {
            **build_run_json(ended_row),
            "values": output,
            "error": None if run.failure is None else describe_error(run.failure),
        }
        owners = {"user": run.user, "person": run.row.details.get("person")}
        content = {"url": url, "run": json.loads(encode_json(run_json)), **owners}
        short_content = {**content, "run": {**content["run"], "values": None, "error": None}}
        table = WebhookTable(self._saver)
        if run.temporary:
            await table.add_webhook(run.row.live, content, short_content, keeps_thread=False)
        else:
            self._webhook = table.build_webhook_insert(
                *(run.row.live, content, short_content),
                keeps_thread=True,
                known_cancel=run.carried_out,
            )

    async def _store_run_end_unless_cancelled_again(self) -> _StoredEnd | None:
        """Store the end of the run.

        If another cancellation of the run has been requested but not carried out yet, store nothing
        and return None.
        """
        run, live, runs = self._run, self._live, self._runs
        if run.cancelled != run.carried_out and not run.temporary:
            return None
        error = None if run.failure is None else describe_error(run.failure)
        stored_request = {"request": run.request.to_stored()} if run.has_unstored_input else None
        closing = runs.server.get_player(run).build_run_end_events(error)
        last_batch = await runs.events.store_events_except_returned_last_batch(run, live, closing)
        end_state: Any = "rolled back" if run.rolled_back else run.outcome
        options: Any = {"known_cancel": run.carried_out, "webhook": self._webhook}
        claimed = await runs.table.end_run(
            live, end_state, error, stored_request, last_batch, **options
        )
        if claimed is not None and last_batch is not None:
            run.record_stored_batch(last_batch)
        if claimed is None and not run.temporary:
            await runs.update_run_from_row(run)
            if run.status in LIVE_STATES and run.cancelled != run.carried_out:
                return None
        return _StoredEnd(claimed, closing, error)

    def _publish_run_end_and_start_next_run(self, end: _StoredEnd) -> None:
        """Notify readers that the run has ended, and start the next run of the thread.

        Another process may have stored the thread's next run. If this process has not loaded that
        run yet, it reads the database rows of all runs immediately instead of waiting for the next
        sweep.
        """
        run, live, runs_by_id = self._run, self._live, self._runs.runs_by_id
        if run.rolled_back:
            runs_by_id.pop(run.run_id, None)
        if end.claimed_run_ids is None and not run.temporary:
            # If the run's row was deleted together with its thread, `update_run_from_row` has set
            # the status to `interrupted`. In this case, report the error of this execution to
            # clients.
            if run.status == "interrupted" and run.error is None:
                run.row = run.row._replace(error=end.error)
            return
        ended_run = live._replace(status=run.outcome)
        run.row = run.row._replace(
            live=ended_run, updated_at=time.time(), error=end.error, request=None
        )
        run.events.extend(end.closing_events)
        claimed = end.claimed_run_ids or []
        for next_run in filter(None, map(runs_by_id.get, claimed)):
            next_run.replace_cached_row(
                next_run.row._replace(live=next_run.row.live._replace(status="running"))
            )
        if not runs_by_id.keys() >= {*claimed}:
            self._runs.wake()
