"""What the tables of the server share: its runs, crons and others in the database of a saver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.storage.flow import Flow, Last, Row, Statement, rows_of


class ServerTable:
    """A table of the server in a checkpointer's database, read and written by named statements."""

    def __init__(self, saver: Checkpointer) -> None:
        self._database, self._sql, self._seal = saver.database, saver._sql, saver._seal

    async def _rows(self, name: str, *params: Any) -> list[Row]:
        sql = self._sql[name]
        return await self._database.aread(lambda: rows_of(sql, *params), snapshot=False)

    async def _write(
        self, statements: list[Statement], exclusive: Sequence[str] | None, *, removes: bool = False
    ) -> list[list[Row]]:
        """Write in one transaction; the rows that each returns. See `Database.write`."""

        def flow() -> Flow[list[list[Row]]]:
            return (yield Last(statements))  # type: ignore[no-any-return]

        return await self._database.awrite(flow, exclusive=exclusive, removes=removes)
