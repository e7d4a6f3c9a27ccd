"""Run store operations for both blocking and async callers.

A put is a coroutine that awaits `Effect` objects (see `perdure.effects`). An effect is a step that
blocking and async callers perform in different ways. Each database read, database write and
embedder call is a separate `Effect` object. A database snapshot is held open only while reading,
never while waiting for the embedder. Store reads are blocking calls, so coroutines run them in the
thread pool for reads.

Requests that coroutines make in the same event loop iteration are executed as one batch. Batching
saves time, because switching to another OS thread and back costs more than a small read, and a
transaction costs more than a small write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from functools import partial
from operator import call
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

from perdure.effects import Effect, Operation, arun_operation, run_operation
from perdure.errors import PerdureError
from perdure.storage.database import Database
from perdure.storage.flow import Flow, Promise, resolve_futures_in_this_thread
from perdure.stores.item_writer import ItemWriter, Put
from perdure.stores.search.vectors import Model

T = TypeVar("T")
# maximum number of requests in a batch; the results of a batch are delivered together, so a larger
# batch would delay the result of its first request
_MAX_BATCH = 16
# a request submitted by a coroutine, and the `Promise` that receives its result
_Request = tuple[Any, Promise[Any]]


class ReadingThreadCaller(Protocol):
    """The type of a function that runs a callable in the read thread pool."""

    def __call__(self, make: Callable[[], T], /) -> asyncio.Future[T]:
        """Start running `make` in the thread pool for reads, and return a future for its result."""


class _WriteRequest(NamedTuple):
    """A single caller's puts and deletes, which are written in the same transaction."""

    puts: Sequence[Put]
    now: int
    model: Model | None


class OperationRunner:
    """Executes store operations, which are coroutines that await `Effect` objects.

    An effect is a step, such as a database write, that blocking and async callers perform in
    different ways. The methods `run_read_flow`, `run_write_flow` and `write_puts` do not perform
    the database access themselves, but return an effect that a coroutine must await.
    """

    def __init__(self, database: Database, writer: ItemWriter) -> None:
        self.database, self.writer = database, writer
        self.run_in_read_pool: ReadingThreadCaller = CallBatcher(
            database.run_in_thread, _run_batched_calls_and_resolve_promises
        ).submit
        self._puts = CallBatcher(call, self._write_requests_in_one_transaction)

    def run(self, operation: Operation[T]) -> T:
        """Run an operation in the calling thread."""
        with closing(operation):
            # Open the database before running the operation. Opening it loads the searched JSON
            # paths, which are needed to prepare a put.
            self.database.connect()
            return run_operation(operation)

    async def arun(self, operation: Operation[T], *, computes_in_thread: bool = False) -> T:
        """Run an operation from a coroutine.

        Args:
            operation: The operation.
            computes_in_thread: Whether the code between effects runs in the thread pool for reads.
        """
        try:
            await self.database.aconnect()
        except BaseException:
            operation.close()
            raise
        return await arun_operation(
            operation, self.run_in_read_pool if computes_in_thread else None
        )

    def build_read_effect(self, call: Callable[[], T]) -> Effect[T]:
        """Return the effect of a slow call.

        For blocking callers, `call` runs directly in the calling thread. For async callers, `call`
        runs in the thread pool that executes read operations.
        """
        return Effect(call, lambda: self.run_in_read_pool(call))

    def run_read_flow(self, make_flow: Callable[[], Flow[T]]) -> Effect[T]:
        """Return an `Effect` that runs a `Flow` of SELECT statements on one database snapshot."""
        return self.build_read_effect(lambda: self.database.read(make_flow))

    def run_write_flow(self, make_flow: Callable[[], Flow[T]]) -> Effect[T]:
        """Return an `Effect` that runs a `Flow` of SQL statements in a single transaction."""
        return Effect(
            lambda: self.database.write(make_flow), lambda: self.database.awrite(make_flow)
        )

    def write_puts(self, puts: Sequence[Put], now: int, model: Model | None) -> Effect[None]:
        """Return an `Effect` that writes the given puts and deletes in one database transaction.

        An `Effect` is one step of an operation, with a blocking and an async implementation.

        Args:
            puts: The puts and deletes.
            now: The current time in microseconds.
            model: The embedding model to record in the database, or None if there are no vectors.
        """
        request = _WriteRequest(puts, now, model)
        # Conditional puts can fail, so they are not written in the same transaction as other
        # callers' puts.
        return Effect(
            partial(self._write_puts_serialized_by_namespace, self.database.write, request),
            lambda: (
                self._puts.submit(request)
                if all(put.is_unconditional for put in puts)
                else self._write_puts_serialized_by_namespace(self.database.awrite, request)
            ),
        )

    def _write_puts_serialized_by_namespace(
        self, database_write: Callable[..., Any], request: _WriteRequest
    ) -> Any:
        """Write a request's puts with `Database.write` or `Database.awrite`.

        Writes to the same namespace, or to scopes that share a limit, are serialized.
        """
        puts = request.puts
        paths = {put.path for put in puts} | {limit.prefix for put in puts for limit in put.limits}
        return database_write(
            partial(self.writer.write_puts, *request),
            exclusive_names=list(map(bytes.hex, paths)),
            deletes_rows=all(put.text is None for put in puts),
        )

    async def _write_requests_in_one_transaction(self, requests: list[_Request]) -> None:
        """Write the requests of several callers in a single transaction.

        All puts are unconditional (they have no required version and no limits), so only a database
        error can make them fail. If the shared transaction fails or two puts have the same key,
        each request gets its own transaction. With separate transactions, one caller's request
        cannot make another caller's request fail.
        """
        batch: list[_WriteRequest] = [puts for puts, _ in requests]
        puts = [put for request in batch for put in request.puts]
        model = next((request.model for request in batch if request.model is not None), None)
        write, errors = (
            partial(self._write_puts_serialized_by_namespace, self.database.awrite),
            [None] * len(batch),
        )
        is_one_transaction = len({(put.path, put.key) for put in puts}) == len(puts)
        if is_one_transaction:
            try:
                await write(_WriteRequest(puts, max(request.now for request in batch), model))
            except Exception:
                if len(batch) == 1:
                    raise
                is_one_transaction = False
        if not is_one_transaction:
            errors = await asyncio.gather(*map(write, batch), return_exceptions=True)
        for (_, promise), error in zip(requests, errors, strict=True):
            promise.result, promise.error = None, error


