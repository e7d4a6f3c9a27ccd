"""Pages of threads: the list, and what was said beside what the model saw and what changed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from perdure.checkpointers.titles import aabout, atitle
from perdure.errors import ConfigurationError, UnknownCheckpoint, UnknownThread
from perdure.memory import aviews
from perdure.server.access import action
from perdure.server.call import Call, Caller
from perdure.server.messages import as_text, cut, shown
from perdure.server.pages import page, query
from perdure.server.turns import by_turn, mark, turns_of, view_row

routes = APIRouter(include_in_schema=False)
PAGE: Final = 50  # threads
_OWN: Final = "perdure:"  # how the namespaces begin that are of no graph
_AFTER: Final = 5  # turns below a message that a link leads to


# -- the list


@routes.get("/ui/threads")
@routes.get("/ui/threads.json")
@action("threads:search")
async def threads(
    request: Request,
    call: Caller,
    q: str = "",
    meta: Annotated[list[str], Query()] = [],  # noqa: B006 - as FastAPI wants it
    since: str = "",
    until: str = "",
    skip: Annotated[int, Query(ge=0)] = 0,
) -> Response:
    """Threads, the latest activity first."""
    wanted = [each for each in meta if each.strip()]
    asked = await call.permit({"metadata": dict(map(_pair, wanted))})
    found = await call.threads.search(
        metadata=asked["metadata"],
        text=q,
        active_since=_day(since, "since"),
        active_until=_day(until, "until", timedelta(days=1)),
        limit=PAGE + 1,
        offset=skip,
    )
    rows = await asyncio.gather(*(_row(call, thread) for thread in found[:PAGE]))
    return page(
        request,
        "threads.html",
        threads=rows,
        q=q,
        meta=wanted,
        since=since,
        until=until,
        skip=skip,
        older=skip + PAGE if len(found) > PAGE else None,
    )


async def _row(call: Call, thread: dict[str, Any]) -> dict[str, Any]:
    metadata, thread_id = thread["metadata"], thread["thread_id"]
    row = {
        "thread_id": thread_id,
        "title": "",
        "owner": metadata.get("owner"),
        "status": thread.get("status"),
        "messages": 0,
        "namespaces": [],
        "size": 0,
        "active_at": thread["updated_at"],
    }
    with suppress(UnknownThread):  # it had no turn
        info = await call.saver.athread(thread_id)
        row |= {"size": info.size_bytes, "active_at": info.active_at, "messages": info.messages}
        row["namespaces"] = sorted(ns for ns in info.namespaces if not ns.startswith(_OWN))
        known = await aabout(call.saver, thread_id, metadata)
        row["title"] = cut(await atitle(call.saver, thread_id, known), 120)[0]
    return row


def _pair(text: str) -> tuple[str, Any]:
    name, found, value = text.partition("=")
    if not found or not name.strip():
        raise ConfigurationError(f"{text!r:.80} is no filter by metadata; expected key=value")
    return name.strip(), value.strip()


def _day(text: str, name: str, more: timedelta = timedelta()) -> datetime | None:
    if not text:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError as exc:
        raise ConfigurationError(f"{name} is {text!r:.40}; expected a day like 2026-11-23") from exc
    return (at if at.tzinfo else at.replace(tzinfo=UTC)) + (
        more if len(text) == 10 else timedelta()
    )


# -- a thread


@routes.get("/ui/thread")
@routes.get("/ui/thread.json")
@action("threads:read")
async def thread(
    request: Request,
    call: Caller,
    id: str,
    ns: str = "",
    before: int | None = None,
    order: int | None = None,
    newer: str | None = None,
    message: str | None = None,
) -> Response:
    """What was said by turn, what the model saw, and the change of state."""
    await call.permit({"thread_id": id})
    found = await call.threads.get(id)
    if message is not None:
        return await _to_message(call, id, ns, message)
    known = await about(call, found)
    made: dict[str, Any] = {"turns": [], "before": None, "order": None, "newer": None}
    if ns in known["namespaces"]:
        made = await turns_of(call.saver, id, ns, before, order, newer)
    return page(request, "thread.html", thread=known, ns=ns, latest=before is None, **made)


async def about(call: Call, thread: dict[str, Any]) -> dict[str, Any]:
    """A thread's row in the list, with its metadata."""
    return {**await _row(call, thread), "metadata": thread["metadata"]}


async def _to_message(call: Call, thread_id: str, ns: str, message: str) -> Response:
    """Lead to the page that has a message."""
    turns = by_turn(await call.saver.ahistory(thread_id, checkpoint_ns=ns))
    for number, turn in enumerate(turns):
        for item in turn:
            if getattr(item.value, "id", None) == message:
                after = turns[number + _AFTER :]
                end = after[0][0].position if after else None
                path = query("/ui/thread", id=thread_id, ns=ns or None, before=end)
                return RedirectResponse(f"{path}#m-{item.position}", 303)
    raise UnknownThread(f"the thread {thread_id!r} has no message {message!r}; it may be erased")


# -- parts of a thread as a whole


@routes.get("/ui/seen")
@routes.get("/ui/seen.json")
@action("threads:read")
async def seen(request: Request, call: Caller, id: str, view: str, ns: str = "") -> Response:
    """What the model was shown in a call."""
    await call.permit({"thread_id": id})
    await call.threads.get(id)
    after = f"{view}~"  # ids that no checkpoint has are compared as texts
    found = await aviews(call.saver, id, checkpoint_ns=None, limit=1, before=after)
    if not found or found[0].id != view:
        raise UnknownCheckpoint(f"nothing is recorded as {view!r} in the thread {id!r}")
    said = [shown(message) for message in found[0].messages]
    return page(request, "seen.html", thread_id=id, ns=ns, view=view_row(found[0]), items=said)


@routes.get("/ui/message")
@routes.get("/ui/message.json")
@action("threads:read")
async def message(request: Request, call: Caller, id: str, position: int, ns: str = "") -> Response:
    """A message in full."""
    await call.permit({"thread_id": id})
    await call.threads.get(id)
    for item in await call.saver.ahistory(id, checkpoint_ns=ns):
        if item.position == position:
            said = {**shown(item.value, 1 << 40), "position": position, "mark": mark(item)}
            raw = as_text(item.value)
            return page(request, "message.html", thread_id=id, ns=ns, item=said, raw=raw)
    raise UnknownThread(f"the thread {id!r} has nothing at position {position}")
