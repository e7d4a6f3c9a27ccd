"""A Postgres database with tables of langgraph's own, which is only read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perdure.errors import MissingDependency
from perdure.storage.flow import Row, T

try:
    import psycopg
    from psycopg.rows import dict_row, tuple_row

    from perdure.storage.postgres_connection import open_connection
    from perdure.storage.postgres_dsn import FixedDsn
    from perdure.storage.postgres_errors import map_errors
except ImportError as exc:
    raise MissingDependency(
        "Postgres needs psycopg and its pool: pip install '.[postgres]' in a checkout"
    ) from exc


class ForeignPostgres:
    """A connection to it, with tables where its user finds them; PgBouncer may be between.

    Raises:
        ConfigurationError: The DSN is none, or the server refuses it.
        StorageUnavailable: The server cannot be reached.
    """

    def __init__(self, dsn: str) -> None:
        source = FixedDsn(dsn)
        self.path = source.name
        self._conn = open_connection(source, psycopg.Connection, within_s=0, row_factory=dict_row)

    def rows(self, sql: str, *params: object) -> list[Row]:
        """The rows of a statement, whose parameters are `%s`."""
        with map_errors(self.path), self._conn.cursor(row_factory=tuple_row) as cursor:
            return cursor.execute(sql.encode(), params or None).fetchall()

    def lacks(self, *tables: str) -> bool:
        """Whether one of these tables is not there."""
        return any(self.rows("SELECT to_regclass(%s)", table) == [(None,)] for table in tables)

    def columns(self, table: str) -> set[str]:
        """The columns of a table."""
        sql = "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0"
        return {name for (name,) in self.rows(f"{sql} AND NOT attisdropped", table)}

    def saver(self, serde: Any) -> Any:
        """Langgraph's `PostgresSaver` over the connection, which is closed if there is none.

        Raises:
            MissingDependency: The package `langgraph-checkpoint-postgres` is not installed.
        """
        try:
            from langgraph.checkpoint.postgres import PostgresSaver
        except ImportError as exc:
            self.close()
            raise MissingDependency(
                "checkpoints of langgraph's Postgres saver are read by its own package: "
                "pip install langgraph-checkpoint-postgres"
            ) from exc
        return PostgresSaver(self._conn, serde=serde)

    def call(self, read: Callable[[], T]) -> T:
        """Run what reads by the connection, psycopg's errors turned into perdure's."""
        with map_errors(self.path):
            return read()

    def close(self) -> None:
        """Close the connection."""
        self._conn.close()
