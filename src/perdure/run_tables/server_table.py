"""Define `ServerTable`, the base class for reading and writing the server's database tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.run_tables.component import load_server_and_checkpointer_sql, read_server_rows
from perdure.storage.encryption import Seal
from perdure.storage.flow import Flow, LastRequest, Row, Statement

T = TypeVar("T")


class ServerTable:
    """Base class of a server table.

    Each subclass reads and writes one of the server's tables, such as the `runs` table.
    """

    def __init__(self, saver: Checkpointer) -> None:
        self._database, self._seal = saver.database, saver.parts.seal
        self._sql = load_server_and_checkpointer_sql(saver)

    async def _read_rows(self, statement_name: str, *params: Any) -> list[Row]:
        """Execute a named SQL statement, and return its rows."""
        return await self._fetch_rows(self._sql[statement_name], *params)

    async def _fetch_rows(self, sql: str, *params: Any) -> list[Row]:
        """Execute an SQL statement. Return no rows if the database lacks the server's tables."""
        return await self._database.aread(
            lambda: read_server_rows(self._database, sql, *params), snapshot=False
        )

    async def _read_and_decrypt_rows(
        self, decrypt_row: Callable[[Seal, Row], T], statement_name: str, *params: Any
    ) -> list[T]:
        """Execute a named SQL statement, and return its rows after decryption.

        Raises:
            CorruptRecord: A row is damaged or was tampered with.
        """
        rows = await self._read_rows(statement_name, *params)
        return [decrypt_row(self._seal, row) for row in rows]

    async def _execute_statement(
        self, exclusive_name: str, statement_name: str, *params: Any
    ) -> list[Row]:
        """Execute a named SQL statement in a transaction, and return its rows."""
        [rows] = await self._execute_statements_in_transaction(
            [self._sql(statement_name, *params)], (exclusive_name,)
        )
        return rows

    async def _execute_statements_in_transaction(
        self,
        statements: list[Statement],
        exclusive_names: Sequence[str] | None,
        *,
        deletes_rows: bool = False,
    ) -> list[list[Row]]:
        """Execute statements in one transaction, and return the rows of each statement.

        For `exclusive_names` and `deletes_rows`, see `Database.write`.
        """

        def flow() -> Flow[list[list[Row]]]:
            return (yield LastRequest(statements))  # type: ignore[no-any-return]

        return await self._database.awrite(
            flow, exclusive_names=exclusive_names, deletes_rows=deletes_rows
        )
