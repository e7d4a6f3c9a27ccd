"""Recall on conversations: perdure's ways to search, `recall`, and langgraph's InMemoryStore.

    python benchmarks/recall.py --data locomo10.json --only conv-26 conv-50 --csv recall.csv

Each turn is an item of its conversation's namespace, put with provenance (thread, position, actor,
time); each question that names its evidence is a query. recall@k is the mean over questions of the
share of the evidence among the first k. A "no word" question shares no telling word with any of its
evidence. "recall" goes through `perdure.memory`, asked today; "at its end" is asked when the
conversation has ended, so that "last week" means something; of "50 waiting" the last 50 turns are
not yet formed. InMemoryStore has the same texts and the same embedder.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from langgraph.store.memory import InMemoryStore

from perdure.memory.drivers import Steps
from perdure.memory.longterm.memories import Memory
from perdure.memory.recollection.recall import recall
from perdure.stores import Provenance, SQLiteStore
from perdure.stores.offline import DIMS, StaticEmbedder
from perdure.stores.text import query_tokens, tokens

CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open", 4: "single-hop", 5: "adversarial"}
MEASURES = ("recall@5", "recall@10", "any@10", "MRR", "nDCG@10")
DEPTH = 1000  # ranks looked at, for MRR
Search = Callable[[tuple[str, ...], str, int], Sequence[str]]


@dataclass
class Turn:
    key: str
    text: str
    said: str
    provenance: Provenance


@dataclass
class Question:
    text: str
    category: str
    evidence: frozenset[str]
    no_word: bool


@dataclass
class Conversation:
    namespace: tuple[str, ...]
    turns: list[Turn]
    questions: list[Question]


@dataclass
class Result:
    """Measures of one way to search: a list a group of questions, and milliseconds a search."""

    measures: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)
    took: list[float] = field(default_factory=list)


def conversations(path: Path) -> Iterator[Conversation]:
    for entry in json.loads(path.read_text("utf-8")):
        turns = list(turns_of(entry["conversation"]))
        said = {turn.key: set(tokens(turn.said)) for turn in turns}
        questions = []
        for asked in entry["qa"]:
            named = re.findall(r"D\d+:\d+", " ".join(asked.get("evidence", ())))
            evidence = frozenset(named) & said.keys()
            words = set(query_tokens(asked["question"]))
            if evidence:
                no_word = not any(words & said[key] for key in evidence)
                category = CATEGORIES[asked["category"]]
                questions.append(Question(asked["question"], category, evidence, no_word))
        yield Conversation(("locomo", entry["sample_id"]), turns, questions)


def turns_of(sessions: Mapping[str, Any]) -> Iterator[Turn]:
    numbers = [int(m[1]) for name in sessions if (m := re.fullmatch(r"session_(\d+)", name))]
    for number in sorted(numbers):
        when = sessions[f"session_{number}_date_time"]
        at = datetime.strptime(when, "%I:%M %p on %d %B, %Y").replace(tzinfo=UTC)
        for position, turn in enumerate(sessions[f"session_{number}"]):
            provenance = Provenance(
                thread_id=f"session-{number}", position=position, actor=turn["speaker"], at=at
            )
            text = f"{turn['speaker']}: {turn['text']}"
            yield Turn(turn["dia_id"], text, turn["text"], provenance)


def fill(store: SQLiteStore, data: Sequence[Conversation]) -> None:
    for conversation in data:
        for turn in conversation.turns:
            store.put(
                conversation.namespace, turn.key, {"text": turn.text}, provenance=turn.provenance
            )


def peer(data: Sequence[Conversation]) -> Search:
    """InMemoryStore with the same embedder."""
    embedder = StaticEmbedder()

    def embed(texts: Sequence[str]) -> list[list[float]]:
        return [vector.tolist() for vector in embedder.embed(texts)]

    store = InMemoryStore(index={"dims": DIMS, "embed": embed, "fields": ["text"]})
    for conversation in data:
        for turn in conversation.turns:
            store.put(conversation.namespace, turn.key, {"text": turn.text})
    return lambda namespace, query, limit: [
        item.key for item in store.search(namespace, query=query, limit=limit)
    ]


def way(store: SQLiteStore, **options: Any) -> Search:
    return lambda namespace, query, limit: [
        item.key for item in store.search(namespace, query=query, limit=limit, **options)
    ]


def recalled(
    store: SQLiteStore, data: Sequence[Conversation], *, clock: bool = False, **options: Any
) -> Search:
    """Through `recall`; with `clock`, asked when the conversation has ended."""
    ended = {c.namespace: max(t.provenance.at for t in c.turns if t.provenance.at) for c in data}
    return lambda namespace, query, limit: [
        memory.key
        for memory in recall(
            query,
            store=store,
            namespaces=[namespace],
            limit=limit,
            budget=None,
            now=ended[namespace] if clock else None,
            **options,
        ).memories
    ]


def waiting(data: Sequence[Conversation], count: int) -> Any:
    """The last so many turns of each conversation, as what is not yet formed."""
    ends = {c.namespace: [memory_of(c.namespace, t) for t in c.turns[-count:]] for c in data}

    def found(namespaces: Sequence[tuple[str, ...]], config: Any) -> Steps[list[Memory]]:
        yield from ()
        return ends[namespaces[0]]

    return found


def memory_of(namespace: tuple[str, ...], turn: Turn) -> Memory:
    return Memory(namespace, turn.key, turn.text, "turn", {"text": turn.text}, turn.provenance)


def measured(search: Search, data: Sequence[Conversation]) -> Result:
    result = Result()
    for conversation in data:
        for question in conversation.questions:
            started = time.perf_counter()
            search(conversation.namespace, question.text, 10)
            result.took.append((time.perf_counter() - started) * 1e3)
            ranked = search(conversation.namespace, question.text, DEPTH)
            scores = judged(ranked, question.evidence)
            groups = ["all", question.category, conversation.namespace[-1]]
            for group in (*groups, *(["no word"] if question.no_word else [])):
                result.measures.setdefault(group, []).append(scores)
    return result


def judged(ranked: Sequence[str], evidence: frozenset[str]) -> tuple[float, ...]:
    """The measures of one question, in the order of `MEASURES`."""
    hits = np.array([key in evidence for key in ranked] + [False] * 10)
    gains = 1 / np.log2(np.arange(2, 12))
    first = np.flatnonzero(hits)
    return (
        hits[:5].sum() / len(evidence),
        hits[:10].sum() / len(evidence),
        float(hits[:10].any()),
        1 / (first[0] + 1) if len(first) else 0.0,
        (gains * hits[:10]).sum() / gains[: len(evidence)].sum(),
    )


def latency(store: SQLiteStore, data: Sequence[Conversation], items: int) -> list[float]:
    """Milliseconds of a default search among `items` items of one namespace."""
    namespace = ("latency",)
    copy = 0
    while items > 0:
        for conversation in data:
            for turn in conversation.turns[:items]:
                thread = f"{copy}-{conversation.namespace[-1]}-{turn.provenance.thread_id}"
                provenance = Provenance(
                    thread_id=thread,
                    position=turn.provenance.position,
                    actor=turn.provenance.actor,
                    at=turn.provenance.at,
                )
                key = f"{thread}-{turn.key}"
                store.put(namespace, key, {"text": turn.text}, provenance=provenance)
            items -= len(conversation.turns[:items])
        copy += 1
    search, took = way(store), []
    questions = [question.text for conversation in data for question in conversation.questions]
    search(namespace, questions[0], 10)
    for question in questions:
        started = time.perf_counter()
        search(namespace, question, 10)
        took.append((time.perf_counter() - started) * 1e3)
    return took


def show(results: Mapping[str, Result], data: Sequence[Conversation]) -> None:
    names = ["all", *(c.namespace[-1] for c in data), *CATEGORIES.values(), "no word"]
    print(f"{'':22}" + "".join(f"{name:>10}" for name in (*MEASURES, "p50 ms", "p95 ms")))
    for name, result in results.items():
        means = np.mean(result.measures["all"], axis=0) * 100
        times = np.quantile(result.took, (0.5, 0.95))
        print(f"{name:22}" + "".join(f"{value:10.1f}" for value in (*means, *times)))
    print(f"\n{'recall@10':22}" + "".join(f"{name:>12}" for name in names))
    for name, result in results.items():
        groups = (result.measures.get(group, [(np.nan,) * 5]) for group in names)
        values = [np.mean(group, axis=0)[1] * 100 for group in groups]
        print(f"{name:22}" + "".join(f"{value:12.1f}" for value in values))


def write(path: Path, results: Mapping[str, Result]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("search", "questions", "count", *MEASURES))
        for name, result in results.items():
            for group, scores in result.measures.items():
                means = (np.mean(scores, axis=0) * 100).round(2)
                rows.writerow((name, group, len(scores), *means))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="conversations, as LoCoMo's JSON")
    parser.add_argument("--only", nargs="+", help="sample_id of conversations; by default all")
    parser.add_argument("--embedder", choices=("offline", "none"), default="offline")
    parser.add_argument("--csv", type=Path, help="where to write every figure")
    parser.add_argument("--waiting", type=int, nargs="*", default=[50], help="turns not formed")
    parser.add_argument("--items", type=int, default=6000, help="for the latency; 0: not measured")
    args = parser.parse_args()
    data = [c for c in conversations(args.data) if not args.only or c.namespace[-1] in args.only]
    ways: dict[str, dict[str, Any]] = {
        "text only": {"mode": "text"},
        "text, no context": {"mode": "text", "context": False},
    }
    if args.embedder == "offline":
        ways["vectors only"] = {"mode": "semantic", "context": False}
        ways["hybrid, no context"] = {"context": False}
        ways["default"] = {}
    options = {} if args.embedder == "offline" else {"index": None}
    with (
        tempfile.TemporaryDirectory() as folder,
        SQLiteStore.open(Path(folder) / "recall.db", **options) as store,
    ):
        fill(store, data)
        results = {name: measured(way(store, **kind), data) for name, kind in ways.items()}
        results["recall"] = measured(recalled(store, data), data)
        results["recall, at its end"] = measured(recalled(store, data, clock=True), data)
        for count in args.waiting:
            with SQLiteStore.open(Path(folder) / f"{count}.db", **options) as formed:
                fill(formed, [replace(c, turns=c.turns[:-count]) for c in data])
                ends = waiting(data, count)
                results[f"recall, {count} waiting"] = measured(
                    recalled(formed, data, tails=ends), data
                )
        if args.embedder == "offline":
            results["InMemoryStore"] = measured(peer(data), data)
        show(results, data)
        if args.items:
            p50, p95 = np.quantile(latency(store, data, args.items), (0.5, 0.95))
            print(f"\ndefault among {args.items:,} items: p50 {p50:.1f} ms, p95 {p95:.1f} ms")
    if args.csv:
        write(args.csv, results)


if __name__ == "__main__":
    main()
