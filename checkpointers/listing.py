"""Lists of checkpoints by thread, namespace, metadata and place.

Pages are read as they are asked for; between two of them nothing is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from heapq import merge
from operator import itemgetter
from typing import Any, Final

from langchain_core.runnables import RunnableConfig

from perdure.checkpointers.address import Address, check_optional_text, parse_address
from perdure.checkpointers.reader import CheckpointReader, damaged_index_error
from perdure.checkpointers.records import (
    key_range,
    metadata_tag,
    metadata_tags,
    pack_id,
    row_key,
    unpack_id,
)
from perdure.storage.database import Database
from perdure.storage.encryption import Seal
from perdure.storage.flow import Flow, Row, fetch_rows

_PAGE: Final = 256  # rows read at once
_LOW: Final = 0xFFFFFFFF
Where = Mapping[str, Any]
_ALL: Final = (1 << 63) - 1  # above every key


def matches(metadata: Mapping[str, Any], where: Where) -> bool:
    """Whether metadata has all of these values; a dotted key also names a value within a dict."""
    return all(_at(metadata, name) == value for name, value in where.items())


def number_of(seal: Seal, where: Where) -> int | None:
    """The number under which the first value that is indexed is; None: none is."""
    numbers = (metadata_tag(seal, name, where[name]) for name in where if "." not in name)
    return next((number for number in numbers if number is not None), None)


def _at(metadata: Mapping[str, Any], name: str) -> Any:
    if name in metadata or "." not in name:
        return metadata.get(name)
    at: Any = metadata
    for part in name.split("."):
        at = at.get(part) if isinstance(at, Mapping) else None
    return at


class Listing:
    """Lists checkpoints."""

    def __init__(self, reader: CheckpointReader, database: Database) -> None:
        self.reader, self.sql, self.seal = reader, reader.sql, reader.seal
        self.read = database.read

    def addresses(
        self,
        config: RunnableConfig | None,
        where: Where | None,
        before: RunnableConfig | None,
    ) -> Iterator[tuple[Address, int]]:
        """`(address, key)` of every matching checkpoint; see `Checkpointer.list`."""
        where = where or {}
        named = before.get("configurable") if before else None  # it needs no thread_id
        uid = check_optional_text("checkpoint_id", named.get("checkpoint_id")) if named else None
        if config is not None:
            at = parse_address(config)
            ns = config.get("configurable", {}).get("checkpoint_ns")
            yield from self._in_thread(at.thread_id, ns, where, uid, at.checkpoint_id)
            return
        owners = self.read(lambda: self.owners(where))
        thread_ids: Iterable[str] = self.thread_ids()
        if owners is not None:
            thread_ids = dict.fromkeys(thread_id for thread_id, _ in owners)
        for thread_id in thread_ids:
            yield from self._in_thread(thread_id, None, where, uid, None)

    def thread_ids(self) -> Iterator[str]:
        """Every thread, in the order they came."""
        last = 0
        while rows := self.read(partial(fetch_rows, self.sql["thread_ids"], last, _PAGE)):
            for thread, thread_id, indexed in rows:
                if indexed != thread:
                    raise damaged_index_error(f"thread {thread}")
                yield thread_id
            last = rows[-1][0]

    # -- by the index of metadata

    def owners(self, where: Where) -> Flow[list[tuple[str, int]] | None]:
        """`(thread_id, key)` of every checkpoint that matches; None: no index tells."""
        number, last = number_of(self.seal, where), -1
        if number is None:
            return None
        yield from self._check_tags(number, 0, _ALL)
        out = []
        while rows := (yield self.sql("tagged_checkpoints", number, last, _PAGE)):
            for thread_id, ns, *row in rows:
                if row[0] <= last:
                    raise damaged_index_error(f"the tags of checkpoint {row[0]}")
                last = row[0]
                if matches(self._tagged(thread_id, ns, row, number, True), where):
                    out.append((thread_id, last))
        return out

    def _check_tags(self, number: int, start: int, stop: int) -> Flow[None]:
        """Make sure that a search in the index of metadata ended where it should.

        It ends beside the damaged entry that misled it, if there is one.
        """
        if self.sql["neighbouring_tags"]:
            beside = yield self.sql("neighbouring_tags", number, start, stop)
            for indexed, thread_id, ns, *row in beside:
                self._tagged(thread_id, ns, row, number, bool(indexed))

    def _tagged(
        self, thread_id: str | None, ns: str, row: list[Any], number: int, indexed: bool
    ) -> dict[str, Any]:
        """The metadata of a checkpoint, which has a value if it is indexed under it."""
        if thread_id is not None and row[1] is not None:
            metadata = self.reader.decode_metadata(
                self.reader.decrypt_row(thread_id, ns, tuple(row))
            )
            if indexed == (number in metadata_tags(self.seal, metadata)):
                return metadata
        raise damaged_index_error(f"the tags of checkpoint {row[0]}")

    # -- within a thread

    def _in_thread(
        self, thread_id: str, ns: str | None, where: Where, before: str | None, only: str | None
    ) -> Iterator[tuple[Address, int]]:
        seq, namespaces = self.read(lambda: self._state(thread_id))
        listed = [
            self._of_namespace(Address(thread_id, name, only), key, head, where, before, seq + 1)
            for key, name, head in namespaces
            if ns is None or name == ns
        ]
        for _, at, row in merge(*listed, key=itemgetter(0), reverse=True):
            yield at._replace(checkpoint_id=unpack_id(row[1])), row[0]

    def _state(self, thread_id: str) -> Flow[tuple[int, list[Row]]]:
        """The counter of puts of a thread, and its namespaces."""
        rows = yield self.sql("find_thread", thread_id)
        if not rows:
            yield from self.reader.check_missing(Address(thread_id, "", None))
            return 0, []
        thread, seq, *_ = rows[0]
        namespaces = yield self.sql("thread_namespaces", thread)
        if any(head > seq for _, _, head in namespaces):
            raise damaged_index_error(f"the counter of puts of thread {thread_id!r}")
        return seq, namespaces

    def _of_namespace(
        self, at: Address, namespace: int, head: int, where: Where, before: str | None, stop: int
    ) -> Iterator[tuple[int, Address, Row]]:
        """The rows of a namespace put before `stop`, each after the place it is listed by.

        They are newest first, but that the head comes before all others, in the place of the first.
        """
        if before is not None:
            stop, before = self.read(
                partial(self._limit, at._replace(checkpoint_id=before), namespace, stop)
            )

        def fits(row: Row) -> bool:
            if before is not None and not str(unpack_id(row[1])) < before:
                return False
            return not where or matches(
                self.reader.decode_metadata(
                    self.reader.decrypt_row(at.thread_id, at.checkpoint_ns, row)
                ),
                where,
            )

        if at.checkpoint_id is not None:
            sql = self.sql["find_checkpoint"], namespace, pack_id(at.checkpoint_id)
            rows = [row for row in self.read(lambda: fetch_rows(*sql)) if row[0] & _LOW < stop]
            yield from ((row[0] & _LOW, at, row) for row in rows if fits(row))
            return
        head_key = row_key(namespace, head) if 0 < head < stop else None
        for number, row in enumerate(self._rows(namespace, stop, where, fits)):
            seq = row[0] & _LOW
            if number == 0 and head_key not in (None, row[0]):
                heads = self.read(lambda: fetch_rows(self.sql["checkpoint_row"], head_key))
                yield from ((seq, at, head_row) for head_row in heads if fits(head_row))
            if number == 0 or row[0] != head_key:
                yield seq, at, row

    def _rows(
        self, namespace: int, stop: int, where: Where, fits: Callable[[Row], bool]
    ) -> Iterator[Row]:
        """The rows of a namespace put before `stop`, newest first, a page at a time."""
        while stop > 0:
            rows = self.read(partial(self._page, *key_range(namespace, 0, stop), where))
            keys = [row[0] for row in rows]
            if keys != sorted(set(keys), reverse=True) or any(row[1] is None for row in rows):
                raise damaged_index_error(f"namespace {namespace}")
            stop = rows[-1][0] & _LOW if len(rows) == _PAGE else 0
            yield from filter(fits, rows)

    def _limit(self, at: Address, namespace: int, stop: int) -> Flow[tuple[int, str | None]]:
        """What is before a checkpoint: the place in its own namespace where it was put.

        An id of another one, with which langgraph asks for a subgraph's state as of its parent, is
        compared with the ids, as langgraph's savers do: it is returned.
        """
        uid = at.checkpoint_id
        rows = yield self.sql("find_checkpoint", namespace, pack_id(uid))
        if rows and unpack_id(rows[0][1]) != uid:
            raise damaged_index_error(f"checkpoint {uid!r}")
        if rows:
            return rows[0][0] & _LOW, None
        yield from self.reader.check_missing(at)
        return stop, uid

    def _page(self, start: int, stop: int, where: Where) -> Flow[list[Row]]:
        number = number_of(self.seal, where)
        if number is not None:
            yield from self._check_tags(number, start, stop)
            return (yield self.sql("tagged_checkpoints_page", number, start, stop, _PAGE))  # type: ignore[no-any-return]
        rows: list[Row] = yield self.sql("checkpoints_page", start, stop, _PAGE)
        if len(rows) < _PAGE:
            yield from self.reader.check_complete(len(rows), start, stop)
        return rows
