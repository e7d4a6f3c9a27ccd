"""Imports from langgraph's SQLite file, from its in-memory store and from another perdure store."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from langgraph.store.base import PutOp
from langgraph.store.memory import InMemoryStore
from langgraph.store.sqlite import AsyncSqliteStore, SqliteStore

from perdure.errors import ConfigurationError, ImportFailed, NotADatabase
from perdure.stores import Provenance, SQLiteStore, TransferReport
from perdure.stores.transfer import PAGE
from tests.backends import KEY
from tests.store_backends import Clock, list_item_keys, make_options, open_store
from tests.stores.erasing import fill_store

SPACES = [("a",), ("a", "b"), ("users", "ümit", "notes")]


def write_langgraph_items(store: Any) -> None:
    """Put and delete items that langgraph's stores accept."""
    for n, space in enumerate(SPACES):
        store.put(space, "k", {"text": f"tea {n}", "n": n, "deep": {"list": [1, None, "é"]}})
        store.put(space, "k", {"text": f"coffee {n}", "n": n})
        store.put(space, "gone", {"text": "x"})
        store.delete(space, "gone")


def list_comparable_items(store: Any) -> list[Any]:
    """Return the items of a store with times in whole seconds, as langgraph's file stores them."""
    return sorted(
        (tuple(i.namespace), i.key, json.dumps(i.value), i.created_at.timestamp() // 1)
        for i in store.search((), limit=999)
    )


@pytest.mark.parametrize("with_ttl", [False, True])
@pytest.mark.parametrize("door", ["sync", "async"])
def test_import_of_langgraph_file_keeps_times_and_ttl(
    door: str, with_ttl: bool, tmp_path: Path, file_store: SQLiteStore
) -> None:
    """Items keep their times and their remaining TTL. A second import adds nothing."""
    path = str(tmp_path / "theirs.db")

    async def write_file_async() -> None:
        async with AsyncSqliteStore.from_conn_string(path) as store:
            await store.setup()
            await store.abatch([PutOp(s, "k", {"text": f"coffee {s}"}) for s in SPACES])
            if with_ttl:
                await store.aput(("mortal",), "m", {"text": "milk"}, ttl=60)

    if door == "async":
        asyncio.run(write_file_async())
    else:
        with SqliteStore.from_conn_string(path) as store:
            store.setup()
            write_langgraph_items(store)
            if with_ttl:
                store.put(("mortal",), "m", {"text": "milk"}, ttl=60)
    before = Path(path).read_bytes()
    with SQLiteStore.open(tmp_path / "ours.db", **make_options()) as target:
        progress = list[tuple[int, int | None]]()
        report = target.import_from(path, progress=lambda done, of: progress.append((done, of)))
        second_report = target.import_from(path)
        with SqliteStore.from_conn_string(path) as store:
            theirs = list_comparable_items(store)
        ours = list_comparable_items(target)
        found_keys = list_item_keys(target.search(("users",), query="coffee"))
        mortal = target.get(("mortal",), "m", refresh_ttl=False)

    count = len(SPACES) + with_ttl
    assert (TransferReport(count), TransferReport(skipped=count)) == (report, second_report)
    assert (theirs, [(count, None)], ["k"]) == (ours, progress, found_keys)
    assert before == Path(path).read_bytes()
    assert (mortal is not None) is with_ttl
    if mortal is not None:
        assert mortal.expires_at is not None
        assert mortal.expires_at - mortal.updated_at >= timedelta(minutes=59)


def test_import_of_in_memory_store_keeps_times_and_adds_changes_as_versions(
    file_store: SQLiteStore,
) -> None:
    """Items keep both times. An item that has changed since becomes a new version."""
    source = InMemoryStore()
    write_langgraph_items(source)
    report = file_store.import_from(source)
    second_report = file_store.import_from(source)
    times = {tuple(i.namespace): (i.created_at, i.updated_at) for i in source.search((), limit=99)}
    ours = {i.namespace: (i.created_at, i.updated_at) for i in file_store.search((), limit=99)}
    source.put(("a",), "k", {"text": "changed"})
    changed = asyncio.run(file_store.aimport_from(source))

    assert (TransferReport(3), TransferReport(skipped=3)) == (report, second_report)
    assert times == ours
    assert TransferReport(1, 0, 2) == changed
    assert [item.version for item in file_store.history(("a",), "k")] == [1, 2]


def test_import_of_unsuitable_value_fails_or_skips_it(
    file_store: SQLiteStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The error says how many items were imported before.

    With on_unsuitable="skip" the value is skipped and counted.
    """
    source = InMemoryStore()
    source.batch([PutOp(("a",), f"k{n}", {"n": {n} if n == 2 else n}) for n in range(5)])
    with pytest.raises(
        ImportFailed, match=r"item 'k2' in \('a',\): .* a set; .* The 2 items before this item were"
    ):
        file_store.import_from(source)
    imported_count = len(file_store.search(()))
    report = file_store.import_from(source, on_unsuitable="skip")
    second_report = asyncio.run(file_store.aimport_from(source, on_unsuitable="skip"))

    assert imported_count == 2
    assert TransferReport(2, 0, 2, 1) == report
    assert TransferReport(0, 0, 4, 1) == second_report
    assert "skipped: item 'k2' in ('a',)" in caplog.text
    wrong: Any = "ignore"
    with pytest.raises(
        ConfigurationError, match="the argument 'on_unsuitable' is 'ignore'; expected one of"
    ):
        file_store.import_from(source, on_unsuitable=wrong)


def test_import_keeps_labels_that_langgraph_put_refuses(file_store: SQLiteStore) -> None:
    """Labels that langgraph accepts only in batches are imported."""
    source = InMemoryStore()
    source.batch([PutOp(("a.b", "*"), "k", {"text": "dots"}), PutOp(("a",), "k", {"n": 1})])

    assert TransferReport(2) == file_store.import_from(source)
    assert file_store.list_namespaces() == [("a",), ("a.b", "*")]


def test_import_of_more_than_one_page_is_complete(file_store: SQLiteStore) -> None:
    """Nested namespaces, and namespaces larger than a page, are imported completely."""
    source = InMemoryStore()
    many = [PutOp(("a", f"n{n}"), "k", {"n": n}) for n in range(PAGE + 3)]
    source.batch([*many, *(PutOp(("a",), f"k{n}", {"n": n}) for n in range(PAGE + 3))])
    report = file_store.import_from(source)

    assert TransferReport(2 * (PAGE + 3)) == report
    assert len(file_store.list_namespaces(limit=9999)) == PAGE + 4


@pytest.mark.parametrize("key", [None, KEY])
def test_import_from_perdure_store_keeps_versions_times_and_scores(
    key: bytes | None, tmp_path: Path, clock: Clock
) -> None:
    """Versions, times, provenance, TTLs and index=False are kept, also in an encrypted target."""
    with (
        open_store(tmp_path / "one.db", clock=clock, **make_options()) as source,
        open_store(tmp_path / "two.db", clock=clock, key=key, **make_options()) as target,
    ):
        fill_store(source, clock)
        lines = list(source.export())
        report, second_report = target.import_from(source), target.import_from(source)

        assert lines == list(target.export())
        assert TransferReport(8, 6) == report  # an expired item is imported as a closed version
        assert TransferReport(skipped=14) == second_report
        modes: list[Any] = ["text", "semantic", "hybrid"]
        for mode in modes:
            ours, theirs = (
                {
                    (item.namespace, item.key): item.score
                    for item in store.search((), query="a horse", mode=mode, limit=99)
                }
                for store in (target, source)
            )
            assert theirs == pytest.approx(ours)


def test_import_from_perdure_store_copies_stored_json_byte_for_byte(tmp_path: Path) -> None:
    """Fields that this version does not know are copied as well."""
    columns = "SELECT key, value, provenance, ttl, searchable FROM store_items ORDER BY key"
    with open_store(tmp_path / "old.db") as old, open_store(tmp_path / "new.db") as new:
        old.put(("a",), "k", {"n": 1}, index=False, ttl=5, provenance=Provenance(actor="user"))
        old.put(("a",), "l", {"n": 1})
        with closing(sqlite3.connect(tmp_path / "old.db")) as conn:
            conn.execute(
                """UPDATE store_items SET value = '{ "n": 1e2, "m": 10.50 }',
                provenance = '{"actor": "user", "later": 1}' WHERE key = 'k'"""
            )
            conn.commit()

        assert new.import_from(old).items == 2
        assert new.import_from(old).skipped == 2
    rows = []
    for name in ("old.db", "new.db"):
        with closing(sqlite3.connect(tmp_path / name)) as conn:
            rows.append(conn.execute(columns).fetchall())
    assert rows[0] == rows[1]
    assert rows[0][0][1] == '{ "n": 1e2, "m": 10.50 }'


def test_import_from_unsuitable_source_is_refused(tmp_path: Path, file_store: SQLiteStore) -> None:
    """A missing file, another database or another type is refused, and nothing is imported."""
    (tmp_path / "text.db").write_text("no database, though long enough for one" * 99)
    with closing(sqlite3.connect(tmp_path / "other.db")) as db:
        db.execute("CREATE TABLE store (n)")
        db.commit()
    with SqliteStore.from_conn_string(str(tmp_path / "bad.db")) as store:
        store.setup()
        write_langgraph_items(store)
    with closing(sqlite3.connect(tmp_path / "bad.db")) as db:
        db.execute("UPDATE store SET value = CAST(x'7bff' AS TEXT) WHERE prefix = 'a.b'")
        db.commit()
    wrong: list[tuple[Any, type[Exception], str]] = [
        (tmp_path / "none.db", ConfigurationError, "there is no such file"),
        (tmp_path, ConfigurationError, "there is no such file"),
        (":memory:", ConfigurationError, "cannot import from ':memory:': there is no such file"),
        ("a\0b", ConfigurationError, "there is no such file"),
        (5, ConfigurationError, "cannot import from 5; expected a path, a DSN or a store"),
        (None, ConfigurationError, "cannot import from None"),
        (tmp_path / "text.db", NotADatabase, "not an SQLite database"),
        (tmp_path / "other.db", NotADatabase, "not contain the table of langgraph's"),
    ]
    for source, expected_error, expected_message in wrong:
        with pytest.raises(expected_error, match=expected_message):
            file_store.import_from(source)
    assert file_store.list_namespaces() == []
    with pytest.raises(ImportFailed, match=r"a\.b.*The item before this item was imported"):
        file_store.import_from(tmp_path / "bad.db")

    assert file_store.list_namespaces() == [("a",)]
    assert TransferReport(1, 0, 1, 1) == file_store.import_from(
        tmp_path / "bad.db", on_unsuitable="skip"
    )
    with pytest.raises(NotADatabase, match="is a perdure database; export its items to JSON Lines"):
        file_store.import_from(file_store.database.path)
    assert not (tmp_path / "none.db").exists()


def test_import_from_damaged_file_keeps_items_before_the_damage(
    tmp_path: Path, file_store: SQLiteStore
) -> None:
    """The file has damaged pages, or a key that is not UTF-8."""
    for name, sql in (
        ("page", "SELECT 1"),
        ("key", "UPDATE store SET key = CAST(x'ff' AS TEXT) WHERE key = 'k999'"),
    ):
        path = tmp_path / f"{name}.db"
        with SqliteStore.from_conn_string(str(path)) as store:
            store.setup()
            store.batch([PutOp(("a",), f"k{n}", {"n": "x" * 99}) for n in range(1000)])
        with closing(sqlite3.connect(path)) as db:
            db.execute(sql)
            db.commit()
        if name == "page":
            whole = path.read_bytes()
            path.write_bytes(whole[: len(whole) // 2] + b"\xff" * (len(whole) // 2))
        with pytest.raises(ImportFailed, match="an item cannot be read"):
            file_store.import_from(path, on_unsuitable="skip")
