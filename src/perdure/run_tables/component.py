"""Create the server's tables in the database of a checkpointer, and load their SQL statements."""

from __future__ import annotations

from typing import Any, Final

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.errors import StorageError
from perdure.storage.database import Database, Schema
from perdure.storage.flow import Flow, NamedSQL, Row, Statement

_PACKAGE: Final = "perdure.run_tables"
# The SQLSTATE of the error that Postgres raises if the role lacks the privilege for a statement
_INSUFFICIENT_PRIVILEGE: Final = "42501"


def load_server_sql(database: Database) -> NamedSQL:
    """Return the SQL statements for the server's tables, as a dict keyed by statement name."""
    return database.load_sql(_PACKAGE)


def load_server_and_checkpointer_sql(saver: Checkpointer) -> NamedSQL:
    """Return the SQL statements for the server's and the checkpointer's tables, keyed by name."""
    return NamedSQL({**saver.parts.sql, **load_server_sql(saver.database)})


def build_server_schema(database: Database) -> Schema:
    """Return the definitions of the server's tables."""
    return Schema("server", load_server_sql(database)["schema"])


def create_server_tables(saver: Checkpointer) -> None:
    """Create the server's tables in a checkpointer's database, if they do not exist.

    A server creates its tables itself when it opens a database. On Postgres, a role that may not
    create tables can run the server only after the owner of the schema has called this function.

    Args:
        saver: The checkpointer.

    Raises:
        SchemaMismatch: The tables were created by another version of perdure.
        StorageError: The database is read-only, or the role may not create tables.
    """
    database = saver.database
    database.connect()
    try:
        database.create_tables(build_server_schema(database))
    except StorageError as exc:
        if getattr(exc.__cause__, "sqlstate", None) != _INSUFFICIENT_PRIVILEGE:
            raise
        way_out = (
            "run 'perdure serve --prepare' as the owner of the schema"
            if database.tenant is None
            else "call create_server_tables() as the owner of the schema (docs/postgres.md)"
        )
        raise StorageError(
            f"the server's tables do not exist in {database.path}, and this database role cannot "
            f"create them; {way_out}, and then grant this role rights on the new tables"
        ) from exc


def has_server_tables(database: Database) -> Flow[bool]:
    """Return whether a database has the server's tables.

    Raises:
        SchemaMismatch: The tables were created by another version of perdure.
    """
    return (yield from database.has_tables(build_server_schema(database)))


def read_server_rows(database: Database, sql: str, *params: Any) -> Flow[list[Row]]:
    """Execute an SQL statement. Return no rows if the database lacks the server's tables."""
    if not (yield from has_server_tables(database)):
        return []
    return (yield Statement(sql, params))  # type: ignore[no-any-return]
