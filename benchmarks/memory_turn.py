"""Measure the time that long-term memory adds to a turn, compared with a bare langgraph chat node.

    python benchmarks/memory_turn.py --memories 10000

All variants use the same checkpointer and the same model, which answers at once and calls no tool.
The wall time of a turn is measured, and the variants are interleaved. Each question asks about one
of the memories in the user's namespace. *recall* adds recalled memories to the request, *window*
also trims the thread to 8,000 tokens, and *agent* also has the two memory tools and remembers the
turns of each run at its end.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import END, START, StateGraph

from perdure import SQLiteCheckpointer, SQLiteStore
from perdure.graphs import chat_graph, memory_agent
from perdure.memory import ChatState, trim, use_memories
from perdure.stores import PutItem

WHO = ("Ann", "Bo", "Carla", "Dmitri", "Eva", "Farid", "Greta", "Hiro", "Ines", "Jonas")
DOES = ("likes", "sold", "repairs", "painted", "borrowed", "lost", "studies", "collects", "cooks")
WHAT = ("kites", "old radios", "a blue bicycle", "tulips", "chess books", "rye bread", "maps")
WHERE = ("in Ghent", "near the harbour", "at school", "in the mountains", "with her sister")
WIDTHS = (8, 8, 11, 11)
WHEN = ("on Mondays", "last spring", "since 2019", "every winter", "before breakfast", "in May")


class Model(GenericFakeChatModel):
    """A model that accepts tools but calls none."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


def replies() -> Any:
    while True:
        yield AIMessage("I will remember that.")


def bare(model: Any, saver: Any) -> Any:
    async def respond(state: ChatState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    builder = StateGraph(ChatState).add_node(respond)
    return builder.add_edge(START, "respond").add_edge("respond", END).compile(checkpointer=saver)


def sentence(chance: random.Random, number: int) -> str:
    parts = (chance.choice(words) for words in (WHO, DOES, WHAT, WHERE, WHEN))
    return f"{' '.join(parts)} (note {number})."


def fill(store: SQLiteStore, count: int) -> list[str]:
    chance = random.Random(5)
    texts = [sentence(chance, number) for number in range(count)]
    for start in range(0, count, 500):
        some = enumerate(texts[start : start + 500], start)
        place = ("memories", "ann")
        store.batch(
            [PutItem(place, f"m{n}", {"text": t, "kind": "fact"}, ["text"]) for n, t in some]
        )
    return texts


async def turn(graph: Any, thread: str, said: str) -> float:
    config: Any = {"configurable": {"thread_id": thread, "user_id": "ann"}}
    start = time.perf_counter()
    await graph.ainvoke({"messages": [HumanMessage(said)]}, config)
    return time.perf_counter() - start


async def measured(memories: int, turns: int, folder: Path) -> None:
    model = Model(messages=replies())
    file = folder / "turn.db"
    async with SQLiteCheckpointer.open(file) as saver, SQLiteStore.open(file) as store:
        texts = fill(store, memories)
        window = trim(max_tokens=8_000)
        given: Any = {"checkpointer": saver, "store": store}
        graphs = {
            "bare": bare(model, saver),
            "recall": chat_graph(model, memory=[use_memories()], **given),
            "window": chat_graph(model, memory=[use_memories(), window], **given),
            "agent": memory_agent(model, memory=[window], **given),
        }
        asked = random.Random(7).choices(texts, k=turns + 2)
        took: dict[str, list[float]] = {name: [] for name in graphs}
        for number, text in enumerate(asked):
            for name, graph in graphs.items():
                spent = await turn(graph, name, f"Tell me: {text}")
                if number > 1:  # the first ones read the index
                    took[name].append(spent)
    print(f"{'':8}{'p50 ms':>8}{'p95 ms':>8}{'added p50':>11}{'added p95':>11}")
    for name, times in took.items():
        added = [b - a for a, b in zip(took["bare"], times, strict=True)]
        cells = (*quantiles(times), *quantiles(added))
        print(f"{name:8}" + "".join(f"{v:>{w}.2f}" for v, w in zip(cells, WIDTHS, strict=True)))


def quantiles(seconds: list[float]) -> tuple[float, float]:
    """Median and 95th percentile, in milliseconds."""
    return statistics.median(seconds) * 1e3, statistics.quantiles(seconds, n=20)[-1] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--memories", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measured(options.memories, options.turns, Path(folder)))


if __name__ == "__main__":
    main()
