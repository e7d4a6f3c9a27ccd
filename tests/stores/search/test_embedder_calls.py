"""Calls of embedders that raise, hang or are cancelled, from threads and event loops."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from perdure.errors import EmbeddingFailed
from perdure.stores.search.embedders import embedder_from


@pytest.mark.parametrize("error", [ValueError, TimeoutError, StopIteration, KeyError])
def test_error_of_model_is_cause_of_embedding_failed(error: type[Exception]) -> None:
    """The model's own error is the cause, for blocking and async models and calls."""

    def raises(texts: list[str]) -> Any:
        raise error("no quota")

    async def araises(texts: list[str]) -> Any:
        raise (RuntimeError if error is StopIteration else error)("no quota")

    for model in (raises, araises):
        embedder = embedder_from(model)
        with pytest.raises(EmbeddingFailed, match="no quota") as blocking:
            embedder.embed(["a"])
        with pytest.raises(EmbeddingFailed, match="no quota") as query:
            embedder.embed_query("a")
        with pytest.raises(EmbeddingFailed, match="no quota") as awaited:
            asyncio.run(embedder.aembed(["a"]))

        assert all(caught.value.__cause__ for caught in (blocking, query, awaited))


class HangingModel:
    """A model that does not return until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.started = threading.Semaphore(0)
        self.calls = 0

    def blocking(self, texts: list[str]) -> list[list[float]]:
        self.calls += 1
        self.started.release()
        self.released.wait(30)
        return [[1.0]] * len(texts)

    async def asynchronous(self, texts: list[str]) -> list[list[float]]:
        await asyncio.sleep(30)
        return [[1.0]] * len(texts)


@pytest.mark.parametrize("kind", ["blocking", "asynchronous"])
def test_call_of_hanging_model_fails_after_timeout(kind: str) -> None:
    """A blocking or async call of a blocking or async model fails after `timeout_s`."""
    hanging = HangingModel()
    embedder = embedder_from(getattr(hanging, kind), timeout_s=0.05, name="slow")
    try:
        with pytest.raises(EmbeddingFailed, match=r"'slow' did not answer within 0.05 s"):
            embedder.embed(["a"])
        with pytest.raises(EmbeddingFailed, match="did not answer"):
            asyncio.run(embedder.aembed(["a"]))
        with pytest.raises(EmbeddingFailed, match="did not answer"):
            embedder.embed_query("a")
    finally:
        hanging.released.set()


def test_event_loop_runs_while_blocking_model_works() -> None:
    """The model returns only because the event loop releases it in the meantime."""
    hanging = HangingModel()

    async def main() -> Any:
        task = asyncio.ensure_future(embedder_from(hanging.blocking).aembed(["a"]))
        await asyncio.to_thread(hanging.started.acquire)
        hanging.released.set()
        return await task

    assert asyncio.run(main()).tolist() == [[1.0]]


def test_ten_thousand_cancelled_calls_start_few_threads() -> None:
    """Eight of 10,000 cancelled calls reach a hanging model, and the next call is served."""
    hanging = HangingModel()
    embedder = embedder_from(hanging.blocking)

    async def main() -> Any:
        tasks = [asyncio.ensure_future(embedder.aembed([f"text {i}"])) for i in range(10_000)]
        for _ in range(8):
            await asyncio.to_thread(hanging.started.acquire)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        last = asyncio.ensure_future(embedder.aembed(["last"]))
        await asyncio.sleep(0.01)
        hanging.released.set()
        return ended, await last

    ended, last = asyncio.run(main())
    deadline = time.monotonic() + 10
    while any(t.name == "perdure-embed" for t in threading.enumerate()):
        assert time.monotonic() < deadline, "threads end when there is no work"
        time.sleep(0.001)

    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in ended)
    assert last.tolist() == [[1.0]]
    assert hanging.calls == 9


def test_blocking_calls_run_async_model_on_one_event_loop() -> None:
    """Connections of async clients belong to an event loop, so it must stay the same one."""
    loops = []

    async def model(texts: list[str]) -> list[list[float]]:
        loops.append(asyncio.get_running_loop())
        return [[1.0]] * len(texts)

    embedder = embedder_from(model)
    embedder.embed(["a"])
    embedder.embed(["b"])

    assert loops[0] is loops[1]
