"""Read the title, model and timestamps that an import stored in a conversation's metadata."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.reports import ThreadHead
from perdure.errors import UnknownThread

IMPORTED_KEYS: Final = ("title", "model", "gizmo_id", "create_time", "update_time")
"""The names of the metadata that an import stores in each checkpoint of a conversation."""
# Metadata key that is True in each imported checkpoint of a conversation with a title. It allows
# such a checkpoint to be found through the metadata index.
TITLED: Final = "titled"


def read_import_metadata(
    saver: Checkpointer, thread_id: str, head_metadata: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the title, model and timestamps that an import stored in a thread's metadata.

    Args:
        saver: The checkpointer.
        thread_id: The thread.
        head_metadata: The metadata of the thread's head, if it was read already.

    Returns:
        The values by the names in `IMPORTED_KEYS`. Names without a value are left out.

    Raises:
        UnknownThread: The thread does not exist.
    """
    if head_metadata is None:
        head_metadata = read_thread_head_or_raise(saver, thread_id).metadata
    if "title" not in head_metadata:
        # If another program has continued an imported conversation, the head's metadata has no
        # title. Use the metadata of the newest checkpoint with an imported title, if one exists.
        root: Any = {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}
        for tagged in saver.list(root, filter={TITLED: True}, limit=1):
            head_metadata = {**tagged.metadata}
    values = {name: head_metadata[name] for name in IMPORTED_KEYS if name in head_metadata}
    return {**values, "title": str(values["title"])} if "title" in values else values


async def aread_import_metadata(
    saver: Checkpointer, thread_id: str, head_metadata: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the result of `read_import_metadata` without blocking the event loop."""
    return await asyncio.to_thread(read_import_metadata, saver, thread_id, head_metadata)


def read_thread_head_or_raise(saver: Checkpointer, thread_id: str) -> ThreadHead:
    """Return the head of a thread.

    Raises:
        UnknownThread: The thread does not exist.
    """
    head = saver.head(thread_id)
    if head is None:
        raise UnknownThread(f"there is no thread {thread_id!r}; threads() lists all threads")
    return head


def title(
    saver: Checkpointer, thread_id: str, import_metadata: Mapping[str, Any] | None = None
) -> str:
    """Return the display title of a thread.

    Args:
        saver: The checkpointer.
        thread_id: The thread.
        import_metadata: The result of `read_import_metadata`, if it was called already.

    Returns:
        The title that an import stored, else the start of the first human message, else `""`. The
        result is also `""` if the thread does not exist.
    """
    # UnknownThread means that the thread does not exist or that another process has deleted it.
    with suppress(UnknownThread):
        if import_metadata is None:
            import_metadata = read_import_metadata(saver, thread_id)
        return str(
            import_metadata.get("title") or read_thread_head_or_raise(saver, thread_id).title
        )
    return ""


async def atitle(
    saver: Checkpointer, thread_id: str, import_metadata: Mapping[str, Any] | None = None
) -> str:
    """Call `title` in a worker thread, so that the event loop is not blocked."""
    return await asyncio.to_thread(title, saver, thread_id, import_metadata)
