"""Thread pages: the list of threads, and each thread's messages, model views and state changes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import accumulate, pairwise
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

from fastapi import Depends, Query
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from perdure.checkpointers import CheckpointInfo, HistoryItem, StateDifference, ThreadStatus
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.labels import describe_actions_of_callers_other_than_person
from perdure.errors import ConfigurationError, UnknownCheckpoint, UnknownThread
from perdure.memory import VIEWS_NAMESPACE, ModelView, aviews
from perdure.run_tables.thread_list import RunStatus, ThreadList, ThreadQuery
from perdure.server.http.access import Forbidden
from perdure.server.http.call import Call, CurrentCall
from perdure.server.http.reply import format_as_text, truncate_and_count_omitted
from perdure.server.pages.rendering import (
    MAX_TEXT_CHARS,
    NonNegativeNumber,
    Pages,
    PageValues,
    build_change_rows,
    build_link,
    build_message_row,
    parse_form_datetime,
    render_page,
)
from perdure.server.pages.run_pages import get_new_thread_metadata_if_permitted, load_conversation
from perdure.server.runs.run_manager import ServerRuns
from perdure.settings import SHOWN_LIMIT

routes = Pages()
THREADS_PER_PAGE: Final = 50
# Maximum number of threads that are counted for a search whose conditions SQL cannot check.
_MAX_COUNTED_THREADS: Final = 1_000
# Maximum time, in seconds, that a search waits for changed threads to be indexed.
_MAX_INDEX_WAIT_S: Final = 1.0
# Number of seconds after which a browser reloads search results while threads are being indexed.
_PAGE_REFRESH_S: Final = 2
# Maximum number of characters that a page shows from a pending interrupt's text.
_MAX_QUESTION_CHARS: Final = 2_000
# Maximum number of characters shown for a thread's title in a list.
_MAX_TITLE_CHARS: Final = 120
# Maximum number of messages that a page shows from a linked message onwards: the linked message
# itself and up to 19 later ones.
_MESSAGES_AFTER_TARGET: Final = 20


# -- the list of threads


@routes.add_page_and_json_routes("/ui/threads", "threads:search")
async def show_threads(
    request: Request,
    call: CurrentCall,
    runs: ServerRuns,
    q: str = "",
    meta: Annotated[list[str], Query()] = [],  # noqa: B006 - FastAPI requires this default
    status: Literal["", RunStatus] = "",
    user: str = "",
    since: str = "",
    until: str = "",
    start: NonNegativeNumber = 0,
) -> Response:
    """Show the threads that match the filters, sorted by their latest activity, newest first.

    Args:
        request: The request.
        call: The permitted call.
        runs: The run manager of the server.
        q: Text that is searched in titles, ids and messages.
        meta: Filters by metadata, each `key=value`.
        status: Show only threads with this status; empty shows all.
        user: Show only threads of this user; empty shows all. Other users' threads are shown only
            to admins and to users whom an authorization handler permits.
        since: Show only threads whose latest activity was on this day or later.
        until: Show only threads whose latest activity was on this day or earlier.
        start: The number of threads to skip.
    """
    metadata_filters = [metadata_filter for metadata_filter in meta if metadata_filter.strip()]
    requested_metadata = dict(map(_parse_metadata_filter, metadata_filters))
    if user.strip():
        requested_metadata["owner"] = user.strip()
    permitted = await call.authorize_action_arguments({"metadata": dict(requested_metadata)})
    _refuse_other_owner(call, requested_metadata, permitted["metadata"])
    conditions = ThreadQuery(
        metadata=permitted["metadata"],
        text=q,
        status=status or None,
        active_since=parse_form_datetime(since),
        active_until=parse_form_datetime(until, days_to_add=1),
    )
    matching_threads = await call.threads.search(conditions, THREADS_PER_PAGE + 1, start)
    thread_count, has_more_than_counted = await call.threads.count_up_to(
        conditions, _MAX_COUNTED_THREADS
    )
    rows = await asyncio.gather(
        *(load_thread_page_values(call, thread) for thread in matching_threads[:THREADS_PER_PAGE])
    )
    hits = await call.search_transcripts(
        q, replace(conditions, text=""), SHOWN_LIMIT, _MAX_INDEX_WAIT_S
    )
    hit_rows = [
        {
            **asdict(hit),
            "title": truncate_and_count_omitted(hit.title, _MAX_TITLE_CHARS)[0],
            "link": hit.link,
            "excerpt": hit.split_excerpt_at_matches(),
            "text": truncate_and_count_omitted(hit.text, MAX_TEXT_CHARS)[0],
        }
        for hit in hits
    ]
    response = render_page(
        request,
        "threads.html",
        threads=rows,
        said=hit_rows,
        unread=hits.unread,
        begins=bool([*runs.graphs])
        and await get_new_thread_metadata_if_permitted(call.with_action("threads:create"))
        is not None,
        given={
            **{"q": q, "meta": metadata_filters, "status": status, "user": user.strip()},
            **{"since": since, "until": until},
        },
        statuses=get_args(RunStatus),
        count=thread_count,
        has_more_than_counted=has_more_than_counted,
        may_choose_user=call.identity.is_admin,
        start=start,
        more=len(matching_threads) > THREADS_PER_PAGE,
    )
    if hits.unread:
        # The search may have missed hits in threads that are not indexed yet. Tell the browser to
        # reload the search results later, so that it shows these hits, too.
        response.headers["Refresh"] = str(_PAGE_REFRESH_S)
    return response


def _refuse_other_owner(
    call: Call, requested: Mapping[str, Any], permitted: Mapping[str, Any]
) -> None:
    """Raise an error if the threads of one user are requested, but those of another are permitted.

    An authorization rule may replace the requested `owner` with the caller. Without this check, the
    page would show the caller's threads as if they belonged to the requested user.

    Raises:
        Forbidden: The permitted owner differs from the requested owner.
    """
    if "owner" in requested and permitted.get("owner", requested["owner"]) != requested["owner"]:
        raise Forbidden(
            f"the user {call.identity.user!r} is not allowed to list the threads of "
            f"{requested['owner']!r:.80}; clear the field 'User' to list your own threads"
        )


def _parse_metadata_filter(text: str) -> tuple[str, Any]:
    """Split a filter such as `key=value` into its key and value."""
    name, separator, value = text.partition("=")
    if not separator or not name.strip():
        raise ConfigurationError(f"{text!r:.80} is not a metadata filter; expected key=value")
    return name.strip(), value.strip()


async def load_thread_page_values(call: Call, thread: dict[str, Any]) -> PageValues:
    """Load the template data for a thread, such as its title, status and size.

    A thread without any checkpoint has size 0 and no title.
    """
    metadata, thread_id = thread["metadata"], thread["thread_id"]
    row = {
        "thread_id": thread_id,
        "title": "",
        "owner": metadata.get("owner"),
        "status": thread.get("status"),
        **_build_thread_status_values(ThreadStatus()),
        "messages": 0,
        "namespaces": [],
        "size": 0,
        "updated_at": thread["updated_at"],
        "active_at": thread["updated_at"],
    }
    with suppress(UnknownThread):  # The thread has no checkpoint yet.
        info = await call.saver.athread(thread_id)
        row |= {
            "size": info.size_bytes,
            "active_at": info.active_at,
            "messages": info.messages,
            "namespaces": sorted(ns for ns in info.namespaces if ns != VIEWS_NAMESPACE),
        }
        row |= _build_thread_status_values(await call.saver.astatus(thread_id))
        row["title"] = truncate_and_count_omitted(thread["title"], _MAX_TITLE_CHARS)[0]
    return row


def _build_thread_status_values(status: ThreadStatus) -> PageValues:
    """Build the template data for a thread's state, pending interrupts and next nodes."""
    questions = [
        {
            "node": node,
            "text": truncate_and_count_omitted(format_as_text(question), _MAX_QUESTION_CHARS)[0],
        }
        for node, question in status.questions
    ]
    return {"state": status.state, "waits": questions, "next": [*dict.fromkeys(status.next)]}


