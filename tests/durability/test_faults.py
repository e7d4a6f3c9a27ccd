"""The database fails at its N-th call, for every N of every method: all or nothing, each time."""

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
    """Makes the N-th call of any connection fail, once armed with N.

    Args:
        error: What to raise.
        rolls_back: Whether the transaction is gone afterwards, as SQLite does on a full disk or
            a failed write; https://sqlite.org/lang_transaction.html#response_to_errors_within_a_transaction
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

    def due(self) -> bool:
        if self.left == 0:
            return False
        self.left -= 1
        self.fired = self.left == 0
        return self.fired

    def factory(self) -> type[sqlite3.Connection]:
        """Connections that have this fault."""
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
                if fault.due():
                    if fault.rolls_back and self.in_transaction:
                        super().execute("ROLLBACK")
                    raise fault.error

        return Failing


def io_error() -> Fault:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorname = "SQLITE_IOERR_WRITE"
    return Fault(error, rolls_back=False)


def full() -> Fault:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorname = "SQLITE_FULL"
    return Fault(error, rolls_back=True)


# how it fails, what is raised, and every how many-th call: one after another for the first
FAULTS: dict[str, tuple[Callable[[], Fault], type[StorageError], int]] = {
    "io": (io_error, StorageError, 1),
    "full": (full, StorageFull, 4),
}


def config_of(number: int | None, thread: str = "t") -> RunnableConfig:
    at = {"thread_id": thread, "checkpoint_ns": ""}
    return {"configurable": at if number is None else {**at, "checkpoint_id": uid(number)}}


def uid(number: int) -> str:
    return f"00000000-0000-6000-8000-{number:012}"


def checkpoint(number: int, words: str = "said") -> Checkpoint:
    """A checkpoint with messages, a dict and a long text, the same at each call."""
    values = {
        "messages": [HumanMessage(f"{words} {i} " * 20, id=str(i)) for i in range(number)],
        "notes": {f"note {i}": {"text": words * 30} for i in range(number)},
        "text": f"{words} {number} " * 40,
    }
    return {
        **empty_checkpoint(),
        "id": uid(number),
        "ts": "2026-01-01T00:00:00+00:00",
        "channel_values": values,
        "channel_versions": dict.fromkeys(values, number),
    }


def put(saver: Any, number: int, parent: int | None, thread: str = "t", **metadata: Any) -> None:
    new = checkpoint(number)
    at = config_of(parent, thread)
    saver.put(at, new, {"source": "loop", "step": number, **metadata}, new["channel_versions"])


def write(saver: Any, channel: str, task: str, number: int = 5, words: str = "pending ") -> None:
    saver.put_writes(config_of(number), [(channel, [HumanMessage(words * 40, id="p")])], task)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a thread of five checkpoints, a fork among them, and another thread."""
    path = tmp_path_factory.mktemp("template") / "template.db"
    with SQLiteCheckpointer.open(path) as saver:
        for number in (1, 2, 3):
            put(saver, number, number - 1 or None, run_id="early")
        put(saver, 4, 2, run_id="late")
        put(saver, 5, 3, run_id="late")
        write(saver, "messages", "task-1")
        write(saver, "__error__", "task-2")
        write(saver, "messages", "task-3", number=2)
        put(saver, 1, None, thread="other")
    return path


def put_again(saver: Any) -> None:
    new = checkpoint(5, "said otherwise")
    saver.put(config_of(3), new, {"source": "update", "step": 9}, new["channel_versions"])


METHODS: dict[str, Callable[[SQLiteCheckpointer], object]] = {
    "put": lambda saver: put(saver, 6, 5),
    "put-in-new-thread": lambda saver: put(saver, 2, None, thread="new"),
    "put-replacing": put_again,
    "put_writes": lambda saver: write(saver, "messages", "task-9"),
    "put_writes-replacing": lambda saver: write(saver, "__error__", "task-2", words="again "),
    "put_writes-before-checkpoint": lambda saver: write(saver, "messages", "task-1", number=7),
    "delete_thread": lambda saver: saver.delete_thread("t"),
    "copy_thread": lambda saver: saver.copy_thread("t", "copy"),
    "copy_thread-part": lambda saver: saver.copy_thread("t", "copy", checkpoint_id=uid(4)),
    "prune": lambda saver: saver.prune(["t"]),
    "prune-delete": lambda saver: saver.prune(["t"], strategy="delete"),
    "retain": lambda saver: saver.retain(Retention(last=2, history=False), thread_ids=["t"]),
    "rewind": lambda saver: saver.rewind("t", uid(2)),
    "delete_for_runs": lambda saver: saver.delete_for_runs(["early"]),
    "erase": lambda saver: saver.erase("t", ["1", "p"]),
    "erase-thread": lambda saver: saver.erase("t"),
    "retain-everywhere": lambda saver: saver.retain(Retention(last=1)),
}


