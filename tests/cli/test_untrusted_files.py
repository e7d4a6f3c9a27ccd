"""`perdure import` and `copy` of SQLite files that were made to do harm."""

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
from tests.hostile_files import Attack, edit_schema, execute_sql, list_attacks, replace_by_view
from tests.layout import ROOT

ATTACKS_ON_PERDURE_FILE = {
    f"{table}-{name}": attack
    for table, column in (("threads", "thread_id"), ("store_items", "key"))
    for name, attack in list_attacks(table, column).items()
}
ATTACKS_ON_PERDURE_FILE["schemas-view"] = lambda path: replace_by_view(path, "schemas")
ATTACKS_ON_PERDURE_FILE["settings-view"] = lambda path: replace_by_view(path, "settings")
ATTACKS_ON_PERDURE_FILE["column"] = lambda path: execute_sql(
    path, "ALTER TABLE threads ADD COLUMN more TEXT DEFAULT 'x'"
)
ATTACKS_ON_LANGGRAPH_FILE = list_attacks("checkpoints", "thread_id")
ATTACKS_ON_LANGGRAPH_FILE["writes"] = lambda path: replace_by_view(path, "writes")
COMMAND = [sys.executable, "-c", "from perdure.cli import main; main()"]


@pytest.fixture
def other_file(tmp_path: Path) -> Path:
    """Return an intact file with threads and items, without a WAL."""
    path = tmp_path / "other.db"
    write_threads(path, "one", "two")
    with SQLiteStore.open(path) as store:
        store.put(("notes",), "tea", {"text": "green"})
        store.create_index("text")
    return remove_wal(path)


def write_threads(path: Path, *threads: str) -> None:
    with SQLiteCheckpointer.open(path) as saver:
        graph: Any = chat_graph(checkpointer=saver)
        for thread in threads:
            config = {"configurable": {"thread_id": thread}}
            graph.invoke({"messages": [("human", f"hello {thread}")]}, config)


def remove_wal(path: Path) -> Path:
    """Move the WAL into the file, remove the files next to it, and return the file."""
    execute_sql(path, "PRAGMA journal_mode = DELETE")
    for side_file in path.parent.glob(f"{path.name}?*"):
        side_file.unlink()
    return path


def create_langgraph_database(path: Path) -> Path:
    with SqliteSaver.from_conn_string(str(path)) as saver:
        graph: Any = chat_graph(checkpointer=saver)
        graph.invoke({"messages": [("human", "hello")]}, {"configurable": {"thread_id": "one"}})
    return remove_wal(path)


