"""The class `Threads`, as pages and runs use it."""

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
from perdure.errors import AlreadyLocked, StorageUnavailable, UnknownThread, VersionConflict
from perdure.run_tables.records import LiveRun, RunRow
from perdure.run_tables.runs import RunTable
from perdure.run_tables.thread_list import ThreadQuery
from perdure.server.http.access import Filter, Forbidden, build_json_containment_predicate
from perdure.server.threads import Threads
from perdure.settings import Settings
from perdure.storage.flow import fetch_rows
from tests.server.graphs import run_asking_graph, run_chat_turns
from tests.server_tables import open_table

Use = Callable[[Threads, SQLiteStore], Awaitable[Any]]


@asynccontextmanager
async def open_threads(
    settings: Settings, filter: Filter
) -> AsyncIterator[tuple[Threads, SQLiteStore]]:
    async with SQLiteCheckpointer(settings.db) as saver, SQLiteStore(settings.db) as store:
        yield Threads(saver, filter), store


def run_with_threads(settings: Settings, use: Use, filter: Filter | None = None) -> Any:
    async def used() -> Any:
        async with open_threads(settings, filter or {}) as parts:
            return await use(*parts)

    return asyncio.run(used())


async def accept_run(saver: Checkpointer, thread_id: str) -> tuple[RunTable, LiveRun]:
    """Accept a run without an owner on a thread, and return the table and the run."""
    live, table = (
        LiveRun(thread_id, 0, 0, "a run", "pending", "", "chat", 1, None),
        open_table(RunTable, saver),
    )
    row = RunRow(live, 0.0, 0.0, {}, request={})
    made, _ = await table.accept_run_and_list_live_run_ids(
        row, reject_if_busy=True, cancel_action=None
    )
    assert made is not None
    return table, made


async def search_threads(threads: Threads, limit: int = 10, **wanted: Any) -> list[dict[str, Any]]:
    return await threads.search(ThreadQuery(**wanted), limit)


async def count_threads(threads: Threads, **wanted: Any) -> int:
    return await threads.count(ThreadQuery(**wanted))


def thread_ids(found: list[dict[str, Any]]) -> list[str]:
    return [thread["thread_id"] for thread in found]


def build_unfinished_put(thread: str, step: int) -> tuple[Any, Any, Any, Any]:
    """Return the arguments of a put after which one node still has to run."""
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


def test_search_filters_by_text_and_time(settings: Settings) -> None:
    run_chat_turns(settings, "one", "hi", title="The Garden")
    run_chat_turns(settings, "two", "hi")
    between = datetime.now(UTC) + timedelta(seconds=0.15)  # a head's time is exact to a tenth

    async def use(threads: Threads, store: SQLiteStore) -> None:
        await asyncio.sleep(0.4)
        await threads.create("three", {"title": "gardens"})

        assert thread_ids(await search_threads(threads, text="GARDEN")) == ["three", "one"]
        assert thread_ids(await search_threads(threads, text="tw")) == ["two"]
        assert thread_ids(await search_threads(threads, active_since=between)) == ["three"]
        assert thread_ids(await search_threads(threads, active_until=between)) == ["two", "one"]
        assert await count_threads(threads, text="garden") == 2
        await threads.update("one", {"topic": "beds"})
        for wanted in ({}, {"topic": "beds"}):
            assert "one" not in thread_ids(
                await search_threads(threads, metadata=wanted, active_since=between)
            )
            assert "one" in thread_ids(
                await search_threads(threads, metadata=wanted, active_until=between)
            )

    run_with_threads(settings, use)


class ComparisonRecorder:
    """A text that records the OS threads that compare it."""

    def __init__(self, text: str) -> None:
        self.text, self.by = text, set[int]()

    def __eq__(self, other: object) -> bool:
        self.by.add(threading.get_ident())
        return self.text == other

    __hash__ = None  # type: ignore[assignment]


def test_search_compares_metadata_off_event_loop(settings: Settings) -> None:
    """Comparing large metadata of many threads would block the event loop."""
    owner = ComparisonRecorder("ann")

    async def use(threads: Threads, store: SQLiteStore) -> None:
        await threads.create("t", {"owner": "ann"})
        owner.by.clear()

        assert thread_ids(await search_threads(threads)) == ["t"]
        assert owner.by
        assert threading.get_ident() not in owner.by

    run_with_threads(settings, use, {"owner": owner})


class CountingText(str):
    """A text that counts how often such texts are hashed or compared."""

    times = 0

    def __hash__(self) -> int:
        CountingText.times += 1
        return str.__hash__(self)

    def __eq__(self, other: object) -> bool:
        CountingText.times += 1
        return str.__eq__(self, other)


