"""Threads as the server knows them: those of the checkpointer, and records beside them.

A record is an item of the store. It has what langgraph's clients give a thread and no checkpoint
keeps: metadata, and that a thread without a turn exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal
from uuid import uuid4

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.errors import UnknownThread
from perdure.server.access import Filter, meets
from perdure.stores.whole_store import WholeStore

RECORDS: Final = ("perdure.server", "threads")
"""The namespace of records."""


class Threads:
    """The threads whose metadata meets a filter; any other is unknown."""

    def __init__(self, saver: Checkpointer, store: WholeStore, filter: Filter) -> None:
        self._saver, self._store, self._filter = saver, store, filter

    async def get(self, thread_id: str) -> dict[str, Any]:
        """A thread as langgraph's clients know it, without its values.

        Raises:
            UnknownThread: There is none, or it may not be reached.
        """
        record = await self._store.aget(RECORDS, thread_id)
        try:
            [head] = await self._saver.acheckpoints(thread_id, checkpoint_ns="", limit=1)
        except UnknownThread:
            if record is None:
                raise
            head = None
        metadata = _metadata(head.metadata if head else {}, record.value if record else {})
        if not meets(metadata, self._filter):
            raise UnknownThread(f"there is no thread {thread_id!r}")
        return {"thread_id": thread_id, "metadata": metadata}

    async def create(
        self,
        thread_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        if_exists: Literal["raise", "do_nothing"] = "raise",
    ) -> dict[str, Any]:
        """Create a thread."""
        thread_id = thread_id or str(uuid4())
        if await self._store.aget(RECORDS, thread_id) is None:
            await self._store.aput(RECORDS, thread_id, {"metadata": dict(metadata or {})}, False)
        return await self.get(thread_id)

    async def set_status(self, thread_id: str, status: str) -> None:
        """Write how a thread stands."""

    async def delete(self, thread_id: str) -> None:
        """Delete a thread."""
        await self._saver.adelete_thread(thread_id)
        await self._store.adelete(RECORDS, thread_id)


def _metadata(head: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    owner = {"owner": head["user_id"]} if "user_id" in head else {}
    return {**owner, **head, **record.get("metadata", {})}
