"""Threads as the server knows them: those of the checkpointer, and records beside them.

A record is an item of the store. It has what langgraph's clients give a thread and no checkpoint
keeps: metadata, and that a thread without a turn exists. A run of the server also writes there
how it ended; whether the thread waits for an answer its newest checkpoint tells, whoever wrote it.
The record of a new thread only reserves its id: if another program writes the first checkpoint, the
record counts for nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import datetime, timedelta
from itertools import chain
from typing import Any, Final, Literal
from uuid import uuid4

from langgraph.store.base import GetOp

from perdure.checkpointers import Retention, ThreadHead, ThreadStatus
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.errors import (
    AlreadyLocked,
    ConfigurationError,
    InvalidNamespace,
    StorageUnavailable,
    UnknownThread,
    VersionConflict,
)
from perdure.memory.records import RESERVED
from perdure.server.access import Filter, Forbidden, containing, meets
from perdure.server.reply import encoded
from perdure.settings import SEARCH_LIMIT
from perdure.stores import VersionRetention
from perdure.stores.base import PutItem, StoredItem
from perdure.stores.whole_store import WholeStore

_OF_SERVER: Final = (RESERVED, "server")  # what the server keeps for itself
RECORDS: Final = (*_OF_SERVER, "threads")
"""The namespace of records."""
UNSTARTED: Final = (*_OF_SERVER, "unstarted")
"""The namespace that has a key for each thread that was created and had no turn since."""
Status = Literal["idle", "busy", "interrupted", "error"]
SortBy = Literal["thread_id", "status", "created_at", "updated_at", "state_updated_at"]
Thread = dict[str, Any]
"""A thread as langgraph's clients know it, without its values."""
Named = dict[str, ThreadHead | None]  # threads by their ids, with heads that are known
Row = tuple[datetime, str, ThreadHead | None]  # when a thread was last active, and its id
_NEW: Final[Mapping[str, Any]] = {"metadata": {}, "status": "idle", "reserved": False}
METADATA_BYTES: Final = 64_000
"""How much JSON the metadata of a thread may be that a client gives it."""
METADATA_LEVELS: Final = 8
"""How many levels it may have: `{"a": 1}` has one."""
_OWN: Final = (
    "source",
    "step",
    "parents",
    "writes",
    "thread_id",
    "run_id",
    "imported",
    "titled",
    "times",
)
_OTHERS: Final = ("langgraph_", "perdure_", "checkpoint_", "__", "run_attempt")
_PAGE: Final = 1000  # threads read at once by a search that goes on
_ALL: Final = 1 << 31
_FEW: Final = 300  # threads that an index may find, else all are walked through in their order
_SOON: Final = timedelta(seconds=0.2)  # times of heads are exact to a tenth: a later head is first
_TRIES: Final = 8  # of a change of a record that others change as well
_VERSIONS: Final = 100  # of a record; then the closed ones of all records are dropped
_WAIT_S: Final = 5  # for the end of another program's turn, before a thread is deleted


