"""Lists of threads as a server shows them: one SELECT over their rows, with what clients gave them.

A row has what its head tells (`Checkpointer.heads` reads that from the heads), what a client gave
the thread, and how its last run on the server ended. SQL orders rows and leaves out what cannot
match; rows that are left are opened and compared. Only of threads that may wait for an answer,
and of those of which something was removed, is the head read.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final, Literal, NamedTuple, TypeVar

from perdure.checkpointers.cache import Thread
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.records import (
    ClientMetadata,
    decrypt_client_metadata,
    decrypt_list_entry,
    encrypt_client_metadata,
    fold_search_text,
    iter_nested_tags,
    select_listed_metadata,
)
from perdure.checkpointers.reports import Retention, ThreadHead, ThreadStatus
from perdure.checkpointers.status import IDLE
from perdure.checkpointers.thread_copy import copy_thread
from perdure.storage.database import awaited
from perdure.storage.encryption import Clear, LangGraphCipher
from perdure.storage.flow import Flow, Guarded, Row, Stale, Statement, rows_of

T = TypeVar("T")
RunStatus = Literal["idle", "busy", "interrupted", "error"]
SortBy = Literal["thread_id", "created_at", "updated_at", "state_updated_at", "status"]
_PAGE: Final = 2_000  # rows read at once, of those that are compared
_LAST: Final = 1 << 62  # more rows than there are
_TAGS: Final = 20  # texts and numbers that SQL is asked for; the rest is compared
_BY_STATUS: Final[Mapping[str, str]] = {  # what threads of a status have, and perhaps others
    "interrupted": "t.waiting = 1",
    "idle": "(t.waiting = 1 OR t.status IN ('idle', 'interrupted') OR t.client IS NOT NULL)",
    "error": "t.status = 'error'",
    "busy": "(t.status = 'busy' OR EXISTS (SELECT 1 FROM runs r WHERE r.thread = t.thread "
    "AND r.status IN ('pending', 'running')))",
}


class TimeToLive(NamedTuple):
    """How long a thread stays without activity.

    Attributes:
        minutes: Then it is deleted.
        keeps_latest: Only its checkpoints but the newest are.
    """

    minutes: float
    keeps_latest: bool


@dataclass(frozen=True, slots=True)
class ListedThread:
    """A thread as lists have it.

    Attributes:
        told: Of its head's metadata what is the user's; None: it has no head.
        title: See `ThreadHead`.
        status: Where it stands, if it may wait for an answer; else idle.
        ended: How its last run on the server ended.
        client: What a client gave it; None: nothing.
        busy: Whether a run of a server is under way, or waits.
        key: The key of the thread. A thread that is made later with the same id has another.
        removals: The number of erasures from the thread.
        ttl: How long it stays; None: until it is deleted.
        expires_at: When that is over, if there is no activity.
    """

    thread_id: str
    created_at: datetime
    updated_at: datetime
    told: Mapping[str, Any] | None
    title: str
    status: ThreadStatus
    ended: RunStatus
    client: ClientMetadata | None
    busy: bool
    key: int
    removals: int
    ttl: TimeToLive | None = None
    expires_at: datetime | None = None

    @property
    def counts(self) -> bool:
        """Whether what a client gave is of this thread: no other program began it."""
        if self.told is None or self.client is None or not self.client.is_reserved:
            return True
        # both are in the metadata of what the server writes; other programs may name the first
        return self.told.keys() >= {"assistant_id", "user_id"}

    @property
    def metadata(self) -> dict[str, Any]:
        """What its head tells and clients gave, with the `owner`, if it has one.

        The head tells whose it is: whoever made the thread may be another.
        """
        told = self.told or {}
        client = self.client if self.counts and self.client else ClientMetadata({})
        given, user = client.metadata, told.get("user_id")
        owner = told.get("owner", user)
        if owner is None or (user is not None and user == client.source_user):
            owner = given.get("owner", owner)
        own = {name: of for name, of in (("owner", owner), ("user_id", user)) if of is not None}
        return {**told, **given, **own}

    @property
    def shown_title(self) -> str:
        """The title that a client gave it, else its own."""
        given = self.client.metadata if self.counts and self.client else {}
        return str(given.get("title") or self.title)


@dataclass(frozen=True, slots=True)
class ThreadQuery:
    """Which threads a list has, and in which order; None: whatever it is.

    SQL leaves out what cannot match; what is left is to be compared.

    Attributes:
        metadata: What that of the head or of the client contains; dicts may have more.
        ids: Only these.
        status: Only of this status.
        text: Only with this in the title or the id, whatever the case.
        person: Only threads of this person, and nobody's, which SQL does not tell.
        active_since: Only those active at this moment or later.
        active_until: Only those not active after it.
        sort_by: Another order than by activity; in each, the latest activity first. SQL knows none
            by status.
        sort_order: `"asc"` or `"desc"`, the default.
        is_exact: Whether no row is to be compared: what comes before a page is not opened.
        is_unread: Only those that the search of what was said has not read to their end.
    """

    metadata: Mapping[str, Any] | None = None
    ids: Sequence[str] | None = None
    status: RunStatus | None = None
    text: str = ""
    person: str | None = None
    active_since: datetime | None = None
    active_until: datetime | None = None
    sort_by: SortBy | None = None
    sort_order: Literal["asc", "desc"] | None = None
    is_exact: bool = False
    is_unread: bool = False


class ThreadList:
    """The threads of a checkpointer, and what the server keeps of them."""

    def __init__(self, saver: Checkpointer) -> None:
        self._saver, self._reader = saver, saver._reader
        self._sql, self._seal, self._database = saver._sql, saver._seal, saver.database

    # -- reading

    def search(
        self,
        query: ThreadQuery,
        match: Callable[[ListedThread], T | None],
        limit: int,
        offset: int = 0,
    ) -> list[T]:
        """What `match` makes of a page of threads; None: the thread does not match."""
        return self._database.read(lambda: self._search(query, match, limit, offset))

    asearch = awaited(search)

    def get(self, thread_id: str) -> ListedThread | None:
        """One thread; None: there is none."""
        return self._database.read(lambda: self._one(thread_id))

    aget = awaited(get)

    def count(self, query: ThreadQuery) -> int:
        """How many threads an exact query finds."""
        sql, params = joined(self._sql["count_listed"], self.where(query))
        ((many,),) = self._database.read(lambda: rows_of(sql, *params))
        return int(many)

    acount = awaited(count)

    def _search(
        self,
        query: ThreadQuery,
        match: Callable[[ListedThread], T | None],
        limit: int,
        offset: int,
    ) -> Flow[list[T]]:
        sql, params = joined(self._sql["listed"], self.where(query))
        sql += f" ORDER BY {_order(query)} LIMIT ? OFFSET ?"
        skipped = min(offset, _LAST) if query.is_exact else 0
        out: list[T] = []
        start, size = skipped, min(limit + offset - skipped, _PAGE)
        while True:
            rows = yield Statement(sql, (*params, size, start))
            for thread in (yield from self._opened(rows)):
                if (shown := match(thread)) is not None:
                    out.append(shown)
            if len(out) >= limit + offset - skipped or len(rows) < size:
                return out[offset - skipped :][:limit]
            start, size = start + size, min(4 * size, _PAGE)

    def _one(self, thread_id: str) -> Flow[ListedThread | None]:
        rows = yield Statement(f"{self._sql['listed']} AND t.thread_id = ?", (thread_id,))
        return next(iter((yield from self._opened(rows))), None)

    def where(self, query: ThreadQuery) -> Iterator[tuple[str, list[Any]]]:
        """Conditions that the threads of a query meet, each with its parameters."""
        if query.ids is not None:
            ids = [thread_id for thread_id in query.ids if "\0" not in thread_id]  # Postgres: none
            yield f"t.thread_id IN ({', '.join('?' for _ in ids) or 'NULL'})", ids
        if query.status is not None:
            yield _BY_STATUS[query.status], []
        if query.active_since is not None:
            yield "t.updated_at >= ?", [query.active_since.timestamp() - 1e-6]
        if query.active_until is not None:
            yield "t.updated_at <= ?", [query.active_until.timestamp() + 1e-6]
        if query.is_unread:
            yield self._sql["is_unread"], []
        if query.text and isinstance(self._seal, Clear):
            yield self._found([fold_search_text(query.text)])
        if not isinstance(self._seal, LangGraphCipher):  # whose tags another process does not know
            yield from map(self._found, islice(self._tags(query.metadata or {}), _TAGS))

    def _found(self, alternatives: Sequence[bytes]) -> tuple[str, list[Any]]:
        """The condition that a row may be found by one of some bytes, or does not tell by what."""
        sql = " OR ".join([self._sql["is_found"]] * len(alternatives))
        return f"({sql})", [part for each in alternatives for part in (each, each)]

    def _tags(self, metadata: Mapping[str, Any]) -> Iterator[list[bytes]]:
        """For each text or number in metadata, the tags of which a thread that has it has one."""
        for name, value in metadata.items():
            names = (name, "user_id") if name == "owner" else (name,)
            numbers = [iter_nested_tags(self._seal, value, each) for each in names]
            for same in zip(*numbers, strict=True):
                yield [number.to_bytes(8, "big", signed=True) for number in same]

    def _opened(self, rows: Sequence[Row]) -> Flow[list[ListedThread]]:
        """The threads of rows, with the heads of those whose rows do not tell enough."""
        listed = {row[0]: decrypt_list_entry(self._seal, row[1], row[5]) for row in rows}
        unknown = [row[:6] for row in rows if row[6] or (row[7] and None in listed[row[0]])]
        heads: dict[str, ThreadHead] = {}
        if unknown:
            read = yield from self._saver._threads.heads_of(unknown)
            heads = {head.thread_id: head for head in read}
        return [self._thread(row, *listed[row[0]], heads.get(row[1])) for row in rows]

    def _thread(
        self, row: Row, title: Any, sealed: bytes | None, head: ThreadHead | None
    ) -> ListedThread:
        key, thread_id, begun, active, _, _, waits, _, ended, client, busy = row[:11]
        minutes, since, keeps, removals = row[11:]
        metadata = None if sealed is None else self._reader.codec.decode(sealed)
        if head is not None:
            metadata = None if head.checkpoint_id is None else select_listed_metadata(head.metadata)
        text = head.title if head is not None else title.text if title is not None else ""
        times = datetime.fromtimestamp(begun, UTC), datetime.fromtimestamp(active, UTC)
        status = head.status if head is not None and waits else IDLE
        given = decrypt_client_metadata(self._seal, thread_id, client)
        ttl, expires_at = None, None
        if minutes is not None:
            ttl = TimeToLive(minutes, keeps > 0)
            expires_at = datetime.fromtimestamp(max(active, since) + 60 * minutes, UTC)
        return ListedThread(
            thread_id,
            *times,
            metadata,
            text,
            status,
            ended,
            given,
            bool(busy),
            key,
            removals,
            ttl,
            expires_at,
        )

    # -- writing

    def create(self, thread_id: str, client: ClientMetadata) -> bool:
        """Make a thread without a checkpoint; returns whether there was none."""
        cache, removals, now = self._reader.cache, self._reader.removals, time.time()
        thread, left = Thread(0, 0), list[int]()
        thread.version_token, thread.updated_at = random.getrandbits(62), now

        def flow() -> Flow[bool]:
            if (yield self._sql("find_thread", thread_id)):
                return False
            left[:] = yield from self._reader.new_keys(1)
            thread.key = left.pop()
            thread.newest_removal = yield from removals.read_newest_number(thread_id)
            row = thread.key, thread_id, 0, thread.version_token, now, now, thread.newest_removal
            made = self._sql("new_thread", *row, removals.hash_thread(thread_id))
            titled = self._sql("set_title", None, b"", thread.key)  # its head tells nothing
            sealed = encrypt_client_metadata(self._seal, thread_id, client)
            try:
                yield Guarded([made, titled, self._sql("set_client", *sealed, thread.key)])
            except Stale:
                return False
            return True

        def committed(made: bool) -> None:
            if made:
                cache.keys.refill(left)
                cache.replace_thread(thread_id, thread)

        return self._database.write(flow, committed, exclusive=(thread_id,))

    acreate = awaited(create)

    def change(
        self,
        thread_id: str,
        make: Callable[[ListedThread], tuple[ClientMetadata | None, RunStatus]],
        *,
        waits: bool = False,
    ) -> None:
        """Change what the server keeps of a thread, as it is then; of an unknown one nothing.

        Its run `waits` if it ended before a node, which its head tells.
        """
        thread = self.get(thread_id)
        if thread is None or (not waits and make(thread) == (thread.client, thread.ended)):
            return

        def flow() -> Flow[None]:
            for key, _, seq, _ in (yield self._sql("hold_client", thread_id)):
                listed = yield from self._one(thread_id)
                if listed is not None:
                    client, ended = make(listed)
                    if client is not None and client != listed.client:
                        sealed = encrypt_client_metadata(self._seal, thread_id, client)
                        yield self._sql("set_client", *sealed, key)
                        yield self._sql("unread", key)
                    if ended != listed.ended:
                        yield self._sql("set_status", ended, key)
                    if waits:
                        yield self._sql("waits", key)
                    if not seq:
                        yield self._sql("touch", time.time(), key)

        self._database.write(flow, exclusive=(thread_id,), watch=self._saver._watch)

    achange = awaited(change)

    def count_without_ttl(self) -> int:
        """Return the number of threads that have no time to live."""
        ((count,),) = self._database.read(lambda: rows_of(self._sql["count_without_ttl"]))
        return int(count)

    def set_ttl(self, thread_id: str, ttl: TimeToLive) -> None:
        """Say how long a thread stays from now on without activity."""
        self._write(thread_id, "set_ttl", ttl.minutes, time.time(), int(ttl.keeps_latest))

    aset_ttl = awaited(set_ttl)

    def delete(self, thread_id: str, *, recorded: bool) -> None:
        """Delete a thread; see `Maintenance.delete_thread`."""
        self._saver._maintenance.delete_threads([thread_id], recorded=recorded)

    adelete = awaited(delete)

    def expired(self, limit: int) -> list[str]:
        """Some threads whose time is over, and no run of which is under way or waits."""
        asked = time.time(), "", limit
        rows = self._database.read(lambda: rows_of(self._sql["expired"], *asked))
        return [thread_id for thread_id, _ in rows]

    aexpired = awaited(expired)

    def expire(self, thread_id: str) -> bool:
        """Delete a thread, or what of it does not stay, if its time is over still."""
        now, maintenance = time.time(), self._saver._maintenance

        def flow() -> Flow[int | None]:
            rows = yield self._sql("expired", now, thread_id, 1)
            if not rows:
                return None
            if not rows[0][1]:
                yield from maintenance.delete_thread(thread_id)
            return int(rows[0][1])

        keeps = maintenance.write(thread_id, flow)
        if keeps:
            maintenance.retain(Retention(last=0), [thread_id])
            self._write(thread_id, "has_kept", now)
        return keeps is not None

    aexpire = awaited(expire)

    def _write(self, thread_id: str, name: str, *params: Any) -> None:
        sql = self._sql[name]
        self._database.write(lambda: rows_of(sql, *params, thread_id), exclusive=(thread_id,))

    def copy(
        self,
        source: str,
        target: str,
        checkpoint_id: str | None,
        client: ClientMetadata,
        ended: RunStatus,
    ) -> None:
        """Copy a thread; see `Checkpointer.copy_thread`."""
        copy_thread(self._saver._maintenance, source, target, checkpoint_id, client, ended)

    acopy = awaited(copy)


def joined(sql: str, where: Iterable[tuple[str, list[Any]]]) -> tuple[str, list[Any]]:
    """A statement with conditions, and all their parameters."""
    params: list[Any] = []
    for condition, values in where:
        sql += f" AND {condition}"
        params += values
    return sql, params


def _order(query: ThreadQuery) -> str:
    way = "ASC" if query.sort_order == "asc" else "DESC"
    if query.sort_by in ("thread_id", "created_at"):
        return f"t.{query.sort_by} {way}, t.updated_at DESC, t.thread DESC"
    return f"t.updated_at {way}, t.thread {way}"
