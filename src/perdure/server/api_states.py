"""Serve the HTTP endpoints that read and update the states of threads for langgraph's clients."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.types import PregelTask, StateSnapshot, StateUpdate
from langgraph_sdk.runtime import AccessContext
from pydantic import BaseModel, BeforeValidator, Field
from starlette.responses import Response

from perdure.checkpointers.labels import CALLER, CALLER_ACTION, TURN_WITHOUT_MEMORY
from perdure.checkpointers.thread_list import ListedThread
from perdure.effects import arun_operation
from perdure.errors import ConfigurationError, InvalidUpdate, PerdureError, UnknownCheckpoint
from perdure.memory.thread_messages import read_channel_values
from perdure.server.access import set_required_action
from perdure.server.call import Call, CurrentCall, PathId
from perdure.server.graphs import default_assistant_id
from perdure.server.message_authors import mark_checkpoint_as_changed_by_other_users
from perdure.server.person import Person, Sender, choose_person_of_run
from perdure.server.reply import JSONObject, build_json_reply
from perdure.server.run_request import (
    CheckpointRef,
    CommandFields,
    parse_repeated_or_json_array_parameter,
)
from perdure.server.runs import Runs, ServerRuns
from perdure.server.threads import format_interrupt_for_api
from perdure.settings import LIST_LIMIT, SEARCH_LIMIT

routes = APIRouter(tags=["threads"])
_LOGGER: Final = logging.getLogger(__name__)


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
    """A state update that is applied as if a node had returned it.

    The update consists of either values or a command.
    """

    values: JSONObject | list[JSONObject] | None = None
    command: CommandFields | None = None
    as_node: str | None = None

    def to_state_update(self) -> StateUpdate:
        """Convert this update to langgraph's `StateUpdate`."""
        is_command = self.command is not None and not self.command.is_empty
        values: Any = (
            self.command.to_langgraph_command() if self.command and is_command else self.values
        )
        return StateUpdate(values, self.as_node)


class Superstep(BaseModel):
    """A list of state updates that are applied together in one step of the graph."""

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
@set_required_action("threads:read")
async def get_state(
    call: CurrentCall,
    runs: ServerRuns,
    thread_id: PathId,
    checkpoint_id: PathId = "",
    subgraphs: bool = False,
    select: Annotated[
        list[str] | None, Query(), BeforeValidator(parse_repeated_or_json_array_parameter)
    ] = None,
) -> Response:
    """Return a thread's latest state, or its state at the given checkpoint."""
    checkpoint = {"checkpoint_id": checkpoint_id}
    body = StateQuery(checkpoint=checkpoint, subgraphs=subgraphs, select=select)
    return await get_state_at(call, runs, thread_id, body)


@routes.post("/threads/{thread_id}/state/checkpoint")
@set_required_action("threads:read")
async def get_state_at(
    call: CurrentCall, runs: ServerRuns, thread_id: PathId, body: StateQuery
) -> Response:
    """Return the state at a checkpoint of a thread's graph or of one of its subgraphs."""
    thread, config = (
        await call.permit_thread_row(thread_id),
        build_checkpoint_config(thread_id, body.checkpoint),
    )
    await call.require_model_view_access(thread_id, config["configurable"]["checkpoint_ns"])
    checkpoint = await get_checkpoint(call, config)
    async with _open_graph_of_thread(runs, call, thread) as graph:
        state = None
        if graph is not None:
            with _log_and_suppress_reducer_errors():
                state = await graph.aget_state(config, subgraphs=body.subgraphs)
        if state is None:
            state = await _read_state_without_graph(call, checkpoint, config)
    return await build_json_reply(_select_state_fields(build_state_json(state), body.select))


