"""perdure as a subject of the checkpointer benchmark harness (see README.md here)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from perdure.checkpointers import SQLiteCheckpointer


@asynccontextmanager
async def sqlite(path: str) -> AsyncIterator[SQLiteCheckpointer]:
    async with SQLiteCheckpointer.open(path) as saver:
        yield saver


@asynccontextmanager
async def sqlite_encrypted(path: str) -> AsyncIterator[SQLiteCheckpointer]:
    async with SQLiteCheckpointer.open(path, key=b"0123456789abcdef" * 2) as saver:
        yield saver
