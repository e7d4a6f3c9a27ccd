"""Runs: each is a task of the server, one at a time on a thread, whoever listens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, Protocol
from uuid import uuid4

from langchain_core.runnables import RunnableConfig

from perdure.memory import record_views
from perdure.server.access import Refused
from perdure.server.call import Call
from perdure.server.graphs import Graph, Graphs
from perdure.server.run_log import Feed, Log
from perdure.server.run_request import RunRequest
from perdure.server.telemetry import Telemetry
from perdure.server.threads import Status

KEPT: Final = 1_000
"""How many runs that have ended are known, for an hour at most."""
REPLAYED: Final = 20
"""Of how many runs that have ended the events and the output can be read again."""
FEEDS: Final = 50
"""How many threads have events that can be read again, besides those that somebody reads."""
_HOUR: Final = timedelta(hours=1)
_AFTER: Final[Mapping[str, Status]] = {
    "success": "idle",
    "interrupted": "interrupted",
    "error": "error",
}
_LOGGER: Final = logging.getLogger(__name__)


class UnknownRun(Refused):
    """The thread has no such run, or the server has forgotten it."""

    status = 404


class ThreadBusy(Refused):
    """A run is under way on the thread, and the request does not wait for it."""

    status = 409


class Events(Protocol):
    """Plays a run and makes events of it."""

    log: Log
    output: Any
    interrupted: bool

    async def play(self, graph: Graph, given: Any, config: RunnableConfig) -> None:
        """Run a graph to its end."""


@dataclass(eq=False)
class Run:
    """A run of a graph on a thread."""

    run_id: str
    thread_id: str
    tenant: str | None
    graph: str
    assistant_id: str
    request: RunRequest
    events: Events
    temporary: bool
    """The thread is deleted at its end."""
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    updated_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    status: str = "pending"
    error: Mapping[str, str] | None = None
    cancelled: str | None = None
    task: asyncio.Task[None] | None = None
    phase: Literal["new", "playing", "over"] = "new"

    @property
    def ended(self) -> bool:
        """Whether all of it is done, its thread free for the next."""
        return self.task is not None and self.task.done()

    def cancel(self, action: str = "interrupt") -> None:
        """Stop it; `rollback` also removes what it has stored."""
        if self.phase == "over" or self.cancelled:
            return  # what it came to is being stored
        self.cancelled = action
        if self.phase == "playing" and self.task is not None:  # a new one sees it as it begins
            self.task.cancel()

    async def wait(self) -> None:
        """Wait for its end; if the waiting is cancelled, it goes on."""
        assert self.task is not None
        await asyncio.wait([self.task])

    def shown(self) -> dict[str, Any]:
        """As langgraph's clients know it."""
        return {
            "run_id": self.run_id,
            "thread_id": self.thread_id,
            "assistant_id": self.assistant_id,
            "created_at": self.created_at,
            "updated_at": self.updated_at,
            "status": self.status,
            "metadata": {**self.request.metadata, "graph_id": self.graph},
            "multitask_strategy": self.request.multitask_strategy,
        }


