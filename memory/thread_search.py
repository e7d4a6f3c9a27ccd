"""Search threads for words in their messages.

perdure never adds the messages that a search finds to a prompt by itself. The server's MCP tool
`search_threads` returns them to the model that calls the tool.

The search uses a full-text index, the transcript index. The transcript index is stored in the same
database as the threads, but in tables of its own. Its entries are store items, and each owner of
threads has one namespace. Each search first updates the index for the threads that are visible to
the caller and have changed since they were last indexed. A transaction that removes messages from a
thread also removes all of the thread's messages from the index. The next search indexes the
remaining messages again.
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
from perdure.checkpointers.collector import collector_paused
from perdure.checkpointers.reports import HistoryItem
from perdure.checkpointers.transcript_index import (
    IndexProgress,
    build_message_key,
    drop_and_count_transcript_indexes,
    read_index_progress,
    read_index_progress_and_unindexed_items_with_times,
    save_index_progress,
)
from perdure.errors import (
    ConfigurationError,
    CorruptRecord,
    ForbiddenType,
    UnknownThread,
)
from perdure.memory.options import check_instance, check_seconds, check_text, check_whole_number
from perdure.memory.thread_messages import ThreadMessage, parse_time
from perdure.run_tables.thread_list import ListedThread, ThreadList, ThreadQuery
from perdure.settings import SEARCH_LIMIT, check_user
from perdure.storage.flow import Flow
from perdure.storage.thread_pools import ThreadPool
from perdure.stores.base import FoundItem, Provenance, PutItem
from perdure.stores.namespaces import encode_namespace_path
from perdure.stores.search.text import (
    detect_language,
    extract_query_words_with_stems,
    find_nearest_words,
    is_eligible_for_spelling_correction,
    iter_stems,
    tokenize,
)
from perdure.stores.store import Store
from perdure.stores.store_parts import TRANSCRIPT_PREFIX

_LOG = logging.getLogger("perdure")
# Threshold for committing a transaction. Once this many messages are waiting to be indexed, they
# are written to the index in one transaction. The same number is the maximum number of messages per
# indexing step.
_MESSAGES_PER_TRANSACTION: Final = 400
# Maximum number of indexing steps per transaction. Each step indexes messages of one thread, and a
# thread with few messages needs only one step. When the index is deleted, this is also the maximum
# number of threads per transaction.
_THREADS_PER_TRANSACTION: Final = 60
# Maximum number of characters indexed per message. The rest of the message is ignored.
_MAX_MESSAGE_CHARS: Final = 100_000
# Number of messages on the first page of search results. Each subsequent page is four times as
# large as the previous one.
_PAGE_SIZE: Final = 64
# Name of the checkpointer attribute that holds its `TranscriptSearch`.
_SEARCH_ATTRIBUTE: Final = "_thread_search"
# Seconds between two progress reports.
_TICK_S: Final = 0.1
# Maximum number of characters that an excerpt shows before its first matching word, unless the
# match is near the end of the text.
_EXCERPT_LEAD_CHARS: Final = 40
# Matches a word or number, including inner apostrophes and commas, as in "don't" or "1,000".
_WORD: Final = re.compile(r"\w(?:[\w'\u2019,]*\w)?")
Progress = Callable[[int, int], object]
"""A function that is called with two numbers: threads indexed so far, and all threads to index."""


@dataclass(frozen=True, slots=True)
class ThreadHit:
    """A thread found by a search, with the thread's best-matching message.

    Attributes:
        thread_id: The thread.
        title: The title of the thread in lists.
        role: The role of the message.
        text: The text of the message.
        at: When the message was written (UTC), or None if the time is unknown.
        marks: The start and end of each matching word in the text.
        message_id: The id of the message, or None if the message has no id.
        position: The position of the message's item in the thread's log, as in `saver.history()`.
        score: The score of the message; a higher score is a better match.
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
        """The URL path of the message in the web interface of `perdure serve`."""
        has_message_id = self.message_id is not None
        page = "thread" if has_message_id else "message"
        position = {"message": self.message_id} if has_message_id else {"position": self.position}
        return f"/ui/{page}?{urlencode({'id': self.thread_id, **position})}"

    def split_excerpt_at_matches(self, max_chars: int = 240) -> list[tuple[str, bool]]:
        """Return the text around the first match as a list of (piece, is_match) pairs.

        `max_chars` is the maximum total length of the returned pieces in characters, excluding the
        ellipses at the start and the end.
        """
        first = self.marks[0][0] if self.marks else 0
        start = max(0, min(first - _EXCERPT_LEAD_CHARS, len(self.text) - max_chars))
        end = min(len(self.text), start + max_chars)
        cuts = [start, *(min(index, end) for index in chain(*self.marks)), end]
        spans = enumerate(pairwise(cuts))
        pieces = [(self.text[span[0] : span[1]], number % 2 == 1) for number, span in spans]
        ellipses = ("…" if start else "", False), ("…" if end < len(self.text) else "", False)
        return [piece for piece in (ellipses[0], *pieces, ellipses[1]) if piece[0]]

    @property
    def marked(self) -> str:
        """The excerpt on one line, with each word that matches the query in double asterisks."""
        pieces = (
            f"**{piece}**" if marked else piece for piece, marked in self.split_excerpt_at_matches()
        )
        return " ".join("".join(pieces).split())

    def __str__(self) -> str:
        when = f", {self.at:%Y-%m-%d}" if self.at else ""
        return f"{self.thread_id} ({self.title}{when}) {self.role}: {self.marked}"


