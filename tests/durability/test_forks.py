"""Forked processes that open a file again: nothing that they acknowledge is lost."""

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


def talk(saver: SQLiteCheckpointer, text: str, thread_id: str = "t") -> None:
    """Run a turn of a thread."""
    builder: Any = StateGraph(MessagesState)
    builder.add_node("say", lambda state: {"messages": [AIMessage("good day")]})
    builder.add_edge(START, "say")
    config = {"configurable": {"thread_id": thread_id}}
    builder.compile(checkpointer=saver).invoke({"messages": [("user", text)]}, config)


def said(saver: SQLiteCheckpointer, thread_id: str = "t") -> list[Any]:
    """Return what the user has said in a thread."""
    return [item.value.content for item in saver.history(thread_id)][0::2]


def in_child(work: Callable[[], None]) -> int:
    """Fork, do the work in the child, and return its process id."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(1)  # without pytest's own ending, which is the parent's
    raise AssertionError


def status_of(child: int) -> int:
    """Wait for a child, and return its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


ORPHAN = """
import os, sys
from perdure.checkpointers import SQLiteCheckpointer
from perdure.stores import SQLiteStore
from tests.durability.test_forks import said, talk

path = sys.argv[1]
saver, store = SQLiteCheckpointer.open(path), SQLiteStore.open(path, index=None)
talk(saver, "of the parent")
store.put(("a",), "parent", {})
if os.fork():
    {parent}
    os._exit(0)
saver, store = SQLiteCheckpointer.open(path), SQLiteStore.open(path, index=None)
talk(saver, "of the child")
print("forked", flush=True)
for line in sys.stdin:  # the parent has gone
    talk(saver, line.strip())
    store.put(("a",), line.strip(), {})
    print("acknowledged", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("parent", ["pass", "saver.close(); store.close()"])
def test_a_child_that_outlives_its_parent(parent: str, tmp_path: Path) -> None:
    """Another process that opens and closes the file removes no WAL under it."""
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
                assert said(saver) == expected
                store.put(("b",), text, {})
            process.stdin.write(f"{text}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "acknowledged\n"
            expected.append(text)
        process.stdin.close()
        assert process.stdout.read() == ""
    with SQLiteCheckpointer.open(path) as saver, SQLiteStore.open(path, index=None) as store:
        assert said(saver) == expected
        keys = sorted(item.key for item in store.search(("a",)))
        assert keys == ["first", "parent", "second"]
    with closing(sqlite3.connect(path)) as conn:
        assert conn.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.repeats
def test_parent_and_children_write_at_the_same_time(tmp_path: Path) -> None:
    """Also those that are forked while threads and an event loop of the parent read and write."""
    path, over = tmp_path / "x.db", threading.Event()
    count, turns = rounds(8), 4

    def child(number: int) -> None:
        with SQLiteCheckpointer.open(path) as own:
            for turn in range(turns):
                talk(own, str(turn), f"child {number}")
                talk(own, f"{number} {turn}")
            assert said(own, f"child {number}") == [str(turn) for turn in range(turns)]

    def reading() -> None:
        async def read() -> None:
            while not over.is_set():
                await saver.ahistory("parent")
                await saver.athreads()
                await asyncio.to_thread(saver.get_tuple, {"configurable": {"thread_id": "parent"}})

        asyncio.run(read())

    with SQLiteCheckpointer.open(path) as saver:
        talk(saver, "0", "parent")
        threads = [threading.Thread(target=reading) for _ in range(2)]
        for thread in threads:
            thread.start()
        children = []
        for number in range(count):
            children.append(in_child(lambda number=number: child(number)))  # type: ignore[misc]
            talk(saver, str(number + 1), "parent")
        statuses = [status_of(each) for each in children]
        over.set()
        for thread in threads:
            thread.join()

        assert statuses == [0] * count
        assert said(saver, "parent") == [str(turn) for turn in range(count + 1)]
        for number in range(count):
            assert said(saver, f"child {number}") == [str(turn) for turn in range(turns)]
        stored = {item.value.content for item in saver.history("t")} - {"good day"}
        assert stored == {f"{number} {turn}" for number in range(count) for turn in range(turns)}
    with closing(sqlite3.connect(path)) as conn:
        assert conn.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_grandchild_and_what_it_inherits(tmp_path: Path) -> None:
    """A child opens the file again, and is forked in turn; each writes before and after."""
    path = tmp_path / "x.db"

    def grandchild() -> None:
        with SQLiteCheckpointer.open(path) as own:
            talk(own, "third")

    def child() -> None:
        with SQLiteCheckpointer.open(path) as own:
            talk(own, "second")
            assert status_of(in_child(grandchild)) == 0
            talk(own, "fourth")

    with SQLiteCheckpointer.open(path) as saver:
        talk(saver, "first")
        assert status_of(in_child(child)) == 0
        talk(saver, "fifth")

        assert said(saver) == ["first", "second", "third", "fourth", "fifth"]


def test_a_fork_within_a_read(tmp_path: Path) -> None:
    """The child cannot close that connection: it is refused that file, and has all others."""
    path, other = tmp_path / "x.db", tmp_path / "y.db"

    def child() -> None:
        for _ in range(2):
            with pytest.raises(StorageUnavailable, match="fork again when no thread reads"):
                SQLiteCheckpointer.open(path)
        with SQLiteCheckpointer.open(other) as own:
            talk(own, "hello")

    with SQLiteCheckpointer.open(path) as saver:
        talk(saver, "first")
        database: Any = saver.database
        with database._connect_once().readers.borrow_connection() as conn:
            conn.execute("BEGIN")
            conn.execute("SELECT count(*) FROM threads").fetchall()
            assert status_of(in_child(child)) == 0
        talk(saver, "second")
        assert said(saver) == ["first", "second"]
    with SQLiteCheckpointer.open(other) as saver:
        assert said(saver) == ["hello"]


def test_what_was_inherited_is_refused(tmp_path: Path) -> None:
    """A saver and a store of the parent, and locks on them; the error says what to do."""
    path = tmp_path / "x.db"

    def child() -> None:
        config: Any = {"configurable": {"thread_id": "t"}}
        for call in (
            lambda: saver.get_tuple(config),
            lambda: saver.history("t"),
            lambda: talk(saver, "lost"),
            lambda: store.put(("a",), "k", {}),
            lambda: store.search(("a",)),
            lambda: saver.lock("t").__enter__(),
            lambda: asyncio.run(saver.aget_tuple(config)),
        ):
            with pytest.raises(StorageUnavailable, match="forked process: open it again here"):
                call()
        saver.close()
        store.close()

    with SQLiteCheckpointer.open(path) as saver, SQLiteStore.open(path, index=None) as store:
        talk(saver, "first")
        assert status_of(in_child(child)) == 0
        talk(saver, "second")
        store.put(("a",), "k", {})

        assert said(saver) == ["first", "second"]


_own: Any = None


def open_own(path: Path) -> None:
    global _own
    _own = SQLiteCheckpointer.open(path)


def talk_in_own(number: int) -> int:
    talk(_own, str(number), f"n{number}")
    return number


def test_workers_of_multiprocessing_that_are_forked(tmp_path: Path) -> None:
    """Each opens the file in its initializer, as the pages say."""
    path, count = tmp_path / "x.db", 6
    with SQLiteCheckpointer.open(path) as saver:
        talk(saver, "hello")
        context = multiprocessing.get_context("fork")
        with context.Pool(2, open_own, (path,)) as pool:
            assert pool.map(talk_in_own, range(count)) == [*range(count)]
        talk(saver, "again")

        assert said(saver) == ["hello", "again"]
        assert [said(saver, f"n{number}") for number in range(count)] == [
            [str(number)] for number in range(count)
        ]


def test_a_fork_waits_for_no_read_for_long(tmp_path: Path) -> None:
    """Threads that read all the time neither hold up a fork nor are held up by one."""
    over, reads = threading.Event(), [0, 0]

    def reading(number: int) -> None:
        while not over.is_set():
            with suppress(StorageUnavailable):
                saver.history("t")
                reads[number] += 1

    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        talk(saver, "hello")
        threads = [threading.Thread(target=reading, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(rounds(20)):
            before = [*reads]
            assert status_of(in_child(lambda: None)) == 0
            while any(now == then for now, then in zip(reads, before, strict=True)):
                over.wait(0.001)
        over.set()
        for thread in threads:
            thread.join()
