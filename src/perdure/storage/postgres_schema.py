"""The tables of a schema, and tenants that share them, by row-level security.

With tenants, each table has a column with the tenant of its rows, which leads all keys and indexes.
A policy shows and takes the rows of the tenant that the transaction has named, and none if it has
named none. Other statements than those that name a key are the same with and without tenants.

Source: https://www.postgresql.org/docs/current/ddl-rowsecurity.html
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import psycopg

from perdure.errors import ConfigurationError, StorageError
from perdure.storage.database import SCHEMA_VERSION, Schema, earlier_build_error, split_script
from perdure.storage.flow import Row, Statement
from perdure.storage.postgres_connection import lock_key
from perdure.storage.postgres_requests import Requests

_SCHEMAS: Final = """
CREATE TABLE IF NOT EXISTS schemas (
    component text PRIMARY KEY, version bigint NOT NULL, script_hash text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);
"""
# Parameters: the table `migrations`, in which the first builds kept versions, and `schemas`.
# Row: whether `migrations` has versions, `schemas` has versions, and `schemas` has hashes.
_SCHEMAS_STATE: Final = """
SELECT EXISTS (SELECT FROM pg_attribute WHERE attrelid = to_regclass(?1) AND attname = 'component'),
EXISTS (SELECT FROM pg_attribute WHERE attrelid = to_regclass(?2) AND attname = 'component'),
EXISTS (SELECT FROM pg_attribute WHERE attrelid = to_regclass(?2) AND attname = 'script_hash')
"""
_ROW_SECURITY: Final = """
SELECT relrowsecurity, row_security_active(oid), current_user::text FROM pg_class
WHERE oid = to_regclass(?)
"""
_SETTINGS: Final = (
    "CREATE TABLE IF NOT EXISTS settings ({tenant_column}name text, value bytea NOT NULL, "
    "PRIMARY KEY ({tenant}name));"
)
_MINE: Final = "nullif(current_setting('perdure.tenant', true), '')"  # '' is left in a session
_COLUMN: Final = f'tenant text COLLATE "C" NOT NULL DEFAULT {_MINE}, '
_POLICY: Final = f"""
ALTER TABLE {{0}} ENABLE ROW LEVEL SECURITY;
ALTER TABLE {{0}} FORCE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS tenant ON {{0}};
CREATE POLICY tenant ON {{0}} USING (tenant = {_MINE});"""


def list_table_names(script: str) -> list[str]:
    """The names of the tables that a script makes."""
    words = [
        statement.sql.replace("IF NOT EXISTS ", "").split() for statement in split_script(script)
    ]
    return [line[2] for line in words if line[:2] == ["CREATE", "TABLE"]]


def build_statements(script: str, tenant: str | None) -> list[Statement]:
    """The statements of a script; for tenants with their column and the policy of each table."""
    if tenant is None:
        return split_script(script.replace("{tenant_column}", "").replace("{tenant}", ""))
    policies = "".join(_POLICY.format(table) for table in list_table_names(script))
    keyed = script.replace("{tenant_column}", _COLUMN).replace("{tenant}", "tenant, ")
    return split_script(f"{keyed};{policies}")


def make_tables(
    conn: Requests,
    name: str,
    component: Schema,
    schema: str,
    tenant: str | None,
    read_only: bool,
) -> None:
    """Create the tables of a component, unless they exist.

    An advisory lock serialises processes that create the tables concurrently.

    Args:
        conn: A connection that is in no transaction. None of its settings is changed.
        name: The name of the database, for error messages.
        component: The component and the script that creates its tables.
        schema: The Postgres schema that holds the tables.
        tenant: See `PostgresDatabase`.
        read_only: Whether it is forbidden to create tables.

    Raises:
        SchemaMismatch: The tables were created by another version or build of perdure.
        StorageError: The tables do not exist and must not be created.
        ConfigurationError: A tenant was given for tables without tenants, or none for tables with
            tenants, or the role can see the rows of all tenants.
    """
    _check_tenant(conn, schema, tenant)  # first, because the script depends on the tenant
    if _has_tables(conn, name, component, schema):
        return
    if read_only:
        raise StorageError(
            f"{name} has no tables of {component.component}; open it once without read_only"
        )
    lock = Statement("SELECT pg_advisory_xact_lock(?)", (lock_key(schema, "schemas"),))
    with _transaction_block(conn):
        _run_statements(conn, lock)
        # not IF NOT EXISTS, which may use data that the server cached before the lock
        exists = "SELECT 1 FROM pg_namespace WHERE nspname = ?"
        if not _run_statements(conn, Statement(exists, (schema,))):
            _run_statements(conn, Statement(f"CREATE SCHEMA {schema}"))
        common = [*split_script(_SCHEMAS), *build_statements(_SETTINGS, tenant)]
        _run_statements(conn, Statement(f"SET LOCAL search_path TO {schema}"), *common)
        _check_tenant(conn, schema, tenant)
        if not _has_tables(conn, name, component, schema):
            insert = "INSERT INTO schemas (component, version, script_hash) VALUES (?, ?, ?)"
            row = component.component, SCHEMA_VERSION, component.script_hash
            _run_statements(
                conn, *build_statements(component.script, tenant), Statement(insert, row)
            )


def _run_statements(conn: Requests, *statements: Statement) -> list[Row]:
    """Run statements without preparing them, and return the rows of the last one."""
    return conn.ask([*conn.settings, *statements], prepare=False)[-1]


@contextmanager
def _transaction_block(conn: Requests) -> Iterator[None]:
    conn.ask([Statement("BEGIN ISOLATION LEVEL READ COMMITTED")], prepare=False)
    try:
        yield
        conn.ask([Statement("COMMIT")], prepare=False)
    except BaseException:
        if not conn.closed:
            with suppress(psycopg.Error):
                conn.ask([Statement("ROLLBACK")], prepare=False)
        raise


def _has_tables(conn: Requests, name: str, component: Schema, schema: str) -> bool:
    """Return whether the schema has the tables of a component.

    Raises:
        SchemaMismatch: They were created by another version or build of perdure.
    """
    table = f"{schema}.schemas"
    state = Statement(_SCHEMAS_STATE, (f"{schema}.migrations", table))
    ((has_migrations, has_versions, has_hashes),) = _run_statements(conn, state)
    if has_migrations or (has_versions and not has_hashes):
        raise earlier_build_error(name)
    if not has_versions:
        return False
    sql = f"SELECT version, script_hash FROM {table} WHERE component = ?"
    rows = _run_statements(conn, Statement(sql, (component.component,)))
    return component.has_tables(rows, name)


# -- tenants


def check_tenant_name(tenant: Any) -> str | None:
    """The tenant that is given, if any.

    Raises:
        ConfigurationError: It is no name.
    """
    if tenant is None or (isinstance(tenant, str) and tenant and "\0" not in tenant):
        return tenant
    raise ConfigurationError(f"tenant is {tenant!r:.80}; expected a name, or None")


def _check_tenant(conn: Requests, schema: str, tenant: str | None) -> None:
    """Check that the tables of a schema, if any, and the role fit the given tenant.

    Raises:
        ConfigurationError: The tables are not those of tenants, or are, or the role may see all.
    """
    rows = _run_statements(conn, Statement(_ROW_SECURITY, (f"{schema}.settings",)))
    if not rows:
        return
    ((of_tenants, active, role),) = rows
    if of_tenants and tenant is None:
        raise ConfigurationError(f"schema {schema!r} is that of tenants: give tenant=")
    if tenant is not None and not of_tenants:
        raise ConfigurationError(
            f"schema {schema!r} was made without tenants, so tenant={tenant!r} would see all of it:"
            " give another schema=, or no tenant="
        )
    if of_tenants and not active:
        raise ConfigurationError(
            f"the role {role!r} bypasses row-level security, so tenant={tenant!r} would "
            "see all tenants; give the DSN of a role that is not a superuser and has no BYPASSRLS"
        )
