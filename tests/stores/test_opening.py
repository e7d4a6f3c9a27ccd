"""Opening a store: invalid options, and files with damaged settings."""

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
from tests.store_backends import DIMS, WordEmbedder, make_options

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
def test_open_refuses_invalid_option_before_creating_file(option: str, tmp_path: Path) -> None:
    """The error names the option and the expected values."""
    for value in [*WRONG.get(option, []), *WRONG_INDEX.get(option, [])]:
        options: Any = {"index": None, option: value}
        if option in WRONG_INDEX:
            options = {"index": {"embed": WordEmbedder(), option: value}}
        with pytest.raises(ConfigurationError, match=rf"{option}\b.*expected"):
            SQLiteStore.open(tmp_path / "x.db", **options)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "expected_message"),
    [
        ({"ttl": {"default": 5}}, "'ttl' .* 'default'; did you mean 'default_ttl'"),
        ({"ttl": {5: 5}}, "'ttl' .* 5; expected one of default_ttl"),
        (
            {"index": {"embed": WordEmbedder(), "feilds": ["text"]}},
            "'index' .*; did you mean 'fields'",
        ),
        (
            {"index": {"embed": WordEmbedder(), "model": "x"}},
            "'index' .*; expected one of embed, dims, fields",
        ),
    ],
)
def test_open_refuses_unknown_setting_with_suggestion(
    options: Any, expected_message: str, tmp_path: Path
) -> None:
    """A misspelt setting is refused, with the closest valid name, and is not ignored."""
    with pytest.raises(ConfigurationError, match=expected_message):
        SQLiteStore.open(tmp_path / "x.db", **options)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "expected_message"),
    [
        ({"ttl": {"default_ttl": 0}}, "'ttl default_ttl' is 0; expected minutes, more than zero"),
        ({"ttl": {"refresh_on_read": 1}}, "'ttl refresh_on_read' is 1; expected True or False"),
        (
            {"index": {"embed": WordEmbedder(), "fields": [5]}},
            r"'index fields' is \[5\]; .* \['text'\], or",
        ),
        ({"vectors": "x"}, "'vectors' is 'x'; expected 'float32', 'float16', 'int8' or None"),
        ({"timeout_s": -1}, "'timeout_s' is -1; expected seconds, 0 to"),
    ],
)
def test_invalid_option_error_names_unit_and_allowed_values(
    options: Any, expected_message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=expected_message):
        SQLiteStore.open(tmp_path / "x.db", **{"index": None, **options})


@pytest.mark.parametrize("path", [None, 5, "a\0b", "\ud800", ["x.db"]], ids=repr)
def test_open_refuses_path_that_cannot_be_a_file_name(path: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"path is .*expected"):
        SQLiteStore.open(path)


def test_error_for_key_of_wrong_type_does_not_contain_the_key(tmp_path: Path) -> None:
    """The message contains the type of the key only."""
    key: Any = ["5eed" * 8]
    with pytest.raises(ConfigurationError, match="list") as caught:
        SQLiteStore.open(tmp_path / "x.db", key=key)

    assert "5eed" not in str(caught.value)


def test_open_accepts_smallest_values_of_options(tmp_path: Path) -> None:
    """Minimal values, integers in place of floats, and an empty `ttl` are accepted."""
    ttl: Any = {"default_ttl": None, "sweep_interval_minutes": 0.5, "omit_expired": True}
    options = make_options(max_value_bytes=2, approximate_above=0, timeout_s=0, ttl=ttl)
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


def create_file_with_damaged_setting(path: Path, setting: str, value: Any) -> None:
    """Create a file with one item, and replace the value of one setting."""
    with SQLiteStore.open(path, **make_options()) as store:
        store.put(A, "k", {"text": "tea"})
    conn = sqlite3.connect(path)
    changed = conn.execute(
        "UPDATE store_settings SET value = ? WHERE name = ?", (value, setting)
    ).rowcount
    conn.commit()
    conn.close()
    assert changed == 1


@pytest.mark.parametrize("value", [*GARBAGE, *WORDS], ids=lambda value: repr(value)[:60])
def test_open_reports_damaged_words_setting(value: Any, tmp_path: Path) -> None:
    """The error names the damaged setting, also when the file is opened read-only."""
    create_file_with_damaged_setting(tmp_path / "x.db", "words", value)
    for options in (make_options(), make_options(read_only=True)):
        with pytest.raises(
            CorruptRecord, match=r"'words'.*restore the database from a backup"
        ) as caught:
            SQLiteStore.open(tmp_path / "x.db", **options)

        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", [*GARBAGE, *MODELS], ids=lambda value: repr(value)[:60])
def test_calls_that_need_the_model_report_damaged_model_setting(value: Any, tmp_path: Path) -> None:
    """Calls that do not need the model still work."""
    create_file_with_damaged_setting(tmp_path / "x.db", "model", value)
    with SQLiteStore.open(tmp_path / "x.db", **make_options()) as store:
        for call in (
            lambda: store.search(A, query="tea"),
            lambda: store.put(A, "j", {"text": "milk"}),
            lambda: store.reembed(),
        ):
            with pytest.raises(CorruptRecord, match=r"'model'.*restore the database from a backup"):
                call()

        assert [item.key for item in store.search(A)] == ["k"]


def test_index_config_returns_given_or_default_configuration(tmp_path: Path) -> None:
    """By default the configuration contains the offline embedder and its dimensions."""
    config: Any = {"embed": WordEmbedder(), "dims": DIMS, "fields": ["text"]}
    with (
        SQLiteStore(tmp_path / "given.db", index=config) as store,
        SQLiteStore(tmp_path / "offline.db") as offline,
        SQLiteStore(tmp_path / "none.db", index=None) as none,
    ):
        assert config == store.index_config
        assert offline.index_config is not None
        assert offline.model is not None
        assert offline.model.dims == offline.index_config["dims"]
        assert none.index_config is None


def test_langgraph_index_settings_are_accepted_and_returned(tmp_path: Path) -> None:
    """`text_fields` works like `fields`, and `distance_type` may be cosine."""
    config: Any = {
        "embed": WordEmbedder(),
        "dims": DIMS,
        "text_fields": ["a"],
        "distance_type": "cosine",
    }
    with SQLiteStore.from_conn_string(str(tmp_path / "x.db"), index=config) as store:
        store.put(A, "k", {"a": "tea", "b": "milk"})

        assert config == store.index_config
        assert [item.key for item in store.search(A, query="tea", mode="text")] == ["k"]
        assert store.search(A, query="milk", mode="text") == []
