"""Taking over a database of langgraph-checkpoint-sqlite, a page of checkpoints at a time."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

from langgraph.checkpoint.base import Checkpoint, CheckpointTuple
from langgraph.checkpoint.serde.base import SerializerProtocol

from perdure.checkpointers.address import Address
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.listing import Listing, results
from perdure.checkpointers.planner import Planner
from perdure.checkpointers.reader import Reader
from perdure.checkpointers.reports import ImportReport
from perdure.errors import CorruptRecord, ForbiddenType, ImportFailed, NotADatabase
from perdure.storage.flow import Flow, Statement

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


class Asked(NamedTuple):
    """A flow to be run on the file that is imported."""

    flow: Flow[Any]


class Planned(NamedTuple):
    """A plan to be written."""

    make: Any
    thread_id: str


Steps = Generator[Any, Any, ImportReport]
"""Yields `Asked`, `Planned`, or a flow that reads this database; is sent what comes of it."""


@dataclass(slots=True)
class TaskWrites:
    """What one task wrote."""

    task_id: str
    path: str
    writes: list[tuple[str, Any]]


@dataclass(slots=True)
class Record:
    """A checkpoint of the source; `parent` is the address it is put upon."""

    parent: Address
    checkpoint: dict[str, Any]
    metadata: dict[str, Any]
    tasks: list[TaskWrites]

    @property
    def at(self) -> Address:
        """Its own address."""
        return self.parent._replace(checkpoint_id=self.checkpoint["id"])


@dataclass(slots=True)
class Importer:
    """Takes over threads with all their namespaces, checkpoints and writes, under their ids.

    Args:
        path: The file that langgraph-checkpoint-sqlite wrote, for messages.
        codec: Reads its values, under the allowlist in force.
        listing: Lists what is here.
        reader: Reads what is here.
    """

    path: str
    codec: Codec
    listing: Listing
    reader: Reader

    def steps(self) -> Steps:
        """The whole import; see `Checkpointer.import_from`."""
        writes = yield Asked(self._check_tables())
        report = ImportReport()
        last = ""
        while rows := (yield Asked(_rows(_THREADS, last))):
            for (thread_id,) in rows:
                yield from self._check_unforked(thread_id)
                report += ImportReport(threads=1)
                report += yield from self._thread(thread_id, writes)
            last = rows[-1][0]
        return report

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

    def _check_unforked(self, thread_id: str) -> Generator[Any, Any, None]:
        """Refuse a thread that has checkpoints here that the source lacks, and the reverse."""
        there = set((yield Asked(_rows(_ADDRESSES, thread_id))))
        everywhere: Any = {"configurable": {"thread_id": thread_id}}
        found = yield from results(self.listing.addresses(everywhere, {}, None, None))
        here = {(at.checkpoint_ns, at.checkpoint_id) for at, _ in found}
        if here - there and there - here:
            raise ImportFailed(
                f"thread {thread_id!r} has {len(here - there)} checkpoints here that "
                f"{self.path!r} lacks, and {len(there - here)} there that are not here; "
                "import into a new file, or delete the thread here first"
            )

    def _thread(self, thread_id: str, writes: str) -> Steps:
        """The checkpoints of a thread, oldest first: their ids sort by time."""
        report = ImportReport()
        last = ("", "")
        while rows := (yield Asked(_rows(_CHECKPOINTS, thread_id, *last, _PAGE))):
            for ns, uid, parent, name, blob, metadata in rows:
                where = f"{self.path!r}, thread {thread_id!r}, checkpoint {uid!r}"
                tasks: dict[str, TaskWrites] = {}
                found = yield Asked(_rows(writes, thread_id, ns, uid))
                for task, path, channel, kind, value in found:
                    of_task = tasks.setdefault(task, TaskWrites(task, path, []))
                    of_task.writes.append((channel, self._load(where, kind, value)))
                checkpoint = {**self._load(where, name, blob), "id": uid}
                known = json.loads(metadata) if metadata is not None else {}
                at = Address(thread_id, ns, parent or None)
                report += yield from self._take(Record(at, checkpoint, known, list(tasks.values())))
            last = rows[-1][1], rows[-1][0]
        return report

    def _load(self, where: str, name: str, data: bytes) -> Any:
        try:
            return self.codec.load(name, data)
        except (ForbiddenType, CorruptRecord) as exc:
            raise type(exc)(f"{where}: {exc}") from exc

    def _take(self, record: Record) -> Steps:
        serde = self.reader.items.codec.serde
        found = yield self.reader.get(record.at)
        new = found is None
        if new:
            yield Planned(lambda planner: _put(planner, record), record.at.thread_id)
        elif not same(record, found, serde):
            raise self._differs(record, "is another one here")
        tasks = record.tasks if new else lacking(record, found, serde)
        for task in tasks:
            yield Planned(
                lambda planner, task=task: planner.writes(
                    record.at, task.writes, task.task_id, task.path
                ),
                record.at.thread_id,
            )
        if new or tasks:
            found = yield self.reader.get(record.at)
        if found is None or not same(record, found, serde) or lacking(record, found, serde):
            raise self._differs(record, "is not the same when read back")
        writes = sum(len(task.writes) for task in tasks)
        return ImportReport(checkpoints=int(new), writes=writes, skipped=int(not new))

    def _differs(self, record: Record, how: str) -> ImportFailed:
        return ImportFailed(
            f"{self.path!r}, thread {record.at.thread_id!r}: checkpoint "
            f"{record.at.checkpoint_id!r} {how}"
        )


def _rows(sql: str, *params: Any) -> Flow[Any]:
    return (yield Statement(sql, params))


def _put(planner: Planner, record: Record) -> Any:
    checkpoint = cast(Checkpoint, record.checkpoint)
    versions = checkpoint["channel_versions"]
    return planner.checkpoint(record.parent, checkpoint, record.metadata, versions)


def same(record: Record, found: CheckpointTuple, serde: SerializerProtocol) -> bool:
    """Whether a stored checkpoint is what the source holds, value for value, writes apart."""
    parent = found.parent_config["configurable"]["checkpoint_id"] if found.parent_config else None
    stored = [parent, found.checkpoint, found.metadata]
    given = [record.parent.checkpoint_id, record.checkpoint, record.metadata]
    return _equal(stored, given, serde)


def lacking(record: Record, found: CheckpointTuple, serde: SerializerProtocol) -> list[TaskWrites]:
    """The tasks whose writes are not all stored; there may be others since."""
    stored = found.pending_writes or []
    return [
        task
        for task in record.tasks
        if not all(
            any(_equal(write, [task.task_id, *given], serde) for write in map(list, stored))
            for given in task.writes
        )
    ]


def _equal(one: Any, other: Any, serde: SerializerProtocol) -> bool:
    # as bytes where values have no equality of their own: NaN, objects without __eq__
    return bool(one == other) or serde.dumps_typed(one) == serde.dumps_typed(other)
