"""Search of what was said in threads, by its words. Nothing of it is recalled into a prompt.

The messages are items of their own tables in the database of the threads, in a namespace for each
owner. A search reads the threads that have changed since another one did, and first of all those of
the visible; what removes messages from a thread removes them here in the same transaction.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from datetime import datetime
from hashlib import blake2b
from itertools import chain, compress, pairwise
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from langchain_core.messages import BaseMessage

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.reports import HistoryItem
from perdure.checkpointers.said import (
    IndexProgress,
    build_message_key,
    drop_some_indexes,
    read_progress,
    read_unindexed,
    save_progress,
)
from perdure.checkpointers.thread_list import ListedThread, ThreadList, ThreadQuery
from perdure.errors import (
    ConfigurationError,
    CorruptRecord,
    ForbiddenType,
    UnknownThread,
)
from perdure.memory.options import check_instance, check_seconds, check_text, check_whole_number
from perdure.memory.thread_messages import ThreadMessage, parse_time
from perdure.settings import SEARCH_LIMIT, check_user
from perdure.storage.flow import Flow
from perdure.storage.threads import ThreadPool
from perdure.stores.base import FoundItem, Provenance, PutItem
from perdure.stores.namespaces import encode_path
from perdure.stores.parts import TRANSCRIPT_PREFIX
from perdure.stores.store import Store
from perdure.stores.text import (
    detect_language,
    extract_query_words,
    find_nearest_words,
    is_misspellable,
    iter_stems,
    tokenize,
)

_LOG = logging.getLogger("perdure")
_MESSAGES_PER_TRANSACTION: Final = 400  # that are written in one transaction, about
_THREADS_PER_TRANSACTION: Final = 60  # of one transaction
_MAX_MESSAGE_CHARS: Final = 100_000  # characters of a message that are searched
_PAGE_SIZE: Final = 64  # messages that are looked at first
_SEARCH_ATTRIBUTE: Final = "_thread_search"  # the attribute of a checkpointer
_TICK_S: Final = 0.1
_EXCERPT_LEAD_CHARS: Final = 40  # characters of an excerpt before its first marked word
_WORD: Final = re.compile(r"\w(?:[\w'\u2019,]*\w)?")
Progress = Callable[[int, int], object]


@dataclass(frozen=True, slots=True)
class ThreadHit:
    """A thread and the message in it that answers a search best.

    Attributes:
        title: That of the thread, as lists show it.
        role, text: Of the message.
        at: When it was said (UTC); None: not known.
        marks: Where words of the search are in the text: from, up to.
        message_id: The message's; None: it has none.
        position: The message's place in the thread's log: that of its item in `saver.history()`.
        score: How well it answers.
    """

    thread_id: str
    title: str
    role: str
    text: str
    at: datetime | None
    marks: tuple[tuple[int, int], ...]
    message_id: str | None
    position: int
    score: float = field(compare=False)

    @property
    def link(self) -> str:
        """The path of the message on the pages of `perdure serve`."""
        has_message_id = self.message_id is not None
        page = "thread" if has_message_id else "message"
        position = {"message": self.message_id} if has_message_id else {"position": self.position}
        return f"/ui/{page}?{urlencode({'id': self.thread_id, **position})}"

    def excerpt(self, max_chars: int = 240) -> list[tuple[str, bool]]:
        """The text around the first mark in pieces, each with whether it is marked."""
        first = self.marks[0][0] if self.marks else 0
        start = max(0, min(first - _EXCERPT_LEAD_CHARS, len(self.text) - max_chars))
        end = min(len(self.text), start + max_chars)
        cuts = [start, *(min(at, end) for at in chain(*self.marks)), end]
        pieces = [(self.text[at:to], n % 2 == 1) for n, (at, to) in enumerate(pairwise(cuts))]
        ellipses = ("…" if start else "", False), ("…" if end < len(self.text) else "", False)
        return [piece for piece in (ellipses[0], *pieces, ellipses[1]) if piece[0]]

    @property
    def marked(self) -> str:
        """The excerpt on one line, with asterisks around what is marked."""
        pieces = (f"**{piece}**" if marked else piece for piece, marked in self.excerpt())
        return " ".join("".join(pieces).split())

    def __str__(self) -> str:
        when = f", {self.at:%Y-%m-%d}" if self.at else ""
        return f"{self.thread_id} ({self.title}{when}) {self.role}: {self.marked}"


class ThreadHits(list[ThreadHit]):
    """The threads that a search finds, the best first.

    Attributes:
        unread: How many threads it has not read to their end yet: the next search may find more.
    """

    def __init__(self, hits: Sequence[ThreadHit] = (), unread: int = 0) -> None:
        super().__init__(hits)
        self.unread = unread


@dataclass(frozen=True, slots=True)
class VisibleThreads:
    """Who searches: the threads that they may see.

    Attributes:
        query, match: Which threads those are, as lists are asked for them.
    """

    query: ThreadQuery = field(default_factory=ThreadQuery)
    match: Callable[[ListedThread], object] = lambda thread: True

    @property
    def owner(self) -> str | None:
        """Whose they all are; None: several people's."""
        owner = (self.query.metadata or {}).get("owner")
        return owner if isinstance(owner, str) else None


