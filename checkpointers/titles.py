"""Read the title, the model and the times that an import stored in a conversation's metadata."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.reports import ThreadHead
from perdure.errors import UnknownThread

ABOUT: Final = ("title", "model", "gizmo_id", "create_time", "update_time")
"""The names of the metadata that an import stores in each checkpoint of a conversation."""
TITLED: Final = "titled"  # metadata key that is True in imported checkpoints, to find them by index


def about(
    saver: Checkpointer, thread_id: str, newest: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the title, the model and the times that an import stored in a thread.

    Args:
        saver: The checkpointer.
        thread_id: The thread.
        newest: The metadata of the thread's head, if it was read already.

    Returns:
        The values by the names in `ABOUT`. Names without a value are left out.

    Raises:
        UnknownThread: The thread does not exist.
    """
    if newest is None:
        newest = existing_head(saver, thread_id).metadata
    if "title" not in newest:  # another program may have continued the thread without the title
        root: Any = {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}
        for tagged in saver.list(root, filter={TITLED: True}, limit=1):
            newest = {**tagged.metadata}
    values = {name: newest[name] for name in ABOUT if name in newest}
    return {**values, "title": str(values["title"])} if "title" in values else values


async def aabout(
    saver: Checkpointer, thread_id: str, newest: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the result of `about` without blocking the event loop."""
    return await asyncio.to_thread(about, saver, thread_id, newest)


def existing_head(saver: Checkpointer, thread_id: str) -> ThreadHead:
    """Return the head of a thread.

    Raises:
        UnknownThread: The thread does not exist.
    """
    head = saver.head(thread_id)
    if head is None:
        raise UnknownThread(f"there is no thread {thread_id!r}; threads() lists them")
    return head


def title(saver: Checkpointer, thread_id: str, known: Mapping[str, Any] | None = None) -> str:
    """Return the title of a thread for people.

    Args:
        saver: The checkpointer.
        thread_id: The thread.
        known: The result of `about`, if it was called already.

    Returns:
        The title that an import stored, else the start of the first human message, else `""`.
    """
    with suppress(UnknownThread):  # another process may delete the thread
        known = about(saver, thread_id) if known is None else known
        return str(known.get("title") or existing_head(saver, thread_id).title)
    return ""


async def atitle(
    saver: Checkpointer, thread_id: str, known: Mapping[str, Any] | None = None
) -> str:
    """Return the result of `title` without blocking the event loop."""
    return await asyncio.to_thread(title, saver, thread_id, known)
