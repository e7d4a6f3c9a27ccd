"""The comparison of the SQL of tables, and the limits of reads of an untrusted file."""

from __future__ import annotations

import _thread
import signal
import sqlite3
import threading
from collections.abc import Iterator
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
from tests.hostile_files import ENDLESS, execute_sql

TABLE = "CREATE TABLE t (a TEXT NOT NULL DEFAULT 'It''s, (A)', b ANY, PRIMARY KEY (a, b)) STRICT"
EQUIVALENT_SQL = [
    "create  table \"t\"\n(a text not null default 'It''s, (A)', [b] any, primary key(a,b)) strict",
    "CREATE TABLE IF NOT EXISTS t -- of (x, y)\n"
    "(b ANY, a TEXT NOT NULL DEFAULT 'It''s, (A)' /* , c */, PRIMARY KEY (a, b)) STRICT",
]
DIFFERENT_SQL = [
    TABLE.replace("It", "it"),
    TABLE.replace(" STRICT", ""),
    TABLE.replace("(a, b)", "(b, a)"),
    TABLE.replace("b ANY", "b ANY, c ANY"),
    TABLE.replace("b ANY", "b ANY CHECK (a)"),
    TABLE.replace("b ANY, ", ""),
    TABLE.replace("b ANY", 'b ANY "x y"'),
]


@pytest.mark.parametrize("sql", EQUIVALENT_SQL)
def test_read_tables_ignores_spaces_comments_case_and_column_order(sql: str) -> None:
    """Quotation marks are ignored, too."""
    assert read_tables(TABLE) == read_tables(sql)


@pytest.mark.parametrize("sql", DIFFERENT_SQL)
def test_read_tables_detects_every_change_of_meaning(sql: str) -> None:
    """Examples are texts, options, the order within a key, and additional definitions."""
    assert read_tables(TABLE) != read_tables(sql)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    execute_sql(tmp_path / "x.db", "CREATE TABLE t (a)")
    return tmp_path / "x.db"


def connect(path: Path, guard: UntrustedFileGuard) -> UntrustedConnection:
    conn = sqlite3.connect(path, isolation_level=None, factory=UntrustedConnection)
    guard.set_connection_limits(conn)
    return conn


def test_endless_statement_is_stopped(path: Path) -> None:
    """The limit of steps depends on the size of the file, and applies to each read."""
    guard = UntrustedFileGuard(str(path), {"t": None}, IMPORT_VALUE_BYTES)
    with closing(connect(path, guard)) as conn:
        with (
            pytest.raises(CorruptRecord, match="too long for a file of this size"),
            guard.check_file_and_limit_reads_during_block(conn),
        ):
            conn.execute(f"SELECT count(*) FROM ({ENDLESS.format('i')})").fetchall()
        conn.rollback()
        with guard.check_file_and_limit_reads_during_block(conn):
            assert conn.execute("SELECT a FROM t").fetchall() == []


@pytest.fixture
def default_ctrl_c() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, also if the shell started the tests with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_ctrl_c")
def test_ctrl_c_interrupts_a_running_statement(path: Path) -> None:
    """Python would notice the signal only when the statement has ended."""
    guard = UntrustedFileGuard(str(path), {"t": None}, IMPORT_VALUE_BYTES)
    with closing(connect(path, guard)) as conn:
        timer = threading.Timer(0.2, _thread.interrupt_main)

        def read() -> None:
            with guard.check_file_and_limit_reads_during_block(conn):
                conn.limit = 1 << 62
                timer.start()
                conn.execute(f"SELECT count(*) FROM ({ENDLESS.format('i')})").fetchall()

        with pytest.raises(KeyboardInterrupt):
            read()
        timer.join()
