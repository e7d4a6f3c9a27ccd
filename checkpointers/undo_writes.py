"""Undo the pending writes that a run added to checkpoints of other runs.

When a run resumes an interrupted thread, the answer to the interrupt (the resume value) is stored
as a pending write. This pending write belongs to the checkpoint at which the thread was
interrupted. The writes of the nodes that process the resume value are also stored as pending writes
of the checkpoint at which the thread was interrupted. A run that answers an interrupt adds pending
writes to an earlier checkpoint. These pending writes remain if the run's own checkpoints are
deleted. They must be undone separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from langgraph.checkpoint.base import WRITES_IDX_MAP

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.put import encode_value_as_inline_reference
from perdure.checkpointers.reader import CheckpointReader
from perdure.checkpointers.records import (
    build_put_writes_statement,
    decode_stored_id,
    decrypt_writes,
    encode_id_for_storage,
)
from perdure.checkpointers.status import is_update_path
from perdure.storage.flow import Flow


class FormerWrites(NamedTuple):
    """Describes the pending writes that a task had before a later run modified them.

    Attributes:
        has_result: Whether the task had written to channels of the graph. If False, its present
            writes to them are removed.
        control: The questions, answers and errors of the task, by the channel in which langgraph
            stores them.
        result_count: If `has_result` is True, the number of present writes to channels of the graph
            that are kept, counted from the first. None keeps all of them. A number is needed for
            the updates of commands, because langgraph appends the updates of a `Command` to those
            of earlier commands.
    """

    has_result: bool
    control: Mapping[str, Any]
    result_count: int | None = None


class FormerCheckpoint(NamedTuple):
    """Describes all pending writes that a checkpoint had before a later run modified them.

    Attributes:
        checkpoint_ns: The namespace of the checkpoint.
        checkpoint_id: The id of the checkpoint.
        tasks: The description of each task's pending writes, by task id.
    """

    checkpoint_ns: str
    checkpoint_id: str
    tasks: Mapping[str, FormerWrites]


async def undo_writes_to_checkpoint(
    saver: Checkpointer, thread_id: str, run_id: str, former: FormerCheckpoint
) -> None:
    """Restore a checkpoint's pending writes to an earlier state, in one transaction.

    Delete the pending writes of every task that has no entry in `former`, the earlier state.
    Pending writes that were stored by `update_state` are kept. Delete the server's records about
    the run, which are pending writes with the run id as task id.

    Args:
        saver: The checkpointer.
        thread_id: The thread of the checkpoint. The caller holds the lock of the thread.
        run_id: The run whose pending writes are undone.
        former: The description of the earlier state.
    """
    reader = saver._reader
    await saver.database.awrite(
        lambda: _restore_former_writes(reader, thread_id, run_id, former),
        lambda _: reader.cache.drop_thread(thread_id),
        exclusive_names=(thread_id,),
        deletes_rows=True,
    )


def _restore_former_writes(
    reader: CheckpointReader, thread_id: str, run_id: str, former: FormerCheckpoint
) -> Flow[None]:
    """Update or delete pending writes in the database so that they match `former`."""
    checkpoint_ns, checkpoint_id, tasks = former
    for thread_key, *_ in (yield reader.sql("find_thread", thread_id)):
        namespaces = {
            name: key for key, name, _ in (yield reader.sql("thread_namespaces", thread_key))
        }
        rows = (
            (yield reader.sql("namespace_writes", namespaces[checkpoint_ns]))
            if checkpoint_ns in namespaces
            else ()
        )
        for row in rows:
            task_id, task_path = decode_stored_id(row[1]) or "", row[2]
            if decode_stored_id(row[0]) != checkpoint_id or (
                is_update_path(task_path) and task_id != run_id
            ):
                continue
            if task_id == run_id or task_id not in tasks:
                yield reader.sql(
                    "drop_task_writes",
                    namespaces[checkpoint_ns],
                    encode_id_for_storage(checkpoint_id),
                    encode_id_for_storage(task_id),
                )
                continue
            has_result, control, result_count = tasks[task_id]
            writes = decrypt_writes(reader.seal, thread_id, checkpoint_ns, row)
            # langgraph gives negative indexes to the channels in `WRITES_IDX_MAP`, and non-negative
            # indexes to the graph's own channels.
            results = sorted((write for write in writes if write[0] >= 0), key=itemgetter(0))
            restored = results[:result_count] if has_result else []
            for channel, value in control.items():
                ref = encode_value_as_inline_reference(
                    reader.codec, None, channel, value, f"the write to {channel!r}"
                )
                restored.append([WRITES_IDX_MAP[channel], channel, ref])
            yield build_put_writes_statement(
                reader.sql,
                reader.seal,
                namespaces[checkpoint_ns],
                (thread_id, checkpoint_ns, checkpoint_id, task_id, task_path),
                sorted(restored, key=itemgetter(0)),
            )
        yield reader.sql("mark_head_changed", thread_key)
