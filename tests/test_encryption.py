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
from tests.backends import KEY
from tests.test_bad_input import SECRET, checkpoint, config, put


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
        new = checkpoint("2", messages=[HumanMessage(SECRET, id="1")])
        saver.put(at, new, {"source": "loop", "user": SECRET}, {"messages": 2})  # type: ignore[typeddict-unknown-key]
        saver.put_writes(config(checkpoint_id="2"), [("messages", SECRET), ("x", 5)], "task")
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


def test_a_key_for_a_plain_file(tmp_path: Path) -> None:
    """A file that holds plain threads does not become a mixture."""
    filled = tmp_path / "filled.db"
    with SQLiteCheckpointer.open(filled) as saver:
        put(saver, messages=[HumanMessage("plain", id="1")])
    with pytest.raises(WrongKey, match="not encrypted"):
        SQLiteCheckpointer.open(filled, key=KEY)


def tables() -> Iterator[tuple[str, str, str]]:
    """`(table, column, key)` of every sealed column."""
    yield from (("log", "body", "id"), ("checkpoints", "body", "id"), ("writes", "body", "task"))


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
            list(saver.list(config()))


def test_rows_that_were_swapped(sealed: Path) -> None:
    """A row is bound to its place: two messages of one thread cannot change places."""
    with closing(sqlite3.connect(sealed)) as db:
        (one, first), (two, second) = db.execute(
            "SELECT id, body FROM log ORDER BY id LIMIT 2"
        ).fetchall()
        db.execute("UPDATE log SET body = ? WHERE id = ?", (second, one))
        db.execute("UPDATE log SET body = ? WHERE id = ?", (first, two))
        db.commit()

    with (
        SQLiteCheckpointer.open(sealed, key=KEY) as saver,
        pytest.raises(CorruptRecord, match="does not decrypt"),
    ):
        saver.get_tuple(config())


def test_a_write_that_was_moved_to_another_path(sealed: Path) -> None:
    """The path that orders pending writes is bound to them too."""
    with closing(sqlite3.connect(sealed)) as db:
        db.execute("UPDATE writes SET path = path || '!'")
        db.commit()

    with (
        SQLiteCheckpointer.open(sealed, key=KEY) as saver,
        pytest.raises(CorruptRecord, match="does not decrypt"),
    ):
        list(saver.list(config()))
