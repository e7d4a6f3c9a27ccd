"""Each kind of bad input raises a specific error with a helpful message, and writes nothing."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.errors import (
    ConfigurationError,
    CorruptRecord,
    InvalidConfig,
    NotADatabase,
    PerdureError,
    StorageError,
    StorageFull,
    UnknownCheckpoint,
    UnknownThread,
    Unstorable,
)

SECRET = "the harbour master's name is Ottilie"


def make_config(thread_id: Any = "t", **options: Any) -> Any:
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": "", **options}}


def make_checkpoint(uid: str = "1", **values: Any) -> Any:
    return {
        "v": 4,
        "id": uid,
        "ts": "2026-01-01T00:00:00+00:00",
        "channel_values": values,
        "channel_versions": dict.fromkeys(values, 1),
        "versions_seen": {},
        "updated_channels": None,
    }


def put(saver: SQLiteCheckpointer, thread_id: str = "t", uid: str = "1", **values: Any) -> Any:
    new = make_checkpoint(uid, **values)
    return saver.put(make_config(thread_id), new, {"source": "input"}, new["channel_versions"])


# -- configs


@pytest.mark.parametrize(
    ("config", "expected_message"),
    [
        ({}, "no 'configurable' mapping"),
        ({"configurable": {}}, "thread_id is None"),
        (make_config(None), "thread_id is None"),
        (make_config(""), "thread_id is empty"),
        (make_config(True), "thread_id is True"),
        ({"configurable": {"thread_id": "t", "checkpoint_ns": 3}}, "checkpoint_ns is 3"),
        (make_config(checkpoint_id=3), "checkpoint_id is 3"),
    ],
)
def test_every_method_refuses_config_without_valid_thread_id(
    saver: SQLiteCheckpointer, config: Any, expected_message: str
) -> None:
    """The error names the missing or invalid field, and nothing is written."""
    new = make_checkpoint(x=[1])
    calls: list[Callable[[], Any]] = [
        lambda: saver.get_tuple(config),
        lambda: list(saver.list(config)),
        lambda: saver.put(config, new, {}, {"x": 1}),
        lambda: saver.put_writes(config, [("x", 1)], "task"),
        lambda: saver.get_delta_channel_history(config=config, channels=["x"]),
    ]
    for call in calls:
        with pytest.raises(InvalidConfig, match=expected_message):
            call()

    assert saver.threads() == []


def test_put_writes_refuses_config_without_checkpoint_id(saver: SQLiteCheckpointer) -> None:
    with pytest.raises(InvalidConfig, match="has no checkpoint_id"):
        saver.put_writes(make_config(), [("x", 1)], "task")

    assert saver.threads() == []


def test_unknown_ids_return_nothing_from_langgraph_methods_and_raise_in_others(
    saver: SQLiteCheckpointer,
) -> None:
    """The errors of perdure's own methods name the unknown id."""
    put(saver, messages=[HumanMessage("hi", id="1")])
    unknown = make_config(checkpoint_id="nope")

    assert None is saver.get_tuple(make_config("nobody"))
    assert None is saver.get_tuple(unknown)
    assert list(saver.list(make_config("nobody"))) == []
    assert list(saver.list(unknown)) == []
    for call in (
        lambda: saver.history("nobody"),
        lambda: saver.thread("nobody"),
        lambda: saver.checkpoints("nobody"),
        lambda: saver.copy_thread("nobody", "new"),
        lambda: saver.threads(after="nobody"),
    ):
        with pytest.raises(UnknownThread, match="'nobody'"):
            call()
    for call in (
        lambda: saver.history("t", checkpoint_id="nope"),
        lambda: saver.rewind("t", "nope"),
        lambda: saver.copy_thread("t", "new", checkpoint_id="nope"),
    ):
        with pytest.raises(UnknownCheckpoint, match="'nope'"):
            call()
    assert [info.thread_id for info in saver.threads()] == ["t"]


