"""Crons of the server as rows of the saver's database: what is run on a schedule.

What clients gave a cron, its schedule and whose it is are sealed.
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
    """The crons in a checkpointer's database."""

    async def get(self, cron_id: str) -> CronRow | None:
        """A cron; None: there is none."""
        found = await self._read("one_cron", cron_id)
        return found[0] if found else None

    async def all(self) -> list[CronRow]:
        """All of them."""
        return await self._read("all_crons")

    async def due(self) -> list[str]:
        """The ids of those whose time has come, the longest due first."""
        return [cron_id for (cron_id,) in await self._rows("due_crons", time.time())]

    async def create(self, cron: CronRow) -> bool:
        """Store a cron, unless there is no such thread any more."""
        sealed = encrypt_cron(self._seal, cron)
        of = cron.cron_id, cron.thread_id, cron.next_at, cron.created_at
        return bool(await self._changed(cron, "add_cron", *of, sealed))

    async def change(self, cron: CronRow, *, timed: bool) -> CronRow | None:
        """Store what a cron is now, and, if it is `timed` anew, when it is due.

        None: there is none any more.
        """
        now, sealed = time.time(), encrypt_cron(self._seal, cron)
        changed = await self._changed(
            cron, "set_cron", sealed, now, int(timed), cron.next_at, cron.cron_id
        )
        return cron._replace(updated_at=now, next_at=changed[0][0]) if changed else None

    async def advance(self, cron: CronRow, next_at: float | None) -> None:
        """Have a cron be due at another time, unless another process has begun its run."""
        await self._changed(cron, "advance_cron", next_at, cron.cron_id, cron.next_at)

    async def find_not_due_before(self, at: float) -> list[CronRow]:
        """Return the crons that are due after a time or never. Damaged rows are left out."""
        crons = list[CronRow]()
        for row in await self._rows("crons_not_due_before", at):
            with suppress(CorruptRecord):
                crons.append(decrypt_cron(self._seal, row))
        return crons

    async def reset(self, cron: CronRow, next_at: float) -> bool:
        """Set the time at which a cron is due, unless the cron has changed since it was read.

        Returns:
            Whether the time was set.
        """
        of = cron.cron_id, cron.updated_at, cron.next_at
        return bool(await self._changed(cron, "reset_cron", next_at, *of))

    async def delete(self, cron: CronRow) -> None:
        """Delete a cron."""
        await self._changed(cron, "drop_cron", cron.cron_id)

    async def _read(self, name: str, *params: Any) -> list[CronRow]:
        return [decrypt_cron(self._seal, row) for row in await self._rows(name, *params)]

    async def _changed(self, cron: CronRow, name: str, *params: Any) -> list[Row]:
        about = cron.thread_id or cron.cron_id
        [rows] = await self._write([self._sql(name, *params)], (about,))
        return rows
