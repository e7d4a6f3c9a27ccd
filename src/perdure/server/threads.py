"""Threads as the server knows them: those of the checkpointer, with what clients gave them.

What langgraph's clients give a thread stands in its row, where no checkpoint keeps it: metadata,
and that a thread without a turn exists. How a run of the server ended does too; whether the thread
waits for an answer its newest checkpoint tells, whoever wrote it. A new thread only reserves its
id: if another program writes the first checkpoint, what the client gave counts for nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from itertools import chain, count
from typing import Any, Final, get_args
from uuid import uuid4

from perdure.checkpointers import Retention, ThreadStatus
from perdure.checkpointers.address import check_thread_id
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.labels import USER_LABELS
from perdure.checkpointers.records import ClientMetadata, RunRow
from perdure.checkpointers.runs import RunTable
from perdure.checkpointers.thread_list import (
    ListedThread,
    RunStatus,
    ThreadList,
    ThreadQuery,
    TimeToLive,
)
from perdure.errors import (
    AlreadyLocked,
    ConfigurationError,
    InvalidConfig,
    StorageUnavailable,
    UnknownThread,
    VersionConflict,
)
from perdure.memory.thread_search import ThreadHits, TranscriptSearch, VisibleThreads
from perdure.server.access import Filter, check_reach, containing, meets
from perdure.server.person import find_person
from perdure.server.reply import encode_json
from perdure.settings import SEARCH_LIMIT, check_user
from perdure.stores.store import Store
from perdure.stores.values import encode_value

Thread = dict[str, Any]
"""A thread as langgraph's clients know it, without its values."""
MAX_METADATA_BYTES: Final = 64_000
"""How much JSON the metadata of a thread may be that a client gives it."""
MAX_METADATA_LEVELS: Final = 8
"""How many levels it may have: `{"a": 1}` has one."""
_MAX_ID_BYTES: Final = 4096  # of a thread that is made here
_NO_LIMIT: Final = 1 << 31
_RUNS_PER_READ: Final = 500  # runs read at once, of those whose threads are compared
LOCK_RELEASE_S: Final = 0.5
"""How many seconds a change of a thread without a live run waits for the lock of the thread."""
_DELETE_WAIT_S: Final = 5  # for the end of another program's turn, before a thread is deleted


