"""What a process keeps of a thread is never taken for what the thread is."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.base import empty_checkpoint

from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.checkpointers.address import Address
from perdure.checkpointers.put import CheckpointPut, TaskWrites
from perdure.storage.flow import Stale, rows_of
from tests.backends import Place
from tests.contracts.puts import at, listed, put, uid_of, values_at

TABLES = ("threads", "namespaces", "logs", "items", "checkpoints", "writes", "tags")
PUT = """
import sys
from perdure.checkpointers import SQLiteCheckpointer
from tests.contracts.puts import at, put
with SQLiteCheckpointer.open(sys.argv[1]) as saver:
    if sys.argv[2] == "put":
        put(saver, {"n": 2}, at(uid="one"), uid="two")
    else:
        saver.put_writes(at(uid="one"), [("n", 7)], "task")
"""


@pytest.fixture
def savers(place: Place) -> Iterator[tuple[SQLiteCheckpointer, SQLiteCheckpointer]]:
    """Two checkpointers on one database, each with what it keeps."""
    with place.saver() as one, place.saver() as other:
        yield one, other


def said(*texts: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(text, id=text) for text in texts]}


def rows(saver: SQLiteCheckpointer) -> list[Any]:
    """All that is in the tables of a database."""

    def read(table: str) -> Any:
        return saver.database.read(lambda: rows_of(f"SELECT * FROM {table}"))

    return [sorted(map(repr, read(table))) for table in TABLES]


def planned(saver: SQLiteCheckpointer, uid: str, upon: str, values: dict[str, Any]) -> Any:
    """A put of which only the plan is made."""
    checkpoint = empty_checkpoint()
    checkpoint["id"], checkpoint["channel_values"] = uid, values
    checkpoint["channel_versions"] = dict.fromkeys(values, 9)
    metadata = {"source": "loop", "step": 1, "user_id": "ann"}
    asked = CheckpointPut(
        Address("t", "", upon), checkpoint, metadata, checkpoint["channel_versions"]
    )
    found = saver._writer.at_hand(asked)
    assert found is not None
    return found


CHANGES: dict[str, Callable[[SQLiteCheckpointer], object]] = {
    "put": lambda other: put(other, said("a", "c"), at(uid="two"), uid="x"),
    "rewind": lambda other: other.rewind("t", "one"),
    "prune": lambda other: other.retain(Retention(last=1)),
    "erase": lambda other: other.erase("t", ["b"]),
    "delete": lambda other: other.delete_thread("t"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_stale_put_leaves_no_row(
    savers: tuple[SQLiteCheckpointer, SQLiteCheckpointer], change: str
) -> None:
    """Its whole transaction fails, with items, tags and rows of tasks; put again, it is there."""
    one, other = savers
    put(one, said("a"), uid="one")
    put(one, said("a", "b"), at(uid="one"), uid="two")
    stale = planned(one, "three", "two", said("a", "b", "new"))
    CHANGES[change](other)
    before = rows(one)
    with pytest.raises(Stale):
        one.database.write(stale.flow)

    assert rows(one) == before
    put(one, said("a", "b", "new"), at(uid="two"), uid="three")
    assert values_at(one, at(uid="three")) == values_at(other, at(uid="three"))
    assert values_at(other, at(uid="three")) == said("a", "b", "new")


@pytest.mark.parametrize("change", ["prune", "erase", "delete"])
def test_stale_writes_of_a_task_leave_no_row(
    savers: tuple[SQLiteCheckpointer, SQLiteCheckpointer], change: str
) -> None:
    """Once something of the thread was removed, what they point to may be gone."""
    one, other = savers
    put(one, said("a"), uid="one")
    put(one, said("a", "b"), at(uid="one"), uid="two")
    asked = TaskWrites(Address("t", "", "two"), "task", "", [("messages", ["x"])])
    stale = one._writer.at_hand(asked)
    assert stale is not None
    CHANGES[change](other)
    before = rows(one)
    with pytest.raises(Stale):
        one.database.write(stale.flow)

    assert rows(one) == before


def test_puts_that_were_planned_upon_a_stale_one_fail_with_it(
    savers: tuple[SQLiteCheckpointer, SQLiteCheckpointer],
) -> None:
    """Also if the other process has put as many: the place in order alone tells nothing."""
    one, other = savers
    put(one, said("a"), uid="one")
    put(one, {"n": 1}, ns="sub", uid="s1")
    put(one, {"n": 2}, at(ns="sub", uid="s1"), ns="sub", uid="s2")
    first = planned(one, "two", "one", said("a", "b"))
    checkpoint = empty_checkpoint()
    checkpoint["id"], checkpoint["channel_values"] = "s3", {"n": 3}
    checkpoint["channel_versions"] = {"n": 3}
    second = one._writer.at_hand(CheckpointPut(Address("t", "sub", "s2"), checkpoint, {}, {"n": 3}))
    assert second is not None
    put(other, said("a", "c"), at(uid="one"), uid="x")
    for each in (first, second):
        with pytest.raises(Stale):
            one.database.write(each.flow)

    assert listed(one, at()) == ["x", "one"]
    assert listed(one, at(ns="sub")) == ["s2", "s1"]


SEEN: dict[str, Callable[[SQLiteCheckpointer], object]] = {
    "put": lambda other: put(other, {"n": 2}, at(uid="one"), uid="two"),
    "writes": lambda other: other.put_writes(at(uid="one"), [("n", 7)], "task"),
    "rewind": lambda other: other.rewind("t", "zero"),
    "delete": lambda other: other.delete_thread("t"),
}


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("change", SEEN)
@pytest.mark.parametrize("by", ["itself", "another"])
def test_a_kept_head_is_not_read_once_another_wrote(
    savers: tuple[SQLiteCheckpointer, SQLiteCheckpointer], by: str, change: str, awaited: bool
) -> None:
    """Another checkpointer of the process, or this one by another way than a put."""
    one, other = savers

    def get() -> Any:
        return asyncio.run(one.aget_tuple(at())) if awaited else one.get_tuple(at())

    put(one, {"n": 0}, uid="zero")
    put(one, {"n": 1}, at(uid="zero"), uid="one")
    first = get()
    SEEN[change](one if by == "itself" else other)
    found, fresh = get(), other.get_tuple(at())

    assert uid_of(first.config) == "one"
    assert found == fresh
    assert found != first


@pytest.mark.parametrize("change", ["put", "writes"])
def test_a_kept_head_is_not_read_once_another_process_wrote(
    file_saver: SQLiteCheckpointer, change: str
) -> None:
    """SQLite itself tells of commits of other processes."""
    put(file_saver, {"n": 0}, uid="zero")
    put(file_saver, {"n": 1}, at(uid="zero"), uid="one")
    first = file_saver.get_tuple(at())
    subprocess.run([sys.executable, "-c", PUT, file_saver.database.path, change], check=True)
    found = file_saver.get_tuple(at())

    assert first is not None
    assert found is not None
    assert (uid_of(found.config), found.pending_writes) == (
        ("two", []) if change == "put" else ("one", [("task", "n", 7)])
    )


def test_writes_that_came_before_their_checkpoint_are_read(
    savers: tuple[SQLiteCheckpointer, SQLiteCheckpointer],
) -> None:
    """A task may be done before its checkpoint is stored."""
    one, _ = savers
    put(one, {"n": 0}, uid="zero")
    one.put_writes(at(uid="one"), [("n", 7)], "early")
    put(one, {"n": 1}, at(uid="zero"), uid="one")
    one.put_writes(at(uid="one"), [("n", 8)], "late")
    found = one.get_tuple(at())

    assert found is not None
    assert found.pending_writes == [("early", "n", 7), ("late", "n", 8)]


def test_what_is_read_from_memory_is_nobody_elses(file_saver: SQLiteCheckpointer) -> None:
    """A caller may change what it was given."""
    put(file_saver, said("a"), uid="one")
    put(file_saver, said("a", "b"), at(uid="one"), uid="two")
    file_saver.put_writes(at(uid="two"), [("messages", ["x"])], "task")
    first = file_saver.get_tuple(at())
    assert first is not None
    first.checkpoint["channel_values"]["messages"].clear()
    first.checkpoint["channel_versions"].clear()
    first.metadata["source"] = "update"
    assert first.pending_writes is not None
    first.pending_writes[0][2].append("y")
    again = file_saver.get_tuple(at())

    assert again is not None
    assert again.checkpoint["channel_values"] == said("a", "b")
    assert again.checkpoint["channel_versions"] != {}
    assert again.metadata["source"] == "loop"
    assert again.pending_writes == [("task", "messages", ["x"])]


def test_a_checkpoint_that_was_put_again_is_read_as_it_is(file_saver: SQLiteCheckpointer) -> None:
    """Under the same id, upon the same parent, with other values."""
    put(file_saver, said("a"), uid="one")
    put(file_saver, said("a", "b"), at(uid="one"), uid="two")
    put(file_saver, said("a", "c"), at(uid="one"), uid="two")

    assert values_at(file_saver, at()) == said("a", "c")
    put(file_saver, said("a", "c", "d"), at(uid="two"), uid="three")
    assert values_at(file_saver, at()) == said("a", "c", "d")


def test_a_plan_that_fails_half_way_leaves_nothing_behind(
    file_saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions that it gave to items are not taken for those of stored ones."""
    put(file_saver, said("a"), uid="one")
    put(file_saver, said("a", "b"), at(uid="one"), uid="two")
    with monkeypatch.context() as patched:
        patched.setattr(file_saver._writer, "_row", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            put(file_saver, said("a", "b", "c"), at(uid="two"), uid="three")
    put(file_saver, said("a", "b", "c", "d"), at(uid="two"), uid="three")
    with SQLiteCheckpointer.open(file_saver.database.path) as fresh:
        found = values_at(fresh, at())

    assert found == said("a", "b", "c", "d")


def test_a_put_that_is_cancelled(file_saver: SQLiteCheckpointer) -> None:
    """Before its turn in the writing thread it leaves nothing, and the next goes on."""

    async def course() -> None:
        with file_saver.database._connected().writer.lock:  # type: ignore[attr-defined]
            tasks = [asyncio.create_task(_aput(file_saver, text)) for text in ("b", "c")]
            await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await _aput(file_saver, "d")

    put(file_saver, said("a"), uid="a")
    put(file_saver, said("a"), at(uid="a"), uid="a2")
    asyncio.run(course())
    found = values_at(file_saver, at())
    with SQLiteCheckpointer.open(file_saver.database.path) as fresh:
        assert values_at(fresh, at()) == found
    assert found == said("a", "d")


async def _aput(saver: SQLiteCheckpointer, text: str) -> None:
    checkpoint = empty_checkpoint()
    checkpoint["id"], checkpoint["channel_values"] = text, said("a", text)
    checkpoint["channel_versions"] = {"messages": text}
    await saver.aput(at(uid="a2"), checkpoint, {"source": "loop", "step": 1}, {"messages": text})
