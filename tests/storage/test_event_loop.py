"""No awaited method blocks the event loop, because langgraph's server forbids this."""

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

CONFIG: Any = {"configurable": {"thread_id": "t"}}
FACTS = ("facts",)


class State(TypedDict, total=False):
    said: list[str]


@pytest.fixture(autouse=True)
def _detect_blocking_calls() -> Iterator[None]:
    """Make blocking calls in a running event loop raise BlockingError."""
    with blockbuster_ctx():
        yield


async def remember(state: State, runtime: Runtime[None]) -> State:
    store = runtime.store
    assert store is not None
    await store.aput(FACTS, str(len(state["said"])), {"text": state["said"][-1]})
    items = await store.asearch(FACTS, query="tea", limit=3)
    item = await store.aget(FACTS, items[0].key)
    assert item is not None
    return {"said": [*state["said"], item.value["text"]]}


def build_graph(saver: SQLiteCheckpointer, store: SQLiteStore) -> Any:
    graph = StateGraph(State).add_node("remember", remember).add_edge(START, "remember")
    return graph.compile(checkpointer=saver, store=store)


def test_blocking_call_in_a_coroutine_is_detected(tmp_path: Path) -> None:
    """Without this, the other tests could not fail."""

    async def call_blocking_method() -> None:
        async with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
            with pytest.raises(BlockingError):
                saver.get_tuple(CONFIG)

    asyncio.run(call_blocking_method())


@pytest.mark.parametrize("key", [None, "00" * 32])
def test_awaited_methods_of_saver_and_store_do_not_block(key: str | None, place: Place) -> None:
    """The calls open, run, list, search, delete and close."""

    async def call_all_methods() -> tuple[Any, ...]:
        async with place.saver(key=key) as saver, place.store(key=key) as store:
            graph = build_graph(saver, store)
            await graph.ainvoke({"said": ["I like tea"]}, CONFIG)
            await graph.ainvoke({"said": ["long " * 100_000]}, CONFIG)
            states = [state async for state in graph.aget_state_history(CONFIG)]
            records = [record async for record in saver.alist(CONFIG)]
            async with saver.database.lock("t", timeout_s=5):
                head = await saver.aget_tuple(CONFIG)
            await saver.adelete_thread("t")
            ops: list[Op] = [
                PutOp(FACTS, "k", {"n": 1}),
                GetOp(FACTS, "1"),
                SearchOp(FACTS, limit=100),
            ]
            batch = await store.abatch(ops)
            namespaces = await store.alist_namespaces()
            versions = await store.ahistory(FACTS, "k")
            await store.adelete(FACTS, "k")
            await store.astats()
        return len(states), len(records), head is not None, len(batch), namespaces, len(versions)

    assert asyncio.run(call_all_methods()) == (6, 6, True, 3, [FACTS], 1)


def test_open_in_an_event_loop_defers_io_to_the_first_call(tmp_path: Path) -> None:
    """Outside an event loop, `open` opens the file at once."""
    path = tmp_path / "x.db"

    async def open_and_call() -> tuple[bool, bool, Any, Any]:
        saver, store = SQLiteCheckpointer.open(path), SQLiteStore.open(path)
        exists_before = await asyncio.to_thread(path.exists)
        await asyncio.gather(*(store.aput(FACTS, str(n), {"n": n}) for n in range(20)))
        exists_after = await asyncio.to_thread(path.exists)
        record = await saver.aget_tuple(CONFIG)
        items = await store.asearch(FACTS, limit=100)
        await store.aclose()
        await saver.aclose()
        with pytest.raises(StorageUnavailable, match="is closed"):
            await store.aget(FACTS, "1")
        return exists_before, exists_after, record, len(items)

    assert asyncio.run(open_and_call()) == (False, True, None, 20)
    SQLiteStore.open(tmp_path / "y.db").close()
    assert (tmp_path / "y.db").exists()


