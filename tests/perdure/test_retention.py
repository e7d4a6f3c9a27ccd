"""Retention: what the dry run names is exactly what goes, and nothing else."""

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
from perdure.memory.records import QUARANTINE, RESERVED_LABEL, WATERMARKS
from perdure.memory.thread_messages import Watermark
from perdure.retention import Report, Rules
from perdure.stores import Provenance, SQLiteStore
from perdure.stores.postgres import PostgresStore
from tests.backends import places
from tests.rounds import rounds
from tests.talks import talk

DAY = 86_400
MEMORIES = ("memories", "ann")
ENTRIES = (RESERVED_LABEL, QUARANTINE, *MEMORIES)
KEY = "00" * 32


class Store(SQLiteStore):
    """A store whose clock can be set back."""

    age_days = 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        self._clock = lambda: time.time() - Store.age_days * DAY
        super().__init__(*args, **options)


@contextmanager
def days_ago(days: float) -> Iterator[None]:
    Store.age_days = days
    try:
        yield
    finally:
        Store.age_days = 0.0


@contextmanager
def opened(path: Path, **options: Any) -> Iterator[tuple[SQLiteCheckpointer, Store]]:
    with (
        SQLiteCheckpointer.open(path, **options) as saver,
        Store.open(path, index=None, **options) as store,
    ):
        yield saver, store


