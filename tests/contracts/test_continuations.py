"""A put that gives a list as the parent's list and what follows it."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.base.id import uuid6

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.values import Continuation
from perdure.errors import UnknownCheckpoint

THREAD: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}


def put(saver: SQLiteCheckpointer, config: Any, messages: Any, step: int) -> Any:
    """Put a checkpoint with these messages upon the one of the config."""
    checkpoint: Any = {**empty_checkpoint(), "id": str(uuid6(clock_seq=step))}
    checkpoint |= {"channel_values": {"messages": messages}}
    checkpoint |= {"channel_versions": {"messages": step + 1}}
    metadata: Any = {"source": "update", "step": step, "parents": {}}
    return saver.put(config, checkpoint, metadata, {"messages": step + 1})


def ids(saver: SQLiteCheckpointer, config: Any) -> list[str]:
    stored = saver.get_tuple(config)
    assert stored is not None
    return [message.id for message in stored.checkpoint["channel_values"]["messages"]]


def message(key: str) -> Any:
    return (HumanMessage if key[0] == "h" else AIMessage)(f"says {key}", id=key)


def test_a_continuation_has_the_messages_of_its_parent(saver: SQLiteCheckpointer) -> None:
    """It has them as if the whole list had been put, upon the head and upon an older checkpoint."""
    first = put(saver, THREAD, [message("h1"), message("a1")], 0)
    second = put(saver, first, Continuation([message("h2"), message("a2")]), 1)
    branch = put(saver, first, Continuation([message("h3")]), 2)
    after = put(saver, branch, Continuation([message("a3"), message("h2")]), 3)

    assert ids(saver, second) == ["h1", "a1", "h2", "a2"]
    assert ids(saver, branch) == ["h1", "a1", "h3"]
    assert ids(saver, after) == ids(saver, THREAD) == ["h1", "a1", "h3", "a3", "h2"]
    assert [item.value.id for item in saver.history("t") if item.branch] == ["a2"]
    assert saver.thread("t").items == 6


def test_many_branches_are_read_by_another_process(saver: SQLiteCheckpointer) -> None:
    """Each answer is regenerated, so that the lists consist of many parts of the log."""
    config = put(saver, THREAD, [message("h0"), message("a0")], 0)
    expected: dict[str, list[str]] = {}
    way = ["h0", "a0"]
    for turn in range(1, 40):
        config = put(saver, config, Continuation([message(f"h{turn}")]), 3 * turn)
        way = [*way, f"h{turn}"]
        for variant, step in (("b", 1), ("a", 2)):
            new = f"{variant}{turn}"
            at = put(saver, config, Continuation([message(new)]), 3 * turn + step)
            expected[at["configurable"]["checkpoint_id"]] = [*way, new]
        config, way = at, [*way, new]
    saver._cache.drop_thread("t")

    assert expected == {
        uid: ids(saver, {"configurable": {**THREAD["configurable"], "checkpoint_id": uid}})
        for uid in expected
    }


def test_a_continuation_of_no_list_is_refused(saver: SQLiteCheckpointer) -> None:
    """Nothing is written for a thread that is new, nor upon a parent that was deleted."""
    with pytest.raises(UnknownCheckpoint, match="to continue"):
        put(saver, THREAD, Continuation([message("h1")]), 0)
    config = put(saver, THREAD, [message("h1")], 0)
    saver.delete_thread("t")
    config["configurable"] = {**THREAD["configurable"], "checkpoint_id": str(uuid6())}
    with pytest.raises(UnknownCheckpoint, match="to continue"):
        put(saver, config, Continuation([message("h2")]), 1)

    assert saver.get_tuple(THREAD) is None


def test_a_continuation_leaves_out_what_was_erased(saver: SQLiteCheckpointer) -> None:
    """An erased message that it brings again stays away, and so does one of its parent."""
    config = put(saver, THREAD, [message("h1"), message("a1")], 0)
    saver.erase("t", ["a1"])
    after = put(saver, config, Continuation([message("a1"), message("h2")]), 1)

    assert ids(saver, after) == ["h1", "h2"]