def validate_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Metadata that a client gives a thread, which every list of threads reads.

    Raises:
        ConfigurationError: It has more than 64 kB as JSON, more than 8 levels, or a whole number
            beyond 64 bits, which no checkpoint can hold.
    """
    level: list[Any] = [metadata]
    for _ in range(MAX_METADATA_LEVELS):
        values = [*chain(*(part.values() if isinstance(part, dict) else part for part in level))]
        level = [value for value in values if isinstance(value, dict | list)]
        for value in values:
            if isinstance(value, int) and not -(2**63) <= value < 2**64:
                raise ConfigurationError(
                    f"the metadata has a number of {value.bit_length()} bits; expected at most 64"
                )
    if level:
        raise ConfigurationError(
            f"the metadata {metadata!r:.80} has more than {MAX_METADATA_LEVELS} levels"
        )
    if (size := len(encode_json(metadata))) > MAX_METADATA_BYTES:
        raise ConfigurationError(
            f"the metadata {metadata!r:.80} has {size} bytes; expected at most {MAX_METADATA_BYTES}"
        )
    return metadata


def validate_owners(metadata: dict[str, Any]) -> dict[str, Any]:
    """Check the user that a client's metadata names, if any, and return the metadata.

    Raises:
        ConfigurationError: `owner` or `user_id` is blank.
    """
    for name in USER_LABELS:
        if isinstance(metadata.get(name), str):
            check_user(f"{name!r} of the metadata", metadata[name], "leave it out")
    return metadata


class Threads:
    """The threads whose metadata meets a filter; any other is unknown.

    Args:
        saver: Where they are.
        filter: What their metadata must meet.
        busy: Whether a run of this process is under way on a thread that may be no more.
        forget: Called with the id of a thread that is no more, before another has it.
        default_ttl: The time to live of new threads that are given none.
        owners_are_people: Whether the `owner` of threads is the user of an API key.
    """

    def __init__(
        self,
        saver: Checkpointer,
        filter: Filter,
        is_busy: Callable[[str], bool] = lambda _: False,
        forget_thread: Callable[[str], None] = lambda _: None,
        default_ttl: TimeToLive | None = None,
        *,
        owners_are_people: bool = True,
    ) -> None:
        self._saver, self._list, self._default_ttl = saver, ThreadList(saver), default_ttl
        self._filter, self._is_busy, self._forget_thread = filter, is_busy, forget_thread
        self._owners_are_people = owners_are_people

    # -- one thread

    async def get(self, thread_id: str) -> Thread:
        """Return a thread as clients know it; see `reach`."""
        return _build_thread(await self.get_permitted_row(thread_id))

    async def get_permitted_row(self, thread_id: str) -> ListedThread:
        """Return the row of a thread that the caller may reach.

        Raises:
            UnknownThread: There is no such thread, or the caller may not reach it.
        """
        thread = await self.get_row(thread_id)
        if not meets(thread.metadata, self._filter):
            raise _unknown_thread_error(thread_id)
        return thread

    async def create(
        self,
        thread_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        source_user: str | None = None,
        ttl: TimeToLive | None = None,
    ) -> Thread:
        """Create a thread; None: under a new id. `source_user`: whose thread it is a copy of.

        Raises:
            VersionConflict: There is a thread of this id.
            Forbidden: It could not be reached with this metadata.
        """
        thread_id = str(uuid4()) if thread_id is None else thread_id
        client = ClientMetadata(_copy_storable(metadata or {}), source_user, is_reserved=True)
        is_new = await self._find_or_check_new(thread_id, client.metadata) is None
        if is_new and await self._insert(thread_id, client, ttl):
            return await self.get(thread_id)
        raise already_exists_error(f"a thread {thread_id!r}")

    async def get_or_create_row(self, thread_id: str, metadata: Mapping[str, Any]) -> ListedThread:
        """Return the row of a thread, which is created with the metadata if there is none.

        Raises:
            UnknownThread: The caller may not reach the thread of this id.
            VersionConflict: The thread of this id was deleted meanwhile.
            Forbidden: A new thread with this metadata could not be reached.
        """
        client = ClientMetadata(_copy_storable(metadata), None, is_reserved=True)
        known = await self._find_or_check_new(thread_id, client.metadata)
        if known is None:
            if await self._insert(thread_id, client):
                return await self.get_permitted_row(thread_id)
            known = await self._list.aget(thread_id)
        if known is None:
            raise already_exists_error(f"a thread {thread_id!r}")
        if not meets(known.metadata, self._filter):
            raise _unknown_thread_error(
                thread_id
            )  # as all other requests for the thread of somebody else
        return known

    async def _insert(
        self, thread_id: str, client: ClientMetadata, ttl: TimeToLive | None = None
    ) -> bool:
        """Insert the row of a new thread. Return False if another request has inserted one."""
        if not await self._list.acreate(thread_id, client):
            return False
        if (ttl := ttl or self._default_ttl) is not None:
            await self._list.aset_ttl(thread_id, ttl)
        return True

    async def update(
        self, thread_id: str, metadata: Mapping[str, Any], ttl: TimeToLive | None = None
    ) -> Thread:
        """Add metadata to a thread; what has the same name is replaced. None: `ttl` stays.

        Raises:
            UnknownThread: See `get`.
            Forbidden: It could not be reached any more.
            ConfigurationError: See `checked_metadata`.
        """
        thread = await self.get(thread_id)
        check_reach("a thread", {**thread["metadata"], **metadata}, self._filter)

        def changed(thread: ListedThread) -> tuple[ClientMetadata, RunStatus]:
            client, ended = _choose_stored_fields(thread)
            given = validate_metadata({**client.metadata, **metadata})
            return client._replace(metadata=_copy_storable(given)), ended

        await self._list.aupdate(thread_id, changed)
        if ttl is not None:
            await self._list.aset_ttl(thread_id, ttl)
        return await self.get(thread_id)

    async def get_row(self, thread_id: str) -> ListedThread:
        """A thread as lists have it, whoever may reach it.

        Raises:
            UnknownThread: There is none.
        """
        if thread := await self._list.aget(thread_id):
            return thread
        raise _unknown_thread_error(thread_id)

    async def set_run_status(
        self, thread_id: str, status: RunStatus, before: ListedThread | None = None
    ) -> None:
        """Write how a run of a thread ended, if that changed; `before` is how the thread was."""
        waits = status == "interrupted"
        if (
            before
            and before.head_metadata is not None
            and not waits
            and _is_unchanged(before, status)
        ):
            return
        await self._list.aupdate(
            thread_id, lambda thread: (_choose_stored_fields(thread)[0], status), may_wait=waits
        )

    async def delete(self, thread_id: str) -> None:
        """Delete a thread with its checkpoints; memories that rest on it stay.

        Raises:
            UnknownThread: See `get`.
            AlreadyLocked: A turn of another program does not end.
        """
        async with self.lock_for_change(thread_id, timeout_s=_DELETE_WAIT_S):
            await self.delete_locked(thread_id, recorded=True)

    async def delete_locked(self, thread_id: str, *, recorded: bool) -> None:
        """Delete a thread whose lock the caller holds; its runs are deleted with it.

        Args:
            thread_id: The thread.
            recorded: Whether to write a removal record; see `Maintenance.delete_thread`.

        Raises:
            UnknownThread: See `get`.
        """
        await self.get(thread_id)
        await self._list.adelete(thread_id, add_removal_record=recorded)
        self._forget_thread(thread_id)

    async def delete_expired(self, limit: int) -> int:
        """Delete some threads whose time is over, and return how many; not those in a turn."""
        done = 0
        for thread_id in await self._list.alist_expired(limit):
            with suppress(AlreadyLocked):
                async with self.lock_for_change(thread_id, timeout_s=0):
                    done += await self._list.adelete_if_expired(thread_id)
                    if await self._list.aget(thread_id) is None:
                        self._forget_thread(thread_id)
        return done

    async def prune(self, thread_id: str, keep: Retention) -> None:
        """Delete the checkpoints of a thread that a rule does not keep; see `get` and `turn`."""
        async with self.lock_for_change(thread_id):
            await self.get(thread_id)
            await self._saver.aretain(keep, thread_ids=[thread_id])

    async def copy(
        self,
        thread_id: str,
        metadata: Mapping[str, Any],
        target: str | None = None,
        checkpoint_id: str | None = None,
    ) -> Thread:
        """Copy a thread, which the caller may read, to another; None: under a new id.

        The copy has its checkpoints, up to one if that is named, and its metadata, and what is
        given of that.

        Raises:
            UnknownThread: There is no thread to copy.
            VersionConflict: There is a thread with the id of the copy.
            Forbidden: See `create`.
        """
        source = _build_thread(await self.get_row(thread_id))
        target = str(uuid4()) if target is None else target
        user = source["metadata"].get("user_id")
        client = ClientMetadata(_copy_storable({**source["metadata"], **metadata}), user)
        if await self._find_or_check_new(target, client.metadata) is not None:
            raise already_exists_error(f"a thread {target!r}")
        goes_on = source["status"] == "busy" or checkpoint_id is not None
        stands: RunStatus = "idle" if goes_on else source["status"]
        try:
            await self._list.acopy_thread(thread_id, target, checkpoint_id, client, stands)
        except UnknownThread:  # it has no turn
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
        """Hold the lock of a thread while it is changed.

        Args:
            thread_id: The thread.
            timeout_s: How long to wait for the lock, in seconds. None means to wait for a short
                time if no run of the thread is live, because the lock of a run is released just
                after the end of the run is stored.

        Raises:
            AlreadyLocked: A run holds the lock; or a run is accepted and waits for a server,
                because its former server has died.
        """
        why = f"a run of the thread {thread_id!r} is under way; wait for its end, or cancel it"
        table = RunTable(self._saver)
        timeouts = [0, LOCK_RELEASE_S] if timeout_s is None else [timeout_s]
        async with AsyncExitStack() as stack:
            for number, timeout in enumerate(timeouts, 1):
                try:
                    await stack.enter_async_context(self._saver.lock(thread_id, timeout_s=timeout))
                    break
                except StorageUnavailable as exc:
                    if not isinstance(exc.__cause__, TimeoutError):
                        raise  # nobody can tell
                    if number == len(timeouts) or await table.list_live_run_ids(thread_id):
                        raise AlreadyLocked(why) from exc
            if await table.list_live_run_ids(thread_id):
                raise AlreadyLocked(why)
            yield

    def find_person(self, thread: ListedThread) -> str | None:
        """Return the person of a thread; see `person.find_person`."""
        return find_person(thread, owners_are_people=self._owners_are_people)

    async def is_readable_by(self, thread_id: str, person: str) -> bool:
        """Return whether a thread is the person's, or nobody's."""
        return self._is_readable_by(await self.get_row(thread_id), person)

    def _is_readable_by(self, thread: ListedThread, person: str) -> bool:
        # without a person, also if nothing is remembered of the thread, its owner may read it
        known = self.find_person(thread) or thread.metadata.get("owner")
        return known is None or known == person

    async def _find_or_check_new(
        self, thread_id: str, metadata: Mapping[str, Any]
    ) -> ListedThread | None:
        """The thread that there is, else check that whoever makes it may reach it."""
        if "\0" in thread_id or len(check_thread_id(thread_id).encode()) > _MAX_ID_BYTES:
            raise InvalidConfig(
                f"the thread_id {thread_id!r:.80} has {len(thread_id.encode())} bytes; expected at "
                f"most {_MAX_ID_BYTES}, and no NUL"
            )
        thread = await self._list.aget(thread_id)
        if thread is None and self._is_busy(thread_id):  # by one of now, or that was deleted
            thread = await self._list.aget(thread_id)
            if thread is None:
                raise already_exists_error(f"a thread {thread_id!r}")
        if thread is None:
            check_reach("a thread", metadata, self._filter)
            self._forget_thread(thread_id)  # another program may have deleted one
        return thread

    # -- many threads

    async def search(
        self, query: ThreadQuery, limit: int = SEARCH_LIMIT, offset: int = 0
    ) -> list[Thread]:
        """A page of the threads of a query.

        It is one SELECT over the rows of threads. Of an order, a time, a status, texts and numbers
        in the metadata and, unless the database is encrypted, a text SQL tells which threads have
        them; for other conditions the rows of all threads are opened, off the event loop. In order
        of their status it is one SELECT for each, as that of some threads is told by their heads.
        """
        if query.sort_by == "status":
            return await self._search_by_status(query, limit, offset)
        return await self._list.asearch(
            self._narrow_query(query), self._build_match(query), limit, offset
        )

    async def find_ids_of_person(self, query: ThreadQuery) -> set[str]:
        """Return the ids of the threads that `search` finds, without those that have no person."""
        match = self._build_match(query)

        def match_person(listed: ListedThread) -> str | None:
            is_own = match(listed) and self.find_person(listed) == query.person
            return listed.thread_id if is_own else None

        return {*await self._list.asearch(self._narrow_query(query), match_person, _NO_LIMIT, 0)}

    async def search_runs(
        self, query: ThreadQuery, status: str | None, limit: int, offset: int
    ) -> list[tuple[RunRow, bool, Thread]]:
        """A page of the runs of the threads of a query, newest first, whatever their order.

        Each with whether it is the last of its thread, and the thread.
        """
        table, narrowed = RunTable(self._saver), self._narrow_query(query)
        found: list[tuple[RunRow, bool, Thread]] = []
        for start in count(0, _RUNS_PER_READ):
            page = await table.search_runs(narrowed, status, _RUNS_PER_READ, start)
            ids = [*{row.live.thread_id for row, _ in page}]
            of = {
                each["thread_id"]: each
                for each in await self.search(replace(query, ids=ids), len(ids))
            }
            found += [
                (row, is_last, of[row.live.thread_id])
                for row, is_last in page
                if row.live.thread_id in of
            ]
            if len(found) >= offset + limit or len(page) < _RUNS_PER_READ:
                break
        return found[offset:][:limit]

    async def search_transcripts(
        self, store: Store, text: str, query: ThreadQuery, limit: int, wait_s: float
    ) -> ThreadHits:
        """The threads, of those of a query, in which a text was said.

        It waits so long while threads are read that have changed; see `memory.search_threads`.
        """
        visible = VisibleThreads(self._narrow_query(query), self._build_match(query))

        def search() -> ThreadHits:
            return TranscriptSearch.for_checkpointer(self._saver, store).search(
                text, visible, limit, wait_s=wait_s
            )

        return await asyncio.to_thread(search)

    def _build_match(self, query: ThreadQuery) -> Callable[[ListedThread], Thread | None]:
        """What makes a thread of one of a query, and None of any other."""
        has_metadata = containing(dict(query.metadata or {}))

        def match(listed: ListedThread) -> Thread | None:
            thread = _build_thread(listed)
            metadata, at = thread["metadata"], thread["updated_at"]
            matches = (
                has_metadata(metadata)
                and meets(metadata, self._filter)
                and query.text.casefold() in f"{thread['thread_id']}\0{thread['title']}".casefold()
                and query.status in (None, thread["status"])
                and (query.person is None or self._is_readable_by(listed, query.person))
                and (query.active_since is None or at >= query.active_since)
                and (query.active_until is None or at <= query.active_until)
            )
            return thread if matches else None

        return match

    async def _search_by_status(self, query: ThreadQuery, limit: int, offset: int) -> list[Thread]:
        """A page of the threads of a query, in order of their status."""
        statuses = sorted(get_args(RunStatus), reverse=query.sort_order != "asc")
        found: dict[str, Thread] = {}  # once, though one may change while others are read
        for status in statuses if query.status is None else (query.status,):
            if len(found) < limit + offset:
                alike = replace(query, status=status, sort_by=None, sort_order=None)
                for thread in await self.search(alike, limit + offset - len(found)):
                    found.setdefault(thread["thread_id"], thread)
        return [*found.values()][offset:][:limit]

    async def count(self, query: ThreadQuery) -> int:
        """How many threads a query finds."""
        narrowed = self._narrow_query(query)
        if narrowed.is_exact:
            return await self._list.acount(narrowed)
        return len(await self.search(query, _NO_LIMIT))

    def _narrow_query(self, query: ThreadQuery) -> ThreadQuery:
        """What SQL is asked for: at least the threads of a query that may be reached."""
        metadata = {
            **(query.metadata or {}),
            **dict(map(_condition_as_metadata, self._filter.items())),
        }
        is_exact = not (metadata or query.text or query.status or query.person)
        return replace(query, metadata=metadata, is_exact=is_exact)


def _copy_storable(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of metadata, which can be stored as JSON.

    Raises:
        InvalidValue: It cannot.
    """
    encode_value(metadata)
    return dict(metadata)


