"""Methods that perdure adds to langgraph's checkpointer contract, on every backend."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.runtime import Runtime

from perdure.checkpointers import PruneReport, Retention, SQLiteCheckpointer
from perdure.checkpointers.import_metadata import read_thread_head_or_raise
from perdure.errors import (
    ConfigurationError,
    ForbiddenType,
    InvalidConfig,
    UnknownCheckpoint,
    UnknownThread,
)
from tests.backends import KEY
from tests.contracts.puts import (
    checkpoint_id_of,
    config_at,
    list_checkpoint_ids,
    put,
    read_channel_values,
    read_history_texts,
    render_with_types,
    texts_and_seen,
)
from tests.contracts.test_types import Point


def make_messages(*ids: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(f"says {i}", id=i) for i in ids]}


def put_steps(saver: SQLiteCheckpointer, thread: str = "t", steps: int = 4) -> list[str]:
    """Put checkpoints and return their ids.

    Each adds a message and drops the one from two steps before.
    """
    message_ids, checkpoint_ids, parent = [str(i) for i in range(steps)], [], None
    for i in range(steps):
        metadata = {"source": "loop" if i % 2 else "input", "step": i, "run_id": f"run{i // 2}"}
        parent = put(
            saver,
            make_messages(*message_ids[max(0, i - 1) : i + 1]),
            parent,
            thread=thread,
            metadata=metadata,
        )
        saver.put_writes(parent, [("n", i)], f"task{i}")
        checkpoint_ids.append(checkpoint_id_of(parent))
    return checkpoint_ids


def count_stored_bytes(path: Path) -> int:
    """Return the number of bytes in all `body` columns of a database."""
    db = sqlite3.connect(path)
    try:
        tables = ("items", "checkpoints", "writes")
        return sum(
            db.execute(f"SELECT coalesce(sum(length(body)), 0) FROM {table}").fetchone()[0]
            for table in tables
        )
    finally:
        db.close()


def test_delete_thread_removes_all_data_of_thread(saver: SQLiteCheckpointer) -> None:
    """Other threads stay, and deleting an unknown thread raises no error."""
    put_steps(saver)
    put_steps(saver, "other")
    saver.delete_thread("t")
    saver.delete_thread("t")
    put(saver, {"n": 1})

    assert len(list_checkpoint_ids(saver, config_at())) == 1
    assert saver.thread("t").checkpoints == 1
    assert saver.history("t") == []
    assert len(list_checkpoint_ids(saver, config_at("other"))) == 4
    assert read_history_texts(saver, "other") == ["says 0", "says 1", "says 2", "says 3"]


def test_labelled_context_value_is_copied_to_later_checkpoints(saver: SQLiteCheckpointer) -> None:
    """A labelled value of a run's context is in the run's checkpoints and in those that follow."""
    context: Any = Runtime(context={"user_id": "ann", "secret": "x"})
    run: Any = {"configurable": {**config_at()["configurable"], "runtime": context}}
    before = put(saver, {"n": 1}, run)
    saver.copy_context_values_to_metadata("t", ["user_id", "team"])
    during = put(
        saver, {"n": 2}, {"configurable": {**run["configurable"], **before["configurable"]}}
    )
    after = put(saver, {"n": 3}, during)
    put(saver, {"n": 4}, after, metadata={"user_id": "bob"})
    user_ids = [stored.metadata.get("user_id") for stored in saver.list(config_at())]

    assert user_ids == ["bob", "ann", "ann", None]
    assert not any("secret" in stored.metadata for stored in saver.list(config_at()))
    assert [head.thread_id for head in saver.heads(filter={"user_id": "bob"})] == ["t"]
    assert len(list_checkpoint_ids(saver, config_at(), filter={"user_id": "ann"})) == 2
    context.context["user_id"] = "x" * 4_097  # longer than a label of a namespace
    put(saver, {"n": 5}, run)
    assert "user_id" not in read_thread_head_or_raise(saver, "t").metadata


def test_delete_for_runs_deletes_checkpoints_and_moves_heads_back(
    saver: SQLiteCheckpointer,
) -> None:
    """A run's checkpoints are deleted from every thread.

    Heads move to the newest remaining checkpoint.
    """
    ids = put_steps(saver)
    put_steps(saver, "other", 2)
    saver.delete_for_runs(["run1", "no such run"])
    head = saver.get_tuple(config_at())

    assert ids[:2][::-1] == list_checkpoint_ids(saver, config_at())
    assert head is not None
    assert ids[1] == checkpoint_id_of(head.config)
    assert head.pending_writes == [("task1", "n", 1)]
    assert len(list_checkpoint_ids(saver, config_at("other"))) == 2
    saver.delete_for_runs(["run0"])
    assert list_checkpoint_ids(saver, None) == []
    assert saver.get_tuple(config_at()) is None


def test_copy_of_thread_is_independent_of_its_source(saver: SQLiteCheckpointer) -> None:
    """A copy reads like its source, and a change to one does not affect the other."""
    ids = put_steps(saver)
    fork = put(saver, make_messages("fork"), config_at(uid=ids[0]))
    saver.rewind("t", ids[3])
    put(saver, make_messages("below"), ns="sub")
    before = {
        uid: render_with_types(saver.get_tuple(config_at(uid=uid)))
        for uid in [*ids, checkpoint_id_of(fork)]
    }
    saver.copy_thread("t", "copy")
    copied = {uid: render_with_types(saver.get_tuple(config_at("copy", uid=uid))) for uid in before}
    head = saver.get_tuple(config_at("copy"))
    saver.delete_thread("t")
    put(saver, make_messages("3", "new"), config_at("copy", uid=ids[3]), thread="copy")

    assert {uid: text.replace("str('t')", "str('copy')") for uid, text in before.items()} == copied
    assert head is not None
    assert ids[3] == checkpoint_id_of(head.config)
    assert [f"says {i}" for i in (*range(4), "fork", "new")] == read_history_texts(saver, "copy")
    assert [i.value.content for i in saver.history("copy") if i.branch] == ["says fork"]
    assert read_history_texts(saver, "copy", checkpoint_ns="sub") == ["says below"]
    assert saver.get_tuple(config_at()) is None


def test_copy_thread_to_checkpoint_copies_only_its_ancestors(saver: SQLiteCheckpointer) -> None:
    """Only the checkpoint, its ancestors and their messages are copied."""
    ids = put_steps(saver)
    fork = checkpoint_id_of(put(saver, make_messages("0", "fork"), config_at(uid=ids[0])))
    saver.copy_thread("t", "copy", checkpoint_id=ids[2])
    saver.copy_thread("t", "forked", checkpoint_id=fork)

    assert ids[:3][::-1] == list_checkpoint_ids(saver, config_at("copy"))
    assert read_history_texts(saver, "copy") == ["says 0", "says 1", "says 2"]
    assert saver.thread("copy").items == 3
    assert [fork, ids[0]] == list_checkpoint_ids(saver, config_at("forked"))
    assert read_history_texts(saver, "forked") == ["says 0", "says fork"]
    assert render_with_types(read_channel_values(saver, config_at(uid=fork))) == render_with_types(
        read_channel_values(saver, config_at("forked"))
    )


def test_copy_thread_refuses_existing_target_and_unknown_source(saver: SQLiteCheckpointer) -> None:
    """A refused copy writes nothing."""
    put_steps(saver)
    put(saver, {"n": 1}, thread="taken")

    with pytest.raises(InvalidConfig, match="taken"):
        saver.copy_thread("t", "taken")
    with pytest.raises(InvalidConfig, match="'t'"):
        saver.copy_thread("t", "t")
    with pytest.raises(UnknownThread, match="nobody"):
        saver.copy_thread("nobody", "copy")
    with pytest.raises(UnknownCheckpoint, match="no-such"):
        saver.copy_thread("t", "copy", checkpoint_id="no-such")
    assert {"t", "taken"} == {info.thread_id for info in saver.threads()}


def test_prune_keeps_heads_and_history_or_deletes_threads(saver: SQLiteCheckpointer) -> None:
    """`keep_latest` keeps heads and history, `delete` removes the thread.

    Other strategies are refused.
    """
    ids = put_steps(saver)
    below = checkpoint_id_of(put(saver, make_messages("below"), ns="sub"))
    before = render_with_types(saver.get_tuple(config_at()))
    saver.prune(["t", "nobody"])

    assert [ids[3]] == list_checkpoint_ids(saver, config_at())
    assert [below] == list_checkpoint_ids(saver, config_at(ns="sub"))
    assert before == render_with_types(saver.get_tuple(config_at()))
    assert texts_and_seen(saver.history("t")) == [
        ("says 0", False),
        ("says 1", False),
        ("says 2", True),
        ("says 3", True),
    ]
    with pytest.raises(ConfigurationError, match="keep_some"):
        saver.prune(["t"], strategy="keep_some")
    saver.prune(["t"], strategy="delete")
    assert saver.threads() == []


@pytest.mark.parametrize(
    ("rule", "kept_steps"),
    [
        (Retention(last=0), [3]),
        (Retention(last=2), [2, 3]),
        (Retention(last=9), [0, 1, 2, 3]),
        (Retention(turns=True), [1, 3]),
        (Retention(days=0.5), [3]),
        (Retention(days=2.5), [1, 2, 3]),
        (Retention(days=1.5, turns=True), [1, 2, 3]),
        (Retention(last=1, history=False), [3]),
    ],
    ids=str,
)
def test_retain_keeps_checkpoints_that_rule_names_and_head(
    saver: SQLiteCheckpointer,
    monkeypatch: pytest.MonkeyPatch,
    rule: Retention,
    kept_steps: list[int],
) -> None:
    """The head always stays. The report counts the checkpoints and items that were removed."""
    now, parent, ids = time.time(), None, []
    for i in range(4):
        monkeypatch.setattr(time, "time", lambda i=i: now - 86400 * (3 - i))
        metadata = {"source": "loop" if i % 2 else "input"}
        parent = put(saver, make_messages(str(i)), parent, metadata=metadata)
        ids.append(checkpoint_id_of(parent))
    put(saver, make_messages("other"), thread="other")
    report = saver.retain(rule)
    removed_checkpoints = 4 - len(kept_steps)
    removed_items = 0 if rule.history else removed_checkpoints

    assert [ids[i] for i in kept_steps][::-1] == list_checkpoint_ids(saver, config_at())
    assert (
        PruneReport(removed_checkpoints, removed_items, 1 if removed_checkpoints else 0) == report
    )
    assert [f"says {i}" for i in range(removed_items, 4)] == read_history_texts(saver)
    assert read_history_texts(saver, "other") == ["says other"]


def test_retain_changes_only_named_threads(saver: SQLiteCheckpointer) -> None:
    """Empty rules and rules with negative numbers are refused."""
    put_steps(saver)
    put_steps(saver, "other")

    assert PruneReport(3, 0, 1) == saver.retain(Retention(last=1), thread_ids=["t", "nobody"])
    assert saver.thread("other").checkpoints == 4
    for rule in (Retention(), Retention(last=-1), Retention(days=-1.0)):
        with pytest.raises(ConfigurationError, match="retention"):
            saver.retain(rule)


def test_rewind_makes_older_checkpoint_the_head(saver: SQLiteCheckpointer) -> None:
    """Messages after the checkpoint are on a branch from then on."""
    ids = put_steps(saver)
    saver.rewind("t", ids[1])
    history_after_rewind, first_listed = (
        saver.history("t"),
        list_checkpoint_ids(saver, config_at())[0],
    )
    new = checkpoint_id_of(put(saver, make_messages("1", "new"), config_at(uid=ids[1])))
    history_after_put = saver.history("t")

    assert texts_and_seen(history_after_rewind) == [(f"says {i}", i < 2) for i in range(4)]
    assert [item.branch for item in history_after_rewind] == [False, False, True, True]
    assert first_listed == ids[1]
    assert [new, *ids[::-1]] == list_checkpoint_ids(saver, config_at())
    assert [(item.value.content, item.branch) for item in history_after_put] == [
        ("says 0", False),
        ("says 1", False),
        ("says 2", True),
        ("says 3", True),
        ("says new", False),
    ]
    assert [i.checkpoint_id for i in saver.checkpoints("t") if i.is_branch] == ids[:1:-1]
    with pytest.raises(UnknownCheckpoint, match="no-such"):
        saver.rewind("t", "no-such")
    with pytest.raises(UnknownCheckpoint, match="sub"):
        saver.rewind("t", ids[0], checkpoint_ns="sub")


@pytest.mark.parametrize(
    "change_thread",
    [
        lambda saver, ids: None,
        lambda saver, ids: saver.prune(["t"]),
        lambda saver, ids: saver.retain(Retention(last=2, history=False)),
        lambda saver, ids: saver.copy_thread("t", "copy"),
        lambda saver, ids: saver.copy_thread("t", "copy", checkpoint_id=ids[1]),
        lambda saver, ids: saver.delete_for_runs(["run1"]),
        lambda saver, ids: put(saver, {"n": "x" * 999}, config_at(uid=ids[2]), uid=ids[3]),
        lambda saver, ids: saver.put_writes(config_at(uid=ids[3]), [("a", 1), ("b", 2)], "task3"),
    ],
    ids=[
        "put",
        "prune",
        "retain-without-history",
        "copy",
        "copy-to-checkpoint",
        "delete-for-runs",
        "put-again",
        "put-writes",
    ],
)
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_size_bytes_equals_size_of_stored_rows(
    tmp_path: Path, key: bytes | None, change_thread: Callable[[SQLiteCheckpointer, list[str]], Any]
) -> None:
    """The sizes that `threads()` returns equal the sizes of the rows after every kind of change."""
    with SQLiteCheckpointer.open(tmp_path / "x.db", key=key) as saver:
        change_thread(saver, put_steps(saver))
        expected = count_stored_bytes(tmp_path / "x.db")

        assert expected == sum(info.size_bytes for info in saver.threads())


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_two_checkpointers_on_one_file_see_each_others_changes(
    tmp_path: Path, key: bytes | None
) -> None:
    """Each checkpointer sees the puts, prunes and deletions of the other in the same process."""
    path = tmp_path / "x.db"
    with (
        SQLiteCheckpointer.open(path, key=key) as one,
        SQLiteCheckpointer.open(path, key=key) as two,
    ):
        first = put(one, make_messages("a"))
        second = put(
            two,
            {
                "messages": [
                    *read_channel_values(two, config_at())["messages"],
                    *make_messages("b")["messages"],
                ]
            },
            first,
        )
        third = put(
            one,
            {
                "messages": [
                    *read_channel_values(one, config_at())["messages"],
                    *make_messages("c")["messages"],
                ]
            },
            second,
        )
        before = read_channel_values(two, config_at())
        two.prune(["t"])
        fourth = put(one, make_messages("b", "d"), third)
        two.retain(Retention(last=1, history=False))
        put(one, make_messages("a", "b", "c", "d"), fourth)

        assert make_messages("a", "b", "c") == before
        assert make_messages("a", "b", "c", "d") == read_channel_values(two, config_at())
        assert make_messages("b", "d") == read_channel_values(one, fourth)
        one.delete_thread("t")
        assert two.get_tuple(config_at()) is None
        put(two, make_messages("a"))
        assert make_messages("a") == read_channel_values(one, config_at())


OTHER_PROCESS = """
import sys
from langchain_core.messages import HumanMessage
from perdure.checkpointers import Retention, SQLiteCheckpointer
from tests.contracts.puts import config_at, put

