"""`import_from` with a DSN copies the tables of langgraph's Postgres saver and store."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from langchain.agents import create_agent
from langchain_core.language_models import FakeListChatModel
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.store.postgres import PostgresStore as LanggraphPostgresStore
from langgraph.types import Command
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from perdure.errors import (
    CorruptRecord,
    ForbiddenType,
    ImportFailed,
    MissingDependency,
    NotADatabase,
)
from perdure.stores import SQLiteStore
from tests import postgres_server
from tests.backends import BACKENDS
from tests.cli.commands import run, run_and_read_error
from tests.contracts.puts import put
from tests.contracts.test_import import compile_graph, read_all_checkpoints
from tests.contracts.test_types import Profile
from tests.store_backends import make_options


def new_schema() -> str:
    """Create a schema, and return a DSN whose tables are in it."""
    name = f"theirs_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres_server.dsn(), autocommit=True) as conn:
        conn.execute(f"CREATE SCHEMA {name}")
    return f"{postgres_server.dsn()}&options=-csearch_path%3D{name}"


def make_agent(saver: Any) -> Any:
    return create_agent(FakeListChatModel(responses=["first", "second"]), checkpointer=saver)


def make_config(thread_id: str) -> Any:
    return {"configurable": {"thread_id": thread_id}}


@pytest.fixture(scope="module")
def langgraph_dsn() -> str:
    """A database with subgraphs, sends, a fork, an interrupted thread, and a thread of an agent."""
    dsn = new_schema()
    with PostgresSaver.from_conn_string(dsn) as saver:
        saver.setup()
        graph = compile_graph(saver)
        for text in ("one", "two"):
            graph.invoke(
                {"messages": [("human", text)]}, {**make_config("a"), "metadata": {"user": "u1"}}
            )
        early = list(graph.get_state_history(make_config("a")))[4].config
        graph.update_state(early, {"messages": [("human", "a fork")]}, as_node="sub")
        graph.invoke({"messages": [("human", "well?")]}, make_config("c"))
        make_agent(saver).invoke({"messages": [("human", "hello")]}, make_config("agent"))
    return dsn


@pytest.fixture
def expected(langgraph_dsn: str) -> Iterator[dict[tuple[str, str, str], CheckpointTuple]]:
    with PostgresSaver.from_conn_string(langgraph_dsn) as saver:
        yield read_all_checkpoints(saver)


@pytest.mark.parametrize("backend", ["file", "sealed", "postgres"])
def test_postgres_import_copies_every_checkpoint_unchanged(
    tmp_path: Path, backend: str, langgraph_dsn: str, expected: dict[Any, CheckpointTuple]
) -> None:
    """Each checkpoint equals that of langgraph's saver, and a second import adds nothing."""
    with BACKENDS[backend](tmp_path) as saver:
        report, second_report = saver.import_from(langgraph_dsn), saver.import_from(langgraph_dsn)

        assert expected == read_all_checkpoints(saver)
        assert (3, len(expected), 0) == (report.threads, report.checkpoints, report.skipped)
        assert sum(len(t.pending_writes or ()) for t in expected.values()) == report.writes > 0
        assert (0, len(expected)) == (second_report.checkpoints, second_report.skipped)


def test_threads_imported_from_postgres_continue(tmp_path: Path, langgraph_dsn: str) -> None:
    """An interrupted run is resumed, a fork continues, and an agent answers."""
    with BACKENDS["file"](tmp_path) as saver:
        saver.import_from(langgraph_dsn)
        resumed = compile_graph(saver).invoke(Command(resume="this"), make_config("c"))
        state = compile_graph(saver).invoke({"messages": [("human", "x")]}, make_config("a"))
        agent_state = make_agent(saver).invoke(
            {"messages": [("human", "again")]}, make_config("agent")
        )

        assert [m.text for m in resumed["messages"]] == ["well?", "this"]
        assert "a fork" in [m.text for m in state["messages"]]
        assert [m.text for m in agent_state["messages"]][:2] == ["hello", "first"]
        assert len(agent_state["messages"]) == 4


def test_postgres_import_refuses_thread_that_continued_in_both_databases(tmp_path: Path) -> None:
    """Two histories are not mixed into one thread."""
    dsn = new_schema()
    with PostgresSaver.from_conn_string(dsn) as peer, BACKENDS["file"](tmp_path) as saver:
        peer.setup()
        put(peer, {"x": 1}, uid="1")
        saver.import_from(dsn)
        put(saver, {"x": 2}, uid="2")
        put(peer, {"x": 3}, uid="3")

        with pytest.raises(ImportFailed, match="thread 't' has"):
            saver.import_from(dsn)


