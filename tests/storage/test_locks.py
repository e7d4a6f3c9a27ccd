"""Locks on names: one holder across threads, tasks, event loops and processes."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest

from perdure.errors import AlreadyLocked, ConfigurationError, StorageError, StorageUnavailable
from perdure.storage.database import Schema
from perdure.storage.locks import FileLocks, Locks, file_lock
from perdure.storage.postgres import PostgresDatabase
from perdure.storage.sqlite import SQLiteDatabase
from tests import postgres_server
from tests.backends import Place, places
from tests.durability.processes import forkserver_context, run_in_processes
from tests.storage.test_storage import opened

PATIENCE_S = 30.0  # a deadlock fails the test instead of stopping it
LATER_S = 0.02  # long enough for what others would do in the wrong moment


def at(place: Place) -> SQLiteDatabase:
    """A database without tables at a place."""
    if not place.dsn:
        return opened(place.path)
    nothing = Schema("notes", "")
    made: Any = PostgresDatabase(place.dsn, nothing, schema=postgres_server.schema(place.path))
    made.connect()
    return cast(SQLiteDatabase, made)


@pytest.fixture(params=["file", ":memory:", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SQLiteDatabase]:
    name = request.param
    with closing(opened(name) if name == ":memory:" else at(places(tmp_path)[name]())) as notes:
        yield notes


class Room:
    """Where only one may be at a time; remembers in which order they came."""

    def __init__(self) -> None:
        self.inside = 0
        self.crowded = False
        self.order: list[Any] = []

    def enter(self, who: Any) -> None:
        self.inside += 1
        self.crowded |= self.inside > 1
        self.order.append(who)

    def leave(self) -> None:
        self.inside -= 1


async def visit(database: SQLiteDatabase, room: Room, who: Any) -> None:
    async with database.lock("t", timeout_s=PATIENCE_S):
        room.enter(who)
        await asyncio.sleep(0.001)
        room.leave()


def stay(database: SQLiteDatabase, room: Room, who: Any) -> None:
    with database.lock("t", timeout_s=PATIENCE_S):
        room.enter(who)
        threading.Event().wait(0.001)
        room.leave()


def test_tasks_threads_and_two_loops(database: SQLiteDatabase) -> None:
    """Threads, and tasks of two event loops in threads of their own, are never there together."""
    room = Room()

    def loop(name: str) -> None:
        async def course() -> None:
            await asyncio.gather(*(visit(database, room, (name, n)) for n in range(20)))

        asyncio.run(course())

    with ThreadPoolExecutor(6) as pool:
        done = [pool.submit(loop, name) for name in "ab"]
        done += [pool.submit(stay, database, room, n) for n in range(20)]
        for future in done:
            future.result(PATIENCE_S)

    assert not room.crowded
    assert len(set(room.order)) == 60


def test_first_come_first_served(database: SQLiteDatabase) -> None:
    """Tasks and threads that wait get it in the order in which they asked."""
    room = Room()

    async def course() -> None:
        async with database.lock("t"):
            waiting: list[Any] = []
            for n in range(6):
                await until_queued(database, n + 1)
                if n % 2:
                    waiting.append(asyncio.create_task(visit(database, room, n), context=fresh()))
                else:
                    waiting.append(fresh_thread(lambda n=n: stay(database, room, n)))  # type: ignore[misc]
            await until_queued(database, 7)
        for each in waiting:
            await (each if isinstance(each, asyncio.Task) else asyncio.to_thread(each.join))

    asyncio.run(course())

    assert list(range(6)) == room.order


async def until_queued(database: SQLiteDatabase, count: int) -> None:
    """Wait until as many hold a lock, or wait for it."""
    kept: Any = database if isinstance(database, PostgresDatabase) else database._resource
    locks = getattr(kept, "locks", None) or kept._locks
    async with asyncio.timeout(PATIENCE_S):
        while len(locks._queues._queues["t"]) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def fresh() -> contextvars.Context:
    """The context of another run."""
    return contextvars.Context()


def fresh_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=fresh().run, args=(work,))
    thread.start()
    return thread


def test_other_names_do_not_wait(database: SQLiteDatabase) -> None:
    """Each name has a lock of its own; one run may take several."""
    with database.lock("a", timeout_s=0), database.lock("b", timeout_s=0):
        fresh_thread(lambda: take(database, "c")).join(PATIENCE_S)


def take(database: SQLiteDatabase, name: str, timeout_s: float = PATIENCE_S) -> None:
    with database.lock(name, timeout_s=timeout_s):
        pass


def test_a_timeout_names_the_lock_and_the_time(database: SQLiteDatabase) -> None:
    """Who waits too long is told; the lock is free again once its holder is done."""
    said: list[str] = []

    def late() -> None:
        with pytest.raises(StorageUnavailable) as told:
            take(database, "t", timeout_s=0.01)
        said.append(str(told.value))

    async def alate() -> None:
        with pytest.raises(StorageUnavailable) as told:
            async with database.lock("t", timeout_s=0.01):
                pass
        said.append(str(told.value))

    with database.lock("t"):
        fresh_thread(late).join(PATIENCE_S)
        fresh_thread(lambda: asyncio.run(alate())).join(PATIENCE_S)
    take(database, "t", timeout_s=0)

    assert len(said) == 2
    assert all("'t'" in text and "0.01 s" in text for text in said)


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_taking_it_twice_in_a_run_raises(database: SQLiteDatabase, timeout_s: float | None) -> None:
    """Also from a task or a thread that the run started; and not once it was given back."""

    async def again() -> None:
        with pytest.raises(AlreadyLocked, match="'t' is already locked by this run"):
            async with database.lock("t", timeout_s=timeout_s):
                pass

    def again_in_thread() -> None:
        with pytest.raises(AlreadyLocked):
            take(database, "t")

    async def later(free: asyncio.Event) -> None:
        await free.wait()
        async with database.lock("t", timeout_s=PATIENCE_S):
            pass

    async def course() -> None:
        free = asyncio.Event()
        async with database.lock("t"):
            await again()
            await asyncio.create_task(again())
            await asyncio.to_thread(again_in_thread)
            task = asyncio.create_task(later(free))
        free.set()
        await task
        async with database.lock("t", timeout_s=0):
            pass

    asyncio.run(course())


def test_cancelled_while_it_waits_or_holds(database: SQLiteDatabase) -> None:
    """A task that is cancelled leaves the queue, or gives the lock back."""

    async def course() -> list[str]:
        entered: asyncio.Queue[str] = asyncio.Queue()

        async def hold(name: str) -> None:
            async with database.lock("t", timeout_s=PATIENCE_S):
                entered.put_nowait(name)
                await asyncio.sleep(PATIENCE_S)

        holds = asyncio.create_task(hold("holds"))
        order = [await entered.get()]
        waits, after = (asyncio.create_task(hold(name)) for name in ("waits", "after"))
        await until_queued(database, 3)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        holds.cancel()
        order.append(await entered.get())
        after.cancel()
        async with database.lock("t", timeout_s=PATIENCE_S):
            return order

    assert asyncio.run(course()) == ["holds", "after"]


def test_cancelled_as_its_turn_comes(database: SQLiteDatabase) -> None:
    """A task cancelled in the moment in which it gets the lock passes it on."""

    async def course() -> None:
        lock = database.lock("t")
        await lock.__aenter__()
        waits = asyncio.create_task(visit(database, Room(), 1), context=fresh())
        await until_queued(database, 2)
        await lock.__aexit__()
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        async with database.lock("t", timeout_s=PATIENCE_S):
            pass

    asyncio.run(course())


@pytest.mark.parametrize("told", [False, True])
def test_an_event_loop_that_died_is_passed_over(database: SQLiteDatabase, told: bool) -> None:
    """One that was closed while its task waited, or was the next, does not keep the lock."""
    loop = asyncio.new_event_loop()
    with database.lock("t"):
        task = loop.create_task(visit(database, Room(), 1), context=fresh())
        loop.run_until_complete(asyncio.sleep(LATER_S))
        if not told:
            loop.close()
    loop.close()
    take(database, "t", timeout_s=PATIENCE_S)

    assert not task.done()


def test_names_of_one_byte_do_not_stop_a_run(tmp_path: Path) -> None:
    """Two names that stand for the same byte: a run may have both, another process neither."""
    mine = Locks(FileLocks(str(tmp_path / "x.locks"), offset=lambda name: 7))
    turns = [mine.acquire(name, 0) for name in "ab"]
    code = f"""