def test_comparing_lists_takes_linear_time() -> None:
    """Ten times as many texts need about ten times as many comparisons, also in nested lists."""
    counts = []
    for size in (100, 1_000):
        texts = [CountingText(n) for n in range(size)]
        holds = build_json_containment_predicate({"a": texts[::-1], "b": [[texts[-1]]]})
        CountingText.times = 0
        assert holds({"a": texts, "b": [[CountingText(n)] for n in range(size)]})
        counts.append(CountingText.times)

    assert counts[1] < 12 * counts[0]


class CountingNumber(int):
    """A number that counts how often such numbers are compared."""

    times = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        CountingNumber.times += 1
        return int.__eq__(self, other)


def test_numbers_with_equal_hash_are_compared_in_linear_time() -> None:
    """A client can choose such numbers, because Python's hash of a number is not secret."""
    numbers = [CountingNumber(n * sys.hash_info.modulus) for n in range(500)]

    assert build_json_containment_predicate({"a": numbers[::-1]})({"a": numbers})
    assert CountingNumber.times < 10 * len(numbers)


def test_run_status_is_written_only_when_it_changes(
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
        assert thread_ids(await search_threads(threads, status="busy")) == ["t"]
        await threads.set_run_status("t", "error")
        assert len(written) == 2
        assert await search_threads(threads, status="busy") == []
        assert thread_ids(await search_threads(threads, status="error")) == ["t"]
        await threads.set_run_status("an id that\0 has no thread", "busy")

    run_with_threads(settings, use)


def test_deleted_thread_leaves_no_row(settings: Settings) -> None:
    async def use(threads: Threads, store: SQLiteStore) -> None:
        await threads.create("t", {"secret": 1})
        await threads.delete("t")

        assert (
            await threads._saver.database.aread(lambda: fetch_rows("SELECT * FROM threads")) == []
        )

    run_with_threads(settings, use)


def test_concurrent_creation_of_thread_keeps_its_run(
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
                        await accept_run(saver, "t")
                        active.append("a run of the first request")

            monkeypatch.setattr(late._list, "aget", found)
            made = await late.get_or_create_row("t", {})
            assert (made.is_busy, forgotten) == (True, [])

    asyncio.run(use())


def test_thread_deleted_by_other_program_is_not_found(settings: Settings) -> None:
    async def begin(threads: Threads, store: SQLiteStore) -> None:
        await threads.update("t", {"old": 1})

    async def use(threads: Threads, store: SQLiteStore) -> None:
        assert await search_threads(threads) == []
        with pytest.raises(UnknownThread):
            await threads.get("t")
        assert (await threads.create("t", {"new": 1}))["metadata"] == {"new": 1}

    run_chat_turns(settings, "t", "hi")
    run_with_threads(settings, begin)
    with SQLiteCheckpointer.open(settings.db) as saver:
        saver.delete_thread("t")
    run_with_threads(settings, use)


def test_thread_with_first_checkpoint_is_listed_once(settings: Settings) -> None:
    async def begin(threads: Threads, store: SQLiteStore) -> None:
        await threads.create("t", {"a": 1})
        await threads.create("u")

    async def use(threads: Threads, store: SQLiteStore) -> None:
        assert thread_ids(await search_threads(threads)) == ["t", "u"]
        assert [info.thread_id for info in await threads._saver.athreads()] == ["t"]

    run_with_threads(settings, begin)
    run_chat_turns(settings, "t", "hi")
    run_with_threads(settings, use)


def test_search_continues_if_thread_is_deleted_meanwhile(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pages of a search are read from one snapshot."""
    monkeypatch.setattr("perdure.run_tables.thread_list._PAGE", 2)
    for number in range(6):
        run_chat_turns(settings, f"t{number}", "hi", n=number)

    async def use(threads: Threads, store: SQLiteStore) -> None:
        decrypt_threads, deleted = threads._list._decrypt_threads, False

        def deleting(rows: Any) -> Any:
            nonlocal deleted
            if not deleted:
                deleted = True
                with SQLiteCheckpointer.open(settings.db) as other:
                    other.delete_thread("t3")
            return (yield from decrypt_threads(rows))

        monkeypatch.setattr(threads._list, "_decrypt_threads", deleting)
        assert thread_ids(await search_threads(threads, text="t")) == [
            "t5",
            "t4",
            "t3",
            "t2",
            "t1",
            "t0",
        ]
        assert thread_ids(await search_threads(threads, text="t")) == ["t5", "t4", "t2", "t1", "t0"]

    run_with_threads(settings, use)


def test_filter_hides_and_protects_threads_that_do_not_match(settings: Settings) -> None:
    run_chat_turns(settings, "of-ann", "hi")

    async def use(threads: Threads, store: SQLiteStore) -> None:
        await Threads(threads._saver, {}).create("x", {"owner": "eve"})

        assert thread_ids(await search_threads(threads, ids=["of-ann", "x"])) == ["of-ann"]
        assert thread_ids(await search_threads(threads, limit=1)) == ["of-ann"]
        with pytest.raises(UnknownThread):
            await threads.get("x")
        with pytest.raises(UnknownThread):
            await threads.get_or_create_row("x", {"owner": "ann"})
        with pytest.raises(VersionConflict):
            await threads.create("x", {"owner": "ann"})
        with pytest.raises(Forbidden, match="would deny you access to"):
            await threads.create("y", {"owner": "eve"})
        with pytest.raises(Forbidden, match="would deny you access to"):
            await threads.update("of-ann", {"owner": "eve"})

    run_with_threads(settings, use, {"owner": "ann"})


def test_search_finds_threads_by_metadata_and_status(settings: Settings) -> None:
    run_asking_graph(settings, "chat", label="a")
    run_chat_turns(settings, "both", "hi", label="a")

    async def use(threads: Threads, store: SQLiteStore) -> None:
        await threads.create("new", {"label": "a", "x.y": "z", "$eq": "no operator"})
        await threads.create("theirs", {"owner": "eve", "label": "b"})
        await threads.update("both", {"label": "b"})
        await threads.set_run_status("new", "error")
        order = [
            each for each in thread_ids(await search_threads(threads)) if each in ("both", "theirs")
        ]

        assert set(thread_ids(await search_threads(threads, metadata={"label": "a"}))) == {
            "new",
            "chat",
        }
        assert thread_ids(await search_threads(threads, metadata={"label": "b"})) == order
        assert set(thread_ids(await search_threads(threads, metadata={"owner": "ann"}))) == {
            "both",
            "chat",
        }
        assert thread_ids(
            await search_threads(threads, metadata={"owner": "eve", "label": "b"})
        ) == ["theirs"]
        assert thread_ids(
            await search_threads(threads, metadata={"x.y": "z", "$eq": "no operator"})
        ) == ["new"]
        assert thread_ids(await search_threads(threads, status="interrupted")) == ["chat"]
        assert thread_ids(await search_threads(threads, status="error")) == ["new"]
        assert await search_threads(threads, metadata={"label": "c"}) == []

    run_with_threads(settings, use)


def test_thread_is_interrupted_each_time_its_run_stops(settings: Settings) -> None:
    """A graph may stop before a node without a question, which only the server knows."""
    run_chat_turns(settings, "t", "hi")

    async def use(threads: Threads, store: SQLiteStore) -> None:
        for number in range(2):
            await threads._saver.aput(*build_unfinished_put("t", number))
            assert (await threads.get("t"))["status"] == "idle"
            await threads.set_run_status("t", "interrupted")
            assert (await threads.get("t"))["status"] == "interrupted"
            assert thread_ids(await search_threads(threads, status="interrupted")) == ["t"]
        await threads._saver.adelete_for_runs(["a run"])  # who reads the head, sees what is not run
        for status in ("idle", "interrupted"):
            shown = [each for each in await search_threads(threads) if each["status"] == status]
            assert await search_threads(threads, status=status) == shown

    run_with_threads(settings, use)


def test_put_by_other_program_clears_error_status(settings: Settings) -> None:
    async def use(threads: Threads, store: SQLiteStore) -> None:
        await threads.create("t")
        await threads.set_run_status("t", "error")
        assert thread_ids(await search_threads(threads, status="error")) == ["t"]
        await threads._saver.aput(*build_unfinished_put("t", 0))

        assert (await threads.get("t"))["status"] == "idle"
        assert thread_ids(await search_threads(threads, status="idle")) == ["t"]
        assert thread_ids(await search_threads(threads, status="error")) == []

    run_with_threads(settings, use)


def test_sort_by_status_follows_status_that_is_shown(settings: Settings) -> None:
    """After a prune, the row of a thread says that it may wait, and its head that it does not."""
    for thread in ("a", "pruned", "b", "runs"):
        run_chat_turns(settings, thread, "hi")
    run_asking_graph(settings, "asks")

    async def use(threads: Threads, store: SQLiteStore) -> None:
        await threads._saver.aprune(["pruned"])
        await threads.set_run_status("b", "error")
        await accept_run(threads._saver, "runs")
        for order in ("asc", "desc"):
            wanted = ThreadQuery(sort_by="status", sort_order=order)
            found = await threads.search(wanted)
            expected = ["runs", "b", "pruned", "a", "asks"]
            if order == "desc":
                expected = ["asks", "pruned", "a", "b", "runs"]
            assert thread_ids(found) == expected
            assert await threads.search(wanted, 2, 1) == found[1:3]
            wanted = ThreadQuery(sort_by="status", status="idle")
            assert thread_ids(await threads.search(wanted)) == ["pruned", "a"]

    run_with_threads(settings, use)


def test_question_of_unusual_form_is_shown(settings: Settings) -> None:
    """A program without LangGraph may have stored the question."""
    question: list[Any] = ["may I?", Interrupt("and I?", id="i"), {"value": "or I?", "id": "j"}]
    config, *checkpoint = build_unfinished_put("t", 0)

    async def use(threads: Threads, store: SQLiteStore) -> None:
        made = await threads._saver.aput(config, *checkpoint)
        writes = [("__interrupt__", question)]
        await threads._saver.aput_writes(made, writes, "task", "~__pregel_pull, next")
        (thread,) = await search_threads(threads, status="interrupted")
        assert thread["interrupts"] == {
            "task": [
                {"value": "may I?", "id": None},
                {"value": "and I?", "id": "i"},
                {"value": "or I?", "id": "j"},
            ]
        }

    run_with_threads(settings, use)


def test_search_beyond_last_thread_returns_nothing(settings: Settings) -> None:
    run_chat_turns(settings, "t", "hi")

    async def use(threads: Threads, store: SQLiteStore) -> None:
        for offset in (1, 1 << 63, 1 << 70):
            for wanted in (ThreadQuery(), ThreadQuery(text="t"), ThreadQuery(sort_by="status")):
                assert await threads.search(wanted, 10, offset) == []

    run_with_threads(settings, use)


def test_thread_with_live_run_is_busy(settings: Settings) -> None:
    run_chat_turns(settings, "t", "hi")

    async def use(threads: Threads, store: SQLiteStore) -> None:
        table, live_run = await accept_run(threads._saver, "t")

        assert (await threads.get("t"))["status"] == "busy"
        assert thread_ids(await search_threads(threads, status="busy")) == ["t"]
        assert (await threads.copy("t", {}))["status"] == "idle"
        await table.end_run(live_run, "success")
        assert [each["status"] for each in await search_threads(threads)] == ["idle", "idle"]

    run_with_threads(settings, use)


def test_thread_is_not_deleted_while_its_lock_is_held(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.server.threads._DELETE_WAIT_S", 0)
    run_chat_turns(settings, "t", "hi")

    async def use(threads: Threads, store: SQLiteStore) -> None:
        held, over = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            async with open_threads(settings, {}) as (others, _), others.lock_for_change("t"):
                held.set()
                await over.wait()

        other = asyncio.create_task(hold(), context=Context())
        await held.wait()
        with pytest.raises(AlreadyLocked, match="still active"):
            await threads.delete("t")
        over.set()
        await other
        assert thread_ids(await search_threads(threads)) == ["t"]
        await threads.delete("t")
        assert await search_threads(threads) == []

    run_with_threads(settings, use)


def test_deletion_on_closed_database_does_not_report_live_run(settings: Settings) -> None:
    """Only a lock that is not released in time is reported as a run under way."""

    async def use(threads: Threads, store: SQLiteStore) -> None:
        await threads._saver.aclose()
        with pytest.raises(StorageUnavailable, match="closed"):
            await threads.delete("t")

    run_with_threads(settings, use)


def test_search_by_person_includes_threads_without_owner(settings: Settings) -> None:
    async def use(threads: Threads, store: SQLiteStore) -> None:
        await threads.create("ann's", {"owner": "ann"})
        await threads.create("nobody's")
        for number in range(3):
            await threads.create(f"bob's {number}", {"owner": "bob"})
        assert thread_ids(await search_threads(threads, text="s", person="ann", limit=2)) == [
            "nobody's",
            "ann's",
        ]

    run_with_threads(settings, use)


def test_change_of_thread_is_refused_while_lock_is_held(settings: Settings) -> None:
    async def use(threads: Threads, store: SQLiteStore) -> None:
        async with threads.lock_for_change("t"), open_threads(settings, {}) as (others, _):
            with pytest.raises(AlreadyLocked):
                async with others.lock_for_change("t"):
                    pass
        async with threads.lock_for_change("t"):
            pass

    run_with_threads(settings, use)


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
def test_json_containment_predicate_matches_nested_values(
    value: Any, wanted: Any, *, expected: bool
) -> None:
    assert build_json_containment_predicate(wanted)(value) is expected
