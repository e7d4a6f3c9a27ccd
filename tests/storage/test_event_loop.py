"""No awaited method blocks the event loop: langgraph's server forbids it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

import pytest
from blockbuster import BlockingError, blockbuster_ctx
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.runtime import Runtime
from langgraph.store.base import GetOp, Op, PutOp, SearchOp

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError, NotADatabase, StorageUnavailable
from perdure.storage.flow import fetch_rows
from perdure.stores import SQLiteStore
from tests.backends import Place

T: Any = {"configurable": {"thread_id": "t"}}
FACTS = ("facts",)


class State(TypedDict, total=False):
    said: list[str]


@pytest.fixture(autouse=True)
def watch() -> Iterator[None]:
    """Blocking calls in a running event loop raise BlockingError."""
    with blockbuster_ctx():
        yield


async def remember(state: State, runtime: Runtime[None]) -> State:
    store = runtime.store
    assert store is not None
    await store.aput(FACTS, str(len(state["said"])), {"text": state["said"][-1]})
    found = await store.asearch(FACTS, query="tea", limit=3)
    item = await store.aget(FACTS, found[0].key)
    assert item is not None
    return {"said": [*state["said"], item.value["text"]]}


def graph_of(saver: SQLiteCheckpointer, store: SQLiteStore) -> Any:
    graph = StateGraph(State).add_node("remember", remember).add_edge(START, "remember")
    return graph.compile(checkpointer=saver, store=store)


def test_the_watch_sees_what_blocks(tmp_path: Path) -> None:
    """A blocking method in a coroutine is told of, so the other tests can fail."""

    async def course() -> None:
        async with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
            with pytest.raises(BlockingError):
                saver.get_tuple(T)

    asyncio.run(course())


@pytest.mark.parametrize("key", [None, "00" * 32])
def test_a_graph_with_a_store_and_a_checkpointer(key: str | None, place: Place) -> None:
    """Opening, runs, history, search, deletion and closing."""

    async def course() -> tuple[Any, ...]:
        async with place.saver(key=key) as saver, place.store(key=key) as store:
            graph = graph_of(saver, store)
            await graph.ainvoke({"said": ["I like tea"]}, T)
            await graph.ainvoke({"said": ["long " * 100_000]}, T)
            states = [state async for state in graph.aget_state_history(T)]
            saved = [found async for found in saver.alist(T)]
            async with saver.database.lock("t", timeout_s=5):
                head = await saver.aget_tuple(T)
            await saver.adelete_thread("t")
            ops: list[Op] = [
                PutOp(FACTS, "k", {"n": 1}),
                GetOp(FACTS, "1"),
                SearchOp(FACTS, limit=100),
            ]
            batch = await store.abatch(ops)
            spaces = await store.alist_namespaces()
            versions = await store.ahistory(FACTS, "k")
            await store.adelete(FACTS, "k")
            await store.astats()
        return len(states), len(saved), head is not None, len(batch), spaces, len(versions)

    assert asyncio.run(course()) == (6, 6, True, 3, [FACTS], 1)


def test_opened_without_with(tmp_path: Path) -> None:
    """In an event loop nothing is opened until the first call is awaited; outside it is at once."""
    path = tmp_path / "x.db"

    async def course() -> tuple[bool, bool, Any, Any]:
        saver, store = SQLiteCheckpointer.open(path), SQLiteStore.open(path)
        before = await asyncio.to_thread(path.exists)
        await asyncio.gather(*(store.aput(FACTS, str(n), {"n": n}) for n in range(20)))
        after = await asyncio.to_thread(path.exists)
        found = await saver.aget_tuple(T)
        items = await store.asearch(FACTS, limit=100)
        await store.aclose()
        await saver.aclose()
        with pytest.raises(StorageUnavailable, match="is closed"):
            await store.aget(FACTS, "1")
        return before, after, found, len(items)

    assert asyncio.run(course()) == (False, True, None, 20)
    SQLiteStore.open(tmp_path / "y.db").close()
    assert (tmp_path / "y.db").exists()


def test_constructed_and_set_up(tmp_path: Path) -> None:
    """Constructors do no I/O; `setup` opens at once, in an event loop when it is awaited."""
    path = tmp_path / "x.db"

    async def course() -> tuple[bool, bool]:
        saver, store = SQLiteCheckpointer(path), SQLiteStore(path)
        saver.setup()
        store.setup()
        before = await asyncio.to_thread(path.exists)
        await saver.setup()
        after = await asyncio.to_thread(path.exists)
        await store.setup()
        await store.setup()
        await saver.aclose()
        await store.aclose()
        return before, after

    assert asyncio.run(course()) == (False, True)
    for number, one in enumerate((SQLiteCheckpointer, SQLiteStore)):
        opened = one(tmp_path / f"{number}.db")
        assert not (tmp_path / f"{number}.db").exists()
        opened.setup()
        assert (tmp_path / f"{number}.db").exists()
        opened.close()


def test_what_cannot_be_opened_is_told_when_it_is(tmp_path: Path) -> None:
    """Wrong arguments are refused by `open`; a wrong file by the first call that may block."""
    (tmp_path / "notes.txt").write_text("no database at all " * 100)

    async def course() -> None:
        with pytest.raises(ConfigurationError, match="expected 'full' or 'normal'"):
            SQLiteCheckpointer.open(tmp_path / "x.db", synchronous="off")
        with pytest.raises(ConfigurationError, match="without NUL"):
            SQLiteCheckpointer.open("x\0.db")
        with pytest.raises(ConfigurationError, match="does not exist; create it"):
            await SQLiteCheckpointer.open(tmp_path / "absent" / "x.db").aget_tuple(T)
        with pytest.raises(NotADatabase):
            async with SQLiteStore.open(tmp_path / "notes.txt"):
                pass

    asyncio.run(course())
    with pytest.raises(ConfigurationError, match="does not exist; create it"):
        SQLiteCheckpointer.open(tmp_path / "absent" / "x.db")


def test_an_erasure_stops_no_other_thread(tmp_path: Path) -> None:
    """Its work is in another thread, and no collection of garbage, for which all wait, begins."""
    seen: set[tuple[int, int]] = set()

    class Watched(JsonPlusSerializer):
        def loads_typed(self, data: tuple[str, bytes]) -> Any:
            seen.add((threading.get_ident(), gc.get_threshold()[0]))
            return super().loads_typed(data)

    async def course() -> tuple[int, Any]:
        serde = Watched(allowed_msgpack_modules=None)
        async with SQLiteCheckpointer.open(tmp_path / "x.db", serde=serde) as saver:
            graph = StateGraph(MessagesState).add_node("idle", lambda state: {})
            compiled: Any = graph.add_edge(START, "idle").compile(checkpointer=saver)
            said = [HumanMessage(f"says {n}", id=str(n)) for n in range(20)]
            await compiled.ainvoke({"messages": said}, T)
            seen.clear()
            report = await saver.aerase("t", ["3"])
        return threading.get_ident(), report

    loop_thread, report = asyncio.run(course())

    assert report.items > 0
    assert {threshold for _, threshold in seen} == {0}
    assert loop_thread not in {thread for thread, _ in seen}


def test_an_erasure_leaves_nothing_to_the_collector(place: Place) -> None:
    """What it holds of a thread, all items, is freed at its end, and not by a collection."""
    said = [HumanMessage(f"says {n}", id=str(n)) for n in range(5)]
    with place.saver() as saver:
        graph: Any = StateGraph(MessagesState).add_node("idle", lambda state: {})
        graph.add_edge(START, "idle").compile(checkpointer=saver).invoke({"messages": said}, T)
        gc.disable()
        try:
            saver.erase("t", ["3"])
            kinds = [type(thing) for thing in gc.get_objects()]
        finally:
            gc.enable()

    assert [kind for kind in kinds if kind.__module__ == "perdure.checkpointers.erasure"] == []


def test_pages_of_rows_are_awaited(place: Place) -> None:
    """A flow read with aread sees what is written, from many tasks and loop after loop."""

    async def course(start: int) -> list[int]:
        async with place.store(index=None) as store:
            await store.aput(FACTS, str(start), {"n": start})
            pages = await asyncio.gather(
                *(
                    store.database.aread(lambda: fetch_rows("SELECT count(*) FROM store_items"))
                    for _ in range(20)
                )
            )
        return [count for ((count,),) in pages]

    assert [asyncio.run(course(0)), asyncio.run(course(1))] == [[1] * 20, [2] * 20]
