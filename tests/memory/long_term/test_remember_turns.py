"""Turns are remembered at the end of their run, exactly once, even with a background extraction."""

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
from perdure.effects import run_operation
from perdure.errors import ConfigurationError, InvalidConfig, InvalidNamespace
from perdure.memory import ChatState, Collection, Extraction, recall
from perdure.memory.long_term.extraction import remember_turns
from perdure.memory.long_term.extractors import (
    TurnExtractor,
    build_puts_that_add_end_date_to_source_turns,
    build_turn_key,
)
from perdure.memory.long_term.records import Memory, StoreAdapter, convert_item_to_memory
from perdure.memory.thread_messages import Watermark, read_watermark
from perdure.storage.flow import fetch_rows
from perdure.stores import Provenance, SQLiteStore
from tests.memory.extraction_threads import (
    ANN,
    FailingStore,
    Graph,
    read_memories,
    read_memory_texts,
)
from tests.rounds import rounds

MAY = datetime(2026, 5, 1, tzinfo=UTC)
THREAD_CONFIG: Any = {"configurable": {"thread_id": "t", "user_id": "ann"}}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    """A store on the file that the checkpointer is on."""
    with SQLiteStore.open(tmp_path / "plain.db", index=None) as opened:
        yield opened


class RunFailed(Exception):
    """An exception that ends a run before the turns are remembered."""


def make_graph(saver: Any, store: Any, *, fails: Any = (), **options: Any) -> Graph:
    """Return a graph that answers and remembers.

    After the messages in `fails`, the run fails before it remembers.
    """

    def respond(state: ChatState) -> dict[str, Any]:
        newest = state["messages"][-1]
        return {"messages": [AIMessage(f"You said {newest.text}", id=f"{newest.id}-answer")]}

    def fail_for_some_messages(state: ChatState) -> dict[str, Any]:
        if state["messages"][-2].text in fails:
            raise RunFailed
        return {}

    builder: StateGraph[Any, None, Any, Any] = StateGraph(ChatState)
    builder.add_node("respond", respond)
    builder.add_node("between", fail_for_some_messages)
    builder.add_node("remember", remember_turns(**options))
    builder.add_edge(START, "respond")
    builder.add_edge("respond", "between")
    builder.add_edge("between", "remember")
    builder.add_edge("remember", END)
    return builder.compile(checkpointer=saver, store=store)


def send_messages(graph: Graph, *texts: str) -> None:
    for text in texts:
        with suppress(RunFailed):
            graph.invoke({"messages": [HumanMessage(text, id=text)]}, THREAD_CONFIG)


def read_turns_in_order(store: SQLiteStore) -> list[str]:
    """Return the texts of Ann's turns, sorted by position in the thread, then by age."""
    rows = store.database.read(lambda: fetch_rows("SELECT key, id FROM store_items"))
    age = {str(key): id for key, id in rows}
    items = sorted(read_memories(store), key=lambda item: (item.provenance.position, age[item.key]))
    return [item.value["text"].partition(": ")[2] for item in items]


def expected_turns(*texts: str) -> list[str]:
    return [text for message in texts for text in (message, f"You said {message}")]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("library", ["perdure", "langgraph"])
