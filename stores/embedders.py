"""Embedders, made of an object, a function or a model's name.

Answers are checked, work goes in batches, and each text is embedded only once.
"""

from __future__ import annotations

import importlib.util
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol, runtime_checkable

import numpy as np
from langchain_core.embeddings import Embeddings
from langgraph.store.base import ensure_embeddings
from numpy.typing import NDArray

from perdure.errors import ConfigurationError, MissingDependency
from perdure.storage.flow import arun, run
from perdure.stores.model_calls import Call, ModelFunction, Threads, Vectors, vectors_of

Vector = NDArray[np.float32]
_Batches = Generator[list[str], Vectors, Vectors]

TIMEOUT_S = 60.0
BATCH_SIZE = 256
CACHE_BYTES = 32 << 20
_QUERY_CACHE_BYTES = 1 << 20
_OVERHEAD_BYTES = 250  # of an entry beside its numbers: key, array object, links (measured)


@runtime_checkable
class Embedder(Protocol):
    """The interface of embedders: texts become vectors.

    Attributes:
        name: The model's name; recorded with the vectors, which are comparable only within one
            model.
        dims: The length of a vector; None: not known before the first.

    An embedder may also have `embed_query(text)` and `aembed_query(text)`, for models that treat
    questions differently; `in_process = True`, if it computes in this process, without a time
    limit; and `clear_cache()`.
    """

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def dims(self) -> int | None:
        """The length of a vector."""

    def embed(self, texts: Sequence[str]) -> Any:
        """The texts' vectors, float32[len(texts), dims]."""

    async def aembed(self, texts: Sequence[str]) -> Any:
        """The same, without blocking the event loop."""


EmbedderSpec = Embedder | Embeddings | Callable[[list[str]], Any] | str


def embedder_from(
    spec: EmbedderSpec,
    dims: int | None = None,
    name: str | None = None,
    *,
    batch_size: int = BATCH_SIZE,
    timeout_s: float | None = TIMEOUT_S,
    cache_bytes: int = CACHE_BYTES,
) -> CheckedEmbedder:
    """Make an embedder of an object, a function or a model's name.

    Args:
        spec: An `Embedder`; a langchain-core `Embeddings`; a function, blocking or async, from a
            list of texts to a list of vectors; or `"provider:model"` for langchain's
            `init_embeddings`.
        dims: The length of its vectors; None: that of the first.
        name: The model's name, recorded with the vectors; None: that of `spec`. Give a function a
            name if its model may change.
        batch_size: How many texts one call embeds.
        timeout_s: The time limit of one batch; None: no limit. An embedder that computes in this
            process (`in_process`) has none.
        cache_bytes: Memory for vectors of texts that were embedded lately.

    Raises:
        ConfigurationError: An argument is none of these, or `dims` is not the embedder's own.
        MissingDependency: A string was given, and langchain or the provider is not installed.
    """
    _check_options(dims, name, batch_size, timeout_s, cache_bytes)
    if isinstance(spec, CheckedEmbedder) and name in (None, spec.name):
        _check_dims(spec.dims, dims)
        return spec
    name = name or _name_of(spec)
    model = _from_string(spec) if isinstance(spec, str) else spec
    own_dims = getattr(model, "dims", None) if isinstance(model, Embedder) else None
    _check_dims(own_dims, dims)
    calls, acalls = _calls(model)
    here = getattr(model, "in_process", False) is True
    threads = Threads()
    documents, queries = (
        ModelFunction(
            name, call, acall, threads, timeout_s=None if here else timeout_s, trusted=here
        )
        for call, acall in zip(calls, acalls, strict=True)
    )
    return CheckedEmbedder(
        name,
        dims or own_dims,
        documents,
        queries,
        batch_size=batch_size,
        cache_bytes=cache_bytes,
        on_clear=getattr(model, "clear_cache", None),
    )


