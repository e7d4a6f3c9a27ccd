"""What the tests of erasing share: all that can be read of a thread, and its raw bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import (
    HumanMessage,
)
from langchain_core.runnables import RunnableConfig

from perdure.checkpointers import ErasureReport, SQLiteCheckpointer
from perdure.checkpointers.address import REMOVALS_KEY
from perdure.checkpointers.postgres import PostgresCheckpointer
from perdure.storage.flow import fetch_rows
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
    """All bytes of a database and what lies beside it; of Postgres, of all rows."""
    if isinstance(saver, PostgresCheckpointer):
        return b"\n".join(b"\t".join(map(_field, row)) for row in _rows(saver))
    path = Path(saver.database.path)
    files = [*path.parent.glob(f"{path.name}*")] if saver.database.path != ":memory:" else []
    return b"".join(file.read_bytes() for file in files)


def _rows(saver: Saver) -> Iterator[Sequence[Any]]:
    def read(sql: str) -> Any:
        return saver.database.read(lambda: fetch_rows(sql))

    tables = "SELECT table_name FROM information_schema.tables WHERE table_schema = current_schema"
    for (table,) in read(tables):
        yield from read(f"SELECT * FROM {table}")


def _field(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def everything(saver: Saver, thread: str = "t") -> str:
    """All that can be read of a thread, without how many removals a checkpoint leaves out."""
    infos = saver.checkpoints(thread)
    channels = {channel for info in infos for channel in info.counts} | {"messages"}
    return shape(
        [
            [[_address(found.config), *found[1:]] for found in saver.list(at(thread))],
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


def _address(config: RunnableConfig) -> dict[str, Any]:
    return {name: value for name, value in config["configurable"].items() if name != REMOVALS_KEY}
