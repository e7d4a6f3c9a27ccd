"""A function in place of the DSN of Postgres: rotating passwords, and functions that fail."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from perdure import PostgresCheckpointer, PostgresStore
from perdure.checkpointers import open_checkpointer
from perdure.errors import ConfigurationError, StorageError, StorageUnavailable
from perdure.memory import search_threads
from perdure.memory.long_term.background import resolve_queue_location_and_schema
from perdure.stores import open_store
from tests import postgres_server
from tests.durability.test_postgres import build_graph

pytestmark = pytest.mark.postgres

CONFIG: Any = {"configurable": {"thread_id": "t"}}
SHORT_S = 0.7
SECRET = "s3cret-password"
SECRET_DSN = f"host=db.example password={SECRET}"


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """The options of a database with a new schema."""
    return {"schema": postgres_server.schema_name(tmp_path), "pool_size": 4, "timeout_s": 10}


class Tokens:
    """A source of DSNs, whose behaviour a test can replace."""

    def __init__(self, dsn: str = "") -> None:
        self.dsn, self.calls = dsn, 0
        self.instead: Callable[[], Any] | None = None

    def get(self) -> Any:
        self.calls += 1
        return self.dsn if self.instead is None else self.instead()


@pytest.fixture
def tokens() -> Tokens:
    return Tokens(postgres_server.dsn())


@pytest.fixture
def role(options: dict[str, Any]) -> Iterator[str]:
    """A role that needs a password and belongs to this test."""
    name = f"r{options['schema']}"
    postgres_server.dsn_by_password(name, "first")
    yield name
    with psycopg.connect(postgres_server.dsn(), autocommit=True) as conn:
        conn.execute(f"DROP OWNED BY {name} CASCADE")
        conn.execute(f"DROP ROLE {name}")


def end_connections(role: str) -> None:
    """End all connections of a role."""
    with psycopg.connect(postgres_server.dsn(), autocommit=True) as conn:
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", (role,)
        )


@pytest.mark.parametrize("is_async", [False, True])
def test_runs_continue_after_the_password_was_changed(
    is_async: bool, role: str, options: dict[str, Any]
) -> None:
    """The old connections are ended. The connection of the locks also gets the new password."""
    tokens = Tokens(postgres_server.dsn_by_password(role, "first"))

    def run_turn(number: int) -> None:
        said = {"messages": [("user", f"hello {number}")]}
        if is_async:
            asyncio.run(graph.ainvoke(said, CONFIG))
        else:
            graph.invoke(said, CONFIG)

    with (
        PostgresCheckpointer.open(tokens.get, **options) as saver,
        PostgresStore.open(tokens.get, **options) as store,
    ):
        graph = build_graph(saver)
        for number, password in enumerate(("second", "third")):
            run_turn(number)
            old_dsn = tokens.dsn
            tokens.dsn = postgres_server.dsn_by_password(role, password)
            end_connections(role)
            with pytest.raises(psycopg.OperationalError, match="authentication failed"):
                psycopg.connect(old_dsn)
            store.put(("a",), f"k{number}", {"n": number})
            with saver.lock("t"):
                run_turn(number)

        texts = [item.value.content for item in saver.history("t")][0::2]
        assert texts == ["hello 0", "hello 0", "hello 1", "hello 1"]
        assert len(store.search(("a",))) == 2


def test_old_password_is_retried_until_the_function_returns_the_new_one(
    role: str, options: dict[str, Any]
) -> None:
    """The function is called again until `timeout_s` has passed."""
    tokens = Tokens(postgres_server.dsn_by_password(role, "first"))
    with PostgresStore.open(tokens.get, **options) as store:
        store.put(("a",), "k", {"n": 0})
        new_dsn = postgres_server.dsn_by_password(role, "second")
        end_connections(role)
        timer = threading.Timer(1.5, lambda: setattr(tokens, "dsn", new_dsn))
        timer.start()

        store.put(("a",), "k", {"n": 1})
        timer.join()
        assert [item.value["n"] for item in store.history(("a",), "k")] == [0, 1]


def test_wrong_password_raises_storage_unavailable(role: str, options: dict[str, Any]) -> None:
    """The password may be right the next time, so the error is one that callers retry."""
    tokens = Tokens(postgres_server.dsn_by_password(role, "first"))
    short_options = {**options, "timeout_s": 2}
    with PostgresStore.open(tokens.get, **short_options) as store:
        postgres_server.dsn_by_password(role, "second")
        end_connections(role)
        with pytest.raises(StorageUnavailable, match="wrong or expired") as error:
            store.put(("a",), "k", {"n": 1})
        assert "first" not in str(error.value)
    with pytest.raises(StorageUnavailable, match="wrong or expired"):
        PostgresStore.open(tokens.get, **short_options)


def test_dsn_function_is_called_for_each_new_connection(
    tokens: Tokens, options: dict[str, Any]
) -> None:
    with PostgresStore.open(tokens.get, **options) as store:
        store.put(("a",), "k", {"n": 0})
        calls_before = tokens.calls
        store.put(("a",), "k", {"n": 1})
        assert tokens.calls == calls_before
        server: Any = store.database
        server = server._connect_once()
        with server.connection() as one, server.connection() as other:
            assert one is not other
        assert tokens.calls > calls_before


class Unhashable(Tokens):
    __hash__ = None  # type: ignore[assignment]

    def __call__(self) -> Any:
        return self.get()


def test_components_with_equal_dsn_functions_share_connections(options: dict[str, Any]) -> None:
    """A bound method equals itself. Different functions may belong to different users."""
    dsn = postgres_server.dsn()
    tokens, unhashable = Tokens(dsn), Unhashable(dsn)

    def share_connections(one: Any, other: Any) -> bool:
        with (
            PostgresCheckpointer.open(one, **options) as saver,
            PostgresStore.open(other, **options) as store,
        ):
            databases: list[Any] = [saver.database, store.database]
            return bool(databases[0]._resource is databases[1]._resource)

    assert share_connections(tokens.get, tokens.get)
    assert share_connections(unhashable, unhashable)
    assert not share_connections(tokens.get, Tokens(dsn).get)
    assert not share_connections(unhashable, Unhashable(dsn))
    assert not share_connections(tokens.get, dsn)


def raise_error() -> str:
    raise RuntimeError(f"no token for {SECRET_DSN}")


def raise_system_exit() -> str:
    raise SystemExit(SECRET_DSN)


async def return_dsn_async() -> str:
    return SECRET_DSN


FAILING: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (raise_error, "raised RuntimeError"),
    "exits": (raise_system_exit, "raised SystemExit"),
    "hangs": (lambda: time.sleep(20), "did not return in time|has not returned yet"),
    "none": (lambda: None, "returned a value of type NoneType"),
    "empty": (lambda: "", "returned an empty text"),
    "bytes": (SECRET_DSN.encode, "returned a value of type bytes"),
    "password": (lambda: SECRET, "returned text that is not a DSN"),
    "malformed": (lambda: f"postgresql://u:{SECRET}@x@y/z", "returned text that is not a DSN"),
    "unknown": (lambda: f"{SECRET_DSN} unknown=1", "returned text that is not a DSN"),
    "surrogate": (lambda: f"{SECRET_DSN}\ud800", "returned text that is not a DSN"),
    "nul": (lambda: f"{SECRET_DSN}\0", "returned text that is not a DSN"),
    "coroutine": (lambda: return_dsn_async(), "returned an awaitable"),
}


def render_error_chain(error: BaseException) -> str:
    """Render an error, its causes and its contexts."""
    texts, remaining = [], [error]
    while remaining:
        current = remaining.pop()
        texts.append(f"{current!s} {current!r} {current.__dict__}")
        remaining += [
            linked_error
            for linked_error in (current.__cause__, current.__context__)
            if linked_error is not None
        ]
    return "\n".join(texts)


def check_refusal(error: BaseException, kind: str, took_s: float, log: str) -> None:
    """Check that an error has the message of `FAILING`, came in time, and contains no secret."""
    assert re.search(FAILING[kind][1], str(error))
    assert "Tokens.get" in str(error)
    assert took_s < SHORT_S + 1.0
    for text in (render_error_chain(error), log):
        assert SECRET not in text
        assert "db.example" not in text


@pytest.mark.parametrize("kind", FAILING)
def test_failing_dsn_function_at_opening_reveals_no_secret(
    kind: str, tokens: Tokens, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """No message, cause or log contains what the function returned."""
    caplog.set_level(logging.DEBUG)
    tokens.instead = FAILING[kind][0]
    start = time.monotonic()
    with pytest.raises(StorageUnavailable) as error:
        PostgresStore.open(tokens.get, **{**options, "timeout_s": SHORT_S})

    check_refusal(error.value, kind, time.monotonic() - start, caplog.text)


@pytest.mark.parametrize("kind", FAILING)
def test_failing_dsn_function_after_opening_reveals_no_secret(
    kind: str, tokens: Tokens, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A later call with a working function succeeds."""
    caplog.set_level(logging.DEBUG)
    with PostgresStore.open(tokens.get, **{**options, "timeout_s": SHORT_S}) as store:
        store.put(("a",), "k", {"n": 0})
        tokens.instead = FAILING[kind][0]
        drain_pool(store)
        start = time.monotonic()
        with pytest.raises(StorageUnavailable) as error:
            store.put(("a",), "k", {"n": 1})
        took_s = time.monotonic() - start
        tokens.instead = None
        while True:
            with suppress(StorageUnavailable):
                store.put(("a",), "k", {"n": 2})
                break

    check_refusal(error.value, kind, took_s, caplog.text)