class Runs:
    """The runs of this process.

    Args:
        graphs: What they run.
        telemetry: Measures them; None: nothing does.
    """

    def __init__(self, graphs: Graphs, telemetry: Telemetry | None = None) -> None:
        self._graphs = graphs
        self._measured = telemetry.run if telemetry else contextlib.nullcontext
        self._runs: dict[tuple[str | None, str], dict[str, Run]] = {}  # by tenant and thread
        self._done: deque[Run] = deque()
        self._feeds: dict[tuple[str | None, str], Feed] = {}

    def feed(self, tenant: str | None, thread_id: str) -> Feed:
        """The events of a thread; few threads have some that nobody reads."""
        feed = self._feeds.pop((tenant, thread_id), None) or Feed()
        self._feeds[tenant, thread_id] = feed
        for key in [*self._feeds][: len(self._feeds) - FEEDS]:
            if not self._feeds[key].readers and not self.active(*key):
                del self._feeds[key]
        return feed

    def active(self, tenant: str | None, thread_id: str) -> list[Run]:
        """Those of a thread that have not ended, oldest first."""
        return [run for run in self._runs.get((tenant, thread_id), {}).values() if not run.ended]

    def of(self, tenant: str | None, thread_id: str) -> list[Run]:
        """Those of a thread that are known, newest first."""
        return [*self._runs.get((tenant, thread_id), {}).values()][::-1]

    def get(self, tenant: str | None, thread_id: str, run_id: str) -> Run:
        """A run of a thread.

        Raises:
            UnknownRun: The thread has none with this id, or it ended long ago.
        """
        try:
            return self._runs[tenant, thread_id][run_id]
        except KeyError:
            raise UnknownRun(
                f"thread {thread_id!r} has no run {run_id!r}; runs are known for an hour after "
                "their end, and no longer than the server runs"
            ) from None

    def start(
        self,
        call: Call,
        request: RunRequest,
        thread_id: str,
        events: Events,
        *,
        temporary: bool = False,
    ) -> Run:
        """Begin a run. The call is permitted, and may reach the thread.

        Raises:
            UnknownGraph: It is not served.
            ThreadBusy: Another run is under way, and the request is to be rejected then.
        """
        graph, tenant = self._graphs.name(request.assistant_id), call.identity.tenant
        active = self.active(tenant, thread_id)
        if active and request.multitask_strategy == "reject":
            raise ThreadBusy(
                f"run {active[-1].run_id!r} is under way on thread {thread_id!r}; wait for it, or "
                "use another multitask_strategy"
            )
        if request.multitask_strategy in ("interrupt", "rollback"):
            for each in active:
                each.cancel(request.multitask_strategy)
        run = Run(
            *(str(uuid4()), thread_id, tenant, graph, self._graphs.assistant_id(graph)),
            *(request, events, temporary),
        )
        self._runs.setdefault((tenant, thread_id), {})[run.run_id] = run
        run.task = asyncio.create_task(self._execute(run, call))
        return run

    async def stop(self, tenant: str | None, thread_id: str) -> None:
        """Cancel the runs of a thread, and wait until they have ended."""
        for run in self.active(tenant, thread_id):
            run.cancel()
            await run.wait()

    async def aclose(self, timeout_s: float = 5) -> None:
        """Cancel what runs, and wait until it has ended."""
        running = [run for runs in self._runs.values() for run in runs.values() if not run.ended]
        for run in running:
            run.cancel()
        if tasks := [run.task for run in running if run.task]:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def _execute(self, run: Run, call: Call) -> None:
        run.phase, rejects = "playing", run.request.multitask_strategy == "reject"
        try:
            with _outcome(run):
                if run.cancelled:
                    raise asyncio.CancelledError
                async with call.saver.lock(run.thread_id, timeout_s=0 if rejects else None):
                    await self._turn(run, call)
            run.phase = "over"
            if run.temporary:
                await call.threads.delete(run.thread_id)
        except Exception:
            _LOGGER.exception("the end of run %s could not be stored", run.run_id)
        finally:
            run.events.log.close()
            run.updated_at = datetime.now(UTC)
            self._forget(run)

    async def _turn(self, run: Run, call: Call) -> None:
        run.status, saver = "running", call.saver
        identity, request = call.identity, run.request
        about = {"graph_id": run.graph, "assistant_id": run.assistant_id}
        if identity.raw is not None:
            about["langgraph_auth_user"] = identity.raw
        config = request.runnable(run.thread_id, identity.user, run.run_id, about)
        config["callbacks"] = [record_views(saver)]
        opened = self._graphs.opened(
            *(run.graph, saver, call.store, config),
            access="threads.create_run",
            user=identity.raw,
            context=request.context,
        )
        with _outcome(run), self._measured():
            async with opened as graph:
                await run.events.play(graph, request.given(), config)
            run.status = "interrupted" if run.events.interrupted else "success"
        run.phase = "over"
        if run.cancelled == "rollback":
            await saver.adelete_for_runs([run.run_id])
        if not run.temporary:
            await call.threads.set_status(run.thread_id, _AFTER[run.status])

    def _forget(self, ended: Run) -> None:
        self._done.append(ended)
        ended.request.input = ended.request.command = None
        if len(self._done) > REPLAYED:
            self._done[-REPLAYED - 1].events = _Forgotten()  # who reads the others has them still
        old = datetime.now(UTC) - _HOUR
        while len(self._done) > KEPT or self._done[0].updated_at < old:
            run = self._done.popleft()
            of_thread = self._runs[run.tenant, run.thread_id]
            del of_thread[run.run_id]
            if not of_thread:
                del self._runs[run.tenant, run.thread_id]


class _Forgotten:
    """The events of a run that ended a while ago."""

    def __init__(self) -> None:
        self.log, self.output, self.interrupted = Log(), None, False
        self.log.close()

    async def play(self, graph: Graph, given: Any, config: RunnableConfig) -> None:
        """It is over."""


@contextlib.contextmanager
def _outcome(run: Run) -> Iterator[None]:
    """What an exception makes of a run."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        run.status = "interrupted"
    except Exception as exc:
        _LOGGER.warning("run %s failed", run.run_id, exc_info=True)
        run.status = "error"
        run.error = {"error": type(exc).__name__, "message": str(exc)[:2000]}
