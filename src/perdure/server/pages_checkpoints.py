"""Pages of checkpoints: a thread's tree, one of them, two compared, and ways on from one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, Final

from fastapi import APIRouter
from langgraph.checkpoint.base import CheckpointTuple
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from perdure.checkpointers import CheckpointInfo, Retention
from perdure.errors import ConfigurationError, UnknownCheckpoint
from perdure.server.access import action
from perdure.server.call import Call, Caller
from perdure.server.messages import SHORT, as_text, cut, short
from perdure.server.pages import form, page, query
from perdure.server.pages_threads import about
from perdure.server.turns import changes

routes = APIRouter(include_in_schema=False)
PAGE: Final = 100
_ELEMENTS: Final = 8  # of a list or dict that the page of a checkpoint shows
_VALUE: Final = 2_000  # characters of another value
_WIDEST: Final = 12  # lanes that are drawn side by side


@routes.get("/ui/checkpoints")
@routes.get("/ui/checkpoints.json")
@action("threads:read")
async def checkpoints(
    request: Request, call: Caller, id: str, ns: str = "", before: int | None = None
) -> Response:
    """The time line of a thread, newest first, as a tree."""
    await call.permit({"thread_id": id})
    found = await call.threads.get(id)
    infos = await call.saver.acheckpoints(id, checkpoint_ns=ns, limit=PAGE + 1, before=before)
    infos, more = infos[:PAGE], infos[PAGE:]
    pairs = [(info.parent_id, info.checkpoint_id) for info in infos]
    steps = await call.saver.adifferences(id, pairs, checkpoint_ns=ns, most=1) if pairs else []
    rows = []
    for info, change, drawn in zip(infos, steps, lanes(infos), strict=True):
        named = [name for name in change.channels if not name.startswith(("branch:to:", "__"))]
        rows.append({**asdict(info), "ran": change.ran, "changed": named, "drawn": drawn})
    return page(
        request,
        "checkpoints.html",
        thread=await about(call, found),
        ns=ns,
        checkpoints=rows,
        older=infos[-1].order if more else None,
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


@routes.get("/ui/checkpoint")
@routes.get("/ui/checkpoint.json")
@action("threads:read")
async def checkpoint(
    request: Request,
    call: Caller,
    id: str,
    checkpoint: str,
    ns: str = "",
    channel: str | None = None,
) -> Response:
    """The values, next tasks, metadata and pending writes; of one channel, the whole value."""
    await call.permit({"thread_id": id})
    await call.threads.get(id)
    found = await _read(call, id, ns, checkpoint)
    values = found.checkpoint["channel_values"]
    common = {"thread_id": id, "ns": ns, "checkpoint_id": checkpoint}
    if channel is not None:
        if channel not in values:
            raise UnknownCheckpoint(f"the checkpoint {checkpoint!r} has no channel {channel!r}")
        return page(request, "channel.html", **common, channel=channel, value=values[channel])
    return page(
        request,
        "checkpoint.html",
        **common,
        parent_id=_parent(found),
        ts=found.checkpoint["ts"],
        metadata=dict(found.metadata),
        next=_next(values),
        channels=[
            _channel(name, value)
            for name, value in values.items()
            if not name.startswith("branch:to:")
        ],
        writes=[
            {"task": task, "channel": name, "text": cut(as_text(value), _VALUE)[0]}
            for task, name, value in found.pending_writes or ()
        ],
    )


async def _read(call: Call, thread_id: str, ns: str, checkpoint_id: str) -> CheckpointTuple:
    """A checkpoint. It is listed, not got: from one that was got by its id a run goes on."""
    where: Any = {"thread_id": thread_id, "checkpoint_ns": ns, "checkpoint_id": checkpoint_id}
    listed: Any = call.saver.alist({"configurable": where}, limit=1)
    async with aclosing(listed) as found:
        async for each in found:
            return each  # type: ignore[no-any-return]
    raise UnknownCheckpoint(
        f"the thread {thread_id!r} has no checkpoint {checkpoint_id!r}; it may be pruned"
    )


def _parent(found: CheckpointTuple) -> str | None:
    config = found.parent_config
    return str(config["configurable"]["checkpoint_id"]) if config else None


def _next(values: dict[str, Any]) -> list[str]:
    """The nodes that are due, as far as the channels tell: they are triggered by their names."""
    due = [name.removeprefix("branch:to:") for name in values if name.startswith("branch:to:")]
    return [*due, *(["__start__"] if "__start__" in values else [])]


def _channel(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, list | tuple | dict):
        text, more = cut(as_text(value), _VALUE)
        return {"name": name, "kind": type(value).__name__, "text": text, "cut": more > 0}
    if isinstance(value, dict):
        pairs = [*value.items()][-_ELEMENTS:]
        lines = [{"type": None, "text": f"{key}: {short(each)}"} for key, each in pairs]
    else:
        last = value[-_ELEMENTS:]
        lines = [{"type": getattr(each, "type", None), "text": short(each)} for each in last]
    return {
        "name": name,
        "kind": type(value).__name__,
        "count": len(value),
        "lines": lines,
        "cut": len(value) > _ELEMENTS or any(len(str(each["text"])) >= SHORT for each in lines),
    }


@routes.get("/ui/compare")
@routes.get("/ui/compare.json")
@action("threads:read")
async def compare(
    request: Request, call: Caller, id: str, a: str, b: str, ns: str = ""
) -> Response:
    """Two checkpoints, channel by channel."""
    await call.permit({"thread_id": id})
    await call.threads.get(id)
    for each in (a, b):
        await _read(call, id, ns, each)
    (change,) = await call.saver.adifferences(id, [(a, b)], checkpoint_ns=ns, most=50)
    both = {"thread_id": id, "ns": ns, "a": a, "b": b}
    return page(request, "compare.html", **both, ran=change.ran, changes=changes(change))


@routes.post("/ui/compare")
@action("threads:read")
async def chosen(request: Request, call: Caller, id: str, ns: str = "") -> Response:
    """Lead to the comparison of the checkpoints that were chosen by their places."""
    await call.permit({"thread_id": id})
    await call.threads.get(id)
    fields = await form(request)
    pair = {}
    for name in ("a", "b"):
        place = fields.get(name, "")
        if not place.isdecimal():
            raise ConfigurationError(f"{name} is {place!r:.40}; choose two checkpoints")
        found = await call.saver.acheckpoints(id, checkpoint_ns=ns, limit=1, before=int(place) + 1)
        if not found or found[0].order != int(place):
            raise UnknownCheckpoint(f"the thread {id!r} has no checkpoint at place {place}")
        pair[name] = found[0].checkpoint_id
    return RedirectResponse(query("/ui/compare", id=id, ns=ns or None, **pair), 303)


# -- what can be done from one


@routes.post("/ui/rewind")
@action("threads:update")
async def rewind(call: Caller, id: str, checkpoint: str, ns: str = "") -> Response:
    """Let the thread go on from a checkpoint."""
    await call.permit({"thread_id": id})
    await call.threads.get(id)
    async with call.threads.turn(id):
        await call.saver.arewind(id, checkpoint, checkpoint_ns=ns)
    return RedirectResponse(query("/ui/checkpoints", id=id, ns=ns or None), 303)


@routes.post("/ui/fork")
@action("threads:create")
async def fork(request: Request, call: Caller, id: str, checkpoint: str) -> Response:
    """Copy what led to a checkpoint to a new thread, which is the user's."""
    new = (await form(request)).get("new", "").strip()
    if not new:
        raise ConfigurationError("the new thread has no id; give one")
    reading = call.another("threads:read")
    await reading.permit({"thread_id": id})
    source = await reading.threads.get(id)
    await _read(reading, id, "", checkpoint)
    owner = {"owner": call.identity.user}
    asked = await call.permit({"thread_id": new, "metadata": owner})
    await call.threads.create(new, {**source["metadata"], **asked["metadata"]})
    await call.saver.acopy_thread(id, new, checkpoint_id=checkpoint)
    return RedirectResponse(query("/ui/thread", id=new), 303)