from perdure.storage.locks import FileLocks, Locks, file_lock
from perdure.errors import StorageUnavailable
locks = Locks(FileLocks({str(tmp_path / "x.locks")!r}, offset=lambda name: 7))
def free():
    try:
        locks.release(locks.acquire("c", 0))
        return True
    except StorageUnavailable:
        return False
while input():
    print(free(), flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        found = []
        for turn in (*turns, None):
            print("look", file=other.stdin, flush=True)
            found.append(other.stdout.readline().strip())
            if turn is not None:
                mine.release(turn)
        print(file=other.stdin, flush=True)
    mine.close()

    assert found == ["False", "False", "True"]


@pytest.mark.parametrize("wrong", [{"name": 1}, {"name": "t", "timeout_s": -1}])
def test_wrong_arguments(database: SQLiteDatabase, wrong: dict[str, Any]) -> None:
    """A name that is no text, and a time that is none."""
    with pytest.raises(ConfigurationError):
        database.lock(**wrong)


def test_a_file_that_is_only_read_has_no_locks(tmp_path: Path) -> None:
    """It may lie where nothing can be written."""
    opened(tmp_path / "x.db").close()
    with (
        closing(opened(tmp_path / "x.db", read_only=True)) as reading,
        pytest.raises(StorageError, match="read-only"),
        reading.lock("t"),
    ):
        pass


def test_a_closed_database_has_no_locks(database: SQLiteDatabase) -> None:
    """Nor is there anything to give back to it."""
    with database.lock("t"):
        database.close()
    with pytest.raises(StorageUnavailable, match="is closed"), database.lock("t"):
        pass


# -- processes


def counts(place: Place, go: Connection, number: int) -> None:
    """Adds to a number in a file, by reading and writing it, under the lock."""
    database = at(place)
    go.send("ready")
    go.recv()
    total = place.path.with_suffix(".total")

    async def once() -> None:
        async with database.lock("t", timeout_s=60):
            found = int(total.read_text())
            await asyncio.sleep(0.001)
            total.write_text(str(found + 1))

    for turn in range(10):
        if turn % 2:
            asyncio.run(once())
            continue
        with database.lock("t", timeout_s=60):
            total.write_text(str(int(total.read_text()) + 1))
    database.close()
    go.send("done")


def test_eight_processes(place: Place) -> None:
    """Eight processes count together and none of their counts is lost."""
    place.path.with_suffix(".total").write_text("0")
    at(place).close()
    run_in_processes(8, counts, place)

    assert place.path.with_suffix(".total").read_text() == "80"


def holds(place: Place, said: Connection) -> None:
    database = at(place)
    with database.lock("t"):
        said.send("holds")
        threading.Event().wait()


def test_a_holder_that_is_killed(place: Place) -> None:
    """The lock of a process that is killed is free, also for who waits for it already."""
    context = forkserver_context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=holds, args=(place, theirs), daemon=True)
    process.start()
    with closing(at(place)) as database:
        assert ours.recv() == "holds"
        with pytest.raises(StorageUnavailable):
            take(database, "t", timeout_s=0.05)
        waits = fresh_thread(lambda: take(database, "t"))
        waits.join(LATER_S)
        waited = waits.is_alive()
        process.kill()
        process.join()
        waits.join(PATIENCE_S)

        assert waited
        assert not waits.is_alive()


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_does_not_hold_it(place: Place) -> None:
    """The child waits for its parent's lock as any process does, and leaving does not free it."""
    database = at(place)
    lock = database.lock("t")
    lock.__enter__()
    child = os.fork()
    if child == 0:
        try:
            again = at(place)
            with pytest.raises(StorageUnavailable):
                take(again, "t", timeout_s=0.05)
            lock.__exit__()
            with pytest.raises(StorageUnavailable):
                take(again, "t", timeout_s=0.05)
            again.close()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    context = forkserver_context()
    other = context.Process(target=tries, args=(place,), daemon=True)
    other.start()
    other.join(60)
    lock.__exit__()
    database.close()

    assert os.waitstatus_to_exitcode(status) == 0
    assert other.exitcode == 7


def tries(place: Place) -> None:
    """Ends with 7 if it does not get the lock."""
    try:
        take(at(place), "t", timeout_s=0.05)
    except StorageUnavailable:
        sys.exit(7)


def test_a_locked_file_is_given_back_by_a_process_that_is_killed(tmp_path: Path) -> None:
    """Another process waits in vain for it, and gets it when its holder is killed."""
    path = str(tmp_path / "x.lock")
    code = f"""
from perdure.storage.locks import file_lock
with file_lock({path!r}, 0):
    print("mine", flush=True)
    input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        said = other.stdout.readline()
        with pytest.raises(TimeoutError), file_lock(path, LATER_S):
            pass
        other.kill()
        with file_lock(path, PATIENCE_S):
            pass

    assert said == "mine\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_holds_no_file_of_its_parent(tmp_path: Path) -> None:
    """What a process gives back is free, while a child lives that it forked meanwhile."""
    path = str(tmp_path / "x.lock")
    reading, writing = os.pipe()
    with file_lock(path, 0):
        child = os.fork()
        if not child:
            os.close(writing)
            os.read(reading, 1)  # until the parent has looked
            os._exit(0)
    with file_lock(path, PATIENCE_S):
        os.write(writing, b".")
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
