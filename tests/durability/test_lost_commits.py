"""A database loses its last commits while the process that made them still runs.

This happens after a crash of a Postgres server with `synchronous_commit = off`, after the promotion
of an asynchronous standby, and when an earlier copy of a file is restored.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from perdure.errors import StorageError
from tests import postgres_server
from tests.backends import Place
from tests.contracts.puts import config_at, put, read_channel_values

TABLES = ("keys", "threads", "namespaces", "logs", "items", "checkpoints", "writes", "tags")


def make_channel_values(*texts: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(text, id=text) for text in texts], "docs": [*texts]}


def save_state(place: Place) -> Callable[[], None]:
    """Save the contents of a database, and return a function that restores them."""
    if not place.dsn:
        copy = sqlite3.connect(":memory:")
        with closing(sqlite3.connect(place.path)) as conn:
            conn.backup(copy)

        def restore_file() -> None:
            with closing(sqlite3.connect(place.path)) as conn:
                copy.backup(conn)
            copy.close()

        return restore_file
    import psycopg

    schema = postgres_server.schema_name(place.path)
    with psycopg.connect(place.dsn) as session:
        for table in TABLES:
            session.execute(f"CREATE TABLE {schema}.kept_{table} AS TABLE {schema}.{table}")

    def restore_rows() -> None:
        with psycopg.connect(place.dsn) as session:
            for table in TABLES:
                session.execute(f"DELETE FROM {schema}.{table}")
                sql = f"INSERT INTO {schema}.{table} SELECT * FROM {schema}.kept_{table}"
                session.execute(sql)

    return restore_rows


def test_put_on_a_lost_checkpoint_stores_its_whole_state(place: Place) -> None:
    """A lost item is not confused with the next item at the same position."""
    with place.saver() as saver:
        put(saver, make_channel_values("a"), uid="1")
        restore = save_state(place)
        put(saver, make_channel_values("a", "b"), config_at(uid="1"), uid="2")
        restore()
        put(saver, make_channel_values("a", "b", "c"), config_at(uid="2"), uid="3")
        own_values = read_channel_values(saver, config_at(uid="3"))
        with place.saver() as other_saver:
            other_values = read_channel_values(other_saver, config_at(uid="3"))

    assert own_values == make_channel_values("a", "b", "c")
    assert other_values == own_values


@pytest.mark.parametrize("reads_first", [True, False])
def test_run_continues_from_restored_state(place: Place, reads_first: bool) -> None:
    """Lost items are not read again, even if another process has continued the thread."""
    with place.saver() as saver:
        put(saver, make_channel_values("a"), uid="1")
        restore = save_state(place)
        put(saver, make_channel_values("a", "b", "x"), config_at(uid="1"), uid="2")
        restore()
        if reads_first:
            assert read_channel_values(saver, config_at()) == make_channel_values("a")
        with place.saver() as other_saver:
            put(other_saver, make_channel_values("a", "B"), config_at(uid="1"), uid="2'")
            assert read_channel_values(saver, config_at()) == make_channel_values("a", "B")
            put(saver, make_channel_values("a", "B", "n"), config_at(uid="2'"), uid="3")
            assert read_channel_values(other_saver, config_at()) == make_channel_values(
                "a", "B", "n"
            )
        assert read_channel_values(saver, config_at()) == make_channel_values("a", "B", "n")
        assert [item.value.content for item in saver.history("t")] == ["a", "B", "n"]


def test_task_writes_are_stored_if_their_logged_items_were_lost(place: Place) -> None:
    """A task's update and an input repeat messages whose positions in the log are reused."""
    two_messages, twelve_messages = (make_channel_values(*map(str, range(n))) for n in (2, 12))
    with place.saver() as saver:
        put(saver, two_messages, uid="1")
        restore = save_state(place)
        put(saver, twelve_messages, config_at(uid="1"), uid="2")
        restore()
        saver.put_writes(config_at(uid="1"), [("messages", twelve_messages["messages"])], "task")
        put(saver, {"__start__": twelve_messages, **two_messages}, config_at(uid="1"), uid="3")
        with place.saver() as other_saver:
            before, newest = (
                other_saver.get_tuple(config_at(uid="1")),
                other_saver.get_tuple(config_at(uid="3")),
            )

    assert before is not None
    assert before.pending_writes == [("task", "messages", twelve_messages["messages"])]
    assert newest is not None
    assert newest.checkpoint["channel_values"] == {"__start__": twelve_messages, **two_messages}


def test_puts_succeed_after_key_counter_was_reset(place: Place) -> None:
    """The restored counter is behind the keys that this process has allocated."""
    with place.saver() as saver:
        put(saver, make_channel_values("a"), thread="t", uid="1")
        while saver._cache.keys.take_reserved_row_keys(
            1
        ):  # use up the block of keys, as some sixty threads do
            pass
        restore = save_state(place)
        put(saver, make_channel_values("a"), ns="sub", uid="1")  # allocates the next block
        restore()
        for n in range(3):
            put(saver, make_channel_values("a"), thread=f"a{n}", uid="1")
        with place.saver() as other_saver:
            for n in range(30):
                put(other_saver, make_channel_values("b"), thread=f"b{n}", uid="1")
            read = [read_channel_values(other_saver, config_at(f"b{n}")) for n in range(30)]
        for n in range(100):
            with suppress(
                StorageError
            ):  # the other saver has used the key, so another block is allocated
                put(saver, make_channel_values("c"), thread=f"c{n}", uid="1")
        put(saver, make_channel_values("c"), thread="last", uid="1")

        assert read_channel_values(saver, config_at("last")) == make_channel_values("c")
    assert read == [make_channel_values("b")] * 30
