"""Storing conversations: few checkpoints, the same threads, wherever an import was cut off."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.values import Continuation
from perdure.cli.import_chatgpt import build_chatgpt_conversation
from perdure.cli.import_thread import ThreadImport
from perdure.graphs import chat_graph

LONG = 300
Parents = dict[str, str | None]


def conversation(
    parents: Parents, current: str, empty: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """A conversation as in ChatGPT's export: a node for each key, under ChatGPT's own root."""
    mapping: dict[str, Any] = {"root": {"parent": None}}
    for number, (key, parent) in enumerate(parents.items()):
        content = {"content_type": "text", "parts": ["" if key in empty else f"says {key}"]}
        author = {"role": ("user", "assistant")[number % 2]}
        message = {"author": author, "create_time": float(number), "content": content}
        mapping[key] = {"message": message, "parent": parent or "root"}
    return {"conversation_id": "c", "mapping": mapping, "current_node": current}


def chain(count: int, first: int = 0, after: str | None = None) -> Parents:
    """Messages m0, m1, … each of which follows the one before."""
    keys = [f"m{n}" for n in range(first, first + count)]
    return dict(zip(keys, [after, *keys], strict=False))


def stored(saver: SQLiteCheckpointer, *shape: Any, advance: Any = lambda count: None) -> int:
    return ThreadImport(
        saver, "c", build_chatgpt_conversation(conversation(*shape))
    ).store_new_messages(advance)


def said(saver: SQLiteCheckpointer, checkpoint_id: str | None = None) -> list[str]:
    items = saver.history("c", checkpoint_id=checkpoint_id)
    return [item.value.id for item in items if not item.branch]


def tips(saver: SQLiteCheckpointer) -> list[list[str]]:
    """What was said on the way to the end of each branch."""
    found = saver.checkpoints("c")
    ends = {info.checkpoint_id for info in found} - {info.parent_id for info in found}
    return sorted(said(saver, end) for end in ends)


def tree(saver: SQLiteCheckpointer) -> Any:
    """Each checkpoint as the message it ends with, the one it follows, and its size."""
    found = saver.checkpoints("c")
    names = {info.checkpoint_id: info.metadata["imported"] for info in found}
    return [
        (names[i.checkpoint_id], names.get(i.parent_id or ""), i.is_head, i.counts, i.ts)
        for i in reversed(found)
    ]


def items(saver: SQLiteCheckpointer) -> int:
    return saver.thread("c").items


def test_checkpoints_grow_slower_than_messages(file_saver: SQLiteCheckpointer) -> None:
    """One for each of the first turns; the sum of their sizes is proportional to the messages."""
    told: list[int] = []
    stored(file_saver, chain(4000), "m3999", advance=told.append)
    sizes = [info.counts["messages"] for info in file_saver.checkpoints("c")][::-1]

    assert sizes[:32] == list(range(2, 65, 2))
    assert all(after - before <= after // 32 + 2 for before, after in pairwise(sizes[32:]))
    assert sum(sizes) < 40 * 4000
    assert (said(file_saver), items(file_saver)) == ([f"m{n}" for n in range(4000)], 4000)
    assert told == sorted(set(told))
    assert len(told) > 100


class Counts(SQLiteCheckpointer):
    """A checkpointer that counts the messages that it is given to store."""

    given = 0

    def put(self, config: Any, checkpoint: Any, *rest: Any) -> Any:
        value = checkpoint["channel_values"]["messages"]
        self.given += len(value.items if isinstance(value, Continuation) else value)
        return super().put(config, checkpoint, *rest)


@pytest.mark.parametrize("turns", [50, 400])
def test_regenerated_answers_cost_no_more_than_others(turns: int, tmp_path: Path) -> None:
    """Each message is passed to the database about once, however many branches there are."""
    parents: Parents = {}
    last: str | None = None
    for turn in range(turns):
        parents |= {f"q{turn}": last, f"b{turn}": f"q{turn}", f"a{turn}": f"q{turn}"}
        last = f"a{turn}"
    with Counts.open(tmp_path / "x.db") as saver:
        stored(saver, parents, str(last))
        given = saver.given
        grown = {**parents, "more": str(last)}
        new = [stored(saver, shape, "more") for shape in (grown, grown)]

        assert given < 1.2 * len(parents)
        assert new == [1, 0]
        assert items(saver) == len(parents) + 1
        assert len([item for item in saver.history("c") if item.branch]) == turns


@pytest.mark.parametrize("fork", [10, 11, 100, 101, 102, 250, 299])
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
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1

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
    grown = {**chain(4), **chain(4, 4, "m1")}, "m7"
    with Dies.open(tmp_path / "x.db") as saver:
        stored(saver, chain(4), "m3")
        graph: Any = chat_graph(checkpointer=saver)
        graph.invoke({"messages": [("user", "and here")]}, {"configurable": {"thread_id": "c"}})
        talk = said(saver)
        saver.left = 2
        with pytest.raises(KeyboardInterrupt):
            stored(saver, *grown)
    with Dies.open(tmp_path / "x.db") as saver:
        stored(saver, *grown)

        assert (items(saver), len(talk)) == (10, 6)
        assert talk == said(saver)


def test_a_thread_that_was_rewound_stays_there(file_saver: SQLiteCheckpointer) -> None:
    """An import without news moves nothing, nor does one after a prune bring anything back."""
    stored(file_saver, chain(9), "m8")
    file_saver.rewind("c", file_saver.checkpoints("c")[3].checkpoint_id)
    rewound = said(file_saver)

    assert stored(file_saver, chain(9), "m8") == 0
    assert said(file_saver) == rewound == [f"m{n}" for n in range(4)]
    file_saver.prune(["c"])
    before = tree(file_saver)
    assert stored(file_saver, chain(4), "m3") == 0
    assert tree(file_saver) == before


def test_an_import_warns_of_no_conflict(
    file_saver: SQLiteCheckpointer, caplog: pytest.LogCaptureFixture
) -> None:
    """Its branches are meant, so no run is said to have lost against another."""
    with caplog.at_level(logging.INFO, "perdure"):
        for shape in SHAPES:
            stored(file_saver, *shape)

    assert [record for record in caplog.records if "branch" in record.message] == []


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


@st.composite
def trees(draw: st.DrawFn) -> tuple[Parents, str, frozenset[str]]:
    """Messages with their parents, the one shown last, and those that are empty."""
    count = draw(st.integers(1, 12))
    keys = [f"m{n}" for n in range(count)]
    parents = {
        key: draw(st.sampled_from([None, *keys[:n]])) if n else None for n, key in enumerate(keys)
    }
    return parents, draw(st.sampled_from(keys)), draw(st.frozensets(st.sampled_from(keys)))


@given(trees())
def test_any_tree_is_imported_with_every_branch(shape: tuple[Parents, str, frozenset[str]]) -> None:
    """The way to each checkpoint is its history, and the thread's own is the branch shown last."""
    parents, current, empty = shape

    def way(key: str | None) -> list[str]:
        if key is None:
            return []
        return way(parents[key]) + ([] if key in empty else [key])

    with SQLiteCheckpointer.open(":memory:") as saver:
        if not build_chatgpt_conversation(conversation(*shape)).nodes:
            return
        stored(saver, *shape)
        for info in saver.checkpoints("c"):
            assert way(info.metadata["imported"]) == said(saver, info.checkpoint_id)
        history = saver.history("c")
    shown = {item.value.id for item in history if not item.branch}

    assert not way(current) or way(current) == [i.value.id for i in history if not i.branch]
    assert {item.value.id for item in history} == parents.keys() - empty
    assert shown | {i.value.id for i in history if i.branch} == parents.keys() - empty


def test_an_older_export_changes_nothing(file_saver: SQLiteCheckpointer) -> None:
    """A newer one brings what is new, and the older one after it leaves the thread where it is."""
    new = [stored(file_saver, chain(n), f"m{n - 1}") for n in (70, 70, 99, 99, 70)]

    assert new == [70, 0, 29, 0, 0]
    assert len(said(file_saver)) == 99
