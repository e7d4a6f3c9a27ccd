"""Measure what recording requests adds to a turn of a chat, and the time to read the records.

    python benchmarks/views.py [--delay-ms 300] [--turns 200]

The same graph with the callback `record_views` and without it, in turn and in changing order. The
model answers after `--delay-ms`. Medians of turns; bytes are of the checkpointer's rows.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage

from perdure import SQLiteCheckpointer
from perdure.graphs import chat_graph
from perdure.memory import record_views, views

TEXT = (
    "It takes three hours, with a change in the hills; the train leaves from platform two at noon."
)


class Model(GenericFakeChatModel):
    delay_s: float = 0.0

    def _generate(self, *args: Any, **options: Any) -> Any:
        time.sleep(self.delay_s)
        return super()._generate(*args, **options)


def replies() -> Any:
    while True:
        yield AIMessage(TEXT)


def measured(saver: SQLiteCheckpointer, graph: Any, messages: int, turns: int) -> None:
    configs: dict[str, Any] = {
        name: {"configurable": {"thread_id": f"{name} {messages}"}} for name in ("plain", "views")
    }
    configs["views"]["callbacks"] = [record_views(saver)]
    said = [HumanMessage(f"{n}: {TEXT}", id=f"m{n}") for n in range(messages)]
    times: dict[str, list[float]] = {name: [] for name in configs}
    cpu: dict[str, list[float]] = {name: [] for name in configs}
    sizes: dict[str, int] = {}
    for name, config in configs.items():
        graph.update_state(config, {"messages": said}, as_node="respond")
        graph.invoke({"messages": [("human", "first")]}, config)
        sizes[name] = -saver.thread(f"{name} {messages}").size_bytes
    for n in range(turns):
        for name in ("plain", "views") if n % 2 else ("views", "plain"):
            start, before = time.perf_counter(), time.process_time()
            graph.invoke({"messages": [HumanMessage(f"question {n}")]}, configs[name])
            times[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - before)
    for name in configs:
        sizes[name] += saver.thread(f"{name} {messages}").size_bytes
    start = time.perf_counter()
    [view] = views(saver, f"views {messages}", limit=1)
    read = time.perf_counter() - start
    _ = view.parts
    counted = time.perf_counter() - start - read
    figures = [statistics.median(each[name]) * 1e3 for each in (times, cpu) for name in configs]
    added = (sizes["views"] - sizes["plain"]) / turns
    shown = " ".join(f"{each:>9.2f}" for each in figures)
    print(f"{messages:>8,} {shown} {added:>7.0f} {read * 1e3:>8.1f} {counted * 1e3:>8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--delay-ms", type=float, default=0)
    parser.add_argument("--turns", type=int, default=200)
    options = parser.parse_args()
    model = Model(messages=replies(), delay_s=options.delay_ms / 1e3)
    print("messages   turn ms    views    CPU ms     views   bytes  read ms parts ms")
    with tempfile.TemporaryDirectory() as folder:
        for messages in (20, 200, 1_000, 3_000):
            with SQLiteCheckpointer.open(Path(folder) / f"{messages}.db") as saver:
                graph = chat_graph(model, checkpointer=saver)
                measured(saver, graph, messages, options.turns)


if __name__ == "__main__":
    main()