def test_setup_opens_the_database_when_awaited(tmp_path: Path) -> None:
    """Constructors do no I/O. Outside an event loop, `setup` opens the database at once."""
    path = tmp_path / "x.db"

    async def set_up() -> tuple[bool, bool]:
        saver, store = SQLiteCheckpointer(path), SQLiteStore(path)
        saver.setup()
        store.setup()
        exists_before = await asyncio.to_thread(path.exists)
        await saver.setup()
        exists_after = await asyncio.to_thread(path.exists)
        await store.setup()
        await store.setup()
        await saver.aclose()
        await store.aclose()
        return exists_before, exists_after

    assert asyncio.run(set_up()) == (False, True)
    for number, component in enumerate((SQLiteCheckpointer, SQLiteStore)):
        instance = component(tmp_path / f"{number}.db")
        assert not (tmp_path / f"{number}.db").exists()
        instance.setup()
        assert (tmp_path / f"{number}.db").exists()
        instance.close()


def test_unusable_file_is_refused_by_the_first_awaited_call(tmp_path: Path) -> None:
    """Wrong arguments are refused by `open` itself."""
    (tmp_path / "notes.txt").write_text("no database at all " * 100)

    async def open_unusable_files() -> None:
        with pytest.raises(ConfigurationError, match="expected 'full' or 'normal'"):
            SQLiteCheckpointer.open(tmp_path / "x.db", synchronous="off")
        with pytest.raises(ConfigurationError, match="without NUL"):
            SQLiteCheckpointer.open("x\0.db")
        with pytest.raises(ConfigurationError, match="does not exist; create it"):
            await SQLiteCheckpointer.open(tmp_path / "absent" / "x.db").aget_tuple(CONFIG)
        with pytest.raises(NotADatabase):
            async with SQLiteStore.open(tmp_path / "notes.txt"):
                pass

    asyncio.run(open_unusable_files())
    with pytest.raises(ConfigurationError, match="does not exist; create it"):
        SQLiteCheckpointer.open(tmp_path / "absent" / "x.db")


def test_erasure_runs_in_another_thread_without_garbage_collection(tmp_path: Path) -> None:
    """A garbage collection would stop all threads."""
    threads_and_thresholds: set[tuple[int, int]] = set()

    class Watched(JsonPlusSerializer):
        def loads_typed(self, data: tuple[str, bytes]) -> Any:
            threads_and_thresholds.add((threading.get_ident(), gc.get_threshold()[0]))
            return super().loads_typed(data)

    async def run_and_erase() -> tuple[int, Any]:
        serde = Watched(allowed_msgpack_modules=None)
        async with SQLiteCheckpointer.open(tmp_path / "x.db", serde=serde) as saver:
            graph = StateGraph(MessagesState).add_node("idle", lambda state: {})
            compiled: Any = graph.add_edge(START, "idle").compile(checkpointer=saver)
            messages = [HumanMessage(f"says {n}", id=str(n)) for n in range(20)]
            await compiled.ainvoke({"messages": messages}, CONFIG)
            threads_and_thresholds.clear()
            report = await saver.aerase("t", ["3"])
        return threading.get_ident(), report

    loop_thread, report = asyncio.run(run_and_erase())

    assert report.items > 0
    assert {threshold for _, threshold in threads_and_thresholds} == {0}
    assert loop_thread not in {thread for thread, _ in threads_and_thresholds}


def test_erasure_leaves_no_objects_to_the_garbage_collector(place: Place) -> None:
    """The items of the thread are freed when the erasure ends, without a collection."""
    messages = [HumanMessage(f"says {n}", id=str(n)) for n in range(5)]
    with place.saver() as saver:
        graph: Any = StateGraph(MessagesState).add_node("idle", lambda state: {})
        graph.add_edge(START, "idle").compile(checkpointer=saver).invoke(
            {"messages": messages}, CONFIG
        )
        gc.disable()
        try:
            saver.erase("t", ["3"])
            kinds = [type(thing) for thing in gc.get_objects()]
        finally:
            gc.enable()

    assert [kind for kind in kinds if kind.__module__ == "perdure.checkpointers.erasure"] == []


def test_aread_returns_rows_to_many_tasks_and_event_loops(place: Place) -> None:
    """Each event loop sees what was written before."""

    async def count_rows_in_tasks(start: int) -> list[int]:
        async with place.store(index=None) as store:
            await store.aput(FACTS, str(start), {"n": start})
            pages = await asyncio.gather(
                *(
                    store.database.aread(lambda: fetch_rows("SELECT count(*) FROM store_items"))
                    for _ in range(20)
                )
            )
        return [count for ((count,),) in pages]

    assert [asyncio.run(count_rows_in_tasks(0)), asyncio.run(count_rows_in_tasks(1))] == [
        [1] * 20,
        [2] * 20,
    ]
