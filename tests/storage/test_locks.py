"""A lock on a name has one holder among threads, tasks, event loops and processes."""

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
from tests.storage.test_storage import open_notes

PATIENCE_S = 30.0  # a deadlock fails the test instead of stopping it
LATER_S = 0.02  # long enough for what others would do in the wrong moment


def open_database(place: Place) -> SQLiteDatabase:
    """Open a database without tables at a place."""
    if not place.dsn:
        return open_notes(place.path)
    schema = Schema("notes", "")
    postgres: Any = PostgresDatabase(
        place.dsn, schema, schema=postgres_server.schema_name(place.path)
    )
    postgres.connect()
    return cast(SQLiteDatabase, postgres)


@pytest.fixture(params=["file", ":memory:", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SQLiteDatabase]:
    name = request.param
    with closing(
        open_notes(name) if name == ":memory:" else open_database(places(tmp_path)[name]())
    ) as notes:
        yield notes


class ExclusiveRoom:
    """A room for one visitor at a time, which records the order of the visitors."""

    def __init__(self) -> None:
        self.inside = 0
        self.was_shared = False
        self.order: list[Any] = []

    def enter(self, visitor: Any) -> None:
        self.inside += 1
        self.was_shared |= self.inside > 1
        self.order.append(visitor)

    def leave(self) -> None:
        self.inside -= 1


async def enter_async(database: SQLiteDatabase, room: ExclusiveRoom, visitor: Any) -> None:
    async with database.lock("t", timeout_s=PATIENCE_S):
        room.enter(visitor)
        await asyncio.sleep(0.001)
        room.leave()


def enter_blocking(database: SQLiteDatabase, room: ExclusiveRoom, visitor: Any) -> None:
    with database.lock("t", timeout_s=PATIENCE_S):
        room.enter(visitor)
        threading.Event().wait(0.001)
        room.leave()


def test_lock_excludes_threads_and_tasks_of_two_event_loops(database: SQLiteDatabase) -> None:
    """Each of the two event loops runs in a thread of its own."""
    room = ExclusiveRoom()

    def run_loop(name: str) -> None:
        async def run_tasks() -> None:
            await asyncio.gather(*(enter_async(database, room, (name, n)) for n in range(20)))

        asyncio.run(run_tasks())

    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(run_loop, name) for name in "ab"]
        futures += [pool.submit(enter_blocking, database, room, n) for n in range(20)]
        for future in futures:
            future.result(PATIENCE_S)

    assert not room.was_shared
    assert len(set(room.order)) == 60


def test_waiting_tasks_and_threads_get_the_lock_in_order(database: SQLiteDatabase) -> None:
    """The order is that of the calls."""
    room = ExclusiveRoom()

    async def start_waiting_in_order() -> None:
        async with database.lock("t"):
            waiting: list[Any] = []
            for n in range(6):
                await wait_until_queued(database, n + 1)
                if n % 2:
                    waiting.append(
                        asyncio.create_task(enter_async(database, room, n), context=make_context())
                    )
                else:
                    waiting.append(start_thread(lambda n=n: enter_blocking(database, room, n)))  # type: ignore[misc]
            await wait_until_queued(database, 7)
        for task_or_thread in waiting:
            await (
                task_or_thread
                if isinstance(task_or_thread, asyncio.Task)
                else asyncio.to_thread(task_or_thread.join)
            )

    asyncio.run(start_waiting_in_order())

    assert list(range(6)) == room.order


async def wait_until_queued(database: SQLiteDatabase, count: int) -> None:
    """Wait until `count` runs hold the lock or wait for it."""
    resource: Any = database if isinstance(database, PostgresDatabase) else database._resource
    locks = getattr(resource, "locks", None) or resource._locks
    async with asyncio.timeout(PATIENCE_S):
        while len(locks._queues._queues["t"]) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def make_context() -> contextvars.Context:
    """Return an empty context, as another run would have."""
    return contextvars.Context()


def start_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=make_context().run, args=(work,))
    thread.start()
    return thread


def test_locks_with_other_names_do_not_wait(database: SQLiteDatabase) -> None:
    """One run may hold several locks."""
    with database.lock("a", timeout_s=0), database.lock("b", timeout_s=0):
        start_thread(lambda: acquire_and_release(database, "c")).join(PATIENCE_S)


def acquire_and_release(database: SQLiteDatabase, name: str, timeout_s: float = PATIENCE_S) -> None:
    with database.lock(name, timeout_s=timeout_s):
        pass


