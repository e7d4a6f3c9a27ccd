"""PgBouncer in transaction mode: the same results, and no lost write when it restarts."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph
from psycopg_pool import ConnectionPool

from perdure import PostgresCheckpointer, PostgresStore
from perdure.errors import ConfigurationError
from perdure.server import create_app
from perdure.settings import load
from tests import postgres_server
from tests.durability.processes import run_in_processes
from tests.pgbouncer import PgBouncer
from tests.programs import PGBOUNCER

CONFIG: Any = {"configurable": {"thread_id": "t"}}


@pytest.fixture(scope="module", autouse=True)
def pooler() -> Iterator[PgBouncer]:
    PGBOUNCER.path()
    with tempfile.TemporaryDirectory(
        prefix="bouncer"
    ) as folder:  # the path of a socket must be short
        bouncer = PgBouncer(postgres_server.dsn(), Path(folder))
        yield bouncer
        bouncer.kill()


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"schema": postgres_server.schema_name(tmp_path), "pool_size": 6, "timeout_s": 20}


def build_graph(saver: PostgresCheckpointer) -> Any:
    builder = StateGraph(MessagesState)
    builder.add_node("say", lambda state: {"messages": [AIMessage(str(len(state["messages"])))]})
    builder.add_edge(START, "say")
    return builder.compile(checkpointer=saver)


@pytest.fixture(params=["dsn", "function", "pool"])
def connection_source(request: pytest.FixtureRequest, pooler: PgBouncer) -> Iterator[Any]:
    """Yield a DSN of PgBouncer, a function that returns it, or a pool of the user."""
    if request.param == "pool":
        with ConnectionPool[Any](pooler.dsn, min_size=0, max_size=3, open=True) as pool:
            yield pool
    else:
        yield pooler.dsn if request.param == "dsn" else lambda: pooler.dsn


@pytest.mark.parametrize("pooled", [True, False])
def test_saver_and_store_work_through_pgbouncer(
    pooled: bool, connection_source: Any, options: dict[str, Any]
) -> None:
    """Without `pooled`, PgBouncer is recognised, and no statement is prepared."""
    options["pooled"] = pooled
    with (
        PostgresCheckpointer.open(connection_source, **options) as saver,
        PostgresStore.open(connection_source, **options) as store,
    ):
        graph = build_graph(saver)

        def run_user(name: str) -> None:
            mine: Any = {"configurable": {"thread_id": name}}
            for number in range(6):
                graph.invoke({"messages": [("user", f"hello {number}")]}, mine)
                store.put(("users", name), f"k{number}", {"text": f"likes tea number {number}"})
                results = store.search(("users", name), query="tea", limit=10)
                assert len(results) == number + 1

        threads = [threading.Thread(target=run_user, args=(f"u{n}",)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number in range(8):
            texts = [item.value.content for item in saver.history(f"u{number}")]
            assert texts[0::2] == [f"hello {n}" for n in range(6)]
        assert store.stats().items == 48

        asyncio.run(graph.ainvoke({"messages": [("user", "again")]}, CONFIG))
        earlier = [*saver.list(CONFIG)][-1].config
        assert saver.get_tuple(earlier) is not None
        assert saver.erase("u1").items == 12
        assert store.forget(("users", "u1")).items == 6
        saver.delete_thread("u2")
        assert len(saver.threads(prefix="u")) == 6
        assert store.search(("users", "u1"), query="tea") == []


def test_role_with_other_session_settings_works_through_pgbouncer(options: dict[str, Any]) -> None:
    """Each connection that PgBouncer lends has the settings that the client's session set."""
    dsn = postgres_server.dsn_of_role("odd_behind_a_pooler")
    with psycopg.connect(postgres_server.dsn(), autocommit=True) as conn:
        for setting in ("DateStyle TO German", "TimeZone TO 'Asia/Tokyo'"):
            conn.execute(f"ALTER ROLE odd_behind_a_pooler SET {setting}")
        conn.execute("ALTER ROLE odd_behind_a_pooler SET standard_conforming_strings TO off")
    with tempfile.TemporaryDirectory(prefix="bouncer") as folder:
        pooler = PgBouncer(dsn, Path(folder))
        try:
            with PostgresCheckpointer.open(pooler.dsn, pooled=True, **options) as saver:
                build_graph(saver).invoke({"messages": [("user", "hello \\ 'you'")]}, CONFIG)

                assert [item.value.content for item in saver.history("t")] == [
                    "hello \\ 'you'",
                    "1",
                ]
        finally:
            pooler.kill()


