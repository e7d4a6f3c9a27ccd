"""Extraction: each message is formed from exactly once in effect, whatever happens in between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.store.memory import InMemoryStore

from perdure.checkpointers import SQLiteCheckpointer
from perdure.effects import run
from perdure.errors import (
    ConfigurationError,
    InvalidConfig,
    InvalidNamespace,
    LimitExceeded,
    UnknownThread,
)
from perdure.memory.collection import Collection
from perdure.memory.extraction import Extraction, ExtractionReport
from perdure.memory.extractors import Batch, Proposal, Scope, TurnExtractor, build_turn_key
from perdure.memory.gate import Gate
from perdure.memory.thread_messages import read_watermark
from perdure.stores import SQLiteStore
from tests.memory.threads import (
    ANN,
    FailingStore,
    build_graph,
    read_memories,
    read_memory_texts,
    send_messages,
    thread_config,
    user_config,
)
from tests.rounds import rounds

NAMES = [f"message {number}" for number in range(12)]
EXTRACTED = [f"user: {name}" for name in NAMES]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    """A store on the file that the checkpointer is on."""
    with SQLiteStore.open(tmp_path / "plain.db") as opened:
        yield opened


def extraction_of(saver: Any, store: Any, **options: Any) -> Extraction:
    return Extraction(saver, store, **options)


# -- forming


def test_what_was_said_is_formed_once(file_saver: SQLiteCheckpointer, store: SQLiteStore) -> None:
    """Forming again forms what is new, and nothing twice."""
    graph, extraction = build_graph(file_saver), extraction_of(file_saver, store)
    send_messages(graph, "t", "I like tea.")
    first = extraction.extract("t", user_config())
    again = extraction.extract("t", user_config())
    send_messages(graph, "t", "And Bruges.")
    second = extraction.extract("t", user_config())

    assert (first.messages, first.added) == (2, 2)
    assert (again.messages, again.added) == (0, 0)
    assert (second.messages, second.added) == (2, 2)
    assert {
        "user: I like tea.",
        "assistant: You said I like tea.",
        "user: And Bruges.",
        "assistant: You said And Bruges.",
    } == set(read_memory_texts(store))
    assert [item.version for item in read_memories(store)] == [1] * 4


def test_memories_say_where_they_come_from(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """A memory names its thread, the checkpoint it was read at, its message, place and speaker."""
    send_messages(
        build_graph(file_saver, answers=False), "t", HumanMessage("I like tea.", id="a", name="Ann")
    )
    extraction_of(file_saver, store).extract("t", user_config())
    [memory] = read_memories(store)
    head = file_saver.get_tuple(thread_config("t"))
    assert head is not None

    assert ("t", head.checkpoint["id"], ("a",), "Ann", "user", 0) == (
        memory.provenance.thread_id,
        memory.provenance.checkpoint_id,
        memory.provenance.message_ids,
        memory.provenance.actor,
        memory.provenance.trust,
        memory.provenance.position,
    )


def test_the_async_form_does_the_same(tmp_path: Path) -> None:
    """Awaited, forming keeps what blocking forming keeps."""

    async def formed() -> ExtractionReport:
        async with (
            SQLiteStore.open(tmp_path / "a.db") as store,
            SQLiteCheckpointer.open(tmp_path / "a.db") as saver,
        ):
            graph, extraction = build_graph(saver), extraction_of(saver, store)
            await graph.ainvoke(
                {"messages": [HumanMessage("I like tea.", id="a")]}, thread_config("t")
            )
            report = await extraction.aextract("t", user_config())
            assert report.added == len(read_memory_texts(store))
            return report

    assert asyncio.run(formed()).added == 2


def test_a_thread_is_formed_in_batches(file_saver: SQLiteCheckpointer, store: SQLiteStore) -> None:
    """A long thread is formed in several transactions, each with the messages before it at hand."""
    send_messages(build_graph(file_saver, answers=False), "t", *NAMES)
    extractor = Noting()
    report = extraction_of(file_saver, store, extractor=extractor, batch=5).extract(
        "t", user_config()
    )

    assert (report.messages, report.added, report.batches) == (12, 12, 3)
    assert [(len(each.before), len(each.messages)) for each in extractor.batches] == [
        (0, 5),
        (4, 5),
        (4, 2),
    ]
    assert sorted(EXTRACTED) == sorted(read_memory_texts(store))


def is_read(extraction: Extraction, thread_id: str) -> bool:
    """Whether a thread was read at its head, so that it is not due."""
    mark = run(read_watermark(extraction.get_adapter(), ANN, thread_id, extraction.extractor.name))
    head = extraction.saver.get_tuple(thread_config(thread_id))
    return head is not None and mark.checkpoint_id == head.checkpoint["id"]


class Noting(TurnExtractor):
    """Notes the batches it was given, and may do something before it answers."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Batch] = []
        self.meanwhile: Any = None

    async def propose_changes(self, batch: Batch, scope: Scope) -> Proposal:
        self.batches.append(batch)
        if self.meanwhile is not None:
            call, self.meanwhile = self.meanwhile, None
            call()
        return await super().propose_changes(batch, scope)


