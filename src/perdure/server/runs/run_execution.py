"""Execute a run while holding its thread's lock, and store the run's outcome.

The thread is cleaned up and the run's final status is stored before the lock is released. Without
the thread's lock, another program could continue from a state that is about to be rolled back. A
run can be cancelled until its final status has been stored. Every cancellation that the server has
accepted is carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, NamedTuple, Protocol, cast

from langchain_core.runnables import RunnableConfig

from perdure.checkpointers.address import TEAMS_KEY, WITHOUT_MEMORY_KEY
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.run_writes import RUN_WRITES, RunWrites
from perdure.errors import (
    AlreadyLocked,
    PerdureError,
    StorageFull,
    StorageUnavailable,
    UnknownThread,
)
from perdure.memory.short_term.views import AwaitedViews
from perdure.run_tables.runs import LIVE_STATES, RunTable
from perdure.run_tables.thread_list import ListedThread, RunStatus
from perdure.run_tables.webhooks import WebhookTable
from perdure.server.databases import OpenDatabase
from perdure.server.http.reply import encode_json
from perdure.server.runs.changes_by_other_users import (
    ChangeRecord,
    does_run_continue_changes_by_other_users,
    load_stored_texts,
)
from perdure.server.runs.event_log import LoggedEvent
from perdure.server.runs.run import Run, build_run_json, describe_error
from perdure.server.runs.run_events import StoredEvents
from perdure.server.runs.run_progress import (
    find_run_progress,
    is_input_stored,
    store_start_checkpoint_data_for_rollback,
    undo_update_that_cannot_be_applied,
    undo_writes_of_run,
)
from perdure.server.runs.run_request import NO_STORED_TEXTS, StoredTexts
from perdure.server.runs.shared_run_state import SharedRunState
from perdure.server.thread_person import (
    Person,
    Sender,
    choose_checkpoint_owner,
    choose_graph_and_assistant_metadata,
    choose_person_of_run,
)
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


class RunQueueProtocol(Protocol):
    """The attributes and methods that `RunExecution` needs from `RunQueue`.

    Attributes:
        shared_state: The graphs and players that the runs of all tenants share.
        saver: The checkpointer of the database.
        database: The checkpointer and the store of the database.
        table: The rows of runs.
        events: The stored events of runs.
        runs_by_id: The unfinished runs that this process follows, and the runs that ended most
            recently, by run id.
    """

    shared_state: SharedRunState
    saver: Checkpointer
    database: OpenDatabase
    table: RunTable
    events: StoredEvents
    runs_by_id: dict[str, Run]

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
        queue: The runs of the database.
        run: The run. Its row says that it is running in this process.
    """

    def __init__(self, queue: RunQueueProtocol, run: Run) -> None:
        self._queue, self._run, self._live = queue, run, run.row.live
        self._saver, self._threads = queue.saver, queue.threads
        self._lock, self._has_lock = AsyncExitStack(), False
        self._writes = RunWrites()
        self._webhook: Statement | None = None
        # The action of the cancellation that the clean-up of the thread has carried out, or None
        self._carried_out: str | None = None
        # Whether the run failed before its input was stored. The input is then kept in the run's
        # row, so that the client can send the input again.
        self._has_unstored_input = False
        self._change_record = ChangeRecord(queue.saver, queue.threads, run)

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
                            "so the run will not be started again"
                        )
                    # With the multitask strategy `reject`, the server accepts a run only if no
                    # other run of the thread is in progress. Only a request that changes the thread
                    # can still hold the thread's lock, and only briefly. A short timeout is
                    # therefore enough to wait for the thread's lock.
                    has_short_timeout = (
                        run.request.multitask_strategy == "reject" and not run.may_have_started
                    )
                    await self._take_lock(END_TIMEOUT_S if has_short_timeout else None)
                    if self._queue.stop_runs_if_lock_is_lost():
                        await self._queue.events.start_storing_events_of_run(run, live)
                        await self._run_graph_and_track_writes()
                if isinstance(run.failure, StorageUnavailable):
                    self._queue.stop_runs_if_lock_is_lost()
                if run.cancelled or run.ownership_lost or run.failure is not None:
                    await self._writes.close(END_TIMEOUT_S)
                end = await self._clean_up_and_store_run_end()
            if end is not None:
                self._publish_run_end_and_start_next_run(end)
            if run.ownership_lost:
                await self._queue.events.store_remaining_events_for_next_process(run, live)

    async def _take_lock(self, timeout_s: float | None) -> None:
        """Acquire the thread's lock, which is held until the execution ends."""
        if not self._has_lock:
            await self._lock.enter_async_context(
                self._saver.lock(self._run.thread_id, timeout_s=timeout_s)
            )
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
        sender, person = await self._load_sender_and_store_person(
            thread, has_started=progress is not None
        )
        config = self._build_config(thread, sender, person, is_continued=progress is not None)
        run.request = run.request.model_copy(
            update={"context": person.replace_user_in_context(run.request.context)}
        )
        graph_input = (
            None
            if progress
            else person.exclude_input_from_extraction_if_memory_is_off(run.request.graph_input())
        )
        run.waits_for_answer = progress == "waiting"
        if progress is None:
            await store_start_checkpoint_data_for_rollback(saver, run)
        # This block ends before the thread's status is stored, so that a cancellation cannot
        # interrupt storing the status. After this block, the same context manager in `execute` only
        # records errors.
        with (
            run.allow_task_cancellation_and_record_run_outcome(),
            self._queue.shared_state.measure_run(),
        ):
            run.raise_if_stopped()
            if progress != "waiting":
                graph_context = self._queue.shared_state.graphs.open_graph(
                    *(run.graph_name, saver, self._queue.database.store, config),
                    access="threads.create_run",
                    user=run.login,
                    context=run.request.context,
                )
                self._change_record.marker = marker = person.build_other_author_marker(
                    sender,
                    run.thread_id,
                    run.request.client_input_values,
                    was_changed_by_other_users=thread.changes_by_other_users != "none",
                )
                async with graph_context as graph:
                    try:
                        player = self._queue.shared_state.players_by_run[run]
                        with marker.mark_messages_during_block():
                            await player.run_graph(graph, config, graph_input)
                    except Exception:
                        # Wait until the command's update has been stored, because only a stored
                        # update can be removed.
                        await self._writes.close(END_TIMEOUT_S)
                        await undo_update_that_cannot_be_applied(graph, saver, run)
                        raise
            run.record_end_of_graph()
        if run.ownership_lost or run.cancelled == "rollback" or run.temporary:
            return
        thread_status = "idle" if run.outcome == "success" else run.outcome
        run.former_status = thread.last_run_status
        await threads.set_run_status(run.thread_id, cast(RunStatus, thread_status), thread)

    def _build_config(
        self, thread: ListedThread, sender: Sender, person: Person, *, is_continued: bool
    ) -> RunnableConfig:
        """Build the config with which the graph runs, including the values that the server sets."""
        run = self._run
        server_values = {
            "thread_id": run.thread_id,
            "run_id": run.run_id,
            **person.build_configurable_entries_for_user(),
        }
        if (run_teams := self._queue.shared_state.teams) is not None:
            teams = run_teams.find_teams_whose_memory_run_uses(run.tenant, sender, person)
            server_values |= {} if teams is None else {TEAMS_KEY: teams}
        graph_ids = {"graph_id": run.graph_name, "assistant_id": run.row.details["assistant_id"]}
        login = {"langgraph_auth_user": run.login} if run.login is not None else {}
        config = run.request.build_config(
            {**graph_ids, **login, **server_values}, is_continued=is_continued
        )
        owner = choose_checkpoint_owner(thread, sender, person)
        config["metadata"] |= {} if owner is None else {"owner": owner}
        config["metadata"] |= person.build_checkpoint_metadata(sender)
        # The graph id and the assistant id are stored in the thread's metadata. The run itself uses
        # the assistant that the run's request names, even if the thread's metadata names another
        # assistant.
        config["metadata"] |= choose_graph_and_assistant_metadata(thread, person, **graph_ids)
        config["callbacks"] = [AwaitedViews(self._saver)]
        return config

    async def _load_sender_and_store_person(
        self, thread: ListedThread, *, has_started: bool
    ) -> tuple[Sender, Person]:
        """Return the user who requested the run and the person whose memories the run uses.

        The id of the user to whom the thread belongs is stored in the run's database row. The run's
        database row also records whether the run uses the memories of the user to whom the thread
        belongs. The caller holds the thread's lock, so the thread's head cannot change.

        Args:
            thread: The thread.
            has_started: Whether an earlier execution of the run has stored the run's input, answer
                or command.
        """
        run, owners_are_people = self._run, self._queue.shared_state.owners_are_people
        sender = Sender.from_row(run.row.details)
        start_id = run.request.start_checkpoint_id
        has_input = run.protocol == "thread" and run.request.input is not None
        status = (
            thread.status
            if start_id is None or not has_input
            else await self._saver.astatus(run.thread_id, checkpoint_id=start_id)
        )
        if has_input and status.state == "waiting":
            # The thread is waiting for an answer to an interrupt, so the run's input is used as
            # that answer. If the answer edits a tool call, the sender counts as the author of the
            # edited text.
            author = sender.author if run.request.answers_interrupt_with_edited_tool_call else None
            sender = sender._replace(author=author, deed="answered")
        continues_turn = sender.deed == "answered" or run.request.continues_turn()
        names_older_checkpoint = not has_started and await self._names_older_checkpoint()
        if not (continues_turn or has_started) and (
            thread.changes_by_other_users == "since_last_message"
            or (names_older_checkpoint and thread.changes_by_other_users != "none")
        ):
            stored_texts = await self._load_stored_texts(start_id)
            if sender.deed == "scheduled":
                # Treat the input of a cron's run as new, even if the thread already contains the
                # same texts.
                stored_texts = NO_STORED_TEXTS._replace(input_channels=stored_texts.input_channels)
            continues_turn = run.request.continues_turn(stored_texts)
        continues_changes = continues_turn and await does_run_continue_changes_by_other_users(
            self._saver,
            thread,
            run.request.checkpoint_ids_by_namespace if names_older_checkpoint else {},
        )
        person = choose_person_of_run(
            thread,
            sender,
            owners_are_people=owners_are_people,
            names_older_checkpoint=names_older_checkpoint,
            continues_changes_by_other_users=continues_changes,
        )
        await self._record_changes_by_other_users(
            thread,
            sender,
            person,
            has_started=has_started,
            names_older_checkpoint=names_older_checkpoint,
            continues_turn=continues_turn,
            continues_changes=continues_changes,
        )
        earlier_decision = run.row.details.get("uses_memory") if run.may_have_started else None
        if earlier_decision is not None:
            # If the run was executed before, keep the earlier decision on whether the run uses
            # memories. The decision on using memories is based on the thread's state at the time of
            # the run request.
            person = person._replace(uses_memory=earlier_decision)
        # If a run continues one of the person's older turns, that turn becomes the thread's newest
        # turn.
        self._change_record.begins_turn_of_person = person.uses_memory and (
            not continues_turn or names_older_checkpoint
        )
        learned: dict[str, Any] = {"person": person.user}
        if run.request.checkpoint_ids_by_namespace or not person.uses_memory:
            learned["uses_memory"] = person.uses_memory
        changes = {
            name: value for name, value in learned.items() if run.row.details.get(name) != value
        }
        if changes:
            run.row = run.row._replace(details={**run.row.details, **changes})
            await self._queue.table.update_run_details(self._live, changes)
        return sender, person

    async def _record_changes_by_other_users(
        self,
        thread: ListedThread,
        sender: Sender,
        person: Person,
        *,
        has_started: bool,
        names_older_checkpoint: bool,
        continues_turn: bool,
        continues_changes: bool,
    ) -> None:
        """Record in the thread whether the run makes or continues changes by other users.

        Args:
            thread: The thread.
            sender: The user who requested the run.
            person: The person whose memories the run uses.
            has_started: Whether an earlier execution of the run has stored the run's input, answer
                or command.
            names_older_checkpoint: Whether the request specifies a checkpoint other than the head.
            continues_turn: Whether the run continues an earlier turn; see
                `RunRequest.continues_turn`.
            continues_changes: Whether the run continues changes by other users; see
                `does_run_continue_changes_by_other_users`.
        """
        record = self._change_record
        record.changes_at_start = thread.changes_by_other_users
        if not person.is_sender_trusted:
            has_command = self._run.request.command is not None
            await record.record_run_of_other_user(
                # If another user resends a failed run's message, the message keeps its original
                # author. If the original author is the user to whom the thread belongs, resending
                # the message does not count as a change by another user.
                changes_state=names_older_checkpoint
                or sender.author not in (None, person.user)
                or (sender.author is None and not continues_turn),
                adds_pending_writes=not has_started and (has_command or sender.deed == "answered"),
            )
        belongs_to_nobody = (
            not person.user and thread.changes_by_other_users != "since_last_message"
        )
        if continues_changes or belongs_to_nobody:
            # If a thread belongs to no user, record each run in the thread as a change by another
            # user. Some older checkpoints in the thread may belong to a user who did not start the
            # run.
            await record.record("since_last_message")

    async def _load_stored_texts(self, checkpoint_id: str | None) -> StoredTexts:
        """Return the texts in the state from which the run starts.

        The graph is opened with the run's config but without memories, because the server has not
        yet decided whose memories the run uses.
        """
        run, shared_state = self._run, self._queue.shared_state
        server_values: dict[str, Any] = {
            "thread_id": run.thread_id,
            "run_id": run.run_id,
            "user_id": "",
            WITHOUT_MEMORY_KEY: True,
            **({} if run.login is None else {"langgraph_auth_user": run.login}),
        }
        thread = run.thread_id, checkpoint_id
        try:
            async with shared_state.graphs.open_graph(
                *(run.graph_name, self._saver, self._queue.database.store),
                run.request.build_config(server_values, is_continued=False),
                access="threads.create_run",
                user=run.login,
                context=run.request.context,
            ) as graph:
                return await load_stored_texts(graph, self._saver, *thread)
        except PerdureError:
            raise
        # A graph factory can raise any exception. Ignore the exception, because the run calls the
        # factory again and reports errors.
        except Exception:
            return await load_stored_texts(None, self._saver, *thread)

    async def _names_older_checkpoint(self) -> bool:
        """Return whether the request specifies a checkpoint other than the thread's head."""
        named_ids = self._run.request.checkpoint_ids_by_namespace
        if not named_ids:
            return False
        head = await self._saver.aget_tuple(self._run.thread_config)
        return head is None or named_ids != {"": head.config["configurable"]["checkpoint_id"]}

    # -- the end of the run

    async def _clean_up_and_store_run_end(self) -> _StoredEnd | None:
        """Clean up the thread and store the run's final status.

        Return None if this process has lost ownership of the run; see `Run.ownership_lost`.

        If the final status cannot be stored, for example because the disk is full, the server
        retries until it succeeds. The graph is not executed again.
        """
        run, is_thread_clean = self._run, False
        while not run.ownership_lost:
            try:
                if not is_thread_clean:
                    await self._carry_out_cancellation_and_clean_up_thread()
                    is_thread_clean = True
                if (end := await self._store_run_end_unless_cancelled_again()) is not None:
                    return end
                # A client requested another cancellation after the thread was cleaned up. The run's
                # final status was not stored, because the cleanup did not take this cancellation
                # into account. The thread must be cleaned up again.
                is_thread_clean = False
            except Exception as exc:
                self._queue.stop_runs_if_lock_is_lost()
                # Log only the type of the error, because its message may contain user content.
                _LOGGER.warning(
                    "the final status of run %s could not be stored (%s)",
                    run.run_id,
                    type(exc).__name__,
                )
                if not isinstance(exc, StorageUnavailable | StorageFull | AlreadyLocked):
                    # An error that retrying cannot fix, such as a damaged thread, ends the run.
                    run.record_first_failure(exc)
                    is_thread_clean = True
                await asyncio.sleep(RETRY_S)
        return None

    async def _carry_out_cancellation_and_clean_up_thread(self) -> None:
        """Carry out a requested cancellation, and clean up before the run's final status is stored.

        A cancellation either removes everything that the run stored, or marks the run as
        interrupted.

        The cleanup prepares the run's webhook for sending, and deletes the thread of a temporary
        run.
        """
        run = self._run
        self._carried_out = run.cancelled
        if self._carried_out == "rollback" or run.temporary:
            await self._take_lock(END_TIMEOUT_S)
        if self._carried_out == "rollback":
            await self._remove_everything_stored_by_run()
        elif self._carried_out is not None:
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
            self._has_unstored_input = not await is_input_stored(self._saver, run)
            if self._has_unstored_input:
                await self._change_record.restore_record_from_before_run()
        if not (run.temporary or run.rolled_back):
            await self._change_record.record_new_turn_of_person()

    async def _remove_everything_stored_by_run(self) -> None:
        """Delete everything that the run stored. The caller must hold the thread's lock."""
        run = self._run
        await self._writes.close(END_TIMEOUT_S)
        await self._saver.adelete_for_runs([run.run_id], thread_id=run.thread_id)
        await undo_writes_of_run(self._saver, run)
        await self._change_record.restore_record_from_before_run()
        if run.former_status is not None:
            # If a rollback was requested after the graph finished, restore the thread's status from
            # before the run.
            await self._threads.set_run_status(run.thread_id, run.former_status)
        if run.request.webhook:
            await WebhookTable(self._saver).delete(run.run_id)
        run.mark_rolled_back()

    async def _mark_interrupted(self) -> None:
        """Mark the run as interrupted, even if it was cancelled after its last step."""
        run, is_late = self._run, self._run.outcome != "interrupted"
        run.mark_interrupted()
        if is_late and run.former_status is not None:
            # The run was cancelled after it had set the thread's status to that of a successful
            # run. Correct the thread's status.
            await self._threads.set_run_status(run.thread_id, "interrupted")

    async def _store_webhook_now_or_with_run_end(self, url: str) -> None:
        """Store the run's webhook request immediately if the run is temporary.

        For other runs, build the SQL statement that stores the webhook request when the run ends.

        The SQL statement that stores the webhook request is executed in the transaction that also
        stores the run's final status. For a temporary run, the webhook request is stored
        immediately, because the run's thread is deleted before the run's final status is stored.
        """
        run = self._run
        ended_row = run.row._replace(
            live=run.row.live._replace(status=run.outcome), updated_at=time.time()
        )
        output = run.output
        if output is None and run.outcome != "error":
            # Ignore errors, because reading the run's output from the database can fail if the
            # graph's code was changed during the run.
            with contextlib.suppress(PerdureError, LookupError, TypeError, ValueError):
                output = await self._queue.read_output(run)
        run_json = {
            **build_run_json(ended_row),
            "values": output,
            "error": None if run.failure is None else describe_error(run.failure),
        }
        content = {
            "url": url,
            "run": json.loads(encode_json(run_json)),
            "user": run.user,
            "person": run.row.details.get("person"),
        }
        short_content = {**content, "run": {**content["run"], "values": None, "error": None}}
        table = WebhookTable(self._saver)
        if run.temporary:
            await table.add_webhook(run.row.live, content, short_content, keeps_thread=False)
        else:
            self._webhook = table.build_webhook_insert(
                *(run.row.live, content, short_content),
                keeps_thread=True,
                known_cancel=self._carried_out,
            )

    async def _store_run_end_unless_cancelled_again(self) -> _StoredEnd | None:
        """Store the end of the run.

        If another cancellation of the run is pending, store nothing and return None.
        """
        run, live, queue = self._run, self._live, self._queue
        if run.cancelled != self._carried_out and not run.temporary:
            return None
        error = None if run.failure is None else describe_error(run.failure)
        stored_request = (
            {"request": run.request.build_fields_to_store()} if self._has_unstored_input else None
        )
        closing = queue.shared_state.players_by_run[run].build_run_end_events(error)
        last_batch = await queue.events.store_events_except_returned_last_batch(run, live, closing)
        end_state: Any = "rolled back" if run.rolled_back else run.outcome
        claimed = await queue.table.end_run(
            live,
            end_state,
            error,
            stored_request,
            last_batch,
            known_cancel=self._carried_out,
            webhook=self._webhook,
        )
        if claimed is not None and last_batch is not None:
            run.record_stored_batch(last_batch)
        if claimed is None and not run.temporary:
            await queue.update_run_from_row(run)
            if run.status in LIVE_STATES and run.cancelled != self._carried_out:
                return None
        return _StoredEnd(claimed, closing, error)

    def _publish_run_end_and_start_next_run(self, end: _StoredEnd) -> None:
        """Notify readers that the run has ended, and start the next run of the thread.

        The thread's next run may be missing from memory, because another process stored the run. If
        the next run is missing from memory, this process immediately reads the database rows of all
        runs.
        """
        run, live, runs_by_id = self._run, self._live, self._queue.runs_by_id
        if run.rolled_back:
            runs_by_id.pop(run.run_id, None)
        if end.claimed_run_ids is None and not run.temporary:
            # If the run's row was deleted together with its thread, set the run's error in memory,
            # so that clients receive the error that occurred in this process.
            if run.status == "interrupted" and run.error is None:
                run.row = run.row._replace(error=end.error)
            return
        run.record_stored_end(live, end.error)
        run.events.extend(end.closing_events)
        claimed = end.claimed_run_ids or []
        for next_run in filter(None, map(runs_by_id.get, claimed)):
            next_run.replace_cached_row(
                next_run.row._replace(live=next_run.row.live._replace(status="running"))
            )
        if not runs_by_id.keys() >= {*claimed}:
            self._queue.wake()
