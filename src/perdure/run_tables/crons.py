"""Store the server's crons, which start runs on a schedule, in the checkpointer's database.

A cron's schedule, user and client-supplied fields are encrypted if the database has an encryption
key.
"""

from __future__ import annotations

import time
from typing import Any

from perdure.run_tables.records import CronRow, decrypt_cron, decrypt_undamaged_rows, encrypt_cron
from perdure.run_tables.server_table import ServerTable
from perdure.storage.flow import Row


class CronTable(ServerTable):
    """Reads and writes the crons table of a checkpointer's database."""

    async def get(self, cron_id: str) -> CronRow | None:
        """Return the cron with the given id, or None if it does not exist."""
        crons = await self._read_and_decrypt_rows(decrypt_cron, "one_cron", cron_id)
        return crons[0] if crons else None

    async def list_crons(self) -> list[CronRow]:
        """Return all crons."""
        return await self._read_and_decrypt_rows(decrypt_cron, "all_crons")

    async def list_due_ids(self) -> list[str]:
        """Return the ids of the crons that are due now, most overdue first."""
        return [cron_id for (cron_id,) in await self._read_rows("due_crons", time.time())]

    async def create(self, cron: CronRow) -> bool:
        """Store a new cron, unless its thread no longer exists.

        Returns:
            Whether the cron was stored.
        """
        sealed = encrypt_cron(self._seal, cron)
        return bool(
            await self._write_cron(
                cron,
                "add_cron",
                cron.cron_id,
                cron.thread_id,
                cron.next_at,
                cron.created_at,
                sealed,
            )
        )

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

        If `cron.next_at` has changed in the database, nothing is stored, because another process
        has started the due run.

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
        rows = await self._read_rows("crons_not_due_before", unix_time)
        return decrypt_undamaged_rows(decrypt_cron, self._seal, rows)

    async def reset_next_time(self, cron: CronRow, next_at: float) -> bool:
        """Set a cron's next run time, unless the cron has been modified or run since it was read.

        Args:
            cron: The cron as it was read.
            next_at: The next run time, in seconds since 1970.

        Returns:
            Whether the time was set.
        """
        return bool(
            await self._write_cron(
                cron, "reset_cron", next_at, cron.cron_id, cron.updated_at, cron.next_at
            )
        )

    async def delete(self, cron: CronRow) -> None:
        """Delete a cron."""
        await self._write_cron(cron, "drop_cron", cron.cron_id)

    async def _write_cron(self, cron: CronRow, statement_name: str, *params: Any) -> list[Row]:
        """Execute a statement that modifies a cron, and return the resulting rows.

        The statement is executed in a transaction that holds the lock of the cron's thread, or the
        lock of the cron if the cron has no thread.
        """
        return await self._execute_statement(
            cron.thread_id or cron.cron_id, statement_name, *params
        )