def _unknown_thread_error(thread_id: str) -> UnknownThread:
    return UnknownThread(f"there is no thread {thread_id!r}")


def already_exists_error(subject: str) -> VersionConflict:
    """The error of what is to be created with an id that another has."""
    why = f"there is {subject} already; choose another id, or if_exists='do_nothing'"
    return VersionConflict(why)


def _condition_as_metadata(condition: tuple[str, Any]) -> tuple[str, Any]:
    """A condition of a filter as metadata that has what meets it."""
    match condition:
        case name, {"$eq": value, **others} if not others:
            return name, value
        case name, {"$contains": parts, **others} if not others:
            return name, parts if isinstance(parts, list | tuple) else [parts]
    return condition


def _choose_stored_fields(thread: ListedThread) -> tuple[ClientMetadata, RunStatus]:
    """What the server keeps of a thread from now on; if another program began it, nothing more."""
    client = thread.client or ClientMetadata({})
    if not client.is_reserved or thread.head_metadata is None:
        return client, thread.last_run_status
    if thread.uses_client_metadata:
        return client._replace(is_reserved=False), thread.last_run_status
    return ClientMetadata({}), "idle"


def _is_unchanged(thread: ListedThread, status: RunStatus) -> bool:
    """Whether a run that ends so changes nothing of what the server keeps of a thread."""
    return (_choose_stored_fields(thread)[0], status) == (thread.client, thread.last_run_status)


