"""What runs on a schedule: when a cron is due, and how the sweep of runs begins its run.

Of several servers one begins it: the cron moves to its next time in the transaction that stores
the run. What was missed while no server ran is made up for once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import Final, Literal
from weakref import WeakKeyDictionary
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from croniter import croniter  # type: ignore[import-untyped]
from pydantic import Field

from perdure.checkpointers.crons import CronTable
from perdure.checkpointers.records import CronRow, DueCron
from perdure.errors import ConfigurationError, StorageFull, StorageUnavailable
from perdure.server.access import Access, Identity, Refused
from perdure.server.api_runs import prepare_run
from perdure.server.auth_file import User
from perdure.server.call import Call
from perdure.server.databases import Databases
from perdure.server.run_queue import DatabaseRuns
from perdure.server.run_request import RunRequest, WithoutNulls
from perdure.server.runs import Runs
from perdure.server.teams import read_teams

HANDLER_TIMEOUT_S: Final = 10
"""How long the handlers of an Auth file may take for a cron."""
DUE_CHECK_S: Final = 10
"""How often the due times of all crons are checked."""
CLOCK_SKEW_S: Final = 300
"""Seconds by which the clocks of servers may differ without a cron running twice."""
_SCHEDULE_NAMES: Final = (
    "@hourly",
    "@daily",
    "@midnight",
    "@weekly",
    "@monthly",
    "@yearly",
    "@annually",
)
_MAX_SCHEDULE_LENGTH: Final = (
    200  # characters of a schedule, which is read each time that it is due
)
_RETRY_STATUSES: Final = (429, 503)  # it is to be asked again
_LOGGER: Final = logging.getLogger(__name__)


class CronOptions(WithoutNulls):
    """When a cron runs, and what becomes of the threads of its runs."""

    schedule: str = Field(max_length=_MAX_SCHEDULE_LENGTH)
    timezone: str | None = None
    end_time: datetime | None = None
    enabled: bool = True
    on_run_completed: Literal["delete", "keep"] = "delete"

    def next_time(self, after: float) -> float | None:
        """When it is due next; None: never again, or it is disabled.

        A time of day that a change of clocks skips is the first moment after it; one that it
        repeats counts once, unless the hour of the schedule is `*`.

        Raises:
            ConfigurationError: The schedule or the timezone is none.
        """
        schedule, name = self.schedule, self.timezone or "UTC"
        try:
            zone = ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
            raise ConfigurationError(
                f"timezone is {name!r:.80}; expected a name of the IANA, like 'Europe/Berlin'"
            ) from exc
        fields = schedule.split()
        try:
            if len(fields) != 5 and schedule not in _SCHEDULE_NAMES:
                raise ValueError(f"it has {len(fields)} fields")
            times = croniter(schedule, datetime.fromtimestamp(after, zone))
            at = _next_in_zone(times, zone)
            while at.fold and fields[1:] and not fields[1].startswith("*"):
                at = _next_in_zone(times, zone)
        except ValueError as exc:
            raise ConfigurationError(
                f"schedule is {schedule!r:.80}: {exc}; expected five fields (minute, hour, day, "
                "month, day of the week), such as '0 9 * * mon-fri', or one of "
                f"{', '.join(_SCHEDULE_NAMES)}"
            ) from exc
        end = self.end_time and self.end_time.replace(tzinfo=self.end_time.tzinfo or UTC)
        is_over = end is not None and at > end
        return None if is_over or not self.enabled else at.timestamp()


class CronRequest(RunRequest, CronOptions):
    """The body of a request for a cron: that of its runs, and when they are."""


def _next_in_zone(times: croniter, zone: ZoneInfo) -> datetime:
    """The next of some times; `fold` says whether its time of day comes for the second time."""
    at: datetime = times.get_next(datetime)
    return at.astimezone(UTC).astimezone(zone)


class Schedule:
    """Begins the runs of crons that are due.

    Args:
        access: What those who made them may do now.
        databases: Where they are kept.
        runs: The runs of the server.
    """

    def __init__(self, access: Access, databases: Databases, runs: Runs) -> None:
        self._access, self._databases, self._runs = access, databases, runs
        self._checked_at: WeakKeyDictionary[DatabaseRuns, float] = WeakKeyDictionary()

    async def start_due_runs(self, runs: DatabaseRuns) -> None:
        """Begin those of a tenant that are due."""
        table = CronTable(runs.saver)
        if time.monotonic() - self._checked_at.get(runs, -DUE_CHECK_S) >= DUE_CHECK_S:
            await self._reset_late(table)
            self._checked_at[runs] = time.monotonic()
        for cron_id in await table.list_due_ids():
            try:
                async with runs.saver.lock(f"perdure.cron/{cron_id}", timeout_s=0):
                    cron, now = await table.get(cron_id), time.time()
                    if cron is not None and cron.next_at is not None and cron.next_at <= now:
                        await self._start_cron(runs, table, cron, now)
            except Exception as exc:  # the next sweep tries again, here or on another server
                if isinstance(exc, StorageUnavailable) and isinstance(exc.__cause__, TimeoutError):
                    continue  # another server holds the lock, and begins it
                kind = type(exc).__name__  # its text may be content
                _LOGGER.info("cron %s is due, and has not begun yet (%s)", cron_id, kind)

    async def _reset_late(self, table: CronTable) -> None:
        """Set the due times anew that were computed while the clock of a server was ahead.

        Such a time is later than the next time from now on, or missing because the clock was past
        the end of the cron. A difference of up to `CLOCK_SKEW_S` counts as none. Otherwise a cron
        that a server with a fast clock has just begun would be due again at its proper time.
        """
        for cron in await table.list_not_due_before(time.time() + CLOCK_SKEW_S):
            try:
                now, payload = time.time(), {**cron.content["payload"], "metadata": {}}
                options = CronRequest.model_validate(payload)
                latest = await asyncio.to_thread(options.next_time, now + CLOCK_SKEW_S)
                if latest is None or (cron.next_at is not None and cron.next_at <= latest):
                    continue
                next_at = await asyncio.to_thread(options.next_time, now)
                if next_at is not None and await table.reset_next_time(cron, next_at):
                    _LOGGER.warning(
                        "the due time of cron %s was too late, and is set anew", cron.cron_id
                    )
            except Exception as exc:  # the other crons are checked all the same
                kind = type(exc).__name__  # its text may be content
                _LOGGER.info("the due time of cron %s cannot be checked (%s)", cron.cron_id, kind)

    async def _start_cron(
        self, runs: DatabaseRuns, table: CronTable, cron: CronRow, now: float
    ) -> None:
        content = cron.content
        if content["graph"] not in self._runs.graphs:
            return  # a server that has it begins it
        asked = {**content["payload"], "metadata": content["metadata"]}
        request = CronRequest.model_validate(asked)
        request.on_completion = request.on_run_completed
        next_at = await asyncio.to_thread(request.next_time, now)
        try:
            async with asyncio.timeout(HANDLER_TIMEOUT_S):
                await self._start_run(runs.tenant, request, DueCron(cron, next_at))
        except (StorageUnavailable, StorageFull, TimeoutError):
            raise
        except Exception as exc:
            if isinstance(exc, Refused) and exc.status in _RETRY_STATUSES:
                raise
            kind = type(exc).__name__
            _LOGGER.warning("cron %s was due, and its run is refused (%s)", cron.cron_id, kind)
            await table.advance_next_time(cron, next_at)

    async def _start_run(self, tenant: str | None, request: CronRequest, due: DueCron) -> None:
        content = due.cron.content
        login = None if content["login"] is None else User(content["login"])
        permissions, person = frozenset(content["permissions"]), content.get("acting_for")
        teams = read_teams(login)
        then = Identity(content["user"], tenant, permissions, login, person, teams=teams)
        again = getattr(self._access, "again", None)  # keys may be revoked meanwhile
        identity = await again(then) if again else then
        call = Call(identity, "threads:create_run", self._access, self._databases, self._runs)
        with call.keep_database_open():
            begin = await prepare_run(call, self._runs, request, due.cron.thread_id, due=due)
            await begin()