class StoreInPostgres(PostgresStore):
    """The same in Postgres."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._clock = lambda: time.time() - Store.age_days * DAY
        super().__init__(*args, **options)


@pytest.fixture(params=["plain", "sealed", "postgres"])
def parts(request: Any, tmp_path: Path) -> Iterator[tuple[SQLiteCheckpointer, Store]]:
    if request.param == "postgres":
        place = places(tmp_path)["postgres"]()
        store = place.database(Store, StoreInPostgres, index=None)
        with place.saver() as saver, store:
            yield saver, store
        return
    with opened(tmp_path / "x.db", key=None if request.param == "plain" else KEY) as found:
        yield found


def fact(store: Store, key: str, days: float, thread_id: str, versions: int = 1) -> None:
    for number in range(versions):
        with days_ago(days + versions - number - 1):
            value = {"text": f"{key} {number}", "kind": "fact"}
            store.put(MEMORIES, key, value, provenance=Provenance(thread_id=thread_id))


def entry(store: Store, key: str, days: float, thread_id: str) -> None:
    at = (datetime.now(UTC) - timedelta(days=days)).isoformat()
    value = {"text": key, "at": at, "key": key, "reason": "secret"}
    store.put(ENTRIES, key, value, provenance=Provenance(thread_id=thread_id))


def failure(store: Store, thread_id: str, days: float) -> None:
    at = datetime.now(UTC) - timedelta(days=days)
    mark = Watermark(version=0).with_failure("TimeoutError", at, "head")
    store.batch([mark.build_put(MEMORIES, thread_id)])


def lines(store: Store) -> set[tuple[Any, ...]]:
    """Every version of every item."""
    found = store.export()
    return {(tuple(line["namespace"]), line["key"], line["version"]) for line in found}


def checkpoints(saver: SQLiteCheckpointer) -> dict[str, int]:
    return {info.thread_id: info.checkpoints for info in saver.threads(limit=1_000)}


def files(folder: Path) -> dict[str, str]:
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


def same(planned: Report, done: Report) -> None:
    """The same is named; bytes that two rules would free are counted twice before."""
    assert [replace(e, size_bytes=0) for e in planned.removals] == [
        replace(e, size_bytes=0) for e in done.removals
    ]
    assert planned.size_bytes >= done.size_bytes


@settings(max_examples=rounds(25))
@given(all_rules(), THREADS, ITEMS, ENTRIES_OF, st.dictionaries(st.sampled_from("abcd"), AGES))
def test_what_the_dry_run_names_is_exactly_what_goes(
    rules: Rules,
    threads: dict[str, tuple[float, int]],
    items: dict[str, tuple[float, str, int, bool]],
    entries: dict[str, tuple[float, str]],
    failures: dict[str, float],
) -> None:
    with TemporaryDirectory() as folder, opened(Path(folder) / "x.db") as (saver, store):
        for thread_id, (days, turns) in threads.items():
            talk(saver, thread_id, days, turns)
        for key, (days, thread_id, versions, expires) in items.items():
            fact(store, key, days, thread_id, versions)
            if expires:
                with days_ago(days):
                    store.put(("notes",), key, {"text": key}, ttl=60 * 24)
        for key, (days, thread_id) in entries.items():
            entry(store, key, days, thread_id)
        for thread_id, days in failures.items():
            failure(store, thread_id, days)
        before = checkpoints(saver), lines(store)
        planned = retention.plan(rules, saver, store)
        assert (checkpoints(saver), lines(store)) == before
        done = retention.apply(rules, saver, store)
        after = checkpoints(saver), lines(store)
        again = retention.apply(rules, saver, store)

    same(planned, done)
    named = {each.what: {*each.ids} for each in done.removals}
    idle = {t for t, (days, _) in threads.items() if days > (rules.idle_days or 100)}
    assert named.get("idle threads", set()) == before[0].keys() - after[0].keys() == idle
    left = sum(before[0][thread_id] - count for thread_id, count in after[0].items())
    assert left == done.count("checkpoints")
    stale = {key for key, (days, _) in entries.items() if days > (rules.quarantine_days or 100)}
    assert named.get("entries in quarantine", set()) == {f"memories/ann/{key}" for key in stale}
    # items: whole keys are erased, of the others only old versions go
    gone = {line[:2] for line in before[1]} - {line[:2] for line in after[1]}
    expected: set[tuple[Any, ...]] = {(ENTRIES, key) for key in stale}
    if rules.memories:
        expected |= {(MEMORIES, key) for key, (_, thread, *_) in items.items() if thread in idle}
        expected |= {(ENTRIES, key) for key, (_, thread) in entries.items() if thread in idle}
        assert len(expected) == len(stale) + done.count("memories of idle threads")
    dropped = {line for line in before[1] - after[1] if line[:2] not in expected}
    assert len(dropped) == done.count("old versions")
    expired = {k for k, (days, *_, expires) in items.items() if expires and days > 1}
    assert done.count("expired items") == len(expired)
    assert expected <= gone <= expected | {(("notes",), key) for key in expired}
    old = {t for t, days in failures.items() if days > (rules.jobs_days or 100)}
    assert named.get("failed extractions", set()) == old
    assert not [each for each in again.removals if each.count and each.what != "old versions"]


@pytest.mark.parametrize("history", [True, False])
def test_a_plan_counts_all_batches(
    parts: tuple[SQLiteCheckpointer, Store], history: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes too: of checkpoints, items and writes, as they are freed."""
    saver, store = parts
    monkeypatch.setattr(maintenance, "PRUNE_BATCH", 3)
    talk(saver, "t", 0, turns=10)
    rules = Rules(checkpoints_last=4, history=history)
    before = saver.thread("t").size_bytes
    planned = retention.plan(rules, saver, store)
    done = retention.apply(rules, saver, store)

    same(planned, done)
    assert done.count("checkpoints") == 16
    assert done.count("messages") == (0 if history else 15)
    freed = before - saver.thread("t").size_bytes
    if history:
        assert planned.size_bytes == done.size_bytes == freed
    else:  # what is forgotten makes checkpoints that stay smaller too
        assert freed >= planned.size_bytes >= done.size_bytes > freed // 2


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    """A file that is opened for reading is as it was, and no other is beside it."""
    with opened(tmp_path / "x.db") as (saver, store):
        talk(saver, "t", 30)
        fact(store, "m", 5, "t", 3)
        with days_ago(5):
            store.put(("notes",), "old", {"text": "old"}, ttl=1)
        entry(store, "x", 30, "t")
    before = files(tmp_path)
    rules = Rules(idle_days=1, memories=True, turns=True, versions_last=0, quarantine_days=1)
    with opened(tmp_path / "x.db", read_only=True) as (saver, store):
        report = retention.plan(rules, saver, store)

    assert {each.what: each.count for each in report.removals} == {
        "entries in quarantine": 1,
        "idle threads": 1,
        "memories of idle threads": 1,
        "checkpoints": 0,
        "messages": 0,
        "expired items": 1,
        "old versions": 1,
    }
    assert report.size_bytes > 0
    assert files(tmp_path) == before


