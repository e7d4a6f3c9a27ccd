"""Whatever a program does to its lists and dicts, a manifest stays small and the history whole.

Each manifest has at most `limit(n)` ranges for a value of n items, history tells each item once, in
the order in which it was first said, and all of it is the same to who opens the file again.
"""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage
from langgraph.graph.message import REMOVE_ALL_MESSAGES, add_messages

from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.checkpointers.address import Address
from perdure.checkpointers.manifest import compute_max_range_count, count_positions
from tests.backends import KEY
from tests.contracts.puts import config_at, put, render_with_types
from tests.rounds import rounds

Values = dict[str, Any]
CHANNELS = ("messages", "facts")
_numbers = itertools.count()


def message(text: str) -> AnyMessage:
    return HumanMessage(text, id=f"id {text}")


def update(values: Values, *changes: Any) -> None:
    """What langgraph's reducer makes of an update; it also gives ids to those that have none."""
    values["messages"] = add_messages(values["messages"], list(changes))


def removed(values: Values, start: int, stop: int) -> None:
    update(values, *(RemoveMessage(str(m.id)) for m in values["messages"][start:stop]))


# -- what a step of a program does to the values; n is drawn


def append(values: Values, n: int) -> None:
    update(values, *(message(f"{next(_numbers)}") for _ in range(n)))


def append_without_ids(values: Values, n: int) -> None:
    update(values, *(AIMessage(f"{next(_numbers)}") for _ in range(n)))


def remove_from_front(values: Values, n: int) -> None:
    removed(values, 0, n)


def remove_from_end(values: Values, n: int) -> None:
    removed(values, max(0, len(values["messages"]) - n), len(values["messages"]))


def remove_from_middle(values: Values, n: int) -> None:
    middle = len(values["messages"]) // 2
    removed(values, middle, middle + n)


def remove_every_other(values: Values, n: int) -> None:
    update(values, *(RemoveMessage(str(m.id)) for m in values["messages"][n % 2 :: 2 + n % 3]))


def replace(values: Values, n: int) -> None:
    there = values["messages"][n :: n + 2]
    update(values, *(HumanMessage(f"{next(_numbers)}", id=m.id) for m in there))


def reorder(values: Values, n: int) -> None:
    talk = values["messages"]
    values["messages"] = [*talk[n:], *talk[:n]]


def reverse(values: Values, n: int) -> None:
    values["messages"] = values["messages"][::-1]


def interleave(values: Values, n: int) -> None:
    talk = values["messages"]
    values["messages"] = [m for i in range(n + 1) for m in talk[i :: n + 1]]


def insert_in_front(values: Values, n: int) -> None:
    values["messages"] = [message(f"{next(_numbers)}"), *values["messages"]]


def clear(values: Values, n: int) -> None:
    update(values, RemoveMessage(REMOVE_ALL_MESSAGES))


def duplicate(values: Values, n: int) -> None:
    values["messages"] = [*values["messages"], *values["messages"][: 2 * n]]


def learn(values: Values, n: int) -> None:
    for i in range(n):
        values["facts"][f"key {(7 * i + n) % 40}"] = {"n": next(_numbers)}


def forget(values: Values, n: int) -> None:
    for key in list(values["facts"])[:: n + 1]:
        del values["facts"][key]


def learn_in_another_order(values: Values, n: int) -> None:
    pairs = list(values["facts"].items())
    values["facts"] = dict([*pairs[n:], *pairs[:n][::-1]])


EDITS: list[Callable[[Values, int], None]] = [
    *(append, append, append, append_without_ids, append_without_ids),
    *(remove_from_front, remove_from_end, remove_from_middle, remove_every_other),
    *(replace, reorder, reverse, interleave, insert_in_front, clear, duplicate),
    *(learn, learn, learn, forget, learn_in_another_order),
]


def items_of(values: Values, channel: str) -> list[str]:
    """The items of a value; a dict's are its pairs."""
    value = values[channel]
    return [
        render_with_types(item) for item in (value.items() if isinstance(value, dict) else value)
    ]


@dataclass
class Branch:
    """What was put last in a namespace, and what was said on the way there."""

    uid: str
    values: Values
    said: dict[str, list[str]]


@dataclass
class Program:
    """A thread of two namespaces, put step by step, with what it should read.

    Two savers take turns on the file. Neither reads before it puts, so what one remembers may be
    older than what the other put.
    """

    savers: list[SQLiteCheckpointer]
    puts: dict[str, list[Branch]] = field(default_factory=lambda: {"": [], "sub": []})

    def step(self, which: int, ns: str, edits: list[Any], parent: Branch | None) -> Branch:
        """Put what edits make of a checkpoint's values."""
        start = copy.deepcopy(parent.values) if parent else {"messages": [], "facts": {}}
        for edit, n in edits:
            edit(start, n)
        uid = str(UUID(int=next(_numbers)))
        config = config_at("t", ns, parent.uid) if parent else None
        put(self.savers[which], copy.deepcopy(start), config, ns=ns, uid=uid)
        said = {
            c: list(dict.fromkeys([*(parent.said[c] if parent else []), *items_of(start, c)]))
            for c in CHANNELS
        }
        self.puts[ns].append(Branch(uid, start, said))
        return self.puts[ns][-1]

    def bring_back(self, which: int, ns: str, n: int) -> None:
        """What was held once, in whichever branch or namespace, is put among what is held."""
        every = [branch for branches in self.puts.values() for branch in branches]
        old, now = every[n % len(every)], self.puts[ns][-1]

        def edit(values: Values, n: int) -> None:
            ids = {m.id for m in values["messages"]}
            back = [m for m in old.values["messages"][:: 1 + n % 3] if m.id not in ids]
            talk = values["messages"]
            values["messages"] = [*talk[:n], message(f"{next(_numbers)}"), *back, *talk[n:]]

        self.step(which, ns, [(edit, n)], now)

    def forget_history(self, which: int) -> None:
        """Only what the checkpoints hold stays."""
        self.savers[which].retain(Retention(last=10**6, history=False))
        for branch in (branch for branches in self.puts.values() for branch in branches):
            branch.said = {c: list(dict.fromkeys(items_of(branch.values, c))) for c in CHANNELS}


