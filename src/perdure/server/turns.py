"""A thread by turns: what was said, what the model saw, and what changed in the state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from langchain_core.messages import BaseMessage

from perdure.checkpointers import CheckpointInfo, HistoryItem, StateDifference
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.memory import ModelView, aviews
from perdure.server.messages import short, shown

TURNS: Final = 30
_ITEMS: Final = 240  # messages of a page, at most
_STEPS: Final = 200  # checkpoints read at once
_MOST_STEPS: Final = 400  # of a page
_SHOWN: Final = 2_000  # messages of views that a page reads; of others it says nothing


def by_turn(items: Iterable[HistoryItem]) -> list[list[HistoryItem]]:
    """Items cut before each message of a human."""
    turns: list[list[HistoryItem]] = []
    for item in items:
        if not turns or getattr(item.value, "type", None) == "human":
            turns.append([])
        turns[-1].append(item)
    return turns


async def turns_of(
    saver: Checkpointer,
    thread_id: str,
    ns: str,
    before: int | None,
    order: int | None,
    newer: str | None,
) -> dict[str, Any]:
    """The turns of a page, and where the page above it ends."""
    items = await saver.ahistory(thread_id, checkpoint_ns=ns, ends=(0, _ITEMS + 1), before=before)
    turns = by_turn(items) or [[]]
    more = len(items) > _ITEMS or len(turns) > TURNS
    if len(items) > _ITEMS and len(turns) > 1:
        turns = turns[1:]  # it may begin above
    turns = turns[-TURNS:]
    steps, places = await _steps(saver, thread_id, ns, order, turns)
    covered = [place for place in places if place is not None]
    if len(steps) >= _MOST_STEPS and covered:
        more, first = True, min(covered)
        turns = turns[first:]
        places = [None if place is None else place - first for place in places]
    of: list[list[tuple[CheckpointInfo, StateDifference]]] = [[] for _ in turns]
    for step, place in zip(reversed(steps), reversed(places), strict=True):
        if place is not None:
            of[place].append(step)
    ids = {info.checkpoint_id for each in of for info, _ in each}
    views = await _views(saver, thread_id, ns, ids, newer)
    return {
        "turns": [_turn(turn, of[n], views) for n, turn in enumerate(turns)],
        "before": turns[0][0].position if more and turns[0] else None,
        "order": steps[-1][0].order if more and steps else order,
        "newer": steps[-1][0].checkpoint_id if more and steps else newer,
    }


async def _steps(
    saver: Checkpointer,
    thread_id: str,
    ns: str,
    order: int | None,
    turns: Sequence[Sequence[HistoryItem]],
) -> tuple[list[tuple[CheckpointInfo, StateDifference]], list[int | None]]:
    """The checkpoints of turns, newest first, with their changes; and the turn of each.

    A checkpoint is of the turn whose messages it added. One that added none is of the turn before
    it, but an input is of the turn that it begins.
    """
    turn_of = {item.position: n for n, turn in enumerate(turns) for item in turn}
    first = min(turn_of, default=0)
    steps: list[tuple[CheckpointInfo, StateDifference]] = []
    places: list[int | None] = []
    waiting: list[int] = []  # steps without messages whose turn is that of an older step
    last = len(turns) - 1
    while len(steps) < _MOST_STEPS:
        infos = await saver.acheckpoints(thread_id, checkpoint_ns=ns, limit=_STEPS, before=order)
        pairs = [(info.parent_id, info.checkpoint_id) for info in infos]
        found = await saver.adifferences(thread_id, pairs, checkpoint_ns=ns)
        for info, change in zip(infos, found, strict=True):
            said = change.channels.get("messages")
            added = [*said.added] if said and not said.whole else []
            here = [turn_of[place] for place in added if place in turn_of]
            if here:
                last = max(here)
                for number in waiting:
                    places[number] = last
                waiting = []
            elif added and max(added) < first:
                return steps, places
            elif info.metadata.get("source") != "input" and not added:
                waiting.append(len(steps))
            steps.append((info, change))
            places.append(last if here or info.metadata.get("source") == "input" else None)
        if len(infos) < _STEPS:
            break
        order = infos[-1].order
    for number in waiting:
        places[number] = 0
    return steps, places


async def _views(
    saver: Checkpointer, thread_id: str, ns: str, ids: set[str], before: str | None
) -> dict[str, list[ModelView]]:
    """What the model was shown at checkpoints, the newest ones first, as far as a page reads it."""
    out: dict[str, list[ModelView]] = {}
    left, limit = _SHOWN, 1
    while ids and left > 0:
        found = await aviews(saver, thread_id, checkpoint_ns=ns, limit=limit, before=before)
        for view in reversed(found):
            out.setdefault(view.checkpoint_id, []).insert(0, view)
            left -= max(len(view.messages), 5)
        if len(found) < limit or found[0].checkpoint_id < min(ids):
            break
        before = found[0].id
        limit = max(1, min(20, left // max(len(found[0].messages), 1)))
    return out


# -- a turn in the form of the page


def _turn(
    items: Sequence[HistoryItem],
    steps: Sequence[tuple[CheckpointInfo, StateDifference]],
    views: dict[str, list[ModelView]],
) -> dict[str, Any]:
    seen = [view for info, _ in steps for view in views.get(info.checkpoint_id, ())]
    counts = [info.counts.get("messages") for info, _ in steps]
    answered = [n for n, (_, change) in enumerate(steps) if _answers(change)]
    held = counts[answered[0] - 1] if answered and answered[0] else None
    return {
        "items": [
            {**shown(item.value), "position": item.position, "mark": mark(item)} for item in items
        ],
        "views": [view_row(view) for view in seen],
        "held": held,
        "steps": [step_row(info, change) for info, change in steps],
    }


def _answers(change: StateDifference) -> bool:
    said = change.channels.get("messages")
    return said is not None and any(
        getattr(each, "type", None) == "ai" for each in said.added.values()
    )


def mark(item: HistoryItem) -> str:
    """Whether an item is seen by the model, removed from the state, or on a branch."""
    return "seen" if item.seen else "branch" if item.branch else "removed"


def view_row(view: ModelView) -> dict[str, Any]:
    """A view by its tokens: each part with where its bar begins."""
    parts, total = [], 0
    for name, tokens in view.parts.items():
        parts.append({"name": name, "tokens": tokens, "start": total})
        total += tokens
    return {
        "id": view.id,
        "checkpoint_id": view.checkpoint_id,
        "at": view.at,
        "node": view.node,
        "model": view.model,
        "messages": len(view.messages),
        "parts": parts,
        "tokens": total,
    }


def step_row(info: CheckpointInfo, change: StateDifference) -> dict[str, Any]:
    """A checkpoint with what changed in it, channel by channel."""
    next_ = [
        channel.removeprefix("branch:to:")
        for channel, each in change.channels.items()
        if channel.startswith("branch:to:") and each.added_count
    ]
    return {
        "checkpoint_id": info.checkpoint_id,
        "step": info.metadata.get("step"),
        "source": info.metadata.get("source"),
        "ts": info.ts,
        "ran": change.ran,
        "next": next_,
        "is_head": info.is_head,
        "is_branch": info.is_branch,
        "changes": changes(change),
    }


def changes(change: StateDifference) -> list[dict[str, Any]]:
    """What came, went or became another, by channel; langgraph's triggers of nodes are left out."""
    out = []
    for channel, each in change.channels.items():
        if channel.startswith(("branch:to:", "__")):
            continue
        gone = dict(each.removed)
        lines = []
        for value in each.added.values():
            # an element of the same id, or the value of a channel that is stored whole
            was = [at for at, old in gone.items() if each.whole or _same(old, value)]
            for at in was[:1]:
                lines.append(_line("-", gone.pop(at)))
            lines.append(_line("+", value))
        lines += [_line("-", value) for value in gone.values()]
        left = each.added_count + each.removed_count - len(each.added) - len(each.removed)
        out.append(
            {
                "channel": channel,
                "added": each.added_count,
                "removed": each.removed_count,
                "whole": each.whole,
                "lines": lines,
                "left": left,
            }
        )
    return out


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, BaseMessage) and isinstance(new, BaseMessage):
        return old.id is not None and old.id == new.id
    pairs = isinstance(old, list | tuple) and isinstance(new, list | tuple)
    return pairs and len(old) == len(new) == 2 and old[0] == new[0]


def _line(sign: str, value: Any) -> dict[str, Any]:
    if isinstance(value, BaseMessage):
        return {"sign": sign, "type": value.type, "text": short(value)}
    if isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], str):
        return {"sign": sign, "type": None, "text": f"{value[0]}: {short(value[1])}"}
    return {"sign": sign, "type": None, "text": short(value)}
