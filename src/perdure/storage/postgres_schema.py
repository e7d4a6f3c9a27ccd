"""Create a component's tables in Postgres, with row-level security if there are tenants.

If there are tenants, each table has the column `tenant`, which comes first in all keys and indexes.
A row-level security policy allows a transaction to read and write only the rows of the tenant that
the transaction has set. A transaction that has not set a tenant sees no rows in tables with the
column `tenant`. SQL statements are the same for tables with and without the column `tenant`, except
statements that list key columns, for example in `ON CONFLICT`.

The PostgreSQL documentation describes row-level security:
https://www.postgresql.org/docs/current/ddl-rowsecurity.html
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import psycopg

from perdure.errors import ConfigurationError, StorageError
from perdure.storage.database import (
    SCHEMA_VERSION,
    Schema,
    build_error_for_prerelease_database,
    split_script,
)
from perdure.storage.flow import Row, Statement
from perdure.storage.postgres_connection import compute_lock_key
from perdure.storage.postgres_requests import PipelineConnection

_SCHEMAS_TABLE: Final = """
CREATE TABLE IF NOT EXISTS schemas (
    component text PRIMARY KEY, version bigint NOT NULL, script_hash text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);
"""
# The parameters of the query are the names of the tables `migrations` and `schemas`. The first
# builds of perdure stored schema versions in the table `migrations`. The query returns three
# values: whether `migrations` contains schema versions, whether `schemas` contains schema versions,
# and whether `schemas` contains script hashes.
_SCHEMAS_STATE: Final = """
SELECT EXISTS (SELECT FROM pg_attribute WHERE attrelid = to_regclass(?1) AND attname = 'component'),
EXISTS (SELECT FROM pg_attribute WHERE attrelid = to_regclass(?2) AND attname = 'component'),
EXISTS (SELECT FROM pg_attribute WHERE attrelid = to_regclass(?2) AND attname = 'script_hash')
"""
_ROW_SECURITY: Final = """
SELECT relrowsecurity, row_security_active(oid), current_user::text FROM pg_class
WHERE oid = to_regclass(?)
"""
_SETTINGS_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS settings ({tenant_column}name text, value bytea NOT NULL, "
    "PRIMARY KEY ({tenant}name));"
)
_SELECT_SETTINGS_TABLE: Final = (
    "SELECT 1 FROM pg_tables WHERE schemaname = ? AND tablename = 'settings'"
)
# SQL expression for the current tenant, which is NULL if no tenant is set. Once `perdure.tenant`
# has been set in a session, later transactions without a tenant read an empty string. `nullif`
# converts the empty string to NULL.
_CURRENT_TENANT: Final = "nullif(current_setting('perdure.tenant', true), '')"
_TENANT_COLUMN: Final = f'tenant text COLLATE "C" NOT NULL DEFAULT {_CURRENT_TENANT}, '
_POLICY: Final = f"""
ALTER TABLE {{0}} ENABLE ROW LEVEL SECURITY;
ALTER TABLE {{0}} FORCE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS tenant ON {{0}};
CREATE POLICY tenant ON {{0}} USING (tenant = {_CURRENT_TENANT});"""


def list_table_names(script: str) -> list[str]:
    """Return the names of the tables that a script creates."""
    words_by_statement = [
        statement.sql.replace("IF NOT EXISTS ", "").split() for statement in split_script(script)
    ]
    return [words[2] for words in words_by_statement if words[:2] == ["CREATE", "TABLE"]]


def build_statements(script: str, tenant: str | None) -> list[Statement]:
    """Build the statements of a script.

    If a tenant is given, each table gets the column `tenant` and a row-level security policy.
    """
    if tenant is None:
        return split_script(script.replace("{tenant_column}", "").replace("{tenant}", ""))
    policies = "".join(_POLICY.format(table) for table in list_table_names(script))
    script_with_keys = script.replace("{tenant_column}", _TENANT_COLUMN).replace(
        "{tenant}", "tenant, "
    )
    return split_script(f"{script_with_keys};{policies}")


def create_tables(
    conn: PipelineConnection,
    name: str,
    component: Schema,
    schema: str,
    tenant: str | None,
    read_only: bool,
) -> None:
    """Create the tables of a component if they do not exist yet.

    An advisory lock prevents several processes from creating the tables concurrently.

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
    # First check whether the existing tables have a tenant column. Tables with a tenant column and
    # tables without a tenant column are created by different scripts.
    _check_schema_and_role_fit_tenant(conn, schema, tenant)
    if _schema_has_tables_of_component(conn, name, component, schema):
        return
    if read_only:
        raise StorageError(
            f"{name} has no perdure tables for {component.component} yet; to create the tables, "
            "open the database once without read_only"
        )
    lock = Statement("SELECT pg_advisory_xact_lock(?)", (compute_lock_key(schema, "schemas"),))
    with _transaction_block(conn):
        _run_statements(conn, lock)
        # Check explicitly whether the schema exists, because CREATE SCHEMA IF NOT EXISTS could rely
        # on catalog data that the server cached before the lock was acquired.
        exists = "SELECT 1 FROM pg_namespace WHERE nspname = ?"
        if not _run_statements(conn, Statement(exists, (schema,))):
            _run_statements(conn, Statement(f"CREATE SCHEMA {schema}"))
        _run_statements(conn, Statement(f"SET LOCAL search_path TO {schema}"))
        # Create the shared tables only once. Their CREATE statements lock the table `settings`,
        # which other processes use.
        if not _run_statements(conn, Statement(_SELECT_SETTINGS_TABLE, (schema,))):
            common = [*split_script(_SCHEMAS_TABLE), *build_statements(_SETTINGS_TABLE, tenant)]
            _run_statements(conn, *common)
        # Check again whether the component's tables exist, because another process may have created
        # them before this process acquired the lock.
        _check_schema_and_role_fit_tenant(conn, schema, tenant)
        if not _schema_has_tables_of_component(conn, name, component, schema):
            insert = "INSERT INTO schemas (component, version, script_hash) VALUES (?, ?, ?)"
            row = component.component, SCHEMA_VERSION, component.script_hash
            _run_statements(
                conn, *build_statements(component.script, tenant), Statement(insert, row)
            )