async def load_thread_titles(saver: Checkpointer, thread_ids: Iterable[str]) -> dict[str, str]:
    """Load thread titles, shortened for display in a list.

    Returns:
        The title of each thread by its id. A thread without a title has the title "".
    """
    titles_by_id = dict.fromkeys(thread_ids, "")
    pairs = await ThreadList(saver).asearch(
        ThreadQuery(ids=[*titles_by_id]),
        lambda thread: (
            thread.thread_id,
            truncate_and_count_omitted(thread.title, _MAX_TITLE_CHARS)[0],
        ),
        len(titles_by_id),
    )
    return titles_by_id | dict(pairs)


# -- one thread


class ThreadTarget(NamedTuple):
    """A thread that the caller may access, and the checkpoint namespace named in the request."""

    call: Call
    id: str
    ns: str
    thread: dict[str, Any]

    @property
    def saver(self) -> Checkpointer:
        """The checkpointer that stores the thread."""
        return self.call.saver

    @property
    def link_arguments(self) -> PageValues:
        """The query parameters of links to the thread's pages: thread id and namespace."""
        return {"id": self.id, "ns": self.ns}

    async def load_row(self) -> PageValues:
        """Load the template data for this thread; see `load_thread_page_values`."""
        return await load_thread_page_values(self.call, self.thread)


