"""The search for idle threads reads all heads, page by page, and finds exactly the idle threads."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from langgraph.checkpoint.base import empty_checkpoint

from perdure.checkpointers import SQLiteCheckpointer, head_records

BEFORE = datetime.now(UTC) - timedelta(days=30)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_records, "_PAGE", 2)


def put(saver: SQLiteCheckpointer, thread_id: str, ts: datetime | str, ns: str = "") -> Any:
    checkpoint = empty_checkpoint()
    checkpoint["ts"] = ts if isinstance(ts, str) else ts.isoformat()
    config: Any = {"configurable": {"thread_id": thread_id, "checkpoint_ns": ns}}
    return saver.put(config, checkpoint, {"source": "loop", "step": 0, "parents": {}}, {})


def test_threads_with_an_old_head_are_deleted_in_the_order_of_creation(
    saver: SQLiteCheckpointer,
) -> None:
    """The `ts` of the head counts, not that of another checkpoint, and not the time of the put."""
    day = timedelta(days=1)
    for number in range(5):
        put(saver, f"old{number}", BEFORE - day)
        put(saver, f"new{number}", BEFORE + day)
    put(saver, "revived", BEFORE - day)
    put(saver, "revived", BEFORE + day)
    old = put(saver, "rewound", BEFORE - day)
    put(saver, "rewound", BEFORE + day)
    saver.rewind("rewound", old["configurable"]["checkpoint_id"])
    put(saver, "without time", "no time")
    put(saver, "only a subgraph", BEFORE - day, "child")
    expected = [*(f"old{number}" for number in range(5)), "rewound"]

    assert expected == [info.thread_id for info in saver.delete_idle(BEFORE, dry_run=True)]
    assert expected == [info.thread_id for info in saver.delete_idle(BEFORE)]
    assert saver.delete_idle(BEFORE) == []
    assert {*(f"new{number}" for number in range(5)), "revived", "without time"} < {
        info.thread_id for info in saver.threads()
    }


def test_threads_without_activity_are_deleted_whatever_their_head(
    saver: SQLiteCheckpointer,
) -> None:
    """The time of the last write counts if it is earlier than the `ts` of the head."""
    put(saver, "a", datetime.now(UTC) + timedelta(days=9))
    put(saver, "b", "no time")
    put(saver, "c", datetime.now(UTC), "child")
    later = datetime.now(UTC) + timedelta(days=1)

    assert [info.thread_id for info in saver.delete_idle(later)] == ["a", "b", "c"]