def drain_pool(store: PostgresStore) -> None:
    """Make a store open new connections for its next calls."""
    database: Any = store.database
    database._resource._connections._pool.drain()


def test_lock_fails_in_time_if_its_dsn_function_fails(
    tokens: Tokens, options: dict[str, Any]
) -> None:
    """The same lock can be acquired later."""
    short_options: Any = {**options, "timeout_s": 0.5}
    with PostgresCheckpointer.open(
        postgres_server.dsn(), direct=tokens.get, **short_options
    ) as saver:
        for instead in (raise_error, lambda: time.sleep(3)):
            tokens.instead = instead
            start = time.monotonic()
            with (
                pytest.raises(
                    StorageUnavailable, match=r"that is passed as direct= .*(raised|in time)"
                ),
                saver.lock("t", timeout_s=5),
            ):
                pass
            assert time.monotonic() - start < 2.5
        tokens.instead = None
        with saver.lock("t", timeout_s=5):
            pass


def test_close_does_not_wait_for_a_hanging_dsn_function(
    tokens: Tokens, options: dict[str, Any]
) -> None:
    may_return = threading.Event()
    store = PostgresStore.open(tokens.get, **{**options, "timeout_s": 60})
    tokens.instead = lambda: may_return.wait(60)
    drain_pool(store)
    database: Any = store.database
    errors: list[BaseException] = []

    def put() -> None:
        with pytest.raises(StorageError) as error:
            store.put(("a",), "k", {"n": 1})
        errors.append(error.value)

    thread = threading.Thread(target=put)
    thread.start()
    while not database._resource._connections._source._pending:
        time.sleep(0.01)
    start = time.monotonic()
    store.close()
    thread.join(20)
    may_return.set()

    assert time.monotonic() - start < 10
    assert len(errors) == 1


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (return_dsn_async, "is an async function"),
        (lambda one: one, "needs arguments"),
        (functools.partial(return_dsn_async), "is an async function"),
        (5, "of type int"),
        (SECRET_DSN.encode(), "of type bytes"),
        ([SECRET_DSN], "of type list"),
        ({"dsn": SECRET_DSN}, "of type dict"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_value_that_is_neither_dsn_nor_function_is_refused(value: Any, reason: str) -> None:
    for arguments in ({"dsn": value}, {"dsn": "host=x", "direct": value}):
        with pytest.raises(ConfigurationError, match=reason) as error:
            PostgresCheckpointer(**arguments)
        assert SECRET not in str(error.value)


def test_everything_that_opens_postgres_accepts_a_dsn_function(
    tokens: Tokens, options: dict[str, Any]
) -> None:
    """A saver and a store of one database can be searched together, whether they have a DSN or a
    function.
    """
    with (
        open_checkpointer(tokens.get, **options) as saver,
        open_store(tokens.get, **options) as store,
        PostgresStore.open(dsn=lambda: tokens.dsn, **options) as other,
        PostgresStore.open(
            tokens.dsn, **{**options, "schema": f"{options['schema']}x"}
        ) as other_schema,
    ):
        build_graph(cast(PostgresCheckpointer, saver)).invoke(
            {"messages": [("user", "I like figs")]}, CONFIG
        )
        for postgres_store in (store, other):
            hits = search_threads(saver, postgres_store, "figs")
            assert [hit.thread_id for hit in hits] == ["t"]
        with pytest.raises(ConfigurationError, match="both must be in the same database"):
            search_threads(saver, other_schema, "figs")
        assert saver.database.path.startswith("postgresql://")

    async def put_and_get() -> Any:
        async with PostgresStore(dsn=tokens.get, **options) as store:
            await store.aput(("a",), "k", {"n": 1})
            return await store.aget(("a",), "k")

    assert asyncio.run(put_and_get()).value == {"n": 1}


def test_queue_requires_a_dsn_that_is_no_function(tokens: Tokens, options: dict[str, Any]) -> None:
    """The queue keeps the password with which it was opened."""
    with PostgresStore.open(tokens.get, **options) as store:
        with pytest.raises(ConfigurationError, match=r"Background\(database="):
            resolve_queue_location_and_schema(None, store)
        assert (
            resolve_queue_location_and_schema(make_conninfo(tokens.dsn), store)[1]
            == f"{options['schema']}_jobs"
        )