async def _permit_thread(call: CurrentCall, id: str, ns: str = "") -> ThreadTarget:
    """Check that the caller is permitted to access the thread, and return a `ThreadTarget`."""
    thread = await call.permit_thread(id)
    await call.require_model_view_access(id, ns)
    return ThreadTarget(call, id, ns, thread)


PermittedThread = Annotated[ThreadTarget, Depends(_permit_thread)]
"""The type of an endpoint's parameter that receives the permitted thread."""


@routes.add_page_and_json_routes("/ui/thread", "threads:read")
async def show_thread(
    request: Request,
    target: PermittedThread,
    runs: ServerRuns,
    before: NonNegativeNumber | None = None,
    order: NonNegativeNumber | None = None,
    message: str | None = None,
) -> Response:
    """Show a thread turn by turn, with its messages, model views and state changes.

    Args:
        request: The request.
        target: The thread and its namespace.
        runs: The run manager of the server.
        before: Show turns before the message at this position.
        order: Show checkpoints before the one with this order number; see `CheckpointInfo.order`.
        message: The id of a message; the reply redirects to the page that contains it.
    """
    if message is not None:
        return await _redirect_to_message(target, message)
    thread_row = {**await target.load_row(), "metadata": target.thread["metadata"]}
    values: PageValues = (
        await load_page_of_turns(target.saver, target.id, target.ns, before, order)
        if target.ns in thread_row["namespaces"]
        else {"turns": [], "before": None, "order": None}
    )
    values |= {"latest": before is None, "talk": None}
    if before is None and not target.ns:
        values["talk"] = await load_conversation(
            target.call, runs, target.thread, thread_row["waits"]
        )
    return render_page(request, "thread.html", thread=thread_row, **target.link_arguments, **values)


async def _redirect_to_message(target: ThreadTarget, message_id: str) -> Response:
    """Redirect to the thread page that shows a given message.

    After the requested message, the page shows up to 19 later messages.
    """
    items = await target.saver.ahistory(target.id, checkpoint_ns=target.ns)
    for index, item in enumerate(items):
        if getattr(item.value, "id", None) == message_id:
            end_position = next(
                (later_item.position for later_item in items[index + _MESSAGES_AFTER_TARGET :]),
                None,
            )
            path = build_link("/ui/thread", **target.link_arguments, before=end_position)
            return RedirectResponse(f"{path}#m-{item.position}", 303)
    raise UnknownThread(
        f"the thread {target.id!r} has no message {message_id!r}; the message might have "
        "been erased"
    )


# -- a model view and a message in full


@routes.add_page_and_json_routes("/ui/seen", "threads:read")
async def show_model_view(request: Request, target: PermittedThread, view: str) -> Response:
    """Show the messages that were sent to a model in one call."""
    await target.call.require_model_view_access(target.id)
    # Read the newest view whose id is less than `end_id`. The id of a view followed by "~" sorts
    # directly after the id of the view, so the newest view before `end_id` is the requested view.
    # No view has the id `end_id`, and an id that does not exist is compared with other ids as text.
    end_id = f"{view}~"
    views = await aviews(target.saver, target.id, checkpoint_ns=None, limit=1, before=end_id)
    if not views or views[0].id != view:
        raise UnknownCheckpoint(
            f"the thread {target.id!r} has no recorded model input with the id "
            f"{view!r}; reload the page of the thread"
        )
    return render_page(
        request,
        "seen.html",
        **target.link_arguments,
        view=await asyncio.to_thread(build_model_view_row, views[0]),
        items=[build_message_row(message) for message in views[0].messages],
    )


