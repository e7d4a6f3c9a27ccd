"""Measure the time that short-term memory adds to a turn, against a bare langgraph chat node.

    python benchmarks/chat_overhead.py

Same checkpointer, same model that answers at once; CPU of the process for a turn, interleaved.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import END, START, StateGraph

from perdure import SQLiteCheckpointer, SQLiteStore
from perdure.graphs import chat_graph
from perdure.memory import ChatState, Instructions, summarize, trim, use_instructions

TURNS = 20


def replies() -> Any:
    while True:
        yield AIMessage("It takes three hours, with a change in the hills.")


def bare(model: Any, saver: Any) -> Any:
    async def respond(state: ChatState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    builder = StateGraph(ChatState)
    builder.add_node("respond", respond)
    builder.add_edge(START, "respond")
    builder.add_edge("respond", END)
    return builder.compile(checkpointer=saver)


def full(model: Any, saver: Any, store: Any) -> Any:
    """Build a chat graph with instructions, a summary of the older messages, and trimming."""
    return chat_graph(
        model,
        checkpointer=saver,
        store=store,
        memory=[
            use_instructions(Instructions(store)),
            summarize(model, trigger=("messages", 10**6)),
            trim(max_tokens=4_000),
        ],
    )


def said(turns: int) -> list[Any]:
    out: list[Any] = []
    for n in range(turns):
        out.append(HumanMessage(f"question {n}, how long is the line to the coast?", id=f"h{n}"))
        out.append(AIMessage(f"answer {n}: three hours, with a change.", id=f"a{n}"))
    return out


async def turn(graph: Any, config: Any) -> float:
    start = time.process_time()
    await graph.ainvoke({"messages": [HumanMessage("and now?")]}, config)
    return time.process_time() - start


async def measured(turns: int, folder: Path) -> tuple[float, float, float]:
    model = GenericFakeChatModel(messages=replies())
    async with (
        SQLiteCheckpointer.open(folder / f"{turns}.db") as saver,
        SQLiteStore.open(folder / f"{turns}.db", index=None) as store,
    ):
        graphs = {"bare": bare(model, saver), "full": full(model, saver, store)}
        talk = said(turns)
        half = [message.id for message in talk[: turns // 2 * 2]]
        former = {"text": "Lines to the coast. " * 20, "last": half[-1], "count": len(half)}
        for name, graph in graphs.items():
            config: Any = {"configurable": {"thread_id": name}}
            known = {"summary": former, "summarized": half} if name == "full" else {}
            await graph.aupdate_state(config, {"messages": talk, **known}, as_node="respond")
        took: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(TURNS):
            for name, graph in graphs.items():
                took[name].append(await turn(graph, {"configurable": {"thread_id": name}}))
    ratio = statistics.median(b / a for a, b in zip(took["bare"], took["full"], strict=True))
    return statistics.median(took["bare"]) * 1e3, statistics.median(took["full"]) * 1e3, ratio


def main() -> None:
    print(f"{'turn':>6} {'bare ms':>9} {'full ms':>9} {'ratio':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for turns in (10, 100, 1_000, 3_000):
            plain, whole, ratio = asyncio.run(measured(turns, Path(folder)))
            print(f"{turns:>6,} {plain:>9.2f} {whole:>9.2f} {ratio:>7.2f}")


if __name__ == "__main__":
    main()
