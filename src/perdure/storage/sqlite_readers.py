"""Reading connections: one for each thread, or event loop's task, that is reading."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import aiosqlite

from perdure.errors import StorageUnavailable
from perdure.storage.flow import Flow, Request, T, arun
from perdure.storage.sqlite_connection import Connector, mapped, perform

_AT_ONCE: Final = 4  # tasks of an event loop that read at a moment: each has a thread
_CHUNK: Final = 64  # rows; not used, as whole pages are fetched


class Readers:
    """Connections for threads."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._idle: list[sqlite3.Connection] = []
        self._lent = 0
        self._closed = False
        self._changed = threading.Condition()

    def read(self, flow: Flow[T], *, snapshot: bool) -> T:
        """See `Database.read`."""
        with self._changed:
            if self._closed:
                raise StorageUnavailable(f"the database {self._connector.path!r} is closed")
            self._lent += 1
            conn = self._idle.pop() if self._idle else None
        try:
            conn = conn or self._connector.reader()
            return perform(conn, flow, snapshot=snapshot)
        finally:
            usable = conn is not None and _usable(conn)
            with self._changed:
                if conn is not None and usable:
                    self._idle.append(conn)
                self._lent -= 1
                if self._closed:
                    self._changed.notify_all()

    def close(self) -> None:
        """Close them, once the threads that read have finished; later ones are refused."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._lent == 0)
            while self._idle:
                self._idle.pop().close()


def _usable(conn: sqlite3.Connection) -> bool:
    """Whether a connection is out of its transaction; if it cannot be brought out, it is closed."""
    with suppress(sqlite3.Error):
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        return True
    conn.close()
    return False


class AsyncReaders:
    """Connections of aiosqlite, for tasks of any event loop.

    Args:
        connector: Opens them.
        in_thread: Runs a function in a daemon thread. aiosqlite's threads are daemons if they are
            made in one, and only then can a process end that forgets to close its database.
    """

    def __init__(
        self,
        connector: Connector,
        in_thread: Callable[[Callable[[], aiosqlite.Connection]], Awaitable[aiosqlite.Connection]],
    ) -> None:
        self._connector = connector
        self._in_thread = in_thread
        self._idle: list[aiosqlite.Connection] = []
        self._closed = False
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

    async def read(self, flow: Flow[T], *, snapshot: bool) -> T:
        """See `Database.aread`."""
        loop = asyncio.get_running_loop()
        turns = self._turns.setdefault(loop, asyncio.Semaphore(_AT_ONCE))
        with mapped(self._connector.path):
            async with turns:
                while not self._idle:
                    await asyncio.shield(self._add())  # its thread answers to this event loop
                conn = self._idle.pop()
                try:
                    if snapshot:
                        await conn.execute_fetchall("BEGIN")
                    return await arun(flow, partial(_execute, conn))
                finally:
                    await asyncio.shield(self._take_back(conn))

    async def _add(self) -> None:
        made = self._in_thread(lambda: aiosqlite.Connection(self._connector.reader, _CHUNK))
        self._idle.append(await (await made))

    async def _take_back(self, conn: aiosqlite.Connection) -> None:
        """Also wait for a statement that was cancelled: its thread answers to this event loop."""
        try:
            await conn.rollback()
        except sqlite3.Error:
            await conn.close()
            return
        self._idle.append(conn)
        if self._closed:
            await self._close_idle()

    async def _close_idle(self) -> None:
        while self._idle:
            await self._idle.pop().close()

    def close(self) -> None:
        """Close those that nobody uses; the others are closed when their tasks have read."""
        self._closed = True
        if self._idle:  # by an event loop of its own: the calling thread's may be running
            thread = threading.Thread(target=lambda: asyncio.run(self._close_idle()))
            thread.start()
            thread.join()


async def _execute(conn: aiosqlite.Connection, request: Request) -> Any:
    if isinstance(request, list):
        return [await _execute(conn, statement) for statement in request]
    return list(await conn.execute_fetchall(request.sql, request.params))
