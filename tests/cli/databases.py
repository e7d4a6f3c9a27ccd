"""Databases of Postgres for commands, which take no schema."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from tests import postgres_server


@contextmanager
def postgres_database() -> Iterator[str]:
    """The DSN of a new database, which is dropped at the end."""
    ours, name = postgres_server.dsn(), f"cli_{uuid.uuid4().hex}"
    with psycopg.connect(ours, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name}")
        try:
            yield ours.replace(str(psycopg.conninfo.conninfo_to_dict(ours)["dbname"]), name)
        finally:
            conn.execute(f"DROP DATABASE {name} WITH (FORCE)")
