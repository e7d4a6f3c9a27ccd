"""A thread by turns: the messages, what the model was shown, and the changes of state."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

from perdure.checkpointers import CheckpointInfo, HistoryItem, StateDifference
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.memory import VIEWS, ModelView, aviews
from perdure.server.messages import changes, shown

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
        found = await saver.acheckpoints(thread_id, checkpoint_ns=VIEWS, limit=_VIEWS, before=order)
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
        "items": [
            {**shown(item.value), "position": item.position, "mark": mark(item)} for item in items
        ],
        "views": [row for info, _ in steps for row in views.get(info.checkpoint_id, ())],
        "held": in_state,
        "steps": [_step_row(info, change) for info, change in steps],
    }


def mark(item: HistoryItem) -> str:
    """Whether an item is in the state of the newest checkpoint, removed from it, or on a branch."""
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
