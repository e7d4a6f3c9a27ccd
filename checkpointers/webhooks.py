"""Webhooks of runs as rows of the saver's database, until they are delivered or given up.

What is told, and whom, is sealed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from perdure.checkpointers.records import LiveRun
from perdure.checkpointers.server_table import ServerTable
from perdure.storage.flow import Flow, Statement


class WebhookTable(ServerTable):
    """The webhooks in a checkpointer's database."""

    async def add(
        self, run: LiveRun, content: Any, content_if_erased: Any, *, keeps_thread: bool
    ) -> None:
        """Store the webhook of a run; see `build_insert`."""
        insert = self.build_insert(
            run, content, content_if_erased, keeps_thread=keeps_thread, known_cancel="rollback"
        )
        await self._write([insert], (run.thread_id,))

    def build_insert(
        self,
        run: LiveRun,
        content: Any,
        content_if_erased: Any,
        *,
        keeps_thread: bool,
        known_cancel: str | None,
    ) -> Statement:
        """Build the statement that stores the webhook of a run.

        Nothing is stored if this process no longer owns the run or has stored the webhook already,
        or if the run was cancelled in a way that the caller does not know.

        Args:
            run: The run that ends.
            content: The content to send.
            content_if_erased: The content to send instead if something was erased from the thread
                during the run. It contains no values from the run.
            keeps_thread: Whether the thread is kept after the run.
            known_cancel: See `RunTable.end`.
        """
        place = "webhook", run.run_id
        sealed = [
            self._seal.seal(json.dumps(each).encode(), place)
            for each in (content, content_if_erased)
        ]
        thread_id = run.thread_id if keeps_thread else None
        of = run.thread_key, run.seq, run.owner, known_cancel or ""
        row = run.run_id, thread_id, time.time(), *sealed
        return self._sql("add_webhook", *row, *of)

    async def due(self, limit: int) -> list[str]:
        """The runs that are to be told of now."""
        rows = await self._rows("due_webhooks", time.time(), limit)
        return [run_id for (run_id,) in rows]

    async def take(self, run_id: str, pause_s: Sequence[float]) -> tuple[Any, int] | None:
        """What is to be told, and how often it was tried before; None: another process does it.

        It is due again after the pause of this attempt, unless it is dropped.
        """

        def flow() -> Flow[tuple[Any, int] | None]:
            now = time.time()
            for content, attempts in (yield self._sql("due_webhook", run_id, now)):
                again_at = now + pause_s[min(attempts, len(pause_s) - 1)]
                if (yield self._sql("take_webhook", again_at, run_id, attempts)):
                    told = self._seal.open(content, ("webhook", run_id))
                    return json.loads(told), attempts
            return None

        return await self._database.awrite(flow, exclusive=(run_id,))

    async def drop(self, run_id: str) -> None:
        """It was delivered, or is given up."""
        await self._write([self._sql("drop_webhook", run_id)], (run_id,))
