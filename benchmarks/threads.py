"""Turns per second of short turns on many threads at once, in alternating rounds.

python benchmarks/threads.py --concurrency 16 sqlite perdure memory loop
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from agents import SAVERS, chat_agent, human, ratio, schema_for, table

TURNS = 4  # a thread


async def serve(name: str, threads: int, concurrency: int) -> float:
    """Turns per second."""
    with tempfile.TemporaryDirectory() as folder:
        async with SAVERS[name](Path(folder)) as saver:
            graph = chat_agent(saver, schema_for(name))
            waiting = [f"t{i}" for i in range(threads)]

            async def runner() -> None:
                while waiting:
                    config: Any = {"configurable": {"thread_id": waiting.pop()}}
                    for turn in range(TURNS):
                        await graph.ainvoke({"messages": [human(turn)]}, config)

            started = time.perf_counter()
            await asyncio.gather(*(runner() for _ in range(concurrency)))
            return threads * TURNS / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("savers", nargs="+", choices=sorted(SAVERS))
    parser.add_argument("--threads", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rates: dict[str, list[float]] = {name: [] for name in args.savers}
    for _ in range(args.rounds):
        for name in args.savers:
            rates[name].append(asyncio.run(serve(name, args.threads, args.concurrency)))
    base = statistics.median(rates[args.savers[0]])
    rows = [[name, ratio(statistics.median(found), base)] for name, found in rates.items()]
    table(f"{args.concurrency} threads at once", ["saver", "turns a second"], rows)


if __name__ == "__main__":
    main()
