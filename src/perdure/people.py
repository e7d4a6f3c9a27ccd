"""Export or erase everything that belongs to a person.

A person is the user whose memories, messages and profile are used in a thread. `export` yields an
archive that `perdure import` reads. `forget` erases the person's data, and `plan` reports the data
that `forget` would erase. If `forget` is interrupted, call it again to erase the remaining data.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, Final

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.owner_record import may_owners_be_organisations
from perdure.effects import run_operation
from perdure.errors import StorageUnavailable, UnknownPerson, UnknownThread
from perdure.memory.long_term.person_archive import iter_archive_lines
from perdure.memory.long_term.person_namespaces import (
    PersonNamespaces,
    check_templates,
    find_person_namespaces,
    forget_person,
)
from perdure.memory.long_term.quotation_finder import (
    QuotationFinder,
    find_ids_of_quoting_threads_for_each_finder,
    iter_cron_texts,
    iter_item_texts,
    iter_messages,
    read_human_texts_by_sender,
)
from perdure.memory.long_term.records import RESERVED_LABEL, StoreAdapter
from perdure.run_tables.person_rows import PersonRows
from perdure.run_tables.records import CronRow
from perdure.settings import check_user
from perdure.stores.base import Namespace, Receipt
from perdure.stores.whole_store import WholeStore

__all__ = ["Part", "Report", "aexport", "aforget", "aplan", "export", "forget", "plan"]

ERASED: Final = (
    *("threads", "messages", "checkpoints", "runs", "crons", "webhooks", "items", "versions"),
)
"""The kinds of data that are erased, in the order in which a report lists the kinds."""
_PAGE_LINES: Final = 100  # Number of archive lines that an asynchronous export reads per batch.
# Maximum number of passes per erasure. Each further pass erases the data that other processes wrote
# during the previous pass.
_MAX_ROUNDS: Final = 3
# Interval, in seconds, between two checks whether the person's cancelled runs have ended. An
# erasure cancels the person's runs first, and then waits until all of these runs have ended.
_PAUSE_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Part:
    """The data of one kind, such as threads, that belongs to a person or mentions the person.

    Attributes:
        what: The kind of the objects, a plural noun such as `"threads"`.
        ids: The ids of threads, runs, crons or assistants, or the namespaces or paths of items with
            labels joined by `/`. Empty for kinds that are only counted, such as messages.
        number: The number of objects, or None if it is the number of ids.
    """

    what: str
    ids: tuple[str, ...] = ()
    number: int | None = None

    @property
    def count(self) -> int:
        """The number of objects."""
        return len(self.ids) if self.number is None else self.number


@dataclass(frozen=True, slots=True)
class Report:
    """The result of `forget`, or of `plan`.

    Attributes:
        user: The name of the person.
        erased: The data that was erased, or that would be erased, by kind.
        kept: Data that mentions the person but belongs to others. The kept data was not erased.
        hashes: Hashes of the messages and values that were erased, which can prove that a text was
            among them. The report of a plan has no hashes.
        scrubbed: Whether the erased bytes were also overwritten in the file and its WAL. Postgres
            overwrites no bytes.
        dry_run: Whether nothing was written.
        by_owner: The ids of those threads in `erased` that have no `user_id`. They belong to the
            person only because the `owner` in their metadata is the person's name.
    """

    user: str
    erased: tuple[Part, ...]
    kept: tuple[Part, ...] = ()
    hashes: tuple[str, ...] = ()
    scrubbed: bool = False
    dry_run: bool = False
    by_owner: tuple[str, ...] = ()

    def count(self, kind: str) -> int:
        """Return how many objects of the given kind were erased.

        `kind` is a plural noun, such as `"threads"`. After a dry run, the result is the number of
        objects that the erasure would have erased.
        """
        return sum(part.count for part in self.erased if part.what == kind)


def export(
    user: str,
    saver: Checkpointer,
    store: WholeStore,
    *,
    namespaces: Sequence[Sequence[str]] = (),
    thread_ids: Collection[str] | None = None,
    owners_are_people: bool | None = None,
    conversations_by_id: bool = True,
) -> Iterator[dict[str, Any]]:
    """Yield a person's archive as JSON objects (dicts), one for each line of a JSON Lines file.

    The archive contains the threads with all branches, the items with all versions (memories,
    profile, instructions, examples, chat memory and notes), and records of the runs and crons; see
    docs/people.md. Other processes may write to the database during the export. The archive
    contains a consistent snapshot of each thread, and a consistent snapshot of all versions of each
    item.

    Args:
        user: The name of the person.
        saver: The checkpointer that stores the threads.
        store: The store that contains the items.
        namespaces: Further templates with the label `"{user_id}"`, as in `("notes", "{user_id}")`.
        thread_ids: Only these of the person's threads. None means all.
        owners_are_people: Whether the `owner` of a thread without a user is a person. False means
            that the `owner` is an organisation, which a handler of an Auth file has set. None means
            False if the database has ever been served with an Auth file, and True otherwise.
        conversations_by_id: Whether a conversation in `("chat_memory", ID)` belongs to the person
            if ID is the id of one of the person's threads. On a server, users choose the ids of
            their threads, so only the conversation with the person's name is certain.

    Raises:
        UnknownPerson: Nothing belongs to a person of this name.
    """
    rows = _check_user_and_build_person_rows(user, saver, owners_are_people, thread_ids)
    threads, person_namespaces = _find_threads_and_namespaces_of_person(
        rows, store, namespaces, conversations_by_id
    )
    return iter_archive_lines(rows, saver, store, threads, person_namespaces)


async def aexport(
    user: str,
    saver: Checkpointer,
    store: WholeStore,
    *,
    namespaces: Sequence[Sequence[str]] = (),
    thread_ids: Collection[str] | None = None,
    owners_are_people: bool | None = None,
    conversations_by_id: bool = True,
) -> AsyncIterator[dict[str, Any]]:
    """See `export`."""
    lines = await asyncio.to_thread(
        export,
        user,
        saver,
        store,
        namespaces=namespaces,
        thread_ids=thread_ids,
        owners_are_people=owners_are_people,
        conversations_by_id=conversations_by_id,
    )
    while page := await asyncio.to_thread(lambda: list(islice(lines, _PAGE_LINES))):
        for line in page:
            yield line


def plan(
    user: str,
    saver: Checkpointer,
    store: WholeStore,
    *,
    namespaces: Sequence[Sequence[str]] = (),
    thread_ids: Collection[str] | None = None,
    looks_elsewhere: bool = True,
    owners_are_people: bool | None = None,
    hand_over: bool = False,
    conversations_by_id: bool = True,
) -> Report:
    """Report the data that `forget` would erase now if called with the same arguments.

    Nothing is written or locked. See `forget` for the arguments.

    Raises:
        UnknownPerson: Nothing belongs to a person of this name.
    """
    rows = _check_user_and_build_person_rows(user, saver, owners_are_people, thread_ids)
    return _PersonErasure(
        rows, saver, store, namespaces, looks_elsewhere, hand_over, conversations_by_id
    ).plan()


def forget(
    user: str,
    saver: Checkpointer,
    store: WholeStore,
    *,
    namespaces: Sequence[Sequence[str]] = (),
    thread_ids: Collection[str] | None = None,
    looks_elsewhere: bool = True,
    owners_are_people: bool | None = None,
    hand_over: bool = False,
    conversations_by_id: bool = True,
    timeout_s: float = 30.0,
) -> Report:
    """Erase everything that belongs to a person, and overwrite the deleted bytes in a SQLite file.

    An erasure first deletes the person's crons and cancels the person's runs. After all cancelled
    runs have ended, the erasure deletes the person's store items and threads. If `forget` is
    interrupted, call it again to erase the remaining data.

    Args:
        user: The name of the person.
        saver: The checkpointer that stores the threads.
        store: The store that contains the items.
        namespaces: Further templates with the label `"{user_id}"`, as in `("notes", "{user_id}")`.
        thread_ids: Only these of the person's threads. None means all.
        looks_elsewhere: Whether to search the data of other people for quotations and other traces
            of the person, which are listed and not erased. The search reads all messages of other
            people.
        owners_are_people: See `export`.
        hand_over: Whether items that the person added to team memories are kept, but without the
            person's name. If False, these items are erased.
        conversations_by_id: See `export`.
        timeout_s: Seconds to wait for all cancelled runs to end, and for the lock of each thread.

    Raises:
        UnknownPerson: Nothing belongs to a person of this name.
        StorageUnavailable: A run of the person does not end, or a thread is locked. Data that was
            already erased stays erased.
    """
    rows = _check_user_and_build_person_rows(user, saver, owners_are_people, thread_ids)
    return _PersonErasure(
        rows, saver, store, namespaces, looks_elsewhere, hand_over, conversations_by_id
    ).forget(timeout_s)


def limit_report_to_namespaces(report: Report, visible_namespaces: Collection[str]) -> Report:
    """Return a copy of the report that omits all namespaces except `visible_namespaces`."""
    kept_parts = (
        replace(
            part, ids=tuple(namespace for namespace in part.ids if namespace in visible_namespaces)
        )
        if part.what == "namespaces"
        else part
        for part in report.kept
    )
    return replace(report, kept=tuple(part for part in kept_parts if part.count))


async def aplan(*args: Any, **options: Any) -> Report:
    """See `plan`."""
    return await asyncio.to_thread(plan, *args, **options)


async def aforget(*args: Any, **options: Any) -> Report:
    """See `forget`."""
    return await asyncio.to_thread(forget, *args, **options)


@dataclass(slots=True)
class _PersonErasure:
    """Erases all data that belongs to one person, or reports what would be erased.

    Attributes:
        counts: The number of erased objects, by kind.
        ids: The ids of the erased objects, by kind.
        hashes: The hashes of the erased messages and values.
        owned_thread_ids: The threads that name no user and whose owner has the person's name.
        by_owner: The threads in `owned_thread_ids` that are erased.
    """

    rows: PersonRows
    saver: Checkpointer
    store: WholeStore
    namespaces: Sequence[Sequence[str]]
    looks_elsewhere: bool
    hand_over: bool = False
    conversations_by_id: bool = True
    counts: Counter[str] = field(default_factory=Counter)
    ids: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    hashes: set[str] = field(default_factory=set)
    owned_thread_ids: list[str] = field(default_factory=list)
    by_owner: tuple[str, ...] = ()

    def plan(self) -> Report:
        """Count the data that would be erased."""
        self._check_all_components_are_known()
        threads, person_namespaces = self._find_threads_and_namespaces()
        self._remember_threads_found_only_by_owner(threads)
        kept_parts = self._list_kept_data_that_mentions_person(threads, person_namespaces)
        for cron in self.rows.list_own_crons_and_crons_on_other_threads(frozenset(threads))[0]:
            self._count_object_once("crons", cron.cron_id)
        for run_id in self.rows.list_webhook_run_ids():
            self._count_object_once("webhooks", run_id)
        self._erase_items_of_person(threads, dry_run=True)
        for thread_id in threads:
            self._add_thread_contents_to_counts(thread_id)
        return self._build_report(kept_parts, scrubbed=False, dry_run=True)

    def forget(self, timeout_s: float) -> Report:
        """Erase the person's data in up to `_MAX_ROUNDS` passes.

        While a pass is running, other processes can write new data that belongs to the person. The
        next pass erases this data.
        """
        self._check_all_components_are_known()
        try:
            threads, person_namespaces = self._find_threads_and_namespaces()
        except UnknownPerson:
            # Overwrite deleted bytes before raising the error, because an earlier erasure may have
            # been interrupted after deleting all of the person's rows but before overwriting their
            # bytes.
            self._overwrite_deleted_bytes_and_return_if_complete()
            raise
        self._remember_threads_found_only_by_owner(threads)
        kept_parts = self._list_kept_data_that_mentions_person(threads, person_namespaces)
        for _ in range(_MAX_ROUNDS):
            self._stop_crons_runs_and_webhooks(threads, timeout_s)
            # Erase the items before the threads, because the thread ids are needed to find the
            # person's conversations under the namespace prefix `chat_memory`.
            self._erase_items_of_person(threads, dry_run=False)
            for thread_id in threads:
                self._erase_thread(thread_id, timeout_s)
            try:
                threads, _ = self._find_threads_and_namespaces()
            except UnknownPerson:
                break
        return self._build_report(
            kept_parts,
            scrubbed=self._overwrite_deleted_bytes_and_return_if_complete(),
            dry_run=False,
        )

    def _check_all_components_are_known(self) -> None:
        """Raise SchemaMismatch if the database has tables that perdure does not support.

        Unsupported tables could contain data about the person, and an erasure would miss this data.
        """
        saver = self.rows.saver
        saver.database.read(saver.parts.maintenance.extensions.load)

    def _find_threads_and_namespaces(self) -> tuple[list[str], PersonNamespaces]:
        return _find_threads_and_namespaces_of_person(
            self.rows, self.store, self.namespaces, self.conversations_by_id
        )

    def _remember_threads_found_only_by_owner(self, threads: list[str]) -> None:
        """Record the threads that have no `user_id` and whose `owner` is the person's name."""
        self.owned_thread_ids = self.rows.list_ids_of_owned_threads_without_user_id()
        self.by_owner = tuple(
            thread_id for thread_id in self.owned_thread_ids if thread_id in {*threads}
        )

    def _stop_crons_runs_and_webhooks(self, threads: list[str], timeout_s: float) -> None:
        """Delete the crons, cancel the runs, wait for the runs to end, and delete the webhooks.

        Raises:
            StorageUnavailable: A run has not ended after `timeout_s` seconds.
        """
        own_threads, deadline = frozenset(threads), time.monotonic() + timeout_s
        for cron in self.rows.list_own_crons_and_crons_on_other_threads(own_threads)[0]:
            self.rows.delete_cron(cron)
            self._count_object_once("crons", cron.cron_id)
        for live in self.rows.list_live_runs(own_threads):
            self.rows.cancel_run(live)
        while executing := [
            live for live in self.rows.list_live_runs(own_threads) if self.rows.is_executing(live)
        ]:
            if time.monotonic() > deadline:
                raise StorageUnavailable(
                    f"run {executing[0].run_id!r} of thread {executing[0].thread_id!r} was "
                    f"cancelled but has not ended after {timeout_s:g} s; when it has ended, erase "
                    f"the data of {self.rows.user!r} again"
                )
            time.sleep(_PAUSE_S)
        for run_id in self.rows.list_webhook_run_ids():
            self.rows.delete_webhook(run_id)
            self._count_object_once("webhooks", run_id)

    def _erase_items_of_person(self, threads: list[str], *, dry_run: bool) -> None:
        """Erase the items of the person. With `dry_run`, only count the items."""
        receipt: Receipt = run_operation(
            forget_person(
                StoreAdapter(self.store),
                self.rows.user,
                templates=check_templates(self.namespaces),
                conversations=threads if self.conversations_by_id else None,
                dry_run=dry_run,
                hand_over=self.hand_over,
            )
        )
        self.counts["handed over"] += receipt.handed_over
        self.counts["items"] += receipt.items
        self.counts["versions"] += receipt.versions
        self.ids["items"] += ["/".join(namespace) for namespace in receipt.namespaces]
        self.hashes |= {*receipt.hashes}

    def _erase_thread(self, thread_id: str, timeout_s: float) -> None:
        """Erase a thread under its lock."""
        with self.saver.lock(thread_id, timeout_s=timeout_s):
            self._add_thread_contents_to_counts(thread_id)
            self.hashes |= {*self.rows.erase_thread(thread_id).hashes}

    def _add_thread_contents_to_counts(self, thread_id: str) -> None:
        """Count the thread and its runs, checkpoints and messages in `self.counts`."""
        self._count_object_once("threads", thread_id)
        self.counts["runs"] += len(self.rows.list_runs(thread_id))
        # `Checkpointer.thread` raises UnknownThread if a thread has no checkpoint.
        with suppress(UnknownThread):
            self.counts["checkpoints"] += self.saver.thread(thread_id).checkpoints
        self.counts["messages"] += sum(1 for _ in iter_messages(self.saver, thread_id))

    def _count_object_once(self, object_kind: str, object_id: str) -> None:
        """Count an object of the given kind, unless it has already been counted."""
        if object_id not in self.ids[object_kind]:
            self.counts[object_kind] += 1
            self.ids[object_kind].append(object_id)

    def _overwrite_deleted_bytes_and_return_if_complete(self) -> bool:
        """Overwrite the erased bytes, and return whether all of them were overwritten."""
        return all(
            [self.saver.database.scrub_deleted_rows(), self.store.database.scrub_deleted_rows()]
        )

    def _list_kept_data_that_mentions_person(
        self, threads: list[str], person_namespaces: PersonNamespaces
    ) -> tuple[Part, ...]:
        """List other people's data that mentions the person."""
        kept_parts = [Part("namespaces", tuple(map("/".join, person_namespaces.others)))]
        if self.looks_elsewhere:
            own_threads = frozenset(threads)
            other_owned_threads = tuple(
                candidate for candidate in self.owned_thread_ids if candidate not in own_threads
            )
            item_namespaces = [
                candidate for candidate in person_namespaces.own if candidate[0] != RESERVED_LABEL
            ]
            crons, crons_elsewhere = self.rows.list_own_crons_and_crons_on_other_threads(
                own_threads
            )
            quoting_threads, cron_threads = (
                self._find_ids_of_other_threads_quoting_person_and_quoting_crons(
                    threads, item_namespaces, crons
                )
            )
            runs_elsewhere = self.rows.list_own_runs_on_threads_of_others(own_threads)
            kept_parts += [
                Part("threads of this owner", other_owned_threads),
                Part("threads with quotations", quoting_threads),
                Part("threads with the message of a cron", cron_threads),
                Part(
                    "threads of others with the name",
                    tuple(self.rows.list_other_thread_ids_with_own_checkpoints(own_threads)),
                ),
                Part(
                    "memories of others",
                    tuple(
                        self._iter_paths_of_other_peoples_items_from_own_threads(
                            own_threads, person_namespaces
                        )
                    ),
                ),
                Part(
                    "runs on threads of others",
                    tuple(candidate.live.run_id for candidate in runs_elsewhere),
                ),
                Part(
                    "crons on threads of others",
                    tuple(candidate.cron_id for candidate in crons_elsewhere),
                ),
                Part("assistants", tuple(self.rows.list_assistant_ids())),
            ]
        return tuple(part for part in kept_parts if part.count)

    def _find_ids_of_other_threads_quoting_person_and_quoting_crons(
        self, threads: list[str], namespaces: list[Namespace], crons: list[CronRow]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Find other users' threads that quote the person or one of the person's crons.

        A thread quotes a cron (a scheduled run) if the thread contains a message that the cron
        sent.

        The search looks for messages that the person wrote and for texts of the person's items. The
        search does not look for messages that other people sent in the person's threads.

        Returns:
            The ids of the threads that contain a text of the person, and the ids of the threads
            that contain a message of one of the person's crons.
        """
        human_texts, cron_texts = (
            read_human_texts_by_sender(self.saver, threads),
            frozenset(iter_cron_texts(crons)),
        )
        own_texts = chain(human_texts.own, map(str.strip, iter_item_texts(self.store, namespaces)))
        texts = (
            text for text in own_texts if text not in human_texts.foreign and text not in cron_texts
        )
        finders = [QuotationFinder(texts), QuotationFinder(cron_texts)]
        quoting_threads, cron_threads = find_ids_of_quoting_threads_for_each_finder(
            self.saver, self.rows.iter_thread_ids_except(frozenset(threads)), finders
        )
        return quoting_threads, cron_threads

    def _iter_paths_of_other_peoples_items_from_own_threads(
        self, own_thread_ids: frozenset[str], person_namespaces: PersonNamespaces
    ) -> Iterator[str]:
        """Yield the paths of other people's items that come from the person's threads.

        Such an item is, for example, a memory that was extracted from one of the person's threads.

        An item's path consists of the labels of its namespace and its key, joined by `/`.
        """
        if own_thread_ids:
            source, authored_items = (
                {"thread_id": {"$in": sorted(own_thread_ids)}},
                frozenset(person_namespaces.authored_items),
            )
            for namespace, key in self.store.forget((), provenance=source, dry_run=True).keys:
                is_own = (namespace, key) in authored_items and not self.hand_over
                if not is_own and not any(
                    namespace[: len(own_namespace)] == own_namespace
                    for own_namespace in person_namespaces.own
                ):
                    yield "/".join((*namespace, key))

    def _build_report(
        self, kept_parts: tuple[Part, ...], *, scrubbed: bool, dry_run: bool
    ) -> Report:
        """Build the report from the collected counts and ids."""
        erased = (
            Part(kind, tuple(dict.fromkeys(self.ids[kind])), self.counts[kind])
            for kind in ERASED
            if self.counts[kind]
        )
        if handed_over := self.counts["handed over"]:
            kept_parts = (*kept_parts, Part("items of teams without the name", number=handed_over))
        return Report(
            self.rows.user,
            tuple(erased),
            kept_parts,
            hashes=() if dry_run else tuple(sorted(self.hashes)),
            scrubbed=scrubbed,
            dry_run=dry_run,
            by_owner=self.by_owner,
        )


def _check_user_and_build_person_rows(
    user: str,
    saver: Checkpointer,
    owners_are_people: bool | None,
    thread_ids: Collection[str] | None,
) -> PersonRows:
    """Validate a person's name, and return a `PersonRows` object for the person."""
    check_user("the argument 'user'", user, "pass the person's user name")
    only = None if thread_ids is None else frozenset(thread_ids)
    if owners_are_people is None:
        owners_are_people = not may_owners_be_organisations(saver.database)
    return PersonRows(saver, user, owners_are_people=owners_are_people, only=only)


def _find_threads_and_namespaces_of_person(
    rows: PersonRows,
    store: WholeStore,
    namespaces: Sequence[Sequence[str]],
    conversations_by_id: bool,
) -> tuple[list[str], PersonNamespaces]:
    """Find the threads and namespaces that belong to a person.

    Raises:
        UnknownPerson: The person has no threads, namespaces, items, crons or undelivered webhooks.
    """
    threads, templates = rows.list_thread_ids(), check_templates(namespaces)
    conversations = threads if conversations_by_id else None
    person_namespaces: PersonNamespaces = run_operation(
        find_person_namespaces(StoreAdapter(store), rows.user, templates, conversations)
    )
    if not (
        threads
        or person_namespaces.own
        or person_namespaces.authored_items
        or rows.list_own_crons_and_crons_on_other_threads(frozenset())[0]
        or rows.list_webhook_run_ids()
    ):
        raise build_unknown_person_error(
            rows.user, rows.list_ids_of_owned_threads_without_user_id()
        )
    return threads, person_namespaces


def build_unknown_person_error(user: str, owned_thread_ids: Sequence[str] = ()) -> UnknownPerson:
    """Build the error for a user name to which no thread, item, cron or webhook belongs.

    Args:
        user: The user name.
        owned_thread_ids: The ids of the threads whose `owner` has this name, if owners are
            organisations.
    """
    advice = "names are compared exactly, and 'perdure threads' lists the users of threads"
    if owned_thread_ids:
        advice = (
            f"the owner of {', '.join(map(repr, owned_thread_ids[:3]))} has this name and counts "
            "as an organisation; if it is a person, pass --owners people or owners_are_people=True"
        )
    return UnknownPerson(
        f"nobody of this name: no thread, item, cron or webhook belongs to {user!r}; {advice}"
    )