def test_timeout_error_names_the_lock_and_the_time(database: SQLiteDatabase) -> None:
    """The lock is free again when its holder releases it."""
    messages: list[str] = []

    def time_out_blocking() -> None:
        with pytest.raises(StorageUnavailable) as error:
            acquire_and_release(database, "t", timeout_s=0.01)
        messages.append(str(error.value))

    async def time_out_async() -> None:
        with pytest.raises(StorageUnavailable) as error:
            async with database.lock("t", timeout_s=0.01):
                pass
        messages.append(str(error.value))

    with database.lock("t"):
        start_thread(time_out_blocking).join(PATIENCE_S)
        start_thread(lambda: asyncio.run(time_out_async())).join(PATIENCE_S)
    acquire_and_release(database, "t", timeout_s=0)

    assert len(messages) == 2
    assert all("'t'" in text and "0.01 s" in text for text in messages)


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_acquiring_a_lock_twice_in_one_run_is_refused(
    database: SQLiteDatabase, timeout_s: float | None
) -> None:
    """This includes tasks and threads that the run has started. After the release, the lock can be
    acquired again.
    """

    async def acquire_again() -> None:
        with pytest.raises(AlreadyLocked, match="'t' is already locked by this run"):
            async with database.lock("t", timeout_s=timeout_s):
                pass

    def acquire_again_in_thread() -> None:
        with pytest.raises(AlreadyLocked):
            acquire_and_release(database, "t")

    async def acquire_when_free(free: asyncio.Event) -> None:
        await free.wait()
        async with database.lock("t", timeout_s=PATIENCE_S):
            pass

    async def run_calls() -> None:
        free = asyncio.Event()
        async with database.lock("t"):
            await acquire_again()
            await asyncio.create_task(acquire_again())
            await asyncio.to_thread(acquire_again_in_thread)
            task = asyncio.create_task(acquire_when_free(free))
        free.set()
        await task
        async with database.lock("t", timeout_s=0):
            pass

    asyncio.run(run_calls())


def test_cancelled_task_leaves_the_queue_or_releases_the_lock(database: SQLiteDatabase) -> None:
    """The next task in the queue gets the lock."""

    async def cancel_tasks() -> list[str]:
        entered: asyncio.Queue[str] = asyncio.Queue()

        async def hold(name: str) -> None:
            async with database.lock("t", timeout_s=PATIENCE_S):
                entered.put_nowait(name)
                await asyncio.sleep(PATIENCE_S)

        holder = asyncio.create_task(hold("holds"))
        order = [await entered.get()]
        waiter, next_waiter = (asyncio.create_task(hold(name)) for name in ("waits", "after"))
        await wait_until_queued(database, 3)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        holder.cancel()
        order.append(await entered.get())
        next_waiter.cancel()
        async with database.lock("t", timeout_s=PATIENCE_S):
            return order

    assert asyncio.run(cancel_tasks()) == ["holds", "after"]


def test_task_cancelled_as_it_gets_the_lock_passes_it_on(database: SQLiteDatabase) -> None:
    """Another call gets the lock."""

    async def release_and_cancel() -> None:
        lock = database.lock("t")
        await lock.__aenter__()
        waiter = asyncio.create_task(
            enter_async(database, ExclusiveRoom(), 1), context=make_context()
        )
        await wait_until_queued(database, 2)
        await lock.__aexit__()
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        async with database.lock("t", timeout_s=PATIENCE_S):
            pass

    asyncio.run(release_and_cancel())


@pytest.mark.parametrize("is_next", [False, True])
def test_waiting_task_of_a_closed_event_loop_is_skipped(
    database: SQLiteDatabase, is_next: bool
) -> None:
    """The event loop is closed before or after its task was chosen as the next holder."""
    loop = asyncio.new_event_loop()
    with database.lock("t"):
        task = loop.create_task(enter_async(database, ExclusiveRoom(), 1), context=make_context())
        loop.run_until_complete(asyncio.sleep(LATER_S))
        if not is_next:
            loop.close()
    loop.close()
    acquire_and_release(database, "t", timeout_s=PATIENCE_S)

    assert not task.done()


