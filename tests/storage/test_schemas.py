"""The tables of components are created once, and refused if another version created them."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest

from perdure.errors import SchemaMismatch, StorageError
from perdure.storage.database import Schema
from perdure.storage.postgres import PostgresDatabase
from perdure.storage.sqlite import SQLiteDatabase
from tests import backends, postgres_server

read_only_and_writable = pytest.mark.parametrize("read_only", [False, True])


class Place(NamedTuple):
    """The place of a database, which is a file or a Postgres schema, and the options to open it."""

    database_place: backends.Place
    options: dict[str, Any]

    def open_component(self, component: str, **options: Any) -> str:
        """Open the database as a checkpointer or a store, close it, and return its path."""
        open_place = (
            self.database_place.saver if component == "checkpointers" else self.database_place.store
        )
        with open_place(**self.options, **options) as instance:
            return instance.database.path

    @property
    def schema(self) -> str:
        return postgres_server.schema_name(self.database_place.path)

    def execute_sql(self, sql: str) -> list[Any]:
        """Execute a statement in the database, as its administrator."""
        if self.database_place.dsn:
            with psycopg.connect(postgres_server.dsn()) as conn:
                conn.execute(f"SET search_path TO {self.schema}")
                cursor = conn.execute(sql)
                return cursor.fetchall() if cursor.description else []
        with closing(sqlite3.connect(self.database_place.path)) as db, db:
            return db.execute(sql).fetchall()

    def read_state(self) -> Any:
        """Return the bytes of the file, or the catalog's rows of tables and columns."""
        if not self.database_place.dsn:
            return self.database_place.path.read_bytes()
        return self.execute_sql(
            "SELECT c.relname, a.attname, c.xmin::text, a.xmin::text FROM pg_class c "
            "JOIN pg_attribute a ON a.attrelid = c.oid "
            f"WHERE relnamespace = '{self.schema}'::regnamespace ORDER BY 1, 2"
        )


@pytest.fixture(params=["file", "postgres", "postgres-tenants"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    kind, _, tenants = request.param.partition("-")
    if tenants:  # a superuser would see all tenants
        dsn = postgres_server.dsn_of_role("an_owner")
        return Place(backends.Place(tmp_path / "x.db", dsn), {"tenant": "acme"})
    return Place(backends.places(tmp_path)[kind](), {})


def test_tables_are_created_once(place: Place) -> None:
    """Two components share the database. Opening it again changes nothing."""
    states = []
    for _ in range(2):
        for component in ("checkpointers", "stores"):
            place.open_component(component)
        states.append(place.read_state())

    assert states[0] == states[1]
    assert place.execute_sql("SELECT component, version FROM schemas ORDER BY component") == [
        ("checkpointers", 2),
        ("stores", 2),
    ]


@read_only_and_writable
@pytest.mark.parametrize("component", ["checkpointers", "stores"])
def test_tables_of_a_newer_version_are_refused(
    place: Place, component: str, read_only: bool
) -> None:
    """The tables are not changed, and the error advises to upgrade."""
    place.open_component(component)
    place.execute_sql("UPDATE schemas SET version = 3")
    state_before = place.read_state()
    with pytest.raises(SchemaMismatch, match=rf"version 3 of the {component} .*upgrade perdure"):
        place.open_component(component, read_only=read_only)

    assert state_before == place.read_state()


@read_only_and_writable
@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE schemas RENAME TO migrations",  # where the first builds kept versions
        "UPDATE schemas SET version = 1",  # rows were not yet bound to their database
        "UPDATE schemas SET script_hash = 'another'",  # tables or columns had other names
    ],
)
@pytest.mark.parametrize("component", ["checkpointers", "stores"])
def test_tables_of_a_build_before_the_first_release_are_refused(
    place: Place, component: str, change: str, read_only: bool
) -> None:
    """The tables are not changed, and the error says how to export and import the threads."""
    name = place.open_component("checkpointers")
    place.open_component("stores")
    place.execute_sql(change)
    state_before = place.read_state()
    advice = (
        f"{re.escape(repr(name))} was written by a build of perdure from before the first release"
        r".*: perdure export --all --db FILE > threads\.jsonl.*: perdure import threads\.jsonl"
    )
    with pytest.raises(SchemaMismatch, match=advice):
        place.open_component(component, read_only=read_only)

    assert state_before == place.read_state()


def test_migrations_table_of_another_application_is_ignored(place: Place) -> None:
    """The table may be in the same database."""
    place.open_component("checkpointers")
    place.execute_sql("CREATE TABLE migrations (id INTEGER)")
    place.open_component("checkpointers")
    place.open_component("stores")


def test_opening_read_only_creates_no_tables(place: Place) -> None:
    """The error says that a new component must be opened for writing once."""
    place.open_component("checkpointers")
    state_before = place.read_state()
    with pytest.raises(
        StorageError, match="has no perdure tables for stores yet; to create the tables, open"
    ):
        place.open_component("stores", read_only=True)

    assert state_before == place.read_state()


def test_failing_script_leaves_no_tables(place: Place) -> None:
    """Neither the tables before the error nor a version are stored."""
    broken = Schema("broken", "CREATE TABLE half (x INTEGER); SELECT nonsense")
    place.open_component("checkpointers")
    database_class: Callable[..., Any] = SQLiteDatabase
    options: dict[str, Any] = {}
    if place.database_place.dsn:
        database_class, options = PostgresDatabase, {"schema": place.schema, **place.options}
    state_before = place.read_state()
    with pytest.raises(StorageError, match="nonsense"):
        database_class(
            place.database_place.dsn or place.database_place.path, broken, **options
        ).connect()

    assert state_before == place.read_state()
    assert place.execute_sql("SELECT component FROM schemas") == [("checkpointers",)]
