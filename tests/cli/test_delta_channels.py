"""Commands on threads whose channels are langgraph's `DeltaChannel`s, as those of deep agents."""

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
from tests.cli.commands import attempt, read, run
from tests.contracts.puts import config_at


def by_id(state: Any, updates: Sequence[Any]) -> Any:
    for update in updates:
        state = add_messages(state or [], update)
    return state


def appending(state: Any, updates: Sequence[Any]) -> Any:
    return [*(state or []), *(word for update in updates for word in update)]


def talk(thread: str, *texts: str, removed: int = 0) -> None:
    """Say something on a thread that also notes words; then remove some first messages."""
    make: Any = TypedDict
    channels = {
        "messages": Annotated[list, DeltaChannel(by_id)],
        "words": Annotated[list, DeltaChannel(appending)],
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


def test_lists_and_history(db: Path) -> None:
    """Titles, counts and what was said are shown; removed messages and unknown items are marked."""
    talk("trip", "I pack a red tent", "And figs", removed=1)
    [row] = read("threads")
    words = run("history", "trip", "--channel", "words")

    assert row["messages"] == 4
    assert "I pack a red tent" in run("threads")
    found = [(item["content"], item["seen"]) for item in read("history", "trip")]
    texts = ["I pack a red tent", "Noted", "And figs", "Noted"]
    assert found == list(zip(texts, [False, True, True, True], strict=True))
    assert {item["seen"] for item in read("history", "trip", "--channel", "words")} == {None}
    assert words.startswith("? ")
    assert "3 messages ← head" in run("show", "trip")


def test_export_and_import(db: Path) -> None:
    """An export has all messages, and its import the same ones."""
    talk("trip", "I pack a red tent", "And figs")
    Path("all.jsonl").write_text(run("export", "--all"), encoding="utf-8")
    [line] = map(json.loads, Path("all.jsonl").read_text(encoding="utf-8").splitlines())
    os.rename("x.db", "old.db")
    run("import", "all.jsonl", "--no-memories")

    texts = ["I pack a red tent", "Noted", "And figs", "Noted"]
    assert [message["content"] for message in line["messages"]] == texts
    assert [item["content"] for item in read("history", "trip")] == texts
    before = [item["stored_at"] for item in read("history", "trip", "--db", "old.db")]
    assert [item["stored_at"] for item in read("history", "trip")] == before


@pytest.mark.parametrize("value", [None, [1.5, {"a": 1}]])
def test_an_export_that_lacks_messages_fails(db: Path, value: Any) -> None:
    """Of a state whose messages are not stored, or are none, the thread is named."""
    talk("trip", "I pack a red tent")
    with SQLiteCheckpointer.open(os.environ["PERDURE_DB"]) as saver:
        checkpoint: Any = {**empty_checkpoint(), "channel_versions": {"messages": 1}}
        if value is not None:
            checkpoint["channel_values"] = {"messages": value}
        saver.put(config_at("odd"), checkpoint, {"step": 1, "source": "update"}, {"messages": 1})
    found = attempt("export", "--all")

    assert found.exit_code != 0
    assert isinstance(found.exception, InvalidMessages)
    assert "'odd' cannot be exported: its channel 'messages'" in str(found.exception)
    assert len(run("export", "trip").splitlines()) == 1
