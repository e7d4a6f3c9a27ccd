"""`said_after`: which messages a run of this database has brought, and when that run began."""

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
from perdure.checkpointers.removal_records import drop_oldest_entries
from perdure.errors import ConfigurationError
from perdure.memory import ChatState
from tests.backends import Place

EARLY = datetime(2020, 1, 1, tzinfo=UTC)
T: Any = {"configurable": {"thread_id": "t"}}


def graph_of(saver: Any, seen: list[Any]) -> Any:
    """A graph that answers; it notes what the node of its subgraph and its own last node see."""

    def respond(state: ChatState) -> dict[str, Any]:
        newest = state["messages"][-1]
        if newest.text == "ask":
            interrupt("well?")
        return {"messages": [AIMessage("Yes", id=f"{newest.id}-answer")]}

    def look(state: ChatState, config: RunnableConfig) -> dict[str, Any]:
        ids = [str(message.id) for message in state["messages"]]
        seen.append(dict(zip(ids, said(saver, ids, config=config), strict=True)))
        return {}

    inner: StateGraph[Any, None, Any, Any] = StateGraph(ChatState)
    inner.add_node("look", look)
    inner.add_edge(START, "look")
    inner.add_edge("look", END)
    builder: StateGraph[Any, None, Any, Any] = StateGraph(ChatState)
    builder.add_node("respond", respond)
    builder.add_node("look", look)
    builder.add_node("inner", inner.compile())
    builder.add_edge(START, "respond")
    builder.add_edge("respond", "inner")
    builder.add_edge("inner", "look")
    builder.add_edge("look", END)
    return builder.compile(checkpointer=saver)


def said(saver: Any, ids: list[str], since: datetime = EARLY, **options: Any) -> list[bool]:
    """Which of some messages of the thread are of runs since then."""
    found: list[bool] = saver.said_after("t", ids, since, **options)
    return found


def now() -> datetime:
    """The time, after all that was done before."""
    return datetime.now(UTC)


def message(text: str) -> Any:
    """An input with a message whose id is its text."""
    return {"messages": [HumanMessage(text, id=text)]}


@pytest.fixture
def saver(place: Place) -> Iterator[SQLiteCheckpointer]:
    """A checkpointer on a file or a server."""
    with place.saver() as opened:
        yield opened


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_messages_are_of_the_run_that_has_brought_them(
    saver: SQLiteCheckpointer, place: Place, durability: Any
) -> None:
    """In the run and after it, also in another process; a node of a subgraph is not told."""
    seen: list[Any] = []
    graph = graph_of(saver, seen)
    graph.invoke(message("one"), T, durability=durability)
    between = now()
    graph.invoke(message("two"), T, durability=durability)
    ids = ["one", "one-answer", "two", "two-answer", "never"]

    assert said(saver, ids) == [True, True, True, True, False]
    assert said(saver, ids, between) == [False, False, True, True, False]
    assert said(saver, ids, now()) == [False] * 5
    with place.saver() as other:
        assert said(other, ids, between) == [False, False, True, True, False]
    assert seen == [
        {"one": False, "one-answer": False},
        {"one": True, "one-answer": True},
        {"one": False, "one-answer": False, "two": False, "two-answer": False},
        {"one": True, "one-answer": True, "two": True, "two-answer": True},
    ]


def test_a_run_from_an_earlier_checkpoint(saver: SQLiteCheckpointer) -> None:
    """It knows the messages up to there, and brings its own."""
    seen: list[Any] = []
    graph = graph_of(saver, seen)
    graph.invoke(message("one"), T)
    first = graph.get_state(T).config
    graph.invoke(message("two"), T)
    between = now()
    graph.invoke(message("three"), first)

    assert said(saver, ["one", "two", "three"], between) == [False, False, True]
    assert said(saver, ["one", "two", "three"]) == [True, False, True]
    assert seen[-1] == dict.fromkeys(["one", "one-answer", "three", "three-answer"], True)


def test_an_input_to_a_thread_that_waits_begins_a_run(saver: SQLiteCheckpointer) -> None:
    """A resume of the same question does not."""
    seen: list[Any] = []
    graph = graph_of(saver, seen)
    graph.invoke(message("ask"), T)
    between = now()
    graph.invoke(message("two"), T, durability="sync")

    assert said(saver, ["ask", "two", "two-answer"], between) == [False, True, True]
    assert seen[-1]["two"] is True


def test_an_edited_message_is_not_of_a_later_run(saver: SQLiteCheckpointer) -> None:
    """All its versions count, and those of an update are of no run."""
    graph = graph_of(saver, [])
    graph.invoke(message("one"), T)
    graph.update_state(T, {"messages": [HumanMessage("other", id="one")]})
    graph.invoke(message("two"), T)

    assert said(saver, ["one", "two"]) == [False, True]


def test_what_a_program_puts_is_of_no_run(saver: SQLiteCheckpointer) -> None:
    """Whatever its metadata and times say."""
    graph_of(saver, []).invoke(message("one"), T)
    stored = saver.get_tuple(T)
    assert stored is not None
    checkpoint = copy.deepcopy(stored.checkpoint)
    checkpoint["ts"] = (now() + timedelta(days=9)).isoformat()
    checkpoint["id"] = "ffffffff-ffff-6fff-bfff-ffffffffffff"
    checkpoint["channel_values"]["messages"].append(HumanMessage("two", id="two"))
    version = saver.get_next_version(checkpoint["channel_versions"]["messages"], None)
    checkpoint["channel_versions"]["messages"] = version
    for source in ("input", "loop"):
        saver.put(T, checkpoint, {"source": source}, {"messages": version})

    assert said(saver, ["two"]) == [False]


def test_wrong_arguments_are_named(saver: SQLiteCheckpointer) -> None:
    """A moment without a time zone; an unknown thread has no messages."""
    with pytest.raises(ConfigurationError, match="time zone"):
        saver.said_after("t", ["one"], datetime(2020, 1, 1))
    assert saver.said_after("t", ["one"], EARLY) == [False]


class ChangedMeanwhile(dict[Any, Any]):
    """A dict to which other threads add two entries while the oldest entry is looked up."""

    changes = 2

    def __iter__(self) -> Iterator[Any]:
        found = super().__iter__()
        if self.changes:
            self.changes -= 1
            self[object()] = None
        return found


def test_the_oldest_runs_are_dropped_while_other_threads_add_runs() -> None:
    """Python raises RuntimeError if a dict changes between the creation of an iterator and its use.

    After 8,192 runs, this made runs of programs with several threads fail when they loaded.
    """
    runs = ChangedMeanwhile.fromkeys(range(10))
    drop_oldest_entries(runs, 10)

    assert [number for number in range(10) if number in runs] == [3, 4, 5, 6, 7, 8, 9]
    assert len(runs) == 9
