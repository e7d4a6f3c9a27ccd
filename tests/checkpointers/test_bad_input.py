"""Bad input: each case is a typed error with a sentence that helps, and nothing is half written."""

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


def config(thread_id: Any = "t", **more: Any) -> Any:
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": "", **more}}


def checkpoint(uid: str = "1", **values: Any) -> Any:
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
    new = checkpoint(uid, **values)
    return saver.put(config(thread_id), new, {"source": "input"}, new["channel_versions"])


# -- configs


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "no 'configurable' mapping"),
        ({"configurable": {}}, "thread_id is None"),
        (config(None), "thread_id is None"),
        (config(""), "thread_id is empty"),
        (config(True), "thread_id is True"),
        ({"configurable": {"thread_id": "t", "checkpoint_ns": 3}}, "checkpoint_ns is 3"),
        (config(checkpoint_id=3), "checkpoint_id is 3"),
    ],
)
def test_configs_without_a_usable_address(saver: SQLiteCheckpointer, given: Any, said: str) -> None:
    """Every door says what is missing, and writes nothing."""
    new = checkpoint(x=[1])
    doors: list[Callable[[], Any]] = [
        lambda: saver.get_tuple(given),
        lambda: list(saver.list(given)),
        lambda: saver.put(given, new, {}, {"x": 1}),
        lambda: saver.put_writes(given, [("x", 1)], "task"),
        lambda: saver.get_delta_channel_history(config=given, channels=["x"]),
    ]
    for door in doors:
        with pytest.raises(InvalidConfig, match=said):
            door()

    assert saver.threads() == []


def test_writes_that_name_no_checkpoint(saver: SQLiteCheckpointer) -> None:
    """Pending writes belong to a checkpoint."""
    with pytest.raises(InvalidConfig, match="has no checkpoint_id"):
        saver.put_writes(config(), [("x", 1)], "task")

    assert saver.threads() == []


def test_unknown_threads_and_checkpoints(saver: SQLiteCheckpointer) -> None:
    """langgraph's own doors answer with nothing; perdure's say what is unknown."""
    put(saver, messages=[HumanMessage("hi", id="1")])
    unknown = config(checkpoint_id="nope")

    assert None is saver.get_tuple(config("nobody"))
    assert None is saver.get_tuple(unknown)
    assert list(saver.list(config("nobody"))) == []
    assert list(saver.list(unknown)) == []
    for door in (
        lambda: saver.history("nobody"),
        lambda: saver.thread("nobody"),
        lambda: saver.checkpoints("nobody"),
        lambda: saver.copy_thread("nobody", "new"),
        lambda: saver.threads(after="nobody"),
    ):
        with pytest.raises(UnknownThread, match="'nobody'"):
            door()
    for door in (
        lambda: saver.history("t", checkpoint_id="nope"),
        lambda: saver.rewind("t", "nope"),
        lambda: saver.copy_thread("t", "new", checkpoint_id="nope"),
    ):
        with pytest.raises(UnknownCheckpoint, match="'nope'"):
            door()
    assert [info.thread_id for info in saver.threads()] == ["t"]


