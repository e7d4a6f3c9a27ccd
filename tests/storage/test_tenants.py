"""Tenants that share the tables of a schema: row-level security keeps them apart."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph

from perdure import PostgresCheckpointer, PostgresStore
from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.checkpointers import postgres as threads
from perdure.cli.table_copy import DatabaseCopy, StoreTables, ThreadTables
from perdure.errors import ConfigurationError, StorageError, StorageUnavailable, UnknownThread
from perdure.memory.background import JobQueue
from perdure.memory.extraction import ExtractionJob
from perdure.storage.postgres_requests import number_placeholders
from perdure.stores import SQLiteStore
from perdure.stores import postgres as items
from tests import postgres_server
from tests.store_backends import Clock

pytestmark = pytest.mark.postgres

CONFIG: Any = {"configurable": {"thread_id": "t"}}
NAMESPACE = ("memories", "ann")
TENANTS = ("acme", "globex")
Handles = tuple[PostgresCheckpointer, PostgresStore]


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A schema of tenants, made by its owner; another role has rights on the rows alone."""
    name = postgres_server.schema(tmp_path_factory.mktemp("tenants"))
    owner = postgres_server.dsn_of("an_owner")
    user()
    for part in (PostgresCheckpointer, PostgresStore):
        part.open(owner, schema=name, tenant="whoever").close()
    with psycopg.connect(owner) as conn:
        conn.execute(f"GRANT USAGE ON SCHEMA {name} TO a_user")
        for rights, of in (
            ("SELECT, INSERT, UPDATE, DELETE", "TABLES"),
            ("USAGE, UPDATE", "SEQUENCES"),
        ):
            conn.execute(f"GRANT {rights} ON ALL {of} IN SCHEMA {name} TO a_user")
        conn.execute(f"REVOKE INSERT, UPDATE, DELETE ON {name}.schemas FROM a_user")
    with opened(name, "acme") as (saver, store):
        talk(saver, "hello from acme")
        store.put(NAMESPACE, "k", {"text": "Ann drives a red car."})
    with opened(name, "globex") as (saver, store):
        talk(saver, "hello from globex")
        store.put(NAMESPACE, "k", {"text": "Ann drives a blue van."})
    return name


def user() -> str:
    """The DSN of a role that owns nothing."""
    return postgres_server.dsn_of("a_user", owner=False)


class Store(PostgresStore):
    """One whose time goes as the test says."""

    _clock = Clock()


@contextmanager
def opened(schema: str, tenant: str | None) -> Iterator[Handles]:
    dsn = user()
    options: Any = {"schema": schema, "tenant": tenant, "pool_size": 2}
    with (
        PostgresCheckpointer.open(dsn, **options) as saver,
        Store.open(dsn, ttl={"default_ttl": None}, **options) as store,
    ):
        yield saver, store


@pytest.fixture
def both(schema: str) -> Iterator[tuple[Handles, Handles]]:
    """The two tenants in one process, which has one pool for them."""
    with opened(schema, "acme") as acme, opened(schema, "globex") as globex:
        yield acme, globex


def talk(saver: PostgresCheckpointer, text: str) -> None:
    builder: Any = StateGraph(MessagesState)
    builder.add_node("say", lambda state: {"messages": [AIMessage("good day")]})
    builder.add_edge(START, "say")
    builder.compile(checkpointer=saver).invoke({"messages": [("user", text)]}, CONFIG)


def said(saver: PostgresCheckpointer) -> list[Any]:
    return [item.value.content for item in saver.history("t")]


def tables(schema: str) -> list[str]:
    """The tables of a schema that hold what users gave."""
    with psycopg.connect(postgres_server.dsn()) as conn:
        found = conn.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (schema,))
        return sorted(name for (name,) in found if name != "schemas")


def rows(schema: str, tenant: str | None) -> dict[str, set[Any]]:
    """Whose rows a role sees that has named a tenant, and asks without any filter."""
    with psycopg.connect(user()) as conn:
        if tenant is not None:
            conn.execute("SELECT set_config('perdure.tenant', %s, true)", (tenant,))
        return {
            table: {row[0] for row in conn.execute(f"SELECT * FROM {schema}.{table}")}
            for table in tables(schema)
        }


def test_a_query_that_forgets_its_filter(schema: str) -> None:
    """It sees the tenant that the transaction has named, or nothing."""
    for tenant in TENANTS:
        seen = rows(schema, tenant)
        assert {"threads", "items", "checkpoints", "store_items"} <= seen.keys()
        assert seen["threads"] == seen["items"] == seen["store_items"] == {tenant}
        assert set().union(*seen.values()) == {tenant}
    assert set().union(*rows(schema, None).values()) == set()
    assert set().union(*rows(schema, "").values()) == set()
    assert set().union(*rows(schema, "stranger").values()) == set()


