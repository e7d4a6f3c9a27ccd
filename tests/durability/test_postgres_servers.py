"""What a server may be like, what is a DSN, and what a fork may do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from langgraph.checkpoint.base import empty_checkpoint
from psycopg.conninfo import make_conninfo

from perdure import PostgresCheckpointer, PostgresStore, SQLiteStore, settings
from perdure.errors import ConfigurationError, StorageError, StorageUnavailable, ThreadDeleted
from perdure.storage.foreign_postgres import ForeignPostgres
from tests import postgres_server

CONFIG: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
SECRET = ["postgresql://u:s3@cret@db/x", "postgresql://u:s3%zzt@db/x", "mysql+x://u:s3@db/x"]


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """A schema of the test's own."""
    return {"schema": postgres_server.schema(tmp_path), "pool_size": 2}


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageUnavailable, match="can be reached"):
        PostgresCheckpointer.open(f"postgresql://nobody@/x?host={tmp_path}", timeout_s=1)


@pytest.mark.parametrize(
    "dsn", ["", 5, None, "agent.db", "postgresql://[", "host=x unknown=y", *SECRET]
)
def test_what_is_no_dsn(dsn: Any) -> None:
    with pytest.raises(ConfigurationError, match="DSN") as refused:
        PostgresCheckpointer(dsn)
    assert "s3" not in str(refused.value)


