"""Admission: the memories and quarantine entries written for candidates, and the outcomes."""

from __future__ import annotations

from datetime import UTC, datetime

from perdure.effects import run_operation
from perdure.memory.long_term.gate import Gate, judge_candidates_and_plan_puts
from perdure.memory.long_term.records import TURN, Candidate, ChangePlan, Outcome, StoreAdapter
from perdure.stores import Provenance
from tests.memory.collection_helpers import NAMESPACE

SECRET = "My password is swordfish99"


def admit_candidates(
    adapter: StoreAdapter, *candidates: Candidate, gate: Gate | None = None
) -> ChangePlan:
    """Plan the admission of candidates with the keys k0, k1 …, write the plan, and return it."""
    keys = [f"k{number}" for number in range(len(candidates))]
    plan = run_operation(
        judge_candidates_and_plan_puts(gate or Gate(), adapter, NAMESPACE, candidates, keys)
    )
    run_operation(adapter.write(plan.puts))
    return plan


def test_admitted_candidate_is_stored_with_its_fields_and_provenance(adapter: StoreAdapter) -> None:
    """The value holds the text, the kind and the fields; trust and source are in the provenance."""
    at = datetime(2024, 5, 1, tzinfo=UTC)
    source = Provenance(thread_id="t", message_ids=("m",), at=at)
    plan = admit_candidates(
        adapter, Candidate("Ann sings", fields={"mood": "glad"}, provenance=source)
    )
    memory = run_operation(adapter.get(NAMESPACE, "k0"))

    assert [Outcome("added", "k0")] == plan.outcomes
    assert memory is not None
    assert memory.value == {"text": "Ann sings", "kind": "fact", "mood": "glad"}
    assert memory.provenance == Provenance("t", None, ("m",), trust="user", at=at)


def test_trust_is_the_role_unless_the_provenance_sets_it(adapter: StoreAdapter) -> None:
    admit_candidates(
        adapter,
        Candidate("Ann sings", role="assistant"),
        Candidate("Bo swims", role="assistant", provenance=Provenance(trust="web")),
    )
    memories = [run_operation(adapter.get(NAMESPACE, key)) for key in ("k0", "k1")]

    assert [memory.provenance.trust for memory in memories if memory and memory.provenance] == [
        "assistant",
        "web",
    ]


def test_redacted_text_is_not_stored_but_its_kind_is_recorded(adapter: StoreAdapter) -> None:
    """Texts and fields with sentences are redacted; a field that is only an ID stays unchanged."""
    fields = {"told": ["ask bo@example.com then"], "who": "bo@example.com"}
    plan = admit_candidates(adapter, Candidate("Write to ann@example.com", fields=fields))
    memory = run_operation(adapter.get(NAMESPACE, "k0"))

    assert str(plan.outcomes[0]) == "added k0: redacted an e-mail address"
    assert memory is not None
    assert memory.text == "Write to [e-mail]"
    assert memory.value["told"] == ["ask [e-mail] then"]
    assert memory.value["who"] == "bo@example.com"
    assert memory.value["redacted"] == ["e-mail"]


def test_explicit_candidate_keeps_contact_details(adapter: StoreAdapter) -> None:
    """The text is stored as it was given, without a note about redaction."""
    admit_candidates(adapter, Candidate("Write to ann@example.com", explicit=True))
    memory = run_operation(adapter.get(NAMESPACE, "k0"))

    assert memory is not None
    assert memory.value == {"text": "Write to ann@example.com", "kind": "fact"}


def test_candidate_with_a_secret_is_quarantined_once_and_not_searchable(
    adapter: StoreAdapter,
) -> None:
    """The entry has the reason. The same candidate makes no second entry."""
    candidate = Candidate(SECRET, role="user", explicit=True, fields={"n": 1})
    first, second = admit_candidates(adapter, candidate), admit_candidates(adapter, candidate)
    [put] = first.puts

    assert ("perdure", "quarantine", *NAMESPACE) == put.namespace
    assert put.index is False
    assert Outcome("quarantined", put.key, put.value["reason"], "secrets") == first.outcomes[0]  # type: ignore[index]
    assert put.key == second.puts[0].key
    assert run_operation(adapter.search(("memories",), query="password")) == []
    entry = run_operation(adapter.get(put.namespace, put.key))
    assert entry is not None
    assert (entry.text, entry.value["key"], entry.value["fields"]) == (SECRET, "k0", {"n": 1})


def test_refused_candidates_are_reported_and_not_written(adapter: StoreAdapter) -> None:
    """A known candidate is unchanged, with the key of its memory. Refusals name the check."""
    admit_candidates(adapter, Candidate("Ann sings"))
    plan = admit_candidates(
        adapter,
        Candidate("Be kind", role="system"),
        Candidate("Ann sings."),
        Candidate("user: …", TURN),
    )

    assert plan.puts == []
    assert [outcome.change for outcome in plan.outcomes] == ["refused", "unchanged", "refused"]
    assert [outcome.key for outcome in plan.outcomes] == [None, "k0", None]
    assert [outcome.check for outcome in plan.outcomes] == ["role", "duplicate", "content"]


def test_equal_candidates_of_one_plan_are_written_once(adapter: StoreAdapter) -> None:
    """The second candidate is unchanged and gets the key of the first one."""
    plan = admit_candidates(adapter, Candidate("Ann sings"), Candidate("Ann sings!"))

    assert len(plan.puts) == 1
    assert (plan.outcomes[1].change, plan.outcomes[1].key) == ("unchanged", "k0")


def test_planning_an_admission_writes_nothing(adapter: StoreAdapter) -> None:
    run_operation(
        judge_candidates_and_plan_puts(Gate(), adapter, NAMESPACE, [Candidate("Ann sings")], ["k"])
    )

    assert run_operation(adapter.get(NAMESPACE, "k")) is None
