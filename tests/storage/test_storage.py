"""`SQLiteDatabase`: group commits, remaining files, closing and forks."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import empty_checkpoint

from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.errors import (
    ConfigurationError,
    NotADatabase,
    StorageError,
    StorageUnavailable,
)
from perdure.storage import sqlite_connection, sqlite_writer
from perdure.storage.database import Schema
from perdure.storage.flow import Flow, Statement, fetch_rows
from perdure.storage.sqlite import SQLiteDatabase
from perdure.storage.sqlite_connection import WAL_LIMIT_BYTES
from perdure.storage.thread_pools import ThreadPool
from perdure.stores import SQLiteStore
from tests.rounds import rounds

NOTES = Schema("notes", "CREATE TABLE notes (n INTEGER PRIMARY KEY, text TEXT) STRICT")


def open_notes(path: Path | str, **options: Any) -> SQLiteDatabase:
    database = SQLiteDatabase(path, NOTES, **options)
    database.connect()
    return database


@pytest.fixture
def database(tmp_path: Path) -> Iterator[SQLiteDatabase]:
    """An empty database that counts its commits."""
    notes = open_notes(tmp_path / "x.db", factory=CommitCounter)
    yield notes
    notes.close()


MakeFlow = Callable[[], Flow[int]]


def insert_note(n: int, text: str = "note") -> Flow[int]:
    yield Statement("INSERT INTO notes (n, text) VALUES (?, ?)", (n, text))
    return n


def insert_notes_and_fail(n: int) -> Flow[int]:
    yield Statement("INSERT INTO notes (n, text) VALUES (?, '')", (n,))
    yield Statement("INSERT INTO notes (n, text) VALUES (?, '')", (n + 1,))
    raise LookupError(n)


def read_numbers() -> Flow[list[int]]:
    return [n for (n,) in (yield Statement("SELECT n FROM notes ORDER BY n"))]


def list_files(folder: Path) -> set[str]:
    """Return the names of the files in a folder, except the lock file, which stays."""
    return {p.name for p in folder.iterdir() if p.suffix != ".lock"}


class CommitCounter(sqlite3.Connection):
    """A connection that counts the commits of changes."""

    count = 0

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        CommitCounter.count += sql == "COMMIT" and self.total_changes > 0
        return super().execute(sql, *args)


def write_as_group(database: SQLiteDatabase, makers: list[MakeFlow]) -> tuple[list[Any], int]:
    """Write while the writer is busy. Return the outcomes, and the number of commits."""
    release, has_entered = threading.Event(), threading.Event()

    def insert_slowly() -> Flow[int]:
        yield Statement("INSERT INTO notes (n, text) VALUES (-1, 'first')")
        has_entered.set()
        release.wait(30)
        return -1

    async def run_writes() -> list[Any]:
        first = database.awrite(insert_slowly)
        await asyncio.to_thread(has_entered.wait, 30)
        CommitCounter.count = 0
        waiting = [database.awrite(make) for make in makers]
        release.set()
        await first
        return await asyncio.gather(*waiting, return_exceptions=True)

    return asyncio.run(run_writes()), CommitCounter.count


def test_writes_that_wait_together_share_a_transaction(database: SQLiteDatabase) -> None:
    """The writer is busy while these writes wait."""
    outcomes, commits = write_as_group(database, [partial(insert_note, n) for n in range(90)])

    assert list(range(90)) == outcomes
    assert list(range(-1, 90)) == database.read(read_numbers)
    assert commits == 2  # one for the group, and one for the write that kept the writer busy


def test_failing_write_of_a_group_does_not_undo_the_others(database: SQLiteDatabase) -> None:
    """The callbacks of each write are called once."""
    outcomes_told: list[tuple[int, str]] = []
    jobs = [
        (n, partial(insert_notes_and_fail if n % 3 == 0 else insert_note, n * 1000))
        for n in range(9)
    ]

    async def run_writes() -> list[Any]:
        waiting = [
            database.awrite(
                make,
                lambda _, n=n: outcomes_told.append((n, "committed")),  # type: ignore[misc]
                lambda n=n: outcomes_told.append((n, "undone")),  # type: ignore[misc]
            )
            for n, make in jobs
        ]
        return await asyncio.gather(*waiting, return_exceptions=True)

    outcomes = asyncio.run(run_writes())

    committed_numbers = [n * 1000 for n in range(9) if n % 3]
    assert committed_numbers == [outcome for outcome in outcomes if isinstance(outcome, int)]
    assert [e.args[0] for e in outcomes if isinstance(e, LookupError)] == [0, 3000, 6000]
    assert committed_numbers == database.read(read_numbers)
    assert [(n, "committed" if n % 3 else "undone") for n in range(9)] == sorted(outcomes_told)


def test_failing_flow_is_undone_and_the_next_one_works(database: SQLiteDatabase) -> None:
    """The flow has a transaction of its own."""
    with pytest.raises(LookupError):
        database.write(partial(insert_notes_and_fail, 1))
    with pytest.raises(StorageError, match="no such table"):
        database.write(partial(fetch_rows, "SELECT * FROM absent"))
    database.write(partial(insert_note, 1))

    assert database.read(read_numbers) == [1]


@pytest.mark.parametrize("read_only", [False, True])
def test_sqlite_version_without_strict_tables_is_refused(
    read_only: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the needed version, and no file is created."""
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    monkeypatch.setattr(sqlite3, "sqlite_version", "3.34.1")
    for component in (SQLiteCheckpointer, SQLiteStore):
        with pytest.raises(StorageError, match=r"SQLite 3\.34\.1, but perdure needs SQLite 3\.37"):
            component.open(tmp_path / "new.db", read_only=read_only)

    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("read_only", [False, True])
