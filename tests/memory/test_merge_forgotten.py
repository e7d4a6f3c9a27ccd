"""Memories that were forgotten here do not come back with a merge or an import."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from langgraph.store.memory import InMemoryStore

from perdure.memory import Collection
from perdure.memory.collection import Quarantine
from perdure.memory.records import NOTE_KINDS, QUARANTINE, TURN, build_notes_namespace
from perdure.stores import Provenance, SQLiteStore, TransferReport
from tests.memory.remembered import ANN, build_fact_put, iter_turn_puts
from tests.store_backends import BACKENDS

AFTER_NOTES = ("users", "ann")  # comes after the notes in the order of namespaces
Merge = Callable[[SQLiteStore, SQLiteStore], TransferReport]


def merge(here: SQLiteStore, there: SQLiteStore) -> TransferReport:
    """Merge by `import_from`."""
    return here.import_from(there)


def merge_awaited(here: SQLiteStore, there: SQLiteStore) -> TransferReport:
    """Merge by `aimport_from`."""
    return asyncio.run(here.aimport_from(there, on_unsuitable="skip"))


def merge_lines(here: SQLiteStore, there: SQLiteStore) -> TransferReport:
    """Merge by JSON Lines."""
    return here.import_lines(map(json.dumps, there.export()))


def merge_present_lines(here: SQLiteStore, there: SQLiteStore) -> TransferReport:
    """Merge by JSON Lines of the present versions."""
    return asyncio.run(here.aimport_lines(map(json.dumps, there.export(versions=False))))


MERGES = [merge, merge_awaited, merge_lines, merge_present_lines]


@pytest.fixture(params=["file", "sealed", "postgres", "postgres-sealed"])
def here(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SQLiteStore]:
    """The store into which is merged."""
    folder = tmp_path / "here"
    folder.mkdir()
    with BACKENDS[request.param](folder) as opened:
        yield opened


@pytest.fixture
def there(here: SQLiteStore, tmp_path: Path) -> Iterator[SQLiteStore]:
    """The store from which is merged; the other kind of file."""
    folder = tmp_path / "there"
    folder.mkdir()
    sealed = here._parts.records.is_encrypted
    with BACKENDS["file" if sealed else "sealed"](folder) as opened:
        yield opened


def collection(store: Any, namespace: tuple[str, ...] = ANN) -> Collection:
    """The memories of Ann."""
    return Collection(store, namespace)


def texts(store: Any, namespace: tuple[str, ...] = ANN) -> list[str]:
    """The text of each present memory."""
    return sorted(memory.text for memory in collection(store, namespace).list())


def whole(store: SQLiteStore) -> str:
    """All that an export of a store says."""
    return json.dumps([*store.export()])


@pytest.mark.parametrize("merging", MERGES)
def test_a_forgotten_memory_stays_forgotten(
    merging: Merge, here: SQLiteStore, there: SQLiteStore
) -> None:
    """It is refused each time, and named; all others come."""
    collection(there).insert("Lives in Bergen", key="home")
    collection(there).insert("Likes figs", key="likes")
    first = merging(here, there)
    collection(here).forget("home")
    collection(there).insert("Has a dog", key="dog")
    again = merging(here, there), merging(here, there)

    assert first.refused == ()
    assert [report.refused for report in again] == [((ANN, "home"),)] * 2
    assert again[0].items >= 1
    assert texts(here) == ["Has a dog", "Likes figs"]
    assert "Bergen" not in whole(here)
    assert collection(here).history("home") == []


@pytest.mark.parametrize("merging", MERGES)
def test_forgotten_here_before_the_first_merge(
    merging: Merge, here: SQLiteStore, there: SQLiteStore
) -> None:
    """The text decides, under whatever key it is there, and however it is written."""
    collection(here).insert("Lives in Bergen", key="mine")
    collection(here).forget("mine")
    collection(there).insert("lives in  Bergen.", key="theirs")
    report = merging(here, there)

    assert report.refused == ((ANN, "theirs"),)
    assert texts(here) == []


@pytest.mark.parametrize("merging", MERGES)
def test_superseded_there_after_it_was_forgotten_here(
    merging: Merge, here: SQLiteStore, there: SQLiteStore
) -> None:
    """The new version lists the forgotten text, so the whole memory is refused."""
    collection(there).insert("Lives in Bergen", key="home")
    merging(here, there)
    collection(here).forget("home")
    collection(there).supersede("home", "Lives in Oslo")
    report = merging(here, there)

    assert report.refused == ((ANN, "home"),)
    assert "Bergen" not in whole(here)
    assert texts(here) == []


@pytest.mark.parametrize("merging", MERGES)
def test_an_earlier_text_that_was_forgotten_here(
    merging: Merge, here: SQLiteStore, there: SQLiteStore
) -> None:
    """A memory that went on here and was then forgotten is refused with all its texts."""
    collection(there).insert("Lives in Bergen", key="home")
    merging(here, there)
    collection(here).supersede("home", "Lives in Oslo")
    collection(here).forget("home")
    collection(there).insert("Lives in Oslo", key="second")
    report = merging(here, there)

    assert sorted(report.refused) == [(ANN, "home"), (ANN, "second")]
    assert texts(here) == []


@pytest.mark.parametrize("merging", MERGES)
def test_turns_are_refused_by_their_message(
    merging: Merge, here: SQLiteStore, there: SQLiteStore
) -> None:
    """A turn has another text there, since it was edited, and is of the same message."""
    at = datetime(2026, 1, 1, tzinfo=UTC)
    there.batch([*iter_turn_puts("t", at, "I live in Bergen", "I like figs")])
    merging(here, there)
    collection(here).forget("t-0")
    source = Provenance("t", None, ("t-0",), "user", "user", 0, at)
    there.put(ANN, "t-0", {"text": "I live in Bergen now", "kind": TURN}, provenance=source)
    report = merging(here, there)

    assert report.refused == ((ANN, "t-0"),)
    assert texts(here) == ["I like figs"]
    assert "Bergen" not in whole(here)


@pytest.mark.parametrize("merging", MERGES)
def test_a_deleted_memory_stays_deleted(
    merging: Merge, here: SQLiteStore, there: SQLiteStore
) -> None:
    """Its past here stays; what went on there is refused."""
    collection(there).insert("Lives in Bergen", key="home")
    merging(here, there)
    collection(here).delete("home")
    same = merging(here, there)
    collection(there).supersede("home", "Lives in Oslo")
    collection(there).insert("Lives in Bergen", key="second")
    report = merging(here, there)

    assert same.refused == ()
    assert sorted(report.refused) == [(ANN, "home"), (ANN, "second")]
    assert texts(here) == []
    assert [memory.text for memory in collection(here).history("home")] == ["Lives in Bergen"]


@pytest.mark.parametrize("namespace", [ANN, AFTER_NOTES])
@pytest.mark.parametrize("merging", MERGES)
def test_what_was_asked_for_again_there_comes(
    merging: Merge, namespace: tuple[str, ...], here: SQLiteStore, there: SQLiteStore
) -> None:
    """A memory beside its own tombstone comes with it, and may change there later."""
    for key in ("old", "new"):
        collection(there, namespace).insert("Lives in Bergen", key=key)
        if key == "old":
            collection(there, namespace).forget(key)
    first = merging(here, there)
    second = merging(here, there)
    collection(there, namespace).supersede("new", "Lives in Oslo")
    third = merging(here, there)

    assert [report.refused for report in (first, second, third)] == [(), (), ()]
    assert texts(here, namespace) == ["Lives in Oslo"]


@pytest.mark.parametrize("merging", MERGES)
def test_what_was_asked_for_again_here_is_merged(
    merging: Merge, here: SQLiteStore, there: SQLiteStore
) -> None:
    """It has the key that it had; the text there is older, and names nothing that is gone."""
    collection(there).insert("Lives in Bergen", key="home")
    merging(here, there)
    collection(here).forget("home")
    collection(here).insert("Lives in Bergen", key="again")
    report = merging(here, there)

    assert report.refused == ((ANN, "home"),)
    assert texts(here) == ["Lives in Bergen"]


def test_both_have_the_tombstone(here: SQLiteStore, there: SQLiteStore) -> None:
    """Forgotten in both, at two times: the tombstones contradict each other in nothing."""
    for store in (here, there):
        collection(store).insert("Lives in Bergen", key="home")
        collection(store).forget("home")
    changed = build_notes_namespace("changed", ANN)
    for note in there.search(changed):
        there.forget(changed, key=note.key)  # counters of changes are not what is tested
    there.put(ANN, "figs", {"text": "Likes figs"})
    for merging in (merge, merge_lines):
        report = merging(here, there)
        assert report.refused == ()
    assert texts(here) == ["Likes figs"]


def test_merged_in_both_directions(here: SQLiteStore, there: SQLiteStore) -> None:
    """The tombstone comes there, where the memory stays; that brings it not back here."""
    collection(there).insert("Lives in Bergen", key="home")
    merge_awaited(here, there)
    collection(here).forget("home")
    merge_awaited(there, here)
    report = merge_awaited(here, there)

    assert report.refused == ((ANN, "home"),)
    assert texts(here) == []
    assert texts(there) == ["Lives in Bergen"]


def test_entries_in_quarantine(here: SQLiteStore, there: SQLiteStore) -> None:
    """An entry with a forgotten text is refused too; so is one that was discarded here."""
    place = build_notes_namespace(QUARANTINE, ANN)
    for key, text in (("q", "My PIN is 4711"), ("r", "Lives in Bergen")):
        value = {"text": text, "kind": "fact", "role": "user", "key": key, "fields": {}}
        value |= {"shown": text, "reason": "?", "check": "?", "at": "2026-01-01T00:00:00+00:00"}
        there.put(place, key, {**value, "explicit": False}, index=False)
    merge(here, there)
    Quarantine(here, ANN).discard("q")
    collection(here).insert("Lives in Bergen", key="home")
    collection(here).forget("home")
    report = merge(here, there)

    assert sorted(report.refused) == [(place, "q"), (place, "r")]
    assert [*here.search(place)] == []


def test_memories_of_a_scope(here: SQLiteStore, there: SQLiteStore) -> None:
    """A scope keeps its tombstones under its own prefix."""
    for name in ("acme", "other"):
        collection(there.scoped((name,))).insert("Lives in Bergen", key="home")
    merge(here, there)
    collection(here.scoped(("acme",))).forget("home")
    report = merge(here, there)

    assert report.refused == ((("acme", *ANN), "home"),)
    assert texts(here.scoped(("other",))) == ["Lives in Bergen"]


def test_items_without_a_text(here: SQLiteStore, there: SQLiteStore) -> None:
    """A profile or instructions, forgotten by their key."""
    there.put(ANN, "profile", {"name": "Ann", "home": "<Bergen>"})
    there.put(ANN, "rules", {"instructions": "Be brief, and never mention Bergen"})
    merge(here, there)
    for key in ("profile", "rules"):
        collection(here).forget(key)
    report = merge(here, there)

    assert sorted(report.refused) == [(ANN, "profile"), (ANN, "rules")]
    assert "Bergen" not in whole(here)


def test_a_store_that_is_not_perdures(here: SQLiteStore) -> None:
    """Its memories have their provenance in the value."""
    at = datetime(2026, 1, 1, tzinfo=UTC)
    here.batch([*iter_turn_puts("t", at, "I live in Bergen")])
    collection(here).forget("t-0")
    theirs = InMemoryStore()
    source = {"thread_id": "t", "message_ids": ["t-0"]}
    theirs.put(ANN, "x", {"text": "Bergen it is", "kind": TURN, "provenance": source})
    theirs.put(ANN, "y", {"text": "I like figs", "kind": TURN})
    report = here.import_from(theirs)

    assert report == TransferReport(items=1, refused=((ANN, "x"),))
    assert texts(here) == ["I like figs"]


def test_everything_forgotten_leaves_no_tombstones(here: SQLiteStore, there: SQLiteStore) -> None:
    """So it all comes again, as it is documented."""
    collection(there).insert("Lives in Bergen", key="home")
    merge(here, there)
    collection(here).forget_all()
    report = merge(here, there)

    assert report.refused == ()
    assert texts(here) == ["Lives in Bergen"]


def test_more_than_a_batch(here: SQLiteStore, there: SQLiteStore) -> None:
    """Each is named once, however many versions and batches there are."""
    count = 520
    there.batch([build_fact_put(f"k{n:03}", f"fact number {n}") for n in range(count)])
    there.batch([build_fact_put(f"k{n:03}", f"other fact number {n}") for n in range(count)])
    merge(here, there)
    for n in (0, 250, 519):
        collection(here).forget(f"k{n:03}")
    report = merge(here, there)

    assert [key for _, key in report.refused] == ["k000", "k250", "k519"]
    assert len(collection(here).list(limit=1_000)) == count - 3


def test_forgotten_while_it_is_merged(here: SQLiteStore, there: SQLiteStore) -> None:
    """A tombstone that is written after the import began counts in the next batch."""
    collection(here).insert("Lives in Bergen", key="home")
    lines = [json.dumps({"namespace": ["n"], "key": f"{n}", "value": {}}) for n in range(500)]
    late = {"namespace": list(ANN), "key": "late", "value": {"text": "Lives in Bergen"}}

    def given() -> Iterator[str]:
        yield from lines
        collection(here).forget("home")
        yield json.dumps(late)

    report = here.import_lines(given())
    assert report.refused == ((ANN, "late"),)
    assert texts(here) == []


def test_the_notes_of_memories_come_last(there: SQLiteStore) -> None:
    """An export lists an item before the tombstone of its text, in whatever namespace."""
    collection(there, AFTER_NOTES).insert("Lives in Bergen", key="home")
    collection(there, AFTER_NOTES).delete("home")
    namespaces = [tuple(line["namespace"]) for line in there.export()]
    notes = {build_notes_namespace(kind, AFTER_NOTES) for kind in NOTE_KINDS}

    assert namespaces[0] == AFTER_NOTES
    assert set(namespaces[1:]) <= notes