def _calls(model: Any) -> tuple[tuple[Call, Call], tuple[Call | None, Call | None]]:
    """A model's functions for documents and for queries, then the async ones."""
    if isinstance(model, Embeddings):
        # the inherited async forms go to the event loop's own threads, where a call that hangs
        # would keep the process from ending: ours are used instead
        own = type(model).aembed_documents is not Embeddings.aembed_documents
        own_query = type(model).aembed_query is not Embeddings.aembed_query
        return (
            (model.embed_documents, _of_one(model.embed_query)),
            (
                model.aembed_documents if own else None,
                _aof_one(model.aembed_query) if own_query else None,
            ),
        )
    if isinstance(model, Embedder):
        query, aquery = getattr(model, "embed_query", None), getattr(model, "aembed_query", None)
        if query is None:
            return (model.embed, model.embed), (model.aembed, model.aembed)
        return (model.embed, _of_one(query)), (model.aembed, _aof_one(aquery) if aquery else None)
    if callable(model):
        is_async = inspect.iscoroutinefunction(model) or inspect.iscoroutinefunction(
            type(model).__call__
        )
        acall = model if is_async else None
        return (model, model), (acall, acall)
    raise ConfigurationError(
        f"an embedder cannot be made of {model!r}: expected an Embedder, a langchain Embeddings, a "
        "function from texts to vectors, or 'provider:model'"
    )


def _of_one(embed_query: Callable[[str], Any]) -> Call:
    return lambda texts: [embed_query(texts[0])]


def _aof_one(aembed_query: Callable[[str], Any]) -> Call:
    async def call(texts: list[str]) -> list[Any]:
        return [await aembed_query(texts[0])]

    return call


def _from_string(spec: str) -> Embeddings:
    if importlib.util.find_spec("langchain") is None:
        raise MissingDependency(
            f"the embedder {spec!r} is made by langchain, which is not installed: "
            "pip install langchain, and the provider's package"
        )
    try:
        return ensure_embeddings(spec)
    except ImportError as exc:
        raise MissingDependency(f"the embedder {spec!r} needs another package: {exc}") from exc
    except Exception as exc:  # a provider's own complaints: a key that is missing, say
        raise ConfigurationError(f"langchain cannot make the embedder {spec!r}: {exc}") from exc


def _name_of(spec: Any) -> str:
    """The name that a model has for itself."""
    if isinstance(spec, str):
        return spec
    if isinstance(spec, Embedder) and not isinstance(spec, Embeddings):
        return spec.name
    named = spec if hasattr(spec, "__qualname__") else type(spec)
    name = f"{named.__module__}.{named.__qualname__}"
    for attribute in ("model", "model_name", "model_id"):
        model = getattr(spec, attribute, None)
        if isinstance(model, str):
            return f"{name}:{model}"
    return name


def _check_dims(own: int | None, dims: int | None) -> None:
    if own is not None and dims is not None and own != dims:
        raise ConfigurationError(
            f"dims={dims!r} is given for an embedder whose vectors have {own}: leave it out"
        )


def _check_options(
    dims: int | None, name: str | None, batch_size: int, timeout_s: float | None, cache_bytes: int
) -> None:
    if name is not None and not isinstance(name, str):
        raise ConfigurationError(f"name={name!r}: expected the model's name as text, or None")
    for option, value, least in (
        ("dims", dims, 1),
        ("batch_size", batch_size, 1),
        ("cache_bytes", cache_bytes, 0),
    ):
        if value is not None and (type(value) is not int or value < least):
            raise ConfigurationError(f"{option}={value!r}: expected a whole number from {least}")
    if timeout_s is not None and not timeout_s > 0:
        raise ConfigurationError(f"timeout_s={timeout_s!r}: expected seconds, more than 0, or None")


