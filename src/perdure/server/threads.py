"""Read, create, change and delete threads and their client metadata, for the server's API.

The metadata that clients set for a thread is stored in the thread's row, because checkpoints do not
contain it. A thread has a row even if it has no checkpoints. A thread's row also stores the status
of its last run on a server. To find out whether a thread waits for an answer to an interrupt, the
server reads the thread's head. The head may have been stored by a program other than the server. A
new thread only reserves its id. If a program other than the server stores a new thread's first
checkpoint, the metadata that a client set for the thread is ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from itertools import chain, count
from typing import Any, Final, NamedTuple, get_args
from uuid import uuid4

from perdure.checkpointers import Retention, ThreadStatus
from perdure.checkpointers.address import check_thread_id
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.labels import USER_LABELS
from perdure.checkpointers.records import ChangesByOtherUsers, ClientMetadata
from perdure.errors import (
    AlreadyLocked,
    ConfigurationError,
    InvalidConfig,
    StorageUnavailable,
    UnknownThread,
    VersionConflict,
)
from perdure.memory.thread_search import ThreadHits, TranscriptSearch, VisibleThreads
from perdure.run_tables.records import RunRow
from perdure.run_tables.runs import RunTable
from perdure.run_tables.thread_list import (
    ListedThread,
    RunStatus,
    ThreadList,
    ThreadQuery,
    TimeToLive,
)
from perdure.server.http.access import (
    Filter,
    build_json_containment_predicate,
    matches_filter,
    require_filter_match,
)
from perdure.server.http.reply import encode_json
from perdure.server.thread_person import find_person_of_thread
from perdure.settings import SEARCH_LIMIT, check_user
from perdure.storage.flow import NO_LIMIT
from perdure.stores.store import Store
from perdure.stores.values import encode_value_as_json

Thread = dict[str, Any]
"""A thread in the format of LangGraph's API, without its values."""
MAX_METADATA_BYTES: Final = 64_000
"""The maximum size in bytes of the metadata that a client gives a thread, as JSON."""
MAX_METADATA_LEVELS: Final = 8
"""The maximum nesting of the metadata that a client gives a thread. `{"a": 1}` has one level."""
_MAX_ID_BYTES: Final = 4096  # Maximum number of bytes in the id of a new thread
# Number of runs that a search reads from the database in one batch
_RUNS_PER_READ: Final = 500
LOCK_RELEASE_S: Final = 0.5
"""Maximum number of seconds that a change waits for the thread's lock if the thread has no live
run."""
# Maximum number of seconds that `delete` waits for the thread's lock if another program holds it
_DELETE_WAIT_S: Final = 5


def validate_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Validate and return the metadata that a client sets for a thread, a run or another object.

    The size of a thread's metadata is limited, because it is read whenever threads are listed.

    Raises:
        ConfigurationError: The metadata has more than 64 kB as JSON, more than 8 levels, or an
            integer of more than 64 bits, which no checkpoint can hold.
    """
    containers: list[Any] = [metadata]
    for _ in range(MAX_METADATA_LEVELS):
        values = [
            *chain(
                *(
                    container.values() if isinstance(container, dict) else container
                    for container in containers
                )
            )
        ]
        containers = [value for value in values if isinstance(value, dict | list)]
        for value in values:
            if isinstance(value, int) and not -(2**63) <= value < 2**64:
                raise ConfigurationError(
                    f"the metadata contains an integer of {value.bit_length()} bits; at most 64 "
                    "bits are allowed"
                )
    if containers:
        raise ConfigurationError(
            f"the metadata {metadata!r:.80} is nested too deeply; expected at most "
            f"{MAX_METADATA_LEVELS} levels"
        )
    if (size := len(encode_json(metadata))) > MAX_METADATA_BYTES:
        raise ConfigurationError(
            f"the metadata {metadata!r:.80} is {size} bytes long as JSON; at most "
            f"{MAX_METADATA_BYTES} bytes are allowed"
        )
    return metadata


def validate_user_names_in_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Check the user names, if any, in metadata that a client sent, and return the metadata.

    Raises:
        ConfigurationError: `owner` or `user_id` is blank.
    """
    for name in USER_LABELS:
        if isinstance(metadata.get(name), str):
            check_user(f"{name!r} in the metadata", metadata[name], f"remove {name!r}")
    return metadata


