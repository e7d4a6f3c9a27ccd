"""States of threads by REST, in the form that langgraph's clients know."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Query
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.types import PregelTask, StateSnapshot, StateUpdate
from langgraph_sdk.runtime import AccessContext
from pydantic import BaseModel, BeforeValidator, Field
from starlette.responses import Response

from perdure.checkpointers.labels import CALLER, DEED
from perdure.checkpointers.thread_list import ListedThread
from perdure.effects import arun
from perdure.errors import ConfigurationError, InvalidUpdate, PerdureError, UnknownCheckpoint
from perdure.memory.thread_messages import read_channel_values
from perdure.server.access import action
from perdure.server.call import Call, CurrentCall, PathId
from perdure.server.graphs import default_assistant_id
from perdure.server.person import Person, Sender, choose_person
from perdure.server.reply import JSONObject, build_json_reply
from perdure.server.run_request import CheckpointRef, CommandFields, expand_arrays
from perdure.server.runs import Runs, ServerRuns
from perdure.server.threads import build_interrupt
from perdure.settings import LIST_LIMIT, SEARCH_LIMIT

routes = APIRouter(tags=["threads"])


class StateQuery(BaseModel):
    """The body of `POST /threads/{thread_id}/state/checkpoint`."""

    checkpoint: JSONObject | None
    subgraphs: bool = False
    select: list[str] | None = None


class StateChange(BaseModel):
    """The body of `POST /threads/{thread_id}/state`."""

    values: JSONObject | list[JSONObject] | None = None
    as_node: str | None = None
    checkpoint: JSONObject | None = None
    checkpoint_id: str | None = None


class NodeUpdate(BaseModel):
    """What a node is as if it had returned; a command in place of values."""

    values: JSONObject | list[JSONObject] | None = None
    command: CommandFields | None = None
    as_node: str | None = None

    def to_state_update(self) -> StateUpdate:
        """As langgraph takes it."""
        is_command = self.command is not None and not self.command.is_empty
        values: Any = self.command.to_command() if self.command and is_command else self.values
        return StateUpdate(values, self.as_node)


class Superstep(BaseModel):
    """Updates that were made at once."""

    updates: list[NodeUpdate] = Field(min_length=1, max_length=1000)


class HistoryQuery(BaseModel):
    """The body of `POST /threads/{thread_id}/history`."""

    limit: int = Field(SEARCH_LIMIT, ge=1, le=1000)
    before: str | JSONObject | None = None
    metadata: JSONObject | None = None
    checkpoint: JSONObject | None = None
    select: list[str] | None = None


@routes.get("/threads/{thread_id}/state")
@routes.get("/threads/{thread_id}/state/{checkpoint_id}")
@action("threads:read")
async def get_state(
    call: CurrentCall,
    runs: ServerRuns,
    thread_id: PathId,
    checkpoint_id: PathId = "",
    subgraphs: bool = False,
    select: Annotated[list[str] | None, Query(), BeforeValidator(expand_arrays)] = None,
) -> Response:
    """The newest state of a thread, or that at a checkpoint."""
    at = {"checkpoint_id": checkpoint_id}
    body = StateQuery(checkpoint=at, subgraphs=subgraphs, select=select)
    return await get_state_at(call, runs, thread_id, body)


@routes.post("/threads/{thread_id}/state/checkpoint")
@action("threads:read")
async def get_state_at(
    call: CurrentCall, runs: ServerRuns, thread_id: PathId, body: StateQuery
) -> Response:
    """The state at a checkpoint, also of a subgraph."""
    thread, config = (
        await call.permit_thread_row(thread_id),
        build_checkpoint_config(thread_id, body.checkpoint),
    )
    checkpoint = await get_checkpoint(call, config)
    async with _open_graph(runs, call, thread) as graph:
        if graph is not None:
            found = await graph.aget_state(config, subgraphs=body.subgraphs)
        else:
            found = await _read_unserved_state(call, checkpoint, config)
    return await build_json_reply(_select_fields(build_state_json(found), body.select))


@routes.post("/threads/{thread_id}/state")
@action("threads:update")
async def update_state(
    call: CurrentCall, runs: ServerRuns, thread_id: PathId, body: StateChange
) -> JSONObject:
    """Update the state as if a node had returned the values.

    From an older checkpoint the thread goes on as a branch, which becomes the newest state.
    """
    thread = await call.permit_thread_row(thread_id)
    config = build_checkpoint_config(
        thread_id, body.checkpoint or {"checkpoint_id": body.checkpoint_id}
    )
    step = Superstep(updates=[NodeUpdate(values=body.values, as_node=body.as_node)])
    made = build_checkpoint_ref(await update_thread_state(call, runs, thread, config, [step]))
    return {
        "checkpoint": made,
        "configurable": made,
        "checkpoint_id": made and made["checkpoint_id"],
    }


@routes.get("/threads/{thread_id}/history")
@action("threads:read")
async def list_history(
    call: CurrentCall,
    runs: ServerRuns,
    thread_id: PathId,
    limit: Annotated[int, Query(ge=1, le=1000)] = SEARCH_LIMIT,
    before: str | None = None,
) -> Response:
    """The states of a thread, the newest first."""
    return await search_history(call, runs, thread_id, HistoryQuery(limit=limit, before=before))


@routes.post("/threads/{thread_id}/history")
@action("threads:read")
async def search_history(
    call: CurrentCall, runs: ServerRuns, thread_id: PathId, body: HistoryQuery
) -> Response:
    """The states of a thread, the newest first."""
    thread, config = (
        await call.permit_thread_row(thread_id),
        build_checkpoint_config(thread_id, body.checkpoint),
    )
    before = {"checkpoint_id": body.before} if isinstance(body.before, str) else body.before
    page: JSONObject = {"limit": body.limit, "filter": body.metadata}
    page["before"] = build_checkpoint_config(thread_id, before) if before else None
    async with _open_graph(runs, call, thread) as graph:
        if graph is not None:
            found = [each async for each in graph.aget_state_history(config, **page)]
        else:
            found = [
                await _read_unserved_state(call, each, each.config)
                async for each in call.saver.alist(config, **page)
            ]
    return await build_json_reply(
        [_select_fields(build_state_json(each), body.select) for each in found]
    )


@routes.get("/threads/{thread_id}/items")
@action("threads:read")
async def list_items(
    call: CurrentCall,
    thread_id: PathId,
    channel: str = "messages",
    checkpoint_ns: str = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = LIST_LIMIT,
    before: Annotated[int | None, Query(ge=0, le=1 << 60)] = None,
) -> Response:
    """List the newest items that were ever in a channel, in the order of time.

    The list includes items that are no longer in the state. To get the page before, pass the
    `position` of the first item as `before`.
    """
    await call.permit_thread(thread_id)
    found = await call.saver.ahistory(
        thread_id,
        channel=channel,
        checkpoint_ns=checkpoint_ns,
        ends=(0, limit),
        before=before,
        missing_ok=True,
    )
    names = ("position", "seen", "branch", "stored_at", "value")
    return await build_json_reply([{name: getattr(item, name) for name in names} for item in found])


async def update_thread_state(
    call: Call,
    runs: Runs,
    thread: ListedThread,
    config: RunnableConfig,
    supersteps: Sequence[Superstep],
) -> RunnableConfig:
    """Update a state; returns the config of the new one."""
    thread_id = thread.thread_id
    steps = [[each.to_state_update() for each in step.updates] for step in supersteps]
    async with _open_graph(runs, call, thread) as graph, call.threads.lock_for_change(thread_id):
        thread = await call.threads.get_permitted_row(thread_id)  # it may be deleted by now
        await get_checkpoint(call, config)
        if graph is None:
            raise ConfigurationError(
                f"the thread {thread_id!r} belongs to the graph "
                f"{thread.metadata.get('graph_id')!r}, which is not served, so its state cannot "
                "be updated; name one that is, as graph_id in its metadata"
            )
        sender, person = _choose_person(runs, call, thread)
        about = person.metadata(sender)
        steps = [
            [each._replace(values=person.input(each.values)) for each in step] for step in steps
        ]
        for step in steps:  # one at a time: langgraph gives the metadata to the first only
            config = _build_update_config(thread, config, about)
            try:
                config = await graph.abulk_update_state(config, [step])
            except PerdureError:
                raise
            except Exception as exc:  # a channel of the graph takes other values
                why = f"{type(exc).__name__}: {exc!s:.300}"
                raise InvalidUpdate(f"the update cannot be applied: {why}") from exc
        is_open = (await call.saver.astatus(thread_id)).next
        await call.threads.set_run_status(thread_id, "interrupted" if is_open else "idle")
    return config


# -- what they need


@asynccontextmanager
async def _open_graph(runs: Runs, call: Call, thread: ListedThread) -> AsyncIterator[Any]:
    """The compiled graph that a thread belongs to; None: it is not served."""
    name, graphs = thread.metadata.get("graph_id", ""), runs.graphs
    if name not in graphs:
        yield None
        return
    person = call.threads.find_person(thread)
    user = call.identity.person if person is None else person
    about = {"thread_id": thread.thread_id, "user_id": user}
    parts = name, call.saver, call.store, RunnableConfig(configurable=about)
    access: AccessContext = "threads.update" if call.action == "threads:update" else "threads.read"
    async with graphs.open_graph(*parts, access=access, user=call.identity.raw) as graph:
        yield graph


def _choose_person(runs: Runs, call: Call, thread: ListedThread) -> tuple[Sender, Person]:
    """Return the sender of an update, and the person of the thread.

    Of messages that another user adds, who may not act for the person, nothing is remembered.
    """
    identity = call.identity
    acts = identity.acting_for, identity.may_act
    sender = Sender(identity.user, *acts, author=identity.person, deed="changed")
    return sender, choose_person(thread, sender, owners_are_people=runs.owners_are_people)


def build_checkpoint_config(
    thread_id: str, checkpoint: Mapping[str, Any] | None = None
) -> RunnableConfig:
    """The config of a checkpoint as clients name one; whatever thread it names, of this thread."""
    asked = checkpoint or {}
    given = {name: asked[name] for name in CheckpointRef.model_fields if asked.get(name)}
    return {"configurable": {"checkpoint_ns": "", **given, "thread_id": thread_id}}


async def get_checkpoint(call: Call, config: RunnableConfig) -> CheckpointTuple | None:
    """The checkpoint at a config; None: the thread has none.

    Raises:
        UnknownCheckpoint: The config names one that does not exist.
    """
    asked, found = config["configurable"], await call.saver.aget_tuple(config)
    if found is None and "checkpoint_id" in asked:
        raise UnknownCheckpoint(
            f"thread {asked['thread_id']!r} has no checkpoint {asked['checkpoint_id']!r}"
        )
    return found


def _build_update_config(
    thread: ListedThread, config: RunnableConfig, about: Mapping[str, Any]
) -> RunnableConfig:
    """Build the config for a new checkpoint, with the metadata and the person of the thread.

    The caller becomes the person only if the thread has none. The user `""` means that the thread
    belongs to nobody.
    """
    left_out = ("user_id", CALLER, DEED)  # of the head
    known = {name: value for name, value in thread.metadata.items() if name not in left_out}
    known.setdefault("assistant_id", default_assistant_id(known["graph_id"]))
    user = {"user_id": about["user_id"]}
    return {"configurable": {**config["configurable"], **user}, "metadata": {**known, **about}}


# -- states as clients know them


def build_state_json(found: StateSnapshot) -> dict[str, Any]:
    """Return a state as clients know it. If the thread has no state, the checkpoint is None."""
    checkpoint_id = found.config["configurable"].get("checkpoint_id")
    return {
        "values": found.values,
        "next": list(found.next),
        "tasks": [_build_task_json(each) for each in found.tasks],
        "metadata": found.metadata,
        "created_at": found.created_at,
        "checkpoint": build_checkpoint_ref(found.config) if checkpoint_id else None,
        "parent_checkpoint": build_checkpoint_ref(found.parent_config),
        "interrupts": [build_interrupt(each) for each in found.interrupts],
        "checkpoint_id": checkpoint_id,
    }


def build_checkpoint_ref(config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A config as clients name a checkpoint."""
    if config is None:
        return None
    known = config["configurable"]
    return {"checkpoint_ns": "", **{n: known[n] for n in CheckpointRef.model_fields if n in known}}


