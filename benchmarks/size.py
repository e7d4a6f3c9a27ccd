"""The database after so many turns of the tool agent, in one run.

python benchmarks/size.py perdure delta sqlite --turns 500 1000
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from agents import SAVERS, disk_bytes, human, ratio, schema_for, table, tool_agent


async def grow(name: str, turns: int) -> tuple[float, float]:
    """Megabytes on disk, and of text said."""
    with tempfile.TemporaryDirectory() as folder:
        async with SAVERS[name](Path(folder)) as saver:
            graph = tool_agent(saver, schema_for(name))
            config: Any = {"configurable": {"thread_id": "t"}}
            for turn in range(turns):
                out = await graph.ainvoke({"messages": [human(turn)]}, config)
            text = sum(len(m.text) for m in out["messages"])
        return disk_bytes(Path(folder), name) / 1e6, text / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("savers", nargs="+", choices=sorted(SAVERS))
    parser.add_argument("--turns", type=int, nargs="+", default=[500, 1000])
    args = parser.parse_args()
    columns = ["saver", *(f"MB at {n} turns" for n in args.turns), "growth"]
    rows = []
    base: list[float] = []
    for name in args.savers:
        sizes = []
        for n in args.turns:
            size, text = asyncio.run(grow(name, n))
            print(f"{name}: {n} turns, {text:.2f} MB of text, {size:.2f} MB on disk", flush=True)
            sizes.append(size)
        base = base or sizes
        cells = [ratio(size, first) for size, first in zip(sizes, base, strict=True)]
        rows.append([name, *cells, f"{sizes[-1] / sizes[0]:.2f}"])
    table("tool agent, plain add_messages", columns, rows)


if __name__ == "__main__":
    main()
