"""Lists of threads contain the metadata of the heads, and search it in SQL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langgraph.types import Interrupt

from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.checkpointers.import_metadata import read_thread_head_or_raise
from perdure.checkpointers.records import ClientMetadata
from perdure.run_tables.thread_list import ListedThread, ThreadList, ThreadQuery
from perdure.storage.encryption import LangGraphSeal
from perdure.storage.flow import fetch_rows
from tests.backends import KEY, Place
from tests.contracts.erased import SECRET, read_raw_bytes
from tests.contracts.puts import config_at, put

INTERRUPT_WRITES = [("__interrupt__", [Interrupt("may I?", id="i")])]
PATH = "~__pregel_pull, ask"


def search_ids(saver: SQLiteCheckpointer, **query: Any) -> list[str]:
    """Return the ids of the threads that the SQL of a search returns, in order."""
    return [thread.thread_id for thread in search_threads(saver, **query)]


def search_threads(saver: SQLiteCheckpointer, **query: Any) -> list[ListedThread]:
    return ThreadList(saver).search(ThreadQuery(**query), lambda thread: thread, 100)


def read_listed_metadata(saver: SQLiteCheckpointer, thread_id: str = "t") -> Any:
    """Read the head metadata in a thread's row, and check that it agrees with the head."""
    thread = ThreadList(saver).get(thread_id)
    assert thread is not None
    head = read_thread_head_or_raise(saver, thread_id)
    assert thread.title == head.title
    assert thread.head_metadata is None or thread.head_metadata.items() <= head.metadata.items()
    return thread.head_metadata