def test_run_may_hold_two_names_that_share_a_lock_byte(tmp_path: Path) -> None:
    """Another process can acquire neither name until both are released."""
    own_locks = Locks(FileLocks(str(tmp_path / "x"), offset=lambda name: 7))
    acquired = [own_locks.acquire(name, 0) for name in "ab"]
    code = f"""
from perdure.storage.locks import FileLocks, Locks, file_lock
from perdure.errors import StorageUnavailable
locks = Locks(FileLocks({str(tmp_path / "x")!r}, offset=lambda name: 7))
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
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        answers = []
        for lock in (*acquired, None):
            print("look", file=process.stdin, flush=True)
            answers.append(process.stdout.readline().strip())
            if lock is not None:
                own_locks.release(lock)
        print(file=process.stdin, flush=True)
    own_locks.close()

    assert answers == ["False", "False", "True"]


@pytest.mark.parametrize("arguments", [{"name": 1}, {"name": "t", "timeout_s": -1}])
def test_lock_refuses_wrong_arguments(database: SQLiteDatabase, arguments: dict[str, Any]) -> None:
    """The arguments are a name that is not a string, and a negative time."""
    with pytest.raises(ConfigurationError):
        database.lock(**arguments)


def test_lock_of_a_read_only_database_is_refused(tmp_path: Path) -> None:
    """A read-only database may be in a folder in which nothing can be written."""
    open_notes(tmp_path / "x.db").close()
    with (
        closing(open_notes(tmp_path / "x.db", read_only=True)) as database,
        pytest.raises(StorageError, match="read-only"),
        database.lock("t"),
    ):
        pass


def test_lock_of_a_closed_database_is_refused(database: SQLiteDatabase) -> None:
    """Releasing a lock after the database was closed is not an error."""
    with database.lock("t"):
        database.close()
    with pytest.raises(StorageUnavailable, match="is closed"), database.lock("t"):
        pass


# -- processes


def increment_total(place: Place, pipe: Connection, number: int) -> None:
    """Increment a number in a file ten times, each time under the lock."""
    database = open_database(place)
    pipe.send("ready")
    pipe.recv()
    total = place.path.with_suffix(".total")

    async def increment_once() -> None:
        async with database.lock("t", timeout_s=60):
            count = int(total.read_text())
            await asyncio.sleep(0.001)
            total.write_text(str(count + 1))

    for turn in range(10):
        if turn % 2:
            asyncio.run(increment_once())
            continue
        with database.lock("t", timeout_s=60):
            total.write_text(str(int(total.read_text()) + 1))
    database.close()
    pipe.send("done")


def test_lock_excludes_eight_processes(place: Place) -> None:
    """Eight processes increment a number, and no increment is lost."""
    place.path.with_suffix(".total").write_text("0")
    open_database(place).close()
    run_in_processes(8, increment_total, place)

    assert place.path.with_suffix(".total").read_text() == "80"


def hold_forever(place: Place, pipe: Connection) -> None:
    database = open_database(place)
    with database.lock("t"):
        pipe.send("holds")
        threading.Event().wait()


def test_lock_of_a_killed_process_is_released(place: Place) -> None:
    """A thread that was waiting already gets the lock."""
    context = forkserver_context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=hold_forever, args=(place, theirs), daemon=True)
    process.start()
    with closing(open_database(place)) as database:
        assert ours.recv() == "holds"
        with pytest.raises(StorageUnavailable):
            acquire_and_release(database, "t", timeout_s=0.05)
        waiting_thread = start_thread(lambda: acquire_and_release(database, "t"))
        waiting_thread.join(LATER_S)
        was_waiting = waiting_thread.is_alive()
        process.kill()
        process.join()
        waiting_thread.join(PATIENCE_S)

        assert was_waiting
        assert not waiting_thread.is_alive()


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_child_does_not_hold_its_parents_lock(place: Place) -> None:
    """The child waits for the lock like any other process. Leaving the block in the child does not
    release the lock.
    """
    database = open_database(place)
    lock = database.lock("t")
    lock.__enter__()
    child = os.fork()
    if child == 0:
        try:
            reopened = open_database(place)
            with pytest.raises(StorageUnavailable):
                acquire_and_release(reopened, "t", timeout_s=0.05)
            lock.__exit__()
            with pytest.raises(StorageUnavailable):
                acquire_and_release(reopened, "t", timeout_s=0.05)
            reopened.close()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    context = forkserver_context()
    process = context.Process(target=exit_if_locked, args=(place,), daemon=True)
    process.start()
    process.join(60)
    lock.__exit__()
    database.close()

    assert os.waitstatus_to_exitcode(status) == 0
    assert process.exitcode == 7


def exit_if_locked(place: Place) -> None:
    """Exit with 7 if the lock is not free."""
    try:
        acquire_and_release(open_database(place), "t", timeout_s=0.05)
    except StorageUnavailable:
        sys.exit(7)


def test_file_lock_of_a_killed_process_is_released(tmp_path: Path) -> None:
    """Before the kill, another process times out."""
    path = str(tmp_path / "x.lock")
    code = f"""
from perdure.storage.locks import file_lock
with file_lock({path!r}, 0, {path!r}):
    print("mine", flush=True)
    input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        output = process.stdout.readline()
        with pytest.raises(TimeoutError), file_lock(path, LATER_S, path):
            pass
        process.kill()
        with file_lock(path, PATIENCE_S, path):
            pass

    assert output == "mine\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_does_not_hold_its_parents_file_lock(tmp_path: Path) -> None:
    """The parent's release frees the lock although the child still lives."""
    path = str(tmp_path / "x.lock")
    reading, writing = os.pipe()
    with file_lock(path, 0, path):
        child = os.fork()
        if not child:
            os.close(writing)
            os.read(reading, 1)  # until the parent has looked
            os._exit(0)
    with file_lock(path, PATIENCE_S, path):
        os.write(writing, b".")
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
