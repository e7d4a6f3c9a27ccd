"""kill -9 at each statement of a merge leaves the thread as before or as after the merge.

A state update and a run overlap. The process that stores the second of the two is killed before its
N-th statement, for each N. On Postgres, it is killed before every few messages to the server.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from datetime import UTC, datetime
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from langgraph.checkpoint.serde.types import ERROR, INTERRUPT
from langgraph.types import Interrupt

from perdure.checkpointers import SQLiteCheckpointer, maintenance
from tests import postgres_server
from tests.backends import Place
from tests.contracts.puts import config_at
from tests.durability.cutting import CuttingProxy
from tests.durability.processes import forkserver_context
from tests.rounds import rounds

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
STRIDES: Final = {"file": 4 // rounds(4), "postgres": 36 // rounds(4)}
"""Number of SQLite statements, or of messages to Postgres, between two kills."""

VERSIONS: Final[dict[str, dict[str, int]]] = {
    "run 0": {"n": 2, "branch:to:a": 2},
    "update": {"n": 2, "branch:to:a": 2, "title": 3},
    "late update": {"n": 2, "branch:to:a": 2, "title": 3},
    "second update": {"n": 2, "branch:to:a": 2, "title": 3, "tags": 4},
    "run 1": {"n": 3, "branch:to:a": 3},
    "run 2": {"n": 4, "branch:to:a": 4},
    "titled": {"n": 3, "branch:to:a": 3, "title": 3},
}
PARENTS: Final = {
    "update": "run 0",
    "late update": "run 0",
    "second update": "update",
    "run 1": "run 0",
    "run 2": "run 1",
    "titled": "run 0",
}
STEPS: Final = {
    **{"run 0": 0, "run 1": 1, "run 2": 2, "titled": 1},
    **{"update": 1, "late update": 1, "second update": 2},
}


def put_named_checkpoint(saver: SQLiteCheckpointer, name: str) -> None:
    """Put a checkpoint by its name. Its values identify it."""
    versions, parent = VERSIONS[name], PARENTS.get(name)
    values: dict[str, Any] = {"n": versions["n"]}
    if "title" in versions:
        values["title"] = "The run's" if name == "titled" else "A title"
    if "tags" in versions:
        values["tags"] = ["one", "two"] * 20
    source = "update" if "update" in name else "loop"
    metadata: Any = {"source": source, "step": STEPS[name], "parents": {}}
    checkpoint: Any = {
        **{"v": 4, "ts": datetime.now(UTC).isoformat(), "id": name, "versions_seen": {}},
        **{"channel_values": values, "channel_versions": versions},
    }
    parent_versions = VERSIONS[parent] if parent else {}
    new: Any = {channel: v for channel, v in versions.items() if parent_versions.get(channel) != v}
    saver.put(config_at(uid=parent), checkpoint, metadata, new)


def put_interrupt(saver: SQLiteCheckpointer) -> None:
    """Store the question of the run's second step."""
    saver.put_writes(
        config_at(uid="run 0"), [(INTERRUPT, (Interrupt("Really?", id="i"),))], "task-1"
    )


def put_error(saver: SQLiteCheckpointer) -> None:
    """Store the error of a task of the run's second step."""
    saver.put_writes(config_at(uid="run 0"), [(ERROR, "no answer")], "task-1")


def prune_thread(saver: SQLiteCheckpointer) -> None:
    saver.prune(["t"], strategy="keep_latest")