def test_lock_through_pgbouncer_needs_a_direct_dsn(
    connection_source: Any, options: dict[str, Any]
) -> None:
    """A lock without a direct DSN is refused, whether or not the user passes `pooled`."""
    with (
        PostgresCheckpointer.open(connection_source, **options) as saver,
        pytest.raises(ConfigurationError, match="as 'direct'"),
        saver.lock("t"),
    ):
        pass
    direct = postgres_server.dsn()
    with (
        PostgresCheckpointer.open(connection_source, direct=direct, **options) as saver,
        saver.lock("t"),
    ):
        build_graph(saver).invoke({"messages": [("user", "hello")]}, CONFIG)


def put_item_in_process(path: Path, pipe: Connection, number: int) -> None:
    dsn, schema = path.read_text().split("\n")
    pipe.send("ready")
    pipe.recv()
    with PostgresStore.open(dsn, schema=schema, pooled=True, index=None) as store:
        store.put(("a",), f"k{number}", {"n": number})
    pipe.send("done")


def test_server_behind_pgbouncer_needs_a_direct_dsn(
    pooler: PgBouncer, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's lock shows that it is alive. Without a direct DSN the server does not start."""
    monkeypatch.setenv("PERDURE_DB", pooler.dsn)
    run_input = {"messages": [{"role": "user", "content": "hello"}]}
    body = {"assistant_id": "chat", "input": run_input, "if_not_exists": "create"}

    async def answer() -> Any:
        app = create_app(load(), hosts=None)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://x", timeout=60) as client,
        ):
            path = f"/threads/{options['schema']}"
            values = (await client.post(f"{path}/runs/wait", json=body)).json()
            await client.delete(path)
            return values

    with pytest.raises(ConfigurationError, match="as 'direct'"):
        asyncio.run(answer())
    monkeypatch.setenv("PERDURE_DIRECT", postgres_server.dsn())

    assert [message["type"] for message in asyncio.run(answer())["messages"]] == ["human", "ai"]


def test_several_processes_set_up_the_schema_through_pgbouncer_at_once(
    pooler: PgBouncer, options: dict[str, Any], tmp_path: Path
) -> None:
    dsn_file = tmp_path / "dsn"
    dsn_file.write_text(f"{pooler.dsn}\n{options['schema']}")
    run_in_processes(2, put_item_in_process, dsn_file)
    with PostgresStore.open(pooler.dsn, **options) as store:
        assert len(store.search(("a",))) == 2


def test_puts_are_stored_once_while_pgbouncer_restarts(
    pooler: PgBouncer, options: dict[str, Any]
) -> None:
    """Puts that wait during a restart succeed afterwards."""
    with PostgresStore.open(pooler.dsn, index=None, pooled=True, **options) as store:
        done: list[list[int]] = [[], [], []]
        over = threading.Event()

        def put_until_over(worker: int) -> None:
            while not over.is_set():
                number = len(done[worker])
                store.put(("a", str(worker)), "k", {"n": number})
                done[worker].append(number)

        threads = [threading.Thread(target=put_until_over, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(4):
            time.sleep(0.15)
            pooler.kill()
            pooler.start()
        counts = [len(numbers_of_worker) for numbers_of_worker in done]
        while not all(
            len(numbers_of_worker) > before
            for numbers_of_worker, before in zip(done, counts, strict=True)
        ):
            time.sleep(0.01)
        over.set()
        for thread in threads:
            thread.join()

        for worker, numbers in enumerate(done):
            stored = [item.value["n"] for item in store.history(("a", str(worker)), "k")]
            assert sorted(stored) == numbers
