"""Threads of langgraph's `DeltaChannel`s, of a graph that the server does not have."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import httpx
import pytest
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langgraph.channels import DeltaChannel
from langgraph.graph import START, StateGraph, add_messages
from typing_extensions import TypedDict

from perdure.checkpointers import open_checkpointer
from perdure.memory.chat_history import ThreadMessageHistory
from perdure.settings import Settings

HTML = {"accept": "text/html"}


def apply_message_updates(state: Any, updates: Sequence[Any]) -> Any:
    for update in updates:
        state = add_messages(state or [], update)
    return state


def append_words(state: Any, updates: Sequence[Any]) -> Any:
    return [*(state or []), *(word for update in updates for word in update)]


@pytest.fixture
def message_ids(settings: Settings) -> list[str]:
    """The ids of the messages of a thread `t` of two turns, whose first message was removed."""
    make: Any = TypedDict
    state = make(
        "State",
        {
            "messages": Annotated[list, DeltaChannel(apply_message_updates)],
            "words": Annotated[list, DeltaChannel(append_words)],
        },
    )
    builder: Any = StateGraph(state)
    builder.add_node("node", lambda state: {"messages": [AIMessage("Noted")], "words": ["so"]})
    builder.add_edge(START, "node")
    config: Any = {"configurable": {"thread_id": "t", "user_id": settings.user}}
    with open_checkpointer(settings.db) as saver:
        graph = builder.compile(checkpointer=saver)
        for text in ("I pack a red tent", "And figs"):
            graph.invoke({"messages": [HumanMessage(text)], "words": [text]}, config)
        ids = [str(message.id) for message in graph.get_state(config).values["messages"]]
        update = {"messages": [RemoveMessage(ids[0])]}
        graph.update_state(config, update, as_node="node")
    return ids


def test_pages_show_messages_of_delta_channels(
    client: httpx.Client, message_ids: list[str]
) -> None:
    """The list shows the title, the thread page the messages, the checkpoint page their values."""
    listed = client.get("/ui/threads", headers=HTML).text
    thread = client.get("/ui/thread.json?id=t").json()
    head = client.get("/ui/checkpoints.json?id=t").json()["checkpoints"][0]["checkpoint_id"]
    values = client.get(f"/ui/checkpoint?id=t&checkpoint={head}", headers=HTML).text
    shown = client.get("/ui/thread?id=t", headers=HTML).text

    assert "I pack a red tent" in listed
    items = [item for turn in thread["turns"] for item in turn["items"]]
    assert [item["id"] for item in items] == message_ids
    assert [item["mark"] for item in items] == ["removed", "seen", "seen", "seen"]
    assert f"{datetime.fromisoformat(items[0]['at']):%Y-%m-%d %H:%M}" in shown
    assert "And figs" in values
    assert "I pack a red tent" not in values
    assert "Unknown without the graph" in values
    changed = [step for turn in thread["turns"] for step in turn["steps"] if step["changes"]]
    assert len(changed) >= 5


def test_rest_returns_state_and_items_of_delta_channels(
    client: httpx.Client, message_ids: list[str]
) -> None:
    """The state contains the messages, and each item of a channel has its storage time."""
    state = client.get("/threads/t/state").json()["values"]
    thread = client.get("/threads/t").json()["values"]
    items = client.get("/threads/t/items").json()
    page = client.get(f"/threads/t/items?limit=2&before={items[3]['position']}").json()
    words = client.get("/threads/t/items?channel=words").json()

    assert [message["id"] for message in state["messages"]] == message_ids[1:]
    assert thread == state
    assert [item["value"]["id"] for item in items] == message_ids
    assert [item["seen"] for item in items] == [False, True, True, True]
    assert page == items[1:3]
    assert [item["value"] for item in words] == ["I pack a red tent", "so", "And figs"]
    assert {item["seen"] for item in words} == {None}
    times = [datetime.fromisoformat(item["stored_at"]) for item in items]
    assert times == sorted(times)
    assert client.get("/threads/none/items").status_code == 404


def test_search_finds_messages_of_delta_channels(
    client: httpx.Client, message_ids: list[str]
) -> None:
    """A message that was removed from the state is found too."""
    found = [client.get(f"/ui/threads.json?q={word}").json()["said"] for word in ("tent", "figs")]

    assert [[each["position"] for each in hits] for hits in found] == [[0], [2]]


def test_chat_message_history_reads_and_adds_to_delta_channel(
    settings: Settings, message_ids: list[str]
) -> None:
    """langchain's chat history reads the messages of the thread and adds to them."""
    with open_checkpointer(settings.db) as saver:
        history = ThreadMessageHistory(saver, "t")
        before = [message.id for message in history.messages]
        history.add_messages([HumanMessage("And rope", id="r")])

        assert before == message_ids[1:]
        assert [message.id for message in history.messages] == [*message_ids[1:], "r"]
        assert [item.value.id for item in saver.history("t")] == [*message_ids, "r"]
        assert saver.delta_values("t")["words"] is None
