"""What perdure adds to langgraph's contract, on every backend; history and lists have their own."""

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
from perdure.checkpointers.titles import read_existing_head
from perdure.errors import (
    ConfigurationError,
    ForbiddenType,
    InvalidConfig,
    UnknownCheckpoint,
    UnknownThread,
)
from tests.backends import KEY
from tests.contracts.puts import at, listed, put, shape, texts, told, uid_of, values_at
from tests.contracts.test_types import Point


def say(*ids: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(f"says {i}", id=i) for i in ids]}


def grow(saver: SQLiteCheckpointer, thread: str = "t", steps: int = 4) -> list[str]:
    """A thread whose every step says one thing and forgets what came two before."""
    said, out, parent = [str(i) for i in range(steps)], [], None
    for i in range(steps):
        kind = {"source": "loop" if i % 2 else "input", "step": i, "run_id": f"run{i // 2}"}
        parent = put(saver, say(*said[max(0, i - 1) : i + 1]), parent, thread=thread, metadata=kind)
        saver.put_writes(parent, [("n", i)], f"task{i}")
        out.append(uid_of(parent))
    return out


def stored_bytes(path: Path) -> int:
    """What all rows of a database hold."""
    db = sqlite3.connect(path)
    try:
        tables = ("items", "checkpoints", "writes")
        return sum(
            db.execute(f"SELECT coalesce(sum(length(body)), 0) FROM {table}").fetchone()[0]
            for table in tables
        )
    finally:
        db.close()


def test_delete_thread_leaves_nothing(saver: SQLiteCheckpointer) -> None:
    """Its checkpoints, writes, tags and name are gone; others stay; unknown ones are no error."""
    grow(saver)
    grow(saver, "other")
    saver.delete_thread("t")
    saver.delete_thread("t")
    put(saver, {"n": 1})

    assert len(listed(saver, at())) == 1
    assert saver.thread("t").checkpoints == 1
    assert saver.history("t") == []
    assert len(listed(saver, at("other"))) == 4
    assert texts(saver, "other") == ["says 0", "says 1", "says 2", "says 3"]


def test_labels_are_passed_on(saver: SQLiteCheckpointer) -> None:
    """A value of a run's context that was named is in its checkpoints and in what follows them."""
    context: Any = Runtime(context={"user_id": "ann", "secret": "x"})
    run: Any = {"configurable": {**at()["configurable"], "runtime": context}}
    before = put(saver, {"n": 1}, run)
    saver.label("t", ["user_id", "team"])
    during = put(
        saver, {"n": 2}, {"configurable": {**run["configurable"], **before["configurable"]}}
    )
    after = put(saver, {"n": 3}, during)
    put(saver, {"n": 4}, after, metadata={"user_id": "bob"})
    found = [each.metadata.get("user_id") for each in saver.list(at())]

    assert found == ["bob", "ann", "ann", None]
    assert not any("secret" in each.metadata for each in saver.list(at()))
    assert [head.thread_id for head in saver.heads(filter={"user_id": "bob"})] == ["t"]
    assert len(listed(saver, at(), filter={"user_id": "ann"})) == 2
    context.context["user_id"] = "x" * 4_097  # longer than a label of a namespace
    put(saver, {"n": 5}, run)
    assert "user_id" not in read_existing_head(saver, "t").metadata


def test_delete_for_runs(saver: SQLiteCheckpointer) -> None:
    """A run's checkpoints go from every thread; heads move back to what is left."""
    ids = grow(saver)
    grow(saver, "other", 2)
    saver.delete_for_runs(["run1", "no such run"])
    left = saver.get_tuple(at())

    assert ids[:2][::-1] == listed(saver, at())
    assert left is not None
    assert ids[1] == uid_of(left.config)
    assert left.pending_writes == [("task1", "n", 1)]
    assert len(listed(saver, at("other"))) == 2
    saver.delete_for_runs(["run0"])
    assert listed(saver, None) == []
    assert saver.get_tuple(at()) is None


