"""Time and CPU of a turn at a length, side by side: blocks of five turns in rotating order.

python benchmarks/turns.py --agent chat --turns 800 sqlite perdure memory loop
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from agents import AGENTS, SAVERS, human, ratio, said, schema_for, table

BLOCK = 5


async def measure(agent: str, turns: int, blocks: int, names: list[str]) -> dict[str, Any]:
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, float] = dict.fromkeys(names, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        async with AsyncExitStack() as stack:
            graphs = {}
            for name in names:
                saver = await stack.enter_async_context(SAVERS[name](Path(folder)))
                graphs[name] = AGENTS[agent](saver, schema_for(name))
            state: list[Any] = []
            last = {"chat": "agent", "tools": "answer", "trim": "trim"}[agent]
            config: Any = {"configurable": {"thread_id": "t"}}
            start = said(turns, agent)
            for name, graph in graphs.items():
                if name == "loop":
                    state = list(start)
                else:
                    await graph.aupdate_state(config, {"messages": start}, as_node=last)
            for block in range(-1, blocks):  # the first only warms up
                shift = block % len(names)
                for name in names[shift:] + names[:shift]:
                    for turn in range(BLOCK):
                        new = human(turns + block * BLOCK + turn)
                        given = [*state, new] if name == "loop" else [new]
                        cpu0, wall0 = time.process_time(), time.perf_counter()
                        out = await graphs[name].ainvoke({"messages": given}, config)
                        if block >= 0:
                            wall[name].append(time.perf_counter() - wall0)
                            cpu[name] += time.process_time() - cpu0
                        if name == "loop":
                            state = out["messages"]
                        del out
    return {"wall": wall, "cpu": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("savers", nargs="+", choices=sorted(SAVERS))
    parser.add_argument("--agent", choices=sorted(AGENTS), default="chat")
    parser.add_argument("--turns", type=int, default=800, help="turns already on the thread")
    parser.add_argument("--blocks", type=int, default=8, help="blocks of five turns measured")
    args = parser.parse_args()
    found = asyncio.run(measure(args.agent, args.turns, args.blocks, args.savers))
    rows = []
    first = args.savers[0]
    for name in args.savers:
        median = statistics.median(found["wall"][name]) * 1e3
        base = statistics.median(found["wall"][first]) * 1e3
        count = args.blocks * BLOCK
        cpu, cpu_base = found["cpu"][name] / count * 1e3, found["cpu"][first] / count * 1e3
        rows.append([name, ratio(median, base), ratio(cpu, cpu_base)])
    title = f"{args.agent} agent after {args.turns} turns"
    table(title, ["saver", "ms a turn (median)", "CPU ms a turn"], rows)


if __name__ == "__main__":
    main()
