"""A put of a `Continuation` appends to the parent's list."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.base.id import uuid6

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.values import Continuation
from perdure.errors import UnknownCheckpoint

THREAD_CONFIG: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}


def put(saver: SQLiteCheckpointer, config: Any, messages: Any, step: int) -> Any:
    """Put a checkpoint with these messages as a child of the checkpoint of the config."""
    checkpoint: Any = {**empty_checkpoint(), "id": str(uuid6(clock_seq=step))}
    checkpoint |= {"channel_values": {"messages": messages}}
    checkpoint |= {"channel_versions": {"messages": step + 1}}
    metadata: Any = {"source": "update", "step": step, "parents": {}}
    return saver.put(config, checkpoint, metadata, {"messages": step + 1})


def read_message_ids(saver: SQLiteCheckpointer, config: Any) -> list[str]:
    stored = saver.get_tuple(config)
    assert stored is not None
    return [item.id for item in stored.checkpoint["channel_values"]["messages"]]


def make_message(key: str) -> Any:
    return (HumanMessage if key[0] == "h" else AIMessage)(f"says {key}", id=key)


def test_continuation_appends_to_messages_of_its_parent(saver: SQLiteCheckpointer) -> None:
    """A put of a continuation equals a put of the whole list.

    The parent may be the head or older.
    """
    first = put(saver, THREAD_CONFIG, [make_message("h1"), make_message("a1")], 0)
    second = put(saver, first, Continuation([make_message("h2"), make_message("a2")]), 1)
    branch = put(saver, first, Continuation([make_message("h3")]), 2)
    after = put(saver, branch, Continuation([make_message("a3"), make_message("h2")]), 3)

    assert read_message_ids(saver, second) == ["h1", "a1", "h2", "a2"]
    assert read_message_ids(saver, branch) == ["h1", "a1", "h3"]
    assert (
        read_message_ids(saver, after)
        == read_message_ids(saver, THREAD_CONFIG)
        == ["h1", "a1", "h3", "a3", "h2"]
    )
    assert [item.value.id for item in saver.history("t") if item.branch] == ["a2"]
    assert saver.thread("t").items == 6


def test_many_branches_are_read_without_cache(saver: SQLiteCheckpointer) -> None:
    """Each answer is regenerated, so that the lists consist of many ranges of the log."""
    config = put(saver, THREAD_CONFIG, [make_message("h0"), make_message("a0")], 0)
    expected: dict[str, list[str]] = {}
    current_ids = ["h0", "a0"]
    for turn in range(1, 40):
        config = put(saver, config, Continuation([make_message(f"h{turn}")]), 3 * turn)
        current_ids = [*current_ids, f"h{turn}"]
        for variant, step in (("b", 1), ("a", 2)):
            new_id = f"{variant}{turn}"
            child = put(saver, config, Continuation([make_message(new_id)]), 3 * turn + step)
            expected[child["configurable"]["checkpoint_id"]] = [*current_ids, new_id]
        config, current_ids = child, [*current_ids, new_id]
    saver._cache.drop_thread("t")

    assert expected == {
        uid: read_message_ids(
            saver, {"configurable": {**THREAD_CONFIG["configurable"], "checkpoint_id": uid}}
        )
        for uid in expected
    }


def test_continuation_without_parent_list_is_refused(saver: SQLiteCheckpointer) -> None:
    """Nothing is written for a new thread or for a parent that was deleted."""
    with pytest.raises(
        UnknownCheckpoint, match="extends a list of the parent checkpoint, but the config names"
    ):
        put(saver, THREAD_CONFIG, Continuation([make_message("h1")]), 0)
    config = put(saver, THREAD_CONFIG, [make_message("h1")], 0)
    saver.delete_thread("t")
    config["configurable"] = {**THREAD_CONFIG["configurable"], "checkpoint_id": str(uuid6())}
    with pytest.raises(UnknownCheckpoint, match="it extends a list that the parent checkpoint"):
        put(saver, config, Continuation([make_message("h2")]), 1)

    assert saver.get_tuple(THREAD_CONFIG) is None


def test_continuation_leaves_out_erased_messages(saver: SQLiteCheckpointer) -> None:
    """An erased message is left out if the continuation or its parent contains the message."""
    config = put(saver, THREAD_CONFIG, [make_message("h1"), make_message("a1")], 0)
    saver.erase("t", ["a1"])
    after = put(saver, config, Continuation([make_message("a1"), make_message("h2")]), 1)

    assert read_message_ids(saver, after) == ["h1", "h2"]