class _IndexStep(NamedTuple):
    """A part of a thread that is to be written."""

    thread_id: str
    before: IndexProgress
    after: IndexProgress
    items: Sequence[tuple[HistoryItem, float]]


class _IndexingJob:
    """The work of reading threads, in the background."""

    def __init__(self, total: int) -> None:
        self.total, self.done_count = total, 0
        self.future: Future[None] = Future()


class TranscriptSearch:
    """Searches of what was said in the threads of a checkpointer.

    Args:
        saver: One of perdure's.
        store: One in the same database: what is searched is kept in tables of its own.
    """

    def __init__(self, saver: Checkpointer, store: Store) -> None:
        self._saver, self._list = saver, ThreadList(saver)
        self._database, self._sql = saver.database, saver._sql
        self._parts = store._parts.for_other_tables(TRANSCRIPT_PREFIX, saver.database, saver._seal)
        self._said = Store(self._parts)
        self._lock, self._readings = threading.Lock(), dict[Hashable, _IndexingJob]()

    @staticmethod
    def for_checkpointer(saver: Checkpointer, store: Store) -> TranscriptSearch:
        """That of a checkpointer, which it has as long as it lives: an index is kept in memory.

        Raises:
            ConfigurationError: They are not perdure's, or not in one database.
        """
        expected = "one of perdure: SQLiteCheckpointer.open(path)"
        check_instance("saver", saver, Checkpointer, expected)
        check_instance("store", store, Store, "one of perdure: SQLiteStore.open(path)")
        saver.database.connect()
        store.database.connect()
        location, store_location = saver.database.location, store.database.location
        if location is None or location != store_location:
            raise ConfigurationError(
                f"the store is in {store.database.path!r}, the threads in {saver.database.path!r}; "
                "expected a store in their database, which is not in memory: what is searched is "
                "kept there, as it goes with its thread. SQLiteStore.open(path of the threads)"
            )
        search: TranscriptSearch = vars(saver).get(_SEARCH_ATTRIBUTE) or TranscriptSearch(
            saver, store
        )
        return vars(saver).setdefault(_SEARCH_ATTRIBUTE, search)  # type: ignore[no-any-return]

    def search(
        self,
        text: str,
        visible: VisibleThreads = VisibleThreads(),
        limit: int = SEARCH_LIMIT,
        *,
        wait_s: float | None = None,
        progress: Progress | None = None,
    ) -> ThreadHits:
        """See `search_threads`."""
        unread = self._index_changed_threads(
            visible, wait_s, progress or (lambda done, total: None)
        )
        return ThreadHits(self._find_hits(text, visible, limit), unread)

    # -- searching

    def _find_hits(self, text: str, visible: VisibleThreads, limit: int) -> list[ThreadHit]:
        prefix = () if visible.owner is None else (self._hash_owner(visible.owner),)
        hits, seen_threads, start, size = list[ThreadHit](), set[str](), 0, _PAGE_SIZE
        while len(hits) < limit:
            items = self._said.search(
                prefix, query=text, mode="text", context=False, limit=size, offset=start
            )
            best: dict[str, FoundItem] = {}
            for item in items:
                source = item.provenance
                if source and source.thread_id and source.thread_id not in seen_threads:
                    best.setdefault(source.thread_id, item)
            seen_threads |= best.keys()
            threads = self._find_visible_threads(visible, ids=[*best])
            hits += [_build_hit(text, best[id], threads[id]) for id in best if id in threads]
            if len(items) < size:
                break
            start, size = start + size, 4 * size
        return hits[:limit]

    def _find_visible_threads(
        self, visible: VisibleThreads, **query_options: Any
    ) -> dict[str, ListedThread]:
        """Those that may be seen and meet other conditions too, by their ids."""
        query = replace(visible.query, **query_options)
        threads = self._list.search(query, lambda t: t if visible.match(t) else None, 1 << 31)
        return {thread.thread_id: thread for thread in threads}

    def _hash_owner(self, owner: object) -> str:
        """The namespace of an owner, who is named by no clear text."""
        data = repr(owner).encode(errors="surrogatepass")
        return blake2b(data, digest_size=16, key=self._saver._seal.hash_key).hexdigest()

    # -- reading

    def _index_changed_threads(
        self, visible: VisibleThreads, wait_s: float | None, progress: Progress
    ) -> int:
        """Read what changed; returns how many threads are left when the time is over."""
        end = math.inf if wait_s is None else time.monotonic() + wait_s
        for _ in range(2):  # one that is under way may not know of the newest
            threads = self._find_visible_threads(visible, is_unindexed=True)
            if not threads or self._database.read_only:
                return len(threads)
            job = self._get_indexing_job(visible.owner, threads)
            while not job.future.done() and (seconds_left := end - time.monotonic()) > 0:
                wait([job.future], min(_TICK_S, seconds_left))
                progress(job.done_count, job.total)
            if not job.future.done():
                return job.total - job.done_count
            job.future.result()
        return len(self._find_visible_threads(visible, is_unindexed=True))

    def _get_indexing_job(
        self, owner: Hashable, threads: Mapping[str, ListedThread]
    ) -> _IndexingJob:
        """The reading that is under way for an owner, or a new one."""
        with self._lock:
            if job := self._readings.get(owner):
                return job
            job = _IndexingJob(len(threads))
            owners = [(id, thread.metadata.get("owner")) for id, thread in threads.items()]

            def index_and_remove_job() -> None:
                try:
                    self._index_threads(job, owners)
                finally:
                    with self._lock:
                        del self._readings[owner]

            # of daemons: who searches does not keep the process alive
            pool = ThreadPool(1, "perdure-thread-search", is_permanent=False)
            job.future = pool.submit(index_and_remove_job, is_async=False)
            self._readings[owner] = job
            return job

    def _index_threads(self, job: _IndexingJob, owners: Sequence[tuple[str, Any]]) -> None:
        steps = list[_IndexStep]()
        for number, (thread_id, owner) in enumerate(owners, 1):
            for step in self._iter_index_steps(thread_id, owner):
                steps.append(step)
                if (
                    len(steps) >= _THREADS_PER_TRANSACTION
                    or sum(len(p.items) for p in steps) >= _MESSAGES_PER_TRANSACTION
                ):
                    self._write_steps(steps)
                    steps, job.done_count = [], number
        self._write_steps(steps)
        job.done_count = job.total

    def _iter_index_steps(self, thread_id: str, owner: Any) -> Iterator[_IndexStep]:
        """What of a thread was not read yet, in parts."""
        path = encode_path([self._hash_owner(owner)])
        try:
            unread_items = self._saver._read(
                lambda: read_unindexed(self._saver._threads, thread_id, path)
            )
        except (CorruptRecord, ForbiddenType, UnknownThread) as exc:
            _LOG.warning("thread %.80r is not searched: %s", thread_id, exc)
            progress = self._database.read(lambda: read_progress(self._sql, thread_id))
            unread_items = None if progress is None else (progress, [])
        before, items = unread_items or (None, [])
        while before is not None:
            part, items = items[:_MESSAGES_PER_TRANSACTION], items[_MESSAGES_PER_TRANSACTION:]
            position = part[-1][0].position + 1 if part else before.position_in(path)
            after = before._replace(position=position, path=path)
            yield _IndexStep(
                thread_id, before, after if not items else after._replace(version_token=-1), part
            )
            before = after if items else None

    def _write_steps(self, steps: Sequence[_IndexStep]) -> None:
        """Keep messages, and how far their threads were read, in one transaction."""
        if not steps:
            return
        advances = [step[:3] for step in steps]
        puts = [self._parts.prepare_batch(self._iter_puts(step)) for step in steps]

        def flow() -> Flow[None]:
            are_advanced = yield from save_progress(self._sql, advances)
            if puts_to_write := [*chain(*compress(puts, are_advanced))]:
                yield from self._parts.writer.write_puts(puts_to_write, self._parts.now())

        # ids of a namespace grow: who adds to one waits for others
        names = {step.thread_id for step in steps} | {repr(step.after.path) for step in steps}
        self._database.write(flow, exclusive_names=[*names], watch=self._saver._watch)

    def _iter_puts(self, step: _IndexStep) -> Iterator[PutItem]:
        label = (step.after.path or b"").decode().rstrip("\0")
        for item, stored_at in step.items:
            message = item.value
            thread_message = ThreadMessage(message, getattr(message, "id", None) or "")
            is_searched = isinstance(message, BaseMessage) and thread_message.role in (
                "user",
                "assistant",
            )
            if is_searched and thread_message.searched_text:
                value = {
                    "text": thread_message.searched_text[:_MAX_MESSAGE_CHARS],
                    "role": thread_message.role,
                }
                source = Provenance(
                    thread_id=step.thread_id,
                    message_ids=(thread_message.id,) if thread_message.id else (),
                    position=item.position,
                    at=parse_time(message.response_metadata.get("create_time"))
                    or parse_time(stored_at),
                )
                key = build_message_key(step.after.thread_key, item.position)
                yield PutItem((label,), key, value, provenance=source)