class ThreadHits(list[ThreadHit]):
    """The threads found by a search, best match first.

    Attributes:
        unread: The number of threads that are not completely indexed yet. A later search may find
            more threads.
    """

    def __init__(self, hits: Sequence[ThreadHit] = (), unread: int = 0) -> None:
        super().__init__(hits)
        self.unread = unread


@dataclass(frozen=True, slots=True)
class VisibleThreads:
    """The threads that a caller may see.

    Attributes:
        query: Selects the threads that may be visible.
        match: Is called with each thread that the query selects, and returns a true value if the
            caller may see the thread.
    """

    query: ThreadQuery = field(default_factory=ThreadQuery)
    match: Callable[[ListedThread], object] = lambda thread: True

    @property
    def owner(self) -> str | None:
        """The owner whose threads the query selects, or None if the query specifies no owner."""
        owner = (self.query.metadata or {}).get("owner")
        return owner if isinstance(owner, str) else None


class _ThreadIndexingStep(NamedTuple):
    """Messages of one thread that are added to the transcript index in a single transaction.

    Attributes:
        thread_id: The thread.
        before: The progress of the thread's index before this step.
        after: The progress after this step.
        items: The items of the thread's log that this step indexes, each with the time at which it
            was stored.
    """

    thread_id: str
    before: IndexProgress
    after: IndexProgress
    items: Sequence[tuple[HistoryItem, float]]


class _IndexingJob:
    """A job that indexes an owner's threads in the background.

    Attributes:
        total: The number of threads to index.
        done_count: The number of threads that the job has already indexed.
        future: The future of the job, which completes when the job has ended.
    """

    def __init__(self, total: int) -> None:
        self.total, self.done_count = total, 0
        self.future: Future[None] = Future()


