"""`use_memories(all_below=)`, and questions about the person whom all facts are about."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from perdure.errors import ConfigurationError
from perdure.memory import recall, use_memories
from perdure.memory.long_term.records import TURN, build_put
from perdure.stores import Provenance, SQLiteStore
from tests.memory.recall_helpers import ANN, AS_ANN, build_fact_put, open_filled_store

FACTS = (
    "Ann lives in Ghent",
    "Ann likes figs",
    "The user is vegetarian.",
    "Ann plays the oboe",
    "The user has two sisters.",
    "Ann works at the harbour",
)
VOICES = ("Does Ann play the oboe?", "Do I play the oboe?", "Does she play the oboe?")


def open_facts_store(**options: Any) -> SQLiteStore:
    return open_filled_store(
        *(build_fact_put(text, text) for text in FACTS), index="offline", **options
    )


def list_shown_facts(store: SQLiteStore, text: str, **options: Any) -> list[str]:
    """Return the facts that a request for a message contains, in order."""
    section = str(use_memories(store, **options)([HumanMessage(text)], AS_ANN)[0].content)
    positions = {text: section.find(f'"{text}"') for text in FACTS}
    return sorted((text for text in FACTS if positions[text] >= 0), key=positions.__getitem__)


def test_all_memories_are_shown_when_a_person_has_fewer_than_all_below() -> None:
    """The best match comes first.

    With as many memories as `all_below` or by default, only matches are shown.
    """
    with open_facts_store() as store:
        shown_below_limit = list_shown_facts(store, "Which instrument is an oboe?", all_below=7)
        shown_at_limit = list_shown_facts(store, "Which instrument is an oboe?", all_below=6)
        shown_by_default = list_shown_facts(store, "Which instrument is an oboe?")

    assert shown_below_limit[0] == "Ann plays the oboe"
    assert set(shown_below_limit) == set(FACTS)
    assert shown_at_limit == shown_by_default == ["Ann plays the oboe"]


def test_all_memories_are_shown_without_an_embedder_matches_first() -> None:
    with open_filled_store(*(build_fact_put(text, text) for text in FACTS)) as store:
        shown_facts = list_shown_facts(store, "figs", all_below=20)

    assert shown_facts[0] == "Ann likes figs"
    assert set(shown_facts) == set(FACTS)


def test_all_below_respects_the_token_budget_and_the_kinds() -> None:
    with open_facts_store() as store:
        store.put(ANN, "case", {"text": "Ann likes figs", "kind": "episode"})
        shown_within_budget = list_shown_facts(store, "figs", all_below=20, max_tokens=60)
        shown_of_unknown_kind = list_shown_facts(store, "figs", all_below=20, kinds=["thing"])
        view = use_memories(store, all_below=20)
        request = asyncio.run(view.ainvoke([HumanMessage("figs")], AS_ANN))

    assert shown_within_budget[0] == "Ann likes figs"
    assert 0 < len(shown_within_budget) < len(FACTS)
    assert shown_of_unknown_kind == []
    assert all(text in str(request[0].content) for text in FACTS)


@pytest.mark.parametrize("invalid_limit", [0, -1, 1.5, "3", True])
def test_all_below_must_be_a_positive_integer(invalid_limit: Any) -> None:
    with open_facts_store() as store, pytest.raises(ConfigurationError, match="all_below"):
        use_memories(store, all_below=invalid_limit)


@pytest.mark.parametrize("query", VOICES)
def test_question_in_any_grammatical_person_finds_the_fact(query: str) -> None:
    """The name, "the user", first and third person mean the person whom all facts are about."""
    with open_facts_store() as store:
        memories = recall(query, store=store, config=AS_ANN).memories

    assert [memory.text for memory in memories] == ["Ann plays the oboe"]


def test_question_about_the_person_scores_higher_than_about_another() -> None:
    """The same words score higher if the question and the facts are about the same person."""
    with open_facts_store() as store:
        score_about_person, score_about_other = (
            store.search(ANN, query=f"Which fruit does {who} like?", limit=1)[0].score or 0
            for who in ("she", "Bo")
        )

    assert score_about_person > score_about_other


def test_first_person_word_does_not_change_the_score_of_turns() -> None:
    """That the user or the assistant speaks in all rows is no evidence for a question."""
    messages = (("user", "The gate squeaks"), ("assistant", "Oil it"), ("user", "We ate leek soup"))
    puts = [
        build_put(
            ANN,
            f"{number}",
            {"text": f"{actor}: {text}", "kind": TURN},
            provenance=Provenance("t", None, (f"{number}",), actor, actor, number, at),
        )
        for at in [datetime(2026, 1, 1, tzinfo=UTC)]
        for number, (actor, text) in enumerate(messages * 3)
    ]
    with open_filled_store(*puts) as store:
        score_with_pronoun, score_without_pronoun = (
            store.search(ANN, query=query, limit=1)[0].score for query in ("my gate", "gate")
        )

    assert score_with_pronoun == score_without_pronoun
