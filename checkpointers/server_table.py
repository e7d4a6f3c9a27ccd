"""Define the base class for the server's tables, such as the `runs` table.

The server keeps its tables in a checkpointer's database.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.storage.flow import Flow, LastRequest, Row, Statement, fetch_rows


class ServerTable:
    """Base class of a server table.

    Each subclass reads and writes one of the server's tables, such as the `runs` table.
    """

    def __init__(self, saver: Checkpointer) -> None:
        self._database, self._sql, self._seal = saver.database, saver._sql, saver._seal

    async def _read_rows(self, statement_name: str, *params: Any) -> list[Row]:
        """Execute a named SQL statement, and return its rows."""
        sql = self._sql[statement_name]
        return await self._database.aread(lambda: fetch_rows(sql, *params), snapshot=False)

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
