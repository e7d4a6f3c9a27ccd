"""Store the webhooks of runs in the checkpointer's database until they are no longer needed.

A webhook is deleted after it has been delivered or its last delivery attempt has failed.
If the database is encrypted, the URL and body of each webhook are encrypted too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from perdure.run_tables.records import LiveRun, decrypt_webhook
from perdure.run_tables.server_table import ServerTable
from perdure.storage.flow import Flow, Statement


class WebhookTable(ServerTable):
    """Reads and writes the webhooks table in a checkpointer's database."""

    async def add_webhook(
        self, run: LiveRun, content: Any, content_if_erased: Any, *, keeps_thread: bool
    ) -> None:
        """Store a webhook that notifies its receiver that a run has ended.

        The webhook is stored even if the run was cancelled. See `build_webhook_insert` for the
        arguments.
        """
        insert = self.build_webhook_insert(
            run, content, content_if_erased, keeps_thread=keeps_thread, known_cancel="rollback"
        )
        await self._execute_statements_in_transaction([insert], (run.thread_id,))

    def build_webhook_insert(
        self,
        run: LiveRun,
        content: Any,
        content_if_erased: Any,
        *,
        keeps_thread: bool,
        known_cancel: str | None,
    ) -> Statement:
        """Build the statement that stores the webhook of a run.

        The statement stores nothing if this process no longer owns the run, or if the webhook is
        already stored. If the run was cancelled, the webhook is stored only if `known_cancel` is
        `rollback` or equals the cancel action in the run's row.

        Args:
            run: The run that ends.
            content: The content to send.
            content_if_erased: The content to send instead if something was erased from the thread
                during the run. `content_if_erased` contains no values from the run.
            keeps_thread: Whether the thread is kept after the run. If False, the webhook is stored
                without its thread, so that the deletion of the thread does not delete it.
            known_cancel: The cancel action that the caller has carried out, or None.
        """
        sealed = [
            self._seal.seal(json.dumps(version).encode(), ("webhook", run.run_id))
            for version in (content, content_if_erased)
        ]
        thread_id = run.thread_id if keeps_thread else None
        condition = run.thread_key, run.seq, run.owner, known_cancel or ""
        return self._sql("add_webhook", run.run_id, thread_id, time.time(), *sealed, *condition)

    async def list_due_run_ids(self, limit: int) -> list[str]:
        """Return the ids of at most `limit` runs whose webhook is due now."""
        rows = await self._read_rows("due_webhooks", time.time(), limit)
        return [run_id for (run_id,) in rows]

    async def claim_content_and_attempt_count(
        self, run_id: str, retry_delays_s: Sequence[float]
    ) -> tuple[Any, int] | None:
        """Claim a webhook's next delivery attempt.

        A claimed webhook becomes due again after the attempt's retry delay, unless the webhook is
        deleted first.

        Args:
            run_id: The run whose webhook is due.
            retry_delays_s: The delay in seconds after each attempt. The last delay is repeated.

        Returns:
            The content of the webhook and the number of earlier attempts. None if the webhook is no
            longer due, because another process has claimed the attempt or deleted the webhook.
        """

        def flow() -> Flow[tuple[Any, int] | None]:
            now = time.time()
            for content, attempts in (yield self._sql("due_webhook", run_id, now)):
                retry_at = now + retry_delays_s[min(attempts, len(retry_delays_s) - 1)]
                if (yield self._sql("claim_webhook", retry_at, run_id, attempts)):
                    return decrypt_webhook(self._seal, (run_id, content))[1], attempts
            return None

        return await self._database.awrite(flow, exclusive_names=(run_id,))

    async def delete(self, run_id: str) -> None:
        """Delete a run's webhook after it has been delivered or its last attempt has failed."""
        await self._execute_statement(run_id, "drop_webhook", run_id)
