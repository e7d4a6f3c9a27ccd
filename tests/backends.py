"""The checkpointer backends of the tests, and the databases in which they are."""

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
    """The location of a test's database, valid in any process: a file, or a schema of Postgres."""

    path: Path
    dsn: str = ""

    def database(self, file_class: Any, postgres_class: Any, **options: Any) -> Any:
        """Open the database with the class for files, or with the class for Postgres."""
        if not self.dsn:
            return file_class.open(self.path, **options)
        options.pop("synchronous", None)  # an option of files only
        schema = postgres_server.schema_name(self.path)
        return postgres_class.open(self.dsn, **{"schema": schema, "pool_size": 4, **options})

    def saver(self, **options: Any) -> SQLiteCheckpointer:
        """Return an open checkpointer for this database."""
        saver = self.database(SQLiteCheckpointer, PostgresCheckpointer, **options)
        return cast(SQLiteCheckpointer, saver)

    def store(self, **options: Any) -> SQLiteStore:
        """Return an open store for this database."""
        return cast(SQLiteStore, self.database(SQLiteStore, PostgresStore, **options))


def places(folder: Path) -> dict[str, Callable[[], Place]]:
    """Return functions that make the locations of databases in a folder, by backend."""
    path = folder / "x.db"
    return {
        "file": lambda: Place(path),
        "postgres": lambda: Place(path, postgres_server.dsn()),
    }


def _open_langgraph_encrypted(folder: Path, **options: Any) -> SQLiteCheckpointer:
    serde = EncryptedSerializer.from_pycryptodome_aes(
        serde=JsonPlusSerializer(allowed_msgpack_modules=None), key=KEY[:16]
    )
    return SQLiteCheckpointer.open(folder / "lg.db", serde=serde, **options)


def _open_in_postgres(folder: Path, **options: Any) -> Any:
    schema = postgres_server.schema_name(folder)
    dsn = postgres_server.dsn_of_role("an_owner") if "tenant" in options else postgres_server.dsn()
    return PostgresCheckpointer.open(dsn, schema=schema, pool_size=4, **options)


def _open_in_user_pool(folder: Path, **options: Any) -> Any:
    pool, schema = (
        shared_pool(postgres_server.dsn_of_role("an_owner")),
        postgres_server.schema_name(folder),
    )
    return PostgresCheckpointer.open(pool, schema=schema, tenant="acme", **options)


BACKENDS: dict[str, Callable[..., SQLiteCheckpointer]] = {
    "memory": lambda folder, **options: SQLiteCheckpointer.open(":memory:", **options),
    "file": lambda folder, **options: SQLiteCheckpointer.open(folder / "plain.db", **options),
    "sealed": lambda folder, **options: SQLiteCheckpointer.open(
        folder / "sealed.db", key=KEY, **options
    ),
    "langgraph-encrypted": _open_langgraph_encrypted,
    "postgres": _open_in_postgres,
    "postgres-sealed": lambda folder, **options: _open_in_postgres(
        folder, key=KEY, tenant="acme", **options
    ),
    "postgres-pool": _open_in_user_pool,
}
# Backends that `make test` leaves out. "memory" and "langgraph-encrypted" differ from "file" in the
# file and in the encoding of values. "postgres-pool" differs from "postgres-sealed" in how
# connections are made and lent.
SLOW = {"langgraph-encrypted", "memory", "postgres-pool"}


class BlockingCheckpointer(SQLiteCheckpointer):
    """A checkpointer whose async methods call the sync methods in a thread."""

    async def aget_tuple(self, config: Any) -> Any:
        return await asyncio.to_thread(self.get_tuple, config)

    async def alist(self, config: Any, **options: Any) -> AsyncIterator[Any]:
        for found in await asyncio.to_thread(lambda: list(self.list(config, **options))):
            yield found

    async def aput(self, *args: Any, **named: Any) -> Any:
        return await asyncio.to_thread(self.put, *args, **named)

    async def aput_writes(self, *args: Any, **named: Any) -> None:
        await asyncio.to_thread(self.put_writes, *args, **named)
