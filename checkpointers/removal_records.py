"""Removal records: keyed hashes of what was erased from a thread, or of its deleted checkpoints.

A run that loaded its state before an erasure still holds the erased messages, and would store them
again with its next checkpoint. Each erasure and each deletion of a thread therefore leaves a row in
the table `removals`, with the next number of that thread id. `get_tuple` tells a run the newest
number in the config of the checkpoint, under `MARKER`, and langgraph passes this config to each put
of the run. A put whose number is below the newest one is stale: `stale_puts` leaves the erased
messages out of it, or refuses it if the thread was deleted.

The records contain no text and no thread id, only BLAKE2b hashes (RFC 7693). Their key is random,
one for each database, and is stored in the table `settings`, encrypted if the database is.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from langchain_core.runnables import RunnableConfig

from perdure.checkpointers.address import MARKER
from perdure.checkpointers.values import pack, unpack
from perdure.storage.encryption import Place, Seal
from perdure.storage.flow import Flow, NamedSQL

if TYPE_CHECKING:
    from perdure.checkpointers.put import CheckpointPut, TaskWrites

KEPT_DAYS: Final = 30
"""How long removal records are kept. Each later erasure and deletion drops those that are older."""
PARTS: Final = ("texts", "traces")
"""Kinds of texts that are also recognised as a part of a longer text."""
PART_START: Final = 16
"""How many first characters of such a text have a hash of their own; none is shorter."""
_KEY_BYTES: Final = 32
_HASH_BYTES: Final = 8
_THREAD_HASH_BYTES: Final = 16
_MAX_RUNS: Final = 8192  # runs that are remembered with the number of removals that they loaded
_KEY_PLACE: Final = ("removal key",)


class RemovalRecord(NamedTuple):
    """What one erasure or deletion removed from a thread, as keyed hashes.

    Attributes:
        checkpoints: The ids of the deleted checkpoints; None if only messages were erased.
        texts: Ids and texts of erased messages, by the kinds of `removal.Remover`. A hash of one of
            the `PARTS` stands with the hash of its first characters and its length.
    """

    checkpoints: frozenset[bytes] | None
    texts: Mapping[str, list[bytes]]


class RemovalRecords:
    """Reads and writes the removal records of a database, and hashes what is compared with them.

    Attributes:
        key: The key of the hashes; None until the database is open.
        loaded: For each run of this process that loaded a thread with removal records, the number
            of the newest one at that time. A run is known by its `RunControl`, which langgraph
            gives to the subgraphs of the run as well.
    """

    def __init__(self, sql: NamedSQL, seal: Seal) -> None:
        self.sql, self.seal = sql, seal
        self.key: bytes | None = None
        self.loaded: dict[tuple[object, str], int] = {}

    # -- the key

    def load_key(self, *, read_only: bool = False) -> Flow[None]:
        """Read the key of the hashes, and make it if the database has none."""
        rows = yield self.sql("removal_key")
        if not rows and not read_only:
            yield self.sql("add_removal_key", self._seal_key(secrets.token_bytes(_KEY_BYTES)))
            rows = yield self.sql("removal_key")
        if rows:
            self.key = self.seal.open(rows[0][0], _KEY_PLACE)

    def replace_key(self, key: bytes) -> Flow[None]:
        """Take over the key of another database, whose records were copied."""
        yield self.sql("set_removal_key", self._seal_key(key))
        self.key = key

    def _seal_key(self, key: bytes) -> bytes:
        return self.seal.seal(key, _KEY_PLACE)

    # -- hashes

    def hash_thread(self, thread_id: str) -> bytes:
        """Return the hash under which the records of a thread id are stored."""
        return self._hash_data("thread", thread_id, _THREAD_HASH_BYTES)

    def hash_text(self, kind: str, text: str) -> bytes:
        """Return the keyed hash of a text; equal texts of two kinds have different hashes."""
        return self._hash_data(kind, text, _HASH_BYTES)

    def _hash_data(self, kind: str, text: str, size: int) -> bytes:
        data = f"{kind}\0{text}".encode(errors="surrogatepass")
        return hashlib.blake2b(data, digest_size=size, key=self.key or b"").digest()

    def hash_texts(self, texts: Mapping[str, Iterable[str]]) -> dict[str, list[bytes]]:
        """Return the hashes of texts by kind, in the form of `RemovalRecord.texts`."""
        out: dict[str, list[bytes]] = {}
        for kind, some in texts.items():
            as_hash = self._hash_part if kind in PARTS else self.hash_text
            out[kind] = sorted(map(partial(as_hash, kind), some))
        return out

    def _hash_part(self, kind: str, text: str) -> bytes:
        start = self.hash_text("start", text[:PART_START])
        return start + self.hash_text(kind, text) + len(text).to_bytes(4)

    # -- records

    def last_number(self, thread_id: str) -> Flow[int]:
        """Return the number of the newest record of a thread id, or 0 if it has none."""
        ((number,),) = yield self.sql("last_removal", self.hash_thread(thread_id))
        return int(number or 0)

    def number_of(self, thread_id: str) -> Flow[int]:
        """Return how many removals a thread has had, also if their records were dropped."""
        for row in (yield self.sql("find_thread", thread_id)):
            return int(row[3])
        return (yield from self.last_number(thread_id))

    def read_since(self, thread_id: str, number: int) -> Flow[list[RemovalRecord]]:
        """Return the records of a thread id with a higher number, in order."""
        thread = self.hash_thread(thread_id)
        rows = yield self.sql("removals_since", thread, number)
        out = []
        for newer, body in rows:
            checkpoints, texts = unpack(self.seal.open(body, record_place(thread, newer)))
            ids = None if checkpoints is None else frozenset(_split_hashes(checkpoints))
            out.append(RemovalRecord(ids, texts))
        return out

    def add_record(
        self, thread_id: str, texts: Mapping[str, Iterable[str]], checkpoints: Iterable[str] | None
    ) -> Flow[int]:
        """Record an erasure of texts, or the deletion of a thread with its checkpoints.

        Records that are older than `KEPT_DAYS` are dropped.

        Returns:
            The number of the record. The thread's row, if it stays, is to be given it by
            `note_removal`.
        """
        thread, now = self.hash_thread(thread_id), time.time()
        last = yield from self.last_number(thread_id)
        number: int = max(last, (yield from self.number_of(thread_id))) + 1
        hashes = None
        if checkpoints is not None:
            hashes = b"".join(sorted({self.hash_text("checkpoint", uid) for uid in checkpoints}))
        body = self.seal.seal(pack([hashes, self.hash_texts(texts)]), record_place(thread, number))
        yield [
            self.sql("drop_removals", now - KEPT_DAYS * 86400),
            self.sql("add_removal", thread, number, now, body),
        ]
        return number

    def extend_record(self, thread_id: str, texts: Mapping[str, Iterable[str]]) -> Flow[None]:
        """Add texts to the newest record of a thread id, if it lacks some of them."""
        thread, hashes = self.hash_thread(thread_id), self.hash_texts(texts)
        number = yield from self.last_number(thread_id)
        for _, body in (yield self.sql("removals_since", thread, number - 1)):
            place = record_place(thread, number)
            checkpoints, hashed = unpack(self.seal.open(body, place))
            both = {kind: sorted({*hashed.get(kind, ()), *some}) for kind, some in hashes.items()}
            if {**hashed, **both} != hashed:
                sealed = self.seal.seal(pack([checkpoints, {**hashed, **both}]), place)
                yield self.sql("set_removal", sealed, thread, number)

    # -- runs

    def note_load(self, config: RunnableConfig, thread_id: str, number: int) -> None:
        """Note which removals the state has left out that a run begins with."""
        runtime = _runtime_of(config)
        control = _control_of(runtime)
        if control is not None and runtime.execution_info is None:
            while len(self.loaded) >= _MAX_RUNS:
                self.loaded.pop(next(iter(self.loaded)), None)
            self.loaded[control, thread_id] = number

    def is_stale(self, request: CheckpointPut | TaskWrites, removals: int) -> bool:
        """Return whether the state that a request comes from was loaded before the newest removal.

        Args:
            request: What is to be stored.
            removals: The number of the newest removal record of its thread.
        """
        return self.loaded_number(request)[0] < removals

    def loaded_number(self, request: CheckpointPut | TaskWrites) -> tuple[int, bool]:
        """Return the number of the newest removal that the state of a request leaves out.

        What a subgraph or a node stores comes from the state that its run began with, so there the
        number of the run counts, and not that of a checkpoint that the subgraph loaded later.

        Returns:
            The number, and whether the request comes from a run in this process.
        """
        if request.config is None:
            return request.removals, False
        return self.loaded_by(request.config, request.at.thread_id)

    def loaded_by(self, config: RunnableConfig, thread_id: str) -> tuple[int, bool]:
        """Return the same as `loaded_number` for the config of a run, a node or a tuple."""
        own = config.get("configurable", {}).get(MARKER)
        number, runtime = own if type(own) is int else 0, _runtime_of(config)
        if runtime is None:
            return number, False
        number = number if runtime.execution_info is None else 0
        return self.loaded.get((_control_of(runtime), thread_id), number), True


def record_place(thread: bytes, number: int) -> Place:
    """Return the data that binds a removal record to its row."""
    return "removal", thread.hex(), number


def split_part(part: bytes) -> tuple[bytes, bytes, int]:
    """Return the hash of the first characters of one of the `PARTS`, its hash, and its length."""
    start, whole, length = part[:_HASH_BYTES], part[_HASH_BYTES:-4], part[-4:]
    return start, whole, int.from_bytes(length)


def _split_hashes(data: bytes) -> Iterable[bytes]:
    return (data[start : start + _HASH_BYTES] for start in range(0, len(data), _HASH_BYTES))


def _runtime_of(config: RunnableConfig) -> Any:
    """Return langgraph's `Runtime` in the config of a run, or None in any other config.

    langgraph gives the config of the root graph to the saver before a task runs, so its runtime has
    no `execution_info`. What subgraphs and nodes ask for has it.
    """
    module: Any = sys.modules.get("langgraph.runtime")  # without it no graph runs
    for part in config.get("configurable", {}).values() if module else ():
        if isinstance(part, module.Runtime):
            return part
    return None


def _control_of(runtime: Any) -> object | None:
    return getattr(runtime, "control", None)
