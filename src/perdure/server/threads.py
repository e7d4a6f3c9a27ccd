"""Threads as the server knows them: those of the checkpointer, and records beside them.

A record is an item of the store. It has what langgraph's clients give a thread and no checkpoint
keeps: metadata, and that a thread without a turn exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

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

    async def search(self, *, text: str = "", limit: int = 10) -> list[dict[str, Any]]:
        """The newest threads, only those with a text in the title or the id."""
        wanted = text.casefold()
        found: list[dict[str, Any]] = []
        for head in await self._saver.aheads(limit=50 * limit):
            title = str(head.metadata.get("title", ""))
            if wanted in f"{head.thread_id}\n{title}".casefold() and len(found) < limit:
                with suppress(UnknownThread):
                    found.append(await self.get(head.thread_id))
        return found


def _metadata(head: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    owner = {"owner": head["user_id"]} if "user_id" in head else {}
    return {**owner, **head, **record.get("metadata", {})}
