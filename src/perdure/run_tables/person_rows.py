"""Find and erase a person's rows in a checkpointer's database, and cancel the person's runs.

A person's rows are the rows of the person's threads, runs, crons and webhooks. A thread belongs to
the person whose name is the `user_id` in the metadata of the thread's head. If the head's metadata
contains no `user_id`, the thread belongs to its `owner`. The runs, crons and webhooks of a thread
belong to the same person as the thread. A cron without a thread, or the webhook of a stateless run,
belongs to the person on whose behalf it was created. If a cron or webhook does not record on whose
behalf it was created, it belongs to the user who created it.

Some methods of this module also list the runs, crons and checkpoints that the person has on threads
that belong to other people.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Final, TypeVar

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.erasure import erase_messages_or_thread
from perdure.checkpointers.labels import CALLER
from perdure.checkpointers.reports import ErasureReport
from perdure.errors import AlreadyLocked, StorageUnavailable
from perdure.run_tables.assistants import decrypt_assistant
from perdure.run_tables.component import load_server_and_checkpointer_sql, read_server_rows
from perdure.run_tables.records import (
    CronRow,
    LiveRun,
    RunRow,
    decrypt_cron,
    decrypt_run,
    decrypt_undamaged_rows,
    decrypt_webhook,
)
from perdure.run_tables.thread_list import ListedThread, ThreadList, ThreadQuery
from perdure.storage.encryption import Seal
from perdure.storage.flow import Flow, Row, fetch_rows

T = TypeVar("T")
# Maximum number of runs read by a single SQL statement.
_PAGE: Final = 1_000
# A Unix timestamp, in seconds, in the far future. It is later than the start time of any delayed
# run.
_END_OF_TIME: Final = 1e18
SERVER_LOCK_PREFIX: Final = "perdure.server/"
"""Prefix of the name of the lock that a server process holds for its whole lifetime."""


class PersonRows:
    """Finds and deletes the database rows that belong to one person.

    Args:
        saver: The checkpointer.
        user: The name of the person.
        owners_are_people: Whether the `owner` of a thread without a user is a person. If a handler
            of an Auth file sets the `owner` of threads, the owner may be an organisation.
        only: If not None, only threads with these ids are treated as threads of the person.
    """

    def __init__(
        self,
        saver: Checkpointer,
        user: str,
        *,
        owners_are_people: bool = True,
        only: frozenset[str] | None = None,
    ) -> None:
        self.saver, self.user, self.owners_are_people = saver, user, owners_are_people
        self._only = only
        self._sql, self._database = load_server_and_checkpointer_sql(saver), saver.database
        self._seal = saver.parts.seal

    # -- reading

    def list_thread_ids(self) -> list[str]:
        """Return the sorted ids of the person's threads, including threads without checkpoints.

        All threads are read from one snapshot of the database. Otherwise, a thread would be missed
        if its first checkpoint were stored after the search for threads with checkpoints and before
        the search for threads without checkpoints.
        """

        def is_own(thread: ListedThread) -> bool:
            return self._matches_person_name(self._find_person_of_thread(thread))

        def flow() -> Flow[set[str]]:
            thread_ids = yield from self._search_thread_ids(is_own)
            return thread_ids | (yield from self._search_ids_of_threads_without_checkpoint())

        return self._sort_permitted_ids(self._database.read(flow))

    def list_ids_of_owned_threads_without_user_id(self) -> list[str]:
        """Return the sorted ids of threads that have no `user_id` and are owned by the person."""

        def is_owned(thread: ListedThread) -> bool:
            has_user = (thread.head_metadata or {}).get("user_id") not in (None, "")
            return not has_user and self._matches_person_name(_find_owner_of_thread(thread))

        return self._sort_permitted_ids(
            self._database.read(lambda: self._search_thread_ids(is_owned))
        )

    def _search_thread_ids(self, is_match: Callable[[ListedThread], bool]) -> Flow[set[str]]:
        """Return the ids of candidate threads for which `is_match` returns true.

        The candidate threads are found by a query for the person's threads. The query can also
        match threads of other people.
        """
        thread_ids = yield from ThreadList(self.saver).search_in_transaction(
            self._build_query_for_threads_that_may_be_of_person(),
            lambda thread: thread.thread_id if is_match(thread) else None,
            sys.maxsize,
        )
        return {*thread_ids}

    def _sort_permitted_ids(self, thread_ids: set[str]) -> list[str]:
        """Sort thread ids, and drop those that the constructor argument `only` does not contain."""
        return sorted(thread_ids if self._only is None else thread_ids & self._only)

    def _build_query_for_threads_that_may_be_of_person(self) -> ThreadQuery:
        """Build a query that matches all threads of the person, and possibly other threads.

        In SQL, a filter by `owner` also matches threads whose `user_id` equals the given owner.
        """
        if self.user.removeprefix("-").isdecimal():
            # A numeric user name can be stored as a str or as an int, and the two types have
            # different tags in the metadata index. A search in the index could therefore miss
            # threads of this user, so match all threads instead.
            return ThreadQuery()
        return ThreadQuery(metadata={"owner": self.user})

    def _search_ids_of_threads_without_checkpoint(self) -> Flow[set[str]]:
        """Return the ids of the person's threads that have runs and no checkpoints.

        The owner of a thread without checkpoints cannot be determined from checkpoint metadata. The
        result contains a thread if one of its runs belongs to the person; see
        `_find_person_of_run`. If `owners_are_people` is True, a thread with an `owner` belongs to
        this owner, whoever started the thread's runs. The result omits such a thread, because
        `list_thread_ids` finds the owner's threads separately.
        """
        rows = yield from read_server_rows(
            self._database, self._sql["runs_of_threads_without_checkpoint"]
        )
        candidate_ids = {
            run.live.thread_id
            for run in decrypt_undamaged_rows(decrypt_run, self._seal, rows)
            if self._find_person_of_run(run) == self.user
        }
        thread_ids = set[str]()
        for thread_id in candidate_ids:
            thread = yield from ThreadList(self.saver).read_in_transaction(thread_id)
            if thread is not None and not self._find_person_of_thread(thread):
                thread_ids.add(thread_id)
        return thread_ids

    def iter_thread_ids_except(self, excluded_ids: frozenset[str]) -> Iterator[str]:
        """Yield the ids of all threads that are not in `excluded_ids`."""
        thread_ids = ThreadList(self.saver).search(
            ThreadQuery(), attrgetter("thread_id"), sys.maxsize
        )
        yield from (thread_id for thread_id in thread_ids if thread_id not in excluded_ids)

    def _matches_person_name(self, value: Any) -> bool:
        """Return whether a metadata value equals the person's name.

        If a person's name consists of digits, the metadata can contain the name as an integer.
        """
        return type(value) in (str, int) and str(value) == self.user

    def _find_person_of_thread(self, thread: ListedThread) -> Any:
        """Return the name of the person to whom a thread belongs, or None if it is not recorded.

        The thread belongs to the `user_id` in the metadata of its head. If there is no `user_id`
        and `owners_are_people` is True, the thread belongs to its `owner`.
        """
        user = (thread.head_metadata or {}).get("user_id")
        return (
            user
            if user not in (None, "") or not self.owners_are_people
            else _find_owner_of_thread(thread)
        )

    def list_runs(self, thread_id: str) -> list[RunRow]:
        """Return the stored runs of a thread, newest first."""
        return self._read_undamaged_rows(decrypt_run, "runs_of_thread", thread_id, "")

    def list_own_runs_on_threads_of_others(self, own_thread_ids: frozenset[str]) -> list[RunRow]:
        """Return the person's runs on threads that belong to other people.

        The result contains a run if the person started it, or if the run uses the person's
        memories.
        """
        own_runs, start = list[RunRow](), 0
        sql = (
            f"{self._sql['newest_runs']} "
            "ORDER BY r.created_at, r.thread_key, r.seq LIMIT ? OFFSET ?"
        )
        while True:
            rows = self._fetch_server_rows(sql, _PAGE, start)
            other_rows = [row[:-1] for row in rows if row[0] not in own_thread_ids]
            own_runs += [
                run
                for run in decrypt_undamaged_rows(decrypt_run, self._seal, other_rows)
                if self.user in (run.details.get("person"), run.details.get("user"))
            ]
            if len(rows) < _PAGE:
                return own_runs
            start += _PAGE

    def list_other_thread_ids_with_own_checkpoints(
        self, own_thread_ids: frozenset[str]
    ) -> list[str]:
        """Return the ids of other people's threads in which the person's runs stored checkpoints.

        If a user starts a run in another person's thread, the run's checkpoints contain the user's
        name in their metadata, under the key `CALLER`.
        """
        addresses = self.saver.parts.listing.iter_addresses_and_row_keys(
            None, {CALLER: self.user}, None
        )
        ids = dict.fromkeys(address.thread_id for address, _ in addresses)
        return [thread_id for thread_id in ids if thread_id not in own_thread_ids]

    def list_own_crons_and_crons_on_other_threads(
        self, own_thread_ids: frozenset[str]
    ) -> tuple[list[CronRow], list[CronRow]]:
        """Return the person's own crons, and other people's crons that involve the person.

        A cron involves the person if the person created the cron, or if the cron runs on behalf of
        the person.

        Args:
            own_thread_ids: The ids of the person's threads.

        Returns:
            Two lists. The first contains the crons of the person. The second contains the other
            crons that the person created or that run on behalf of the person. They belong to
            another person's thread or, if they have no thread, to another person.
        """
        crons, on_other_threads = list[CronRow](), list[CronRow]()
        for cron in self._read_undamaged_rows(decrypt_cron, "all_crons"):
            person = cron.content.get("acting_for") or cron.content.get("user")
            if cron.thread_id in own_thread_ids or (cron.thread_id is None and person == self.user):
                crons.append(cron)
            elif self.user in (person, cron.content.get("user")):
                on_other_threads.append(cron)
        return crons, on_other_threads

    def list_assistant_ids(self) -> list[str]:
        """Return the ids of the assistants whose metadata names the person as owner."""
        return [
            assistant.assistant_id
            for assistant in self._read_undamaged_rows(decrypt_assistant, "latest_versions")
            if (assistant.content.get("metadata") or {}).get("owner") == self.user
        ]

    def list_webhook_run_ids(self) -> list[str]:
        """Return the ids of the person's stateless runs whose webhooks are undelivered."""
        return [
            run_id
            for run_id, webhook in self._read_undamaged_rows(
                decrypt_webhook, "webhooks_without_thread"
            )
            if (webhook.get("person") or webhook.get("user")) == self.user
        ]

    def list_live_runs(self, own_thread_ids: frozenset[str]) -> list[LiveRun]:
        """Return the person's unfinished runs, including pending and delayed runs.

        A run in someone else's thread is returned only if the run uses the memories of `self.user`.
        A run that does not record whose memories it uses is assumed to use the memories of the user
        who started it.
        """
        live = [LiveRun(*row) for row in self._read_rows("live_runs", _END_OF_TIME)]
        other_thread_ids = {run.thread_id for run in live} - own_thread_ids
        own_run_ids = {
            run.live.run_id
            for thread_id in other_thread_ids
            for run in self.list_runs(thread_id)
            if self._find_person_of_run(run) == self.user
        }
        return [run for run in live if run.thread_id in own_thread_ids or run.run_id in own_run_ids]

    @staticmethod
    def _find_person_of_run(run: RunRow) -> Any:
        """Return the person whose long-term memories a run uses.

        If the run does not record whose memories it uses, the user who started the run is returned.
        If the run records neither a person nor the user who started it, return None.
        """
        return run.details.get("person") or run.details.get("user")

    def _read_undamaged_rows(
        self, decrypt_row: Callable[[Seal, Row], T], statement_name: str, *params: Any
    ) -> list[T]:
        """Execute the SQL statement with this name, and return its rows after decryption."""
        rows = self._read_rows(statement_name, *params)
        return decrypt_undamaged_rows(decrypt_row, self._seal, rows)

    def _read_rows(self, statement_name: str, *params: Any) -> list[Row]:
        """Execute the SQL statement with this name, and return its rows."""
        return self._fetch_server_rows(self._sql[statement_name], *params)

    def _fetch_server_rows(self, sql: str, *params: Any) -> list[Row]:
        """Execute an SQL statement. Return no rows if the database lacks the server's tables."""
        return self._database.read(lambda: read_server_rows(self._database, sql, *params))

    # -- writing

    def delete_cron(self, cron: CronRow) -> None:
        """Delete a cron.

        The deleted data remains in the database file until the file is scrubbed, which overwrites
        all deleted data.
        """
        self._delete_row(cron.thread_id or cron.cron_id, "drop_cron", cron.cron_id)

    def delete_webhook(self, run_id: str) -> None:
        """Delete the webhook of a run.

        The deleted data remains in the database file until the file is scrubbed, which overwrites
        all deleted data.
        """
        self._delete_row(run_id, "drop_webhook", run_id)

    def _delete_row(self, lock_id: str, statement_name: str, *params: Any) -> None:
        """Execute a DELETE statement, and request a scrub of the database file.

        A scrub overwrites the bytes of deleted rows.

        Args:
            lock_id: The id that the transaction locks.
            statement_name: The name of the statement.
            params: The parameters of the statement.
        """

        def flow() -> Flow[None]:
            yield self._sql(statement_name, *params)
            yield from self._database.request_scrub_of_deleted_rows()

        self._database.write(flow, exclusive_names=(lock_id,), deletes_rows=True)

    def cancel_run(self, run: LiveRun) -> None:
        """Cancel a run. A pending or delayed run ends at once."""
        sql = self._sql["cancel_runs"]
        includes_delayed = 1
        params = run.thread_id, run.run_id, includes_delayed, "interrupt", time.time()
        self._database.write(lambda: fetch_rows(sql, *params), exclusive_names=(run.thread_id,))

    def is_executing(self, run: LiveRun) -> bool:
        """Return whether a running server process is still executing this run."""
        live_ids = {run_id for (run_id,) in self._read_rows("live_runs_of_thread", run.thread_id)}
        if run.run_id not in live_ids or not run.owner:
            return False
        try:
            with self._database.lock(f"{SERVER_LOCK_PREFIX}{run.owner}", timeout_s=0):
                # A server process holds its lock until it exits. The current process was able to
                # acquire the lock, so the server process that executed the run has exited.
                return False
        # This process holds the lock.
        except AlreadyLocked:
            return True
        # Another process holds the lock.
        except StorageUnavailable as exc:
            if not isinstance(exc.__cause__, TimeoutError):
                raise
            return True

    def erase_thread(self, thread_id: str) -> ErasureReport:
        """Erase a whole thread.

        The erased data remains in the database file until the file is scrubbed, which overwrites
        all deleted data.
        """
        maintenance, reader = self.saver.parts.maintenance, self.saver.parts.reader
        return maintenance.delete_and_drop_cached_thread(
            thread_id, lambda: erase_messages_or_thread(reader, maintenance, thread_id, None)
        )


def _find_owner_of_thread(thread: ListedThread) -> Any:
    """Return a thread's `owner` from its head's metadata, falling back to its client metadata."""
    client = thread.client_metadata_of_conversation
    return (thread.head_metadata or {}).get("owner") or client.metadata.get("owner")
