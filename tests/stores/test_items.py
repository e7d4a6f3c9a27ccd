"""Puts, gets, deletes and batches work as in langgraph's own store."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langgraph.store.base import GetOp, ListNamespacesOp, PutOp, SearchOp

from perdure.errors import InvalidFilter, InvalidValue, PerdureError
from perdure.stores import SQLiteStore
from tests.store_backends import BACKENDS, ONE_CALL_MODE_PER_BACKEND, list_item_keys, put_texts

A = ("users", "alice")
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(st.text(), parts, max_size=4),
    max_leaves=12,
)


def test_get_returns_value_key_namespace_and_times_of_put(any_store: SQLiteStore) -> None:
    any_store.put(A, "k", {"text": "tea", "deep": {"list": [1, 2.5, None, True, "x"]}})
    item = any_store.get(A, "k")

    assert item is not None
    assert item.value == {"text": "tea", "deep": {"list": [1, 2.5, None, True, "x"]}}
    assert (item.key, item.namespace) == ("k", A)
    assert item.created_at <= item.updated_at


def test_get_of_missing_key_returns_none(any_store: SQLiteStore) -> None:
    """A key that was never put is None, in an existing namespace and in a missing one."""
    any_store.put(A, "k", {"text": "tea"})

    assert any_store.get(A, "other") is None
    assert any_store.get(("nobody",), "k") is None
    assert any_store.get(A[:1], "k") is None


def test_put_replaces_the_whole_value(any_store: SQLiteStore) -> None:
    any_store.put(A, "k", {"text": "tea", "more": 1})
    any_store.put(A, "k", {"text": "coffee"})
    item = any_store.get(A, "k")

    assert item is not None
    assert item.value == {"text": "coffee"}
    assert list_item_keys(any_store.search(A)) == ["k"]


def test_deleted_item_is_neither_returned_nor_found(any_store: SQLiteStore) -> None:
    """Deleting an item that does not exist is not an error."""
    put_texts(any_store, A, a="tea", b="tea too")
    any_store.delete(A, "a")
    any_store.delete(A, "a")
    any_store.delete(("nobody",), "a")

    assert any_store.get(A, "a") is None
    assert list_item_keys(any_store.search(A)) == ["b"]
    assert list_item_keys(any_store.search(A, query="tea")) == ["b"]


def test_similar_keys_are_different_items(any_store: SQLiteStore) -> None:
    """Keys that differ in case, accent form, spaces or symbols are different keys."""
    names = ["k", "K", "k ", "é", "e\u0301", "ß", "ss", "a.b", "%", "_", "*", "'", '"', "\n", "🦊"]
    for number, name in enumerate(names):
        any_store.put(A, name, {"n": number})

    assert list(range(len(names))) == [any_store.get(A, name).value["n"] for name in names]  # type: ignore[union-attr]


def test_changing_a_returned_value_does_not_change_the_store(store: SQLiteStore) -> None:
    store.put(A, "k", {"list": [1]})
    for returned in (store.get(A, "k"), store.search(A)[0], store.search(A, as_of=None)[0]):
        assert returned is not None
        returned.value["list"].append(2)
    item = store.get(A, "k")

    assert item is not None
    assert item.value == {"list": [1]}


def test_changing_a_value_after_put_does_not_change_the_store(store: SQLiteStore) -> None:
    value = {"list": [1]}
    store.put(A, "k", value)
    value["list"].append(2)
    item = store.get(A, "k")

    assert item is not None
    assert item.value == {"list": [1]}


@given(value=st.dictionaries(st.text(), JSON, max_size=5))
def test_any_json_value_comes_back_equal(value: dict[str, Any]) -> None:
    """The value has the same types in the results of get and of search."""
    with SQLiteStore.open(":memory:", index=None) as store:
        store.put(A, "k", value)
        item = store.get(A, "k")
        results = store.search(A)

    assert item is not None
    assert repr(value) == repr(item.value) == repr(results[0].value)


def test_integer_and_uuid_keys_are_stored_as_text(any_store: SQLiteStore) -> None:
    """langgraph's stores convert such keys to text as well."""
    uid = UUID(int=7)
    any_store.put(A, 7, {"n": 7})  # type: ignore[arg-type]
    any_store.put(A, uid, {"n": 8})  # type: ignore[arg-type]

    assert any_store.get(A, "7").value == {"n": 7}  # type: ignore[union-attr]
    assert any_store.get(A, str(uid)).value == {"n": 8}  # type: ignore[union-attr]


