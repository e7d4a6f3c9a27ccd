"""Read the tables of LangGraph's own Postgres checkpointer and store, to import their data."""

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
    from perdure.storage.postgres_errors import convert_psycopg_errors
except ImportError as exc:
    raise MissingDependency(
        'Postgres databases require psycopg and psycopg_pool; run pip install "perdure[postgres]"'
    ) from exc


class ForeignPostgres:
    """A connection for reading the tables that LangGraph created in a Postgres database.

    The tables are found through the role's search path. The DSN may be that of a PgBouncer.

    Args:
        dsn: The DSN of the database.

    Attributes:
        path: The name of the database, without a password, for error messages.

    Raises:
        ConfigurationError: The text is not a DSN, or the server refuses the login.
        StorageUnavailable: The server cannot be reached.
    """

    def __init__(self, dsn: str) -> None:
        source = FixedDsn(dsn)
        self.path = source.name
        self._conn = open_connection(source, psycopg.Connection, within_s=0, row_factory=dict_row)

    def fetch_rows(self, sql: str, *params: object) -> list[Row]:
        """Execute a statement with `%s` placeholders, and return its rows."""
        with convert_psycopg_errors(self.path), self._conn.cursor(row_factory=tuple_row) as cursor:
            return cursor.execute(sql.encode(), params or None).fetchall()

    def is_any_table_missing(self, *tables: str) -> bool:
        """Return whether at least one of the given tables does not exist in the database."""
        return any(
            self.fetch_rows("SELECT to_regclass(%s)", table) == [(None,)] for table in tables
        )

    def list_columns(self, table: str) -> set[str]:
        """Return the column names of a table."""
        sql = "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0"
        return {name for (name,) in self.fetch_rows(f"{sql} AND NOT attisdropped", table)}

    def build_langgraph_saver(self, serde: Any) -> Any:
        """Build a langgraph `PostgresSaver` that uses this connection.

        Args:
            serde: The serializer of the saver.

        Raises:
            MissingDependency: The package `langgraph-checkpoint-postgres` is not installed. The
                connection is closed then.
        """
        try:
            from langgraph.checkpoint.postgres import PostgresSaver
        except ImportError as exc:
            self.close()
            raise MissingDependency(
                "reading checkpoints written by langgraph's PostgresSaver requires the package "
                "'langgraph-checkpoint-postgres'; run pip install langgraph-checkpoint-postgres"
            ) from exc
        return PostgresSaver(self._conn, serde=serde)

    def read_with(self, read: Callable[[], T]) -> T:
        """Call a function that reads from this database, and return its result.

        Errors of psycopg are converted to perdure's errors.
        """
        with convert_psycopg_errors(self.path):
            return read()

    def close(self) -> None:
        """Close the connection."""
        self._conn.close()
