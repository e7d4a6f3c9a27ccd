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
    pack_id,
    tags_of,
    unpack_id,
)
from perdure.checkpointers.values import unpack
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
            "thread, thread_id, seq, generation, created_at, updated_at, title",
            "r.thread_id, ''",
            key="thread",
            names="thread_id",
            large="title",
            place=lambda row: ("title", row[0]),
        ),
        Table(
            "namespaces",
            "namespace, thread, ns, pinned",
            "t.thread_id",
            f"LEFT {_OF_THREAD}r.thread",
            key="namespace",
            names="ns",
        ),
        Table(
            "logs",
            "log, thread, name",
            "t.thread_id",
            f"LEFT {_OF_THREAD}r.thread",
            key="log",
            names="name",
        ),
        Table(
            "items",
            "id, h, body",
            "t.thread_id, l.name",
            f"LEFT JOIN logs l ON l.log = r.id >> 32 LEFT {_OF_THREAD}l.thread",
            large="body",
            place=lambda row: item_place(row[0], row[1], row[2] & 0xFFFFFFFF),
        ),
        Table(
            "checkpoints",
            "id, namespace, uid, parent, began, put_at, body",
            "t.thread_id, n.ns",
            _OF_NAMESPACE,
            keyed="uid",
            large="body",
            ids=(4, 5),
            place=lambda row: checkpoint_place(row[0], row[1], (row[2], *row[4:8])),
        ),
        Table(
            "writes",
            "namespace, uid, task, path, body",
            "t.thread_id, n.ns",
            _OF_NAMESPACE,
            key="namespace, uid, task",
            names="path",
            keyed="uid, task",
            large="body",
            ids=(3, 4),
            place=lambda row: ("writes", *row[:2], *row[3:6]),
        ),
    )

    @classmethod
    def of(cls, saver: Checkpointer) -> ThreadTables:
        """Those of a checkpointer."""
        reader = saver._reader
        return cls(saver.database, reader.sql, reader.seal, reader.codec)

    def opened(self, table: Table, row: Row) -> Row:
        """See `Tables.opened`."""
        if table.place is None:
            return row
        out = [*row]
        for at in table.ids:
            out[at] = unpack_id(out[at])
        if out[-1] is not None:
            out[-1] = self.seal.open(out[-1], table.place(out))
        if table.name == "items":  # the hash depends on the key; aliases have none
            out[3] = out[3] != 0
        return tuple(out)

    def writes(self, table: Table, rows: Sequence[Row]) -> list[Statement]:
        """See `Tables.writes`."""
        made = table.insert([self._sealed(table, row) for row in rows])
        if table.name == "checkpoints":
            made += _TAGS.insert([(tag, row[2]) for row in rows for tag in self._tags(row[-1])])
        return made

    def _sealed(self, table: Table, row: Row) -> Row:
        if table.place is None:
            return row[1:]
        out = [*row]
        if out[-1] is not None:
            out[-1] = self.seal.seal(out[-1], table.place(out))
        if table.name == "items":
            out[3] = content_hash(self.seal, row[2] >> 32, row[-1]) if row[3] else 0
        for at in table.ids:
            out[at] = pack_id(out[at])
        return tuple(out[2:])

    def _tags(self, data: bytes) -> list[int]:
        return tags_of(self.seal, self.codec.decode(unpack(data)[0][1]))

    def shown(self, owner: Any) -> str:
        """See `Tables.shown`."""
        return repr(owner)

    def finish(self, settings: list[Row]) -> Flow[None]:
        """See `Tables.finish`."""
        yield [self.sql("copied"), self.sql("analyzed")]
