"""The saver: langgraph's `BaseCheckpointSaver` over perdure's log, sync and async.

This is the part of langgraph's contract that a run asks for: checkpoints and what tasks wrote are
read and put. `writer` plans what to store, `reader` reads it, `listing` finds it; they know no
driver. Reads run in the calling thread, writes in the database's writer; an `a` form does the same
in another thread.
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
    check_text,
    check_thread_id,
    parse_address,
)
from perdure.checkpointers.cache import Cache
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.collector import collector_paused
from perdure.checkpointers.labels import LABELS, context_labels
from perdure.checkpointers.listing import Listing
from perdure.checkpointers.objects import name_of
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
from perdure.storage.database import Database, DatabaseOwner, Watch, make_async_twin
from perdure.storage.encryption import ChecksumSeal, LangGraphSeal, Seal, bind_seal, build_seal
from perdure.storage.flow import Flow, NamedSQL
from perdure.storage.switching import short_switch_interval

T = TypeVar("T")
OFF_LOOP_ITEMS: Final = 512  # longer lists are compared in a thread, not on the event loop
_NO_RUN: Final = nullcontext()  # around the writes of runs that nobody counts
_MAX_REMEMBERED: Final = 1024  # checkpoints read by their id, threads with labels: not put upon yet


class CheckpointSaver(DatabaseOwner, BaseCheckpointSaver[Any]):
    """A saver over a database, which it closes.

    Args:
        database: The database.
        sql: The statements in its dialect, by name.
        serde: The serializer.
        seal: Encrypts rows.
        cache_bytes: About how much memory decoded items may take.
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
        self._read_by_id: dict[Address, bool] = {}
        self._labels: dict[str, set[str]] = {}
        self._overlapped = OrderedDict[str, None]()
        self._create_parts()

    def _create_parts(self) -> None:
        """Make the parts, for the serializer as it is."""
        self._codec = Codec(self.serde, self.types)
        self._cache = Cache(self._cache_bytes, self._overlapped)
        parts = self._sql, self._seal, self._cache, self._codec, self._removals
        self._reader = CheckpointReader(*parts)
        self._watch = Watch()
        self._writer = CheckpointWriter(self._reader, self._watch)
        self._listing = Listing(self._reader, self.database)

    def _load_keys(self) -> Flow[None]:
        """Check the encryption key of the database, and read the key of its removal records."""
        database, read_only = self.database, self.database.read_only
        yield from bind_seal(self._seal, database.path, database.tenant, read_only=read_only)
        yield from self._removals.load_key(read_only=read_only)

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> Self:
        """The same checkpointer, which may also rebuild these types; closing one closes both."""
        clone = super().with_allowlist(extra_allowlist)
        assert isinstance(clone, type(self))
        if clone is not self:
            clone._create_parts()
        return clone

    # -- reading

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint that a config names, or the head of its thread and namespace.

        Raises:
            InvalidConfig: The config has no usable thread_id.
            CorruptRecord: A stored row is damaged or was tampered with.
        """
        at, began = parse_address(config), time.time()
        epoch = self.database.epoch(self._watch) if self._reader.is_head_cached(at) else None
        checkpoint = self._find_cached_tuple(at, epoch) or self._read(
            lambda: self._read_tuple(at, config)
        )
        if checkpoint is not None and REMOVALS_KEY in checkpoint.config["configurable"]:
            self._note_loaded_removal(config, checkpoint)
        self._run_starts.note_load(config, at, began, checkpoint)
        return checkpoint

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """See `get_tuple`."""
        at, began = parse_address(config), time.time()
        if self._reader.is_head_cached(at, OFF_LOOP_ITEMS):
            epoch = self.database.epoch(self._watch)
            if epoch is None:
                epoch = await self.database.wait_for_epoch(self._watch)
            checkpoint = self._find_cached_tuple(at, epoch)
        else:
            checkpoint = None
        if checkpoint is None:
            checkpoint = await self.database.run_in_thread(
                lambda: self._read(lambda: self._read_tuple(at, config))
            )
        if checkpoint is not None and REMOVALS_KEY in checkpoint.config["configurable"]:
            self._note_loaded_removal(config, checkpoint)
        self._run_starts.note_load(config, at, began, checkpoint)
        return checkpoint

    def _find_cached_tuple(self, at: Address, epoch: object | None) -> CheckpointTuple | None:
        """The head as this process keeps it, if nobody else has written since."""
        if epoch is None:
            return None
        with collector_paused():
            return self._reader.cached_tuple(at, epoch)

    def _read_tuple(self, at: Address, config: RunnableConfig) -> Flow[CheckpointTuple | None]:
        """Read a checkpoint, and remember if it was asked for by its id and is not the head.

        What is put upon it goes on from there on purpose.
        """
        checkpoint = yield from self._reader.read_tuple(at)
        if checkpoint is None and not at.checkpoint_ns and self._removals.key is not None:
            number = yield from self._removals.read_newest_number(at.thread_id)
            if number:
                self._removals.note_load(config, at.thread_id, number)
        if checkpoint is None or at.checkpoint_id is None:
            return checkpoint
        if not (yield from self._reader.is_head(at)):
            _remember_recent(self._read_by_id, at, True)
        return checkpoint

    def _note_loaded_removal(self, config: RunnableConfig, checkpoint: CheckpointTuple) -> None:
        """Remember the removal number of a loaded checkpoint for its run; see `RemovalRecords`."""
        of: Any = checkpoint.config["configurable"]
        self._removals.note_load(config, of["thread_id"], of[REMOVALS_KEY])

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Checkpoints, the last put first, each read as it is asked for.

        The head of a namespace comes first; without a thread, they come thread by thread.

        Args:
            config: The thread; without a `checkpoint_ns`, all its namespaces; None: all threads.
            filter: Metadata values to match, all of them. Indexed for text, numbers and booleans.
                A key with dots also names a value within a dict: `"user.access-level"`.
            before: Only those put before this checkpoint; an id of another namespace is compared
                with the ids, which sort by time.
            limit: At most so many.
        """
        many = None if limit is None else max(limit, 0)
        for at, key in islice(self._listing.addresses(config, filter, before), many):
            checkpoint = self._read(partial(self._reader.read_tuple, at, key))
            if checkpoint is not None:  # it may have been pruned since
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
        listed = self.list(config, filter=filter, before=before, limit=limit)
        while (item := await self.database.run_in_thread(lambda: next(listed, None))) is not None:
            yield item

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """The writes of each channel up to a checkpoint, and the value before them."""
        return self._read(lambda: self._reader.read_delta_history(parse_address(config), channels))

    aget_delta_channel_history = make_async_twin(get_delta_channel_history)

    # -- writing

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint upon the one that the config names; then a crash cannot lose it.

        It becomes the head of its thread and namespace if its parent is the head, or if it begins a
        run: by an input, an update, a fork, or a resume from a checkpoint that was read by its id.
        If a later run has begun meanwhile, it becomes a branch. Channels that `new_versions` does
        not name are those of the parent. Lists and dicts cost only what is new in them.

        The metadata inherits `user_id` and `owner` from the parent. It inherits neither if the
        config or the context of the run names another user, or sets a name to `""` or None.

        Returns:
            The address of the checkpoint.

        Raises:
            InvalidConfig: The config has no usable thread_id, or the checkpoint no usable id.
            Unstorable: A value cannot be stored; the message names the path to it.
            ThreadDeleted: The thread was deleted after the run had loaded its state.
        """
        put = self._build_put(config, checkpoint, metadata, new_versions)
        self._write(put)
        return put.address.config(checkpoint["id"], config["configurable"].get(REMOVALS_KEY, 0))

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """See `put`."""
        put = self._build_put(config, checkpoint, metadata, new_versions)
        await self._awrite(put, _count_items(checkpoint["channel_values"].values()))
        return put.address.config(checkpoint["id"], config["configurable"].get(REMOVALS_KEY, 0))

    def _build_put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> CheckpointPut:
        at = parse_address(config)
        check_text("the id of the checkpoint", checkpoint["id"])
        whole = dict(get_checkpoint_metadata(config, metadata))
        names = self._labels.get(at.thread_id)
        if names and not at.checkpoint_ns:
            labels = context_labels(config, names)
            whole |= {**labels, LABELS: sorted(labels)} if labels else {}
        deliberate = self._read_by_id.pop(at, False)
        values = checkpoint["channel_values"].values()
        deliberate = deliberate or any(type(value) is Continuation for value in values)
        put = CheckpointPut(at, checkpoint, whole, new_versions, deliberate, config=config)
        self._run_starts.set_run_start(put)
        return put

    def label(self, thread_id: str, names: Collection[str]) -> None:
        """Write values of a run's context, like `user_id`, into the metadata of its checkpoints.

        langgraph copies a run's `configurable` to them, and nothing of its `context`, which may
        hold secrets; memory nodes name here what they read of it. From the next checkpoint of the
        root graph on, texts of these names (of 4,096 characters at most, as of a namespace) are in
        its metadata and replace the values from `configurable`. Later checkpoints inherit them,
        unless the context of their run has other values.

        Raises:
            InvalidConfig: The thread_id is not valid.
        """
        thread_id = check_thread_id(thread_id)
        before = self._labels.get(thread_id, set())
        if not before.issuperset(names):
            _remember_recent(self._labels, thread_id, before | {*names})

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Store the writes of a task with the checkpoint from which it ran.

        A task's writes are stored once; errors, interrupts and the like replace earlier ones.

        Raises:
            InvalidConfig: The config has no thread_id or no checkpoint_id, or the task no text as
                its id or path.
            Unstorable: A value cannot be stored; the message names the path to it.
            ThreadDeleted: The thread was deleted after the run had loaded its state.
        """
        self._write(self._build_task_writes(config, writes, task_id, task_path))

    async def aput_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """See `put_writes`."""
        written = self._build_task_writes(config, writes, task_id, task_path)
        await self._awrite(written, _count_items(map(itemgetter(1), writes)))

    def _build_task_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, path: str
    ) -> TaskWrites:
        at = parse_address(config)
        check_text("task_id", task_id)
        check_text("task_path", path)
        if at.checkpoint_id is None:
            raise InvalidConfig(
                f"writes for thread {at.thread_id!r} name no checkpoint_id; pass the config that "
                "put() returned"
            )
        deliberate = at in self._read_by_id
        return TaskWrites(at, task_id, path, writes, is_deliberate=deliberate, config=config)

    def get_next_version(self, current: Any, channel: None) -> Any:
        """The next version of a channel: a whole number, or in another saver's form."""
        if current is None:
            return 1
        if isinstance(current, str):
            return f"{int(current.split('.')[0]) + 1:032}.{random.random():016}"
        return current + 1

    # -- running flows

    def _read(self, make: Callable[[], Flow[T]]) -> T:
        with collector_paused():
            return self.database.read(make)

    def _write(self, put: CheckpointPut | TaskWrites) -> None:
        writes = RUN_WRITES.get()
        with _NO_RUN if writes is None else writes.count_write():
            job = self._writer.plan_database_write(put)
            if writes is not None:
                job = job._replace(make=writes.refuse_when_closed(job.make))
            self.database.write(*job)

    async def _awrite(self, put: CheckpointPut | TaskWrites, items: int) -> None:
        writes = RUN_WRITES.get()
        with _NO_RUN if writes is None else writes.count_write():
            if items <= OFF_LOOP_ITEMS:
                job = self._writer.plan_database_write(put)
            else:
                job = await self.database.run_in_thread(
                    lambda: self._writer.plan_database_write(put)
                )
            if writes is not None:
                job = job._replace(make=writes.refuse_when_closed(job.make))
            if isinstance(put, TaskWrites) and put.task_id == NULL_TASK:
                with short_switch_interval():
                    await self.database.awrite(*job)
            else:
                await self.database.awrite(*job)


