"""The time at which each item of a history was first stored, and histories of missing threads."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.sqlite import SqliteSaver

from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.checkpointers.import_metadata import read_thread_head_or_raise
from perdure.errors import UnknownCheckpoint, UnknownThread
from tests.backends import Place
from tests.contracts.puts import config_at

START = datetime(2024, 2, 29, 8, 30, 0, 123456, UTC)


def put_at(saver: Any, number: int, messages: list[Any], parent: Any = None) -> Any:
    """Put a checkpoint with a time that is `number` hours after `START`."""
    made_at = START + timedelta(hours=number)
    checkpoint = {
        **empty_checkpoint(),
        "id": f"1f0c8b9e-0000-6000-8000-00000000000{number}",
        "ts": made_at.isoformat(),
        "channel_values": {"messages": messages},
        "channel_versions": {"messages": number + 1},
    }
    metadata: Any = {"source": "update", "step": number}
    return saver.put(parent or config_at(), checkpoint, metadata, {"messages": number + 1})


def put_three_turns(saver: Any) -> tuple[list[Any], list[datetime]]:
    """Put three turns at intervals of one hour. Return their messages and the expected times."""
    messages: list[Any] = []
    config = None
    for number in range(3):
        messages = [*messages, HumanMessage(f"{number}", id=f"h{number}")]
        messages.append(AIMessage(f"to {number}", id=f"a{number}"))
        config = put_at(saver, number, messages, config)
    return messages, [START + timedelta(hours=number // 2) for number in range(6)]


def read_times(saver: SQLiteCheckpointer, thread: str = "t") -> list[datetime]:
    return [item.stored_at for item in saver.history(thread)]


def test_stored_at_is_the_time_of_the_first_checkpoint_with_the_item(
    saver: SQLiteCheckpointer,
) -> None:
    """`stored_at` is the checkpoint's `ts` in UTC, also on later pages and after edits."""
    messages, expected = put_three_turns(saver)
    head = read_thread_head_or_raise(saver, "t").checkpoint_id
    edited = [messages[0], AIMessage("edited", id="a0"), *messages[3:]]
    put_at(saver, 3, edited, config_at(uid=head))

    assert [*expected, START + timedelta(hours=3)] == read_times(saver)
    assert expected[4:6] == [item.stored_at for item in saver.history("t", ends=(0, 3))][:2]
    assert all(time.tzinfo is UTC for time in read_times(saver))


def test_stored_at_is_time_of_put_if_ts_is_future_or_invalid(saver: SQLiteCheckpointer) -> None:
    """A `ts` that is in the future, invalid or missing is replaced by the time of the put."""
    checkpoint = {**empty_checkpoint(), "channel_values": {"messages": [HumanMessage("now")]}}
    checkpoint["channel_versions"] = {"messages": 1}
    before = datetime.now(UTC)
    for thread, ts in (
        ("ahead", "2999-01-01T00:00:00+00:00"),
        ("odd", "yesterday"),
        ("none", None),
    ):
        thread_checkpoint: Any = {**checkpoint, "ts": ts}
        saver.put(config_at(thread), thread_checkpoint, {}, {"messages": 1})

        [stored_at] = read_times(saver, thread)
        assert before - timedelta(seconds=1) <= stored_at <= datetime.now(UTC)


def test_copies_prunes_and_retention_do_not_change_stored_at(saver: SQLiteCheckpointer) -> None:
    """`stored_at` is the time at which the item was first stored."""
    _, expected = put_three_turns(saver)
    saver.copy_thread("t", "whole")
    saver.prune(["t"])
    saver.retain(Retention(last=1, history=False), thread_ids=["whole"])
    end = read_thread_head_or_raise(saver, "t").checkpoint_id
    saver.copy_thread("t", "part", checkpoint_id=end)

    for thread in ("t", "whole", "part"):
        assert expected == read_times(saver, thread)


def test_erasure_does_not_change_stored_at_of_other_items(saver: SQLiteCheckpointer) -> None:
    """An item that is rewritten because it quoted an erased message keeps its time."""
    call: Any = {"name": "ask", "args": {"q": "where is the key?"}, "id": "call-of-the-model"}
    messages = [HumanMessage("hello", id="h"), AIMessage("", tool_calls=[call], id="a")]
    config = put_at(saver, 0, messages)
    result = ToolMessage("under the mat", tool_call_id="call-of-the-model", id="r")
    config = put_at(saver, 1, [*messages, result], config)
    put_at(saver, 2, [*messages, result, AIMessage("so", id="b")], config)
    saver.erase("t", ["a"])

    hours = [item.stored_at - START for item in saver.history("t")]
    assert [timedelta(0), timedelta(hours=1), timedelta(hours=2)] == hours


def test_imports_do_not_change_stored_at(place: Place, tmp_path: Any) -> None:
    """A thread from another database keeps its times."""
    path = str(tmp_path / "langgraph.db")
    with SqliteSaver.from_conn_string(path) as theirs:
        _, expected = put_three_turns(theirs)
    with place.saver() as saver:
        saver.import_from(path)

        assert expected == read_times(saver)
    with SQLiteCheckpointer.open(tmp_path / "own.db") as theirs, place.saver() as saver:
        put_three_turns(theirs)
        saver.delete_thread("t")
        saver.import_from(theirs)

        assert expected == read_times(saver)


def test_history_of_missing_thread_is_empty_with_missing_ok(saver: SQLiteCheckpointer) -> None:
    """This holds for a thread that never existed and for a deleted one."""
    put_three_turns(saver)
    with pytest.raises(UnknownThread):
        saver.history("never")

    assert saver.history("never", missing_ok=True) == []
    assert saver.history("t", checkpoint_ns="sub:1", missing_ok=True) == []
    assert len(saver.history("t", missing_ok=True)) == 6
    with pytest.raises(UnknownCheckpoint):
        saver.history("t", checkpoint_id="none", missing_ok=True)
    saver.delete_thread("t")
    assert asyncio.run(saver.ahistory("t", missing_ok=True)) == []
    assert asyncio.run(saver.ahistory("t", checkpoint_id="none", missing_ok=True)) == []
    with pytest.raises(UnknownThread):
        asyncio.run(saver.ahistory("t"))
