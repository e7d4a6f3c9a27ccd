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
from perdure.errors import (
    ConfigurationError,
    InvalidConfig,
    InvalidNamespace,
    LimitExceeded,
    UnknownThread,
)
from perdure.memory.collection.collection import Collection
from perdure.memory.effects import Effects, run
from perdure.memory.extraction import Extraction
from perdure.memory.extraction_report import ExtractionReport
from perdure.memory.forming.tails import Tails
from perdure.memory.gate import Gate
from perdure.memory.proposals import Batch, Proposal, Scope
from perdure.memory.turns import TurnExtractor, turn_key
from perdure.stores import SQLiteStore
from tests.memory.threads import ANN, FailingStore, graph_of, kept, on, say, texts, user

NAMES = [f"message {number}" for number in range(12)]
FORMED = [f"user: {name}" for name in NAMES]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    """A store on the file that the checkpointer is on."""
    with SQLiteStore.open(tmp_path / "plain.db") as opened:
        yield opened


def formation_of(saver: Any, store: Any, **options: Any) -> Extraction:
    return Extraction(saver, store, **options)


# -- forming


def test_what_was_said_is_formed_once(file_saver: SQLiteCheckpointer, store: SQLiteStore) -> None:
    """Forming again forms what is new, and nothing twice."""
    graph, extraction = graph_of(file_saver), formation_of(file_saver, store)
    say(graph, "t", "I like tea.")
    first = extraction.extract("t", user())
    again = extraction.extract("t", user())
    say(graph, "t", "And Bruges.")
    second = extraction.extract("t", user())

    assert (first.messages, first.added) == (2, 2)
    assert (again.messages, again.added) == (0, 0)
    assert (second.messages, second.added) == (2, 2)
    assert {
        "user: I like tea.",
        "assistant: You said I like tea.",
        "user: And Bruges.",
        "assistant: You said And Bruges.",
    } == set(texts(store))
    assert [item.version for item in kept(store)] == [1] * 4


def test_memories_say_where_they_come_from(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """A memory names its thread, the checkpoint it was read at, its message, place and speaker."""
    say(graph_of(file_saver, answers=False), "t", HumanMessage("I like tea.", id="a", name="Ann"))
    formation_of(file_saver, store).extract("t", user())
    [memory] = kept(store)
    head = file_saver.get_tuple(on("t"))
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
            graph, extraction = graph_of(saver), formation_of(saver, store)
            await graph.ainvoke({"messages": [HumanMessage("I like tea.", id="a")]}, on("t"))
            await extraction.anote("t", user())
            assert [each.thread_id for each in await extraction.apending()] == ["t"]
            report = await extraction.aextract("t", user())
            assert await extraction.apending() == []
            assert report.added == len(texts(store))
            return report

    assert asyncio.run(formed()).added == 2


def test_a_thread_is_formed_in_batches(file_saver: SQLiteCheckpointer, store: SQLiteStore) -> None:
    """A long thread is formed in several transactions, each with the messages before it at hand."""
    say(graph_of(file_saver, answers=False), "t", *NAMES)
    former = Noting()
    report = formation_of(file_saver, store, former=former, batch=5).extract("t", user())

    assert (report.messages, report.added, report.batches) == (12, 12, 3)
    assert [(len(each.before), len(each.messages)) for each in former.batches] == [
        (0, 5),
        (4, 5),
        (4, 2),
    ]
    assert sorted(FORMED) == sorted(texts(store))


class Noting(TurnExtractor):
    """Notes the batches it was given, and may do something before it answers."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Batch] = []
        self.meanwhile: Any = None

    def proposing(self, batch: Batch, around: Scope) -> Effects[Proposal]:
        self.batches.append(batch)
        if self.meanwhile is not None:
            call, self.meanwhile = self.meanwhile, None
            call()
        return (yield from super().proposing(batch, around))


def test_each_user_has_their_own(file_saver: SQLiteCheckpointer, store: SQLiteStore) -> None:
    """The same thread formed for two users makes memories for each, and none in the other's."""
    say(graph_of(file_saver, answers=False), "t", "I like tea.")
    extraction = formation_of(file_saver, store)
    extraction.extract("t", user("ann"))
    extraction.extract("t", user("bo"))

    assert texts(store, ("memories", "ann")) == texts(store, ("memories", "bo"))
    assert texts(store, ("memories", "eve")) == []


@pytest.mark.parametrize("config", [None, {"configurable": {}}, {"configurable": {"user_id": 7}}])
def test_nobody_s_memories_are_formed_for_nobody(
    config: Any, file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """A config that does not name the user in text is refused before anything is written."""
    say(graph_of(file_saver), "t", "I like tea.")
    extraction = formation_of(file_saver, store)

    for call in (extraction.extract, extraction.note):
        with pytest.raises(InvalidConfig, match="user_id"):
            call("t", config)
    assert store.search((), limit=10) == []


def test_a_user_called_like_perdure_s_own_place_is_refused(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """No user id reaches the place where perdure keeps its notes."""
    extraction = formation_of(file_saver, store, namespace=("{user_id}",))

    with pytest.raises(InvalidNamespace, match="perdure"):
        extraction.extract("t", user("perdure"))


def test_a_thread_that_is_not_there_is_named(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """Forming a thread that nobody began says so."""
    with pytest.raises(UnknownThread, match="'nobody'"):
        formation_of(file_saver, store).extract("nobody", user())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"former": "turns"}, "TurnExtractor"),
        ({"gate": "open"}, "Gate"),
        ({"batch": 0}, "batch"),
        ({"removed": "keep"}, "removed"),
        ({"messages_key": ""}, "messages_key"),
        ({"store": {}}, "BaseStore"),
        ({"saver": "a.db"}, "BaseCheckpointSaver"),
    ],
)
def test_arguments_that_are_wrong_are_named(options: Any, told: str) -> None:
    """A extraction with an argument of another kind is not made."""
    with pytest.raises(ConfigurationError, match=told):
        Extraction(**{"saver": InMemorySaver(), **options})


