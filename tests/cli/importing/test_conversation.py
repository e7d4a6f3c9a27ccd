"""An import of a conversation uses few checkpoints, and continues after an interruption."""

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
from perdure.cli.importing.chatgpt import build_chatgpt_conversation
from perdure.cli.importing.thread_import import ThreadImport
from perdure.graphs import chat_graph

LONG = 300
Parents = dict[str, str | None]


def build_chatgpt_export(
    parents: Parents, current: str, empty: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Build a conversation of ChatGPT's export, with a node for each key below ChatGPT's root."""
    mapping: dict[str, Any] = {"root": {"parent": None}}
    for number, (key, parent) in enumerate(parents.items()):
        content = {"content_type": "text", "parts": ["" if key in empty else f"says {key}"]}
        author = {"role": ("user", "assistant")[number % 2]}
        message = {"author": author, "create_time": float(number), "content": content}
        mapping[key] = {"message": message, "parent": parent or "root"}
    return {"conversation_id": "c", "mapping": mapping, "current_node": current}


def build_chain(count: int, first: int = 0, parent: str | None = None) -> Parents:
    """Build messages m0, m1, … of which each follows the previous one."""
    keys = [f"m{n}" for n in range(first, first + count)]
    return dict(zip(keys, [parent, *keys], strict=False))


def import_conversation(
    saver: SQLiteCheckpointer, *tree: Any, advance: Any = lambda count: None
) -> int:
    """Import a conversation, and return the number of new messages."""
    return ThreadImport(
        saver, "c", build_chatgpt_conversation(build_chatgpt_export(*tree))
    ).store_new_messages(advance)


def read_message_ids(saver: SQLiteCheckpointer, checkpoint_id: str | None = None) -> list[str]:
    """Return the ids of the messages up to a checkpoint, without those of branches."""
    items = saver.history("c", checkpoint_id=checkpoint_id)
    return [item.value.id for item in items if not item.branch]


def read_branches(saver: SQLiteCheckpointer) -> list[list[str]]:
    """Return the message ids on the path to the end of each branch."""
    checkpoints = saver.checkpoints("c")
    ends = {info.checkpoint_id for info in checkpoints} - {info.parent_id for info in checkpoints}
    return sorted(read_message_ids(saver, end) for end in ends)


def read_checkpoint_tree(saver: SQLiteCheckpointer) -> Any:
    """Return for each checkpoint its last message, that of its parent, and its size."""
    checkpoints = saver.checkpoints("c")
    names = {info.checkpoint_id: info.metadata["imported"] for info in checkpoints}
    return [
        (names[i.checkpoint_id], names.get(i.parent_id or ""), i.is_head, i.counts, i.ts)
        for i in reversed(checkpoints)
    ]


def count_items(saver: SQLiteCheckpointer) -> int:
    """Return the number of stored items."""
    return saver.thread("c").items


def test_sum_of_checkpoint_sizes_is_proportional_to_messages(
    file_saver: SQLiteCheckpointer,
) -> None:
    """The first turns have a checkpoint each, and later checkpoints are further apart."""
    progress: list[int] = []
    import_conversation(file_saver, build_chain(4000), "m3999", advance=progress.append)
    sizes = [info.counts["messages"] for info in file_saver.checkpoints("c")][::-1]

    assert sizes[:32] == list(range(2, 65, 2))
    assert all(after - before <= after // 32 + 2 for before, after in pairwise(sizes[32:]))
    assert sum(sizes) < 40 * 4000
    assert (read_message_ids(file_saver), count_items(file_saver)) == (
        [f"m{n}" for n in range(4000)],
        4000,
    )
    assert progress == sorted(set(progress))
    assert len(progress) > 100


class CountingCheckpointer(SQLiteCheckpointer):
    """A checkpointer that counts the messages that are passed to it."""

    passed_count = 0

    def put(self, config: Any, checkpoint: Any, *rest: Any) -> Any:
        value = checkpoint["channel_values"]["messages"]
        self.passed_count += len(value.items if isinstance(value, Continuation) else value)
        return super().put(config, checkpoint, *rest)


@pytest.mark.parametrize("turns", [50, 400])
def test_messages_of_regenerated_answers_are_passed_about_once(turns: int, tmp_path: Path) -> None:
    """Each message is passed to the database about once, however many branches there are."""
    parents: Parents = {}
    last: str | None = None
    for turn in range(turns):
        parents |= {f"q{turn}": last, f"b{turn}": f"q{turn}", f"a{turn}": f"q{turn}"}
        last = f"a{turn}"
    with CountingCheckpointer.open(tmp_path / "x.db") as saver:
        import_conversation(saver, parents, str(last))
        passed_count = saver.passed_count
        grown = {**parents, "more": str(last)}
        new_counts = [import_conversation(saver, shape, "more") for shape in (grown, grown)]

        assert passed_count < 1.2 * len(parents)
        assert new_counts == [1, 0]
        assert count_items(saver) == len(parents) + 1
        assert len([item for item in saver.history("c") if item.branch]) == turns


@pytest.mark.parametrize("fork", [10, 11, 100, 101, 102, 250, 299])
def test_later_branch_may_begin_at_any_message(fork: int, file_saver: SQLiteCheckpointer) -> None:
    """The branch may begin at a message that was stored together with later ones."""
    whole = build_chain(LONG)
    import_conversation(file_saver, whole, "m299")
    grown = {**whole, **build_chain(3, LONG, f"m{fork}")}
    new_counts = [
        import_conversation(file_saver, grown, "m302"),
        import_conversation(file_saver, grown, "m302"),
    ]
    branch = [f"m{n}" for n in [*range(fork + 1), *range(LONG, LONG + 3)]]

    assert new_counts == [3, 0]
    assert read_message_ids(file_saver) == branch
    assert read_branches(file_saver) == sorted(
        [branch, *([list(whole)] if fork < LONG - 1 else [])]
    )
    assert count_items(file_saver) == LONG + 3


def test_import_moves_head_back_to_message_shown_last(file_saver: SQLiteCheckpointer) -> None:
    """An export whose shown message is an older one moves the head back to this message."""
    import_conversation(file_saver, build_chain(LONG), "m299")
    import_conversation(file_saver, {**build_chain(LONG), **build_chain(1, LONG, "m250")}, "m201")

    assert read_message_ids(file_saver) == [f"m{n}" for n in range(202)]
    assert count_items(file_saver) == LONG + 1


class InterruptedCheckpointer(SQLiteCheckpointer):
    """A checkpointer that raises KeyboardInterrupt instead of its n-th write."""

    writes_left = 10**9

    def _count_write(self) -> None:
        if not self.writes_left:
            raise KeyboardInterrupt
        self.writes_left -= 1

    def put(self, *args: Any, **options: Any) -> Any:
        self._count_write()
        return super().put(*args, **options)

    def rewind(self, *args: Any, **options: Any) -> None:
        self._count_write()
        super().rewind(*args, **options)


SHAPES = [
    (build_chain(90), "m89"),
    ({**build_chain(90), **build_chain(5, 90, "m70"), **build_chain(5, 95, "m70")}, "m94"),
    ({**build_chain(5), **build_chain(5, 5), **build_chain(3, 10, "m2")}, "m4"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=["chain", "forks", "roots"])
def test_interrupted_import_is_completed_by_next_import(shape: Any, tmp_path: Path) -> None:
    """The thread is the same, whichever write the interrupted import stopped before."""
    with InterruptedCheckpointer.open(tmp_path / "whole.db") as saver:
        import_conversation(saver, *shape)
        expected, writes = read_checkpoint_tree(saver), 10**9 - saver.writes_left
    for count in range(0, writes, 3 if writes > 30 else 1):
        with InterruptedCheckpointer.open(tmp_path / f"{count}.db") as saver:
            saver.writes_left = count
            with pytest.raises(KeyboardInterrupt):
                import_conversation(saver, *shape)
        with InterruptedCheckpointer.open(tmp_path / f"{count}.db") as saver:
            import_conversation(saver, *shape)
            assert sorted(expected) == sorted(read_checkpoint_tree(saver))
            assert count_items(saver) == len(shape[0])


def test_interrupted_branch_import_restores_head_of_continued_thread(tmp_path: Path) -> None:
    """If an import is killed before it restored the head, the next import restores it."""
    grown = {**build_chain(4), **build_chain(4, 4, "m1")}, "m7"
    with InterruptedCheckpointer.open(tmp_path / "x.db") as saver:
        import_conversation(saver, build_chain(4), "m3")
        graph: Any = chat_graph(checkpointer=saver)
        graph.invoke({"messages": [("user", "and here")]}, {"configurable": {"thread_id": "c"}})
        ids_before = read_message_ids(saver)
        saver.writes_left = 2
        with pytest.raises(KeyboardInterrupt):
            import_conversation(saver, *grown)
    with InterruptedCheckpointer.open(tmp_path / "x.db") as saver:
        import_conversation(saver, *grown)

        assert (count_items(saver), len(ids_before)) == (10, 6)
        assert ids_before == read_message_ids(saver)


def test_import_without_new_messages_keeps_rewound_head(file_saver: SQLiteCheckpointer) -> None:
    """After a prune, an import without new messages restores nothing."""
    import_conversation(file_saver, build_chain(9), "m8")
    file_saver.rewind("c", file_saver.checkpoints("c")[3].checkpoint_id)
    rewound = read_message_ids(file_saver)

    assert import_conversation(file_saver, build_chain(9), "m8") == 0
    assert read_message_ids(file_saver) == rewound == [f"m{n}" for n in range(4)]
    file_saver.prune(["c"])
    before = read_checkpoint_tree(file_saver)
    assert import_conversation(file_saver, build_chain(4), "m3") == 0
    assert read_checkpoint_tree(file_saver) == before


def test_import_of_branches_logs_no_conflict(
    file_saver: SQLiteCheckpointer, caplog: pytest.LogCaptureFixture
) -> None:
    """The branches are intended, so no run is reported as overtaken by another."""
    with caplog.at_level(logging.INFO, "perdure"):
        for shape in SHAPES:
            import_conversation(file_saver, *shape)

    assert [record for record in caplog.records if "branch" in record.message] == []


@given(st.integers(60, 200), st.lists(st.integers(0, 199), max_size=4), st.data())
def test_import_in_two_steps_equals_import_at_once(count: int, forks: list[int], data: Any) -> None:
    """Both have the same branches, and each message is stored once."""
    parents = build_chain(count)
    for number, fork in enumerate(forks):
        parents |= build_chain(3, 1000 + 10 * number, f"m{fork % count}")
    keys = list(parents)
    part = {key: parents[key] for key in keys[: data.draw(st.integers(1, len(keys)))]}
    leaf = data.draw(st.sampled_from(keys))
    results = []
    for stages in ([(part, data.draw(st.sampled_from(list(part))))], []):
        with SQLiteCheckpointer.open(":memory:") as saver:
            for shape in (*stages, (parents, leaf)):
                import_conversation(saver, *shape)
            results.append(
                (read_message_ids(saver), count_items(saver), set(map(tuple, read_branches(saver))))
            )

    assert results[1][1] == results[0][1] == len(parents)
    assert results[0][2] >= results[1][2]
    assert results[1][0][-1] == leaf


@st.composite
def trees(draw: st.DrawFn) -> tuple[Parents, str, frozenset[str]]:
    """Generate messages with their parents, the one shown last, and those that are empty."""
    count = draw(st.integers(1, 12))
    keys = [f"m{n}" for n in range(count)]
    parents = {
        key: draw(st.sampled_from([None, *keys[:n]])) if n else None for n, key in enumerate(keys)
    }
    return parents, draw(st.sampled_from(keys)), draw(st.frozensets(st.sampled_from(keys)))


@given(trees())
def test_any_tree_is_imported_with_every_branch(shape: tuple[Parents, str, frozenset[str]]) -> None:
    """Each checkpoint has its path as history, and the thread has the branch shown last."""
    parents, current, empty = shape

    def find_path(key: str | None) -> list[str]:
        if key is None:
            return []
        return find_path(parents[key]) + ([] if key in empty else [key])

    with SQLiteCheckpointer.open(":memory:") as saver:
        if not build_chatgpt_conversation(build_chatgpt_export(*shape)).nodes:
            return
        import_conversation(saver, *shape)
        for info in saver.checkpoints("c"):
            assert find_path(info.metadata["imported"]) == read_message_ids(
                saver, info.checkpoint_id
            )
        history = saver.history("c")
    shown = {item.value.id for item in history if not item.branch}

    assert not find_path(current) or find_path(current) == [
        i.value.id for i in history if not i.branch
    ]
    assert {item.value.id for item in history} == parents.keys() - empty
    assert shown | {i.value.id for i in history if i.branch} == parents.keys() - empty


def test_older_export_after_newer_one_changes_nothing(file_saver: SQLiteCheckpointer) -> None:
    """A newer export adds its new messages; the older one leaves the thread where it is."""
    new_counts = [
        import_conversation(file_saver, build_chain(n), f"m{n - 1}") for n in (70, 70, 99, 99, 70)
    ]

    assert new_counts == [70, 0, 29, 0, 0]
    assert len(read_message_ids(file_saver)) == 99
