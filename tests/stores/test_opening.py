"""Opening a store: options that cannot be meant, and files whose settings were damaged."""

from __future__ import annotations

import sqlite3
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from perdure.errors import ConfigurationError, CorruptRecord
from perdure.stores import SQLiteStore
from tests.store_backends import DIMS, Words, of_words

A = ("a",)

WRONG: dict[str, list[Any]] = {
    "ttl": [
        *(5, "60", [60], {"refresh_on_read": 1}),
        *({"default_ttl": minutes} for minutes in ("1", 0, -1, True, float("inf"), Fraction(1, 2))),
        *({"sweep_interval_minutes": minutes} for minutes in ("1", 0, float("nan"))),
        {"omit_expired": 1},
    ],
    "max_value_bytes": [None, "1", 0, -1, 1.5, True],
    "approximate_above": [None, "1", -1, 1.5, True],
    "timeout_s": [None, "1", -1, True, float("nan"), 1e12, Decimal(3)],
    "read_only": [None, 1, "no"],
    "key": [5, ["0" * 32], {}],
    "vectors": ["float64", []],
    "text_index": [None, "clear", {}],
    "synchronous": [None, "off", 5],
}
WRONG_INDEX: dict[str, list[Any]] = {
    "dims": [True, "3", 0],
    "name": [5],
    "fields": [0, {}, "text", {"text"}, iter(["text"]), [""]],
    "text_fields": [0, {}, "text"],
    "distance_type": ["l2", None],
}


@pytest.mark.parametrize("option", [*WRONG, *WRONG_INDEX])
def test_options_that_make_no_sense(option: str, tmp_path: Path) -> None:
    """A wrong option is named and refused before the file is made, with what was expected."""
    for value in [*WRONG.get(option, []), *WRONG_INDEX.get(option, [])]:
        options: Any = {"index": None, option: value}
        if option in WRONG_INDEX:
            options = {"index": {"embed": Words(), option: value}}
        with pytest.raises(ConfigurationError, match=rf"{option}\b.*expected"):
            SQLiteStore.open(tmp_path / "x.db", **options)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ttl": {"default": 5}}, "ttl .* 'default'; did you mean 'default_ttl'"),
        ({"ttl": {5: 5}}, "ttl .* 5; there are default_ttl"),
        ({"index": {"embed": Words(), "feilds": ["text"]}}, "index .*; did you mean 'fields'"),
        ({"index": {"embed": Words(), "model": "x"}}, "index .*; there are embed, dims, fields"),
    ],
)
def test_settings_that_do_not_exist(options: Any, says: str, tmp_path: Path) -> None:
    """A misspelt setting is refused with what was meant, not passed over."""
    with pytest.raises(ConfigurationError, match=says):
        SQLiteStore.open(tmp_path / "x.db", **options)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ttl": {"default_ttl": 0}}, "ttl default_ttl is 0; expected minutes, more than zero, or"),
        ({"ttl": {"refresh_on_read": 1}}, "ttl refresh_on_read is 1; expected True or False"),
        ({"index": {"embed": Words(), "fields": [5]}}, r"index fields is \[5\]; .* \['text'\], or"),
        ({"vectors": "x"}, "vectors is 'x'; expected 'float32', 'float16', 'int8' or None"),
        ({"timeout_s": -1}, "timeout_s is -1; expected seconds, 0 to"),
    ],
)
def test_what_was_expected(options: Any, says: str, tmp_path: Path) -> None:
    """A message says the unit, and what else may be given."""
    with pytest.raises(ConfigurationError, match=says):
        SQLiteStore.open(tmp_path / "x.db", **{"index": None, **options})


@pytest.mark.parametrize("path", [None, 5, "a\0b", "\ud800", ["x.db"]], ids=repr)
def test_paths_that_make_no_sense(path: Any) -> None:
    """What cannot be the name of a file is refused as an argument."""
    with pytest.raises(ConfigurationError, match=r"path is .*expected"):
        SQLiteStore.open(path)


def test_a_key_of_a_wrong_type_is_not_told(tmp_path: Path) -> None:
    """A message about a key has its type, not the key."""
    key: Any = ["5eed" * 8]
    with pytest.raises(ConfigurationError, match="list") as caught:
        SQLiteStore.open(tmp_path / "x.db", key=key)

    assert "5eed" not in str(caught.value)


