"""How the SQL of tables is compared, and how a read of a file from elsewhere ends."""

from __future__ import annotations

import _thread
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from perdure.errors import CorruptRecord
from perdure.storage.untrusted_sqlite import (
    IMPORT_VALUE_BYTES,
    UntrustedConnection,
    UntrustedFileGuard,
    read_tables,
)
from tests.hostile_files import ENDLESS, change

TABLE = "CREATE TABLE t (a TEXT NOT NULL DEFAULT 'It''s, (A)', b ANY, PRIMARY KEY (a, b)) STRICT"
SAME = [
    "create  table \"t\"\n(a text not null default 'It''s, (A)', [b] any, primary key(a,b)) strict",
    "CREATE TABLE IF NOT EXISTS t -- of (x, y)\n"
    "(b ANY, a TEXT NOT NULL DEFAULT 'It''s, (A)' /* , c */, PRIMARY KEY (a, b)) STRICT",
]
OTHER = [
    TABLE.replace("It", "it"),
    TABLE.replace(" STRICT", ""),
    TABLE.replace("(a, b)", "(b, a)"),
    TABLE.replace("b ANY", "b ANY, c ANY"),
    TABLE.replace("b ANY", "b ANY CHECK (a)"),
    TABLE.replace("b ANY, ", ""),
    TABLE.replace("b ANY", 'b ANY "x y"'),
]


@pytest.mark.parametrize("sql", SAME)
def test_what_does_not_change_the_meaning_is_left_out(sql: str) -> None:
    """Spaces, comments, case, quotation marks and the order of columns."""
    assert read_tables(TABLE) == read_tables(sql)


@pytest.mark.parametrize("sql", OTHER)
def test_what_changes_the_meaning_counts(sql: str) -> None:
    """Text, options, the order within a key, and each definition more or less."""
    assert read_tables(TABLE) != read_tables(sql)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    change(tmp_path / "x.db", "CREATE TABLE t (a)")
    return tmp_path / "x.db"


def connect(path: Path, guard: UntrustedFileGuard) -> UntrustedConnection:
    conn = sqlite3.connect(path, isolation_level=None, factory=UntrustedConnection)
    guard.set_connection_limits(conn)
    return conn


def test_a_statement_without_an_end_is_stopped(path: Path) -> None:
    """It may take as many steps as the size of the file allows, and the next read begins anew."""
    guard = UntrustedFileGuard(str(path), {"t": None}, IMPORT_VALUE_BYTES)
    with closing(connect(path, guard)) as conn:
        with (
            pytest.raises(CorruptRecord, match="took more steps"),
            guard.check_and_limit_untrusted_read(conn),
        ):
            conn.execute(f"SELECT count(*) FROM ({ENDLESS.format('i')})").fetchall()
        conn.rollback()
        with guard.check_and_limit_untrusted_read(conn):
            assert conn.execute("SELECT a FROM t").fetchall() == []


def test_ctrl_c_ends_a_statement(path: Path) -> None:
    """Python would notice the signal only when the statement has ended."""
    guard = UntrustedFileGuard(str(path), {"t": None}, IMPORT_VALUE_BYTES)
    with closing(connect(path, guard)) as conn:
        timer = threading.Timer(0.2, _thread.interrupt_main)

        def read() -> None:
            with guard.check_and_limit_untrusted_read(conn):
                conn.limit = 1 << 62
                timer.start()
                conn.execute(f"SELECT count(*) FROM ({ENDLESS.format('i')})").fetchall()

        with pytest.raises(KeyboardInterrupt):
            read()
        timer.join()
