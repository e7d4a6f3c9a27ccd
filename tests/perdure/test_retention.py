"""Retention removes exactly what the dry run names."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langgraph.checkpoint.base import empty_checkpoint

from perdure import retention
from perdure.checkpointers import SQLiteCheckpointer, maintenance
from perdure.errors import ConfigurationError, StorageUnavailable
from perdure.memory.long_term.records import QUARANTINE, RESERVED_LABEL, WATERMARKS
from perdure.memory.thread_messages import Watermark
from perdure.retention import Report, Rules
from perdure.stores import Provenance, SQLiteStore
from perdure.stores.postgres import PostgresStore
from tests.backends import places
from tests.rounds import rounds
from tests.talks import store_conversation

DAY = 86_400
MEMORIES = ("memories", "ann")
ENTRIES = (RESERVED_LABEL, QUARANTINE, *MEMORIES)
KEY = "00" * 32


class AgingStore(SQLiteStore):
    """A store whose clock can be set back."""

    age_days = 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        self._clock = lambda: time.time() - AgingStore.age_days * DAY
        super().__init__(*args, **options)


@contextmanager
def set_clock_back(days: float) -> Iterator[None]:
    AgingStore.age_days = days
    try:
        yield
    finally:
        AgingStore.age_days = 0.0


@contextmanager
def open_database(path: Path, **options: Any) -> Iterator[tuple[SQLiteCheckpointer, AgingStore]]:
    with (
        SQLiteCheckpointer.open(path, **options) as saver,
        AgingStore.open(path, index=None, **options) as store,
    ):
        yield saver, store


class AgingPostgresStore(PostgresStore):
    """A Postgres store whose clock can be set back."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._clock = lambda: time.time() - AgingStore.age_days * DAY
        super().__init__(*args, **options)


@pytest.fixture(params=["plain", "sealed", "postgres"])
def saver_and_store(
    request: Any, tmp_path: Path
) -> Iterator[tuple[SQLiteCheckpointer, AgingStore]]:
    if request.param == "postgres":
        place = places(tmp_path)["postgres"]()
        store = place.database(AgingStore, AgingPostgresStore, index=None)
        with place.saver() as saver, store:
            yield saver, store
        return
    with open_database(tmp_path / "x.db", key=None if request.param == "plain" else KEY) as opened:
        yield opened


def put_fact(store: AgingStore, key: str, days: float, thread_id: str, versions: int = 1) -> None:
    for number in range(versions):
        with set_clock_back(days + versions - number - 1):
            value = {"text": f"{key} {number}", "kind": "fact"}
            store.put(MEMORIES, key, value, provenance=Provenance(thread_id=thread_id))


def put_quarantine_entry(store: AgingStore, key: str, days: float, thread_id: str) -> None:
    at = (datetime.now(UTC) - timedelta(days=days)).isoformat()
    value = {"text": key, "at": at, "key": key, "reason": "secret"}
    store.put(ENTRIES, key, value, provenance=Provenance(thread_id=thread_id))


def put_failure(store: AgingStore, thread_id: str, days: float) -> None:
    at = datetime.now(UTC) - timedelta(days=days)
    mark = Watermark(version=0).with_failure("TimeoutError", at, "head")
    store.batch([mark.build_put(MEMORIES, thread_id)])


def read_versions(store: AgingStore) -> set[tuple[Any, ...]]:
    """Return namespace, key and version of every version of every item."""
    lines = store.export()
    return {(tuple(line["namespace"]), line["key"], line["version"]) for line in lines}


def count_checkpoints(saver: SQLiteCheckpointer) -> dict[str, int]:
    return {info.thread_id: info.checkpoints for info in saver.threads(limit=1_000)}


def hash_files(folder: Path) -> dict[str, str]:
    paths = (path for path in folder.iterdir() if not path.name.endswith(("-shm", "-wal")))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


AGES = st.sampled_from((0.0, 5.0, 20.0))
DAYS = st.none() | st.sampled_from((1.0, 10.0))
LAST = st.none() | st.integers(0, 3)
THREADS = st.dictionaries(st.sampled_from("abcd"), st.tuples(AGES, st.integers(1, 3)))
ITEMS = st.dictionaries(
    st.sampled_from("mnop"),
    st.tuples(AGES, st.sampled_from("abcd"), st.integers(1, 3), st.booleans()),
)
ENTRIES_OF = st.dictionaries(st.sampled_from("xyz"), st.tuples(AGES, st.sampled_from("abcd")))


