"""Lists of threads tell what their heads have, whatever changed the heads, and find it by SQL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langgraph.types import Interrupt

from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.checkpointers.records import ClientMetadata
from perdure.checkpointers.thread_list import ListedThread, ThreadList, ThreadQuery
from perdure.checkpointers.titles import read_existing_head
from perdure.storage.encryption import LangGraphSeal
from perdure.storage.flow import fetch_rows
from tests.backends import KEY, Place
from tests.contracts.erased import SECRET, read_raw_bytes
from tests.contracts.puts import config_at, put

ASKS = [("__interrupt__", [Interrupt("may I?", id="i")])]
PATH = "~__pregel_pull, ask"


def found(saver: SQLiteCheckpointer, **query: Any) -> list[str]:
    """The threads that SQL leaves, in order."""
    return [thread.thread_id for thread in listed(saver, **query)]


def listed(saver: SQLiteCheckpointer, **query: Any) -> list[ListedThread]:
    return ThreadList(saver).search(ThreadQuery(**query), lambda thread: thread, 100)


def told(saver: SQLiteCheckpointer, thread_id: str = "t") -> Any:
    """What a list tells of a thread's metadata; it is what the head has."""
    thread = ThreadList(saver).get(thread_id)
    assert thread is not None
    head = read_existing_head(saver, thread_id)
    assert thread.title == head.title
    assert thread.head_metadata is None or thread.head_metadata.items() <= head.metadata.items()
    return thread.head_metadata


