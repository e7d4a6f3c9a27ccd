"""The cached state of a thread is never trusted without a check against the database."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict

import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.graph import START, StateGraph

from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.checkpointers.address import Address
from perdure.checkpointers.put import CheckpointPut, TaskWrites
from perdure.errors import ThreadDeleted
from perdure.storage.flow import Flow, GuardedRequest, GuardFailed, fetch_rows
from tests.backends import Place
from tests.contracts.puts import (
    checkpoint_id_of,
    config_at,
    list_checkpoint_ids,
    put,
    read_channel_values,
)

TABLES = ("threads", "namespaces", "logs", "items", "checkpoints", "writes", "tags")
OTHER_PROCESS = """
import sys
from perdure.checkpointers import SQLiteCheckpointer
from tests.contracts.puts import config_at, put
with SQLiteCheckpointer.open(sys.argv[1]) as saver:
    if sys.argv[2] == "put":
        put(saver, {"n": 2}, config_at(uid="one"), uid="two")
    else:
        saver.put_writes(config_at(uid="one"), [("n", 7)], "task")
"""


@pytest.fixture
def savers(place: Place) -> Iterator[tuple[SQLiteCheckpointer, SQLiteCheckpointer]]:
    """Two checkpointers on one database, each with its own cache."""
    with place.saver() as one, place.saver() as other:
        yield one, other


def make_messages(*texts: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(text, id=text) for text in texts]}


def read_all_rows(saver: SQLiteCheckpointer) -> list[Any]:
    """Return all rows of the tables of a database."""

    def read(table: str) -> Any:
        return saver.database.read(lambda: fetch_rows(f"SELECT * FROM {table}"))

    return [sorted(map(repr, read(table))) for table in TABLES]


def plan_put(saver: SQLiteCheckpointer, uid: str, parent_id: str, values: dict[str, Any]) -> Any:
    """Plan a put from the cache without executing the plan."""
    checkpoint = empty_checkpoint()
    checkpoint["id"], checkpoint["channel_values"] = uid, values
    checkpoint["channel_versions"] = dict.fromkeys(values, 9)
    metadata = {"source": "loop", "step": 1, "user_id": "ann"}
    request = CheckpointPut(
        Address("t", "", parent_id), checkpoint, metadata, checkpoint["channel_versions"]
    )
    plan = saver._writer.plan_write_from_cache(request)
    assert plan is not None
    return plan


def write_if_current(plan: Any) -> Flow[None]:
    """Write the plan if it is not stale, and do nothing else."""
    yield GuardedRequest(plan.statements)


CHANGES: dict[str, Callable[[SQLiteCheckpointer], object]] = {
    "put": lambda other: put(other, make_messages("a", "c"), config_at(uid="two"), uid="x"),
    "rewind": lambda other: other.rewind("t", "one"),
    "prune": lambda other: other.retain(Retention(last=1)),
    "erase": lambda other: other.erase("t", ["b"]),
    "delete": lambda other: other.delete_thread("t"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_stale_put_writes_no_row_and_can_be_repeated(
    savers: tuple[SQLiteCheckpointer, SQLiteCheckpointer], change: str
) -> None:
    """The whole transaction fails, with items, tags and writes of tasks. A second put succeeds."""
    one, other = savers
    put(one, make_messages("a"), uid="one")
    put(one, make_messages("a", "b"), config_at(uid="one"), uid="two")
    stale_plan = plan_put(one, "three", "two", make_messages("a", "b", "new"))
    CHANGES[change](other)
    before = read_all_rows(one)
    with pytest.raises(GuardFailed):
        one.database.write(lambda: write_if_current(stale_plan))

    assert read_all_rows(one) == before
    if change == "delete":
        with pytest.raises(ThreadDeleted):
            put(one, make_messages("a", "b", "new"), config_at(uid="two"), uid="three")
        assert read_all_rows(one) == before
        return
    put(one, make_messages("a", "b", "new"), config_at(uid="two"), uid="three")
    assert read_channel_values(one, config_at(uid="three")) == read_channel_values(
        other, config_at(uid="three")
    )
    expected_ids = ["a", "new"] if change == "erase" else ["a", "b", "new"]
    assert read_channel_values(other, config_at(uid="three")) == make_messages(*expected_ids)


@pytest.mark.parametrize("change", ["prune", "erase", "delete"])
def test_stale_task_writes_leave_no_row(
    savers: tuple[SQLiteCheckpointer, SQLiteCheckpointer], change: str
) -> None:
    """After a removal from the thread, the items of the writes may no longer exist."""
    one, other = savers
    put(one, make_messages("a"), uid="one")
    put(one, make_messages("a", "b"), config_at(uid="one"), uid="two")
    request = TaskWrites(Address("t", "", "two"), "task", "", [("messages", ["x"])])
    stale_plan = one._writer.plan_write_from_cache(request)
    assert stale_plan is not None
    CHANGES[change](other)
    before = read_all_rows(one)
    with pytest.raises(GuardFailed):
        one.database.write(lambda: write_if_current(stale_plan))

    assert read_all_rows(one) == before


def test_puts_planned_after_stale_put_fail_too(
    savers: tuple[SQLiteCheckpointer, SQLiteCheckpointer],
) -> None:
    """The puts fail even if the other process has made the same number of puts."""
    one, other = savers
    put(one, make_messages("a"), uid="one")
    put(one, {"n": 1}, ns="sub", uid="s1")
    put(one, {"n": 2}, config_at(ns="sub", uid="s1"), ns="sub", uid="s2")
    first = plan_put(one, "two", "one", make_messages("a", "b"))
    checkpoint = empty_checkpoint()
    checkpoint["id"], checkpoint["channel_values"] = "s3", {"n": 3}
    checkpoint["channel_versions"] = {"n": 3}
    second = one._writer.plan_write_from_cache(
        CheckpointPut(Address("t", "sub", "s2"), checkpoint, {}, {"n": 3})
    )
    assert second is not None
    put(other, make_messages("a", "c"), config_at(uid="one"), uid="x")
    for plan in (first, second):
        with pytest.raises(GuardFailed):
            one.database.write(partial(write_if_current, plan))

    assert list_checkpoint_ids(one, config_at()) == ["x", "one"]
    assert list_checkpoint_ids(one, config_at(ns="sub")) == ["s2", "s1"]


CHANGES_OF_HEAD: dict[str, Callable[[SQLiteCheckpointer], object]] = {
    "put": lambda other: put(other, {"n": 2}, config_at(uid="one"), uid="two"),
    "writes": lambda other: other.put_writes(config_at(uid="one"), [("n", 7)], "task"),
    "rewind": lambda other: other.rewind("t", "zero"),
    "delete": lambda other: other.delete_thread("t"),
}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("change", CHANGES_OF_HEAD)
@pytest.mark.parametrize("writer", ["itself", "another"])
def test_cached_head_is_not_returned_after_another_write(
    savers: tuple[SQLiteCheckpointer, SQLiteCheckpointer], writer: str, change: str, is_async: bool
) -> None:
    """The write is by another checkpointer of the process, or by this one."""
    one, other = savers

    def get() -> Any:
        return asyncio.run(one.aget_tuple(config_at())) if is_async else one.get_tuple(config_at())

    put(one, {"n": 0}, uid="zero")
    put(one, {"n": 1}, config_at(uid="zero"), uid="one")
    first = get()
    CHANGES_OF_HEAD[change](one if writer == "itself" else other)
    cached, stored = get(), other.get_tuple(config_at())

    assert checkpoint_id_of(first.config) == "one"
    assert cached == stored
    assert cached != first


@pytest.mark.parametrize("change", ["put", "writes"])
def test_cached_head_is_not_returned_after_write_by_another_process(
    file_saver: SQLiteCheckpointer, change: str
) -> None:
    """SQLite reports commits of other processes."""
    put(file_saver, {"n": 0}, uid="zero")
    put(file_saver, {"n": 1}, config_at(uid="zero"), uid="one")
    first = file_saver.get_tuple(config_at())
    subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, file_saver.database.path, change], check=True
    )
    second = file_saver.get_tuple(config_at())

    assert first is not None
    assert second is not None
    assert (checkpoint_id_of(second.config), second.pending_writes) == (
        ("two", []) if change == "put" else ("one", [("task", "n", 7)])
    )


def test_writes_stored_before_their_checkpoint_are_read(
    savers: tuple[SQLiteCheckpointer, SQLiteCheckpointer],
) -> None:
    """A task may end before its checkpoint is stored."""
    one, _ = savers
    put(one, {"n": 0}, uid="zero")
    one.put_writes(config_at(uid="one"), [("n", 7)], "early")
    put(one, {"n": 1}, config_at(uid="zero"), uid="one")
    one.put_writes(config_at(uid="one"), [("n", 8)], "late")
    stored = one.get_tuple(config_at())

    assert stored is not None
    assert stored.pending_writes == [("early", "n", 7), ("late", "n", 8)]


def test_changing_tuple_read_from_cache_does_not_change_next_read(
    file_saver: SQLiteCheckpointer,
) -> None:
    put(file_saver, make_messages("a"), uid="one")
    put(file_saver, make_messages("a", "b"), config_at(uid="one"), uid="two")
    file_saver.put_writes(config_at(uid="two"), [("messages", ["x"])], "task")
    first = file_saver.get_tuple(config_at())
    assert first is not None
    first.checkpoint["channel_values"]["messages"].clear()
    first.checkpoint["channel_versions"].clear()
    first.metadata["source"] = "update"
    assert first.pending_writes is not None
    first.pending_writes[0][2].append("y")
    second = file_saver.get_tuple(config_at())

    assert second is not None
    assert second.checkpoint["channel_values"] == make_messages("a", "b")
    assert second.checkpoint["channel_versions"] != {}
    assert second.metadata["source"] == "loop"
    assert second.pending_writes == [("task", "messages", ["x"])]


def test_checkpoint_put_again_under_same_id_has_its_new_values(
    file_saver: SQLiteCheckpointer,
) -> None:
    """The first and the second put have the same parent."""
    put(file_saver, make_messages("a"), uid="one")
    put(file_saver, make_messages("a", "b"), config_at(uid="one"), uid="two")
    put(file_saver, make_messages("a", "c"), config_at(uid="one"), uid="two")

    assert read_channel_values(file_saver, config_at()) == make_messages("a", "c")
    put(file_saver, make_messages("a", "c", "d"), config_at(uid="two"), uid="three")
    assert read_channel_values(file_saver, config_at()) == make_messages("a", "c", "d")


def test_plan_that_fails_leaves_no_positions_in_cache(
    file_saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions that the plan gave to items are not taken for those of stored items."""
    put(file_saver, make_messages("a"), uid="one")
    put(file_saver, make_messages("a", "b"), config_at(uid="one"), uid="two")
    with monkeypatch.context() as patched:
        patched.setattr(file_saver._writer, "_build_checkpoint_statements", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            put(file_saver, make_messages("a", "b", "c"), config_at(uid="two"), uid="three")
    put(file_saver, make_messages("a", "b", "c", "d"), config_at(uid="two"), uid="three")
    with SQLiteCheckpointer.open(file_saver.database.path) as fresh:
        values = read_channel_values(fresh, config_at())

    assert values == make_messages("a", "b", "c", "d")


@contextmanager
def pause_writer(saver: SQLiteCheckpointer) -> Iterator[None]:
    """Pause the writer thread.

    Calls that are made meanwhile are written together in one transaction.
    """
    lock = saver.database._connect_once().writer.lock  # type: ignore[attr-defined]
    with lock:
        # the writer thread has taken one job and waits; later jobs are its next group
        # without `own_writes`, cached heads are not trusted
        write, own_writes = saver.database.write, saver._own_writes
        first = threading.Thread(
            target=lambda: write(lambda: fetch_rows("SELECT 1"), own_writes=own_writes)
        )
        first.start()
        time.sleep(0.05)
        yield
        time.sleep(0.05)
    first.join()


def put_async(
    saver: SQLiteCheckpointer,
    uid: str,
    values: dict[str, Any],
    parent_id: str | None,
    ns: str = "",
    source: Any = "loop",
) -> Coroutine[Any, Any, Any]:
    checkpoint = empty_checkpoint()
    checkpoint["id"], checkpoint["channel_values"] = uid, values
    checkpoint["channel_versions"] = dict.fromkeys(values, uid)
    versions = dict(checkpoint["channel_versions"])
    return saver.aput(config_at(ns=ns, uid=parent_id), checkpoint, {"source": source}, versions)


async def start_tasks(*calls: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    """Start the calls as tasks, one after another."""
    tasks = []
    for call in calls:
        tasks.append(asyncio.create_task(call))
        await asyncio.sleep(0.02)
    return tasks


async def write_together(saver: SQLiteCheckpointer, *calls: Coroutine[Any, Any, Any]) -> None:
    """Run the calls so that their writes share a transaction."""
    with pause_writer(saver):
        tasks = await start_tasks(*calls)
    await asyncio.gather(*tasks)


def test_cancelled_put_leaves_nothing_and_next_put_succeeds(file_saver: SQLiteCheckpointer) -> None:
    """The put is cancelled before its turn in the writer thread."""

    async def cancel_puts() -> None:
        with pause_writer(file_saver):
            tasks = await start_tasks(
                *(put_async(file_saver, x, make_messages("a", x), "a2") for x in "bc")
            )
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await put_async(file_saver, "d", make_messages("a", "d"), "a2")

    put(file_saver, make_messages("a"), uid="a")
    put(file_saver, make_messages("a"), config_at(uid="a"), uid="a2")
    asyncio.run(cancel_puts())
    values = read_channel_values(file_saver, config_at())
    with SQLiteCheckpointer.open(file_saver.database.path) as fresh:
        assert read_channel_values(fresh, config_at()) == values
    assert values == make_messages("a", "d")


def test_values_of_cancelled_put_are_never_read(tmp_path: Path) -> None:
    """Values that another checkpointer stored under the same id are read instead."""
    with (
        SQLiteCheckpointer.open(tmp_path / "x.db") as one,
        SQLiteCheckpointer.open(tmp_path / "x.db") as other,
    ):

        async def cancel_put() -> None:
            with pause_writer(one):
                (task,) = await start_tasks(
                    put_async(one, "c", {"n": 3, **make_messages("a", "never")}, "b")
                )
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        put(one, {"n": 1, **make_messages("a")}, uid="a")
        put(one, {"n": 2, **make_messages("a")}, config_at(uid="a"), uid="b")
        asyncio.run(cancel_put())
        put(other, {"n": 4, **make_messages("a", "stored")}, config_at(uid="b"), uid="c")

        for config in (config_at(), config_at(uid="c"), config_at()):
            assert read_channel_values(one, config) == {"n": 4, **make_messages("a", "stored")}


@pytest.mark.parametrize("length", [12, 15, 22, 29, 36])
def test_history_is_complete_after_put_with_aliases_in_shared_transaction(
    tmp_path: Path, length: int
) -> None:
    """The second put of the transaction is the first of its namespace.

    It reads the aliases of the other put.
    """
    path, root, sub = tmp_path / "x.db", list[str](), list[str]()
    with SQLiteCheckpointer.open(path, synchronous="normal") as saver:
        for n in range(length):  # the two namespaces take turns in one log
            parents = (
                (config_at(uid=f"a{n - 1}"), config_at(ns="sub", uid=f"b{n - 1}"))
                if n
                else (None, None)
            )
            root.append(f"r{n}")
            sub.append(f"s{n}")
            put(saver, make_messages(*root), parents[0], uid=f"a{n}")
            put(saver, make_messages(*sub), parents[1], ns="sub", uid=f"b{n}")
        last = put_async(saver, "P", make_messages(*root, "last"), f"a{length - 1}")
        asyncio.run(write_together(saver, last, put_async(saver, "J", {"n": 1}, None, ns="other")))
        put(saver, make_messages(*root[1:]), config_at(uid="P"), uid="Q")
        put(saver, make_messages(*root[1:], "more"), config_at(uid="Q"), uid="R")
    with SQLiteCheckpointer.open(path) as fresh:
        assert [item.value.content for item in fresh.history("t")] == [*root, "last", "more"]
        assert read_channel_values(fresh, config_at()) == make_messages(*root[1:], "more")


def test_history_is_complete_after_scattered_list_in_shared_transaction(tmp_path: Path) -> None:
    """The ranges of the list become aliases at once. The next puts continue from these aliases."""
    path, names = tmp_path / "x.db", [f"m{n}" for n in range(120)]
    with SQLiteCheckpointer.open(path) as saver:
        put(saver, make_messages(*names[:60]), uid="a")
        put(saver, make_messages(*names), config_at(uid="a"), uid="b")
        scattered = names[::2]
        calls = (
            put_async(saver, "c", make_messages(*scattered), None),
            put_async(saver, "J", {"n": 1}, None, ns="o"),
        )
        asyncio.run(write_together(saver, *calls))
        parent_id = "c"
        for n in range(12):
            scattered = [*scattered[:7], *scattered[8:], f"n{n}"]
            put(
                saver,
                make_messages(*scattered),
                config_at(uid=parent_id),
                uid=(parent_id := f"d{n}"),
            )
    with SQLiteCheckpointer.open(path) as fresh:
        history = [item.value.content for item in fresh.history("t", checkpoint_id=parent_id)]
        assert read_channel_values(fresh, config_at(uid=parent_id)) == make_messages(*scattered)
    assert history == [*names[::2], *(f"n{n}" for n in range(12))]


class State(TypedDict, total=False):
    d: Any


@pytest.mark.parametrize("durability", ["async", "sync"])
def test_input_is_stored_unchanged_although_node_changes_it(
    file_saver: SQLiteCheckpointer, durability: Literal["async", "sync"]
) -> None:
    """The node changes the input of a new thread in place while the input is being written."""

    def change(state: State) -> State:
        state["d"]["x"]["deep"] = "changed by the node"
        return {"d": state["d"]}

    async def run_with_slow_writer() -> None:
        lock = file_saver.database._connect_once().writer.lock  # type: ignore[attr-defined]
        lock.acquire()  # simulates a slow disk
        asyncio.get_running_loop().call_later(0.2, lock.release)
        graph: Any = StateGraph(State).add_node("change", change).add_edge(START, "change")
        input = {"d": {"x": {"deep": "as asked"}, "pad": list(range(50))}}
        await graph.compile(checkpointer=file_saver).ainvoke(
            input, config_at(), durability=durability
        )

    put(file_saver, {"n": 1}, thread="other")
    asyncio.run(run_with_slow_writer())
    (first,) = file_saver.list(config_at(), filter={"source": "input"})

    assert first.checkpoint["channel_values"]["__start__"]["d"]["x"] == {"deep": "as asked"}


def test_metadata_is_stored_unchanged_although_caller_changes_it(
    file_saver: SQLiteCheckpointer,
) -> None:
    """Channel versions and versions that nodes have seen are stored unchanged too."""

    async def change_after_put() -> None:
        with pause_writer(file_saver):
            config: Any = config_at(thread="new")
            call = file_saver.aput(config, checkpoint, metadata, checkpoint["channel_versions"])
            tasks = await start_tasks(call)
            metadata["tags"].append("later")
            checkpoint["versions_seen"]["node"]["n"] = 2
            checkpoint["channel_versions"]["n"] = 2
        await asyncio.gather(*tasks)

    checkpoint = empty_checkpoint()
    metadata: Any = {"source": "loop", "tags": ["first"]}
    checkpoint["channel_values"], checkpoint["channel_versions"] = {"n": 1}, {"n": 1}
    checkpoint["versions_seen"] = {"node": {"n": 1}}
    put(file_saver, {"n": 1}, thread="other")
    asyncio.run(change_after_put())
    stored: Any = file_saver.get_tuple(config_at(thread="new"))

    assert stored.metadata["tags"] == ["first"]
    assert stored.checkpoint["versions_seen"] == {"node": {"n": 1}}
    assert stored.checkpoint["channel_versions"] == {"n": 1}


@pytest.mark.parametrize("cause", ["unstorable", "evicted"])
def test_task_writes_are_stored_although_thread_leaves_cache(
    tmp_path: Path, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread leaves the cache between the statements of the transaction and its COMMIT."""
    hook: list[Callable[[], object]] = []

    class Connection(sqlite3.Connection):
        def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
            if sql == "COMMIT" and hook:
                hook.pop()()
            return super().execute(sql, *args)

    def drop_from_cache() -> None:
        if cause == "evicted":
            saver._cache.drop_thread("t")
            return
        with monkeypatch.context() as patched:
            patched.setattr(saver._writer, "_build_checkpoint_statements", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                put(saver, {"n": 3}, config_at(uid="r2"), uid="r3")

    async def put_writes_and_drop() -> None:
        with pause_writer(saver):
            writes = saver.aput_writes(config_at(ns="b", uid="b2"), [("n", 7)], "task")
            tasks = await start_tasks(writes, put_async(saver, "c1", {"n": 1}, None, ns="c"))
            # at the second COMMIT; the first is that of `pause_writer`
            hook.extend([drop_from_cache, lambda: None])
        await asyncio.gather(*tasks)

    with SQLiteCheckpointer.open(tmp_path / "x.db", factory=Connection) as saver:
        put(saver, {"n": 1}, ns="b", uid="b1")
        put(saver, {"n": 1}, uid="r1")
        put(saver, {"n": 2}, config_at(uid="r1"), uid="r2")
        put(saver, {"n": 2}, config_at(ns="b", uid="b1"), ns="b", uid="b2")
        asyncio.run(put_writes_and_drop())
        # while the connection is in use
        while saver.database.count_writes_except_own(saver._own_writes) is None:
            time.sleep(0.01)
        stored = saver.get_tuple(config_at(ns="b"))

    assert hook == []
    assert stored is not None
    assert stored.pending_writes == [("task", "n", 7)]


def test_puts_keep_their_order_although_one_is_stale(
    savers: tuple[SQLiteCheckpointer, SQLiteCheckpointer],
) -> None:
    """The second put was made before the first was stored, and is its child."""
    one, other = savers

    async def put_twice() -> None:
        first = put_async(one, "c", {"n": 3, "k": "v"}, "b", source="input")
        await asyncio.gather(first, put_async(one, "d", {"n": 4, "k": "v"}, "c"))

    put(one, {"n": 1}, uid="a")
    put(one, {"n": 2}, config_at(uid="a"), uid="b")
    put(other, {"n": 1}, ns="other", uid="x")
    asyncio.run(put_twice())

    assert list_checkpoint_ids(other, config_at()) == ["d", "c", "b", "a"]


def test_cache_stays_within_its_size_limit(tmp_path: Path) -> None:
    """The process only puts checkpoints, and reads its own puts."""
    limit, text = 1_000_000, "x" * 5000
    path = tmp_path / "x.db"
    with SQLiteCheckpointer.open(path, cache_bytes=limit, synchronous="normal") as saver:
        for n in range(300):
            put(saver, make_messages(text), thread=f"t{n}", uid="a")
            put(
                saver,
                make_messages(text, f"{text}y"),
                config_at(f"t{n}", uid="a"),
                thread=f"t{n}",
                uid="b",
            )
            assert read_channel_values(saver, config_at(f"t{n}")) == make_messages(text, f"{text}y")
        sizes = [thread.size_bytes for thread in saver._cache._threads.values()]

    assert sum(sizes) < 2.5 * limit  # the size is checked only from time to time
    assert 0 < len(sizes) < 200


def test_time_of_last_activity_does_not_decrease_if_clock_is_set_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    with place.saver() as saver:
        put(saver, {"n": 1}, uid="one")
        updated_at = saver.thread("t").updated_at
    monkeypatch.setattr(time, "time", lambda: now - 86400)
    with place.saver() as saver:
        assert read_channel_values(saver, config_at()) == {"n": 1}  # puts the head into the cache
        saver.put_writes(config_at(uid="one"), [("n", 7)], "task")
        assert saver.thread("t").updated_at == updated_at
        put(saver, {"n": 2}, config_at(uid="one"), uid="two")
        assert saver.thread("t").updated_at == updated_at
