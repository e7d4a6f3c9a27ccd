"""Taking over a database that langgraph-checkpoint-sqlite wrote, one checkpoint at a time."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.serde.base import SerializerProtocol

from perdure.checkpointers.base import Address
from perdure.checkpointers.codec import Codec
from perdure.errors import CorruptRecord, ForbiddenType, NotADatabase
from perdure.storage.sqlite_connection import check_path, mapped

_CHECKPOINTS = """
SELECT checkpoint_ns, checkpoint_id, parent_checkpoint_id, type, checkpoint, metadata
FROM checkpoints WHERE thread_id = ? ORDER BY checkpoint_id, checkpoint_ns
"""
# the special ones, numbered below zero, come last: put_writes numbers the others from zero on
_WRITES = """
SELECT task_id, {path}, channel, type, value FROM writes
WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ?
ORDER BY {path}, task_id, idx < 0, idx
"""


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


class Source:
    """A file of langgraph-checkpoint-sqlite, opened for reading only.

    Args:
        path: The file.
        codec: Reads its values, under the allowlist in force.

    Raises:
        ConfigurationError: There is no such file.
        NotADatabase: Another application wrote it.
    """

    def __init__(self, path: str | os.PathLike[str], codec: Codec) -> None:
        self.path = os.fspath(path)
        self._codec = codec
        check_path(self.path, read_only=True)
        with mapped(self.path):
            uri = f"{Path(self.path).absolute().as_uri()}?mode=ro"
            self._conn = sqlite3.connect(uri, uri=True, check_same_thread=False)
            try:
                self._writes = self._check_tables()
            except BaseException:
                self._conn.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._conn.close()

    def _check_tables(self) -> str:
        """The statement that reads writes; files from before langgraph had task paths lack them."""
        columns: dict[str, set[str]] = {
            table: {row[1] for row in self._conn.execute(f"PRAGMA table_info({table})")}
            for table in ("checkpoints", "writes")
        }
        if not (
            {"parent_checkpoint_id", "type", "metadata"} <= columns["checkpoints"]
            and {"task_id", "idx", "type"} <= columns["writes"]
        ):
            raise NotADatabase(
                f"{self.path!r} has no tables of langgraph-checkpoint-sqlite; expected a file "
                "that its SqliteSaver or AsyncSqliteSaver wrote"
            )
        return _WRITES.format(path="task_path" if "task_path" in columns["writes"] else "''")

    def _rows(self, sql: str, *params: Any) -> Iterator[Any]:
        with mapped(self.path), contextlib.closing(self._conn.execute(sql, params)) as cursor:
            yield from cursor

    def thread_ids(self) -> list[str]:
        """All threads."""
        return [row[0] for row in self._rows("SELECT DISTINCT thread_id FROM checkpoints")]

    def addresses(self, thread_id: str) -> set[tuple[str, str]]:
        """`(checkpoint_ns, checkpoint_id)` of every checkpoint of a thread."""
        sql = "SELECT checkpoint_ns, checkpoint_id FROM checkpoints WHERE thread_id = ?"
        return set(self._rows(sql, thread_id))

    def records(self, thread_id: str) -> Iterator[Record]:
        """The checkpoints of a thread, oldest first: their ids sort by time.

        Raises:
            ForbiddenType: A type in one is not on the allowlist.
            CorruptRecord: One cannot be read.
        """
        for ns, uid, parent, name, blob, metadata in self._rows(_CHECKPOINTS, thread_id):
            where = f"{self.path!r}, thread {thread_id!r}, checkpoint {uid!r}"
            tasks: dict[str, TaskWrites] = {}
            for task, path, channel, kind, value in self._rows(self._writes, thread_id, ns, uid):
                found = tasks.setdefault(task, TaskWrites(task, path, []))
                found.writes.append((channel, self._load(where, kind, value)))
            checkpoint = self._load(where, name, blob)
            at = Address(thread_id, ns, parent or None)
            known = json.loads(metadata) if metadata is not None else {}
            yield Record(at, {**checkpoint, "id": uid}, known, list(tasks.values()))

    def _load(self, where: str, name: str, data: bytes) -> Any:
        try:
            return self._codec.load(name, data)
        except (ForbiddenType, CorruptRecord) as exc:
            raise type(exc)(f"{where}: {exc}") from exc


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
