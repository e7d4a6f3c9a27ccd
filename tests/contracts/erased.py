"""What the tests of erasing share: all that can be read of a thread, and its raw bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import (
    HumanMessage,
)

from perdure.checkpointers import ErasureReport, SQLiteCheckpointer
from tests.contracts.puts import at, shape

Saver = SQLiteCheckpointer
SECRET = "the harbour master's safe opens at nine"


def human(uid: str, text: str = "") -> HumanMessage:
    return HumanMessage(text or f"says {uid}", id=uid)


doomed = human("a", SECRET)


def awaited(saver: Saver, *args: Any) -> ErasureReport:
    return asyncio.run(saver.aerase(*args))


Erase = Callable[..., ErasureReport]
DOORS: dict[str, Erase] = {"erase": Saver.erase, "aerase": awaited}
both_doors = pytest.mark.parametrize("erase", DOORS.values(), ids=DOORS.keys())


def raw(saver: Saver) -> bytes:
    """All bytes of a database and what lies beside it."""
    path = Path(saver.database.path)
    files = [*path.parent.glob(f"{path.name}*")] if saver.database.path != ":memory:" else []
    return b"".join(file.read_bytes() for file in files)


def everything(saver: Saver, thread: str = "t") -> str:
    """All that can be read of a thread."""
    infos = saver.checkpoints(thread)
    channels = {channel for info in infos for channel in info.counts} | {"messages"}
    return shape(
        [
            [[*found] for found in saver.list(at(thread))],
            [info.metadata for info in infos],
            [
                item.value
                for info in infos
                for channel in sorted(channels)
                for item in saver.history(
                    thread,
                    channel=channel,
                    checkpoint_id=info.checkpoint_id,
                    checkpoint_ns=info.checkpoint_ns,
                )
            ],
        ]
    )