def test_invalid_limits_strategies_and_retention_rules_are_refused(
    saver: SQLiteCheckpointer,
) -> None:
    put(saver, x=[1])
    for call, expected_message in (
        (lambda: saver.threads(limit=0), "'limit' is 0"),
        (lambda: saver.prune(["t"], strategy="some"), "'strategy' is 'some'"),
        (lambda: saver.retain(Retention()), "rule is empty"),
        (lambda: saver.retain(Retention(last=-1)), "'last' is -1"),
        (lambda: saver.retain(Retention(days=-2)), "'days' is -2"),
        (lambda: saver.delete_thread(""), "thread_id is empty"),
        (lambda: saver.history("t", ends=(0, -1)), r"'ends' is \(0, -1\)"),
        (lambda: saver.history("t", ends="all"), "'ends' is"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigurationError, match=expected_message):
            call()

    assert None is not saver.get_tuple(make_config())


# -- values


class Opaque:
    """An object that no serializer accepts."""

    def __reduce__(self) -> Any:
        raise TypeError("no")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Opaque(), r"channel_values\['x'\] is a Opaque"),
        ([1, {"deep": [Opaque()]}] * 40, r"channel_values\['x'\]\[1\]\['deep'\]\[0\]"),
        ({"a": {"b": Opaque()}, "c": "x" * 300}, r"channel_values\['x'\].*\['b'\]"),
        ([HumanMessage("m", additional_kwargs={"k": Opaque()})], r"\[0\].additional_kwargs\['k'\]"),
    ],
)
def test_error_names_path_to_value_that_cannot_be_stored(
    saver: SQLiteCheckpointer, value: Any, path: str
) -> None:
    """The path leads to the innermost such value, and the checkpoint is not written."""
    with pytest.raises(Unstorable, match=path):
        put(saver, x=value)

    assert None is saver.get_tuple(make_config())


# -- files


def test_open_refuses_paths_that_are_no_perdure_database(tmp_path: Path) -> None:
    """The paths are folders, missing folders, text files or databases of other applications."""
    text = tmp_path / "notes.txt"
    text.write_text("dear diary, " * 500)
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as db:
        db.execute("CREATE TABLE recipes (x)")
    langgraph_file = tmp_path / "old.db"
    with closing(sqlite3.connect(langgraph_file)) as db:
        db.executescript("CREATE TABLE checkpoints (x); CREATE TABLE writes (x)")
    before = {path: path.read_bytes() for path in (text, other, langgraph_file)}

    for path, error_class, expected_message in (
        (tmp_path, NotADatabase, "is a folder"),
        (tmp_path / "no" / "x.db", ConfigurationError, "does not exist; create it"),
        ("", ConfigurationError, "path is ''"),
        (text, NotADatabase, "not an SQLite database"),
        (other, NotADatabase, "another application"),
        (langgraph_file, NotADatabase, "import_from"),
    ):
        with pytest.raises(error_class, match=expected_message):
            SQLiteCheckpointer.open(path)

    assert before == {path: path.read_bytes() for path in before}