@routes.post("/threads/{thread_id}/state")
@set_required_action("threads:update")
async def update_state(
    call: CurrentCall, runs: ServerRuns, thread_id: PathId, body: StateChange
) -> JSONObject:
    """Update a thread's state with the values in the request, as if a node had returned them.

    If the request specifies an older checkpoint, the update is applied to the state at that
    checkpoint. After the update, the thread continues from the new checkpoint.
    """
    thread = await call.permit_thread_row(thread_id)
    config = build_checkpoint_config(
        thread_id, body.checkpoint or {"checkpoint_id": body.checkpoint_id}
    )
    step = Superstep(updates=[NodeUpdate(values=body.values, as_node=body.as_node)])
    new_checkpoint = build_checkpoint_ref(
        await update_thread_state(call, runs, thread, config, [step])
    )
    return {
        "checkpoint": new_checkpoint,
        "configurable": new_checkpoint,
        "checkpoint_id": new_checkpoint and new_checkpoint["checkpoint_id"],
    }


@routes.get("/threads/{thread_id}/history")
@set_required_action("threads:read")
async def list_history(
    call: CurrentCall,
    runs: ServerRuns,
    thread_id: PathId,
    limit: Annotated[int, Query(ge=1, le=1000)] = SEARCH_LIMIT,
    before: str | None = None,
) -> Response:
    """List the states of a thread, newest first."""
    return await search_history(call, runs, thread_id, HistoryQuery(limit=limit, before=before))


@routes.post("/threads/{thread_id}/history")
@set_required_action("threads:read")
async def search_history(
    call: CurrentCall, runs: ServerRuns, thread_id: PathId, body: HistoryQuery
) -> Response:
    """List the states of a thread that match the filters in the request, newest first."""
    thread, config = (
        await call.permit_thread_row(thread_id),
        build_checkpoint_config(thread_id, body.checkpoint),
    )
    await call.require_model_view_access(thread_id, config["configurable"]["checkpoint_ns"])
    before = {"checkpoint_id": body.before} if isinstance(body.before, str) else body.before
    options: JSONObject = {"limit": body.limit, "filter": body.metadata}
    options["before"] = build_checkpoint_config(thread_id, before) if before else None
    async with _open_graph_of_thread(runs, call, thread) as graph:
        states = None
        if graph is not None:
            with _log_and_suppress_reducer_errors():
                states = [state async for state in graph.aget_state_history(config, **options)]
        if states is None:
            states = [
                await _read_state_without_graph(call, state, state.config)
                async for state in call.saver.alist(config, **options)
            ]
    return await build_json_reply(
        [_select_state_fields(build_state_json(state), body.select) for state in states]
    )


@routes.get("/threads/{thread_id}/items")
@set_required_action("threads:read")
async def list_items(
    call: CurrentCall,
    thread_id: PathId,
    channel: str = "messages",
    checkpoint_ns: str = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = LIST_LIMIT,
    before: Annotated[int | None, Query(ge=0, le=1 << 60)] = None,
) -> Response:
    """List one page of the history of a channel, in chronological order.

    The first page contains the items that were stored most recently. The history includes items
    that have since been removed from the state. To get the page of earlier items, pass the
    `position` of the first item on this page as `before`.
    """
    await call.permit_thread(thread_id)
    await call.require_model_view_access(thread_id, checkpoint_ns)
    history = await call.saver.ahistory(
        thread_id,
        channel=channel,
        checkpoint_ns=checkpoint_ns,
        ends=(0, limit),
        before=before,
        missing_ok=True,
    )
    names = ("position", "seen", "branch", "stored_at", "value")
    return await build_json_reply(
        [{name: getattr(item, name) for name in names} for item in history]
    )


