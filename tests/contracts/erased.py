"""Helpers of the tests of erasure, which read a whole thread and the raw bytes of a database."""

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
from tests.contracts.puts import config_at, render_with_types

Saver = SQLiteCheckpointer
SECRET = "the harbour master's safe opens at nine"


def human_message(uid: str, text: str = "") -> HumanMessage:
    return HumanMessage(text or f"says {uid}", id=uid)


doomed_message = human_message("a", SECRET)


def erase_async(saver: Saver, *args: Any) -> ErasureReport:
    return asyncio.run(saver.aerase(*args))


Erase = Callable[..., ErasureReport]
ERASE_METHODS: dict[str, Erase] = {"erase": Saver.erase, "aerase": erase_async}
both_erase_methods = pytest.mark.parametrize(
    "erase", ERASE_METHODS.values(), ids=ERASE_METHODS.keys()
)


def read_raw_bytes(saver: Saver) -> bytes:
    """Return all bytes of the files of a SQLite database, or of all rows of a Postgres schema."""
    if isinstance(saver, PostgresCheckpointer):
        return b"\n".join(b"\t".join(map(_encode_field, row)) for row in _iter_rows(saver))
    path = Path(saver.database.path)
    files = [*path.parent.glob(f"{path.name}*")] if saver.database.path != ":memory:" else []
    return b"".join(file.read_bytes() for file in files)


def _iter_rows(saver: Saver) -> Iterator[Sequence[Any]]:
    def read(sql: str) -> Any:
        return saver.database.read(lambda: fetch_rows(sql))

    tables = "SELECT table_name FROM information_schema.tables WHERE table_schema = current_schema"
    for (table,) in read(tables):
        yield from read(f"SELECT * FROM {table}")


def _encode_field(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def render_thread(saver: Saver, thread: str = "t") -> str:
    """Render everything that can be read from a thread, except the counts of removals."""
    infos = saver.checkpoints(thread)
    channels = {channel for info in infos for channel in info.counts} | {"messages"}
    return render_with_types(
        [
            [
                [_without_removals_key(record.config), *record[1:]]
                for record in saver.list(config_at(thread))
            ],
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


def _without_removals_key(config: RunnableConfig) -> dict[str, Any]:
    return {name: value for name, value in config["configurable"].items() if name != REMOVALS_KEY}
