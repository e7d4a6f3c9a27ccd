"""A pool of psycopg_pool that belongs to the user is shared, left unchanged, and never closed."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from psycopg_pool import AsyncConnectionPool, ConnectionPool, NullConnectionPool

from perdure import PostgresCheckpointer, PostgresStore, retention
from perdure.checkpointers import open_checkpointer
from perdure.errors import ConfigurationError, StorageError, StorageUnavailable
from perdure.memory import search_threads
from perdure.memory.long_term.background import resolve_queue_location_and_schema
from perdure.settings import Rules
from perdure.storage.flow import Flow, Statement, fetch_rows
from perdure.storage.postgres_connection import SERVER_RUN_SQL
from perdure.storage.postgres_transaction import Transaction
from perdure.stores import open_store
from tests import postgres_server
from tests.durability.cutting import CuttingProxy
from tests.durability.test_postgres import build_graph
from tests.user_pool import WatchedPool, watched_pool

pytestmark = pytest.mark.postgres

CONFIG: Any = {"configurable": {"thread_id": "t"}}
PATIENCE_S = 60


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """The options of a database with a new schema."""
    return {"schema": postgres_server.schema_name(tmp_path), "timeout_s": 10}


@pytest.fixture
def pool() -> Iterator[WatchedPool]:
    """A pool of one connection."""
    with watched_pool(postgres_server.dsn(), max_size=1) as watched:
        yield watched


def run_turn(saver: Any, thread_id: str = "t", text: str = "hello") -> list[Any]:
    """Run a turn, and return the texts of the thread's history."""
    config: Any = {"configurable": {"thread_id": thread_id}}
    build_graph(saver).invoke({"messages": [("user", text)]}, config)
    return [item.value.content for item in saver.history(thread_id)]


def end_connections(pool: WatchedPool) -> None:
    """End all connections of a pool by their process ids."""
    with ExitStack() as stack:
        connections = [stack.enter_context(pool.connection()) for _ in range(pool.max_size)]
        pids = [conn.info.backend_pid for conn in connections]
    with psycopg.connect(postgres_server.dsn(), autocommit=True) as conn:
        conn.execute("SELECT pg_terminate_backend(pid) FROM unnest(%s::int[]) AS pid", (pids,))


def test_savers_and_stores_share_the_only_connection_of_a_pool(
    pool: WatchedPool, options: dict[str, Any]
) -> None:
    """Threads and event loops use the connection, and there is no deadlock."""

    async def run_turns_async(saver: PostgresCheckpointer, store: PostgresStore, name: str) -> None:
        config: Any = {"configurable": {"thread_id": f"async-{name}"}}
        await asyncio.gather(
            build_graph(saver).ainvoke({"messages": [("user", "hello")]}, config),
            *(store.aput(("a", name), f"k{n}", {"text": f"tea {n}"}) for n in range(5)),
        )
        assert len(await store.asearch(("a", name), query="tea")) == 5

    def use_components(components: tuple[PostgresCheckpointer, PostgresStore], name: str) -> None:
        saver, store = components
        assert run_turn(saver, name) == ["hello", "1"]
        asyncio.run(run_turns_async(saver, store, name))

    own, other = options, {**options, "schema": f"{options['schema']}x"}
    with (
        PostgresCheckpointer.open(pool, **own) as one,
        PostgresCheckpointer.open(pool, **own) as two,
        PostgresCheckpointer.open(pool, **other) as three,
        PostgresStore.open(pool, **own) as store,
        PostgresStore.open(pool, **other) as other_store,
        ThreadPoolExecutor(6) as threads,
    ):
        parts = [(one, store), (two, store), (three, other_store)] * 2
        futures = [
            threads.submit(use_components, components, f"u{n}")
            for n, components in enumerate(parts)
        ]
        for future in futures:
            future.result(PATIENCE_S)
        assert len(one.threads()) == 8
        assert len(three.threads()) == 4

    assert pool.most_lent == 1
    assert not pool.closed


def divide_by_zero() -> Flow[None]:
    yield Statement("SELECT 1")
    yield Statement("SELECT 1 / 0")


def raise_keyboard_interrupt() -> Flow[None]:
    yield Statement("SELECT 1")
    raise KeyboardInterrupt