def test_what_is_old_is_not_in_the_file(tmp_path: Path) -> None:
    """Nothing of a thread, its memories and the quarantine is left in the bytes."""
    with opened(tmp_path / "x.db") as (saver, store):
        talk(saver, "agathe", 30)
        fact(store, "bertil", 30, "agathe", 3)
        entry(store, "clovis", 30, "other")
        rules = Rules(idle_days=1, memories=True, quarantine_days=1)
        retention.apply(rules, saver, store)
    raw = (tmp_path / "x.db").read_bytes()
    assert not [word for word in (b"agathe", b"bertil", b"clovis") if word in raw]


def test_memories_stay_unless_asked(parts: tuple[SQLiteCheckpointer, Store]) -> None:
    saver, store = parts
    talk(saver, "t", 30)
    fact(store, "m", 30, "t")
    report = retention.apply(Rules(idle_days=7), saver, store)
    assert report.count("idle threads") == 1
    assert store.get(MEMORIES, "m") is not None


def test_a_thread_in_use_is_left(parts: tuple[SQLiteCheckpointer, Store]) -> None:
    """With its memories; so is one that the caller names, and one that goes on meanwhile."""
    saver, store = parts
    rules = Rules(idle_days=7, memories=True)
    for thread_id in "abc":
        talk(saver, thread_id, 30)
        fact(store, thread_id, 30, thread_id)
    with saver.lock("a"):
        report = retention.apply(rules, saver, store, skip=["b"])
    assert report.left == ("a",)
    assert {*checkpoints(saver)} == {"a", "b"}
    assert store.get(MEMORIES, "a") is not None
    assert retention.apply(rules, saver, store).count("idle threads") == 2
    assert checkpoints(saver) == {}