@routes.add_page_and_json_routes("/ui/message", "threads:read")
async def show_message(
    request: Request, target: PermittedThread, position: NonNegativeNumber
) -> Response:
    """Show a message with its full text."""
    for item in await target.saver.ahistory(target.id, checkpoint_ns=target.ns):
        if item.position == position:
            return render_page(
                request,
                "message.html",
                **target.link_arguments,
                item={**build_item_row(item, 1 << 40), "position": position},
                raw=format_as_text(item.value),
            )
    raise UnknownThread(
        f"the thread {target.id!r} has no message at position {position}; open the thread again"
    )


# -- a thread by turns: messages, model views and changes of the state


Step = tuple[CheckpointInfo, StateDifference]
"""A checkpoint and its difference from its parent."""
TURNS_PER_PAGE: Final = 30
_MAX_ITEMS: Final = 240  # Maximum number of messages on a page.
_CHECKPOINT_BATCH: Final = 200  # Maximum number of checkpoints that one query reads.
# Maximum number of recorded model inputs (model views) that one query returns.
_VIEW_BATCH: Final = 100
# Approximate maximum number of checkpoints on one page of a thread. Older checkpoints are shown on
# another page, together with the thread's earlier messages.
_MAX_STEPS: Final = 400
# Maximum total number of messages that one page loads for model views. A model view records the
# messages that a model received in one call. The newest model views are loaded first.
_MAX_VIEW_MESSAGES: Final = 2_000


def split_into_turns(items: Iterable[HistoryItem]) -> list[list[HistoryItem]]:
    """Split the items of a thread into turns. Every human message begins a new turn."""
    turns: list[list[HistoryItem]] = []
    for item in items:
        if not turns or getattr(item.value, "type", None) == "human":
            turns.append([])
        turns[-1].append(item)
    return turns


async def load_page_of_turns(
    saver: Checkpointer,
    thread_id: str,
    ns: str,
    before_position: int | None,
    before_checkpoint_order: int | None,
) -> dict[str, Any]:
    """Load the turns for one page: the newest turns before a given message position in a thread.

    Args:
        saver: The checkpointer of the thread.
        thread_id: The thread.
        ns: The checkpoint namespace.
        before_position: Load messages before this position; None loads the newest.
        before_checkpoint_order: Load checkpoints before the one with this order number; None loads
            the newest.

    Returns:
        A dict with `turns`, oldest first, and with `before` and `order`, which are the arguments
            for loading the page of earlier turns. `before` and `order` are None if there are no
            earlier turns.
    """
    items = await saver.ahistory(
        thread_id, checkpoint_ns=ns, ends=(0, _MAX_ITEMS + 1), before=before_position
    )
    turns = split_into_turns(items) or [[]]
    has_earlier = len(items) > _MAX_ITEMS or len(turns) > TURNS_PER_PAGE
    if len(items) > _MAX_ITEMS and len(turns) > 1:
        # Drop the oldest loaded turn, because it may be incomplete.
        turns = turns[1:]
    turns = turns[-TURNS_PER_PAGE:]
    steps, is_cut = await _load_steps_and_whether_truncated(
        saver, thread_id, ns, before_checkpoint_order, turns[0][0].position if has_earlier else 0
    )
    turn_steps = _group_checkpoints_by_turn(turns, steps, has_earlier)
    if is_cut:
        # Only about `_MAX_STEPS` checkpoints were loaded, so the earliest turn with checkpoints may
        # be incomplete. Start the page with the next turn that has checkpoints, if one exists.
        turns_with_steps = [index for index, step_list in enumerate(turn_steps) if step_list][
            :2
        ] or [0]
        turns, turn_steps, has_earlier = (
            turns[turns_with_steps[-1] :],
            turn_steps[turns_with_steps[-1] :],
            True,
        )
    first_order = next(
        (step_list[0][0].order for step_list in turn_steps if step_list), before_checkpoint_order
    )
    views = (
        await _load_model_view_rows(saver, thread_id, ns, before_checkpoint_order, first_order)
        if steps
        else {}
    )
    return {
        "turns": [
            _build_turn_row(turn, turn_steps[index], views) for index, turn in enumerate(turns)
        ],
        "before": turns[0][0].position if has_earlier and turns[0] else None,
        "order": first_order if has_earlier else None,
    }


