"""`trim` against langchain's `trim_messages` in the same setting, on long conversations.

    python benchmarks/trimming.py

CPU time, interleaved; the ratio is the median of those of each round. A counter of each kind: one
that costs nothing, each library's own estimate, and OpenAI's encoding.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage, trim_messages
from langchain_core.messages.utils import count_tokens_approximately

from perdure.memory import token_counter, trim

ROUNDS = 5


def talk(size: int) -> list[BaseMessage]:
    """Turns of a question, a call, its result and an answer."""
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
    """OpenAI's encoding, counted anew at each call, as `trim_messages` has it of a chat model."""
    counter = token_counter("gpt-4o")
    return sum(map(counter.message, messages))


COUNTERS: dict[str, tuple[Any, Any]] = {
    "messages": (None, len),
    "estimate": ("estimate", count_tokens_approximately),
    "gpt-4o": ("gpt-4o", encoded),
}


def timed(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def compared(size: int, share: float, kind: str) -> None:
    messages = talk(size)
    ours, theirs = COUNTERS[kind]
    budget = int(share * (size if kind == "messages" else sum(map(cost, messages))))
    node = trim(messages=budget) if kind == "messages" else trim(tokens=budget, counter=ours)
    rounds = []
    for _ in range(ROUNDS):
        mine = timed(lambda: node([message.model_copy() for message in messages]))
        copying = timed(lambda: [message.model_copy() for message in messages])
        peer = timed(
            lambda: trim_messages(
                messages,
                max_tokens=budget,
                token_counter=theirs,
                strategy="last",
                start_on="human",
                end_on=("human", "tool"),
                include_system=True,
            )
        )
        rounds.append((mine - copying, peer))
    mine, peer = (statistics.median(each) * 1e3 for each in zip(*rounds, strict=True))
    print(f"{size:>8,} {share:>6.0%} {kind:>9} {mine:>10.2f} {peer:>12.2f} {mine / peer:>7.2f}")


def cost(message: BaseMessage) -> int:
    return token_counter("estimate").message(message)


def main() -> None:
    print("messages budget   counter perdure ms langchain ms   ratio")
    for size in (1_000, 5_000, 20_000):
        for share in (0.05, 0.5, 2.0):
            for kind in COUNTERS:
                compared(size, share, kind)


if __name__ == "__main__":
    main()
