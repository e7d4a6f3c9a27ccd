"""New Postgres databases for commands, which have no option for a schema."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from tests import postgres_server


@contextmanager
def postgres_database() -> Iterator[str]:
    """Yield the DSN of a new database, which is dropped at the end."""
    server_dsn, name = postgres_server.dsn(), f"cli_{uuid.uuid4().hex}"
    with psycopg.connect(server_dsn, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name}")
        try:
            yield server_dsn.replace(
                str(psycopg.conninfo.conninfo_to_dict(server_dsn)["dbname"]), name
            )
        finally:
            conn.execute(f"DROP DATABASE {name} WITH (FORCE)")
