"""Lists of checkpoints by thread, namespace, metadata and place, a page at a time.

A listing yields the flows it wants to be run, a page each, and is sent what they return; between
two pages nothing is held. `paged` runs them with a blocking driver, `apaged` with an asynchronous.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any, Final

from langchain_core.runnables import RunnableConfig

from perdure.checkpointers.address import Address, address, optional_text
from perdure.checkpointers.reader import Reader, damaged_index
from perdure.checkpointers.records import pack_id, place, span, tag, tags_of, unpack_id
from perdure.storage.flow import Flow, Row, rows_of

_PAGE: Final = 256  # rows read at once
_LOW: Final = 0xFFFFFFFF
_ALL: Final = (1 << 63) - 1  # above every key
_ABSENT: Final = object()

Pages = Generator[Any, Any, None]
"""Yields flows, and is sent what they return; anything else it yields is a result."""


def paged(
    pages: Pages, read: Callable[[Flow[Any]], Any], limit: int | None = None
) -> Iterator[Any]:
    """The results of `pages`, at most so many, each flow run as it comes up."""
    answer, left = None, -1 if limit is None else max(limit, 0)
    with suppress(StopIteration):
        while left:
            step = pages.send(answer)
            answer = read(step) if isinstance(step, GeneratorType) else None
            if not isinstance(step, GeneratorType):
                yield step
                left -= 1


async def apaged(
    pages: Pages, aread: Callable[[Flow[Any]], Awaitable[Any]], limit: int | None = None
) -> AsyncIterator[Any]:
    """See `paged`."""
    answer, left = None, -1 if limit is None else max(limit, 0)
    with suppress(StopIteration):
        while left:
            step = pages.send(answer)
            answer = await aread(step) if isinstance(step, GeneratorType) else None
            if not isinstance(step, GeneratorType):
                yield step
                left -= 1


def matches(metadata: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    """Whether metadata has all of these values; a dotted key also names a value within a dict."""
    return all(_at(metadata, name) == value for name, value in where.items())


def _at(metadata: Mapping[str, Any], name: str) -> Any:
    if name in metadata or "." not in name:
        return metadata.get(name)
    at: Any = metadata
    for part in name.split("."):
        at = at.get(part, _ABSENT) if isinstance(at, Mapping) else _ABSENT
    return None if at is _ABSENT else at


@dataclass(slots=True)
class _Namespace:
    """A namespace that is being listed: its rows below `stop` are still to be read."""

    key: int
    name: str
    head: int  # listed before the others, 0 once that is done
    stop: int
    before: str | None = None  # only ids that sort before it
    listed: int = 0  # the head, if it was listed before its turn
    rows: list[Row] = field(default_factory=list)  # read already, the next one last


class Listing:
    """Lists checkpoints."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self.sql, self.seal = reader, reader.sql, reader.seal

    def addresses(
        self,
        config: RunnableConfig | None,
        where: Mapping[str, Any] | None,
        before: RunnableConfig | None,
    ) -> Pages:
        """`(address, key)` of every matching checkpoint; see `Checkpointer.list`."""
        where = where or {}
        named = before.get("configurable") if before else None  # it needs no thread_id
        uid = optional_text("checkpoint_id", named.get("checkpoint_id")) if named else None
        if config is not None:
            at = address(config)
            ns = config.get("configurable", {}).get("checkpoint_ns")
            yield from self._in_thread(at.thread_id, ns, where, uid, at.checkpoint_id)
            return
        owners = yield self.owners(where)
        if owners is not None:
            for thread_id in dict.fromkeys(thread_id for thread_id, _ in owners):
                yield from self._in_thread(thread_id, None, where, uid, None)
            return
        last = 0
        while rows := (yield rows_of(self.sql["thread_ids"], last, _PAGE)):
            for thread, thread_id, indexed in rows:
                if indexed != thread:
                    raise damaged_index(f"thread {thread}")
                yield from self._in_thread(thread_id, None, where, uid, None)
            last = rows[-1][0]

    # -- by the index of metadata

    def owners(self, where: Mapping[str, Any]) -> Flow[list[tuple[str, int]] | None]:
        """`(thread_id, key)` of every checkpoint that matches; None: no index tells."""
        number, last = self._number(where), -1
        if number is None:
            return None
        yield from self._check_tags(number, 0, _ALL)
        out = []
        while rows := (yield self.sql("tagged", number, last, _PAGE)):
            for thread_id, ns, *row in rows:
                if row[0] <= last:
                    raise damaged_index(f"the tags of checkpoint {row[0]}")
                last = row[0]
                if matches(self._tagged(thread_id, ns, row, number, True), where):
                    out.append((thread_id, last))
        return out

    def _number(self, where: Mapping[str, Any]) -> int | None:
        """The number under which the first value that is indexed is."""
        numbers = (tag(self.seal, name, where[name]) for name in where if "." not in name)
        return next((number for number in numbers if number is not None), None)

    def _check_tags(self, number: int, start: int, stop: int) -> Flow[None]:
        """Make sure that a search in the index of metadata ended where it should.

        It ends beside the damaged entry that misled it, if there is one.
        """
        for indexed, thread_id, ns, *row in (yield self.sql("tags_beside", number, start, stop)):
            self._tagged(thread_id, ns, row, number, bool(indexed))

    def _tagged(
        self, thread_id: str | None, ns: str, row: list[Any], number: int, indexed: bool
    ) -> dict[str, Any]:
        """The metadata of a checkpoint, which has a value if it is indexed under it."""
        if thread_id is not None and row[1] is not None:
            metadata = self.reader.metadata(self.reader.open_row(thread_id, ns, tuple(row)))
            if indexed == (number in tags_of(self.seal, metadata)):
                return metadata
        raise damaged_index(f"the tags of checkpoint {row[0]}")

    # -- within a thread

    def _in_thread(
        self,
        thread_id: str,
        ns: str | None,
        where: Mapping[str, Any],
        before: str | None,
        only: str | None,
    ) -> Pages:
        seq, namespaces = yield self._state(thread_id)
        # what is put from here on is left out
        listed = [
            _Namespace(key, name, head, seq + 1)
            for key, name, head in namespaces
            if ns is None or name == ns
        ]
        for each in listed:
            if before is not None:
                yield self._limit(thread_id, each, before)
            if only is not None:
                for row in (yield rows_of(self.sql["find_checkpoint"], each.key, pack_id(only))):
                    if row[0] & _LOW < each.stop and self._wanted(thread_id, each, row, where):
                        yield Address(thread_id, each.name, only), row[0]
        while only is None:
            for each in listed:
                yield from self._fill(thread_id, each, where)
            filled = [each for each in listed if each.rows]
            if not filled:
                return
            newest = max(filled, key=lambda each: each.rows[-1][0] & _LOW)
            row = yield from self._next(thread_id, newest, where)
            if row is not None:
                yield Address(thread_id, newest.name, unpack_id(row[1])), row[0]

    def _state(self, thread_id: str) -> Flow[tuple[int, list[Row]]]:
        """The counter of puts of a thread, and its namespaces."""
        found = yield self.sql("find_thread", thread_id)
        if not found:
            yield from self.reader.check_missing(Address(thread_id, "", None))
            return 0, []
        thread, seq, _ = found[0]
        namespaces = yield self.sql("thread_namespaces", thread)
        if any(head > seq for _, _, head in namespaces):
            raise damaged_index(f"the counter of puts of thread {thread_id!r}")
        return seq, namespaces

    def _limit(self, thread_id: str, listed: _Namespace, uid: str) -> Flow[None]:
        """Leave out what is not before a checkpoint.

        Of the same namespace: what was put before it. An id of another one, with which langgraph
        asks for a subgraph's state as of its parent, is compared with the ids, as langgraph's
        savers do.
        """
        rows = yield self.sql("find_checkpoint", listed.key, pack_id(uid))
        if rows and unpack_id(rows[0][1]) != uid:
            raise damaged_index(f"checkpoint {uid!r}")
        if rows:
            listed.stop = rows[0][0] & _LOW
            listed.head = listed.head if listed.head < listed.stop else 0
        else:
            yield from self.reader.check_missing(Address(thread_id, listed.name, uid))
            listed.before = uid

    def _next(
        self, thread_id: str, listed: _Namespace, where: Mapping[str, Any]
    ) -> Generator[Any, Any, Row | None]:
        """The next row of a namespace that has some: its head first, whenever it was put."""
        head, listed.head = listed.head, 0
        if head and head != listed.rows[-1][0] & _LOW:
            for row in (yield rows_of(self.sql["checkpoint_at"], place(listed.key, head))):
                if self._wanted(thread_id, listed, row, where):
                    listed.listed = head
                    return row  # type: ignore[no-any-return]
        row = listed.rows.pop()
        return None if row[0] & _LOW == listed.listed else row

    def _fill(self, thread_id: str, listed: _Namespace, where: Mapping[str, Any]) -> Pages:
        """Read the next page of a namespace, unless one is at hand or there is none."""
        while not listed.rows and listed.stop > 0:
            rows = yield self._page(*span(listed.key, 0, listed.stop), where)
            keys = [row[0] for row in rows]
            if keys != sorted(set(keys), reverse=True) or any(row[1] is None for row in rows):
                raise damaged_index(f"namespace {listed.key}")
            listed.stop = rows[-1][0] & _LOW if len(rows) == _PAGE else 0
            rows.reverse()
            listed.rows = [row for row in rows if self._wanted(thread_id, listed, row, where)]

    def _page(self, start: int, stop: int, where: Mapping[str, Any]) -> Flow[list[Row]]:
        """A page of rows whose keys descend."""
        number = self._number(where)
        if number is not None:
            yield from self._check_tags(number, start, stop)
            return (yield self.sql("tagged_page", number, start, stop, _PAGE))  # type: ignore[no-any-return]
        rows: list[Row] = yield self.sql("checkpoints_page", start, stop, _PAGE)
        if len(rows) < _PAGE:
            yield from self.reader.check_complete(len(rows), start, stop)
        return rows

    def _wanted(
        self, thread_id: str, listed: _Namespace, row: Row, where: Mapping[str, Any]
    ) -> bool:
        if listed.before is not None and not str(unpack_id(row[1])) < listed.before:
            return False
        if not where:
            return True
        return matches(
            self.reader.metadata(self.reader.open_row(thread_id, listed.name, row)), where
        )
