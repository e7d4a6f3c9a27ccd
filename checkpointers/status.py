"""Determine which tasks of a thread run next or wait for an answer, without needing the graph.

The channels in a checkpoint determine which nodes are triggered. Each pending write contains its
task's path, which LangGraph passes to `put_writes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from langgraph.checkpoint.serde.types import ERROR, INTERRUPT, RESUME

from perdure.checkpointers.put import START
from perdure.checkpointers.reports import ThreadStatus, ThreadTask

SENDS: Final = "__pregel_tasks"
"""langgraph's channel that contains the `Send`s for the next superstep."""
CANCELLED: Final = "__erased__"
"""The node name in the placeholder that replaces an erased `Send`.

The placeholder never runs. It is stored so that the later `Send`s keep their indexes.
"""
# Name prefix of channels that trigger a single node. The prefix is followed by the node's name.
_BRANCH: Final = "branch:to:"
# Name prefix of channels that trigger a node once several other nodes have finished. For example,
# "join:a+b:c" triggers node c once nodes a and b have finished.
_JOIN: Final = "join:"
# Keys in langgraph's `versions_seen` that are not node names.
_NO_NODES: Final = ("__input__", INTERRUPT)
ASIDE_SUFFIX: Final = "~aside"
"""The suffix of the task path of a state update's writes that perdure stores under a new task id.

langgraph's `update_state` sometimes stores its writes under the id of a task of a concurrent run.
To keep these writes apart from the task's own writes, perdure stores them under a new task id, and
adds this suffix to their task path. See `merge_planner`.
"""
FORMER_WRITES_CHANNEL: Final = "__run_former"
"""The channel for the pending writes that existed before the server started a run.

See `undo_writes`.
"""
# Prefix of the path of a task that langgraph's `update_state` creates.
_UPDATE: Final = "~__interrupt__"
NULL_TASK: Final = "00000000-0000-0000-0000-000000000000"
"""The task id under which langgraph stores the answers to interrupts."""
# Channels in which langgraph stores the interrupts, resume values and errors of unfinished tasks.
_CONTROL: Final = {INTERRUPT, RESUME, ERROR, "__error_source_node__"}
# Prefix of a task's path if the task is triggered by a channel. The prefix is followed by the
# node's name.
_PULL: Final = "~__pregel_pull, "
# Prefix of a task's path if the task was created by a `Send` or called by another task. The prefix
# is followed by the index of the `Send` or by the path of the calling task.
_PUSH: Final = "~__pregel_push, "
# Suffix of a task's path if the task is the error handler of a node.
_HANDLER: Final = ", node_error_handler, 0000000000"
Versions = Mapping[str, Any]
IDLE: Final = ThreadStatus()
"""The status of a thread without unfinished tasks."""


class TaskWrite(NamedTuple):
    """A pending write of a task.

    `value` must be given for a write to the interrupt channel or the error channel, and can be None
    for a write to any other channel.
    """

    task_id: str
    task_path: str
    channel: str
    value: Any = None


def needs_channel_value(channel: str) -> bool:
    """Return whether `build_thread_status` needs the value of a channel."""
    return channel == SENDS or channel.startswith((_BRANCH, _JOIN))


def build_thread_status(
    values: Mapping[str, Any],
    versions: Versions,
    versions_seen: Mapping[str, Versions],
    writes: Sequence[TaskWrite],
) -> ThreadStatus:
    """Derive the status of a thread from a checkpoint and its pending writes.

    Args:
        values: The value of each channel that has one. None may stand for a value that is not
            needed; see `needs_channel_value`.
        versions: The version of each channel.
        versions_seen: The channel versions that each node has seen.
        writes: The pending writes in order. Another checkpointer may have stored them.
    """
    writes_by_task_id = _group_writes_by_task(writes)
    task_ids = {
        task_writes[0].task_path: task_id
        for task_id, task_writes in writes_by_task_id.items()
        if _has_task_path(task_writes)
    }
    # `task_ids` maps task paths to task ids, and `due_nodes` maps task paths to nodes.
    due_nodes = dict(_iter_paths_and_nodes_of_triggered_tasks(values, versions, versions_seen))
    # A task with pending writes counts as due, even if `_iter_paths_and_nodes_of_triggered_tasks`
    # did not yield it.
    for path in task_ids:
        if path.startswith(_PULL):
            due_nodes.setdefault(path, path.removeprefix(_PULL))
    if not due_nodes and START in values:
        due_nodes[_PULL + START] = START
    if not due_nodes and not writes_by_task_id:
        return IDLE
    unmatched_paths = [path for path in due_nodes if path not in task_ids]
    # Pending writes stored by another checkpointer may have no task path.
    for task_id, task_writes in writes_by_task_id.items():
        if not _has_task_path(task_writes):
            if len(unmatched_paths) == 1:
                task_ids[unmatched_paths.pop()] = task_id
            elif any(write.channel == INTERRUPT for write in task_writes):
                task_ids[_PULL + task_id] = task_id
                due_nodes[_PULL + task_id] = ""
    return ThreadStatus(
        tuple(
            _build_thread_task(
                path, node, task_ids.get(path), writes_by_task_id.get(task_ids.get(path, ""), [])
            )
            for path, node in due_nodes.items()
        )
    )