def list_file_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("command", ["import", "copy"])
@pytest.mark.parametrize("attack", ATTACKS_ON_PERDURE_FILE.values(), ids=ATTACKS_ON_PERDURE_FILE)
def test_manipulated_table_of_perdure_file_is_refused(
    attack: Attack,
    command: str,
    other_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The file is refused before anything is written, and is not changed."""
    attack(remove_wal(other_file))
    before = other_file.read_bytes()
    arguments = ["import", "other.db"] if command == "import" else ["copy", "--from", "other.db"]
    target_options = [] if command == "import" else ["--to", "x.db"]

    message = run_and_read_error(*arguments, *target_options, capsys=capsys)

    assert "other.db" in message
    assert before == other_file.read_bytes()
    assert list_file_names(tmp_path) - {"other.db-wal", "other.db-shm"} == {"other.db"}


@pytest.mark.parametrize(
    "attack", ATTACKS_ON_LANGGRAPH_FILE.values(), ids=ATTACKS_ON_LANGGRAPH_FILE
)
def test_manipulated_table_of_langgraph_file_is_refused(
    attack: Attack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command and the method refuse the file before anything is written."""
    path = create_langgraph_database(tmp_path / "other.db")
    attack(path)

    message = run_and_read_error("import", "other.db", capsys=capsys)

    assert "other.db" in message
    assert list_file_names(tmp_path) - {"other.db-wal", "other.db-shm"} == {"other.db"}
    with (
        SQLiteCheckpointer.open(tmp_path / "new.db") as saver,
        pytest.raises(StorageError, match=r"other\.db"),
    ):
        saver.import_from(path)


ATTACKS_ON_LANGGRAPH_STORE = list_attacks("store", "prefix", "text")


@pytest.mark.parametrize(
    "attack", ATTACKS_ON_LANGGRAPH_STORE.values(), ids=ATTACKS_ON_LANGGRAPH_STORE
)
def test_manipulated_table_of_langgraph_store_is_refused(attack: Attack, tmp_path: Path) -> None:
    """No item of the file is imported."""
    with SqliteStore.from_conn_string(str(tmp_path / "other.db")) as langgraph_store:
        langgraph_store.setup()
        langgraph_store.put(("notes",), "tea", {"text": "green"})
    attack(remove_wal(tmp_path / "other.db"))
    with SQLiteStore.open(tmp_path / "new.db") as store:
        with pytest.raises(PerdureError, match=r"other\.db"):
            store.import_from(tmp_path / "other.db")

        assert store.search(()) == []


EQUIVALENT_SQL: dict[str, Callable[[str], str]] = {
    "lines of Windows": lambda sql: sql.replace("\n", "\r\n"),
    "quoted": lambda sql: sql.replace("CREATE TABLE threads", 'CREATE TABLE "threads"'),
    "spaces": lambda sql: sql.replace("(", " (\t").replace(",", " , -- a comment\n"),
    "case": lambda sql: sql.replace("INTEGER", "integer").replace("NOT NULL", "not null"),
}


@pytest.mark.parametrize("edit", EQUIVALENT_SQL.values(), ids=EQUIVALENT_SQL)
def test_table_with_equivalent_sql_is_accepted(
    edit: Callable[[str], str], other_file: Path
) -> None:
    """Differences that do not change the meaning of the SQL are ignored."""
    edit_schema(other_file, "threads", edit)

    assert run_json("import", "other.db")["conversations"] == 2


def test_additional_tables_views_triggers_and_indexes_are_ignored(other_file: Path) -> None:
    """The user may add objects of their own next to perdure's tables, or on these tables."""
    execute_sql(
        other_file,
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
def test_file_with_only_threads_or_only_items_is_imported(part: str, tmp_path: Path) -> None:
    """Reading the file creates no tables in it."""
    if part == "threads":
        write_threads(tmp_path / "other.db", "one")
    else:
        with SQLiteStore.open(tmp_path / "other.db") as store:
            store.put(("notes",), "tea", {"text": "green"})
    before = remove_wal(tmp_path / "other.db").read_bytes()

    report = run_json("import", "other.db")
    copied = run_json("copy", "--from", "other.db", "--to", "copy.db")

    assert (report["conversations"], report["items"]) == ((1, 0) if part == "threads" else (0, 1))
    assert (copied.get("threads", 0), copied.get("store_items", 0)) == (
        (1, 0) if part == "threads" else (0, 1)
    )
    assert before == (tmp_path / "other.db").read_bytes()


LARGE_VALUES = {
    "items": "INSERT INTO items VALUES (1 << 50, 1, 1, zeroblob(3000000))",
    "text": "UPDATE logs SET channel = hex(zeroblob(1500000))",
    "value": "UPDATE store_items SET provenance = zeroblob(3000000)",
}


@pytest.mark.parametrize("sql", LARGE_VALUES.values(), ids=LARGE_VALUES)
def test_value_above_size_limit_is_refused(
    sql: str, other_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is refused before anything is written; the limit can be raised."""
    execute_sql(other_file, sql)

    message = run_and_read_error("import", "other.db", "--max-value-mb", "2", capsys=capsys)

    assert "a value of more than 2 MB" in message
    assert "x.db" not in list_file_names(tmp_path)
    with suppress(PerdureError), SQLiteCheckpointer.open("other.db", untrusted=True) as saver:
        assert len(saver.threads()) == 2  # the default is larger


def test_value_of_langgraph_file_above_size_limit_is_refused(tmp_path: Path) -> None:
    """The method `import_from` has a parameter for the limit."""
    path = create_langgraph_database(tmp_path / "other.db")
    with SQLiteCheckpointer.open(tmp_path / "new.db") as saver:
        with pytest.raises(StorageError, match="a value of more than 0 MB"):
            saver.import_from(path, max_value_bytes=100)

        assert saver.threads() == []
        assert saver.import_from(path).threads == 1


VALUES_OF_WRONG_TYPE = {
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


@pytest.mark.parametrize("sql", VALUES_OF_WRONG_TYPE.values(), ids=VALUES_OF_WRONG_TYPE)
def test_value_of_wrong_type_in_langgraph_file_is_refused(sql: str, tmp_path: Path) -> None:
    """The columns of langgraph's tables take values of any type."""
    path = create_langgraph_database(tmp_path / "other.db")
    execute_sql(path, sql)
    with SQLiteCheckpointer.open(tmp_path / "new.db") as saver, pytest.raises(CorruptRecord):
        saver.import_from(path)


@pytest.mark.skipif(sys.platform == "win32", reason="has no named pipes")
@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-journal"])
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_side_file_that_is_a_pipe_or_link_is_refused(
    suffix: str, kind: str, other_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SQLite would wait for a pipe, and follow a link to a file of the user."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    if kind == "pipe":
        os.mkfifo(f"other.db{suffix}")
    else:
        Path(f"other.db{suffix}").symlink_to(victim)

    message = run_and_read_error("import", "other.db", capsys=capsys)

    assert f"other.db{suffix}" in message
    assert victim.read_text() == "mine"


def test_link_to_database_is_followed(other_file: Path) -> None:
    """The files next to the link's target are used."""
    write_threads(other_file, "three")
    Path("link.db").symlink_to(other_file)

    assert run_json("import", "link.db")["conversations"] == 3


def test_file_that_is_changed_or_replaced_while_open_is_refused(
    other_file: Path, tmp_path: Path
) -> None:
    """Tables may be changed, or another file may take the place of the open one."""
    write_threads(tmp_path / "third.db", "five")
    with SQLiteCheckpointer.open(other_file, untrusted=True) as saver:
        saver.threads()
        replace_by_view(other_file, "threads")
        with pytest.raises(NotADatabase, match=r"'threads' in .* is a view or a virtual table"):
            saver.threads()
    with SQLiteCheckpointer.open(tmp_path / "third.db", untrusted=True) as saver:
        os.replace(tmp_path / "other.db", tmp_path / "third.db")
        with pytest.raises(StorageError, match="was replaced by another file"):
            saver.database._connect_once().connector.open_reader()  # type: ignore[attr-defined]


# -- an import that is stopped

# Number of copied threads: so many that an import is still under way when it is stopped.
COPY_COUNT = 600


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.slow
def test_stopped_import_leaves_only_whole_threads(
    number: signal.Signals, other_file: Path, tmp_path: Path
) -> None:
    """No thread is imported in part, and the import of items has not begun."""
    with SQLiteCheckpointer.open(other_file) as source:
        for at in range(COPY_COUNT):
            source.copy_thread("one", f"t{at}")
    Path("tmp").mkdir()
    env = {**os.environ, "TMPDIR": "tmp", "PYTHONPATH": str(ROOT / "build/view")}
    with subprocess.Popen(
        [*COMMAND, "import", "other.db"], env=env, stderr=-1, text=True
    ) as process:
        while not count_threads("x.db"):
            assert process.poll() is None
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    imported_count = count_threads("x.db")
    with SQLiteCheckpointer.open("x.db") as target, SQLiteCheckpointer.open(other_file) as source:
        are_equal = [
            target.history(t.thread_id) == source.history(t.thread_id)
            for t in target.threads(limit=1000)
        ]
    with SQLiteStore.open("x.db") as store:
        items = store.search(())

    assert (process.returncode, "run the command again to continue" in stderr) == (130, True), (
        stderr
    )
    assert 0 < imported_count < COPY_COUNT + 2
    assert (are_equal, items) == ([True] * imported_count, [])
    assert list_file_names(Path("tmp")) == set()
    assert run_json("import", "other.db")["conversations"] == COPY_COUNT + 2


def count_threads(db: str) -> int:
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{db}?mode=ro", uri=True)) as conn:
        return int(conn.execute("SELECT count(*) FROM threads").fetchone()[0])
    return 0


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
@pytest.mark.slow
def test_stopped_import_of_piped_database_leaves_no_temporary_file(other_file: Path) -> None:
    """SIGTERM ends an import like Ctrl-C, also while the import waits for its input."""
    Path("tmp").mkdir()
    env = {**os.environ, "TMPDIR": "tmp", "PYTHONPATH": str(ROOT / "build/view")}
    with subprocess.Popen([*COMMAND, "import", "-"], env=env, stdin=-1, stderr=-1) as process:
        assert process.stdin is not None
        process.stdin.write(other_file.read_bytes())
        while not list_file_names(Path("tmp")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)

    assert process.returncode == 130
    assert list_file_names(Path("tmp")) == set()
    run("import", "other.db")
    assert json.loads(run("threads", "--json"))
