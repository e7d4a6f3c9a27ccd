"""`import_from` a DSN: tables that langgraph's own Postgres saver and store wrote."""

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
from langgraph.store.postgres import PostgresStore as TheirStore
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
from tests.cli.commands import error, run
from tests.contracts.puts import put
from tests.contracts.test_import import build, everything
from tests.contracts.test_types import Profile
from tests.store_backends import of_words


def new_schema() -> str:
    """A DSN whose tables are in a schema of their own."""
    name = f"theirs_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres_server.dsn(), autocommit=True) as conn:
        conn.execute(f"CREATE SCHEMA {name}")
    return f"{postgres_server.dsn()}&options=-csearch_path%3D{name}"


def agent(saver: Any) -> Any:
    return create_agent(FakeListChatModel(responses=["first", "second"]), checkpointer=saver)


def at(thread_id: str) -> Any:
    return {"configurable": {"thread_id": thread_id}}


@pytest.fixture(scope="module")
def old() -> str:
    """Subgraphs, sends, a fork, a thread that waits in an interrupt, and one of an agent."""
    dsn = new_schema()
    with PostgresSaver.from_conn_string(dsn) as saver:
        saver.setup()
        graph = build(saver)
        for text in ("one", "two"):
            graph.invoke({"messages": [("human", text)]}, {**at("a"), "metadata": {"user": "u1"}})
        early = list(graph.get_state_history(at("a")))[4].config
        graph.update_state(early, {"messages": [("human", "a fork")]}, as_node="sub")
        graph.invoke({"messages": [("human", "well?")]}, at("c"))
        agent(saver).invoke({"messages": [("human", "hello")]}, at("agent"))
    return dsn


@pytest.fixture
def expected(old: str) -> Iterator[dict[tuple[str, str, str], CheckpointTuple]]:
    with PostgresSaver.from_conn_string(old) as saver:
        yield everything(saver)


@pytest.mark.parametrize("backend", ["file", "sealed", "postgres"])
def test_everything_is_taken_over(
    tmp_path: Path, backend: str, old: str, expected: dict[Any, CheckpointTuple]
) -> None:
    """Each checkpoint reads back as the peer gives it; a repetition changes nothing."""
    with BACKENDS[backend](tmp_path) as saver:
        report, again = saver.import_from(old), saver.import_from(old)

        assert expected == everything(saver)
        assert (3, len(expected), 0) == (report.threads, report.checkpoints, report.skipped)
        assert sum(len(t.pending_writes or ()) for t in expected.values()) == report.writes > 0
        assert (0, len(expected)) == (again.checkpoints, again.skipped)


def test_threads_go_on(tmp_path: Path, old: str) -> None:
    """An interrupted run is resumed, a branch is left, and an agent goes on."""
    with BACKENDS["file"](tmp_path) as saver:
        saver.import_from(old)
        resumed = build(saver).invoke(Command(resume="this"), at("c"))
        state = build(saver).invoke({"messages": [("human", "x")]}, at("a"))
        replied = agent(saver).invoke({"messages": [("human", "again")]}, at("agent"))

        assert [m.text for m in resumed["messages"]] == ["well?", "this"]
        assert "a fork" in [m.text for m in state["messages"]]
        assert [m.text for m in replied["messages"]][:2] == ["hello", "first"]
        assert len(replied["messages"]) == 4


def test_a_thread_that_went_on_in_both_is_refused(tmp_path: Path) -> None:
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


def test_types_that_are_not_allowed_are_refused(tmp_path: Path) -> None:
    """The allowlist holds for what others wrote too; the type and its place are named."""
    dsn = new_schema()
    with PostgresSaver.from_conn_string(dsn) as peer:
        peer.setup()
        put(peer, {"p": Profile(fullName="n")}, uid="1")

    with (
        BACKENDS["file"](tmp_path, strict=True) as saver,
        pytest.raises(ForbiddenType, match=r"thread 't', checkpoint '1'.*Profile"),
    ):
        saver.import_from(dsn)


