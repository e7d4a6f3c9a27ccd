"""The protocol of `client.threads.stream(…)`: commands, and events of a thread by channels.

The events are those of `graph.astream_events(version="v3")`, numbered through the runs of a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, cast

from fastapi import APIRouter, Response
from langchain_core.runnables import RunnableConfig
from langgraph.stream import CheckpointsTransformer, CustomTransformer, UpdatesTransformer
from langgraph.types import Command
from langgraph_sdk.stream.subscription import matches_subscription
from pydantic import BaseModel, Field, ValidationError
from sse_starlette import EventSourceResponse

from perdure.server.access import action
from perdure.server.api_runs import PING_S, SEND_S, All, begin
from perdure.server.call import Call, Caller
from perdure.server.graphs import Graph, UnknownGraph
from perdure.server.paths import Id
from perdure.server.reply import JSON
from perdure.server.run_log import Feed, Log
from perdure.server.run_request import RunRequest
from perdure.server.runs import Run, Runs

routes = APIRouter(prefix="/threads/{thread_id}", tags=["event streams"])
ASKS_AFTER_S: Final = 0.2
"""Clients stop reading events when they are asked, so a short run's must have reached them."""
_CHANNELS: Final = (UpdatesTransformer, CustomTransformer, CheckpointsTransformer)


class Order(BaseModel):
    """A command of a client."""

    id: int
    method: str
    params: dict[str, Any] = Field(default_factory=dict)


class Subscription(BaseModel):
    """Which events a client reads; `since`: those after this number."""

    channels: list[str]
    namespaces: list[list[str]] | None = None
    depth: int | None = None
    since: int | None = Field(None, ge=0)


