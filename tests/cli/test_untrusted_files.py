"""`perdure import` and `copy` of SQLite files that somebody made to do harm."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.store.sqlite import SqliteStore

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import CorruptRecord, NotADatabase, PerdureError, StorageError
from perdure.graphs import chat_graph
from perdure.stores import SQLiteStore
from tests.cli.commands import run, run_and_read_error, run_json
from tests.hostile_files import Attack, attacks_on, change, edit_schema, replace_by_view
from tests.layout import ROOT

OWN = {
    f"{table}-{name}": attack
    for table, column in (("threads", "thread_id"), ("store_items", "key"))
    for name, attack in attacks_on(table, column).items()
}
OWN["schemas-view"] = lambda path: replace_by_view(path, "schemas")
OWN["settings-view"] = lambda path: replace_by_view(path, "settings")
OWN["column"] = lambda path: change(path, "ALTER TABLE threads ADD COLUMN more TEXT DEFAULT 'x'")
THEIRS = attacks_on("checkpoints", "thread_id")
THEIRS["writes"] = lambda path: replace_by_view(path, "writes")
COMMAND = [sys.executable, "-c", "from perdure.cli import main; main()"]


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A good file with threads and items, without a WAL."""
    path = tmp_path / "other.db"
    talk(path, "one", "two")
    with SQLiteStore.open(path) as store:
        store.put(("notes",), "tea", {"text": "green"})
        store.create_index("text")
    return plain(path)


def talk(path: Path, *threads: str) -> None:
    with SQLiteCheckpointer.open(path) as saver:
        graph: Any = chat_graph(checkpointer=saver)
        for thread in threads:
            config = {"configurable": {"thread_id": thread}}
            graph.invoke({"messages": [("human", f"hello {thread}")]}, config)


def plain(path: Path) -> Path:
    """The file, with all that its WAL had, and nothing beside it."""
    change(path, "PRAGMA journal_mode = DELETE")
    for beside in path.parent.glob(f"{path.name}?*"):
        beside.unlink()
    return path


def langgraphs(path: Path) -> Path:
    with SqliteSaver.from_conn_string(str(path)) as saver:
        graph: Any = chat_graph(checkpointer=saver)
        graph.invoke({"messages": [("human", "hello")]}, {"configurable": {"thread_id": "one"}})
    return plain(path)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("command", ["import", "copy"])
