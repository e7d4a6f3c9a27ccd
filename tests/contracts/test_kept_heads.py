"""What a process keeps of a thread is never taken for what the thread is."""

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
PUT = """
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
    """Two checkpointers on one database, each with what it keeps."""
    with place.saver() as one, place.saver() as other:
        yield one, other


def said(*texts: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(text, id=text) for text in texts]}


def rows(saver: SQLiteCheckpointer) -> list[Any]:
    """All that is in the tables of a database."""

    def read(table: str) -> Any:
        return saver.database.read(lambda: fetch_rows(f"SELECT * FROM {table}"))

    return [sorted(map(repr, read(table))) for table in TABLES]


def planned(saver: SQLiteCheckpointer, uid: str, upon: str, values: dict[str, Any]) -> Any:
    """A put of which only the plan is made."""
    checkpoint = empty_checkpoint()
    checkpoint["id"], checkpoint["channel_values"] = uid, values
    checkpoint["channel_versions"] = dict.fromkeys(values, 9)
    metadata = {"source": "loop", "step": 1, "user_id": "ann"}
    asked = CheckpointPut(
        Address("t", "", upon), checkpoint, metadata, checkpoint["channel_versions"]
    )
    found = saver._writer.plan_from_cache(asked)
    assert found is not None
    return found


def guarded(plan: Any) -> Flow[None]:
    """Only what was planned: without what follows if it is stale."""
    yield GuardedRequest(plan.statements)


CHANGES: dict[str, Callable[[SQLiteCheckpointer], object]] = {
    "put": lambda other: put(other, said("a", "c"), config_at(uid="two"), uid="x"),
    "rewind": lambda other: other.rewind("t", "one"),
    "prune": lambda other: other.retain(Retention(last=1)),
    "erase": lambda other: other.erase("t", ["b"]),
    "delete": lambda other: other.delete_thread("t"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_stale_put_leaves_no_row(
    savers: tuple[SQLiteCheckpointer, SQLiteCheckpointer], change: str
) -> None:
    """Its whole transaction fails, with items, tags and rows of tasks; put again, it is there."""
    one, other = savers
    put(one, said("a"), uid="one")
    put(one, said("a", "b"), config_at(uid="one"), uid="two")
    stale = planned(one, "three", "two", said("a", "b", "new"))
    CHANGES[change](other)
    before = rows(one)
    with pytest.raises(GuardFailed):
        one.database.write(lambda: guarded(stale))

    assert rows(one) == before
    if change == "delete":
        with pytest.raises(ThreadDeleted):
            put(one, said("a", "b", "new"), config_at(uid="two"), uid="three")
        assert rows(one) == before
        return
    put(one, said("a", "b", "new"), config_at(uid="two"), uid="three")
    assert read_channel_values(one, config_at(uid="three")) == read_channel_values(
        other, config_at(uid="three")
    )
    left = ["a", "new"] if change == "erase" else ["a", "b", "new"]
    assert read_channel_values(other, config_at(uid="three")) == said(*left)


@pytest.mark.parametrize("change", ["prune", "erase", "delete"])
def test_stale_writes_of_a_task_leave_no_row(
    savers: tuple[SQLiteCheckpointer, SQLiteCheckpointer], change: str
) -> None:
    """Once something of the thread was removed, what they point to may be gone."""
    one, other = savers
    put(one, said("a"), uid="one")
    put(one, said("a", "b"), config_at(uid="one"), uid="two")
    asked = TaskWrites(Address("t", "", "two"), "task", "", [("messages", ["x"])])
    stale = one._writer.plan_from_cache(asked)
    assert stale is not None
    CHANGES[change](other)
    before = rows(one)
    with pytest.raises(GuardFailed):
        one.database.write(lambda: guarded(stale))

    assert rows(one) == before


def test_puts_that_were_planned_upon_a_stale_one_fail_with_it(
    savers: tuple[SQLiteCheckpointer, SQLiteCheckpointer],
) -> None:
    """Also if the other process has put as many: the place in order alone tells nothing."""
    one, other = savers
    put(one, said("a"), uid="one")
    put(one, {"n": 1}, ns="sub", uid="s1")
    put(one, {"n": 2}, config_at(ns="sub", uid="s1"), ns="sub", uid="s2")
    first = planned(one, "two", "one", said("a", "b"))
    checkpoint = empty_checkpoint()
    checkpoint["id"], checkpoint["channel_values"] = "s3", {"n": 3}
    checkpoint["channel_versions"] = {"n": 3}
    second = one._writer.plan_from_cache(
        CheckpointPut(Address("t", "sub", "s2"), checkpoint, {}, {"n": 3})
    )
    assert second is not None
    put(other, said("a", "c"), config_at(uid="one"), uid="x")
    for each in (first, second):
        with pytest.raises(GuardFailed):
            one.database.write(partial(guarded, each))

    assert list_checkpoint_ids(one, config_at()) == ["x", "one"]
    assert list_checkpoint_ids(one, config_at(ns="sub")) == ["s2", "s1"]


SEEN: dict[str, Callable[[SQLiteCheckpointer], object]] = {
    "put": lambda other: put(other, {"n": 2}, config_at(uid="one"), uid="two"),
    "writes": lambda other: other.put_writes(config_at(uid="one"), [("n", 7)], "task"),
    "rewind": lambda other: other.rewind("t", "zero"),
    "delete": lambda other: other.delete_thread("t"),
}


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("change", SEEN)
@pytest.mark.parametrize("by", ["itself", "another"])
def test_a_kept_head_is_not_read_once_another_wrote(
    savers: tuple[SQLiteCheckpointer, SQLiteCheckpointer], by: str, change: str, awaited: bool
) -> None:
    """Another checkpointer of the process, or this one by another way than a put."""
    one, other = savers

    def get() -> Any:
        return asyncio.run(one.aget_tuple(config_at())) if awaited else one.get_tuple(config_at())

    put(one, {"n": 0}, uid="zero")
    put(one, {"n": 1}, config_at(uid="zero"), uid="one")
    first = get()
    SEEN[change](one if by == "itself" else other)
    found, fresh = get(), other.get_tuple(config_at())

    assert checkpoint_id_of(first.config) == "one"
    assert found == fresh
    assert found != first


@pytest.mark.parametrize("change", ["put", "writes"])
def test_a_kept_head_is_not_read_once_another_process_wrote(
    file_saver: SQLiteCheckpointer, change: str
) -> None:
    """SQLite itself tells of commits of other processes."""
    put(file_saver, {"n": 0}, uid="zero")
    put(file_saver, {"n": 1}, config_at(uid="zero"), uid="one")
    first = file_saver.get_tuple(config_at())
    subprocess.run([sys.executable, "-c", PUT, file_saver.database.path, change], check=True)
    found = file_saver.get_tuple(config_at())

    assert first is not None
    assert found is not None
    assert (checkpoint_id_of(found.config), found.pending_writes) == (
        ("two", []) if change == "put" else ("one", [("task", "n", 7)])
    )


def test_writes_that_came_before_their_checkpoint_are_read(
    savers: tuple[SQLiteCheckpointer, SQLiteCheckpointer],
) -> None:
    """A task may be done before its checkpoint is stored."""
    one, _ = savers
    put(one, {"n": 0}, uid="zero")
    one.put_writes(config_at(uid="one"), [("n", 7)], "early")
    put(one, {"n": 1}, config_at(uid="zero"), uid="one")
    one.put_writes(config_at(uid="one"), [("n", 8)], "late")
    found = one.get_tuple(config_at())

    assert found is not None
    assert found.pending_writes == [("early", "n", 7), ("late", "n", 8)]


def test_what_is_read_from_memory_is_nobody_elses(file_saver: SQLiteCheckpointer) -> None:
    """A caller may change what it was given."""
    put(file_saver, said("a"), uid="one")
    put(file_saver, said("a", "b"), config_at(uid="one"), uid="two")
    file_saver.put_writes(config_at(uid="two"), [("messages", ["x"])], "task")
    first = file_saver.get_tuple(config_at())
    assert first is not None
    first.checkpoint["channel_values"]["messages"].clear()
    first.checkpoint["channel_versions"].clear()
    first.metadata["source"] = "update"
    assert first.pending_writes is not None
    first.pending_writes[0][2].append("y")
    again = file_saver.get_tuple(config_at())

    assert again is not None
    assert again.checkpoint["channel_values"] == said("a", "b")
    assert again.checkpoint["channel_versions"] != {}
    assert again.metadata["source"] == "loop"
    assert again.pending_writes == [("task", "messages", ["x"])]


def test_a_checkpoint_that_was_put_again_is_read_as_it_is(file_saver: SQLiteCheckpointer) -> None:
    """Under the same id, upon the same parent, with other values."""
    put(file_saver, said("a"), uid="one")
    put(file_saver, said("a", "b"), config_at(uid="one"), uid="two")
    put(file_saver, said("a", "c"), config_at(uid="one"), uid="two")

    assert read_channel_values(file_saver, config_at()) == said("a", "c")
    put(file_saver, said("a", "c", "d"), config_at(uid="two"), uid="three")
    assert read_channel_values(file_saver, config_at()) == said("a", "c", "d")


def test_a_plan_that_fails_half_way_leaves_nothing_behind(
    file_saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions that it gave to items are not taken for those of stored ones."""
    put(file_saver, said("a"), uid="one")
    put(file_saver, said("a", "b"), config_at(uid="one"), uid="two")
    with monkeypatch.context() as patched:
        patched.setattr(file_saver._writer, "_build_checkpoint_row", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            put(file_saver, said("a", "b", "c"), config_at(uid="two"), uid="three")
    put(file_saver, said("a", "b", "c", "d"), config_at(uid="two"), uid="three")
    with SQLiteCheckpointer.open(file_saver.database.path) as fresh:
        found = read_channel_values(fresh, config_at())

    assert found == said("a", "b", "c", "d")


@contextmanager
def held(saver: SQLiteCheckpointer) -> Iterator[None]:
    """What is handed in meanwhile is written afterwards, in one transaction."""
    lock = saver.database._connect_once().writer.lock  # type: ignore[attr-defined]
    with lock:
        # the writing thread has taken one job, and waits; those that come are its next group
        write, watch = saver.database.write, saver._watch  # else the kept heads are not trusted
        first = threading.Thread(target=lambda: write(lambda: fetch_rows("SELECT 1"), watch=watch))
        first.start()
        time.sleep(0.05)
        yield
        time.sleep(0.05)
    first.join()


def aput(
    saver: SQLiteCheckpointer,
    uid: str,
    values: dict[str, Any],
    upon: str | None,
    ns: str = "",
    source: Any = "loop",
) -> Coroutine[Any, Any, Any]:
    checkpoint = empty_checkpoint()
    checkpoint["id"], checkpoint["channel_values"] = uid, values
    checkpoint["channel_versions"] = dict.fromkeys(values, uid)
    versions = dict(checkpoint["channel_versions"])
    return saver.aput(config_at(ns=ns, uid=upon), checkpoint, {"source": source}, versions)


async def handed_in(*calls: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    """Tasks that have begun, one after another."""
    tasks = []
    for call in calls:
        tasks.append(asyncio.create_task(call))
        await asyncio.sleep(0.02)
    return tasks


async def together(saver: SQLiteCheckpointer, *calls: Coroutine[Any, Any, Any]) -> None:
    """Calls whose writes share a transaction."""
    with held(saver):
        tasks = await handed_in(*calls)
    await asyncio.gather(*tasks)


def test_a_put_that_is_cancelled(file_saver: SQLiteCheckpointer) -> None:
    """Before its turn in the writing thread it leaves nothing, and the next goes on."""

    async def course() -> None:
        with held(file_saver):
            tasks = await handed_in(*(aput(file_saver, x, said("a", x), "a2") for x in "bc"))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await aput(file_saver, "d", said("a", "d"), "a2")

    put(file_saver, said("a"), uid="a")
    put(file_saver, said("a"), config_at(uid="a"), uid="a2")
    asyncio.run(course())
    found = read_channel_values(file_saver, config_at())
    with SQLiteCheckpointer.open(file_saver.database.path) as fresh:
        assert read_channel_values(fresh, config_at()) == found
    assert found == said("a", "d")


def test_a_put_that_was_cancelled_is_not_read(tmp_path: Path) -> None:
    """Nor its values for those that another stored under the same id."""
    with (
        SQLiteCheckpointer.open(tmp_path / "x.db") as one,
        SQLiteCheckpointer.open(tmp_path / "x.db") as other,
    ):

        async def course() -> None:
            with held(one):
                (task,) = await handed_in(aput(one, "c", {"n": 3, **said("a", "never")}, "b"))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        put(one, {"n": 1, **said("a")}, uid="a")
        put(one, {"n": 2, **said("a")}, config_at(uid="a"), uid="b")
        asyncio.run(course())
        put(other, {"n": 4, **said("a", "stored")}, config_at(uid="b"), uid="c")

        for config in (config_at(), config_at(uid="c"), config_at()):
            assert read_channel_values(one, config) == {"n": 4, **said("a", "stored")}


@pytest.mark.parametrize("length", [12, 15, 22, 29, 36])
def test_a_put_with_aliases_in_one_group_with_the_first_of_a_namespace(
    tmp_path: Path, length: int
) -> None:
    """What the second reads of the thread has the aliases of the first: history stays whole."""
    path, root, sub = tmp_path / "x.db", list[str](), list[str]()
    with SQLiteCheckpointer.open(path, synchronous="normal") as saver:
        for n in range(length):  # the two namespaces take turns in one log
            upon = (
                (config_at(uid=f"a{n - 1}"), config_at(ns="sub", uid=f"b{n - 1}"))
                if n
                else (None, None)
            )
            root.append(f"r{n}")
            sub.append(f"s{n}")
            put(saver, said(*root), upon[0], uid=f"a{n}")
            put(saver, said(*sub), upon[1], ns="sub", uid=f"b{n}")
        last = aput(saver, "P", said(*root, "last"), f"a{length - 1}")
        asyncio.run(together(saver, last, aput(saver, "J", {"n": 1}, None, ns="other")))
        put(saver, said(*root[1:]), config_at(uid="P"), uid="Q")
        put(saver, said(*root[1:], "more"), config_at(uid="Q"), uid="R")
    with SQLiteCheckpointer.open(path) as fresh:
        assert [item.value.content for item in fresh.history("t")] == [*root, "last", "more"]
        assert read_channel_values(fresh, config_at()) == said(*root[1:], "more")


def test_a_scattered_list_in_one_group_with_the_first_of_a_namespace(tmp_path: Path) -> None:
    """Its parts become aliases at once; the puts that follow go on from them."""
    path, names = tmp_path / "x.db", [f"m{n}" for n in range(120)]
    with SQLiteCheckpointer.open(path) as saver:
        put(saver, said(*names[:60]), uid="a")
        put(saver, said(*names), config_at(uid="a"), uid="b")
        scattered = names[::2]
        course = aput(saver, "c", said(*scattered), None), aput(saver, "J", {"n": 1}, None, ns="o")
        asyncio.run(together(saver, *course))
        upon = "c"
        for n in range(12):
            scattered = [*scattered[:7], *scattered[8:], f"n{n}"]
            put(saver, said(*scattered), config_at(uid=upon), uid=(upon := f"d{n}"))
    with SQLiteCheckpointer.open(path) as fresh:
        told = [item.value.content for item in fresh.history("t", checkpoint_id=upon)]
        assert read_channel_values(fresh, config_at(uid=upon)) == said(*scattered)
    assert told == [*names[::2], *(f"n{n}" for n in range(12))]


class State(TypedDict, total=False):
    d: Any


@pytest.mark.parametrize("durability", ["async", "sync"])
def test_an_input_is_stored_as_it_was_put(
    file_saver: SQLiteCheckpointer, durability: Literal["async", "sync"]
) -> None:
    """Also that of a thread nobody knows yet, whose node changes it in place meanwhile."""

    def change(state: State) -> State:
        state["d"]["x"]["deep"] = "changed by the node"
        return {"d": state["d"]}

    async def course() -> None:
        lock = file_saver.database._connect_once().writer.lock  # type: ignore[attr-defined]
        lock.acquire()  # the disk is slow
        asyncio.get_running_loop().call_later(0.2, lock.release)
        graph: Any = StateGraph(State).add_node("change", change).add_edge(START, "change")
        given = {"d": {"x": {"deep": "as asked"}, "pad": list(range(50))}}
        await graph.compile(checkpointer=file_saver).ainvoke(
            given, config_at(), durability=durability
        )

    put(file_saver, {"n": 1}, thread="other")
    asyncio.run(course())
    (first,) = file_saver.list(config_at(), filter={"source": "input"})

    assert first.checkpoint["channel_values"]["__start__"]["d"]["x"] == {"deep": "as asked"}


def test_metadata_is_stored_as_it_was_put(file_saver: SQLiteCheckpointer) -> None:
    """And the versions that nodes have seen."""

    async def course() -> None:
        with held(file_saver):
            config: Any = config_at(thread="new")
            call = file_saver.aput(config, checkpoint, metadata, checkpoint["channel_versions"])
            tasks = await handed_in(call)
            metadata["tags"].append("later")
            checkpoint["versions_seen"]["node"]["n"] = 2
            checkpoint["channel_versions"]["n"] = 2
        await asyncio.gather(*tasks)

    checkpoint = empty_checkpoint()
    metadata: Any = {"source": "loop", "tags": ["first"]}
    checkpoint["channel_values"], checkpoint["channel_versions"] = {"n": 1}, {"n": 1}
    checkpoint["versions_seen"] = {"node": {"n": 1}}
    put(file_saver, {"n": 1}, thread="other")
    asyncio.run(course())
    found: Any = file_saver.get_tuple(config_at(thread="new"))

    assert found.metadata["tags"] == ["first"]
    assert found.checkpoint["versions_seen"] == {"node": {"n": 1}}
    assert found.checkpoint["channel_versions"] == {"n": 1}


@pytest.mark.parametrize("mishap", ["unstorable", "evicted"])
def test_writes_of_a_task_while_its_thread_is_dropped(
    tmp_path: Path, mishap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a group's statements and its COMMIT what is kept of the thread may go."""
    hook: list[Callable[[], object]] = []

    class Connection(sqlite3.Connection):
        def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
            if sql == "COMMIT" and hook:
                hook.pop()()
            return super().execute(sql, *args)

    def drop() -> None:
        if mishap == "evicted":
            saver._cache.drop_thread("t")
            return
        with monkeypatch.context() as patched:
            patched.setattr(saver._writer, "_build_checkpoint_row", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                put(saver, {"n": 3}, config_at(uid="r2"), uid="r3")

    async def course() -> None:
        with held(saver):
            writes = saver.aput_writes(config_at(ns="b", uid="b2"), [("n", 7)], "task")
            tasks = await handed_in(writes, aput(saver, "c1", {"n": 1}, None, ns="c"))
            hook.extend([drop, lambda: None])  # at the second COMMIT: the first is of `held`
        await asyncio.gather(*tasks)

    with SQLiteCheckpointer.open(tmp_path / "x.db", factory=Connection) as saver:
        put(saver, {"n": 1}, ns="b", uid="b1")
        put(saver, {"n": 1}, uid="r1")
        put(saver, {"n": 2}, config_at(uid="r1"), uid="r2")
        put(saver, {"n": 2}, config_at(ns="b", uid="b1"), ns="b", uid="b2")
        asyncio.run(course())
        while (
            saver.database.get_write_epoch(saver._watch) is None
        ):  # while the connection is in use
            time.sleep(0.01)
        found = saver.get_tuple(config_at(ns="b"))

    assert hook == []
    assert found is not None
    assert found.pending_writes == [("task", "n", 7)]


def test_puts_keep_their_order_though_one_is_stale(
    savers: tuple[SQLiteCheckpointer, SQLiteCheckpointer],
) -> None:
    """The second, handed in before the first is stored, is upon the first."""
    one, other = savers

    async def course() -> None:
        first = aput(one, "c", {"n": 3, "k": "v"}, "b", source="input")
        await asyncio.gather(first, aput(one, "d", {"n": 4, "k": "v"}, "c"))

    put(one, {"n": 1}, uid="a")
    put(one, {"n": 2}, config_at(uid="a"), uid="b")
    put(other, {"n": 1}, ns="other", uid="x")
    asyncio.run(course())

    assert list_checkpoint_ids(other, config_at()) == ["d", "c", "b", "a"]


def test_what_is_kept_stays_within_its_limit(tmp_path: Path) -> None:
    """Also in a process that does nothing but put, and read what it put."""
    limit, text = 1_000_000, "x" * 5000
    path = tmp_path / "x.db"
    with SQLiteCheckpointer.open(path, cache_bytes=limit, synchronous="normal") as saver:
        for n in range(300):
            put(saver, said(text), thread=f"t{n}", uid="a")
            put(saver, said(text, f"{text}y"), config_at(f"t{n}", uid="a"), thread=f"t{n}", uid="b")
            assert read_channel_values(saver, config_at(f"t{n}")) == said(text, f"{text}y")
        sizes = [thread.size_bytes for thread in saver._cache._threads.values()]

    assert sum(sizes) < 2.5 * limit  # it is weighed now and then
    assert 0 < len(sizes) < 200


def test_a_clock_set_back_leaves_the_last_activity(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    with place.saver() as saver:
        put(saver, {"n": 1}, uid="one")
        seen = saver.thread("t").updated_at
    monkeypatch.setattr(time, "time", lambda: now - 86400)
    with place.saver() as saver:
        assert read_channel_values(saver, config_at()) == {"n": 1}  # keeps the head
        saver.put_writes(config_at(uid="one"), [("n", 7)], "task")
        assert saver.thread("t").updated_at == seen
        put(saver, {"n": 2}, config_at(uid="one"), uid="two")
        assert saver.thread("t").updated_at == seen