def test_connection_is_returned_unchanged_after_an_error(
    pool: WatchedPool, options: dict[str, Any]
) -> None:
    """The error is raised by a statement or by Python, in a read or in any request of a write."""
    with PostgresStore.open(pool, index=None, **options) as store:
        database = store.database
        for make in (
            divide_by_zero,
            lambda: fetch_rows("SELECT 1 / 0"),
            lambda: fetch_rows("nonsense"),
        ):
            for call in (database.read, database.write):
                with pytest.raises(StorageError, match=r"division by zero|syntax error"):
                    call(make)
        for call in (database.read, database.write):
            with pytest.raises(KeyboardInterrupt):
                call(raise_keyboard_interrupt)
        store.put(("a",), "k", {"n": 1})

        assert pool.get_stats()["connections_num"] == 1


def test_connection_is_returned_unchanged_after_a_timeout(
    pool: WatchedPool, options: dict[str, Any]
) -> None:
    """The timeout is that of a lock in the database, for which perdure sets its own value."""
    with PostgresStore.open(pool, index=None, **{**options, "timeout_s": 0.3}) as store:
        store.put(("a",), "k", {"n": 0})
        with psycopg.connect(postgres_server.dsn()) as other:
            other.execute(f"LOCK TABLE {options['schema']}.store_namespaces")
            with pytest.raises(StorageUnavailable, match="another transaction has held a lock"):
                store.put(("a",), "k", {"n": 1})
        store.put(("a",), "k", {"n": 2})

        assert [item.value["n"] for item in store.history(("a",), "k")] == [0, 2]


def test_connection_is_returned_after_a_cancellation(
    pool: WatchedPool, options: dict[str, Any]
) -> None:
    """Tasks are cancelled while their puts wait for the only connection."""

    async def cancel_puts(store: PostgresStore) -> None:
        with pool.connection():
            puts = [
                asyncio.create_task(store.aput(("a", str(n)), "k", {"n": n})) for n in range(12)
            ]
            await asyncio.sleep(0.1)
            for put in puts[::2]:
                put.cancel()
            await asyncio.sleep(0.1)
        await asyncio.gather(*puts, return_exceptions=True)
        await store.aput(("b",), "k", {})

    with PostgresStore.open(pool, index=None, **options) as store:
        asyncio.run(cancel_puts(store))
        stored = {item.value["n"] for item in store.search(("a",), limit=100)}
        assert {1, 3, 5, 7, 9, 11} <= stored


@pytest.mark.parametrize("is_received", [True, False])
def test_put_is_stored_once_although_the_connection_is_cut(
    is_received: bool, options: dict[str, Any]
) -> None:
    """The connection is cut at each message of a put. The pool can be used afterwards."""
    proxy = CuttingProxy(postgres_server.dsn())
    try:
        with (
            watched_pool(proxy.dsn, max_size=1) as pool,
            PostgresStore.open(pool, index=None, **options) as store,
        ):
            for _ in range(2):
                before = proxy.messages
                store.put(("a",), "k", {"n": 0})
            versions = 2
            for number in range(1, proxy.messages - before + 1):
                proxy.cut_at(number, delivered=is_received)
                store.put(("a",), "k", {"n": number})
                proxy.cut_at(None)
                versions += 1
                assert len(store.history(("a",), "k")) == versions
            assert proxy.cuts > versions / 2
    finally:
        proxy.close()


def test_put_succeeds_after_all_connections_of_the_pool_were_lost(options: dict[str, Any]) -> None:
    """After a restart of the server, more idle connections are lost than a call has retries."""
    with (
        watched_pool(postgres_server.dsn(), min_size=14, max_size=14) as pool,
        PostgresStore.open(pool, index=None, **options) as store,
    ):
        pool.wait(PATIENCE_S)
        store.put(("a",), "k", {"n": 0})
        end_connections(pool)
        store.put(("a",), "k", {"n": 1})

        assert [item.value["n"] for item in store.history(("a",), "k")] == [0, 1]


def test_unknown_commit_is_resolved_with_a_pool_of_one_connection(options: dict[str, Any]) -> None:
    """The lost connection must be returned first, because the query needs the only place."""
    with watched_pool(postgres_server.dsn(), max_size=1) as pool:
        with psycopg.connect(postgres_server.dsn()) as conn:
            run = conn.execute(SERVER_RUN_SQL).fetchall()[0][0]
            numbers = list[str]()
            for _ in range(2):
                numbers += conn.execute("SELECT pg_current_xact_id()::text").fetchall()[0]
                conn.rollback() if len(numbers) == 1 else conn.commit()
        with PostgresStore.open(pool, index=None, **options) as store:
            database: Any = store.database
            server = database._connect_once()
            for number, expected in zip(numbers, (False, True), strict=True):
                with server.connection() as connection:
                    connection.server_run = run
                    connection.discard_connection()
                    transaction = Transaction(server, connection, [], [])
                    transaction._transaction_number = number
                    assert transaction._was_committed() is expected


