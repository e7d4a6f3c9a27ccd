"""Threads, store items and runs by REST over Postgres."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from langgraph_sdk import get_sync_client

from perdure.checkpointers import PostgresCheckpointer
from perdure.run_tables.crons import CronTable
from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.settings import Settings
from tests import postgres_server
from tests.server.graphs import Chats, run_chat_turns
from tests.server.running import run_server, wait_until
from tests.server.talking import Gate, build_input, build_talk_graph
from tests.server_tables import open_table


@contextmanager
def create_database() -> Iterator[str]:
    """Create a database for one test, yield its DSN, and drop the database."""
    ours, name = postgres_server.dsn(), f"server_{uuid.uuid4().hex}"
    database = ours.replace(str(psycopg.conninfo.conninfo_to_dict(ours)["dbname"]), name)
    with psycopg.connect(ours, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name}")
        yield database
        conn.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def settings() -> Iterator[Settings]:
    """Settings of a new Postgres database."""
    with create_database() as dsn:
        yield Settings(db=dsn, user="ann")


def test_threads_and_store_items_work_on_postgres(settings: Settings) -> None:
    run_chat_turns(settings, "a/b", "one", "two", title="Numbers", graph_id="chat")
    graphs: Any = Chats()
    app = create_app(settings, graphs=graphs)
    with run_server(app) as url, get_sync_client(url=url, api_key=None) as client:
        sdk: Any = client
        sdk.threads.create(thread_id="new", metadata={"x": {"y": [1]}})
        sdk.threads.update("a/b", metadata={"x": {"y": [1, 2]}})

        threads = sdk.threads.search(metadata={"x": {"y": [1]}})
        assert {each["thread_id"] for each in threads} == {"new", "a/b"}
        assert sdk.threads.search(metadata={"title": "Numbers"})[0]["thread_id"] == "a/b"
        first = sdk.threads.get_history("a/b", limit=9)[-1]["checkpoint"]
        sdk.threads.update_state("a/b", {"messages": []}, checkpoint=first, as_node="__start__")
        assert sdk.threads.get_state("a/b")["values"]["messages"] == []
        copied = sdk.threads.copy("a/b")
        assert sdk.threads.count() == 3
        for each in ("a/b", "new", copied["thread_id"]):
            sdk.threads.delete(each)
        assert sdk.threads.count() == 0

        sdk.store.put_item(["notes"], "k", {"text": "green pears"})
        assert sdk.store.search_items([], query="pears")["items"][0]["key"] == "k"
        assert sdk.store.list_namespaces()["namespaces"] == [["notes"]]
        sdk.store.delete_item(["notes"], "k")
        assert sdk.store.get_item(["notes"], "k") is None


def terminate_database_sessions(settings: Settings) -> None:
    with psycopg.connect(settings.db, autocommit=True) as conn:
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


def test_run_survives_repeated_loss_of_database_sessions(settings: Settings) -> None:
    """The server stays alive, so the run is not treated as one that kills servers."""
    gate = Gate()
    app = create_app(settings, graphs=Graphs({"talk": build_talk_graph(gate)}))
    with run_server(app) as url, get_sync_client(url=url) as client:
        client.threads.create(thread_id="t")
        run = client.runs.create("t", "talk", input=build_input("one"))["run_id"]
        for _ in range(5):
            assert gate.reached.wait(60)
            gate.reached.clear()
            terminate_database_sessions(settings)
        assert gate.reached.wait(60)
        gate.open.set()
        values: Any = client.runs.join("t", run)

        assert values["heard"] == ["one"]
        assert client.runs.get("t", run)["status"] == "success"


def test_run_of_cron_survives_loss_of_database_sessions(settings: Settings) -> None:
    """The run holds none of the locks under which the cron started it."""
    gate = Gate()
    app = create_app(settings, graphs=Graphs({"talk": build_talk_graph(gate)}))
    with run_server(app) as url, get_sync_client(url=url) as client:
        client.threads.create(thread_id="t")
        options: Any = {"schedule": "0 0 1 1 *", "input": build_input("one")}
        created: Any = client.crons.create_for_thread("t", "talk", **options)
        with PostgresCheckpointer.open(settings.db) as saver:
            table = open_table(CronTable, saver)
            cron = asyncio.run(table.get(created["cron_id"]))
            assert cron is not None
            asyncio.run(table.advance_next_time(cron, time.time() - 1))
        assert gate.reached.wait(60)
        gate.reached.clear()
        terminate_database_sessions(settings)
        assert gate.reached.wait(60)
        gate.open.set()
        wait_until(lambda: client.runs.list("t")[0]["status"] not in ("pending", "running"))

        assert client.runs.list("t")[0]["status"] == "success"
        values: Any = client.threads.get_state("t")["values"]
        assert values["heard"] == ["one"]
