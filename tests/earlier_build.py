"""Databases that the build of commit 766967af wrote, with one thread and one item in each.

That build recorded no hashes of the scripts that created its tables.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg import sql

from tests import postgres_server
from tests.layout import ROOT

_DATA: Final = ROOT / "tests" / "data"
_SCHEMA: Final = "earlier_build"  # the name of the Postgres schema in the dump


def write_file(path: Path) -> bytes:
    """Write the SQLite file to a path, and return its bytes."""
    data = gzip.decompress((_DATA / "earlier_build.db.gz").read_bytes())
    path.write_bytes(data)
    return data


def create_schema(name: str) -> None:
    """Create the Postgres schema under another name, in the database of the test run."""
    dump = (_DATA / "earlier_build.sql").read_text().replace(_SCHEMA, name)
    with psycopg.connect(postgres_server.dsn()) as conn:
        conn.execute(dump.encode())


def read_schema(name: str) -> Any:
    """Return all columns and rows of a Postgres schema, with their row versions."""
    with psycopg.connect(postgres_server.dsn()) as conn:
        columns = conn.execute(
            "SELECT c.relname, a.attname, c.xmin::text, a.xmin::text FROM pg_class c "
            "JOIN pg_attribute a ON a.attrelid = c.oid "
            "WHERE relnamespace = %s::regnamespace ORDER BY 1, 2",
            (name,),
        ).fetchall()
        tables = conn.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = %s ORDER BY 1", (name,)
        ).fetchall()
        rows = {
            table: conn.execute(
                sql.SQL("SELECT xmin::text, ctid::text, r::text FROM {} AS r").format(
                    sql.Identifier(name, table)
                )
            ).fetchall()
            for (table,) in tables
        }
    return columns, rows