def test_a_connection_whose_transaction_has_ended_names_nobody(schema: str) -> None:
    with psycopg.connect(user()) as conn:
        conn.execute("SELECT set_config('perdure.tenant', 'acme', true)")
        before = conn.execute(f"SELECT count(*) FROM {schema}.threads").fetchone()
        conn.commit()
        after = conn.execute(f"SELECT count(*) FROM {schema}.threads").fetchone()

    assert (before, after) == ((1,), (0,))


@pytest.mark.parametrize("tenant", ["globex", None])
def test_no_row_is_written_for_another(schema: str, tenant: str | None) -> None:
    insert = (
        f"INSERT INTO {schema}.store_pending_embeddings (tenant, id, attempts, error) "
        "VALUES (%s, 1, 1, '')"
    )
    with psycopg.connect(user()) as conn:
        if tenant is not None:
            conn.execute("SELECT set_config('perdure.tenant', %s, true)", (tenant,))
        changed = conn.execute(
            f"UPDATE {schema}.threads SET last_seq = 0 WHERE tenant = 'acme'"
        ).rowcount
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
            conn.execute(insert, ("acme",))

    assert changed == 0


def test_every_table_is_walled(schema: str) -> None:
    """Also those of a later version: forced, one policy, and all keys led by the tenant."""
    with psycopg.connect(postgres_server.dsn()) as conn:
        forced = conn.execute(
            "SELECT relname FROM pg_class c JOIN pg_policy p ON p.polrelid = c.oid WHERE "
            "relnamespace = %s::regnamespace AND relrowsecurity AND relforcerowsecurity",
            (schema,),
        ).fetchall()
        keys = conn.execute(
            "SELECT indexdef FROM pg_indexes WHERE schemaname = %s AND tablename <> 'schemas'",
            (schema,),
        ).fetchall()

    assert sorted(name for (name,) in forced) == tables(schema)
    assert [key for (key,) in keys if "btree (tenant, " not in key] == []


def test_two_tenants_with_one_thread_and_one_namespace(both: tuple[Handles, Handles]) -> None:
    for (saver, store), tenant, thing in zip(both, TENANTS, ("car", "van"), strict=True):
        found = store.search(NAMESPACE, query="what does Ann drive?")
        assert said(saver) == [f"hello from {tenant}", "good day"]
        assert len(saver.threads()) == 1
        assert [each.checkpoint_id for each in saver.checkpoints("t")]
        assert [tag["step"] for tag in [t.metadata for t in saver.list(None, filter={"step": 1})]]
        assert thing in found[0].value["text"]
        assert len(found) == len(store.list_namespaces()) == 1
    acme, globex = both
    globex[1].put(NAMESPACE, "k2", {"text": "Ann has a boat."})
    assert acme[1].get(NAMESPACE, "k2") is None
    assert len(acme[1].search(NAMESPACE, query="boat")) == 1
    globex[1].delete(NAMESPACE, "k2")


def test_what_one_erases_another_keeps(schema: str, both: tuple[Handles, Handles]) -> None:
    with opened(schema, "initech") as (saver, store):
        with pytest.raises(UnknownThread):
            saver.thread("t")
        talk(saver, "hello from initech")
        store.put(NAMESPACE, "k", {"text": "Ann walks."})
        saver.retain(Retention(last=1))
        assert [info.thread_id for info in saver.delete_idle(datetime.now(UTC))] == ["t"]
        receipt = store.forget(NAMESPACE)
        assert len(receipt.keys) == 1
        assert store.search((), limit=100) == []
    for (saver, store), tenant in zip(both, TENANTS, strict=True):
        assert said(saver) == [f"hello from {tenant}", "good day"]
        assert store.get(NAMESPACE, "k") is not None
    assert rows(schema, "initech")["threads"] == rows(schema, "initech")["store_items"] == set()


def test_locks_and_sweeps_are_of_one_tenant(schema: str, both: tuple[Handles, Handles]) -> None:
    (acme, acme_store), (globex, globex_store) = both

    async def locked() -> None:
        async with acme.lock("t"), globex.lock("t", timeout_s=0.1):
            pass

    asyncio.run(locked())
    for store in (acme_store, globex_store):
        store.put(("short",), "k", {"n": 1}, index=False, ttl=1)
    Store._clock.forward(120)
    swept = acme_store.sweep_ttl()

    assert swept == 1
    assert rows(schema, "globex")["store_items"] == {"globex"}
    assert globex_store.sweep_ttl() == 1


