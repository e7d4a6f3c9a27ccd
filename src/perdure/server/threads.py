"""Threads as the server knows them: those of the checkpointer, and records beside them.

A record is an item of the store. It has what langgraph's clients give a thread and no checkpoint
keeps: metadata, and that a thread without a turn exists. Its status is written there as well.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import datetime, timedelta
from typing import Any, Final, Literal
from uuid import uuid4

from langgraph.store.base import GetOp

from perdure.checkpointers import ThreadHead
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.errors import (
    AlreadyLocked,
    InvalidNamespace,
    StorageUnavailable,
    UnknownThread,
    VersionConflict,
)
from perdure.server.access import Filter, Forbidden, meets
from perdure.server.reply import encoded
from perdure.stores import VersionRetention
from perdure.stores.base import PutItem, StoredItem
from perdure.stores.whole_store import WholeStore

RESERVED: Final = "perdure.server"
"""The first label of the server's own namespaces."""
RECORDS: Final = (RESERVED, "threads")
"""The namespace of records."""
UNSTARTED: Final = (RESERVED, "unstarted")
"""The namespace that has a key for each thread that was created and had no turn since."""
Status = Literal["idle", "busy", "interrupted", "error"]
SortBy = Literal["thread_id", "status", "created_at", "updated_at", "state_updated_at"]
Thread = dict[str, Any]
"""A thread as langgraph's clients know it, without its values."""
Row = tuple[datetime, str, ThreadHead | None]  # when a thread was last active, and its id
_OWN: Final = ("source", "step", "parents", "writes", "thread_id", "run_id", "imported", "titled")
_OTHERS: Final = ("langgraph_", "checkpoint_", "__", "run_attempt")
_PAGE: Final = 1000  # threads read at once by a search that goes on
_ALL: Final = 1 << 31
_SOON: Final = timedelta(seconds=0.2)  # times of heads are exact to a tenth: a later head is first
_TRIES: Final = 8  # of a change of a record that others change as well
_VERSIONS: Final = 100  # of a record; then the closed ones of all records are dropped


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
        return self._now(found)

    async def create(
        self,
        thread_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        if_exists: Literal["raise", "do_nothing"] = "raise",
    ) -> Thread:
        """Create a thread; None: under a new id.

        Raises:
            VersionConflict: There is a thread of this id; with `do_nothing` it is returned instead,
                if it may be reached.
            Forbidden: It could not be reached with this metadata.
        """
        thread_id = str(uuid4()) if thread_id is None else thread_id
        given = dict(metadata or {})
        left = await self._store.aget(RECORDS, thread_id)  # by a thread that is no more
        if await self._find(thread_id) is None:
            self._check(given)
            self._forget(thread_id)  # another program may have deleted one
            record = {"metadata": given, "status": "idle"}
            version = left.version if left else 0
            puts = [
                PutItem(RECORDS, thread_id, record, False, if_version=version),
                PutItem(UNSTARTED, thread_id, {}, False),
            ]
            with suppress(VersionConflict):  # another request was first
                await self._store.abatch(puts)
                return await self.get(thread_id)
        with suppress(UnknownThread):
            if if_exists == "do_nothing":
                return await self.get(thread_id)
        raise VersionConflict(
            f"there is a thread {thread_id!r} already; choose another id, or if_exists='do_nothing'"
        )

    async def update(self, thread_id: str, metadata: Mapping[str, Any]) -> Thread:
        """Add metadata to a thread; what has the same name is replaced.

        Raises:
            UnknownThread: See `get`.
            Forbidden: It could not be reached any more.
        """
        found = await self.get(thread_id)
        self._check({**found["metadata"], **metadata})
        await self._record(thread_id, {"metadata": metadata})
        return await self.get(thread_id)

    async def set_status(self, thread_id: str, status: Status) -> None:
        """Write how a thread stands, if that changed."""
        with suppress(InvalidNamespace):  # an id that the store cannot hold has no record
            version = await self._record(thread_id, {"status": status})
            if version and version % _VERSIONS == 0:
                await self._forget_versions()

    async def delete(self, thread_id: str) -> None:
        """Delete a thread with its checkpoints; memories that rest on it stay."""
        await self.get(thread_id)
        await self._saver.adelete_thread(thread_id)
        with suppress(InvalidNamespace):
            await self._store.abatch([PutItem(at, thread_id, None) for at in (RECORDS, UNSTARTED)])
            await self._forget_versions()
        self._forget(thread_id)

    async def prune(self, thread_id: str) -> None:
        """Delete the checkpoints of a thread but for its head; what was said stays readable."""
        await self.get(thread_id)
        await self._saver.aprune([thread_id])

    async def copy(
        self, thread_id: str, new_id: str | None = None, metadata: Mapping[str, Any] | None = None
    ) -> Thread:
        """Copy a thread, which the caller may read, with all its checkpoints and its metadata.

        `metadata` is added to that of the copy.

        Raises:
            UnknownThread: There is no thread to copy.
            VersionConflict: There is a thread of the new id.
        """
        source = await self._find(thread_id)
        if source is None:
            raise UnknownThread(f"there is no thread {thread_id!r}")
        made = await self.create(new_id, {**source["metadata"], **(metadata or {})})
        with suppress(UnknownThread):  # it has no turn
            await self._saver.acopy_thread(thread_id, made["thread_id"])
            await self.set_status(made["thread_id"], source["status"])
        return await self.get(made["thread_id"])

    @asynccontextmanager
    async def turn(self, thread_id: str) -> AsyncIterator[None]:
        """Hold the lock of a thread while it is changed.

        Raises:
            AlreadyLocked: A run holds it.
        """
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._saver.lock(thread_id, timeout_s=0))
            except StorageUnavailable as exc:
                raise AlreadyLocked(
                    f"a run of the thread {thread_id!r} is under way; wait for its end, or cancel "
                    "it"
                ) from exc
            yield

    def _now(self, thread: Thread) -> Thread:
        return {**thread, "status": "busy"} if self._runs(thread["thread_id"]) else thread

    def _check(self, metadata: Mapping[str, Any]) -> None:
        """Check that a thread with this metadata may be reached by whoever makes it."""
        if not meets(metadata, self._filter):
            raise Forbidden(f"a thread with the metadata {dict(metadata)!r:.200} is not yours")

    async def _find(self, thread_id: str) -> Thread | None:
        record = None
        with suppress(InvalidNamespace):
            record = await self._store.aget(RECORDS, thread_id, refresh_ttl=False)
        with suppress(UnknownThread):
            return _thread(thread_id, await self._saver.ahead(thread_id), record)
        if record is None or await self._store.aget(UNSTARTED, thread_id) is None:
            return None  # a record alone is what a deletion by another program left
        return _thread(thread_id, None, record)

    async def _forget_versions(self) -> None:
        await self._store.aretain(VersionRetention(last=0), prefix=(RESERVED,))

    async def _record(self, thread_id: str, change: Mapping[str, Any]) -> int | None:
        """Change a record, or begin one; returns its version, None if it was so already."""
        for _ in range(_TRIES):
            found = await self._store.aget(RECORDS, thread_id, refresh_ttl=False)
            value: Thread = found.value if found else {"metadata": {}, "status": "idle"}
            new = {**value, **change}
            if "metadata" in change:
                new["metadata"] = {**value["metadata"], **change["metadata"]}
            if new == value:
                return None
            version = found.version if found else 0
            with suppress(VersionConflict):
                await self._store.aput(RECORDS, thread_id, new, False, if_version=version)
                return version + 1
        raise VersionConflict(f"the thread {thread_id!r} is changed by others; try again")

    # -- many threads

    async def search(
        self,
        *,
        metadata: Mapping[str, Any] | None = None,
        values: Mapping[str, Any] | None = None,
        ids: Sequence[str] | None = None,
        status: str | None = None,
        text: str = "",
        prefix: str = "",
        active_since: datetime | None = None,
        active_until: datetime | None = None,
        limit: int = 10,
        offset: int = 0,
        sort_by: SortBy | None = None,
        sort_order: Literal["asc", "desc"] | None = None,
    ) -> list[Thread]:
        """A page of threads, the latest activity first.

        A page of the newest reads no more than it needs. Filters read on until the page is full, in
        another order all threads are read: some 70 ms for each thousand, off the event loop.

        Args:
            metadata: What the metadata must contain; dicts may have more than is given.
            values: Likewise the values of the newest checkpoint, which are read for it.
            ids: Only these.
            status: Only of this status.
            text: Only with this in the title or the id, whatever the case.
            prefix: Only ids that begin with it.
            active_since: Only those active at this moment or later.
            active_until: Only those not active after it.
            limit: At most so many.
            offset: How many of the first to leave out.
            sort_by: Another order than by activity.
            sort_order: `"asc"` or `"desc"`, the default.
        """
        found: list[Thread] = []
        asked = (metadata or {}, values or {}, status, text.casefold(), active_until)
        at_once = sort_by in (None, "updated_at", "state_updated_at") and sort_order != "asc"
        pages = (
            self._pages(prefix, active_since, offset + limit) if ids is None else self._named(ids)
        )
        async for page in pages:
            found += [
                thread for thread in map(self._now, page) if await self._is_wanted(thread, *asked)
            ]
            if at_once and ids is None and len(found) >= offset + limit:
                break
        if not at_once or ids is not None:
            key = "updated_at" if sort_by in (None, "state_updated_at") else sort_by
            found.sort(key=lambda thread: thread[key], reverse=sort_order != "asc")
        return found[offset : offset + limit]

    async def count(self, **wanted: Any) -> int:
        """How many threads a search with these filters finds."""
        return len(await self.search(**wanted, limit=_ALL))

    async def _is_wanted(
        self,
        thread: Thread,
        metadata: Mapping[str, Any],
        values: Mapping[str, Any],
        status: str | None,
        text: str,
        until: datetime | None,
    ) -> bool:
        own, thread_id = thread["metadata"], thread["thread_id"]
        if text and text not in f"{thread_id}\0{own.get('title', '')}".casefold():
            return False
        if not (contains(own, metadata) and meets(own, self._filter)):
            return False
        if status not in (None, thread["status"]) or (until and thread["updated_at"] > until):
            return False
        return not values or contains(await self._values(thread_id), values)

    async def _values(self, thread_id: str) -> Any:
        """The values of the newest checkpoint of a thread, in JSON's types."""
        found = await self._saver.aget_tuple({"configurable": {"thread_id": thread_id}})
        return json.loads(encoded(values_of(found.checkpoint["channel_values"]))) if found else {}

    async def user(self, thread_id: str) -> str | None:
        """Whose the newest checkpoint of a thread is; None: nobody's, or there is none."""
        with suppress(UnknownThread):
            head = await self._saver.ahead(thread_id)
            return head.metadata.get("user_id")
        return None

    async def _named(self, ids: Sequence[str]) -> AsyncIterator[list[Thread]]:
        found = [await self._find(thread_id) for thread_id in dict.fromkeys(ids)]
        yield [thread for thread in found if thread is not None]

    async def _pages(
        self, prefix: str, since: datetime | None, size: int
    ) -> AsyncIterator[list[Thread]]:
        """All threads, the latest activity first; those without a turn are where they began."""
        unstarted = await self._store.asearch(UNSTARTED, limit=_ALL, refresh_ttl=False)
        waiting = [
            (item.created_at - _SOON, item.key)
            for item in unstarted
            if item.key.startswith(prefix) and not (since and item.created_at < since)
        ]
        seen: set[str] = set()
        heads: list[ThreadHead] = []
        more = True
        while more:
            size = max(1, min(size, _PAGE))
            heads = await self._heads(heads, limit=size, prefix=prefix, active_since=since)
            more = len(heads) == size
            new = [head for head in heads if head.thread_id not in seen]
            rows: list[Row] = [(head.updated_at, head.thread_id, head) for head in new]
            seen.update(row[1] for row in rows)
            began = []
            while waiting and (not more or waiting[-1][0] > heads[-1].updated_at):
                at, thread_id = waiting.pop()
                if thread_id in seen:
                    began.append(PutItem(UNSTARTED, thread_id, None))
                else:
                    rows.append((at, thread_id, None))
            if began:
                await self._store.abatch(began)
                await self._forget_versions()
            rows.sort(key=lambda row: row[0], reverse=True)
            yield await self._recorded(rows)
            size = _PAGE

    async def _heads(self, before: list[ThreadHead], **page: Any) -> list[ThreadHead]:
        """The page after another; of that one, threads may have been deleted meanwhile."""
        for head in reversed(before):
            with suppress(UnknownThread):
                return await self._saver.aheads(after=head.thread_id, **page)
        return await self._saver.aheads(**page)

    async def _recorded(self, rows: Sequence[Row]) -> list[Thread]:
        """Threads with their records, and those of `rows` that have one of the two."""
        storable = [row[1] for row in rows if _is_key(row[1])]
        found = await self._store.abatch([GetOp(RECORDS, key, False) for key in storable])
        records: dict[str, Any] = dict(zip(storable, found, strict=True))
        return [
            _thread(thread_id, head, records.get(thread_id))
            for _, thread_id, head in rows
            if head is not None or records.get(thread_id) is not None
        ]


