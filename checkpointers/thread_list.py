"""Search, count, create, update and delete threads and the data that the server stores about them.

A search for threads executes one SELECT on the `threads` table for each page of results. The row of
a thread contains a copy of its head's metadata, the client-supplied metadata, and the status of the
last run. The SELECT sorts the rows and filters out those that cannot match the query. The remaining
rows are decrypted and compared with the query in Python. The head checkpoint is read only if the
thread may be waiting for an answer, or if the copy of the head's metadata was deleted because data
was removed from the thread.
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
    decrypt_listed_title_and_encoded_metadata,
    encrypt_client_metadata_and_search_keys,
    fold_search_text,
    iter_search_tags_of_nested_metadata,
    select_metadata_shown_in_thread_lists,
)
from perdure.checkpointers.reports import Retention, ThreadHead, ThreadStatus
from perdure.checkpointers.status import IDLE
from perdure.checkpointers.thread_copy import copy_thread
from perdure.storage.database import make_async_twin
from perdure.storage.encryption import ChecksumSeal, LangGraphSeal
from perdure.storage.flow import Flow, GuardedRequest, GuardFailed, Row, Statement, fetch_rows

T = TypeVar("T")
RunStatus = Literal["idle", "busy", "interrupted", "error"]
SortBy = Literal["thread_id", "created_at", "updated_at", "state_updated_at", "status"]
# maximum number of rows returned by each SQL statement of a search
_PAGE: Final = 2_000
# maximum SQL OFFSET, which fits in a 64-bit integer and exceeds the row count of any database
_MAX_OFFSET: Final = 1 << 62
# maximum number of metadata values in a query that are compared in SQL; further values are compared
# in Python
_MAX_TAGS: Final = 20
# Maps each thread status to an SQL condition. The condition matches all threads with this status,
# and may also match threads with a different status.
_BY_STATUS: Final[Mapping[str, str]] = {
    "interrupted": "t.may_wait = 1",
    "idle": "(t.may_wait = 1 OR t.status IN ('idle', 'interrupted') "
    "OR t.client_metadata IS NOT NULL)",
    "error": "t.status = 'error'",
    "busy": "(t.status = 'busy' OR EXISTS (SELECT 1 FROM runs r WHERE r.thread_key = t.thread_key "
    "AND r.status IN ('pending', 'running')))",
}


class TimeToLive(NamedTuple):
    """A thread's TTL (time to live).

    The TTL period starts at the thread's last activity or when the TTL is set, whichever is later.

    Attributes:
        minutes: The number of minutes after which the thread is deleted.
        keeps_latest: Whether the thread is kept with its newest checkpoint, so that only the older
            checkpoints are deleted.
    """

    minutes: float
    keeps_latest: bool


@dataclass(frozen=True, slots=True)
class ListedThread:
    """A thread as lists of threads show it.

    Attributes:
        head_metadata: The part of the head's metadata that is not langgraph's or perdure's own, or
            None if the thread has no head.
        title: The title; see `ThreadHead`.
        status: The status of the head if the thread may wait for an answer, otherwise idle.
        last_run_status: The status of the last run on the server.
        client: The metadata that clients of the server set, or None.
        is_busy: Whether a run of the server is running or pending.
        key: The key of the thread. If a thread is deleted and created again, its key changes.
        removals: The sequence number of the newest removal from the thread, or 0.
        ttl: The time to live, or None if the thread is kept until it is deleted.
        expires_at: The time at which the time to live ends if there is no activity, or None.
    """

    thread_id: str
    created_at: datetime
    updated_at: datetime
    head_metadata: Mapping[str, Any] | None
    title: str
    status: ThreadStatus
    last_run_status: RunStatus
    client: ClientMetadata | None
    is_busy: bool
    key: int
    removals: int
    ttl: TimeToLive | None = None
    expires_at: datetime | None = None

    @property
    def does_client_metadata_describe_stored_conversation(self) -> bool:
        """Whether the client-supplied metadata describes the conversation stored in the thread.

        A client can reserve a thread id and set metadata before the thread has checkpoints. If
        another program later stores a conversation under this thread id, the client's metadata does
        not describe that conversation.
        """
        if self.head_metadata is None or self.client is None or not self.client.is_reserved:
            return True
        # The server stores both assistant_id and user_id in checkpoint metadata. Other programs may
        # store assistant_id, but never both keys.
        return self.head_metadata.keys() >= {"assistant_id", "user_id"}

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the thread's head, merged with the client-supplied metadata.

        The merged metadata also contains the `owner` of the thread. Client-supplied values take
        precedence over values from the head's metadata, except for `owner` and `user_id`. These
        two are always taken from the head, because the client that supplied the other metadata
        may belong to a different user.
        """
        head_metadata = self.head_metadata or {}
        client = (
            self.client
            if self.does_client_metadata_describe_stored_conversation and self.client
            else ClientMetadata({})
        )
        user = head_metadata.get("user_id")
        owner = head_metadata.get("owner", user)
        if owner is None or (user is not None and user == client.source_user):
            owner = client.metadata.get("owner", owner)
        users = {"owner": owner, "user_id": user}
        users = {name: value for name, value in users.items() if value is not None}
        return {**head_metadata, **client.metadata, **users}

    @property
    def display_title(self) -> str:
        """The title set by a client, or the head's title if no client has set one."""
        metadata = (
            self.client.metadata
            if self.does_client_metadata_describe_stored_conversation and self.client
            else {}
        )
        return str(metadata.get("title") or self.title)


