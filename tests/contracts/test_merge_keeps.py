"""What the target of a merge, and a copy, keep: times to live, and runs that were rolled back."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.thread_list import ThreadList, TimeToLive
from perdure.errors import ImportFailed
from tests.contracts.puts import put
from tests.contracts.test_merge import PAIRS
from tests.contracts.test_merge import opened as opened

pairs = pytest.mark.parametrize(("source", "target"), PAIRS)


def ttl_of(saver: SQLiteCheckpointer, thread: str) -> TimeToLive | None:
    listed = ThreadList(saver).get(thread)
    assert listed is not None
    return listed.ttl


@pairs
def test_a_thread_comes_with_its_time_to_live(source: str, target: str, opened: Any) -> None:
    old, new = opened(source, "old"), opened(target, "new")
    put(old, {"x": 1}, thread="t", uid="1")
    ThreadList(old).set_ttl("t", TimeToLive(60, False))
    new.import_from(old)

    assert ttl_of(new, "t") == TimeToLive(60, False)


@pairs
def test_the_time_to_live_here_stays(source: str, target: str, opened: Any) -> None:
    """Also if the thread went on there."""
    old, new = opened(source, "old"), opened(target, "new")
    first = put(old, {"x": 1}, thread="t", uid="1")
    new.import_from(old)
    ThreadList(new).set_ttl("t", TimeToLive(60, True))
    ThreadList(old).set_ttl("t", TimeToLive(5, False))
    put(old, {"x": 2}, first, uid="2")
    report = new.import_from(old)

    assert report.checkpoints == 1
    assert ttl_of(new, "t") == TimeToLive(60, True)


@pairs
def test_a_copy_has_the_time_to_live_of_its_source(source: str, target: str, opened: Any) -> None:
    """The time starts when the copy is made."""
    saver = opened(source, "old")
    put(saver, {"x": 1}, thread="t", uid="1")
    ThreadList(saver).set_ttl("t", TimeToLive(60, False))
    saver.copy_thread("t", "copy")
    first, copy = ThreadList(saver).get("t"), ThreadList(saver).get("copy")

    assert first is not None
    assert copy is not None
    assert copy.ttl == first.ttl
    assert first.expires_at is not None
    assert copy.expires_at is not None
    assert copy.expires_at > first.expires_at


@pairs
def test_a_run_that_was_rolled_back_here_does_not_come_back(
    source: str, target: str, opened: Any
) -> None:
    """The thread is refused by name; other threads come, and later runs of the thread too."""
    old, new = opened(source, "old"), opened(target, "new")
    first = put(old, {"x": 1}, thread="t", uid="1")
    second = put(old, {"x": 2}, first, uid="2", metadata={"run_id": "r"})
    put(old, {"x": 1}, thread="other", uid="1")
    new.import_from(old)
    new.delete_for_runs(["r"])
    put(old, {"x": 2}, thread="other-2", uid="1")
    with pytest.raises(ImportFailed, match="contain a run that was rolled back here: 't'"):
        new.import_from(old)
    old.delete_for_runs(["r"])
    put(old, {"x": 3}, first, uid="3")
    report = new.import_from(old)

    assert second["configurable"]["checkpoint_id"] == "2"
    assert [each.checkpoint_id for each in new.checkpoints("t")] == ["3", "1"]
    assert new.checkpoints("other-2") != []
    assert report.checkpoints == 1


@pairs
def test_other_runs_go_on_after_a_rollback(source: str, target: str, opened: Any) -> None:
    """The record of a rollback takes nothing from what the runs of the thread store."""
    saver = opened(source, "old")
    first = put(saver, {"x": 1}, thread="t", uid="1")
    put(saver, {"x": 2}, first, uid="2", metadata={"run_id": "r"})
    loaded = saver.get_tuple(first)
    saver.delete_for_runs(["r"])
    assert loaded is not None
    put(saver, {"x": "kept"}, loaded.config, uid="3")

    found = saver.get_tuple({"configurable": {"thread_id": "t"}})
    assert found is not None
    assert found.checkpoint["channel_values"] == {"x": "kept"}