with SQLiteCheckpointer.open(sys.argv[1]) as saver:
    first = saver.get_tuple(config_at())
    saver.retain(Retention(last=1, history=False))
    talk = [HumanMessage("says b", id="b"), HumanMessage("says c", id="c")]
    put(saver, {"messages": talk}, first.config, uid="theirs")
"""


def test_changes_by_another_process_are_seen_at_once(tmp_path: Path) -> None:
    """Puts and deletions by another process are seen despite the cache."""
    path = tmp_path / "x.db"
    with SQLiteCheckpointer.open(path) as saver:
        first = put(saver, make_messages("a"))
        put(saver, make_messages("b"), first)
        repository = Path(__file__).parents[2]
        subprocess.run([sys.executable, "-c", OTHER_PROCESS, str(path)], check=True, cwd=repository)
        newest = saver.get_tuple(config_at())
        assert newest is not None
        fourth = put(saver, make_messages("a", "c", "d"), newest.config)

        assert checkpoint_id_of(newest.config) == "theirs"
        assert make_messages("b", "c") == newest.checkpoint["channel_values"]
        assert saver.get_tuple(first) is None
        assert make_messages("a", "c", "d") == read_channel_values(saver, fourth)
        assert read_history_texts(saver) == ["says b", "says c", "says a", "says d"]


def test_next_version_increases_and_continues_foreign_versions(saver: SQLiteCheckpointer) -> None:
    """Versions are integers from 1.

    After another saver's string versions, they are strings that sort later.
    """
    foreign: Any = InMemorySaver().get_next_version(None, None)
    versions = [foreign]
    for _ in range(12):
        versions.append(saver.get_next_version(versions[-1], None))

    assert [saver.get_next_version(v, None) for v in (None, 1, 7)] == [1, 2, 8]
    assert saver.get_next_version(1.5, None) == 2.5
    assert all(isinstance(version, str) for version in versions)
    assert versions == sorted(set(versions))


def test_clone_with_allowlist_allows_more_types_than_original() -> None:
    """The clone puts and reads more types in the same database. The original still refuses them."""
    name = (Point.__module__, Point.__qualname__)
    with SQLiteCheckpointer.open(":memory:", strict=True) as saver:
        clone = saver.with_allowlist([name])
        config = put(clone, {"p": Point(1, {"k": [2]})})

        assert {"p": Point(1, {"k": [2]})} == read_channel_values(clone, config)
        assert [checkpoint_id_of(config)] == list_checkpoint_ids(clone, config_at())
        with pytest.raises(ForbiddenType, match="Point"):
            saver.get_tuple(config)
        with pytest.raises(ForbiddenType, match="Point"):
            put(saver, {"p": Point(1, {})})


def test_changing_returned_tuple_does_not_change_next_read(saver: SQLiteCheckpointer) -> None:
    """After any change to a returned tuple, the next read returns the stored values."""
    message = HumanMessage("hi", id="a", additional_kwargs={"k": [1]})
    values = {"messages": [message], "deep": {"a": [{"b": ["x" * 200]}]}, "few": [[1]]}
    config = put(saver, values, metadata={"k": {"deep": [1]}})
    saver.put_writes(config, [("deep", {"w": [1]})], "task")
    before = render_with_types(saver.get_tuple(config))
    for _ in range(2):
        stored: Any = saver.get_tuple(config)
        values_of_stored = stored.checkpoint["channel_values"]
        values_of_stored["messages"][0].additional_kwargs["k"].append(2)
        values_of_stored["messages"].append("more")
        values_of_stored["deep"]["a"][0]["b"].append(2)
        values_of_stored["few"][0].append(2)
        stored.checkpoint["channel_versions"].clear()
        stored.metadata["k"]["deep"].append(2)
        stored.pending_writes[0][2]["w"].append(2)
        stored.config["configurable"]["thread_id"] = "other"
    values["deep"]["a"].append("given, not returned")  # type: ignore[index]

    assert before == render_with_types(saver.get_tuple(config))
    assert before == render_with_types(next(iter(saver.list(config_at()))))


def test_message_changed_in_place_is_stored_as_new_version(saver: SQLiteCheckpointer) -> None:
    """The new checkpoint has the changed message, and the old checkpoint has the original."""
    first = put(saver, make_messages(*"abc"))
    changed_values = read_channel_values(saver, first)
    changed_values["messages"][1].content = "changed"
    second = put(saver, changed_values, first)

    assert make_messages(*"abc") == read_channel_values(saver, first)
    assert [m.content for m in read_channel_values(saver, second)["messages"]] == [
        "says a",
        "changed",
        "says c",
    ]
    assert texts_and_seen(saver.history("t")) == [
        ("says a", True),
        ("says b", False),
        ("says c", True),
        ("changed", True),
    ]
    assert texts_and_seen(saver.history("t", ends=(1, 2))) == [
        ("says a", True),
        ("says c", True),
        ("changed", True),
    ]
    assert [item.position for item in saver.history("t", ends=(1, 2))] == [0, 2, 3]
