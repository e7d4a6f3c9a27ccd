"""`PostgresStore`: namespaced JSON documents with versions and search, in a Postgres database."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, Literal

from langgraph.store.base import IndexConfig, TTLConfig

from perdure.settings import TIMEOUT_S
from perdure.storage.database import Schema
from perdure.storage.flow import load_sql
from perdure.storage.postgres import PostgresDatabase, PostgresOwner
from perdure.storage.postgres_dsn import Dsn
from perdure.stores.filter_sql import (
    TRUNCATING,
    Condition,
    JSONLocation,
    join_conditions_with_or,
    list_possible_paths,
)
from perdure.stores.options import TextIndex
from perdure.stores.search.vectors import Kind
from perdure.stores.store_parts import add_transcript_tables_to_schema
from perdure.stores.values import MAX_BYTES
from perdure.stores.whole_store import WholeStore

_SQL: Final = {
    tenants: load_sql("perdure.stores", "sqlite.sql", "postgres.sql", with_tenants=tenants)
    for tenants in (False, True)
}
# maximum number of values that a condition passes as individual parameters; longer lists are passed
# as a single JSON array
_MAX_INLINE_VALUES: Final = 4
# SQL expression that converts a stored document to jsonb; it trims the bytes that `TextOrBytes`
# adds to the text
_READ_JSON: Final = r"convert_from(btrim({0}, '\x00ff'), 'UTF8')::jsonb"
# SQL condition that is false for documents with the escape \u0000, because jsonb cannot represent
# the NUL character. The hexadecimal string is the LIKE pattern %\\u0000%
_IS_READABLE: Final = r"{0} NOT LIKE '\x255c5c753030303025'::bytea"
# placeholder for the parsed JSON document in an SQL condition;
# `convert_json_condition_to_row_condition` fills it in
_DOCUMENT_COLUMN: Final = "d.doc"
_VALUE_AT_PATH: Final = f"{_DOCUMENT_COLUMN} #> ?::text[]"


class JSONBLocation(JSONLocation):
    """The location of a JSON value inside a `bytea` column.

    SQL conditions convert the bytes in the column to jsonb. Paths within the JSON value are given
    as tuples of labels, whereas SQLite's JSON paths are strings.
    """

    @property
    def supports_indexes(self) -> bool:
        """Whether indexes can be created on JSON paths in the column."""
        return False

    def convert_json_condition_to_row_condition(self, json_condition: Condition) -> Condition:
        """Convert a condition on a JSON document to an SQL condition on the document's table row.

        The returned SQL condition parses each row's JSON document only once. If a row's document
        cannot be converted to jsonb, the returned SQL condition is true for the row, and the filter
        must be tested again in Python.
        """
        text, read_json = json_condition.text, _READ_JSON.format(self.column)
        if text.count(_DOCUMENT_COLUMN) > 1:
            text = f"(SELECT {text} FROM (SELECT {read_json} AS doc OFFSET 0) AS d)"
        text = (
            text.replace(_DOCUMENT_COLUMN, read_json) if text.count(_DOCUMENT_COLUMN) == 1 else text
        )
        readable = _IS_READABLE.format(self.column)
        return json_condition._replace(text=f"CASE WHEN {readable} THEN {text} ELSE TRUE END")

    def list_possible_relative_json_paths(self, key: str | int) -> Sequence[tuple[str, ...]]:
        """Return the path suffixes that address the member `key` of an object or array.

        In Postgres, the path element "0" matches both the object key "0" and the array index 0, so
        a condition on the path may select too many rows.
        """
        return [tuple(map(str, steps)) for steps in list_possible_paths(key, TRUNCATING)]

    def build_equals_any_condition(self, keys: Sequence[str | int]) -> Condition:
        """Build an SQL condition that holds if the value at this location equals one of `keys`.

        As in SQLite, a 1 in `keys` also matches the JSON value `true`, and a 0 also matches
        `false`.
        """
        values = [*keys, *(bool(key) for key in keys if key in (0, 1))]
        if 0 < len(values) <= _MAX_INLINE_VALUES:
            placeholders = ", ".join("?::jsonb" for _ in values)
            return self._build_condition_for_any_path(
                f"{_VALUE_AT_PATH} IN ({placeholders})", *map(json.dumps, values)
            )
        return self._build_condition_for_any_path(
            f"{_VALUE_AT_PATH} IN (SELECT jsonb_array_elements(?::jsonb))", json.dumps(values)
        )

    def build_range_condition(self, low: str | float | None, high: str | float | None) -> Condition:
        """Return an SQL condition that holds if a JSON value lies between two inclusive bounds.

        Either bound of the range may be None, which leaves the range open at that end.
        """
        # A bound can be a string only in a one-sided comparison, such as `$gt`. The other bound is
        # then None. To test whether a string is equal to another string, use
        # `build_equals_any_condition` instead.
        if isinstance(low, str) or isinstance(high, str):
            sign, operand = (">=", low) if high is None else ("<=", high)
            return self._build_condition_for_any_path(
                f'({_DOCUMENT_COLUMN} #>> ?::text[]) COLLATE "C" {sign} ?::text', operand
            )
        if high is None:
            return self._build_condition_for_any_path(
                f"{_VALUE_AT_PATH} >= ?::jsonb", json.dumps(low)
            )
        # If `low` is None, use JSON null as the lower bound, because jsonb sorts null before all
        # numbers. Do not use BETWEEN, because it would parse the document twice.
        text = f"({_VALUE_AT_PATH} >= ?::jsonb AND {_VALUE_AT_PATH} <= ?::jsonb)"
        return join_conditions_with_or(
            [
                Condition(text, (list(path), json.dumps(low), list(path), json.dumps(high)))
                for path in self.paths
            ]
        )

    def _build_condition_for_any_path(self, text: str, *params: Any) -> Condition:
        """Build an SQL condition that holds if an expression is true for at least one JSON path."""
        return join_conditions_with_or(
            [Condition(text, (list(path), *params)) for path in self.paths]
        )


class PostgresStore(PostgresOwner, WholeStore):
    """A langgraph store backed by Postgres, for use from asyncio and from OS threads.

    A database can be shared by any number of processes and machines. A store and a
    `PostgresCheckpointer` can share a database. Use the store with `with` or `async with`, or call
    `close`. The first use opens the database.

    Args:
        dsn: A libpq connection string or URI; a function without arguments that returns such a
            string and is called for each new connection; or a `psycopg_pool.ConnectionPool`, which
            perdure uses but never closes. See docs/postgres.md.
        index: See `SQLiteStore`, also for `ttl`, `key`, `text_index`, `vectors`,
            `approximate_above`, `index_bytes`, `max_value_bytes` and `read_only`.
        schema: The schema that contains the tables. It is created if it does not exist.
        tenant: The tenant whose rows are used, in tables that tenants share. Row-level security
            hides the rows of all other tenants. With None, the tables have no tenants.
        pooled: Whether the DSN leads to a pooler that gives each transaction another connection,
            such as PgBouncer with `pool_mode = transaction`.
        pool_size: The maximum number of connections of this process. It has no effect on a pool of
            the caller, which has its own size.
        timeout_s: The time in seconds to wait for a connection.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    def __init__(
        self,
        dsn: Dsn,
        *,
        index: IndexConfig | dict[str, Any] | Literal["offline"] | None = "offline",
        ttl: TTLConfig | None = None,
        key: bytes | str | None = None,
        text_index: TextIndex = "sealed",
        vectors: Kind | None = None,
        approximate_above: int = 200_000,
        index_bytes: int = 256 << 20,
        max_value_bytes: int = MAX_BYTES,
        read_only: bool = False,
        schema: str = "perdure",
        tenant: str | None = None,
        pooled: bool = False,
        pool_size: int = 10,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        sql = _SQL[tenant is not None]
        super().__init__(
            sql,
            JSONBLocation("i.value", ((),)),
            lambda begin: PostgresDatabase(
                dsn,
                Schema("stores", add_transcript_tables_to_schema(sql["schema"])),
                begin=begin,
                schema=schema,
                tenant=tenant,
                pooled=pooled,
                read_only=read_only,
                pool_size=pool_size,
                timeout_s=timeout_s,
            ),
            index=index,
            ttl=ttl,
            key=key,
            text_index=text_index,
            vectors=vectors,
            approximate_above=approximate_above,
            index_bytes=index_bytes,
            max_value_bytes=max_value_bytes,
            read_only=read_only,
            timeout_s=timeout_s,
        )
