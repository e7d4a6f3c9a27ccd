"""Import of langgraph's own databases, SQLite files and Postgres, a checkpoint at a time."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from langgraph.checkpoint.base import WRITES_IDX_MAP, CheckpointTuple

from perdure.checkpointers.address import Address
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.put import CheckpointPut, TaskWrites
from perdure.checkpointers.reader import CheckpointReader
from perdure.checkpointers.records import key_range, unpack_id
from perdure.checkpointers.reports import ImportReport
from perdure.errors import CorruptRecord, ForbiddenType, ImportFailed, NotADatabase
from perdure.settings import is_dsn
from perdure.storage.flow import Flow, Row, Statement, rows_of
from perdure.storage.sqlite import SQLiteDatabase
from perdure.storage.untrusted_sqlite import IMPORT_VALUE_BYTES

_PAGE: Final = 64  # ids of checkpoints that are read at once; a checkpoint may be large
_COLUMNS: Final = "SELECT name FROM pragma_table_info(?)"
_THREADS: Final = (
    "SELECT DISTINCT thread_id FROM checkpoints WHERE thread_id > ? ORDER BY 1 LIMIT 256"
)
_ADDRESSES: Final = "SELECT checkpoint_ns, checkpoint_id FROM checkpoints WHERE thread_id = ?"
_NEXT_ADDRESSES: Final = f"""
{_ADDRESSES} AND (checkpoint_id, checkpoint_ns) > (?, ?)
ORDER BY checkpoint_id, checkpoint_ns LIMIT ?
"""
_CHECKPOINT: Final = """
SELECT parent_checkpoint_id, type, checkpoint, metadata FROM checkpoints
WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ? LIMIT 1
"""
# the special ones, numbered below zero, come last: put_writes numbers the others from zero on
_WRITES: Final = """
SELECT task_id, {path}, channel, type, value FROM writes
WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ?
ORDER BY {path}, task_id, idx < 0, idx
"""
SAVER_TABLES: Final = "checkpoints", "writes"
_PATHS: Final = """
SELECT DISTINCT task_id, {path} FROM checkpoint_writes
WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ?
"""


Write = Callable[[CheckpointPut | TaskWrites], None]


class Task(NamedTuple):
    """The writes of one task."""

    task_id: str
    path: str
    writes: list[tuple[str, Any]]


class SourceCheckpoint(NamedTuple):
    """A checkpoint of a source, and where it was found."""

    where: str
    upon: Address  # its parent
    checkpoint: Any
    metadata: dict[str, Any]
    tasks: list[Task]


def source_of(
    source: str | os.PathLike[str], codec: Codec, max_value_bytes: int = IMPORT_VALUE_BYTES
) -> _SQLiteFile | _PostgresTables:
    """The source at a path or a Postgres DSN; `codec` reads its values."""
    if isinstance(source, str) and is_dsn(source):
        return _PostgresTables(source, codec)
    return _SQLiteFile(source, codec, max_value_bytes)


class _SQLiteFile:
    """What langgraph-checkpoint-sqlite wrote, read a page at a time."""

    def __init__(self, path: str | os.PathLike[str], codec: Codec, max_value_bytes: int) -> None:
        self._file = SQLiteDatabase(
            path, None, read_only=True, tables=SAVER_TABLES, max_value_bytes=max_value_bytes
        )
        self._codec = codec
        self.path, self.close = self._file.path, self._file.close

    def rows(self, sql: str, *params: Any) -> list[Row]:
        return self._file.read(partial(rows_of, sql, *params))

    def threads(self) -> Iterator[str]:
        self._file.read(self._writes_statement)
        return _thread_ids(self.rows)

    def _writes_statement(self) -> Flow[str]:
        """The statement that reads writes; files from before langgraph had task paths lack them."""
        columns = {}
        for table in ("checkpoints", "writes"):
            columns[table] = {name for (name,) in (yield Statement(_COLUMNS, (table,)))}
        if not (
            {"parent_checkpoint_id", "type", "metadata"} <= columns["checkpoints"]
            and {"task_id", "idx", "type"} <= columns["writes"]
        ):
            raise NotADatabase(
                f"{self.path!r} has no tables of langgraph-checkpoint-sqlite; expected a "
                "file that its SqliteSaver or AsyncSqliteSaver wrote"
            )
        return _WRITES.format(path="task_path" if "task_path" in columns["writes"] else "''")

    def checkpoints(self, thread_id: str) -> Iterator[SourceCheckpoint]:
        writes = self._file.read(self._writes_statement)
        last = ("", "")
        while page := self.rows(_NEXT_ADDRESSES, thread_id, *last, _PAGE):
            for ns, uid in page:
                where = f"{self.path!r}, thread {thread_id!r}, checkpoint {uid!r}"
                if not isinstance(ns, str) or not isinstance(uid, str):
                    raise CorruptRecord(f"{where}: its ids are not text")
                for row in self.rows(_CHECKPOINT, thread_id, ns, uid):  # none if it was deleted
                    at = Address(thread_id, ns, uid)
                    yield self._checkpoint(where, at, row, self.rows(writes, *at))
            last = uid, ns

    def _checkpoint(
        self, where: str, at: Address, row: Row, written: list[Row]
    ) -> SourceCheckpoint:
        """Decode the row of a checkpoint, and the rows of its writes."""
        parent, name, blob, metadata = row
        if not isinstance(parent, str | None):
            raise CorruptRecord(f"{where}: the id of its parent is not text")
        rows = []
        for task, path, channel, kind, value in written:
            if not all(isinstance(text, str) for text in (task, path, channel)):
                raise CorruptRecord(f"{where}: the ids of a write are not text")
            rows.append((task, path, channel, self._load(where, kind, value)))
        checkpoint = self._load(where, name, blob)
        try:
            about = json.loads(metadata) if metadata is not None else {}
        except (TypeError, ValueError, RecursionError) as exc:
            raise CorruptRecord(f"{where}: its metadata is not JSON: {exc}") from exc
        if not isinstance(checkpoint, dict) or not isinstance(about, dict):
            raise CorruptRecord(f"{where}: it or its metadata is not a mapping: it was damaged")
        upon = at._replace(checkpoint_id=parent or None)
        return SourceCheckpoint(
            where, upon, {**checkpoint, "id": at.checkpoint_id}, about, _by_task(rows)
        )

    def _load(self, where: str, name: Any, data: Any) -> Any:
        if not isinstance(name, str) or not isinstance(data, bytes):
            raise CorruptRecord(
                f"{where}: a value is a {type(data).__name__} of type {name!r:.40}; expected bytes "
                "of a named type: it was damaged"
            )
        try:
            return self._codec.load(name, data)
        except (ForbiddenType, CorruptRecord) as exc:
            raise type(exc)(f"{where}: {exc}") from exc


class _PostgresTables:
    """What langgraph-checkpoint-postgres wrote, each checkpoint as its own saver reads it."""

    def __init__(self, dsn: str, codec: Codec) -> None:
        from perdure.storage.foreign_postgres import ForeignPostgres

        self._tables = ForeignPostgres(dsn)
        dumps = codec.serde.dumps_typed  # not called
        self._saver = self._tables.saver(
            SimpleNamespace(dumps_typed=dumps, loads_typed=lambda typed: codec.load(*typed))
        )
        self.path, self.close = self._tables.path, self._tables.close
        self._paths = _PATHS.format(path="task_path")

    def rows(self, sql: str, *params: Any) -> list[Row]:
        return self._tables.rows(sql.replace("?", "%s"), *params)

    def threads(self) -> Iterator[str]:
        if self._tables.lacks("checkpoints", "checkpoint_blobs", "checkpoint_writes"):
            raise NotADatabase(
                f"{self.path} has no tables of langgraph-checkpoint-postgres where this user finds "
                "tables; 'perdure copy' copies a database of perdure's own"
            )
        if "task_path" not in self._tables.columns("checkpoint_writes"):  # an older version's
            self._paths = _PATHS.format(path="''")
            for name, path in (
                ("SELECT_SQL", "cw.task_path"),
                ("SELECT_PENDING_SENDS_SQL", "task_path"),
            ):
                setattr(self._saver, name, getattr(self._saver, name).replace(path, "''"))
        return _thread_ids(self.rows)

    def checkpoints(self, thread_id: str) -> Iterator[SourceCheckpoint]:
        for ns, uid in sorted(self.rows(_ADDRESSES, thread_id), key=lambda row: row[::-1]):
            where = f"{self.path}, thread {thread_id!r}, checkpoint {uid!r}"
            config = Address(thread_id, ns, None).config(uid)
            try:
                stored = self._tables.call(partial(self._saver.get_tuple, config))
            except (ForbiddenType, CorruptRecord) as exc:
                raise type(exc)(f"{where}: {exc}") from exc
            except (LookupError, TypeError, ValueError, AttributeError) as exc:  # of their saver
                raise CorruptRecord(f"{where}: it was damaged: {exc!r}") from exc
            if stored is None:  # it was deleted just now
                continue
            writes = stored.pending_writes or ()
            paths: dict[str, str] = dict(
                self.rows(self._paths, thread_id, ns, uid) if writes else ()
            )
            tasks = _by_task(
                (task, paths.get(task, ""), channel, value) for task, channel, value in writes
            )
            for of_task in tasks:
                of_task.writes.sort(key=lambda write: write[0] in WRITES_IDX_MAP)  # see _WRITES
            parent = (stored.parent_config or {}).get("configurable", {}).get("checkpoint_id")
            upon = Address(thread_id, ns, parent)
            yield SourceCheckpoint(where, upon, stored.checkpoint, stored.metadata, tasks)


def _by_task(writes: Iterable[tuple[str, str, str, Any]]) -> list[Task]:
    """Writes, each with its task and path, as tasks in their order."""
    tasks: dict[str, Task] = {}
    for task, path, channel, value in writes:
        tasks.setdefault(task, Task(task, path, [])).writes.append((channel, value))
    return [*tasks.values()]


def _thread_ids(rows: Callable[..., list[Row]]) -> Iterator[str]:
    last = ""
    while page := rows(_THREADS, last):
        for (last,) in page:
            if not isinstance(last, str):
                raise CorruptRecord(f"the id of a thread is {last!r:.80}; expected text")
            yield last


class Importer:
    """Takes over threads with all their namespaces, checkpoints and writes, under their ids.

    `source` is closed at the end, `read` runs a flow of the reader's, and `write` stores a put.
    Once `stopped` is set, no further checkpoint is taken over.
    """

    def __init__(
        self,
        source: _SQLiteFile | _PostgresTables,
        reader: CheckpointReader,
        read: Callable[[Callable[[], Flow[Any]]], Any],
        write: Write,
    ) -> None:
        self.source, self.reader, self.read, self.write = source, reader, read, write
        self.stopped = threading.Event()
        self._done: Counter[str] = Counter()
        self._removals = 0  # number of the thread's newest removal record when its import began

    def run(self) -> ImportReport:
        """Import everything."""
        with closing(self.source) as source:
            for thread_id in source.threads():
                last = partial(self.reader.removals.read_newest_number, thread_id)
                self._removals = self.read(last)
                there = set(source.rows(_ADDRESSES, thread_id))
                self.read(partial(self._check_unforked, thread_id, there))
                before = self._new()
                for checkpoint in source.checkpoints(thread_id):
                    if self.stopped.is_set():
                        raise ImportFailed(f"the import of {source.path!r} was cancelled")
                    self._checkpoint(checkpoint)
                self._done["threads"] += 1
                self._done["unchanged"] += self._new() == before
        return ImportReport(**self._done)

    def _new(self) -> int:
        return self._done["checkpoints"] + self._done["writes"]

    def _check_unforked(self, thread_id: str, there: set[Row]) -> Flow[None]:
        """Refuse a thread that has checkpoints here that the source lacks, and the reverse."""
        sql, here = self.reader.sql, set()
        for thread, *_ in (yield sql("find_thread", thread_id)):
            for namespace, ns, _ in (yield sql("thread_namespaces", thread)):
                rows = yield sql("checkpoint_keys", *key_range(namespace))
                here |= {(ns, unpack_id(uid)) for _, uid, _ in rows}
        if here - there and there - here:
            raise ImportFailed(
                f"thread {thread_id!r} has {len(here - there)} checkpoints here that "
                f"{self.source.path!r} lacks, and {len(there - here)} there that are not here; "
                "import into a new file, or delete the thread here first"
            )

    def _checkpoint(self, source: SourceCheckpoint) -> None:
        """Store a checkpoint and its writes, as far as they are not here, and read them back."""
        where, upon, checkpoint, metadata, tasks = source
        if not {"id", "channel_versions"} <= checkpoint.keys():
            raise CorruptRecord(f"{where}: it lacks its id or its versions: it was damaged")
        seen = checkpoint.get("versions_seen", {})
        maps = [checkpoint["channel_versions"], checkpoint.get("channel_values", {}), seen]
        if not all(isinstance(part, dict) for part in maps) or not all(
            isinstance(versions, dict) for versions in seen.values()
        ):
            raise CorruptRecord(
                f"{where}: its values or versions are not a mapping: it was damaged"
            )
        at = upon._replace(checkpoint_id=checkpoint["id"])
        there = [upon.checkpoint_id, checkpoint, metadata]
        here = self.read(lambda: self.reader.get(at))
        new = here is None
        if new:
            versions = checkpoint["channel_versions"]
            parts = upon, checkpoint, dict(metadata), versions
            self.write(CheckpointPut(*parts, removals=self._removals))
        elif not self._is_same(there, here):
            raise ImportFailed(f"{where} is another one here")
        lacking = tasks if new else self._lacking(tasks, here)
        for task_id, path, writes in lacking:
            self.write(TaskWrites(at, task_id, path, writes, removals=self._removals))
        if new or lacking:
            here = self.read(lambda: self.reader.get(at))
        if not self._is_same(there, here) or self._lacking(tasks, here):
            raise ImportFailed(f"{where} is not the same when read back")
        self._done["checkpoints" if new else "skipped"] += 1
        self._done["writes"] += sum(len(task.writes) for task in lacking)

    def _is_same(self, there: list[Any], here: CheckpointTuple | None) -> bool:
        """Whether what is stored is what the source holds, value for value, writes apart."""
        if here is None:
            return False
        upon = here.parent_config["configurable"]["checkpoint_id"] if here.parent_config else None
        return self._equal([upon, here.checkpoint, here.metadata], there)

    def _lacking(self, tasks: list[Task], here: CheckpointTuple) -> list[Task]:
        """The tasks whose writes are not all stored; there may be others since."""
        stored = [[*row] for row in here.pending_writes or []]
        return [
            task
            for task in tasks
            if not all(
                any(self._equal(row, [task.task_id, *write]) for row in stored)
                for write in task.writes
            )
        ]

    def _equal(self, one: Any, other: Any) -> bool:
        if one == other:
            return True
        if isinstance(one, dict) and isinstance(other, dict):
            return one.keys() == other.keys() and all(
                self._equal(value, other[key]) for key, value in one.items()
            )
        if isinstance(one, list) and isinstance(other, list):
            return len(one) == len(other) and all(map(self._equal, one, other))
        # as bytes what has no equality of its own: NaN, objects without __eq__
        dumps = self.reader.codec.serde.dumps_typed
        return bool(dumps(one) == dumps(other))
