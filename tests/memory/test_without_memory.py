"""A run without memory: parts with `{user_id}` recall and remember nothing, the others work."""

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
from tests.memory.fake_models import FakeModel
from tests.memory.kept import call_tool

ANN: Any = {"configurable": {"user_id": "ann", "thread_id": "t"}}
GUEST: Any = {
    "configurable": {"user_id": "", "thread_id": "t", WITHOUT_MEMORY_KEY: True},
    "metadata": {"user_id": "ann"},
}
TEA = "Ann drinks green tea."
QUESTION = [HumanMessage("Which tea does Ann drink?", id="q")]


class Taste(BaseModel):
    """What somebody drinks."""

    drink: str = "water"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    """A store in which something is known of ann, and in a handbook."""
    with SQLiteStore.open(tmp_path / "plain.db") as opened:
        remember(TEA, store=opened, config=ANN)
        Collection(opened, ("handbook",)).insert("Green tea is brewed at 70 degrees.")
        yield opened


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[SQLiteCheckpointer]:
    """A checkpointer on the file of the store."""
    with SQLiteCheckpointer.open(tmp_path / "plain.db") as opened:
        yield opened


def known(store: SQLiteStore) -> list[str]:
    return [each.text for each in Collection(store).list(config=ANN)]


def shown(part: Any, config: Any) -> str:
    return "\n".join(message.text for message in part(QUESTION, config))


def test_nothing_is_recalled(store: SQLiteStore) -> None:
    """Except from namespaces that name nobody."""
    personal = use_memories(store, min_score=0)
    both = use_memories(store, namespace=[("memories", "{user_id}"), ("handbook",)], min_score=0)

    assert (TEA in shown(personal, ANN), TEA in shown(personal, GUEST)) == (True, False)
    assert TEA not in shown(both, GUEST)
    assert "70 degrees" in shown(both, GUEST)
    assert recall("green tea", store=store, config=GUEST, min_score=0).memories == []
    assert Collection(store).search("green tea", config=GUEST) == []
    assert Collection(store).list(config=GUEST) == []


def test_tools_say_that_nothing_is_known_or_kept(store: SQLiteStore, call_mode: str) -> None:
    found = call_tool(call_mode, search_memory(store=store), GUEST, query="green tea")
    kept = call_tool(
        call_mode, manage_memory(store=store), GUEST, action="create", text="Ann rows."
    )

    assert found.text == "Nothing is known about that."
    assert kept.status == "error"
    assert "Nothing was stored, because the message is not from the person" in kept.text
    assert known(store) == [TEA]


def test_nothing_is_written(store: SQLiteStore) -> None:
    """A program that fills in the namespace by itself is told why it cannot."""
    learned = remember_turns(store)([*QUESTION, AIMessage("Green.", id="a")], GUEST)

    assert len(learned) == 2
    assert known(store) == [TEA]
    for write in (
        lambda: remember("Ann rows.", store=store, config=GUEST),
        lambda: Collection(store, ("notes", "{user_id}")).insert("Ann rows.", config=GUEST),
        lambda: Profile(Taste, store).set(Taste(drink="tea"), GUEST),
    ):
        with pytest.raises(InvalidConfig, match="the run has no memory"):
            write()


def test_profiles_and_instructions_are_the_defaults(store: SQLiteStore) -> None:
    profile, place = Profile(Taste, store), ("instructions", "{user_id}")
    instructions = Instructions(store, place, default="Be brief.")
    profile.set(Taste(drink="tea"), ANN)
    instructions.set("Call her Ann.", ANN)
    model = FakeModel(reply=lambda _: pytest.fail("the model was asked"))

    update_profile(model, profile)(QUESTION, GUEST)
    update_instructions(model, instructions)(QUESTION, GUEST)

    assert (profile.get(GUEST).drink, profile.get(ANN).drink) == ("water", "tea")
    assert instructions.current(ANN).text == "Call her Ann."
    system: Any = [SystemMessage("x"), *QUESTION]
    assert use_instructions(instructions)(system, GUEST)[0].text == "Be brief."


def test_a_turn_that_is_not_remembered_is_not_extracted_later(
    store: SQLiteStore, saver: SQLiteCheckpointer
) -> None:
    """Neither by the next run nor by a worker, and it is found by the search of threads."""
    graph = chat_graph(FakeModel(reply=lambda _: "Noted, Kayak."), checkpointer=saver)
    guest = HumanMessage("I am Ann, and like Kayak.", response_metadata={REMEMBER_TURN: False})
    graph.invoke({"messages": [guest]}, GUEST)
    graph.invoke({"messages": [HumanMessage("It is me: Otter.")]}, ANN)

    report = Extraction(saver, store).extract("t", ANN)

    assert report.messages == 4
    assert known(store) == [TEA, "user: It is me: Otter.", "assistant: Noted, Kayak."]
    hits = search_threads(saver, store, "Kayak")
    assert [hit.thread_id for hit in hits] == ["t"]


def test_the_thread_stays_the_persons(store: SQLiteStore, saver: SQLiteCheckpointer) -> None:
    """Also if the contexts of both runs name a user."""
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