def test_strict_postgres_import_refuses_types_that_are_not_allowed(tmp_path: Path) -> None:
    """The error names the type, the thread and the checkpoint."""
    dsn = new_schema()
    with PostgresSaver.from_conn_string(dsn) as peer:
        peer.setup()
        put(peer, {"p": Profile(fullName="n")}, uid="1")

    with (
        BACKENDS["file"](tmp_path, strict=True) as saver,
        pytest.raises(ForbiddenType, match=r"thread 't', checkpoint '1'.*Profile"),
    ):
        saver.import_from(dsn)


def test_postgres_import_refuses_databases_without_langgraph_tables(tmp_path: Path) -> None:
    """The error names the database without its password."""
    with (
        BACKENDS["file"](tmp_path) as saver,
        SQLiteStore.open(tmp_path / "s.db", **make_options()) as store,
    ):
        for import_from in (saver.import_from, store.import_from):
            with pytest.raises(NotADatabase, match="does not contain the table"):
                import_from(new_schema())


def test_postgres_import_without_package_names_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "langgraph.checkpoint.postgres", None)
    with (
        BACKENDS["file"](tmp_path) as saver,
        pytest.raises(MissingDependency, match="pip install langgraph-checkpoint-postgres"),
    ):
        saver.import_from(postgres_server.dsn())


def test_imported_store_items_keep_creation_and_expiry_times(tmp_path: Path) -> None:
    """A second import adds no item."""
    dsn = new_schema()
    with LanggraphPostgresStore.from_conn_string(dsn) as langgraph_store:
        langgraph_store.setup()
        for n in range(3):
            langgraph_store.put(
                ("users", "ümit", str(n)), "k", {"text": f"tea {n}", "deep": [1, None, "é"]}
            )
        langgraph_store.put(("mortal",), "m", {"text": "milk"}, ttl=60)
        expected_items = {(i.namespace, i.key): i for i in langgraph_store.search((), limit=10)}
    with SQLiteStore.open(tmp_path / "s.db", **make_options()) as store:
        report, second_report = store.import_from(dsn), store.import_from(dsn)
        items = {(i.namespace, i.key): i for i in store.search((), limit=10)}
        expiring_item = store.get(("mortal",), "m", refresh_ttl=False)

        assert (report.items, second_report.skipped) == (4, 4)
        assert {k: (i.value, i.created_at) for k, i in expected_items.items()} == {
            k: (i.value, i.created_at) for k, i in items.items()
        }
        assert expiring_item is not None
        assert expiring_item.expires_at is not None


def test_keyword_dsn_and_other_date_style_and_time_zone_are_accepted(tmp_path: Path) -> None:
    """The checkpointer, the store and the command accept them."""
    langgraph_dsn = new_schema()
    with (
        PostgresSaver.from_conn_string(langgraph_dsn) as peer,
        LanggraphPostgresStore.from_conn_string(langgraph_dsn) as langgraph_store,
    ):
        peer.setup()
        put(peer, {"x": 1}, uid="1")
        langgraph_store.setup()
        langgraph_store.put(("a",), "k", {"n": 1})
        item = langgraph_store.get(("a",), "k")
    parts: dict[str, Any] = {**conninfo_to_dict(langgraph_dsn)}
    session_options = f"{parts.pop('options')} -c DateStyle=German -c TimeZone=Asia/Tokyo"
    dsn = make_conninfo(**parts, options=session_options)
    with (
        BACKENDS["file"](tmp_path) as saver,
        SQLiteStore.open(tmp_path / "s.db", **make_options()) as store,
    ):
        report, items = saver.import_from(dsn), store.import_from(dsn).items
        imported_item = store.get(("a",), "k")

    assert (report.checkpoints, items) == (1, 1)
    assert item is not None
    assert imported_item is not None
    assert item.created_at == imported_item.created_at
    assert "1 new checkpoint" in run("import", dsn, "--db", str(tmp_path / "c.db"))


