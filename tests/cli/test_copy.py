"""Copies of whole databases: between kinds and keys, cut off, into what is not empty, of damage."""

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
from perdure.checkpointers.assistants import AssistantTable
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.crons import CronTable
from perdure.checkpointers.records import CronRow
from perdure.cli import table_copy
from perdure.cli.table_copy import DatabaseCopy, StoreTables, ThreadTables
from perdure.errors import (
    ConfigurationError,
    CorruptRecord,
    ImportFailed,
    StorageError,
    ThreadDeleted,
)
from perdure.storage.flow import fetch_rows
from perdure.stores import Provenance, SQLiteStore
from perdure.stores.whole_store import WholeStore
from tests import backends, postgres_server, store_backends
from tests.cli.commands import error, read, run
from tests.contracts.puts import config_at, put
from tests.contracts.test_import import compile_graph, read_all_checkpoints
from tests.contracts.test_runs import accept_run
from tests.contracts.test_runs import list_run_rows as of_thread
from tests.store_backends import Clock

NOTES, MORE = ("users", "ümit", "notes"), ("users", "bo")


class Database(NamedTuple):
    """Threads and items of one database."""

    saver: Checkpointer
    store: WholeStore


@pytest.fixture
def database(tmp_path: Path) -> Any:
    """Makes a database of a kind; the folder tells those of one kind apart."""
    with ExitStack() as stack:

        def made(kind: str, name: str, **options: Any) -> Database:
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            quick = {} if kind.startswith("postgres") else {"synchronous": "normal"}
            saver = backends.BACKENDS[kind](folder, **quick, **options)
            store = store_backends.BACKENDS[kind](folder, clock=Clock(), **options)
            return Database(stack.enter_context(saver), stack.enter_context(store))

        yield made


def fill(old: Database) -> None:
    """Branches, subgraphs, sends, an interrupt, a pruned thread; versions, times and provenance."""
    graph = compile_graph(old.saver)
    for thread in ("a", "b%_é", "pruned", "gone"):
        config: Any = {"configurable": {"thread_id": thread}, "metadata": {"user": "u1"}}
        for text in ("one", "two"):
            graph.invoke({"messages": [("human", text)]}, config)
        early = list(graph.get_state_history(config))[3].config
        graph.update_state(early, {"messages": [("human", "a fork")]}, as_node="sub")
    graph.invoke({"messages": [("human", "well?")]}, {"configurable": {"thread_id": "c"}})
    accept_run(old.saver, "a", {"request": {"input": "a plan"}})
    accept_run(old.saver, "a")
    for name in ("one", "two"):
        asyncio.run(AssistantTable(old.saver).create(name, {"context": {"plan": name}}))
    asyncio.run(
        AssistantTable(old.saver).add_version("one", lambda row: {"context": {"plan": "b"}})
    )
    for next_at in (None, 7.0):
        of_a = CronRow(f"cron-{next_at}", "a", next_at, 5.0, 5.0, {"payload": "a plan"})
        asyncio.run(CronTable(old.saver).create(of_a))
    put(old.saver, {"x": 1.5, "y": [None, b"\0", "\0"]}, thread="id-16-bytes-long", uid="1")
    old.saver.prune(["pruned"], strategy="keep_latest")
    old.saver.delete_thread("gone")
    at = datetime(2026, 1, 1, tzinfo=UTC)
    for n in range(3):
        of = Provenance(thread_id="a", message_ids=("m1",), actor="user", at=at)
        old.store.put(NOTES, "tea", {"text": f"tea {n}", "n": n}, provenance=of)
        old.store.put(NOTES, f"k{n}", {"text": f"coffee \0 {n}"}, ttl=60 * (n + 1), index=False)
        old.store.put(MORE, "gone", {"text": "milk"})
    old.store.delete(MORE, "gone")
    old.store.put(("forgotten",), "x", {"text": "y"})
    old.store.forget(("forgotten",))