def test_files_of_other_applications_are_refused(read_only: bool, tmp_path: Path) -> None:
    """A database of another application, a text file and a folder are refused and not changed."""
    foreign_database, text_file = tmp_path / "foreign.db", tmp_path / "notes.txt"
    conn = sqlite3.connect(foreign_database)
    conn.execute("CREATE TABLE theirs (x)")
    conn.close()
    text_file.write_text("no database at all " * 100)
    before = foreign_database.read_bytes(), text_file.read_bytes()
    for path in (foreign_database, text_file, tmp_path):
        with pytest.raises(NotADatabase):
            open_notes(path, read_only=read_only)

    assert before == (foreign_database.read_bytes(), text_file.read_bytes())


@pytest.mark.parametrize("reuses", [False, True])
def test_size_of_the_wal_stays_bounded(
    reuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The WAL is repeatedly moved into the file while much is written."""
    monkeypatch.setattr(sqlite_connection, "REUSES_WAL", reuses)  # safe: nobody else writes
    database = open_notes(tmp_path / "x.db", synchronous="normal")
    sizes = []
    for n in range(600):
        database.write(partial(insert_note, n, str(n) * 20_000))
        sizes.append(os.path.getsize(tmp_path / "x.db-wal"))
    database.close()

    assert max(sizes) < 3 * WAL_LIMIT_BYTES


@pytest.mark.parametrize("has_second_write", [True, False])
def test_write_that_may_wait_shares_the_next_commit(
    database: SQLiteDatabase, monkeypatch: pytest.MonkeyPatch, has_second_write: bool
) -> None:
    """The write waits at most `GROUP_WAIT_S` for another one."""
    monkeypatch.setattr(sqlite_writer, "GROUP_WAIT_S", 60.0 if has_second_write else 0.001)
    database.write(partial(insert_note, 0))

    async def run_writes() -> None:
        CommitCounter.count = 0
        tasks = [asyncio.ensure_future(database.awrite(partial(insert_note, 1), may_wait=True))]
        await asyncio.sleep(0.02)  # the writing thread has received the write
        if has_second_write:
            tasks.append(asyncio.ensure_future(database.awrite(partial(insert_note, 2))))
        await asyncio.gather(*tasks)

    asyncio.run(run_writes())
    assert CommitCounter.count == 1
    assert database.read(read_numbers) == [0, 1, 2][: 2 + has_second_write]


def test_urgent_write_is_committed_by_its_caller(database: SQLiteDatabase) -> None:
    """If the connection is in use, the write waits in the queue, behind earlier writes."""
    threads = dict[int, int]()

    def insert_and_record_thread(n: int) -> Flow[int]:
        threads[n] = threading.get_ident()
        return (yield from insert_note(n))

    database.write(partial(insert_and_record_thread, 0), urgent=True)
    with ThreadPoolExecutor(2) as pool:
        with database._connect_once().writer.lend_connection():
            waiting = [
                pool.submit(database.write, partial(insert_and_record_thread, n), urgent=n == 2)
                for n in (1, 2)
            ]
            threading.Event().wait(0.1)  # both find the connection in use
        for future in waiting:
            future.result()
    database.write(partial(insert_and_record_thread, 3))

    assert database.read(read_numbers) == [0, 1, 2, 3]
    assert threads[0] == threading.get_ident() != threads[1] == threads[2] == threads[3]


def test_urgent_write_to_a_closed_file_is_refused(tmp_path: Path) -> None:
    database = open_notes(tmp_path / "x.db")
    database.close()
    with pytest.raises(StorageUnavailable, match="closed"):
        database.write(partial(insert_note, 0), urgent=True)


def test_close_leaves_only_the_database_file(tmp_path: Path) -> None:
    """After `close`, there is no WAL and no shared-memory file."""
    database = open_notes(tmp_path / "x.db")
    database.write(partial(insert_note, 1))
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: database.read(read_numbers), range(20)))
    database.close()

    assert results == [[1]] * 20
    assert list_files(tmp_path) == {"x.db"}


def test_file_shrinks_after_deletions_and_retention(tmp_path: Path) -> None:
    """If 95 % of the threads are deleted and only heads retained, the file shrinks by 90 %."""
    path = tmp_path / "x.db"

    with SQLiteCheckpointer.open(path, synchronous="normal") as saver:
        for number in range(600):
            checkpoint = empty_checkpoint()
            checkpoint["channel_values"] = {"text": f"{number} " * 2000}
            config: RunnableConfig = {"configurable": {"thread_id": str(number % 200)}}
            saver.put(config, checkpoint, {"step": number}, {"text": number})
    full_size = path.stat().st_size
    with SQLiteCheckpointer.open(path) as saver:
        saver.prune([str(number) for number in range(190)], strategy="delete")
        saver.retain(Retention(last=1, history=False))
        thread_count = len(saver.threads())
    size_after = path.stat().st_size

    assert thread_count == 10
    assert size_after <= full_size // 10


def test_vacuum_step_frees_the_requested_number_of_pages(tmp_path: Path) -> None:
    """The pages of a large deletion are freed in steps of many pages."""
    conn = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    conn.execute("PRAGMA auto_vacuum = INCREMENTAL")
    conn.execute("CREATE TABLE x (y)")
    conn.executemany("INSERT INTO x VALUES (?)", [(bytes(4000),)] * 200)
    conn.execute("DELETE FROM x")
    (free_before,) = conn.execute("PRAGMA freelist_count").fetchone()
    has_more = sqlite_writer._free_pages_and_check_if_more_remain(conn, 64)
    (free_after,) = conn.execute("PRAGMA freelist_count").fetchone()
    conn.close()

    assert (True, free_before - 64) == (has_more, free_after)


def count_writers() -> int:
    return sum(thread.name == "perdure-write" for thread in threading.enumerate())


def test_two_spellings_of_a_path_share_one_database(tmp_path: Path) -> None:
    """Both have one writing thread, which ends when the last one is closed."""
    before = count_writers()
    first, second = open_notes(tmp_path / "x.db"), open_notes(tmp_path / "." / "x.db")
    started_writers = count_writers() - before
    first.close()
    first.close()
    with closing(second):
        second.write(partial(insert_note, 1))
        stored = second.read(read_numbers)

    assert (started_writers, count_writers() - before) == (1, 0)
    assert stored == [1]
    with pytest.raises(StorageUnavailable, match="is closed"):
        second.write(partial(insert_note, 2))


def test_thread_pool_starts_threads_only_when_needed() -> None:
    """Sequential work needs one thread. Parallel work starts more, up to the limit."""

    def count_threads() -> int:
        return sum(thread.name == "some" for thread in threading.enumerate())

    async def submit_work() -> tuple[int, int]:
        for _ in range(5):
            await pool.submit(count_threads, is_async=True)
        count_of_sequential, gate = count_threads(), threading.Event()
        waiting = [pool.submit(gate.wait, is_async=True) for _ in range(3)]
        count_of_parallel = count_threads()
        gate.set()
        await asyncio.gather(*waiting)
        return count_of_sequential, count_of_parallel

    pool = ThreadPool(2, "some", is_permanent=True)
    counts = asyncio.run(submit_work())
    pool.close()

    assert (*counts, count_threads()) == (1, 2, 0)


@pytest.mark.parametrize("is_permanent", [True, False])
def test_thread_pool_works_again_after_a_thread_could_not_start(
    is_permanent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller gets the error, and the refused work is never done."""

    def refuse_to_start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool, finished = ThreadPool(2, "some", is_permanent=is_permanent), list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_to_start)
        for i in range(3):
            with pytest.raises(RuntimeError, match="can't start"):
                pool.submit(partial(finished.append, i), is_async=False)
    pool.submit(partial(finished.append, 3), is_async=False).result(30)
    pool.close()

    assert finished == [3]


