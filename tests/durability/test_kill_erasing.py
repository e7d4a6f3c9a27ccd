"""kill -9 at every statement of an erasure: all or nothing, and the next open cleans up."""

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


class KillingConnection(sqlite3.Connection):
    """A connection class that kills its process at the N-th statement, once armed with N."""

    statements_left = 0

    def execute(self, *args: Any) -> sqlite3.Cursor:
        KillingConnection.statements_left -= 1
        if KillingConnection.statements_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(*args)

    def executemany(self, *args: Any) -> sqlite3.Cursor:
        KillingConnection.statements_left -= 1
        if KillingConnection.statements_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().executemany(*args)

    def executescript(self, *args: Any) -> sqlite3.Cursor:
        KillingConnection.statements_left -= 1
        if KillingConnection.statements_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().executescript(*args)


def erase_or_die(path: Path, statement: int) -> None:
    with SQLiteCheckpointer.open(path, factory=KillingConnection) as saver:
        KillingConnection.statements_left = statement
        saver.erase("t", ["a"])
        KillingConnection.statements_left = 0


def join_ids(messages: Sequence[HumanMessage]) -> str:
    return "".join(message.id or "" for message in messages)


def read_ids(path: Path) -> list[str]:
    """Return the message ids in every checkpoint, in its history and in its writes."""
    with SQLiteCheckpointer.open(path, read_only=True) as saver:
        return [
            f"{join_ids(stored.checkpoint['channel_values']['messages'])} "
            f"{join_ids([item.value for item in saver.history('t', checkpoint_id=uid)])} "
            f"{join_ids([m for _, _, value in stored.pending_writes or [] for m in value])}"
            for stored in saver.list(None)
            for uid in [stored.checkpoint["id"]]
        ]


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """Create a file with a thread that has a secret in checkpoints, history and writes."""
    path = tmp_path / "template.db"
    with SQLiteCheckpointer.open(path) as saver:
        config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
        for number, ids_of_step in enumerate(("a", "ab", "b", "bac")):
            new = {**empty_checkpoint(), "id": str(number)}
            messages = [HumanMessage(SECRET if uid == "a" else uid, id=uid) for uid in ids_of_step]
            new["channel_values"] = {"messages": messages}
            new["channel_versions"] = {"messages": number}
            config = saver.put(config, new, {}, {"messages": number})  # type: ignore[arg-type]
            saver.put_writes(config, [("messages", messages)], "task")
    return path


def test_killed_erasure_is_done_or_undone_and_leaves_no_byte(
    template: Path, tmp_path: Path
) -> None:
    """After the file was opened again, no byte of an erased message is left in it."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["pytest", "perdure.checkpointers"])
    before = read_ids(template)
    after = [line.replace("a", "") for line in before]
    states = []
    for statement in count(1, STRIDE):
        path = tmp_path / f"{statement}.db"
        shutil.copy(template, path)
        process = context.Process(target=erase_or_die, args=(path, statement), daemon=True)
        process.start()
        process.join()
        states.append(read_ids(path))
        assert states[-1] in (before, after)
        with SQLiteCheckpointer.open(path) as saver:
            files = b"".join(file.read_bytes() for file in tmp_path.glob(f"{path.name}*"))
            assert (SECRET.encode() in files) is (states[-1] == before)
            saver.erase("t", ["a"])
        assert after == read_ids(path)
        if process.exitcode == 0:
            break

    assert before in states
    assert after in states[:-1]
