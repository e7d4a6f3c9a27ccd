"""Measure the time of extracting conversations, and how well their memories are recalled.

    python benchmarks/extraction.py --data locomo10.json --only conv-26 conv-50

Each session is a thread, put through a graph with a SQLiteCheckpointer turn by turn, its speakers
as the names of messages and its date as their time. Memories are created from each session in two
ways: by `Extraction` afterwards, and by `remember_turns` at the end of each run. Then the same
questions are asked as in `recall.py`, which stores the turns themselves and whose recall is the
target.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph
from recall import Conversation, Turn, locomo

from perdure.checkpointers import SQLiteCheckpointer
from perdure.memory import ChatState, remember_turns
from perdure.memory.long_term.extraction import Extraction, ExtractionReport
from perdure.stores import SQLiteStore

TEMPLATE = ("locomo", "{user_id}")
Search = Callable[[tuple[str, ...], str], Sequence[str]]


def threads(number: int, conversation: Conversation) -> dict[str, list[BaseMessage]]:
    """Return the sessions of a conversation, in which the first speaker is the user."""
    user = conversation.turns[0].provenance.actor
    found: dict[str, list[BaseMessage]] = {}
    for turn in conversation.turns:
        source = turn.provenance
        kind = HumanMessage if source.actor == user else AIMessage
        at = {"create_time": source.at.timestamp()} if source.at else {}
        message = kind(said(turn), name=source.actor, id=turn.unit, response_metadata=at)
        found.setdefault(f"{number} {source.thread_id}", []).append(message)
    return found


def said(turn: Turn) -> str:
    """Return the text of a turn, without its date and speaker."""
    return turn.text.partition(f"{turn.provenance.actor}: ")[2]


def fill(store: SQLiteStore, data: Sequence[Conversation]) -> None:
    for number, conversation in enumerate(data):
        for turn in conversation.turns:
            value = {"text": f"{turn.provenance.actor}: {said(turn)}"}
            store.put(("locomo", str(number)), turn.unit, value, provenance=turn.provenance)


def talk(
    saver: SQLiteCheckpointer, data: Sequence[Conversation], store: SQLiteStore | None = None
) -> list[tuple[int, float]]:
    """Run the sessions through a graph, one run per two messages; with a store, remember them.

    Returns:
        For each run how many messages it remembered, and the seconds that its node took.
    """
    took: list[tuple[int, float]] = []
    node = remember_turns(store, namespace=TEMPLATE)

    def listen(state: Any, config: RunnableConfig) -> dict[str, Any]:
        if store is not None:
            started = time.perf_counter()
            node.invoke(state, config)
            took.append((2, time.perf_counter() - started))
        return {}

    builder: StateGraph[Any, None, Any, Any] = StateGraph(ChatState)
    builder.add_node("listen", listen)
    builder.add_edge(START, "listen")
    builder.add_edge("listen", END)
    graph = builder.compile(checkpointer=saver)
    for number, conversation in enumerate(data):
        for thread_id, messages in threads(number, conversation).items():
            run: Any = {"configurable": {"thread_id": thread_id, "user_id": str(number)}}
            for start in range(0, len(messages), 2):
                graph.invoke({"messages": messages[start : start + 2]}, run)
    return took


def extract(
    extraction: Extraction, data: Sequence[Conversation]
) -> tuple[list[ExtractionReport], float]:
    """Extract all threads; return the reports, and the seconds this took."""
    reports, started = [], time.perf_counter()
    for number, conversation in enumerate(data):
        user: Any = {"configurable": {"user_id": str(number)}}
        reports += [extraction.extract(thread, user) for thread in threads(number, conversation)]
    return reports, time.perf_counter() - started


def of_messages(store: SQLiteStore) -> Search:
    """Build a search that returns the ids of the messages on which the found memories are based."""

    def search(namespace: tuple[str, ...], query: str) -> list[str]:
        found = store.search(namespace, query=query)
        ids = (item.provenance.message_ids for item in found if item.provenance)
        return list(dict.fromkeys(id for each in ids for id in each))

    return search


def put(store: SQLiteStore) -> Search:
    """Build a search over a store that contains the turns themselves."""
    return lambda namespace, query: [item.key for item in store.search(namespace, query=query)]


def recalled(search: Search, data: Sequence[Conversation]) -> float:
    """Return the mean share of the evidence among the first ten results."""
    shares = [
        len(question.evidence & set(search(("locomo", str(number)), question.text)[:10]))
        / len(question.evidence)
        for number, conversation in enumerate(data)
        for question in conversation.questions
    ]
    return float(np.mean(shares))


def lacking(store: SQLiteStore, data: Sequence[Conversation]) -> list[str]:
    """Return the texts of evidence turns from which no memory was created."""
    texts = []
    for number, conversation in enumerate(data):
        items = store.search(("locomo", str(number)), limit=100_000)
        kept = {id for item in items if item.provenance for id in item.provenance.message_ids}
        evidence = {key for question in conversation.questions for key in question.evidence}
        texts += [t.text for t in conversation.turns if t.unit in evidence - kept]
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="conversations, as LoCoMo's JSON")
    parser.add_argument("--only", nargs="+", default=(), help="sample_id of conversations")
    args = parser.parse_args()
    data = list(locomo(args.data, args.only))
    with (
        tempfile.TemporaryDirectory() as folder,
        SQLiteStore.open(Path(folder) / "recall.db") as plain,
        SQLiteStore.open(Path(folder) / "memory.db") as store,
        SQLiteCheckpointer.open(Path(folder) / "memory.db") as saver,
        SQLiteStore.open(Path(folder) / "turns.db") as hot,
        SQLiteCheckpointer.open(Path(folder) / "turns.db") as hot_saver,
    ):
        fill(plain, data)
        talk(saver, data)
        extraction = Extraction(saver, store, namespace=TEMPLATE)
        reports, took = extract(extraction, data)
        again, took_again = extract(extraction, data)
        count = sum(report.messages for report in reports)
        print(f"{count} messages of {len(reports)} threads: {took / count * 1e3:.2f} ms each")
        print(f"again, with nothing new: {took_again / len(again) * 1e3:.2f} ms a thread")
        totals = {name: sum(r.changes[name] for r in reports) for name in reports[0].changes}
        refused = sum((Counter(r.refused) for r in reports), Counter())
        print(totals, "refused:", dict(refused))
        runs = talk(hot_saver, data, hot)
        each = [seconds / messages * 1e3 for messages, seconds in runs]
        p50, p95 = np.quantile(each, (0.5, 0.95))
        print(f"remember_turns, {len(runs)} runs of 2: p50 {p50:.2f}, p95 {p95:.2f} ms a message\n")
        searches = {
            "put as they are": put(plain),
            "extracted": of_messages(store),
            "remembered by runs": of_messages(hot),
        }
        for name, search in searches.items():
            print(f"recall@10, {name}: {recalled(search, data) * 100:.1f}")
        for text in lacking(store, data):
            print("no memory of the evidence:", text)


if __name__ == "__main__":
    main()
