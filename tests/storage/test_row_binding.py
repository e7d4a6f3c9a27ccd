"""An encrypted row does not decrypt in another database or for another tenant."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
from langchain_core.messages import HumanMessage
from psycopg.sql import SQL, Identifier

from perdure.errors import CorruptRecord, StorageError, WrongKey
from tests import backends, postgres_server
from tests.backends import KEY
from tests.checkpointers.test_bad_input import make_checkpoint, make_config, put

NAMESPACE = ("people", "ann")
VICTIM, ATTACKER = "the victim's harbour", "a text of the attacker"


class Pair(NamedTuple):
    """Two databases with the same key: two files, or two tenants of one Postgres schema.

    Attributes:
        victim: The options with which the victim's database is opened.
        attacker: The options with which the attacker's database is opened.
        move: Replaces the attacker's rows of all tables except `settings` by the victim's rows, and
            returns their number.
        move_key_check: Replaces the attacker's key check by that of the victim.
    """

    victim: Callable[[str], Any]
    attacker: Callable[[str], Any]
    move_rows: Callable[[], int]
    move_key_check: Callable[[], int]


def build_files(folder: Path) -> Pair:
    """Return two files, between which SQLite moves rows."""
    paths = folder / "victim.db", folder / "attacker.db"

    def make_opener(path: Path) -> Callable[[str], Any]:
        place = backends.Place(path)
        return lambda component: getattr(place, component)(key=KEY)

    def replace_rows(tables: Callable[[list[str]], list[str]]) -> int:
        with closing(sqlite3.connect(paths[1])) as db, db:
            db.execute("ATTACH ? AS victim", (str(paths[0]),))
            names = [
                name
                for (name,) in db.execute(
                    "SELECT name FROM victim.sqlite_schema WHERE type='table'"
                )
            ]
            moved_count = 0
            for name in tables(names):
                db.execute(f"DELETE FROM main.{name}")
                moved_count += db.execute(
                    f"INSERT INTO main.{name} SELECT * FROM victim.{name}"
                ).rowcount
            return moved_count

    return Pair(
        make_opener(paths[0]),
        make_opener(paths[1]),
        lambda: replace_rows(
            lambda names: [name for name in names if name not in ("settings", "schemas")]
        ),
        lambda: replace_rows(lambda names: ["settings"]),
    )


def build_tenants(folder: Path) -> Pair:
    """Return two tenants, between which the administrator moves rows."""
    dsn = postgres_server.dsn_of_role("an_owner")
    place = backends.Place(folder / "x.db", dsn)
    schema = postgres_server.schema_name(place.path)

    def make_opener(tenant: str) -> Callable[[str], Any]:
        return lambda component: getattr(place, component)(key=KEY, tenant=tenant)

    def replace_rows(condition: str) -> int:
        moved_count = 0
        with psycopg.connect(postgres_server.dsn()) as conn:
            tables = conn.execute(
                "SELECT table_name FROM information_schema.columns "
                f"WHERE table_schema = %s AND column_name = 'tenant' AND {condition}",
                (schema,),
            ).fetchall()
            for (name,) in tables:
                table = Identifier(schema, name)
                for statement in (
                    "DELETE FROM {0} WHERE tenant = 'attacker'",
                    "CREATE TEMP TABLE moved AS SELECT * FROM {0} WHERE tenant = 'victim'",
                    "UPDATE moved SET tenant = 'attacker'",
                    "INSERT INTO {0} OVERRIDING SYSTEM VALUE SELECT * FROM moved",
                    "DROP TABLE moved",
                ):
                    cursor = conn.execute(SQL(statement).format(table))
                    moved_count += cursor.rowcount if statement.startswith("INSERT") else 0
        return moved_count

    return Pair(
        make_opener("victim"),
        make_opener("attacker"),
        lambda: replace_rows("table_name <> 'settings'"),
        lambda: replace_rows("table_name = 'settings'"),
    )


@pytest.fixture(params=["files", "postgres-tenants"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    """Two databases with the same encryption key and the same row keys."""
    databases = build_files(tmp_path) if request.param == "files" else build_tenants(tmp_path)
    for text, open_component in ((VICTIM, databases.victim), (ATTACKER, databases.attacker)):
        with open_component("saver") as saver:
            config = put(
                saver, messages=[HumanMessage(text, id="1")], small=text, notes={"a": text}
            )
            checkpoint = make_checkpoint("2", messages=[HumanMessage(text, id="1")])
            saver.put(config, checkpoint, {"source": "loop", "user": text}, {"messages": 2})
            saver.put_writes(make_config(checkpoint_id="2"), [("messages", text), ("x", 5)], "task")
        with open_component("store") as store:
            store.put(NAMESPACE, "home", {"text": text})
            store.search(NAMESPACE, query="harbour text")
    return databases


def read_everything(open_component: Callable[[str], Any]) -> Iterator[str]:
    """Yield the text of everything that can be read from a database, or the names of the errors."""
    with open_component("saver") as saver, open_component("store") as store:
        for read in (
            lambda: saver.get_tuple(make_config()),
            lambda: list(saver.list(make_config())),
            lambda: saver.threads(),
            lambda: saver.history(make_config()["configurable"]["thread_id"]),
            lambda: store.get(NAMESPACE, "home"),
            lambda: store.search(NAMESPACE),
            lambda: store.search(NAMESPACE, query="harbour text"),
            lambda: store.history(NAMESPACE, "home"),
        ):
            try:
                yield repr(read())
            except CorruptRecord as error:
                yield type(error).__name__


def test_rows_moved_from_another_database_do_not_decrypt(pair: Pair) -> None:
    """The rows were moved to the same keys of the other database."""
    assert any(ATTACKER in text for text in read_everything(pair.attacker))
    assert pair.move_rows() > 8
    texts = [*read_everything(pair.attacker)]

    assert not any(VICTIM in text for text in texts)
    assert texts[0] == texts[4] == CorruptRecord.__name__
    assert sum(VICTIM in text for text in read_everything(pair.victim)) >= 6


@pytest.mark.postgres
def test_tenant_with_another_tenants_key_check_cannot_be_opened(tmp_path: Path) -> None:
    """The victim's key check does not decrypt for the attacker."""
    tenants = build_tenants(tmp_path)
    for open_component in (tenants.victim, tenants.attacker):
        open_component("saver").close()
    tenants.move_key_check()
    for component in ("saver", "store"):
        with pytest.raises(WrongKey, match="the key cannot decrypt"):
            tenants.attacker(component)


