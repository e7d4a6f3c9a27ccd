"""The checkpointers under contract, and both doors into them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.postgres import PostgresCheckpointer
from perdure.stores import SQLiteStore
from perdure.stores.postgres import PostgresStore
from tests import postgres_server
from tests.user_pool import shared_pool

KEY = b"0123456789abcdef0123456789abcdef"


@dataclass(frozen=True)
class Place:
    """Where a database of a test is, in any process: a file, or the schema that stands for it."""

    path: Path
    dsn: str = ""

    def database(self, owner: Any, in_postgres: Any, **options: Any) -> Any:
        """Open it as one of two classes."""
        if not self.dsn:
            return owner.open(self.path, **options)
        options.pop("synchronous", None)  # of files
        schema = postgres_server.schema(self.path)
        return in_postgres.open(self.dsn, **{"schema": schema, "pool_size": 4, **options})

    def saver(self, **options: Any) -> SQLiteCheckpointer:
        """A checkpointer there."""
        found = self.database(SQLiteCheckpointer, PostgresCheckpointer, **options)
        return cast(SQLiteCheckpointer, found)

    def store(self, **options: Any) -> SQLiteStore:
        """A store there."""
        return cast(SQLiteStore, self.database(SQLiteStore, PostgresStore, **options))


def places(folder: Path) -> dict[str, Callable[[], Place]]:
    """Places in a folder."""
    path = folder / "x.db"
    return {
        "file": lambda: Place(path),
        "postgres": lambda: Place(path, postgres_server.dsn()),
    }


def _langgraph_encrypted(folder: Path, **options: Any) -> SQLiteCheckpointer:
    serde = EncryptedSerializer.from_pycryptodome_aes(
        serde=JsonPlusSerializer(allowed_msgpack_modules=None), key=KEY[:16]
    )
    return SQLiteCheckpointer.open(folder / "lg.db", serde=serde, **options)


def _postgres(folder: Path, **options: Any) -> Any:
    schema = postgres_server.schema(folder)
    dsn = postgres_server.dsn_of("an_owner") if "tenant" in options else postgres_server.dsn()
    return PostgresCheckpointer.open(dsn, schema=schema, pool_size=4, **options)


def _user_pool(folder: Path, **options: Any) -> Any:
    pool, schema = shared_pool(postgres_server.dsn_of("an_owner")), postgres_server.schema(folder)
    return PostgresCheckpointer.open(pool, schema=schema, tenant="acme", **options)


BACKENDS: dict[str, Callable[..., SQLiteCheckpointer]] = {
    "memory": lambda folder, **options: SQLiteCheckpointer.open(":memory:", **options),
    "file": lambda folder, **options: SQLiteCheckpointer.open(folder / "plain.db", **options),
    "sealed": lambda folder, **options: SQLiteCheckpointer.open(
        folder / "sealed.db", key=KEY, **options
    ),
    "langgraph-encrypted": _langgraph_encrypted,
    "postgres": _postgres,
    "postgres-sealed": lambda folder, **options: _postgres(
        folder, key=KEY, tenant="acme", **options
    ),
    "postgres-pool": _user_pool,
}
SLOW = {"postgres-pool"}  # differs from "postgres-sealed" in how connections are made and lent


class Blocking(SQLiteCheckpointer):
    """The blocking door: each `a` method is answered by its blocking twin in a thread."""

    async def aget_tuple(self, config: Any) -> Any:
        return await asyncio.to_thread(self.get_tuple, config)

    async def alist(self, config: Any, **options: Any) -> AsyncIterator[Any]:
        for found in await asyncio.to_thread(lambda: list(self.list(config, **options))):
            yield found

    async def aput(self, *args: Any, **named: Any) -> Any:
        return await asyncio.to_thread(self.put, *args, **named)

    async def aput_writes(self, *args: Any, **named: Any) -> None:
        await asyncio.to_thread(self.put_writes, *args, **named)
