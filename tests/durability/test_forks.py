"""Forked processes that open a file again lose nothing that they acknowledge."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sqlite3
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import StorageUnavailable
from perdure.stores import SQLiteStore
from tests.rounds import rounds

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


def run_turn(saver: SQLiteCheckpointer, text: str, thread_id: str = "t") -> None:
    """Run one turn of a thread."""
    builder: Any = StateGraph(MessagesState)
    builder.add_node("say", lambda state: {"messages": [AIMessage("good day")]})
    builder.add_edge(START, "say")
    config = {"configurable": {"thread_id": thread_id}}
    builder.compile(checkpointer=saver).invoke({"messages": [("user", text)]}, config)


def read_user_texts(saver: SQLiteCheckpointer, thread_id: str = "t") -> list[Any]:
    """Return the texts of the user in a thread."""
    return [item.value.content for item in saver.history(thread_id)][0::2]


def fork_and_run(work: Callable[[], None]) -> int:
    """Fork, run `work` in the child, and return the child's process id."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(1)  # skip pytest's cleanup, which belongs to the parent
    raise AssertionError


def wait_for_exit_status(child: int) -> int:
    """Wait for a child, and return its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


ORPHAN = """
import os, sys
from perdure.checkpointers import SQLiteCheckpointer
from perdure.stores import SQLiteStore
from tests.durability.test_forks import run_turn

path = sys.argv[1]
saver, store = SQLiteCheckpointer.open(path), SQLiteStore.open(path, index=None)
run_turn(saver, "of the parent")
store.put(("a",), "parent", {})
if os.fork():
    {parent}
    os._exit(0)
