"""A full disk: puts fail with a clear error, and removals work, so the disk can be emptied."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.base import empty_checkpoint

from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.errors import StorageFull
from perdure.storage import sqlite_connection, sqlite_writer
from perdure.storage.database import Database
from perdure.storage.flow import Flow, Row
from perdure.storage.sqlite_connection import RESERVE_BYTES
from perdure.stores import SQLiteStore, VersionRetention
from tests.durability.processes import run_and_kill, run_integrity_check
from tests.rounds import rounds

DISK_BYTES = 9 << 20  # bytes of the disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a small disk, and yield its folder."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux can mount a small disk")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def read_free_bytes(disk: Path) -> int:
    stats = os.statvfs(disk)
    return stats.f_bavail * stats.f_frsize


def write_nothing(database: Database) -> None:
    """Commit an empty transaction.

    The writing thread executes the transaction after it has finished all earlier work. If it has
    not checked the file for a second, it completes the reserve.
    """

    def flow() -> Flow[None]:
        yield from ()

    database.write(flow)


def wait_for_reserve(disk: Path, database: Database | None) -> bool:
    """Wait until the reserve is complete, and return whether it is.

    The writing thread of an open database creates it again after a checkpoint has used it.
    """
    reserve, until = disk / "x.db-reserve", time.monotonic() + 5
    while time.monotonic() < until and (disk / "x.db").exists():
        if database is not None:
            write_nothing(database)
        if reserve.exists() and reserve.stat().st_size == RESERVE_BYTES:
            return True
        time.sleep(0.05)
    return False


def fill_disk(disk: Path, database: Database | None = None) -> None:
    """Use up all free space except the space of the reserve, as another program would.

    While the writing thread shrinks the file after a removal, it releases the reserve for a moment.
    If the disk was filled at this moment, the space of the reserve is freed and filled again.

    Args:
        disk: The folder of the disk.
        database: The database, or None if it is closed.
    """
    filler = disk / "filler"
    for _ in range(5):
        wait_for_reserve(disk, database)
        with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        if database is None:
            return
        write_nothing(database)
        reserve = disk / "x.db-reserve"
        missing_bytes = RESERVE_BYTES - (reserve.stat().st_size if reserve.exists() else 0)
        if not missing_bytes:
            return
        os.truncate(filler, max(0, filler.stat().st_size - missing_bytes))
    raise AssertionError(f"{missing_bytes} bytes of the reserve are missing")


def put_checkpoint(saver: Any, thread: str, number: int, text: str = "said ") -> None:
    checkpoint = empty_checkpoint()
    messages = [HumanMessage(f"{number}-{i} {text * 300}", id=f"{number}-{i}") for i in range(20)]
    checkpoint["channel_values"] = {"messages": messages}
    config: Any = {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}
    saver.put(config, checkpoint, {"step": number, "run_id": thread}, {"messages": number})


def check_integrity(disk: Path) -> list[Row]:
    (disk / "filler").unlink()
    with SQLiteCheckpointer.open(disk / "x.db") as saver:
        return saver.database.read(run_integrity_check)


def put_until_full(saver: Any) -> list[str]:
    """Put threads of ten checkpoints until the disk is full. The last thread may have fewer."""
    threads: list[str] = []
    with pytest.raises(StorageFull, match="free disk space and retry"):  # noqa: PT012 - until the disk is full
        for number in itertools.count(1):
            if number % 10 == 1:
                threads.append(f"t{number:05}")
            put_checkpoint(saver, threads[-1], number)
    return threads


REMOVALS = {
    "delete_thread": lambda saver, thread: saver.delete_thread(thread),
    "erase": lambda saver, thread: saver.erase(thread),
    "prune": lambda saver, thread: saver.prune([thread]),
    "retain": lambda saver, thread: saver.retain(
        Retention(last=1, history=False), thread_ids=[thread]
    ),
    "delete_for_runs": lambda saver, thread: saver.delete_for_runs([thread]),
}


@pytest.mark.parametrize("reuses_wal", [False, True])
@pytest.mark.parametrize("removal", REMOVALS)
def test_removal_of_thread_from_full_disk_makes_room(
    disk: Path, monkeypatch: pytest.MonkeyPatch, removal: str, reuses_wal: bool
) -> None:
    """Other threads and the reserve stay, and puts work again."""
    monkeypatch.setattr(sqlite_connection, "REUSES_WAL", reuses_wal)
    with SQLiteCheckpointer.open(disk / "x.db") as saver:
        threads = put_until_full(saver)
        fill_disk(disk, saver.database)
        free_bytes = read_free_bytes(disk)
        for _ in range(20):
            with pytest.raises(StorageFull):
                put_checkpoint(saver, "another", 1, "so much " * 100)
        REMOVALS[removal](saver, threads[0])
        put_checkpoint(saver, "another", 2)
        remaining = {i.thread_id: i.checkpoints for i in saver.threads()}
    sizes = {path.name: path.stat().st_size for path in disk.iterdir()}

    assert free_bytes == 0
    assert remaining.pop("another") == 1
    assert remaining.pop(threads[0], 0) <= 1
    assert dict.fromkeys(threads[1:-1], 10).items() <= remaining.items()
    assert sizes["x.db-reserve"] == RESERVE_BYTES
    assert check_integrity(disk) == [("ok",)]


@pytest.mark.parametrize("check_interval_s", [0.0, sqlite_writer.FILE_CHECK_INTERVAL_S])
def test_removal_of_items_from_full_disk_makes_room(
    disk: Path, monkeypatch: pytest.MonkeyPatch, check_interval_s: float
) -> None:
    """The store's `forget`, `delete` and `retain` work on a full disk.

    The regular check of the file must not create the reserve again while a removal uses its space.
    """
    monkeypatch.setattr(sqlite_writer, "FILE_CHECK_INTERVAL_S", check_interval_s)
    with SQLiteStore.open(disk / "x.db") as store:
        with pytest.raises(StorageFull, match="free disk space and retry"):  # noqa: PT012 - until the disk is full
            for number in itertools.count():
                for version in range(3):
                    store.put(
                        ("all", str(number // 50)), str(number), {"text": f"{version} " * 900}
                    )
        fill_disk(disk, store.database)
        free_bytes = read_free_bytes(disk)
        receipt = store.forget(("all", "0"))
        store.put(("all", "new"), "1", {"text": "room again"})
        fill_disk(disk, store.database)
        versions = store.retain(VersionRetention(last=1), prefix=("all", "1"))
        fill_disk(disk, store.database)
        store.delete(("all", "2"), "100")
        kept_item = store.get(("all", "1"), "50")
        forgotten, deleted = store.get(("all", "0"), "1"), store.get(("all", "2"), "100")

    assert free_bytes == 0
    assert receipt.items == 50
    assert versions == 50
    assert kept_item is not None
    assert kept_item.value == {"text": "2 " * 900}
    assert (forgotten, deleted) == (None, None)
    assert check_integrity(disk) == [("ok",)]


def test_database_can_be_opened_and_emptied_on_full_disk(disk: Path) -> None:
    """SQLite may have no room for the files that it creates beside the database."""
    path = disk / "x.db"
    with SQLiteCheckpointer.open(path) as saver:
        threads = put_until_full(saver)
    fill_disk(disk)
    with SQLiteCheckpointer.open(path) as saver:
        before = [info.thread_id for info in saver.threads()]
        saver.delete_thread(threads[0])
        put_checkpoint(saver, "another", 1)
        after = [info.thread_id for info in saver.threads()]

    assert sorted(threads) == sorted(before)
    assert sorted([*threads[1:], "another"]) == sorted(after)
    assert check_integrity(disk) == [("ok",)]


@pytest.mark.slow
def test_delete_command_works_on_full_disk(disk: Path) -> None:
    """The command says what remains to be done once the disk has room."""
    path = disk / "x.db"
    with SQLiteCheckpointer.open(path) as saver:
        threads = put_until_full(saver)
    fill_disk(disk)
    main = "from perdure.cli import main; main()"
    command = [sys.executable, "-c", main, "delete", "--yes", "--db", str(path), threads[0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    with SQLiteCheckpointer.open(path) as saver:
        remaining = {info.thread_id for info in saver.threads()}
        put_checkpoint(saver, "another", 1)

    assert done.returncode == 0
    assert "and the disk has room" in done.stderr
    assert {*threads[1:]} == remaining


def test_thread_deleted_on_full_disk_is_overwritten_when_there_is_room(disk: Path) -> None:
    """The bytes are gone after the database was opened with enough room for a copy."""
    path = disk / "x.db"
    with SQLiteCheckpointer.open(path) as saver:
        put_checkpoint(saver, "t1", 1, "secret")
        threads = put_until_full(saver)
        fill_disk(disk, saver.database)
        saver.delete_thread("t1")
        for thread in threads[10:]:
            saver.delete_thread(thread)
    (disk / "filler").unlink()
    SQLiteCheckpointer.open(path).close()

    assert b"secret" not in path.read_bytes()


def delete_threads_on_full_disk(path: Path, acks: Connection, threads: list[str]) -> None:
    """Delete threads, and fill the disk again after each of them."""
    acks.send("ready")
    with SQLiteCheckpointer.open(path) as saver:
        for thread in threads:
            saver.delete_thread(thread)
            acks.send(thread)
            fill_disk(path.parent, saver.database)


@pytest.mark.repeats
@pytest.mark.parametrize("seed", range(rounds(8)))
def test_kill_during_deletions_on_full_disk_loses_no_other_thread(disk: Path, seed: int) -> None:
    """Acknowledged deletions are done, and later deletions and puts work."""
    path = disk / "x.db"
    with SQLiteCheckpointer.open(path) as saver:
        *threads, _ = put_until_full(saver)
    fill_disk(disk)
    chance = random.Random(seed)
    deleted = run_and_kill(
        delete_threads_on_full_disk, (path, threads[:10]), chance, early_share=0.3, max_acks=6
    )
    with SQLiteCheckpointer.open(path) as saver:
        remaining = {i.thread_id: i.checkpoints for i in saver.threads() if i.thread_id in threads}
        saver.delete_thread(threads[-1])
        put_checkpoint(saver, "another", 1)
    undeleted = threads[len(deleted) :]

    assert threads[: len(deleted)] == deleted
    assert remaining in (dict.fromkeys(undeleted, 10), dict.fromkeys(undeleted[1:], 10))
    assert check_integrity(disk) == [("ok",)]


def test_disk_with_enough_room_has_no_reserve_file(tmp_path: Path) -> None:
    """A reserve file that was left behind is removed."""
    reserve = tmp_path / "x.db-reserve"
    reserve.write_bytes(b"left")
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        put_checkpoint(saver, "t", 1)
        names = {path.name for path in tmp_path.iterdir()}

    assert names <= {"x.db", "x.db-wal", "x.db-shm", "x.db.lock"}
