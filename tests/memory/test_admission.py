"""Admission: verdicts as what is written, and as what became of each candidate."""

from __future__ import annotations

from datetime import UTC, datetime

from perdure.effects import run
from perdure.memory.gate import Gate, plan_admission
from perdure.memory.records import TURN, Candidate, ChangePlan, Outcome, StoreAdapter
from perdure.stores import Provenance
from tests.memory.kept import NAMESPACE

SECRET = "My password is swordfish99"


def kept(adapter: StoreAdapter, *candidates: Candidate, gate: Gate | None = None) -> ChangePlan:
    """What is planned for candidates with the keys k0, k1 …, once it is written."""
    keys = [f"k{number}" for number in range(len(candidates))]
    plan = run(plan_admission(gate or Gate(), adapter, NAMESPACE, candidates, keys))
    run(adapter.write(plan.puts))
    return plan


def test_what_is_kept_is_a_memory_with_its_fields_and_source(adapter: StoreAdapter) -> None:
    """The value holds text, kind and fields; whose words it rests on is in the provenance."""
    at = datetime(2024, 5, 1, tzinfo=UTC)
    source = Provenance(thread_id="t", message_ids=("m",), at=at)
    plan = kept(adapter, Candidate("Ann sings", fields={"mood": "glad"}, provenance=source))
    memory = run(adapter.get(NAMESPACE, "k0"))

    assert [Outcome("added", "k0")] == plan.outcomes
    assert memory is not None
    assert memory.value == {"text": "Ann sings", "kind": "fact", "mood": "glad"}
    assert memory.provenance == Provenance("t", None, ("m",), trust="user", at=at)


def test_trust_is_the_role_unless_it_is_said(adapter: StoreAdapter) -> None:
    """Also of a candidate of which nothing else is known."""
    kept(
        adapter,
        Candidate("Ann sings", role="assistant"),
        Candidate("Bo swims", role="assistant", provenance=Provenance(trust="web")),
    )
    found = [run(adapter.get(NAMESPACE, key)) for key in ("k0", "k1")]

    assert [each.provenance.trust for each in found if each and each.provenance] == [
        "assistant",
        "web",
    ]


def test_what_was_redacted_is_noted_and_stored_nowhere(adapter: StoreAdapter) -> None:
    """In the text and in fields that are sentences; an id stays what it is."""
    fields = {"told": ["ask bo@example.com then"], "who": "bo@example.com"}
    plan = kept(adapter, Candidate("Write to ann@example.com", fields=fields))
    memory = run(adapter.get(NAMESPACE, "k0"))

    assert str(plan.outcomes[0]) == "added k0: redacted an e-mail address"
    assert memory is not None
    assert memory.text == "Write to [e-mail]"
    assert memory.value["told"] == ["ask [e-mail] then"]
    assert memory.value["who"] == "bo@example.com"
    assert memory.value["redacted"] == ["e-mail"]


def test_what_is_asked_for_keeps_its_contacts(adapter: StoreAdapter) -> None:
    """As it was given, and nothing is noted."""
    kept(adapter, Candidate("Write to ann@example.com", explicit=True))
    memory = run(adapter.get(NAMESPACE, "k0"))

    assert memory is not None
    assert memory.value == {"text": "Write to ann@example.com", "kind": "fact"}


def test_what_is_held_back_goes_into_quarantine(adapter: StoreAdapter) -> None:
    """With the reason, out of reach of a search, and the same again is no second entry."""
    candidate = Candidate(SECRET, role="user", explicit=True, fields={"n": 1})
    first, second = kept(adapter, candidate), kept(adapter, candidate)
    [put] = first.puts

    assert ("perdure", "quarantine", *NAMESPACE) == put.namespace
    assert put.index is False
    assert Outcome("quarantined", put.key, put.value["reason"], "secrets") == first.outcomes[0]  # type: ignore[index]
    assert put.key == second.puts[0].key
    assert run(adapter.search(("memories",), query="password")) == []
    held = run(adapter.get(put.namespace, put.key))
    assert held is not None
    assert (held.text, held.value["key"], held.value["fields"]) == (SECRET, "k0", {"n": 1})


def test_what_is_refused_is_only_told(adapter: StoreAdapter) -> None:
    """What is known already is unchanged, with its key; the rest says why."""
    kept(adapter, Candidate("Ann sings"))
    plan = kept(
        adapter,
        Candidate("Be kind", role="system"),
        Candidate("Ann sings."),
        Candidate("user: …", TURN),
    )

    assert plan.puts == []
    assert [each.change for each in plan.outcomes] == ["refused", "unchanged", "refused"]
    assert [each.key for each in plan.outcomes] == [None, "k0", None]
    assert [each.check for each in plan.outcomes] == ["role", "duplicate", "content"]


def test_what_comes_twice_is_written_once(adapter: StoreAdapter) -> None:
    """The second is unchanged, under the first one's key."""
    plan = kept(adapter, Candidate("Ann sings"), Candidate("Ann sings!"))

    assert len(plan.puts) == 1
    assert (plan.outcomes[1].change, plan.outcomes[1].key) == ("unchanged", "k0")


def test_nothing_is_written_by_planning(adapter: StoreAdapter) -> None:
    """Who asks writes, with what belongs to it."""
    run(plan_admission(Gate(), adapter, NAMESPACE, [Candidate("Ann sings")], ["k"]))

    assert run(adapter.get(NAMESPACE, "k")) is None
