"""The N-th database call of every method fails, for every N: the method does all or nothing."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import Checkpoint, empty_checkpoint

from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.checkpointers.address import REMOVALS_KEY
from perdure.errors import PerdureError, StorageError, StorageFull


class Fault:
    """Makes the N-th call of any connection fail once it is armed with N.

    Args:
        error: The error that is raised.
        rolls_back: Whether the transaction is rolled back, as SQLite does on a full disk or a
            failed write; https://sqlite.org/lang_transaction.html#response_to_errors_within_a_transaction
    """

    def __init__(self, error: sqlite3.Error, *, rolls_back: bool) -> None:
        self.error = error
        self.rolls_back = rolls_back
        self.left = 0
        self.fired = False

    def arm(self, call: int) -> None:
        self.left = call
        self.fired = False

    def disarm(self) -> None:
        self.left = 0

    def is_due(self) -> bool:
        if self.left == 0:
            return False
        self.left -= 1
        self.fired = self.left == 0
        return self.fired

    def connection_class(self) -> type[sqlite3.Connection]:
        """Return a class of connections that have this fault."""
        fault = self

        class Failing(sqlite3.Connection):
            def execute(self, *args: Any) -> sqlite3.Cursor:
                self._meet()
                return super().execute(*args)

            def executemany(self, *args: Any) -> sqlite3.Cursor:
                self._meet()
                return super().executemany(*args)

            def executescript(self, *args: Any) -> sqlite3.Cursor:
                self._meet()
                return super().executescript(*args)

            def _meet(self) -> None:
                if fault.is_due():
                    if fault.rolls_back and self.in_transaction:
                        super().execute("ROLLBACK")
                    raise fault.error

        return Failing


def make_io_error() -> Fault:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorname = "SQLITE_IOERR_WRITE"
    return Fault(error, rolls_back=False)


def make_full_disk_error() -> Fault:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorname = "SQLITE_FULL"
    return Fault(error, rolls_back=True)


# for each kind: the fault, the expected error, and the stride between failing calls
FAULTS: dict[str, tuple[Callable[[], Fault], type[StorageError], int]] = {
    "io": (make_io_error, StorageError, 1),
    "full": (make_full_disk_error, StorageFull, 4),
}


def make_config(number: int | None, thread: str = "t") -> RunnableConfig:
    address = {"thread_id": thread, "checkpoint_ns": ""}
    return {
        "configurable": address
        if number is None
        else {**address, "checkpoint_id": make_checkpoint_id(number)}
    }


def make_checkpoint_id(number: int) -> str:
    return f"00000000-0000-6000-8000-{number:012}"


def make_checkpoint(number: int, words: str = "said") -> Checkpoint:
    """Return a checkpoint with messages, a dict and a long text, which is the same at each call."""
    values = {
        "messages": [HumanMessage(f"{words} {i} " * 20, id=str(i)) for i in range(number)],
        "notes": {f"note {i}": {"text": words * 30} for i in range(number)},
        "text": f"{words} {number} " * 40,
    }
    return {
        **empty_checkpoint(),
        "id": make_checkpoint_id(number),
        "ts": "2026-01-01T00:00:00+00:00",
        "channel_values": values,
        "channel_versions": dict.fromkeys(values, number),
    }


def put_checkpoint(
    saver: Any, number: int, parent: int | None, thread: str = "t", **metadata: Any
) -> None:
    new = make_checkpoint(number)
    config = make_config(parent, thread)
    saver.put(config, new, {"source": "loop", "step": number, **metadata}, new["channel_versions"])


def put_task_writes(
    saver: Any, channel: str, task: str, number: int = 5, words: str = "pending "
) -> None:
    saver.put_writes(make_config(number), [(channel, [HumanMessage(words * 40, id="p")])], task)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a file with a thread of five checkpoints, one of them a fork, and another thread."""
    path = tmp_path_factory.mktemp("template") / "template.db"
    with SQLiteCheckpointer.open(path) as saver:
        for number in (1, 2, 3):
            put_checkpoint(saver, number, number - 1 or None, run_id="early")
        put_checkpoint(saver, 4, 2, run_id="late")
        put_checkpoint(saver, 5, 3, run_id="late")
        put_task_writes(saver, "messages", "task-1")
        put_task_writes(saver, "__error__", "task-2")
        put_task_writes(saver, "messages", "task-3", number=2)
        put_checkpoint(saver, 1, None, thread="other")
    return path


