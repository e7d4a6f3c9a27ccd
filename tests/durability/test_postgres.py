"""Broken connections to Postgres: no acknowledged write is missing, and none is applied twice."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from langchain_core.messages import AIMessage
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.store.base import PutOp
from psycopg import errors
from psycopg.conninfo import make_conninfo

from perdure import PostgresCheckpointer, PostgresStore, retention
from perdure.errors import ConfigurationError, StorageUnavailable
from perdure.settings import Rules
from perdure.storage import postgres
from perdure.storage.flow import Flow, fetch_rows
from perdure.storage.postgres_connection import SERVER_RUN_SQL
from perdure.storage.postgres_errors import translate_error
from perdure.storage.postgres_requests import OwnConnection
from perdure.storage.postgres_transaction import Transaction
from tests import postgres_server
from tests.contracts.puts import config_at, list_checkpoint_ids, put
from tests.durability.cutting import CuttingProxy

CONFIG: Any = {"configurable": {"thread_id": "t"}}
STEP = 5  # the connection is cut at every fifth message of a turn, and at each message of a put


@pytest.fixture
def proxy() -> Iterator[CuttingProxy]:
    """Yield a proxy in front of the server."""
    cutting_proxy = CuttingProxy(postgres_server.dsn())
    yield cutting_proxy
    cutting_proxy.close()


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """Return options with a schema for the test."""
    return {"schema": postgres_server.schema_name(tmp_path), "pool_size": 4, "timeout_s": 10}


def build_graph(saver: PostgresCheckpointer) -> Any:
    builder = StateGraph(MessagesState)
    builder.add_node("say", lambda state: {"messages": [AIMessage(str(len(state["messages"])))]})
    builder.add_edge(START, "say")
    return builder.compile(checkpointer=saver)


@pytest.mark.parametrize("awaited", [True, False])
@pytest.mark.parametrize("delivered", [True, False])
def test_turn_is_stored_once_if_its_connection_is_cut(
    delivered: bool, awaited: bool, proxy: CuttingProxy, options: dict[str, Any]
) -> None:
    def run_turn(number: int) -> None:
        graph_input = {"messages": [("user", f"hello {number}")]}
        if awaited:
            asyncio.run(graph.ainvoke(graph_input, CONFIG))
        else:
            graph.invoke(graph_input, CONFIG)

    with PostgresCheckpointer.open(proxy.dsn, **options) as saver:
        graph = build_graph(saver)
        turns = 0
        for _ in range(2):
            before = proxy.messages
            run_turn(turns)
            turns += 1
        for number in range(1, proxy.messages - before, STEP):
            proxy.cut_at(number, delivered=delivered)
            run_turn(turns)
            proxy.cut_at(None)
            turns += 1
            texts = [message.content for message in graph.get_state(CONFIG).values["messages"]]
            assert texts[0::2] == [f"hello {run_turn}" for run_turn in range(turns)]
            assert texts[1::2] == [str(2 * run_turn + 1) for run_turn in range(turns)]
        assert proxy.cuts > turns / 2


@pytest.mark.parametrize("delivered", [True, False])
def test_put_is_stored_once_if_its_connection_is_cut(
    delivered: bool, proxy: CuttingProxy, options: dict[str, Any]
) -> None:
    """If the answer to a COMMIT is lost, the state of the transaction is queried."""
    with PostgresStore.open(proxy.dsn, index=None, **options) as store:
        for _ in range(2):
            before = proxy.messages
            store.put(("a",), "k", {"n": 0})
        versions = 2
        for number in range(1, proxy.messages - before + 1):
            proxy.cut_at(number, delivered=delivered)
            store.put(("a",), "k", {"n": number})
            proxy.cut_at(None)
            versions += 1
            assert [item.version for item in store.history(("a",), "k")] == [
                *range(1, versions + 1)
            ]
        assert proxy.cuts > versions / 2


def test_read_is_repeated_if_its_connection_is_cut(
    proxy: CuttingProxy, options: dict[str, Any]
) -> None:
    """The whole read is repeated, however many requests it had made."""
    with (
        PostgresCheckpointer.open(proxy.dsn, **options) as saver,
        PostgresStore.open(proxy.dsn, index=None, **options) as store,
    ):
        build_graph(saver).invoke({"messages": [("user", "hello")]}, CONFIG)
        store.put(("a",), "k", {"n": "hello there"})
        reads: list[Any] = [
            lambda: [checkpoint_tuple.checkpoint["id"] for checkpoint_tuple in saver.list(CONFIG)],
            lambda: [item.value.content for item in saver.history("t")],
            lambda: saver.thread("t"),
            lambda: store.search(("a",), query="hello"),
            lambda: list(store.export()),
        ]
        for read in reads:
            read()
            before = proxy.messages
            expected = read()
            for number in range(1, proxy.messages - before + 1, 3):
                proxy.cut_at(number)
                assert read() == expected
                proxy.cut_at(None)
        assert proxy.cuts > 10


def test_commit_with_lost_answer_is_unknown_after_server_crash(options: dict[str, Any]) -> None:
    """A crashed server may reuse transaction numbers, so "committed" proves nothing."""
    dsn = postgres_server.dsn()

    def read_transaction_number(conn: psycopg.Connection[Any]) -> str:
        return str(conn.execute("SELECT pg_current_xact_id()").fetchall()[0][0])

    with psycopg.connect(dsn) as conn:
        run = conn.execute(SERVER_RUN_SQL).fetchall()[0][0]
        aborted = read_transaction_number(conn)
        conn.rollback()
        committed = read_transaction_number(conn)
    with PostgresStore.open(dsn, index=None, **options) as store:
        database: Any = store.database
        server, future = database._connect_once(), str(int(committed) + 1_000_000)

        def was_committed(run: Any, number: str) -> bool:
            with server.connection() as conn:
                conn.server_run = run
                conn.close()
                transaction = Transaction(server, conn, [], [])
                transaction._transaction_number = number
                return transaction._was_committed()

        assert was_committed(run, committed)
        for lost_number in (aborted, future):
            assert not was_committed(run, lost_number)
            assert not was_committed("another", lost_number)
        with pytest.raises(
            StorageUnavailable,
            match="the server crashed, or a standby took its place, so the result is unknown",
        ):
            was_committed("another", committed)


def test_put_that_waits_too_long_for_a_lock_says_so(options: dict[str, Any]) -> None:
    """The put waits for `timeout_s`."""
    dsn, schema = postgres_server.dsn(), options["schema"]
    with PostgresStore.open(dsn, index=None, **{**options, "timeout_s": 0.2}) as store:
        store.put(("a",), "k", {"n": 0})
        with psycopg.connect(dsn) as other_connection:
            other_connection.execute(
                f"LOCK TABLE {schema}.store_namespaces IN ACCESS EXCLUSIVE MODE"
            )
            with pytest.raises(StorageUnavailable, match="another transaction has held a lock"):
                store.put(("a",), "k", {"n": 1})
        store.put(("a",), "k", {"n": 2})

        assert [item.value["n"] for item in store.history(("a",), "k")] == [0, 2]


def test_searches_do_not_hold_connections_while_waiting(options: dict[str, Any]) -> None:
    """Searches save an index in the background, although the pool has only one connection."""
    single_connection = {**options, "pool_size": 1}
    with PostgresStore.open(postgres_server.dsn(), index=None, **single_connection) as store:
        for number in range(70):
            store.put(("a",), f"k{number}", {"text": f"word{number} tea"})
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda n: store.search(("a",), query=f"word{n}"), range(8)))

    assert [result[0].key for result in results] == [f"k{number}" for number in range(8)]


@pytest.mark.parametrize("overtaken", [False, True])
def test_task_writes_share_a_request_with_the_following_put(
    overtaken: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another process has put in the meantime, each of the two is written alone."""
    monkeypatch.setattr(postgres, "GROUP_WAIT_S", 30.0)
    requests: list[list[str]] = []
    send_request = OwnConnection.send_request

    def record_and_send(conn: OwnConnection, statements: Any) -> Any:
        requests.append([statement.sql for statement in statements])
        return send_request(conn, statements)

    async def write_and_put(saver: PostgresCheckpointer) -> None:
        written = saver.aput_writes(config_at(uid="1"), [("a", 1)], "task")
        checkpoint: Any = {**empty_checkpoint(), "id": "2", "channel_values": {"a": 1}}
        requests.clear()
        await asyncio.gather(written, saver.aput(config_at(uid="1"), checkpoint, {}, {"a": 2}))

    dsn = postgres_server.dsn()
    with PostgresCheckpointer.open(dsn, **options) as saver:
        put(saver, {"a": 0}, uid="1")
        with PostgresCheckpointer.open(dsn, **options) as other_saver:
            if overtaken:
                put(other_saver, {"a": 5}, uid="other")
            monkeypatch.setattr(OwnConnection, "send_request", record_and_send)
            asyncio.run(write_and_put(saver))
            request_count = len(requests)
            before, after = (
                other_saver.get_tuple(config_at(uid="1")),
                other_saver.get_tuple(config_at(uid="2")),
            )

    assert before is not None
    assert after is not None
    assert before.pending_writes == [("task", "a", 1)]
    assert after.checkpoint["channel_values"] == {"a": 1}
    assert (request_count == 1) is not overtaken


