"""Puts that create a thread or a namespace, and are planned before the transaction starts."""

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
from perdure.storage.sqlite_writer import _WriteCountRequest
from tests.contracts.puts import config_at, list_checkpoint_ids, put, read_channel_values
from tests.contracts.test_kept_heads import make_messages, pause_writer, put_async, start_tasks

Savers = tuple[SQLiteCheckpointer, SQLiteCheckpointer]


@pytest.fixture
def savers(tmp_path: Path) -> Any:
    """Two checkpointers on one file; the second one represents another process."""
    path = tmp_path / "x.db"
    with SQLiteCheckpointer.open(path) as one, SQLiteCheckpointer.open(path) as other:
        yield one, other


def open_reader(saver: SQLiteCheckpointer) -> SQLiteCheckpointer:
    """Open the file again, read-only and without a cache."""
    return SQLiteCheckpointer.open(saver.database.path, read_only=True)


@pytest.mark.parametrize("kind", ["stale", "cancelled"])
def test_writes_to_a_namespace_that_is_not_stored_yet_are_stored(savers: Savers, kind: str) -> None:
    """The writes are stored at the namespace that the successful put has created."""
    one, other = savers
    put(one, {"n": 1}, uid="a1")
    if kind == "stale":
        put(other, {"n": 2}, config_at(uid="a1"), uid="a2")

    async def run_calls() -> None:
        with pause_writer(one):
            (first,) = await start_tasks(put_async(one, "b1", {"n": 3}, None, ns="sub"))
            if kind == "cancelled":
                first.cancel()
            writes = one.aput_writes(config_at(ns="sub", uid="b1"), [("n", 99)], "task")
            tasks = [first, *await start_tasks(writes)]
        await asyncio.gather(*tasks, return_exceptions=True)
        await tasks[1]

    asyncio.run(run_calls())
    if kind == "cancelled":
        put(one, {"n": 3}, ns="sub", uid="b1")
    with open_reader(one) as reader:
        for saver in (one, other, reader):
            record = saver.get_tuple(config_at(ns="sub"))
            assert record is not None
            assert record.pending_writes == [("task", "n", 99)]


def test_two_savers_can_create_the_same_thread_at_once(savers: Savers) -> None:
    one, other = savers
    put(one, {"n": 0}, thread="before")  # both have keys to give
    put(other, {"n": 0}, thread="before too")

    async def run_calls() -> None:
        with pause_writer(one):
            tasks = await start_tasks(
                *(
                    put_async(saver, uid, {"n": 1}, None)
                    for saver, uid in ((one, "a"), (other, "b"))
                )
            )
        await asyncio.gather(*tasks)

    asyncio.run(run_calls())
    assert (
        sorted(list_checkpoint_ids(one, config_at()))
        == sorted(list_checkpoint_ids(other, config_at()))
        == ["a", "b"]
    )


def remove_invalid_calls(message: Any) -> None:
    message.content, message.invalid_tool_calls = "CHANGED", []


def change_text(message: Any) -> None:
    message.content = "CHANGED"


def set_output_version(message: Any) -> None:
    message.content, message.response_metadata["output_version"] = "CHANGED", "v1"


CALL: Any = {"name": "f", "args": "{", "id": "1", "error": "e", "type": "invalid_tool_call"}


@pytest.mark.parametrize("plan_is_kept", [True, False])
@pytest.mark.parametrize(
    ("message", "change"),
    [
        (AIMessage("as given", id="m", invalid_tool_calls=[CALL]), change_text),
        (AIMessage("as given", id="m", invalid_tool_calls=[CALL]), remove_invalid_calls),
        (AIMessage("as given", id="m"), set_output_version),
        (AIMessage("as given", id="m"), change_text),
    ],
)
def test_message_changed_after_the_put_call_is_stored_unchanged(
    savers: Savers, message: AIMessage, change: Callable[[Any], None], plan_is_kept: bool
) -> None:
    """The put is possibly planned again after the graph has changed the message in place."""
    one, other = savers
    original, message = message.model_copy(deep=True), message.model_copy(deep=True)
    put(one, make_messages("x"), uid="a1")
    parent_id = "a1"
    if not plan_is_kept:
        put(other, make_messages("x"), config_at(uid="a1"), uid="a2")
        parent_id = "a2"

    async def run_calls() -> None:
        values = {"messages": [*make_messages("x")["messages"], message]}
        with pause_writer(one):
            tasks = await start_tasks(put_async(one, "b", values, parent_id))
            change(message)
        await asyncio.gather(*tasks)

    asyncio.run(run_calls())
    with open_reader(one) as reader:
        assert read_channel_values(reader, config_at(uid="b"))["messages"][1] == original


