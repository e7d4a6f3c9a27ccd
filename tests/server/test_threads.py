"""Threads as pages and runs use them, beside what the SDK's paths show."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import Context
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.types import Interrupt

from perdure import SQLiteCheckpointer, SQLiteStore
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.records import LiveRun, RunRow
from perdure.checkpointers.runs import RunTable
from perdure.checkpointers.thread_list import ThreadQuery
from perdure.errors import AlreadyLocked, StorageUnavailable, UnknownThread, VersionConflict
from perdure.server.access import Filter, Forbidden, build_predicate_for_json_that_contains
from perdure.server.threads import Threads
from perdure.settings import Settings
from perdure.storage.flow import fetch_rows
from tests.server.graphs import run_asking_graph, run_chat_turns

Use = Callable[[Threads, SQLiteStore], Awaitable[Any]]


@asynccontextmanager
async def opened(settings: Settings, filter: Filter) -> AsyncIterator[tuple[Threads, SQLiteStore]]:
    async with SQLiteCheckpointer(settings.db) as saver, SQLiteStore(settings.db) as store:
        yield Threads(saver, filter), store


def run(settings: Settings, use: Use, filter: Filter | None = None) -> Any:
    async def used() -> Any:
        async with opened(settings, filter or {}) as parts:
            return await use(*parts)

    return asyncio.run(used())


async def accepted(saver: Checkpointer, thread_id: str) -> tuple[RunTable, LiveRun]:
    """A run that is under way on a thread, of nobody."""
    live, table = LiveRun(thread_id, 0, 0, "a run", "pending", "", "chat", 1, None), RunTable(saver)
    row = RunRow(live, 0.0, 0.0, {}, request={})
    made, _ = await table.accept_run_and_list_live_run_ids(
        row, reject_if_busy=True, cancel_action=None
    )
    assert made is not None
    return table, made


async def search(threads: Threads, limit: int = 10, **wanted: Any) -> list[dict[str, Any]]:
    return await threads.search(ThreadQuery(**wanted), limit)


async def count(threads: Threads, **wanted: Any) -> int:
    return await threads.count(ThreadQuery(**wanted))


def ids(found: list[dict[str, Any]]) -> list[str]:
    return [thread["thread_id"] for thread in found]


def unfinished(thread: str, step: int) -> tuple[Any, Any, Any, Any]:
    """What a put of a checkpoint takes after which a node is still to run."""
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"] = {"branch:to:next": None}
    versions = checkpoint["channel_versions"] = {"branch:to:next": step + 1}
    metadata = {"source": "input", "step": step, "parents": {}, "run_id": "a run"}
    return (
        {"configurable": {"thread_id": thread, "checkpoint_ns": ""}},
        checkpoint,
        metadata,
        versions,
    )


def test_a_search_by_text_and_time(settings: Settings) -> None:
    run_chat_turns(settings, "one", "hi", title="The Garden")
    run_chat_turns(settings, "two", "hi")
    between = datetime.now(UTC) + timedelta(seconds=0.15)  # a head's time is exact to a tenth

    async def use(threads: Threads, store: SQLiteStore) -> None:
        await asyncio.sleep(0.4)
        await threads.create("three", {"title": "gardens"})

        assert ids(await search(threads, text="GARDEN")) == ["three", "one"]
        assert ids(await search(threads, text="tw")) == ["two"]
        assert ids(await search(threads, active_since=between)) == ["three"]
        assert ids(await search(threads, active_until=between)) == ["two", "one"]
        assert await count(threads, text="garden") == 2
        await threads.update("one", {"topic": "beds"})
        for wanted in ({}, {"topic": "beds"}):
            assert "one" not in ids(await search(threads, metadata=wanted, active_since=between))
            assert "one" in ids(await search(threads, metadata=wanted, active_until=between))

    run(settings, use)


class Watched:
    """A text that notes by which threads it is compared."""

    def __init__(self, text: str) -> None:
        self.text, self.by = text, set[int]()

    def __eq__(self, other: object) -> bool:
        self.by.add(threading.get_ident())
        return self.text == other

    __hash__ = None  # type: ignore[assignment]


def test_a_search_compares_off_the_event_loop(settings: Settings) -> None:
    """Metadata may be large, and there are many threads."""
    owner = Watched("ann")

    async def use(threads: Threads, store: SQLiteStore) -> None:
        await threads.create("t", {"owner": "ann"})
        owner.by.clear()

        assert ids(await search(threads)) == ["t"]
        assert owner.by
        assert threading.get_ident() not in owner.by

    run(settings, use, {"owner": owner})


class Counted(str):
    """A text that counts how often one is hashed or compared."""

    times = 0

    def __hash__(self) -> int:
        Counted.times += 1
        return str.__hash__(self)

    def __eq__(self, other: object) -> bool:
        Counted.times += 1
        return str.__eq__(self, other)


def test_comparing_lists_is_linear() -> None:
    """Ten times the texts take ten times the comparisons, also in lists within lists."""
    counts = []
    for size in (100, 1_000):
        texts = [Counted(n) for n in range(size)]
        holds = build_predicate_for_json_that_contains({"a": texts[::-1], "b": [[texts[-1]]]})
        Counted.times = 0
        assert holds({"a": texts, "b": [[Counted(n)] for n in range(size)]})
        counts.append(Counted.times)

    assert counts[1] < 12 * counts[0]


class Counting(int):
    """A number that counts how often one is compared."""

    times = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        Counting.times += 1
        return int.__eq__(self, other)


def test_numbers_of_one_hash_are_compared_in_linear_time() -> None:
    """A client can choose them: Python's hash of a number is no secret."""
    numbers = [Counting(n * sys.hash_info.modulus) for n in range(500)]

    assert build_predicate_for_json_that_contains({"a": numbers[::-1]})({"a": numbers})
    assert Counting.times < 10 * len(numbers)


