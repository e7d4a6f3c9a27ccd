"""Forgotten memories do not come back by a merge or an import."""

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
from perdure.memory.long_term.collection import Quarantine
from perdure.memory.long_term.records import (
    NOTE_KINDS,
    QUARANTINE,
    TURN,
    build_namespace_of_notes_about_memories,
)
from perdure.stores import Provenance, SQLiteStore, TransferReport
from tests.memory.recall_helpers import ANN, build_fact_put, iter_turn_puts
from tests.store_backends import BACKENDS

AFTER_NOTES = ("users", "ann")  # comes after the notes in the order of namespaces
Merge = Callable[[SQLiteStore, SQLiteStore], TransferReport]


def merge(target: SQLiteStore, source: SQLiteStore) -> TransferReport:
    """Merge with `import_from`."""
    return target.import_from(source)


def merge_async(target: SQLiteStore, source: SQLiteStore) -> TransferReport:
    """Merge with `aimport_from`."""
    return asyncio.run(target.aimport_from(source, on_unsuitable="skip"))


def merge_lines(target: SQLiteStore, source: SQLiteStore) -> TransferReport:
    """Merge with JSON Lines."""
    return target.import_lines(map(json.dumps, source.export()))


def merge_present_lines(target: SQLiteStore, source: SQLiteStore) -> TransferReport:
    """Merge with JSON Lines of the present versions."""
    return asyncio.run(target.aimport_lines(map(json.dumps, source.export(versions=False))))


MERGES = [merge, merge_async, merge_lines, merge_present_lines]