def _build_hit(text: str, item: FoundItem, thread: ListedThread) -> ThreadHit:
    source, message_text = item.provenance or Provenance(), item.value["text"]
    return ThreadHit(
        thread.thread_id,
        thread.display_title,
        item.value["role"],
        message_text,
        source.at,
        find_marks(message_text, text),
        next(iter(source.message_ids), None),
        source.position or 0,
        item.score or 0.0,
    )


def find_marks(text: str, query: str) -> tuple[tuple[int, int], ...]:
    """Where words of a query are in a text, in any form; of a misspelt one, the word it is meant.

    >>> marks("She runs; he ran to the shop.", "running shops")
    ((4, 8), (24, 28))
    >>> marks("我喜欢聊天记忆", "聊天")
    ((3, 5),)
    """
    text_words, query_words, marked_positions, language = (
        set(tokenize(text)),
        extract_query_words(query),
        set[int](),
        detect_language(text),
    )
    wanted_words = {*query_words, *query_words.values()}
    for word in filter(is_misspellable, wanted_words - text_words):
        wanted_words |= {*find_nearest_words(word, text_words)}
    for run in _WORD.finditer(text):
        parts = tokenize(run[0])
        stemmed = (stem for _, stem in iter_stems(run[0], language))
        for part in wanted_words.intersection(chain(parts, stemmed)):
            # of a script without spaces, and of words joined by marks, only the part
            form = re.escape(part) if len(parts) > 1 else ".+"
            for at in re.finditer(form, run[0], re.IGNORECASE):
                marked_positions |= {*range(run.start() + at.start(), run.start() + at.end())}
    starts = sorted(at for at in marked_positions if at - 1 not in marked_positions)
    return tuple(
        zip(
            starts,
            sorted(at + 1 for at in marked_positions if at + 1 not in marked_positions),
            strict=True,
        )
    )