def choose_serializer(
    key: bytes | str | None,
    serde: SerializerProtocol | None,
    allow: Sequence[type | tuple[str, str]],
    strict: bool,
    types: Sequence[StoredType[Any]] = (),
    aliases: Aliases = (),
) -> tuple[SerializerProtocol, Seal, StoredTypes]:
    """Return the serializer, the encryption and the stored types for the options of `open`."""
    seal, known = build_seal(key), StoredTypes(types, aliases)
    if serde is None:
        names = [name_of(t) if isinstance(t, type) else t for t in allow]
        names += [*map(name_of, known.classes), *([] if strict else [Allowlist.LOADED])]
        serde = JsonPlusSerializer(allowed_msgpack_modules=names or None)
    plain = serde.serde if isinstance(serde, EncryptedSerializer) else serde
    if known.is_used and type(plain) is not JsonPlusSerializer:
        raise ConfigurationError(
            f"types= and aliases= require langgraph's JsonPlusSerializer, but serde= is "
            f"{serde!r:.80}; omit serde=, or store your types with your serializer instead"
        )
    if not isinstance(serde, EncryptedSerializer):
        return serde, seal, known
    if not isinstance(seal, ChecksumSeal):
        raise ConfigurationError(
            "both a key and an EncryptedSerializer are given; take one of them: key= (or "
            "PERDURE_KEY) also binds each row to its place"
        )
    # its ciphertext differs each time; what is compared is the plain text within
    return serde.serde, LangGraphSeal(serde.cipher), known


def _remember_recent(kept: dict[Any, Any], key: Any, value: Any) -> None:
    while len(kept) >= _MAX_REMEMBERED:
        kept.pop(next(iter(kept)), None)
    kept[key] = value


def _count_items(values: Iterable[Any]) -> int:
    items = 0
    for value in values:  # no generator: each write comes by
        if type(value) is list or type(value) is dict:
            items += len(value)
    return items
