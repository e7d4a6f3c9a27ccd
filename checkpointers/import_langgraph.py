"""Import threads from the SQLite and Postgres databases of langgraph's own savers.

An import reads and stores checkpoints one at a time.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from langgraph.checkpoint.base import WRITES_IDX_MAP, CheckpointTuple

from perdure.checkpointers.address import Address
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.put import CheckpointPut, TaskWrites
from perdure.checkpointers.reader import CheckpointReader
from perdure.checkpointers.records import build_row_key_range, decode_stored_id
from perdure.checkpointers.reports import ImportReport
from perdure.errors import CorruptRecord, ForbiddenType, ImportFailed, NotADatabase
from perdure.settings import is_dsn
from perdure.storage.flow import Flow, Row, Statement, fetch_rows
from perdure.storage.sqlite import SQLiteDatabase
from perdure.storage.untrusted_sqlite import IMPORT_VALUE_BYTES

# Maximum number of checkpoint ids read from a SQLite file by one SQL statement. The checkpoints
# themselves are read one by one.
_PAGE: Final = 64
# The following SQL statements read the tables of langgraph's savers, not perdure's own tables.
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
# Sort the writes to special channels, such as langgraph's error channel, after all regular writes.
# Writes to special channels have negative indexes. If they came first, the list position of a
# regular write would differ from the index that `put_writes` assigns to the write.
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
StoreRequest = Callable[[CheckpointPut | TaskWrites], None]
"""A function that stores a checkpoint or the pending writes of a task."""


class SourceTask(NamedTuple):
    """A task with its pending writes, as `(channel, value)` pairs, read from a source database."""

    task_id: str
    path: str
    writes: list[tuple[str, Any]]


class SourceCheckpoint(NamedTuple):
    """A checkpoint that was read from a database of langgraph's own saver.

    Attributes:
        label: The path of the source, the thread and the checkpoint, for error messages.
        parent: The address of the parent, whose `checkpoint_id` may be None.
        checkpoint: The checkpoint, as langgraph returns it.
        metadata: The metadata of the checkpoint.
        tasks: The pending writes, by task.
    """

    label: str
    parent: Address
    checkpoint: Any
    metadata: dict[str, Any]
    tasks: list[SourceTask]


def open_import_source(
    source: str | os.PathLike[str], codec: Codec, max_value_bytes: int = IMPORT_VALUE_BYTES
) -> _SQLiteFile | _PostgresTables:
    """Open a SQLite file or Postgres database written by langgraph's saver, to import from it.

    Args:
        source: The path of the file, or the DSN of the database.
        codec: The codec that decodes the values.
        max_value_bytes: The size in bytes of the largest value that is read from a file.
    """
    if isinstance(source, str) and is_dsn(source):
        return _PostgresTables(source, codec)
    return _SQLiteFile(source, codec, max_value_bytes)


class _SQLiteFile:
    """Reads a SQLite file written by langgraph-checkpoint-sqlite, page by page."""

    def __init__(self, path: str | os.PathLike[str], codec: Codec, max_value_bytes: int) -> None:
        self._file = SQLiteDatabase(
            path, None, read_only=True, tables=SAVER_TABLES, max_value_bytes=max_value_bytes
        )
        self._codec = codec
        self.path, self.close = self._file.path, self._file.close

    def read_rows(self, sql: str, *params: Any) -> list[Row]:
        return self._file.read(partial(fetch_rows, sql, *params))

    def iter_thread_ids(self) -> Iterator[str]:
        """Check that the file has the expected tables, and yield the ids of all threads.

        Raises:
            NotADatabase: The file lacks the tables or columns of langgraph's saver.
        """
        self._file.read(self._build_writes_sql)
        return _iter_thread_ids(self.read_rows)

    def _build_writes_sql(self) -> Flow[str]:
        """Return the SQL statement that reads pending writes.

        Files written by older langgraph versions have no column for task paths.

        Raises:
            NotADatabase: The file lacks the tables or columns of langgraph's saver.
        """
        columns = {}
        for table in ("checkpoints", "writes"):
            columns[table] = {name for (name,) in (yield Statement(_COLUMNS, (table,)))}
        if not (
            {"parent_checkpoint_id", "type", "metadata"} <= columns["checkpoints"]
            and {"task_id", "idx", "type"} <= columns["writes"]
        ):
            raise NotADatabase(
                f"{self.path!r} does not contain the tables of langgraph-checkpoint-sqlite; "
                "expected a database file written by SqliteSaver or AsyncSqliteSaver"
            )
        return _WRITES.format(path="task_path" if "task_path" in columns["writes"] else "''")

    def iter_checkpoints(self, thread_id: str) -> Iterator[SourceCheckpoint]:
        """Yield the checkpoints of a thread, in the order of their ids."""
        writes = self._file.read(self._build_writes_sql)
        last_key = ("", "")
        while page := self.read_rows(_NEXT_ADDRESSES, thread_id, *last_key, _PAGE):
            for ns, uid in page:
                label = f"{self.path!r}, thread {thread_id!r}, checkpoint {uid!r}"
                if not isinstance(ns, str) or not isinstance(uid, str):
                    raise CorruptRecord(
                        f"{label}: the file is damaged, because the namespace or id of the "
                        "checkpoint is not a string"
                    )
                key = Address(thread_id, ns, uid)
                # The result is empty if the checkpoint was deleted after its id was read.
                for row in self.read_rows(_CHECKPOINT, *key):
                    yield self._decode_checkpoint(label, key, row, self.read_rows(writes, *key))
            last_key = uid, ns

    def _decode_checkpoint(
        self, label: str, address: Address, row: Row, write_rows: list[Row]
    ) -> SourceCheckpoint:
        """Decode the row of a checkpoint and the rows of its pending writes.

        Raises:
            CorruptRecord: A value has another type than langgraph's saver writes.
        """
        parent, name, blob, metadata = row
        if not isinstance(parent, str | None):
            raise CorruptRecord(
                f"{label}: the file is damaged, because the id of the parent checkpoint is not a "
                "string"
            )
        rows = []
        for task, path, channel, kind, value in write_rows:
            if not all(isinstance(text, str) for text in (task, path, channel)):
                raise CorruptRecord(
                    f"{label}: the file is damaged, because the task, path or channel of a pending "
                    "write is not a string"
                )
            rows.append((task, path, channel, self._decode_typed_value(label, kind, value)))
        checkpoint = self._decode_typed_value(label, name, blob)
        try:
            decoded_metadata = json.loads(metadata) if metadata is not None else {}
        except (TypeError, ValueError, RecursionError) as exc:
            raise CorruptRecord(
                f"{label}: the file is damaged, because the metadata is not valid JSON ({exc})"
            ) from exc
        if not isinstance(checkpoint, dict) or not isinstance(decoded_metadata, dict):
            raise CorruptRecord(
                f"{label}: the file is damaged, because the checkpoint or its metadata is not a "
                "mapping"
            )
        parent_address = address._replace(checkpoint_id=parent or None)
        return SourceCheckpoint(
            label,
            parent_address,
            {**checkpoint, "id": address.checkpoint_id},
            decoded_metadata,
            _group_writes_by_task(rows),
        )

    def _decode_typed_value(self, label: str, type_name: Any, data: Any) -> Any:
        """Decode a value.

        If decoding fails, the error message names the source database, the thread and the
        checkpoint that contain the value.
        """
        if not isinstance(type_name, str) or not isinstance(data, bytes):
            raise CorruptRecord(
                f"{label}: the file is damaged. Expected a value stored as bytes with a type name, "
                f"but got {type(data).__name__} with the type name {type_name!r:.40}"
            )
        try:
            return self._codec.load_with_serializer(type_name, data)
        except (ForbiddenType, CorruptRecord) as exc:
            raise type(exc)(f"{label}: {exc}") from exc


class _PostgresTables:
    """Reads the tables of langgraph-checkpoint-postgres with langgraph's own saver."""

    def __init__(self, dsn: str, codec: Codec) -> None:
        from perdure.storage.foreign_postgres import ForeignPostgres

        self._tables = ForeignPostgres(dsn)
        # langgraph's saver requires a serializer with a `dumps_typed` function, but an import never
        # calls this function.
        dumps = codec.serde.dumps_typed
        self._saver = self._tables.build_langgraph_saver(
            SimpleNamespace(
                dumps_typed=dumps, loads_typed=lambda typed: codec.load_with_serializer(*typed)
            )
        )
        self.path, self.close = self._tables.path, self._tables.close
        self._paths = _PATHS.format(path="task_path")

    def read_rows(self, sql: str, *params: Any) -> list[Row]:
        return self._tables.fetch_rows(sql.replace("?", "%s"), *params)

    def iter_thread_ids(self) -> Iterator[str]:
        """Check that the database has the expected tables, and yield the ids of all threads.

        Raises:
            NotADatabase: The database lacks the tables of langgraph's saver.
        """
        if self._tables.is_any_table_missing(
            "checkpoints", "checkpoint_blobs", "checkpoint_writes"
        ):
            raise NotADatabase(
                f"the search_path of {self.path} does not contain the tables of "
                "langgraph-checkpoint-postgres; to copy a perdure database, use 'perdure copy'"
            )
        # Tables that older versions of langgraph have created have no column for task paths.
        if "task_path" not in self._tables.list_columns("checkpoint_writes"):
            self._paths = _PATHS.format(path="''")
            for name, path in (
                ("SELECT_SQL", "cw.task_path"),
                ("SELECT_PENDING_SENDS_SQL", "task_path"),
            ):
                setattr(self._saver, name, getattr(self._saver, name).replace(path, "''"))
        return _iter_thread_ids(self.read_rows)

    def iter_checkpoints(self, thread_id: str) -> Iterator[SourceCheckpoint]:
        """Yield the checkpoints of a thread, in the order of their ids."""
        for ns, uid in sorted(self.read_rows(_ADDRESSES, thread_id), key=lambda row: row[::-1]):
            label = f"{self.path}, thread {thread_id!r}, checkpoint {uid!r}"
            config = Address(thread_id, ns, None).build_config(uid)
            try:
                stored = self._tables.read_with(partial(self._saver.get_tuple, config))
            except (ForbiddenType, CorruptRecord) as exc:
                raise type(exc)(f"{label}: {exc}") from exc
            # langgraph's saver raises one of several errors for a row that it cannot decode.
            except (LookupError, TypeError, ValueError, AttributeError) as exc:
                raise CorruptRecord(f"{label}: the checkpoint is damaged ({exc!r})") from exc
            # Skip a checkpoint that was deleted between reading its id and reading its data.
            if stored is None:
                continue
            writes = stored.pending_writes or ()
            paths: dict[str, str] = dict(
                self.read_rows(self._paths, thread_id, ns, uid) if writes else ()
            )
            tasks = _group_writes_by_task(
                (task, paths.get(task, ""), channel, value) for task, channel, value in writes
            )
            for task_writes in tasks:
                # Sort the writes in the same order as the SQL query `_WRITES`.
                task_writes.writes.sort(key=lambda write: write[0] in WRITES_IDX_MAP)
            parent_id = (stored.parent_config or {}).get("configurable", {}).get("checkpoint_id")
            yield SourceCheckpoint(
                label, Address(thread_id, ns, parent_id), stored.checkpoint, stored.metadata, tasks
            )