class CheckedEmbedder:
    """An embedder whose answers are vectors of length 1, or an error that says what they were.

    Texts go to the model in batches, each text once; vectors are kept by the content of their text,
    those of queries apart. Threads and event loops may share it. `embedder_from` makes one.
    """

    def __init__(
        self,
        name: str,
        dims: int | None,
        documents: ModelFunction,
        queries: ModelFunction,
        *,
        batch_size: int = BATCH_SIZE,
        cache_bytes: int = CACHE_BYTES,
        on_clear: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self._dims = dims
        self._dims_lock = threading.Lock()
        self._functions = documents, queries
        self._batch_size = batch_size
        self._caches = VectorCache(cache_bytes), VectorCache(min(cache_bytes, _QUERY_CACHE_BYTES))
        self._on_clear = on_clear

    @property
    def dims(self) -> int | None:
        """The length of a vector; None: not known before the first."""
        return self._dims

    def embed(self, texts: Sequence[str]) -> Vectors:
        """The vectors of texts to be stored.

        Raises:
            EmbeddingFailed: The model raised, took too long, or did not return that. What it
                answered for the batches before is kept, so that another try is cheaper.
            ConfigurationError: `texts` is not a list of strings.
        """
        return self._run(texts, query=False)

    async def aembed(self, texts: Sequence[str]) -> Vectors:
        """The same from a coroutine."""
        return await self._arun(texts, query=False)

    def embed_query(self, text: str) -> Vector:
        """The vector of a query: float32[dims]; raises as `embed` does."""
        vector: Vector = self._run([text], query=True)[0]
        return vector

    async def aembed_query(self, text: str) -> Vector:
        """The same from a coroutine."""
        vector: Vector = (await self._arun([text], query=True))[0]
        return vector

    def clear_cache(self) -> None:
        """Drop every vector that is kept, as an erasure must: a vector tells of its text."""
        for cache in self._caches:
            cache.clear()
        if self._on_clear is not None:
            self._on_clear()

    def _flow(self, texts: list[str], *, query: bool) -> _Batches:
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

    def _run(self, texts: Sequence[str], *, query: bool) -> Vectors:
        call, flow = self._functions[query].call, self._flow(_listed(texts), query=query)
        return run(flow, lambda batch: call(batch, partial(self._checked, len(batch))))

    async def _arun(self, texts: Sequence[str], *, query: bool) -> Vectors:
        call, flow = self._functions[query].acall, self._flow(_listed(texts), query=query)
        return await arun(flow, lambda batch: call(batch, partial(self._checked, len(batch))))

    def _checked(self, count: int, answer: Any) -> Vectors:
        if self._dims is not None:
            return vectors_of(answer, count, self._dims, self.name)
        with self._dims_lock:  # two threads may bring a first answer
            vectors = vectors_of(answer, count, self._dims, self.name)
            self._dims = vectors.shape[1]
        return vectors


def _listed(texts: Sequence[str]) -> list[str]:
    listed = [texts] if isinstance(texts, str) else list(texts)
    if isinstance(texts, str) or not all(isinstance(text, str) for text in listed):
        raise ConfigurationError(f"cannot embed {texts!r}: expected a list of strings")
    return listed


def digest(text: str) -> bytes:
    """The key of a text: 16 bytes of BLAKE2b. Lone surrogates, which JSON can hold, count."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class VectorCache:
    """Vectors by digest; threads may share it."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._vectors: OrderedDict[bytes, Vector] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """The size of the cache, overhead included."""
        return self._bytes

    def found(self, keys: Iterable[bytes]) -> dict[bytes, Vector]:
        """Those of some keys that are known; they count as used just now."""
        known = {}
        with self._lock:
            for key in keys:
                vector = self._vectors.get(key)
                if vector is not None:
                    self._vectors.move_to_end(key)
                    known[key] = vector
        return known

    def keep(self, vectors: Iterable[tuple[bytes, Vector]]) -> None:
        """Keep copies, so that no row holds the array it is a part of."""
        with self._lock:
            for key, vector in vectors:
                size = vector.nbytes + _OVERHEAD_BYTES
                if key in self._vectors or size > self._most:
                    continue
                self._vectors[key] = vector.copy()
                self._bytes += size
                while self._bytes > self._most:
                    _, oldest = self._vectors.popitem(last=False)
                    self._bytes -= oldest.nbytes + _OVERHEAD_BYTES

    def clear(self) -> None:
        """Drop all."""
        with self._lock:
            self._vectors.clear()
            self._bytes = 0
