"""Implement LangGraph's `BaseCheckpointSaver`, with blocking and async methods.

A run calls the methods in this module to get, list and store checkpoints and pending writes. The
module `writer` builds write plans, `reader` reads rows, and `listing` finds checkpoints. The
modules `writer`, `reader` and `listing` are independent of the database driver. Blocking methods
read from the database in the calling OS thread. Asynchronous methods read from the database in a
worker thread. The database driver decides which OS thread executes writes.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import nullcontext
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any, Final, Self, TypeVar

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    get_checkpoint_metadata,
)
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from perdure.checkpointers.address import (
    REMOVALS_KEY,
    Address,
    check_storable_text,
    check_thread_id,
    find_langgraph_runtime,
    parse_checkpoint_address,
)
from perdure.checkpointers.cache import Cache, drop_oldest_entries
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.collector import collector_paused
from perdure.checkpointers.labels import LABELS, find_labels_in_run_context
from perdure.checkpointers.listing import Listing
from perdure.checkpointers.message_marking import MESSAGE_MARKER
from perdure.checkpointers.objects import get_module_and_class_name
from perdure.checkpointers.put import CheckpointPut, TaskWrites
from perdure.checkpointers.reader import CheckpointReader
from perdure.checkpointers.removal_records import RemovalRecords
from perdure.checkpointers.run_starts import RunStarts
from perdure.checkpointers.run_writes import RUN_WRITES
from perdure.checkpointers.status import NULL_TASK
from perdure.checkpointers.stored_types import NO_TYPES, Aliases, StoredType, StoredTypes
from perdure.checkpointers.values import Allowlist, Continuation
from perdure.checkpointers.writer import CheckpointWriter
from perdure.errors import ConfigurationError, InvalidConfig
from perdure.storage.database import Database, DatabaseOwner, make_async_twin
from perdure.storage.encryption import (
    ChecksumSeal,
    LangGraphSeal,
    Seal,
    build_encryption_or_checksum_seal,
    check_key_and_bind_seal,
)
from perdure.storage.flow import Flow, NamedSQL, OwnWrites, WriteCounts
from perdure.storage.switch_interval import use_short_switch_interval

T = TypeVar("T")
# Item count above which a state is encoded and decoded in a worker thread instead of the event
# loop's OS thread.
OFF_LOOP_ITEMS: Final = 512
# A no-op context manager, for runs without a `RunWrites` object.
_NO_RUN: Final = nullcontext()
# Maximum number of entries in each of the dicts `_read_by_id` and `_labels`. Beyond this number,
# the oldest entries are dropped.
_MAX_REMEMBERED: Final = 1024


class CheckpointSaver(DatabaseOwner, BaseCheckpointSaver[Any]):
    """Implements LangGraph's checkpoint saver on top of a database.

    Args:
        database: The database, which the checkpointer owns and closes.
        sql: The statements in its dialect, by name.
        serde: The serializer.
        seal: Encrypts rows.
        cache_bytes: The approximate maximum memory of the cache, in bytes.
        types: The registered types, and the aliases of renamed classes.
    """

    def __init__(
        self,
        database: Database,
        sql: NamedSQL,
        serde: SerializerProtocol,
        seal: Seal,
        cache_bytes: int,
        types: StoredTypes = NO_TYPES,
    ) -> None:
        super().__init__(serde=serde)
        self.database, self.types = database, types
        self._sql, self._seal, self._cache_bytes = sql, seal, cache_bytes
        self._removals = RemovalRecords(sql, seal)
        self._run_starts = RunStarts()
        # Addresses of checkpoints that were loaded by id while they were not the head. Each address
        # is a dict key whose value is True. A run continues from an older checkpoint if it stores a
        # child of such a checkpoint. Storing the child removes the address of its parent from the
        # dict.
        self._read_by_id: dict[Address, bool] = {}
        # The names passed to `copy_context_values_to_metadata`, keyed by thread id.
        self._labels: dict[str, set[str]] = {}
        # Ids of the threads for which overlapping runs were logged. A checkpointer copy made by
        # `with_allowlist` shares this dict with the original.
        self._overlapped = OrderedDict[str, None]()
        self._create_codec_cache_reader_and_writer()

    def _create_codec_cache_reader_and_writer(self) -> None:
        """Create the codec, the cache and the other objects that depend on the serializer."""
        self._codec = Codec(self.serde, self.types)
        self._cache = Cache(self._cache_bytes, self._overlapped)
        parts = self._sql, self._seal, self._cache, self._codec, self._removals
        self._reader = CheckpointReader(*parts)
        self._own_writes = OwnWrites()
        self._writer = CheckpointWriter(self._reader, self._own_writes)
        self._listing = Listing(self._reader, self.database)

    def _check_encryption_key_and_load_removal_key(self) -> Flow[None]:
        """Verify the database's encryption key, and load the hash key of its removal records."""
        database, read_only = self.database, self.database.read_only
        yield from check_key_and_bind_seal(
            self._seal, database.path, database.tenant, read_only=read_only
        )
        yield from self._removals.load_hash_key(read_only=read_only)

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> Self:
        """Return a copy of the checkpointer that can also load objects of additional types.

        The copy allows the types in `extra_allowlist` in addition to those that the checkpointer
        already allows. The copy and the original share one database, so closing either of them
        closes both.
        """
        clone = super().with_allowlist(extra_allowlist)
        assert isinstance(clone, type(self))
        if clone is not self:
            clone._create_codec_cache_reader_and_writer()
        return clone

    # -- reading

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return the checkpoint that a config refers to, by default the head of its namespace.

        Returns:
            The checkpoint with its metadata and pending writes, or None if it does not exist.

        Raises:
            InvalidConfig: The config has no usable thread_id.
            CorruptRecord: A stored row is damaged or was tampered with.
        """
        address, started_at = parse_checkpoint_address(config), time.time()
        write_counts_except_own = (
            self.database.count_writes_except_own(self._own_writes)
            if self._reader.is_head_cached(address)
            else None
        )
        checkpoint = self._find_cached_checkpoint_tuple(
            address, write_counts_except_own
        ) or self._read(lambda: self._read_checkpoint_tuple(address, config))
        return self._record_load(config, address, started_at, checkpoint)

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """See `get_tuple`."""
        address, started_at = parse_checkpoint_address(config), time.time()
        if self._reader.is_head_cached(address, OFF_LOOP_ITEMS):
            write_counts_except_own = self.database.count_writes_except_own(self._own_writes)
            if write_counts_except_own is None:
                write_counts_except_own = await self.database.wait_and_count_writes_except_own(
                    self._own_writes
                )
            checkpoint = self._find_cached_checkpoint_tuple(address, write_counts_except_own)
        else:
            checkpoint = None
        if checkpoint is None:
            checkpoint = await self.database.run_in_thread(
                lambda: self._read(lambda: self._read_checkpoint_tuple(address, config))
            )
        return self._record_load(config, address, started_at, checkpoint)

    def _find_cached_checkpoint_tuple(
        self, address: Address, write_counts_except_own: WriteCounts | None
    ) -> CheckpointTuple | None:
        """Return the cached head, or None if another writer may have changed the cached thread."""
        if write_counts_except_own is None:
            return None
        with collector_paused():
            return self._reader.build_tuple_from_cache(address, write_counts_except_own)

    def _read_checkpoint_tuple(
        self, address: Address, config: RunnableConfig
    ) -> Flow[CheckpointTuple | None]:
        """Read a checkpoint.

        If the config requests a checkpoint by id and that checkpoint is not a head, remember the
        checkpoint's thread id, namespace and id. If a run stores a child of a checkpoint that the
        run read by id, perdure assumes that the run continues from that checkpoint on purpose (see
        `CheckpointPut.continues_chosen_checkpoint`).
        """
        checkpoint = yield from self._reader.read_tuple(address)
        # A deleted thread has no row that contains the sequence number of the deletion, so read the
        # number from the removal records.
        if checkpoint is None and not address.checkpoint_ns and self._removals.key is not None:
            number = yield from self._removals.read_newest_record_number(address.thread_id)
            if number:
                self._removals.remember_newest_removal_number_for_run(
                    config, address.thread_id, number
                )
        if checkpoint is None or address.checkpoint_id is None:
            return checkpoint
        if not (yield from self._reader.is_head(address)):
            drop_oldest_entries(self._read_by_id, _MAX_REMEMBERED)
            self._read_by_id[address] = True
        return checkpoint

    def _record_load(
        self,
        config: RunnableConfig,
        address: Address,
        started_at: float,
        checkpoint: CheckpointTuple | None,
    ) -> CheckpointTuple | None:
        """Record that a run has loaded a checkpoint, and return the checkpoint.

        The newest removal of the thread, the start time of the run and the messages of the
        checkpoint are recorded.
        """
        configurable: Any = {} if checkpoint is None else checkpoint.config["configurable"]
        if REMOVALS_KEY in configurable:
            self._removals.remember_newest_removal_number_for_run(
                config, configurable["thread_id"], configurable[REMOVALS_KEY]
            )
        self._run_starts.record_checkpoint_load(config, address, started_at, checkpoint)
        if checkpoint is not None and (marker := MESSAGE_MARKER.get()) is not None:
            marker.record_messages_in_loaded_checkpoint(checkpoint)
        return checkpoint

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Yield the checkpoints of a thread or of all threads.

        Each checkpoint is read from the database only when the iterator reaches it. The head of
        each namespace is yielded first, followed by the other checkpoints of the namespace, newest
        first. If `config` is None, the checkpoints of all threads are listed, thread by thread.

        Args:
            config: Names the thread and perhaps one `checkpoint_ns`. Without a namespace, all
                namespaces of the thread are listed. None means all threads.
            filter: Metadata values that must all match. Texts, numbers and booleans are indexed. A
                key with dots also names a value in a nested dict: `"user.access-level"`.
            before: List only checkpoints that were stored before this one. If the id belongs to
                another namespace, list the checkpoints whose ids sort before it. Ids sort by time.
            limit: The maximum number of checkpoints.
        """
        max_count = None if limit is None else max(limit, 0)
        for address, row_key in islice(
            self._listing.iter_addresses_and_row_keys(config, filter, before), max_count
        ):
            checkpoint = self._read(partial(self._reader.read_tuple, address, row_key))
            # A concurrent prune may have deleted the checkpoint after the listing found it.
            if checkpoint is not None:
                yield checkpoint

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """See `list`."""
        checkpoints = self.list(config, filter=filter, before=before, limit=limit)
        while (
            checkpoint := await self.database.run_in_thread(lambda: next(checkpoints, None))
        ) is not None:
            yield checkpoint

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Return the last stored value of each `DeltaChannel` and all later writes to it."""
        address = parse_checkpoint_address(config)
        history = self._read(lambda: self._reader.read_delta_channel_history(address, channels))
        if (marker := MESSAGE_MARKER.get()) is not None:
            for entry in history.values():
                written = [value for _, _, value in entry["writes"]]
                marker.record_messages_in_loaded_values(address, [entry.get("seed"), *written])
        return history

    aget_delta_channel_history = make_async_twin(get_delta_channel_history)

    # -- writing

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint. Once `put` has returned, the checkpoint survives a crash.

        The config names the parent. The checkpoint becomes the head of its namespace if its parent
        is the current head, or if it is the first checkpoint that a run stores. A run either starts
        with an input, an update or a fork, or resumes from a checkpoint loaded by id. If a run
        stores a checkpoint after a later run of the same thread has started, the checkpoint becomes
        a branch instead of the head. A channel that is not in `new_versions` keeps its value from
        the parent checkpoint. If the value of a channel is a list or dict, only the items that are
        not stored yet are written.

        The new checkpoint's metadata inherits `user_id` and `owner` from the parent checkpoint.
        `user_id` and `owner` are not inherited if the run's config or context sets one of them to
        another user, to `""` or to None.

        Returns:
            The config that names the new checkpoint.

        Raises:
            InvalidConfig: The config has no usable thread_id, or the checkpoint has no usable id.
            Unstorable: A value cannot be stored; the message names the path to it.
            ThreadDeleted: The thread was deleted after the run had loaded its state.
        """
        put = self._build_put(config, checkpoint, metadata, new_versions)
        self._execute_write(put)
        return put.address.build_config(
            checkpoint["id"], config["configurable"].get(REMOVALS_KEY, 0)
        )

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """See `put`."""
        put = self._build_put(config, checkpoint, metadata, new_versions)
        await self._execute_write_without_blocking_event_loop(
            put, checkpoint["channel_values"].values()
        )
        return put.address.build_config(
            checkpoint["id"], config["configurable"].get(REMOVALS_KEY, 0)
        )

    def _build_put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> CheckpointPut:
        """Validate the arguments of `put`, and build the request that stores the checkpoint."""
        address = parse_checkpoint_address(config)
        # ASCII text never contains a lone surrogate, so skip the check to save time.
        if type(checkpoint["id"]) is not str or not checkpoint["id"].isascii():
            check_storable_text("the id of the checkpoint", checkpoint["id"])
        full_metadata = dict(get_checkpoint_metadata(config, metadata))
        if (marker := MESSAGE_MARKER.get()) is not None:
            checkpoint = marker.mark_messages_in_checkpoint(address, checkpoint)
            full_metadata |= marker.build_metadata(address)
        label_names = self._labels.get(address.thread_id)
        if label_names and not address.checkpoint_ns:
            labels = find_labels_in_run_context(config, label_names)
            full_metadata |= {**labels, LABELS: sorted(labels)} if labels else {}
        # A run that read the parent by its id, and a caller that passes a `Continuation`,
        # deliberately continue from the parent.
        continues_chosen_checkpoint = self._read_by_id.pop(address, False) or (
            Continuation in map(type, checkpoint["channel_values"].values())
        )
        put = CheckpointPut(
            address,
            checkpoint,
            full_metadata,
            new_versions,
            continues_chosen_checkpoint,
            config=config,
        )
        # A put that comes from a subgraph or from outside a run has no start time of a run.
        runtime = None if address.checkpoint_ns else find_langgraph_runtime(config)
        if runtime is not None:
            self._run_starts.set_start_time_of_run_in_put(put, runtime)
        return put

    def copy_context_values_to_metadata(self, thread_id: str, value_names: Collection[str]) -> None:
        """Copy values of a run's context, such as `user_id`, into the metadata of its checkpoints.

        langgraph copies the `configurable` of a run into the metadata, but not its `context`, which
        may contain secrets. Memory nodes call this method with the names of the context values that
        they have read. When the next checkpoint of the root graph is stored, the values listed in
        `value_names` are copied from the run's context into the checkpoint's metadata. A context
        value is copied only if it is a string of at most 4,096 characters. A value from the context
        overrides a value with the same name from `configurable`. Later checkpoints inherit values
        copied from the context, unless a later run's context overrides the values.

        Args:
            thread_id: The thread.
            value_names: The names of values in the context.

        Raises:
            InvalidConfig: The thread_id is not valid.
        """
        thread_id = check_thread_id(thread_id)
        former_names = self._labels.get(thread_id, set())
        if not former_names.issuperset(value_names):
            drop_oldest_entries(self._labels, _MAX_REMEMBERED)
            self._labels[thread_id] = former_names | {*value_names}

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Store a task's pending writes with the checkpoint from which the task was started.

        The first writes of a task are kept. A write to a special channel, such as an error or an
        interrupt, replaces the task's earlier write to the same channel.

        Raises:
            InvalidConfig: The config has no thread_id or no checkpoint_id, or the id or path of the
                task is not text.
            Unstorable: A value cannot be stored; the message names the path to it.
            ThreadDeleted: The thread was deleted after the run had loaded its state.
        """
        self._execute_write(self._build_task_writes(config, writes, task_id, task_path))

    async def aput_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """See `put_writes`."""
        request = self._build_task_writes(config, writes, task_id, task_path)
        await self._execute_write_without_blocking_event_loop(request, map(itemgetter(1), writes))

    def _build_task_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str,
    ) -> TaskWrites:
        """Validate the arguments of `put_writes`, and build the request that stores the writes."""
        address = parse_checkpoint_address(config)
        # ASCII text never contains a lone surrogate, so skip the checks to save time.
        if not (type(task_id) is type(task_path) is str and (task_id + task_path).isascii()):
            check_storable_text("task_id", task_id)
            check_storable_text("task_path", task_path)
        if address.checkpoint_id is None:
            raise InvalidConfig(
                f"the config passed to put_writes() for thread {address.thread_id!r} has no "
                "checkpoint_id; pass the config that put() returned"
            )
        if (marker := MESSAGE_MARKER.get()) is not None:
            writes = marker.mark_messages_in_writes(address, writes)
        continues_chosen_checkpoint = address in self._read_by_id
        return TaskWrites(
            address,
            task_id,
            task_path,
            writes,
            continues_chosen_checkpoint=continues_chosen_checkpoint,
            config=config,
        )

    def get_next_version(self, current: Any, channel: None) -> Any:
        """Return the next version of a channel.

        Versions are integers. If the current version is a str, it was created by another
        checkpointer, and the next version is a str in the same format.
        """
        if current is None:
            return 1
        if isinstance(current, str):
            return f"{int(current.split('.')[0]) + 1:032}.{random.random():016}"
        return current + 1

    # -- running flows

    def _read(self, make_flow: Callable[[], Flow[T]]) -> T:
        """Execute a read-only flow on the database while Python's garbage collector is paused."""
        with collector_paused():
            return self.database.read(make_flow)

    def _execute_write(self, request: CheckpointPut | TaskWrites) -> None:
        """Execute a write request, and register it as a write in progress of the current run."""
        run_writes = RUN_WRITES.get()
        with _NO_RUN if run_writes is None else run_writes.register_write_in_progress():
            database_write = self._writer.plan_database_write(request)
            if run_writes is not None:
                database_write = database_write._replace(
                    make_flow=run_writes.make_flow_fail_after_run_end(database_write.make_flow)
                )
            self.database.write(*database_write)

    async def _execute_write_without_blocking_event_loop(
        self, request: CheckpointPut | TaskWrites, values: Iterable[Any]
    ) -> None:
        """Execute a write request without blocking the event loop.

        Args:
            request: The request.
            values: The values that the request stores. If the lists and dicts among them have more
                than `OFF_LOOP_ITEMS` elements, the values are encoded in a worker thread.
        """
        element_count = 0
        # A loop is used because a generator expression is slower, and this method is called for
        # every write.
        for value in values:
            if type(value) is list or type(value) is dict:
                element_count += len(value)
        run_writes = RUN_WRITES.get()
        with _NO_RUN if run_writes is None else run_writes.register_write_in_progress():
            if element_count <= OFF_LOOP_ITEMS:
                database_write = self._writer.plan_database_write(request)
            else:
                database_write = await self.database.run_in_thread(
                    lambda: self._writer.plan_database_write(request)
                )
            if run_writes is not None:
                database_write = database_write._replace(
                    make_flow=run_writes.make_flow_fail_after_run_end(database_write.make_flow)
                )
            # A resumed run starts its nodes only after the answer to the interrupt has been
            # committed. To shorten this wait, let the interpreter switch between OS threads more
            # often.
            if isinstance(request, TaskWrites) and request.task_id == NULL_TASK:
                with use_short_switch_interval():
                    await self.database.awrite(*database_write)
            else:
                await self.database.awrite(*database_write)