def test_opening_with_another_synchronous_is_refused(
    database: SQLiteDatabase, tmp_path: Path
) -> None:
    """A database that is open with 'full' cannot be opened with 'normal'. Unknown values are
    refused.
    """
    open_notes(database.path).close()
    with pytest.raises(ConfigurationError, match="synchronous='full'"):
        open_notes(database.path, synchronous="normal")
    with pytest.raises(ConfigurationError, match="expected 'full' or 'normal'"):
        open_notes(tmp_path / "y.db", synchronous="off")


def test_read_only_database_is_not_changed(tmp_path: Path) -> None:
    """Reads work, and writes are refused."""
    path = tmp_path / "x.db"
    with closing(open_notes(path)) as database:
        database.write(partial(insert_note, 1))
    before = path.read_bytes()
    read_only_database = open_notes(path, read_only=True)
    stored = read_only_database.read(read_numbers)
    with pytest.raises(StorageError, match="read-only"):
        read_only_database.write(partial(insert_note, 2))
    with pytest.raises(StorageError):
        read_only_database.read(lambda: insert_note(3))
    read_only_database.close()

    assert stored == [1]
    assert before == path.read_bytes()
    with pytest.raises(ConfigurationError, match="does not exist"):
        open_notes(tmp_path / "absent.db", read_only=True)