def test_copy_thread_is_independent_of_its_source(saver: SQLiteCheckpointer) -> None:
    """A copy reads like its source, and what happens to one does not reach the other."""
    ids = grow(saver)
    fork = put(saver, say("fork"), at(uid=ids[0]))
    saver.rewind("t", ids[3])
    put(saver, say("below"), ns="sub")
    before = {uid: shape(saver.get_tuple(at(uid=uid))) for uid in [*ids, uid_of(fork)]}
    saver.copy_thread("t", "copy")
    copied = {uid: shape(saver.get_tuple(at("copy", uid=uid))) for uid in before}
    head = saver.get_tuple(at("copy"))
    saver.delete_thread("t")
    put(saver, say("3", "new"), at("copy", uid=ids[3]), thread="copy")

    assert {uid: text.replace("str('t')", "str('copy')") for uid, text in before.items()} == copied
    assert head is not None
    assert ids[3] == uid_of(head.config)
    assert [f"says {i}" for i in (*range(4), "fork", "new")] == texts(saver, "copy")
    assert [i.value.content for i in saver.history("copy") if i.branch] == ["says fork"]
    assert texts(saver, "copy", checkpoint_ns="sub") == ["says below"]
    assert saver.get_tuple(at()) is None


def test_copy_thread_up_to_a_checkpoint(saver: SQLiteCheckpointer) -> None:
    """Only the way to the checkpoint is copied, with what was said on it."""
    ids = grow(saver)
    fork = uid_of(put(saver, say("0", "fork"), at(uid=ids[0])))
    saver.copy_thread("t", "copy", checkpoint_id=ids[2])
    saver.copy_thread("t", "forked", checkpoint_id=fork)

    assert ids[:3][::-1] == listed(saver, at("copy"))
    assert texts(saver, "copy") == ["says 0", "says 1", "says 2"]
    assert saver.thread("copy").items == 3
    assert [fork, ids[0]] == listed(saver, at("forked"))
    assert texts(saver, "forked") == ["says 0", "says fork"]
    assert shape(values_at(saver, at(uid=fork))) == shape(values_at(saver, at("forked")))


def test_what_copy_thread_refuses(saver: SQLiteCheckpointer) -> None:
    """A target that exists, and a source or checkpoint that does not; nothing is half copied."""
    grow(saver)
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


