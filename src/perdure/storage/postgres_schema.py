"""The tables of a schema, and tenants that share them, by row-level security.

With tenants, each table has a column with the tenant of its rows, which leads all keys and indexes.
A policy shows and takes the rows of the tenant that the transaction has named, and none if it has
named none. Other statements than those that name a key are the same with and without tenants.

Source: https://www.postgresql.org/docs/current/ddl-rowsecurity.html
"""

from __future__ import annotations

from typing import Any, Final

import psycopg

from perdure.errors import ConfigurationError, StorageError
from perdure.storage.database import VERSION, Schema, of_earlier_build, statements
from perdure.storage.flow import Row, Statement
from perdure.storage.postgres_connection import lock_key, shown

_SCHEMAS: Final = """
CREATE TABLE IF NOT EXISTS schemas (
    component text PRIMARY KEY, version bigint NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);
"""
_VERSIONS: Final = """
SELECT EXISTS (SELECT FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attname = 'component'),
to_regclass(%s) IS NOT NULL
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


def tables_of(script: str) -> list[str]:
    """The names of the tables that a script makes."""
    words = [
        statement.sql.replace("IF NOT EXISTS ", "").split() for statement in statements(script)
    ]
    return [line[2] for line in words if line[:2] == ["CREATE", "TABLE"]]


def made(script: str, tenant: str | None) -> list[Statement]:
    """The statements of a script; for tenants with their column and the policy of each table."""
    if tenant is None:
        return statements(script.replace("{tenant_column}", "").replace("{tenant}", ""))
    policies = "".join(_POLICY.format(table) for table in tables_of(script))
    keyed = script.replace("{tenant_column}", _COLUMN).replace("{tenant}", "tenant, ")
    return statements(f"{keyed};{policies}")


def make_tables(
    conn: psycopg.Connection[Row],
    component: Schema,
    schema: str,
    tenant: str | None,
    read_only: bool,
) -> None:
    """Make a component's tables, unless they are there: of many processes, one after another.

    Raises:
        SchemaMismatch: Another version of perdure wrote them.
        StorageError: They are not there, and may not be made.
        ConfigurationError: They are not those of tenants, or are, or the role may see all.
    """
    there = _has(conn, component, schema)
    _check(conn, schema, tenant)
    if there:
        return
    if read_only:
        raise StorageError(
            f"{shown(conn.info.dsn)} has no tables of {component.component}: open it once without "
            "read_only"
        )
    with conn.transaction():
        conn.execute("SELECT pg_advisory_xact_lock(%s)", (lock_key(schema, "schemas"),))
        # not IF NOT EXISTS, which may look at what the server kept from before the lock
        exists = "SELECT 1 FROM pg_namespace WHERE nspname = %s"
        if not conn.execute(exists, (schema,)).fetchall():
            conn.execute(f"CREATE SCHEMA {schema}")
        conn.execute(f"SET LOCAL search_path TO {schema}")
        for statement in [*statements(_SCHEMAS), *made(_SETTINGS, tenant)]:
            conn.execute(statement.sql)
        _check(conn, schema, tenant)
        if _has(conn, component, schema):
            return
        with conn.pipeline():
            for statement in made(component.script, tenant):
                conn.execute(statement.sql)
            conn.execute(
                "INSERT INTO schemas (component, version) VALUES (%s, %s)",
                (component.component, VERSION),
            )


def _has(conn: psycopg.Connection[Row], component: Schema, schema: str) -> bool:
    of, path = f"{schema}.schemas", shown(conn.info.dsn)
    ((is_earlier, there),) = conn.execute(_VERSIONS, (f"{schema}.migrations", of)).fetchall()
    if is_earlier:
        raise of_earlier_build(path)
    if not there:
        return False
    sql = f"SELECT version FROM {of} WHERE component = %s"
    return component.is_there(conn.execute(sql, (component.component,)).fetchall(), path)


# -- tenants


def checked_tenant(tenant: Any) -> str | None:
    """The tenant that is given, if any.

    Raises:
        ConfigurationError: It is no name.
    """
    if tenant is None or (isinstance(tenant, str) and tenant and "\0" not in tenant):
        return tenant
    raise ConfigurationError(f"tenant is {tenant!r:.80}; expected a name, or None")


def _check(conn: psycopg.Connection[Row], schema: str, tenant: str | None) -> None:
    """Compare the tables of a schema, if there are any, and the role with what was asked for.

    Raises:
        ConfigurationError: The tables are not those of tenants, or are, or the role may see all.
    """
    settings = conn.execute(
        "SELECT relrowsecurity, row_security_active(oid) FROM pg_class WHERE oid = to_regclass(%s)",
        (f"{schema}.settings",),
    ).fetchone()
    if settings is None:
        return
    of_tenants, active = settings
    if of_tenants and tenant is None:
        raise ConfigurationError(f"schema {schema!r} is that of tenants: give tenant=")
    if tenant is not None and not of_tenants:
        raise ConfigurationError(
            f"schema {schema!r} was made without tenants, so tenant={tenant!r} would see all of it:"
            " give another schema=, or no tenant="
        )
    if of_tenants and not active:
        raise ConfigurationError(
            f"the role {conn.info.user!r} bypasses row-level security, so tenant={tenant!r} would "
            "see all tenants: give the DSN of a role that is no superuser and has no BYPASSRLS"
        )
