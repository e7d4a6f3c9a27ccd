"""kill -9 at every statement of an erasure: before or after, and the next to open it cleans up."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Sequence
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.base import empty_checkpoint

from perdure.checkpointers import SQLiteCheckpointer

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")

SECRET = "the harbour master's safe opens at nine"
STRIDE = 3  # statements between two kills


class Doomed(sqlite3.Connection):
    """Kills its process at the N-th statement, once armed with N."""

    left = 0

    def execute(self, *args: Any) -> sqlite3.Cursor:
        Doomed.left -= 1
        if Doomed.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(*args)

    def executemany(self, *args: Any) -> sqlite3.Cursor:
        Doomed.left -= 1
        if Doomed.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().executemany(*args)

    def executescript(self, *args: Any) -> sqlite3.Cursor:
        Doomed.left -= 1
        if Doomed.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().executescript(*args)


def erase(path: Path, statement: int) -> None:
    with SQLiteCheckpointer.open(path, factory=Doomed) as saver:
        Doomed.left = statement
        saver.erase("t", ["a"])
        Doomed.left = 0


def ids(messages: Sequence[HumanMessage]) -> str:
    return "".join(message.id or "" for message in messages)


def seen(path: Path) -> list[str]:
    """The ids in every checkpoint, its history and its writes."""
    with SQLiteCheckpointer.open(path, read_only=True) as saver:
        return [
            f"{ids(found.checkpoint['channel_values']['messages'])} "
            f"{ids([item.value for item in saver.history('t', checkpoint_id=uid)])} "
            f"{ids([m for _, _, value in found.pending_writes or [] for m in value])}"
            for found in saver.list(None)
            for uid in [found.checkpoint["id"]]
        ]


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """A thread with a secret in its checkpoints, its history and its writes, all in the file."""
    path = tmp_path / "template.db"
    with SQLiteCheckpointer.open(path) as saver:
        config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
        for number, kept in enumerate(("a", "ab", "b", "bac")):
            new = {**empty_checkpoint(), "id": str(number)}
            said = [HumanMessage(SECRET if uid == "a" else uid, id=uid) for uid in kept]
            new["channel_values"] = {"messages": said}
            new["channel_versions"] = {"messages": number}
            config = saver.put(config, new, {}, {"messages": number})  # type: ignore[arg-type]
            saver.put_writes(config, [("messages", said)], "task")
    return path


def test_killed_at_every_statement(template: Path, tmp_path: Path) -> None:
    """Killed anywhere, all is as before or all is erased; then no byte of it is left."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["pytest", "perdure.checkpointers"])
    before = seen(template)
    after = [line.replace("a", "") for line in before]
    states = []
    for statement in count(1, STRIDE):
        path = tmp_path / f"{statement}.db"
        shutil.copy(template, path)
        process = context.Process(target=erase, args=(path, statement), daemon=True)
        process.start()
        process.join()
        states.append(seen(path))
        assert states[-1] in (before, after)
        with SQLiteCheckpointer.open(path) as saver:
            files = b"".join(file.read_bytes() for file in tmp_path.glob(f"{path.name}*"))
            assert (SECRET.encode() in files) is (states[-1] == before)
            saver.erase("t", ["a"])
        assert after == seen(path)
        if process.exitcode == 0:
            break

    assert before in states
    assert after in states[:-1]
