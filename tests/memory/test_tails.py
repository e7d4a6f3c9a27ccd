"""Tails: what was said on other threads can be recalled before memories are formed of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError
from perdure.memory.drivers import arun, run
from perdure.memory.forming.formation import Formation
from perdure.memory.forming.tails import Tails
from perdure.stores import Provenance, SQLiteStore
from tests.memory.threads import ANN, Graph, graph_of, kept, on, said_by, say, user

BO = ("memories", "bo")


class Talk:
    """A graph, its formation, and what is not yet formed of it."""

    def __init__(self, saver: SQLiteCheckpointer, store: SQLiteStore) -> None:
        self.saver, self.store = saver, store
        self.graph: Graph = graph_of(saver, answers=False)
        self.formation = Formation(saver, store)

    def say(self, thread_id: str, *texts: str, name: str = "ann") -> None:
        say(self.graph, thread_id, *texts)
        self.formation.note(thread_id, user(name))

    def tail(self, *namespaces: tuple[str, ...], config: Any = None, **options: Any) -> list[str]:
        tails = Tails(self.formation, **options)
        return said_by(run(tails.waiting(namespaces or [ANN], config)))


@pytest.fixture
def talk(file_saver: SQLiteCheckpointer, tmp_path: Path) -> Iterator[Talk]:
    with SQLiteStore.open(tmp_path / "plain.db") as store:
        yield Talk(file_saver, store)


def placed(memory: Any) -> Provenance:
    """Where a memory comes from; what waits is said to be as new as the newest of it."""
    assert memory.provenance.at is not None
    source: Provenance = replace(memory.provenance, at=None)
    return source


def test_what_waits_is_there_and_in_no_store(talk: Talk) -> None:
    """What was said and is not formed yet comes as the memories it will be, oldest first."""
    talk.say("t", "I like tea.", "I like Ghent.")
    tails = run(Tails(talk.formation).waiting([ANN]))
    before = [(each.key, each.value, placed(each)) for each in tails]
    assert kept(talk.store) == []
    talk.formation.form("t", user())
    after = [(each.key, each.value, placed(each)) for each in kept(talk.store)]

    assert sorted(before, key=lambda each: each[0]) == after
    assert [memory.text for memory in tails] == ["user: I like tea.", "user: I like Ghent."]
    assert talk.tail() == []


def test_only_what_is_not_formed_waits(talk: Talk) -> None:
    """What is formed is found in the store, so it is not among what waits."""
    talk.say("t", "I like tea.")
    talk.formation.form("t", user())
    talk.say("t", "I like Ghent.")

    assert talk.tail() == ["user: I like Ghent."]


def test_the_run_s_own_thread_is_left_out(talk: Talk) -> None:
    """The thread that asks is shown to its model anyway."""
    talk.say("t", "I like tea.")
    talk.say("u", "I like Ghent.")

    assert talk.tail(config=on("t")) == ["user: I like Ghent."]


def test_nobody_else_s_threads_are_looked_at(talk: Talk) -> None:
    """What waits belongs to a namespace, and is shown for that or a prefix of it only."""
    talk.say("t", "I like tea.")
    talk.say("u", "I like Ghent.", name="bo")

    assert talk.tail(ANN) == ["user: I like tea."]
    assert talk.tail(BO) == ["user: I like Ghent."]
    assert talk.tail(("memories",)) == ["user: I like tea.", "user: I like Ghent."]
    assert talk.tail(ANN, ("memories",)) == ["user: I like tea.", "user: I like Ghent."]
    assert talk.tail(("memories", "an")) == []


def test_the_newest_are_looked_at(talk: Talk) -> None:
    """Of many threads those where something was said last, and of them the newest messages."""
    for number in range(4):
        talk.say(f"t{number}", f"I like the number {number}.", f"I like {number} more.")

    assert talk.tail(threads=2) == [
        "user: I like the number 2.",
        "user: I like 2 more.",
        "user: I like the number 3.",
        "user: I like 3 more.",
    ]
    assert talk.tail(messages=3) == [
        "user: I like 2 more.",
        "user: I like the number 3.",
        "user: I like 3 more.",
    ]


def test_what_the_gate_will_not_keep_is_not_shown(talk: Talk) -> None:
    """Secrets are held back, contacts blotted out, and what was deleted stays away."""
    talk.say("t", "My password is hunter2-Swordfish!", "Mail ann@example.com", "I like tea.")

    tail = talk.tail()

    assert tail[-1] == "user: I like tea."
    assert "hunter2" not in str(tail)
    assert "ann@example.com" not in str(tail)


def test_a_thread_that_was_deleted_waits_for_nothing(talk: Talk) -> None:
    """A thread that is gone by now has no tail, and keeps no other from being shown."""
    talk.say("t", "I like tea.")
    talk.say("u", "I like Ghent.")
    talk.saver.delete_thread("u")

    assert talk.tail() == ["user: I like tea."]


def test_the_async_form_does_the_same(talk: Talk) -> None:
    """Awaited, what waits is the same."""
    talk.say("t", "I like tea.")

    assert said_by(asyncio.run(arun(Tails(talk.formation).waiting([ANN])))) == talk.tail()


@pytest.mark.parametrize("options", [{"threads": 0}, {"messages": "many"}])
def test_numbers_that_cannot_be_are_refused(talk: Talk, options: Any) -> None:
    """Tails with a number that makes no sense are not made."""
    with pytest.raises(ConfigurationError, match="expected a whole number"):
        Tails(talk.formation, **options)


def test_messages_say_when_they_were_said(talk: Talk) -> None:
    """A memory that waits holds from when it was said, so time cues find it."""
    at = {"create_time": "2024-05-01T10:00:00+00:00"}
    say(talk.graph, "t", HumanMessage("I like tea.", id="a", response_metadata=at))
    talk.formation.note("t", user())
    [memory] = run(Tails(talk.formation).waiting([ANN]))

    assert memory.valid_from is not None
    assert memory.valid_from.isoformat() == at["create_time"]
