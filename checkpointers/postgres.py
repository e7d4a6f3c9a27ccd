"""`PostgresCheckpointer`: threads that resume, in a Postgres database that many machines share."""

from __future__ import annotations

from typing import Any, Final, Self

from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.extensions import Allowlist
from perdure.checkpointers.schema import POSTGRES
from perdure.storage.encryption import agree_on_key, seal_for
from perdure.storage.flow import NamedSQL, load
from perdure.storage.postgres import PostgresDatabase

_SQL: Final = NamedSQL(
    load("perdure.checkpointers", "sqlite.sql") | load("perdure.checkpointers", "postgres.sql")
)


class PostgresCheckpointer(Checkpointer):
    def __init__(self, dsn: str, *, key: bytes | str | None = None, serde: SerializerProtocol | None = None,
                 cache_bytes: int = 128 << 20, **options: Any) -> None:
        seal = seal_for(key)
        serde = serde or JsonPlusSerializer(allowed_msgpack_modules=[Allowlist.LOADED])
        database = PostgresDatabase(dsn, POSTGRES, begin=lambda: agree_on_key(seal, "db", read_only=options.get("read_only", False)), **options)
        super().__init__(database, _SQL, serde=serde, seal=seal, cache_bytes=cache_bytes)

    @classmethod
    def open(cls, dsn: str, **options: Any) -> Self:
        saver = cls(dsn, **options)
        saver.setup()
        return saver
