"""Copies of whole databases: of each kind, with keys, after interruptions, of damaged sources."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import string
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
from langchain_core.messages import HumanMessage
from langgraph.store.base import PutOp
from langgraph.types import Command

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.records import ClientMetadata
from perdure.cli import copied_tables
from perdure.cli.copied_store_tables import StoreTables
from perdure.cli.copied_thread_tables import build_thread_table_pair
from perdure.cli.database_copy import DatabaseCopy
from perdure.errors import (
    ConfigurationError,
    CorruptRecord,
    ImportFailed,
    StorageError,
    ThreadDeleted,
)
from perdure.run_tables.assistants import AssistantTable
from perdure.run_tables.crons import CronTable
from perdure.run_tables.records import CronRow
from perdure.run_tables.thread_list import ThreadList, ThreadQuery
from perdure.storage.flow import fetch_rows
from perdure.stores import Provenance, SQLiteStore
from perdure.stores.whole_store import WholeStore
from tests import backends, postgres_server, store_backends
from tests.cli.commands import run, run_and_read_error, run_json
from tests.contracts.puts import config_at, put
from tests.contracts.test_import import compile_graph, read_all_checkpoints
from tests.contracts.test_runs import accept_run, list_run_rows
from tests.server_tables import open_table
from tests.store_backends import Clock

NOTES, MORE = ("users", "ümit", "notes"), ("users", "bo")


class Database(NamedTuple):
    """Threads and items of one database."""

    saver: Checkpointer
    store: WholeStore


@pytest.fixture
def make_database(tmp_path: Path) -> Any:
    """Return a function that opens a new database of a kind in a folder of the given name."""
    with ExitStack() as stack:

        def open_new(kind: str, name: str, **options: Any) -> Database:
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            quick = {} if kind.startswith("postgres") else {"synchronous": "normal"}
            saver = backends.BACKENDS[kind](folder, **quick, **options)
            store = store_backends.BACKENDS[kind](folder, clock=Clock(), **options)
            return Database(stack.enter_context(saver), stack.enter_context(store))

        yield open_new


def fill_database(database: Database) -> None:
    """Write branches, subgraphs, an interrupt, a pruned thread, and versions with provenance."""
    graph = compile_graph(database.saver)
    for thread in ("a", "b%_é", "pruned", "gone"):
        config: Any = {"configurable": {"thread_id": thread}, "metadata": {"user": "u1"}}
        for text in ("one", "two"):
            graph.invoke({"messages": [("human", text)]}, config)
        earlier_config = list(graph.get_state_history(config))[3].config
        graph.update_state(earlier_config, {"messages": [("human", "a fork")]}, as_node="sub")
    graph.invoke({"messages": [("human", "well?")]}, {"configurable": {"thread_id": "c"}})
    accept_run(database.saver, "a", {"request": {"input": "a plan"}})
    accept_run(database.saver, "a")
    for name in ("one", "two"):
        asyncio.run(
            open_table(AssistantTable, database.saver).create(name, {"context": {"plan": name}})
        )
    asyncio.run(
        open_table(AssistantTable, database.saver).add_version(
            "one", lambda row: {"context": {"plan": "b"}}
        )
    )
    for next_at in (None, 7.0):
        of_a = CronRow(f"cron-{next_at}", "a", next_at, 5.0, 5.0, {"payload": "a plan"})
        asyncio.run(open_table(CronTable, database.saver).create(of_a))
    put(database.saver, {"x": 1.5, "y": [None, b"\0", "\0"]}, thread="id-16-bytes-long", uid="1")
    for number, metadata in enumerate([{"user_id": "ann"}, {"owner": "ann"}, {"user_id": "bob"}]):
        put(database.saver, {"x": 1}, thread=f"of a user {number}", metadata=metadata, uid="1")
        client = ClientMetadata(dict(metadata))
        ThreadList(database.saver).create_thread_if_absent(f"of a client {number}", client)
    database.saver.prune(["pruned"], strategy="keep_latest")
    database.saver.delete_thread("gone")
    time = datetime(2026, 1, 1, tzinfo=UTC)
    for n in range(3):
        provenance = Provenance(thread_id="a", message_ids=("m1",), actor="user", at=time)
        database.store.put(NOTES, "tea", {"text": f"tea {n}", "n": n}, provenance=provenance)
        database.store.put(
            NOTES, f"k{n}", {"text": f"coffee \0 {n}"}, ttl=60 * (n + 1), index=False
        )
        database.store.put(MORE, "gone", {"text": "milk"})
    database.store.delete(MORE, "gone")
    database.store.put(("forgotten",), "x", {"text": "y"})
    database.store.forget(("forgotten",))


def list_ids_of_threads_of_user(saver: Checkpointer, name: str) -> list[str]:
    """Return the sorted ids of the threads that the server's list finds by a user."""
    rows = ThreadList(saver).search(ThreadQuery(metadata={name: "ann"}), lambda row: row, 100)
    return sorted(row.thread_id for row in rows if row.metadata.get(name) == "ann")


