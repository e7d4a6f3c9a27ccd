"""Calling embedders that raise, hang or are given up, from threads and event loops."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from perdure.errors import EmbeddingFailed
from perdure.stores.embedders import embedder_from


@pytest.mark.parametrize("error", [ValueError, TimeoutError, StopIteration, KeyError])
def test_what_a_model_raises_is_the_cause(error: type[Exception]) -> None:
    """The model's own error is kept, in both colours, from blocking and async models."""

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


class Hanging:
    """A model that does not answer until told to."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.begun = threading.Semaphore(0)
        self.calls = 0

    def blocking(self, texts: list[str]) -> list[list[float]]:
        self.calls += 1
        self.begun.release()
        self.go_on.wait(30)
        return [[1.0]] * len(texts)

    async def asynchronous(self, texts: list[str]) -> list[list[float]]:
        await asyncio.sleep(30)
        return [[1.0]] * len(texts)


@pytest.mark.parametrize("kind", ["blocking", "asynchronous"])
def test_a_model_that_hangs_is_given_up(kind: str) -> None:
    """Blocking or async, awaited or waited for: after `timeout_s` it is an error."""
    hanging = Hanging()
    embedder = embedder_from(getattr(hanging, kind), timeout_s=0.05, name="slow")
    try:
        with pytest.raises(EmbeddingFailed, match=r"'slow' did not answer within 0.05 s"):
            embedder.embed(["a"])
        with pytest.raises(EmbeddingFailed, match="did not answer"):
            asyncio.run(embedder.aembed(["a"]))
        with pytest.raises(EmbeddingFailed, match="did not answer"):
            embedder.embed_query("a")
    finally:
        hanging.go_on.set()


def test_the_event_loop_goes_on_while_a_blocking_model_works() -> None:
    """The model returns only because the loop, in the meantime, lets it."""
    hanging = Hanging()

    async def main() -> Any:
        task = asyncio.ensure_future(embedder_from(hanging.blocking).aembed(["a"]))
        await asyncio.to_thread(hanging.begun.acquire)
        hanging.go_on.set()
        return await task

    assert asyncio.run(main()).tolist() == [[1.0]]


def test_a_storm_of_cancelled_calls_starts_few_threads() -> None:
    """10,000 calls are given up behind a model that hangs; eight reached it, the next is served."""
    hanging = Hanging()
    embedder = embedder_from(hanging.blocking)

    async def main() -> Any:
        tasks = [asyncio.ensure_future(embedder.aembed([f"text {i}"])) for i in range(10_000)]
        for _ in range(8):
            await asyncio.to_thread(hanging.begun.acquire)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        last = asyncio.ensure_future(embedder.aembed(["last"]))
        await asyncio.sleep(0.01)
        hanging.go_on.set()
        return ended, await last

    ended, last = asyncio.run(main())
    deadline = time.monotonic() + 10
    while any(t.name == "perdure-embed" for t in threading.enumerate()):
        assert time.monotonic() < deadline, "threads end when there is no work"
        time.sleep(0.001)

    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in ended)
    assert last.tolist() == [[1.0]]
    assert hanging.calls == 9


def test_async_models_run_on_one_loop_for_those_who_block() -> None:
    """Connections of async clients belong to a loop: from blocking calls it is always the same."""
    loops = []

    async def model(texts: list[str]) -> list[list[float]]:
        loops.append(asyncio.get_running_loop())
        return [[1.0]] * len(texts)

    embedder = embedder_from(model)
    embedder.embed(["a"])
    embedder.embed(["b"])

    assert loops[0] is loops[1]
