"""An SQLite file of another application, opened for reading only."""

from __future__ import annotations

import asyncio
import os
import sqlite3

from perdure.storage.flow import Flow, T
from perdure.storage.sqlite_connection import Connector, check_name, check_path, mapped
from perdure.storage.sqlite_readers import AsyncReaders, Readers

_TIMEOUT_S = 30.0


class SQLiteSource:
    """Reads a file that is not perdure's, a flow at a time.

    Args:
        path: The file.

    Raises:
        ConfigurationError: There is no such file, or the path is none.
        NotADatabase: It is a folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = check_name(path, read_only=True)
        check_path(self.path, read_only=True)
        connector = Connector(self.path, "full", True, _TIMEOUT_S, sqlite3.Connection)
        self._readers = Readers(connector)
        self._async_readers = AsyncReaders(connector, asyncio.to_thread)

    def read(self, flow: Flow[T]) -> T:
        """Run a flow that reads, in the calling thread."""
        with mapped(self.path):
            return self._readers.read(flow, snapshot=False)

    async def aread(self, flow: Flow[T]) -> T:
        """Run a flow that reads, each statement awaited."""
        return await self._async_readers.read(flow, snapshot=False)

    def close(self) -> None:
        """Close the file."""
        self._readers.close()
        self._async_readers.close()
