"""A first get of a long thread, with the garbage collector paused as perdure does, and without.

python benchmarks/collector.py --messages 6000
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from agents import chat_agent, ratio, said, table

from perdure.checkpointers import SQLiteCheckpointer, engine

CONFIG: Any = {"configurable": {"thread_id": "t"}}
ROUNDS = 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=6000)
    args = parser.parse_args()
    ways: dict[str, Any] = {"left alone": nullcontext, "paused": engine.collector_paused}
    took: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.db"
        with SQLiteCheckpointer.open(path) as saver:
            given = {"messages": said(args.messages // 2)}
            chat_agent(saver).update_state(CONFIG, given, as_node="agent")
        for _ in range(ROUNDS):
            for name, way in ways.items():
                engine.collector_paused = way
                with SQLiteCheckpointer.open(path) as saver:
                    started = time.perf_counter()
                    saver.get_tuple(CONFIG)
                    took[name].append((time.perf_counter() - started) * 1e3)
    medians = {name: statistics.median(found) for name, found in took.items()}
    base = medians["left alone"]
    rows = [[name, ratio(value, base)] for name, value in medians.items()]
    table(f"{args.messages} messages", ["collector", "first get, ms"], rows)


if __name__ == "__main__":
    main()
