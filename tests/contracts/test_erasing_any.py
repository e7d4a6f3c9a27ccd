"""`erase()` on any thread: forks, edits, removals, values within values, pending writes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import BaseMessage, HumanMessage
from langgraph.types import Send

from perdure.checkpointers import ErasureReport
from tests.backends import BACKENDS
from tests.contracts.erased import (
    Saver,
    read_raw_bytes,
    render_thread,
)
from tests.contracts.puts import checkpoint_id_of, put, read_channel_values, render_with_types
from tests.rounds import rounds

IDS = "abcdef"
step = st.fixed_dictionaries(
    {
        "parent": st.integers(0, 20),
        "ns": st.sampled_from(["", "", "sub:1"]),
        "say": st.lists(st.sampled_from(IDS), max_size=3),
        "drop": st.lists(st.sampled_from(IDS), max_size=2),
        "notes": st.dictionaries(st.sampled_from("kl"), st.lists(st.sampled_from(IDS), max_size=2)),
        "last": st.sampled_from([None, *IDS]),
        "send": st.lists(st.sampled_from(IDS), max_size=3),
        "write": st.lists(st.tuples(st.booleans(), st.sampled_from(IDS)), max_size=2),
    }
)


def word(uid: str, version: int) -> HumanMessage:
    return HumanMessage(f"word of {uid}: {version} " * 9, id=uid)


def less(value: Any, ids: set[str], *, inputs: bool = False) -> Any:
    """A value without messages, written once more; None for a message."""
    if isinstance(value, BaseMessage):
        under = value.id or (str(value.content)[8] if inputs else "")
        return None if under in ids else value
    if isinstance(value, list | tuple):
        parts = [less(part, ids, inputs=inputs) for part in value]
        return [part for part in parts if part is not None]
    if isinstance(value, Send):
        return value if less(value.arg, ids) == value.arg else None
    if isinstance(value, dict):
        return {k: n for k, v in value.items() if (n := less(v, ids)) is not None}
    return value


def less_tasks(tasks: list[Send], ids: set[str]) -> list[Send]:
    """The tasks to be run, with holes in the places of those that hold a message."""
    left = [task if less(task, ids) else Send("__erased__", None) for task in tasks]
    while left and left[-1].node == "__erased__":
        left.pop()
    return left


def fill(saver: Saver, steps: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """A thread with forks, edits, removals, nested values and pending writes."""
    put_: list[tuple[str, Any, dict[str, Any]]] = []
    for number, todo in enumerate(steps):
        before = [p for p in put_ if p[0] == todo["ns"]]
        _, parent, values = before[todo["parent"] % len(before)] if before else ("", None, {})
        talk = {m.id: m for m in values.get("messages", [])}
        talk |= {uid: word(uid, number) for uid in todo["say"]}
        values = {
            "messages": [m for uid, m in talk.items() if uid not in todo["drop"]],
            "notes": {k: [word(uid, 99) for uid in ids] for k, ids in todo["notes"].items()},
        }
        values["__pregel_tasks"] = [Send("n", [1, word(uid, number)]) for uid in todo["send"]]
        if todo["last"]:
            values["last"] = word(todo["last"], 99)
        config = put(saver, values, parent, ns=todo["ns"])
        put_.append((todo["ns"], config, values))
        for i, (named, uid) in enumerate(todo["write"]):
            message = word(uid, number)
            value = [message, HumanMessage("anonymous")]
            if not named and uid in {m.id for m in values["messages"]} & {
                *todo["say"]
            }:  # then there is a message that says the same
                value[0] = HumanMessage(message.content)
            saver.put_writes(config, [("messages", value), ("last", word(uid, 99))], f"task {i}")
    return [(ns, config) for ns, config, _ in put_]


def told(saver: Saver, ns: str, config: Any, channel: str) -> list[Any]:
    found = saver.history(
        "t", channel=channel, checkpoint_id=checkpoint_id_of(config), checkpoint_ns=ns
    )
    return [item.value for item in found]


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@settings(max_examples=rounds(16))
@given(steps=st.lists(step, min_size=1, max_size=8), ids=st.sets(st.sampled_from(IDS)))
def test_any_thread(steps: list[dict[str, Any]], ids: set[str], backend: str) -> None:
    """By any road, nothing of the messages is found and everything else is as before."""
    with tempfile.TemporaryDirectory() as folder, BACKENDS[backend](Path(folder)) as saver:
        configs = fill(saver, steps)
        before = [saver.get_tuple(config) for _, config in configs]
        history = {
            (i, c): told(saver, *at_, c)
            for i, at_ in enumerate(configs)
            for c in ("messages", "notes")
        }
        report = saver.erase("t", ids)
        after = [saver.get_tuple(config) for _, config in configs]

        for was, now in zip(before, after, strict=True):
            assert was is not None
            assert now is not None
            values = was.checkpoint["channel_values"]
            left = {
                **less(values, ids),
                "__pregel_tasks": less_tasks(values["__pregel_tasks"], ids),
            }
            new = now.checkpoint["channel_values"]
            assert render_with_types([left[k] for k in sorted(left)]) == render_with_types(
                [new[k] for k in sorted(new)]
            )
            expected = [
                (task, channel, written)
                for task, channel, value in was.pending_writes or []
                if (written := less(value, ids, inputs=True)) is not None
            ]
            assert render_with_types(expected) == render_with_types(now.pending_writes)
        for (i, channel), said in history.items():
            rest = [n for value in said if (n := less(value, ids)) is not None]
            known = [[*v] if isinstance(v, tuple) else v for v in told(saver, *configs[i], channel)]
            assert list(dict.fromkeys(map(render_with_types, rest))) == list(
                map(render_with_types, known)
            )
        bytes_, seen = read_raw_bytes(saver), render_thread(saver)
        for uid in ids:
            assert f"word of {uid}" not in seen
            assert f"word of {uid}".encode() not in bytes_
        assert report.scrubbed or "postgres" in backend
        changed = [was and was[1:] for was in before] != [now and now[1:] for now in after]
        assert bool(report.checkpoints or report.items or report.hashes) is changed
        assert ErasureReport() == saver.erase("t", ids)
        ns, config = configs[-1]
        words = {"messages": [word(uid, 0) for uid in IDS]}
        stale = put(saver, words, config, ns=ns)  # as of a run that began before
        assert [uid for uid in IDS if uid not in ids] == [
            m.id for m in read_channel_values(saver, stale)["messages"]
        ]
        loaded = saver.get_tuple(config)
        assert loaded is not None
        again = put(saver, words, loaded.config, ns=ns)
        assert [*IDS] == [m.id for m in read_channel_values(saver, again)["messages"]]
