"""Values that are not JSON objects are refused, with the path of the offending part."""

from __future__ import annotations

import datetime as dt
import decimal
from collections import OrderedDict
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from perdure.errors import InvalidValue, PerdureError, StorageError, StorageUnavailable
from perdure.stores import SQLiteStore
from tests.store_backends import BACKENDS, ONE_CALL_MODE_PER_BACKEND, list_item_keys

A = ("a",)


class TextSubclass(str):
    """Text of a subclass, as langchain's `message.text` is."""

    __slots__ = ()


class Level(IntEnum):
    HIGH = 3


class FailingRepr:
    """An object whose repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def nest_list(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


LOOP: dict[str, Any] = {}
LOOP["again"] = LOOP

WRONG: list[tuple[Any, str]] = [
    ([], "list"),
    ("text", "str"),
    (7, "int"),
    ({"a": {"b": [1, object()]}}, r"\$\.a\.b\[1\]"),
    ({"a": float("nan")}, r"\$\.a is nan"),
    ({"a": [float("inf")]}, r"\$\.a\[0\] is inf"),
    ({"a": b"bytes"}, r"\$\.a"),
    ({"a": {1, 2}}, r"\$\.a"),
    ({"a": dt.datetime(2024, 1, 1)}, r"\$\.a"),
    ({"a": decimal.Decimal(1)}, r"\$\.a"),
    ({"a": {1: 2}}, r"\$\.a has the key 1"),
    ({1: 2}, r"\$ has the key 1"),
    ({"a": "\ud800"}, "surrogate"),
    ({"\udfff": 1}, "surrogate"),
    ({"a": 10**5000}, r"\$\.a.*digits"),
    ({"a": nest_list(100)}, "nested"),
    (LOOP, "nested"),
    ({"a": FailingRepr()}, r"\$\.a"),
    ({"a": b"x" * 1_000_000}, r"\$\.a"),
]


@ONE_CALL_MODE_PER_BACKEND
def test_values_of_json_subclasses_are_stored_as_plain_types(store: SQLiteStore) -> None:
    """Subclasses of str, dict and int are stored as their base types, and search finds them."""
    store.put(
        A, "k", {"text": TextSubclass("green tea"), "more": OrderedDict(b=1), "n": Level.HIGH}
    )
    results = store.search(A, query="tea")

    assert [item.value for item in results] == [{"text": "green tea", "more": {"b": 1}, "n": 3}]


@ONE_CALL_MODE_PER_BACKEND
def test_integers_larger_than_any_float_are_stored_and_found(store: SQLiteStore) -> None:
    """Integers beyond the range of floats are stored, found and listed unchanged."""
    value = {"text": "tea", "n": 10**400, "more": [-(10**309)]}
    store.put(A, "k", value)

    assert [item.value for item in store.search(A, query="tea")] == [value]
    assert [item.value for item in store.search(A, filter={"n": {"$gt": 10**399}})] == [value]


@ONE_CALL_MODE_PER_BACKEND
@pytest.mark.parametrize(("value", "expected_message"), WRONG, ids=lambda each: type(each).__name__)
def test_put_refuses_value_that_is_not_json(
    value: Any, expected_message: str, store: SQLiteStore
) -> None:
    """The error is short and names the path of the bad part, and the stored item is unchanged."""
    store.put(A, "k", {"text": "tea"})
    with pytest.raises(InvalidValue, match=expected_message) as caught:
        store.put(A, "k", value)
    item = store.get(A, "k")

    assert len(str(caught.value)) < 500
    assert item is not None
    assert (item.value, item.version) == ({"text": "tea"}, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_put_refuses_value_over_max_value_bytes(backend: str, tmp_path: Path) -> None:
    """A value over the limit is refused with both sizes; a value of exactly the limit is stored."""
    with BACKENDS[backend](tmp_path, max_value_bytes=100) as store:
        store.put(A, "fits", {"text": "x" * 89})
        with pytest.raises(InvalidValue, match=r"101 bytes .* at most 100"):
            store.put(A, "not", {"text": "x" * 90})
        with pytest.raises(InvalidValue, match="bytes"):
            store.put(A, "not", {"text": "聊" * 40})

        assert list_item_keys(store.search(A)) == ["fits"]


def test_put_accepts_any_mapping_as_value(store: SQLiteStore) -> None:
    """A mapping that is not a dict is stored as an object, and search finds it."""
    store.put(A, "k", MappingProxyType({"text": "zebra"}))
    store.put(A, "o", OrderedDict(text="otter", inside=OrderedDict(n=1)))

    assert list_item_keys(store.search(A, query="zebra", mode="text")) == ["k"]
    assert list_item_keys(store.search(A, query="otter", mode="text")) == ["o"]


def test_extreme_json_values_come_back_unchanged(store: SQLiteStore) -> None:
    """Empty, deep, long, large and unusual JSON values are returned unchanged."""
    values: list[dict[str, Any]] = [
        {},
        {"": ""},
        {"a": nest_list(60)},
        {"n": 2**63, "m": -(2**200), "f": 1e308, "s": 5e-324, "z": -0.0},
        {"text": "x" * 300_000},
        {"text": "word " * 30_000},
        {"nul": "\0", "control": "\x01\x7f", "emoji": "🦊👩‍👩‍👧", "bidi": "\u202e"},
        {str(n): n for n in range(2000)},
    ]
    for number, value in enumerate(values):
        store.put(A, f"k{number}", value)

    for number, value in enumerate(values):
        item = store.get(A, f"k{number}")
        assert item is not None
        assert repr(value) == repr(item.value)
    assert len(store.search(A, query="word", limit=100)) > 0


def test_every_call_on_closed_store_raises(tmp_path: Path) -> None:
    """Every call on a closed store says that the store is closed; closing twice is not an error."""
    store = BACKENDS["file"](tmp_path)
    store.put(A, "k", {})
    store.close()
    store.close()
    for call in (
        lambda: store.put(A, "k", {}),
        lambda: store.get(A, "k"),
        lambda: store.search(A, query="x"),
        lambda: store.list_namespaces(),
        lambda: store.sweep_ttl(),
        lambda: store.stats(),
    ):
        with pytest.raises(StorageUnavailable, match="closed"):
            call()


def test_read_only_store_reads_and_refuses_writes(tmp_path: Path) -> None:
    """A read-only store gets and searches items, also those with a TTL, and refuses writes."""
    with BACKENDS["file"](tmp_path) as store:
        store.put(A, "k", {"text": "tea"}, ttl=5)
    with BACKENDS["file"](tmp_path, read_only=True) as store:
        assert store.get(A, "k") is not None
        assert list_item_keys(store.search(A, query="tea")) == ["k"]
        assert store.list_namespaces() == [A]
        for call in (
            lambda: store.put(A, "k", {}),
            lambda: store.delete(A, "k"),
            lambda: store.sweep_ttl(),
            lambda: store.create_index("a"),
        ):
            with pytest.raises(StorageError, match="read-only"):
                call()


@ONE_CALL_MODE_PER_BACKEND
@pytest.mark.parametrize("depth", [0, -1, "1", 1.5, True], ids=repr)
def test_list_namespaces_refuses_bad_depth_limit_and_offset(depth: Any, store: SQLiteStore) -> None:
    """The depth must be an integer from 1, and limit and offset must not be negative."""
    with pytest.raises(PerdureError, match="max_depth"):
        store.list_namespaces(max_depth=depth)
    for name in ("limit", "offset"):
        for number in (-1, "1", 1.5, None):
            options: Any = {name: number}
            with pytest.raises(PerdureError, match=name):
                store.list_namespaces(**options)
