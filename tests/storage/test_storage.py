"""The database under the checkpointers: group commits, the files it leaves, forks."""

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
from typing import Any

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
from perdure.storage.threads import ThreadPool
from perdure.stores import SQLiteStore
from tests.rounds import rounds

NOTES = Schema("notes", "CREATE TABLE notes (n INTEGER PRIMARY KEY, text TEXT) STRICT")


def opened(path: Path | str, **options: Any) -> SQLiteDatabase:
    database = SQLiteDatabase(path, NOTES, **options)
    database.connect()
    return database


@pytest.fixture
def database(tmp_path: Path) -> Iterator[SQLiteDatabase]:
    """An empty database whose commits are counted."""
    notes = opened(tmp_path / "x.db", factory=Commits)
    yield notes
    notes.close()


Maker = Callable[[], Flow[int]]


def add(n: int, text: str = "note") -> Flow[int]:
    yield Statement("INSERT INTO notes (n, text) VALUES (?, ?)", (n, text))
    return n


def add_and_fail(n: int) -> Flow[int]:
    yield Statement("INSERT INTO notes (n, text) VALUES (?, '')", (n,))
    yield Statement("INSERT INTO notes (n, text) VALUES (?, '')", (n + 1,))
    raise LookupError(n)


def numbers() -> Flow[list[int]]:
    return [n for (n,) in (yield Statement("SELECT n FROM notes ORDER BY n"))]


def files(folder: Path) -> set[str]:
    """The files of a folder but for the lock between processes, which stays."""
    return {p.name for p in folder.iterdir() if p.suffix != ".lock"}


class Commits(sqlite3.Connection):
    """Counts what is committed by connections that write."""

    count = 0

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        Commits.count += sql == "COMMIT" and self.total_changes > 0
        return super().execute(sql, *args)


def grouped(database: SQLiteDatabase, makers: list[Maker]) -> tuple[list[Any], int]:
    """The outcomes of jobs that all wait while the writer is at another, and their commits."""
    release, entered = threading.Event(), threading.Event()

    def slow() -> Flow[int]:
        yield Statement("INSERT INTO notes (n, text) VALUES (-1, 'first')")
        entered.set()
        release.wait(30)
        return -1

    async def run() -> list[Any]:
        first = database.awrite(slow)
        await asyncio.to_thread(entered.wait, 30)
        Commits.count = 0
        waiting = [database.awrite(make) for make in makers]
        release.set()
        await first
        return await asyncio.gather(*waiting, return_exceptions=True)

    return asyncio.run(run()), Commits.count


def test_a_group_shares_a_transaction(database: SQLiteDatabase) -> None:
    """Jobs that wait while the writer is busy share one."""
    outcomes, commits = grouped(database, [partial(add, n) for n in range(90)])

    assert list(range(90)) == outcomes
    assert list(range(-1, 90)) == database.read(numbers)
    assert commits == 2  # theirs, and that of the job they waited for


def test_in_a_group_each_fails_for_itself(database: SQLiteDatabase) -> None:
    """If one of a group fails, the others are written all the same, and told once each."""
    told: list[tuple[int, str]] = []
    jobs = [(n, partial(add_and_fail if n % 3 == 0 else add, n * 1000)) for n in range(9)]

    async def run() -> list[Any]:
        waiting = [
            database.awrite(
                make,
                lambda _, n=n: told.append((n, "committed")),  # type: ignore[misc]
                lambda n=n: told.append((n, "undone")),  # type: ignore[misc]
            )
            for n, make in jobs
        ]
        return await asyncio.gather(*waiting, return_exceptions=True)

    outcomes = asyncio.run(run())

    good = [n * 1000 for n in range(9) if n % 3]
    assert good == [outcome for outcome in outcomes if isinstance(outcome, int)]
    assert [e.args[0] for e in outcomes if isinstance(e, LookupError)] == [0, 3000, 6000]
    assert good == database.read(numbers)
    assert [(n, "committed" if n % 3 else "undone") for n in range(9)] == sorted(told)


