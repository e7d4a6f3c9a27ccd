"""Store removal records, which identify erased messages and deleted checkpoints by keyed hashes.

A run that loaded its state before an erasure still holds the erased messages in memory, and would
store them again with its next checkpoint. So that erased messages are not stored again, each
erasure of messages and each deletion of a thread adds a removal record to the `removals` table.
Each removal record has a sequence number, which is counted separately for each thread id. The
thread's row contains the sequence number of the latest removal. When a run loads a checkpoint,
`get_tuple` stores the number of the latest removal in the config, under the key `REMOVALS_KEY`.
langgraph passes the config from `get_tuple` to the checkpointer when the run stores a checkpoint.

A request to store a checkpoint is stale if messages were removed from the thread after the run
loaded its state. A stale request is detected because the removal number that its run loaded is
lower than the number in the thread's row. Rolling back a run adds a removal record without changing
the thread's row, so requests of other runs do not become stale. Before a stale request is executed,
the `stale_puts` module removes erased messages from it. If the thread was deleted, `stale_puts`
rejects the request.

A removal record contains no text and no thread id, only BLAKE2b hashes (RFC 7693). Each database
has its own random key for the hashes in removal records. This hash key is stored in the `settings`
table. If the database is encrypted, the hash key is encrypted, too.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from langchain_core.runnables import RunnableConfig

from perdure.checkpointers.address import REMOVALS_KEY, find_langgraph_runtime
from perdure.checkpointers.cache import drop_oldest_entries
from perdure.checkpointers.values import pack, unpack
from perdure.storage.encryption import AssociatedData, Seal
from perdure.storage.flow import Flow, NamedSQL

if TYPE_CHECKING:
    from perdure.checkpointers.put import CheckpointPut, TaskWrites

RECORD_RETENTION_DAYS: Final = 30
"""Number of days for which removal records are kept. Erasures and deletions drop older records."""
SUBSTRING_KINDS: Final = ("texts", "traces")
"""The kinds of texts that are also recognised inside a longer text.

The kinds are long texts from the content of messages, and texts from the descriptions of tasks.
"""
PREFIX_CHARS: Final = 16
"""Length, in characters, of the prefix that is hashed separately for texts of `SUBSTRING_KINDS`.

