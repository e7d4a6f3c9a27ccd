"""A pool of psycopg_pool that the user owns: it is shared, left as it was, and never closed."""

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
from perdure.memory.background import resolve_queue_location_and_schema
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
    """A schema of the test's own."""
    return {"schema": postgres_server.schema(tmp_path), "timeout_s": 10}


@pytest.fixture
def pool() -> Iterator[WatchedPool]:
    """A pool of one connection."""
    with watched_pool(postgres_server.dsn(), max_size=1) as made:
        yield made


def talk(saver: Any, thread_id: str = "t", text: str = "hello") -> list[Any]:
    """Run a turn, and return what was said."""
    config: Any = {"configurable": {"thread_id": thread_id}}
    build_graph(saver).invoke({"messages": [("user", text)]}, config)
    return [item.value.content for item in saver.history(thread_id)]


def end_connections(pool: WatchedPool) -> None:
    """End all connections of a pool, which other processes have too under their name."""
    with ExitStack() as stack:
        lent = [stack.enter_context(pool.connection()) for _ in range(pool.max_size)]
        pids = [conn.info.backend_pid for conn in lent]
    with psycopg.connect(postgres_server.dsn(), autocommit=True) as conn:
        conn.execute("SELECT pg_terminate_backend(pid) FROM unnest(%s::int[]) AS pid", (pids,))


def test_savers_and_stores_of_one_pool(pool: WatchedPool, options: dict[str, Any]) -> None:
    """They share its only connection from threads and event loops, and nobody waits for ever."""

    async def turns(saver: PostgresCheckpointer, store: PostgresStore, name: str) -> None:
        config: Any = {"configurable": {"thread_id": f"async-{name}"}}
        await asyncio.gather(
            build_graph(saver).ainvoke({"messages": [("user", "hello")]}, config),
            *(store.aput(("a", name), f"k{n}", {"text": f"tea {n}"}) for n in range(5)),
        )
        assert len(await store.asearch(("a", name), query="tea")) == 5

    def user(part: tuple[PostgresCheckpointer, PostgresStore], name: str) -> None:
        saver, store = part
        assert talk(saver, name) == ["hello", "1"]
        asyncio.run(turns(saver, store, name))

    own, other = options, {**options, "schema": f"{options['schema']}x"}
    with (
        PostgresCheckpointer.open(pool, **own) as one,
        PostgresCheckpointer.open(pool, **own) as two,
        PostgresCheckpointer.open(pool, **other) as three,
        PostgresStore.open(pool, **own) as store,
        PostgresStore.open(pool, **other) as far,
        ThreadPoolExecutor(6) as threads,
    ):
        parts = [(one, store), (two, store), (three, far)] * 2
        users = [threads.submit(user, part, f"u{n}") for n, part in enumerate(parts)]
        for each in users:
            each.result(PATIENCE_S)
        assert len(one.threads()) == 8
        assert len(three.threads()) == 4

    assert pool.most_lent == 1
    assert not pool.closed


def failing() -> Flow[None]:
    yield Statement("SELECT 1")
    yield Statement("SELECT 1 / 0")


def leaving() -> Flow[None]:
    yield Statement("SELECT 1")
    raise KeyboardInterrupt


def test_a_connection_comes_back_as_it_was_after_an_error(
    pool: WatchedPool, options: dict[str, Any]
) -> None:
    """Of a statement, of Python, in a read, in the first request of a write and in a later one."""
    with PostgresStore.open(pool, index=None, **options) as store:
        database = store.database
        for make in (failing, lambda: fetch_rows("SELECT 1 / 0"), lambda: fetch_rows("nonsense")):
            for call in (database.read, database.write):
                with pytest.raises(StorageError, match=r"division by zero|syntax error"):
                    call(make)
        for call in (database.read, database.write):
            with pytest.raises(KeyboardInterrupt):
                call(leaving)
        store.put(("a",), "k", {"n": 1})

        assert pool.get_stats()["connections_num"] == 1


def test_a_connection_comes_back_as_it_was_after_a_timeout(
    pool: WatchedPool, options: dict[str, Any]
) -> None:
    """Of a lock in the database, whose time is that of perdure and not the user's."""
    with PostgresStore.open(pool, index=None, **{**options, "timeout_s": 0.3}) as store:
        store.put(("a",), "k", {"n": 0})
        with psycopg.connect(postgres_server.dsn()) as other:
            other.execute(f"LOCK TABLE {options['schema']}.store_namespaces")
            with pytest.raises(StorageUnavailable, match="another transaction has held a lock"):
                store.put(("a",), "k", {"n": 1})
        store.put(("a",), "k", {"n": 2})

        assert [item.value["n"] for item in store.history(("a",), "k")] == [0, 2]


