"""Determine which checkpoint is the head of a namespace.

If runs of a thread overlap, the head is a checkpoint of the run that started last
(docs/decisions/0005).
"""

from __future__ import annotations

from typing import Final

from perdure.checkpointers.cache import Head, Snapshot
from perdure.checkpointers.put import CheckpointPut

# Mask for the bits of a checkpoint's row key that hold the checkpoint's sequence number.
_SEQ_MASK: Final = 0xFFFFFFFF
START_SOURCES: Final = {"input", "update", "fork"}
"""The values of `source` in the metadata of a checkpoint that starts a run."""


def find_seq_of_first_checkpoint_of_run(
    put: CheckpointPut,
    head: Head,
    parent: Snapshot | None,
    parent_and_put_supersteps: tuple[int | None, int | None],
    put_seq: int,
) -> int:
    """Return the number of the put with which a new checkpoint's run began, its run start.

    The result is the run start of the parent, with the following exceptions. The result is
    `put_seq` if the checkpoint starts a run, which is the case if one of these conditions is met:

    - The checkpoint's source is in `START_SOURCES`.
    - The checkpoint has no parent, or its parent was pruned.
    - The caller chose the parent by id, and the parent is not the head.
    - The checkpoint's superstep number is not one more than the parent's. Superstep numbers have
      gaps if a run uses the durability mode `exit`, because langgraph then stores only the run's
      last checkpoint.

    The result is 0 if the parent was pruned, the source is not in `START_SOURCES`, and the put is
    merged with the head or leaves the head as it is (see `Merge`). The run then counts as the
    oldest.

    Args:
        put: The request to store the new checkpoint.
        head: The head before the new checkpoint is stored.
        parent: The parent of the new checkpoint.
        parent_and_put_supersteps: The superstep numbers of the parent and of the new checkpoint. A
            number is None if the checkpoint's metadata does not contain it.
        put_seq: The sequence number of the new checkpoint.
    """
    if put.metadata.get("source") in START_SOURCES:
        return put_seq
    if parent is None:
        return 0 if put.address.checkpoint_id is not None and put.merge is not None else put_seq
    if put.continues_chosen_checkpoint and (
        head.snapshot is None or head.snapshot.key != parent.key
    ):
        return put_seq
    parent_step, step = parent_and_put_supersteps
    is_new_run = step is not None and parent_step is not None and step != parent_step + 1
    return put_seq if is_new_run else parent.run_start


def choose_head_and_detect_run_overlap(
    put: CheckpointPut, head: Head, snapshot: Snapshot, put_seq: int
) -> tuple[Head, bool]:
    """Return the head that a namespace will have after a put, and whether the put shows an overlap.

    Two runs of the thread overlap if the new checkpoint does not become the head, unless the head
    is an explicit head (the thread was rewound, or a run was rolled back). In the root namespace,
    two runs also overlap if a run starts with new input (source `input`) from a checkpoint that is
    no longer the head. A run that deliberately continues from an earlier checkpoint does not count
    as overlapping.

    Args:
        put: The request to store the new checkpoint.
        head: The head before the new checkpoint is stored.
        snapshot: The new checkpoint.
        put_seq: The sequence number of the new checkpoint.
    """
    former, new_head = head.snapshot, Head(head.namespace_key, 0, snapshot)
    if put.merge is not None and put.merge.keeps_head is not None:
        kept_head = put.merge.keeps_head
        return Head(head.namespace_key, kept_head.key & _SEQ_MASK, kept_head), True
    if former is None or snapshot.parent_id == former.checkpoint_id:
        return new_head, False
    if snapshot.run_start == put_seq:
        is_root_input = put.metadata.get("source") == "input" and not put.address.checkpoint_ns
        return new_head, is_root_input and not put.continues_chosen_checkpoint
    if (snapshot.run_start, snapshot.checkpoint_id) > (former.run_start, former.checkpoint_id):
        return new_head, False
    return Head(
        head.namespace_key, head.explicit_head or former.key & _SEQ_MASK, former
    ), not head.explicit_head
