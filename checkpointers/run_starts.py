"""Record the start times of runs, so that perdure can tell when the run that added a message began.

Each checkpoint that a langgraph run stores in the root namespace contains the start time of the
run. The start time of a run is recorded immediately before the run loads its thread. A new input
starts a run. A resumed run counts as a continuation of the interrupted run, so its checkpoints
inherit the start time from the parent checkpoint.

These checkpoints of the root namespace have no start time:

- checkpoints that a state update stored,
- checkpoints that were merged with a state update,
- imported checkpoints,
- checkpoints of a run whose first checkpoint contains pending writes of an earlier run.

Copying a thread or merging databases does not copy the start times of runs. An imported file may be
untrusted and contain false start times. If these start times were copied, a message could be
falsely attributed to a run of this database.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import CheckpointTuple

from perdure.checkpointers.address import Address, find_langgraph_runtime
from perdure.checkpointers.cache import Snapshot, drop_oldest_entries
from perdure.checkpointers.manifest import iter_positions, join_adjacent_ranges
from perdure.checkpointers.put import START, CheckpointPut
from perdure.checkpointers.reader import CheckpointReader, StoredCheckpoint
from perdure.checkpointers.removal_records import find_run_control
from perdure.storage.flow import Flow

# Maximum number of (run, thread) pairs whose start times are kept in memory. If there are more, the
# oldest pairs are dropped.
_MAX_LOADED_RUNS: Final = 8192
# The character that separates the names of nested graphs in a checkpoint namespace.
_BETWEEN_GRAPHS: Final = "|"


class LoadedRun(NamedTuple):
    """Describes when a run in this process started, and which checkpoint the run loaded.

    Attributes:
        started_at: Unix timestamp in seconds, taken just before the run loaded the thread.
        checkpoint_id: The id of the checkpoint that the run loaded, or None for a new thread.
        has_writes: Whether the checkpoint has pending writes of an earlier run to channels of the
            graph. They become part of the first checkpoint that this run stores. Writes to
            langgraph's own channels, whose names begin with two underscores, do not count.
        is_addressed: Whether the run has loaded the checkpoint by its id.
        has_input: Whether the run is known to have started with an input of its own.
    """

    started_at: float
    checkpoint_id: str | None
    has_writes: bool
    is_addressed: bool
    has_input: bool = False


class RunStarts:
    """Records the time at which each run in this process loaded its thread."""

    def __init__(self) -> None:
        self._runs: dict[tuple[object, str], LoadedRun] = {}

    def record_checkpoint_load(
        self,
        config: RunnableConfig,
        address: Address,
        started_at: float,
        loaded: CheckpointTuple | None,
    ) -> None:
        """Record that a run has loaded a checkpoint.

        Do nothing if the config does not belong to the root graph of a run.

        Args:
            config: The config of the read.
            address: The address that was read.
            started_at: The time before the read, in seconds since 1970.
            loaded: The checkpoint, or None for a new thread.
        """
        runtime = None if address.checkpoint_ns else find_langgraph_runtime(config)
        control = find_run_control(runtime)
        if runtime is None or control is None or runtime.execution_info is not None:
            return
        key, is_addressed = (control, address.thread_id), address.checkpoint_id is not None
        former_run = self._runs.pop(key, None)
        has_empty_id = not is_addressed and "checkpoint_id" in config["configurable"]
        if has_empty_id and former_run is not None and former_run.is_addressed:
            # After the run has loaded a checkpoint by id, langgraph also loads the head, but only
            # for comparison. Keep the record of the checkpoint that was loaded by id.
            self._runs[key] = former_run
            return
        drop_oldest_entries(self._runs, _MAX_LOADED_RUNS)
        pending_writes = (loaded.pending_writes if loaded is not None else None) or ()
        has_writes = any(not channel.startswith("__") for _, channel, _ in pending_writes)
        checkpoint_id = None if loaded is None else loaded.checkpoint["id"]
        self._runs[key] = LoadedRun(started_at, checkpoint_id, has_writes, is_addressed)

    def find_run(self, config: RunnableConfig, thread_id: str) -> LoadedRun | None:
        """Return the record of the run to which a config belongs, or None if there is none."""
        return self._runs.get((find_run_control(find_langgraph_runtime(config)), thread_id))

    def set_start_time_of_run_in_put(self, put: CheckpointPut, runtime: Any) -> None:
        """Add the start time of the run to which `runtime` belongs to a request that it makes.

        The start time is added only to the first checkpoint of a run. No start time is added to the
        checkpoint if the run loaded pending writes of an earlier run. When a run stores its input,
        `has_input` is set to True in the run's `LoadedRun`. The run's checkpoints after the first
        one get `continues_run=True` instead of a start time, so that they inherit the start time of
        their parent. A request that comes from a state update is left unchanged.

        Args:
            put: The request, which stores a checkpoint of the root graph.
            runtime: The langgraph `Runtime` of the run.
        """
        source = put.metadata.get("source")
        is_new = source == "input" or (START in put.new_versions and put.is_only_checkpoint_of_run)
        if source == "loop" and not is_new:
            put.continues_run = True
        elif is_new:
            key = find_run_control(runtime), put.address.thread_id
            if (run := self._runs.get(key)) is not None:
                self._runs[key] = run._replace(has_input=True)
                put.run_started_at = None if run.has_writes else run.started_at


def find_which_messages_were_added_after(
    reader: CheckpointReader,
    runs: RunStarts,
    thread_id: str,
    channel: str,
    message_ids: Sequence[str],
    after_time: float,
    config: RunnableConfig | None,
) -> Flow[list[bool]]:
    """Return, for each message, whether it was added by a run that started after a given time.

    Args:
        reader: Reads checkpoints.
        runs: The runs of this process.
        thread_id: The thread.
        channel: The channel of the messages.
        message_ids: The ids of the messages.
        after_time: The time, in seconds since 1970.
        config: The config of a node, for messages in the state of its run. None means that the
            messages are in the transcript of the thread's head.
    """
    period, address = (after_time, time.time()), Address(thread_id, "", None)
    if config is None:
        stored_checkpoint = yield from reader.find_checkpoint(address)
        results_by_id = yield from _find_which_messages_were_added_within(
            reader, thread_id, stored_checkpoint, channel, message_ids, period
        )
        return [results_by_id.get(message_id, False) for message_id in message_ids]
    run = runs.find_run(config, thread_id)
    namespace = str(config.get("configurable", {}).get("checkpoint_ns") or "")
    if run is None or _BETWEEN_GRAPHS in namespace:
        return [False] * len(message_ids)
    if run.checkpoint_id is None:
        return [_is_start_within(run.started_at, period)] * len(message_ids)
    address = address._replace(checkpoint_id=run.checkpoint_id)
    stored_checkpoint = yield from reader.find_checkpoint(address)
    if stored_checkpoint is None:
        # The checkpoint that the run loaded has since been pruned.
        return [False] * len(message_ids)
    results_by_id = yield from _find_which_messages_were_added_within(
        reader, thread_id, stored_checkpoint, channel, message_ids, period
    )
    started_at = run.started_at
    # A run that was started without an input might be resuming an interrupted or failed run.
    if not run.has_input:
        status = yield from reader.find_thread_status(address)
        if status is None or status.tasks:
            started_at = stored_checkpoint.snapshot.run_started_at or 0.0
    # A message that is not in the transcript of the loaded checkpoint was added by this run, unless
    # it comes from the pending writes of an earlier run.
    is_new = _is_start_within(started_at, period) and not run.has_writes
    return [results_by_id.get(message_id, is_new) for message_id in message_ids]


def _is_start_within(started_at: float | None, period: tuple[float, float]) -> bool:
    """Return whether a run started within the given period. The start of the period is excluded."""
    return started_at is not None and period[0] < started_at <= period[1]


def _find_which_messages_were_added_within(
    reader: CheckpointReader,
    thread_id: str,
    stored_checkpoint: StoredCheckpoint | None,
    channel: str,
    message_ids: Sequence[str],
    period: tuple[float, float],
) -> Flow[Mapping[str, bool]]:
    """Return, for each message, whether it was added by a run that started within `period`.

    Messages that are not in the checkpoint's transcript are left out of the returned mapping. A
    message maps to True only if every version of the message was added by a run that started within
    `period`. Each version of a message is attributed to the run that stored the oldest checkpoint
    with that version. If pruning has deleted older checkpoints, the run that added a version of a
    message can be unknown. Such a message maps to False.
    """
    if stored_checkpoint is None or channel not in stored_checkpoint.snapshot.transcript:
        return {}
    key, _ = stored_checkpoint.snapshot.transcript[channel]
    transcript_positions = yield from reader.read_transcript_positions(
        thread_id, stored_checkpoint.thread, stored_checkpoint.snapshot, channel
    )
    ranges = join_adjacent_ranges(
        (position, position + 1) for position in sorted(transcript_positions)
    )
    values = yield from reader.read_and_decode_items(
        thread_id, stored_checkpoint.thread, key, ranges
    )
    wanted_ids, id_by_position = {*message_ids}, dict[int, str]()
    for position, message in zip(iter_positions(ranges), values, strict=True):
        if (message_id := getattr(message, "id", None)) in wanted_ids:
            id_by_position[position] = message_id
    added_positions = yield from _find_item_positions_added_by_runs_started_in_period(
        reader, thread_id, stored_checkpoint, channel, {*id_by_position}, period
    )
    results = dict[str, bool]()
    for position, message_id in id_by_position.items():
        results[message_id] = results.get(message_id, True) and position in added_positions
    return results


def _find_item_positions_added_by_runs_started_in_period(
    reader: CheckpointReader,
    thread_id: str,
    stored_checkpoint: StoredCheckpoint,
    channel: str,
    item_positions: set[int],
    start_period: tuple[float, float],
) -> Flow[set[int]]:
    """Return the positions of the items added by runs that started within `start_period`.

    The items are searched for in `stored_checkpoint` and then in its ancestors. The search stops at
    the first checkpoint whose run started outside `start_period` or has no stored start time.
    """
    added, remaining = set[int](), item_positions
    checkpoint: Snapshot | None = stored_checkpoint.snapshot
    while (
        remaining
        and checkpoint is not None
        and _is_start_within(checkpoint.run_started_at, start_period)
    ):
        parent: Snapshot | None = None
        if checkpoint.parent_id is not None:
            parent = yield from reader.read_snapshot(
                thread_id, "", stored_checkpoint.namespace_key, checkpoint.parent_id
            )
            if parent is None:
                # The parent checkpoint was pruned, so it is unknown which runs added the items in
                # `remaining`.
                return added
        in_parent = set[int]()
        if parent is not None:
            in_parent = remaining & (
                yield from reader.read_transcript_positions(
                    thread_id, stored_checkpoint.thread, parent, channel
                )
            )
        # Skip items that first appear in an `input` checkpoint, because an earlier run added them.
        # langgraph stores an `input` checkpoint before it adds the run's input to the state.
        if reader.decode_metadata(checkpoint).get("source") != "input":
            added |= remaining - in_parent
        checkpoint, remaining = parent, in_parent
    return added
