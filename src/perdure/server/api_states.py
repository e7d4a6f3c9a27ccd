"""Serve the HTTP endpoints that read and update the states of threads for langgraph's clients."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final, TypeVar

from fastapi import APIRouter, Query
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.types import PregelTask, StateSnapshot, StateUpdate
from langgraph_sdk.runtime import AccessContext
from pydantic import BaseModel, BeforeValidator, Field
from starlette.responses import Response

from perdure.checkpointers.labels import CALLER, CALLER_ACTION, TURN_WITHOUT_MEMORY
from perdure.effects import arun_operation
from perdure.errors import (
    ConfigurationError,
    InvalidUpdate,
    PerdureError,
    StorageError,
    UnknownCheckpoint,
)
from perdure.memory.thread_messages import read_channel_values
from perdure.run_tables.thread_list import ListedThread
from perdure.server.graphs import Graph, default_assistant_id
from perdure.server.http.access import Forbidden, set_required_action
from perdure.server.http.call import Call, CurrentCall, PathId
from perdure.server.http.reply import JSONObject, JSONReply, build_json_reply
from perdure.server.runs.changes_by_other_users import (
    does_run_continue_changes_by_other_users,
    have_other_users_changed_turn,
)
from perdure.server.runs.run_manager import RunManager, ServerRuns
from perdure.server.runs.run_request import (
    CheckpointRef,
    CommandFields,
    get_checkpoint_ids_by_namespace,
    parse_repeated_or_json_array_parameter,
)
from perdure.server.thread_person import (
    Person,
    Sender,
    choose_graph_and_assistant_metadata,
    choose_person_of_run,
)
from perdure.server.threads import format_interrupt_for_api
from perdure.settings import LIST_LIMIT, SEARCH_LIMIT

T = TypeVar("T")
routes = APIRouter(tags=["threads"], default_response_class=JSONReply)
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

    A node update contains either values for the state or a langgraph command.
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
    """A list of state updates that are applied together in a single superstep of the graph."""

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
    return await get_state_at(
        call,
        runs,
        thread_id,
        StateQuery(checkpoint={"checkpoint_id": checkpoint_id}, subgraphs=subgraphs, select=select),
    )


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
    state = await _read_with_graph_if_possible(
        runs, call, thread, lambda graph: graph.aget_state(config, subgraphs=body.subgraphs)
    )
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
    options: JSONObject = {
        "limit": body.limit,
        "filter": body.metadata,
        "before": build_checkpoint_config(thread_id, before) if before else None,
    }

    async def read_history(graph: Graph) -> list[StateSnapshot]:
        return [state async for state in graph.aget_state_history(config, **options)]

    states = await _read_with_graph_if_possible(runs, call, thread, read_history)
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

    The first page contains the items that were stored most recently. The history of a channel
    includes items that have since been removed from the thread's state. To get the previous page,
    pass the `position` of the current page's first item as `before`.
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
    return await build_json_reply(
        [
            {
                name: getattr(item, name)
                for name in ("position", "seen", "branch", "stored_at", "value")
            }
            for item in history
        ]
    )


async def update_thread_state(
    call: Call,
    runs: RunManager,
    thread: ListedThread,
    config: RunnableConfig,
    supersteps: Sequence[Superstep],
) -> RunnableConfig:
    """Apply updates to a thread's state, and return the config that identifies the new checkpoint.

    The status of the thread becomes `interrupted` if its graph has next steps, otherwise `idle`.

    Args:
        call: The call of the client.
        runs: The run manager of the server.
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
        await get_checkpoint(call, config)  # Raises UnknownCheckpoint if no checkpoint matches.
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
        sender, person = _find_sender_of_update_and_person_of_thread(runs, call, thread)
        person_metadata = person.build_checkpoint_metadata(sender)
        sent_values = [update.values for step in steps for update in step]
        # Treat an update of a thread that belongs to nobody as a change by another user. The thread
        # could be rewound to an older checkpoint whose metadata names a person as the thread's
        # user.
        is_changed_by_other_users = not (
            person.user and person.is_sender_trusted
        ) or await does_run_continue_changes_by_other_users(
            call.saver, thread, get_checkpoint_ids_by_namespace(config["configurable"])
        )
        marker = person.build_other_author_marker(
            sender,
            thread_id,
            sent_values,
            was_changed_by_other_users=thread.changes_by_other_users != "none",
            # An update for the node `__copy__` stores a checkpoint without the config's metadata.
            is_turn_without_memory=is_changed_by_other_users,
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
        if is_changed_by_other_users:
            await call.threads.record_changes_by_other_users(thread_id, "since_last_message")
        has_changed_state = False
        for step in steps:
            # Call `abulk_update_state` separately for each superstep, because langgraph adds the
            # config's metadata only to the first checkpoint that a call creates.
            config = _build_config_for_new_checkpoint(thread, config, person_metadata)
            try:
                with marker.mark_messages_during_block():
                    config = await graph.abulk_update_state(config, [step])
            except Exception as exc:
                if (
                    is_changed_by_other_users
                    and not has_changed_state
                    and not isinstance(exc, StorageError)
                ):
                    await call.threads.record_changes_by_other_users(
                        thread_id, thread.changes_by_other_users
                    )
                if isinstance(exc, PerdureError):
                    raise
                # A channel's reducer may raise any exception if it cannot apply the values.
                raise InvalidUpdate(
                    f"the update cannot be applied: {type(exc).__name__}: {exc!s:.300}"
                ) from exc
            has_changed_state = True
        # An update of a subgraph's checkpoint does not change the newest turn of the thread.
        is_head_new = not config["configurable"].get("checkpoint_ns")
        if (
            is_head_new
            and not is_changed_by_other_users
            and thread.changes_by_other_users != "none"
        ):
            await call.threads.record_changes_by_other_users(thread_id, "earlier")
        next_nodes = (await call.saver.astatus(thread_id)).next
        await call.threads.set_run_status(thread_id, "interrupted" if next_nodes else "idle")
    return config


async def is_caller_trusted_as_thread_person(runs: RunManager, call: Call, thread_id: str) -> bool:
    """Return whether the caller's changes count as changes by the thread's user.

    The thread's user is the person to whom the thread belongs.

    See `Person.is_sender_trusted`. If the thread currently belongs to no user, return False,
    because the thread's older checkpoints may belong to a user.
    """
    _, person = _find_sender_of_update_and_person_of_thread(
        runs, call, await call.threads.get_row(thread_id)
    )
    return bool(person.user) and person.is_sender_trusted


async def validate_change_of_thread_metadata(
    runs: RunManager, call: Call, thread_id: str, metadata: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Check the metadata that a caller wants to add to a thread, and return the metadata to add.

    An untrusted caller can neither change a thread's `graph_id` nor choose its `assistant_id`; see
    `choose_graph_and_assistant_metadata`. A caller is untrusted if `Person.is_sender_trusted` is
    False. If an untrusted caller sends a `graph_id` or an `assistant_id` that the thread already
    has, the returned metadata omits the unchanged field. Because the field is omitted, later runs
    that the thread's user starts can still change the field.

    Raises:
        Forbidden: `metadata` contains such a change.
        UnknownThread: The thread does not exist, or the caller has no access to it.
    """
    if not metadata.keys() & {"graph_id", "assistant_id"}:
        return metadata
    thread = await call.threads.get_permitted_row(thread_id)
    if thread.head_metadata is None:
        return call.remove_assistant_before_first_run(metadata)
    _, person = _find_sender_of_update_and_person_of_thread(runs, call, thread)
    if person.is_sender_trusted:
        return metadata
    graph_id = thread.metadata.get("graph_id", metadata.get("graph_id"))
    allowed: dict[str, Any] = {"graph_id": graph_id, "assistant_id": None}
    if isinstance(graph_id, str):
        allowed = choose_graph_and_assistant_metadata(thread, person, graph_id, "")
    for name, value in allowed.items():
        if name in metadata and metadata[name] != value:
            raise Forbidden(
                f"{name!r} in the metadata of the thread {thread_id!r} cannot be changed to "
                f"{metadata[name]!r:.80}, because the thread belongs to another user; remove "
                f"{name!r} from the request, or let this user or a caller who may act for this "
                "user change it"
            )
    fixed = {"assistant_id", *(thread.metadata.keys() & {"graph_id"})}
    return {name: value for name, value in metadata.items() if name not in fixed}


@asynccontextmanager
async def record_other_users_changes_during_rewind(
    runs: RunManager, call: Call, thread_id: str, checkpoint_id: str
) -> AsyncIterator[None]:
    """Record whether the state to which a thread is rewound contains changes by other users.

    If the caller is not trusted (see `Person.is_sender_trusted`), the rewind is recorded as a
    change by a user other than the person to whom the thread belongs. If the thread currently
    belongs to no user, every rewind is recorded as a change by another user. The rewind could
    restore an older checkpoint whose metadata names a user, so that the thread belongs to this user
    again.

    The `with` block rewinds the thread. The caller holds the thread's lock.
    """
    thread = await call.threads.get_permitted_row(thread_id)
    _, person = _find_sender_of_update_and_person_of_thread(runs, call, thread)
    threads = call.threads
    if not (person.user and person.is_sender_trusted) or (
        thread.changes_by_other_users != "none"
        and await have_other_users_changed_turn(call.saver, thread_id, checkpoint_id)
    ):
        await threads.record_changes_by_other_users(thread_id, "since_last_message")
        try:
            yield
        except UnknownCheckpoint:
            await threads.record_changes_by_other_users(thread_id, thread.changes_by_other_users)
            raise
        return
    yield
    if thread.changes_by_other_users != "none":
        # After the rewind, the thread's newest turn contains no changes by other users, but earlier
        # turns may contain them.
        await threads.record_changes_by_other_users(thread_id, "earlier")


# -- graphs and checkpoints


@asynccontextmanager
async def _open_graph_of_thread(
    runs: RunManager, call: Call, thread: ListedThread
) -> AsyncIterator[Any]:
    """Yield the thread's compiled graph, or None if this server does not serve the graph."""
    name, graphs = thread.metadata.get("graph_id", ""), runs.graphs
    if name not in graphs:
        yield None
        return
    person = call.threads.find_person_of_thread(thread)
    graph_args = (
        name,
        call.saver,
        call.store,
        RunnableConfig(
            configurable={
                "thread_id": thread.thread_id,
                "user_id": call.identity.person if person is None else person,
            }
        ),
    )
    access: AccessContext = "threads.update" if call.action == "threads:update" else "threads.read"
    async with graphs.open_graph(*graph_args, access=access, user=call.identity.raw_user) as graph:
        yield graph


async def _read_with_graph_if_possible(
    runs: RunManager, call: Call, thread: ListedThread, read: Callable[[Graph], Awaitable[T]]
) -> T | None:
    """Open the thread's graph, call `read` with the graph, and return the result of `read`.

    `read` is a function that uses the graph to read states of the thread.

    Return None if this server does not serve the graph, or if a reducer of the graph raises an
    error. The caller then reads the states without the graph. A reducer can raise an error for
    stored values, because langgraph stores the input and each node's results before it applies them
    to the state. If a reducer cannot apply a stored value, the run fails. langgraph then raises the
    same error each time the state is read, until the thread receives new input.
    """
    async with _open_graph_of_thread(runs, call, thread) as graph:
        try:
            return None if graph is None else await read(graph)
        except PerdureError:
            raise
        except Exception as exc:  # A user-defined reducer can raise any exception.
            # Log only the type of the error, because its text may contain the user's content.
            _LOGGER.warning(
                "a state is shown without its pending writes, because they cannot be applied (%s)",
                type(exc).__name__,
            )
    return None


def _find_sender_of_update_and_person_of_thread(
    runs: RunManager, call: Call, thread: ListedThread
) -> tuple[Sender, Person]:
    """Return the user who sent an update and the person to whom the thread belongs.

    The person to whom a thread belongs is the user whose memories the thread's runs read and write.
    Memories are extracted from an update's messages only if the sender is the person to whom the
    thread belongs, or may act on that person's behalf.
    """
    identity = call.identity
    sender = Sender(
        identity.user,
        identity.acting_for,
        identity.may_act_for_others,
        author=identity.person,
        deed="changed",
    )
    return sender, choose_person_of_run(
        thread, sender, owners_are_people=runs.shared_state.owners_are_people
    )


def build_checkpoint_config(
    thread_id: str, checkpoint: Mapping[str, Any] | None = None
) -> RunnableConfig:
    """Build the config for the checkpoint that a client requests.

    The returned config always contains the thread id `thread_id`, even if the checkpoint sent by
    the client contains a different thread id.
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
    # Exclude the metadata fields whose values apply only to the thread's current head. These values
    # must not be copied to the new checkpoint.
    excluded = ("user_id", CALLER, CALLER_ACTION, TURN_WITHOUT_MEMORY)
    metadata = {name: value for name, value in thread.metadata.items() if name not in excluded}
    metadata.setdefault("assistant_id", default_assistant_id(metadata["graph_id"]))
    return {
        "configurable": {**config["configurable"], "user_id": person_metadata["user_id"]},
        "metadata": {**metadata, **person_metadata},
    }


# -- states in the form of langgraph's API


def build_state_json(state: StateSnapshot) -> dict[str, Any]:
    """Return a thread state in the format of LangGraph's API.

    If the thread has no state, the field `checkpoint` of the returned JSON object is None.
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

    For example, the name `values.messages` selects only the channel `messages` of the state's
    values.
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
    apply a stored value. As in LangGraph, if `config` requests the latest checkpoint, the field
    `next` lists only unfinished tasks. If `config` specifies a checkpoint, `next` lists all of the
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