def test_other_databases_are_refused(tmp_path: Path) -> None:
    """What has no tables of langgraph's, by name and without a password."""
    with (
        BACKENDS["file"](tmp_path) as saver,
        SQLiteStore.open(tmp_path / "s.db", **of_words()) as store,
    ):
        for import_from in (saver.import_from, store.import_from):
            with pytest.raises(NotADatabase, match=r"postgresql://postgres@.* has no table"):
                import_from(new_schema())


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package to install is named."""
    monkeypatch.setitem(__import__("sys").modules, "langgraph.checkpoint.postgres", None)
    with (
        BACKENDS["file"](tmp_path) as saver,
        pytest.raises(MissingDependency, match="pip install langgraph-checkpoint-postgres"),
    ):
        saver.import_from(postgres_server.dsn())


def test_items_come_with_their_times(tmp_path: Path) -> None:
    """Also with what is left of their lives; again, nothing does."""
    dsn = new_schema()
    with TheirStore.from_conn_string(dsn) as theirs:
        theirs.setup()
        for n in range(3):
            theirs.put(("users", "ümit", str(n)), "k", {"text": f"tea {n}", "deep": [1, None, "é"]})
        theirs.put(("mortal",), "m", {"text": "milk"}, ttl=60)
        wanted = {(i.namespace, i.key): i for i in theirs.search((), limit=10)}
    with SQLiteStore.open(tmp_path / "s.db", **of_words()) as store:
        report, again = store.import_from(dsn), store.import_from(dsn)
        found = {(i.namespace, i.key): i for i in store.search((), limit=10)}
        mortal = store.get(("mortal",), "m", refresh_ttl=False)

        assert (report.items, again.skipped) == (4, 4)
        assert {k: (i.value, i.created_at) for k, i in wanted.items()} == {
            k: (i.value, i.created_at) for k, i in found.items()
        }
        assert mortal is not None
        assert mortal.expires_at is not None


def test_keywords_and_sessions_of_other_settings(tmp_path: Path) -> None:
    """Such a DSN is taken by the saver, the store and the command; times are read in any style."""
    old = new_schema()
    with PostgresSaver.from_conn_string(old) as peer, TheirStore.from_conn_string(old) as theirs:
        peer.setup()
        put(peer, {"x": 1}, uid="1")
        theirs.setup()
        theirs.put(("a",), "k", {"n": 1})
        item = theirs.get(("a",), "k")
    parts: dict[str, Any] = {**conninfo_to_dict(old)}
    odd = f"{parts.pop('options')} -c DateStyle=German -c TimeZone=Asia/Tokyo"
    dsn = make_conninfo(**parts, options=odd)
    with (
        BACKENDS["file"](tmp_path) as saver,
        SQLiteStore.open(tmp_path / "s.db", **of_words()) as store,
    ):
        report, items = saver.import_from(dsn), store.import_from(dsn).items
        ours = store.get(("a",), "k")

    assert (report.checkpoints, items) == (1, 1)
    assert item is not None
    assert ours is not None
    assert item.created_at == ours.created_at
    assert "1 new checkpoint" in run("import", dsn, "--db", str(tmp_path / "c.db"))


def test_special_writes_come_last(tmp_path: Path) -> None:
    """A task's other writes keep their numbers, so that they are not added when it is repeated."""
    dsn = new_schema()
    writes = [("messages", "hello"), ("other", 2)]
    with PostgresSaver.from_conn_string(dsn) as peer, BACKENDS["file"](tmp_path) as saver:
        peer.setup()
        config = put(peer, {"x": 1}, uid="1")
        peer.put_writes(config, [("__resume__", ["x"])], "task")
        peer.put_writes(config, writes, "task")
        saver.import_from(dsn)
        for each in (peer, saver):
            each.put_writes(config, writes, "task")

        theirs, ours = (everything(each)["t", "", "1"].pending_writes for each in (peer, saver))
        assert sorted(theirs or (), key=repr) == sorted(ours or (), key=repr)
        assert len(ours or ()) == 3


def test_tables_of_older_versions(tmp_path: Path) -> None:
    """Without paths of tasks; without lives of items."""
    dsn = new_schema()
    with PostgresSaver.from_conn_string(dsn) as peer, TheirStore.from_conn_string(dsn) as theirs:
        peer.setup()
        theirs.setup()
        config = put(peer, {"x": 1}, uid="1")
        peer.put_writes(config, [("x", 2)], "task")
        theirs.put(("a",), "k", {"n": 1})
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("ALTER TABLE checkpoint_writes DROP COLUMN task_path")
        conn.execute("ALTER TABLE store DROP COLUMN expires_at, DROP COLUMN ttl_minutes")
    with (
        BACKENDS["file"](tmp_path) as saver,
        SQLiteStore.open(tmp_path / "s.db", **of_words()) as store,
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
def test_damaged_checkpoints_are_named(sql: str, tmp_path: Path) -> None:
    """The thread and the checkpoint."""
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
    ("parts", "told"), [("saver", "1 new checkpoint"), ("store", "1 new item")]
)
def test_the_command_takes_what_there_is(
    parts: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints without items, and items without checkpoints."""
    monkeypatch.chdir(tmp_path)
    dsn = new_schema()
    if parts == "saver":
        with PostgresSaver.from_conn_string(dsn) as peer:
            peer.setup()
            put(peer, {"x": 1}, uid="1")
    else:
        with TheirStore.from_conn_string(dsn) as theirs:
            theirs.setup()
            theirs.put(("a",), "k", {"n": 1})

    assert told in run("import", dsn, "--db", "new.db")


def test_the_command_gives_memories_to_the_users_whom_the_threads_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dsn = new_schema()
    with PostgresSaver.from_conn_string(dsn) as peer:
        peer.setup()
        for thread, user in (("a", {"user_id": "ann"}), ("b", {})):
            config: Any = {"configurable": {"thread_id": thread, **user}}
            agent(peer).invoke({"messages": [("human", f"I am in {thread}")]}, config)
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


def test_the_command_names_a_database_without_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Neither checkpoints nor items."""
    monkeypatch.chdir(tmp_path)

    assert "has no tables of" in error("import", new_schema(), "--db", "new.db", into=capsys)
