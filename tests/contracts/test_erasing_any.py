"""`erase()` on random threads with forks, edits, removals, nested values and pending writes."""

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


def make_message(uid: str, version: int) -> HumanMessage:
    return HumanMessage(f"word of {uid}: {version} " * 9, id=uid)


def remove_messages(value: Any, ids: set[str], *, inputs: bool = False) -> Any:
    """Return the value without the messages with these ids, or None for such a message."""
    if isinstance(value, BaseMessage):
        under = value.id or (str(value.content)[8] if inputs else "")
        return None if under in ids else value
    if isinstance(value, list | tuple):
        parts = [remove_messages(part, ids, inputs=inputs) for part in value]
        return [part for part in parts if part is not None]
    if isinstance(value, Send):
        return value if remove_messages(value.arg, ids) == value.arg else None
    if isinstance(value, dict):
        return {k: n for k, v in value.items() if (n := remove_messages(v, ids)) is not None}
    return value


def remove_tasks(tasks: list[Send], ids: set[str]) -> list[Send]:
    """Return the tasks, with placeholders for those that contain an erased message."""
    remaining = [task if remove_messages(task, ids) else Send("__erased__", None) for task in tasks]
    while remaining and remaining[-1].node == "__erased__":
        remaining.pop()
    return remaining


def fill_thread(saver: Saver, steps: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Put random checkpoints and pending writes.

    Return the namespace and config of each checkpoint.
    """
    checkpoints: list[tuple[str, Any, dict[str, Any]]] = []
    for number, changes in enumerate(steps):
        in_namespace = [p for p in checkpoints if p[0] == changes["ns"]]
        _, parent, values = (
            in_namespace[changes["parent"] % len(in_namespace)] if in_namespace else ("", None, {})
        )
        messages = {m.id: m for m in values.get("messages", [])}
        messages |= {uid: make_message(uid, number) for uid in changes["say"]}
        values = {
            "messages": [m for uid, m in messages.items() if uid not in changes["drop"]],
            "notes": {
                k: [make_message(uid, 99) for uid in ids] for k, ids in changes["notes"].items()
            },
        }
        values["__pregel_tasks"] = [
            Send("n", [1, make_message(uid, number)]) for uid in changes["send"]
        ]
        if changes["last"]:
            values["last"] = make_message(changes["last"], 99)
        config = put(saver, values, parent, ns=changes["ns"])
        checkpoints.append((changes["ns"], config, values))
        for i, (named, uid) in enumerate(changes["write"]):
            message = make_message(uid, number)
            value = [message, HumanMessage("anonymous")]
            if not named and uid in {m.id for m in values["messages"]} & {*changes["say"]}:
                # the checkpoint has a message with the same text
                value[0] = HumanMessage(message.content)
            saver.put_writes(
                config, [("messages", value), ("last", make_message(uid, 99))], f"task {i}"
            )
    return [(ns, config) for ns, config, _ in checkpoints]


def read_history(saver: Saver, ns: str, config: Any, channel: str) -> list[Any]:
    items = saver.history(
        "t", channel=channel, checkpoint_id=checkpoint_id_of(config), checkpoint_ns=ns
    )
    return [item.value for item in items]


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@settings(max_examples=rounds(16))
@given(steps=st.lists(step, min_size=1, max_size=8), ids=st.sets(st.sampled_from(IDS)))
def test_erase_on_random_thread_removes_messages_and_nothing_else(
    steps: list[dict[str, Any]], ids: set[str], backend: str
) -> None:
    """No read finds the erased messages, and everything else is as before."""
    with tempfile.TemporaryDirectory() as folder, BACKENDS[backend](Path(folder)) as saver:
        configs = fill_thread(saver, steps)
        before = [saver.get_tuple(config) for _, config in configs]
        history = {
            (i, c): read_history(saver, *at_, c)
            for i, at_ in enumerate(configs)
            for c in ("messages", "notes")
        }
        report = saver.erase("t", ids)
        after = [saver.get_tuple(config) for _, config in configs]

        for stored_before, stored_after in zip(before, after, strict=True):
            assert stored_before is not None
            assert stored_after is not None
            values = stored_before.checkpoint["channel_values"]
            expected_values = {
                **remove_messages(values, ids),
                "__pregel_tasks": remove_tasks(values["__pregel_tasks"], ids),
            }
            values_after = stored_after.checkpoint["channel_values"]
            assert render_with_types(
                [expected_values[k] for k in sorted(expected_values)]
            ) == render_with_types([values_after[k] for k in sorted(values_after)])
            expected = [
                (task, channel, written)
                for task, channel, value in stored_before.pending_writes or []
                if (written := remove_messages(value, ids, inputs=True)) is not None
            ]
            assert render_with_types(expected) == render_with_types(stored_after.pending_writes)
        for (i, channel), items_before in history.items():
            expected_items = [
                n for value in items_before if (n := remove_messages(value, ids)) is not None
            ]
            items_after = [
                [*v] if isinstance(v, tuple) else v
                for v in read_history(saver, *configs[i], channel)
            ]
            assert list(dict.fromkeys(map(render_with_types, expected_items))) == list(
                map(render_with_types, items_after)
            )
        raw_bytes, readable = read_raw_bytes(saver), render_thread(saver)
        for uid in ids:
            assert f"word of {uid}" not in readable
            assert f"word of {uid}".encode() not in raw_bytes
        assert report.scrubbed or "postgres" in backend
        changed = [stored_before and stored_before[1:] for stored_before in before] != [
            stored_after and stored_after[1:] for stored_after in after
        ]
        assert bool(report.checkpoints or report.items or report.hashes) is changed
        assert ErasureReport() == saver.erase("t", ids)
        ns, config = configs[-1]
        words = {"messages": [make_message(uid, 0) for uid in IDS]}
        stale_put = put(saver, words, config, ns=ns)  # as by a run that began before the erasure
        assert [uid for uid in IDS if uid not in ids] == [
            m.id for m in read_channel_values(saver, stale_put)["messages"]
        ]
        loaded = saver.get_tuple(config)
        assert loaded is not None
        put_after_reload = put(saver, words, loaded.config, ns=ns)
        assert [*IDS] == [m.id for m in read_channel_values(saver, put_after_reload)["messages"]]
