"""Imports and copies of threads that have a time to live or runs that were rolled back."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ImportFailed
from perdure.run_tables.thread_list import ThreadList, TimeToLive
from tests.contracts.puts import put
from tests.contracts.test_merge import PAIRS
from tests.contracts.test_merge import open_saver as open_saver

source_target_pairs = pytest.mark.parametrize(("source", "target"), PAIRS)


def read_ttl(saver: SQLiteCheckpointer, thread: str) -> TimeToLive | None:
    listed_thread = ThreadList(saver).get(thread)
    assert listed_thread is not None
    return listed_thread.ttl


@source_target_pairs
def test_import_copies_time_to_live_of_new_thread(
    source: str, target: str, open_saver: Any
) -> None:
    old, new = open_saver(source, "old"), open_saver(target, "new")
    put(old, {"x": 1}, thread="t", uid="1")
    ThreadList(old).set_ttl("t", TimeToLive(60, False))
    new.import_from(old)

    assert read_ttl(new, "t") == TimeToLive(60, False)


@source_target_pairs
def test_import_keeps_time_to_live_set_in_the_target(
    source: str, target: str, open_saver: Any
) -> None:
    """The target's value also stays if the thread continued in the source."""
    old, new = open_saver(source, "old"), open_saver(target, "new")
    first = put(old, {"x": 1}, thread="t", uid="1")
    new.import_from(old)
    ThreadList(new).set_ttl("t", TimeToLive(60, True))
    ThreadList(old).set_ttl("t", TimeToLive(5, False))
    put(old, {"x": 2}, first, uid="2")
    report = new.import_from(old)

    assert report.checkpoints == 1
    assert read_ttl(new, "t") == TimeToLive(60, True)


@source_target_pairs
def test_copied_thread_has_the_time_to_live_of_its_source(
    source: str, target: str, open_saver: Any
) -> None:
    """The time to live starts when the copy is made."""
    saver = open_saver(source, "old")
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


@source_target_pairs
def test_import_refuses_thread_with_a_run_that_the_target_rolled_back(
    source: str, target: str, open_saver: Any
) -> None:
    """The error names the thread. Other threads, and later runs of this thread, are imported."""
    old, new = open_saver(source, "old"), open_saver(target, "new")
    first = put(old, {"x": 1}, thread="t", uid="1")
    second = put(old, {"x": 2}, first, uid="2", metadata={"run_id": "r"})
    put(old, {"x": 1}, thread="other", uid="1")
    new.import_from(old)
    new.delete_for_runs(["r"])
    put(old, {"x": 2}, thread="other-2", uid="1")
    with pytest.raises(
        ImportFailed, match="contain a run that was rolled back in this database: 't'"
    ):
        new.import_from(old)
    old.delete_for_runs(["r"])
    put(old, {"x": 3}, first, uid="3")
    report = new.import_from(old)

    assert second["configurable"]["checkpoint_id"] == "2"
    assert [info.checkpoint_id for info in new.checkpoints("t")] == ["3", "1"]
    assert new.checkpoints("other-2") != []
    assert report.checkpoints == 1


@source_target_pairs
def test_run_that_loaded_before_a_rollback_can_still_put(
    source: str, target: str, open_saver: Any
) -> None:
    """The removal record of a rollback removes nothing from the puts of other runs."""
    saver = open_saver(source, "old")
    first = put(saver, {"x": 1}, thread="t", uid="1")
    put(saver, {"x": 2}, first, uid="2", metadata={"run_id": "r"})
    loaded = saver.get_tuple(first)
    saver.delete_for_runs(["r"])
    assert loaded is not None
    put(saver, {"x": "kept"}, loaded.config, uid="3")

    record = saver.get_tuple({"configurable": {"thread_id": "t"}})
    assert record is not None
    assert record.checkpoint["channel_values"] == {"x": "kept"}
