"""A collection: the namespaces that it reads and writes, and the functions for single calls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langgraph.graph import START, StateGraph

from perdure import memory as memory_package
from perdure.effects import run_operation
from perdure.errors import (
    ConfigurationError,
    InvalidConfig,
    InvalidNamespace,
    UnknownMemory,
)
from perdure.memory.long_term.collection import Collection
from perdure.memory.long_term.gate import Gate
from perdure.memory.long_term.records import Candidate, StoreAdapter
from perdure.memory.short_term.reducers import ChatState
from perdure.stores import SQLiteStore
from tests.memory.collection_helpers import ANN, GHENT, TEA, list_memory_texts

# -- namespaces


def test_collections_of_different_namespaces_do_not_see_each_other(store: Any) -> None:
    """A namespace and its descendants are separate too."""
    spaces = [("memories", "a"), ("memories", "a", "b"), ("memories", "ab"), ("memories",)]
    if isinstance(store, SQLiteStore):  # stores of langgraph refuse dots
        spaces.append(("memories", "a.b"))
    collections = [Collection(store, space) for space in spaces]
    keys = [collection.insert(f"Fact {n}").key or "" for n, collection in enumerate(collections)]
    for n, collection in enumerate(collections):
        assert [memory.key for memory in collection.list()] == [keys[n]]
        assert [memory.key for memory in collection.search("fact")] == [keys[n]]
        for other_key in {*keys} - {keys[n]}:
            assert collection.get(other_key) is None
            assert collection.history(other_key) == []
            for method in ("delete", "forget"):
                with pytest.raises(UnknownMemory):
                    getattr(collection, method)(other_key)
            with pytest.raises(UnknownMemory):
                collection.update(other_key, TEA)


def test_list_pages_through_one_namespace_without_its_descendants(store: Any) -> None:
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
def test_config_without_a_valid_user_id_is_refused_by_all_methods(
    store: Any, config: Any, error: Any
) -> None:
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


def test_user_id_that_leads_to_perdure_own_namespace_is_refused(store: Any) -> None:
    with pytest.raises(InvalidNamespace):
        Collection(store, ("{user_id}",)).list(config={"configurable": {"user_id": "perdure"}})


@pytest.mark.parametrize("key", ["", None, "a\0b", "\ud800", 1.5])
def test_invalid_keys_are_refused_on_every_store(store: Any, key: Any) -> None:
    with pytest.raises(InvalidNamespace):
        Collection(store).get(key, config=ANN)


def test_document_without_a_text_cannot_be_changed_or_deleted(store: Any) -> None:
    """Instructions are an example of such a document."""
    store.put(("memories", "ann"), "agent", {"instructions": "Be brief."})
    collection = Collection(store)
    for method, arguments in (("update", (TEA,)), ("supersede", (TEA,)), ("delete", ())):
        with pytest.raises(UnknownMemory):
            getattr(collection, method)("agent", *arguments, config=ANN)

    assert collection.get("agent", config=ANN) is not None


def test_collection_in_a_node_uses_the_store_and_config_of_the_run(
    store: Any, call_mode: str
) -> None:
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
    with pytest.raises(ConfigurationError, match="need a store"):
        collection.list(config=ANN)


# -- functions without a collection


def call_function(call_mode: str, name: str, *args: Any, **options: Any) -> Any:
    """Call a function of `perdure.memory` in its synchronous or asynchronous form."""
    if call_mode == "sync":
        return getattr(memory_package, name)(*args, **options)
    return asyncio.run(getattr(memory_package, f"a{name}")(*args, **options))


def test_remember_memories_and_forget_work_without_a_collection(store: Any, call_mode: str) -> None:
    """A taken key is superseded. All memories can be forgotten at once."""
    options: dict[str, Any] = {"store": store, "config": ANN}
    outcomes = [
        call_function(call_mode, "remember", GHENT, key="home", **options),
        call_function(call_mode, "remember", "Ann lives in Bruges", key="home", **options),
        call_function(call_mode, "remember", {"text": TEA, "cups": 3}, kind="taste", **options),
        call_function(call_mode, "remember", TEA.upper(), **options),
    ]
    listed = call_function(call_mode, "memories", limit=5, **options)
    tastes = call_function(call_mode, "memories", kind="taste", **options)
    with pytest.raises(ConfigurationError, match="everything=True"):
        call_function(call_mode, "forget", **options)
    with pytest.raises(ConfigurationError, match="everything=True"):
        call_function(call_mode, "forget", "home", everything=True, **options)
    receipt = call_function(call_mode, "forget", "home", **options)
    rest_receipt = call_function(call_mode, "forget", everything=True, **options)

    assert [outcome.change for outcome in outcomes] == [
        "added", "superseded", "added", "unchanged",
    ]  # fmt: skip
    assert sorted(memory.text for memory in listed) == [TEA, "Ann lives in Bruges"]
    assert [(memory.kind, memory.value["cups"]) for memory in tastes] == [("taste", 3)]
    assert (receipt.keys[0], rest_receipt.items >= 1) == ((("memories", "ann"), "home"), True)
    assert call_function(call_mode, "memories", **options) == []


@pytest.mark.parametrize(
    "refused",
    [
        {"dry_run": True},
        {"hand_over": True},
        {"namespaces": [("notes", "{user_id}")]},
        {"conversations": ["t"]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_forgetting_one_namespace_refuses_options_for_a_whole_person(
    store: Any, call_mode: str, refused: dict[str, Any]
) -> None:
    """A dry run of one namespace would otherwise erase it."""
    options: dict[str, Any] = {"store": store, "config": ANN, "namespace": ("notes", "{user_id}")}
    call_function(call_mode, "remember", GHENT, **options)
    with pytest.raises(ConfigurationError, match=r"namespace=.* cannot be combined with"):
        call_function(call_mode, "forget", everything=True, **refused, **options)

    assert len(call_function(call_mode, "memories", **options)) == 1


def test_gate_refuses_any_former_text_of_a_deleted_memory() -> None:
    """Even the first of many former texts is refused."""
    with SQLiteStore.open(":memory:") as store:
        facts, gate = Collection(store, ("memories",)), Gate()
        key = str(facts.insert("Ann lives in Ghent").key)
        for number in range(15):
            facts.supersede(key, f"Ann lives in town {number}")
        facts.delete(key)
        texts = ["Ann lives in Ghent", "Ann lives in town 0", "Ann lives in town 14"]
        candidates = [Candidate(text) for text in texts]
        verdicts = run_operation(gate.judge(candidates, StoreAdapter(store), ("memories",)))

    assert [verdict.check for verdict in verdicts] == ["tombstone"] * 3
