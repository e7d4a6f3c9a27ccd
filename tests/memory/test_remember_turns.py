"""Turns are remembered at the end of their run, once, whoever else reads the thread."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.store.memory import InMemoryStore

from perdure.checkpointers import SQLiteCheckpointer
from perdure.effects import run
from perdure.errors import ConfigurationError, InvalidConfig, InvalidNamespace
from perdure.memory import ChatState, Collection, Extraction, recall
from perdure.memory.extraction import remember_turns
from perdure.memory.extractors import TurnExtractor, build_superseded_turn_puts, build_turn_key
from perdure.memory.records import Memory, StoreAdapter, convert_item_to_memory
from perdure.memory.thread_messages import Watermark, read_watermark
from perdure.storage.flow import fetch_rows
from perdure.stores import Provenance, SQLiteStore
from tests.memory.threads import ANN, FailingStore, Graph, read_memories, read_memory_texts
from tests.rounds import rounds

MAY = datetime(2026, 5, 1, tzinfo=UTC)
T: Any = {"configurable": {"thread_id": "t", "user_id": "ann"}}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    """A store on the file that the checkpointer is on."""
    with SQLiteStore.open(tmp_path / "plain.db", index=None) as opened:
        yield opened


class Left(Exception):
    """A run ends before it remembers."""


def graph_of(saver: Any, store: Any, *, fails: Any = (), **options: Any) -> Graph:
    """A graph that answers and remembers; of some messages it fails before it remembers."""

    def respond(state: ChatState) -> dict[str, Any]:
        newest = state["messages"][-1]
        return {"messages": [AIMessage(f"You said {newest.text}", id=f"{newest.id}-answer")]}

    def between(state: ChatState) -> dict[str, Any]:
        if state["messages"][-2].text in fails:
            raise Left
        return {}

    builder: StateGraph[Any, None, Any, Any] = StateGraph(ChatState)
    builder.add_node("respond", respond)
    builder.add_node("between", between)
    builder.add_node("remember", remember_turns(**options))
    builder.add_edge(START, "respond")
    builder.add_edge("respond", "between")
    builder.add_edge("between", "remember")
    builder.add_edge("remember", END)
    return builder.compile(checkpointer=saver, store=store)


def say(graph: Graph, *said: str) -> None:
    for text in said:
        with suppress(Left):
            graph.invoke({"messages": [HumanMessage(text, id=text)]}, T)


def in_order(store: SQLiteStore) -> list[str]:
    """The turns of Ann's threads as search lays them side by side: by position, then by age."""
    rows = store.database.read(lambda: fetch_rows("SELECT key, id FROM store_items"))
    age = {str(key): id for key, id in rows}
    items = sorted(read_memories(store), key=lambda item: (item.provenance.position, age[item.key]))
    return [item.value["text"].partition(": ")[2] for item in items]