def test_writes_changed_after_the_call_are_stored_unchanged(savers: Savers) -> None:
    """The plan was based on the first put of a thread that another process has created, too."""
    one, other = savers
    put(one, {"n": 1}, thread="before")
    put(other, {"n": 0}, uid="z")
    messages, notes = [HumanMessage("as given", id="1")], {"k": "as given", "long": "x" * 200}

    async def run_calls() -> None:
        with pause_writer(one):
            tasks = await start_tasks(
                put_async(one, "b", {"n": 3}, None),
                one.aput_writes(
                    config_at(uid="b"), [("messages", messages), ("notes", notes)], "task"
                ),
                put_async(one, "c", {"__start__": {"messages": messages, "notes": notes}}, "b"),
            )
            messages[0].content = notes["k"] = "CHANGED"
        await asyncio.gather(*tasks)

    asyncio.run(run_calls())
    with open_reader(one) as reader:
        written = reader.get_tuple(config_at(uid="b"))
        started = read_channel_values(reader, config_at(uid="c"))["__start__"]
    assert written is not None
    assert written.pending_writes is not None
    writes = {channel: value for _, channel, value in written.pending_writes}
    for stored_values in (writes, started):
        assert stored_values["messages"][0].content == stored_values["notes"]["k"] == "as given"


def test_long_write_changed_after_planning_is_stored_without_erased_message(savers: Savers) -> None:
    """A long write refers to ranges of the log. A message of them is erased before the commit."""
    one, other = savers
    names = [f"m{i}" for i in range(12)]
    put(one, make_messages(*names), uid="a")
    messages = make_messages(*names, "new")["messages"]
    job = one._writer.plan_database_write(
        TaskWrites(Address("t", "", "a"), "task", "", [("messages", messages)])
    )
    messages[0].content = "CHANGED"
    other.erase("t", ["m3"])
    one.database.write(*job)
    record = one.get_tuple(config_at(uid="a"))

    assert record is not None
    assert record.pending_writes is not None
    assert [
        stored_message.content for _, _, value in record.pending_writes for stored_message in value
    ] == [
        *(name for name in names if name != "m3"),
        "new",
    ]


class FailingOnceConnection(sqlite3.Connection):
    """A connection that fails at one of the rows of pending writes."""

    remaining = -1

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if FailingOnceConnection.remaining >= 0 and sql.startswith("INSERT INTO writes"):
            FailingOnceConnection.remaining -= 1
            if FailingOnceConnection.remaining < 0:
                raise sqlite3.OperationalError("injected")
        return super().execute(sql, *args)


def test_second_write_of_a_task_is_stored_if_the_first_failed(tmp_path: Path) -> None:
    """Two writes of one task are in the same transaction group, and the first one fails."""
    path = tmp_path / "x.db"
    with SQLiteCheckpointer.open(path) as other:
        put(other, {"n": 1}, uid="a")

    def read_missing_table() -> Flow[None]:
        yield Statement("SELECT * FROM nowhere")

    async def run_calls(saver: SQLiteCheckpointer) -> list[Any]:
        with pause_writer(saver):
            tasks: list[Any] = await start_tasks(
                *(
                    saver.aput_writes(config_at(uid="a"), [("n", value)], "T")
                    for value in ("one", "two")
                )
            )
            tasks.append(asyncio.ensure_future(saver.database.awrite(read_missing_table)))
            await asyncio.sleep(0)
            # The third INSERT fails: after the two of the group, the first write is repeated alone.
            FailingOnceConnection.remaining = 2
        return await asyncio.gather(*tasks, return_exceptions=True)

    with SQLiteCheckpointer.open(path, factory=FailingOnceConnection) as saver:
        first, second, _ = asyncio.run(run_calls(saver))
        record = saver.get_tuple(config_at())
    assert isinstance(first, StorageError)
    assert second is None
    assert record is not None
    assert record.pending_writes == [("T", "n", "two")]