def read_everything(database: Database) -> list[Any]:
    """Return everything that can be read from a database."""
    saver, store = database
    return [
        read_all_checkpoints(saver),
        [(t.thread_id, t.created_at, t.updated_at, t.checkpoints) for t in saver.threads()],
        [[i.value.text for i in saver.history(t)] for t in ("a", "b%_é", "pruned", "c")],
        [checkpoint.config for checkpoint in saver.list(None, filter={"user": "u1"})],
        *(saver.heads(filter={name: "ann"}) for name in ("user_id", "owner")),
        *(list_ids_of_threads_of_user(saver, name) for name in ("user_id", "owner")),
        list_run_rows(saver, "a"),
        sorted(asyncio.run(open_table(CronTable, saver).list_crons()), key=str),
        asyncio.run(open_table(AssistantTable, saver).list_assistants()),
        asyncio.run(open_table(AssistantTable, saver).list_versions("one")),
        list(store.export()),
        [store.history(NOTES, key) for key in ("tea", "k0")],
        store.list_namespaces(),
        [(i.key, i.score) for i in store.search(("users",), query="tea please")],
    ]


def copy_database(
    source: Database, target: Database, progress: Callable[[int], object] = lambda count: None
) -> DatabaseCopy:
    """Copy a database, and return the finished copy."""
    ends: Any = (
        build_thread_table_pair(source.saver, target.saver),
        (StoreTables.from_store(source.store), StoreTables.from_store(target.store)),
    )
    database_copy = DatabaseCopy(ends, progress)
    database_copy.run()
    return database_copy


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("file", "file"),
        ("file", "postgres"),
        ("postgres", "file"),
        ("postgres", "postgres-sealed"),
        ("sealed", "sealed"),
        ("sealed", "postgres"),
    ],
)
def test_copy_equals_source_and_can_be_continued(
    source: str, target: str, make_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs resume in the copy, and threads and items are added to it as to the source."""
    monkeypatch.setattr(copied_tables, "_PAGE_BYTES", 10_000)
    old, new = make_database(source, "old"), make_database(target, "new")
    fill_database(old)

    rows = copy_database(old, new).row_counts

    assert read_everything(old) == read_everything(new)
    assert (rows["assistants"], rows["crons"]) == (3, 2)
    assert (rows["threads"], rows["store_versions"], rows["store_items"]) == (11, 5, 4)
    of_ann = ["of a client 0", "of a user 0"]
    assert list_ids_of_threads_of_user(new.saver, "user_id") == of_ann
    assert list_ids_of_threads_of_user(new.saver, "owner") == [
        *("of a client 1", "of a user 0", "of a user 1")
    ]
    for database in (old, new):
        graph = compile_graph(database.saver)
        graph.invoke(Command(resume="this"), {"configurable": {"thread_id": "c"}})
        put(database.saver, {"x": 1}, thread="new", uid="1")
        database.store.put(NOTES, "tea", {"text": "tea again"})
        database.store.put(("new",), "k", {"text": "new tea"})
    for database in (old, new):
        assert [i.value.text for i in database.saver.history("c")] == ["well?", "this"]
        assert [i.version for i in database.store.history(NOTES, "tea")] == [1, 2, 3, 4]
        assert {"tea", "k"} == {i.key for i in database.store.search((), query="tea")}
    for database in (old, new):
        database.saver.prune(["a"], strategy="keep_latest")
        database.store.forget(NOTES)
        assert [i.key for i in database.store.search((), query="tea")] == ["k"]


def test_copy_is_encrypted_with_key_of_target(tmp_path: Path, make_database: Any) -> None:
    """Source and target have different keys, and the copy equals the source."""
    old, new = make_database("sealed", "old"), make_database("file", "new", key=bytes(32))
    fill_database(old)
    copy_database(old, new)

    assert read_everything(old) == read_everything(new)
    assert b"coffee" not in (tmp_path / "new" / "plain.db").read_bytes()


@pytest.mark.parametrize("source", ["file", "postgres"])
def test_copy_excludes_writes_to_source_during_copy(
    source: str, make_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each component is copied as it was when its copy began."""
    monkeypatch.setattr(copied_tables, "_PAGE_BYTES", 3000)
    old, new = make_database(source, "old"), make_database("file", "new")
    fill_database(old)
    before = read_all_checkpoints(old.saver)
    count = 0

    def progress(_: int) -> None:
        nonlocal count
        count += 1
        put(old.saver, {"x": count}, thread="a", uid=f"late {count}")
        old.store.put(NOTES, "tea", {"text": f"late {count}"})

    copy_database(old, new, progress)

    source_count, copied_count = (
        len(database.store.history(NOTES, "tea")) for database in (old, new)
    )
    assert before == read_all_checkpoints(new.saver)
    assert 3 < copied_count < source_count


class SimulatedKill(BaseException):
    """An exception that stands for SIGKILL."""


@pytest.mark.parametrize("target", ["file", "postgres"])
def test_interrupted_copy_is_completed_by_repeating_it(
    target: str, tmp_path: Path, make_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is interrupted after every few writes; stored rows stay in the target."""
    monkeypatch.setattr(copied_tables, "_PAGE_BYTES", 1000)
    old, new = make_database("file", "old"), make_database(target, "new")
    fill_database(old)
    interruptions = 0

    def stop_at_write(write: Callable[..., Any], at: int) -> Callable[..., Any]:
        count = 0

        def write_or_stop(*args: Any) -> Any:
            nonlocal count
            count += 1
            if count == at:
                raise SimulatedKill
            return write(*args)

        return write_or_stop

    for _ in range(100):
        with monkeypatch.context() as patch, suppress(SimulatedKill):
            for part in new:
                patch.setattr(part.database, "write", stop_at_write(part.database.write, 14))
            copy_database(old, new)
            break
        interruptions += 1

    assert 3 < interruptions < 60
    assert read_everything(old) == read_everything(new)
    with pytest.raises(ConfigurationError, match=r"is not empty: the table threads has rows"):
        copy_database(old, new)


@pytest.mark.parametrize("target", ["sealed", "postgres"])
def test_copy_refuses_puts_of_erased_messages_and_deleted_threads(
    target: str, make_database: Any
) -> None:
    """A run that loaded a thread before an erasure stores none of it in the copy."""
    old, new = make_database("file", "old"), make_database(target, "new")
    message = HumanMessage("what a run still holds", id="m0")
    for thread in ("erased", "deleted"):
        put(old.saver, {"messages": [message]}, thread=thread, uid="one")
    before = old.saver.get_tuple(config_at("erased"))
    old.saver.erase("erased", ["m0"])
    old.saver.delete_thread("deleted")
    copy_database(old, new)
    put(new.saver, {"messages": [message]}, before.config)
    with pytest.raises(ThreadDeleted):
        put(new.saver, {"messages": [message]}, config_at("deleted", uid="one"))

    assert new.saver.history("erased") == []


def test_copy_fails_if_message_is_erased_during_copy(
    make_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the copy would still contain the erased message."""
    old, new = make_database("file", "old"), make_database("file", "new")
    put(old.saver, {"messages": [HumanMessage("hi", id="m0")]})
    compare = DatabaseCopy._find_owners_of_differing_rows

    def erase_and_compare(*args: Any) -> Any:
        old.saver.erase("t", ["m0"])
        return compare(*args)

    monkeypatch.setattr(DatabaseCopy, "_find_owners_of_differing_rows", erase_and_compare)
    with pytest.raises(ImportFailed, match="data was erased from"):
        copy_database(old, new)


KILLED_COMMAND = """
import os, signal, sys
from perdure.cli import copied_tables, database_copy
from perdure.cli import main
copied_tables._PAGE_BYTES = 1600
written = database_copy._execute
left = 14
def counted(made):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return written(made)
database_copy._execute = counted
sys.argv = ["perdure", "copy", "--from", "old/plain.db", "--to", "new.db"]
main()
"""


@pytest.mark.slow
def test_killed_copy_command_is_completed_by_repeating_it(
    tmp_path: Path, make_database: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Until the same command is repeated after SIGKILL, other uses of the copy are refused."""
    monkeypatch.chdir(tmp_path)
    old = make_database("file", "old")
    fill_database(old)
    old.saver.close()
    old.store.close()
    killed = subprocess.run([sys.executable, "-c", KILLED_COMMAND], env=os.environ, check=False)
    copy_error = run_and_read_error("copy", "--from", "new.db", "--to", "third.db", capsys=capsys)
    with SQLiteCheckpointer.open("other.db"):
        source_error = run_and_read_error(
            "copy", "--from", "other.db", "--to", "new.db", capsys=capsys
        )
    output = run("copy", "--from", "old/plain.db", "--to", "new.db")

    assert killed.returncode == -signal.SIGKILL
    assert "new.db is an incomplete copy" in copy_error
    assert "contains an incomplete copy of another database" in source_error
    assert output.startswith("copied and compared: 11 threads, ")


def test_copy_command_reads_keys_from_files(
    tmp_path: Path, make_database: Any, monkeypatch: Any, capsys: Any
) -> None:
    """With --json, the command prints the numbers of copied rows."""
    monkeypatch.chdir(tmp_path)
    old = make_database("sealed", "old")
    fill_database(old)
    old.saver.close()
    old.store.close()
    Path("old.key").write_text(backends.KEY.hex() + "\n")
    Path("new.key").write_text("00" * 32)
    between = ("--from", "old/sealed.db", "--to", "new.db")

    rows = run_json("copy", *between, "--from-key-file", "old.key", "--to-key-file", "new.key")

    assert (rows["threads"], rows["store_items"]) == (11, 4)


def test_continued_copy_fails_if_source_has_changed(
    make_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is compared with the source as it is now, and the error names the differences."""
    old, new = make_database("file", "old"), make_database("file", "new")
    fill_database(old)
    with monkeypatch.context() as patch:
        patch.setattr(
            StoreTables, "read_settings", lambda self: (_ for _ in ()).throw(SimulatedKill)
        )
        with pytest.raises(SimulatedKill):
            copy_database(old, new)
    put(old.saver, {"x": 2}, thread="id-16-bytes-long", uid="2")
    old.store.put(MORE, "late", {"text": "z"})

    with pytest.raises(ImportFailed, match=r"thread 'id-16-bytes-long', namespace \('users', 'bo"):
        copy_database(old, new)


@pytest.mark.parametrize(
    ("sql", "expected_error"),
    [
        ("UPDATE items SET body = zeroblob(9) WHERE row_key % 2", "damaged"),
        ("UPDATE checkpoints SET put_at = put_at + 1 WHERE row_key % 2", "damaged"),
        ("DELETE FROM threads WHERE thread_id = 'a'", "an orphaned row"),
    ],
)
def test_copy_of_damaged_source_fails(
    sql: str, expected_error: str, tmp_path: Path, make_database: Any
) -> None:
    """A row that cannot be read is not copied."""
    old, new = make_database("file", "old"), make_database("file", "new")
    fill_database(old)
    with closing(sqlite3.connect(tmp_path / "old" / "plain.db")) as conn:
        conn.execute(sql)
        conn.commit()

    with pytest.raises(CorruptRecord, match=expected_error):
        copy_database(old, new)


@pytest.mark.postgres
def test_copy_to_postgres_refuses_nul_in_names_before_writing(make_database: Any) -> None:
    """The error names all threads with NUL, which SQLite can store."""
    old, new = make_database("file", "old"), make_database("postgres", "new")
    put(old.saver, {"x": 1}, thread="fine", uid="1")
    put(old.saver, {"x": 1}, thread="a\0b", uid="1")
    put(old.saver, {"x\0y": [HumanMessage("hi", id="1")] * 9}, thread="channel", uid="1")

    with pytest.raises(
        ImportFailed,
        match=r"cannot store names with NUL.*'a\\x00b', 'channel'",
    ):
        copy_database(old, new)
    copy_database(old, sqlite_copy := make_database("file", "new"))

    assert new.saver.threads() == []
    assert read_all_checkpoints(old.saver) == read_all_checkpoints(sqlite_copy.saver)


@pytest.mark.parametrize("source", ["file", "postgres"])
def test_copied_page_is_limited_in_bytes(source: str, make_database: Any, monkeypatch: Any) -> None:
    """A page has at most the limit or one row, also if long rows follow many short ones."""
    monkeypatch.setattr(copied_tables, "_PAGE_BYTES", 10_000)
    old, new = make_database(source, "old"), make_database("file", "new")
    old.store.batch([PutOp(NOTES, f"short {n}", {"n": n}, False) for n in range(300)])
    for n, size in enumerate((4_000, 4_000, 4_000, 20_000, 4_000, 9_000)):
        old.store.put(NOTES, f"long {n}", {"x": "y" * size}, index=False)
    row_sizes = []
    decrypt = StoreTables.decrypt_row

    def count_and_decrypt(self: Any, table: Any, row: Any) -> Any:
        if table.name == "store_items" and row[-2] is not None:
            row_sizes.append(len(row[-2]))
        return decrypt(self, table, row)

    monkeypatch.setattr(StoreTables, "decrypt_row", count_and_decrypt)
    pages = []

    def progress(count: int) -> None:
        pages.append(row_sizes[:])
        row_sizes.clear()

    copy_database(old, new, progress)

    assert [len(page) for page in pages if page] == [301, 2, 1, 1, 1]
    assert list(old.store.export()) == list(new.store.export())


@pytest.mark.postgres
def test_copy_never_resets_sequences_of_postgres_target(make_database: Any) -> None:
    """The sequences of the target may be ahead of the rows that it has."""
    old, new = make_database("file", "old"), make_database("postgres", "new")
    fill_database(old)
    for n in range(50):
        new.store.put(NOTES, f"k{n}", {"n": n})
    new.store.forget(NOTES)
    before = allocate_next_numbers(new)

    copy_database(old, new)

    after = allocate_next_numbers(new)
    assert all(later > earlier for later, earlier in zip(after, before, strict=True))


def allocate_next_numbers(database: Database) -> list[int]:
    """Allocate the next key of a thread and the next number of an item."""
    key = partial(fetch_rows, database.saver._sql["allocate_keys"], 1)
    number = partial(fetch_rows, "SELECT nextval('store_items_id_seq')")
    return [database.saver.database.write(key)[0][0], database.store.database.write(number)[0][0]]


@pytest.mark.postgres
def test_names_too_long_for_postgres_index_are_refused(make_database: Any) -> None:
    """Threads, namespaces, keys and checkpoints are checked before a copy and by each put."""
    old, new = make_database("file", "old"), make_database("postgres", "new")
    long = "".join(random.Random(1).choices(string.ascii_letters, k=3000))
    put(old.saver, {"x": 1}, thread="fine" * 400, uid="1")
    put(old.saver, {"x": 1}, thread=f"a{long}", uid="1")
    put(old.saver, {"x": 1}, thread="b", uid=long)
    old.store.put(("fine",), "k" * 2000, {"n": 1})
    with pytest.raises(ImportFailed, match=r"nothing was copied.* 2,600 bytes.*'a\w+, 'b'$"):
        copy_database(old, new)
    for thread in (f"a{long}", "b"):
        old.saver.delete_thread(thread)
    old.store.put(("c", long), "k", {"n": 1})
    old.store.put(("d",), long, {"n": 1})
    with pytest.raises(ImportFailed, match=r"these namespaces: .*\('c', '\w+, \('d',\)$"):
        copy_database(old, new)
    assert new.saver.threads() == []

    for namespace_and_key in ((("c", long), "k"), (("d",), long)):
        with pytest.raises(StorageError, match=r"up to about 2,600 bytes"):
            new.store.put(*namespace_and_key, {"n": 1})
    with pytest.raises(StorageError, match=r"up to about 2,600 bytes"):
        put(new.saver, {"x": 1}, thread=long, uid="1")


def test_copy_is_complete_only_after_its_indexes_are_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated command creates the indexes that an interrupted one did not create."""
    monkeypatch.chdir(tmp_path)
    with SQLiteStore.open("old.db") as store:
        store.put(NOTES, "k", {"kind": "x"})
        store.create_index("kind")

    def stop(*_: Any) -> None:
        raise SimulatedKill

    with monkeypatch.context() as patch, suppress(SimulatedKill):
        patch.setattr(WholeStore, "create_index", stop)
        run("copy", "--from", "old.db", "--to", "new.db")
    run("copy", "--from", "old.db", "--to", "new.db")

    with SQLiteStore.open("new.db") as store:
        assert store.indexes() == ["kind"]


@pytest.mark.postgres
def test_copy_counts_rows_once_after_lost_connection(
    make_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source whose connection is lost is read again."""
    old, new = make_database("postgres", "old"), make_database("file", "new")
    fill_database(old)
    compare = DatabaseCopy._find_owners_of_differing_rows
    disconnected: list[Any] = []

    def disconnect_and_compare(self: Any, source: Any, target: Any, table: Any) -> Any:
        if table.name == "checkpoints" and not disconnected:
            disconnected.append(table)
            with psycopg.connect(postgres_server.dsn(), autocommit=True) as conn:
                statement = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                conn.execute(
                    f"{statement} WHERE query LIKE '%{get_schema(old)}%' AND {OTHER_CONNECTIONS}"
                )
        return compare(self, source, target, table)

    monkeypatch.setattr(DatabaseCopy, "_find_owners_of_differing_rows", disconnect_and_compare)
    rows = copy_database(old, new).row_counts

    assert disconnected
    assert (rows["assistants"], rows["crons"]) == (3, 2)
    assert (rows["threads"], rows["store_versions"], rows["store_items"]) == (11, 5, 4)


OTHER_CONNECTIONS = "pid <> pg_backend_pid() AND datname = current_database()"


def get_schema(database: Database) -> str:
    """Return the schema of a database on the server."""
    return str(database.store.database._schema)  # type: ignore[attr-defined]
