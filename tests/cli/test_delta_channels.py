"""Commands on threads with langgraph's `DeltaChannel`, as deep agents have them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.graph import START, StateGraph, add_messages
from typing_extensions import TypedDict

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import InvalidMessages
from tests.cli.commands import invoke, run, run_json
from tests.contracts.puts import config_at


def merge_by_id(state: Any, updates: Sequence[Any]) -> Any:
    for update in updates:
        state = add_messages(state or [], update)
    return state


def append_words(state: Any, updates: Sequence[Any]) -> Any:
    return [*(state or []), *(word for update in updates for word in update)]


def write_delta_thread(thread: str, *texts: str, removed: int = 0) -> None:
    """Write a thread with delta channels, and remove its first messages."""
    make: Any = TypedDict
    channels = {
        "messages": Annotated[list, DeltaChannel(merge_by_id)],
        "words": Annotated[list, DeltaChannel(append_words)],
    }
    builder: Any = StateGraph(make("State", channels))
    builder.add_node(
        "node", lambda state: {"messages": [AIMessage("Noted")], "words": [f"{len(state)}"]}
    )
    builder.add_edge(START, "node")
    with SQLiteCheckpointer.open(os.environ["PERDURE_DB"]) as saver:
        graph = builder.compile(checkpointer=saver)
        for text in texts:
            graph.invoke({"messages": [HumanMessage(text)], "words": [text]}, config_at(thread))
        ids = [message.id for message in graph.get_state(config_at(thread)).values["messages"]]
        for uid in ids[:removed]:
            update = {"messages": [RemoveMessage(uid)]}
            graph.update_state(config_at(thread), update, as_node="node")


def test_threads_history_and_show_read_delta_channels(db: Path) -> None:
    """Titles, counts and texts are shown; removed messages and unknown items are marked."""
    write_delta_thread("trip", "I pack a red tent", "And figs", removed=1)
    [row] = run_json("threads")
    words = run("history", "trip", "--channel", "words")

    assert row["messages"] == 4
    assert "I pack a red tent" in run("threads")
    items = [(item["content"], item["seen"]) for item in run_json("history", "trip")]
    texts = ["I pack a red tent", "Noted", "And figs", "Noted"]
    assert items == list(zip(texts, [False, True, True, True], strict=True))
    assert {item["seen"] for item in run_json("history", "trip", "--channel", "words")} == {None}
    assert words.startswith("? ")
    assert "3 messages ← head" in run("show", "trip")


def test_export_of_delta_channels_is_imported_with_all_messages(db: Path) -> None:
    """The imported thread has the same messages and times."""
    write_delta_thread("trip", "I pack a red tent", "And figs")
    Path("all.jsonl").write_text(run("export", "--all"), encoding="utf-8")
    [line] = map(json.loads, Path("all.jsonl").read_text(encoding="utf-8").splitlines())
    os.rename("x.db", "old.db")
    run("import", "all.jsonl", "--no-memories")

    texts = ["I pack a red tent", "Noted", "And figs", "Noted"]
    assert [message["content"] for message in line["messages"]] == texts
    assert [item["content"] for item in run_json("history", "trip")] == texts
    before = [item["stored_at"] for item in run_json("history", "trip", "--db", "old.db")]
    assert [item["stored_at"] for item in run_json("history", "trip")] == before


@pytest.mark.parametrize("value", [None, [1.5, {"a": 1}]])
def test_export_fails_if_messages_are_missing_or_invalid(db: Path, value: Any) -> None:
    """The error names the thread whose messages are not stored or are not messages."""
    write_delta_thread("trip", "I pack a red tent")
    with SQLiteCheckpointer.open(os.environ["PERDURE_DB"]) as saver:
        checkpoint: Any = {**empty_checkpoint(), "channel_versions": {"messages": 1}}
        if value is not None:
            checkpoint["channel_values"] = {"messages": value}
        saver.put(config_at("odd"), checkpoint, {"step": 1, "source": "update"}, {"messages": 1})
    result = invoke("export", "--all")

    assert result.exit_code != 0
    assert isinstance(result.exception, InvalidMessages)
    assert "'odd' cannot be exported: its channel 'messages'" in str(result.exception)
    assert len(run("export", "trip").splitlines()) == 1
