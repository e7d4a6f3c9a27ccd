"""A text that was forgotten is remembered again if a later run says it, and only then."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

from perdure.checkpointers import SQLiteCheckpointer
from perdure.memory import ChatState, Collection, Extraction, recall
from perdure.memory.extraction import remember_turns
from perdure.memory.extractors import Addition, Batch, Proposal, Scope
from perdure.memory.records import FACT, TOMBSTONES, build_notes_namespace
from perdure.stores import SQLiteStore
from tests.backends import Place
from tests.durability.processes import forkserver_context
from tests.memory.threads import ANN, Graph, read_memory_texts

BEES = "I keep bees"
TURN = f"user: {BEES}"
WAYS = ("node", "job")
FUTURE = datetime.now(UTC) + timedelta(days=3650)


class Talk:
    """A thread's graph over one database, which remembers in a node or by a later job."""

    def __init__(self, saver: SQLiteCheckpointer, store: SQLiteStore, way: str) -> None:
        self.saver, self.store, self.way = saver, store, way
        self.before: Any = lambda: None  # called by each run before it remembers

    def graph(self) -> Graph:
        """A graph that answers, and asks if it is told to."""

        def respond(state: ChatState) -> dict[str, Any]:
            newest = state["messages"][-1]
            if newest.text == "ask me":
                answer = interrupt("well?")
                return {"messages": [HumanMessage(answer)]}
            return {"messages": [AIMessage("Noted", id=f"{newest.id}-answer")]}

        def between(state: ChatState) -> dict[str, Any]:
            self.before()
            return {}

        builder: StateGraph[Any, None, Any, Any] = StateGraph(ChatState)
        builder.add_node("respond", respond)
        builder.add_node("between", between)
        builder.add_edge(START, "respond")
        builder.add_edge("respond", "between")
        builder.add_edge("between", END)
        if self.way == "node":
            builder.add_node("remember", remember_turns())
            builder.add_edge("between", "remember")
        return builder.compile(checkpointer=self.saver, store=self.store)

    def say(self, thread_id: str, text: Any = BEES, id: str | None = None, **options: Any) -> None:
        """Run the graph with a message, or with a command."""
        given = text if isinstance(text, Command) else {"messages": [HumanMessage(text, id=id)]}
        self.graph().invoke(given, config(thread_id), **options)
        self.extract(thread_id)

    def extract(self, thread_id: str, *, anew: bool = False) -> dict[str, int]:
        """Extract memories as a job does; returns the counts of what was refused."""
        if self.way == "node" and not anew:
            return {}
        job = Extraction(self.saver, self.store)
        return dict(job.extract(thread_id, config(thread_id), anew=anew).refused)

    def forget(self) -> None:
        """Forget the memory of the bees."""
        for memory in collection(self.store).list():
            if memory.text == TURN:
                collection(self.store).forget(memory.key, config=None)

    @property
    def count(self) -> int:
        """How many memories say that she keeps bees."""
        return read_memory_texts(self.store).count(TURN)


def config(thread_id: str) -> Any:
    """The config of a run of Ann's."""
    return {"configurable": {"thread_id": thread_id, "user_id": "ann"}}


def collection(store: Any) -> Collection:
    """Ann's memories."""
    return Collection(store, ANN)


@pytest.fixture(params=WAYS)
def talk(request: pytest.FixtureRequest, place: Place) -> Iterator[Talk]:
    """A database, and the ways to remember."""
    with place.saver() as saver, place.store(index=None) as store:
        yield Talk(saver, store, request.param)


@pytest.fixture
def forgotten(talk: Talk) -> Talk:
    """The text was said on a thread, remembered and forgotten."""
    talk.say("monday", id="m1")
    assert talk.count == 1
    talk.forget()
    assert talk.count == 0
    return talk


@pytest.mark.parametrize("options", [{}, {"durability": "exit"}, {"durability": "sync"}])
@pytest.mark.parametrize("thread_id", ["monday", "tuesday"])
def test_what_a_later_run_says_again_is_remembered(
    forgotten: Talk, thread_id: str, options: Any
) -> None:
    """On the same thread and on another; it is recalled."""
    forgotten.say(thread_id, **options)

    assert forgotten.count == 1
    found = recall("bees", store=forgotten.store, namespace=ANN, min_score=0)
    assert TURN in [memory.text for memory in found.memories]


def test_an_asynchronous_run_says_it_again(forgotten: Talk) -> None:
    """`ainvoke` and the job of an event loop."""

    async def runs() -> None:
        given: Any = {"messages": [HumanMessage(BEES)]}
        await forgotten.graph().ainvoke(given, config("tuesday"))
        if forgotten.way == "job":
            await Extraction(forgotten.saver, forgotten.store).aextract(
                "tuesday", config("tuesday")
            )

    asyncio.run(runs())

    assert forgotten.count == 1


def test_it_can_be_said_and_forgotten_many_times(forgotten: Talk) -> None:
    """Each forgetting counts for the runs before it; reading a thread anew restores none."""
    for number in range(3):
        forgotten.say("monday", id=f"again-{number}")
        assert forgotten.count == 1
        forgotten.forget()
        forgotten.extract("monday", anew=True)
        assert forgotten.count == 0


