"""Runs without memory: nodes with `{user_id}` recall and remember nothing, and all others work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from pydantic import BaseModel

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.address import WITHOUT_MEMORY_KEY
from perdure.errors import InvalidConfig
from perdure.graphs import chat_graph
from perdure.memory import (
    Collection,
    Extraction,
    Instructions,
    Profile,
    manage_memory,
    recall,
    remember,
    remember_turns,
    search_memory,
    search_threads,
    update_instructions,
    update_profile,
    use_instructions,
    use_memories,
)
from perdure.memory.thread_messages import REMEMBER_TURN
from perdure.stores import SQLiteStore
from tests.memory.collection_helpers import call_tool
from tests.memory.fake_models import FakeModel

ANN: Any = {"configurable": {"user_id": "ann", "thread_id": "t"}}
GUEST: Any = {
    "configurable": {"user_id": "", "thread_id": "t", WITHOUT_MEMORY_KEY: True},
    "metadata": {"user_id": "ann"},
}
TEA = "Ann drinks green tea."
QUESTION = [HumanMessage("Which tea does Ann drink?", id="q")]


class TasteProfile(BaseModel):
    """What somebody drinks."""

    drink: str = "water"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    """A store with a memory of Ann and a memory in a handbook."""
    with SQLiteStore.open(tmp_path / "plain.db") as opened:
        remember(TEA, store=opened, config=ANN)
        Collection(opened, ("handbook",)).insert("Green tea is brewed at 70 degrees.")
        yield opened


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[SQLiteCheckpointer]:
    """A checkpointer on the file of the store."""
    with SQLiteCheckpointer.open(tmp_path / "plain.db") as opened:
        yield opened


def list_memory_texts(store: SQLiteStore) -> list[str]:
    return [memory.text for memory in Collection(store).list(config=ANN)]


def apply_node(memory_node: Any, config: Any) -> str:
    return "\n".join(message.text for message in memory_node(QUESTION, config))


def test_run_without_memory_recalls_only_from_impersonal_namespaces(store: SQLiteStore) -> None:
    personal = use_memories(store, min_score=0)
    both = use_memories(store, namespace=[("memories", "{user_id}"), ("handbook",)], min_score=0)

    assert (TEA in apply_node(personal, ANN), TEA in apply_node(personal, GUEST)) == (True, False)
    assert TEA not in apply_node(both, GUEST)
    assert "70 degrees" in apply_node(both, GUEST)
    assert recall("green tea", store=store, config=GUEST, min_score=0).memories == []
    assert Collection(store).search("green tea", config=GUEST) == []
    assert Collection(store).list(config=GUEST) == []


def test_tools_answer_that_nothing_is_known_or_stored(store: SQLiteStore, call_mode: str) -> None:
    search_answer = call_tool(call_mode, search_memory(store=store), GUEST, query="green tea")
    manage_answer = call_tool(
        call_mode, manage_memory(store=store), GUEST, action="create", text="Ann rows."
    )

    assert search_answer.text == "Nothing is known about that."
    assert manage_answer.status == "error"
    assert "Nothing was stored, because the message is not from the person" in manage_answer.text
    assert list_memory_texts(store) == [TEA]


def test_run_without_memory_writes_nothing(store: SQLiteStore) -> None:
    """A program that fills in the namespace itself gets an error with the reason."""
    learned = remember_turns(store)([*QUESTION, AIMessage("Green.", id="a")], GUEST)

    assert len(learned) == 2
    assert list_memory_texts(store) == [TEA]
    for write in (
        lambda: remember("Ann rows.", store=store, config=GUEST),
        lambda: Collection(store, ("notes", "{user_id}")).insert("Ann rows.", config=GUEST),
        lambda: Profile(TasteProfile, store).set(TasteProfile(drink="tea"), GUEST),
    ):
        with pytest.raises(InvalidConfig, match="memory is disabled for this run"):
            write()


def test_run_without_memory_uses_default_profile_and_instructions(store: SQLiteStore) -> None:
    profile, place = Profile(TasteProfile, store), ("instructions", "{user_id}")
    instructions = Instructions(store, place, default="Be brief.")
    profile.set(TasteProfile(drink="tea"), ANN)
    instructions.set("Call her Ann.", ANN)
    model = FakeModel(reply=lambda _: pytest.fail("the model was asked"))

    update_profile(model, profile)(QUESTION, GUEST)
    update_instructions(model, instructions)(QUESTION, GUEST)

    assert (profile.get(GUEST).drink, profile.get(ANN).drink) == ("water", "tea")
    assert instructions.current(ANN).text == "Call her Ann."
    system: Any = [SystemMessage("x"), *QUESTION]
    assert use_instructions(instructions)(system, GUEST)[0].text == "Be brief."


def test_turn_of_run_without_memory_is_not_extracted_later(
    store: SQLiteStore, saver: SQLiteCheckpointer
) -> None:
    """The search in threads finds the turn."""
    graph = chat_graph(FakeModel(reply=lambda _: "Noted, Kayak."), checkpointer=saver)
    guest = HumanMessage("I am Ann, and like Kayak.", response_metadata={REMEMBER_TURN: False})
    graph.invoke({"messages": [guest]}, GUEST)
    graph.invoke({"messages": [HumanMessage("It is me: Otter.")]}, ANN)

    report = Extraction(saver, store).extract("t", ANN)

    assert report.messages == 4
    assert list_memory_texts(store) == [TEA, "user: It is me: Otter.", "assistant: Noted, Kayak."]
    hits = search_threads(saver, store, "Kayak")
    assert [hit.thread_id for hit in hits] == ["t"]


def test_thread_keeps_its_user_after_run_without_memory(
    store: SQLiteStore, saver: SQLiteCheckpointer
) -> None:
    graph: Any = chat_graph(
        FakeModel(reply=lambda _: "Yes."),
        memory=[use_memories(store), remember_turns(store)],
        checkpointer=saver,
    )
    for config, name in ((ANN, "ann"), (GUEST, ""), (ANN, "ann"), (GUEST, "")):
        context = {"user_id": name}
        graph.invoke({"messages": [HumanMessage("Tea?")]}, config, context=context)
        head = saver.head("t")

        assert head is not None
        assert head.metadata["user_id"] == "ann"
