"""A forgotten text is remembered again if a later run says it, and only then."""

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
from perdure.memory.long_term.extraction import remember_turns
from perdure.memory.long_term.extractors import Addition, Batch, Proposal, Scope
from perdure.memory.long_term.records import (
    FACT,
    TOMBSTONES,
    build_namespace_of_notes_about_memories,
)
from perdure.stores import SQLiteStore
from tests.backends import Place
from tests.durability.processes import forkserver_context
from tests.memory.extraction_threads import ANN, Graph, read_memory_texts

BEES = "I keep bees"
TURN = f"user: {BEES}"
REMEMBER_BY = ("node", "job")
FUTURE = datetime.now(UTC) + timedelta(days=3650)


class ChatThread:
    """A chat graph over one database, which remembers turns in a node or by a later job."""

    def __init__(self, saver: SQLiteCheckpointer, store: SQLiteStore, remember_by: str) -> None:
        self.saver, self.store, self.remember_by = saver, store, remember_by
        self.before_remembering: Any = lambda: None  # each run calls it before it remembers

    def build_graph(self) -> Graph:
        """Return a graph that answers, and interrupts if the message is "ask me"."""

        def respond(state: ChatState) -> dict[str, Any]:
            newest = state["messages"][-1]
            if newest.text == "ask me":
                answer = interrupt("well?")
                return {"messages": [HumanMessage(answer)]}
            return {"messages": [AIMessage("Noted", id=f"{newest.id}-answer")]}

        def between(state: ChatState) -> dict[str, Any]:
            self.before_remembering()
            return {}

        builder: StateGraph[Any, None, Any, Any] = StateGraph(ChatState)
        builder.add_node("respond", respond)
        builder.add_node("between", between)
        builder.add_edge(START, "respond")
        builder.add_edge("respond", "between")
        builder.add_edge("between", END)
        if self.remember_by == "node":
            builder.add_node("remember", remember_turns())
            builder.add_edge("between", "remember")
        return builder.compile(checkpointer=self.saver, store=self.store)

    def send_message(
        self, thread_id: str, text: Any = BEES, id: str | None = None, **options: Any
    ) -> None:
        """Run the graph with a message, or with a command."""
        input = text if isinstance(text, Command) else {"messages": [HumanMessage(text, id=id)]}
        self.build_graph().invoke(input, make_config(thread_id), **options)
        self.extract(thread_id)

    def extract(self, thread_id: str, *, anew: bool = False) -> dict[str, int]:
        """Extract memories as a job does, and return the counts of refused candidates."""
        if self.remember_by == "node" and not anew:
            return {}
        job = Extraction(self.saver, self.store)
        return dict(job.extract(thread_id, make_config(thread_id), anew=anew).refused)

    def forget_turn_memory(self) -> None:
        """Forget the memory with the text TURN."""
        for memory in open_collection(self.store).list():
            if memory.text == TURN:
                open_collection(self.store).forget(memory.key, config=None)

    @property
    def turn_memory_count(self) -> int:
        """Number of memories with the text TURN."""
        return read_memory_texts(self.store).count(TURN)


def make_config(thread_id: str) -> Any:
    """Return the config of a run of Ann's."""
    return {"configurable": {"thread_id": thread_id, "user_id": "ann"}}


def open_collection(store: Any) -> Collection:
    """Return the collection of Ann's memories."""
    return Collection(store, ANN)


@pytest.fixture(params=REMEMBER_BY)
def chat(request: pytest.FixtureRequest, place: Place) -> Iterator[ChatThread]:
    """A chat graph on each backend, for both ways of remembering."""
    with place.saver() as saver, place.store(index=None) as store:
        yield ChatThread(saver, store, request.param)


@pytest.fixture
def chat_with_forgotten_turn(chat: ChatThread) -> ChatThread:
    """A chat graph whose turn was said on a thread, remembered and forgotten."""
    chat.send_message("monday", id="m1")
    assert chat.turn_memory_count == 1
    chat.forget_turn_memory()
    assert chat.turn_memory_count == 0
    return chat


@pytest.mark.parametrize("options", [{}, {"durability": "exit"}, {"durability": "sync"}])
@pytest.mark.parametrize("thread_id", ["monday", "tuesday"])
def test_forgotten_text_said_in_later_run_is_remembered_again(
    chat_with_forgotten_turn: ChatThread, thread_id: str, options: Any
) -> None:
    """The rule holds on the same thread and on another thread."""
    chat_with_forgotten_turn.send_message(thread_id, **options)

    assert chat_with_forgotten_turn.turn_memory_count == 1
    found = recall("bees", store=chat_with_forgotten_turn.store, namespace=ANN, min_score=0)
    assert TURN in [memory.text for memory in found.memories]


