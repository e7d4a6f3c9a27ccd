"""The first put of a thread or a namespace is planned by its caller, and may come to nothing."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.address import Address
from perdure.checkpointers.put import TaskWrites
from perdure.errors import StorageError
from perdure.storage.flow import Flow, Statement, fetch_rows
from perdure.storage.sqlite_writer import _EpochRequest
from tests.contracts.puts import config_at, list_checkpoint_ids, put, read_channel_values
from tests.contracts.test_kept_heads import aput, handed_in, held, said

Savers = tuple[SQLiteCheckpointer, SQLiteCheckpointer]


@pytest.fixture
def files(tmp_path: Path) -> Any:
    """Two checkpointers on one file, of which the second stands for another process."""
    path = tmp_path / "x.db"
    with SQLiteCheckpointer.open(path) as one, SQLiteCheckpointer.open(path) as other:
        yield one, other


def fresh(saver: SQLiteCheckpointer) -> SQLiteCheckpointer:
    """What the file says."""
    return SQLiteCheckpointer.open(saver.database.path, read_only=True)


@pytest.mark.parametrize("kind", ["stale", "cancelled"])
def test_writes_at_a_namespace_that_was_only_planned(files: Savers, kind: str) -> None:
    """They are stored where the put that came to be has made the namespace."""
    one, other = files
    put(one, {"n": 1}, uid="a1")
    if kind == "stale":
        put(other, {"n": 2}, config_at(uid="a1"), uid="a2")

    async def course() -> None:
        with held(one):
            (first,) = await handed_in(aput(one, "b1", {"n": 3}, None, ns="sub"))
            if kind == "cancelled":
                first.cancel()
            writes = one.aput_writes(config_at(ns="sub", uid="b1"), [("n", 99)], "task")
            tasks = [first, *await handed_in(writes)]
        await asyncio.gather(*tasks, return_exceptions=True)
        await tasks[1]

    asyncio.run(course())
    if kind == "cancelled":
        put(one, {"n": 3}, ns="sub", uid="b1")
    with fresh(one) as reader:
        for saver in (one, other, reader):
            found = saver.get_tuple(config_at(ns="sub"))
            assert found is not None
            assert found.pending_writes == [("task", "n", 99)]


def test_two_make_one_thread(files: Savers) -> None:
    one, other = files
    put(one, {"n": 0}, thread="before")  # both have keys to give
    put(other, {"n": 0}, thread="before too")

    async def course() -> None:
        with held(one):
            tasks = await handed_in(
                *(aput(saver, uid, {"n": 1}, None) for saver, uid in ((one, "a"), (other, "b")))
            )
        await asyncio.gather(*tasks)

    asyncio.run(course())
    assert (
        sorted(list_checkpoint_ids(one, config_at()))
        == sorted(list_checkpoint_ids(other, config_at()))
        == ["a", "b"]
    )


def no_call(message: Any) -> None:
    message.content, message.invalid_tool_calls = "CHANGED", []


def text(message: Any) -> None:
    message.content = "CHANGED"


def not_plain(message: Any) -> None:
    message.content, message.response_metadata["output_version"] = "CHANGED", "v1"


CALL: Any = {"name": "f", "args": "{", "id": "1", "error": "e", "type": "invalid_tool_call"}


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(
    ("message", "change"),
    [
        (AIMessage("as given", id="m", invalid_tool_calls=[CALL]), text),
        (AIMessage("as given", id="m", invalid_tool_calls=[CALL]), no_call),
        (AIMessage("as given", id="m"), not_plain),
        (AIMessage("as given", id="m"), text),
    ],
)
def test_messages_are_stored_as_given(
    files: Savers, message: AIMessage, change: Callable[[Any], None], kept: bool
) -> None:
    """Also if the put has to be planned anew, when the graph may have changed them in place."""
    one, other = files
    given, message = message.model_copy(deep=True), message.model_copy(deep=True)
    put(one, said("x"), uid="a1")
    upon = "a1"
    if not kept:
        put(other, said("x"), config_at(uid="a1"), uid="a2")
        upon = "a2"

    async def course() -> None:
        values = {"messages": [*said("x")["messages"], message]}
        with held(one):
            tasks = await handed_in(aput(one, "b", values, upon))
            change(message)
        await asyncio.gather(*tasks)

    asyncio.run(course())
    with fresh(one) as reader:
        assert read_channel_values(reader, config_at(uid="b"))["messages"][1] == given


def test_writes_and_inputs_are_stored_as_given(files: Savers) -> None:
    """Also if they were planned upon the first put of a thread that another has made."""
    one, other = files
    put(one, {"n": 1}, thread="before")
    put(other, {"n": 0}, uid="z")
    messages, notes = [HumanMessage("as given", id="1")], {"k": "as given", "long": "x" * 200}

    async def course() -> None:
        with held(one):
            tasks = await handed_in(
                aput(one, "b", {"n": 3}, None),
                one.aput_writes(
                    config_at(uid="b"), [("messages", messages), ("notes", notes)], "task"
                ),
                aput(one, "c", {"__start__": {"messages": messages, "notes": notes}}, "b"),
            )
            messages[0].content = notes["k"] = "CHANGED"
        await asyncio.gather(*tasks)

    asyncio.run(course())
    with fresh(one) as reader:
        written = reader.get_tuple(config_at(uid="b"))
        started = read_channel_values(reader, config_at(uid="c"))["__start__"]
    assert written is not None
    assert written.pending_writes is not None
    found = {channel: value for _, channel, value in written.pending_writes}
    for each in (found, started):
        assert each["messages"][0].content == each["notes"]["k"] == "as given"


def test_long_updates_are_stored_as_given(files: Savers) -> None:
    """Those that name what the log has by its ranges, when that has been removed meanwhile."""
    one, other = files
    names = [f"m{i}" for i in range(12)]
    put(one, said(*names), uid="a")
    messages = said(*names, "new")["messages"]
    job = one._writer.plan_database_write(
        TaskWrites(Address("t", "", "a"), "task", "", [("messages", messages)])
    )
    messages[0].content = "CHANGED"
    other.erase("t", ["m3"])
    one.database.write(*job)
    found = one.get_tuple(config_at(uid="a"))

    assert found is not None
    assert found.pending_writes is not None
    assert [each.content for _, _, value in found.pending_writes for each in value] == [
        *(name for name in names if name != "m3"),
        "new",
    ]


class FailsOnce(sqlite3.Connection):
    """Fails at one of the rows of pending writes."""

    left = -1

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if FailsOnce.left >= 0 and sql.startswith("INSERT INTO writes"):
            FailsOnce.left -= 1
            if FailsOnce.left < 0:
                raise sqlite3.OperationalError("injected")
        return super().execute(sql, *args)


def test_what_failed_decides_nothing(tmp_path: Path) -> None:
    """Of two writes of one task in a group, the first fails: the second is what was stored."""
    path = tmp_path / "x.db"
    with SQLiteCheckpointer.open(path) as other:
        put(other, {"n": 1}, uid="a")

    def broken() -> Flow[None]:
        yield Statement("SELECT * FROM nowhere")

    async def course(saver: SQLiteCheckpointer) -> list[Any]:
        with held(saver):
            tasks: list[Any] = await handed_in(
                *(
                    saver.aput_writes(config_at(uid="a"), [("n", each)], "T")
                    for each in ("one", "two")
                )
            )
            tasks.append(asyncio.ensure_future(saver.database.awrite(broken)))
            await asyncio.sleep(0)
            FailsOnce.left = 2  # the third: after both in the group, the first alone
        return await asyncio.gather(*tasks, return_exceptions=True)

    with SQLiteCheckpointer.open(path, factory=FailsOnce) as saver:
        first, second, _ = asyncio.run(course(saver))
        found = saver.get_tuple(config_at())
    assert isinstance(first, StorageError)
    assert second is None
    assert found is not None
    assert found.pending_writes == [("T", "n", "two")]


def test_a_look_at_the_connection_leaves_nothing_behind(files: Savers) -> None:
    """It is given up if the connection is not free soon."""
    saver, _ = files
    put(saver, {"n": 1}, uid="a")
    writer = saver.database._connect_once().writer  # type: ignore[attr-defined]

    def epoch() -> object:
        return asyncio.run(writer.wait_for_write_epoch("checkpointer", saver._watch))

    with writer._hold_connection_lock():
        assert epoch() is None
    assert not writer._epoch_requests
    assert epoch() is not None
    assert not writer._epoch_requests


def test_a_look_that_is_given_up_meanwhile(files: Savers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes are acknowledged all the same, and the next ones too."""
    saver, _ = files
    put(saver, {"n": 1}, uid="a")
    writer = saver.database._connect_once().writer  # type: ignore[attr-defined]
    look = writer._read_data_version

    def given_up() -> None:
        if not writer._conn.in_transaction:
            writer._epoch_requests.clear()
        look()

    async def course() -> None:
        async with asyncio.timeout(5):
            for uid, upon in (("b", "a"), ("c", "b")):
                writer._epoch_requests.extend(
                    _EpochRequest("checkpointer", saver._watch) for _ in range(2)
                )
                await aput(saver, uid, {"n": uid}, upon)

    monkeypatch.setattr(writer, "_read_data_version", given_up)
    asyncio.run(course())
    assert list_checkpoint_ids(saver, config_at()) == ["c", "b", "a"]


