"""Search, count, create, update and delete threads and the data that the server stores about them.

A search for threads executes one SELECT on the `threads` table for each page of results. The row of
a thread contains a copy of its head's metadata, the client-supplied metadata, and the status of the
last run. The SELECT of a search sorts the rows of the table and filters out those that cannot match
the query. The rows that the SELECT returns are decrypted in Python and compared with the search
criteria. The search reads a thread's head checkpoint only if the thread may be interrupted, or if
the thread's row contains no copy of the head's metadata. If messages are erased from a thread and
the thread's title may quote an erased message, the title and the copy of the head's metadata are
deleted from the thread's row.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final, Literal, NamedTuple, TypeVar

from perdure.checkpointers.cache import Thread, Title
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.records import (
    ChangesByOtherUsers,
    ClientMetadata,
    ThreadRow,
    build_client_metadata_update,
    compute_metadata_index_tag,
    decrypt_client_metadata,
    decrypt_listed_title_and_encoded_metadata,
    fold_search_text,
    iter_search_tags_of_nested_metadata,
    select_metadata_shown_in_thread_lists,
)
from perdure.checkpointers.reports import Retention, ThreadHead, ThreadStatus
from perdure.checkpointers.status import IDLE
from perdure.checkpointers.thread_copy import copy_thread
from perdure.run_tables.component import has_server_tables, load_server_and_checkpointer_sql
from perdure.storage.database import make_async_twin
from perdure.storage.encryption import ChecksumSeal, LangGraphSeal
from perdure.storage.flow import Flow, GuardedRequest, GuardFailed, Row, Statement, fetch_rows

T = TypeVar("T")
RunStatus = Literal["idle", "busy", "interrupted", "error"]
SortBy = Literal["thread_id", "created_at", "updated_at", "state_updated_at", "status"]
# maximum number of rows returned by each SQL statement of a search
_PAGE: Final = 2_000
# maximum number of threads whose keys a search reads before it sorts these threads
_MAX_SORTED_THREADS: Final = 1_000
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
    # The second condition repeats that of the partial index, so that the index can be used.
    "error": "t.status = 'error' AND t.status IN ('busy', 'error')",
    "busy": "(t.status = 'busy' OR {is_busy})",
}


# Names of the SQL conditions on a thread's runs. SQL statements contain the names as placeholders,
# such as `{is_busy}`.
_RUN_CONDITIONS: Final = ("is_busy", "has_unfinished_run")


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


class _ServerColumns(NamedTuple):
    """The last columns of each row that the SQL statement `listed_threads` returns.

    The first columns of the result are the fields of a `ThreadRow`.

    Attributes:
        may_wait: 1 if a head of the thread may wait for an answer, otherwise 0.
        last_seq: The highest sequence number of the thread's checkpoints, or 0.
        last_run_status: The status of the last run on the server.
        client_metadata: The encrypted metadata that clients of the server set, or None.
        is_busy: Whether a run of the thread is pending or running.
        ttl_minutes: The time to live in minutes, or None.
        ttl_since: The time at which the time to live was set, in seconds since 1970.
        ttl_keeps_latest: See the statement `set_ttl`.
        newest_removal: The number of the newest removal from the thread, or 0.
    """

    may_wait: int
    last_seq: int
    last_run_status: RunStatus
    client_metadata: bytes | None
    is_busy: int
    ttl_minutes: float | None
    ttl_since: float
    ttl_keeps_latest: int
    newest_removal: int


# The first columns in the result of the statement `listed_threads` are the fields of a `ThreadRow`.
# This constant is the number of these columns.
_SHARED_COLUMNS: Final = len(ThreadRow._fields)


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
        is_busy: Whether a run of the server is pending or running. A delayed run does not count.
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
    def changes_by_other_users(self) -> ChangesByOtherUsers:
        """Whether a user to whom the thread does not belong has changed the thread.

        The value is `"none"` for a thread that was stored by a program other than the server.
        """
        return "none" if self.client is None else self.client.changes_by_other_users

    @property
    def does_client_metadata_describe_stored_conversation(self) -> bool:
        """Whether the client-supplied metadata describes the conversation stored in this thread.

        A client can reserve a thread id and set metadata before the thread has checkpoints. After a
        client has reserved a thread id, a program other than the server may store a conversation
        under this id. If a program other than the server has stored a conversation under the
        reserved thread id, the client-supplied metadata does not describe this conversation.
        """
        if self.head_metadata is None or self.client is None or not self.client.is_reserved:
            return True
        # The server stores both assistant_id and user_id in checkpoint metadata. Other programs may
        # store assistant_id, but never both keys.
        return self.head_metadata.keys() >= {"assistant_id", "user_id"}

    @property
    def client_metadata_of_conversation(self) -> ClientMetadata:
        """The clients' metadata, or empty metadata if another program stored the conversation.

        See `does_client_metadata_describe_stored_conversation`.
        """
        if self.client is None or not self.does_client_metadata_describe_stored_conversation:
            return ClientMetadata({})
        return self.client

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the thread's head, merged with the client-supplied metadata.

        If the head's metadata has `user_id` but no `owner`, the `user_id` is the default for
        `owner` in the merged metadata. The head is the thread's newest checkpoint in the current
        branch. Client-supplied values take precedence over values from the head's metadata, except
        for `owner` and `user_id`. The `owner` and `user_id` of the head take precedence, because
        the client's metadata may come from a different user.
        """
        head_metadata, client = self.head_metadata or {}, self.client_metadata_of_conversation
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
        return str(self.client_metadata_of_conversation.metadata.get("title") or self.title)


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
        self._parts, self._database = saver.parts, saver.database
        self._reader, self._seal = saver.parts.reader, saver.parts.seal
        self._sql = load_server_and_checkpointer_sql(saver)

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
        return self._database.read(lambda: self.search_in_transaction(query, match, limit, offset))

    asearch = make_async_twin(search)

    def get(self, thread_id: str) -> ListedThread | None:
        """Return a thread, or None if it does not exist."""
        return self._database.read(lambda: self.read_in_transaction(thread_id))

    aget = make_async_twin(get)

    def count_threads(self, query: ThreadQuery) -> int:
        """Count the threads that match the SQL conditions of a query."""

        def count() -> Flow[int]:
            conditions = [*self.iter_query_conditions(query)]
            conditions += yield from self._build_candidate_key_conditions(query)
            sql, params = append_conditions(self._sql["count_listed_threads"], conditions)
            sql = yield from self._fill_in_run_conditions(sql)
            ((thread_count,),) = yield Statement(sql, tuple(params))
            return int(thread_count)

        return self._database.read(count)

    acount_threads = make_async_twin(count_threads)

    def search_in_transaction(
        self,
        query: ThreadQuery,
        match: Callable[[ListedThread], T | None],
        limit: int,
        offset: int = 0,
    ) -> Flow[list[T]]:
        """Return one page of the threads that match a query; see `search`.

        This flow can be part of a longer transaction, so that the transaction's other statements
        see the same state of the database.
        """
        key_conditions = yield from self._build_candidate_key_conditions(query)
        sql, params = append_conditions(
            self._sql["listed_threads"], [*self.iter_query_conditions(query), *key_conditions]
        )
        sql = yield from self._fill_in_run_conditions(sql)
        # If the keys of the candidates are known, read these rows instead of the index of activity.
        activity = "(t.updated_at + 0)" if key_conditions else "t.updated_at"
        sql += f" ORDER BY {_build_order_by(query, activity)} LIMIT ? OFFSET ?"
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

    def _build_candidate_key_conditions(
        self, query: ThreadQuery
    ) -> Flow[list[tuple[str, list[Any]]]]:
        """Build the condition that a thread is one of those that can match, if these are few.

        The keys are read from an index by the user or by the status. Without them, a search reads
        the threads in the order of activity, and skips those that do not match.

        Returns:
            A list with one SQL condition and its parameters, or an empty list if no index
            fits the query or if too many threads can match.
        """
        limit, tags = _MAX_SORTED_THREADS + 1, self._compute_tags_of_user(query.metadata or {})
        if tags is not None:
            rows = yield self._sql("keys_of_threads_of_user", *tags, limit)
        elif query.status == "busy" and (yield from has_server_tables(self._database)):
            rows = yield self._sql("keys_of_busy_threads", limit)
        else:
            return []
        keys = {key for (key,) in rows}
        if len(keys) > _MAX_SORTED_THREADS:
            return []
        return [(self._sql["has_key_in_list"], [json.dumps(sorted(keys))])]

    def _compute_tags_of_user(
        self, metadata: Mapping[str, Any]
    ) -> tuple[int | None, int | None, int | None, int | None] | None:
        """Compute the index tags that a thread can have if its metadata has the given user.

        Returns:
            The tags of `user_id` and `owner` in the metadata of the head, followed by those in the
            metadata of clients. A tag is None if no thread can match by this field. The result is
            None if the metadata names no user, or if the value is not indexed.
        """
        for name in ("user_id", "owner"):
            tag = compute_metadata_index_tag(self._seal, name, metadata.get(name))
            if tag is not None and name == "user_id":
                return tag, None, tag, None
            if tag is not None:
                # A thread whose head has no `owner` belongs to the head's `user_id`.
                user_tag = compute_metadata_index_tag(self._seal, "user_id", metadata[name])
                return user_tag, tag, None, tag
        return None

    def read_in_transaction(self, thread_id: str) -> Flow[ListedThread | None]:
        """Return a thread, or None if it does not exist; see `search_in_transaction`."""
        sql = yield from self._fill_in_run_conditions(self._sql["listed_threads"])
        rows = yield Statement(f"{sql} AND t.thread_id = ?", (thread_id,))
        return next(iter((yield from self._decrypt_threads(rows))), None)

    def _fill_in_run_conditions(self, sql: str) -> Flow[str]:
        """Replace the placeholders in the SQL with conditions on the runs of a thread.

        If the database does not have the server's tables, the thread has no runs.
        """
        has_runs = yield from has_server_tables(self._database)
        for name in _RUN_CONDITIONS:
            sql = sql.replace(f"{{{name}}}", self._sql[name] if has_runs else "FALSE")
        return sql

    def iter_query_conditions(self, query: ThreadQuery) -> Iterator[tuple[str, list[Any]]]:
        """Yield each SQL condition of a query with its parameters."""
        if query.ids is not None:
            # Omit ids with a null character, because no thread has such an id and Postgres rejects
            # null characters in parameters.
            ids = [thread_id for thread_id in query.ids if "\0" not in thread_id]
            yield f"t.thread_id IN ({', '.join('?' for _ in ids) or 'NULL'})", ids
        if query.status is not None:
            yield _BY_STATUS[query.status], []
        # A datetime has a precision of only one microsecond. Extend the time range from
        # `active_since` to `active_until` by one microsecond at each end.
        if query.active_since is not None:
            yield "t.updated_at >= ?", [query.active_since.timestamp() - 1e-6]
        if query.active_until is not None:
            yield "t.updated_at <= ?", [query.active_until.timestamp() + 1e-6]
        if query.is_unindexed:
            yield self._sql["is_unindexed"], []
        if query.text and isinstance(self._seal, ChecksumSeal):
            yield self._build_contains_any_search_key_condition([fold_search_text(query.text)])
        # Rows encrypted with a LangGraphSeal have no search keys, so SQL cannot compare their
        # metadata.
        if not isinstance(self._seal, LangGraphSeal):
            tags = islice(
                self._iter_possible_search_tags_of_each_value(query.metadata or {}), _MAX_TAGS
            )
            yield from map(self._build_contains_any_search_key_condition, tags)

    def _build_contains_any_search_key_condition(
        self, search_keys: Sequence[bytes]
    ) -> tuple[str, list[Any]]:
        """Build an SQL condition that is true if a row contains any of the search keys.

        Rows without stored search keys always fulfil the condition, because only decrypting them
        shows whether they match.
        """
        sql = " OR ".join([self._sql["matches_search_key"]] * len(search_keys))
        return f"({sql})", [param for search_key in search_keys for param in (search_key,) * 2]

    def _iter_possible_search_tags_of_each_value(
        self, metadata: Mapping[str, Any]
    ) -> Iterator[list[bytes]]:
        """Yield a list of search tags for each string or number in a query's metadata.

        A tag is a search key that is computed from a metadata key and its value. A thread can match
        the query only if the thread has at least one tag from each yielded list. For each string or
        number under the metadata key `owner`, the method yields a list with two tags. The second
        tag is computed with the key `user_id`, because some threads record their owner only under
        `user_id`.
        """
        for name, value in metadata.items():
            names = (name, "user_id") if name == "owner" else (name,)
            tags = [iter_search_tags_of_nested_metadata(self._seal, value, key) for key in names]
            for alternatives in zip(*tags, strict=True):
                yield [tag.to_bytes(8, "big", signed=True) for tag in alternatives]

    def _decrypt_threads(self, rows: Sequence[Row]) -> Flow[list[ListedThread]]:
        """Decrypt rows of threads.

        The head of a thread is read from the database if the thread may be waiting for an answer,
        or if the thread's row lacks data that is shown in thread lists.
        """
        listed_rows = [
            (ThreadRow(*row[:_SHARED_COLUMNS]), _ServerColumns(*row[_SHARED_COLUMNS:]))
            for row in rows
        ]
        list_entries = [
            decrypt_listed_title_and_encoded_metadata(self._seal, row.thread_id, row.list_entry)
            for row, _ in listed_rows
        ]
        incomplete_rows = [
            row
            for (row, columns), entry in zip(listed_rows, list_entries, strict=True)
            if columns.may_wait or (columns.last_seq and None in entry)
        ]
        heads: dict[str, ThreadHead] = {}
        if incomplete_rows:
            head_list = yield from self._parts.maintenance.threads.read_heads(incomplete_rows)
            heads = {head.thread_id: head for head in head_list}
        return [
            self._build_listed_thread(row, columns, *entry, heads.get(row.thread_id))
            for (row, columns), entry in zip(listed_rows, list_entries, strict=True)
        ]

    def _build_listed_thread(
        self,
        row: ThreadRow,
        columns: _ServerColumns,
        title: Title | None,
        encoded_metadata: bytes | None,
        head: ThreadHead | None,
    ) -> ListedThread:
        """Build a thread from its row.

        Args:
            row: The columns of the row that all lists of threads read.
            columns: The columns of the row that only this module reads.
            title: The title in the row, or None.
            encoded_metadata: The encoded metadata of the head in the row, or None.
            head: The head, if it was read. Values of the head take precedence over values of the
                row.
        """
        metadata = None if encoded_metadata is None else self._reader.codec.decode(encoded_metadata)
        if head is not None:
            metadata = (
                None
                if head.checkpoint_id is None
                else select_metadata_shown_in_thread_lists(head.metadata)
            )
        text = head.title if head is not None else title.text if title is not None else ""
        ttl, expires_at = None, None
        if columns.ttl_minutes is not None:
            ttl = TimeToLive(columns.ttl_minutes, columns.ttl_keeps_latest > 0)
            ttl_start = max(row.updated_at, columns.ttl_since)
            expires_at = datetime.fromtimestamp(ttl_start + 60 * columns.ttl_minutes, UTC)
        return ListedThread(
            row.thread_id,
            datetime.fromtimestamp(row.created_at, UTC),
            datetime.fromtimestamp(row.updated_at, UTC),
            metadata,
            text,
            head.status if head is not None and columns.may_wait else IDLE,
            columns.last_run_status,
            decrypt_client_metadata(self._seal, row.thread_id, columns.client_metadata),
            bool(columns.is_busy),
            row.key,
            columns.newest_removal,
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
            thread.newest_removal = yield from removals.read_newest_record_number(thread_id)
            insert = self._sql(
                "new_thread",
                thread.key,
                thread_id,
                0,
                thread.version_token,
                now,
                now,
                thread.newest_removal,
                removals.hash_thread_id(thread_id),
            )
            # Store no title and no search keys, because the new thread has no checkpoint yet.
            set_title = self._sql("set_list_entry_without_user", None, b"", thread.key)
            set_client = build_client_metadata_update(
                self._sql, self._seal, thread.key, thread_id, client
            )
            try:
                yield GuardedRequest([insert, set_title, set_client])
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
                stored = yield from self.read_in_transaction(thread_id)
                if stored is not None:
                    client, status = build_update(stored)
                    if client is not None and client != stored.client:
                        yield build_client_metadata_update(
                            self._sql, self._seal, key, thread_id, client
                        )
                        if stored.client is None or client.metadata != stored.client.metadata:
                            yield self._sql("reset_transcript_progress", key)
                    if status != stored.last_run_status:
                        yield self._sql("set_status", status, key)
                    if may_wait_for_answer:
                        yield self._sql("mark_may_wait", key)
                    # Update the last-activity time here only if the thread has no checkpoints.
                    # Otherwise, `put` updates it.
                    if not seq:
                        yield self._sql("touch_thread", time.time(), key)

        self._database.write(flow, exclusive_names=(thread_id,), own_writes=self._parts.own_writes)

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
        self._parts.maintenance.delete_threads([thread_id], add_removal_record=add_removal_record)

    adelete = make_async_twin(delete)

    def list_expired_thread_ids(self, limit: int) -> list[str]:
        """Return the ids of at most `limit` expired threads that have no unfinished run."""
        rows = self._database.read(lambda: self._select_expired_threads(time.time(), "", limit))
        return [thread_id for thread_id, _ in rows]

    alist_expired_thread_ids = make_async_twin(list_expired_thread_ids)

    def _select_expired_threads(
        self, now: float, thread_id_or_all: str, limit: int
    ) -> Flow[list[Row]]:
        """Select the id and `keeps_latest` of each expired thread that has no unfinished run.

        Args:
            now: The current time, in seconds since 1970.
            thread_id_or_all: The thread to select if it has expired, or `""` for all threads.
            limit: The maximum number of threads.
        """
        sql = yield from self._fill_in_run_conditions(self._sql["expired_threads"])
        return (yield Statement(sql, (now, thread_id_or_all, limit)))  # type: ignore[no-any-return]

    def delete_if_expired(self, thread_id: str) -> bool:
        """Delete a thread or its older checkpoints if the thread's TTL has expired.

        If the TTL has `keeps_latest` set, the latest checkpoint is kept and only older checkpoints
        are deleted.

        Returns:
            Whether the TTL had expired.
        """
        now, maintenance = time.time(), self._parts.maintenance

        def flow() -> Flow[int | None]:
            rows = yield from self._select_expired_threads(now, thread_id, 1)
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
        self._database.write(
            lambda: fetch_rows(self._sql[statement_name], *params, thread_id),
            exclusive_names=(thread_id,),
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
        copy_thread(self._parts.maintenance, source, target, checkpoint_id, client, last_run_status)

    acopy_thread = make_async_twin(copy_thread)


def append_conditions(sql: str, where: Iterable[tuple[str, list[Any]]]) -> tuple[str, list[Any]]:
    """Append conditions to a SELECT statement.

    Return the SELECT statement with the appended conditions, and the parameters of these
    conditions.
    """
    params: list[Any] = []
    for condition, values in where:
        sql += f" AND {condition}"
        params += values
    return sql, params


def _build_order_by(query: ThreadQuery, activity: str) -> str:
    """Return the ORDER BY expressions for a query's sort order.

    Args:
        query: The query.
        activity: The SQL expression of the time of a thread's last activity.
    """
    direction = "ASC" if query.sort_order == "asc" else "DESC"
    if query.sort_by in ("thread_id", "created_at"):
        return f"t.{query.sort_by} {direction}, {activity} DESC, t.thread_key DESC"
    return f"{activity} {direction}, t.thread_key {direction}"
