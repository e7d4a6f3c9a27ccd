"""Encryption: no plain text in the file, no wrong key, and no changed or moved rows."""

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
def encrypted_file(tmp_path: Path) -> Path:
    """A closed, encrypted file with a secret in every kind of value."""
    path = tmp_path / "sealed.db"
    with SQLiteCheckpointer.open(path, key=KEY) as saver:
        config = put(
            saver,
            messages=[HumanMessage(SECRET, id="1"), HumanMessage(SECRET[::-1], id="2")],
            small=SECRET[:40],
            notes={"a": SECRET, "b": "x" * 300},
        )
        checkpoint = make_checkpoint("2", messages=[HumanMessage(SECRET, id="1")])
        saver.put(config, checkpoint, {"source": "loop", "user": SECRET}, {"messages": 2})  # type: ignore[typeddict-unknown-key]
        saver.put_writes(make_config(checkpoint_id="2"), [("messages", SECRET), ("x", 5)], "task")
    return path


def test_encrypted_file_contains_no_plain_text(encrypted_file: Path) -> None:
    """The raw bytes contain no part of any value, message or metadata."""
    file_bytes = b"".join(
        path.read_bytes() for path in encrypted_file.parent.iterdir() if path.is_file()
    )

    for part in ("harbour", "Ottilie", SECRET[::-1][:12], "human", "xxxxxxxx"):
        assert part.encode() not in file_bytes


@pytest.mark.parametrize("key", [None, b"another key, 32 bytes long......", KEY[:16]])
def test_encrypted_file_is_refused_with_wrong_key(encrypted_file: Path, key: bytes | None) -> None:
    """The file is not changed."""
    before = encrypted_file.read_bytes()
    with pytest.raises(WrongKey, match=r"sealed\.db"):
        SQLiteCheckpointer.open(encrypted_file, key=key)

    assert before == encrypted_file.read_bytes()


@pytest.mark.parametrize("filled", [True, False])
def test_plain_file_is_refused_with_a_key(tmp_path: Path, filled: bool) -> None:
    """A file that was created without a key stays unencrypted, even if it is empty."""
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


def open_and_close_notes(path: Path, seal: Seal, *, read_only: bool = False) -> None:
    """Open a file as another component, and close it."""
    database = SQLiteDatabase(
        path,
        NOTES,
        begin=lambda: check_key_and_bind_seal(seal, str(path), read_only=read_only),
        read_only=read_only,
    )
    database.connect()
    database.close()


def test_all_components_of_a_file_need_the_same_key(encrypted_file: Path) -> None:
    """A second component can open the file only with the key of the first one."""
    for other in (ChecksumSeal(), AESGCMSeal(b"another key, 32 bytes long......")):
        with pytest.raises(WrongKey, match=r"sealed\.db"):
            open_and_close_notes(encrypted_file, other)
    for read_only in (False, True):
        open_and_close_notes(encrypted_file, AESGCMSeal(KEY), read_only=read_only)


def test_first_component_decides_the_key_of_a_file(tmp_path: Path) -> None:
    """A checkpointer needs the key of the component that created the file."""
    path = tmp_path / "notes.db"
    open_and_close_notes(path, AESGCMSeal(KEY))
    with pytest.raises(WrongKey, match="is encrypted"):
        SQLiteCheckpointer.open(path)
    with SQLiteCheckpointer.open(path, key=KEY) as saver:
        put(saver, messages=[HumanMessage(SECRET, id="1")])

    assert SECRET.encode() not in path.read_bytes()


def test_opening_read_only_records_no_key(tmp_path: Path) -> None:
    """A file without a recorded key can be read with any key, and is not changed."""
    path = tmp_path / "notes.db"
    database = SQLiteDatabase(path, NOTES)
    database.connect()
    database.close()
    before = path.read_bytes()
    for seal in (ChecksumSeal(), AESGCMSeal(KEY)):
        open_and_close_notes(path, seal, read_only=True)

    assert before == path.read_bytes()


def iter_encrypted_columns() -> Iterator[tuple[str, str, str]]:
    """Yield `(table, column, key)` of every encrypted column."""
    yield from (
        ("items", "body", "row_key"),
        ("checkpoints", "body", "row_key"),
        ("writes", "body", "task_id"),
    )


@pytest.mark.parametrize(("table", "column", "key"), list(iter_encrypted_columns()))
def test_tampered_row_does_not_decrypt(
    encrypted_file: Path, table: str, column: str, key: str
) -> None:
    """One flipped bit in any row is detected."""
    with closing(sqlite3.connect(encrypted_file)) as db:
        rows = db.execute(f"SELECT {key}, {column} FROM {table}").fetchall()
    assert rows
    for row_key, body in rows:
        copy = encrypted_file.parent / "copy.db"
        shutil.copy(encrypted_file, copy)
        with closing(sqlite3.connect(copy)) as db:
            changed = bytes((*body[:-1], body[-1] ^ 1))
            db.execute(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (changed, row_key))
            db.commit()
        with (
            SQLiteCheckpointer.open(copy, key=KEY) as saver,
            pytest.raises(CorruptRecord, match="cannot be decrypted"),
        ):
            list(saver.list(make_config()))


def test_swapped_rows_do_not_decrypt(encrypted_file: Path) -> None:
    """A row is bound to its key, so two messages of one thread cannot change places."""
    with closing(sqlite3.connect(encrypted_file)) as db:
        (one, first), (two, second) = db.execute(
            "SELECT row_key, body FROM items ORDER BY row_key LIMIT 2"
        ).fetchall()
        db.execute("UPDATE items SET body = ? WHERE row_key = ?", (second, one))
        db.execute("UPDATE items SET body = ? WHERE row_key = ?", (first, two))
        db.commit()

    with (
        SQLiteCheckpointer.open(encrypted_file, key=KEY) as saver,
        pytest.raises(CorruptRecord, match="cannot be decrypted"),
    ):
        saver.get_tuple(make_config())


def test_write_with_changed_task_path_does_not_decrypt(encrypted_file: Path) -> None:
    """The task path, which orders pending writes, is bound to the row, too."""
    with closing(sqlite3.connect(encrypted_file)) as db:
        db.execute("UPDATE writes SET task_path = task_path || '!'")
        db.commit()

    with (
        SQLiteCheckpointer.open(encrypted_file, key=KEY) as saver,
        pytest.raises(CorruptRecord, match="cannot be decrypted"),
    ):
        list(saver.list(make_config()))
