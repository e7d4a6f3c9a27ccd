"""Store the server's crons, which start runs on a schedule, in the checkpointer's database.

A cron's schedule, user and client-supplied fields are encrypted if the database has an encryption
key.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from perdure.checkpointers.records import CronRow, decrypt_cron, encrypt_cron
from perdure.checkpointers.server_table import ServerTable
from perdure.errors import CorruptRecord
from perdure.storage.flow import Row


class CronTable(ServerTable):
    """Reads and writes the crons table of a checkpointer's database."""

    async def get(self, cron_id: str) -> CronRow | None:
        """Return the cron with the given id, or None if it does not exist."""
        crons = await self._read_crons("one_cron", cron_id)
        return crons[0] if crons else None

    async def list_crons(self) -> list[CronRow]:
        """Return all crons."""
        return await self._read_crons("all_crons")

    async def list_due_ids(self) -> list[str]:
        """Return the ids of the crons that are due now, most overdue first."""
        return [cron_id for (cron_id,) in await self._read_rows("due_crons", time.time())]

    async def create(self, cron: CronRow) -> bool:
        """Store a new cron, unless it has a thread that does not exist any more.

        Returns:
            Whether the cron was stored.
        """
        sealed = encrypt_cron(self._seal, cron)
        columns = cron.cron_id, cron.thread_id, cron.next_at, cron.created_at
        return bool(await self._write_cron(cron, "add_cron", *columns, sealed))

    async def update(self, cron: CronRow, *, sets_next_time: bool) -> CronRow | None:
        """Replace the stored content of a cron.

        Args:
            cron: The cron with its new content.
            sets_next_time: Whether to store `cron.next_at` as well. Otherwise the stored time is
                kept.

        Returns:
            The cron as it is stored now, or None if it was deleted.
        """
        now, sealed = time.time(), encrypt_cron(self._seal, cron)
        rows = await self._write_cron(
            cron, "set_cron", sealed, now, int(sets_next_time), cron.next_at, cron.cron_id
        )
        return cron._replace(updated_at=now, next_at=rows[0][0]) if rows else None

    async def advance_next_time(self, cron: CronRow, next_at: float | None) -> None:
        """Set the next run time of a cron that is due.

        Nothing is stored if the stored run time is no longer `cron.next_at`. In this case, another
        process has already started the due run.

        Args:
            cron: The cron as it was read.
            next_at: The next run time, in seconds since 1970, or None for never.
        """
        await self._write_cron(cron, "advance_cron", next_at, cron.cron_id, cron.next_at)

    async def list_crons_due_after_or_never(self, unix_time: float) -> list[CronRow]:
        """Return the crons whose next run time is after `unix_time` or is not set.

        Damaged rows are left out.

        Args:
            unix_time: A Unix timestamp in seconds.
        """
        crons = list[CronRow]()
        for row in await self._read_rows("crons_not_due_before", unix_time):
            with suppress(CorruptRecord):
                crons.append(decrypt_cron(self._seal, row))
        return crons

    async def reset_next_time(self, cron: CronRow, next_at: float) -> bool:
        """Set a cron's next run time, unless the cron has been modified or run since it was read.

        Args:
            cron: The cron as it was read.
            next_at: The next run time, in seconds since 1970.

        Returns:
            Whether the time was set.
        """
        expected = cron.cron_id, cron.updated_at, cron.next_at
        return bool(await self._write_cron(cron, "reset_cron", next_at, *expected))

    async def delete(self, cron: CronRow) -> None:
        """Delete a cron."""
        await self._write_cron(cron, "drop_cron", cron.cron_id)

    async def _read_crons(self, statement_name: str, *params: Any) -> list[CronRow]:
        return [
            decrypt_cron(self._seal, row) for row in await self._read_rows(statement_name, *params)
        ]

    async def _write_cron(self, cron: CronRow, statement_name: str, *params: Any) -> list[Row]:
        """Execute a statement that modifies a cron, and return the resulting rows.

        The transaction holds the lock of the cron's thread, or the lock of the cron if it has no
        thread.
        """
        lock_id = cron.thread_id or cron.cron_id
        [rows] = await self._execute_statements_in_transaction(
            [self._sql(statement_name, *params)], (lock_id,)
        )
        return rows
