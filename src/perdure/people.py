"""People: everything that belongs to a person is exported, or forgotten, in one call.

A person is the user whose memories, messages and profile a thread belongs to. `export` yields an
archive that `perdure import` reads. `plan` reports what `forget` would erase and writes nothing.
`forget` may be cut off at any moment and called again: what is left is found again.
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
from perdure.checkpointers.owner_record import has_organisations
from perdure.checkpointers.person_rows import PersonRows
from perdure.checkpointers.records import CronRow
from perdure.effects import run
from perdure.errors import StorageUnavailable, UnknownPerson, UnknownThread
from perdure.memory.person_archive import iter_archive
from perdure.memory.person_namespaces import (
    PersonNamespaces,
    check_templates,
    find_person_namespaces,
    forget_person,
)
from perdure.memory.person_quotations import (
    QuotationFinder,
    find_quoting_threads,
    iter_cron_texts,
    iter_item_texts,
    iter_messages,
    read_human_texts,
)
from perdure.memory.records import RESERVED_LABEL, StoreAdapter
from perdure.settings import check_user
from perdure.stores.base import Namespace, Receipt
from perdure.stores.whole_store import WholeStore

__all__ = ["Part", "Report", "aexport", "aforget", "aplan", "export", "forget", "plan"]

ERASED: Final = (
    *("threads", "messages", "checkpoints", "runs", "crons", "webhooks", "items", "versions"),
)
"""What is erased, in the order in which a report lists it."""
_LINES: Final = 100  # lines of an archive that are read at once for a coroutine
_ROUNDS: Final = 3  # how often what others write meanwhile is erased
_PAUSE_S: Final = 0.05  # between two looks at runs that were cancelled


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of what belongs to a person, or has to do with one.

    Attributes:
        what: A plural noun, such as `"threads"`.
        ids: The ids of threads, runs, crons and assistants; the namespaces of items, with labels
            joined by `/`. Empty where there are too many to name.
        number: How many, if that is not the number of ids.
    """

    what: str
    ids: tuple[str, ...] = ()
    number: int | None = None

    @property
    def count(self) -> int:
        """How many."""
        return len(self.ids) if self.number is None else self.number


@dataclass(frozen=True, slots=True)
class Report:
    """What `forget` erased, or would erase.

    Attributes:
        user: The name of the person.
        erased: What was erased, by kind.
        kept: What has to do with the person, belongs to others, and was kept.
        hashes: Hashes of the messages and values that were erased, which can prove that a text was
            among them. A plan has none.
        scrubbed: Whether the bytes of the file and its WAL hold none of it. Postgres overwrites no
            bytes.
        dry_run: Whether nothing was written.
        by_owner: The ids of those of the erased threads that name no user. They count as the
            person's only because their `owner` has the person's name.
    """

    user: str
    erased: tuple[Part, ...]
    kept: tuple[Part, ...] = ()
    hashes: tuple[str, ...] = ()
    scrubbed: bool = False
    dry_run: bool = False
    by_owner: tuple[str, ...] = ()

    def count(self, what: str) -> int:
        """Return how many of one kind were erased."""
        return sum(part.count for part in self.erased if part.what == what)


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
    """Yield the archive of a person, an object for each line of JSON.

    It has the threads with all branches, the items with all versions (memories, profile,
    instructions, examples, chat memory and notes), and the runs and crons as a record; see
    docs/people.md. Others may write meanwhile: each thread and each key is as it was at one moment.

    Args:
        user: The name of the person.
        saver: The threads.
        store: The items.
        namespaces: Further templates with the label `"{user_id}"`, as in `("notes", "{user_id}")`.
        thread_ids: Only these of the person's threads. None means all.
        owners_are_people: Whether the `owner` of a thread without a user is a person. False means
            that it is an organisation, which a handler of an Auth file sets. None means False if
            the database has ever been served with an Auth file, and True otherwise.
        conversations_by_id: Whether a conversation in `("chat_memory", ID)` belongs to the person
            if ID is the id of one of the person's threads. On a server, users choose the ids of
            their threads, so only the conversation with the person's name is certain.

    Raises:
        UnknownPerson: Nothing belongs to a person of this name.
    """
    rows = _rows_of(user, saver, owners_are_people, thread_ids)
    threads, found = _find(rows, store, namespaces, conversations_by_id)
    return iter_archive(rows, saver, store, threads, found)


