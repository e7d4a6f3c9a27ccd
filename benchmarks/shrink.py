"""Measure the size of the file after 95 % of the threads were deleted and retention has run.

python -m benchmarks.shrink
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from benchmarks.agents import Course

from perdure.checkpointers import Retention, SQLiteCheckpointer

THREADS, TURNS = 200, 10


async def fill(path: Path) -> None:
    course = Course("perdure")
    await course.open("chat", path)
    await course.crowd(range(THREADS), TURNS, 16)
    await course.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "perdure.db"
        asyncio.run(fill(path))
        before = path.stat().st_size
        with SQLiteCheckpointer(path) as saver:
            saver.prune([f"t{i}" for i in range(THREADS * 95 // 100)], strategy="delete")
            saver.retain(Retention(last=1))
        after = path.stat().st_size
    less = 1 - after / before
    print(f"{before / 1e6:.2f} MB before, {after / 1e6:.2f} MB after: {less:.1%} less")


if __name__ == "__main__":
    main()
