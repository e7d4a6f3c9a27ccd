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
        known = self.message_id is not None
        at = {"message": self.message_id} if known else {"position": self.position}
        return f"/ui/{'thread' if known else 'message'}?{urlencode({'id': self.thread_id, **at})}"

    def excerpt(self, longest: int = 240) -> list[tuple[str, bool]]:
        """The text around the first mark in pieces, each with whether it is marked."""
        first = self.marks[0][0] if self.marks else 0
        start = max(0, min(first - _EXCERPT_LEAD_CHARS, len(self.text) - longest))
        end = min(len(self.text), start + longest)
        cuts = [start, *(min(at, end) for at in chain(*self.marks)), end]
        pieces = [(self.text[at:to], n % 2 == 1) for n, (at, to) in enumerate(pairwise(cuts))]
        around = ("…" if start else "", False), ("…" if end < len(self.text) else "", False)
        return [piece for piece in (around[0], *pieces, around[1]) if piece[0]]

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
        self.total, self.done = total, 0
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
        place, of_store = saver.database.location, store.database.location
        if place is None or place != of_store:
            raise ConfigurationError(
                f"the store is in {store.database.path!r}, the threads in {saver.database.path!r}; "
                "expected a store in their database, which is not in memory: what is searched is "
                "kept there, as it goes with its thread. SQLiteStore.open(path of the threads)"
            )
        kept: TranscriptSearch = vars(saver).get(_SEARCH_ATTRIBUTE) or TranscriptSearch(
            saver, store
        )
        return vars(saver).setdefault(_SEARCH_ATTRIBUTE, kept)  # type: ignore[no-any-return]

    def search(
        self,
        text: str,
        within: VisibleThreads = VisibleThreads(),
        limit: int = SEARCH_LIMIT,
        *,
        wait_s: float | None = None,
        progress: Progress | None = None,
    ) -> ThreadHits:
        """See `search_threads`."""
        unread = self._index_changed_threads(within, wait_s, progress or (lambda done, total: None))
        return ThreadHits(self._find_hits(text, within, limit), unread)

    # -- searching

    def _find_hits(self, text: str, within: VisibleThreads, limit: int) -> list[ThreadHit]:
        place = () if within.owner is None else (self._hash_owner(within.owner),)
        hits, seen, start, size = list[ThreadHit](), set[str](), 0, _PAGE_SIZE
        while len(hits) < limit:
            found = self._said.search(
                place, query=text, mode="text", context=False, limit=size, offset=start
            )
            best: dict[str, FoundItem] = {}
            for item in found:
                source = item.provenance
                if source and source.thread_id and source.thread_id not in seen:
                    best.setdefault(source.thread_id, item)
            seen |= best.keys()
            threads = self._find_visible_threads(within, ids=[*best])
            hits += [_build_hit(text, best[id], threads[id]) for id in best if id in threads]
            if len(found) < size:
                break
            start, size = start + size, 4 * size
        return hits[:limit]

    def _find_visible_threads(self, within: VisibleThreads, **also: Any) -> dict[str, ListedThread]:
        """Those that may be seen and meet other conditions too, by their ids."""
        query = replace(within.query, **also)
        found = self._list.search(query, lambda t: t if within.match(t) else None, 1 << 31)
        return {thread.thread_id: thread for thread in found}

    def _hash_owner(self, owner: object) -> str:
        """The namespace of an owner, who is named by no clear text."""
        data = repr(owner).encode(errors="surrogatepass")
        return blake2b(data, digest_size=16, key=self._saver._seal.hash_key).hexdigest()

    # -- reading

    def _index_changed_threads(
        self, within: VisibleThreads, wait_s: float | None, progress: Progress
    ) -> int:
        """Read what changed; returns how many threads are left when the time is over."""
        end = math.inf if wait_s is None else time.monotonic() + wait_s
        for _ in range(2):  # one that is under way may not know of the newest
            threads = self._find_visible_threads(within, is_unindexed=True)
            if not threads or self._database.read_only:
                return len(threads)
            reading = self._get_indexing_job(within.owner, threads)
            while not reading.future.done() and (left := end - time.monotonic()) > 0:
                wait([reading.future], min(_TICK_S, left))
                progress(reading.done, reading.total)
            if not reading.future.done():
                return reading.total - reading.done
            reading.future.result()
        return len(self._find_visible_threads(within, is_unindexed=True))

    def _get_indexing_job(
        self, owner: Hashable, threads: Mapping[str, ListedThread]
    ) -> _IndexingJob:
        """The reading that is under way for an owner, or a new one."""
        with self._lock:
            if reading := self._readings.get(owner):
                return reading
            reading = _IndexingJob(len(threads))
            owners = [(id, thread.metadata.get("owner")) for id, thread in threads.items()]

            def work() -> None:
                try:
                    self._index_threads(reading, owners)
                finally:
                    with self._lock:
                        del self._readings[owner]

            # of daemons: who searches does not keep the process alive
            pool = ThreadPool(1, "perdure-thread-search", is_permanent=False)
            reading.future = pool.submit(work, is_async=False)
            self._readings[owner] = reading
            return reading

    def _index_threads(self, reading: _IndexingJob, owners: Sequence[tuple[str, Any]]) -> None:
        some = list[_IndexStep]()
        for number, (thread_id, owner) in enumerate(owners, 1):
            for part in self._iter_index_steps(thread_id, owner):
                some.append(part)
                if (
                    len(some) >= _THREADS_PER_TRANSACTION
                    or sum(len(p.items) for p in some) >= _MESSAGES_PER_TRANSACTION
                ):
                    self._write_steps(some)
                    some, reading.done = [], number
        self._write_steps(some)
        reading.done = reading.total

    def _iter_index_steps(self, thread_id: str, owner: Any) -> Iterator[_IndexStep]:
        """What of a thread was not read yet, in parts."""
        path = encode_path([self._hash_owner(owner)])
        try:
            read = self._saver._read(lambda: read_unindexed(self._saver._threads, thread_id, path))
        except (CorruptRecord, ForbiddenType, UnknownThread) as exc:
            _LOG.warning("thread %.80r is not searched: %s", thread_id, exc)
            known = self._database.read(lambda: read_progress(self._sql, thread_id))
            read = None if known is None else (known, [])
        before, items = read or (None, [])
        while before is not None:
            part, items = items[:_MESSAGES_PER_TRANSACTION], items[_MESSAGES_PER_TRANSACTION:]
            position = part[-1][0].position + 1 if part else before.position_in(path)
            after = before._replace(position=position, path=path)
            yield _IndexStep(
                thread_id, before, after if not items else after._replace(version_token=-1), part
            )
            before = after if items else None

    def _write_steps(self, some: Sequence[_IndexStep]) -> None:
        """Keep messages, and how far their threads were read, in one transaction."""
        if not some:
            return
        steps = [part[:3] for part in some]
        puts = [self._parts.prepare_batch(self._iter_puts(part)) for part in some]

        def flow() -> Flow[None]:
            done = yield from save_progress(self._sql, steps)
            if written := [*chain(*compress(puts, done))]:
                yield from self._parts.writer.write_puts(written, self._parts.now())

        # ids of a namespace grow: who adds to one waits for others
        names = {part.thread_id for part in some} | {repr(part.after.path) for part in some}
        self._database.write(flow, exclusive_names=[*names], watch=self._saver._watch)

    def _iter_puts(self, part: _IndexStep) -> Iterator[PutItem]:
        label = (part.after.path or b"").decode().rstrip("\0")
        for item, at in part.items:
            message = item.value
            said = ThreadMessage(message, getattr(message, "id", None) or "")
            is_searched = isinstance(message, BaseMessage) and said.role in ("user", "assistant")
            if is_searched and said.searched_text:
                value = {"text": said.searched_text[:_MAX_MESSAGE_CHARS], "role": said.role}
                source = Provenance(
                    thread_id=part.thread_id,
                    message_ids=(said.id,) if said.id else (),
                    position=item.position,
                    at=parse_time(message.response_metadata.get("create_time")) or parse_time(at),
                )
                key = build_message_key(part.after.thread, item.position)
                yield PutItem((label,), key, value, provenance=source)


