"""Several `perdure worker` processes with threads, memories and jobs in one Postgres database."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from sqlalchemy import create_engine
from sqlalchemy.pool import StaticPool

from perdure import PostgresCheckpointer, PostgresStore
from perdure.errors import ConfigurationError
from perdure.memory.long_term import background
from perdure.memory.long_term.background import Background
from perdure.memory.long_term.extraction import Extraction
from perdure.storage.postgres_dsn import format_uri
from tests import postgres_server
from tests.durability.processes import PATIENCE_S
from tests.talks import store_conversation

RUN = "from perdure.cli import main; main()"
THREADS, WORKERS = 12, 2


def list_memories(store: PostgresStore) -> list[Any]:
    """Return the extracted memories of both users."""
    return [item for user in range(2) for item in store.search(("memories", f"u{user}"), limit=99)]


@pytest.fixture
def database() -> Iterator[str]:
    """Create a database, because commands only use the default schema, and yield its DSN."""
    name = f"workers_{os.getpid()}"
    with psycopg.connect(postgres_server.dsn(), autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name}")
    yield format_uri(f"{postgres_server.dsn()}&dbname={name}")
    with psycopg.connect(postgres_server.dsn(), autocommit=True) as conn:
        conn.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.slow
def test_two_postgres_workers_do_each_job_once(database: str) -> None:
    """Each memory is in the database once."""
    with PostgresCheckpointer.open(database) as saver, PostgresStore.open(database) as store:
        for number in range(THREADS):
            store_conversation(
                saver, f"t{number}", texts=[f"I live in town {number}"], user_id=f"u{number % 2}"
            )
        command = [sys.executable, "-c", RUN, "worker", "--delay", "0", "--json"]
        environment = {**os.environ, "PERDURE_DB": database}
        workers = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            for _ in range(WORKERS)
        ]
        end = time.monotonic() + PATIENCE_S
        memories: list[Any] = []
        while len(memories) < THREADS and time.monotonic() < end:
            time.sleep(0.2)
            memories = list_memories(store)
        time.sleep(0.5)  # time for a job that would wrongly be done twice
        for worker in workers:
            worker.terminate()
        jobs = [
            json.loads(line) for worker in workers for line in worker.communicate()[0].splitlines()
        ]
        memories = list_memories(store)

    assert Counter(job["thread_id"] for job in jobs) == {f"t{n}": 1 for n in range(THREADS)}
    assert {job["state"] for job in jobs} == {"done"}
    assert len(memories) == len({item.provenance.message_ids for item in memories}) == THREADS


@pytest.mark.slow
def test_worker_accepts_keyword_dsn_and_other_date_style(database: str) -> None:
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute(f"ALTER DATABASE {conn.info.dbname} SET DateStyle TO German")
    parts: dict[str, Any] = {**conninfo_to_dict(database)}
    dsn = make_conninfo(**parts)
    with PostgresCheckpointer.open(dsn) as saver:
        store_conversation(saver, "t", user_id="u0")
    command = [sys.executable, "-c", RUN, "worker", "--once", "--json", "--database", dsn]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PERDURE_DB": dsn}
    )

    assert (done.returncode, json.loads(done.stdout)["state"]) == (0, "done"), done.stderr


def test_job_queue_behind_a_pooler_is_refused_with_advice(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a pooler the next transaction may use another session."""
    monkeypatch.setattr(background, "create_engine", partial(create_engine, poolclass=StaticPool))
    with PostgresCheckpointer.open(database) as saver, PostgresStore.open(database) as store:
        asker = Background(Extraction(saver, store), work=False)
        with pytest.raises(ConfigurationError, match=r"Background\(database=…\) or perdure worker"):
            asker.jobs()


def test_each_schema_and_tenant_has_its_own_job_queue(database: str) -> None:
    options: list[Any] = [{}, {"schema": "staging"}, {"tenant": "a"}, {"tenant": "b"}]
    places = [PostgresStore(database, **each).database.job_queue_location for each in options]
    schemas = [schema for _, schema in filter(None, places)]

    assert schemas[:2] == ["perdure_jobs", "staging_jobs"]
    assert len(set(schemas)) == 4
    assert {conninfo_to_dict(url)["dbname"] for url, _ in filter(None, places)} == {
        conninfo_to_dict(database)["dbname"]
    }
