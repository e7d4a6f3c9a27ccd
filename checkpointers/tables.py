"""The tables of the threads, as they are copied into another database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.records import (
    checkpoint_place,
    content_hash,
    item_place,
    open_item,
    pack_id,
    tags_of,
    unpack_id,
    writes_place,
)
from perdure.checkpointers.values import unpack
from perdure.storage.database import statements
from perdure.storage.encryption import Seal
from perdure.storage.flow import Flow, Row, Statement
from perdure.storage.table_copy import Table, Tables

_OF_THREAD: Final = "JOIN threads t ON t.thread = "
_OF_NAMESPACE: Final = (
    f"LEFT JOIN namespaces n ON n.namespace = r.namespace LEFT {_OF_THREAD}n.thread"
)
_TAGS: Final = Table("tags", "tag, checkpoint", "")


@dataclass
class ThreadTables(Tables):
    """Threads with their logs, checkpoints and pending writes; tags are made anew."""

    seal: Seal
    codec: Codec
    noun = "thread"
    tables = (
        Table(
            "threads",
            "thread, thread_id, seq, generation, created_at, updated_at",
            "r.thread_id",
            key="thread",
        ),
        Table(
            "namespaces",
            "namespace, thread, ns, pinned",
            "t.thread_id",
            f"LEFT {_OF_THREAD}r.thread",
            "namespace",
        ),
        Table("logs", "log, thread, name", "t.thread_id", f"LEFT {_OF_THREAD}r.thread", "log"),
        Table(
            "items",
            "id, h, body",
            "t.thread_id, l.name",
            f"LEFT JOIN logs l ON l.log = r.id >> 32 LEFT {_OF_THREAD}l.thread",
        ),
        Table(
            "checkpoints",
            "id, namespace, uid, parent, began, put_at, body",
            "t.thread_id, n.ns",
            _OF_NAMESPACE,
        ),
        Table(
            "writes",
            "namespace, uid, task, path, body",
            "t.thread_id, n.ns",
            _OF_NAMESPACE,
            "namespace, uid, task",
        ),
    )

    @classmethod
    def of(cls, saver: Checkpointer) -> ThreadTables:
        """Those of a checkpointer."""
        reader = saver._reader
        return cls(saver.database, reader.sql, reader.seal, reader.codec)

    def opened(self, table: str, row: Row) -> Row:
        """See `Tables.opened`."""
        if table == "items":  # a hash depends on the key
            thread_id, channel, key, hashed, body = row
            return thread_id, channel, key, hashed != 0, self._item(thread_id, channel, key, body)
        if table == "checkpoints":
            thread_id, ns, key, namespace, uid, parent, began, put_at, body = row
            place = checkpoint_place(thread_id, ns, (key, uid, parent, began, put_at))
            ids = unpack_id(uid), unpack_id(parent)
            return thread_id, ns, key, namespace, *ids, began, put_at, self.seal.open(body, place)
        if table == "writes":
            thread_id, ns, namespace, uid, task, path, body = row
            place = writes_place(thread_id, ns, (uid, task, path))
            ids = unpack_id(uid), unpack_id(task)
            return thread_id, ns, namespace, *ids, path, self.seal.open(body, place)
        return row

    def _item(self, thread_id: str, channel: str, key: int, body: bytes) -> bytes:
        return open_item(self.seal, thread_id, channel, key, body)[1]

    def writes(self, table: Table, rows: Sequence[Row]) -> list[Statement]:
        """See `Tables.writes`."""
        made = table.insert([self._sealed(table.name, row) for row in rows])
        if table.name == "checkpoints":
            made += _TAGS.insert([(tag, row[2]) for row in rows for tag in self._tags(row[-1])])
        return made

    def _sealed(self, table: str, row: Row) -> Row:
        if table == "items":
            thread_id, channel, key, hashed, stored = row
            number = content_hash(self.seal, key >> 32, stored) if hashed else 0
            place = item_place(thread_id, channel, key & 0xFFFFFFFF)
            return key, number, self.seal.seal(stored, place)
        if table == "checkpoints":
            thread_id, ns, key, namespace, uid, parent, began, put_at, data = row
            ids = pack_id(uid), pack_id(parent)
            place = checkpoint_place(thread_id, ns, (key, *ids, began, put_at))
            return key, namespace, *ids, began, put_at, self.seal.seal(data, place)
        if table == "writes":
            thread_id, ns, namespace, uid, task, path, data = row
            ids = pack_id(uid), pack_id(task)
            place = writes_place(thread_id, ns, (*ids, path))
            return namespace, *ids, path, self.seal.seal(data, place)
        return row[1:]

    def _tags(self, data: bytes) -> Any:
        metadata = self.codec.decode(unpack(data)[0][1])
        return tags_of(self.seal, metadata)

    def shown(self, owner: Any) -> str:
        """See `Tables.shown`."""
        return repr(owner)

    def finish(self, settings: list[Row]) -> Flow[None]:
        """See `Tables.finish`."""
        yield statements(self.sql["copied"])

    def with_nul(self) -> Flow[list[Row]]:
        """See `Tables.with_nul`."""
        return (yield self.sql("with_nul"))  # type: ignore[no-any-return]
