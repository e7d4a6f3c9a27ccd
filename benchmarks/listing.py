"""`alist(limit=10)`, resuming in a fresh process, and the memory of a full listing.

python benchmarks/listing.py --turns 833 --agent trim sqlite perdure
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from agents import AGENTS, SAVERS, human, ratio, schema_for, table

CONFIG: Any = {"configurable": {"thread_id": "t"}}


async def timed(saver: Any, config: Any) -> float:
    """Milliseconds of the newest ten, the median of seven."""
    took = []
    for _ in range(7):
        started = time.perf_counter()
        _ = [found async for found in saver.alist(config, limit=10)]
        took.append((time.perf_counter() - started) * 1e3)
    return statistics.median(took)


async def measure(name: str, agent: str, turns: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        async with SAVERS[name](Path(folder)) as saver:
            graph = AGENTS[agent](saver, schema_for(name))
            for turn in range(turns):
                await graph.ainvoke({"messages": [human(turn)]}, CONFIG)
        async with SAVERS[name](Path(folder)) as saver:
            started = time.perf_counter()
            await saver.aget_tuple(CONFIG)
            resume = (time.perf_counter() - started) * 1e3
            everywhere = await timed(saver, CONFIG)
            with_ns: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
            in_ns = await timed(saver, with_ns)
            tracemalloc.start()
            count = 0
            async for _ in saver.alist(CONFIG):
                count += 1
            peak = tracemalloc.get_traced_memory()[1] / 1e6
            tracemalloc.stop()
        return [count, resume, everywhere, in_ns, peak]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("savers", nargs="+", choices=sorted(SAVERS))
    parser.add_argument("--agent", choices=sorted(AGENTS), default="trim")
    parser.add_argument("--turns", type=int, default=625)
    args = parser.parse_args()
    found = {name: asyncio.run(measure(name, args.agent, args.turns)) for name in args.savers}
    base = found[args.savers[0]]
    rows = [
        [name, int(row[0]), *(ratio(v, b) for v, b in zip(row[1:], base[1:], strict=True))]
        for name, row in found.items()
    ]
    columns = ["saver", "checkpoints", "first get, ms", "list 10, ms", "in a namespace", "peak MB"]
    table(f"{args.agent} agent, {args.turns} turns; peak of a full listing", columns, rows)


if __name__ == "__main__":
    main()
