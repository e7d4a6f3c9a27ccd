"""The tables of components: made once, and refused if another version of perdure made them."""

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

both_ways = pytest.mark.parametrize("read_only", [False, True])


class Place(NamedTuple):
    """A database to be: a file, or a schema of Postgres, with the tenant who opens it."""

    at: backends.Place
    options: dict[str, Any]

    def open(self, component: str, **options: Any) -> str:
        """Open it as a checkpointer or a store, and close it. Returns how it is named."""
        of = self.at.saver if component == "checkpointers" else self.at.store
        with of(**self.options, **options) as opened:
            return opened.database.path

    @property
    def schema(self) -> str:
        return postgres_server.schema(self.at.path)

    def run(self, sql: str) -> list[Any]:
        """Execute a statement in it, as its administrator."""
        if self.at.dsn:
            with psycopg.connect(postgres_server.dsn()) as conn:
                conn.execute(f"SET search_path TO {self.schema}")
                cursor = conn.execute(sql)
                return cursor.fetchall() if cursor.description else []
        with closing(sqlite3.connect(self.at.path)) as db, db:
            return db.execute(sql).fetchall()

    def contents(self) -> Any:
        """The bytes of the file, or tables and columns as the catalog has them."""
        if not self.at.dsn:
            return self.at.path.read_bytes()
        return self.run(
            "SELECT c.relname, a.attname, c.xmin::text, a.xmin::text FROM pg_class c "
            "JOIN pg_attribute a ON a.attrelid = c.oid "
            f"WHERE relnamespace = '{self.schema}'::regnamespace ORDER BY 1, 2"
        )


@pytest.fixture(params=["file", "postgres", "postgres-tenants"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    kind, _, tenants = request.param.partition("-")
    if tenants:  # a superuser would see all of them
        dsn = postgres_server.dsn_of("an_owner")
        return Place(backends.Place(tmp_path / "x.db", dsn), {"tenant": "acme"})
    return Place(backends.places(tmp_path)[kind](), {})


def test_they_are_made_once(place: Place) -> None:
    """Two components share a database; opening again changes nothing."""
    made = []
    for _ in range(2):
        for component in ("checkpointers", "stores"):
            place.open(component)
        made.append(place.contents())

    assert made[0] == made[1]
    assert place.run("SELECT component, version FROM schemas ORDER BY component") == [
        ("checkpointers", 2),
        ("stores", 2),
    ]


@both_ways
@pytest.mark.parametrize("component", ["checkpointers", "stores"])
def test_those_of_a_newer_perdure_are_refused(
    place: Place, component: str, read_only: bool
) -> None:
    """They are not touched; upgrading is the advice."""
    place.open(component)
    place.run("UPDATE schemas SET version = 3")
    before = place.contents()
    with pytest.raises(SchemaMismatch, match=rf"version 3 of the {component} .*upgrade perdure"):
        place.open(component, read_only=read_only)

    assert before == place.contents()


@both_ways
@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE schemas RENAME TO migrations",  # where the first builds kept versions
        "UPDATE schemas SET version = 1",  # rows were not yet bound to their database
        "UPDATE schemas SET script_hash = 'another'",  # tables or columns had other names
    ],
)
@pytest.mark.parametrize("component", ["checkpointers", "stores"])
def test_those_of_a_build_before_the_first_release_are_refused(
    place: Place, component: str, change: str, read_only: bool
) -> None:
    """They are not touched, whatever is in them; the error says how to take the threads along."""
    name = place.open("checkpointers")
    place.open("stores")
    place.run(change)
    before = place.contents()
    advice = (
        f"{re.escape(repr(name))} was written by a build of perdure from before the first release"
        r".*: perdure export --all --db FILE > threads\.jsonl.*: perdure import threads\.jsonl"
    )
    with pytest.raises(SchemaMismatch, match=advice):
        place.open(component, read_only=read_only)

    assert before == place.contents()


def test_the_migrations_of_another_application_are_none_of_ours(place: Place) -> None:
    """Its table of that name may be in the same database."""
    place.open("checkpointers")
    place.run("CREATE TABLE migrations (id INTEGER)")
    place.open("checkpointers")
    place.open("stores")


def test_reading_makes_none(place: Place) -> None:
    """A component that is not there yet is to be opened for writing once."""
    place.open("checkpointers")
    before = place.contents()
    with pytest.raises(StorageError, match="has no tables of stores; open it once without"):
        place.open("stores", read_only=True)

    assert before == place.contents()


def test_a_script_that_fails_leaves_nothing(place: Place) -> None:
    """Neither the tables before the fault, nor a version."""
    broken = Schema("broken", "CREATE TABLE half (x INTEGER); SELECT nonsense")
    place.open("checkpointers")
    opened: Callable[..., Any] = SQLiteDatabase
    where: dict[str, Any] = {}
    if place.at.dsn:
        opened, where = PostgresDatabase, {"schema": place.schema, **place.options}
    before = place.contents()
    with pytest.raises(StorageError, match="nonsense"):
        opened(place.at.dsn or place.at.path, broken, **where).connect()

    assert before == place.contents()
    assert place.run("SELECT component FROM schemas") == [("checkpointers",)]