async def _load_steps_and_whether_truncated(
    saver: Checkpointer,
    thread_id: str,
    ns: str,
    before_checkpoint_order: int | None,
    first_position: int,
) -> tuple[list[Step], bool]:
    """Load the newest checkpoints of a thread, oldest first.

    Checkpoints are read newest first. Reading stops at the first checkpoint whose added messages
    all come before `first_position` in the thread. The returned list excludes the checkpoint at
    which reading stopped.

    Returns:
        The checkpoints with their changes, and whether older checkpoints were left out because of
            `_MAX_STEPS`.
    """
    steps: list[Step] = []
    while len(steps) < _MAX_STEPS:
        infos = await saver.acheckpoints(
            thread_id, checkpoint_ns=ns, limit=_CHECKPOINT_BATCH, before=before_checkpoint_order
        )
        differences = await saver.adifferences(
            thread_id,
            [(info.parent_id, info.checkpoint_id) for info in infos],
            checkpoint_ns=ns,
        )
        for step in zip(infos, differences, strict=True):
            if max(_added_message_positions(step), default=first_position) < first_position:
                return steps[::-1], False
            steps.append(step)
        if len(infos) < _CHECKPOINT_BATCH:
            return steps[::-1], False
        before_checkpoint_order = infos[-1].order
    return steps[::-1], True


def _group_checkpoints_by_turn(
    turns: Sequence[Sequence[HistoryItem]], steps: Iterable[Step], has_earlier_turns: bool
) -> list[list[Step]]:
    """Assign checkpoints to turns.

    A turn starts with the checkpoint that stores its input, and ends just before the checkpoint
    that stores the next turn's input.

    Args:
        turns: The items of each turn, oldest first.
        steps: The checkpoints, oldest first.
        has_earlier_turns: Whether the thread has earlier turns than the first turn in `turns`. If
            True, the first checkpoints are dropped, because they may belong to an earlier turn.
    """
    turn_by_position = {item.position: index for index, turn in enumerate(turns) for item in turn}
    turn_steps: list[list[Step]] = [[] for _ in turns]
    # Index in `turns` of the turn to which the current checkpoint belongs, or None if this turn is
    # not known yet. If `turns` does not start with the thread's first turn, the index is None until
    # a checkpoint adds a message from one of the turns in `turns`.
    current_turn = None if has_earlier_turns else 0
    # Checkpoints that have not been assigned to a turn yet. A run's input checkpoint waits in the
    # list until a later checkpoint adds the turn's message.
    unassigned: list[Step] = []
    for step in steps:
        unassigned.append(step)
        message_turns = [
            turn_by_position[position]
            for position in _added_message_positions(step)
            if position in turn_by_position
        ]
        if message_turns:
            current_turn = max(message_turns)
        elif unassigned[0][0].metadata.get("source") == "input":
            continue
        if current_turn is not None:
            turn_steps[current_turn] += unassigned
        unassigned = []
    turn_steps[-1] += unassigned
    return turn_steps


def _added_message_positions(step: Step) -> list[int]:
    """Return the position of each message that a checkpoint added to the thread's messages."""
    messages = step[1].channels.get("messages")
    return [*messages.added] if messages and not messages.whole else []


async def _load_model_view_rows(
    saver: Checkpointer, thread_id: str, ns: str, before_order: int | None, after_order: int | None
) -> dict[str, list[dict[str, Any]]]:
    """Load the recorded inputs of model calls (model views) between two checkpoints.

    A model view records the messages that a model received in one call. The messages that a model
    received are loaded only for the newest model calls. For older model views, only the number of
    messages is loaded.

    Args:
        saver: The checkpointer of the thread.
        thread_id: The thread.
        ns: The checkpoint namespace of the calls.
        before_order: Load views before this order number; None loads the newest.
        after_order: Load views after this order number; None loads from the first.

    Returns:
        The template data of views, oldest first, by the id of the checkpoint from which the model
            was called.
    """
    infos: list[CheckpointInfo] = []
    while before_order is None or after_order is None or before_order > after_order:
        batch = await saver.acheckpoints(
            thread_id, checkpoint_ns=VIEWS_NAMESPACE, limit=_VIEW_BATCH, before=before_order
        )
        newer_infos = [info for info in batch if after_order is None or info.order > after_order]
        infos += [info for info in newer_infos if ns in info.metadata["parents"]]
        if len(batch) < _VIEW_BATCH:
            break
        before_order = batch[-1].order
    if not infos:
        return {}
    message_counts = {info.checkpoint_id: sum(info.counts.values()) for info in infos}
    read_count = max(
        1, sum(total <= _MAX_VIEW_MESSAGES for total in accumulate(message_counts.values()))
    )
    # Read the newest model views whose ids are less than `end_id`. The id of a model view followed
    # by "~" sorts directly after the id of the model view, so the newest model view is included. No
    # model view has the id `end_id`, and an id that does not exist is compared with other ids as
    # text.
    end_id = f"{infos[0].checkpoint_id}~"
    views = await aviews(saver, thread_id, checkpoint_ns=ns, limit=read_count, before=end_id)
    rows_by_id = await asyncio.to_thread(
        lambda: {view.id: build_model_view_row(view) for view in views}
    )
    rows: dict[str, list[dict[str, Any]]] = {}
    for info in reversed(infos):
        view_id = info.checkpoint_id
        row = rows_by_id.get(view_id) or {
            "id": view_id,
            "messages": message_counts[view_id],
            "parts": None,
        }
        rows.setdefault(info.metadata["parents"][ns], []).append(row)
    return rows


