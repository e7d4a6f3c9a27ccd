"""Runs: what a client asks one to do, checked, and the tasks of the server that do it.

Nobody runs as somebody else. A thread has one run at a time, whoever listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, cast
from uuid import uuid4
from weakref import WeakValueDictionary

from langchain_core.runnables import RunnableConfig
from langgraph.types import Command, Send
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from perdure.checkpointers.thread_list import RunStatus
from perdure.errors import ConfigurationError
from perdure.memory import record_views
from perdure.server.access import Identity, Refused
from perdure.server.call import Call
from perdure.server.graphs import Graph, Graphs, id_of
from perdure.server.limits import Limits, TooMany
from perdure.server.run_log import Feed, Log
from perdure.server.telemetry import Telemetry
from perdure.server.threads import checked_metadata

Mode = Literal[
    "values", "updates", "messages", "messages-tuple", "custom", "debug", "tasks", "checkpoints"
]
_OURS: Final = ("user_id", "owner", "thread_id", "run_id", "assistant_id", "graph_id")
_REFUSED: Final = ("after_seconds", "webhook", "strict_resume")


class Goto(BaseModel):
    """A node to go to, with an input of its own."""

    node: str
    input: Any = None


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _is_ours(name: str) -> bool:
    return name in _OURS or name.startswith(("__", "langgraph_"))


def _theirs(metadata: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metadata.items() if not _is_ours(name)}


Metadata = Annotated[dict[str, Any], AfterValidator(_theirs)]
"""Metadata of a client, without what the server alone sets: a graph that calls this one sends it"""


class Given(BaseModel):
    """A part of a request, in which null is as good as nothing."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        is_object = isinstance(given, Mapping)
        return {n: v for n, v in given.items() if v is not None} if is_object else given


class Order(BaseModel):
    """langgraph's `Command`."""

    update: dict[str, Any] | list[tuple[str, Any]] | None = None
    resume: Any = None
    goto: Annotated[list[str | Goto], BeforeValidator(_as_list)] = []

    def command(self) -> Command[Any]:
        """As langgraph takes it."""
        goto = [
            each if isinstance(each, str) else Send(each.node, each.input) for each in self.goto
        ]
        return Command(update=self.update, resume=self.resume, goto=goto)


class CheckpointAt(BaseModel):
    """Where to go on from."""

    thread_id: str | None = None
    checkpoint_id: str | None = None
    checkpoint_ns: str | None = None
    checkpoint_map: dict[str, str] | None = None


class Configurable(CheckpointAt):
    """The same, and what else a graph takes."""

    model_config = ConfigDict(extra="allow")


class Configured(Given):
    """Of langchain's config, what a client may set."""

    tags: list[str] = []
    recursion_limit: int = Field(default=25, ge=1, le=1000)
    configurable: Configurable = Configurable()
    metadata: Metadata = {}