def count_head_reads(saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each later search appends the number of heads that it reads."""
    read, read_counts = saver.parts.maintenance.threads.read_heads, list[int]()

    def read_and_count(rows: Any) -> Any:
        read_counts.append(len(rows))
        return read(rows)

    monkeypatch.setattr(saver.parts.maintenance.threads, "read_heads", read_and_count)
    return read_counts


def test_list_returns_metadata_of_the_head_without_reading_it(
    saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row of the thread has a copy of the metadata, which changes with the head."""
    read_counts = count_head_reads(saver, monkeypatch)
    first = put(saver, {"n": 1}, uid="1", metadata={"topic": "ponds", "n": 1, "step": 0})
    put(saver, {"n": 2}, first, uid="2", metadata={"topic": "ponds", "n": True, "step": 1})
    put(saver, {"m": 1}, ns="sub", uid="s", metadata={"topic": "another"})
    (thread,) = search_threads(saver)

    assert (thread.head_metadata, thread.title, read_counts) == (
        {"topic": "ponds", "n": True},
        "",
        [],
    )
    assert thread.head_metadata is not None
    assert thread.head_metadata["n"] is True  # which equals 1
    put(saver, {"n": 3}, config_at(uid="2"), uid="3", metadata={"topic": "rivers", "run_id": "r"})
    assert read_listed_metadata(saver) == {"topic": "rivers"}
    metadata = {"topic": "rivers", "counters_since_delta_snapshot": {"messages": (1, 1)}}
    put(
        saver, {"n": 4}, config_at(uid="3"), uid="4", metadata=metadata
    )  # of a DeltaChannel, in each put
    assert read_listed_metadata(saver) == {"topic": "rivers"}


def test_list_ignores_metadata_of_branches(saver: SQLiteCheckpointer) -> None:
    put(saver, {"n": 1}, uid="1", metadata={"source": "input", "topic": "first"})
    put(saver, {"n": 2}, config_at(uid="1"), uid="2", metadata={"topic": "head"})
    put(saver, {"n": 3}, config_at(uid="1"), uid="0", metadata={"topic": "branch"})

    assert read_listed_metadata(saver) == {"topic": "head"}


def test_listed_metadata_follows_every_move_of_the_head(saver: SQLiteCheckpointer) -> None:
    put(saver, {"n": 1}, uid="1", metadata={"topic": "old"})
    put(saver, {"n": 2}, config_at(uid="1"), uid="2", metadata={"topic": "new", "run_id": "r2"})
    saver.rewind("t", "1")
    assert read_listed_metadata(saver) == {"topic": "old"}
    saver.rewind("t", "2")
    assert read_listed_metadata(saver) == {"topic": "new"}
    saver.copy_thread("t", "part", checkpoint_id="1")
    saver.copy_thread("t", "whole")
    assert (read_listed_metadata(saver, "part"), read_listed_metadata(saver, "whole")) == (
        {"topic": "old"},
        {"topic": "new"},
    )
    saver.delete_for_runs(["r2"])
    assert read_listed_metadata(saver) == {"topic": "old"}
    put(saver, {"n": 1}, uid="1", metadata={"topic": "replaced"})
    assert read_listed_metadata(saver) == {"topic": "replaced"}
    saver.retain(Retention(last=0, history=False))
    assert read_listed_metadata(saver) == {"topic": "replaced"}


def test_search_narrows_threads_by_metadata_and_title_in_sql(saver: SQLiteCheckpointer) -> None:
    """SQL finds texts and numbers at any depth, and titles unless they are encrypted.

    With a cipher of langgraph, SQL cannot narrow the threads.
    """
    location = {"row": 7, "tags": ["a", {"deep": "b"}]}
    for number in range(3):
        metadata = {"topic": f"topic {number}", "number": number, "in": {**location, "n": number}}
        put(
            saver,
            {"messages": [HumanMessage(f"Question {number}", id="q")]},
            thread=f"t{number}",
            uid="1",
            metadata=metadata,
        )
    ThreadList(saver).create_thread_if_absent(
        "new", ClientMetadata({"topic": "topic 1", "title": "QUESTION 1?"})
    )

    if isinstance(saver._seal, LangGraphSeal):
        assert search_ids(saver, metadata={"topic": "topic 2"}) == ["new", "t2", "t1", "t0"]
        return
    conditions: Any = [("topic", "topic 2"), ("number", 2.0), ("in", {"n": 2, "row": 7})]
    for condition in conditions:
        assert search_ids(saver, metadata=dict([condition])) == ["t2"]
    assert search_ids(saver, metadata={"number": True}) == ["t1"]
    assert search_ids(saver, metadata={"topic": "topic 1"}) == ["new", "t1"]
    assert search_ids(saver, metadata={"in": {"tags": [{"deep": "b"}, "a"]}}) == ["t2", "t1", "t0"]
    assert search_ids(saver, metadata={"in": {"tags": ["b"]}}) == []
    ids_by_title = search_ids(saver, text="question 1")
    assert ids_by_title in (["new", "t1"], ["new", "t2", "t1", "t0"])


def test_search_finds_zero_with_any_sign(saver: SQLiteCheckpointer) -> None:
    put(saver, {"n": 1}, uid="1", metadata={"balance": -0.0})

    assert [search_ids(saver, metadata={"balance": zero}) for zero in (0, -0.0)] == [["t"], ["t"]]
    assert len([*saver.list(None, filter={"balance": 0})]) == 1


def test_search_finds_threads_with_more_numbers_than_search_keys(saver: SQLiteCheckpointer) -> None:
    large = {"topic": "ponds", "numbers": [*range(2_000)]}
    ThreadList(saver).create_thread_if_absent("of-client", ClientMetadata(large))
    put(saver, {"n": 1}, thread="of-head", uid="1", metadata=large)
    for thread in ("both", "beside"):
        put(saver, {"n": 1}, thread=thread, uid="1", metadata={"topic": "rivers"})
    ThreadList(saver).update_thread("both", lambda _: (ClientMetadata(large), "idle"))

    thread_ids = search_ids(saver, metadata={"topic": "ponds"})
    assert set(thread_ids) - {"beside"} == {"both", "of-head", "of-client"}
    assert "beside" not in thread_ids or isinstance(saver._seal, LangGraphSeal)


def test_search_by_owner_finds_threads_of_the_user_without_owner(saver: SQLiteCheckpointer) -> None:
    put(saver, {"n": 1}, thread="a", uid="1", metadata={"user_id": "ann"})
    put(saver, {"n": 1}, thread="b", uid="1", metadata={"owner": "ann", "user_id": "bob"})
    put(saver, {"n": 1}, thread="c", uid="1", metadata={"user_id": "bob"})

    owned = search_ids(saver, metadata={"owner": "ann"})
    assert owned == ["b", "a"] or isinstance(saver._seal, LangGraphSeal)


def test_status_reads_heads_only_of_threads_with_pending_interrupts(
    saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for thread in ("a", "b", "c"):
        put(saver, {"n": 1}, thread=thread, uid="1")
    saver.put_writes(config_at("b", uid="1"), INTERRUPT_WRITES, "task", PATH)
    saver.put_writes(config_at("c", uid="1"), [("n", 1)], "task", PATH)
    read_counts = count_head_reads(saver, monkeypatch)
    assert [thread.status.state for thread in search_threads(saver)] == ["idle", "waiting", "idle"]
    assert search_ids(saver, status="interrupted") == ["b"]
    put(saver, {"n": 1}, thread="b", ns="sub", uid="s")  # beside it
    assert search_ids(saver, status="interrupted") == ["b"]
    put(saver, {"n": 2}, config_at("b", uid="1"), uid="2")
    assert search_ids(saver, status="interrupted") == []

    assert read_counts == [1, 1, 1]


def test_thread_is_interrupted_if_write_was_stored_before_its_checkpoint(place: Place) -> None:
    """The writes of a task may be stored before the checkpoint from which the task ran."""
    with place.saver() as saver, place.saver() as other:
        put(saver, {"n": 1}, uid="1")
        other.put_writes(config_at(uid="2"), INTERRUPT_WRITES, "task", PATH)
        put(saver, {"n": 2}, config_at(uid="1"), uid="2")

        assert search_ids(other, status="interrupted") == ["t"]


def test_erase_removes_text_from_client_and_head_metadata(saver: SQLiteCheckpointer) -> None:
    metadata = {"quote": SECRET, "topic": "ponds"}
    put(saver, {"messages": [HumanMessage(SECRET, id="q")]}, uid="1", metadata=metadata)
    put(saver, {"messages": []}, config_at(uid="1"), uid="2", metadata=metadata)
    threads = ThreadList(saver)
    threads.update_thread("t", lambda _: (ClientMetadata({**metadata, "title": SECRET}), "idle"))
    assert search_ids(saver, metadata={"quote": SECRET}) == ["t"]
    saver.erase("t", ["q"])
    thread = threads.get("t")

    assert thread is not None
    assert thread.client is not None
    assert SECRET not in f"{thread}"
    assert (read_listed_metadata(saver)["topic"], thread.client.metadata["topic"]) == (
        "ponds",
        "ponds",
    )
    rows = saver.database.read(lambda: fetch_rows("SELECT * FROM threads"))
    for text in (SECRET, SECRET.casefold()):
        assert text.encode() not in b"".join(
            bytes(c) for row in rows for c in row if isinstance(c, bytes)
        )
        assert text.encode() not in read_raw_bytes(saver)


def test_list_columns_are_encrypted_with_a_key(place: Place) -> None:
    with place.saver(key=KEY) as saver:
        put(saver, {"n": 1}, uid="1", metadata={"quote": SECRET, "title": SECRET})
        ThreadList(saver).create_thread_if_absent(
            "new", ClientMetadata({"quote": SECRET, "title": SECRET})
        )
        rows = saver.database.read(
            lambda: fetch_rows(
                "SELECT list_entry, search_keys, client_metadata, client_search_keys FROM threads"
            )
        )
        assert search_ids(saver, metadata={"quote": SECRET}) == ["new", "t"]

    assert SECRET.encode() not in b"".join(bytes(column or b"") for row in rows for column in row)


def test_created_thread_without_checkpoints_is_only_in_the_thread_list(
    saver: SQLiteCheckpointer,
) -> None:
    threads, client = ThreadList(saver), ClientMetadata({"a": 1}, is_reserved=True)
    assert threads.create_thread_if_absent("t", client)
    assert not threads.create_thread_if_absent("t", client)

    assert (search_ids(saver), threads.count_threads(ThreadQuery(is_exact=True))) == (["t"], 1)
    assert (saver.threads(), saver.heads(), saver.stats()["threads"]) == ([], [], 0)
    put(saver, {"n": 1}, uid="1")
    assert [info.thread_id for info in saver.threads()] == ["t"]
    assert (read_listed_metadata(saver), threads.get("t").client) == ({}, client)  # type: ignore[union-attr]
    saver.delete_thread("t")
    assert search_ids(saver) == []


def test_another_process_can_put_into_a_created_thread(place: Place) -> None:
    with place.saver() as saver, place.saver() as other:
        assert ThreadList(saver).create_thread_if_absent("t", ClientMetadata({"a": 1}))
        put(other, {"n": 1}, uid="1", metadata={"topic": "ponds"})
        put(saver, {"n": 2}, config_at(uid="1"), uid="2", metadata={"topic": "ponds"})

        assert read_listed_metadata(saver) == read_listed_metadata(other) == {"topic": "ponds"}
        assert [info.thread_id for info in other.threads()] == ["t"]


def test_import_copies_client_metadata_and_keeps_that_of_the_target(
    tmp_path: Path, saver: SQLiteCheckpointer
) -> None:
    client = ClientMetadata({"topic": "ponds"})
    with SQLiteCheckpointer.open(tmp_path / "other.db") as other:
        put(other, {"n": 1}, uid="1", metadata={"n": 1})
        ThreadList(other).update_thread("t", lambda _: (client, "error"))
        saver.import_from(other)
        thread = ThreadList(saver).get("t")
        assert thread is not None
        assert (thread.client, thread.last_run_status, thread.head_metadata) == (
            client,
            "error",
            {"n": 1},
        )
        ThreadList(saver).update_thread("t", lambda _: (ClientMetadata({"topic": "here"}), "idle"))
        put(other, {"n": 2}, config_at(uid="1"), uid="2", metadata={"n": 2})
        saver.import_from(other)
        thread = ThreadList(saver).get("t")

    assert thread is not None
    assert thread.client is not None
    assert (thread.client.metadata, thread.last_run_status, thread.head_metadata) == (
        {"topic": "here"},
        "idle",
        {"n": 2},
    )


def test_import_takes_client_metadata_set_after_first_import(
    tmp_path: Path, saver: SQLiteCheckpointer
) -> None:
    """The target has no client metadata of its own."""
    client = ClientMetadata({"topic": "ponds"})
    with SQLiteCheckpointer.open(tmp_path / "other.db") as other:
        put(other, {"n": 1}, uid="1")
        saver.import_from(other)
        ThreadList(other).update_thread("t", lambda _: (client, "error"))
        put(other, {"n": 2}, config_at(uid="1"), uid="2")
        saver.import_from(other)
    thread = ThreadList(saver).get("t")

    assert thread is not None
    assert (thread.client, thread.last_run_status) == (client, "error")


def test_import_copies_the_status_of_threads(
    tmp_path: Path, saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the heads of threads with pending interrupts are read for this."""
    with SQLiteCheckpointer.open(tmp_path / "other.db") as other:
        for thread in ("a", "b", "c", "d"):
            put(other, {"n": 1}, thread=thread, uid="1")
        other.put_writes(config_at("b", uid="1"), INTERRUPT_WRITES, "task", PATH)
        ThreadList(other).update_thread("c", lambda _: (None, "error"))
        saver.import_from(other)
        statuses_in_source = [
            (listed_thread.thread_id, listed_thread.status, listed_thread.last_run_status)
            for listed_thread in search_threads(other)
        ]
    read_counts = count_head_reads(saver, monkeypatch)

    assert statuses_in_source == [
        (listed_thread.thread_id, listed_thread.status, listed_thread.last_run_status)
        for listed_thread in search_threads(saver)
    ]
    assert read_counts == [1]


def test_search_returns_pages_in_the_requested_order(saver: SQLiteCheckpointer) -> None:
    for number in range(5):
        put(saver, {"n": 1}, thread=f"t{(number * 2) % 5}", uid="1")
    threads = ThreadList(saver)
    threads.update_thread("t1", lambda _: (None, "error"))
    pages = [
        threads.search(ThreadQuery(is_exact=exact), lambda thread: thread.thread_id, 2, offset)
        for exact in (True, False)
        for offset in (0, 2, 4)
    ]

    assert pages[:3] == pages[3:] == [["t3", "t1"], ["t4", "t2"], ["t0"]]
    assert search_ids(saver, sort_by="thread_id", sort_order="asc") == [
        "t0",
        "t1",
        "t2",
        "t3",
        "t4",
    ]
    assert search_ids(saver, ids=["t4", "no", "t0", "t\0"]) == ["t4", "t0"]
    assert search_ids(saver, ids=[]) == []