@pytest.mark.parametrize("attack", OWN.values(), ids=OWN)
def test_a_table_that_is_not_perdures_is_not_read(
    attack: Attack,
    command: str,
    other: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The file is refused before anything is written, and is not changed."""
    attack(plain(other))
    before = other.read_bytes()
    arguments = ["import", "other.db"] if command == "import" else ["copy", "--from", "other.db"]
    more = [] if command == "import" else ["--to", "x.db"]

    told = run_and_read_error(*arguments, *more, capsys=capsys)

    assert "other.db" in told
    assert before == other.read_bytes()
    assert files(tmp_path) - {"other.db-wal", "other.db-shm"} == {"other.db"}


@pytest.mark.parametrize("attack", THEIRS.values(), ids=THEIRS)
def test_a_table_that_is_not_langgraphs_is_not_read(
    attack: Attack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same for files of langgraph's saver, by the command and by the method."""
    path = langgraphs(tmp_path / "other.db")
    attack(path)

    told = run_and_read_error("import", "other.db", capsys=capsys)

    assert "other.db" in told
    assert files(tmp_path) - {"other.db-wal", "other.db-shm"} == {"other.db"}
    with (
        SQLiteCheckpointer.open(tmp_path / "new.db") as saver,
        pytest.raises(StorageError, match=r"other\.db"),
    ):
        saver.import_from(path)


STORES = attacks_on("store", "prefix", "text")


@pytest.mark.parametrize("attack", STORES.values(), ids=STORES)
def test_items_that_are_not_langgraphs_are_not_read(attack: Attack, tmp_path: Path) -> None:
    """Nor are those of a file of langgraph's store, and nothing of them comes."""
    with SqliteStore.from_conn_string(str(tmp_path / "other.db")) as theirs:
        theirs.setup()
        theirs.put(("notes",), "tea", {"text": "green"})
    attack(plain(tmp_path / "other.db"))
    with SQLiteStore.open(tmp_path / "new.db") as store:
        with pytest.raises(PerdureError, match=r"other\.db"):
            store.import_from(tmp_path / "other.db")

        assert store.search(()) == []


LIKE_OWN: dict[str, Callable[[str], str]] = {
    "lines of Windows": lambda sql: sql.replace("\n", "\r\n"),
    "quoted": lambda sql: sql.replace("CREATE TABLE threads", 'CREATE TABLE "threads"'),
    "spaces": lambda sql: sql.replace("(", " (\t").replace(",", " , -- a comment\n"),
    "case": lambda sql: sql.replace("INTEGER", "integer").replace("NOT NULL", "not null"),
}


@pytest.mark.parametrize("edit", LIKE_OWN.values(), ids=LIKE_OWN)
def test_the_same_table_in_other_words_is_read(edit: Callable[[str], str], other: Path) -> None:
    """What does not change the meaning of the SQL is of no concern."""
    edit_schema(other, "threads", edit)

    assert run_json("import", "other.db")["conversations"] == 2


def test_what_is_not_read_does_not_matter(other: Path) -> None:
    """Tables, views, triggers and indexes of the user's own, beside perdure's or on them."""
    change(
        other,
        "CREATE TABLE notes (threads TEXT, x AS (upper(threads)))",
        "CREATE VIEW endless AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) "
        "SELECT * FROM n",
        "CREATE TRIGGER told AFTER UPDATE ON threads BEGIN SELECT raise(ABORT, 'written'); END",
        "CREATE INDEX by_case ON threads (upper(thread_id))",
        "ANALYZE",
    )

    report = run_json("import", "other.db")

    assert (report["conversations"], report["items"]) == (2, 1)


@pytest.mark.parametrize("part", ["threads", "items"])
def test_a_file_of_one_component_comes(part: str, tmp_path: Path) -> None:
    """Reading a file that has no store, or no threads, makes no tables in it."""
    if part == "threads":
        talk(tmp_path / "other.db", "one")
    else:
        with SQLiteStore.open(tmp_path / "other.db") as store:
            store.put(("notes",), "tea", {"text": "green"})
    before = plain(tmp_path / "other.db").read_bytes()

    report = run_json("import", "other.db")
    copied = run_json("copy", "--from", "other.db", "--to", "copy.db")

    assert (report["conversations"], report["items"]) == ((1, 0) if part == "threads" else (0, 1))
    assert (copied.get("threads", 0), copied.get("store_items", 0)) == (
        (1, 0) if part == "threads" else (0, 1)
    )
    assert before == (tmp_path / "other.db").read_bytes()


LARGE = {
    "items": "INSERT INTO items VALUES (1 << 50, 1, 1, zeroblob(3000000))",
    "text": "UPDATE logs SET channel = hex(zeroblob(1500000))",
    "value": "UPDATE store_items SET provenance = zeroblob(3000000)",
}


@pytest.mark.parametrize("sql", LARGE.values(), ids=LARGE)
def test_a_large_value_is_refused(
    sql: str, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is written; the limit can be raised."""
    change(other, sql)

    told = run_and_read_error("import", "other.db", "--max-value-mb", "2", capsys=capsys)

    assert "a value of more than 2 MB" in told
    assert "x.db" not in files(tmp_path)
    with suppress(PerdureError), SQLiteCheckpointer.open("other.db", untrusted=True) as saver:
        assert len(saver.threads()) == 2  # the default is larger


def test_a_large_value_of_langgraphs_is_refused(tmp_path: Path) -> None:
    """Of the method too, which takes another limit."""
    path = langgraphs(tmp_path / "other.db")
    with SQLiteCheckpointer.open(tmp_path / "new.db") as saver:
        with pytest.raises(StorageError, match="a value of more than 0 MB"):
            saver.import_from(path, max_value_bytes=100)

        assert saver.threads() == []
        assert saver.import_from(path).threads == 1


ODD = {
    "number": "UPDATE checkpoints SET checkpoint = 7",
    "nothing": "UPDATE checkpoints SET checkpoint = NULL",
    "type": "UPDATE checkpoints SET type = 7",
    "list": "UPDATE checkpoints SET checkpoint = x'9101'",
    "id": "UPDATE checkpoints SET checkpoint_id = CAST(checkpoint_id AS BLOB)",
    "thread": "UPDATE checkpoints SET thread_id = x'00'",
    "metadata": "UPDATE checkpoints SET metadata = '[' || replace(hex(zeroblob(50000)), '00', '[')",
    "write": "UPDATE writes SET value = 7",
    "versions": "UPDATE checkpoints SET checkpoint = "
    "CAST(x'81b0' || 'channel_versions' || x'05' AS BLOB)",
    "channel": "UPDATE writes SET channel = x'00'",
}


@pytest.mark.parametrize("sql", ODD.values(), ids=ODD)
def test_values_of_another_kind_are_named(sql: str, tmp_path: Path) -> None:
    """A column of langgraph's takes values of any type, and each wrong one is an error by name."""
    path = langgraphs(tmp_path / "other.db")
    change(path, sql)
    with SQLiteCheckpointer.open(tmp_path / "new.db") as saver, pytest.raises(CorruptRecord):
        saver.import_from(path)


@pytest.mark.skipif(sys.platform == "win32", reason="has no named pipes")
@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-journal"])
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_files_beside_it_are_plain(
    suffix: str, kind: str, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SQLite would wait for a pipe, and follow a link to a file of the user's."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    if kind == "pipe":
        os.mkfifo(f"other.db{suffix}")
    else:
        Path(f"other.db{suffix}").symlink_to(victim)

    told = run_and_read_error("import", "other.db", capsys=capsys)

    assert f"other.db{suffix}" in told
    assert victim.read_text() == "mine"


def test_a_link_to_a_file_is_followed(other: Path) -> None:
    """The files beside it are those of the file."""
    talk(other, "three")
    Path("link.db").symlink_to(other)

    assert run_json("import", "link.db")["conversations"] == 3


def test_a_file_that_is_replaced_is_not_read_on(other: Path, tmp_path: Path) -> None:
    """Nor is one whose tables are changed while it is open."""
    talk(tmp_path / "third.db", "five")
    with SQLiteCheckpointer.open(other, untrusted=True) as saver:
        saver.threads()
        replace_by_view(other, "threads")
        with pytest.raises(
            NotADatabase, match="a view or a virtual table in place of the table 'threads'"
        ):
            saver.threads()
    with SQLiteCheckpointer.open(tmp_path / "third.db", untrusted=True) as saver:
        os.replace(tmp_path / "other.db", tmp_path / "third.db")
        with pytest.raises(StorageError, match="was replaced by another file"):
            saver.database._connect_once().connector.open_reader()  # type: ignore[attr-defined]


# -- an import that is stopped


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_import_leaves_whole_threads(
    number: signal.Signals, other: Path, tmp_path: Path
) -> None:
    """Of what was imported nothing is half there, and the items were not begun."""
    with SQLiteCheckpointer.open(other) as there:
        for at in range(150):
            there.copy_thread("one", f"t{at}")
    Path("tmp").mkdir()
    env = {**os.environ, "TMPDIR": "tmp", "PYTHONPATH": str(ROOT / "build/view")}
    with subprocess.Popen([*COMMAND, "import", "other.db"], env=env, stderr=-1, text=True) as done:
        while not count("x.db"):
            assert done.poll() is None
        done.send_signal(number)
        _, told = done.communicate(timeout=60)
    came = count("x.db")
    with SQLiteCheckpointer.open("x.db") as here, SQLiteCheckpointer.open(other) as there:
        same = [
            here.history(t.thread_id) == there.history(t.thread_id)
            for t in here.threads(limit=1000)
        ]
    with SQLiteStore.open("x.db") as store:
        items = store.search(())

    assert (done.returncode, "run the command again to continue" in told) == (130, True), told
    assert 0 < came < 152
    assert (same, items) == ([True] * came, [])
    assert files(Path("tmp")) == set()
    assert run_json("import", "other.db")["conversations"] == 152


def count(db: str) -> int:
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{db}?mode=ro", uri=True)) as conn:
        return int(conn.execute("SELECT count(*) FROM threads").fetchone()[0])
    return 0


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
def test_a_piped_database_leaves_no_copy(other: Path) -> None:
    """SIGTERM ends an import as Ctrl-C does, also while it waits for its input."""
    Path("tmp").mkdir()
    env = {**os.environ, "TMPDIR": "tmp", "PYTHONPATH": str(ROOT / "build/view")}
    with subprocess.Popen([*COMMAND, "import", "-"], env=env, stdin=-1, stderr=-1) as done:
        assert done.stdin is not None
        done.stdin.write(other.read_bytes())
        while not files(Path("tmp")):
            assert done.poll() is None
            time.sleep(0.01)
        done.send_signal(signal.SIGTERM)
        done.wait(timeout=60)

    assert done.returncode == 130
    assert files(Path("tmp")) == set()
    run("import", "other.db")
    assert json.loads(run("threads", "--json"))