def test_write_count_request_is_withdrawn_if_the_connection_is_busy(savers: Savers) -> None:
    """A request to count writes is withdrawn if the connection does not become free soon."""
    saver, _ = savers
    put(saver, {"n": 1}, uid="a")
    writer = saver.database._connect_once().writer  # type: ignore[attr-defined]

    def wait_for_write_counts() -> object:
        return asyncio.run(
            writer.wait_and_count_writes_except_own("checkpointer", saver._own_writes)
        )

    with writer._hold_connection_lock():
        assert wait_for_write_counts() is None
    assert not writer._write_count_requests
    assert wait_for_write_counts() is not None
    assert not writer._write_count_requests


def test_writes_are_acknowledged_if_write_count_requests_are_withdrawn(
    savers: Savers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later writes are acknowledged, too."""
    saver, _ = savers
    put(saver, {"n": 1}, uid="a")
    writer = saver.database._connect_once().writer  # type: ignore[attr-defined]
    read_data_version = writer._count_change_by_other_connection_if_any

    def withdraw_and_read() -> None:
        if not writer._conn.in_transaction:
            writer._write_count_requests.clear()
        read_data_version()

    async def run_puts() -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(5):
            for uid, parent_id in (("b", "a"), ("c", "b")):
                writer._write_count_requests.extend(
                    _WriteCountRequest(loop.create_future(), "checkpointer", saver._own_writes)
                    for _ in range(2)
                )
                await put_async(saver, uid, {"n": uid}, parent_id)

    monkeypatch.setattr(writer, "_count_change_by_other_connection_if_any", withdraw_and_read)
    asyncio.run(run_puts())
    assert list_checkpoint_ids(saver, config_at()) == ["c", "b", "a"]


def test_list_emptied_during_a_put_is_stored_as_it_was(savers: Savers) -> None:
    one, other = savers
    put(one, {"notes": ["x"]}, uid="a1")
    put(other, {"notes": ["x"]}, config_at(uid="a1"), uid="a2")
    notes = [f"{number} " * 100 for number in range(5)]
    original = [*notes]

    async def run_calls() -> None:
        with pause_writer(one):
            tasks = await start_tasks(put_async(one, "b", {"notes": notes}, "a2"))
            notes.clear()
        await asyncio.gather(*tasks)

    asyncio.run(run_calls())
    assert read_channel_values(other, config_at(uid="b")) == {"notes": original}


def test_puts_skip_reserved_keys_that_another_process_has_used(savers: Savers) -> None:
    """A process has reserved keys for threads, under which another process then stores threads."""
    one, other = savers
    put(one, {"n": 1})
    one.delete_thread("t")
    (key,) = one._cache.keys.take_reserved_row_keys(1) or [0]
    insert = (
        "INSERT INTO threads (thread_key, thread_id, created_at, updated_at) VALUES (?, ?, 0, 0)"
    )
    for used in range(key + 1, key + 31):
        other.database.write(lambda used=used: fetch_rows(insert, used, f"copied {used}"))  # type: ignore[misc]
    other.database.write(lambda: fetch_rows("UPDATE keys SET last_key = ?", key + 1000))
    for thread in "abc":
        put(one, {"n": 2}, thread=thread)

    assert [read_channel_values(other, config_at(thread)) for thread in "abc"] == [{"n": 2}] * 3


def test_messages_with_reordered_fields_are_stored_as_one_item(saver: SQLiteCheckpointer) -> None:
    """The order of a message's fields does not matter."""
    message = HumanMessage("hi", id="1")
    other = message.model_copy()
    fields = dict(reversed(message.__dict__.items()))
    object.__setattr__(other, "__dict__", fields)
    put(saver, {"messages": [message]}, uid="a")
    put(saver, {"messages": [other]}, config_at(uid="a"), uid="b")

    assert len(saver.history("t")) == 1