# -- edits, forks, what was trimmed


def test_what_was_trimmed_before_it_was_formed_is_formed(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """perdure's checkpointer has what left the state, so it is remembered all the same."""
    say(graph_of(file_saver, answers=False), "t", "one", RemoveMessage(id="one"), "two")
    formation_of(file_saver, store).extract("t", user())

    assert {"user: one", "user: two"} == set(texts(store))


def test_a_state_that_is_trimmed_is_formed_from_once() -> None:
    """With other parts, what is left of the state is formed from, and positions go on growing."""
    saver, store = InMemorySaver(), InMemoryStore()
    graph, extraction = graph_of(saver, answers=False), formation_of(saver, store)
    for name in NAMES:
        say(graph, "t", name)
        extraction.extract("t", user())
        say(graph, "t", RemoveMessage(id=name))
    memories = kept(store)

    assert sorted(FORMED) == sorted(texts(store))
    assert list(range(12)) == sorted(m.value["provenance"]["position"] for m in memories)


def test_an_edited_message_changes_its_memory(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """A message that was edited after it was formed from is one memory, with its past."""
    graph, extraction = graph_of(file_saver, answers=False), formation_of(file_saver, store)
    say(graph, "t", HumanMessage("I live in Ghent.", id="a"), "two")
    extraction.extract("t", user())
    say(graph, "t", HumanMessage("I live in Bruges.", id="a"))
    report = extraction.extract("t", user())

    assert report.messages == 1
    assert {"user: I live in Bruges.", "user: two"} == set(texts(store))
    assert [
        former["text"] for item in kept(store) for former in item.value.get("formerly", ())
    ] == ["user: I live in Ghent."]


def test_what_an_edit_leaves_over_goes(file_saver: SQLiteCheckpointer, store: SQLiteStore) -> None:
    """A message that was made shorter, or empty, has no memories of what it says no more."""
    graph = graph_of(file_saver, answers=False)
    extraction = formation_of(file_saver, store, former=TurnExtractor(max_chars=12))
    long = HumanMessage("I like tea. I have cats. I live here.", id="a")
    for message in (long, HumanMessage("I like tea.", id="a"), long, HumanMessage("", id="a")):
        say(graph, "t", message)
        extraction.extract("t", user())
        if message is long:
            assert len(texts(store)) == 3

    assert texts(store) == []


def test_a_fork_is_formed_from_where_it_began(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """After going back to an old checkpoint, only what was said from there on is formed."""
    graph, extraction = graph_of(file_saver, answers=False), formation_of(file_saver, store)
    say(graph, "t", "one")
    old = graph.get_state(on("t")).config
    say(graph, "t", "two")
    extraction.extract("t", user())
    graph.invoke({"messages": [HumanMessage("three", id="three")]}, old)
    report = extraction.extract("t", user())

    assert report.messages == 1
    assert {"user: one", "user: two", "user: three"} == set(texts(store))


def test_a_thread_that_was_forked_far_back_is_told_by_its_memories(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """Where the watermark names no message that is left, those that have memories are not new."""
    graph, extraction = graph_of(file_saver, answers=False), formation_of(file_saver, store)
    say(graph, "t", "one")
    old = graph.get_state(on("t")).config
    say(graph, "t", *(HumanMessage(f"m{i}", id=f"m{i}") for i in range(60)))
    extraction.extract("t", user())
    graph.invoke({"messages": [HumanMessage("three", id="three")]}, old)
    report = extraction.extract("t", user())

    assert (report.messages, report.added) == (1, 1)
    assert len(texts(store)) == 62


def test_what_was_forgotten_does_not_come_back(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """A memory that was deleted or forgotten is not formed from its message again."""
    graph, extraction = graph_of(file_saver, answers=False), formation_of(file_saver, store)
    say(graph, "t", "I like tea.", "I have a cat.")
    extraction.extract("t", user())
    memories = Collection(store)
    first, second = kept(store)
    memories.delete(first.key, config=user())
    memories.forget(second.key, config=user())
    store.delete(("perdure", "formed", *ANN), "t")  # so that all is read again
    report = extraction.extract("t", user())

    assert (report.messages, report.added) == (2, 0)
    assert texts(store) == []


def test_the_async_form_computes_beside_the_loop(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """What is formed, and what is judged, is not computed by the event loop's own thread."""
    say(graph_of(file_saver, answers=False), "t", "I like tea.")
    former = Noting()
    threads: list[threading.Thread] = []
    former.meanwhile = lambda: threads.append(threading.current_thread())

    def seen(text: str) -> list[Any]:
        threads.append(threading.current_thread())
        return []

    extraction = formation_of(file_saver, store, former=former, gate=Gate(detectors=[seen]))
    asyncio.run(extraction.aextract("t", user()))

    assert threading.main_thread() not in threads
    assert len(threads) >= 2
    former.meanwhile = lambda: [][0]
    say(graph_of(file_saver, answers=False), "t", "I like Ghent.")
    with pytest.raises(IndexError):
        asyncio.run(extraction.aextract("t", user()))


# -- room


def test_what_there_is_no_room_for_is_formed_once_there_is(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """A full namespace refuses no message: an error tells, and nothing is written."""
    for number in range(3):
        store.put(ANN, f"k{number}", {"kind": "fact", "about": "room"})
    say(graph_of(file_saver, answers=False), "t", "I like tea.", "I like Ghent.")
    extraction = formation_of(file_saver, store, gate=Gate(max_items=4))
    extraction.note("t", user())
    for _ in range(2):
        with pytest.raises(
            LimitExceeded, match=r"no room in \('memories', 'ann'\).*max_items is 4"
        ):
            extraction.extract("t", user())
        assert texts(store) == []
    assert [each.thread_id for each in extraction.pending()] == ["t"]
    store.delete(ANN, "k0")
    report = extraction.extract("t", user())

    assert (report.messages, report.added, dict(report.refused)) == (2, 2, {})
    assert extraction.pending() == []


# -- formed anew


@pytest.mark.parametrize("kind", ["perdure", "langgraph"])
def test_a_thread_that_is_formed_anew_makes_no_memory_twice(
    kind: str, file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """All of it is read again, and what is there stays; what was forgotten stays away."""
    saver: Any = file_saver if kind == "perdure" else InMemorySaver()
    other: Any = store if kind == "perdure" else InMemoryStore()
    graph, extraction = graph_of(saver, answers=False), formation_of(saver, other, batch=5)
    say(graph, "t", *NAMES)
    extraction.extract("t", user())
    before = said_where(store)
    Collection(other).delete(turn_key("t", "message 3", 0), config=user())
    again = extraction.extract("t", user(), anew=True)
    say(graph, "t", "one more")
    last = extraction.extract("t", user())

    assert (again.messages, again.added, again.unchanged) == (12, 0, 11)
    assert (last.messages, last.added) == (1, 1)
    assert len(texts(other)) == 12
    if kind == "perdure":
        del before["user: message 3"]
        assert before | {"user: one more": 12} == said_where(store)


def said_where(store: SQLiteStore) -> dict[str, int | None]:
    """The place of each turn in its thread."""
    return {each.value["text"]: each.provenance.position for each in kept(store)}


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_forming_anew_goes_on_where_it_was_cut_off(
    failing: int, file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """What was formed anew before an error is not once more, and the thread waits meanwhile."""
    say(graph_of(file_saver, answers=False), "t", *NAMES)
    formation_of(file_saver, store).extract("t", user())
    former = Noting()
    extraction = formation_of(file_saver, store, former=former, batch=4)

    def fail() -> None:
        if len(former.batches) < failing:
            former.meanwhile = fail
            return
        raise RuntimeError("the model is tired")

    former.meanwhile = fail
    with pytest.raises(RuntimeError, match="tired"):
        extraction.extract("t", user(), anew=True)
    assert [each.thread_id for each in extraction.pending()] == ["t"]
    extraction.extract("t", user())
    seen = [message.id for batch in former.batches for message in batch.messages]

    assert sorted(NAMES) == sorted(set(seen))
    assert len(seen) == 16, "one batch was read twice"
    assert sorted(FORMED) == sorted(texts(store))
    assert extraction.pending() == []


def test_a_note_may_ask_for_all_of_a_thread(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """Whoever forms it then reads it from its beginning; a thread that is not there is refused."""
    say(graph_of(file_saver, answers=False), "t", "one", "two")
    extraction = formation_of(file_saver, store)
    extraction.extract("t", user())
    extraction.note("t", user(), anew=True)

    assert extraction.extract("t", user()).messages == 2
    assert extraction.extract("t", user()).messages == 0
    with pytest.raises(UnknownThread):
        extraction.note("nobody", user(), anew=True)
    assert extraction.pending() == []


# -- what was removed


@pytest.mark.parametrize("removed", ["form", "skip"])
def test_what_was_removed_is_formed_or_skipped(
    removed: Any, file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """A message that was removed before it was formed becomes a memory, unless such are skipped."""
    graph, former = graph_of(file_saver, answers=False), Noting()
    extraction = formation_of(file_saver, store, former=former, removed=removed)
    say(graph, "t", "I like tea.", "My salary is 90000", "I like Ghent.")
    graph.invoke({"messages": [RemoveMessage("My salary is 90000")]}, on("t"))
    waiting = extraction.note("t", user())
    tails = [memory.text for memory in run(Tails(extraction).waiting([waiting.namespace]))]
    extraction.extract("t", user())
    graph.invoke({"messages": [RemoveMessage("I like tea."), HumanMessage("one", id="1")]}, on("t"))
    extraction.extract("t", user())
    again = extraction.extract("t", user())
    seen = [each.text for batch in former.batches for each in (*batch.before, *batch.messages)]
    expected = {"user: I like tea.", "user: I like Ghent.", "user: one"}
    expected |= {"user: My salary is 90000"} if removed == "form" else set()

    assert expected == set(texts(store))
    assert ("My salary is 90000" in seen) is (removed == "form")
    assert ("user: My salary is 90000" in tails) is (removed == "form")
    assert again.messages == 0


def test_without_a_history_what_was_removed_is_gone(store: SQLiteStore) -> None:
    """A checkpointer that keeps none has nothing to form of a message that was removed."""
    saver = InMemorySaver()
    graph = graph_of(saver, answers=False)
    say(graph, "t", "I like tea.", "My salary is 90000")
    graph.invoke({"messages": [RemoveMessage("My salary is 90000")]}, on("t"))
    formation_of(saver, store).extract("t", user())

    assert texts(store) == ["user: I like tea."]


# -- faults


@settings(max_examples=10)
@given(fails=st.frozensets(st.integers(1, 9), max_size=5), touched=st.booleans())
def test_a_fault_anywhere_loses_and_doubles_nothing(
    fails: frozenset[int], touched: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whichever writes fail, before or after the fact, forming again ends where none had failed."""
    path = tmp_path_factory.mktemp("fault") / "a.db"
    with SQLiteCheckpointer.open(path) as saver, FailingStore.open(path) as store:
        say(graph_of(saver, answers=False), "t", *NAMES)
        extraction = formation_of(saver, store, batch=4)
        extraction.note("t", user())
        store.fails, store.writes = fails, 0
        for _ in range(len(fails) + 1):
            try:
                extraction.extract("t", user())
            except OSError:
                continue
            break
        extraction.extract("t", user())

        assert sorted(FORMED) == sorted(texts(store))
        assert [item.version for item in kept(store)] == [1] * 12
        assert extraction.pending() == []


@pytest.mark.parametrize("door", ["blocking", "awaiting"])
def test_two_that_form_one_thread_form_it_once(
    door: str, file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """However many form a thread at the same time, each message becomes one memory, once."""
    say(graph_of(file_saver, answers=False), "t", *NAMES)
    formations = [formation_of(file_saver, store, batch=2) for _ in range(4)]
    reports: list[ExtractionReport] = []
    if door == "awaiting":

        async def all_at_once() -> None:
            reports.extend(await asyncio.gather(*(f.aextract("t", user()) for f in formations)))

        asyncio.run(all_at_once())
    else:
        threads = [
            threading.Thread(target=lambda f=f: reports.append(f.extract("t", user())))
            for f in formations
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert sorted(FORMED) == sorted(texts(store))
    assert [item.version for item in kept(store)] == [1] * 12
    assert sum(report.added for report in reports) == 12


def test_the_slower_one_is_refused_and_goes_on(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """If another forms the thread while this one asks its model, what it has is not written."""
    graph = graph_of(file_saver, answers=False)
    say(graph, "t", "one", "two")
    slow = Noting()
    quick = formation_of(file_saver, store)

    def meanwhile() -> None:
        quick.extract("t", user())
        say(graph, "t", "three")

    slow.meanwhile = meanwhile
    report = formation_of(file_saver, store, former=slow).extract("t", user())

    assert [[m.id for m in b.messages] for b in slow.batches] == [["one", "two"], ["three"]]
    assert (report.messages, report.added) == (1, 1)
    assert [item.version for item in kept(store)] == [1] * 3


@pytest.mark.parametrize("kind", ["perdure", "langgraph"])
def test_other_parts_are_formed_from_too(kind: str, store: SQLiteStore) -> None:
    """langgraph's own saver and store do, alone or with one of perdure's."""
    saver, other = InMemorySaver(), InMemoryStore() if kind == "langgraph" else store
    say(graph_of(saver), "t", "I like tea.")
    extraction = formation_of(saver, other)
    extraction.note("t", user())
    extraction.extract("t", user())
    extraction.extract("t", user())

    assert sorted(texts(other)) == ["assistant: You said I like tea.", "user: I like tea."]
    assert extraction.pending() == []


# -- threads that wait


def test_a_thread_waits_until_it_is_formed(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """A note keeps since when a thread waits and whose it is, until memories are formed of it."""
    say(graph_of(file_saver), "t", "I like tea.")
    extraction = formation_of(file_saver, store)
    first = extraction.note("t", user("ann", other="x"))
    again = extraction.note("t", user("ann"))
    extraction.note("u", user("bo"))
    waiting = extraction.pending()

    assert [(w.thread_id, w.namespace) for w in waiting] == [("t", ANN), ("u", ("memories", "bo"))]
    assert waiting[0].configurable == {"user_id": "ann"}
    assert (first.since, again.at) == (waiting[0].since, waiting[0].at)
    assert [w.thread_id for w in extraction.pending(ANN)] == ["t"]

    extraction.extract("t", {"configurable": dict(waiting[0].configurable)})

    assert [w.thread_id for w in extraction.pending()] == ["u"]


def test_a_thread_with_nothing_new_waits_no_longer(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """Forming takes the note away, though there is nothing to form."""
    say(graph_of(file_saver), "t", "I like tea.")
    extraction = formation_of(file_saver, store)
    extraction.extract("t", user())
    extraction.note("t", user())
    extraction.extract("t", user())

    assert extraction.pending() == []


@pytest.mark.parametrize("kind", ["perdure", "langgraph"])
def test_a_thread_that_is_touched_while_it_is_formed_waits_on(
    kind: str, file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """What is said while memories are formed is not taken for formed."""
    say(graph_of(file_saver, answers=False), "t", "one")
    former, other = Noting(), InMemoryStore() if kind == "langgraph" else store
    extraction = formation_of(file_saver, other, former=former)
    extraction.note("t", user())
    former.meanwhile = lambda: extraction.note("t", user())
    extraction.extract("t", user())

    assert texts(other) == ["user: one"]
    assert [each.thread_id for each in extraction.pending()] == ["t"]


@pytest.mark.parametrize("kind", ["perdure", "langgraph"])
def test_the_note_on_a_thread_that_is_gone_can_be_dropped(
    kind: str, file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """It goes if there is no such thread; if there is, it waits on."""
    say(graph_of(file_saver, answers=False), "t", "one")
    extraction = formation_of(file_saver, InMemoryStore() if kind == "langgraph" else store)
    for thread_id in "tu":
        extraction.note(thread_id, user())

    assert [extraction.drop(thread_id, user()) for thread_id in "tuv"] == [False, True, True]
    assert [each.thread_id for each in extraction.pending()] == ["t"]


# -- reports


def test_a_report_is_one_line_and_is_kept(
    file_saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """The last report stays with the watermark, with what was refused, and without what it said."""
    secret = "sk-proj-" + "a1B2c3D4" * 6
    said = HumanMessage(f"My key is {secret}", id="b")
    say(graph_of(file_saver, answers=False), "t", "I like tea.", said)
    report = formation_of(file_saver, store).extract("t", user())
    note: Any = store.get(("perdure", "formed", *ANN), "t")

    assert note.value["report"]["messages"] == 2
    assert report.refused == note.value["report"]["refused"]
    assert sum(report.refused.values()) == len(note.value["refusals"])
    assert secret not in str(note.value)
    assert "\n" not in str(report)
    assert str(report).startswith("t: 2 messages read, ")


def test_messages_that_no_store_can_hold_are_formed_all_the_same(store: SQLiteStore) -> None:
    """Half a character in a message does not keep its thread from being formed."""
    saver = InMemorySaver()
    say(graph_of(saver, answers=False), "t", AIMessage("half \ud83d a smile", id="a"), "two")
    formation_of(saver, store).extract("t", user())

    assert {"assistant: half ? a smile", "user: two"} == set(texts(store))


def test_notes_have_no_past_once_they_are_tidied(tmp_path: Path) -> None:
    """What perdure's own notes said before is dropped; memories keep theirs."""
    with SQLiteStore.open(tmp_path / "a.db") as store, SQLiteCheckpointer.open(":memory:") as saver:
        extraction = Extraction(saver, store, namespace=("memories",))
        store.put(("memories",), "1", {"text": "Ann lives in Ghent"})
        store.put(("memories",), "1", {"text": "Ann lives in Bruges"})
        for _ in range(3):
            extraction.note("t")

        assert extraction.tidy() == 2
        assert len(store.history(("perdure", "waiting", "memories"), "t")) == 1
        assert len(store.history(("memories",), "1")) == 2
        assert [waiting.thread_id for waiting in extraction.pending()] == ["t"]
    assert Extraction(InMemorySaver(), InMemoryStore()).tidy() == 0
