"""Lists of the threads of a user are found by an index, and agree with the heads of all threads."""

from __future__ import annotations

import random
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import HumanMessage

from perdure.checkpointers import Retention, SQLiteCheckpointer, thread_reader
from perdure.checkpointers.records import ClientMetadata, compute_metadata_index_tag
from perdure.errors import ImportFailed
from perdure.run_tables import thread_list
from perdure.run_tables.component import create_server_tables
from perdure.run_tables.thread_list import ThreadList, ThreadQuery
from perdure.storage.encryption import LangGraphSeal
from perdure.storage.flow import fetch_rows
from tests.backends import BACKENDS, KEY
from tests.contracts.puts import config_at, put

THREADS = ["a1", "a2", "b1", "b\U0010ffff", "b\U0010ffff1"]
USERS: list[Any] = ["ann", "bob", 5, None]
FILTERS: list[dict[str, Any]] = [
    {"user_id": "ann"},
    {"user_id": 5},
    {"user_id": 5.0},
    {"owner": "bob"},
    {"user_id": "ann", "topic": "ponds"},
    {"topic": "ponds"},
    {"topic": "no thread has this"},
    {"user_id": "nobody"},
    {"user_id": None},
]
PREFIXES = ["", "a", "a1", "b", "b\U0010ffff", "\U0010ffff", "c", "\ud7ff"]