class WaitingThread(NamedTuple):
    """A thread that waits for answers to its questions.

    Attributes:
        thread: The thread.
        questions: The questions in the order of their tasks. Each is a pair of the node that asked
            the question, and the interrupt in the format of LangGraph's API.
    """

    thread: Thread
    questions: list[tuple[str, dict[str, Any]]]


class Threads:
    """Reads and changes the threads to which a caller has access.

    If the caller has no access to a thread, the methods of this class behave as if the thread did
    not exist.

    Args:
        saver: The checkpointer that has the threads.
        filter: The caller has access only to threads whose metadata matches this filter.
        has_run_in_process: Returns whether this process has an unfinished run of the thread with a
            given id, even if the thread has been deleted.
        drop_runs_and_events_of_thread: Called with the id of a deleted thread, before a new thread
            gets this id.
        default_ttl: The time to live of a new thread for which the client sets none. None means no
            limit.
        owners_are_people: Whether the `owner` of threads is the user of an API key.
    """

    def __init__(
        self,
        saver: Checkpointer,
        filter: Filter,
        has_run_in_process: Callable[[str], bool] = lambda _: False,
        drop_runs_and_events_of_thread: Callable[[str], None] = lambda _: None,
        default_ttl: TimeToLive | None = None,
        *,
        owners_are_people: bool = True,
    ) -> None:
        self._saver, self._list, self._default_ttl = saver, ThreadList(saver), default_ttl
        self._filter, self._has_run_in_process = filter, has_run_in_process
        self._drop_runs_and_events_of_thread = drop_runs_and_events_of_thread
        self._owners_are_people = owners_are_people

    # -- one thread

    async def get(self, thread_id: str) -> Thread:
        """Return a thread in the format of LangGraph's API; see `get_permitted_row`."""
        return _convert_row_to_api_thread(await self.get_permitted_row(thread_id))

    async def get_permitted_row(self, thread_id: str) -> ListedThread:
        """Return a thread's row if the caller is allowed to access the thread.

        Raises:
            UnknownThread: The thread does not exist, or the caller has no access to it.
        """
        thread = await self.get_row(thread_id)
        if not matches_filter(thread.metadata, self._filter):
            raise build_unknown_thread_error(thread_id)
        return thread

    async def create(
        self,
        thread_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        source_user: str | None = None,
        ttl: TimeToLive | None = None,
    ) -> Thread:
        """Create a thread.

        Args:
            thread_id: The id of the thread, or None for a new id.
            metadata: The metadata of the thread.
            source_user: If the new thread is a copy, the user of the original thread; otherwise
                None.
            ttl: The time to live, or None for the default.

        Raises:
            VersionConflict: A thread with this id exists.
            Forbidden: The caller would have no access to a thread with this metadata.
        """
        thread_id = str(uuid4()) if thread_id is None else thread_id
        client = ClientMetadata(
            _copy_storable_metadata(metadata or {}), source_user, is_reserved=True
        )
        is_new = await self._find_thread_or_authorize_creation(thread_id, client.metadata) is None
        if is_new and await self._insert_thread_row_if_absent(thread_id, client, ttl):
            return await self.get(thread_id)
        raise already_exists_error(f"a thread {thread_id!r}")

    async def get_or_create_row(self, thread_id: str, metadata: Mapping[str, Any]) -> ListedThread:
        """Return a thread's row. If the thread does not exist, create it with the given metadata.

        Raises:
            UnknownThread: The caller has no access to the existing thread with this id.
            VersionConflict: The thread with this id was deleted meanwhile.
            Forbidden: The caller would have no access to a new thread with this metadata.
        """
        client = ClientMetadata(_copy_storable_metadata(metadata), None, is_reserved=True)
        existing = await self._find_thread_or_authorize_creation(thread_id, client.metadata)
        if existing is None:
            if await self._insert_thread_row_if_absent(thread_id, client):
                return await self.get_permitted_row(thread_id)
            existing = await self._list.aget(thread_id)
        if existing is None:
            raise already_exists_error(f"a thread {thread_id!r}")
        if not matches_filter(existing.metadata, self._filter):
            # The caller has no access to this thread, so raise the same error as for a missing
            # thread.
            raise build_unknown_thread_error(thread_id)
        return existing

    async def _insert_thread_row_if_absent(
        self, thread_id: str, client: ClientMetadata, ttl: TimeToLive | None = None
    ) -> bool:
        """Insert the row of a new thread, and set the thread's time to live.

        Return True if the row was inserted, or False if another request has inserted it first.
        """
        if not await self._list.acreate_thread_if_absent(thread_id, client):
            return False
        if (ttl := ttl or self._default_ttl) is not None:
            await self._list.aset_ttl(thread_id, ttl)
        return True

    async def update(
        self, thread_id: str, metadata: Mapping[str, Any], ttl: TimeToLive | None = None
    ) -> Thread:
        """Add metadata to a thread, replacing existing entries with the same names.

        Args:
            thread_id: The thread.
            metadata: The metadata to add.
            ttl: The new time to live, or None to leave it unchanged.

        Raises:
            UnknownThread: See `get`.
            Forbidden: The caller would lose access to the thread.
            ConfigurationError: See `validate_metadata`.
        """
        thread = await self.get(thread_id)
        require_filter_match("a thread", {**thread["metadata"], **metadata}, self._filter)

        def merge_metadata(thread: ListedThread) -> tuple[ClientMetadata, RunStatus]:
            client, last_status = _get_client_metadata_and_run_status_to_store(thread)
            merged = validate_metadata({**client.metadata, **metadata})
            return client._replace(metadata=_copy_storable_metadata(merged)), last_status

        await self._list.aupdate_thread(thread_id, merge_metadata)
        if ttl is not None:
            await self._list.aset_ttl(thread_id, ttl)
        return await self.get(thread_id)

    async def get_row(self, thread_id: str) -> ListedThread:
        """Return a thread's row without checking the caller's permissions.

        Raises:
            UnknownThread: The thread does not exist.
        """
        if thread := await self._list.aget(thread_id):
            return thread
        raise build_unknown_thread_error(thread_id)

    async def set_run_status(
        self, thread_id: str, status: RunStatus, former_row: ListedThread | None = None
    ) -> None:
        """Store the status of a thread's last run. Skip the write if `former_row` is up to date.

        Args:
            thread_id: The thread.
            status: How the run ended.
            former_row: The row of the thread before the run, or None if it is unknown.
        """
        is_waiting = status == "interrupted"
        if (
            former_row
            and former_row.head_metadata is not None
            and not is_waiting
            and (_get_client_metadata_and_run_status_to_store(former_row)[0], status)
            == (former_row.client, former_row.last_run_status)
        ):
            return
        await self._list.aupdate_thread(
            thread_id,
            lambda thread: (_get_client_metadata_and_run_status_to_store(thread)[0], status),
            may_wait_for_answer=is_waiting,
        )

    async def record_changes_by_other_users(
        self, thread_id: str, changes: ChangesByOtherUsers
    ) -> None:
        """Store whether other users have changed a thread; see `ChangesByOtherUsers`.

        The caller must hold the thread's lock. Unknown threads are ignored.
        """

        def replace_changes(thread: ListedThread) -> tuple[ClientMetadata | None, RunStatus]:
            if thread.changes_by_other_users == changes:
                return thread.client, thread.last_run_status
            client, status = _get_client_metadata_and_run_status_to_store(thread)
            return client._replace(changes_by_other_users=changes), status

        await self._list.aupdate_thread(thread_id, replace_changes)

    async def delete(self, thread_id: str) -> None:
        """Delete a thread and its checkpoints, but keep memories that were extracted from it.

        Raises:
            UnknownThread: See `get`.
            AlreadyLocked: The thread has a live run, or another program has held its lock for more
                than `_DELETE_WAIT_S` seconds.
        """
        async with self.lock_for_change(thread_id, timeout_s=_DELETE_WAIT_S):
            await self.delete_while_holding_lock(thread_id, adds_removal_record=True)

    async def delete_while_holding_lock(self, thread_id: str, *, adds_removal_record: bool) -> None:
        """Delete a thread and its runs. The caller must hold the thread's lock.

        Args:
            thread_id: The thread.
            adds_removal_record: Whether to write a removal record; see `Maintenance.delete_thread`.

        Raises:
            UnknownThread: See `get`.
        """
        await self.get(thread_id)
        await self._list.adelete(thread_id, add_removal_record=adds_removal_record)
        self._drop_runs_and_events_of_thread(thread_id)

    async def delete_expired(self, limit: int) -> int:
        """Delete threads whose TTL has expired, and return the number of expired threads.

        If an expired thread's TTL has `keeps_latest` set, the thread and its latest checkpoint are
        kept. Expired threads that have a live run, or whose lock is already held, are not deleted
        by this call.

        Args:
            limit: The maximum number of threads.
        """
        expired_count = 0
        for thread_id in await self._list.alist_expired_thread_ids(limit):
            with suppress(AlreadyLocked):
                async with self.lock_for_change(thread_id, timeout_s=0):
                    expired_count += await self._list.adelete_if_expired(thread_id)
                    if await self._list.aget(thread_id) is None:
                        self._drop_runs_and_events_of_thread(thread_id)
        return expired_count

    async def prune(self, thread_id: str, keep: Retention) -> None:
        """Delete all checkpoints of a thread except those that the retention rule `keep` retains.

        `prune` raises the same errors as `get` and `lock_for_change`.
        """
        async with self.lock_for_change(thread_id):
            await self.get(thread_id)
            await self._saver.aretain(keep, thread_ids=[thread_id])

    async def copy(
        self,
        thread_id: str,
        metadata: Mapping[str, Any],
        target: str | None = None,
        checkpoint_id: str | None = None,
        *,
        is_chosen_by_other_user: bool = False,
    ) -> Thread:
        """Copy a thread. The caller's right to read the original thread is not checked.

        The new thread contains copies of the original thread's checkpoints. The copy has the
        original thread's metadata, updated with `metadata`.

        Args:
            thread_id: The thread to copy.
            metadata: Metadata of the copy, which replaces entries of the same names.
            target: The id of the copy, or None for a new id.
            checkpoint_id: The last checkpoint to copy, or None for all checkpoints.
            is_chosen_by_other_user: Whether a user other than the person to whom the thread belongs
                has chosen the checkpoint; see `ChangesByOtherUsers`.

        Raises:
            UnknownThread: The thread does not exist.
            VersionConflict: A thread with the id of the copy exists.
            Forbidden: See `create`.
        """
        source = _convert_row_to_api_thread(await self.get_row(thread_id))
        target = str(uuid4()) if target is None else target
        user = source["metadata"].get("user_id")
        client = ClientMetadata(_copy_storable_metadata({**source["metadata"], **metadata}), user)
        if is_chosen_by_other_user:
            client = client._replace(changes_by_other_users="since_last_message")
        if await self._find_thread_or_authorize_creation(target, client.metadata) is not None:
            raise already_exists_error(f"a thread {target!r}")
        # If the original thread is busy, the copy gets the status "idle", because the run in
        # progress is not copied. If only the checkpoints up to `checkpoint_id` are copied, the copy
        # gets the status "idle" too, because its last checkpoint may not be the end of the last
        # run.
        is_status_outdated = source["status"] == "busy" or checkpoint_id is not None
        status: RunStatus = "idle" if is_status_outdated else source["status"]
        try:
            await self._list.acopy_thread(thread_id, target, checkpoint_id, client, status)
        except UnknownThread:
            # The original thread has no checkpoint to copy, so copy only its metadata to the new
            # thread.
            return await self.create(target, client.metadata, source_user=user)
        except InvalidConfig as exc:
            raise already_exists_error(f"a thread {target!r}") from exc
        if self._default_ttl is not None and "ttl" not in source:
            await self._list.aset_ttl(target, self._default_ttl)
        return await self.get(target)

    @asynccontextmanager
    async def lock_for_change(
        self, thread_id: str, timeout_s: float | None = None
    ) -> AsyncIterator[None]:
        """Hold a thread's lock during the `with` block, so that the block can change the thread.

        Args:
            thread_id: The thread.
            timeout_s: How long to wait for the lock, in seconds. None means to wait up to
                `LOCK_RELEASE_S` seconds if the thread has no live run, because a run releases the
                lock shortly after its end has been stored.

        Raises:
            AlreadyLocked: The lock is still held after this time; or the thread has a live run,
                such as one whose server has died and that no other server has taken over yet.
        """
        message = (
            f"a run of the thread {thread_id!r} is still active; wait until the run has ended, or "
            "cancel it"
        )
        table = RunTable(self._saver)
        timeouts = [0, LOCK_RELEASE_S] if timeout_s is None else [timeout_s]
        async with AsyncExitStack() as stack:
            for attempt, timeout in enumerate(timeouts, 1):
                try:
                    await stack.enter_async_context(self._saver.lock(thread_id, timeout_s=timeout))
                    break
                except StorageUnavailable as exc:
                    if not isinstance(exc.__cause__, TimeoutError):
                        # A storage error, not a timeout, prevented the locking of the thread. Raise
                        # the storage error, because it is unknown whether a run holds the lock.
                        raise
                    if attempt == len(timeouts) or await table.list_live_run_ids(thread_id):
                        raise AlreadyLocked(message) from exc
            if await table.list_live_run_ids(thread_id):
                raise AlreadyLocked(message)
            yield

    def find_person_of_thread(self, thread: ListedThread) -> str | None:
        """Return the user whose memories a thread's runs use.

        See `thread_person.find_person_of_thread`.
        """
        return find_person_of_thread(thread, owners_are_people=self._owners_are_people)

    def is_readable_by(self, thread: ListedThread, person: str) -> bool:
        """Return whether a thread belongs to the given person or has no owner.

        If `find_person_of_thread` finds no person, for example because no memories are extracted
        from the thread, the thread belongs to the `owner` in its metadata.
        """
        owner = self.find_person_of_thread(thread) or thread.metadata.get("owner")
        return owner is None or owner == person

    async def _find_thread_or_authorize_creation(
        self, thread_id: str, metadata: Mapping[str, Any]
    ) -> ListedThread | None:
        """Return a thread's row, or None if the thread does not exist and may be created.

        Raises:
            InvalidConfig: The id is too long, or has a NUL character.
            VersionConflict: A run of a deleted thread with this id is still under way.
            Forbidden: The caller would have no access to a thread with this metadata.
        """
        if "\0" in thread_id:
            raise InvalidConfig(
                f"the thread_id {thread_id!r:.80} contains a NUL character; remove the character"
            )
        if (size := len(check_thread_id(thread_id).encode())) > _MAX_ID_BYTES:
            raise InvalidConfig(
                f"the thread_id {thread_id!r:.80} is {size} bytes long; at most {_MAX_ID_BYTES} "
                "bytes are allowed"
            )
        thread = await self._list.aget(thread_id)
        if thread is None and self._has_run_in_process(thread_id):
            # The thread has a run but no row. Read the row again, because the thread may have been
            # created after the first read. If the thread's row is still missing, the thread was
            # deleted during its run.
            thread = await self._list.aget(thread_id)
            if thread is None:
                raise already_exists_error(f"a thread {thread_id!r}")
        if thread is None:
            require_filter_match("a thread", metadata, self._filter)
            # Another program may have deleted an earlier thread with the same id. Drop the earlier
            # thread's runs and events from memory, so that the new thread does not inherit them.
            self._drop_runs_and_events_of_thread(thread_id)
        return thread

    # -- many threads

    async def search(
        self, query: ThreadQuery, limit: int = SEARCH_LIMIT, offset: int = 0
    ) -> list[Thread]:
        """Return one page of the threads that match a query.

        A thread search executes a single SELECT statement on the rows of all threads. The SELECT
        statement sorts the threads, and filters them by time, by status, and by strings and numbers
        in the metadata. If the database is not encrypted, the SELECT statement also filters by the
        search text. Conditions that cannot be expressed in SQL are evaluated in Python on the
        decrypted rows of all threads, without blocking the event loop. A search that is sorted by
        status runs one SELECT per status, because the status of some threads depends on their
        latest checkpoints.
        """
        if query.sort_by == "status":
            return await self._search_by_status(query, limit, offset)
        return await self._list.asearch(
            self._add_permission_filter_to_query(query),
            self._build_thread_matcher(query),
            limit,
            offset,
        )

    async def search_waiting(
        self, query: ThreadQuery, limit: int, offset: int = 0
    ) -> list[WaitingThread]:
        """Return one page of the threads that wait for an answer and match a query.

        The thread whose last checkpoint is oldest comes first. The status and the sort order of the
        query are ignored. A thread with an active run is left out, because the run may already be
        processing the answer.
        """
        query = replace(query, status="interrupted", sort_by="updated_at", sort_order="asc")
        match = self._build_thread_matcher(query)

        def match_waiting(row: ListedThread) -> WaitingThread | None:
            thread = match(row)
            if thread is None:
                return None
            questions = [
                (task.node, format_interrupt_for_api(interrupt))
                for task in row.status.tasks
                if not task.done
                for interrupt in task.interrupts
            ]
            return WaitingThread(thread, questions) if questions else None

        return await self._list.asearch(
            self._add_permission_filter_to_query(query), match_waiting, limit, offset
        )

    async def find_thread_ids_of_person(self, query: ThreadQuery) -> set[str]:
        """Return the ids of the threads that match a query and belong to `query.person`."""
        match = self._build_thread_matcher(query)

        def match_person(row: ListedThread) -> str | None:
            is_own = match(row) and self.find_person_of_thread(row) == query.person
            return row.thread_id if is_own else None

        return {
            *await self._list.asearch(
                self._add_permission_filter_to_query(query), match_person, NO_LIMIT, 0
            )
        }

    async def search_permitted_runs_and_whether_last(
        self, query: ThreadQuery, status: str | None, limit: int, offset: int
    ) -> list[tuple[RunRow, bool, Thread]]:
        """Return one page of runs, newest first, from all threads that match a query.

        The sort order of the query is ignored.

        Args:
            query: The query for threads.
            status: The status of the runs, or None for runs of any status.
            limit: The maximum number of runs.
            offset: The number of runs to skip.

        Returns:
            For each run its row, whether it is the last run of its thread, and the thread.
        """
        table, sql_query = RunTable(self._saver), self._add_permission_filter_to_query(query)
        matching: list[tuple[RunRow, bool, Thread]] = []
        for start in count(0, _RUNS_PER_READ):
            page = await table.search_runs_and_whether_last_of_thread(
                sql_query, status, _RUNS_PER_READ, start
            )
            ids = [*{row.live.thread_id for row, _ in page}]
            threads_by_id = {
                thread["thread_id"]: thread
                for thread in await self.search(replace(query, ids=ids), len(ids))
            }
            matching += [
                (row, is_last, threads_by_id[row.live.thread_id])
                for row, is_last in page
                if row.live.thread_id in threads_by_id
            ]
            if len(matching) >= offset + limit or len(page) < _RUNS_PER_READ:
                break
        return matching[offset:][:limit]

    async def search_transcripts(
        self, store: Store, text: str, query: ThreadQuery, limit: int, wait_s: float
    ) -> ThreadHits:
        """Search for `text` in the messages of the threads that `query` selects.

        Args:
            store: The store whose embedder is used.
            text: The text to search for.
            query: The query for threads.
            limit: The maximum number of threads.
            wait_s: How long to wait, in seconds, while changed threads are indexed; see
                `memory.search_threads`.
        """
        visible = VisibleThreads(
            self._add_permission_filter_to_query(query), self._build_thread_matcher(query)
        )

        def search() -> ThreadHits:
            return TranscriptSearch.for_checkpointer(self._saver, store).search(
                text, visible, limit, wait_s=wait_s
            )

        return await asyncio.to_thread(search)

    def _build_thread_matcher(self, query: ThreadQuery) -> Callable[[ListedThread], Thread | None]:
        """Build a function that converts a thread's row to the format of LangGraph's API.

        The returned function returns None for a row that does not match the query.
        """
        has_metadata = build_json_containment_predicate(dict(query.metadata or {}))

        def match(row: ListedThread) -> Thread | None:
            thread = _convert_row_to_api_thread(row)
            metadata, updated_at = thread["metadata"], thread["updated_at"]
            matches = (
                has_metadata(metadata)
                and matches_filter(metadata, self._filter)
                and query.text.casefold() in f"{thread['thread_id']}\0{thread['title']}".casefold()
                and query.status in (None, thread["status"])
                and (query.person is None or self.is_readable_by(row, query.person))
                and (query.active_since is None or updated_at >= query.active_since)
                and (query.active_until is None or updated_at <= query.active_until)
            )
            return thread if matches else None

        return match

    async def _search_by_status(self, query: ThreadQuery, limit: int, offset: int) -> list[Thread]:
        """Return one page of the threads that match a query, sorted by their status."""
        statuses = sorted(get_args(RunStatus), reverse=query.sort_order != "asc")
        # Collect the threads in a dict to remove duplicates, because a thread whose status changes
        # during the search may be found twice.
        threads_by_id: dict[str, Thread] = {}
        for status in statuses if query.status is None else (query.status,):
            if len(threads_by_id) < limit + offset:
                status_query = replace(query, status=status, sort_by=None, sort_order=None)
                for thread in await self.search(status_query, limit + offset - len(threads_by_id)):
                    threads_by_id.setdefault(thread["thread_id"], thread)
        return [*threads_by_id.values()][offset:][:limit]

    async def count(self, query: ThreadQuery) -> int:
        """Count the threads that match a query."""
        sql_query = self._add_permission_filter_to_query(query)
        if sql_query.is_exact:
            return await self._list.acount_threads(sql_query)
        return len(await self.search(query, NO_LIMIT))

    async def count_up_to(self, query: ThreadQuery, limit: int) -> tuple[int, bool]:
        """Count the threads that match a query, but at most `limit` threads.

        A query with conditions that SQL cannot check decrypts each thread that it counts, so the
        limit keeps the count fast.

        Returns:
            The number of threads, and whether there are more than this number.
        """
        sql_query = self._add_permission_filter_to_query(query)
        if sql_query.is_exact:
            return await self._list.acount_threads(sql_query), False
        thread_count = len(await self.search(query, limit + 1))
        return min(thread_count, limit), thread_count > limit

    def _add_permission_filter_to_query(self, query: ThreadQuery) -> ThreadQuery:
        """Return a query that finds all matching threads that the caller is allowed to access.

        If `is_exact` is False in the returned query, the results may include threads that do not
        match, so the caller must filter them again.
        """
        metadata = {
            **(query.metadata or {}),
            **dict(map(_convert_filter_condition_to_name_and_value, self._filter.items())),
        }
        is_exact = not (metadata or query.text or query.status or query.person)
        return replace(query, metadata=metadata, is_exact=is_exact)


