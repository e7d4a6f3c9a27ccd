"""When each item of a history was first stored, and histories of threads that do not exist."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.sqlite import SqliteSaver

from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.checkpointers.titles import read_existing_head
from perdure.errors import UnknownCheckpoint, UnknownThread
from tests.backends import Place
from tests.contracts.puts import config_at

BEGUN = datetime(2024, 2, 29, 8, 30, 0, 123456, UTC)


def put_at(saver: Any, number: int, messages: list[Any], parent: Any = None) -> Any:
    """Put a checkpoint that was made so many hours after the first one."""
    made_at = BEGUN + timedelta(hours=number)
    checkpoint = {
        **empty_checkpoint(),
        "id": f"1f0c8b9e-0000-6000-8000-00000000000{number}",
        "ts": made_at.isoformat(),
        "channel_values": {"messages": messages},
        "channel_versions": {"messages": number + 1},
    }
    metadata: Any = {"source": "update", "step": number}
    return saver.put(parent or config_at(), checkpoint, metadata, {"messages": number + 1})


def talk(saver: Any) -> tuple[list[Any], list[datetime]]:
    """Put three turns, an hour apart; their messages, and when each was stored."""
    messages: list[Any] = []
    config = None
    for number in range(3):
        messages = [*messages, HumanMessage(f"{number}", id=f"h{number}")]
        messages.append(AIMessage(f"to {number}", id=f"a{number}"))
        config = put_at(saver, number, messages, config)
    return messages, [BEGUN + timedelta(hours=number // 2) for number in range(6)]


def times(saver: SQLiteCheckpointer, thread: str = "t") -> list[datetime]:
    return [item.stored_at for item in saver.history(thread)]


def test_the_time_of_the_checkpoint_that_brought_it(saver: SQLiteCheckpointer) -> None:
    """`stored_at` is the checkpoint's `ts` in UTC, also on later pages and after edits."""
    messages, expected = talk(saver)
    head = read_existing_head(saver, "t").checkpoint_id
    edited = [messages[0], AIMessage("edited", id="a0"), *messages[3:]]
    put_at(saver, 3, edited, config_at(uid=head))

    assert [*expected, BEGUN + timedelta(hours=3)] == times(saver)
    assert expected[4:6] == [item.stored_at for item in saver.history("t", ends=(0, 3))][:2]
    assert all(time.tzinfo is UTC for time in times(saver))


def test_a_clock_that_is_ahead(saver: SQLiteCheckpointer) -> None:
    """A `ts` of the future, or none at all, counts as the time of the put."""
    checkpoint = {**empty_checkpoint(), "channel_values": {"messages": [HumanMessage("now")]}}
    checkpoint["channel_versions"] = {"messages": 1}
    before = datetime.now(UTC)
    for thread, ts in (
        ("ahead", "2999-01-01T00:00:00+00:00"),
        ("odd", "yesterday"),
        ("none", None),
    ):
        given: Any = {**checkpoint, "ts": ts}
        saver.put(config_at(thread), given, {}, {"messages": 1})

        [found] = times(saver, thread)
        assert before - timedelta(seconds=1) <= found <= datetime.now(UTC)


def test_copies_prunes_and_retention_leave_it(saver: SQLiteCheckpointer) -> None:
    """The time is that of the first storing, not of the copy, the prune or the retention."""
    _, expected = talk(saver)
    saver.copy_thread("t", "whole")
    saver.prune(["t"])
    saver.retain(Retention(last=1, history=False), thread_ids=["whole"])
    end = read_existing_head(saver, "t").checkpoint_id
    saver.copy_thread("t", "part", checkpoint_id=end)

    for thread in ("t", "whole", "part"):
        assert expected == times(saver, thread)


def test_erasure_leaves_that_of_others(saver: SQLiteCheckpointer) -> None:
    """An item that is rewritten as it quoted an erased message keeps its time."""
    call: Any = {"name": "ask", "args": {"q": "where is the key?"}, "id": "call-of-the-model"}
    messages = [HumanMessage("hello", id="h"), AIMessage("", tool_calls=[call], id="a")]
    config = put_at(saver, 0, messages)
    result = ToolMessage("under the mat", tool_call_id="call-of-the-model", id="r")
    config = put_at(saver, 1, [*messages, result], config)
    put_at(saver, 2, [*messages, result, AIMessage("so", id="b")], config)
    saver.erase("t", ["a"])

    hours = [item.stored_at - BEGUN for item in saver.history("t")]
    assert [timedelta(0), timedelta(hours=1), timedelta(hours=2)] == hours


def test_imports_and_merges_leave_it(place: Place, tmp_path: Any) -> None:
    """A thread from another database has the times that it had there."""
    path = str(tmp_path / "langgraph.db")
    with SqliteSaver.from_conn_string(path) as theirs:
        _, expected = talk(theirs)
    with place.saver() as saver:
        saver.import_from(path)

        assert expected == times(saver)
    with SQLiteCheckpointer.open(tmp_path / "own.db") as theirs, place.saver() as saver:
        talk(theirs)
        saver.delete_thread("t")
        saver.import_from(theirs)

        assert expected == times(saver)


def test_a_missing_thread(saver: SQLiteCheckpointer) -> None:
    """With `missing_ok` a thread that never was, or was deleted, has an empty history."""
    talk(saver)
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