def check(saver: SQLiteCheckpointer, ns: str, branch: Branch) -> None:
    """What is read, how many ranges it takes, and what its history tells."""
    found = saver.get_tuple(config_at("t", ns, branch.uid))
    assert found is not None
    assert render_with_types(found.checkpoint["channel_values"]) == render_with_types(branch.values)
    few_ranges(saver, ns, branch.uid)
    for channel in CHANNELS:
        items = saver.history("t", channel=channel, checkpoint_id=branch.uid, checkpoint_ns=ns)
        here = set(items_of(branch.values, channel))
        assert [(item, item in here) for item in branch.said[channel]] == [
            (render_with_types(item.value), item.seen) for item in items
        ]


def few_ranges(saver: SQLiteCheckpointer, ns: str, uid: str) -> None:
    """The stored row, read by who remembers nothing of it, has few ranges of each channel."""
    saver._cache.drop_thread("t")
    found = saver.database.read(lambda: saver._reader.find_checkpoint(Address("t", ns, uid)))
    assert found is not None
    for ranges in (found.snapshot.ranges, found.snapshot.transcript):
        for channel, (_, parts) in ranges.items():
            assert len(parts) <= compute_max_range_count(count_positions(parts)), channel


steps = st.lists(
    st.tuples(
        st.sampled_from(["", "", "sub"]),
        st.lists(st.tuples(st.sampled_from(EDITS), st.integers(0, 12)), min_size=1, max_size=5),
        st.sampled_from([None, None, None, "fork", "bring back", "forget history"]),
        st.integers(0, 20),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=16,
)


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
@settings(max_examples=rounds(60))
@given(program=steps, forgets=st.booleans())
def test_manifests_stay_small_and_history_whole(
    key: bytes | None, program: list[Any], forgets: bool
) -> None:
    """Any course of edits and forks: values, ranges and history, step by step and opened again."""
    with tempfile.TemporaryDirectory() as folder:
        path, options = Path(folder) / "x.db", {"key": key, "synchronous": "normal"}
        with (
            SQLiteCheckpointer.open(path, **options) as one,
            SQLiteCheckpointer.open(path, **options) as two,
            SQLiteCheckpointer.open(path, **options) as looking,
        ):
            running = Program([one, two])
            for ns, edits, kind, n, which in program:
                there = running.puts[ns]
                if forgets:
                    running.savers[which]._cache.drop_thread("t")
                if kind == "bring back" and there:
                    running.bring_back(which, ns, n)
                elif kind == "forget history" and there:
                    running.forget_history(which)
                else:
                    upon = there[n % len(there) if kind == "fork" else -1] if there else None
                    running.step(which, ns, edits, upon)
                check(looking, ns, running.puts[ns][-1])
            assert_counted(looking, running)
        with SQLiteCheckpointer.open(path, key=key, read_only=True) as again:
            for ns, branches in running.puts.items():
                for branch in branches:
                    check(again, ns, branch)


def assert_counted(saver: SQLiteCheckpointer, running: Program) -> None:
    """After a sweep the items are those that are said, each once; aliases are not counted."""
    saver.retain(Retention(last=10**6))
    saver.retain(Retention(last=0))
    running.puts = {ns: branches[-1:] for ns, branches in running.puts.items()}
    kept = {
        (channel, item)
        for branches in running.puts.values()
        for branch in branches
        for channel in CHANNELS
        for item in branch.said[channel]
    }
    assert len(kept) == saver.thread("t").items


ELSEWHERE = """
import sys
from langchain_core.messages import HumanMessage
from perdure.checkpointers import SQLiteCheckpointer
from tests.contracts.puts import config_at, put

with SQLiteCheckpointer.open(sys.argv[1]) as saver:
    found = saver.get_tuple(config_at())
    talk = found.checkpoint["channel_values"]["messages"]
    talk = [*talk[1::3], *talk[::3], *talk[2::3], HumanMessage("there", id="there")]
    put(saver, {"messages": talk}, found.config, uid="there")
"""


def test_another_process_takes_turns(tmp_path: Path) -> None:
    """Aliases that another process wrote are read, and go on being told by their first place."""
    everything = [message(f"{n}") for n in range(200)]
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        first = put(saver, {"messages": everything})
        second = put(saver, {"messages": everything[::2]}, first)
        put(saver, {"messages": everything[::-1]}, second, uid="here")
        here = saver.history("t")
        there = Path(__file__).parents[2]
        argv = [sys.executable, "-c", ELSEWHERE, str(tmp_path / "x.db")]
        subprocess.run(argv, check=True, cwd=there)
        found = saver.get_tuple(config_at())
        assert found is not None
        talk = found.checkpoint["channel_values"]["messages"]
        put(saver, {"messages": [*talk[::-1], message("back")]}, found.config, uid="back")
        back = saver.history("t")
        for uid in ("here", "there", "back"):
            few_ranges(saver, "", uid)

    backwards = everything[::-1]
    assert [m.id for m in talk] == [
        *(m.id for n in (1, 0, 2) for m in backwards[n::3]),
        "there",
    ]
    assert [item.position for item in here] == list(range(200))
    assert [item.position for item in back] == list(range(202))
    assert [item.value.id for item in back[200:]] == ["there", "id back"]