def test_prune_strategies(saver: SQLiteCheckpointer) -> None:
    """`keep_latest` keeps the heads and what was said, `delete` nothing; others are refused."""
    ids = grow(saver)
    below = uid_of(put(saver, say("below"), ns="sub"))
    before = shape(saver.get_tuple(at()))
    saver.prune(["t", "nobody"])

    assert [ids[3]] == listed(saver, at())
    assert [below] == listed(saver, at(ns="sub"))
    assert before == shape(saver.get_tuple(at()))
    assert told(saver.history("t")) == [
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
    ("rule", "kept"),
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
def test_retention_rules(
    saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch, rule: Retention, kept: list[int]
) -> None:
    """A checkpoint stays if a rule keeps it, and the head stays; the report counts the rest."""
    now, parent, ids = time.time(), None, []
    for i in range(4):
        monkeypatch.setattr(time, "time", lambda i=i: now - 86400 * (3 - i))
        kind = {"source": "loop" if i % 2 else "input"}
        parent = put(saver, say(str(i)), parent, metadata=kind)
        ids.append(uid_of(parent))
    put(saver, say("other"), thread="other")
    report = saver.retain(rule)
    gone = 4 - len(kept)
    forgotten = 0 if rule.history else gone

    assert [ids[i] for i in kept][::-1] == listed(saver, at())
    assert PruneReport(gone, forgotten, 1 if gone else 0) == report
    assert [f"says {i}" for i in range(forgotten, 4)] == texts(saver)
    assert texts(saver, "other") == ["says other"]


def test_retain_some_threads(saver: SQLiteCheckpointer) -> None:
    """Only the threads named are touched, and empty or negative rules are refused."""
    grow(saver)
    grow(saver, "other")

    assert PruneReport(3, 0, 1) == saver.retain(Retention(last=1), thread_ids=["t", "nobody"])
    assert saver.thread("other").checkpoints == 4
    for rule in (Retention(), Retention(last=-1), Retention(days=-1.0)):
        with pytest.raises(ConfigurationError, match="retention"):
            saver.retain(rule)


def test_rewind(saver: SQLiteCheckpointer) -> None:
    """An older checkpoint becomes the head; what was said after it is on a branch from then on."""
    ids = grow(saver)
    saver.rewind("t", ids[1])
    rewound, first = saver.history("t"), listed(saver, at())[0]
    new = uid_of(put(saver, say("1", "new"), at(uid=ids[1])))
    after = saver.history("t")

    assert told(rewound) == [(f"says {i}", i < 2) for i in range(4)]
    assert [item.branch for item in rewound] == [False, False, True, True]
    assert first == ids[1]
    assert [new, *ids[::-1]] == listed(saver, at())
    assert [(item.value.content, item.branch) for item in after] == [
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
    "act",
    [
        lambda saver, ids: None,
        lambda saver, ids: saver.prune(["t"]),
        lambda saver, ids: saver.retain(Retention(last=2, history=False)),
        lambda saver, ids: saver.copy_thread("t", "copy"),
        lambda saver, ids: saver.copy_thread("t", "copy", checkpoint_id=ids[1]),
        lambda saver, ids: saver.delete_for_runs(["run1"]),
        lambda saver, ids: put(saver, {"n": "x" * 999}, at(uid=ids[2]), uid=ids[3]),
        lambda saver, ids: saver.put_writes(at(uid=ids[3]), [("a", 1), ("b", 2)], "task3"),
    ],
    ids=["put", "prune", "forget", "copy", "copy-part", "runs", "once-more", "writes"],
)
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_size_bytes_is_what_is_stored(
    tmp_path: Path, key: bytes | None, act: Callable[[SQLiteCheckpointer, list[str]], Any]
) -> None:
    """The sizes that `threads()` tells are those of the rows, whatever happened to them."""
    with SQLiteCheckpointer.open(tmp_path / "x.db", key=key) as saver:
        act(saver, grow(saver))
        expected = stored_bytes(tmp_path / "x.db")

        assert expected == sum(info.size_bytes for info in saver.threads())


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_two_savers_on_one_file(tmp_path: Path, key: bytes | None) -> None:
    """In one process each sees what the other wrote, pruned and deleted."""
    path = tmp_path / "x.db"
    with (
        SQLiteCheckpointer.open(path, key=key) as one,
        SQLiteCheckpointer.open(path, key=key) as two,
    ):
        first = put(one, say("a"))
        second = put(
            two, {"messages": [*values_at(two, at())["messages"], *say("b")["messages"]]}, first
        )
        third = put(
            one, {"messages": [*values_at(one, at())["messages"], *say("c")["messages"]]}, second
        )
        before = values_at(two, at())
        two.prune(["t"])
        fourth = put(one, say("b", "d"), third)
        two.retain(Retention(last=1, history=False))
        put(one, say("a", "b", "c", "d"), fourth)

        assert say("a", "b", "c") == before
        assert say("a", "b", "c", "d") == values_at(two, at())
        assert say("b", "d") == values_at(one, fourth)
        one.delete_thread("t")
        assert two.get_tuple(at()) is None
        put(two, say("a"))
        assert say("a") == values_at(one, at())


WRITER = """
import sys
from langchain_core.messages import HumanMessage
from perdure.checkpointers import Retention, SQLiteCheckpointer
from tests.contracts.puts import at, put

with SQLiteCheckpointer.open(sys.argv[1]) as saver:
    first = saver.get_tuple(at())
    saver.retain(Retention(last=1, history=False))
    talk = [HumanMessage("says b", id="b"), HumanMessage("says c", id="c")]
    put(saver, {"messages": talk}, first.config, uid="theirs")
"""


def test_another_process_is_seen(tmp_path: Path) -> None:
    """What another process put and deleted is seen at once, past anything remembered."""
    path = tmp_path / "x.db"
    with SQLiteCheckpointer.open(path) as saver:
        first = put(saver, say("a"))
        put(saver, say("b"), first)
        there = Path(__file__).parents[2]
        subprocess.run([sys.executable, "-c", WRITER, str(path)], check=True, cwd=there)
        found = saver.get_tuple(at())
        assert found is not None
        fourth = put(saver, say("a", "c", "d"), found.config)

        assert uid_of(found.config) == "theirs"
        assert say("b", "c") == found.checkpoint["channel_values"]
        assert saver.get_tuple(first) is None
        assert say("a", "c", "d") == values_at(saver, fourth)
        assert texts(saver) == ["says b", "says c", "says a", "says d"]


def test_next_versions(saver: SQLiteCheckpointer) -> None:
    """Whole numbers from one; after another saver's versions, strings that sort behind them."""
    foreign: Any = InMemorySaver().get_next_version(None, None)
    versions = [foreign]
    for _ in range(12):
        versions.append(saver.get_next_version(versions[-1], None))

    assert [saver.get_next_version(v, None) for v in (None, 1, 7)] == [1, 2, 8]
    assert saver.get_next_version(1.5, None) == 2.5
    assert all(isinstance(version, str) for version in versions)
    assert versions == sorted(set(versions))


def test_with_allowlist() -> None:
    """The clone takes and reads more types from the same database; the original does not."""
    name = (Point.__module__, Point.__qualname__)
    with SQLiteCheckpointer.open(":memory:", strict=True) as saver:
        clone = saver.with_allowlist([name])
        config = put(clone, {"p": Point(1, {"k": [2]})})

        assert {"p": Point(1, {"k": [2]})} == values_at(clone, config)
        assert [uid_of(config)] == listed(clone, at())
        with pytest.raises(ForbiddenType, match="Point"):
            saver.get_tuple(config)
        with pytest.raises(ForbiddenType, match="Point"):
            put(saver, {"p": Point(1, {})})


def test_what_is_returned_is_never_shared(saver: SQLiteCheckpointer) -> None:
    """Whatever is done to a tuple, the next one is as it was put."""
    message = HumanMessage("hi", id="a", additional_kwargs={"k": [1]})
    values = {"messages": [message], "deep": {"a": [{"b": ["x" * 200]}]}, "few": [[1]]}
    config = put(saver, values, metadata={"k": {"deep": [1]}})
    saver.put_writes(config, [("deep", {"w": [1]})], "task")
    before = shape(saver.get_tuple(config))
    for _ in range(2):
        found: Any = saver.get_tuple(config)
        live = found.checkpoint["channel_values"]
        live["messages"][0].additional_kwargs["k"].append(2)
        live["messages"].append("more")
        live["deep"]["a"][0]["b"].append(2)
        live["few"][0].append(2)
        found.checkpoint["channel_versions"].clear()
        found.metadata["k"]["deep"].append(2)
        found.pending_writes[0][2]["w"].append(2)
        found.config["configurable"]["thread_id"] = "other"
    values["deep"]["a"].append("given, not returned")  # type: ignore[index]

    assert before == shape(saver.get_tuple(config))
    assert before == shape(next(iter(saver.list(at()))))


def test_a_message_changed_in_place_is_stored_again(saver: SQLiteCheckpointer) -> None:
    """A change in place is news: the new checkpoint has it, the old one does not."""
    first = put(saver, say(*"abc"))
    live = values_at(saver, first)
    live["messages"][1].content = "changed"
    second = put(saver, live, first)

    assert say(*"abc") == values_at(saver, first)
    assert [m.content for m in values_at(saver, second)["messages"]] == [
        "says a",
        "changed",
        "says c",
    ]
    assert told(saver.history("t")) == [
        ("says a", True),
        ("says b", False),
        ("says c", True),
        ("changed", True),
    ]
    assert told(saver.history("t", ends=(1, 2))) == [
        ("says a", True),
        ("says c", True),
        ("changed", True),
    ]
    assert [item.position for item in saver.history("t", ends=(1, 2))] == [0, 2, 3]
