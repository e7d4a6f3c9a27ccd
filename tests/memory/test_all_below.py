"""`use_memories(all_below=)`, and questions about the person whom all facts are about."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from perdure.errors import ConfigurationError
from perdure.memory import recall, use_memories
from perdure.memory.records import TURN, build_put
from perdure.stores import Provenance, SQLiteStore
from tests.memory.remembered import ANN, AS_ANN, build_fact_put, open_filled_store

FACTS = (
    "Ann lives in Ghent",
    "Ann likes figs",
    "The user is vegetarian.",
    "Ann plays the oboe",
    "The user has two sisters.",
    "Ann works at the harbour",
)
VOICES = ("Does Ann play the oboe?", "Do I play the oboe?", "Does she play the oboe?")


def facts(**options: Any) -> SQLiteStore:
    return open_filled_store(
        *(build_fact_put(text, text) for text in FACTS), index="offline", **options
    )


def shown(store: SQLiteStore, text: str, **options: Any) -> list[str]:
    """The facts that a request for a message shows, in order."""
    section = str(use_memories(store, **options)([HumanMessage(text)], AS_ANN)[0].content)
    found = {text: section.find(f'"{text}"') for text in FACTS}
    return sorted((text for text in FACTS if found[text] >= 0), key=found.__getitem__)


def test_all_memories_of_a_person_who_has_few() -> None:
    """Best first, whatever they score; off by default, and at as many as the option says."""
    with facts() as store:
        every = shown(store, "Which instrument is an oboe?", all_below=7)
        enough = shown(store, "Which instrument is an oboe?", all_below=6)
        default = shown(store, "Which instrument is an oboe?")

    assert every[0] == "Ann plays the oboe"
    assert set(every) == set(FACTS)
    assert enough == default == ["Ann plays the oboe"]


def test_all_memories_without_an_embedder() -> None:
    """Those that have no word of the question come last."""
    with open_filled_store(*(build_fact_put(text, text) for text in FACTS)) as store:
        every = shown(store, "figs", all_below=20)

    assert every[0] == "Ann likes figs"
    assert set(every) == set(FACTS)


def test_a_budget_and_kinds_hold_for_all_memories() -> None:
    """Only the kinds that were asked for, and no more than fit; in an event loop, too."""
    with facts() as store:
        store.put(ANN, "case", {"text": "Ann likes figs", "kind": "episode"})
        some = shown(store, "figs", all_below=20, max_tokens=60)
        none = shown(store, "figs", all_below=20, kinds=["thing"])
        view = use_memories(store, all_below=20)
        request = asyncio.run(view.ainvoke([HumanMessage("figs")], AS_ANN))

    assert some[0] == "Ann likes figs"
    assert 0 < len(some) < len(FACTS)
    assert none == []
    assert all(text in str(request[0].content) for text in FACTS)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "3", True])
def test_all_below_is_a_whole_number(wrong: Any) -> None:
    """Anything else is refused where it is given."""
    with facts() as store, pytest.raises(ConfigurationError, match="all_below"):
        use_memories(store, all_below=wrong)


@pytest.mark.parametrize("query", VOICES)
def test_voices_of_a_question(query: str) -> None:
    """The name, "the user", first and third person mean the person whom all facts are about."""
    with facts() as store:
        found = recall(query, store=store, config=AS_ANN).memories

    assert [memory.text for memory in found] == ["Ann plays the oboe"]


def test_a_question_about_the_person_needs_less_evidence() -> None:
    """The same words find more if the question and the facts are about the same person."""
    with facts() as store:
        by_person, other = (
            store.search(ANN, query=f"Which fruit does {who} like?", limit=1)[0].score or 0
            for who in ("she", "Bo")
        )

    assert by_person > other


def test_turns_of_a_conversation_are_about_nobody() -> None:
    """That the user or the assistant speaks in all rows is no evidence for a question."""
    said = (("user", "The gate squeaks"), ("assistant", "Oil it"), ("user", "We ate leek soup"))
    puts = [
        build_put(
            ANN,
            f"{number}",
            {"text": f"{actor}: {text}", "kind": TURN},
            provenance=Provenance("t", None, (f"{number}",), actor, actor, number, at),
        )
        for at in [datetime(2026, 1, 1, tzinfo=UTC)]
        for number, (actor, text) in enumerate(said * 3)
    ]
    with open_filled_store(*puts) as store:
        mine, plain = (
            store.search(ANN, query=query, limit=1)[0].score for query in ("my gate", "gate")
        )

    assert mine == plain
