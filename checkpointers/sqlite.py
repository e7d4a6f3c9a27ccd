"""`SQLiteCheckpointer`: threads that resume, in one SQLite file."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from typing import Any, Self, get_args

from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from perdure.checkpointers.base import OnConflict
from perdure.checkpointers.cipher import AESGCM, Clear, Seal, key_bytes
from perdure.checkpointers.saver import LogSaver
from perdure.checkpointers.schema import SQLITE
from perdure.errors import ConfigurationError, CorruptRecord, WrongKey
from perdure.storage.flow import Flow, Statement
from perdure.storage.queries import load
from perdure.storage.sqlite import Database

_CHECK = "key check"
_PROOF = b"perdure"


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
                or as many in hexadecimal; by default the environment's `PERDURE_KEY`, if set.
            serde: A serializer of your own; by default langgraph's, in strict mode.
            allow: Types that the default serializer may also rebuild: classes of yours, or
                `(module, name)`. Types of langgraph and langchain-core need not be named.
            on_conflict: When two runs meet on one thread: `"fork"` keeps the one that finished its
                step first as the head and the other as a branch, `"wait"` lets the later wait for
                the earlier (within one process), `"error"` raises in the later. A branch is
                logged as a warning of the logger `perdure`.
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
            WrongKey: The key does not open it, or it needs one.
            StorageError: The file cannot be opened.
        """
        if on_conflict not in get_args(OnConflict):
            raise ConfigurationError(
                f"on_conflict is {on_conflict!r}; expected 'fork', 'wait' or 'error'"
            )
        secret = key_bytes(key if key is not None else os.environ.get("PERDURE_KEY") or None)
        seal: Seal = Clear() if secret is None else AESGCM(secret)
        names = [(t.__module__, t.__qualname__) if isinstance(t, type) else t for t in allow]
        chosen = serde or JsonPlusSerializer(allowed_msgpack_modules=names or None)
        database = Database.open(
            path,
            SQLITE,
            synchronous=synchronous,
            read_only=read_only,
            timeout_s=timeout_s,
            factory=factory,
        )
        sql = load("perdure.checkpointers", "sqlite.sql")
        try:
            check = _check_key(sql, seal, os.fsdecode(path))
            database.read(check) if read_only else database.write(check)
            return cls(
                database,
                sql,
                serde=chosen,
                seal=seal,
                on_conflict=on_conflict,
                wait_s=wait_s,
                cache_bytes=cache_bytes,
            )
        except BaseException:
            database.close()
            raise

    @classmethod
    def from_conn_string(cls, conn_string: str, **options: Any) -> Self:
        """Open by the name that langgraph's savers use; see `open`."""
        return cls.open(conn_string, **options)

    def setup(self) -> None:
        """Nothing to do: `open` has done it. Here for code that calls it on langgraph's savers."""


def _check_key(sql: dict[str, str], seal: Seal, path: str) -> Flow[None]:
    """Make sure that the key is the one the database was made with."""
    rows = yield Statement(sql["get_setting"], (_CHECK,))
    sealed = isinstance(seal, AESGCM)
    if rows:
        try:
            if sealed and seal.open(rows[0][0], (_CHECK,)) == _PROOF:
                return
        except CorruptRecord:
            pass
        raise WrongKey(
            f"the key does not open {path!r}"
            if sealed
            else f"{path!r} is encrypted; pass key= or set PERDURE_KEY"
        )
    if sealed:
        threads = (yield Statement(sql["totals"]))[0][0]
        if threads:
            raise WrongKey(f"{path!r} holds threads that are not encrypted; open it without a key")
        yield Statement(sql["set_setting"], (_CHECK, seal.seal(_PROOF, (_CHECK,))))
