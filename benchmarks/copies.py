"""Compare ways to copy messages and to compare their contents, with and without garbage collection.

python -m benchmarks.copies --messages 1600
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.agents import chat
from benchmarks.common import ratio, table, text
from langchain_core.messages import BaseMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from perdure.checkpointers.codec import Codec
from perdure.checkpointers.collector import collector_paused

ROUNDS = 15


async def said(count: int) -> list[BaseMessage]:
    """Build messages like an agent's, with two messages per turn."""
    graph, config = chat(InMemorySaver()), {"configurable": {"thread_id": "t"}}
    out: list[BaseMessage] = []
    for turn in range(count // 2):
        asked = {"messages": [{"role": "user", "content": text(turn, 120)}]}
        config["configurable"]["thread_id"] = str(turn)
        out += (await graph.ainvoke(asked, config))["messages"]
    return out


def timed(work: Callable[[], Any], cold: bytearray | None = None) -> float:
    """Return the median time in seconds; `cold` flushes the CPU caches before each call."""
    took = []
    for _ in range(ROUNDS):
        if cold is not None:
            bytes(cold)
        started = time.perf_counter()
        work()
        took.append(time.perf_counter() - started)
    return statistics.median(took)


def ways(messages: list[BaseMessage]) -> dict[str, Callable[[], Any]]:
    """Return the functions to compare, by name; the first one is the baseline."""
    serde = JsonPlusSerializer(allowed_msgpack_modules=None)
    dumped = serde.dumps_typed(messages)
    items = Codec(serde)
    stored = items.encode_for_comparison(messages, str)
    return {
        "langgraph's serializer, load": lambda: serde.loads_typed(dumped),
        "copy.deepcopy": lambda: copy.deepcopy(messages),
        "model_copy(deep=True)": lambda: [m.model_copy(deep=True) for m in messages],
        "as perdure does": lambda: items.decode_all(stored),
        "langgraph's serializer, dump": lambda: serde.dumps_typed(messages),
        "compared, as perdure does": lambda: items.encode_for_comparison(messages, str) == stored,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1600)
    args = parser.parse_args()
    messages = asyncio.run(said(args.messages))
    works, each = ways(messages), 1e6 / args.messages
    with collector_paused():
        cold = bytearray(96 << 20)
        found = {name: (timed(work), timed(work, cold)) for name, work in works.items()}
    base = next(iter(found.values()))
    rows = [
        [name, *(ratio(t * each, b * each) for t, b in zip(times, base, strict=True))]
        for name, times in found.items()
    ]
    table(f"{args.messages} messages", ["way", "µs a message", "with cold caches"], rows)

    first = works["as perdure does"]
    gc.collect()
    left = timed(first)
    with collector_paused():
        paused = timed(first)
    rows = [["left alone", ratio(left * each, left * each)]]
    rows.append(["paused", ratio(paused * each, left * each)])
    table("as perdure does", ["the garbage collector", "µs a message"], rows)


if __name__ == "__main__":
    main()