def _run_statements(conn: PipelineConnection, *statements: Statement) -> list[Row]:
    """Execute statements without preparing them, and return the rows of the last statement."""
    return conn.send_request([*conn.settings, *statements], prepare=False)[-1]


@contextmanager
def _transaction_block(conn: PipelineConnection) -> Iterator[None]:
    """Commit the statements of a `with` block, or roll them back on error."""
    conn.send_request([Statement("BEGIN ISOLATION LEVEL READ COMMITTED")], prepare=False)
    try:
        yield
        conn.send_request([Statement("COMMIT")], prepare=False)
    except BaseException:
        if not conn.closed:
            with suppress(psycopg.Error):
                conn.send_request([Statement("ROLLBACK")], prepare=False)
        raise


def _schema_has_tables_of_component(
    conn: PipelineConnection, database_name: str, component: Schema, schema_name: str
) -> bool:
    """Return whether the schema has the tables of a component.

    Raises:
        SchemaMismatch: The tables were created by another version or build of perdure.
    """
    table = f"{schema_name}.schemas"
    state = Statement(_SCHEMAS_STATE, (f"{schema_name}.migrations", table))
    ((has_migrations, has_versions, has_hashes),) = _run_statements(conn, state)
    if has_migrations or (has_versions and not has_hashes):
        raise build_error_for_prerelease_database(database_name)
    if not has_versions:
        return False
    sql = f"SELECT version, script_hash FROM {table} WHERE component = ?"
    rows = _run_statements(conn, Statement(sql, (component.component,)))
    return component.has_tables_of_this_version(rows, database_name)


# -- tenants


def validate_optional_tenant_name(tenant: Any) -> str | None:
    """Validate a tenant name, or None for no tenant, and return it.

    Raises:
        ConfigurationError: The name is empty, contains NUL, or is not text.
    """
    if tenant is None or (isinstance(tenant, str) and tenant and "\0" not in tenant):
        return tenant
    raise ConfigurationError(
        f"the argument 'tenant' is {tenant!r:.80}; expected None or a non-empty string without NUL "
        "characters"
    )


def _check_schema_and_role_fit_tenant(
    conn: PipelineConnection, schema: str, tenant: str | None
) -> None:
    """Check that the tables have row-level security if and only if `tenant` is set.

    If the tables have row-level security, check that the current role cannot bypass it. If the
    schema does not contain perdure's tables yet, do not check the schema or the role.

    Raises:
        ConfigurationError: The tables are for tenants and `tenant` is None, or the reverse, or the
            role may see the rows of all tenants.
    """
    rows = _run_statements(conn, Statement(_ROW_SECURITY, (f"{schema}.settings",)))
    if not rows:
        return
    ((has_tenants, is_active, role),) = rows
    if has_tenants and tenant is None:
        raise ConfigurationError(
            f"the schema {schema!r} was set up for multiple tenants; pass a tenant name as tenant="
        )
    if tenant is not None and not has_tenants:
        raise ConfigurationError(
            f"the schema {schema!r} was not set up for tenants, so tenant={tenant!r} could read "
            "all of its data; omit tenant=, or use another schema"
        )
    if has_tenants and not is_active:
        raise ConfigurationError(
            f"the role {role!r} bypasses row-level security, so tenant={tenant!r} could read every "
            "tenant's data; use a role that is not a superuser and has no BYPASSRLS"
        )
