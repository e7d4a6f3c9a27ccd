"""Compute when crons are due, and start their runs.

If several servers share a database, exactly one server starts the run of a due cron, because the
transaction that stores the run also moves the cron to its next due time. If several due times of a
cron passed while no server was running, the next server that starts runs the cron only once.
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

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.errors import ConfigurationError, StorageFull, StorageUnavailable
from perdure.run_tables.crons import CronTable
from perdure.run_tables.records import CronRow, DueCron
from perdure.server.databases import Databases
from perdure.server.http.access import Access, Identity, Refused
from perdure.server.http.auth_file import HandlerUser
from perdure.server.http.call import Call
from perdure.server.runs.run_manager import RunManager
from perdure.server.runs.run_request import RunRequest, WithoutNulls
from perdure.server.runs.run_start import check_run_request, start_checked_run
from perdure.server.teams import extract_teams_of_user

HANDLER_TIMEOUT_S: Final = 10
"""Maximum number of seconds for starting the run of a cron, including the handlers of an Auth file.
If the start takes longer, it is tried again later."""
DUE_CHECK_S: Final = 10
"""Seconds between two searches for crons with implausible due times."""
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
# Maximum number of characters in a cron's schedule. The length is limited because the schedule is
# parsed each time the cron is due.
_MAX_SCHEDULE_LENGTH: Final = 200
# If the run of a cron is rejected with one of these HTTP status codes, the cron stays due, and the
# server tries to start the run again later.
_RETRY_STATUSES: Final = (429, 503)
_LOGGER: Final = logging.getLogger("perdure.server.schedule")


class CronOptions(WithoutNulls):
    """A cron's schedule, and whether each run's thread is deleted after the run."""

    schedule: str = Field(max_length=_MAX_SCHEDULE_LENGTH)
    timezone: str | None = None
    end_time: datetime | None = None
    enabled: bool = True
    on_run_completed: Literal["delete", "keep"] = "delete"

    def next_time(self, after: float) -> float | None:
        """Return the first due time later than `after`, as a Unix timestamp in seconds.

        Return None if the cron is disabled or if its `end_time` comes before the next due time.

        If daylight saving time skips a scheduled time, the cron is due at the first moment after
        the skipped hour. If a scheduled time occurs twice because the clocks are set back, the cron
        is due at the first occurrence. When clocks are set back, a schedule with an hour field that
        starts with `*` is due in both occurrences of the repeated hour. When clocks are set back, a
        schedule name such as `@hourly` is due in both occurrences of the repeated hour.

        Raises:
            ConfigurationError: The schedule or the timezone is invalid.
        """
        schedule, zone_name = self.schedule, self.timezone or "UTC"
        try:
            zone = ZoneInfo(zone_name)
        except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
            raise ConfigurationError(
                f"the timezone {zone_name!r:.80} is unknown; expected an IANA name such as "
                "'Europe/Berlin'"
            ) from exc
        fields = schedule.split()
        try:
            if len(fields) != 5 and schedule not in _SCHEDULE_NAMES:
                raise ValueError(f"it has {len(fields)} fields")
            times = croniter(schedule, datetime.fromtimestamp(after, zone))
            next_at = _find_next_time_in_zone(times, zone)
            while next_at.fold and fields[1:] and not fields[1].startswith("*"):
                next_at = _find_next_time_in_zone(times, zone)
        except ValueError as exc:
            raise ConfigurationError(
                f"the schedule {schedule!r:.80} is invalid: {exc}; expected five fields (minute, "
                "hour, day, month, day of the week), such as '0 9 * * mon-fri', or one of "
                f"{', '.join(_SCHEDULE_NAMES)}"
            ) from exc
        end_time = self.end_time and self.end_time.replace(tzinfo=self.end_time.tzinfo or UTC)
        is_over = end_time is not None and next_at > end_time
        return None if is_over or not self.enabled else next_at.timestamp()


class CronRequest(RunRequest, CronOptions):
    """The body of a request that creates a cron: the run to start, and the cron's schedule."""


def _find_next_time_in_zone(times: croniter, zone: ZoneInfo) -> datetime:
    """Return the next time of a schedule.

    When clocks are set back, a local time occurs twice. If the returned time is the second
    occurrence of a repeated local time, it has `fold=1`.
    """
    next_at: datetime = times.get_next(datetime)
    return next_at.astimezone(UTC).astimezone(zone)


