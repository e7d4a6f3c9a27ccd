"""Assistants of the server in the database: versions, order and encryption."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import CorruptRecord
from perdure.run_tables.assistants import AssistantRow, AssistantTable
from perdure.storage.flow import fetch_rows
from tests.backends import BACKENDS
from tests.contracts.erased import SECRET, read_raw_bytes
from tests.server_tables import open_table

Saver = Any  # a checkpointer of any kind


def make_content(n: int = 1) -> dict[str, Any]:
    return {"graph_id": "chat", "name": f"n{n}", "context": {"n": n}, "metadata": {}}


def increment_n(row: AssistantRow) -> dict[str, Any]:
    """Return content whose `n` is one more than that of the row."""
    return make_content(row.content["context"]["n"] + 1)


def list_versions(saver: Saver, assistant_id: str = "a") -> list[tuple[int, int, bool]]:
    """Return the number of each version, its `n`, and whether it is the latest."""
    rows = asyncio.run(open_table(AssistantTable, saver).list_versions(assistant_id))
    return [
        (row.version, row.content["context"]["n"], row.latest_since is not None) for row in rows
    ]


def test_added_version_is_based_on_latest_version(saver: Saver) -> None:
    table = open_table(AssistantTable, saver)

    async def change_assistant() -> list[Any]:
        created = [
            await table.create("a", make_content()),
            await table.create("a", make_content(5)),
        ]
        second = await table.add_version("a", increment_n)
        await table.set_latest_version("a", 1)
        third = await table.add_version("a", increment_n)
        return [
            created,
            second,
            third,
            await table.get("a"),
            await table.add_version("none", increment_n),
        ]

    created, second, third, latest, unknown = asyncio.run(change_assistant())
    assert (created, unknown) == ([True, False], None)
    assert (second.version, second.content) == (2, make_content(2))
    assert (third.version, third.content) == (3, make_content(2))  # based on version 1
    assert latest == third
    assert latest.created_at < second.latest_since < third.latest_since
    assert list_versions(saver) == [(3, 2, True), (2, 2, False), (1, 1, False)]


def test_list_returns_latest_versions_newest_assistant_first(saver: Saver) -> None:
    table = open_table(AssistantTable, saver)

    async def change_and_list() -> list[AssistantRow]:
        for name in "abc":
            await table.create(name, make_content())
        await table.add_version("a", increment_n)
        await table.delete("b")
        return await table.list_assistants()

    assistants = asyncio.run(change_and_list())
    assert [(row.assistant_id, row.version) for row in assistants] == [("c", 1), ("a", 2)]
    assert list_versions(saver, "b") == []


def test_concurrent_changes_become_separate_versions(saver: Saver) -> None:
    """No change is lost, and each is based on the one before. One of several creations succeeds."""
    table = open_table(AssistantTable, saver)

    async def create_and_change_concurrently() -> list[bool]:
        created = await asyncio.gather(*(table.create("a", make_content()) for _ in range(8)))
        await asyncio.gather(*(table.add_version("a", increment_n) for _ in range(8)))
        return created

    assert sorted(asyncio.run(create_and_change_concurrently())) == [False] * 7 + [True]
    assert list_versions(saver) == [(n, n, n == 9) for n in range(9, 0, -1)]


def test_change_that_raises_adds_no_version(saver: Saver) -> None:
    table = open_table(AssistantTable, saver)
    asyncio.run(table.create("a", make_content()))

    def raise_lookup_error(row: AssistantRow) -> dict[str, Any]:
        raise LookupError(row.assistant_id)

    with pytest.raises(LookupError, match="a"):
        asyncio.run(table.add_version("a", raise_lookup_error))
    assert list_versions(saver) == [(1, 1, True)]


@pytest.mark.parametrize("kind", ["sealed", "langgraph-encrypted", "postgres-sealed"])
def test_assistant_content_is_stored_encrypted(kind: str, tmp_path: Path) -> None:
    content = {
        "graph_id": "chat",
        "name": SECRET,
        "description": SECRET,
        "config": {"configurable": {SECRET: SECRET}},
        "context": {SECRET: SECRET},
        "metadata": {SECRET: SECRET},
    }
    with BACKENDS[kind](tmp_path) as saver:
        table = open_table(AssistantTable, saver)
        asyncio.run(table.create("a", content))
        asyncio.run(table.add_version("a", lambda row: row.content))

        stored = str(saver.database.read(lambda: fetch_rows("SELECT * FROM assistants")))
        assert SECRET not in stored
        assert asyncio.run(table.get("a")).content == content  # type: ignore[union-attr]
        assert SECRET.encode() not in read_raw_bytes(saver)


def test_content_moved_from_another_version_is_refused_as_corrupt(tmp_path: Path) -> None:
    with BACKENDS["sealed"](tmp_path) as saver:
        table = open_table(AssistantTable, saver)
        asyncio.run(table.create("a", make_content()))
        asyncio.run(table.add_version("a", increment_n))
        move_content = (
            "UPDATE assistants SET content = (SELECT content FROM assistants WHERE version = 1)"
        )
        saver.database.write(lambda: fetch_rows(move_content))

        with pytest.raises(CorruptRecord):
            asyncio.run(table.get("a"))
