"""Plans: what is written of a proposal, against what is stored when it is written."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage

from perdure.effects import run
from perdure.memory import Gate
from perdure.memory.changes import plan_proposal
from perdure.memory.extractors import (
    Addition,
    Batch,
    Proposal,
    Revision,
    Scope,
    TurnExtractor,
    build_turn_key,
)
from perdure.memory.records import EPISODE, FACT, StoreAdapter
from perdure.memory.thread_messages import ThreadMessage
from perdure.stores import SQLiteStore
from perdure.stores.normal_form import hash_normal_form
from tests.memory.threads import ANN, read_memories

DAYS = [datetime(2026, month, 1, tzinfo=UTC) for month in range(1, 6)]


@pytest.fixture
def scope() -> Iterator[Scope]:
    """Ann's memories, in a store of their own."""
    with SQLiteStore.open(":memory:", index=None) as store:
        yield Scope(StoreAdapter(store), ANN)


def batch(*messages: BaseMessage, start: int = 0) -> Batch:
    """Messages of a thread, said on one day each."""
    placed = [
        ThreadMessage(each, each.id or "", start + place, DAYS[start + place])
        for place, each in enumerate(messages)
    ]
    return Batch("t", "c", placed)


def write(proposal: Proposal, scope: Scope) -> list[tuple[str, str | None]]:
    """Write what is planned; what became of it."""
    plan = run(plan_proposal(proposal, Gate(), scope))
    run(scope.adapter.write(plan.puts))
    return [(each.change, each.key) for each in plan.outcomes]


def revision(said: Batch, key: str, text: str, change: Any = "superseded") -> Revision:
    return Revision(key, change, said.build_candidate(said.messages, text, FACT))


def value(scope: Scope, key: str) -> Any:
    return scope.adapter.store.get(ANN, key).value


def test_what_was_superseded_is_past_as_fact_and_as_turn(scope: Scope) -> None:
    """Each earlier text has its messages and the day it ended; so has the turn that said it."""
    cities = ("Ghent", "Bruges", "Lille")
    for place, city in enumerate(cities):
        said = batch(HumanMessage(f"I live in {city}", id=city), start=place)
        turns = run(TurnExtractor().propose_changes(said, scope))
        facts = said.build_candidate(said.messages, f"Ann lives in {city}", FACT)
        changes = [revision(said, "home", f"Ann lives in {city}")] if place else []
        added = [] if place else [Addition("home", facts)]
        write(Proposal([*turns.additions, *added], changes), scope)

    ends = dict(zip(cities, DAYS[1:3], strict=False))
    assert value(scope, "home")["text"] == "Ann lives in Lille"
    assert value(scope, "home")["formerly"] == [
        {
            "text": f"Ann lives in {city}",
            "digest": hash_normal_form(f"Ann lives in {city}"),
            "until": ends[city].isoformat(),
            "change": "superseded",
            "message_ids": [city],
        }
        for city in ("Bruges", "Ghent")
    ]
    untils = [value(scope, build_turn_key("t", city, 0)).get("until") for city in cities]
    assert untils == [ends["Ghent"].isoformat(), ends["Bruges"].isoformat(), None]


def test_two_facts_of_one_turn_mark_it_once(scope: Scope) -> None:
    """Both are superseded in one transaction."""
    said = batch(HumanMessage("I live in Ghent and work in Aalst", id="a"))
    facts = ("home", "Ann lives in Ghent"), ("work", "Ann works in Aalst")
    added = [Addition(key, said.build_candidate(said.messages, text, FACT)) for key, text in facts]
    turns = run(TurnExtractor().propose_changes(said, scope))
    write(Proposal([*turns.additions, *added]), scope)
    later = batch(HumanMessage("Lille it is, for both", id="b"), start=1)
    moved = [revision(later, key, text.replace(text.split()[-1], "Lille")) for key, text in facts]

    assert write(Proposal((), moved), scope) == [("superseded", "home"), ("superseded", "work")]
    assert value(scope, build_turn_key("t", "a", 0))["until"] == DAYS[1].isoformat()


def test_the_turn_of_the_new_text_stays_present(scope: Scope) -> None:
    """An edited message supersedes what was made of it before."""
    said = batch(HumanMessage("I live in Ghent", id="a"))
    turns = run(TurnExtractor().propose_changes(said, scope))
    fact = Addition("home", said.build_candidate(said.messages, "Ann lives in Ghent", FACT))
    write(Proposal([*turns.additions, fact]), scope)
    write(Proposal((), [revision(said, "home", "Ann lives in Lille")]), scope)

    assert "until" not in value(scope, build_turn_key("t", "a", 0))


def test_a_turn_is_past_that_is_made_with_the_change(scope: Scope) -> None:
    """A tool kept the fact before any turn; one batch has its turn and what supersedes it."""
    said = batch(HumanMessage("I live in Ghent", id="a"))
    write(
        Proposal([Addition("home", said.build_candidate(said.messages, "Ghent it is", FACT))]),
        scope,
    )
    both = batch(HumanMessage("I live in Ghent", id="a"), HumanMessage("Now in Lille", id="b"))
    turns = run(TurnExtractor().propose_changes(both, scope))
    newer = Batch("t", "c", both.messages[1:])
    write(Proposal(turns.additions, [revision(newer, "home", "Lille it is")]), scope)

    untils = [value(scope, build_turn_key("t", id, 0)).get("until") for id in "ab"]
    assert untils == [DAYS[1].isoformat(), None]


@pytest.mark.parametrize("change", ["superseded", "updated", "deleted"])
def test_less_trusted_words_change_nothing(change: str, scope: Scope) -> None:
    """What rests on the user's words is not changed by a tool's or an assistant's."""
    said = batch(HumanMessage("I live in Ghent", id="a"))
    fact = Addition("home", said.build_candidate(said.messages, "Ann lives in Ghent", FACT))
    write(Proposal([fact]), scope)
    for other in (AIMessage("Lille", id="b"), ToolMessage("Lille", id="c", tool_call_id="1")):
        changed = revision(batch(other, start=1), "home", "Ann lives in Lille", change)
        assert write(Proposal((), [changed]), scope) == [("refused", "home")]
    user = batch(HumanMessage("Lille", id="d"), start=1)
    [(done, _)] = write(Proposal((), [revision(user, "home", "Ann lives in Lille", change)]), scope)

    assert done == change


def test_a_memory_that_is_gone_is_not_changed(scope: Scope) -> None:
    """A change to it is refused."""
    said = batch(HumanMessage("I live in Ghent", id="a"))

    assert write(Proposal((), [revision(said, "home", "x")]), scope) == [("refused", "home")]
    assert read_memories(scope.adapter.store) == []


def test_an_episode_of_the_same_messages_is_one(scope: Scope) -> None:
    """In whichever words it is told again."""
    said = batch(HumanMessage("Fix it", id="a"), AIMessage("Fixed", id="b"))
    for text, change in (("Ann had it fixed", "added"), ("It was fixed for Ann", "unchanged")):
        told = Addition(text, said.build_candidate(said.messages, text, EPISODE))
        assert write(Proposal([told]), scope) == [(change, "Ann had it fixed")]