def test_invalid_options_are_refused_before_file_is_created(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    for options in (
        {"synchronous": "off"},
        {"key": "not hex"},
        {"key": b"short"},
        {"read_only": True},
    ):
        with pytest.raises(ConfigurationError):
            SQLiteCheckpointer.open(path, **options)

    assert not path.exists()


@pytest.fixture
def filled_file(tmp_path: Path) -> Path:
    """A closed file of a few hundred pages."""
    path = tmp_path / "filled.db"
    with SQLiteCheckpointer.open(path) as saver:
        for i in range(40):
            put(saver, f"t{i}", messages=[HumanMessage(f"{i} " + "x" * 9000, id=str(i))])
    return path


def read_all_checkpoints(path: Path) -> None:
    with SQLiteCheckpointer.open(path) as saver:
        for _ in saver.list(None):
            pass


@pytest.mark.parametrize("kept_fraction", [0.9, 0.5, 0.1])
def test_truncated_file_raises_storage_error(filled_file: Path, kept_fraction: float) -> None:
    """No other exception is raised, and wrong data is never returned."""
    content = filled_file.read_bytes()
    filled_file.write_bytes(content[: int(len(content) * kept_fraction)])

    with pytest.raises(StorageError, match=r"filled\.db"):
        read_all_checkpoints(filled_file)


def test_overwritten_file_raises_storage_error_with_its_name(filled_file: Path) -> None:
    content = bytearray(filled_file.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    filled_file.write_bytes(content)

    with pytest.raises(StorageError, match=r"filled\.db"):
        read_all_checkpoints(filled_file)


@pytest.mark.skipif(sys.platform == "win32", reason="folders have other permissions there")
def test_read_only_folder_raises_storage_error(tmp_path: Path) -> None:
    """The error says what to check."""
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    if os.geteuid() == 0:  # root may write to any folder but /proc
        folder = Path("/proc")

    with pytest.raises(StorageError, match="check"):
        SQLiteCheckpointer.open(folder / "x.db")


def test_read_only_checkpointer_reads_and_refuses_writes(filled_file: Path) -> None:
    """The error says why the write is refused, and the file does not change."""
    before = filled_file.read_bytes()
    with SQLiteCheckpointer.open(filled_file, read_only=True) as saver:
        assert len(list(saver.list(None))) == 40
        with pytest.raises(StorageError, match="opened read-only"):
            put(saver, x=1)

    assert before == filled_file.read_bytes()


class AlmostFullConnection(sqlite3.Connection):
    """A connection to a disk with little free space."""

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if sql.startswith("BEGIN"):
            super().execute("PRAGMA max_page_count = 60")
        return super().execute(sql, *args)


def test_put_on_full_disk_writes_nothing_and_keeps_earlier_threads(tmp_path: Path) -> None:
    """Threads that were stored before can still be read."""
    path = tmp_path / "x.db"
    written = 0
    with SQLiteCheckpointer.open(path, factory=AlmostFullConnection) as saver:
        with contextlib.suppress(StorageFull):
            while written < 100:
                put(saver, f"t{written}", messages=[HumanMessage("x" * 9000, id="1")])
                written += 1
        with pytest.raises(StorageFull, match="free disk space"):
            put(saver, "one more", messages=[HumanMessage("x" * 9000, id="1")])
        thread_ids = [info.thread_id for info in saver.threads(limit=100)]
        assert written == len(list(saver.list(None)))
    with SQLiteCheckpointer.open(path) as saver:
        put(saver, "later", x=1)

    assert 0 < written < 100
    assert {f"t{i}" for i in range(written)} == set(thread_ids)


# -- damage and deletion


@pytest.mark.parametrize("body", [b"", b"\x00", b"\xc1\xc1", b"\x01\xc1", b"\x1f\xff", b"\x10\xc1"])
@pytest.mark.parametrize("table", ["items", "checkpoints", "writes"])
def test_damaged_row_raises_corrupt_record_and_thread_can_be_deleted(
    tmp_path: Path, table: str, body: bytes
) -> None:
    path = tmp_path / "plain.db"
    with SQLiteCheckpointer.open(path) as saver:
        stored_config = put(
            saver, messages=[HumanMessage("hi", id="1"), HumanMessage("x" * 200, id="2")]
        )
        saver.put_writes(stored_config, [("messages", "y" * 200)], "task")
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"UPDATE {table} SET body = ?", (body,))
        db.commit()

    with SQLiteCheckpointer.open(path) as saver:
        with pytest.raises(CorruptRecord):
            saver.get_tuple(make_config())
        saver.delete_thread("t")

        assert saver.threads() == []


def test_text_of_deleted_thread_is_gone_from_file(tmp_path: Path) -> None:
    """Free pages and the WAL do not contain the text either."""
    path = tmp_path / "x.db"
    with SQLiteCheckpointer.open(path) as saver:
        put(
            saver, "gone", messages=[HumanMessage(SECRET, id="1"), HumanMessage("x" * 9000, id="2")]
        )
        put(saver, "stays", messages=[HumanMessage("hello", id="1")])
        saver.delete_thread("gone")
    raw_bytes = b"".join(file.read_bytes() for file in tmp_path.iterdir() if file.is_file())

    assert SECRET.encode() not in raw_bytes
    assert b"xxxxxxxx" not in raw_bytes
    assert b"hello" in raw_bytes


def test_every_error_class_is_perdure_error_and_documented() -> None:
    """The module's docstring names every class."""
    from perdure import errors

    error_classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception)
    ]

    assert all(issubclass(error_class, PerdureError) for error_class in error_classes)
    assert all(
        error_class.__name__ in (errors.__doc__ or "")
        for error_class in error_classes
        if error_class is not PerdureError
    )
