"""A disk without any room: puts fail clearly, removals work, and so it can be emptied."""

from __future__ import annotations

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
from perdure.storage import sqlite_connection
from perdure.storage.flow import Row
from perdure.storage.sqlite_connection import RESERVE_BYTES
from perdure.stores import SQLiteStore, VersionRetention
from tests.durability.processes import integrity, killed
from tests.rounds import rounds

SMALL = 9 << 20  # bytes of the disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that is a small disk."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux can mount a small disk")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def room(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def settle(disk: Path) -> None:
    """Wait until a checkpoint that used the reserve has made it again, in the writing thread."""
    reserve, until = disk / "x.db-reserve", time.monotonic() + 5
    while time.monotonic() < until and (disk / "x.db").exists():
        if reserve.exists() and reserve.stat().st_size == RESERVE_BYTES:
            return
        time.sleep(0.01)


def fill(disk: Path) -> None:
    """Take all room that is left, as another program does."""
    settle(disk)
    with (disk / "filler").open("ab", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                return


def put(saver: Any, thread: str, number: int, text: str = "said ") -> None:
    checkpoint = empty_checkpoint()
    said = [HumanMessage(f"{number}-{i} {text * 300}", id=f"{number}-{i}") for i in range(20)]
    checkpoint["channel_values"] = {"messages": said}
    config: Any = {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}
    saver.put(config, checkpoint, {"step": number, "run_id": thread}, {"messages": number})


def integrity_of(disk: Path) -> list[Row]:
    (disk / "filler").unlink()
    with SQLiteCheckpointer.open(disk / "x.db") as saver:
        return saver.database.read(integrity)


def put_until_full(saver: Any) -> list[str]:
    """Threads of ten checkpoints, all that the disk takes; the last may have fewer."""
    threads: list[str] = []
    with pytest.raises(StorageFull, match="free disk space and retry"):  # noqa: PT012 - until it is full
        for number in itertools.count(1):
            if number % 10 == 1:
                threads.append(f"t{number:05}")
            put(saver, threads[-1], number)
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
def test_a_thread_is_removed_from_a_full_disk(
    disk: Path, monkeypatch: pytest.MonkeyPatch, removal: str, reuses_wal: bool
) -> None:
    """A removal makes room, for puts too; what else was acknowledged stays, and the reserve."""
    monkeypatch.setattr(sqlite_connection, "REUSES_WAL", reuses_wal)
    with SQLiteCheckpointer.open(disk / "x.db") as saver:
        threads = put_until_full(saver)
        fill(disk)
        full = room(disk)
        for _ in range(20):
            with pytest.raises(StorageFull):
                put(saver, "another", 1, "so much " * 100)
        REMOVALS[removal](saver, threads[0])
        put(saver, "another", 2)
        left = {i.thread_id: i.checkpoints for i in saver.threads()}
    sizes = {path.name: path.stat().st_size for path in disk.iterdir()}

    assert full == 0
    assert left.pop("another") == 1
    assert left.pop(threads[0], 0) <= 1
    assert dict.fromkeys(threads[1:-1], 10).items() <= left.items()
    assert sizes["x.db-reserve"] == RESERVE_BYTES
    assert integrity_of(disk) == [("ok",)]


def test_items_are_removed_from_a_full_disk(disk: Path) -> None:
    """So do `forget`, `delete`, `sweep_ttl` and the retention of versions of a store."""
    with SQLiteStore.open(disk / "x.db") as store:
        with pytest.raises(StorageFull, match="free disk space and retry"):  # noqa: PT012 - until it is full
            for number in itertools.count():
                for version in range(3):
                    store.put(
                        ("all", str(number // 50)), str(number), {"text": f"{version} " * 900}
                    )
        fill(disk)
        full = room(disk)
        receipt = store.forget(("all", "0"))
        store.put(("all", "new"), "1", {"text": "room again"})
        fill(disk)
        versions = store.retain(VersionRetention(last=1), prefix=("all", "1"))
        fill(disk)
        store.delete(("all", "2"), "100")
        kept = store.get(("all", "1"), "50")
        forgotten, deleted = store.get(("all", "0"), "1"), store.get(("all", "2"), "100")

    assert full == 0
    assert receipt.items == 50
    assert versions == 50
    assert kept is not None
    assert kept.value == {"text": "2 " * 900}
    assert (forgotten, deleted) == (None, None)
    assert integrity_of(disk) == [("ok",)]


def test_a_database_is_opened_on_a_full_disk(disk: Path) -> None:
    """Also where SQLite has no room for its own files beside it; and then it can be emptied."""
    path = disk / "x.db"
    with SQLiteCheckpointer.open(path) as saver:
        threads = put_until_full(saver)
    fill(disk)
    with SQLiteCheckpointer.open(path) as saver:
        before = [info.thread_id for info in saver.threads()]
        saver.delete_thread(threads[0])
        put(saver, "another", 1)
        after = [info.thread_id for info in saver.threads()]

    assert sorted(threads) == sorted(before)
    assert sorted([*threads[1:], "another"]) == sorted(after)
    assert integrity_of(disk) == [("ok",)]


def test_the_command_deletes_on_a_full_disk(disk: Path) -> None:
    """`perdure delete` works, and says what is still to be done."""
    path = disk / "x.db"
    with SQLiteCheckpointer.open(path) as saver:
        threads = put_until_full(saver)
    fill(disk)
    main = "from perdure.cli import main; main()"
    command = [sys.executable, "-c", main, "delete", "--yes", "--db", str(path), threads[0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    with SQLiteCheckpointer.open(path) as saver:
        left = {info.thread_id for info in saver.threads()}
        put(saver, "another", 1)

    assert done.returncode == 0
    assert "and the disk has room" in done.stderr
    assert {*threads[1:]} == left


def test_what_a_full_disk_leaves_of_a_deleted_thread_is_overwritten_later(disk: Path) -> None:
    """Its bytes are gone once the database is opened where there is room for its copy."""
    path = disk / "x.db"
    with SQLiteCheckpointer.open(path) as saver:
        put(saver, "t1", 1, "secret")
        threads = put_until_full(saver)
        fill(disk)
        saver.delete_thread("t1")
        for thread in threads[10:]:
            saver.delete_thread(thread)
    (disk / "filler").unlink()
    SQLiteCheckpointer.open(path).close()

    assert b"secret" not in path.read_bytes()


def victim(path: Path, acks: Connection, threads: list[str]) -> None:
    """Delete threads, each when the disk is full again."""
    acks.send("ready")
    with SQLiteCheckpointer.open(path) as saver:
        for thread in threads:
            saver.delete_thread(thread)
            acks.send(thread)
            fill(path.parent)


@pytest.mark.repeats
@pytest.mark.parametrize("seed", range(rounds(8)))
def test_a_kill_while_a_full_disk_is_emptied_loses_nothing(disk: Path, seed: int) -> None:
    """What is acknowledged as deleted is gone, all but the one in work is there; it goes on."""
    path = disk / "x.db"
    with SQLiteCheckpointer.open(path) as saver:
        *threads, _ = put_until_full(saver)
    fill(disk)
    chance = random.Random(seed)
    deleted = killed(victim, (path, threads[:10]), chance, early=0.3, most=6)
    with SQLiteCheckpointer.open(path) as saver:
        left = {i.thread_id: i.checkpoints for i in saver.threads() if i.thread_id in threads}
        saver.delete_thread(threads[-1])
        put(saver, "another", 1)
    at_most = threads[len(deleted) :]

    assert threads[: len(deleted)] == deleted
    assert left in (dict.fromkeys(at_most, 10), dict.fromkeys(at_most[1:], 10))
    assert integrity_of(disk) == [("ok",)]


def test_no_reserve_on_a_disk_with_room(tmp_path: Path) -> None:
    """Where there is ample room there is no reserve, and one that was left is removed."""
    reserve = tmp_path / "x.db-reserve"
    reserve.write_bytes(b"left")
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        put(saver, "t", 1)
        names = {path.name for path in tmp_path.iterdir()}

    assert names <= {"x.db", "x.db-wal", "x.db-shm", "x.db.lock"}
