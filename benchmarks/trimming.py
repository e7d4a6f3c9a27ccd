"""Compare `trim` with langchain's `trim_messages` in the same setting, on long conversations.

    python benchmarks/trimming.py

CPU times are measured in interleaved rounds; the ratio is the median of the ratios of all rounds.
The token counters are one that costs nothing, each library's own estimate, and OpenAI's encoding.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage, trim_messages
from langchain_core.messages.utils import count_tokens_approximately

from perdure.memory import token_counter, trim

ROUNDS = 5


def talk(size: int) -> list[BaseMessage]:
    """Build turns that consist of a question, a tool call, its result and an answer."""
    made: list[BaseMessage] = []
    for n in range(size // 4):
        call = {"name": "look", "args": {"q": f"{n}"}, "id": f"c{n}"}
        made += [
            HumanMessage(f"question {n}, how long is the line to the coast?", id=f"h{n}"),
            AIMessage("", tool_calls=[call], id=f"t{n}"),
            ToolMessage("a table of stations and hours " * 4, tool_call_id=f"c{n}", id=f"r{n}"),
            AIMessage(f"answer {n}: three hours, with a change in the hills.", id=f"a{n}"),
        ]
    return [*made, HumanMessage("and now?", id="now")]


def encoded(messages: Sequence[BaseMessage]) -> int:
    """Count tokens with OpenAI's encoding. Counts are cached, as in perdure."""
    counter = token_counter("gpt-4o")
    return sum(map(counter.count_message_tokens, messages))


COUNTERS: dict[str, tuple[Any, Any]] = {
    "messages": (len, len),
    "approximate": ("approximate", count_tokens_approximately),
    "gpt-4o": ("gpt-4o", encoded),
}


def timed(work: Callable[[], Any]) -> float:
    gc.collect()
    gc.disable()
    start = time.process_time()
    work()
    took = time.process_time() - start
    gc.enable()
    return took


def compared(size: int, share: float, kind: str) -> None:
    ours, theirs = COUNTERS[kind]
    budget = int(share * (size if kind == "messages" else sum(map(cost, talk(size)))))
    node = trim(max_tokens=budget, token_counter=ours)

    def peer(messages: list[BaseMessage]) -> Any:
        return trim_messages(
            messages,
            max_tokens=budget,
            token_counter=theirs,
            strategy="last",
            start_on="human",
            end_on=("human", "tool"),
            include_system=True,
        )

    rounds = []
    for _ in range(ROUNDS):
        # Use fresh copies, like those that a checkpointer returns in each turn.
        mine, others = talk(size), talk(size)
        rounds.append((timed(partial(node, mine)), timed(partial(peer, others))))
    ratio = statistics.median(a / b for a, b in rounds)
    mine_ms, peer_ms = (statistics.median(each) * 1e3 for each in zip(*rounds, strict=True))
    print(f"{size:>8,} {share:>6.0%} {kind:>11} {mine_ms:>10.2f} {peer_ms:>12.2f} {ratio:>7.2f}")


def cost(message: BaseMessage) -> int:
    return token_counter("approximate").count_message_tokens(message)


def main() -> None:
    print("messages budget     counter perdure ms langchain ms   ratio")
    for size in (1_000, 5_000, 20_000):
        for share in (0.05, 0.5, 2.0):
            for kind in COUNTERS:
                compared(size, share, kind)


if __name__ == "__main__":
    main()
