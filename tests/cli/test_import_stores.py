"""`perdure import` takes the items of langgraph's SqliteStore, with the threads beside them."""

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
    """The database into which is imported."""
    if request.param == "file":
        yield str(tmp_path / "x.db")
        return
    ours, name = postgres_server.dsn(), f"import_{uuid.uuid4().hex}"
    with psycopg.connect(ours, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name}")
        yield ours.replace(str(psycopg.conninfo.conninfo_to_dict(ours)["dbname"]), name)
        conn.execute(f"DROP DATABASE {name} WITH (FORCE)")


def write_threads(path: Path) -> None:
    """Write two threads, one message each, with langgraph's saver."""
    with SqliteSaver.from_conn_string(str(path)) as saver:
        graph: Any = chat_graph(checkpointer=saver)
        for thread in ("one", "two"):
            said = {"messages": [HumanMessage(f"I am on {thread}")]}
            graph.invoke(said, {"configurable": {"thread_id": thread, "user_id": "ann"}})


def write_items(path: Path) -> None:
    """Write two items with langgraph's store."""
    with SqliteStore.from_conn_string(str(path)) as store:
        store.setup()
        for namespace, values in ITEMS.items():
            for key, value in values.items():
                store.put(namespace, key, value)


def items_in(db: str) -> dict[str, Any]:
    """The items below `users`, by key."""
    return {item["key"]: item["value"] for item in run_json("store", "search", "users", "--db", db)}


def test_a_file_with_threads_and_items_gives_both(tmp_path: Path, target: str) -> None:
    """Neither is left out, and a repetition finds both there."""
    path = tmp_path / "both.db"
    write_threads(path)
    write_items(path)
    first, again = (run_json("import", str(path), "--db", target) for _ in range(2))

    assert (first["conversations"], first["items"], first["known_items"]) == (2, 2, 0)
    assert (again["conversations"], again["unchanged"]) == (2, 2)
    assert (again["items"], again["known_items"]) == (0, 2)
    assert items_in(target) == ITEMS["users", "ann"]
    assert sorted(each["thread_id"] for each in run_json("threads", "--db", target)) == [
        "one",
        "two",
    ]


def test_a_file_with_items_alone_gives_them(tmp_path: Path, target: str) -> None:
    """It needs no table of a saver."""
    path = tmp_path / "store.db"
    write_items(path)

    assert run("import", str(path), "--db", target) == "0 conversations: 2 new items, 0 memories\n"
    assert items_in(target) == ITEMS["users", "ann"]


def test_a_file_with_threads_alone_needs_no_store(tmp_path: Path, target: str) -> None:
    """Nor does a table of another program count that is called like the store's."""
    path = tmp_path / "threads.db"
    write_threads(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE store (city TEXT)")
        db.commit()
    report = run_json("import", str(path), "--db", target)

    assert (report["conversations"], report["items"]) == (2, 0)


def test_a_file_with_neither_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error says what of both was looked for, and nothing is written."""
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE shops (city TEXT)")
        db.commit()
    said = run_and_read_error("import", str(path), capsys=capsys)

    assert "has no tables of langgraph-checkpoint-sqlite" in said
    assert "has no table of langgraph's SqliteStore" in said


def test_an_item_that_is_too_large_is_refused(
    tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--max-value-mb` counts for items, as it does for threads."""
    path = tmp_path / "large.db"
    with SqliteStore.from_conn_string(str(path)) as store:
        store.setup()
        store.put(("users", "ann"), "long", {"text": "x" * (2 << 20)})
    said = run_and_read_error(
        "import", str(path), "--max-value-mb", "1", "--db", target, capsys=capsys
    )

    assert "has a value of more than 1 MB" in said
    assert run_json("import", str(path), "--db", target)["items"] == 1
