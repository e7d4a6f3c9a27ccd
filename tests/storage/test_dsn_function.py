"""A function that returns the DSN of Postgres: passwords that rotate, and functions that fail."""

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
from perdure.memory.background import resolve_queue_location_and_schema
from perdure.stores import open_store
from tests import postgres_server
from tests.durability.test_postgres import build_graph

pytestmark = pytest.mark.postgres

CONFIG: Any = {"configurable": {"thread_id": "t"}}
SHORT_S = 0.7
SECRET = "s3cret-password"
HIDDEN = f"host=db.example password={SECRET}"


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """A schema of the test's own."""
    return {"schema": postgres_server.schema(tmp_path), "pool_size": 4, "timeout_s": 10}


class Tokens:
    """Returns a DSN, or does what a test wants instead."""

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
    """A role of the test's own, that needs a password."""
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


@pytest.mark.parametrize("awaited", [False, True])
def test_work_goes_on_after_the_password_was_changed(
    awaited: bool, role: str, options: dict[str, Any]
) -> None:
    """Also the locks' connection, and though the old connections are ended."""
    tokens = Tokens(postgres_server.dsn_by_password(role, "first"))

    def turn(number: int) -> None:
        said = {"messages": [("user", f"hello {number}")]}
        if awaited:
            asyncio.run(graph.ainvoke(said, CONFIG))
        else:
            graph.invoke(said, CONFIG)

    with (
        PostgresCheckpointer.open(tokens.get, **options) as saver,
        PostgresStore.open(tokens.get, **options) as store,
    ):
        graph = build_graph(saver)
        for number, password in enumerate(("second", "third")):
            turn(number)
            old = tokens.dsn
            tokens.dsn = postgres_server.dsn_by_password(role, password)
            end_connections(role)
            with pytest.raises(psycopg.OperationalError, match="authentication failed"):
                psycopg.connect(old)
            store.put(("a",), f"k{number}", {"n": number})
            with saver.lock("t"):
                turn(number)

        said = [item.value.content for item in saver.history("t")][0::2]
        assert said == ["hello 0", "hello 0", "hello 1", "hello 1"]
        assert len(store.search(("a",))) == 2


def test_a_password_that_is_late(role: str, options: dict[str, Any]) -> None:
    """A function that still returns the old password is asked again until `timeout_s`."""
    tokens = Tokens(postgres_server.dsn_by_password(role, "first"))
    with PostgresStore.open(tokens.get, **options) as store:
        store.put(("a",), "k", {"n": 0})
        new = postgres_server.dsn_by_password(role, "second")
        end_connections(role)
        late = threading.Timer(1.5, lambda: setattr(tokens, "dsn", new))
        late.start()

        store.put(("a",), "k", {"n": 1})
        late.join()
        assert [item.value["n"] for item in store.history(("a",), "k")] == [0, 1]


def test_a_password_that_stays_wrong(role: str, options: dict[str, Any]) -> None:
    """It may be right the next time, so the error is one after which a caller tries again."""
    tokens = Tokens(postgres_server.dsn_by_password(role, "first"))
    few = {**options, "timeout_s": 2}
    with PostgresStore.open(tokens.get, **few) as store:
        postgres_server.dsn_by_password(role, "second")
        end_connections(role)
        with pytest.raises(StorageUnavailable, match="wrong or expired") as refused:
            store.put(("a",), "k", {"n": 1})
        assert "first" not in str(refused.value)
    with pytest.raises(StorageUnavailable, match="wrong or expired"):
        PostgresStore.open(tokens.get, **few)


def test_it_is_called_for_each_new_connection(tokens: Tokens, options: dict[str, Any]) -> None:
    with PostgresStore.open(tokens.get, **options) as store:
        store.put(("a",), "k", {"n": 0})
        before = tokens.calls
        store.put(("a",), "k", {"n": 1})
        assert tokens.calls == before
        server: Any = store.database
        server = server._connect_once()
        with server.connection() as one, server.connection() as other:
            assert one is not other
        assert tokens.calls > before


class Unhashable(Tokens):
    __hash__ = None  # type: ignore[assignment]

    def __call__(self) -> Any:
        return self.get()


