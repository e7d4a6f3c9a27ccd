"""Commands that read a database do not refresh the time to live of its items."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from perdure.cli import main as _  # noqa: F401 - registers the commands
from perdure.memory import recall
from perdure.stores import VersionRetention, open_store
from tests.cli.commands import invoke

ANN = ("memories", "ann")
COMMANDS = [
    ["memories", "list", "--user", "ann"],
    ["memories", "search", "Does Ann keep bees?", "--user", "ann"],
    ["memories", "search", "bees", "--explain", "--user", "ann"],
    ["memories", "history", "bees", "--user", "ann"],
    ["memories", "add", "Ann keeps bees.", "--user", "ann"],
    ["store", "get", "memories/ann", "bees"],
    ["store", "history", "memories/ann", "bees"],
    ["store", "search", "memories/ann"],
    ["store", "search", "memories/ann", "bees"],
    ["store", "namespaces"],
    ["copy", "--from", "{db}", "--to", "{folder}/copy.db"],
    ["retain", "--idle-days", "1", "--dry-run"],
    ["retain", "--idle-days", "1", "--yes"],
    ["stats"],
]


@pytest.fixture
def expires_at(db: Path) -> datetime:
    """Store an item with a time to live, and return when it expires."""
    with open_store(str(db), ttl={"default_ttl": 60}) as store:
        store.put(ANN, "bees", {"text": "Ann keeps bees.", "kind": "fact"}, index=["text"])
    return read_expiry(db)


def read_expiry(db: Path) -> datetime:
    with open_store(str(db)) as store:
        item = store.get(ANN, "bees", refresh_ttl=False)
    assert item is not None
    assert item.expires_at is not None
    return item.expires_at


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_command_that_reads_does_not_refresh_time_to_live(
    command: list[str], db: Path, tmp_path: Path, expires_at: datetime
) -> None:
    arguments = [argument.format(db=db, folder=tmp_path) for argument in command]

    result = invoke(*arguments)

    assert result.exit_code == 0, result.output
    assert read_expiry(db) == expires_at


def test_export_and_retention_do_not_refresh_time_to_live(db: Path, expires_at: datetime) -> None:
    with open_store(str(db)) as store:
        assert [line["key"] for line in store.export()] == ["bees"]
        store.retain(VersionRetention(last=1))
        assert [item.key for item in store.find_removable()] == []

    assert read_expiry(db) == expires_at


def test_recall_refreshes_time_to_live(db: Path, expires_at: datetime) -> None:
    """An item that an agent recalls lives longer."""
    with open_store(str(db)) as store:
        recall("bees", store=store, config={"configurable": {"user_id": "ann"}})

    assert read_expiry(db) > expires_at