def _retention(values: Any) -> Retention | None:
    """The rule that the fields of a form mean; None: none was given."""
    numbers: dict[str, Any] = {}
    for name, kind in (("last", int), ("days", float)):
        text = values.get(name, "").strip()
        try:
            numbers[name] = kind(text) if text else None
        except ValueError as exc:
            raise ConfigurationError(f"{name} is {text!r:.40}; expected a number") from exc
    rule = Retention(**numbers, turns="turns" in values, history="forget" not in values)
    given = rule.turns or rule.last is not None or rule.days is not None
    return rule if given else None


@routes.get("/ui/prune")
@routes.get("/ui/prune.json")
@action("threads:read")
async def prune_preview(request: Request, call: Caller, id: str) -> Response:
    """What pruning a thread by a rule would free."""
    await call.permit({"thread_id": id})
    found = await call.threads.get(id)
    rule, report = _retention(request.query_params), None
    if rule is not None:
        report = await call.saver.aretain(rule, thread_ids=[id], dry_run=True)
    return page(request, "prune.html", thread=await about(call, found), rule=rule, report=report)


@routes.post("/ui/prune")
@action("threads:update")
async def prune(request: Request, call: Caller, id: str) -> Response:
    """Prune a thread by the rule that was previewed."""
    await call.permit({"thread_id": id})
    await call.threads.get(id)
    fields = await form(request)
    rule = _retention(fields)
    if "preview" in fields:
        return RedirectResponse(query("/ui/prune", id=id, **{**fields, "preview": None}), 303)
    if rule is None:
        raise ConfigurationError("no rule was given; say what is kept: last, days or turns")
    async with call.threads.turn(id):
        await call.saver.aretain(rule, thread_ids=[id])
    return RedirectResponse(query("/ui/checkpoints", id=id), 303)


@routes.get("/ui/delete")
@action("threads:read")
async def delete_preview(request: Request, call: Caller, id: str) -> Response:
    """Ask before a thread is deleted."""
    await call.permit({"thread_id": id})
    found = await call.threads.get(id)
    return page(request, "delete.html", thread=await about(call, found))


@routes.post("/ui/delete")
@action("threads:delete")
async def delete(call: Caller, id: str) -> Response:
    """Delete a thread."""
    await call.permit({"thread_id": id})
    await call.threads.delete(id)
    return RedirectResponse("/ui/threads", 303)