def test_what_gives_no_wall_is_refused(schema: str, tmp_path: Path) -> None:
    """A role that sees all tenants; and a schema that was made the other way."""
    owner = postgres_server.dsn_of("an_owner")
    plain = postgres_server.schema(tmp_path)
    PostgresStore.open(owner, schema=plain).close()
    with pytest.raises(ConfigurationError, match="bypasses row-level security"):
        PostgresStore.open(postgres_server.dsn(), schema=schema, tenant="acme")
    with pytest.raises(ConfigurationError, match="created without tenants"):
        PostgresCheckpointer.open(owner, schema=plain, tenant="acme")
    with pytest.raises(ConfigurationError, match="pass tenant="):
        PostgresStore.open(owner, schema=schema)
    with pytest.raises(ConfigurationError, match="expected a name"):
        PostgresStore(owner, tenant="")
    with pytest.raises(StorageError, match="permission denied"):
        PostgresStore.open(user(), schema=f"{plain}x", tenant="acme")


KEYED = [
    "read_write_state",
    "advance_thread",
    "advance_into_namespace",
    "advance_active_thread",
    "new_writes",
    "head_with_keys",
    "checkpoint_with_keys",
    "checkpoint_row_with_keys",
    "tagged_checkpoints",
    "thread_sizes",
]
KEYED += ["items_with_hashes", "items_by_ids", "find_present", "get", "search_data_since"]
KEYED += ["expiries"]
OF_TYPE = {"bigint": "g", "double precision": "g", "boolean": "true", "text": "'x' || g"}


@pytest.fixture(scope="module")
def large(schema: str) -> str:
    """The schema, with a tenant who has many rows of everything."""
    with psycopg.connect(postgres_server.dsn(), autocommit=True) as conn:
        for table in tables(schema):
            columns = conn.execute(
                "SELECT column_name, data_type FROM information_schema.columns "
                "WHERE table_schema = %s AND table_name = %s ORDER BY ordinal_position",
                (schema, table),
            ).fetchall()
            values = [OF_TYPE.get(kind, "('x' || g)::bytea") for _, kind in columns[1:]]
            conn.execute(
                f"INSERT INTO {schema}.{table} ({', '.join(name for name, _ in columns)}) "
                f"SELECT 'large', {', '.join(values)} FROM generate_series(900001, 905000) AS g"
            )
            conn.execute(f"ANALYZE {schema}.{table}")
    return schema


@pytest.mark.parametrize("name", KEYED)
def test_a_policy_keeps_no_statement_from_its_keys(large: str, name: str) -> None:
    """Postgres applies a policy before it computes from a column, so by more than the tenant."""
    text = number_placeholders({**threads._SQL[True], **items._SQL[True]}[name]).decode()
    count = max(int(each) for each in re.findall(r"\$(\d+)", text))
    with psycopg.connect(user(), prepare_threshold=None) as conn:
        conn.execute("SELECT set_config('perdure.tenant', 'large', true)")
        conn.execute(f"SET LOCAL search_path TO {large}")
        conn.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        conn.execute("SET LOCAL enable_hashjoin = off")  # few rows are quickly read whole
        conn.execute("SET LOCAL enable_mergejoin = off")
        conn.execute(f"PREPARE asked AS {text}")
        asked = f"EXPLAIN EXECUTE asked({', '.join(['NULL'] * count)})"
        plan = [line for (line,) in conn.execute(asked)]

    conditions = [line for line in plan if "Index Cond: " in line]
    assert conditions != []
    assert [line for line in conditions if " AND " not in line] == []
    assert [line for line in plan if "Seq Scan" in line] == []


def test_rights_on_rows_are_enough_for_a_copy_and_the_queue(schema: str, tmp_path: Path) -> None:
    """Those that docs/postgres.md names; the owner makes the schema of the jobs."""
    dsns = user(), postgres_server.dsn_of("an_owner")
    stores: list[Any] = [PostgresStore(dsn, schema=schema, tenant="copied") for dsn in dsns]
    place, own = (store.database.queue_location for store in stores)
    with pytest.raises(StorageUnavailable, match="permission denied"):
        JobQueue(*place)
    JobQueue(*own).close()
    with psycopg.connect(own[0]) as conn:
        conn.execute(f"GRANT USAGE ON SCHEMA {own[1]} TO a_user")
        rights = "SELECT, INSERT, UPDATE, DELETE"
        conn.execute(f"GRANT {rights} ON ALL TABLES IN SCHEMA {own[1]} TO a_user")
    with closing(JobQueue(*place)) as queue:
        queue.put(ExtractionJob("t", NAMESPACE, "due", configurable={}))
        assert len(queue.read_unfinished_jobs()) == 1
    file = tmp_path / "old.db"
    with (
        SQLiteCheckpointer.open(file) as saver,
        SQLiteStore.open(file) as store,
        opened(schema, "copied") as (new_saver, new_store),
    ):
        store.put(NAMESPACE, "k", {"text": "tea"})
        ends = ThreadTables.from_checkpointer(saver), ThreadTables.from_checkpointer(new_saver)
        DatabaseCopy(
            [ends, (StoreTables.from_store(store), StoreTables.from_store(new_store))]
        ).run()
        new_store.put(NAMESPACE, "k2", {"text": "milk"})

        assert [item.key for item in new_store.search(NAMESPACE)] == ["k", "k2"]
