"""Pages of threads: the list, and what was said beside what the model saw and what changed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import accumulate, pairwise
from typing import Annotated, Any, Final, NamedTuple

from fastapi import Depends, Query
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from perdure.checkpointers import CheckpointInfo, HistoryItem, StateDifference, ThreadStatus
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.labels import describe_actions_of_other_users
from perdure.checkpointers.thread_list import ThreadList, ThreadQuery
from perdure.errors import ConfigurationError, UnknownCheckpoint, UnknownThread
from perdure.memory import VIEWS_NAMESPACE, ModelView, aviews
from perdure.server.call import Call, CurrentCall
from perdure.server.pages import LONG, Number, Pages, Values, changes, moment, page, query, shown
from perdure.server.pages_runs import begins, talk_of
from perdure.server.reply import format_as_text, truncate_text
from perdure.server.runs import ServerRuns
from perdure.settings import SHOWN_LIMIT

routes = Pages()
PAGE: Final = 50  # threads
_WAIT_S: Final = 1.0  # for threads to be read that have changed, before hits are shown
_REFRESH_S: Final = 2
_QUESTION: Final = 2_000  # characters of what waits for an answer
_TITLE: Final = 120  # characters of a title that a list shows
_AFTER: Final = 20  # messages below one that a link leads to


# -- the list


@routes.page("/ui/threads", "threads:search")
async def threads(
    request: Request,
    call: CurrentCall,
    runs: ServerRuns,
    q: str = "",
    meta: Annotated[list[str], Query()] = [],  # noqa: B006 - as FastAPI wants it
    since: str = "",
    until: str = "",
    start: Number = 0,
) -> Response:
    """Threads, the latest activity first, of days from `since` to `until`."""
    wanted = [each for each in meta if each.strip()]
    asked = await call.permit({"metadata": dict(map(_pair, wanted))})
    conditions = ThreadQuery(
        metadata=asked["metadata"],
        text=q,
        active_since=moment(since),
        active_until=moment(until, days=1),
    )
    found = await call.threads.search(conditions, PAGE + 1, start)
    rows = await asyncio.gather(*(about(call, thread) for thread in found[:PAGE]))
    hits = await call.search_transcripts(q, replace(conditions, text=""), SHOWN_LIMIT, _WAIT_S)
    said = [
        {
            **asdict(hit),
            "title": truncate_text(hit.title, _TITLE)[0],
            "link": hit.link,
            "excerpt": hit.excerpt(),
            "text": truncate_text(hit.text, LONG)[0],
        }
        for hit in hits
    ]
    given = {"q": q, "meta": wanted, "since": since, "until": until}
    made = page(
        request,
        "threads.html",
        threads=rows,
        said=said,
        unread=hits.unread,
        begins=bool([*runs.graphs])
        and await begins(call.with_action("threads:create")) is not None,
        given=given,
        start=start,
        more=len(found) > PAGE,
    )
    if hits.unread:  # a browser asks again, and shows what was read meanwhile
        made.headers["Refresh"] = str(_REFRESH_S)
    return made


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
        row["namespaces"] = sorted(ns for ns in info.namespaces if ns != VIEWS_NAMESPACE)
        row |= _open(await call.saver.astatus(thread_id))
        row["title"] = truncate_text(thread["title"], _TITLE)[0]
    return row


def _open(status: ThreadStatus) -> Values:
    """Whether a run is unfinished, what waits for an answer, and the nodes that are to run."""
    waits = [
        {"node": node, "text": truncate_text(format_as_text(question), _QUESTION)[0]}
        for node, question in status.questions
    ]
    return {"state": status.state, "waits": waits, "next": [*dict.fromkeys(status.next)]}


async def titles(saver: Checkpointer, ids: Iterable[str]) -> dict[str, str]:
    """The titles of threads, as lists show them, by their ids; of one that has none, `""`."""
    named = dict.fromkeys(ids, "")
    pairs = await ThreadList(saver).asearch(
        ThreadQuery(ids=[*named]),
        lambda thread: (thread.thread_id, truncate_text(thread.title, _TITLE)[0]),
        len(named),
    )
    return named | dict(pairs)


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


async def _asked(call: CurrentCall, id: str, ns: str = "") -> Asked:
    return Asked(call, id, ns, await call.permit_thread(id))


OfThread = Annotated[Asked, Depends(_asked)]
"""An endpoint's argument."""


