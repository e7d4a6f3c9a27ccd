"""An embedder whose answers are checked, that works in batches and embeds each text only once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from perdure.errors import ConfigurationError
from perdure.stores.answers import Vectors, vectors_of
from perdure.stores.calling import Door
from perdure.stores.vector_cache import Vector, VectorCache, digest

BATCH_SIZE = 256
CACHE_BYTES = 32 << 20
_QUERY_CACHE_BYTES = 1 << 20


class CheckedEmbedder:
    """An embedder whose answers are vectors of length 1, or an error that says what they were.

    Texts go to the model in batches, each text once; vectors are kept by the content of their text,
    those of queries apart. Threads and event loops may share it. `embedder_from` makes one.

    Args:
        name: Which model it is.
        dims: The length of a vector; None: that of the first.
        documents: The model's function for what is stored.
        queries: Its function for a query; it is given one text.
        batch_size: How many texts go to the model at once.
        cache_bytes: How much of the documents' vectors is kept in memory.
        on_clear: Called by `clear_cache`.
    """

    def __init__(
        self,
        name: str,
        dims: int | None,
        documents: Door,
        queries: Door,
        *,
        batch_size: int = BATCH_SIZE,
        cache_bytes: int = CACHE_BYTES,
        on_clear: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self._dims = dims
        self._dims_lock = threading.Lock()
        self._doors = documents, queries
        self._batch_size = batch_size
        self._caches = VectorCache(cache_bytes), VectorCache(min(cache_bytes, _QUERY_CACHE_BYTES))
        self._on_clear = on_clear

    @property
    def dims(self) -> int | None:
        """The length of a vector; None: not known before the first."""
        return self._dims

    def embed(self, texts: Sequence[str]) -> Vectors:
        """The vectors of texts to be stored.

        Returns:
            float32[len(texts), dims], each row of length 1; a zero vector stays zero.

        Raises:
            EmbeddingFailed: The model raised, took too long, or did not return that. What it
                answered for the batches before is kept, so that another try is cheaper.
            ConfigurationError: `texts` is not a list of strings.
        """
        return self._run(self._flow(_listed(texts), query=False), self._doors[0])

    async def aembed(self, texts: Sequence[str]) -> Vectors:
        """The same from a coroutine."""
        return await self._arun(self._flow(_listed(texts), query=False), self._doors[0])

    def embed_query(self, text: str) -> Vector:
        """The vector of a query: float32[dims]; raises as `embed` does."""
        vector: Vector = self._run(self._flow(_listed([text]), query=True), self._doors[1])[0]
        return vector

    async def aembed_query(self, text: str) -> Vector:
        """The same from a coroutine."""
        flow = self._flow(_listed([text]), query=True)
        vector: Vector = (await self._arun(flow, self._doors[1]))[0]
        return vector

    def clear_cache(self) -> None:
        """Drop every vector that is kept, as an erasure must: a vector tells of its text."""
        for cache in self._caches:
            cache.clear()
        if self._on_clear is not None:
            self._on_clear()

    def _flow(self, texts: list[str], *, query: bool) -> Generator[list[str], Vectors, Vectors]:
        """Yields batches for the model, is sent their vectors, returns those of all texts."""
        cache = self._caches[query]
        keys = [digest(text) for text in texts]
        known = cache.found(dict.fromkeys(keys))
        missing = [
            pair for pair in dict(zip(keys, texts, strict=True)).items() if pair[0] not in known
        ]
        for start in range(0, len(missing), self._batch_size):
            batch = missing[start : start + self._batch_size]
            vectors = yield [text for _, text in batch]
            pairs = [(key, vector) for (key, _), vector in zip(batch, vectors, strict=True)]
            known.update(pairs)
            cache.keep(pairs)
        if not keys:
            return np.empty((0, self._dims or 0), np.float32)
        return np.stack([known[key] for key in keys])

    def _run(self, flow: Generator[list[str], Vectors, Vectors], door: Door) -> Vectors:
        try:
            batch = next(flow)
            while True:
                batch = flow.send(door.call(batch, self._check(len(batch))))
        except StopIteration as stop:
            vectors: Vectors = stop.value
            return vectors

    async def _arun(self, flow: Generator[list[str], Vectors, Vectors], door: Door) -> Vectors:
        try:
            batch = next(flow)
            while True:
                batch = flow.send(await door.acall(batch, self._check(len(batch))))
        except StopIteration as stop:
            vectors: Vectors = stop.value
            return vectors

    def _check(self, count: int) -> Callable[[Any], Vectors]:
        def check(answer: Any) -> Vectors:
            if self._dims is not None:
                return vectors_of(answer, count, self._dims, self.name)
            with self._dims_lock:  # two threads may bring a first answer
                vectors = vectors_of(answer, count, self._dims, self.name)
                self._dims = vectors.shape[1]
            return vectors

        return check


def _listed(texts: Sequence[str]) -> list[str]:
    listed = [texts] if isinstance(texts, str) else list(texts)
    if isinstance(texts, str) or not all(isinstance(text, str) for text in listed):
        raise ConfigurationError(f"cannot embed {texts!r}: expected a list of strings")
    return listed