class Schedule:
    """Starts the runs of crons that are due.

    Args:
        access: Decides what the creators of the crons may do now.
        databases: The databases in which crons are stored.
        runs: The run manager of the server.
    """

    def __init__(self, access: Access, databases: Databases, runs: RunManager) -> None:
        self._access, self._databases, self._runs = access, databases, runs
        self._checked_at: WeakKeyDictionary[Checkpointer, float] = WeakKeyDictionary()

    async def start_due_runs(self, tenant: str | None, saver: Checkpointer) -> None:
        """Start the runs of all due crons of a tenant."""
        table = CronTable(saver)
        if time.monotonic() - self._checked_at.get(saver, -DUE_CHECK_S) >= DUE_CHECK_S:
            await self._recompute_implausible_due_times(table)
            self._checked_at[saver] = time.monotonic()
        for cron_id in await table.list_due_ids():
            try:
                async with saver.lock(f"perdure.cron/{cron_id}", timeout_s=0):
                    cron, now = await table.get(cron_id), time.time()
                    if cron is not None and cron.next_at is not None and cron.next_at <= now:
                        await self._start_cron(tenant, table, cron, now)
            except Exception as exc:
                # Only log the error. The cron stays due, and the next sweep on any server tries to
                # start it again.
                if isinstance(exc, StorageUnavailable) and isinstance(exc.__cause__, TimeoutError):
                    # The cron's lock could not be acquired, so another server holds the lock and is
                    # starting the cron's run.
                    continue
                # Log only the type of the error, because the error message may contain users'
                # content.
                _LOGGER.info(
                    "cron %s is due, but could not be started yet (%s)", cron_id, type(exc).__name__
                )

    async def _recompute_implausible_due_times(self, table: CronTable) -> None:
        """Recompute due times that were computed by a server whose clock was fast.

        To compute a cron's latest plausible due time, `CLOCK_SKEW_S` seconds are added to the
        server's current time. The latest plausible due time is the cron's first due time after the
        current time plus `CLOCK_SKEW_S` seconds. If a cron's stored due time is later than the
        latest plausible due time, a new due time is computed and stored. If a cron has no stored
        due time, a due time is computed. A server whose clock was ahead may have removed the due
        time, because the cron's end time had already passed according to that clock.

        Clock differences of up to `CLOCK_SKEW_S` seconds between servers are tolerated. Without a
        tolerance for clock differences, a run could be started twice: first by a server whose clock
        is fast, then by one whose clock is correct.
        """
        for cron in await table.list_crons_due_after_or_never(time.time() + CLOCK_SKEW_S):
            try:
                now, payload = time.time(), {**cron.content["payload"], "metadata": {}}
                options = CronRequest.model_validate(payload)
                latest_plausible = await asyncio.to_thread(options.next_time, now + CLOCK_SKEW_S)
                if latest_plausible is None or (
                    cron.next_at is not None and cron.next_at <= latest_plausible
                ):
                    continue
                next_at = await asyncio.to_thread(options.next_time, now)
                if next_at is not None and await table.reset_next_time(cron, next_at):
                    _LOGGER.warning(
                        "cron %s had no plausible due time, so a new due time was computed",
                        cron.cron_id,
                    )
            except Exception as exc:
                # An error in one cron must not prevent the other crons from being checked. Log only
                # the type of the error, because the error message may contain users' content.
                _LOGGER.info(
                    "the due time of cron %s cannot be checked (%s)",
                    cron.cron_id,
                    type(exc).__name__,
                )

    async def _start_cron(
        self, tenant: str | None, table: CronTable, cron: CronRow, now: float
    ) -> None:
        """Start the run of a cron that is due.

        If the server refuses the run permanently, for example because a key was revoked, advance
        the cron to its next due time without a run. If a temporary error occurs, such as an
        unavailable database, raise the error, and leave the cron due so that its run is retried.
        """
        content = cron.content
        if content["graph"] not in self._runs.graphs:
            # This server does not serve the cron's graph, so leave the cron to a server that does.
            return
        request = CronRequest.model_validate(
            {**content["payload"], "metadata": content["metadata"]}
        )
        request.on_completion = request.on_run_completed
        next_at = await asyncio.to_thread(request.next_time, now)
        try:
            async with asyncio.timeout(HANDLER_TIMEOUT_S):
                await self._start_run(tenant, request, DueCron(cron, next_at))
        except (StorageUnavailable, StorageFull, TimeoutError):
            raise
        except Exception as exc:
            if isinstance(exc, Refused) and exc.status in _RETRY_STATUSES:
                raise
            _LOGGER.warning(
                "cron %s was due, but its run was refused (%s)", cron.cron_id, type(exc).__name__
            )
            await table.advance_next_time(cron, next_at)

    async def _start_run(self, tenant: str | None, request: CronRequest, due: DueCron) -> None:
        """Start a run as the user who created the cron, with that user's current permissions."""
        content = due.cron.content
        login = None if content["login"] is None else HandlerUser(content["login"])
        permissions, person = frozenset(content["permissions"]), content.get("acting_for")
        creator = Identity(
            content["user"], tenant, permissions, login, person, teams=extract_teams_of_user(login)
        )
        # Load the current permissions of the cron's creator, because the creator's API keys may
        # have been revoked since the cron was created.
        refresh_identity = getattr(self._access, "refresh_identity", None)
        identity = await refresh_identity(creator) if refresh_identity else creator
        call = Call(identity, "threads:create_run", self._access, self._databases, self._runs)
        with call.keep_database_open():
            checked_run = await check_run_request(
                call, self._runs, request, due.cron.thread_id, due=due
            )
            await start_checked_run(self._runs, checked_run)
