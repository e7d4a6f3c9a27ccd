"""Assistants of the server as rows: their versions, who is first, and what is sealed of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from perdure.checkpointers.assistants import AssistantRow, AssistantTable
from perdure.errors import CorruptRecord
from perdure.storage.flow import fetch_rows
from tests.backends import BACKENDS
from tests.contracts.erased import SECRET, raw

Saver = Any  # a checkpointer of any kind


def content(n: int = 1) -> dict[str, Any]:
    return {"graph_id": "chat", "name": f"n{n}", "context": {"n": n}, "metadata": {}}


def counted(row: AssistantRow) -> dict[str, Any]:
    """A change that rests on what was there."""
    return content(row.content["context"]["n"] + 1)


def versions(saver: Saver, assistant_id: str = "a") -> list[tuple[int, int, bool]]:
    """The number of each, what it has, and whether it is the latest."""
    rows = asyncio.run(AssistantTable(saver).list_versions(assistant_id))
    return [
        (row.version, row.content["context"]["n"], row.latest_since is not None) for row in rows
    ]


def test_each_change_is_a_version_upon_the_latest(saver: Saver) -> None:
    table = AssistantTable(saver)

    async def course() -> list[Any]:
        made = [await table.create("a", content()), await table.create("a", content(5))]
        second = await table.add_version("a", counted)
        await table.set_latest_version("a", 1)
        third = await table.add_version("a", counted)
        return [made, second, third, await table.get("a"), await table.add_version("none", counted)]

    made, second, third, latest, none = asyncio.run(course())
    assert (made, none) == ([True, False], None)
    assert (second.version, second.content) == (2, content(2))
    assert (third.version, third.content) == (3, content(2))  # upon version 1
    assert latest == third
    assert latest.created_at < second.latest_since < third.latest_since
    assert versions(saver) == [(3, 2, True), (2, 2, False), (1, 1, False)]


def test_the_latest_versions_are_listed_newest_assistant_first(saver: Saver) -> None:
    table = AssistantTable(saver)

    async def course() -> list[AssistantRow]:
        for name in "abc":
            await table.create(name, content())
        await table.add_version("a", counted)
        await table.delete("b")
        return await table.list_assistants()

    found = asyncio.run(course())
    assert [(row.assistant_id, row.version) for row in found] == [("c", 1), ("a", 2)]
    assert versions(saver, "b") == []


def test_changes_at_once_are_versions_of_their_own(saver: Saver) -> None:
    """None is lost, and each rests on the one before; one of many creations is the first."""
    table = AssistantTable(saver)

    async def course() -> list[bool]:
        made = await asyncio.gather(*(table.create("a", content()) for _ in range(8)))
        await asyncio.gather(*(table.add_version("a", counted) for _ in range(8)))
        return made

    assert sorted(asyncio.run(course())) == [False] * 7 + [True]
    assert versions(saver) == [(n, n, n == 9) for n in range(9, 0, -1)]


def test_what_a_change_raises_leaves_all_as_it_was(saver: Saver) -> None:
    table = AssistantTable(saver)
    asyncio.run(table.create("a", content()))

    def refused(row: AssistantRow) -> dict[str, Any]:
        raise LookupError(row.assistant_id)

    with pytest.raises(LookupError, match="a"):
        asyncio.run(table.add_version("a", refused))
    assert versions(saver) == [(1, 1, True)]


@pytest.mark.parametrize("kind", ["sealed", "langgraph-encrypted", "postgres-sealed"])
def test_what_clients_gave_is_sealed(kind: str, tmp_path: Path) -> None:
    given = {
        "graph_id": "chat",
        "name": SECRET,
        "description": SECRET,
        "config": {"configurable": {SECRET: SECRET}},
        "context": {SECRET: SECRET},
        "metadata": {SECRET: SECRET},
    }
    with BACKENDS[kind](tmp_path) as saver:
        table = AssistantTable(saver)
        asyncio.run(table.create("a", given))
        asyncio.run(table.add_version("a", lambda row: row.content))

        stored = str(saver.database.read(lambda: fetch_rows("SELECT * FROM assistants")))
        assert SECRET not in stored
        assert asyncio.run(table.get("a")).content == given  # type: ignore[union-attr]
        assert SECRET.encode() not in raw(saver)


def test_a_version_belongs_to_its_row(tmp_path: Path) -> None:
    with BACKENDS["sealed"](tmp_path) as saver:
        table = AssistantTable(saver)
        asyncio.run(table.create("a", content()))
        asyncio.run(table.add_version("a", counted))
        moved = "UPDATE assistants SET content = (SELECT content FROM assistants WHERE version = 1)"
        saver.database.write(lambda: fetch_rows(moved))

        with pytest.raises(CorruptRecord):
            asyncio.run(table.get("a"))