def replace_checkpoint(saver: Any) -> None:
    new = make_checkpoint(5, "said otherwise")
    saver.put(make_config(3), new, {"source": "update", "step": 9}, new["channel_versions"])


METHODS: dict[str, Callable[[SQLiteCheckpointer], object]] = {
    "put": lambda saver: put_checkpoint(saver, 6, 5),
    "put-in-new-thread": lambda saver: put_checkpoint(saver, 2, None, thread="new"),
    "put-replacing": replace_checkpoint,
    "put_writes": lambda saver: put_task_writes(saver, "messages", "task-9"),
    "put_writes-replacing": lambda saver: put_task_writes(
        saver, "__error__", "task-2", words="again "
    ),
    "put_writes-before-checkpoint": lambda saver: put_task_writes(
        saver, "messages", "task-1", number=7
    ),
    "delete_thread": lambda saver: saver.delete_thread("t"),
    "copy_thread": lambda saver: saver.copy_thread("t", "copy"),
    "copy_thread-part": lambda saver: saver.copy_thread(
        "t", "copy", checkpoint_id=make_checkpoint_id(4)
    ),
    "prune": lambda saver: saver.prune(["t"]),
    "prune-delete": lambda saver: saver.prune(["t"], strategy="delete"),
    "retain": lambda saver: saver.retain(Retention(last=2, history=False), thread_ids=["t"]),
    "rewind": lambda saver: saver.rewind("t", make_checkpoint_id(2)),
    "delete_for_runs": lambda saver: saver.delete_for_runs(["early"]),
    "erase": lambda saver: saver.erase("t", ["1", "p"]),
    "erase-thread": lambda saver: saver.erase("t"),
    "retain-everywhere": lambda saver: saver.retain(Retention(last=1)),
}


def put_checkpoint_async(saver: SQLiteCheckpointer) -> None:
    new = make_checkpoint(6)
    config = make_config(5)
    asyncio.run(saver.aput(config, new, {"source": "loop", "step": 6}, new["channel_versions"]))


def put_task_writes_async(saver: SQLiteCheckpointer) -> None:
    value = HumanMessage("pending " * 40, id="p")
    asyncio.run(saver.aput_writes(make_config(5), [("messages", [value])], "task-9"))


METHODS |= {
    "aput": put_checkpoint_async,
    "aput_writes": put_task_writes_async,
    "adelete_thread": lambda saver: asyncio.run(saver.adelete_thread("t")),
}


def drop_removal_number(config: Any) -> Any:
    """Return a config without the number of removals, which a repeated erasure increments."""
    if config is None:
        return None
    items = config["configurable"].items()
    return {"configurable": {name: value for name, value in items if name != REMOVALS_KEY}}


def read_contents(path: Path) -> Any:
    """Return everything that the public methods read from a file."""
    with SQLiteCheckpointer.open(path, read_only=True) as saver:
        infos = saver.threads()
        stored = (
            t._replace(
                config=drop_removal_number(t.config),
                parent_config=drop_removal_number(t.parent_config),
            )
            for t in saver.list(None)
        )
        tuples = sorted(stored, key=lambda t: str(t.config))
        threads = sorted(
            (i.thread_id, i.checkpoints, i.items, i.size_bytes, i.namespaces) for i in infos
        )
        heads = {
            i.thread_id: [
                (c.checkpoint_id, c.order, c.is_head) for c in saver.checkpoints(i.thread_id)
            ]
            for i in infos
        }
        history = {
            (t.config["configurable"]["thread_id"], t.checkpoint["id"]): saver.history(
                t.config["configurable"]["thread_id"], checkpoint_id=t.checkpoint["id"]
            )
            for t in tuples
        }
    return tuples, threads, heads, history


