"""The runs of a server, of all its tenants."""

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
from perdure.server.limits import Limits, TooMany
from perdure.server.person import Sender
from perdure.server.reply import encode_json
from perdure.server.run import CANCEL_ACTIONS, Run
from perdure.server.run_execution import END_TIMEOUT_S, Player
from perdure.server.run_log import NUMBERS_PER_RUN, EventDropped, Log, LoggedEvent
from perdure.server.run_queue import RETRY_PAUSE_S, DatabaseRuns
from perdure.server.run_request import RunRequest
from perdure.server.teams import RunTeams
from perdure.server.telemetry import Telemetry
from perdure.server.webhooks import Webhooks

Players: TypeAlias = "Mapping[str, Callable[[Run, Runs], Player]]"
RETAINED_FEEDS: Final = 100
"""How many threads have events that can be read again, besides those that somebody reads."""
ERASURE_CHECK_S: Final = 0.5
"""How often the reader of a stream looks whether messages were erased from the thread."""
_LOGGER: Final = logging.getLogger(__name__)


class Scheduler(Protocol):
    """Begins runs on a schedule."""

    async def start_due_runs(self, runs: DatabaseRuns) -> None:
        """Begin those of a tenant that are due."""


class Runs:
    """The runs of a server.

    Attributes:
        schedule: Begins what runs on a schedule; None: nothing does.
        webhooks: Tells others of runs that have ended.
        memory: Limits the events that are kept in memory.

    Args:
        graphs: What they run.
        limits: How many runs an identity may have under way, and how many bytes of events are kept
            in memory.
        databases: Where they are kept.
        players: Run graphs, by protocol.
        telemetry: Measures them; None: nothing does.
        webhooks: Tells others of their ends; None: nobody.
        owners_are_people: Whether the `owner` of threads is the user of an API key, so that it
            names the person of a thread whose head names none.
        teams: Chooses the teams whose memory runs use; None: the config of a run decides.
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
        self.graphs, self._at_once, self._databases = graphs, limits.at_once, databases
        self.keep_database_open, self._players = databases.keep_open, players
        self.measure_run = telemetry.run if telemetry else contextlib.nullcontext
        self.is_closed = self._is_draining = False
        self.memory = EventMemory(limits)
        self._by_tenant: dict[str | None, DatabaseRuns] = {}
        self._feeds: WeakValueDictionary[tuple[str | None, str], Log] = WeakValueDictionary()
        self._recent: list[Log] = []  # first is what was asked for last
        self._under_way: dict[Run, Player] = {}
        self.schedule: Scheduler | None = None
        self.webhooks = webhooks or Webhooks()

    async def open_tenants(self, tenants: Collection[str | None]) -> None:
        """Take up what was left of tenants.

        Raises:
            ConfigurationError: A database of them can have no locks, behind a pooler.
        """
        for tenant in tenants:
            try:
                await (await self._databases.get_or_open(tenant)).saver.setup()
            except ConfigurationError as exc:  # requests are told why
                _LOGGER.warning("no run is taken up: %s", exc)
            except StorageUnavailable as exc:
                _LOGGER.warning("runs are taken up once the database is there: %s", exc)
                await self.for_tenant(tenant)
            else:
                runs = await self.for_tenant(tenant)
                await runs.ready.wait()
                if runs.task.done():
                    runs.task.result()

    async def for_tenant(self, tenant: str | None) -> DatabaseRuns:
        """Those of a tenant; from now on this process takes up what others leave there."""
        parts = await self._databases.get_or_open(tenant)
        runs = self._by_tenant.get(tenant)
        if runs is None or runs.database is not parts or runs.task.done():
            runs = self._by_tenant[tenant] = DatabaseRuns(self, tenant, parts)
        return runs

    def is_open(self, tenant: str | None, runs: DatabaseRuns) -> bool:
        """Whether the database of some runs is open."""
        return self._databases.is_open(tenant, runs.database)

    async def start_due_work(self, runs: DatabaseRuns) -> None:
        """Begin what is due: runs on a schedule, and webhooks."""
        if self.schedule is not None and not self._is_draining:
            await self.schedule.start_due_runs(runs)
        await self.webhooks.start_due_deliveries(runs)

    def register_run(self, run: Run) -> None:
        """A run is followed."""
        run.log.set_account(self.memory.get_account(run.tenant, run.user))
        self._under_way[run] = self._players[run.protocol](run, self)

    def get_player(self, run: Run) -> Player:
        """What plays a run that is followed."""
        return self._under_way[run]

    def unregister_run(self, run: Run) -> None:
        """A run is followed no longer."""
        self._under_way.pop(run, None)

    def get_feed(self, tenant: str | None, thread_id: str, thread: int, user: str = "") -> Log:
        """Return the log of events of a thread.

        A log of a deleted thread with the same id is closed. A new log is counted for the user.
        """
        feed, account = self._feeds.get((tenant, thread_id)), self.memory.get_account(tenant, user)
        if feed is not None and feed.thread != thread:  # a deleted thread had the same id
            feed.close()
            feed = None
        feed = feed or Log(thread, account)
        self._feeds[tenant, thread_id] = feed
        self._recent = [feed, *(each for each in self._recent if each is not feed)][:RETAINED_FEEDS]
        return feed

    def feeds_with_readers(self, tenant: str | None) -> dict[str, Log]:
        """Those that somebody reads, by the ids of their threads."""
        return {
            id: log for (of, id), log in self._feeds.items() if of == tenant and log.has_readers
        }

    async def get_thread_key(self, tenant: str | None, thread_id: str) -> int:
        """See `RunTable.get_thread_key`."""
        return await (await self.for_tenant(tenant)).table.get_thread_key(thread_id)

    async def open_feed(self, identity: Identity, thread_id: str, thread: int) -> Log:
        """The events of a thread; who has read none begins with a run that is under way."""
        tenant, user = identity.tenant, identity.user
        feed, runs = self.get_feed(tenant, thread_id, thread, user), await self.for_tenant(tenant)
        here = any(run.feed is feed and run.is_executing for run in self._under_way)
        if not feed.has_readers and not here:
            newest = await runs.events.leave_to_database(feed, feed.thread, ALL_RUNS)
            if newest is not None and newest[1] == feed.last:
                seq, until, status = newest
                feed.first = seq * NUMBERS_PER_RUN if status in LIVE_STATES else until
        return feed

    async def read_events(
        self,
        identity: Identity,
        thread: int,
        log: Log,
        number: int | None,
        look: Callable[[], Awaitable[None]],
        seqs: tuple[int, int] = ALL_RUNS,
        *,
        is_new: bool = False,
    ) -> AsyncIterator[list[LoggedEvent]]:
        """Yield the events of a log; see `StoredEvents.after`.

        It ends if messages are erased from the thread. With `is_new`, the request has just started
        the run that the log is of, so the number of erasures is known from the start of the run.

        Raises:
            LookupError: See `StoredEvents.after`; or messages were erased since the events.
        """
        runs = await self.for_tenant(identity.tenant)
        account = self.memory.get_account(identity.tenant, identity.user)
        with runs.erasures.reading(thread):
            checked_at = time.monotonic()
            if is_new and not log.is_empty:
                checked_at = log.removals_read_at
            elif log.last_dropped or not log.is_empty:
                await self._check_erasures(runs, log, thread, checked_at)
            async for events in runs.events.read_after(log, number, look, thread, seqs, account):
                earliest = time.monotonic() - ERASURE_CHECK_S
                if checked_at <= earliest:
                    checked_at = await self._check_erasures(runs, log, thread, earliest)
                yield events

    async def _check_erasures(
        self, runs: DatabaseRuns, log: Log, thread: int, since: float
    ) -> float:
        """Drop the events of a thread from which messages were erased meanwhile.

        Args:
            runs: The runs of the database.
            log: The events.
            thread: The key of the thread.
            since: When the number of erasures may have been read at the earliest.

        Returns:
            When the number was read, by `time.monotonic`.

        Raises:
            LookupError: Messages were erased since the events, or a run that loaded the messages
                before is still in progress.
        """
        number, read_at = await runs.erasures.count(thread, since), runs.erasures.read_at
        if number is None or log.removals is None:
            log.note_removals(number, read_at)
        if number is None or number <= (log.removals or 0):  # the log's may have been read later
            return read_at
        had_none = log.is_empty  # what was dropped is read from the database, which has no more
        log.clear_until(log.last)
        stale = [
            run
            for run in self._under_way
            if run.events is log and run.removals is not None and run.removals < number
        ]
        if log.thread and not stale:  # the next runs of the thread tell nothing that was erased
            log.note_removals(number, read_at)
            if had_none:
                return read_at
        raise LookupError("messages were erased from the thread")

    def is_thread_busy(self, tenant: str | None, thread_id: str) -> bool:
        """Whether this process has a run of a thread, be it of one that was deleted."""
        whose = tenant, thread_id
        return any((run.tenant, run.thread_id) == whose for run in self._under_way)

    async def list_runs(self, tenant: str | None, thread_id: str) -> list[RunRow]:
        """Those of a thread that are known, newest first."""
        return await (await self.for_tenant(tenant)).table.list_runs(thread_id)

    async def get(self, tenant: str | None, thread_id: str, run_id: str) -> Run:
        """A run of a thread.

        Raises:
            Refused: The thread has none with this id, or it ended long ago.
        """
        run = await (await self.for_tenant(tenant)).get_run(thread_id, run_id)
        if run is None:
            why = (
                f"thread {thread_id!r} has no run {run_id!r}; of a thread the last "
                f"{MAX_ENDED_RUNS} are known"
            )
            raise Refused(why, 404)
        return run

    async def load_events(self, run: Run) -> None:
        """See `StoredEvents.recall`."""
        runs = await self.for_tenant(run.tenant)
        await runs.events.load_events(run)
        if run.is_elsewhere:
            runs.wake()

    async def encode_output(self, run: Run) -> bytes:
        """Return the values after the last step of a run that has ended, as JSON.

        The values do not contain erased messages. If they are no longer in memory, they are read
        from the database. For a temporary run the result is then `null`.
        """
        is_in_memory = run.output is not None or run.output_event is not None
        if is_in_memory and not run.temporary:
            table = (await self.for_tenant(run.tenant)).table
            removals = (await table.count_removals([run.thread_key])).get(run.thread_key)
            if removals not in (None, run.removals):
                run.output = run.output_event = None
        if run.output_event is not None:
            with contextlib.suppress(EventDropped):
                return run.output_event.data
        if run.output is None and not run.temporary:
            return encode_json(await (await self.for_tenant(run.tenant)).read_output(run))
        return encode_json(run.output)

    def check_capacity(self, identity: Identity, count: int = 1) -> None:
        """Refuse an identity so many more runs, if that are more than may be under way."""
        whose = identity.tenant, identity.user
        if sum((run.tenant, run.user) == whose for run in self._under_way) + count > self._at_once:
            raise TooMany(f"{self._at_once} runs are under way; end some first", again_s=5)
        if self._is_draining:
            raise Refused("the server ends; ask again, or another one", 503, {"Retry-After": "1"})

    def forget_thread(self, tenant: str | None, thread_id: str) -> None:
        """Forget the runs and the events of a thread that is no more: others may take its id."""
        runs = self._by_tenant.get(tenant)
        known = runs.runs_by_id if runs is not None else {}
        for run in [each for each in known.values() if each.thread_id == thread_id]:
            del known[run.run_id]
            run.cancel()
            if run.has_ended:
                run.drop_events()
        if feed := self._feeds.pop((tenant, thread_id), None):
            feed.close()

    async def start_run(
        self,
        call: Call,
        request: RunRequest,
        graph: str,
        thread_id: str,
        protocol: str = "run",
        *,
        temporary: bool,
        recorded: bool = False,
        due: DueCron | None = None,
        sender: Sender | None = None,
        person: str | None = None,
    ) -> Run:
        """Begin a run; it is stored when this returns. The call is permitted for the thread.

        One that is delayed has no task.

        Args:
            call: Who asks.
            request: What for; its `assistant_id` is the id of the assistant.
            graph: The name of the assistant's graph, which is served.
            thread_id: On which thread.
            protocol: Who is told of its events.
            temporary: Whether the thread is deleted at its end.
            recorded: Whether its events are stored, for readers on any server.
            due: The cron that it is of; see `RunTable.accept_run`.
            sender: The sender of the run, or None for the user of the call.
            person: The person whose memories it will use, as far as that is known before it starts.

        Raises:
            UnknownThread: The thread was deleted.
            StorageUnavailable: The database cannot tell now who lives.
            Refused: Another run is under way, and the request is to be rejected; or see `check`.
        """
        identity = call.identity
        self.check_capacity(identity)
        runs = await self.for_tenant(identity.tenant)
        await runs.ready.wait()
        if not runs.owner:
            raise StorageUnavailable("the database was lost, and is connected again: try again")
        strategy, login = request.multitask_strategy, extract_login_fields(identity.raw)
        sender = sender or Sender(identity.user)
        about = {
            "assistant_id": request.assistant_id,
            "metadata": request.metadata,
            "multitask_strategy": strategy,
            "person": person or sender.acting_for or identity.user,
            **sender.about(),
        }
        kept = {"temporary": temporary, "protocol": protocol, "login": login}
        kept |= {"recorded": recorded, "request": request.to_stored()}
        now = time.time()
        not_before = now + request.after_seconds if request.after_seconds else None
        owner = "" if not_before else runs.owner  # any process takes one that is due
        live = LiveRun(thread_id, 0, 0, str(uuid4()), "pending", owner, graph, 1, None)
        row = RunRow(live, now, now, about, request=kept, not_before=not_before)
        whose = identity.tenant, identity.user
        how = temporary, protocol, recorded, identity.raw
        run = Run(row._replace(request=None), *whose, request, *how)
        runs.runs_by_id[run.run_id] = run  # a sweep may see the row first
        try:
            cancels = None if not_before else CANCEL_ACTIONS.get(strategy)
            rejects = strategy == "reject"
            accepted, ids = await runs.table.accept_run(
                row,
                reject_if_busy=rejects,
                cancel_action=cancels,
                stores_events=recorded,
                due_cron=due,
            )
            if accepted is None:
                await self._raise_not_accepted(runs, run, ids)
        except BaseException:
            runs.runs_by_id.pop(run.run_id, None)
            raise
        run.row = run.row._replace(live=accepted or run.row.live)
        if not_before:
            del runs.runs_by_id[run.run_id]  # who wants to see it begin asks for it
            return run
        runs.follow_run(run, Context() if due else None)  # locks of the schedule are not its own
        for each in [*runs.runs_by_id.values()] if cancels else ():
            if each.thread_id == thread_id and each is not run and not each.has_ended:
                await runs.refresh_run(each)
        return run

    async def _raise_not_accepted(self, runs: DatabaseRuns, run: Run, ids: Collection[str]) -> None:
        """Say why a run was not accepted, unless it was, and the connection was lost then."""
        stored = await runs.table.list_runs(run.thread_id, run.run_id)
        if stored:
            run.row = run.row._replace(live=stored[0].live)
            return
        if not ids:
            raise UnknownThread(f"there is no thread {run.thread_id!r}")
        raise Refused(
            f"run {[*ids][-1]!r} is under way on thread {run.thread_id!r}; wait for it, or "
            "use another multitask_strategy",
            409,
        )

    async def delete_run(self, run: Run) -> None:
        """Remove a run that has ended."""
        runs = await self.for_tenant(run.tenant)
        await runs.table.delete_ended_run(run.row.live)
        runs.runs_by_id.pop(run.run_id, None)

    async def cancel_run(
        self, tenant: str | None, live: LiveRun, action: str = "interrupt"
    ) -> bool:
        """Stop a run, wherever it is. Returns False if it has ended meanwhile."""
        runs = await self.for_tenant(tenant)
        stopped = await runs.table.cancel_runs(live.thread_id, live.run_id, action)
        if run := runs.runs_by_id.get(live.run_id):
            await runs.refresh_run(run)
        return bool(stopped)

    async def stop_thread(self, tenant: str | None, thread_id: str) -> None:
        """Cancel the runs of a thread, and wait until they have ended.

        Raises:
            Refused: One does not end: a node of it goes on, though it was cancelled.
        """
        runs, until = await self.for_tenant(tenant), time.monotonic() + END_TIMEOUT_S
        await runs.table.cancel_runs(thread_id, "", "interrupt")
        for run in [each for each in runs.runs_by_id.values() if each.thread_id == thread_id]:
            await runs.refresh_run(run)
        while ids := await runs.table.list_live_run_ids(thread_id):
            if time.monotonic() > until:
                why = f"run {ids[0]!r} was cancelled and goes on after {END_TIMEOUT_S} s; try later"
                raise Refused(why, 409)
            await asyncio.sleep(RETRY_PAUSE_S)

    async def drain(self, grace_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Accept no more runs, wait a time for those that are under way, and stop them then."""
        self._is_draining, until = True, time.monotonic() + grace_s
        while (left_s := until - time.monotonic()) > 0 and not hurry():
            tasks = [run.task for run in self._under_way if run.task and run.status == "running"]
            if not tasks:
                break
            await asyncio.wait(tasks, timeout=min(left_s, 0.2))
        await self._stop_all()  # before their readers are sent away, who may cancel by that

    async def _stop_all(self) -> None:
        if self.is_closed:
            return
        self._is_draining = self.is_closed = True
        for run in self._under_way:
            run.lose_ownership()
            run.changed.set()
        if tasks := [run.task for run in self._under_way if run.task is not None]:
            await asyncio.wait(tasks, timeout=END_TIMEOUT_S)
        for feed in self._feeds.values():
            feed.close()

    async def aclose(self) -> None:
        """Stop what runs, and leave it to the next process, as a kill would."""
        await self._stop_all()
        await self.webhooks.aclose()
        for runs in self._by_tenant.values():
            with contextlib.suppress(PerdureError):  # the lock of this process will be free
                if runs.owner and self.is_open(runs.tenant, runs):
                    await runs.table.release_runs(runs.owner)
            for task in (runs.task, runs.due_work):
                task.cancel()
            await asyncio.wait([runs.task, runs.due_work])


def extract_login_fields(login: Any) -> Any:
    """What is kept of a user whom a handler returned, so that a run can go on elsewhere."""
    return login if isinstance(login, Mapping) else getattr(login, "__dict__", None)


async def get_server_runs(connection: HTTPConnection) -> Runs:
    """The runs of the process."""
    runs: Runs = connection.app.state.runs
    return runs


ServerRuns = Annotated[Runs, Depends(get_server_runs)]
"""An endpoint's argument."""
