"""A collection: whose memories it reads and writes; the functions for one call."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langgraph.graph import START, StateGraph

from perdure import memory as memory_package
from perdure.effects import run
from perdure.errors import (
    ConfigurationError,
    InvalidConfig,
    InvalidNamespace,
    UnknownMemory,
)
from perdure.memory.collection import Collection
from perdure.memory.gate import Gate
from perdure.memory.records import Candidate, StoreAdapter
from perdure.memory.reducers import ChatState
from perdure.stores import SQLiteStore
from tests.memory.kept import ANN, GHENT, TEA, list_memory_texts

# -- namespaces


def test_namespaces_are_apart(store: Any) -> None:
    """Nobody lists, finds, changes or forgets what is another's, or further down."""
    spaces = [("memories", "a"), ("memories", "a", "b"), ("memories", "ab"), ("memories",)]
    if isinstance(store, SQLiteStore):  # langgraph's own refuse dots
        spaces.append(("memories", "a.b"))
    collections = [Collection(store, space) for space in spaces]
    keys = [collection.insert(f"Fact {n}").key or "" for n, collection in enumerate(collections)]
    for n, collection in enumerate(collections):
        assert [memory.key for memory in collection.list()] == [keys[n]]
        assert [memory.key for memory in collection.search("fact")] == [keys[n]]
        for other in {*keys} - {keys[n]}:
            assert collection.get(other) is None
            assert collection.history(other) == []
            for method in ("delete", "forget"):
                with pytest.raises(UnknownMemory):
                    getattr(collection, method)(other)
            with pytest.raises(UnknownMemory):
                collection.update(other, TEA)


def test_listing_by_pages(store: Any) -> None:
    """All are listed once, whatever lies further down, and of one kind if that is asked."""
    collection, deeper = Collection(store, ("m",)), Collection(store, ("m", "a"), kind="note")
    for number in range(45):
        deeper.insert(f"Deep fact {number}", key=f"d{number}")
    keys = [collection.insert(f"Number {n} is its own fact").key for n in range(5)]
    listed = [m.key for offset in (0, 2, 4, 6) for m in collection.list(limit=2, offset=offset)]

    assert sorted(map(str, listed)) == sorted(map(str, keys))
    assert collection.list(kind="note") == []
    assert len(deeper.list(kind="note")) == 45
    assert len(collection.search("fact", limit=5)) == 5


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"configurable": {}}, InvalidConfig),
        ({"configurable": {"user_id": 5}}, InvalidConfig),
        ({"configurable": {"user_id": ""}}, InvalidConfig),
        (None, InvalidConfig),
    ],
)
def test_a_config_that_does_not_say_whose(store: Any, config: Any, error: Any) -> None:
    """It is refused, and nobody's memories are read or written."""
    collection = Collection(store)
    for method, arguments in (
        ("insert", (TEA,)),
        ("update", ("k", TEA)),
        ("delete", ("k",)),
        ("forget", ("k",)),
        ("get", ("k",)),
        ("history", ("k",)),
        ("search", ("tea",)),
        ("list", ()),
    ):
        with pytest.raises(error):
            getattr(collection, method)(*arguments, config=config)


def test_a_user_cannot_name_where_perdure_keeps_its_notes(store: Any) -> None:
    """An id that would lead there is refused."""
    with pytest.raises(InvalidNamespace):
        Collection(store, ("{user_id}",)).list(config={"configurable": {"user_id": "perdure"}})


@pytest.mark.parametrize("key", ["", None, "a\0b", "\ud800", 1.5])
def test_keys_that_are_none(store: Any, key: Any) -> None:
    """What no memory can be called is refused on every store."""
    with pytest.raises(InvalidNamespace):
        Collection(store).get(key, config=ANN)


def test_what_is_no_memory_is_left_alone(store: Any) -> None:
    """A document without a text, say instructions, is not changed or deleted through it."""
    store.put(("memories", "ann"), "agent", {"instructions": "Be brief."})
    collection = Collection(store)
    for method, arguments in (("update", (TEA,)), ("supersede", (TEA,)), ("delete", ())):
        with pytest.raises(UnknownMemory):
            getattr(collection, method)("agent", *arguments, config=ANN)

    assert collection.get("agent", config=ANN) is not None


def test_within_a_graph(store: Any, call_mode: str) -> None:
    """A node needs to name neither the store nor the config."""
    collection = Collection()

    def keep(state: Any) -> dict[str, Any]:
        collection.insert(TEA)
        return {}

    async def akeep(state: Any) -> dict[str, Any]:
        await collection.ainsert(TEA)
        return {}

    node: Any = keep if call_mode == "sync" else akeep
    builder = StateGraph(ChatState).add_node("keep", node).add_edge(START, "keep")
    graph: Any = builder.compile(store=store)
    if call_mode == "sync":
        graph.invoke({"messages": []}, ANN)
    else:
        asyncio.run(graph.ainvoke({"messages": []}, ANN))

    assert list_memory_texts(Collection(store)) == [TEA]
    with pytest.raises(ConfigurationError, match="no store"):
        collection.list(config=ANN)


# -- the verbs


def called(call_mode: str, name: str, *args: Any, **named: Any) -> Any:
    """What a function of `perdure.memory` gives, in either form."""
    if call_mode == "sync":
        return getattr(memory_package, name)(*args, **named)
    return asyncio.run(getattr(memory_package, f"a{name}")(*args, **named))


def test_remember_memories_forget(store: Any, call_mode: str) -> None:
    """Without a collection; a key that is taken is superseded, and everything can be forgotten."""
    place: dict[str, Any] = {"store": store, "config": ANN}
    outcomes = [
        called(call_mode, "remember", GHENT, key="home", **place),
        called(call_mode, "remember", "Ann lives in Bruges", key="home", **place),
        called(call_mode, "remember", {"text": TEA, "cups": 3}, kind="taste", **place),
        called(call_mode, "remember", TEA.upper(), **place),
    ]
    listed = called(call_mode, "memories", limit=5, **place)
    tastes = called(call_mode, "memories", kind="taste", **place)
    with pytest.raises(ConfigurationError, match="everything=True"):
        called(call_mode, "forget", **place)
    with pytest.raises(ConfigurationError, match="everything=True"):
        called(call_mode, "forget", "home", everything=True, **place)
    forgotten = called(call_mode, "forget", "home", **place)
    rest = called(call_mode, "forget", everything=True, **place)

    assert [outcome.change for outcome in outcomes] == [
        "added", "superseded", "added", "unchanged",
    ]  # fmt: skip
    assert sorted(memory.text for memory in listed) == [TEA, "Ann lives in Bruges"]
    assert [(memory.kind, memory.value["cups"]) for memory in tastes] == [("taste", 3)]
    assert (forgotten.keys[0], rest.items >= 1) == ((("memories", "ann"), "home"), True)
    assert called(call_mode, "memories", **place) == []


def test_nothing_that_a_deleted_memory_ever_said_comes_back() -> None:
    """However often it changed: unasked, not even its first text is kept again."""
    with SQLiteStore.open(":memory:") as store:
        facts, gate = Collection(store, ("memories",)), Gate()
        key = str(facts.insert("Ann lives in Ghent").key)
        for number in range(15):
            facts.supersede(key, f"Ann lives in town {number}")
        facts.delete(key)
        texts = ["Ann lives in Ghent", "Ann lives in town 0", "Ann lives in town 14"]
        asked = [Candidate(text) for text in texts]
        verdicts = run(gate.judge(asked, StoreAdapter(store), ("memories",)))

    assert [verdict.check for verdict in verdicts] == ["tombstone"] * 3
