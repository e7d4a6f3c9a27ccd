"""Tenants that share the tables of a schema are separated by row-level security."""

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
from perdure.checkpointers import postgres as thread_reader
from perdure.cli.copied_store_tables import StoreTables
from perdure.cli.copied_thread_tables import build_thread_table_pair
from perdure.cli.database_copy import DatabaseCopy
from perdure.errors import ConfigurationError, StorageError, StorageUnavailable, UnknownThread
from perdure.memory.long_term.background import JobQueue
from perdure.memory.long_term.extraction import ExtractionJob
from perdure.run_tables.component import create_server_tables
from perdure.storage.postgres_requests import convert_placeholders_to_postgres
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
    """A schema of tenants, which one role owns. Another role has only rights on the rows."""
    name = postgres_server.schema_name(tmp_path_factory.mktemp("tenants"))
    owner = postgres_server.dsn_of_role("an_owner")
    get_user_dsn()
    for component in (PostgresCheckpointer, PostgresStore):
        with component.open(owner, schema=name, tenant="whoever") as opened:
            if isinstance(opened, PostgresCheckpointer):
                create_server_tables(opened)
    with psycopg.connect(owner) as conn:
        conn.execute(f"GRANT USAGE ON SCHEMA {name} TO a_user")
        for rights, objects in (
            ("SELECT, INSERT, UPDATE, DELETE", "TABLES"),
            ("USAGE, UPDATE", "SEQUENCES"),
        ):
            conn.execute(f"GRANT {rights} ON ALL {objects} IN SCHEMA {name} TO a_user")
        conn.execute(f"REVOKE INSERT, UPDATE, DELETE ON {name}.schemas FROM a_user")
    with open_tenant(name, "acme") as (saver, store):
        run_turn(saver, "hello from acme")
        store.put(NAMESPACE, "k", {"text": "Ann drives a red car."})
    with open_tenant(name, "globex") as (saver, store):
        run_turn(saver, "hello from globex")
        store.put(NAMESPACE, "k", {"text": "Ann drives a blue van."})
    return name


def get_user_dsn() -> str:
    """Return the DSN of a role that owns nothing."""
    return postgres_server.dsn_of_role("a_user", owner=False)


class StoreWithClock(PostgresStore):
    """A store whose clock the test controls."""

    _clock = Clock()


@contextmanager
def open_tenant(schema: str, tenant: str | None) -> Iterator[Handles]:
    dsn = get_user_dsn()
    options: Any = {"schema": schema, "tenant": tenant, "pool_size": 2}
    with (
        PostgresCheckpointer.open(dsn, **options) as saver,
        StoreWithClock.open(dsn, ttl={"default_ttl": None}, **options) as store,
    ):
        yield saver, store


@pytest.fixture
def acme_and_globex(schema: str) -> Iterator[tuple[Handles, Handles]]:
    """The checkpointers and stores of two tenants, which share one pool."""
    with open_tenant(schema, "acme") as acme, open_tenant(schema, "globex") as globex:
        yield acme, globex


def run_turn(saver: PostgresCheckpointer, text: str) -> None:
    builder: Any = StateGraph(MessagesState)
    builder.add_node("say", lambda state: {"messages": [AIMessage("good day")]})
    builder.add_edge(START, "say")
    builder.compile(checkpointer=saver).invoke({"messages": [("user", text)]}, CONFIG)


def read_texts(saver: PostgresCheckpointer) -> list[Any]:
    return [item.value.content for item in saver.history("t")]


def list_tables(schema: str) -> list[str]:
    """Return the names of the tables of a schema that contain data of users."""
    with psycopg.connect(postgres_server.dsn()) as conn:
        rows = conn.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (schema,))
        return sorted(name for (name,) in rows if name != "schemas")


def read_visible_tenants(schema: str, tenant: str | None) -> dict[str, set[Any]]:
    """Return for each table the tenants whose rows are visible after a tenant was named."""
    with psycopg.connect(get_user_dsn()) as conn:
        if tenant is not None:
            conn.execute("SELECT set_config('perdure.tenant', %s, true)", (tenant,))
        return {
            table: {row[0] for row in conn.execute(f"SELECT * FROM {schema}.{table}")}
            for table in list_tables(schema)
        }


def test_query_without_filter_sees_only_the_named_tenant(schema: str) -> None:
    """If the transaction has named no tenant, the query sees nothing."""
    for tenant in TENANTS:
        tenants_by_table = read_visible_tenants(schema, tenant)
        assert {"threads", "items", "checkpoints", "store_items"} <= tenants_by_table.keys()
        assert (
            tenants_by_table["threads"]
            == tenants_by_table["items"]
            == tenants_by_table["store_items"]
            == {tenant}
        )
        assert set().union(*tenants_by_table.values()) == {tenant}
    assert set().union(*read_visible_tenants(schema, None).values()) == set()
    assert set().union(*read_visible_tenants(schema, "").values()) == set()
    assert set().union(*read_visible_tenants(schema, "stranger").values()) == set()


