"""How a checkpointer runs its work: plans and flows, and the threads that carry them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer

from perdure.checkpointers.cipher import LangGraphCipher
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.collector import collector_paused
from perdure.checkpointers.copying import Copier
from perdure.checkpointers.erasing import Eraser
from perdure.checkpointers.log import Log, Written
from perdure.checkpointers.memo import Memo
from perdure.checkpointers.plan import PlannedPut, PlannedWrites, Planner
from perdure.checkpointers.pruning import Pruner
from perdure.checkpointers.reading import Reader
from perdure.checkpointers.writing import Stale, Writer
from perdure.errors import ConfigurationError
from perdure.storage.database import Database, DatabaseOwner
from perdure.storage.encryption import Clear, Seal
from perdure.storage.flow import Flow

T = TypeVar("T")

OFF_LOOP_ITEMS = 512  # longer lists are compared in a thread, not on the event loop


class Engine(DatabaseOwner):
    """An open database, and the parts that read and write threads in it."""

    database: Database
    serde: SerializerProtocol
    _sql: dict[str, str]
    _cache_bytes: int
    _share: list[Database]  # of those who have the database open; a clone has none of its own

    def _bind(self, seal: Seal) -> None:
        serde = self.serde
        if isinstance(serde, EncryptedSerializer):
            if not isinstance(seal, Clear):
                raise ConfigurationError(
                    "both a key and an EncryptedSerializer are given; take one of them: key= (or "
                    "PERDURE_KEY) also binds each row to its place"
                )
            # its ciphertext differs each time; what is compared is the plain text within
            seal = LangGraphCipher(serde.cipher)
            serde = serde.serde
        self._seal = seal
        self._codec = Codec(serde)
        self._memo = Memo(self._cache_bytes)
        self._reader = Reader(self._sql, seal, self._memo, self._codec)
        log = Log(self._sql, seal)
        self._writer = Writer(self._sql, seal, self._memo, self._reader, log)
        self._pruner = Pruner(self._sql, self._reader)
        self._eraser = Eraser(self._sql, self._reader, log, self._pruner)
        self._copier = Copier(self._sql, self._reader, self._pruner)

    # -- opening and closing

    def close(self) -> None:
        """Close the database, once everything handed to it is written."""
        try:
            database = self._share.pop()
        except IndexError:  # it is closed already, perhaps by another thread
            return
        database.close()

    # -- running work in either colour

    def _read(self, flow: Flow[T]) -> T:
        with collector_paused():
            return self.database.read(flow)

    def _aread(self, work: Callable[[], T]) -> Awaitable[T]:
        return self.database.in_thread(work)

    def _job(
        self, plan: PlannedPut | PlannedWrites
    ) -> tuple[Callable[[], Flow[Written]], Callable[[Written], None], Callable[[], None]]:
        """What the writer is to do, and what the memo learns from how it ends."""
        return (
            partial(self._writer.put, plan)
            if isinstance(plan, PlannedPut)
            else partial(self._writer.put_writes, plan),
            lambda written: written.take_over(self._memo),
            lambda: self._memo.forget(plan.thread_id),
        )

    def _write(self, plan: Callable[[Planner], PlannedPut | PlannedWrites], thread_id: str) -> None:
        try:
            self.database.write(*self._job(plan(self._planner(thread_id))))
        except Stale:
            self.database.write(*self._job(plan(Planner(self._codec, None, alone=True))))

    async def _awrite(
        self, plan: Callable[[Planner], PlannedPut | PlannedWrites], thread_id: str, items: int
    ) -> None:
        async def planned(planner: Planner) -> PlannedPut | PlannedWrites:
            if items <= OFF_LOOP_ITEMS:
                return plan(planner)
            return await self.database.in_thread(lambda: plan(planner))

        try:
            await self.database.awrite(*self._job(await planned(self._planner(thread_id))))
        except Stale:
            await self.database.awrite(
                *self._job(await planned(Planner(self._codec, None, alone=True)))
            )

    def _planner(self, thread_id: str) -> Planner:
        return Planner(self._codec, self._memo.peek(thread_id))