def prune_updated_checkpoint(saver: SQLiteCheckpointer) -> None:
    """Prune the thread, including the checkpoint that was updated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maintenance, "RUN_DAYS", -1)
        prune_thread(saver)


class Case(NamedTuple):
    """The checkpoints stored before, the action that is killed, and the state of the thread after
    the action.
    """

    before: list[Any]
    killed: Any
    values: dict[str, Any]
    head: str


TITLED = {"title": "A title"}
TAGGED = {**TITLED, "tags": ["one", "two"] * 20}
CASES: dict[str, Case] = {
    "the run's next put": Case(["run 0", "update"], "run 1", {"n": 3, **TITLED}, "run 1"),
    "the put after that": Case(["run 0", "update", "run 1"], "run 2", {"n": 4, **TITLED}, "run 2"),
    "two updates": Case(["run 0", "update", "second update"], "run 1", {"n": 3, **TAGGED}, "run 1"),
    "an update after the run's put": Case(
        ["run 0", "run 1"], "late update", {"n": 3, **TITLED}, "late update"
    ),
    "both wrote the channel": Case(["run 0", "update"], "titled", {"n": 2, **TITLED}, "update"),
    "a question": Case(["run 0", "update"], put_interrupt, {"n": 2, **TITLED}, "run 0"),
    "a failure": Case(["run 0", "update"], put_error, {"n": 2, **TITLED}, "run 0"),
    "an update after a question": Case(
        ["run 0", "run 1", put_interrupt], "late update", {"n": 3, **TITLED}, "late update"
    ),
    "a prune before the run's put": Case(
        ["run 0", "update", "second update", prune_thread], "run 1", {"n": 3, **TAGGED}, "run 1"
    ),
    "a prune of the updated checkpoint": Case(
        ["run 0", "update", "second update", prune_updated_checkpoint],
        "run 1",
        {"n": 3, **TAGGED},
        "run 1",
    ),
    "a prune before a question": Case(
        ["run 0", "update", "second update", prune_thread],
        put_interrupt,
        {"n": 2, **TAGGED},
        "run 0",
    ),
    "a prune before an update": Case(
        ["run 0", "run 1", "run 2", prune_thread], "late update", {"n": 4, **TITLED}, "late update"
    ),
    "a prune before a conflict": Case(
        ["run 0", "update", prune_updated_checkpoint], "titled", {"n": 2, **TITLED}, "update"
    ),
    "the prune": Case(
        ["run 0", "update", "second update"], prune_thread, {"n": 2, **TAGGED}, "second update"
    ),
}


def perform(saver: SQLiteCheckpointer, action: Any) -> None:
    """Put a checkpoint by its name, or call a function."""
    action(saver) if callable(action) else put_named_checkpoint(saver, action)


def read_contents(saver: SQLiteCheckpointer) -> Any:
    """Return everything in a thread: its checkpoints with their writes and the head."""
    infos = saver.checkpoints("t")
    tuples = {
        checkpoint_tuple.checkpoint["id"]: checkpoint_tuple
        for checkpoint_tuple in saver.list(config_at())
    }
    parts = [
        (
            *(info.checkpoint_id, info.is_head, info.parent_id, info.metadata),
            tuples[info.checkpoint_id].checkpoint["channel_values"],
            tuples[info.checkpoint_id].checkpoint["channel_versions"],
            sorted(map(repr, tuples[info.checkpoint_id].pending_writes or ())),
        )
        for info in infos
    ]
    return sorted(parts, key=lambda part: part[0])


class KillCounter:
    """Kills its process when its counter reaches zero."""

    left: int | None = None

    def count(self) -> None:
        if self.left is None:
            return
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


KILL_COUNTER = KillCounter()


class CountingConnection(sqlite3.Connection):
    """A connection class that counts its statements."""

    def execute(self, *args: Any) -> sqlite3.Cursor:
        KILL_COUNTER.count()
        return super().execute(*args)

    def executemany(self, *args: Any) -> sqlite3.Cursor:
        KILL_COUNTER.count()
        return super().executemany(*args)


class CountingProxy(CuttingProxy):
    """A proxy that counts the messages to the server."""

    def _count_message(self) -> tuple[bool, bool]:
        KILL_COUNTER.count()
        return super()._count_message()


def perform_until_killed(place: Place, pipe: Connection, case: str, number: int) -> None:
    """Perform the last action of a case, unless the process is killed before the N-th statement."""
    if place.dsn:
        place = Place(place.path, CountingProxy(place.dsn).dsn)
    with place.saver(**({} if place.dsn else {"factory": CountingConnection})) as saver:
        saver.get_tuple(config_at())  # the run and the update have read the thread
        KILL_COUNTER.left = number
        perform(saver, CASES[case].killed)
        KILL_COUNTER.left = None
        pipe.send("done")


def prepare_thread(place: Place, case: str) -> Any:
    """Store the state before the action, and return everything in the thread."""
    with place.saver() as saver:
        for action in CASES[case].before:
            perform(saver, action)
        return read_contents(saver)


@pytest.mark.repeats
@pytest.mark.parametrize("kind", ["file", "postgres"])
@pytest.mark.parametrize("case", CASES)
def test_killed_merge_leaves_thread_as_before_or_after_and_can_be_repeated(
    case: str, kind: str, tmp_path: Path
) -> None:
    """Acknowledged writes are present, and a second attempt stores the rest."""
    dsn = postgres_server.dsn() if kind == "postgres" else ""
    expected = CASES[case]
    place = Place(tmp_path / "after.db", dsn)
    before = prepare_thread(place, case)
    with place.saver() as saver:
        perform(saver, expected.killed)
        after, head = read_contents(saver), saver.get_tuple(config_at())
    assert head is not None
    assert (head.checkpoint["id"], head.checkpoint["channel_values"]) == (
        expected.head,
        expected.values,
    )
    kills = 0
    for number in count(1, STRIDES[kind]):
        place = Place(tmp_path / f"{number}.db", dsn)
        prepare_thread(place, case)
        context = forkserver_context()
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=perform_until_killed, args=(place, theirs, case, number), daemon=True
        )
        process.start()
        theirs.close()
        process.join()
        ours.close()
        with place.saver() as saver:
            state = read_contents(saver)
            assert state in (before, after)
            if state == before:
                perform(saver, expected.killed)
            assert read_contents(saver) == after
        if process.exitcode != -signal.SIGKILL:
            assert process.exitcode == 0
            break
        kills += 1
    assert kills