async def aexport(*args: Any, **options: Any) -> AsyncIterator[dict[str, Any]]:
    """See `export`."""
    lines = await asyncio.to_thread(export, *args, **options)
    while page := await asyncio.to_thread(lambda: list(islice(lines, _LINES))):
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
    """Return what `forget` with these arguments would erase now. Nothing is written or locked.

    Raises:
        UnknownPerson: Nothing belongs to a person of this name.
    """
    rows = _rows_of(user, saver, owners_are_people, thread_ids)
    how = looks_elsewhere, hand_over, conversations_by_id
    return _Run(rows, saver, store, namespaces, *how).plan()


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
    """Erase everything that belongs to a person, also from the bytes of the file.

    First the person's crons are deleted, and the runs are cancelled and waited for. Then the items
    and the threads are erased. If the call is cut off at any moment, repeat it.

    Args:
        user: The name of the person.
        saver: The threads.
        store: The items.
        namespaces: Further templates with the label `"{user_id}"`, as in `("notes", "{user_id}")`.
        thread_ids: Only these of the person's threads. None means all.
        looks_elsewhere: Whether to look for quotations and other traces in what belongs to other
            people, which are only listed. All messages of other people are read for that.
        owners_are_people: See `export`.
        hand_over: Whether what the person wrote into the memories of teams is kept, without the
            name. Otherwise it is erased.
        conversations_by_id: See `export`.
        timeout_s: Seconds to wait for all runs that were cancelled, and for the lock of a thread.

    Raises:
        UnknownPerson: Nothing belongs to a person of this name.
        StorageUnavailable: A run of the person does not end, or a thread is locked. What was erased
            until then stays erased.
    """
    rows = _rows_of(user, saver, owners_are_people, thread_ids)
    how = looks_elsewhere, hand_over, conversations_by_id
    return _Run(rows, saver, store, namespaces, *how).forget(timeout_s)


def without_namespaces(report: Report, seen: Collection[str]) -> Report:
    """Return a report that lists, of the namespaces that were kept, only those in `seen`."""
    kept = (
        replace(part, ids=tuple(each for each in part.ids if each in seen))
        if part.what == "namespaces"
        else part
        for part in report.kept
    )
    return replace(report, kept=tuple(part for part in kept if part.count))


async def aplan(*args: Any, **options: Any) -> Report:
    """See `plan`."""
    return await asyncio.to_thread(plan, *args, **options)


async def aforget(*args: Any, **options: Any) -> Report:
    """See `forget`."""
    return await asyncio.to_thread(forget, *args, **options)