def search_threads(
    saver: Checkpointer,
    store: Store,
    text: str,
    *,
    user: str | None = None,
    filter: Mapping[str, Any] | None = None,
    limit: int = SEARCH_LIMIT,
    wait_s: float | None = None,
    progress: Progress | None = None,
) -> ThreadHits:
    """Threads by what was said in them, the best first, each with the message that answers best.

    It goes by words, in any form, whatever the slips. The first search reads all threads that the
    user may see, the latest first, later ones those that have changed. What it keeps is in tables
    of its own, which nothing else reads: no prompt, no recall and no search of the store. It goes
    with the thread and the message. Messages with `{"remember": False}` in their
    `response_metadata`, those of tools and of the system are not searched.

    Args:
        saver: One of perdure's.
        store: One of perdure's, in the same database.
        text: Words that were said.
        user: Only threads of theirs: with this `owner`, else this `user_id`. None: all.
        filter: Only threads whose metadata has these values.
        limit: How many threads at most.
        wait_s: How long to wait while threads are read. Then it searches what is read by then, and
            says how many are left in `unread`; the reading goes on. None: until all are read.
        progress: Called while it waits with how many threads are read, and of how many.

    Raises:
        ConfigurationError: An argument is wrong, or the store is in another database.
    """
    check_text("text", text)
    if user is not None:
        check_user("user", user, "give None for all users")
    metadata = check_instance("filter", filter or {}, Mapping, "metadata like {'topic': 'boats'}")
    conditions = [
        (check_instance("a name in filter", name, str, "text"), metadata[name]) for name in metadata
    ]
    conditions += [] if user is None else [("owner", user)]

    def matches_conditions(thread: ListedThread) -> bool:
        thread_metadata = thread.metadata
        return all(
            name in thread_metadata and thread_metadata[name] == value for name, value in conditions
        )

    visible = VisibleThreads(ThreadQuery(dict(conditions)), matches_conditions)
    limit, wait_s = (
        check_whole_number("limit", limit, 1),
        None if wait_s is None else check_seconds("wait_s", wait_s),
    )
    search = TranscriptSearch.for_checkpointer(saver, store)
    return search.search(text, visible, limit, wait_s=wait_s, progress=progress)


async def asearch_threads(*args: Any, **options: Any) -> ThreadHits:
    """See `search_threads`."""
    return await asyncio.to_thread(search_threads, *args, **options)


def delete_transcript_index(saver: Checkpointer) -> None:
    """Remove what searches have kept of all threads; another search reads them again."""
    while saver.database.write(
        lambda: drop_some_indexes(saver._sql, _THREADS_PER_TRANSACTION), deletes_rows=True
    ):
        pass
    saver.database.shrink()
