"""Update the server's tables when messages are erased, or when threads are deleted or merged.

`perdure.checkpointers.extensions` loads this module if a database has the server's tables.
"""

from __future__ import annotations

from perdure.checkpointers.extensions import ExtensionCounts
from perdure.checkpointers.message_remover import REMOVED, Remover, ValueContext
from perdure.checkpointers.reader import CheckpointReader
from perdure.run_tables.component import build_server_schema, load_server_sql
from perdure.run_tables.records import (
    RunRow,
    decrypt_cron,
    decrypt_run,
    decrypt_webhook,
    encrypt_run_details_error_and_request,
)
from perdure.storage.database import Database
from perdure.storage.flow import NO_LIMIT, Flow


class ServerExtension:
    """Deletes, changes and moves the server's rows of a thread; see `ThreadExtension`.

    Args:
        reader: The reader of the checkpointer. The seal of the reader encrypts and decrypts the
            server's rows.
        database: The database.
    """

    def __init__(self, reader: CheckpointReader, database: Database) -> None:
        self.schema = build_server_schema(database)
        self._sql, self._seal = load_server_sql(database), reader.seal

    def delete_rows_of_thread(self, thread_id: str, thread_key: int) -> Flow[ExtensionCounts]:
        """See `ThreadExtension.delete_rows_of_thread`."""
        runs = yield self._sql("drop_runs", thread_key)
        events = yield self._sql("drop_events", thread_key, 0, NO_LIMIT, NO_LIMIT)
        crons = yield self._sql("drop_crons", thread_id)
        yield self._sql("drop_webhooks", thread_id)
        return ExtensionCounts(len(runs), len(events), len(crons))

    def begin_erasure(self, thread_id: str, thread_key: int) -> Flow[ExtensionCounts]:
        """Delete all events of the thread's runs, whether or not they contain erased messages.

        After this, the existing runs of the thread store no more events. Runs that are in progress
        also store neither an error nor a request when they end.
        """
        all_runs = thread_key, 0, NO_LIMIT
        yield [self._sql("stop_storing_events", *all_runs), self._sql("mark_erased", thread_key)]
        events = yield self._sql("drop_events", *all_runs, NO_LIMIT)
        return ExtensionCounts(events=len(events))

    def erase_messages(
        self, thread_id: str, remover: Remover, *, finds_only: bool
    ) -> Flow[ExtensionCounts]:
        """Remove the text of erased messages from the runs, crons and webhooks of a thread.

        A run that contains text from erased messages is rewritten without the text and, if it is
        unfinished, cancelled. A cron or webhook that contains text from erased messages is deleted.

        If `finds_only` is True, nothing is changed. The values are only passed to the remover, so
        that it finds the erased messages in them, and the returned counts are 0.
        """
        run_count = cron_count = 0
        for row in (yield self._sql("runs_of_thread", thread_id, "")):
            run_count += yield from self._erase_quotations_from_run(
                decrypt_run(self._seal, row), remover, finds_only
            )
        context = ValueContext(is_input=True, allows_bare_text=True, describes_task=True)
        for row in (yield self._sql("crons_of_thread", thread_id)):
            content = decrypt_cron(self._seal, row).content
            is_quoting = remover.remove_messages_from(content, context) is not content
            if is_quoting and not finds_only:
                yield self._sql("drop_cron", row[0])
                cron_count += 1
        for row in (yield self._sql("webhooks_of_thread", thread_id)):
            run_id, webhook = decrypt_webhook(self._seal, row)
            is_quoting = remover.remove_messages_from(webhook, context) is not webhook
            if is_quoting and not finds_only:
                yield self._sql("drop_webhook", run_id)
        return ExtensionCounts(runs=run_count, crons=cron_count)

    def _erase_quotations_from_run(
        self, run: RunRow, remover: Remover, finds_only: bool
    ) -> Flow[int]:
        """Remove quotations of erased messages from a run's details, error and request.

        Returns:
            1 if the run was changed, otherwise 0.
        """
        columns = [run.details, run.error, run.request]
        contexts = (
            ValueContext(describes_task=True),
            ValueContext(describes_task=True),
            ValueContext(is_input=True, allows_bare_text=True, describes_task=True),
        )
        remaining = [
            remover.remove_messages_from(*pair) for pair in zip(columns, contexts, strict=True)
        ]
        if finds_only or all(new is old for new, old in zip(remaining, columns, strict=True)):
            return 0
        remaining = [
            old and {} if new is REMOVED else new
            for new, old in zip(remaining, columns, strict=True)
        ]
        sealed = encrypt_run_details_error_and_request(self._seal, run.live, remaining)
        yield self._sql("rewrite_run", *sealed, run.live.thread_key, run.live.seq)
        return 1

    def move_rows_to_thread(self, old_thread_key: int, new_thread_key: int) -> Flow[None]:
        """See `ThreadExtension.move_rows_to_thread`."""
        yield [
            self._sql(name, new_thread_key, old_thread_key) for name in ("move_runs", "move_events")
        ]

    def is_thread_in_use(self, thread_id: str) -> Flow[bool]:
        """Return whether a thread has an unfinished run or a cron that will run again.

        Delayed, pending and running runs are unfinished.
        """
        return bool((yield self._sql("is_thread_in_use", thread_id)))

    def list_ids_of_live_runs(self, thread_id: str) -> Flow[set[str]]:
        """See `ThreadExtension.list_ids_of_live_runs`."""
        return {run_id for (run_id,) in (yield self._sql("live_runs_of_thread", thread_id))}


def build_extension(reader: CheckpointReader, database: Database) -> ServerExtension:
    """Build the extension; `perdure.checkpointers.extensions` calls this function by its name."""
    return ServerExtension(reader, database)
