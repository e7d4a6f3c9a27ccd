"""Kinds of Postgres servers and DSNs, and forks of processes that use Postgres."""

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
DSNS_WITH_PASSWORD = [
    "postgresql://u:s3@cret@db/x",
    "postgresql://u:s3%zzt@db/x",
    "mysql+x://u:s3@db/x",
]


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """Return options with a schema for the test."""
    return {"schema": postgres_server.schema_name(tmp_path), "pool_size": 2}


def test_open_with_unreachable_server_raises(tmp_path: Path) -> None:
    with pytest.raises(StorageUnavailable, match="can be reached"):
        PostgresCheckpointer.open(f"postgresql://nobody@/x?host={tmp_path}", timeout_s=1)


@pytest.mark.parametrize(
    "dsn", ["", 5, None, "agent.db", "postgresql://[", "host=x unknown=y", *DSNS_WITH_PASSWORD]
)
def test_invalid_dsn_is_refused_without_showing_the_password(dsn: Any) -> None:
    with pytest.raises(ConfigurationError, match="DSN") as refused:
        PostgresCheckpointer(dsn)
    assert "s3" not in str(refused.value)


def test_missing_psycopg_is_reported_when_postgres_is_used() -> None:
    """The error names the packages, and nothing else needs them."""
    code = "import sys; sys.modules['psycopg'] = None; import perdure; perdure.SQLiteStore; "
    done = subprocess.run(
        [sys.executable, "-c", code + "perdure.PostgresStore"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert "MissingDependency: Postgres databases require psycopg and psycopg_pool" in done.stderr


def test_sqlite_store_refuses_dsn_and_names_postgres_store() -> None:
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
def test_sqlite_store_refuses_keyword_dsn_without_showing_the_password(db: str) -> None:
    """The settings recognise the text as a DSN."""
    with pytest.raises(ConfigurationError, match="PostgresStore") as refused:
        SQLiteStore(db)

    assert settings.is_dsn(db)
    assert "s3" not in str(refused.value)


def test_invalid_dsn_option_is_refused_before_connecting() -> None:
    """The error does not contain the password."""
    with pytest.raises(ConfigurationError, match="connect_timeout") as refused:
        ForeignPostgres("postgresql://u:s3@127.0.0.1:1/x?connect_timeout=abc")

    assert "s3" not in str(refused.value)


@pytest.mark.parametrize("db", ["mysql://u:s3@h/x", "POSTGRESQL://u:s3@h/x"])
def test_dsn_with_other_scheme_is_refused_without_showing_the_password(db: str) -> None:
    """The settings and the SQLite store refuse a DSN that does not begin with postgresql://."""
    for use in (settings.is_dsn, SQLiteStore):
        with pytest.raises(ConfigurationError, match="expected postgresql://") as refused:
            use(db)
        assert "s3" not in str(refused.value)


@pytest.mark.parametrize(
    "invalid_option",
    [{"pool_size": 0}, {"pool_size": "1"}, {"timeout_s": 0}, {"timeout_s": None}]
    + [{"schema": each} for each in ("Large", "pg_x", None, "x" * 42)],
    ids=str,
)
def test_postgres_store_refuses_invalid_option_by_name(invalid_option: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=rf"'{next(iter(invalid_option))}' is "):
        PostgresStore("postgresql://localhost/x", **invalid_option)


def test_refusal_by_running_server_is_not_reported_as_unreachable(options: dict[str, Any]) -> None:
    """The error gives advice other than to retry."""
    missing_database_dsn = make_conninfo(postgres_server.dsn(), dbname="not_there")
    with pytest.raises(ConfigurationError, match="check the user, password and database name"):
        PostgresStore.open(missing_database_dsn, **options)
    role = postgres_server.dsn_of_role("may_nothing", owner=False)
    with pytest.raises(StorageError, match="grant the privilege to the role"):
        PostgresStore.open(role, **options)


def test_database_with_other_encoding_is_refused(options: dict[str, Any]) -> None:
    """Text would be returned as bytes. The client encoding of the DSN is overridden."""
    name, dsn = f"ascii_{options['schema']}", postgres_server.dsn()
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(
            f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' "
            "TEMPLATE template0"
        )
    with pytest.raises(ConfigurationError, match="SQL_ASCII; expected UTF8"):
        PostgresStore.open(make_conninfo(dsn, dbname=name), **options)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(f"DROP DATABASE {name}")
    with PostgresStore.open(make_conninfo(dsn, client_encoding="LATIN1"), **options) as store:
        store.put(("ключ",), "ключ", {"text": "ключ"})
        assert [item.key for item in store.search((), filter={"text": "ключ"})] == ["ключ"]


@pytest.mark.parametrize("level", ["repeatable", "serializable"])
def test_role_with_other_isolation_level_leaves_no_writes_of_deleted_thread(
    level: str, options: dict[str, Any]
) -> None:
    """A write sees what was committed while it waited."""
    level = {"repeatable": "repeatable\\ read"}.get(level, level)
    dsn = make_conninfo(postgres_server.dsn(), options=f"-c default_transaction_isolation={level}")
    with (
        PostgresCheckpointer.open(dsn, **options) as saver,
        PostgresCheckpointer.open(dsn, **options) as other_saver,
        ThreadPoolExecutor(1) as pool,
    ):
        for _ in range(25):
            config = saver.put(CONFIG, empty_checkpoint(), {"source": "loop", "step": 0}, {})
            deleted = pool.submit(other_saver.delete_thread, "t")
            for number in range(4):
                with suppress(ThreadDeleted):  # the thread was deleted before this write
                    saver.put_writes(config, [("a", number)], f"task {number}")
            deleted.result()
            saver.delete_thread("t")
        with psycopg.connect(postgres_server.dsn()) as conn:
            remaining = conn.execute(f"SELECT count(*) FROM {options['schema']}.writes").fetchall()

    assert remaining == [(0,)]


ODD_SETTINGS: dict[str, str] = {
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


def dsn_with_settings(dsn: str, settings: dict[str, str]) -> str:
    """Return a DSN whose sessions begin with these settings, as those of a role may."""
    pairs = (f"-c {name}={value}".replace(" ", "\\ ") for name, value in settings.items())
    return make_conninfo(dsn, options=" ".join(pair.replace("-c\\ ", "-c ") for pair in pairs))


@pytest.fixture
def role(options: dict[str, Any]) -> Iterator[str]:
    """Create a role for the test, and yield its name."""
    name = f"r{options['schema']}"
    postgres_server.dsn_of_role(name)
    yield name
    with psycopg.connect(postgres_server.dsn(), autocommit=True) as conn:
        conn.execute(f"DROP OWNED BY {name} CASCADE")
        conn.execute(f"DROP ROLE {name}")


@pytest.mark.parametrize("tenant", [None, "a"])
def test_role_with_odd_session_settings_can_read_search_list_and_lock(
    tenant: str | None, options: dict[str, Any]
) -> None:
    """The session settings of a role do not change any result."""
    dsn = dsn_with_settings(postgres_server.dsn_of_role("odd"), ODD_SETTINGS)
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


def test_lock_is_held_although_idle_sessions_are_ended(options: dict[str, Any]) -> None:
    """A connection that the server ended is replaced."""
    name = f"idle {options['schema']}"
    dsn = make_conninfo(postgres_server.dsn(), application_name=name)
    dsn = dsn_with_settings(dsn, {"idle_session_timeout": "500"})
    count_sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
    with (
        PostgresCheckpointer.open(dsn, **options) as saver,
        psycopg.connect(postgres_server.dsn(), autocommit=True) as conn,
        saver.lock("t"),
    ):
        for _ in range(2):  # the lock's connection is idle for longer than that of a put
            saver.put(CONFIG, empty_checkpoint(), {"source": "loop", "step": 0}, {})
            while conn.execute(count_sql, (name,)).fetchone() == (2,):
                conn.execute("SELECT pg_sleep(0.02)")

        assert saver.get_tuple(CONFIG) is not None


@pytest.mark.parametrize(
    ("change", "expected_error", "reason"),
    [
        ("NOLOGIN", ConfigurationError, "is not permitted to log in"),
        ("CONNECTION LIMIT 0", StorageUnavailable, "too many connections for role"),
    ],
)
def test_refused_connection_of_open_store_reports_reason_of_server(
    change: str, expected_error: type[Exception], reason: str, role: str, options: dict[str, Any]
) -> None:
    """The error gives no advice about the pool size."""
    dsn = make_conninfo(postgres_server.dsn(), user=role)
    with PostgresStore.open(dsn, timeout_s=2, **options) as store:
        with psycopg.connect(postgres_server.dsn(), autocommit=True) as conn:
            conn.execute(f"ALTER ROLE {role} {change}")
            conn.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", (role,)
            )
        with pytest.raises(expected_error, match=reason) as refused:
            store.get(("a",), "k")

    assert "pool_size" not in str(refused.value)


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_fork_does_not_release_locks_of_the_parent(options: dict[str, Any]) -> None:
    """A child that closes the inherited saver does not release the parent's locks either."""
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
