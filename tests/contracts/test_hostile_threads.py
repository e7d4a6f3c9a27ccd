"""Imports of threads whose rows have valid checksums and content that perdure never writes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.manifest import ITEM, LIST, MAP
from perdure.checkpointers.records import (
    build_item_associated_data,
    build_row_key,
    compute_item_hash,
    decode_stored_id,
    encrypt_checkpoint,
)
from perdure.errors import CorruptRecord
from perdure.graphs import chat_graph
from tests.hostile_files import execute_sql

_FAR = (1 << 31) - 2  # the second-highest position that an item can have
EditReferences = Callable[[dict[str, Any], int, int], dict[str, Any]]


@pytest.fixture
def other_path(tmp_path: Path) -> Path:
    """A database with a thread of three messages."""
    path = tmp_path / "other.db"
    with SQLiteCheckpointer.open(path) as saver:
        graph: Any = chat_graph(checkpointer=saver)
        for text in ("one", "two", "three"):
            graph.invoke({"messages": [("human", text)]}, {"configurable": {"thread_id": "t"}})
    return path


def edit_head(path: Path, edit: EditReferences) -> None:
    """Replace the references of the head, and encrypt the row as perdure does.

    `edit` gets the references, the key of the log of messages, and the number of its items.
    """
    with SQLiteCheckpointer.open(path) as saver, closing(sqlite3.connect(path)) as conn, conn:
        reader: Any = saver._reader
        ((log, count),) = conn.execute(
            "SELECT log_key, count(*) FROM logs JOIN items ON items.row_key >> 32 = log_key "
            "WHERE channel = 'messages'"
        )
        row = conn.execute(
            "SELECT row_key, checkpoint_id, parent_id, run_start, put_at, body FROM checkpoints "
            "ORDER BY row_key DESC"
        ).fetchone()
        snapshot = reader.decrypt_checkpoint_row("t", "", row)
        edited = replace(snapshot, references=edit(snapshot.references, log, count))
        row_fields = row[0], decode_stored_id(row[1]), decode_stored_id(row[2]), *row[3:5]
        body = encrypt_checkpoint(reader.seal, "t", "", row_fields, edited, snapshot.transcript)
        conn.execute("UPDATE checkpoints SET body = ? WHERE row_key = ?", (body, row[0]))


def nest_dicts(depth: int, inner: Any) -> Any:
    for _ in range(depth):
        inner = [MAP, {"x": inner}]
    return inner


INVALID_REFERENCES: dict[str, EditReferences] = {
    "range longer than log": lambda refs, log, n: {"messages": [LIST, log, [0, 1 << 32]]},
    "position too large": lambda refs, log, n: {"messages": [LIST, log, [1 << 60, 1]]},
    "negative position": lambda refs, log, n: {"messages": [LIST, log, [-1, 2]]},
    "items a million times": lambda refs, log, n: {"messages": [LIST, log, [0, n] * 1_000_000]},
    "one position too many": lambda refs, log, n: {"messages": [LIST, log, [0, n + 1]]},
    "odd number of bounds": lambda refs, log, n: {"messages": [LIST, log, [0, n, 0]]},
    "unknown log": lambda refs, log, n: {"messages": [LIST, log + 1000, [0, 1]]},
    "positions as text": lambda refs, log, n: {"messages": [LIST, log, ["0", "1"]]},
    "unknown kind": lambda refs, log, n: {"messages": [99, log, [0, 1]]},
    "unknown item": lambda refs, log, n: {"messages": [ITEM, log, n]},
    "empty reference": lambda refs, log, n: {"messages": []},
    "number as reference": lambda refs, log, n: {"messages": 7},
    "nested too deeply": lambda refs, log, n: {"messages": nest_dicts(110, [ITEM, log, 0])},
}


@pytest.mark.parametrize("edit", INVALID_REFERENCES.values(), ids=INVALID_REFERENCES)
def test_import_refuses_invalid_references(
    edit: EditReferences, other_path: Path, tmp_path: Path
) -> None:
    """The error names the thread, and nothing of the thread is stored."""
    edit_head(other_path, edit)
    with (
        SQLiteCheckpointer.open(other_path, untrusted=True) as theirs,
        SQLiteCheckpointer.open(tmp_path / "new.db") as saver,
    ):
        with pytest.raises(CorruptRecord, match="thread 't' of"):
            saver.import_from(theirs)

        assert saver.threads() == []


INVALID_NUMBERS = {
    "infinite updated_at": "UPDATE threads SET updated_at = 9e999",
    "negative created_at": "UPDATE threads SET created_at = -1",
    "updated_at too late": "UPDATE threads SET updated_at = 1e15",
    "last_seq too large": "UPDATE threads SET last_seq = 4611686018427387904",
    "last_seq as large as a row key": "UPDATE threads SET last_seq = 4294967295",
    "infinite stored_at": "UPDATE items SET stored_at = 9e999",
    "infinite ttl_minutes": "UPDATE threads SET ttl_minutes = 9e999",
    "unknown explicit_head": "UPDATE namespaces SET explicit_head = 2147483648",
    "invalid ttl_keeps_latest": "UPDATE threads SET ttl_minutes = 1, ttl_keeps_latest = 9",
}


@pytest.mark.parametrize("sql", INVALID_NUMBERS.values(), ids=INVALID_NUMBERS)
def test_import_refuses_rows_with_invalid_times_and_numbers(
    sql: str, other_path: Path, tmp_path: Path
) -> None:
    """An invalid time would make every later list of threads fail."""
    execute_sql(other_path, sql)
    with (
        SQLiteCheckpointer.open(other_path, untrusted=True) as theirs,
        SQLiteCheckpointer.open(tmp_path / "new.db") as saver,
    ):
        with pytest.raises(CorruptRecord, match="thread 't' of"):
            saver.import_from(theirs)

        assert saver.threads() == []


def test_import_accepts_list_that_contains_items_twice(other_path: Path, tmp_path: Path) -> None:
    """The checks accept every reference to existing items."""
    edit_head(other_path, lambda refs, log, n: {"messages": [LIST, log, [0, n, 0, n]]})
    with (
        SQLiteCheckpointer.open(other_path, untrusted=True) as theirs,
        SQLiteCheckpointer.open(tmp_path / "new.db") as saver,
    ):
        assert saver.import_from(theirs).threads == 1
        assert saver.history("t") == theirs.history("t")


def test_import_of_log_with_large_gap_needs_few_statements(
    other_path: Path, tmp_path: Path
) -> None:
    """A gap of two thousand million positions needs fewer than 2000 statements."""
    with (
        SQLiteCheckpointer.open(other_path) as saver,
        closing(sqlite3.connect(other_path)) as conn,
        conn,
    ):
        seal = saver._reader.seal
        ((log,),) = conn.execute("SELECT log_key FROM logs WHERE channel = 'messages'")
        body = seal.seal(b"\x11", build_item_associated_data("t", "messages", _FAR))
        row = build_row_key(log, _FAR), compute_item_hash(seal, log, b"\x11"), 1.0, body
        conn.execute(
            "INSERT INTO items (row_key, content_hash, stored_at, body) VALUES (?, ?, ?, ?)", row
        )
    statements: list[str] = []
    with (
        SQLiteCheckpointer.open(other_path, untrusted=True) as theirs,
        SQLiteCheckpointer.open(
            tmp_path / "new.db",
            factory=partial(_TracingConnection, statements),
        ) as saver,
    ):
        saver.import_from(theirs)
        saver.copy_thread("t", "copy")

        assert saver.history("t") == theirs.history("t")
        assert len(statements) < 2000


class _TracingConnection(sqlite3.Connection):
    """A connection that records its statements."""

    def __init__(self, statements: list[str], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.set_trace_callback(statements.append)


def test_read_refuses_range_that_is_longer_than_log(other_path: Path) -> None:
    """A damaged file of the user does not exhaust the memory either."""
    edit_head(other_path, lambda refs, log, n: {"messages": [LIST, log, [0, 1 << 40]]})
    with (
        SQLiteCheckpointer.open(other_path) as saver,
        pytest.raises(CorruptRecord, match=r"some of the items .* are missing"),
    ):
        saver.get_tuple({"configurable": {"thread_id": "t"}})