class CallBatcher:
    """Batches the requests that coroutines submit in the same event loop iteration.

    Args:
        start: Starts a call and returns an awaitable.
        run: Runs a batch and sets the results of its promises.
    """

    def __init__(
        self,
        start: Callable[[Callable[[], Any]], Awaitable[None]],
        run: Callable[[list[_Request]], Any],
    ) -> None:
        self._start, self._run = start, run
        self._open_batches: WeakKeyDictionary[asyncio.AbstractEventLoop, list[_Request]] = (
            WeakKeyDictionary()
        )

    def submit(self, request: Any) -> asyncio.Future[Any]:
        """Add a request to the current batch, and return a future for its result."""
        loop = asyncio.get_running_loop()
        batch = self._open_batches.get(loop)
        if batch is None or len(batch) == _MAX_BATCH:
            batch = self._open_batches[loop] = []
            loop.call_soon(self._run_batch, loop, batch)
        promise: Promise[Any] = Promise(loop.create_future())
        batch.append((request, promise))
        return promise.future  # type: ignore[return-value]

    def _run_batch(self, loop: asyncio.AbstractEventLoop, batch: list[_Request]) -> None:
        """Run the requests collected in one iteration of the event loop.

        Cancelled requests are left out.
        """
        if self._open_batches.get(loop) is batch:
            del self._open_batches[loop]
        batch = [request for request in batch if request[1].start_unless_cancelled()]
        if not batch:
            return
        future: asyncio.Future[None]
        try:
            future = asyncio.ensure_future(self._start(partial(self._run, batch)))
        except PerdureError as exc:
            future = loop.create_future()
            future.set_exception(exc)
        future.add_done_callback(partial(_resolve_futures_of_finished_batch, batch))


def _resolve_futures_of_finished_batch(
    batch: list[_Request], batch_future: asyncio.Future[None]
) -> None:
    """Pass the results and errors of a finished or failed batch to the futures of its requests."""
    error = asyncio.CancelledError() if batch_future.cancelled() else batch_future.exception()
    _, promises = zip(*batch, strict=True)
    for promise in promises:
        promise.error = error or promise.error
    resolve_futures_in_this_thread(promises)


def _run_batched_calls_and_resolve_promises(batch: list[_Request]) -> None:
    """Run the calls of a batch one after another, and store each result in the call's `Promise`.

    Cancelled calls are left out.
    """
    for make, promise in batch:
        try:
            promise.result = make() if promise.start_unless_cancelled() else None
        except BaseException as exc:
            promise.error = exc
