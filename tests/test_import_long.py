"""Importing long conversations: few checkpoints, the same threads, wherever it was cut off."""

from __future__ import annotations

import json
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.checkpointers import SQLiteCheckpointer
from perdure.cli.chatgpt import conversation as read
from perdure.cli.storing import store
from tests.exports import conversation, imported, run, written

LONG = 300


def chain(count: int, first: int = 0, after: str | None = None) -> dict[str, str | None]:
    """Messages m0, m1, … each of which follows the one before."""
    keys = [f"m{n}" for n in range(first, first + count)]
    return dict(zip(keys, [after, *keys], strict=False))


def stored(saver: SQLiteCheckpointer, *shape: Any, advance: Any = lambda count: None) -> int:
    return store(saver, "c", read("here", conversation(*shape)), advance)


def said(saver: SQLiteCheckpointer, checkpoint_id: str | None = None) -> list[str]:
    items = saver.history("c", checkpoint_id=checkpoint_id)
    return [item.value.id for item in items if not item.branch]


def tips(saver: SQLiteCheckpointer) -> list[list[str]]:
    """What was said on the way to the end of each branch."""
    found = saver.checkpoints("c")
    parents = {info.parent_id for info in found}
    ends = {info.checkpoint_id for info in found} - parents
    return sorted(said(saver, end) for end in ends)


def tree(saver: SQLiteCheckpointer) -> Any:
    """Each checkpoint as the message it ends with, the one it follows, and its size."""
    found = saver.checkpoints("c")
    names = {info.checkpoint_id: info.metadata["imported"] for info in found}
    return [
        (names[i.checkpoint_id], names.get(i.parent_id or ""), i.is_head, i.counts)
        for i in reversed(found)
    ]


def items(saver: SQLiteCheckpointer) -> int:
    return saver.thread("c").items


