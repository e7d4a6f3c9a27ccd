"""The command line on Postgres, chosen by PERDURE_DB alone."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests import postgres_server
from tests.cli.commands import invoke, run, run_json


@pytest.fixture
def db(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Create a database, since commands have no option for a schema, and yield its DSN."""
    server_dsn, name = postgres_server.dsn(), f"cli_{uuid.uuid4().hex}"
    database = server_dsn.replace(
        str(psycopg.conninfo.conninfo_to_dict(server_dsn)["dbname"]), name
    )
    with psycopg.connect(server_dsn, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name}")
        monkeypatch.setenv("PERDURE_DB", database)
        yield database
        conn.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(autouse=True)
def _on_postgres(_no_settings: None, db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_DB", db)


def test_thread_and_memory_commands_work_on_postgres() -> None:
    """A thread is forked, rewound, pruned and deleted; a memory is added, found and forgotten."""
    for text in ("I pack a red tent", "What do I pack?"):
        run("chat", "--thread", "trip", "-m", text)
    items = run_json("history", "trip")
    before = [row["checkpoint_id"] for row in reversed(run_json("show", "trip"))]
    run("fork", "trip", "copy")
    run("rewind", "trip", "--to", before[2])
    run("memories", "add", "Ann is allergic to nuts")
    memories = run_json("memories", "search", "nuts")
    counts = run_json("stats")
    run("memories", "forget", "--yes", *[row["key"] for row in memories])
    run("retain", "--last", "1", stdin="y\n")
    run("delete", "trip", "--yes")

    assert [item["content"] for item in items][0::2] == ["I pack a red tent", "What do I pack?"]
    assert [memory["text"] for memory in memories] == ["Ann is allergic to nuts"]
    assert counts["threads"] == 2
    assert invoke("memories", "search", "nuts").exit_code == 1
    assert [info["thread_id"] for info in run_json("threads")] == ["copy"]
    assert len(run_json("history", "copy")) == len(items)


def test_merge_refuses_memory_that_was_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated merge refuses the memory as well."""
    monkeypatch.chdir(tmp_path)
    run("memories", "add", "Ann lives in Bergen", "--db", "other.db")
    run("memories", "add", "Ann likes figs", "--db", "other.db")
    run("import", "other.db")
    (forgotten,) = run_json("memories", "search", "Bergen")
    run("memories", "forget", "--yes", forgotten["key"])
    reports = [run_json("import", "other.db") for _ in range(2)]

    expected_refusals = [{"namespace": ["memories", "me"], "key": forgotten["key"]}]
    assert [report["refused"] for report in reports] == [expected_refusals] * 2
    assert [memory["text"] for memory in run_json("memories", "list")] == ["Ann likes figs"]


def test_unreachable_server_is_a_storage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is one of perdure's, so the program prints it in one line."""
    monkeypatch.setenv("PERDURE_DB", "postgresql://nobody@127.0.0.1:1/none?connect_timeout=2")

    assert "StorageUnavailable" in type(invoke("threads").exception).__name__