def _build_hit(text: str, item: FoundItem, thread: ListedThread) -> ThreadHit:
    source, said = item.provenance or Provenance(), item.value["text"]
    return ThreadHit(
        thread.thread_id,
        thread.display_title,
        item.value["role"],
        said,
        source.at,
        find_marks(said, text),
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
    there, words, inside, name = (
        set(tokenize(text)),
        extract_query_words(query),
        set[int](),
        detect_language(text),
    )
    wanted = {*words, *words.values()}
    for word in filter(is_misspellable, wanted - there):
        wanted |= {*find_nearest_words(word, there)}
    for run in _WORD.finditer(text):
        parts = tokenize(run[0])
        stemmed = (stem for _, stem in iter_stems(run[0], name))
        for part in wanted.intersection(chain(parts, stemmed)):
            # of a script without spaces, and of words joined by marks, only the part
            form = re.escape(part) if len(parts) > 1 else ".+"
            for at in re.finditer(form, run[0], re.IGNORECASE):
                inside |= {*range(run.start() + at.start(), run.start() + at.end())}
    begins = sorted(at for at in inside if at - 1 not in inside)
    return tuple(zip(begins, sorted(at + 1 for at in inside if at + 1 not in inside), strict=True))


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
    wanted = [
        (check_instance("a name in filter", name, str, "text"), metadata[name]) for name in metadata
    ]
    wanted += [] if user is None else [("owner", user)]

    def match(thread: ListedThread) -> bool:
        has = thread.metadata
        return all(name in has and has[name] == value for name, value in wanted)

    visible = VisibleThreads(ThreadQuery(dict(wanted)), match)
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