def _group_writes_by_task(writes: Iterable[tuple[str, str, str, Any]]) -> list[SourceTask]:
    """Group `(task_id, path, channel, value)` tuples by task, in order of first occurrence."""
    tasks: dict[str, SourceTask] = {}
    for task, path, channel, value in writes:
        tasks.setdefault(task, SourceTask(task, path, [])).writes.append((channel, value))
    return [*tasks.values()]


def _iter_thread_ids(read_rows: Callable[..., list[Row]]) -> Iterator[str]:
    """Yield the ids of all threads, using `read_rows` to fetch one page at a time."""
    last_id = ""
    while page := read_rows(_THREADS, last_id):
        for (last_id,) in page:
            if not isinstance(last_id, str):
                raise CorruptRecord(
                    "the source is damaged, because one of its thread ids is "
                    f"{last_id!r:.80}; expected a string"
                )
            yield last_id


class Importer:
    """Imports all threads of a source with their namespaces, checkpoints and writes.

    The ids stay the same. If `stopped` is set, the import stops before the next checkpoint.

    Args:
        source: The source, which `run` closes.
        reader: The reader of the target database.
        read: A function that executes a flow of the reader.
        write: A function that stores a checkpoint or the pending writes of a task.
    """

    def __init__(
        self,
        source: _SQLiteFile | _PostgresTables,
        reader: CheckpointReader,
        read: Callable[[Callable[[], Flow[Any]]], Any],
        write: StoreRequest,
    ) -> None:
        self.source, self.reader, self.read, self.write = source, reader, read, write
        self.stopped = threading.Event()

    def run(self) -> ImportReport:
        """Import all threads of the source.

        Returns:
            The number of imported objects.

        Raises:
            ImportFailed: A thread or checkpoint differs from the one in the target database, or the
                import was cancelled.
            CorruptRecord: A row of the source is damaged.
        """
        report = ImportReport()
        with closing(self.source) as source:
            for thread_id in source.iter_thread_ids():
                # Before any checkpoint of the thread is read, read the number of the thread's
                # newest removal record.
                removal_number = self.read(
                    partial(self.reader.removals.read_newest_record_number, thread_id)
                )
                self.read(
                    partial(
                        self._check_thread_has_not_diverged,
                        thread_id,
                        set(source.read_rows(_ADDRESSES, thread_id)),
                    )
                )
                thread_report = ImportReport(threads=1)
                for checkpoint in source.iter_checkpoints(thread_id):
                    if self.stopped.is_set():
                        raise ImportFailed(
                            f"the import of {source.path!r} was cancelled; run the import again to "
                            "continue"
                        )
                    thread_report += self._import_checkpoint(checkpoint, removal_number)
                is_unchanged = not (thread_report.checkpoints or thread_report.writes)
                report += replace(thread_report, unchanged=int(is_unchanged))
        return report

    def _check_thread_has_not_diverged(self, thread_id: str, source_keys: set[Row]) -> Flow[None]:
        """Raise an error if the copies of a thread in the source and the target have diverged.

        The thread has diverged if the source and the target each have a checkpoint that the other
        lacks.

        Args:
            thread_id: The thread.
            source_keys: The namespace and the id of each checkpoint in the source.
        """
        sql, stored_keys = self.reader.sql, set()
        for thread_key, *_ in (yield sql("find_thread", thread_id)):
            for namespace, ns, _ in (yield sql("thread_namespaces", thread_key)):
                rows = yield sql("checkpoint_keys", *build_row_key_range(namespace))
                stored_keys |= {(ns, decode_stored_id(uid)) for _, uid, _ in rows}
        if stored_keys - source_keys and source_keys - stored_keys:
            raise ImportFailed(
                f"thread {thread_id!r} has diverged: {len(stored_keys - source_keys)} of its "
                f"checkpoints exist only in this database, and {len(source_keys - stored_keys)} "
                f"only in {self.source.path!r}; import into a new database, or delete the thread "
                "from this database first"
            )

    def _import_checkpoint(
        self, source_checkpoint: SourceCheckpoint, removal_number: int
    ) -> ImportReport:
        """Store a checkpoint and its pending writes, unless they are stored already.

        After the checkpoint and its writes have been stored, they are read back and compared with
        the source.

        Args:
            source_checkpoint: The checkpoint.
            removal_number: The number of the thread's newest removal record. It was read before the
                thread's first checkpoint was read.

        Returns:
            The numbers of stored and skipped checkpoints, and of stored writes.

        Raises:
            CorruptRecord: The checkpoint in the source is damaged.
            ImportFailed: The stored checkpoint differs from the one in the source.
        """
        label, parent, checkpoint, metadata, tasks = source_checkpoint
        if not {"id", "channel_versions"} <= checkpoint.keys():
            raise CorruptRecord(
                f"{label}: the checkpoint is damaged, because it has no id or no channel_versions"
            )
        seen = checkpoint.get("versions_seen", {})
        maps = [checkpoint["channel_versions"], checkpoint.get("channel_values", {}), seen]
        if not all(isinstance(part, dict) for part in maps) or not all(
            isinstance(versions, dict) for versions in seen.values()
        ):
            raise CorruptRecord(
                f"{label}: the checkpoint is damaged, because channel_values, channel_versions or "
                "versions_seen is not a mapping"
            )
        address = parent._replace(checkpoint_id=checkpoint["id"])
        stored = self.read(lambda: self.reader.read_tuple(address))
        is_new = stored is None
        if is_new:
            versions = checkpoint["channel_versions"]
            self.write(
                CheckpointPut(
                    parent,
                    checkpoint,
                    dict(metadata),
                    versions,
                    loaded_removal=removal_number,
                )
            )
        elif not self._equals_source_checkpoint(stored, source_checkpoint):
            raise ImportFailed(
                f"{label}: this database has a different checkpoint with the same id; import into "
                "a new database, or delete the thread from this database first"
            )
        missing_tasks = tasks if is_new else self._find_tasks_with_unstored_writes(tasks, stored)
        for task_id, path, writes in missing_tasks:
            self.write(TaskWrites(address, task_id, path, writes, loaded_removal=removal_number))
        if is_new or missing_tasks:
            stored = self.read(lambda: self.reader.read_tuple(address))
        if not self._equals_source_checkpoint(
            stored, source_checkpoint
        ) or self._find_tasks_with_unstored_writes(tasks, stored):
            raise ImportFailed(
                f"{label}: the checkpoint was stored, but the values that were read back differ "
                "from the source, so the import was stopped. Please report this error and the "
                "types of the checkpoint's values"
            )
        return ImportReport(
            checkpoints=int(is_new),
            skipped=int(not is_new),
            writes=sum(len(task.writes) for task in missing_tasks),
        )

    def _equals_source_checkpoint(
        self, stored: CheckpointTuple | None, source_checkpoint: SourceCheckpoint
    ) -> bool:
        """Return whether a checkpoint in the target equals its counterpart in the source.

        Pending writes are not compared.
        """
        if stored is None:
            return False
        parent_id = (
            stored.parent_config["configurable"]["checkpoint_id"] if stored.parent_config else None
        )
        stored_parts = [parent_id, stored.checkpoint, stored.metadata]
        expected_parts = [
            source_checkpoint.parent.checkpoint_id,
            source_checkpoint.checkpoint,
            source_checkpoint.metadata,
        ]
        return self._are_values_equal(stored_parts, expected_parts)

    def _find_tasks_with_unstored_writes(
        self, tasks: list[SourceTask], stored: CheckpointTuple
    ) -> list[SourceTask]:
        """Return the tasks with at least one write that is missing from the target database.

        Stored writes that are missing from the source are ignored, because the thread may have
        continued in the target database after an earlier import.
        """
        stored_writes = [[*row] for row in stored.pending_writes or []]
        return [
            task
            for task in tasks
            if not all(
                any(self._are_values_equal(row, [task.task_id, *write]) for row in stored_writes)
                for write in task.writes
            )
        ]

    def _are_values_equal(self, first: Any, second: Any) -> bool:
        """Return whether two values are equal or serialise to the same bytes.

        Values that compare as unequal are serialised, and their bytes are compared, because some
        values do not equal their own copies, such as NaN and objects without `__eq__`.
        """
        if first == second:
            return True
        if isinstance(first, dict) and isinstance(second, dict):
            return first.keys() == second.keys() and all(
                self._are_values_equal(value, second[key]) for key, value in first.items()
            )
        if isinstance(first, list) and isinstance(second, list):
            return len(first) == len(second) and all(map(self._are_values_equal, first, second))
        dumps = self.reader.codec.serde.dumps_typed
        return bool(dumps(first) == dumps(second))
