"""Pages of threads: the list, and what was said beside what the model saw and what changed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Any, Final, NamedTuple

from fastapi import Depends, Query
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from perdure.checkpointers import ThreadStatus
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.titles import atitle
from perdure.errors import ConfigurationError, UnknownCheckpoint, UnknownThread
from perdure.memory import VIEWS, aviews
from perdure.server.call import Call, Caller
from perdure.server.messages import as_text, cut, shown
from perdure.server.pages import Number, Pages, Values, moment, page, query
from perdure.server.turns import mark, turns_of, view_row

routes = Pages()
PAGE: Final = 50  # threads
_QUESTION: Final = 2_000  # characters of what waits for an answer
_TITLE: Final = 120  # characters of a title that a list shows
_AFTER: Final = 20  # messages below one that a link leads to


# -- the list


@routes.page("/ui/threads", "threads:search")
async def threads(
    request: Request,
    call: Caller,
    q: str = "",
    meta: Annotated[list[str], Query()] = [],  # noqa: B006 - as FastAPI wants it
    since: str = "",
    until: str = "",
    start: Number = 0,
) -> Response:
    """Threads, the latest activity first, of days from `since` to `until`."""
    wanted = [each for each in meta if each.strip()]
    asked = await call.permit({"metadata": dict(map(_pair, wanted))})
    found = await call.threads.search(
        metadata=asked["metadata"],
        text=q,
        active_since=moment(since),
        active_until=moment(until, days=1),
        limit=PAGE + 1,
        offset=start,
    )
    rows = await asyncio.gather(*(about(call, thread) for thread in found[:PAGE]))
    given = {"q": q, "meta": wanted, "since": since, "until": until}
    return page(
        request, "threads.html", threads=rows, given=given, start=start, more=len(found) > PAGE
    )


def _pair(text: str) -> tuple[str, Any]:
    name, found, value = text.partition("=")
    if not found or not name.strip():
        raise ConfigurationError(f"{text!r:.80} is no filter by metadata; expected key=value")
    return name.strip(), value.strip()


async def about(call: Call, thread: dict[str, Any]) -> Values:
    """What pages say of a thread."""
    metadata, thread_id = thread["metadata"], thread["thread_id"]
    row = {
        "thread_id": thread_id,
        "title": "",
        "owner": metadata.get("owner"),
        "status": thread.get("status"),
        **_open(ThreadStatus()),
        "messages": 0,
        "namespaces": [],
        "size": 0,
        "updated_at": thread["updated_at"],
        "active_at": thread["updated_at"],
    }
    with suppress(UnknownThread):  # it had no turn
        info = await call.saver.athread(thread_id)
        row |= {"size": info.size_bytes, "active_at": info.active_at, "messages": info.messages}
        row["namespaces"] = sorted(ns for ns in info.namespaces if ns != VIEWS)
        row |= _open((await call.saver.ahead(thread_id)).status)
        row["title"] = cut(thread["title"], _TITLE)[0]
    return row


def _open(status: ThreadStatus) -> Values:
    """Whether a run is unfinished, what waits for an answer, and the nodes that are to run."""
    waits = [
        {"node": node, "text": cut(as_text(question), _QUESTION)[0]}
        for node, question in status.questions
    ]
    return {"state": status.state, "waits": waits, "next": [*dict.fromkeys(status.next)]}


async def titles(saver: Checkpointer, ids: Iterable[str]) -> dict[str, str]:
    """The titles of threads, as lists show them, by their ids; of one that has none, `""`."""
    named = tuple(dict.fromkeys(ids))
    texts = await asyncio.gather(*(atitle(saver, thread_id) for thread_id in named))
    return {thread_id: cut(text, _TITLE)[0] for thread_id, text in zip(named, texts, strict=True)}


# -- a thread


class Asked(NamedTuple):
    """The thread that a request is about, once it is permitted, and a namespace of it."""

    call: Call
    id: str
    ns: str
    thread: dict[str, Any]

    @property
    def saver(self) -> Checkpointer:
        """Where its checkpoints are."""
        return self.call.saver

    @property
    def named(self) -> Values:
        """The arguments of links to it."""
        return {"id": self.id, "ns": self.ns}

    async def about(self) -> Values:
        """What pages say of it."""
        return await about(self.call, self.thread)


async def _asked(call: Caller, id: str, ns: str = "") -> Asked:
    await call.permit({"thread_id": id})
    return Asked(call, id, ns, await call.threads.get(id))


OfThread = Annotated[Asked, Depends(_asked)]
"""An endpoint's argument."""


@routes.page("/ui/thread", "threads:read")
async def thread(
    request: Request,
    of: OfThread,
    before: Number | None = None,
    order: Number | None = None,
    message: str | None = None,
) -> Response:
    """What was said by turn, what the model saw, and the change of state."""
    if message is not None:
        return await _to_message(of, message)
    known = {**await of.about(), "metadata": of.thread["metadata"]}
    made: Values = {"turns": [], "before": None, "order": None}
    if of.ns in known["namespaces"]:
        made = await turns_of(of.saver, of.id, of.ns, before, order)
    return page(request, "thread.html", thread=known, **of.named, latest=before is None, **made)


async def _to_message(of: Asked, message: str) -> Response:
    """Lead to the page that has a message, and some below it."""
    items = await of.saver.ahistory(of.id, checkpoint_ns=of.ns)
    for number, item in enumerate(items):
        if getattr(item.value, "id", None) == message:
            end = next((below.position for below in items[number + _AFTER :]), None)
            path = query("/ui/thread", **of.named, before=end)
            return RedirectResponse(f"{path}#m-{item.position}", 303)
    raise UnknownThread(f"the thread {of.id!r} has no message {message!r}; it may be erased")


# -- parts of a thread as a whole


@routes.page("/ui/seen", "threads:read")
async def seen(request: Request, of: OfThread, view: str) -> Response:
    """What the model was shown in a call."""
    after = f"{view}~"  # ids that no checkpoint has are compared as texts
    found = await aviews(of.saver, of.id, checkpoint_ns=None, limit=1, before=after)
    if not found or found[0].id != view:
        raise UnknownCheckpoint(f"nothing is recorded as {view!r} in the thread {of.id!r}")
    said = [shown(message) for message in found[0].messages]
    return page(
        request,
        "seen.html",
        **of.named,
        view=await asyncio.to_thread(view_row, found[0]),
        items=said,
    )


@routes.page("/ui/message", "threads:read")
async def message(request: Request, of: OfThread, position: Number) -> Response:
    """A message in full."""
    for item in await of.saver.ahistory(of.id, checkpoint_ns=of.ns):
        if item.position == position:
            said = {**shown(item.value, 1 << 40), "position": position, "mark": mark(item)}
            return page(request, "message.html", **of.named, item=said, raw=as_text(item.value))
    raise UnknownThread(f"the thread {of.id!r} has nothing at position {position}")