# -- batches


def test_batch_returns_results_in_order_of_operations(any_store: SQLiteStore) -> None:
    put_texts(any_store, A, a="tea")
    got, put, results, spaces = any_store.batch(
        [
            GetOp(A, "a"),
            PutOp(A, "b", {"text": "milk"}),
            SearchOp(A),
            ListNamespacesOp(),
        ]
    )

    assert got is not None
    assert got.key == "a"  # type: ignore[union-attr]
    assert put is None
    assert list_item_keys(results) == ["a"]  # type: ignore[arg-type]
    assert spaces == [A]


def test_get_in_batch_reads_state_before_the_batch(any_store: SQLiteStore) -> None:
    """A get after a put in the same batch returns the value from before the batch."""
    put_texts(any_store, A, a="tea")
    answers = any_store.batch(
        [PutOp(A, "a", {"text": "coffee"}), PutOp(A, "b", {"text": "b"}), GetOp(A, "a")]
    )
    later = any_store.get(A, "a")

    assert answers[2].value == {"text": "tea"}  # type: ignore[union-attr]
    assert later is not None
    assert later.value == {"text": "coffee"}


def test_last_put_or_delete_of_a_key_in_a_batch_wins(any_store: SQLiteStore) -> None:
    put_texts(any_store, A, a="tea", b="tea")
    any_store.batch(
        [
            PutOp(A, "a", {"text": "1"}),
            PutOp(A, "a", {"text": "2"}),
            PutOp(A, "b", {"text": "1"}),
            PutOp(A, "b", None),
            PutOp(A, "c", None),
            PutOp(A, "c", {"text": "3"}),
        ]
    )
    values = {item.key: item.value["text"] for item in any_store.search(A)}

    assert values == {"a": "2", "c": "3"}


def test_empty_batch_returns_empty_list(any_store: SQLiteStore) -> None:
    assert any_store.batch([]) == []


BAD_OPERATIONS = [
    (PutOp(A, "x", {"n": object()}), InvalidValue),
    (SearchOp(A, filter={"n": {"$what": 1}}), InvalidFilter),
    (GetOp((), ""), PerdureError),
    (SearchOp(A, limit=-1), PerdureError),
    (PutOp(None, "x", {}), PerdureError),  # type: ignore[arg-type]
    (PutOp((["x"],), "x", {}), PerdureError),  # type: ignore[arg-type]
    ("not an operation", PerdureError),
]


@ONE_CALL_MODE_PER_BACKEND
@pytest.mark.parametrize(
    ("bad_operation", "expected_error"), BAD_OPERATIONS, ids=lambda each: type(each).__name__
)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_batch_with_bad_operation_is_refused_and_writes_nothing(
    bad_operation: Any, expected_error: type[Exception], position: int, store: SQLiteStore
) -> None:
    ops: list[Any] = [PutOp(A, "a", {"text": "1"}), PutOp(A, "b", {"text": "2"})]
    ops.insert(position, bad_operation)
    with pytest.raises(expected_error):
        store.batch(ops)

    assert store.search(A) == []
    assert store.list_namespaces() == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_concurrent_call_does_not_affect_other_calls(backend: str, tmp_path: Path) -> None:
    """Good calls that run at the same moment as bad ones succeed as if they were alone."""

    async def run_calls(store: SQLiteStore) -> list[Any]:
        calls: list[Any] = []
        for number in range(20):
            calls += [
                store.aput(A, f"k{number}", {"n": number}),
                store.aput(A, f"x{number}", {"n": {1}}),
                store.aput(A, "same", {"n": number}, if_version=99),
                store.asearch(A, filter={"n": {"$what": 1}}),
                store.abatch([PutOp(A, f"y{number}", {}), PutOp(A, "", {})]),
                store.abatch([PutOp(A, f"z{number}", {"n": number}), GetOp(A, "nothing")]),
            ]
        return await asyncio.gather(*calls, return_exceptions=True)

    with BACKENDS[backend](tmp_path) as store:
        answers = asyncio.run(run_calls(store))
        stored = sorted(list_item_keys(store.search(A, limit=100)))

    assert sorted(f"{name}{n}" for name in "kz" for n in range(20)) == stored
    for number in range(20):
        good, *bad, batch = answers[6 * number : 6 * number + 6]
        assert good is None
        assert all(isinstance(error, PerdureError) for error in bad)
        assert batch == [None, None]
