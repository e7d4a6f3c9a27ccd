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
# Metadata key that is set to True in the imported checkpoints of a conversation that has a title,
# so that a checkpoint with the title can be found through the metadata index.
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
        # If another program has continued an imported conversation, the latest checkpoint's
        # metadata has no title. In this case, use the metadata of the newest checkpoint that has a
        # title from an import, if there is one.
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
    with suppress(UnknownThread):  # the thread does not exist, or another process has deleted it
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