class NotObeyed(Exception):
    """A command that is not obeyed, with its code in the protocol."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@routes.post("/commands")
@action("threads:create_run")
async def command(call: Caller, runs: All, thread_id: Id, order: Order) -> Response:
    """Begin a run (`run.start`), or answer an interrupt (`input.respond`)."""
    try:
        if order.method == "run.start":
            body = _request(order.params)
        elif order.method == "input.respond":
            body = _request({**order.params, **await _answer(call, runs, thread_id, order.params)})
        else:
            raise NotObeyed("not_supported", f"{order.method!r} is no command of this server")
        events = ThreadEvents()
        run = await begin(call, runs, body, thread_id, events)
    except (NotObeyed, UnknownGraph) as exc:
        code = exc.code if isinstance(exc, NotObeyed) else "invalid_argument"
        return JSON({"type": "error", "id": order.id, "error": code, "message": str(exc)})
    feed = events.connect(run, runs.feed(call.identity.tenant, thread_id))
    return JSON(
        {
            "type": "success",
            "id": order.id,
            "result": {"run_id": run.run_id},
            "meta": {"applied_through_seq": feed.last},
        }
    )


@routes.post("/stream/events")
@action("threads:read")
async def stream(call: Caller, runs: All, thread_id: Id, wanted: Subscription) -> Response:
    """The events of a thread, of this run and the next ones."""
    await call.permit({"thread_id": thread_id})
    await call.threads.get(thread_id)
    feed = runs.feed(call.identity.tenant, thread_id)
    return EventSourceResponse(_frames(feed, wanted), ping=PING_S, send_timeout=SEND_S)


def _request(params: Mapping[str, Any]) -> RunRequest:
    names = RunRequest.model_fields.keys() & params.keys()
    try:
        return RunRequest(**{name: params[name] for name in names}, if_not_exists="create")
    except ValidationError as exc:
        raise NotObeyed("invalid_argument", str(exc)) from exc


async def _answer(
    call: Call, runs: Runs, thread_id: str, params: Mapping[str, Any]
) -> dict[str, Any]:
    """The request that answers interrupts, to the graph that ran last."""
    answers = params.get("responses") or [params]
    try:
        resume = {each["interrupt_id"]: each["response"] for each in answers}
    except (KeyError, TypeError) as exc:
        raise NotObeyed("invalid_argument", "an answer needs interrupt_id and response") from exc
    order = {name: params[name] for name in ("update", "goto") if params.get(name)}
    if known := runs.of(call.identity.tenant, thread_id):
        graph = known[0].graph
    else:
        await call.permit({"thread_id": thread_id})
        graph = (await call.threads.get(thread_id))["metadata"].get("graph_id", "")
    return {"assistant_id": graph, "command": {"resume": resume, **order}}


async def _frames(feed: Feed, wanted: Subscription) -> AsyncIterator[bytes]:
    fresh = wanted.since is None
    after = feed.unread if wanted.since is None else min(wanted.since, feed.last)
    params = cast(Any, wanted.model_dump(exclude_none=True))
    with suppress(LookupError):  # it reads too slowly: it connects again, and misses some
        async for entries in feed.after(max(after, feed.first)):
            found = [each for each in entries if matches_subscription(each.kind, params)]
            if found:
                yield b"".join(each.frame for each in found)
            if fresh:
                feed.tell(entries[-1].number)


class ThreadEvents:
    """Plays runs to the feed of a thread."""

    def __init__(self) -> None:
        self.log, self.output, self.interrupted = Log(), None, False
        self._feed, self._run_id = Feed(), ""
        self._interrupts: dict[str, tuple[list[str], Any]] = {}
        self._messages: dict[str, str] = {}  # ids of messages, by the model's runs

    def connect(self, run: Run, feed: Feed) -> Feed:
        """Send the events of a run to a feed; tell it of the run's end."""
        self._feed, self._run_id = feed, run.run_id
        assert run.task is not None
        run.task.add_done_callback(lambda task: self._finish(run, task.get_loop()))
        return feed

    async def play(self, graph: Graph, given: Any, config: RunnableConfig) -> None:
        """Run a graph to its end; an input answers the interrupt that waits, if one does."""
        self._feed.begin(self)
        self._add("lifecycle", [], {"event": "running"})
        if given is not None and not isinstance(given, Command):
            waiting = (await graph.aget_state(config)).interrupts
            given = Command(resume=given) if waiting else given
        made = set(graph.stream_transformers)
        async with await graph.astream_events(
            given,
            config,
            version="v3",
            transformers=[each for each in _CHANNELS if each not in made],
        ) as events:
            async for event in events:
                self._take(event["method"], event["params"])

    def _take(self, method: str, params: Mapping[str, Any]) -> None:
        ns, data = list(params["namespace"]), params["data"]
        if method == "values":
            waiting = params.get("interrupts", ())
            self._interrupts |= {each.id: (ns, each.value) for each in waiting}
            self.interrupted |= bool(waiting)
            self.output = data if not ns else self.output
        elif method == "updates" and not ns:
            self.interrupted |= "__interrupt__" in data
        for event, at, shown in self._shown(method, ns, data):
            self._add(event, at, shown)

    def _shown(self, method: str, ns: list[str], data: Any) -> Iterable[tuple[str, list[str], Any]]:
        match method:
            case "lifecycle":
                shown = dict(data)
                yield method, shown.pop("namespace"), shown
            case "messages":
                part, metadata = data
                model_run = str(metadata.get("run_id"))
                if not isinstance(part, Mapping):
                    return  # a message that a node returns is part of the values
                if part["event"] == "message-start":
                    self._messages[model_run] = part["id"]
                    node = {"langgraph_node": metadata.get("langgraph_node")}
                    yield method, ns, {**part, "metadata": node}
                else:
                    yield method, ns, {**part, "message_id": self._messages.get(model_run)}
            case "checkpoints":
                yield method, ns, _checkpoint(data)
            case _ if method.startswith("custom:"):
                name = method.removeprefix("custom:")
                yield "custom", ns, {"name": name, "payload": data}
            case _:
                yield method, ns, data

    def _finish(self, run: Run, loop: asyncio.AbstractEventLoop) -> None:
        if run.error:
            why = f"{run.error['error']}: {run.error['message']}"
            self._end({"event": "failed", "error": why})
        elif run.cancelled:
            self._end({"event": "failed", "error": "the run was cancelled"})
        elif run.status == "interrupted":
            loop.call_later(ASKS_AFTER_S, self._ask)
        else:
            self._end({"event": "completed"})

    def _end(self, how: Mapping[str, str]) -> None:
        self._add("lifecycle", [], how)
        self._feed.end()

    def _ask(self) -> None:
        if self._feed.run is not self:
            return  # the next run has begun
        for key, (ns, value) in self._interrupts.items():
            self._add(
                "input.requested", ns, {"interrupt_id": key, "value": value, "payload": value}
            )
        self._add("lifecycle", [], {"event": "interrupted"})

    def _add(self, method: str, namespace: list[str], data: Any) -> None:
        number = self._feed.last + 1
        params = {"namespace": namespace, "timestamp": int(time.time() * 1000), "data": data}
        event = {
            "type": "event",
            "event_id": f"{self._run_id}-{number}",
            "seq": number,
            "method": method,
            "params": params,
        }
        name = data.get("name") if method == "custom" and isinstance(data, Mapping) else None
        kind = {"method": method, "params": {"namespace": namespace, "data": {"name": name}}}
        self._feed.add(method, event, kind)


def _checkpoint(data: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint in short; the whole has the config, with the login of the user."""
    parent = data.get("parent_config") or {"configurable": {}}
    return {
        "id": data["config"]["configurable"].get("checkpoint_id"),
        "parent_id": parent["configurable"].get("checkpoint_id"),
        "step": data["metadata"].get("step"),
        "source": data["metadata"].get("source"),
    }
