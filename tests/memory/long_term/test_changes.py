"""Plans: which changes of a proposal are written, given what is stored at that moment."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage

from perdure.effects import run_operation
from perdure.memory import Gate
from perdure.memory.long_term.extractors import (
    Addition,
    Batch,
    Proposal,
    Revision,
    Scope,
    TurnExtractor,
    build_turn_key,
)
from perdure.memory.long_term.memory_changes import plan_proposed_changes
from perdure.memory.long_term.records import EPISODE, FACT, TURN, StoreAdapter
from perdure.memory.thread_messages import ThreadMessage
from perdure.stores import SQLiteStore
from perdure.stores.search.text_equivalence import hash_normal_form
from tests.memory.extraction_threads import ANN, read_memories

DAYS = [datetime(2026, month, 1, tzinfo=UTC) for month in range(1, 6)]


@pytest.fixture
def scope() -> Iterator[Scope]:
    """Ann's memories, in a store of their own."""
    with SQLiteStore.open(":memory:", index=None) as store:
        yield Scope(StoreAdapter(store), ANN)


def build_batch(*messages: BaseMessage, start: int = 0) -> Batch:
    """Return messages of a thread as a batch; each was sent on the next of `DAYS`."""
    thread_messages = [
        ThreadMessage(message, message.id or "", start + position, DAYS[start + position])
        for position, message in enumerate(messages)
    ]
    return Batch("t", "c", thread_messages)


def write_proposal(proposal: Proposal, scope: Scope) -> list[tuple[str, str | None]]:
    """Write the planned changes, and return the change and the key of each outcome."""
    plan = run_operation(plan_proposed_changes(proposal, Gate(), scope))
    run_operation(scope.adapter.write(plan.puts))
    return [(outcome.change, outcome.key) for outcome in plan.outcomes]


def build_revision(batch: Batch, key: str, text: str, change: Any = "superseded") -> Revision:
    return Revision(key, change, batch.build_candidate(batch.messages, text, FACT))


def read_value(scope: Scope, key: str) -> Any:
    return scope.adapter.store.get(ANN, key).value


def test_superseded_fact_ends_with_the_turn_that_stated_it(scope: Scope) -> None:
    """Each earlier text has its messages and the day on which it ended. So has its turn."""
    cities = ("Ghent", "Bruges", "Lille")
    for position, city in enumerate(cities):
        batch = build_batch(HumanMessage(f"I live in {city}", id=city), start=position)
        turns = run_operation(TurnExtractor().propose_changes(batch, scope))
        facts = batch.build_candidate(batch.messages, f"Ann lives in {city}", FACT)
        changes = [build_revision(batch, "home", f"Ann lives in {city}")] if position else []
        added = [] if position else [Addition("home", facts)]
        write_proposal(Proposal([*turns.additions, *added], changes), scope)

    ends = dict(zip(cities, DAYS[1:3], strict=False))
    assert read_value(scope, "home")["text"] == "Ann lives in Lille"
    assert read_value(scope, "home")["formerly"] == [
        {
            "text": f"Ann lives in {city}",
            "digest": hash_normal_form(f"Ann lives in {city}"),
            "until": ends[city].isoformat(),
            "change": "superseded",
            "message_ids": [city],
        }
        for city in ("Bruges", "Ghent")
    ]
    untils = [read_value(scope, build_turn_key("t", city, 0)).get("until") for city in cities]
    assert untils == [ends["Ghent"].isoformat(), ends["Bruges"].isoformat(), None]


def test_two_superseded_facts_of_one_turn_end_that_turn_once(scope: Scope) -> None:
    """Both facts are superseded in one transaction."""
    batch = build_batch(HumanMessage("I live in Ghent and work in Aalst", id="a"))
    facts = ("home", "Ann lives in Ghent"), ("work", "Ann works in Aalst")
    added = [
        Addition(key, batch.build_candidate(batch.messages, text, FACT)) for key, text in facts
    ]
    turns = run_operation(TurnExtractor().propose_changes(batch, scope))
    write_proposal(Proposal([*turns.additions, *added]), scope)
    later = build_batch(HumanMessage("Lille it is, for both", id="b"), start=1)
    revisions = [
        build_revision(later, key, text.replace(text.split()[-1], "Lille")) for key, text in facts
    ]

    assert write_proposal(Proposal((), revisions), scope) == [
        ("superseded", "home"),
        ("superseded", "work"),
    ]
    assert read_value(scope, build_turn_key("t", "a", 0))["until"] == DAYS[1].isoformat()