async def update_thread_state(
    call: Call,
    runs: Runs,
    thread: ListedThread,
    config: RunnableConfig,
    supersteps: Sequence[Superstep],
) -> RunnableConfig:
    """Apply updates to a thread's state, and return the config that identifies the new checkpoint.

    The status of the thread becomes `interrupted` if its graph has next steps, otherwise `idle`.

    Args:
        call: The call of the client.
        runs: The runs of the server.
        thread: The thread.
        config: The checkpoint to start from.
        supersteps: The updates, one step after the other.

    Raises:
        ConfigurationError: The graph of the thread is not served.
        InvalidUpdate: A channel of the graph does not accept the values.
        AlreadyLocked: A run of the thread is under way.
    """
    thread_id = thread.thread_id
    steps = [[update.to_state_update() for update in step.updates] for step in supersteps]
    async with (
        _open_graph_of_thread(runs, call, thread) as graph,
        call.threads.lock_for_change(thread_id),
    ):
        # Read the thread again. This raises UnknownThread if the thread has been deleted.
        thread = await call.threads.get_permitted_row(thread_id)
        base_checkpoint = await get_checkpoint(call, config)
        if graph is None:
            name = thread.metadata.get("graph_id")
            fault = (
                "names no graph"
                if name is None
                else f"names the graph {name!r}, which is not served"
            )
            raise ConfigurationError(
                f"the state of thread {thread_id!r} cannot be updated, because its metadata "
                f"{fault}; set graph_id in the metadata to a graph that is served"
            )
        sender, person = _build_update_sender_and_choose_thread_person(runs, call, thread)
        person_metadata = person.build_checkpoint_metadata(sender)
        sent_values = [update.values for step in steps for update in step]
        marker = person.build_other_author_marker(
            sender,
            thread_id,
            sent_values,
            continues_turn=True,
            start_checkpoint_id=None,
            is_state_update=True,
        )
        steps = [
            [
                update._replace(
                    values=person.exclude_input_from_extraction_if_memory_is_off(update.values)
                )
                for update in step
            ]
            for step in steps
        ]
        checkpoint_ns = config["configurable"].get("checkpoint_ns")
        if (
            checkpoint_ns
            and not person.is_sender_trusted
            and await _has_subgraph(graph, checkpoint_ns)
        ):
            # A later run continues from one of two checkpoints in the root namespace, either from
            # the head or from the parent of the subgraph's checkpoint. Mark both checkpoints.
            parents: Mapping[str, str] = (base_checkpoint.metadata if base_checkpoint else {}).get(
                "parents", {}
            )
            for checkpoint_id in {None, parents.get("")}:
                await mark_checkpoint_as_changed_by_other_users(
                    call.saver, thread_id, checkpoint_id, is_turn_without_memory=True
                )
        for step in steps:
            # Call `abulk_update_state` separately for each superstep, because langgraph adds the
            # config's metadata only to the first checkpoint that a call creates.
            config = _build_config_for_new_checkpoint(thread, config, person_metadata)
            try:
                with marker.mark_messages_during_block():
                    config = await graph.abulk_update_state(config, [step])
            except PerdureError:
                raise
            except Exception as exc:
                # A channel's reducer may raise any exception if it cannot apply the values.
                message = f"{type(exc).__name__}: {exc!s:.300}"
                raise InvalidUpdate(f"the update cannot be applied: {message}") from exc
        next_nodes = (await call.saver.astatus(thread_id)).next
        await call.threads.set_run_status(thread_id, "interrupted" if next_nodes else "idle")
    return config


async def mark_head_if_chosen_by_other_user(runs: Runs, call: Call, thread_id: str) -> None:
    """Record at a thread's head that a user other than the thread's person has changed the thread.

    Nothing is recorded if the caller's changes count as changes by the person; see
    `Person.is_sender_trusted`.

    Call this function after the caller has made an older checkpoint the head. The thread's lock
    must be held.
    """
    thread = await call.threads.get_permitted_row(thread_id)
    _, person = _build_update_sender_and_choose_thread_person(runs, call, thread)
    if not person.is_sender_trusted:
        await mark_checkpoint_as_changed_by_other_users(
            call.saver, thread_id, is_turn_without_memory=True
        )


# -- graphs and checkpoints


async def _has_subgraph(graph: Any, checkpoint_ns: str) -> bool:
    """Return whether a graph contains the subgraph that stores its checkpoints in a namespace."""
    # A checkpoint namespace such as "agent:5f3c|tools:9a1b" consists of node names and task ids.
    nodes = "|".join(
        part.partition(":")[0] for part in checkpoint_ns.split("|") if not part.isdigit()
    )
    return any([True async for _ in graph.aget_subgraphs(namespace=nodes, recurse=True)])


