"""The search for due threads, over all backends: no unread thread is missed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.store.memory import InMemoryStore

from perdure.checkpointers import SQLiteCheckpointer, head_records
from perdure.memory.long_term.extraction import DueThreads, Extraction, Pace
from perdure.memory.long_term.extractors import TurnExtractor
from perdure.storage.flow import fetch_rows
from perdure.stores import SQLiteStore, item_reader
from tests import backends, store_backends


class NamedExtractor(TurnExtractor):
    """An extractor whose watermarks have hashes as their keys."""

    name = "named"


def _open_in_one_file(folder: Path) -> tuple[Any, Any]:
    path = folder / "memory.db"
    return SQLiteCheckpointer.open(path), SQLiteStore.open(path, index=None)


def _open_scope(folder: Path) -> tuple[Any, Any]:
    saver, store = _open_in_one_file(folder)
    return saver, store.scoped(("scope",))


def _open_backend(name: str) -> Callable[[Path], tuple[Any, Any]]:
    def open_both(folder: Path) -> tuple[Any, Any]:
        """Open two files, or one schema of Postgres."""
        store_folder = folder if name.startswith("postgres") else folder / "store"
        store_folder.mkdir(exist_ok=True)
        return backends.BACKENDS[name](folder), store_backends.BACKENDS[name](store_folder)

    return open_both


DATABASES: dict[str, Callable[[Path], tuple[Any, Any]]] = {
    **{
        name: _open_backend(name)
        for name in ("memory", "file", "sealed", "postgres", "postgres-sealed")
    },
    "one-file": _open_in_one_file,
    "scope": _open_scope,
    "langgraph-encrypted": lambda folder: (
        backends.BACKENDS["langgraph-encrypted"](folder),
        store_backends.BACKENDS["file"](folder),
    ),
    "langgraph-store": lambda folder: (backends.BACKENDS["file"](folder), InMemoryStore()),
}


@pytest.fixture(params=[*DATABASES])
def databases(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    saver, store = DATABASES[request.param](tmp_path)
    with ExitStack() as stack:
        stack.callback(saver.close)
        if hasattr(store, "close"):
            stack.callback(store.close)
        yield saver, store


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every search read several pages, and several statements for each page."""
    monkeypatch.setattr(head_records, "_PAGE", 5)
    monkeypatch.setattr(item_reader, "_KEYS_PER_STATEMENT", 3)


class Conversations:
    """Threads of three users, and the extraction of memories from them."""

    def __init__(self, saver: Any, store: Any, extractor: TurnExtractor) -> None:
        self.saver, self.store = saver, store
        self.extraction = Extraction(saver, store, extractor)
        builder = StateGraph(MessagesState)
        builder.add_node("reply", lambda state: {"messages": [AIMessage("I will remember that.")]})
        builder.add_edge(START, "reply")
        self.graph = builder.compile(checkpointer=saver)

    def config(self, number: int) -> Any:
        return {"configurable": {"thread_id": f"t{number}", "user_id": f"user{number % 3}"}}

    def send(self, number: int) -> None:
        message = HumanMessage(f"I have {number} cats.", id=f"m{number}")
        self.graph.invoke({"messages": [message]}, self.config(number))

    def extract(self, number: int) -> None:
        self.extraction.extract(f"t{number}", self.config(number))

    def find_watermark(self, number: int) -> Any:
        """Return the watermark of a thread, found by its content."""
        labels = ("perdure", "formed", "memories", f"user{number % 3}")
        items = self.store.search(labels, limit=100)
        return next(item for item in items if item.value["thread_id"] == f"t{number}")

    def list_unread(self, due: DueThreads | None = None) -> list[str]:
        """Return the ids of the due threads, as found by a new process or by `due`."""
        due = due or DueThreads(self.extraction, Pace(0))
        jobs = due.list_jobs()
        assert all(
            job.namespace == ("memories", f"user{int(job.thread_id[1:]) % 3}") for job in jobs
        )
        return sorted((job.thread_id for job in jobs), key=lambda thread_id: int(thread_id[1:]))


