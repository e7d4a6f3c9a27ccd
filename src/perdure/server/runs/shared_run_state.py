"""Hold the objects that the runs of all tenants share in a server process.

These objects are the graphs, the limits, the event logs of threads, and the `Player` of each run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol, TypeAlias
from weakref import WeakValueDictionary

from langchain_core.runnables import RunnableConfig

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.server.databases import Databases
from perdure.server.graphs import Graph, Graphs
from perdure.server.http.access import Identity, Refused
from perdure.server.http.limits import Limits, TooManyRequests
from perdure.server.runs.event_log import EventLog, LoggedEvent
from perdure.server.runs.event_memory import EventMemory
from perdure.server.runs.run import Run
from perdure.server.runs.webhooks import Webhooks
from perdure.server.teams import RunTeams

RETAINED_EVENT_LOGS: Final = 100
"""The number of threads whose event logs are kept in memory even if nobody reads them. The event
logs that were requested most recently are kept."""


class Player(Protocol):
    """Runs a graph to completion, and produces the run's events and output."""

    async def run_graph(self, graph: Graph, config: RunnableConfig, graph_input: Any) -> None:
        """Run the graph with the given input, or resume it if `graph_input` is None."""

    def build_run_end_events(self, error: Mapping[str, str] | None) -> list[LoggedEvent]:
        """Return the run's last events, which are stored together with its final status."""


PlayerClasses: TypeAlias = "Mapping[str, Callable[[Run, SharedRunState], Player]]"


class SharedRunState:
    """The objects that the runs of all tenants share in a server process.

    A `SharedRunState` keeps the event logs of threads, and registers the runs that have a task in
    this process.

    Attributes:
        graphs: The graphs that the runs execute.
        databases: The databases in which runs are stored.
        owners_are_people: Whether the `owner` of a thread is the user of an API key. If so, the
            `owner` is the person of a thread whose head has no `user_id`.
        teams: Chooses the teams whose memory runs use. If it is None, the config of a run decides.
        measure_run: Returns a context manager that measures the time of the graph run in its block.
        webhooks: Sends the results of runs that have ended.
        start_due_crons: Starts the runs of all due crons of a tenant. Its arguments are the tenant
            and the checkpointer of the tenant. None means that no crons are started.
        memory: Limits the events that are kept in memory.
        players_by_run: Maps each run that has a task in this process to the `Player` that executes
            the run's graph.
        is_draining: Whether the server refuses new runs because it is shutting down.
        is_closed: Whether the server has stopped its runs because it is shutting down. Other
            servers continue the unfinished runs.

    Args:
        limits: How many unfinished runs a user may have, and how many bytes of events are kept in
            memory.
        player_classes: The classes that run graphs, by protocol; see `Run.protocol`.
    """

    def __init__(
        self,
        graphs: Graphs,
        limits: Limits,
        databases: Databases,
        player_classes: PlayerClasses,
        webhooks: Webhooks | None = None,
        measure_run: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        owners_are_people: bool = True,
        teams: RunTeams | None = None,
    ) -> None:
        self.graphs, self.databases = graphs, databases
        self.owners_are_people, self.teams = owners_are_people, teams
        self.webhooks, self.measure_run = webhooks or Webhooks(), measure_run
        self.start_due_crons: Callable[[str | None, Checkpointer], Awaitable[None]] | None = None
        self.memory = EventMemory(limits)
        self._max_unfinished_runs_per_user = limits.max_concurrent_requests
        self._player_classes = player_classes
        self.players_by_run: dict[Run, Player] = {}
        self.is_draining = self.is_closed = False
        self._event_logs: WeakValueDictionary[tuple[str | None, str], EventLog] = (
            WeakValueDictionary()
        )
        # Event logs that `get_or_create_event_log` returned recently, most recent first
        self._recent_event_logs: list[EventLog] = []

    # -- runs that have a task in this process

    def register_run(self, run: Run) -> None:
        """Register a run whose task was started in this process, and create its `Player`."""
        run.log.charge_memory_to_account(self.memory.get_account(run.tenant, run.user))
        self.players_by_run[run] = self._player_classes[run.protocol](run, self)

    def has_run_of_thread(self, tenant: str | None, thread_id: str) -> bool:
        """Return whether this process has an unfinished run of a thread.

        If a thread is deleted during a run, the method returns True until the run has ended.
        """
        return any(
            run.tenant == tenant and run.thread_id == thread_id for run in self.players_by_run
        )

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
            sum((run.tenant, run.user) == user_ref for run in self.players_by_run) + count
            > self._max_unfinished_runs_per_user
        ):
            raise TooManyRequests(
                f"a user can have at most {self._max_unfinished_runs_per_user} unfinished runs; "
                "wait until some have ended, or cancel them",
                retry_after_s=5,
            )
        if self.is_draining:
            raise Refused(
                "the server is shutting down; retry, or use another server",
                503,
                {"Retry-After": "1"},
            )

    # -- events

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

    def close_event_log(self, tenant: str | None, thread_id: str) -> None:
        """Close and remove the event log of a deleted thread."""
        if event_log := self._event_logs.pop((tenant, thread_id), None):
            event_log.close()

    def close_all_event_logs(self) -> None:
        """Close the event logs of all threads, because the server is shutting down."""
        for event_log in self._event_logs.values():
            event_log.close()