def test_put_of_other_thread_sends_waiting_task_writes_first(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiting write of a task is stored before the writes that follow."""
    monkeypatch.setattr(postgres, "GROUP_WAIT_S", 30.0)

    async def run(saver: PostgresCheckpointer) -> None:
        written = asyncio.ensure_future(saver.aput_writes(config_at(uid="1"), [("a", 1)], "task"))
        await asyncio.sleep(0)
        await asyncio.to_thread(put, saver, {"a": 2}, config_at(uid="1"), uid="2")
        await asyncio.wait_for(written, 10)
        await saver.aput(config_at(uid="2"), {**empty_checkpoint(), "id": "3"}, {}, {})

    with PostgresCheckpointer.open(postgres_server.dsn(), **options) as saver:
        put(saver, {"a": 0}, uid="1")
        asyncio.run(run(saver))

        assert list_checkpoint_ids(saver, config_at()) == ["3", "2", "1"]


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (errors.InvalidSqlStatementName, "pooled=True"),
        (errors.DuplicatePreparedStatement, "pooled=True"),
        (errors.ReadOnlySqlTransaction, "target_session_attrs=read-write"),
        (errors.LockNotAvailable, "pg_blocking_pids"),
    ],
)
def test_translated_postgres_errors_contain_advice(error: type[psycopg.Error], advice: str) -> None:
    assert advice in str(translate_error(error("no"), "postgresql://server/db"))


def test_dump_of_schema_opens_in_another_database(options: dict[str, Any]) -> None:
    """The thread continues in the restored database."""
    dsn, schema = postgres_server.dsn(), options["schema"]
    with (
        PostgresCheckpointer.open(dsn, **options) as saver,
        PostgresStore.open(dsn, **options) as store,
    ):
        build_graph(saver).invoke({"messages": [("user", "hello")]}, CONFIG)
        store.put(("a",), "k", {"text": "likes tea"})
    other_name = f"other_{schema}"
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {other_name}")
    restored_dsn = make_conninfo(dsn, dbname=other_name)
    programs = postgres_server.programs_folder()
    dump = subprocess.run(
        [programs / "pg_dump", "-n", schema, dsn], capture_output=True, check=True
    )
    restore = [str(programs / "psql"), "-q", "-v", "ON_ERROR_STOP=1", "-d", restored_dsn]
    subprocess.run(restore, input=dump.stdout, capture_output=True, check=True)
    with (
        PostgresCheckpointer.open(restored_dsn, **options) as saver,
        PostgresStore.open(restored_dsn, **options) as store,
    ):
        build_graph(saver).invoke({"messages": [("user", "again")]}, CONFIG)
        store.put(("a",), "k2", {"text": "drinks coffee"})

        texts = [item.value.content for item in saver.history("t")]
        assert texts == ["hello", "1", "again", "3"]
        assert [item.key for item in store.search(("a",), query="tea", mode="text")] == ["k"]
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(f"DROP DATABASE {other_name}")


def test_concurrent_sweeps_close_each_expired_item_once(options: dict[str, Any]) -> None:
    """The server ends connections while three stores sweep, and no item is counted twice."""
    dsn, schema, count = postgres_server.dsn(), options["schema"], 900
    with ExitStack() as stack:
        stores = [
            stack.enter_context(PostgresStore.open(dsn, index=None, **{**options, "pool_size": n}))
            for n in (1, 2, 3)
        ]
        puts = [PutOp(("a", f"{n % 5}"), f"k{n}", {"n": n}, ttl=5) for n in range(count)]
        stores[0].batch(puts)
        server = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        server.execute(f"UPDATE {schema}.store_items SET expires_at = created_at + 1")
        with ThreadPoolExecutor(3) as pool:
            sweeping = [pool.submit(store.sweep_ttl) for store in stores]
            for _ in range(3):
                time.sleep(0.2)
                server.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE "
                    "datname = current_database() AND application_name = 'perdure' "
                    f"AND query LIKE '%{schema}%'"
                )

        assert sum(sweep.result() for sweep in sweeping) == count
        assert stores[1].sweep_ttl() == 0
        stats = stores[1].stats()
        assert (stats.items, stats.versions) == (0, count)


def test_retention_is_applied_by_one_process_at_a_time(options: dict[str, Any]) -> None:
    """A second process gets an error. A holder whose connection is gone does not block others."""
    dsn = postgres_server.dsn()
    with (
        PostgresCheckpointer.open(dsn, **options) as dead,
        PostgresCheckpointer.open(dsn, **options) as saver,
        PostgresStore.open(dsn, index=None, **options) as store,
    ):
        build_graph(saver).invoke({"messages": [("user", "hello")]}, CONFIG)
        rules = Rules(checkpoints_last=1)
        with dead.database.lock("\0retention"):
            with pytest.raises(StorageUnavailable, match="already"):
                retention.apply(rules, saver, store)
            end_lock_connections(dsn)
            assert retention.apply(rules, saver, store, timeout_s=10).count("checkpoints") == 2


def end_lock_connections(dsn: str) -> None:
    """End the connections that hold locks of `lock()`."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE query LIKE 'SELECT pg_try_advisory_lock%' "
            "AND datname = current_database()"
        )