# -- tenants


def test_other_users_of_the_pool_never_see_rows_of_a_tenant(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Two tenants use the pool while others take connections from it."""
    owner, dsn = (
        postgres_server.dsn_of_role("an_owner"),
        postgres_server.dsn_of_role("a_user", owner=False),
    )
    schema = options["schema"]
    for component in (PostgresCheckpointer, PostgresStore):
        component.open(owner, tenant="setup", **options).close()
    with psycopg.connect(owner) as conn:
        conn.execute(f"GRANT USAGE ON SCHEMA {schema} TO a_user")
        conn.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO a_user")
        conn.execute(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA {schema} TO a_user")
    is_finished, observations = threading.Event(), list[Any]()
    look_sql = (
        "SELECT nullif(current_setting('perdure.tenant', true), ''), current_schemas(false), "
        "current_setting('TimeZone'), current_setting('lock_timeout'), "
        f"(SELECT count(*) FROM {schema}.threads), (SELECT count(*) FROM {schema}.store_items)"
    )

    def observe(pool: ConnectionPool[Any]) -> None:
        while not is_finished.is_set():
            with pool.connection() as conn:
                observations.append(conn.execute(look_sql).fetchone())

    def use_tenant(pool: ConnectionPool[Any], tenant: str) -> None:
        with (
            PostgresCheckpointer.open(pool, tenant=tenant, **options) as saver,
            PostgresStore.open(pool, tenant=tenant, **options) as store,
        ):
            for number in range(8):
                assert run_turn(saver, text=f"{tenant} {number}")[-2] == f"{tenant} {number}"
                store.put(("a",), f"k{number}", {"text": f"tea of {tenant}"})
                with pytest.raises(StorageError, match="division by zero"):
                    store.database.write(divide_by_zero)
            items_found = store.search((), query="tea", limit=100)
            assert {item.value["text"] for item in items_found} == {f"tea of {tenant}"}
            assert {"".join(x.split(" ")[0]) for x in run_turn(saver)[:16:2]} == {tenant}

    with (
        ConnectionPool(dsn, min_size=1, max_size=3, open=True) as pool,
        ThreadPoolExecutor(4) as threads,
    ):
        with pool.connection() as conn:
            expected = conn.execute(look_sql).fetchone()
        observers = [threads.submit(observe, pool) for _ in range(2)]
        try:
            for future in [threads.submit(use_tenant, pool, t) for t in ("acme", "globex")]:
                future.result(PATIENCE_S)
        finally:
            is_finished.set()
        for future in observers:
            future.result(PATIENCE_S)

    assert expected is not None
    assert expected[0] is None
    assert expected[-2:] == (0, 0)
    assert len(observations) > 10
    assert {tuple(map(str, row)) for row in observations} == {tuple(map(str, expected))}


def test_pool_whose_role_bypasses_row_level_security_is_refused(options: dict[str, Any]) -> None:
    """Tenants also require a role that does not see all tenants."""
    with watched_pool(postgres_server.dsn_of_role("an_owner"), max_size=1) as pool:
        PostgresStore.open(pool, tenant="acme", **options).close()
        with pytest.raises(ConfigurationError, match="pass a tenant name"):
            PostgresStore.open(pool, **options)
    with (
        watched_pool(postgres_server.dsn(), max_size=1) as pool,
        pytest.raises(ConfigurationError, match="bypasses row-level security"),
    ):
        PostgresStore.open(pool, tenant="acme", **options)


# -- pools that return no connection


def test_call_is_refused_while_the_pool_is_not_open(options: dict[str, Any]) -> None:
    """The pool is not open yet, or already closed. Calls work while the pool is open."""
    pool = ConnectionPool[Any](postgres_server.dsn(), min_size=0, max_size=1, open=False)
    store = PostgresStore(pool, index=None, **options)
    with pytest.raises(StorageUnavailable, match="not open yet"):
        store.put(("a",), "k", {})
    with pool:
        store.put(("a",), "k", {"n": 1})
        item: Any = store.get(("a",), "k")
        assert item.value == {"n": 1}
    start = time.monotonic()
    with pytest.raises(StorageUnavailable, match="already closed"):
        store.get(("a",), "k")
    with pytest.raises(StorageUnavailable, match="already closed"):
        asyncio.run(store.aget(("a",), "k"))
    with pytest.raises(StorageUnavailable, match="already closed"):
        PostgresCheckpointer.open(pool, **options)
    assert time.monotonic() - start < 5
    store.close()


def test_call_times_out_if_all_connections_are_in_use(options: dict[str, Any]) -> None:
    """The error comes after `timeout_s`, and the next call gets the connection."""
    short_options = {**options, "timeout_s": 0.3}
    with (
        watched_pool(postgres_server.dsn(), max_size=1, max_waiting=1) as pool,
        PostgresStore.open(pool, index=None, **short_options) as store,
    ):
        with pool.connection():
            for reason in (r"provided no connection within 0\.3 s", "max_waiting"):
                with pytest.raises(StorageUnavailable, match=reason):
                    store.get(("a",), "k")

        assert store.get(("a",), "k") is None


SECRET = "s3cret-password"


def raise_secret_error() -> Any:
    raise RuntimeError(SECRET)


@pytest.mark.parametrize("null", [False, True])
@pytest.mark.parametrize(
    "wrong",
    [
        {"conninfo": raise_secret_error},
        {"conninfo": f"host=/nowhere unknown={SECRET}"},
        {"conninfo": f"host=/nowhere password={SECRET}"},
        {"kwargs": raise_secret_error},
        {"check": lambda conn: raise_secret_error()},
        {"configure": lambda conn: raise_secret_error()},
    ],
    ids=["conninfo", "unknown option", "unreachable", "kwargs", "check", "configure"],
)
def test_error_of_a_pool_that_cannot_connect_contains_no_secret(
    wrong: dict[str, Any], null: bool, options: dict[str, Any]
) -> None:
    """The messages of the pool's functions are not shown, because they may contain a password."""
    kind: Any = NullConnectionPool if null else ConnectionPool
    arguments = {
        "conninfo": postgres_server.dsn(),
        "min_size": 0,
        "max_size": 1,
        "open": True,
        **wrong,
    }
    with kind(**arguments) as pool:
        start = time.monotonic()
        with pytest.raises(StorageUnavailable) as raised:
            PostgresStore.open(pool, **{**options, "timeout_s": 0.5})
        assert time.monotonic() - start < 3
    error: BaseException | None = raised.value
    while error is not None:
        assert SECRET not in f"{error} {error!r}"
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize(
    "pool_options",
    [
        {"check": ConnectionPool.check_connection},
        {"check": lambda conn: conn.execute("SELECT 1")},
        {"reset": lambda conn: None},
        {"kwargs": {"autocommit": True}},
        {
            "kwargs": {
                "autocommit": True,
                "prepare_threshold": None,
                "cursor_factory": psycopg.ClientCursor,
            }
        },
        {"max_lifetime": 0.001},
        {"conninfo": postgres_server.dsn},
        {"close_returns": False},
    ],
    ids=lambda pool_options: "-".join(pool_options),
)
def test_pool_with_any_options_can_be_used(
    pool_options: dict[str, Any], options: dict[str, Any]
) -> None:
    base = {"conninfo": postgres_server.dsn(), "min_size": 0, "max_size": 1, "open": True}
    kinds: list[Any] = [ConnectionPool]
    if not {"max_lifetime", "close_returns"} & pool_options.keys():
        kinds.append(NullConnectionPool)
    for kind in kinds:
        schema = f"{options['schema']}{len(kind.__name__)}"
        with (
            kind(**{**base, **pool_options}) as pool,
            PostgresCheckpointer.open(pool, **{**options, "schema": schema}) as saver,
        ):
            assert run_turn(saver) == ["hello", "1"]
            with saver.lock("t"):
                assert run_turn(saver) == ["hello", "1", "hello", "3"]
            assert pool.get_stats().get("returns_bad", 0) == 0


# -- locks


def test_locks_use_a_connection_outside_the_pool(options: dict[str, Any]) -> None:
    """The connection is made from the parameters of the pool. The pool may have none left."""
    dsn = postgres_server.dsn()
    parts = conninfo_to_dict(dsn)
    make_kwargs = lambda: {**parts, "row_factory": psycopg.rows.dict_row}  # noqa: E731
    pools: list[dict[str, Any]] = [{"conninfo": dsn}, {"conninfo": "", "kwargs": make_kwargs}]
    for number, pool_options in enumerate(pools):
        with (
            ConnectionPool[Any](**pool_options, min_size=1, max_size=1, open=True) as pool,
            PostgresCheckpointer.open(pool, **options) as saver,
            PostgresCheckpointer.open(dsn, **options) as other,
            PostgresStore.open(pool, index=None, **options) as store,
        ):
            with (
                saver.lock("t"),
                pool.connection(),
                pytest.raises(StorageUnavailable, match="because another run holds it"),
                other.lock("t", timeout_s=0.2),
            ):
                pass
            with other.lock("t", timeout_s=5):
                pass
            run_turn(saver, f"t{number}")
            rules = Rules(checkpoints_last=1)
            assert retention.apply(rules, saver, store).count("checkpoints") == 2


def test_lock_requires_direct_if_the_pool_parameters_are_unusable(options: dict[str, Any]) -> None:
    """The error says to pass `direct=`, and with `direct=` the lock works."""

    class Connection(psycopg.Connection[Any]):
        @classmethod
        def connect(cls, conninfo: str = "", **options: Any) -> Any:
            options.pop("tokens")
            return super().connect(postgres_server.dsn(), **options)

    kwargs = {"tokens": SECRET}
    with ConnectionPool[Any](
        "", connection_class=Connection, kwargs=kwargs, min_size=0, max_size=1, open=True
    ) as pool:
        with (
            PostgresCheckpointer.open(pool, **options) as saver,
            pytest.raises(StorageUnavailable, match="for locks as 'direct'") as error,
            saver.lock("t"),
        ):
            pass
        assert SECRET not in str(error.value)
        with (
            PostgresCheckpointer.open(pool, pooled=True, **options) as saver,
            pytest.raises(ConfigurationError, match="a lock requires a direct connection"),
        ):
            saver.lock("t")
        with (
            PostgresCheckpointer.open(pool, direct=postgres_server.dsn, **options) as saver,
            saver.lock("t"),
        ):
            assert run_turn(saver) == ["hello", "1"]


def test_async_pool_and_plain_connection_are_refused(pool: WatchedPool) -> None:
    with pytest.raises(
        ConfigurationError, match="AsyncConnectionPool, which is tied to one event loop"
    ):
        PostgresStore(AsyncConnectionPool("", open=False))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="'direct' is a connection pool"):
        PostgresCheckpointer(pool, direct=pool)  # type: ignore[arg-type]
    with (
        psycopg.connect(postgres_server.dsn()) as conn,
        pytest.raises(ConfigurationError, match="of type Connection"),
    ):
        PostgresStore(conn)  # type: ignore[arg-type]


