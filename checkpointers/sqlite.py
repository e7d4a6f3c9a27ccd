"""`SQLiteCheckpointer`: threads that resume, in one SQLite file."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from typing import Any, Final

from langgraph.checkpoint.serde.base import SerializerProtocol

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.saver import choose_serializer
from perdure.checkpointers.stored_types import Aliases, StoredType
from perdure.settings import TIMEOUT_S
from perdure.storage.database import Schema
from perdure.storage.flow import load_sql
from perdure.storage.sqlite import SQLiteDatabase
from perdure.storage.sqlite_connection import DURABLE, Synchronous
from perdure.storage.untrusted_sqlite import IMPORT_VALUE_BYTES

_SQL: Final = load_sql("perdure.checkpointers", "sqlite.sql")
_SCHEMA: Final = Schema("checkpointers", _SQL["schema"])


class SQLiteCheckpointer(Checkpointer):
    """A langgraph checkpointer in one SQLite file, for asyncio and for threads alike.

    Every item of a conversation is stored once; items that a run removes from its state stay
    readable through `history()`. Use it with `with` or `async with`, or call `close`; the first use
    opens the file.

    Args:
        path: A file, or `":memory:"`.
        key: Encrypts every value, message and metadata value with AES-GCM: 16, 24 or 32 bytes,
            or as many in hexadecimal; by default the environment's `PERDURE_KEY`, if set.
            Encryption is fixed when the file is created.
        serde: A serializer of your own, which ignores `allow` and `strict`; by default langgraph's.
        allow: Classes of yours that may be rebuilt, or `(module, qualified name)`, whose module is
            imported when a stored value needs it.
        strict: Rebuild only the classes in `allow`, and those of langgraph and langchain-core;
            others raise `ForbiddenType` at put and at read. By default pydantic models,
            dataclasses, enums and named tuples are rebuilt if the process has imported their
            class, without running its code, and otherwise come back as a dict of their fields.
        types: Further types whose values can be stored, each as `StoredType(cls, dump, load)`.
        aliases: The new classes for renamed or moved classes, by old name. An old name is a pair
            `(module, qualified name)` or text like `"module:Name"`. A value that was stored under
            an old name is rebuilt as the new class.
        synchronous: `"full"`, the default: an acknowledged write survives a power cut.
            `"normal"`: it survives a crash of the process.
        read_only: Open for reading; nothing is created.
        timeout_s: How long to wait for another process that is writing.
        cache_bytes: About how much memory decoded messages may take.
        factory: The class of SQLite connections.
        untrusted: Open a file from elsewhere, whose threads are to be imported. It is only read,
            and refused if its tables are not perdure's own, or damaged; see docs/threads.md.
        max_value_bytes: With `untrusted`, the size of the largest value that is read.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        key: bytes | str | None = None,
        serde: SerializerProtocol | None = None,
        allow: Sequence[type | tuple[str, str]] = (),
        strict: bool = False,
        types: Sequence[StoredType[Any]] = (),
        aliases: Aliases = (),
        synchronous: Synchronous = DURABLE,
        read_only: bool = False,
        timeout_s: float = TIMEOUT_S,
        cache_bytes: int = 128 << 20,
        factory: type[sqlite3.Connection] = sqlite3.Connection,
        untrusted: bool = False,
        max_value_bytes: int = IMPORT_VALUE_BYTES,
    ) -> None:
        read_only = True if untrusted else read_only
        serde, seal, stored_types = choose_serializer(key, serde, allow, strict, types, aliases)
        database = SQLiteDatabase(
            path,
            _SCHEMA,
            begin=self._load_keys,
            synchronous=synchronous,
            read_only=read_only,
            timeout_s=timeout_s,
            factory=factory,
            untrusted=untrusted,
            max_value_bytes=max_value_bytes,
        )
        super().__init__(database, _SQL, serde, seal, cache_bytes, stored_types)