# -- template data of turns


def _build_turn_row(
    turn_items: Sequence[HistoryItem],
    steps: Sequence[Step],
    view_rows_by_checkpoint_id: dict[str, list[dict[str, Any]]],
) -> dict[str, Any]:
    """Build the template data for one turn from its items, checkpoints and model views."""
    # Number of messages that the state contained before the turn's first AI message was added.
    message_count = None
    for (info, _), (_, change) in pairwise(steps):
        message_change = change.channels.get("messages")
        if message_change and any(
            getattr(message, "type", None) == "ai" for message in message_change.added.values()
        ):
            message_count = info.counts.get("messages")
            break
    return {
        "items": [{**build_item_row(item), "position": item.position} for item in turn_items],
        "views": [
            row
            for info, _ in steps
            for row in view_rows_by_checkpoint_id.get(info.checkpoint_id, ())
        ],
        "deeds": describe_actions_of_callers_other_than_person(info.metadata for info, _ in steps),
        "held": message_count,
        "steps": [_build_step_row(info, change) for info, change in steps],
    }


def build_item_row(item: HistoryItem, max_chars: int = MAX_TEXT_CHARS) -> dict[str, Any]:
    """Build the template data for an item in a thread's history.

    In the returned dict, the field `mark` says whether the item is in the thread's current state;
    see `classify_item_as_seen_removed_or_on_branch`. The returned field `at` is the timestamp from
    the message's metadata. If a message has no timestamp, `at` is the time at which the message was
    first stored.
    """
    row = build_message_row(item.value, max_chars)
    return {
        **row,
        "at": row["at"] or item.stored_at,
        "mark": classify_item_as_seen_removed_or_on_branch(item),
    }


def classify_item_as_seen_removed_or_on_branch(item: HistoryItem) -> str:
    """Classify a history item by whether the thread's current state contains it.

    Returns:
        "seen" if the current state contains the item, "branch" if the item exists only on another
            branch of the thread, otherwise "removed". The result is "unknown" if it cannot be
            determined for the item's channel whether the state contains the item.
    """
    if item.seen is None:
        return "unknown"
    return "seen" if item.seen else "branch" if item.branch else "removed"


def build_model_view_row(view: ModelView) -> dict[str, Any]:
    """Build the template data for a `ModelView`, which records the input of one model call.

    For each part of the model's input, the template data contains the part's token count and the
    number of tokens that precede the part.
    """
    parts = view.parts
    starts = accumulate(parts.values(), initial=0)
    return {
        **{name: getattr(view, name) for name in ("id", "checkpoint_id", "at", "node", "model")},
        "messages": len(view.messages),
        "parts": [
            {"name": name, "tokens": tokens, "start": start}
            for (name, tokens), start in zip(parts.items(), starts, strict=False)
        ],
        "tokens": sum(parts.values()),
    }


def _build_step_row(info: CheckpointInfo, change: StateDifference) -> dict[str, Any]:
    """Build a dict with a checkpoint's fields and channel changes, for the HTML template."""
    return {
        "checkpoint_id": info.checkpoint_id,
        "step": info.metadata.get("step"),
        "source": info.metadata.get("source"),
        "ts": info.ts,
        "ran": change.ran,
        "next": [node for node in dict.fromkeys(info.next) if not node.startswith("__")],
        "is_head": info.is_head,
        "is_branch": info.is_branch,
        "changes": build_change_rows(change),
    }
