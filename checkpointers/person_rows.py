"""Find and erase a person's rows in a checkpointer's database, and cancel the person's runs.

A person's rows are the rows of the person's threads, runs, crons and webhooks. A thread belongs to
the person whose name is the `user_id` in the metadata of the thread's head. If there is no
`user_id`, the thread belongs to its `owner`. The runs, crons and webhooks of a thread belong to the
same person as the thread. A cron without a thread, or the webhook of a stateless run, belongs to
the person on whose behalf it was created. If this person is not recorded, the cron or webhook
belongs to the user who created it.

Some methods also list the person's runs, crons and checkpoints on other people's threads.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, Final

from perdure.checkpointers.assistants import build_assistant_associated_data
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.erasure import erase_messages_or_thread
from perdure.checkpointers.labels import CALLER
from perdure.checkpointers.records import CronRow, LiveRun, RunRow, decrypt_cron, decrypt_run
from perdure.checkpointers.reports import ErasureReport
from perdure.checkpointers.thread_list import ListedThread, ThreadList, ThreadQuery
from perdure.errors import AlreadyLocked, CorruptRecord, StorageUnavailable
from perdure.storage.flow import Flow, Row, fetch_rows

# Maximum number of runs read by a single SQL statement.
_PAGE: Final = 1_000
# A Unix timestamp, in seconds, in the far future. It is later than the start time of any delayed
# run.
_END_OF_TIME: Final = 1e18
_SERVER_LOCK_PREFIX: Final = "perdure.server/"
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
        self._sql, self._seal, self._database = saver._sql, saver._seal, saver.database

    # -- reading

    def list_thread_ids(self) -> list[str]:
        """Return the sorted ids of the person's threads."""
        query, threads = (
            self._build_query_for_threads_that_may_be_of_person(),
            ThreadList(self.saver),
        )
        thread_ids = {*threads.search(query, self._get_thread_id_if_owned_by_person, sys.maxsize)}
        return self._sort_permitted_ids(
            thread_ids | {*self._iter_ids_of_threads_without_checkpoint()}
        )

    def list_ids_of_owned_threads_without_user_id(self) -> list[str]:
        """Return the sorted ids of threads that have no `user_id` and are owned by the person."""

        def match(thread: ListedThread) -> str | None:
            has_user = (thread.head_metadata or {}).get("user_id") not in (None, "")
            is_owned = not has_user and self._matches_person_name(_find_owner_of_thread(thread))
            return thread.thread_id if is_owned else None

        query, threads = (
            self._build_query_for_threads_that_may_be_of_person(),
            ThreadList(self.saver),
        )
        return self._sort_permitted_ids({*threads.search(query, match, sys.maxsize)})

    def _sort_permitted_ids(self, thread_ids: set[str]) -> list[str]:
        """Sort thread ids, and drop those that are not in the constructor argument `only`."""
        return sorted(thread_ids if self._only is None else thread_ids & self._only)

    def _build_query_for_threads_that_may_be_of_person(self) -> ThreadQuery:
        """Build a query that matches the person's threads, and possibly other threads.

        In SQL, a condition on `owner` also matches threads whose `user_id` has this value.
        """
        if self.user.removeprefix("-").isdecimal():
            # Match all threads, because the index cannot be used. Metadata can contain a numeric
            # user name as a str or as an int, which have different index tags.
            return ThreadQuery()
        return ThreadQuery(metadata={"owner": self.user})

    def _iter_ids_of_threads_without_checkpoint(self) -> Iterator[str]:
        """Yield the ids of the person's threads that have no checkpoints.

        The owner of a thread without checkpoints cannot be determined from checkpoint metadata. A
        thread without checkpoints therefore belongs to the person if one of its runs does; see
        `_find_person_of_run`. If owners are people, a thread with a recorded owner is excluded,
        because it belongs to its owner.
        """
        for (thread_id,) in self._read_rows("threads_without_checkpoint"):
            thread = ThreadList(self.saver).get(thread_id)
            users = {self._find_person_of_run(run) for run in self.list_runs(thread_id)}
            if (
                self.user in users
                and thread is not None
                and not self._find_person_of_thread(thread)
            ):
                yield thread_id

    def iter_thread_ids_except(self, excluded_ids: frozenset[str]) -> Iterator[str]:
        """Yield the ids of all threads that are not in `excluded_ids`."""
        get_id = attrgetter("thread_id")
        thread_ids = ThreadList(self.saver).search(ThreadQuery(), get_id, sys.maxsize)
        yield from (thread_id for thread_id in thread_ids if thread_id not in excluded_ids)

    def _get_thread_id_if_owned_by_person(self, thread: ListedThread) -> str | None:
        """Return a thread's id if the thread belongs to the person, otherwise None."""
        return (
            thread.thread_id
            if self._matches_person_name(self._find_person_of_thread(thread))
            else None
        )

    def _matches_person_name(self, value: Any) -> bool:
        """Return whether a metadata value equals the person's name.

        Metadata can contain a numeric name as an integer.
        """
        return type(value) in (str, int) and str(value) == self.user

    def _find_person_of_thread(self, thread: ListedThread) -> Any:
        """Return the name of the person to whom a thread belongs, or None if it is not recorded.

        The `owner` of the thread is used only if `owners_are_people` is True.
        """
        user = (thread.head_metadata or {}).get("user_id")
        return (
            user
            if user not in (None, "") or not self.owners_are_people
            else _find_owner_of_thread(thread)
        )

    def list_runs(self, thread_id: str) -> list[RunRow]:
        """Return the stored runs of a thread, newest first."""
        return self._decrypt_runs(self._read_rows("runs_of_thread", thread_id, ""))

    def list_own_runs_on_threads_of_others(self, own_thread_ids: frozenset[str]) -> list[RunRow]:
        """Return the person's runs on other people's threads.

        A run is included if the person started it or if it uses the person's memories.
        """
        own_runs, start = list[RunRow](), 0
        order = "ORDER BY r.created_at, r.thread_key, r.seq LIMIT ? OFFSET ?"
        sql = f"{self._sql['newest_runs']} {order}"
        while True:
            rows = self._database.read(partial(fetch_rows, sql, _PAGE, start))
            runs = self._decrypt_runs([row[:-1] for row in rows if row[0] not in own_thread_ids])
            own_runs += [run for run in runs if self._is_own_run(run)]
            if len(rows) < _PAGE:
                return own_runs
            start += _PAGE

    def list_other_thread_ids_with_own_checkpoints(
        self, own_thread_ids: frozenset[str]
    ) -> list[str]:
        """Return the ids of other people's threads in which the person's runs stored checkpoints.

        The metadata of such a checkpoint contains the person's name under the key `CALLER`.
        """
        addresses = self.saver._listing.iter_addresses_and_row_keys(None, {CALLER: self.user}, None)
        ids = dict.fromkeys(address.thread_id for address, _ in addresses)
        return [thread_id for thread_id in ids if thread_id not in own_thread_ids]

    def list_own_crons_and_crons_on_other_threads(
        self, own_thread_ids: frozenset[str]
    ) -> tuple[list[CronRow], list[CronRow]]:
        """Return the person's crons, and other people's crons that concern the person.

        Args:
            own_thread_ids: The ids of the person's threads.

        Returns:
            Two lists. The first contains the crons of the person. The second contains the other
            crons that the person created or that run on behalf of the person. They belong to
            another person's thread or, if they have no thread, to another person.
        """
        crons, on_other_threads = list[CronRow](), list[CronRow]()
        for row in self._read_rows("all_crons"):
            with suppress(CorruptRecord):
                cron = decrypt_cron(self._seal, row)
                person = cron.content.get("acting_for") or cron.content.get("user")
                if cron.thread_id in own_thread_ids or (
                    cron.thread_id is None and person == self.user
                ):
                    crons.append(cron)
                elif self.user in (person, cron.content.get("user")):
                    on_other_threads.append(cron)
        return crons, on_other_threads

    def list_assistant_ids(self) -> list[str]:
        """Return the ids of the assistants whose metadata names the person as owner."""
        assistant_ids = []
        for assistant_id, version, _, _, content, *_ in self._read_rows("latest_versions"):
            with suppress(CorruptRecord):
                row_place = build_assistant_associated_data(assistant_id, version)
                fields = json.loads(self._seal.unseal(content, row_place))
                if (fields.get("metadata") or {}).get("owner") == self.user:
                    assistant_ids.append(str(assistant_id))
        return assistant_ids

    def list_webhook_run_ids(self) -> list[str]:
        """Return the ids of the person's stateless runs whose webhooks are undelivered."""
        run_ids = []
        for run_id, content in self._read_rows("webhooks_without_thread"):
            with suppress(CorruptRecord):
                webhook = json.loads(self._seal.unseal(content, ("webhook", run_id)))
                if (webhook.get("person") or webhook.get("user")) == self.user:
                    run_ids.append(str(run_id))
        return run_ids

    def list_live_runs(self, own_thread_ids: frozenset[str]) -> list[LiveRun]:
        """Return the person's unfinished runs, including pending and delayed runs.

        A run on another person's thread is included if it uses the memories of the person. A run
        that does not record whose memories it uses is included if the person started it.
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

    def _is_own_run(self, run: RunRow) -> bool:
        """Return whether the person started a run or the run uses the person's memories."""
        return self.user in (run.details.get("person"), run.details.get("user"))

    @staticmethod
    def _find_person_of_run(run: RunRow) -> Any:
        """Return the person whose long-term memories a run uses.

        If the run does not record this person, return the user who started the run, or None if
        neither is recorded.
        """
        return run.details.get("person") or run.details.get("user")

    def _decrypt_runs(self, rows: list[Row]) -> list[RunRow]:
        """Decrypt rows of runs. Damaged rows are left out."""
        runs = list[RunRow]()
        for row in rows:
            with suppress(CorruptRecord):
                runs.append(decrypt_run(self._seal, row))
        return runs

    def _read_rows(self, statement_name: str, *params: Any) -> list[Row]:
        """Execute the SQL statement with this name, and return its rows."""
        sql = self._sql[statement_name]
        return self._database.read(lambda: fetch_rows(sql, *params))

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
        """Execute a named DELETE statement, and request a scrub of the database file.

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
        live_runs = self._read_rows("live_runs_of_thread", run.thread_id)
        if run.run_id not in {run_id for (run_id,) in live_runs}:
            return False
        if not run.owner:
            return False
        try:
            with self._database.lock(f"{_SERVER_LOCK_PREFIX}{run.owner}", timeout_s=0):
                # A server process holds this lock for its whole lifetime. If the lock is free, the
                # process has ended.
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
        maintenance, reader = self.saver._maintenance, self.saver._reader
        return maintenance.delete_and_drop_cached_thread(
            thread_id, lambda: erase_messages_or_thread(reader, maintenance, thread_id, None)
        )


def _find_owner_of_thread(thread: ListedThread) -> Any:
    """Return a thread's `owner` from its head's metadata, falling back to its client metadata."""
    client = (
        thread.client
        if thread.does_client_metadata_describe_stored_conversation and thread.client
        else None
    )
    return (thread.head_metadata or {}).get("owner") or (client and client.metadata.get("owner"))