@pytest.mark.parametrize("name", [":memory:", "x.db"])
def test_flow_may_yield_lists_of_statements(name: str, tmp_path: Path) -> None:
    """The flow receives the rows of each statement. An error in one undoes all of them."""
    database = open_notes(name if name == ":memory:" else tmp_path / name)
    insert = "INSERT INTO notes (n, text) VALUES (?, 'x')"
    several = Statement(insert, [(3,), (4,)], execute_many=True)

    def yield_list(*requests: Statement) -> Flow[Any]:
        return (yield list(requests))

    with closing(database):
        written = database.write(partial(yield_list, Statement(insert, (1,)), several))
        with pytest.raises(StorageError, match="UNIQUE"):
            database.write(partial(yield_list, Statement(insert, (2,)), several))
        count = Statement("SELECT count(*) FROM notes")
        rows = database.read(lambda: yield_list(count, Statement("SELECT min(n) FROM notes")))
        awaited_rows = asyncio.run(database.aread(lambda: yield_list(count, count), snapshot=False))

    assert written == [[], []]
    assert rows == [[(3,)], [(1,)]]
    assert awaited_rows == [[(3,)], [(3,)]]


def test_aread_has_a_snapshot_and_can_be_cancelled(database: SQLiteDatabase) -> None:
    """`aread` raises the same errors as `read`."""

    def read_twice() -> Flow[Any]:
        first = yield from read_numbers()
        database.write(partial(insert_note, 2))
        return first, (yield from read_numbers())

    async def read_in_tasks() -> tuple[Any, ...]:
        seen = await database.aread(read_twice)
        with pytest.raises(StorageError, match="no such table"):
            await database.aread(lambda: fetch_rows("SELECT * FROM absent"))
        tasks = [asyncio.create_task(database.aread(read_numbers)) for _ in range(50)]
        for n, task in enumerate(tasks):
            await asyncio.sleep(0)
            if n % 2:
                task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        return seen, outcomes[::2]

    database.write(partial(insert_note, 1))
    rows_of_snapshot, lists = asyncio.run(read_in_tasks())
    after = asyncio.run(database.aread(read_numbers))

    assert rows_of_snapshot == ([1], [1])
    assert lists == [[1, 2]] * 25
    assert after == [1, 2]


