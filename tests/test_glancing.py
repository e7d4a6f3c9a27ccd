"""Small reads at once: bounded in every way, and right when a bound is passed."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import StorageUnavailable
from perdure.storage.flow import rows_of
from perdure.storage.glancing import LENGTH, Declined, Glancer
from perdure.stores import SQLiteStore

COUNTING = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {}) "


@pytest.fixture
def glancer(tmp_path: Path) -> Any:
    made = Glancer(
        lambda: sqlite3.connect(tmp_path / "a.db", isolation_level=None, check_same_thread=False)
    )
    yield made
    made.close()


def test_what_is_little_is_read(glancer: Glancer) -> None:
    """In the calling thread, with and without a snapshot."""
    for snapshot in (True, False):
        assert glancer.run(rows_of("SELECT ?", 7), snapshot=snapshot) == [(7,)]


@pytest.mark.parametrize(
    "statement",
    [
        COUNTING.format(10_000_000) + "SELECT sum(i) FROM n",
        f"SELECT zeroblob({LENGTH + 1})",
        "SELECT * FROM nothing",
    ],
)
@pytest.mark.parametrize("snapshot", [True, False])
def test_what_is_more_is_declined_and_the_next_is_read(
    glancer: Glancer, statement: str, snapshot: bool
) -> None:
    """Too many steps, too long a value, or an error, which the thread will tell."""
    with pytest.raises(Declined):
        glancer.run(rows_of(statement), snapshot=snapshot)
    assert glancer.run(rows_of("SELECT 1"), snapshot=snapshot) == [(1,)]


def test_after_a_slow_read_none_is_tried_for_a_while(
    glancer: Glancer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may be cold; a second later it is tried again."""
    now = [100.0]
    monkeypatch.setattr("perdure.storage.glancing.time.monotonic", lambda: now[0])

    def slow() -> Any:
        now[0] += 0.006
        return (yield from rows_of("SELECT 1"))

    assert glancer.run(slow(), snapshot=True) == [(1,)]
    with pytest.raises(Declined):
        glancer.run(rows_of("SELECT 1"), snapshot=True)
    now[0] += 1.1
    assert glancer.run(rows_of("SELECT 1"), snapshot=True) == [(1,)]


def test_two_threads_do_not_wait_for_each_other(glancer: Glancer) -> None:
    """The second is declined while the first reads."""
    reading, done = threading.Event(), threading.Event()

    def held() -> Any:
        reading.set()
        assert done.wait(30)
        return (yield from rows_of("SELECT 1"))

    thread = threading.Thread(target=lambda: glancer.run(held(), snapshot=True))
    thread.start()
    assert reading.wait(30)
    with pytest.raises(Declined):
        glancer.run(rows_of("SELECT 1"), snapshot=True)
    done.set()
    thread.join()


def test_a_locked_file_is_not_waited_for(tmp_path: Path) -> None:
    """Whoever has it to himself is waited for in a thread, if at all."""
    path = tmp_path / "a.db"
    owner = sqlite3.connect(path, isolation_level=None)
    owner.execute("CREATE TABLE t (x)")
    owner.execute("BEGIN EXCLUSIVE")
    glancer = Glancer(lambda: sqlite3.connect(path, isolation_level=None, timeout=30))
    start = time.monotonic()
    with pytest.raises(Declined):
        glancer.run(rows_of("SELECT * FROM t"), snapshot=False)
    assert time.monotonic() - start < 20  # not the 30 seconds that the connection came with
    owner.execute("ROLLBACK")
    owner.close()
    glancer.close()


def test_a_store_answers_the_same_beyond_the_bounds(tmp_path: Path) -> None:
    """Long values, long lists, and a store that was closed."""

    async def course() -> None:
        long = "x" * (LENGTH * 2)
        async with SQLiteStore.open(tmp_path / "a.db", index=None) as store:
            await store.aput(("a",), "short", {"text": "s"})
            await store.aput(("a",), "long", {"text": long})
            for n in range(3_000):
                store.put(("many", str(n)), "k", {"n": n})
            assert (await store.aget(("a",), "short")).value == {"text": "s"}  # type: ignore[union-attr]
            assert (await store.aget(("a",), "long")).value == {"text": long}  # type: ignore[union-attr]
            assert [i.key for i in await store.asearch(("a",))] == ["long", "short"]
            found = await store.asearch(("many",), filter={"n": 2_999}, limit=1)
            assert [item.value["n"] for item in found] == [2_999]
            assert len(await store.alist_namespaces(prefix=("many",), limit=5_000)) == 3_000
        with pytest.raises(StorageUnavailable):
            await store.aget(("a",), "short")

    asyncio.run(course())
