"""Measure how soon `perdure serve` accepts a run and sends its first event over HTTP.

    python -m benchmarks.server_first_event                                  # one, then 20 at once
    python -m benchmarks.server_first_event --old /tmp/old/build/view        # two builds in turn
    python -m benchmarks.server_first_event --on postgres --rounds 5

Servers of both builds are started anew in each round, in turn. Each run is on a thread that already
has a turn; the model responds immediately. A run counts as accepted when the headers of its stream
arrive; its first event is the first event after `metadata`. Times are medians, in ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

import httpx
from benchmarks.server_streams import served

BODY = {
    "assistant_id": "chat",
    "input": {"messages": [{"role": "user", "content": "What did I say about figs?"}]},
    "stream_mode": ["values"],
    "if_not_exists": "create",
}


async def first(client: httpx.AsyncClient, thread: str) -> tuple[float, float]:
    """Return the milliseconds until a run is accepted, and until its first event arrives."""
    begun, accepted, event = time.perf_counter(), 0.0, 0.0
    async with client.stream("POST", f"/threads/{thread}/runs/stream", json=BODY) as response:
        accepted, events = time.perf_counter(), b""
        async for part in response.aiter_raw():
            events += part
            if not event and b"event: values" in events:
                event = time.perf_counter()
    assert event, events
    return 1e3 * (accepted - begun), 1e3 * (event - begun)


async def measure(url: str, at_once: int, runs: int) -> list[tuple[float, float]]:
    """Measure runs, with the given number running concurrently."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def several() -> list[tuple[float, float]]:
            names = [f"t{number}" for number in range(at_once)]
            return list(await asyncio.gather(*(first(client, name) for name in names)))

        for _ in range(2):  # threads are made, modules imported
            await several()
        return [times for _ in range(max(runs // at_once, 1)) for times in await several()]


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 20])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--old", metavar="VIEW", help="a PYTHONPATH of another build")
    parser.add_argument("--on", choices=("file", "postgres"), default="file")
    given = parser.parse_args()
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for _ in range(given.rounds):
        for view in [given.old, None] if given.old else [None]:
            with served(0, view, on=given.on) as (url, _):
                for at_once in given.at_once:
                    build = at_once, "old" if view else "new"
                    found[build] = found.get(build, []) + asyncio.run(
                        measure(url, at_once, given.runs)
                    )
    for (at_once, build), times in sorted(found.items()):
        accepted, event = (round(statistics.median(each), 1) for each in zip(*times, strict=True))
        made: dict[str, Any] = {"at_once": at_once, "build": build, "runs": len(times)}
        print(json.dumps({**made, "accepted_ms": accepted, "first_event_ms": event}))


if __name__ == "__main__":
    main()