def test_each_user_has_their_own(file_saver: SQLiteCheckpointer, store: SQLiteStore) -> None:
    """The same thread formed for two users makes memories for each, and none in the other's."""
    send_messages(build_graph(file_saver, answers=False), "t", "I like tea.")
    extraction = extraction_of(file_saver, store)
    extraction.extract("t", user_config("ann"))
    extraction.extract("t", user_config("bo"))

    assert read_memory_texts(store, ("memories", "ann")) == read_memory_texts(
        store, ("memories", "bo")
    )
    assert read_memory_texts(store, ("memories", "eve")) == []


@pytest.mark.parametrize("config", [None, {"configurable": {}}, {"configurable": {"user_id": 7}}])
def test_nobody_s_memories_are_formed_for_nobody(
    config: Any, file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """A config that does not name the user in text is refused before anything is written."""
    send_messages(build_graph(file_saver), "t", "I like tea.")
    extraction = extraction_of(file_saver, store)

    with pytest.raises(InvalidConfig, match="user_id"):
        extraction.extract("t", config)
    assert store.search((), limit=10) == []


def test_a_user_called_like_perdure_s_own_place_is_refused(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """No user id reaches the place where perdure keeps its notes."""
    extraction = extraction_of(file_saver, store, namespace=("{user_id}",))

    with pytest.raises(InvalidNamespace, match="perdure"):
        extraction.extract("t", user_config("perdure"))


def test_a_thread_that_is_not_there_is_named(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """Forming a thread that nobody began says so."""
    with pytest.raises(UnknownThread, match="'nobody'"):
        extraction_of(file_saver, store).extract("nobody", user_config())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"extractor": "turns"}, "TurnExtractor"),
        ({"gate": "open"}, "Gate"),
        ({"batch": 0}, "batch"),
        ({"messages_key": ""}, "messages_key"),
        ({"store": {}}, "BaseStore"),
        ({"saver": "a.db"}, "BaseCheckpointSaver"),
    ],
)
def test_arguments_that_are_wrong_are_named(options: Any, told: str) -> None:
    """An extraction with an argument of another kind is not made."""
    with pytest.raises(ConfigurationError, match=told):
        Extraction(**{"saver": InMemorySaver(), **options})


# -- edits, forks, what was trimmed


