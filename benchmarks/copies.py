"""Ways to hand out fresh copies of messages, and to tell whether any was changed.

python benchmarks/copies.py --messages 1600
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

sys.path.insert(0, str(Path(__file__).parent))
from agents import ratio, said, table

from perdure.checkpointers.codec import Codec

ROUNDS = 15


def timed(work: Callable[[], Any], cold: bytearray | None) -> float:
    """Seconds, the median; `cold` empties the processor's caches before each."""
    took = []
    for _ in range(ROUNDS):
        if cold is not None:
            bytes(cold)
        started = time.perf_counter()
        work()
        took.append(time.perf_counter() - started)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1600)
    args = parser.parse_args()
    messages = said(args.messages // 2)
    serde = JsonPlusSerializer(allowed_msgpack_modules=None)
    codec = Codec(serde)
    stored = [codec.encode(message, str) for message in messages]
    read = codec.piece(stored)
    assert read is not None
    piece = read[0]
    dumped = serde.dumps_typed(messages)
    ways: dict[str, Callable[[], Any]] = {
        "langgraph's serializer, load": lambda: serde.loads_typed(dumped),
        "copy.deepcopy": lambda: copy.deepcopy(messages),
        "model_copy(deep=True)": lambda: [m.model_copy(deep=True) for m in messages],
        "one by one from the compact form": lambda: [codec.decode(s) for s in stored],
        "as a piece (what perdure does)": piece.copies,
        "langgraph's serializer, dump": lambda: serde.dumps_typed(messages),
        "content check (what perdure does)": lambda: piece.holds(messages),
    }
    gc.disable()
    cold = bytearray(96 << 20)
    found = {name: (timed(way, None), timed(way, cold)) for name, way in ways.items()}
    base = found["langgraph's serializer, load"]
    each = 1e6 / len(messages)
    rows = [
        [name, *(ratio(t * each, b * each) for t, b in zip(times, base, strict=True))]
        for name, times in found.items()
    ]
    table(f"{len(messages)} messages", ["way", "µs a message", "with cold caches"], rows)


if __name__ == "__main__":
    main()