class TranscriptSearch:
    """Searches the messages in a checkpointer's threads, using a full-text index.

    Args:
        saver: One of perdure's checkpointers.
        store: A store in the same database. The index has tables of its own there.
    """

    def __init__(self, saver: Checkpointer, store: Store) -> None:
        self._saver, self._list = saver, ThreadList(saver)
        self._database, self._sql = saver.database, saver.parts.sql
        self._parts = store.parts.build_parts_for_table_prefix(
            TRANSCRIPT_PREFIX, saver.database, saver.parts.seal
        )
        self._index = Store(self._parts)
        self._lock, self._jobs = threading.Lock(), dict[Hashable, _IndexingJob]()

    @staticmethod
    def for_checkpointer(saver: Checkpointer, store: Store) -> TranscriptSearch:
        """Return the `TranscriptSearch` of a checkpointer.

        If the checkpointer does not have a `TranscriptSearch` yet, it is created.

        The `TranscriptSearch` object is kept for as long as the checkpointer exists, so that later
        searches find the index in memory and need not read all of it from the database again.

        Raises:
            ConfigurationError: The checkpointer or the store is not perdure's, they use different
                databases, or they use an in-memory database.
        """
        check_instance(
            "saver",
            saver,
            Checkpointer,
            "a checkpointer of perdure, like SQLiteCheckpointer.open(path)",
        )
        check_instance("store", store, Store, "a store of perdure, like SQLiteStore.open(path)")
        saver.database.connect()
        store.database.connect()
        location, store_location = saver.database.location_key, store.database.location_key
        if location is None or location != store_location:
            raise ConfigurationError(
                f"the store is in {store.database.path!r}, but the threads are in "
                f"{saver.database.path!r}; to search threads, both must be in the same database "
                "on disk. Open the store with SQLiteStore.open(PATH), where PATH is the database "
                "of the threads"
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
        """Search the visible threads; see `search_threads` for the arguments."""
        unread = self._index_changed_threads_and_count_unindexed(
            visible, wait_s, progress or (lambda done, total: None)
        )
        return ThreadHits(self._find_hits(text, visible, limit), unread)

    # -- searching

    def _find_hits(self, text: str, visible: VisibleThreads, limit: int) -> list[ThreadHit]:
        """Find the visible threads whose messages match the text best.

        Search the transcript index in its current state, without updating it first.
        """
        prefix = () if visible.owner is None else (self._hash_owner(visible.owner),)
        hits, seen_threads, start, size = list[ThreadHit](), set[str](), 0, _PAGE_SIZE
        while len(hits) < limit:
            items = self._index.search(
                prefix, query=text, mode="text", context=False, limit=size, offset=start
            )
            best: dict[str, FoundItem] = {}
            for item in items:
                source = item.provenance
                if source and source.thread_id and source.thread_id not in seen_threads:
                    best.setdefault(source.thread_id, item)
            seen_threads |= best.keys()
            threads = self._find_visible_threads(visible, ids=[*best])
            hits += [_build_thread_hit(text, best[id], threads[id]) for id in best if id in threads]
            if len(items) < size:
                break
            start, size = start + size, 4 * size
        return hits[:limit]

    def _find_visible_threads(
        self, visible: VisibleThreads, **query_options: Any
    ) -> dict[str, ListedThread]:
        """Return the visible threads that also match `query_options`, keyed by thread id."""
        query = replace(visible.query, **query_options)
        # Pass a limit that is so large that all threads are returned.
        threads = self._list.search(query, lambda t: t if visible.match(t) else None, 1 << 31)
        return {thread.thread_id: thread for thread in threads}

    def _hash_owner(self, owner: object) -> str:
        """Return the label of the namespace that holds an owner's index entries.

        The namespace label is a hash of the owner, so that the label does not reveal the owner's
        name.
        """
        data = repr(owner).encode(errors="surrogatepass")
        return blake2b(data, digest_size=16, key=self._saver.parts.seal.hash_key).hexdigest()

    # -- indexing

    def _index_changed_threads_and_count_unindexed(
        self, visible: VisibleThreads, wait_s: float | None, progress: Progress
    ) -> int:
        """Index the visible threads that have changed, and return how many remain to be indexed.

        Wait at most `wait_s` seconds. If indexing takes longer than `wait_s`, it continues in the
        background. In a read-only database, nothing is indexed.
        """
        end = math.inf if wait_s is None else time.monotonic() + wait_s
        # Run the loop twice, because the first indexing job may have started before this search.
        # Such a job can miss visible threads, or the latest changes in these threads. The second
        # job then indexes the remaining changes.
        for _ in range(2):
            threads = self._find_visible_threads(visible, is_unindexed=True)
            if not threads or self._database.read_only:
                return len(threads)
            job = self._get_or_start_indexing_job(visible.owner, threads)
            while not job.future.done() and (seconds_left := end - time.monotonic()) > 0:
                wait([job.future], min(_TICK_S, seconds_left))
                progress(job.done_count, job.total)
            if not job.future.done():
                return job.total - job.done_count
            job.future.result()
        return len(self._find_visible_threads(visible, is_unindexed=True))

    def _get_or_start_indexing_job(
        self, owner: Hashable, threads: Mapping[str, ListedThread]
    ) -> _IndexingJob:
        """Return the job that is currently indexing an owner's threads.

        If no job is running, start one.
        """
        with self._lock:
            if job := self._jobs.get(owner):
                return job
            job = _IndexingJob(len(threads))
            thread_ids_and_owners = [
                (id, thread.metadata.get("owner")) for id, thread in threads.items()
            ]

            def index_and_remove_job() -> None:
                """Index the owner's threads, then remove the job from `_jobs`."""
                try:
                    self._index_threads_of_job(job, thread_ids_and_owners)
                finally:
                    with self._lock:
                        del self._jobs[owner]

            # Run the indexing job in a daemon thread, so that a running job does not prevent the
            # process from exiting.
            pool = ThreadPool(1, "perdure-thread-search", is_permanent=False)
            job.future = pool.submit(index_and_remove_job, is_async=False)
            self._jobs[owner] = job
            return job

    def _index_threads_of_job(
        self, job: _IndexingJob, thread_ids_and_owners: Sequence[tuple[str, Any]]
    ) -> None:
        """Index threads, committing the index entries in several transactions.

        Each thread is indexed in one or more steps. The index entries of several indexing steps can
        be written in the same transaction.
        """
        steps = list[_ThreadIndexingStep]()
        for number, (thread_id, owner) in enumerate(thread_ids_and_owners, 1):
            for step in self._iter_indexing_steps_of_thread(thread_id, owner):
                steps.append(step)
                if (
                    len(steps) >= _THREADS_PER_TRANSACTION
                    or sum(len(p.items) for p in steps) >= _MESSAGES_PER_TRANSACTION
                ):
                    self._index_messages_of_steps(steps)
                    steps, job.done_count = [], number
        self._index_messages_of_steps(steps)
        job.done_count = job.total

    def _iter_indexing_steps_of_thread(
        self, thread_id: str, owner: Any
    ) -> Iterator[_ThreadIndexingStep]:
        """Yield the steps that index a thread.

        If the thread cannot be read, a warning is logged, and the thread is treated as indexed
        until it changes.
        """
        path = encode_namespace_path([self._hash_owner(owner)])
        try:
            with collector_paused():
                unread_items = self._saver.database.read(
                    lambda: read_index_progress_and_unindexed_items_with_times(
                        self._saver.parts.maintenance.threads, thread_id, path
                    )
                )
        except (CorruptRecord, ForbiddenType, UnknownThread) as exc:
            _LOG.warning(
                "thread %.80r is not searched, because it cannot be read: %s", thread_id, exc
            )
            progress = self._database.read(lambda: read_index_progress(self._sql, thread_id))
            unread_items = None if progress is None else (progress, [])
        before, items = unread_items or (None, [])
        while before is not None:
            part, items = items[:_MESSAGES_PER_TRANSACTION], items[_MESSAGES_PER_TRANSACTION:]
            position = part[-1][0].position + 1 if part else before.get_indexed_position(path)
            after = before._replace(position=position, path=path)
            # The version token -1 marks a partly indexed thread. Real version tokens are never -1,
            # so a partly indexed thread is treated as unindexed.
            yield _ThreadIndexingStep(
                thread_id, before, after if not items else after._replace(version_token=-1), part
            )
            before = after if items else None

    def _index_messages_of_steps(self, steps: Sequence[_ThreadIndexingStep]) -> None:
        """Write the index entries of several indexing steps in one transaction.

        The transaction also stores how far each thread has been indexed. Skip an indexing step if,
        after the step was prepared, another process indexed the thread or data was removed from the
        thread.
        """
        if not steps:
            return
        puts = [
            self._parts.preparer.prepare_puts(self._iter_puts_of_indexed_messages(step))
            for step in steps
        ]

        def flow() -> Flow[None]:
            are_advanced = yield from save_index_progress(self._sql, [step[:3] for step in steps])
            if puts_to_write := [*chain(*compress(puts, are_advanced))]:
                yield from self._parts.writer.write_puts(puts_to_write, self._parts.now())

        # Prevent concurrent transactions from writing to the same namespace. A search reads only
        # the index entries whose ids are higher than the last id that it has read, so entries must
        # be committed in the order of their ids.
        names = {step.thread_id for step in steps} | {repr(step.after.path) for step in steps}
        self._database.write(
            flow, exclusive_names=[*names], own_writes=self._saver.parts.own_writes
        )

    def _iter_puts_of_indexed_messages(self, step: _ThreadIndexingStep) -> Iterator[PutItem]:
        """Yield the write operations that add an indexing step's messages to the index.

        Tool messages and system messages are not added to the index. A message with `{"remember":
        False}` in its `response_metadata` is added to the index only if the metadata also contains
        `{"searched": True}`.
        """
        label = (step.after.path or b"").decode().rstrip("\0")
        for item, stored_at in step.items:
            message = item.value
            thread_message = ThreadMessage(message, getattr(message, "id", None) or "")
            if (
                isinstance(message, BaseMessage)
                and thread_message.role in ("user", "assistant")
                and thread_message.searched_text
            ):
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


def _build_thread_hit(query: str, item: FoundItem, thread: ListedThread) -> ThreadHit:
    """Build the search result for a thread from its best-matching index entry."""
    source, message_text = item.provenance or Provenance(), item.value["text"]
    return ThreadHit(
        thread.thread_id,
        thread.display_title,
        item.value["role"],
        message_text,
        source.at,
        find_query_word_spans(message_text, query),
        next(iter(source.message_ids), None),
        source.position or 0,
        item.score or 0.0,
    )


def find_query_word_spans(text: str, query: str) -> tuple[tuple[int, int], ...]:
    """Find the positions at which the words of a query occur in a text.

    A query word also matches its inflected forms. A query word that does not occur in the text may
    be misspelt, so it also matches similar words in the text.

    >>> find_query_word_spans("She runs; he ran to the shop.", "running shops")
    ((4, 8), (24, 28))
    >>> find_query_word_spans("我喜欢聊天记忆", "聊天")
    ((3, 5),)

    Returns:
        The start and end of each match.
    """
    text_words, query_words, marked_positions, language = (
        set(tokenize(text)),
        extract_query_words_with_stems(query),
        set[int](),
        detect_language(text),
    )
    wanted_words = {*query_words, *query_words.values()}
    for word in filter(is_eligible_for_spelling_correction, wanted_words - text_words):
        wanted_words |= {*find_nearest_words(word, text_words)}
    for piece in _WORD.finditer(text):
        parts = tokenize(piece[0])
        stemmed = (stem for _, stem in iter_stems(piece[0], language))
        for part in wanted_words.intersection(chain(parts, stemmed)):
            # If a piece of text without spaces contains several words, as in Chinese, mark only the
            # matching word. If the piece of text is a single word, mark the whole word.
            form = re.escape(part) if len(parts) > 1 else ".+"
            for match in re.finditer(form, piece[0], re.IGNORECASE):
                marked_positions |= {
                    *range(piece.start() + match.start(), piece.start() + match.end())
                }
    starts = sorted(index for index in marked_positions if index - 1 not in marked_positions)
    return tuple(
        zip(
            starts,
            sorted(index + 1 for index in marked_positions if index + 1 not in marked_positions),
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
    """Find threads by searching for words in their messages.

    The search also matches inflected forms of the words in `text`, and similar words if a word is
    misspelt. The first search indexes all threads that match `user` and `filter`, most recently
    changed first. Later searches index only the matching threads that are not indexed yet or have
    changed since they were last indexed. The index is stored in separate tables, so indexed text
    never appears in recalled memories or in a store search. perdure adds no indexed text to a
    prompt by itself. The index entries of a thread or a message are deleted together with the
    thread or the message. The search ignores all tool messages and system messages. The search
    skips messages whose `response_metadata` contains `{"remember": False}`, with one exception. A
    human or AI message with `{"remember": False}` in its `response_metadata` is searched if its
    `response_metadata` also contains `{"searched": True}`.

    Args:
        saver: One of perdure's checkpointers.
        store: One of perdure's stores, in the same database.
        text: The words to search for.
        user: Only threads of this user are searched. The user of a thread is its `owner`, or its
            `user_id` if it has no owner. None means all threads.
        filter: Only threads whose metadata has these values are searched.
        limit: The maximum number of threads to return.
        wait_s: Seconds to wait while threads are indexed. After that, the index is searched as it
            is, and indexing continues in the background. The attribute `unread` of the result is
            the number of threads that are not indexed yet. None means to wait until all threads are
            indexed.
        progress: Called during the wait with two numbers: the threads indexed so far, and all
            threads to index.

    Returns:
        The threads, best match first, each with its best-matching message.

    Raises:
        ConfigurationError: An argument is wrong, the store is in another database than the threads,
            or the database is in memory.
    """
    check_text("text", text)
    if user is not None:
        check_user("the argument 'user'", user, "pass None for all users")
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
    """Search threads without blocking the event loop; see `search_threads`."""
    return await asyncio.to_thread(search_threads, *args, **options)


def delete_transcript_index(saver: Checkpointer) -> None:
    """Delete the transcript index for all threads of a checkpointer.

    The next search rebuilds the index.
    """
    while saver.database.write(
        lambda: drop_and_count_transcript_indexes(saver.parts.sql, _THREADS_PER_TRANSACTION),
        deletes_rows=True,
    ):
        pass
    saver.database.release_unused_disk_space()