def aput(saver: SQLiteCheckpointer) -> None:
    new = checkpoint(6)
    at = config_of(5)
    asyncio.run(saver.aput(at, new, {"source": "loop", "step": 6}, new["channel_versions"]))


def aput_writes(saver: SQLiteCheckpointer) -> None:
    value = HumanMessage("pending " * 40, id="p")
    asyncio.run(saver.aput_writes(config_of(5), [("messages", [value])], "task-9"))


METHODS |= {
    "aput": aput,
    "aput_writes": aput_writes,
    "adelete_thread": lambda saver: asyncio.run(saver.adelete_thread("t")),
}


def without_removals(config: Any) -> Any:
    """Return a config without the number of removals, which a repeated erasure raises again."""
    if config is None:
        return None
    items = config["configurable"].items()
    return {"configurable": {name: value for name, value in items if name != REMOVALS_KEY}}


def dump(path: Path) -> Any:
    """Return everything that a file holds, as the public methods read it."""
    with SQLiteCheckpointer.open(path, read_only=True) as saver:
        infos = saver.threads()
        stored = (
            t._replace(
                config=without_removals(t.config), parent_config=without_removals(t.parent_config)
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


def attempt(work: Callable[[], object]) -> PerdureError | None:
    """How it failed, if it did."""
    try:
        work()
    except PerdureError as error:
        return error
    return None


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("method", METHODS)
def test_failure_at_every_call(method: str, kind: str, template: Path, tmp_path: Path) -> None:
    """The file is as before or as after, the error is perdure's, and a second attempt succeeds."""
    make, expected, stride = FAULTS[kind]
    path = tmp_path / "x.db"
    shutil.copy(template, path)
    before = dump(path)
    with SQLiteCheckpointer.open(path) as saver:
        METHODS[method](saver)
    after = dump(path)
    assert before != after

    fault = make()
    for call in itertools.count(1, stride):
        path = tmp_path / f"{call}.db"
        shutil.copy(template, path)
        with SQLiteCheckpointer.open(path, factory=fault.factory(), synchronous="normal") as saver:
            fault.arm(call)
            error = attempt(lambda: METHODS[method](saver))
            fault.disarm()
            if error is not None:
                assert isinstance(error, expected)
                assert error.__cause__ is fault.error
                assert dump(path) in (before, after)
                METHODS[method](saver)
        assert after == dump(path)
        if not fault.fired:
            break


class Small(sqlite3.Connection):
    """A database that may have 60 pages: SQLite reports the 61st as a full disk."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.execute("PRAGMA max_page_count = 60")


def big(number: int) -> Checkpoint:
    text = "".join(f"{number}:{i} " for i in range(2000))
    return {**checkpoint(1), "id": uid(number), "channel_values": {"text": text}}


def test_a_full_disk_keeps_all_that_was_acknowledged(tmp_path: Path) -> None:
    """A put that does not fit raises StorageFull and leaves no trace; deleting makes room again."""
    acknowledged = []
    with SQLiteCheckpointer.open(tmp_path / "x.db", factory=Small) as saver:
        with pytest.raises(StorageFull, match="free disk space and retry"):  # noqa: PT012 - until it is full
            for number in range(1, 100):
                thread = config_of(None, f"t{number}")
                saver.put(thread, big(number), {}, {"text": number})
                acknowledged.append(number)
        stored = {t.checkpoint["id"] for t in saver.list(None)}
        threads = {info.thread_id for info in saver.threads()}
        for thread_id in ("t1", "t2"):  # a row of another size may need a page more than one had
            saver.delete_thread(thread_id)
        saver.put(config_of(None, "again"), big(200), {}, {"text": 200})
        again = saver.get_tuple(config_of(None, "again"))

    assert acknowledged
    assert {uid(number) for number in acknowledged} == stored
    assert {f"t{number}" for number in acknowledged} == threads
    assert again is not None
    assert big(200)["channel_values"] == again.checkpoint["channel_values"]


def test_a_full_disk_fails_each_of_many_at_once_alone(tmp_path: Path) -> None:
    """Of puts that share a transaction, those that are acknowledged are there, the others not."""

    async def all_at_once(saver: SQLiteCheckpointer) -> list[Any]:
        puts = (saver.aput(config_of(None, f"t{n}"), big(n), {}, {"text": n}) for n in range(1, 40))
        outcomes: list[Any] = await asyncio.gather(*puts, return_exceptions=True)
        return outcomes

    with SQLiteCheckpointer.open(tmp_path / "x.db", factory=Small) as saver:
        outcomes = asyncio.run(all_at_once(saver))
        stored = sorted(t.checkpoint["id"] for t in saver.list(None))

    acknowledged = [uid(n) for n, outcome in enumerate(outcomes, 1) if isinstance(outcome, dict)]
    assert acknowledged == stored
    assert {StorageFull} == {type(outcome) for outcome in outcomes if not isinstance(outcome, dict)}