def test_forgotten_text_said_in_async_run_is_remembered_again(
    chat_with_forgotten_turn: ChatThread,
) -> None:
    async def runs() -> None:
        input: Any = {"messages": [HumanMessage(BEES)]}
        await chat_with_forgotten_turn.build_graph().ainvoke(input, make_config("tuesday"))
        if chat_with_forgotten_turn.remember_by == "job":
            await Extraction(
                chat_with_forgotten_turn.saver, chat_with_forgotten_turn.store
            ).aextract("tuesday", make_config("tuesday"))

    asyncio.run(runs())

    assert chat_with_forgotten_turn.turn_memory_count == 1


def test_text_can_be_said_and_forgotten_repeatedly(chat_with_forgotten_turn: ChatThread) -> None:
    """Each forgetting covers the runs before it.

    A new extraction of the whole thread restores nothing.
    """
    for number in range(3):
        chat_with_forgotten_turn.send_message("monday", id=f"again-{number}")
        assert chat_with_forgotten_turn.turn_memory_count == 1
        chat_with_forgotten_turn.forget_turn_memory()
        chat_with_forgotten_turn.extract("monday", anew=True)
        assert chat_with_forgotten_turn.turn_memory_count == 0


def test_run_that_began_before_forgetting_does_not_restore_text(chat: ChatThread) -> None:
    chat.send_message("monday", id="m1")
    chat.before_remembering = chat.forget_turn_memory
    chat.send_message("tuesday")

    assert chat.turn_memory_count == 0
    assert chat.extract("tuesday", anew=True)["tombstone"] == 1


def test_unextracted_text_from_before_forgetting_stays_forgotten(
    chat: ChatThread,
) -> None:
    """Another thread contains the text as well, from an older run."""
    silent = ChatThread(chat.saver, chat.store, "job")
    chat.send_message("monday", id="m1")
    silent.build_graph().invoke({"messages": [HumanMessage(BEES)]}, make_config("tuesday"))
    chat.forget_turn_memory()
    chat.send_message("tuesday", "And you?")
    silent.extract("tuesday")

    assert chat.turn_memory_count == 0


def test_resumed_run_counts_from_its_first_start(chat: ChatThread) -> None:
    """An answer to an interrupt from before the forgetting does not restore the text."""
    chat.send_message("monday", id="m1")
    chat.build_graph().invoke({"messages": [HumanMessage("ask me")]}, make_config("tuesday"))
    chat.forget_turn_memory()
    chat.send_message("tuesday", Command(resume=BEES))
    assert chat.turn_memory_count == 0

    chat.build_graph().invoke({"messages": [HumanMessage("ask me")]}, make_config("tuesday"))
    chat.send_message("tuesday", Command(resume=BEES))
    assert chat.turn_memory_count == 1


def test_text_said_in_later_run_is_remembered_by_the_run_after_it(
    chat_with_forgotten_turn: ChatThread,
) -> None:
    """The run that said the text did not remember it."""
    silent = ChatThread(chat_with_forgotten_turn.saver, chat_with_forgotten_turn.store, "job")
    for thread_id in ("monday", "tuesday"):
        silent.build_graph().invoke({"messages": [HumanMessage(BEES)]}, make_config(thread_id))
        chat_with_forgotten_turn.send_message(thread_id, "And you?")

    assert chat_with_forgotten_turn.turn_memory_count == 2


def test_text_of_unknown_run_stays_forgotten(chat_with_forgotten_turn: ChatThread) -> None:
    """The checkpoint before the message was pruned, so the run of the message is unknown."""
    silent = ChatThread(chat_with_forgotten_turn.saver, chat_with_forgotten_turn.store, "job")
    silent.build_graph().invoke({"messages": [HumanMessage(BEES)]}, make_config("tuesday"))
    chat_with_forgotten_turn.saver.prune(["tuesday"])

    assert silent.extract("tuesday", anew=True)["tombstone"] == 1
    assert chat_with_forgotten_turn.turn_memory_count == 0


