"""Commands that look at a database start no time to live again."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from perdure.cli import main as _  # noqa: F401 - registers the commands
from perdure.memory import recall
from perdure.stores import VersionRetention, open_store
from tests.cli.commands import invoke

ANN = ("memories", "ann")
LOOKS = [
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
    """When an item expires, which was put with a time to live."""
    with open_store(str(db), ttl={"default_ttl": 60}) as store:
        store.put(ANN, "bees", {"text": "Ann keeps bees.", "kind": "fact"}, index=["text"])
    return expiry(db)


def expiry(db: Path) -> datetime:
    with open_store(str(db)) as store:
        item = store.get(ANN, "bees", refresh_ttl=False)
    assert item is not None
    assert item.expires_at is not None
    return item.expires_at


@pytest.mark.parametrize("command", LOOKS, ids=" ".join)
def test_looking_refreshes_nothing(
    command: list[str], db: Path, tmp_path: Path, expires_at: datetime
) -> None:
    arguments = [each.format(db=db, folder=tmp_path) for each in command]

    result = invoke(*arguments)

    assert result.exit_code == 0, result.output
    assert expiry(db) == expires_at


def test_an_export_and_retention_refresh_nothing(db: Path, expires_at: datetime) -> None:
    with open_store(str(db)) as store:
        assert [line["key"] for line in store.export()] == ["bees"]
        store.retain(VersionRetention(last=1))
        assert [each.key for each in store.find_removable()] == []

    assert expiry(db) == expires_at


def test_recalling_refreshes(db: Path, expires_at: datetime) -> None:
    """The same item lives on if an agent recalls it."""
    with open_store(str(db)) as store:
        recall("bees", store=store, config={"configurable": {"user_id": "ann"}})

    assert expiry(db) > expires_at