def test_equal_functions_share_connections(options: dict[str, Any]) -> None:
    """A bound method is equal to itself; different functions, with perhaps other users, are not."""
    dsn = postgres_server.dsn()
    tokens, unhashable = Tokens(dsn), Unhashable(dsn)

    def shared(one: Any, other: Any) -> bool:
        with (
            PostgresCheckpointer.open(one, **options) as saver,
            PostgresStore.open(other, **options) as store,
        ):
            found: list[Any] = [saver.database, store.database]
            return bool(found[0]._resource is found[1]._resource)

    assert shared(tokens.get, tokens.get)
    assert shared(unhashable, unhashable)
    assert not shared(tokens.get, Tokens(dsn).get)
    assert not shared(unhashable, Unhashable(dsn))
    assert not shared(tokens.get, dsn)


def raising() -> str:
    raise RuntimeError(f"no token for {HIDDEN}")


def leaving() -> str:
    raise SystemExit(HIDDEN)


async def coroutine() -> str:
    return HIDDEN


FAILING: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (raising, "raised RuntimeError"),
    "exits": (leaving, "raised SystemExit"),
    "hangs": (lambda: time.sleep(20), "did not return in time|has not returned yet"),
    "none": (lambda: None, "returned a value of type NoneType"),
    "empty": (lambda: "", "returned an empty text"),
    "bytes": (HIDDEN.encode, "returned a value of type bytes"),
    "password": (lambda: SECRET, "returned text that is not a DSN"),
    "malformed": (lambda: f"postgresql://u:{SECRET}@x@y/z", "returned text that is not a DSN"),
    "unknown": (lambda: f"{HIDDEN} unknown=1", "returned text that is not a DSN"),
    "surrogate": (lambda: f"{HIDDEN}\ud800", "returned text that is not a DSN"),
    "nul": (lambda: f"{HIDDEN}\0", "returned text that is not a DSN"),
    "coroutine": (lambda: coroutine(), "returned an awaitable"),
}


def texts_of(error: BaseException) -> str:
    """Return the messages of an error and of all errors that it came from or after."""
    texts, todo = [], [error]
    while todo:
        each = todo.pop()
        texts.append(f"{each!s} {each!r} {each.__dict__}")
        todo += [found for found in (each.__cause__, each.__context__) if found is not None]
    return "\n".join(texts)


def check_refusal(error: BaseException, kind: str, took_s: float, log: str) -> None:
    """Make sure that an error is what `FAILING` says, in time, and tells nothing secret."""
    assert re.search(FAILING[kind][1], str(error))
    assert "Tokens.get" in str(error)
    assert took_s < SHORT_S + 1.0
    for text in (texts_of(error), log):
        assert SECRET not in text
        assert "db.example" not in text