def heads_read(saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many heads each search reads from now on."""
    read, many = saver._threads.read_heads, list[int]()

    def heads_of(rows: Any) -> Any:
        many.append(len(rows))
        return read(rows)

    monkeypatch.setattr(saver._threads, "read_heads", heads_of)
    return many


def test_a_list_tells_the_metadata_of_the_head(
    saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without reading it: in the row of the thread it changes with the head."""
    many = heads_read(saver, monkeypatch)
    first = put(saver, {"n": 1}, uid="1", metadata={"topic": "ponds", "n": 1, "step": 0})
    put(saver, {"n": 2}, first, uid="2", metadata={"topic": "ponds", "n": True, "step": 1})
    put(saver, {"m": 1}, ns="sub", uid="s", metadata={"topic": "another"})
    (thread,) = listed(saver)

    assert (thread.head_metadata, thread.title, many) == ({"topic": "ponds", "n": True}, "", [])
    assert thread.head_metadata is not None
    assert thread.head_metadata["n"] is True  # which equals 1
    put(saver, {"n": 3}, config_at(uid="2"), uid="3", metadata={"topic": "rivers", "run_id": "r"})
    assert told(saver) == {"topic": "rivers"}
    metadata = {"topic": "rivers", "counters_since_delta_snapshot": {"messages": (1, 1)}}
    put(
        saver, {"n": 4}, config_at(uid="3"), uid="4", metadata=metadata
    )  # of a DeltaChannel, in each put
    assert told(saver) == {"topic": "rivers"}


def test_a_branch_tells_nothing(saver: SQLiteCheckpointer) -> None:
    put(saver, {"n": 1}, uid="1", metadata={"source": "input", "topic": "first"})
    put(saver, {"n": 2}, config_at(uid="1"), uid="2", metadata={"topic": "head"})
    put(saver, {"n": 3}, config_at(uid="1"), uid="0", metadata={"topic": "branch"})

    assert told(saver) == {"topic": "head"}


def test_whatever_moves_the_head(saver: SQLiteCheckpointer) -> None:
    put(saver, {"n": 1}, uid="1", metadata={"topic": "old"})
    put(saver, {"n": 2}, config_at(uid="1"), uid="2", metadata={"topic": "new", "run_id": "r2"})
    saver.rewind("t", "1")
    assert told(saver) == {"topic": "old"}
    saver.rewind("t", "2")
    assert told(saver) == {"topic": "new"}
    saver.copy_thread("t", "part", checkpoint_id="1")
    saver.copy_thread("t", "whole")
    assert (told(saver, "part"), told(saver, "whole")) == ({"topic": "old"}, {"topic": "new"})
    saver.delete_for_runs(["r2"])
    assert told(saver) == {"topic": "old"}
    put(saver, {"n": 1}, uid="1", metadata={"topic": "replaced"})
    assert told(saver) == {"topic": "replaced"}
    saver.retain(Retention(last=0, history=False))
    assert told(saver) == {"topic": "replaced"}


def test_sql_leaves_what_may_match(saver: SQLiteCheckpointer) -> None:
    """Texts and numbers at any depth, encrypted or not; titles, unless they are encrypted.

    With a cipher of langgraph's it cannot tell.
    """
    place = {"row": 7, "tags": ["a", {"deep": "b"}]}
    for number in range(3):
        metadata = {"topic": f"topic {number}", "number": number, "in": {**place, "n": number}}
        put(
            saver,
            {"messages": [HumanMessage(f"Question {number}", id="q")]},
            thread=f"t{number}",
            uid="1",
            metadata=metadata,
        )
    ThreadList(saver).create("new", ClientMetadata({"topic": "topic 1", "title": "QUESTION 1?"}))

    if isinstance(saver._seal, LangGraphSeal):
        assert found(saver, metadata={"topic": "topic 2"}) == ["new", "t2", "t1", "t0"]
        return
    wanted: Any = [("topic", "topic 2"), ("number", 2.0), ("in", {"n": 2, "row": 7})]
    for condition in wanted:
        assert found(saver, metadata=dict([condition])) == ["t2"]
    assert found(saver, metadata={"number": True}) == ["t1"]
    assert found(saver, metadata={"topic": "topic 1"}) == ["new", "t1"]
    assert found(saver, metadata={"in": {"tags": [{"deep": "b"}, "a"]}}) == ["t2", "t1", "t0"]
    assert found(saver, metadata={"in": {"tags": ["b"]}}) == []
    titled = found(saver, text="question 1")
    assert titled in (["new", "t1"], ["new", "t2", "t1", "t0"])


def test_a_zero_is_found_whatever_its_sign(saver: SQLiteCheckpointer) -> None:
    put(saver, {"n": 1}, uid="1", metadata={"balance": -0.0})

    assert [found(saver, metadata={"balance": each}) for each in (0, -0.0)] == [["t"], ["t"]]
    assert len([*saver.list(None, filter={"balance": 0})]) == 1


def test_what_has_too_many_numbers_to_be_found_by_is_compared(saver: SQLiteCheckpointer) -> None:
    large = {"topic": "ponds", "numbers": [*range(2_000)]}
    ThreadList(saver).create("of-client", ClientMetadata(large))
    put(saver, {"n": 1}, thread="of-head", uid="1", metadata=large)
    for thread in ("both", "beside"):
        put(saver, {"n": 1}, thread=thread, uid="1", metadata={"topic": "rivers"})
    ThreadList(saver).update("both", lambda _: (ClientMetadata(large), "idle"))

    have = found(saver, metadata={"topic": "ponds"})
    assert set(have) - {"beside"} == {"both", "of-head", "of-client"}
    assert "beside" not in have or isinstance(saver._seal, LangGraphSeal)


def test_the_owner_may_be_the_user(saver: SQLiteCheckpointer) -> None:
    put(saver, {"n": 1}, thread="a", uid="1", metadata={"user_id": "ann"})
    put(saver, {"n": 1}, thread="b", uid="1", metadata={"owner": "ann", "user_id": "bob"})
    put(saver, {"n": 1}, thread="c", uid="1", metadata={"user_id": "bob"})

    owned = found(saver, metadata={"owner": "ann"})
    assert owned == ["b", "a"] or isinstance(saver._seal, LangGraphSeal)


def test_only_threads_that_may_wait_are_looked_at(
    saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for thread in ("a", "b", "c"):
        put(saver, {"n": 1}, thread=thread, uid="1")
    saver.put_writes(config_at("b", uid="1"), ASKS, "task", PATH)
    saver.put_writes(config_at("c", uid="1"), [("n", 1)], "task", PATH)
    many = heads_read(saver, monkeypatch)
    assert [thread.status.state for thread in listed(saver)] == ["idle", "waiting", "idle"]
    assert found(saver, status="interrupted") == ["b"]
    put(saver, {"n": 1}, thread="b", ns="sub", uid="s")  # beside it
    assert found(saver, status="interrupted") == ["b"]
    put(saver, {"n": 2}, config_at("b", uid="1"), uid="2")
    assert found(saver, status="interrupted") == []

    assert many == [1, 1, 1]


def test_a_question_before_its_checkpoint(place: Place) -> None:
    """What a task writes may be stored before the checkpoint that it ran from."""
    with place.saver() as saver, place.saver() as other:
        put(saver, {"n": 1}, uid="1")
        other.put_writes(config_at(uid="2"), ASKS, "task", PATH)
        put(saver, {"n": 2}, config_at(uid="1"), uid="2")

        assert found(other, status="interrupted") == ["t"]


def test_what_a_client_gave_and_what_is_told_is_erased(saver: SQLiteCheckpointer) -> None:
    about = {"quote": SECRET, "topic": "ponds"}
    put(saver, {"messages": [HumanMessage(SECRET, id="q")]}, uid="1", metadata=about)
    put(saver, {"messages": []}, config_at(uid="1"), uid="2", metadata=about)
    threads = ThreadList(saver)
    threads.update("t", lambda _: (ClientMetadata({**about, "title": SECRET}), "idle"))
    assert found(saver, metadata={"quote": SECRET}) == ["t"]
    saver.erase("t", ["q"])
    thread = threads.get("t")

    assert thread is not None
    assert thread.client is not None
    assert SECRET not in f"{thread}"
    assert (told(saver)["topic"], thread.client.metadata["topic"]) == ("ponds", "ponds")
    rows = saver.database.read(lambda: fetch_rows("SELECT * FROM threads"))
    for text in (SECRET, SECRET.casefold()):
        assert text.encode() not in b"".join(
            bytes(c) for row in rows for c in row if isinstance(c, bytes)
        )
        assert text.encode() not in read_raw_bytes(saver)


def test_nothing_is_readable_with_a_key(place: Place) -> None:
    with place.saver(key=KEY) as saver:
        put(saver, {"n": 1}, uid="1", metadata={"quote": SECRET, "title": SECRET})
        ThreadList(saver).create("new", ClientMetadata({"quote": SECRET, "title": SECRET}))
        rows = saver.database.read(
            lambda: fetch_rows(
                "SELECT list_entry, search_keys, client_metadata, client_search_keys FROM threads"
            )
        )
        assert found(saver, metadata={"quote": SECRET}) == ["new", "t"]

    assert SECRET.encode() not in b"".join(bytes(column or b"") for row in rows for column in row)


def test_a_thread_without_a_turn_is_listed_here_only(saver: SQLiteCheckpointer) -> None:
    threads, client = ThreadList(saver), ClientMetadata({"a": 1}, is_reserved=True)
    assert threads.create("t", client)
    assert not threads.create("t", client)

    assert (found(saver), threads.count(ThreadQuery(is_exact=True))) == (["t"], 1)
    assert (saver.threads(), saver.heads(), saver.stats()["threads"]) == ([], [], 0)
    put(saver, {"n": 1}, uid="1")
    assert [info.thread_id for info in saver.threads()] == ["t"]
    assert (told(saver), threads.get("t").client) == ({}, client)  # type: ignore[union-attr]
    saver.delete_thread("t")
    assert found(saver) == []


def test_another_process_begins_what_one_has_made(place: Place) -> None:
    with place.saver() as saver, place.saver() as other:
        assert ThreadList(saver).create("t", ClientMetadata({"a": 1}))
        put(other, {"n": 1}, uid="1", metadata={"topic": "ponds"})
        put(saver, {"n": 2}, config_at(uid="1"), uid="2", metadata={"topic": "ponds"})

        assert told(saver) == told(other) == {"topic": "ponds"}
        assert [info.thread_id for info in other.threads()] == ["t"]


def test_a_merge_takes_what_a_client_gave(tmp_path: Path, saver: SQLiteCheckpointer) -> None:
    client = ClientMetadata({"topic": "ponds"})
    with SQLiteCheckpointer.open(tmp_path / "other.db") as other:
        put(other, {"n": 1}, uid="1", metadata={"n": 1})
        ThreadList(other).update("t", lambda _: (client, "error"))
        saver.import_from(other)
        thread = ThreadList(saver).get("t")
        assert thread is not None
        assert (thread.client, thread.last_run_status, thread.head_metadata) == (
            client,
            "error",
            {"n": 1},
        )
        ThreadList(saver).update("t", lambda _: (ClientMetadata({"topic": "here"}), "idle"))
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


def test_a_merge_takes_what_a_client_gave_since(tmp_path: Path, saver: SQLiteCheckpointer) -> None:
    """If none gave anything here."""
    client = ClientMetadata({"topic": "ponds"})
    with SQLiteCheckpointer.open(tmp_path / "other.db") as other:
        put(other, {"n": 1}, uid="1")
        saver.import_from(other)
        ThreadList(other).update("t", lambda _: (client, "error"))
        put(other, {"n": 2}, config_at(uid="1"), uid="2")
        saver.import_from(other)
    thread = ThreadList(saver).get("t")

    assert thread is not None
    assert (thread.client, thread.last_run_status) == (client, "error")


def test_a_merge_tells_how_threads_stand(
    tmp_path: Path, saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the source does, and only the heads of those that may wait are read for it."""
    with SQLiteCheckpointer.open(tmp_path / "other.db") as other:
        for thread in ("a", "b", "c", "d"):
            put(other, {"n": 1}, thread=thread, uid="1")
        other.put_writes(config_at("b", uid="1"), ASKS, "task", PATH)
        ThreadList(other).update("c", lambda _: (None, "error"))
        saver.import_from(other)
        there = [(each.thread_id, each.status, each.last_run_status) for each in listed(other)]
    many = heads_read(saver, monkeypatch)

    assert there == [(each.thread_id, each.status, each.last_run_status) for each in listed(saver)]
    assert many == [1]


def test_pages_and_orders(saver: SQLiteCheckpointer) -> None:
    for number in range(5):
        put(saver, {"n": 1}, thread=f"t{(number * 2) % 5}", uid="1")
    threads = ThreadList(saver)
    threads.update("t1", lambda _: (None, "error"))
    pages = [
        threads.search(ThreadQuery(is_exact=exact), lambda thread: thread.thread_id, 2, offset)
        for exact in (True, False)
        for offset in (0, 2, 4)
    ]

    assert pages[:3] == pages[3:] == [["t3", "t1"], ["t4", "t2"], ["t0"]]
    assert found(saver, sort_by="thread_id", sort_order="asc") == ["t0", "t1", "t2", "t3", "t4"]
    assert found(saver, ids=["t4", "no", "t0", "t\0"]) == ["t4", "t0"]
    assert found(saver, ids=[]) == []