def test_holder_of_lost_lock_gets_error_at_next_put(options: dict[str, Any]) -> None:
    """Another process can then take the lock."""
    dsn = postgres_server.dsn()
    ours: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}

    async def scenario(one: PostgresCheckpointer, other: PostgresCheckpointer) -> None:
        async with one.lock("t"):
            with pytest.raises(StorageUnavailable, match="because another run holds it"):
                async with other.lock("t", timeout_s=0.2):
                    pass
            end_lock_connections(dsn)
            async with other.lock("t", timeout_s=10):
                pass
            with pytest.raises(
                StorageUnavailable, match=r"the connection that held the lock .* was lost"
            ):
                await one.aput(ours, empty_checkpoint(), {}, {})
        await one.aput(ours, empty_checkpoint(), {}, {})

    with (
        PostgresCheckpointer.open(dsn, **options) as saver,
        PostgresCheckpointer.open(dsn, **options) as other_saver,
    ):
        asyncio.run(scenario(saver, other_saver))


def test_lock_with_pooled_option_needs_a_direct_dsn(options: dict[str, Any]) -> None:
    dsn = postgres_server.dsn()
    with PostgresCheckpointer.open(dsn, pooled=True, **options) as saver:
        build_graph(saver).invoke({"messages": [("user", "hello")]}, CONFIG)
        with pytest.raises(ConfigurationError, match="as 'direct'"):
            saver.lock("t")
    with (
        PostgresCheckpointer.open(dsn, pooled=True, direct=dsn, **options) as saver,
        saver.lock("t"),
    ):
        build_graph(saver).invoke({"messages": [("user", "hello")]}, CONFIG)