def test_run_stores_each_turn_once_and_leaves_state_unchanged(
    library: str, is_async: bool, file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    saver: Any = file_saver if library == "perdure" else InMemorySaver()
    target_store: Any = store if library == "perdure" else InMemoryStore()
    graph = make_graph(saver, target_store)
    for text in ("one", "two"):
        given: Any = {"messages": [HumanMessage(text, id=text)]}
        state = (
            asyncio.run(graph.ainvoke(given, THREAD_CONFIG))
            if is_async
            else graph.invoke(given, THREAD_CONFIG)
        )
    report = Extraction(saver, target_store).extract("t", THREAD_CONFIG)

    assert len(state["messages"]) == 4
    assert sorted(read_memory_texts(target_store)) == [
        "assistant: You said one",
        "assistant: You said two",
        "user: one",
        "user: two",
    ]
    assert (report.messages, report.added) == (0, 0), "the background finds nothing left"


def test_turn_memory_has_provenance_of_its_message(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """The provenance has the thread, checkpoint, message, position, role and time."""
    send_messages(make_graph(file_saver, store), "one")
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
def test_each_turn_is_stored_once_in_order_whoever_stores_it(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Runs that remember, failed runs, trims and the background extraction occur in random order.

    No turn is lost or stored twice, and the order of the thread is kept.
    """
    path = tmp_path_factory.mktemp("turns") / "a.db"
    names = [f"m{number}" for number in range(data.draw(st.integers(1, 6)))]
    left = data.draw(st.frozensets(st.sampled_from(names)))
    with SQLiteCheckpointer.open(path) as saver, SQLiteStore.open(path, index=None) as store:
        graph, extraction = make_graph(saver, store, fails=left), Extraction(saver, store)
        for name in names:
            send_messages(graph, name)
            if data.draw(st.booleans()):  # what is trimmed is in no later state
                target_store = graph.get_state(THREAD_CONFIG).values["messages"]
                gone = data.draw(st.integers(0, len(target_store)))
                update: Any = [RemoveMessage(message.id) for message in target_store[:gone]]
                graph.update_state(THREAD_CONFIG, {"messages": update}, as_node="remember")
            if data.draw(st.booleans()):
                extraction.extract("t", THREAD_CONFIG)
        extraction.extract("t", THREAD_CONFIG)

        assert sorted(read_turns_in_order(store)) == sorted(expected_turns(*names))
        assert [item.version for item in read_memories(store)] == [1] * 2 * len(names)
        assert read_turns_in_order(store) == expected_turns(*names)
        assert extraction.extract("t", THREAD_CONFIG).messages == 0


def test_concurrent_runs_and_background_store_each_turn_once(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """The writer that comes second is refused, reads again, and finds the work done."""
    names = [f"m{number}" for number in range(6)]
    send_messages(make_graph(file_saver, InMemoryStore()), *names)
    messages = make_graph(file_saver, store).get_state(THREAD_CONFIG).values["messages"]
    node, extraction = remember_turns(store), Extraction(file_saver, store, batch=3)
    calls = [lambda: node(messages, THREAD_CONFIG)] * 3 + [
        lambda: extraction.extract("t", THREAD_CONFIG)
    ] * 3
    with ThreadPoolExecutor(len(calls)) as pool:
        for done in [pool.submit(call) for call in calls]:
            done.result()

    assert read_turns_in_order(store) == expected_turns(*names)
    assert [item.version for item in read_memories(store)] == [1] * 12


def test_turns_extracted_later_get_their_position_in_thread(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """Messages of a failed run that were then trimmed are stored later, in their original place."""
    graph = make_graph(file_saver, store, fails=("two",))
    send_messages(graph, "one", "two")
    gone: Any = [RemoveMessage("two"), RemoveMessage("two-answer")]
    graph.update_state(THREAD_CONFIG, {"messages": gone}, as_node="remember")
    send_messages(graph, "three")
    assert read_turns_in_order(store) == expected_turns("one", "three")
    report = Extraction(file_saver, store).extract("t", THREAD_CONFIG)

    assert report.added == 2
    assert read_turns_in_order(store) == expected_turns("one", "two", "three")


def test_edited_message_has_one_memory_with_its_new_text(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    graph = make_graph(file_saver, store)
    send_messages(graph, "one")
    edited: Any = {"messages": [HumanMessage("ONE", id="one")]}
    graph.update_state(THREAD_CONFIG, edited, as_node="remember")
    send_messages(graph, "two")

    assert read_turns_in_order(store) == ["ONE", "You said one", *expected_turns("two")]


def test_excluded_and_deleted_turns_are_not_stored_again(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """A message with `remember: False` gets no memory.

    A deleted memory does not come back with the next run.
    """
    graph = make_graph(file_saver, store)
    secret = HumanMessage("my diary", id="a", response_metadata={"remember": False})
    graph.invoke({"messages": [secret]}, THREAD_CONFIG)
    assert read_turns_in_order(store) == ["You said my diary"]
    store.delete(ANN, build_turn_key("t", "a-answer", 0))
    send_messages(graph, "two")

    assert read_turns_in_order(store) == expected_turns("two")


@pytest.mark.parametrize("fails", [{1}, {2}])
def test_failing_store_does_not_fail_run(
    fails: set[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The failure is logged, and the next run stores the remaining turns."""
    path = tmp_path / "a.db"
    with SQLiteCheckpointer.open(path) as saver, FailingStore.open(path, index=None) as store:
        store.failing_writes = frozenset(fails)
        graph = make_graph(saver, store)
        with caplog.at_level(logging.WARNING, "perdure"):
            send_messages(graph, "one", "two", "three")

        assert "not stored as memories yet" in caplog.text
        assert read_turns_in_order(store) == expected_turns("one", "two", "three")
        assert [item.version for item in read_memories(store)] == [1] * 6


def test_full_namespace_is_logged_and_does_not_fail_run(
    file_saver: SQLiteCheckpointer, store: SQLiteStore, caplog: pytest.LogCaptureFixture
) -> None:
    scope: Any = store.scoped(("tenant",), max_items=1)
    send_messages(make_graph(file_saver, scope), "one")

    assert "at most 1 items are allowed" in caplog.text
    assert read_memory_texts(scope) == []


@pytest.mark.parametrize(
    ("configurable", "expected_name"),
    [({"thread_id": "t"}, "user_id"), ({"user_id": "ann"}, "thread_id")],
)
def test_run_without_user_or_thread_id_is_refused(
    configurable: Any, expected_name: str, store: SQLiteStore
) -> None:
    """A missing id is a mistake of the developer, so an exception is raised."""
    node = remember_turns(store)
    with pytest.raises(InvalidConfig, match=expected_name):
        node([HumanMessage("one", id="a")], {"configurable": configurable})


@pytest.mark.parametrize("options", [{"gate": 1}, {"store": {}}])
def test_invalid_arguments_are_refused_by_name(options: Any) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        remember_turns(**options)


# -- watermarks


class SecondExtractor(TurnExtractor):
    """Another extractor."""

    name = "second"


def test_each_extractor_has_its_own_watermark(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    send_messages(make_graph(file_saver, store), "one")
    second = Extraction(file_saver, store, SecondExtractor())

    assert [second.extract("t", THREAD_CONFIG).messages for _ in range(2)] == [2, 0]
    assert Extraction(file_saver, store).extract("t", THREAD_CONFIG).messages == 0


def test_watermark_counts_failures_until_it_advances(store: SQLiteStore) -> None:
    """The watermark records the number, the time, the head and the error of failures."""
    adapter = StoreAdapter(store)
    mark = run_operation(read_watermark(adapter, ANN, "t", "model"))
    for _ in range(2):
        store.batch([mark.with_failure("no answer", MAY, "c1").build_put(ANN, "t")])
        mark = run_operation(read_watermark(adapter, ANN, "t", "model"))

    assert (mark.attempts, mark.failed_at, mark.failed_head, mark.error) == (
        *(2, MAY, "c1", "no answer"),
    )
    assert mark.advance((), "c2") == Watermark("model", checkpoint_id="c2", version=2)
    assert run_operation(read_watermark(adapter, ANN, "t")).attempts == 0


# -- superseded turns


def test_turns_of_superseded_fact_get_end_date_once(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """Turns of other messages, and turns that have a date, are unchanged."""
    send_messages(make_graph(file_saver, store), "I live in Ghent", "two")
    [turn] = [
        item for item in read_memories(store) if item.value["text"] == "user: I live in Ghent"
    ]
    fact = Memory(ANN, "f", "Ann lives in Ghent", "fact", {}, turn.provenance)
    adapter = StoreAdapter(store)
    for found in (1, 0):
        puts = run_operation(build_puts_that_add_end_date_to_source_turns(adapter, fact, MAY))
        assert len(puts) == found
        run_operation(adapter.write(puts))

    past = {item.key: item.value for item in read_memories(store) if "until" in item.value}
    assert past == {turn.key: {**turn.value, "until": MAY.isoformat()}}
    assert (
        run_operation(
            build_puts_that_add_end_date_to_source_turns(adapter, convert_item_to_memory(turn), MAY)
        )
        == []
    )
    assert turn.provenance == store.get(ANN, turn.key).provenance  # type: ignore[union-attr]


@pytest.mark.parametrize("library", ["perdure", "langgraph"])
def test_turn_extracted_after_its_fact_was_superseded_has_end_date(
    library: str, file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """The turn of the new text and turns of other threads get no date."""
    target_store: Any = store if library == "perdure" else InMemoryStore()
    facts = Collection(target_store)
    said = {"one": "Ann lives in Ghent", "two": "Ann lives in Lille"}
    for thread in ("t", "other"):
        for name in said:
            given: Any = {"messages": [HumanMessage(said[name], id=name)]}
            make_graph(file_saver, InMemoryStore()).invoke(given, make_config(thread, "ann"))
    source = [Provenance(thread_id="t", message_ids=(name,), trust="user") for name in said]
    facts.insert(said["one"], key="home", provenance=source[0], config=THREAD_CONFIG)
    facts.supersede("home", said["two"], at=MAY, provenance=source[1], config=THREAD_CONFIG)
    for thread in ("t", "other"):
        Extraction(file_saver, target_store).extract(thread, THREAD_CONFIG)

    past = {
        item.key: item.value.get("until")
        for item in read_memories(target_store)
        if "until" in item.value
    }
    assert past == {build_turn_key("t", "one", 0): MAY.isoformat()}
    shown = recall("Where does Ann live?", store=target_store, config=THREAD_CONFIG).memories
    assert build_turn_key("t", "one", 0) not in {message.key for message in shown}


def test_user_id_with_dot_is_logged_and_does_not_fail_run(
    file_saver: SQLiteCheckpointer, caplog: pytest.LogCaptureFixture
) -> None:
    """Stores of langgraph refuse dots.

    The log names the label and its value, and says what to do.
    """
    store: Any = InMemoryStore()
    given: Any = {"messages": [HumanMessage("one", id="one")]}
    state = make_graph(file_saver, store).invoke(given, make_config("t", "a.b"))

    assert [message.text for message in state["messages"]] == ["one", "You said one"]
    message = r"does not allow dots in the labels .*\{user_id\}.*'a\.b'.*pass values without dots"
    assert re.search(message, caplog.text)
    with pytest.raises(InvalidNamespace, match=message):
        Extraction(file_saver, store).extract("t", make_config("t", "a.b"))


def make_config(thread: str, user: str) -> Any:
    return {"configurable": {"thread_id": thread, "user_id": user}}
