"""Notes about memories are not listed, but operations on a whole store include them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from perdure.checkpointers import open_checkpointer
from perdure.cli import main as _  # noqa: F401 - registers the commands
from perdure.graphs import chat_graph
from perdure.memory import Extraction, recall, use_memories, view
from perdure.memory.long_term.collection import Collection, Quarantine
from perdure.retention import apply
from perdure.settings import Rules
from perdure.stores import SQLiteStore, open_store
from tests.cli.commands import run

ANN: Any = {"configurable": {"user_id": "ann", "thread_id": "t"}}
PLACE = ("memories", "ann")
KINDS = {"buried", "changed", "formed", "quarantine"}


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file with a memory, a tombstone, a watermark and an entry in quarantine."""
    path = str(tmp_path / "memory.db")
    monkeypatch.setenv("PERDURE_DB", path)
    with open_store(path) as store, open_checkpointer(path) as saver:
        chat_graph(checkpointer=saver).invoke({"messages": [("user", "Ann sings.")]}, ANN)
        Extraction(saver, store).extract("t", ANN)
        collection = Collection(store)
        collection.insert("Ann keeps bees.", config=ANN)
        wasps = collection.insert("Ann keeps wasps.", config=ANN)
        collection.insert("My password is swordfish99", config=ANN)
        collection.forget(str(wasps.key), config=ANN)
    return path


@pytest.fixture
def store(db: str) -> Iterator[SQLiteStore]:
    with SQLiteStore.open(db) as opened:
        yield opened


def list_note_kinds(store: Any) -> set[str]:
    """Return the kinds of notes that a store has."""
    return {place[1] for place in store.list_namespaces(prefix=("perdure",), limit=1000)}


def check_notes(store: Any) -> None:
    """Assert that notes exist and are not listed."""
    assert list_note_kinds(store) == KINDS
    assert {place[0] for place in store.list_namespaces()} == {"memories"}
    assert [entry.text for entry in Quarantine(store, ("memories", "{user_id}")).list(ANN)]


def move_by_export(source: SQLiteStore, target: SQLiteStore) -> None:
    target.import_lines(map(json.dumps, source.export()))


def move_by_merge(source: SQLiteStore, target: SQLiteStore) -> None:
    target.import_from(source)


@pytest.mark.parametrize("move", [move_by_export, move_by_merge])
def test_export_and_merge_include_notes(
    store: SQLiteStore, tmp_path: Path, move: Callable[..., None]
) -> None:
    with SQLiteStore.open(tmp_path / "other.db") as target:
        move(store, target)

        check_notes(target)
        for kind in KINDS:
            assert len(target.search(("perdure", kind))) == len(store.search(("perdure", kind)))


def test_copy_command_includes_notes(db: str, tmp_path: Path) -> None:
    target = str(tmp_path / "copy.db")
    run("copy", "--from", db, "--to", target)

    with open_store(target) as copied:
        check_notes(copied)


def test_sizes_and_statistics_count_notes(store: SQLiteStore) -> None:
    [size] = store.namespace_sizes([("perdure",)])
    notes = store.search(("perdure",), limit=1000)

    assert size.items == len(notes) > 0
    assert store.stats().items == len(notes) + len(store.search(PLACE, limit=1000))


def test_retention_deletes_old_quarantine_entries(store: SQLiteStore, db: str) -> None:
    with open_checkpointer(db) as saver:
        apply(Rules(quarantine_days=0), saver, store)

    assert list_note_kinds(store) == KINDS - {"quarantine"}


def test_forget_all_deletes_notes(store: SQLiteStore) -> None:
    Collection(store).forget_all(config=ANN)

    assert list_note_kinds(store) == set()
    assert [*store.export()] == []


@pytest.mark.parametrize("query", ["", " ", "\t\n", "\u3000"])
def test_recall_with_a_blank_query_returns_nothing(store: SQLiteStore, query: str) -> None:
    """A store search with a blank query lists all items."""
    assert store.search(PLACE, query=query)
    assert recall(query, store=store, config=ANN).memories == []
    assert recall(query, store=store, config=ANN, min_score=0, explain=True).memories == []
    assert recall(query, store=store, config=ANN, explain=True).below_min_score == []


def test_use_memories_shows_nothing_for_a_blank_message(store: SQLiteStore) -> None:
    memory_view = view(use_memories(store=store, min_score=0))

    def show_memories(text: str) -> str:
        return str(memory_view.invoke({"messages": [HumanMessage(text)]}, ANN))

    assert "keeps bees" in show_memories("bees")
    assert "keeps bees" not in show_memories("   ")