def _copy_storable_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Check that metadata can be stored as JSON, and return a copy of it.

    Raises:
        InvalidValue: The metadata cannot be stored as JSON.
    """
    encode_value_as_json(metadata)
    return dict(metadata)


def build_unknown_thread_error(thread_id: str) -> UnknownThread:
    """Return the error for a thread that does not exist or that the caller cannot access."""
    return UnknownThread(f"there is no thread {thread_id!r}")


def already_exists_error(subject: str) -> VersionConflict:
    """Build the error that is raised if the id of a new thread or assistant is already in use."""
    return VersionConflict(
        f"{subject} exists already; choose another id, or pass if_exists='do_nothing'"
    )


def _convert_filter_condition_to_name_and_value(condition: tuple[str, Any]) -> tuple[str, Any]:
    """Convert a filter condition to the metadata entry that a matching thread must contain."""
    match condition:
        case name, {"$eq": value, **others} if not others:
            return name, value
        case name, {"$contains": parts, **others} if not others:
            return name, parts if isinstance(parts, list | tuple) else [parts]
    return condition


def _get_client_metadata_and_run_status_to_store(
    thread: ListedThread,
) -> tuple[ClientMetadata, RunStatus]:
    """Return a tuple of client metadata and a run status, for storage in a thread's row.

    If another program stored the thread's first checkpoint, return empty metadata and the run
    status `"idle"`. If the thread has a checkpoint, the flag `is_reserved` is False in the returned
    metadata.
    """
    client = thread.client or ClientMetadata({})
    if not client.is_reserved or thread.head_metadata is None:
        return client, thread.last_run_status
    if thread.does_client_metadata_describe_stored_conversation:
        return client._replace(is_reserved=False), thread.last_run_status
    return ClientMetadata({}, changes_by_other_users=client.changes_by_other_users), "idle"


def _convert_row_to_api_thread(row: ListedThread) -> Thread:
    """Convert a thread's row to the format of LangGraph's API."""
    status = _combine_head_status_and_last_run_status(
        row.status,
        row.last_run_status if row.does_client_metadata_describe_stored_conversation else "idle",
    )
    ttl = row.ttl and {
        "strategy": "keep_latest" if row.ttl.keeps_latest else "delete",
        "ttl_minutes": row.ttl.minutes,
        "expires_at": row.expires_at,
    }
    return {
        "thread_id": row.thread_id,
        "created_at": row.created_at,
        "updated_at": row.updated_at,
        "metadata": row.metadata,
        # `title` is a perdure extension. Threads in LangGraph's API have no such field.
        "title": row.display_title,
        "status": "busy" if row.is_busy else status,
        "interrupts": {
            task.id: [format_interrupt_for_api(interrupt) for interrupt in task.interrupts]
            for task in row.status.tasks
            if task.interrupts and not task.done
        },
        **({"ttl": ttl} if ttl else {}),
    }


def _combine_head_status_and_last_run_status(
    head_status: ThreadStatus, last_run_status: RunStatus
) -> RunStatus:
    """Derive a thread's status from its latest checkpoint and from its last run on a server.

    Other programs may have added checkpoints to the thread since the last run ended, so the status
    of the run may be outdated. If the status of the last run contradicts the status of the latest
    checkpoint, the status of the last run is ignored.
    """
    if head_status.state == "waiting":
        return "interrupted"
    return (
        "idle"
        if head_status.state == "idle" and last_run_status == "interrupted"
        else last_run_status
    )


def format_interrupt_for_api(interrupt: Any) -> dict[str, Any]:
    """Convert a task's interrupt to the format of LangGraph's API."""
    if isinstance(interrupt, dict):
        return interrupt
    response_schema = getattr(interrupt, "response_schema", None)
    fields = {"value": getattr(interrupt, "value", interrupt), "id": getattr(interrupt, "id", None)}
    return fields | ({} if response_schema is None else {"response_schema": response_schema})
