"""Encryption: nothing in clear, no wrong key, no row that was changed or moved."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from langchain_core.messages import HumanMessage

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import CorruptRecord, WrongKey
from perdure.storage.database import Schema
from perdure.storage.encryption import AESGCMSeal, ChecksumSeal, Seal, check_key_and_bind_seal
from perdure.storage.sqlite import SQLiteDatabase
from tests.backends import KEY
from tests.checkpointers.test_bad_input import SECRET, make_checkpoint, make_config, put


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """A closed, encrypted file with a secret in every place a value can have."""
    path = tmp_path / "sealed.db"
    with SQLiteCheckpointer.open(path, key=KEY) as saver:
        at = put(
            saver,
            messages=[HumanMessage(SECRET, id="1"), HumanMessage(SECRET[::-1], id="2")],
            small=SECRET[:40],
            notes={"a": SECRET, "b": "x" * 300},
        )
        new = make_checkpoint("2", messages=[HumanMessage(SECRET, id="1")])
        saver.put(at, new, {"source": "loop", "user": SECRET}, {"messages": 2})  # type: ignore[typeddict-unknown-key]
        saver.put_writes(make_config(checkpoint_id="2"), [("messages", SECRET), ("x", 5)], "task")
    return path


def test_nothing_is_in_the_file_in_clear(sealed: Path) -> None:
    """No value, message or metadata value, nor a piece of one, is found in the raw bytes."""
    raw = b"".join(path.read_bytes() for path in sealed.parent.iterdir() if path.is_file())

    for part in ("harbour", "Ottilie", SECRET[::-1][:12], "human", "xxxxxxxx"):
        assert part.encode() not in raw


@pytest.mark.parametrize("key", [None, b"another key, 32 bytes long......", KEY[:16]])
def test_a_wrong_key(sealed: Path, key: bytes | None) -> None:
    """Another key, or none, is refused at once and the file is not touched."""
    before = sealed.read_bytes()
    with pytest.raises(WrongKey, match=r"sealed\.db"):
        SQLiteCheckpointer.open(sealed, key=key)

    assert before == sealed.read_bytes()


@pytest.mark.parametrize("filled", [True, False])
def test_a_key_for_a_plain_file(tmp_path: Path, filled: bool) -> None:
    """A file made without a key, were it empty, does not become a mixture."""
    path = tmp_path / "plain.db"
    with SQLiteCheckpointer.open(path) as saver:
        if filled:
            put(saver, messages=[HumanMessage("plain", id="1")])
    for read_only in (False, True):
        with pytest.raises(WrongKey, match="created without a key"):
            SQLiteCheckpointer.open(path, key=KEY, read_only=read_only)

    with SQLiteCheckpointer.open(path) as saver:
        assert filled is (saver.get_tuple(make_config()) is not None)


NOTES = Schema("notes", "CREATE TABLE notes (n INTEGER PRIMARY KEY) STRICT")


def opened_notes(path: Path, seal: Seal, *, read_only: bool = False) -> None:
    """Another component opens a file, and lets go of it."""
    database = SQLiteDatabase(
        path,
        NOTES,
        begin=lambda: check_key_and_bind_seal(seal, str(path), read_only=read_only),
        read_only=read_only,
    )
    database.connect()
    database.close()


def test_the_components_of_a_file_have_one_key(sealed: Path) -> None:
    """What one component made with a key, another opens with the same key alone."""
    for other in (ChecksumSeal(), AESGCMSeal(b"another key, 32 bytes long......")):
        with pytest.raises(WrongKey, match=r"sealed\.db"):
            opened_notes(sealed, other)
    for read_only in (False, True):
        opened_notes(sealed, AESGCMSeal(KEY), read_only=read_only)


def test_the_first_component_decides(tmp_path: Path) -> None:
    """Whichever component makes a file, a checkpointer in it has to have its key."""
    path = tmp_path / "notes.db"
    opened_notes(path, AESGCMSeal(KEY))
    with pytest.raises(WrongKey, match="is encrypted"):
        SQLiteCheckpointer.open(path)
    with SQLiteCheckpointer.open(path, key=KEY) as saver:
        put(saver, messages=[HumanMessage(SECRET, id="1")])

    assert SECRET.encode() not in path.read_bytes()


def test_reading_records_no_key(tmp_path: Path) -> None:
    """A file of which nothing is recorded yet is read with any key, and left as it is."""
    path = tmp_path / "notes.db"
    database = SQLiteDatabase(path, NOTES)
    database.connect()
    database.close()
    before = path.read_bytes()
    for seal in (ChecksumSeal(), AESGCMSeal(KEY)):
        opened_notes(path, seal, read_only=True)

    assert before == path.read_bytes()


def tables() -> Iterator[tuple[str, str, str]]:
    """`(table, column, key)` of every sealed column."""
    yield from (
        ("items", "body", "row_key"),
        ("checkpoints", "body", "row_key"),
        ("writes", "body", "task_id"),
    )


@pytest.mark.parametrize(("table", "column", "key"), list(tables()))
def test_a_tampered_row(sealed: Path, table: str, column: str, key: str) -> None:
    """One flipped bit is noticed, whichever row it is in."""
    with closing(sqlite3.connect(sealed)) as db:
        rows = db.execute(f"SELECT {key}, {column} FROM {table}").fetchall()
    assert rows
    for row_key, body in rows:
        copy = sealed.parent / "copy.db"
        shutil.copy(sealed, copy)
        with closing(sqlite3.connect(copy)) as db:
            changed = bytes((*body[:-1], body[-1] ^ 1))
            db.execute(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (changed, row_key))
            db.commit()
        with (
            SQLiteCheckpointer.open(copy, key=KEY) as saver,
            pytest.raises(CorruptRecord, match="does not decrypt"),
        ):
            list(saver.list(make_config()))


def test_rows_that_were_swapped(sealed: Path) -> None:
    """A row is bound to its place: two messages of one thread cannot change places."""
    with closing(sqlite3.connect(sealed)) as db:
        (one, first), (two, second) = db.execute(
            "SELECT row_key, body FROM items ORDER BY row_key LIMIT 2"
        ).fetchall()
        db.execute("UPDATE items SET body = ? WHERE row_key = ?", (second, one))
        db.execute("UPDATE items SET body = ? WHERE row_key = ?", (first, two))
        db.commit()

    with (
        SQLiteCheckpointer.open(sealed, key=KEY) as saver,
        pytest.raises(CorruptRecord, match="does not decrypt"),
    ):
        saver.get_tuple(make_config())


def test_a_write_that_was_moved_to_another_path(sealed: Path) -> None:
    """The path that orders pending writes is bound to them too."""
    with closing(sqlite3.connect(sealed)) as db:
        db.execute("UPDATE writes SET task_path = task_path || '!'")
        db.commit()

    with (
        SQLiteCheckpointer.open(sealed, key=KEY) as saver,
        pytest.raises(CorruptRecord, match="does not decrypt"),
    ):
        list(saver.list(make_config()))