def test_a_connection_comes_back_after_a_cancellation(
    pool: WatchedPool, options: dict[str, Any]
) -> None:
    """A task that is cancelled while its put waits for the only connection leaves no trace."""

    async def scenario(store: PostgresStore) -> None:
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
        asyncio.run(scenario(store))
        stored = {item.value["n"] for item in store.search(("a",), limit=100)}
        assert {1, 3, 5, 7, 9, 11} <= stored


@pytest.mark.parametrize("heard", [True, False])
def test_a_connection_that_is_cut(heard: bool, options: dict[str, Any]) -> None:
    """At each message of a put: nothing is missing or twice, and the pool goes on."""
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
                proxy.cut_at(number, delivered=heard)
                store.put(("a",), "k", {"n": number})
                proxy.cut_at(None)
                versions += 1
                assert len(store.history(("a",), "k")) == versions
            assert proxy.cuts > versions / 2
    finally:
        proxy.close()


def test_all_connections_of_the_pool_are_lost(options: dict[str, Any]) -> None:
    """As after a restart of the server: more of them lie idle than a call is tried again."""
    with (
        watched_pool(postgres_server.dsn(), min_size=14, max_size=14) as pool,
        PostgresStore.open(pool, index=None, **options) as store,
    ):
        pool.wait(PATIENCE_S)
        store.put(("a",), "k", {"n": 0})
        end_connections(pool)
        store.put(("a",), "k", {"n": 1})

        assert [item.value["n"] for item in store.history(("a",), "k")] == [0, 1]


def test_a_commit_in_doubt_with_a_pool_of_one(options: dict[str, Any]) -> None:
    """The lost connection goes back first: else there is none to ask by."""
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
                with server.connection() as lent:
                    lent.server_run = run
                    lent.discard_connection()
                    whole = Transaction(server, lent, [], [])
                    whole._transaction_number = number
                    assert whole._was_committed() is expected


# -- tenants