class RunRequest(Given):
    """The body of a request for a run, as `langgraph_sdk` sends it."""

    assistant_id: str
    input: Any = None
    command: Order | None = None
    checkpoint: CheckpointAt | None = None
    checkpoint_id: str | None = None
    config: Configured = Configured()
    context: dict[str, Any] | None = None
    metadata: Metadata = {}
    interrupt_before: Literal["*"] | list[str] | None = None
    interrupt_after: Literal["*"] | list[str] | None = None
    stream_mode: Annotated[list[Mode], BeforeValidator(_as_list)] = ["values"]
    stream_subgraphs: bool = False
    stream_resumable: bool = False  # has no effect: each stream can be read again
    on_disconnect: Literal["cancel", "continue"] = "continue"
    on_completion: Literal["delete", "keep"] = "delete"
    multitask_strategy: Literal["reject", "enqueue", "interrupt", "rollback"] = "enqueue"
    if_not_exists: Literal["reject", "create"] = "reject"
    durability: Literal["sync", "async", "exit"] | None = None
    after_seconds: float | None = None
    webhook: str | None = None
    strict_resume: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in _REFUSED:
            if value := getattr(self, name):
                raise ValueError(
                    f"{name} is {value!r}, which this server does not do: leave it out"
                )
        if self.input is not None and self.command is not None:
            raise ValueError("a run has an input or a command, not both")
        labels = {n: v for n, v in self._configurable.items() if isinstance(v, str | int | float)}
        checked_metadata({**labels, **self.config.metadata, **self.metadata})  # of checkpoints
        return self

    def given(self) -> Any:
        """The graph's input."""
        return self.command.command() if self.command else self.input

    def check(self, thread_id: str, user: str) -> None:
        """Refuse what the server alone decides.

        Raises:
            ConfigurationError: The config or the context names another user or thread, or keys of
                langgraph's own.
        """
        own = {"thread_id": thread_id, "user_id": user, "owner": user}
        for name, value in chain(self._configurable.items(), (self.context or {}).items()):
            if _is_ours(name) and value is not None and value != own.get(name):
                raise ConfigurationError(
                    f"{name!r} is {value!r}, and the server alone sets it: leave it out"
                )

    @property
    def places(self) -> dict[str, str]:
        """The checkpoints that it names, by their namespaces."""
        at = self._configurable
        here = {at.get("checkpoint_ns", ""): at.get("checkpoint_id")}
        return {ns: id for ns, id in {**here, **at.get("checkpoint_map", {})}.items() if id}

    @property
    def _configurable(self) -> dict[str, Any]:
        given = self.config.configurable.model_dump(exclude_unset=True)
        given |= (self.checkpoint or CheckpointAt()).model_dump(exclude_none=True)
        given |= {"checkpoint_id": self.checkpoint_id} if self.checkpoint_id else {}
        return {
            n: v for n, v in given.items() if v is not None or n not in CheckpointAt.model_fields
        }

    def config_with(self, ours: Mapping[str, Any]) -> RunnableConfig:
        """The config of the run, with what the server alone sets."""
        return {
            "configurable": {**self._configurable, **ours},
            "metadata": {**self.config.metadata, **self.metadata},
            "tags": self.config.tags,
            "recursion_limit": self.config.recursion_limit,
        }


# -- runs

KEPT: Final = 1_000
"""How many runs that have ended are known."""
REPLAYED: Final = 50
"""Of how many of them the events and the output can be read again."""
FEEDS: Final = 100
"""How many threads have events that can be read again, besides those that somebody reads."""
_ENDS_S: Final = 5  # how long a run that was cancelled is waited for
_LOGGER: Final = logging.getLogger(__name__)


@dataclass(eq=False)
class Run:
    """A run of a graph on a thread.

    Attributes:
        temporary: The thread is deleted at its end.
        log: The events.
        output: The values after its last step, with its interrupts.
        waits: Whether somebody has to answer.
        cancelled: How, if it was.
        forgotten: Its events and its output are no longer kept.
    """

    thread_id: str
    tenant: str | None
    user: str
    graph: str
    request: RunRequest
    temporary: bool
    run_id: str = field(default_factory=lambda: str(uuid4()))
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    updated_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    status: str = "pending"
    error: Mapping[str, str] | None = None
    log: Log = field(default_factory=Log)
    output: Any = None
    waits: bool = False
    cancelled: str | None = None
    forgotten: bool = False
    task: asyncio.Task[None] = field(init=False)
    _playing: bool = field(default=False, init=False)

    @property
    def ended(self) -> bool:
        """Whether all of it is done, its thread free for the next."""
        return self.task.done()

    def cancel(self, action: str = "interrupt") -> None:
        """Stop it; `rollback` also removes what it has stored."""
        self.cancelled = self.cancelled or action  # seen as it begins, if it has not
        if self._playing:
            self._playing = False
            self.task.cancel()

    async def wait(self) -> None:
        """Wait for its end; if the waiting is cancelled, it goes on."""
        await asyncio.wait([self.task])

    @contextlib.contextmanager
    def playing(self) -> Iterator[None]:
        """While it lasts, the run can be cancelled; what ends it is its status."""
        self._playing = True
        try:
            if self.cancelled:
                raise asyncio.CancelledError
            yield
        except asyncio.CancelledError:
            self.task.uncancel()
            self.status = "interrupted"
        except Exception as exc:
            where = RuntimeError(type(exc).__name__).with_traceback(exc.__traceback__)
            _LOGGER.warning("run %s failed", self.run_id, exc_info=where)  # its text is content
            self.status = "error"
            self.error = {"error": type(exc).__name__, "message": str(exc)[:2000]}
        finally:
            self._playing = False

    def forget(self) -> None:
        """Drop the events and the output; its readers have the events."""
        self.forgotten, self.output, self.log = True, None, Log()
        self.log.close()

    def shown(self) -> dict[str, Any]:
        """As langgraph's clients know it."""
        return {
            "run_id": self.run_id,
            "thread_id": self.thread_id,
            "assistant_id": id_of(self.graph),
            "created_at": self.created_at,
            "updated_at": self.updated_at,
            "status": self.status,
            "metadata": {**self.request.metadata, "graph_id": self.graph},
            "multitask_strategy": self.request.multitask_strategy,
        }


