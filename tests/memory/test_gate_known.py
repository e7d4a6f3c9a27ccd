"""The gate: what the store knows already, or knew before it was deleted."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from perdure.effects import run
from perdure.memory.gate import Gate, build_tombstones
from perdure.memory.records import (
    TURN,
    Candidate,
    StoreAdapter,
    Verdict,
    build_next_value,
    build_put,
    build_removal,
)
from perdure.stores import Provenance
from tests.memory.kept import NAMESPACE, judge_candidates, judge_text, write_memory

# -- novelty


def test_a_fact_that_is_known_is_refused_with_the_key_of_the_memory(adapter: StoreAdapter) -> None:
    """Letter for letter or with a near word; what says something else is kept."""
    write_memory(adapter, "tea", "Ann bought green tea.")
    known, put, other, negated = judge_candidates(
        Gate(),
        adapter,
        Candidate("ann bought green tea", explicit=True),
        Candidate("Ann purchased green tea"),
        Candidate("Ann bought black tea"),
        Candidate("Ann never bought green tea"),
    )

    assert (known.action, known.check, known.same_as) == ("refuse", "duplicate", "tea")
    assert put.same_as == "tea"
    assert [other.action, negated.action] == ["keep", "keep"]


def test_a_fact_that_comes_twice_in_one_call_is_kept_once(adapter: StoreAdapter) -> None:
    """The second is the same as the first, by the key that this is to have."""
    candidates = [
        Candidate("Ann bought tea"),
        Candidate("Ann purchased tea."),
        Candidate("Bo sings"),
    ]
    verdicts = run(Gate().judge(candidates, adapter, NAMESPACE, keys=["a", "b", "c"]))

    assert [each.action for each in verdicts] == ["keep", "refuse", "keep"]
    assert verdicts[1].same_as == "a"


def test_what_is_refused_takes_nothing_along(adapter: StoreAdapter) -> None:
    """If a check turns down the first of two that say the same, the second is kept."""

    def by_user(candidate: Candidate) -> Verdict | None:
        return None if candidate.role == "user" else Verdict("refuse", "not the user's")

    other, user = judge_candidates(
        Gate([by_user]),
        adapter,
        Candidate("Ann likes tea", role="assistant"),
        Candidate("Ann likes tea"),
    )

    assert (other.action, other.reason, other.check) == ("refuse", "not the user's", "by_user")
    assert user.action == "keep"


def test_a_memory_may_be_put_otherwise_under_its_own_key(adapter: StoreAdapter) -> None:
    """A better wording of it is no duplicate of it; under another key it is."""
    write_memory(adapter, "tea", "Ann bought green tea")
    reworded = Candidate("Ann purchased green tea")
    first, second = (
        run(Gate().judge([reworded], adapter, NAMESPACE, keys=[key]))[0] for key in ("tea", "new")
    )

    assert first.action == "keep"
    assert (second.action, second.same_as) == ("refuse", "tea")


def test_turns_may_be_said_again_and_do_not_stand_for_facts(adapter: StoreAdapter) -> None:
    """What was said twice was said twice; that it was said is not that it is known."""
    write_memory(adapter, "t1", "Ann likes tea", TURN)

    assert judge_text(Gate(), adapter, "Ann likes tea", kind=TURN).action == "keep"
    assert judge_text(Gate(), adapter, "Ann likes tea").action == "keep"


def test_other_namespaces_do_not_count(adapter: StoreAdapter) -> None:
    """Neither another user's memory nor one further down makes a fact known."""
    for place in (("memories", "bo"), (*NAMESPACE, "work")):
        run(adapter.write([build_put(place, "k", {"text": "Ann likes tea", "kind": "fact"})]))

    assert judge_text(Gate(), adapter, "Ann likes tea").action == "keep"


def test_what_was_superseded_does_not_come_back_from_an_old_thread(adapter: StoreAdapter) -> None:
    """What was said before a memory changed is no news; what is said later, or asked for, is."""
    moved = datetime(2026, 5, 1, tzinfo=UTC)
    former = {"text": "Ann lives in Ghent", "until": moved.isoformat(), "change": "superseded"}
    value = {"text": "Ann lives in Bruges", "kind": "fact", "formerly": [former]}
    run(adapter.write([build_put(NAMESPACE, "home", value)]))

    def said(days: int, explicit: bool = False) -> Candidate:
        source = Provenance(at=moved + timedelta(days=days))
        return Candidate("ann lives in Ghent.", provenance=source, explicit=explicit)

    old, later, asked = judge_candidates(Gate(), adapter, said(-9)) + [
        verdict
        for each in (said(9), said(-9, True))
        for verdict in judge_candidates(Gate(), adapter, each)
    ]

    assert (old.action, old.check) == ("refuse", "duplicate")
    assert "2026-05-01" in old.reason
    assert [later.action, asked.action] == ["keep", "keep"]


