"""A model of threads in plain dicts, with which the state machine compares perdure."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import HumanMessage
from langgraph.checkpoint.serde.types import ERROR, INTERRUPT

from tests.contracts.puts import render_with_types

PAD = "x" * 160  # long enough that each element is stored as its own item
SPLIT = ("messages", "notes", "facts")  # channels that have a history

SPECIAL = {ERROR: -1, INTERRUPT: -3}  # the indexes that langgraph gives to such writes

Values = dict[str, Any]
Edit = Callable[[Values, int], str]


def render_items(channel: str, value: Any) -> list[tuple[str, str]]:
    """Return the items as which the value of a channel is stored, rendered as texts."""
    parts = list(map(list, value.items())) if isinstance(value, dict) else value
    if isinstance(parts, list):
        return [(channel, render_with_types(part)) for part in parts]
    return [(channel, render_with_types(value))] if value == PAD else []


@dataclass
class Put:
    """The expected content of one checkpoint."""

    checkpoint: Any
    metadata: dict[str, Any]
    parent: str | None
    order: int
    put_at: float
    history: dict[str, list[str]]
    run_start: int
    writes: dict[str, dict[int, tuple[str, Any]]] = field(default_factory=dict)
    written_items: dict[tuple[str, int], list[tuple[str, str]]] = field(
        default_factory=dict
    )  # rendered items of each write


@dataclass
class NamespaceModel:
    """The expected checkpoints of one namespace of a thread."""

    puts: dict[str, Put] = field(default_factory=dict)  # in the order of their first puts
    head: str | None = None

    def head_ancestor_ids(self) -> list[str]:
        """Return the ids of the head and its ancestors, the head first."""
        ancestor_ids: list[str] = []
        uid = self.head
        while uid in self.puts:
            ancestor_ids.append(uid)
            uid = self.puts[uid].parent
        return ancestor_ids

    def branch_tip_ids(self) -> list[str]:
        """Return the ids of the last checkpoints of all branches."""
        parent_ids = {put.parent for put in self.puts.values()}
        return [
            uid
            for uid in self.puts
            if uid not in parent_ids and uid not in self.head_ancestor_ids()
        ]

    def listed_ids(self) -> list[str]:
        """Return the head's id, then the other ids, latest put first."""
        return [uid for uid in self.puts if uid == self.head] + [
            uid for uid in reversed(self.puts) if uid != self.head
        ]


@dataclass
class ThreadModel:
    """The expected content of one thread."""

    number: int
    created_at: float
    updated_at: float
    namespaces: dict[str, NamespaceModel] = field(default_factory=dict)
    log: set[tuple[str, str]] = field(default_factory=set)
    write_items: set[tuple[str, str]] = field(
        default_factory=set
    )  # items that perhaps only pending writes refer to
    order: int = 0
    equals_langgraph: bool = True  # whether InMemorySaver has the same thread

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
        """Add a checkpoint. If its id exists, the checkpoint is replaced and keeps its order.

        With `on_purpose`, the parent was read by its id while it was not the head.
        """
        namespace = self.namespaces.setdefault(ns, NamespaceModel())
        uid = checkpoint["id"]
        former = namespace.puts.get(uid)
        history = {
            c: list(items)
            for c, items in (namespace.puts[parent].history if parent else {}).items()
        }
        for channel, value in checkpoint["channel_values"].items():
            items = render_items(channel, value)
            self.log.update(items)
            if channel in SPLIT:
                known_items = history.get(channel, [])
                history[channel] = list(dict.fromkeys(known_items + [item for _, item in items]))
        new = Put(checkpoint, dict(metadata), parent, 0, now, history, 0)
        if former is None:
            new.order = self.order = self.order + 1
            parent_put = namespace.puts.get(parent or "")
            begins = parent_put is None or self.starts_run(
                new, parent_put, on_purpose and parent != namespace.head
            )
            new.run_start = new.order if begins or parent_put is None else parent_put.run_start
            if self.takes_head(namespace, new, uid):
                namespace.head = uid
        else:
            new.order, new.run_start = former.order, former.run_start
            new.writes, new.written_items = former.writes, former.written_items
        namespace.puts[uid] = new

    @staticmethod
    def starts_run(new: Put, parent_put: Put, on_purpose: bool) -> bool:
        """Return whether a put starts a run, an update or a fork."""
        skips = new.metadata["step"] != parent_put.metadata["step"] + 1
        return new.metadata["source"] != "loop" or skips or on_purpose

    @staticmethod
    def takes_head(namespace: NamespaceModel, new: Put, uid: str) -> bool:
        """Return whether a put becomes the head: the run that started later owns the head."""
        if namespace.head is None or new.parent == namespace.head or new.run_start == new.order:
            return True
        return (new.run_start, uid) > (namespace.puts[namespace.head].run_start, namespace.head)

    def put_writes(self, ns: str, uid: str, task: str, writes: list[tuple[str, Any]]) -> None:
        """Add the writes of a task. Only interrupts and errors replace existing writes."""
        put = self.namespaces[ns].puts[uid]
        stored_writes = put.writes.setdefault(task, {})
        for i, (channel, value) in enumerate(writes):
            items = render_items(channel, value)
            index = SPECIAL.get(channel, i)
            if index < 0 or index not in stored_writes:
                stored_writes[index] = (channel, copy.deepcopy(value))
                put.written_items[task, index] = items

    def keep_only(
        self, select_ids: Callable[[NamespaceModel], Iterable[str]], *, history: bool
    ) -> None:
        """Remove all checkpoints except the selected ones and the head of each namespace."""
        dropped_count = 0
        for namespace in self.namespaces.values():
            kept_ids = {namespace.head, *select_ids(namespace)}
            dropped_count += len(namespace.puts.keys() - kept_ids)
            namespace.puts = {uid: put for uid, put in namespace.puts.items() if uid in kept_ids}
            for put in [] if history else namespace.puts.values():
                values = put.checkpoint["channel_values"]
                put.history = {
                    channel: list(
                        dict.fromkeys(i for _, i in render_items(channel, values[channel]))
                    )
                    for channel in SPLIT
                    if channel in values
                }
        if dropped_count or not history:
            self.drop_unreferenced_items()

    def cut_after(self, uid: str) -> None:
        """Keep a checkpoint, its ancestors, and the earlier checkpoints of other namespaces."""
        root, last = self.namespaces[""], self.namespaces[""].puts[uid].order
        path_ids, put = [], root.puts.get(uid)
        while put is not None:
            path_ids.append(put.checkpoint["id"])
            put = root.puts.get(put.parent or "")
        root.puts = {u: p for u, p in root.puts.items() if u in path_ids}
        root.head = uid
        for ns in [ns for ns in self.namespaces if ns]:
            namespace = self.namespaces[ns]
            namespace.puts = {u: p for u, p in namespace.puts.items() if p.order <= last}
            namespace.head = list(namespace.puts)[-1] if namespace.puts else None
            if not namespace.puts:
                del self.namespaces[ns]
        self.drop_unreferenced_items()

    def drop_unreferenced_items(self) -> None:
        """Drop the items that nothing refers to.

        A write either refers to the items of the checkpoint that resulted from it, or has its own
        bytes. This depends on the cache.
        """
        referenced, written = set(), set()
        for put in (
            put for namespace in self.namespaces.values() for put in namespace.puts.values()
        ):
            for channel, value in put.checkpoint["channel_values"].items():
                referenced.update(render_items(channel, value))
            referenced.update(
                (channel, item) for channel, history in put.history.items() for item in history
            )
            for items in put.written_items.values():
                written.update(items)
        self.write_items = (self.log | self.write_items) & written
        self.log = referenced