@st.composite
def all_rules(draw: st.DrawFn) -> Rules:
    rules = Rules(
        idle_days=draw(DAYS),
        memories=draw(st.booleans()),
        checkpoints_last=draw(LAST),
        turns=draw(st.booleans()),
        versions_last=draw(LAST),
        versions_days=draw(DAYS),
        quarantine_days=draw(DAYS),
        jobs_days=draw(DAYS),
    )
    return replace(rules, history=not rules.checkpoints or draw(st.booleans()))


def assert_same_removals(planned: Report, report: Report) -> None:
    """Check that both reports name the same; a plan may count bytes twice that two rules free."""
    assert [replace(e, size_bytes=0) for e in planned.removals] == [
        replace(e, size_bytes=0) for e in report.removals
    ]
    assert planned.size_bytes >= report.size_bytes


@settings(max_examples=rounds(25))
@given(all_rules(), THREADS, ITEMS, ENTRIES_OF, st.dictionaries(st.sampled_from("abcd"), AGES))
def test_retention_removes_exactly_what_the_plan_names(
    rules: Rules,
    threads: dict[str, tuple[float, int]],
    items: dict[str, tuple[float, str, int, bool]],
    entries: dict[str, tuple[float, str]],
    failures: dict[str, float],
) -> None:
    with TemporaryDirectory() as folder, open_database(Path(folder) / "x.db") as (saver, store):
        for thread_id, (days, turns) in threads.items():
            store_conversation(saver, thread_id, days, turns)
        for key, (days, thread_id, versions, expires) in items.items():
            put_fact(store, key, days, thread_id, versions)
            if expires:
                with set_clock_back(days):
                    store.put(("notes",), key, {"text": key}, ttl=60 * 24)
        for key, (days, thread_id) in entries.items():
            put_quarantine_entry(store, key, days, thread_id)
        for thread_id, days in failures.items():
            put_failure(store, thread_id, days)
        before = count_checkpoints(saver), read_versions(store)
        planned = retention.plan(rules, saver, store)
        assert (count_checkpoints(saver), read_versions(store)) == before
        report = retention.apply(rules, saver, store)
        after = count_checkpoints(saver), read_versions(store)
        again = retention.apply(rules, saver, store)

    assert_same_removals(planned, report)
    ids_by_kind = {removal.what: {*removal.ids} for removal in report.removals}
    idle = {t for t, (days, _) in threads.items() if days > (rules.idle_days or 100)}
    assert ids_by_kind.get("idle threads", set()) == before[0].keys() - after[0].keys() == idle
    removed_checkpoints = sum(before[0][thread_id] - count for thread_id, count in after[0].items())
    assert removed_checkpoints == report.count("checkpoints")
    stale = {key for key, (days, _) in entries.items() if days > (rules.quarantine_days or 100)}
    assert ids_by_kind.get("entries in quarantine", set()) == {
        f"memories/ann/{key}" for key in stale
    }
    # items: whole keys are erased, of the others only old versions go
    removed_keys = {line[:2] for line in before[1]} - {line[:2] for line in after[1]}
    expected: set[tuple[Any, ...]] = {(ENTRIES, key) for key in stale}
    if rules.memories:
        expected |= {(MEMORIES, key) for key, (_, thread, *_) in items.items() if thread in idle}
        expected |= {(ENTRIES, key) for key, (_, thread) in entries.items() if thread in idle}
        assert len(expected) == len(stale) + report.count("memories of idle threads")
    removed_versions = {line for line in before[1] - after[1] if line[:2] not in expected}
    assert len(removed_versions) == report.count("old versions")
    expired = {k for k, (days, *_, expires) in items.items() if expires and days > 1}
    assert report.count("expired items") == len(expired)
    assert expected <= removed_keys <= expected | {(("notes",), key) for key in expired}
    old = {t for t, days in failures.items() if days > (rules.jobs_days or 100)}
    assert ids_by_kind.get("failed extractions", set()) == old
    assert not [
        removal for removal in again.removals if removal.count and removal.what != "old versions"
    ]


