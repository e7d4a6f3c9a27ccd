"""Decide which checkpoint of a namespace is its head.

The head belongs to the run that started last: see docs/decisions/0005.
"""

from __future__ import annotations

from typing import Final

from perdure.checkpointers.cache import Head, Snapshot
from perdure.checkpointers.put import CheckpointPut

# mask for the bits of a checkpoint's row key that contain its sequence number
_SEQ_MASK: Final = 0xFFFFFFFF
START_SOURCES: Final = {"input", "update", "fork"}
"""The sources in the metadata of a put that starts a run."""


def find_run_start(
    put: CheckpointPut, head: Head, parent: Snapshot | None, steps: tuple[int | None, ...], seq: int
) -> int:
    """Return the sequence number of the put that started the run to which a put belongs.

    A put starts a new run if it is an input, an update or a fork. A put that skips steps starts a
    run too, because with durability `exit`, langgraph puts only the end of a run. A put also starts
    a run if its parent is not the head and was read by its checkpoint id. If the parent of a put
    was pruned, and the head belongs to another run or to an update, the result is 0, because the
    run of the put started earlier.

    Args:
        put: The put.
        head: The head before the put.
        parent: The parent of the checkpoint that is put.
        steps: The step of the parent and the step of the put; None for metadata without a step.
        seq: The sequence number of the put.
    """
    if put.metadata.get("source") in START_SOURCES:
        return seq
    if parent is None:
        return 0 if put.address.checkpoint_id is not None and put.merge is not None else seq
    if put.is_deliberate and (head.snapshot is None or head.snapshot.key != parent.key):
        return seq
    parent_step, step = steps
    is_new_run = step is not None and parent_step is not None and step != parent_step + 1
    return seq if is_new_run else parent.run_start


def choose_head(put: CheckpointPut, head: Head, snapshot: Snapshot, seq: int) -> tuple[Head, bool]:
    """Return the head after a put, and whether the put reveals that two runs overlap.

    Two runs overlap if the put becomes a branch, or if an input replaces a head that the run of the
    input has not read. A deliberate return to an earlier checkpoint is not an overlap.

    Args:
        put: The put.
        head: The head before the put.
        snapshot: The checkpoint that is put.
        seq: The sequence number of the put.
    """
    former, new_head = head.snapshot, Head(head.namespace_key, 0, snapshot)
    if put.merge is not None and put.merge.keeps_head is not None:
        kept_head = put.merge.keeps_head
        return Head(head.namespace_key, kept_head.key & _SEQ_MASK, kept_head), True
    if former is None or snapshot.parent_id == former.checkpoint_id:
        return new_head, False
    if snapshot.run_start == seq:
        is_turn = put.metadata.get("source") == "input" and not put.address.checkpoint_ns
        return new_head, is_turn and not put.is_deliberate
    if (snapshot.run_start, snapshot.checkpoint_id) > (former.run_start, former.checkpoint_id):
        return new_head, False
    return Head(
        head.namespace_key, head.explicit_head or former.key & _SEQ_MASK, former
    ), not head.explicit_head