@pytest.mark.parametrize("extractor", [TurnExtractor, NamedExtractor])
def test_every_unread_thread_is_found_by_the_first_and_by_later_searches(
    databases: Any, extractor: type[TurnExtractor]
) -> None:
    """A thread is unread if it is new, was changed after it was read, or lost its watermark."""
    saver, store = databases
    talks = Conversations(saver, store, extractor())
    old = DueThreads(talks.extraction, Pace(0))
    for number in range(16):
        talks.send(number)
    assert [f"t{number}" for number in range(16)] == talks.list_unread(old) == talks.list_unread()
    for number in range(13):
        talks.extract(number)
    assert ["t13", "t14", "t15"] == talks.list_unread(old) == talks.list_unread()

    talks.send(0)  # after it was read
    talks.graph.update_state(talks.config(1), {"messages": [AIMessage("No, two.", id="m1")]})
    newest, *_, first = talks.saver.checkpoints("t2", checkpoint_ns="")
    talks.saver.rewind("t2", first.checkpoint_id)
    talks.saver.copy_thread("t3", "t18")
    talks.saver.delete_thread("t15")
    assert newest.checkpoint_id != first.checkpoint_id
    expected = ["t0", "t1", "t2", "t13", "t14", "t18"]
    assert expected == talks.list_unread() == talks.list_unread(old)

    watermark = talks.find_watermark(4)
    talks.store.delete(watermark.namespace, watermark.key)
    talks.extraction.extract("t5", talks.config(5), anew=True)
    assert sorted({*talks.list_unread()} - {*expected}) == ["t4"]


def test_thread_whose_list_entry_lacks_the_metadata_is_found(databases: Any) -> None:
    """If the row of a thread has no metadata, the head is read."""
    saver, store = databases
    talks = Conversations(saver, store, TurnExtractor())
    for number in range(7):
        talks.send(number)
        talks.extract(number)
    for number in (1, 2):
        talks.saver.erase(f"t{number}", [f"m{number}"])
    remove_list_entries = "UPDATE threads SET list_entry = NULL"
    talks.saver.database.write(lambda: fetch_rows(remove_list_entries))
    read = [f"t{number}" for number in (0, 3, 4, 5, 6)]

    assert not {*read} & {*talks.list_unread()}
    heads = {f"t{number}": talks.saver.head(f"t{number}").checkpoint_id for number in (1, 2)}
    read_heads = {
        f"t{number}": talks.find_watermark(number).value["checkpoint_id"] for number in (1, 2)
    }
    unread = [thread for thread, head in heads.items() if read_heads[thread] != head]
    assert unread == talks.list_unread()


def test_thread_that_went_to_another_user_is_found_for_that_user(databases: Any) -> None:
    """The watermark of the former user does not count, although it names the same head."""
    saver, store = databases
    talks = Conversations(saver, store, TurnExtractor())
    talks.send(1)
    talks.extract(1)
    watermark = talks.find_watermark(1)
    other_namespace = (*watermark.namespace[:-1], "user2")
    talks.store.put(other_namespace, watermark.key, watermark.value, index=False)
    talks.store.delete(watermark.namespace, watermark.key)

    assert talks.list_unread() == ["t1"]


def test_label_that_thread_lists_do_not_show_is_read_from_the_head(databases: Any) -> None:
    """The row of a thread has no fields whose names begin with `run_attempt`."""
    saver, store = databases
    talks = Conversations(saver, store, TurnExtractor())
    config = talks.config(1)
    config["configurable"]["run_attempt_group"] = "g"
    talks.graph.invoke({"messages": [HumanMessage("I have a cat.")]}, config)
    template = ("memories", "{run_attempt_group}")
    extraction = Extraction(saver, store, namespace=template)

    jobs = DueThreads(extraction, Pace(0)).list_jobs()

    assert [(job.thread_id, job.namespace) for job in jobs] == [("t1", ("memories", "g"))]
    extraction.extract("t1", config)
    assert DueThreads(extraction, Pace(0)).list_jobs() == []