def _select_fields(found: dict[str, Any], select: list[str] | None) -> dict[str, Any]:
    """Those fields of a state that are named; `values.messages` is one of its values."""
    if not select:
        return found
    chosen = {name: found[name] for name in select if name in found}
    names = [name.removeprefix("values.") for name in select if name.startswith("values.")]
    if names and "values" not in chosen and isinstance(found["values"], Mapping):
        chosen["values"] = {name: found["values"].get(name) for name in names}
    return chosen


def select_public_values(channels: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a state, of the channels that are not langgraph's own."""
    return {
        name: value
        for name, value in channels.items()
        if not name.startswith("__") and ":" not in name
    }


async def _read_unserved_state(
    call: Call, found: CheckpointTuple | None, config: RunnableConfig
) -> StateSnapshot:
    """What a checkpoint tells of a state whose graph is not served.

    As langgraph does, it tells of the newest what is left to be done, of another what was.
    """
    if found is None:
        return StateSnapshot({}, (), config, None, None, None, (), ())
    at = found.config["configurable"]
    status = await call.saver.astatus(
        at["thread_id"], checkpoint_ns=at["checkpoint_ns"], checkpoint_id=at["checkpoint_id"]
    )
    is_past = "checkpoint_id" in config["configurable"]
    tasks = tuple(
        PregelTask(
            task.id or "",
            task.node,
            task.path,
            task.error,  # type: ignore[arg-type]  # as text, as savers store it
            task.interrupts if is_past or not task.done else (),
        )
        for task in status.tasks
    )
    return StateSnapshot(
        values=select_public_values(await arun(read_channel_values(call.saver, found))),
        next=tuple(task.node for task in status.tasks) if is_past else status.next,
        config=found.config,
        metadata=found.metadata,
        created_at=found.checkpoint["ts"],
        parent_config=found.parent_config,
        tasks=tasks,
        interrupts=tuple(one for task in tasks for one in task.interrupts),
    )


def _build_task_json(task: Any) -> dict[str, Any]:
    nested = task.state
    return {
        "id": task.id,
        "name": task.name,
        "path": task.path,
        "error": None if task.error is None else str(task.error),
        "interrupts": [build_interrupt(each) for each in task.interrupts],
        "checkpoint": None if isinstance(nested, StateSnapshot) else build_checkpoint_ref(nested),
        "state": build_state_json(nested) if isinstance(nested, StateSnapshot) else None,
        "result": task.result,
    }
