"""Values that are no JSON objects: refused with the path of the offending part."""

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
from tests.store_backends import BACKENDS, FEWER, keys

A = ("a",)


class Accessor(str):
    """Text of a subclass, as langchain's `message.text` is."""

    __slots__ = ()


class Level(IntEnum):
    HIGH = 3


class Odd:
    """Something whose repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def deep(levels: int) -> Any:
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
    ({"a": deep(100)}, "nested"),
    (LOOP, "nested"),
    ({"a": Odd()}, r"\$\.a"),
    ({"a": b"x" * 1_000_000}, r"\$\.a"),
]


@FEWER
def test_subclasses_of_what_json_has(store: SQLiteStore) -> None:
    """Text, dicts and numbers of a subclass are stored as what they are, and found."""
    store.put(A, "k", {"text": Accessor("green tea"), "more": OrderedDict(b=1), "n": Level.HIGH})
    found = store.search(A, query="tea")

    assert [item.value for item in found] == [{"text": "green tea", "more": {"b": 1}, "n": 3}]


@FEWER
def test_integers_beyond_all_floats(store: SQLiteStore) -> None:
    """They are stored, found and listed as they are."""
    value = {"text": "tea", "n": 10**400, "more": [-(10**309)]}
    store.put(A, "k", value)

    assert [item.value for item in store.search(A, query="tea")] == [value]
    assert [item.value for item in store.search(A, filter={"n": {"$gt": 10**399}})] == [value]


@FEWER
@pytest.mark.parametrize(("value", "named"), WRONG, ids=lambda each: type(each).__name__)
def test_values_that_are_no_json(value: Any, named: str, store: SQLiteStore) -> None:
    """The error names the place, is short, and nothing is written: what was there stays."""
    store.put(A, "k", {"text": "tea"})
    with pytest.raises(InvalidValue, match=named) as caught:
        store.put(A, "k", value)
    item = store.get(A, "k")

    assert len(str(caught.value)) < 500
    assert item is not None
    assert (item.value, item.version) == ({"text": "tea"}, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_that_are_too_large(backend: str, tmp_path: Path) -> None:
    """A value over the limit is refused with both sizes; one just at it is stored."""
    with BACKENDS[backend](tmp_path, max_value_bytes=100) as store:
        store.put(A, "fits", {"text": "x" * 89})
        with pytest.raises(InvalidValue, match=r"101 bytes .* at most 100"):
            store.put(A, "not", {"text": "x" * 90})
        with pytest.raises(InvalidValue, match="bytes"):
            store.put(A, "not", {"text": "聊" * 40})

        assert keys(store.search(A)) == ["fits"]


def test_any_mapping_is_a_value(store: SQLiteStore) -> None:
    """What is a mapping but no dict is stored as one, and searched."""
    store.put(A, "k", MappingProxyType({"text": "zebra"}))
    store.put(A, "o", OrderedDict(text="otter", inside=OrderedDict(n=1)))

    assert keys(store.search(A, query="zebra", mode="text")) == ["k"]
    assert keys(store.search(A, query="otter", mode="text")) == ["o"]


def test_values_at_the_edge(store: SQLiteStore) -> None:
    """Empty, deep, long, large and odd values that are JSON come back as they were."""
    values: list[dict[str, Any]] = [
        {},
        {"": ""},
        {"a": deep(60)},
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


def test_a_closed_store(tmp_path: Path) -> None:
    """Every call on a closed store says that it is closed; closing twice is no error."""
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


def test_a_store_that_only_reads(tmp_path: Path) -> None:
    """Opened read-only, it reads and searches, also what expires; writing is refused."""
    with BACKENDS["file"](tmp_path) as store:
        store.put(A, "k", {"text": "tea"}, ttl=5)
    with BACKENDS["file"](tmp_path, read_only=True) as store:
        assert store.get(A, "k") is not None
        assert keys(store.search(A, query="tea")) == ["k"]
        assert store.list_namespaces() == [A]
        for call in (
            lambda: store.put(A, "k", {}),
            lambda: store.delete(A, "k"),
            lambda: store.sweep_ttl(),
            lambda: store.create_index("a"),
        ):
            with pytest.raises(StorageError, match="read-only"):
                call()


@FEWER
@pytest.mark.parametrize("depth", [0, -1, "1", 1.5, True], ids=repr)
def test_depths_that_make_no_sense(depth: Any, store: SQLiteStore) -> None:
    """A max_depth that is no whole number from 1 is refused, and so are pages below zero."""
    with pytest.raises(PerdureError, match="max_depth"):
        store.list_namespaces(max_depth=depth)
    for name in ("limit", "offset"):
        for number in (-1, "1", 1.5, None):
            options: Any = {name: number}
            with pytest.raises(PerdureError, match=name):
                store.list_namespaces(**options)