def checked_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Metadata that a client gives a thread, which every list of threads reads.

    Raises:
        ConfigurationError: It has more than 64 kB as JSON, more than 8 levels, or a whole number
            beyond 64 bits, which no checkpoint can hold.
    """
    level: list[Any] = [metadata]
    for _ in range(METADATA_LEVELS):
        values = [*chain(*(part.values() if isinstance(part, dict) else part for part in level))]
        level = [value for value in values if isinstance(value, dict | list)]
        for value in values:
            if isinstance(value, int) and not -(2**63) <= value < 2**64:
                raise ConfigurationError(
                    f"the metadata has a number of {value.bit_length()} bits; expected at most 64"
                )
    if level:
        raise ConfigurationError(
            f"the metadata {metadata!r:.80} has more than {METADATA_LEVELS} levels"
        )
    if (size := len(encoded(metadata))) > METADATA_BYTES:
        raise ConfigurationError(
            f"the metadata {metadata!r:.80} has {size} bytes; expected at most {METADATA_BYTES}"
        )
    return metadata


class Threads:
    """The threads whose metadata meets a filter; any other is unknown.

    Args:
        saver: Where they are.
        store: Where their records are.
        filter: What their metadata must meet.
        runs: Tells the runs of a thread that are under way; with one it is shown as busy. That is
            not written down: a server that was killed leaves no thread busy.
        forget: Called with the id of a thread that is no more, before another has it.
    """

    def __init__(
        self,
        saver: Checkpointer,
        store: WholeStore,
        filter: Filter,
        runs: Callable[[str], Sequence[object]] = lambda _: (),
        forget: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._saver, self._store, self._filter, self._runs = saver, store, filter, runs
        self._forget = forget

    # -- one thread

    async def get(self, thread_id: str) -> Thread:
        """A thread.

        Raises:
            UnknownThread: There is none, or it may not be reached.
        """
        found = await self._find(thread_id)
        if found is None or not meets(found["metadata"], self._filter):
            raise UnknownThread(f"there is no thread {thread_id!r}")
        return found

    async def create(
        self,
        thread_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        if_exists: Literal["raise", "do_nothing"] = "raise",
        of: str | None = None,
    ) -> Thread:
        """Create a thread; None: under a new id. `of`: the user of the thread it is a copy of.

        Raises:
            VersionConflict: There is a thread of this id; with `do_nothing` it is returned instead,
                if it may be reached.
            Forbidden: It could not be reached with this metadata.
        """
        thread_id = str(uuid4()) if thread_id is None else thread_id
        given = dict(metadata or {})
        left = await self._store.aget(RECORDS, thread_id)  # by a thread that is no more
        if await self._find(thread_id) is None and not self._runs(thread_id):
            self._check(given)
            self._forget(thread_id)  # another program may have deleted one
            record = {**_NEW, "metadata": given, "of": of, "reserved": True}
            version = left.version if left else 0
            puts = [
                PutItem(RECORDS, thread_id, record, False, if_version=version),
                PutItem(UNSTARTED, thread_id, {}, False),
            ]
            with suppress(VersionConflict):  # another request was first
                await self._store.abatch(puts)
                return await self.get(thread_id)
        if if_exists == "do_nothing":
            with suppress(UnknownThread):
                return await self.get(thread_id)
        raise VersionConflict(
            f"there is a thread {thread_id!r} already; choose another id, or if_exists='do_nothing'"
        )

    async def update(self, thread_id: str, metadata: Mapping[str, Any]) -> Thread:
        """Add metadata to a thread; what has the same name is replaced.

        Raises:
            UnknownThread: See `get`.
            Forbidden: It could not be reached any more.
            ConfigurationError: See `checked_metadata`.
        """
        found = await self.get(thread_id)
        self._check({**found["metadata"], **metadata})
        await self._record(thread_id, metadata=metadata)
        return await self.get(thread_id)

    async def set_status(self, thread_id: str, status: Status) -> None:
        """Write how a run of a thread ended, if that changed."""
        with suppress(InvalidNamespace):  # an id that the store cannot hold has no record
            await self._record(thread_id, status=status)

    async def delete(self, thread_id: str) -> None:
        """Delete a thread with its checkpoints; memories that rest on it stay.

        Raises:
            UnknownThread: See `get`.
            AlreadyLocked: A turn of another program does not end.
        """
        async with self.turn(thread_id, timeout_s=_WAIT_S):
            await self.get(thread_id)
            await self._saver.adelete_thread(thread_id)
            with suppress(InvalidNamespace):
                removals = [PutItem(at, thread_id, None) for at in (RECORDS, UNSTARTED)]
                await self._store.abatch(removals)
                await self._forget_versions()
            self._forget(thread_id)

    async def prune(self, thread_id: str, keep: Retention) -> None:
        """Delete the checkpoints of a thread that a rule does not keep; see `get` and `turn`."""
        async with self.turn(thread_id):
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
        source = await self._find(thread_id)
        if source is None:
            raise UnknownThread(f"there is no thread {thread_id!r}")
        known = source["metadata"]
        made = await self.create(target, {**known, **metadata}, of=known.get("user_id"))
        target = made["thread_id"]
        with suppress(UnknownThread):  # it has no turn
            await self._saver.acopy_thread(thread_id, target, checkpoint_id=checkpoint_id)
            stands = "idle" if source["status"] == "busy" or checkpoint_id else source["status"]
            await self._record(target, status=stands, reserved=False)
        return await self.get(target)

    @asynccontextmanager
    async def turn(self, thread_id: str, timeout_s: float = 0) -> AsyncIterator[None]:
        """Hold the lock of a thread while it is changed.

        Raises:
            AlreadyLocked: A run holds it.
        """
        why = f"a run of the thread {thread_id!r} is under way; wait for its end, or cancel it"
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._saver.lock(thread_id, timeout_s=timeout_s))
            except StorageUnavailable as exc:
                if not isinstance(exc.__cause__, TimeoutError):
                    raise  # nobody can tell
                raise AlreadyLocked(why) from exc
            yield

    async def user(self, thread_id: str) -> str | None:
        """Whose the newest checkpoint of a thread is; None: nobody's, or there is none."""
        with suppress(UnknownThread):
            return (await self._saver.ahead(thread_id)).metadata.get("user_id")
        return None

    def _check(self, metadata: Mapping[str, Any]) -> None:
        """Check that a thread with this metadata may be reached by whoever makes it."""
        if not meets(metadata, self._filter):
            raise Forbidden(f"a thread with the metadata {dict(metadata)!r:.200} is not yours")

    async def _find(self, thread_id: str) -> Thread | None:
        return next(iter(await self._named({thread_id: None})), None)

    async def _forget_versions(self) -> None:
        await self._store.aretain(VersionRetention(last=0), prefix=_OF_SERVER)

    async def _record(self, thread_id: str, **change: Any) -> None:
        """Change the metadata or the status in a record, or begin one."""
        for _ in range(_TRIES):
            found = await self._store.aget(RECORDS, thread_id, refresh_ttl=False)
            stored: Thread = {**_NEW, **(found.value if found else {})}
            value = stored
            if stored["reserved"] and "reserved" not in change:
                with suppress(UnknownThread):
                    head = await self._saver.ahead(thread_id)
                    value = {**(stored if _counts(stored, head) else _NEW), "reserved": False}
            new = {**value, **change}
            if "metadata" in change:
                new["metadata"] = checked_metadata({**value["metadata"], **change["metadata"]})
            if new == stored:
                return
            version = found.version if found else 0
            with suppress(VersionConflict):
                await self._store.aput(RECORDS, thread_id, new, False, if_version=version)
                if version % _VERSIONS == _VERSIONS - 1:
                    await self._forget_versions()
                return
        raise VersionConflict(f"the thread {thread_id!r} is changed by others; try again")

    # -- many threads

    async def search(
        self,
        *,
        metadata: Mapping[str, Any] | None = None,
        ids: Sequence[str] | None = None,
        status: str | None = None,
        text: str = "",
        owner: str | None = None,
        active_since: datetime | None = None,
        active_until: datetime | None = None,
        limit: int = SEARCH_LIMIT,
        offset: int = 0,
        sort_by: SortBy | None = None,
        sort_order: Literal["asc", "desc"] | None = None,
    ) -> list[Thread]:
        """A page of threads, the latest activity first.

        A page of the newest reads no more than it needs, and so does a status or a text in the
        metadata that few threads have. Other filters read on until the page is full; in another
        order all threads are read: some 100 ms for each thousand, off the event loop.

        Args:
            metadata: What the metadata must contain; dicts may have more than is given.
            ids: Only these.
            status: Only of this status.
            text: Only with this in the title or the id, whatever the case.
            owner: Only theirs, and nobody's.
            active_since: Only those active at this moment or later.
            active_until: Only those not active after it.
            limit: At most so many.
            offset: How many of the first to leave out.
            sort_by: Another order than by activity.
            sort_order: `"asc"` or `"desc"`, the default.
        """
        key = "updated_at" if sort_by in (None, "state_updated_at") else sort_by
        asked = dict(metadata or {})
        has_asked = containing(asked)
        walks = key == "updated_at" and sort_order != "asc"  # in the order of the answer
        named: Named | None = dict.fromkeys(ids or ())
        if ids is None:
            named = await self._indexed({**asked, **self._filter}, status)
        found: list[Thread] = []

        def is_match(thread: Thread) -> bool:
            own, at = thread["metadata"], thread["updated_at"]
            return (
                text.casefold() in f"{thread['thread_id']}\0{thread['title']}".casefold()
                and status in (None, thread["status"])
                and (owner is None or own.get("owner", owner) == owner)
                and (active_since is None or at >= active_since)
                and (active_until is None or at <= active_until)
                and has_asked(own)
                and meets(own, self._filter)
            )

        async def matching(threads: list[Thread]) -> list[Thread]:
            return await asyncio.to_thread(lambda: [*filter(is_match, threads)])  # some are large

        if named is not None:
            found += await matching(await self._named(named))
        else:
            async for page in self._pages(active_since, offset + limit):
                found += await matching(page)
                if walks and len(found) >= offset + limit:
                    break
        if not walks:
            found.sort(key=lambda thread: thread[key], reverse=sort_order != "asc")
        return found[offset : offset + limit]

    async def count(self, **wanted: Any) -> int:
        """How many threads a search with these filters finds."""
        return len(await self.search(**wanted, limit=_ALL))

    async def _indexed(self, wanted: Mapping[str, Any], status: str | None) -> Named | None:
        """The threads that may meet one condition; None: no index knows, or they are many."""
        asked: list[tuple[Any, list[dict[str, Any]]]] = []  # of records; of heads
        if status in ("interrupted", "error"):
            waiting = [{"waiting": True}] if status == "interrupted" else []
            asked.append(({"status": status}, waiting))
        for name, value in wanted.items():
            if isinstance(value, str) and name.isidentifier():
                names = (name, "user_id") if name == "owner" else (name,)
                tagged = [{"filter": {label: value}} for label in names]
                asked.append(({"metadata": {name: value}}, tagged))
        for filter, conditions in asked:
            items = await self._store.asearch(RECORDS, filter=filter, limit=_FEW, refresh_ttl=False)
            found: Named = dict.fromkeys(item.key for item in items)
            for condition in conditions if len(found) < _FEW else ():
                heads = await self._saver.aheads(limit=_FEW, **condition)
                found |= {head.thread_id: head for head in heads}
            if len(found) < _FEW:
                return found
        return None

    async def _named(self, named: Named) -> list[Thread]:
        """Those of some threads that there are, in the order of `_pages`."""
        rows: list[Row] = []
        for thread_id, head in named.items():
            if head is None:
                with suppress(UnknownThread):
                    head = await self._saver.ahead(thread_id)
            if head is not None:
                rows.append((head.updated_at, thread_id, head))
            else:  # a record alone is left of a thread that another program deleted
                waiting = await self._get(UNSTARTED, [thread_id])
                rows += [(item.created_at - _SOON, key, None) for key, item in waiting.items()]
        return await self._recorded(sorted(rows, key=lambda row: row[0], reverse=True))

    async def _pages(self, since: datetime | None, size: int) -> AsyncIterator[list[Thread]]:
        """All threads, the latest activity first; those without a turn are where they began."""
        unstarted = await self._store.asearch(UNSTARTED, limit=_ALL, refresh_ttl=False)
        waiting: list[Row] = [(item.created_at - _SOON, item.key, None) for item in unstarted]
        seen: set[str] = set()
        heads: list[ThreadHead] = []
        more, size = True, max(1, min(size, _PAGE))
        while more:
            heads = await self._heads(heads, limit=size, active_since=since)
            more = len(heads) == size
            new = [head for head in heads if head.thread_id not in seen]
            rows: list[Row] = [(head.updated_at, head.thread_id, head) for head in new]
            seen.update(row[1] for row in rows)
            began = []
            while waiting and (not more or waiting[-1][0] > heads[-1].updated_at):
                row = waiting.pop()
                if row[1] in seen:
                    began.append(PutItem(UNSTARTED, row[1], None))
                else:
                    rows.append(row)
            if began:
                await self._store.abatch(began)
                await self._forget_versions()
            rows.sort(key=lambda row: row[0], reverse=True)
            for start in range(0, len(rows), size):
                yield await self._recorded(rows[start : start + size])
            size = _PAGE

    async def _heads(self, before: list[ThreadHead], **page: Any) -> list[ThreadHead]:
        """The page after another; of that one, threads may have been deleted meanwhile."""
        for head in reversed(before):
            with suppress(UnknownThread):
                return await self._saver.aheads(after=head.thread_id, **page)
        return await self._saver.aheads(**page)

    async def _recorded(self, rows: Sequence[Row]) -> list[Thread]:
        """Threads with their records, and those of `rows` that have one of the two."""
        records = await self._get(RECORDS, [row[1] for row in rows])
        found = [
            _thread(thread_id, head, records.get(thread_id))
            for _, thread_id, head in rows
            if head is not None or thread_id in records
        ]
        return [
            {**each, "status": "busy"} if self._runs(each["thread_id"]) else each for each in found
        ]

    async def _get(self, at: tuple[str, ...], ids: Sequence[str]) -> dict[str, StoredItem]:
        """The items that there are under some ids, of which the store may not hold all."""
        keys = [key for key in ids if key and "\0" not in key and len(key.encode()) <= 4096]
        found: list[Any] = await self._store.abatch([GetOp(at, key, False) for key in keys])
        return {key: item for key, item in zip(keys, found, strict=True) if item is not None}


