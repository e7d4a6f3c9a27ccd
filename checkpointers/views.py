"""What perdure shows of threads beyond langgraph's contract: threads, trees, history, sizes."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from operator import index
from typing import Any

from perdure.checkpointers.base import (
    Address,
    CheckpointInfo,
    HistoryItem,
    ThreadInfo,
    check_thread_id,
)
from perdure.checkpointers.engine import Engine
from perdure.checkpointers.manifest import contains, count, covered, positions
from perdure.checkpointers.schema import place, span
from perdure.errors import ConfigurationError, UnknownCheckpoint, UnknownThread
from perdure.storage.flow import Flow, Row, Statement, rows_of

_SOON = float("inf")


class Views(Engine):
    """The looking part of a checkpointer; it reads and never writes."""

    # -- what was said

    def history(
        self,
        thread_id: str,
        *,
        channel: str = "messages",
        checkpoint_id: str | None = None,
        checkpoint_ns: str = "",
        ends: tuple[int, int] | None = None,
    ) -> list[HistoryItem]:
        """Everything said on the way to a checkpoint, in order, whatever was removed since.

        Args:
            thread_id: The thread.
            channel: A channel that holds a list or dict.
            checkpoint_id: The way to this one; None: to the head.
            checkpoint_ns: The namespace of a subgraph; `""` is the root graph.
            ends: Only so many items from the beginning, and from the end: `(0, 50)`, the newest 50.
                What is between is not read. None: all.

        Raises:
            ConfigurationError: `ends` is no pair of counts.
            UnknownThread: There is no such thread or namespace.
            UnknownCheckpoint: It has no such checkpoint.
        """
        at = Address(check_thread_id(thread_id), checkpoint_ns, checkpoint_id)
        found = self._read(self._reader.said(at, channel, None if ends is None else _pair(ends)))
        if found is None:
            if checkpoint_id is not None:
                raise UnknownCheckpoint(f"thread {thread_id!r} has no checkpoint {checkpoint_id!r}")
            raise _no_thread(thread_id, checkpoint_ns)
        values, ranges, shown = found
        seen = covered(shown)
        return [
            HistoryItem(value, contains(seen, position), position)
            for value, position in zip(values, positions(ranges), strict=True)
        ]

    async def ahistory(
        self,
        thread_id: str,
        *,
        channel: str = "messages",
        checkpoint_id: str | None = None,
        checkpoint_ns: str = "",
        ends: tuple[int, int] | None = None,
    ) -> list[HistoryItem]:
        """See `history`."""
        return await asyncio.to_thread(
            self.history,
            thread_id,
            channel=channel,
            checkpoint_id=checkpoint_id,
            checkpoint_ns=checkpoint_ns,
            ends=ends,
        )

    # -- threads

    def threads(
        self, *, limit: int = 50, after: str | None = None, prefix: str = ""
    ) -> list[ThreadInfo]:
        """A page of threads, the latest activity first.

        Args:
            limit: At most so many.
            after: The thread_id that ended the page before.
            prefix: Only threads whose id begins with it.

        Raises:
            ConfigurationError: The limit is not positive.
            UnknownThread: `after` names no thread.
        """
        if limit <= 0:
            raise ConfigurationError(f"limit is {limit!r}; expected at least 1")
        return self._read(self._threads(limit, after, prefix))

    async def athreads(
        self, *, limit: int = 50, after: str | None = None, prefix: str = ""
    ) -> list[ThreadInfo]:
        """See `threads`."""
        return await asyncio.to_thread(self.threads, limit=limit, after=after, prefix=prefix)

    def thread(self, thread_id: str) -> ThreadInfo:
        """One thread.

        Raises:
            UnknownThread: There is none by that id.
        """

        def flow() -> Flow[ThreadInfo]:
            rows = yield Statement(self._sql["one_thread"], (check_thread_id(thread_id),))
            if not rows:
                raise _no_thread(thread_id)
            return (yield from self._info(rows[0]))

        return self._read(flow())

    async def athread(self, thread_id: str) -> ThreadInfo:
        """See `thread`."""
        return await asyncio.to_thread(self.thread, thread_id)

    def _threads(self, limit: int, after: str | None, prefix: str) -> Flow[list[ThreadInfo]]:
        last = (_SOON, 0)
        if after is not None:
            rows = yield Statement(self._sql["one_thread"], (after,))
            if not rows:
                raise _no_thread(after)
            last = (rows[0][6], rows[0][0])
        rows = yield Statement(self._sql["list_threads"], (*last, prefix, prefix, limit))
        out = []
        for row in rows:
            out.append((yield from self._info(row)))
        return out

    def _info(self, row: Row) -> Flow[ThreadInfo]:
        thread, thread_id, checkpoints, items, size, created_at, updated_at = row
        lines = yield Statement(self._sql["thread_lines"], (thread,))
        return ThreadInfo(
            thread_id,
            checkpoints,
            items,
            size,
            datetime.fromtimestamp(created_at, UTC),
            datetime.fromtimestamp(updated_at, UTC),
            tuple(ns for _, ns, _ in lines),
        )

    # -- checkpoints

    def checkpoints(
        self, thread_id: str, *, checkpoint_ns: str | None = None, limit: int | None = None
    ) -> list[CheckpointInfo]:
        """The checkpoints of a thread without their values, the last put first.

        Args:
            thread_id: The thread.
            checkpoint_ns: Only this namespace; None: all of them.
            limit: At most so many of each namespace.

        Raises:
            UnknownThread: There is none by that id.
        """
        return self._read(self._checkpoints(check_thread_id(thread_id), checkpoint_ns, limit))

    async def acheckpoints(
        self, thread_id: str, *, checkpoint_ns: str | None = None, limit: int | None = None
    ) -> list[CheckpointInfo]:
        """See `checkpoints`."""
        return await asyncio.to_thread(
            self.checkpoints, thread_id, checkpoint_ns=checkpoint_ns, limit=limit
        )

    def _checkpoints(
        self, thread_id: str, checkpoint_ns: str | None, limit: int | None
    ) -> Flow[list[CheckpointInfo]]:
        rows = yield Statement(self._sql["find_thread"], (thread_id,))
        if not rows:
            raise _no_thread(thread_id)
        out: list[CheckpointInfo] = []
        for line, ns, head in (yield Statement(self._sql["thread_lines"], (rows[0][0],))):
            if checkpoint_ns is None or ns == checkpoint_ns:
                page = (*span(line), -1 if limit is None else limit)
                for row in (yield Statement(self._sql["line_checkpoints"], page)):
                    is_head = row[0] == place(line, head)
                    out.append((yield from self._checkpoint(thread_id, ns, row, is_head)))
        return sorted(out, key=lambda info: -info.order)

    def _checkpoint(self, thread_id: str, ns: str, row: Row, is_head: bool) -> Flow[CheckpointInfo]:
        snapshot = yield from self._reader.info(thread_id, ns, row)
        fields: dict[str, Any] = self._reader.codec.decode(snapshot.fields[0])
        return CheckpointInfo(
            snapshot.uid,
            snapshot.parent,
            ns,
            row[0] & 0xFFFFFFFF,
            is_head,
            self._reader.metadata(snapshot),
            str(fields.get("ts", "")),
            {channel: count(ranges) for channel, (_, ranges) in snapshot.ranges.items()},
        )

    # -- the database

    def stats(self) -> dict[str, Any]:
        """Sizes in bytes, counts, and the SQLite that is in use."""
        file = self.database.stats()
        (row,) = self._read(rows_of(self._sql["totals"]))
        threads, checkpoints, items, content = row
        return {
            **file,
            "threads": threads,
            "checkpoints": checkpoints,
            "items": items,
            "content_bytes": content,
        }

    async def astats(self) -> dict[str, Any]:
        """See `stats`."""
        return await asyncio.to_thread(self.stats)


def _pair(ends: Any) -> tuple[int, int]:
    try:
        first, last = map(index, ends)
    except (TypeError, ValueError):
        first = last = -1
    if first < 0 or last < 0:
        raise ConfigurationError(
            f"ends is {ends!r:.80}; expected how many items from the beginning and how many from "
            "the end, like (0, 50)"
        )
    return first, last


def _no_thread(thread_id: str, ns: str = "") -> UnknownThread:
    within = f" with the namespace {ns!r}" if ns else ""
    return UnknownThread(f"there is no thread {thread_id!r}{within}; threads() lists them")