def catch_error(work: Callable[[], object]) -> PerdureError | None:
    """Return the error that the call raises, or None."""
    try:
        work()
    except PerdureError as error:
        return error
    return None


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("method", METHODS)
def test_failed_call_leaves_file_as_before_or_after_and_can_be_repeated(
    method: str, kind: str, template: Path, tmp_path: Path
) -> None:
    """The error is one of perdure's, and a second attempt succeeds."""
    make, expected, stride = FAULTS[kind]
    path = tmp_path / "x.db"
    shutil.copy(template, path)
    before = read_contents(path)
    with SQLiteCheckpointer.open(path) as saver:
        METHODS[method](saver)
    after = read_contents(path)
    assert before != after

    fault = make()
    for call in itertools.count(1, stride):
        path = tmp_path / f"{call}.db"
        shutil.copy(template, path)
        with SQLiteCheckpointer.open(
            path, factory=fault.connection_class(), synchronous="normal"
        ) as saver:
            fault.arm(call)
            error = catch_error(lambda: METHODS[method](saver))
            fault.disarm()
            if error is not None:
                assert isinstance(error, expected)
                assert error.__cause__ is fault.error
                assert read_contents(path) in (before, after)
                METHODS[method](saver)
        assert after == read_contents(path)
        if not fault.fired:
            break


class TinyDatabase(sqlite3.Connection):
    """A database of at most 60 pages. SQLite reports the 61st page as a full disk."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.execute("PRAGMA max_page_count = 60")


def make_big_checkpoint(number: int) -> Checkpoint:
    text = "".join(f"{number}:{i} " for i in range(2000))
    return {
        **make_checkpoint(1),
        "id": make_checkpoint_id(number),
        "channel_values": {"text": text},
    }


def test_full_disk_keeps_acknowledged_checkpoints(tmp_path: Path) -> None:
    """A put that does not fit raises StorageFull and leaves no trace.

    A deletion makes room again.
    """
    acknowledged = []
    with SQLiteCheckpointer.open(tmp_path / "x.db", factory=TinyDatabase) as saver:
        with pytest.raises(StorageFull, match="free disk space and retry"):  # noqa: PT012 - until it is full
            for number in range(1, 100):
                thread = make_config(None, f"t{number}")
                saver.put(thread, make_big_checkpoint(number), {}, {"text": number})
                acknowledged.append(number)
        stored = {t.checkpoint["id"] for t in saver.list(None)}
        threads = {info.thread_id for info in saver.threads()}
        for thread_id in (
            "t1",
            "t2",
        ):  # a row of another size may need one page more than the deleted ones had
            saver.delete_thread(thread_id)
        saver.put(make_config(None, "again"), make_big_checkpoint(200), {}, {"text": 200})
        later_tuple = saver.get_tuple(make_config(None, "again"))

    assert acknowledged
    assert {make_checkpoint_id(number) for number in acknowledged} == stored
    assert {f"t{number}" for number in acknowledged} == threads
    assert later_tuple is not None
    assert make_big_checkpoint(200)["channel_values"] == later_tuple.checkpoint["channel_values"]


def test_full_disk_fails_only_concurrent_puts_that_do_not_fit(tmp_path: Path) -> None:
    """Of puts that share a transaction, exactly the acknowledged ones are stored."""

    async def all_at_once(saver: SQLiteCheckpointer) -> list[Any]:
        puts = (
            saver.aput(make_config(None, f"t{n}"), make_big_checkpoint(n), {}, {"text": n})
            for n in range(1, 40)
        )
        outcomes: list[Any] = await asyncio.gather(*puts, return_exceptions=True)
        return outcomes

    with SQLiteCheckpointer.open(tmp_path / "x.db", factory=TinyDatabase) as saver:
        outcomes = asyncio.run(all_at_once(saver))
        stored = sorted(t.checkpoint["id"] for t in saver.list(None))

    acknowledged = [
        make_checkpoint_id(n) for n, outcome in enumerate(outcomes, 1) if isinstance(outcome, dict)
    ]
    assert acknowledged == stored
    assert {StorageFull} == {type(outcome) for outcome in outcomes if not isinstance(outcome, dict)}
