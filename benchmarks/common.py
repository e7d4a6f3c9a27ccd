"""Helpers shared by the checkpointer benchmarks: savers, processes, sizes and tables."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import sqlite3
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from perdure.checkpointers import SQLiteCheckpointer

Saver = BaseCheckpointSaver[Any]
WORDS = ("order", "refund", "budget", "pipeline", "invoice", "renewal", "schema", "agent", "ticket")


# -- savers


class References:
    """A serializer that returns the object itself, so that a saver costs almost nothing."""

    def dumps_typed(self, obj: Any) -> tuple[str, Any]:
        return "reference", obj

    def loads_typed(self, data: tuple[str, Any]) -> Any:
        return data[1]


@asynccontextmanager
async def perdure(path: Path) -> AsyncIterator[Saver]:
    async with SQLiteCheckpointer(path) as saver:
        yield saver


@asynccontextmanager
async def peer(path: Path) -> AsyncIterator[Saver]:
    async with AsyncSqliteSaver.from_conn_string(str(path)) as saver:
        await saver.setup()
        yield saver


@asynccontextmanager
async def memory(path: Path) -> AsyncIterator[Saver]:
    yield InMemorySaver()


@asynccontextmanager
async def loop(path: Path) -> AsyncIterator[Saver]:
    yield InMemorySaver(serde=References())


SAVERS: dict[str, Callable[[Path], AbstractAsyncContextManager[Saver]]] = {
    "AsyncSqliteSaver": peer,
    "perdure": perdure,
    "InMemorySaver": memory,
    "loop alone": loop,
}
ON_DISK = ("AsyncSqliteSaver", "perdure")  # ratios are to the first


def bytes_in(path: Path) -> int:
    """Return the bytes in use in an SQLite file, including its WAL, or 0 without a file."""
    if not path.exists():
        return 0
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as conn:
        of = {
            name: conn.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_size", "page_count", "freelist_count")
        }
    return int((of["page_count"] - of["freelist_count"]) * of["page_size"])


# -- processes


class Worker:
    """A process with an event loop in which methods of an object can be called.

    The event loop stands still between two calls, so work that a saver defers is measured too.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make), daemon=True)
        self._process.start()

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object in the process, and return its result.

        Raises:
            RuntimeError: It raised; the message has its traceback.
        """
        self._pipe.send((method, args))
        error, result = self._pipe.recv()
        if error:
            raise RuntimeError(error)
        return result

    def stop(self) -> None:
        self._pipe.send(None)
        self._process.join()


def _serve(pipe: Any, make: Callable[[], Any]) -> None:
    async def serve() -> None:
        subject = make()
        while (request := pipe.recv()) is not None:
            method, args = request
            try:
                pipe.send(("", await getattr(subject, method)(*args)))
            except Exception:
                pipe.send((traceback.format_exc(), None))

    asyncio.run(serve())


# -- texts and tables


def text(seed: object, length: int) -> str:
    """Return random words and numbers of the given total length; equal seeds give equal texts."""
    rng = random.Random(str(seed))
    words = [f"{rng.choice(WORDS)}{rng.randrange(10_000)}" for _ in range(length // 5 + 1)]
    return " ".join(words)[:length]


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a Markdown table."""
    lines = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(columns), *lines]) for i in range(len(columns))]
    print(f"\n{title}\n")
    for line in [list(columns), ["-" * w for w in widths], *lines]:
        print("| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |")


def ratio(value: float, base: float) -> str:
    """Format a number, with its ratio to that of the first subject."""
    number = f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return f"{number} ({value / base:.2f}x)" if base else number