def shape(of: Database) -> list[Any]:
    """All that can be read of a database."""
    saver, store = of
    return [
        read_all_checkpoints(saver),
        [(t.thread_id, t.created_at, t.updated_at, t.checkpoints) for t in saver.threads()],
        [[i.value.text for i in saver.history(t)] for t in ("a", "b%_é", "pruned", "c")],
        [found.config for found in saver.list(None, filter={"user": "u1"})],
        of_thread(saver, "a"),
        sorted(asyncio.run(CronTable(saver).list_crons()), key=str),
        asyncio.run(AssistantTable(saver).list_assistants()),
        asyncio.run(AssistantTable(saver).list_versions("one")),
        list(store.export()),
        [store.history(NOTES, key) for key in ("tea", "k0")],
        store.list_namespaces(),
        [(i.key, i.score) for i in store.search(("users",), query="tea please")],
    ]


def copy(
    old: Database, new: Database, progress: Callable[[int], object] = lambda count: None
) -> DatabaseCopy:
    ends: Any = (
        (ThreadTables.from_checkpointer(old.saver), ThreadTables.from_checkpointer(new.saver)),
        (StoreTables.from_store(old.store), StoreTables.from_store(new.store)),
    )
    made = DatabaseCopy(ends, progress)
    made.run()
    return made


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
def test_a_copy_is_the_same_and_goes_on(
    source: str, target: str, database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the pages are; then runs resume, threads and items are added to it as to the old."""
    monkeypatch.setattr(table_copy, "_PAGE_BYTES", 10_000)
    old, new = database(source, "old"), database(target, "new")
    fill(old)

    rows = copy(old, new).row_counts

    assert shape(old) == shape(new)
    assert (rows["assistants"], rows["crons"]) == (3, 2)
    assert (rows["threads"], rows["store_versions"], rows["store_items"]) == (5, 5, 4)
    for of in (old, new):
        graph = compile_graph(of.saver)
        graph.invoke(Command(resume="this"), {"configurable": {"thread_id": "c"}})
        put(of.saver, {"x": 1}, thread="new", uid="1")
        of.store.put(NOTES, "tea", {"text": "tea again"})
        of.store.put(("new",), "k", {"text": "new tea"})
    for of in (old, new):
        assert [i.value.text for i in of.saver.history("c")] == ["well?", "this"]
        assert [i.version for i in of.store.history(NOTES, "tea")] == [1, 2, 3, 4]
        assert {"tea", "k"} == {i.key for i in of.store.search((), query="tea")}
    for of in (old, new):
        of.saver.prune(["a"], strategy="keep_latest")
        of.store.forget(NOTES)
        assert [i.key for i in of.store.search((), query="tea")] == ["k"]


def test_another_key(tmp_path: Path, database: Any) -> None:
    """Each end has its own; what reads with one does not with the other."""
    old, new = database("sealed", "old"), database("file", "new", key=bytes(32))
    fill(old)
    copy(old, new)

    assert shape(old) == shape(new)
    assert b"coffee" not in (tmp_path / "new" / "plain.db").read_bytes()


@pytest.mark.parametrize("source", ["file", "postgres"])
def test_a_source_may_be_written_to(
    source: str, database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each component is copied as it was when its copy began."""
    monkeypatch.setattr(table_copy, "_PAGE_BYTES", 3000)
    old, new = database(source, "old"), database("file", "new")
    fill(old)
    before = read_all_checkpoints(old.saver)
    count = 0

    def progress(_: int) -> None:
        nonlocal count
        count += 1
        put(old.saver, {"x": count}, thread="a", uid=f"late {count}")
        old.store.put(NOTES, "tea", {"text": f"late {count}"})

    copy(old, new, progress)

    late, copied = (len(of.store.history(NOTES, "tea")) for of in (old, new))
    assert before == read_all_checkpoints(new.saver)
    assert 3 < copied < late


class Killed(BaseException):
    """In the place of SIGKILL."""


@pytest.mark.parametrize("target", ["file", "postgres"])
def test_a_copy_that_was_cut_off_goes_on(
    target: str, tmp_path: Path, database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every few writes: what is there stays, and the outcome is the same."""
    monkeypatch.setattr(table_copy, "_PAGE_BYTES", 1000)
    old, new = database("file", "old"), database(target, "new")
    fill(old)
    ended = 0

    def cut_off(write: Callable[..., Any], at: int) -> Callable[..., Any]:
        count = 0

        def counted(*args: Any) -> Any:
            nonlocal count
            count += 1
            if count == at:
                raise Killed
            return write(*args)

        return counted

    for _ in range(100):
        with monkeypatch.context() as patch, suppress(Killed):
            for part in new:
                patch.setattr(part.database, "write", cut_off(part.database.write, 14))
            copy(old, new)
            break
        ended += 1

    assert 3 < ended < 60
    assert shape(old) == shape(new)
    with pytest.raises(ConfigurationError, match=r"is not empty: it has rows in threads"):
        copy(old, new)


@pytest.mark.parametrize("target", ["sealed", "postgres"])
def test_a_copy_knows_what_was_erased(target: str, database: Any) -> None:
    """A run that loaded a thread before an erasure stores nothing of it in the copy either."""
    old, new = database("file", "old"), database(target, "new")
    message = HumanMessage("what a run still holds", id="m0")
    for thread in ("erased", "deleted"):
        put(old.saver, {"messages": [message]}, thread=thread, uid="one")
    before = old.saver.get_tuple(config_at("erased"))
    old.saver.erase("erased", ["m0"])
    old.saver.delete_thread("deleted")
    copy(old, new)
    put(new.saver, {"messages": [message]}, before.config)
    with pytest.raises(ThreadDeleted):
        put(new.saver, {"messages": [message]}, config_at("deleted", uid="one"))

    assert new.saver.history("erased") == []


def test_a_copy_is_refused_if_something_is_erased_meanwhile(
    database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy still has it."""
    old, new = database("file", "old"), database("file", "new")
    put(old.saver, {"messages": [HumanMessage("hi", id="m0")]})
    compared = DatabaseCopy._find_differing_owners

    def erasing(*args: Any) -> Any:
        old.saver.erase("t", ["m0"])
        return compared(*args)

    monkeypatch.setattr(DatabaseCopy, "_find_differing_owners", erasing)
    with pytest.raises(ImportFailed, match="something was erased from"):
        copy(old, new)


KILLED = """
import os, signal, sys
from perdure.cli import table_copy
from perdure.cli import main
table_copy._PAGE_BYTES = 1600
written = table_copy._execute
left = 14
def counted(made):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return written(made)
table_copy._execute = counted
sys.argv = ["perdure", "copy", "--from", "old/plain.db", "--to", "new.db"]
main()
"""


def test_a_killed_command_goes_on(
    tmp_path: Path, database: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """kill -9, then the same command; another source is refused meanwhile."""
    monkeypatch.chdir(tmp_path)
    old = database("file", "old")
    fill(old)
    old.saver.close()
    old.store.close()
    ended = subprocess.run([sys.executable, "-c", KILLED], env=os.environ, check=False)
    later = error("copy", "--from", "new.db", "--to", "third.db", into=capsys)
    with SQLiteCheckpointer.open("other.db"):
        other = error("copy", "--from", "other.db", "--to", "new.db", into=capsys)
    told = run("copy", "--from", "old/plain.db", "--to", "new.db")

    assert ended.returncode == -signal.SIGKILL
    assert "new.db is an incomplete copy" in later
    assert "contains an incomplete copy of" in other
    assert told.startswith("copied and compared: 5 threads, ")


def test_keys_of_the_command(tmp_path: Path, database: Any, monkeypatch: Any, capsys: Any) -> None:
    """Files of keys; the counts are told as JSON, too."""
    monkeypatch.chdir(tmp_path)
    old = database("sealed", "old")
    fill(old)
    old.saver.close()
    old.store.close()
    Path("old.key").write_text(backends.KEY.hex() + "\n")
    Path("new.key").write_text("00" * 32)
    between = ("--from", "old/sealed.db", "--to", "new.db")

    rows = read("copy", *between, "--from-key-file", "old.key", "--to-key-file", "new.key")

    assert (rows["threads"], rows["store_items"]) == (5, 4)


def test_a_source_that_changed_is_named(database: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that was cut off and goes on later is compared with the source as it is now."""
    old, new = database("file", "old"), database("file", "new")
    fill(old)
    with monkeypatch.context() as patch:
        patch.setattr(StoreTables, "read_settings", lambda self: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            copy(old, new)
    put(old.saver, {"x": 2}, thread="id-16-bytes-long", uid="2")
    old.store.put(MORE, "late", {"text": "z"})

    with pytest.raises(ImportFailed, match=r"thread 'id-16-bytes-long', namespace \('users', 'bo"):
        copy(old, new)


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("UPDATE items SET body = zeroblob(9) WHERE row_key % 2", "damaged"),
        ("UPDATE checkpoints SET put_at = put_at + 1 WHERE row_key % 2", "damaged"),
        ("DELETE FROM threads WHERE thread_id = 'a'", "no owner"),
    ],
)
def test_damage_is_an_error(sql: str, told: str, tmp_path: Path, database: Any) -> None:
    """What does not read back is not passed on."""
    old, new = database("file", "old"), database("file", "new")
    fill(old)
    with closing(sqlite3.connect(tmp_path / "old" / "plain.db")) as conn:
        conn.execute(sql)
        conn.commit()

    with pytest.raises(CorruptRecord, match=told):
        copy(old, new)


@pytest.mark.postgres
def test_nul_in_names_is_refused_before_anything_is_written(database: Any) -> None:
    """Postgres takes no such text; all those threads are named. SQLite takes it."""
    old, new = database("file", "old"), database("postgres", "new")
    put(old.saver, {"x": 1}, thread="fine", uid="1")
    put(old.saver, {"x": 1}, thread="a\0b", uid="1")
    put(old.saver, {"x\0y": [HumanMessage("hi", id="1")] * 9}, thread="channel", uid="1")

    with pytest.raises(ImportFailed, match=r"cannot store text with NUL.*'a\\x00b', 'channel'"):
        copy(old, new)
    copy(old, same := database("file", "new"))

    assert new.saver.threads() == []
    assert read_all_checkpoints(old.saver) == read_all_checkpoints(same.saver)


@pytest.mark.parametrize("source", ["file", "postgres"])
def test_a_page_is_bounded_in_bytes(source: str, database: Any, monkeypatch: Any) -> None:
    """Also where long rows come after many short ones: no more is held than that, or one row."""
    monkeypatch.setattr(table_copy, "_PAGE_BYTES", 10_000)
    old, new = database(source, "old"), database("file", "new")
    old.store.batch([PutOp(NOTES, f"short {n}", {"n": n}, False) for n in range(300)])
    for n, size in enumerate((4_000, 4_000, 4_000, 20_000, 4_000, 9_000)):
        old.store.put(NOTES, f"long {n}", {"x": "y" * size}, index=False)
    pages = []
    opened = StoreTables.decrypt_row

    def counted(self: Any, table: Any, row: Any) -> Any:
        if table.name == "store_items" and row[-2] is not None:
            pages.append(len(row[-2]))
        return opened(self, table, row)

    monkeypatch.setattr(StoreTables, "decrypt_row", counted)
    held = []

    def progress(count: int) -> None:
        held.append(pages[:])
        pages.clear()

    copy(old, new, progress)

    assert [len(page) for page in held if page] == [301, 2, 1, 1, 1]
    assert list(old.store.export()) == list(new.store.export())


@pytest.mark.postgres
def test_new_rows_have_numbers_that_were_never_given_out(database: Any) -> None:
    """The numbers of the target's sequences may be higher than those of the rows it has."""
    old, new = database("file", "old"), database("postgres", "new")
    fill(old)
    for n in range(50):
        new.store.put(NOTES, f"k{n}", {"n": n})
    new.store.forget(NOTES)
    before = numbers(new)

    copy(old, new)

    after = numbers(new)
    assert all(later > earlier for later, earlier in zip(after, before, strict=True))


def numbers(of: Database) -> list[int]:
    """The next key of a thread, and the next number of an item."""
    key = partial(fetch_rows, of.saver._sql["allocate_keys"], 1)
    number = partial(fetch_rows, "SELECT nextval('store_items_id_seq')")
    return [of.saver.database.write(key)[0][0], of.store.database.write(number)[0][0]]


@pytest.mark.postgres
def test_names_that_no_index_takes_are_refused(database: Any) -> None:
    """Threads, namespaces, keys, checkpoints: before anything is copied, and by each put."""
    old, new = database("file", "old"), database("postgres", "new")
    long = "".join(random.Random(1).choices(string.ascii_letters, k=3000))
    put(old.saver, {"x": 1}, thread="fine" * 400, uid="1")
    put(old.saver, {"x": 1}, thread=f"a{long}", uid="1")
    put(old.saver, {"x": 1}, thread="b", uid=long)
    old.store.put(("fine",), "k" * 2000, {"n": 1})
    with pytest.raises(ImportFailed, match=r"2,600 bytes; nothing was copied.*'a\w+, 'b'$"):
        copy(old, new)
    for thread in (f"a{long}", "b"):
        old.saver.delete_thread(thread)
    old.store.put(("c", long), "k", {"n": 1})
    old.store.put(("d",), long, {"n": 1})
    with pytest.raises(ImportFailed, match=r"namespaces of .*\('c', '\w+, \('d',\)$"):
        copy(old, new)
    assert new.saver.threads() == []

    for given in ((("c", long), "k"), (("d",), long)):
        with pytest.raises(StorageError, match=r"up to about 2,600 bytes"):
            new.store.put(*given, {"n": 1})
    with pytest.raises(StorageError, match=r"up to about 2,600 bytes"):
        put(new.saver, {"x": 1}, thread=long, uid="1")


def test_indexes_are_made_before_a_copy_counts_as_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that was ended before them makes them when it is repeated."""
    monkeypatch.chdir(tmp_path)
    with SQLiteStore.open("old.db") as store:
        store.put(NOTES, "k", {"kind": "x"})
        store.create_index("kind")

    def killed(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch, suppress(Killed):
        patch.setattr(WholeStore, "create_index", killed)
        run("copy", "--from", "old.db", "--to", "new.db")
    run("copy", "--from", "old.db", "--to", "new.db")

    with SQLiteStore.open("new.db") as store:
        assert store.indexes() == ["kind"]


@pytest.mark.postgres
def test_rows_are_counted_once(database: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source whose connection is lost is read anew."""
    old, new = database("postgres", "old"), database("file", "new")
    fill(old)
    compared = DatabaseCopy._find_differing_owners
    lost: list[Any] = []

    def cut(self: Any, source: Any, target: Any, table: Any) -> Any:
        if table.name == "checkpoints" and not lost:
            lost.append(table)
            with psycopg.connect(postgres_server.dsn(), autocommit=True) as conn:
                asked = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                conn.execute(f"{asked} WHERE query LIKE '%{schema_of(old)}%' AND {OTHER}")
        return compared(self, source, target, table)

    monkeypatch.setattr(DatabaseCopy, "_find_differing_owners", cut)
    rows = copy(old, new).row_counts

    assert lost
    assert (rows["assistants"], rows["crons"]) == (3, 2)
    assert (rows["threads"], rows["store_versions"], rows["store_items"]) == (5, 5, 4)


OTHER = "pid <> pg_backend_pid() AND datname = current_database()"


def schema_of(of: Database) -> str:
    """The schema of a database on the server."""
    return str(of.store.database._schema)  # type: ignore[attr-defined]