def test_another_user_of_the_pool_never_sees_a_tenant(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """While two tenants work, those who take a connection from the pool see no row of theirs."""
    owner, dsn = postgres_server.dsn_of("an_owner"), postgres_server.dsn_of("a_user", owner=False)
    schema = options["schema"]
    for part in (PostgresCheckpointer, PostgresStore):
        part.open(owner, tenant="setup", **options).close()
    with psycopg.connect(owner) as conn:
        conn.execute(f"GRANT USAGE ON SCHEMA {schema} TO a_user")
        conn.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO a_user")
        conn.execute(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA {schema} TO a_user")
    over, seen = threading.Event(), list[Any]()
    look = (
        "SELECT nullif(current_setting('perdure.tenant', true), ''), current_schemas(false), "
        "current_setting('TimeZone'), current_setting('lock_timeout'), "
        f"(SELECT count(*) FROM {schema}.threads), (SELECT count(*) FROM {schema}.store_items)"
    )

    def looking(pool: ConnectionPool[Any]) -> None:
        while not over.is_set():
            with pool.connection() as conn:
                seen.append(conn.execute(look).fetchone())

    def working(pool: ConnectionPool[Any], tenant: str) -> None:
        with (
            PostgresCheckpointer.open(pool, tenant=tenant, **options) as saver,
            PostgresStore.open(pool, tenant=tenant, **options) as store,
        ):
            for number in range(8):
                assert talk(saver, text=f"{tenant} {number}")[-2] == f"{tenant} {number}"
                store.put(("a",), f"k{number}", {"text": f"tea of {tenant}"})
                with pytest.raises(StorageError, match="division by zero"):
                    store.database.write(failing)
            found = store.search((), query="tea", limit=100)
            assert {item.value["text"] for item in found} == {f"tea of {tenant}"}
            assert {"".join(x.split(" ")[0]) for x in talk(saver)[:16:2]} == {tenant}

    with (
        ConnectionPool(dsn, min_size=1, max_size=3, open=True) as pool,
        ThreadPoolExecutor(4) as threads,
    ):
        with pool.connection() as conn:
            expected = conn.execute(look).fetchone()
        looks = [threads.submit(looking, pool) for _ in range(2)]
        try:
            for each in [threads.submit(working, pool, t) for t in ("acme", "globex")]:
                each.result(PATIENCE_S)
        finally:
            over.set()
        for each in looks:
            each.result(PATIENCE_S)

    assert expected is not None
    assert expected[0] is None
    assert expected[-2:] == (0, 0)
    assert len(seen) > 10
    assert {tuple(map(str, row)) for row in seen} == {tuple(map(str, expected))}


def test_what_gives_no_wall_is_refused(options: dict[str, Any]) -> None:
    """A pool whose role sees all tenants; row_security=off of its sessions changes nothing."""
    with watched_pool(postgres_server.dsn_of("an_owner"), max_size=1) as pool:
        PostgresStore.open(pool, tenant="acme", **options).close()
        with pytest.raises(ConfigurationError, match="pass tenant="):
            PostgresStore.open(pool, **options)
    with (
        watched_pool(postgres_server.dsn(), max_size=1) as pool,
        pytest.raises(ConfigurationError, match="bypasses row-level security"),
    ):
        PostgresStore.open(pool, tenant="acme", **options)


# -- pools that give no connection


def test_a_pool_that_is_not_open(options: dict[str, Any]) -> None:
    """Not yet, or no more: what was opened works again as soon as the pool is open."""
    pool = ConnectionPool[Any](postgres_server.dsn(), min_size=0, max_size=1, open=False)
    store = PostgresStore(pool, index=None, **options)
    with pytest.raises(StorageUnavailable, match="not open yet"):
        store.put(("a",), "k", {})
    with pool:
        store.put(("a",), "k", {"n": 1})
        found: Any = store.get(("a",), "k")
        assert found.value == {"n": 1}
    began = time.monotonic()
    with pytest.raises(StorageUnavailable, match="already closed"):
        store.get(("a",), "k")
    with pytest.raises(StorageUnavailable, match="already closed"):
        asyncio.run(store.aget(("a",), "k"))
    with pytest.raises(StorageUnavailable, match="already closed"):
        PostgresCheckpointer.open(pool, **options)
    assert time.monotonic() - began < 5
    store.close()


def test_a_pool_whose_connections_are_all_in_use(options: dict[str, Any]) -> None:
    """Whoever waits longer than `timeout_s` is told so, and the next call has the connection."""
    few = {**options, "timeout_s": 0.3}
    with (
        watched_pool(postgres_server.dsn(), max_size=1, max_waiting=1) as pool,
        PostgresStore.open(pool, index=None, **few) as store,
    ):
        with pool.connection():
            for reason in (r"gave no connection within 0\.3 s", "max_waiting"):
                with pytest.raises(StorageUnavailable, match=reason):
                    store.get(("a",), "k")

        assert store.get(("a",), "k") is None


SECRET = "s3cret-password"


def raising() -> Any:
    raise RuntimeError(SECRET)


@pytest.mark.parametrize("null", [False, True])
@pytest.mark.parametrize(
    "wrong",
    [
        {"conninfo": raising},
        {"conninfo": f"host=/nowhere unknown={SECRET}"},
        {"conninfo": f"host=/nowhere password={SECRET}"},
        {"kwargs": raising},
        {"check": lambda conn: raising()},
        {"configure": lambda conn: raising()},
    ],
    ids=["conninfo", "unknown option", "unreachable", "kwargs", "check", "configure"],
)
def test_a_pool_that_cannot_connect(
    wrong: dict[str, Any], null: bool, options: dict[str, Any]
) -> None:
    """Nothing of what its functions say is shown, as that may be a password."""
    kind: Any = NullConnectionPool if null else ConnectionPool
    given = {"conninfo": postgres_server.dsn(), "min_size": 0, "max_size": 1, "open": True, **wrong}
    with kind(**given) as pool:
        began = time.monotonic()
        with pytest.raises(StorageUnavailable) as refused:
            PostgresStore.open(pool, **{**options, "timeout_s": 0.5})
        assert time.monotonic() - began < 3
    error: BaseException | None = refused.value
    while error is not None:
        assert SECRET not in f"{error} {error!r}"
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize(
    "given",
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
    ids=lambda given: "-".join(given),
)
def test_pools_of_other_options(given: dict[str, Any], options: dict[str, Any]) -> None:
    base = {"conninfo": postgres_server.dsn(), "min_size": 0, "max_size": 1, "open": True}
    kinds: list[Any] = [ConnectionPool]
    if not {"max_lifetime", "close_returns"} & given.keys():
        kinds.append(NullConnectionPool)
    for kind in kinds:
        schema = f"{options['schema']}{len(kind.__name__)}"
        with (
            kind(**{**base, **given}) as pool,
            PostgresCheckpointer.open(pool, **{**options, "schema": schema}) as saver,
        ):
            assert talk(saver) == ["hello", "1"]
            with saver.lock("t"):
                assert talk(saver) == ["hello", "1", "hello", "3"]
            assert pool.get_stats().get("returns_bad", 0) == 0


# -- locks


def test_locks_have_a_connection_of_their_own(options: dict[str, Any]) -> None:
    """From the parameters of the pool, or `direct=`; the pool may have none left."""
    dsn = postgres_server.dsn()
    parts = conninfo_to_dict(dsn)
    made = lambda: {**parts, "row_factory": psycopg.rows.dict_row}  # noqa: E731
    pools: list[dict[str, Any]] = [{"conninfo": dsn}, {"conninfo": "", "kwargs": made}]
    for number, given in enumerate(pools):
        with (
            ConnectionPool[Any](**given, min_size=1, max_size=1, open=True) as pool,
            PostgresCheckpointer.open(pool, **options) as saver,
            PostgresCheckpointer.open(dsn, **options) as other,
            PostgresStore.open(pool, index=None, **options) as store,
        ):
            with (
                saver.lock("t"),
                pool.connection(),
                pytest.raises(StorageUnavailable, match="locked by another run"),
                other.lock("t", timeout_s=0.2),
            ):
                pass
            with other.lock("t", timeout_s=5):
                pass
            talk(saver, f"t{number}")
            rules = Rules(checkpoints_last=1)
            assert retention.apply(rules, saver, store).count("checkpoints") == 2


def test_locks_of_a_pool_whose_parameters_do_not_do(options: dict[str, Any]) -> None:
    """It is said to give `direct=`, which then is used."""

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
            pytest.raises(StorageUnavailable, match="pass direct=") as refused,
            saver.lock("t"),
        ):
            pass
        assert SECRET not in str(refused.value)
        with (
            PostgresCheckpointer.open(pool, pooled=True, **options) as saver,
            pytest.raises(ConfigurationError, match="pass direct="),
        ):
            saver.lock("t")
        with (
            PostgresCheckpointer.open(pool, direct=postgres_server.dsn, **options) as saver,
            saver.lock("t"),
        ):
            assert talk(saver) == ["hello", "1"]


def test_pools_that_cannot_be_used(pool: WatchedPool) -> None:
    with pytest.raises(ConfigurationError, match="AsyncConnectionPool, whose connections"):
        PostgresStore(AsyncConnectionPool("", open=False))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="direct is a pool"):
        PostgresCheckpointer(pool, direct=pool)  # type: ignore[arg-type]
    with (
        psycopg.connect(postgres_server.dsn()) as conn,
        pytest.raises(ConfigurationError, match="of type Connection"),
    ):
        PostgresStore(conn)  # type: ignore[arg-type]


