"""What is known of a thread beside its messages: the title and times of a conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.checkpointers import SQLiteCheckpointer


def about_thread(saver: SQLiteCheckpointer, thread_id: str) -> dict[str, Any]:
    """The title and times that an import left in a thread, those that it has.

    They stand in the metadata of its checkpoints. The newest has them, unless the thread went on
    in a program of its own; then those that an import put are found by their tag.
    """
    from perdure.cli.storing import TITLED
    from perdure.cli.transcripts import ABOUT

    newest = saver.checkpoints(thread_id, checkpoint_ns="", limit=1)
    metadata: Any = newest[0].metadata if newest else {}
    if "title" not in metadata:
        where: Any = {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}
        tagged = next(iter(saver.list(where, filter={TITLED: True}, limit=1)), None)
        metadata = tagged.metadata if tagged is not None else metadata
    return {name: metadata[name] for name in ABOUT if name in metadata}