Play: TypeAlias = Callable[[Run, Graph, RunnableConfig], Awaitable[None]]
"""Runs a graph to its end, and makes events and the output of the run of it."""


class Runs:
    """The runs of this process.

    Args:
        graphs: What they run.
        limits: How many an identity may have under way.
        telemetry: Measures them; None: nothing does.
    """

    def __init__(self, graphs: Graphs, limits: Limits, telemetry: Telemetry | None = None) -> None:
        self.graphs, self._at_once = graphs, limits.at_once
        self._measured = telemetry.run if telemetry else contextlib.nullcontext
        self._runs: dict[tuple[str | None, str], dict[str, Run]] = {}  # by tenant and thread
        self._done: deque[Run] = deque()
        self._feeds: WeakValueDictionary[tuple[str | None, str], Feed] = WeakValueDictionary()
        self._recent: list[Feed] = []  # first is what was asked for last
        self._under_way: set[Run] = set()

    def feed(self, tenant: str | None, thread_id: str) -> Feed:
        """The events of a thread."""
        feed = self._feeds.setdefault((tenant, thread_id), Feed())
        self._recent = [feed, *(each for each in self._recent if each is not feed)][:FEEDS]
        return feed

    def active(self, tenant: str | None, thread_id: str) -> list[Run]:
        """Those of a thread that have not ended, oldest first."""
        return [run for run in self.of(tenant, thread_id) if not run.ended]

    def busy(self, tenant: str | None) -> set[str]:
        """The threads of runs that have not ended."""
        return {r.thread_id for r in self._under_way if r.tenant == tenant and not r.ended}

    def of(self, tenant: str | None, thread_id: str) -> list[Run]:
        """Those of a thread that are known, oldest first."""
        return [*self._runs.get((tenant, thread_id), {}).values()]

    def every(self, tenant: str | None) -> list[Run]:
        """Those of all threads that are known, newest first."""
        known = (each.values() for (whose, _), each in self._runs.items() if whose == tenant)
        return sorted(chain(*known), key=lambda run: run.created_at, reverse=True)

    def get(self, tenant: str | None, thread_id: str, run_id: str) -> Run:
        """A run of a thread.

        Raises:
            Refused: The thread has none with this id, or it ended long ago.
        """
        try:
            return self._runs[tenant, thread_id][run_id]
        except KeyError:
            raise Refused(
                f"thread {thread_id!r} has no run {run_id!r}; of runs that have ended the last "
                f"{KEPT} are known, until the server stops",
                404,
            ) from None

    def check(self, identity: Identity) -> None:
        """Refuse an identity another run, if as many as may be are under way."""
        whose = identity.tenant, identity.user
        if sum((run.tenant, run.user) == whose for run in self._under_way) >= self._at_once:
            raise TooMany(f"{self._at_once} runs are under way; end some first", again_s=5)

    def forget(self, tenant: str | None, thread_id: str) -> None:
        """Forget the runs and the events of a thread that is no more: others may take its id."""
        for run in self._runs.pop((tenant, thread_id), {}).values():
            run.cancel()
            if run.ended:
                run.forget()
        if feed := self._feeds.pop((tenant, thread_id), None):
            feed.close()

    def start(
        self, call: Call, request: RunRequest, thread_id: str, play: Play, *, temporary: bool
    ) -> Run:
        """Begin a run. The call is permitted, and may reach the thread.

        Raises:
            UnknownGraph: It is not served.
            Refused: Another run is under way, and the request is to be rejected; or see `check`.
        """
        graph, identity = self.graphs.name(request.assistant_id), call.identity
        self.check(identity)
        tenant = identity.tenant
        active = self.active(tenant, thread_id)
        if active and request.multitask_strategy == "reject":
            raise Refused(
                f"run {active[-1].run_id!r} is under way on thread {thread_id!r}; wait for it, or "
                "use another multitask_strategy",
                409,
            )
        if request.multitask_strategy in ("interrupt", "rollback"):
            for each in active:
                each.cancel(request.multitask_strategy)
        run = Run(thread_id, tenant, identity.user, graph, request, temporary)
        self._runs.setdefault((tenant, thread_id), {})[run.run_id] = run
        self._under_way.add(run)
        run.task = asyncio.create_task(self._execute(run, call, play))
        return run

    async def stop(self, tenant: str | None, thread_id: str) -> None:
        """Cancel the runs of a thread, and wait until they have ended.

        Raises:
            Refused: One does not end: a node of it goes on, though it was cancelled.
        """
        for run in await _stop(self.active(tenant, thread_id)):
            why = f"run {run.run_id!r} was cancelled and goes on after {_ENDS_S} s; try later"
            raise Refused(why, 409)

    async def aclose(self) -> None:
        """Cancel what runs, and wait until it has ended."""
        await _stop([*self._under_way])

    async def _execute(self, run: Run, call: Call, play: Play) -> None:
        patience_s = 0 if run.request.multitask_strategy == "reject" else None
        with call.used():
            try:
                with run.playing():
                    async with call.saver.lock(run.thread_id, timeout_s=patience_s):
                        await self._turn(run, call, play)
                if run.temporary:
                    await call.threads.delete(run.thread_id)
            except Exception:
                _LOGGER.exception("the end of run %s could not be stored", run.run_id)
            finally:
                run.log.close()
                run.updated_at = datetime.now(UTC)
                self._under_way.discard(run)
                self._forget(run)

    async def _turn(self, run: Run, call: Call, play: Play) -> None:
        run.status, saver, identity = "running", call.saver, call.identity
        known = (await call.threads.get(run.thread_id))["metadata"]  # it may be deleted by now
        ids = {"thread_id": run.thread_id, "user_id": identity.user, "run_id": run.run_id}
        graph_ids = {"graph_id": run.graph, "assistant_id": id_of(run.graph)}
        login = {"langgraph_auth_user": identity.raw} if identity.raw is not None else {}
        config = run.request.config_with({**graph_ids, **login, **ids})
        config["metadata"] |= {"owner": known["owner"]} if "owner" in known else {}
        config["callbacks"] = [record_views(saver)]
        opened = self.graphs.opened(
            *(run.graph, saver, call.store, config),
            access="threads.create_run",
            user=identity.raw,
            context=run.request.context,
        )
        with run.playing(), self._measured():
            async with opened as graph:
                await play(run, graph, config)
            run.status = "interrupted" if run.waits else "success"
        if run.cancelled == "rollback":
            await saver.adelete_for_runs([run.run_id])  # its thread stands as before
        elif not run.temporary:
            stands = "idle" if run.status == "success" else run.status
            await call.threads.set_status(run.thread_id, cast(RunStatus, stands))

    def _forget(self, ended: Run) -> None:
        self._done.append(ended)
        ended.request.input = ended.request.command = None
        if len(self._done) > REPLAYED:
            self._done[-REPLAYED - 1].forget()
        if len(self._done) > KEPT:
            run = self._done.popleft()
            of_thread = self._runs.get((run.tenant, run.thread_id), {})
            of_thread.pop(run.run_id, None)
            if not of_thread:
                self._runs.pop((run.tenant, run.thread_id), None)


async def _stop(runs: Collection[Run]) -> list[Run]:
    """Cancel runs, and wait for their end; returns those that go on nevertheless."""
    for run in runs:
        run.cancel()
    if runs:
        await asyncio.wait([run.task for run in runs], timeout=_ENDS_S)
    return [run for run in runs if not run.ended]
