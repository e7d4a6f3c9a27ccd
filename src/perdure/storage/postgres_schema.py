"""The tables of a schema: their versions, and tenants that share them, by row-level security.

With tenants, each table has a column with the tenant of its rows, which leads all keys and indexes.
A policy shows and takes the rows of the tenant that the transaction has named, and none if it has
named none. The statements are the same with and without tenants.

Source: https://www.postgresql.org/docs/current/ddl-rowsecurity.html
"""

from __future__ import annotations

import re
from typing import Any, Final

import psycopg

from perdure.errors import ConfigurationError, SchemaMismatch
from perdure.storage.database import Migration, statements
from perdure.storage.flow import Row
from perdure.storage.postgres_connection import lock_key, shown

_MIGRATIONS: Final = """
CREATE TABLE IF NOT EXISTS migrations (
    component text NOT NULL, version bigint NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (component, version)
);
"""
_SETTINGS: Final = (
    "CREATE TABLE IF NOT EXISTS settings (name text PRIMARY KEY, value bytea NOT NULL)"
)
NAMED: Final = "set_config('perdure.tenant', ?, true)"
"""Names the tenant, until the transaction ends."""
_MINE: Final = "nullif(current_setting('perdure.tenant', true), '')"  # '' is left in a session
_COLUMN: Final = rf'CREATE TABLE \1 (tenant text COLLATE "C" NOT NULL DEFAULT {_MINE}, '
_TABLE: Final = re.compile(r"CREATE TABLE ((?:IF NOT EXISTS )?(\w+)) \(")
_KEY_OF_COLUMN: Final = re.compile(r"([(,]\s*)(\w+)([^,();]*?) (PRIMARY KEY|UNIQUE)(?=\s*[,)])")
_KEY: Final = re.compile(r"\b(PRIMARY KEY|UNIQUE|ON \w+) \(")
_POLICY: Final = """;
ALTER TABLE {0} ENABLE ROW LEVEL SECURITY;
ALTER TABLE {0} FORCE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS tenant ON {0};
CREATE POLICY tenant ON {0} USING (tenant = {1})"""


def tables_of(migration: Migration) -> frozenset[str]:
    """The names of the tables that a component uses."""
    script = "".join((_MIGRATIONS, _SETTINGS, *migration.steps))
    return frozenset(re.findall(r"CREATE TABLE (?:IF NOT EXISTS )?(\w+)", script))


def migrate(
    conn: psycopg.Connection[Row],
    migration: Migration,
    schema: str,
    tenant: str | None,
    read_only: bool,
) -> None:
    """Bring a component's tables up to date: of many processes, one after another.

    Raises:
        SchemaMismatch: They are newer than this version knows, or older, and may not be changed.
        ConfigurationError: They are not those of tenants, or are, or the role may see all.
    """
    _check(conn, schema, tenant)
    if _version(conn, migration, schema) == len(migration.steps):
        return
    if read_only:
        raise SchemaMismatch(
            f"{shown(conn.info.dsn)} does not have version {len(migration.steps)} of the "
            f"{migration.component} schema: open it once without read_only"
        )
    with conn.transaction():
        conn.execute("SELECT pg_advisory_xact_lock(%s)", (lock_key(schema, "migrations"),))
        # not IF NOT EXISTS, which may look at what the server kept from before the lock
        there = "SELECT 1 FROM pg_namespace WHERE nspname = %s"
        if not conn.execute(there, (schema,)).fetchall():
            conn.execute(f"CREATE SCHEMA {schema}")
        conn.execute(f"SET LOCAL search_path TO {schema}")
        made = str if tenant is None else for_tenants
        for statement in statements(_MIGRATIONS + made(_SETTINGS)):
            conn.execute(statement.sql)
        _check(conn, schema, tenant)
        current = _version(conn, migration, schema)
        with conn.pipeline():
            for number, script in enumerate(migration.steps[current:], current + 1):
                for statement in statements(made(script)):
                    conn.execute(statement.sql)
                conn.execute(
                    "INSERT INTO migrations (component, version) VALUES (%s, %s)",
                    (migration.component, number),
                )


def _version(conn: psycopg.Connection[Row], migration: Migration, schema: str) -> int:
    of = f"{schema}.migrations"
    if conn.execute("SELECT to_regclass(%s)", (of,)).fetchall() == [(None,)]:
        return 0
    ((found,),) = conn.execute(
        f"SELECT coalesce(max(version), 0) FROM {of} WHERE component = %s",
        (migration.component,),
    ).fetchall()
    if found > len(migration.steps):
        raise SchemaMismatch(
            f"{shown(conn.info.dsn)} has version {found} of the {migration.component} schema, this "
            f"perdure knows {len(migration.steps)}: upgrade perdure"
        )
    return int(found)


# -- tenants


def for_tenants(script: str) -> str:
    """A script that makes tables, as it makes them for tenants."""
    keyed = _KEY_OF_COLUMN.sub(r"\1\2\3, \4 (\2)", script)
    made = _TABLE.sub(_COLUMN, led(keyed))
    return made + "".join(_POLICY.format(each[2], _MINE) for each in _TABLE.finditer(script))


def led(sql: str) -> str:
    """A statement as it is for tenants: the keys that it names are led by theirs."""
    return _KEY.sub(r"\1 (tenant, ", sql)


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
    found = conn.execute(
        "SELECT relrowsecurity, row_security_active(oid) FROM pg_class WHERE oid = to_regclass(%s)",
        (f"{schema}.settings",),
    ).fetchone()
    if found is None:
        return
    of_tenants, active = found
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
