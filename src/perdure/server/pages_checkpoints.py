"""Pages of checkpoints: a thread's tree, one of them, two compared, and ways on from one."""

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
from perdure.effects import arun
from perdure.errors import ConfigurationError, UnknownCheckpoint
from perdure.memory.thread_memories import aforget_thread_memories
from perdure.memory.thread_messages import read_channel_values
from perdure.server import api_threads
from perdure.server.access import Refused, action
from perdure.server.call import CurrentCall
from perdure.server.pages import (
    SHORT,
    Number,
    Pages,
    Text,
    Values,
    changes,
    go_to,
    line_of,
    page,
    type_name,
)
from perdure.server.pages_threads import OfThread
from perdure.server.reply import format_as_text, truncate_text
from perdure.server.runs import ServerRuns

routes = Pages()
PAGE: Final = 100
_ELEMENTS: Final = 8  # of a list or dict that the page of a checkpoint shows
_VALUE: Final = 2_000  # characters of another value
_WIDEST: Final = 12  # lanes that are drawn side by side
_DUE: Final = "branch:to:"  # how channels begin by which nodes are triggered


@routes.page("/ui/checkpoints", "threads:read")
async def checkpoints(request: Request, of: OfThread, before: Number | None = None) -> Response:
    """The time line of a thread, newest first, as a tree."""
    infos = await of.saver.acheckpoints(of.id, checkpoint_ns=of.ns, limit=PAGE + 1, before=before)
    infos, more = infos[:PAGE], infos[PAGE:]
    pairs = [(info.parent_id, info.checkpoint_id) for info in infos]
    steps = []
    if pairs:
        steps = await of.saver.adifferences(of.id, pairs, checkpoint_ns=of.ns, limit=1)
    rows = []
    for info, change, drawn in zip(infos, steps, lanes(infos), strict=True):
        named = [name for name in change.channels if not name.startswith((_DUE, "__"))]
        rows.append({**asdict(info), "ran": change.ran, "changed": named, "drawn": drawn})
    older = infos[-1].order if more else None
    return page(
        request,
        "checkpoints.html",
        thread=await of.about(),
        **of.named,
        checkpoints=rows,
        older=older,
    )


def lanes(infos: Sequence[CheckpointInfo]) -> list[dict[str, Any]]:
    """How a tree is drawn beside its checkpoints, newest first: each row's dot and lines.

    A lane waits for the parent of the checkpoint above it; where several wait for one, they join.
    """
    waiting: list[str | None] = []
    out = []
    for info in infos:
        joining = [lane for lane, uid in enumerate(waiting) if uid == info.checkpoint_id]
        free = [lane for lane, uid in enumerate(waiting) if uid is None]
        dot = (joining or free or [len(waiting)])[0]
        waiting += [None] * (dot + 1 - len(waiting))
        passing = [n for n, uid in enumerate(waiting) if uid is not None and n not in joining]
        for lane in joining:
            waiting[lane] = None
        waiting[dot] = info.parent_id
        out.append(
            {
                "dot": min(dot, _WIDEST),
                "passing": [lane for lane in passing if lane <= _WIDEST],
                "joining": [min(lane, _WIDEST) for lane in joining],
                "goes_on": info.parent_id is not None,
            }
        )
    return out


# -- one checkpoint, and two


@routes.page("/ui/checkpoint", "threads:read")
async def checkpoint(
    request: Request, of: OfThread, checkpoint: str, channel: str | None = None
) -> Response:
    """The values, next tasks, metadata and pending writes; of one channel, the whole value."""
    found = await _read(of.saver, of.id, of.ns, checkpoint)
    values, parent = await arun(read_channel_values(of.saver, found)), found.parent_config
    about = {**of.named, "checkpoint_id": checkpoint, "channel": channel}
    if channel is not None:
        if channel not in values:
            raise UnknownCheckpoint(f"the checkpoint {checkpoint!r} has no channel {channel!r}")
        return page(request, "checkpoint.html", **about, value=values[channel])
    status = await of.saver.astatus(of.id, checkpoint_ns=of.ns, checkpoint_id=checkpoint)
    counted, versions = found.metadata.get(COUNTERS) or (), found.checkpoint["channel_versions"]
    writes = [
        {
            "task": task,
            "channel": name,
            "text": truncate_text(format_as_text(value), _VALUE)[0],
            "is_trigger": name.startswith(_DUE),
        }
        for task, name, value in found.pending_writes or ()
    ]
    return page(
        request,
        "checkpoint.html",
        **about,
        parent_id=parent["configurable"]["checkpoint_id"] if parent else None,
        ts=found.checkpoint["ts"],
        metadata=dict(found.metadata),
        next=[*dict.fromkeys(status.next)],
        channels=[_channel(*each) for each in values.items() if not each[0].startswith(_DUE)],
        unknown=[c for c in counted if c in versions and c not in values],
        writes=writes,
    )