@pytest.fixture(params=["few threads", "many threads"])
def sorted_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make lists either sort the matching threads, or read all threads by activity."""
    if request.param == "many threads":
        monkeypatch.setattr(thread_reader, "_MAX_SORTED_THREADS", 0)
        monkeypatch.setattr(thread_list, "_MAX_SORTED_THREADS", 0)


def list_head_ids(saver: SQLiteCheckpointer, **options: Any) -> list[str]:
    """Return the thread ids of all pages of `heads`."""
    ids, after = list[str](), None
    while page := saver.heads(limit=2, after=after, **options):
        after = page[-1].thread_id
        ids += [head.thread_id for head in page]
    return ids


def check_lists(saver: SQLiteCheckpointer) -> None:
    """Compare each list with the heads that are read one by one, in the order of activity."""
    ids = [info.thread_id for info in saver.threads(limit=100)]
    metadata: dict[str, Any] = {}
    for thread_id in THREADS:
        record = saver.get_tuple(config_at(thread_id))
        metadata[thread_id] = {} if record is None else record.metadata
    for prefix in PREFIXES:
        expected = [uid for uid in ids if uid.startswith(prefix)]
        assert expected == [info.thread_id for info in saver.threads(prefix=prefix)]
        assert expected == list_head_ids(saver, prefix=prefix)
    for where in FILTERS:
        expected = [
            uid for uid in ids if all(metadata[uid].get(name) == where[name] for name in where)
        ]
        assert expected == list_head_ids(saver, filter=where), where
        with_prefix = [uid for uid in expected if uid.startswith("a")]
        assert with_prefix == list_head_ids(saver, filter=where, prefix="a"), where


def check_server_lists(saver: SQLiteCheckpointer) -> None:
    """Compare searches by user with the metadata of all threads."""
    threads = ThreadList(saver)
    rows = threads.search(ThreadQuery(), lambda row: row, 100)
    for name, user in product(("user_id", "owner"), ("ann", "bob", 5, "eve")):
        query = ThreadQuery(metadata={name: user})
        expected = [row.thread_id for row in rows if row.metadata.get(name) == user]
        candidates = threads.search(query, lambda row: row, 100)
        found = [row.thread_id for row in candidates if row.metadata.get(name) == user]
        assert expected == found, query
        assert threads.count_threads(query) == len(candidates)


class Operations:
    """Random operations on the threads of one database."""

    def __init__(self, saver: SQLiteCheckpointer, draws: random.Random) -> None:
        self.saver, self.draws, self.number = saver, draws, 0

    def run_any(self) -> None:
        changes = [self.rewind, self.erase, self.delete, self.copy, self.prune, self.delete_run]
        others = [self.put, self.set_client_metadata, self.drop_cache]
        self.draws.choice([self.put, self.put, *changes, *others])()

    def choose_thread(self) -> str:
        return self.draws.choice(THREADS)

    def list_checkpoint_ids(self, thread_id: str) -> list[str]:
        return [
            record.config["configurable"]["checkpoint_id"]
            for record in self.saver.list(config_at(thread_id))
        ]

    def put(self) -> None:
        thread_id, self.number = self.choose_thread(), self.number + 1
        metadata: dict[str, Any] = {"run_id": f"r{self.draws.randint(0, 3)}"}
        for name in ("user_id", "owner"):
            if self.draws.random() < 0.5:
                metadata[name] = self.draws.choice(USERS)
        if self.draws.random() < 0.3:
            metadata["topic"] = "ponds"
        parents = [None, *self.list_checkpoint_ids(thread_id)]
        parent = config_at(thread_id, uid=self.draws.choice(parents))
        messages = [HumanMessage(f"question {self.number % 3}", id=f"m{self.number % 3}")]
        put(
            self.saver,
            {"messages": messages},
            parent,
            uid=f"{self.number:04}",
            metadata=metadata,
        )

    def rewind(self) -> None:
        thread_id = self.choose_thread()
        if ids := self.list_checkpoint_ids(thread_id):
            self.saver.rewind(thread_id, self.draws.choice(ids))

    def erase(self) -> None:
        thread_id = self.choose_thread()
        if self.list_checkpoint_ids(thread_id):
            self.saver.erase(thread_id, [f"m{self.draws.randint(0, 2)}"])

    def delete(self) -> None:
        self.saver.delete_thread(self.choose_thread())

    def copy(self) -> None:
        source, target = self.choose_thread(), self.choose_thread()
        ids = self.list_checkpoint_ids(source)
        if ids and source != target:
            self.saver.delete_thread(target)
            checkpoint_id = self.draws.choice([None, *ids])
            self.saver.copy_thread(source, target, checkpoint_id=checkpoint_id)

    def prune(self) -> None:
        self.saver.retain(Retention(last=self.draws.randint(0, 2)))

    def delete_run(self) -> None:
        self.saver.delete_for_runs([f"r{self.draws.randint(0, 3)}"])

    def set_client_metadata(self) -> None:
        threads, thread_id = ThreadList(self.saver), self.choose_thread()
        name = self.draws.choice(["user_id", "owner"])
        client = ClientMetadata({name: self.draws.choice(USERS)})
        if not threads.create_thread_if_absent(thread_id, client):
            threads.update_thread(thread_id, lambda row: (client, row.last_run_status))

    def drop_cache(self) -> None:
        self.saver._cache.drop_thread(self.choose_thread())


@pytest.mark.usefixtures("sorted_threads")
@pytest.mark.parametrize("seed", range(4))
def test_lists_agree_with_the_heads_after_random_operations(
    seed: int, saver: SQLiteCheckpointer
) -> None:
    """Whatever moves a head or changes a user moves the thread in the index, too."""
    create_server_tables(saver)
    operations = Operations(saver, random.Random(seed))
    for _ in range(12):
        for _ in range(5):
            operations.run_any()
        check_lists(saver)
        check_server_lists(saver)


@pytest.mark.parametrize("seed", range(3))
def test_lists_agree_with_the_heads_after_imports(
    seed: int, saver: SQLiteCheckpointer, tmp_path: Path
) -> None:
    """Threads are imported, and imported again after they were continued in the source."""
    create_server_tables(saver)
    with SQLiteCheckpointer.open(tmp_path / "source.db") as source:
        operations = Operations(source, random.Random(seed))
        for _ in range(4):
            for _ in range(10):
                operations.put()
            with suppress(ImportFailed):  # raised for threads that have branched
                saver.import_from(source)
            check_lists(saver)
            check_server_lists(saver)


@given(st.integers(), st.integers(5, 60))
def test_lists_agree_with_the_heads_after_any_operations(seed: int, count: int) -> None:
    with SQLiteCheckpointer.open(":memory:") as saver:
        create_server_tables(saver)
        operations = Operations(saver, random.Random(seed))
        for _ in range(count):
            operations.run_any()
        check_lists(saver)
        check_server_lists(saver)


@pytest.mark.parametrize("backend", ["sealed", "postgres-sealed"])
def test_index_contains_only_keyed_hashes_of_the_user(backend: str, tmp_path: Path) -> None:
    """Another key gives other numbers, and no column contains the name of the user."""
    with BACKENDS[backend](tmp_path) as saver:
        create_server_tables(saver)
        put(saver, {"n": 1}, metadata={"user_id": "ann", "owner": "team"}, uid="1")
        client = ClientMetadata({"user_id": "ann", "owner": "team"})
        ThreadList(saver).create_thread_if_absent("new", client)
        sql = "SELECT user_tag, owner_tag, client_user_tag, client_owner_tag FROM threads"
        rows = saver.database.read(lambda: fetch_rows(sql))
        seal = saver.parts.reader.seal
        tags = [compute_metadata_index_tag(seal, *pair) for pair in client.metadata.items()]

        assert not isinstance(seal, LangGraphSeal)
        assert sorted(map(list, rows), key=str) == sorted(
            [[*tags, None, None], [None, None, *tags]], key=str
        )
    with SQLiteCheckpointer.open(tmp_path / "other.db", key=KEY[::-1]) as other:
        other_seal = other.parts.reader.seal
        assert compute_metadata_index_tag(other_seal, "user_id", "ann") not in tags