def find_send_targets(sends: Any) -> list[str | None]:
    """Return the target node of each `Send` in a checkpoint, or None for a cancelled `Send`."""
    nodes = [getattr(send, "node", None) for send in (sends if _is_list(sends) else ())]
    return [None if node == CANCELLED else node for node in nodes]


def _group_writes_by_task(writes: Sequence[TaskWrite]) -> dict[str, list[TaskWrite]]:
    """Group pending writes by task id.

    Writes that answer interrupts are omitted, and so are writes of tasks with a nested path; see
    `_is_nested_task_path`.
    """
    by_task: dict[str, list[TaskWrite]] = {}
    for write in writes:
        if write.task_id != NULL_TASK and not _is_nested_task_path(write.task_path):
            by_task.setdefault(write.task_id, []).append(write)
    return by_task


def _has_task_path(writes: list[TaskWrite]) -> bool:
    return writes[0].task_path.startswith((_PULL, _PUSH))


def is_update_path(path: str) -> bool:
    """Return whether a task path belongs to pending writes that were stored by `update_state`."""
    return path.startswith(_UPDATE)


def _is_nested_task_path(path: str) -> bool:
    """Return whether a task path has one of three special forms.

    The special forms are the path of a nested task, the path of an error handler, and the path of
    writes that perdure moved to a new task id.

    Moved writes are the writes of a state update that were stored under a new task id.

    Return True for the path of a task that was called by another running task, for the path of an
    error handler, and for any path that ends with `ASIDE_SUFFIX`. Return False for all other paths.
    """
    return path.endswith(ASIDE_SUFFIX) or path.startswith(f"{_PUSH}~") or path.endswith(_HANDLER)


def _iter_paths_and_nodes_of_triggered_tasks(
    values: Mapping[str, Any], versions: Versions, versions_seen: Mapping[str, Versions]
) -> Iterator[tuple[str, str]]:
    """Yield the path and node name of each task that is triggered at a checkpoint.

    A task is triggered either by a `Send` or by a channel that has a new version.
    """
    for index, sent in enumerate(find_send_targets(values[SENDS]) if SENDS in values else ()):
        if sent is not None:
            yield f"{_PUSH}{index:010d}, {0:010d}", sent
    # Maps each channel to the nodes that have an entry for the channel in `versions_seen`.
    nodes_by_channel: dict[str, list[str]] = {}
    for node, channels in versions_seen.items():
        for channel in channels if node not in _NO_NODES else ():
            nodes_by_channel.setdefault(channel, []).append(node)
    for channel, value in values.items():
        is_named = channel.startswith((_BRANCH, _JOIN))
        for node in (
            _list_nodes_triggered_by_channel(channel, value)
            if is_named
            else nodes_by_channel.get(channel, ())
        ):
            version, seen_version = versions.get(channel), versions_seen.get(node, {}).get(channel)
            is_same_kind = isinstance(version, type(seen_version))
            if seen_version is None or (is_same_kind and version > seen_version):
                yield _PULL + node, node


def _list_nodes_triggered_by_channel(channel: str, value: Any) -> list[str]:
    """Return the node that a `StateGraph` channel triggers, as a list of at most one name.

    The list is empty if the node still has to wait for other nodes.
    """
    is_ready = True
    if _is_list(value) and len(value) == 2 and isinstance(value[1], bool):
        # A deferred node runs only after all other nodes have finished. The second element of a
        # deferred node's channel value is True if the node is ready to run.
        value, is_ready = value
    if channel.startswith(_BRANCH):
        return [channel.removeprefix(_BRANCH)] if is_ready else []
    awaited_names, _, node = channel.removeprefix(_JOIN).rpartition(":")
    arrived = value if _is_list(value) or isinstance(value, set | frozenset) else ()
    # `arrived` may be an unordered set, so the joined node names cannot be compared with
    # `awaited_names` as text. Comparing the lengths is enough, because langgraph accepts only
    # awaited names, and each only once. The joined names are shorter as long as one is missing.
    is_ready = is_ready and len("+".join(map(str, arrived))) == len(awaited_names)
    return [node] if is_ready else []


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _build_thread_task(
    path: str, node: str, task_id: str | None, writes: list[TaskWrite]
) -> ThreadTask:
    """Build a `ThreadTask` from a task's path, node and pending writes."""
    interrupts: list[Any] = []
    for write in writes:
        if write.channel == INTERRUPT:
            interrupts += write.value if _is_list(write.value) else [write.value]
    errors = (write.value for write in writes if write.channel == ERROR)
    parts: tuple[Any, ...] = ("__pregel_pull", node)
    if path.startswith(_PUSH):
        parts = ("__pregel_push", int(path.removeprefix(_PUSH).partition(",")[0]), False)
    is_done = any(write.channel not in _CONTROL for write in writes)
    return ThreadTask(task_id, node, parts, is_done, next(errors, None), tuple(interrupts))
