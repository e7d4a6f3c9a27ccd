"""Extraction: each message is extracted exactly once in effect, whatever happens in between."""

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
from perdure.effects import run_operation
from perdure.errors import (
    ConfigurationError,
    InvalidConfig,
    InvalidNamespace,
    LimitExceeded,
    UnknownThread,
)
from perdure.memory.long_term.collection import Collection
from perdure.memory.long_term.extraction import Extraction, ExtractionReport
from perdure.memory.long_term.extractors import (
    Batch,
    Proposal,
    Scope,
    TurnExtractor,
    build_turn_key,
)
from perdure.memory.long_term.gate import Gate
from perdure.memory.thread_messages import read_watermark
from perdure.stores import SQLiteStore
from tests.memory.extraction_threads import (
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
    """A store on the file of the checkpointer."""
    with SQLiteStore.open(tmp_path / "plain.db") as opened:
        yield opened


def make_extraction(saver: Any, store: Any, **options: Any) -> Extraction:
    return Extraction(saver, store, **options)


# -- extracting


def test_each_message_is_extracted_once(file_saver: SQLiteCheckpointer, store: SQLiteStore) -> None:
    """A third extraction extracts only new messages."""
    graph, extraction = build_graph(file_saver), make_extraction(file_saver, store)
    send_messages(graph, "t", "I like tea.")
    first = extraction.extract("t", user_config())
    second = extraction.extract("t", user_config())
    send_messages(graph, "t", "And Bruges.")
    third = extraction.extract("t", user_config())

    assert (first.messages, first.added) == (2, 2)
    assert (second.messages, second.added) == (0, 0)
    assert (third.messages, third.added) == (2, 2)
    assert {
        "user: I like tea.",
        "assistant: You said I like tea.",
        "user: And Bruges.",
        "assistant: You said And Bruges.",
    } == set(read_memory_texts(store))
    assert [item.version for item in read_memories(store)] == [1] * 4


def test_memory_names_its_thread_checkpoint_message_and_speaker(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    send_messages(
        build_graph(file_saver, answers=False), "t", HumanMessage("I like tea.", id="a", name="Ann")
    )
    make_extraction(file_saver, store).extract("t", user_config())
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


def test_async_extraction_stores_the_same_memories(tmp_path: Path) -> None:
    async def extract_async() -> ExtractionReport:
        async with (
            SQLiteStore.open(tmp_path / "a.db") as store,
            SQLiteCheckpointer.open(tmp_path / "a.db") as saver,
        ):
            graph, extraction = build_graph(saver), make_extraction(saver, store)
            await graph.ainvoke(
                {"messages": [HumanMessage("I like tea.", id="a")]}, thread_config("t")
            )
            report = await extraction.aextract("t", user_config())
            assert report.added == len(read_memory_texts(store))
            return report

    assert asyncio.run(extract_async()).added == 2


def test_long_thread_is_extracted_in_batches_with_preceding_messages(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """Each batch is one transaction."""
    send_messages(build_graph(file_saver, answers=False), "t", *NAMES)
    extractor = RecordingExtractor()
    report = make_extraction(file_saver, store, extractor=extractor, batch=5).extract(
        "t", user_config()
    )

    assert (report.messages, report.added, report.batches) == (12, 12, 3)
    assert [(len(batch.before), len(batch.messages)) for batch in extractor.batches] == [
        (0, 5),
        (4, 5),
        (4, 2),
    ]
    assert sorted(EXTRACTED) == sorted(read_memory_texts(store))


def is_up_to_date(extraction: Extraction, thread_id: str) -> bool:
    """Return whether the watermark of a thread is at its head, so that the thread is not due."""
    mark = run_operation(
        read_watermark(extraction.get_adapter(), ANN, thread_id, extraction.extractor.name)
    )
    head = extraction.saver.get_tuple(thread_config(thread_id))
    return head is not None and mark.checkpoint_id == head.checkpoint["id"]


class RecordingExtractor(TurnExtractor):
    """An extractor that records its batches, and may call a function before it answers."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Batch] = []
        self.call_before_answer: Any = None

    async def propose_changes(self, batch: Batch, scope: Scope) -> Proposal:
        self.batches.append(batch)
        if self.call_before_answer is not None:
            call, self.call_before_answer = self.call_before_answer, None
            call()
        return await super().propose_changes(batch, scope)


def test_thread_extracted_for_two_users_gives_each_their_own_memories(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    send_messages(build_graph(file_saver, answers=False), "t", "I like tea.")
    extraction = make_extraction(file_saver, store)
    extraction.extract("t", user_config("ann"))
    extraction.extract("t", user_config("bo"))

    assert read_memory_texts(store, ("memories", "ann")) == read_memory_texts(
        store, ("memories", "bo")
    )
    assert read_memory_texts(store, ("memories", "eve")) == []


@pytest.mark.parametrize("config", [None, {"configurable": {}}, {"configurable": {"user_id": 7}}])
def test_extraction_without_a_valid_user_id_is_refused(
    config: Any, file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """Nothing is written."""
    send_messages(build_graph(file_saver), "t", "I like tea.")
    extraction = make_extraction(file_saver, store)

    with pytest.raises(InvalidConfig, match="user_id"):
        extraction.extract("t", config)
    assert store.search((), limit=10) == []


def test_user_id_equal_to_perdure_own_label_is_refused(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    extraction = make_extraction(file_saver, store, namespace=("{user_id}",))

    with pytest.raises(InvalidNamespace, match="perdure"):
        extraction.extract("t", user_config("perdure"))


def test_extraction_of_an_unknown_thread_raises_unknown_thread(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    with pytest.raises(UnknownThread, match="'nobody'"):
        make_extraction(file_saver, store).extract("nobody", user_config())


@pytest.mark.parametrize(
    ("options", "expected_message"),
    [
        ({"extractor": "turns"}, "TurnExtractor"),
        ({"gate": "open"}, "Gate"),
        ({"batch": 0}, "batch"),
        ({"messages_key": ""}, "messages_key"),
        ({"store": {}}, "BaseStore"),
        ({"saver": "a.db"}, "BaseCheckpointSaver"),
    ],
)
def test_invalid_arguments_of_an_extraction_are_refused_by_name(
    options: Any, expected_message: str
) -> None:
    with pytest.raises(ConfigurationError, match=expected_message):
        Extraction(**{"saver": InMemorySaver(), **options})


# -- edits, forks, trimmed messages


def test_message_trimmed_before_the_extraction_is_extracted(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """The history of perdure's checkpointer has the messages that left the state."""
    send_messages(
        build_graph(file_saver, answers=False), "t", "one", RemoveMessage(id="one"), "two"
    )
    make_extraction(file_saver, store).extract("t", user_config())

    assert {"user: one", "user: two"} == set(read_memory_texts(store))


def test_trimmed_state_of_a_langgraph_saver_is_extracted_once() -> None:
    """Without a history, the state is extracted, and positions keep growing."""
    saver, store = InMemorySaver(), InMemoryStore()
    graph, extraction = build_graph(saver, answers=False), make_extraction(saver, store)
    for name in NAMES:
        send_messages(graph, "t", name)
        extraction.extract("t", user_config())
        send_messages(graph, "t", RemoveMessage(id=name))
    memories = read_memories(store)

    assert sorted(EXTRACTED) == sorted(read_memory_texts(store))
    assert list(range(12)) == sorted(m.value["provenance"]["position"] for m in memories)


def test_edited_message_updates_its_memory_and_keeps_the_past(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    graph, extraction = build_graph(file_saver, answers=False), make_extraction(file_saver, store)
    send_messages(graph, "t", HumanMessage("I live in Ghent.", id="a"), "two")
    extraction.extract("t", user_config())
    send_messages(graph, "t", HumanMessage("I live in Bruges.", id="a"))
    report = extraction.extract("t", user_config())

    assert report.messages == 1
    assert {"user: I live in Bruges.", "user: two"} == set(read_memory_texts(store))
    assert [
        former["text"] for item in read_memories(store) for former in item.value.get("formerly", ())
    ] == ["user: I live in Ghent."]


def test_memories_of_text_that_an_edit_removed_are_deleted(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    graph = build_graph(file_saver, answers=False)
    extraction = make_extraction(file_saver, store, extractor=TurnExtractor(max_words=3))
    long = HumanMessage("I like tea. I have cats. I live here.", id="a")
    for message in (long, HumanMessage("I like tea.", id="a"), long, HumanMessage("", id="a")):
        send_messages(graph, "t", message)
        extraction.extract("t", user_config())
        if message is long:
            assert len(read_memory_texts(store)) == 3

    assert read_memory_texts(store) == []


def test_fork_is_extracted_from_its_start(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    graph, extraction = build_graph(file_saver, answers=False), make_extraction(file_saver, store)
    send_messages(graph, "t", "one")
    old = graph.get_state(thread_config("t")).config
    send_messages(graph, "t", "two")
    extraction.extract("t", user_config())
    graph.invoke({"messages": [HumanMessage("three", id="three")]}, old)
    report = extraction.extract("t", user_config())

    assert report.messages == 1
    assert {"user: one", "user: two", "user: three"} == set(read_memory_texts(store))


def test_thread_forked_before_its_watermark_is_read_again_without_duplicates(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    graph, extraction = build_graph(file_saver, answers=False), make_extraction(file_saver, store)
    send_messages(graph, "t", "one")
    old = graph.get_state(thread_config("t")).config
    send_messages(graph, "t", *(HumanMessage(f"m{i}", id=f"m{i}") for i in range(60)))
    extraction.extract("t", user_config())
    graph.invoke({"messages": [HumanMessage("three", id="three")]}, old)
    report = extraction.extract("t", user_config())

    assert (report.messages, report.added, report.unchanged) == (2, 1, 1)
    assert len(read_memory_texts(store)) == 62


def test_deleted_and_forgotten_memories_are_not_extracted_again(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    graph, extraction = build_graph(file_saver, answers=False), make_extraction(file_saver, store)
    send_messages(graph, "t", "I like tea.", "I have a cat.")
    extraction.extract("t", user_config())
    memories = Collection(store)
    first, second = read_memories(store)
    memories.delete(first.key, config=user_config())
    memories.forget(second.key, config=user_config())
    store.delete(
        ("perdure", "formed", *ANN), "t"
    )  # without the watermark, all messages are read again
    report = extraction.extract("t", user_config())

    assert (report.messages, report.added) == (2, 0)
    assert read_memory_texts(store) == []


def test_async_extraction_does_not_compute_in_the_event_loop_thread(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    send_messages(build_graph(file_saver, answers=False), "t", "I like tea.")
    extractor = RecordingExtractor()
    threads: list[threading.Thread] = []
    extractor.call_before_answer = lambda: threads.append(threading.current_thread())

    def record_thread(text: str) -> list[Any]:
        threads.append(threading.current_thread())
        return []

    extraction = make_extraction(
        file_saver, store, extractor=extractor, gate=Gate(detectors=[record_thread])
    )
    asyncio.run(extraction.aextract("t", user_config()))

    assert threading.main_thread() not in threads
    assert len(threads) >= 2
    extractor.call_before_answer = lambda: [][0]
    send_messages(build_graph(file_saver, answers=False), "t", "I like Ghent.")
    with pytest.raises(IndexError):
        asyncio.run(extraction.aextract("t", user_config()))


# -- item limits


def test_extraction_into_a_full_namespace_writes_nothing_until_there_is_room(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """The error names the limit."""
    scope: Any = store.scoped(("tenant",), max_items=5)
    for number in range(3):
        scope.put(ANN, f"k{number}", {"kind": "fact", "about": "room"})
    send_messages(build_graph(file_saver, answers=False), "t", "I like tea.", "I like Ghent.")
    extraction = make_extraction(file_saver, scope)
    for _ in range(2):
        with pytest.raises(LimitExceeded, match="at most 5 items are allowed"):
            extraction.extract("t", user_config())
        assert read_memory_texts(scope) == []
    assert not is_up_to_date(extraction, "t")
    scope.delete(ANN, "k0")
    report = extraction.extract("t", user_config())

    assert (report.messages, report.added, dict(report.refused)) == (2, 2, {})
    assert is_up_to_date(extraction, "t")


# -- extracting from scratch


@pytest.mark.parametrize("kind", ["perdure", "langgraph"])
def test_extraction_from_scratch_makes_no_duplicates_and_restores_nothing(
    kind: str, file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """All messages are read again. Deleted memories stay deleted."""
    saver: Any = file_saver if kind == "perdure" else InMemorySaver()
    target_store: Any = store if kind == "perdure" else InMemoryStore()
    graph, extraction = (
        build_graph(saver, answers=False),
        make_extraction(saver, target_store, batch=5),
    )
    send_messages(graph, "t", *NAMES)
    extraction.extract("t", user_config())
    positions_before = read_positions(store)
    Collection(target_store).delete(build_turn_key("t", "message 3", 0), config=user_config())
    second_report = extraction.extract("t", user_config(), anew=True)
    send_messages(graph, "t", "one more")
    last_report = extraction.extract("t", user_config())

    assert (second_report.messages, second_report.added, second_report.unchanged) == (12, 0, 11)
    assert (last_report.messages, last_report.added) == (1, 1)
    assert len(read_memory_texts(target_store)) == 12
    if kind == "perdure":
        del positions_before["user: message 3"]
        positions_after = read_positions(store)
        assert positions_before == {text: positions_after[text] for text in positions_before}
        assert max(positions_after, key=lambda text: positions_after[text] or 0) == "user: one more"


def read_positions(store: SQLiteStore) -> dict[str, int | None]:
    """Return the position of each turn in its thread."""
    return {item.value["text"]: item.provenance.position for item in read_memories(store)}


@pytest.mark.parametrize("failing_batch", [1, 2, 3])
def test_extraction_from_scratch_resumes_after_a_failure(
    failing_batch: int, file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """Batches before the error are not read again. The thread is due meanwhile."""
    send_messages(build_graph(file_saver, answers=False), "t", *NAMES)
    make_extraction(file_saver, store).extract("t", user_config())
    extractor = RecordingExtractor()
    extraction = make_extraction(file_saver, store, extractor=extractor, batch=4)

    def fail() -> None:
        if len(extractor.batches) < failing_batch:
            extractor.call_before_answer = fail
            return
        raise RuntimeError("the model is tired")

    extractor.call_before_answer = fail
    with pytest.raises(RuntimeError, match="tired"):
        extraction.extract("t", user_config(), anew=True)
    assert not is_up_to_date(extraction, "t")
    extraction.extract("t", user_config())
    read_ids = [message.id for batch in extractor.batches for message in batch.messages]

    assert sorted(NAMES) == sorted(set(read_ids))
    assert len(read_ids) == 16, "one batch was read twice"
    assert sorted(EXTRACTED) == sorted(read_memory_texts(store))
    assert is_up_to_date(extraction, "t")


def test_removed_message_of_a_saver_without_history_is_not_extracted(store: SQLiteStore) -> None:
    saver = InMemorySaver()
    graph = build_graph(saver, answers=False)
    send_messages(graph, "t", "I like tea.", "My salary is 90000")
    graph.invoke({"messages": [RemoveMessage("My salary is 90000")]}, thread_config("t"))
    make_extraction(saver, store).extract("t", user_config())

    assert read_memory_texts(store) == ["user: I like tea."]


# -- faults


@settings(max_examples=rounds(10))
@given(failing_writes=st.frozensets(st.integers(1, 9), max_size=5), touched=st.booleans())
def test_failed_writes_lose_and_duplicate_no_memory(
    failing_writes: frozenset[int], touched: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Repeated extractions end in the same state as without failures."""
    path = tmp_path_factory.mktemp("fault") / "a.db"
    with SQLiteCheckpointer.open(path) as saver, FailingStore.open(path) as store:
        send_messages(build_graph(saver, answers=False), "t", *NAMES)
        extraction = make_extraction(saver, store, batch=4)
        store.failing_writes, store.writes = failing_writes, 0
        for _ in range(len(failing_writes) + 1):
            try:
                extraction.extract("t", user_config())
            except OSError:
                continue
            break
        extraction.extract("t", user_config())

        assert sorted(EXTRACTED) == sorted(read_memory_texts(store))
        assert [item.version for item in read_memories(store)] == [1] * 12
        assert is_up_to_date(extraction, "t")


@pytest.mark.parametrize("call_form", ["blocking", "awaiting"])
def test_concurrent_extractions_of_one_thread_store_each_memory_once(
    call_form: str, file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    send_messages(build_graph(file_saver, answers=False), "t", *NAMES)
    extractions = [make_extraction(file_saver, store, batch=2) for _ in range(4)]
    reports: list[ExtractionReport] = []
    if call_form == "awaiting":

        async def extract_concurrently() -> None:
            reports.extend(
                await asyncio.gather(*(f.aextract("t", user_config()) for f in extractions))
            )

        asyncio.run(extract_concurrently())
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


def test_extraction_overtaken_by_another_discards_its_result_and_continues(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    graph = build_graph(file_saver, answers=False)
    send_messages(graph, "t", "one", "two")
    slow = RecordingExtractor()
    quick = make_extraction(file_saver, store)

    def extract_meanwhile() -> None:
        quick.extract("t", user_config())
        send_messages(graph, "t", "three")

    slow.call_before_answer = extract_meanwhile
    report = make_extraction(file_saver, store, extractor=slow).extract("t", user_config())

    assert [[m.id for m in b.messages] for b in slow.batches] == [["one", "two"], ["three"]]
    assert (report.messages, report.added) == (1, 1)
    assert [item.version for item in read_memories(store)] == [1] * 3


@pytest.mark.parametrize("kind", ["perdure", "langgraph"])
def test_extraction_works_with_langgraph_saver_and_store(kind: str, store: SQLiteStore) -> None:
    saver, target_store = InMemorySaver(), InMemoryStore() if kind == "langgraph" else store
    send_messages(build_graph(saver), "t", "I like tea.")
    extraction = make_extraction(saver, target_store)
    extraction.extract("t", user_config())
    extraction.extract("t", user_config())

    assert sorted(read_memory_texts(target_store)) == [
        "assistant: You said I like tea.",
        "user: I like tea.",
    ]
    assert is_up_to_date(extraction, "t")


# -- watermarks


def test_extraction_without_new_messages_advances_the_watermark(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    graph, extraction = build_graph(file_saver), make_extraction(file_saver, store)
    send_messages(graph, "t", "I like tea.")
    extraction.extract("t", user_config())
    graph.update_state(thread_config("t"), {"messages": []})
    assert not is_up_to_date(extraction, "t")
    extraction.extract("t", user_config())

    assert is_up_to_date(extraction, "t")


@pytest.mark.parametrize("kind", ["perdure", "langgraph"])
def test_message_sent_during_an_extraction_keeps_the_thread_due(
    kind: str, file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    graph, extractor = build_graph(file_saver, answers=False), RecordingExtractor()
    send_messages(graph, "t", "one")
    target_store = InMemoryStore() if kind == "langgraph" else store
    extraction = make_extraction(file_saver, target_store, extractor=extractor)
    extractor.call_before_answer = lambda: send_messages(graph, "t", "two")
    extraction.extract("t", user_config())

    assert read_memory_texts(target_store) == ["user: one"]
    assert not is_up_to_date(extraction, "t")


# -- reports


def test_report_is_one_line_without_secrets(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """The report counts refused messages. Neither it nor the watermark contains their text."""
    secret = "sk-proj-" + "a1B2c3D4" * 6
    message = HumanMessage(f"My key is {secret}", id="b")
    send_messages(build_graph(file_saver, answers=False), "t", "I like tea.", message)
    report = make_extraction(file_saver, store).extract("t", user_config())
    note: Any = store.get(("perdure", "formed", *ANN), "t")

    assert report.messages == 2
    assert sum(report.refused.values()) + report.quarantined == 1
    assert secret not in f"{note.value} {report}"
    assert "\n" not in str(report)
    assert str(report).startswith("t: 2 messages read, ")


def test_message_with_a_lone_surrogate_is_extracted(store: SQLiteStore) -> None:
    saver = InMemorySaver()
    send_messages(
        build_graph(saver, answers=False), "t", AIMessage("half \ud83d a smile", id="a"), "two"
    )
    make_extraction(saver, store).extract("t", user_config())

    assert {"assistant: half ? a smile", "user: two"} == set(read_memory_texts(store))


class ForgettingExtractor(TurnExtractor):
    """An extractor whose thread is forgotten while it reads the first messages."""

    def __init__(self, saver: SQLiteCheckpointer, store: SQLiteStore) -> None:
        super().__init__()
        self.saver, self.store = saver, store

    async def propose_changes(self, batch: Batch, scope: Scope) -> Proposal:
        self.store.forget(threads=[batch.thread_id], checkpointer=self.saver)
        Collection(self.store).forget_all(config=user_config())
        return await super().propose_changes(batch, scope)


def test_thread_forgotten_during_its_extraction_leaves_no_memories(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """Even a thread that is extracted for the first time leaves none."""
    send_messages(build_graph(file_saver), "t", "I like tea.")
    extraction = Extraction(file_saver, store, ForgettingExtractor(file_saver, store))

    with pytest.raises(UnknownThread):
        extraction.extract("t", user_config())
    assert Collection(store).list(config=user_config()) == []