def test_connection_names_no_tenant_after_its_transaction(schema: str) -> None:
    with psycopg.connect(get_user_dsn()) as conn:
        conn.execute("SELECT set_config('perdure.tenant', 'acme', true)")
        before = conn.execute(f"SELECT count(*) FROM {schema}.threads").fetchone()
        conn.commit()
        after = conn.execute(f"SELECT count(*) FROM {schema}.threads").fetchone()

    assert (before, after) == ((1,), (0,))


@pytest.mark.parametrize("tenant", ["globex", None])
def test_row_of_another_tenant_cannot_be_written(schema: str, tenant: str | None) -> None:
    insert = (
        f"INSERT INTO {schema}.store_pending_embeddings (tenant, id, attempts, error) "
        "VALUES (%s, 1, 1, '')"
    )
    with psycopg.connect(get_user_dsn()) as conn:
        if tenant is not None:
            conn.execute("SELECT set_config('perdure.tenant', %s, true)", (tenant,))
        changed = conn.execute(
            f"UPDATE {schema}.threads SET last_seq = 0 WHERE tenant = 'acme'"
        ).rowcount
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
            conn.execute(insert, ("acme",))

    assert changed == 0


def test_every_table_has_a_forced_policy_and_keys_by_tenant(schema: str) -> None:
    """This must hold for tables of later versions, too."""
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

    assert sorted(name for (name,) in forced) == list_tables(schema)
    assert [key for (key,) in keys if "btree (tenant, " not in key] == []


def test_two_tenants_may_use_the_same_thread_id_and_namespace(
    acme_and_globex: tuple[Handles, Handles],
) -> None:
    for (saver, store), tenant, thing in zip(acme_and_globex, TENANTS, ("car", "van"), strict=True):
        items_found = store.search(NAMESPACE, query="what does Ann drive?")
        assert read_texts(saver) == [f"hello from {tenant}", "good day"]
        assert len(saver.threads()) == 1
        assert [info.checkpoint_id for info in saver.checkpoints("t")]
        assert [tag["step"] for tag in [t.metadata for t in saver.list(None, filter={"step": 1})]]
        assert thing in items_found[0].value["text"]
        assert len(items_found) == len(store.list_namespaces()) == 1
    acme, globex = acme_and_globex
    globex[1].put(NAMESPACE, "k2", {"text": "Ann has a boat."})
    assert acme[1].get(NAMESPACE, "k2") is None
    assert len(acme[1].search(NAMESPACE, query="boat")) == 1
    globex[1].delete(NAMESPACE, "k2")


def test_erasures_of_one_tenant_do_not_affect_others(
    schema: str, acme_and_globex: tuple[Handles, Handles]
) -> None:
    with open_tenant(schema, "initech") as (saver, store):
        with pytest.raises(UnknownThread):
            saver.thread("t")
        run_turn(saver, "hello from initech")
        store.put(NAMESPACE, "k", {"text": "Ann walks."})
        saver.retain(Retention(last=1))
        assert [info.thread_id for info in saver.delete_idle(datetime.now(UTC))] == ["t"]
        receipt = store.forget(NAMESPACE)
        assert len(receipt.keys) == 1
        assert store.search((), limit=100) == []
    for (saver, store), tenant in zip(acme_and_globex, TENANTS, strict=True):
        assert read_texts(saver) == [f"hello from {tenant}", "good day"]
        assert store.get(NAMESPACE, "k") is not None
    assert (
        read_visible_tenants(schema, "initech")["threads"]
        == read_visible_tenants(schema, "initech")["store_items"]
        == set()
    )


def test_locks_and_sweeps_do_not_affect_other_tenants(
    schema: str, acme_and_globex: tuple[Handles, Handles]
) -> None:
    (acme, acme_store), (globex, globex_store) = acme_and_globex

    async def lock_both() -> None:
        async with acme.lock("t"), globex.lock("t", timeout_s=0.1):
            pass

    asyncio.run(lock_both())
    for store in (acme_store, globex_store):
        store.put(("short",), "k", {"n": 1}, index=False, ttl=1)
    StoreWithClock._clock.forward(120)
    swept_count = acme_store.sweep_ttl()

    assert swept_count == 1
    assert read_visible_tenants(schema, "globex")["store_items"] == {"globex"}
    assert globex_store.sweep_ttl() == 1


def test_role_or_schema_without_row_level_security_is_refused(schema: str, tmp_path: Path) -> None:
    """Examples are a role that sees all tenants, and a schema that was created without tenants."""
    owner = postgres_server.dsn_of_role("an_owner")
    schema_without_tenants = postgres_server.schema_name(tmp_path)
    PostgresStore.open(owner, schema=schema_without_tenants).close()
    with pytest.raises(ConfigurationError, match="bypasses row-level security"):
        PostgresStore.open(postgres_server.dsn(), schema=schema, tenant="acme")
    with pytest.raises(ConfigurationError, match="was not set up for tenants"):
        PostgresCheckpointer.open(owner, schema=schema_without_tenants, tenant="acme")
    with pytest.raises(ConfigurationError, match="set up for multiple tenants; pass a tenant name"):
        PostgresStore.open(owner, schema=schema)
    with pytest.raises(ConfigurationError, match="expected None or a non-empty string"):
        PostgresStore(owner, tenant="")
    with pytest.raises(StorageError, match="permission denied"):
        PostgresStore.open(get_user_dsn(), schema=f"{schema_without_tenants}x", tenant="acme")


