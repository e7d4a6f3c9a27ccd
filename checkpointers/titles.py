"""The title, model and times of a conversation, which an import leaves in its metadata."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.reports import ThreadHead
from perdure.errors import UnknownThread

ABOUT: Final = ("title", "model", "gizmo_id", "create_time", "update_time")
"""The metadata that an import leaves in each checkpoint of a conversation."""
TITLED: Final = "titled"  # metadata by which a checkpoint with a title is found


def about(
    saver: Checkpointer, thread_id: str, newest: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The title, model and times that an import left in a thread, as far as it has them.

    They are in the metadata of its head, unless another program continued the thread; then they are
    found by a tag.

    Args:
        saver: The checkpointer.
        thread_id: The thread.
        newest: The metadata of its head, if that was read already.

    Raises:
        UnknownThread: There is no such thread.
    """
    if newest is None:
        newest = existing_head(saver, thread_id).metadata
    if "title" not in newest:
        root: Any = {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}
        for tagged in saver.list(root, filter={TITLED: True}, limit=1):
            newest = {**tagged.metadata}
    known = {name: newest[name] for name in ABOUT if name in newest}
    return {**known, "title": str(known["title"])} if "title" in known else known


async def aabout(
    saver: Checkpointer, thread_id: str, newest: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """See `about`."""
    return await asyncio.to_thread(about, saver, thread_id, newest)


def existing_head(saver: Checkpointer, thread_id: str) -> ThreadHead:
    """Return the head of a thread.

    Raises:
        UnknownThread: There is no such thread.
    """
    head = saver.head(thread_id)
    if head is None:
        raise UnknownThread(f"there is no thread {thread_id!r}; threads() lists them")
    return head


def title(saver: Checkpointer, thread_id: str, known: Mapping[str, Any] | None = None) -> str:
    """The title of a thread; without one, the beginning of the first message of a human; else `""`.

    Args:
        saver: The checkpointer.
        thread_id: The thread.
        known: The result of `about`, if there is one already.
    """
    with suppress(UnknownThread):  # another process deleted it
        known = about(saver, thread_id) if known is None else known
        return str(known.get("title") or existing_head(saver, thread_id).title)
    return ""


async def atitle(
    saver: Checkpointer, thread_id: str, known: Mapping[str, Any] | None = None
) -> str:
    """See `title`."""
    return await asyncio.to_thread(title, saver, thread_id, known)