def _build_thread(thread: ListedThread) -> Thread:
    """A thread as clients know it."""
    stands = _choose_status(
        thread.status, thread.last_run_status if thread.uses_client_metadata else "idle"
    )
    ttl = thread.ttl and {
        "strategy": "keep_latest" if thread.ttl.keeps_latest else "delete",
        "ttl_minutes": thread.ttl.minutes,
        "expires_at": thread.expires_at,
    }
    return {
        "thread_id": thread.thread_id,
        "created_at": thread.created_at,
        "updated_at": thread.updated_at,
        "metadata": thread.metadata,
        "title": thread.display_title,  # which langgraph's clients do not know
        "status": "busy" if thread.is_busy else stands,
        "interrupts": {
            task.id: [build_interrupt(one) for one in task.interrupts]
            for task in thread.status.tasks
            if task.interrupts and not task.done
        },
        **({"ttl": ttl} if ttl else {}),
    }


def _choose_status(status: ThreadStatus, ended: RunStatus) -> RunStatus:
    """How a thread stands whose last run here ended so; other programs may have run it since."""
    if status.state == "waiting":
        return "interrupted"
    return "idle" if status.state == "idle" and ended == "interrupted" else ended


def build_interrupt(one: Any) -> Any:
    """What a task asked, as clients know it."""
    if isinstance(one, dict):
        return one
    schema = getattr(one, "response_schema", None)
    asked = {"value": getattr(one, "value", one), "id": getattr(one, "id", None)}
    return asked | ({} if schema is None else {"response_schema": schema})