INDEXED_STATEMENTS = [
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
    "keys_of_tagged_threads",
    "keys_of_threads_in_id_range",
]
INDEXED_STATEMENTS += [
    "items_with_hashes",
    "items_by_ids",
    "find_present",
    "get",
    "search_data_since",
]
INDEXED_STATEMENTS += ["expiries"]
VALUES_BY_TYPE = {"bigint": "g", "double precision": "g", "boolean": "true", "text": "'x' || g"}


@pytest.fixture(scope="module")
def schema_with_large_tenant(schema: str) -> str:
    """The schema, with a tenant that has many rows in each table."""
    with psycopg.connect(postgres_server.dsn(), autocommit=True) as conn:
        for table in list_tables(schema):
            columns = conn.execute(
                "SELECT column_name, data_type FROM information_schema.columns "
                "WHERE table_schema = %s AND table_name = %s ORDER BY ordinal_position",
                (schema, table),
            ).fetchall()
            values = [VALUES_BY_TYPE.get(kind, "('x' || g)::bytea") for _, kind in columns[1:]]
            conn.execute(
                f"INSERT INTO {schema}.{table} ({', '.join(name for name, _ in columns)}) "
                f"SELECT 'large', {', '.join(values)} FROM generate_series(900001, 905000) AS g"
            )
            conn.execute(f"ANALYZE {schema}.{table}")
    return schema


@pytest.mark.parametrize("name", INDEXED_STATEMENTS)
def test_statement_uses_its_index_despite_row_level_security(
    schema_with_large_tenant: str, name: str
) -> None:
    """Postgres applies the policy first. The index condition must contain more than the tenant."""
    text = convert_placeholders_to_postgres(
        {**thread_reader._SQL[True], **items._SQL[True]}[name]
    ).decode()
    count = max(int(number) for number in re.findall(r"\$(\d+)", text))
    with psycopg.connect(get_user_dsn(), prepare_threshold=None) as conn:
        conn.execute("SELECT set_config('perdure.tenant', 'large', true)")
        conn.execute(f"SET LOCAL search_path TO {schema_with_large_tenant}")
        conn.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        conn.execute("SET LOCAL enable_hashjoin = off")  # Postgres would read all of the few rows
        conn.execute("SET LOCAL enable_mergejoin = off")
        conn.execute(f"PREPARE asked AS {text}")
        explain = f"EXPLAIN EXECUTE asked({', '.join(['NULL'] * count)})"
        plan = [line for (line,) in conn.execute(explain)]

    conditions = [line for line in plan if "Index Cond: " in line]
    assert conditions != []
    assert [line for line in conditions if " AND " not in line] == []
    assert [line for line in plan if "Seq Scan" in line] == []


def test_rights_on_rows_suffice_for_a_copy_and_the_queue(schema: str, tmp_path: Path) -> None:
    """docs/postgres.md names these rights. The owner creates the schema of the jobs."""
    dsns = get_user_dsn(), postgres_server.dsn_of_role("an_owner")
    stores: list[Any] = [PostgresStore(dsn, schema=schema, tenant="copied") for dsn in dsns]
    user_location, owner_location = (store.database.job_queue_location for store in stores)
    with pytest.raises(StorageUnavailable, match="permission denied"):
        JobQueue(*user_location)
    JobQueue(*owner_location).close()
    with psycopg.connect(owner_location[0]) as conn:
        conn.execute(f"GRANT USAGE ON SCHEMA {owner_location[1]} TO a_user")
        rights = "SELECT, INSERT, UPDATE, DELETE"
        conn.execute(f"GRANT {rights} ON ALL TABLES IN SCHEMA {owner_location[1]} TO a_user")
    with closing(JobQueue(*user_location)) as queue:
        queue.put(ExtractionJob("t", NAMESPACE, "due", configurable={}))
        assert len(queue.read_unfinished_jobs()) == 1
    file = tmp_path / "old.db"
    with (
        SQLiteCheckpointer.open(file) as saver,
        SQLiteStore.open(file) as store,
        open_tenant(schema, "copied") as (new_saver, new_store),
    ):
        store.put(NAMESPACE, "k", {"text": "tea"})
        thread_tables = build_thread_table_pair(saver, new_saver)
        DatabaseCopy(
            [thread_tables, (StoreTables.from_store(store), StoreTables.from_store(new_store))]
        ).run()
        new_store.put(NAMESPACE, "k2", {"text": "milk"})

        assert [item.key for item in new_store.search(NAMESPACE)] == ["k", "k2"]