class FactExtractor:
    """An extractor that proposes one fact, which rests on all user messages of the batch."""

    name = "facts"

    def count_leading_messages_that_fit_in_one_call(self, messages: Any) -> int:
        """Return the number of all messages."""
        return len(messages)

    async def propose_changes(self, batch: Batch, scope: Scope) -> Proposal:
        """Return one fact, whatever the user says."""
        users = [message for message in batch.messages if message.role == "user"]
        candidate = batch.build_candidate(users, "Ann keeps bees", FACT)
        return Proposal([Addition(f"bees-{users[-1].id}", candidate)])


@pytest.mark.parametrize("method", ["delete", "forget"])
def test_forgotten_fact_is_extracted_again_only_from_later_messages(
    place: Place, method: str
) -> None:
    """All messages on which the fact rests must be from later runs."""
    with place.saver() as saver, place.store(index=None) as store:
        job, ann = Extraction(saver, store, FactExtractor()), open_collection(store)
        graph = ChatThread(saver, store, "job").build_graph()
        graph.invoke({"messages": [HumanMessage("One hive", id="m1")]}, make_config("monday"))
        assert job.extract("monday", make_config("monday")).added == 1
        getattr(ann, method)("bees-m1")
        graph.invoke({"messages": [HumanMessage("Two hives", id="m2")]}, make_config("monday"))
        mixed = job.extract("monday", make_config("monday"), anew=True)
        assert (mixed.added, mixed.forgotten) == (0, 1)
        assert "1 refused (1 tombstone)" in str(mixed)

        graph.invoke({"messages": [HumanMessage("Three hives", id="m3")]}, make_config("monday"))
        assert job.extract("monday", make_config("monday")).added == 1
        assert read_memory_texts(store) == ["Ann keeps bees"]


def test_forgotten_text_can_be_inserted_explicitly(chat_with_forgotten_turn: ChatThread) -> None:
    assert open_collection(chat_with_forgotten_turn.store).insert(TURN).change == "added"
    assert chat_with_forgotten_turn.turn_memory_count == 1


def _kill_own_process(*_: Any, **__: Any) -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def _forget_and_kill_own_process(place: Place) -> None:
    """Forget the text, and kill this process once the tombstone is written."""
    with place.store(index=None) as store:
        (memory,) = [item for item in open_collection(store).list() if item.text == TURN]
        store.forget = _kill_own_process  # type: ignore[method-assign, assignment]
        open_collection(store).forget(memory.key)