def test_a_run_that_began_before_the_forgetting_brings_nothing_back(talk: Talk) -> None:
    """The forgetting happens while the run is under way."""
    talk.say("monday", id="m1")
    talk.before = talk.forget
    talk.say("tuesday")

    assert talk.count == 0
    assert talk.extract("tuesday", anew=True)["tombstone"] == 1


def test_what_was_said_before_the_forgetting_and_not_remembered_stays_forgotten(
    talk: Talk,
) -> None:
    """Another thread had the text as well; its run is older."""
    silent = Talk(talk.saver, talk.store, "job")
    talk.say("monday", id="m1")
    silent.graph().invoke({"messages": [HumanMessage(BEES)]}, config("tuesday"))
    talk.forget()
    talk.say("tuesday", "And you?")
    silent.extract("tuesday")

    assert talk.count == 0


def test_a_run_that_is_resumed_began_when_it_was_asked(talk: Talk) -> None:
    """An answer to a question from before the forgetting belongs to that run."""
    talk.say("monday", id="m1")
    talk.graph().invoke({"messages": [HumanMessage("ask me")]}, config("tuesday"))
    talk.forget()
    talk.say("tuesday", Command(resume=BEES))
    assert talk.count == 0

    talk.graph().invoke({"messages": [HumanMessage("ask me")]}, config("tuesday"))
    talk.say("tuesday", Command(resume=BEES))
    assert talk.count == 1


def test_what_no_earlier_run_has_remembered_is_new_too(forgotten: Talk) -> None:
    """A later run has said it, and the run or job after that remembers it."""
    silent = Talk(forgotten.saver, forgotten.store, "job")
    for thread_id in ("monday", "tuesday"):
        silent.graph().invoke({"messages": [HumanMessage(BEES)]}, config(thread_id))
        forgotten.say(thread_id, "And you?")

    assert forgotten.count == 2


def test_what_is_not_certain_stays_forgotten(forgotten: Talk) -> None:
    """The checkpoint before the message was pruned, so that nothing tells who brought it."""
    silent = Talk(forgotten.saver, forgotten.store, "job")
    silent.graph().invoke({"messages": [HumanMessage(BEES)]}, config("tuesday"))
    forgotten.saver.prune(["tuesday"])

    assert silent.extract("tuesday", anew=True)["tombstone"] == 1
    assert forgotten.count == 0


class FactExtractor:
    """Proposes one fact, which rests on all messages of a user that it is given."""

    name = "facts"

    def count_batch_messages(self, messages: Any) -> int:
        """All of them."""
        return len(messages)

    async def propose_changes(self, batch: Batch, scope: Scope) -> Proposal:
        """One fact, whatever the user says."""
        users = [message for message in batch.messages if message.role == "user"]
        candidate = batch.build_candidate(users, "Ann keeps bees", FACT)
        return Proposal([Addition(f"bees-{users[-1].id}", candidate)])


@pytest.mark.parametrize("how", ["delete", "forget"])
def test_a_fact_is_extracted_again_from_later_messages(place: Place, how: str) -> None:
    """All messages that it rests on must be of later runs."""
    with place.saver() as saver, place.store(index=None) as store:
        job, ann = Extraction(saver, store, FactExtractor()), collection(store)
        talk = Talk(saver, store, "job").graph()
        talk.invoke({"messages": [HumanMessage("One hive", id="m1")]}, config("monday"))
        assert job.extract("monday", config("monday")).added == 1
        getattr(ann, how)("bees-m1")
        talk.invoke({"messages": [HumanMessage("Two hives", id="m2")]}, config("monday"))
        mixed = job.extract("monday", config("monday"), anew=True)
        assert (mixed.added, mixed.forgotten) == (0, 1)
        assert "1 refused (1 tombstone)" in str(mixed)

        talk.invoke({"messages": [HumanMessage("Three hives", id="m3")]}, config("monday"))
        assert job.extract("monday", config("monday")).added == 1
        assert read_memory_texts(store) == ["Ann keeps bees"]


def test_somebody_who_adds_it_by_hand_has_it(forgotten: Talk) -> None:
    """Whatever the time."""
    assert collection(forgotten.store).insert(TURN).change == "added"
    assert forgotten.count == 1


def _die(*_: Any, **__: Any) -> None:
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def _forget_and_die(place: Place) -> None:
    """Forget the text, and be killed once its tombstone is written."""
    with place.store(index=None) as store:
        (memory,) = [each for each in collection(store).list() if each.text == TURN]
        store.forget = _die  # type: ignore[method-assign, assignment]
        collection(store).forget(memory.key)


