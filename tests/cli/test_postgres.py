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
    """A database of the test's own: commands take no schema."""
    ours, name = postgres_server.dsn(), f"cli_{uuid.uuid4().hex}"
    database = ours.replace(str(psycopg.conninfo.conninfo_to_dict(ours)["dbname"]), name)
    with psycopg.connect(ours, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name}")
        monkeypatch.setenv("PERDURE_DB", database)
        yield database
        conn.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(autouse=True)
def _on_postgres(_no_settings: None, db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_DB", db)


def test_threads_and_memories() -> None:
    """Talk, look back, fork, rewind, remember, find, forget, and delete."""
    for text in ("I pack a red tent", "What do I pack?"):
        run("chat", "--thread", "trip", "-m", text)
    items = run_json("history", "trip")
    before = [each["checkpoint_id"] for each in reversed(run_json("show", "trip"))]
    run("fork", "trip", "copy")
    run("rewind", "trip", "--to", before[2])
    run("memories", "add", "Ann is allergic to nuts")
    found = run_json("memories", "search", "nuts")
    counts = run_json("stats")
    run("memories", "forget", "--yes", *[each["key"] for each in found])
    run("retain", "--last", "1", stdin="y\n")
    run("delete", "trip", "--yes")

    assert [item["content"] for item in items][0::2] == ["I pack a red tent", "What do I pack?"]
    assert [memory["text"] for memory in found] == ["Ann is allergic to nuts"]
    assert counts["threads"] == 2
    assert invoke("memories", "search", "nuts").exit_code == 1
    assert [info["thread_id"] for info in run_json("threads")] == ["copy"]
    assert len(run_json("history", "copy")) == len(items)


def test_a_forgotten_memory_is_not_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes neither as a merge of a file, nor after that merge a second time."""
    monkeypatch.chdir(tmp_path)
    run("memories", "add", "Ann lives in Bergen", "--db", "other.db")
    run("memories", "add", "Ann likes figs", "--db", "other.db")
    run("import", "other.db")
    (found,) = run_json("memories", "search", "Bergen")
    run("memories", "forget", "--yes", found["key"])
    reports = [run_json("import", "other.db") for _ in range(2)]

    named = [{"namespace": ["memories", "me"], "key": found["key"]}]
    assert [report["refused"] for report in reports] == [named] * 2
    assert [memory["text"] for memory in run_json("memories", "list")] == ["Ann likes figs"]


def test_a_server_that_is_away_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As any error of a user is."""
    monkeypatch.setenv("PERDURE_DB", "postgresql://nobody@127.0.0.1:1/none?connect_timeout=2")

    assert "StorageUnavailable" in type(invoke("threads").exception).__name__