def test_forgetting_killed_halfway_can_be_repeated(place: Place) -> None:
    """The tombstone is written before the memory is deleted.

    A text that is said later is remembered.
    """
    with place.saver() as saver, place.store(index=None) as store:
        ChatThread(saver, store, "node").send_message("monday", id="m1")
    child = forkserver_context().Process(target=_forget_and_kill_own_process, args=(place,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL

    with place.saver() as saver, place.store(index=None) as store:
        talk = ChatThread(saver, store, "node")
        assert len(store.search(build_namespace_of_notes_about_memories(TOMBSTONES, ANN))) == 2
        talk.forget_turn_memory()
        talk.extract("monday", anew=True)
        assert talk.turn_memory_count == 0
        talk.send_message("tuesday")
        assert talk.turn_memory_count == 1


def test_message_with_forgotten_id_stays_forgotten(chat_with_forgotten_turn: ChatThread) -> None:
    """The rule holds on any thread, and also after a second forgetting."""
    chat_with_forgotten_turn.send_message("tuesday", id="m1")
    chat_with_forgotten_turn.send_message("monday", id="m1")
    assert chat_with_forgotten_turn.turn_memory_count == 0

    chat_with_forgotten_turn.send_message("monday", id="m2")
    chat_with_forgotten_turn.forget_turn_memory()
    chat_with_forgotten_turn.send_message("wednesday", id="m1")
    chat_with_forgotten_turn.send_message("thursday", id="m2")
    assert chat_with_forgotten_turn.turn_memory_count == 0


def test_message_added_by_state_update_is_not_remembered(
    chat_with_forgotten_turn: ChatThread,
) -> None:
    """A later run on the thread did not say the message itself, with or without a time."""
    update: Any = {"messages": [HumanMessage(BEES, response_metadata=make_future_time())]}
    chat_with_forgotten_turn.build_graph().update_state(make_config("tuesday"), update)
    chat_with_forgotten_turn.send_message("tuesday", "And you?")
    chat_with_forgotten_turn.extract("tuesday", anew=True)

    assert chat_with_forgotten_turn.turn_memory_count == 0


def test_copied_thread_does_not_restore_forgotten_text(
    chat_with_forgotten_turn: ChatThread,
) -> None:
    """Neither the old message nor a message of a later run is remembered from the copy."""
    chat_with_forgotten_turn.saver.copy_thread("monday", "copy")
    refused = chat_with_forgotten_turn.extract("copy", anew=True)
    assert (chat_with_forgotten_turn.turn_memory_count, refused["tombstone"]) == (0, 1)

    chat_with_forgotten_turn.send_message("monday", id="m2")
    chat_with_forgotten_turn.saver.copy_thread("monday", "second")
    assert chat_with_forgotten_turn.extract("second", anew=True)["tombstone"] == 2
    assert chat_with_forgotten_turn.turn_memory_count == 1

    chat_with_forgotten_turn.send_message("second")
    assert chat_with_forgotten_turn.turn_memory_count == 2


def make_future_time() -> dict[str, Any]:
    """Return the metadata of a message that claims to be from the future."""
    return {"create_time": FUTURE.isoformat()}


@pytest.mark.parametrize("is_continued", [False, True], ids=["new", "continued"])
def test_import_from_other_database_does_not_restore_forgotten_text(
    chat_with_forgotten_turn: ChatThread, is_continued: bool, tmp_path: Path
) -> None:
    """The imported thread may be a new one, or one that was continued in the other database."""
    with SQLiteCheckpointer.open(tmp_path / "there.db") as saver:
        if is_continued:
            saver.import_from(chat_with_forgotten_turn.saver)
        with SQLiteStore.open(tmp_path / "there.db", index=None) as store:
            ChatThread(saver, store, "node").send_message("monday" if is_continued else "tuesday")
            report = chat_with_forgotten_turn.saver.import_from(saver)
            items = chat_with_forgotten_turn.store.import_from(store, on_unsuitable="skip")
    assert report.checkpoints > 0
    assert len(items.refused) == (2 if is_continued else 1)

    refused = chat_with_forgotten_turn.extract("monday" if is_continued else "tuesday", anew=True)
    assert refused["tombstone"] == (2 if is_continued else 1)
    chat_with_forgotten_turn.send_message("monday" if is_continued else "tuesday", "And you?")
    assert chat_with_forgotten_turn.turn_memory_count == 0


def test_import_cannot_change_tombstone(chat_with_forgotten_turn: ChatThread) -> None:
    """The file may claim that the text was forgotten long ago, never, or no longer."""
    lines = [*chat_with_forgotten_turn.store.export(("perdure", TOMBSTONES))]
    assert len(lines) == 2
    notes = chat_with_forgotten_turn.store.search(
        build_namespace_of_notes_about_memories(TOMBSTONES, ANN)
    )
    for line in lines:
        old = {**line["value"], "at": "1970-01-01T00:00:00+00:00", "message_ids": []}
        for change in (
            {"value": old, "version": 7},
            {"value": old},
            {"valid_to": datetime.now(UTC).isoformat()},
            {"value": old, "version": 8, "valid_to": datetime.now(UTC).isoformat()},
        ):
            chat_with_forgotten_turn.store.import_lines([json.dumps({**line, **change})])
    memory = {"text": TURN, "kind": "turn"}
    item = {"namespace": list(ANN), "key": "k", "value": memory, "version": 1}
    report = chat_with_forgotten_turn.store.import_lines(
        [json.dumps({**lines[0], "version": 9}), json.dumps(item)]
    )

    assert (
        chat_with_forgotten_turn.store.search(
            build_namespace_of_notes_about_memories(TOMBSTONES, ANN)
        )
        == notes
    )
    assert report.refused == ((ANN, "k"),)


def test_message_added_by_concurrent_update_is_not_remembered(
    chat_with_forgotten_turn: ChatThread,
) -> None:
    """The run continues from the update, but did not say the message itself."""

    input: Any = {"messages": [HumanMessage("Hello")]}
    chat_with_forgotten_turn.build_graph().invoke(input, make_config("tuesday"))
    head = chat_with_forgotten_turn.build_graph().get_state(make_config("tuesday")).config

    def update_state_once() -> None:
        chat_with_forgotten_turn.before_remembering = lambda: None
        message: Any = {"messages": [HumanMessage(BEES)]}
        chat_with_forgotten_turn.build_graph().update_state(head, message)

    chat_with_forgotten_turn.before_remembering = update_state_once
    chat_with_forgotten_turn.send_message("tuesday", "And you?")
    chat_with_forgotten_turn.send_message("tuesday", "Well?")
    chat_with_forgotten_turn.extract("tuesday", anew=True)

    assert chat_with_forgotten_turn.turn_memory_count == 0
