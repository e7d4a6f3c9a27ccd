"""The rows of a person in a checkpointer's database: threads, runs, crons and webhooks.

The person of a thread is the `user_id` of its head, or else its `owner`. The person of a run is
that of its thread; of a run or a cron without a thread of its own it is the user who made it, or
for whom it was made.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Final

from perdure.checkpointers.assistants import assistant_place
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.erasure import erase_from_thread
from perdure.checkpointers.labels import CALLER
from perdure.checkpointers.records import CronRow, LiveRun, RunRow, decrypt_cron, decrypt_run
from perdure.checkpointers.reports import ErasureReport
from perdure.checkpointers.thread_list import ListedThread, ThreadList, ThreadQuery
from perdure.errors import AlreadyLocked, CorruptRecord, StorageUnavailable
from perdure.storage.flow import Flow, Row, rows_of

_PAGE: Final = 1_000  # runs that are read at once
_END_OF_TIME: Final = 1e18  # seconds since 1970, so that all delayed runs count as due
_LIVES: Final = "perdure.server/"  # with the name of a process: the lock that it holds


class PersonRows:
    """Reads, cancels and erases the rows of a person.

    Args:
        saver: The checkpointer.
        user: The name of the person.
        owners_are_people: Whether the `owner` of a thread without a user is a person. It is not if
            a handler of an Auth file sets it.
        only: The ids of threads to which the person's threads are limited. None means no limit.
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

    def threads(self) -> list[str]:
        """Return the ids of the person's threads."""
        found = {*ThreadList(self.saver).search(self._query(), self._match, sys.maxsize)}
        found |= {*self._unbegun_threads()}
        return self._limit(found)

    def threads_by_owner(self) -> list[str]:
        """Return the ids of threads without a user whose `owner` has the person's name."""

        def match(thread: ListedThread) -> str | None:
            has_user = (thread.told or {}).get("user_id") not in (None, "")
            is_owned = not has_user and self._is_name(_find_owner(thread))
            return thread.thread_id if is_owned else None

        return self._limit({*ThreadList(self.saver).search(self._query(), match, sys.maxsize)})

    def _limit(self, thread_ids: set[str]) -> list[str]:
        """Return those of the ids that the limit of this object includes, in order."""
        return sorted(each for each in thread_ids if self._only is None or each in self._only)

    def _query(self) -> ThreadQuery:
        """Return a query for a superset of the threads that name the person."""
        if self.user.removeprefix("-").isdecimal():
            return ThreadQuery()  # the name may be stored as a number, which has another tag
        return ThreadQuery(metadata={"owner": self.user})

    def _unbegun_threads(self) -> Iterator[str]:
        """Yield the threads without a checkpoint that name nobody and have a run of the person."""
        for (thread_id,) in self._rows("unbegun_threads"):
            thread = ThreadList(self.saver).get(thread_id)
            users = {self._find_user(run) for run in self.runs(thread_id)}
            if self.user in users and thread is not None and not self._find_person(thread):
                yield thread_id

    def other_threads(self, own: frozenset[str]) -> Iterator[str]:
        """Yield the ids of all other threads."""
        ids = ThreadList(self.saver).search(ThreadQuery(), lambda each: each.thread_id, sys.maxsize)
        yield from (thread_id for thread_id in ids if thread_id not in own)

    def _match(self, thread: ListedThread) -> str | None:
        return thread.thread_id if self._is_name(self._find_person(thread)) else None

    def _is_name(self, value: Any) -> bool:
        return type(value) in (str, int) and str(value) == self.user

    def _find_person(self, thread: ListedThread) -> Any:
        user = (thread.told or {}).get("user_id")
        return user if user not in (None, "") or not self.owners_are_people else _find_owner(thread)

    def runs(self, thread_id: str) -> list[RunRow]:
        """Return the runs of a thread that are kept, newest first."""
        return self._open_runs(self._rows("runs_of", thread_id, ""))

    def runs_elsewhere(self, own: frozenset[str]) -> list[RunRow]:
        """Return the runs that the person sent on other people's threads."""
        found, start = list[RunRow](), 0
        sql = f"{self._sql['newest_runs']} ORDER BY r.created_at, r.thread, r.seq LIMIT ? OFFSET ?"
        while True:
            rows = self._database.read(partial(rows_of, sql, _PAGE, start))
            runs = self._open_runs([row[:-1] for row in rows if row[0] not in own])
            found += [run for run in runs if self._is_own(run)]
            if len(rows) < _PAGE:
                return found
            start += _PAGE

    def threads_with_name(self, own: frozenset[str]) -> list[str]:
        """Return the ids of other people's threads whose checkpoints name the person as caller."""
        named = self.saver._listing.addresses(None, {CALLER: self.user}, None)
        ids = dict.fromkeys(at.thread_id for at, _ in named)
        return [each for each in ids if each not in own]

    def crons(self, own: frozenset[str]) -> tuple[list[CronRow], list[CronRow]]:
        """Return the person's crons, and those that the person made on other people's threads."""
        crons, elsewhere = list[CronRow](), list[CronRow]()
        for row in self._rows("all_crons"):
            with suppress(CorruptRecord):
                cron = decrypt_cron(self._seal, row)
                whose = cron.content.get("acting_for") or cron.content.get("user")
                if cron.thread_id in own or (cron.thread_id is None and whose == self.user):
                    crons.append(cron)
                elif self.user in (whose, cron.content.get("user")):
                    elsewhere.append(cron)
        return crons, elsewhere

    def assistants(self) -> list[str]:
        """Return the ids of the assistants whose metadata names the person as owner."""
        found = []
        for assistant_id, version, _, _, content, *_ in self._rows("latest_versions"):
            with suppress(CorruptRecord):
                at = assistant_place(assistant_id, version)
                given = json.loads(self._seal.open(content, at))
                if (given.get("metadata") or {}).get("owner") == self.user:
                    found.append(str(assistant_id))
        return found

    def webhooks(self) -> list[str]:
        """Return the ids of the person's runs without a thread whose webhook is not sent yet."""
        found = []
        for run_id, content in self._rows("loose_webhooks"):
            with suppress(CorruptRecord):
                told = json.loads(self._seal.open(content, ("webhook", run_id)))
                if (told.get("person") or told.get("user")) == self.user:
                    found.append(str(run_id))
        return found

    def live_runs(self, own: frozenset[str]) -> list[LiveRun]:
        """Return the runs of the person that have not ended, also delayed ones."""
        live = [LiveRun(*row) for row in self._rows("live_runs", _END_OF_TIME)]
        others = {run.thread_id for run in live} - own
        sent = {
            run.live.run_id
            for thread_id in others
            for run in self.runs(thread_id)
            if self._find_user(run) == self.user
        }
        return [run for run in live if run.thread_id in own or run.run_id in sent]

    def _is_own(self, run: RunRow) -> bool:
        """Return whether the person sent a run, or is the one whose memories it uses."""
        return self.user in (run.about.get("person"), run.about.get("user"))

    @staticmethod
    def _find_user(run: RunRow) -> Any:
        """Return the person whose memories a run uses, as far as its row tells."""
        return run.about.get("person") or run.about.get("user")

    def _open_runs(self, rows: list[Row]) -> list[RunRow]:
        found = list[RunRow]()
        for row in rows:
            with suppress(CorruptRecord):
                found.append(decrypt_run(self._seal, row))
        return found

    def _rows(self, name: str, *params: Any) -> list[Row]:
        sql = self._sql[name]
        return self._database.read(lambda: rows_of(sql, *params))

    # -- writing

    def drop_cron(self, cron: CronRow) -> None:
        """Delete a cron, also from the bytes of the file once they are scrubbed."""
        self._remove(cron.thread_id or cron.cron_id, "drop_cron", cron.cron_id)

    def drop_webhook(self, run_id: str) -> None:
        """Delete the webhook of a run, as `drop_cron` does with a cron."""
        self._remove(run_id, "drop_webhook", run_id)

    def _remove(self, about: str, name: str, *params: Any) -> None:
        def flow() -> Flow[None]:
            yield self._sql(name, *params)
            yield from self._database.scrub_wanted()

        self._database.write(flow, exclusive=(about,), removes=True)

    def cancel(self, run: LiveRun) -> None:
        """Cancel a run. One that waits or is delayed has ended then."""
        sql = self._sql["cancel_runs"]
        params = run.thread_id, run.run_id, 1, "interrupt", time.time()
        self._database.write(lambda: rows_of(sql, *params), exclusive=(run.thread_id,))

    def is_executing(self, run: LiveRun) -> bool:
        """Return whether a process that lives executes a run, or has not ended it yet."""
        if run.run_id not in {run_id for (run_id,) in self._rows("live_of", run.thread_id)}:
            return False
        if not run.owner:
            return False
        try:
            with self._database.lock(f"{_LIVES}{run.owner}", timeout_s=0):
                return False  # the process is gone
        except AlreadyLocked:
            return True
        except StorageUnavailable as exc:
            if not isinstance(exc.__cause__, TimeoutError):
                raise
            return True

    def erase_thread(self, thread_id: str) -> ErasureReport:
        """Erase a whole thread; its bytes are overwritten by the next scrub of the database."""
        maintenance, reader = self.saver._maintenance, self.saver._reader
        return maintenance.write(
            thread_id, lambda: erase_from_thread(reader, maintenance, thread_id, None)
        )


def _find_owner(thread: ListedThread) -> Any:
    """Return the `owner` of a thread, from its head or else from what a client gave."""
    client = thread.client if thread.counts and thread.client else None
    return (thread.told or {}).get("owner") or (client and client.metadata.get("owner"))
