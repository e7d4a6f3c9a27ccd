"""Forming memories of conversations: what it takes, and how well they are recalled after it.

    python benchmarks/forming.py --data locomo10.json --only conv-26 conv-50

Each session is a thread, put through a graph with a SQLiteCheckpointer turn by turn, its speakers
as the names of messages and its date as their time; `Formation` makes memories of it, by default
without a model. Then questions are asked as in `recall.py`, whose figures are to be reached: there
the turns are put into the store as they are.
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
from langgraph.graph import END, START, StateGraph
from recall import Conversation, Search, conversations, fill, measured, show, way

from perdure.checkpointers import SQLiteCheckpointer
from perdure.memory import ChatState
from perdure.memory.forming.formation import Formation
from perdure.memory.forming.reports import FormationReport
from perdure.stores import SQLiteStore

TEMPLATE = ("locomo", "{user_id}")


def threads(conversation: Conversation) -> dict[str, list[BaseMessage]]:
    """The sessions of a conversation; who speaks first in it is the user."""
    user = conversation.turns[0].provenance.actor
    found: dict[str, list[BaseMessage]] = {}
    for turn in conversation.turns:
        source = turn.provenance
        kind = HumanMessage if source.actor == user else AIMessage
        at = {"create_time": source.at.timestamp()} if source.at else {}
        message = kind(turn.said, name=source.actor, id=turn.key, response_metadata=at)
        found.setdefault(f"{conversation.namespace[-1]} {source.thread_id}", []).append(message)
    return found


def talk(saver: SQLiteCheckpointer, data: Sequence[Conversation]) -> None:
    """Put the sessions through a graph, a run for each message of the user and what follows it."""
    builder: StateGraph[Any, None, Any, Any] = StateGraph(ChatState)
    builder.add_node("listen", lambda state: {})
    builder.add_edge(START, "listen")
    builder.add_edge("listen", END)
    graph = builder.compile(checkpointer=saver)
    for conversation in data:
        for thread_id, messages in threads(conversation).items():
            for start in range(0, len(messages), 2):
                run: Any = {"configurable": {"thread_id": thread_id}}
                graph.invoke({"messages": messages[start : start + 2]}, run)


def form(formation: Formation, data: Sequence[Conversation]) -> tuple[list[FormationReport], float]:
    """Form all threads. Returns the reports, and the seconds it took."""
    reports, started = [], time.perf_counter()
    for conversation in data:
        user: Any = {"configurable": {"user_id": conversation.namespace[-1]}}
        reports += [formation.form(thread_id, user) for thread_id in threads(conversation)]
    return reports, time.perf_counter() - started


def formed(store: SQLiteStore) -> Search:
    """The store's search, whose answers are the ids of the messages that a memory rests on."""

    def search(namespace: tuple[str, ...], query: str, limit: int) -> list[str]:
        found = store.search(namespace, query=query, limit=limit)
        ids = (item.provenance.message_ids for item in found if item.provenance)
        return list(dict.fromkeys(id for each in ids for id in each))

    return search


def lacking(store: SQLiteStore, data: Sequence[Conversation]) -> list[str]:
    """What evidence there is no memory of."""
    texts = []
    for conversation in data:
        items = store.search(conversation.namespace, limit=100_000)
        kept = {id for item in items if item.provenance for id in item.provenance.message_ids}
        evidence = {key for question in conversation.questions for key in question.evidence}
        texts += [t.text for t in conversation.turns if t.key in evidence and t.key not in kept]
    return texts


def timed(call: Callable[[], Any], times: int) -> list[float]:
    """Milliseconds that each call takes."""
    took = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        took.append((time.perf_counter() - started) * 1e3)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="conversations, as LoCoMo's JSON")
    parser.add_argument("--only", nargs="+", help="sample_id of conversations; by default all")
    args = parser.parse_args()
    data = [c for c in conversations(args.data) if not args.only or c.namespace[-1] in args.only]
    with (
        tempfile.TemporaryDirectory() as folder,
        SQLiteStore.open(Path(folder) / "recall.db") as plain,
        SQLiteStore.open(Path(folder) / "memory.db") as store,
        SQLiteCheckpointer.open(Path(folder) / "memory.db") as saver,
    ):
        fill(plain, data)
        talk(saver, data)
        formation = Formation(saver, store, namespace=TEMPLATE)
        reports, took = form(formation, data)
        again, took_again = form(formation, data)
        count = sum(report.messages for report in reports)
        print(
            f"{count} messages of {len(reports)} threads formed: {took / count * 1e3:.2f} ms each"
        )
        print(f"again, with nothing new: {took_again / len(again) * 1e3:.2f} ms a thread")
        totals = {name: sum(r.changes[name] for r in reports) for name in reports[0].changes}
        refused = sum((Counter(r.refused) for r in reports), Counter())
        print(totals, "refused:", dict(refused))
        user: Any = {"configurable": {"user_id": "conv"}}
        notes = timed(lambda: formation.note("a thread", user), 200)
        print(
            "a note that a thread waits: p50 {:.2f} ms, p95 {:.2f} ms\n".format(*quantiles(notes))
        )
        results = {"put": measured(way(plain), data), "formed": measured(formed(store), data)}
        show(results, data)
        for text in lacking(store, data):
            print("no memory of the evidence:", text)


def quantiles(took: Sequence[float]) -> tuple[float, float]:
    p50, p95 = np.quantile(took, (0.5, 0.95))
    return float(p50), float(p95)


if __name__ == "__main__":
    main()