def contains(value: Any, wanted: Any) -> bool:
    """Whether a value has all that is wanted: dicts may have more, lists more and in any order."""
    if isinstance(wanted, Mapping):
        return isinstance(value, Mapping) and all(
            name in value and contains(value[name], each) for name, each in wanted.items()
        )
    if isinstance(wanted, list):
        return isinstance(value, list) and all(
            any(contains(one, each) for one in value) for each in wanted
        )
    return bool(value == wanted)


def values_of(channels: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a state, of the channels that are not langgraph's own."""
    return {
        name: value
        for name, value in channels.items()
        if not name.startswith("__") and ":" not in name
    }


def _thread(thread_id: str, head: ThreadHead | None, record: StoredItem | None) -> Thread:
    known = record.value if record else {}
    moments = [each for each in (head, record) if each is not None]
    return {
        "thread_id": thread_id,
        "created_at": min(each.created_at for each in moments),
        "updated_at": max(each.updated_at for each in moments),
        "metadata": _metadata(head.metadata if head else {}, known),
        "status": known.get("status", "idle"),
    }


def _metadata(head: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    known = {
        name: value
        for name, value in head.items()
        if name not in _OWN and not name.startswith(_OTHERS)
    }
    user = {"user_id": head["user_id"]} if "user_id" in head else {}  # no client writes it
    owner = {"owner": head["user_id"]} if user else {}
    return {**known, **owner, **record.get("metadata", {}), **user}


def _is_key(thread_id: str) -> bool:
    return bool(thread_id) and "\0" not in thread_id and len(thread_id.encode()) <= 4096
