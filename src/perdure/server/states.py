"""States of threads in the form that langgraph's clients know."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.types import StateSnapshot
from starlette.requests import Request

from perdure.errors import ConfigurationError, UnknownCheckpoint
from perdure.server.call import Call
from perdure.server.threads import Thread, values_of

_INTERRUPT: Final = "__interrupt__"


@asynccontextmanager
async def graph_of(request: Request, call: Call, thread: Thread) -> AsyncIterator[Any]:
    """The compiled graph that a thread belongs to; None: it is not served."""
    known, graphs = thread["metadata"], getattr(request.app.state, "graphs", None)
    name = known.get("graph_id")
    config = {"configurable": {"thread_id": thread["thread_id"], "user_id": call.identity.user}}
    async with AsyncExitStack() as stack:
        graph = None
        if graphs is not None and name in [*graphs]:
            parts = (name, call.saver, call.store, config)
            what = "threads.update" if call.action == "threads:update" else "threads.read"
            opened = graphs.opened(*parts, access=what, user=call.identity.raw)
            graph = await stack.enter_async_context(opened)
        yield graph


def served(graph: Any, thread: Thread) -> Any:
    """The graph of a thread that is to be updated.

    Raises:
        ConfigurationError: There is none.
    """
    if graph is None:
        name = thread["metadata"].get("graph_id")
        raise ConfigurationError(
            f"the thread {thread['thread_id']!r} belongs to the graph {name!r}, which is not "
            "served, so its state cannot be updated; name one that is, as graph_id in its metadata"
        )
    return graph


def config_of(thread_id: str, checkpoint: Mapping[str, Any] | None = None) -> RunnableConfig:
    """The config of a checkpoint as clients name one; whatever thread it names, of this thread.

    Raises:
        ConfigurationError: It names no checkpoint.
    """
    names = ("checkpoint_ns", "checkpoint_id", "checkpoint_map")
    asked = checkpoint or {}
    given = {name: asked[name] for name in names if asked.get(name)}
    return {"configurable": {"checkpoint_ns": "", **given, "thread_id": thread_id}}


async def state(graph: Any, call: Call, config: RunnableConfig, *, subgraphs: bool) -> Any:
    """The state at a config.

    Raises:
        UnknownCheckpoint: The config names one that does not exist.
    """
    asked = config["configurable"]
    found = await call.saver.aget_tuple(config)
    if found is None and "checkpoint_id" in asked:
        raise UnknownCheckpoint(
            f"thread {asked['thread_id']!r} has no checkpoint {asked['checkpoint_id']!r}"
        )
    if graph is not None:
        return snapshot(await graph.aget_state(config, subgraphs=subgraphs))
    return snapshot(
        _of_tuple(found) if found else StateSnapshot({}, (), config, None, None, None, (), ())
    )


async def history(graph: Any, call: Call, config: RunnableConfig, **page: Any) -> list[Any]:
    """States before a config, the newest first."""
    if graph is not None:
        return [snapshot(each) async for each in graph.aget_state_history(config, **page)]
    return [snapshot(_of_tuple(each)) async for each in call.saver.alist(config, **page)]


def snapshot(found: StateSnapshot) -> dict[str, Any]:
    """A state as clients know it."""
    return {
        "values": found.values,
        "next": list(found.next),
        "tasks": [_task(each) for each in found.tasks],
        "metadata": found.metadata,
        "created_at": found.created_at,
        "checkpoint": checkpoint_of(found.config),
        "parent_checkpoint": checkpoint_of(found.parent_config),
        "interrupts": [_interrupt(each) for each in found.interrupts],
        "checkpoint_id": found.config["configurable"].get("checkpoint_id"),
    }


def checkpoint_of(config: RunnableConfig | None) -> dict[str, Any] | None:
    """A config as clients name a checkpoint."""
    if config is None:
        return None
    known = config["configurable"]
    names = ("thread_id", "checkpoint_ns", "checkpoint_id", "checkpoint_map")
    return {"checkpoint_ns": "", **{name: known[name] for name in names if name in known}}


def interrupts_of(found: CheckpointTuple | None) -> dict[str, list[Any]]:
    """The interrupts at a checkpoint that wait for an answer, by task."""
    out: dict[str, list[Any]] = {}
    for task, channel, value in (found.pending_writes if found else None) or ():
        if channel == _INTERRUPT:
            several = value if isinstance(value, list | tuple) else (value,)
            out.setdefault(task, []).extend(map(_interrupt, several))
    return out


def selected(found: dict[str, Any], select: list[str] | None) -> dict[str, Any]:
    """Those fields of a state that are named; `values.messages` is one of its values."""
    if not select:
        return found
    chosen = {name: found[name] for name in select if name in found}
    names = [name.removeprefix("values.") for name in select if name.startswith("values.")]
    if names and "values" not in chosen and isinstance(found["values"], Mapping):
        chosen["values"] = {name: found["values"].get(name) for name in names}
    return chosen


def _of_tuple(found: CheckpointTuple) -> StateSnapshot:
    """What a checkpoint tells of a state; which tasks come next only its graph knows."""
    waiting = tuple(each for some in interrupts_of(found).values() for each in some)
    return StateSnapshot(
        values=values_of(found.checkpoint["channel_values"]),
        next=(),
        config=found.config,
        metadata=found.metadata,
        created_at=found.checkpoint["ts"],
        parent_config=found.parent_config,
        tasks=(),
        interrupts=waiting,
    )


def _task(task: Any) -> dict[str, Any]:
    nested = task.state
    return {
        "id": task.id,
        "name": task.name,
        "path": task.path,
        "error": None if task.error is None else str(task.error),
        "interrupts": [_interrupt(each) for each in task.interrupts],
        "checkpoint": None if isinstance(nested, StateSnapshot) else checkpoint_of(nested),
        "state": snapshot(nested) if isinstance(nested, StateSnapshot) else None,
        "result": task.result,
    }


def _interrupt(one: Any) -> Any:
    return one if isinstance(one, dict) else {"value": one.value, "id": one.id}
