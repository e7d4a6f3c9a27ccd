"""Putting, getting, deleting and batches, as in langgraph's own store."""

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
from tests.store_backends import BACKENDS, FEWER, keys, write

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


def test_what_is_put_is_got(any_store: SQLiteStore) -> None:
    """An item comes back with its value, key, namespace and times."""
    any_store.put(A, "k", {"text": "tea", "deep": {"list": [1, 2.5, None, True, "x"]}})
    item = any_store.get(A, "k")

    assert item is not None
    assert item.value == {"text": "tea", "deep": {"list": [1, 2.5, None, True, "x"]}}
    assert (item.key, item.namespace) == ("k", A)
    assert item.created_at <= item.updated_at


def test_what_is_missing(any_store: SQLiteStore) -> None:
    """A key that was never put is None, in a namespace that exists and in one that does not."""
    any_store.put(A, "k", {"text": "tea"})

    assert any_store.get(A, "other") is None
    assert any_store.get(("nobody",), "k") is None
    assert any_store.get(A[:1], "k") is None


def test_a_put_replaces(any_store: SQLiteStore) -> None:
    """The value is replaced as a whole."""
    any_store.put(A, "k", {"text": "tea", "more": 1})
    any_store.put(A, "k", {"text": "coffee"})
    item = any_store.get(A, "k")

    assert item is not None
    assert item.value == {"text": "coffee"}
    assert keys(any_store.search(A)) == ["k"]


def test_a_delete_removes(any_store: SQLiteStore) -> None:
    """What is deleted is neither got nor found; deleting what is not there is no error."""
    write(any_store, A, a="tea", b="tea too")
    any_store.delete(A, "a")
    any_store.delete(A, "a")
    any_store.delete(("nobody",), "a")

    assert any_store.get(A, "a") is None
    assert keys(any_store.search(A)) == ["b"]
    assert keys(any_store.search(A, query="tea")) == ["b"]


def test_keys_are_told_apart(any_store: SQLiteStore) -> None:
    """Keys that differ in case, accents' form, spaces or signs are different keys."""
    names = ["k", "K", "k ", "é", "e\u0301", "ß", "ss", "a.b", "%", "_", "*", "'", '"', "\n", "🦊"]
    for number, name in enumerate(names):
        any_store.put(A, name, {"n": number})

    assert list(range(len(names))) == [any_store.get(A, name).value["n"] for name in names]  # type: ignore[union-attr]


def test_a_value_got_may_be_changed(store: SQLiteStore) -> None:
    """What a caller does to a value it got changes nothing for others."""
    store.put(A, "k", {"list": [1]})
    for found in (store.get(A, "k"), store.search(A)[0], store.search(A, as_of=None)[0]):
        assert found is not None
        found.value["list"].append(2)
    item = store.get(A, "k")

    assert item is not None
    assert item.value == {"list": [1]}


def test_a_value_put_may_be_changed(store: SQLiteStore) -> None:
    """What a caller does to a value after putting it changes nothing."""
    value = {"list": [1]}
    store.put(A, "k", value)
    value["list"].append(2)
    item = store.get(A, "k")

    assert item is not None
    assert item.value == {"list": [1]}


@given(value=st.dictionaries(st.text(), JSON, max_size=5))
def test_any_json_comes_back(value: dict[str, Any]) -> None:
    """Whatever JSON can say comes back equal, types included; so it does from search."""
    with SQLiteStore.open(":memory:", index=None) as store:
        store.put(A, "k", value)
        item = store.get(A, "k")
        found = store.search(A)

    assert item is not None
    assert repr(value) == repr(item.value) == repr(found[0].value)


def test_whole_numbers_and_uuids_as_keys(any_store: SQLiteStore) -> None:
    """A number and a UUID are taken as their text, as langgraph does."""
    uid = UUID(int=7)
    any_store.put(A, 7, {"n": 7})  # type: ignore[arg-type]
    any_store.put(A, uid, {"n": 8})  # type: ignore[arg-type]

    assert any_store.get(A, "7").value == {"n": 7}  # type: ignore[union-attr]
    assert any_store.get(A, str(uid)).value == {"n": 8}  # type: ignore[union-attr]


# -- batches


def test_a_batch_answers_in_order(any_store: SQLiteStore) -> None:
    """Each operation's answer stands at its place."""
    write(any_store, A, a="tea")
    got, put, found, spaces = any_store.batch(
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
    assert keys(found) == ["a"]  # type: ignore[arg-type]
    assert spaces == [A]


def test_a_batch_reads_what_was_there_before(any_store: SQLiteStore) -> None:
    """A get after a put of the same batch sees the state before the batch."""
    write(any_store, A, a="tea")
    answers = any_store.batch(
        [PutOp(A, "a", {"text": "coffee"}), PutOp(A, "b", {"text": "b"}), GetOp(A, "a")]
    )
    later = any_store.get(A, "a")

    assert answers[2].value == {"text": "tea"}  # type: ignore[union-attr]
    assert later is not None
    assert later.value == {"text": "coffee"}


def test_of_several_puts_of_a_key_the_last_counts(any_store: SQLiteStore) -> None:
    """Puts and deletes of one key in one batch: the last decides."""
    write(any_store, A, a="tea", b="tea")
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
    found = {item.key: item.value["text"] for item in any_store.search(A)}

    assert found == {"a": "2", "c": "3"}


def test_an_empty_batch(any_store: SQLiteStore) -> None:
    """Nothing asked, nothing answered."""
    assert any_store.batch([]) == []


BAD = [
    (PutOp(A, "x", {"n": object()}), InvalidValue),
    (SearchOp(A, filter={"n": {"$what": 1}}), InvalidFilter),
    (GetOp((), ""), PerdureError),
    (SearchOp(A, limit=-1), PerdureError),
    (PutOp(None, "x", {}), PerdureError),  # type: ignore[arg-type]
    (PutOp((["x"],), "x", {}), PerdureError),  # type: ignore[arg-type]
    ("not an operation", PerdureError),
]


@FEWER
@pytest.mark.parametrize(("bad", "error"), BAD, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_bad_operation_spoils_its_batch_alone(
    bad: Any, error: type[Exception], place: int, store: SQLiteStore
) -> None:
    """If one operation of a batch is wrong, its caller is told, and nothing of it is written."""
    ops: list[Any] = [PutOp(A, "a", {"text": "1"}), PutOp(A, "b", {"text": "2"})]
    ops.insert(place, bad)
    with pytest.raises(error):
        store.batch(ops)

    assert store.search(A) == []
    assert store.list_namespaces() == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_neighbours_of_a_bad_operation(backend: str, tmp_path: Path) -> None:
    """Calls at the same moment as bad ones are answered as if they were alone."""

    async def many(store: SQLiteStore) -> list[Any]:
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
        answers = asyncio.run(many(store))
        stored = sorted(keys(store.search(A, limit=100)))

    assert sorted(f"{name}{n}" for name in "kz" for n in range(20)) == stored
    for number in range(20):
        good, *bad, batch = answers[6 * number : 6 * number + 6]
        assert good is None
        assert all(isinstance(each, PerdureError) for each in bad)
        assert batch == [None, None]