def _counts(record: Mapping[str, Any], head: ThreadHead | None) -> bool:
    """Whether a record is of the thread with this head: no other program began the thread."""
    if head is None or head.checkpoint_id is None or not record.get("reserved"):
        return True
    # both are in the metadata of what this server writes; other programs may name the first
    return head.metadata.keys() >= {"assistant_id", "user_id"}


def _thread(thread_id: str, head: ThreadHead | None, record: StoredItem | None) -> Thread:
    known = record.value if record and _counts(record.value, head) else {}
    told: Mapping[str, Any] = head.metadata if head else {}
    status = head.status if head else ThreadStatus()
    kept = {n: v for n, v in told.items() if n not in _OWN and not n.startswith(_OTHERS)}
    given, user = known.get("metadata", {}), told.get("user_id")
    owner = head.owner if head else None
    if owner is None or (user is not None and user == known.get("of")):
        owner = given.get("owner", owner)
    # the newest checkpoint tells whose it is: whoever made the record may be another
    own = {name: each for name, each in (("owner", owner), ("user_id", user)) if each is not None}
    moments = [each for each in (head, record) if each is not None]
    title = given.get("title") or (head.title if head else "")
    return {
        "thread_id": thread_id,
        "created_at": min(each.created_at for each in moments),
        "updated_at": moments[0].updated_at,  # of the newest checkpoint, as threads are ordered
        "metadata": {**kept, **given, **own},
        "title": str(title),  # which clients of langgraph's server do not know
        "status": _stands(status, known.get("status", "idle")),
        "interrupts": {
            task.id: [interrupt_of(one) for one in task.interrupts]
            for task in status.tasks
            if task.interrupts and not task.done
        },
    }


def _stands(status: ThreadStatus, ended: Status) -> Status:
    """How a thread stands whose last run here ended so; other programs may have run it since."""
    if status.state == "waiting":
        return "interrupted"
    return "idle" if status.state == "idle" and ended == "interrupted" else ended


def interrupt_of(one: Any) -> Any:
    """What a task asked, as clients know it."""
    return one if isinstance(one, dict) else {"value": one.value, "id": one.id}
