"""Threads as plain dicts: what the state machine checks perdure against."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import HumanMessage
from langgraph.checkpoint.serde.types import ERROR, INTERRUPT

from tests.contracts.puts import render_with_types

PAD = "x" * 160  # more than stands in place, so that each element is an item of its own
SPLIT = ("messages", "notes", "facts")  # channels whose history is kept

SPECIAL = {ERROR: -1, INTERRUPT: -3}  # where langgraph keeps such writes

Values = dict[str, Any]
Edit = Callable[[Values, int], str]


def items_of(channel: str, value: Any) -> list[tuple[str, str]]:
    """The items a value is stored as."""
    parts = list(map(list, value.items())) if isinstance(value, dict) else value
    if isinstance(parts, list):
        return [(channel, render_with_types(part)) for part in parts]
    return [(channel, render_with_types(value))] if value == PAD else []


@dataclass
class Put:
    """One checkpoint, as it should read back."""

    checkpoint: Any
    metadata: dict[str, Any]
    parent: str | None
    order: int
    put_at: float
    said: dict[str, list[str]]
    began: int
    writes: dict[str, dict[int, tuple[str, Any]]] = field(default_factory=dict)
    written: dict[tuple[str, int], list[tuple[str, str]]] = field(default_factory=dict)  # as items


@dataclass
class Line:
    """One namespace of a thread."""

    puts: dict[str, Put] = field(default_factory=dict)  # in the order of the first put
    head: str | None = None

    def trunk(self) -> list[str]:
        """The checkpoints that lead to the head, itself first."""
        out: list[str] = []
        uid = self.head
        while uid in self.puts:
            out.append(uid)
            uid = self.puts[uid].parent
        return out

    def tips(self) -> list[str]:
        """The ends of the branches."""
        inner = {put.parent for put in self.puts.values()}
        return [uid for uid in self.puts if uid not in inner and uid not in self.trunk()]

    def listed(self) -> list[str]:
        """The head, then the others, the last put first."""
        return [uid for uid in self.puts if uid == self.head] + [
            uid for uid in reversed(self.puts) if uid != self.head
        ]


@dataclass
class Talk:
    """One thread."""

    number: int
    created_at: float
    updated_at: float
    lines: dict[str, Line] = field(default_factory=dict)
    log: set[tuple[str, str]] = field(default_factory=set)
    referred: set[tuple[str, str]] = field(default_factory=set)  # by pending writes alone, perhaps
    order: int = 0
    like_langgraph: bool = True  # whether InMemorySaver was told all of it

    def put(
        self,
        ns: str,
        parent: str | None,
        checkpoint: Any,
        metadata: Any,
        now: float,
        *,
        on_purpose: bool,
    ) -> None:
        """A checkpoint; put once more, it keeps its place.

        With `on_purpose`, its parent was read by its id while it was not the head.
        """
        line = self.lines.setdefault(ns, Line())
        uid = checkpoint["id"]
        former = line.puts.get(uid)
        said = {c: list(items) for c, items in (line.puts[parent].said if parent else {}).items()}
        for channel, value in checkpoint["channel_values"].items():
            items = items_of(channel, value)
            self.log.update(items)
            if channel in SPLIT:
                known = said.get(channel, [])
                said[channel] = list(dict.fromkeys(known + [item for _, item in items]))
        new = Put(checkpoint, dict(metadata), parent, 0, now, said, 0)
        if former is None:
            new.order = self.order = self.order + 1
            before = line.puts.get(parent or "")
            begins = before is None or self.begins(new, before, on_purpose and parent != line.head)
            new.began = new.order if begins or before is None else before.began
            if self.takes_head(line, new, uid):
                line.head = uid
        else:
            new.order, new.began = former.order, former.began
            new.writes, new.written = former.writes, former.written
        line.puts[uid] = new

    @staticmethod
    def begins(new: Put, before: Put, on_purpose: bool) -> bool:
        """Whether a put is the beginning of something."""
        skips = new.metadata["step"] != before.metadata["step"] + 1
        return new.metadata["source"] != "loop" or skips or on_purpose

    @staticmethod
    def takes_head(line: Line, new: Put, uid: str) -> bool:
        """The later beginning has it."""
        if line.head is None or new.parent == line.head or new.began == new.order:
            return True
        return (new.began, uid) > (line.puts[line.head].began, line.head)

    def put_writes(self, ns: str, uid: str, task: str, writes: list[tuple[str, Any]]) -> None:
        """What a task wrote; what is there stays, but for interrupts and errors."""
        put = self.lines[ns].puts[uid]
        had = put.writes.setdefault(task, {})
        for i, (channel, value) in enumerate(writes):
            items = items_of(channel, value)
            index = SPECIAL.get(channel, i)
            if index < 0 or index not in had:
                had[index] = (channel, copy.deepcopy(value))
                put.written[task, index] = items

    def keep(self, which: Callable[[Line], Iterable[str]], *, history: bool) -> None:
        """Only some checkpoints, and the head, of each line."""
        dropped = 0
        for line in self.lines.values():
            stay = {line.head, *which(line)}
            dropped += len(line.puts.keys() - stay)
            line.puts = {uid: put for uid, put in line.puts.items() if uid in stay}
            for put in [] if history else line.puts.values():
                values = put.checkpoint["channel_values"]
                put.said = {
                    channel: list(dict.fromkeys(i for _, i in items_of(channel, values[channel])))
                    for channel in SPLIT
                    if channel in values
                }
        if dropped or not history:
            self.sweep()

    def cut(self, uid: str) -> None:
        """Only the way to a checkpoint, and what was put elsewhere before it."""
        root, last = self.lines[""], self.lines[""].puts[uid].order
        path, step = [], root.puts.get(uid)
        while step is not None:
            path.append(step.checkpoint["id"])
            step = root.puts.get(step.parent or "")
        root.puts = {u: p for u, p in root.puts.items() if u in path}
        root.head = uid
        for ns in [ns for ns in self.lines if ns]:
            line = self.lines[ns]
            line.puts = {u: p for u, p in line.puts.items() if p.order <= last}
            line.head = list(line.puts)[-1] if line.puts else None
            if not line.puts:
                del self.lines[ns]
        self.sweep()

    def sweep(self) -> None:
        """Only items that something still refers to.

        A write refers to the items of the checkpoint that came of it, or has bytes of its own: what
        is remembered of it decides.
        """
        held, written = set(), set()
        for put in (put for line in self.lines.values() for put in line.puts.values()):
            for channel, value in put.checkpoint["channel_values"].items():
                held.update(items_of(channel, value))
            held.update((channel, item) for channel, said in put.said.items() for item in said)
            for items in put.written.values():
                written.update(items)
        self.referred = (self.log | self.referred) & written
        self.log = held


# -- what a super-step does to the values it was given; each returns the channel it changed


def say(values: Values, n: int) -> str:
    talk = values.setdefault("messages", [])
    if all(message.id != f"m{n}" for message in talk):
        talk.append(HumanMessage(f"text {n}", id=f"m{n}"))
    return "messages"


def replace(values: Values, n: int) -> str:
    talk = values.setdefault("messages", [])
    if talk:
        talk[n % len(talk)] = HumanMessage(f"again {n}", id=talk[n % len(talk)].id)
    return "messages"


def edit_in_place(values: Values, n: int) -> str:
    for message in values.get("messages", [])[n % 3 :: 3]:
        message.additional_kwargs["edited"] = n
        message.content = f"edited {n}"
    return "messages"


def repeat(values: Values, n: int) -> str:
    talk = values.setdefault("messages", [])
    talk += copy.deepcopy(talk[n : n + 1])
    return "messages"


def remove(values: Values, n: int) -> str:
    del values.setdefault("messages", [])[n % 4 : n % 4 + 2]
    return "messages"


def reorder(values: Values, n: int) -> str:
    talk = values.setdefault("messages", [])
    values["messages"] = talk[n:] + talk[:n][::-1]
    return "messages"


def say_much(values: Values, n: int) -> str:
    talk = values.setdefault("messages", [])
    talk += [HumanMessage(f"much {n} {i}", id=f"much-{n}-{i}") for i in range(24)]
    return "messages"


def reverse(values: Values, n: int) -> str:
    values.setdefault("messages", []).reverse()
    return "messages"


def thin_out(values: Values, n: int) -> str:
    talk = values.setdefault("messages", [])
    values["messages"] = talk[: n % 3] + talk[n % 3 :: 2]
    return "messages"


def note(values: Values, n: int) -> str:
    values.setdefault("notes", []).insert(n % 2, {"n": n, "text": PAD, "tags": []})
    return "notes"


def tag_notes_in_place(values: Values, n: int) -> str:
    for each in values.get("notes", [])[::2]:
        each["tags"].append(n)
    return "notes"


def learn(values: Values, n: int) -> str:
    values.setdefault("facts", {})[f"key {n % 3}"] = {"v": n, "text": PAD}
    return "facts"


def forget(values: Values, n: int) -> str:
    values.setdefault("facts", {}).pop(f"key {n % 3}", None)
    return "facts"


def count(values: Values, n: int) -> str:
    values["n"] = n if n % 2 else PAD
    return "n"


def drop(values: Values, n: int) -> str:
    channel = ("messages", "notes", "facts", "n")[n % 4]
    values.pop(channel, None)
    return channel


EDITS: list[Edit] = [
    *(say, say, say, say_much, say_much, replace, edit_in_place, repeat),
    *(remove, reorder, reverse, reverse, thin_out),
    *(note, tag_notes_in_place, learn, forget, count, drop),
]