def test_without_psycopg() -> None:
    """Who has not installed the extra is told which; nothing else needs it."""
    code = "import sys; sys.modules['psycopg'] = None; import perdure; perdure.SQLiteStore; "
    done = subprocess.run(
        [sys.executable, "-c", code + "perdure.PostgresStore"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert "MissingDependency: Postgres needs psycopg and psycopg_pool" in done.stderr


def test_a_dsn_is_no_file() -> None:
    with pytest.raises(ConfigurationError, match="PostgresStore"):
        SQLiteStore("postgresql://localhost/x")


@pytest.mark.parametrize(
    "db",
    [
        "host=x password=s3",
        " dbname=x",
        "sslmode=require host=x",
        "PASSWORD=s3 host=x",
        "keepalives=1 password = s3",
    ],
)
def test_a_dsn_of_keywords_is_no_file(db: str) -> None:
    """It is a DSN for the settings, and refused by the classes for files without its password."""
    with pytest.raises(ConfigurationError, match="PostgresStore") as refused:
        SQLiteStore(db)

    assert settings.is_dsn(db)
    assert "s3" not in str(refused.value)


def test_an_option_of_a_dsn_that_is_wrong() -> None:
    """It is refused before a connection is tried, and the error shows no password."""
    with pytest.raises(ConfigurationError, match="connect_timeout") as refused:
        ForeignPostgres("postgresql://u:s3@127.0.0.1:1/x?connect_timeout=abc")

    assert "s3" not in str(refused.value)


@pytest.mark.parametrize("db", ["mysql://u:s3@h/x", "POSTGRESQL://u:s3@h/x"])
def test_a_dsn_of_another_form_is_no_file(db: str) -> None:
    """Of the settings, and of the classes for files; the password is not shown."""
    for use in (settings.is_dsn, SQLiteStore):
        with pytest.raises(ConfigurationError, match="expected postgresql://") as refused:
            use(db)
        assert "s3" not in str(refused.value)


@pytest.mark.parametrize(
    "wrong",
    [{"pool_size": 0}, {"pool_size": "1"}, {"timeout_s": 0}, {"timeout_s": None}]
    + [{"schema": each} for each in ("Large", "pg_x", None, "x" * 42)],
    ids=str,
)
def test_options_that_are_wrong(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=rf"{next(iter(wrong))} is "):
        PostgresStore("postgresql://localhost/x", **wrong)


def test_a_server_that_refuses(options: dict[str, Any]) -> None:
    """It does run, so that trying again is no help."""
    there = make_conninfo(postgres_server.dsn(), dbname="not_there")
    with pytest.raises(ConfigurationError, match="check user, password and database"):
        PostgresStore.open(there, **options)
    role = postgres_server.dsn_of("may_nothing", owner=False)
    with pytest.raises(StorageError, match="grant the privilege to the role"):
        PostgresStore.open(role, **options)


def test_a_database_in_another_encoding(options: dict[str, Any]) -> None:
    """Refused: text would come back as bytes. The client's own encoding is ours to choose."""
    name, dsn = f"ascii_{options['schema']}", postgres_server.dsn()
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(
            f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' "
            "TEMPLATE template0"
        )
    with pytest.raises(ConfigurationError, match="server_encoding=SQL_ASCII"):
        PostgresStore.open(make_conninfo(dsn, dbname=name), **options)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(f"DROP DATABASE {name}")
    with PostgresStore.open(make_conninfo(dsn, client_encoding="LATIN1"), **options) as store:
        store.put(("ключ",), "ключ", {"text": "ключ"})
        assert [item.key for item in store.search((), filter={"text": "ключ"})] == ["ключ"]


@pytest.mark.parametrize("level", ["repeatable", "serializable"])
def test_a_role_of_another_isolation_level(level: str, options: dict[str, Any]) -> None:
    """A write sees what was committed while it waited: of a deleted thread nothing comes back."""
    level = {"repeatable": "repeatable\\ read"}.get(level, level)
    dsn = make_conninfo(postgres_server.dsn(), options=f"-c default_transaction_isolation={level}")
    with (
        PostgresCheckpointer.open(dsn, **options) as saver,
        PostgresCheckpointer.open(dsn, **options) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        for _ in range(25):
            config = saver.put(CONFIG, empty_checkpoint(), {"source": "loop", "step": 0}, {})
            deleted = pool.submit(other.delete_thread, "t")
            for number in range(4):
                with suppress(ThreadDeleted):  # it was deleted before this write
                    saver.put_writes(config, [("a", number)], f"task {number}")
            deleted.result()
            saver.delete_thread("t")
        with psycopg.connect(postgres_server.dsn()) as conn:
            left = conn.execute(f"SELECT count(*) FROM {options['schema']}.writes").fetchall()

    assert left == [(0,)]


ODD: dict[str, str] = {
    "DateStyle": "German, DMY",
    "IntervalStyle": "sql_standard",
    "TimeZone": "<+0330>-03:30",
    "standard_conforming_strings": "off",
    "client_encoding": "LATIN1",
    "bytea_output": "escape",
    "extra_float_digits": "-15",
    "array_nulls": "off",
    "transform_null_equals": "on",
    "quote_all_identifiers": "on",
    "search_path": "nowhere",
    "default_transaction_isolation": "repeatable read",
    "default_transaction_deferrable": "on",
}


def sessions_with(dsn: str, settings: dict[str, str]) -> str:
    """A DSN whose sessions begin with other settings, as those of a role may."""
    pairs = (f"-c {name}={value}".replace(" ", "\\ ") for name, value in settings.items())
    return make_conninfo(dsn, options=" ".join(pair.replace("-c\\ ", "-c ") for pair in pairs))


@pytest.fixture
def role(options: dict[str, Any]) -> Iterator[str]:
    """A role of the test's own."""
    name = f"r{options['schema']}"
    postgres_server.dsn_of(name)
    yield name
    with psycopg.connect(postgres_server.dsn(), autocommit=True) as conn:
        conn.execute(f"DROP OWNED BY {name} CASCADE")
        conn.execute(f"DROP ROLE {name}")


@pytest.mark.parametrize("tenant", [None, "a"])
def test_a_role_of_other_settings(tenant: str | None, options: dict[str, Any]) -> None:
    """Whatever a role's sessions begin with, what is written is read, searched, listed, locked."""
    dsn = sessions_with(postgres_server.dsn_of("odd"), ODD)
    text = "tea \\ 'müde' ☃"
    with (
        PostgresCheckpointer.open(dsn, tenant=tenant, **options) as saver,
        PostgresStore.open(dsn, tenant=tenant, **options) as store,
    ):
        with saver.lock("t"):
            checkpoint = {
                **empty_checkpoint(),
                "channel_values": {"x": [text, 0.1 + 0.2, None, b"\0\xff"]},
                "channel_versions": {"x": "1"},
            }
            put: Any = checkpoint
            saver.put(CONFIG, put, {"source": "loop", "step": 0}, {"x": "1"})
        store.put(("a",), text, {"text": text, "score": 0.1 + 0.2, "at": None})
        read = saver.get_tuple(CONFIG)
        items = store.search(("a",), query="tea", filter={"score": {"$gte": 0.1 + 0.2}})

        assert read is not None
        assert read.checkpoint["channel_values"] == checkpoint["channel_values"]
        assert [(item.key, item.value["score"]) for item in items] == [(text, 0.1 + 0.2)]
        assert [thread.thread_id for thread in saver.threads()] == ["t"]
        assert store.forget(("a",)).items == 1


def test_a_role_whose_idle_sessions_end(options: dict[str, Any]) -> None:
    """A lock is held as long as it is needed; a connection that was ended is replaced."""
    name = f"idle {options['schema']}"
    dsn = make_conninfo(postgres_server.dsn(), application_name=name)
    dsn = sessions_with(dsn, {"idle_session_timeout": "500"})
    mine = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
    with (
        PostgresCheckpointer.open(dsn, **options) as saver,
        psycopg.connect(postgres_server.dsn(), autocommit=True) as conn,
        saver.lock("t"),
    ):
        for _ in range(2):  # the lock's is idle for longer than the one of a put
            saver.put(CONFIG, empty_checkpoint(), {"source": "loop", "step": 0}, {})
            while conn.execute(mine, (name,)).fetchone() == (2,):
                conn.execute("SELECT pg_sleep(0.02)")

        assert saver.get_tuple(CONFIG) is not None


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ("NOLOGIN", ConfigurationError, "is not permitted to log in"),
        ("CONNECTION LIMIT 0", StorageUnavailable, "too many connections for role"),
    ],
)
def test_why_there_is_no_other_connection(
    change: str, error: type[Exception], reason: str, role: str, options: dict[str, Any]
) -> None:
    """Once it was open: the server's reason, and no advice about the pool."""
    dsn = make_conninfo(postgres_server.dsn(), user=role)
    with PostgresStore.open(dsn, timeout_s=2, **options) as store:
        with psycopg.connect(postgres_server.dsn(), autocommit=True) as conn:
            conn.execute(f"ALTER ROLE {role} {change}")
            conn.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", (role,)
            )
        with pytest.raises(error, match=reason) as refused:
            store.get(("a",), "k")

    assert "pool_size" not in str(refused.value)


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_fork_leaves_the_parent_its_locks(options: dict[str, Any]) -> None:
    """Also one that closes what it has inherited."""
    with PostgresCheckpointer.open(postgres_server.dsn(), **options) as saver, saver.lock("t"):
        child = os.fork()
        if not child:
            try:
                saver.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        saver.put(CONFIG, empty_checkpoint(), {"source": "loop", "step": 0}, {})

        assert saver.get_tuple(CONFIG) is not None