saver, store = SQLiteCheckpointer.open(path), SQLiteStore.open(path, index=None)
run_turn(saver, "of the child")
print("forked", flush=True)
for line in sys.stdin:  # the parent has exited
    run_turn(saver, line.strip())
    store.put(("a",), line.strip(), {})
    print("acknowledged", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("parent", ["pass", "saver.close(); store.close()"])
@pytest.mark.slow
def test_child_that_outlives_its_parent_loses_no_write(parent: str, tmp_path: Path) -> None:
    """Another process that opens and closes the file does not remove the WAL of the child."""
    path = str(tmp_path / "x.db")
    command = [sys.executable, "-c", ORPHAN.replace("{parent}", parent), path]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "forked\n"
        process.wait(60)
        expected = ["of the parent", "of the child"]
        for text in ("first", "second"):
            with (
                SQLiteCheckpointer.open(path) as saver,
                SQLiteStore.open(path, index=None) as store,
            ):
                assert read_user_texts(saver) == expected
                store.put(("b",), text, {})
            process.stdin.write(f"{text}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "acknowledged\n"
            expected.append(text)
        process.stdin.close()
        assert process.stdout.read() == ""
    with SQLiteCheckpointer.open(path) as saver, SQLiteStore.open(path, index=None) as store:
        assert read_user_texts(saver) == expected
        keys = sorted(item.key for item in store.search(("a",)))
        assert keys == ["first", "parent", "second"]
    with closing(sqlite3.connect(path)) as conn:
        assert conn.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.repeats
def test_concurrent_writes_of_parent_and_forked_children_are_kept(tmp_path: Path) -> None:
    """Some children are forked while threads and an event loop of the parent read and write."""
    path, over = tmp_path / "x.db", threading.Event()
    count, turns = rounds(8), 4

    def run_child(number: int) -> None:
        with SQLiteCheckpointer.open(path) as own:
            for turn in range(turns):
                run_turn(own, str(turn), f"child {number}")
                run_turn(own, f"{number} {turn}")
            assert read_user_texts(own, f"child {number}") == [str(turn) for turn in range(turns)]

    def read_until_over() -> None:
        async def read() -> None:
            while not over.is_set():
                await saver.ahistory("parent")
                await saver.athreads()
                await asyncio.to_thread(saver.get_tuple, {"configurable": {"thread_id": "parent"}})

        asyncio.run(read())

    with SQLiteCheckpointer.open(path) as saver:
        run_turn(saver, "0", "parent")
        threads = [threading.Thread(target=read_until_over) for _ in range(2)]
        for thread in threads:
            thread.start()
        children = []
        for number in range(count):
            children.append(fork_and_run(lambda number=number: run_child(number)))  # type: ignore[misc]
            run_turn(saver, str(number + 1), "parent")
        statuses = [wait_for_exit_status(child) for child in children]
        over.set()
        for thread in threads:
            thread.join()

        assert statuses == [0] * count
        assert read_user_texts(saver, "parent") == [str(turn) for turn in range(count + 1)]
        for number in range(count):
            assert read_user_texts(saver, f"child {number}") == [str(turn) for turn in range(turns)]
        stored = {item.value.content for item in saver.history("t")} - {"good day"}
        assert stored == {f"{number} {turn}" for number in range(count) for turn in range(turns)}
    with closing(sqlite3.connect(path)) as conn:
        assert conn.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_forked_grandchild_that_reopens_the_file_can_write(tmp_path: Path) -> None:
    """The parent and the child write before and after the fork."""
    path = tmp_path / "x.db"

    def grandchild() -> None:
        with SQLiteCheckpointer.open(path) as own:
            run_turn(own, "third")

    def child() -> None:
        with SQLiteCheckpointer.open(path) as own:
            run_turn(own, "second")
            assert wait_for_exit_status(fork_and_run(grandchild)) == 0
            run_turn(own, "fourth")

    with SQLiteCheckpointer.open(path) as saver:
        run_turn(saver, "first")
        assert wait_for_exit_status(fork_and_run(child)) == 0
        run_turn(saver, "fifth")

        assert read_user_texts(saver) == ["first", "second", "third", "fourth", "fifth"]


def test_fork_during_a_read_prevents_child_from_opening_that_file(tmp_path: Path) -> None:
    """The child cannot close the inherited connection, but it can open other files."""
    path, other_path = tmp_path / "x.db", tmp_path / "y.db"

    def child() -> None:
        for _ in range(2):
            with pytest.raises(StorageUnavailable, match="fork when no thread is reading"):
                SQLiteCheckpointer.open(path)
        with SQLiteCheckpointer.open(other_path) as own:
            run_turn(own, "hello")

    with SQLiteCheckpointer.open(path) as saver:
        run_turn(saver, "first")
        database: Any = saver.database
        with database._connect_once().readers.borrow_connection() as conn:
            conn.execute("BEGIN")
            conn.execute("SELECT count(*) FROM threads").fetchall()
            assert wait_for_exit_status(fork_and_run(child)) == 0
        run_turn(saver, "second")
        assert read_user_texts(saver) == ["first", "second"]
    with SQLiteCheckpointer.open(other_path) as saver:
        assert read_user_texts(saver) == ["hello"]


def test_inherited_saver_store_and_lock_are_refused_in_forked_child(tmp_path: Path) -> None:
    """The error says that the file must be opened again."""
    path = tmp_path / "x.db"

    def child() -> None:
        config: Any = {"configurable": {"thread_id": "t"}}
        for call in (
            lambda: saver.get_tuple(config),
            lambda: saver.history("t"),
            lambda: run_turn(saver, "lost"),
            lambda: store.put(("a",), "k", {}),
            lambda: store.search(("a",)),
            lambda: saver.lock("t").__enter__(),
            lambda: asyncio.run(saver.aget_tuple(config)),
        ):
            with pytest.raises(StorageUnavailable, match="forked process; open it again"):
                call()
        saver.close()
        store.close()

    with SQLiteCheckpointer.open(path) as saver, SQLiteStore.open(path, index=None) as store:
        run_turn(saver, "first")
        assert wait_for_exit_status(fork_and_run(child)) == 0
        run_turn(saver, "second")
        store.put(("a",), "k", {})

        assert read_user_texts(saver) == ["first", "second"]


_worker_saver: Any = None


def open_worker_saver(path: Path) -> None:
    global _worker_saver
    _worker_saver = SQLiteCheckpointer.open(path)


def run_turn_in_worker(number: int) -> int:
    run_turn(_worker_saver, str(number), f"n{number}")
    return number


def test_forked_multiprocessing_workers_can_open_the_file_again(tmp_path: Path) -> None:
    """Each worker opens the file in its initializer, as the documentation recommends."""
    path, count = tmp_path / "x.db", 6
    with SQLiteCheckpointer.open(path) as saver:
        run_turn(saver, "hello")
        context = multiprocessing.get_context("fork")
        with context.Pool(2, open_worker_saver, (path,)) as pool:
            assert pool.map(run_turn_in_worker, range(count)) == [*range(count)]
        run_turn(saver, "again")

        assert read_user_texts(saver) == ["hello", "again"]
        assert [read_user_texts(saver, f"n{number}") for number in range(count)] == [
            [str(number)] for number in range(count)
        ]


def test_fork_is_not_delayed_by_threads_that_read(tmp_path: Path) -> None:
    """The threads that read are not delayed by a fork either."""
    over, reads = threading.Event(), [0, 0]

    def read_until_over(number: int) -> None:
        while not over.is_set():
            with suppress(StorageUnavailable):
                saver.history("t")
                reads[number] += 1

    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        run_turn(saver, "hello")
        threads = [threading.Thread(target=read_until_over, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(rounds(20)):
            before = [*reads]
            assert wait_for_exit_status(fork_and_run(lambda: None)) == 0
            while any(now == then for now, then in zip(reads, before, strict=True)):
                over.wait(0.001)
        over.set()
        for thread in threads:
            thread.join()