def test_error_after_commit_does_not_undo_the_write(options: dict[str, Any]) -> None:
    """The caller gets the result, and cached data of the write is dropped."""
    with PostgresStore.open(postgres_server.dsn(), index=None, **options) as store:
        undone: list[int] = []

        def fail_after_commit(rows: Any) -> None:
            raise RuntimeError

        result = store.database.write(
            lambda: fetch_rows("SELECT 1"),
            fail_after_commit,
            lambda: undone.append(1),
            exclusive_names=("x",),
        )

    assert (result, undone) == ([(1,)], [1])


@pytest.mark.parametrize("cancelled", [None, 1])
def test_writes_with_same_exclusive_name_keep_their_order(
    cancelled: int | None, options: dict[str, Any]
) -> None:
    """A put of an abandoned run that was called first does not come after that of the next run."""
    entered, released = threading.Event(), threading.Event()
    order: list[int] = []

    def wait_and_read() -> Flow[None]:
        entered.set()
        assert released.wait(30)
        yield from fetch_rows("SELECT 1")

    async def scenario(store: PostgresStore) -> None:
        def submit_write(number: int) -> asyncio.Future[Any]:
            def record_number(_: Any) -> None:
                order.append(number)

            write = store.database.awrite(
                lambda: fetch_rows("SELECT 1"),
                record_number,
                exclusive_names=("x", f"y{number % 2}"),
            )
            return asyncio.ensure_future(write)

        holding_write = store.database.awrite(wait_and_read, exclusive_names=("x",))
        await asyncio.to_thread(entered.wait, 30)
        waiting = [submit_write(number) for number in range(20)]
        other_write = store.database.awrite(lambda: fetch_rows("SELECT 2"), exclusive_names=("z",))
        if cancelled is not None:
            waiting[cancelled].cancel()
        released.set()
        await asyncio.gather(holding_write, other_write, *waiting, return_exceptions=True)

    with PostgresStore.open(postgres_server.dsn(), index=None, **options) as store:
        asyncio.run(scenario(store))
        store.put(("a",), "k", {})

    assert order in ([*range(20)], [number for number in range(20) if number != cancelled])