# -- the rest of perdure


def test_threads_of_a_pool_can_be_searched(pool: WatchedPool, options: dict[str, Any]) -> None:
    """The store uses the same pool, or the DSN."""
    with (
        open_checkpointer(pool, **options) as saver,
        open_store(pool, **options) as store,
        PostgresStore.open(postgres_server.dsn(), **options) as other,
    ):
        run_turn(saver, text="I like figs")
        for postgres_store in (store, other):
            assert [hit.thread_id for hit in search_threads(saver, postgres_store, "figs")] == ["t"]
        with pytest.raises(ConfigurationError, match=r"Background\(database="):
            resolve_queue_location_and_schema(None, store)
        assert "pool" in saver.database.path


def test_erase_runs_vacuum_outside_a_transaction(
    pool: WatchedPool, options: dict[str, Any]
) -> None:
    """The connections of the pool start transactions by themselves."""
    with PostgresCheckpointer.open(pool, **options) as saver:
        run_turn(saver)
        assert saver.erase("t").items == 2
        saver.delete_thread("t")
        assert saver.threads() == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_process_cannot_use_the_pool_of_its_parent(
    pool: WatchedPool, options: dict[str, Any]
) -> None:
    """Closing the inherited store in the child does not affect the parent."""
    with PostgresStore.open(pool, index=None, **options) as store:
        store.put(("a",), "k", {"n": 1})
        child_pid = os.fork()
        if not child_pid:
            try:
                with pytest.raises(StorageUnavailable, match="forked process"):
                    store.get(("a",), "k")
                store.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child_pid, 0)[1]) == 0
        store.put(("a",), "k", {"n": 2})

        assert [item.value["n"] for item in store.history(("a",), "k")] == [1, 2]
    assert pool.get_stats()["connections_num"] == 1