def test_what_was_trimmed_before_it_was_formed_is_formed(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """perdure's checkpointer has what left the state, so it is remembered all the same."""
    send_messages(
        build_graph(file_saver, answers=False), "t", "one", RemoveMessage(id="one"), "two"
    )
    extraction_of(file_saver, store).extract("t", user_config())

    assert {"user: one", "user: two"} == set(read_memory_texts(store))


def test_a_state_that_is_trimmed_is_formed_from_once() -> None:
    """With other parts, what is left of the state is formed from, and positions go on growing."""
    saver, store = InMemorySaver(), InMemoryStore()
    graph, extraction = build_graph(saver, answers=False), extraction_of(saver, store)
    for name in NAMES:
        send_messages(graph, "t", name)
        extraction.extract("t", user_config())
        send_messages(graph, "t", RemoveMessage(id=name))
    memories = read_memories(store)

    assert sorted(EXTRACTED) == sorted(read_memory_texts(store))
    assert list(range(12)) == sorted(m.value["provenance"]["position"] for m in memories)


def test_an_edited_message_changes_its_memory(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """A message that was edited after it was formed from is one memory, with its past."""
    graph, extraction = build_graph(file_saver, answers=False), extraction_of(file_saver, store)
    send_messages(graph, "t", HumanMessage("I live in Ghent.", id="a"), "two")
    extraction.extract("t", user_config())
    send_messages(graph, "t", HumanMessage("I live in Bruges.", id="a"))
    report = extraction.extract("t", user_config())

    assert report.messages == 1
    assert {"user: I live in Bruges.", "user: two"} == set(read_memory_texts(store))
    assert [
        before["text"] for item in read_memories(store) for before in item.value.get("formerly", ())
    ] == ["user: I live in Ghent."]


def test_what_an_edit_leaves_over_goes(file_saver: SQLiteCheckpointer, store: SQLiteStore) -> None:
    """A message that was made shorter, or empty, has no memories of what it says no more."""
    graph = build_graph(file_saver, answers=False)
    extraction = extraction_of(file_saver, store, extractor=TurnExtractor(max_words=3))
    long = HumanMessage("I like tea. I have cats. I live here.", id="a")
    for message in (long, HumanMessage("I like tea.", id="a"), long, HumanMessage("", id="a")):
        send_messages(graph, "t", message)
        extraction.extract("t", user_config())
        if message is long:
            assert len(read_memory_texts(store)) == 3

    assert read_memory_texts(store) == []


def test_a_fork_is_formed_from_where_it_began(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """After going back to an old checkpoint, only what was said from there on is formed."""
    graph, extraction = build_graph(file_saver, answers=False), extraction_of(file_saver, store)
    send_messages(graph, "t", "one")
    old = graph.get_state(thread_config("t")).config
    send_messages(graph, "t", "two")
    extraction.extract("t", user_config())
    graph.invoke({"messages": [HumanMessage("three", id="three")]}, old)
    report = extraction.extract("t", user_config())

    assert report.messages == 1
    assert {"user: one", "user: two", "user: three"} == set(read_memory_texts(store))


def test_a_thread_that_was_forked_far_back_is_read_again(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """If the watermark names no message that is left, all are read, and no memory is made twice."""
    graph, extraction = build_graph(file_saver, answers=False), extraction_of(file_saver, store)
    send_messages(graph, "t", "one")
    old = graph.get_state(thread_config("t")).config
    send_messages(graph, "t", *(HumanMessage(f"m{i}", id=f"m{i}") for i in range(60)))
    extraction.extract("t", user_config())
    graph.invoke({"messages": [HumanMessage("three", id="three")]}, old)
    report = extraction.extract("t", user_config())

    assert (report.messages, report.added, report.unchanged) == (2, 1, 1)
    assert len(read_memory_texts(store)) == 62


def test_what_was_forgotten_does_not_come_back(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """A memory that was deleted or forgotten is not formed from its message again."""
    graph, extraction = build_graph(file_saver, answers=False), extraction_of(file_saver, store)
    send_messages(graph, "t", "I like tea.", "I have a cat.")
    extraction.extract("t", user_config())
    memories = Collection(store)
    first, second = read_memories(store)
    memories.delete(first.key, config=user_config())
    memories.forget(second.key, config=user_config())
    store.delete(("perdure", "formed", *ANN), "t")  # so that all is read again
    report = extraction.extract("t", user_config())

    assert (report.messages, report.added) == (2, 0)
    assert read_memory_texts(store) == []


def test_the_async_form_computes_beside_the_loop(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """What is formed, and what is judged, is not computed by the event loop's own thread."""
    send_messages(build_graph(file_saver, answers=False), "t", "I like tea.")
    extractor = Noting()
    threads: list[threading.Thread] = []
    extractor.meanwhile = lambda: threads.append(threading.current_thread())

    def seen(text: str) -> list[Any]:
        threads.append(threading.current_thread())
        return []

    extraction = extraction_of(file_saver, store, extractor=extractor, gate=Gate(detectors=[seen]))
    asyncio.run(extraction.aextract("t", user_config()))

    assert threading.main_thread() not in threads
    assert len(threads) >= 2
    extractor.meanwhile = lambda: [][0]
    send_messages(build_graph(file_saver, answers=False), "t", "I like Ghent.")
    with pytest.raises(IndexError):
        asyncio.run(extraction.aextract("t", user_config()))


# -- room


def test_what_there_is_no_room_for_is_formed_once_there_is(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """A full namespace refuses no message: an error tells, and nothing is written."""
    scope: Any = store.scoped(("tenant",), max_items=5)
    for number in range(3):
        scope.put(ANN, f"k{number}", {"kind": "fact", "about": "room"})
    send_messages(build_graph(file_saver, answers=False), "t", "I like tea.", "I like Ghent.")
    extraction = extraction_of(file_saver, scope)
    for _ in range(2):
        with pytest.raises(LimitExceeded, match="at most 5 items are allowed"):
            extraction.extract("t", user_config())
        assert read_memory_texts(scope) == []
    assert not is_read(extraction, "t")
    scope.delete(ANN, "k0")
    report = extraction.extract("t", user_config())

    assert (report.messages, report.added, dict(report.refused)) == (2, 2, {})
    assert is_read(extraction, "t")


# -- formed anew


@pytest.mark.parametrize("kind", ["perdure", "langgraph"])
def test_a_thread_that_is_formed_anew_makes_no_memory_twice(
    kind: str, file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """All of it is read again, and what is there stays; what was forgotten stays away."""
    saver: Any = file_saver if kind == "perdure" else InMemorySaver()
    other: Any = store if kind == "perdure" else InMemoryStore()
    graph, extraction = build_graph(saver, answers=False), extraction_of(saver, other, batch=5)
    send_messages(graph, "t", *NAMES)
    extraction.extract("t", user_config())
    before = said_where(store)
    Collection(other).delete(build_turn_key("t", "message 3", 0), config=user_config())
    again = extraction.extract("t", user_config(), anew=True)
    send_messages(graph, "t", "one more")
    last = extraction.extract("t", user_config())

    assert (again.messages, again.added, again.unchanged) == (12, 0, 11)
    assert (last.messages, last.added) == (1, 1)
    assert len(read_memory_texts(other)) == 12
    if kind == "perdure":
        del before["user: message 3"]
        now = said_where(store)
        assert before == {text: now[text] for text in before}
        assert max(now, key=lambda text: now[text] or 0) == "user: one more"


def said_where(store: SQLiteStore) -> dict[str, int | None]:
    """The place of each turn in its thread."""
    return {each.value["text"]: each.provenance.position for each in read_memories(store)}


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_forming_anew_goes_on_where_it_was_cut_off(
    failing: int, file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """What was formed anew before an error is not once more, and the thread waits meanwhile."""
    send_messages(build_graph(file_saver, answers=False), "t", *NAMES)
    extraction_of(file_saver, store).extract("t", user_config())
    extractor = Noting()
    extraction = extraction_of(file_saver, store, extractor=extractor, batch=4)

    def fail() -> None:
        if len(extractor.batches) < failing:
            extractor.meanwhile = fail
            return
        raise RuntimeError("the model is tired")

    extractor.meanwhile = fail
    with pytest.raises(RuntimeError, match="tired"):
        extraction.extract("t", user_config(), anew=True)
    assert not is_read(extraction, "t")
    extraction.extract("t", user_config())
    seen = [message.id for batch in extractor.batches for message in batch.messages]

    assert sorted(NAMES) == sorted(set(seen))
    assert len(seen) == 16, "one batch was read twice"
    assert sorted(EXTRACTED) == sorted(read_memory_texts(store))
    assert is_read(extraction, "t")


def test_without_a_history_what_was_removed_is_gone(store: SQLiteStore) -> None:
    """A checkpointer that keeps none has nothing to form of a message that was removed."""
    saver = InMemorySaver()
    graph = build_graph(saver, answers=False)
    send_messages(graph, "t", "I like tea.", "My salary is 90000")
    graph.invoke({"messages": [RemoveMessage("My salary is 90000")]}, thread_config("t"))
    extraction_of(saver, store).extract("t", user_config())

    assert read_memory_texts(store) == ["user: I like tea."]


# -- faults


@settings(max_examples=rounds(10))
@given(fails=st.frozensets(st.integers(1, 9), max_size=5), touched=st.booleans())
def test_a_fault_anywhere_loses_and_doubles_nothing(
    fails: frozenset[int], touched: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whichever writes fail, before or after the fact, forming again ends where none had failed."""
    path = tmp_path_factory.mktemp("fault") / "a.db"
    with SQLiteCheckpointer.open(path) as saver, FailingStore.open(path) as store:
        send_messages(build_graph(saver, answers=False), "t", *NAMES)
        extraction = extraction_of(saver, store, batch=4)
        store.failing_writes, store.writes = fails, 0
        for _ in range(len(fails) + 1):
            try:
                extraction.extract("t", user_config())
            except OSError:
                continue
            break
        extraction.extract("t", user_config())

        assert sorted(EXTRACTED) == sorted(read_memory_texts(store))
        assert [item.version for item in read_memories(store)] == [1] * 12
        assert is_read(extraction, "t")


@pytest.mark.parametrize("door", ["blocking", "awaiting"])
def test_two_that_form_one_thread_form_it_once(
    door: str, file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """However many form a thread at the same time, each message becomes one memory, once."""
    send_messages(build_graph(file_saver, answers=False), "t", *NAMES)
    extractions = [extraction_of(file_saver, store, batch=2) for _ in range(4)]
    reports: list[ExtractionReport] = []
    if door == "awaiting":

        async def all_at_once() -> None:
            reports.extend(
                await asyncio.gather(*(f.aextract("t", user_config()) for f in extractions))
            )

        asyncio.run(all_at_once())
    else:
        threads = [
            threading.Thread(target=lambda f=f: reports.append(f.extract("t", user_config())))
            for f in extractions
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert sorted(EXTRACTED) == sorted(read_memory_texts(store))
    assert [item.version for item in read_memories(store)] == [1] * 12
    assert sum(report.added for report in reports) == 12


def test_the_slower_one_is_refused_and_goes_on(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """If another forms the thread while this one asks its model, what it has is not written."""
    graph = build_graph(file_saver, answers=False)
    send_messages(graph, "t", "one", "two")
    slow = Noting()
    quick = extraction_of(file_saver, store)

    def meanwhile() -> None:
        quick.extract("t", user_config())
        send_messages(graph, "t", "three")

    slow.meanwhile = meanwhile
    report = extraction_of(file_saver, store, extractor=slow).extract("t", user_config())

    assert [[m.id for m in b.messages] for b in slow.batches] == [["one", "two"], ["three"]]
    assert (report.messages, report.added) == (1, 1)
    assert [item.version for item in read_memories(store)] == [1] * 3


@pytest.mark.parametrize("kind", ["perdure", "langgraph"])
def test_other_parts_are_formed_from_too(kind: str, store: SQLiteStore) -> None:
    """langgraph's own saver and store do, alone or with one of perdure's."""
    saver, other = InMemorySaver(), InMemoryStore() if kind == "langgraph" else store
    send_messages(build_graph(saver), "t", "I like tea.")
    extraction = extraction_of(saver, other)
    extraction.extract("t", user_config())
    extraction.extract("t", user_config())

    assert sorted(read_memory_texts(other)) == [
        "assistant: You said I like tea.",
        "user: I like tea.",
    ]
    assert is_read(extraction, "t")


# -- what is due


def test_a_thread_with_nothing_new_is_due_no_longer(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """The watermark notes at which checkpoint a thread was read, though there was nothing new."""
    graph, extraction = build_graph(file_saver), extraction_of(file_saver, store)
    send_messages(graph, "t", "I like tea.")
    extraction.extract("t", user_config())
    graph.update_state(thread_config("t"), {"messages": []})
    assert not is_read(extraction, "t")
    extraction.extract("t", user_config())

    assert is_read(extraction, "t")


@pytest.mark.parametrize("kind", ["perdure", "langgraph"])
def test_a_thread_that_goes_on_while_it_is_read_stays_due(
    kind: str, file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """A message that comes while memories are made of the others is not taken for read."""
    graph, extractor = build_graph(file_saver, answers=False), Noting()
    send_messages(graph, "t", "one")
    other = InMemoryStore() if kind == "langgraph" else store
    extraction = extraction_of(file_saver, other, extractor=extractor)
    extractor.meanwhile = lambda: send_messages(graph, "t", "two")
    extraction.extract("t", user_config())

    assert read_memory_texts(other) == ["user: one"]
    assert not is_read(extraction, "t")


# -- reports


def test_a_report_is_one_line_without_secrets(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """It counts what was not kept; the text is in neither the report nor the watermark."""
    secret = "sk-proj-" + "a1B2c3D4" * 6
    said = HumanMessage(f"My key is {secret}", id="b")
    send_messages(build_graph(file_saver, answers=False), "t", "I like tea.", said)
    report = extraction_of(file_saver, store).extract("t", user_config())
    note: Any = store.get(("perdure", "formed", *ANN), "t")

    assert report.messages == 2
    assert sum(report.refused.values()) + report.quarantined == 1
    assert secret not in f"{note.value} {report}"
    assert "\n" not in str(report)
    assert str(report).startswith("t: 2 messages read, ")


def test_messages_that_no_store_can_hold_are_formed_all_the_same(store: SQLiteStore) -> None:
    """Half a character in a message does not keep its thread from being formed."""
    saver = InMemorySaver()
    send_messages(
        build_graph(saver, answers=False), "t", AIMessage("half \ud83d a smile", id="a"), "two"
    )
    extraction_of(saver, store).extract("t", user_config())

    assert {"assistant: half ? a smile", "user: two"} == set(read_memory_texts(store))


class Forgotten(TurnExtractor):
    """Has its thread forgotten while it reads the first messages."""

    def __init__(self, saver: SQLiteCheckpointer, store: SQLiteStore) -> None:
        super().__init__()
        self.saver, self.store = saver, store

    async def propose_changes(self, batch: Batch, scope: Scope) -> Proposal:
        self.store.forget(threads=[batch.thread_id], checkpointer=self.saver)
        Collection(self.store).forget_all(config=user_config())
        return await super().propose_changes(batch, scope)


def test_a_thread_that_is_forgotten_meanwhile_leaves_no_memories(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """Not even when it is extracted for the first time."""
    send_messages(build_graph(file_saver), "t", "I like tea.")
    extraction = Extraction(file_saver, store, Forgotten(file_saver, store))

    with pytest.raises(UnknownThread):
        extraction.extract("t", user_config())
    assert Collection(store).list(config=user_config()) == []
