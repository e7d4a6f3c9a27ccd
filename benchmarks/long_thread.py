"""Measure the first read and later reads of a long thread, and the waits of the event loop.

A task sleeps for one millisecond at a time; the delay before it is woken shows how long other tasks
have to wait. Objects that exist before the measurement are frozen (`gc.freeze`), as in servers,
because a full garbage collection stops the process for a time that grows with its heap.

    python -m benchmarks.long_thread --messages 5000
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.agents import chat
from benchmarks.common import ON_DISK, SAVERS, Worker, ratio, table

from perdure.checkpointers import SQLiteCheckpointer

CONFIG: Any = {"configurable": {"thread_id": "t"}}
ROUNDS = 7


async def waits(work: Callable[[], Awaitable[Any]]) -> tuple[float, float]:
    """Return the duration of some work and the event loop's longest delay, in milliseconds."""
    late = 0.0

    async def tick() -> None:
        nonlocal late
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            late = max(late, time.perf_counter() - due)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.02)
    late, started = 0.0, time.perf_counter()
    await work()
    took = time.perf_counter() - started
    ticking.cancel()
    return took * 1e3, late * 1e3


class LongThread:
    """A thread with one saver, measured in its own process."""

    def __init__(self, name: str, folder: str) -> None:
        self.name, self.path = name, Path(folder) / f"{name}.db"

    async def fill(self, messages: int) -> None:
        """Store the given number of messages in one update, then run two turns."""
        roles = ("user", "assistant")
        said = [{"role": roles[i % 2], "content": f"{i} " * 50} for i in range(messages)]
        async with SAVERS[self.name](self.path) as saver:
            graph = chat(saver)
            await graph.aupdate_state(CONFIG, {"messages": said}, as_node="model")
            for _ in range(2):
                await graph.ainvoke({"messages": [{"role": "user", "content": "Go on"}]}, CONFIG)

    async def measure(self) -> list[float]:
        """Measure the first read, another read and a list of ten checkpoints, with the waits."""
        async with SAVERS[self.name](self.path) as saver:
            graph = chat(saver)
            gc.collect()
            gc.freeze()

            async def newest() -> None:
                _ = [found async for found in saver.alist(CONFIG, limit=10)]

            first = await waits(lambda: saver.aget_tuple(CONFIG))
            again = await waits(lambda: saver.aget_tuple(CONFIG))
            asked = {"messages": [{"role": "user", "content": "Go on"}]}
            turn = await waits(lambda: graph.ainvoke(asked, CONFIG))
            listed = [await waits(newest) for _ in range(ROUNDS)]
            ten = statistics.median(took for took, _ in listed)
            return [
                first[0],
                ten,
                max(first[1], again[1]),
                turn[1],
                max(late for _, late in listed),
            ]

    async def erase(self) -> tuple[float, float]:
        """Measure the erasure of a message, and the longest wait of the event loop during it."""
        async with SQLiteCheckpointer.open(self.path) as saver:
            held = await saver.aget_tuple(CONFIG)
            assert held is not None
            uid = held.checkpoint["channel_values"]["messages"][5].id
            return await waits(lambda: saver.aerase("t", [uid]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=5000)
    args = parser.parse_args()
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ON_DISK:
            for method, given in (("fill", [args.messages]), ("measure", [])):
                worker = Worker(partial(LongThread, name, folder))
                found[name] = worker.call(method, *given)
                if method == "measure" and name == "perdure":
                    erasing = worker.call("erase")
                worker.stop()
    base = found[ON_DISK[0]]
    rows = [[name, *map(ratio, row, base)] for name, row in found.items()]
    columns = ["", "first get, ms", "newest ten, ms", "wait: get, ms", "a turn", "newest ten"]
    table(f"a thread of {args.messages} messages", columns, rows)
    print("perdure, erasing a message: {:.0f} ms, wait {:.0f} ms".format(*erasing))


if __name__ == "__main__":
    main()