def test_checkpoints_grow_slower_than_messages(file_saver: SQLiteCheckpointer) -> None:
    """The work is proportional to the sum of their sizes, which is proportional to the messages."""
    stored(file_saver, chain(4000), "m3999")
    sizes = [info.counts["messages"] for info in file_saver.checkpoints("c")][::-1]

    assert sizes[:64] == list(range(1, 65))
    assert all(after - before <= before // 32 for before, after in pairwise(sizes[63:]))
    assert sum(sizes) < 40 * 4000
    assert (said(file_saver), items(file_saver)) == ([f"m{n}" for n in range(4000)], 4000)


def test_progress_is_told_within_a_conversation(file_saver: SQLiteCheckpointer) -> None:
    """What moves the bar is called between the first message and the last."""
    told: list[int] = []
    stored(file_saver, chain(LONG), "m299", advance=told.append)

    assert told == sorted(set(told))
    assert len(told) > 100
    assert max(told) < LONG


@pytest.mark.parametrize("fork", [10, 100, 101, 102, 250, 299])
def test_a_later_branch_may_begin_anywhere(fork: int, file_saver: SQLiteCheckpointer) -> None:
    """Also at a message that came together with later ones: nothing is stored twice or astray."""
    whole = chain(LONG)
    stored(file_saver, whole, "m299")
    grown = {**whole, **chain(3, LONG, f"m{fork}")}
    new = [stored(file_saver, grown, "m302"), stored(file_saver, grown, "m302")]
    branch = [f"m{n}" for n in [*range(fork + 1), *range(LONG, LONG + 3)]]

    assert new == [3, 0]
    assert said(file_saver) == branch
    assert tips(file_saver) == sorted([branch, *([list(whole)] if fork < LONG - 1 else [])])
    assert items(file_saver) == LONG + 3


def test_the_head_may_go_back_to_any_message(file_saver: SQLiteCheckpointer) -> None:
    """An export that was left at an older message, of many that came together, ends there."""
    stored(file_saver, chain(LONG), "m299")
    stored(file_saver, {**chain(LONG), **chain(1, LONG, "m250")}, "m201")

    assert said(file_saver) == [f"m{n}" for n in range(202)]
    assert items(file_saver) == LONG + 1


class Dies(SQLiteCheckpointer):
    """A process that ends before its n-th write."""

    left = 10**9

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def put(self, *args: Any, **options: Any) -> Any:
        self._count()
        return super().put(*args, **options)

    def rewind(self, *args: Any, **options: Any) -> None:
        self._count()
        super().rewind(*args, **options)


SHAPES = [
    (chain(90), "m89"),
    ({**chain(90), **chain(5, 90, "m70"), **chain(5, 95, "m70")}, "m94"),
    ({**chain(5), **chain(5, 5), **chain(3, 10, "m2")}, "m4"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=["chain", "forks", "roots"])
def test_an_import_that_was_cut_off_goes_on(shape: Any, tmp_path: Path) -> None:
    """Before whichever write it ended, the next import makes the same thread of it."""
    with Dies.open(tmp_path / "whole.db") as saver:
        stored(saver, *shape)
        expected, writes = tree(saver), 10**9 - saver.left
    for count in range(0, writes, 3 if writes > 30 else 1):
        with Dies.open(tmp_path / f"{count}.db") as saver:
            saver.left = count
            with pytest.raises(KeyboardInterrupt):
                stored(saver, *shape)
        with Dies.open(tmp_path / f"{count}.db") as saver:
            stored(saver, *shape)
            assert sorted(expected) == sorted(tree(saver))
            assert items(saver) == len(shape[0])


def test_a_branch_that_was_cut_off_leaves_the_thread(tmp_path: Path) -> None:
    """Killed before the head was back where someone had talked on, the next import sees to it."""
    shape = chain(4), "m3"
    grown = {**chain(4), **chain(4, 4, "m1")}, "m7"
    with Dies.open(tmp_path / "x.db") as saver:
        stored(saver, *shape)
    run(tmp_path / "x.db", "chat", "--thread", "c", "--message", "and here")
    with Dies.open(tmp_path / "x.db") as saver:
        talk = said(saver)
        saver.left = 2
        with pytest.raises(KeyboardInterrupt):
            stored(saver, *grown)
    with Dies.open(tmp_path / "x.db") as saver:
        new = stored(saver, *grown)

        assert (new, len(talk)) == (2, 6)
        assert talk == said(saver)


def test_a_thread_that_was_rewound_stays_there(file_saver: SQLiteCheckpointer) -> None:
    """An import without news moves nothing."""
    stored(file_saver, chain(9), "m8")
    older = file_saver.checkpoints("c")[3].checkpoint_id
    file_saver.rewind("c", older)

    assert stored(file_saver, chain(9), "m8") == 0
    assert said(file_saver) == [f"m{n}" for n in range(6)]


def test_an_import_warns_of_no_conflict(
    file_saver: SQLiteCheckpointer, caplog: pytest.LogCaptureFixture
) -> None:
    """Its branches are meant, so no run is said to have lost against another."""
    with caplog.at_level(logging.WARNING, "perdure"):
        for shape in SHAPES:
            stored(file_saver, *shape)

    assert caplog.records == []


@given(st.integers(60, 200), st.lists(st.integers(0, 199), max_size=4), st.data())
def test_any_growing_tree_ends_up_the_same(count: int, forks: list[int], data: Any) -> None:
    """Imported in two steps or at once: the same branches, and each message stored once."""
    parents = chain(count)
    for number, fork in enumerate(forks):
        parents |= chain(3, 1000 + 10 * number, f"m{fork % count}")
    keys = list(parents)
    part = {key: parents[key] for key in keys[: data.draw(st.integers(1, len(keys)))]}
    leaf = data.draw(st.sampled_from(keys))
    found = []
    for stages in ([(part, data.draw(st.sampled_from(list(part))))], []):
        with SQLiteCheckpointer.open(":memory:") as saver:
            for shape in (*stages, (parents, leaf)):
                stored(saver, *shape)
            found.append((said(saver), items(saver), set(map(tuple, tips(saver)))))

    assert found[1][1] == found[0][1] == len(parents)
    assert found[0][2] >= found[1][2]
    assert found[1][0][-1] == leaf


def test_an_older_export_changes_nothing(tmp_path: Path) -> None:
    """A newer one brings what is new, and the older one after it leaves the thread where it is."""
    db = tmp_path / "x.db"
    files = [
        written(tmp_path / f"{n}.json", [conversation(chain(n), f"m{n - 1}")]) for n in (70, 99)
    ]
    done = [imported(db, file) for file in (files[0], files[0], files[1], files[1], files[0])]

    assert done == [(1, 70, 0), (1, 0, 1), (1, 29, 0), (1, 0, 1), (1, 0, 1)]
    assert len(json.loads(run(db, "history", "c", "--json").stdout)) == 99
