"""`SQLiteCheckpointer`: threads that resume, in one SQLite file."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from typing import Any, Self, get_args

from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from perdure.checkpointers.base import OnConflict
from perdure.checkpointers.saver import LogSaver
from perdure.checkpointers.schema import SQLITE
from perdure.errors import ConfigurationError
from perdure.storage.encryption import agree_on_key, seal_for
from perdure.storage.sql import load
from perdure.storage.sqlite import SQLiteDatabase

_SQL = load("perdure.checkpointers", "sqlite.sql")


class SQLiteCheckpointer(LogSaver):
    """A langgraph checkpointer in one SQLite file, for asyncio and for threads alike.

    Every item of a conversation is stored once, whatever the length of the thread; what a run
    removes from its state stays readable through `history()`.
    """

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        key: bytes | str | None = None,
        serde: SerializerProtocol | None = None,
        allow: Sequence[type | tuple[str, str]] = (),
        on_conflict: OnConflict = "fork",
        wait_s: float = 600.0,
        synchronous: str = "full",
        read_only: bool = False,
        timeout_s: float = 30.0,
        cache_bytes: int = 128 << 20,
        factory: type[sqlite3.Connection] = sqlite3.Connection,
    ) -> Self:
        """Open a database, creating it if need be; the result is for `with` or `async with`.

        Args:
            path: A file, or `":memory:"`.
            key: Encrypts every value, message and metadata value with AES-GCM: 16, 24 or 32 bytes,
                or as many in hexadecimal; by default the environment's `PERDURE_KEY`, if set. Who
                opens a file first decides: it is encrypted from then on, or never.
            serde: A serializer of your own; by default langgraph's, in strict mode.
            allow: Types that the default serializer may also rebuild: classes of yours, or
                `(module, name)`. Types of langgraph and langchain-core need not be named.
            on_conflict: When two runs meet on one thread: `"fork"` keeps the one that finished its
                step first as the head and the other as a branch, `"wait"` lets the later wait for
                the earlier (of the same checkpointer), `"error"` raises in the later. A branch is
                logged as a warning of the logger `perdure`. With `"wait"` runs overlap, as with
                `"fork"`, where they would wait in vain: inside a node of the run that holds the
                thread; when the same task or thread began a run that shows no sign of life (an
                open iterator), or langchain's callbacks cannot tell a run's end (it was given a
                `CallbackManager` made by hand). Neither `update_state` nor a run that was told
                which checkpoint to start from waits.
            wait_s: How long a run waits at most, with `on_conflict="wait"`; an iterator of
                `stream()` that is left open holds its thread.
            synchronous: `"full"`: an acknowledged write survives a power cut. `"normal"`: it
                survives a crash of the process.
            read_only: Open for reading; nothing is created.
            cache_bytes: About how much memory decoded messages may take.
            timeout_s: How long to wait for another process that is writing.
            factory: The class of SQLite connections.

        Raises:
            ConfigurationError: An argument is wrong, or the folder does not exist.
            NotADatabase: The path is a folder or another application's file.
            SchemaMismatch: A newer perdure wrote the file.
            WrongKey: The key does not open it, it needs one, or it was made without.
            StorageError: The file cannot be opened.
        """
        if on_conflict not in get_args(OnConflict):
            raise ConfigurationError(
                f"on_conflict is {on_conflict!r}; expected 'fork', 'wait' or 'error'"
            )
        seal = seal_for(key)
        names = [(t.__module__, t.__qualname__) if isinstance(t, type) else t for t in allow]
        chosen = serde or JsonPlusSerializer(allowed_msgpack_modules=names or None)
        database = SQLiteDatabase.open(
            path,
            SQLITE,
            begin=lambda: agree_on_key(seal, os.fsdecode(path), read_only=read_only),
            synchronous=synchronous,
            read_only=read_only,
            timeout_s=timeout_s,
            factory=factory,
        )
        return cls(
            database,
            _SQL,
            serde=chosen,
            seal=seal,
            on_conflict=on_conflict,
            wait_s=wait_s,
            cache_bytes=cache_bytes,
        )

    @classmethod
    def from_conn_string(cls, conn_string: str, **options: Any) -> Self:
        """Open by the name that langgraph's savers use; see `open`."""
        return cls.open(conn_string, **options)

    def setup(self) -> None:
        """Nothing to do: `open` has done it. Here for code that calls it on langgraph's savers."""
