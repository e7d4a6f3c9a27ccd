"""A store beside other things: a checkpointer in the same file, graphs, indexes on paths."""

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
from tests.store_backends import keys, of_words

A = ("a",)


class State(TypedDict, total=False):
    said: str
    known: str


def remember(state: State, runtime: Runtime[None]) -> State:
    store = runtime.store
    assert store is not None
    found = store.search(A, query=state["said"], limit=1)
    store.put(A, state["said"], {"text": state["said"]})
    return {"known": found[0].value["text"] if found else ""}


async def aremember(state: State, runtime: Runtime[None]) -> State:
    store = runtime.store
    assert store is not None
    found = await store.asearch(A, query=state["said"], limit=1)
    await store.aput(A, state["said"], {"text": state["said"]})
    return {"known": found[0].value["text"] if found else ""}


@pytest.mark.parametrize("key", [None, KEY])
def test_a_file_shared_with_a_checkpointer(key: bytes | None, tmp_path: Path) -> None:
    """Both live in one file with one writer; a graph uses them together."""
    path = tmp_path / "x.db"
    config: Any = {"configurable": {"thread_id": "t"}}
    before = {*threading.enumerate()}
    with (
        SQLiteCheckpointer.open(path, key=key) as saver,
        SQLiteStore.open(path, key=key, **of_words(synchronous="full")) as store,
    ):
        graph = StateGraph(State).add_node("remember", remember).add_edge(START, "remember")
        compiled = graph.compile(checkpointer=saver, store=store)
        first = compiled.invoke({"said": "my car"}, config)
        second = compiled.invoke({"said": "automobile"}, config)
        writers = [t for t in {*threading.enumerate()} - before if t.name == "perdure-write"]
        threads = [info.thread_id for info in saver.threads()]

    assert (first["known"], second["known"]) == ("", "my car")
    assert len(writers) == 1
    assert threads == ["t"]


def test_a_graph_of_coroutines() -> None:
    """`graph.compile(store=...)` hands the store to nodes; coroutines await it."""

    async def run(store: SQLiteStore) -> Any:
        graph = StateGraph(State).add_node("remember", aremember).add_edge(START, "remember")
        compiled = graph.compile(store=store)
        await compiled.ainvoke({"said": "my car"})
        return await compiled.ainvoke({"said": "automobile"})

    with SQLiteStore.open(":memory:", **of_words()) as store:
        assert asyncio.run(run(store))["known"] == "my car"


def filled(store: SQLiteStore) -> None:
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
def test_an_index_on_a_path(path: str, filter: dict[str, Any], tmp_path: Path) -> None:
    """It is used where it serves, told by explain_query, and changes no answer."""
    with SQLiteStore.open(tmp_path / "x.db", index=None) as store:
        filled(store)
        before = [store.search(prefix, filter=filter, limit=99) for prefix in ((), ("n1",))]
        unused = store.explain_query((), filter=filter)
        store.create_index(path)
        store.create_index(path)
        used = store.explain_query((), filter=filter)
        other = store.explain_query((), filter={"other": 1})
        after = [store.search(prefix, filter=filter, limit=99) for prefix in ((), ("n1",))]
        store.put(("n1",), "new", {"n": 7, "a": {"b": 3}, "kind": "kind 3"})
        again = keys(store.search((), filter=filter, limit=99))

    assert unused.indexes == other.indexes == ()
    assert used.indexes == (path,)
    assert any("<expr>" in step for step in used.steps)
    assert before == after
    assert all(before)
    assert ("new" in again) == (filter != FILTERS[1][1])


def test_no_index_on_encrypted_values(tmp_path: Path) -> None:
    """With a key values cannot be indexed by path, and the error says so; filters still work."""
    with SQLiteStore.open(tmp_path / "x.db", index=None, key=KEY) as store:
        filled(store)
        with pytest.raises(ConfigurationError, match="encrypted"):
            store.create_index("n")

        assert keys(store.search((), filter={"n": 7})) == ["k7"]
        assert store.explain_query((), filter={"n": 7}).indexes == ()


@pytest.mark.parametrize("text_index", ["sealed", "keyed"])
def test_an_encrypted_file_holds_nothing_in_clear(text_index: Any, tmp_path: Path) -> None:
    """Values, words and provenance are not to be read from the bytes of the file or its log."""
    options = of_words(key=KEY, text_index=text_index)
    with SQLiteStore.open(tmp_path / "x.db", **options) as store:
        for n in range(50):
            store.put(A, f"k{n}", {"text": f"the quokka eats {n} leaves", "n": n})
        store.delete(A, "k1")
        files = [path.read_bytes() for path in tmp_path.iterdir()]

    assert sum(map(len, files)) > 10_000
    assert not any(word in body for body in files for word in (b"quokka", b"leaves", b"leav"))


def test_from_conn_string(tmp_path: Path) -> None:
    """The name langgraph's stores open by; `setup` does nothing and is there."""
    with SQLiteStore.from_conn_string(str(tmp_path / "x.db"), index=None) as store:
        store.setup()
        store.put(A, "k", {"n": 1})
    with SQLiteStore.from_conn_string(":memory:", index=None) as store:
        assert store.get(A, "k") is None
