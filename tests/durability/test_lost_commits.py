"""A database that lost its last commits, while a process lives that made them.

So a Postgres server with `synchronous_commit = off` is after a crash, an asynchronous standby that
was promoted, and a file into which an earlier copy was put back.
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


def said(*texts: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(text, id=text) for text in texts], "docs": [*texts]}


def kept(place: Place) -> Callable[[], None]:
    """Keep what is in a database; returns what puts it back."""
    if not place.dsn:
        copy = sqlite3.connect(":memory:")
        with closing(sqlite3.connect(place.path)) as conn:
            conn.backup(copy)

        def put_back() -> None:
            with closing(sqlite3.connect(place.path)) as conn:
                copy.backup(conn)
            copy.close()

        return put_back
    import psycopg

    schema = postgres_server.schema(place.path)
    with psycopg.connect(place.dsn) as session:
        for table in TABLES:
            session.execute(f"CREATE TABLE {schema}.kept_{table} AS TABLE {schema}.{table}")

    def put_rows_back() -> None:
        with psycopg.connect(place.dsn) as session:
            for table in TABLES:
                session.execute(f"DELETE FROM {schema}.{table}")
                sql = f"INSERT INTO {schema}.{table} SELECT * FROM {schema}.kept_{table}"
                session.execute(sql)

    return put_rows_back


def test_a_put_upon_a_lost_checkpoint_stores_what_was_asked(place: Place) -> None:
    """An item at a position that was lost is not taken for the one that comes there next."""
    with place.saver() as saver:
        put(saver, said("a"), uid="1")
        lose = kept(place)
        put(saver, said("a", "b"), config_at(uid="1"), uid="2")
        lose()
        put(saver, said("a", "b", "c"), config_at(uid="2"), uid="3")
        here = read_channel_values(saver, config_at(uid="3"))
        with place.saver() as other:
            there = read_channel_values(other, config_at(uid="3"))

    assert here == said("a", "b", "c")
    assert there == here


@pytest.mark.parametrize("reads", [True, False])
def test_a_run_goes_on_with_what_is_left(place: Place, reads: bool) -> None:
    """Also where another process has gone on: what was lost is read by nobody."""
    with place.saver() as saver:
        put(saver, said("a"), uid="1")
        lose = kept(place)
        put(saver, said("a", "b", "x"), config_at(uid="1"), uid="2")
        lose()
        if reads:
            assert read_channel_values(saver, config_at()) == said("a")
        with place.saver() as other:
            put(other, said("a", "B"), config_at(uid="1"), uid="2'")
            assert read_channel_values(saver, config_at()) == said("a", "B")
            put(saver, said("a", "B", "n"), config_at(uid="2'"), uid="3")
            assert read_channel_values(other, config_at()) == said("a", "B", "n")
        assert read_channel_values(saver, config_at()) == said("a", "B", "n")
        assert [item.value.content for item in saver.history("t")] == ["a", "B", "n"]


def test_what_a_task_wrote_is_stored_where_its_log_was_lost(place: Place) -> None:
    """A task's update, and an input, repeat messages whose places in the log are no more theirs."""
    few, more = (said(*map(str, range(n))) for n in (2, 12))
    with place.saver() as saver:
        put(saver, few, uid="1")
        lose = kept(place)
        put(saver, more, config_at(uid="1"), uid="2")
        lose()
        saver.put_writes(config_at(uid="1"), [("messages", more["messages"])], "task")
        put(saver, {"__start__": more, **few}, config_at(uid="1"), uid="3")
        with place.saver() as other:
            before, newest = (
                other.get_tuple(config_at(uid="1")),
                other.get_tuple(config_at(uid="3")),
            )

    assert before is not None
    assert before.pending_writes == [("task", "messages", more["messages"])]
    assert newest is not None
    assert newest.checkpoint["channel_values"] == {"__start__": more, **few}


def test_keys_that_were_given_twice_stop_nobody(place: Place) -> None:
    """The counter of keys is behind the rows that this process makes with its block."""
    with place.saver() as saver:
        put(saver, said("a"), thread="t", uid="1")
        while saver._cache.keys.take_keys(1):  # as after some sixty threads
            pass
        lose = kept(place)
        put(saver, said("a"), ns="sub", uid="1")  # takes the next block
        lose()
        for n in range(3):
            put(saver, said("a"), thread=f"a{n}", uid="1")
        with place.saver() as other:
            for n in range(30):
                put(other, said("b"), thread=f"b{n}", uid="1")
            read = [read_channel_values(other, config_at(f"b{n}")) for n in range(30)]
        for n in range(100):
            with suppress(StorageError):  # a key that the other has: another block is taken
                put(saver, said("c"), thread=f"c{n}", uid="1")
        put(saver, said("c"), thread="last", uid="1")

        assert read_channel_values(saver, config_at("last")) == said("c")
    assert read == [said("b")] * 30