def test_a_list_that_is_emptied_meanwhile(files: Savers) -> None:
    one, other = files
    put(one, {"notes": ["x"]}, uid="a1")
    put(other, {"notes": ["x"]}, config_at(uid="a1"), uid="a2")
    notes = [f"{number} " * 100 for number in range(5)]
    given = [*notes]

    async def course() -> None:
        with held(one):
            tasks = await handed_in(aput(one, "b", {"notes": notes}, "a2"))
            notes.clear()
        await asyncio.gather(*tasks)

    asyncio.run(course())
    assert read_channel_values(other, config_at(uid="b")) == {"notes": given}


def test_keys_that_a_copy_brought_are_given_no_more(files: Savers) -> None:
    """A process that had taken a block before: one put fails at most, and the next one is well."""
    one, other = files
    put(one, {"n": 1})
    one.delete_thread("t")
    (key,) = one._cache.keys.take_keys(1) or [0]
    adding = (
        "INSERT INTO threads (thread_key, thread_id, created_at, updated_at) VALUES (?, ?, 0, 0)"
    )
    for each in range(key + 1, key + 31):
        other.database.write(lambda each=each: fetch_rows(adding, each, f"copied {each}"))  # type: ignore[misc]
    other.database.write(lambda: fetch_rows("UPDATE keys SET last_key = ?", key + 1000))
    for thread in "abc":
        put(one, {"n": 2}, thread=thread)

    assert [read_channel_values(other, config_at(thread)) for thread in "abc"] == [{"n": 2}] * 3


def test_equal_messages_are_one_item(saver: SQLiteCheckpointer) -> None:
    """Whatever the order of their fields."""
    message = HumanMessage("hi", id="1")
    other = message.model_copy()
    fields = dict(reversed(message.__dict__.items()))
    object.__setattr__(other, "__dict__", fields)
    put(saver, {"messages": [message]}, uid="a")
    put(saver, {"messages": [other]}, config_at(uid="a"), uid="b")

    assert len(saver.history("t")) == 1
