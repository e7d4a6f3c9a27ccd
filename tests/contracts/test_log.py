"""What is stored: how little a turn adds, and that deletions and re-creations do not mix."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.graph import START, StateGraph

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError, ThreadDeleted
from perdure.memory import ChatState
from tests.backends import KEY


def _answer(state: ChatState) -> str:
    return f"answer {len(state['messages'])} " * 20


@pytest.mark.parametrize(
    "given",
    [
        lambda i: [HumanMessage(f"question {i} " * 20)],
        lambda i: [{"role": "user", "content": f"question {i} " * 20}],
        lambda i: [("user", f"question {i} " * 20)],
        lambda i: f"question {i} " * 20,
        lambda i: HumanMessage(f"question {i} " * 20, id=f"given-{i}"),
    ],
    ids=["message", "dict", "tuple", "text", "with-id"],
)
def test_a_log_has_no_gaps_however_a_thread_is_spoken_to(given: Any) -> None:
    """Inputs that get their id from the reducer leave no gaps: manifests stay a few bytes."""
    with SQLiteCheckpointer.open(":memory:") as saver:
        builder = StateGraph(ChatState)
        builder.add_node("answer", lambda state: {"messages": [AIMessage(_answer(state))]})
        graph: Any = builder.add_edge(START, "answer").compile(checkpointer=saver)
        for i in range(12):
            graph.invoke({"messages": given(i)}, {"configurable": {"thread_id": "t"}})
        positions = [item.position for item in saver.history("t")]

    # a task may be quicker to store its answer than the step before it its checkpoint
    assert sorted(positions) == list(range(24))


def said(*ids: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(i, id=i) for i in ids]}


def checkpoint(uid: str, version: int, **values: Any) -> Any:
    return {
        "v": 4,
        "id": uid,
        "ts": "",
        "channel_values": values,
        "channel_versions": dict.fromkeys(values, version),
        "versions_seen": {},
        "updated_channels": None,
    }


def test_a_thread_that_was_deleted_and_made_again_is_another(tmp_path: Path) -> None:
    """What one saver remembers of the former thread does not end up in the new one."""
    at: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    with (
        SQLiteCheckpointer.open(tmp_path / "x.db") as one,
        SQLiteCheckpointer.open(tmp_path / "x.db") as other,
    ):
        parent = one.put(at, checkpoint("1", 1, **said("a1", "a2")), {}, {"messages": 1})
        other.delete_thread("t")
        other.put(at, checkpoint("2", 1, **said("b1", "b2")), {}, {"messages": 1})
        again = checkpoint("3", 2, **said("a1", "a2", "a3"))
        with pytest.raises(ThreadDeleted):
            one.put(parent, again, {}, {"messages": 2})
        late = one.put(at, again, {}, {"messages": 2})
        found = other.get_tuple(late)

    assert found is not None
    assert [m.text for m in found.checkpoint["channel_values"]["messages"]] == ["a1", "a2", "a3"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 2**60, 1e300])
def test_any_number_may_be_metadata(value: float) -> None:
    """Metadata that has no index entry is stored all the same."""
    at: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    with SQLiteCheckpointer.open(":memory:") as saver:
        saver.put(at, checkpoint("1", 1), {"score": value}, {})  # type: ignore[typeddict-unknown-key]
        found = saver.get_tuple(at)

    assert found is not None
    assert repr(value) == repr(found.metadata["score"])  # type: ignore[typeddict-item]


def test_a_saver_closed_twice_is_closed_once(tmp_path: Path) -> None:
    """Another saver on the same file goes on."""
    one = SQLiteCheckpointer.open(tmp_path / "x.db")
    with SQLiteCheckpointer.open(tmp_path / "x.db") as other:
        one.close()
        one.close()

        assert other.threads() == []


def test_a_clone_shares_what_its_original_has_open(tmp_path: Path) -> None:
    """Closing both closes one share: another saver on the same file goes on."""
    one = SQLiteCheckpointer.open(tmp_path / "x.db")
    clone = one.with_allowlist({("some.module", "Type")})
    assert clone is not one
    with SQLiteCheckpointer.open(tmp_path / "x.db") as other:
        one.close()
        clone.close()

        assert other.threads() == []


def test_the_working_directory_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path names the file it named when it was opened."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    at: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    with SQLiteCheckpointer.open("x.db") as saver:
        os.chdir(elsewhere)
        saver.put(at, checkpoint("1", 1, **said("a")), {}, {"messages": 1})
        found = saver.get_tuple(at)
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        again = saver.get_tuple(at)

    assert found == again
    assert found is not None


def test_two_encryptions_are_one_too_many(tmp_path: Path) -> None:
    """A key beside an EncryptedSerializer is refused: one of them would do nothing."""
    serde = EncryptedSerializer.from_pycryptodome_aes(key=KEY[:16])

    with pytest.raises(ConfigurationError, match="both a key and an EncryptedSerializer"):
        SQLiteCheckpointer.open(tmp_path / "x.db", key=KEY, serde=serde)
