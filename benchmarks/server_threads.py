"""Searches of threads as the server makes them, over many, in a file or an empty Postgres.

python benchmarks/server_threads.py [THREADS] [DSN]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.base import empty_checkpoint

from perdure.checkpointers import open_checkpointer
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.server.threads import Threads
from perdure.stores import open_store
from perdure.stores.whole_store import WholeStore

USERS, EVERY = 100, 200  # users of the threads; one in so many threads has no turn
UNSTARTED = 1_000  # more of these, at the end


async def fill(saver: Checkpointer, threads: Threads, many: int) -> None:
    """Make threads: half of them by the server, half by another program."""
    for number in range(many):
        thread_id = f"thread-{number}"
        if number % 2:
            about = {"label": f"label {number}", "place": {"row": number % 1000}}
            await threads.create(thread_id, about)
        if number % EVERY == 1:
            continue
        checkpoint = empty_checkpoint()
        said = [HumanMessage(f"question {number}", id="q"), AIMessage("answer", id="a")]
        checkpoint["channel_values"] = {"messages": said}
        checkpoint["channel_versions"] = {"messages": 1}
        metadata: Any = {"source": "loop", "step": 1, "user_id": f"user{number % USERS}"}
        metadata |= {"title": f"conversation {number}", "graph_id": "chat"}
        config: Any = {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}
        await saver.aput(config, checkpoint, metadata, {"messages": 1})


async def timed(name: str, make: Callable[[], Awaitable[list[Any]]], runs: int) -> None:
    """Print how long a search takes, also of the processor, and how many threads it finds."""
    times = []
    for _ in range(runs):
        start, cpu = time.perf_counter(), time.process_time()
        found = await make()
        times.append((time.perf_counter() - start, time.process_time() - cpu))
    wall, cpu = (sorted(each)[runs // 2] * 1000 for each in zip(*times, strict=True))
    print(f"{name:28} {wall:8.1f} ms, {cpu:8.1f} ms of the processor, {len(found)} found")


async def measure(threads: Threads, saver: Checkpointer, store: WholeStore, many: int) -> None:
    """Print how long searches take."""
    own = Threads(saver, store, {"owner": "user7"})
    nobody = Threads(saver, store, {"owner": "nobody"})
    await timed("newest 20", lambda: threads.search(limit=20), 21)
    await timed("20 of one of 100 users", lambda: own.search(limit=20), 5)
    await timed("of a user without threads", lambda: nobody.search(limit=20), 3)
    await timed("20 by text", lambda: threads.search(text="ion 77", limit=20), 3)
    rare = {"label": "label 1"}
    await timed("the oldest, by metadata", lambda: threads.search(metadata=rare), 3)
    nested = {"place": {"row": 77}}
    await timed("50 by nested metadata", lambda: threads.search(metadata=nested, limit=50), 3)
    by_id: Any = {"sort_by": "thread_id", "sort_order": "asc", "limit": 50}
    await timed("50 in the order of ids", lambda: threads.search(**by_id), 3)
    await timed("20 after half of all", lambda: threads.search(limit=20, offset=many // 2), 3)
    named = [f"thread-{number}" for number in range(20)]
    await timed("20 by id", lambda: threads.search(ids=named, limit=20), 5)
    await timed("one that is interrupted", lambda: threads.search(status="interrupted"), 3)
    wide = {"graph_id": "chat"}
    await timed("20 by what all have", lambda: threads.search(metadata=wide, limit=20), 5)
    for number in range(UNSTARTED):
        await threads.create(f"unstarted-{number}")
    await timed("newest 20 of 1,000 unstarted", lambda: threads.search(limit=20), 5)


async def main(many: int, dsn: str | None) -> None:
    """Measure."""
    with tempfile.TemporaryDirectory() as folder:
        db = dsn or str(Path(folder) / "memory.db")
        options = {} if dsn else {"synchronous": "normal"}
        async with open_checkpointer(db, **options) as saver, open_store(db, **options) as store:
            threads = Threads(saver, store, {})
            await fill(saver, threads, many)
            await threads.count()  # forgets which threads had no turn when they were created
            await measure(threads, saver, store, many)


if __name__ == "__main__":
    asyncio.run(main(int((sys.argv[1:] or ["20000"])[0]), (sys.argv[2:] or [None])[0]))
