"""A store used together with a checkpointer, in graphs, and with indexes on paths."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langgraph.graph import START, StateGraph
from langgraph.runtime import Runtime
from langgraph.store.base import PutOp

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError
from perdure.stores import SQLiteStore
from tests.backends import KEY
from tests.store_backends import list_item_keys, make_options

A = ("a",)


class State(TypedDict, total=False):
    said: str
    known: str


def search_and_put_in_node(state: State, runtime: Runtime[None]) -> State:
    store = runtime.store
    assert store is not None
    results = store.search(A, query=state["said"], limit=1)
    store.put(A, state["said"], {"text": state["said"]})
    return {"known": results[0].value["text"] if results else ""}


async def asearch_and_put_in_node(state: State, runtime: Runtime[None]) -> State:
    store = runtime.store
    assert store is not None
    results = await store.asearch(A, query=state["said"], limit=1)
    await store.aput(A, state["said"], {"text": state["said"]})
    return {"known": results[0].value["text"] if results else ""}


@pytest.mark.parametrize("key", [None, KEY])
def test_store_and_checkpointer_share_one_file_and_writer(
    key: bytes | None, tmp_path: Path
) -> None:
    """A graph uses both together."""
    path = tmp_path / "x.db"
    config: Any = {"configurable": {"thread_id": "t"}}
    before = {*threading.enumerate()}
    with (
        SQLiteCheckpointer.open(path, key=key) as saver,
        SQLiteStore.open(path, key=key, **make_options(synchronous="full")) as store,
    ):
        graph = (
            StateGraph(State)
            .add_node("remember", search_and_put_in_node)
            .add_edge(START, "remember")
        )
        compiled = graph.compile(checkpointer=saver, store=store)
        first = compiled.invoke({"said": "my car"}, config)
        second = compiled.invoke({"said": "automobile"}, config)
        writers = [t for t in {*threading.enumerate()} - before if t.name == "perdure-write"]
        threads = [info.thread_id for info in saver.threads()]

    assert (first["known"], second["known"]) == ("", "my car")
    assert len(writers) == 1
    assert threads == ["t"]


def test_async_node_uses_store_of_compiled_graph() -> None:
    async def run(store: SQLiteStore) -> Any:
        graph = (
            StateGraph(State)
            .add_node("remember", asearch_and_put_in_node)
            .add_edge(START, "remember")
        )
        compiled = graph.compile(store=store)
        await compiled.ainvoke({"said": "my car"})
        return await compiled.ainvoke({"said": "automobile"})

    with SQLiteStore.open(":memory:", **make_options()) as store:
        assert asyncio.run(run(store))["known"] == "my car"


def fill_store(store: SQLiteStore) -> None:
    store.batch(
        [
            PutOp((f"n{n % 3}",), f"k{n}", {"n": n, "a": {"b": n % 50}, "kind": f"kind {n % 7}"})
            for n in range(300)
        ]
    )


FILTERS: list[tuple[str, dict[str, Any]]] = [
    ("n", {"n": 7}),
    ("n", {"n": {"$gte": 290}}),
    ("a.b", {"a.b": 3}),
    ("a.b", {"a.b": {"$in": [3, 4]}}),
    ("kind", {"kind": "kind 3", "n": {"$lt": 40}}),
]


@pytest.mark.parametrize(("path", "filter"), FILTERS, ids=str)
def test_path_index_is_used_and_does_not_change_results(
    path: str, filter: dict[str, Any], tmp_path: Path
) -> None:
    """`explain_query` names the index for filters that it serves."""
    with SQLiteStore.open(tmp_path / "x.db", index=None) as store:
        fill_store(store)
        before = [store.search(prefix, filter=filter, limit=99) for prefix in ((), ("n1",))]
        unused = store.explain_query((), filter=filter)
        store.create_index(path)
        store.create_index(path)
        used = store.explain_query((), filter=filter)
        other = store.explain_query((), filter={"other": 1})
        after = [store.search(prefix, filter=filter, limit=99) for prefix in ((), ("n1",))]
        store.put(("n1",), "new", {"n": 7, "a": {"b": 3}, "kind": "kind 3"})
        again = list_item_keys(store.search((), filter=filter, limit=99))

    assert unused.indexes == other.indexes == ()
    assert used.indexes == (path,)
    assert any("<expr>" in step for step in used.steps)
    assert before == after
    assert all(before)
    assert ("new" in again) == (filter != FILTERS[1][1])


def test_create_index_is_refused_for_encrypted_values(tmp_path: Path) -> None:
    """Filters still work on encrypted values."""
    with SQLiteStore.open(tmp_path / "x.db", index=None, key=KEY) as store:
        fill_store(store)
        with pytest.raises(ConfigurationError, match="encrypted"):
            store.create_index("n")

        assert list_item_keys(store.search((), filter={"n": 7})) == ["k7"]
        assert store.explain_query((), filter={"n": 7}).indexes == ()


@pytest.mark.parametrize("text_index", ["sealed", "keyed"])
def test_encrypted_file_contains_no_clear_text(text_index: Any, tmp_path: Path) -> None:
    """Neither the file nor its WAL contains readable values or words."""
    options = make_options(key=KEY, text_index=text_index)
    with SQLiteStore.open(tmp_path / "x.db", **options) as store:
        for n in range(50):
            store.put(A, f"k{n}", {"text": f"the quokka eats {n} leaves", "n": n})
        store.delete(A, "k1")
        files = [path.read_bytes() for path in tmp_path.iterdir()]

    assert sum(map(len, files)) > 10_000
    assert not any(word in body for body in files for word in (b"quokka", b"leaves", b"leav"))


def test_from_conn_string_opens_store_and_setup_does_nothing(tmp_path: Path) -> None:
    """langgraph's stores are opened with these two methods."""
    with SQLiteStore.from_conn_string(str(tmp_path / "x.db"), index=None) as store:
        store.setup()
        store.put(A, "k", {"n": 1})
    with SQLiteStore.from_conn_string(":memory:", index=None) as store:
        assert store.get(A, "k") is None
