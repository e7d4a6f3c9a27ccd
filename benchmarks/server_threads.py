"""Measure the server's searches of threads among many threads, in a file and in Postgres.

python benchmarks/server_threads.py [THREADS] [DSN or ""] [KEY]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.types import Interrupt

from perdure.checkpointers import open_checkpointer
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.run_tables.component import create_server_tables
from perdure.run_tables.thread_list import ThreadQuery
from perdure.server.threads import Threads

USERS = 100  # of the threads
# One thread in `UNSTARTED` has no turn, and one in `WAITING` waits for an answer.
UNSTARTED, WAITING = 20, 10
PATH = "~__pregel_pull, ask"


async def fill(saver: Checkpointer, many: int) -> None:
    """Create threads, half of them through the server and half through another program."""
    threads = Threads(saver, {})
    for number in range(many):
        thread_id = f"thread-{number}"
        if number % 2:
            place = {"row": number % 1000}
            about = {"label": f"label {number}", "number": number % 200, "place": place}
            await threads.create(thread_id, {**about, "parts": [place, {"column": 1}]})
        if number % UNSTARTED == 1:
            continue
        checkpoint = empty_checkpoint()
        said = [HumanMessage(f"question {number}", id="q"), AIMessage("answer", id="a")]
        checkpoint["channel_values"] = {"messages": said}
        checkpoint["channel_versions"] = {"messages": 1}
        metadata: Any = {"source": "loop", "step": 1, "user_id": f"user{number % USERS}"}
        metadata |= {"title": f"conversation {number}", "graph_id": "chat", "assistant_id": "a"}
        config: Any = {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}
        config = await saver.aput(config, checkpoint, metadata, {"messages": 1})
        if number % WAITING == 0:
            question = Interrupt("may I?", id="i")
            await saver.aput_writes(config, [("__interrupt__", [question])], "task", PATH)


async def timed(name: str, make: Callable[[], Awaitable[list[Any]]], runs: int) -> None:
    """Print how long a search takes, its CPU time, and how many threads it finds."""
    times = []
    for _ in range(runs):
        start, cpu = time.perf_counter(), time.process_time()
        found = await make()
        times.append((time.perf_counter() - start, time.process_time() - cpu))
    wall, cpu = (sorted(each)[runs // 2] * 1000 for each in zip(*times, strict=True))
    print(f"{name:28} {wall:8.1f} ms, {cpu:8.1f} ms of the processor, {len(found)} found")


async def measure(saver: Checkpointer, many: int) -> None:
    """Print how long searches take."""
    threads = Threads(saver, {})

    def find(limit: int = 50, offset: int = 0, **wanted: Any) -> Callable[[], Awaitable[list[Any]]]:
        return lambda: threads.search(ThreadQuery(**wanted), limit, offset)

    async def of_user(user: str) -> list[Any]:
        return await Threads(saver, {"owner": user}).search(ThreadQuery(), 50)

    await timed("newest 50", find(), 21)
    await timed("50 of one of 100 users", lambda: of_user("user7"), 5)
    await timed("of a user without threads", lambda: of_user("nobody"), 5)
    await timed("50 by title", find(text="ion 77"), 5)
    await timed("by a title that none has", find(text="no such title"), 5)
    await timed("the oldest, by metadata", find(metadata={"label": "label 1"}), 5)
    await timed("50 by a number", find(metadata={"number": 77}), 5)
    await timed("50 by nested metadata", find(metadata={"place": {"row": 77}}), 5)
    await timed("50 by a part of a list", find(metadata={"parts": [{"row": 77}]}), 5)
    await timed("50 in the order of ids", find(sort_by="thread_id", sort_order="asc"), 5)
    await timed("50 in the order of status", find(sort_by="status"), 5)
    now = datetime.now(UTC)
    await timed("50 by time", find(active_until=now - timedelta(seconds=1)), 5)
    await timed("50 after half of all", find(offset=many // 2), 5)
    await timed("50 by id", find(ids=[f"thread-{number}" for number in range(50)]), 5)
    await timed("50 that are interrupted", find(status="interrupted"), 5)
    await timed("50 that are idle", find(status="idle"), 5)
    await timed("50 by what all have", find(metadata={"graph_id": "chat"}), 5)


async def main(many: int, dsn: str | None, key: str | None) -> None:
    """Run the benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        db = dsn or str(Path(folder) / "memory.db")
        options: dict[str, Any] = {} if dsn else {"synchronous": "normal"}
        async with open_checkpointer(db, key=key, **options) as saver:
            create_server_tables(saver)
            await fill(saver, many)
            await measure(saver, many)


if __name__ == "__main__":
    given = dict(enumerate(sys.argv[1:]))
    asyncio.run(main(int(given.get(0, "20000")), given.get(1) or None, given.get(2)))
