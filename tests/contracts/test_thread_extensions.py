"""A checkpointer refuses to change threads for which an unknown component keeps rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from perdure import people
from perdure.checkpointers import Retention, SQLiteCheckpointer, open_checkpointer
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.cli.copied_thread_tables import build_thread_table_pair
from perdure.errors import NotADatabase, SchemaMismatch
from perdure.run_tables.component import create_server_tables
from perdure.storage.flow import fetch_rows
from perdure.stores import SQLiteStore
from tests.contracts import puts
from tests.contracts.erased import doomed_message
from tests.people import accept_run, empty_database

THREAD = "t"


@pytest.fixture(params=["file", "postgres"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield the path or the DSN of a new database."""
    with empty_database(request.param, tmp_path, "extended") as path_or_dsn:
        yield path_or_dsn


@pytest.fixture
def saver(db: str) -> Iterator[Checkpointer]:
    """Yield a checkpointer with one thread."""
    with open_checkpointer(db) as opened:
        puts.put(opened, {"messages": [doomed_message]}, thread=THREAD)
        yield opened


def change_schemas(saver: Checkpointer, sql: str) -> None:
    saver.database.write(lambda: fetch_rows(sql))


def add_unknown_component(saver: Checkpointer) -> None:
    columns = "component, version, script_hash"
    change_schemas(saver, f"INSERT INTO schemas ({columns}) VALUES ('calendar', 1, 'x')")


def raise_version_of_server_tables(saver: Checkpointer) -> None:
    create_server_tables(saver)
    change_schemas(saver, "UPDATE schemas SET version = 99 WHERE component = 'server'")


def erase(saver: Any) -> None:
    saver.erase(THREAD, ["a"])


def delete(saver: Any) -> None:
    saver.delete_thread(THREAD)


def retain(saver: Any) -> None:
    saver.retain(Retention(last=0))


def prune(saver: Any) -> None:
    saver.prune([THREAD], strategy="delete")


def forget_person(saver: Any) -> None:
    with SQLiteStore.open(":memory:") as store:
        people.forget("nobody", saver, store)


def merge(saver: Any) -> None:
    with SQLiteCheckpointer.open(":memory:") as source:
        puts.put(source, {"messages": [doomed_message]}, thread="new")
        saver.import_from(source)


def copy_all(saver: Any) -> None:
    build_thread_table_pair(saver, saver)


@pytest.mark.parametrize("change", [erase, delete, retain, prune, forget_person, merge, copy_all])
@pytest.mark.parametrize("prepare", [add_unknown_component, raise_version_of_server_tables])
def test_thread_is_not_changed_if_a_component_is_unknown(
    db: str,
    saver: Checkpointer,
    prepare: Callable[[Checkpointer], None],
    change: Callable[[Any], None],
) -> None:
    """Rows of the unknown component could otherwise keep the erased texts."""
    prepare(saver)
    before = [item.value for item in saver.history(THREAD)]
    with open_checkpointer(db) as other, pytest.raises(SchemaMismatch, match="upgrade perdure"):
        change(other)

    assert [item.value for item in saver.history(THREAD)] == before


def test_erasure_reaches_tables_that_were_created_after_the_checkpointer_was_opened(
    saver: Checkpointer,
) -> None:
    """The components are determined in each transaction."""
    accept_run(saver, "ann", THREAD)

    saver.delete_thread(THREAD)

    assert saver.database.read(lambda: fetch_rows("SELECT 1 FROM runs")) == []


def test_tables_of_the_server_are_checked_in_a_file_from_elsewhere(tmp_path: Path) -> None:
    """A view with the name of a table could run for ever, or return any rows."""
    path = tmp_path / "foreign.db"
    with SQLiteCheckpointer.open(path) as saver:
        puts.put(saver, {"messages": [doomed_message]}, thread=THREAD)
        create_server_tables(saver)
    with closing(sqlite3.connect(path)) as conn:
        conn.execute("DROP TABLE assistants")
        conn.execute("CREATE VIEW assistants AS SELECT 1 AS assistant_id")

    with pytest.raises(NotADatabase, match="has a view named 'assistants'"):
        SQLiteCheckpointer.open(path, untrusted=True).close()