@dataclass(slots=True)
class _Run:
    """One pass over the database."""

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
    owned: list[str] = field(default_factory=list)
    by_owner: tuple[str, ...] = ()

    def plan(self) -> Report:
        """Look at everything once."""
        threads, found = self._find()
        self._note_owned(threads)
        kept = self._find_kept(threads, found)
        for cron in self.rows.list_crons(frozenset(threads))[0]:
            self._count("crons", cron.cron_id)
        for run_id in self.rows.list_webhook_run_ids():
            self._count("webhooks", run_id)
        self._forget_items(threads, dry_run=True)
        for thread_id in threads:
            self._measure(thread_id)
        return self._report(kept, scrubbed=False, dry_run=True)

    def forget(self, timeout_s: float) -> Report:
        """Erase everything, and again what others have written meanwhile."""
        try:
            threads, found = self._find()
        except UnknownPerson:
            self._scrub()  # an earlier call may have been cut off before it
            raise
        self._note_owned(threads)
        kept = self._find_kept(threads, found)
        for _ in range(_ROUNDS):
            self._stop(threads, timeout_s)
            # the items before the threads, which tell the conversations in `chat_memory`
            self._forget_items(threads, dry_run=False)
            for thread_id in threads:
                self._erase_thread(thread_id, timeout_s)
            try:
                threads, _ = self._find()
            except UnknownPerson:
                break
        return self._report(kept, scrubbed=self._scrub(), dry_run=False)

    def _find(self) -> tuple[list[str], PersonNamespaces]:
        return _find(self.rows, self.store, self.namespaces, self.conversations_by_id)

    def _note_owned(self, threads: list[str]) -> None:
        """Note which of the threads belong to the person only because of their owner."""
        self.owned = self.rows.list_threads_by_owner()
        self.by_owner = tuple(each for each in self.owned if each in {*threads})

    def _stop(self, threads: list[str], timeout_s: float) -> None:
        """Delete the crons, and cancel the runs and wait until they have ended."""
        own, until = frozenset(threads), time.monotonic() + timeout_s
        for cron in self.rows.list_crons(own)[0]:
            self.rows.delete_cron(cron)
            self._count("crons", cron.cron_id)
        for live in self.rows.list_live_runs(own):
            self.rows.cancel_run(live)
        while executing := [
            live for live in self.rows.list_live_runs(own) if self.rows.is_executing(live)
        ]:
            if time.monotonic() > until:
                raise StorageUnavailable(
                    f"run {executing[0].run_id!r} of thread {executing[0].thread_id!r} was "
                    f"cancelled and goes on after {timeout_s:g} s; forget {self.rows.user!r} again "
                    "once it has ended"
                )
            time.sleep(_PAUSE_S)
        for run_id in self.rows.list_webhook_run_ids():
            self.rows.delete_webhook(run_id)
            self._count("webhooks", run_id)

    def _forget_items(self, threads: list[str], *, dry_run: bool) -> None:
        receipt: Receipt = run(
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
        self.ids["items"] += [_format(namespace) for namespace in receipt.namespaces]
        self.hashes |= {*receipt.hashes}

    def _erase_thread(self, thread_id: str, timeout_s: float) -> None:
        with self.saver.lock(thread_id, timeout_s=timeout_s):
            self._measure(thread_id)
            self.hashes |= {*self.rows.erase_thread(thread_id).hashes}

    def _measure(self, thread_id: str) -> None:
        """Count what is in a thread."""
        self._count("threads", thread_id)
        self.counts["runs"] += len(self.rows.list_runs(thread_id))
        with suppress(UnknownThread):  # it has no checkpoint
            self.counts["checkpoints"] += self.saver.thread(thread_id).checkpoints
        self.counts["messages"] += sum(1 for _ in iter_messages(self.saver, thread_id))

    def _count(self, what: str, id: str) -> None:
        if id not in self.ids[what]:
            self.counts[what] += 1
            self.ids[what].append(id)

    def _scrub(self) -> bool:
        """Overwrite the bytes of what was erased, and return whether none of it is left."""
        return all([self.saver.database.scrub(), self.store.database.scrub()])

    def _find_kept(self, threads: list[str], found: PersonNamespaces) -> tuple[Part, ...]:
        """Find what has to do with the person and belongs to others."""
        kept = [Part("namespaces", tuple(map(_format, found.others)))]
        if self.looks_elsewhere:
            own = frozenset(threads)
            owned = tuple(each for each in self.owned if each not in own)
            plain = [each for each in found.own if each[0] != RESERVED_LABEL]
            crons, crons_elsewhere = self.rows.list_crons(own)
            quoted, sent = self._find_quotations(threads, plain, crons)
            runs = self.rows.list_runs_on_other_threads(own)
            kept += [
                Part("threads of this owner", owned),
                Part("threads with quotations", quoted),
                Part("threads with the message of a cron", sent),
                Part(
                    "threads of others with the name",
                    tuple(self.rows.list_other_threads_naming_person(own)),
                ),
                Part("memories of others", tuple(self._find_memories_of_others(own, found))),
                Part("runs on threads of others", tuple(each.live.run_id for each in runs)),
                Part("crons on threads of others", tuple(each.cron_id for each in crons_elsewhere)),
                Part("assistants", tuple(self.rows.list_assistants())),
            ]
        return tuple(part for part in kept if part.count)

    def _find_quotations(
        self, threads: list[str], namespaces: list[Namespace], crons: list[CronRow]
    ) -> list[tuple[str, ...]]:
        """Find the threads of others that contain a text of the person, or a cron's message.

        A text that somebody else sent on the person's threads is no text of the person.
        """
        said, sent = read_human_texts(self.saver, threads), frozenset(iter_cron_texts(crons))
        own = chain(said.own, map(str.strip, iter_item_texts(self.store, namespaces)))
        texts = (each for each in own if each not in said.foreign and each not in sent)
        finders = [QuotationFinder(texts), QuotationFinder(sent)]
        others = self.rows.iter_other_threads(frozenset(threads))
        return find_quoting_threads(self.saver, others, finders)

    def _find_memories_of_others(
        self, own: frozenset[str], found: PersonNamespaces
    ) -> Iterator[str]:
        """Yield the items of other people that rest on the person's threads."""
        if own:
            source, written = {"thread_id": {"$in": sorted(own)}}, frozenset(found.authored_items)
            for namespace, key in self.store.forget((), provenance=source, dry_run=True).keys:
                is_own = (namespace, key) in written and not self.hand_over
                if not is_own and not any(namespace[: len(each)] == each for each in found.own):
                    yield _format((*namespace, key))

    def _report(self, kept: tuple[Part, ...], *, scrubbed: bool, dry_run: bool) -> Report:
        erased = (
            Part(what, tuple(dict.fromkeys(self.ids[what])), self.counts[what])
            for what in ERASED
            if self.counts[what]
        )
        if handed := self.counts["handed over"]:
            kept = (*kept, Part("items of teams without the name", number=handed))
        hashes = () if dry_run else tuple(sorted(self.hashes))
        rest = hashes, scrubbed, dry_run, self.by_owner
        return Report(self.rows.user, tuple(erased), kept, *rest)


def _format(labels: Sequence[str]) -> str:
    return "/".join(labels)


def _rows_of(
    user: str,
    saver: Checkpointer,
    owners_are_people: bool | None,
    thread_ids: Collection[str] | None,
) -> PersonRows:
    check_user("user", user, "give the name of the person")
    only = None if thread_ids is None else frozenset(thread_ids)
    if owners_are_people is None:
        owners_are_people = not has_organisations(saver)
    return PersonRows(saver, user, owners_are_people=owners_are_people, only=only)


def _find(
    rows: PersonRows,
    store: WholeStore,
    namespaces: Sequence[Sequence[str]],
    conversations_by_id: bool,
) -> tuple[list[str], PersonNamespaces]:
    """Find the threads and namespaces of a person.

    Raises:
        UnknownPerson: There are none, and no crons either.
    """
    threads, templates = rows.list_threads(), check_templates(namespaces)
    conversations = threads if conversations_by_id else None
    found: PersonNamespaces = run(
        find_person_namespaces(StoreAdapter(store), rows.user, templates, conversations)
    )
    if not (threads or found.own or found.authored_items or rows.list_crons(frozenset())[0]):
        raise unknown(rows.user, rows.list_threads_by_owner())
    return threads, found


def unknown(user: str, owned: Sequence[str] = ()) -> UnknownPerson:
    """Build the error for a name that nothing belongs to.

    Args:
        user: The name.
        owned: The ids of the threads whose `owner` has the name, if owners are no people.
    """
    advice = "names are compared exactly, 'perdure threads' shows whose threads there are"
    if owned:
        advice = (
            f"the owner of {', '.join(map(repr, owned[:3]))} has this name and counts as an "
            "organisation; if it is a person, pass --owners people or owners_are_people=True"
        )
    return UnknownPerson(
        f"nobody of this name: no thread, item or cron belongs to {user!r}; {advice}"
    )
