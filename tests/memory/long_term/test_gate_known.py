"""The gate: candidates that the store knows already, or knew before they were deleted."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from perdure.effects import run_operation
from perdure.memory.long_term.gate import Gate, build_tombstones
from perdure.memory.long_term.records import (
    TURN,
    Candidate,
    StoreAdapter,
    Verdict,
    build_memory_value_with_previous_texts,
    build_put,
    build_removal,
)
from perdure.stores import Provenance
from tests.memory.collection_helpers import NAMESPACE, judge_candidates, judge_text, write_memory

# -- novelty


def test_known_fact_is_refused_with_the_key_of_its_memory(adapter: StoreAdapter) -> None:
    """Near synonyms count as the same words. Other statements are kept."""
    write_memory(adapter, "tea", "Ann bought green tea.")
    equal, synonym, different, negated = judge_candidates(
        Gate(),
        adapter,
        Candidate("ann bought green tea", explicit=True),
        Candidate("Ann purchased green tea"),
        Candidate("Ann bought black tea"),
        Candidate("Ann never bought green tea"),
    )

    assert (equal.action, equal.check, equal.same_as) == ("refuse", "duplicate", "tea")
    assert synonym.same_as == "tea"
    assert [different.action, negated.action] == ["keep", "keep"]


def test_equal_facts_of_one_call_are_kept_once(adapter: StoreAdapter) -> None:
    """The second one names the future key of the first."""
    candidates = [
        Candidate("Ann bought tea"),
        Candidate("Ann purchased tea."),
        Candidate("Bo sings"),
    ]
    verdicts = run_operation(Gate().judge(candidates, adapter, NAMESPACE, keys=["a", "b", "c"]))

    assert [verdict.action for verdict in verdicts] == ["keep", "refuse", "keep"]
    assert verdicts[1].same_as == "a"


def test_equal_fact_after_a_refused_one_is_kept(adapter: StoreAdapter) -> None:
    def by_user(candidate: Candidate) -> Verdict | None:
        return None if candidate.role == "user" else Verdict("refuse", "not the user's")

    by_assistant, user = judge_candidates(
        Gate([by_user]),
        adapter,
        Candidate("Ann likes tea", role="assistant"),
        Candidate("Ann likes tea"),
    )

    assert (by_assistant.action, by_assistant.reason, by_assistant.check) == (
        "refuse",
        "not the user's",
        "by_user",
    )
    assert user.action == "keep"


def test_rewording_under_the_key_of_its_memory_is_no_duplicate(adapter: StoreAdapter) -> None:
    write_memory(adapter, "tea", "Ann bought green tea")
    reworded = Candidate("Ann purchased green tea")
    first, second = (
        run_operation(Gate().judge([reworded], adapter, NAMESPACE, keys=[key]))[0]
        for key in ("tea", "new")
    )

    assert first.action == "keep"
    assert (second.action, second.same_as) == ("refuse", "tea")


def test_turns_are_never_duplicates_and_do_not_make_facts_known(adapter: StoreAdapter) -> None:
    write_memory(adapter, "t1", "Ann likes tea", TURN)

    assert judge_text(Gate(), adapter, "Ann likes tea", kind=TURN).action == "keep"
    assert judge_text(Gate(), adapter, "Ann likes tea").action == "keep"


def test_memories_of_other_namespaces_do_not_make_a_fact_known(adapter: StoreAdapter) -> None:
    """Descendant namespaces do not count either."""
    for place in (("memories", "bo"), (*NAMESPACE, "work")):
        run_operation(
            adapter.write([build_put(place, "k", {"text": "Ann likes tea", "kind": "fact"})])
        )

    assert judge_text(Gate(), adapter, "Ann likes tea").action == "keep"


def test_former_text_is_refused_unless_it_is_newer_or_explicit(adapter: StoreAdapter) -> None:
    superseded_at = datetime(2026, 5, 1, tzinfo=UTC)
    former = {
        "text": "Ann lives in Ghent",
        "until": superseded_at.isoformat(),
        "change": "superseded",
    }
    value = {"text": "Ann lives in Bruges", "kind": "fact", "formerly": [former]}
    run_operation(adapter.write([build_put(NAMESPACE, "home", value)]))

    def build_candidate(days: int, explicit: bool = False) -> Candidate:
        source = Provenance(at=superseded_at + timedelta(days=days))
        return Candidate("ann lives in Ghent.", provenance=source, explicit=explicit)

    old_verdict, later_verdict, explicit_verdict = judge_candidates(
        Gate(), adapter, build_candidate(-9)
    ) + [
        verdict
        for candidate in (build_candidate(9), build_candidate(-9, True))
        for verdict in judge_candidates(Gate(), adapter, candidate)
    ]

    assert (old_verdict.action, old_verdict.check) == ("refuse", "duplicate")
    assert "2026-05-01" in old_verdict.reason
    assert [later_verdict.action, explicit_verdict.action] == ["keep", "keep"]


def test_former_text_is_found_behind_many_nearer_memories(
    adapter: StoreAdapter,
) -> None:
    write_memory(adapter, "home", "Ann lives in Ghent")
    memory = run_operation(adapter.get(NAMESPACE, "home"))
    assert memory is not None
    value = {"text": "Bo and she share a flat by the sea", "kind": "fact"}
    put = build_put(
        NAMESPACE, "home", build_memory_value_with_previous_texts(memory, value, "superseded")
    )
    run_operation(adapter.write([put]))
    for number in range(40):
        write_memory(
            adapter, f"k{number}", f"Ann lives in Ghent {number}", TURN if number % 2 else "fact"
        )
    old_source = Provenance(at=datetime(2020, 1, 1, tzinfo=UTC))

    assert (
        judge_text(Gate(), adapter, "ann lives in GHENT.", provenance=old_source).check
        == "duplicate"
    )
    assert judge_text(Gate(), adapter, "Ann lives in Lille", provenance=old_source).action == "keep"


# -- tombstones


def test_deleted_text_is_refused_unless_it_is_explicit(adapter: StoreAdapter) -> None:
    """Former texts of the memory count too."""
    write_memory(adapter, "tea", "Ann likes tea")
    memory = run_operation(adapter.get(NAMESPACE, "tea"))
    assert memory is not None
    run_operation(
        adapter.write([build_removal(NAMESPACE, "tea"), *build_tombstones(memory, "deleted")])
    )
    verdict, explicit_verdict = judge_candidates(
        Gate(), adapter, Candidate("ann likes TEA!"), Candidate("Ann likes tea", explicit=True)
    )

    assert (verdict.action, verdict.check) == ("refuse", "tombstone")
    assert explicit_verdict.action == "keep"


def test_deleted_turn_is_not_extracted_from_its_message_again(
    adapter: StoreAdapter,
) -> None:
    """The wording does not matter. Other messages and threads are extracted."""
    source = Provenance(thread_id="t", message_ids=("m1",))
    put = build_put(NAMESPACE, "k", {"text": "user: I sing", "kind": TURN}, provenance=source)
    run_operation(adapter.write([put]))
    memory = run_operation(adapter.get(NAMESPACE, "k"))
    assert memory is not None
    run_operation(adapter.write(build_tombstones(memory, "forgotten")))
    same_message, other_thread, fact = judge_candidates(
        Gate(),
        adapter,
        Candidate("Ann: I do sing", TURN, provenance=source),
        Candidate("Ann: I do sing", TURN, provenance=Provenance("t2", message_ids=("m1",))),
        Candidate("Ann sings", provenance=source),
    )

    assert [verdict.action for verdict in (same_message, other_thread, fact)] == [
        "refuse",
        "keep",
        "keep",
    ]


def test_tombstone_contains_no_word_of_the_deleted_text(adapter: StoreAdapter) -> None:
    """The key is a hash, and no search finds the tombstone."""
    write_memory(adapter, "tea", "Ann likes oolong")
    memory = run_operation(adapter.get(NAMESPACE, "tea"))
    assert memory is not None
    puts = build_tombstones(memory, "forgotten")

    assert all("oolong" not in f"{put.key}{put.value}" for put in puts)
    assert all(put.index is False and put.ttl is None for put in puts)


def test_stored_tombstone_of_an_earlier_version_still_blocks(adapter: StoreAdapter) -> None:
    """The namespace of tombstones and the digest of a text must not change."""
    value = {"change": "deleted", "at": "2026-01-02T03:04:05+00:00", "message_ids": []}
    key = "d4ca60b91dce5d2cebfd3e515def85bb"  # of "Ann likes tea."
    adapter.store.put(("perdure", "buried", *NAMESPACE), key, value, index=False)

    assert judge_text(Gate(), adapter, "ann likes TEA").check == "tombstone"
    assert judge_text(Gate(), adapter, "ann likes coffee").action == "keep"


def test_tombstone_is_found_among_more_notes_than_one_read_returns(adapter: StoreAdapter) -> None:
    write_memory(adapter, "gone", "Ann likes oolong")
    memory = run_operation(adapter.get(NAMESPACE, "gone"))
    assert memory is not None
    [note] = build_tombstones(memory, "deleted")
    notes = [build_put(note.namespace, f"n{i}", {"n": i}, is_searched=False) for i in range(1_000)]
    run_operation(adapter.write([build_removal(NAMESPACE, "gone"), note, *notes]))
    deleted, new = judge_candidates(
        Gate(), adapter, Candidate("Ann likes oolong"), Candidate("Ann sings")
    )

    assert [deleted.check, new.check] == ["tombstone", ""]