async def _read(
    saver: Checkpointer, thread_id: str, ns: str, checkpoint_id: str
) -> CheckpointTuple:
    """A checkpoint. It is listed, not got: from one that was got by its id a run goes on."""
    where: Any = {"thread_id": thread_id, "checkpoint_ns": ns, "checkpoint_id": checkpoint_id}
    listed: Any = saver.alist({"configurable": where}, limit=1)
    async with aclosing(listed) as found:
        async for each in found:
            return each  # type: ignore[no-any-return]
    raise UnknownCheckpoint(
        f"the thread {thread_id!r} has no checkpoint {checkpoint_id!r}; it may be pruned"
    )


def _channel(name: str, value: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "kind": type_name(value)}
    if not isinstance(value, list | tuple | dict):
        text, more = truncate_text(format_as_text(value), _VALUE)
        return {**row, "text": text, "cut": more > 0}
    elements = [(str(key), of) for key, of in value.items()] if isinstance(value, dict) else value
    lines = [line_of(element) for element in elements[-_ELEMENTS:]]
    is_cut = len(value) > _ELEMENTS or any(len(str(each["text"])) >= SHORT for each in lines)
    return {**row, "count": len(value), "lines": lines, "cut": is_cut}


@routes.page("/ui/compare", "threads:read")
async def compare(request: Request, of: OfThread, a: str, b: str) -> Response:
    """Two checkpoints, channel by channel."""
    for each in (a, b):
        await _read(of.saver, of.id, of.ns, each)
    (change,) = await of.saver.adifferences(of.id, [(a, b)], checkpoint_ns=of.ns, limit=50)
    return page(
        request, "compare.html", **of.named, a=a, b=b, ran=change.ran, changes=changes(change)
    )


@routes.post("/ui/compare")
@action("threads:read")
async def chosen(of: OfThread, a: Text, b: Text) -> Response:
    """Lead to the comparison of two that were chosen in a form, which has their ids encoded."""
    return go_to("/ui/compare", **of.named, a=unquote(a), b=unquote(b))


# -- what can be done from one


@routes.post("/ui/rewind")
@action("threads:update")
async def rewind(of: OfThread, checkpoint: str) -> Response:
    """Let the thread go on from a checkpoint."""
    async with of.call.threads.lock_for_change(of.id):
        await of.saver.arewind(of.id, checkpoint, checkpoint_ns=of.ns)
        await of.call.threads.set_run_status(of.id, "idle")
    return go_to("/ui/checkpoints", **of.named)


@routes.post("/ui/fork")
@action("threads:create")
async def fork(call: CurrentCall, id: str, checkpoint: str, new: Text) -> Response:
    """Copy what led to a checkpoint to a new thread, which is the user's."""
    reading = call.with_action("threads:read")
    await reading.permit_thread(id)
    await _read(reading.saver, id, "", checkpoint)
    asked = await call.permit({"thread_id": new, "metadata": {"owner": call.identity.person}})
    await call.threads.copy(id, asked["metadata"], new, checkpoint)
    return go_to("/ui/thread", id=new)


class Rule(BaseModel):
    """Which checkpoints of a thread are kept, as a form has it."""

    last: Number | None = None
    days: FiniteFloat | None = None
    turns: bool = False
    forget: bool = False
    preview: bool = False

    @property
    def retention(self) -> Retention | None:
        """The rule; None: none was given."""
        if self.last is None and self.days is None and not self.turns:
            return None
        return Retention(last=self.last, days=self.days, turns=self.turns, history=not self.forget)


@routes.page("/ui/prune", "threads:read")
async def prune_preview(request: Request, of: OfThread, rule: Annotated[Rule, Query()]) -> Response:
    """What pruning a thread by a rule would free."""
    report = None
    if (keep := rule.retention) is not None:
        report = await of.saver.aretain(keep, thread_ids=[of.id], dry_run=True)
    return page(request, "prune.html", thread=await of.about(), rule=rule, report=report)


@routes.post("/ui/prune")
@action("threads:update")
async def prune(of: OfThread, rule: Annotated[Rule, Form()]) -> Response:
    """Prune a thread by the rule that was previewed."""
    if rule.preview:
        given = rule.model_dump(exclude_defaults=True, exclude={"preview"})
        return go_to("/ui/prune", id=of.id, **given)
    if (keep := rule.retention) is None:
        raise ConfigurationError("no rule was given; say what is kept: last, days or turns")
    await of.call.threads.prune(of.id, keep)
    return go_to("/ui/checkpoints", id=of.id)


@routes.page("/ui/delete", "threads:read")
async def delete_preview(request: Request, of: OfThread) -> Response:
    """Ask before a thread is deleted, and whether the memories of it are kept."""
    memories = None
    with suppress(Refused):  # the memories are kept if the user may not erase them
        places = await api_threads.find_memory_places(of.call)
        options: Values = {"places": places, "dry_run": True}
        memories = await aforget_thread_memories(of.call.store, [of.id], **options)
    return page(request, "delete.html", thread=await of.about(), memories=memories)


@routes.post("/ui/delete")
@action("threads:delete")
async def delete(
    call: CurrentCall, runs: ServerRuns, id: str, memories: Text = "erase"
) -> Response:
    """Delete a thread, and the memories of it unless they are to be kept."""
    await api_threads.delete_thread(call, runs, id, "keep" if memories == "keep" else "erase")
    return go_to("/ui/threads")