# -- the rest of perdure


def test_threads_of_a_pool_are_searched(pool: WatchedPool, options: dict[str, Any]) -> None:
    """With a store of the same pool, or one that has the DSN itself."""
    with (
        open_checkpointer(pool, **options) as saver,
        open_store(pool, **options) as store,
        PostgresStore.open(postgres_server.dsn(), **options) as other,
    ):
        talk(saver, text="I like figs")
        for each in (store, other):
            assert [hit.thread_id for hit in search_threads(saver, each, "figs")] == ["t"]
        with pytest.raises(ConfigurationError, match=r"Background\(database="):
            resolve_queue_location_and_schema(None, store)
        assert "pool" in saver.database.path


def test_erasing_and_vacuum(pool: WatchedPool, options: dict[str, Any]) -> None:
    """VACUUM runs outside of a transaction, by a connection that begins them by itself."""
    with PostgresCheckpointer.open(pool, **options) as saver:
        talk(saver)
        assert saver.erase("t").items == 2
        saver.delete_thread("t")
        assert saver.threads() == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_leaves_the_pool_to_its_parent(pool: WatchedPool, options: dict[str, Any]) -> None:
    """What a forked process has inherited is refused there, also what it closes."""
    with PostgresStore.open(pool, index=None, **options) as store:
        store.put(("a",), "k", {"n": 1})
        child = os.fork()
        if not child:
            try:
                with pytest.raises(StorageUnavailable, match="forked process"):
                    store.get(("a",), "k")
                store.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        store.put(("a",), "k", {"n": 2})

        assert [item.value["n"] for item in store.history(("a",), "k")] == [1, 2]
    assert pool.get_stats()["connections_num"] == 1
