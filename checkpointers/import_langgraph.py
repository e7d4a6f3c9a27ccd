"""Import of a database of langgraph-checkpoint-sqlite, a page of checkpoints at a time."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, cast

from langgraph.checkpoint.base import Checkpoint, CheckpointTuple
from langgraph.checkpoint.serde.base import SerializerProtocol

from perdure.checkpointers.address import Address
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.listing import Pages
from perdure.checkpointers.planner import PlannedPut, PlannedWrites, Planner
from perdure.checkpointers.reader import Reader
from perdure.checkpointers.records import span, unpack_id
from perdure.checkpointers.reports import ImportReport
from perdure.errors import CorruptRecord, ForbiddenType, ImportFailed, NotADatabase
from perdure.storage.flow import Flow, Row, Statement, rows_of
from perdure.storage.sqlite import SQLiteDatabase

_PAGE: Final = 64  # checkpoints
_COLUMNS: Final = "SELECT name FROM pragma_table_info(?)"
_THREADS: Final = (
    "SELECT DISTINCT thread_id FROM checkpoints WHERE thread_id > ? ORDER BY 1 LIMIT 256"
)
_ADDRESSES: Final = "SELECT checkpoint_ns, checkpoint_id FROM checkpoints WHERE thread_id = ?"
_CHECKPOINTS: Final = """
SELECT checkpoint_ns, checkpoint_id, parent_checkpoint_id, type, checkpoint, metadata
FROM checkpoints WHERE thread_id = ? AND (checkpoint_id, checkpoint_ns) > (?, ?)
ORDER BY checkpoint_id, checkpoint_ns LIMIT ?
"""
# the special ones, numbered below zero, come last: put_writes numbers the others from zero on
_WRITES: Final = """
SELECT task_id, {path}, channel, type, value FROM writes
WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ?
ORDER BY {path}, task_id, idx < 0, idx
"""


class Planned(NamedTuple):
    """A plan to be written."""

    make: Callable[[Planner], PlannedPut | PlannedWrites]
    thread_id: str


class TaskWrites(NamedTuple):
    """The writes of one task."""

    task_id: str
    path: str
    writes: list[tuple[str, Any]]

    def put(self, at: Address, planner: Planner) -> PlannedWrites:
        """Plan to store it."""
        return planner.writes(at, self.writes, self.task_id, self.path)


class Record(NamedTuple):
    """A checkpoint of the source; `parent` is the address it is put upon."""

    parent: Address
    checkpoint: dict[str, Any]
    metadata: dict[str, Any]
    tasks: list[TaskWrites]

    @property
    def at(self) -> Address:
        """Its own address."""
        return self.parent._replace(checkpoint_id=self.checkpoint["id"])

    def put(self, planner: Planner) -> PlannedPut:
        """Plan to store it, its writes apart."""
        checkpoint = cast(Checkpoint, self.checkpoint)
        versions = checkpoint["channel_versions"]
        return planner.checkpoint(self.parent, checkpoint, self.metadata, versions)

    def is_same(self, found: CheckpointTuple | None, serde: SerializerProtocol) -> bool:
        """Whether what is stored is what the source holds, value for value, writes apart."""
        if found is None:
            return False
        config = found.parent_config
        parent = config["configurable"]["checkpoint_id"] if config else None
        stored = [parent, found.checkpoint, found.metadata]
        return _equal(stored, [self.parent.checkpoint_id, self.checkpoint, self.metadata], serde)

    def lacking(self, found: CheckpointTuple, serde: SerializerProtocol) -> list[TaskWrites]:
        """The tasks whose writes are not all stored; there may be others since."""
        stored = [[*write] for write in found.pending_writes or []]
        return [
            task
            for task in self.tasks
            if not all(
                any(_equal(write, [task.task_id, *given], serde) for write in stored)
                for given in task.writes
            )
        ]


class Importer:
    """Takes over threads with all their namespaces, checkpoints and writes, under their ids.

    Args:
        path: The file that langgraph-checkpoint-sqlite wrote.
        codec: Reads its values.
        reader: Reads what is here.
    """

    def __init__(self, path: str | os.PathLike[str], codec: Codec, reader: Reader) -> None:
        self.source = SQLiteDatabase(path, None, read_only=True)
        self.path, self.codec, self.reader = self.source.path, codec, reader
        self.serde = reader.codec.serde
        self._done: Counter[str] = Counter()

    @property
    def report(self) -> ImportReport:
        """The counts so far."""
        return ImportReport(**self._done)

    def records(self) -> Pages:
        """The content of the file: for each thread all ids, then each `Record`."""
        writes = yield self._check_tables()
        last = ""
        while rows := (yield rows_of(_THREADS, last)):
            for (thread_id,) in rows:
                yield thread_id, set((yield rows_of(_ADDRESSES, thread_id)))
                yield from self._records(thread_id, writes)
            last = rows[-1][0]

    def take(self, found: Record | tuple[str, set[Row]]) -> Pages:
        """Compare what the file holds with what is here, and yield what is `Planned`."""
        if isinstance(found, Record):
            yield from self._take(found)
        else:
            yield self._check_unforked(*found)
            self._done["threads"] += 1

    def _check_tables(self) -> Flow[str]:
        """The statement that reads writes; files from before langgraph had task paths lack them."""
        columns = {}
        for table in ("checkpoints", "writes"):
            columns[table] = {name for (name,) in (yield Statement(_COLUMNS, (table,)))}
        if not (
            {"parent_checkpoint_id", "type", "metadata"} <= columns["checkpoints"]
            and {"task_id", "idx", "type"} <= columns["writes"]
        ):
            raise NotADatabase(
                f"{self.path!r} has no tables of langgraph-checkpoint-sqlite; expected a file "
                "that its SqliteSaver or AsyncSqliteSaver wrote"
            )
        return _WRITES.format(path="task_path" if "task_path" in columns["writes"] else "''")

    def _check_unforked(self, thread_id: str, there: set[Row]) -> Flow[None]:
        """Refuse a thread that has checkpoints here that the source lacks, and the reverse."""
        sql, here = self.reader.sql, set()
        for thread, _, _ in (yield sql("find_thread", thread_id)):
            for namespace, ns, _ in (yield sql("thread_namespaces", thread)):
                rows = yield sql("checkpoint_keys", *span(namespace))
                here |= {(ns, unpack_id(uid)) for _, uid, _ in rows}
        if here - there and there - here:
            raise ImportFailed(
                f"thread {thread_id!r} has {len(here - there)} checkpoints here that "
                f"{self.path!r} lacks, and {len(there - here)} there that are not here; "
                "import into a new file, or delete the thread here first"
            )

    def _records(self, thread_id: str, writes: str) -> Pages:
        """The checkpoints of a thread, oldest first: their ids sort by time."""
        last = ("", "")
        while rows := (yield rows_of(_CHECKPOINTS, thread_id, *last, _PAGE)):
            for ns, uid, parent, name, blob, metadata in rows:
                where = f"{self.path!r}, thread {thread_id!r}, checkpoint {uid!r}"
                tasks: dict[str, TaskWrites] = {}
                found = yield rows_of(writes, thread_id, ns, uid)
                for task, path, channel, kind, value in found:
                    of_task = tasks.setdefault(task, TaskWrites(task, path, []))
                    of_task.writes.append((channel, self._load(where, kind, value)))
                checkpoint = {**self._load(where, name, blob), "id": uid}
                known = json.loads(metadata) if metadata is not None else {}
                at = Address(thread_id, ns, parent or None)
                yield Record(at, checkpoint, known, list(tasks.values()))
            last = rows[-1][1], rows[-1][0]

    def _load(self, where: str, name: str, data: bytes) -> Any:
        try:
            return self.codec.load(name, data)
        except (ForbiddenType, CorruptRecord) as exc:
            raise type(exc)(f"{where}: {exc}") from exc

    def _take(self, record: Record) -> Pages:
        thread_id = record.at.thread_id
        found = yield self.reader.get(record.at)
        new = found is None
        if new:
            yield Planned(record.put, thread_id)
        elif not record.is_same(found, self.serde):
            raise self._differs(record, "is another one here")
        tasks = record.tasks if new else record.lacking(found, self.serde)
        for task in tasks:
            yield Planned(partial(task.put, record.at), thread_id)
        if new or tasks:
            found = yield self.reader.get(record.at)
        if not record.is_same(found, self.serde) or record.lacking(found, self.serde):
            raise self._differs(record, "is not the same when read back")
        self._done["checkpoints" if new else "skipped"] += 1
        self._done["writes"] += sum(len(task.writes) for task in tasks)

    def _differs(self, record: Record, how: str) -> ImportFailed:
        return ImportFailed(
            f"{self.path!r}, thread {record.at.thread_id!r}: checkpoint "
            f"{record.at.checkpoint_id!r} {how}"
        )


def _equal(one: Any, other: Any, serde: SerializerProtocol) -> bool:
    # as bytes where values have no equality of their own: NaN, objects without __eq__
    return bool(one == other) or serde.dumps_typed(one) == serde.dumps_typed(other)
