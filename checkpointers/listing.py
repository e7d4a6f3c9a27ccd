"""Finding checkpoints: by thread, namespace, metadata and place, a page at a time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, Final

from langchain_core.runnables import RunnableConfig

from perdure.checkpointers.base import Address, address, check_thread_id
from perdure.checkpointers.reading import Reader
from perdure.checkpointers.records import pack_id, tag, unpack_id
from perdure.checkpointers.schema import span
from perdure.storage.flow import Flow, Row, rows_of

_PAGE: Final = 256  # rows read at once
_LOW: Final = 0xFFFFFFFF


@dataclass(slots=True)
class Listing:
    """Lists without holding anything open in between.

    Args:
        sql: The statements, by name.
        reader: The flows that read.
        read: Runs one.
    """

    sql: dict[str, str]
    reader: Reader
    read: Callable[[Flow[Any]], Any]

    def addresses(
        self,
        config: RunnableConfig | None,
        where: Mapping[str, Any] | None,
        before: RunnableConfig | None,
        limit: int | None,
    ) -> Iterator[Address]:
        """Where the matching checkpoints are, newest first; see `LogSaver.list`."""
        if limit is not None and limit <= 0:
            return iter(())
        if config is None:
            return islice(self._everywhere(where or {}, before), limit)
        at = address(config)
        configurable = config.get("configurable", {})
        ns = configurable.get("checkpoint_ns")
        found = self._in_thread(at.thread_id, ns, where or {}, before, at.checkpoint_id)
        return islice(found, limit)

    def keys_with(self, name: str, value: Any) -> Iterator[tuple[str, int]]:
        """`(thread_id, key)` of every checkpoint with a metadata value."""
        number = tag(self.reader.seal, name, value)
        rows = self._all("tagged", number) if number is not None else []
        for line, keys in groupby((key for (key,) in rows), lambda key: key >> 32):
            owner = self._all("thread_of_line", line)
            for key in keys:
                if self._matches(owner[0][0], owner[0][1], key, {name: value}):
                    yield owner[0][0], key

    def _all(self, name: str, *params: Any) -> list[Row]:
        rows: list[Row] = self.read(rows_of(self.sql[name], *params))
        return rows

    def _everywhere(
        self, where: Mapping[str, Any], before: RunnableConfig | None
    ) -> Iterator[Address]:
        tagged = [(k, v) for k, v in where.items() if tag(self.reader.seal, k, v) is not None]
        if tagged:
            owners = dict.fromkeys(thread_id for thread_id, _ in self.keys_with(*tagged[0]))
            for thread_id in owners:
                yield from self._in_thread(thread_id, None, where, before, None)
            return
        last = 0
        while rows := self._all("thread_ids", last, _PAGE):
            for _, thread_id in rows:
                yield from self._in_thread(thread_id, None, where, before, None)
            last = rows[-1][0]

    def _in_thread(
        self,
        thread_id: str,
        ns: str | None,
        where: Mapping[str, Any],
        before: RunnableConfig | None,
        only: str | None,
    ) -> Iterator[Address]:
        found = self._all("find_thread", check_thread_id(thread_id))
        if not found:
            return
        lines = [
            (line, name)
            for line, name, _ in self._all("thread_lines", found[0][0])
            if ns is None or name == ns
        ]
        below = self._place_of(lines, before)
        if below is None:
            return
        runs = [self._line(thread_id, line, name, where, below) for line, name in lines]
        for _, name, uid in heapq.merge(*runs, key=lambda at: -at[0]):
            if only is None or uid == only:
                yield Address(thread_id, name, uid)

    def _place_of(self, lines: list[tuple[int, str]], before: RunnableConfig | None) -> int | None:
        """The place below which to list; None when `before` is not a checkpoint of the thread."""
        uid = before["configurable"].get("checkpoint_id") if before else None
        if uid is None:
            return _LOW
        for line, _ in lines:
            rows = self._all("find_checkpoint", line, pack_id(uid))
            if rows:
                return int(rows[0][0]) & _LOW
        return None

    def _line(
        self, thread_id: str, line: int, ns: str, where: Mapping[str, Any], below: int
    ) -> Iterator[tuple[int, str, str]]:
        for key, uid in self._candidates(line, where, below):
            if not where or self._matches(thread_id, ns, key, where):
                yield key & _LOW, ns, uid

    def _candidates(
        self, line: int, where: Mapping[str, Any], below: int
    ) -> Iterator[tuple[int, str]]:
        for name, value in where.items():
            number = tag(self.reader.seal, name, value)
            if number is not None:
                for (key,) in self._all("tagged_in", number, *span(line, 0, below)):
                    rows = self._all("checkpoint_at", key)
                    if rows:
                        yield key, unpack_id(rows[0][1]) or ""
                return
        start, stop = span(line, 0, below)
        while rows := self._all("line_page", start, stop, _PAGE):
            for key, uid in rows:
                yield key, unpack_id(uid) or ""
            stop = rows[-1][0]

    def _matches(self, thread_id: str, ns: str, key: int, where: Mapping[str, Any]) -> bool:
        rows = self._all("checkpoint_at", key)
        if not rows:
            return False
        metadata = self.reader.metadata(self.reader.open_row(thread_id, ns, rows[0]))
        return all(metadata.get(name) == value for name, value in where.items())