def find_own_threads() -> set[threading.Thread]:
    """Return the threads of the process, except those of aiosqlite, which other tests use."""
    return {thread for thread in threading.enumerate() if "_connection_worker" not in thread.name}


def test_close_waits_for_cancelled_reads_of_an_ended_event_loop(tmp_path: Path) -> None:
    """The reads are cancelled several times, as anyio does. `close` leaves no thread."""
    has_started, may_return = threading.Event(), threading.Event()

    def wait_for_release() -> bool:
        has_started.set()
        return may_return.wait(30)

    class BlockingConnection(sqlite3.Connection):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.create_function("held", 0, wait_for_release)

    async def cancel_reads() -> list[bool]:
        read = partial(fetch_rows, "SELECT held()")
        reads = [asyncio.create_task(notes.aread(read)) for _ in range(8)]
        await asyncio.to_thread(has_started.wait, 30)
        for _ in range(3):
            for task in reads:
                task.cancel()
            await asyncio.sleep(0)
        return [task.cancelled() for task in reads]

    before = find_own_threads()
    notes = open_notes(tmp_path / "x.db", factory=BlockingConnection)
    cancelled = asyncio.run(cancel_reads())
    closing_thread = threading.Thread(target=notes.close)
    closing_thread.start()
    may_return.set()
    closing_thread.join()

    assert cancelled == [True] * 8
    assert find_own_threads() <= before


def test_close_ends_or_refuses_reads_of_coroutines(tmp_path: Path) -> None:
    """Earlier reads finish or are cancelled, later reads are refused, and no thread stays."""
    before = find_own_threads()

    async def read_until_closed(database: SQLiteDatabase) -> int:
        for count in range(10_000):
            try:
                assert await database.aread(read_numbers) == []
            except StorageUnavailable:
                return count
        return -1

    async def close_during_reads(
        close: Callable[[SQLiteDatabase], Awaitable[None]], path: Path
    ) -> list[Any]:
        database = open_notes(path)
        reads = [asyncio.create_task(read_until_closed(database)) for _ in range(20)]
        await asyncio.sleep(0.002)
        for task in reads[::2]:
            task.cancel()
        await close(database)
        return await asyncio.gather(*reads, return_exceptions=True)

    async def close_in_event_loop(database: SQLiteDatabase) -> None:
        database.close()

    async def close_in_thread(database: SQLiteDatabase) -> None:
        await asyncio.to_thread(database.close)

    for number in range(rounds(20)):
        for close in (close_in_event_loop, close_in_thread):
            results = asyncio.run(
                close_during_reads(close, tmp_path / f"{number} {close.__name__}.db")
            )

            assert all(isinstance(end, asyncio.CancelledError) for end in results[::2])
            assert all(isinstance(end, int) and end >= 0 for end in results[1::2])
    assert find_own_threads() <= before


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///x.db", "x.db"),
        ("sqlite:////srv/x.db", "/srv/x.db"),
        ("sqlite+aiosqlite:///data/x.db?timeout=5", "data/x.db"),
        ("SQLite://x.db", "x.db"),
        ("sqlite://", ":memory:"),
        ("sqlite+pysqlcipher://user:secret@/x.db", "x.db"),
    ],
)
@pytest.mark.parametrize(
    "use", [SQLiteCheckpointer, SQLiteCheckpointer.open, SQLiteStore, SQLiteStore.open]
)
def test_sqlite_url_is_refused_with_advice_to_pass_the_path(use: Any, url: str, path: str) -> None:
    """The error does not mention Postgres, and does not show a password."""
    with pytest.raises(ConfigurationError) as raised:
        use(url)

    assert str(raised.value) == f"the database is an SQLite URL; pass the path {path!r} instead"


