"""Calls of a user's model from threads and event loops, and checks of its answers.

A blocking model is called in a daemon thread, whoever asks: a call that never returns can then be
given up, and cannot keep the process from ending. An async model is awaited where it is asked for;
for blocking callers it runs on an event loop in a thread of its own, always the same one, since the
connections of async clients belong to a loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import functools
import inspect
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from perdure.errors import EmbeddingFailed
from perdure.storage.threads import Promise, settle

T = TypeVar("T")
Call = Callable[[list[str]], Any]
Check = Callable[[Any], T]
Vectors = NDArray[np.float32]

_MOST_THREADS = 8
_CHECKED_IN_LOOP = 8  # answers; of 1536 numbers each they take 0.5 ms to check, more go to a thread


class ModelFunction:
    """One function of a model, blocking or awaited."""

    def __init__(
        self,
        model: str,
        call: Call,  # if it is async, or returns an awaitable, that is awaited
        asynchronous: Call | None,  # for callers that await; None: `call`, in a thread
        threads: Threads,
        *,
        timeout_s: float | None,
        trusted: bool = False,  # it returns: blocking callers call it without a thread between
    ) -> None:
        self._model = model
        self._call = call
        self._async = asynchronous
        self._threads = threads
        self._timeout_s = timeout_s
        self._trusted = trusted

    def call(self, texts: list[str], check: Check[T]) -> T:
        """The checked answer, waited for."""
        if self._trusted:
            return self._answer(texts, check)
        future = self._submit(texts, check, awaited=False).future
        try:
            return future.result(self._timeout_s)  # type: ignore[call-arg] # a thread's
        except TimeoutError as exc:  # never the model's own: that has become an EmbeddingFailed
            future.cancel()
            raise self._too_late() from exc

    async def acall(self, texts: list[str], check: Check[T]) -> T:
        """The same from a coroutine; the event loop goes on meanwhile."""
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                if self._async is None:
                    return await self._submit(texts, check, awaited=True).future  # type: ignore[misc, no-any-return]
                answer = await self._async(texts)
                if len(texts) > _CHECKED_IN_LOOP:
                    return await asyncio.to_thread(check, answer)
                return check(answer)
        except EmbeddingFailed:
            raise
        except Exception as exc:
            raise (self._too_late() if limit.expired() else self._failed(exc)) from exc

    def _submit(self, texts: list[str], check: Check[T], *, awaited: bool) -> Promise[T]:
        context = contextvars.copy_context()  # the caller's tracing goes along
        work = functools.partial(context.run, self._answer, texts, check)
        return self._threads.submit(work, awaited=awaited)

    def _answer(self, texts: list[str], check: Check[T]) -> T:
        try:
            return check(self._waited_for(texts))
        except EmbeddingFailed:
            raise
        except Exception as exc:
            raise self._failed(exc) from exc

    def _waited_for(self, texts: list[str]) -> Any:
        try:
            answer = self._call(texts)
        except NotImplementedError:  # how classes that are async only say so
            if self._async is None:
                raise
            answer = self._async(texts)
        if not inspect.isawaitable(answer):
            return answer
        future = asyncio.run_coroutine_threadsafe(_awaited(answer), _own_loop())
        try:
            return future.result(self._timeout_s)
        except TimeoutError:
            if future.done():
                raise  # the model's own
            future.cancel()
            raise self._too_late() from None

    def _too_late(self) -> EmbeddingFailed:
        return EmbeddingFailed(
            f"the embedder {self._model!r} did not answer within {self._timeout_s} s; give it more "
            "with timeout_s, or fewer texts at once with batch_size"
        )

    def _failed(self, exc: Exception) -> EmbeddingFailed:
        return EmbeddingFailed(f"the embedder {self._model!r} raised {type(exc).__name__}: {exc}")


class Threads:
    """Daemon threads that live while there is work, so that nobody has to close them."""

    def __init__(self, most: int = _MOST_THREADS) -> None:
        self._most = most
        self._count = 0
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Promise[Any], Callable[[], Any]]] = deque()

    def submit(self, work: Callable[[], T], *, awaited: bool) -> Promise[T]:
        """Have work done; what nobody waits for any more when its turn comes is left out."""
        promise: Promise[T] = Promise(awaited=awaited)
        with self._lock:
            while self._waiting and self._waiting[0][0].future.cancelled():
                self._waiting.popleft()  # else the given up pile up behind threads that hang
            self._waiting.append((promise, work))
            if self._count == self._most:
                return promise
            self._count += 1
        threading.Thread(target=self._run, name="perdure-embed", daemon=True).start()
        return promise

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._count -= 1
                    return
                promise, work = self._waiting.popleft()
            if promise.claim():
                try:
                    promise.keep(work())
                except BaseException as exc:
                    promise.fail(exc)
                settle([promise])
            del promise, work  # else the last answer lives as long as the next call takes


async def _awaited(answer: Awaitable[T]) -> T:
    return await answer


_loop: asyncio.AbstractEventLoop | None = None
_loop_thread: threading.Thread | None = None
_loop_lock = threading.Lock()


def _own_loop() -> asyncio.AbstractEventLoop:
    """The event loop on which async models run for those who block; started when first needed."""
    global _loop, _loop_thread
    with _loop_lock:
        if _loop is None or _loop_thread is None or not _loop_thread.is_alive():  # or after a fork
            _loop = asyncio.new_event_loop()
            _loop_thread = threading.Thread(
                target=_run_loop, args=(_loop,), name="perdure-embed-loop", daemon=True
            )
            _loop_thread.start()
            atexit.register(_loop.call_soon_threadsafe, _loop.stop)
        return _loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def vectors_of(answer: Any, count: int, dims: int | None, model: str) -> Vectors:
    """The vectors of a model's answer.

    Returns:
        float32[count, dims], each row of length 1; a zero vector stays zero.

    Raises:
        EmbeddingFailed: The answer is not that; the message names what came.
    """
    rows = _numbers(answer, count, model)
    if rows.shape[0] != count:
        raise _unfit(model, f"{rows.shape[0]} vectors for {count} texts", "one a text, in order")
    if dims is not None and rows.shape[1] != dims:
        raise _unfit(model, f"vectors of {rows.shape[1]} dimensions", f"{dims}")
    if not np.isfinite(rows).all():
        row, column = np.argwhere(~np.isfinite(rows))[0].tolist()
        found = f"{rows[row, column]!s} in vector {row} at place {column}"
        raise _unfit(model, found, "finite numbers")
    return unit(rows)


def _numbers(answer: Any, count: int, model: str) -> NDArray[np.float64]:
    """As float64[rows, dims]."""
    rows = answer if isinstance(answer, list | tuple) else ()
    lengths = [len(row) for row in rows if isinstance(row, list | tuple | np.ndarray)]
    if len(lengths) == count and len(set(lengths)) > 1:
        expected = "all of the same number of dimensions"
        raise _unfit(model, f"vectors of {min(lengths)} to {max(lengths)} dimensions", expected)
    try:
        array = np.asarray(answer)
    except Exception as exc:  # whatever the answer's own conversion raises
        raise _unfit(model, f"{_shown(answer)} ({exc})", "a list of vectors") from exc
    if array.ndim != 2 and len(array.shape) and array.shape[0] != count:
        raise _unfit(model, f"{array.shape[0]} vectors for {count} texts", "one a text, in order")
    if array.ndim != 2 or array.dtype.kind not in "fiu" or array.shape[1] == 0:
        raise _unfit(model, _shown(answer), "a list of vectors, each a list of numbers")
    return array.astype(np.float64)


def unit(rows: NDArray[np.float64]) -> Vectors:
    """Rows of length 1, zero ones left as they are.

    They are divided by their largest number first, so that no square is too large or too small.
    """
    largest = np.abs(rows).max(axis=1, keepdims=True, initial=0.0)
    largest[largest == 0] = 1.0
    scaled = rows / largest
    lengths = np.sqrt(np.einsum("ij,ij->i", scaled, scaled))
    lengths[lengths == 0] = 1.0
    vectors: Vectors = (scaled / lengths[:, None]).astype(np.float32)
    return vectors


def _shown(answer: Any) -> str:
    text = repr(answer)
    return f"{text[:80]}..." if len(text) > 80 else text


def _unfit(model: str, found: str, expected: str) -> EmbeddingFailed:
    return EmbeddingFailed(
        f"the embedder {model!r} returned {found}; expected {expected}. Mend the embedder, or give "
        "the store another"
    )