The prefix hash is used to find where such a text could start in a longer text. No text of these
kinds is shorter than the prefix.
"""
# Length in bytes of the random key with which texts in removal records are hashed.
_KEY_BYTES: Final = 32
# Length, in bytes, of the hashes of texts and checkpoint ids.
_HASH_BYTES: Final = 8
# Length, in bytes, of the hash of a thread id.
_THREAD_HASH_BYTES: Final = 16
# Maximum number of entries in `RemovalRecords.loaded`. When it is full, the oldest entry is
# dropped.
_MAX_RUNS: Final = 8192
_KEY_ASSOCIATED_DATA: Final = ("removal key",)


class RemovalRecord(NamedTuple):
    """A record of one erasure, deletion or rollback, with keyed hashes of the removed data.

    Attributes:
        checkpoints: The hashed ids of the checkpoints of a deleted thread. None for an erasure of
            messages and for a rollback.
        texts: The hashed ids and texts of the erased messages, by the kinds of `removal.Remover`.
            For a rollback, the hashed ids of the deleted checkpoints, under `_ROLLED_BACK`.
            For the kinds in `SUBSTRING_KINDS`, each element consists of the hash of the first
            characters, the hash of the text, and the length of the text.
    """

    checkpoints: frozenset[bytes] | None
    texts: Mapping[str, list[bytes]]


_ROLLED_BACK: Final = (
    # The key in a removal record for the hashed ids of checkpoints that a rollback deleted.
    "rolled back"
)


class RemovalNumberAtLoad(NamedTuple):
    """Identifies the newest removal record that existed when a run loaded the state of a thread.

    Attributes:
        number: The sequence number of the removal.
        is_from_local_run: Whether the request comes from a run in this process.
    """

    number: int
    is_from_local_run: bool


class RemovalRecords:
    """Reads and writes removal records, and hashes texts for comparison with the records.

    Attributes:
        key: The key of the hashes. None until the database is open, and in a database that was
            opened read-only and has no key.
        loaded: The sequence number of the latest removal that each run of this process found when
            it loaded a thread, by run and thread id. A run is identified by its `RunControl`, which
            langgraph also passes to the subgraphs of the run.
    """

    def __init__(self, sql: NamedSQL, seal: Seal) -> None:
        self.sql, self.seal = sql, seal
        self.key: bytes | None = None
        self.loaded: dict[tuple[object, str], int] = {}

    # -- the key

    def load_hash_key(self, *, read_only: bool = False) -> Flow[None]:
        """Read the key of the removal hashes.

        If the database has no hash key, create a random one, unless `read_only` is True.
        """
        rows = yield self.sql("removal_key")
        if not rows and not read_only:
            yield self.sql("add_removal_key", self._seal_key(secrets.token_bytes(_KEY_BYTES)))
            rows = yield self.sql("removal_key")
        if rows:
            self.key = self.seal.unseal(rows[0][0], _KEY_ASSOCIATED_DATA)

    def replace_key(self, key: bytes) -> Flow[None]:
        """Adopt the hash key of another database from which removal records were copied."""
        yield self.sql("set_removal_key", self._seal_key(key))
        self.key = key

    def _seal_key(self, key: bytes) -> bytes:
        """Encrypt the hash key of the removal records for storage in the `settings` table."""
        return self.seal.seal(key, _KEY_ASSOCIATED_DATA)

    # -- hashes

    def hash_thread_id(self, thread_id: str) -> bytes:
        """Return the hash of a thread id.

        The `removals` table stores the hash of a thread id instead of the id itself.
        """
        return self._hash_data("thread", thread_id, _THREAD_HASH_BYTES)

    def hash_text(self, kind: str, text: str) -> bytes:
        """Return the keyed hash of a text.

        The kind is part of the hashed data, so equal texts of different kinds have different
        hashes.
        """
        return self._hash_data(kind, text, _HASH_BYTES)

    def _hash_data(self, kind: str, text: str, size: int) -> bytes:
        """Return a keyed hash, `size` bytes long, of a text and its kind."""
        return hashlib.blake2b(
            f"{kind}\0{text}".encode(errors="surrogatepass"), digest_size=size, key=self.key or b""
        ).digest()

    def hash_texts(self, texts: Mapping[str, Iterable[str]]) -> dict[str, list[bytes]]:
        """Hash the texts of each kind.

        Return the hashes of each kind of text, in the format of `RemovalRecord.texts`.
        """
        hashes: dict[str, list[bytes]] = {}
        for kind, kind_texts in texts.items():
            hash_one = self._hash_with_prefix if kind in SUBSTRING_KINDS else self.hash_text
            hashes[kind] = sorted(map(partial(hash_one, kind), kind_texts))
        return hashes

    def _hash_with_prefix(self, kind: str, text: str) -> bytes:
        """Return the concatenation of a text's prefix hash, its full hash and its length."""
        start = self.hash_text("start", text[:PREFIX_CHARS])
        return start + self.hash_text(kind, text) + len(text).to_bytes(4)

    # -- records

    def read_newest_record_number(self, thread_id: str) -> Flow[int]:
        """Return the sequence number of a thread's latest removal record, or 0 if there is none."""
        ((number,),) = yield self.sql("last_removal", self.hash_thread_id(thread_id))
        return int(number or 0)

    def read_newest_removal_number(self, thread_id: str) -> Flow[int]:
        """Return the sequence number of the latest removal, as stored in a thread's row.

        If the thread does not exist, return the sequence number of its latest removal record, or 0
        if there is no such record.
        """
        for row in (yield self.sql("find_thread", thread_id)):
            return int(row[3])
        return (yield from self.read_newest_record_number(thread_id))

    def read_records_since(self, thread_id: str, after_number: int) -> Flow[list[RemovalRecord]]:
        """Return a thread's removal records whose numbers exceed `after_number`, lowest first."""
        thread = self.hash_thread_id(thread_id)
        rows = yield self.sql("removals_since", thread, after_number)
        records = []
        for record_number, body in rows:
            checkpoints, texts = unpack(
                self.seal.unseal(body, build_removal_record_associated_data(thread, record_number))
            )
            ids = None if checkpoints is None else frozenset(_split_hashes(checkpoints))
            records.append(RemovalRecord(ids, texts))
        return records

    def add_removal_record_and_get_number(
        self,
        thread_id: str,
        texts_by_kind: Mapping[str, Iterable[str]],
        deleted_checkpoint_ids: Iterable[str] | None,
    ) -> Flow[int]:
        """Add a removal record for the erasure of messages or the deletion of a thread.

        Removal records that are older than `RECORD_RETENTION_DAYS` days are dropped.

        Returns:
            The number of the record. If the thread is not deleted, the caller must store the number
            in the thread's row with the statement `note_removal`. The exception is a rollback.
        """
        thread, now = self.hash_thread_id(thread_id), time.time()
        last_number = yield from self.read_newest_record_number(thread_id)
        number: int = max(last_number, (yield from self.read_newest_removal_number(thread_id))) + 1
        hashes = None
        if deleted_checkpoint_ids is not None:
            hashes = b"".join(
                sorted({self.hash_text("checkpoint", uid) for uid in deleted_checkpoint_ids})
            )
        body = self.seal.seal(
            pack([hashes, self.hash_texts(texts_by_kind)]),
            build_removal_record_associated_data(thread, number),
        )
        yield [
            self.sql("drop_removals", now - RECORD_RETENTION_DAYS * 86400),
            self.sql("add_removal", thread, number, now, body),
        ]
        return number

    def add_rollback_record(self, thread_id: str, checkpoint_ids: Iterable[str]) -> Flow[None]:
        """Record that the checkpoints of a rolled-back run were removed and must not be imported.

        The rollback of a run does not affect other runs that have already loaded the run's
        messages. A run that has already loaded messages from the rolled-back run can store these
        messages again.
        """
        yield from self.add_removal_record_and_get_number(
            thread_id, {_ROLLED_BACK: checkpoint_ids}, None
        )

    def find_ids_of_rolled_back_checkpoints(
        self, thread_id: str, checkpoint_ids: Iterable[str]
    ) -> Flow[list[str]]:
        """Return the ids in `checkpoint_ids` whose checkpoints were deleted by a rollback."""
        records = yield from self.read_records_since(thread_id, 0)
        hashes = {digest for record in records for digest in record.texts.get(_ROLLED_BACK, ())}
        return [uid for uid in checkpoint_ids if self.hash_text(_ROLLED_BACK, uid) in hashes]

    def add_texts_to_newest_record(
        self, thread_id: str, texts_by_kind: Mapping[str, Iterable[str]]
    ) -> Flow[None]:
        """Add text hashes to a thread's latest removal record, skipping those it already has.

        Do nothing if the thread has no removal record.
        """
        thread, hashes = self.hash_thread_id(thread_id), self.hash_texts(texts_by_kind)
        number = yield from self.read_newest_record_number(thread_id)
        for _, body in (yield self.sql("removals_since", thread, number - 1)):
            associated_data = build_removal_record_associated_data(thread, number)
            checkpoints, stored_hashes = unpack(self.seal.unseal(body, associated_data))
            merged = {
                kind: sorted({*stored_hashes.get(kind, ()), *new_hashes})
                for kind, new_hashes in hashes.items()
            }
            if {**stored_hashes, **merged} != stored_hashes:
                sealed = self.seal.seal(
                    pack([checkpoints, {**stored_hashes, **merged}]), associated_data
                )
                yield self.sql("set_removal", sealed, thread, number)

    # -- runs

    def remember_newest_removal_number_for_run(
        self, config: RunnableConfig, thread_id: str, newest_removal_number: int
    ) -> None:
        """Remember which removal record was the latest when a run loaded its thread."""
        runtime = find_langgraph_runtime(config)
        control = find_run_control(runtime)
        if control is not None and runtime.execution_info is None:
            drop_oldest_entries(self.loaded, _MAX_RUNS)
            self.loaded[control, thread_id] = newest_removal_number

    def is_stale(self, request: CheckpointPut | TaskWrites, newest_removal: int) -> bool:
        """Return whether data was removed from the thread after a request's state was loaded.

        A request asks the checkpointer to store a checkpoint or pending writes. Before a run makes
        the request, the run loads the thread's state and computes the checkpoint or the pending
        writes from that state.

        Args:
            request: The checkpoint or the writes to store.
            newest_removal: The number of the newest removal record of the thread.
        """
        return (
            self.find_newest_removal_number_when_state_was_loaded(request).number < newest_removal
        )

    def find_newest_removal_number_when_state_was_loaded(
        self, request: CheckpointPut | TaskWrites
    ) -> RemovalNumberAtLoad:
        """Find the newest removal record that existed when a run loaded the state for a request.

        A request asks the checkpointer to store a checkpoint or pending writes. Before a run makes
        the request, the run loads the thread's state and computes the checkpoint or the pending
        writes from that state. A subgraph or a node can store data that it took from the state
        loaded at the start of the run. For a request from a subgraph or a node, the method returns
        the number of the removal record that was the newest when the run started. The result stays
        the same if the subgraph loads one of its own checkpoints after the start of the run.

        Returns:
            The number, and whether the request comes from a run in this process.
        """
        if request.config is None:
            return RemovalNumberAtLoad(request.loaded_removal, is_from_local_run=False)
        return self.find_newest_removal_number_when_config_was_loaded(
            request.config, request.address.thread_id
        )

    def find_newest_removal_number_when_config_was_loaded(
        self, config: RunnableConfig, thread_id: str
    ) -> RemovalNumberAtLoad:
        """Find the newest removal record that existed when a run loaded the state of its thread.

        See `find_newest_removal_number_when_state_was_loaded`.
        """
        config_number = config.get("configurable", {}).get(REMOVALS_KEY)
        number, runtime = (
            config_number if type(config_number) is int else 0,
            find_langgraph_runtime(config),
        )
        if runtime is None:
            return RemovalNumberAtLoad(number, is_from_local_run=False)
        number = number if runtime.execution_info is None else 0
        number = self.loaded.get((find_run_control(runtime), thread_id), number)
        return RemovalNumberAtLoad(number, is_from_local_run=True)


def build_removal_record_associated_data(thread: bytes, number: int) -> AssociatedData:
    """Return the associated data that binds an encrypted removal record to its row."""
    return "removal", thread.hex(), number


def split_into_prefix_hash_text_hash_and_length(removal_element: bytes) -> tuple[bytes, bytes, int]:
    """Split an element of a removal record into its prefix hash, text hash and text length.

    The prefix hash covers the first `PREFIX_CHARS` characters of the text. Call this function only
    for elements of the kinds in `SUBSTRING_KINDS`. An element of any other kind consists of one
    hash and cannot be split.
    """
    start, whole, length = (
        removal_element[:_HASH_BYTES],
        removal_element[_HASH_BYTES:-4],
        removal_element[-4:],
    )
    return start, whole, int.from_bytes(length)


def _split_hashes(data: bytes) -> Iterable[bytes]:
    """Split concatenated hashes."""
    return (data[start : start + _HASH_BYTES] for start in range(0, len(data), _HASH_BYTES))


def find_run_control(runtime: Any) -> object | None:
    """Return a runtime's `RunControl`, which identifies the run, or None if there is none."""
    return getattr(runtime, "control", None)