def test_a_status_is_written_when_it_changes(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_chat_turns(settings, "t", "hi")

    async def use(threads: Threads, store: SQLiteStore) -> None:
        database, written = threads._saver.database, list[object]()
        write = database.write

        def counted(make: Any, *args: Any, **options: Any) -> Any:
            written.append(make)
            return write(make, *args, **options)

        monkeypatch.setattr(database, "write", counted)
        for _ in range(3):
            await threads.set_run_status("t", "busy")

        assert len(written) == 1
        assert ids(await search(threads, status="busy")) == ["t"]
        await threads.set_run_status("t", "error")
        assert len(written) == 2
        assert await search(threads, status="busy") == []
        assert ids(await search(threads, status="error")) == ["t"]
        await threads.set_run_status("an id that\0 has no thread", "busy")

    run(settings, use)


def test_a_deleted_thread_leaves_nothing(settings: Settings) -> None:
    async def use(threads: Threads, store: SQLiteStore) -> None:
        await threads.create("t", {"secret": 1})
        await threads.delete("t")

        assert (
            await threads._saver.database.aread(lambda: fetch_rows("SELECT * FROM threads")) == []
        )

    run(settings, use)


def test_a_thread_that_is_created_twice_at_once_keeps_its_run(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    active: list[str] = []
    forgotten: list[str] = []

    async def use() -> None:
        async with SQLiteCheckpointer(settings.db) as saver:
            late, first = [
                Threads(saver, {}, lambda _: bool(active), forgotten.append) for _ in range(2)
            ]
            find = late._list.aget

            async def found(thread_id: str) -> Any:
                try:
                    return await find(thread_id)
                finally:
                    if not active:
                        await first.create("t")
                        forgotten.clear()
                        await accepted(saver, "t")
                        active.append("a run of the first request")

            monkeypatch.setattr(late._list, "aget", found)
            made = await late.get_or_create_row("t", {})
            assert (made.is_busy, forgotten) == (True, [])

    asyncio.run(use())


def test_a_thread_that_another_program_deleted_is_gone(settings: Settings) -> None:
    async def begin(threads: Threads, store: SQLiteStore) -> None:
        await threads.update("t", {"old": 1})

    async def use(threads: Threads, store: SQLiteStore) -> None:
        assert await search(threads) == []
        with pytest.raises(UnknownThread):
            await threads.get("t")
        assert (await threads.create("t", {"new": 1}))["metadata"] == {"new": 1}

    run_chat_turns(settings, "t", "hi")
    run(settings, begin)
    with SQLiteCheckpointer.open(settings.db) as saver:
        saver.delete_thread("t")
    run(settings, use)


def test_a_thread_that_began_is_listed_once(settings: Settings) -> None:
    async def begin(threads: Threads, store: SQLiteStore) -> None:
        await threads.create("t", {"a": 1})
        await threads.create("u")

    async def use(threads: Threads, store: SQLiteStore) -> None:
        assert ids(await search(threads)) == ["t", "u"]
        assert [info.thread_id for info in await threads._saver.athreads()] == ["t"]

    run(settings, begin)
    run_chat_turns(settings, "t", "hi")
    run(settings, use)


def test_a_search_goes_on_when_a_thread_is_deleted_meanwhile(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pages of a search are of one moment."""
    monkeypatch.setattr("perdure.checkpointers.thread_list._PAGE", 2)
    for number in range(6):
        run_chat_turns(settings, f"t{number}", "hi", n=number)

    async def use(threads: Threads, store: SQLiteStore) -> None:
        opened, deleted = threads._list._decrypt_threads, False

        def deleting(rows: Any) -> Any:
            nonlocal deleted
            if not deleted:
                deleted = True
                with SQLiteCheckpointer.open(settings.db) as other:
                    other.delete_thread("t3")
            return (yield from opened(rows))

        monkeypatch.setattr(threads._list, "_decrypt_threads", deleting)
        assert ids(await search(threads, text="t")) == ["t5", "t4", "t3", "t2", "t1", "t0"]
        assert ids(await search(threads, text="t")) == ["t5", "t4", "t2", "t1", "t0"]

    run(settings, use)


def test_a_filter_hides_what_does_not_meet_it(settings: Settings) -> None:
    run_chat_turns(settings, "of-ann", "hi")

    async def use(threads: Threads, store: SQLiteStore) -> None:
        await Threads(threads._saver, {}).create("x", {"owner": "eve"})

        assert ids(await search(threads, ids=["of-ann", "x"])) == ["of-ann"]
        assert ids(await search(threads, limit=1)) == ["of-ann"]
        with pytest.raises(UnknownThread):
            await threads.get("x")
        with pytest.raises(UnknownThread):
            await threads.get_or_create_row("x", {"owner": "ann"})
        with pytest.raises(VersionConflict):
            await threads.create("x", {"owner": "ann"})
        with pytest.raises(Forbidden, match="would not be accessible to you"):
            await threads.create("y", {"owner": "eve"})
        with pytest.raises(Forbidden, match="would not be accessible to you"):
            await threads.update("of-ann", {"owner": "eve"})

    run(settings, use, {"owner": "ann"})


def test_what_a_search_by_metadata_and_status_finds(settings: Settings) -> None:
    run_asking_graph(settings, "chat", label="a")
    run_chat_turns(settings, "both", "hi", label="a")

    async def use(threads: Threads, store: SQLiteStore) -> None:
        await threads.create("new", {"label": "a", "x.y": "z", "$eq": "no operator"})
        await threads.create("theirs", {"owner": "eve", "label": "b"})
        await threads.update("both", {"label": "b"})
        await threads.set_run_status("new", "error")
        order = [each for each in ids(await search(threads)) if each in ("both", "theirs")]

        assert set(ids(await search(threads, metadata={"label": "a"}))) == {"new", "chat"}
        assert ids(await search(threads, metadata={"label": "b"})) == order
        assert set(ids(await search(threads, metadata={"owner": "ann"}))) == {"both", "chat"}
        assert ids(await search(threads, metadata={"owner": "eve", "label": "b"})) == ["theirs"]
        assert ids(await search(threads, metadata={"x.y": "z", "$eq": "no operator"})) == ["new"]
        assert ids(await search(threads, status="interrupted")) == ["chat"]
        assert ids(await search(threads, status="error")) == ["new"]
        assert await search(threads, metadata={"label": "c"}) == []

    run(settings, use)


def test_a_run_that_stops_once_more_is_interrupted(settings: Settings) -> None:
    """A graph may stop before a node, which asks nothing: only the server knows that it waits."""
    run_chat_turns(settings, "t", "hi")

    async def use(threads: Threads, store: SQLiteStore) -> None:
        for number in range(2):
            await threads._saver.aput(*unfinished("t", number))
            assert (await threads.get("t"))["status"] == "idle"
            await threads.set_run_status("t", "interrupted")
            assert (await threads.get("t"))["status"] == "interrupted"
            assert ids(await search(threads, status="interrupted")) == ["t"]
        await threads._saver.adelete_for_runs(["a run"])  # who reads the head, sees what is not run
        for status in ("idle", "interrupted"):
            shown = [each for each in await search(threads) if each["status"] == status]
            assert await search(threads, status=status) == shown

    run(settings, use)


def test_another_program_begins_a_thread_whose_run_failed(settings: Settings) -> None:
    async def use(threads: Threads, store: SQLiteStore) -> None:
        await threads.create("t")
        await threads.set_run_status("t", "error")
        assert ids(await search(threads, status="error")) == ["t"]
        await threads._saver.aput(*unfinished("t", 0))

        assert (await threads.get("t"))["status"] == "idle"
        assert ids(await search(threads, status="idle")) == ["t"]
        assert ids(await search(threads, status="error")) == []

    run(settings, use)


def test_an_order_by_status_is_that_of_what_is_shown(settings: Settings) -> None:
    """After a removal the row of a thread says that it may wait; its head says that it does not."""
    for thread in ("a", "pruned", "b", "runs"):
        run_chat_turns(settings, thread, "hi")
    run_asking_graph(settings, "asks")

    async def use(threads: Threads, store: SQLiteStore) -> None:
        await threads._saver.aprune(["pruned"])
        await threads.set_run_status("b", "error")
        await accepted(threads._saver, "runs")
        for order in ("asc", "desc"):
            wanted = ThreadQuery(sort_by="status", sort_order=order)
            found = await threads.search(wanted)
            expected = ["runs", "b", "pruned", "a", "asks"]
            if order == "desc":
                expected = ["asks", "pruned", "a", "b", "runs"]
            assert ids(found) == expected
            assert await threads.search(wanted, 2, 1) == found[1:3]
            wanted = ThreadQuery(sort_by="status", status="idle")
            assert ids(await threads.search(wanted)) == ["pruned", "a"]

    run(settings, use)


def test_a_question_of_another_form_is_shown(settings: Settings) -> None:
    """A program without langgraph may have asked it; lists of all threads have it."""
    question: list[Any] = ["may I?", Interrupt("and I?", id="i"), {"value": "or I?", "id": "j"}]
    config, *checkpoint = unfinished("t", 0)

    async def use(threads: Threads, store: SQLiteStore) -> None:
        made = await threads._saver.aput(config, *checkpoint)
        writes = [("__interrupt__", question)]
        await threads._saver.aput_writes(made, writes, "task", "~__pregel_pull, next")
        (thread,) = await search(threads, status="interrupted")
        assert thread["interrupts"] == {
            "task": [
                {"value": "may I?", "id": None},
                {"value": "and I?", "id": "i"},
                {"value": "or I?", "id": "j"},
            ]
        }

    run(settings, use)


def test_after_all_threads_there_are_none(settings: Settings) -> None:
    run_chat_turns(settings, "t", "hi")

    async def use(threads: Threads, store: SQLiteStore) -> None:
        for offset in (1, 1 << 63, 1 << 70):
            for wanted in (ThreadQuery(), ThreadQuery(text="t"), ThreadQuery(sort_by="status")):
                assert await threads.search(wanted, 10, offset) == []

    run(settings, use)


def test_a_thread_with_a_run_is_busy(settings: Settings) -> None:
    run_chat_turns(settings, "t", "hi")

    async def use(threads: Threads, store: SQLiteStore) -> None:
        table, run = await accepted(threads._saver, "t")

        assert (await threads.get("t"))["status"] == "busy"
        assert ids(await search(threads, status="busy")) == ["t"]
        assert (await threads.copy("t", {}))["status"] == "idle"
        await table.end_run(run, "success")
        assert [each["status"] for each in await search(threads)] == ["idle", "idle"]

    run(settings, use)


def test_a_thread_is_not_deleted_in_a_turn(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.server.threads._DELETE_WAIT_S", 0)
    run_chat_turns(settings, "t", "hi")

    async def use(threads: Threads, store: SQLiteStore) -> None:
        held, over = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            async with opened(settings, {}) as (others, _), others.lock_for_change("t"):
                held.set()
                await over.wait()

        other = asyncio.create_task(hold(), context=Context())
        await held.wait()
        with pytest.raises(AlreadyLocked, match="under way"):
            await threads.delete("t")
        over.set()
        await other
        assert ids(await search(threads)) == ["t"]
        await threads.delete("t")
        assert await search(threads) == []

    run(settings, use)


def test_a_database_that_is_closed_is_no_run_under_way(settings: Settings) -> None:
    """Only a lock that is not free in time tells that a run is."""

    async def use(threads: Threads, store: SQLiteStore) -> None:
        await threads._saver.aclose()
        with pytest.raises(StorageUnavailable, match="closed"):
            await threads.delete("t")

    run(settings, use)


def test_a_search_by_owner_has_nobodys_too(settings: Settings) -> None:
    async def use(threads: Threads, store: SQLiteStore) -> None:
        await threads.create("ann's", {"owner": "ann"})
        await threads.create("nobody's")
        for number in range(3):
            await threads.create(f"bob's {number}", {"owner": "bob"})
        assert ids(await search(threads, text="s", person="ann", limit=2)) == ["nobody's", "ann's"]

    run(settings, use)


def test_a_turn_is_refused_while_another_holds_the_lock(settings: Settings) -> None:
    async def use(threads: Threads, store: SQLiteStore) -> None:
        async with threads.lock_for_change("t"), opened(settings, {}) as (others, _):
            with pytest.raises(AlreadyLocked):
                async with others.lock_for_change("t"):
                    pass
        async with threads.lock_for_change("t"):
            pass

    run(settings, use)


@pytest.mark.parametrize(
    ("value", "wanted", "expected"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}, True),
        ({"a": [1, {"b": 2, "c": 3}]}, {"a": [{"b": 2}]}, True),
        ({"a": [1]}, {"a": [2]}, False),
        ({"a": [1, 2.0, 0.5, None, "x"]}, {"a": [True, 2, 0.5, None, "x"]}, True),
        ({"a": ["1", "null"]}, {"a": [1]}, False),
        ({"a": ["1", "null"]}, {"a": [None]}, False),
        ({"a": [10**400, 1e400]}, {"a": [10**400, 1e400]}, True),
        ({"a": [1, [2, 3], [4]]}, {"a": [[4, 4], [3], 1]}, True),
        ({"a": [1, [2, 3], [4]]}, {"a": [[3, 4]]}, False),
        ({"a": 1}, {"b": None}, False),
        ({"a": "x"}, {"a": {"x": 1}}, False),
        ({}, {}, True),
    ],
)
def test_what_a_value_contains(value: Any, wanted: Any, *, expected: bool) -> None:
    assert build_predicate_for_json_that_contains(wanted)(value) is expected