def test_turn_that_states_the_new_text_does_not_end(scope: Scope) -> None:
    """An edited message supersedes a fact that was derived from its earlier text."""
    batch = build_batch(HumanMessage("I live in Ghent", id="a"))
    turns = run_operation(TurnExtractor().propose_changes(batch, scope))
    fact = Addition("home", batch.build_candidate(batch.messages, "Ann lives in Ghent", FACT))
    write_proposal(Proposal([*turns.additions, fact]), scope)
    write_proposal(Proposal((), [build_revision(batch, "home", "Ann lives in Lille")]), scope)

    assert "until" not in read_value(scope, build_turn_key("t", "a", 0))


def test_turn_with_two_source_messages_ends_with_the_fact_of_its_second_message(
    scope: Scope,
) -> None:
    """An extractor of an application may store one turn for several messages."""
    batch = build_batch(HumanMessage("Hello", id="a"), HumanMessage("I live in Ghent", id="b"))
    fact = batch.build_candidate(batch.messages[1:], "Ann lives in Ghent", FACT)
    write_proposal(Proposal([Addition("home", fact)]), scope)
    later = build_batch(HumanMessage("Now in Lille", id="c"), start=2)
    turn = Addition("turn-1", batch.build_candidate(batch.messages, "Hello from Ghent", TURN))
    write_proposal(
        Proposal([turn], [build_revision(later, "home", "Ann lives in Lille")]),
        scope,
    )

    assert read_value(scope, "turn-1")["until"] == DAYS[2].isoformat()


def test_turn_written_together_with_the_superseding_fact_ends(scope: Scope) -> None:
    """A tool stored the fact before its turn was.

    One batch has this turn and the superseding message.
    """
    batch = build_batch(HumanMessage("I live in Ghent", id="a"))
    write_proposal(
        Proposal([Addition("home", batch.build_candidate(batch.messages, "Ghent it is", FACT))]),
        scope,
    )
    both_messages = build_batch(
        HumanMessage("I live in Ghent", id="a"), HumanMessage("Now in Lille", id="b")
    )
    turns = run_operation(TurnExtractor().propose_changes(both_messages, scope))
    newer = Batch("t", "c", both_messages.messages[1:])
    write_proposal(Proposal(turns.additions, [build_revision(newer, "home", "Lille it is")]), scope)

    untils = [read_value(scope, build_turn_key("t", id, 0)).get("until") for id in "ab"]
    assert untils == [DAYS[1].isoformat(), None]


@pytest.mark.parametrize("change", ["superseded", "updated", "deleted"])
def test_words_of_assistants_and_tools_cannot_change_a_users_fact(
    change: str, scope: Scope
) -> None:
    batch = build_batch(HumanMessage("I live in Ghent", id="a"))
    fact = Addition("home", batch.build_candidate(batch.messages, "Ann lives in Ghent", FACT))
    write_proposal(Proposal([fact]), scope)
    for less_trusted in (
        AIMessage("Lille", id="b"),
        ToolMessage("Lille", id="c", tool_call_id="1"),
    ):
        revision = build_revision(
            build_batch(less_trusted, start=1), "home", "Ann lives in Lille", change
        )
        assert write_proposal(Proposal((), [revision]), scope) == [("refused", "home")]
    user_batch = build_batch(HumanMessage("Lille", id="d"), start=1)
    [(outcome_change, _)] = write_proposal(
        Proposal((), [build_revision(user_batch, "home", "Ann lives in Lille", change)]), scope
    )

    assert outcome_change == change


def test_change_to_a_missing_memory_is_refused(scope: Scope) -> None:
    batch = build_batch(HumanMessage("I live in Ghent", id="a"))

    assert write_proposal(Proposal((), [build_revision(batch, "home", "x")]), scope) == [
        ("refused", "home")
    ]
    assert read_memories(scope.adapter.store) == []


def test_episode_of_the_same_messages_is_stored_once(scope: Scope) -> None:
    """Other words for the same episode change nothing."""
    batch = build_batch(HumanMessage("Fix it", id="a"), AIMessage("Fixed", id="b"))
    for text, change in (("Ann had it fixed", "added"), ("It was fixed for Ann", "unchanged")):
        addition = Addition(text, batch.build_candidate(batch.messages, text, EPISODE))
        assert write_proposal(Proposal([addition]), scope) == [(change, "Ann had it fixed")]
