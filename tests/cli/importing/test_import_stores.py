"""`perdure import` reads the items of langgraph's SqliteStore and the threads in the same file."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.store.sqlite import SqliteStore

from perdure.graphs import chat_graph
from tests import postgres_server
from tests.cli.commands import run, run_and_read_error, run_json

ITEMS = {("users", "ann"): {"seat": {"text": "aisle"}, "meal": {"text": "vegan"}}}
TARGETS = ["file", "postgres"]


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield the address of the database into which files are imported."""
    if request.param == "file":
        yield str(tmp_path / "x.db")
        return
    server_dsn, name = postgres_server.dsn(), f"import_{uuid.uuid4().hex}"
    with psycopg.connect(server_dsn, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name}")
        yield server_dsn.replace(str(psycopg.conninfo.conninfo_to_dict(server_dsn)["dbname"]), name)
        conn.execute(f"DROP DATABASE {name} WITH (FORCE)")


def write_threads(path: Path) -> None:
    """Write two threads, one message each, with langgraph's saver."""
    with SqliteSaver.from_conn_string(str(path)) as saver:
        graph: Any = chat_graph(checkpointer=saver)
        for thread in ("one", "two"):
            graph_input = {"messages": [HumanMessage(f"I am on {thread}")]}
            graph.invoke(graph_input, {"configurable": {"thread_id": thread, "user_id": "ann"}})


def write_items(path: Path) -> None:
    """Write two items with langgraph's store."""
    with SqliteStore.from_conn_string(str(path)) as store:
        store.setup()
        for namespace, values in ITEMS.items():
            for key, value in values.items():
                store.put(namespace, key, value)


def read_items(db: str) -> dict[str, Any]:
    """Return the items below `users` by key."""
    return {item["key"]: item["value"] for item in run_json("store", "search", "users", "--db", db)}


def test_file_with_threads_and_items_is_imported_completely(tmp_path: Path, target: str) -> None:
    """A repeated import finds both in the database."""
    path = tmp_path / "both.db"
    write_threads(path)
    write_items(path)
    first, again = (run_json("import", str(path), "--db", target) for _ in range(2))

    assert (first["conversations"], first["items"], first["known_items"]) == (2, 2, 0)
    assert (again["conversations"], again["unchanged"]) == (2, 2)
    assert (again["items"], again["known_items"]) == (0, 2)
    assert read_items(target) == ITEMS["users", "ann"]
    assert sorted(thread["thread_id"] for thread in run_json("threads", "--db", target)) == [
        "one",
        "two",
    ]


def test_file_with_items_only_is_imported(tmp_path: Path, target: str) -> None:
    """The file needs no table of a saver."""
    path = tmp_path / "store.db"
    write_items(path)

    assert run("import", str(path), "--db", target) == "0 conversations: 2 new items, 0 memories\n"
    assert read_items(target) == ITEMS["users", "ann"]


def test_file_with_threads_only_is_imported(tmp_path: Path, target: str) -> None:
    """A table of another program that has the name of the store's table is ignored."""
    path = tmp_path / "threads.db"
    write_threads(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE store (city TEXT)")
        db.commit()
    report = run_json("import", str(path), "--db", target)

    assert (report["conversations"], report["items"]) == (2, 0)


def test_file_without_threads_and_items_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names both kinds of tables that are missing."""
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE shops (city TEXT)")
        db.commit()
    message = run_and_read_error("import", str(path), capsys=capsys)

    assert "does not contain the tables of langgraph-checkpoint-sqlite" in message
    assert "does not contain the table of langgraph's SqliteStore" in message


def test_item_above_max_value_size_is_refused(
    tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--max-value-mb` applies to items as it does to threads."""
    path = tmp_path / "large.db"
    with SqliteStore.from_conn_string(str(path)) as store:
        store.setup()
        store.put(("users", "ann"), "long", {"text": "x" * (2 << 20)})
    message = run_and_read_error(
        "import", str(path), "--max-value-mb", "1", "--db", target, capsys=capsys
    )

    assert "has a value of more than 1 MB" in message
    assert run_json("import", str(path), "--db", target)["items"] == 1