@pytest.fixture(params=["file", "sealed", "postgres", "postgres-sealed"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SQLiteStore]:
    """The store into which the tests merge."""
    folder = tmp_path / "here"
    folder.mkdir()
    with BACKENDS[request.param](folder) as opened:
        yield opened


@pytest.fixture
def source(target: SQLiteStore, tmp_path: Path) -> Iterator[SQLiteStore]:
    """The store from which the tests merge. It is encrypted if `target` is not."""
    folder = tmp_path / "there"
    folder.mkdir()
    sealed = target._parts.records.is_encrypted
    with BACKENDS["file" if sealed else "sealed"](folder) as opened:
        yield opened


def open_collection(store: Any, namespace: tuple[str, ...] = ANN) -> Collection:
    """Return a collection of Ann's memories."""
    return Collection(store, namespace)


def list_texts(store: Any, namespace: tuple[str, ...] = ANN) -> list[str]:
    """Return the text of each present memory, sorted."""
    return sorted(memory.text for memory in open_collection(store, namespace).list())


def export_as_text(store: SQLiteStore) -> str:
    """Return an export of a store as text."""
    return json.dumps([*store.export()])


@pytest.mark.parametrize("merge_stores", MERGES)
def test_forgotten_memory_is_refused_and_named_by_each_merge(
    merge_stores: Merge, target: SQLiteStore, source: SQLiteStore
) -> None:
    """All other memories are merged."""
    open_collection(source).insert("Lives in Bergen", key="home")
    open_collection(source).insert("Likes figs", key="likes")
    first = merge_stores(target, source)
    open_collection(target).forget("home")
    open_collection(source).insert("Has a dog", key="dog")
    later_reports = merge_stores(target, source), merge_stores(target, source)

    assert first.refused == ()
    assert [report.refused for report in later_reports] == [((ANN, "home"),)] * 2
    assert later_reports[0].items >= 1
    assert list_texts(target) == ["Has a dog", "Likes figs"]
    assert "Bergen" not in export_as_text(target)
    assert open_collection(target).history("home") == []


@pytest.mark.parametrize("merge_stores", MERGES)
def test_memory_with_a_forgotten_text_is_refused_under_any_key(
    merge_stores: Merge, target: SQLiteStore, source: SQLiteStore
) -> None:
    """Case, spaces and punctuation do not matter."""
    open_collection(target).insert("Lives in Bergen", key="mine")
    open_collection(target).forget("mine")
    open_collection(source).insert("lives in  Bergen.", key="theirs")
    report = merge_stores(target, source)

    assert report.refused == ((ANN, "theirs"),)
    assert list_texts(target) == []


@pytest.mark.parametrize("merge_stores", MERGES)
def test_memory_superseded_in_the_source_after_it_was_forgotten_is_refused(
    merge_stores: Merge, target: SQLiteStore, source: SQLiteStore
) -> None:
    """The new version lists the forgotten text, so the whole memory is refused."""
    open_collection(source).insert("Lives in Bergen", key="home")
    merge_stores(target, source)
    open_collection(target).forget("home")
    open_collection(source).supersede("home", "Lives in Oslo")
    report = merge_stores(target, source)

    assert report.refused == ((ANN, "home"),)
    assert "Bergen" not in export_as_text(target)
    assert list_texts(target) == []


@pytest.mark.parametrize("merge_stores", MERGES)
def test_memory_with_a_forgotten_former_text_is_refused(
    merge_stores: Merge, target: SQLiteStore, source: SQLiteStore
) -> None:
    """The memory was superseded and then forgotten in the target."""
    open_collection(source).insert("Lives in Bergen", key="home")
    merge_stores(target, source)
    open_collection(target).supersede("home", "Lives in Oslo")
    open_collection(target).forget("home")
    open_collection(source).insert("Lives in Oslo", key="second")
    report = merge_stores(target, source)

    assert sorted(report.refused) == [(ANN, "home"), (ANN, "second")]
    assert list_texts(target) == []


@pytest.mark.parametrize("merge_stores", MERGES)
def test_turn_of_a_forgotten_message_is_refused_after_an_edit(
    merge_stores: Merge, target: SQLiteStore, source: SQLiteStore
) -> None:
    """The turn has another text in the source, and belongs to the same message."""
    at = datetime(2026, 1, 1, tzinfo=UTC)
    source.batch([*iter_turn_puts("t", at, "I live in Bergen", "I like figs")])
    merge_stores(target, source)
    open_collection(target).forget("t-0")
    provenance = Provenance("t", None, ("t-0",), "user", "user", 0, at)
    source.put(ANN, "t-0", {"text": "I live in Bergen now", "kind": TURN}, provenance=provenance)
    report = merge_stores(target, source)

    assert report.refused == ((ANN, "t-0"),)
    assert list_texts(target) == ["I like figs"]
    assert "Bergen" not in export_as_text(target)


@pytest.mark.parametrize("merge_stores", MERGES)
def test_deleted_memory_is_refused_and_keeps_its_past(
    merge_stores: Merge, target: SQLiteStore, source: SQLiteStore
) -> None:
    open_collection(source).insert("Lives in Bergen", key="home")
    merge_stores(target, source)
    open_collection(target).delete("home")
    same = merge_stores(target, source)
    open_collection(source).supersede("home", "Lives in Oslo")
    open_collection(source).insert("Lives in Bergen", key="second")
    report = merge_stores(target, source)

    assert same.refused == ()
    assert sorted(report.refused) == [(ANN, "home"), (ANN, "second")]
    assert list_texts(target) == []
    assert [memory.text for memory in open_collection(target).history("home")] == [
        "Lives in Bergen"
    ]


@pytest.mark.parametrize("namespace", [ANN, AFTER_NOTES])
@pytest.mark.parametrize("merge_stores", MERGES)
def test_memory_inserted_again_in_the_source_is_merged(
    merge_stores: Merge, namespace: tuple[str, ...], target: SQLiteStore, source: SQLiteStore
) -> None:
    """The memory comes with its own tombstone, and may change in the source later."""
    for key in ("old", "new"):
        open_collection(source, namespace).insert("Lives in Bergen", key=key)
        if key == "old":
            open_collection(source, namespace).forget(key)
    first = merge_stores(target, source)
    second = merge_stores(target, source)
    open_collection(source, namespace).supersede("new", "Lives in Oslo")
    third = merge_stores(target, source)

    assert [report.refused for report in (first, second, third)] == [(), (), ()]
    assert list_texts(target, namespace) == ["Lives in Oslo"]


@pytest.mark.parametrize("merge_stores", MERGES)
def test_memory_inserted_again_in_the_target_stays_and_the_old_key_is_refused(
    merge_stores: Merge, target: SQLiteStore, source: SQLiteStore
) -> None:
    open_collection(source).insert("Lives in Bergen", key="home")
    merge_stores(target, source)
    open_collection(target).forget("home")
    open_collection(target).insert("Lives in Bergen", key="again")
    report = merge_stores(target, source)

    assert report.refused == ((ANN, "home"),)
    assert list_texts(target) == ["Lives in Bergen"]


def test_equal_tombstones_of_both_stores_do_not_conflict(
    target: SQLiteStore, source: SQLiteStore
) -> None:
    for store in (target, source):
        open_collection(store).insert("Lives in Bergen", key="home")
        open_collection(store).forget("home")
    changed = build_namespace_of_notes_about_memories("changed", ANN)
    for note in source.search(changed):
        source.forget(changed, key=note.key)  # the counters of changes are not under test
    source.put(ANN, "figs", {"text": "Likes figs"})
    for merge_stores in (merge, merge_lines):
        report = merge_stores(target, source)
        assert report.refused == ()
    assert list_texts(target) == ["Likes figs"]


def test_tombstone_merged_into_the_source_does_not_restore_the_memory(
    target: SQLiteStore, source: SQLiteStore
) -> None:
    """The memory stays in the source."""
    open_collection(source).insert("Lives in Bergen", key="home")
    merge_async(target, source)
    open_collection(target).forget("home")
    merge_async(source, target)
    report = merge_async(target, source)

    assert report.refused == ((ANN, "home"),)
    assert list_texts(target) == []
    assert list_texts(source) == ["Lives in Bergen"]


def test_quarantine_entries_with_a_forgotten_text_are_refused(
    target: SQLiteStore, source: SQLiteStore
) -> None:
    """Entries that were discarded in the target are refused too."""
    namespace = build_namespace_of_notes_about_memories(QUARANTINE, ANN)
    for key, text in (("q", "My PIN is 4711"), ("r", "Lives in Bergen")):
        value = {"text": text, "kind": "fact", "role": "user", "key": key, "fields": {}}
        value |= {"shown": text, "reason": "?", "check": "?", "at": "2026-01-01T00:00:00+00:00"}
        source.put(namespace, key, {**value, "explicit": False}, index=False)
    merge(target, source)
    Quarantine(target, ANN).discard("q")
    open_collection(target).insert("Lives in Bergen", key="home")
    open_collection(target).forget("home")
    report = merge(target, source)

    assert sorted(report.refused) == [(namespace, "q"), (namespace, "r")]
    assert [*target.search(namespace)] == []


def test_scope_refuses_memories_by_its_own_tombstones(
    target: SQLiteStore, source: SQLiteStore
) -> None:
    for name in ("acme", "other"):
        open_collection(source.scoped((name,))).insert("Lives in Bergen", key="home")
    merge(target, source)
    open_collection(target.scoped(("acme",))).forget("home")
    report = merge(target, source)

    assert report.refused == ((("acme", *ANN), "home"),)
    assert list_texts(target.scoped(("other",))) == ["Lives in Bergen"]


def test_forgotten_items_without_a_text_are_refused_by_key(
    target: SQLiteStore, source: SQLiteStore
) -> None:
    """A profile and instructions are such items."""
    source.put(ANN, "profile", {"name": "Ann", "home": "<Bergen>"})
    source.put(ANN, "rules", {"instructions": "Be brief, and never mention Bergen"})
    merge(target, source)
    for key in ("profile", "rules"):
        open_collection(target).forget(key)
    report = merge(target, source)

    assert sorted(report.refused) == [(ANN, "profile"), (ANN, "rules")]
    assert "Bergen" not in export_as_text(target)


def test_merge_from_a_langgraph_store_refuses_forgotten_turns(target: SQLiteStore) -> None:
    """Its memories have their provenance in the value."""
    at = datetime(2026, 1, 1, tzinfo=UTC)
    target.batch([*iter_turn_puts("t", at, "I live in Bergen")])
    open_collection(target).forget("t-0")
    langgraph_store = InMemoryStore()
    provenance = {"thread_id": "t", "message_ids": ["t-0"]}
    langgraph_store.put(ANN, "x", {"text": "Bergen it is", "kind": TURN, "provenance": provenance})
    langgraph_store.put(ANN, "y", {"text": "I like figs", "kind": TURN})
    report = target.import_from(langgraph_store)

    assert report == TransferReport(items=1, refused=((ANN, "x"),))
    assert list_texts(target) == ["I like figs"]


def test_memories_come_back_by_a_merge_after_forget_all(
    target: SQLiteStore, source: SQLiteStore
) -> None:
    """Forgetting everything leaves no tombstones, as documented."""
    open_collection(source).insert("Lives in Bergen", key="home")
    merge(target, source)
    open_collection(target).forget_all()
    report = merge(target, source)

    assert report.refused == ()
    assert list_texts(target) == ["Lives in Bergen"]


def test_refused_memories_are_named_once_across_batches(
    target: SQLiteStore, source: SQLiteStore
) -> None:
    count = 520
    source.batch([build_fact_put(f"k{n:03}", f"fact number {n}") for n in range(count)])
    source.batch([build_fact_put(f"k{n:03}", f"other fact number {n}") for n in range(count)])
    merge(target, source)
    for n in (0, 250, 519):
        open_collection(target).forget(f"k{n:03}")
    report = merge(target, source)

    assert [key for _, key in report.refused] == ["k000", "k250", "k519"]
    assert len(open_collection(target).list(limit=1_000)) == count - 3


def test_tombstone_written_during_an_import_counts_in_the_next_batch(
    target: SQLiteStore, source: SQLiteStore
) -> None:
    open_collection(target).insert("Lives in Bergen", key="home")
    lines = [json.dumps({"namespace": ["n"], "key": f"{n}", "value": {}}) for n in range(500)]
    late_line = {"namespace": list(ANN), "key": "late", "value": {"text": "Lives in Bergen"}}

    def read_lines() -> Iterator[str]:
        yield from lines
        open_collection(target).forget("home")
        yield json.dumps(late_line)

    report = target.import_lines(read_lines())
    assert report.refused == ((ANN, "late"),)
    assert list_texts(target) == []


def test_export_lists_tombstones_after_the_items_of_their_text(source: SQLiteStore) -> None:
    """The order is the same for any namespace."""
    open_collection(source, AFTER_NOTES).insert("Lives in Bergen", key="home")
    open_collection(source, AFTER_NOTES).delete("home")
    namespaces = [tuple(line["namespace"]) for line in source.export()]
    notes = {build_namespace_of_notes_about_memories(kind, AFTER_NOTES) for kind in NOTE_KINDS}

    assert namespaces[0] == AFTER_NOTES
    assert set(namespaces[1:]) <= notes