@asynccontextmanager
async def _open_graph_of_thread(runs: Runs, call: Call, thread: ListedThread) -> AsyncIterator[Any]:
    """Yield the thread's compiled graph, or None if this server does not serve the graph."""
    name, graphs = thread.metadata.get("graph_id", ""), runs.graphs
    if name not in graphs:
        yield None
        return
    person = call.threads.find_person_of_thread(thread)
    person_id = call.identity.person if person is None else person
    configurable = {"thread_id": thread.thread_id, "user_id": person_id}
    graph_args = name, call.saver, call.store, RunnableConfig(configurable=configurable)
    access: AccessContext = "threads.update" if call.action == "threads:update" else "threads.read"
    async with graphs.open_graph(*graph_args, access=access, user=call.identity.raw_user) as graph:
        yield graph


@contextmanager
def _log_and_suppress_reducer_errors() -> Iterator[None]:
    """Log and suppress an error that a reducer raises, so that the state can still be read.

    langgraph stores the input and each node's results before it applies them to the state. If a
    reducer cannot apply a stored value, the run fails. Until the thread receives new input,
    langgraph then raises the same error each time the state is read.
    """
    try:
        yield
    except PerdureError:
        raise
    except Exception as exc:  # A user-defined reducer can raise any exception.
        # Log only the type of the error, because its text may contain the user's content.
        _LOGGER.warning(
            "a state is shown without its pending writes, because they cannot be applied (%s)",
            type(exc).__name__,
        )


def _build_update_sender_and_choose_thread_person(
    runs: Runs, call: Call, thread: ListedThread
) -> tuple[Sender, Person]:
    """Return the user who sent an update and the person to whom the thread belongs.

    The person is the user whose memories the thread's runs use. If the sender is neither the person
    nor permitted to act on the person's behalf, the sender's messages are added to the thread, but
    no memories are extracted from them.
    """
    identity = call.identity
    acting = identity.acting_for, identity.may_act_for_others
    sender = Sender(identity.user, *acting, author=identity.person, deed="changed")
    return sender, choose_person_of_run(thread, sender, owners_are_people=runs.owners_are_people)


def build_checkpoint_config(
    thread_id: str, checkpoint: Mapping[str, Any] | None = None
) -> RunnableConfig:
    """Build the config for the checkpoint that a client requests.

    The config always contains the given thread id, even if the checkpoint sent by the client
    contains a different one.
    """
    requested = checkpoint or {}
    fields = {name: requested[name] for name in CheckpointRef.model_fields if requested.get(name)}
    return {"configurable": {"checkpoint_ns": "", **fields, "thread_id": thread_id}}


async def get_checkpoint(call: Call, config: RunnableConfig) -> CheckpointTuple | None:
    """Return the checkpoint that a config refers to, or None if the thread has no checkpoints.

    Raises:
        UnknownCheckpoint: The config names a checkpoint that does not exist.
    """
    configurable, checkpoint = config["configurable"], await call.saver.aget_tuple(config)
    if checkpoint is None and "checkpoint_id" in configurable:
        raise UnknownCheckpoint(
            f"thread {configurable['thread_id']!r} has no checkpoint "
            f"{configurable['checkpoint_id']!r}"
        )
    return checkpoint


def _build_config_for_new_checkpoint(
    thread: ListedThread, config: RunnableConfig, person_metadata: Mapping[str, Any]
) -> RunnableConfig:
    """Build the config for a new checkpoint of a thread.

    The new checkpoint's metadata is the thread's metadata plus `person_metadata`. The `user_id` in
    `person_metadata` identifies the person the thread belongs to. If `user_id` is empty, the thread
    does not belong to anyone.
    """
    # Do not copy these metadata fields to the new checkpoint, because their values apply only to
    # the thread's current head checkpoint.
    excluded = ("user_id", CALLER, CALLER_ACTION, TURN_WITHOUT_MEMORY)
    metadata = {name: value for name, value in thread.metadata.items() if name not in excluded}
    metadata.setdefault("assistant_id", default_assistant_id(metadata["graph_id"]))
    user = {"user_id": person_metadata["user_id"]}
    return {
        "configurable": {**config["configurable"], **user},
        "metadata": {**metadata, **person_metadata},
    }


# -- states in the form of langgraph's API