def test_what_was_superseded_is_found_behind_any_number_of_nearer_memories(
    adapter: StoreAdapter,
) -> None:
    """Facts and turns that are nearer do not hide that a memory said so before."""
    write_memory(adapter, "home", "Ann lives in Ghent")
    before = run(adapter.get(NAMESPACE, "home"))
    assert before is not None
    value = {"text": "Bo and she share a flat by the sea", "kind": "fact"}
    put = build_put(NAMESPACE, "home", build_next_value(before, value, "superseded"))
    run(adapter.write([put]))
    for number in range(40):
        write_memory(
            adapter, f"k{number}", f"Ann lives in Ghent {number}", TURN if number % 2 else "fact"
        )
    said = Provenance(at=datetime(2020, 1, 1, tzinfo=UTC))

    assert judge_text(Gate(), adapter, "ann lives in GHENT.", provenance=said).check == "duplicate"
    assert judge_text(Gate(), adapter, "Ann lives in Lille", provenance=said).action == "keep"


# -- tombstones


def test_what_was_deleted_is_not_extracted_again(adapter: StoreAdapter) -> None:
    """As it was and as it was before; who asks for it may have it back."""
    write_memory(adapter, "tea", "Ann likes tea")
    memory = run(adapter.get(NAMESPACE, "tea"))
    assert memory is not None
    run(adapter.write([build_removal(NAMESPACE, "tea"), *build_tombstones(memory, "deleted")]))
    unasked, asked = judge_candidates(
        Gate(), adapter, Candidate("ann likes TEA!"), Candidate("Ann likes tea", explicit=True)
    )

    assert (unasked.action, unasked.check) == ("refuse", "tombstone")
    assert asked.action == "keep"


def test_a_turn_that_was_deleted_is_not_extracted_from_its_message_again(
    adapter: StoreAdapter,
) -> None:
    """However it is put now; other messages, and other threads, are."""
    source = Provenance(thread_id="t", message_ids=("m1",))
    put = build_put(NAMESPACE, "k", {"text": "user: I sing", "kind": TURN}, provenance=source)
    run(adapter.write([put]))
    memory = run(adapter.get(NAMESPACE, "k"))
    assert memory is not None
    run(adapter.write(build_tombstones(memory, "forgotten")))
    again, elsewhere, fact = judge_candidates(
        Gate(),
        adapter,
        Candidate("Ann: I do sing", TURN, provenance=source),
        Candidate("Ann: I do sing", TURN, provenance=Provenance("t2", message_ids=("m1",))),
        Candidate("Ann sings", provenance=source),
    )

    assert [each.action for each in (again, elsewhere, fact)] == ["refuse", "keep", "keep"]


def test_no_word_of_what_was_deleted_is_in_its_note(adapter: StoreAdapter) -> None:
    """The note is under a hash, and is found by nobody who searches."""
    write_memory(adapter, "tea", "Ann likes oolong")
    memory = run(adapter.get(NAMESPACE, "tea"))
    assert memory is not None
    puts = build_tombstones(memory, "forgotten")

    assert all("oolong" not in f"{put.key}{put.value}" for put in puts)
    assert all(put.index is False and put.ttl is None for put in puts)


def test_a_stored_tombstone_goes_on_blocking(adapter: StoreAdapter) -> None:
    """In a file too: its place and the digest of a text stay what they are."""
    value = {"change": "deleted", "at": "2026-01-02T03:04:05+00:00", "message_ids": []}
    key = "d4ca60b91dce5d2cebfd3e515def85bb"  # of "Ann likes tea."
    adapter.store.put(("perdure", "buried", *NAMESPACE), key, value, index=False)

    assert judge_text(Gate(), adapter, "ann likes TEA").check == "tombstone"
    assert judge_text(Gate(), adapter, "ann likes coffee").action == "keep"


def test_many_tombstones_are_looked_up_in_one_batch(adapter: StoreAdapter) -> None:
    """Where there are more notes than are read at once."""
    write_memory(adapter, "gone", "Ann likes oolong")
    memory = run(adapter.get(NAMESPACE, "gone"))
    assert memory is not None
    [note] = build_tombstones(memory, "deleted")
    notes = [build_put(note.namespace, f"n{i}", {"n": i}, is_searched=False) for i in range(1_000)]
    run(adapter.write([build_removal(NAMESPACE, "gone"), note, *notes]))
    gone, new = judge_candidates(
        Gate(), adapter, Candidate("Ann likes oolong"), Candidate("Ann sings")
    )

    assert [gone.check, new.check] == ["tombstone", ""]