def test_impossible_paths_raise_errors_of_perdure(tmp_path: Path) -> None:
    """Examples are a loop of links, a long name, a NUL and a lone surrogate."""
    loop = tmp_path / "loop.db"
    try:
        loop.symlink_to(loop)
    except OSError:  # Windows requires a privilege
        loop = tmp_path / ("x" * 300)
    for read_only in (False, True):
        for path in (loop, tmp_path / ("x" * 300), loop / "x.db"):
            with pytest.raises((StorageError, ConfigurationError)) as error:
                open_notes(path, read_only=read_only)
            assert path.name[:20] in str(error.value)
        for name in ("a\0b", "a\ud800b", ""):
            with pytest.raises(ConfigurationError, match="database path is"):
                open_notes(name, read_only=read_only)


@pytest.mark.parametrize("name", [":memory:", "x.db"])
def test_calls_of_a_closed_database_raise_storage_unavailable(name: str, tmp_path: Path) -> None:
    """Closing twice is not an error."""
    database = open_notes(name if name == ":memory:" else tmp_path / name)
    database.close()
    database.close()

    async def in_thread() -> int:
        return await database.run_in_thread(lambda: 1)

    calls = (
        database.release_unused_disk_space,
        database.stats,
        lambda: database.read(read_numbers),
    )
    for call in (*calls, lambda: asyncio.run(in_thread())):
        with pytest.raises(StorageUnavailable, match="is closed"):
            call()


def test_memory_databases_are_separate() -> None:
    """Several threads write to one of two databases with the path `:memory:`."""
    with closing(open_notes(":memory:")) as first, closing(open_notes(":memory:")) as second:
        with ThreadPoolExecutor(4) as pool:
            written = list(pool.map(lambda n: first.write(partial(insert_note, n)), range(20)))
        stored = first.read(read_numbers), second.read(read_numbers)

    assert list(range(20)) == written
    assert (list(range(20)), []) == stored


def test_threads_and_event_loops_can_use_one_database(database: SQLiteDatabase) -> None:
    """The two event loops run one after the other."""

    async def write_and_read(start: int) -> list[int]:
        writes = [database.awrite(partial(insert_note, n)) for n in range(start, start + 10)]
        await asyncio.gather(*writes)
        return await database.run_in_thread(lambda: database.read(read_numbers))

    results = [asyncio.run(write_and_read(0)), asyncio.run(write_and_read(10))]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: database.write(partial(insert_note, n)), range(20, 40)))

    assert [list(range(10)), list(range(20))] == results
    assert list(range(40)) == database.read(read_numbers)


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_child_must_open_the_database_again(database: SQLiteDatabase) -> None:
    """The child's inherited database is refused. The parent's database still works."""
    database.write(partial(insert_note, 1))
    child_pid = os.fork()
    if child_pid == 0:
        try:
            use_in_child(database)
            os._exit(0)
        finally:
            os._exit(1)  # skips pytest's shutdown, which belongs to the parent
    _, status = os.waitpid(child_pid, 0)
    database.write(partial(insert_note, 3))

    assert os.waitstatus_to_exitcode(status) == 0
    assert database.read(read_numbers) == [1, 2, 3]


def use_in_child(database: SQLiteDatabase) -> None:
    with pytest.raises(StorageUnavailable, match="forked"):
        database.write(partial(insert_note, 9))
    with pytest.raises(StorageUnavailable):
        database.read(read_numbers)
    reopened = open_notes(database.path)
    reopened.write(partial(insert_note, 2))
    reopened.close()


@pytest.mark.parametrize(("synchronous", "is_full"), [("full", 1), ("normal", 0)])
def test_full_durability_includes_the_cache_of_the_drive(
    synchronous: Any, is_full: int, tmp_path: Path
) -> None:
    """SQLite uses the pragmas on macOS only, but stores their values everywhere."""
    with SQLiteCheckpointer.open(tmp_path / "x.db", synchronous=synchronous) as saver:
        connection = cast(Any, saver.database)._connect_once().writer.connection
        pragmas = ("fullfsync", "checkpoint_fullfsync")
        values = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in pragmas]

    assert values == [is_full, is_full]
