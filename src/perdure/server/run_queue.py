"""The runs of a database that this process has: rows that say what is to be done, tasks that do it.

A thread has one run at a time, whichever server has it. A process lives as long as it holds a lock
of its own name; what one that is gone has left is taken over and goes on from its last checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from contextvars import Context
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, Protocol
from uuid import uuid4

from langchain_core.runnables import RunnableConfig
from pydantic import ValidationError

from perdure.checkpointers.records import LiveRun
from perdure.checkpointers.runs import ALL_RUNS, LIVE_STATES, RunTable
from perdure.errors import (
    ConfigurationError,
    CorruptRecord,
    PerdureError,
    StorageUnavailable,
)
from perdure.server.auth_file import User
from perdure.server.databases import OpenDatabase
from perdure.server.erasure_counts import ErasureCounts
from perdure.server.run import CANCEL_ACTIONS, Run, add_interrupts, describe_error, restore_request
from perdure.server.run_events import StoredEvents
from perdure.server.run_execution import GraphServer, RunExecution
from perdure.server.run_log import Log
from perdure.server.threads import Threads

RETAINED_ENDED_RUNS: Final = 50
"""Of how many runs that have ended the events can be read again in this process."""
SWEEP_S: Final = 0.5
"""How often rows are looked at: what is to be taken over, cancelled, or has ended elsewhere."""
FAST_SWEEP_S: Final = 0.1
"""The same, while somebody here waits for what another process runs."""
CLEANUP_INTERVAL_S: Final = 60
"""How often what runs told is removed that ended long ago, and threads whose time is over."""
EXPIRED_PER_SWEEP: Final = 20
"""How many of these threads are deleted at once, so that a sweep does not take long."""
RETRY_PAUSE_S: Final = 0.05
DUE_PER_SWEEP: Final = 100
"""How many delayed runs whose time has come are begun before other rows are looked at again."""
_LIVENESS_LOCK_PREFIX: Final = (
    "perdure.server/"  # and the name of a process: the lock that it holds
)
_LOGGER: Final = logging.getLogger("perdure.server.runs")


class RunServer(GraphServer, Protocol):
    """The server, as far as the runs of a database need to know it.

    Attributes:
        is_closed: Whether it ends: what is not done is left to others.
    """

    is_closed: bool

    def is_open(self, tenant: str | None, runs: DatabaseRuns) -> bool:
        """Whether the database of some runs is open."""

    def keep_database_open(self, tenant: str | None) -> AbstractContextManager[None]:
        """While it lasts, the database stays open."""

    async def start_due_work(self, runs: DatabaseRuns) -> None:
        """Begin what is due: runs on a schedule, and webhooks."""

    def register_run(self, run: Run) -> None:
        """A run is followed."""

    def unregister_run(self, run: Run) -> None:
        """A run is followed no longer."""

    def feeds_with_readers(self, tenant: str | None) -> Mapping[str, Log]:
        """The events of the threads of which somebody reads them, by their ids."""

    def forget_thread(self, tenant: str | None, thread_id: str) -> None:
        """Forget the runs and the events of a thread that is no more."""


class DatabaseRuns:
    """The runs of a database, or of a tenant of it, that this process has or was asked for.

    Attributes:
        owner: This process, as rows name it; `""`: it has no lock, and takes no runs.
        known: Those that are under way or wait, and the last that ended, by their ids.
        erasures: The numbers of erasures from threads whose events are read.
        ready: Set once it has the lock, or cannot have one.
        task: Holds the lock, and looks after the rows.
        others: Does what else is due, or did it last.
    """

    def __init__(self, server: RunServer, tenant: str | None, database: OpenDatabase) -> None:
        self.server, self.tenant, self.database = server, tenant, database
        self.saver, self.table = database.saver, RunTable(database.saver)
        self.events, self.erasures = StoredEvents(self.table), ErasureCounts(self.table)
        self.owner, self.runs_by_id = "", dict[str, Run]()
        self._former_owners = set[str]()  # owners that this process was
        self.ready, self._wake = asyncio.Event(), asyncio.Event()
        self._lock: Any = None
        self._ended_runs: deque[Run] = deque()
        self._pause_s, self._cleaned_up_at = SWEEP_S, 0.0
        self.task = asyncio.create_task(self._hold_lock_and_sweep(), context=Context())
        self.due_work = asyncio.create_task(asyncio.sleep(0), context=Context())

    # -- liveness

    async def _hold_lock_and_sweep(self) -> None:
        """Hold the lock that says that this process lives, and look after the rows."""
        while True:
            owner = str(uuid4())
            try:
                async with self.saver.lock(
                    f"{_LIVENESS_LOCK_PREFIX}{owner}", timeout_s=0
                ) as self._lock:
                    self.owner = owner
                    self.ready.set()
                    while True:
                        await self._sweep()
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(self._pause_s):
                                await self._wake.wait()
                        self._wake.clear()
                        self._lock.check()
            except ConfigurationError:
                self.ready.set()
                raise
            except Exception as exc:
                if not self.server.is_open(self.tenant, self):
                    return  # its database is closed, as nobody used it
                kind = type(exc).__name__  # its text may be content
                _LOGGER.warning("the runs of this process are taken up again (%s)", kind)
                self._lose_lock()
            await asyncio.sleep(RETRY_PAUSE_S)

    def _lose_lock(self) -> None:
        """Stop all that runs here: others may have taken it."""
        self._former_owners |= {self.owner} - {""}
        self.owner = ""
        for run in self.runs_by_id.values():
            run.lose_ownership()

    def check_lock(self) -> bool:
        """Whether this process has its lock still; without it all runs are stopped."""
        try:
            self._lock.check()
        except StorageUnavailable:
            self._lose_lock()
            self._wake.set()
        return bool(self.owner)

    async def _sweep(self) -> None:
        self._start_due_work()
        asked_at = time.monotonic()
        live, served = await self.table.list_live_runs(), {*self.server.graphs}
        due = [run for run in live if run.status == "delayed" and run.graph in served]
        taken = any([await self._start_delayed_run(run) for run in due[:DUE_PER_SWEEP]])
        live = [run for run in live if run.status != "delayed"]
        able = [
            run for run in live if run.graph in served or run.cancel_action
        ]  # any server can end it
        others = [run for run in able if run.owner != self.owner]
        for owner, runs in groupby(sorted(others, key=attrgetter("owner")), attrgetter("owner")):
            taken |= await self._take_over_runs(owner, [*runs])
        heads = {run.thread_key: run for run in reversed(live)}.values()
        if any((run.status, run.owner) == ("pending", self.owner) for run in heads):
            await self.table.claim_runs(self.owner)
            taken = True
        if taken:
            asked_at = time.monotonic()
            live = await self.table.list_live_runs()
        for each in live:
            if each.owner == self.owner and each.run_id not in self.runs_by_id:
                await self._load_run(each)
        stored = {each.run_id: each for each in live}
        for run in [*self.runs_by_id.values()]:
            if not run.has_ended:
                await self.refresh_run(run, stored.get(run.run_id), asked_at)
        feeds = self.server.feeds_with_readers(self.tenant)
        here = {run.thread_id for run in self.runs_by_id.values() if run.is_executing}
        for thread_id in feeds.keys() - here:
            await self.events.fetch_events(feeds[thread_id], feeds[thread_id].thread, ALL_RUNS)
        awaited = {
            run.thread_id for run in self.runs_by_id.values() if not run.has_ended
        } | feeds.keys()
        is_awaited = any(run.owner != self.owner and run.thread_id in awaited for run in live)
        self._pause_s = FAST_SWEEP_S if is_awaited or len(due) > DUE_PER_SWEEP else SWEEP_S
        if time.monotonic() - self._cleaned_up_at > CLEANUP_INTERVAL_S:
            more = False
            with contextlib.suppress(PerdureError):  # what cannot be deleted holds up no run
                more = await self.threads.delete_expired(EXPIRED_PER_SWEEP) == EXPIRED_PER_SWEEP
                await self.table.delete_old_events()
            self._cleaned_up_at = self._cleaned_up_at if more else time.monotonic()

    def _start_due_work(self) -> None:
        """Do what else is due, which may ask handlers: rows do not wait for that."""
        if self.due_work.done():
            if exc := self.due_work.exception():
                _LOGGER.warning("what is due has not begun (%s)", type(exc).__name__)
            self.due_work = asyncio.create_task(self.server.start_due_work(self))

    def wake(self) -> None:
        """Look at the rows at once."""
        self._wake.set()

    async def _start_delayed_run(self, live: LiveRun) -> bool:
        try:
            for row in await self.table.list_runs(live.thread_id, live.run_id):
                strategy = row.details["multitask_strategy"]
                await self.table.start_delayed_run(live, self.owner, CANCEL_ACTIONS.get(strategy))
        except CorruptRecord as exc:
            _LOGGER.warning("run %s cannot be read (%s)", live.run_id, type(exc).__name__)
            await self.table.cancel_runs(live.thread_id, live.run_id, "interrupt")
        return True

    async def _load_run(self, live: LiveRun) -> None:
        try:
            await self.get_run(live.thread_id, live.run_id)
        except (CorruptRecord, ValidationError) as exc:  # the other runs go on
            _LOGGER.warning("run %s cannot be read (%s)", live.run_id, type(exc).__name__)
            error = describe_error(exc)  # it ends once it is the next
            await self.table.end_run(live, "error", error, known_cancel="rollback")

    async def _take_over_runs(self, owner: str, runs: Collection[LiveRun]) -> bool:
        """Take the runs of a process, if it is gone: then its lock is free."""
        if owner in self._former_owners:  # nobody died
            await self.table.release_runs(owner)
            runs, owner = [run._replace(owner="") for run in runs], ""
        if not owner:
            await self.table.claim_runs(self.owner, [*runs])
            return True
        try:
            async with self.saver.lock(f"{_LIVENESS_LOCK_PREFIX}{owner}", timeout_s=0):
                await self.table.claim_runs(self.owner, [*runs])
        except StorageUnavailable as exc:
            if not isinstance(exc.__cause__, TimeoutError):
                raise
            return False
        return True

    # -- what is known of a run

    async def refresh_run(
        self, run: Run, stored: LiveRun | None = None, read_at: float | None = None
    ) -> None:
        """Learn how a run is stored; one that is not has ended with its thread.

        Args:
            run: Of this process.
            stored: As it was read; None: it is read now.
            read_at: `time.monotonic` before it was read.
        """
        asked_at = read_at or time.monotonic()
        if stored is not None:
            row = run.row._replace(live=stored)
        else:
            rows = await self.table.list_runs(run.thread_id, run.run_id)
            gone = run.row._replace(live=run.row.live._replace(status="interrupted"))
            row = rows[0] if rows else gone
            if not rows and self.runs_by_id.get(run.run_id) is run:
                del self.runs_by_id[run.run_id]
        if run.log.has_readers and run.is_elsewhere:  # all that was told before the row was read
            await self.events.fetch_events(run.log, run.thread_key, run.seq_range)
        if run.row.live.status not in LIVE_STATES:  # it has ended meanwhile
            return
        if run.row_read_at >= asked_at:  # what was read may be older than what is known by now
            await self.refresh_run(run)
        else:
            run.update_row(row)

    async def get_run(self, thread_id: str, run_id: str) -> Run | None:
        """A run of a thread; None: there is none with this id."""
        run = self.runs_by_id.get(run_id)
        if run is not None and run.thread_id == thread_id:
            await self.refresh_run(run)
            return self.runs_by_id.get(run_id)
        rows = await self.table.list_runs(thread_id, run_id)
        if not rows:
            return None
        row, request, asked = rows[0], restore_request(rows[0]), rows[0].request or {}
        options = {
            name: asked[name] for name in ("temporary", "protocol", "recorded") if name in asked
        }
        login = User(asked["login"]) if asked.get("login") is not None else None
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
            return self.runs_by_id.get(run_id) or self.follow_run(run, Context())
        run.drop_events()
        return run

    def follow_run(self, run: Run, context: Context | None = None) -> Run:
        """Go with a run to its end, wherever it runs."""
        self.runs_by_id[run.run_id] = run
        run.task = asyncio.create_task(self._follow_to_end(run), context=context)
        self.server.register_run(run)
        if (run.row.live.status, run.row.live.owner) != ("running", self.owner):
            self.wake()
        return run

    async def _follow_to_end(self, run: Run) -> None:
        ended_here = False
        with self.server.keep_database_open(self.tenant):
            try:
                while (live := run.row.live).status in LIVE_STATES and not self.server.is_closed:
                    if (live.status, live.owner) == ("running", self.owner):
                        await RunExecution(self, run).execute()
                        ended_here = run.status not in LIVE_STATES
                    elif (
                        run.cancelled and live.cancel_action is None
                    ):  # its row says it to who has it
                        await self.table.cancel_runs(run.thread_id, run.run_id, run.cancelled)
                        await self.refresh_run(run)
                    else:
                        run.changed.clear()
                        await run.changed.wait()
            except Exception:  # another sweep finds its row
                _LOGGER.exception("the end of run %s could not be stored", run.run_id)
                self.runs_by_id.pop(run.run_id, None)
            finally:
                run.log.close()
                run.free_input()
                if run.may_have_started and not ended_here:  # another process may have gone further
                    run.output = None
                    run.drop_events()
                run.free_output()
                self.server.unregister_run(run)
                self._ended_runs.append(run)
                if len(self._ended_runs) > RETAINED_ENDED_RUNS:
                    old = self._ended_runs.popleft()
                    old.drop_events()
                    if self.runs_by_id.get(old.run_id) is old:
                        del self.runs_by_id[old.run_id]

    # -- what runs need

    @property
    def threads(self) -> Threads:
        """All threads of the database."""
        return Threads(
            self.saver, {}, forget_thread=lambda each: self.server.forget_thread(self.tenant, each)
        )

    async def read_output(self, run: Run) -> Any:
        """The output of a run that ran elsewhere: that of its last checkpoint."""
        at: RunnableConfig = {"configurable": {"thread_id": run.thread_id, "checkpoint_ns": ""}}
        of = {"run_id": run.run_id}
        async for found in self.saver.alist(at, filter=of, limit=1):
            opened = self.server.graphs.open_graph(
                run.graph_name, self.saver, self.database.store, at
            )
            async with opened as graph:
                state, names = await graph.aget_state(found.config), graph.output_channels
            values = state.values
            shown = (
                values.get(names)
                if isinstance(names, str)
                else {n: values[n] for n in names if n in values}
            )
            return add_interrupts(shown, state.interrupts)
        return None
