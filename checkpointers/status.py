"""Where a thread stands: what runs next and what waits for an answer, told by a checkpoint alone.

The graph is not needed: a checkpoint has the channels that trigger its nodes, and each pending
write the path of its task, as langgraph gives it to `put_writes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from langgraph.checkpoint.serde.types import ERROR, INTERRUPT, RESUME

from perdure.checkpointers.put import START
from perdure.checkpointers.reports import ThreadStatus, ThreadTask

SENDS: Final = "__pregel_tasks"
"""langgraph's channel of the `Send`s that run in the next superstep."""
CANCELLED: Final = "__erased__"
"""The node of a `Send` that keeps the place of an erased one, and never runs."""
_BRANCH: Final = "branch:to:"  # and the node that it triggers
_JOIN: Final = "join:"  # the nodes that are waited for, joined by "+", ":", and the node
_NO_NODES: Final = ("__input__", INTERRUPT)  # have seen versions of channels as well
ASIDE_SUFFIX: Final = "~aside"
"""The end of the path of what an update wrote in the name of a task that a run has run."""
FORMER_WRITES_CHANNEL: Final = "__run_former"
"""The channel for the pending writes that existed before a run of the server; see `undo_writes`."""
_UPDATE: Final = "~__interrupt__"  # the path of a task whose node `update_state` names begins so
NULL_TASK: Final = "00000000-0000-0000-0000-000000000000"
"""Writes what a person gives a run."""
_CONTROL: Final = {INTERRUPT, RESUME, ERROR, "__error_source_node__"}
_PULL: Final = "~__pregel_pull, "  # and the node
_PUSH: Final = "~__pregel_push, "  # and the place of the `Send`; or the path of a task that calls
_HANDLER: Final = ", node_error_handler, 0000000000"
Versions = Mapping[str, Any]
IDLE: Final = ThreadStatus()
"""The status of a thread with nothing to be done."""


class TaskWrite(NamedTuple):
    """A pending write; of one that says nothing of the status the value may be left out."""

    task_id: str
    task_path: str
    channel: str
    value: Any = None


def needs_value(channel: str) -> bool:
    """Whether `thread_status` looks at the value of a channel, not only whether it has one."""
    return channel == SENDS or channel.startswith((_BRANCH, _JOIN))


def build_thread_status(
    values: Mapping[str, Any],
    versions: Versions,
    seen: Mapping[str, Versions],
    writes: Sequence[TaskWrite],
) -> ThreadStatus:
    """The status of a thread at a checkpoint.

    Args:
        values: Of the channels; see `needs_value`.
        versions: Of the channels.
        seen: The versions that each node has seen.
        writes: The pending writes, whoever wrote them, in order.
    """
    by_task = _group_by_task(writes)
    tasks = {own[0].task_path: task for task, own in by_task.items() if _has_path(own)}
    due = dict(_iter_due_tasks(values, versions, seen))
    for path in tasks:  # a graph may be triggered by channels of any name
        if path.startswith(_PULL):
            due.setdefault(path, path.removeprefix(_PULL))
    if not due and START in values:
        due[_PULL + START] = START
    if not due and not by_task:
        return IDLE
    lacking = [path for path in due if path not in tasks]
    for task, own in by_task.items():  # other savers' files may have no paths
        if not _has_path(own):
            if len(lacking) == 1:
                tasks[lacking.pop()] = task
            elif any(write.channel == INTERRUPT for write in own):
                tasks[_PULL + task] = task
                due[_PULL + task] = ""
    return ThreadStatus(
        tuple(
            _build_task(path, node, tasks.get(path), by_task.get(tasks.get(path, ""), []))
            for path, node in due.items()
        )
    )


def find_send_targets(sends: Any) -> list[str | None]:
    """The nodes that the `Send`s of a checkpoint run; None: a cancelled one's."""
    nodes = [getattr(send, "node", None) for send in (sends if _is_list(sends) else ())]
    return [None if node == CANCELLED else node for node in nodes]


def _group_by_task(writes: Sequence[TaskWrite]) -> dict[str, list[TaskWrite]]:
    """The writes of each task of the superstep."""
    by_task: dict[str, list[TaskWrite]] = {}
    for write in writes:
        if write.task_id != NULL_TASK and not _is_inner(write.task_path):
            by_task.setdefault(write.task_id, []).append(write)
    return by_task


def _has_path(writes: list[TaskWrite]) -> bool:
    return writes[0].task_path.startswith((_PULL, _PUSH))


def is_by_update(path: str) -> bool:
    """Return whether `update_state` wrote what is stored with a path, and no run."""
    return path.startswith(_UPDATE)


def _is_inner(path: str) -> bool:
    """Whether a task is a call of another, or handles its error, or is none of the run."""
    return path.endswith(ASIDE_SUFFIX) or path.startswith(f"{_PUSH}~") or path.endswith(_HANDLER)


def _iter_due_tasks(
    values: Mapping[str, Any], versions: Versions, seen: Mapping[str, Versions]
) -> Iterator[tuple[str, str]]:
    """The tasks that a checkpoint triggers: their paths and nodes."""
    for place, sent in enumerate(find_send_targets(values[SENDS]) if SENDS in values else ()):
        if sent is not None:
            yield f"{_PUSH}{place:010d}, {0:010d}", sent
    watched: dict[str, list[str]] = {}  # by nodes that ran before, in graphs of any kind
    for node, channels in seen.items():
        for channel in channels if node not in _NO_NODES else ():
            watched.setdefault(channel, []).append(node)
    for channel, value in values.items():
        is_named = channel.startswith((_BRANCH, _JOIN))
        for node in _find_triggered_nodes(channel, value) if is_named else watched.get(channel, ()):
            version, before = versions.get(channel), seen.get(node, {}).get(channel)
            is_same_kind = isinstance(version, type(before))
            if before is None or (is_same_kind and version > before):
                yield _PULL + node, node


def _find_triggered_nodes(channel: str, value: Any) -> list[str]:
    """The node that a channel of a `StateGraph` triggers, if it is ready to."""
    is_ready = True
    if _is_list(value) and len(value) == 2 and isinstance(value[1], bool):
        value, is_ready = value  # a deferred node's: whether all others have ended
    if channel.startswith(_BRANCH):
        return [channel.removeprefix(_BRANCH)] if is_ready else []
    names, _, node = channel.removeprefix(_JOIN).rpartition(":")
    arrived = value if _is_list(value) or isinstance(value, set | frozenset) else ()
    is_ready = is_ready and len("+".join(map(str, arrived))) == len(names)
    return [node] if is_ready else []


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _build_task(path: str, node: str, task: str | None, writes: list[TaskWrite]) -> ThreadTask:
    interrupts: list[Any] = []
    for write in writes:
        if write.channel == INTERRUPT:
            interrupts += write.value if _is_list(write.value) else [write.value]
    errors = (write.value for write in writes if write.channel == ERROR)
    parts: tuple[Any, ...] = ("__pregel_pull", node)
    if path.startswith(_PUSH):
        parts = ("__pregel_push", int(path.removeprefix(_PUSH).partition(",")[0]), False)
    is_done = any(write.channel not in _CONTROL for write in writes)
    return ThreadTask(task, node, parts, is_done, next(errors, None), tuple(interrupts))
