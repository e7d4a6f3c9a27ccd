"""Manifests stay small, and histories complete, whatever a program does to its lists and dicts.

A manifest has at most `compute_max_log_range_count(n)` ranges for a value of n items. A history
contains each item once, in the order of first occurrence. Both are the same after a reopening.
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
from perdure.checkpointers.manifest import compute_max_log_range_count, count_positions
from perdure.checkpointers.reader import ITEMS_PAGE_SIZE
from tests.backends import KEY
from tests.contracts.puts import config_at, put, read_channel_values, render_with_types
from tests.rounds import rounds

Values = dict[str, Any]
CHANNELS = ("messages", "facts")
_numbers = itertools.count()


def make_message(text: str) -> AnyMessage:
    return HumanMessage(text, id=f"id {text}")


def apply_update(values: Values, *changes: Any) -> None:
    """Apply messages with langgraph's reducer, which also gives ids to messages without one."""
    values["messages"] = add_messages(values["messages"], list(changes))


def remove_slice(values: Values, start: int, stop: int) -> None:
    apply_update(values, *(RemoveMessage(str(m.id)) for m in values["messages"][start:stop]))


# -- edits that a step of a program makes; n is random


def append(values: Values, n: int) -> None:
    apply_update(values, *(make_message(f"{next(_numbers)}") for _ in range(n)))


def append_without_ids(values: Values, n: int) -> None:
    apply_update(values, *(AIMessage(f"{next(_numbers)}") for _ in range(n)))


def remove_from_front(values: Values, n: int) -> None:
    remove_slice(values, 0, n)


def remove_from_end(values: Values, n: int) -> None:
    remove_slice(values, max(0, len(values["messages"]) - n), len(values["messages"]))


def remove_from_middle(values: Values, n: int) -> None:
    middle = len(values["messages"]) // 2
    remove_slice(values, middle, middle + n)


def remove_every_other(values: Values, n: int) -> None:
    apply_update(
        values, *(RemoveMessage(str(m.id)) for m in values["messages"][n % 2 :: 2 + n % 3])
    )


def replace(values: Values, n: int) -> None:
    messages = values["messages"][n :: n + 2]
    apply_update(values, *(HumanMessage(f"{next(_numbers)}", id=m.id) for m in messages))


def reorder(values: Values, n: int) -> None:
    messages = values["messages"]
    values["messages"] = [*messages[n:], *messages[:n]]


def reverse(values: Values, n: int) -> None:
    values["messages"] = values["messages"][::-1]


def interleave(values: Values, n: int) -> None:
    messages = values["messages"]
    values["messages"] = [m for i in range(n + 1) for m in messages[i :: n + 1]]


def insert_in_front(values: Values, n: int) -> None:
    values["messages"] = [make_message(f"{next(_numbers)}"), *values["messages"]]


def clear(values: Values, n: int) -> None:
    apply_update(values, RemoveMessage(REMOVE_ALL_MESSAGES))


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


def render_items(values: Values, channel: str) -> list[str]:
    """Render each element of a list, or each pair of a dict."""
    value = values[channel]
    return [
        render_with_types(item) for item in (value.items() if isinstance(value, dict) else value)
    ]


@dataclass
class Branch:
    """A checkpoint of a namespace, with its values and the expected history of each channel."""

    uid: str
    values: Values
    history: dict[str, list[str]]


@dataclass
class Program:
    """A thread of two namespaces, with the checkpoints that it should contain.

    Two savers put into the file. Neither reads before it puts, so the cache of one saver may be
    older than the last put of the other.
    """

    savers: list[SQLiteCheckpointer]
    puts: dict[str, list[Branch]] = field(default_factory=lambda: {"": [], "sub": []})

    def step(self, saver_index: int, ns: str, edits: list[Any], parent: Branch | None) -> Branch:
        """Put a checkpoint with the values of its parent after some edits."""
        values = copy.deepcopy(parent.values) if parent else {"messages": [], "facts": {}}
        for edit, n in edits:
            edit(values, n)
        uid = str(UUID(int=next(_numbers)))
        config = config_at("t", ns, parent.uid) if parent else None
        put(self.savers[saver_index], copy.deepcopy(values), config, ns=ns, uid=uid)
        history = {
            c: list(
                dict.fromkeys([*(parent.history[c] if parent else []), *render_items(values, c)])
            )
            for c in CHANNELS
        }
        self.puts[ns].append(Branch(uid, values, history))
        return self.puts[ns][-1]

    def put_old_messages_again(self, saver_index: int, ns: str, n: int) -> None:
        """Put messages of any earlier branch and namespace among the current messages."""
        all_branches = [branch for branches in self.puts.values() for branch in branches]
        source, newest = all_branches[n % len(all_branches)], self.puts[ns][-1]

        def edit(values: Values, n: int) -> None:
            ids = {m.id for m in values["messages"]}
            old_messages = [m for m in source.values["messages"][:: 1 + n % 3] if m.id not in ids]
            messages = values["messages"]
            values["messages"] = [
                *messages[:n],
                make_message(f"{next(_numbers)}"),
                *old_messages,
                *messages[n:],
            ]

        self.step(saver_index, ns, [(edit, n)], newest)

    def forget_history(self, saver_index: int) -> None:
        """Delete the history, so that only the items in the states of checkpoints remain."""
        self.savers[saver_index].retain(Retention(last=10**6, history=False))
        for branch in (branch for branches in self.puts.values() for branch in branches):
            branch.history = {
                c: list(dict.fromkeys(render_items(branch.values, c))) for c in CHANNELS
            }