def exchange(*said: str) -> list[str]:
    return [text for each in said for text in (each, f"You said {each}")]


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("parts", ["perdure", "langgraph"])
def test_a_run_remembers_its_turns(
    parts: str, awaited: bool, file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """After the run its messages are memories, each once; the state stays as it is."""
    saver: Any = file_saver if parts == "perdure" else InMemorySaver()
    there: Any = store if parts == "perdure" else InMemoryStore()
    graph = graph_of(saver, there)
    for text in ("one", "two"):
        given: Any = {"messages": [HumanMessage(text, id=text)]}
        state = asyncio.run(graph.ainvoke(given, T)) if awaited else graph.invoke(given, T)
    report = Extraction(saver, there).extract("t", T)

    assert len(state["messages"]) == 4
    assert sorted(read_memory_texts(there)) == [
        "assistant: You said one",
        "assistant: You said two",
        "user: one",
        "user: two",
    ]
    assert (report.messages, report.added) == (0, 0), "the background finds nothing left"


def test_a_turn_says_where_it_comes_from(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """A memory has its thread, its checkpoint, its message, place, role and time."""
    say(graph_of(file_saver, store), "one")
    [first] = [item for item in read_memories(store) if item.value["text"] == "user: one"]
    source = first.provenance
    checkpoints = {info.checkpoint_id for info in file_saver.checkpoints("t")}

    assert first.key == build_turn_key("t", "one", 0)
    assert source.checkpoint_id in checkpoints
    assert (source.thread_id, source.message_ids, source.trust, source.position) == (
        *("t", ("one",), "user", 0),
    )
    assert source.at is not None


@settings(max_examples=rounds(12))
@given(data=st.data())
def test_whoever_remembers_each_turn_is_one_memory_in_its_place(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Runs that remember, runs that are left, edits, trims and the background: none lost or twice.

    The order of the thread holds too, whichever counted.
    """
    path = tmp_path_factory.mktemp("turns") / "a.db"
    names = [f"m{number}" for number in range(data.draw(st.integers(1, 6)))]
    left = data.draw(st.frozensets(st.sampled_from(names)))
    with SQLiteCheckpointer.open(path) as saver, SQLiteStore.open(path, index=None) as store:
        graph, extraction = graph_of(saver, store, fails=left), Extraction(saver, store)
        for name in names:
            say(graph, name)
            if data.draw(st.booleans()):  # what is trimmed is in no later state
                there = graph.get_state(T).values["messages"]
                gone = data.draw(st.integers(0, len(there)))
                update: Any = [RemoveMessage(each.id) for each in there[:gone]]
                graph.update_state(T, {"messages": update}, as_node="remember")
            if data.draw(st.booleans()):
                extraction.extract("t", T)
        extraction.extract("t", T)

        assert sorted(in_order(store)) == sorted(exchange(*names))
        assert [item.version for item in read_memories(store)] == [1] * 2 * len(names)
        assert in_order(store) == exchange(*names)
        assert extraction.extract("t", T).messages == 0


def test_runs_and_the_background_at_once_make_each_turn_once(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """Whoever comes second is refused, reads again, and finds it done."""
    names = [f"m{number}" for number in range(6)]
    say(graph_of(file_saver, InMemoryStore()), *names)
    messages = graph_of(file_saver, store).get_state(T).values["messages"]
    node, extraction = remember_turns(store), Extraction(file_saver, store, batch=3)
    calls = [lambda: node(messages, T)] * 3 + [lambda: extraction.extract("t", T)] * 3
    with ThreadPoolExecutor(len(calls)) as pool:
        for done in [pool.submit(call) for call in calls]:
            done.result()

    assert in_order(store) == exchange(*names)
    assert [item.version for item in read_memories(store)] == [1] * 12


def test_what_was_missed_between_lies_between(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """Messages of a run that was left and trimmed come later, and stand where they were said."""
    graph = graph_of(file_saver, store, fails=("two",))
    say(graph, "one", "two")
    gone: Any = [RemoveMessage("two"), RemoveMessage("two-answer")]
    graph.update_state(T, {"messages": gone}, as_node="remember")
    say(graph, "three")
    assert in_order(store) == exchange("one", "three")
    report = Extraction(file_saver, store).extract("t", T)

    assert report.added == 2
    assert in_order(store) == exchange("one", "two", "three")


def test_an_edited_message_has_one_memory(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """The turn of a message that was edited says what it says now."""
    graph = graph_of(file_saver, store)
    say(graph, "one")
    edited: Any = {"messages": [HumanMessage("ONE", id="one")]}
    graph.update_state(T, edited, as_node="remember")
    say(graph, "two")

    assert in_order(store) == ["ONE", "You said one", *exchange("two")]


def test_what_is_off_the_record_or_deleted_is_not_remembered(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """No memory is made of it; and what was deleted does not come back with the next run."""
    graph = graph_of(file_saver, store)
    secret = HumanMessage("my diary", id="a", response_metadata={"remember": False})
    graph.invoke({"messages": [secret]}, T)
    assert in_order(store) == ["You said my diary"]
    store.delete(ANN, build_turn_key("t", "a-answer", 0))
    say(graph, "two")

    assert in_order(store) == exchange("two")


@pytest.mark.parametrize("fails", [{1}, {2}])
def test_a_store_that_fails_costs_no_answer(
    fails: set[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on, the log tells; the next run remembers what is left."""
    path = tmp_path / "a.db"
    with SQLiteCheckpointer.open(path) as saver, FailingStore.open(path, index=None) as store:
        store.failing_writes = frozenset(fails)
        graph = graph_of(saver, store)
        with caplog.at_level(logging.WARNING, "perdure"):
            say(graph, "one", "two", "three")

        assert "not stored as memories yet" in caplog.text
        assert in_order(store) == exchange("one", "two", "three")
        assert [item.version for item in read_memories(store)] == [1] * 6


def test_no_room_costs_no_answer(
    file_saver: SQLiteCheckpointer, store: SQLiteStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A full namespace is told by the log."""
    scope: Any = store.scoped(("tenant",), max_items=1)
    say(graph_of(file_saver, scope), "one")

    assert "at most 1 items are allowed" in caplog.text
    assert read_memory_texts(scope) == []


@pytest.mark.parametrize(
    ("configurable", "told"), [({"thread_id": "t"}, "user_id"), ({"user_id": "ann"}, "thread_id")]
)
def test_a_run_that_does_not_say_whose_it_is_is_refused(
    configurable: Any, told: str, store: SQLiteStore
) -> None:
    """What a developer left out is an error, not a line of the log."""
    node = remember_turns(store)
    with pytest.raises(InvalidConfig, match=told):
        node([HumanMessage("one", id="a")], {"configurable": configurable})


@pytest.mark.parametrize("options", [{"gate": 1}, {"store": {}}])
def test_arguments_that_are_wrong_are_named(options: Any) -> None:
    """A node with an argument of another kind is not made."""
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        remember_turns(**options)


# -- watermarks


class Second(TurnExtractor):
    """Another extractor."""

    name = "second"


def test_each_extractor_has_its_own_watermark(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """What one has read, another has not."""
    say(graph_of(file_saver, store), "one")
    second = Extraction(file_saver, store, Second())

    assert [second.extract("t", T).messages for _ in range(2)] == [2, 0]
    assert Extraction(file_saver, store).extract("t", T).messages == 0


def test_failures_are_counted_until_one_succeeds(store: SQLiteStore) -> None:
    """A watermark keeps how often, when, at which head and why, and clears it when it advances."""
    adapter = StoreAdapter(store)
    mark = run(read_watermark(adapter, ANN, "t", "model"))
    for _ in range(2):
        store.batch([mark.with_failure("no answer", MAY, "c1").build_put(ANN, "t")])
        mark = run(read_watermark(adapter, ANN, "t", "model"))

    assert (mark.attempts, mark.failed_at, mark.failed_head, mark.error) == (
        *(2, MAY, "c1", "no answer"),
    )
    assert mark.advance((), "c2") == Watermark("model", checkpoint_id="c2", version=2)
    assert run(read_watermark(adapter, ANN, "t")).attempts == 0


# -- turns that are past


def test_turns_of_a_superseded_memory_are_marked_as_past(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """Turns of its messages get the date; others, and those that have one, do not."""
    say(graph_of(file_saver, store), "I live in Ghent", "two")
    [turn] = [
        item for item in read_memories(store) if item.value["text"] == "user: I live in Ghent"
    ]
    fact = Memory(ANN, "f", "Ann lives in Ghent", "fact", {}, turn.provenance)
    adapter = StoreAdapter(store)
    for found in (1, 0):
        puts = run(build_superseded_turn_puts(adapter, fact, MAY))
        assert len(puts) == found
        run(adapter.write(puts))

    past = {item.key: item.value for item in read_memories(store) if "until" in item.value}
    assert past == {turn.key: {**turn.value, "until": MAY.isoformat()}}
    assert run(build_superseded_turn_puts(adapter, convert_item_to_memory(turn), MAY)) == []
    assert turn.provenance == store.get(ANN, turn.key).provenance  # type: ignore[union-attr]


@pytest.mark.parametrize("parts", ["perdure", "langgraph"])
def test_a_turn_that_is_made_after_its_fact_was_superseded_is_past(
    parts: str, file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """Whatever the order; neither the turn of the new text nor another thread's is past."""
    there: Any = store if parts == "perdure" else InMemoryStore()
    facts = Collection(there)
    said = {"one": "Ann lives in Ghent", "two": "Ann lives in Lille"}
    for thread in ("t", "other"):
        for name in said:
            given: Any = {"messages": [HumanMessage(said[name], id=name)]}
            graph_of(file_saver, InMemoryStore()).invoke(given, on(thread, "ann"))
    source = [Provenance(thread_id="t", message_ids=(name,), trust="user") for name in said]
    facts.insert(said["one"], key="home", provenance=source[0], config=T)
    facts.supersede("home", said["two"], at=MAY, provenance=source[1], config=T)
    for thread in ("t", "other"):
        Extraction(file_saver, there).extract(thread, T)

    past = {
        item.key: item.value.get("until") for item in read_memories(there) if "until" in item.value
    }
    assert past == {build_turn_key("t", "one", 0): MAY.isoformat()}
    shown = recall("Where does Ann live?", store=there, config=T).memories
    assert build_turn_key("t", "one", 0) not in {each.key for each in shown}


def test_a_user_id_with_a_dot_ends_no_turn(
    file_saver: SQLiteCheckpointer, caplog: pytest.LogCaptureFixture
) -> None:
    """langgraph's stores refuse it: the log says which label, whose it is and what to do."""
    store: Any = InMemoryStore()
    given: Any = {"messages": [HumanMessage("one", id="one")]}
    state = graph_of(file_saver, store).invoke(given, on("t", "a.b"))

    assert [each.text for each in state["messages"]] == ["one", "You said one"]
    message = r"refuses dots in labels, .*'a\.b'.*\{user_id\}.*pass values without dots"
    assert re.search(message, caplog.text)
    with pytest.raises(InvalidNamespace, match=message):
        Extraction(file_saver, store).extract("t", on("t", "a.b"))


def on(thread: str, user: str) -> Any:
    return {"configurable": {"thread_id": thread, "user_id": user}}