def test_imported_writes_keep_their_numbers(tmp_path: Path) -> None:
    """A task that is repeated after the import does not add its writes again."""
    dsn = new_schema()
    writes = [("messages", "hello"), ("other", 2)]
    with PostgresSaver.from_conn_string(dsn) as peer, BACKENDS["file"](tmp_path) as saver:
        peer.setup()
        config = put(peer, {"x": 1}, uid="1")
        peer.put_writes(config, [("__resume__", ["x"])], "task")
        peer.put_writes(config, writes, "task")
        saver.import_from(dsn)
        for checkpointer in (peer, saver):
            checkpointer.put_writes(config, writes, "task")

        theirs, ours = (
            read_all_checkpoints(checkpointer)["t", "", "1"].pending_writes
            for checkpointer in (peer, saver)
        )
        assert sorted(theirs or (), key=repr) == sorted(ours or (), key=repr)
        assert len(ours or ()) == 3


def test_postgres_import_accepts_tables_of_older_langgraph_versions(tmp_path: Path) -> None:
    """Older tables have no task paths, and no expiry times of items."""
    dsn = new_schema()
    with (
        PostgresSaver.from_conn_string(dsn) as peer,
        LanggraphPostgresStore.from_conn_string(dsn) as langgraph_store,
    ):
        peer.setup()
        langgraph_store.setup()
        config = put(peer, {"x": 1}, uid="1")
        peer.put_writes(config, [("x", 2)], "task")
        langgraph_store.put(("a",), "k", {"n": 1})
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("ALTER TABLE checkpoint_writes DROP COLUMN task_path")
        conn.execute("ALTER TABLE store DROP COLUMN expires_at, DROP COLUMN ttl_minutes")
    with (
        BACKENDS["file"](tmp_path) as saver,
        SQLiteStore.open(tmp_path / "s.db", **make_options()) as store,
    ):
        report = saver.import_from(dsn)

        assert (report.checkpoints, report.writes, store.import_from(dsn).items) == (1, 1, 1)


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE checkpoints SET checkpoint = '{}'",
        """UPDATE checkpoints SET checkpoint = '{"v": 4}'""",
        "UPDATE checkpoint_blobs SET blob = NULL",
        "UPDATE checkpoint_blobs SET blob = '\\xc1ff'",
        "UPDATE checkpoint_blobs SET type = 'none such'",
    ],
)
def test_error_names_damaged_checkpoint_and_its_thread(sql: str, tmp_path: Path) -> None:
    dsn = new_schema()
    with PostgresSaver.from_conn_string(dsn) as peer:
        peer.setup()
        put(peer, {"x": [1]}, uid="1")
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(sql)
    with (
        BACKENDS["file"](tmp_path) as saver,
        pytest.raises(CorruptRecord, match=r"thread 't', checkpoint '1'"),
    ):
        saver.import_from(dsn)


@pytest.mark.parametrize(
    ("source", "expected_output"), [("saver", "1 new checkpoint"), ("store", "1 new item")]
)
def test_import_command_accepts_checkpoints_only_or_items_only(
    source: str, expected_output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dsn = new_schema()
    if source == "saver":
        with PostgresSaver.from_conn_string(dsn) as peer:
            peer.setup()
            put(peer, {"x": 1}, uid="1")
    else:
        with LanggraphPostgresStore.from_conn_string(dsn) as langgraph_store:
            langgraph_store.setup()
            langgraph_store.put(("a",), "k", {"n": 1})

    assert expected_output in run("import", dsn, "--db", "new.db")


def test_import_command_gives_memories_to_user_of_each_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dsn = new_schema()
    with PostgresSaver.from_conn_string(dsn) as peer:
        peer.setup()
        for thread, user in (("a", {"user_id": "ann"}), ("b", {})):
            config: Any = {"configurable": {"thread_id": thread, **user}}
            make_agent(peer).invoke({"messages": [("human", f"I am in {thread}")]}, config)
    report = run("import", dsn, "--db", "new.db")
    with SQLiteStore.open("new.db") as store:
        threads = {
            item.namespace[1]: item.provenance.thread_id
            for item in store.search(("memories",))
            if item.provenance is not None
        }

    assert threads == {"ann": "a", "me": "b"}
    assert report.startswith("2 conversations (1 of ann, 1 of me): ")
    assert report.endswith("2 memories of ann, 2 of me\n")


def test_import_command_names_database_without_langgraph_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)

    assert "does not contain the tables of" in run_and_read_error(
        "import", new_schema(), "--db", "new.db", capsys=capsys
    )
