"""Closing, forking, failing and shrinking at an unlucky moment."""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.base import empty_checkpoint

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import PerdureError, StorageUnavailable
from tests.contracts.puts import config_at, put
from tests.durability.test_faults import FAULTS, config_of, template  # noqa: F401
from tests.rounds import rounds
from tests.storage.test_storage import add, numbers, opened

T: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")


def test_a_failed_read_leaves_the_reader_usable(template: Path, tmp_path: Path) -> None:  # noqa: F811
    """Whichever call of a read fails, the error is perdure's and the next read succeeds."""
    path = tmp_path / "x.db"
    shutil.copy(template, path)
    told: list[Any] = []
    wanted: list[Any] = []
    for make, expected, _ in FAULTS.values():
        fault = make()
        with SQLiteCheckpointer.open(path, factory=fault.factory()) as saver:
            fresh = saver.get_tuple(config_of(5))
            for call in itertools.count(1):
                fault.arm(call)
                try:
                    saver.get_tuple(config_of(5))
                except PerdureError as error:
                    told.append((type(error), error.__cause__))
                    wanted.append((expected, fault.error))
                if not fault.fired:
                    break
                fault.disarm()
                assert fresh == saver.get_tuple(config_of(5))

    assert told
    assert wanted == told


@pytest.mark.repeats
def test_close_while_threads_read(tmp_path: Path) -> None:
    """Threads that read while the database is closed are told, and the process survives."""
    code = f"""
import threading, time
from perdure.checkpointers import SQLiteCheckpointer
from langgraph.checkpoint.base import empty_checkpoint
from perdure.errors import StorageUnavailable
for n in range({rounds(30)}):
    saver = SQLiteCheckpointer.open({str(tmp_path)!r} + f"/{{n}}.db")
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"] = {{"a": [str(i) * 400 for i in range(3000)]}}
    saver.put({T!r}, checkpoint, {{}}, {{"a": 1}})
    def read():
        try:
            while True:
                list(saver.list(None))
                saver._cache.drop_thread("t")
        except StorageUnavailable:
            pass
    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads: thread.start()
    time.sleep(0.05)
    saver.close()
    for thread in threads: thread.join()
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True)

    assert (done.returncode, done.stderr) == (0, b"")


def within(seconds: float, work: Any) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive()


def test_shrink_ends_where_the_file_cannot_be_vacuumed(tmp_path: Path) -> None:
    """An empty database that was made without auto_vacuum (by the sqlite3 shell, say)."""
    conn = sqlite3.connect(tmp_path / "x.db")
    conn.execute("PRAGMA journal_mode = WAL")  # writes page 1: auto_vacuum can no longer be set
    conn.execute("CREATE TABLE x (y)")
    conn.execute("DROP TABLE x")
    conn.close()
    saver = SQLiteCheckpointer.open(tmp_path / "x.db")
    for n in range(50):
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"] = {"a": f"{n}" * 5000}
        saver.put({"configurable": {"thread_id": str(n)}}, checkpoint, {}, {"a": 1})
    within(20, lambda: saver.prune([str(n) for n in range(50)], strategy="delete"))


class NoVacuum(sqlite3.Connection):
    def executescript(self, script: str) -> sqlite3.Cursor:
        if "incremental_vacuum" in script:
            raise sqlite3.OperationalError("disk I/O error")
        return super().executescript(script)


def test_shrink_ends_where_a_vacuum_fails(tmp_path: Path) -> None:
    """A vacuum that fails each time (a full disk, say) does not keep delete_thread for good."""
    saver = SQLiteCheckpointer.open(tmp_path / "x.db", factory=NoVacuum)
    saver.put(T, empty_checkpoint(), {}, {})
    within(20, lambda: saver.delete_thread("t"))


def child_of(work: Any) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            faulthandler.dump_traceback()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@POSIX
def test_awaiting_in_a_forked_child(tmp_path: Path) -> None:
    """In the child in_thread (hence every aget_tuple) raises instead of waiting for ever."""
    database = opened(tmp_path / "x.db")

    async def look() -> int:
        return await asyncio.wait_for(database.run_in_thread(lambda: 1), 5)

    def refused() -> None:
        with pytest.raises(StorageUnavailable):
            asyncio.run(look())

    asyncio.run(look())
    status = child_of(refused)
    database.close()

    assert status == 0


@POSIX
def test_closing_in_a_forked_child(tmp_path: Path) -> None:
    """In a forked child close() is no error."""
    database = opened(tmp_path / "x.db")
    database.write(partial(add, 1))
    status = child_of(database.close)
    database.write(partial(add, 2))
    stored = database.read(numbers)
    database.close()

    assert status == 0
    assert stored == [1, 2]


@POSIX
def test_a_fork_while_another_thread_hands_work_in(tmp_path: Path) -> None:
    """The child inherits the gate closed; there every call refuses, or closes, all the same."""
    database = opened(tmp_path / "x.db")

    async def look() -> int:
        return await asyncio.wait_for(database.run_in_thread(lambda: 1), 5)

    def refused() -> None:
        faulthandler.dump_traceback_later(20, exit=True)
        with pytest.raises(StorageUnavailable):
            database.write(partial(add, 1))
        with pytest.raises(StorageUnavailable):
            asyncio.run(look())
        database.close()

    assert database._resource is not None
    with database._resource.submit_lock:
        status = child_of(refused)
    database.close()

    assert status == 0


def test_reading_leaves_a_file_as_it_was(tmp_path: Path) -> None:
    """A database that was only read is as it was; beside it is at most what SQLite puts there."""
    path = tmp_path / "x.db"
    opened(path).close()
    (tmp_path / "x.db.lock").unlink(missing_ok=True)
    before = path.read_bytes()
    reading = opened(path, read_only=True)
    reading.read(numbers)
    reading.close()

    assert before == path.read_bytes()
    assert {p.name for p in tmp_path.iterdir()} <= {"x.db", "x.db-wal", "x.db-shm"}


@pytest.mark.parametrize("mishap", ["replaced", "moved", "deleted"])
def test_a_file_that_is_not_there_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mishap: str
) -> None:
    """A write would go where nobody reads it: it is refused, and says what to do."""
    monkeypatch.setattr("perdure.storage.sqlite_writer.FILE_CHECK_INTERVAL_S", 0.0)
    path, other = tmp_path / "x.db", tmp_path / "other.db"
    shutil.copy(_made(tmp_path / "made.db"), other)
    with SQLiteCheckpointer.open(path) as saver:
        put(saver, {"n": 1}, uid="one")
        if mishap == "replaced":
            os.replace(other, path)
        elif mishap == "moved":
            os.replace(path, tmp_path / "moved.db")
        else:
            path.unlink()
        with pytest.raises(StorageUnavailable, match=r"moved, deleted or replaced.*open it again"):
            put(saver, {"n": 2}, config_at(uid="one"), uid="two")
        with pytest.raises(StorageUnavailable, match="moved, deleted or replaced"):
            saver.put_writes(config_at(uid="one"), [("n", 3)], "task")


def _made(path: Path) -> Path:
    SQLiteCheckpointer.open(path).close()
    return path
