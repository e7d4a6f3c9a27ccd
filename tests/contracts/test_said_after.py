"""`said_after` tells which messages were added by runs that started after a given time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.cache import drop_oldest_entries
from perdure.errors import ConfigurationError
from perdure.memory import ChatState
from tests.backends import Place

EARLY = datetime(2020, 1, 1, tzinfo=UTC)
CONFIG: Any = {"configurable": {"thread_id": "t"}}


def build_graph(saver: Any, seen: list[Any]) -> Any:
    """Build a graph that answers. Its last node, and a node of its subgraph, append to `seen`."""

    def respond(state: ChatState) -> dict[str, Any]:
        newest = state["messages"][-1]
        if newest.text == "ask":
            interrupt("well?")
        return {"messages": [AIMessage("Yes", id=f"{newest.id}-answer")]}

    def record_seen(state: ChatState, config: RunnableConfig) -> dict[str, Any]:
        ids = [str(message.id) for message in state["messages"]]
        seen.append(dict(zip(ids, are_said_after(saver, ids, config=config), strict=True)))
        return {}

    inner: StateGraph[Any, None, Any, Any] = StateGraph(ChatState)
    inner.add_node("look", record_seen)
    inner.add_edge(START, "look")
    inner.add_edge("look", END)
    builder: StateGraph[Any, None, Any, Any] = StateGraph(ChatState)
    builder.add_node("respond", respond)
    builder.add_node("look", record_seen)
    builder.add_node("inner", inner.compile())
    builder.add_edge(START, "respond")
    builder.add_edge("respond", "inner")
    builder.add_edge("inner", "look")
    builder.add_edge("look", END)
    return builder.compile(checkpointer=saver)


def are_said_after(
    saver: Any, ids: list[str], since: datetime = EARLY, **options: Any
) -> list[bool]:
    """Return for each message id whether a run since then has added the message."""
    results: list[bool] = saver.said_after("t", ids, since, **options)
    return results


def read_clock() -> datetime:
    """Return the current time."""
    return datetime.now(UTC)


def make_input(text: str) -> Any:
    """Build an input with one message, whose id is its text."""
    return {"messages": [HumanMessage(text, id=text)]}


@pytest.fixture
def saver(place: Place) -> Iterator[SQLiteCheckpointer]:
    """A checkpointer on a file or a Postgres server."""
    with place.saver() as checkpointer:
        yield checkpointer


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_said_after_is_true_for_messages_of_runs_since_the_time(
    saver: SQLiteCheckpointer, place: Place, durability: Any
) -> None:
    """This holds during and after the run, also in another process. A node of a subgraph gets
    False for all messages.
    """
    seen: list[Any] = []
    graph = build_graph(saver, seen)
    graph.invoke(make_input("one"), CONFIG, durability=durability)
    between = read_clock()
    graph.invoke(make_input("two"), CONFIG, durability=durability)
    ids = ["one", "one-answer", "two", "two-answer", "never"]

    assert are_said_after(saver, ids) == [True, True, True, True, False]
    assert are_said_after(saver, ids, between) == [False, False, True, True, False]
    assert are_said_after(saver, ids, read_clock()) == [False] * 5
    with place.saver() as other:
        assert are_said_after(other, ids, between) == [False, False, True, True, False]
    assert seen == [
        {"one": False, "one-answer": False},
        {"one": True, "one-answer": True},
        {"one": False, "one-answer": False, "two": False, "two-answer": False},
        {"one": True, "one-answer": True, "two": True, "two-answer": True},
    ]


def test_said_after_counts_messages_of_a_run_from_an_earlier_checkpoint(
    saver: SQLiteCheckpointer,
) -> None:
    """The run knows the messages up to that checkpoint, and adds its own messages."""
    seen: list[Any] = []
    graph = build_graph(saver, seen)
    graph.invoke(make_input("one"), CONFIG)
    first = graph.get_state(CONFIG).config
    graph.invoke(make_input("two"), CONFIG)
    between = read_clock()
    graph.invoke(make_input("three"), first)

    assert are_said_after(saver, ["one", "two", "three"], between) == [False, False, True]
    assert are_said_after(saver, ["one", "two", "three"]) == [True, False, True]
    assert seen[-1] == dict.fromkeys(["one", "one-answer", "three", "three-answer"], True)


def test_input_to_a_waiting_thread_starts_a_new_run(saver: SQLiteCheckpointer) -> None:
    """An answer to the interrupt would continue the old run."""
    seen: list[Any] = []
    graph = build_graph(saver, seen)
    graph.invoke(make_input("ask"), CONFIG)
    between = read_clock()
    graph.invoke(make_input("two"), CONFIG, durability="sync")

    assert are_said_after(saver, ["ask", "two", "two-answer"], between) == [False, True, True]
    assert seen[-1]["two"] is True


def test_edited_message_does_not_belong_to_a_later_run(saver: SQLiteCheckpointer) -> None:
    """All versions of the message count. The version of the update belongs to no run."""
    graph = build_graph(saver, [])
    graph.invoke(make_input("one"), CONFIG)
    graph.update_state(CONFIG, {"messages": [HumanMessage("other", id="one")]})
    graph.invoke(make_input("two"), CONFIG)

    assert are_said_after(saver, ["one", "two"]) == [False, True]


def test_message_put_by_a_program_belongs_to_no_run(saver: SQLiteCheckpointer) -> None:
    """The metadata and the times of the checkpoint do not matter."""
    build_graph(saver, []).invoke(make_input("one"), CONFIG)
    stored = saver.get_tuple(CONFIG)
    assert stored is not None
    checkpoint = copy.deepcopy(stored.checkpoint)
    checkpoint["ts"] = (read_clock() + timedelta(days=9)).isoformat()
    checkpoint["id"] = "ffffffff-ffff-6fff-bfff-ffffffffffff"
    checkpoint["channel_values"]["messages"].append(HumanMessage("two", id="two"))
    version = saver.get_next_version(checkpoint["channel_versions"]["messages"], None)
    checkpoint["channel_versions"]["messages"] = version
    for source in ("input", "loop"):
        saver.put(CONFIG, checkpoint, {"source": source}, {"messages": version})

    assert are_said_after(saver, ["two"]) == [False]


def test_said_after_refuses_time_without_zone(saver: SQLiteCheckpointer) -> None:
    """For an unknown thread, the result is False."""
    with pytest.raises(ConfigurationError, match="time zone"):
        saver.said_after("t", ["one"], datetime(2020, 1, 1))
    assert saver.said_after("t", ["one"], EARLY) == [False]


class ChangedMeanwhile(dict[Any, Any]):
    """A dict to which other threads add two entries while the oldest entry is looked up."""

    changes = 2

    def __iter__(self) -> Iterator[Any]:
        iterator = super().__iter__()
        if self.changes:
            self.changes -= 1
            self[object()] = None
        return iterator


def test_oldest_runs_are_dropped_while_other_threads_add_runs() -> None:
    """Python raises RuntimeError if a dict changes between the creation of an iterator and its use.

    After 8,192 runs, this made runs of programs with several threads fail when they loaded.
    """
    runs = ChangedMeanwhile.fromkeys(range(10))
    drop_oldest_entries(runs, 10)

    assert [number for number in range(10) if number in runs] == [3, 4, 5, 6, 7, 8, 9]
    assert len(runs) == 9