@pytest.mark.parametrize("history", [True, False])
def test_plan_counts_bytes_of_all_batches(
    saver_and_store: tuple[SQLiteCheckpointer, AgingStore],
    history: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bytes are those of checkpoints, items and writes that are then freed."""
    saver, store = saver_and_store
    monkeypatch.setattr(maintenance, "PRUNE_BATCH", 3)
    store_conversation(saver, "t", 0, turns=10)
    rules = Rules(checkpoints_last=4, history=history)
    before = saver.thread("t").size_bytes
    planned = retention.plan(rules, saver, store)
    report = retention.apply(rules, saver, store)

    assert_same_removals(planned, report)
    assert report.count("checkpoints") == 16
    assert report.count("messages") == (0 if history else 15)
    freed = before - saver.thread("t").size_bytes
    if history:
        assert planned.size_bytes == report.size_bytes == freed
    else:  # forgotten messages also make the remaining checkpoints smaller
        assert freed >= planned.size_bytes >= report.size_bytes > freed // 2


def test_plan_of_read_only_file_writes_nothing(tmp_path: Path) -> None:
    """The file is unchanged, and no other file is created next to it."""
    with open_database(tmp_path / "x.db") as (saver, store):
        store_conversation(saver, "t", 30)
        put_fact(store, "m", 5, "t", 3)
        with set_clock_back(5):
            store.put(("notes",), "old", {"text": "old"}, ttl=1)
        put_quarantine_entry(store, "x", 30, "t")
    before = hash_files(tmp_path)
    rules = Rules(idle_days=1, memories=True, turns=True, versions_last=0, quarantine_days=1)
    with open_database(tmp_path / "x.db", read_only=True) as (saver, store):
        report = retention.plan(rules, saver, store)

    assert {removal.what: removal.count for removal in report.removals} == {
        "entries in quarantine": 1,
        "idle threads": 1,
        "memories of idle threads": 1,
        "checkpoints": 0,
        "messages": 0,
        "expired items": 1,
        "old versions": 1,
    }
    assert report.size_bytes > 0
    assert hash_files(tmp_path) == before


def test_removed_texts_are_not_in_bytes_of_file(tmp_path: Path) -> None:
    """Texts of a thread, of its memories and of the quarantine are removed."""
    with open_database(tmp_path / "x.db") as (saver, store):
        store_conversation(saver, "agathe", 30)
        put_fact(store, "bertil", 30, "agathe", 3)
        put_quarantine_entry(store, "clovis", 30, "other")
        rules = Rules(idle_days=1, memories=True, quarantine_days=1)
        retention.apply(rules, saver, store)
    raw = (tmp_path / "x.db").read_bytes()
    assert not [word for word in (b"agathe", b"bertil", b"clovis") if word in raw]


def test_memories_of_idle_threads_are_kept_by_default(
    saver_and_store: tuple[SQLiteCheckpointer, AgingStore],
) -> None:
    saver, store = saver_and_store
    store_conversation(saver, "t", 30)
    put_fact(store, "m", 30, "t")
    report = retention.apply(Rules(idle_days=7), saver, store)
    assert report.count("idle threads") == 1
    assert store.get(MEMORIES, "m") is not None


def test_locked_or_skipped_thread_is_kept_with_its_memories(
    saver_and_store: tuple[SQLiteCheckpointer, AgingStore],
) -> None:
    """A later call, when the threads are free, removes them."""
    saver, store = saver_and_store
    rules = Rules(idle_days=7, memories=True)
    for thread_id in "abc":
        store_conversation(saver, thread_id, 30)
        put_fact(store, thread_id, 30, thread_id)
    with saver.lock("a"):
        report = retention.apply(rules, saver, store, skip=["b"])
    assert report.left == ("a",)
    assert {*count_checkpoints(saver)} == {"a", "b"}
    assert store.get(MEMORIES, "a") is not None
    assert retention.apply(rules, saver, store).count("idle threads") == 2
    assert count_checkpoints(saver) == {}


def test_thread_that_continues_during_retention_is_kept(
    saver_and_store: tuple[SQLiteCheckpointer, AgingStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread continues between the check and the transaction that would delete it."""
    saver, store = saver_and_store
    store_conversation(saver, "t", 30)
    write = saver._maintenance.delete_and_drop_cached_thread

    def continue_and_delete(*args: Any) -> Any:
        store_conversation(saver, "t", 0)
        return write(*args)

    monkeypatch.setattr(saver._maintenance, "delete_and_drop_cached_thread", continue_and_delete)
    assert retention.apply(Rules(idle_days=7), saver, store).count("idle threads") == 0
    assert count_checkpoints(saver) == {"t": 8}


def test_retention_of_named_threads_keeps_others_and_items(
    saver_and_store: tuple[SQLiteCheckpointer, AgingStore],
) -> None:
    """Only the named threads are checked."""
    saver, store = saver_and_store
    for thread_id in "abc":
        store_conversation(saver, thread_id, 30 if thread_id != "c" else 0)
    put_fact(store, "m", 30, "a", 3)
    rules = Rules(idle_days=7, checkpoints_last=1, versions_last=0, jobs_days=0, quarantine_days=0)
    report = retention.apply(rules, saver, store, thread_ids=["b", "c", "nobody"])
    assert [removal.what for removal in report.removals][::2] == [
        "idle threads",
        "messages",
    ]
    assert count_checkpoints(saver) == {"a": 4, "c": 1}
    assert len(store.history(MEMORIES, "m")) == 3


def test_second_retention_is_refused_while_one_runs(
    saver_and_store: tuple[SQLiteCheckpointer, AgingStore],
) -> None:
    saver, store = saver_and_store
    begun, ended = threading.Event(), threading.Event()

    def hold_lock() -> None:
        with saver.database.lock("\0retention"):
            begun.set()
            ended.wait(10)

    thread = threading.Thread(target=hold_lock)
    thread.start()
    begun.wait(10)
    try:
        with pytest.raises(StorageUnavailable, match="already"):
            retention.apply(Rules(idle_days=1), saver, store)
    finally:
        ended.set()
        thread.join()
    assert not retention.apply(Rules(idle_days=1), saver, store)


def test_interrupted_retention_is_completed_by_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removals before the interruption stay."""
    rules = Rules(idle_days=7, memories=True, checkpoints_last=1, versions_last=0)
    with open_database(tmp_path / "x.db") as (saver, store):
        for number in range(5):
            store_conversation(saver, f"t{number}", 30)
            put_fact(store, f"m{number}", 30, f"t{number}", 2)
        monkeypatch.setattr(retention, "_THREADS_PER_BATCH", 2)
        delete, calls = saver.delete_idle, 0

        def delete_or_interrupt(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += not options.get("dry_run")
            if calls == 2:
                raise KeyboardInterrupt
            return delete(*args, **options)

        with monkeypatch.context() as patched:
            patched.setattr(saver, "delete_idle", delete_or_interrupt)
            with pytest.raises(KeyboardInterrupt):
                retention.apply(rules, saver, store)
        assert {*count_checkpoints(saver)} == {"t2", "t3", "t4"}
        assert retention.apply(rules, saver, store).count("idle threads") == 3
        assert (count_checkpoints(saver), read_versions(store)) == ({}, set())


def test_removal_of_failure_keeps_position_of_watermark(tmp_path: Path) -> None:
    """The messages that were read and those that are unread stay the same."""
    with open_database(tmp_path / "x.db") as (saver, store):
        put_failure(store, "t", 30)
        retention.apply(Rules(jobs_days=7), saver, store)
        [note] = store.search((RESERVED_LABEL, WATERMARKS))
    assert "failed_at" not in note.value
    assert (note.value["checkpoint_id"], note.value["known"]) == ("head", [])


def test_quarantine_entry_that_was_put_again_is_kept(
    saver_and_store: tuple[SQLiteCheckpointer, AgingStore],
) -> None:
    saver, store = saver_and_store
    put_quarantine_entry(store, "x", 30, "t")
    put_quarantine_entry(store, "x", 0, "t")
    assert (
        retention.apply(Rules(quarantine_days=7), saver, store).count("entries in quarantine") == 0
    )
    assert store.get(ENTRIES, "x") is not None


def test_thread_with_invalid_timestamp_is_as_old_as_its_last_write(tmp_path: Path) -> None:
    with open_database(tmp_path / "x.db") as (saver, store):
        checkpoint = {**empty_checkpoint(), "ts": "yesterday"}
        saver.put({"configurable": {"thread_id": "t"}}, checkpoint, {}, {})  # type: ignore[arg-type]
        assert not retention.plan(Rules(idle_days=1), saver, store)
        assert retention.plan(Rules(idle_days=0), saver, store).count("idle threads") == 1
        with pytest.raises(ConfigurationError, match="time zone"):
            saver.delete_idle(datetime(2026, 1, 1))


def test_awaited_plan_equals_awaited_retention(
    saver_and_store: tuple[SQLiteCheckpointer, AgingStore],
) -> None:
    store_conversation(saver_and_store[0], "t", 30)

    async def plan_and_apply() -> list[Report]:
        return [
            await call(Rules(idle_days=7), *saver_and_store)
            for call in (retention.aplan, retention.aapply)
        ]

    planned, report = asyncio.run(plan_and_apply())
    assert planned == report
    assert report


@pytest.mark.parametrize(
    ("values", "expected_error"),
    [
        ({"idle_days": -1}, "idle_days is -1; expected a number"),
        ({"checkpoints_last": 1.5}, "checkpoints_last is 1.5; expected an integer"),
        ({"versions_last": True}, "versions_last is True"),
        ({"jobs_days": float("nan")}, "jobs_days is nan"),
        ({"turns": None}, "turns is None; expected true or false"),
        ({"history": False}, "without a retention rule for checkpoints"),
    ],
)
def test_invalid_rule_is_refused_by_name(values: dict[str, Any], expected_error: str) -> None:
    with pytest.raises(ConfigurationError, match=expected_error):
        Rules(**values)