# -- edits of a super-step; each one returns the channel that it changed


def add_message(values: Values, n: int) -> str:
    messages = values.setdefault("messages", [])
    if all(message.id != f"m{n}" for message in messages):
        messages.append(HumanMessage(f"text {n}", id=f"m{n}"))
    return "messages"


def replace_message(values: Values, n: int) -> str:
    messages = values.setdefault("messages", [])
    if messages:
        messages[n % len(messages)] = HumanMessage(f"again {n}", id=messages[n % len(messages)].id)
    return "messages"


def edit_messages_in_place(values: Values, n: int) -> str:
    for message in values.get("messages", [])[n % 3 :: 3]:
        message.additional_kwargs["edited"] = n
        message.content = f"edited {n}"
    return "messages"


def repeat_message(values: Values, n: int) -> str:
    messages = values.setdefault("messages", [])
    messages += copy.deepcopy(messages[n : n + 1])
    return "messages"


def remove_messages(values: Values, n: int) -> str:
    del values.setdefault("messages", [])[n % 4 : n % 4 + 2]
    return "messages"


def reorder_messages(values: Values, n: int) -> str:
    messages = values.setdefault("messages", [])
    values["messages"] = messages[n:] + messages[:n][::-1]
    return "messages"


def add_many_messages(values: Values, n: int) -> str:
    messages = values.setdefault("messages", [])
    messages += [HumanMessage(f"much {n} {i}", id=f"much-{n}-{i}") for i in range(24)]
    return "messages"


def reverse_messages(values: Values, n: int) -> str:
    values.setdefault("messages", []).reverse()
    return "messages"


def remove_every_other_message(values: Values, n: int) -> str:
    messages = values.setdefault("messages", [])
    values["messages"] = messages[: n % 3] + messages[n % 3 :: 2]
    return "messages"


def insert_note(values: Values, n: int) -> str:
    values.setdefault("notes", []).insert(n % 2, {"n": n, "text": PAD, "tags": []})
    return "notes"


def tag_notes_in_place(values: Values, n: int) -> str:
    for stored_note in values.get("notes", [])[::2]:
        stored_note["tags"].append(n)
    return "notes"


def set_fact(values: Values, n: int) -> str:
    values.setdefault("facts", {})[f"key {n % 3}"] = {"v": n, "text": PAD}
    return "facts"


def remove_fact(values: Values, n: int) -> str:
    values.setdefault("facts", {}).pop(f"key {n % 3}", None)
    return "facts"


def set_number(values: Values, n: int) -> str:
    values["n"] = n if n % 2 else PAD
    return "n"


def drop_channel(values: Values, n: int) -> str:
    channel = ("messages", "notes", "facts", "n")[n % 4]
    values.pop(channel, None)
    return channel


EDITS: list[Edit] = [
    *(
        add_message,
        add_message,
        add_message,
        add_many_messages,
        add_many_messages,
        replace_message,
        edit_messages_in_place,
        repeat_message,
    ),
    *(
        remove_messages,
        reorder_messages,
        reverse_messages,
        reverse_messages,
        remove_every_other_message,
    ),
    *(insert_note, tag_notes_in_place, set_fact, remove_fact, set_number, drop_channel),
]