def test_a_failing_flow_alone_leaves_nothing(database: SQLiteDatabase) -> None:
    """A flow that has a transaction to itself is undone too, and the next one works."""
    with pytest.raises(LookupError):
        database.write(partial(add_and_fail, 1))
    with pytest.raises(StorageError, match="no such table"):
        database.write(partial(fetch_rows, "SELECT * FROM absent"))
    database.write(partial(add, 1))

    assert database.read(numbers) == [1]


@pytest.mark.parametrize("read_only", [False, True])
def test_other_files_are_refused(read_only: bool, tmp_path: Path) -> None:
    """Another application's database, a text file and a folder are refused and left alone."""
    foreign, text = tmp_path / "foreign.db", tmp_path / "notes.txt"
    conn = sqlite3.connect(foreign)
    conn.execute("CREATE TABLE theirs (x)")
    conn.close()
    text.write_text("no database at all " * 100)
    before = foreign.read_bytes(), text.read_bytes()
    for path in (foreign, text, tmp_path):
        with pytest.raises(NotADatabase):
            opened(path, read_only=read_only)

    assert before == (foreign.read_bytes(), text.read_bytes())


@pytest.mark.parametrize("reuses", [False, True])
def test_the_wal_stays_bounded(
    reuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much is written, the WAL is moved into the file again and again."""
    monkeypatch.setattr(sqlite_connection, "REUSES_WAL", reuses)  # safe: nobody else writes
    database = opened(tmp_path / "x.db", synchronous="normal")
    sizes = []
    for n in range(600):
        database.write(partial(add, n, str(n) * 20_000))
        sizes.append(os.path.getsize(tmp_path / "x.db-wal"))
    database.close()

    assert max(sizes) < 3 * WAL_LIMIT_BYTES


@pytest.mark.parametrize("follows", [True, False])
def test_a_patient_write_shares_the_next_commit(
    database: SQLiteDatabase, monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    """It waits for another write, as long as that is worth it."""
    monkeypatch.setattr(sqlite_writer, "GROUP_WAIT_S", 60.0 if follows else 0.001)
    database.write(partial(add, 0))

    async def run() -> None:
        Commits.count = 0
        tasks = [asyncio.ensure_future(database.awrite(partial(add, 1), may_wait=True))]
        await asyncio.sleep(0.02)  # the writing thread has it
        if follows:
            tasks.append(asyncio.ensure_future(database.awrite(partial(add, 2))))
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert Commits.count == 1
    assert database.read(numbers) == [0, 1, 2][: 2 + follows]


def test_an_urgent_write_is_committed_by_its_caller(database: SQLiteDatabase) -> None:
    """Unless the connection is in use: then it waits for its turn, behind what came before."""
    threads = dict[int, int]()

    def noted(n: int) -> Flow[int]:
        threads[n] = threading.get_ident()
        return (yield from add(n))

    database.write(partial(noted, 0), urgent=True)
    with ThreadPoolExecutor(2) as pool:
        with database._connect_once().writer.lend_connection():
            waiting = [
                pool.submit(database.write, partial(noted, n), urgent=n == 2) for n in (1, 2)
            ]
            threading.Event().wait(0.1)  # both find the connection in use
        for each in waiting:
            each.result()
    database.write(partial(noted, 3))

    assert database.read(numbers) == [0, 1, 2, 3]
    assert threads[0] == threading.get_ident() != threads[1] == threads[2] == threads[3]


def test_an_urgent_write_to_a_closed_file_is_refused(tmp_path: Path) -> None:
    database = opened(tmp_path / "x.db")
    database.close()
    with pytest.raises(StorageUnavailable, match="closed"):
        database.write(partial(add, 0), urgent=True)


def test_a_clean_close_leaves_one_file(tmp_path: Path) -> None:
    """After close there is no WAL and no shared-memory file, whoever read meanwhile."""
    database = opened(tmp_path / "x.db")
    database.write(partial(add, 1))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: database.read(numbers), range(20)))
    database.close()

    assert found == [[1]] * 20
    assert files(tmp_path) == {"x.db"}


def test_space_is_given_back(tmp_path: Path) -> None:
    """With 95 % of the threads deleted and only heads retained, the file shrinks by 90 %."""
    path = tmp_path / "x.db"

    with SQLiteCheckpointer.open(path, synchronous="normal") as saver:
        for number in range(600):
            checkpoint = empty_checkpoint()
            checkpoint["channel_values"] = {"text": f"{number} " * 2000}
            thread: RunnableConfig = {"configurable": {"thread_id": str(number % 200)}}
            saver.put(thread, checkpoint, {"step": number}, {"text": number})
    full = path.stat().st_size
    with SQLiteCheckpointer.open(path) as saver:
        saver.prune([str(number) for number in range(190)], strategy="delete")
        saver.retain(Retention(last=1, history=False))
        left = len(saver.threads())
    small = path.stat().st_size

    assert left == 10
    assert small <= full // 10


def test_a_vacuum_step_gives_back_as_many_pages_as_it_is_to(tmp_path: Path) -> None:
    """Not one page a step, as what a large deletion frees is given back in steps."""
    conn = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    conn.execute("PRAGMA auto_vacuum = INCREMENTAL")
    conn.execute("CREATE TABLE x (y)")
    conn.executemany("INSERT INTO x VALUES (?)", [(bytes(4000),)] * 200)
    conn.execute("DELETE FROM x")
    (before,) = conn.execute("PRAGMA freelist_count").fetchone()
    more = sqlite_writer._vacuum_step(conn, 64)
    (free,) = conn.execute("PRAGMA freelist_count").fetchone()
    conn.close()

    assert (True, before - 64) == (more, free)


def writers() -> int:
    return sum(thread.name == "perdure-write" for thread in threading.enumerate())


def test_one_path_is_one_database(tmp_path: Path) -> None:
    """Opened again, also by another spelling, a path has the same writer; the last closes it."""
    before = writers()
    first, second = opened(tmp_path / "x.db"), opened(tmp_path / "." / "x.db")
    together = writers() - before
    first.close()
    first.close()
    with closing(second):
        second.write(partial(add, 1))
        stored = second.read(numbers)

    assert (together, writers() - before) == (1, 0)
    assert stored == [1]
    with pytest.raises(StorageUnavailable, match="is closed"):
        second.write(partial(add, 2))


def test_threads_are_started_as_they_are_needed() -> None:
    """One for work that comes piece by piece, more while that is busy, no more than allowed."""

    def running() -> int:
        return sum(thread.name == "some" for thread in threading.enumerate())

    async def work() -> tuple[int, int]:
        for _ in range(5):
            await threads.submit(running, is_async=True)
        one, gate = running(), threading.Event()
        waiting = [threads.submit(gate.wait, is_async=True) for _ in range(3)]
        two = running()
        gate.set()
        await asyncio.gather(*waiting)
        return one, two

    threads = ThreadPool(2, "some", is_permanent=True)
    found = asyncio.run(work())
    threads.close()

    assert (*found, running()) == (1, 2, 0)


@pytest.mark.parametrize("lasting", [True, False])
def test_a_thread_that_cannot_start(lasting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who hands in work is told; later work is done, and the work refused is not."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads, done = ThreadPool(2, "some", is_permanent=lasting), list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for i in range(3):
            with pytest.raises(RuntimeError, match="can't start"):
                threads.submit(partial(done.append, i), is_async=False)
    threads.submit(partial(done.append, 3), is_async=False).result(30)
    threads.close()

    assert done == [3]


def test_another_synchronous_is_refused(database: SQLiteDatabase, tmp_path: Path) -> None:
    """What one opened as full cannot be opened as normal; an unknown value is refused."""
    opened(database.path).close()
    with pytest.raises(ConfigurationError, match="synchronous='full'"):
        opened(database.path, synchronous="normal")
    with pytest.raises(ConfigurationError, match="expected 'full' or 'normal'"):
        opened(tmp_path / "y.db", synchronous="off")


def test_read_only_writes_nothing(tmp_path: Path) -> None:
    """Opened for reading, a database is read, refuses writes, and its file stays as it is."""
    path = tmp_path / "x.db"
    with closing(opened(path)) as database:
        database.write(partial(add, 1))
    before = path.read_bytes()
    reading = opened(path, read_only=True)
    stored = reading.read(numbers)
    with pytest.raises(StorageError, match="read-only"):
        reading.write(partial(add, 2))
    with pytest.raises(StorageError):
        reading.read(lambda: add(3))
    reading.close()

    assert stored == [1]
    assert before == path.read_bytes()
    with pytest.raises(ConfigurationError, match="does not exist"):
        opened(tmp_path / "absent.db", read_only=True)


@pytest.mark.parametrize("name", [":memory:", "x.db"])
def test_a_flow_may_yield_lists(name: str, tmp_path: Path) -> None:
    """It is sent the rows of each statement; an error in one of them undoes all."""
    database = opened(name if name == ":memory:" else tmp_path / name)
    insert = "INSERT INTO notes (n, text) VALUES (?, 'x')"
    several = Statement(insert, [(3,), (4,)], execute_many=True)

    def listed(*requests: Statement) -> Flow[Any]:
        return (yield list(requests))

    with closing(database):
        wrote = database.write(partial(listed, Statement(insert, (1,)), several))
        with pytest.raises(StorageError, match="UNIQUE"):
            database.write(partial(listed, Statement(insert, (2,)), several))
        count = Statement("SELECT count(*) FROM notes")
        read = database.read(lambda: listed(count, Statement("SELECT min(n) FROM notes")))
        awaited = asyncio.run(database.aread(lambda: listed(count, count), snapshot=False))

    assert wrote == [[], []]
    assert read == [[(3,)], [(1,)]]
    assert awaited == [[(3,)], [(3,)]]


def test_reading_for_coroutines(database: SQLiteDatabase) -> None:
    """Each aread has one snapshot, raises what read raises, and may be cancelled at any moment."""

    def twice() -> Flow[Any]:
        first = yield from numbers()
        database.write(partial(add, 2))
        return first, (yield from numbers())

    async def course() -> tuple[Any, ...]:
        seen = await database.aread(twice)
        with pytest.raises(StorageError, match="no such table"):
            await database.aread(lambda: fetch_rows("SELECT * FROM absent"))
        tasks = [asyncio.create_task(database.aread(numbers)) for _ in range(50)]
        for n, task in enumerate(tasks):
            await asyncio.sleep(0)
            if n % 2:
                task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        return seen, outcomes[::2]

    database.write(partial(add, 1))
    seen, lists = asyncio.run(course())
    after = asyncio.run(database.aread(numbers))

    assert seen == ([1], [1])
    assert lists == [[1, 2]] * 25
    assert after == [1, 2]


def own_threads() -> set[threading.Thread]:
    """The threads of the process, without those of aiosqlite, which savers of other tests use."""
    return {each for each in threading.enumerate() if "_connection_worker" not in each.name}


def test_a_read_that_was_cancelled_outlives_its_event_loop(tmp_path: Path) -> None:
    """Cancelled again and again, as anyio does; closing waits for it, and leaves no thread."""
    begun, let_go = threading.Event(), threading.Event()

    def held() -> bool:
        begun.set()
        return let_go.wait(30)

    class Holding(sqlite3.Connection):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.create_function("held", 0, held)

    async def course() -> list[bool]:
        read = partial(fetch_rows, "SELECT held()")
        reads = [asyncio.create_task(notes.aread(read)) for _ in range(8)]
        await asyncio.to_thread(begun.wait, 30)
        for _ in range(3):
            for task in reads:
                task.cancel()
            await asyncio.sleep(0)
        return [task.cancelled() for task in reads]

    before = own_threads()
    notes = opened(tmp_path / "x.db", factory=Holding)
    cancelled = asyncio.run(course())
    closing_it = threading.Thread(target=notes.close)
    closing_it.start()
    let_go.set()
    closing_it.join()

    assert cancelled == [True] * 8
    assert own_threads() <= before


def test_closed_while_coroutines_read(tmp_path: Path) -> None:
    """What was handed in is read or cancelled, what comes later is refused, and no thread stays."""
    before = own_threads()

    async def read(database: SQLiteDatabase) -> int:
        for times in range(10_000):
            try:
                assert await database.aread(numbers) == []
            except StorageUnavailable:
                return times
        return -1

    async def course(close: Callable[[SQLiteDatabase], Awaitable[None]], path: Path) -> list[Any]:
        database = opened(path)
        reads = [asyncio.create_task(read(database)) for _ in range(20)]
        await asyncio.sleep(0.002)
        for task in reads[::2]:
            task.cancel()
        await close(database)
        return await asyncio.gather(*reads, return_exceptions=True)

    async def in_the_event_loop(database: SQLiteDatabase) -> None:
        database.close()

    async def in_a_thread(database: SQLiteDatabase) -> None:
        await asyncio.to_thread(database.close)

    for number in range(rounds(20)):
        for close in (in_the_event_loop, in_a_thread):
            ends = asyncio.run(course(close, tmp_path / f"{number} {close.__name__}.db"))

            assert all(isinstance(end, asyncio.CancelledError) for end in ends[::2])
            assert all(isinstance(end, int) and end >= 0 for end in ends[1::2])
    assert own_threads() <= before


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
def test_a_url_of_sqlite_is_refused_with_its_path(use: Any, url: str, path: str) -> None:
    """It is not advised to write it as a URL of Postgres, and a password is not shown."""
    with pytest.raises(ConfigurationError) as raised:
        use(url)

    assert str(raised.value) == f"the database is a URL of SQLite; expected a path; pass {path!r}"


def test_paths_that_no_file_can_have(tmp_path: Path) -> None:
    """A loop of links, a name that is too long, a NUL and a lone surrogate: perdure's errors."""
    loop = tmp_path / "loop.db"
    try:
        loop.symlink_to(loop)
    except OSError:  # Windows asks for a privilege
        loop = tmp_path / ("x" * 300)
    for read_only in (False, True):
        for path in (loop, tmp_path / ("x" * 300), loop / "x.db"):
            with pytest.raises((StorageError, ConfigurationError)) as told:
                opened(path, read_only=read_only)
            assert path.name[:20] in str(told.value)
        for name in ("a\0b", "a\ud800b", ""):
            with pytest.raises(ConfigurationError, match="database path is"):
                opened(name, read_only=read_only)


@pytest.mark.parametrize("name", [":memory:", "x.db"])
def test_a_closed_database_says_so(name: str, tmp_path: Path) -> None:
    """After close every call raises StorageUnavailable; closing twice is no error."""
    database = opened(name if name == ":memory:" else tmp_path / name)
    database.close()
    database.close()

    async def in_thread() -> int:
        return await database.run_in_thread(lambda: 1)

    calls = (database.release_unused_disk_space, database.stats, lambda: database.read(numbers))
    for call in (*calls, lambda: asyncio.run(in_thread())):
        with pytest.raises(StorageUnavailable, match="is closed"):
            call()


def test_a_memory_database_is_never_shared() -> None:
    """Each `:memory:` is its own, read and written from threads."""
    with closing(opened(":memory:")) as first, closing(opened(":memory:")) as second:
        with ThreadPoolExecutor(4) as pool:
            written = list(pool.map(lambda n: first.write(partial(add, n)), range(20)))
        stored = first.read(numbers), second.read(numbers)

    assert list(range(20)) == written
    assert (list(range(20)), []) == stored


def test_threads_and_event_loops_share_a_database(database: SQLiteDatabase) -> None:
    """Plain threads, and two event loops one after the other, use one database."""

    async def some(start: int) -> list[int]:
        writes = [database.awrite(partial(add, n)) for n in range(start, start + 10)]
        await asyncio.gather(*writes)
        return await database.run_in_thread(lambda: database.read(numbers))

    found = [asyncio.run(some(0)), asyncio.run(some(10))]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: database.write(partial(add, n)), range(20, 40)))

    assert [list(range(10)), list(range(20))] == found
    assert list(range(40)) == database.read(numbers)


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_must_open_it_again(database: SQLiteDatabase) -> None:
    """In a forked child the database is refused, can be opened again, and the parent's goes on."""
    database.write(partial(add, 1))
    child = os.fork()
    if child == 0:
        try:
            in_child(database)
            os._exit(0)
        finally:
            os._exit(1)  # without pytest's own ending, which is the parent's
    _, status = os.waitpid(child, 0)
    database.write(partial(add, 3))

    assert os.waitstatus_to_exitcode(status) == 0
    assert database.read(numbers) == [1, 2, 3]


def in_child(database: SQLiteDatabase) -> None:
    with pytest.raises(StorageUnavailable, match="forked"):
        database.write(partial(add, 9))
    with pytest.raises(StorageUnavailable):
        database.read(numbers)
    again = opened(database.path)
    again.write(partial(add, 2))
    again.close()
