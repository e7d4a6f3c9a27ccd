"""Define `SQLiteCheckpointer`, which stores threads in one SQLite file."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from typing import Any, Final

from langgraph.checkpoint.serde.base import SerializerProtocol

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.extensions import list_sqlite_scripts_of_extensions
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
    """Stores LangGraph threads in one SQLite file, with blocking and async methods.

    Each message of a conversation is stored only once, no matter how many checkpoints contain it.
    Items that a run removes from its state can still be read with `history()`. Use the checkpointer
    in a `with` or `async with` statement, or call `close` after use. The first use opens the file.

    Args:
        path: The path of a file, or `":memory:"`.
        key: The key with which every value, message and metadata value is encrypted by AES-GCM: 16,
            24 or 32 bytes, or the same in hexadecimal. The default is the environment variable
            `PERDURE_KEY`, if it is set. Whether a file is encrypted is fixed when it is created.
        serde: A custom serializer, with which `allow` and `strict` have no effect. The default is
            langgraph's serializer.
        allow: Classes of the application that may be rebuilt. A pair `(module, qualified name)`
            imports its module when a stored value needs the class.
        strict: Whether to rebuild only the classes in `allow` and those of langgraph and
            langchain-core. All other classes then raise `ForbiddenType` at put and at read. By
            default, pydantic models, dataclasses, enums and named tuples are rebuilt without
            running their code if the process has imported their class. If the process has not
            imported the class, an object is returned as a dict of its fields.
        types: Further types whose values can be stored, each as `StoredType(cls, dump, load)`.
        aliases: The new classes for renamed or moved classes, by old name. An old name is a pair
            `(module, qualified name)` or text like `"module:Name"`. A value that was stored under
            an old name is rebuilt as the new class.
        synchronous: With `"full"`, the default, an acknowledged write survives a power cut. With
            `"normal"`, it survives a crash of the process.
        read_only: Whether to open the file only for reading; no file is created.
        timeout_s: How long to wait for another process that is writing, in seconds.
        cache_bytes: The approximate maximum memory of the cache, in bytes.
        factory: The class of SQLite connections.
        untrusted: Whether the file comes from elsewhere and its threads are to be imported. The
            file is only read. A file is refused if its tables are not those of perdure, or if the
            file is damaged; see docs/threads.md.
        max_value_bytes: The maximum size in bytes of a value that is read from an untrusted file.

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
            begin=self._check_encryption_key_and_load_removal_key,
            synchronous=synchronous,
            read_only=read_only,
            timeout_s=timeout_s,
            factory=factory,
            untrusted=untrusted,
            further_scripts=list_sqlite_scripts_of_extensions() if untrusted else (),
            max_value_bytes=max_value_bytes,
        )
        super().__init__(database, _SQL, serde, seal, cache_bytes, stored_types)
