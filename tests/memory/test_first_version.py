"""Memories of the first version are read as they are, and its tombstones and watermarks hold.

`tests/data/v1/make_memories.py` made the file, with that version's code.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from perdure.checkpointers import SQLiteCheckpointer
from perdure.graphs import chat_graph
from perdure.memory import (
    Collection,
    Extraction,
    Instructions,
    Profile,
    forget,
    recall,
    remember_turns,
)
from perdure.memory.due import DueThreads, Pace
from perdure.memory.examples import ExampleSelector
from perdure.memory.proposals import Addition, Batch, Proposal, Scope
from perdure.memory.quarantine import Quarantine
from perdure.stores import SQLiteStore
from tests.data.v1.models import Home, Person
from tests.layout import ROOT
from tests.memory.test_profile import written
from tests.memory.threads import texts

FILE = ROOT / "tests" / "data" / "v1" / "memories.db"
ANN: Any = {"configurable": {"user_id": "ann"}}


class File(NamedTuple):
    path: Path
    saver: SQLiteCheckpointer
    store: SQLiteStore


@pytest.fixture
def file(tmp_path: Path) -> Iterator[File]:
    path = tmp_path / "memories.db"
    shutil.copy(FILE, path)
    with SQLiteCheckpointer.open(path) as saver, SQLiteStore.open(path) as store:
        yield File(path, saver, store)


def on(thread_id: str) -> Any:
    return {"configurable": {"thread_id": thread_id, "user_id": "ann"}}


def test_facts_are_read_with_their_past(file: File) -> None:
    """Text, earlier text, versions, and where a turn comes from."""
    facts = Collection(file.store)
    home, [turn] = facts.get("home", config=ANN), facts.list(kind="turn", config=ANN)
    history = [each.text for each in facts.history("home", config=ANN)]

    assert home is not None
    assert (home.text, [each.text for each in home.previous]) == (
        "Ann lives in Bruges",
        ["Ann lives in Ghent"],
    )
    assert history == ["Ann lives in Ghent", "Ann lives in Bruges"]
    assert turn.text == "user: My canoe is called Nutshell"
    assert turn.provenance is not None
    assert (turn.provenance.thread_id, turn.provenance.message_ids) == ("monday", ("monday-0",))


def test_memories_are_recalled(file: File) -> None:
    """With what held before; neither the deleted fact nor the deleted turn."""
    found = recall("Where does Ann live?", store=file.store, config=ANN)
    home = next(each for each in found.memories if each.key == "home")

    assert '"before": [{"memory": "Ann lives in Ghent"' in str(found)
    assert home.previous[0].message_ids == ()  # the first version did not note them
    assert {each.text for each in found.memories} == {
        "Ann lives in Bruges",
        "user: My canoe is called Nutshell",
    }


@pytest.mark.parametrize("key", ["profile", "large"])
def test_profiles_are_read_and_changed(file: File, key: str) -> None:
    """One item, or one for each field; with their versions."""
    profile = Profile(Person, file.store, key=key)
    assert profile.get(ANN) == Person(name="Ann", home=Home(city="Ghent"), likes=["figs"])
    written(profile, {"home": {"city": "Bruges"}}, ANN)

    assert profile.get(ANN) == Person(name="Ann", home=Home(city="Bruges"), likes=["figs"])
    assert [(each.change, each.document["likes"]) for each in profile.history(ANN)] == [
        ("merge", []),
        ("patch", ["figs"]),
        ("patch", ["figs"]),
    ]


def test_examples_and_instructions_are_read(file: File) -> None:
    [example] = ExampleSelector(file.store).select("My train does not run", config=ANN)
    instructions = Instructions(file.store, ("instructions", "{user_id}"))

    assert [example.value[part] for part in ("input", "outcome", "why")] == [
        "The train was cancelled",
        "Offered the bus",
        "in a hurry",
    ]
    assert instructions.current(ANN).text == "Answer in two sentences."
    assert instructions.rollback(1, ANN).text == "Answer in one sentence."


def test_quarantine_is_released(file: File) -> None:
    quarantine = Quarantine(file.store)
    [entry] = quarantine.list(ANN)
    assert (entry.shown, entry.text) == (
        "Ann pays with [card]",
        "Ann pays with 4111 1111 1111 1111",
    )

    assert quarantine.release(entry.key, ANN).change == "added"
    assert quarantine.list(ANN) == []
    assert "Ann pays with 4111 1111 1111 1111" in texts(file.store)


def test_nothing_is_extracted_twice(file: File) -> None:
    """The watermark says up to where the thread was read; the next message is read alone."""
    extraction = Extraction(file.saver, file.store)
    again = extraction.extract("monday", on("monday"))
    graph = chat_graph(memory=[remember_turns()], checkpointer=file.saver, store=file.store)
    graph.update_state(on("monday"), {"messages": [HumanMessage("Rex barks", id="monday-2")]})
    later = extraction.extract("monday", on("monday"))

    assert (again.messages, later.messages) == (0, 1)
    assert [text for text in texts(file.store) if text.startswith("user: ")] == [
        "user: My canoe is called Nutshell",
        "user: Rex barks",
    ]


def test_a_run_remembers_what_is_new_alone(file: File) -> None:
    """`remember_turns` goes on from the watermark too."""
    graph = chat_graph(memory=[remember_turns()], checkpointer=file.saver, store=file.store)
    graph.invoke({"messages": [("human", "Rex barks at night")]}, on("monday"))
    users = [text for text in texts(file.store) if text.startswith("user: ")]

    assert sorted(users) == ["user: My canoe is called Nutshell", "user: Rex barks at night"]


class Facts:
    """An extractor that proposes a fact, and notes what it was given."""

    name = "facts"

    def __init__(self, text: str) -> None:
        self.text, self.read = text, 0

    def taking(self, messages: Any) -> int:
        return len(messages)

    def proposing(self, batch: Batch, scope: Scope) -> Any:
        yield from ()
        self.read += len(batch.messages)
        candidate = batch.candidate(batch.messages[:1], self.text, "fact")
        return Proposal([Addition("new", candidate)])

    def key(self, thread_id: str, message: Any) -> str | None:
        return None


def test_watermarks_hold_for_other_extractors(file: File) -> None:
    """Nobody knows which extractor of the first version read a thread, so it counts for all."""
    extractor: Any = Facts("Ann has a boat")
    Extraction(file.saver, file.store, extractor).extract("monday", on("monday"))

    assert extractor.read == 0


@pytest.mark.parametrize("text", ["Ann sings in a choir", "ANN SINGS in a choir."])
def test_tombstones_of_facts_go_on_blocking(file: File, text: str) -> None:
    """Extraction does not bring a deleted fact back; somebody who asks for it gets it."""
    extractor: Any = Facts(text)
    report = Extraction(file.saver, file.store, extractor).extract("tuesday", on("tuesday"))

    assert extractor.read == 2
    assert str(report) == "tuesday: 2 messages read, 1 refused (1 tombstone)"
    assert Collection(file.store).insert(text, config=ANN).change == "added"


def test_tombstones_of_turns_go_on_blocking(file: File) -> None:
    """The message of a deleted turn is not remembered again, nor are its words elsewhere."""
    extraction = Extraction(file.saver, file.store)
    extraction.extract("monday", on("monday"), anew=True)
    graph = chat_graph(memory=[remember_turns()], checkpointer=file.saver, store=file.store)
    graph.invoke({"messages": [("human", "I am afraid of dogs")]}, on("friday"))

    assert not any("dogs" in text for text in texts(file.store) if text.startswith("user"))


def test_a_thread_that_waited_is_due(file: File) -> None:
    """The first version noted threads that wait; now their checkpoints tell. The notes go."""
    jobs = DueThreads(Extraction(file.saver, file.store), Pace(delay_s=0)).jobs()
    assert [(job.thread_id, job.namespace) for job in jobs] == [("tuesday", ("memories", "ann"))]
    assert Extraction(file.saver, file.store).extract("tuesday", on("tuesday")).messages == 2
    forget(everything=True, store=file.store, config=ANN)

    left = {item.namespace for item in file.store.search((), limit=1_000)}
    assert [namespace for namespace in left if namespace[-2:] == ("memories", "ann")] == []


def test_the_thread_goes_on(file: File) -> None:
    """Its messages are there, and a new answer follows them."""
    graph = chat_graph(checkpointer=file.saver)
    state = graph.invoke({"messages": [("human", "And now?")]}, on("tuesday"))

    assert [type(each) for each in state["messages"]] == [HumanMessage, AIMessage] * 2