@pytest.mark.parametrize("kind", FAILING)
def test_a_function_that_gives_no_dsn_at_opening(
    kind: str, tokens: Tokens, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It is `StorageUnavailable` in time, and no message, cause or log has what it returned."""
    caplog.set_level(logging.DEBUG)
    tokens.instead = FAILING[kind][0]
    began = time.monotonic()
    with pytest.raises(StorageUnavailable) as refused:
        PostgresStore.open(tokens.get, **{**options, "timeout_s": SHORT_S})

    check_refusal(refused.value, kind, time.monotonic() - began, caplog.text)


@pytest.mark.parametrize("kind", FAILING)
def test_a_function_that_gives_no_dsn_later(
    kind: str, tokens: Tokens, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The same for a connection that is made after the database was opened; then work goes on."""
    caplog.set_level(logging.DEBUG)
    with PostgresStore.open(tokens.get, **{**options, "timeout_s": SHORT_S}) as store:
        store.put(("a",), "k", {"n": 0})
        tokens.instead = FAILING[kind][0]
        drain(store)
        began = time.monotonic()
        with pytest.raises(StorageUnavailable) as refused:
            store.put(("a",), "k", {"n": 1})
        took_s = time.monotonic() - began
        tokens.instead = None
        while True:
            with suppress(StorageUnavailable):
                store.put(("a",), "k", {"n": 2})
                break

    check_refusal(refused.value, kind, took_s, caplog.text)


def drain(store: PostgresStore) -> None:
    """Let a store make new connections from now on."""
    database: Any = store.database
    database._resource._connections._pool.drain()


def test_a_lock_whose_function_fails(tokens: Tokens, options: dict[str, Any]) -> None:
    """It is refused in time; later the same lock is taken."""
    few: Any = {**options, "timeout_s": 0.5}
    with PostgresCheckpointer.open(postgres_server.dsn(), direct=tokens.get, **few) as saver:
        for instead in (raising, lambda: time.sleep(3)):
            tokens.instead = instead
            began = time.monotonic()
            with (
                pytest.raises(
                    StorageUnavailable, match=r"that is passed as direct= .*(raised|in time)"
                ),
                saver.lock("t", timeout_s=5),
            ):
                pass
            assert time.monotonic() - began < 2.5
        tokens.instead = None
        with saver.lock("t", timeout_s=5):
            pass


def test_close_does_not_wait_for_a_function_that_hangs(
    tokens: Tokens, options: dict[str, Any]
) -> None:
    over = threading.Event()
    store = PostgresStore.open(tokens.get, **{**options, "timeout_s": 60})
    tokens.instead = lambda: over.wait(60)
    drain(store)
    database: Any = store.database
    failed: list[BaseException] = []

    def put() -> None:
        with pytest.raises(StorageError) as error:
            store.put(("a",), "k", {"n": 1})
        failed.append(error.value)

    thread = threading.Thread(target=put)
    thread.start()
    while not database._resource._connections._source._pending:
        time.sleep(0.01)
    began = time.monotonic()
    store.close()
    thread.join(20)
    over.set()

    assert time.monotonic() - began < 10
    assert len(failed) == 1


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (coroutine, "is asynchronous"),
        (lambda one: one, "needs arguments"),
        (functools.partial(coroutine), "is asynchronous"),
        (5, "of type int"),
        (HIDDEN.encode(), "of type bytes"),
        ([HIDDEN], "of type list"),
        ({"dsn": HIDDEN}, "of type dict"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_neither_a_dsn_nor_a_function(wrong: Any, reason: str) -> None:
    for given in ({"dsn": wrong}, {"dsn": "host=x", "direct": wrong}):
        with pytest.raises(ConfigurationError, match=reason) as refused:
            PostgresCheckpointer(**given)
        assert SECRET not in str(refused.value)


def test_everything_that_opens_postgres_takes_a_function(
    tokens: Tokens, options: dict[str, Any]
) -> None:
    """A store and a saver of one database can be searched together, however it is given."""
    with (
        open_checkpointer(tokens.get, **options) as saver,
        open_store(tokens.get, **options) as store,
        PostgresStore.open(dsn=lambda: tokens.dsn, **options) as other,
        PostgresStore.open(tokens.dsn, **{**options, "schema": f"{options['schema']}x"}) as far,
    ):
        build_graph(cast(PostgresCheckpointer, saver)).invoke(
            {"messages": [("user", "I like figs")]}, CONFIG
        )
        for each in (store, other):
            found = search_threads(saver, each, "figs")
            assert [hit.thread_id for hit in found] == ["t"]
        with pytest.raises(ConfigurationError, match="expected both in one database"):
            search_threads(saver, far, "figs")
        assert saver.database.path.startswith("postgresql://")

    async def awaited() -> Any:
        async with PostgresStore(dsn=tokens.get, **options) as store:
            await store.aput(("a",), "k", {"n": 1})
            return await store.aget(("a",), "k")

    assert asyncio.run(awaited()).value == {"n": 1}


def test_a_queue_needs_a_dsn_that_stays(tokens: Tokens, options: dict[str, Any]) -> None:
    """Its own: it keeps the password with which it began."""
    with PostgresStore.open(tokens.get, **options) as store:
        with pytest.raises(ConfigurationError, match=r"Background\(database="):
            resolve_queue_location_and_schema(None, store)
        assert (
            resolve_queue_location_and_schema(make_conninfo(tokens.dsn), store)[1]
            == f"{options['schema']}_jobs"
        )
