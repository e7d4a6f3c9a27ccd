"""How long the event loop stands still while a long thread is read, continued and listed.

A task asks to be woken every millisecond; how much later it is woken is what others wait. What was
there before is frozen (`gc.freeze`), as servers do: a full collection of Python's garbage collector
stops the process for as long as its whole heap demands, whoever sets it off.

    python benchmarks/event_loop.py --messages 5000 sqlite perdure
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from agents import SAVERS, chat_agent, reply, said, table


class Ticker:
    """Wakes every millisecond while entered; `late_ms` is the longest it was kept waiting."""

    late_ms = 0.0

    async def _tick(self) -> None:
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            self.late_ms = max(self.late_ms, (time.perf_counter() - due) * 1e3)

    async def __aenter__(self) -> Ticker:
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(0.02)
        self.late_ms = 0.0
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()


async def measure(name: str, messages: int) -> list[Any]:
    config: Any = {"configurable": {"thread_id": "t"}}
    with tempfile.TemporaryDirectory() as folder:
        async with SAVERS[name](Path(folder)) as saver:
            await chat_agent(saver).aupdate_state(
                config, {"messages": said(messages // 2)}, as_node="agent"
            )
            gc.collect()
            gc.freeze()
            cells: list[Any] = [name]
            for _ in range(2):
                async with Ticker() as ticker:
                    found = await saver.aget_tuple(config)
                cells.append(f"{ticker.late_ms:.1f}")
            checkpoint = found.checkpoint
            values = {"messages": [*checkpoint["channel_values"]["messages"], reply(-1)]}
            checkpoint |= {"id": checkpoint["id"][:-1] + "z", "channel_values": values}
            versions = {"messages": saver.get_next_version("9", None)}
            checkpoint["channel_versions"] |= versions
            async with Ticker() as ticker:
                await saver.aput(found.config, checkpoint, {"source": "loop"}, versions)
            cells.append(f"{ticker.late_ms:.1f}")
            async with Ticker() as ticker:
                _ = [found async for found in saver.alist(config, limit=10)]
            cells.append(f"{ticker.late_ms:.1f}")
            return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("savers", nargs="+", choices=sorted(SAVERS))
    parser.add_argument("--messages", type=int, default=5000)
    args = parser.parse_args()
    rows = [asyncio.run(measure(name, args.messages)) for name in args.savers]
    columns = ["saver", "aget", "aget again", "aput", "alist"]
    table(f"longest wait of the event loop, ms, at {args.messages} messages", columns, rows)


if __name__ == "__main__":
    main()
