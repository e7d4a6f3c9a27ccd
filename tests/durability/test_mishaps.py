"""Closing, forking, failing reads and vacuuming at unfavourable moments."""

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
from tests.durability.test_faults import FAULTS, make_config, template  # noqa: F401
from tests.rounds import rounds
from tests.storage.test_storage import insert_note, open_notes, read_numbers

T: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")


def test_next_read_succeeds_after_a_failed_read(template: Path, tmp_path: Path) -> None:  # noqa: F811
    """Any database call of the read may fail, and the error is one of perdure's."""
    path = tmp_path / "x.db"
    shutil.copy(template, path)
    errors: list[Any] = []
    expected_errors: list[Any] = []
    for make, expected, _ in FAULTS.values():
        fault = make()
        with SQLiteCheckpointer.open(path, factory=fault.connection_class()) as saver:
            fresh = saver.get_tuple(make_config(5))
            for call in itertools.count(1):
                fault.arm(call)
                try:
                    saver.get_tuple(make_config(5))
                except PerdureError as error:
                    errors.append((type(error), error.__cause__))
                    expected_errors.append((expected, fault.error))
                if not fault.fired:
                    break
                fault.disarm()
                assert fresh == saver.get_tuple(make_config(5))

    assert errors
    assert expected_errors == errors


@pytest.mark.repeats
def test_threads_that_read_during_close_get_an_error(tmp_path: Path) -> None:
    """The process does not crash."""
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


def assert_ends_within(seconds: float, work: Any) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive()


def test_prune_ends_if_the_file_cannot_be_vacuumed(tmp_path: Path) -> None:
    """The sqlite3 shell, for example, creates databases without auto_vacuum."""
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
    assert_ends_within(20, lambda: saver.prune([str(n) for n in range(50)], strategy="delete"))


class FailingVacuum(sqlite3.Connection):
    def executescript(self, script: str) -> sqlite3.Cursor:
        if "incremental_vacuum" in script:
            raise sqlite3.OperationalError("disk I/O error")
        return super().executescript(script)


def test_delete_thread_ends_if_every_vacuum_fails(tmp_path: Path) -> None:
    """A vacuum may fail each time, for example on a full disk."""
    saver = SQLiteCheckpointer.open(tmp_path / "x.db", factory=FailingVacuum)
    saver.put(T, empty_checkpoint(), {}, {})
    assert_ends_within(20, lambda: saver.delete_thread("t"))


def fork_and_run(work: Any) -> int:
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
def test_async_call_in_forked_child_raises_instead_of_hanging(tmp_path: Path) -> None:
    """Every async method runs its work in a thread, and the child has none."""
    database = open_notes(tmp_path / "x.db")

    async def run_in_thread() -> int:
        return await asyncio.wait_for(database.run_in_thread(lambda: 1), 5)

    def check_refusal() -> None:
        with pytest.raises(StorageUnavailable):
            asyncio.run(run_in_thread())

    asyncio.run(run_in_thread())
    status = fork_and_run(check_refusal)
    database.close()

    assert status == 0


@POSIX
def test_close_in_forked_child_does_not_affect_parent(tmp_path: Path) -> None:
    """The call is not an error in the child either."""
    database = open_notes(tmp_path / "x.db")
    database.write(partial(insert_note, 1))
    status = fork_and_run(database.close)
    database.write(partial(insert_note, 2))
    stored = database.read(read_numbers)
    database.close()

    assert status == 0
    assert stored == [1, 2]


@POSIX
def test_calls_in_child_forked_during_a_submit_are_refused(tmp_path: Path) -> None:
    """The child inherits a locked submit lock. Every call raises, and close succeeds."""
    database = open_notes(tmp_path / "x.db")

    async def run_in_thread() -> int:
        return await asyncio.wait_for(database.run_in_thread(lambda: 1), 5)

    def check_refusals() -> None:
        faulthandler.dump_traceback_later(20, exit=True)
        with pytest.raises(StorageUnavailable):
            database.write(partial(insert_note, 1))
        with pytest.raises(StorageUnavailable):
            asyncio.run(run_in_thread())
        database.close()

    assert database._resource is not None
    with database._resource.submit_lock:
        status = fork_and_run(check_refusals)
    database.close()

    assert status == 0


def test_read_only_use_does_not_change_the_file(tmp_path: Path) -> None:
    """Only the files that SQLite itself creates may appear beside the database."""
    path = tmp_path / "x.db"
    open_notes(path).close()
    (tmp_path / "x.db.lock").unlink(missing_ok=True)
    before = path.read_bytes()
    reading = open_notes(path, read_only=True)
    reading.read(read_numbers)
    reading.close()

    assert before == path.read_bytes()
    assert {p.name for p in tmp_path.iterdir()} <= {"x.db", "x.db-wal", "x.db-shm"}


@pytest.mark.parametrize("mishap", ["replaced", "moved", "deleted"])
def test_write_to_moved_deleted_or_replaced_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mishap: str
) -> None:
    """The error says that the database must be opened again."""
    monkeypatch.setattr("perdure.storage.sqlite_writer.FILE_CHECK_INTERVAL_S", 0.0)
    path, other_path = tmp_path / "x.db", tmp_path / "other.db"
    shutil.copy(create_database(tmp_path / "made.db"), other_path)
    with SQLiteCheckpointer.open(path) as saver:
        put(saver, {"n": 1}, uid="one")
        if mishap == "replaced":
            os.replace(other_path, path)
        elif mishap == "moved":
            os.replace(path, tmp_path / "moved.db")
        else:
            path.unlink()
        with pytest.raises(StorageUnavailable, match=r"moved, deleted or replaced.*open it again"):
            put(saver, {"n": 2}, config_at(uid="one"), uid="two")
        with pytest.raises(StorageUnavailable, match="moved, deleted or replaced"):
            saver.put_writes(config_at(uid="one"), [("n", 3)], "task")


def create_database(path: Path) -> Path:
    SQLiteCheckpointer.open(path).close()
    return path