def test_arguments_out_of_range(saver: SQLiteCheckpointer) -> None:
    """Limits, strategies and retention rules that mean nothing."""
    put(saver, x=[1])
    for door, said in (
        (lambda: saver.threads(limit=0), "limit is 0"),
        (lambda: saver.prune(["t"], strategy="some"), "strategy is 'some'"),
        (lambda: saver.retain(Retention()), "rule is empty"),
        (lambda: saver.retain(Retention(last=-1)), "last is -1"),
        (lambda: saver.retain(Retention(days=-2)), "days is -2"),
        (lambda: saver.delete_thread(""), "thread_id is empty"),
        (lambda: saver.history("t", ends=(0, -1)), r"ends is \(0, -1\)"),
        (lambda: saver.history("t", ends="all"), "ends is"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigurationError, match=said):
            door()

    assert None is not saver.get_tuple(config())


# -- values


class Opaque:
    """What no serializer takes."""

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
def test_what_cannot_be_stored_is_named(saver: SQLiteCheckpointer, value: Any, path: str) -> None:
    """The path to the innermost culprit is in the error, and the checkpoint is not written."""
    with pytest.raises(Unstorable, match=path):
        put(saver, x=value)

    assert None is saver.get_tuple(config())


# -- files


def test_paths_that_cannot_be_a_database(tmp_path: Path) -> None:
    """A folder, a folder that is missing, an empty name, a text file, and another application's."""
    text = tmp_path / "notes.txt"
    text.write_text("dear diary, " * 500)
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as db:
        db.execute("CREATE TABLE recipes (x)")
    old = tmp_path / "old.db"
    with closing(sqlite3.connect(old)) as db:
        db.executescript("CREATE TABLE checkpoints (x); CREATE TABLE writes (x)")
    before = {path: path.read_bytes() for path in (text, other, old)}

    for path, kind, said in (
        (tmp_path, NotADatabase, "is a folder"),
        (tmp_path / "no" / "x.db", ConfigurationError, "does not exist; create it"),
        ("", ConfigurationError, "path is ''"),
        (text, NotADatabase, "not an SQLite database"),
        (other, NotADatabase, "another application"),
        (old, NotADatabase, "import_from"),
    ):
        with pytest.raises(kind, match=said):
            SQLiteCheckpointer.open(path)

    assert before == {path: path.read_bytes() for path in before}


def test_options_that_do_not_exist(tmp_path: Path) -> None:
    """Wrong options are refused before a file is made."""
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
def filled(tmp_path: Path) -> Path:
    """A closed file of a few hundred pages."""
    path = tmp_path / "filled.db"
    with SQLiteCheckpointer.open(path) as saver:
        for i in range(40):
            put(saver, f"t{i}", messages=[HumanMessage(f"{i} " + "x" * 9000, id=str(i))])
    return path


def read_all(path: Path) -> None:
    with SQLiteCheckpointer.open(path) as saver:
        for _ in saver.list(None):
            pass


@pytest.mark.parametrize("kept", [0.9, 0.5, 0.1])
def test_a_truncated_file(filled: Path, kept: float) -> None:
    """Opening or reading it is a StorageError, never wrong data or another exception."""
    whole = filled.read_bytes()
    filled.write_bytes(whole[: int(len(whole) * kept)])

    with pytest.raises(StorageError, match=r"filled\.db"):
        read_all(filled)


def test_an_overwritten_file(filled: Path) -> None:
    """Garbage in the middle of the file is reported, with the file named."""
    whole = bytearray(filled.read_bytes())
    whole[4096:] = os.urandom(len(whole) - 4096)
    filled.write_bytes(whole)

    with pytest.raises(StorageError, match=r"filled\.db"):
        read_all(filled)


@pytest.mark.skipif(sys.platform == "win32", reason="folders have other permissions there")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """The file cannot be made, and the error says where to look."""
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    if os.geteuid() == 0:  # whom permissions do not bind
        folder = Path("/proc")

    with pytest.raises(StorageError, match="check"):
        SQLiteCheckpointer.open(folder / "x.db")


def test_opened_read_only(filled: Path) -> None:
    """Reading works, writing says why it does not, and the file stays as it is."""
    before = filled.read_bytes()
    with SQLiteCheckpointer.open(filled, read_only=True) as saver:
        assert len(list(saver.list(None))) == 40
        with pytest.raises(StorageError, match="opened read-only"):
            put(saver, x=1)

    assert before == filled.read_bytes()


class Cramped(sqlite3.Connection):
    """A connection to a disk with little room left."""

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if sql.startswith("BEGIN"):
            super().execute("PRAGMA max_page_count = 60")
        return super().execute(sql, *args)


def test_no_disk_space(tmp_path: Path) -> None:
    """What does not fit is not written at all; what was written stays, and reading goes on."""
    path = tmp_path / "x.db"
    written = 0
    with SQLiteCheckpointer.open(path, factory=Cramped) as saver:
        with contextlib.suppress(StorageFull):
            while written < 100:
                put(saver, f"t{written}", messages=[HumanMessage("x" * 9000, id="1")])
                written += 1
        with pytest.raises(StorageFull, match="free disk space"):
            put(saver, "one more", messages=[HumanMessage("x" * 9000, id="1")])
        found = [info.thread_id for info in saver.threads(limit=100)]
        assert written == len(list(saver.list(None)))
    with SQLiteCheckpointer.open(path) as saver:
        put(saver, "later", x=1)

    assert 0 < written < 100
    assert {f"t{i}" for i in range(written)} == set(found)


# -- damage and deletion


@pytest.mark.parametrize("body", [b"", b"\x00", b"\xc1\xc1", b"\x01\xc1", b"\x1f\xff", b"\x10\xc1"])
@pytest.mark.parametrize("table", ["items", "checkpoints", "writes"])
def test_a_damaged_row_without_encryption(tmp_path: Path, table: str, body: bytes) -> None:
    """Bytes that make no sense are a CorruptRecord; the thread can still be deleted."""
    path = tmp_path / "plain.db"
    with SQLiteCheckpointer.open(path) as saver:
        at = put(saver, messages=[HumanMessage("hi", id="1"), HumanMessage("x" * 200, id="2")])
        saver.put_writes(at, [("messages", "y" * 200)], "task")
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"UPDATE {table} SET body = ?", (body,))
        db.commit()

    with SQLiteCheckpointer.open(path) as saver:
        with pytest.raises(CorruptRecord):
            saver.get_tuple(config())
        saver.delete_thread("t")

        assert saver.threads() == []


def test_deleted_text_is_gone_from_the_file(tmp_path: Path) -> None:
    """After a deletion no byte of the text is left, not even in free pages or the WAL."""
    path = tmp_path / "x.db"
    with SQLiteCheckpointer.open(path) as saver:
        put(
            saver, "gone", messages=[HumanMessage(SECRET, id="1"), HumanMessage("x" * 9000, id="2")]
        )
        put(saver, "stays", messages=[HumanMessage("hello", id="1")])
        saver.delete_thread("gone")
    raw = b"".join(found.read_bytes() for found in tmp_path.iterdir() if found.is_file())

    assert SECRET.encode() not in raw
    assert b"xxxxxxxx" not in raw
    assert b"hello" in raw


def test_every_error_is_a_perdure_error() -> None:
    """One hierarchy, and its drawing in the docstring names each."""
    from perdure import errors

    kinds = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception)
    ]

    assert all(issubclass(kind, PerdureError) for kind in kinds)
    assert all(
        kind.__name__ in (errors.__doc__ or "") for kind in kinds if kind is not PerdureError
    )
