"""Finding checkpoints: by thread, namespace, metadata and place, a page at a time.

Each function here yields the flows it wants to be run, a page each, and is sent what they return;
between two pages nothing is held. Whoever drives it runs them with a blocking or an asynchronous
driver (`paged`, `apaged`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any, Final, TypeVar

from langchain_core.runnables import RunnableConfig

from perdure.checkpointers.address import Address, address, optional_text
from perdure.checkpointers.reader import Reader, damaged_index
from perdure.checkpointers.records import pack_id, place, span, tag, tags_of, unpack_id
from perdure.storage.flow import Flow, Row, Statement, rows_of

_PAGE: Final = 256  # rows read at once
_LOW: Final = 0xFFFFFFFF
_ALL: Final = (1 << 63) - 1  # above every key
_ABSENT: Final = object()

T = TypeVar("T")
Pages = Generator[Any, Any, None]
"""Yields flows, and is sent what they return; anything else it yields is a result."""


def paged(pages: Pages, read: Callable[[Flow[Any]], Any]) -> Iterator[Any]:
    """The results of `pages`, each flow run as it comes up."""
    answer = None
    try:
        while True:
            step = pages.send(answer)
            answer = None
            if isinstance(step, GeneratorType):
                answer = read(step)
            else:
                yield step
    except StopIteration:
        return


async def apaged(pages: Pages, aread: Callable[[Flow[Any]], Awaitable[Any]]) -> AsyncIterator[Any]:
    """See `paged`."""
    answer = None
    try:
        while True:
            step = pages.send(answer)
            answer = None
            if isinstance(step, GeneratorType):
                answer = await aread(step)
            else:
                yield step
    except StopIteration:
        return


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


@dataclass(slots=True)
class Listing:
    """Lists checkpoints: the address and key of each.

    Args:
        sql: The statements, by name.
        reader: The flows that read.
    """

    sql: dict[str, str]
    reader: Reader

    def addresses(
        self,
        config: RunnableConfig | None,
        where: Mapping[str, Any] | None,
        before: RunnableConfig | None,
        limit: int | None,
    ) -> Pages:
        """`(address, key)` of every matching checkpoint; see `Checkpointer.list`."""
        left = -1 if limit is None else max(limit, 0)
        found = self._addresses(config, where or {}, before)
        answer = None
        while left:
            try:
                step = found.send(answer)
            except StopIteration:
                return
            answer = yield step
            left -= isinstance(step, tuple)

    def _addresses(
        self, config: RunnableConfig | None, where: Mapping[str, Any], before: RunnableConfig | None
    ) -> Pages:
        if config is None:
            yield from self._everywhere(where, before)
            return
        at = address(config)
        ns = config.get("configurable", {}).get("checkpoint_ns")
        yield from self._in_thread(at.thread_id, ns, where, before, at.checkpoint_id)

    def owners(self, name: str, value: Any) -> Pages:
        """`(thread_id, key)` of every checkpoint with a metadata value."""
        number, last = tag(self.reader.seal, name, value), -1
        if number is None:
            return
        yield self._check_tags(number, 0, _ALL)
        while rows := (yield rows_of(self.sql["tagged"], number, last, _PAGE)):
            for thread_id, ns, *row in rows:
                if row[0] <= last:
                    raise damaged_index(f"the tags of checkpoint {row[0]}")
                last = row[0]
                if matches(self._tagged(thread_id, ns, row, number, True), {name: value}):
                    yield thread_id, last

    def _check_tags(self, number: int, start: int, stop: int) -> Flow[None]:
        """Make sure that a search in the index of metadata ended where it should.

        It ends beside the damaged entry that misled it, if there is one.
        """
        beside = yield Statement(self.sql["tags_beside"], (number, start, stop))
        for indexed, thread_id, ns, *row in beside:
            self._tagged(thread_id, ns, row, number, bool(indexed))

    def _tagged(
        self, thread_id: str | None, ns: str, row: list[Any], number: int, indexed: bool
    ) -> dict[str, Any]:
        """The metadata of a checkpoint, which has a value if it is indexed under it."""
        if thread_id is not None and row[1] is not None:
            metadata = self.reader.metadata(self.reader.open_row(thread_id, ns, tuple(row)))
            if indexed == (number in tags_of(self.reader.seal, metadata)):
                return metadata
        raise damaged_index(f"the tags of checkpoint {row[0]}")

    def _everywhere(self, where: Mapping[str, Any], before: RunnableConfig | None) -> Pages:
        for name, value in where.items():
            if tag(self.reader.seal, name, value) is not None and "." not in name:
                owners = yield from results(self.owners(name, value))
                for thread_id in dict.fromkeys(thread_id for thread_id, _ in owners):
                    yield from self._in_thread(thread_id, None, where, before, None)
                return
        last = 0
        while rows := (yield rows_of(self.sql["thread_ids"], last, _PAGE)):
            for thread, thread_id, indexed in rows:
                if indexed != thread:
                    raise damaged_index(f"thread {thread}")
                yield from self._in_thread(thread_id, None, where, before, None)
            last = rows[-1][0]

    def _in_thread(
        self,
        thread_id: str,
        ns: str | None,
        where: Mapping[str, Any],
        before: RunnableConfig | None,
        only: str | None,
    ) -> Pages:
        listed = yield from self._namespaces(thread_id, ns, before)
        if only is not None:
            yield from self._one(thread_id, listed, where, only)
            return
        while True:
            for each in listed:
                yield from self._fill(thread_id, each, where)
            filled = [each for each in listed if each.rows]
            if not filled:
                return
            newest = max(filled, key=lambda each: each.rows[-1][0] & _LOW)
            row = yield from self._next(thread_id, newest, where)
            if row is not None:
                yield _found(thread_id, newest, row)

    def _namespaces(
        self, thread_id: str, ns: str | None, before: RunnableConfig | None
    ) -> Generator[Any, Any, list[_Namespace]]:
        """The namespaces to be listed, each from where its listing begins."""
        seq, namespaces = yield self._state(thread_id)
        uid = _before(before)
        listed = []
        stop = seq + 1  # what is put from here on is left out
        for key, name, head in namespaces:
            if ns is None or name == ns:
                listed.append(_Namespace(key, name, head, stop))
                yield from self._limit(thread_id, listed[-1], uid)
        return listed

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

    def _state(self, thread_id: str) -> Flow[tuple[int, list[Row]]]:
        """The counter of puts of a thread, and its namespaces."""
        found = yield Statement(self.sql["find_thread"], (thread_id,))
        if not found:
            yield from self.reader.check_missing(Address(thread_id, "", None))
            return 0, []
        thread, seq, _ = found[0]
        namespaces = yield Statement(self.sql["thread_namespaces"], (thread,))
        if any(head > seq for _, _, head in namespaces):
            raise damaged_index(f"the counter of puts of thread {thread_id!r}")
        return seq, namespaces

    def _limit(self, thread_id: str, listed: _Namespace, uid: str | None) -> Pages:
        """Leave out what is not before a checkpoint.

        Of the same namespace: what was put before it. An id of another one, with which langgraph
        asks for a subgraph's state as of its parent, is compared with the ids, as langgraph's
        savers do.
        """
        if uid is None:
            return
        rows = yield rows_of(self.sql["find_checkpoint"], listed.key, pack_id(uid))
        if rows and unpack_id(rows[0][1]) != uid:
            raise damaged_index(f"checkpoint {uid!r}")
        if rows:
            listed.stop = rows[0][0] & _LOW
            listed.head = listed.head if listed.head < listed.stop else 0
        else:
            yield self.reader.check_missing(Address(thread_id, listed.name, uid))
            listed.before = uid

    def _one(
        self, thread_id: str, listed: list[_Namespace], where: Mapping[str, Any], only: str
    ) -> Pages:
        for each in listed:
            for row in (yield rows_of(self.sql["find_checkpoint"], each.key, pack_id(only))):
                if row[0] & _LOW < each.stop and self._wanted(thread_id, each, row, where):
                    yield Address(thread_id, each.name, only), row[0]

    def _fill(self, thread_id: str, listed: _Namespace, where: Mapping[str, Any]) -> Pages:
        """Read the next page of a namespace, unless one is at hand or there is none."""
        while not listed.rows and listed.stop > 0:
            start, stop = span(listed.key, 0, listed.stop)
            rows = yield self._page(start, stop, where)
            keys = [row[0] for row in rows]
            if keys != sorted(set(keys), reverse=True) or any(row[1] is None for row in rows):
                raise damaged_index(f"namespace {listed.key}")
            listed.stop = rows[-1][0] & _LOW if len(rows) == _PAGE else 0
            listed.rows = [
                row for row in reversed(rows) if self._wanted(thread_id, listed, row, where)
            ]

    def _page(self, start: int, stop: int, where: Mapping[str, Any]) -> Flow[list[Row]]:
        """A page of rows whose keys descend."""
        for name, value in where.items():
            number = tag(self.reader.seal, name, value) if "." not in name else None
            if number is not None:
                yield from self._check_tags(number, start, stop)
                return (yield from rows_of(self.sql["tagged_page"], number, start, stop, _PAGE))
        rows = yield from rows_of(self.sql["checkpoints_page"], start, stop, _PAGE)
        if len(rows) < _PAGE:
            yield from self.reader.check_complete(len(rows), start, stop)
        return rows

    def _wanted(
        self, thread_id: str, listed: _Namespace, row: Row, where: Mapping[str, Any]
    ) -> bool:
        if listed.before is not None and not str(unpack_id(row[1])) < listed.before:
            return False
        return not where or self._matches(thread_id, listed.name, row, where)

    def _matches(self, thread_id: str, ns: str, row: Row, where: Mapping[str, Any]) -> bool:
        return matches(self.reader.metadata(self.reader.open_row(thread_id, ns, row)), where)


def _found(thread_id: str, listed: _Namespace, row: Row) -> tuple[Address, int]:
    return Address(thread_id, listed.name, unpack_id(row[1])), row[0]


def _before(config: RunnableConfig | None) -> str | None:
    """The checkpoint_id of a config that needs no thread_id."""
    named = config.get("configurable") if config else None
    return optional_text("checkpoint_id", named.get("checkpoint_id")) if named else None


def results(pages: Pages) -> Generator[Any, Any, list[Any]]:
    """All results of pages at once; the flows go to whoever drives."""
    out: list[Any] = []
    answer = None
    while True:
        try:
            step = pages.send(answer)
        except StopIteration:
            return out
        answer = None
        if isinstance(step, GeneratorType):
            answer = yield step
        else:
            out.append(step)