@dataclass(frozen=True, slots=True)
class ThreadQuery:
    """The conditions and sort order of a search for threads. Fields that are None are ignored.

    SQL filters out most threads that do not match the query. The caller must check each thread that
    SQL returns, because some may not match the query.

    Attributes:
        metadata: Values that the metadata of the head or of the client contains. A dict matches a
            dict with more keys.
        ids: Limits the list to threads with one of these ids.
        status: The status of the threads.
        text: Text that the title or the id contains. Case is ignored.
        person: Limits the list to threads of the named person and threads of nobody. SQL ignores
            the condition `person`.
        active_since: Limits the list to threads with activity at the given time or later.
        active_until: Limits the list to threads without activity after the given time.
        sort_by: The field to sort by. The default is the time of the last activity. Within equal
            values, threads with later activity come first. SQL does not sort by `"status"`.
        sort_order: `"asc"` or `"desc"`, which is the default.
        is_exact: Whether the conditions in SQL are the whole query. If True, the rows before a page
            are not decrypted.
        is_unindexed: Limits the list to threads whose newest messages are not in the transcript
            index.
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
    is_unindexed: bool = False


class ThreadList:
    """Searches and modifies a checkpointer's threads, including data stored by the server."""

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
        """Return one page of the threads that match a query.

        Args:
            query: The conditions and the order.
            match: A function that returns the result for a thread, or None if the thread does not
                match.
            limit: The maximum number of results.
            offset: The number of matching threads before the page.

        Returns:
            The results of `match`, in the order of the query.
        """
        return self._database.read(lambda: self._search_pages(query, match, limit, offset))

    asearch = make_async_twin(search)

    def get(self, thread_id: str) -> ListedThread | None:
        """Return a thread, or None if it does not exist."""
        return self._database.read(lambda: self._read_thread(thread_id))

    aget = make_async_twin(get)

    def count_threads(self, query: ThreadQuery) -> int:
        """Count the threads that match the SQL conditions of a query."""
        sql, params = append_conditions(
            self._sql["count_listed_threads"], self.iter_query_conditions(query)
        )
        ((count,),) = self._database.read(lambda: fetch_rows(sql, *params))
        return int(count)

    acount_threads = make_async_twin(count_threads)

    def _search_pages(
        self,
        query: ThreadQuery,
        match: Callable[[ListedThread], T | None],
        limit: int,
        offset: int,
    ) -> Flow[list[T]]:
        """Read pages of rows until enough matching threads are found; see `search`."""
        sql, params = append_conditions(
            self._sql["listed_threads"], self.iter_query_conditions(query)
        )
        sql += f" ORDER BY {_build_order_by(query)} LIMIT ? OFFSET ?"
        skipped_rows = min(offset, _MAX_OFFSET) if query.is_exact else 0
        results: list[T] = []
        start, size = skipped_rows, min(limit + offset - skipped_rows, _PAGE)
        while True:
            rows = yield Statement(sql, (*params, size, start))
            for thread in (yield from self._decrypt_threads(rows)):
                if (result := match(thread)) is not None:
                    results.append(result)
            if len(results) >= limit + offset - skipped_rows or len(rows) < size:
                return results[offset - skipped_rows :][:limit]
            start, size = start + size, min(4 * size, _PAGE)

    def _read_thread(self, thread_id: str) -> Flow[ListedThread | None]:
        """Read one thread, or return None if it does not exist."""
        rows = yield Statement(f"{self._sql['listed_threads']} AND t.thread_id = ?", (thread_id,))
        return next(iter((yield from self._decrypt_threads(rows))), None)

    def iter_query_conditions(self, query: ThreadQuery) -> Iterator[tuple[str, list[Any]]]:
        """Yield each SQL condition of a query with its parameters."""
        if query.ids is not None:
            # Omit ids with a null character, because no thread has such an id and Postgres rejects
            # null characters in parameters.
            ids = [thread_id for thread_id in query.ids if "\0" not in thread_id]
            yield f"t.thread_id IN ({', '.join('?' for _ in ids) or 'NULL'})", ids
        if query.status is not None:
            yield _BY_STATUS[query.status], []
        # A datetime has only microsecond precision, so extend the period by one microsecond at each
        # end.
        if query.active_since is not None:
            yield "t.updated_at >= ?", [query.active_since.timestamp() - 1e-6]
        if query.active_until is not None:
            yield "t.updated_at <= ?", [query.active_until.timestamp() + 1e-6]
        if query.is_unindexed:
            yield self._sql["is_unindexed"], []
        if query.text and isinstance(self._seal, ChecksumSeal):
            yield self._build_contains_any_search_key_condition([fold_search_text(query.text)])
        # Rows that are encrypted with a LangGraphSeal have no search keys.
        if not isinstance(self._seal, LangGraphSeal):
            tags = islice(
                self._iter_possible_search_tags_of_each_value(query.metadata or {}), _MAX_TAGS
            )
            yield from map(self._build_contains_any_search_key_condition, tags)

    def _build_contains_any_search_key_condition(
        self, search_keys: Sequence[bytes]
    ) -> tuple[str, list[Any]]:
        """Build an SQL condition that is true if a row contains any of the search keys.

        The condition also matches rows that have no stored search keys.
        """
        sql = " OR ".join([self._sql["matches_search_key"]] * len(search_keys))
        return f"({sql})", [param for search_key in search_keys for param in (search_key,) * 2]

    def _iter_possible_search_tags_of_each_value(
        self, metadata: Mapping[str, Any]
    ) -> Iterator[list[bytes]]:
        """Yield one list of possible search tags for each string or number in a query's metadata.

        A tag is a search key that is computed from a metadata key and its value. If a thread's
        metadata contains the string or number, the thread has at least one of the tags in the list.
        For the key `owner`, each list contains two tags, because the metadata of some threads
        identifies the user only by `user_id`.
        """
        for name, value in metadata.items():
            names = (name, "user_id") if name == "owner" else (name,)
            tags = [iter_search_tags_of_nested_metadata(self._seal, value, key) for key in names]
            for alternatives in zip(*tags, strict=True):
                yield [tag.to_bytes(8, "big", signed=True) for tag in alternatives]

    def _decrypt_threads(self, rows: Sequence[Row]) -> Flow[list[ListedThread]]:
        """Decrypt rows of threads.

        The head of a thread is read from the database if the thread may be waiting for an answer,
        or if its row lacks data that thread lists show.
        """
        list_entries = {
            row[0]: decrypt_listed_title_and_encoded_metadata(self._seal, row[1], row[5])
            for row in rows
        }
        incomplete_rows = [
            row[:6] for row in rows if row[6] or (row[7] and None in list_entries[row[0]])
        ]
        heads: dict[str, ThreadHead] = {}
        if incomplete_rows:
            head_list = yield from self._saver._threads.read_heads(incomplete_rows)
            heads = {head.thread_id: head for head in head_list}
        return [
            self._build_listed_thread(row, *list_entries[row[0]], heads.get(row[1])) for row in rows
        ]

    def _build_listed_thread(
        self, row: Row, title: Any, encoded_metadata: bytes | None, head: ThreadHead | None
    ) -> ListedThread:
        """Build a thread from its row.

        Args:
            row: The row of the statement `listed_threads`.
            title: The title in the row, or None.
            encoded_metadata: The encoded metadata of the head in the row, or None.
            head: The head, if it was read. Values of the head take precedence over values of the
                row.
        """
        key, thread_id, created_at, updated_at, _, _, may_wait = row[:7]
        _, last_run_status, sealed_client, is_busy = row[7:11]
        minutes, ttl_since, ttl_keeps, removals = row[11:]
        metadata = None if encoded_metadata is None else self._reader.codec.decode(encoded_metadata)
        if head is not None:
            metadata = (
                None
                if head.checkpoint_id is None
                else select_metadata_shown_in_thread_lists(head.metadata)
            )
        text = head.title if head is not None else title.text if title is not None else ""
        times = datetime.fromtimestamp(created_at, UTC), datetime.fromtimestamp(updated_at, UTC)
        status = head.status if head is not None and may_wait else IDLE
        client = decrypt_client_metadata(self._seal, thread_id, sealed_client)
        ttl, expires_at = None, None
        if minutes is not None:
            ttl = TimeToLive(minutes, ttl_keeps > 0)
            expires_at = datetime.fromtimestamp(max(updated_at, ttl_since) + 60 * minutes, UTC)
        return ListedThread(
            thread_id,
            *times,
            metadata,
            text,
            status,
            last_run_status,
            client,
            bool(is_busy),
            key,
            removals,
            ttl,
            expires_at,
        )

    # -- writing

    def create_thread_if_absent(self, thread_id: str, client: ClientMetadata) -> bool:
        """Create a thread without checkpoints, unless the thread already exists.

        Args:
            thread_id: The id of the thread.
            client: The metadata that a client set.

        Returns:
            Whether the thread was created.
        """
        cache, removals, now = self._reader.cache, self._reader.removals, time.time()
        thread, unused_keys = Thread(0, 0), list[int]()
        thread.version_token, thread.updated_at = random.getrandbits(62), now

        def flow() -> Flow[bool]:
            if (yield self._sql("find_thread", thread_id)):
                return False
            unused_keys[:] = yield from self._reader.allocate_row_keys(1)
            thread.key = unused_keys.pop()
            thread.newest_removal = yield from removals.read_newest_number(thread_id)
            row = thread.key, thread_id, 0, thread.version_token, now, now, thread.newest_removal
            insert = self._sql("new_thread", *row, removals.hash_thread_id(thread_id))
            # The new thread has no head yet, so store no title and an empty set of search keys.
            set_title = self._sql("set_list_entry", None, b"", thread.key)
            sealed = encrypt_client_metadata_and_search_keys(self._seal, thread_id, client)
            try:
                yield GuardedRequest(
                    [insert, set_title, self._sql("set_client_metadata", *sealed, thread.key)]
                )
            except GuardFailed:
                return False
            return True

        def update_cache(is_created: bool) -> None:
            if is_created:
                cache.keys.replace_reserved_row_keys(unused_keys)
                cache.replace_thread(thread_id, thread)

        return self._database.write(flow, update_cache, exclusive_names=(thread_id,))

    acreate_thread_if_absent = make_async_twin(create_thread_if_absent)

    def update_thread(
        self,
        thread_id: str,
        build_update: Callable[[ListedThread], tuple[ClientMetadata | None, RunStatus]],
        *,
        may_wait_for_answer: bool = False,
    ) -> None:
        """Update a thread's client-supplied metadata and status. Ignore unknown threads.

        Args:
            thread_id: The thread.
            build_update: A function that returns the new metadata, or None to keep it, and the
                status of the last run. The function is first called with the thread as it is before
                the transaction. If there is something to update, the function is called again with
                the thread as it is in the transaction.
            may_wait_for_answer: Whether to store that the thread may wait for an answer, because
                its last run was interrupted before a node.
        """
        thread = self.get(thread_id)
        if thread is None or (
            not may_wait_for_answer
            and build_update(thread) == (thread.client, thread.last_run_status)
        ):
            return

        def flow() -> Flow[None]:
            for key, _, seq, _ in (yield self._sql("lock_client_metadata", thread_id)):
                stored = yield from self._read_thread(thread_id)
                if stored is not None:
                    client, status = build_update(stored)
                    if client is not None and client != stored.client:
                        sealed = encrypt_client_metadata_and_search_keys(
                            self._seal, thread_id, client
                        )
                        yield self._sql("set_client_metadata", *sealed, key)
                        yield self._sql("reset_transcript_progress", key)
                    if status != stored.last_run_status:
                        yield self._sql("set_status", status, key)
                    if may_wait_for_answer:
                        yield self._sql("mark_may_wait", key)
                    # Update the last-activity time here only if the thread has no checkpoints.
                    # Otherwise, `put` updates it.
                    if not seq:
                        yield self._sql("touch_thread", time.time(), key)

        self._database.write(flow, exclusive_names=(thread_id,), own_writes=self._saver._own_writes)

    aupdate_thread = make_async_twin(update_thread)

    def count_without_ttl(self) -> int:
        """Count the threads without a TTL."""
        ((count,),) = self._database.read(lambda: fetch_rows(self._sql["count_without_ttl"]))
        return int(count)

    def set_ttl(self, thread_id: str, ttl: TimeToLive) -> None:
        """Set the time to live of a thread. The time to live starts now."""
        self._update_row(thread_id, "set_ttl", ttl.minutes, time.time(), int(ttl.keeps_latest))

    aset_ttl = make_async_twin(set_ttl)

    def delete(self, thread_id: str, *, add_removal_record: bool) -> None:
        """Delete a thread; see `Maintenance.delete_thread`."""
        self._saver._maintenance.delete_threads([thread_id], add_removal_record=add_removal_record)

    adelete = make_async_twin(delete)

    def list_expired_thread_ids(self, limit: int) -> list[str]:
        """Return the ids of at most `limit` expired threads that have no unfinished run."""
        params = time.time(), "", limit
        rows = self._database.read(lambda: fetch_rows(self._sql["expired_threads"], *params))
        return [thread_id for thread_id, _ in rows]

    alist_expired_thread_ids = make_async_twin(list_expired_thread_ids)

    def delete_if_expired(self, thread_id: str) -> bool:
        """Delete a thread or its older checkpoints if the thread's TTL has expired.

        If the TTL has `keeps_latest` set, only the older checkpoints are deleted, and the latest
        checkpoint is kept.

        Returns:
            Whether the TTL had expired.
        """
        now, maintenance = time.time(), self._saver._maintenance

        def flow() -> Flow[int | None]:
            rows = yield self._sql("expired_threads", now, thread_id, 1)
            if not rows:
                return None
            if not rows[0][1]:
                yield from maintenance.delete_thread(thread_id)
            return int(rows[0][1])

        keeps = maintenance.delete_and_drop_cached_thread(thread_id, flow)
        if keeps:
            maintenance.retain(Retention(last=0), [thread_id])
            self._update_row(thread_id, "mark_latest_kept", now)
        return keeps is not None

    adelete_if_expired = make_async_twin(delete_if_expired)

    def _update_row(self, thread_id: str, statement_name: str, *params: Any) -> None:
        """Execute an SQL statement that updates the row of a thread."""
        sql = self._sql[statement_name]
        self._database.write(
            lambda: fetch_rows(sql, *params, thread_id), exclusive_names=(thread_id,)
        )

    def copy_thread(
        self,
        source: str,
        target: str,
        checkpoint_id: str | None,
        client: ClientMetadata,
        last_run_status: RunStatus,
    ) -> None:
        """Copy a thread, and set the copy's client metadata; see `Checkpointer.copy_thread`."""
        copy_thread(
            self._saver._maintenance, source, target, checkpoint_id, client, last_run_status
        )

    acopy_thread = make_async_twin(copy_thread)


def append_conditions(sql: str, where: Iterable[tuple[str, list[Any]]]) -> tuple[str, list[Any]]:
    """Append conditions to a SELECT statement.

    Return a tuple of the extended SQL and the list of parameters for the appended conditions.
    """
    params: list[Any] = []
    for condition, values in where:
        sql += f" AND {condition}"
        params += values
    return sql, params


def _build_order_by(query: ThreadQuery) -> str:
    """Return the ORDER BY expressions for a query's sort order."""
    direction = "ASC" if query.sort_order == "asc" else "DESC"
    if query.sort_by in ("thread_id", "created_at"):
        return f"t.{query.sort_by} {direction}, t.updated_at DESC, t.thread_key DESC"
    return f"t.updated_at {direction}, t.thread_key {direction}"
