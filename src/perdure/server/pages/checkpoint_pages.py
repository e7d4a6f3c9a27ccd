"""Checkpoint pages: the tree, one checkpoint, a comparison, rewind, fork, prune and delete."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict
from typing import Annotated, Any, Final
from urllib.parse import unquote

from fastapi import Form, Query
from langgraph.checkpoint.base import CheckpointTuple
from pydantic import BaseModel, FiniteFloat
from starlette.requests import Request
from starlette.responses import Response

from perdure.checkpointers import CheckpointInfo, Retention
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.delta import COUNTERS
from perdure.effects import arun_operation
from perdure.errors import ConfigurationError, UnknownCheckpoint
from perdure.memory.long_term.thread_memories import aforget_thread_memories
from perdure.memory.thread_messages import read_channel_values
from perdure.server import api_threads
from perdure.server.api_states import (
    is_caller_trusted_as_thread_person,
    record_other_users_changes_during_rewind,
)
from perdure.server.http.access import Refused, set_required_action
from perdure.server.http.call import CurrentCall
from perdure.server.http.reply import format_as_text, truncate_and_count_omitted
from perdure.server.pages.rendering import (
    MAX_LINE_CHARS,
    FormText,
    NonNegativeNumber,
    Pages,
    build_change_rows,
    build_type_and_text_of_channel_element,
    redirect_to,
    render_page,
    type_name,
)
from perdure.server.pages.thread_pages import PermittedThread
from perdure.server.runs.run_manager import ServerRuns

routes = Pages()
CHECKPOINTS_PER_PAGE: Final = 100
# Maximum number of elements shown for a list or dict on a checkpoint's page.
_MAX_ELEMENTS: Final = 8
# Maximum number of characters shown for a value on a checkpoint's page. A channel's list or dict is
# limited by `_MAX_ELEMENTS` instead.
_MAX_VALUE_CHARS: Final = 2_000
# Maximum lane index in the drawn checkpoint tree. A lane is a vertical line in the drawing. If a
# checkpoint's lane has a larger index, the checkpoint's dot is drawn in the lane with the maximum
# index.
_MAX_LANE: Final = 12
# Prefix of the names of langgraph's internal channels that trigger nodes.
_TRIGGER_PREFIX: Final = "branch:to:"


@routes.add_page_and_json_routes("/ui/checkpoints", "threads:read")
async def show_checkpoints(
    request: Request, target: PermittedThread, before: NonNegativeNumber | None = None
) -> Response:
    """Show the checkpoints of a thread as a tree, newest first."""
    infos = await target.saver.acheckpoints(
        target.id, checkpoint_ns=target.ns, limit=CHECKPOINTS_PER_PAGE + 1, before=before
    )
    infos, older_infos = infos[:CHECKPOINTS_PER_PAGE], infos[CHECKPOINTS_PER_PAGE:]
    pairs = [(info.parent_id, info.checkpoint_id) for info in infos]
    differences = (
        await target.saver.adifferences(target.id, pairs, checkpoint_ns=target.ns, limit=1)
        if pairs
        else []
    )
    rows = [
        {
            **asdict(info),
            "ran": difference.ran,
            "changed": [
                name for name in difference.channels if not name.startswith((_TRIGGER_PREFIX, "__"))
            ],
            "drawn": lane_drawing,
        }
        for info, difference, lane_drawing in zip(
            infos, differences, build_checkpoint_tree_drawings(infos), strict=True
        )
    ]
    return render_page(
        request,
        "checkpoints.html",
        thread=await target.load_row(),
        **target.link_arguments,
        checkpoints=rows,
        older=infos[-1].order if older_infos else None,
    )


def build_checkpoint_tree_drawings(infos: Sequence[CheckpointInfo]) -> list[dict[str, Any]]:
    """Lay out the checkpoint tree that is drawn beside a table of checkpoints.

    In the drawing of a checkpoint tree, a lane is a vertical line from a checkpoint's row down to
    the row of the checkpoint's parent. If several checkpoints have the same parent, their vertical
    lines (lanes) merge at the parent's row.

    Args:
        infos: The checkpoints, newest first.

    Returns:
        For each checkpoint, the lane of its dot, the lanes that pass its row, the lanes that merge
            at its dot, and whether its lane continues below.
    """
    # Element `n` of `lane_parents` belongs to column `n` of the drawing. The element is the id of
    # the checkpoint at which the column's vertical line ends, or None if the column has no line.
    lane_parents: list[str | None] = []
    drawings = []
    for info in infos:
        joining_lanes = [
            lane for lane, parent_id in enumerate(lane_parents) if parent_id == info.checkpoint_id
        ]
        free_lanes = [lane for lane, parent_id in enumerate(lane_parents) if parent_id is None]
        dot_lane = (joining_lanes or free_lanes or [len(lane_parents)])[0]
        lane_parents += [None] * (dot_lane + 1 - len(lane_parents))
        passing_lanes = [
            lane
            for lane, parent_id in enumerate(lane_parents)
            if parent_id is not None and lane not in joining_lanes
        ]
        for lane in joining_lanes:
            lane_parents[lane] = None
        lane_parents[dot_lane] = info.parent_id
        drawings.append(
            {
                "dot": min(dot_lane, _MAX_LANE),
                "passing": [lane for lane in passing_lanes if lane <= _MAX_LANE],
                "joining": [min(lane, _MAX_LANE) for lane in joining_lanes],
                "goes_on": info.parent_id is not None,
            }
        )
    return drawings


# -- one checkpoint, and the comparison of two


@routes.add_page_and_json_routes("/ui/checkpoint", "threads:read")
async def show_checkpoint(
    request: Request, target: PermittedThread, checkpoint: str, channel: str | None = None
) -> Response:
    """Show a checkpoint's values, next tasks, metadata and pending writes.

    If the query parameter `channel` is given, the page shows only this channel's complete value.
    """
    stored = await _read_checkpoint(target.saver, target.id, target.ns, checkpoint)
    values, parent = (
        await arun_operation(read_channel_values(target.saver, stored)),
        stored.parent_config,
    )
    page_fields = {**target.link_arguments, "checkpoint_id": checkpoint, "channel": channel}
    if channel is not None:
        if channel not in values:
            raise UnknownCheckpoint(
                f"the checkpoint {checkpoint!r} has no channel {channel!r}; open the checkpoint's "
                "page to see its channels"
            )
        return render_page(request, "checkpoint.html", **page_fields, value=values[channel])
    status = await target.saver.astatus(
        target.id, checkpoint_ns=target.ns, checkpoint_id=checkpoint
    )
    counted_channels, versions = (
        stored.metadata.get(COUNTERS) or (),
        stored.checkpoint["channel_versions"],
    )
    writes = [
        {
            "task": task,
            "channel": name,
            "text": truncate_and_count_omitted(format_as_text(value), _MAX_VALUE_CHARS)[0],
            "is_trigger": name.startswith(_TRIGGER_PREFIX),
        }
        for task, name, value in stored.pending_writes or ()
    ]
    return render_page(
        request,
        "checkpoint.html",
        **page_fields,
        parent_id=parent["configurable"]["checkpoint_id"] if parent else None,
        ts=stored.checkpoint["ts"],
        metadata=dict(stored.metadata),
        next=[*dict.fromkeys(status.next)],
        channels=[
            _build_channel_row(*item)
            for item in values.items()
            if not item[0].startswith(_TRIGGER_PREFIX)
        ],
        # Names of the `DeltaChannel`s that have stored writes but no computable value
        unknown=[c for c in counted_channels if c in versions and c not in values],
        writes=writes,
    )


async def _read_checkpoint(
    saver: Checkpointer, thread_id: str, ns: str, checkpoint_id: str
) -> CheckpointTuple:
    """Read a checkpoint for display, without affecting how the checkpointer detects forks.

    Read the checkpoint with `alist`. This function does not call the checkpointer's method
    `aget_tuple`, because `aget_tuple` would record that the checkpoint was read by its id. If a new
    checkpoint's parent was read by id, the checkpointer assumes that the thread is forked or
    resumed.

    Raises:
        UnknownCheckpoint: The thread has no such checkpoint.
    """
    configurable: Any = {
        "thread_id": thread_id,
        "checkpoint_ns": ns,
        "checkpoint_id": checkpoint_id,
    }
    checkpoints: Any = saver.alist({"configurable": configurable}, limit=1)
    async with aclosing(checkpoints) as open_checkpoints:
        async for checkpoint in open_checkpoints:
            return checkpoint  # type: ignore[no-any-return]
    raise UnknownCheckpoint(
        f"the thread {thread_id!r} has no checkpoint {checkpoint_id!r}; the checkpoint might have "
        "been pruned"
    )


def _build_channel_row(name: str, value: Any) -> dict[str, Any]:
    """Build the template data for a channel's value.

    If the value is a list or dict, its last `_MAX_ELEMENTS` elements are shown, each on its own
    line. In the returned dict, the field `cut` is True if the channel's value is shown only in
    part.
    """
    row: dict[str, Any] = {"name": name, "kind": type_name(value)}
    if not isinstance(value, list | tuple | dict):
        text, cut_chars = truncate_and_count_omitted(format_as_text(value), _MAX_VALUE_CHARS)
        return {**row, "text": text, "cut": cut_chars > 0}
    elements = (
        [(str(key), part) for key, part in value.items()] if isinstance(value, dict) else value
    )
    lines = [
        build_type_and_text_of_channel_element(element) for element in elements[-_MAX_ELEMENTS:]
    ]
    is_cut = len(value) > _MAX_ELEMENTS or any(
        len(str(line["text"])) >= MAX_LINE_CHARS for line in lines
    )
    return {**row, "count": len(value), "lines": lines, "cut": is_cut}


@routes.add_page_and_json_routes("/ui/compare", "threads:read")
async def show_comparison(request: Request, target: PermittedThread, a: str, b: str) -> Response:
    """Show the differences between two checkpoints, grouped by channel."""
    for checkpoint_id in (a, b):
        await _read_checkpoint(target.saver, target.id, target.ns, checkpoint_id)
    (difference,) = await target.saver.adifferences(
        target.id, [(a, b)], checkpoint_ns=target.ns, limit=50
    )
    return render_page(
        request,
        "compare.html",
        **target.link_arguments,
        a=a,
        b=b,
        ran=difference.ran,
        changes=build_change_rows(difference),
    )


@routes.post("/ui/compare")
@set_required_action("threads:read")
async def redirect_to_comparison(target: PermittedThread, a: FormText, b: FormText) -> Response:
    """Redirect to the page that compares the two checkpoints chosen in an HTML form.

    The HTML form percent-encodes the checkpoint ids, because they can contain any character.
    """
    return redirect_to("/ui/compare", **target.link_arguments, a=unquote(a), b=unquote(b))


# -- rewind, fork, prune and delete


@routes.post("/ui/rewind")
@set_required_action("threads:update")
async def rewind_thread(runs: ServerRuns, target: PermittedThread, checkpoint: str) -> Response:
    """Make a checkpoint the head of its thread, and set the status of the thread to `idle`."""
    async with target.call.threads.lock_for_change(target.id):
        async with record_other_users_changes_during_rewind(
            runs, target.call, target.id, checkpoint
        ):
            await target.saver.arewind(target.id, checkpoint, checkpoint_ns=target.ns)
        await target.call.threads.set_run_status(target.id, "idle")
    return redirect_to("/ui/checkpoints", **target.link_arguments)


@routes.post("/ui/fork")
@set_required_action("threads:create")
async def fork_thread(
    runs: ServerRuns, call: CurrentCall, id: str, checkpoint: str, new: FormText
) -> Response:
    """Copy a checkpoint and its ancestors to a new thread that the user owns."""
    read_call = call.with_action("threads:read")
    await read_call.permit_thread(id)
    await _read_checkpoint(read_call.saver, id, "", checkpoint)
    permitted = await call.authorize_action_arguments(
        {"thread_id": new, "metadata": {"owner": call.identity.person}}
    )
    is_trusted = await is_caller_trusted_as_thread_person(runs, read_call, id)
    await call.threads.copy(
        id, permitted["metadata"], new, checkpoint, is_chosen_by_other_user=not is_trusted
    )
    return redirect_to("/ui/thread", id=new)


class PruneRule(BaseModel):
    """The fields of the HTML form that selects which checkpoints of a thread to keep.

    Attributes:
        last: See `Retention`.
        days: See `Retention`.
        turns: See `Retention`.
        forget: Whether items that are part of no kept checkpoint are deleted.
        preview: Whether only a preview is shown.
    """

    last: NonNegativeNumber | None = None
    days: FiniteFloat | None = None
    turns: bool = False
    forget: bool = False
    preview: bool = False

    @property
    def retention(self) -> Retention | None:
        """The retention rule that the form fields specify, or None if they are all empty."""
        if self.last is None and self.days is None and not self.turns:
            return None
        return Retention(last=self.last, days=self.days, turns=self.turns, history=not self.forget)


@routes.add_page_and_json_routes("/ui/prune", "threads:read")
async def preview_pruning(
    request: Request, target: PermittedThread, rule: Annotated[PruneRule, Query()]
) -> Response:
    """Show how much data a retention rule would remove from a thread, without removing anything."""
    report = None
    if (retention := rule.retention) is not None:
        report = await target.saver.aretain(retention, thread_ids=[target.id], dry_run=True)
    return render_page(
        request, "prune.html", thread=await target.load_row(), rule=rule, report=report
    )


@routes.post("/ui/prune")
@set_required_action("threads:update")
async def prune_thread(target: PermittedThread, rule: Annotated[PruneRule, Form()]) -> Response:
    """Apply a retention rule to a thread, or redirect to a preview of what it would remove."""
    if rule.preview:
        return redirect_to(
            "/ui/prune", id=target.id, **rule.model_dump(exclude_defaults=True, exclude={"preview"})
        )
    if (retention := rule.retention) is None:
        raise ConfigurationError(
            "no pruning rule is set, so nothing was pruned; set 'last', 'days' or 'turns'"
        )
    await target.call.threads.prune(target.id, retention)
    return redirect_to("/ui/checkpoints", id=target.id)


@routes.add_page_and_json_routes("/ui/delete", "threads:read")
async def show_delete_form(request: Request, target: PermittedThread) -> Response:
    """Show the form for deleting a thread and, optionally, the memories extracted from it."""
    memories = None
    # Memories that the user is not allowed to erase are kept.
    with suppress(Refused):
        memories = await aforget_thread_memories(
            target.call.store,
            [target.id],
            places=await api_threads.find_erasable_memory_namespaces(target.call),
            dry_run=True,
        )
    return render_page(request, "delete.html", thread=await target.load_row(), memories=memories)


@routes.post("/ui/delete")
@set_required_action("threads:delete")
async def delete_thread(
    call: CurrentCall, runs: ServerRuns, id: str, memories: FormText = "erase"
) -> Response:
    """Delete a thread and the memories that were extracted from it.

    If the form field `memories` is "keep", only the thread is deleted, and the memories that were
    extracted from it are kept.
    """
    await api_threads.delete_thread(call, runs, id, "keep" if memories == "keep" else "erase")
    return redirect_to("/ui/threads")