def test_a_forgetting_that_was_killed_can_be_repeated(place: Place) -> None:
    """Its tombstone is there before the memory goes; what is said later is new all the same."""
    with place.saver() as saver, place.store(index=None) as store:
        Talk(saver, store, "node").say("monday", id="m1")
    child = forkserver_context().Process(target=_forget_and_die, args=(place,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL

    with place.saver() as saver, place.store(index=None) as store:
        talk = Talk(saver, store, "node")
        assert len(store.search(build_notes_namespace(TOMBSTONES, ANN))) == 2
        talk.forget()
        talk.extract("monday", anew=True)
        assert talk.count == 0
        talk.say("tuesday")
        assert talk.count == 1


def test_a_message_with_a_known_id_stays_forgotten(forgotten: Talk) -> None:
    """On its own thread and on another, also after a second forgetting."""
    forgotten.say("tuesday", id="m1")
    forgotten.say("monday", id="m1")
    assert forgotten.count == 0

    forgotten.say("monday", id="m2")
    forgotten.forget()
    forgotten.say("wednesday", id="m1")
    forgotten.say("thursday", id="m2")
    assert forgotten.count == 0


def test_a_message_that_the_state_has_already_is_not_new(forgotten: Talk) -> None:
    """A later run on a thread to which an update has added the text, with or without a time."""
    update: Any = {"messages": [HumanMessage(BEES, response_metadata=dated())]}
    forgotten.graph().update_state(config("tuesday"), update)
    forgotten.say("tuesday", "And you?")
    forgotten.extract("tuesday", anew=True)

    assert forgotten.count == 0


def test_a_copy_of_a_thread_brings_nothing_back(forgotten: Talk) -> None:
    """Neither with the former message nor with one that a later run has brought."""
    forgotten.saver.copy_thread("monday", "copy")
    refused = forgotten.extract("copy", anew=True)
    assert (forgotten.count, refused["tombstone"]) == (0, 1)

    forgotten.say("monday", id="m2")
    forgotten.saver.copy_thread("monday", "second")
    assert forgotten.extract("second", anew=True)["tombstone"] == 2
    assert forgotten.count == 1

    forgotten.say("second")
    assert forgotten.count == 2


def dated() -> dict[str, Any]:
    """The time of a message that claims to be of the future."""
    return {"create_time": FUTURE.isoformat()}


@pytest.mark.parametrize("goes_on", [False, True], ids=["new", "continued"])
def test_a_merge_brings_nothing_back(forgotten: Talk, goes_on: bool, tmp_path: Path) -> None:
    """A thread of another database, of later runs with later times, or one that went on there."""
    with SQLiteCheckpointer.open(tmp_path / "there.db") as saver:
        if goes_on:
            saver.import_from(forgotten.saver)
        with SQLiteStore.open(tmp_path / "there.db", index=None) as store:
            Talk(saver, store, "node").say("monday" if goes_on else "tuesday")
            report = forgotten.saver.import_from(saver)
            items = forgotten.store.import_from(store, on_unsuitable="skip")
    assert report.checkpoints > 0
    assert len(items.refused) == (2 if goes_on else 1)

    refused = forgotten.extract("monday" if goes_on else "tuesday", anew=True)
    assert refused["tombstone"] == (2 if goes_on else 1)
    forgotten.say("monday" if goes_on else "tuesday", "And you?")
    assert forgotten.count == 0


def test_no_file_changes_a_tombstone(forgotten: Talk) -> None:
    """A file that says that it was forgotten long ago, or never, or not any more."""
    lines = [*forgotten.store.export(("perdure", TOMBSTONES))]
    assert len(lines) == 2
    notes = forgotten.store.search(build_notes_namespace(TOMBSTONES, ANN))
    for line in lines:
        old = {**line["value"], "at": "1970-01-01T00:00:00+00:00", "message_ids": []}
        for change in (
            {"value": old, "version": 7},
            {"value": old},
            {"valid_to": datetime.now(UTC).isoformat()},
            {"value": old, "version": 8, "valid_to": datetime.now(UTC).isoformat()},
        ):
            forgotten.store.import_lines([json.dumps({**line, **change})])
    memory = {"text": TURN, "kind": "turn"}
    item = {"namespace": list(ANN), "key": "k", "value": memory, "version": 1}
    report = forgotten.store.import_lines(
        [json.dumps({**lines[0], "version": 9}), json.dumps(item)]
    )

    assert forgotten.store.search(build_notes_namespace(TOMBSTONES, ANN)) == notes
    assert report.refused == ((ANN, "k"),)


def test_a_run_on_top_of_an_update_that_came_meanwhile(forgotten: Talk) -> None:
    """The run takes over what the update has added, which it has not said itself."""

    given: Any = {"messages": [HumanMessage("Hello")]}
    forgotten.graph().invoke(given, config("tuesday"))
    head = forgotten.graph().get_state(config("tuesday")).config

    def meanwhile() -> None:
        forgotten.before = lambda: None
        message: Any = {"messages": [HumanMessage(BEES)]}
        forgotten.graph().update_state(head, message)

    forgotten.before = meanwhile
    forgotten.say("tuesday", "And you?")
    forgotten.say("tuesday", "Well?")
    forgotten.extract("tuesday", anew=True)

    assert forgotten.count == 0