def test_close_stores_submitted_writes_before_it_ends(options: dict[str, Any]) -> None:
    """Writes and reads are still waiting when close is called."""
    entered, released = threading.Event(), threading.Event()

    def wait_and_read() -> Flow[None]:
        entered.set()
        assert released.wait(30)
        yield from fetch_rows("SELECT 1")

    async def scenario(store: PostgresStore) -> None:
        database = store.database
        first = database.awrite(wait_and_read, exclusive_names=("x",))
        await asyncio.to_thread(entered.wait, 30)
        waiting = [
            database.awrite(
                lambda n=n: fetch_rows(  # type: ignore[misc]
                    "INSERT INTO settings (name, value) VALUES (?, '')", str(n)
                ),
                exclusive_names=("x",),
            )
            for n in range(20)
        ]
        reads = [asyncio.ensure_future(store.aget(("a",), "k")) for _ in range(5)]
        await asyncio.sleep(0)
        closed = asyncio.create_task(store.aclose())
        await asyncio.sleep(0.05)
        released.set()
        await asyncio.wait_for(closed, 30)
        await asyncio.gather(first, *waiting)
        await asyncio.gather(*reads, return_exceptions=True)

    dsn = postgres_server.dsn()
    asyncio.run(scenario(PostgresStore.open(dsn, index=None, **options)))
    count = "SELECT count(*) FROM settings WHERE length(name) < 3"
    with PostgresStore.open(dsn, index=None, **options) as store:
        assert store.database.read(lambda: fetch_rows(count)) == [(20,)]