def test_options_at_their_edges(tmp_path: Path) -> None:
    """The least of each option, whole numbers for fractions, and an empty `ttl` are no errors."""
    ttl: Any = {"default_ttl": None, "sweep_interval_minutes": 0.5, "omit_expired": True}
    options = of_words(max_value_bytes=2, approximate_above=0, timeout_s=0, ttl=ttl)
    with SQLiteStore.open(tmp_path / "x.db", **options) as store:
        store.put(A, "k", {})

        assert store.get(A, "k") is not None
    more: Any = {"ttl": MappingProxyType({}), "index": MappingProxyType(options["index"])}
    with SQLiteStore.open(tmp_path / "x.db", **more) as store:
        assert store.get(A, "k") is not None


GARBAGE = ["", "{", "null", "5", "[]", "{}", 7, b"\xff\x00", '{"name": "words"}', "[" * 100_000]
MODELS = [
    '{"name": 5, "dims": 512, "kind": "float32", "number": 1}',
    '{"name": "words", "dims": "512", "kind": "float32", "number": 1}',
    '{"name": "words", "dims": 0, "kind": "float32", "number": 1}',
    '{"name": "words", "dims": 512, "kind": [], "number": 1}',
    '{"name": "words", "dims": 512, "kind": "float32", "number": 1, "more": 1}',
]
WORDS = [
    '{"analyzer": 1, "fields": ["$"], "kept": 5}',
    '{"analyzer": 1, "fields": "$", "kept": "clear"}',
    '{"analyzer": 1, "fields": [], "kept": "clear"}',
    '{"analyzer": 1, "fields": [5], "kept": "clear"}',
]


def damage(path: Path, setting: str, value: Any) -> None:
    """A file with an item, one of whose settings is something else."""
    with SQLiteStore.open(path, **of_words()) as store:
        store.put(A, "k", {"text": "tea"})
    conn = sqlite3.connect(path)
    changed = conn.execute(
        "UPDATE store_settings SET value = ? WHERE name = ?", (value, setting)
    ).rowcount
    conn.commit()
    conn.close()
    assert changed == 1


@pytest.mark.parametrize("value", [*GARBAGE, *WORDS], ids=lambda value: repr(value)[:60])
def test_a_damaged_setting_of_words(value: Any, tmp_path: Path) -> None:
    """Who opens the file, also only to read, is told which setting is damaged."""
    damage(tmp_path / "x.db", "words", value)
    for options in (of_words(), of_words(read_only=True)):
        with pytest.raises(CorruptRecord, match=r"'words'.*restore it from a backup") as caught:
            SQLiteStore.open(tmp_path / "x.db", **options)

        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", [*GARBAGE, *MODELS], ids=lambda value: repr(value)[:60])
def test_a_damaged_setting_of_the_model(value: Any, tmp_path: Path) -> None:
    """What needs the model says that its setting is damaged; the rest goes on."""
    damage(tmp_path / "x.db", "model", value)
    with SQLiteStore.open(tmp_path / "x.db", **of_words()) as store:
        for call in (
            lambda: store.search(A, query="tea"),
            lambda: store.put(A, "j", {"text": "milk"}),
            lambda: store.reembed(),
        ):
            with pytest.raises(CorruptRecord, match=r"'model'.*restore it from a backup"):
                call()

        assert [item.key for item in store.search(A)] == ["k"]


def test_the_configuration_of_the_index_is_public(tmp_path: Path) -> None:
    """It is what was given; by default it has what embeds offline, and its dimensions."""
    given: Any = {"embed": Words(), "dims": DIMS, "fields": ["text"]}
    with (
        SQLiteStore(tmp_path / "given.db", index=given) as store,
        SQLiteStore(tmp_path / "offline.db") as offline,
        SQLiteStore(tmp_path / "none.db", index=None) as none,
    ):
        assert given == store.index_config
        assert offline.index_config is not None
        assert offline.model is not None
        assert offline.model.dims == offline.index_config["dims"]
        assert none.index_config is None


def test_the_settings_of_langgraphs_own_index(tmp_path: Path) -> None:
    """`text_fields` are fields, and cosine is what there is: both are read back as given."""
    given: Any = {"embed": Words(), "dims": DIMS, "text_fields": ["a"], "distance_type": "cosine"}
    with SQLiteStore.from_conn_string(str(tmp_path / "x.db"), index=given) as store:
        store.put(A, "k", {"a": "tea", "b": "milk"})

        assert given == store.index_config
        assert [item.key for item in store.search(A, query="tea", mode="text")] == ["k"]
        assert store.search(A, query="milk", mode="text") == []