def choose_serializer(
    key: bytes | str | None,
    serde: SerializerProtocol | None,
    allow: Sequence[type | tuple[str, str]],
    strict: bool,
    types: Sequence[StoredType[Any]] = (),
    aliases: Aliases = (),
) -> tuple[SerializerProtocol, Seal, StoredTypes]:
    """Choose the serializer, encryption and stored types based on the options passed to `open`."""
    seal, stored_types = build_encryption_or_checksum_seal(key), StoredTypes(types, aliases)
    if serde is None:
        names = [get_module_and_class_name(t) if isinstance(t, type) else t for t in allow]
        names += [
            *map(get_module_and_class_name, stored_types.classes),
            *([] if strict else [Allowlist.LOADED]),
        ]
        serde = JsonPlusSerializer(allowed_msgpack_modules=names or None)
    plain_serde = serde.serde if isinstance(serde, EncryptedSerializer) else serde
    if stored_types.is_used and type(plain_serde) is not JsonPlusSerializer:
        raise ConfigurationError(
            f"types= and aliases= require langgraph's JsonPlusSerializer, but serde= is "
            f"{serde!r:.80}; omit serde=, or omit types= and aliases="
        )
    if not isinstance(serde, EncryptedSerializer):
        return serde, seal, stored_types
    if not isinstance(seal, ChecksumSeal):
        raise ConfigurationError(
            "both a key and an EncryptedSerializer are set; use only one of them. Prefer the key "
            "(key= or PERDURE_KEY), because perdure can then also detect that a stored value was "
            "moved to another row"
        )
    # Do not encrypt single values with the EncryptedSerializer, because equal values would be
    # encrypted to different bytes, which cannot be compared. Instead, `LangGraphSeal` encrypts
    # whole rows with the cipher of the EncryptedSerializer.
    return serde.serde, LangGraphSeal(serde.cipher), stored_types
