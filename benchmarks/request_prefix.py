"""Measure the prefix that each request shares with the previous one, which providers can cache.

    python -m benchmarks.request_prefix [--turns 60] [--calls 4]

The benchmark runs an agent with tools, recalled memories and a summary. A scripted model replaces a
real one. For each request, the benchmark counts the characters before the first difference from the
previous request of the thread. Columns of the table:

- *equal*: the percentage of these characters in all characters of all requests
- *without summaries*: the same percentage, for requests whose summary is that of the previous one
- *read anew*: the mean number of characters of a request from the first difference on
- *characters*: the mean number of characters of a request
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

from benchmarks.memory_turn import sentence
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from pydantic import Field

from perdure import SQLiteCheckpointer, SQLiteStore
from perdure.memory import MemoryMiddleware, remember, summarize, trim, use_memories
from perdure.memory.short_term.summary import HEADING

PROMPT: Final = "You are the assistant of a travel agency. " * 40
TEXT: Final = "It takes three hours, with a change in the hills; the train leaves at noon. "


class Model(BaseChatModel):
    """A scripted model that calls a tool `calls` times in each turn, and then gives an answer.

    `requests` contains the messages of each model request.
    """

    calls: int = 0
    requests: list[list[BaseMessage]] = Field(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        return self

    def _generate(self, messages: Any, *args: Any, **options: Any) -> ChatResult:
        self.requests.append(list(messages))
        number = len(self.requests)
        message = AIMessage(f"{number}: {TEXT * 4}")
        if self.calls and number % (self.calls + 1):
            call = {"name": "timetable", "args": {"day": number}, "id": f"c{number}"}
            message = AIMessage("", tool_calls=[call])
        return ChatResult(generations=[ChatGeneration(message=message)])


@tool
def timetable(day: int) -> str:
    """Return the trains of a day."""
    return f"{day}: {TEXT * 6}"


def build_parts(name: str, store: SQLiteStore) -> list[Any]:
    """Build the components of `MemoryMiddleware` for the table row with this name."""
    summary = summarize(
        Model(), trigger=("tokens", 4_000), keep=("tokens", 1_000), background="later" in name
    )
    place: Any = "question" if "question" in name else "system"
    memories = use_memories(store, namespace=("facts",), place=place, min_score=0)
    if name == "everything":
        return []
    if name == "a window":
        return [trim(max_tokens=4_000)]
    return [summary] if name == "summary" else [summary, memories, trim(max_tokens=8_000)]


ROWS: Final = (
    "everything",
    "a window",
    "summary",
    "summary, memories in the system message",
    "summary, memories after the question",
    "summary written later, memories after the question",
)


def render_request(request: Sequence[BaseMessage]) -> str:
    """Return the messages of a request as one text, in their order."""
    calls = lambda message: json.dumps(getattr(message, "tool_calls", []), default=str)  # noqa: E731
    return "\n".join(f"{message.type}: {message.text} {calls(message)}" for message in request)


def count_common_prefix(before: str, after: str) -> int:
    """Return the number of characters in the longest common prefix of two texts."""
    pairs = zip(before, after, strict=False)
    shorter = min(len(before), len(after))
    return next((n for n, (one, other) in enumerate(pairs) if one != other), shorter)


def find_summary(request: Sequence[BaseMessage]) -> str:
    """Return the text of the summary in the system message of a request, or ""."""
    return request[0].text.partition(HEADING)[2].partition("<memories>")[0]


def measure_row(name: str, turns: int, calls: int) -> list[str]:
    """Measure one row of the table, and return its cells."""
    chance, model = random.Random(7), Model(calls=calls)
    with SQLiteStore.open(":memory:") as store, SQLiteCheckpointer.open(":memory:") as saver:
        for number in range(200):
            remember(sentence(chance, number), store=store, namespace=("facts",))
        parts = build_parts(name, store)
        middleware = [MemoryMiddleware(*parts)] if parts else []
        agent: Any = create_agent(
            model, [timetable], system_prompt=PROMPT, middleware=middleware, checkpointer=saver
        )
        config = {"configurable": {"thread_id": "t"}, "recursion_limit": 1_000}
        for number in range(turns):
            question = f"{sentence(chance, number)} And where to next?"
            agent.invoke({"messages": [HumanMessage(question)]}, config)
            for part in parts[:1]:
                getattr(part, "flush", bool)()
    pairs = list(pairwise(model.requests))
    texts = [(render_request(before), render_request(after)) for before, after in pairs]
    equal = [count_common_prefix(*pair) for pair in texts]
    lengths = [len(after) for _, after in texts]
    same = [find_summary(before) == find_summary(after) for before, after in pairs]
    within = [e for e, is_same in zip(equal, same, strict=True) if is_same]
    whole = [n for n, is_same in zip(lengths, same, strict=True) if is_same]
    anew = statistics.mean(n - e for n, e in zip(lengths, equal, strict=True))
    shares = [f"{sum(equal) / sum(lengths):.0%}", f"{sum(within) / sum(whole):.0%}"]
    return [name, *shares, f"{anew:,.0f}", f"{statistics.mean(lengths):,.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--calls", type=int, default=4, help="tool calls in each turn")
    args = parser.parse_args()
    print("| request | equal | without summaries | read anew | characters |")
    print("| --- | --- | --- | --- | --- |")
    for name in ROWS:
        print(f"| {' | '.join(measure_row(name, args.turns, args.calls))} |")


if __name__ == "__main__":
    main()
