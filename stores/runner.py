"""The effects of a store, and what runs its operations, see `perdure.effects`.

An operation reads, writes and embeds by effects, so it holds no snapshot while a model is waited
for. For a coroutine, what it computes and reads is done in the database's threads.

What coroutines ask for in one turn of an event loop is done together: a hop to a thread and back
costs more than a small read, and a transaction more than a small write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from perdure.effects import Effect, Operation, arun, run
from perdure.errors import PerdureError
from perdure.storage.database import Database
from perdure.storage.flow import Flow
from perdure.stores.embedders import CheckedEmbedder
from perdure.stores.models import Embeddings, Model
from perdure.stores.puts import Put
from perdure.stores.vectors import Floats
from perdure.stores.writer import ItemWriter

T = TypeVar("T")
_TOGETHER = 16  # calls in one hop: the first waits for the last
_Ask = tuple[Any, asyncio.Future[Any]]  # what a coroutine asks for, and its answer


class _Puts(NamedTuple):
    """Puts and deletes, all or none."""

    puts: Sequence[Put]
    now: int
    model: Model | None


def named(puts: Sequence[Put]) -> list[str]:
    """What puts write to, and what their limits count: no other may do so meanwhile."""
    paths = {put.path for put in puts} | {limit.prefix for put in puts for limit in put.limits}
    return [path.hex() for path in paths]


def _removes(puts: Sequence[Put]) -> bool:
    return all(put.text is None for put in puts)


class Runner:
    """Makes the effects of a store, and runs its operations."""

    def __init__(self, database: Database, writer: ItemWriter, embeddings: Embeddings) -> None:
        self.database, self.writer, self.embeddings = database, writer, embeddings
        self._calls = _Batches(self._call_together)
        self._puts = _Batches(self._put_together)

    def run(self, operation: Operation[T]) -> T:
        """Run an operation in the calling thread."""
        with closing(operation):
            self.database.connect()  # what is put depends on the fields that the file records
            return run(operation)

    async def arun(self, operation: Operation[T], *, brief: bool = False) -> T:
        """Run an operation from a coroutine; `brief` as of `perdure.effects.arun`."""
        try:
            await self.database.aconnect()
        except BaseException:
            operation.close()
            raise
        return await arun(operation, self._calls.ask, brief=brief)

    def read(self, make: Callable[[], Flow[T]], *, snapshot: bool = True) -> Effect[T]:
        """The read of a flow, on one snapshot unless it is a single statement."""
        read = partial(self.database.read, make, snapshot=snapshot)
        return Effect(read, lambda: self.database.in_thread(read), joins=True)

    def write(self, make: Callable[[], Flow[T]]) -> Effect[T]:
        """The write of a flow, in one transaction."""
        database = self.database
        return Effect(lambda: database.write(make), lambda: database.awrite(make), brief=True)

    def put(self, puts: Sequence[Put], now: int, model: Model | None) -> Effect[None]:
        """Puts and deletes, all or none."""
        asked = _Puts(puts, now, model)
        make = partial(self.writer.write, *asked)
        alone = not all(put.unconditional for put in puts)
        return Effect(
            lambda: self.database.write(make, exclusive=named(puts), removes=_removes(puts)),
            lambda: self._aput(asked) if alone else self._puts.ask(asked),
            brief=True,
        )

    def embed(self, text: str) -> Effect[Floats]:
        """The vector of a query."""
        embedder = self._embedder
        return Effect(
            lambda: embedder.embed_query(text),
            lambda: embedder.aembed_query(text),
            joins=self.embeddings.in_process,
        )

    def embed_all(self, texts: Sequence[str]) -> Effect[Floats]:
        """The vectors of texts to be stored."""
        embedder = self._embedder
        if self.embeddings.in_process:  # slow: no read waits for it
            embed = partial(embedder.embed, texts)
            return Effect(embed, lambda: self.database.in_thread(embed))
        return Effect(lambda: embedder.embed(texts), lambda: embedder.aembed(texts))

    def _aput(self, asked: _Puts) -> Awaitable[None]:
        make = partial(self.writer.write, *asked)
        puts = asked.puts
        return self.database.awrite(make, exclusive=named(puts), removes=_removes(puts))

    @property
    def _embedder(self) -> CheckedEmbedder:
        assert self.embeddings.embedder is not None
        return self.embeddings.embedder

    def _call_together(self, asks: list[_Ask]) -> Awaitable[list[Any]]:
        return self.database.in_thread(partial(_outcomes, asks))

    async def _put_together(self, asks: list[_Ask]) -> list[BaseException | None]:
        """Write puts that nothing but the database can refuse, in one transaction."""
        batch: list[_Puts] = [puts for puts, _ in asks]
        puts = [put for asked in batch for put in asked.puts]
        model = next((asked.model for asked in batch if asked.model is not None), None)
        try:
            await self._aput(_Puts(puts, max(asked.now for asked in batch), model))
        except Exception as exc:
            if len(batch) == 1:
                return [exc]
            # nobody fails for another
            return await asyncio.gather(*map(self._aput, batch), return_exceptions=True)
        return [None] * len(batch)


class _Batches:
    """What coroutines ask for in one turn of an event loop, done together at its end."""

    def __init__(self, do: Callable[[list[_Ask]], Awaitable[Sequence[Any]]]) -> None:
        self._do = do  # returns an answer for each, or its error
        self._open: WeakKeyDictionary[asyncio.AbstractEventLoop, list[_Ask]] = WeakKeyDictionary()

    def ask(self, what: Any) -> asyncio.Future[Any]:
        """Ask for something."""
        loop = asyncio.get_running_loop()
        asks = self._open.get(loop)
        if asks is None or len(asks) == _TOGETHER:
            asks = self._open[loop] = []
            loop.call_soon(self._end, loop, asks)
        future = loop.create_future()
        asks.append((what, future))
        return future

    def _end(self, loop: asyncio.AbstractEventLoop, asks: list[_Ask]) -> None:
        if self._open.get(loop) is asks:
            del self._open[loop]
        asks = [ask for ask in asks if not ask[1].cancelled()]
        if not asks:
            return
        done: asyncio.Future[Sequence[Any]]
        try:
            done = asyncio.ensure_future(self._do(asks))
        except PerdureError as exc:
            done = loop.create_future()
            done.set_exception(exc)
        done.add_done_callback(partial(_settle, asks))


def _settle(asks: list[_Ask], done: asyncio.Future[Sequence[Any]]) -> None:
    error = asyncio.CancelledError() if done.cancelled() else done.exception()
    outcomes = done.result() if error is None else [error] * len(asks)
    for (_, future), outcome in zip(asks, outcomes, strict=True):
        if future.done():
            continue
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _outcomes(asks: list[_Ask]) -> list[Any]:
    """What calls return, or the errors that they raise; a cancelled one is not made."""
    outcomes: list[Any] = []
    for call, future in asks:
        try:
            outcomes.append(None if future.cancelled() else call())
        except BaseException as exc:
            outcomes.append(exc)
    return outcomes
