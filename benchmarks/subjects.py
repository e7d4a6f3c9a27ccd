"""Adapters of perdure for the benchmark harness of checkpointers and stores; see README.md here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from perdure.checkpointers import SQLiteCheckpointer
from perdure.stores import SQLiteStore


@asynccontextmanager
async def sqlite(path: str) -> AsyncIterator[SQLiteCheckpointer]:
    async with SQLiteCheckpointer.open(path) as saver:
        yield saver


@asynccontextmanager
async def sqlite_encrypted(path: str) -> AsyncIterator[SQLiteCheckpointer]:
    async with SQLiteCheckpointer.open(path, key=b"0123456789abcdef" * 2) as saver:
        yield saver


@asynccontextmanager
async def sqlite_store(path: str, index: Any) -> AsyncIterator[SQLiteStore]:
    """A store in a file; `index` is langgraph's `IndexConfig`, or None."""
    async with SQLiteStore.open(path, index=index) as store:
        yield store
