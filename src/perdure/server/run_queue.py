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
from perdure.server.run import CANCELS, Run, error_of, interrupted, request_of
from perdure.server.run_events import StoredEvents
from perdure.server.run_execution import GraphServer, RunExecution
from perdure.server.run_log import Log
from perdure.server.threads import Threads

REPLAYED: Final = 50
"""Of how many runs that have ended the events can be read again in this process."""
SWEEP_S: Final = 0.5
"""How often rows are looked at: what is to be taken over, cancelled, or has ended elsewhere."""
SOON_S: Final = 0.1
"""The same, while somebody here waits for what another process runs."""
AGED_S: Final = 60
"""How often what runs told is removed that ended long ago, and threads whose time is over."""
EXPIRED: Final = 20
"""How many of these threads are deleted at once, so that a sweep does not take long."""
PAUSE_S: Final = 0.05
DUE: Final = 100
"""How many delayed runs whose time has come are begun before other rows are looked at again."""
_LIVES: Final = "perdure.server/"  # and the name of a process: the lock that it holds
_LOGGER: Final = logging.getLogger("perdure.server.runs")


class RunServer(GraphServer, Protocol):
    """The server, as far as the runs of a database need to know it.

    Attributes:
        is_closed: Whether it ends: what is not done is left to others.
    """

    is_closed: bool

    def has(self, tenant: str | None, runs: DatabaseRuns) -> bool:
        """Whether the database of some runs is open."""

    def used(self, tenant: str | None) -> AbstractContextManager[None]:
        """While it lasts, the database stays open."""

    async def do_due(self, runs: DatabaseRuns) -> None:
        """Begin what is due: runs on a schedule, and webhooks."""

    def begun(self, run: Run) -> None:
        """A run is followed."""

    def ended(self, run: Run) -> None:
        """A run is followed no longer."""

    def read_feeds(self, tenant: str | None) -> Mapping[str, Log]:
        """The events of the threads of which somebody reads them, by their ids."""

    def forget(self, tenant: str | None, thread_id: str) -> None:
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

    def __init__(self, server: RunServer, tenant: str | None, parts: OpenDatabase) -> None:
        self.server, self.tenant, self.parts = server, tenant, parts
        self.saver, self.table = parts.saver, RunTable(parts.saver)
        self.events, self.erasures = StoredEvents(self.table), ErasureCounts(self.table)
        self.owner, self.known = "", dict[str, Run]()
        self._formerly = set[str]()  # owners that this process was
        self.ready, self._wake = asyncio.Event(), asyncio.Event()
        self._lock: Any = None
        self._done: deque[Run] = deque()
        self._pause_s, self._aged_at = SWEEP_S, 0.0
        self.task = asyncio.create_task(self._serve(), context=Context())
        self.others = asyncio.create_task(asyncio.sleep(0), context=Context())

    # -- liveness

    async def _serve(self) -> None:
        """Hold the lock that says that this process lives, and look after the rows."""
        while True:
            owner = str(uuid4())
            try:
                async with self.saver.lock(f"{_LIVES}{owner}", timeout_s=0) as self._lock:
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
                if not self.server.has(self.tenant, self):
                    return  # its database is closed, as nobody used it
                kind = type(exc).__name__  # its text may be content
                _LOGGER.warning("the runs of this process are taken up again (%s)", kind)
                self._lose()
            await asyncio.sleep(PAUSE_S)

    def _lose(self) -> None:
        """Stop all that runs here: others may have taken it."""
        self._formerly |= {self.owner} - {""}
        self.owner = ""
        for run in self.known.values():
            run.lose()

    def holds(self) -> bool:
        """Whether this process has its lock still; without it all runs are stopped."""
        try:
            self._lock.check()
        except StorageUnavailable:
            self._lose()
            self._wake.set()
        return bool(self.owner)

    async def _sweep(self) -> None:
        self._do_others()
        asked_at = time.monotonic()
        live, served = await self.table.list_live_runs(), {*self.server.graphs}
        due = [run for run in live if run.status == "delayed" and run.graph in served]
        taken = any([await self._begin_due(run) for run in due[:DUE]])
        live = [run for run in live if run.status != "delayed"]
        able = [
            run for run in live if run.graph in served or run.cancel_action
        ]  # any server can end it
        others = [run for run in able if run.owner != self.owner]
        for owner, runs in groupby(sorted(others, key=attrgetter("owner")), attrgetter("owner")):
            taken |= await self._take_over(owner, [*runs])
        heads = {run.thread_key: run for run in reversed(live)}.values()
        if any((run.status, run.owner) == ("pending", self.owner) for run in heads):
            await self.table.claim_runs(self.owner)
            taken = True
        if taken:
            asked_at = time.monotonic()
            live = await self.table.list_live_runs()
        for each in live:
            if each.owner == self.owner and each.run_id not in self.known:
                await self._take_up(each)
        stored = {each.run_id: each for each in live}
        for run in [*self.known.values()]:
            if not run.ended:
                await self.refresh(run, stored.get(run.run_id), asked_at)
        feeds = self.server.read_feeds(self.tenant)
        here = {run.thread_id for run in self.known.values() if run.is_executing}
        for thread_id in feeds.keys() - here:
            await self.events.fetch(feeds[thread_id], feeds[thread_id].thread, ALL_RUNS)
        awaited = {run.thread_id for run in self.known.values() if not run.ended} | feeds.keys()
        is_awaited = any(run.owner != self.owner and run.thread_id in awaited for run in live)
        self._pause_s = SOON_S if is_awaited or len(due) > DUE else SWEEP_S
        if time.monotonic() - self._aged_at > AGED_S:
            more = False
            with contextlib.suppress(PerdureError):  # what cannot be deleted holds up no run
                more = await self.threads.expire(EXPIRED) == EXPIRED
                await self.table.delete_old_events()
            self._aged_at = self._aged_at if more else time.monotonic()

    def _do_others(self) -> None:
        """Do what else is due, which may ask handlers: rows do not wait for that."""
        if self.others.done():
            if exc := self.others.exception():
                _LOGGER.warning("what is due has not begun (%s)", type(exc).__name__)
            self.others = asyncio.create_task(self.server.do_due(self))

    def look(self) -> None:
        """Look at the rows at once."""
        self._wake.set()

    async def _begin_due(self, live: LiveRun) -> bool:
        try:
            for row in await self.table.list_runs(live.thread_id, live.run_id):
                strategy = row.details["multitask_strategy"]
                await self.table.start_delayed_run(live, self.owner, CANCELS.get(strategy))
        except CorruptRecord as exc:
            _LOGGER.warning("run %s cannot be read (%s)", live.run_id, type(exc).__name__)
            await self.table.cancel_runs(live.thread_id, live.run_id, "interrupt")
        return True

    async def _take_up(self, live: LiveRun) -> None:
        try:
            await self.read(live.thread_id, live.run_id)
        except (CorruptRecord, ValidationError) as exc:  # the other runs go on
            _LOGGER.warning("run %s cannot be read (%s)", live.run_id, type(exc).__name__)
            error = error_of(exc)  # it ends once it is the next
            await self.table.end_run(live, "error", error, known_cancel="rollback")

    async def _take_over(self, owner: str, runs: Collection[LiveRun]) -> bool:
        """Take the runs of a process, if it is gone: then its lock is free."""
        if owner in self._formerly:  # nobody died
            await self.table.release_runs(owner)
            runs, owner = [run._replace(owner="") for run in runs], ""
        if not owner:
            await self.table.claim_runs(self.owner, [*runs])
            return True
        try:
            async with self.saver.lock(f"{_LIVES}{owner}", timeout_s=0):
                await self.table.claim_runs(self.owner, [*runs])
        except StorageUnavailable as exc:
            if not isinstance(exc.__cause__, TimeoutError):
                raise
            return False
        return True

    # -- what is known of a run

    async def refresh(
        self, run: Run, stored: LiveRun | None = None, asked_at: float | None = None
    ) -> None:
        """Learn how a run is stored; one that is not has ended with its thread.

        Args:
            run: Of this process.
            stored: As it was read; None: it is read now.
            asked_at: `time.monotonic` before it was read.
        """
        asked_at = asked_at or time.monotonic()
        if stored is not None:
            row = run.row._replace(live=stored)
        else:
            rows = await self.table.list_runs(run.thread_id, run.run_id)
            gone = run.row._replace(live=run.row.live._replace(status="interrupted"))
            row = rows[0] if rows else gone
            if not rows and self.known.get(run.run_id) is run:
                del self.known[run.run_id]
        if run.log.is_read and run.is_elsewhere:  # all that was told before the row was read
            await self.events.fetch(run.log, run.thread, run.seqs)
        if run.row.live.status not in LIVE_STATES:  # it has ended meanwhile
            return
        if run.told_at >= asked_at:  # what was read may be older than what is known by now
            await self.refresh(run)
        else:
            run.told(row)

    async def read(self, thread_id: str, run_id: str) -> Run | None:
        """A run of a thread; None: there is none with this id."""
        run = self.known.get(run_id)
        if run is not None and run.thread_id == thread_id:
            await self.refresh(run)
            return self.known.get(run_id)
        rows = await self.table.list_runs(thread_id, run_id)
        if not rows:
            return None
        row, request, asked = rows[0], request_of(rows[0]), rows[0].request or {}
        options = {
            name: asked[name] for name in ("temporary", "protocol", "recorded") if name in asked
        }
        login = User(asked["login"]) if asked.get("login") is not None else None
        run = Run(
            row, self.tenant, row.details["user"], request, login=login, begun=True, **options
        )
        if row.live.status in LIVE_STATES:
            return self.known.get(run_id) or self.follow(run, Context())
        run.forget()
        return run

    def follow(self, run: Run, context: Context | None = None) -> Run:
        """Go with a run to its end, wherever it runs."""
        self.known[run.run_id] = run
        run.task = asyncio.create_task(self._follow(run), context=context)
        self.server.begun(run)
        if (run.row.live.status, run.row.live.owner) != ("running", self.owner):
            self.look()
        return run

    async def _follow(self, run: Run) -> None:
        ended_here = False
        with self.server.used(self.tenant):
            try:
                while (live := run.row.live).status in LIVE_STATES and not self.server.is_closed:
                    if (live.status, live.owner) == ("running", self.owner):
                        await RunExecution(self, run).execute()
                        ended_here = run.status not in LIVE_STATES
                    elif (
                        run.cancelled and live.cancel_action is None
                    ):  # its row says it to who has it
                        await self.table.cancel_runs(run.thread_id, run.run_id, run.cancelled)
                        await self.refresh(run)
                    else:
                        run.changed.clear()
                        await run.changed.wait()
            except Exception:  # another sweep finds its row
                _LOGGER.exception("the end of run %s could not be stored", run.run_id)
                self.known.pop(run.run_id, None)
            finally:
                run.log.close()
                run.free_input()
                if run.begun and not ended_here:  # another process may have gone further
                    run.output = None
                    run.forget()
                run.free_output()
                self.server.ended(run)
                self._done.append(run)
                if len(self._done) > REPLAYED:
                    old = self._done.popleft()
                    old.forget()
                    if self.known.get(old.run_id) is old:
                        del self.known[old.run_id]

    # -- what runs need

    @property
    def threads(self) -> Threads:
        """All threads of the database."""
        return Threads(self.saver, {}, forget=lambda each: self.server.forget(self.tenant, each))

    async def values(self, run: Run) -> Any:
        """The output of a run that ran elsewhere: that of its last checkpoint."""
        at: RunnableConfig = {"configurable": {"thread_id": run.thread_id, "checkpoint_ns": ""}}
        of = {"run_id": run.run_id}
        async for found in self.saver.alist(at, filter=of, limit=1):
            opened = self.server.graphs.opened(run.graph, self.saver, self.parts.store, at)
            async with opened as graph:
                state, names = await graph.aget_state(found.config), graph.output_channels
            values = state.values
            shown = (
                values.get(names)
                if isinstance(names, str)
                else {n: values[n] for n in names if n in values}
            )
            return interrupted(shown, state.interrupts)
        return None