def test_a_thread_that_goes_on_meanwhile_stays(
    parts: tuple[SQLiteCheckpointer, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at it and the transaction that would delete it."""
    saver, store = parts
    talk(saver, "t", 30)
    write = saver._maintenance.delete_and_drop_cached_thread

    def late(*args: Any) -> Any:
        talk(saver, "t", 0)
        return write(*args)

    monkeypatch.setattr(saver._maintenance, "delete_and_drop_cached_thread", late)
    assert retention.apply(Rules(idle_days=7), saver, store).count("idle threads") == 0
    assert checkpoints(saver) == {"t": 8}


def test_only_some_threads(parts: tuple[SQLiteCheckpointer, Store]) -> None:
    """Named threads are looked at, and no items."""
    saver, store = parts
    for thread_id in "abc":
        talk(saver, thread_id, 30 if thread_id != "c" else 0)
    fact(store, "m", 30, "a", 3)
    rules = Rules(idle_days=7, checkpoints_last=1, versions_last=0, jobs_days=0, quarantine_days=0)
    report = retention.apply(rules, saver, store, thread_ids=["b", "c", "nobody"])
    assert [each.what for each in report.removals][::2] == [
        "idle threads",
        "messages",
    ]
    assert checkpoints(saver) == {"a": 4, "c": 1}
    assert len(store.history(MEMORIES, "m")) == 3


def test_one_at_a_time(parts: tuple[SQLiteCheckpointer, Store]) -> None:
    saver, store = parts
    begun, ended = threading.Event(), threading.Event()

    def other() -> None:
        with saver.database.lock("\0retention"):
            begun.set()
            ended.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait(10)
    try:
        with pytest.raises(StorageUnavailable, match="already"):
            retention.apply(Rules(idle_days=1), saver, store)
    finally:
        ended.set()
        thread.join()
    assert not retention.apply(Rules(idle_days=1), saver, store)


def test_it_may_be_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was reached stays done, and a second run does the rest."""
    rules = Rules(idle_days=7, memories=True, checkpoints_last=1, versions_last=0)
    with opened(tmp_path / "x.db") as (saver, store):
        for number in range(5):
            talk(saver, f"t{number}", 30)
            fact(store, f"m{number}", 30, f"t{number}", 2)
        monkeypatch.setattr(retention, "_THREADS_PER_BATCH", 2)
        delete, calls = saver.delete_idle, 0

        def cut_off(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += not options.get("dry_run")
            if calls == 2:
                raise KeyboardInterrupt
            return delete(*args, **options)

        with monkeypatch.context() as patched:
            patched.setattr(saver, "delete_idle", cut_off)
            with pytest.raises(KeyboardInterrupt):
                retention.apply(rules, saver, store)
        assert {*checkpoints(saver)} == {"t2", "t3", "t4"}
        assert retention.apply(rules, saver, store).count("idle threads") == 3
        assert (checkpoints(saver), lines(store)) == ({}, set())


def test_what_failed_is_read_with_the_next_message(tmp_path: Path) -> None:
    """A failure that is dropped leaves what was read, and the unread messages, as they were."""
    with opened(tmp_path / "x.db") as (saver, store):
        failure(store, "t", 30)
        retention.apply(Rules(jobs_days=7), saver, store)
        [note] = store.search((RESERVED_LABEL, WATERMARKS))
    assert "failed_at" not in note.value
    assert (note.value["checkpoint_id"], note.value["known"]) == ("head", [])


def test_an_entry_that_came_again_is_new(parts: tuple[SQLiteCheckpointer, Store]) -> None:
    saver, store = parts
    entry(store, "x", 30, "t")
    entry(store, "x", 0, "t")
    assert (
        retention.apply(Rules(quarantine_days=7), saver, store).count("entries in quarantine") == 0
    )
    assert store.get(ENTRIES, "x") is not None


def test_a_thread_of_another_saver_has_the_time_of_its_last_write(tmp_path: Path) -> None:
    with opened(tmp_path / "x.db") as (saver, store):
        checkpoint = {**empty_checkpoint(), "ts": "yesterday"}
        saver.put({"configurable": {"thread_id": "t"}}, checkpoint, {}, {})  # type: ignore[arg-type]
        assert not retention.plan(Rules(idle_days=1), saver, store)
        assert retention.plan(Rules(idle_days=0), saver, store).count("idle threads") == 1
        with pytest.raises(ConfigurationError, match="time zone"):
            saver.delete_idle(datetime(2026, 1, 1))


def test_awaited(parts: tuple[SQLiteCheckpointer, Store]) -> None:
    talk(parts[0], "t", 30)

    async def both() -> list[Report]:
        return [
            await call(Rules(idle_days=7), *parts) for call in (retention.aplan, retention.aapply)
        ]

    planned, done = asyncio.run(both())
    assert planned == done
    assert done


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"idle_days": -1}, "idle_days is -1; expected a number"),
        ({"checkpoints_last": 1.5}, "checkpoints_last is 1.5; expected a whole number"),
        ({"versions_last": True}, "versions_last is True"),
        ({"jobs_days": float("nan")}, "jobs_days is nan"),
        ({"turns": None}, "turns is None; expected true or false"),
        ({"history": False}, "no rule for checkpoints"),
    ],
)
def test_wrong_rules(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Rules(**given)