def build_state_json(state: StateSnapshot) -> dict[str, Any]:
    """Return a thread state in the format of LangGraph's API.

    If the thread has no state, `checkpoint` is None.
    """
    checkpoint_id = state.config["configurable"].get("checkpoint_id")
    return {
        "values": state.values,
        "next": list(state.next),
        "tasks": [_build_task_json(task) for task in state.tasks],
        "metadata": state.metadata,
        "created_at": state.created_at,
        "checkpoint": build_checkpoint_ref(state.config) if checkpoint_id else None,
        "parent_checkpoint": build_checkpoint_ref(state.parent_config),
        "interrupts": [format_interrupt_for_api(task) for task in state.interrupts],
        "checkpoint_id": checkpoint_id,
    }


def build_checkpoint_ref(config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the checkpoint ids in a config, in the format that clients send and receive."""
    if config is None:
        return None
    configurable = config["configurable"]
    return {
        "checkpoint_ns": "",
        **{n: configurable[n] for n in CheckpointRef.model_fields if n in configurable},
    }


def _select_state_fields(state: dict[str, Any], select: list[str] | None) -> dict[str, Any]:
    """Return only the fields of a state that are listed in `select`.

    For example, `values.messages` selects the channel `messages`.
    """
    if not select:
        return state
    selected = {name: state[name] for name in select if name in state}
    names = [name.removeprefix("values.") for name in select if name.startswith("values.")]
    if names and "values" not in selected and isinstance(state["values"], Mapping):
        selected["values"] = {name: state["values"].get(name) for name in names}
    return selected


def exclude_internal_channels(channels: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all channels except langgraph's internal channels."""
    return {
        name: value
        for name, value in channels.items()
        if not name.startswith("__") and ":" not in name
    }


async def _read_state_without_graph(
    call: Call, checkpoint: CheckpointTuple | None, config: RunnableConfig
) -> StateSnapshot:
    """Build a checkpoint's `StateSnapshot` when the thread's graph is not available.

    The graph is not available if this server does not serve it, or if one of its reducers cannot
    apply a stored value. As in LangGraph, the field `next` lists only unfinished tasks if `config`
    requests the latest checkpoint. If `config` specifies a checkpoint, `next` lists all of the
    checkpoint's tasks, including completed ones.
    """
    if checkpoint is None:
        return StateSnapshot({}, (), config, None, None, None, (), ())
    configurable = checkpoint.config["configurable"]
    status = await call.saver.astatus(
        configurable["thread_id"],
        checkpoint_ns=configurable["checkpoint_ns"],
        checkpoint_id=configurable["checkpoint_id"],
    )
    names_checkpoint = "checkpoint_id" in config["configurable"]
    tasks = tuple(
        PregelTask(
            task.id or "",
            task.node,
            task.path,
            task.error,  # type: ignore[arg-type]  # a text, as savers store errors
            task.interrupts if names_checkpoint or not task.done else (),
        )
        for task in status.tasks
    )
    return StateSnapshot(
        values=exclude_internal_channels(
            await arun_operation(read_channel_values(call.saver, checkpoint))
        ),
        next=tuple(task.node for task in status.tasks) if names_checkpoint else status.next,
        config=checkpoint.config,
        metadata=checkpoint.metadata,
        created_at=checkpoint.checkpoint["ts"],
        parent_config=checkpoint.parent_config,
        tasks=tasks,
        interrupts=tuple(interrupt for task in tasks for interrupt in task.interrupts),
    )


def _build_task_json(task: Any) -> dict[str, Any]:
    """Convert a task of a `StateSnapshot` to the JSON that langgraph's API returns."""
    nested = task.state
    return {
        "id": task.id,
        "name": task.name,
        "path": task.path,
        "error": None if task.error is None else str(task.error),
        "interrupts": [format_interrupt_for_api(interrupt) for interrupt in task.interrupts],
        "checkpoint": None if isinstance(nested, StateSnapshot) else build_checkpoint_ref(nested),
        "state": build_state_json(nested) if isinstance(nested, StateSnapshot) else None,
        "result": task.result,
    }