@routes.page("/ui/thread", "threads:read")
async def thread(
    request: Request,
    of: OfThread,
    runs: ServerRuns,
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
    made |= {"latest": before is None, "talk": None}
    if before is None and not of.ns:
        made["talk"] = await talk_of(of.call, runs, of.thread, known["waits"])
    return page(request, "thread.html", thread=known, **of.named, **made)


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
            said = {**build_item_row(item, 1 << 40), "position": position}
            return page(
                request, "message.html", **of.named, item=said, raw=format_as_text(item.value)
            )
    raise UnknownThread(f"the thread {of.id!r} has nothing at position {position}")


# -- a thread by turns: messages, what the model was shown, changes of state


Step = tuple[CheckpointInfo, StateDifference]
"""A checkpoint, and what changed in it."""
TURNS: Final = 30
_ITEMS: Final = 240  # messages of a page, at most
_BATCH: Final = 200  # checkpoints read at once
_VIEWS: Final = 100  # views listed at once
_MOST_STEPS: Final = 400  # of a page
_READ: Final = 2_000  # messages of all the views that a page reads, which are the newest


def by_turn(items: Iterable[HistoryItem]) -> list[list[HistoryItem]]:
    """Items cut before each message of a human."""
    turns: list[list[HistoryItem]] = []
    for item in items:
        if not turns or getattr(item.value, "type", None) == "human":
            turns.append([])
        turns[-1].append(item)
    return turns


async def turns_of(
    saver: Checkpointer, thread_id: str, ns: str, before: int | None, order: int | None
) -> dict[str, Any]:
    """The newest turns that begin before a message's position and a checkpoint's order.

    The `before` and `order` that it returns are those of the page above; None: this is the first.
    """
    items = await saver.ahistory(thread_id, checkpoint_ns=ns, ends=(0, _ITEMS + 1), before=before)
    turns = by_turn(items) or [[]]
    more = len(items) > _ITEMS or len(turns) > TURNS
    if len(items) > _ITEMS and len(turns) > 1:
        turns = turns[1:]  # the first one may begin on the page above
    turns = turns[-TURNS:]
    steps, is_cut = await _steps(saver, thread_id, ns, order, turns[0][0].position if more else 0)
    steps_of = _steps_by_turn(turns, steps, more)
    if is_cut:  # the first turn that has steps may have more of them
        whole = [n for n, each in enumerate(steps_of) if each][:2] or [0]
        turns, steps_of, more = turns[whole[-1] :], steps_of[whole[-1] :], True
    began = next((each[0][0].order for each in steps_of if each), order)
    views = await _views(saver, thread_id, ns, order, began) if steps else {}
    return {
        "turns": [_turn(turn, steps_of[n], views) for n, turn in enumerate(turns)],
        "before": turns[0][0].position if more and turns[0] else None,
        "order": began if more else None,
    }


async def _steps(
    saver: Checkpointer, thread_id: str, ns: str, order: int | None, first: int
) -> tuple[list[Step], bool]:
    """The checkpoints since the message at position `first`; whether any were left out."""
    steps: list[Step] = []
    while len(steps) < _MOST_STEPS:
        infos = await saver.acheckpoints(thread_id, checkpoint_ns=ns, limit=_BATCH, before=order)
        pairs = [(info.parent_id, info.checkpoint_id) for info in infos]
        found = await saver.adifferences(thread_id, pairs, checkpoint_ns=ns)
        for step in zip(infos, found, strict=True):
            if max(_added(step), default=first) < first:
                return steps[::-1], False
            steps.append(step)
        if len(infos) < _BATCH:
            return steps[::-1], False
        order = infos[-1].order
    return steps[::-1], True


def _steps_by_turn(
    turns: Sequence[Sequence[HistoryItem]], steps: Iterable[Step], more: bool
) -> list[list[Step]]:
    """The checkpoints of each turn: it has those from its input on, until the next one's input."""
    turn_of = {item.position: n for n, turn in enumerate(turns) for item in turn}
    steps_of: list[list[Step]] = [[] for _ in turns]
    at = None if more else 0  # the first checkpoints may be of a turn above
    waiting: list[Step] = []  # an input and what follows, until a message tells their turn
    for step in steps:
        waiting.append(step)
        here = [turn_of[place] for place in _added(step) if place in turn_of]
        if here:
            at = max(here)
        elif waiting[0][0].metadata.get("source") == "input":
            continue
        if at is not None:
            steps_of[at] += waiting
        waiting = []
    steps_of[-1] += waiting
    return steps_of


def _added(step: Step) -> list[int]:
    """The positions of the messages that a checkpoint added."""
    messages = step[1].channels.get("messages")
    return [*messages.added] if messages and not messages.whole else []


async def _views(
    saver: Checkpointer, thread_id: str, ns: str, order: int | None, began: int | None
) -> dict[str, list[dict[str, Any]]]:
    """The views after `began` and before `order`, by the checkpoint from which a model was called.

    The newest are read; of the others only their number of messages is known.
    """
    infos: list[CheckpointInfo] = []
    while order is None or began is None or order > began:
        found = await saver.acheckpoints(
            thread_id, checkpoint_ns=VIEWS_NAMESPACE, limit=_VIEWS, before=order
        )
        since = [each for each in found if began is None or each.order > began]
        infos += [each for each in since if ns in each.metadata["parents"]]
        if len(found) < _VIEWS:
            break
        order = found[-1].order
    if not infos:
        return {}
    sizes = {info.checkpoint_id: sum(info.counts.values()) for info in infos}
    read = max(1, sum(total <= _READ for total in accumulate(sizes.values())))
    after = f"{infos[0].checkpoint_id}~"  # ids that no checkpoint has are compared as texts
    views = await aviews(saver, thread_id, checkpoint_ns=ns, limit=read, before=after)
    known = await asyncio.to_thread(lambda: {view.id: view_row(view) for view in views})
    rows: dict[str, list[dict[str, Any]]] = {}
    for info in reversed(infos):
        id = info.checkpoint_id
        row = known.get(id) or {"id": id, "messages": sizes[id], "parts": None}
        rows.setdefault(info.metadata["parents"][ns], []).append(row)
    return rows


# -- a turn in the form of the page


def _turn(
    items: Sequence[HistoryItem], steps: Sequence[Step], views: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    in_state = None  # messages before the first answer
    for (info, _), (_, change) in pairwise(steps):
        new = change.channels.get("messages")
        if new and any(getattr(each, "type", None) == "ai" for each in new.added.values()):
            in_state = info.counts.get("messages")
            break
    return {
        "items": [{**build_item_row(item), "position": item.position} for item in items],
        "views": [row for info, _ in steps for row in views.get(info.checkpoint_id, ())],
        "deeds": describe_actions_of_other_users(info.metadata for info, _ in steps),
        "held": in_state,
        "steps": [_step_row(info, change) for info, change in steps],
    }


def build_item_row(item: HistoryItem, long: int = LONG) -> dict[str, Any]:
    """Build the template data of an item, with its mark and its time.

    The time is the time in the message itself, if any, otherwise the time of its first storage.
    """
    row = shown(item.value, long)
    return {**row, "at": row["at"] or item.stored_at, "mark": find_mark(item)}


def find_mark(item: HistoryItem) -> str:
    """Return "seen", "removed", "branch" or "unknown" for the relation of an item to the state."""
    if item.seen is None:
        return "unknown"
    return "seen" if item.seen else "branch" if item.branch else "removed"


def view_row(view: ModelView) -> dict[str, Any]:
    """A view with its tokens by part, and where each part begins in the bar of all."""
    parts = view.parts
    starts = accumulate(parts.values(), initial=0)
    names = ("id", "checkpoint_id", "at", "node", "model")
    return {
        **{name: getattr(view, name) for name in names},
        "messages": len(view.messages),
        "parts": [
            {"name": name, "tokens": tokens, "start": start}
            for (name, tokens), start in zip(parts.items(), starts, strict=False)
        ],
        "tokens": sum(parts.values()),
    }


def _step_row(info: CheckpointInfo, change: StateDifference) -> dict[str, Any]:
    """A checkpoint with what changed in it, channel by channel."""
    return {
        "checkpoint_id": info.checkpoint_id,
        "step": info.metadata.get("step"),
        "source": info.metadata.get("source"),
        "ts": info.ts,
        "ran": change.ran,
        "next": [node for node in dict.fromkeys(info.next) if not node.startswith("__")],
        "is_head": info.is_head,
        "is_branch": info.is_branch,
        "changes": changes(change),
    }