@pytest.mark.postgres
@pytest.mark.parametrize("component", ["saver", "store"])
def test_new_tenant_cannot_be_opened_read_only(tmp_path: Path, component: str) -> None:
    """Opening read-only records no key check, so rows written later could not be decrypted."""
    tenants = build_tenants(tmp_path)
    tenants.victim(component).close()
    dsn = postgres_server.dsn_of_role("an_owner")
    place = backends.Place(tmp_path / "x.db", dsn)
    with pytest.raises(StorageError, match="is not set up for the tenant 'attacker' yet"):
        getattr(place, component)(key=KEY, tenant="attacker", read_only=True)
    tenants.attacker(component).close()
    getattr(place, component)(key=KEY, tenant="attacker", read_only=True).close()


def test_file_with_another_files_key_check_cannot_read_its_rows(pair: Pair) -> None:
    """The key check was replaced by that of the other file."""
    pair.move_key_check()
    try:
        texts = [*read_everything(pair.attacker)]
    except WrongKey:
        return
    assert not any(ATTACKER in text for text in texts)


def test_copied_file_can_be_read(tmp_path: Path) -> None:
    """A file that was copied byte for byte has the same database id."""
    files = build_files(tmp_path)
    with files.victim("saver") as saver:
        put(saver, messages=[HumanMessage(VICTIM, id="1")])
    shutil.copy(tmp_path / "victim.db", tmp_path / "attacker.db")
    with files.attacker("saver") as saver:
        assert VICTIM in repr(saver.get_tuple(make_config()))