def check_checkpoint(saver: SQLiteCheckpointer, ns: str, branch: Branch) -> None:
    """Check the values, the number of ranges and the history of a checkpoint."""
    record = saver.get_tuple(config_at("t", ns, branch.uid))
    assert record is not None
    assert render_with_types(record.checkpoint["channel_values"]) == render_with_types(
        branch.values
    )
    check_range_counts(saver, ns, branch.uid)
    for channel in CHANNELS:
        items = saver.history("t", channel=channel, checkpoint_id=branch.uid, checkpoint_ns=ns)
        current_items = set(render_items(branch.values, channel))
        assert [(item, item in current_items) for item in branch.history[channel]] == [
            (render_with_types(item.value), item.seen) for item in items
        ]


def check_range_counts(saver: SQLiteCheckpointer, ns: str, uid: str) -> None:
    """Check that the stored row of a checkpoint has few ranges for each channel."""
    saver._cache.drop_thread("t")
    record = saver.database.read(lambda: saver._reader.find_checkpoint(Address("t", ns, uid)))
    assert record is not None
    for ranges in (record.snapshot.ranges, record.snapshot.transcript):
        for channel, (_, parts) in ranges.items():
            assert len(parts) <= compute_max_log_range_count(count_positions(parts)), channel


programs = st.lists(
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
@given(program=programs, drops_cache=st.booleans())
def test_random_edits_keep_manifests_small_and_history_complete(
    key: bytes | None, program: list[Any], drops_cache: bool
) -> None:
    """Values, ranges and history are right after each edit or fork, and after a reopening."""
    with tempfile.TemporaryDirectory() as folder:
        path, options = Path(folder) / "x.db", {"key": key, "synchronous": "normal"}
        with (
            SQLiteCheckpointer.open(path, **options) as one,
            SQLiteCheckpointer.open(path, **options) as two,
            SQLiteCheckpointer.open(path, **options) as reader,
        ):
            runner = Program([one, two])
            for ns, edits, kind, n, saver_index in program:
                branches_so_far = runner.puts[ns]
                if drops_cache:
                    runner.savers[saver_index]._cache.drop_thread("t")
                if kind == "bring back" and branches_so_far:
                    runner.put_old_messages_again(saver_index, ns, n)
                elif kind == "forget history" and branches_so_far:
                    runner.forget_history(saver_index)
                else:
                    parent = (
                        branches_so_far[n % len(branches_so_far) if kind == "fork" else -1]
                        if branches_so_far
                        else None
                    )
                    runner.step(saver_index, ns, edits, parent)
                check_checkpoint(reader, ns, runner.puts[ns][-1])
            check_item_count(reader, runner)
        with SQLiteCheckpointer.open(path, key=key, read_only=True) as reopened:
            for ns, branches in runner.puts.items():
                for branch in branches:
                    check_checkpoint(reopened, ns, branch)


def check_item_count(saver: SQLiteCheckpointer, running: Program) -> None:
    """Check that a sweep leaves the items of the histories, each once. Aliases are not counted."""
    saver.retain(Retention(last=10**6))
    saver.retain(Retention(last=0))
    running.puts = {ns: branches[-1:] for ns, branches in running.puts.items()}
    expected_items = {
        (channel, item)
        for branches in running.puts.values()
        for branch in branches
        for channel in CHANNELS
        for item in branch.history[channel]
    }
    assert len(expected_items) == saver.thread("t").items


OTHER_PROCESS = """
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


def test_checkpoints_of_another_process_are_read_and_continued(tmp_path: Path) -> None:
    """Aliases written by another process are read; histories list each at its first position."""
    messages = [make_message(f"{n}") for n in range(200)]
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        first = put(saver, {"messages": messages})
        second = put(saver, {"messages": messages[::2]}, first)
        put(saver, {"messages": messages[::-1]}, second, uid="here")
        history_before = saver.history("t")
        repository = Path(__file__).parents[2]
        argv = [sys.executable, "-c", OTHER_PROCESS, str(tmp_path / "x.db")]
        subprocess.run(argv, check=True, cwd=repository)
        record = saver.get_tuple(config_at())
        assert record is not None
        messages_of_other = record.checkpoint["channel_values"]["messages"]
        put(
            saver,
            {"messages": [*messages_of_other[::-1], make_message("back")]},
            record.config,
            uid="back",
        )
        history_after = saver.history("t")
        for uid in ("here", "there", "back"):
            check_range_counts(saver, "", uid)

    backwards = messages[::-1]
    assert [m.id for m in messages_of_other] == [
        *(m.id for n in (1, 0, 2) for m in backwards[n::3]),
        "there",
    ]
    assert [item.position for item in history_before] == list(range(200))
    assert [item.position for item in history_after] == list(range(202))
    assert [item.value.id for item in history_after[200:]] == ["there", "id back"]


def test_items_of_more_aliases_than_a_page_are_kept_without_history(tmp_path: Path) -> None:
    """Deleting the history keeps every item of a list that is stored as thousands of aliases."""
    numbers = [f"item {n}" for n in range(3 * (ITEMS_PAGE_SIZE + 100))]
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        first = put(saver, {"facts": numbers})
        put(saver, {"facts": numbers[::3]}, first)
        report = saver.retain(Retention(last=0, history=False))
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        values = read_channel_values(saver, config_at())
    assert values == {"facts": numbers[::3]}
    assert report.items == len(numbers) - len(numbers[::3])
